"""The configurations of a job that a framework may run: the settings that a user left open, spelled out.

A setting that changes what the model learns is no axis but a rung: full fine-tuning with AdamW, with 8-bit AdamW, with
weights of 16 bits alone, with both, with paged 8-bit AdamW that steps in backward, LoRA, QLoRA, each of the two then
with adapters of 16 bits. Time decides within a rung, never between two. Each rung is followed by the same with Liger's
kernels, where a trainer has a switch for them, and with GPUs that share a sequence, which pay for communication: both
are asked only if nothing fits without.

Within a rung a *branch* holds everything on which other defaults depend (sharding, placement and who generates), with
one tensor parallelism of vLLM, and with or without accumulation of gradients. A branch is a lattice of *axes*. Along
each, a step takes longer and longer. Along the last ones, the lean axes, memory falls as well; along the others it
usually falls, yet not always: an offloaded optimizer needs a buffer for the gradient that travels. All else stays as
given, or at the framework's default.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from math import gcd, lcm, prod
from typing import Any, NamedTuple

from calc.base.optimizers import OPTIMIZERS, USUAL
from calc.base.schema import show
from calc.base.units import GB
from calc.catalog.catalog import GPU, Catalog, Node
from calc.frameworks.base import Choices, together
from calc.frameworks.registry import framework
from calc.models.architecture import Architecture, parameters
from calc.resolve.parse import images_of, parse, vary
from calc.scenario.rules import flash_faults, flatten
from calc.scenario.scenario import Scenario, ScenarioError, changed, on_card
from calc.scenario.words import (
    DEEPSPEED,
    FSDP,
    NODE,
    OWN_SHARDINGS,
    PREFERENCE,
    RL,
    SERVERS,
    SHARDINGS,
    TOGETHER,
    Attention,
)
from calc.step import placement
from calc.step.roles import Memo, Roles
from calc.throughput.rates import threads_of

Fields = Mapping[str, Any]

PACKED: tuple[Fields, ...] = (
    {"method": "full", "optimizer": "adamw-8bit"},
    # for FSDP 2, whose DTensors bitsandbytes does not take; DeepSpeed's offload takes its own CPU Adam alone
    {"method": "full", "optimizer": "adamw-torchao-8bit", "offload.optimizer": False, "offload.parameters": False},
)
EIGHT_BITS = tuple([rung["optimizer"] for rung in PACKED])  # the optimizers whose states stay on the card in 8 bits
RUNGS: tuple[Fields, ...] = (
    {"method": "full", "optimizer": "adamw"},
    *PACKED,
    {"method": "full", "optimizer": "adamw", "precision": "bf16"},  # unless that is the default anyway
    *({**rung, "precision": "bf16"} for rung in PACKED),
    # torchtune's recipe for one card (recipes/configs/llama3_1/8B_full_single_device.yaml)
    {"method": "full", "optimizer": "adamw-paged-8bit", "optimizer_in_backward": True},
    {"method": "lora", "optimizer": "adamw"},
    {"method": "lora", "optimizer": "adamw", "lora.dtype": "bf16"},  # unless adapters are so by default
    {"method": "qlora", "double_quantization": True, "optimizer": "adamw"},  # double quantisation costs nothing
    {"method": "qlora", "double_quantization": True, "optimizer": "adamw", "lora.dtype": "bf16"},
)
METHODS = ("full", "lora", "qlora")
ROOM = 512  # tokens: a length with room for images is a multiple of it
DEGREES = (2, 4, 8)  # GPUs of a node that share a sequence
# The degrees by which Megatron-core cuts a model: layers within a node, stages, and experts over the GPUs of a stage.
CUTS: Mapping[str, tuple[int, ...]] = {
    "tensor_parallel": (1, 2, 4, 8),
    "pipeline_parallel": (1, 2, 4, 8),
    "expert_parallel": (1, 2, 4, 8, 16, 32, 64),
}
# The rungs of a model that is served and not trained: its own weights, then 4-bit ones.
SERVED: tuple[Fields, ...] = ({"method": "full", "optimizer": "none"}, {"method": "qlora", "optimizer": "none"})
ALONE = ("none", "zero2", "zero3", "fsdp1", "fsdp2")  # the shardings that differ on one GPU
RANKS = (1, 2, 4, 8, 16, 32)  # of one engine of vLLM
MANY, LARGE = 16, 64 * GB  # more ranks than this only for weights of which a rank's share would be so large
# Shares of a card that vLLM may take, in steps of a tenth; more than nine tenths leave no room for the CUDA context.
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
# The global batch where a framework names none: OpenRLHF's, the only default that is the same for all tasks
# (`train.batch_size` 128, openrlhf/cli/train_sft.py:167 of 0.11.0).
GLOBAL_BATCH = 128
LOST = 0.1  # the most of a framework's own batch that is given up for one that an odd number of GPUs shares well
LARGEST_MICRO_BATCH = 64
# From fast to slow.
TURNS: Mapping[str, tuple[Any, ...]] = {
    "checkpointing": ("none", "selective", "full"),
    "offload.optimizer": (False, True),
    "offload.parameters": (False, True),
    "offload.fraction": (0.0, 1.0),
}
# From fast and hungry to slow and lean; the micro batch follows as the last.
LEANS: Mapping[str, tuple[Any, ...]] = {
    "rollout.sleep": (False, True),
    "rollout.gpu_memory_utilization": SHARES,
}


# Settings that, compared with their alternatives, cost neither memory nor time nor exactness, for plain PyTorch, which
# takes any: the fused loss (Liger's, Apple's) never writes logits out, log-probabilities row by row need one row's
# temporaries, and a fused step has none.
FREE: Mapping[str, tuple[Any, ...]] = {
    "loss": ("full", "chunked", "fused"),
    "logprob": ("log-softmax-fp32", "logsumexp", "selective"),
    "optimizer_impl": ("foreach", "fused"),
}
SPREAD = ("none", "ddp")  # the shardings of one process that spreads layers over its GPUs, and of several
MEGATRON = "megatron"  # the sharding of its distributed optimizer
LIKELY = ("pretrain", "sft")  # whose losses are likelihoods, so that parameters may step in backward
# The fields of a choice on which it depends whether the value of a field is refused; others bar one choice alone.
BARRED: Mapping[str, tuple[str, ...]] = {
    "sharding": ("sharding", "rollout.engine"),
    "placement": ("placement", "rollout.engine"),
    "rollout.engine": ("rollout.engine",),
    "rollout.sleep": ("placement", "rollout.engine"),
    "optimizer": ("sharding", "rollout.engine"),
}
OFFLOADS = ("offload.optimizer", "offload.parameters")
KEPT: Fields = {"offload.optimizer": False, "offload.parameters": False, "offload.fraction": 0.0}  # on the GPU, all
SHARE = "rollout.gpu_memory_utilization"
FROZEN = "offload.parameters of the frozen roles"


@dataclass(frozen=True, slots=True)
class Axis:
    """A setting with its values, each of them a change of fields, from hungry to lean.

    `between`: it says only what leaves the GPUs between the phases of each role, during which all of that is there.
    """

    name: str
    values: tuple[Fields, ...]
    between: bool = False


@dataclass(frozen=True, slots=True)
class Branch:
    """A lattice of configurations: `base` with one value of each axis, `turns` axes first, then the lean ones.

    Branches of the same `kin` differ in vLLM's tensor parallelism alone. `base` has no card, so that a search on
    another card finds what was made for the first. `training` caches what the trainers of one kin need, by turns, micro
    batch and sleep. `alone` marks a branch that shards on one GPU, which shares with nobody: it is there for what it
    can offload, or keeps in 16 bits.
    """

    base: Scenario
    axes: tuple[Axis, ...]
    turns: int
    kin: int
    training: dict[Hashable, Memo] = field(repr=False, compare=False)
    alone: bool = False
    leanest: tuple[int, ...] = field(init=False, repr=False, compare=False)
    single: bool = field(init=False, repr=False, compare=False)
    _serving: dict[Hashable, Memo] = field(default_factory=dict, init=False, repr=False, compare=False)
    _made: dict[tuple[int, ...], Roles | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Finds the `leanest` place, where every axis has its last value, and whether the job has a `single` model."""
        object.__setattr__(self, "leanest", tuple([len(axis.values) - 1 for axis in self.axes]))
        object.__setattr__(self, "single", len({role.model or role.name for role in self.base.keeps.roles}) == 1)

    @property
    def size(self) -> int:
        """The number of configurations."""
        return prod([len(axis.values) for axis in self.axes])

    @property
    def shares(self) -> int:
        """The number of shares of the card that vLLM may have; 0 if the share is not open."""
        return sum([len(axis.values) for axis in self.axes if axis.name == SHARE])

    def micro(self, place: tuple[int, ...]) -> int:
        """The micro batch at `place`."""
        return int(self.axes[-1].values[place[-1]]["micro_batch"])

    def kept(self, turn: tuple[int, ...]) -> tuple[int, ...]:
        """Those values of the turns that decide what stays on a GPU: all but what is recomputed."""
        return tuple([n for axis, n in zip(self.axes, turn, strict=False) if axis.name != "checkpointing"])

    def own(self, turn: tuple[int, ...]) -> tuple[int, ...]:
        """`turn` with the first values of the axes that change nothing on the GPUs within a role's own phases.

        What stays there between its phases is beside every other model.
        """
        return self.timed(turn) if self.single else turn

    def timed(self, turn: tuple[int, ...]) -> tuple[int, ...]:
        """`turn` with the first values of the axes that change no time of a role's own phases."""
        return tuple([0 if axis.between else n for axis, n in zip(self.axes, turn, strict=False)])

    def at(self, place: tuple[int, ...]) -> Scenario | None:
        """The scenario with the values at `place`; None if the framework refuses them together."""
        roles = self.roles(place)
        return roles.s if roles else None

    def roles(self, place: tuple[int, ...]) -> Roles | None:
        """The roles of the scenario at `place`; None if the framework refuses it."""
        if place not in self._made:
            self._made[place] = self._make(place)
        return self._made[place]

    def _make(self, place: tuple[int, ...]) -> Roles | None:
        changes: dict[str, Any] = {}
        for axis, index in zip(self.axes, place, strict=True):
            changes |= axis.values[index]
        try:
            s = vary(self.base, changes)
        except ScenarioError:
            return None
        turn, asleep = place[: self.turns], s.rollout and s.rollout.sleep
        training = self.training.setdefault((self.own(turn), s.micro_batch, asleep), Memo())
        within = self.training.setdefault((self.timed(turn), s.micro_batch), Memo())
        # an engine has a batch of its own; a model that generates by itself does so for a micro batch
        served = None if s.rollout and s.rollout.serves else s.micro_batch
        return Roles(s, training, self._serving.setdefault((self.kept(turn), asleep, served), Memo()), within)

    def places(self) -> Iterator[tuple[int, ...]]:
        """All places of the branch, the fastest first."""
        return product(*[range(len(axis.values)) for axis in self.axes])


