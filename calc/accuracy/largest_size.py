"""The largest size of a job that fits a card: as estimated, and as searches on real cards found it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from calc.accuracy.residuals import as_run
from calc.catalog.catalog import Catalog
from calc.estimate.estimate import estimate
from calc.estimate.verdict import FITS
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario
from calc.scenario.words import Sharding

LIKELY = 0.5  # a fit probability: more likely than not
# The fields that are searched, over the multiples of the first number up to the second.
SIZES = {"micro_batch": (1, 1024), "seq_len": (256, 131072)}
CLOSE = 0.05


@dataclass(frozen=True, slots=True)
class Search:
    """One search on a real card: the largest value of `field` that ran, the smallest that failed, and their estimates.

    `found` is 0 where none ran, `fails_at` None where none failed. `predicted` is the largest value estimated more
    likely to fit than not, `predicted_fits` the largest with verdict `fits`; `full_found` and `full_failed` are the
    estimated needs at `found` and `fails_at`, as shares of the card. `card` is the card whose memory the run was given,
    `machine` the card that it ran on; `expandable`: PyTorch used expandable segments. Of a sharded model, one rank of
    `gpus` ran.
    """

    id: str
    model: str
    task: str
    method: str
    checkpointing: str
    card: str
    machine: str
    expandable: bool
    field: str
    found: int
    fails_at: int | None
    predicted: int
    predicted_fits: int
    full_found: float | None
    full_failed: float | None
    sharding: Sharding = "none"
    gpus: int = 1
    framework: str = "torch"

    @property
    def error(self) -> float | None:
        """The relative error of the predicted size against the largest that ran; None where none ran."""
        return self.predicted / self.found - 1 if self.found else None

    @property
    def close(self) -> bool:
        """True if the predicted size is within 5 % of the largest that ran."""
        return self.found > 0 and abs(self.predicted - self.found) <= CLOSE * self.found

    @property
    def kept(self) -> bool:
        """True if the largest size with verdict `fits` is no larger than the largest that ran."""
        return self.predicted_fits <= self.found


def search(record: Mapping[str, Any], catalog: Catalog) -> Search:
    """The search of a record, with the estimates for it."""
    edge, card = record["edge"], record["scenario"]["gpu"]
    on = as_run(record, catalog)
    s = parse(record["scenario"], where=record["id"], catalog=on)
    field = edge["field"]
    step, highest = SIZES[field]
    likely, fits = (step * predicted(s, field, step, highest // step, on, least) for least in (LIKELY, FITS))
    return Search(
        id=record["id"],
        model=s.model,
        task=s.task,
        method=s.method,
        checkpointing=s.checkpointing,
        card=card,
        machine=record["machine"]["gpu"],
        expandable=s.expandable_segments,
        field=field,
        found=edge["found"],
        fails_at=edge["fails_at"],
        predicted=likely,
        predicted_fits=fits,
        full_found=_full(sized(s, field, edge["found"]), on) if edge["found"] else None,
        full_failed=_full(sized(s, field, edge["fails_at"]), on) if edge["fails_at"] else None,
        sharding=s.sharding,
        gpus=s.gpus,
        framework=s.framework,
    )


def _full(s: Scenario, catalog: Catalog) -> float:
    return max(g.peak.moment.device_bytes / g.usable_bytes for g in estimate(s, catalog).groups)


def sized(s: Scenario, field: str, value: int) -> Scenario:
    """The job with `micro_batch` sequences, accumulated as often as before, or with sequences of `seq_len` tokens."""
    if field == "micro_batch":
        return replace(
            s, micro_batch=value, max_tokens_per_gpu=None, global_batch=value * s.data_parallel * s.accumulation
        )
    return replace(s, seq_len=value, expected_len=value)


def predicted(s: Scenario, field: str, step: int, highest: int, catalog: Catalog, least: float) -> int:
    """The largest size of `field`, in units of `step`, that fits with a probability of at least `least`; 0 if none."""

    runs, fails = 0, highest + 1
    while fails - runs > 1:
        size = (runs + fails) // 2
        fits = estimate(sized(s, field, size * step), catalog).fit_probability >= least
        runs, fails = (size, fails) if fits else (runs, size)
    return runs
