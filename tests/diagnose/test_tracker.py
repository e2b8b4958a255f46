"""Tables of MemTracker: read as PyTorch prints them, and set beside the estimate kind by kind."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from commands import Run

from calc.base.units import GiB, MiB
from calc.diagnose import pasted, tracker

# what torch 2.13 prints of two linear layers of 512 and Adam, 4096 rows: `display_snapshot("peak", "MiB")`
PLAIN = """\
Device: cpu
\tParameter: 2.0 MiB
\tBuffer: 0.0 MiB
\tGradient: 1.0 MiB
\tActivation: 16.0 MiB
\tTemp: 16.0 MiB
\tOptstate: 4.01 MiB
\tOther: 0.0 MiB
\tTotal: 39.01 MiB
"""
# the same with tabulate=True, whose format is rst
TABULAR = """\
========  ===========  ========  ==========  ============  ========  ==========  =======  =========
Device    Parameter    Buffer    Gradient    Activation    Temp      Optstate    Other    Total
========  ===========  ========  ==========  ============  ========  ==========  =======  =========
cpu       2.0 MiB      0.0 MiB   1.0 MiB     16.0 MiB      16.0 MiB  4.01 MiB    0.0 MiB  39.01 MiB
========  ===========  ========  ==========  ============  ========  ==========  =======  =========
"""


@pytest.mark.parametrize("text", [PLAIN, TABULAR, f"[rank0]: x\n{PLAIN}{PLAIN.replace('39.01', '9.5')}"])
def test_the_largest_table_is_read_in_either_form(text: str) -> None:
    found = tracker.largest(pasted.lines(text))
    assert found is not None
    assert (found["Parameter"], found["Temp"]) == (2 * MiB, 16 * MiB)
    assert found["Total"] == round(39.01 * MiB)


@pytest.mark.parametrize(
    "text", ["", "Total: 3.0 GiB of RAM", "Total: 1.2.3 MiB", "Device  Total\ncpu  many", "Temp: 1 XB", "Total: . GiB"]
)
def test_what_is_no_table_is_none(text: str) -> None:
    assert tracker.largest(pasted.lines(text)) is None


def test_a_table_stands_beside_the_estimate(run: Callable[..., Run]) -> None:
    table = """\
Device: cuda:0
\tSharded Param: 3.0 GiB
\tUnsharded Param: 1.0 GiB
\tActivation: 5.0 GiB
\tTemp: 2.0 GiB
\tOptState: 6.0 GiB
\tTotal: 17.0 GiB
"""
    job = ["--model", "qwen2.5-1.5b", "--task", "sft", "--gpu", "a100-80-sxm", "--seq_len", "2048"]
    answer = json.loads(run("diagnose", "-", *job, "--json", stdin=table).out)
    assert answer["recognised"]["parts"] == ["a table of MemTracker"]
    assert answer["tracked"]["Total"] == 17 * GiB
    said = [line for line in answer["agreement"] if line.startswith("MemTracker: ")]
    assert said[0].startswith("MemTracker: the weights 4.00 GiB, the estimate's ")
    assert [line.split(",")[0].rsplit(" ", 2)[-2] for line in said] == ["4.00", "6.00", "7.00", "17.00"]
    asked = json.loads(run("diagnose", "-", "--json", stdin=table).out)
    assert asked["questions"] and asked["estimate"] is None
