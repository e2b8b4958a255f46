"""ZeRO-1 and 2 by hand: what gradients, the bucket and the step allocate and free, in the order of the source.

Sizes are MiB: parameters of 8, 40 and 48 in 16 bits, 96 in all, on two ranks, so that the second rank has the third
parameter alone. Names of functions are those of DeepSpeed 0.19.8 `runtime/zero/stage_1_and_2.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_replay import BASE, MODEL
from written import Written

from calc.base.units import MiB
from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.replay import replay
from calc.replay.allocator import Allocator
from calc.replay.blocks import Flattened
from calc.replay.zero2_buckets import Partition
from calc.resolve.parse import parse
from calc.step.roles import Roles

HALF = MiB // 2  # elements of a MiB in 16 bits
WHOLE = (8 * MiB, 40 * MiB, 48 * MiB)
JOINED = Flattened(
    stage=2,
    whole=WHOLE,
    elements=96 * HALF,
    share=48 * HALF,
    touched=48 * HALF,
    bucket=44 * HALF,
    norm=80 * MiB,
    on_gpu=True,
    lazy=True,
    overlaps=False,
)
# a copy of this rank's part, then the same in fp32; last the zeros that stand for gradients (`__init__`)
MASTERS = ["+48", "+96", "-48", "+96", "-96"]


class Watched(Written):
    """A partition whose allocator writes down what it takes and gives back."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.heap = self.watched({0: "", 1: "reduces "})
        self.partition = Partition(replace(MODEL, weights=(), partitioned=JOINED._replace(**changes)), self.heap)

    def backward(self) -> list[str]:
        """What a backward allocates and frees, in which gradients come in the order of the parameters from the last."""
        self.partition.turn()
        for size in reversed(WHOLE):
            self.partition.arrive(self.heap.take(size), size)
        self.partition.wait()
        return self.seen()


def test_weights_are_joined_beside_those_that_were_loaded_or_on_the_host() -> None:
    """On the GPU from 0.19 on, if a second copy has room there; what was loaded stays in the cache."""
    assert Watched().seen() == ["+8", "+40", "+48", "+96", "-8", "-40", "-48", *MASTERS]
    assert Watched(on_gpu=False).seen() == ["+8", "+40", "+48", "-8", "-40", "-48", "+96", *MASTERS]
    narrow = Allocator(300 * MiB)
    narrow.take(110 * MiB)
    Partition(replace(MODEL, weights=(), partitioned=JOINED._replace(share=HALF)), narrow)
    assert (
        narrow.process.released == 2
    )  # 206 are taken and 96 do not fit beside them, so that the cache is emptied again


def test_gradients_leave_for_the_bucket_which_is_reduced_when_it_is_full() -> None:
    """The largest does not fit the bucket, which is made first, and waits until the next gradient is there.

    Then it moves to a buffer for this rank's gradients, and the second one to the bucket, which the third one fills.
    """
    watched = Watched()
    watched.seen()
    passed = ["+48", "+44", "+40", "+48", "-48", "-40", "+8", "-8", "-44"]
    assert watched.backward() == passed
    # a second micro batch is added to the first, and has a buffer of its own until then
    assert watched.backward() == [*passed, "-48"]
    # from the norm of the largest gradient to the gradients that the optimizer sees, beside its first states
    step = ["+80", "-80", "+48", "+96", "-48", "-48", "+88", "+4", "-4", "-96"]
    watched.partition.step(((88 * MiB,),), (4 * MiB,), first=True)
    assert watched.seen() == step
    assert watched.backward() == passed


def test_what_several_ranks_have_parts_of_is_reduced_in_a_copy() -> None:
    """Of three ranks, each with 32, all have parts of the first two gradients, and the first one all of the last."""
    watched = Watched(share=32 * HALF)
    watched.seen()
    copied = ["+48", "+44", "+40", "+48", "-48", "+48", "-48", "-40", "+8", "+40", "-40", "-8", "-44"]
    assert watched.backward() == copied


def test_beside_backward_there_are_two_buckets_and_what_is_reduced_has_a_stream_of_its_own() -> None:
    """Of three ranks, as above: with `overlap_comm` the copy and this rank's gradients are made in its stream."""
    watched = Watched(share=32 * HALF, overlaps=True)
    watched.seen()
    first, last = ["reduces +48", "reduces -48"], ["reduces +40", "reduces -40"]
    passed = ["+48", "+44", "+44", "+40", *first, "reduces +48", "-48", "-40", "+8", *last, "-8"]
    assert watched.backward() == [*passed, "-44", "-44"]
    assert watched.backward() == [*passed, "-44", "-44", "reduces -48"]
    watched.partition.step(((88 * MiB,),), (0,), first=False)
    assert watched.seen() == ["+80", "-80", "+32", "+64", "-32", "reduces -48", "-64"]


def test_stage_1_keeps_its_gradients_until_the_step() -> None:
    """It reduces them in the order of the parameters (`reduce_gradients`)."""
    watched = Watched(stage=1)
    watched.seen()
    assert watched.backward() == ["+48", "+44", "+40", "+8"]
    assert watched.backward() == ["+48", "-48", "+40", "-40", "+8", "-8"]  # added to those that are there
    watched.partition.step(((88 * MiB,),), (0,), first=False)
    reduced = ["-8", "+48", "-40", "-48", "-44"]
    assert watched.seen() == [*reduced, "+80", "-80", "+48", "+96", "-48", "-48", "-96"]


def test_before_0_18_3_backward_begins_with_the_bucket() -> None:
    watched = Watched(lazy=False)
    watched.seen()
    assert watched.backward()[:2] == ["+44", "+48"]


@pytest.mark.parametrize("model", ["qwen2.5-1.5b", "llama-3.2-3b"])
@pytest.mark.parametrize("sharding", ["zero1", "zero2"])
@pytest.mark.parametrize("fields", [{}, {"method": "lora", "lora": {"dtype": "bf16"}}, {"global_batch": 32}], ids=str)
def test_a_replay_allocates_what_the_engine_counts(model: str, sharding: str, fields: dict[str, Any]) -> None:
    """Two accounts of the same code: one by instants, one by blocks, which PyTorch rounds."""
    job = {**BASE, "model": model, "sharding": sharding, "precision": "mixed", "checkpointing": "full", **fields}
    s = parse({**job, "gpus": 8, "optimizer_impl": "fused"}, catalog=load())
    a = replay.act(Roles(s))
    assert a
    counted = max([phase.moment.sums.allocated for phase in estimate(s, load(), replays=False).groups[0].phases])
    assert replay.Reserve(a, 32 * MiB)._low == pytest.approx(counted, rel=0.02)
