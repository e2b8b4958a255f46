"""Megatron-core's selective recomputation: what a layer keeps less, and what its parts take when they run again.

Counted in Megatron-LM d98e8a64dd `megatron/core/tensor_parallel/random.py` and `core/transformer/`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from calc.autograd.lifetimes import Lifetimes
from calc.autograd.polynomial import amount, snapshots
from calc.base.plan import Recomputed
from calc.memory import activations
from calc.memory.run import Adapter, Run, dimensions
from calc.models.architecture import Architecture, LayerSpec
from calc.models.mixers import Delta, Mla
from calc.models.slices import part
from calc.resolve.parse import parse
from calc.scenario.scenario import ScenarioError

H, HEADS, INNER = 512, 8, 1024
DENSE = Architecture(
    family="qwen3", hidden=H, specs=(LayerSpec(),) * 2, heads=HEADS, kv_heads=HEADS, head_dim=64, intermediate=INNER,
    vocab=1024, tied=False, max_positions=4096, modeling="megatron",
)  # fmt: skip
MOE = replace(
    DENSE, specs=(LayerSpec(mlp="experts"),) * 2, experts=8, experts_per_token=2, moe_intermediate=256,
    shared_experts=1, shared_intermediate=384,
)  # fmt: skip
LATENT = replace(
    DENSE, specs=(LayerSpec("latent"),) * 2, mla=Mla(256, 128, 64, 32, 64), head_dim=96, positions=0,
)  # fmt: skip
HYBRID = replace(DENSE, specs=(LayerSpec("delta"),) * 2, delta=Delta(4, 8, 64, 64, 4, 4))
# of all experts and of the best: see `test_megatron_experts`
ROUTED = (8 + 4 + 8) * 2 + (4 + 1 + 2) * 8


def saved(arch: Architecture, *parts: Recomputed, **how: object) -> float:
    """Bytes a token that a layer saves."""
    run = replace(Run(arch, training=True, again=frozenset(parts)), **how)  # type: ignore[arg-type]
    return activations.layer(run, arch.specs[0]).saved.tokens


# what is not kept: a norm's scale and output, gate and up, and their product; the router's records, the inputs of both
# grouped products and of the activation, the weights, and the shared expert's 6·s; the log-sum-exp, while the product
# of queries, keys and values stays in place of a copy of the values; the activation's output for each token and expert;
# 6·s; the norm before the experts with its scale; norms of the low ranks 256 and 128 with their scales, and queries and
# keys of 8 heads of 96, values of 64 (the product with the rotary key, its input, stays, of which the norm otherwise
# has a copy); the norm of values of 8·64, with a scale each, and what the output projection multiplies
LESS: dict[Recomputed, tuple[Architecture, int]] = {
    "mlp": (DENSE, 4 + 2 * H + 6 * INNER),
    "moe": (MOE, ROUTED + 2 * 2 * H + 6 * 2 * 256 + 2 * 2 + 6 * 384),
    "core_attn": (DENSE, 4 * HEADS - 2 * 2 * H),
    "moe_act": (MOE, 2 * 2 * 256),
    "shared_experts": (MOE, 6 * 384),
    "layernorm": (MOE, 2 * H + 4),
    "mla_up_proj": (LATENT, 2 * (256 + 128) + 2 * 4 + 2 * 8 * (96 + 96 + 64) - 2 * 32),
    "gdn_norm_out": (HYBRID, 2 * 2 * 8 * 64 + 4 * 8),
}


def test_attention_that_runs_again_keeps_the_product_of_all_three() -> None:
    """With four heads of queries to one of keys: the fused kernel reads a copy of the values, made within what runs
    again, so that what stays is the product of queries, keys and values, 64·(8 + 2 + 2) numbers, in place of that copy
    and of the log-sum-exp (Megatron-core 0.16.1 `core/transformer/attention.py`, `_checkpointed_attention_forward`).
    The copy is there in both passes.
    """
    grouped = replace(DENSE, kv_heads=2)
    copy = 2 * 2 * 64
    assert saved(grouped) - saved(grouped, "core_attn") == 4 * HEADS + copy - 2 * 64 * (8 + 2 + 2)
    ops = [
        next(op for op in activations.program(run, grouped.specs[0]).layer().ops if op.name == "attention")
        for run in (Run(grouped, training=True, again=frozenset(again)) for again in ((), ("core_attn",)))
    ]
    dims = dimensions(grouped)
    forward, backward = ([amount(x, dims).tokens for x in way] for way in (
        [op.scratch for op in ops], [op.backward_scratch for op in ops]
    ))  # fmt: skip
    assert forward[1] - forward[0] == copy
    assert backward[1] - backward[0] == copy + 2 * H + 4 * HEADS  # and its output, with the log-sum-exp


@pytest.mark.parametrize("name", LESS)
def test_a_part_that_runs_again_keeps_its_input_alone(name: Recomputed) -> None:
    arch, less = LESS[name]
    assert saved(arch) - saved(arch, name) == less
    other = DENSE if arch is MOE else MOE
    if name != "core_attn":
        assert saved(other) == saved(other, name)


def test_shared_experts_within_the_whole_are_kept_no_more() -> None:
    assert saved(MOE, "moe", "shared_experts") == saved(MOE, "moe")


def test_a_norm_before_latent_attention_goes_with_its_block() -> None:
    """It is no part of a product there, as it is before other attention: 2·h and its scale."""
    assert saved(LATENT) - saved(LATENT, "layernorm") == 2 * H + 4


def test_what_was_let_go_is_there_again_for_the_backward_of_what_is_behind() -> None:
    """The gated norm: as much is saved at the backward of the output projection as without; less above it."""
    turns: list[dict[str, float]] = []
    for parts in ((), ("gdn_norm_out",)):
        run = Run(HYBRID, training=True, again=frozenset(parts))  # type: ignore[arg-type]
        shots = snapshots(Lifetimes(activations.program(run, HYBRID.specs[0]).layer()).backward.turns)
        turns.append({shot.name: amount(shot.saved, dimensions(HYBRID)).tokens for shot in shots})
    kept, gone = turns
    less = LESS["gdn_norm_out"][1]
    assert kept["linear_fc2"] - gone["linear_fc2"] == less
    assert kept["out_proj"] == gone["out_proj"]
    assert kept["in_proj"] == gone["in_proj"]


def test_an_adapters_activation_goes_too() -> None:
    """Beside a frozen second product the adapter keeps its output; 2·k·j less, and nothing of the rest."""
    adapter = Adapter(8, "all-linear", False, 2)
    how = {"trained": False, "adapter": adapter}
    assert saved(MOE, **how) - saved(MOE, "moe_act", **how) == 2 * 2 * 256


def test_a_part_is_cut_as_its_layer_is() -> None:
    """Two ranks with sequence parallelism: everything that an MLP keeps halves."""
    half = part(DENSE, 2)
    less = saved(half, sequences=True) - saved(half, "mlp", sequences=True)
    assert less == (4 + 2 * H + 6 * INNER) / 2


def test_a_part_takes_its_own_peak_when_it_runs_again() -> None:
    """Forward: the norm's output 2·h, gate and up 4·i, their product 2·i.

    Backward: the norm's output and scale, gate and up with their gradients 8·i, and that of the product 2·i.
    """
    run = Run(DENSE, training=True, again=frozenset({"mlp"}))
    (mlp,) = [op for op in activations.program(run, DENSE.specs[0]).layer().ops if op.name == "mlp"]
    dims = dimensions(DENSE)
    forward, backward = (amount(size, dims).tokens for size in (mlp.scratch, mlp.backward_scratch))
    assert forward == 2 * H + 6 * INNER
    assert backward == 4 + 2 * H + 10 * INNER
    assert mlp.weight == 3 * H * INNER + H


def test_rotation_in_one_kernel_keeps_no_angles() -> None:
    """Unfused, queries and keys keep a cosine and a sine of 64 numbers a position each, in bf16."""
    plain = replace(DENSE, modeling="megatron-plain")
    assert saved(plain) - saved(plain, rotates=True) == 2 * 2 * 64 * 2
    assert saved(DENSE) == saved(DENSE, rotates=True)


def test_rotation_is_fused_only_where_it_is_not_already() -> None:
    job = {
        "model": "qwen2.5-7b", "task": "grpo", "gpu": "h100-sxm", "gpus": 8, "sharding": "megatron", "prompt_len": 512,
        "response_len": 512, "rollout": {"n": 4, "batch": 64}, "apply_rope_fusion": True,
    }  # fmt: skip
    assert parse(job | {"framework": "verl==0.5.0"}).apply_rope_fusion
    for other in ({"framework": "verl==0.9.1"}, {"framework": "verl==0.5.0", "sharding": "fsdp1"}):
        with pytest.raises(ScenarioError, match="apply_rope_fusion: given true, allowed: false, or with layers"):
            parse(job | other)


def test_gathered_keys_and_values_are_there_at_once_and_once_more_for_each_half_of_the_queries() -> None:
    """On 4 ranks, keys and values of all, 4·4·kv bytes a token of one rank's, twice forward and four times backward;
    what is kept is the same as around a ring."""
    ring, gathered = (Run(DENSE, context=4, exchange=how) for how in ("", "all-gather"))  # type: ignore[arg-type]
    assert saved(DENSE, context=4) == saved(DENSE, context=4, exchange="all-gather")
    sizes = []
    for run in (ring, gathered):
        (op,) = [op for op in activations.program(run, DENSE.specs[0]).layer().ops if op.name == "attention"]
        sizes.append([amount(size, dimensions(DENSE)).tokens for size in (op.scratch, op.backward_scratch)])
    q = kv = DENSE.heads * DENSE.head_dim
    sums = 4 * q + 4 * DENSE.heads  # of the kernel's own backward
    assert sizes[0] == [4 * 4 * kv + 4 * 2 * q, sums + 5 * 4 * kv + 2 * q]
    assert sizes[1] == [2 * 4 * 4 * kv + 2 * q + 2 * 2 * q, sums + 4 * 4 * 4 * kv + 2 * 2 * q + 2 * 2 * q]


def test_heads_swapped_for_positions_keep_attentions_output_twice() -> None:
    """2·q bytes a token more than around a ring: what the kernel made, and what came back of it."""
    q = DENSE.heads * DENSE.head_dim
    assert saved(DENSE, context=4, exchange="all-to-all") - saved(DENSE, context=4) == 2 * q
    job = {"model": "qwen3-8b", "task": "sft", "trainer": "megatron", "gpu": "h100-sxm", "gpus": 8, "seq_len": 8192,
           "cp_comm_type": "a2a"}  # fmt: skip
    assert parse(job | {"context_parallel": 4}).cp_comm_type == "a2a"
    with pytest.raises(ScenarioError, match="heads of queries and keys that 16 GPUs share"):
        parse(job | {"context_parallel": 8, "tensor_parallel": 2, "gpus": 16})


def test_keys_and_values_are_gathered_only_among_context_parallel_gpus_of_megatron() -> None:
    job = {"model": "qwen3-8b", "task": "sft", "framework": "torch", "gpu": "h100-sxm", "gpus": 8, "seq_len": 8192,
           "cp_comm_type": "all_gather", "attention": "flash"}  # fmt: skip
    assert parse(job | {"trainer": "megatron", "context_parallel": 4}).cp_comm_type == "all_gather"
    for other in ({"trainer": "megatron"}, {"context_parallel": 4, "sharding": "fsdp2", "attention": "sdpa"}):
        with pytest.raises(ScenarioError, match="cp_comm_type: given 'all_gather', allowed: p2p, or with context_para"):
            parse(job | other)


def test_modules_of_transformers_layers_keep_their_inputs_alone() -> None:
    """Both norms', attention's and the MLP's, 2h each (NeMo Automodel b4733bdc1 `distributed/parallelizer.py`).

    While one runs again, what another would make is not there: the backward of a layer that runs again as a whole sees
    all of it at once.
    """
    plain = replace(DENSE, modeling="")
    assert saved(plain, "layernorm", "self_attn", "mlp") == 4 * 2 * H
    job = {"model": "llama-3.2-1b", "task": "sft", "gpu": "h100-sxm", "gpus": 8, "sharding": "fsdp2"}
    parts = {"checkpointing": "selective", "recompute_modules": ["layernorm", "self_attn", "mlp"]}
    s = parse(job | parts)
    assert parse(s.as_dict()) == s
    for more, refused in (
        (
            {"recompute_modules": ["core_attn"]},
            "given core_attn with sharding fsdp2, allowed: layernorm, self_attn, mlp",
        ),
        (
            {"trainer": "axolotl"},
            "given layernorm, self_attn, mlp with trainer axolotl, allowed: null, or with trainer own",
        ),
        ({"model": "qwen3-30b-a3b"}, "with model qwen3-30b-a3b, allowed: null; not modelled there"),
    ):
        with pytest.raises(ScenarioError, match=refused):
            parse(job | parts | more)
