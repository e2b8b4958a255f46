"""Peaks of Megatron-LM that SimuMax publishes beside its own, and estimates of the same jobs.

`measurements/simumax` holds them: a scenario each, of a model of which only the first layers are trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from calc.base.project import ROOT
from calc.base.reading import parse_mapping, read_bytes
from calc.base.units import GiB
from calc.catalog.catalog import Catalog, load
from calc.estimate.estimate import estimate
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario

FOLDER = ROOT / "measurements" / "simumax"
FILE = "peaks.yaml"


class Peak(NamedTuple):
    """A case: its scenario, and its peak in bytes as published and as estimated."""

    scenario: Scenario
    published: int
    estimated: int

    @property
    def error(self) -> float:
        """The relative error, positive where the estimate is too high."""
        return self.estimated / self.published - 1


@lru_cache(maxsize=1)
def data() -> Mapping[str, Any]:
    """The file as it is written."""
    return parse_mapping(read_bytes(FOLDER / FILE, FILE), FILE)


def scenario(told: Mapping[str, Any], case: Mapping[str, Any], catalog: Catalog) -> Scenario:
    """The scenario of one case of the file `told`; raises ScenarioError for one that cannot be used."""
    own = {name: value for name, value in case.items() if name != "peak"}
    model = str(FOLDER / f"{case['model']}.json")
    return parse({**told["scenario"], **own, "model": model}, where=FILE, catalog=catalog)


@lru_cache(maxsize=1)
def peaks() -> tuple[Peak, ...]:
    """Every case, with the largest peak of all its ranks as PyTorch counts what is allocated."""
    catalog, found = load(), []
    for case in data()["cases"]:
        s = scenario(data(), case, catalog)
        allocated = max(p.moment.allocated_bytes for g in estimate(s, catalog).groups for p in g.phases)
        found.append(Peak(s, int(case["peak"] * GiB), allocated))
    return tuple(found)
