"""What to run: the recommended configuration for each task and model on each machine, computed once and kept.

An answer depends on calc, on its job, its model, its GPU and that GPU's nodes, and on nothing else: so it is kept
between builds under those (`calc.site.kept`), and a change of one GPU asks again about that one alone.
"""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from calc.catalog import GPU, Catalog, Model
from calc.launch import Launch, LaunchError, launch
from calc.recommend.failing import closest
from calc.recommend.machines import machines
from calc.recommend.problem import Configuration, Miss, Problem, configured, fits
from calc.report import degrees
from calc.schema import InputError
from calc.site import answers
from calc.site.answers import Preview
from calc.site.kept import FOLDER, Kept, fingerprint, of_gpu, of_model
from calc.site.workings import Shared, Working, of_phase
from calc.units import GiB, MiB, gb, gib

T = TypeVar("T")
# Of each size that readers look up, the model that the case studies and published reports name most.
SIZES = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "llama-3.1-8b", "qwen2.5-14b", "qwen2.5-32b", "llama-3.1-70b")
# A search of preferences takes twice as long, of reinforcement learning ten times: their tables have fewer sizes.
FEWER: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("rm", "dpo"), ("qwen2.5-1.5b", "llama-3.1-8b", "qwen2.5-14b", "qwen2.5-32b", "llama-3.1-70b")),
    **dict.fromkeys(("ppo", "grpo"), ("qwen2.5-1.5b", "llama-3.1-8b", "qwen2.5-32b")),
}
COUNTS = (1, 2, 4, 8)
SEVERAL_NODES = (16, 32)  # asked of large models where the catalog knows how nodes of this GPU are joined
LARGE = 10_000_000_000  # parameters
HUGE = 100_000_000_000  # a search for machines of such models takes longer than that for all others together
LENGTHS: Mapping[str, Any] = {"seq_len": 2048, "global_batch": 128}
PROMPTED: Mapping[str, Any] = {"prompt_len": 512, "response_len": 1536}
JOBS: Mapping[str, Mapping[str, Any]] = {
    "sft": {"framework": "trl", **LENGTHS},
    "rm": {"framework": "openrlhf", **LENGTHS},
    "dpo": {"framework": "trl", **LENGTHS},
    "ppo": {"framework": "openrlhf", **PROMPTED},
    "grpo": {"framework": "verl", **PROMPTED},
}
ADAPTERS: Mapping[str, Any] = {"lora.rank": 16}
# What a model page asks of each task, by name: full fine-tuning, and adapters on frozen weights.
TRAINED: Mapping[str, Mapping[str, Any]] = {"full": {"method": "full"}, "LoRA or QLoRA": ADAPTERS}


class Machine(NamedTuple):
    """A number of GPUs of one kind."""

    gpu: str
    gpus: int


class Advice(NamedTuple):
    """The configuration to run and its command, or what the closest one lacks.

    `scenario` is the configuration with every field, `working` the ledger of its fullest GPU's peak, `host` the bytes
    of a node's own memory. Where nothing fits `scenario` is None, and `lacks` says why.
    """

    scenario: Mapping[str, Any] | None
    verdict: str
    working: Working
    host: int
    tokens: float | None
    words: str
    command: str
    files: Mapping[str, str]
    notes: Sequence[str]
    lacks: str


Job = Mapping[str, Any]


def job(task: str, model: str, machine: Machine, more: Job | None = None) -> dict[str, Any]:
    """The fields that a cell asks about; the search finds all others."""
    return {"model": model, "task": task, **JOBS[task], **(more or {}), **fields_of(machine)}


@cache
def fields_of(machine: Machine) -> dict[str, Any]:
    """A machine as fields of a scenario."""
    (found,) = machines(answers.catalog(), machine.gpu, machine.gpus)
    return found.fields


# ---- one answer ----------------------------------------------------------------------------------------------------


