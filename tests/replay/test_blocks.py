"""A model as blocks: what lies there one by one adds up to the ledger's lines, and the replay's peak is the ledger's.

By hand for Qwen2.5 0.5B (config.json: hidden 896, 24 layers, 14 heads of 64, vocabulary 151,936, a tied head) on 1,024
tokens in bf16.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from calc.autograd.alloc_trace import REPLACED, WEIGHT
from calc.base.optimizers import OPTIMIZERS
from calc.base.units import MiB
from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.memory.weights import NF4
from calc.replay import replay
from calc.replay.allocator import Expandable
from calc.replay.blocks import Blocks
from calc.replay.zero3_partitions import Partitioned
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario
from calc.step.instants import SORTED_TOKENS
from calc.step.roles import Roles

JOB = {"gpu": "h100-sxm", "model": "qwen2.5-0.5b", "task": "sft", "framework": "torch", "seq_len": 1024}
TABLE = 151_936 * 896
# a checkpoint that leaves the first q_proj, 896 · 896 elements, in 16 bits; all in four would be 457,004,096 bytes
KEPT = {"method": "qlora", "checkpoint_gb": (457_004_096 + (2 - NF4[True]) * 896 * 896) / 1e9}
# copies of embedding and head that are trained whole, beside adapters whose type is another
SAVED = {"method": "lora", "trainer": "transformers", "lora.modules_to_save": ["embed_tokens", "lm_head"]}
# adapters beside embedding and head
ENDS: dict[str, Any] = {"method": "lora", "lora": {"rank": 64, "targets": ["q_proj", "embed_tokens", "lm_head"]}}


def job(**fields: Any) -> tuple[Scenario, Blocks]:
    s = parse({**JOB, **fields}, where="test", catalog=load())
    act = replay.act(Roles(s))
    assert act
    return s, act.model


def held(s: Scenario, component: str) -> int:
    """Bytes of a component in the phase of the optimizer's step."""
    (group,) = estimate(s, load()).groups
    (step,) = [phase for phase in group.phases if phase.name == "step"]
    return sum(line.bytes for line in step.moment.lines if line.component == component)


def gradients(model: Blocks) -> list[int]:
    """The gradients that stay of each piece's backward."""
    pieces = [piece.backward for piece in (*model.layers, model.norm, model.head)]
    return [size for script in pieces if script for slot, size in script.steps if slot == WEIGHT]


@pytest.mark.parametrize(
    "optimizer",
    sorted(
        name
        for name, facts in OPTIMIZERS.items()
        if not (facts.factored or facts.in_backward or facts.narrow or facts.orthogonal or facts.low_rank)
        and name != "none"
    ),
)
@pytest.mark.parametrize(
    "fields", [{}, {"precision": "autocast"}, {"method": "lora"}, {"method": "qlora"}, SAVED, ENDS, KEPT]
)
def test_weights_states_and_gradients_add_up_to_the_ledgers_lines(optimizer: str, fields: dict[str, Any]) -> None:
    """But for managed memory, which is no block of PyTorch's; what a block is cut short of is less than a byte."""
    s, model = job(optimizer=optimizer, **fields)
    assert sum(model.weights) == held(s, "weights") + held(s, "adapter")
    states = sum(map(sum, model.states))
    expected = 0 if OPTIMIZERS[optimizer].paged else held(s, "optimizer_states")
    assert expected - len(model.states) * 2 <= states <= expected
    whole = sum(gradients(model)) - (TABLE * (4 if "precision" in fields else 2) if model.tied else 0)
    assert whole + model.embedding + model.second == held(s, "gradients")


@pytest.mark.parametrize("fields", [{}, {"precision": "autocast"}])
def test_galores_states_add_up_to_the_ledgers_line(fields: dict[str, Any]) -> None:
    """A projection and two moments of a layer's seven matrices, two moments of everything else."""
    s, model = job(optimizer="galore", **fields)
    assert sum(map(sum, model.states)) == held(s, "optimizer_states")
    assert sorted({len(each) for each in model.states}) == [2, 3]
    assert sum(len(each) == 3 for each in model.states) == 24 * 7


