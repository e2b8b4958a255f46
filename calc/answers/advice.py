"""The recommended configuration for one task and model on one machine, as pages show it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from calc.answers import answers
from calc.answers.words import SHARDINGS, refusal
from calc.answers.workings import Working, of_phase
from calc.base.optimizers import OPTIMIZERS
from calc.base.schema import InputError
from calc.base.units import GiB, MiB, gb, gib
from calc.catalog.catalog import GPU, Catalog
from calc.estimate.report import batched, degrees, segments
from calc.launch import Launch, LaunchError, launch
from calc.recommend.answer import CANNOT
from calc.recommend.failing import closest, tight
from calc.recommend.machines import machines
from calc.recommend.problem import Configuration, Miss, Problem, configured, fits
from calc.scenario.words import Sharding

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
# The variants of each task on a model's page, by name: full fine-tuning, and adapters on frozen weights.
TRAINED: Mapping[str, Mapping[str, Any]] = {"full": {"method": "full"}, "LoRA or QLoRA": ADAPTERS}


class Machine(NamedTuple):
    """A number of GPUs of one kind."""

    gpu: str
    gpus: int


class Advice(NamedTuple):
    """The configuration to run and its command, or what the closest one lacks.

    `scenario` is the configuration with every field, `working` the ledger of its fullest GPU's peak, `host` the bytes
    of host memory on a node. `slowed`: its step time over that if memory did not count, 0 if that is not known. If
    nothing fits, `scenario` is None and `lacks` gives the reason.
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
    slowed: float = 0.0


Job = Mapping[str, Any]


def job(task: str, model: str, machine: Machine, more: Job | None = None) -> dict[str, Any]:
    """The fields that a cell fixes; the search chooses all others."""
    return {"model": model, "task": task, **JOBS[task], **(more or {}), **fields_of(machine)}


@cache
def fields_of(machine: Machine) -> dict[str, Any]:
    """A machine as fields of a scenario."""
    (found,) = machines(answers.catalog(), machine.gpu, machine.gpus)
    return found.fields


def advise(given: Job, catalog: Catalog) -> Advice:
    """The configuration that `calc.recommend` recommends, without its alternatives."""
    try:
        return advised(Problem(given, catalog))
    except InputError as error:
        return refused(error)


def advised(problem: Problem) -> Advice:
    """The configuration recommended for a job on its machine."""
    first = problem.first()
    if first is None:
        nearest = closest(problem)
        if best := tight(nearest):
            return _advice(best)
        if nearest is None:
            return nothing("the framework takes no configuration of it here")._replace(verdict=CANNOT)
        return nothing(_lacks(nearest))
    _, search, found = first
    return _advice(configured(search, search.chosen(found)))._replace(slowed=problem.slowed(first))


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
        host=e.host_peak,
        tokens=best.throughput.tokens_per_second if best.throughput else None,
        words=words(best),
        command=made.command,
        files=dict(made.files),
        notes=made.notes,
        lacks="",
    )


def nothing(why: str) -> Advice:
    """The answer if nothing fits."""
    return Advice(None, "nothing fits", Working("", ()), 0, None, "", "", {}, (), why)


def refused(error: InputError) -> Advice:
    """The answer if the framework cannot run the job at all; the refused field comes from the parser's `error`."""
    given = refusal(error)
    why = f"the framework does not take {given}" if given else "the framework cannot run it"
    return nothing(why)._replace(verdict=CANNOT)


def _lacks(m: Miss) -> str:
    """The shortfall of the closest configuration, in a few words."""
    if m.reason:
        return m.reason.verdict
    assert m.shortfall is not None
    short = gib(m.shortfall) if m.where == "gpu" else f"{gb(m.shortfall)} of host memory"
    return f"the closest lacks {short} {m.when}"


PENDING = nothing("asked anew by make site, not by the preview")._replace(verdict="—")
SHORT: Mapping[Sharding, str] = {**SHARDINGS, "none": "", "fsdp1": "FSDP"}
METHODS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}


def words(best: Configuration) -> str:
    """A configuration in a few words: method, sharding, degrees, memory savings, batches and response generation."""
    s = best.scenario
    facts = OPTIMIZERS[s.optimizer]
    parts = [
        METHODS[s.method] + (f", {facts.bits}-bit {facts.label}" if facts.eight_bit else ""),
        SHORT[s.sharding],
        *degrees(s),
        f"{' and '.join(s.offloaded)} offloaded" if s.offloaded else "",
        {"full": "checkpointing", "selective": "selective checkpointing"}.get(s.checkpointing, ""),
        *segments(s),
        batched(s),
    ]
    if s.rollout and s.rollout.serves:
        apart = f" on {s.rollout.gpus} GPUs of its own" if s.placement == "separate" else ""
        tp = f" TP {s.rollout.tensor_parallel}" if s.rollout.tensor_parallel > 1 else ""
        parts.append(f"{s.rollout.server}{tp}{apart} with {s.rollout.gpu_memory_utilization:g} of the card")
    return ", ".join(part for part in parts if part)


IMAGINED = (16, 24, 48, 80, 144, 288)  # GiB
MARGIN = 3 * GiB


@cache
def largest(catalog: Catalog) -> GPU:
    """The real card from which imagined ones take everything but their memory."""
    rated = [g for g in catalog.gpus.values() if not g.lacks_bf16 and g.bandwidth_gbs and g.bf16_tflops]
    return max(rated, key=lambda g: (g.vendor == "NVIDIA", g.usable_bytes, g.id))


@cache
def _with_imagined(catalog: Catalog) -> Catalog:
    """The catalog with the imagined cards."""
    known = largest(catalog)
    cards = [
        replace(known, id=_imagined(size), usable_mib=(size * GiB + MARGIN) // MiB, memory_gb=1e6) for size in IMAGINED
    ]
    return replace(catalog, gpus={**catalog.gpus, **{card.id: card for card in cards}})


def _imagined(size: int) -> str:
    """The id of the imagined card of `size` GiB; it says A100, as vLLM uses no larger batches on those."""
    return f"imagined-a100-{size}"


def limit(given: Job, gpus: int, catalog: Catalog, most: int) -> int:
    """The largest imagined card, in bytes, on which nothing fits with `gpus` of them; 0 if something fits on every one.

    Cards larger than `most` bytes are not tried: fewer GPUs suffice on them.

    An imagined card has unlimited host memory, and exceeds a real card of its size by a margin that covers every
    difference between cards other than tensors (context, NCCL's buffers, vLLM's larger batches). A job that does not
    fit there therefore fits on no real card of that size.
    """

    def runs(size: int) -> bool:
        return fits({**given, "gpu": _imagined(size), "gpus": gpus, "gpus_per_node": gpus}, _with_imagined(catalog))

    first = bisect_left(IMAGINED, True, hi=bisect_right(IMAGINED, most // GiB), key=runs)
    return IMAGINED[first - 1] * GiB if first else 0
