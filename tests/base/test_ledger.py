from __future__ import annotations

from calc.base.ledger import Line, Moment, Phase, Sums
from calc.estimate.result import Group

WEIGHTS = Line("weights", "actor", 1000, "b·P/N", {"b": 2, "P": 500, "N": 1}, "weights")
CONTEXT = Line("context", "process", 300, "C", {"C": 300}, "runtime#context", allocated=False)
FRAGMENTATION = Line("fragmentation", "process", 50, "f·B", {"f": 0.05, "B": 1000}, "runtime#fragmentation", False)


def phase(name: str, *lines: Line) -> Phase:
    return Phase(name, Moment(f"{name}: somewhere", lines))


def group(*phases: Phase) -> Group:
    return Group("actor", 1, phases, 10_000, (0, 10_000), 1.0, "fits", None)


def test_a_moment_takes_of_the_card_what_all_its_lines_add_up_to() -> None:
    """`device_bytes` is what nvidia-smi's process column shows: 1000 + 300 + 50."""
    assert Moment("step", (WEIGHTS, CONTEXT, FRAGMENTATION)).device_bytes == 1350


def test_what_pytorch_does_not_allocate_is_left_out_of_what_it_reports() -> None:
    """`allocated_bytes` is `torch.cuda.max_memory_allocated`: neither the CUDA context nor what is held back."""
    assert Moment("step", (WEIGHTS, CONTEXT, FRAGMENTATION)).allocated_bytes == 1000


def test_what_the_allocator_holds_back_is_its_own_sum() -> None:
    """`fragmentation` widens the range of an estimate: the fragmentation line alone, 50, not the context."""
    assert Moment("step", (WEIGHTS, CONTEXT, FRAGMENTATION)).fragmentation == 50
    assert Moment("step", (WEIGHTS, CONTEXT)).fragmentation == 0


def test_what_decides_is_counted_without_what_nobody_knows() -> None:
    """The median of what is held back is 50 of 1350, whose share of 1000 bytes is drawn; a replay knows what it is."""
    assert Moment("step", (WEIGHTS, CONTEXT, FRAGMENTATION)).sums == Sums(1300, 1000, 1000, 0)
    values = {"R": 1075, "A": 1000, "least": 1075}
    known = Line("fragmentation", "process", 75, "R - A", values, "runtime#replay", False)
    assert Moment("step", (WEIGHTS, CONTEXT, known)).sums == Sums(1375, 1000, 0, 1075)
    roomy = known._replace(values=values | {"least": 1040})  # it reserves 35 more than it must
    assert Moment("step", (WEIGHTS, CONTEXT, roomy)).sums == Sums(1340, 1000, 0, 1040)
    assert Sums(1375, 1000, 0).replayed == 0


def test_other_lines_do_not_say_what_is_held_back() -> None:
    """Values of the same letters stand in formulas of weights and of a KV cache, too."""
    before = Line("activations", "actor", 1, "B", {"B": 7, "R": 7}, "x")
    after = Line("weights", "actor", 1, "B", {"B": 7, "R": 7}, "x")
    assert Moment("step", (before, after, FRAGMENTATION)).sums == Sums(2, 2, 1000, 0)


def test_equal_lines_count_each() -> None:
    """Two layers of one kind may give equal lines: a moment is a sum, not a set."""
    assert Moment("step", (WEIGHTS, WEIGHTS)).device_bytes == 2000


def test_a_moment_without_lines_takes_nothing() -> None:
    """The host of a plain job."""
    empty = Moment("nothing", ())
    assert (empty.device_bytes, empty.allocated_bytes, empty.fragmentation) == (0, 0, 0)


def test_a_line_is_allocated_unless_it_says_otherwise() -> None:
    """Most are tensors."""
    assert WEIGHTS.allocated
    assert not CONTEXT.allocated


def test_the_peak_is_the_phase_that_takes_most_of_the_card() -> None:
    """Not the one with most allocated: 1000 + 0 in `step`, 900 + 300 in `backward`."""
    backward = phase("backward", WEIGHTS._replace(bytes=900), CONTEXT)
    assert group(phase("load", CONTEXT), backward, phase("step", WEIGHTS)).peak is backward


def test_of_equal_phases_the_first_is_the_peak() -> None:
    """A job that runs out does so where it first needs that much."""
    first, second = phase("forward", WEIGHTS), phase("backward", WEIGHTS)
    assert group(first, second).peak is first


def test_a_peak_is_no_sum_of_maxima() -> None:
    """Logits at the loss and gradients at the step are never alive together: 600 and 700 make 700, not 1300."""
    loss = phase("backward", WEIGHTS._replace(component="logits", bytes=600))
    step = phase("step", WEIGHTS._replace(component="gradients", bytes=700))
    assert group(loss, step).peak.moment.device_bytes == 700


def test_a_group_that_serves_nothing_has_no_cache_and_no_refusal() -> None:
    """What `as_dict` leaves out, and notes are made of."""
    alone = group(phase("step", WEIGHTS))
    assert (alone.cache_tokens, alone.cache_sequences, alone.refusal, alone.crowded) == (0, 0, None, False)
