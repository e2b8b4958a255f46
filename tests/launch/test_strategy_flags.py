"""Every flag that a page about a remedy names exists in the released package, with a legal value."""

from __future__ import annotations

import re
import shlex
from typing import Any

import packages as released
import pytest
from packages import Packages

from calc.site.text.sources import front
from calc.site.views.jobs import strategies

ROWS = [
    pytest.param(row, id=f"{page.stem}-{row['framework']}-{row['flag']}")
    for page in sorted(strategies.FOLDER.glob("*.md"))
    for row in front(page)[0].get("switch", [])
    # not a call of PyTorch's, whose package is not here, nor a flag of slime, which has none
    if "flag" in row and row["framework"] not in ("torch", "slime")
]


def test_pages_name_flags() -> None:
    assert len(ROWS) > 40


@pytest.mark.parametrize("row", ROWS)
def test_a_flag_is_one_of_the_release(packages: Packages, row: dict[str, Any]) -> None:
    words = shlex.split(row["flag"])
    if row["framework"] == "verl":
        assert row["command"] == "main_ppo"
        hydra = released.Hydra(packages.release("verl"))
        noted = re.findall(r"`((?:actor_rollout_ref|data|trainer)[.\w]+)`", row.get("note", ""))
        for word in words:
            hydra.check(word)
        assert all(key in hydra.keys for key in noted)
        return
    parser = (
        released.openrlhf(packages.release("openrlhf"), row["command"])
        if row["framework"] == "openrlhf"
        else released.trl(packages, row["command"])
    )
    needed = {action for action in parser._actions if action.required}
    for action in needed:
        action.required = False
    try:
        parser.parse_args(words)
    finally:
        for action in needed:
            action.required = True
