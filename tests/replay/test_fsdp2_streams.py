"""FSDP 2 around each layer, by hand: what comes and goes in which stream, in the order of its source.

Sizes are MiB: the lowest layer's part is 10 of fp32 on each of four ranks; gathered it is 20 of bf16, its gradients are
joined to 40 of fp32. The next layers' are 12 and 14, the root's is 20. Names of functions are those of torch 2.13
`distributed/fsdp/_fully_shard`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from test_replay import MODEL, outright
from written import Written

from calc.base.units import MiB
from calc.replay import replay
from calc.replay.allocator import Allocator, Block, length
from calc.replay.blocks import Blocks, Unit
from calc.replay.fsdp2_streams import EMBEDDING, Shards


def unit(part: int) -> Unit:
    """A unit of one tensor, `part` MiB on each of four ranks."""
    size = part * MiB
    return Unit((4 * size,), (size,), size // 2, 2 * size, (2 * size,), 4 * size, size)


LAYER, ROOT = unit(10), unit(20)
SHARDED = replace(MODEL, weights=(), units=(LAYER, unit(12), unit(14), ROOT))


class Watched(Written):
    """Shards whose allocators write down what they take, `+`, and give back, `-`, in MiB, by stream."""

    def __init__(self, model: Blocks = SHARDED) -> None:
        super().__init__()
        self.heap = self.watch(Allocator(), "")
        self.shards = Shards(model, self.heap)
        self.watch(self.shards.gathers, "gathers ")
        self.watch(self.shards.reduces, "reduces ")

    def watch(self, heap: Allocator, stream: str) -> Allocator:
        take, give = heap.take_all, heap.give_all

        def taken(sizes: Iterable[int]) -> list[Block]:
            self.log += [f"{stream}+{each // MiB}" for each in sizes]
            return take(sizes)

        def given(blocks: Iterable[Block]) -> None:
            self.log += [f"{stream}-{length(each) // MiB}" for each in blocks]
            give(blocks)

        heap.take_all, heap.give_all = taken, given  # type: ignore[method-assign]
        heap.take = lambda size: taken((size,))[0]  # type: ignore[method-assign]
        heap.give = lambda block: given((block,))  # type: ignore[method-assign]
        return heap


@pytest.fixture
def watched() -> Watched:
    found = Watched()
    # whole on the GPU, cut, and freed
    assert found.seen() == ["+40", "+10", "-40", "+48", "+12", "-48", "+56", "+14", "-56", "+80", "+20", "-80"]
    return found


def test_a_forward_frees_the_buffer_before_once_the_next_is_copied_out(watched: Watched) -> None:
    """`foreach_all_gather` casts the shard and fills the buffer, which `wait_for_unshard` keeps until the next copy."""
    shards = watched.shards
    shards.begin()
    assert watched.seen() == ["gathers +10", "gathers +40", "gathers -10", "+40"]
    shards.enter(0)
    assert watched.seen() == ["gathers +5", "gathers +20", "gathers -5", "+20", "gathers -40"]
    shards.leave(0)
    shards.enter(1)
    assert watched.seen() == ["-20", "gathers +6", "gathers +24", "gathers -6", "+24", "gathers -20"]
    shards.leave(1)
    shards.end()
    assert watched.seen() == ["-24", "gathers -24"]
    shards.begin()  # again: the root stayed
    assert watched.seen() == []


def test_an_embedding_and_a_head_that_are_units_come_and_go_with_their_module() -> None:
    """The embedding's is resharded after its forward, and gathered again for a backward that does not read it.

    The head's stays, or is freed and gathered again; its gradients are reduced before the layers'. The last unit's part
    is 20 of fp32, that of the embedding 16.
    """
    for ends in ("kept", "freed"):
        watched = Watched(replace(SHARDED, ends=ends, units=(LAYER, unit(16), ROOT)))
        watched.seen()
        shards, heap = watched.shards, watched.heap
        shards.begin()
        shards.embedded()
        assert watched.seen() == ["gathers +8", "gathers +32", "gathers -8", "+32", "-32"]
        shards.enter(0)
        shards.leave(0)
        assert watched.seen() == ["gathers +5", "gathers +20", "gathers -5", "+20", "gathers -32", "-20"]
        shards.enter_head()
        assert watched.seen() == ["gathers +10", "gathers +40", "gathers -10", "+40", "gathers -20"]
        shards.end()
        assert watched.seen() == ["gathers -40"] + ["-40"] * (ends == "freed")
        shards.turn()
        again = ["gathers +10", "gathers +40", "gathers -10", "+40", "gathers -40"] if ends == "freed" else []
        assert watched.seen() == [*again, "gathers +5", "gathers +20", "gathers -5"]
        shards.reduce(-1, [heap.take(40 * MiB)], adding=False)
        assert watched.seen() == ["+40", "-40", "+80", "reduces +20", "-40"]
        shards.reenter(0)
        assert watched.seen() == ["+20", "gathers -20", "gathers +8", "gathers +32", "gathers -8"]
        shards.reduce(0, [heap.take(20 * MiB)], adding=False)
        assert watched.seen() == ["+20", "-20", "-80", "+40", "-20", "reduces +10"]
        shards.reenter(EMBEDDING)
        assert watched.seen() == ["+32", "gathers -32"]
        shards.reduce(EMBEDDING, [heap.take(32 * MiB)], adding=False)
        assert watched.seen() == ["+32", "-32", "-40", "+64", "reduces +16", "-32"]


def test_what_stays_gathered_is_freed_by_its_own_backward_alone() -> None:
    """The embedding's unit with the last: reductions are as ever, and no gather runs again."""
    watched = Watched(replace(SHARDED, ends="kept", units=(LAYER, unit(16), ROOT), keeps_gathered=True))
    watched.seen()
    shards, heap = watched.shards, watched.heap
    shards.begin()
    shards.embedded()
    assert watched.seen() == ["gathers +8", "gathers +32", "gathers -8", "+32"]
    shards.enter(0)
    shards.leave(0)
    assert watched.seen() == ["gathers +5", "gathers +20", "gathers -5", "+20", "gathers -32"]
    shards.enter_head()
    shards.end()
    assert watched.seen() == ["gathers +10", "gathers +40", "gathers -10", "+40", "gathers -20", "gathers -40"]
    shards.turn()
    assert watched.seen() == []
    shards.reduce(-1, [heap.take(40 * MiB)], adding=False)
    assert watched.seen() == ["+40", "-40", "+80", "reduces +20", "-40"]
    shards.reenter(0)
    shards.reduce(0, [heap.take(20 * MiB)], adding=False)
    assert watched.seen() == ["+20", "-20", "-80", "+40", "-20", "reduces +10"]
    shards.reenter(EMBEDDING)
    shards.reduce(EMBEDDING, [heap.take(32 * MiB)], adding=False)
    assert watched.seen() == ["+32", "-32", "-40", "+64", "reduces +16", "-32"]


