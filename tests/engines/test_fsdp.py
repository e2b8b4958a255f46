"""PyTorch FSDP, worked by hand for Llama 3 8B over 8 GPUs, bf16 compute and fp32 shards (fsdp-mixed).

What is alive was read in torch 2.13 `distributed/fsdp/_fully_shard/_fsdp_{param_group,collectives,state}.py` and agrees
with traces of FSDP 2. p = 218,112,000 elements of a layer, r = 2·V·h + h = 1,050,677,248 of the root group.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jobs import FORWARD, LAYER, VH, P, at, engine, engine_of, in_layer, moments, places, total, under
from strategies import scenarios

from calc.base.optimizers import OPTIMIZERS
from calc.base.plan import Ends
from calc.engines.fsdp import Fsdp
from calc.engines.replica import Where
from calc.estimate.estimate import estimate
from calc.memory import host
from calc.memory.weights import NF4
from calc.models.architecture import parameters
from calc.models.slices import part
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario, ScenarioError

ROOT = 2 * VH + 4096
PART = P // 8
GATHER = Where("gather", 31, False)
BELOW = Where("layer", 30, True, ROOT - VH, LAYER, LAYER, 0)
REDUCE = Where("reduce", 0, True, ROOT - VH, 32 * LAYER, VH)


def fsdp(**fields: object) -> Fsdp:
    """An FSDP 2 job's engine."""
    found = engine(**{"gpus": 8, "sharding": "fsdp2", "precision": "fsdp-mixed", "optimizer_impl": "fused"} | fields)
    assert isinstance(found, Fsdp)
    return found


def test_every_rank_keeps_sixteen_bytes_of_its_share() -> None:
    """fp32 shards 4P/N and Adam 8P/N always, reduced gradients 4P/N once they exist."""
    e = fsdp()
    assert total(e.resident()) == 12 * PART
    assert total(e.resident(), "weights") == 4 * PART
    assert total(moments(e, "stepping")["optimizer step"]) == 4 * PART


def test_a_gather_holds_three_copies_of_a_layer() -> None:
    """At copy-out: the buffer of the layer before, the layer's own, and its parameters; then two; at the head one. The
    root group stays gathered from its first use on (2r)."""
    e = fsdp()
    assert total(e.at(GATHER)) == 2 * ROOT + 3 * 2 * LAYER
    # the group before the first layer is the root, whose buffer is as large as its weights
    assert total(e.at(Where("gather", 0, False))) == 2 * 2 * ROOT + 2 * 2 * LAYER
    assert total(fsdp(gpus=1).at(Where("gather", 0, False))) == 2 * ROOT + 2 * LAYER
    assert total(e.at(FORWARD)) == 2 * ROOT + 2 * 2 * LAYER
    assert total(e.at(Where("head", 32, False))) == 2 * ROOT + 2 * LAYER
    assert total(e.at(Where("norm", 32, False))) == 2 * ROOT + 2 * LAYER
    assert total(e.at(Where("loss", 32, False))) == 2 * ROOT + 2 * LAYER
    # a loss outside the model's forward, when the root's post_forward has dropped the last buffer
    assert total(e.at(Where("outside", 32, False))) == 2 * ROOT


def test_backward_holds_ten_bytes_a_layer_parameter() -> None:
    """Weights 2p, the next layer's prefetched buffer 2p, gradients 2p and the fp32 input of the previous layer's
    reduction 4p; beside them the root's weights 2r, the head's gradient 2·V·h, and the shards reduced so far."""
    e = fsdp()
    expected = 10 * LAYER + 2 * ROOT + 2 * (ROOT - VH) + 4 * LAYER // 8
    assert total(e.at(BELOW)) == expected
    assert at(e.at(BELOW), "communication#reduce-scatter") == 4 * LAYER


def test_the_first_backward_layer_has_nothing_to_reduce_and_the_last_nothing_to_prefetch() -> None:
    """The top layer starts without a reduction before it; layer 0 gathers itself alone."""
    e = fsdp()
    top = Where("layer", 31, True, ROOT - VH, 0, LAYER)
    assert at(e.at(top), "communication#reduce-scatter") == 0
    bottom = Where("layer", 0, True, ROOT - VH, 31 * LAYER, LAYER)
    assert at(e.at(bottom), "communication#gathered") == 2 * ROOT + 2 * LAYER


