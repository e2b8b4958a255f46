"""Largest sizes that fit: as estimated, and beside what a search found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from calc.accuracy.largest_size import SIZES, Search, predicted, search, sized
from calc.accuracy.residuals import as_run
from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.estimate.verdict import FITS
from calc.resolve.parse import parse


@pytest.mark.parametrize("least", [0.5, FITS])
@pytest.mark.parametrize("field", ["micro_batch", "seq_len"])
def test_the_prediction_is_the_last_size_before_the_estimate_turns(field: str, least: float) -> None:
    given = {"model": "llama-3.2-1b", "task": "sft", "gpu": "rtx4090", "seq_len": 1024, "checkpointing": "full"}
    s, step = parse(given), 1 if field == "micro_batch" else 512
    size = predicted(s, field, step, 200, load(), least)

    def probability(value: int) -> float:
        more = {"global_batch": value} if field == "micro_batch" else {"expected_len": value}
        return estimate(replace(s, **{field: value, **more})).fit_probability

    assert 0 < size < 200
    assert probability(size * step) >= least > probability((size + 1) * step)


def test_a_larger_micro_batch_is_accumulated_as_often_and_a_longer_sequence_is_full() -> None:
    given = {"model": "llama-3.2-1b", "task": "sft", "gpu": "rtx4090", "seq_len": 1024, "global_batch": 4}
    s = parse(given)
    more, longer = sized(s, "micro_batch", 3), sized(s, "seq_len", 2048)
    assert (more.micro_batch, more.global_batch, more.accumulation) == (3, 12, 4)
    assert (longer.seq_len, longer.expected_len) == (2048, 2048)


RECORD: dict[str, Any] = {
    "id": "measured/here/llama-3.2-1b/sft/s2048/mb-edge/gpu=rtx4090/expandable_segments=True",
    "scenario": {
        "model": "llama-3.2-1b",
        "task": "sft",
        "gpu": "rtx4090",
        "seq_len": 2048,
        "checkpointing": "full",
        "expandable_segments": True,
    },
    "machine": {"gpu": "h200"},
    "edge": {"field": "micro_batch", "found": 5, "fails_at": 6, "predicted": 1, "predicted_fits": 1, "probes": 2},
}


def test_a_search_is_predicted_anew_for_the_card_as_it_was_on_the_machine() -> None:
    """What the record had predicted counts for nothing; its sizes are searched with the kernels that ran."""
    catalog = load()
    found = search(RECORD, catalog)
    assert (found.card, found.machine, found.expandable) == ("rtx4090", "h200", True)
    assert (found.found, found.fails_at) == (5, 6)
    s, on = parse(RECORD["scenario"]), as_run(RECORD, catalog)
    step, highest = SIZES["micro_batch"]
    assert found.predicted == predicted(s, "micro_batch", step, highest, on, 0.5) > 1
    assert found.predicted_fits == predicted(s, "micro_batch", step, highest, on, FITS)
    (group,) = estimate(sized(s, "micro_batch", 5), on).groups
    assert found.full_found == group.peak.moment.device_bytes / catalog.gpu("rtx4090").usable_bytes
    assert found.full_found < found.full_failed


def test_where_nothing_ran_or_nothing_failed_there_is_no_share_and_no_error() -> None:
    edge = {**RECORD["edge"], "found": 0, "fails_at": None}
    found = search({**RECORD, "edge": edge}, load())
    assert (found.full_found, found.full_failed, found.error, found.close) == (None, None, None, False)


MADE = Search("x", "m", "sft", "full", "none", "a", "a", False, "seq_len", 2000, 2256, 2100, 2000, 0.9, 1.0)


@pytest.mark.parametrize(
    ("likely", "fits", "close", "kept"),
    [(2100, 2000, True, True), (1900, 1900, True, True), (2101, 2001, False, False), (1899, 0, False, True)],
)
def test_a_search_is_close_within_5_percent_and_kept_where_what_was_said_to_fit_ran(
    likely: int, fits: int, close: bool, kept: bool
) -> None:
    """Of 2,000 tokens that ran: 1,900 to 2,100."""
    found = replace(MADE, predicted=likely, predicted_fits=fits)
    assert (found.close, found.kept) == (close, kept)
