"""ColossalChat's scripts on ColossalAI's LowLevelZeroPlugin, with Transformers' models.

With plain PyTorch they are the scenario's `trainer`. Read in ColossalAI 4f9953be3:
`applications/ColossalChat/examples/training_scripts/train_{sft,dpo}.py`, `applications/ColossalChat/coati/trainer`,
`colossalai/booster/plugin/low_level_zero_plugin.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from calc.base.plan import Path
from calc.base.refusal import Refusal
from calc.frameworks import trainer
from calc.frameworks.torch.trainers import habits as shared
from calc.scenario.scenario import Scenario

TASKS = ("sft", "dpo", "simpo")
BUCKET = 12 << 20  # elements: the plugin's reduce_bucket_size_in_m, which the scripts leave
ADAPTERS = "coati's adapters are computed without the biases that lora_train_bias adds"


def habits(task: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of the scripts with `--plugin zero2 --mixed_precision bf16`, by dotted key."""
    return {
        "sharding": "zero2",
        "precision": "mixed",  # master_weights, in fp32 (`low_level_zero_plugin.py`)
        "optimizer_impl": "fused",  # HybridAdam's multi_tensor_adam
        "reentrant": False,  # train_sft.py: gradient_checkpointing_kwargs
        # a variable of the loop holds the model's outputs until the next micro batch's (`sft.py`, `dpo.py`, `_train`)
        **({"outputs_kept": "next"} if task in TASKS else {}),
        "lora.dropout": 0,
        "lora.dtype": "bf16",  # the plugin's own, of all parameters (`low_level_zero_plugin.py`, LowLevelZeroModel)
    }


def path(s: Scenario, usual: Path) -> Path:
    """The loss path: that of Transformers' models, or log-softmaxes of their logits (`coati/models/utils.py`)."""
    if s.task == "sft":
        return usual
    return replace(usual, kind="log-softmax", upcast=False, halves=True, outside=True)


def keeps(s: Scenario) -> dict[str, Any]:
    """The fields that the scripts set in a `Role`: ranks load the model on the host, and nothing says `use_cache`.

    So a reference model fills a cache of keys and values (`coati/trainer/dpo.py`, `ref_model(...)`).
    """
    return {"loads": trainer.loads(s), "caches": True}


def notes(s: Scenario) -> tuple[str, ...]:
    """The note on adapters, whose operations are PEFT's (`coati/models/lora.py`, LoraLinear, LoraEmbedding)."""
    return (ADAPTERS,) if s.lora else ()


def refuse(s: Scenario) -> Refusal | None:
    """The reason why ColossalAI's plugin cannot run `s`, in one line, or None."""
    fixed: dict[str, tuple[Any, ...]] = {
        "sharding": ("zero1", "zero2"),
        "precision": ("mixed",),
        "grad_dtype": ("bf16",),
        "method": ("full", "lora"),
        "loss": ("full",),
        "kernels": ("eager",),
        "optimizer": ("adamw",),
        "optimizer_impl": ("fused",),
        "compile": ("none",),
        "outputs_kept": ("next",),
    }
    if fault := shared.refuse(s, TASKS, fixed):
        return fault
    if s.lora and s.lora.dropout:
        # `_lora_linear_wrapper` does not pass `linear_lora_dropout` on, which LoraLinear takes as 0
        return Refusal("lora.dropout", f"{s.lora.dropout} with trainer colossalai", "0; its linears drop nothing out")
    for field in ("activations", "parameters"):
        if getattr(s.offload, field):
            return Refusal(f"offload.{field}", "true with trainer colossalai", "false; it has no switch for it")
    return None