def test_the_roots_reduction_takes_twelve_bytes_a_vocabulary_element() -> None:
    """At the end of backward: gradients 2r and their fp32 input 4r = 6r, 12·V·h where embedding and head are untied;
    weights are freed, all layers reduced (4·32p/N)."""
    e = fsdp()
    assert total(e.at(REDUCE)) == 6 * ROOT + 4 * 32 * LAYER // 8
    assert 6 * ROOT == 12 * VH + 6 * 4096


HEAD = VH + 4096  # the head and the final norm, where they are a unit


def ends(how: Ends) -> Fsdp:
    """The engine where the embedding and the head are FSDP units."""
    e = fsdp()
    return replace(e, replica=replace(e.replica, ends=how))


def test_an_embedding_and_a_head_that_are_units_are_gathered_while_they_run() -> None:
    """torchtitan 0.2.2 `models/llama3/infra/parallelize.py`, `apply_fsdp`: all but the head's unit are resharded."""
    e = ends("kept")
    # the embedding's buffer, until the first layer's gather is copied out; then no more than layers
    assert total(e.at(Where("gather", 0, False))) == 2 * VH + 2 * 2 * LAYER
    assert total(e.at(GATHER)) == 3 * 2 * LAYER
    assert total(e.at(FORWARD)) == 2 * 2 * LAYER
    # its own buffer beside its parameters, until the model returns
    assert total(e.at(Where("head", 32, False))) == 2 * 2 * HEAD
    assert total(e.at(Where("outside", 32, False))) == 2 * HEAD
    assert total(ends("freed").at(Where("outside", 32, False))) == 0
    # in backward beside the buffer of the layer below
    assert total(e.at(Where("norm", 32, True, HEAD))) == 2 * HEAD + 2 * LAYER + 2 * HEAD
    # the embedding ahead of its backward, which does not read it
    bottom = Where("layer", 0, True, HEAD, 31 * LAYER, LAYER)
    assert at(e.at(bottom), "communication#gathered") == 2 * VH + 2 * LAYER


def test_a_heads_own_unit_is_reduced_before_the_layers() -> None:
    """The input in fp32 4r, the output 4r/N, and 2·V·h of the head's gradient, which a loop's variable still keeps.

    Beside them the buffer of the layer below; then the output is left.
    """
    e = ends("kept")
    assert total(e.at(Where("reduce", 32, True, HEAD))) == 2 * LAYER + 4 * HEAD + 4 * HEAD // 8 + 2 * VH
    top = e.at(Where("layer", 31, True, HEAD, 0, LAYER))
    assert at(top, "communication#reduce-scatter") == 4 * HEAD
    assert at(top, "gradients#accumulation") == 4 * HEAD // 8
    assert at(top, "gradients#unreduced") == 2 * LAYER
    # what remains is the embedding
    last = e.at(Where("reduce", 0, True, HEAD, 32 * LAYER, VH))
    assert total(last) == 4 * VH + 4 * VH // 8 + 2 * VH + 4 * (32 * LAYER + HEAD) // 8


def test_a_tied_embedding_sums_two_contributions_before_it_is_reduced() -> None:
    """As in plain PyTorch: two of V·h beside their sum, in bf16 (Qwen2.5 0.5B: 151,936 · 896)."""
    e = fsdp(model="qwen2.5-0.5b")
    v_h = 151_936 * 896
    lines = e.at(Where("end", 0, True, v_h + 896, e.replica.trainable - v_h - 896, 0, v_h))
    assert at(lines, "gradients#tied") == 2 * 2 * v_h
    assert at(lines, "gradients#unreduced") == 2 * (v_h + 896)


