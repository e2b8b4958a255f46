"""Transformers' releases with the model types that came with each, as `models/auto` of their packages maps them.

AutoConfig of a release refuses a config whose model type it lacks, with every trainer, unless code lies beside the
weights. Types that have no other code (baichuan, kimi_k2, kimi_vl, mimo, bailing_moe, minicpm, minicpmv, nemotron-nas,
phi3_v, deepseek) are in no release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from calc.base.versions import at_least, numbers, since
from calc.models.architecture import Architecture

BROUGHT: Mapping[str, tuple[str, ...]] = {
    "2.0.0": ("gpt2",),
    "4.5.0": ("gpt_neo",),
    "4.11.0": ("gptj",),
    "4.19.0": ("opt",),
    "4.20.0": ("bloom", "gpt_neox"),
    "4.21.0": ("codegen",),
    "4.28.0": ("gpt_bigcode", "llama"),
    "4.31.0": ("falcon",),
    "4.32.0": ("mpt",),
    "4.34.0": ("mistral",),
    "4.36.0": ("llava", "mixtral", "phi"),
    "4.37.0": ("qwen2",),
    "4.38.0": ("gemma", "stablelm"),
    "4.39.0": ("cohere", "llava_next", "mamba", "starcoder2"),
    "4.40.0": ("jamba", "olmo", "qwen2_moe"),
    "4.41.0": ("paligemma", "phi3"),
    "4.42.0": ("gemma2",),
    "4.44.0": ("nemotron",),
    "4.45.0": ("falcon_mamba", "granite", "granitemoe", "llava_onevision", "mllama", "olmoe", "pixtral", "qwen2_vl",
               "mllama_text_model", "qwen2_audio"),
    "4.46.0": ("glm", "idefics3", "phimoe"),
    "4.47.0": ("olmo2",),
    "4.48.0": ("bamba", "cohere2"),
    "4.49.0": ("granitevision", "helium", "qwen2_5_vl"),
    "4.50.0": ("aya_vision", "gemma3", "gemma3_text", "mistral3", "smolvlm"),
    "4.51.0": ("deepseek_v3", "llama4", "llama4_text", "qwen3", "qwen3_moe"),
    "4.51.3": ("glm4",),
    "4.52.0": ("granitemoehybrid", "internvl", "qwen2_5_omni_thinker"),
    "4.53.0": ("arcee", "dots1", "falcon_h1", "gemma3n", "gemma3n_text", "glm4v", "minimax", "smollm3"),
    "4.54.0": ("deepseek_v2", "ernie4_5", "ernie4_5_moe", "exaone4", "glm4_moe", "lfm2",
               "voxtral"),
    "4.55.0": ("gpt_oss",),
    "4.56.0": ("apertus", "glm4v_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "seed_oss"),
    "4.57.0": ("flex_olmo", "ministral", "olmo3", "qwen3_next", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe"),
    "5.0.0": ("afmoe", "cwm", "glm4_moe_lite", "lfm2_moe", "lighton_ocr", "minimax_m2", "ministral3",
              "paddleocr_vl", "solar_open"),
    "5.1.0": ("exaone_moe", "glm_ocr", "youtu"),
    "5.2.0": ("glm_moe_dsa", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
    "5.3.0": ("nemotron_h",),
    "5.4.0": ("mistral4",),
    "5.5.0": ("gemma4", "gemma4_text"),
    "5.6.0": ("hy_v3",),
    "5.7.0": ("laguna",),
    "5.8.0": ("deepseek_v4",),
    "5.9.0": ("hyperclovax",),
    "5.10.1": ("gemma4_unified", "gemma4_unified_text"),
    "5.11.0": ("deepseek_v32",),
    "5.13.0": ("mimo_v2_flash", "minicpm3"),
    "5.17.0": ("kimi_linear",),
    "5.23.0": ("internlm3", "iquestcoder"),
}  # fmt: skip
# Types of which some weights lie beside code of their own, so that older releases run them with `trust_remote_code`, as
# vLLM's tests/models/registry.py marks them today or did when they were new, or `auto_map` in the config says; Qwen 1
# has the shapes of Qwen 2.
CODE_BESIDE = (
    "afmoe", "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe", "falcon", "hunyuan_v1_moe",
    "hyperclovax", "internlm3", "iquestcoder", "kimi_linear", "mimo_v2_flash", "minicpm3", "minimax_m2", "nemotron_h",
    "paddleocr_vl", "phi", "phi3", "phimoe", "qwen2",
)  # fmt: skip
# what Transformers' documentation calls a LLaVA-NeXT whose projector reads several blocks, which no release before had
# (4.48.3 and 4.49.0 `models/llava_next/modeling_llava_next.py`, `LlavaNextMultiModalProjector`)
SEVERAL = "granitevision"
FIRST: Mapping[str, str] = {name: version for version, names in BROUGHT.items() for name in names}
# The first release whose layers share their tables of cos and sin, or make them as they go, by family. Before, each had
# its own: `register_buffer("cos_cached", …)` of `modeling_<family>.py` in 4.37.2, 4.39.3, 4.40.2 to 4.47.1.
SHARE_TABLES: Mapping[str, str] = {
    "llama": "4.38", "mistral": "4.42", "mixtral": "4.48", "phi": "4.45", "qwen2": "4.45", "qwen2_moe": "4.45",
    "stablelm": "4.45", "starcoder2": "4.45",
}  # fmt: skip
# The first release in which a model's logits go to the loss that all share (`loss/loss_utils.py`, which casts them to
# fp32), where it is not 4.46, by family; before, each has a loss of its own. Read in the last package of each minor
# release from 4.19 to 4.57, and in 4.46.0, 4.47.0 and 4.48.0 to 4.48.2. CodeGen, GPT-J and GPT-Neo cast logits before
# they hand them to it, up to 4.57.
SHARE_LOSS: Mapping[str, str] = {
    "bloom": "4.48.3", "codegen": "5", "falcon": "4.48.3", "gpt2": "4.48.3", "gpt_neo": "5", "gpt_neox": "4.49",
    "gptj": "5", "granite": "4.48", "granitemoe": "4.48.3", "mistral": "4.48", "mllama": "4.52", "mpt": "4.48.3",
    "opt": "4.48.3", "stablelm": "4.48.3", "starcoder2": "4.47",
}  # fmt: skip
# Families with a loss of their own that takes logits in the type that they have, up to a release that casts them.
NARROW_LOSS: Mapping[str, str] = {
    **dict.fromkeys(("bloom", "falcon", "gpt2", "gpt_neox", "mpt", "opt", "stablelm"), "5"),
    "llama": "4.31",
}
# The first release in which blocks of a vision tower are never run again, by family: `MllamaVisionEncoder` was once
# checkpointed with the layers (`modeling_mllama.py` of 4.54.1 and 4.55.4).
TOWER_ONCE: Mapping[str, str] = {"mllama": "4.55"}
# Families whose own code takes logits in the type that they have: beside the weights, or in Transformers, to 5.23.
OWN_LOSS = ("baichuan", "qwen2_audio")
# Families whose own model casts logits in every release (`modeling_mllama.py`, `MllamaForCausalLM.forward`, and
# `modeling_minicpm.py` beside the weights).
OWN_CAST = ("minicpm", "mllama_text_model", "mamba", "falcon_mamba")
# The releases since and before which eager attention bounds its masked scores by `torch.max`, by family, with the
# device of the bound said since 4.30 (`modeling_{llama,opt}.py` of each minor release).
BOUNDS_SCORES: Mapping[str, tuple[str, str]] = {"llama": ("4.28", "4.31"), "opt": ("4.21", "4.49")}
# Of Qwen2 and 2.5 the catalog has the base models' files; the chat models, which most jobs train, have fewer positions.
CHAT = {"qwen2": 32_768}

# families whose experts have been parameters from the start, and those that call an expert's linears as Mixtral does
JOINS_EXPERTS = ("granitemoehybrid",)
# those whose two parameters had each expert's input first then, and whose loop copied an expert's row of them
# (4.57 `models/qwen3_vl_moe/modeling_qwen3_vl_moe.py`, `Qwen3VLMoeTextExperts.forward`: an index of one element)
INPUT_FIRST = ("qwen3_vl_moe",)
AS_MIXTRAL = ("mixtral", "minimax_m2", "phimoe", "kimi_linear")
# the releases of PEFT that were the first to refuse adapters of a state space's output projection, by family
REFUSES_OUTPUT: Mapping[str, str] = {"nemotron_h": "0.20"}


def knows(version: str, name: str) -> bool:
    """True if Transformers `version` has the model type; `4.51` stands for the last of its releases."""
    return since(version, FIRST.get(name, "0"))


def newest_type(config: Mapping[str, Any]) -> str | None:
    """The newest of the model types that reading a `config.json` takes; None if none is in a release."""
    parts = (config, config.get("text_config"), config.get("vision_config"))
    asked = [part.get("model_type") for part in parts if isinstance(part, Mapping)]
    if asked and asked[0] == "llava_next" and isinstance(config.get("vision_feature_layer"), Sequence):
        asked.append(SEVERAL)
    found = [name for name in asked if isinstance(name, str) and name in FIRST]
    return max(found, key=lambda name: numbers(FIRST[name]), default=None)


def with_experts(arch: Architecture, transformers: str) -> Architecture:
    """The model with linears of its own for each routed expert, if that release's code, or its own, has them.

    Transformers 4.57 `models/{qwen3_moe,ernie4_5_moe,afmoe,…}/modeling_*.py` have a list of MLPs, `models/mixtral` and
    those that follow it of w1, w2 and w3; release 5 joins them to two parameters.
    """
    if arch.family in INPUT_FIRST and not at_least(transformers, "5"):
        return replace(arch, experts_input_first=True, experts_converted=False)
    alone = arch.experts_clamped or arch.routing == "all" or arch.family in JOINS_EXPERTS
    if not arch.experts or alone or (at_least(transformers, "5") and not arch.experts_apart):
        return arch
    first = ("gate_proj", "up_proj") if arch.gated else ("up_proj",)
    names = ("w1", "w3", "w2") if arch.family in AS_MIXTRAL else (*first, "down_proj")
    return replace(arch, expert_linears=names, experts_converted=False)


def with_outputs(arch: Architecture, peft: str) -> Architecture:
    """The model with a state space whose output projection that release of PEFT adapts."""
    if arch.ssm and not at_least(peft, REFUSES_OUTPUT.get(arch.family, "0")):
        return replace(arch, ssm=replace(arch.ssm, adapted=True))
    return arch


def logits_cast(family: str, transformers: str) -> Literal["model", "loss", ""]:
    """The part of a model of that family that casts logits to fp32: its own code, the loss, or none."""
    if family in OWN_LOSS:
        return ""
    if family in OWN_CAST:
        return "model"
    if since(transformers, SHARE_LOSS.get(family, "4.46")):
        return "loss"
    return "model" if since(transformers, NARROW_LOSS.get(family, "0")) else ""


def shifts_logits(family: str, transformers: str) -> bool:
    """True if a loss of that family leaves out each row's last logits, which copies those of several rows.

    Labels are shifted since 4.49 (`loss/loss_utils.py`, `ForCausalLMLoss`), but by models with a loss of their own.
    """
    return family in OWN_LOSS or not at_least(transformers, "4.49")


def tower_again(family: str, transformers: str) -> bool:
    """True if activation checkpointing runs the blocks of that family's vision tower again in that release."""
    return family not in TOWER_ONCE or not at_least(transformers, TOWER_ONCE[family])


