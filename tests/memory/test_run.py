"""The number formats and shares of a run, property by property."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import job

from calc.catalog.catalog import load
from calc.memory.run import Adapter, Run, biased, dimensions, elements, short, symbol
from calc.models.slices import part

ARCH = job().architecture
PLAIN = Run(ARCH)
ADAPTER = Adapter(8, "all-linear", False, 4)


def test_a_run_is_bf16_frozen_to_nothing_and_alone_unless_it_says_otherwise() -> None:
    """The tapes of `torch`: one model, its own weights trained, PyTorch's flash kernel, no autocast, no rank beside;
    what reads the stream first would find a hook of checkpointing.
    """
    plain = Run(ARCH)
    said = {name for name in Run.__slots__ if getattr(plain, name) is True}
    assert said == {"trained", "nested", "hooked"}
    assert (plain.precision, plain.kernel, plain.context, plain.exchange) == ("bf16", "flash", 1, "")
    assert (plain.unpacked, dimensions(ARCH)["r"]) == (0, 0)


@pytest.mark.parametrize(
    ("precision", "compute", "residual", "autocast"),
    [
        ("bf16", 2, 2, False), ("fp32", 4, 4, False), ("autocast", 2, 4, True), ("autocast-bf16", 2, 2, True),
        ("autocast-wide", 2, 4, True),
    ],
)  # fmt: skip
def test_products_and_the_residual_stream_have_types_of_their_own(
    precision: str, compute: int, residual: int, autocast: bool
) -> None:
    """Autocast multiplies in 16 bits; what it adds up has the type of the embedding (torch `autocast_mode.cpp`)."""
    run = replace(PLAIN, precision=precision)
    assert (run.compute, run.residual, run.autocast) == (compute, residual, autocast)


def test_autocast_caches_casts_of_fp32_weights_that_require_gradients() -> None:
    """`cached_cast`: a leaf, in fp32, with requires_grad; bf16 weights need no cast."""
    for precision, caches in (("autocast", True), ("autocast-bf16", False), ("bf16", False), ("fp32", False)):
        assert replace(PLAIN, precision=precision).caches == caches
    frozen = replace(PLAIN, precision="autocast", trained=False)
    assert not frozen.caches
    assert replace(frozen, differentiable=True).caches


def test_reentrant_checkpointing_under_fsdp_1_retains_inputs_of_frozen_layers() -> None:
    """The hook that reshards a unit without gradients refers to its inputs: adapters beside it, and both."""
    assert replace(PLAIN, reentrant=True, flat=True, adapter=ADAPTER).retains
    assert not replace(PLAIN, reentrant=True, flat=True).retains
    assert not replace(PLAIN, reentrant=True, adapter=ADAPTER).retains
    assert not replace(PLAIN, adapter=ADAPTER).retains


def test_megatron_cores_dispatcher_retains_inputs_of_layers_that_run_again() -> None:
    """The router's probabilities stay with their graph, at whose end is the input; a dense model has none."""
    routed = replace(ARCH, modeling="megatron", experts=8, experts_per_token=2)
    assert Run(routed, reentrant=True).retains
    assert not Run(routed, reentrant=True, frees_inputs=True).retains  # verl
    assert not Run(routed).retains
    assert not Run(replace(routed, experts=0), reentrant=True).retains


@pytest.mark.parametrize(("kernel", "whole"), [("eager", True), ("math", True), ("flash", False), ("efficient", False)])
def test_scores_are_whole_where_no_kernel_fuses_them(kernel: str, whole: bool) -> None:
    assert replace(PLAIN, kernel=kernel).whole_scores == whole


def test_sequence_parallel_ranks_have_a_part_of_the_positions_each() -> None:
    """Of two and four ranks; tensor parallelism alone leaves the residual stream whole."""
    for ranks in (2, 4):
        cut = part(ARCH, ranks)
        assert Run(cut, sequences=True).share == 1 / ranks
        assert Run(cut).share == 1


def test_elements_of_a_linear_are_its_weight_and_its_bias() -> None:
    """Qwen2.5 7B: q 3,584 · 3,584 + 3,584, k 3,584 · 512 + 512; o has no bias, norms neither."""
    qwen = job(model="qwen2.5-7b").architecture
    found = elements(qwen, qwen.specs[0])
    assert (found["q_proj"], found["k_proj"]) == (3584 * 3584 + 3584, 3584 * 512 + 512)
    assert (found["o_proj"], found["input_layernorm"]) == (3584 * 3584, 3584)
    assert biased(qwen, qwen.specs[0]) == {"q_proj", "k_proj", "v_proj"}


def test_a_weight_and_a_bias_of_equal_bits_are_still_added() -> None:
    """One input and eight outputs of eight heads: 64 + 8 and 8 + 8 share bits, 72 and 16 are sums."""
    odd = replace(ARCH, hidden=8, heads=8, kv_heads=1, head_dim=1, qkv_bias=True, intermediate=8)
    found = elements(odd, odd.specs[0])
    assert found["q_proj"] == 8 * 8 + 8
    one = replace(odd, hidden=1, heads=1)
    assert elements(one, one.specs[0])["q_proj"] == 1 + 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.*.mlp.down_proj.weight", "down_proj"),
        ("model.layers.*.mlp.experts.down_proj", "experts_down_proj"),
        ("model.layers.*.mlp.shared_experts.down_proj.weight", "shared_down_proj"),
        ("model.layers.*.mlp.shared_expert.down_proj.weight", "shared_down_proj"),
    ],
)
def test_short_names_tell_experts_from_dense_layers(name: str, expected: str) -> None:
    assert short(name) == expected


def test_an_adapter_reads_in_the_type_of_its_weights_and_has_a_parameter_of_its_own() -> None:
    """Unless it says otherwise: fp32 matrices see fp32 inputs, and the weights beside them get no gradient."""
    assert (ADAPTER.reads, ADAPTER.joined) == (0, False)


def test_a_symbol_is_a_name_and_a_product_of_names_is_their_product() -> None:
    """So that a formula can be computed as it is printed: Gemma 3n's projections are a list, Nemotron 3's experts read
    features of a width of their own."""
    for model in load().models.values():
        found = dimensions(model.architecture)
        assert all(part.isidentifier() for name in found for part in name.split("·")), model.id
        for name in [name for name in found if "·" in name]:
            first, second = name.split("·")
            assert found[name] == found[first] * found[second], (model.id, name)
    assert symbol("altup_projections.1") == "W_altup_projections_1"
