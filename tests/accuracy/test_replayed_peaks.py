"""The most that a replay allocates, beside the ledger's peak of the same job: two folds of the same lifetimes."""

from __future__ import annotations

import json
from collections.abc import Iterator

from calc.accuracy.residuals import as_run
from calc.base.project import ROOT
from calc.catalog.catalog import Catalog, load
from calc.estimate.gpu_group import sets
from calc.memory.runtime import workspace
from calc.replay import replay
from calc.resolve.parse import parse
from calc.step.roles import Job

EVENTS = 60_000  # of a replay at most, so that all of them take seconds
# The ledger adds temporaries up as if all were there at once, and takes a layer's largest instant beside the most that
# others can hold; the allocator hands out more than is asked where too little would be left over.
BELOW, ABOVE = 0.02, 0.025


def peaks(catalog: Catalog) -> Iterator[tuple[str, int, int]]:
    """The id of a published job, its replayed peak and the ledger's, of each job once; none under ZeRO-3.

    There the ledger has as many parameters gathered as may be, and a model that is built whole is larger than any step.
    """
    seen = set[replay.Act]()
    for line in (ROOT / "measurements" / "published_blind.jsonl").read_text().splitlines():
        record = json.loads(line)
        s = parse(record["scenario"], catalog=catalog)
        if s.sharding == "zero3":
            continue
        job = Job(s, as_run(record, catalog).gpu(s.gpu))
        for on in sets(job):
            act = on.known
            if act is None or (alike := act._replace(others=())).events > EVENTS or alike in seen:
                continue
            seen.add(alike)
            most, _ = replay.Reserve(alike, workspace(job.gpu.architecture)).known
            yield record["id"], most, on.resting.allocated


def test_a_replay_allocates_what_the_ledger_adds_up() -> None:
    """A lifetime that one of both folds misses, or a block that a script keeps too long, shows as a difference."""
    found = [*peaks(load())]
    assert len(found) > 90
    apart = {name: most / ledger - 1 for name, most, ledger in found if not -BELOW <= most / ledger - 1 <= ABOVE}
    assert apart == {}
