"""PyTorch FSDP 1, worked by hand for Llama 3 8B over 8 GPUs, bf16 compute and fp32 shards (fsdp-mixed).

What is alive was read in torch 2.13 `distributed/fsdp/_runtime_utils.py` and `_flat_param.py` and agrees with traces of
it. p = 218,112,000 elements of a layer, r = 2·V·h + h = 1,050,677,248 of the root group.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs import FORWARD, LAYER, VH, P, at, engine, moments, total

from calc.engines.fsdp1 import Fsdp1
from calc.engines.replica import Where
from calc.resolve.parse import parse
from calc.scenario.scenario import ScenarioError

ROOT = 2 * VH + 4096
PART = P // 8
BELOW = Where("layer", 30, True, ROOT - VH, LAYER, LAYER, 0)
JOIN = Where("join", 30, True, ROOT - VH, LAYER, LAYER)
END = Where("end", 0, True, ROOT - VH, 32 * LAYER, 0, VH)
REDUCE = Where("reduce", 0, True, ROOT - VH, 32 * LAYER, VH)
QV = 2 * 8 * (4096 + 4096 + 4096 + 1024) // 2  # rank 8 beside q_proj and v_proj, elements of a layer


def fsdp(**fields: object) -> Fsdp1:
    """An FSDP 1 job's engine."""
    found = engine(**{"gpus": 8, "sharding": "fsdp1", "precision": "fsdp-mixed", "optimizer_impl": "fused"} | fields)
    assert isinstance(found, Fsdp1)
    return found


def lora(**fields: object) -> Fsdp1:
    """One with adapters of 8·(4096 + 4096) and 8·(4096 + 1024) elements a layer, all in bf16."""
    given = {"rank": 8, "targets": ["q_proj", "v_proj"], "dtype": "bf16"} | fields.pop("lora", {})  # type: ignore[operator]
    return fsdp(**{"precision": "bf16", "method": "lora", "lora": given} | fields)


# --- what is gathered ---


def test_forward_holds_one_layer_and_the_cast_of_its_shard_while_it_comes_together() -> None:
    """What is freed counts no more as soon as the host has asked for it: 2r + 2p, and 2p/N until it is gathered."""
    e = fsdp()
    assert total(e.at(Where("gather", 31, False))) == 2 * ROOT + 2 * LAYER + 2 * LAYER // 8
    assert at(e.at(Where("gather", 31, False)), "communication#fsdp1") == 2 * LAYER // 8
    assert total(e.at(FORWARD)) == 2 * ROOT + 2 * LAYER
    for segment in ("norm", "head", "loss", "outside"):
        assert total(e.at(Where(segment, 32, False))) == 2 * ROOT


def test_weights_in_the_compute_type_are_gathered_as_they_are() -> None:
    """`_uses_param_mixed_precision` of `_flat_param.py`: no cast of bf16 weights computed in bf16."""
    assert total(fsdp(precision="bf16").at(Where("gather", 31, False))) == 2 * ROOT + 2 * LAYER


def test_backward_fetches_the_next_layer_when_one_begins() -> None:
    """The root's hook asks for the top layer before the head's backward, each layer's for the next one."""
    e = fsdp()
    for segment in ("loss", "head", "norm"):
        assert at(e.at(Where(segment, 32, True)), "communication#gathered") == 2 * ROOT + 2 * LAYER
    assert at(e.at(BELOW), "communication#gathered") == 2 * ROOT + 2 * 2 * LAYER
    assert at(e.at(Where("layer", 0, True)), "communication#gathered") == 2 * ROOT + 2 * LAYER
    assert at(e.at(END), "communication#gathered") == 2 * ROOT
    # a loss outside the model comes before its hooks
    assert at(e.at(Where("outside", 32, True)), "communication#gathered") == 2 * ROOT


