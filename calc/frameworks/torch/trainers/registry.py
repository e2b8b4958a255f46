"""The trainers by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from calc.base.plan import DeepSpeed, Keeps, Path
from calc.base.refusal import Refusal
from calc.frameworks import trainer
from calc.frameworks.torch.releases import Pins
from calc.frameworks.torch.trainers import (
    axolotl,
    colossalai,
    litgpt,
    llamafactory,
    megatron,
    megatron_swift,
    ms_swift,
    ms_swift_grpo,
    torchtitan,
    torchtune,
    unsloth,
)
from calc.scenario.scenario import Scenario


class Trainer(Protocol):
    """The interface of a module whose training loop takes the place of the scenario's own."""

    def habits(self, task: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Its defaults for `task` where they are not those of a loop of one's own, by dotted key; as `defaults`."""

    def refuse(self, s: Scenario) -> Refusal | None:
        """The reason why it cannot run `s`, in one line, or None."""

    def keeps(self, s: Scenario) -> dict[str, Any]:
        """The fields that it sets in a `calc.base.plan.Role`."""

    def path(self, s: Scenario, usual: Path) -> Path:
        """The loss path, where `usual` is that of Transformers' models."""

    def notes(self, s: Scenario) -> Iterable[str]:
        """Notes on what it does and no field of a scenario says."""


class Reinforces(Protocol):
    """The interface of a module that has a trainer's loop of RL."""

    def plan(self, s: Scenario, way: Path, deepspeed: DeepSpeed | None) -> Keeps:
        """The plan of a step whose log-probabilities are taken in the `way` given."""


class Released(Trainer, Protocol):
    """The interface of a trainer whose releases are told apart."""

    RELEASES: Mapping[str, Pins]


RELEASED: Mapping[str, Released] = {
    "llamafactory": llamafactory,
    "axolotl": axolotl,
    "ms-swift": ms_swift,
    "torchtune": torchtune,
    "torchtitan": torchtitan,
    "unsloth": unsloth,
    "megatron-swift": megatron_swift,
}
TRAINERS: Mapping[str, Trainer] = {
    "transformers": trainer, "litgpt": litgpt, "colossalai": colossalai, "megatron": megatron, **RELEASED,
}  # fmt: skip
# Those that run RL themselves, and start vLLM for it.
REINFORCES: Mapping[str, Reinforces] = {"ms-swift": ms_swift_grpo}
# Those that ship a configuration file for each stage of DeepSpeed's, with that file.
SHIPPED: Mapping[str, Callable[[Scenario], DeepSpeed]] = {
    "axolotl": axolotl.deepspeed,
    "llamafactory": llamafactory.deepspeed,
    "ms-swift": ms_swift.deepspeed,
}
# Those whose ZeRO is ColossalAI's LowLevelZeroOptimizer, with the elements of a bucket.
LOW_LEVEL: Mapping[str, int] = {"colossalai": colossalai.BUCKET}
# Those whose loop is Transformers' Trainer on Accelerate.
ON_TRANSFORMERS = ("transformers", "llamafactory", "axolotl", "ms-swift", "unsloth")
