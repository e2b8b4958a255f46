"""Launch commands: what starts the job of a scenario with the framework or trainer it names, one module for each.

Every flag and configuration key is looked up in the released packages by `tests/launch/test_released_flags.py`. Only
the newest releases are covered; each module names the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from calc.base.versions import at_least
from calc.frameworks.verl.releases import forked
from calc.launch import (
    axolotl,
    easyr1,
    llamafactory,
    megatron_swift,
    ms_swift,
    openrlhf,
    shell,
    slime,
    torchtitan,
    torchtune,
    trl,
    unsloth,
    verl,
)
from calc.launch.shell import Launch, LaunchError, runner
from calc.scenario.scenario import Scenario

__all__ = ["Launch", "LaunchError", "launch"]


class Speller(Protocol):
    """The interface of a framework's module in this package."""

    FIRST: str  # the first release whose flags it spells

    def launch(self, s: Scenario) -> Launch:
        """The command that starts `s`."""


SPELLERS: Mapping[str, Speller] = {"openrlhf": openrlhf, "verl": verl, "trl": trl, "slime": slime}
FORKS: Mapping[str, Speller] = {"easyr1": easyr1}  # of verl
# With plain PyTorch, by trainer.
TRAINERS: Mapping[str, Speller] = {
    "llamafactory": llamafactory, "axolotl": axolotl, "ms-swift": ms_swift, "torchtune": torchtune,
    "torchtitan": torchtitan, "unsloth": unsloth, "megatron-swift": megatron_swift,
}  # fmt: skip


def launch(s: Scenario, checkpoint: str = "") -> Launch:
    """The command that starts `s`, the files that it reads, and notes on what it cannot say.

    `checkpoint`: the Hub name of the weights, where it is another than that of the catalog's model. Raises LaunchError,
    one line, if there is no command: for plain PyTorch, for releases whose flags differ, and for a job that the
    framework's flags cannot describe.
    """
    speller = FORKS.get(forked(s.framework_version)) or SPELLERS.get(s.framework) or TRAINERS.get(s.trainer)
    if speller is None:
        allowed = f"{', '.join(SPELLERS)}, or a trainer: {', '.join(TRAINERS)}"
        raise LaunchError(f"framework: given {s.framework}, which has no command, allowed: {allowed}")
    name, version = runner(s)
    if not at_least(version, speller.FIRST):
        place = "framework" if s.framework in SPELLERS else f"versions.{name}"
        given, allowed = f"{name}=={version}", f"{name}=={speller.FIRST}"
        raise LaunchError(f"{place}: given {given}, whose flags differ, allowed: {allowed}")
    made = speller.launch(s)
    return shell.renamed(made, s.model, checkpoint) if checkpoint else made