def test_the_last_layer_alone_may_stay_gathered_and_the_one_below_is_then_gathered_ahead() -> None:
    """Its `unshard` returns at once, as it is whole; that of the layer below starts before its backward."""
    watched = Watched(replace(SHARDED, keeps_last=True))
    watched.seen()
    shards, heap = watched.shards, watched.heap
    shards.begin()
    for layer in (0, 1):
        shards.enter(layer)
        shards.leave(layer)
    watched.seen()
    shards.enter(2)
    shards.leave(2)
    shards.end()
    assert watched.seen() == ["gathers +7", "gathers +28", "gathers -7", "+28", "gathers -24", "gathers -28"]
    shards.turn()
    assert watched.seen() == []
    shards.reenter(2)
    assert watched.seen() == ["gathers +6", "gathers +24", "gathers -6"]
    shards.reduce(2, [heap.take(28 * MiB)], adding=False)
    assert watched.seen() == ["+28", "-28", "+56", "-28", "reduces +14"]
    shards.reenter(1)
    assert watched.seen() == ["+24", "gathers -24", "gathers +5", "gathers +20", "gathers -5"]


def test_a_backward_gathers_ahead_and_keeps_a_reductions_input_until_the_next(watched: Watched) -> None:
    shards, heap = watched.shards, watched.heap
    shards.begin()
    for layer in (0, 1, 2):
        shards.enter(layer)
        shards.leave(layer)
    shards.end()
    watched.seen()
    shards.turn()
    assert watched.seen() == ["gathers +7", "gathers +28", "gathers -7"]
    shards.reenter(2)
    assert watched.seen() == ["+28", "gathers -28", "gathers +6", "gathers +24", "gathers -6"]
    shards.reduce(2, [heap.take(18 * MiB), heap.take(10 * MiB)], adding=False)
    assert watched.seen() == ["+18", "+10", "-28", "+56", "-18", "-10", "reduces +14"]
    shards.reenter(1)
    assert watched.seen() == ["+24", "gathers -24", "gathers +5", "gathers +20", "gathers -5"]
    shards.reduce(1, [heap.take(24 * MiB)], adding=False)
    assert watched.seen() == ["+24", "-24", "-56", "+48", "-24", "reduces +12"]
    shards.reenter(0)
    assert watched.seen() == ["+20", "gathers -20"]  # nothing lies below
    shards.reduce(0, [heap.take(20 * MiB)], adding=True)
    # what the micro-batches before left is there: this one's is added and goes
    assert watched.seen() == ["+20", "-20", "-48", "+40", "-20", "reduces +10", "reduces -10"]
    shards.reduce(-1, [heap.take(30 * MiB), heap.take(10 * MiB)], adding=False)
    # the loop in `foreach_reduce` still names the head's gradient while the output is there
    assert watched.seen() == ["+30", "+10", "-40", "-40", "+80", "-10", "reduces +20", "-30"]
    shards.wait()
    shards.zero()
    assert watched.seen() == ["-80", "reduces -14", "reduces -12", "reduces -20"]


