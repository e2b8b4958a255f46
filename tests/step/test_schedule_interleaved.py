"""Several pieces of a model on each pipeline rank, under PyTorch's interleaved 1F1B: their order, and what is alive."""

from __future__ import annotations

from typing import Any

import pytest
from formulas import holds
from hypothesis import given
from hypothesis import strategies as st

from calc.base.ledger import Line
from calc.catalog.catalog import load
from calc.diagnose.reading import read
from calc.estimate.estimate import as_dict, estimate
from calc.estimate.result import Estimate, Group
from calc.launch import launch
from calc.models.architecture import parameters
from calc.models.slices import stage
from calc.resolve.parse import parse
from calc.scenario.scenario import ScenarioError
from calc.step.schedule_interleaved import Turn, order, turns

H, V = 4096, 128_256  # Llama 3 8B
LAYER = 2 * H * H + 2 * H * 1024 + 3 * H * 14_336 + 2 * H
JOB = {
    "model": "llama-3-8b", "task": "sft", "gpu": "h200", "gpus": 8, "sharding": "fsdp2", "precision": "fsdp-mixed",
    "pipeline_parallel": 4, "virtual_pipeline": 2, "micro_batch": 1, "global_batch": 16, "seq_len": 2048,
}  # fmt: skip


def of_job(**changes: Any) -> Estimate:
    return estimate(parse(JOB | changes))


def lines(group: Group, phase: str, component: str) -> list[Line]:
    """The lines of one component at the largest moment of a phase."""
    found = next(p for p in group.phases if p.name == phase)
    return [line for line in found.moment.lines if line.component == component]


def spelled(index: int, stages: int, chunks: int, micro: int) -> str:
    return " ".join(f"{'FB'[backward]}{piece}" for piece, backward in order(index, stages, chunks, micro))


def test_pieces_take_turns_as_pytorch_lets_them() -> None:
    """torch 2.13 `ScheduleInterleaved1F1B._calculate_single_rank_operations`: two ranks, four micro batches.

    The first rank warms up with 1 round of 2 and 2·1 more; the last with the round alone.
    """
    assert spelled(0, 2, 2, 4) == "F0 F0 F1 F1 F0 B1 F0 B1 F1 B0 F1 B0 B1 B1 B0 B0"
    assert spelled(1, 2, 2, 4) == "F0 F0 F1 B1 F1 B1 F0 B0 F0 B0 F1 B1 F1 B1 B0 B0"
    # 2·3 + 4 forwards come first, but there are only eight of both pieces
    assert spelled(0, 4, 2, 4) == "F0 F0 F0 F0 F1 F1 F1 F1 B1 B1 B1 B1 B0 B0 B0 B0"


@given(st.integers(2, 6), st.integers(2, 3), st.integers(1, 4), st.data())
def test_every_micro_batch_passes_every_piece(stages: int, chunks: int, rounds: int, data: st.DataObject) -> None:
    index, micro = data.draw(st.integers(0, stages - 1)), rounds * stages
    ran = [*order(index, stages, chunks, micro)]
    for piece in range(chunks):
        own = [backward for other, backward in ran if other == piece]
        assert own.count(True) == own.count(False) == micro
        assert all(own[:n].count(True) <= own[:n].count(False) for n in range(len(own)))


def test_a_piece_is_reduced_before_the_one_below_it() -> None:
    """Of "F0 ×4, F1 ×4, B1 ×4, B0 ×4": all wait as the first backward begins, those of one piece as its second does."""
    found = [turn for turn in turns(0, 4, 2, 4) if turn.backward]
    assert found == [
        Turn(1, True, (4, 3), ("", ""), 1),
        Turn(1, True, (4, 2), ("", "whole"), 1),
        Turn(1, True, (4, 0), ("", "whole"), 1, over=True),
        Turn(0, True, (3, 0), ("", "reduced"), 1),
        Turn(0, True, (2, 0), ("whole", "reduced"), 1),
        Turn(0, True, (0, 0), ("whole", "reduced"), 1, over=True),
    ]


