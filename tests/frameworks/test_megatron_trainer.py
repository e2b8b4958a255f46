"""Megatron-LM as a trainer: what a job that names it gets, its parts and stages, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from calc.catalog.catalog import load
from calc.estimate.estimate import estimate, speed
from calc.frameworks import megatron_core
from calc.memory.megatron import MegatronLayer
from calc.memory.optimizer import PrecisionAware
from calc.models.architecture import ConfigError, LayerSpec, language, parameters, vision_tensors
from calc.models.slices import account_for, chunk, chunk_layers, part, stage
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario, ScenarioError
from calc.step.roles import Roles

LLAMA = {
    "model": "llama-3.1-8b", "task": "sft", "gpu": "h100-sxm", "gpus": 8, "framework": "torch", "trainer": "megatron",
    "seq_len": 4096,
}  # fmt: skip
P, V, H, LAYERS = 8_030_261_248, 128_256, 4096, 32
SHAPES = (6144 + 4096 + 3 * 14_336 + V) * H  # of queries, keys and values, of what follows attention, fc1, fc2, head


def job(**fields: Any) -> Scenario:
    """A job of Megatron-LM's."""
    return parse(LLAMA | fields)


def lines(s: Scenario, phase: str = "step", group: int = 0) -> dict[str, int]:
    """Bytes by component, of the roles alone, at a phase of a GPU group."""
    found: dict[str, int] = {}
    (moment,) = (p.moment for p in estimate(s).groups[group].phases if p.name == phase)
    for line in moment.lines:
        if line.role != "process":
            found[line.component] = found.get(line.component, 0) + line.bytes
    return found


def test_its_own_habits() -> None:
    s = job()
    assert (s.sharding, s.precision, s.grad_dtype, s.optimizer_impl) == ("megatron", "mixed", "fp32", "fused")
    assert not s.sequence_parallel
    assert job(tensor_parallel=2).sequence_parallel


def test_buffers_are_whole_and_the_optimizer_is_shared() -> None:
    """2 + 4 bytes a parameter, and 12 over eight ranks; every tensor is a multiple of 64 elements.

    Beside them one 16-bit gradient that nobody writes for each shape of a product's weights.
    """
    found = lines(job())
    assert found["weights"] == 2 * P
    assert found["gradients"] == 4 * P + 2 * SHAPES
    assert found["master_weights"] + found["optimizer_states"] == 12 * P // 8


def test_muon_keeps_one_moment_of_matrices_and_shares_whole_ones() -> None:
    """4 bytes each beside masters of 4; of embedding, head and norms AdamW's 8. The largest matrix, of gates and what
    they multiply, is made orthogonal in 12 bytes; cut over two ranks, in 16 of the whole one.
    """
    rest = 2 * V * H + (2 * LAYERS + 1) * H
    found, largest = lines(job(optimizer="muon")), 2 * 14_336 * H
    assert found["master_weights"] + found["optimizer_states"] == (8 * P + 4 * rest) // 8
    assert found["temporary"] == 12 * largest
    assert lines(job(optimizer="muon", tensor_parallel=2))["temporary"] == 16 * largest


def test_ms_swifts_muon_makes_each_ranks_part_orthogonal() -> None:
    """muon_tp_mode blockwise (4.1.0 arguments/megatron_args.py:432): half of the matrix, in 12 bytes, and less work."""
    swift = {"trainer": "megatron-swift", "optimizer": "muon", "sequence_parallel": True}
    assert lines(job(**swift, tensor_parallel=2))["temporary"] == 12 * 14_336 * H
    own, whole = (
        next(t for t in speed(estimate(job(**{**swift, **fields}))).terms if t.name == "orthogonalization")
        for fields in ({"tensor_parallel": 2}, {"trainer": "megatron", "tensor_parallel": 2})
    )
    assert own.values["O"] < whole.values["O"] / 2


def test_muons_products_take_time() -> None:
    """Five steps of 2·(2·a·a·b + a·a·a) for each matrix a x b, over eight ranks; two that cut them both do all."""
    shapes = [(H, 6144), (H, H), (H, 2 * 14_336), (H, 14_336)]
    work = 5 * LAYERS * sum(2 * a * a * (2 * b + a) for a, b in shapes)
    found = [speed(estimate(job(optimizer="muon", tensor_parallel=ranks))).terms for ranks in (1, 2)]
    one, two = (next(t for t in terms if t.name == "orthogonalization") for terms in found)
    assert one.seconds == pytest.approx(work / 8 / one.values["F"] * one.values["u"])
    assert two.seconds == pytest.approx(2 * one.seconds)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"offload.optimizer": True}, "offload.optimizer"),
        ({"offload.fraction": 0.5}, "offload.fraction"),
        ({"data_parallel_sharding_strategy": "optim"}, "data_parallel_sharding_strategy"),
        ({"trainer": "axolotl"}, "optimizer"),
        ({"trainer": "megatron-swift", "versions": {"megatron-swift": "4.0"}}, "optimizer"),
        ({"trainer": "megatron-swift", "method": "lora"}, "optimizer"),
    ],
)
def test_muon_is_refused_where_it_is_not_modelled(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ScenarioError) as error:
        job(optimizer="muon", **fields)
    assert error.value.field == field


def test_a_note_names_the_schedule_that_runs() -> None:
    plain, pieces = job(pipeline_parallel=2), job(pipeline_parallel=2, virtual_pipeline=2)
    ends = [next(note for note in estimate(s).notes if note.startswith("computed with")) for s in (plain, pieces)]
    assert [note.rpartition(", ")[2] for note in ends] == ["1F1B", "1F1B interleaved"]


def test_depths_of_multi_token_prediction_lie_on_the_last_stage() -> None:
    """A depth: a layer, 2·h² that join two streams, three norms, and there a copy of the embedding; 2 bytes each."""
    cut = {"gpus": 16, "pipeline_parallel": 2, "global_batch": 32}
    layer = (P - 2 * V * H - H) // LAYERS
    for group, more in ((0, 0), (1, layer + 2 * H * H + 3 * H + V * H)):
        one, none = (lines(job(**cut, mtp_num_layers=n), group=group)["weights"] for n in (1, None))
        assert one - none == 2 * more


