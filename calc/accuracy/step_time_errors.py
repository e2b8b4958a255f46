"""Residuals of estimated step times against published and measured ones, and their rank correlation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calc.accuracy.rl_stages import logged, staged
from calc.accuracy.timing import SET
from calc.catalog.catalog import Catalog
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario
from calc.scenario.words import RL
from calc.throughput import Unrated, node_of, throughput

# frameworks and trainers with a loop of their own, as measured records of theirs are headed
LOOPS = {"trl": "TRL", "torchtune": "torchtune"}
COLLECTIVES = ("gather", "reduce", "all-reduce", "overlap")


@dataclass(frozen=True, slots=True)
class Pace:
    """One record's seconds per optimizer step, as estimated and as measured, and the estimate's largest term.

    `group` is the record's source, or for a measured record the card and the kind of job. `calibrates` names the
    constant that was set from this record, if any; such a record is not used to judge the estimates.
    """

    id: str
    group: str
    predicted: float
    measured: float
    bound_by: str
    calibrates: str

    @property
    def error(self) -> float:
        """The relative error, positive where the estimate is too slow."""
        return self.predicted / self.measured - 1


def paces(catalog: Catalog) -> list[Pace]:
    """The residual of each record that says how fast a model was trained, where the catalog has the rates for it."""
    return _paces(catalog, rl=False)


def iterations(catalog: Catalog) -> list[Pace]:
    """The same of iterations of RL, with their rollouts; those of another framework are computed as verl runs them."""
    return _paces(catalog, rl=True)


def stages(catalog: Catalog) -> list[Pace]:
    """The residual of each stage of a published iteration of RL, under the name of the stage."""
    found = []
    for record in catalog.measurements:
        told = record.get("measured_stages", {})
        for stage, terms in staged(record, catalog).items() if told else ():
            seconds, largest = sum([t.seconds for t in terms]), max(terms, key=lambda term: term.seconds)
            sets = told.get("calibrates", {}).get(stage, "")
            found.append(Pace(f"{record['id']}: {stage}", stage, seconds, logged(told[stage]), largest.name, sets))
    return found


def _paces(catalog: Catalog, *, rl: bool) -> list[Pace]:
    rated = [r for r in catalog.measurements if "measured_rate" in r and (r["scenario"]["task"] in RL) is rl]
    return [found for r in rated if (found := pace(r, catalog))]


def steps(catalog: Catalog) -> list[Pace]:
    """The residual of each step that this project timed on a card of its own, where the catalog has the rates.

    A card that stood in for a smaller one ran out of memory, or nearly, and is left out.
    """
    found = [step(r, catalog) for r in catalog.measurements if r["class"] == "measured"]
    return [p for p in found if p]


def step(record: Mapping[str, Any], catalog: Catalog) -> Pace | None:
    """The residual of a measured record, or None if it timed no step or the estimate lacks a rate.

    Collectives are left out: the other ranks of a sharded job were not there, so its collectives took no time.
    """
    seen = record.get("observed", {})
    if not seen.get("step_seconds") or seen.get("limit_bytes"):
        return None
    s = parse(record["scenario"], where=record["id"], catalog=catalog)
    card = catalog.gpu(record["machine"]["gpu"])
    try:
        t = throughput(s, card, node_of(s, catalog))
    except Unrated:
        return None
    ran = [term for term in t.terms if term.name.rpartition(": ")[2] not in COLLECTIVES]
    seconds = sum([term.seconds for term in ran])
    sets = ", ".join(name for name, ids in SET.items() if record["id"] in ids)
    bound_by = max(ran, key=lambda term: term.seconds).name
    return Pace(record["id"], f"{card.name}: {kind(s)}", seconds, seen["step_seconds"], bound_by, sets)


def kind(s: Scenario) -> str:
    """The kind of job under which a measured record is counted."""
    if name := LOOPS.get(s.framework) or LOOPS.get(s.trainer):
        return f"{name}, with generation" if s.rollout else name
    if s.sharding != "none":
        return "one rank of FSDP2" if s.sharding == "fsdp2" else "one rank of ZeRO"
    if s.method != "full":
        return {"lora": "LoRA", "qlora": "QLoRA"}[s.method]
    return "full, recomputed" if s.checkpointing != "none" else "full"


def pace(record: Mapping[str, Any], catalog: Catalog) -> Pace | None:
    """The residual of a record with a measured rate, or None if the estimate lacks a rate."""
    s = parse(record["scenario"], where=record["id"], catalog=catalog)
    rate = record["measured_rate"]
    try:
        t = throughput(s, catalog.gpu(s.gpu), node_of(s, catalog))
    except Unrated:
        return None
    seconds = step_seconds(s, rate["unit"], rate["value"])
    return Pace(record["id"], record.get("group", ""), t.step_seconds, seconds, t.bound_by, rate.get("calibrates", ""))


def step_seconds(s: Scenario, unit: str, value: float) -> float:
    """A measured rate in seconds per optimizer step."""
    return {
        "step_seconds": value,
        "sequences_per_second": s.sequences / value,
        "tokens_per_second": s.sequences * s.expected_len / value,
    }[unit]


def judging(found: Iterable[Pace]) -> list[Pace]:
    """The residuals from which no constant was set."""
    return [p for p in found if not p.calibrates]


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rho of pairs: the correlation of their ranks, where ties share their mean rank.

    Raises ZeroDivisionError if all values of one side are equal.
    """
    left, right = _ranks([a for a, _ in pairs]), _ranks([b for _, b in pairs])
    middle = (len(pairs) + 1) / 2
    products = sum((a - middle) * (b - middle) for a, b in zip(left, right, strict=True))
    squares = sum((a - middle) ** 2 for a in left) * sum((b - middle) ** 2 for b in right)
    return float(products / squares**0.5)


def _ranks(values: Sequence[float]) -> list[float]:
    """The rank of each value, counted from 1; ties get their mean rank."""
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) + 1) / 2 for v in values]
