"""Launch commands: what starts the job of a scenario with the framework it names, one module per framework.

Every flag and configuration key is looked up in the released packages by `tests/launch/test_released_flags.py`. Only
the newest releases are covered; each module names the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from calc.base.versions import at_least
from calc.launch import openrlhf, trl, verl
from calc.launch.shell import Launch, LaunchError
from calc.scenario.scenario import Scenario

__all__ = ["Launch", "LaunchError", "launch"]


class Speller(Protocol):
    """The interface of a framework's module in this package."""

    FIRST: str  # the first release whose flags it spells

    def launch(self, s: Scenario) -> Launch:
        """The command that starts `s`."""


SPELLERS: Mapping[str, Speller] = {"openrlhf": openrlhf, "verl": verl, "trl": trl}


def launch(s: Scenario) -> Launch:
    """The command that starts `s`, the files that it reads, and notes on what it cannot say.

    Raises LaunchError, one line, if there is no command: for plain PyTorch, for releases whose flags differ, and for a
    job that the framework's flags cannot describe.
    """
    speller = SPELLERS.get(s.framework)
    if speller is None:
        raise LaunchError(f"framework: given {s.framework}, which has no command, allowed: {', '.join(SPELLERS)}")
    if not at_least(s.framework_version, speller.FIRST):
        given = f"{s.framework}=={s.framework_version}"
        raise LaunchError(f"framework: given {given}, whose flags differ, allowed: {s.framework}=={speller.FIRST}")
    return speller.launch(s)