def test_a_depth_takes_its_share_of_the_time() -> None:
    """Its layer and what joins beside 32 layers, and its logits beside as many."""
    of = [speed(estimate(job(mtp_num_layers=n))).terms for n in (None, 1)]
    seconds = [next(t.seconds for t in terms if t.name == "matrix work") for terms in of]
    layer, head = (P - 2 * V * H) // LAYERS, V * H
    assert seconds[1] / seconds[0] == pytest.approx(1 + (layer + 2 * H * H + head) / (LAYERS * layer + head), rel=1e-3)


def test_all_experts_give_autograd_one_gradient_a_shape() -> None:
    """Qwen3 30B-A3B: 2·2,048·(5,120 + 4,096 + 2·768 + 768 + 151,936), however many experts there are."""
    for ranks in (1, 8):
        s = job(model="qwen3-30b-a3b", expert_parallel=ranks)
        (line,) = Roles(s).placed["actor"].engine.placeholders()  # type: ignore[attr-defined]
        assert line.bytes == 2 * 2048 * (5120 + 4096 + 3 * 768 + 151_936)


def test_a_data_loader_makes_a_mask_unless_it_is_told_not_to() -> None:
    """One byte for each pair of positions of a micro batch, of which every rank has its own rows."""
    long = {"seq_len": 16_384, "context_parallel": 8, "checkpointing": "full"}
    made, none = (
        sum(lines(job(**long, **said), "backward").values())
        for said in ({}, {"create_attention_mask_in_dataloader": False})
    )
    assert made - none == 16_384**2 // 8
    with pytest.raises(ScenarioError, match="create_attention_mask_in_dataloader"):
        parse({"model": "llama-3.1-8b", "task": "sft", "gpu": "h100-sxm", "create_attention_mask_in_dataloader": True})


def test_the_vocabulary_is_padded_to_a_multiple_of_128_on_each_rank() -> None:
    """Qwen2.5's 152,064 rows are a multiple of 128·2, those of its small models, 151,936, are not one of 128·4."""
    small = job(model="qwen2.5-0.5b", tensor_parallel=2).architecture
    assert part(small, 1).vocab == 151_936
    assert part(small, 2).vocab_part == 151_936 // 2 + 64
    assert small.vocab == 151_936


def test_stages_have_equal_layers_and_a_tied_embedding_at_both_ends() -> None:
    tied = job(model="llama-3.2-1b", pipeline_parallel=2, global_batch=8).architecture
    first, last = (stage(tied, index, 2) for index in range(2))
    assert first.layers == last.layers == 8
    assert (first.embeds, first.ends, last.embeds, last.ends) == (True, False, False, True)
    assert not last.tied


def test_stages_have_the_layers_that_they_are_told_or_fewer_in_the_last() -> None:
    """32 layers in three stages: 11, 11 and 10; told 10 in the first and 9 in the last, 13 are between them."""
    for given, counts in ((None, (11, 11, 10)), ([10, 13, 9], (10, 13, 9))):
        s = job(pipeline_parallel=3, gpus=6, global_batch=8, pipeline_layers=given)
        placed = Roles(s).placed
        assert tuple(placed[f"stage {n}"].engine.replica.arch.layers for n in (1, 2, 3)) == counts
        assert parse(s.as_dict()).pipeline_layers == (tuple(given) if given else None)


def test_stages_have_pieces_of_the_model_that_take_turns() -> None:
    """Two stages with two pieces each: layers 1 to 8 and 17 to 24, then 9 to 16 and 25 to 32."""
    marked = tuple(LayerSpec(slides=n % 16 < 8) for n in range(LAYERS))
    whole = replace(job().architecture, specs=marked)
    for index, slides in ((0, True), (1, False)):
        found = stage(whole, index, 2, None, 2)
        assert [spec.slides for spec in found.specs] == [slides] * 16
        assert (found.embeds, found.ends) == (index == 0, index == 1)
    with pytest.raises(ConfigError, match="virtual_pipeline: given 3, allowed: such that 2 stages with as many chunks"):
        stage(whole, 0, 2, None, 3)


@pytest.mark.parametrize(
    ("counts", "chunks", "pieces", "names"),
    [
        # 94 layers and both ends are 96 in 8 stages; 28 and both are 30 in two
        ((11, *[12] * 6, 11), 2, [[5, *[6] * 7], [*[6] * 7, 5]], ["embedding", "loss"]),
        ((14, 14), 3, [[4, 5], [5, 5], [5, 4]], ["embedding", "loss"]),
        ((11, 12), 2, [[5, 6], [6, 6]], ["embedding"]),
        ((12, 11), 2, [[6, 6], [6, 5]], ["loss"]),
        # told to first and last stage, each divides its own
        ((10, 12, 10), 2, [[5, 6, 5], [5, 6, 5]], []),
    ],
)
def test_uneven_stages_divide_their_layers_or_count_the_ends_as_one(
    counts: tuple[int, ...], chunks: int, pieces: list[list[int]], names: list[str]
) -> None:
    """Megatron-core 0.16.0 `transformer_block.py`, `get_num_layers_to_build`."""
    assert chunk_layers(counts, chunks) == pieces
    assert list(account_for(counts, chunks)) == [f"account_for_{end}_in_pipeline_split" for end in names]
    whole = replace(job().architecture, specs=tuple(range(sum(counts))))
    seen = [layer for n in range(chunks) for index in range(len(counts))
            for layer in chunk(whole, index, len(counts), chunks, n, counts).specs]  # fmt: skip
    assert seen == list(range(sum(counts)))
    for index, count in enumerate(counts):
        assert stage(whole, index, len(counts), counts, chunks).layers == count


