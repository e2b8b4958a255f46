"""A formula on a page: what it is in a sentence, the rest of its docstring folded, its source, and an example."""

from __future__ import annotations

import pytest

from calc.site.macros import formulas

NAME = "calc.models.slices:part"


def test_a_docstring_is_no_prose_of_the_page() -> None:
    """Only its first paragraph stands in the text; sources and exceptions open on request."""
    first, folded, code = formulas.show(NAME).partition('??? note "In detail"\n\n')
    assert first.startswith("One tensor-parallel rank's part of the model")
    assert folded
    detail, _, source = code.partition("\n\n```python")
    assert "Raises ConfigError" in detail
    assert all(line.startswith("    ") for line in detail.splitlines() if line)
    assert "def part(" in source


def test_a_docstring_of_one_paragraph_has_nothing_to_fold() -> None:
    assert "???" not in formulas.show("calc.memory.gradients:so_far")


def test_an_inherited_function_is_shown_by_its_own_name() -> None:
    """Once the loss page had a delta rule's products where a divergence was meant."""
    with pytest.raises(TypeError, match=r"loss:Head\.compared is calc\.memory\.delta:DeltaRule\.compared"):
        formulas.find("calc.memory.loss:Head.compared")
