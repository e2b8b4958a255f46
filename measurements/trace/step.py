"""One training step of a real Transformers model on fake tensors: the model, the optimizer, the losses."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, TaskType, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.modules import module as hooks
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.initialization import no_init_weights

from . import attention, fsdp, tensor_parallel
from .case import Case
from .ledger import Ledger

DEVICE = torch.device("cuda")
FORWARD = ("input_ids", "position_ids", "attention_mask", "labels")  # what the model itself takes


def fake_mode() -> FakeTensorMode:
    """Tensors with shapes and storages and no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


# -- models -----------------------------------------------------------------------------------------------------------


class Critic(torch.nn.Module):
    """The backbone and a scalar head, as PPO's critic."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.v_head = torch.nn.Linear(backbone.config.hidden_size, 1, bias=False, dtype=backbone.dtype)

    def forward(self, input_ids: torch.Tensor) -> Any:
        """Values, (rows, tokens)."""
        return self.v_head(self.backbone(input_ids=input_ids, use_cache=False).last_hidden_state).squeeze(-1)


def _config(case: Case) -> Any:
    given = dict(case.config)
    config = AutoConfig.for_model(given.pop("model_type"), **given)
    config.pad_token_id = 0
    config.use_cache = case.use_cache
    if case.layers:
        config.num_hidden_layers = case.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: case.layers]
        if getattr(config, "mlp_layer_types", None):
            config.mlp_layer_types = config.mlp_layer_types[: case.layers]
    return config


def _load(case: Case) -> Any:
    """The model on the fake device, in the case's weight precision, without adapters."""
    config = _config(case)
    dtype = torch.bfloat16 if case.prec in ("bf16", "mixed") else torch.float32
    classes: dict[str, Any] = {"rm": AutoModelForSequenceClassification, "ppo-critic": AutoModel}
    if case.task == "rm":
        config.num_labels = 1
    # The flash-attn package is not looked for: its place is taken by `attention`.
    implementation = "sdpa" if case.attn.startswith("sdpa") else "eager"
    # tensors are cut before they are there, as `from_pretrained` does it
    with no_init_weights(), torch.device("meta") if case.tp > 1 else DEVICE:
        model = classes.get(case.task, AutoModelForCausalLM).from_config(
            config, dtype=dtype, attn_implementation=implementation
        )
        if case.tp == 1:
            model.tie_weights()
        if case.attn == "fa2":
            model.config._attn_implementation = "flash_attention_2"
        if case.tp > 1:
            tensor_parallel.shard(case, model)
        return Critic(model) if case.task == "ppo-critic" else model


def _linear_names(model: torch.nn.Module) -> list[str]:
    """The names of the linear modules inside the layers: not the heads, routers or fused experts."""
    linear = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return sorted({name.rsplit(".", 1)[-1] for name in linear if ".layers." in name})


def _adapters(case: Case, model: Any) -> Any:
    targets = {"all": _linear_names(model), "qv": ["q_proj", "v_proj"]}[case.lora_targets]
    kinds = {"rm": TaskType.SEQ_CLS, "ppo-critic": TaskType.FEATURE_EXTRACTION}
    lora = LoraConfig(
        r=case.lora_r,
        lora_alpha=2 * case.lora_r,
        lora_dropout=case.lora_dropout,
        target_modules=targets,
        task_type=kinds.get(case.task, TaskType.CAUSAL_LM),
    )
    with DEVICE:
        if isinstance(model, Critic):  # its scalar head is trained whole
            model.backbone = get_peft_model(model.backbone, lora, autocast_adapter_dtype=case.lora_dtype == "fp32")
            return model
        return get_peft_model(model, lora, autocast_adapter_dtype=case.lora_dtype == "fp32")


def _prepare(case: Case, model: Any) -> Any:
    base = model.backbone if isinstance(model, Critic) else model
    if case.ckpt != "none":
        base.gradient_checkpointing_enable({"use_reentrant": case.ckpt == "reentrant"})
    if case.lora_r:
        model = _adapters(case, model)
        if case.ckpt == "reentrant":
            model.enable_input_require_grads()
    if case.train == "head":
        model.requires_grad_(False)
        model.get_output_embeddings().requires_grad_(True)
    return model.train() if case.optim != "none" else model.eval().requires_grad_(False)


def _optimizer(case: Case, model: torch.nn.Module) -> torch.optim.Optimizer | None:
    # one call of the optimizer takes tensors of one mesh alone
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


# -- losses -----------------------------------------------------------------------------------------------------------