@pytest.mark.parametrize(("optimizer", "moments"), [("adamw", 2), ("lion", 1), ("sgd-momentum", 1)])
def test_every_trained_tensor_has_its_moments(optimizer: str, moments: int) -> None:
    """AdamW keeps two, Lion and SGD with momentum one."""
    _, model = job(optimizer=optimizer)
    assert {len(each) for each in model.states} == {moments}
    assert len(model.states) == 24 * 12 + 2  # a layer has seven matrices, three biases, two norms
    assert job(optimizer="sgd")[1].states == ((),) * 290


def test_eight_bit_moments_have_their_scales_in_blocks_of_their_own() -> None:
    """`init_state` (bitsandbytes 0.50): a byte an element, twice, then 4 for each 256; of a norm of 896 fp32."""
    _, model = job(optimizer="adamw-8bit")
    table = 151_936 * 896
    assert model.states[0] == (table, table, 4 * (table // 256), 4 * (table // 256))
    assert (4 * 896, 4 * 896) in model.states
    trl = job(framework="trl", optimizer="adamw-8bit")[1]
    assert trl.states[0] == (4 * table, 4 * table)  # the Trainer leaves embeddings in 32 bits


def test_what_the_first_forward_leaves_has_blocks_of_its_own() -> None:
    """Unsloth's buffer of 4,864 · 896 elements, 2 bytes each and 4 for 64; Gemma 2's two masks of 8,192 positions."""

    def more(new: dict[str, Any], old: dict[str, Any]) -> Counter[int]:
        own = {"trainer": "unsloth", "method": "qlora"}
        return Counter(job(**own, **new)[1].weights) - Counter(job(**own, **old)[1].weights)

    buffer = more({"versions": {"unsloth": "2025.2.2"}}, {"versions": {"unsloth": "2025.1.8"}})
    assert buffer == {4864 * 896 * 2 + 4864 * 14 * 4: 1}
    gemma = {"model": "gemma-2-2b", "versions": {"unsloth": "2024.8"}}
    assert more(gemma | {"gpu": "t4", "precision": "fp16"}, gemma) == {2 * 8192**2: 2}


def test_what_lies_below_the_layers_by_hand() -> None:
    """The embedding's output, cosines and sines of 64 numbers a position, and the embedding's gradient."""
    _, model = job()
    assert model.stream == 1024 * 896 * 2
    assert model.tables == (1024 * 64 * 2,) * 2
    assert model.embedding == TABLE * 2
    assert (model.sorting, model.tied) == (0, "apart")
    _, cast = job(precision="autocast")
    assert (cast.stream, cast.tables) == (1024 * 896 * 4, (1024 * 64 * 4,) * 2)
    assert (cast.embedding, cast.tied) == (TABLE * 4, "in place")
    _, frozen = job(method="lora")
    assert (frozen.embedding, frozen.tied) == (0, "")


def test_rows_beside_an_embedding_by_hand() -> None:
    """Of rank 64 in fp32: 64 · 151,936 and 896 · 64 elements; a token keeps 64 of four bytes, with checkpointing its
    row, too.
    """
    _, model = job(**ENDS)
    assert (model.embedding, model.second) == (4 * 64 * 151_936, 4 * 64 * 896)
    assert model.tables[-1] == 1024 * 64 * 4
    assert job(**ENDS, checkpointing="full")[1].tables[-2:] == (1024 * 64 * 4, 1024 * 896 * 2)
    assert job(method="lora")[1].second == 0


def test_the_embeddings_backward_sorts_many_tokens() -> None:
    """4.4 bytes an element of its gradient, where there are more tokens than one kernel takes."""
    assert job(seq_len=SORTED_TOKENS)[1].sorting == 0
    assert job(seq_len=SORTED_TOKENS + 1)[1].sorting == int(4.4 * 896 * (SORTED_TOKENS + 1))


def test_a_step_is_one_for_all_tensors_or_one_after_another() -> None:
    assert [job(optimizer_impl=impl)[1].at_once for impl in ("foreach", "fused", "single")] == [True, False, False]
    _, forward = job(optimizer="none")
    assert (forward.at_once, forward.passing, forward.states) == (False, (), ())


def test_where_some_layers_rotate_there_are_tables() -> None:
    """SmolLM3 leaves rotary positions out in every fourth layer; its heads have 128 numbers."""
    assert job(model="smollm3-3b")[1].tables == (1024 * 128 * 2,) * 2


WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"checkpointing": "full"},
    {"checkpointing": "selective"},
    {"method": "lora"},
    {"method": "lora", "checkpointing": "full"},
    {"method": "lora", "lora.rank": 512},
    {"method": "qlora"},
    {"method": "lora", "lora.modules_to_save": ["embed_tokens", "lm_head"], "checkpointing": "full"},
    {"method": "qlora", "lora.modules_to_save": ["lm_head"], "trainer": "transformers"},
    ENDS,
    {**ENDS, "lora": {**ENDS["lora"], "rank": 512}, "checkpointing": "full", "seq_len": 64},
    {**ENDS, "lora": {**ENDS["lora"], "rank": 512}, "checkpointing": "full", "seq_len": 64, "global_batch": 2},
    {"method": "lora", "lora.modules_to_save": ["embed_tokens"], "trainer": "llamafactory", "checkpointing": "full"},
    {"task": "dpo"},
    {"task": "rm"},
    {"precision": "autocast"},
    {"precision": "mixed", "grad_dtype": "fp32", "global_batch": 2},
    {"optimizer": "lion"},
    {"optimizer_impl": "single"},
    {"micro_batch": 4, "seq_len": 512},
    {"attention": "eager"},
    {"task": "dpo", "logprob": "selective"},
    {"framework": "trl"},
    {"framework": "trl", "task": "dpo"},
)


