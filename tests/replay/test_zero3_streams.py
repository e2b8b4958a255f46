"""ZeRO-3 around each layer, by hand: what comes and goes in which stream, in the order of its source.

Sizes are MiB: on each of four ranks lies 2 of an embedding, 10 of a layer and 12 of the next one, in 16 bits. Names of
functions are those of DeepSpeed 0.19.8 `runtime/zero/stage3.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_replay import MODEL, outright
from written import Written

from calc.base.units import MiB
from calc.replay import replay
from calc.replay.allocator import Allocator, Process
from calc.replay.blocks import Blocks
from calc.replay.zero3_partitions import Partitioned
from calc.replay.zero3_streams import ROOT, Partitions

PARTS, WHOLE = (2 * MiB, 10 * MiB, 12 * MiB), (8 * MiB, 40 * MiB, 48 * MiB)


def come(slot: int) -> tuple[tuple[int, int], ...]:
    """A parameter comes, and stays."""
    return ((slot, WHOLE[slot]),)


def go(slot: int) -> tuple[tuple[int, int], ...]:
    """It goes."""
    return ((slot, 0),)


def both(slot: int) -> tuple[tuple[int, int], ...]:
    """It comes and goes."""
    return come(slot) + go(slot)


# before the layers, in each, after them; then back in the same order, and the embedding at the end
LEARNING = (both(0), both(1), both(2), (), (), both(2), both(1), come(0))
LEARNT = (come(0) + come(1), go(0) + come(2), (), (), (), go(2), go(1), come(0))
# two sub-groups of a MiB of elements each; a gradient of more than 30 MiB waits for the next one
CUT = Partitioned(
    whole=WHOLE,
    parts=PARTS,
    trained=(True, True, True),
    groups=(11 * MiB, MiB),
    weight_bytes=2,
    master_bytes=4,
    grad_bytes=2,
    first=LEARNING,
    later=LEARNT,
    bucket=30 * MiB,
    reductions=(((0, 48 * MiB), (0, 0)), (), ((0, 56 * MiB), (0, 0))),
    norms=(20 * MiB, 24 * MiB),
)
SHARDED = replace(MODEL, weights=(), states=((88 * MiB,), (8 * MiB,)), passing=(0, 0), partitioned=CUT)


class Watched(Written):
    """Partitions whose allocators write down what they take, `+`, and give back, `-`, in MiB, by stream."""

    def __init__(self, model: Blocks = SHARDED) -> None:
        super().__init__()
        self.partitions = Partitions(model, self.watched({0: "", 1: "gathers ", 2: "reduces "}))


@pytest.fixture
def watched() -> Watched:
    found = Watched()
    loaded = ["+8", "+2", "-8", "+40", "+10", "-40", "+48", "+12", "-48"]
    # the parts leave for the host, and come back as one buffer of two bytes an element
    defragmented = ["-2", "-10", "-12", "+24"]
    # each group is cast and cloned; then zeros as large as the largest
    masters = ["+44", "+44", "-44", "+4", "+4", "-4", "+44", "-44"]
    # the bucket, kept gradients, and each parameter gathered as its hook is made
    built = ["+30", "+24", "+8", "-8", "+40", "-40", "+48", "-48"]
    assert found.seen() == [*loaded, *defragmented, *masters, *built]
    return found


@pytest.fixture
def on_host() -> Watched:
    model = replace(SHARDED, states=(), passing=(), partitioned=CUT._replace(offload=True, built_whole=True))
    return Watched(model)


def test_a_model_built_outside_zero_init_is_whole_until_all_of_it_is_cut(on_host: Watched) -> None:
    """`self.module.to(self.device)` (`runtime/engine.py`), then `_convert_to_zero_parameters`, one after another."""
    assert on_host.seen()[:9] == ["+8", "+40", "+48", "+2", "-8", "+10", "-40", "+12", "-48"]


def test_an_optimizer_on_the_host_leaves_the_weights_and_the_bucket_alone(on_host: Watched) -> None:
    """Masters, states and kept gradients are made on `self.device`, the host, and the step stays there."""
    hooks = ["+8", "-8", "+40", "-40", "+48", "-48"]
    assert on_host.seen()[9:] == ["-2", "-10", "-12", "+24", "+30", *hooks]
    on_host.partitions.step((), (), first=True)
    assert on_host.seen() == []


def forward(partitions: Partitions) -> None:
    partitions.begin()
    for layer in (0, 1):
        partitions.enter(layer)
        partitions.leave(layer)
    partitions.end()


def backward(partitions: Partitions) -> None:
    partitions.turn()
    for layer in (1, 0):
        partitions.reenter(layer)
        partitions.reduce(layer, [], adding=False)
    partitions.reduce(ROOT, [], adding=False)
    partitions.wait()


def test_the_first_pass_gathers_each_module_and_the_next_ones_what_was_learnt(watched: Watched) -> None:
    partitions = watched.partitions
    forward(partitions)
    assert watched.seen() == [f"gathers {each}" for each in ("+8", "-8", "+40", "-40", "+48", "-48")]
    backward(partitions)
    assert watched.seen() == [
        *("gathers +48", "gathers -48", "reduces +48", "reduces -48", "gathers +40", "gathers -40"),
        *("gathers +8", "reduces +56", "reduces -56", "gathers -8"),
    ]
    forward(partitions)
    assert watched.seen() == [f"gathers {each}" for each in ("+8", "+40", "-8", "+48")]
    backward(partitions)
    assert watched.seen()[:3] == ["gathers -48", "reduces +48", "reduces -48"]


def test_the_step_flattens_one_sub_group_after_another(watched: Watched) -> None:
    """`_prepare_fp32_grad_for_sub_group`: two bytes an element, then four; the first step makes states beside them."""
    step = watched.partitions.step
    norms = ["+20", "-20", "+24", "-24"]
    step(SHARDED.states, (4 * MiB, 0), first=True)
    first = ["+22", "+44", "-22", "+88", "+4", "-4", "-44"]
    assert watched.seen() == [*norms, *first, "+2", "+4", "-2", "+8", "-4"]
    step(SHARDED.states, (0, 0), first=False)
    assert watched.seen() == [*norms, "+22", "+44", "-22", "-44", "+2", "+4", "-2", "-4"]


def test_a_model_that_is_not_trained_learns_its_order_in_its_first_forward() -> None:
    still = replace(SHARDED, partitioned=CUT._replace(groups=(), trained=(False,) * 3, first=LEARNING, later=LEARNT))
    watched = Watched(still)
    assert watched.seen()[-3:] == ["+48", "+12", "-48"]
    forward(watched.partitions)
    assert watched.seen()[0:2] == ["gathers +8", "gathers -8"]
    forward(watched.partitions)
    assert watched.seen()[0:2] == ["gathers +8", "gathers +40"]
    assert watched.partitions.gathered
    watched.partitions.begin()  # what the forward before has left is released
    assert watched.seen()[0] == "gathers -40"


@pytest.mark.parametrize(
    ("bucket", "freed"), [(30, ["+50", "+20", "-80", "-20", "+30", "-50", "-30"]), (50, ["+50", "-50"])]
)
def test_a_gradient_that_fits_the_bucket_is_freed_at_once_and_a_larger_one_with_the_next(
    bucket: int, freed: list[str]
) -> None:
    """The head's, 50, waits until a layer's is there, 30, which fits (`__add_grad_to_ipg_bucket`)."""
    model = replace(SHARDED, partitioned=CUT._replace(bucket=bucket * MiB))
    watched = Watched(model)
    r = replay.Replay(watched.partitions.heap, workspace=0)
    r.shards[id(model)] = watched.partitions
    kept = r.forward(model)
    watched.seen()
    r.backward(model, kept)
    own = [line for line in watched.seen() if " " not in line]
    start = own.index("+50")
    assert own[start : start + len(freed)] == freed
    assert sorted(own.count(line) for line in ("+50", "-50")) == [1, 1]


def test_steps_repeat_themselves_once_the_order_is_known() -> None:
    a = replay.Act(SHARDED, trained=True, micro_batches=2)
    done = outright(a, None)
    again = replay.Replay(Allocator(), 32 * MiB)
    again.all(a)
    assert again.heap.process.most_reserved == done.heap.process.most_reserved
    assert again.heap.process.most == done.heap.process.most


def test_a_copy_goes_its_own_way_in_the_same_state(watched: Watched) -> None:
    partitions = watched.partitions
    partitions.begin()
    process = partitions.heap.process.copy(None)
    other = partitions.copy(process)
    assert other.state == partitions.state and isinstance(other.heap.process, Process)
    partitions.enter(0)
    assert other.heap.process is process and process.streams.index(other.gathers) == 1
