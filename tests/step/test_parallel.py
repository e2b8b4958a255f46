"""GPUs that work on the same sequences: what tensor, sequence and context parallelism leave on each of them."""

from __future__ import annotations

import json
import pathlib
from dataclasses import replace
from typing import Any

import pytest
import yaml
from formulas import form, holds, terms
from hypothesis import given
from hypothesis import strategies as st
from tapes import backward_of, forward_of

from calc.autograd.polynomial import Segment
from calc.base.ledger import Line
from calc.base.plan import Path
from calc.catalog.catalog import load
from calc.estimate.estimate import as_dict, estimate, speed
from calc.estimate.result import Estimate
from calc.memory.activations import Program
from calc.memory.loss import head
from calc.memory.run import Run, dimensions
from calc.models.architecture import Architecture, ConfigError, parameters, tensors
from calc.models.slices import part
from calc.resolve.parse import parse
from calc.scenario.scenario import ScenarioError

H, V, LAYERS = 4096, 128_256, 32  # Llama 3 8B
SFT = {"model": "llama-3-8b", "task": "sft", "gpu": "h200", "attention": "flash", "optimizer_impl": "fused"}
SDPA = {
    "model": "llama-3-8b", "task": "sft", "gpu": "h200", "gpus": 8, "context_parallel": 4, "seq_len": 8192,
}  # fmt: skip
VERL = {
    "model": "llama-3-8b", "task": "grpo", "framework": "verl==0.9.1", "gpu": "h200", "gpus": 8, "packing": True,
    "prompt_len": 1024, "response_len": 15_360, "micro_batch": 1,
}  # fmt: skip
RING = {
    "model": "llama-3-8b", "task": "sft", "framework": "openrlhf==0.11", "gpu": "h200", "gpus": 8, "packing": True,
    "micro_batch": 1, "global_batch": 8, "seq_len": 32_768,
}  # fmt: skip


def arch(model: str = "llama-3-8b") -> Architecture:
    return load().model(model).architecture


def of(**changes: Any) -> Estimate:
    return estimate(parse(SFT | changes))


def lines(e: Estimate, phase: str, component: str, role: str = "actor") -> list[Line]:
    """The lines of one component at the largest moment of a phase."""
    found = next(p for g in e.groups for p in g.phases if p.name == phase)
    return [line for line in found.moment.lines if (line.component, line.role) == (component, role)]


def allocated(e: Estimate) -> int:
    return max(p.moment.allocated_bytes for g in e.groups for p in g.phases)


def refused(base: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ScenarioError) as caught:
        parse(base | {name.replace("__", "."): value for name, value in changes.items()}, where="job.yaml")
    return str(caught.value)


# --- what a rank holds ---


def test_a_rank_of_four_holds_a_quarter_of_llama_3_but_all_norms() -> None:
    """By hand: attention 2·h·h + 2·h·1024, MLP 3·h·14336, embedding and head V·h each, 65 norms of h."""
    cut = LAYERS * (2 * H * H + 2 * H * 1024 + 3 * H * 14_336) + 2 * V * H
    assert parameters(arch()) == cut + 65 * H
    assert parameters(part(arch(), 4)) == cut // 4 + 65 * H


# biases of products that are cut by their inputs: every rank has them whole
SHARED = ("o_proj.bias", "down_proj.bias", "c_proj.bias", "dense.bias", "fc2.bias", "fc_out.bias")


@pytest.mark.parametrize("model", sorted(load().models))
def test_parts_add_up_to_the_model_with_norms_routers_and_shared_biases_on_every_rank(model: str) -> None:
    whole = arch(model)
    for ranks in (2, 4, 8):
        try:
            cut = part(whole, ranks)
        except ConfigError as error:
            assert error.field == "tensor_parallel"
            continue
        mine = {t.name: t for t in tensors(cut)}
        for t in tensors(whole):
            by_head = whole.qk_norm == "each" and t.name.endswith(("q_norm.weight", "k_norm.weight"))
            on_every = (t.kind in ("norm", "router", "slope") and not by_head) or t.name.endswith(SHARED)
            elements = t.elements if on_every else t.elements / ranks
            padded = ranks * t.shape[1] if t.kind in ("embedding", "head") else 0  # a vocabulary that leaves a rest
            assert elements <= mine[t.name].elements <= elements + padded, ranks