@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "gemma-2-2b", "smollm3-3b", "mixtral-8x7b", "deepseek-v2-lite"])
@pytest.mark.parametrize("fields", WAYS, ids=str)
def test_the_replays_peak_is_the_ledgers(model: str, fields: dict[str, Any]) -> None:
    """Two ways through the same tapes, block by block and as sums of terms, to the most that is allocated at once."""
    agree({"model": model, **fields})


def test_litgpts_list_of_logits_is_there_once_however_many_micro_batches() -> None:
    agree({"model": "llama-2-7b", "trainer": "litgpt", "method": "lora", "global_batch": 3, "seq_len": 4096})


def agree(fields: dict[str, Any]) -> None:
    s = parse({**JOB, "expandable_segments": True, **fields}, catalog=load())
    act = replay.act(Roles(s))
    assert act
    replayed = replay.Replay(Expandable(), 32 * MiB)
    replayed.all(act)
    (group,) = estimate(s, load()).groups
    assert replayed.heap.process.most == pytest.approx(max(p.moment.allocated_bytes for p in group.phases), rel=0.0015)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_tower_that_reads_nothing_lies_beside_the_language_model(method: str) -> None:
    fields = {"model": "gemma-3-4b", "vision_tower": True, "method": method, "checkpointing": "full"}
    s, model = job(**fields)
    assert sum(model.weights) == pytest.approx(held(s, "weights") + held(s, "adapter"), abs=len(model.weights))
    test_the_replays_peak_is_the_ledgers("gemma-3-4b", fields)


@pytest.mark.parametrize("model", ["afm-4.5b", "apertus-8b", "phi-2"])
def test_four_bits_behind_a_square_or_an_exponential_make_an_fp32_stream(model: str) -> None:
    """Autocast runs both in fp32, and bitsandbytes' linear returns what it gets: what a layer adds is fp32 then.

    A linear in 16 bits makes bf16 of it.
    """
    fields = {"model": model, "trainer": "transformers", "checkpointing": "full", "expandable_segments": True}
    made = {method: job(method=method, **fields)[1] for method in ("lora", "qlora")}
    assert made["qlora"].stream == 2 * made["lora"].stream
    for method in made:
        test_the_replays_peak_is_the_ledgers(model, fields | {"method": method})


