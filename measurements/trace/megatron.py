"""One training step of Megatron-core on fake tensors: its model, its DistributedDataParallel, its optimizer.

The layers are those of Transformer Engine, over the stand-ins of `te_kernels`; ranks are imaginary. Queries that would
need a real card or another rank are answered here, experts are called equally often, and what the fuser compiles is one
kernel. Read in Megatron-core 0.16.1.
"""

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from . import fsdp, step, te_kernels
from .case import MEGATRON, Case
from .ledger import Ledger
from .megatron_model import fields, settings, vocabulary
from .models import DEVICE

LEDGERS: list[Ledger] = []  # the one of the case that runs


def _answer(value: object) -> Any:
    return lambda *args, **kwargs: value


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that `torch.compile` makes one kernel of: only what it returns takes memory.

    One that autograd sees, outside of a function with a backward of its own, is left as it is.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        seen = torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
        if seen or not LEDGERS or LEDGERS[-1].within:
            return function(*args, **kwargs)
        with LEDGERS[-1].fused(function.__name__) as returns:
            found = function(*args, **kwargs)
            returns(found)
            return found

    return run


def _card() -> None:
    """A Hopper card that is never asked to compute."""
    card = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="H100", total_memory=80 << 30)
    torch.cuda.get_device_properties = _answer(card)  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = _answer(False)  # type: ignore[assignment]
    torch.cuda.default_stream = lambda *args: fsdp.Idle()  # type: ignore[assignment,return-value]
    for name in ("synchronize", "empty_cache", "manual_seed", "get_rng_state", "set_rng_state"):
        setattr(torch.cuda, name, _answer(None))
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _answer(None))


fsdp.ranks(1)
_card()
sys.path.append(str(MEGATRON))
te_kernels.stand_in()
_compile, torch.compile = torch.compile, compiled  # type: ignore[assignment]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
        param_and_grad_buffer,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
    from transformer_engine.pytorch import GroupedLinear
    from transformer_engine.pytorch.attention.dot_product_attention import utils as attention
    from transformer_engine.pytorch.cpp_extensions import gemm
    from transformer_engine.pytorch.module import base
torch.compile = _compile
warnings.filterwarnings("ignore", module=r"megatron|transformer_engine|torch\.distributed")


def _same_elsewhere(found: list[Any], own: Any, *args: Any) -> None:
    """What other ranks would send: the same."""
    found[:] = [own] * len(found)


def _nothing() -> torch.Tensor:
    """A workspace of cuBLAS, which a trace leaves out."""
    return torch.empty(0, dtype=torch.uint8, device=DEVICE)


