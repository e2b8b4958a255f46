"""Parameters of adapters: as PEFT gives them, by hand, and targets that cannot be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from architectures import DEEPSEEK, architectures, published, tiny
from hypothesis import given
from hypothesis import strategies as st

from calc.catalog.catalog import load
from calc.memory.activations import Program
from calc.memory.run import Adapter, Run
from calc.models.architecture import Architecture, ConfigError, linears
from calc.models.lora import embedding_matrices, end_matrices, lora_parameters
from calc.models.releases import with_experts, with_outputs
from calc.models.slices import part


@pytest.mark.parametrize(
    ("model", "rank", "targets", "count"),
    [
        ("llama-3-8b", 64, "all-linear", 167772160), ("llama-3-8b", 16, ["q_proj", "v_proj"], 6815744),
        ("llama-2-7b", 16, "all-linear", 39976960), ("llama-2-70b", 16, "all-linear", 207093760),
        ("qwen2.5-7b", 16, "all-linear", 40370176), ("qwen3-8b", 16, "all-linear", 43646976),
        ("gemma-2-9b", 16, "all-linear", 54018048), ("phi-3-mini", 16, "all-linear", 25165824),
        ("mixtral-8x7b", 16, "all-linear", 13631488), ("gpt-oss-20b", 16, "all-linear", 7962624),
        ("qwen1.5-moe-a2.7b", 16, "all-linear", 15925632),
    ],
)  # fmt: skip
def test_adapters_have_as_many_parameters_as_peft_gives_them(model: str, rank: int, targets: Any, count: int) -> None:
    assert lora_parameters(published(model), rank, targets) == count


@pytest.mark.parametrize(
    ("model", "more", "count"),
    [
        ("ernie-4.5-21b-a3b", ["gate_proj"], 177_545_216),
        ("nemotron-3-nano-30b-a3b", ["in_proj", "out_proj"], 220_968_448),
    ],
)
def test_experts_that_are_linears_have_adapters_each(model: str, more: list[str], count: int) -> None:
    """As Unsloth's notebooks on both models print them, with Transformers 4.56 and PEFT 0.18 (nb/ERNIE_4_5_21B_A3B_PT-
    Conversational.ipynb, nb/Nemotron-3-Nano-30B-A3B_A100.ipynb): Nemotron's output projections have one, too.
    """
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", *more]
    assert lora_parameters(with_outputs(with_experts(published(model), "4.56"), "0.18"), 8, targets) == count


def test_embedding_and_head_have_adapters_where_they_are_named() -> None:
    """Rank 16 beside q, v, embedding and head of Llama 3.2 1B, whose head is tied, gets 5,873,664 parameters from PEFT
    0.21.2 (its `get_peft_model`): 16 layers of 2048 + 2048 and 2048 + 512, then 128,256 + 2048 twice, 16 times each.
    """
    llama = published("llama-3.2-1b")
    ends = 16 * (128_256 + 2048)
    assert lora_parameters(llama, 16, ["embed_tokens"]) == lora_parameters(llama, 16, ["lm_head"]) == ends
    assert lora_parameters(llama, 16, ["q_proj", "v_proj", "embed_tokens", "lm_head"]) == 5_873_664
    rows, columns = embedding_matrices(llama, 16, ["embed_tokens"])
    assert (rows.shape, columns.shape) == ((16, 128_256), (2048, 16))
    assert end_matrices(llama, 16, "all-linear") == end_matrices(llama, 16, ["q_proj"]) == ()
    with pytest.raises(ConfigError, match="given 'embed_tokens'"):
        lora_parameters(published("bloom-560m"), 1, ["embed_tokens"])  # whose table is `word_embeddings`


def test_a_target_may_say_where_its_linear_lies() -> None:
    """Names such as Axolotl's example for Qwen3-Next has: 2,048 inputs and 512 outputs in each of 48 layers."""
    qwen = published("qwen3-next-80b-a3b")
    targets = ("mlp.shared_expert.up_proj",)
    assert lora_parameters(qwen, 1, targets) == 48 * (2048 + 512)
    tape = Program(Run(qwen, trained=False, adapter=Adapter(1, targets, False, 2)), qwen.specs[0]).layer()
    assert {op.name.partition(":")[0] for op in tape.ops if "LoRA" in op.name} == {"shared_up_proj"}


@pytest.mark.parametrize(
    ("model", "version"), [("gpt-oss-20b", "4.56"), ("llama-4-scout", "4.56"), ("qwen3-30b-a3b", "5.0")]
)
def test_experts_that_are_parameters_have_none(model: str, version: str) -> None:
    assert with_experts(published(model), version) == published(model)