def seed(job: Fields, catalog: Catalog, where: str) -> dict[str, Any]:
    """The fields that every configuration of a job shares: the given ones, and its batches.

    Configurations are compared at one global batch: the given one, else the framework's for its own defaults. Raises
    ScenarioError if the job cannot be run at all.
    """
    fields = {name: value for name, value in job.items() if value is not None}
    old = "gpu" in fields and catalog.gpu(fields["gpu"]).lacks_bf16
    if old and _choices_of(fields).fp16:
        fields.setdefault("precision", "fp16")
    for name, value in _choices_of(fields).fixed.get(str(fields.get("trainer")), {}).items():
        fields.setdefault(name, value)
    if "gpu" in fields:
        fields.setdefault(
            "attention", attention(catalog.model(fields["model"]).architecture, catalog.gpu(fields["gpu"]))
        )
    if (prompts := whole_rollout(fields)) is not None:
        fields["rollout.batch"] = prompts
    if (room := room_for_images(fields, catalog)) is not None:
        fields[room.place] = room.length
    if _choices_of(fields).megatron and any(fields.get(name, 1) != 1 for name in CUTS):
        fields.setdefault("sharding", MEGATRON)
    try:
        first = _parsed(fields, catalog, where)
    except ScenarioError as error:
        if old and (told := _too_old(error, job)):
            raise ScenarioError(f"{where}: {told}", field="gpu") from None
        raise
    batch = first.global_batch
    if "global_batch" not in fields and _choices_of(fields).own_loop:
        step = first.data_parallel * first.micro_batch
        batch = max(1, GLOBAL_BATCH // step) * step
        if first.rollout and "rollout.batch" not in fields:
            fields["rollout.batch"] = batch
    elif first.rollout and prompts is not None and "global_batch" not in fields:
        batch = even_step(first)
        fields["rollout.batch"] = max(1, prompts * first.rollout.n // batch) * batch // first.rollout.n
    fields["global_batch"] = batch
    if first.rollout:
        fields.setdefault("rollout.batch", first.rollout.batch)
    return fields


def attention(arch: Architecture, gpu: GPU) -> Attention:
    """The attention that keeps least of those that run for a model on a card; no other knows sinks and slopes."""
    if not list(flash_faults(arch, gpu)):
        return "flash"
    return "eager" if arch.attention_sinks or arch.slopes else "sdpa"


def _too_old(error: ScenarioError, job: Fields) -> str | None:
    """The line that blames the job's card, where a field that nobody gave was chosen for an old one; else None."""
    lacks = {"attention": "FlashAttention-2 does not run on it", "precision": "it has no bf16"}
    refusal = error.refusal
    if not refusal or refusal.field not in lacks or refusal.field in job:
        return None
    who = f"trainer {job['trainer']}" if "trainer" in job else refusal.by.removeprefix("with ")
    why = f"{lacks[refusal.field]}, and {who} takes only {refusal.field} {refusal.allowed}"
    return f"gpu: given {show(job['gpu'])}, but {why}; allowed: a card from Ampere on"


def even_step(first: Scenario) -> int:
    """A global batch of whole groups, near the framework's own, that GPUs share in micro batches of several sizes."""
    assert first.rollout
    one = lcm(first.data_parallel, first.rollout.n)
    sizes = [first.global_batch // (times * one) * times * one for times in (8, 4, 2)]
    return next((size for size in sizes if size >= (1 - LOST) * first.global_batch), first.global_batch)


def _parsed(fields: Fields, catalog: Catalog, where: str) -> Scenario:
    """The job with the framework's defaults, except a sharding or micro batch that cannot go with the rest.

    It is of the first rung that the framework accepts.
    """
    fields = {**_one_rank(fields), **fields}
    if fields.get("placement") == "separate":
        fields |= next(_placements({"rollout.engine": "vllm", **fields}, int(fields.get("gpus", 1))), {})
    shardings: list[Fields] = [{"sharding": name} for name in SHARDINGS if "sharding" not in fields]
    micro: list[Fields] = [{"micro_batch": 1}] if "micro_batch" not in fields else []
    by_method = {rung["method"]: rung for rung in reversed([*rungs(fields)])}
    tried = [by_method[method] for method in METHODS if method in by_method] or [{}]
    for rung, one, other in product(tried, ({}, *micro), ({}, *shardings)):
        try:
            return parse({**rung, **fields, **one, **other}, where=where, catalog=catalog)
        except ScenarioError:
            continue
    return parse({**tried[0], **fields}, where=where, catalog=catalog)  # raises the error that says what is wrong


def _one_rank(fields: Fields) -> dict[str, Any]:
    """A tensor parallelism of 1 for vLLM, possible on any number of GPUs; `_by_ranks` tries the others."""
    return {"rollout.tensor_parallel": 1} if fields.get("task") in RL else {}


def whole_rollout(fields: Fields) -> int | None:
    """The number of prompts in a rollout that all GPUs share evenly, as near to the framework's own number as can be.

    None if the number is given, or the framework's own is shared evenly already.
    """
    if fields.get("task") not in RL or "rollout.batch" in fields or fields.get("placement") == "separate":
        return None
    usual = own(fields)
    batch, n, gpus = usual["rollout.batch"], fields.get("rollout.n", usual["rollout.n"]), int(fields.get("gpus", 1))
    unit = gpus // gcd(gpus, int(n))
    return None if batch % unit == 0 else max(batch // unit, 1) * unit


class Room(NamedTuple):
    """The length `place` of a job that images ask for: `tokens` of theirs beside the framework's `own` for all."""

    place: str
    tokens: int
    own: int

    @property
    def length(self) -> int:
        """The framework's own length beside the images, in whole steps."""
        return -(-(self.tokens + self.own) // ROOM) * ROOM


def room_for_images(fields: Fields, catalog: Catalog) -> Room | None:
    """The length of a job that leaves it open, where the framework's own has no room for a sample's images."""
    place = "prompt_len" if fields.get("task") in RL else "seq_len"
    if not {"images.width", "images.height"} <= fields.keys() or place in fields:
        return None
    tower = catalog.model(fields["model"]).reading(images=True).vision
    if tower is None:
        return None
    defaults = own(fields)
    tokens = images_of({**defaults, **fields}, tower).tokens(tower)
    return Room(place, tokens, defaults[place]) if tokens > defaults[place] else None


def own(fields: Fields) -> Fields:
    """The framework's defaults for a job."""
    name, _, version = str(fields.get("framework", "torch")).partition("==")
    module = framework(name)
    return module.defaults(fields["task"], module.nearest(version) if version else module.KNOWN[-1], fields)


def rungs(job: Fields, *, experts: bool = False) -> Iterator[Fields]:
    """The rungs that contradict nothing that is given, and have adapters if any field of adapters is given.

    `experts`: the model has routed experts, which RL may train on Megatron-core, too.
    """
    if job.get("task") == "inference":
        yield from [rung for rung in SERVED if all(job.get(name, value) == value for name, value in rung.items())]
        return
    adapters = any(name.startswith("lora.") for name in job)
    for rung in RUNGS:
        own = {name: job.get(name, value) for name, value in rung.items()}
        if own["method"] != rung["method"] or (adapters and own["method"] == "full"):
            continue
        if any(rung.get(place) is False and own[place] for place in OFFLOADS):
            continue
        if "precision" in rung and (rung["precision"] != _choices_of(job).precision or "precision" in job):
            continue
        if "optimizer_in_backward" in rung and (job.get("task") not in LIKELY or not own["optimizer_in_backward"]):
            continue
        if "lora.dtype" in rung:
            if "lora.dtype" not in job and job.get("trainer", "own") in _choices_of(job).adapters:
                yield own
            continue
        if "optimizer" not in job or rung["optimizer"] == USUAL:
            yield own
            if job.get("trainer") in _choices_of(job).liger and not {"loss", "kernels"} & set(job):
                yield {**own, "loss": "fused"}
            yield from _sharing(job, own)
            may = _choices_of(job)
            spreads = experts and may.megatron and may.sharding != MEGATRON
            if spreads and rung == RUNGS[0] and "sharding" not in job:
                cut = {**own, "sharding": MEGATRON}
                yield from (cut, *_sharing(job, cut))


def _sharing(job: Fields, rung: Fields) -> Iterator[Fields]:
    """`rung` with each sequence on 2, 4 or 8 GPUs, one at a time: if more fitted, one would fit a single GPU."""
    own, gpus = _choices_of(job), int(job.get("gpus", 1))
    shared = "context_parallel" if _on_megatron({**job, **rung}) else own.shared if own.cuts(job, rung) else ""
    if not shared or job.get("micro_batch", 1) != 1 or any(f in job for f in TOGETHER):
        return
    for degree in DEGREES:
        if degree <= int(job.get("gpus_per_node", NODE)) and gpus % degree == 0:
            yield {**rung, shared: degree, "micro_batch": 1}


def with_whole_sequences(rung: Fields) -> Fields | None:
    """A rung whose GPUs share sequences alone, context parallelism, without that; None for any other."""
    if "context_parallel" not in rung:
        return None
    return {name: value for name, value in rung.items() if name not in ("context_parallel", "micro_batch")}


def shares_packed(job: Fields, rung: Fields) -> bool:
    """True if the framework lets GPUs share a sequence once sequences are packed, and does not as the job is."""
    own = _choices_of(job)
    return (
        bool(own.shared)
        and "packing" not in job
        and own.cuts({**job, "packing": True}, rung)
        and not own.cuts(job, rung)
    )


def _on_megatron(given: Fields) -> bool:
    """True if Megatron-core trains: by the sharding, or by a trainer or a framework that has no other."""
    own = OWN_SHARDINGS.get(str(given.get("trainer")), (_choices_of(given).sharding,))
    return bool(given.get("sharding", MEGATRON if MEGATRON in own else "") == MEGATRON)


@dataclass(frozen=True)
class Question:
    """A rung of a job as a cache key: the same for every card and whatever models the catalog has beside the job's."""

    words: str
    architectures: tuple[Architecture, ...]
    fields: Fields = field(compare=False)
    rung: Fields = field(compare=False)
    catalog: Catalog = field(compare=False)


def branches(fields: Fields, rung: Fields, catalog: Catalog) -> tuple[Branch, ...]:
    """Every branch of a rung that the framework accepts, the same for every card; `fields` come from `seed`."""
    named = [each for place, each in flatten(fields).items() if place == "model" or place.endswith(".model")]
    words = json.dumps([{**fields, "gpu": ""}, rung], sort_keys=True)
    architectures = tuple([catalog.model(name).architecture for name in named])
    return _branches(Question(words, architectures, fields, rung, catalog))


# the rungs of one job over machines of all sizes, asked card by card
@lru_cache(maxsize=128)
def _branches(asked: Question) -> tuple[Branch, ...]:
    fields, rung, catalog = asked.fields, asked.rung, asked.catalog
    found: list[Branch] = []
    refused: list[Fields] = []
    axes: dict[tuple[str, str, str], tuple[list[Axis], list[Axis]]] = {}
    for kin, choice in enumerate(_choices({**fields, **rung}, catalog.model(fields["model"]).architecture)):
        if any(barred.items() <= choice.items() for barred in refused):
            continue
        given = {**_free(fields), **_as_published({**fields, **rung, **choice}), **fields, **rung, **choice}
        try:
            base = _anywhere(_least({**_one_rank(given), **given}, catalog), given)
        except ScenarioError as error:
            named = BARRED.get(error.field or "", ())
            if named and (error.field in choice or error.field not in named):
                refused.append({name: choice[name] for name in named if name in choice})
            continue
        base = _started(base, given)
        kind = (base.sharding, base.placement, base.rollout.engine if base.rollout else "")
        if kind not in axes:
            axes[kind] = list(_turns(base, given)), list(_leans(base, given))
        turns, leans = axes[kind]
        turned = list(_by_ranks(base, given))
        training: dict[Hashable, Memo] = {}
        shards = base.gpus == 1 and "sharding" in choice and base.sharding != "none"
        alone = shards and any(each.base.sharding == "none" for each in found)
        for micro in _micro_batches(base, given):
            found += [Branch(each, (*turns, *leans, micro), len(turns), kin, training, alone) for each in turned]
    return tuple(found)


def _anywhere(s: Scenario, given: Fields) -> Scenario:
    """`s` on no card, and with all cores of the node that it comes to, unless a number of threads is given."""
    return changed(s, {"gpu": "", "cpu_threads": given.get("cpu_threads")})


def placed(s: Scenario, gpu: str, node: Node | None) -> Scenario:
    """A configuration of the search on a card: where Adam runs on the host, its ranks share the node's cores."""
    own = framework(s.framework).threads(s)
    if s.cpu_threads is None and own is not None:
        shared = threads_of(node, min(s.gpus, s.gpus_per_node))
        return changed(s, {"gpu": gpu, "cpu_threads": shared if steps_on_host(s) else own})
    return on_card(s, gpu)


def steps_on_host(s: Scenario) -> bool:
    """True if an optimizer, or a part of one, steps on the host: its states do not come back to a GPU for that."""
    back = any("states" in role.leaves for role in s.keeps.roles)
    return s.offload.fraction > 0 or (s.offload.optimizer and not back)


def _started(base: Scenario, given: Fields) -> Scenario:
    """`base` with vLLM started for no longer sequences than it generates, where it would be for the model's longest."""
    served = base.rollout and base.rollout.serves and base.seq_len <= base.architecture.max_positions
    if not served or not _choices_of(given).serves_whole or "rollout.max_model_len" in given:
        return base
    try:
        return vary(base, {"rollout.max_model_len": base.seq_len})
    except ScenarioError:  # of a release that says it by itself
        return base


def _least(given: Fields, catalog: Catalog) -> Scenario:
    """The scenario with the smallest micro batch that the framework takes, if none is given.

    One sequence, or two where one is refused; a GPU's whole share where parameters step in backward.
    """
    if given.get("optimizer_in_backward"):
        ranks = max(1, int(given.get("gpus", 1)) // together(given))
        return parse({"micro_batch": max(1, int(given["global_batch"]) // ranks), **given}, catalog=catalog)
    try:
        return parse({"micro_batch": 1, **given}, catalog=catalog)
    except ScenarioError as error:
        if error.field != "micro_batch" or "micro_batch" in given:
            raise
        return parse({"micro_batch": 2, **given}, catalog=catalog)


def _free(fields: Fields) -> dict[str, Any]:
    """The last value of each field of `FREE` that matters to the job, and segments that grow where steps are replayed,
    on one GPU or in PyTorch's own shards: no job needs more of a full card for them.
    """
    plain = _choices_of(fields).own_loop
    replayed = (plain or int(fields.get("gpus", 1)) == 1) and fields["task"] not in (*RL, "inference")
    grows = {"expandable_segments": True} if replayed else {}
    if not plain:
        return grows
    matters = {"sft": "loss", "pretrain": "loss"} | dict.fromkeys((*PREFERENCE, *RL), "logprob")
    place = matters.get(fields["task"])
    loss = {place: FREE[place][-1]} if place else {}
    fused = {"optimizer_impl": FREE["optimizer_impl"][-1]} if _spares(fields.get("optimizer", USUAL)) else {}
    return grows | loss | fused


def _spares(optimizer: str) -> bool:
    """True if the optimizer has the last implementation of `FREE`, and that spares temporaries of the first."""
    facts, (first, last) = OPTIMIZERS[optimizer], FREE["optimizer_impl"]
    return last in facts.implementations and facts.steps[last].temporaries < facts.steps[first].temporaries


def _choices_of(job: Fields) -> Choices:
    found = framework(str(job.get("framework", "torch")).partition("==")[0]).CHOICES
    if (trainer := job.get("trainer")) not in found.trainers:
        return found
    return found._replace(own_loop=False, precision="bf16" if trainer in found.pure else found.precision)


def _as_published(given: Fields) -> dict[str, Any]:
    """The 16-bit precision of the published checkpoint for frozen weights that the framework would load in fp32."""
    frozen, own = given["method"] in ("lora", "qlora") and given.get("optimizer") != "none", _choices_of(given)
    if not own.precision or not frozen or given.get("sharding") in DEEPSPEED:
        return {}
    return {"precision": own.precision}


def _choices(given: Fields, arch: Architecture) -> Iterator[dict[str, Any]]:
    """Every combination of the settings in which the branches of a job differ, except vLLM's tensor parallelism."""
    gpus = int(given.get("gpus", 1))
    may = _choices_of(given)
    usual: tuple[str, ...] = (MEGATRON,) if may.sharding == MEGATRON else SHARDINGS if gpus > 1 else ALONE
    if given.get("device_map") == "auto":
        usual = SPREAD
    options: dict[str, tuple[Any, ...]] = {"sharding": OWN_SHARDINGS.get(str(given.get("trainer")), usual)}
    if given["task"] in RL:
        options["rollout.engine"] = may.engines
    free = {name: values for name, values in options.items() if name not in given}
    for values in product(*free.values()):
        chosen = dict(zip(free, values, strict=True))
        for placed in _placements({**given, **chosen}, gpus) if given["task"] in RL else ({},):
            yield from [chosen | placed | cut for cut in _cuts({**given, **chosen, **placed}, arch)]


def _cuts(given: Fields, arch: Architecture) -> Iterator[dict[str, Any]]:
    """Every way in which Megatron-core can cut the model over the GPUs, by the degrees left open; elsewhere none."""
    if not _on_megatron(given):
        yield {}
        return
    free = {name: values for name, values in CUTS.items() if name not in given}
    even = [n for n in CUTS["pipeline_parallel"] if arch.layers % n == 0]
    gpus = int(given.get("roles.actor.gpus", given.get("gpus", 1)))
    for values in product(*free.values()):
        chosen = dict(zip(free, values, strict=True))
        tensor, stages, experts = (int({**given, **chosen}[name]) for name in CUTS)
        ranks, left = divmod(gpus, tensor * stages * int(given.get("context_parallel", 1)))
        whole = left == 0 and tensor <= int(given.get("gpus_per_node", NODE))
        shared = whole and given["global_batch"] % ranks == 0
        spread = experts == 1 or (arch.experts % experts == 0 < arch.experts and gpus // stages % experts == 0)
        # stages of unequal size only where more of equal size would not divide the layers
        stands = "pipeline_parallel" in given or stages in even or stages > max(even)
        if shared and spread and stands and not arch.heads % tensor and not arch.kv_heads % tensor:
            yield chosen | ({} if "sequence_parallel" in given else {"sequence_parallel": tensor > 1})


def _placements(given: Fields, gpus: int) -> Iterator[dict[str, Any]]:
    """All roles on all GPUs; or vLLM on a half or a quarter, the rest for the actor, or half of it for the critic."""
    if given.get("placement") == "colocated" or any(name.endswith(".gpus") for name in given):
        yield {}
        return
    if "placement" not in given:
        yield {"placement": "colocated"}
    if given.get("rollout.engine") not in SERVERS:
        return
    for share in (2, 4):
        serving, left = gpus // share, gpus - gpus // share
        if serving and left:
            apart = {"placement": "separate", "rollout.gpus": serving}
            yield apart | {"roles.actor.gpus": left}
            if given["task"] == "ppo" and left % 2 == 0:
                yield apart | {"roles.actor.gpus": left // 2, "roles.critic.gpus": left // 2}


def _by_ranks(base: Scenario, given: Fields) -> Iterator[Scenario]:
    """`base` with each tensor parallelism that vLLM may have; `base` itself if vLLM does not serve or it is given."""
    if not base.rollout or not base.rollout.serves or "rollout.tensor_parallel" in given:
        yield base
        return
    weights = 2 * parameters(base.architecture)
    for ranks in [n for n in RANKS if n <= base.rollout.gpus and (n <= MANY or weights > MANY * LARGE)]:
        try:
            yield vary(base, {"rollout.tensor_parallel": ranks})
        except ScenarioError:
            continue


def _turns(base: Scenario, given: Fields) -> Iterator[Axis]:
    """Settings that may cost memory: for each open one the values that the framework accepts."""
    # PyTorch's CPU offload of FSDP takes weights, gradients and states along; verl moves each by itself
    together = (
        base.sharding in FSDP
        and not framework(base.framework).CHOICES.offloads_apart
        and not set(OFFLOADS) & set(given)
    )
    for name, values in TURNS.items():
        if name not in given and not (together and name in OFFLOADS):
            yield from _accepted(base, name, [{name: value} for value in values], turn=True)
    if together:
        yield from _accepted(base, "offload", [dict.fromkeys(OFFLOADS, x) for x in (False, True)], turn=True)
    frozen = [f"roles.{name}.offload.parameters" for name in ("reference", "reward", "teacher") if base.has(name)]
    movable = [place for place in frozen if place not in given]
    if movable and base.sharding == "zero3":
        yield from _accepted(base, FROZEN, [dict.fromkeys(movable, x) for x in (False, True)], turn=True)


def _between(first: Scenario, others: Sequence[Scenario]) -> bool:
    """See `Axis`, of the scenarios at its values: whether the engines of all roles are the same, but for what leaves
    them.
    """
    if first.rollout is None:
        return False
    if all([role.leaves for role in s.keeps.roles] == [role.leaves for role in first.keeps.roles] for s in others):
        return False

    def within(s: Scenario) -> tuple[Any, ...]:
        engines: list[Any] = [placement.place(s, role, s.keeps).engine for role in s.keeps.roles]
        return s.checkpointing, [replace(e, replica=replace(e.replica, leaves=frozenset())) for e in engines]

    kept = within(first)
    return all(within(other) == kept for other in others)


def _leans(base: Scenario, given: Fields) -> Iterator[Axis]:
    """The open settings of vLLM; none if it does not serve. An engine sleeps only where others need its GPUs."""
    if not base.rollout or not base.rollout.serves:
        return
    for name, values in LEANS.items():
        if name not in given and (name == SHARE or base.placement == "colocated"):
            yield from _accepted(base, name, [{name: value} for value in values])


def _accepted(base: Scenario, name: str, values: list[dict[str, Any]], *, turn: bool = False) -> Iterator[Axis]:
    """The axis with the values that the framework accepts; none if that is only the one that `base` has.

    `turn`: it is no lean axis, so that it may be one of those that `between` marks.
    """
    allowed, made = list[Fields](), list[Scenario]()
    for value in values:
        try:
            made.append(vary(base, value))
        except ScenarioError:
            continue
        allowed.append(value)
    if len(allowed) > 1:
        yield Axis(name, tuple(allowed), turn and _between(made[0], made[1:]))


def _micro_batches(base: Scenario, given: Fields) -> Iterator[Axis]:
    """The smallest micro batch and its doublings that divide a GPU's share of the global batch, the largest first.

    Where stages have several pieces, as many micro batches as stages take turns in these.
    The whole share is an axis of its own: without accumulation gradients need not outlive a micro batch, so that it may
    need less memory than half of it.
    """
    if "micro_batch" in given or base.optimizer_in_backward:
        yield Axis("micro_batch", ({"micro_batch": base.micro_batch},))
        return
    share, n, found = base.global_batch // base.data_parallel, base.micro_batch, []
    together = base.pipeline_parallel if base.virtual_pipeline > 1 else 1
    while n <= min(share, LARGEST_MICRO_BATCH) and share % (n * together) == 0:
        found.append({"micro_batch": n})
        n *= 2
    if found[-1]["micro_batch"] == share:
        yield Axis("micro_batch", (found.pop(),))
    if found:
        yield Axis("micro_batch", tuple(reversed(found)))
