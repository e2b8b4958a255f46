"""Plain PyTorch, alone and under DDP, worked by hand for Llama 3 8B (P = 8,030,261,248)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from jobs import FORWARD, GATE, LAYER, VH, P, at, end, engine, engine_of, head, moments, top, total, under
from strategies import scenarios

from calc.base.plan import Path
from calc.engines.plain import Plain
from calc.engines.replica import Where
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario, ScenarioError


def plain(**fields: object) -> Plain:
    """A plain job's engine, fused AdamW."""
    found = engine(**{"optimizer_impl": "fused"} | fields)
    assert isinstance(found, Plain)
    return found


@pytest.mark.parametrize(
    ("precision", "weights", "states"), [("bf16", 2, 4), ("fp32", 4, 8), ("autocast", 4, 8), ("mixed", 2, 8)]
)
def test_adamw_keeps_two_moments_in_the_type_it_steps_in(precision: str, weights: int, states: int) -> None:
    """States are `zeros_like(param)`; only `mixed` has an fp32 master beside bf16 weights (4 bytes more)."""
    lines = plain(precision=precision).resident()
    assert total(lines, "weights") == weights * P
    assert total(lines, "optimizer_states") == states * P
    assert total(lines, "master_weights") == (4 * P if precision == "mixed" else 0)


def test_gradients_grow_through_the_first_backward() -> None:
    """Nothing at the loss, V·h once the head has its own, then the top layer's, at the end all."""
    e = plain()
    assert e.at(FORWARD) == []
    assert total(e.at(head())) == 2 * VH
    assert total(e.at(top())) == 2 * (VH + 4096 + LAYER)
    assert total(e.at(end())) == 2 * P


def test_accumulation_keeps_all_gradients_and_makes_each_new_one_beside_them() -> None:
    """From the second micro-batch on 2P always, and 2·V·h while the head's is made."""
    e = plain(global_batch=2)
    assert total(e.at(FORWARD)) == 2 * P
    assert total(e.at(head()), "gradients") == 2 * P
    assert total(e.at(head()), "temporary") == 2 * VH


def test_a_tied_heads_gradient_waits_beside_those_of_the_micro_batches_before() -> None:
    """Qwen2.5 0.5B, V·h = 151,936 · 896: to the end of backward, in norm and layers. Seen in the allocator's history of
    TRL's GRPO on an H100; an untied head's is added at once.
    """
    v_h, e = 151_936 * 896, plain(model="qwen2.5-0.5b", global_batch=2)
    for segment in ("norm", "layer"):
        assert total(e.at(top()._replace(segment=segment, here=0, making=0)), "temporary") == 2 * v_h
    assert total(e.at(FORWARD), "temporary") == 0
    assert total(plain(global_batch=2).at(top()._replace(making=0)), "temporary") == 0


@pytest.mark.parametrize("kind", ["tiled", "fused"])
def test_a_head_whose_loss_makes_its_gradient_is_added_to_in_place(kind: str) -> None:
    """`grad_weight` is a tensor like the weight (trl `kernels/chunked_logprob.py`, Liger)."""
    e = plain(model="qwen2.5-0.5b")
    own = replace(e, replica=replace(e.replica, path=Path(kind)))
    assert at(own.at(end()._replace(root=0, above=0, here=0, making=0)), "gradients#tied") == 2 * 151_936 * 896


@pytest.mark.parametrize(("precision", "b", "copies"), [("bf16", 2, 2), ("autocast", 4, 1)])
def test_a_tied_embedding_has_two_contributions_beside_their_sum(precision: str, b: int, copies: int) -> None:
    """Qwen2.5 0.5B, V·h = 151,936 · 896: bf16's head gradient is a transposed view, so the sum is a third tensor;
    autocast writes the head's contiguous, and the second adds into it."""
    v_h = 151_936 * 896
    lines = plain(model="qwen2.5-0.5b", precision=precision).at(end()._replace(root=0, above=0, here=0, making=0))
    assert at(lines, "gradients#tied") == copies * b * v_h
    assert at(plain(precision=precision).at(end()), "gradients#tied") == 0


def test_while_a_tied_embeddings_gradient_is_sorted_their_sum_does_not_exist() -> None:
    """The head's V·h waits alone; the embedding's own is among the temporaries of the sort."""
    where = end()._replace(root=0, above=0, here=0, making=0, sorting=True)
    assert at(plain(model="qwen2.5-0.5b").at(where), "gradients#tied") == 2 * 151_936 * 896


def test_handing_whole_weights_on_copies_one_of_them_at_most() -> None:
    """What is gathered elsewhere is there already; a clone is of the largest parameter, 2·V·h."""
    assert [plain().handing(word).bytes for word in ("parameter", "whole", "units", "clone")] == [0, 0, 0, 2 * VH]