def test_interleaved_stages_keep_more_micro_batches_of_fewer_layers() -> None:
    """Of two stages the first runs 2·(2 - 1) + (2 - 1)·2 = 4 forwards of 8 layers ahead, and one more: 40 layers.

    Without pieces it keeps two micro batches of 16 layers, 32. The last piece has received its inputs; beside these the
    loop holds an earlier one, its gradient, the last gradient sent and the last received, without pieces that alone.
    """
    cut = {"pipeline_parallel": 2, "global_batch": 16, "checkpointing": "full"}
    plain, turns = (lines(job(**cut, **more), "forward") for more in ({}, {"virtual_pipeline": 2}))
    layer = 4096 * H * 2
    assert turns["communication"] == (5 + 4) * layer
    assert plain["communication"] == layer
    assert turns["checkpoints"] + turns["communication"] == (5 * 8 + 4) * layer
    assert plain["checkpoints"] == 2 * 16 * layer
    assert turns["weights"] == plain["weights"]
    faster = [next(t for t in speed(estimate(job(**cut, **more))).terms if t.name == "bubble").seconds
              for more in ({}, {"virtual_pipeline": 2})]  # fmt: skip
    assert faster[1] == pytest.approx(faster[0] / 2, rel=0.1)


def test_a_rank_of_a_ring_has_its_part_of_the_sequence_and_all_keys() -> None:
    """Of two: half the activations and logits, the same weights and gradients, states over all eight GPUs.

    Attention has two ranks' keys and values and two steps' outputs in forward, 4·(k + v) + 4·q bytes a token.
    """
    whole, half = job(seq_len=8192), job(seq_len=8192, context_parallel=2, global_batch=8)
    one, two = lines(whole, "forward"), lines(half, "forward")
    assert two["activations"] == one["activations"] // 2
    assert two["weights"] == one["weights"] and two["gradients"] == one["gradients"]
    assert two["optimizer_states"] == one["optimizer_states"]
    (ring,) = [op for op in MegatronLayer(Roles(half).placed["actor"].engine.replica.run).layer().ops
               if op.name == "attention"]  # fmt: skip
    assert ring.scratch.tokens == {"kv": 2 * 2 * 2, "q": 2 * 2}


def test_the_first_stage_holds_a_micro_batch_for_each_stage_behind_it() -> None:
    """Two stages, 16 layers each: the first keeps two micro batches' layers, the last one's and its logits."""
    s = job(pipeline_parallel=2, global_batch=8)
    layer = 4096 * (8 * H + 4 * 4096 + 4 * 1024 + 4 * 32 + 6 * 14_336 + 8)
    first, last = lines(s, "forward"), lines(s, "forward", 1)
    assert first["activations"] == pytest.approx(2 * 16 * layer, rel=0.01)
    assert last["activations"] == pytest.approx(16 * layer, rel=0.01)
    assert last["logits"] == pytest.approx(4096 * V * 6, rel=0.02)


MIXTRAL = {"model": "mixtral-8x7b", "gpus": 16, "gpus_per_node": 8, "global_batch": 16}


def test_experts_are_spread_and_the_rest_is_not() -> None:
    """8 experts of 3·4096·14336 in 32 layers; four of 16 ranks have the same two experts."""
    found = lines(job(**MIXTRAL, expert_parallel=8))
    experts = 32 * 8 * 3 * H * 14_336
    rest = 46_702_792_704 - experts
    padding = 2 * 128 * 16 * 2
    assert 2 * (experts // 8 + rest) <= found["weights"] <= 2 * (experts // 8 + rest) + padding
    assert found["optimizer_states"] == pytest.approx(8 * (experts / 8 / 2 + rest / 16), rel=1e-6)


@pytest.mark.parametrize("fields", [{"expert_parallel": 4}, {"expert_parallel": 8}, {"expert_tensor_parallel": 2}])
def test_more_ranks_that_share_experts_never_need_more(fields: dict[str, int]) -> None:
    whole, shared = (estimate(job(**MIXTRAL, **more)).groups[0] for more in ({}, fields))
    assert shared.peak.moment.device_bytes < whole.peak.moment.device_bytes


def test_uneven_tokens_cost_memory_and_time_where_they_go() -> None:
    even, uneven = (estimate(job(**MIXTRAL, expert_parallel=8, expert_imbalance=n)) for n in (1, 2))
    assert uneven.groups[0].peak.moment.device_bytes > even.groups[0].peak.moment.device_bytes
    exchanged = [next(t for t in speed(e).terms if t.name == "expert parallel").seconds for e in (even, uneven)]
    assert exchanged[1] == pytest.approx(2 * exchanged[0])


def test_a_capacity_bounds_an_uneven_router_and_padding_makes_every_expert_as_full() -> None:
    """`apply_router_token_dropping`, `get_capacity`: at most twice an even share, or twice it whatever is picked."""

    def peak(**more: object) -> int:
        return estimate(job(**MIXTRAL, expert_parallel=8, **more)).groups[0].peak.moment.device_bytes  # type: ignore[arg-type]

    free, bounded = (peak(expert_imbalance=n, expert_capacity=c) for n, c in ((3, None), (3, 2)))
    assert peak() < bounded < free
    assert bounded == peak(expert_imbalance=2, expert_capacity=2)
    full = [peak(expert_imbalance=n, expert_capacity=2, expert_padding=True) for n in (1, 3)]
    assert full[0] == full[1] > bounded  # what is sent, too


def test_an_optimizer_on_the_host_leaves_weights_and_gradients() -> None:
    """16 bytes a parameter there: masters, gradients, pinned, so each shard a power of two, and two moments.

    Masters are cast from pinned copies of 16 bits, and pageable (`HybridDeviceOptimizer`).
    """
    s = job(**{"offload.optimizer": True})
    found = lines(s)
    assert found["weights"] + found["gradients"] == 6 * P + 2 * SHAPES
    assert "master_weights" not in found and "optimizer_states" not in found
    (last,) = [p.moment for p in estimate(s).host_phases if p.name == "after the first step"]
    on_host = {component: 0 for component in ("master_weights", "gradients", "optimizer_states")}
    for line in last.lines:
        on_host[line.component] += line.bytes
    assert on_host["optimizer_states"] == 8 * P
    assert 4 * P == on_host["master_weights"] <= on_host["gradients"] < 8 * P


@pytest.mark.parametrize("trainer", ["megatron", "megatron-swift"])
def test_a_share_of_the_optimizer_may_be_on_the_host(trainer: str) -> None:
    """Three quarters of the masters and moments, 12 bytes a parameter over the ranks, stay on the GPUs."""
    held = [lines(job(trainer=trainer, **{"offload.fraction": share})) for share in (0, 0.25)]
    whole, rest = (found["master_weights"] + found["optimizer_states"] for found in held)
    assert rest == pytest.approx(0.75 * whole, rel=1e-4)


def test_masters_of_a_share_on_the_host_stay_unless_the_optimizer_knows_of_precisions() -> None:
    """Qwen3 30B-A3B over 16 H100, as Megatron-Bridge measured it after a step: 47.2 GB, 43.4, 39.6, 35.6 and 32.0.

    NVIDIA-NeMo/Megatron-Bridge `skills/nemo-mbridge-perf-cpu-offloading/card.yaml` at 067f987, whose recipe leaves
    `use_precision_aware_optimizer` off (`recipes/qwen/h100/qwen3_moe.py`).
    """
    bridge = {
        "model": "qwen3-30b-a3b", "task": "pretrain", "gpu": "h100-sxm", "gpus": 16, "trainer": "megatron",
        "tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 4, "seq_len": 4096, "micro_batch": 1,
        "global_batch": 8, "checkpointing": "full", "loss": "fused", "cross_entropy_fusion_impl": "te",
        "create_attention_mask_in_dataloader": False,
    }  # fmt: skip
    measured = {0: 47.2e9, 0.25: 43.4e9, 0.5: 39.6e9, 0.75: 35.6e9, 1: 32.0e9}
    for share, gigabytes in measured.items():
        hosted = {"offload.fraction": share, "offload.masters": False} if share else {}
        found = lines(parse({**bridge, **hosted}))
        # what its layers leave behind as 0.16.1 was traced, 0.4 GB, is not in these figures
        assert sum(found.values()) - found["checkpoints"] == pytest.approx(gigabytes, rel=0.007)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"offload.fraction": 1}, "offload.fraction: given 1 with trainer megatron, allowed: below 1"),
        ({"offload.fraction": 0.5, "offload.optimizer": True}, "offload.fraction: given 0.5 with offload.optimizer"),
        ({"offload.fraction": 0.5, "data_parallel_sharding_strategy": "optim"}, "data_parallel_sharding_strategy: "),
    ],
)
def test_a_share_on_the_host_is_a_part_of_the_distributed_optimizer(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError) as error:
        job(**fields)
    assert said in str(error.value)


