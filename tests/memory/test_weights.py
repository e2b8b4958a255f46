"""Weights by number format, worked by hand for Llama 3 8B."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import VH, P, engine_of, job, replica_of, under

from calc.base.ledger import total
from calc.catalog.catalog import load
from calc.memory import weights
from calc.models.architecture import parameters
from calc.scenario.scenario import ScenarioError
from calc.step.placement import engine

LLAMA = load().model("llama-3-8b").architecture
LINEAR = 32 * 218_103_808  # q, k, v, o, gate, up, down of every layer


def test_weights_take_their_format_over_their_shards() -> None:
    """2 · 8,030,261,248 / 8."""
    line = weights.weights("actor", P, 2, 8)
    assert line.bytes == 2_007_565_312
    assert line.component == "weights"


def test_an_adapter_and_a_master_are_lines_of_their_own() -> None:
    """LoRA of rank 64 on all linears has 167,772,160 parameters; their fp32 master over 8 GPUs 4 bytes an eighth."""
    assert weights.adapter("actor", 167_772_160, 2).bytes == 335_544_320
    assert weights.master("actor", 167_772_160, 4, 8).bytes == 83_886_080


def test_nf4_takes_4_127_bits() -> None:
    """4 bits, 8 bits a block of 64, 32 bits a block of 64 · 256: 4 + 0.125 + 0.001953 (QLoRA's double quantisation)."""
    assert 8 * weights.NF4[True] == 4 + 8 / 64 + 32 / (64 * 256)
    assert f"{8 * weights.NF4[True]:.3f}" == "4.127"
    assert pytest.approx(0.515869, abs=1e-6) == weights.NF4[True]


def test_scales_that_are_not_quantised_take_half_a_bit() -> None:
    """32 bits a block of 64, bitsandbytes' own default: 4.5 bits, a tenth more."""
    assert 8 * weights.NF4[False] == 4.5
    line = weights.quantised("actor", LLAMA, parameters(LLAMA), 2, nested=False)
    assert line.bytes == int(0.5625 * LINEAR + 2 * (P - LINEAR))


def test_a_buffer_for_dequantised_weights_has_the_largest_in_16_bits_and_its_scales_in_fp32() -> None:
    """Llama 3 8B's down_proj, 14,336 · 4,096: `WEIGHT_BUFFER` of 2 bytes each, `ABSMAX_BUFFER` of 4 for each 64."""
    assert weights.dequantised("actor", 14_336 * 4096, 2).bytes == 117_440_512 + 3_670_016


def test_eight_bits_take_a_byte_an_element_and_a_scale_in_fp32_for_each_row() -> None:
    """Rows of a layer: 4096 of q, o and down, 1024 of k and v, 14,336 of gate and up; 32 layers."""
    rows = 32 * (3 * 4096 + 2 * 1024 + 2 * 14_336)
    line = weights.int8("actor", LLAMA, parameters(LLAMA), 2)
    assert line.bytes == LINEAR + 4 * rows + 2 * (P - LINEAR) == 9_086_705_664


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"method": "lora"}, "load_in_8bit: given true with method lora, allowed: with qlora"),
        (
            {"gpus": 2, "sharding": "zero2"},
            "load_in_8bit: given true with sharding zero2, allowed: false, or with none, ddp",
        ),
        (
            {"trainer": "unsloth"},
            "load_in_8bit: given true with trainer unsloth, allowed: false, or with trl, or torch",
        ),
        ({"framework": "openrlhf"}, "load_in_8bit: given true with openrlhf, allowed: false"),
        ({"checkpoint_gb": 6}, "load_in_8bit: given true with checkpoint_gb, allowed: false; not modelled"),
    ],
)
def test_eight_bits_are_refused_where_no_code_was_read(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(said)):
        job(**{"method": "qlora", "load_in_8bit": True, "task": "sft"} | fields)


def test_four_bits_are_for_linears_inside_the_layers_alone() -> None:
    """`get_keys_to_not_convert` leaves the head; embeddings and norms are no Linear: V·h twice, 65 norms of 4,096."""
    assert weights.quantised_elements(LLAMA) == LINEAR
    assert P - LINEAR == 2 * VH + 65 * 4096
    line = weights.quantised("actor", LLAMA, parameters(LLAMA), 2)
    assert line.bytes == int(weights.NF4[True] * LINEAR + 2 * (P - LINEAR))


