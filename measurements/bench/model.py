"""Models as PyTorch has them: random weights in the shape of a config.json, with adapters or shards if asked for."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from measurements.training import Critic, checkpointing

STD = 0.02
MODERN = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (4, 56)  # from_config takes dtype


class NotRun(Exception):
    """The reason why a case is not run on this machine, in one line."""


def attention(asked: str) -> tuple[str, str | None]:
    """Transformers' name for the attention asked for, and a note if another kernel takes its place."""
    if asked != "flash":
        return asked, None
    if find_spec("flash_attn"):
        return "flash_attention_2", None
    return "sdpa", "flash_attn is not installed: PyTorch's sdpa without a mask took its place"


def notes(s: Mapping[str, Any]) -> list[str]:
    """Notes on the kernel that the attention asked for gave way to, if to any."""
    note = attention(s["attention"])[1]
    return [note] if note else []


def _no_init() -> contextlib.AbstractContextManager[Any]:
    """Leaves new weights as they are; `_fill` sets them."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # before Transformers 5
        from transformers.modeling_utils import no_init_weights
    way: contextlib.AbstractContextManager[Any] = no_init_weights()
    return way


def load(config: Mapping[str, Any], s: Mapping[str, Any], device: torch.device) -> torch.nn.Module:
    """The model of a config.json for the scenario `s` on `device`; its weights are random and of their final type."""
    given = dict(config)
    own = AutoConfig.for_model(given.pop("model_type"), **given)
    own.use_cache, own.pad_token_id = s["task"] == "grpo", 0  # grpo generates
    kind: Any = AutoModel if scores(s) else AutoModelForCausalLM
    if s["task"] == "rm":
        own.num_labels, kind = 1, AutoModelForSequenceClassification
    dtype = torch.bfloat16 if s["precision"] in ("bf16", "mixed") else torch.float32
    # the whole model is never on the GPU: FSDP2 moves each unit there as it shards it, ZeRO-3 each parameter, 4-bit
    # conversion each layer
    in_parts = s["sharding"] in ("fsdp2", "zero3")
    where = torch.device("cpu") if in_parts or s["method"] == "qlora" else device
    with _no_init(), where:
        model = kind.from_config(
            own, attn_implementation=attention(s["attention"])[0], **{"dtype" if MODERN else "torch_dtype": dtype}
        )
    if s["method"] == "qlora":
        # TRL quantises weights of the type that it has loaded, others 16-bit weights
        wide = dtype if s["framework"].startswith("trl") else torch.bfloat16
        model = _quantised(model, device, wide, nested=s["double_quantization"])
    model.tie_weights()
    if device.type == "cuda" and not in_parts:
        torch.cuda.empty_cache()  # a tied head was there for a moment, as it never is where weights are loaded
    return Critic(model).to(device) if scores(s) else model


def random(config: Mapping[str, Any], s: Mapping[str, Any], device: torch.device) -> torch.nn.Module:
    """The model as from `load`, with weights that a step can be run on."""
    model = load(config, s, device)
    fill(model)
    return model


def scores(s: Mapping[str, Any]) -> bool:
    """True if PPO's critic is updated: a scalar head on the backbone."""
    return bool(s["task"] == "ppo" and s["roles"].get("actor") == "none")


def _quantised(model: Any, device: torch.device, dtype: torch.dtype, *, nested: bool) -> Any:
    """A model of the host on `device`, the linear modules of its layers in NF4.

    They are made from weights of `dtype`, which is also the type of their products; `nested` quantises their scales
    too.
    """
    if not find_spec("bitsandbytes"):
        raise NotRun("not run: bitsandbytes missing")
    from bitsandbytes.nn import Linear4bit, Params4bit
    from transformers import BitsAndBytesConfig
    from transformers.integrations import replace_with_bnb_linear

    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=dtype,
    )
    model = replace_with_bnb_linear(model, ["lm_head", "score"], four_bits)
    for module in model.modules():
        if isinstance(module, Linear4bit):
            whole = torch.randn(module.weight.shape, dtype=dtype, device=device) * STD
            packed = Params4bit(whole, requires_grad=False, compress_statistics=nested, quant_type="nf4", module=module)
            module.weight = packed.to(device)
            if module.bias is not None:
                module.bias = torch.nn.Parameter(torch.zeros(module.bias.shape, dtype=dtype, device=device))
    model = model.to(device)
    model.is_loaded_in_4bit = True  # PEFT asks it
    return model


def prepare(model: torch.nn.Module, s: Mapping[str, Any], device: torch.device) -> torch.nn.Module:
    """`model` ready to train as `s` says: recomputation, adapters, shards, random weights."""
    if s["checkpointing"] != "none":
        base: Any = model.backbone if isinstance(model, Critic) else model
        again = s["checkpointing"] == "full" and s["reentrant"]
        base.gradient_checkpointing_enable(checkpointing("reentrant" if again else s["checkpointing"]))
        if again and s["method"] != "full":
            base.enable_input_require_grads()  # as PEFT does: nothing else before the first adapter has a gradient
    if s["method"] != "full":
        model = _adapt(model, s)
    if s["sharding"] == "fsdp2":
        _shard(model, s, device)
    if s["sharding"] == "zero3":
        from . import zero  # which needs this module

        zero.partition(model, s, device)
    fill(model)
    if s["optimizer"] == "none":
        return model.eval().requires_grad_(False)
    return model.train()