def test_states_have_formats_of_their_own_where_the_optimizer_knows_of_them() -> None:
    """Over eight ranks: an fp32 master's lower half, two bytes, and moments of one and four; gradients of two, whole.

    The step has fp32 copies of the first moment alone, and of no gradient.
    """
    found = lines(job(use_precision_aware_optimizer=True, grad_dtype="bf16", exp_avg_dtype="fp8"))
    assert found["master_weights"] == 2 * P // 8
    assert found["optimizer_states"] == (1 + 4) * P // 8
    assert found["temporary"] == 4 * P // 8
    assert found["gradients"] == 2 * P + 2 * SHAPES


def test_gradients_in_bf16_are_copied_to_fp32_for_a_step_that_knows_no_formats() -> None:
    """A rank's eighth of them, four bytes each (`_copy_model_grads_to_main_grads`)."""
    found = lines(job(grad_dtype="bf16"))
    assert (found["gradients"], found["temporary"]) == (2 * P + 2 * SHAPES, 4 * P // 8)


@pytest.mark.parametrize(
    ("formats", "widened"),
    [(("fp32", "bf16", "bf16"), 0), (("fp32", "bf16", "fp32"), 4), (("fp16", "bf16", "bf16"), 4),
     (("fp16", "fp16", "fp8"), 12)],
)  # fmt: skip
def test_a_step_copies_what_its_kernel_cannot_read(formats: tuple[str, str, str], widened: int) -> None:
    """TransformerEngine `fused_adam.py`, `get_unscaled_state` and `fuse_unscale`."""
    assert PrecisionAware(*formats).widened == widened


@pytest.mark.parametrize(
    ("trainer", "release", "copied"),
    # two moments of four bytes before Transformer Engine 2.13; ms-swift 3.12 recommends 2.10, and 4.6 is on 2.16
    [("megatron", "2.12", 8), ("megatron", "2.13", 0), ("megatron-swift", "3.12", 8), ("megatron-swift", "4.6", 0)],
)
def test_moments_in_bf16_were_copied_to_fp32_for_a_step(trainer: str, release: str, copied: int) -> None:
    """A rank's eighth of both, before `fuse_unscale`: v2.12 has none, v2.13 has it (`fused_adam.py`)."""
    library = "transformer-engine" if trainer == "megatron" else trainer
    aware = dict(use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    found = lines(job(trainer=trainer, versions={library: release}, **aware))
    assert found.get("temporary", 0) == copied * P // 8


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"exp_avg_dtype": "bf16"}, "exp_avg_dtype: given bf16, allowed: fp32, or with use_precision_aware_optimizer"),
        (
            {"use_precision_aware_optimizer": True, "optimizer": "muon"},
            "optimizer: given muon with use_precision_aware",
        ),
        ({"use_precision_aware_optimizer": True, "offload.optimizer": True}, "use_precision_aware_optimizer: given"),
        ({"grad_dtype": "bf16", "trainer": "megatron-swift"}, "grad_dtype: "),
        ({"float8": "rowwise"}, "float8: given 'rowwise' with trainer megatron"),
        ({"float8": "mxfp8", "fp8_param_gather": True}, "fp8_param_gather: given true with float8 mxfp8"),
        ({"fp8_param_gather": True}, "fp8_param_gather: given true with float8 none, allowed: false"),
        (
            {"float8": "delayed", "data_parallel_sharding_strategy": "optim"},
            "float8: given 'delayed' with Megatron-FSDP",
        ),
    ],
)
def test_narrow_formats_need_what_has_them(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError) as error:
        job(**fields)
    assert said in str(error.value)


def test_a_fused_cross_entropy_is_compiled() -> None:
    """Its cast stays beside the probabilities while it runs."""
    full, fused = (lines(job(loss=loss), "forward")["logits"] for loss in ("full", "fused"))
    assert fused - full == pytest.approx(4 * 4096 * V, rel=1e-3)


