"""The errors of estimates that the verdict rests on, computed from `measurements/`, with or without a given source.

The results are constants in `calc.memory.runtime` and `calc.estimate.verdict`, so that an estimate reads no records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import sqrt
from statistics import median
from typing import Any, NamedTuple

from calc.accuracy.residuals import Residual, as_run
from calc.catalog.catalog import Catalog
from calc.estimate import verdict
from calc.estimate.estimate import estimate
from calc.memory import runtime
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario

# The largest share of the card that counts as a small request. Only a small one shows what is lost when memory runs
# out: a large one fails before the card is full.
SMALL = 1 / 50
THREADS = "github-issues"  # the group of reports in threads about runs that died
PARTS = 40  # quantiles are the middles of this many equal parts

Message = Mapping[str, Any]


def source(record: Mapping[str, Any]) -> str:
    """The repository or the host that a record comes from: errors of records with the same source may share a cause."""
    parts = str(record["url"] or record.get("group", "")).split("/")
    return "/".join(parts[3:5]) if parts[2:3] == ["github.com"] else "/".join(parts[2:3]) or parts[0]


def at_the_edge(catalog: Catalog) -> list[Message]:
    """Messages of runs that died of a small request after loading; before that, nothing has been freed."""
    return [m for m in catalog.exhausted if m["phase"] != "load" and m["tried_bytes"] <= SMALL * m["total_bytes"]]


def share(m: Message) -> float:
    """The memory in pieces too small for the request, reserved or free, as a share of all that was asked for."""
    pieces = m["unallocated_bytes"] + m["free_bytes"] - m["tried_bytes"]
    return max(0.0, float(pieces / (m["allocated_bytes"] + m["tried_bytes"])))


def quantiles(shares: Iterable[float]) -> tuple[float, ...]:
    """The middles of `PARTS` equal parts of the shares, smallest first, interpolated linearly."""
    found = sorted(shares)
    places = [(part + 0.5) / PARTS * (len(found) - 1) for part in range(PARTS)]
    return tuple(
        found[int(x)] + (x - int(x)) * (found[min(int(x) + 1, len(found) - 1)] - found[int(x)]) for x in places
    )


def fragmentation(catalog: Catalog, without: str = "") -> tuple[float, ...]:
    """The values of `runtime.FRAGMENTATION`, computed without the messages of the source `without`."""
    return quantiles(share(m) for m in at_the_edge(catalog) if source(m) != without)


def replayed(residuals: Iterable[Residual], catalog: Catalog) -> tuple[float, ...]:
    """The values of `runtime.REPLAYED`, computed from measured jobs whose allocator never had to retry."""
    never = {record["id"] for record in quiet(catalog)}
    seen = [r.allocator for r in residuals if r.id in never and r.allocator]
    return quantiles(a.reserved / a.undisturbed - 1 for a in seen if a.undisturbed)


def caching(catalog: Catalog) -> Iterator[tuple[Scenario, float]]:
    """The jobs of `quiet`, each with what its allocator cached as a share of what comes and goes at an instant."""
    for record in quiet(catalog):
        on = as_run(record, catalog)
        s = parse(record["scenario"], where=record["id"], catalog=on)
        phases = [p for g in estimate(s, on, replays=False).groups for p in g.phases]
        coming = max(sum(runtime.coming(p.moment.lines)) for p in phases)
        if coming:
            yield s, (record["observed"]["reserved_bytes"] - record["measured_bytes"]) / coming


def sharded_cache(jobs: Iterable[tuple[Scenario, float]]) -> float:
    """The value of `runtime.CACHED_SHARDED`, from `caching`."""
    found = sorted([share for s, share in jobs if s.sharded.family in ("zero", "fsdp")])
    return found[int(0.95 * (len(found) - 1))]


def usual_cache(jobs: Iterable[tuple[Scenario, float]]) -> dict[tuple[str, bool], float]:
    """The values of `runtime.USUALLY`, and those of other shardings: of each, without and with expandable segments."""
    found: dict[tuple[str, bool], list[float]] = {}
    for s, share in jobs:
        found.setdefault((s.sharded.family, s.expandable_segments), []).append(share)
    return {kind: median(shares) for kind, shares in found.items()}


def quiet(catalog: Catalog) -> Iterator[Mapping[str, Any]]:
    """The measured jobs whose allocator never had to retry."""
    for record in catalog.measurements:
        seen = record.get("observed", {})
        retried = "allocator" not in seen or seen["allocator"]["retries"]
        if record["class"] == "measured" and record["metric"] == "allocated" and not retried:
            yield record


def formula_spread(residuals: Iterable[Residual]) -> float:
    """The value of `verdict.FORMULA_SPREAD`: the largest RMS error of traced peaks of any kind of sharding."""
    kinds: dict[str, list[float]] = {}
    for r in residuals:
        if r.kind == "traced" and r.metric == "allocated":
            kinds.setdefault(r.family, []).append(r.error)
    return max(rms(errors) for errors in kinds.values())


def outside_errors(catalog: Catalog) -> list[int]:
    """The bytes that processes took outside PyTorch, less what `runtime.process` gives, where both are known."""
    errors = []
    for m in catalog.exhausted:
        if m["in_use_bytes"] and m["processes"] in (None, 1) and (m["gpus"] == 1 or (m["gpus"] and m["gpu"])):
            linked = catalog.gpu(m["gpu"]).linked if m["gpu"] else False
            lines = runtime.process("", int(m["gpus"] > 1), linked)
            expected = sum(line.bytes for line in lines if not line.allocated)
            errors.append(m["in_use_bytes"] - m["allocated_bytes"] - m["unallocated_bytes"] - expected)
    return errors


def rms(errors: Sequence[float]) -> float:
    """The root mean square of `errors`."""
    return sqrt(sum(error**2 for error in errors) / len(errors))


class Outcome(NamedTuple):
    """A published job: whether it ran, and its fit probability, estimated without its own source.

    `sought`: it was found by looking for runs that died, so that a larger share of such jobs died than of all jobs.
    """

    id: str
    source: str
    sought: bool
    probability: float
    ran: bool


def outcomes(residuals: Iterable[Residual], catalog: Catalog) -> list[Outcome]:
    """The outcomes of published jobs that ran, or ran out of memory."""
    records = {record["id"]: record for record in catalog.measurements}
    found = []
    shares: dict[str, tuple[float, ...]] = {}  # by the source that is left out
    for r in residuals:
        if r.kind != "published" or r.reported not in ("fits", "oom"):
            continue
        own = source(records[r.id])
        if own not in shares:
            shares[own] = fragmentation(catalog, own)
        sought = records[r.id].get("group", THREADS) == THREADS
        found.append(Outcome(r.id, own, sought, odds(r, shares[own]), r.reported == "fits"))
    return found


def odds(r: Residual, shares: Sequence[float]) -> float:
    """The probability that a record's job fits if fragmentation takes one of `shares`; 0 if vLLM does not start."""
    return min([verdict.odds(top.sums, top.usable, shares) for top in r.tops], default=0.0)


def covered(catalog: Catalog) -> list[tuple[str, float]]:
    """For each message its source, and the rank of its share among those of all other sources, from 0 to 1."""
    shares = [(source(m), share(m)) for m in at_the_edge(catalog)]
    found = []
    for own, mine in shares:
        others = [other for theirs, other in shares if theirs != own]
        below = sum(other < mine for other in others) + 0.5 * sum(other == mine for other in others)
        found.append((own, below / len(others)))
    return found