def test_few_ranks_hold_the_roots_reduced_gradients_beside_their_input() -> None:
    """On 2 ranks the output 4r/2 is more than the bf16 gradients that have died by then, all but the last V·h; and
    accumulation adds that output into gradients that are there already."""
    e = fsdp(gpus=2)
    assert total(e.at(REDUCE)) == 4 * ROOT + 4 * ROOT // 2 + 2 * VH + 4 * 32 * LAYER // 2
    more = fsdp(gpus=2, global_batch=4)
    assert total(more.at(REDUCE)) == 4 * ROOT + 4 * ROOT // 2 + 2 * VH + 4 * P // 2


@pytest.mark.parametrize(("model", "task"), [("qwen2.5-0.5b", "sft"), ("llama-3-8b", "rm")])
def test_only_an_untied_heads_gradient_outlives_the_groups_reduction(model: str, task: str) -> None:
    """The loop's variable keeps the group's last parameter: a value head's row or a norm's is nothing beside V·h.

    On 1 rank: input 4r and output 4r, more than the 2r of gradients that have died, beside the layers' shards.
    """
    e = fsdp(model=model, task=task, gpus=1)
    a, r = e.replica.arch, e.root_elements
    assert r == a.vocab * a.hidden + (1 if model == "qwen2.5-0.5b" else 2) * a.hidden
    layers = e.replica.trainable - r
    lines = e.at(Where("reduce", 0, True, r - a.vocab * a.hidden, layers, a.vocab * a.hidden))
    assert at(lines, "communication#reduce-scatter") == 4 * r
    assert total(lines, "gradients") == 4 * r + 4 * layers
    assert at(lines, "gradients#unreduced") == 0


def test_while_a_tied_embeddings_gradient_is_sorted_only_the_heads_waits() -> None:
    """Qwen2.5 0.5B: the sum, a tensor of its own, is made once both contributions are there."""
    e = fsdp(model="qwen2.5-0.5b")
    v_h = 151_936 * 896
    where = Where("end", 0, True, v_h + 896, e.replica.trainable - v_h - 896, 0, v_h)
    both, sorting = (at(e.at(where._replace(sorting=word)), "gradients#tied") for word in (False, True))
    assert (both, sorting) == (2 * 2 * v_h, 2 * v_h)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("parameter", 4 * VH),
        ("units", 4 * (ROOT + VH)),
        ("copies", 4 * PART),
        ("whole", 4 * P),
        ("bucket", 2 << 30),
    ],
)
def test_weights_are_handed_on_in_the_type_they_are_stored_in(word: str, expected: int) -> None:
    """fp32 shards: one parameter, root and largest group, this rank's copies, everything, or verl's 2 GiB bucket."""
    assert fsdp().handing(word).bytes == expected


@pytest.mark.parametrize(("leaves", "before", "after"), [
    ({"weights"}, 4, 4),
    ({"states"}, 0, 8),
    ({"weights", "states"}, 4, 12),
])  # fmt: skip
def test_what_leaves_lies_on_the_host_flat_and_pinned_group_by_group(leaves: set[str], before: int, after: int) -> None:
    """verl moves each group's flat shard: 4·p/8 of a layer, 104 MiB, in 128; of the root, 501 MiB, in 512. Adam's two
    moments as much again each, from the first step on."""
    e = fsdp(sharding="fsdp1")
    moved = replace(e, replica=replace(e.replica, leaves=frozenset(leaves)))
    each = (32 * 128 + 512) * 2**20
    found = moments(moved, "host")
    assert total(found["before the first step"]) == before // 4 * each
    assert total(found["after the first step"]) == after // 4 * each
    kept = [total(lines) for at, lines in moved.host(4) if at != "loading"]
    assert kept == [before * each, after * each]


def test_accumulated_gradients_stay_sharded_through_forward() -> None:
    """Reduced in every micro-batch: 4P/N."""
    e = fsdp(global_batch=16)
    assert total(e.at(FORWARD), "gradients") == 4 * PART
    assert total(fsdp().at(FORWARD), "gradients") == 0