def test_ddp_holds_buckets_as_large_as_all_gradients() -> None:
    """`gradient_as_bucket_view=False`: the reducer's buckets live beside the gradients (torch reducer.cpp)."""
    alone, ddp = plain(), plain(gpus=4, sharding="ddp")
    assert total(ddp.resident()) - total(alone.resident()) == 2 * P
    assert total(ddp.resident(), "communication") == 2 * P
    lora = plain(gpus=4, sharding="ddp", method="lora", lora__rank=64, lora__dtype="bf16")
    assert total(lora.resident(), "communication") == 2 * 167_772_160


@pytest.mark.parametrize(("impl", "expected"), [("fused", 0), ("foreach", 2 * P), ("single", 2 * 2 * VH)])
def test_how_the_optimizer_steps_decides_what_it_allocates(impl: str, expected: int) -> None:
    """A list of square roots as large as all parameters, or a root and a quotient of the largest (torch adam.py)."""
    step = moments(plain(optimizer_impl=impl), "stepping")["optimizer step"]
    assert total(step, "gradients") == 2 * P
    assert total(step, "temporary") == expected


def test_muon_keeps_one_moment_of_matrices_and_steps_one_at_a_time() -> None:
    """AdamW's two for embedding, head and 65 norms; 12 bytes for each element of the largest matrix, an MLP's."""
    e = plain(optimizer="muon")
    rest = 2 * VH + 65 * 4096
    assert total(e.resident(), "optimizer_states") == 2 * (P - rest) + 4 * rest
    assert total(moments(e, "stepping")["optimizer step"], "temporary") == 12 * GATE


@pytest.mark.parametrize(("precision", "b"), [("bf16", 2), ("fp32", 4)])
def test_galore_keeps_moments_of_projected_gradients(precision: str, b: int) -> None:
    """Rank 64: two moments of 64 rows of a matrix's larger side, and a projection of 64 of its smaller one, or a view
    of all of these in fp32. Its step divides the embedding, or decomposes an MLP's gradient.
    """
    e = plain(optimizer="galore", precision=precision, galore_rank=64)
    sides = {(4096, 4096): 2, (1024, 4096): 2, (4096, 14336): 3}
    projected = sum(count * (n * (64 if b == 2 else n) + 2 * 64 * m) for (n, m), count in sides.items())
    rest = 2 * VH + 65 * 4096
    assert total(e.resident(), "optimizer_states") == b * (32 * projected + 2 * rest)
    decomposed = 4 * ((3 if b == 2 else 2) * GATE + 4096**2)
    assert total(moments(e, "stepping")["optimizer step"], "temporary") == max(decomposed, 2 * b * VH)


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"trainer": "axolotl"}, "'galore' with trainer axolotl"),
        ({"sharding": "zero2", "gpus": 2}, "'galore' with sharding zero2"),
        ({"method": "lora"}, "'galore' with method lora"),
        ({"model": "mixtral-8x7b"}, "'galore' with routed experts"),
    ],
)
def test_galore_is_refused_where_it_is_not_modelled(fields: dict[str, object], given: str) -> None:
    job = {"model": "llama-3-8b", "task": "sft", "framework": "torch", "gpu": "h200", "seq_len": 1024}
    with pytest.raises(ScenarioError, match=f"optimizer: given {given}"):
        parse(job | {"optimizer": "galore", "micro_batch": 1} | fields)


def test_a_model_that_is_not_trained_is_its_weights() -> None:
    """No gradients, no states, no step."""
    e = engine(trained=False, gpus=4, sharding="ddp")
    assert total(e.resident()) == 2 * P
    assert e.at(end()) == []
    assert list(e.stepping()) == []


def test_four_bit_weights_leave_embedding_head_and_norms_in_16_bits() -> None:
    """32 · 218,103,808 linear elements at 4.127 bits, and 2 bytes of 1,050,939,392 others."""
    linear = 32 * (LAYER - 8192)
    (line,) = [line for line in plain(method="qlora").weights() if line.component == "weights"]
    assert line.bytes == int((0.5 + 1 / 64 + 4 / 16384) * linear + 2 * (P - linear))


