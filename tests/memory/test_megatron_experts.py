"""Megatron-core's routed experts: what a layer keeps, how it is cut over ranks, and what uneven routing costs.

Counted in Megatron-LM d98e8a64dd `megatron/core/transformer/moe/{router,moe_utils,token_dispatcher,experts}.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from calc.memory import activations
from calc.memory.run import Run
from calc.models.architecture import Architecture, ConfigError, LayerSpec, layer_tensors, parameters
from calc.models.lora import megatron_linears
from calc.models.slices import part

DENSE = Architecture(
    family="mixtral", hidden=512, specs=(LayerSpec(),) * 2, heads=8, kv_heads=8, head_dim=64, intermediate=1024,
    vocab=1024, tied=False, max_positions=4096, modeling="megatron",
)  # fmt: skip
SPEC = LayerSpec(mlp="experts")
MOE = replace(DENSE, specs=(SPEC,) * 2, experts=8, experts_per_token=2, moe_intermediate=256)


def saved(arch: Architecture, **how: object) -> float:
    """Bytes a token that a layer saves."""
    return activations.layer(replace(Run(arch), **how), arch.specs[0]).saved.tokens  # type: ignore[arg-type]


# top k: an index of 8 bytes, a weight of 4 after the softmax; the place of a row, 8; all of k
# the loss's scores in fp32, a map of a byte and the weights in 16 bits, of all E
ROUTED = (8 + 4 + 8) * 2 + (4 + 1 + 2) * 8


def test_a_layer_keeps_the_inputs_of_both_products_and_of_the_activation() -> None:
    """In place of a dense MLP's gate, up and product, 6·i: 2·k·h + 6·k·j, the weight of each token and expert, 2·k."""
    assert saved(MOE) - saved(DENSE) == ROUTED + 2 * 2 * 512 + 6 * 2 * 256 + 2 * 2 - 6 * 1024


def test_an_activation_without_a_gate_is_weighed_on_its_own() -> None:
    """Input of the activation 2·k·j, its output 2·k·j, and their product with the weights 2·k·j."""
    plain, dense = replace(MOE, gated=False), replace(DENSE, gated=False)
    assert saved(plain) - saved(dense) == ROUTED + 2 * 2 * 512 + 6 * 2 * 256 + 2 * 2 - 4 * 1024


def test_clamped_gates_and_ups_are_kept_before_and_after_they_are_joined() -> None:
    """`weighted_bias_quick_geglu_impl`: both halves of the product, as before, and the activation's input, 4·k·j."""
    assert saved(replace(MOE, experts_clamped=True)) - saved(MOE) == 4 * 2 * 256


def test_experts_of_a_width_of_their_own_stand_between_two_products() -> None:
    """Nemotron 3: what experts read is of l, not of h; the second product keeps their sum, 2·l; the first and the
    router read one tensor."""
    assert saved(replace(MOE, latent_experts=128)) - saved(MOE) == 2 * 2 * (128 - 512) + 2 * 128


def test_biases_of_experts_are_weighed_in_fp32() -> None:
    """`_apply_bias`: the output, each expert's part and all parts joined: 2·k·h and twice 4·k·h, and nothing kept."""
    biased = activations.layer(Run(replace(MOE, expert_bias=True)), SPEC)
    assert biased.saved.tokens == saved(MOE)
    at = [shot.passing.tokens for shot in biased.forward]
    assert max(at) >= (2 + 4 + 4) * 2 * 512


def test_experts_whose_input_is_weighed_keep_it_before_and_after() -> None:
    """`moe_apply_probs_on_input` (Llama 4): what was sent, 2·k·h, beside what is multiplied, and its weights, 2·k."""
    assert saved(replace(MOE, routing="all")) - saved(MOE) == 2 * 2 * 512 + 2 * 2