HYBRID = {"model": "qwen3.5-4b", "global_batch": 8}


def test_linear_attention_is_cut_by_heads_and_its_states_are_shared() -> None:
    """Qwen3.5 4B over two tensor ranks: what is cut halves, norms stay whole; four copies share the states.

    Every part is a multiple of 64 elements but beta's and decay's biases: 16 of each fill up 64, twice in 24 layers.
    """
    s = job(**HYBRID, tensor_parallel=2)
    own = Roles(s).placed["actor"].engine.replica.parameters
    found, filled = lines(s), 24 * 2 * (64 - 16)
    assert found["weights"] == 2 * (own + filled)
    # a half of queries with their gate, keys and values, of both outputs, of in_proj, fc1, fc2, and the tied head
    shapes = 2560 * (10_240 + 4096 + 12_352 + 2 * 9216 + 9216 + 248_320) // 2
    assert found["gradients"] == 4 * (own + filled) + 2 * shapes
    assert found["master_weights"] + found["optimizer_states"] == pytest.approx(12 * (own + filled) / 4, rel=1e-6)


@pytest.mark.parametrize("trainer", ["megatron", "megatron-swift"])
@pytest.mark.parametrize(
    "cut", [{"tensor_parallel": 2}, {"tensor_parallel": 4}, {"pipeline_parallel": 4}, {"context_parallel": 4}]
)
def test_more_ranks_on_a_hybrid_never_need_more(trainer: str, cut: dict[str, int]) -> None:
    more = {**HYBRID, "trainer": trainer, "sequence_parallel": "tensor_parallel" in cut}
    s, other = job(**HYBRID, trainer=trainer), job(**more, **cut)
    assert (
        max(g.peak.moment.device_bytes for g in estimate(other).groups) < estimate(s).groups[0].peak.moment.device_bytes
    )


def test_a_checkpoints_vision_tower_is_named_where_a_bridge_builds_it() -> None:
    note = "the language model alone is counted: the first stage has the checkpoint's vision tower, too"
    assert note in estimate(job(**HYBRID, **SWIFT)).notes
    assert note not in estimate(job(**HYBRID)).notes
    assert note not in estimate(job(**SWIFT)).notes


def test_megatron_core_needs_the_kernels_of_linear_attention() -> None:
    """So no note tells of running without them."""
    assert not any("flash-linear-attention" in note for note in estimate(job(**HYBRID)).notes)


SWIFT = {"trainer": "megatron-swift"}


def test_megatron_swift_has_defaults_of_its_own() -> None:
    s = job(**SWIFT, tensor_parallel=2)
    assert (s.sharding, s.loss, s.sequence_parallel, s.global_batch) == ("megatron", "fused", False, 16)
    old = job(**SWIFT, **{"versions.megatron-swift": "3.12"}, packing=True)
    assert (old.loss, old.packing, old.expert_tensor_parallel) == ("full", True, 1)
    with pytest.raises(ScenarioError, match="packing: given True with trainer megatron, allowed: False"):
        job(packing=True)


LORA = {**SWIFT, "method": "lora"}


def test_megatron_swift_trains_adapters_of_its_own_linears() -> None:
    """Rank 8 with dropout, in bf16 beside fp32 gradients; qkv 4096 + 6144, proj 8192, fc1 4096 + 28672, fc2 18432."""
    s = job(**LORA)
    assert s.lora
    assert (s.lora.rank, s.lora.dropout, s.lora.dtype, s.lora.targets) == (8, 0.05, "bf16", "all-linear")
    found, count = lines(s), 8 * 32 * (10_240 + 8_192 + 32_768 + 18_432)
    assert (found["weights"], found["adapter"], found["gradients"]) == (2 * P, 2 * count, 4 * count)
    assert found["master_weights"] + found["optimizer_states"] == 12 * count // 8