SHARDED = {"gpus": 4, "sharding": "fsdp2", "expandable_segments": True}
MIXED = {"precision": "fsdp-mixed"}
SHARDS: tuple[dict[str, Any], ...] = (
    {},
    MIXED,
    {**MIXED, "checkpointing": "full"},
    {"checkpointing": "selective"},
    {**MIXED, "method": "lora"},
    {**MIXED, "task": "dpo"},
    {**MIXED, "task": "dpo", "method": "lora"},
    {"task": "rm"},
    {**MIXED, "gpus": 2},
    {**MIXED, "gpus": 64},
    {**MIXED, "optimizer_impl": "foreach"},
    {**MIXED, "global_batch": 16},
)


@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "llama-3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("fields", SHARDS, ids=str)
def test_the_replays_peak_is_the_ledgers_in_shards(model: str, fields: dict[str, Any]) -> None:
    s = parse({**JOB, **SHARDED, "model": model, **fields}, where="test", catalog=load())
    act = replay.act(Roles(s))
    assert act
    replayed = replay.Replay(Expandable(), 32 * MiB)
    replayed.all(act)
    (group,) = estimate(s, load()).groups
    peak = max(p.moment.allocated_bytes for p in group.phases)
    assert replayed.heap.process.most == pytest.approx(peak, rel=0.0015)


PARTITIONED: tuple[dict[str, Any], ...] = (
    {"checkpointing": "full"},
    {},
    {"checkpointing": "full", "task": "rm"},
    {"checkpointing": "full", "task": "dpo"},
    {"checkpointing": "full", "gpus": 64},
    {"checkpointing": "full", "grad_dtype": "fp32", "global_batch": 16},
    {"checkpointing": "full", "optimizer_impl": "foreach"},
)


@pytest.mark.parametrize("model", ["qwen2.5-1.5b", "llama-3-8b"])
@pytest.mark.parametrize("fields", PARTITIONED, ids=str)
def test_the_replays_peak_is_nearly_the_ledgers_under_zero_3(model: str, fields: dict[str, Any]) -> None:
    """The ledger bounds what is gathered; the replay knows which parameters these are."""
    given = {**JOB, "gpus": 4, "sharding": "zero3", "expandable_segments": True, "model": model, **fields}
    s = parse(given, where="test", catalog=load())
    assert replayed_peak(s) == pytest.approx(ledgers_peak(s), rel=0.02)


@pytest.mark.parametrize("zero_init", [False, True])
def test_the_replays_peak_is_nearly_the_ledgers_with_the_optimizer_on_the_host(zero_init: bool) -> None:
    """A head is tied, so that no gradient waits for the bucket while it is reduced."""
    zero = {"gpus": 4, "sharding": "zero3", "offload": {"optimizer": True}, "zero_init": zero_init}
    given = {**JOB, **zero, "expandable_segments": True, "model": "qwen2.5-1.5b", "checkpointing": "full"}
    s = parse(given, where="test", catalog=load())
    assert replayed_peak(s) == pytest.approx(ledgers_peak(s), rel=0.02)


FLAT = {"gpus": 4, "sharding": "fsdp1", "expandable_segments": True}
OWN = {"method": "lora", "lora": {"units": "own", "dtype": "bf16"}}
REENTRANT = {"checkpointing": "full", "versions": {"transformers": "4.57"}}
FLATS: tuple[dict[str, Any], ...] = (
    {},
    MIXED,
    {**MIXED, "checkpointing": "full"},
    REENTRANT,
    {**OWN, "checkpointing": "full"},
    {**OWN, **REENTRANT},
    {**OWN, "task": "dpo", "checkpointing": "full"},
    {**MIXED, "method": "lora", "lora": {"units": "layer"}, "checkpointing": "full"},
    {**MIXED, "task": "dpo", "checkpointing": "full"},
    {"task": "rm"},
    {**MIXED, "gpus": 64},
    {**MIXED, "offload": {"parameters": True}},
    {**OWN, **REENTRANT, "offload": {"parameters": True}},
    {**MIXED, "global_batch": 16, "no_sync": False},
    {"sharding": "ddp"},
    {"sharding": "ddp", "checkpointing": "full", "global_batch": 16},
    {"sharding": "ddp", "precision": "autocast"},
)