@pytest.mark.parametrize(
    ("fields", "held"),
    [
        ({}, 0),  # bf16, as the files: mapped, until it is on the card
        ({"precision": "fp32"}, 4 * P),
        ({"precision": "fp32", "sharding": "ddp", "gpus": 8}, 8 * 4 * P),
        ({"versions.transformers": "4.50"}, 2 * P),  # before it built models on the meta device
        ({"precision": "autocast", "method": "qlora"}, 0),
        ({"precision": "autocast", "framework": "trl"}, 0),  # device_map="auto"
        ({"precision": "autocast", "framework": "trl==0.25.1"}, 4 * P),
        ({"precision": "autocast", "framework": "trl", "sharding": "ddp", "gpus": 8}, 8 * 4 * P),
        ({"precision": "autocast", "trainer": "axolotl", "sharding": "ddp", "gpus": 8}, 0),
        ({"model": "qwen3-30b-a3b"}, 2 * 30_532_122_624),  # Transformers 5 joins its experts
    ],
)
def test_a_plain_model_is_on_the_host_while_it_loads_if_it_is_cast_there(fields: dict[str, object], held: int) -> None:
    """Once 0 GB for all: eight ranks that cast an 8B to fp32 take 257 GB before it is on the cards."""
    found = engine(**fields)
    assert isinstance(found, Plain)
    ranks = int(str(fields.get("gpus", 1)))
    assert sum(total(lines) for _, lines in found.host(ranks)) == held


def test_a_plain_model_loads_its_weights() -> None:
    """Its only moment of loading has the weights on the GPU."""
    assert total(moments(plain(), "loading")["weights on the GPU"]) == 2 * P


@given(scenarios(("sft", "rm")))
def test_more_ranks_change_nothing_under_ddp(drawn: Scenario) -> None:
    """Every rank holds everything, however many there are."""
    s = under(drawn, "ddp")
    more = replace(s, gpus=2 * s.gpus, global_batch=2 * s.global_batch)
    assert engine_of(s).resident() == engine_of(more).resident()


def test_modules_saved_beside_adapters_have_gradients_and_states_of_their_own() -> None:
    """Copies of embedding and head in bf16, V·h each, beside fp32 adapters of rank 8 on q: 2 + 2 + 4 bytes, and 16."""
    own: dict[str, object] = {"rank": 8, "targets": ["q_proj"], "dtype": "fp32"}
    e = plain(method="lora", lora={**own, "modules_to_save": ["embed_tokens", "lm_head"]})
    adapters = 32 * 8 * (4096 + 4096)
    assert total(e.weights(), "adapter") == 4 * adapters + 2 * 2 * VH
    assert total(e.weights(), "weights") == 2 * P  # the frozen ones stay
    assert total(e.states(), "optimizer_states") == 8 * adapters + 4 * 2 * VH
    ((_, lines),) = e.stepping()
    assert total(lines, "gradients") == 4 * adapters + 2 * 2 * VH
    assert total(e.at(head())) == 2 * VH
    assert plain(method="lora", lora=own).replica.saved == 0


def test_norms_saved_beside_adapters_are_trained_in_every_layer() -> None:
    """Llama 3 8B has 65 norms of 4,096 elements; their copies follow the copy of the embedding."""
    own: dict[str, object] = {"rank": 8, "targets": ["q_proj"], "dtype": "fp32"}
    e = plain(method="lora", lora={**own, "modules_to_save": ["embed_tokens", "all-norm"]})
    adapters, copies = 32 * 8 * (4096 + 4096), VH + 65 * 4096
    assert total(e.weights(), "adapter") == 4 * adapters + 2 * copies
    assert total(e.states(), "optimizer_states") == 8 * adapters + 4 * copies
    ((_, lines),) = e.stepping()
    assert total(lines, "gradients") == 4 * adapters + 2 * copies


def test_llamafactory_trains_copies_of_modules_in_fp32_unless_adapters_are_in_bf16() -> None:
    """`param.data.to(torch.float32)` of all that is trained (llamafactory 0.9.4 `model/adapter.py:314`), so 4 + 4 + 8.

    A copy of the embedding in fp32 makes the residual stream fp32, and the head then reads it so; a copy of the head
    alone does not. Checked with PEFT 0.21.2 and torch 2.13 under autocast.
    """

    def copies(*modules: str, dtype: str = "fp32") -> Plain:
        lora = {"rank": 8, "targets": ["q_proj"], "dtype": dtype, "modules_to_save": modules}
        return plain(trainer="llamafactory", method="lora", lora=lora)

    e, adapters = copies("embed_tokens", "lm_head"), 32 * 8 * (4096 + 4096)
    assert total(e.weights(), "adapter") == 4 * (adapters + 2 * VH)
    assert total(e.states(), "optimizer_states") == 8 * (adapters + 2 * VH)
    ((_, lines),) = e.stepping()
    assert total(lines, "gradients") == 4 * (adapters + 2 * VH)
    assert total(e.weights(), "weights") == 2 * P
    run = e.replica.run
    assert (run.residual, run.weight, run.compute, run.head.precision) == (4, 2, 2, "autocast")
    alone = copies("lm_head").replica.run
    assert (alone.residual, alone.head.precision) == (2, "autocast-narrow")
    assert total(copies("lm_head", dtype="bf16").weights(), "adapter") == 2 * (adapters + VH)


