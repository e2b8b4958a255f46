"""The configurations that fit, over the catalog, for jobs that are spelled out once, here.

A cell tries the few configurations of its ladder, the fastest first, and shows the first that fits; if none does, the
first that is tight; else the one that comes closest, with what it needs.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from calc.answers import answers, topics
from calc.answers.answers import Preview
from calc.answers.kept import Kept, of_gpu, of_model
from calc.answers.workings import Shared, Working, of_phase
from calc.base.units import gb
from calc.catalog.catalog import GPU, Model
from calc.estimate.estimate import host_verdict
from calc.estimate.verdict import VERDICTS

METHODS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
LEARNING = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}  # the same within a sentence
COUNTS = (1, 8)


class Rung(NamedTuple):
    """One configuration to try."""

    name: str
    fields: Mapping[str, Any]


class Task(NamedTuple):
    """A job of the look-up tables: `ladders` has the rungs to try, the fastest first, by method and number of GPUs.

    Fields that `job` does not set take the default of the framework's newest known version.
    """

    title: str
    job: Mapping[str, Any]
    ladders: Mapping[tuple[str, int], tuple[Rung, ...]]
    assumptions: str


ZERO2 = Rung("ZeRO-2", {"sharding": "zero2"})
ZERO3 = Rung("ZeRO-3", {"sharding": "zero3"})
OFFLOAD2 = Rung("offload", {"sharding": "zero2", "offload.optimizer": True})
OFFLOAD3 = Rung("ZeRO-3, offload", {"sharding": "zero3", "offload.optimizer": True})
ALONE = Rung("", {"sharding": "zero2"})
OFFLOADED = {"offload.optimizer": True, "offload.parameters": True}
SHARED = Rung("", {})
OFFLOAD = Rung("offload", OFFLOADED)
WIDE = Rung("offload, TP 8", OFFLOADED | {"rollout.tensor_parallel": 8, "rollout.gpu_memory_utilization": 0.8})

SUPERVISED: Mapping[str, Any] = {
    "framework": "openrlhf",
    "seq_len": 2048,
    "micro_batch": 1,
    "checkpointing": "full",
    "attention": "flash",
}
SHOWN = (
    "A cell shows the first configuration that fits, of those its column may use, and what the fullest GPU then needs"
)
HOSTED = "where the catalog knows no such node and we must assume that it has less, the cell is tight"
ASSUMPTIONS = (
    "OpenRLHF's newest known version and its defaults, 2048 tokens a sequence, micro batch 1 (a pair for the reward "
    "model and for DPO), full activation checkpointing, FlashAttention; LoRA and QLoRA on all linear layers. "
    f"{SHOWN}; with offload also what a node must have of its own memory; {HOSTED}."
)
LADDERS = {
    ("full", 1): (ALONE, OFFLOAD2),
    ("full", 8): (ZERO2, ZERO3, OFFLOAD3),
    ("lora", 1): (ALONE,),
    ("lora", 8): (ZERO2, ZERO3),
    ("qlora", 1): (ALONE,),
    ("qlora", 8): (ZERO2,),
}
GRPO: Mapping[str, Any] = {
    "framework": "verl",
    "sharding": "fsdp2",
    "prompt_len": 512,
    "response_len": 1536,
    "micro_batch": 1,
    "checkpointing": "full",
    "roles.reference": {},
}
GRPO_ASSUMPTIONS = (
    "verl's newest known version on FSDP 2, all else its defaults (vLLM on the same GPUs with tensor parallel 2 and "
    "half of the card, asleep while others work), with a reference model, rewards from a function, prompts of 512 and "
    f"responses of 1536 tokens, micro batch 1, full activation checkpointing; LoRA on all linear layers. {SHOWN}. With "
    f"offload, weights and optimizer states wait in host memory, of which a node must have what is shown; {HOSTED}. "
    "TP 8: tensor parallel 8 and 0.8 of the card for vLLM."
)
PPO: Mapping[str, Any] = {
    "framework": "openrlhf",
    "sharding": "zero3",
    "prompt_len": 512,
    "response_len": 1536,
    "micro_batch": 1,
    "checkpointing": "full",
    "attention": "flash",
    "rollout.sleep": True,
    "rollout.gpu_memory_utilization": 0.5,
}
FROZEN = {f"roles.{name}.offload.parameters": True for name in ("reference", "reward")}
PPO_OFFLOADED = {"offload.optimizer": True} | FROZEN
PPO_WIDE: Mapping[str, Any] = {"rollout.tensor_parallel": 8, "rollout.gpu_memory_utilization": 0.8, **PPO_OFFLOADED}
PPO_ASSUMPTIONS = (
    "OpenRLHF's newest known version on DeepSpeed ZeRO-3, all else its defaults, with actor, critic, reference and "
    "reward model of the same size on the same GPUs, vLLM asleep while others work with half of the card, prompts of "
    f"512 and responses of 1536 tokens, micro batch 1, full activation checkpointing, FlashAttention. {SHOWN}. With "
    "offload, the optimizer and the weights of the reference and the reward model wait in host memory, of which a node "
    f"must have what is shown; {HOSTED}. TP 8: tensor parallel 8 and 0.8 of the card for vLLM."
)
PPO_LADDER = (SHARED, Rung("offload", PPO_OFFLOADED), Rung("offload, TP 8", PPO_WIDE))
TASKS = {
    "sft": Task("Supervised fine-tuning", SUPERVISED, LADDERS, ASSUMPTIONS),
    "rm": Task("Reward model", SUPERVISED, LADDERS, ASSUMPTIONS),
    "dpo": Task("DPO", SUPERVISED, LADDERS, ASSUMPTIONS),
    "ppo": Task("PPO", PPO, {("full", 8): PPO_LADDER}, PPO_ASSUMPTIONS),
    "grpo": Task("GRPO", GRPO, {(m, 8): (SHARED, OFFLOAD, WIDE) for m in ("full", "lora")}, GRPO_ASSUMPTIONS),
}


class Best(NamedTuple):
    """The content of a cell: the worst verdict, of the GPUs or of the host, which is `tight` where a node merely is
    assumed to have too little; the fullest GPU's need line by line; and the configuration that was asked.
    """

    verdict: str
    working: Working
    rung: str
    given: Mapping[str, Any]

    @property
    def needed(self) -> int:
        """The bytes that the fullest GPU needs."""
        return self.working.bytes


PENDING = Best("", Working("", ()), "in a moment", {})  # in the preview, while the answer is being computed


class Asked(NamedTuple):
    """The question of one cell of the look-up tables."""

    model: str
    gpu: str
    task: str
    method: str
    gpus: int


_FOUND: dict[Asked, Best | None] = {}


def best(asked: Asked) -> Best | None:
    """The best configuration of the ladder; None if the framework refuses all of them."""
    if asked not in _FOUND:
        kept, key = _kept(asked.model), _key(asked)
        if key not in kept and Preview.on:
            Preview.behind = True
            return PENDING
        _FOUND[asked] = kept[key] if key in kept else _search(asked)
    return _FOUND[asked]


@cache
def _kept(model: str) -> Mapping[Hashable, Best | None]:
    """The cells of a model that an earlier build has kept."""
    return Kept().read(_topic(model))


def _topic(model: str) -> str:
    return f"fits-{model}"


def _search(asked: Asked) -> Best | None:
    found: list[Best] = []
    task = TASKS[asked.task]
    for rung in task.ladders[asked.method, asked.gpus]:
        given = {**asked._asdict(), **task.job, **rung.fields}
        answer = answers.attempt(given)
        if answer is None:
            continue
        worst = max(answer.estimate.verdict, host_verdict(answer.estimate), key=VERDICTS.index)
        found.append(Best(worst, of_phase(answer.peak), _name(rung, answer), given))
        if worst == "fits":
            return found[-1]
    return min(found, key=lambda b: (VERDICTS.index(b.verdict), b.needed), default=None)


def _name(rung: Rung, answer: answers.Answer) -> str:
    """The rung in words, with the host memory that offloading needs on a node."""
    if not answer.scenario.offload.optimizer:
        return rung.name
    return f"{rung.name}, host {gb(answer.estimate.host_peak)}"


def _cells(model: str) -> list[Asked]:
    """Every cell of one model."""
    return [
        Asked(model, gpu.id, name, method, n)
        for gpu in topics.tabled(answers.catalog())
        for name, task in TASKS.items()
        for method, n in task.ladders
    ]


def _key(asked: Asked) -> Hashable:
    """A key of everything that a cell depends on apart from calc itself."""
    return asked, of_gpu(asked.gpu), of_model(asked.model)


def _search_all(cells: Sequence[Asked]) -> list[Best | None]:
    """The content of each of these cells."""
    shared = Shared()
    return [best and best._replace(working=shared(best.working)) for best in map(_search, cells)]


def fill() -> None:
    """Answers every cell of the look-up tables, over all cores, except those that an earlier build has kept.

    Cells are grouped by model, because all scenarios of a model share what `calc` compiles of it.
    """
    start = time.perf_counter()
    asked = {_topic(model): {_key(cell): cell for cell in _cells(model)} for model in answers.catalog().models}
    for topic, found in Kept().complete(asked, _search_all).items():
        _FOUND.update({cell: found[key] for key, cell in asked[topic].items()})
    answers.Clock.seconds += time.perf_counter() - start


def share(place: int, of: int, into: Path) -> None:
    """Answers the share of one of `of` processes of the cells that are not kept, and writes them to a file."""
    found: dict[Asked, Best | None] = {}
    for model in [*answers.catalog().models][place::of]:
        missing = [asked for asked in _cells(model) if _key(asked) not in _kept(model)]
        found |= zip(missing, _search_all(missing), strict=True)
    into.write_bytes(pickle.dumps(found))


def take(files: Iterable[Path]) -> None:
    """Takes over the answers that those processes have written."""
    for file in files:
        _FOUND.update(pickle.loads(file.read_bytes()))
    Preview.behind = False


def by_size(models: Iterable[Model]) -> list[Model]:
    """Models from small to large."""
    return sorted(models, key=lambda m: (m.parameters, m.id))


def by_memory(gpus: Iterable[GPU]) -> list[GPU]:
    """GPUs from little to much usable memory."""
    return sorted(gpus, key=lambda g: (g.usable_mib, g.id))