def test_experts_of_qwen3_vl_were_rows_of_two_parameters_before_transformers_5() -> None:
    """4.57.0 `models/qwen3_vl_moe/modeling_qwen3_vl_moe.py`, `Qwen3VLMoeTextExperts`: input first, and no linears."""
    arch = load().model("qwen3-vl-30b-a3b").reading(images=True)
    old = with_experts(arch, "4.57")
    assert old.experts_input_first and not old.expert_linears and with_experts(arch, "5.0") == arch
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert lora_parameters(old, 8, "all-linear") == lora_parameters(old, 8, attention)


def test_lora_by_hand() -> None:
    """Inputs + outputs: q and o 16, k and v 12, gate, up and down 20: 116 a layer; a module named twice counts once."""
    arch = tiny("llama", num_key_value_heads=2)
    assert lora_parameters(arch, 3, "all-linear") == 3 * 2 * 116
    assert lora_parameters(arch, 3, ("k_proj", "self_attn.k_proj")) == 3 * 2 * 12
    deepseek = tiny("deepseek_v3", **DEEPSEEK)  # down_proj: dense 12 + 8, and of the shared expert 6 + 8
    assert lora_parameters(deepseek, 1, ["down_proj"]) == 20 + 14


@pytest.mark.parametrize(
    ("targets", "named"),
    [
        (["q_prj"], "did you mean 'q_proj'?"), (["proj"], "allowed: down_proj, gate_proj"),
        ("all-linaer", "did you mean 'all-linear'?"), (["q_proj", "lm_heads"], "given 'lm_heads'"),
    ],
)  # fmt: skip
def test_a_target_that_no_module_has(targets: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=r"^lora\.targets: given ") as caught:
        lora_parameters(tiny("llama"), 8, targets)
    assert named in str(caught.value)


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, None])
def test_a_rank_that_cannot_be(rank: Any) -> None:
    with pytest.raises(ConfigError, match=r"^lora\.rank: .*allowed: a positive integer$"):
        lora_parameters(tiny("llama"), rank, "all-linear")


def test_adapters_are_counted_on_every_layer_of_both_kinds() -> None:
    """DeepSeek V2 Lite: o_proj has 16 · 128 inputs and 2,048 outputs in each of 27 layers, one of them dense."""
    assert lora_parameters(published("deepseek-v2-lite"), 1, ["o_proj"]) == 27 * (2048 + 2048)


@pytest.mark.parametrize("targets", ["o_proj", "Linear", "all-linears"])
def test_a_single_name_that_is_no_list_is_refused(targets: str) -> None:
    """Only `all-linear` is a string."""
    with pytest.raises(ConfigError, match="all-linear or a list"):
        lora_parameters(published("llama-3-8b"), 8, targets)


@given(architectures(), st.integers(1, 64))
def test_lora_is_linear_in_the_rank_and_in_the_targets(arch: Architecture, rank: int) -> None:
    names = {linear.name for i in range(arch.layers) for linear in linears(arch, arch.specs[i])}
    one = lora_parameters(arch, 1, "all-linear")
    assert lora_parameters(arch, rank, "all-linear") == rank * one
    assert lora_parameters(arch, 1, sorted(names)) == one
    assert sum(lora_parameters(arch, 1, [name]) for name in names) == one


def test_megatron_core_joins_linears_and_its_experts_have_adapters_of_their_own() -> None:
    """Of tiny Llama, h 8, q 8, kv 4, i 12: qkv 8 + 16, proj 16, fc1 8 + 24, fc2 20.

    Qwen3 30B-A3B's experts, 2048 and 2·768 and 768 and 2048, 128 in each of 48 layers, of which a rank has a quarter.
    """
    arch = replace(tiny("llama", num_key_value_heads=2), modeling="megatron")
    assert lora_parameters(arch, 3, "all-linear") == 3 * 2 * (24 + 16 + 32 + 20)
    assert lora_parameters(arch, 1, ["linear_qkv"]) == 2 * 24
    with pytest.raises(ConfigError, match="allowed: linear_fc1, linear_fc2, linear_proj, linear_qkv"):
        lora_parameters(arch, 1, ["q_proj"])
    experts = replace(published("qwen3-30b-a3b"), modeling="megatron")
    assert lora_parameters(experts, 1, ["linear_fc1", "linear_fc2"]) == 48 * 128 * (2048 + 1536 + 768 + 2048)
    quarter = part(experts, 1, 4)
    assert lora_parameters(quarter, 1, ["linear_fc1"]) == 48 * 32 * (2048 + 1536)


def test_latent_attention_of_megatron_core_has_linears_of_its_own() -> None:
    """DeepSeek V2 Lite: q 2048 to 16·192, down to 512 + 64, up to 16·256, out of 16·128."""
    latent = replace(published("deepseek-v2-lite"), modeling="megatron")
    counts = {"linear_q_proj": 2048 + 3072, "linear_kv_down_proj": 2048 + 576, "linear_kv_up_proj": 512 + 4096,
              "linear_proj": 2048 + 2048}  # fmt: skip
    for name, width in counts.items():
        assert lora_parameters(latent, 1, [name]) == 27 * width
