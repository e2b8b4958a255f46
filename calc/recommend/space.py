"""The configurations of a job that a framework may run: what a user left open, spelled out.

What changes what the model learns is no axis but a rung: full fine-tuning with AdamW, the same with states of 8 bits,
LoRA, QLoRA. Time decides within a rung, never between two.

Within a rung a *branch* holds everything on which other defaults depend: sharding, placement, who generates, with which
tensor parallelism. Along each *axis* of a branch values go from hungry to lean: memory falls, and time grows. All else
stays as given, or as the framework has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from calc.catalog import Catalog
from calc.rules import RL
from calc.scenario import Scenario, ScenarioError, parse, vary

Fields = Mapping[str, Any]

RUNGS: tuple[Fields, ...] = (
    {"method": "full", "optimizer": "adamw"},
    {"method": "full", "optimizer": "adamw-8bit"},
    {"method": "lora", "optimizer": "adamw"},
    {"method": "qlora", "optimizer": "adamw"},
)
SHARDINGS = ("none", "ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")
RANKS = (1, 2, 4, 8, 16)  # of one engine of vLLM
# What vLLM may take of a card, in steps of a tenth; more than nine tenths leave no room for the context.
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
# Where a framework names no batch: that of OpenRLHF's trainers, the only one that is the same for all tasks
# (`train.batch_size` 128, openrlhf/cli/train_sft.py:167 of 0.11.0).
GLOBAL_BATCH = 128
LARGEST_MICRO_BATCH = 64
AXES: Mapping[str, tuple[Any, ...]] = {
    "checkpointing": ("none", "full"),
    "logprob": ("log-softmax-fp32", "selective", "logsumexp"),
    "offload.optimizer": (False, True),
    "offload.parameters": (False, True),
    "rollout.sleep": (False, True),
    "rollout.gpu_memory_utilization": SHARES,
}


# What costs neither memory nor time nor exactness beside its alternatives, for plain PyTorch, which takes any: the
# fused loss (Liger's, Apple's) never writes logits out, and a fused step has no temporaries.
FREE: Mapping[str, tuple[Any, ...]] = {
    "loss": ("full", "chunked", "fused"),
    "optimizer_impl": ("foreach", "fused"),
}
OFFLOADS = ("offload.optimizer", "offload.parameters")
FROZEN = "offload.parameters of the frozen roles"
UNREFUSED = ("rollout.gpu_memory_utilization",)  # by any framework as such; a place that is refused is passed over


@dataclass(frozen=True, slots=True)
class Axis:
    """A setting with its values, each a change of fields, from hungry to lean."""

    name: str
    values: tuple[Fields, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """A lattice of configurations: `base` with one value of each axis, the micro batch last."""

    base: Scenario
    axes: tuple[Axis, ...]

    @property
    def size(self) -> int:
        """How many configurations it has."""
        return prod([len(axis.values) for axis in self.axes])

    @property
    def leanest(self) -> tuple[int, ...]:
        """Where every axis has its last value."""
        return tuple(len(axis.values) - 1 for axis in self.axes)

    def at(self, place: tuple[int, ...]) -> Scenario | None:
        """The scenario with the values at `place`; None where the framework refuses them together."""
        changes: dict[str, Any] = {}
        for axis, index in zip(self.axes, place, strict=True):
            changes |= axis.values[index]
        try:
            return vary(self.base, changes)
        except ScenarioError:
            return None

    def places(self) -> Iterator[tuple[int, ...]]:
        """All its places, the hungriest first."""
        return product(*[range(len(axis.values)) for axis in self.axes])


def seed(job: Fields, catalog: Catalog, where: str) -> dict[str, Any]:
    """The fields that every configuration of a job shares: those given, and its batches.

    Configurations are compared at one global batch: the given one, else the framework's for its own defaults. Raises
    ScenarioError where the job cannot be run at all.
    """
    fields = {name: value for name, value in job.items() if value is not None}
    if "attention" not in fields and "gpu" in fields:
        fields["attention"] = "sdpa" if catalog.gpu(fields["gpu"]).lacks_bf16 else "flash"
    if "micro_batch" not in fields:
        try:
            first = parse(fields, where=where, catalog=catalog)
        except ScenarioError:  # the framework's own may be larger than a given batch
            first = parse(fields | {"micro_batch": 1}, where=where, catalog=catalog)
    else:
        first = parse(fields, where=where, catalog=catalog)
    batch = first.global_batch
    if "global_batch" not in fields and first.framework == "torch":
        step = first.data_parallel * first.micro_batch
        batch = max(1, GLOBAL_BATCH // step) * step
        if first.rollout and "rollout.batch" not in fields:
            fields["rollout.batch"] = batch
    fields["global_batch"] = batch
    if first.rollout:
        fields.setdefault("rollout.batch", first.rollout.batch)
    return fields


def rungs(job: Fields) -> Iterator[Fields]:
    """The rungs that are open: those that contradict nothing that is given, adapters only where there may be some."""
    adapters = any(name.startswith("lora.") for name in job)
    for rung in RUNGS:
        method, optimizer = job.get("method", rung["method"]), job.get("optimizer", rung["optimizer"])
        if method != rung["method"] or (adapters and method == "full"):
            continue
        if "optimizer" in job:
            if rung["optimizer"] == "adamw":
                yield {"method": method, "optimizer": optimizer}
        else:
            yield rung


def branches(fields: Fields, rung: Fields, catalog: Catalog) -> list[Branch]:
    """Every branch of a rung that the framework accepts; `fields` as `seed` gives them."""
    found: list[Branch] = []
    axes: dict[tuple[str, str, str], tuple[Axis, ...]] = {}
    for choice in _choices({**fields, **rung}):
        given = {**_free(fields), **fields, **rung, **choice}
        try:
            base = parse({"micro_batch": 1, **given}, catalog=catalog)
        except ScenarioError:
            continue
        kind = (base.sharding, base.placement, base.rollout.engine if base.rollout else "")
        if kind not in axes:
            axes[kind] = tuple(_axes(base, given))
        own = (*axes[kind], Axis("micro_batch", _micro_batches(base, given)))
        found += [Branch(turned, own) for turned in _by_ranks(base, given)]
    return found


def _free(fields: Fields) -> dict[str, Any]:
    """The last value of each field of `FREE` that matters to the job."""
    if str(fields.get("framework", "torch")).partition("==")[0] != "torch":
        return {}
    loss = {"loss": FREE["loss"][-1]} if fields["task"] in ("sft", "pretrain") else {}
    fused = {"optimizer_impl": FREE["optimizer_impl"][-1]} if fields.get("optimizer", "adamw") == "adamw" else {}
    return loss | fused


def _choices(given: Fields) -> Iterator[dict[str, Any]]:
    """Every combination of what the branches of a job differ in, but for vLLM's tensor parallelism."""
    gpus = int(given.get("gpus", 1))
    options: dict[str, tuple[Any, ...]] = {"sharding": SHARDINGS[1:] if gpus > 1 else ("none", "zero2", "zero3")}
    if given["task"] in RL:
        options["rollout.engine"] = ("vllm", "hf")
    free = {name: values for name, values in options.items() if name not in given}
    for values in product(*free.values()):
        chosen = dict(zip(free, values, strict=True))
        if given["task"] not in RL:
            yield chosen
            continue
        for placed in _placements({**given, **chosen}, gpus):
            yield chosen | placed


