"""ms-swift's `megatron pt` and `megatron sft`: Megatron-core's layers and optimizer under its own loop and defaults.

Files are those of ms-swift 4.6.0 (`swift/megatron/`) unless a release is named; 3.12.0 has the arguments in
`argument/megatron_args.py`. See `calc.frameworks.torch.trainers.megatron` for what Megatron-core keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from calc.base.plan import Path
from calc.frameworks.releases import Default, Table, stated
from calc.frameworks.torch.releases import Pins
from calc.frameworks.torch.trainers import habits as shared
from calc.frameworks.torch.trainers import megatron
from calc.scenario.scenario import Scenario

TASKS = ("pretrain", "sft")
FIRST = "3.12.0"
# Libraries as those of `ms_swift.RELEASES`; it leaves Megatron-core's version open
RELEASES: Mapping[str, Pins] = {
    FIRST: Pins("0.17.6", "2.8.0", "4.57.1"),
    "4.6.0": Pins("0.19.8", "2.13.0", "5.19.0"),
}
STEP = 16  # sequences of a step over all GPUs (arguments/megatron_args.py:503)

DEFAULTS = Table(
    Default("micro_batch", FIRST, 1, "micro_batch_size (arguments/megatron_args.py:502)"),
    Default("loss", FIRST, "full", "cross_entropy_loss_fusion false (argument/megatron_args.py:420 of 3.12.0)"),
    Default("loss", "4.6.0", "fused", "cross_entropy_loss_fusion (arguments/megatron_args.py:516)"),
    Default("attention", FIRST, "flash", "attention_backend flash (arguments/megatron_args.py:519)"),
    Default("sequence_parallel", FIRST, False, "sequence_parallel (arguments/megatron_args.py:628)"),
    Default("expert_tensor_parallel", FIRST, 1, "expert_tensor_parallel_size (arguments/megatron_args.py:645)"),
    Default("packing", FIRST, False, "packing (swift/arguments/base_args/base_args.py:133)"),
)


def habits(task: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Its defaults for `task`, by dotted key: Megatron-core's, but for what its own arguments say."""
    version, libraries = shared.release("megatron-swift", RELEASES, given)
    values = stated(task, version, DEFAULTS)
    one = shared.batches(values, given, 1)["global_batch"]
    return {
        **megatron.habits(task, given),
        **libraries,
        **values,
        **shared.batches(values, given, max(1, -(-STEP // one))),
        "checkpointing": "none",
    }


def refuse(s: Scenario) -> str | None:
    """The reason why it cannot run `s`, or is not modelled for it, in one line, or None."""
    return megatron.refuse_with(s, TASKS, {"packing": (False, True)})


def keeps(s: Scenario) -> dict[str, Any]:
    """The fields that it sets in a trained `Role`: none beside the defaults."""
    return {}


def path(s: Scenario, usual: Path) -> Path:
    """The loss path, Megatron-core's."""
    return megatron.path(s, usual)


def notes(s: Scenario) -> Iterator[str]:
    """Notes on what no field of a scenario says."""
    yield from shared.told(s, RELEASES)
    if s.checkpointing == "none":
        yield "recompute_granularity selective, of core_attn: a fused kernel leaves nothing that would be run again"
    yield from megatron.notes(s)