def test_an_embedding_that_is_a_unit_comes_for_its_backward_alone() -> None:
    """The root has final norm and head, whose gradients wait to the end; one unit's are joined beside the other's."""
    e, head = fsdp(outer_units="embedding"), VH + 4096
    assert total(e.at(FORWARD)) == 2 * head + 2 * LAYER
    assert at(e.at(BELOW), "communication#gathered") == 2 * head + 2 * 2 * LAYER
    assert at(e.at(Where("layer", 0, True)), "communication#gathered") == 2 * head + 2 * LAYER + 2 * VH
    assert at(e.at(END), "communication#gathered") == 2 * head + 2 * VH
    assert at(e.at(REDUCE), "gradients#joined") == 2 * head
    assert at(e.at(REDUCE), "gradients#unreduced") == 2 * VH
    with pytest.raises(
        ScenarioError, match="given embedding with sharding fsdp2, allowed: root, or with sharding fsdp1"
    ):
        fsdp(sharding="fsdp2", outer_units="embedding")


def test_one_rank_gathers_nothing_but_what_it_casts() -> None:
    """`NO_SHARD`: bf16 weights are there; of fp32 ones a unit's cast takes the place of what others gather."""
    assert total(fsdp(gpus=1, precision="bf16").at(FORWARD)) == 0
    assert total(fsdp(gpus=1).at(FORWARD)) == 2 * ROOT + 2 * LAYER


@pytest.mark.parametrize(
    ("transformers", "checkpointing", "layers"), [("4.57", "full", 1), ("5.0", "full", 2), ("4.57", "none", 2)]
)
def test_reentrant_checkpointing_gathers_no_layer_ahead_in_backward(
    transformers: str, checkpointing: str, layers: int
) -> None:
    """`_needs_pre_backward_unshard` is set where outputs have a gradient, which those of its first forward have not.

    Transformers' `gradient_checkpointing_enable` takes `use_reentrant: True` by default up to 4.57.
    """
    e = fsdp(precision="bf16", checkpointing=checkpointing, versions={"transformers": transformers})
    assert at(e.at(Where("layer", 30, True)), "communication#gathered") == 2 * ROOT + layers * 2 * LAYER
    assert at(e.at(Where("layer", 30, False)), "communication#gathered") == 2 * ROOT + 2 * LAYER
    for segment in ("loss", "head", "norm"):
        # the last layer, too, waits for its own turn
        gathered = at(e.at(Where(segment, 32, True)), "communication#gathered")
        assert gathered == 2 * ROOT + (layers - 1) * 2 * LAYER


# --- gradients ---


def test_a_layers_gradients_are_joined_in_a_copy_before_they_are_cast() -> None:
    """While the layer runs: weights 2·2p, gradients so far 2p, the head's 2(r - V·h), shards of the layer above 4p/8.

    At the join there are two of 2p. The reduction has left the layer's own weights and its parts, and has 4p and 4p/8
    more: 2p of the next layer + 2p + 4p + 4p/8.
    """
    e, shards = fsdp(), 4 * LAYER // 8
    kept = 2 * ROOT + 2 * (ROOT - VH) + shards
    assert total(e.at(BELOW)) == kept + 2 * 2 * LAYER + 2 * LAYER
    assert total(e.at(JOIN)) == kept + 2 * LAYER + 2 * LAYER + 4 * LAYER + shards
    # nothing is cast: own weights, the next layer's, parts and the whole, 8p
    plain = fsdp(precision="bf16")
    assert total(plain.at(JOIN)) == 2 * ROOT + 2 * (ROOT - VH) + 2 * LAYER // 8 + 8 * LAYER


def test_the_roots_gradients_come_last() -> None:
    """Weights have been left: 2r + 4r + 4r/8 beside the layers' shards; in bf16 weights, parts and the whole, 6r."""
    assert total(fsdp().at(REDUCE)) == 6 * ROOT + 4 * ROOT // 8 + 4 * 32 * LAYER // 8
    assert total(fsdp(precision="bf16").at(REDUCE)) == 6 * ROOT + 2 * 32 * LAYER // 8


def test_shards_stay_through_the_forward_of_the_next_micro_batch() -> None:
    """Reduced in every micro-batch: 4P/N."""
    assert total(fsdp(global_batch=16).at(FORWARD), "gradients") == 4 * PART
    assert total(fsdp().at(FORWARD), "gradients") == 0


