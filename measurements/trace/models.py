"""The model of a case on the fake device: Transformers' own, truncated, with adapters and prepared as the case says."""

import re
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    Mistral4ForCausalLM,
    MllamaForCausalLM,
    Qwen2AudioForConditionalGeneration,
    VoxtralForConditionalGeneration,
)
from transformers.initialization import no_init_weights

from calc.models.families import UNADAPTED_OUTPUT
from measurements.training import SAVED, Critic, EverySecondProduct, checkpointing

from . import attention, four_bits, images, pipeline_parallel, tensor_parallel
from .case import LAYERS, Case

DEVICE = torch.device("cuda")
# classes that AutoModelForCausalLM does not make of their own config: parts of another, and those that hear
UNMAPPED = {
    "mistral4": Mistral4ForCausalLM,
    "mllama_text_model": MllamaForCausalLM,
    "qwen2_audio": Qwen2AudioForConditionalGeneration,
    "voxtral": VoxtralForConditionalGeneration,
}
MAMBA = {"out_proj", "conv1d"}  # what PEFT refuses to adapt in some families
GROUPED = {"o_a_proj"}  # a linear that multiplies group by group, as its adapter would not (DeepSeek-V4)


def _config(case: Case) -> Any:
    given = dict(case.config)
    if "vision_config" in given and "text_config" not in given:  # the catalog's files have its fields beside it
        outside = ("model_type", "vision_config", "audio_config", "mm_tokens_per_image", "spatial_merge_size",
                   "tie_word_embeddings")  # fmt: skip
        around = {name: given.pop(name) for name in outside if name in given}
        tied = {name: around[name] for name in outside[-1:] if name in around}  # each of both may say so
        given = {**around, "text_config": {**given, **tied}}
    whole = AutoConfig.for_model(given.pop("model_type"), **given)
    config = whole.get_text_config()
    config.pad_token_id = 0
    config.use_cache = case.use_cache
    if case.layers:
        config.num_hidden_layers = case.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: case.layers]
        if getattr(config, "mlp_layer_types", None):
            config.mlp_layer_types = config.mlp_layer_types[: case.layers]
    return whole


def load(case: Case) -> Any:
    """The model on the fake device, in the case's weight precision, without adapters."""
    config = _config(case)
    dtype = torch.bfloat16 if case.prec in ("bf16", "mixed") else torch.float32
    classes: dict[str, Any] = {"rm": AutoModelForSequenceClassification, "ppo-critic": AutoModel}
    if case.task == "rm":
        config.num_labels = 1
    # The flash-attn package is not looked for: `attention` takes its place.
    implementation: Any = "sdpa" if case.attn.startswith("sdpa") else "eager"
    if "audio_config" in case.config:  # Gemma 4's part that hears has no other than eager attention
        parts = dict.fromkeys(("", "text_config", "vision_config"), implementation)
        implementation = {**parts, "audio_config": "eager"}
    # tensors are cut before they have memory, as in `from_pretrained`
    with no_init_weights(), torch.device("meta") if case.tp > 1 else DEVICE:
        usual = AutoModelForImageTextToText if case.seeing else AutoModelForCausalLM
        make = classes.get(case.task, usual).from_config
        if case.task not in classes and config.model_type in UNMAPPED:
            make = UNMAPPED[config.model_type]._from_config
        model = make(config, dtype=dtype, attn_implementation=implementation)
        _narrow(model, dtype)
        if not case.fsdp:  # whose units gather parameters of one type
            _widen(model)
        if case.pp > 1:
            pipeline_parallel.cut(case, model)
        elif case.tp == 1:
            model.tie_weights()
        if case.attn == "fa2":
            attention.take_package(model)
        if case.tp > 1:
            tensor_parallel.shard(case, model)
        if case.pp > 1:
            return pipeline_parallel.Part(case, model)
        if case.four_bits:
            model = four_bits.quantise(model, experts=case.four_bit_experts)
        return Critic(model) if case.task == "ppo-critic" else model


