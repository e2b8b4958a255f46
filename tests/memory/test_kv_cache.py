"""The KV cache and what vLLM holds beside it, worked by hand and held against published logs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from formulas import IN_WORDS, evaluate
from hypothesis import given
from hypothesis import strategies as st

from calc.base.units import GiB, MiB
from calc.catalog.catalog import load
from calc.memory import kv_cache
from calc.models.architecture import Architecture, parameters

MODELS = load().models


def arch(model: str) -> Architecture:
    return load().model(model).architecture


LLAMA, QWEN = arch("llama-3-8b"), arch("qwen2.5-7b")


@pytest.mark.parametrize(
    ("model", "ranks", "expected"),
    [
        ("qwen2.5-7b", 1, 57_344),  # 28 layers, 4 heads of 128: 2 · 2 · 28 · 512
        ("llama-3-8b", 1, 131_072),  # 32 layers, 8 heads of 128: 2 · 2 · 32 · 1,024
        ("llama-2-70b", 1, 327_680),  # 80 layers, 8 heads of 128
        ("llama-2-70b", 4, 81_920),  # two heads a rank
        ("llama-2-70b", 8, 40_960),
        ("llama-2-70b", 16, 40_960),  # a head is not split: two ranks hold the same one
        ("deepseek-v2-lite", 1, 31_104),  # 2 · 27 · (512 + 64): one latent and the rotary keys
        ("deepseek-v2-lite", 8, 31_104),  # whole on every rank
        ("gemma-2-2b", 1, 106_496),  # 26 layers, 4 heads of 256; those with a window count like the others
    ],
)
def test_a_token_takes_a_key_and_a_value_for_each_head_of_each_layer(model: str, ranks: int, expected: int) -> None:
    assert kv_cache.token_bytes(arch(model), ranks) == expected


def test_a_block_holds_16_tokens() -> None:
    """2,048 blocks of 16 · 131,072 bytes are 4 GiB."""
    line = kv_cache.cache("rollout", 2048, LLAMA)
    assert (line.component, line.bytes) == ("kv_cache", 4 * GiB)
    assert kv_cache.cache("rollout", 2048, LLAMA, 2).bytes == 2 * GiB


@pytest.mark.parametrize(
    ("model", "ranks", "tokens", "states"),
    [
        ("qwen3.5-9b", 1, 528, 6),  # 8,192·3·2 + 32·128·128·4 = 2,146,304 bytes a state, 4,096 a token: 33 times 16
        ("qwen3.5-9b", 2, 528, 6),  # half of both
        ("qwen3.5-35b-a3b", 1, 1056, 6),  # two heads: 2,048 bytes a token
        ("qwen3.5-35b-a3b", 8, 272, 6),  # a state's eighth of 268,288, 1,024 bytes a token: one head is not split
        ("qwen3-next-80b-a3b", 1, 544, 6),  # a state in bf16: 49,152 + 1,048,576, 2,048 a token
    ],
)
def test_a_block_is_as_long_as_a_state_needs(model: str, ranks: int, tokens: int, states: int) -> None:
    """vLLM 0.33 `_align_hybrid_block_size`; attention is one group of four, a sequence has two states in the others."""
    pool = kv_cache.pool(arch(model), ranks)
    assert (pool.tokens, pool.states) == (tokens, states)
    attention = arch(model).layers // 4
    assert pool.bytes == attention * tokens * 4 * kv_cache.heads(arch(model), ranks) * arch(model).head_dim
    assert kv_cache.state_bytes(arch(model), ranks) <= pool.bytes // attention
    assert pool.blocks(tokens + 1) == 2 + states


def test_a_state_does_not_grow_with_the_sequence() -> None:
    """Qwen3.5 9B: 24 layers with 8,192 channels of four positions in bf16 and 524,288 elements in fp32."""
    line = kv_cache.states("actor", arch("qwen3.5-9b"), 2, 2)
    assert line.bytes == 2 * 24 * (8192 * 4 * 2 + 524_288 * 4)
    assert kv_cache.dynamic("actor", arch("qwen3.5-9b"), 100, 2).bytes == 100 * 8 * 2 * 2 * 4 * 256


def test_swap_space_is_rounded_up_layer_by_layer() -> None:
    """Llama 3 8B: 2,048 blocks, 128 MiB a layer. Qwen2.5 7B: 4,681 (logged in vllm #13882), 32 KiB a layer each,
    146 MiB, each in a buffer of 256."""
    assert kv_cache.swap("rollout", LLAMA).bytes == 4 * GiB
    assert kv_cache.swap("rollout", QWEN).values["s"] == 4681 * 16 * 2048
    assert kv_cache.swap("rollout", QWEN).bytes == 28 * 256 * MiB


def test_a_model_that_attends_to_nothing_swaps_nothing() -> None:
    """Once a division by the 0 bytes of its tokens."""
    assert kv_cache.swap("rollout", load().model("mamba-1.4b").architecture).bytes == 0


def test_a_single_rank_holds_the_model_with_its_vocabulary_padded() -> None:
    """To the next multiple of 64 rows; no other parameter changes, in any model."""
    for name, model in MODELS.items():
        a = model.architecture
        if a.passed:  # which vLLM does not serve
            continue
        padding = -a.vocab % 64 * a.outer * (1 if a.tied else 2)
        assert kv_cache.weights("rollout", a).bytes == 2 * (parameters(a) + padding), name


def test_ranks_share_linears_and_vocabulary_and_hold_norms_whole() -> None:
    """Llama 3 8B on two: half of everything but 65 norms of 4,096."""
    norms = 65 * 4096
    assert kv_cache.weights("rollout", LLAMA, 2).bytes == 2 * ((8_030_261_248 - norms) // 2 + norms)


def test_a_head_is_copied_where_there_are_more_ranks_than_heads() -> None:
    """Qwen2.5 7B on eight: half of its four key/value heads each, so one, with a bias of 128."""
    layer = (2 * 3584**2 + 3 * 18944 * 3584 + 3584) // 8 + 2 * (128 * 3584 + 128) + 2 * 3584
    expected = 2 * 152_064 * 3584 // 8 + 28 * layer + 3584
    assert kv_cache.weights("rollout", QWEN, 8).bytes == 2 * expected


def test_queries_keys_and_values_fused_in_the_checkpoint_are_divided_alike() -> None:
    """Phi 3 Medium, 40 queries and 10 heads of 128 in one matrix: on two, 20 and twice 5."""
    share = {s.name: s.elements for s in kv_cache.shares(arch("phi-3-medium"), 2)}
    assert share["model.layers.*.self_attn.qkv_proj.weight"] == 5120 * 128 * (20 + 2 * 5)


def test_what_is_summed_over_ranks_keeps_its_bias_whole() -> None:
    """GPT-OSS 20B: o_proj's bias of 2,880 and the experts' down biases on every rank, q's, k's and v's divided."""
    share = {s.name: s.elements for s in kv_cache.shares(arch("gpt-oss-20b"), 2)}
    assert share["model.layers.*.self_attn.o_proj.bias"] == 2880
    assert share["model.layers.*.mlp.experts.down_proj_bias"] == 32 * 2880
    assert share["model.layers.*.self_attn.qkv_proj.bias"] == 64 * (32 + 2 * 4)
    assert share["model.layers.*.mlp.experts.gate_up_proj"] == 32 * 2880 * 2 * 2880 // 2


def test_latent_attentions_down_projections_stay_whole() -> None:
    """DeepSeek V2 Lite: 512 + 64 rows on every rank, the up projection of 16 heads divided."""
    share = {s.name: s.elements for s in kv_cache.shares(arch("deepseek-v2-lite"), 4)}
    assert share["model.layers.*.self_attn.kv_a_proj_with_mqa.weight"] == 576 * 2048
    assert share["model.layers.*.self_attn.kv_b_proj.weight"] == 16 * 256 * 512 // 4
    assert share["model.layers.*.self_attn.q_proj.weight"] == 16 * 192 * 2048 // 4


def test_a_sleeping_ranks_weights_are_pinned_tensor_by_tensor() -> None:
    """Qwen2.5 7B: embedding and head of 1,040 MiB in 2 GiB each; a layer's gate and up of 259 MiB in 512, down of 129.5
    in 256, q, k and v of 31.5 in 32, o of 24.5 in 32; biases and norms of 9,216 and 7,168 bytes in 16 and 8 KiB."""
    layer = (512 + 256 + 32 + 32) * MiB + 2**14 + 2 * 2**13
    line = kv_cache.backup("rollout", QWEN)
    assert line.bytes == 4 * GiB + 28 * layer + 2**13
    assert IN_WORDS.search(line.formula)


@pytest.mark.parametrize(
    ("model", "tokens", "ranks", "logged"),
    [
        ("llama-3-8b", 8192, 1, 1.26),  # vllm #10511
        ("llama-3-8b", 8192, 2, 1.26),  # vllm #10511: not less on two GPUs, so it is the logits
        ("qwen2.5-7b", 4096, 1, 1.42),  # vllm #13882
    ],
)
def test_the_profile_runs_peak_is_the_one_logged(model: str, tokens: int, ranks: int, logged: float) -> None:
    """vLLM's V0 engine with its 256 sequences: within 4 %."""
    line = kv_cache.profile("rollout", arch(model), tokens, 256, kv_cache.SORTED, ranks)
    assert line.bytes / GiB == pytest.approx(logged, rel=0.04)


def test_few_sequences_leave_the_mlp_as_the_peak() -> None:
    """Llama 3 8B, 8,192 tokens: 6 bytes of 14,336, four hidden states; on two ranks half as wide and a fifth one."""
    alone = kv_cache.profile("rollout", LLAMA, 8192, 8, kv_cache.SORTED)
    assert alone.bytes == 8192 * (6 * 14336 + 8 * 4096)
    assert kv_cache.profile("rollout", LLAMA, 8192, 8, kv_cache.SORTED, 2).bytes == 8192 * (6 * 7168 + 10 * 4096)


def test_experts_take_their_width_for_each_one_a_token_is_sent_to() -> None:
    """Mixtral 8x7B, two of 14,336: 6 bytes of width and 2 of their output each, and four hidden states."""
    line = kv_cache.profile("rollout", arch("mixtral-8x7b"), 8192, 8, kv_cache.SORTED)
    assert line.bytes == 8192 * (2 * (6 * 14336 + 2 * 4096) + 8 * 4096)


def test_cuda_graphs_are_no_memory_of_the_allocators() -> None:
    """20 MiB for each of 32 layers."""
    line = kv_cache.graphs("rollout", LLAMA)
    assert (line.component, line.bytes, line.allocated) == ("cuda_graphs", 640 * MiB, False)


def test_transformers_keeps_every_token_and_grows_a_layer_at_a_time() -> None:
    """Llama 3 8B, 1,000 tokens: 131,072 each; one layer's keys are 2 · 1,024."""
    assert kv_cache.dynamic("actor", LLAMA, 1000, 2).bytes == 131_072_000
    assert kv_cache.grown("actor", LLAMA, 1000, 2).bytes == 2_048_000
    assert kv_cache.dynamic("actor", LLAMA, 1000, 4).bytes == 2 * 131_072_000  # of fp32 weights


def test_transformers_keeps_latent_attentions_keys_and_values_in_full_width() -> None:
    """DeepSeek V2 Lite: 16 heads of 192 and of 128 in 27 layers, 276,480 bytes a token where vLLM needs 31,104."""
    lite = arch("deepseek-v2-lite")
    assert kv_cache.dynamic("actor", lite, 10, 2).bytes == 10 * 27 * 2 * 16 * (192 + 128)
    assert kv_cache.grown("actor", lite, 10, 2).bytes == 10 * 2 * 16 * 192


models = st.sampled_from([m.architecture for m in MODELS.values()])


@given(models, st.integers(1, 10**5), st.sampled_from((512, 8192)), st.integers(1, 1024), st.sampled_from((1, 2, 4)))
def test_every_formula_gives_its_bytes(a: Architecture, n: int, tokens: int, rows: int, ranks: int) -> None:
    for line in (
        kv_cache.cache("rollout", n, a, ranks),
        kv_cache.swap("rollout", a, ranks),
        kv_cache.weights("rollout", a, ranks),
        kv_cache.profile("rollout", a, tokens, rows, 38, ranks),
        kv_cache.graphs("rollout", a),
        kv_cache.dynamic("actor", a, n, 2),
        kv_cache.grown("actor", a, n, 2),
    ):
        assert evaluate(line.formula, line.values) == line.bytes


@given(models, st.sampled_from((1, 2, 4)))
def test_more_ranks_never_hold_more_each_nor_less_together(a: Architecture, ranks: int) -> None:
    for held in (kv_cache.token_bytes, lambda *given: kv_cache.weights("rollout", *given).bytes):
        one, two = held(a, ranks), held(a, 2 * ranks)
        assert two <= one
        # where heads do not divide, vLLM does not start; there a rank of fewer heads is not looked at
        assert 2 * two >= one or a.kv_heads % (2 * ranks)


def test_a_vocabulary_that_needs_no_padding_gets_none() -> None:
    """128,256 is 2,004 · 64; 128,257 is padded to 128,320, in embedding and head."""
    odd = replace(LLAMA, vocab=128_257)
    grown = kv_cache.weights("rollout", odd).bytes - kv_cache.weights("rollout", LLAMA).bytes
    assert grown == 2 * 2 * 64 * 4096


def test_a_latent_and_its_rotary_keys_add_up_whatever_their_ranks() -> None:
    """96 and 96 over 27 layers: published models have 512 and 64, which share no bit."""
    lite = arch("deepseek-v2-lite")
    assert lite.mla is not None
    odd = replace(lite, mla=replace(lite.mla, kv_lora_rank=96, qk_rope_head_dim=96))
    assert kv_cache.token_bytes(odd) == 2 * 27 * 192


def test_a_lone_rank_is_what_is_meant_where_none_is_named() -> None:
    """Each of these on one GPU, by hand."""
    assert kv_cache.token_bytes(LLAMA) == 131_072
    assert sum(s.elements * s.layers for s in kv_cache.shares(LLAMA)) == 8_030_261_248
    # Gemma 2 2B: blocks of 16 · 106,496 bytes, 2,520 of them in 4 GiB; half as wide, 5,041
    gemma = arch("gemma-2-2b")
    swapped = [kv_cache.swap("rollout", gemma, *ranks).values["s"] for ranks in ((), (1,), (2,))]
    assert swapped == [2520 * 16 * 4096, 2520 * 16 * 4096, 5041 * 16 * 2048]


def test_fused_queries_keys_and_values_are_whole_rows() -> None:
    """40 queries and 4 heads of 128 on two ranks: 20 and twice 2; elements are counted, so integers."""
    fused = replace(arch("phi-3-medium"), kv_heads=4)
    share = {s.name: s.elements for s in kv_cache.shares(fused, 2)}
    assert share["model.layers.*.self_attn.qkv_proj.weight"] == 5120 * 128 * 24
    assert {type(elements) for elements in share.values()} == {int}


def test_what_sleeps_names_its_largest_tensor_and_all_it_sums_over() -> None:
    """A sum of powers of two cannot be evaluated: Qwen2.5 7B's embedding and all its parameters stand beside it."""
    assert kv_cache.backup("rollout", QWEN).values == {"p": 152_064 * 3584, "P_r": 7_615_616_512}


def test_sampling_takes_its_bytes_a_logit_and_the_hidden_states() -> None:
    """Llama 3 8B, 256 rows, 8,192 tokens: 38 bytes a logit by sorting, 12 by the kernel, 2 · 4,096 a token."""
    for logit, expected in ((kv_cache.SORTED, 38), (kv_cache.SEARCHED, 12)):
        line = kv_cache.profile("rollout", LLAMA, 1024, 1024, logit)
        assert line.bytes == expected * 1024 * 128_256 + 2 * 1024 * 4096


def test_widths_that_do_not_divide_are_rounded_up() -> None:
    """Mixtral on three ranks: 4,779 of 14,336 each, two experts a token, and a fifth hidden state; Llama 3 8B one."""
    line = kv_cache.profile("rollout", arch("mixtral-8x7b"), 8192, 8, kv_cache.SORTED, 3)
    assert (line.bytes, type(line.bytes)) == (8192 * 2 * (2 * (3 * 4779 + 4096) + 5 * 4096), int)
    dense = kv_cache.profile("rollout", LLAMA, 8192, 8, kv_cache.SORTED, 3)
    assert (dense.bytes, type(dense.bytes)) == (8192 * 2 * (3 * 4779 + 5 * 4096), int)


def test_a_fused_projection_is_cut_by_heads() -> None:
    """Phi-3 medium on four ranks: 10 of 40 query heads, and 2 each of its 10 key and value heads, 128 wide, from 5,120.

    A quarter of the whole matrix would be a head of each too much.
    """
    (qkv,) = [s for s in kv_cache.shares(load().model("phi-3-medium").architecture, 4) if "qkv" in s.name]
    assert qkv.elements == (10 + 2 + 2) * 128 * 5120


def test_falcons_cache_holds_a_key_for_every_query() -> None:
    """Falcon 40B in Transformers: 128 heads of 64, written out from 8 before `past_key_values.update`; vLLM keeps 8."""
    a = load().model("falcon-40b").architecture
    assert kv_cache.dynamic("actor", a, 100, 2).bytes == 2 * 100 * 60 * 2 * 128 * 64
    assert kv_cache.grown("actor", a, 100, 2).bytes == 2 * 100 * 128 * 64
    assert kv_cache.token_bytes(a) == 2 * 2 * 60 * 8 * 64


def test_the_first_falcons_cache_holds_one_key() -> None:
    """Falcon 7B: 32 layers, one key and one value of 64, which are not written out."""
    a = load().model("falcon-7b").architecture
    assert kv_cache.dynamic("actor", a, 100, 2).bytes == 2 * 100 * 32 * 2 * 64


def test_each_layer_keeps_what_its_own_mixer_does() -> None:
    """DeepSeek-V2-Lite with every third of its 27 layers as plain attention: 18 of 512 + 64, 9 of 2 · 16 · 192."""
    lite = load().model("deepseek-v2-lite").architecture
    specs = [spec._replace(mixer="attention" if n % 3 == 0 else "latent") for n, spec in enumerate(lite.specs)]
    mixed = replace(lite, specs=tuple(specs))
    assert kv_cache.token_bytes(mixed) == 2 * (18 * (512 + 64) + 9 * 2 * 16 * 192)
    assert (lite.attends, mixed.attends) == (False, True)
