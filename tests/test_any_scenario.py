"""Properties of every estimate, over random jobs of the whole language of scenarios.

All tests judge the same draws: the same few in every run, or as many new ones as one likes:
`HYPOTHESIS_PROFILE=explore DRAWS=20000 .venv/bin/python -m pytest -n 0 tests/test_any_scenario.py`
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from formulas import holds
from hypothesis import HealthCheck, Phase, given, settings
from strategies import valid

from calc.base.units import MiB
from calc.catalog.catalog import GPU, Catalog, load
from calc.estimate import verdict
from calc.estimate.estimate import as_dict, estimate, on_gpus
from calc.estimate.gpu_group import PHASES
from calc.estimate.result import Estimate
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario, ScenarioError
from calc.step.roles import Job

DRAWS = int(os.environ.get("DRAWS", 150))
HAIR = 1e-4  # of a probability
WORDS = ("oom", "tight", "fits")  # from the worst to the best


class Drawn(NamedTuple):
    """A job as a user writes it, as it is read, and its estimate."""

    fields: dict[str, Any]
    scenario: Scenario
    estimate: Estimate


@cache
def draws() -> list[Drawn]:
    """The jobs that all tests judge; none makes an estimate fail."""
    found = []

    @settings(max_examples=DRAWS, database=None, phases=(Phase.generate,), suppress_health_check=[*HealthCheck])
    @given(valid())
    def draw(fields: dict[str, Any]) -> None:
        s = parse(fields)
        found.append(Drawn(fields, s, estimate(s)))

    draw()
    return found


def each(judged: Callable[[Drawn], Iterable[str]]) -> None:
    """Fails where something is wrong with any job, with the fields of the first few such jobs."""
    wrong = [f"{fault}: {json.dumps(job.fields)}" for job in draws() for fault in judged(job)]
    assert not wrong, f"{len(wrong)} of {len(draws())} jobs\n" + "\n".join(wrong[:5])


def test_lines_add_up_to_their_moment_and_every_formula_gives_its_bytes() -> None:
    """All that is allocated to `allocated_bytes`, which is no more than `device_bytes`, all lines to that.

    Of 100,000 tokens all but one are a share that six digits do not print.
    """

    def judged(job: Drawn) -> Iterator[str]:
        data = as_dict(job.estimate)
        for phase in [p for part in (*data["groups"], data["host"]) for p in part["phases"]]:
            try:
                holds(phase, printed=5e-6 if job.scenario.seq_len < 100_000 else None)
            except AssertionError as error:
                yield f"{phase['name']}: {error}"
            if not 0 <= phase["allocated_bytes"] <= phase["device_bytes"]:
                yield f"{phase['name']}: {phase['allocated_bytes']} of {phase['device_bytes']} allocated"
            yield from (f"{phase['name']}: {x['component']} {x['bytes']}" for x in phase["lines"] if x["bytes"] < 0)

    each(judged)


def test_a_scenario_written_out_in_full_is_the_same_scenario() -> None:
    """With every note on it, and as JSON too."""

    def judged(job: Drawn) -> Iterator[str]:
        data = job.scenario.as_dict()
        try:
            again = parse(json.loads(json.dumps(data)))
        except ScenarioError as error:
            yield str(error)
            return
        if again != job.scenario or hash(again) != hash(job.scenario):
            yield "another scenario"
        if again.as_dict() != data or again.warnings != job.scenario.warnings:
            yield f"{again.warnings} in place of {job.scenario.warnings}, or other fields"

    each(judged)


def test_a_note_is_said_once() -> None:
    """However many groups of GPUs it holds for."""

    def judged(job: Drawn) -> Iterator[str]:
        notes = job.estimate.notes
        yield from {note for note in notes if notes.count(note) > 1}

    each(judged)


def test_every_figure_is_finite() -> None:
    """In memory, in time and in the values that formulas are shown with: JSON has no word for what is not."""

    def judged(job: Drawn) -> Iterator[str]:
        try:
            json.dumps(as_dict(job.estimate), allow_nan=False)
        except ValueError as error:
            yield str(error)

    each(judged)


def test_the_range_holds_the_peak_which_is_that_of_a_phase() -> None:
    """From what tensors take up, or would in shorter batches; and the peak is no sum of maxima."""

    def judged(job: Drawn) -> Iterator[str]:
        for group in job.estimate.groups:
            low, high = group.device_range
            most = max(p.moment.allocated_bytes for p in group.phases)
            peak = group.peak.moment.device_bytes
            begins = most <= group.filled_low and low <= group.filled_low
            if not (begins and 0 < low <= peak <= high and peak == max(p.moment.device_bytes for p in group.phases)):
                yield f"{group.name}: {most} allocated, {low} to {high} around {peak}"

    each(judged)


def test_a_verdict_is_its_probability_and_names_a_phase_unless_the_job_fits() -> None:
    """That of the group of GPUs which is least likely to fit, or none where the host lacks memory. vLLM that does not
    start is out of memory."""

    def judged(job: Drawn) -> Iterator[str]:
        e = job.estimate
        beside = on_gpus(e.scenario, e.groups)
        lacks = any([e.host_memory.lacks(p.moment.device_bytes, beside) for p in e.host_phases])
        if e.fit_probability != (0.0 if lacks else min(g.fit_probability for g in e.groups)):
            yield f"{e.fit_probability} of {[g.fit_probability for g in e.groups]}"
        if e.on_host and not lacks:
            yield "the host, which lacks nothing"
        for judged in (e, *e.groups):
            if judged.verdict != verdict.word(judged.fit_probability) or not 0 <= judged.fit_probability <= 1:
                yield f"{judged.verdict} with {judged.fit_probability}"
            if (judged.verdict_phase is None) != (judged.verdict == "fits"):
                yield f"{judged.verdict} in {judged.verdict_phase}"
        for group in e.groups:
            if group.refusal and group.verdict != "oom":
                yield f"{group.verdict}, though {group.refusal}"
            if group.verdict_phase and group.verdict_phase not in [p.name for p in group.phases]:
                yield f"{group.verdict} in {group.verdict_phase}, which {group.name} has not"

    each(judged)


def test_groups_have_all_gpus_once_and_phases_in_their_order() -> None:
    """And the host's peak is the largest of its moments."""

    def judged(job: Drawn) -> Iterator[str]:
        groups, data = job.estimate.groups, as_dict(job.estimate)
        if sum(g.gpus for g in groups) != job.scenario.gpus or len({g.name for g in groups}) != len(groups):
            yield f"{[(g.name, g.gpus) for g in groups]} of {job.scenario.gpus} GPUs"
        for group in groups:
            names = [p.name for p in group.phases]
            if not names or names != [name for name in PHASES if name in names]:
                yield f"{group.name}: {names}"
        host = data["host"]
        if host["peak_bytes_per_node"] != max([p["device_bytes"] for p in host["phases"]], default=0):
            yield f"host: {host['peak_bytes_per_node']}"

    each(judged)