def _narrow(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give parameters of another type the model's, but for those that it keeps in fp32, as `from_pretrained` does."""
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    for name, parameter in model.named_parameters():
        if parameter.dtype != dtype and not _among(name, kept):
            parameter.data = parameter.data.to(dtype)


def _widen(model: torch.nn.Module) -> None:
    """Give parameters that a model keeps in fp32 beside others in 16 bits that type, as `from_pretrained` does."""
    kept = model._keep_in_fp32_modules_strict or ()
    for name, parameter in model.named_parameters():
        if _among(name, kept):
            parameter.data = parameter.data.float()


def _among(name: str, modules: Iterable[str]) -> bool:
    return any(re.search(rf"(^|\.){re.escape(module)}($|\.)", name) for module in modules)


def _linear_names(model: torch.nn.Module) -> list[str]:
    """The names of the linear modules inside the layers, without heads, routers or fused experts."""
    linear = (name for name, module in model.named_modules() if hasattr(module, "in_features"))
    names = {name.rsplit(".", 1)[-1] for name in linear if re.search(rf"\.{LAYERS}\.", name)}
    names.discard("router")
    return sorted(names - GROUPED - (MAMBA if model.config.model_type in UNADAPTED_OUTPUT else set()))


def _adapters(case: Case, model: Any) -> Any:
    outside = f".*{images.VISION.pattern}.*" if case.seeing and case.freeze == "vision" else None
    named = {"all": _linear_names(model), "qv": ["q_proj", "v_proj"]}
    targets = named.get(case.lora_targets, case.lora_targets.split("+"))
    if case.seeing and case.freeze != "vision":
        targets = images.linear_names(case, model)
    kinds = {"rm": TaskType.SEQ_CLS, "ppo-critic": TaskType.FEATURE_EXTRACTION}
    lora = LoraConfig(
        r=case.lora_r,
        lora_alpha=2 * case.lora_r,
        lora_dropout=case.lora_dropout,
        use_dora=case.lora_dora,
        target_modules=targets,
        exclude_modules=outside,
        task_type=kinds.get(case.task, TaskType.CAUSAL_LM),
    )
    base = model.backbone if isinstance(model, Critic) else model  # its scalar head is trained whole
    with DEVICE:
        adapted = get_peft_model(base, lora, autocast_adapter_dtype=case.lora_dtype == "fp32")
    if case.four_bits and case.lora_dtype == "same":  # as TRL's trainers do
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    if isinstance(model, Critic):
        model.backbone = adapted
        return model
    return adapted


def _policy() -> EverySecondProduct:
    return EverySecondProduct(frozenset() if attention.in_package else SAVED)


def prepare(case: Case, model: Any) -> Any:
    """The model with its adapters and checkpointing as the case says, ready to be trained or to score."""
    base = model.backbone if isinstance(model, Critic) else model
    if case.ckpt != "none":
        base.gradient_checkpointing_enable(checkpointing(case.ckpt, _policy))
        if case.images and not case.tower_ckpt:
            images.tower(base).gradient_checkpointing_disable()
    if case.lora_r:
        model = _adapters(case, model)
        if case.ckpt == "reentrant":
            model.enable_input_require_grads()
    elif case.seeing:
        images.freeze(case, model)
    if case.train == "head":
        model.requires_grad_(False)
        model.get_output_embeddings().requires_grad_(True)
    return model.train() if case.optim != "none" else model.eval().requires_grad_(False)


def wrap(case: Case, model: Any) -> None:
    """Put Accelerate's autocast around a model's forward, with outputs in fp32 (`prepare_model`)."""
    if case.trainer and case.prec != "fp32" and not case.zero and (case.flat or not case.fsdp):
        forward = torch.autocast("cuda", torch.bfloat16)(model.forward.__func__)
        model.forward = MethodType(convert_outputs_to_fp32(forward), model)