def _pretend() -> None:
    """Answers for random numbers, for the choice of attention, and for what is not on the host."""
    dist.all_gather_object = _same_elsewhere
    # collectives joined to one have no kernel for fake tensors, and make nothing
    param_and_grad_buffer._coalescing_manager = lambda *args, **kwargs: contextlib.nullcontext(fsdp.Idle())
    random.CudaRNGStatesTracker.fork = _answer(contextlib.nullcontext())
    random._get_cuda_rng_state = random._set_cuda_rng_state = _answer(None)
    # cuDNN's kernel, which "auto" takes on Hopper
    attention.get_attention_backend = _answer((False, None, True, 1, False, [False, True, False]))
    gemm.get_cublas_workspace = lambda device, ub, grouped: [_nothing()] if grouped else _nothing()
    grouped = GroupedLinear.forward

    def forward(self: Any, x: torch.Tensor, splits: list[int], *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():  # on the host, where they can be read
            counts = torch.tensor(splits, dtype=torch.int64)
        return grouped(self, x, counts, *args, **kwargs)

    GroupedLinear.forward = forward


_pretend()


class Step(step.Step):
    """The training step of a case; everything it needs is resident once it has run."""

    def __init__(self, case: Case, ledger: Ledger) -> None:
        self.case, self.ledger = case, ledger
        LEDGERS[:] = [ledger]
        _become(case)
        config = self._config()
        self.parallel = self._parallel(config)
        self.model = self.parallel.module
        self.parameters = self.trainable = sum(p.numel() for p in self.model.parameters())
        self.reference, self.schedule = None, None
        own = OptimizerConfig(
            optimizer="adam", lr=1e-5, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True,
            clip_grad=1.0,
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(own, [self.parallel], use_gloo_process_groups=False)
        self.inputs = self._inputs()
        self._label()
        self._watch()

    def _config(self) -> Any:
        """The model's settings, and what the training loop adds to them (`megatron/training/training.py`)."""
        given = settings(self.case)
        latent = given.get("multi_latent_attention", False)
        config = (MLATransformerConfig if latent else TransformerConfig)(**given)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = None
        return config

    def _parallel(self, config: Any) -> Any:
        c = fields(self.case)
        if config.num_moe_experts:
            _even(self.case, config)
            self.ledger.picked = _routed(self.case, config)
        with torch.device(DEVICE), _available():
            model = GPTModel(
                config,
                get_gpt_decoder_block_spec(config, use_transformer_engine=True),
                vocab_size=vocabulary(self.case),
                max_sequence_length=self.case.seq,
                position_embedding_type="rope",
                share_embeddings_and_output_weights=bool(c.get("tie_word_embeddings")),
                rotary_base=10_000,
            )
        model = model.to(torch.bfloat16)
        for module in model.modules():
            if isinstance(dispatcher := getattr(module, "token_dispatcher", None), MoEAlltoAllTokenDispatcher):
                _orders(dispatcher)
        settings_of_buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        return DistributedDataParallel(config, settings_of_buffers, model)

    def _inputs(self) -> dict[str, torch.Tensor]:
        """A micro batch of Megatron-LM's data loader; the mask is a byte for each pair of positions."""
        rows, seq = self.case.mb, self.case.seq

        def whole() -> torch.Tensor:
            return torch.zeros(rows, seq, dtype=torch.long, device=DEVICE)

        return {
            "input_ids": whole(),
            "labels": whole(),
            "position_ids": whole(),
            "loss_mask": torch.ones(rows, seq, device=DEVICE),
            "attention_mask": torch.ones(rows, 1, seq, seq, dtype=torch.bool, device=DEVICE),
        }

    def _label_states(self) -> None:
        for optimizer in self.optimizer.chained_optimizers:
            for group in optimizer.shard_fp32_from_float16_groups:
                for tensor in group:
                    self.ledger.mark(tensor, "optim")
            for state in optimizer.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        self.ledger.mark(value, "optim")
        for buffer in (*self.parallel.buffers, *self.parallel.expert_parallel_buffers):
            self.ledger.mark(buffer.grad_data, "grads")

    def warm_up(self) -> None:
        """A first step, which makes the moments, and what modules keep until their next forward."""
        self.run()
        self.ledger.phase = "setup"
        self._label_states()

    def _forward_step(self, batches: Any, model: Any) -> Any:
        self.ledger.phase = "forward"
        inputs = self.inputs
        output = model(
            inputs["input_ids"], inputs["position_ids"], inputs["attention_mask"], labels=inputs["labels"],
            loss_mask=inputs["loss_mask"],
        )  # fmt: skip
        return output, self._loss_of

    def _loss_of(self, output: torch.Tensor) -> Any:
        """`loss_func` of Megatron-LM's `pretrain_gpt.py`: a sum, the number of its tokens, and both to report."""
        mask = self.inputs["loss_mask"].view(-1).float()
        loss = torch.sum(output.view(-1).float() * mask)
        tokens = mask.sum().clone().detach().to(torch.int)
        report = torch.cat([loss.clone().detach().view(1), tokens.view(1)])
        self.ledger.phase = "backward"
        self.ledger.note("backward")
        return loss, tokens, {"lm loss": report}

    def _run(self) -> None:
        """A step of `train_step`: buffers of gradients are zeros again, micro batches, the optimizer."""
        ledger, case = self.ledger, self.case
        ledger.phase = "forward"
        self.parallel.zero_grad_buffer()
        self.optimizer.zero_grad()
        forward_backward_no_pipelining(
            forward_step_func=self._forward_step, data_iterator=None, model=self.parallel,
            num_microbatches=case.grad_accum, seq_length=case.seq, micro_batch_size=case.mb,
        )  # fmt: skip
        ledger.phase = "optim"
        ledger.note("optim")
        self.optimizer.step()


@contextlib.contextmanager
def _available() -> Iterator[None]:
    """A card counts as available while modules are built, as Transformer Engine's ask for one then."""
    before, torch.cuda.is_available = torch.cuda.is_available, _answer(True)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.cuda.is_available = before  # type: ignore[assignment]


def _become(case: Case) -> None:
    """Rank 0 of the case's ranks, whose groups Megatron-core makes; what modules keep of an earlier case is gone."""
    parallel_state.destroy_model_parallel()
    base._dummy_wgrads.clear()
    moe_utils._MOE_LAYER_WISE_LOGGING_TRACKER.clear()
    fsdp.ranks(case.ranks)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        context_parallel_size=case.cp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        create_gloo_process_groups=False,
    )


def _routed(case: Case, config: Any) -> int:
    """The rows that a rank sends to experts: each of its tokens, so many times."""
    return case.mb * case.seq // (case.tp if case.sequence_parallel else 1) * int(config.moe_router_topk)


def _even(case: Case, config: Any) -> None:
    """Every expert is called equally often: the counts that the host asks for."""
    experts = config.num_moe_experts
    local = experts // case.ep
    each = _routed(case, config) // experts  # of one rank's tokens
    of_shape = {(local,): each * case.ep * case.etp, (case.ep,): each * local, (case.etp,): each * local * case.ep}

    def moved(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        shape = tuple(tensor.shape)
        return np.full(shape, each if len(shape) == 2 else of_shape[shape])

    token_dispatcher.maybe_move_tensor_to_cpu = moved


def _orders(dispatcher: MoEAlltoAllTokenDispatcher) -> None:
    """The orders in which received rows are sorted by expert and back, on the host, where they can be read."""
    chunks = np.arange(dispatcher.num_experts * dispatcher.tp_size)
    dispatcher.sort_input_by_local_experts = chunks.reshape(-1, dispatcher.num_local_experts).T.ravel()
    dispatcher.restore_output_by_local_experts = chunks.reshape(dispatcher.num_local_experts, -1).T.ravel()