@pytest.mark.parametrize(("reduce_bytes", "fresh"), [(4, 2), (2, 0)])
def test_deferred_gradients_stay_whole_until_the_last_micro_batch(reduce_bytes: int, fresh: int) -> None:
    """They are kept in the type they are reduced in; in the last micro-batch the layers above are reduced.

    Traced with `set_requires_gradient_sync(False)`: 32,121,044,992 bytes of Llama 3 8B in fp32 throughout."""
    e = fsdp(global_batch=16)
    e = replace(e, replica=replace(e.replica, defers=True, reduce_bytes=reduce_bytes))
    assert total(e.at(FORWARD), "gradients") == reduce_bytes * P
    below = Where("layer", 20, True, ROOT - VH, 11 * LAYER, LAYER)
    new = fresh * (ROOT - VH + LAYER)
    assert total(e.at(below), "gradients") == reduce_bytes * (P - 11 * LAYER) + 4 * 11 * LAYER // 8 + new
    # at the end the root's gradients, and the input of their reduction where it has another type
    end = e.at(REDUCE._replace(above=32 * LAYER))
    assert total(end, "gradients") == reduce_bytes * ROOT + 4 * 32 * LAYER // 8
    assert at(end, "communication#reduce-scatter") == reduce_bytes * ROOT
    alone = fsdp(global_batch=8)
    assert replace(alone, replica=replace(alone.replica, defers=True)).at(BELOW) == alone.at(BELOW)


def test_one_rank_casts_weights_without_a_buffer() -> None:
    """No all-gather (_fsdp_param_group.py:437): parameters are copied into storage of their own, 2p."""
    assert total(fsdp(gpus=1).at(GATHER)) == 2 * ROOT + 2 * LAYER


def test_lora_reduces_adapters_alone() -> None:
    """Frozen layers are gathered all the same; a layer of rank 64 has 167,772,160/32 = 5,242,880 adapter elements."""
    e = fsdp(method="lora", lora__rank=64)
    adapter = 5_242_880
    where = Where("layer", 30, True, 0, adapter, adapter)
    assert at(e.at(where), "communication#gathered") == 2 * ROOT + 4 * (LAYER + adapter)
    assert at(e.at(where), "communication#reduce-scatter") == 4 * adapter
    assert total(e.resident(), "optimizer_states") == 8 * 167_772_160 // 8


def test_four_bit_layers_are_sharded_and_gathered_in_four_bits() -> None:
    """FSDP with QLoRA: packed weights over N, and a gather of half a byte an element; adapters beside them in bf16.

    The scales are no parameter, so that every GPU has all of them, under offload, too (bitsandbytes `nn/modules.py`,
    fix_4bit_weight_quant_state_from_module).
    """
    e = fsdp(method="qlora", precision="bf16", lora__rank=64)
    alone = engine(method="qlora", lora__rank=64)
    scales = (NF4[True] - 0.5) * 32 * 218_103_808
    whole = total(alone.resident(), "weights")
    assert total(e.resident(), "weights") == pytest.approx((whole - scales) / 8 + scales, abs=2)
    offloaded = fsdp(method="qlora", precision="bf16", lora__rank=64, offload__parameters=True)
    assert total(offloaded.weights(), "weights") == int(scales)
    gathered = [line for line in e.at(GATHER) if line.values.get("what") == "4-bit layers"]
    assert total(gathered) == 3 * LAYER // 2


def test_a_frozen_models_root_stays_gathered() -> None:
    """`reshard_after_forward` is False for the root, and no backward comes that would free it."""
    e = fsdp()
    frozen = engine(trained=False, gpus=8, sharding="fsdp2", precision="fsdp-mixed")
    assert total(frozen.resident()) == 4 * PART
    assert total(frozen.root()) == 2 * ROOT
    assert total(frozen.at(FORWARD)) == 2 * ROOT + 2 * 2 * LAYER
    assert list(frozen.stepping()) == []
    assert total(e.at(Where("waiting", 32, False))) == 2 * ROOT