def _token_logprobs(case: Case, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of `ids`, (rows, tokens), from logits (rows, tokens, vocabulary), as `logprob` says."""
    if case.logprob == "fp32":
        return torch.gather(F.log_softmax(logits.float(), dim=-1), -1, ids.unsqueeze(-1)).squeeze(-1)
    if case.logprob == "lse":
        picked = torch.gather(logits, -1, ids.unsqueeze(-1)).squeeze(-1)
        return picked - torch.logsumexp(logits, dim=-1)
    rows = [
        F.log_softmax(row, dim=-1).gather(-1, row_ids.unsqueeze(-1)).squeeze(-1)
        for row, row_ids in zip(logits, ids, strict=True)
    ]
    return torch.stack(rows)


class Step:
    """The training step of a case; everything it needs is resident once it is built."""

    def __init__(self, case: Case, ledger: Ledger) -> None:
        self.case, self.ledger = case, ledger
        model = _load(case)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.model = _prepare(case, model)
        self.trainable = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self.reference: Any = None
        if case.task == "dpo" and case.ref == "copy":
            self.reference = _load(case).eval().requires_grad_(False)
            if case.ckpt != "none":
                self.reference.gradient_checkpointing_enable({"use_reentrant": False})
        if case.fsdp:
            for each in (self.reference, self.model):
                if each is not None:
                    fsdp.shard(case, each)
        self.optimizer = _optimizer(case, self.model)
        if case.zero:
            self._partition()
        self.inputs = self._inputs()
        self._label()
        self._watch()

    def _partition(self) -> None:
        """Hand the models to DeepSpeed; one that is not trained stays whole below stage 3."""
        from . import zero  # takes seconds to import

        self.model = zero.engine(self.case, self.model, self.optimizer)
        if self.reference is not None and self.case.zero == 3:
            self.reference = zero.engine(self.case, self.reference, None)

    def _inputs(self) -> dict[str, torch.Tensor]:
        case = self.case
        rows = case.mb * (2 if case.task in ("rm", "dpo") else 1)

        def ids() -> torch.Tensor:
            return torch.zeros(rows, case.seq, dtype=torch.long, device=DEVICE)

        def values() -> torch.Tensor:
            return torch.zeros(rows, case.resp or case.seq // 2, device=DEVICE)

        inputs = {"input_ids": ids()}
        if case.sequence_parallel:  # the model counts its part of the sequence alone
            inputs["position_ids"] = ids()[:1]
        if case.attn == "sdpa-mask":
            inputs["attention_mask"] = torch.ones(rows, 1, case.seq, case.seq, dtype=torch.bool, device=DEVICE)
        if case.task == "sft":
            inputs["labels"] = ids()
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
                    # ZeRO-3 keeps its shard beside a parameter that is empty
                    ledger.mark(getattr(parameter, "ds_tensor", parameter), f"{role}params")
                for buffer in model.buffers():
                    ledger.mark(buffer, "buffers")
        for tensor in self.inputs.values():
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
        if self.case.fsdp or self.case.zero or self.case.tp > 1:  # they set themselves up in their first step
            self.run()
            self.ledger.phase = "setup"
        if self.optimizer is None:
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._label_states()

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        if self.case.prec == "autocast":
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
        """(rows, tokens): of every next token, or for PPO of the response's."""
        case, ids = self.case, self.inputs["input_ids"]
        tokens = case.resp or (case.seq // 2 if case.task == "ppo-actor" else case.seq - 1)
        extra = {"logits_to_keep": tokens + 1} if case.logits_to_keep else {}
        logits = self._forward(model, **extra).logits
        return _token_logprobs(case, logits[:, -tokens - 1 : -1], ids[:, -tokens:])

    def _loss(self) -> tuple[torch.Tensor, Any]:
        """The loss, and what the caller keeps of the outputs."""
        case, inputs = self.case, self.inputs
        if case.task == "sft":
            outputs = self._forward(self.model)
            return outputs.loss, outputs if case.hold_outputs else None
        if case.task == "rm":
            rewards = self._forward(self.model).logits.squeeze(-1)
            return -F.logsigmoid(rewards[: case.mb] - rewards[case.mb :]).mean(), None
        if case.task == "ppo-critic":
            old, target = inputs["old"], inputs["target"]
            values = self._forward(self.model)[:, -old.shape[1] :].float()
            clipped = old + (values - old).clamp(-0.2, 0.2)
            return 0.5 * torch.max((values - target) ** 2, (clipped - target) ** 2).mean(), None
        if case.task == "ppo-actor":
            ratio = (self._logprobs(self.model) - inputs["old"]).exp()
            advantage = inputs["target"]
            return torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean(), None
        chosen = self._logprobs(self.model).sum(-1)
        with torch.no_grad():
            if case.ref == "none":
                reference = inputs["ref_logps"]
            elif case.ref == "adapter":
                with self.model.disable_adapter():
                    reference = self._logprobs(self.model).sum(-1)
            else:
                reference = self._logprobs(self.reference).sum(-1)
        margin = chosen - reference
        return -F.logsigmoid(0.1 * (margin[: case.mb] - margin[case.mb :])).mean(), None

    def run(self) -> None:
        """The step: forward and backward of each micro-batch, the optimizer."""
        with loss_parallel() if self.case.sequence_parallel else contextlib.nullcontext():
            self._run()

    def _run(self) -> None:
        ledger, case = self.ledger, self.case
        attention.calls.clear()
        ledger.phase = "forward"
        if case.task == "logprob":
            with torch.no_grad(), self._precision():
                self._logprobs(self.model)
            return
        for _ in range(case.grad_accum):
            ledger.phase = "forward"
            with self._precision():
                loss, held = self._loss()
            ledger.phase = "backward"
            ledger.note("backward")
            if case.zero:
                self.model.backward(loss)
            else:
                (loss / case.grad_accum if case.grad_accum > 1 else loss).backward()
            del loss, held
            if case.zero:  # its engine counts the micro-batches
                ledger.phase = "optim"
                ledger.note("optim")
                self.model.step()
        if case.fsdp:  # its gradients do not come through autograd's accumulation
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