@pytest.mark.parametrize(
    ("model", "ranks", "why"),
    [
        ("llama-3-8b", 16, "a divisor of the model's kv_heads = 8"),
        ("llama-3-8b", 3, "a divisor of the model's heads = 32"),
        ("phi-3-mini", 2, "fused projections"),
        ("deepseek-v3", 2, "latent attention"),
        ("gpt-oss-20b", 2, "attention stays whole"),
        ("qwen1.5-moe-a2.7b", 2, "shared experts"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused_with_the_reason(model: str, ranks: int, why: str) -> None:
    line = refused(SFT, model=model, gpus=ranks, tensor_parallel=ranks)
    assert line.startswith(f"job.yaml: tensor_parallel: given {ranks}, allowed: ")
    assert why in line


def test_gpus_come_in_whole_groups() -> None:
    line = refused(SFT, gpus=6, tensor_parallel=4)
    assert "gpus: given 6, allowed: a multiple of tensor_parallel = 4, as 4 or 8" in line
    line = refused(RING, gpus=6, context_parallel=4)
    assert "gpus: given 6, allowed: a multiple of context_parallel = 4, as 4 or 8" in line


def test_the_group_counts_as_one_worker_on_the_data() -> None:
    s = parse(SFT | {"gpus": 16, "tensor_parallel": 4, "micro_batch": 2})
    assert (s.data_parallel, s.shards, s.sharding, s.global_batch, s.accumulation) == (4, 4, "fsdp2", 8, 1)
    s = parse(RING | {"context_parallel": 4})
    assert (s.data_parallel, s.shards, s.accumulation) == (2, 8, 4)


# --- tensor parallelism ---


def test_a_layer_keeps_the_residual_streams_tensors_whole_and_the_rest_by_the_rank() -> None:
    """16h of the norms, from which q, k, v, heads and MLP (of this rank) differ: facts/tracing.md's form of Llama."""
    cut = part(arch(), 4)
    kept = Segment(Program(Run(cut)).layer(), dimensions(cut)).saved.tokens
    assert kept == 16 * H + (4 * H + 4 * 1024 + 8 * 14_336 + 4 * 32) // 4 + 8


def test_with_sequence_parallel_ranks_share_the_stream_and_keep_whole_inputs_of_their_linears() -> None:
    """Norms keep 6 of their 8 bytes on a part of the positions; their outputs are gathered, 2 bytes for each block."""
    cut = part(arch(), 4)
    kept = Segment(Program(Run(cut, sequences=True)).layer(), dimensions(cut)).saved.tokens
    assert kept == 12 * H // 4 + 8 // 4 + 4 * H + (4 * H + 4 * 1024 + 8 * 14_336 + 4 * 32) // 4


def test_each_rank_makes_the_whole_gradient_of_the_embedding() -> None:
    """DTensor sums an embedding's gradient over all tokens, not by rows of the vocabulary: V·h until the step ends."""
    e = of(gpus=4, tensor_parallel=4, checkpointing="full", seq_len=512)
    (own, beyond) = lines(e, "step", "gradients")
    assert own.bytes == 2 * parameters(part(arch(), 4))
    assert beyond.bytes == 2 * (V - V // 4) * H
    assert beyond.bytes + 2 * V // 4 * H == 2 * V * H


def test_a_tied_embedding_gets_its_own_rows_alone() -> None:
    """The head's gradient has them, to which the embedding's is added."""
    e = of(model="gemma-2-9b", gpus=2, tensor_parallel=2, checkpointing="full", seq_len=512)
    assert len(lines(e, "step", "gradients")) == 1


@pytest.mark.parametrize(("sequences", "entries"), [(False, V), (True, V // 8)])
def test_logits_are_gathered_unless_the_loss_takes_them_in_parts(sequences: bool, entries: int) -> None:
    """12 bytes a token and vocabulary entry in the backward of log-softmax, 16 of a rank's entries.

    There the gradient is a sum of two tensors beside the log-softmax (torch `distributed/tensor/parallel/loss.py`).
    """
    made, _, _ = head(Run(part(arch(), 8), sequences=sequences), Path("cross-entropy"))
    most = max(shot.saved.tokens + shot.passing.tokens for shot in made.backward)
    each = 16 if sequences else 12
    assert each * entries <= most <= each * entries + 8 * H


def test_fsdp_gathers_a_ranks_part_of_a_layer() -> None:
    e = of(gpus=16, tensor_parallel=4, sharding="fsdp2", precision="fsdp-mixed", checkpointing="full", seq_len=1024)
    layer = (2 * H * H + 2 * H * 1024 + 3 * H * 14_336) // 4 + 2 * H
    gathered = [line.values["p"] for line in lines(e, "forward", "communication")]
    assert 2 * V // 4 * H + H in gathered  # the root's: embedding, head and the last norm
    assert all(p in (layer, 2 * V // 4 * H + H) for p in gathered)


@given(
    st.sampled_from(("llama-3-8b", "qwen3-8b", "gemma-2-9b", "mixtral-8x7b")),
    st.sampled_from(("sft", "rm", "dpo")),
    st.sampled_from(("none", "full")),
    st.sampled_from((1024, 8192)),
    st.sampled_from(("none", "fsdp2")),
)
def test_more_tensor_parallel_ranks_never_need_more_per_gpu(
    model: str, task: str, checkpointing: str, length: int, sharding: str
) -> None:
    """On as many data-parallel workers; what two ranks must gather, one did not need to, within the gathered logits."""
    each = []
    for ranks in (2, 4, 8):
        gpus = ranks * (4 if sharding == "fsdp2" else 1)
        data = {"model": model, "task": task, "checkpointing": checkpointing, "seq_len": length, "sharding": sharding}
        each.append(allocated(estimate(parse(SFT | data | {"gpus": gpus, "tensor_parallel": ranks}), replays=False)))
    assert each == sorted(each, reverse=True)


@pytest.mark.parametrize("changes", [{}, {"sequence_parallel": True}, {"global_batch": 4}, {"model": "gemma-2-9b"}])
@pytest.mark.parametrize("sharding", ["none", "fsdp2"])
def test_lines_make_moments_and_formulas_their_bytes(sharding: str, changes: dict[str, Any]) -> None:
    """Collectives, gathered logits, gradients of others' rows, and their sums over micro-batches."""
    data = {"gpus": 4, "sharding": sharding, "tensor_parallel": 4 if sharding == "none" else 2, "micro_batch": 1}
    for group in as_dict(estimate(parse(SFT | data | changes)))["groups"]:
        for phase in group["phases"]:
            holds(phase, printed=1e-4)


# --- context parallelism ---


def test_ulysses_leaves_each_rank_its_share_of_the_tokens() -> None:
    e = estimate(parse(VERL | {"context_parallel": 4, "roles": {"reference": "none"}}))
    (inputs,) = lines(e, "forward", "checkpoints")
    assert inputs.values["T"] == 16_384 // 4
    assert inputs.bytes in [layers * 2 * H * 16_384 // 4 for layers in range(1, LAYERS + 1)]


def test_an_all_to_all_keeps_what_it_sends_and_copies_it_twice_on_the_way() -> None:
    """Flash keeps its output before the exchange, o_proj what came of it; pieces and what they become pass."""
    whole, cut = (Program(Run(arch(), context=c, exchange="all-to-all")).layer() for c in (1, 4))
    assert terms(cut.saved() + whole.saved() * -1, arch()) == form("2·q")
    sent = next(shot for shot in forward_of(cut) if shot.name == "q: all-to-all")
    before = next(shot for shot in forward_of(cut) if shot.name == "v_proj")
    assert terms(sent.passing, arch())[0].get("q", 0) >= 6
    assert sent.saved.tokens == before.saved.tokens


def test_keys_are_repeated_to_one_head_for_each_rank() -> None:
    """8 key heads on 16 ranks: two copies of each, which flash then keeps."""
    few, many = (Program(Run(arch(), context=c, exchange="all-to-all")).layer() for c in (8, 16))
    assert terms(many.saved() + few.saved() * -1, arch()) == form("4·kv")


def test_a_ring_holds_two_buffers_of_one_key_heads_positions() -> None:
    """Keys and values of every position for one head of 128, twice, in bf16, beside the head being sent."""
    tape = Program(Run(arch(), context=4, exchange="all-gather")).layer()
    shot = next(shot for shot in forward_of(tape) if shot.name == "attention")
    assert terms(shot.passing, arch())[0]["D"] == 2 * 2 * 4 * 2 + 2 * 2
    assert tape.saved().tokens == Program(Run(arch())).layer().saved().tokens


def test_a_ring_shards_over_all_gpus_whatever_they_share() -> None:
    """OpenRLHF passes no process group to DeepSpeed, which shards over the world (facts/semantics.md)."""
    one, four = (estimate(parse(RING | {"context_parallel": c, "sharding": "zero3"})) for c in (1, 4))
    assert lines(one, "load", "weights") == lines(four, "load", "weights")
    assert allocated(four) < allocated(one)


def test_what_leaves_for_the_host_is_a_gpus_own_shard_whoever_shares_its_sequences() -> None:
    """verl moves 4 bytes of a weight out and in again, an eighth of them on each of eight GPUs."""
    jobs = [parse(VERL | {"offload.parameters": True, "context_parallel": c}) for c in (1, 4)]
    one, four = ({t.name: t.seconds for t in speed(estimate(s)).terms} for s in jobs)
    assert one["actor: swap"] == four["actor: swap"]


def test_pytorchs_ring_keeps_the_copy_that_o_proj_takes_of_heads_that_lie_apart() -> None:
    """q, k, v, output and log-sum-exp as alone, on a share of the tokens; the merged output lies head by head."""
    alone, ring = (Program(Run(arch(), context=c, exchange="ring")).layer() for c in (1, 4))
    assert terms(ring.saved() + alone.saved() * -1, arch()) == form("2·q")


def test_pytorchs_ring_attends_backward_beside_all_keys_and_sums_in_fp32() -> None:
    """Read off a trace of Llama 3 8B on four ranks, bytes a token of one rank: 108,672 beside what autograd holds.

    Sums of gradients 4·4096 + 2·4·1024, gathered keys and values 4·2·2·1024, one buffer of their gradients that came
    and one that goes, 2·2·4·1024, keys and values as they were sent 2·2·1024, gradients of the first piece
    2·4096 + 2·2·1024 and of the second 2·4096 + 2·1024, and the kernel's 4·4096 + 4·32 + 2·4096.
    """
    tape = Program(Run(arch(), context=4, exchange="ring")).layer()
    shot = next(shot for shot in backward_of(tape) if shot.name == "attention")
    counts = {"q": 4096, "kv": 1024, "H": 32, "h": 4096, "o": 4096}
    found = sum(counts[symbol] * times for symbol, times in terms(shot.passing, arch())[0].items())
    # beside them the gradients of the residual stream and of the output, in 16 bits
    assert found == 108_672 + 2 * 4096 + 2 * 4096


def test_pytorchs_ring_forward_merges_in_fp32_beside_all_keys() -> None:
    """From the same trace: 90,496 bytes a token, of them keys and values 16,384, four outputs in fp32, one in bf16."""
    tape = Program(Run(arch(), context=4, exchange="ring")).layer()
    attends = next(op for op in tape.ops if op.name == "attention")
    kept = 2 * 4096 + 4 * 32  # the output and its log-sum-exp, which stay
    assert terms(attends.scratch, arch()) == form("16·kv + 16·q + 8·H")
    assert 16 * 1024 + 16 * 4096 + 8 * 32 + kept == 90_496


@pytest.mark.parametrize(("ranks", "masked"), [(1, True), (4, False)])
def test_a_window_as_long_as_the_sequence_needs_a_mask_on_a_rank_that_sees_it_all(ranks: int, masked: bool) -> None:
    """Mistral 7B v0.1 at its window of 4,096; traced over 4 ranks of the ring, where no mask is made."""
    s = parse(SDPA | {"model": "mistral-7b-v0.1", "seq_len": 4096, "context_parallel": ranks})
    specs = tuple([spec._replace(slides=False) for spec in s.architecture.specs])
    free = replace(s, architecture=replace(s.architecture, sliding_window=None, specs=specs))
    assert (allocated(estimate(s)) > allocated(estimate(free))) == masked


def test_pytorchs_ring_shards_over_those_who_share_a_sequence_too() -> None:
    """torchtitan flattens data-parallel and context-parallel ranks to one mesh for FSDP 2."""
    s = parse(SDPA)
    assert (s.sharding, s.data_parallel, s.shards, s.global_batch, s.accumulation) == ("fsdp2", 2, 8, 2, 1)
    assert parse(SDPA | {"gpus": 4}).sharding == "fsdp2"
    one, four = (estimate(parse(SDPA | {"sharding": "fsdp2", "context_parallel": c})) for c in (1, 4))
    assert lines(one, "load", "weights") == lines(four, "load", "weights")
    assert allocated(four) < allocated(one)


@given(st.sampled_from((VERL, RING, SDPA)), st.sampled_from((8192, 65_536)))
def test_more_context_parallel_ranks_never_need_more_per_gpu(base: dict[str, Any], length: int) -> None:
    lengths = {"response_len": length - 1024} if base is VERL else {"seq_len": length}
    each = [allocated(estimate(parse(base | lengths | {"context_parallel": c}))) for c in (2, 4, 8)]
    assert each == sorted(each, reverse=True)


@pytest.mark.parametrize(
    ("base", "changes", "line"),
    [
        (SDPA, {"attention": "flash"}, "attention: given 'flash' with context_parallel = 4, allowed: sdpa"),
        (SDPA, {"sharding": "zero3", "precision": "mixed"}, "sharding: given 'zero3' with context_parallel = 4"),
        (SDPA, {"task": "dpo"}, "context_parallel: given 4 for dpo, allowed with torch: 1"),
        (SDPA, {"precision": "fp32"}, "precision: given 'fp32' with context_parallel = 4"),
        (SDPA, {"packing": True}, "packing: given true with context_parallel = 4, allowed: false"),
        (SDPA, {"model": "deepseek-v2-lite"}, "context_parallel: given 4, allowed for deepseek_v2: 1"),
        (SDPA, {"model": "gemma-2-9b", "seq_len": 4096}, "context_parallel: given 4, allowed for gemma2: 1"),
        (SDPA, {"model": "gpt-oss-20b"}, "context_parallel: given 4, allowed for gpt_oss: 1"),
        (SDPA, {"model": "mistral-7b-v0.1"}, "seq_len: given 8192 with context_parallel = 4, allowed: at most"),
        (
            SDPA,
            {"seq_len": 1001},
            "seq_len: given 1001 with context_parallel = 4, allowed: a multiple of 2 x 4, as 1000",
        ),
        (SFT, {"sequence_parallel": True}, "sequence_parallel: given true with tensor_parallel = 1"),
        (
            SFT,
            {"gpus": 8, "tensor_parallel": 4, "sharding": "zero3"},
            "sharding: given 'zero3' with tensor_parallel = 4",
        ),
        (SFT, {"gpus": 2, "tensor_parallel": 2, "method": "lora"}, "method: given 'lora' with tensor_parallel = 2"),
        (SFT, {"gpus": 2, "tensor_parallel": 2, "loss": "fused"}, "loss: given 'fused' with tensor_parallel = 2"),
        (SFT, {"gpus": 2, "tensor_parallel": 2, "sequence_parallel": True, "task": "rm"}, "given true for rm"),
        (VERL, {"tensor_parallel": 2}, "tensor_parallel: given 2, allowed with verl: 1; its FSDP trainer"),
        (VERL, {"context_parallel": 2, "packing": False}, "packing: given false with context_parallel = 2"),
        (VERL, {"model": "qwen2.5-7b", "context_parallel": 8}, "a divisor of the model's 28 attention heads"),
        (RING, {"tensor_parallel": 2}, "tensor_parallel: given 2, allowed with openrlhf: 1"),
        (RING, {"context_parallel": 2, "framework": "openrlhf==0.5.3"}, "ring attention for sft came with 0.5.4"),
        (SFT, {"framework": "trl", "gpus": 2, "context_parallel": 2, "sharding": "fsdp2"}, "allowed with trl: 1"),
        (SFT, {"framework": "trl", "gpus": 2, "tensor_parallel": 2, "sharding": "fsdp2"}, "allowed with trl: 1"),
    ],
)
def test_what_a_trainer_cannot_cut_is_refused(base: dict[str, Any], changes: dict[str, Any], line: str) -> None:
    assert line in refused(base, **changes)


def test_ulysses_divides_key_heads_or_repeats_them(tmp_path: pathlib.Path) -> None:
    """verl 0.7 `models/transformers/monkey_patch.py:294`: 6 key heads over 2 ranks or 12, not over 4 of 12 heads."""
    config = yaml.safe_load((pathlib.Path(__file__).parents[2] / "models" / "qwen2.5-7b.yaml").read_text("utf-8"))[
        "config"
    ]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 1536}))
    job = VERL | {"model": str(file)}
    assert parse(job | {"context_parallel": 2}).context_parallel == 2
    assert "allowed: a divisor or a multiple of the model's 6 key heads" in refused(job, context_parallel=4)


# --- inference ---


def test_inference_holds_weights_and_a_cache_and_trains_nothing() -> None:
    """Keys and values in bf16 of every token: 2·2·L·1024 bytes."""
    e = of(task="inference", micro_batch=4, seq_len=8192, optimizer_impl="foreach")
    assert [p.name for g in e.groups for p in g.phases] == ["load", "rollout"]
    (cache,) = lines(e, "rollout", "kv_cache")
    assert cache.bytes == 4 * 8192 * 2 * 2 * LAYERS * 1024
    assert not lines(e, "rollout", "optimizer_states") + lines(e, "rollout", "gradients")


def test_inference_takes_no_optimizer_and_no_adapters() -> None:
    assert "optimizer: given 'adamw' for inference, allowed: none" in refused(SFT, task="inference", optimizer="adamw")
    assert "method: given 'lora' for inference" in refused(SFT, task="inference", method="lora")
