"""A little of `make fuzz`, the same each time: whatever a door is given, it answers or refuses in one line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fuzz import inputs
from fuzz.doors import DOORS
from hypothesis import HealthCheck, given, settings

from calc.catalog.catalog import load

# so many inputs that each door takes a second or two; `make fuzz` tries as many as one likes
EXAMPLES = {"recommend": 20, "address": 12, "added": 12, "diagnose": 8}


@pytest.mark.parametrize("name", DOORS)
def test_a_door_answers_or_refuses_in_one_line(name: str) -> None:
    door = DOORS[name]

    @settings(max_examples=EXAMPLES.get(name, 80), database=None, suppress_health_check=list(HealthCheck))
    @given(door.inputs)
    def entered(raw: Any) -> None:
        door.enter(raw)

    entered()


GOOD: dict[str, Any] = {
    "added": json.dumps(load().models["qwen3-8b"].config).encode(),
    "estimate": b"model: qwen3-0.6b\ntask: sft\ngpu: a40\n",
    "batch": b'{"model": "qwen3-0.6b", "task": "sft", "gpu": "a40"}',
    "recommend": ["--model", "qwen3-0.6b", "--task", "sft", "--gpu", "a40", "--gpus", "1"],
    "diagnose": b"model: qwen3-0.6b\ntask: sft\ngpu: a40\n",
    "address": {"model": "qwen3-0.6b", "task": "sft", "gpu": "a40", "gpus": "1"},
    "pasted": b"model: qwen3-0.6b\ntask: sft\ngpu: a40\n",
}


@pytest.mark.parametrize("name", GOOD)
def test_what_is_right_comes_through_its_door(name: str) -> None:
    """Else every input might be refused for a reason that has nothing to do with it."""
    assert DOORS[name].enter(GOOD[name])


@pytest.mark.parametrize("place", inputs.pages())
def test_the_guides_own_pages_come_through(place: str) -> None:
    assert DOORS["front"].enter(inputs.pages()[place].encode())


@pytest.mark.parametrize("place", inputs.data_files())
def test_the_small_catalog_is_valid_before_it_is_changed(place: str) -> None:
    assert DOORS["catalog"].enter((place, inputs.data_files()[place].encode()))