def test_offload_moves_shards_gradients_and_states_to_the_host() -> None:
    """CPUOffloadPolicy: every parameter's shard pinned in a block of its own, its gradient's too; states pageable, from
    the first step. By hand for gate_proj: 4 · 58,720,256/8 = 28 MiB in a block of 32."""
    e = fsdp(offload__parameters=True)
    assert total(e.resident()) == 0
    assert total(e.at(BELOW), "gradients") == 2 * (ROOT - VH) + 2 * LAYER
    assert total(line for _, lines in e.stepping() for line in lines) == 0
    found = moments(e, "host")
    before = found["before the first step"]
    assert total(before, "weights") == total(before, "gradients")
    assert 4 * PART < total(before, "weights") < 8 * PART
    assert host.pinned(4 * 58_720_256 // 8) == 32 * 2**20
    assert total(found["after the first step"]) - total(before) == 8 * PART


def test_offloaded_adapters_have_gradients_and_states_of_adapters_alone() -> None:
    """Frozen weights have neither."""
    found = moments(fsdp(offload__parameters=True, method="lora", lora__rank=64), "host")
    lines = found["after the first step"]
    assert total(lines, "optimizer_states") == 8 * 167_772_160 // 8
    assert total(lines, "gradients") < 8 * 167_772_160 // 8


def test_weights_in_four_bits_lie_on_the_host_in_four_bits() -> None:
    """Packed, by hand for gate_proj: 58,720,256/(2·8) = 3.5 MiB in a block of 4; embedding, head and norms in bf16.

    Llama 3 8B's embedding and head: 2 · 525,336,576/8 bytes = 125.25 MiB each, in a block of 128.
    """
    job = dict(offload__parameters=True, precision="bf16", lora__rank=64)
    four, whole = (moments(fsdp(method=method, **job), "host")["after the first step"] for method in ("qlora", "lora"))
    q, k, up = 4096**2, 4096 * 1024, 4096 * 14336
    layer = sum(n * host.pinned(x // 16) for x, n in ((q, 2), (k, 2), (up, 3)))
    norms = 65 * host.pinned(2 * 4096 // 8)
    assert total(four, "weights") == 32 * layer + norms + 2 * 128 * 2**20
    for component in ("adapter", "gradients", "optimizer_states"):
        assert total(four, component) == total(whole, component)


@pytest.mark.parametrize(
    "optimizer",
    sorted(
        name
        for name, facts in OPTIMIZERS.items()
        if not (facts.bitsandbytes or facts.in_backward or facts.narrow or facts.orthogonal)
        and name not in ("none", "galore")  # GaLore projects whole gradients, which shards have not
    ),
)
def test_every_optimizer_has_an_answer_under_offload(optimizer: str) -> None:
    """Adafactor's states depend on shapes; that must not end in an error."""
    assert "after the first step" in moments(fsdp(offload__optimizer=True, optimizer=optimizer), "host")


@pytest.mark.parametrize("moved", ["offload__optimizer", "offload__parameters"])
def test_what_bitsandbytes_steps_stays_on_the_card(moved: str) -> None:
    """Its kernels are the card's; FSDP's weights in host memory would be stepped there."""
    with pytest.raises(ScenarioError, match="optimizer: given 'adamw-8bit' with offload"):
        fsdp(optimizer="adamw-8bit", **{moved: True})


@pytest.mark.parametrize("optimizer", ["adamw-8bit", "adamw-paged-8bit"])
def test_bitsandbytes_takes_no_dtensors(optimizer: str) -> None:
    """Its kernels read past a shard (bitsandbytes issue 1633); those of torchao are made for FSDP 2."""
    with pytest.raises(ScenarioError, match=f"optimizer: given '{optimizer}' with sharding fsdp2"):
        fsdp(optimizer=optimizer)
    assert fsdp(optimizer="adamw-torchao-8bit")
    assert fsdp(optimizer="adamw-8bit", sharding="fsdp1")


def test_fsdp_1_leaves_adafactor_no_rows() -> None:
    """Flat parameters have no rows and columns: a whole second moment, 4P/N; FSDP 2 keeps shapes."""
    flat, shaped = (fsdp(sharding=f"fsdp{v}", optimizer="adafactor").resident() for v in (1, 2))
    assert total(flat, "optimizer_states") == 4 * PART
    assert total(shaped, "optimizer_states") < 4 * PART / 500


# --- for any scenario ---


@given(scenarios(("sft", "rm")), st.sampled_from(("fsdp1", "fsdp2")))
def test_twice_the_ranks_never_need_more_a_gpu(drawn: Scenario, sharding: str) -> None:
    """Shards halve and gathered layers stay: at every place, with two exceptions.

    One rank gathers nothing, and FSDP 2 pads tensors whose first dimension the ranks do not divide.
    """
    s = under(drawn, sharding)
    few = engine_of(s)
    many = engine_of(replace(s, gpus=2 * s.gpus, global_batch=2 * s.global_batch))
    assert isinstance(few, Fsdp) and isinstance(many, Fsdp)
    assume(many.layer(-1) == few.layer(-1))
    rows = 8 * (many.root_elements - few.root_elements)  # what a head of one row takes more, padded for every rank
    assert total(many.resident()) <= total(few.resident()) + 4
    for where in (*places(few), GATHER):
        where = where._replace(layer=min(where.layer, s.architecture.layers - 1))
        assert total(many.at(where)) <= total(few.at(where)) + 4 + rows
    for (name, before), (again, after) in zip(few.stepping(), many.stepping(), strict=True):
        assert name == again and total(after) <= total(before)


@given(scenarios(("sft", "rm")), st.sampled_from(("fsdp1", "fsdp2")))
def test_shards_add_up_to_the_whole_and_offload_leaves_none(drawn: Scenario, sharding: str) -> None:
    """N shards hold all parameters and states; with offload the GPU holds neither, but buffers that no shard has."""
    s = under(drawn, sharding)
    assume(s.method != "qlora" and s.optimizer != "none")
    kept = replace(s, offload=replace(s.offload, optimizer=False, parameters=False))
    e = engine_of(kept)
    r, lines = e.replica, e.resident()
    assert r.ranks * (total(lines, "weights") + 1) >= r.weight_bytes * r.parameters
    away = engine_of(replace(s, offload=replace(s.offload, optimizer=True)))
    assert total(away.resident()) == at(away.resident(), "weights#tables")
    assert in_layer(e) > 0
    for where in places(e):
        assert total(away.at(where)) <= total(e.at(where))


def test_experts_fewer_than_ranks_are_stored_more_than_once() -> None:
    """Mixtral's eight experts on 16 ranks: FSDP 2 cuts a fused tensor into eight, and pads the other ranks' shards.

    Experts 8·3·4096·14336 = 1,409,286,144 elements a layer of 1,451,270,144; each rank stores one expert, so that the
    sixteen hold the experts twice, and the router's eight rows of 4096 too. FSDP 1 flattens first and has no such rest.
    """
    fields = {"model": "mixtral-8x7b", "gpus": 16, "gpus_per_node": 8}
    assert fsdp(**fields).layer(-1) == 1_451_270_144 + 1_409_286_144 + 8 * 4096
    assert fsdp(**fields, sharding="fsdp1").layer(-1) == 1_451_270_144
    assert fsdp(**{**fields, "gpus": 8}).layer(-1) == 1_451_270_144


def test_weights_that_stay_after_forward_are_gathered_once() -> None:
    """torch 2.13 `_fsdp_param_group.py`: `post_forward` leaves what it finds where `reshard_after_forward` is false, so
    that `unshard` returns at once in backward; `post_backward` reshards. One buffer lives in forward."""
    e = fsdp(reshard_after_forward="never")
    assert total(e.at(Where("gather", 0, False))) == 2 * ROOT + 2 * 2 * LAYER
    assert total(e.at(GATHER)) == 2 * ROOT + 2 * (32 + 2) * LAYER
    assert total(e.at(Where("layer", 30, False))) == 2 * ROOT + 2 * (31 + 1) * LAYER
    assert total(e.at(Where("head", 32, False))) == 2 * ROOT + 2 * (32 + 1) * LAYER
    assert total(e.at(Where("outside", 32, False))) == 2 * ROOT + 2 * 32 * LAYER
    # in backward nothing is gathered ahead: 31 layers where there were two
    usual = [total(fsdp().at(where)) for where in (BELOW, REDUCE)]
    assert [total(e.at(where)) for where in (BELOW, REDUCE)] == [usual[0] + 2 * (31 - 2) * LAYER, usual[1]]
    assert total(fsdp(reshard_after_forward="never", gpus=1).at(GATHER)) == 2 * ROOT + 2 * 32 * LAYER


@pytest.mark.parametrize("ends", ["root", "freed"])
def test_the_last_layer_that_stays_is_beside_the_head_and_nowhere_twice(ends: str) -> None:
    """XTuner's and NeMo Automodel's loops: reshard_after_forward is False for it alone. Its buffer is there until the
    next unit's gather, or the end of forward."""
    found, usual = (fsdp(reshard_after_forward=word, outer_units=ends) for word in ("all-but-last", "default"))
    for place, backward in (("head", False), ("outside", False), ("outside", True)):
        where = Where(place, 32, backward)
        assert total(found.at(where)) - total(usual.at(where)) == 2 * LAYER
    for where in (GATHER, BELOW, REDUCE, Where("layer", 31, True), Where("head", 32, True), Where("end", 0, True)):
        assert total(found.at(where)) == total(usual.at(where))


def test_units_of_embedding_and_head_stay_after_forward_too() -> None:
    """The embedding to its own backward, the head from its forward to its own, as torchtitan 0.2 has them
    (models/llama3/infra/parallelize.py:303)."""
    e = fsdp(reshard_after_forward="never", outer_units="kept")
    head = ROOT - VH
    assert total(e.at(Where("gather", 0, False))) == 2 * 2 * VH + 2 * 2 * LAYER
    assert total(e.at(Where("layer", 30, False))) == 2 * VH + 2 * (31 + 1) * LAYER
    assert total(e.at(Where("head", 32, False))) == 2 * VH + 2 * 2 * head + 2 * 32 * LAYER
    assert total(e.at(Where("outside", 32, False))) == 2 * ROOT + 2 * 32 * LAYER
    assert total(e.gathered(BELOW)) == 2 * VH + 2 * 31 * LAYER
    assert total(e.gathered(Where("end", 0, True))) == 2 * VH
    assert total(e.gathered(Where("reduce", 0, True))) == 0


@pytest.mark.parametrize(
    ("fields", "traced"),
    [
        ({"model": "llama-3.2-1b", "gpus": 4, "checkpointing": "none", "seq_len": 2048}, 12926530560),
        ({"optimizer_impl": "foreach", "checkpointing": "selective", "seq_len": 8192}, 57663438848),
    ],
)
def test_a_traced_step_whose_weights_stay_is_met(fields: dict[str, object], traced: int) -> None:
    """`measurements.trace` of 2026-11-30, torch 2.13, `reshard_after_forward=False`: backward's peak without cuBLAS's
    workspaces; small temporaries of FSDP's own, below 0.02 %, are not counted."""
    said = {"model": "llama-3-8b", "task": "sft", "framework": "torch", "gpu": "h200", "gpus": 8, "sharding": "fsdp2",
            "precision": "fsdp-mixed", "optimizer_impl": "fused", "micro_batch": 1, "attention": "sdpa",
            "reshard_after_forward": "never"}  # fmt: skip
    phases = {p.name: p.moment for p in estimate(parse(said | fields), replays=False).groups[0].phases}
    lines = [line for line in phases["backward"].lines if line.allocated and line.component != "workspace"]
    assert sum(line.bytes for line in lines) == pytest.approx(traced, rel=2e-4)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"sharding": "fsdp1"}, "sharding fsdp1"),
        ({"task": "dpo"}, "task dpo"),
        ({"method": "qlora"}, "method qlora"),
        ({"outer_units": "freed"}, "outer_units freed"),
        ({"trainer": "ms-swift"}, "trainer ms-swift"),
    ],
)
def test_weights_stay_only_where_that_is_modelled(fields: dict[str, object], named: str) -> None:
    said = {"model": "llama-3-8b", "task": "sft", "gpu": "h200", "gpus": 8, "sharding": "fsdp2"}
    with pytest.raises(ScenarioError, match=f"reshard_after_forward: given never with {named}"):
        parse(said | fields | {"reshard_after_forward": "never"})


