"""Stacked bars in plain HTML: a bar is a cell of the table whose numbers it draws, so the table is its text version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate

from calc.base.units import GiB

# The order of the stack and of the legend, and with it the colour (docs/assets/extra.css). One colour everywhere.
COMPONENTS = {
    "weights": "weights",
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


def bar(parts: Mapping[str, int], scale: int, limit: int | None) -> str:
    """One stacked bar; `scale` bytes are the full width, `limit` is what must not be crossed.

    The part beyond the limit is hatched. Its sum, and what is free or over, stand right of both bar and limit.
    """
    stacked = [(component, parts[component]) for component in ordered([c for c, n in parts.items() if n > 0])]
    ends = [round(1000 * n / scale) for n in accumulate(n for _, n in stacked)]
    spans = "".join(
        f'<span class="c-{component} {place((end - start) / 1000)}"></span>'
        for (component, _), start, end in zip(stacked, [0, *ends], ends, strict=False)
    )
    total = sum(parts.values())
    beyond = total - limit if limit is not None else 0
    line = f'<i class="{place(limit / scale)}"></i>' if limit is not None else ""
    if limit is not None and beyond > 0:
        hatched = f'<span class="{place(beyond / (scale - limit))}"></span>'  # share of what lies right of the limit
        line += f'<s class="{place(limit / scale)}">{hatched}</s>'
    against = "" if limit is None else f", {abs(beyond) / GiB:,.1f} {'over' if beyond > 0 else 'free'}"
    sum_of = f'<em class="{place(max(total, limit or 0) / scale)}">{total / GiB:,.1f}{against}</em>'
    return f'<span class="stack{" over" if beyond > 0 else ""}">{spans}{line}{sum_of}</span>'


def legend(components: Sequence[str], limit: str) -> str:
    """The key to the colours, and to the limit's line."""
    keys = "".join(
        f'<li><span class="swatch c-{c}" aria-hidden="true"></span>{escape(name(c))}</li>' for c in ordered(components)
    )
    line = f'<li><span class="swatch limit" aria-hidden="true"></span>{escape(limit)}</li>'
    return f'<ul class="legend">{keys}{line}</ul>'
