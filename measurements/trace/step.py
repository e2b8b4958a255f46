"""One training step of a real Transformers model on fake tensors: the model, the optimizer, the losses."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.modules import module as hooks

from measurements.training import Critic, divergence, divergence_in_turn, logprobs, pair_loss, policy_loss, value_loss

from . import attention, context_parallel, fsdp, fsdp1, images, models, pipeline_parallel
from .case import Case, model_config
from .ledger import Ledger
from .models import DEVICE

BETA = 0.1
LOGPROB = {"fp32": "log-softmax-fp32", "trl": "selective", "lse": "logsumexp"}
# inputs of the model itself
FORWARD = (
    "input_ids", "position_ids", "attention_mask", "labels", "shift_labels", "pixel_values", "image_grid_thw",
    "image_sizes", "batch_num_images", "pixel_values_videos",
    "token_type_ids", "image_position_ids", "mm_token_type_ids", "aspect_ratio_ids", "aspect_ratio_mask",
    "cross_attention_mask",
)  # fmt: skip


def fake_mode() -> FakeTensorMode:
    """The mode for fake tensors, which have shapes and storages but no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _optimizer(case: Case, model: torch.nn.Module) -> torch.optim.Optimizer | None:
    # one call of the optimizer accepts only tensors of one mesh
    meshes: dict[Any, list[torch.Tensor]] = {}
    for p in model.parameters():
        if p.requires_grad:
            meshes.setdefault(getattr(p, "device_mesh", None), []).append(p)
    parameters = [{"params": group} for group in meshes.values()]
    ways: dict[str, Any] = {
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "single": {"foreach": False, "fused": False},
    }
    if case.optim == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-5, **ways[case.optim_impl])
    if case.optim == "sgd":
        return torch.optim.SGD(parameters, lr=1e-5, **ways[case.optim_impl])
    return None