@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "llama-3-8b"])
@pytest.mark.parametrize("fields", FLATS, ids=str)
def test_the_replays_peak_is_the_ledgers_in_flat_parameters_and_beside_buckets(
    model: str, fields: dict[str, Any]
) -> None:
    s = parse({**JOB, **FLAT, "model": model, **fields}, where="test", catalog=load())
    assert replayed_peak(s) == pytest.approx(ledgers_peak(s), rel=0.0015)


@pytest.mark.parametrize(
    "fields", [OWN, {"sharding": "ddp", "method": "lora"}, {**OWN, **REENTRANT, "method": "qlora"}]
)
def test_the_replays_peak_of_adapters_is_nearly_the_ledgers(fields: dict[str, Any]) -> None:
    """The next layer is gathered before the last adapter's backward, in the replay after the layer's."""
    s = parse({**JOB, **FLAT, "model": "llama-3-8b", **fields}, where="test", catalog=load())
    assert replayed_peak(s) == pytest.approx(ledgers_peak(s), rel=0.005)


@pytest.mark.parametrize("version", ["2024.8", "2024.11.10"])
@pytest.mark.parametrize("fields", [{}, {"method": "lora", "loss": "full", "micro_batch": 4}], ids=str)
def test_the_replays_peak_is_the_ledgers_where_checkpoints_leave_for_the_host(
    version: str, fields: dict[str, Any]
) -> None:
    """One at a time, and through buffers."""
    own = {"trainer": "unsloth", "versions": {"unsloth": version}, "model": "llama-3-8b", "seq_len": 4096, **fields}
    s = parse({**JOB, "precision": "bf16", **own}, where="test", catalog=load())
    assert s.offload.activations
    assert replayed_peak(s) == pytest.approx(ledgers_peak(s), rel=0.0015)


@pytest.mark.parametrize("model", ["llama-3-8b", "qwen2.5-0.5b"])
@pytest.mark.parametrize(
    "trainer", [{"framework": "trl"}, {"trainer": "axolotl"}, {"trainer": "torchtune", "loss": "full"}], ids=str
)
def test_the_replays_peak_is_the_ledgers_where_a_few_checkpoints_wait(trainer: dict[str, Any], model: str) -> None:
    """Five in forward, fewer beside what the final norm saves; two where a layer runs again."""
    own = {"checkpointing": "full", "seq_len": 4096, "offload": {"activations": True}, "method": "lora", **trainer}
    s = parse({**JOB, "precision": "bf16", "model": model, **own}, where="test", catalog=load())
    assert replayed_peak(s) == pytest.approx(ledgers_peak(s), rel=0.003)


def test_a_stash_is_full_with_five_and_is_dropped_as_backward_begins() -> None:
    """The final norm's input, its cast, what it returns and a number a row wait there in place of layers' inputs."""
    _, model = job(framework="trl", offload={"activations": True}, checkpointing="full", method="lora")
    assert model.beside_norm == 0
    model = replace(model, beside_norm=9)
    replayed = replay.Replay(Expandable(), 32 * MiB)
    replayed.load(model)
    kept = replayed.forward(model)
    assert len(replayed.stashed) == 5
    replayed.backward(model, kept)
    assert not replayed.stashed


def replayed_peak(s: Scenario) -> int:
    act = replay.act(Roles(s))
    assert act
    replayed = replay.Replay(Expandable(), 32 * MiB)
    replayed.all(act)
    return replayed.heap.process.most


def ledgers_peak(s: Scenario) -> int:
    (group,) = estimate(s, load()).groups
    return max(p.moment.allocated_bytes for p in group.phases)