def advise(given: Job, catalog: Catalog) -> Advice:
    """What to run, as `calc.recommend` answers it, without what else could be."""
    try:
        problem = Problem(given, catalog)
        first = problem.first()
    except InputError as error:
        return _nothing(str(error).removeprefix("scenario: "))
    if first is None:
        nearest = closest(problem)
        return _nothing(_lacks(nearest) if nearest else "the framework can run no configuration of it here")
    _, search, found = first
    return _advice(configured(search, found.judged))


def _advice(best: Configuration) -> Advice:
    s, e = best.scenario, best.judged.estimate
    try:
        made = launch(s)
    except LaunchError as error:
        made = Launch("", {}, (f"No command: {error}",))
    return Advice(
        scenario=s.as_dict(),
        verdict=e.verdict,
        working=of_phase(max((g.peak for g in e.groups), key=lambda phase: phase.moment.device_bytes)),
        host=max([p.moment.device_bytes for p in e.host_phases], default=0),
        tokens=best.throughput.tokens_per_second if best.throughput else None,
        words=words(best),
        command=made.command,
        files=dict(made.files),
        notes=made.notes,
        lacks="",
    )


def _nothing(why: str) -> Advice:
    return Advice(None, "oom", Working("", ()), 0, None, "", "", {}, (), why)


def _lacks(m: Miss) -> str:
    """What the closest configuration lacks, in a few words."""
    if m.where == "vllm":
        return "vLLM does not start"
    assert m.shortfall is not None
    short = gib(m.shortfall) if m.where == "gpu" else f"{gb(m.shortfall)} of host memory"
    return f"the closest lacks {short} in {m.phase}"


PENDING = _nothing("asked anew by make site, not by the preview")
SHARDINGS = {"none": "", "ddp": "DDP", "fsdp1": "FSDP", "fsdp2": "FSDP2"}
METHODS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}


def words(best: Configuration) -> str:
    """A configuration in short words: what is trained, how it is spread, what gives room, how responses are made."""
    s = best.scenario
    sharding = SHARDINGS.get(s.sharding, s.sharding.replace("zero", "ZeRO-"))
    moved = [word for word, on in (("optimizer", s.offload.optimizer), ("weights", s.offload.parameters)) if on]
    frozen = [n for n in s.roles if (own := s.role(n)) and own.offload.parameters and not s.offload.parameters]
    parts = [
        METHODS[s.method] + (", 8-bit AdamW" if s.optimizer == "adamw-8bit" else ""),
        sharding,
        *degrees(s),
        f"{' and '.join([*moved, *frozen])} offloaded" if moved or frozen else "",
        "checkpointing" if s.checkpointing == "full" else "",
        f"micro batch {s.micro_batch}",
    ]
    if s.rollout and s.rollout.engine == "vllm":
        apart = f" on {s.rollout.gpus} GPUs of its own" if s.placement == "separate" else ""
        tp = f" TP {s.rollout.tensor_parallel}" if s.rollout.tensor_parallel > 1 else ""
        parts.append(f"vLLM{tp}{apart} with {s.rollout.gpu_memory_utilization:g} of the card")
    return ", ".join(part for part in parts if part)


# ---- all answers, kept ---------------------------------------------------------------------------------------------


def key(given: Job) -> str:
    """A hash of all that an answer depends on beside calc itself."""
    return fingerprint([dict(given), of_gpu(given["gpu"]), of_model(given["model"])])


class Smallest(NamedTuple):
    """The smallest machine for a job, with what to run there; or None, with what the largest lacks."""

    machine: Machine | None
    advice: Advice


class Missing(Exception):
    """An answer that has to be computed first."""