def test_a_policy_that_reduces_in_bf16_hands_over_half_of_the_bytes_and_keeps_fp32_shards() -> None:
    """torch 2.13 `_fsdp_collectives.py`, `foreach_reduce`: the reduce-scatter's input has reduce_dtype, its shard is
    cast to the fp32 of the parameter's."""
    said = {"model": "llama-3-8b", "task": "sft", "framework": "torch", "gpu": "h200", "gpus": 8, "sharding": "fsdp2",
            "precision": "fsdp-mixed", "micro_batch": 1, "seq_len": 512}  # fmt: skip
    found = [estimate(parse(said | own), replays=False).groups[0].phases for own in ({}, {"grad_dtype": "bf16"})]
    wide, narrow = (next(p.moment for p in phases if p.name == "backward") for phases in found)
    for moment, b in ((wide, 4), (narrow, 2)):
        (given,) = [line for line in moment.lines if line.component == "communication" and "g·p" in line.formula]
        assert given.values["g"] == b
        assert all(line.values["g"] == 4 for line in moment.lines if "g·P_t/N" in line.formula)


def test_gradients_that_wait_have_the_reductions_type_but_those_of_experts_in_no_unit() -> None:
    """Qwen3 30B on eight GPUs, each with an eighth of 48 layers' 128 experts of 3 · 2,048 · 768 elements.

    torch 2.13 `_fsdp_param.py`, `to_accumulated_grad_if_needed`; NeMo Automodel 36044ad3d `components/moe/
    parallelizer.py`, `apply_fsdp`: reduce_dtype fp32, and experts that no other rank has are ignored parameters.
    """
    said = {"model": "qwen3-30b-a3b", "task": "pretrain", "framework": "torch", "gpu": "gb200", "gpus": 8,
            "sharding": "fsdp2", "precision": "bf16", "expert_parallel": 8, "experts_implementation": "automodel",
            "no_sync": True, "micro_batch": 1, "global_batch": 32, "seq_len": 512}  # fmt: skip
    experts = 48 * 16 * 3 * 2048 * 768
    every = parameters(part(parse(said).architecture, 1, 8))
    for dtype, b, apart in (("fp32", 4, [2 * experts]), ("bf16", 2, [])):
        phases = estimate(parse(said | {"grad_dtype": dtype}), replays=False).groups[0].phases
        moment = next(p.moment for p in phases if p.name == "forward")
        first, *others = [line.bytes for line in moment.lines if line.formula == "g·G_w"]
        assert others == apart
        assert first == b * (every - experts * bool(apart))