def test_the_size_of_a_checkpoint_says_what_it_leaves_in_16_bits() -> None:
    """Every linear of four layers whole, 4 · 218,103,808 elements of 2 bytes, and the other 28 layers in NF4."""
    kept = 4 * 218_103_808
    size = weights.NF4[True] * (LINEAR - kept) + 2 * (P - LINEAR + kept)
    assert weights.left_wide(LLAMA, P, size) == kept
    s = job(method="qlora", checkpoint_gb=size / 1e9)
    assert engine_of(s).weights()[0].bytes == pytest.approx(size, abs=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "lora"}, "given 6 with method lora, allowed: with qlora"),
        ({"checkpoint_gb": 3.0}, "given 3 for llama-3-8b, allowed: 4.0 to 16.1"),
        ({"sharding": "fsdp2", "gpus": 2}, "given 6 with sharding fsdp2"),
        ({"trainer": "torchtune"}, "given 6 with trainer torchtune"),
        ({"framework": "openrlhf"}, "given 6 with openrlhf"),
    ],
)
def test_a_size_that_no_checkpoint_has_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        job(**{"method": "qlora", "checkpoint_gb": 6.0} | fields)
    assert message in str(caught.value)


def test_routed_experts_are_not_quantised() -> None:
    """Transformers 5 fuses Mixtral's into bare parameters, which bitsandbytes passes over: attention alone remains,
    2 · 4096² + 2 · 1024 · 4096 in each of 32 layers."""
    mixtral = load().model("mixtral-8x7b").architecture
    attention = 32 * (2 * 4096**2 + 2 * 1024 * 4096)
    assert weights.quantised_elements(mixtral) == attention
    found = weights.quantised("actor", mixtral, parameters(mixtral), 2).bytes
    assert found == int(weights.NF4[True] * attention + 2 * (46_702_792_704 - attention))


def test_routed_experts_that_are_linears_are_quantised() -> None:
    """modeling_mixtral.py of Transformers 4.48.1: w1, w2, w3 of eight experts and a router of 8 · 4096 in each layer.

    What is left in bf16: V·h twice and 65 norms. GPT-OSS's experts have been bare parameters from the start.
    """
    mixtral, gpt_oss = (load().model(name).architecture for name in ("mixtral-8x7b", "gpt-oss-20b"))
    rest = 2 * 32_000 * 4096 + 65 * 4096
    assert weights.quantised_elements(mixtral, experts="linears") == 46_702_792_704 - rest
    assert weights.quantised_elements(gpt_oss, experts="linears") == weights.quantised_elements(gpt_oss)
    four, sixteen = (
        replica_of(job(model="mixtral-8x7b", method="qlora", versions={"transformers": v})).run.four_bit_experts
        for v in ("4.57", "5.0")
    )
    assert (four, sixteen) == ("linears", "")


@given(st.integers(1, 10**12), st.sampled_from((2, 4)), st.integers(1, 4096))
def test_shards_of_all_ranks_hold_the_whole(count: int, b: int, ranks: int) -> None:
    """Each line is rounded down to whole bytes, no more."""
    assert ranks * (weights.weights("actor", count, b, ranks).bytes + 1) >= b * count
    assert weights.weights("actor", count, b, ranks + 1).bytes <= weights.weights("actor", count, b, ranks).bytes


def test_a_shard_is_rounded_down_to_whole_bytes() -> None:
    """7 elements of 1.5 bytes over 4: 2.6; of bf16: 3.5; the model in NF4 over 7."""
    assert weights.weights("actor", 7, 1.5, 4).bytes == 2
    for line in (weights.adapter("actor", 7, 2, 4), weights.master("actor", 7, 2, 4)):
        assert (line.bytes, type(line.bytes)) == (3, int)
    cut, scales = LINEAR / 2 + 2 * (P - LINEAR), (weights.NF4[True] - 0.5) * LINEAR
    assert weights.quantised("actor", LLAMA, parameters(LLAMA), 2, 7).bytes == int(cut / 7 + scales)
    assert weights.scales("actor", LLAMA).bytes == int(scales)
    tuned = weights.quantised("actor", LLAMA, parameters(LLAMA), 2, 7, cut_scales=True)
    assert tuned.bytes == int((cut + scales) / 7)