def fill(model: torch.nn.Module) -> None:
    """Small normal weights, norms one and biases zero: values that keep every activation finite."""
    with torch.no_grad():
        for name, whole in model.named_parameters():
            # if sharded, this rank's part: FSDP2's local tensor, or the shard that ZeRO-3 keeps beside an empty
            # parameter
            parameter = whole.to_local() if hasattr(whole, "to_local") else getattr(whole, "ds_tensor", whole)
            if not parameter.is_floating_point():  # 4-bit weights, which were filled before they were packed
                continue
            if len(getattr(whole, "ds_shape", whole.shape)) > 1:
                parameter.normal_(std=STD)
            elif "norm" in name and name.endswith("weight"):
                parameter.fill_(1.0)
            else:
                parameter.zero_()


def adapters(model: torch.nn.Module, s: Mapping[str, Any]) -> Any:
    """PEFT's configuration of the scenario's adapters on `model`. Raises NotRun if PEFT is missing."""
    if not find_spec("peft"):
        raise NotRun("not run: peft missing")
    from peft import LoraConfig, TaskType

    lora = s["lora"]
    names = {
        n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and ".layers." in n
    }
    kind = TaskType.SEQ_CLS if s["task"] == "rm" else TaskType.CAUSAL_LM
    return LoraConfig(
        r=lora["rank"],
        lora_alpha=2 * lora["rank"],
        lora_dropout=lora["dropout"],
        target_modules=sorted(names) if lora["targets"] == "all-linear" else lora["targets"],
        task_type=TaskType.FEATURE_EXTRACTION if scores(s) else kind,
    )


def _adapt(model: torch.nn.Module, s: Mapping[str, Any]) -> torch.nn.Module:
    config = adapters(model, s)
    from peft import get_peft_model

    wide = s["lora"]["dtype"] == "fp32"
    if isinstance(model, Critic):  # its scalar head is trained whole
        model.backbone = get_peft_model(model.backbone, config, autocast_adapter_dtype=wide)
        return model
    adapted: torch.nn.Module = get_peft_model(model, config, autocast_adapter_dtype=wide)
    return adapted


def ranks(n: int) -> None:
    """Become the first of `n` ranks; the others do not exist.

    The collectives of a fake process group bring no data of other ranks; every buffer is allocated all the same.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)


def _shard(model: torch.nn.Module, s: Mapping[str, Any], device: torch.device) -> None:
    """FSDP2 over the scenario's ranks: a unit for each decoder layer, the rest in the root unit."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    ranks(s["gpus"])
    mixed = s["precision"] == "fsdp-mixed"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (s["gpus"],)),
        "mp_policy": policy if mixed else MixedPrecisionPolicy(),
    }
    for name, module in model.named_modules():
        if re.search(r"(^|\.)layers\.\d+$", name):
            fully_shard(module, **options)
    fully_shard(model, **options)


def optimizer(parameters: Iterable[torch.nn.Parameter], s: Mapping[str, Any]) -> torch.optim.Optimizer | None:
    """The optimizer that `s` names, over those `parameters` that are trained; None if `s` trains nothing.

    Raises NotRun if the optimizer's library is missing.
    """
    name, weights = s["optimizer"], [p for p in parameters if p.requires_grad]
    ways = {"fused": {"fused": True}, "foreach": {"foreach": True}, "single": {"foreach": False, "fused": False}}
    way = ways[s["optimizer_impl"]]
    if name == "none":
        return None
    if name == "adamw":
        return torch.optim.AdamW(weights, lr=1e-5, **way)
    if name in ("sgd", "sgd-momentum"):
        return torch.optim.SGD(weights, lr=1e-5, momentum=0.9 if name == "sgd-momentum" else 0.0, **way)
    if name == "adafactor":
        return torch.optim.Adafactor(weights, lr=1e-5, foreach=s["optimizer_impl"] == "foreach")
    library = "torchao" if name == "adamw-torchao-8bit" else "bitsandbytes"
    if not find_spec(library):
        raise NotRun(f"not run: {library} missing")
    kinds = {
        "adamw-8bit": "AdamW8bit",
        "adamw-paged-8bit": "PagedAdamW8bit",
        "adamw-paged": "PagedAdamW32bit",
        "adamw-torchao-8bit": "AdamW8bit",
    }
    own: torch.optim.Optimizer = getattr(import_module(f"{library}.optim"), kinds[name])(weights, lr=1e-5)
    return own


def autocast(s: Mapping[str, Any], device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The autocast context that forward runs in."""
    return torch.autocast(device.type, torch.bfloat16) if s["precision"] == "autocast" else contextlib.nullcontext()


@contextlib.contextmanager
def frozen(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The policy as its own reference: without its adapter, and without gradients."""
    with torch.no_grad(), model.disable_adapter():
        yield model
