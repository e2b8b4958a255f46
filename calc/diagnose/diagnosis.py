"""The diagnosis: the job of a text, where its memory runs out and why, whether its message agrees, and the remedies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from calc.base.ledger import Line, Phase
from calc.base.schema import InputError
from calc.base.units import gb, gib
from calc.catalog.catalog import Catalog, load
from calc.diagnose import pasted, snapshot, tracker
from calc.diagnose import reading as readings
from calc.diagnose.job import Job, job
from calc.diagnose.reading import Reading
from calc.diagnose.remedies import EVENTS, Remedy, Tried, remedies
from calc.estimate.estimate import estimate
from calc.estimate.report import deciding
from calc.estimate.result import Estimate, Group
from calc.estimate.wording import spoken
from calc.resolve.parse import given
from calc.scenario.scenario import Scenario

LONGEST = 500_000  # characters of a text that are read, from its end
LARGEST = 4  # lines of the moment that are named
OFFLOADS = ("offload.optimizer", "offload.parameters")
MOVED = "host memory ran out, and the cards would not hold it"
# Shares of the card from which a difference between message and estimate says something.
NEAR, SPARE = 0.1, 0.05
# What a line's component is called in a sentence.
WORDS: Mapping[str, str] = {
    "weights": "the weights", "rotary_tables": "the rotary tables", "master_weights": "the fp32 master weights",
    "gradients": "the gradients",
    "optimizer_states": "the optimizer's states", "activations": "the activations",
    "checkpoints": "the checkpointed layer inputs",
    "kv_cache": "the KV cache", "communication": "the buffers for communication", "temporary": "temporary tensors",
    "adapter": "the adapters", "context": "the CUDA context", "nccl": "NCCL", "cuda_graphs": "CUDA graphs of vLLM",
    "workspace": "cuBLAS's workspace", "fragmentation": "fragmentation",
    "checkpoint": "the checkpoint",
}  # fmt: skip


@dataclass(frozen=True)
class Diagnosis:
    """A text as read, and, where its job can be computed, the estimate with what follows from it.

    `where` is the phase that the text tells, or else the estimate's, with `group` and `at`, its peak there. `refusal`:
    the one line in which the job was refused. `whole`: no remedy is left to be computed.
    """

    reading: Reading
    questions: tuple[str, ...]
    job: Job | None = None
    refusal: str = ""
    estimate: Estimate | None = None
    host: bool = False
    where: str | None = None
    group: Group | None = None
    at: Phase | None = None
    cause: str = ""
    agrees: tuple[str, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    gpu_name: str = ""
    whole: bool = True


def diagnose(
    text: str | bytes, more: Mapping[str, Any] | None = None, catalog: Catalog | None = None, *, where: str = "text"
) -> Diagnosis:
    """The last of `growing`, which is whole."""
    *_, last = growing(text, more, catalog, where=where)
    return last


def growing(
    text: str | bytes, more: Mapping[str, Any] | None = None, catalog: Catalog | None = None, *, where: str = "text"
) -> Iterator[Diagnosis]:
    """The diagnosis of a pasted text, or of a file's bytes; `more` gives fields that it does not say, by dotted key.

    It grows: first what is recognised and where the job dies, then the same with remedies, each of which is estimated.
    Bytes are a log in UTF-8, or a memory snapshot. Of a long text the end is read.
    Raises InputError, one line, if nothing in the text is recognised, or a field of `more` cannot be used.
    """
    catalog = catalog or load()
    more = given(more or {}, where="fields", catalog=catalog, needed=())
    shows: tuple[str, ...] = ()
    if isinstance(text, bytes):
        if snapshot.is_snapshot(text):
            shows, text = tuple(snapshot.said(text, where)), snapshot.as_text(text, where)
        else:
            text = text[-4 * LONGEST :].decode("utf-8", "replace")
    reading = readings.read(pasted.end(text[-LONGEST:]), catalog)
    if shows:
        reading.parts[:] = ["a memory snapshot"]
        reading.notes += shows
    if not reading.parts:
        known = "a launch command, an error message, the end of a log, or a scenario"
        raise InputError(f"{where}: given text in which nothing is recognised, allowed: {known}")
    fields = {**reading.fields, **more}
    asked = tuple(readings.questions(reading, fields))
    try:
        made = job(reading, more, catalog)
    except InputError as error:
        refusal = str(error).removeprefix("job: ")
        yield Diagnosis(reading, asked, where=reading.phase, refusal=refusal, agrees=_alone(reading))
        return
    if made is None:
        host, cause = _host_error(reading), _unknown_cause(reading)
        yield Diagnosis(reading, asked, where=reading.phase, host=host, cause=cause, agrees=_alone(reading))
        return
    made, e = _moved_out(reading, more, made, catalog)
    host = _host_error(reading) or (reading.error is None and e.on_host)
    group, at = _place(e, reading)
    first = Diagnosis(
        reading,
        asked,
        made,
        estimate=e,
        host=host,
        where=reading.phase or e.verdict_phase or at.name,
        group=group,
        at=at,
        cause=_cause(made.scenario, e, group, at, host=host),
        agrees=tuple(_agreement(reading, e, group, at, host=host)),
        gpu_name=catalog.gpu(made.scenario.gpu).name,
        whole=False,
    )
    yield first
    tried = Tried(made, e, catalog)
    found = tuple(remedies(tried, host=host, phase=reading.phase))
    if tried.unreplayed:
        reading.notes.append(
            f"the allocator is not replayed for all remedies: that would take more than {EVENTS:,} events, "
            "so the median of what other jobs lost stands for fragmentation in some"
        )
    yield replace(first, remedies=found, whole=True)


def _moved_out(reading: Reading, more: Mapping[str, Any], made: Job, catalog: Catalog) -> tuple[Job, Estimate]:
    """A job with its estimate: offloaded where host memory ran out, and the cards do not hold it otherwise."""
    e = estimate(made.scenario, catalog)
    if not _host_error(reading) or e.verdict != "oom" or e.on_host or not made.given.keys().isdisjoint(OFFLOADS):
        return made, e
    for places in (OFFLOADS, OFFLOADS[:1]):
        moved = [readings.Assumed(place, True, MOVED) for place in places]
        read = replace(
            reading, fields={**reading.fields, **dict.fromkeys(places, True)}, assumed=reading.assumed + moved
        )
        try:
            offloaded = job(read, more, catalog)
        except InputError:
            continue
        if offloaded and all(offloaded.given.get(place) for place in places):
            reading.fields, reading.assumed = read.fields, read.assumed
            return offloaded, estimate(offloaded.scenario, catalog)
    return made, e


def _host_error(reading: Reading) -> bool:
    return reading.error is not None and reading.error.row.kind == "host"


def _unknown_cause(reading: Reading) -> str:
    return reading.error.row.means if reading.error else ""


def _place(e: Estimate, reading: Reading) -> tuple[Group, Phase]:
    """The GPU group and the phase to diagnose: the phase named in the text, else the one that decides the verdict."""
    wanted = reading.phase or (None if e.on_host else e.verdict_phase)
    fullest = deciding(e)
    for group in sorted(e.groups, key=lambda g: g is not fullest):
        for phase in group.phases:
            if phase.name == wanted:
                return group, phase
    return fullest, fullest.peak


def _cause(s: Scenario, e: Estimate, group: Group, at: Phase, *, host: bool) -> str:
    """One plain sentence: where the memory goes."""
    if host and e.host_phases:
        peak = max(e.host_phases, key=lambda p: p.moment.device_bytes)
        largest = _named(s, peak, gb)
        return f"Host memory, {peak.name}: {gb(e.host_peak)} a node of {gb(e.host_memory.bytes)}; {largest}."
    if group.refusal:
        return f"vLLM does not start: {group.refusal}."
    size, where = gib(at.moment.device_bytes), f" of {group.name}" if len(e.groups) > 1 else ""
    return (
        f"In {at.name}, at its peak ({spoken(at.moment.name)}), each GPU{where} takes {size} of "
        f"{gib(group.usable_bytes)}: {_named(s, at)}."
    )


def _named(s: Scenario, phase: Phase, size: Callable[[float], str] = gib) -> str:
    """The largest lines of a phase in words."""
    sums: dict[str, int] = {}
    for line in phase.moment.lines:
        sums[_words(s, line)] = sums.get(_words(s, line), 0) + line.bytes
    largest = sorted(sums.items(), key=lambda item: -item[1])[:LARGEST]
    parts = [f"{words} {size(bytes)}" for words, bytes in largest if bytes > 0]
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else "".join(parts)


def _words(s: Scenario, line: Line) -> str:
    """A line in words, with the role where there are several."""
    what = WORDS.get(line.component, line.component.replace("_", " "))
    if line.component == "logits":
        own = s.role(line.role) or s
        tokens = own.rows * own.expected_len
        what = f"the logits of {tokens:,} tokens over {own.architecture.vocab:,} words"
    return f"{what} of the {line.role}" if s.roles and line.role in s.roles else what


# ---- the message beside the estimate -------------------------------------------------------------------------------


def _agreement(reading: Reading, e: Estimate, group: Group, at: Phase, *, host: bool) -> Iterator[str]:
    """The agreement of message and estimate, a line for each thing compared, and what it means if they differ."""
    if reading.told:
        yield from _phases(reading, e)
    if host:
        lacks = e.host_peak > e.host_memory.bytes
        beside = "other processes, page cache in /dev/shm, or less memory than assumed"
        if reading.node:
            beside = "other processes, or page cache in /dev/shm"
        said = "agrees" if lacks else f"finds that enough: {beside}"
        yield f"host memory: {gb(e.host_peak)} needed of {gb(e.host_memory.bytes)}; the estimate {said}"
    elif reading.error and e.verdict == "fits":
        yield (
            f"the estimate says that this job fits, with probability {e.fit_probability:.2f}: then something differs, "
            "such as other processes on the card, longer data than the caps say, another release, an evaluation step, "
            "or fragmentation"
        )
    yield from _node(reading)
    if reading.figures and not host:
        yield from _figures(reading.figures, group, at)
    if reading.tracked:
        for words, tracked, ours in tracker.beside(reading.tracked, at.moment):
            yield f"MemTracker: {words} {gib(tracked, 2)}, the estimate's {at.name} {gib(ours, 2)}"


def _phases(reading: Reading, e: Estimate) -> Iterator[str]:
    """The phase of the traceback beside that of the estimate."""
    told, first = reading.phase, e.verdict_phase
    if first is None or e.on_host:
        return
    if told == first:
        yield f"phase: the traceback died in {told}, and so does the estimate"
        return
    full = {p.name for g in e.groups for p in g.phases if p.moment.device_bytes > g.usable_bytes}
    if told in full:
        yield f"phase: the traceback died in {told}; by the estimate {first} fails first, and {told} would, too"
    else:
        yield (
            f"phase: the traceback died in {told}, the estimate in {first}: a setting differs from what was assumed, "
            "or data was shorter than its cap until then"
        )


def _figures(stated: Mapping[str, int], group: Group, at: Phase) -> Iterator[str]:
    """Each figure of PyTorch's message beside the estimate's."""
    total, allocated = stated.get("total_bytes"), stated.get("allocated_bytes")
    tried = stated.get("tried_bytes", 0)
    card = total or group.usable_bytes
    if total and abs(total - group.usable_bytes) > NEAR * total:
        yield f"card: the message has {gib(total)}, the GPU assumed {gib(group.usable_bytes)}: name the right GPU"
    if allocated:
        wanted, ours = allocated + tried, at.moment.allocated_bytes
        close = abs(wanted - ours) <= NEAR * card
        told = "agrees" if close else "the job needs more than that later on" if ours > wanted else "it holds more"
        reason = "" if close or ours > wanted else ": longer data, another setting, or memory that is not given back"
        yield (
            f"allocated: {gib(allocated)} and {gib(tried)} asked for, the estimate's {at.name} {gib(ours)}: "
            f"{told}{reason}"
        )
    yield from _held(stated, card)


def _alone(reading: Reading) -> tuple[str, ...]:
    """The lines about a message that need no estimate."""
    stated = reading.figures or {}
    held = _held(stated, stated["total_bytes"]) if stated.get("total_bytes") else ()
    return (*_node(reading), *held)


def _node(reading: Reading) -> Iterator[str]:
    """What Ray's message shows of a node's memory."""
    if reading.node:
        used, whole = reading.node
        yield f"the node: {gb(used)} of {gb(whole)} were in use when Ray ended a worker (what Ray prints as GB are GiB)"


def _held(stated: Mapping[str, int], card: int) -> Iterator[str]:
    """What a message shows of the card's memory beside the tensors of the job."""
    tried = stated.get("tried_bytes", 0)
    spare = stated.get("unallocated_bytes", 0)
    if spare > max(SPARE * card, tried):
        yield (
            f"fragmentation: {gib(spare)} are reserved but unallocated, more than the {gib(tried)} asked for: "
            "expandable_segments:True makes them usable"
        )
    if others := stated.get("others_bytes", 0):
        yield f"other processes hold {gib(others)} of the card, which no change of this job frees"
    outside = card - stated.get("free_bytes", 0) - stated.get("in_use_bytes", card) - others
    if "in_use_bytes" in stated and outside > SPARE * card:
        yield (
            f"{gib(outside)} of the card belong to no process that the message lists: another container, or the driver"
        )
