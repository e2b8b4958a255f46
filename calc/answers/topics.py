"""All recommendations that pages ask for: every task of every model on each machine, computed once and kept.

An answer depends on calc, on its job, its model, its GPU and that GPU's nodes, and on nothing else. It is therefore
kept between builds under those (`calc.answers.kept`), and a change of one GPU asks again about that one alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from calc.answers import advice, along, answers
from calc.answers.advice import PENDING, TRAINED, Advice, Job, Machine
from calc.answers.along import Along
from calc.answers.answers import Preview
from calc.answers.kept import FOLDER, Kept, fingerprint, of_gpu, of_model
from calc.answers.workings import Shared
from calc.base.project import ROOT
from calc.base.reading import parse_mapping, read_bytes
from calc.base.schema import InputError, validator
from calc.base.units import GiB
from calc.catalog.catalog import GPU, Catalog, Model
from calc.recommend.machines import Machine as Sold
from calc.recommend.machines import Standing, machines, stands
from calc.recommend.problem import SENSIBLE, Problem

T = TypeVar("T")
FILE, SCHEMA = ROOT / "docs" / "sizes.yaml", Path(__file__).with_name("sizes.schema.json")
COUNTS = (1, 2, 4, 8)
SEVERAL_NODES = (16, 32)  # asked of large models if the catalog knows the links between nodes of this GPU
LARGE = 10_000_000_000  # parameters


@cache
def sizes(file: Path = FILE) -> Mapping[str, Any]:
    """The file of sizes: by task, the models on pages of GPUs; the `largest` with machines; GPUs in no table.

    Raises InputError, one line, for a file that cannot be used.
    """
    found = parse_mapping(read_bytes(file, file.name), file.name)
    validator(SCHEMA)(found, file.name)
    return found


def key(given: Job) -> str:
    """A hash of everything that an answer depends on apart from calc itself."""
    return fingerprint([dict(given), of_gpu(given["gpu"]), of_model(given["model"])])


def tabled(catalog: Catalog) -> list[GPU]:
    """The GPUs that tables compare; pages of the others have figures, and no searched answers."""
    sheets = sizes().get("sheets", ())
    return [gpu for gpu in catalog.gpus.values() if gpu.id not in sheets]


class Smallest(NamedTuple):
    """The smallest machine for a job, with its recommendation; or None, with what the largest one lacks.

    `lengths`: what is recommended along the length of sequences; None where no page asks.
    """

    machine: Machine | None
    advice: Advice
    lengths: Along | None = None


class Missing(Exception):
    """Raised for an answer that has to be computed first."""


class Answers:
    """Answers by key; a missing one is computed, or, if `fixed`, raises Missing."""

    def __init__(self, catalog: Catalog, known: Mapping[Hashable, Any], *, fixed: bool = False) -> None:
        """Starts with the answers `known`."""
        self.catalog, self.known, self.fixed = catalog, dict(known), fixed
        self._shared = Shared()
        self.machines = [m for m in machines(catalog) if m.gpus <= max(SEVERAL_NODES) and not m.gpu.lacks_bf16]

    def once(self, name: Hashable, found: Callable[[], Any]) -> Any:
        """The answer under the key `name`, computed by `found` if it is missing."""
        if name not in self.known:
            if self.fixed:
                raise Missing
            self.known[name] = found()
        return self.known[name]

    def cell(self, task: str, model: str, machine: Machine) -> Advice:
        """The recommendation for a machine of a GPU's page; machines that are far too small are not searched."""
        given = {"model": model, "task": task, **advice.JOBS[task]}
        if self.catalog.gpu(machine.gpu).usable_bytes <= self.limit(given, machine.gpus):
            return advice.nothing("far too small")
        return self.find(advice.job(task, model, machine))

    def find(self, given: Job) -> Advice:
        """The recommendation for a job on its machine."""
        found: Advice = self.once(key(given), lambda: self._light(advice.advise(given, self.catalog)))
        return found

    def stands(self, given: Job) -> Standing:
        """Whether a job's machine is large enough, with any method the job allows, and perhaps quick enough."""

        def found() -> Standing:
            try:
                problem = Problem(given, self.catalog)
            except InputError:
                return "too small"
            if (at := stands(problem)) == "fits":
                # asked next, with what has been found out so far
                self.once(key(given), lambda: self._light(advice.advised(problem)))
            return at

        known: Standing = self.once(("stands", key(given)), found)
        return known

    def _light(self, found: Advice) -> Advice:
        return found._replace(working=self._shared(found.working))

    def smallest(self, model: str, task: str, trained: str) -> Smallest:
        """The smallest machine as `calc.recommend.machines.smallest` finds it, among those of few nodes."""
        given = {"model": model, "task": task, **advice.JOBS[task], **TRAINED[trained]}
        least: Sold | None = None
        for m in self.machines:
            if m.gpu.usable_bytes <= self.limit(given, m.gpus):
                continue
            stands = self.stands(given | m.fields)
            if stands == "fits" and (found := self.find(given | m.fields)).slowed <= SENSIBLE:
                return Smallest(Machine(m.gpu.id, m.gpus), found)
            if stands != "too small":
                least = least or m
        last = least or self.machines[-1]
        return Smallest(least and Machine(least.gpu.id, least.gpus), self.find(given | last.fields))

    def lengths(self, given: Job) -> Along:
        """A job along the length of its sequences."""
        found: Along = self.once(("lengths", key(given)), lambda: along.along(given, "seq_len"))
        return found

    def limit(self, given: Job, gpus: int) -> int:
        """The bytes of card memory up to which a job is known not to fit on `gpus` cards."""
        name = fingerprint([dict(given), gpus, of_model(given["model"]), of_gpu(advice.largest(self.catalog).id)])

        def found() -> int:
            most = self.limit(given, gpus // 2) if gpus > 1 else advice.IMAGINED[-1] * GiB
            return advice.limit(given, gpus, self.catalog, most)

        return int(self.once(("limit", name), found))


class Topic(NamedTuple):
    """The questions about one task of one model: machines of GPUs' pages; the smallest machines always belong."""

    model: str
    task: str
    cells: tuple[Machine, ...]

    @property
    def name(self) -> str:
        """The name under which the topic's answers are kept."""
        return f"{self.model}-{self.task}"


Found = tuple[dict[Machine, Advice], dict[str, Smallest]]
FOUND: dict[tuple[str, str], Found] = {}


def searched(model: Model) -> bool:
    """True if pages recommend machines for a model."""
    return bool(model.parameters <= sizes()["largest"] * 10**9)


def topics(catalog: Catalog) -> list[Topic]:
    """All topics; the largest models first, because they take longest."""
    found = []
    for model in sorted(filter(searched, catalog.models.values()), key=lambda m: -m.parameters):
        for task in advice.JOBS:
            counts = {g.id: asked(g, model, task, catalog) for g in tabled(catalog)}
            cells = [Machine(gpu, n) for n in (*COUNTS, *SEVERAL_NODES) for gpu, own in counts.items() if n in own]
            found.append(Topic(model.id, task, tuple(cells)))
    return found


def asked(gpu: GPU, model: Model, task: str, catalog: Catalog) -> tuple[int, ...]:
    """The numbers of GPUs that a GPU's page lists for a model; none without bf16, which every command needs."""
    if gpu.lacks_bf16 or model.id not in sizes()[task]:
        return ()
    joined = any(gpu.id in node.gpu_ids and node.inter_gbs for node in catalog.nodes.values())
    return (*COUNTS, *(SEVERAL_NODES if joined and model.parameters >= LARGE else ()))


def drawn(every: Sequence[Topic], share: int) -> Sequence[Topic]:
    """One topic in `share`: which ones depends on the commit, so that in time it is every one."""
    return every[int(os.environ.get("SOURCE_DATE_EPOCH", 0)) % share :: share]


def _answered(topic: Topic, known: Answers, *, pending: bool = False) -> Found:
    """The answers on a topic; if `pending`, PENDING in place of each that is Missing."""

    def ask(found: Callable[[], T], instead: T) -> T:
        try:
            return found()
        except Missing:
            if not pending:
                raise
            return instead

    model, task, left_out = topic.model, topic.task, Smallest(None, PENDING)
    cells = {machine: ask(partial(known.cell, task, model, machine), PENDING) for machine in topic.cells}
    smallest = {trained: ask(partial(known.smallest, model, task, trained), left_out) for trained in TRAINED}
    for trained, (machine, found, _) in smallest.items():
        if task == "sft" and machine and found.scenario:  # a page of a model draws the first of them
            lengths = ask(partial(known.lengths, found.scenario), None)
            smallest[trained] = Smallest(machine, found, lengths)
            break
    return cells, smallest


def _compute(every: Sequence[Topic], kept: Sequence[Mapping[Hashable, Any]]) -> list[dict[Hashable, Any]]:
    """All answers of each topic by key, including those `kept`."""
    found = []
    for topic, known in zip(every, kept, strict=True):
        asked = Answers(answers.catalog(), known)
        _answered(topic, asked)
        found.append(asked.known)
    return found


class Counted(NamedTuple):
    """Figures of a build: answers that the pages rest on, answers computed, and seconds taken."""

    answers: int
    computed: int
    seconds: float


def fill(folder: Path = FOLDER, share: int = 1) -> Counted:
    """Answers all topics, over all cores, except for answers kept in `folder`; new ones are kept there.

    Work is split by model, because a model's jobs share most of the inputs of their memory. With a `share`, what is not
    kept stays PENDING but for fine-tuning, which curves are drawn of, and one other topic in so many.
    """
    start, catalog, store = time.perf_counter(), answers.catalog(), Kept(folder)
    every = topics(catalog)
    left = {topic for topic in every if topic.task != "sft"} - set(drawn(every, share))
    kept = {topic.name: store.read(topic.name) for topic in every}
    count = computed = 0
    missing: dict[str, list[Topic]] = {}
    for topic in every:
        try:
            FOUND[topic.model, topic.task] = _answered(topic, Answers(catalog, kept[topic.name], fixed=True))
            count += len(kept[topic.name])
        except Missing:
            if topic in left:
                some = Answers(catalog, kept[topic.name], fixed=True)
                FOUND[topic.model, topic.task] = _answered(topic, some, pending=True)
            else:
                missing.setdefault(topic.model, []).append(topic)
    if missing:
        # the longest first, so that no core waits for another at the end
        each = sorted(missing.values(), key=lambda own: -sum(len(topic.cells) for topic in own))
        made = answers.spread(_compute, each, [[kept[topic.name] for topic in own] for own in each])
        for own, found in zip(each, made, strict=True):
            for topic, known in zip(own, found, strict=True):
                # what a build of another catalog has written meanwhile stays
                store.write(topic.name, store.read(topic.name) | known)
                count, computed = count + len(known), computed + len(known) - len(kept[topic.name])
                FOUND[topic.model, topic.task] = _answered(topic, Answers(catalog, known, fixed=True))
        store.forget()
    answers.Clock.asked += computed
    seconds = time.perf_counter() - start
    answers.Clock.seconds += seconds
    return Counted(count, computed, seconds)


def found(model: str, task: str) -> Found:
    """The answers on one task of a model: by machine, and the smallest machines."""
    if (model, task) not in FOUND:
        catalog = answers.catalog()
        topic = next(t for t in topics(catalog) if (t.model, t.task) == (model, task))
        known = Answers(catalog, Kept().read(topic.name), fixed=Preview.on)
        FOUND[model, task] = _answered(topic, known, pending=Preview.on)
    return FOUND[model, task]
