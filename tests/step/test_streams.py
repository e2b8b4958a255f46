"""Checkpoints that wait on the host: which of them are on the GPU at each instant, and the host memory of the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from jobs import job

from calc.base.plan import Streams
from calc.estimate.estimate import estimate
from calc.memory.host import pinned
from calc.scenario.scenario import ScenarioError
from calc.step.instants import Instant
from calc.step.roles import Roles

TENSOR = 4096 * 2048 * 2  # h·T in bf16 of Llama 3 8B, one sequence of 2,048


def counted(s: Any) -> dict[str, set[int]]:
    """The numbers of layers' inputs on the GPU while layers, head and norm, and layers again run."""
    roles = Roles(s)
    placed = roles.placed["actor"]
    own = roles.step(placed.engine.replica, s, roles.batch(s, placed.role.rows))

    def numbers(instants: Iterable[Instant]) -> set[int]:
        return {sum(p.times for p in i.parts if p.component == "checkpoints") for i in instants}

    ahead, back = [*own.plan.layout.forward()], [*own.plan.layout.backward()]
    loss = [i for i in (*ahead, *back) if i.where.segment in ("head", "loss", "outside", "norm")]
    return {
        "forward": numbers(i for i in ahead if i.where.segment == "layer"),
        "head": numbers(loss),
        "again": numbers(i for i in back if i.name.startswith("recompute")),
        "backward": numbers(i for i in back if i.name.startswith("layer:")),
    }


@pytest.mark.parametrize(
    ("streams", "fields", "forward", "head", "again", "backward"),
    [
        ("each", {}, 1, 0, 1, 1),
        # a stash of five: at the head it holds the final norm's five tensors and its weight, or Liger's two and it
        ("stash", {"trainer": "axolotl"}, 5, 0, 2, 1),
        ("stash", {"trainer": "axolotl", "kernels": "liger"}, 5, 2, 2, 1),
        ("stash", {"trainer": "torchtune", "optimizer": "adamw"}, 5, 0, 2, 1),
        ("stash", {"framework": "trl"}, 5, 0, 2, 1),
        ("each", {"trainer": "llamafactory"}, 1, 0, 1, 1),
        ("buffers", {"trainer": "unsloth", "method": "lora"}, 3, 3, 2, 2),
    ],
)
def test_the_inputs_of_layers_that_are_on_the_gpu(
    streams: Streams, fields: dict[str, Any], forward: int, head: int, again: int, backward: int
) -> None:
    """Counted in torchtune 0.6.1 `training/_activation_offloading.py`, trl 1.16 `models/activation_offloading.py`.

    A tensor enters the stash when it is saved, and one five places older leaves. In backward the input of a layer comes
    back within the node that asks for the layer again; the one before it is dropped when that node is over.
    """
    s = job(offload__activations=True, checkpointing="full", seq_len=2048, micro_batch=1, **fields)
    assert s.keeps.roles[0].streams == streams
    assert counted(s) == {"forward": {forward}, "head": {head}, "again": {again}, "backward": {backward}}
    there = counted(job(checkpointing="full", seq_len=2048, micro_batch=1, **fields | {"offload__activations": False}))
    assert there["head"] == {32} and there["forward"] == {32}


@pytest.mark.parametrize("trainer", ["own", "axolotl", "llamafactory"])
def test_checkpoints_wait_in_host_memory(trainer: str) -> None:
    """32 layers of 2,000 tokens: pinned in blocks for 2,048; LLaMA-Factory upcasts, and its copies are not pinned."""
    s = job(trainer=trainer, offload__activations=True, checkpointing="full", seq_len=2000, micro_batch=1)
    phases = estimate(s).host_phases
    host = {p.name: sum(x.bytes for x in p.moment.lines if x.component == "checkpoints") for p in phases}
    assert host["after the first step"] == 32 * (4 * 4096 * 2000 if trainer == "llamafactory" else pinned(TENSOR))
    assert host.get("loading", 0) == 0


def test_what_has_no_checkpoints_moves_none() -> None:
    for fields, line in (
        ({}, "offload.activations: given true with checkpointing none, allowed: with full, whose checkpoints move"),
        (
            {"trainer": "ms-swift", "checkpointing": "full"},
            "offload.activations: given true with trainer ms-swift, allowed: false; it has no switch for it",
        ),
        (
            {"framework": "openrlhf", "checkpointing": "full"},
            "offload.activations: given true with openrlhf, allowed: false; not modelled there",
        ),
    ):
        with pytest.raises(ScenarioError) as error:
            job(offload__activations=True, **fields)
        assert str(error.value) == f"scenario: {line}"


def test_unsloth_moves_them_unless_told_otherwise() -> None:
    assert job(trainer="unsloth", method="lora").offload.activations
    assert not job(trainer="unsloth", method="lora", checkpointing="none").offload.activations