class Answers:
    """Answers by their keys; those that are not there are computed, or, where `fixed`, Missing."""

    def __init__(self, catalog: Catalog, known: Mapping[Hashable, Any], *, fixed: bool = False) -> None:
        """With those `known`."""
        self.catalog, self.known, self.fixed = catalog, dict(known), fixed
        self._shared = Shared()
        self.machines = [m for m in machines(catalog) if m.gpus <= max(SEVERAL_NODES) and not m.gpu.lacks_bf16]

    def once(self, name: Hashable, found: Callable[[], Any]) -> Any:
        """The answer called `name`."""
        if name not in self.known:
            if self.fixed:
                raise Missing
            self.known[name] = found()
        return self.known[name]

    def cell(self, task: str, model: str, machine: Machine) -> Advice:
        """What to run on the machine of a GPU's page; those that are far too small are not searched."""
        given = {"model": model, "task": task, **JOBS[task]}
        if self.catalog.gpu(machine.gpu).usable_bytes <= self.limit(given, machine.gpus):
            return _nothing("far too small")
        return self.find(job(task, model, machine))

    def find(self, given: Job) -> Advice:
        """What to run for a job on its machine."""
        found: Advice = self.once(key(given), lambda: self._light(advise(given, self.catalog)))
        return found

    def fits(self, given: Job) -> bool:
        """Whether anything fits, of whatever method the job allows: far quicker than to find what is fastest."""
        return bool(self.once(("fits", key(given)), lambda: fits(given, self.catalog)))

    def _light(self, found: Advice) -> Advice:
        return found._replace(working=self._shared(found.working))

    def smallest(self, model: str, task: str, trained: str) -> Smallest:
        """The first machine, from little memory in all to much, on which something fits."""
        given = {"model": model, "task": task, **JOBS[task], **TRAINED[trained]}
        for m in self.machines:
            if m.gpu.usable_bytes > self.limit(given, m.gpus) and self.fits(given | m.fields):
                return Smallest(Machine(m.gpu.id, m.gpus), self.find(given | m.fields))
        return Smallest(None, self.find(given | self.machines[-1].fields))

    def limit(self, given: Job, gpus: int) -> int:
        """Bytes of a card of which it is known that with no more nothing fits on `gpus` of them."""
        name = fingerprint([dict(given), gpus, of_model(given["model"]), of_gpu(largest(self.catalog).id)])
        return int(self.once(("limit", name), lambda: limit(given, gpus, self.catalog)))


# ---- cards on which nothing fits -----------------------------------------------------------------------------------

IMAGINED = (16, 24, 48, 80, 144, 288)  # GiB
MARGIN = 3 * GiB


def largest(catalog: Catalog) -> GPU:
    """The card that imagined ones are like but for their memory."""
    rated = [g for g in catalog.gpus.values() if not g.lacks_bf16 and g.bandwidth_gbs and g.bf16_tflops]
    return max(rated, key=lambda g: (g.vendor == "NVIDIA", g.usable_bytes, g.id))


