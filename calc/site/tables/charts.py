"""Stacked bars in plain HTML: a bar is a cell of the table whose numbers it draws, so the table is its text version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from calc.base.units import GB, GiB
from calc.site.tables import pictures
from calc.site.tables.pictures import Key

# The order of the stack and of the legend, and with it the colour (docs/assets/extra.css). One colour everywhere.
COMPONENTS = {
    "weights": "weights",
    "rotary_tables": "rotary tables",
    "master_weights": "fp32 master weights",
    "optimizer_states": "optimizer states",
    "gradients": "gradients",
    "adapter": "adapters",
    "checkpoints": "checkpoints",
    "activations": "activations",
    "logits": "logits",
    "kv_cache": "KV cache",
    "cuda_graphs": "CUDA graphs",
    "communication": "communication",
    "temporary": "temporary",
    "workspace": "cuBLAS workspace",
    "nccl": "NCCL",
    "fragmentation": "fragmentation",
    "context": "CUDA context",
    "checkpoint": "checkpoint on the host",
}

UNITS = {"GiB": GiB, "GB": GB}


def ordered(components: Sequence[str]) -> list[str]:
    """The components in stacking order; unknown ones go last."""
    known = list(COMPONENTS)
    return sorted(set(components), key=lambda c: (known.index(c) if c in known else len(known), c))


def name(component: str) -> str:
    """The component's name as a reader sees it."""
    return COMPONENTS.get(component, component.replace("_", " "))


def title(component: str) -> str:
    """The component's name as a column header: `Weights`, but `KV cache` and `fp32 master weights`."""
    shown = name(component)
    return shown.capitalize() if shown.islower() and shown.split()[0].isalpha() else shown


def place(share: float) -> str:
    """A share of the width as classes, one per digit, in thousandths: a page's policy allows no inline style."""
    thousandths = round(1000 * share)
    digits = (thousandths // 100 * 100, thousandths // 10 % 10 * 10, thousandths % 10)
    return " ".join(f"p{digit}" for digit in digits if digit)


class Bar(NamedTuple):
    """A stacked bar: bytes by component; `scale` bytes are the full width, `limit` is what must not be crossed.

    `unit`: the one in which its sum is told, GiB on a GPU and GB on a host.
    """

    parts: Mapping[str, int]
    scale: int
    limit: int | None
    unit: Literal["GiB", "GB"] = "GiB"

    @property
    def stacked(self) -> list[tuple[str, int]]:
        """The components that take anything, in stacking order, with their bytes."""
        return [
            (component, self.parts[component]) for component in ordered([c for c, n in self.parts.items() if n > 0])
        ]

    @property
    def total(self) -> int:
        """The bytes of all components."""
        return sum(self.parts.values())

    @property
    def beyond(self) -> int:
        """The bytes that lie beyond the limit; 0 or less where it is not crossed."""
        return self.total - self.limit if self.limit is not None else 0

    def told(self, n_bytes: float) -> str:
        """Bytes in the bar's unit."""
        return f"{n_bytes / UNITS[self.unit]:,.1f}"

    @property
    def words(self) -> str:
        """The sum, and the part of it beyond the limit."""
        return self.told(self.total) + (f", {self.told(self.beyond)} over" if self.beyond > 0 else "")


def bar(b: Bar) -> str:
    """One stacked bar; the part beyond the limit is hatched. Its sum, and what is free or over, stand right of both."""
    ends = [round(1000 * n / b.scale) for n in accumulate(n for _, n in b.stacked)]
    spans = "".join(
        f'<span class="c-{component} {place((end - start) / 1000)}"></span>'
        for (component, _), start, end in zip(b.stacked, [0, *ends], ends, strict=False)
    )
    line = f'<i class="{place(b.limit / b.scale)}"></i>' if b.limit is not None else ""
    if b.limit is not None and b.beyond > 0:
        # share of what lies right of the limit
        hatched = f'<span class="{place(b.beyond / (b.scale - b.limit))}"></span>'
        line += f'<s class="{place(b.limit / b.scale)}">{hatched}</s>'
    against = "" if b.limit is None else f", {b.told(abs(b.beyond))} {'over' if b.beyond > 0 else 'free'}"
    sum_of = f'<em class="{place(max(b.total, b.limit or 0) / b.scale)}">{b.told(b.total)}{against}</em>'
    return f'<span class="stack{" over" if b.beyond > 0 else ""}">{spans}{line}{sum_of}</span>'


def keys(components: Sequence[str], limit: str) -> tuple[Key, ...]:
    """The key to the colours, and to the limit's line, if there is one."""
    return (*(Key(f"c-{c}", name(c)) for c in ordered(components)), *([Key("limit", limit)] if limit else []))


def legend(components: Sequence[str], limit: str) -> str:
    """The key as HTML."""
    return pictures.legend(keys(components, limit))