def test_pieces_are_stages_of_a_longer_pipeline() -> None:
    """34 in eights: 5, 5, 4, …; the first and the last have one less, and each rank has the n-th and the n+4-th."""
    whole = load().model("llama-3-8b").architecture
    counts = [len(stage(whole, index, 4, chunks=2).specs) for index in range(4)]
    assert counts == [4 + 4, 5 + 4, 4 + 4, 4 + 3]
    assert sum(parameters(stage(whole, index, 4, chunks=2)) for index in range(4)) == parameters(whole)


def test_inputs_and_gradients_of_each_piece_have_a_buffer_for_every_micro_batch() -> None:
    """2·h bytes a token, for eight micro batches: two kinds of each piece, one of the model's first and of its last."""
    buffer = 2 * H * 2048
    kinds = [
        [line.bytes // buffer for line in lines(group, "step", "communication") if line.source == "parallelism#stages"]
        for group in of_job().groups
    ]
    assert [sum(counts) for counts in kinds] == [24, 32, 32, 24]


def test_of_a_piece_that_is_over_the_shards_of_its_gradients_stay() -> None:
    """The second rank's last piece has 4 layers, the first 5: two ranks have 4·4/2 bytes of each of its numbers.

    The first piece's sums in fp32 and its weights in bf16 are whole. With all its 5 + 4 layers' weights in bf16 and the
    last piece's sums, 2·9 + 4·4, the second backward of that has less than 2·5 + 4·5 + 4·4/2.
    """
    second = of_job(global_batch=8, checkpointing="full", seq_len=256).groups[1]
    kept = [line.bytes for line in lines(second, "backward", "gradients")]
    assert 4 * 5 * LAYER in kept and 4 * 4 * LAYER // 2 in kept
    gathered = [
        line.bytes for line in lines(second, "backward", "communication") if line.values.get("what") == "layers"
    ]
    assert gathered == [2 * 5 * LAYER]


@given(
    st.sampled_from(("llama-3-8b", "mixtral-8x7b", "mistral-7b")), st.sampled_from((2, 4)), st.sampled_from((2, 3)),
    st.sampled_from((1, 3)), st.sampled_from(("none", "full")),
)  # fmt: skip
def test_lines_make_moments_and_formulas_their_bytes(
    model: str, stages: int, chunks: int, rounds: int, checkpointing: str
) -> None:
    e = of_job(
        model=model, pipeline_parallel=stages, virtual_pipeline=chunks, gpus=stages * 2, checkpointing=checkpointing,
        global_batch=rounds * stages * 2,
    )  # fmt: skip
    for group in as_dict(e)["groups"]:
        for phase in group["phases"]:
            holds(phase, printed=1e-4)


def test_torchtitan_is_told_the_schedule_and_read_back() -> None:
    command = launch(parse(JOB | {"model": "llama-3.1-8b", "task": "pretrain", "trainer": "torchtitan"})).command
    assert "--parallelism.pipeline_parallel_schedule Interleaved1F1B" in command
    assert read(command, load()).fields["virtual_pipeline"] == 2


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"virtual_pipeline": 4}, "virtual_pipeline: given 4, allowed: at most 3; of more not all stay"),
        (
            {"pipeline_parallel": 8, "virtual_pipeline": 3},
            "virtual_pipeline: given 3, allowed: at most 2, so that every",
        ),
        ({"global_batch": 22}, "global_batch: given 22 with virtual_pipeline = 2, allowed: a multiple of 8"),
        ({"task": "pretrain", "trainer": "torchtitan", "virtual_pipeline": 3}, "virtual_pipeline: given 3"),
        ({"sharding": "none", "precision": "bf16", "gpus": 4}, "allowed: 1, or with sharding megatron or fsdp2"),
    ],
)
def test_what_cannot_take_turns_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        parse(JOB | changes, where="job.yaml")
    assert line in str(caught.value)
