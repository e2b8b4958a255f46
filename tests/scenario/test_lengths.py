"""Real lengths in place of the cap: what the fullest batch of an epoch holds, and what an average one computes."""

from __future__ import annotations

import random
from itertools import product
from math import sqrt
from statistics import mean
from typing import Any

import pytest

from calc.base.schema import InputError
from calc.estimate.estimate import estimate, speed
from calc.resolve.parse import parse
from calc.scenario import lengths
from calc.scenario.data_sets import ALIASES, DATA_SETS
from calc.scenario.lengths import BATCHES, Lengths, _weights, fullest, in_turn, known, middles
from calc.scenario.scenario import ScenarioError

CAP = 1 << 20
SFT = {
    "model": "llama-3.2-1b", "task": "sft", "framework": "openrlhf", "gpu": "a100-80-sxm", "gpus": 2,
    "sharding": "zero3", "checkpointing": "full", "attention": "flash", "micro_batch": 4, "global_batch": 16,
    "seq_len": 4096,
}  # fmt: skip


def job(**changes: Any) -> Any:
    return parse({**SFT, **changes})


def peak(**changes: Any) -> int:
    return max(group.peak.moment.device_bytes for group in estimate(job(**changes)).groups)


def test_the_mean_of_the_longest_of_a_batch_is_that_of_all_draws() -> None:
    """Three lengths, two draws, all nine outcomes by hand."""
    lengths = known({"counts": [[10, 1], [20, 1], [40, 1]]})
    assert lengths.padded(CAP, 2) == pytest.approx(mean(map(max, product((10, 20, 40), repeat=2))))
    assert lengths.padded(CAP, 1) == pytest.approx(mean((10, 20, 40))) == pytest.approx(lengths.mean)


def test_the_fullest_batch_by_hand() -> None:
    """Of 100 batches of two, one in four of which is 2 + 2: the chance that none is, 0.75^100, is far below 5 %."""
    lengths = known({"counts": [[1, 100], [2, 100]]})
    assert fullest(lengths, CAP, 2) == 4
    # of one batch of two, 4 comes with 1/4: more than 5 %; of ten sequences all long, 1/1024: less
    assert fullest(known({"counts": [[1, 5], [2, 5]]}), CAP, 10) < 20
    assert fullest(lengths, CAP, 1) == 2


def test_the_middle_batch_of_each_part_by_hand() -> None:
    """Two lengths of 10 or 20, equally likely, sum up to 20, 30 and 40 with 1/4, 1/2 and 1/4; parts are thirds."""
    own = Lengths(15, 20, 2, ((10, 1), (20, 1)))
    assert middles(own, CAP, 1, 2) == (10, 20)
    assert middles(own, CAP, 2, 3) == (20, 30, 40)
    assert middles(own, CAP, 2, 1) == (30,)


def test_middle_batches_rise_about_the_mean() -> None:
    """Of answers known by their mean, in batches of 32: as many below as above, and none twice."""
    found = middles(Lengths(200, 1024, 10_000), 1024, 32, 5)
    assert found[2] == pytest.approx(32 * 200, rel=0.02)
    assert list(found) == sorted({*found})


def test_the_fullest_batch_is_what_shuffled_epochs_meet() -> None:
    """The statement itself, on seeded epochs: with the stated probability no batch is fuller, and hardly any room lies
    between."""
    draw = random.Random(7)
    data = [min(4096, 1 + int(draw.lognormvariate(5.5, 0.9))) for _ in range(4000)]
    lengths = known({"counts": [[length, 1] for length in data]})
    for rows in (4, 16):
        most = []
        for _ in range(40):
            draw.shuffle(data)
            most.append(max(sum(data[at : at + rows]) for at in range(0, len(data), rows)))
        said = fullest(lengths, CAP, rows)
        assert sum(full <= said for full in most) >= (0.95 - 0.12) * len(most)
        assert said <= 1.1 * max(most)


def test_a_mean_and_a_longest_give_the_distribution_of_greatest_entropy() -> None:
    """It has that mean and that longest; in the middle it is the uniform one."""
    lengths = known({"mean": 700, "longest": 4096})
    assert lengths.mean_below(CAP) == pytest.approx(700, rel=1e-6)
    assert fullest(lengths, CAP, 1) == 4096
    even = known({"mean": 500.5, "longest": 1000})
    assert even.padded(CAP, 2) == pytest.approx(1000 * 2 / 3, rel=0.01)
    assert fullest(known({"mean": 64, "longest": 64}), CAP, 3) == 3 * 64


