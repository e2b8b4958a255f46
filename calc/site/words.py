"""Configurations in a reader's words: the model, the machine, what is to be set, and what one that fails lacks.

Nothing here needs a package, so that the same words stand on the pages and in the calculator.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape

from calc.recommend import Miss, Recommendation
from calc.recommend.search import Judged
from calc.report import degrees
from calc.scenario import Scenario
from calc.site import answers
from calc.site.answers import Answer
from calc.units import gb, gib

METHODS = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}
SHARDINGS = {
    "none": "not sharded", "ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3",
    "fsdp1": "FSDP1", "fsdp2": "FSDP2",
}  # fmt: skip
TASKS = {
    "sft": "Supervised fine-tuning", "rm": "Reward model", "dpo": "DPO", "ppo": "PPO", "grpo": "GRPO",
    "reinforce++": "REINFORCE++",
}  # fmt: skip

UNPICKED = {"pretrain": "Pre-training", "inference": "Inference"}  # tasks that no table and no form offers


def machine(s: Scenario) -> str:
    """The GPUs of a job: `8 × A100-SXM4-80GB`."""
    return f"{s.gpus} × {answers.catalog().gpu(s.gpu).name}"


def model(name: str) -> str:
    """A model's name; what is no id of the catalog as it is."""
    found = answers.catalog().models.get(name)
    return found.name if found else name


def task(name: str) -> str:
    """A task within a sentence: `reward model`, but `PPO`."""
    words = TASKS.get(name) or UNPICKED[name]
    return words if words[1].isupper() else words.lower()


def settings(s: Scenario) -> list[str]:
    """What is to be set, one part a setting, in the order in which a reader decides."""
    method = METHODS[s.method] + (f" of rank {s.lora.rank}" if s.lora else "")
    parts = [
        method + (", AdamW in 8 bits" if s.optimizer == "adamw-8bit" else ""),
        SHARDINGS[s.sharding] if s.gpus > 1 else "one GPU",
        *degrees(s),
        f"micro batch {s.micro_batch}",
        {"full": "checkpointing", "none": "no checkpointing"}.get(s.checkpointing, f"checkpointing {s.checkpointing}"),
        _offloaded(s),
    ]
    if s.rollout and s.rollout.engine == "vllm":
        where = "on all GPUs"
        if s.placement == "separate":
            where = "GPUs apart: " + ", ".join(f"{n} for {name}" for name, n in _groups(s).items())
        parts += [
            where,
            f"vLLM with tensor parallel {s.rollout.tensor_parallel}",
            f"{s.rollout.gpu_memory_utilization:g} of the card for vLLM",
            "asleep while others work" if s.rollout.sleep else "never asleep",
        ]
    elif s.rollout:
        parts.append("Transformers generates")
    return parts


def _groups(s: Scenario) -> dict[str, int]:
    """GPUs of roles that have some of their own, and vLLM's."""
    own = {name: role["gpus"] for name, role in s.roles.items() if isinstance(role, Mapping) and "gpus" in role}
    return own | ({"vLLM": s.rollout.gpus} if s.rollout else {})


def _offloaded(s: Scenario) -> str:
    frozen = [name for name in ("reference", "reward") if (own := s.role(name)) and own.offload.parameters]
    names = ["optimizer"] * s.offload.optimizer + ["weights"] * s.offload.parameters + frozen
    *most, last = names or ["nothing"]
    return f"{', '.join(most)} and {last} in host memory" if most else f"{last} in host memory"


def lacks(miss: Miss) -> str:
    """Why a configuration does not fit, in words."""
    if miss.where == "vllm":
        return f"does not start vLLM: {miss.reason}"
    assert miss.shortfall is not None
    if miss.where == "host":
        return f"lacks {gb(miss.shortfall)} of host memory in {miss.phase}"
    return f"lacks {gib(miss.shortfall)} in {miss.phase}"


def against(found: Recommendation) -> str:
    """What the next faster configuration sets otherwise, and what it lacks; or what would have to change."""
    best, miss = found.recommended, found.fails
    if best is None:
        closest = f"the closest {lacks(miss)}" if miss else "the framework can run no configuration of this job"
        return "; ".join([*found.advice, closest])
    if miss is None:
        return "nothing faster was found"
    said = settings(best.scenario)
    other = [part for part in settings(miss.judged.scenario) if part not in said]
    return f"{', '.join(other)}: {lacks(miss)}"


def answered(judged: Judged) -> Answer:
    """What `calc` says of a configuration."""
    return Answer(judged.scenario.as_dict(), judged.scenario, judged.estimate)


def code(text: str) -> str:
    """Text with its `backticks` as code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))
