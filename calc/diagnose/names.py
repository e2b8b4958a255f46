"""Models and GPUs as people write them, found in the catalog: by name, by the end of a path, by parts of a name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from calc.catalog.catalog import GPU, Catalog
from calc.catalog.near import meant
from calc.models.families import MXFP4

# A driver reports the same card a little differently in each release, and messages print two decimals.
TOLERANCE = 0.004
COARSE = 0.03  # for a maker who sells few sizes
SLOTTED = ("pcie", "nvl")  # forms of a card that sits in a slot; most people train on SXM


class Named(NamedTuple):
    """A model as a text names it, with its catalog id, or None and near misses; `alike`: by parts of the name."""

    given: str
    id: str | None
    alike: bool = False
    near: str = ""


def model(given: str, catalog: Catalog) -> Named:
    """The catalog's model that a name or a path means."""
    names = catalog.names
    parts = [given, *_ends(given)]
    for part in parts:
        if found := names.listed.get(part.casefold()) or names.alike(part):
            return Named(given, found)
    if not any(names.refusal(part) or names.quantised(part) for part in parts):
        for part in parts[1:]:
            if (found := names.within(part)) and catalog.models[found].architecture.family not in MXFP4:
                return Named(given, found, alike=True)
    last = next(iter(parts[1:]), given)
    return Named(given, None, near=meant(last, {own: own for m in catalog.models.values() for own in (m.id, m.hf)}))


def _ends(path: str) -> list[str]:
    """The names in a path that can be a model's, the last first; a hub's cache has them as `models--owner--name`."""
    parts = [part for part in path.replace("\\", "/").split("/") if part and part not in (".", "..")]
    cached = [part.split("--") for part in parts if part.startswith("models--")]
    return [*("/".join(names[1:]) for names in cached), *(names[-1] for names in cached), *parts[::-1][:3]]


def cards_of_size(total: int, catalog: Catalog, tolerance: float = TOLERANCE, vendor: str = "") -> list[GPU]:
    """The cards, of one maker or any, of which a process gets `total` bytes, those in slots last."""
    made = [gpu for gpu in catalog.gpus.values() if vendor in ("", gpu.vendor)]
    near = [gpu for gpu in made if total and abs(gpu.usable_bytes - total) <= tolerance * total]
    return sorted(near, key=lambda gpu: (_slotted(gpu), abs(gpu.usable_bytes - total)))


def cards_named(text: str, catalog: Catalog) -> list[GPU]:
    """The cards that a text names, such as `NVIDIA A100-SXM4-80GB` or `8 * H20`; of several kinds, none."""
    kinds: dict[str, list[GPU]] = {}
    for gpu in catalog.gpus.values():
        kinds.setdefault(_kind(gpu.id), []).append(gpu)
    folded = text.casefold()  # most kinds are not there at all, which costs less to see than that a pattern fails
    seen = [
        kind
        for kind in kinds
        if _core(kind) in folded
        and re.search(rf"(?<![A-Za-z0-9]){_counted(kind)}{_spelled(kind)}(?![A-Za-z0-9])", text, re.IGNORECASE)
    ]
    if len(seen) != 1:
        return []
    found = kinds[seen[0]]
    sizes = {int(size) for size in re.findall(r"(?<![\d.])(\d{2,3}) ?Gi?B?(?=[x×*]\d|\b)", text, re.IGNORECASE)}
    return _narrowed([gpu for gpu in found if round(gpu.memory_gb) in sizes] or found, text)


def _narrowed(found: list[GPU], text: str) -> list[GPU]:
    """The cards of a kind that the text's form factor leaves; those in slots last."""
    for form in (*SLOTTED, "sxm"):
        if form in text.casefold() and (own := [gpu for gpu in found if form in gpu.id]):
            return own
    return sorted(found, key=_slotted)


def _slotted(gpu: GPU) -> bool:
    return any(form in gpu.id for form in SLOTTED)


def spelled(id: str) -> str:
    """A pattern for the ways in which people write a card's kind."""
    return _spelled(_kind(id))


def _kind(id: str) -> str:
    return id.partition("-")[0]


def _core(kind: str) -> str:
    """What every way of writing a kind of card has in it."""
    return kind.removeprefix("ascend").removeprefix("rtx")


def _spelled(kind: str) -> str:
    """A pattern for a kind of card: `rtx4090` is also written `RTX 4090` and `4090`; of several, `4090s`.

    Huawei numbers the bins of a chip: `Ascend910B3`.
    """
    rest = re.escape(_core(kind))
    if kind.startswith("ascend"):
        return rf"Ascend[ -]?{rest}\d?"
    if kind.startswith("rtx"):
        prefix = "(?:RTX[ -]?)?" if rest[0].isdigit() and not rest.endswith("ada") else "RTX[ -]?"
        return rf"{prefix}{rest}(?-i:s)?"
    return rf"{rest}(?-i:s)?"


def _counted(kind: str) -> str:
    """A pattern for the number that stands right before a kind of card: `8xA100`, `4x8H200`."""
    return r"(?:\d{1,3}[x×*])?" if kind.startswith("rtx") else r"(?:\d{1,3}[x×*])?\d{0,2}"


def listed(cards: Iterable[GPU]) -> str:
    """The names of cards in words."""
    return ", ".join(gpu.name for gpu in cards)
