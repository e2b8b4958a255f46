"""Releases as rows of data: what a table of defaults says of a release, and that every table is one."""

from __future__ import annotations

from itertools import pairwise
from types import ModuleType

import pytest

from calc.base.versions import at_least
from calc.frameworks.openrlhf import openrlhf
from calc.frameworks.openrlhf import releases as openrlhf_releases
from calc.frameworks.registry import FRAMEWORKS
from calc.frameworks.releases import GONE, READ, Default, Table, pinned, stated
from calc.frameworks.torch import releases as torch_releases
from calc.frameworks.trl import releases as trl_releases
from calc.frameworks.verl import easyr1, verl
from calc.frameworks.verl import releases as verl_releases

RELEASES: dict[str, ModuleType] = {
    "torch": torch_releases,
    "openrlhf": openrlhf_releases,
    "verl": verl_releases,
    "trl": trl_releases,
    "verl==easyr1": easyr1,
}
TABLE = Table(
    Default("packing", "0.2", False, "a.yaml:1"),
    Default("packing", "0.9", True, "a.yaml:2"),
    Default("batch", "0.2", 8, "a.yaml:3"),
    Default("batch", "0.9", 1, "a.yaml:4", ("rm",)),
    Default("limit", "0.3", None, "a.yaml:5"),
    Default("limit", "0.10", GONE, "a.yaml:6"),
)


@pytest.mark.parametrize(
    ("task", "version", "defaults"),
    [
        ("sft", "0.1", {}),
        ("sft", "0.2", {"packing": False, "batch": 8}),
        ("sft", "0.3.1", {"packing": False, "batch": 8, "limit": None}),
        ("rm", "0.9", {"packing": True, "batch": 1, "limit": None}),
        ("sft", "0.10", {"packing": True, "batch": 8}),
    ],
)
def test_a_release_has_the_last_value_of_each_field_for_its_task(
    task: str, version: str, defaults: dict[str, object]
) -> None:
    assert stated(task, version, TABLE) == defaults


def test_a_changed_default_is_one_row() -> None:
    """Added at the end, for releases from then on; a later table goes first, and says nothing of what is gone there."""
    more = Table(*TABLE.rows, Default("packing", "0.10", False, "b.yaml:1"))
    told = [stated("sft", version, more)["packing"] for version in ("0.2", "0.9.9", "0.10", "1.0")]
    assert told == [False, True, False, False]
    own = Table(Default("batch", "0.2", 2, "c.yaml"), Default("batch", "0.9", GONE, "c.yaml"))
    assert [stated("sft", version, TABLE, own)["batch"] for version in ("0.3", "0.9")] == [2, 8]


@pytest.mark.parametrize("framework", RELEASES)
def test_every_row_has_a_source_and_follows_those_that_it_outdates(framework: str) -> None:
    """A row out of order, or of a release that nobody can ask for, would never hold, or hold where it should not."""
    name, _, fork = framework.partition("==")
    own = [version for version in FRAMEWORKS[name].KNOWN if verl_releases.forked(version) == fork]
    known = tuple(version.removeprefix(f"{fork}-") for version in own)
    assert known == tuple(RELEASES[framework].RELEASES)
    tables = [table for table in vars(RELEASES[framework]).values() if isinstance(table, Table)]
    for table in tables:
        for row in table.rows:
            assert row.source and row.since in known, row
        for field in {row.field for row in table.rows}:
            rows = [row for row in table.rows if row.field == field]
            assert [bool(row.tasks) for row in rows] == sorted(bool(row.tasks) for row in rows), field
            for a, b in pairwise(rows):
                assert a.tasks != b.tasks or not at_least(a.since, b.since), b


def test_a_release_runs_on_the_libraries_of_its_row() -> None:
    """vLLM alone where something is generated; a suffix is another build of the same code."""
    assert pinned(openrlhf.RELEASES["0.5.8"])["versions.flash-attn"] == "2.7.0"
    assert openrlhf.defaults("ppo", "0.7.5", {})["versions.vllm"] == "0.8.5"
    assert "versions.vllm" not in openrlhf.defaults("sft", "0.7.5", {})
    assert verl.defaults("ppo", "0.9.0", {})["versions.torch"] == "2.11.0"


def test_every_library_that_a_release_runs_on_is_watched() -> None:
    """One that is not in `READ` would not be asked about by `make versions`."""
    pins = [pins for module in RELEASES.values() for pins in module.RELEASES.values()]
    assert {field.removeprefix("versions.") for own in pins for field in pinned(own)} <= READ.keys()