def test_adapters_of_experts_are_spread_with_them() -> None:
    """48 layers: qkv 2048 + 5120, proj 4096 + 2048; 128 experts with fc1 2048 + 1536 and fc2 768 + 2048."""
    moe = {"model": "qwen3-30b-a3b", "global_batch": 16}
    found = lines(job(**LORA, **moe, expert_parallel=8))
    attention = 8 * 48 * ((2048 + 4096 + 2 * 512) + (4096 + 2048))
    experts = 8 * 48 * 128 * (2048 + 1536 + 768 + 2048)
    assert found["adapter"] == 2 * (attention + experts // 8)
    assert found["optimizer_states"] == 8 * (attention // 8 + experts // 8)


@pytest.mark.parametrize("release", ["3.12", "4.6"])
def test_adapters_never_need_more_than_all_weights_nor_more_ranks_than_one(release: str) -> None:
    own = {"versions.megatron-swift": release, "global_batch": 8}
    cut = {"tensor_parallel": 2, "sequence_parallel": True}
    peaks = [estimate(job(**own, **more)).groups[0].peak.moment.device_bytes for more in (SWIFT, LORA, {**LORA, **cut})]
    assert peaks == sorted(peaks, reverse=True)


def test_adapters_of_cut_linears_saw_all_positions_until_mcore_bridge() -> None:
    own = {**LORA, "tensor_parallel": 2, "sequence_parallel": True}
    old, new = (lines(job(**own, **{"versions.megatron-swift": v}, loss="full"), "forward") for v in ("3.12", "4.6"))
    # of 2·h where the input is cut by outputs, in qkv and fc1, a byte of the mask and two of the copy
    assert old["activations"] - new["activations"] == pytest.approx(32 * 4096 * (3 * H + 4 * 8), rel=0.01)


RLHF = {**SWIFT, "task": "dpo", "global_batch": 8}


@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_a_reference_is_a_second_model_that_scores_before(task: str) -> None:
    """It has 2 bytes a parameter more, and its forward comes before anything is kept of the policy's."""
    s = job(**RLHF | {"task": task})
    found, alone = lines(s), lines(job(**SWIFT, global_batch=8))
    assert found["weights"] == 2 * alone["weights"] == 4 * P
    assert found["gradients"] == alone["gradients"]
    assert [stage.does for stage in s.keeps.stages] == ["score", "train"]
    assert "activations" not in lines(s, "score")


@pytest.mark.parametrize(("task", "handed"), [("sft", 1), ("dpo", 2), ("kto", 4)])
def test_stages_hand_on_the_references_stream_with_the_policys(task: str, handed: int) -> None:
    """Two stages: the last has received a micro batch's tensors of the stream as one; each has half of both models.

    Beside these the last holds those of the micro batch before and their gradient; the first has run no backward yet.
    """
    s = job(**RLHF | {"task": task}, pipeline_parallel=2)
    first, last = lines(s, "forward"), lines(s, "forward", 1)
    assert last["communication"] == 3 * handed * s.rows * 4096 * H * 2
    # outputs of forwards without gradient wait for the policy's
    assert first.get("communication", 0) == (handed - 1) * s.rows * 4096 * H * 2
    assert first["weights"] + last["weights"] == (1 + (task != "sft")) * 2 * P


def test_stages_of_a_reward_model_have_its_head_in_the_last() -> None:
    s = job(**RLHF | {"task": "rm"}, pipeline_parallel=2)
    first, last = lines(s), lines(s, group=1)
    assert first["weights"] - last["weights"] == 2 * ((V - 2) * H)


def test_without_adapters_the_model_is_its_own_reference() -> None:
    s = job(**LORA, task="dpo", global_batch=8)
    assert lines(s)["weights"] == 2 * P
    assert [role.shares for role in s.keeps.roles] == [False, True]


def test_both_halves_of_a_pair_are_one_micro_batch_with_their_logits() -> None:
    """Two sequences: twice the logits of one, a rank's part of the vocabulary in 16 bits and fp32."""
    pair, one = lines(job(**RLHF), "forward"), lines(job(**SWIFT, global_batch=8), "forward")
    assert pair["logits"] == pytest.approx(2 * one["logits"], rel=1e-6)


def test_a_pack_holds_both_halves_of_its_pairs() -> None:
    """4,096 tokens together: the logits of one sequence."""
    packed, one = job(**RLHF, packing=True), job(**SWIFT, global_batch=8)
    assert packed.expected_len == 2048
    assert lines(packed, "forward")["logits"] == lines(one, "forward")["logits"]
    assert job(**RLHF, packing=True, expected_len=1024).expected_len == 1024


def test_a_reward_model_has_a_number_in_place_of_logits() -> None:
    """The head's V·h parameters are h: 128,256·4,096 fewer, less one row."""
    s = job(**SWIFT, task="rm", global_batch=8)
    found = lines(s, "forward")
    assert found["weights"] == 2 * (P - (V - 1) * H)
    assert found.get("logits", 0) < 4096 * 2 * 64 * H


def test_parts_of_layers_run_again_in_less_memory_and_more_time() -> None:
    """Between nothing and whole layers; without parts it is attention alone, which takes more of it: the product of
    queries, keys and values stays beside turned queries and keys, without a copy of the values, and only a log-sum-exp
    of 4 bytes a head goes.
    """
    some = {"checkpointing": "selective"}
    ways: tuple[dict[str, Any], ...] = ({}, some, some | {"recompute_modules": ["mlp"]}, {"checkpointing": "full"})
    kept = [lines(job(**way), "forward") for way in ways]
    assert kept[0]["activations"] - kept[1]["activations"] == LAYERS * 4096 * (4 * 32 - 2 * (4096 + 1024))
    none, _, parts, whole = (estimate(job(**way)).groups[0].peak.moment.device_bytes for way in ways)
    assert none > parts > whole
    seconds = [speed(estimate(job(**way))).step_seconds for way in ways]
    assert seconds == sorted(seconds) and seconds[1] < 1.05 * seconds[0]
    s = job(**ways[2])
    assert parse(s.as_dict()).recompute_modules == ("mlp",)
    assert (job().recomputed, job(**some).recomputed) == (frozenset(), {"core_attn"})


def test_megatron_swift_makes_no_mask() -> None:
    """Megatron-LM's loader makes a byte for each of 4,096·4,096 pairs."""
    ours, theirs = (lines(job(loss="full", **more), "forward").get("temporary", 0) for more in ({}, SWIFT))
    assert ours - theirs == 4096 * 4096


# Qwen2.5-VL 7B has 8,292,166,656 parameters, and its language model, which is Qwen2.5 7B, 7,615,616,512
SEES = {"model": "qwen2.5-vl-7b", **SWIFT, "checkpointing": "full", "images": {"width": 1120, "height": 560}}
TOWER = 8_292_166_656 - 7_615_616_512


def test_a_frozen_tower_is_whole_on_every_rank_of_the_first_stage() -> None:
    """In 16 bits and beside the buffers, which have what is trained alone (mcore-bridge 1.6.5 `HuggingFaceVit`)."""
    for cut in ({"tensor_parallel": 2}, {"pipeline_parallel": 2}):
        seen, text = job(**SEES, **cut), job(**SWIFT, **cut, model="qwen2.5-7b", checkpointing="full")
        assert seen.images and seen.images.freeze == "vision"
        ours, theirs = lines(seen), lines(text)
        assert ours["weights"] - theirs["weights"] == 2 * TOWER
        assert ours["gradients"] == theirs["gradients"] and ours["optimizer_states"] == theirs["optimizer_states"]
    assert lines(seen, group=1)["weights"] == lines(text, group=1)["weights"]


def test_glms_layers_have_two_norms_more_and_a_gate_that_is_cut() -> None:
    """mcore-bridge 1.6.5 `model/gpts/glm4.py`: each of two ranks has all four norms, half of the rest."""
    glm = {"model": "glm-4-9b-0414", **SWIFT, "tensor_parallel": 2, "sequence_parallel": True}
    h, mlp, qkv = 4096, 13_696, 32 * 128 + 2 * 2 * 128
    layer = (h * qkv + qkv + h * h + 3 * h * mlp) // 2 + 4 * h
    assert lines(job(**glm))["weights"] == 2 * (40 * layer + h + 2 * 151_552 * h // 2)
    with pytest.raises(ScenarioError, match="trainer: given 'megatron', allowed: own for the family glm4"):
        job(model="glm-4-9b-0414")


def test_glm_4_6v_has_its_tower_before_glm_4_5s_layers() -> None:
    """mcore-bridge 1.6.5 `model/mm_gpts/glm.py`: the text's layers are glm4_moe's, the tower is whole, in 16 bits."""
    arch = load().model("glm-4.5v").reading(images=True)
    tower = sum(t.elements * t.count for t in vision_tensors(arch))
    swift = {**SWIFT, "tensor_parallel": 4, "sequence_parallel": True, "gpus": 4, "expert_parallel": 4}
    text = part(megatron_core.modelled(language(arch), "trainer", "own", towers=True), 4, 4)
    seen = lines(job(model="glm-4.5v", **swift, images={"width": 448, "height": 448}))
    assert seen["weights"] == 2 * (parameters(text) + tower)


def test_before_4_0_a_frozen_tower_kept_the_input_of_its_blocks() -> None:
    """80 · 40 patches of 14 pixels and a stream of 1280 in each of 32 blocks, as their input required a gradient."""
    old, new = (lines(job(**SEES, **{"versions.megatron-swift": v}), "backward") for v in ("3.12", "4.6"))
    assert old["checkpoints"] - new["checkpoints"] == 32 * 3200 * 1280 * 2


def test_full_recomputation_keeps_the_inputs_of_layers() -> None:
    assert lines(job(checkpointing="full"), "forward")["checkpoints"] == LAYERS * 4096 * H * 2


@pytest.mark.parametrize(
    "fields", [{"tensor_parallel": 2}, {"tensor_parallel": 4}, {"pipeline_parallel": 4}, {"context_parallel": 4}]
)
def test_more_ranks_on_a_sequence_never_need_more(fields: dict[str, int]) -> None:
    s, other = job(global_batch=8), job(global_batch=8, **fields)
    most = max(g.peak.moment.device_bytes for g in estimate(other).groups)
    assert most < estimate(s).groups[0].peak.moment.device_bytes


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sharding": "zero1"}, "sharding: given 'zero1' with trainer megatron, allowed: megatron"),
        ({"trainer": "own", "sharding": "megatron"}, "sharding: given 'megatron' with torch, allowed: with torch and"),
        ({"framework": "trl", "trainer": "transformers", "sharding": "megatron"}, "sharding: given 'megatron'"),
        ({"framework": "openrlhf", "trainer": "own", "sharding": "megatron"}, "sharding: given 'megatron'"),
        ({"model": "gemma-2-9b"}, "trainer: given 'megatron', allowed: own for the family gemma2"),
        ({**HYBRID, "linear_attention": "torch"}, "linear_attention: given 'torch' with Megatron-core, allowed: fla"),
        (
            {**HYBRID, "tensor_parallel": 4, "context_parallel": 8, "gpus": 32},
            "context_parallel: given 8, allowed: "
            "a divisor of the 4 key heads of linear attention that a tensor-parallel rank has",
        ),
        (
            {**HYBRID, **SWIFT, "versions.megatron-swift": "3.12"},
            "trainer: given 'megatron-swift', allowed: own for the family qwen3_5_text, or megatron-swift from 4 on",
        ),
        ({"expert_parallel": 2}, "expert_parallel: given 2, allowed: 1 for a model without experts"),
        (
            {"mtp_num_layers": 1, "data_parallel_sharding_strategy": "optim"},
            "mtp_num_layers: given 1 with Megatron-FSDP, allowed: null",
        ),
        (
            {"recompute_num_layers": 2},
            "recompute_num_layers: given 2 with checkpointing none, allowed: null, or with checkpointing full",
        ),
        ({"trainer": "ms-swift", "mtp_num_layers": 1}, "mtp_num_layers: given 1 with trainer ms-swift, allowed: null"),
        (
            {**SEES, "images": {"width": 560, "height": 560, "freeze": "tower"}},
            "images.freeze: given 'tower' with trainer megatron-swift, allowed: vision; not modelled",
        ),
        (
            {"model": "mixtral-8x7b", "expert_parallel": 3},
            "expert_parallel: given 3, allowed: a divisor of the model's 8",
        ),
        (
            {"model": "mixtral-8x7b", "expert_parallel": 8, "expert_tensor_parallel": 2},
            "expert_parallel: given 8, allowed: "
            "such that expert_parallel x expert_tensor_parallel = 16 divides the 8 GPUs of a stage",
        ),
        ({"model": "mixtral-8x7b", "tensor_parallel": 2, "sequence_parallel": False}, "sequence_parallel: given false"),
        (
            {"model": "mixtral-8x7b", "expert_padding": True},
            "expert_padding: given true, allowed: false, or with expert_ca",
        ),
        ({"expert_capacity": 2}, "expert_capacity: given 2, allowed: null, or with routed experts under Megatron-core"),
        (
            {"model": "mixtral-8x7b", "expert_capacity": 5, "expert_padding": True},
            "expert_capacity: given 5 with expert_padding, allowed: 4 at most, all of its tokens",
        ),
        (
            {"model": "mixtral-8x7b", "expert_imbalance": 1.5},
            "expert_imbalance: given 1.5, allowed: 1, or with expert_para",
        ),
        (
            {"context_parallel": 2, "seq_len": 4098},
            "seq_len: given 4098 with trainer megatron, allowed: a multiple of 4, for context_parallel = 2",
        ),
        (
            {"pipeline_parallel": 4, "gpus": 4, "pipeline_layers": [8, 8, 9, 7]},
            "pipeline_layers: given [8, 8, 9, 7], allowed: as many in each stage between first and last",
        ),
        (
            {"recompute_modules": ["mlp"]},
            "recompute_modules: given mlp with sharding megatron and checkpointing none, allowed: null, or with",
        ),
        (
            {"checkpointing": "selective", "recompute_modules": ["mla_up_proj"]},
            "recompute_modules: given mla_up_proj for the family llama, allowed: others; it has no such part",
        ),
        (
            {**HYBRID, **SWIFT, "checkpointing": "selective", "recompute_modules": ["gdn_norm_out"]},
            "recompute_modules: given gdn_norm_out, allowed: others; what runs here does not know it",
        ),
        (
            {"virtual_pipeline": 2},
            "virtual_pipeline: given 2, allowed: 1, or with sharding megatron or fsdp2 and pipeline_parallel above 1",
        ),
        (
            {"pipeline_parallel": 4, "gpus": 4, "virtual_pipeline": 2, "global_batch": 6},
            "global_batch: given 6 with virtual_pipeline = 2, allowed: a multiple of 4, so that stages take turns",
        ),
        (
            {"pipeline_parallel": 2, "pipeline_layers": [15, 17], "virtual_pipeline": 2},
            "pipeline_layers: given [15, 17], allowed: multiples of virtual_pipeline = 2, but for a layer fewer at the",
        ),
        (
            {"pipeline_parallel": 2, "pipeline_layers": [16, 15]},
            "pipeline_layers: given [16, 15], allowed: as many counts as pipeline_parallel = 2, 32 layers together",
        ),
        (
            {"trainer": "own", "pipeline_parallel": 2, "pipeline_layers": [16, 16]},
            "pipeline_layers: given [16, 16] with sharding fsdp2, allowed: null, or with sharding megatron",
        ),
        ({"method": "lora"}, "method: given 'lora' with trainer megatron, allowed: full"),
        ({**LORA, "lora.dtype": "fp32"}, "lora.dtype: given 'fp32' with trainer megatron-swift, allowed: bf16"),
        ({**LORA, "lora.targets": ["q_proj"]}, "lora.targets: given 'q_proj', allowed: linear_fc1, linear_fc2"),
        (
            {**LORA, "model": "mixtral-8x7b", "expert_tensor_parallel": 2},
            "expert_tensor_parallel: given 2 with method lora, allowed: 1",
        ),
        (
            {"offload.activations": True, "checkpointing": "full"},
            "offload.activations: given true with trainer megatron, allowed: false",
        ),
        ({"task": "dpo"}, "trainer: given 'megatron' for dpo, allowed: own"),
        (
            {**RLHF, "task": "rm", "context_parallel": 2},
            "context_parallel: given 2 for rm with trainer megatron-swift, allowed: 1; not modelled",
        ),
        ({**RLHF, "roles": {"reference": "none"}}, "roles.reference: given 'none' for dpo with trainer megatron-swift"),
        (
            {**RLHF, "roles": {"reference": {"attention": "eager"}}},
            "roles.reference.attention: given 'eager' for dpo with trainer megatron-swift, allowed: none",
        ),
        (
            {**RLHF, "method": "lora", "roles": {"reference": {"model": "llama-3-8b"}}},
            "roles.reference.model: given",
        ),
        ({"sequence_parallel": True}, "sequence_parallel: given true with trainer megatron, allowed: with tensor"),
        ({"tensor_parallel": 4, "seq_len": 4097}, "seq_len: given 4097 with trainer megatron, allowed: a multiple"),
        (
            {"pipeline_parallel": 33, "gpus": 33},
            "pipeline_parallel: given 33, allowed: such that 32 layers leave some to the last stage",
        ),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError) as error:
        parse(LLAMA | fields)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model", "ranks", "whole"),
    [
        # 46 layers of attention 2·(96 + 8)·128·4096 with its biases (96 + 16)·128, norms, a dense MLP 3·4096·10944,
        # in 45 of them a router, a shared expert and 128/4 routed ones of 3·4096·1408; 151,552 rows twice
        ("glm-4.5-air", 4, 46 * (2 * (96 + 8) * 128 * 4096 + 112 * 128 + 2 * 4096) + 3 * 4096 * 10_944
         + 45 * (128 * 4096 + 33 * 3 * 4096 * 1408) + (2 * 151_552 + 1) * 4096),
        # 24 of attention 4·2048², biases 3·2048, norms, router and gate 61·2048, shared 3·2048·5632 and 60/4 routed
        ("qwen1.5-moe-a2.7b", 4, 24 * (4 * 2048**2 + 5 * 2048 + 61 * 2048 + 3 * 2048 * (5632 + 15 * 1408))
         + (2 * 151_936 + 1) * 2048),  # 151,936 rows are 1187 times 128
        # 24 of attention 2·(64 + 8)·64·2880 with all biases and 64 sinks, router and bias, and 32/2 experts with theirs
        ("gpt-oss-20b", 2, 24 * (2 * 72 * 64 * 2880 + 80 * 64 + 2880 + 64 + 2 * 2880 + 32 * 2881
         + 16 * (3 * 2880**2 + 3 * 2880)) + (2 * 201_088 + 1) * 2880),
        # 48 of attention 2·(40 + 8)·128·5120, norms, a router of 16, a shared expert and 16/4 of 3·5120·8192; the rows
        # of 202,048, 64 added, so that 128 divide them: 1579 times
        ("llama-4-scout", 4, 48 * (2 * 48 * 128 * 5120 + 2 * 5120 + 16 * 5120 + 5 * 3 * 5120 * 8192)
         + (2 * 1579 * 128 + 1) * 5120),
    ],
)  # fmt: skip
def test_parameters_of_a_rank_that_has_some_of_the_experts(model: str, ranks: int, whole: int) -> None:
    s = parse(LLAMA | {"model": model, "trainer": "megatron-swift", "gpus": ranks, "expert_parallel": ranks})
    assert parameters(part(s.architecture, 1, ranks)) == whole


def test_layers_with_experts_leave_their_inputs_and_gradients_behind() -> None:
    """With full recomputation, until each layer's next forward: two tensors of the stream for each of Mixtral's 32
    layers, of 4,096 numbers in 16 bits a token, at the step; as traced of Megatron-core 0.16.1.
    """
    s = job(**MIXTRAL, expert_parallel=8, checkpointing="full")
    stream = 2 * 4096 * s.micro_batch * s.seq_len
    assert lines(s)["checkpoints"] == 2 * 32 * stream
    assert "checkpoints" not in lines(job(**MIXTRAL, expert_parallel=8, checkpointing="none"))
    assert "checkpoints" not in lines(job(checkpointing="full"))
    # at the lowest layer's backward the inputs of all are there, and the gradients that came into those above and it
    assert lines(s, "backward")["checkpoints"] >= (32 + 31) * stream
