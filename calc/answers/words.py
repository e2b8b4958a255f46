"""Configurations in a reader's words: the model, the machine, the settings, and what one that fails lacks.

Nothing here needs a package, so that the same words appear on the pages and in the calculator.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape

from calc.answers import answers
from calc.answers.answers import Answer
from calc.base.optimizers import OPTIMIZERS
from calc.base.schema import InputError
from calc.base.units import gb, gib
from calc.estimate.report import batched, degrees, lengths, roles, rollout, segments, trainer
from calc.recommend import Miss, Recommendation
from calc.recommend.search import Judged
from calc.scenario.scenario import Scenario
from calc.scenario.words import PAIRED, Attention, Sharding

METHODS = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}
FRAMEWORKS = {"trl": "TRL", "openrlhf": "OpenRLHF", "verl": "verl", "slime": "slime", "torch": "plain PyTorch"}
PRECISIONS = {
    "fp16": "fp16 with a loss scaler",
    "mixed": "mixed precision",
    "fsdp-mixed": "FSDP's mixed precision",
    "autocast": "fp32 under autocast",
}
ATTENTION: Mapping[Attention, str] = {
    "flash": "FlashAttention",
    "sdpa": "PyTorch's attention",
    "eager": "eager attention",
}
SHARDINGS: Mapping[Sharding, str] = {
    "none": "not sharded", "ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3",
    "fsdp1": "FSDP1", "fsdp2": "FSDP2", "megatron": "Megatron",
}  # fmt: skip
TASKS = {
    "sft": "Supervised fine-tuning", "rm": "Reward model", "dpo": "DPO", "kto": "KTO", "orpo": "ORPO",
    "simpo": "SimPO", "gkd": "GKD", "ppo": "PPO", "grpo": "GRPO",
    "reinforce++": "REINFORCE++",
}  # fmt: skip

UNPICKED = {"pretrain": "Pre-training", "inference": "Inference"}  # tasks that no table and no form offers


def refusal(error: InputError) -> str:
    """The field and value that a framework refuses; "" if the error names no value."""
    given = error.refusal
    return f"{given.field} {str(given.given).replace(chr(39), '')}" if given else ""


def kind(task: str, method: str, sharding: Sharding) -> tuple[str, str, str]:
    """The names of a job's task, method and sharding, each for a cell of its own."""
    return (TASKS | UNPICKED)[task], METHODS[method], SHARDINGS[sharding]


def machine(s: Scenario) -> str:
    """The GPUs of a job: `8 × A100-SXM4-80GB`."""
    return f"{s.gpus} × {answers.catalog().gpu(s.gpu).name}"


def model(name: str) -> str:
    """A model's name; the text itself if it is no id of the catalog."""
    found = answers.catalog().models.get(name)
    return found.name if found else name


def task(name: str) -> str:
    """A task within a sentence: `reward model`, but `PPO`."""
    words = TASKS.get(name) or UNPICKED[name]
    return words if words[1].isupper() else words.lower()


def describe(answer: Answer) -> str:
    """A job in one line: the assumptions behind the numbers of its tables."""
    s = answer.scenario
    names = {found.id: found.name for found in answers.catalog().models.values()}
    parts = [
        model(s.model),
        task(s.task) + ("" if s.method == "full" else f", {_method(s)}"),
        machine(s),
        ", ".join([f"{FRAMEWORKS[s.framework]} {s.framework_version}", *trainer(s)]),
        ", ".join([SHARDINGS[s.sharding], *(f"{what} in host memory" for what in s.offloaded)]),
        *degrees(s),
        PRECISIONS.get(s.precision, s.precision),
        ATTENTION[s.attention],
        checkpointing(s.checkpointing),
        *(["Liger's kernels"] if s.kernels == "liger" else []),
        *(["parameters step in backward"] if s.optimizer_in_backward else []),
        *segments(s),
        lengths(s),
        batched(s) + (", in pairs" if s.task in PAIRED else ""),
        *([rollout(s), roles(s, names)] if s.rollout else []),
    ]
    return " · ".join(parts) + "."