def test_groups_that_each_shard_the_model_hold_what_one_group_alone_would() -> None:
    """HSDP: torch 2.13 `_fsdp_collectives.py`, `foreach_reduce`, sums a shard up with the other groups' in place."""
    said = {"model": "llama-3-8b", "task": "sft", "framework": "torch", "gpu": "h200", "sharding": "fsdp2",
            "precision": "fsdp-mixed", "micro_batch": 1, "seq_len": 2048}  # fmt: skip
    four, eight, groups = (
        parse(said | own) for own in ({"gpus": 4}, {"gpus": 8}, {"gpus": 8, "data_parallel_replicate": 2})
    )
    assert (groups.shards, groups.data_parallel, groups.communicators) == (4, 8, four.communicators + 1)
    found = [estimate(s, replays=False).groups[0].phases for s in (four, eight, groups)]
    peaks = [max(p.moment.allocated_bytes for p in phases) for phases in found]
    assert peaks[0] == peaks[2] > peaks[1]
    for count in (3, 8):
        with pytest.raises(ScenarioError, match="data_parallel_replicate: given"):
            parse(said | {"gpus": 8, "data_parallel_replicate": count})
    with pytest.raises(ScenarioError, match="data_parallel_replicate: given 2 with sharding ddp"):
        parse(said | {"gpus": 8, "data_parallel_replicate": 2, "sharding": "ddp"})