@pytest.mark.parametrize("lengths", [known({"mean": 300, "longest": 4000}), known({"counts": [[9, 70], [4000, 2]]})])
def test_more_sequences_are_never_less(lengths: Lengths) -> None:
    most = [fullest(lengths, CAP, rows) for rows in (1, 2, 3, 4, 6, 8, 16, 64)]
    assert most == sorted(most)
    assert all(full <= rows * lengths.longest for full, rows in zip(most, (1, 2, 3, 4, 6, 8, 16, 64), strict=True))
    capped = [fullest(lengths, cap, 8) for cap in (10, 100, 1000, 4000, CAP)]
    assert capped == sorted(capped)


def test_a_padded_batch_is_as_long_as_the_longest_sequence_and_no_longer() -> None:
    """Data of at most 1,024 tokens take what a cap of 1,024 does, whatever the cap."""
    assert peak(lengths={"mean": 300, "longest": 1024}) == peak(seq_len=1024)
    assert peak(lengths={"mean": 300, "longest": 9999}) == peak()  # cut off at the cap


def test_a_packed_batch_is_between_its_mean_and_its_longest() -> None:
    short, long = peak(packing=True, expected_len=300), peak(packing=True, expected_len=3000)
    assert short < peak(packing=True, lengths={"mean": 300, "longest": 3000}) < long
    assert peak(packing=True, lengths={"mean": 300, "longest": 300}) == short


def by_length(data: list[int], rows: int, steps: int) -> list[int]:
    """The longest of each batch, in the order of Transformers' `get_length_grouped_indices`."""
    times = min(len(data) // (rows * steps * 4), 50)
    whole = rows * steps * times
    parts = [sorted(data[at : at + whole], reverse=True) for at in range(0, len(data), whole)]
    order = [length for part in parts for length in part]
    return [max(order[at : at + rows]) for at in range(0, len(order), rows)]


@pytest.mark.parametrize(("rows", "steps"), [(1, 1), (4, 1), (4, 8), (16, 2)])
def test_batches_grouped_by_length_are_padded_as_the_sampler_pads_them(rows: int, steps: int) -> None:
    """The mean of the batches' longest, on seeded epochs of the sampler itself, and far less than at random."""
    draw = random.Random(5)
    data = [min(4096, 1 + int(draw.lognormvariate(5.5, 0.9))) for _ in range(4000)]
    lengths, seen = known({"counts": [[length, 1] for length in data]}), []
    for _ in range(10):
        draw.shuffle(data)
        seen.append(mean(by_length(data, rows, steps)))
    together = lengths.sorted_together(rows, steps)
    assert together == steps * min(4000 // (4 * rows * steps), 50)
    assert lengths.padded(CAP, rows, together) == pytest.approx(mean(seen), rel=0.03)
    # but for rounding
    assert 0.999 * lengths.mean_below(CAP) <= lengths.padded(CAP, rows, together) <= lengths.padded(CAP, rows)


def test_grouped_batches_come_from_long_to_short_the_longest_of_all_first() -> None:
    """24 of the 50 that are sorted together; of eight that are, three times as many."""
    lengths = Lengths(600, 3000, 10_000)
    batches = in_turn(lengths, 2048, 4, 50)
    assert len(batches) == BATCHES and batches[0] == 2048 and list(batches) == sorted(batches, reverse=True)
    assert mean(batches) == pytest.approx(lengths.padded(2048, 4, 50), rel=0.05)
    few = in_turn(lengths, 2048, 4, 8)
    assert len(few) == BATCHES and few[8:16] == few[16:24] == tuple(sorted(few[8:16], reverse=True))


def test_grouping_leaves_the_peak_and_saves_padding() -> None:
    """TRL's job, without a replay of its own rows: the fullest batch is the same, an average one has less padding."""
    real = {"model": "llama-3.2-1b", "task": "sft", "framework": "trl", "gpu": "a100-80-sxm", "micro_batch": 8,
            "lengths": {"mean": 300, "longest": 3000}, "checkpointing": "full", "seq_len": 4096}  # fmt: skip
    random_, grouped = (parse({**real, "group_by_length": on}) for on in (False, True))
    one, other = (estimate(s).groups[0] for s in (random_, grouped))
    assert one.peak.moment.allocated_bytes == other.peak.moment.allocated_bytes
    assert other.peak.moment.device_bytes < one.peak.moment.device_bytes
    assert grouped.computed_len(8) < 0.6 * random_.computed_len(8)
    assert grouped.held_len(8) == random_.held_len(8) == 3000


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"task": "dpo"}, "group_by_length: given true for dpo, allowed: false, or for pretrain, sft"),
        ({"framework": "openrlhf"}, "group_by_length: given true with openrlhf, allowed: false; with torch, trl and"),
        ({"framework": "torch", "trainer": "torchtune"}, "group_by_length: given true with trainer torchtune, allowed"),
        ({"packing": True}, "group_by_length: given true with packing, allowed: false, or with batches that are padd"),
        ({"padding_free": True, "attention": "flash"}, "group_by_length: given true with padding_free, allowed: fals"),
    ],
)
def test_grouping_needs_single_sequences_that_are_padded(fields: dict[str, Any], line: str) -> None:
    job = {"model": "llama-3.2-1b", "task": "sft", "framework": "trl", "gpu": "a100-80-sxm", "group_by_length": True}
    with pytest.raises(ScenarioError, match=line):
        parse(job | fields)


