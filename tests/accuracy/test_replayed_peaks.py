"""The most that a replay allocates, beside the ledger's peak of the same job: two folds of the same lifetimes."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from calc.accuracy.residuals import as_run
from calc.base.project import ROOT
from calc.catalog.catalog import Catalog, load
from calc.estimate.gpu_group import sets
from calc.memory.runtime import workspace
from calc.models.architecture import parameters
from calc.replay import replay
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario
from calc.step.roles import Job

Record = Mapping[str, Any]
EVENTS = 60_000  # of a replay at most
# The ledger adds temporaries up as if all were there at once, and takes a layer's largest instant beside the most that
# others can hold; the allocator hands out more than is asked where too little would be left over.
BELOW, ABOVE = 0.02, 0.025


def kinds(catalog: Catalog) -> Iterator[tuple[Scenario, Record]]:
    """Of each kind of published job that with the smallest model, whose replay is the shortest; none under ZeRO-3.

    There the ledger has as many parameters gathered as may be, and a model that is built whole is larger than any step.
    """
    records = map(json.loads, (ROOT / "measurements" / "published_blind.jsonl").read_text().splitlines())
    jobs = [(parse(record["scenario"], catalog=catalog), record) for record in records]
    found: dict[Hashable, tuple[Scenario, Record]] = {}
    for s, record in sorted(jobs, key=lambda job: parameters(job[0].architecture)):
        if s.sharding != "zero3":
            found.setdefault(kind(s), (s, record))
    yield from found.values()


def kind(s: Scenario) -> Hashable:
    """What decides which blocks come and go, and in which order."""
    return s.framework, s.task, s.method, s.sharding, s.checkpointing, s.loss, bool(s.rollout)


def peaks(catalog: Catalog) -> Iterator[tuple[str, int, int]]:
    """The id of a job of each kind, its replayed peak and the ledger's."""
    for s, record in kinds(catalog):
        job = Job(s, as_run(record, catalog).gpu(s.gpu))
        for on in sets(job):
            if (act := on.known) is None or (alone := act._replace(others=())).events > EVENTS:
                continue
            most, _ = replay.Reserve(alone, workspace(job.gpu.architecture)).known
            yield record["id"], most, on.resting.allocated


def test_a_replay_allocates_what_the_ledger_adds_up() -> None:
    """A lifetime that one of both folds misses, or a block that a script keeps too long, shows as a difference."""
    found = [*peaks(load())]
    assert len(found) > 30
    apart = {name: most / ledger - 1 for name, most, ledger in found if not -BELOW <= most / ledger - 1 <= ABOVE}
    assert apart == {}