def test_routed_experts_in_four_bits_leave_their_biases() -> None:
    """axolotl 0.19 monkeypatch/moe_quant.py quantises parameters of three dimensions: not (experts, outputs)."""
    qwen, gpt_oss = (load().model(name).architecture for name in ("qwen3-30b-a3b", "gpt-oss-20b"))
    experts = 48 * 128 * 3 * 2048 * 768
    assert weights.quantised_elements(qwen, experts="whole") - weights.quantised_elements(qwen) == experts
    experts = 24 * 32 * 3 * 2880 * 2880
    assert weights.quantised_elements(gpt_oss, experts="whole") - weights.quantised_elements(gpt_oss) == experts


def test_unsloth_s_linears_for_gpt_oss_s_experts_are_in_four_bits() -> None:
    """unsloth_zoo 2025.9.1 temporary_patches/gpt_oss.py: gates and ups, and downs, of 32 experts in 24 layers."""
    s = job(model="gpt-oss-20b", method="qlora", trainer="unsloth", versions={"unsloth": "2025.9.1"})
    r = replica_of(s)
    beside = weights.quantised_elements(r.arch, experts="linears") - weights.quantised_elements(r.arch)
    assert beside == 24 * (32 * 3 * 2880 * 2880 + 32 * 2880)  # and routers
    assert (r.run.four_bit_experts, r.run.looped) == ("linears", True)
    assert r.arch.expert_linears == ()  # which no usual target names


def test_the_largest_parameter_of_experts_is_joined_while_the_model_loads() -> None:
    """Gate and up of 128 experts, 2 · 768 · 2048 elements each, twice in bf16 beside all that is in four bits."""
    s = job(model="qwen3-30b-a3b", method="qlora", quantize_moe_experts=True, lora={"targets": ["q_proj"]})
    own = engine(s, replica_of(s), s.keeps)
    (first, before), (last, after) = own.loading()
    assert (first, last) == ("experts before four bits", "weights on the GPU")
    assert total(before) - total(after) == 2 * 2 * 128 * 2 * 768 * 2048


QUANTISED = {"method": "qlora", "quantize_moe_experts": True, "checkpointing": "full"}


@pytest.mark.parametrize(
    ("model", "reentrant", "release", "cached"),
    [
        # 16 layers of 64 experts, each 3 · 2048 · 1024 elements of two bytes
        ("olmoe-1b-7b", False, "0.49.2", 2 * 16 * 64 * 3 * 2048 * 1024),
        ("olmoe-1b-7b", False, "0.50.0", 0),  # its hook is always called
        ("olmoe-1b-7b", True, "0.49.2", 0),  # layers run again to their end
        ("glm-4.5-air", False, "0.49.2", 0),  # its shared experts come after the routed ones, and keep tensors
    ],
)
def test_early_stop_leaves_experts_in_sixteen_bits(model: str, reentrant: bool, release: str, cached: int) -> None:
    """A module that an exception leaves skips its forward hook, by which bitsandbytes clears its cache.

    An A/B of Axolotl's OLMoE on one GPU, with bitsandbytes 0.49, has 16.96 GiB at its peak: 12.0 of them are these.
    """
    s = job(model=model, reentrant=reentrant, versions={"transformers": "5.12", "bitsandbytes": release},
            lora={"targets": ["q_proj"]}, **QUANTISED)  # fmt: skip
    r = replica_of(s)
    assert sum(line.bytes for line in engine(s, r, s.keeps).left()) == cached
    opened = weights.opened_experts("actor", r.arch, 2)
    assert opened.bytes == (cached or opened.bytes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "lora"}, "given true with method lora, allowed: with qlora"),
        ({"model": "llama-3-8b"}, "modelled for routed experts"),
        ({"sharding": "fsdp2", "gpus": 2}, "with sharding fsdp2, allowed: false, or with none, ddp"),
        ({"versions": {"transformers": "4.57"}}, "its experts are linears"),
        ({"trainer": "llamafactory"}, "with trainer llamafactory, allowed: false"),
        ({"framework": "trl"}, "with trl, allowed: false"),
        ({"trainer": "axolotl"}, "lora.targets: given 'all-linear' with quantize_moe_experts"),
    ],
)
def test_experts_in_four_bits_that_are_not_modelled_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        job(**{"model": "qwen3-30b-a3b", "method": "qlora", "quantize_moe_experts": True} | fields)
    assert message in str(caught.value)