@pytest.mark.parametrize("rows", [1, 4])
def test_batches_in_turn_are_those_of_the_distribution(rows: int) -> None:
    """Half of the batches are no longer than the median of their longest sequence, and their mean is its mean."""
    lengths = Lengths(600, 3000, 10_000)
    batches = in_turn(lengths, 2048, rows)
    assert len(batches) == BATCHES and max(batches) <= 2048
    assert mean(batches) == pytest.approx(lengths.padded(2048, rows), rel=0.05)
    assert mean(batches[:12]) == pytest.approx(mean(batches[12:]), rel=0.25)  # in no order
    short = in_turn(known({"counts": [[100, 300], [200, 100]]}), 2048, 1).count(100)
    assert short == pytest.approx(BATCHES * 3 / 4, abs=1)


@pytest.mark.parametrize(("samples", "rows", "batches"), [(20, 1, 20), (20, 4, 5), (3, 4, 1), (10_000, 4, BATCHES)])
def test_an_epoch_of_few_samples_has_few_batches(samples: int, rows: int, batches: int) -> None:
    assert len(in_turn(Lengths(600, 3000, samples), 2048, rows)) == batches


def test_padding_takes_time_and_is_no_token() -> None:
    """Padded to the longest of four, the same tokens take longer; sequences of one length have no padding."""
    said = {"mean": 1500, "longest": 4096}
    uneven, even, packed = (
        speed(estimate(job(**changes)))
        for changes in ({"lengths": said}, {"lengths": {"counts": [[1500, 9]]}}, {"lengths": said, "packing": True})
    )
    assert uneven.step_seconds > 1.2 * even.step_seconds
    assert packed.step_seconds == pytest.approx(even.step_seconds, rel=0.02)
    assert uneven.tokens_per_second * uneven.step_seconds == pytest.approx(16 * 1500)


def test_a_dynamic_batch_holds_its_bound_or_one_longer_sequence() -> None:
    verl = {
        "model": "qwen2.5-0.5b", "task": "sft", "framework": "verl", "gpu": "a100-80-sxm", "max_tokens_per_gpu": 4096,
        "seq_len": 4096,
    }  # fmt: skip
    s = parse({**verl, "lengths": {"mean": 512, "longest": 3000}})
    assert s.held_len(s.rows) * s.rows == 4096
    s = parse({**verl, "max_tokens_per_gpu": 4096, "lengths": {"counts": [[4000, 1], [3000, 1]]}})
    assert s.rows == 1
    assert s.held_len(1) == 4000


def test_a_micro_batch_of_rl_is_as_full_as_the_fullest_that_is_known() -> None:
    """The mean of all counts for time alone."""
    job = {"model": "llama-3.2-1b", "task": "grpo", "framework": "verl", "gpu": "h100-sxm", "gpus": 2, "packing": True}
    job |= {"prompt_len": 1024, "response_len": 512, "expected_len": 549}
    mean, known = parse(job), parse({**job, "rollout.fullest_len": 709})
    assert (mean.held_len(32), known.held_len(32)) == (549, 709)
    assert mean.computed_len(32) == known.computed_len(32) == 549
    assert parse(known.as_dict()) == known


def test_a_scenario_says_its_lengths_again(tmp_path: Any) -> None:
    """As given, from a file, and read back from the estimate's own scenario."""
    file = tmp_path / "lengths.yaml"
    file.write_text("counts:\n- [100, 7]\n- [900, 1]\n")
    for said in ({"mean": 70.5, "longest": 900}, {"counts": [[100, 7], [900, 1]]}, str(file)):
        s = job(lengths=said)
        assert parse(s.as_dict()) == s
        assert s.expected_len in (71, 200)


def test_data_sets_are_known_by_name_whole_or_in_part() -> None:
    """Of 500 sequences each, with means of 157.2, 167.6 and 58.9 tokens, the mean is 127.9; the longest has 607."""
    names = ["AI-ModelScope/alpaca-gpt4-data-zh#500", "alpaca_gpt4_en#500", "swift/self-cognition#500"]
    lengths = known({"data": names})
    assert (lengths.mean, lengths.longest, lengths.samples) == (pytest.approx(127.9), 607, 1500)
    whole = known({"data": ["self-cognition"]})
    assert (whole.mean, whole.longest, whole.samples) == (58.9, 131, 108)
    assert job(lengths={"data": names}) == job(lengths=lengths.as_dict())