class Step:
    """The training step of a case; everything it needs is resident once it is built."""

    def __init__(self, case: Case, ledger: Ledger) -> None:
        self.case, self.ledger = case, ledger
        model = models.load(case)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.model = models.prepare(case, model)
        self.trainable = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self.reference: Any = None
        if case.task == "dpo" and case.ref == "copy":
            self.reference = models.load(case).eval().requires_grad_(False)
            if case.ckpt != "none":
                self.reference.gradient_checkpointing_enable({"use_reentrant": False})
        if case.task == "gkd":
            other = replace(case, model=case.teacher, config=model_config(case.teacher)) if case.teacher else case
            self.reference = models.load(other).eval().requires_grad_(False)
        if self.reference is not None:
            self.reference = self._sharded(self.reference)
        self.model = self._sharded(self.model)
        self.optimizer = _optimizer(case, self.model)
        self.schedule = pipeline_parallel.Schedule(case, self.model, ledger) if case.pp > 1 else None
        if case.zero:
            self._partition()
        self.inputs = self._inputs()
        self._label()
        self._watch()

    def _sharded(self, model: Any) -> Any:
        """The model in Accelerate's autocast, sharded over the case's ranks."""
        models.wrap(self.case, model)
        if self.case.fsdp:
            return fsdp1.shard(self.case, model) if self.case.flat else fsdp.shard(self.case, model)
        return model

    def _partition(self) -> None:
        """Hand the models to DeepSpeed; below stage 3 a model that is not trained stays whole."""
        from . import zero  # takes seconds to import

        self.model = zero.engine(self.case, self.model, self.optimizer)
        if self.reference is not None and self.case.zero == 3:
            self.reference = zero.engine(self.case, self.reference, None)

    def _inputs(self) -> dict[str, torch.Tensor]:
        case = self.case
        if case.pp > 1:
            return pipeline_parallel.inputs(case)
        rows = case.mb * (2 if case.task in ("rm", "dpo", "orpo") else 1)

        def ids() -> torch.Tensor:
            return torch.zeros(rows, case.seq, dtype=torch.long, device=DEVICE)

        def values() -> torch.Tensor:
            return torch.zeros(rows, case.resp or case.seq // 2, device=DEVICE)

        inputs = {"input_ids": ids()}
        if case.images:
            images.take_helpers(case, self.model)
            inputs.update(images.inputs(case, self.model, rows))
            self.ledger.picked = images.tokens(case, self.model, rows)
        if case.sequence_parallel or case.cp > 1:  # the model counts its part of the sequence alone
            inputs["position_ids"] = ids()[:1]
        if case.attn == "sdpa-mask":
            inputs["attention_mask"] = torch.ones(rows, 1, case.seq, case.seq, dtype=torch.bool, device=DEVICE)
        if case.task == "sft":
            inputs["labels"] = ids()
            if case.cp > 1:  # labels are shifted before they are cut
                inputs["shift_labels"] = ids()
        elif case.task in ("ppo-actor", "ppo-critic"):
            inputs["old"], inputs["target"] = values(), values()
        elif case.task == "dpo" and case.ref == "none":
            inputs["ref_logps"] = torch.zeros(rows, device=DEVICE)
        return inputs

    def _label(self) -> None:
        ledger = self.ledger
        for role, model in (("ref_", self.reference), ("", self.model)):
            if model is not None:
                for parameter in model.parameters():
                    # ZeRO-3 keeps its shard beside the empty parameter
                    ledger.mark(getattr(parameter, "ds_tensor", parameter), f"{role}params")
                for buffer in model.buffers():
                    ledger.mark(buffer, "buffers")
                for module in model.modules():
                    for scale in getattr(module, "scales", ()):  # of 4-bit weights
                        ledger.mark(scale, f"{role}params")
        for tensor in self.inputs.values():
            if isinstance(tensor, torch.Tensor):
                ledger.mark(tensor, "inputs")

    def _label_states(self) -> None:
        for state in self.optimizer.state.values() if self.optimizer else ():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self.ledger.mark(value, "optim")

    def _watch(self) -> None:
        """Tell the ledger which module runs, and when a gradient is complete."""
        names = {id(module): name for name, module in self.model.named_modules()}
        stack = self.ledger.modules

        def enter(module: torch.nn.Module, args: Any) -> None:
            stack.append(names.get(id(module)) or (stack[-1] if stack else ""))

        def leave(module: torch.nn.Module, args: Any, out: Any) -> None:
            stack.pop()

        self._hooks = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        ]
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._complete(name))

    def _complete(self, name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self.ledger.mark(parameter.grad, "grads", name)

        return hook

    # -- running ------------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Make the optimizer's states, as a first step would, and leave no gradients."""
        case = self.case
        if case.fsdp or case.zero or case.tp > 1 or case.cp > 1:
            # they set themselves up in their first step
            self.run()
            self.ledger.phase = "setup"
        if self.optimizer is None:
            return
        unread = images.unread(case, self.model)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None if id(parameter) in unread else torch.empty_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._label_states()

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        if self.case.prec == "autocast" and not self.case.trainer:
            with torch.autocast("cuda", torch.bfloat16):
                yield
        else:
            yield

    def _forward(self, model: torch.nn.Module, **extra: Any) -> Any:
        passed = {k: v for k, v in self.inputs.items() if k in FORWARD}
        if isinstance(getattr(model, "module", model), Critic):
            return model(passed["input_ids"])
        outputs = model(**passed, **extra, use_cache=self.case.use_cache)
        if self.case.upcast_outputs:
            for key in list(outputs):
                if torch.is_floating_point(outputs[key]):
                    outputs[key] = outputs[key].float()
        return outputs

    def _logprobs(self, model: torch.nn.Module) -> torch.Tensor:
        """Log-probabilities, (rows, tokens): of every next token, or for PPO of the response's."""
        case, ids = self.case, self.inputs["input_ids"]
        tokens = case.resp or (case.seq // 2 if case.task == "ppo-actor" else case.seq - 1)
        extra = {"logits_to_keep": tokens + 1} if case.logits_to_keep else {}
        logits = self._forward(model, **extra).logits
        return logprobs(logits[:, -tokens - 1 : -1], ids[:, -tokens:], LOGPROB[case.logprob])

    def _odds(self) -> torch.Tensor:
        """ORPO's loss (trl 1.16 `experimental/orpo/orpo_trainer.py:745-810`): a likelihood, and a ratio of odds."""
        case, ids = self.case, self.inputs["input_ids"]
        logits = self._forward(self.model).logits
        chosen = logits[: case.mb][..., :-1, :].contiguous()
        targets = ids[: case.mb][..., 1:].contiguous()
        likelihood = torch.nn.CrossEntropyLoss()(chosen.view(-1, chosen.shape[-1]), targets.view(-1))
        del chosen
        logps = logprobs(logits[:, :-1, :], ids[:, 1:], LOGPROB[case.logprob]).mean(-1)
        return likelihood + pair_loss(logps, case.mb)

    def _divergence(self) -> torch.Tensor:
        """GKD's loss, of every position whose next token is there; both models' outputs are variables meanwhile."""
        student = self._forward(self.model)
        with torch.no_grad():
            teacher = self._forward(self.reference)
        if self.case.turn:
            return divergence_in_turn(student.logits, teacher.logits, self.case.turn)
        return divergence(student.logits[:, :-1, :], teacher.logits[:, :-1, :])

    def _loss(self) -> tuple[torch.Tensor, Any]:
        """The loss, and the outputs that the caller keeps."""
        case, inputs = self.case, self.inputs
        if case.task == "sft":
            outputs = self._forward(self.model)
            return outputs.loss, outputs if case.hold_outputs else None
        if case.task == "rm":
            rewards = self._forward(self.model).logits.squeeze(-1)
            return pair_loss(rewards, case.mb), None
        if case.task == "orpo":
            return self._odds(), None
        if case.task == "gkd":
            return self._divergence(), None
        if case.task == "ppo-critic":
            old, target = inputs["old"], inputs["target"]
            values = self._forward(self.model)[:, -old.shape[1] :].float()
            return value_loss(values, old, target), None
        if case.task == "ppo-actor":
            return policy_loss(self._logprobs(self.model), inputs["old"], inputs["target"]), None
        chosen = self._logprobs(self.model).sum(-1)
        with torch.no_grad():
            if case.ref == "none":
                reference = inputs["ref_logps"]
            elif case.ref == "adapter":
                with self.model.disable_adapter():
                    reference = self._logprobs(self.model).sum(-1)
            else:
                reference = self._logprobs(self.reference).sum(-1)
        return pair_loss(chosen - reference, case.mb, BETA), None

    def run(self) -> None:
        """The step: forward and backward of each micro batch, the optimizer."""
        with contextlib.ExitStack() as around:
            if self.case.sequence_parallel:
                around.enter_context(loss_parallel())
            if self.case.cp > 1:
                around.enter_context(context_parallel.sharded(self.case, self.inputs))
            self._run()

    def _micro_batch(self) -> None:
        ledger, case = self.ledger, self.case
        with self._precision():
            loss, _held = self._loss()
        ledger.phase = "backward"
        ledger.note("backward")
        if case.zero:
            self.model.backward(loss)
        else:
            (loss / case.grad_accum if case.grad_accum > 1 else loss).backward()

    def _accumulate(self) -> None:
        ledger, case = self.ledger, self.case
        no_sync = self.model.no_sync if case.flat else partial(fsdp.no_sync, self.model)
        for left in reversed(range(case.grad_accum)):
            ledger.phase = "forward"
            with no_sync() if case.keeps_whole and left else contextlib.nullcontext():
                self._micro_batch()
            if case.zero:  # DeepSpeed's engine counts the micro batches
                ledger.phase = "optim"
                ledger.note("optim")
                self.model.step()

    def _run(self) -> None:
        ledger, case = self.ledger, self.case
        attention.calls.clear()
        ledger.phase = "forward"
        if case.task == "logprob":
            with torch.no_grad(), self._precision():
                self._logprobs(self.model)
            return
        if self.schedule:
            self.schedule.step(**self.inputs)
        else:
            self._accumulate()
        if case.fsdp:  # FSDP's gradients do not pass through autograd's accumulation
            for name, parameter in self.model.named_parameters():
                self._complete(name)(parameter)
        if case.zero:
            return
        ledger.phase = "optim"
        ledger.note("optim")
        if self.optimizer is not None:
            if case.clip:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
