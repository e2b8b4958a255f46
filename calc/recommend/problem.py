"""One job on one machine, shared by the parts of an answer: its searches, and configurations that fit or do not."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from copy import copy
from functools import partial
from typing import NamedTuple

from calc.base.schema import InputError
from calc.catalog.catalog import Catalog
from calc.engines.rollout import Unstarted
from calc.estimate.host_memory import host_memory
from calc.recommend.clock import TOLERANCE, Clock
from calc.recommend.search import Found, Judged, Search
from calc.recommend.space import (
    CUTS,
    EIGHT_BITS,
    MEGATRON,
    Branch,
    Fields,
    branches,
    own,
    room_for_images,
    rungs,
    seed,
    whole_rollout,
    with_whole_sequences,
)
from calc.scenario.rules import card_warnings
from calc.scenario.scenario import Scenario, on_card
from calc.scenario.words import RL
from calc.throughput import Throughput, node_of

# Frameworks tried where none is named, for RL and for all else: those with a command, as plain PyTorch has none.
SERVING = ("verl", "openrlhf", "trl")
TUNING = ("trl", "openrlhf")
# The least and the usual number of responses in a group (verl's and TRL's own are 5 and 8:
# examples/grpo_trainer/run_qwen2-7b.sh, trl/trainer/grpo_config.py).
GROUP = (4, 8)
# A configuration that is cheaper in one way is sensible while the job takes at most this many times the GPU hours: on
# fewer GPUs, on a smaller card, on a machine that only just holds it, or with 32-bit states on the host rather than
# 8-bit ones on the card, which train as well (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, table 1).
SENSIBLE = 1.5
# Full fine-tuning whose optimizer has to leave the card is no answer where weights of 16 bits alone, or adapters if the
# method is open, take a tenth of the time: nobody would wait for it.
PATIENCE = 10
PIECES = (2, 4)  # of the model that a stage may have
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Configuration(NamedTuple):
    """A configuration that fits; `trades` says what an alternative gains and costs against the recommended one."""

    judged: Judged
    throughput: Throughput | None
    trades: str = ""

    @property
    def scenario(self) -> Scenario:
        """The scenario to run."""
        return self.judged.scenario


class Miss(NamedTuple):
    """A configuration that does not fit: the phase where memory is short, and the bytes missing, the error included.

    `where` is `gpu`, `host`, or `vllm` if the engine refuses to start; that has a `reason` and no number of bytes.
    """

    judged: Judged
    throughput: Throughput | None
    where: str
    phase: str
    shortfall: int | None
    reason: Unstarted | None = None

    @property
    def when(self) -> str:
        """The phase as the end of a sentence: `in backward`, or of the host `(after the first step)`."""
        return f"({self.phase})" if self.where == "host" else f"in {self.phase}"


def _alias(job: Fields, catalog: Catalog) -> Iterator[str]:
    """A note for a model asked for by the name of another with the same shapes, with the weights that a command has."""
    asked = str(job["model"])
    model = catalog.model(asked)
    own = {name.casefold() for name in (model.id, model.name, model.hf, model.source)}
    if asked.casefold() not in own and not catalog.tuned(asked):  # of a tuned one every scenario warns
        named = catalog.checkpoint(asked)
        yield f"model {asked}: has the shapes of {model.id}, as which it is computed; a command names {named}"


class Problem:
    """One job on one machine: its rungs, each searched at most once, and how many configurations were looked at."""

    def __init__(
        self,
        job: Fields,
        catalog: Catalog,
        where: str = "scenario",
        *,
        names: bool = True,
        failed: set[str] | None = None,
    ) -> None:
        """Raises ScenarioError where no configuration of the job can be run; see `Search` for `names`.

        `failed`: the rungs on which nothing fitted in earlier problems, which are not searched again; it grows.
        """
        self.catalog, self.names, self.failed = catalog, names, failed if failed is not None else set[str]()
        self.notes = dict.fromkeys(_alias(job, catalog))  # each once, in the order in which they came up
        self.job = job = self._grouped(job)
        self.fields = seed(job, catalog, where)
        experts = catalog.model(self.fields["model"]).architecture.experts
        self.rungs = list(rungs(self.fields, experts=experts > 0))
        if whole_rollout(job) is not None:
            prompts, gpus = self.fields["rollout.batch"], self.fields.get("gpus", 1)
            self.note(f"rollout.batch {prompts}: the framework's own number cannot be shared by {gpus} GPUs")
        if (room := room_for_images(job, catalog)) is not None:
            told = f"has no room for the {room.tokens} tokens of a sample's images"
            self.note(f"{room.place} {room.length}: the framework's own {room.own} {told}")
        self.searches: list[Search] = []
        self.misses: list[Search] = []
        # a configuration that fits and was passed over for its time: its search, its place, and the reason in words
        self.slow: tuple[Search, Found, str] | None = None
        self._asked: dict[Hashable, Search | None] = {}  # by rung and what it changes

    def note(self, *lines: str) -> None:
        """Notes lines, each once."""
        self.notes |= dict.fromkeys(lines)

    def _grouped(self, job: Fields) -> Fields:
        """The job with a group size that GRPO can compare, if none is given and the framework's own is too small."""
        if job.get("task") != "grpo" or "rollout.n" in job or (usual := own(job)["rollout.n"]) >= GROUP[0]:
            return job
        told = (
            f"rollout.n {GROUP[1]}: GRPO compares the responses of a group, and the framework's own number is {usual}"
        )
        self.note(told)
        return {**job, "rollout.n": GROUP[1]}

    def search(self, rung: Fields, changes: Fields | None = None) -> Search | None:
        """A search of one rung, with some fields of the job changed.

        None if the framework refuses all of it, or if none of it starts on the card.
        """
        fields = {**self.fields, **(changes or {})}
        gpu = self.catalog.gpu(fields["gpu"])
        found: list[Branch] = []
        for branch, reasons in started(fields, rung, self.catalog):
            self.note(*reasons)
            found += [] if reasons else [branch]
        if not found:
            return None
        base = on_card(found[0].base, gpu.id)
        node = node_of(base, self.catalog)
        made = Search(tuple(found), self.catalog, Clock(gpu, node), host_memory(base, gpu, node), self.names)
        self.searches.append(made)
        return made

    def asked(self, rung: Fields, changes: Fields | None = None) -> Search | None:
        """The same `search`, however often it is asked for."""
        key = frozenset(rung.items()), frozenset((changes or {}).items())
        if key not in self._asked:
            self._asked[key] = self.search(rung, changes)
        return self._asked[key]

    def full(self) -> Problem:
        """The same problem with full fine-tuning alone, where its method is open.

        The two share their searches, and what these note.
        """
        found = copy(self)
        found.rungs = [rung for rung in self.rungs if rung["method"] == "full"] or self.rungs
        found.misses, found.failed = [], set()
        return found

    def first(self) -> tuple[Fields, Search, Found] | None:
        """The first rung on which something fits, or a later one of 4-bit weights that need not leave the card."""
        for index, rung in enumerate(self.rungs):
            if (words := self._words(rung)) in self.failed:
                continue
            if self._shared_in_vain(rung):
                self.failed.add(words)
                continue
            search = self.asked(rung)
            found = search.best() if search else None
            if search and found:
                index, search, found = self._cut(index, search, found) or (index, search, found)
                index, search, found = self._fused(index, search, found) or (index, search, found)
                search, found = self._interleaved(index, search, found) or (search, found)
                kept = self.rungs[index], search, found
                return self._sooner(index, search, found) or self._on_card(index, search, found) or kept
            if search:
                self.misses.append(search)
            self.failed.add(words)
        return None

    def _shared_in_vain(self, rung: Fields) -> bool:
        """True if GPUs share sequences on a rung, and without that nothing fits however short these are."""
        whole = with_whole_sequences(rung)
        search = self.asked(whole) if whole in self.rungs else None
        return search is not None and search.whatever_length

    def _words(self, rung: Fields) -> str:
        """A rung of the job as a key; it has a method, whether that was open or not."""
        return json.dumps([{**self.fields, "method": rung["method"]}, rung], sort_keys=True)

    def slowed(self, at: tuple[Fields, Search, Found]) -> float:
        """The step time where an answer of `first` was found, over that of its method if memory did not count.

        It is that of the fastest configuration there, as no machine is slow for an answer that is simpler. 0 if no rate
        is known.
        """
        rung, own, found = at
        fastest = own.quickest(own.groups(sharing=False)) or own.quickest(own.groups()) or found
        return fastest.seconds / self._floor(rung["method"]) if own.rated else 0.0

    def _floor(self, method: str) -> float:
        """The step time of a method on the machine if memory did not count, in seconds."""
        asked = [self.asked(each) for each in self.rungs if each["method"] == method]
        return next(search.floor for search in asked if search)

    def surely_slow(self) -> bool:
        """True if `slowed` is above SENSIBLE whatever `first` finds; cheaper than both."""
        asked = [(rung, search) for rung in self.rungs if (search := self.asked(rung))]
        if any(not search.rated or search.in_stages for _, search in asked):
            return False  # no time is known, or `_interleaved` may find what no rung has
        return not any(search.within(SENSIBLE * self._floor(rung["method"])) for rung, search in asked)

    def _cut(self, index: int, search: Search, found: Found) -> tuple[int, Search, Found] | None:
        """The same training on Megatron-core, where a framework has it for the model, if the estimate is quicker.

        It is harder to set up, so that it has to be quicker by more than the error of times.
        """
        rung, limit = self.rungs[index], found.seconds / (1 + TOLERANCE)
        kind = {**rung, "sharding": MEGATRON}
        cuts = [(n, each) for n, each in enumerate(self.rungs) if n > index and kind.items() >= each.items()]
        for later, cut in cuts if search.rated and "sharding" not in rung else ():
            other = self.asked(cut)
            at = other.best() if other and other.within(limit) else None
            if other and at and at.seconds < limit:
                sharding = search.chosen(found).scenario.sharding
                self.slow = search, found, f"{sharding} instead of Megatron-core, which is harder to set up"
                return later, other, at
        return None

    def _fused(self, index: int, search: Search, found: Found) -> tuple[int, Search, Found] | None:
        """The same training with Liger's kernels, where they spare an offload, and time."""
        fused, offload = {**self.rungs[index], "loss": "fused"}, search.chosen(found).scenario.offload
        if fused not in self.rungs[index + 1 :] or not offload.trained:
            return None
        other = self.asked(fused)
        at = other.best() if other else None
        if other and at and at.seconds <= found.seconds:
            kept = other.chosen(at).scenario.offload
            if not kept.trained:
                return self.rungs.index(fused), other, at
        return None

    def _interleaved(self, index: int, search: Search, found: Found) -> tuple[Search, Found] | None:
        """The same cut of the model with several pieces a stage, which idles less, where the estimate is quicker.

        By more than the error of times, as for `_cut`; of two numbers of pieces the smaller.
        """
        s = search.chosen(found).scenario
        staged = s.pipeline_parallel > 1 and s.sharded.family == "megatron"
        if not staged or not search.rated or "virtual_pipeline" in self.fields:
            return None
        limit = found.seconds / (1 + TOLERANCE)
        cut = {name: getattr(s, name) for name in (*CUTS, "sequence_parallel")}
        for pieces in PIECES:
            other = self.asked(self.rungs[index], cut | {"virtual_pipeline": pieces})
            at = other.best() if other and other.within(limit) else None
            if other and at and at.seconds < limit:
                return other, at
        return None

    def _sooner(self, index: int, search: Search, found: Found) -> tuple[Fields, Search, Found] | None:
        """A later rung, where the first leaves its optimizer on the host and takes PATIENCE times as long.

        SENSIBLE times are too long already beside the same weights with states of 8 bits. Adapters are compared with
        the quickest full fine-tuning, whatever its optimizer, so that no card gets them while a smaller one trains all
        weights.
        """
        s = search.chosen(found).scenario
        if s.method != "full" or not s.offload.states or not search.rated:
            return None
        for later, rung in enumerate(self.rungs[index + 1 :], index + 1):
            other = self.asked(rung)
            full = rung["method"] == "full"
            packed = full and rung["optimizer"] in EIGHT_BITS and "precision" not in rung
            limit = found.seconds / (SENSIBLE if packed else PATIENCE)
            if not other or not other.within(limit):
                continue
            at = other.best()
            if at and at.seconds <= (limit if full else self._quickest(index, later) / PATIENCE):
                times = found.seconds / at.seconds
                self.slow = search, found, f"{s.optimizer} with its states on the host"
                first = "method full" if not full else f"{s.optimizer} with precision {s.precision}"
                slower = f"takes {times:.{1 if times < PATIENCE else 0}f} times as long"
                self.note(f"{first} fits, too, with its optimizer offloaded, and {slower}")
                return self._on_card(later, other, at) or (rung, other, at)
        return None

    def _quickest(self, index: int, later: int) -> float:
        """Seconds of the quickest full fine-tuning on the rungs from one to before another, of which the first fits."""
        full = [self.asked(rung) for rung in self.rungs[index:later] if rung["method"] == "full"]
        return min([at.seconds for search in full if search and (at := search.best())])

    def _on_card(self, index: int, search: Search, found: Found) -> tuple[Fields, Search, Found] | None:
        """4-bit weights that stay on the card, where frozen ones of 16 bits come from the host and are no quicker.

        No quicker beyond the error of times.
        """
        s = search.chosen(found).scenario
        if not s.offload.parameters or (s.method == "full" and s.optimizer != "none"):
            return None
        for rung in self.rungs[index + 1 :]:
            other = self.asked(rung) if rung["method"] == "qlora" else None
            at = other.best() if other else None
            if other and at and at.seconds <= found.seconds * (1 + TOLERANCE):
                offload = other.chosen(at).scenario.offload
                if not offload.trained:
                    return rung, other, at
        return None

    def fits(self) -> bool:
        """True if anything fits on any rung; the leanest rungs are asked first."""
        searches = (self.asked(rung) for rung in reversed(self.rungs) if not self._shared_in_vain(rung))
        return any(search is not None and search.any() for search in searches)

    @property
    def considered(self) -> int:
        """Configurations whose memory was computed, in all searches."""
        return sum(search.considered for search in self.searches)

    @property
    def size(self) -> int:
        """Configurations of all searches."""
        return sum(search.size for search in self.searches)


