"""verl's published minimal configurations: ours never needs more GPUs, and where fewer, something differs."""

from __future__ import annotations

import pytest

from calc.estimate.estimate import estimate
from calc.recommend.published import VERL, Published, compare


@pytest.mark.parametrize("row", VERL, ids=[f"{row.title}, {row.job['gpu']}" for row in VERL])
def test_ours_never_needs_more_gpus_than_theirs(row: Published, capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(row)
    assert found.ours
    assert found.gpus
    with capsys.disabled():
        differing = ", ".join(f"{d.field} {d.theirs} -> {d.ours}" for d in found.differences)
        print(f"\n{row.title} on {row.job['gpu']}: theirs {row.gpus}, ours {found.gpus} ({differing})", end="")
    assert found.gpus <= row.gpus
    assert estimate(found.ours.scenario).verdict == "fits"
    assert {d.field for d in found.differences} <= {"gpus", *row.settings}
    if found.gpus < row.gpus:
        assert any(d.field != "gpus" for d in found.differences)
    job = found.ours.scenario
    assert (job.gpu, job.prompt_len, job.response_len) == (
        row.job["gpu"], row.job["prompt_len"], row.job["response_len"],
    )  # fmt: skip