def test_a_known_deviation_and_the_shortest_bound_the_spread() -> None:
    """Of one data set its own; of three together the squares of 93.2, 123.9 and 20.3 add up about the common mean.

    A deviation beyond that of the exponential distribution changes nothing.
    """
    own = known({"data": ["self-cognition"]})
    spread = _weights(own, 10_000)
    mean = sum(length * weight for length, weight in spread)
    squares = sum(weight * (length - mean) ** 2 for length, weight in spread)
    assert (mean, sqrt(squares), spread[0][0], spread[-1][0]) == (pytest.approx(58.9), pytest.approx(20.3), 32, 131)
    three = known({"data": ["alpaca-gpt4-data-zh#500", "alpaca-gpt4-data-en#500", "self-cognition#500"]})
    about = sum(d**2 + (m - 127.9) ** 2 for m, d in ((157.2, 93.2), (167.6, 123.9), (58.9, 20.3))) / 3
    assert (three.deviation, three.shortest) == (pytest.approx(sqrt(about)), 27)
    wide = {"mean": 600, "longest": 3000}
    assert _weights(known({**wide, "deviation": 900}), 4096) == _weights(known(wide), 4096)


def test_every_known_data_set_has_no_sequence_below_its_mean_alone() -> None:
    for name, each in DATA_SETS.items():
        assert 1 <= each.mean <= each.longest and each.samples > 0, name
    assert set(ALIASES.values()) <= set(DATA_SETS) and not set(ALIASES) & set(DATA_SETS)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"lengths": {"mean": 5}}, "lengths.longest: given nothing, allowed: mean and longest, data, or counts"),
        ({"lengths": {"mean": 9, "longest": 5}}, "lengths.mean: given 9, allowed: at most lengths.longest = 5"),
        (
            {"lengths": {"mean": 9, "longest": 20, "shortest": 10}},
            "lengths.shortest: given 10, allowed: at most lengths.mean = 9",
        ),
        ({"lengths": {"counts": [[5, 1]], "mean": 5}}, "lengths: given counts and more, allowed: counts alone"),
        ({"lengths": {"data": ["self-cognition"], "mean": 5}}, "lengths: given data and more, allowed: counts alone"),
        ({"lengths": {"data": ["alpaca-gpt5"]}}, "given 'alpaca-gpt5', allowed: one of "),
        ({"lengths": {"data": ["alpaca-gpt5"]}}, "did you mean 'alpaca-gpt4'?"),
        ({"lengths": {"data": ["self-cognition#all"]}}, "given 'self-cognition#all', allowed: a positive number"),
        ({"lengths": {"mena": 5}}, "unknown field 'lengths.mena'; did you mean 'lengths.mean'?"),
        ({"lengths": "no/such.yaml"}, "lengths: no/such.yaml: no such file"),
        ({"lengths": "-"}, "lengths: -: no such file"),
        ({"lengths": {"mean": 5, "longest": 5}, "expected_len": 5}, "expected_len: given 5 with lengths"),
        (
            {"task": "grpo", "seq_len": None, "lengths": {"mean": 5, "longest": 5}},
            "lengths: given for grpo, allowed: for tasks without a rollout; grpo has expected_len",
        ),
    ],
)
def test_lengths_that_cannot_be_are_refused_in_one_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        job(**changes)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rows", [1_000, 20_000, 200_000])
def test_a_batch_of_many_rows_is_as_near_to_its_mean_as_their_deviation_says(rows: int) -> None:
    """By the central limit theorem: 1.645 deviations above the mean, which one batch in twenty exceeds."""
    given = Lengths(mean=500, longest=4096, samples=rows)
    weights = lengths._weights(given, CAP)
    middle = sum(length * weight for length, weight in weights)
    deviation = sqrt(rows * sum(weight * (length - middle) ** 2 for length, weight in weights))
    above = (fullest(given, CAP, rows) - rows * middle) / deviation
    assert above == pytest.approx(1.645, abs=0.15)


def test_of_many_rows_only_what_is_near_their_mean_is_summed() -> None:
    """Else the sum of 200,000 sequences takes minutes."""
    many = lengths.fullest(Lengths(mean=512, longest=1024, samples=200_000), 1024, 200_000)
    assert 200_000 * 512 < many < 1.003 * 200_000 * 512
    start, cells = lengths._together([(0, 0.5), (1, 0.5)], 20_000, lambda rows: 1)
    assert start > 9_000
    assert len(cells) < 2_000
    assert sum(cells) == pytest.approx(1)