def test_units_by_hand() -> None:
    """Qwen2.5 0.5B on 32 ranks: 896 rows of the down projection are 28 a rank, the 151,936 of the embedding 4,748;
    the 128 of a key projection 4. A layer has 14,912,384 parameters, none of which pads; fp32 is gathered in bf16."""
    _, model = job(gpus=32, sharding="fsdp2", precision="fsdp-mixed")
    layer, root = model.units[0], model.units[-1]
    assert (len(model.units), model.weights) == (25, ())
    assert sum(layer.whole) == 4 * 14_912_384
    assert sum(layer.shards) == 4 * 14_912_384 // 32
    assert 4 * 28 * 4864 in layer.shards and 4 * 4 * 896 in layer.shards
    assert (layer.cast, layer.buffer, sum(layer.gathered)) == (14_912_384 // 16, 2 * 14_912_384, 2 * 14_912_384)
    assert (layer.reducing, layer.reduced) == (4 * 14_912_384, 14_912_384 // 8)
    assert root.shards == (4 * 4748 * 896, 4 * 28)  # the head is tied
    assert model.states[0] == (4 * 4748 * 896,) * 2


def test_what_shards_pad() -> None:
    """On 48 ranks 896 rows are 19 a rank, as many as 912 have."""
    _, model = job(gpus=48, sharding="fsdp2")
    assert model.units[-1].shards[-1] == 2 * 19
    assert model.units[-1].gathered[-1] == 2 * 912
    assert model.units[0].cast == 0  # bf16 is gathered as it lies


def test_adapters_alone_are_reduced() -> None:
    """Rank 8 beside each linear, of 896 and 128 or 4,864; the layers gather both, the root reduces nothing."""
    _, model = job(gpus=4, sharding="fsdp2", precision="fsdp-mixed", method="lora")
    layer, root = model.units[0], model.units[-1]
    adapter = layer.reducing // 4
    assert adapter == 8 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))
    assert layer.buffer == 2 * (14_912_384 + adapter)
    assert (root.reducing, root.reduced) == (0, 0)


def test_a_gradients_part_comes_back_from_the_host_for_its_norm_and_its_cast() -> None:
    """Rank 8 beside `down_proj`, of 4,864 and 896, over two ranks: parts of 19,456 and 3,584 elements.

    DeepSpeed 0.19.8 `stage3.py`, `partition_grads`: two bytes an element, beside which come and go eight, then four.
    """
    lora = {"method": "lora", "lora": {"rank": 8, "targets": ["down_proj"], "dtype": "bf16"}, "grad_dtype": "bf16"}
    _, model = job(gpus=2, sharding="zero3", offload={"optimizer": True}, **lora)
    assert isinstance(model.partitioned, Partitioned) and model.states == model.passing == ()
    bucket = 24 * 2 * (8 * 4864 + 896 * 8)
    down = ((1, 38_912), (2, 155_648), (2, 0), (2, 77_824), (2, 0), (1, 0))
    up = ((1, 7_168), (2, 28_672), (2, 0), (2, 14_336), (2, 0), (1, 0))
    assert model.partitioned.reductions[-1] == ((0, bucket), *down, *up, (0, 0))


def test_four_bits_are_for_linears_alone() -> None:
    """Mixtral's routers and experts, embedding and norms stay whole."""
    s, model = job(model="mixtral-8x7b", method="qlora")
    assert sum(model.weights) == held(s, "weights") + held(s, "adapter")


def test_the_first_layer_differs_above_a_frozen_embedding() -> None:
    """Its input wants no gradient, unless checkpointing asks for one."""
    _, plain = job(method="lora")
    _, again = job(method="lora", checkpointing="full")
    assert plain.layers[0] is not plain.layers[1] is plain.layers[2]
    assert again.layers[0] is again.layers[1]


