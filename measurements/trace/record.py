"""The record of a case."""

import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from . import attention, context_parallel
from .case import Case, installed
from .ledger import Event, Ledger, Moment, alive, highest, walk
from .step import Step, fake_mode

_RESIDENT = ("params", "ref_params", "buffers", "inputs", "optim", "grads", "fsdp", "workspace", "other")
_TEMPORARY = {
    "made in forward": "forward_temp",
    "made in backward": "backward_temp",
    "made in recompute": "recompute",
    "made in optim": "optim_temp",
}

# The libraries of every step.
PACKAGES = ("torch", "transformers", "peft", "accelerate")
# Operators that make the buffers which FSDP2 gathers into and reduces from.
_FSDP_BUFFERS = ("aten.empty.memory_format", "fsdp.all_gather_copy_in.default", "fsdp.chunk_cat.default")


def events_of(case: Case) -> tuple[list[Event], Step]:
    """Run the case's step and return everything that happened to memory in it."""
    linear = torch.nn.functional.linear
    try:
        with fake_mode(), Ledger(case.workspace) as ledger:
            step = _step(case)(case, ledger)
            step.warm_up()
            ledger.start()
            step.run()
            ledger.recording = False
    finally:
        torch.nn.functional.linear = linear  # DeepSpeed's ZeRO 3 has put its own in place
    return ledger.events, step


def _step(case: Case) -> type[Step]:
    """The class of the case's step."""
    if case.megatron:
        from . import megatron  # takes seconds to import

        return megatron.Step
    return Step


def backward_starts(events: list[Event]) -> int:
    """The index of the last backward's start, or of the end if there is none."""
    return max((i for i, e in enumerate(events) if e.note == "backward"), default=len(events) - 1)


def kinds(case: Case, events: list[Event], moment: Moment) -> dict[str, int]:
    """Bytes at an instant by kind: `activations` are kept by forward, the rest of a phase is its temporary memory."""
    starts = backward_starts(events)
    kept = {id(block) for block, _ in alive(events, starts)} if events[starts].note == "backward" else set()
    total: Counter[str] = Counter()
    for block, kind in moment.live:
        if case.fsdp and block.kind == "grads":  # they are marked once all are there
            kind = "grads"
        elif case.fsdp and block.op in _FSDP_BUFFERS and kind.startswith("made in"):
            kind = "fsdp"
        elif kind == "made in forward" and id(block) in kept:
            kind = "activations"
        total[_TEMPORARY.get(kind, kind)] += block.bytes
    return dict(total)


def record(case: Case) -> dict[str, Any]:
    """The case's record, of the rank that takes most; bytes, each allocation rounded up to 512.

    FSDP's ranks are alike. Under DeepSpeed each holds a slice of all parameters in their order: the last rank's
    gradients come first and stay, and the first has the embedding, often the largest tensor. Stages of a pipeline hold
    layers of their own; each phase's peak is that of the stage which takes most in it.
    """
    if case.pp > 1:
        return _of_stages([_of_ranks(replace(case, stage=stage)) for stage in range(case.pp)])
    return _of_ranks(case)


def _of_ranks(case: Case) -> dict[str, Any]:
    """The record of the rank that takes most; for those that share a sequence see `context_parallel`."""
    ranks = {0, case.ranks - 1} if case.zero else context_parallel.RANKS.get(case.cp, {1})
    return max((_record(replace(case, rank=rank)) for rank in sorted(ranks)), key=itemgetter("total_peak_bytes"))


def _of_stages(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of the stage that takes most, with every stage's peaks."""
    peaks = [stage["phase_peak_bytes"] for stage in found]
    return {
        **max(found, key=itemgetter("total_peak_bytes")),
        "phase_peak_bytes": {name: max(peak[name] for peak in peaks) for name in peaks[0]},
        "stage_peak_bytes": peaks,
    }


def _record(case: Case) -> dict[str, Any]:
    events, step = events_of(case)
    vocabulary = case.config.get("text_config", case.config)["vocab_size"]
    peak = highest(events)
    at_peak = kinds(case, events, peak)
    resident = {kind: 0 for kind in _RESIDENT}
    first = [event for event in events if not event.phase or event.phase == "setup"]
    for event in first:
        resident[event.kind if event.kind in resident else "other"] += event.block.bytes
    starts = backward_starts(events)
    before = kinds(case, events, Moment(0, starts, "", "", alive(events, starts)))
    trained = step.optimizer is not None
    vocab, most_vocab = 0, 0
    for _, _, event in walk(events):
        if event.block.kind not in ("params", "ref_params", "grads", "optim") and vocabulary in event.block.shape[-1:]:
            vocab += event.sign * event.block.bytes
            most_vocab = max(vocab, most_vocab)
    without = highest([e for e in events if e.block.kind != "workspace"])
    phases = {name: highest(events, partial(_in_phase, name)).bytes for name in ("forward", "backward", "optim")}
    complete = alive(events, _optimizer_starts(events)) if trained else []
    return {
        "id": case.name,
        "case": case.as_dict(),
        "n_params": step.parameters,
        "n_trainable": step.trainable,
        "params_bytes": resident["params"],
        "ref_params_bytes": resident["ref_params"],
        "buffers_bytes": resident["buffers"],
        "inputs_bytes": resident["inputs"],
        "grads_bytes": sum(block.bytes for block, kind in complete if kind == "grads"),
        "grads_at_peak_bytes": at_peak.get("grads", 0),
        "optim_bytes": resident["optim"],
        "activation_peak_bytes": sum(n for kind, n in before.items() if kind not in _RESIDENT) if trained else None,
        "activations_at_peak_bytes": at_peak.get("activations", 0),
        "logits_peak_bytes": most_vocab,
        "temp_at_peak_bytes": sum(at_peak.get(k, 0) for k in (*_TEMPORARY.values(), "fsdp", "workspace")),
        "total_peak_bytes": peak.bytes,
        "total_peak_bytes_no_workspace": without.bytes,
        "peak_phase": peak.phase,
        "peak_op": peak.op,
        "resident_before_step_bytes": sum(event.block.bytes for event in first),
        "phase_peak_bytes": phases,
        "at_peak": at_peak,
        "vocab_sized_at_peak_bytes": sum(
            b.bytes for b, kind in peak.live if vocabulary in b.shape[-1:] and kind not in _RESIDENT
        ),
        "sdpa": dict(attention.calls) or case.attn,
        "versions": {
            **{name: installed(name) for name in (*PACKAGES, *_further(case))},
            "python": platform.python_version(),
        },
    }


def _further(case: Case) -> Iterator[str]:
    """The libraries that only some steps use."""
    if case.zero:
        yield "deepspeed"
    if case.four_bits:
        yield "bitsandbytes"
    if case.megatron:
        yield from ("megatron-core", "transformer-engine")


def _in_phase(name: str, index: int, event: Event) -> bool:
    return event.phase == name or (name == "backward" and event.phase == "recompute")


def _optimizer_starts(events: list[Event]) -> int:
    return max((i for i, e in enumerate(events) if e.note == "optim"), default=len(events) - 1)
