"""Texts that people paste, in the forms of PyTorch, vLLM, Ray, the kernel and the trainers: each is read for what it
says.

Of the first 48, 24 were read in full when they were written down, before anything was mended for them; of the last 18,
written after that, 14 were.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from calc.base.reading import parse_yaml
from calc.catalog.catalog import load
from calc.diagnose import diagnose
from calc.diagnose.reading import read

CATALOG = load()
INPUTS: dict[str, dict[str, Any]] = {
    each["id"]: each for each in parse_yaml(Path(__file__).with_name("inputs.yaml").read_text("utf-8"), "inputs.yaml")
}


@pytest.mark.parametrize("name", INPUTS)
def test_an_input_is_read_for_what_it_says(name: str) -> None:
    found = read(INPUTS[name]["text"], CATALOG)
    assert found.parts
    said = {"kind": found.error.row.kind if found.error else None, "phase": found.phase, **found.fields}
    expected = INPUTS[name]["read"]
    assert {place: said.get(place) for place in expected} == expected


@pytest.mark.parametrize("name", [*INPUTS][::2])
def test_an_input_with_a_model_and_a_card_is_answered(name: str) -> None:
    """Whatever the text leaves open, the answer for a model and a card is an estimate, and a refusal is never given."""
    read_fields = read(INPUTS[name]["text"], CATALOG).fields
    told = {
        place: value for place, value in (("model", "llama-3-8b"), ("gpu", "a100-80-sxm")) if place not in read_fields
    }
    found = diagnose(INPUTS[name]["text"], told, CATALOG)
    assert not found.refusal
    assert found.estimate and found.cause
    assert found.remedies or found.host  # nothing of the job need change where others fill a host's memory