def test_an_adapter_beside_the_embedding_has_its_first_gradient_twice_while_it_is_copied() -> None:
    """Llama 3 8B, rank 8: 8 · 128,256 and 4,096 · 8 beside the embedding, 32 · 8 · 8,192 beside q, in bf16.

    All gradients and a copy of the rows', which the transposed lookup leaves in another order; a new one is added to
    that of an earlier micro batch in place. Seen in traces with PEFT 0.21.2 and torch 2.13 (`new_empty_strided`).
    """
    lora = {"rank": 8, "targets": ["q_proj", "embed_tokens"], "dtype": "bf16"}
    rows, others = 8 * 128_256, 8 * 4096 + 32 * 8 * 8192
    e = plain(method="lora", lora=lora)
    assert total(e.weights(), "adapter") == 2 * (rows + others)
    assert total(e.states(), "optimizer_states") == 4 * (rows + others)
    last = Where("end", 0, True, 0, others - 8 * 4096, rows + 8 * 4096, rows, relaid=True)
    assert total(e.at(last)) == 2 * (2 * rows + others)
    assert total(e.at(last._replace(sorting=True))) == 2 * (rows + others)
    assert total(plain(method="lora", lora=lora, global_batch=2).at(last)) == 2 * (2 * rows + others)


def test_adapters_that_start_from_a_decomposition_have_the_largest_weight_in_fp32_while_they_load() -> None:
    """Of 14,336 by 4,096: PiSSA has three of its size and both factors, 4,096 · (14,336 + 4,096); OLoRA has two."""
    for init, times in (("pissa", 3), ("olora", 2)):
        (name, lines), (_, after) = plain(method="lora", lora={"rank": 8, "init": init}, trainer="ms-swift").loading()
        assert name == "adapters decomposed from weights"
        made = 4 * (times * 14_336 * 4096 + 4096 * (14_336 + 4096))
        assert total(lines) - total(after) == total(lines, "temporary") == made
    assert len(list(plain(method="lora", lora={"rank": 8}, trainer="ms-swift").loading())) == 1
    assert len(list(plain(method="lora", lora={"rank": 8, "init": "pissa"}, trainer="transformers").loading())) == 1


def test_a_buffer_for_dequantised_weights_stays_from_the_first_forward_on() -> None:
    """Llama 3 8B's down_proj in Unsloth's, 14,336 · 4,096 elements of 2 bytes with 4 for each 64."""
    size = 14_336 * 4096 * 2 + 14_336 * 64 * 4
    with_buffer, without = (
        plain(trainer="unsloth", method="qlora", versions={"unsloth": version}) for version in ("2025.2.2", "2025.1.8")
    )
    assert total(with_buffer.states()) - total(without.states()) == size
    (*_, (_, loaded)), (*_, (_, before)) = with_buffer.loading(), without.loading()
    assert total(loaded) == total(before)


def test_unsloths_gemma_2_keeps_two_masks_of_all_positions_where_its_scores_are_not_capped_by_a_kernel() -> None:
    """8,192 positions in fp16, from 2024.9 on those of a sequence; a card with bf16 has flash-attn."""

    def kept(version: str, precision: str) -> int:
        own = {"trainer": "unsloth", "method": "qlora", "gpu": "t4", "seq_len": 2048, "versions": {"unsloth": version}}
        return total(plain(model="gemma-2-2b", precision=precision, **own).states(), "weights")

    assert kept("2024.8", "fp16") == 2 * 2 * 8192**2
    assert kept("2024.9", "fp16") == 2 * 2 * 2048**2
    assert kept("2024.8", "bf16") == 0


def test_the_table_that_loads_last_is_there_twice_where_the_card_casts_it() -> None:
    """A T4 has no bf16. Gemma 3n's 262,144 further embeddings for 35 layers of 256, and a head of 128,256 by 4,096."""

    def loads(model: str, transformers: str, precision: str = "fp16") -> list[tuple[str, int]]:
        own = {
            "trainer": "unsloth",
            "method": "qlora",
            "versions": {"unsloth": "2025.9.1", "transformers": transformers},
        }
        return [(at, total(lines)) for at, lines in plain(model=model, precision=precision, **own).loading()]

    for model, last in (("gemma-3n-e4b", 262_144 * 35 * 256), ("llama-3-8b", 128_256 * 4096)):
        (cast, before), (_, after) = loads(model, "4.55.4")
        assert cast == "last table: cast" and before - after == 2 * last
    assert len(loads("llama-3.2-3b", "4.55.4")) == 1  # its head is the embedding, which comes first
    for as_published in (("llama-3-8b", "4.50.3"), ("llama-3-8b", "5.2.0"), ("llama-3-8b", "4.55.4", "bf16")):
        assert len(loads(*as_published)) == 1
