"""Tables of PyTorch's MemTracker, as its `display_snapshot` prints them, plain or as a table of tabulate.

Read in torch/distributed/_tools/mem_tracker.py and fsdp2_mem_tracker.py of 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from calc.base.ledger import Moment
from calc.catalog import oom_message
from calc.diagnose.pasted import LONGEST, Line

UNITS = {"B": 1, **oom_message.UNITS}  # those of PyTorch's messages
TOTAL = "Total"
# The kinds of memory that the tracker tells apart, by their names in an estimate, with the ledger's components of each.
# A gradient of an activation is Temp there, and stands with the layer that makes it here.
KINDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "the weights": (
        ("Parameter", "Buffer", "Sharded Param", "Unsharded Param"),
        ("weights", "rotary_tables", "master_weights", "adapter"),
    ),
    "the gradients": (("Gradient", "Sharded Grad", "Unsharded Grad"), ("gradients",)),
    "the optimizer's states": (("Optstate", "OptState"), ("optimizer_states",)),
    "activations and temporary tensors": (
        ("Activation", "Temp"), ("activations", "checkpoints", "logits", "temporary"),
    ),
    "the buffers for communication": (("All Gather", "Reduce Scatter"), ("communication",)),
}  # fmt: skip
NAMES = {name for names, _ in KINDS.values() for name in names} | {"Other", "Inputs", TOTAL}
_SIZE = re.compile(r"([\d.]+) (B|KiB|MiB|GiB)")
_NAMED = re.compile(rf"\s*([A-Z][A-Za-z]+(?: [A-Z][a-z]+)?): {_SIZE.pattern}\s*")
_GAP = re.compile(r"\s{2,}")


def largest(lines: list[Line]) -> dict[str, int] | None:
    """The bytes by name of the table with the largest total; None if there is none."""
    texts = [line.text[:LONGEST] for line in lines]
    return max([*_plain(texts), *_tabular(texts)], key=lambda table: table[TOTAL], default=None)


def _bytes(size: str) -> int | None:
    match = _SIZE.fullmatch(size.strip())
    return round(float(match[1]) * UNITS[match[2]]) if match and match[1].count(".") < 2 and match[1] != "." else None


def _plain(texts: list[str]) -> Iterator[dict[str, int]]:
    """`Device: cuda:0`, and a line for each kind, of which the total is the last."""
    table: dict[str, int] = {}
    for text in texts:
        match = _NAMED.fullmatch(text)
        count = _bytes(f"{match[2]} {match[3]}") if match and match[1] in NAMES else None
        if match is None or count is None:
            table = {}
            continue
        table[match[1]] = count
        if match[1] == TOTAL:
            yield table
            table = {}


def _tabular(texts: list[str]) -> Iterator[dict[str, int]]:
    """A head of names, of which the total is the last, and a row for each device or call."""
    head: list[str] = []
    for text in texts:
        cells = _GAP.split(text.strip())
        if cells[-1] == TOTAL and "Device" in cells:
            head = cells[cells.index("Device") + 1 :]
            continue
        sizes = [_bytes(cell) for cell in cells[-len(head) :]] if head and len(cells) > len(head) else []
        if sizes and None not in sizes:
            yield {name: size for name, size in zip(head, sizes, strict=True) if size is not None}


def beside(table: Mapping[str, int], moment: Moment) -> Iterator[tuple[str, int, int]]:
    """Each kind of a table beside the estimate's lines at a moment: what it is called, tracked and estimated bytes."""
    for words, (names, components) in KINDS.items():
        tracked = sum(table.get(name, 0) for name in names)
        ours = sum(line.bytes for line in moment.lines if line.component in components)
        if tracked or ours:
            yield words, tracked, ours
    yield "all that is allocated", table[TOTAL], moment.allocated_bytes
