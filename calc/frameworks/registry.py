"""The frameworks by name, and the plan of a job's memory by its framework."""

from __future__ import annotations

from collections.abc import Mapping

from calc.base.plan import Keeps
from calc.base.refusal import Refusal
from calc.frameworks.base import Framework
from calc.frameworks.constraints import engine_fault
from calc.frameworks.openrlhf import openrlhf
from calc.frameworks.slime import slime
from calc.frameworks.torch import torch
from calc.frameworks.trl import trl
from calc.frameworks.verl import verl
from calc.scenario.scenario import Scenario
from calc.scenario.words import Generates

FRAMEWORKS: Mapping[str, Framework] = {
    "torch": torch, "openrlhf": openrlhf, "verl": verl, "trl": trl, "slime": slime,
}  # fmt: skip


def framework(name: str) -> Framework:
    """The framework called `name`."""
    return FRAMEWORKS[name]


def refusal(s: Scenario) -> Refusal | None:
    """The reason why the framework of `s` cannot run it, in one line, or None."""
    own = framework(s.framework)
    started: tuple[Generates, ...] = ("vllm",) if s.trainer in own.CHOICES.serves else ()
    return engine_fault(s, (*own.CHOICES.engines, *started)) or own.refuse(s)


def plan(s: Scenario) -> Keeps:
    """The roles and stages that the framework runs for `s`, and what they keep in memory."""
    keeps = framework(s.framework).keeps(s)
    return keeps.without_rollout() if s.rollout and s.rollout.engine == "none" else keeps