TABLES = 2 * 32 * 32_768 * 128  # elements of cos and sin: 32 layers of Mistral 7B, 32,768 positions, heads of 128


@pytest.mark.parametrize(("sharding", "b"), [("ddp", 2), ("zero2", 2), ("zero3", 2), ("fsdp1", 2), ("fsdp2", 4)])
def test_every_gpu_has_the_rotary_tables_of_each_layer_whole(sharding: str, b: int) -> None:
    """Until Transformers 4.41; in the type of the weights, to which FSDP 1 does not hold: it casts buffers."""
    early, late = (
        sum(
            line.bytes
            for line in engine_of(under(job(model="mistral-7b", versions__transformers=v), sharding)).weights()
        )
        for v in ("4.41", "4.42")
    )
    assert early - late == TABLES * b


def test_gpt_j_has_a_sine_and_a_cosine_of_each_pair_and_position_in_every_layer() -> None:
    """28 layers, 2,048 positions, 32 pairs of the 64 dimensions that rotate, in fp32."""
    (line,) = (x for x in engine_of(under(job(model="gpt-j-6b"), "zero3")).weights() if x.component == "rotary_tables")
    assert line.bytes == 4 * 28 * 2048 * 2 * 32


def test_gpt_neo_has_a_mask_of_all_positions_in_every_layer() -> None:
    """32 layers, 2,048 positions by as many, a byte each."""
    lines = engine_of(under(job(model="gpt-neo-2.7b"), "fsdp2")).weights()
    assert [line.bytes for line in lines if line.formula == "L·S_max^2"] == [32 * 2048**2]


def test_layers_that_share_their_tables_have_none() -> None:
    """Llama until 4.37, Qwen2 until 4.44, of which chat models have 32,768 positions; Unsloth's own until 4.47."""

    def positions(model: str, **fields: Any) -> int:
        return job(model=model, **fields).architecture.cached_positions

    assert positions("llama-2-7b", versions__transformers="4.37") == 4096
    assert positions("llama-2-7b", versions__transformers="4.38") == 0
    assert positions("qwen2.5-7b", versions__transformers="4.44") == 32_768
    assert positions("qwen2.5-7b", versions__transformers="4.45") == 0
    assert positions("llama-3.1-8b", trainer="unsloth", versions__transformers="4.44") == 32_768
    assert positions("llama-3.1-8b", trainer="unsloth", versions__transformers="4.48") == 0
    assert positions("llama-3.1-8b", trainer="torchtune", versions__transformers="4.37") == 0


def test_unsloth_had_all_positions_before_its_tables_grew_and_has_those_of_gemma_in_fp32() -> None:
    """Commit 54dd81de67 of July 2024; models/gemma.py:239 of 2024.8."""

    def tables(model: str, release: str) -> tuple[int, int]:
        fields = {"versions__unsloth": release, "versions__transformers": "4.42"}
        arch = job(model=model, trainer="unsloth", **fields).architecture
        return arch.cached_positions, arch.cached_bytes

    assert tables("qwen2-7b", "2024.6") == (131_072, 0)
    assert tables("qwen2-7b", "2024.7") == (32_768, 0)
    assert tables("gemma-2-9b", "2024.7") == (8192, 4)


def test_starcoder_has_a_mask_of_all_its_positions() -> None:
    """8192² bytes on every GPU, sharded or not; StarCoder 2 has none."""
    for model, masks in ("starcoderbase-1b", [2**26]), ("starcoder2-3b", []):
        alone = job(model=model)
        for s in alone, under(alone, "fsdp2"):
            assert [line.bytes for line in engine_of(s).tables()] == masks