def with_scores(arch: Architecture, transformers: str) -> Architecture:
    """The model as eager attention of that release treats its scores.

    OPT takes the softmax in the type of the scores up to 4.48, but since 4.21 not in fp16.
    """
    first, end = BOUNDS_SCORES.get(arch.family, ("0", "0"))
    bounded = since(transformers, first) and not since(transformers, end)
    if arch.family == "opt" and not since(transformers, end):
        return replace(arch, scores_bounded=bounded, narrow_softmax="but fp16" if bounded else "always")
    return replace(arch, scores_bounded=True) if bounded else arch


def with_heads(arch: Architecture, transformers: str, torch: str) -> Architecture:
    """The model as SDPA gets its keys and values: copied for every query head (`repeat_kv`), or as they are.

    As they are since Transformers 4.54, with torch 2.5 (`integrations/sdpa_attention.py`, `use_gqa_in_sdpa`). A single
    head is repeated without a copy.
    """
    shared = arch.grouped and arch.kv_heads > 1 and not arch.modeling
    if not shared or (at_least(transformers, "4.54") and at_least(torch, "2.5")):
        return arch
    return replace(arch, repeated=True)


def with_tables(arch: Architecture, transformers: str) -> Architecture:
    """The model with the positions whose cos and sin each layer keeps, if Transformers' layers do in that release."""
    if arch.modeling or arch.cached_positions or at_least(transformers, SHARE_TABLES.get(arch.family, "0")):
        return arch
    return replace(arch, cached_positions=min(arch.max_positions, CHAT.get(arch.family, arch.max_positions)))