def posed(
    job: Fields, catalog: Catalog, where: str = "scenario", *, names: bool = True, failed: set[str] | None = None
) -> Problem:
    """The problem of a job; of one without a framework in the first in which something fits, of several tried in turn.

    Where nothing fits in any, in the first that starts on the card, or else accepts the job. A trainer is a loop of
    plain PyTorch's, and where no other takes the job that is what remains. Raises as `Problem`.
    """
    pose = partial(Problem, catalog=catalog, where=where, names=names, failed=failed)
    if "framework" in job or "trainer" in job:
        return pose(job)
    tried, words = list[Problem](), SERVING if job.get("task") in RL else TUNING
    for name in words:
        try:
            problem = pose({**job, "framework": name})
        except InputError:
            continue
        tried.append(problem)
        if problem.fits():
            break
    else:
        if not tried:
            return pose(job)
        problem = next((each for each in tried if each.searches), tried[0])
    accepted = problem.job["framework"]
    problem.note(f"framework {accepted}: none was asked for; {', '.join(words)} are tried in this order")
    return problem


def started(fields: Fields, rung: Fields, catalog: Catalog) -> Iterator[tuple[Branch, list[str]]]:
    """The branches of a rung, each with the reasons why it does not start on the job's card, or none."""
    gpu = catalog.gpu(fields["gpu"])
    for branch in branches(fields, rung, catalog):
        yield branch, list(card_warnings(on_card(branch.base, gpu.id), gpu))


def fits(job: Fields, catalog: Catalog) -> bool:
    """True if the framework can run some configuration of a job that fits."""
    try:
        return Problem(job, catalog, names=False).fits()
    except InputError:
        return False


def configured(search: Search, judged: Judged, trades: str = "") -> Configuration:
    """A configuration that fits, with its throughput."""
    return Configuration(judged, search.clock.full(judged.scenario, judged.cache_tokens), trades)