def test_a_step_in_backward_leaves_no_gradient_and_allocates_beside_each() -> None:
    """AdamW's single tensor has two temporaries of the gradient's size, LOMO 8 bytes beside the 2 of the next one."""
    fields = {"optimizer_in_backward": True, "optimizer_impl": "single"}
    assert job(**fields)[1].beside == 2 and job(optimizer="lomo")[1].beside == 4 and job()[1].beside is None
    assert job(**fields)[1].passing == ()
    kept = [replay.reserve(act(**own), 0).undisturbed for own in ({"optimizer_impl": "single"}, fields)]
    assert kept[1] < kept[0]


def act(**fields: Any) -> replay.Act:
    found = replay.act(Roles(parse({**JOB, **fields}, where="test", catalog=load())))
    assert found
    return found


def test_flat_parameters_by_hand() -> None:
    """Qwen2.5 0.5B on 32 ranks, whose layers have 14,912,384 parameters, 466,012 a rank; the root 151,936 x 896 + 896.

    fp32 shards are cast to bf16 and gathered, gradients are joined in bf16 and reduced in fp32.
    """
    _, model = job(gpus=32, sharding="fsdp1", precision="fsdp-mixed", grad_dtype="fp32")
    assert model.flats and (model.weights, model.units) == ((), ())
    layer, root = model.flats.layers[0], model.flats.root
    n = 466_012
    assert sum(layer.whole) == 4 * 14_912_384 and len(layer.whole) == 12
    assert layer[1:] == (4 * n, 2 * n, 2 * 32 * n, 2 * 32 * n, 4 * 32 * n, 4 * n, 0)
    assert root.shard == 4 * (TABLE + 896) // 32  # the head is tied
    assert model.states == ((4 * n,) * 2,) * 24 + ((root.shard,) * 2,)
    assert (model.flats.adapters, model.flats.ahead, model.flats.offload) == (((),) * 24, True, False)


def test_flat_parameters_are_padded_to_equal_parts() -> None:
    """On 48 ranks 310,674.67 elements are 310,675; bf16 is gathered as it lies, and reduced so."""
    _, model = job(gpus=48, sharding="fsdp1")
    assert model.flats
    assert model.flats.layers[0][1:] == (2 * 310_675, 0, *(2 * 48 * 310_675,) * 2, 0, 2 * 310_675, 0)


def test_adapters_that_are_units_are_flat_parameters_of_their_own() -> None:
    """Rank 8 beside seven linears: two matrices each. The layer itself has no gradient."""
    _, model = job(gpus=4, sharding="fsdp1", **OWN)
    assert model.flats
    layer, (first, *others) = model.flats.layers[0], model.flats.adapters[0]
    assert (layer.joined, layer.reduced, model.flats.root.joined) == (0, 0, 0)
    assert len(others) == 13
    assert first.shard == 2 * 8 * 896 // 4
    assert first.joined == first.gathered == 2 * 8 * 896
    assert len(model.states) == 24 * 14


