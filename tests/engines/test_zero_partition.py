"""DeepSpeed's cuts of parameters, on models small enough to cut by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from calc.catalog.catalog import load
from calc.engines.zero_partition import cut, in_order
from calc.models.architecture import Tensor, parameters, tensors

# An embedding of 40, two layers of 30 + 10, a head of 40: 40 | 30 10 30 10 | 40 = 160 elements.
TINY = (
    Tensor("embed", (10, 4), 1, "embedding", "embed"),
    Tensor("layer.*.up", (10, 3), 2, "linear", "mlp"),
    Tensor("layer.*.norm", (10,), 2, "norm", "norm"),
    Tensor("head", (10, 4), 1, "head", "head"),
)


def test_parameters_come_layer_by_layer_between_embedding_and_head() -> None:
    """The order of `module.parameters()`, which decides what lies in a rank's partition."""
    assert list(in_order(TINY)) == [40, 30, 10, 30, 10, 40]


def test_a_rank_keeps_parameters_at_its_borders_whole() -> None:
    """160 over 3 ranks is 54 each (rounded up): rank 0 has 40 + 14 of the first up, rank 1 16 + 10 + 28 of the second,
    rank 2 2 + 10 + 40. Whole: 70, 70, 80."""
    c = cut(TINY, 3, 10**9, 0)
    assert c.share == 54
    assert c.touched == (30, 10, 40)
    assert c.slice == 40
    assert c.largest == 40


def test_zero_3_pads_each_parameter_to_the_ranks_on_its_own() -> None:
    """Over 3 ranks: 14 + 10 + 4 + 10 + 4 + 14 = 56, two more than 160/3 rounded up."""
    assert cut(TINY, 3, 10**9, 0).rank_elements == 56


def test_a_sub_group_ends_with_the_parameter_that_reaches_its_size() -> None:
    """stage3.py `_create_fp16_sub_groups`, 20 elements: 14 + 10 = 24, 4 + 10 + 4 + 14 = 32 (18 is not enough)."""
    assert cut(TINY, 3, 20, 0).sub_groups == (24, 32)
    # reached exactly is reached
    assert cut(TINY, 3, 24, 0).sub_groups == (24, 32)


def test_small_parameters_stay_whole() -> None:
    """Threshold 10 takes the two norms; a parameter as large as the threshold is still small (`<=`)."""
    assert cut(TINY, 3, 10**9, 10).persistent == 20
    assert cut(TINY, 3, 10**9, 9).persistent == 0


def test_llama_2_70b_is_cut_over_eight_ranks_as_worked_from_deepspeed() -> None:
    """Nine sub-groups over 8 ranks: eight of about 1.0e9 elements and one of 0.52e9 (with the norms in one group; where
    decay splits them off, 519,307,264 and 164,864)."""
    c = cut(tensors(load().model("llama-2-70b").architecture), 8, 10**9, 100_000)
    assert c.rank_elements == 68_976_648_192 // 8
    assert len(c.sub_groups) == 9
    assert all(10**9 <= group < 1.07 * 10**9 for group in c.sub_groups[:-1])
    assert 0.5 * 10**9 < c.sub_groups[-1] < 0.54 * 10**9


@given(st.sampled_from(sorted(load().models)), st.integers(1, 64))
def test_all_partitions_together_hold_every_parameter(name: str, ranks: int) -> None:
    """Whatever the model and the number of ranks: shards add up to at least the whole, padding is below one element a
    parameter and rank, and sub-groups are the rank's elements cut up."""
    arch = load().model(name).architecture
    model, whole = tensors(arch), parameters(arch)
    c = cut(model, ranks, 10**9, 100_000)
    count = sum(t.count for t in model)
    assert whole <= ranks * c.share < whole + ranks
    assert whole <= ranks * c.rank_elements < whole + ranks * count
    assert sum(c.sub_groups) == c.rank_elements
    assert c.share <= sum(c.touched) + ranks
    assert sum(c.touched) < c.share + 2 * c.largest
    assert c.slice <= min(c.largest, c.share)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 200))
def test_ranks_inside_one_parameter_are_looked_at_once_and_change_nothing(sizes: list[int], ranks: int) -> None:
    """A million ranks are answered as quickly as eight: held against every rank by itself, element by element."""
    c = cut(tuple(Tensor(str(n), (size,), 1, "linear", "mlp") for n, size in enumerate(sizes)), ranks, 10**9, 0)
    owner = [n for n, size in enumerate(sizes) for _ in range(size)]
    parts = [owner[rank * c.share : (rank + 1) * c.share] for rank in range(ranks)]
    held = [sorted(set(part)) for part in parts]
    assert c.kept == max(sum(sizes[n] for n in each) for each in held)
    assert c.inside == max(sum(sizes[n] for n in each if n) for each in held)
    assert c.slice == max(part.count(n) for part in parts for n in part)
