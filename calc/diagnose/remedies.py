"""Remedies: single settings first, then pairs, then what `calc.recommend` finds, each computed for the job.

A remedy is a scenario that parses, with its estimate. Those that fit come first; of these the ones that leave what is
learned as it is, on the same machine; of these the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, NamedTuple

from calc.base.schema import InputError
from calc.catalog.catalog import Catalog
from calc.diagnose.job import Job
from calc.estimate.estimate import estimate, host_verdict, speed
from calc.estimate.report import deciding
from calc.estimate.result import Estimate
from calc.estimate.verdict import VERDICTS
from calc.frameworks.registry import framework
from calc.recommend.answer import fitting
from calc.recommend.space import EIGHT_BITS, SHARES
from calc.resolve.parse import parse
from calc.scenario.rules import flatten
from calc.scenario.scenario import Scenario
from calc.scenario.words import FSDP, SHARDED, SHARDINGS, Sharding
from calc.throughput import Unrated

Learns = Literal["nothing", "numerics", "what is learned"]
ORDER: tuple[Learns, ...] = ("nothing", "numerics", "what is learned")
NUMERIC = {"attention", "grad_dtype", "loss", "optimizer", "precision"}  # fields that round otherwise
SHOWN = 12  # remedies of an answer
PAIRED = 7  # single changes that are tried together with each other
SHORTER = 3  # times that sequences are halved
PINNED_MIB = 64  # a threshold below every block that counts: an embedding, a layer, a rank's share
HELPS = 0.01  # of the peak: less is no help
EVENTS = 1_000_000  # of all replays for a diagnosis: about a second of a processor
KEPT = ("global_batch", "rollout.batch", "rollout.n")  # fields that define what a step learns from
# The fields that define a job for a search over everything else.
DEFINING = (
    "model", "task", "gpu", "gpus", "gpus_per_node", "host_memory", "seq_len", "prompt_len", "response_len",
    "expected_len", "packing", "global_batch", "rollout.batch", "rollout.n", "trainer",
)  # fmt: skip


class Change(NamedTuple):
    """A setting to change: the values to try, the mildest first, and what it changes for the training.

    `machine`: it asks for more GPUs or more host memory.
    """

    name: str
    values: tuple[Mapping[str, Any], ...]
    learns: Learns
    costs: str
    machine: bool = False


@dataclass(frozen=True)
class Remedy:
    """A change with what it does: the estimate after it, and the time of a step against the job's, as a factor."""

    names: tuple[str, ...]
    changes: Mapping[str, Any]
    learns: Learns
    costs: str
    machine: bool
    estimate: Estimate
    time: float | None
    given: Mapping[str, Any]

    @property
    def fits(self) -> bool:
        """True if the estimate says that the job fits with it."""
        return self.estimate.verdict == "fits" and host_verdict(self.estimate) != "oom"

    @property
    def peak(self) -> int:
        """The peak of the GPU group with the least room, in bytes."""
        return deciding(self.estimate).peak.moment.device_bytes


def changes(s: Scenario) -> Iterator[Change]:
    """Every single change that may help a job, without regard to what the framework accepts."""
    yield from _batches(s)
    if s.checkpointing != "full":
        yield Change("activation checkpointing", ({"checkpointing": "full"},), "nothing", "layers are computed twice")
    yield from _spread(s)
    yield from _moved(s)
    if s.attention == "eager":
        yield Change("FlashAttention", ({"attention": "flash"}, {"attention": "sdpa"}), "numerics", "another kernel")
    if s.loss == "full" and not s.rollout:
        values = ({"loss": "fused"}, {"loss": "chunked"})
        yield Change("fused or chunked loss", values, "numerics", "logits are never whole")
    if not s.expandable_segments:
        yield Change(
            "expandable segments", ({"expandable_segments": True},), "nothing", "only how the allocator maps memory"
        )
    yield from _serving(s)
    if s.grad_dtype == "fp32" and s.method == "full":
        yield Change("bf16 gradients", ({"grad_dtype": "bf16"},), "numerics", "gradients are accumulated in 16 bits")
    if s.optimizer == "adamw" and s.method == "full":
        packed = tuple([{"optimizer": name} for name in EIGHT_BITS])
        yield Change("8-bit Adam", packed, "numerics", "states of a byte each")
        if s.precision not in ("bf16", "fp16"):
            yield Change("bf16 weights and states", ({"precision": "bf16"},), "numerics", "no fp32 copy of the weights")
    yield from _learning(s)
    if s.placement == "colocated":
        times = tuple({"gpus": s.gpus * n, **_nodes(s, n), **_sharded(s)} for n in (2, 4, 8))
        yield Change("more GPUs", times, "nothing", "more of the same GPUs", machine=True)