def limit(given: Job, gpus: int, catalog: Catalog) -> int:
    """The size in bytes of the largest imagined card on which nothing fits with `gpus` of them; 0: it does on all.

    An imagined card has host memory without end, and more of its own than a real one of its size by so much that what
    differs between cards beside tensors (context, NCCL's buffers, vLLM's larger batches) cannot decide: what does not
    fit there fits on no real card of that size.
    """
    known = largest(catalog)

    def runs(size: int) -> bool:
        # vLLM takes no larger batches on what it knows as an A100
        card = replace(known, id="imagined-a100", usable_mib=(size * GiB + MARGIN) // MiB, memory_gb=1e6)
        cards = replace(catalog, gpus={**catalog.gpus, card.id: card})
        return fits({**given, "gpu": card.id, "gpus": gpus, "gpus_per_node": gpus}, cards)

    first = bisect_left(IMAGINED, True, key=runs)
    return IMAGINED[first - 1] * GiB if first else 0


# ---- all that the pages ask ----------------------------------------------------------------------------------------


class Topic(NamedTuple):
    """What is asked about one task of one model: machines of the GPUs' pages, and the smallest for the model's own."""

    model: str
    task: str
    cells: tuple[Machine, ...]

    @property
    def name(self) -> str:
        """What its answers are kept under."""
        return f"{self.model}-{self.task}"


Found = tuple[dict[Machine, Advice], dict[str, Smallest]]
FOUND: dict[tuple[str, str], Found] = {}


def searched(model: Model) -> bool:
    """Whether pages say what to run a model on."""
    return model.published_parameters <= HUGE


def topics(catalog: Catalog) -> list[Topic]:
    """All topics, the largest models first, which take longest."""
    found = []
    for model in sorted(filter(searched, catalog.models.values()), key=lambda m: -m.published_parameters):
        for task in JOBS:
            counts = {g.id: asked(g, model, task, catalog) for g in catalog.gpus.values()}
            cells = [Machine(gpu, n) for n in (*COUNTS, *SEVERAL_NODES) for gpu, own in counts.items() if n in own]
            found.append(Topic(model.id, task, tuple(cells)))
    return found


def asked(gpu: GPU, model: Model, task: str, catalog: Catalog) -> tuple[int, ...]:
    """Of how many GPUs a GPU's page speaks for a model; none of a card without bf16, for which no command would run."""
    if gpu.lacks_bf16 or model.id not in FEWER.get(task, SIZES):
        return ()
    joined = any(gpu.id in node.gpu_ids and node.inter_gbs for node in catalog.nodes.values())
    return (*COUNTS, *(SEVERAL_NODES if joined and model.published_parameters >= LARGE else ()))


def _answered(topic: Topic, known: Answers, *, pending: bool = False) -> Found:
    """What is known on a topic; with `pending` also where an answer is Missing, of which it says so."""

    def ask(found: Callable[[], T], instead: T) -> T:
        try:
            return found()
        except Missing:
            if not pending:
                raise
            return instead

    model, task, left_out = topic.model, topic.task, Smallest(None, PENDING)
    cells = {machine: ask(partial(known.cell, task, model, machine), PENDING) for machine in topic.cells}
    return cells, {trained: ask(partial(known.smallest, model, task, trained), left_out) for trained in TRAINED}


def _compute(topic: Topic, kept: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
    """All answers of a topic by key, beside those `kept`."""
    gc.freeze()  # the catalog and compiled models stay; the collector need not look through them again
    known = Answers(answers.catalog(), kept)
    _answered(topic, known)
    return known.known


class Counted(NamedTuple):
    """What a build has asked: how many answers the pages rest on, how many were computed, and in how many seconds."""

    answers: int
    computed: int
    seconds: float


def fill(folder: Path = FOLDER) -> Counted:
    """Answers all topics, over all cores, but for what `folder` has kept; and keeps it there.

    A task of a model at a time: configurations that differ in the card alone share most of what their memory follows
    from.
    """
    start, catalog, store = time.perf_counter(), answers.catalog(), Kept(folder)
    every = topics(catalog)
    kept = {topic.name: store.read(topic.name) for topic in every}
    count = computed = 0
    missing = []
    for topic in every:
        try:
            FOUND[topic.model, topic.task] = _answered(topic, Answers(catalog, kept[topic.name], fixed=True))
            count += len(kept[topic.name])
        except Missing:
            missing.append(topic)
    if missing:
        made = answers.spread(_compute, missing, [kept[topic.name] for topic in missing])
        for topic, known in zip(missing, made, strict=True):
            store.write(topic.name, known)
            count, computed = count + len(known), computed + len(known) - len(kept[topic.name])
            FOUND[topic.model, topic.task] = _answered(topic, Answers(catalog, known, fixed=True))
        store.forget()
    answers.Clock.asked += computed
    seconds = time.perf_counter() - start
    answers.Clock.seconds += seconds
    return Counted(count, computed, seconds)


def found(model: str, task: str) -> Found:
    """What was found about one task of a model: machine by machine, and the smallest machines."""
    if (model, task) not in FOUND:
        catalog = answers.catalog()
        topic = next(t for t in topics(catalog) if (t.model, t.task) == (model, task))
        known = Answers(catalog, Kept().read(topic.name), fixed=Preview.on)
        FOUND[model, task] = _answered(topic, known, pending=Preview.on)
    return FOUND[model, task]
