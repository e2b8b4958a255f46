"""The registry: every rule is in it and has a test of its own, and this project's catalog passes them all."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import ModuleType

import pytest

from calc import check as rules
from calc.base.project import ROOT
from calc.check import beside, check, folders, gpus, messages, models, nodes, records, texts
from calc.check.architectures import GENERATIONS, SLOT

REGISTERED = {*rules.GPUS, *rules.NODES, *rules.MODELS, *rules.RECORDS, *rules.MESSAGES, *rules.ALL}
HELPERS = {"leads_somewhere", "address", "day"}


@pytest.mark.parametrize("module", [gpus, nodes, models, records, messages, texts])
def test_every_rule_is_registered_and_tested_by_name(module: ModuleType) -> None:
    """A rule that nobody calls stops nothing."""
    written = {
        function for name, function in inspect.getmembers(module, callable)
        if getattr(function, "__module__", "") == module.__name__ and inspect.isfunction(function)
        and name[0] != "_" and name not in HELPERS
    }  # fmt: skip
    assert written and written <= REGISTERED
    tests = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("*.py"))
    short = module.__name__.rpartition(".")[2]
    untested = {f.__name__ for f in written if f"{short}.{f.__name__}" not in tests and f not in rules.ALL}
    assert untested == set()


def test_every_folder_of_data_is_read() -> None:
    """By the catalog, or beside it."""
    catalog = {"hardware", "hardware/gpus", "hardware/nodes", "hardware/schema", "models", "measurements"}
    read = {*catalog, "measurements/exhausted", *(kind.folder for kind in beside.FOLDERS)}
    assert read == folders.FOLDERS.keys()


def test_this_catalog_passes_every_rule() -> None:
    check()


def test_the_schema_and_the_table_have_the_same_architectures() -> None:
    schema = json.loads((ROOT / "hardware/schema/gpu.schema.json").read_text("utf-8"))
    words = schema["properties"]["architecture"]["properties"]["value"]["enum"]
    assert list(GENERATIONS) == words
    assert {g.vendor for g in GENERATIONS.values()} <= set(schema["properties"]["vendor"]["enum"])


def test_every_link_word_has_a_speed_or_an_architecture() -> None:
    """So that a rule on links never meets a word that it does not know."""
    schema = json.loads((ROOT / "hardware/schema/node.schema.json").read_text("utf-8"))
    for word in schema["properties"]["link"]["properties"]["value"]["enum"]:
        if word.startswith("PCIe"):
            assert int(word[len("PCIe Gen")]) in SLOT
        elif word.startswith("NVLink"):
            assert int(word[len("NVLink ")]) in {g.nvlink for g in GENERATIONS.values()}
        else:
            assert word.split(",")[0] in nodes.OTHERS
    assert {slot for g in GENERATIONS.values() for slot in g.pcie} <= SLOT.keys()
