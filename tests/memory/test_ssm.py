"""State spaces on a tape, against tensors that Transformers 5.23's own mixer saves (`saved_tensors_hooks`)."""

from __future__ import annotations

from typing import Any

import pytest
from tapes import arch

from calc.memory.activations import Program, layer
from calc.memory.kv_cache import cached, pool, state_bytes
from calc.memory.run import Adapter, Run
from calc.models.architecture import LayerSpec

SSM = LayerSpec("ssm", "none")


def formula(model: str, spec: LayerSpec, **run: Any) -> str:
    return layer(Run(arch(model), **run), spec).saved.formula


def test_the_closed_form_of_a_mixer_in_pytorchs_operations() -> None:
    """Nemotron Nano 9B v2, bf16: a norm of 10·h + 4 whose weight multiplies in fp32, and the mixer.

    The projection and the convolution's output, 2·(s_i + s_c + s_n) + 2·s_c. fp32: the input twice, and twice copied
    for a product; what states give, the gate, its SiLU, the output, it gated, it normed, 40·s_i; two time steps and two
    decays, 16·s_n beside 4·s_n of 16 bits; B and C copied twice each and B padded, 20·s_e; the decay between positions,
    C to B and their product, 12·s_p; states joined and copied, one for each 128 positions; eight groups' scales.
    """
    assert formula("nemotron-nano-9b-v2", SSM) == (
        "T·(10·h + 44·s_i + 4·s_c + 22·s_n + 12·s_p + 20·s_e + 0.0625·s_s + 36)"
    )


def test_the_kernel_keeps_its_input_the_output_and_the_norms_scales() -> None:
    """mamba-ssm: 2·(s_i + s_c + s_n) and 2·s_i, with the norm before of 10·h + 4 and eight groups' scales."""
    kernel = formula("nemotron-nano-9b-v2", SSM, linear_kernels=True)
    assert kernel == "T·(10·h + 4·s_i + 2·s_c + 2·s_n + 36)"


SELECTIVE = LayerSpec("ssm", rotated=False)
ALONE = LayerSpec("ssm", "none", rotated=False)


def test_the_closed_form_of_a_selective_scan_in_pytorchs_operations() -> None:
    """Jamba Reasoning 3B, bf16: two norms and an MLP of 16·h + 8·i + 8, as in Llama, and the mixer.

    Of bf16: the projection, the convolution's output before and after SiLU, the biased time step and its softplus, the
    gate's SiLU, and what the output's projection reads, 16·s_i; of fp32, the input and the output, 8·s_i. Of each
    element of the state, in fp32: its decay, the time step times B, and the state; and the state in bf16, 14·s_s.
    Three norms of 8·s_r, 16·s_d and 12, where C is read and B's copy is in fp32, and both factors of the decays.
    """
    assert formula("jamba-reasoning-3b", SELECTIVE, single=True) == (
        "T·(16·h + 24·s_i + 8·s_r + 18·s_d + 14·s_s + 8·i + 20) + 8·s_s"
    )


def test_of_several_sequences_a_copy_is_projected() -> None:
    """The channels that the convolution lets through lie position by position, sequence after sequence: 2·s_i more."""
    assert "26·s_i" in formula("jamba-reasoning-3b", SELECTIVE)


def test_the_kernel_of_a_selective_scan_keeps_a_state_of_each_2048_positions() -> None:
    """The projection, the convolution's output, that, the gate, time steps and outputs before and behind it, 16·s_i;
    B and C copied; and in fp32 two numbers for each element of a state, 8 / 2048.
    """
    assert formula("jamba-reasoning-3b", SELECTIVE, linear_kernels=True) == (
        "T·(16·h + 16·s_i + 8·s_r + 16·s_d + 0.00390625·s_s + 8·i + 20) + 8·s_s"
    )


def test_an_adapter_beside_a_projection_of_time_steps_is_passed_by() -> None:
    """`dt_proj.weight @ time_step`: only a quantised one is called as a module (`JambaMambaMixer.forward`)."""
    run = Run(arch("jamba-reasoning-3b"), trained=False, adapter=Adapter(16, ("x_proj", "dt_proj"), False, 2))
    told = [op.name for op in Program(run, SELECTIVE).layer().ops]
    assert [name for name in told if "dt_proj" in name] == ["ssm_dt_proj"]
    assert len([name for name in told if "x_proj" in name]) > 1


def test_mambas_one_operation_runs_its_convolution_again() -> None:
    """Falcon Mamba, bf16, `MambaInnerFn`: a norm of a copy of the stream, 4·h + 2·h + 2·h + 4; what the projection
    makes, copied, and the output before its gate, 6·s_i; what makes time steps, B and C, and both copied; and the
    decays beside their exponentials, 8·s_s.
    """
    assert formula("falcon-mamba-7b", ALONE, linear_kernels=True, precision="wide-stream") == (
        "T·(8·h + 6·s_i + 2·s_r + 8·s_d + 0.00390625·s_s + 4) + 8·s_s"
    )


def test_under_autocast_that_operation_keeps_the_weights_it_casts() -> None:
    """Those of time steps' two projections and of the output's (`torch.is_autocast_enabled`)."""
    kept = formula("falcon-mamba-7b", ALONE, linear_kernels=True, precision="autocast")
    for module in ("x_proj", "dt_proj", "out_proj"):
        assert f"2·W_ssm_{module}" in kept


def test_a_model_without_attention_keeps_states_alone() -> None:
    """64 layers with 8192 channels of 16 numbers and three positions of the convolution, in bf16."""
    a = arch("falcon-mamba-7b")
    assert state_bytes(a) == 8192 * 16 * 2 + 8192 * 3 * 2
    assert pool(a).bytes == 64 * state_bytes(a)


def test_a_layer_is_one_block_or_two_or_three() -> None:
    """Nemotron-H's MLP alone keeps 4·i; Granite's has both; Falcon-H1 attends beside its state space."""
    assert formula("nemotron-nano-9b-v2", LayerSpec("none", "dense")) == "T·(10·h + 4·i + 4)"
    granite = formula("granite-4-h-micro", LayerSpec("ssm"))
    assert granite == "T·(16·h + 44·s_i + 4·s_c + 22·s_n + 12·s_p + 20·s_e + 0.03125·s_s + 8·i + 12)"
    falcon = formula("falcon-h1-7b", LayerSpec("both"))
    assert "2·q + 4·kv + 4·H + 2·o" in falcon
    assert "12·s_p" in falcon


@pytest.mark.parametrize(("model", "elements"), [("nemotron-nano-9b-v2", 2 * 8 * 128), ("falcon-h1-7b", 2 * 2 * 128)])
def test_only_layers_that_attend_have_a_cache(model: str, elements: int) -> None:
    a = arch(model)
    found = {spec.mixer: cached(a, spec) for spec in a.specs}
    assert found.pop("both", elements) == found.pop("attention", elements) == elements
    assert set(found.values()) <= {0}


def test_a_state_is_as_large_as_its_heads() -> None:
    """128 heads of 80 by 128 in fp32, and three positions of 12,288 channels in bf16; four layers share a block."""
    a = arch("nemotron-nano-9b-v2")
    assert state_bytes(a) == 128 * 80 * 128 * 4 + (128 * 80 + 2 * 8 * 128) * 3 * 2
    assert pool(a).states == 2 * -(-27 // 4)
