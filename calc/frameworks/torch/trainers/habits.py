"""Functions that the trainers share: the release that a scenario names, how many GPUs share weights, and refusals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from calc.base.optimizers import OPTIMIZERS
from calc.base.plan import DeepSpeed
from calc.base.refusal import Refusal
from calc.base.versions import nearest, numbers
from calc.frameworks import trainer
from calc.frameworks.base import together
from calc.frameworks.releases import pinned
from calc.frameworks.torch.releases import Pins
from calc.scenario.scenario import Scenario
from calc.scenario.words import DEEPSPEED, FSDP

# the note on Liger's kernels
LIGER = "Liger's kernel for routed experts is not computed: experts run as Transformers'"


def release(name: str, releases: Mapping[str, Pins], given: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The release of a trainer that `given` names, or the newest, and its libraries as fields of a scenario."""
    known = tuple(releases)
    asked = given.get(f"versions.{name}")
    version = nearest(str(asked), known) if asked else known[-1]
    return version, {f"versions.{name}": version, **pinned(releases[version])}


def ran(s: Scenario, releases: Mapping[str, Pins]) -> str:
    """The release of the trainer of `s`, of those that were read, whose memory it shares."""
    return nearest(s.versions[s.trainer], tuple(releases))


def sharded(given: Mapping[str, Any], several: str = "ddp", one: str = "none") -> str:
    """The sharding of weights unless `given` says it: `several` where more than one GPU has the same layers, else
    `one`.
    """
    copies = int(given.get("gpus", 1)) // together(given) * int(given.get("context_parallel", 1))
    return str(given.get("sharding", several if copies > 1 else one))


def batches(values: Mapping[str, Any], given: Mapping[str, Any], accumulation: int) -> dict[str, int]:
    """The global batch of `accumulation` micro batches on each GPU, the default micro batch being in `values`."""
    micro_batch = int(given.get("micro_batch", values["micro_batch"]))
    ranks = max(1, int(given.get("gpus", 1)) // together(given))
    return {"global_batch": micro_batch * ranks * accumulation}


def shipped(s: Scenario) -> DeepSpeed:
    """DeepSpeed with a trainer's file for the stage, where that of ZeRO-3 says `auto` of its sizes.

    The files switch `overlap_comm` off.
    """
    usual = DeepSpeed(s.versions["deepspeed"], overlap_comm=False)
    return trainer.filled_in(s, usual) if s.sharding == "zero3" else usual


def fused(given: Mapping[str, Any], usual: str = "adamw") -> dict[str, str]:
    """The implementation of an optimizer that a trainer's configuration asks to be fused, if it can be."""
    facts = OPTIMIZERS[str(given.get("optimizer", usual))]
    return {"optimizer_impl": "fused" if "fused" in facts.implementations else facts.usual}


def liger(task: str, given: Mapping[str, Any]) -> dict[str, str]:
    """The loss and the kernels where one switch of Transformers' Trainer, `use_liger_kernel`, has all of Liger's."""
    if given.get("loss") == "fused":
        return {"kernels": "liger"}
    return {"loss": "fused"} if given.get("kernels") == "liger" and task in ("pretrain", "sft") else {}


def liger_notes(s: Scenario) -> Iterator[str]:
    """The note on those of Liger's kernels that are computed otherwise."""
    if s.kernels == "liger" and s.architecture.experts:
        yield LIGER


def narrow(given: Mapping[str, Any], sharding: str, *, wide: str) -> str:
    """The number formats of Transformers' Trainer where weights load in bf16 under `bf16: true`.

    DeepSpeed keeps fp32 masters. FSDP makes what is trained fp32 (accelerate `accelerator.py`, `utils/fsdp_utils.py`):
    of a frozen base that is the adapters alone. `wide` is what weights that are trained whole are elsewhere.
    """
    if sharding in DEEPSPEED:
        return "mixed"
    if given.get("method", "full") != "full":
        return "bf16"
    return "fsdp-mixed" if sharding in FSDP else wide


def refuse(
    s: Scenario, tasks: tuple[str, ...], fixed: Mapping[str, tuple[Any, ...]], *, together: bool = False
) -> Refusal | None:
    """The reason that a trainer cannot run `s`, in one line, or None.

    `tasks` are those it is modelled for, `fixed` the values that it has for fields; `together` says that GPUs may share
    sequences under it.
    """
    if s.task not in tasks:
        return Refusal("trainer", f"{s.trainer!r} for {s.task}", f"own; modelled for {', '.join(tasks)}")
    if s.together > s.devices and not together:
        return Refusal("trainer", f"{s.trainer!r} where GPUs share sequences", "own; not modelled")
    for field, allowed in fixed.items():
        if (value := getattr(s, field)) not in allowed:
            return Refusal(field, f"{value!r} with trainer {s.trainer}", ", ".join(map(str, allowed)))
    return trainer.frozen_fault(s)


def told(s: Scenario, releases: Mapping[str, Pins]) -> Iterator[str]:
    """The note on a release that was asked for and not read."""
    asked = s.versions[s.trainer]
    known = nearest(asked, tuple(releases))
    if numbers(known)[: len(numbers(asked))] != numbers(asked):
        yield f"{s.trainer} {asked} is computed as {known}, the nearest release that was read"
