"""The table of optimizers: whole, at one with the schema and the frameworks, and asked instead of names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from calc.base.optimizers import OPTIMIZERS, USUAL, Facts, Spelling, Step
from calc.frameworks.registry import FRAMEWORKS

CALC = Path(__file__).parents[2] / "calc"
FIELDS = json.loads((CALC / "scenario" / "scenario.schema.json").read_text("utf-8"))["properties"]
ROWS = pytest.mark.parametrize("facts", OPTIMIZERS.values(), ids=OPTIMIZERS)
TRAINS = {name: facts for name, facts in OPTIMIZERS.items() if name != "none"}


def test_every_optimizer_that_a_scenario_may_name_has_a_row_and_no_other() -> None:
    """A word of the schema without a row has no answer; a row without a word nobody can ask for."""
    assert [*OPTIMIZERS] == FIELDS["optimizer"]["enum"]
    assert USUAL in TRAINS


@ROWS
def test_every_row_answers_for_each_implementation_that_a_scenario_may_name(facts: Facts) -> None:
    assert set(facts.steps) == set(FIELDS["optimizer_impl"]["enum"])
    assert facts.usual in facts.implementations
    assert set(facts.implementations) <= set(facts.steps)


@ROWS
def test_every_row_says_what_each_framework_calls_it(facts: Facts) -> None:
    """An empty word says that a framework has none; TRL's commands fall back on the usual implementation's."""
    assert set(Spelling._fields) == {*FRAMEWORKS, "swift", "llamafactory", "megatron_swift", "swift_switch"}
    assert set(facts.spelled.trl) <= set(facts.implementations)
    assert not facts.spelled.trl or facts.usual in facts.spelled.trl
    assert bool(facts.spelled.torch) is (facts in TRAINS.values())


@pytest.mark.parametrize(
    ("name", "moments", "said"),
    [
        ("adamw", 2, {"deepspeed"}),
        ("adamw-8bit", 2, {"eight_bit", "bitsandbytes", "wide"}),
        ("adamw-paged-8bit", 2, {"eight_bit", "bitsandbytes", "paged", "wide"}),
        ("adamw-paged", 2, {"bitsandbytes", "paged", "wide"}),
        ("adamw-torchao-8bit", 2, {"eight_bit"}),
        ("adamw-bf16", 3, {"narrow"}),
        ("adafactor", 1, {"factored"}),
        ("sgd", 0, set()),
        ("sgd-momentum", 1, set()),
        ("lion", 1, set()),
        ("lomo", 0, {"in_backward"}),
        ("muon", 1, {"orthogonal"}),
        ("galore", 2, {"low_rank"}),
        ("none", 0, set()),
    ],
)
def test_a_row_says_what_its_code_keeps(name: str, moments: int, said: set[str]) -> None:
    """torch 2.13 `optim/*.py`, bitsandbytes 0.50 `optim/optimizer.py`, lion_pytorch.py."""
    facts, words = (
        OPTIMIZERS[name],
        (
            "deepspeed",
            "eight_bit",
            "bitsandbytes",
            "paged",
            "factored",
            "in_backward",
            "wide",
            "narrow",
            "orthogonal",
            "low_rank",
        ),
    )
    assert (facts.moments, {word for word in words if getattr(facts, word)}) == (moments, said)


@pytest.mark.parametrize(
    ("name", "fused", "foreach"),
    [("adamw", 7, 20), ("adafactor", 7, 14), ("lion", 5, 12), ("sgd-momentum", 5, 8), ("sgd", 3, 5), ("none", 0, 0)],
)
def test_numbers_that_a_step_moves(name: str, fused: int, foreach: int) -> None:
    """AdamW fused: the gradient, the weight twice, two moments twice; foreach 2 + 3 + 5 + 2 + 4 + 4 by operation.

    Tensor by tensor the operations are those of foreach. 8-bit AdamW moves gradient and weight; its moments are bytes.
    """
    steps = OPTIMIZERS[name].steps
    assert [steps[impl].moved for impl in ("fused", "foreach", "single")] == [fused, foreach, foreach]
    assert {*OPTIMIZERS["adamw-8bit"].steps.values()} == {Step(temporaries=0, moved=3)}


def test_readers_ask_the_row_and_compare_no_name() -> None:
    """What follows from an optimizer is said once: else the next one would be forgotten somewhere. The rungs of a
    recommendation and a remedy choose some by name; a default is the framework's."""
    names = re.compile("|".join(f'"{name}"' for name in TRAINS if name != USUAL))
    compared = re.compile(rf'[!=]= "{USUAL}"|\.(?:starts|ends)with\("(?:{USUAL}|8bit)')
    allowed = {CALC / "base" / "optimizers.py", CALC / "recommend" / "space.py"}
    allowed |= {CALC / "diagnose" / "remedies.py"}
    allowed |= {*(CALC / "frameworks" / "torch" / "trainers").glob("*.py")}  # tables of their defaults
    texts = {path: path.read_text("utf-8") for path in CALC.rglob("*.py") if path not in allowed}
    assert [path.name for path, text in texts.items() if names.search(text) or compared.search(text)] == []