def test_no_sync_keeps_whole_gradients_in_the_compute_type() -> None:
    """Two micro-batches: the first makes 2 bytes for each element, the second reduces the layers above.

    With three the second finds all of them when it comes to the end, and has its own joined beside.
    """
    e = fsdp(global_batch=16, no_sync=True)
    assert total(e.at(FORWARD), "gradients") == 2 * P
    below = Where("layer", 20, True, ROOT - VH, 11 * LAYER, LAYER)
    fresh = 2 * (ROOT - VH + LAYER)
    assert total(e.at(below), "gradients") == 2 * (P - 11 * LAYER) + 4 * 11 * LAYER // 8 + fresh
    # at the end of the first: all layers' whole
    assert total(e.at(END), "gradients") == 2 * 32 * LAYER + 2 * (ROOT - VH)
    more = fsdp(global_batch=24, no_sync=True)
    assert total(more.at(END), "gradients") == 2 * P + 2 * (ROOT - VH)
    alone = fsdp(global_batch=8)
    assert fsdp(global_batch=8, no_sync=True).at(BELOW) == alone.at(BELOW)


# --- adapters ---


def test_adapters_in_units_of_their_own_are_reduced_one_by_one() -> None:
    """PEFT's policy: a layer has no gradient, and a shard of each adapter's stays, 2 bytes an element over 8 ranks."""
    e = lora()
    where = Where("layer", 30, True, 0, QV, QV)
    assert total(e.at(where), "gradients") == 2 * 2 * QV // 8
    assert total(e.at(where._replace(segment="join")), "temporary") == 0
    assert total(moments(e, "stepping")["optimizer step"]) == 2 * 32 * QV // 8 + total(
        moments(e, "stepping")["optimizer step"], "temporary"
    )


def test_beside_adapters_of_their_own_the_next_layer_comes_with_the_first_of_them() -> None:
    """q_proj's A, 8·4096 elements, is the last that backward meets: its hook fetches the layer below."""
    e = lora()
    before, after = (Where("layer", 30, True, 0, QV, here) for here in (QV - 8 * 4096 - 1, QV - 8 * 4096))
    assert at(e.at(before), "communication#gathered") == 2 * ROOT + 2 * LAYER
    assert at(e.at(after), "communication#gathered") == 2 * ROOT + 2 * 2 * LAYER


def test_what_is_summoned_is_whole_in_the_stored_type_and_one_rank_has_it() -> None:
    """verl reads adapters from the whole model, a layer or an adapter: fp32, the layer's shards copied beside it.

    q_proj's adapter has matrices of 8·4096 elements. A single rank keeps NO_SHARD, which never unshards.
    """
    words = ("whole", "layer", "adapter")
    given: dict[str, object] = {"precision": "fsdp-mixed", "lora": {"dtype": "fp32"}}
    layer = LAYER + QV
    expected = [4 * P, 4 * (layer + layer // 8), 4 * 8 * 4096]
    assert [lora(**given).handing(word).bytes for word in words] == expected
    assert [lora(gpus=1, **given).handing(word).bytes for word in words] == [0, 0, 0]


def test_adapters_in_their_layers_flat_parameter_give_all_of_it_a_gradient() -> None:
    """`_validate_frozen_params` of torch 2.13's `wrap.py` warns of it: as many as the layer has, p + 106,496."""
    e = lora(lora={"units": "layer"})
    flat = LAYER + QV
    assert e.layer(0) == flat
    assert total(e.at(JOIN._replace(root=0, above=flat)), "gradients") == 2 * flat // 8 + 2 * flat
    assert total(moments(e, "stepping")["optimizer step"], "gradients") == 2 * 32 * flat // 8
    kept = lora(lora={"units": "layer"}, global_batch=16, no_sync=True)
    assert total(kept.at(FORWARD), "gradients") == 2 * 32 * flat
    # the root has none
    assert total(e.at(REDUCE)) == 2 * 32 * flat // 8


def test_adapters_leave_for_the_host_as_units_of_their_own_and_so_do_their_states() -> None:
    """verl's offload: each flat part is pinned, a power of two. A layer's 104 MiB in 128, the root's 501 in 512.

    Three matrices of 8·4096 elements over 8 ranks take 16 KiB each, v_proj's B 4 KiB; of these alone are two moments.
    """
    e = lora(precision="fsdp-mixed", lora={"dtype": "fp32"})
    moved = moments(replace(e, replica=replace(e.replica, leaves=frozenset({"weights", "states"}))), "host")
    adapters = 32 * (3 * 16 + 4) * 2**10
    weights = (32 * 128 + 512) * 2**20 + adapters
    assert total(moved["before the first step"]) == weights
    assert total(moved["after the first step"]) == weights + 2 * adapters


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sharding": "fsdp2"}, "lora.units: given 'layer' with sharding fsdp2, allowed: own, or with fsdp1"),
        ({"method": "qlora"}, "lora.units: given 'layer' with method qlora, allowed: own, or with lora"),
        ({"precision": "fsdp-mixed"}, "lora.dtype: given 'bf16' with lora.units layer, allowed: fp32, as the layer"),
    ],
)
def test_a_flat_parameter_has_one_type(fields: dict[str, object], message: str) -> None:
    """`_validate_tensors_to_flatten`: "Must flatten tensors with uniform dtype"."""
    with pytest.raises(ScenarioError, match=message):
        lora(**{"lora": {"units": "layer"}} | fields)


