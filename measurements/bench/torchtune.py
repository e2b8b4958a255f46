"""torchtune's own modules as its recipes for one GPU step them: framework `torch` with trainer `torchtune` of `calc`.

The calls and their order are those of `recipes/full_finetune_single_device.py` and `lora_finetune_single_device.py` of
0.6.1. Weights are random, as the modules make them, and batches are as its collators leave them, of rows that are full.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from . import model as models
from .meter import Meter
from .steps import timed

ATTENTION = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}  # its names
MLP = {"gate_proj", "up_proj", "down_proj"}  # adapted together, or not at all


class Job:
    """A scenario's model, optimizer, loss and batch on a device, and the step that trains it; as `steps.Job`."""

    def __init__(
        self, s: Mapping[str, Any], configs: Mapping[str, Mapping[str, Any]], device: torch.device, meter: Meter
    ) -> None:
        for library in ("torchao", "torchtune"):
            if not find_spec(library):
                raise models.NotRun(f"not run: {library} missing")
        # not where this module is read: torchtune asks for the GPU's capability, which takes a CUDA context
        from torchtune import training

        self.s, self.device, self.meter, self.training = s, device, meter, training
        self.vocabulary = configs["model"]["vocab_size"]
        with meter.of("load"):
            self.model: Any = _model(configs["model"], s, device)
            self.offloaded = training.get_act_offloading_ctx_manager(self.model, s["offload"]["activations"])
            self.optimizer = self._optimizer()
            self.loss = _criterion(s)
            if s["loss"] == "chunked":
                self.model.set_num_output_chunks(self.loss.num_output_chunks)
            self.ignored = torch.full((s["micro_batch"], 1), self.loss.ignore_index, device=device)

    @property
    def notes(self) -> list[str]:
        """Differences from the scenario: none, as its attention is PyTorch's own."""
        return []

    @property
    def parameters(self) -> int:
        """The number of parameters of the model as it is trained, adapters included."""
        return sum(p.numel() for p in self.model.parameters())

    def _optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of all that is trained; None where each parameter has one, which steps it in backward."""
        if not self.s["optimizer_in_backward"]:
            return models.optimizer(self.model.parameters(), self.s)
        each = {p: models.optimizer([p], self.s) for p in self.model.parameters()}
        self.training.register_optim_in_bwd_hooks(model=self.model, optim_dict=each)
        return None

    def _batch(self) -> dict[str, Any]:
        """Random tokens on the host; packed, with positions and a mask of one sequence a row."""
        from torchtune.data import padded_collate_packed

        rows = torch.randint(1, self.vocabulary, (self.s["micro_batch"], self.s["seq_len"]))
        if not self.s["packing"]:
            return {"tokens": rows, "labels": rows.clone()}
        length = rows.shape[1]
        whole = {"input_pos": torch.arange(length), "seq_lens": torch.tensor([length])}
        packs = [{"tokens": row, "labels": row.clone(), **whole} for row in rows]
        batch: dict[str, Any] = padded_collate_packed(packs)
        return batch

    def _loss(self, batch: dict[str, Any]) -> torch.Tensor:
        """The recipes' `_loss_step`: the mean loss of a batch on the device."""
        labels = batch.pop("labels")
        with self.offloaded:
            logits = self.model(**batch)
        labels = torch.hstack((labels[..., 1:], self.ignored[: labels.shape[0]]))
        if not isinstance(logits, list):
            labels = labels.reshape(-1)
            logits = logits.reshape(-1, logits.size(-1))
        loss: torch.Tensor = self.loss(logits, labels)
        del logits
        return loss

    def step(self) -> None:
        """Forward and backward of each micro batch, then the optimizer, as in the recipes' `train`."""
        from torchtune import utils

        running: Any = 0
        tokens: Any = 0
        for _ in range(self.s["global_batch"] // self.s["micro_batch"]):
            with self.meter.of("forward"):
                batch = self._batch()
                utils.batch_to_device(batch, self.device)
                counted = (batch["labels"] != self.loss.ignore_index).sum()
                tokens += counted
                loss = self._loss(batch) * counted
                running += loss
            with self.meter.of("backward"):
                loss.backward()
        with self.meter.of("step"):
            if self.optimizer is not None:
                self.training.scale_grads(self.model, 1 / tokens)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
            running.item()

    def run(self, steps: int) -> list[float]:
        """The seconds of each step of up to `steps`; fewer if they are long."""
        return timed(self.step, steps, cuda=self.meter.cuda)


def _model(config: Mapping[str, Any], s: Mapping[str, Any], device: torch.device) -> Any:
    """The recipes' `_setup_model`: the model on `device`, compiled and checkpointed as `s` says."""
    from torchtune import modules, training
    from torchtune.modules.peft import get_adapter_params, set_trainable_params

    adapted = s["method"] != "full"
    build, shape = _builder(config, adapted=adapted), {**_shape(config), **(_adapters(s) if adapted else {})}
    with training.set_default_dtype(torch.float32 if s["precision"] == "fp32" else torch.bfloat16), device:
        model = build(**shape)
    if adapted:
        set_trainable_params(model, get_adapter_params(model))
    if s["compile"] in ("model", "model-and-loss"):
        training.compile_model(model, verbose=False)
    if s["checkpointing"] == "full":
        layers = {modules.TransformerSelfAttentionLayer}
        training.set_activation_checkpointing(model, auto_wrap_policy=layers)
    return model


def _builder(config: Mapping[str, Any], *, adapted: bool) -> Any:
    """The builder that torchtune's models of this family call, with adapters or without; NotRun if it has none.

    `llama3_2` has a tied head; `llama3_1` has its own, as both scale their rotary embeddings.
    """
    from torchtune.models import llama3_1, llama3_2, qwen2

    tied = bool(config.get("tie_word_embeddings"))
    scaled = (config.get("rope_scaling") or {}).get("rope_type") == "llama3"
    match config["model_type"], scaled:
        case "llama", True if tied:
            return llama3_2.lora_llama3_2 if adapted else llama3_2.llama3_2
        case "llama", True:
            return llama3_1.lora_llama3_1 if adapted else llama3_1.llama3_1
        case "qwen2", False:
            return qwen2.lora_qwen2 if adapted else qwen2.qwen2
        case family, _:
            raise models.NotRun(f"not run: no builder of torchtune for a {family} with these rotary embeddings")


def _shape(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json's sizes by the builders' names; a head that is tied is named only where it can be either way."""
    shape = {
        "vocab_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "embed_dim": config["hidden_size"],
        "intermediate_dim": config["intermediate_size"],
        "max_seq_len": config["max_position_embeddings"],
        "norm_eps": config["rms_norm_eps"],
        "rope_base": int(config["rope_theta"]),
    }
    if config["model_type"] == "qwen2":
        return {**shape, "tie_word_embeddings": bool(config.get("tie_word_embeddings"))}
    return {**shape, "scale_factor": int(config["rope_scaling"]["factor"])}


def _adapters(s: Mapping[str, Any]) -> dict[str, Any]:
    """The scenario's adapters as the builders name them, and whether the linears beside them are in four bits."""
    lora = s["lora"]
    targets = [*ATTENTION, *MLP] if lora["targets"] == "all-linear" else lora["targets"]
    return {
        "lora_attn_modules": [ATTENTION[name] for name in targets if name in ATTENTION],
        "apply_lora_to_mlp": {*targets} >= MLP,
        "lora_rank": lora["rank"],
        "lora_alpha": 2 * lora["rank"],
        "lora_dropout": lora["dropout"],
        "quantize_base": s["method"] == "qlora",
    }


def _criterion(s: Mapping[str, Any]) -> Any:
    """The loss; compiled, only the cross entropy of a chunk is where logits come in chunks."""
    from torchtune import training
    from torchtune.modules.loss import CEWithChunkedOutputLoss

    loss = CEWithChunkedOutputLoss() if s["loss"] == "chunked" else torch.nn.CrossEntropyLoss()
    return training.compile_loss(loss, verbose=False) if s["compile"] in ("loss", "model-and-loss") else loss
