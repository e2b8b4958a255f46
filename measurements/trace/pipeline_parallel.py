"""Pipeline parallelism over imaginary ranks: one of PyTorch's stages at a time, under its 1F1B schedule.

Nothing is sent; the stage's own buffers, as they are, count as received.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, schedules
from torch.distributed.pipelining._utils import InferenceMode

from . import fsdp
from .case import Case
from .ledger import Ledger


def _nothing(ops: Any, desc: str | None = None) -> list[Any]:
    return []


def _known(self: Any, stages: Any, *args: Any) -> None:
    """Skips the exchange of shapes: they are given, so no stage asks its neighbours for them."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


# Schedules save and restore the device's random state while they ask for shapes.
torch.cuda.get_rng_state = lambda *args: torch.empty(0)  # type: ignore[assignment]
torch.cuda.set_rng_state = lambda *args: None  # type: ignore[assignment]
schedules._batch_p2p = _nothing  # type: ignore[assignment]
Schedule1F1B._warmup_p2p = _known  # type: ignore[method-assign]


def layers_of(layers: int, stages: int) -> list[int]:
    """The number of layers of each stage; embedding and head count as one each.

    As torchtitan divides them (`distributed/pipeline_parallel.py`, `generate_llm_fqn_per_model_part`).
    """
    each, over = divmod(layers + 2, stages)
    counts = [each + (stage < over) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return counts


def cut(case: Case, model: Any) -> None:
    """Remove from a causal LM what other stages hold."""
    if model.config.tie_word_embeddings:
        raise ValueError("pipeline_parallel: a tied embedding lies on the first stage and on the last")
    counts = layers_of(len(model.model.layers), case.pp)
    begins = sum(counts[: case.stage])
    model.model.layers = model.model.layers[begins : begins + counts[case.stage]]
    model.config.num_hidden_layers = counts[case.stage]
    if case.stage > 0:
        model.model.embed_tokens = None
    if case.stage < case.pp - 1:
        model.model.norm = torch.nn.Identity()
        model.lm_head = None


class Part(torch.nn.Module):
    """A stage's module: tokens or hidden states in, hidden states or logits out."""

    def __init__(self, case: Case, model: Any) -> None:
        super().__init__()
        self.case, self.model = case, model
        self.config = model.config

    def gradient_checkpointing_enable(self, options: dict[str, Any]) -> None:
        """Pass the call on to the layers."""
        self.model.gradient_checkpointing_enable(options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, tokens) or (rows, tokens, width) to (rows, tokens, width) or (rows, tokens, vocabulary)."""
        given = {"inputs_embeds" if self.case.stage else "input_ids": x}
        if self.case.sequence_parallel or self.case.cp > 1:  # the model counts its part of the sequence alone
            given["position_ids"] = torch.arange(self.case.seq // self.case.cp, device=x.device)[None]
        hidden = self.model.model(**given, use_cache=False).last_hidden_state
        return hidden if self.model.lm_head is None else self.model.lm_head(hidden)


def inputs(case: Case) -> dict[str, torch.Tensor]:
    """The tokens of the first stage and the labels of the last, of all micro batches together."""
    ids = torch.zeros(case.mb * case.grad_accum, case.seq, dtype=torch.long, device="cuda")
    named = {0: "input_ids", case.pp - 1: "target"}
    return {named[case.stage]: ids} if case.stage in named else {}


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


class Stage(PipelineStage):
    """A stage that tells the ledger what it runs."""

    ledger: Ledger

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run one micro batch forward."""
        self.ledger.phase = "forward"
        return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """Run one micro batch backward."""
        self.ledger.phase = "backward"
        self.ledger.note("backward")
        super().backward_one_chunk(*args, **kwargs)


class Schedule:
    """The 1F1B schedule of a case's stage."""

    def __init__(self, case: Case, model: torch.nn.Module, ledger: Ledger) -> None:
        seen = case.seq // case.cp
        tokens = seen // case.tp if case.sequence_parallel else seen
        dtype = torch.float32 if case.prec == "fp32" else torch.bfloat16
        hidden = torch.empty(case.mb, tokens, model.config.hidden_size, dtype=dtype, device="meta", requires_grad=True)
        ids = torch.empty(case.mb, seen, dtype=torch.long, device="meta")
        group = fsdp.mesh_of(case)["pp"].get_group()
        stage = Stage(
            model, case.stage, case.pp, torch.device("cuda"), hidden if case.stage else ids, hidden, group=group
        )
        stage.ledger = ledger
        self.runs = Schedule1F1B(stage, case.grad_accum, loss_fn=_loss)

    def step(self, input_ids: torch.Tensor | None = None, target: torch.Tensor | None = None) -> None:
        """Run all micro batches; the last stage keeps no logits of them for the caller, as torchtitan asks."""
        self.runs.step(*([] if input_ids is None else [input_ids]), target=target, return_outputs=False)
