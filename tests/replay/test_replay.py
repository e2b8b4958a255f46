"""Steps through the allocator: what is replayed, and a model of two layers followed block by block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from calc.autograd.alloc_trace import CAST, GIVEN, INPUT, MULTIPLY, PASSING, WEIGHT, Script
from calc.base.units import MiB
from calc.catalog.catalog import load
from calc.replay import replay
from calc.replay.allocator import Allocator, Expandable, OutOfMemory, length
from calc.replay.blocks import Blocks, Buckets, Piece
from calc.resolve.parse import parse
from calc.step.roles import Roles

BASE = {"gpu": "h100-sxm", "model": "qwen2.5-0.5b", "task": "sft", "framework": "torch", "seq_len": 1024}
ALONE = {"rollout": {"engine": "none"}, "prompt_len": 512, "response_len": 512, "seq_len": None}


def act(**fields: Any) -> replay.Act | None:
    given = {name: value for name, value in {**BASE, **fields}.items() if value is not None}
    return replay.act(Roles(parse(given, where="test", catalog=load())))


@pytest.mark.parametrize(
    ("fields", "known"),
    [
        ({}, True),
        ({"task": "rm"}, True),
        ({"task": "dpo"}, True),
        ({"task": "dpo", "method": "lora"}, True),
        ({"method": "qlora"}, True),
        ({"framework": "trl"}, True),
        ({"task": "ppo", **ALONE, "roles": {"critic": "none", "reference": "none", "reward": "none"}}, True),
        ({"task": "ppo", **ALONE}, False),  # several models, one after another
        ({"gpus": 2}, True),  # under DDP
        ({"gpus": 2, "framework": "trl"}, True),
        ({"gpus": 2, "tensor_parallel": 2}, True),
        ({"gpus": 2, "pipeline_parallel": 2, "model": "llama-3-8b"}, False),
        ({"sharding": "ddp"}, True),  # with nobody to share with
        ({"gpus": 2, "sharding": "fsdp2"}, True),
        ({"gpus": 2, "sharding": "fsdp2", "task": "dpo"}, True),
        ({"gpus": 2, "sharding": "fsdp2", "method": "qlora"}, False),
        ({"gpus": 2, "sharding": "fsdp2", "offload": {"parameters": True}}, False),
        ({"gpus": 2, "sharding": "fsdp2", "framework": "trl"}, False),
        ({"gpus": 2, "sharding": "fsdp2", "framework": "verl"}, False),
        ({"gpus": 4, "sharding": "fsdp2", "tensor_parallel": 2}, True),
        ({"gpus": 4, "sharding": "fsdp2", "pipeline_parallel": 2, "model": "llama-3-8b"}, False),
        ({"gpus": 4, "sharding": "fsdp2", "context_parallel": 2}, True),
        ({"gpus": 2, "sharding": "fsdp2", "compile": "model"}, True),
        ({"gpus": 2, "sharding": "fsdp2", "compile": "model-and-loss"}, True),
        ({"gpus": 2, "sharding": "fsdp2", "compile": "model-and-loss", "expandable_segments": True}, False),
        ({"gpus": 2, "sharding": "fsdp1"}, True),
        ({"gpus": 2, "sharding": "fsdp1", "method": "lora"}, True),
        ({"gpus": 2, "sharding": "fsdp1", "method": "lora", "model": "ling-lite-1.5"}, False),  # experts in a loop
        (
            {
                "gpus": 2,
                "sharding": "fsdp1",
                "method": "lora",
                "model": "ling-lite-1.5",
                "lora": {"targets": ["dense"]},
            },
            True,
        ),
        ({"gpus": 2, "sharding": "fsdp1", "method": "qlora", "lora": {"dtype": "bf16"}}, True),
        ({"gpus": 2, "sharding": "fsdp1", "precision": "fsdp-mixed", "offload": {"parameters": True}}, True),
        ({"gpus": 2, "sharding": "fsdp1", "global_batch": 4, "no_sync": True}, False),  # gradients that wait
        ({"gpus": 2, "sharding": "fsdp1", "global_batch": 2, "no_sync": True}, True),
        ({"gpus": 2, "sharding": "fsdp1", "framework": "trl"}, False),
        ({"gpus": 2, "sharding": "fsdp1", "framework": "verl"}, False),
        ({"gpus": 1, "sharding": "fsdp1"}, False),
        ({"gpus": 1, "sharding": "fsdp2"}, True),
        ({"gpus": 2, "sharding": "fsdp2", "global_batch": 4, "no_sync": True}, False),  # here, too
        ({"gpus": 2, "sharding": "zero3"}, True),
        ({"gpus": 2, "sharding": "zero3", "method": "lora", "lora": {"dtype": "bf16"}}, True),
        ({"gpus": 2, "sharding": "zero3", "task": "dpo"}, True),
        ({"gpus": 2, "sharding": "zero3", "task": "dpo", "method": "lora"}, False),  # one order for two models
        ({"gpus": 2, "sharding": "zero3", "offload": {"optimizer": True}}, True),
        ({"gpus": 2, "sharding": "zero3", "offload": {"optimizer": True, "parameters": True}}, False),
        ({"gpus": 2, "sharding": "zero3", "trainer": "axolotl"}, True),
        ({"gpus": 2, "sharding": "zero3", "trainer": "ms-swift"}, False),  # everything in one stream
        ({"gpus": 2, "sharding": "zero2"}, True),
        ({"gpus": 2, "sharding": "zero1"}, True),
        ({"gpus": 2, "sharding": "zero2", "trainer": "axolotl"}, True),  # reduced beside backward
        ({"gpus": 2, "sharding": "zero1", "trainer": "axolotl"}, False),
        ({"gpus": 2, "sharding": "zero1", "grad_dtype": "fp32"}, False),  # another optimizer of DeepSpeed's
        ({"gpus": 2, "sharding": "zero2", "method": "lora", "lora": {"dtype": "bf16"}}, True),
        ({"gpus": 2, "sharding": "zero2", "offload": {"optimizer": True}}, False),
        ({"framework": "openrlhf"}, False),  # DeepSpeed
        ({"trainer": "unsloth", "gpus": 2}, True),  # checkpoints come back into buffers
        ({"framework": "trl", "offload": {"activations": True}}, True),  # some wait on the GPU
        ({"task": "inference"}, False),
        ({"model": "gemma-3-4b", "vision_tower": True, "method": "lora"}, True),  # the tower just lies there
        ({"model": "gemma-3-4b", "vision_tower": True}, False),
        ({"model": "gemma-3-4b", "images": {"width": 64, "height": 64}, "method": "lora"}, False),
    ],
    ids=str,
)
def test_one_model_whole_on_its_gpu_or_in_shards_is_replayed(fields: dict[str, Any], known: bool) -> None:
    assert (act(**fields) is not None) is known


def test_a_reference_that_is_the_policy_without_its_adapter_has_no_weights_of_its_own() -> None:
    policy, own = act(task="dpo", method="lora"), act(task="dpo")
    assert policy and policy.inside and policy.shares
    assert own and own.inside and not own.shares


# -- by hand: one layer that keeps 40 MiB, a head that keeps its input, of whose logits the loss makes 80 ------------

LAYER = Piece(
    Script(((MULTIPLY, 1), (0, 40 * MiB), (1, 20 * MiB), (INPUT, 0)), 1),
    Script(((MULTIPLY, 2), (WEIGHT, 30 * MiB), (2, 20 * MiB), (0, 0), (GIVEN, 0)), 2),
)
NORM = Piece(Script((), INPUT), Script((), GIVEN))
HEAD = Piece(
    Script(((0, 80 * MiB),), 9),  # its own output is a number
    Script(((1, 80 * MiB), (0, 0), (WEIGHT, 50 * MiB), (2, 20 * MiB), (1, 0), (INPUT, 0)), 2),
)
MODEL = Blocks(
    weights=(30 * MiB, 30 * MiB, 50 * MiB),
    units=(),
    states=((60 * MiB,), (60 * MiB,), (100 * MiB,)),
    passing=(0, 0, 0),
    at_once=False,
    stream=20 * MiB,
    tables=(),
    layers=(LAYER, LAYER),
    norm=NORM,
    head=HEAD,
    embedding=0,
    sorting=0,
    tied="",
    held="",
    inside=True,
    wrapped=False,
)


def test_a_step_is_followed_by_hand() -> None:
    """Forward: the stream, 20, which the first layer gives back; both layers keep 40 and hand on 20; logits of 80.

    110 of weights, then 110 + 2·40 + 20 + 80 = 290 at the end of forward. Backward: the loss makes 80 more, 370, gives
    the logits back, makes the head's gradient, 50, and 20. At its end there are all gradients, 50 + 2·30 = 110.
    """
    r = replay.Replay(Allocator(), workspace=0)
    r.load(MODEL)
    assert r.heap.process.allocated == 110 * MiB
    kept = r.forward(MODEL)
    assert (r.heap.process.allocated, r.heap.process.most, r.phase) == (290 * MiB, 290 * MiB, "forward")
    r.backward(MODEL, kept)
    assert (r.heap.process.allocated, r.heap.process.most, r.phase) == (220 * MiB, 370 * MiB, "backward")
    # two of 20 at once in the first layer, of which one was free later
    assert r.heap.process.reserved == 370 * MiB + 20 * MiB
    r.step(MODEL)
    assert r.heap.process.allocated == 330 * MiB  # weights and states, 220


def test_states_of_the_first_step_lie_in_the_way_of_the_second() -> None:
    """They fit into what the first step's tensors left, so that the second step takes new segments for its own."""
    a = replay.Act(MODEL, trained=True, micro_batches=1)
    r = replay.Replay(Allocator(), workspace=0)
    r.all(a)
    most = 110 + 220 + 260  # weights, states, and what one step adds at its peak
    assert r.heap.process.most == most * MiB
    assert replay.Reserve(a, 0).undisturbed == r.heap.process.most_reserved > most * MiB


