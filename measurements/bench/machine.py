"""The machine at hand: what the worker's probe saw of it, and which GPU of the catalog that is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from calc.catalog import GPU, Catalog
from calc.schema import InputError
from calc.units import gib

_NEAR = 0.04  # two totals of the same kind of card differ by less, with the driver


@dataclass(frozen=True, slots=True)
class Machine:
    """What a probe saw: the device's name and total, its context once kernels are loaded, and all versions."""

    device: str  # cuda or cpu
    name: str
    versions: Mapping[str, str]
    total_bytes: int | None = None
    used_bytes: int | None = None  # when the probe had initialised CUDA: its context, and what others hold
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
        """Whether there is a GPU to measure."""
        return self.device == "cuda"

    @property
    def plain_versions(self) -> dict[str, str]:
        """The versions that a scenario can name, without what follows the numbers (`2.11.0+cu130`)."""
        found = {name: re.match(r"[0-9]+(\.[0-9]+)*", text) for name, text in self.versions.items()}
        names = ("torch", "transformers", "peft", "bitsandbytes", "flash-attn", "deepspeed")
        return {name: match[0] for name in names if (match := found.get(name))}

    @property
    def words(self) -> str:
        """The machine in a line, as records carry it."""
        memory = f" ({gib(self.total_bytes)})" if self.total_bytes else ""
        software = ", ".join(
            f"{name} {self.versions[name]}" for name in ("driver", "cuda", "torch") if name in self.versions
        )
        host = f", {self.cores} CPU cores" if self.cores else ""
        ram = f", {gib(self.host_bytes, 0)} of host memory" if self.host_bytes else ""
        return f"one {self.name}{memory}{host}{ram}; {software}"

    def gpu(self, catalog: Catalog, given: str | None) -> GPU:
        """The catalog's GPU that this machine has: `given`, or the one that its name and total fit.

        InputError where there is none, or more than one.
        """
        if given:
            return catalog.gpu(given)
        known = catalog.gpus.values()
        spelled = re.sub(r"[^a-z0-9]", "", self.name.casefold())
        near = [g for g in known if self.total_bytes and abs(g.usable_bytes / self.total_bytes - 1) < _NEAR]
        # what an id leaves open its name may say: an H100 with HBM3 is not the PCIe card
        scores = {g.id: (score, _shared(g.name, self.name)) for g in near if (score := _score(g.id, spelled))}
        found = [name for name, score in scores.items() if score == max(scores.values())]
        if len(found) == 1:
            return catalog.gpus[found[0]]
        seen = f"{self.name!r}" + (f" with {gib(self.total_bytes)}" if self.total_bytes else ", no GPU")
        allowed = f"one of {', '.join(found)}" if found else "an id that `python -m calc gpus` lists"
        raise InputError(f"--gpu: given nothing, and the device is {seen}, allowed: {allowed}")


def _shared(known: str, device: str) -> int:
    """How many words of a card's name stand in a device's."""
    return len({*known.casefold().split()} & {*device.casefold().split()})


def _score(name: str, spelled: str) -> int:
    """How many letters of an id's parts stand in a device's name; 0 unless its first part does."""
    first, *rest = name.split("-")
    return len(first) + sum(len(part) for part in rest if part in spelled) if first in spelled else 0