def _batches(s: Scenario) -> Iterator[Change]:
    if s.max_tokens_per_gpu:
        least = s.expected_len
        halves = [n for n in _halves(s.max_tokens_per_gpu) if n >= least // max(1, s.context_parallel)]
        if halves:
            values = tuple({"max_tokens_per_gpu": n} for n in halves)
            yield Change("fewer tokens in a batch", values, "nothing", "more, smaller forwards in a step")
    elif s.micro_batch > 1:
        values = tuple({"micro_batch": n} for n in _halves(s.micro_batch))
        yield Change("smaller micro batch", values, "nothing", "more accumulation, the same global batch")
    if s.rollout and not s.max_tokens_per_gpu:
        scored = s.rollout.micro_batch or s.micro_batch
        if scored > 1:
            values = tuple({"rollout.micro_batch": n} for n in _halves(scored))
            yield Change("smaller micro batch in scoring", values, "nothing", "more, smaller forwards in scoring")


def _halves(n: int) -> list[int]:
    found = []
    while n > 1:
        n //= 2
        found.append(n)
    return found


def _spread(s: Scenario) -> Iterator[Change]:
    """Ways of sharding more than now, of the same family first."""
    if s.gpus == 1:
        return
    family, stage = s.sharded
    own = [name for name in SHARDINGS if SHARDED[name].family == family and SHARDED[name].stage > stage]
    if family == "fsdp":
        own = []
    spreading: tuple[Sharding, ...] = ("zero2", "zero3", "fsdp1", "fsdp2")
    others = [name for name in spreading if family in ("none", "ddp") and name not in own]
    for name in (*own, *others):
        words = {"zero": "ZeRO stage", "fsdp": "FSDP", "ddp": "DDP"}[SHARDED[name].family]
        title = f"{words} {SHARDED[name].stage}" if SHARDED[name].stage else words
        yield Change(title, ({"sharding": name},), "nothing", "states, gradients or weights are shared out")


def _moved(s: Scenario) -> Iterator[Change]:
    """Offload to host memory, or back from there where that is short."""
    optimizer, parameters = s.offload.optimizer, s.offload.parameters
    # PyTorch's offload of FSDP takes weights, gradients and states along
    together = s.sharding in FSDP and not framework(s.framework).CHOICES.offloads_apart
    if not optimizer and not together:
        yield Change("offload the optimizer", ({"offload.optimizer": True},), "nothing", "Adam steps on the CPU")
    if not parameters:
        both = {"offload.optimizer": True, "offload.parameters": True}
        yield Change("offload weights and optimizer", (both,), "nothing", "weights travel in each forward and backward")
    for name in ("reference", "reward"):
        own = s.role(name)
        if own and not own.offload.parameters:
            place = f"roles.{name}.offload.parameters"
            yield Change(f"offload the {name} model", ({place: True},), "nothing", "it travels for each forward")


def _serving(s: Scenario) -> Iterator[Change]:
    """vLLM's share, its sleep, its ranks, and GPUs of its own."""
    r = s.rollout
    if not r or not r.serves:
        return
    lower = tuple({"rollout.gpu_memory_utilization": x} for x in SHARES if x < r.gpu_memory_utilization)
    higher = tuple({"rollout.gpu_memory_utilization": x} for x in reversed(SHARES) if x > r.gpu_memory_utilization)
    if lower:
        yield Change("a smaller share for vLLM", lower, "nothing", "a smaller KV cache: fewer sequences at once")
    if higher:
        yield Change("a larger share for vLLM", higher, "nothing", "less is left for training beside it")
    whole = s.architecture.max_positions if framework(s.framework).CHOICES.serves_whole else 0
    if (r.max_model_len or whole) > s.seq_len:
        shorter = ({"rollout.max_model_len": s.seq_len},)
        yield Change("a shorter context for vLLM", shorter, "nothing", "as long as prompt and response")
    if not r.sleep and s.placement == "colocated":
        yield Change(
            "let vLLM sleep while others work", ({"rollout.sleep": True},), "nothing", "weights wake for each rollout"
        )
    ranks = tuple({"rollout.tensor_parallel": n} for n in (2, 4, 8) if n > r.tensor_parallel and r.gpus % n == 0)
    if ranks:
        yield Change("more GPUs for each engine of vLLM", ranks, "nothing", "fewer engines, each over several GPUs")
    if s.placement == "colocated" and s.gpus > 1:
        apart = tuple(
            {"placement": "separate", "rollout.gpus": n, "rollout.sleep": False, "rollout.tensor_parallel": t}
            for n in (s.gpus // 2, s.gpus // 4)
            for t in (r.tensor_parallel, 1)
            if n and n % t == 0
        )
        yield Change("GPUs of its own for vLLM", apart, "nothing", "training has fewer GPUs")
    if s.placement == "separate":
        roles = {f"roles.{name}.gpus": None for name in s.roles}
        shared = {"placement": "colocated", "rollout.gpus": None, "rollout.sleep": True, **roles}
        yield Change("all roles on all GPUs, vLLM asleep between", (shared,), "nothing", "roles take turns")


def _learning(s: Scenario) -> Iterator[Change]:
    """Changes that train something else: adapters, shorter sequences."""
    if s.method == "full" and s.task != "inference":
        yield Change("LoRA", ({"method": "lora"},), "what is learned", "adapters are trained beside frozen weights")
    if s.method != "qlora":
        yield Change("QLoRA", ({"method": "qlora"},), "what is learned", "adapters beside 4-bit weights")
    if s.rollout:
        shorter = tuple({"response_len": n} for n in _halves(s.response_len)[:SHORTER])
        yield Change("shorter responses", shorter, "what is learned", "longer ones are cut")
    else:
        shorter = tuple({"seq_len": n} for n in _halves(s.seq_len)[:SHORTER])
        yield Change("shorter sequences", shorter, "what is learned", "longer ones are cut")


def _nodes(s: Scenario, times: int) -> dict[str, int]:
    """Whole nodes for `times` as many GPUs."""
    return {"gpus_per_node": s.gpus_per_node if s.gpus * times > max(8, s.gpus_per_node) and s.nodes > 1 else None}  # type: ignore[dict-item]


def _sharded(s: Scenario) -> dict[str, str]:
    return {"sharding": framework(s.framework).CHOICES.sharding} if s.gpus == 1 else {}


# ---- trying them ---------------------------------------------------------------------------------------------------


class Tried:
    """Estimates of a job with changes, each made once."""

    def __init__(self, job: Job, before: Estimate, catalog: Catalog) -> None:
        """The estimate `before` any change."""
        self.job, self.before, self.catalog = job, before, catalog
        self.step = _step(before, catalog)
        whole = flatten(job.scenario.as_dict())
        self.kept = {name: whole[name] for name in KEPT if name in whole and name not in job.given}
        self.left = EVENTS - _events(before)
        self.unreplayed = False  # a remedy was computed without a replay, as none were left

    def remedy(self, parts: Sequence[Change], values: Mapping[str, Any]) -> Remedy | None:
        """The remedy of some changes with these values; None if the framework refuses them."""
        found = self._parsed(values)
        if found is None:
            return None
        s, given = found
        e = estimate(s, self.catalog, replays=self.left > 0)
        self.unreplayed |= self.left <= 0
        self.left -= _events(e)
        after = _step(e, self.catalog)
        return Remedy(
            tuple(part.name for part in parts),
            values,
            max((part.learns for part in parts), key=ORDER.index),
            "; ".join(part.costs for part in parts),
            any(part.machine for part in parts),
            e,
            after / self.step if after and self.step else None,
            given,
        )

    def _parsed(self, values: Mapping[str, Any]) -> tuple[Scenario, dict[str, Any]] | None:
        """The scenario with changes: at the same global batch if that can be had, else at a batch near it."""
        for kept in (self.kept, {}):
            given = {**kept, **self.job.given, **values}
            given = {name: value for name, value in given.items() if value is not None}
            if given.get("method") == "full":
                given = {name: value for name, value in given.items() if not name.startswith("lora.")}
            for drop in (
                (),
                ("global_batch",),
                ("gpus_per_node",),
                ("roles.critic.global_batch", "precision", "global_batch"),
            ):
                less = {name: value for name, value in given.items() if name not in drop or name in values}
                try:
                    return parse(less, catalog=self.catalog), less
                except InputError:
                    continue
        return None

    def single(self, change: Change) -> Iterator[Remedy]:
        """The remedy of the mildest value that fits; of the strongest one if none does."""
        last = None
        for values in change.values:
            found = self.remedy((change,), values)
            last = found or last
            if found and found.fits:
                break
        if last:
            yield last


def _step(e: Estimate, catalog: Catalog) -> float | None:
    try:
        return speed(e, catalog).step_seconds
    except Unrated:
        return None


def _events(e: Estimate) -> int:
    """About how many events the allocator's replays had."""
    return sum([g.events for g in e.groups])


def overshoot(e: Estimate, *, host: bool) -> float:
    """The largest share of the memory there is that a job needs: of a card or, for `host`, of a node.

    A card on which vLLM does not start counts as one more.
    """
    shares = [g.peak.moment.device_bytes / g.usable_bytes + (g.refusal is not None) for g in e.groups]
    return max([*shares, e.host_peak / e.host_memory.bytes] if host or e.on_host else shares)


def rank(remedy: Remedy) -> tuple[Any, ...]:
    """The key that orders remedies."""
    verdict = VERDICTS.index(remedy.estimate.verdict)
    return verdict, ORDER.index(remedy.learns), remedy.machine, remedy.time or 1.0, remedy.peak


def remedies(tried: Tried, *, host: bool, phase: str | None) -> list[Remedy]:
    """The remedies of a job, the best first; of a job that fits those that free most in the `phase` where it died."""
    s = tried.job.scenario
    short = host or tried.before.on_host
    asked = [*_host(s), *[each for each in changes(s) if "offload" not in each.name]] if short else list(changes(s))
    singles = [remedy for change in asked for remedy in tried.single(change)]
    if tried.before.verdict == "fits" and not short:
        return _freeing(tried.before, singles, phase)
    most = overshoot(tried.before, host=short) * (1 - HELPS)
    useful = [each for each in singles if each.fits or overshoot(each.estimate, host=short) < most]
    if short and tried.before.verdict == "fits":  # the node's memory is only assumed
        spared = [each for each in singles if each.estimate.host_peak < tried.before.host_peak * (1 - HELPS)]
        return _different(sorted(spared, key=rank))
    found = list(useful)
    if not _done(useful):
        found += _pairs(tried, asked, useful, host=short)
    if not _done(found):
        found += _stacked(tried, asked, singles, host=short)
    if not _done(found):
        found += _searched(tried, wider=not any(each.fits for each in found))
    return _different(sorted(found, key=rank))


def _different(found: Sequence[Remedy]) -> list[Remedy]:
    """The first remedies, each scenario once."""
    once: dict[str, Remedy] = {}
    for remedy in found:
        once.setdefault(str(sorted(flatten(remedy.estimate.scenario.as_dict()).items())), remedy)
    return list(once.values())[:SHOWN]


def _done(found: Sequence[Remedy]) -> bool:
    """True if something fits on the same machine that leaves what is learned as it is."""
    return any(each.fits and each.learns != ORDER[-1] and not each.machine for each in found)


def _freeing(before: Estimate, singles: list[Remedy], phase: str | None) -> list[Remedy]:
    """The changes that free most in one phase."""
    was = in_phase(before, phase)
    saved = [(was - in_phase(each.estimate, phase), each) for each in singles if each.fits]
    least = HELPS * was
    found = sorted(saved, key=lambda pair: (ORDER.index(pair[1].learns), pair[1].machine, -pair[0]))
    return _different([each for bytes, each in found if bytes > least])


def in_phase(e: Estimate, phase: str | None) -> int:
    """The bytes of a phase on the GPU group where they are most; of the peak if no phase is named or runs."""
    sizes = [p.moment.device_bytes for g in e.groups for p in g.phases if p.name == phase]
    return max(sizes, default=deciding(e).peak.moment.device_bytes)


def _pairs(tried: Tried, asked: Sequence[Change], useful: Sequence[Remedy], *, host: bool) -> Iterator[Remedy]:
    """Pairs of the changes that help most, those that keep what is learned before the others."""
    by_name = {change.name: change for change in asked}
    best = sorted(
        (each for each in useful if not each.machine),
        key=lambda each: (ORDER.index(each.learns), overshoot(each.estimate, host=host)),
    )
    kept = [each for each in best if each.learns != ORDER[-1]][:PAIRED]
    others = [each for each in best if each.learns == ORDER[-1]][:2]
    for group in ((kept, kept), (kept, others)):
        fitted = False
        for one, other in combinations(dict.fromkeys(id(x) for part in group for x in part), 2):
            pair = [each for each in best if id(each) in (one, other)]
            if set(pair[0].changes) & set(pair[1].changes):
                continue
            parts = [by_name[each.names[0]] for each in pair]
            remedy = tried.remedy(parts, {**pair[0].changes, **pair[1].changes})
            if remedy and remedy.fits:
                fitted = True
                yield remedy
        if fitted:
            return


def _stacked(tried: Tried, asked: Sequence[Change], singles: Sequence[Remedy], *, host: bool) -> Iterator[Remedy]:
    """As many changes as it takes, the one that helps most first; in the end those that are not needed are left out."""
    by_name = {change.name: change for change in asked}
    open_ = [each for each in singles if each.learns != ORDER[-1] and not each.machine]
    held: list[Remedy] = []
    best: Remedy | None = None

    def together(each: Sequence[Remedy]) -> Remedy | None:
        values: dict[str, Any] = {}
        for one in each:
            values |= one.changes
        return tried.remedy([by_name[one.names[0]] for one in each], values)

    while open_ and not (best and best.fits):
        found = [(made, each) for each in open_ if (made := together([*held, each]))]
        if not found:
            return
        made, each = min(found, key=lambda pair: (not pair[0].fits, overshoot(pair[0].estimate, host=host)))
        if best and not made.fits and overshoot(made.estimate, host=host) >= overshoot(best.estimate, host=host):
            return
        best = made
        held.append(each)
        open_ = [other for other in open_ if not set(other.changes) & set(each.changes)]
    if best is None or not best.fits:
        return
    for each in list(held):
        less = [other for other in held if other is not each]
        made_less = together(less) if less else None
        if made_less and made_less.fits:
            held, best = less, made_less
    yield best


def _searched(tried: Tried, *, wider: bool) -> Iterator[Remedy]:
    """The finds of a search over all settings as the job is trained; `wider`: also on more GPUs, and by any method."""
    given, s = tried.job.given, tried.job.scenario
    name = s.framework_asked
    whole = flatten(s.as_dict())
    kept = {place: whole[place] for place in DEFINING if place in whole and place != "expected_len"}
    roles = {place: value for place, value in given.items() if place.startswith("roles.") and place.endswith(".model")}
    roles |= {place: value for place, value in given.items() if place.startswith("roles.") and place.count(".") == 1}
    loose = {place: value for place, value in kept.items() if place not in ("global_batch", "rollout.batch")}
    searches = [{**kept, **roles, "method": s.method}, {**loose, **roles, "method": s.method}]
    searches += [{**loose, **roles}] if wider else []
    failed = set[str]()
    for fields in searches:
        for gpus in (s.gpus, s.gpus * 2, s.gpus * 4) if wider else (s.gpus,):
            asked = {**fields, "framework": name, "gpus": gpus}
            if gpus != s.gpus:
                asked.pop("gpus_per_node", None)
            try:
                found = fitting(asked, tried.catalog, failed=failed)
            except InputError:
                continue
            if found:
                own = flatten(found.scenario.as_dict())
                differs = {place: value for place, value in own.items() if whole.get(place) != value and _shown(place)}
                e = found.judged.estimate
                step = _step(e, tried.catalog)
                time = step / tried.step if step and tried.step else None
                costs = "several settings at once, found by a search over all of them"
                names = ("the configuration that recommend finds",)
                yield Remedy(names, differs, _learnt(differs), costs, gpus > s.gpus, e, time, own)
                return


def _learnt(differs: Mapping[str, Any]) -> Learns:
    """What settings that differ change of the training."""
    if "method" in differs:
        return "what is learned"
    return "numerics" if NUMERIC & differs.keys() else "nothing"


def _shown(place: str) -> bool:
    return place.partition(".")[0] not in ("versions", "gpus_per_node", "expected_len") and place != "rollout.gpus"


def _host(s: Scenario) -> Iterator[Change]:
    """Changes that spare host memory."""
    if s.offload.parameters:
        yield Change(
            "weights stay on the GPU", ({"offload.parameters": False},), "nothing", "more GPU memory, less waiting"
        )
    if s.offload.optimizer:
        nothing = {"offload.optimizer": False, "offload.parameters": False}
        yield Change("nothing is offloaded", (nothing,), "nothing", "more GPU memory, quicker steps")
        yield Change(
            "nothing is offloaded, ZeRO stage 3", ({**nothing, "sharding": "zero3"},), "nothing", "more GPU memory"
        )
    for name in ("reference", "reward"):
        own = s.role(name)
        if own and own.offload.parameters:
            place = f"roles.{name}.offload.parameters"
            yield Change(f"the {name} model stays on the GPU", ({place: False},), "nothing", "more GPU memory")
    if s.rollout and s.rollout.sleep:
        yield Change("vLLM does not sleep", ({"rollout.sleep": False},), "nothing", "its weights stay on the GPU")
    if not s.pinned_max_round_threshold_mb:
        yield Change(
            "pinned memory that is not rounded",
            ({"pinned_max_round_threshold_mb": PINNED_MIB},),
            "nothing",
            "large blocks are pinned anew each time",
        )
    more = tuple({"host_memory": n} for n in (256, 512, 1024, 1536, 2048, 4096) if n > (s.host_memory or 0))
    yield Change("more host memory", more, "nothing", "nodes with more memory", machine=True)
    yield Change("LoRA", ({"method": "lora"},), "what is learned", "few states to keep on the host")
    if s.placement == "colocated":
        times = tuple({"gpus": s.gpus * n, **_nodes(s, n)} for n in (2, 4))
        yield Change("more GPUs", times, "nothing", "each node holds a smaller share", machine=True)