def test_a_third_step_meets_what_the_second_left() -> None:
    """Two layers that keep 70 and hand on 60, logits of 110: states of 30, 30 and 50 cut what the first step freed, and
    what the second takes in its place is cut in the third. Further steps find a place for all."""
    layer = Piece(
        Script(((0, 70 * MiB), (1, 60 * MiB), (INPUT, 0)), 1),
        Script(((WEIGHT, 30 * MiB), (2, 60 * MiB), (0, 0), (GIVEN, 0)), 2),
    )
    head = Piece(
        Script(((0, 110 * MiB),), 9),
        Script(((1, 110 * MiB), (0, 0), (WEIGHT, 50 * MiB), (2, 60 * MiB), (1, 0), (INPUT, 0)), 2),
    )
    states = ((30 * MiB,), (30 * MiB,), (50 * MiB,))
    model = replace(MODEL, layers=(layer, layer), head=head, states=states, stream=60 * MiB)
    r = replay.Replay(Allocator(), workspace=0)
    r.load(model)
    reserved = []
    for _ in range(5):
        r.backward(model, r.forward(model))
        r.step(model)
        reserved.append(r.heap.process.reserved // MiB)
    assert reserved == [590, 770, 880, 880, 880]
    assert replay.Reserve(replay.Act(model, trained=True, micro_batches=1), 0).undisturbed == 880 * MiB


def test_gradients_of_later_micro_batches_are_added_to_the_first() -> None:
    r = replay.Replay(Allocator(), workspace=0)
    r.load(MODEL)
    for _ in range(3):
        r.backward(MODEL, r.forward(MODEL))
        r.adding = True
        assert sum(map(length, r.gradients)) == 110 * MiB
    assert r.heap.process.allocated == 220 * MiB


def test_cublas_takes_a_workspace_for_each_thread_that_multiplies() -> None:
    r = replay.Replay(Allocator(), workspace=32 * MiB)
    kept = r.forward(MODEL)
    assert r.threads == 1
    r.backward(MODEL, kept)
    r.backward(MODEL, r.forward(MODEL))
    assert r.threads == 2
    assert r.heap.process.allocated == 64 * MiB + 2 * 110 * MiB  # without weights, and nothing was added
    r.play(Script(((PASSING, 40 * MiB), (PASSING, 0)), INPUT), {})
    assert (r.threads, r.heap.process.allocated) == (2, 64 * MiB + 2 * 110 * MiB)  # what passes multiplies nothing


@pytest.mark.parametrize(("tied", "there"), [("apart", 60 + 3 * 50), ("in place", 60 + 20 + 2 * 50)])
def test_a_tied_heads_gradient_waits_for_the_embeddings(tied: str, there: int) -> None:
    """The layers' gradients, the head's and the embedding's; then their sum where it cannot be made in place, and until
    then the gradient of the stream, of which the embedding's is made."""
    model = Blocks(**{**{n: getattr(MODEL, n) for n in MODEL.__slots__}, "embedding": 50 * MiB, "tied": tied})
    r = replay.Replay(Allocator(), workspace=0)
    kept = r.forward(model)
    seen = []
    take = r.heap.take

    def watched(size: int) -> Any:
        block = take(size)
        seen.append((size, r.heap.process.allocated))
        return block

    r.heap.take = watched  # type: ignore[method-assign]
    r.backward(model, kept)
    assert seen[-1] == (50 * MiB, there * MiB)
    assert r.heap.process.allocated == (60 + 50) * MiB


def test_outputs_that_are_kept_end_where_the_caller_drops_them() -> None:
    late = Piece(HEAD.forward, HEAD.backward, late=0)
    fields = {n: getattr(MODEL, n) for n in MODEL.__slots__}
    for held, step in (("step", 110 + 220), ("next", 110 + 220 + 80)):
        model = Blocks(**{**fields, "head": late, "held": held})
        r = replay.Replay(Allocator(), workspace=0)
        r.load(model)
        r.backward(model, r.forward(model))
        assert r.heap.process.allocated == (220 + 80) * MiB
        r.step(model)
        assert r.heap.process.allocated == step * MiB
        r.forward(model)
        assert r.heap.process.allocated == (330 + 180) * MiB  # the outputs before are gone either way


def test_autocasts_cache_ends_with_the_model_or_with_the_loss() -> None:
    """Two layers, of each a copy of 8 MiB beside what it keeps: wrapped, the reference finds the policy's gone."""
    layer = Piece(Script(((CAST, 8 * MiB), *LAYER.forward.steps), LAYER.forward.out), LAYER.backward)
    fields = {n: getattr(MODEL, n) for n in MODEL.__slots__} | {"layers": (layer, layer)}
    for wrapped, left in ((True, 0), (False, 16)):
        model = Blocks(**{**fields, "wrapped": wrapped})
        r = replay.Replay(Allocator(), workspace=0)
        kept = r.forward(model)
        assert r.heap.process.allocated == (180 + left) * MiB  # two layers' 40, the last's 20, logits of 80
        r.uncache()
        r.leave(kept)
        assert r.heap.process.allocated == 0
    whole = Blocks(**{**fields, "wrapped": False})
    both = replay.Act(whole, trained=True, micro_batches=1, inside=whole)
    apart = replay.Act(Blocks(**{**fields, "wrapped": True}), trained=True, micro_batches=1, inside=whole)
    assert replay.Reserve(both, 0).undisturbed >= replay.Reserve(apart, 0).undisturbed


def test_it_breaks_below_what_it_needs_and_names_the_phase() -> None:
    a = act(model="qwen2.5-1.5b", seq_len=4096, optimizer_impl="fused")
    assert a
    found = replay.Reserve(a, 32 * MiB)
    assert not found.breaks(found.undisturbed)
    for limit, phases in ((2 * 10**9, ("load",)), (found.undisturbed // 3, ("forward", "backward"))):
        assert found.breaks(limit)
        r = replay.Replay(Allocator(limit), 32 * MiB)
        with pytest.raises(OutOfMemory):
            r.all(a)
        assert r.phase in phases


def test_the_least_lies_between_what_is_allocated_and_what_is_reserved_undisturbed() -> None:
    a = act(model="qwen2.5-1.5b", seq_len=4096, optimizer_impl="fused")
    assert a
    found = replay.Reserve(a, 32 * MiB)
    r = replay.Replay(Allocator(), 32 * MiB)
    r.all(a)
    assert r.heap.process.most < found.least < found.undisturbed == r.heap.process.most_reserved
    assert not found.breaks(found.least)


def test_the_least_does_not_depend_on_what_was_asked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards ask one after another, each about its own limit. Here limits that suffice lie beside others that do not, so
    that a search of a card's own would end wherever it began; and nothing is tried twice."""
    a = replay.Act(MODEL, trained=True, micro_batches=1)
    tried: list[int] = []

    def breaks(self: replay.Reserve, limit: int) -> bool:
        tried.append(limit)
        return limit // (7 * MiB) % 3 != 0

    monkeypatch.setattr(replay.Reserve, "breaks", breaks)
    known = replay.Reserve(a, 0).least
    for limits in (range(500, 1000, 10), range(1000, 500, -10)):
        tried.clear()
        found = replay.Reserve(a, 0)
        said = {limit: found.meets(lambda size, most=limit * MiB: size <= most) for limit in limits}
        assert said == {limit: known <= limit * MiB for limit in limits}
        assert found.least == known
        assert len(tried) == len(set(tried)) <= 10


@pytest.mark.parametrize("kind", [Allocator, Expandable])
@pytest.mark.parametrize("limit", [None, 160 * MiB])
def test_what_is_served_twice_changes_nothing_more(kind: type[Allocator], limit: int | None) -> None:
    """Passed over or not, temporaries that come and go one by one leave the same blocks, also where segments went."""
    sizes = [size * MiB for size in (3, 40, 3, 90, 40, 3, 25, 90, 3, 0, 40)]
    every, few = (replay.Replay(kind(limit), 0) for _ in range(2))
    for one in (every, few):
        kept = one.heap.take_all([12 * MiB, 7 * MiB, 30 * MiB])
        one.give(kept[1])
    for size in sizes:
        every.give(every.take(size))
    few.pass_by(sizes)
    assert few.state == every.state
    # a segment that grows has no other to give back
    assert (few.heap.process.released > 0) == (limit is not None and kind is Allocator)
    assert few.heap.process.most_reserved == every.heap.process.most_reserved


def test_a_question_is_answered_as_soon_as_its_answer_is_known() -> None:
    """What is reserved undisturbed, or the most that is allocated, says it alone; else a few halves do."""
    a = replay.Act(replace(MODEL, stream=30 * MiB), trained=True, micro_batches=1)
    found = replay.Reserve(a, 0)
    asked: list[int] = []
    assert found.meets(lambda size: bool(asked.append(size)) or size <= 640 * MiB)  # type: ignore[func-returns-value]
    assert asked == [640 * MiB]
    assert not found.meets(lambda size: size < 500 * MiB)
    assert found.meets(lambda size: True) and not found.meets(lambda size: False)


@pytest.mark.parametrize("model", ["qwen2.5-1.5b", "llama-3.2-3b", "gemma-2-2b", "phi-3-mini"])
@pytest.mark.parametrize(
    "fields",
    [
        {"seq_len": 4096},
        {"seq_len": 2048, "micro_batch": 4, "checkpointing": "full"},
        {"task": "dpo", "checkpointing": "full"},
        {"method": "lora", "optimizer_impl": "fused"},
    ],
)
def test_a_segment_that_grows_never_needs_more_of_a_full_card(model: str, fields: dict[str, Any]) -> None:
    """The setting is recommended without a search; what it spares is what lies in holes."""
    fixed, growing = (act(model=model, **fields, expandable_segments=word) for word in (False, True))
    assert fixed and growing
    least = [replay.Reserve(a, 0).least for a in (fixed, growing)]
    assert least[1] <= (1 + 2 / replay.FINE) * least[0]  # as near as each is known
    assert least[1] >= peak(growing)


@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "llama-3-8b"])
@pytest.mark.parametrize(
    "fields",
    [
        {"sharding": "ddp"},
        {"sharding": "ddp", "method": "lora", "checkpointing": "full"},
        {"sharding": "fsdp1", "precision": "fsdp-mixed"},
        {"sharding": "fsdp1", "checkpointing": "full", "task": "dpo"},
        {"sharding": "fsdp1", "method": "lora", "micro_batch": 4, "checkpointing": "full"},
    ],
    ids=str,
)
def test_a_segment_that_grows_needs_hardly_more_of_a_full_card_on_several_gpus(
    model: str, fields: dict[str, Any]
) -> None:
    fixed, growing = (act(model=model, gpus=8, **fields, expandable_segments=word) for word in (False, True))
    assert fixed and growing
    least = [replay.Reserve(a, 0).least for a in (fixed, growing)]
    assert peak(growing) <= least[1] <= 1.01 * least[0]


def peak(a: replay.Act) -> int:
    """The most that is allocated at once."""
    r = replay.Replay(Expandable(), 0)
    r.all(a)
    return r.heap.process.most


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit", "adafactor", "lion", "sgd", "sgd-momentum"])
@pytest.mark.parametrize("impl", ["fused", "foreach", "single"])
def test_what_the_step_takes_tensor_by_tensor_is_what_its_line_has(optimizer: str, impl: str) -> None:
    """`calc.memory.optimizer.step_scratch`: all at once, or of the largest."""
    a = act(optimizer=optimizer, optimizer_impl=impl)
    assert a
    placed = Roles(parse({**BASE, "optimizer": optimizer, "optimizer_impl": impl}, catalog=load())).placed["actor"]
    lines = [line for _, lines in placed.engine.stepping() for line in lines if line.component == "temporary"]
    taken = sum(a.model.passing) if a.model.at_once else max(a.model.passing)
    assert taken == max(line.bytes for line in lines)


def changed(**fields: Any) -> Blocks:
    """MODEL with other fields."""
    return Blocks(**{name: getattr(MODEL, name) for name in MODEL.__slots__} | fields)


def test_a_forward_that_trains_nothing_leaves_what_it_found() -> None:
    """Weights, and cosines and sines while it runs."""
    model = changed(tables=(5 * MiB, 5 * MiB))
    r = replay.Replay(Allocator(), workspace=0)
    r.all(replay.Act(model, trained=False, micro_batches=1))
    assert (r.heap.process.allocated, r.heap.process.most) == (110 * MiB, (290 + 10) * MiB)


def test_ddps_first_bucket_is_replaced_before_the_second_step() -> None:
    """Weights of 110 are sent in copies of 40, two at a time; one bucket of all gradients, 110; three in its place.

    torch 2.13 `csrc/distributed/c10d/comm.cpp`, `broadcast_coalesced`; `reducer.cpp`, `initialize_buckets`, which
    clears the old ones first.
    """
    m = changed(buckets=Buckets((40 * MiB, 40 * MiB, 30 * MiB), (110 * MiB,), (50 * MiB, 30 * MiB, 30 * MiB)))
    a = replay.Act(m, trained=True, micro_batches=1)
    r = replay.Replay(Allocator(), workspace=0)
    r.run_load(a)
    process = r.heap.process
    assert (process.allocated, process.most) == (220 * MiB, 220 * MiB)
    assert process.reserved == (110 + 40 + 40 + 110) * MiB  # the third copy fits where the first one was
    for step in range(3):
        r.run_forward(a)
        assert sorted(length(bucket) // MiB for bucket in r.buckets) == ([110] if step == 0 else [30, 30, 50])
        r.run_backward(a)
        r.run_step(a)
        assert process.allocated == (110 + 110 + 220) * MiB


def test_copies_that_a_collectives_stream_has_recorded_do_not_serve_the_next_one() -> None:
    """Before torch 2.8: each of three copies takes memory of its own, which is free once the GPU is done with them.

    Short of memory, the allocator waits for the GPU, so that no more is needed than since.
    """
    m = changed(buckets=Buckets((40 * MiB, 40 * MiB, 30 * MiB), (20 * MiB,), (), recorded=True))
    a = replay.Act(m, trained=True, micro_batches=1)
    r = replay.Replay(Allocator(), workspace=0)
    r.run_load(a)
    process = r.heap.process
    assert (process.allocated, process.reserved) == (130 * MiB, (110 + 40 + 40 + 30 + 20) * MiB)
    assert all(not stream.state[-1] for stream in process.streams)
    limited = replay.Replay(Allocator(limit=(110 + 40 + 40 + 20) * MiB), workspace=0)
    limited.run_load(a)
    assert limited.heap.process.reserved == (110 + 40 + 30 + 20) * MiB


def test_more_micro_batches_than_two_need_no_more() -> None:
    """Gradients of the second are added to the first's, which have been there since: 110 more than with one."""
    most = []
    for count in (1, 2, 3):
        r = replay.Replay(Allocator(), workspace=0)
        r.all(replay.Act(MODEL, trained=True, micro_batches=count))
        most.append(r.heap.process.most // MiB)
    assert most[1] == most[2] == most[0] + 110


@pytest.mark.parametrize(("shares", "weights"), [(False, 2 * 110), (True, 110)])
def test_a_model_that_scores_inside_may_be_the_trained_one(shares: bool, weights: int) -> None:
    """Its forward runs while all that the first one's backward needs is there: 180 beside the weights, 180 again."""
    r = replay.Replay(Allocator(), workspace=0)
    a = replay.Act(MODEL, trained=False, micro_batches=1, inside=MODEL, shares=shares)
    r.all(a)
    assert (r.heap.process.allocated, r.heap.process.most) == (weights * MiB, (weights + 2 * 180) * MiB)


@pytest.mark.parametrize(("at_once", "most"), [(True, 60 + 60 + 100), (False, 100)])
def test_the_steps_temporaries_come_together_or_one_by_one(at_once: bool, most: int) -> None:
    model = changed(passing=(60 * MiB, 60 * MiB, 100 * MiB), at_once=at_once)
    r = replay.Replay(Allocator(), workspace=0)
    r.step(model)
    assert (r.heap.process.allocated, r.heap.process.most) == (220 * MiB, (220 + most) * MiB)


def test_what_is_replayed_is_what_the_job_does() -> None:
    """Two micro-batches stand for more; who scores has no backward, and nobody trains without an optimizer."""
    one, eight, none, dpo = (
        act(global_batch=1), act(global_batch=8), act(global_batch=8, optimizer="none"), act(task="dpo"),
    )  # fmt: skip
    assert one and eight and none and dpo and dpo.inside
    assert [a.micro_batches for a in (one, eight, none)] == [1, 2, 1]
    assert [a.trained for a in (one, eight, none)] == [True, True, False]
    assert all(piece.backward for piece in dpo.model.layers)
    assert not any(piece.backward for piece in (*dpo.inside.layers, dpo.inside.head))
    assert dpo.inside.stream == dpo.model.stream == 2 * one.model.stream  # pairs
    assert not replay.Act(MODEL, trained=True, micro_batches=1).shares


def test_the_least_is_known_to_a_thousandth() -> None:
    """Freed segments that go back make less than all enough, 610 of 640; a hair less breaks."""
    a = replay.Act(replace(MODEL, stream=30 * MiB), trained=True, micro_batches=1)
    found = replay.Reserve(a, 0)
    assert found.undisturbed == 640 * MiB
    assert 610 * MiB <= found.least <= 610 * MiB + 640 * MiB // replay.FINE
    assert found.breaks(found.least - 640 * MiB // 900)
    for limit, enough in ((640, True), (641, True), (611, True), (609, False), (320, False)):
        assert found.meets(lambda size, most=limit * MiB: size <= most) is enough


def test_a_card_on_which_only_a_segment_that_grows_is_enough() -> None:
    fixed, growing = (act(checkpointing="full", seq_len=4096, expandable_segments=word) for word in (False, True))
    assert fixed and growing
    found = [replay.Reserve(a, 0) for a in (fixed, growing)]
    between = sum([reserve.least for reserve in found]) // 2
    assert [reserve.breaks(between) for reserve in found] == [True, False]


def outright(a: replay.Act, limit: int | None, workspace: int = 32 * MiB) -> replay.Replay:
    """All steps under a limit, from the start and to the end."""
    r = replay.Replay((Expandable if a.expandable else Allocator)(limit), workspace)
    r.run_load(a)
    for _ in range(replay.STEPS):
        for _ in range(a.micro_batches):
            r.run_forward(a)
            r.run_backward(a)
        r.run_step(a)
    return r


def outright_breaks(a: replay.Act, limit: int, workspace: int = 32 * MiB) -> bool:
    try:
        outright(a, limit, workspace)
    except OutOfMemory:
        return True
    return False


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"global_batch": 2},
        {"task": "dpo", "checkpointing": "full", "global_batch": 2},
        {"method": "lora", "seq_len": 4096},
        {"task": "rm", "optimizer": "none"},
        {"gpus": 2, "sharding": "fsdp2", "global_batch": 4, "checkpointing": "full"},
        {"gpus": 2, "global_batch": 4},
        {"gpus": 2, "sharding": "fsdp1", "global_batch": 4, "no_sync": False, "precision": "fsdp-mixed"},
        {"gpus": 2, "sharding": "fsdp1", "task": "dpo", "checkpointing": "full", "precision": "fsdp-mixed"},
        {
            "gpus": 2,
            "sharding": "fsdp1",
            "method": "lora",
            "checkpointing": "full",
            "offload": {"parameters": True},
            "versions": {"transformers": "4.57"},
        },
    ],
    ids=str,
)
def test_a_replay_that_goes_on_from_a_mark_or_ends_early_is_the_whole_one(
    fields: dict[str, Any], expandable: bool
) -> None:
    """What is reserved and allocated at most, undisturbed, and whether it breaks under limits to the least and below,
    which are asked in the order of a search and one by one."""
    a = act(**fields, expandable_segments=expandable)
    assert a
    found, process = replay.Reserve(a, 32 * MiB), outright(a, None).heap.process
    assert (found.undisturbed, found._low) == (process.most_reserved, process.most)
    low, high = process.most, process.most_reserved
    share = replay.NEAR if expandable else 2
    while high - low > found.undisturbed // replay.FINE:
        middle, share = low + (high - low) // share, 2
        low, high = (middle, high) if outright_breaks(a, middle) else (low, middle)
    assert found.least == high
    for limit in (process.most * 2 // 3, process.most - 1, high, process.most_reserved - 1):
        assert replay.Reserve(a, 32 * MiB).breaks(limit) is found.breaks(limit) is outright_breaks(a, limit)


def test_a_limit_that_would_have_gone_the_same_way_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the most that was reserved under one that is tried to below the least that it refused."""
    tried, go = list[int](), replay.Replay.all

    def counted(self: replay.Replay, *given: Any) -> None:
        tried.append(self.done)
        go(self, *given)

    monkeypatch.setattr(replay.Replay, "all", counted)
    a = replay.Act(replace(MODEL, stream=30 * MiB), trained=True, micro_batches=1)
    found = replay.Reserve(a, 0)
    assert found.undisturbed == 640 * MiB
    # under 630 a free segment goes back and all that is reserved are 610
    assert [found.breaks(limit * MiB) for limit in (630, 629, 610, 639, 609)] == [False, False, False, False, True]
    assert len(tried) == 3 and tried[0] == 0 < tried[1]


def test_replays_under_many_limits_are_whole_ones_though_they_begin_where_others_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every limit, asked in an order that leaves marks above and below; of those that are tried, some go on from a
    state that no undisturbed replay has been in."""
    begun, go = list[int](), replay.Replay.all

    def counted(self: replay.Replay, *given: Any) -> None:
        begun.append(self.heap.process.released)
        go(self, *given)

    a = replay.Act(replace(MODEL, stream=30 * MiB), trained=True, micro_batches=2)
    found = replay.Reserve(a, 0)
    monkeypatch.setattr(replay.Replay, "all", counted)
    limits = [limit * MiB for start in (0, 3, 1, 2) for limit in range(500 + start, 760, 4)]
    said = [found.breaks(limit) for limit in limits]
    assert any(begun)
    assert said == [outright_breaks(a, limit, 0) for limit in limits]
    assert {*said} == {True, False}


def test_a_part_under_a_limit_that_finds_what_it_found_a_step_before_is_not_replayed() -> None:
    """Though segments have gone back, and come again, in between."""
    a = act(model="codellama-34b", gpus=8, sharding="fsdp2", seq_len=512)
    assert a
    limit = replay.Reserve(a, 32 * MiB).least
    r = replay.Replay(Allocator(limit), 32 * MiB)
    r.all(a)
    last = 3 * replay.STEPS  # after loading, a forward, a backward and the optimizer in each step
    assert r.done < last
    assert r.heap.process.released > 1
    assert not outright_breaks(a, limit)


def test_a_part_that_finds_what_it_found_a_step_before_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is trained the third step finds what the second did."""
    seen, forward = list[int](), replay.Replay.run_forward

    def counted(self: replay.Replay, a: replay.Act) -> None:
        seen.append(self.heap.process.reserved)
        forward(self, a)

    monkeypatch.setattr(replay.Replay, "run_forward", counted)
    replay.Reserve(replay.Act(MODEL, trained=False, micro_batches=1), 32 * MiB)
    assert len(seen) == 2 < replay.STEPS


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_part_that_finds_more_pages_mapped_is_not_replayed_but_counts(
    micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step's backward maps pages: as the third begins it finds them, and otherwise what the second did.

    Only the last part, the third step's optimizer, finds the same pages mapped.
    """
    seen, forward = list[int](), replay.Replay.run_forward

    def counted(self: replay.Replay, a: replay.Act) -> None:
        seen.append(self.done)
        forward(self, a)

    a = replay.Act(MODEL, trained=True, micro_batches=micro_batches, expandable=True)
    whole = outright(a, None)
    monkeypatch.setattr(replay.Replay, "run_forward", counted)
    r = replay.Replay(Expandable(), 32 * MiB)
    r.all(a)
    assert len(seen) == 2 * micro_batches
    assert r.done == len([*a.parts()]) - 1
    assert r.heap.process.most_reserved == whole.heap.process.most_reserved


def test_where_the_gradient_of_a_weight_goes_is_no_matter_of_what_is_free() -> None:
    """It stays, is added to the one that is there, or waits for the embedding's; the same memory is free each time."""
    script, seen = Script(((WEIGHT, 30 * MiB),), INPUT), []
    r = replay.Replay(Allocator(), workspace=0)
    for adding, apart in ((False, False), (True, False), (False, True)) * 2:
        r.adding, r.apart = adding, apart
        r.play(script, {})
        seen.append((len(r.gradients), bool(r.head), r.heap.process.allocated // MiB))
        r.give(*r.gradients, r.head)
        r.gradients, r.head = [], ()
    assert seen == [(1, False, 30), (0, False, 0), (0, True, 30)] * 2


def test_batches_of_other_lengths_leave_blocks_that_longer_ones_cannot_use() -> None:
    """More is reserved than for batches that are all as long, less of it where segments grow, and no more is needed."""
    varying = {"lengths": {"mean": 200, "longest": 1024}, "checkpointing": "full"}
    alike, varied, grown = act(checkpointing="full"), act(**varying), act(**varying, expandable_segments=True)
    assert alike and varied and grown
    one, other, third = (replay.Reserve(each, 8 * MiB) for each in (alike, varied, grown))
    assert one.undisturbed < other.undisturbed
    assert third.undisturbed < other.undisturbed
    assert not other.breaks(one.undisturbed)


@pytest.mark.parametrize(("reentrant", "followed"), [(True, True), (False, False)])
def test_blocks_that_contexts_name_are_followed_where_checkpointing_drops_them(reentrant: bool, followed: bool) -> None:
    """Non-reentrant checkpointing leaves inputs of 8-bit linears in blocks that no script has."""
    fields = {"method": "qlora", "load_in_8bit": True, "checkpointing": "full", "reentrant": reentrant}
    assert (act(**fields) is not None) is followed


def test_packs_have_one_length() -> None:
    packed = act(seq_len=1024, lengths={"mean": 200, "longest": 900}, packing=True)
    assert packed and not packed.others


@pytest.mark.parametrize(
    "fields",
    [
        {"global_batch": 2},
        {"method": "lora", "checkpointing": "full"},
        {"task": "dpo", "lengths": {"mean": 200, "longest": 1024}},
        {"gpus": 2, "sharding": "fsdp2", "checkpointing": "full"},
    ],
    ids=str,
)
def test_the_events_of_a_replay_are_known_before_it(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bound is on what is about to happen: nothing has to be replayed first."""
    seen, play = list[int](), Allocator.play

    def counted(self: Allocator, steps: Any, own: Any) -> None:
        seen.append(len(steps))
        play(self, steps, own)

    a = act(**fields)
    assert a
    monkeypatch.setattr(Allocator, "play", counted)
    r = replay.Replay(Allocator(), 0)
    for part, one in a.parts():
        part(r, one)
    assert a.events == pytest.approx(sum(seen), rel=0.15)


@pytest.mark.parametrize("halvings", [0, 2, 5])
def test_a_search_that_ends_early_takes_what_is_enough(halvings: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upper bound of the least, and how far it may lie above it; never a limit under which a request fails."""
    a = act(model="qwen2.5-1.5b", seq_len=4096, optimizer_impl="fused")
    assert a
    whole = replay.Reserve(a, 32 * MiB)
    assert whole.least and not whole.cut
    monkeypatch.setattr(replay, "SOUGHT", halvings * a.events)
    found = replay.Reserve(a, 32 * MiB)
    assert found.least - found.unknown <= whole.least <= found.least <= found.undisturbed
    assert found.spent <= replay.SOUGHT
    assert not found.breaks(found.least)
    assert found.cut is (found.unknown > found.undisturbed // replay.FINE)
    assert halvings or (found.cut and found.least == found.undisturbed)


def test_a_search_too_long_for_all_lengths_goes_on_with_the_fullest_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP's copies of its weights, which stay in the cache, are no part of the least, though batches are many."""
    a = act(gpus=2, sharding="ddp", method="lora", checkpointing="full", lengths={"mean": 200, "longest": 1024})
    assert a and len(a.others) > replay.STEPS
    whole, alone = replay.Reserve(a, 32 * MiB), replay.Reserve(a._replace(others=()), 32 * MiB)
    assert whole.undisturbed > 1.2 * whole.least
    monkeypatch.setattr(replay, "SOUGHT", 8 * alone.act.events)
    found = replay.Reserve(a, 32 * MiB)
    lowest, _ = found.known
    assert lowest <= found.least <= 1.01 * max(alone.least, lowest) < found.undisturbed
    assert not found.cut and found.spent <= 2 * replay.SOUGHT


def test_where_a_search_ends_does_not_depend_on_the_marks_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays that go on from marks of others take less, and marks are forgotten: both count as if none were there."""
    a = act(model="qwen2.5-1.5b", seq_len=4096, optimizer_impl="fused")
    assert a
    monkeypatch.setattr(replay, "SOUGHT", 2 * a.events)
    found, forgetful = replay.Reserve(a, 32 * MiB), replay.Reserve(a, 32 * MiB)
    while forgetful.narrow():
        replay._undisturbed.cache_clear()
    assert (found.least, found.spent, found.cut) == (forgetful.least, forgetful.spent, forgetful.cut)


@pytest.mark.parametrize(("count", "known"), [(2, True), (1024, False)])
def test_hundreds_of_adapters_beside_each_linear_are_not_replayed(count: int, known: bool) -> None:
    """28 layers of 7 linears, each with two matrices: 392 tensors for one adapter, 401,408 for 1,024.

    To find their blocks took 20 seconds of a recommendation.
    """
    job = {"model": "qwen3-0.6b", "task": "sft", "gpu": "h100-sxm", "method": "lora", "lora.count": count}
    assert replay.known(Roles(parse(job | {"lora.targets": "all-linear"}))) is known