def test_adapters_of_experts_stored_input_first_have_the_shapes_of_others() -> None:
    first = replace(MOE, experts_input_first=True)
    for arch in (MOE, first):
        fc1, fc2 = [x for x in megatron_linears(arch, SPEC) if x.experts]
        assert (fc1.inputs, fc1.outputs, fc2.inputs, fc2.outputs) == (512, 2 * 256, 256, 512)


def test_deterministic_sums_keep_what_they_add() -> None:
    """The experts' output of each token and expert, 2·k·h, which `index_add_` saves for its backward."""
    assert saved(MOE, deterministic=True) - saved(MOE) == 2 * 2 * 512


def test_expert_ranks_hold_their_experts_and_all_of_the_rest() -> None:
    """One expert has 3·h·j, the router of 8·h stays whole."""
    whole, half = (parameters(part(MOE, 1, ranks)) for ranks in (1, 4))
    assert whole - half == 2 * 6 * 3 * 512 * 256
    (router,) = [t for t in layer_tensors(part(MOE, 1, 4), SPEC) if t.kind == "router"]
    assert router.shape == (8, 512)


def test_tensor_parallelism_leaves_experts_whole_unless_they_are_cut_themselves() -> None:
    for cut, width in ((1, 256), (2, 128)):
        found = part(MOE, 2, 1, cut)
        assert (found.heads, found.moe_intermediate) == (4, width)


def test_as_many_tokens_come_as_go_and_all_of_them_to_each_part_of_an_expert() -> None:
    """Two ranks with half of the positions each: without cut experts a rank has half of the tokens, cut in two all."""
    apart, cut = part(MOE, 2, 2, 1), part(MOE, 2, 2, 2)
    per_expert = 2 * 2 * 512 + 6 * 2 * 256 + 2 * 2
    # the width of an expert halves as the tokens double
    assert saved(cut, sequences=True) - saved(apart, sequences=True) == (2 * 2 * 512 + 2 * 2) / 2
    assert saved(part(MOE, 2, 4, 1), sequences=True) == saved(apart, sequences=True)
    more = saved(apart, sequences=True, imbalance=2) - saved(apart, sequences=True)
    assert more == per_expert / 2


def test_a_capacity_bounds_what_experts_get_and_what_a_router_sends() -> None:
    """An even router sends each expert half of its share where the capacity is a half; places of 8 bytes, too."""
    per_pick = 2 * 2 * 512 + 6 * 2 * 256 + 2 * 2
    assert saved(MOE, capacity=2) == saved(MOE)
    assert saved(MOE) - saved(MOE, capacity=0.5, sent=0.5, imbalance=0.5) == per_pick / 2 + 8 * 2 / 2


def test_a_capacity_is_sorted_out_beside_the_router() -> None:
    """`apply_router_token_dropping`: the best tokens of all experts, 3·k of each token, with places of 8 bytes and
    weights of 2; zeros and a copy with ones, both of 2 bytes for each token and expert. No expert gets more than all.
    """
    for capacity, times in ((3, 3), (5, 4)):
        tape = activations.program(Run(MOE, capacity=capacity), SPEC).layer()
        (drop,) = [op for op in tape.ops if op.name == "router: drop"]
        assert drop.scratch.tokens == {"k": times * (8 + 2), "E": 2 + 2}


def test_shared_experts_are_a_dense_mlp_beside_the_routed_ones() -> None:
    """6·s more, cut by tensor parallelism; its input is the router's."""
    shared = replace(MOE, shared_experts=1, shared_intermediate=256)
    assert saved(shared) - saved(MOE) == 6 * 256
    assert saved(part(shared, 2)) - saved(part(MOE, 2)) == 6 * 128


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        ((1, 3, 1), "expert_parallel: given 3, allowed: a divisor of the model's 8 experts"),
        ((1, 1, 3), "expert_tensor_parallel: given 3, allowed: a divisor of the model's moe_intermediate = 256"),
    ],
)
def test_experts_that_cannot_be_cut_so_are_refused(cut: tuple[int, int, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        part(MOE, *cut)
    with pytest.raises(ConfigError, match="allowed: 1 for a model without experts"):
        part(DENSE, *cut)