# ---- more memory ----------------------------------------------------------------------------------------------------


def resized(gpu: GPU, usable_mib: int) -> GPU:
    """The card with so much memory to use, and so much more or less in all: where the host shares it, it has that."""
    return replace(gpu, usable_mib=usable_mib, memory_gb=gpu.memory_gb * usable_mib / gpu.usable_mib)


def having(gpu: GPU) -> Catalog:
    """The catalog in which this is the card of its name, all else being equal."""
    return replace(load(), gpus={**load().gpus, gpu.id: gpu})


def serving(s: Scenario, gpu: GPU) -> tuple[int, ...]:
    """vLLM's share by default of a card of this size or name: nothing that more memory alone decides."""
    engine = Job(s, gpu).engine
    return (engine.max_num_seqs, engine.max_num_batched_tokens) if engine else ()


def around(job: Drawn) -> list[GPU]:
    """The job's card with its own memory, and with about as much as each of its groups needs, from the least up.

    vLLM's cache is of whole blocks, so that of a hair more memory it may leave a hair less free.
    """
    own = load().gpu(job.scenario.gpu)
    needed = {g.peak.moment.device_bytes // MiB for g in job.estimate.groups}
    sizes = {int(size * share) for size in needed for share in (0.9, 0.96, 0.99, 1, 1.01, 1.03, 1.06, 1.12, 1.3)}
    found: list[GPU] = []
    for gpu in (resized(own, max(size, 1)) for size in sorted(sizes | {own.usable_mib})):
        if not found or gpu.usable_mib >= apart(job) * found[-1].usable_mib:
            found += [gpu] if serving(job.scenario, gpu) == serving(job.scenario, own) else []
    return found


def apart(job: Drawn) -> float:
    """By what share cards have to differ."""
    return 1.01 if served(job.scenario) else 1.0


def served(s: Scenario) -> bool:
    """True if vLLM generates, whose cache is of whole blocks."""
    return bool(s.rollout and s.rollout.engine == "vllm")


def worse(estimates: Iterable[tuple[GPU, Estimate]]) -> Iterator[str]:
    """Where the larger of two cards that follow one another has the worse verdict, or the lower probability.

    A block more of vLLM's cache may move that by a hair.
    """
    for (small, less), (large, more) in pairwise(estimates):
        rises = less.fit_probability <= more.fit_probability + HAIR * served(less.scenario)
        if not (rises and WORDS.index(less.verdict) <= WORDS.index(more.verdict)):
            yield (
                f"{less.verdict} {less.fit_probability} on {small.id} with {small.usable_mib} MiB, "
                f"{more.verdict} {more.fit_probability} on {large.id} with {large.usable_mib} MiB"
            )


def test_more_memory_never_makes_a_verdict_worse() -> None:
    """The same card with more of it: one mechanism says what is held back on both sides of every edge."""

    def judged(job: Drawn) -> Iterator[str]:
        yield from worse([(gpu, estimate(job.scenario, having(gpu))) for gpu in around(job)])

    each(judged)


def test_a_larger_card_of_the_same_kind_never_has_a_worse_verdict() -> None:
    """Cards of the catalog of one architecture that are joined alike, the job's own among them, beside a host with as
    much memory as the job's own: that of larger cards may have less."""

    def judged(job: Drawn) -> Iterator[str]:
        catalog = load()
        own, s = catalog.gpu(job.scenario.gpu), replace(job.scenario, host_memory=job.estimate.host_memory.gigabytes)
        for gpu in catalog.gpus.values():
            alike = (gpu.architecture, gpu.linked, gpu.unified) == (own.architecture, own.linked, own.unified)
            small, large = sorted((own, gpu), key=lambda g: g.usable_mib)
            differ = small.usable_mib < large.usable_mib and large.usable_mib >= apart(job) * small.usable_mib
            if alike and differ and serving(job.scenario, gpu) == serving(job.scenario, own):
                yield from worse([(g, estimate(replace(s, gpu=g.id))) for g in (small, large)])

    each(judged)


# ---- longer sequences, larger micro batches -------------------------------------------------------------------------


def larger(job: Drawn) -> Iterator[tuple[str, Scenario]]:
    """The job with longer sequences, and with twice the rows in as many micro-batches; as far as both are jobs.

    Not in fp32 for a window: once sequences reach it, SDPA's masked kernel takes the place of plain mathematics. Nor
    where a batch has as many sequences as its tokens hold, of which there are fewer as they grow.
    """
    s, fields = job.scenario, job.fields
    roles = (s, *filter(None, map(s.role, s.roles)))
    if any(r.max_tokens_per_gpu or (r.precision == "fp32" and r.architecture.sliding_layers) for r in roles):
        return
    batches = {"micro_batch": s.micro_batch, "global_batch": s.global_batch}
    if s.rollout:
        batches["rollout.batch"] = s.rollout.batch
    own = {k: v for k, v in fields.items() if k.endswith((".micro_batch", ".global_batch"))}
    lengths = ("prompt_len", "response_len") if s.rollout else ("seq_len",)
    lengths = (*lengths, "expected_len") if "expected_len" in fields else lengths
    changes: dict[str, dict[str, Any]] = {
        f"{times} times as long": batches | {name: int(times * getattr(s, name)) for name in lengths}
        for times in (1.25, 2)
    }
    if response := fields.get("rollout.expected_len"):
        for times, changed in zip((1.25, 2), changes.values(), strict=True):
            changed["rollout.expected_len"] = int(times * response)
    changes["twice the rows"] = {name: 2 * count for name, count in (batches | own).items()}
    for name, changed in changes.items():
        try:
            yield name, parse(fields | changed)
        except ScenarioError:
            continue


def tensors(e: Estimate) -> dict[tuple[str, str], int]:
    """The bytes that each group allocates in each phase, but for vLLM's cache, which takes what others leave."""
    return {
        (g.name, p.name): sum(
            x.bytes for x in p.moment.lines if x.allocated and (x.role, x.component) != ("rollout", "kv_cache")
        )
        for g in e.groups
        for p in g.phases
    }


def test_longer_sequences_and_larger_micro_batches_never_allocate_less() -> None:
    """In any phase, whether the allocator is replayed or not."""

    def judged(job: Drawn) -> Iterator[str]:
        own = tensors(job.estimate)
        for change, s in larger(job):
            for place, count in tensors(estimate(s)).items():
                if count < own[place]:
                    yield f"{change}: {count} in place of {own[place]} in {place}"

    each(judged)


def test_longer_sequences_and_larger_micro_batches_are_never_likelier_to_fit() -> None:
    """On a card that the job nearly fills. Where the allocator is replayed they may be: which blocks lie side by side
    changes with every size (`docs/method/runtime.md`)."""

    def judged(job: Drawn) -> Iterator[str]:
        worst = min(job.estimate.groups, key=lambda g: g.fit_probability)
        nearly = having(resized(load().gpu(job.scenario.gpu), worst.peak.moment.device_bytes // MiB))
        own = estimate(job.scenario, nearly)
        if any(p.moment.sums.replayed for g in own.groups for p in g.phases):
            return
        for change, s in larger(job):
            found = estimate(s, nearly).fit_probability
            if found > own.fit_probability:
                yield f"{change}: {found} in place of {own.fit_probability}"

    each(judged)