def test_what_is_reduced_in_another_type_is_cast_to_that_of_gradients() -> None:
    """`foreach_reduce`: the reduction's output is there until its copy in the parameter's own type is."""
    watched = Watched(replace(SHARDED, units=(*[u._replace(kept=u.reduced // 2) for u in SHARDED.units[:3]], ROOT)))
    shards = watched.shards
    shards.copied[2] = []
    watched.seen()
    shards.reduce(2, [], adding=False)
    assert watched.seen() == ["+56", "reduces +14", "reduces +7", "reduces -14"]


def test_the_layer_right_below_is_gathered_next(watched: Watched) -> None:
    watched.shards.layers = tuple(unit(part) for part in (10, 12, 14, 16))
    watched.shards.turn()
    watched.seen()
    watched.shards.reenter(3)
    assert watched.seen() == ["+32", "gathers -32", "gathers +7", "gathers +28", "gathers -7"]


def test_nothing_is_cast_and_nothing_reduced_where_there_is_no_need() -> None:
    """Shards in the compute type go into the buffer as they are; a frozen unit waits for the reduction before alone."""
    watched = Watched()
    frozen = LAYER._replace(cast=0, reducing=0, reduced=0)
    watched.shards.layers = (frozen, frozen)
    watched.shards.begin()
    watched.seen()
    watched.shards.enter(0)
    assert watched.seen() == ["gathers +20", "+20", "gathers -40"]
    watched.shards.reduce(0, [], adding=False)
    assert watched.seen() == ["-20"]


def test_a_freed_block_serves_its_own_stream_alone() -> None:
    heap = Allocator(limit=100 * MiB)
    other = heap.beside()
    heap.give(heap.take(60 * MiB))
    other.take(30 * MiB)
    assert heap.process.reserved == 90 * MiB
    other.take(20 * MiB)  # more than is left: what is free in every stream goes back first
    assert heap.process.reserved == 50 * MiB


@pytest.mark.parametrize(("inside", "buffer"), [(True, 20), (False, 0)])
def test_the_last_gathers_buffer_goes_with_the_models_forward(inside: bool, buffer: int) -> None:
    """At the end of forward there are 40 of shards, the root's 40, two layers' 80, their output of 20 and logits of 80;
    where the loss runs inside the model's forward the last buffer is still there."""
    r = replay.Replay(Allocator(), workspace=0)
    model = replace(SHARDED, units=(LAYER, LAYER, ROOT), inside=inside)
    r.load(model)
    r.heap.process.most = 0
    r.forward(model)
    assert r.heap.process.most == (40 + 40 + 80 + 20 + 80 + buffer) * MiB


def test_a_step_in_shards_ends_as_it_began() -> None:
    """Beside shards, 40, there are states, 220, after a step; all else was given back."""
    r = outright(replay.Act(replace(SHARDED, units=(LAYER, LAYER, ROOT)), trained=True, micro_batches=2), None, 0)
    assert r.heap.process.allocated == (40 + 220) * MiB