def _placements(given: Fields, gpus: int) -> Iterator[dict[str, Any]]:
    """All roles on all GPUs; or vLLM on a half or a quarter, the rest with the actor, or with a half for the critic."""
    if "placement" in given or any(name.endswith(".gpus") for name in given):
        yield {}
        return
    yield {"placement": "colocated"}
    if given.get("rollout.engine") != "vllm":
        return
    for share in (2, 4):
        serving, left = gpus // share, gpus - gpus // share
        if serving and left:
            apart = {"placement": "separate", "rollout.gpus": serving}
            yield apart | {"roles.actor.gpus": left}
            if given["task"] == "ppo" and left % 2 == 0:
                yield apart | {"roles.actor.gpus": left // 2, "roles.critic.gpus": left // 2}


def _by_ranks(base: Scenario, given: Fields) -> Iterator[Scenario]:
    """`base` with each number of ranks that an engine of vLLM may have; itself where none serves or it is given."""
    if not base.rollout or base.rollout.engine != "vllm" or "rollout.tensor_parallel" in given:
        yield base
        return
    for ranks in RANKS:
        try:
            yield vary(base, {"rollout.tensor_parallel": ranks})
        except ScenarioError:
            continue


def _axes(base: Scenario, given: Fields) -> Iterator[Axis]:
    """The axes of a branch but for the micro batch: of each setting left open the values that the framework accepts."""
    # PyTorch's CPU offload of FSDP takes weights, gradients and states along; verl moves each by itself
    together = base.sharding in ("fsdp1", "fsdp2") and base.framework != "verl" and not set(OFFLOADS) & set(given)
    for name, values in AXES.items():
        if together and name.startswith("offload."):
            continue
        if name not in given and _applies(base, name):
            yield from _open(base, name, [{name: value} for value in values])
    if together:
        yield from _open(base, "offload", [dict.fromkeys(OFFLOADS, x) for x in (False, True)])
    frozen = [f"roles.{name}.offload.parameters" for name in ("reference", "reward") if base.has(name)]
    movable = [place for place in frozen if place not in given]
    if movable and base.sharding == "zero3":
        yield from _open(base, FROZEN, [dict.fromkeys(movable, x) for x in (False, True)])


def _applies(base: Scenario, name: str) -> bool:
    """Whether a setting does anything in `base`."""
    if name == "logprob":
        return base.framework == "torch" and (base.task == "dpo" or base.task in RL)
    if name.startswith("rollout."):
        colocated = base.placement == "colocated" or name != "rollout.sleep"
        return base.rollout is not None and base.rollout.engine == "vllm" and colocated
    return True


def _open(base: Scenario, name: str, values: list[dict[str, Any]]) -> Iterator[Axis]:
    """The axis with those values that the framework accepts; none where it accepts one, the value that `base` has."""
    allowed = []
    for value in values if name not in UNREFUSED else ():
        try:
            vary(base, value)
        except ScenarioError:
            continue
        allowed.append(value)
    allowed = allowed or values
    if len(allowed) > 1:
        yield Axis(name, tuple(allowed))


def _micro_batches(base: Scenario, given: Fields) -> tuple[Fields, ...]:
    """Powers of two that divide a GPU's share of the global batch, the largest first."""
    if "micro_batch" in given:
        return ({"micro_batch": base.micro_batch},)
    share, n, found = base.global_batch // base.data_parallel, 1, []
    while n <= min(share, LARGEST_MICRO_BATCH) and share % n == 0:
        found.append({"micro_batch": n})
        n *= 2
    return tuple(reversed(found))
