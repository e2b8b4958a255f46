"""The tensors behind a record: those kept for backward, layer by layer, and those alive at the peaks."""

import re
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import groupby

from .case import LAYERS, Case
from .ledger import Block, Event, alive, highest
from .record import backward_starts, events_of

_SHORT = ("made in backward", "made in recompute", "made in optim", "workspace")
_PART = re.compile(rf"\b{LAYERS}\.(\d+)\.(\w+)")


def _table(title: str, blocks: Iterable[tuple[Block, str]], tokens: int) -> list[str]:
    """One line for each kind of tensor: the count, bytes, bytes per token, type and shape, and what made it where."""
    count: Counter[tuple[str, str, str, str, tuple[int, ...]]] = Counter()
    size: Counter[tuple[str, str, str, str, tuple[int, ...]]] = Counter()
    for block, kind in blocks:
        key = (kind, block.op, block.module, block.dtype, block.shape)
        count[key] += 1
        size[key] += block.bytes
    lines = [f"{title}: {size.total():,} bytes, {size.total() / tokens:,.1f} a token"]
    for key, total in size.items():
        kind, op, module, dtype, shape = key
        lines.append(
            f"  {count[key]:3} x {total // count[key]:>13,} B {total / tokens:>11,.1f} B/token  {dtype:<9}"
            f"{list(shape)!s:<26} {kind:<17} {op.removeprefix('aten.'):<44} {module}"
        )
    return lines


def _windows(events: list[Event], layer: int) -> list[tuple[str, int, int]]:
    """(part, first, last event) of each part of a layer's backward; a part ends with its parameters' last gradient."""
    grads = [(i, _PART.search(e.note)) for i, e in enumerate(events) if e.sign == 0 and e.kind == "grads"]
    named = [(i, found.groups() if found else None) for i, found in grads]
    windows, before = [], backward_starts(events)
    for part, run in groupby(named, key=lambda x: x[1]):
        last = max(i for i, _ in run)
        if part and part[0] == str(layer):
            windows.append((part[1], before + 1, last))
        before = last
    return windows


def _between(first: int, last: int, index: int, event: Event) -> bool:
    return first <= index <= last


def detail(case: Case) -> str:
    """A text: the tensors that layers keep, the peak of each part of a layer's backward, and the step's peak."""
    events, step = events_of(case)
    tokens = case.mb * case.seq if case.pp > 1 else step.inputs["input_ids"].numel()
    kept = [(block, kind) for block, kind in alive(events, backward_starts(events)) if kind == "made in forward"]
    layers = sorted({block.layer for block, _ in kept if block.layer is not None})
    sums = {layer: sum(b.bytes for b, _ in kept if b.layer == layer) for layer in layers}
    lines = [f"## {case.name}", f"{tokens} tokens in a micro-batch, dtype {case.prec}"]
    lines.append("bytes a token kept by layer: " + ", ".join(f"{k}: {n / tokens:,.1f}" for k, n in sums.items()))
    shown: set[int] = set()
    middle = layers[len(layers) // 2] if layers else 0
    for layer in layers:
        if layer == middle or sums[layer] not in {sums[other] for other in (*shown, middle)}:
            shown.add(layer)
            lines += _table(f"### kept by layer {layer}", [x for x in kept if x[0].layer == layer], tokens)
    lines += _table("### kept outside the layers", [x for x in kept if x[0].layer is None], tokens)
    for part, first, last in _windows(events, middle):
        moment = highest(events, partial(_between, first, last))
        live = [x for x in moment.live if x[1] in _SHORT or (x[0].layer == middle and x[1] == "made in forward")]
        where = f"backward of layer {middle}, up to {part}'s gradients, highest at {moment.op}"
        title = f"### {where}: short-lived and the layer's"
        lines += _table(title, live, tokens)
    peak = highest(events)
    live = [x for x in peak.live if x[1] in _SHORT or (x[1] == "made in forward" and x[0].layer is None)]
    title = f"### peak of {peak.bytes:,} bytes in {peak.phase} at {peak.op}: short-lived and outside the layers"
    return "\n".join(lines + _table(title, live, tokens))
