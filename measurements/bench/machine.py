"""The machine at hand: what the worker's probe found, and which GPU of the catalog it has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from calc.base.schema import InputError
from calc.base.units import gib
from calc.catalog.catalog import GPU, Catalog

_NEAR = 0.04  # totals of the same kind of card differ by less, from driver to driver


@dataclass(frozen=True, slots=True)
class Machine:
    """The findings of a probe: the device's name and total, its context once kernels are loaded, and all versions."""

    device: str  # cuda or cpu
    name: str
    versions: Mapping[str, str]
    total_bytes: int | None = None
    used_bytes: int | None = None  # after the probe initialised CUDA: its context, and what other processes hold
    context_bytes: int | None = None
    capability: str | None = None
    cores: int | None = None
    host_bytes: int | None = None
    notes: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, seen: Mapping[str, Any]) -> Machine:
        """The machine from a probe's answer."""
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in seen.items() if name in known})

    @property
    def cuda(self) -> bool:
        """True if there is a GPU to measure."""
        return self.device == "cuda"

    @property
    def plain_versions(self) -> dict[str, str]:
        """The versions that a scenario can name, without suffixes (`2.11.0+cu130`)."""
        found = {name: re.match(r"[0-9]+(\.[0-9]+)*", text) for name, text in self.versions.items()}
        names = ("torch", "transformers", "peft", "bitsandbytes", "flash-attn", "deepspeed", "torchtitan")
        return {name: match[0] for name in names if (match := found.get(name))}

    @property
    def words(self) -> str:
        """The machine in one line, as records carry it."""
        memory = f" ({gib(self.total_bytes)})" if self.total_bytes else ""
        software = ", ".join(
            f"{name} {self.versions[name]}" for name in ("driver", "cuda", "torch") if name in self.versions
        )
        host = f", {self.cores} CPU cores" if self.cores else ""
        ram = f", {gib(self.host_bytes, 0)} of host memory" if self.host_bytes else ""
        return f"one {self.name}{memory}{host}{ram}; {software}"

    def gpu(self, catalog: Catalog, given: str | None) -> GPU:
        """The catalog's GPU that this machine has: `given`, or the one that its name and total fit.

        Raises InputError if there is none, or more than one.
        """
        if given:
            return catalog.gpu(given)
        known = catalog.gpus.values()
        spelled = re.sub(r"[^a-z0-9]", "", self.name.casefold())
        near = [g for g in known if self.total_bytes and abs(g.usable_bytes / self.total_bytes - 1) < _NEAR]
        # the name may decide between ids that fit alike: an H100 with HBM3 is not the PCIe card
        scores = {g.id: (score, _shared(g.name, self.name)) for g in near if (score := _score(g.id, spelled))}
        found = [name for name, score in scores.items() if score == max(scores.values())]
        if len(found) == 1:
            return catalog.gpus[found[0]]
        seen = f"{self.name!r}" + (f" with {gib(self.total_bytes)}" if self.total_bytes else ", no GPU")
        allowed = f"one of {', '.join(found)}" if found else "an id that `python -m calc gpus` lists"
        raise InputError(f"--gpu: given nothing, and the device is {seen}, allowed: {allowed}")


def _shared(known: str, device: str) -> int:
    """The number of words that a card's name shares with a device's name."""
    return len({*known.casefold().split()} & {*device.casefold().split()})


def _score(name: str, spelled: str) -> int:
    """The number of letters of an id's parts that are in a device's name; 0 unless its first part is."""
    first, *rest = name.split("-")
    return len(first) + sum(len(part) for part in rest if part in spelled) if first in spelled else 0