def test_layers_in_four_bits_are_gathered_as_they_are_packed() -> None:
    """NF4: half a byte an element; the scales stay whole on each GPU, and the root in bf16."""
    _, model = job(gpus=4, sharding="fsdp1", **{**OWN, "method": "qlora"})
    assert model.flats
    layer, whole = model.flats.layers[0], int(14_912_384 / 2)
    assert len(model.weights) == 24 * 7 and max(model.weights) == int(896 * 4864 * (NF4[True] - 0.5))
    assert layer == ((), whole // 4, 0, whole, 0, 0, 0, 0)
    assert model.flats.root.gathered == 2 * (TABLE + 896)


def test_buckets_by_hand() -> None:
    """Gradients come from the last parameter on: the final norm, then the last layer. The gradient that fills a bucket
    closes it: norms of 896 and the down projection fill 1 MiB; then 25 MiB, and the embedding ends the last one."""
    _, model = job(gpus=2)
    assert model.buckets
    first, *others = model.buckets.rebuilt
    assert model.buckets.first == (first + sum(others),)
    down, last = 2 * 896 * 4864, 2 * TABLE
    # final norm, two norms of the last layer, its down projection
    assert first == 2 * 896 * 3 + down
    assert all(bucket >= 25 * MiB for bucket in others)
    assert all(bucket < 25 * MiB + down for bucket in others[:-1])
    assert last <= others[-1] < last + 25 * MiB
    assert first + sum(others) == 2 * (TABLE + 896 + 24 * 14_912_384)
    # the embedding is alone in its bucket, and broadcast as it lies
    assert sum(model.buckets.broadcast) == 2 * (896 + 24 * 14_912_384)
    assert all(250 * MiB <= sent for sent in model.buckets.broadcast[:-1])


def test_only_a_trained_model_under_ddp_has_buckets() -> None:
    assert job()[1].buckets is None
    assert job(gpus=2, optimizer="none")[1].buckets is None
    _, adapters = job(gpus=2, method="lora")
    assert adapters.buckets and sum(adapters.buckets.rebuilt) == sum(gradients(adapters))


def test_buckets_stay_where_ddp_looks_for_unused_parameters() -> None:
    """They are filled in the order of the parameters, the embedding alone, and allocated the other way round.

    Transformers' Trainer has DDP look unless its model checkpoints (`trainer.py:749` of 5.23).
    """
    _, model = job(gpus=2, framework="trl", precision="bf16", checkpointing="none")
    assert model.buckets and model.buckets.rebuilt == ()
    assert model.buckets.first[-1] == 2 * TABLE
    assert sum(model.buckets.first) == 2 * (TABLE + 896 + 24 * 14_912_384)
    assert all(bucket >= 25 * MiB for bucket in model.buckets.first[1:])
    again = job(gpus=2, framework="trl", checkpointing="full")[1].buckets
    assert again and len(again.first) == 1 and again.rebuilt
    adapters = job(gpus=2, framework="trl", checkpointing="full", method="lora")[1].buckets
    assert adapters and not adapters.rebuilt


def test_outputs_replace_those_of_the_micro_batch_before_as_the_model_returns() -> None:
    """In `out = model(...)` the old logits, 151,936 numbers of each of 1,024 tokens, go before the loss is computed.

    A loss within the model comes first, so that there its softmax stands beside the old logits.
    """
    _, model = job(outputs_kept="next", outputs_fp32=True, versions={"transformers": "4.57"})
    steps = model.head.forward.steps
    place = steps.index((REPLACED, 0))
    assert steps[place - 1] == (model.head.late, 4 * 1024 * 151_936)
    assert (REPLACED, 0) not in job(outputs_kept="next")[1].head.forward.steps


def test_one_rank_of_fsdp_2_gathers_nothing_and_copies_each_parameter() -> None:
    sharding = {"sharding": "fsdp2", "precision": "fsdp-mixed"}
    _, alone = job(gpus=1, **sharding)
    _, two = job(gpus=2, **sharding)
    assert {(unit.cast, unit.buffer) for unit in alone.units} == {(0, 0)}
    assert all(unit.cast and unit.buffer for unit in two.units)
    assert [sum(unit.gathered) for unit in alone.units] == [sum(unit.gathered) for unit in two.units]


def test_float8_linears_of_layers_are_gathered_in_a_byte() -> None:
    """torchao 0.13 `float8/fsdp_utils.py`, `fsdp_pre_all_gather`; norms, embedding and head stay in bf16."""
    fields = {
        "trainer": "torchtitan",
        "gpus": 8,
        "model": "llama-3-8b",
        "seq_len": 2048,
        "versions": {"torchtitan": "0.2"},
    }
    _, wide = job(**fields, compile="model", float8="tensorwise", float8_all_gather=False)
    _, narrow = job(**fields, compile="model", float8="tensorwise", float8_all_gather=True)
    linears, norms = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336), 2 * 4096
    assert (wide.units[0].buffer, narrow.units[0].buffer) == (2 * (linears + norms), linears + 2 * norms)
    assert narrow.units[0].cast * 8 == narrow.units[0].buffer == sum(narrow.units[0].gathered)
    assert narrow.units[-1] == wide.units[-1]