@pytest.mark.parametrize(
    ("framework", "fields"),
    [("trl", {"task": "sft"}), ("verl", {"task": "ppo", "prompt_len": 512, "response_len": 512})],
)
def test_frameworks_that_wrap_by_pefts_policy_have_units_of_their_own(
    framework: str, fields: dict[str, object]
) -> None:
    """Transformers' `update_fsdp_plugin_peft`, verl's `get_fsdp_wrap_policy(is_lora=True)`."""
    data = {"model": "llama-3-8b", "gpu": "h100-sxm", "gpus": 8, "framework": framework, "sharding": "fsdp1", **fields}
    with pytest.raises(ScenarioError, match=f"lora.units: given 'layer', allowed with {framework}: own"):
        parse(data | {"method": "lora", "lora": {"units": "layer", "dtype": "fp32"}, "precision": "fsdp-mixed"})


def test_a_role_under_another_sharding_has_no_flat_parameter() -> None:
    data = {"model": "llama-3-8b", "gpu": "h100-sxm", "gpus": 8, "task": "ppo", "prompt_len": 512, "response_len": 512}
    critic = {"method": "lora", "lora": {"units": "layer"}, "sharding": "fsdp2"}
    with pytest.raises(ScenarioError, match=r"roles\.critic\.lora\.units: given 'layer' with sharding fsdp2"):
        parse(data | {"sharding": "fsdp1", "precision": "bf16", "roles": {"critic": critic}})


def test_offload_leaves_gathered_units_and_what_is_being_reduced() -> None:
    """CPUOffload: weights live on the host, and gradients from the end of backward on.

    `_accumulate_sharded_grad` keeps what `_offload_grad` copies, until `prepare_gradient_for_optim` deletes
    `_saved_grad_shard`. A second micro batch finds none.
    """
    e = fsdp(offload={"optimizer": True, "parameters": True})
    assert total(e.resident()) == 0
    assert e.at(JOIN) == fsdp().at(JOIN)
    assert total(e.at(END), "gradients") == total(fsdp().at(END), "gradients")
    assert moments(e, "stepping")["optimizer step on the host"] == []
    more = fsdp(offload={"optimizer": True, "parameters": True}, global_batch=16)
    assert total(more.at(FORWARD), "gradients") == 0
    assert more.at(JOIN) == e.at(JOIN)
    apart = lora(lora={"units": "own"}, offload={"optimizer": True, "parameters": True})
    assert total(apart.at(Where("end", 0, True, above=32 * QV)), "gradients") == 2 * 32 * QV // 8


def test_doras_magnitudes_are_units_beside_the_matrices() -> None:
    """PEFT's policy wraps what has a weight that requires a gradient, and nothing below (`fsdp_auto_wrap_policy`).

    A magnitude for each of the 4,096 + 1,024 outputs of a layer: gradients wait whole, 2 bytes each, and states are
    made of shards.
    """
    plain, scaled = (lora(lora={"units": "own", "dora": dora}, no_sync=True, global_batch=16) for dora in (False, True))
    rows = 32 * (4096 + 1024)
    assert len(scaled.adapters) - len(plain.adapters) == 2 * 32
    assert sum(scaled.adapters) - sum(plain.adapters) == rows // 8
    assert total(scaled.at(END), "gradients") - total(plain.at(END), "gradients") == 2 * rows
    assert (
        total(scaled.resident(), "optimizer_states") - total(plain.resident(), "optimizer_states") == 2 * 2 * rows // 8
    )