def checkpointing(kept: str) -> str:
    """The activation checkpointing in words: `no checkpointing`, `full checkpointing`."""
    return f"{'no' if kept == 'none' else kept} checkpointing"


def _method(s: Scenario) -> str:
    return METHODS[s.method] + (f" of rank {s.lora.rank}" if s.lora else "")


def settings(s: Scenario) -> list[str]:
    """The settings of a configuration, one part each, in the order in which a reader decides on them."""
    facts = OPTIMIZERS[s.optimizer]
    parts = [
        _method(s) + (f", {facts.label}{facts.in_bits}" if facts.eight_bit else ""),
        SHARDINGS[s.sharding] if s.gpus > 1 else "one GPU",
        *degrees(s),
        batched(s),
        {"full": "checkpointing", "none": "no checkpointing"}.get(s.checkpointing, f"checkpointing {s.checkpointing}"),
        _offloaded(s),
        *segments(s),
    ]
    if s.rollout and s.rollout.serves:
        where = "on all GPUs"
        if s.placement == "separate":
            where = "GPUs apart: " + ", ".join(f"{n} for {name}" for name, n in _groups(s).items())
        parts += [
            where,
            f"{s.rollout.server} with tensor parallel {s.rollout.tensor_parallel}",
            f"{s.rollout.gpu_memory_utilization:g} of the card for {s.rollout.server}",
            "asleep while others work" if s.rollout.sleep else "never asleep",
        ]
    elif s.rollout:
        parts.append("Transformers generates")
    return parts


def _groups(s: Scenario) -> dict[str, int]:
    """GPUs by role, for roles that have some of their own, and for the rollout engine."""
    own = {name: role["gpus"] for name, role in s.roles.items() if isinstance(role, Mapping) and "gpus" in role}
    return own | ({s.rollout.server: s.rollout.gpus} if s.rollout else {})


def _offloaded(s: Scenario) -> str:
    *most, last = s.offloaded or ["nothing"]
    return f"{', '.join(most)} and {last} in host memory" if most else f"{last} in host memory"


def lacks(miss: Miss) -> str:
    """The reason why a configuration does not fit, in words."""
    if miss.reason:
        return f"does not start {miss.reason.engine}: {miss.reason.words}"
    assert miss.shortfall is not None
    if miss.where == "host":
        return f"lacks {gb(miss.shortfall)} of host memory {miss.when}"
    return f"lacks {gib(miss.shortfall)} {miss.when}"


def passed(found: Recommendation) -> tuple[str, str]:
    """The question and the answer on a method that was chosen because the one that comes first does not fit."""
    assert found.recommended and found.passed
    chosen, first = METHODS[found.recommended.scenario.method], found.passed.judged.scenario
    closest = ", ".join(settings(first)[1:])
    return f"Why {chosen}", f"{_method(first)} comes first, and {lacks(found.passed)} where it is closest: {closest}"


def against(found: Recommendation) -> str:
    """The next faster configuration's other settings and what it lacks; or what would have to change."""
    best, miss = found.recommended, found.fails
    if best is None or found.verdict != "fits":
        closest = (
            f"the {'safest' if best else 'closest'} {lacks(miss)}"
            if miss
            else "the framework can run no configuration of this job"
        )
        return "; ".join([*found.advice, closest])
    if miss is None:
        return "nothing was found that gains more than the error of times"
    said = settings(best.scenario)
    other = [part for part in settings(miss.judged.scenario) if part not in said]
    return f"{', '.join(other)}: {lacks(miss)}"


def answered(judged: Judged) -> Answer:
    """The answer of `calc` to a configuration, as pages hold it."""
    return Answer(judged.scenario.as_dict(), judged.scenario, judged.estimate)


def sentence(text: str) -> str:
    """A note as a sentence; a file name or a flag at its start stays as it is spelled."""
    first = text.split(maxsplit=1)[0]
    return f"{text if '.' in first or first.startswith('-') else text[:1].upper() + text[1:]}."


def code(text: str) -> str:
    """Text with its `backticks` as code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))
