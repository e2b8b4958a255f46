from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from formulas import evaluate, holds
from hypothesis import given, settings
from jobs import engine_of
from strategies import scenarios
from tapes import of_kind

from calc.base.ledger import Line, Phase
from calc.base.plan import Path
from calc.catalog.catalog import load
from calc.estimate.estimate import as_dict, estimate
from calc.memory.activations import layer
from calc.memory.run import Adapter, Run
from calc.models.architecture import Architecture, embedding_parameters, layer_parameters, parameters
from calc.models.lora import lora_parameters
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario
from calc.step.instants import SORTED_TOKENS, Batch, Instant, Part, Plan, Step, plan, step
from calc.step.roles import Roles

LOSS = Path("cross-entropy")
LAYER = 200_840  # bytes a token of Llama 3 8B, bf16, flash: 16h + 4q + 4kv + 8i + 4H + 8
FINAL_NORM = 6 * 4096 + 4
V = 128_256
H = 4096


def arch(model: str) -> Architecture:
    return load().model(model).architecture


def made(
    model: str = "llama-3-8b",
    path: Path = LOSS,
    *,
    masked: bool = False,
    checkpointing: str = "none",
    fsdp: int = 0,
    **run: Any,
) -> Plan:
    """The instants of `model`; `run` are fields of Run."""
    a = arch(model)
    r = Run(a, **run)
    adapters = lora_parameters(a, r.adapter.rank, r.adapter.targets) if r.adapter else 0
    return plan(r, path, adapters or parameters(a), masked, checkpointing, fsdp, fsdp > 0)


def named(instants: tuple[Instant, ...], name: str) -> Instant:
    """The first instant of that name."""
    return next(i for i in instants if i.name == name)


# --- layers ---


@pytest.mark.parametrize(
    ("model", "first_layers"),
    [
        ("gemma-2-9b", [True, False, True, False]),  # every other layer, the first one slides
        ("gpt-oss-20b", [True, False, True, False]),
        ("gemma-3-1b", [True, True, True, True]),  # all but every sixth
        ("mistral-7b-v0.1", [True] * 4),  # all of them
        ("phi-3-mini", [True] * 4),
        ("llama-3-8b", [False] * 4),
        ("qwen2.5-7b", [False] * 4),
    ],
)
def test_which_layers_attend_to_a_window_alone(model: str, first_layers: list[bool]) -> None:
    """Protects the order of sliding layers: transformers' `layer_types` of each family."""
    assert [layer in arch(model).sliding_layers for layer in range(4)] == first_layers


def test_layers_without_rotation_are_a_kind_of_their_own() -> None:
    """SmolLM3: every fourth of 36 has no positions; it keeps the same, its queries and keys as they are projected."""
    turned, plain = made("smollm3-3b").layout.stack.blocks
    assert (turned.number, plain.number) == (27, 9)
    assert turned.segment.saved.tokens == plain.segment.saved.tokens


def test_layers_of_one_kind_are_compiled_once() -> None:
    """Llama's 32 are alike; DeepSeek-V3 has 3 dense ones and 58 with experts; frozen weights make the first special."""
    assert [b.number for b in made().layout.stack.blocks] == [32]
    blocks = made("deepseek-v3").layout.stack.blocks
    assert [b.number for b in blocks] == [3, 58]
    assert [b.trained for b in blocks] == [
        layer_parameters(arch("deepseek-v3"), arch("deepseek-v3").specs[i]) for i in (0, -1)
    ]
    lora = made(trained=False, adapter=Adapter(64, "all-linear", False, 2)).layout.stack.blocks
    assert [(b.number, b.segment.saved.tokens) for b in lora] == [(1, 185_352 - 4 * H - 4), (31, 185_352)]


def test_a_window_shorter_than_the_sequence_takes_the_masked_kernel_on_sliding_layers() -> None:
    """Gemma 2 9B: 21 of 42 layers slide; 2S a token appears in theirs, 4q + 4kv becomes 8q."""
    sliding, full = made("gemma-2-9b", masked=True).layout.stack.blocks
    assert (sliding.number, full.number) == (21, 21)
    assert (sliding.segment.saved.pairs, full.segment.saved.pairs) == (2, 0)
    assert sliding.segment.saved.tokens - full.segment.saved.tokens == 4 * 16 * 256 - 4 * 8 * 256


def test_sinks_leave_eager_attention_on_sliding_layers_too() -> None:
    """GPT-OSS has no SDPA: with a window its scores are whole tensors all the same, 2H a pair on every layer."""
    for block in made("gpt-oss-20b", masked=True, kernel="eager").layout.stack.blocks:
        assert block.segment.saved.pairs == 2 * 64


# --- forward ---


def test_at_the_end_of_forward_every_layer_the_final_norm_and_the_logits_are_alive() -> None:
    """Llama 3 8B: 32 layers of 200,840, the final norm's 6h + 4, the head's input 2h, logits 10V and the loss 4."""
    largest = max((i for i in made().forward if i.name.startswith("logits")), key=lambda i: i.total.tokens)
    assert largest.total.tokens == 32 * LAYER + FINAL_NORM + 2 * H + 10 * V + 4
    assert largest.total.pairs == 0
    assert {(p.component, p.times) for p in largest.parts} == {("activations", 32), ("activations", 1), ("logits", 1)}


def test_in_the_last_layers_forward_the_layers_below_are_alive() -> None:
    """31 layers kept, and the 32nd so far: at its end beside what it keeps its input, the attention's sum, the
    MLP's output and their sum, 2h each."""
    found = max((i for i in made().forward if i.name.startswith("layer")), key=lambda i: i.total.tokens)
    assert found.where.layer == 31
    assert found.name == "layer: mlp: add"
    assert found.total.tokens == 32 * LAYER + 8 * H


def test_a_forward_without_grad_keeps_nothing_of_the_layers_below() -> None:
    """A reference's forward: what passes in its layer, 6i + 6h at most; in the head its input, 10V and the loss."""
    layers = [i.total.tokens for i in made().scoring if i.name.startswith("layer")]
    assert max(layers) == 6 * 14336 + 6 * H
    assert max(i.total.tokens for i in made().scoring) == 2 * H + 10 * V + 4
    assert all(p.component in ("temporary", "logits") for i in made().scoring for p in i.parts)


def test_what_waits_for_backward_is_every_layer_the_norm_and_the_logits_kept() -> None:
    """While DPO's reference runs: 32·200,840 + 6h + 4, and of the head 2h + 4V."""
    waiting = made().layout.waiting()
    assert sum(p.times * p.amount.tokens for p in waiting) == 32 * LAYER + FINAL_NORM + 2 * H + 4 * V


# --- backward ---


def test_the_losss_backward_sees_all_activations_and_three_tensors_of_logits() -> None:
    """Candidate 1 of the traced peaks: 32 layers, the final norm with the head's input 8h + 4, and 12V."""
    found = named(made().backward, "loss: log-softmax")
    assert found.total.tokens == 32 * LAYER + 8 * H + 4 + 12 * V
    assert found.where.segment == "loss"
    assert found.where.done == 0


def test_the_heads_gradient_exists_from_its_backward_on() -> None:
    """128,256 x 4096 elements are made there, and none before; then the final norm's 4096."""
    head = named(made().backward, "loss: lm_head").where
    assert (head.segment, head.root, head.making) == ("head", V * H, V * H)
    norm = [i.where for i in made().backward if i.name.startswith("final norm")]
    assert {where.root for where in norm} == {V * H + H}
    assert {where.segment for where in norm} == {"norm"}


def test_a_layers_backward_sees_the_layers_below_and_the_gradients_above() -> None:
    """Candidate 2: the MLP's product of the last layer has 31 layers below, of the first none, and 31 above it."""
    last, first = (i for i in made().backward if i.name == "layer: mlp: product")
    instant = LAYER + 4 * 14336 + 2 * H
    assert (last.where.layer, first.where.layer) == (31, 0)
    assert last.total.tokens == 31 * LAYER + instant
    assert first.total.tokens == instant
    assert last.where.above == 0
    assert first.where.above == 31 * layer_parameters(arch("llama-3-8b"), arch("llama-3-8b").specs[-1])
    assert {last.where.root, first.where.root} == {V * H + H}
    assert {last.where.here, first.where.here} == {14336 * H}  # down_proj's


def test_at_the_end_of_backward_every_parameter_has_its_gradient() -> None:
    """Embedding, 32 layers, norm and head: 8,030,261,248 for Llama 3 8B; the tied head of Llama 3.2 1B counts once."""
    for model in ("llama-3-8b", "llama-3.2-1b", "deepseek-v3", "gemma-2-2b", "gpt-oss-20b"):
        end = named(made(model).backward, "embedding").where
        assert end.done == parameters(arch(model))
        assert end.making == arch(model).vocab * arch(model).hidden
    assert parameters(arch("llama-3-8b")) == 8_030_261_248


def test_a_reward_models_head_is_one_row() -> None:
    """No lm_head: the value head's 4096 elements, and an embedding of its own even where it was tied."""
    for model in ("llama-3-8b", "llama-3.2-1b"):
        end = named(made(model, Path("scalar")).backward, "embedding").where
        assert end.done == parameters(arch(model), head="scalar")
        assert end.root == 2 * arch(model).hidden


def test_a_frozen_embedding_has_no_backward() -> None:
    """LoRA ends with the first layer's adapters."""
    lora = made(trained=False, adapter=Adapter(64, "all-linear", False, 2))
    assert "embedding" not in {i.name for i in lora.backward}
    a, first = arch("llama-3-8b"), [i for i in lora.backward if i.where.layer == 0][-1].where
    assert first.done == lora_parameters(a, 64, "all-linear")
    assert first.root == 0


def test_the_embeddings_gradient_of_many_tokens_is_summed_with_scratch_of_its_own() -> None:
    """Above 3072 tokens: fp32 rows for every token and every tenth, 4.4h, beside the gradient, 2h."""
    few, many = (step("actor", Run(arch("llama-3-8b")), LOSS, 1, Batch(tokens, 512), masked=False, checkpointing="none")
                 for tokens in (3072, 3073))  # fmt: skip
    assert SORTED_TOKENS == 3072
    assert [i.total.tokens for i in few.backward() if i.name == "embedding"] == [2 * H]
    assert [i.total.tokens for i in many.backward() if i.name == "embedding"] == [2 * H, pytest.approx(6.4 * H)]


# --- checkpointing ---


@pytest.mark.parametrize(("precision", "b"), [("bf16", 2), ("autocast", 4), ("fp32", 4)])
def test_checkpointing_keeps_the_residual_stream_between_layers(precision: str, b: int) -> None:
    """2h a token and layer, 4h where the stream is fp32; traced."""
    waiting = made(checkpointing="full", precision=precision).layout.waiting()
    assert (waiting[0].component, waiting[0].times, waiting[0].amount.tokens) == ("checkpoints", 32, b * H)


def test_a_recomputed_layer_has_its_own_input_and_those_below_beside_all_it_keeps() -> None:
    """Candidate 2 with checkpointing: 18h + 4q + 4kv + 12i + 4H + 8 + 2h(l + 1), at layer l = 31 and 0."""
    instants = made(checkpointing="full").backward
    last, first = (i for i in instants if i.name == "layer: mlp: product")
    form = 18 * H + 4 * H + 4 * 1024 + 12 * 14336 + 4 * 32 + 8
    assert last.total.tokens == form + 2 * H * 32
    assert first.total.tokens == form + 2 * H


def test_layers_that_run_again_together_have_one_checkpoint_and_what_those_below_keep() -> None:
    """Eight checkpoints of four of Llama 3 8B's 32 layers each: in the last layer's backward all of them, the inputs of
    three layers, and all that the three below it keep. In its forward there is its input beside the eight
    (Megatron-core 0.16.1 `transformer/transformer_block.py`, `_checkpointed_forward`, `uniform`).
    """
    together = made(checkpointing="full", at_once=4)
    (last,) = {i.where.layer: i for i in together.forward if i.where.segment == "layer"}.values()
    found = {(part.component, part.times) for part in last.parts}
    assert ("checkpoints", 9) in found
    back = [i for i in together.backward if i.where.segment == "layer" and i.where.layer == 31]
    assert back
    for i in back:
        kept = {part.component: part.times for part in i.parts if part.times > 1}
        assert kept == {"checkpoints": 8 + 3, "activations": 3}
    norm = next(i for i in together.backward if i.where.segment == "norm")
    assert {part.times for part in norm.parts if part.component == "checkpoints"} == {8}
    assert {i.where.layer for i in together.backward if i.where.segment == "layer"} == {0, 28, 29, 30, 31}


def test_recomputation_runs_a_forward_with_the_gradient_of_the_layers_output_waiting() -> None:
    """Where it stops, before down_proj: the layer's 200,840, the addition's 2h, the gradient's 2h, 32 inputs of 2h."""
    every = tuple(made(checkpointing="full").layout.backward())
    found = [i for i in every if i.name == "recompute: mlp: product"]
    assert found[0].total.tokens == LAYER + 2 * H + 2 * H + 32 * 2 * H
    assert not [i for i in every if i.name in ("recompute: down_proj", "recompute: mlp: add")]
    assert found[0].where.above == found[0].where.here == 0
    assert not [i for i in made().layout.backward() if i.name.startswith("recompute")]


def test_forward_under_checkpointing_keeps_nothing_of_the_layer_that_runs() -> None:
    """The last layer's passing tensors, 6i + 4h, beside 32 inputs."""
    layers = [i for i in made(checkpointing="full").forward if i.name.startswith("layer")]
    assert max(i.total.tokens for i in layers) == 6 * 14336 + 4 * H + 32 * 2 * H


def test_autocast_caches_casts_of_the_layers_weights_through_a_checkpointed_forward() -> None:
    """2 bytes for each element of the layers' linears; the head's cast is kept for backward by the head itself.

    In the last layer, of the others'. Without checkpointing layers keep their own. As traced for DPO: the reference's
    forward runs beside the cache, unless autocast ends with the policy's (Accelerate's).
    """
    linears = 32 * (2 * H * H + 2 * H * 1024 + 3 * H * 14336)
    plan = made(checkpointing="full", precision="autocast")

    def cached(parts: Iterable[Part]) -> list[float]:
        return [p.amount.fixed for p in parts if p.source == "activations#autocast"]

    assert cached(plan.forward[0].parts) == [2 * linears * 31 / 32]
    assert cached(plan.forward[-1].parts) == cached(plan.layout.waiting()) == [2 * linears]
    assert cached(made(checkpointing="full", precision="autocast", wrapped=True).layout.waiting()) == []
    for other in (
        made(precision="autocast"),
        made(checkpointing="full"),
        made(checkpointing="full", precision="autocast", trained=False),
    ):
        assert not [p for i in other.forward for p in i.parts if p.source == "activations#autocast"]


def test_autocast_caches_the_casts_of_what_only_scores_where_it_requires_gradients() -> None:
    """`cached_cast` asks for `requires_grad`, not for grad mode: seen in an H100's allocator for TRL's reference."""
    linears = 32 * (2 * H * H + 2 * H * 1024 + 3 * H * 14336)
    for checkpointing in ("none", "full"):
        found = {}
        for differentiable in (True, False):
            run = {"trained": False, "differentiable": differentiable, "precision": "autocast"}
            last = made(checkpointing=checkpointing, **run).scoring[-1]
            found[differentiable] = [p.amount.fixed for p in last.parts if p.source == "activations#autocast"]
        assert found == {True: [2 * linears], False: []}


def test_autocast_caches_the_casts_of_fp32_adapters() -> None:
    """o_proj at rank 64: two bytes for each of 64 · (4096 + 4096) in 32 layers, whatever the type of the base."""
    adapter = Adapter(64, ("o_proj",), False, 4)
    for precision in ("autocast", "autocast-bf16"):
        plan = made(checkpointing="full", precision=precision, trained=False, training=True, adapter=adapter)
        found = [p.amount.fixed for p in plan.forward[-1].parts if p.source == "activations#autocast"]
        assert found == [2 * 32 * 64 * (H + H)]


@pytest.mark.parametrize("kept", [1, 5])
def test_last_layers_that_do_not_run_again_keep_all_but_no_checkpoint(kept: int) -> None:
    """XTuner checkpoints all layers but the last: that keeps 200,840 bytes a token in place of its input, 2h."""
    full, some = made(checkpointing="full"), made(checkpointing="full", kept_end=kept)
    more = named(some.forward, "logits: nll").total.tokens - named(full.forward, "logits: nll").total.tokens
    assert more == kept * (LAYER - 2 * H)
    every = [*some.layout.backward()]
    run, again = ({i.where.layer for i in every if i.name.startswith(name)} for name in ("layer", "recompute"))
    assert (max(run), max(again)) == (31, 31 - kept)
    assert named(some.backward, "embedding").total == named(full.backward, "embedding").total


def test_if_no_layer_runs_again_that_is_no_checkpointing() -> None:
    none, kept = made(), made(checkpointing="full", kept_end=32)
    assert [i.total for i in kept.forward] == [i.total for i in none.forward]
    assert [i.total for i in kept.backward] == [i.total for i in none.backward]


def test_selective_checkpointing_keeps_inputs_and_what_the_policy_keeps() -> None:
    """32 inputs, and of each layer q, v, gate, down, attention's output and log-sum-exp; below the last, of 31."""
    kept = 2 * (2 * H + 1024 + 14336 + H) + 4 * 32
    layout = made(checkpointing="selective").layout
    checkpoints = [(p.times, p.amount.tokens) for p in layout.waiting() if p.component == "checkpoints"]
    assert checkpoints == [(32, 2 * H), (32, kept)]
    last = [(p.times, p.amount.tokens) for p in layout.below(max(layout.stack.stops), "again")]
    assert last == [(32, 2 * H), (31, kept)]


def test_under_selective_checkpointing_eager_scores_are_those_of_one_layer() -> None:
    """Its products are `bmm`, which the policy does not know: nothing kept grows with pairs of tokens but the mask."""
    selective = made(checkpointing="selective", kernel="eager")
    assert sum(p.times * p.amount.pairs for p in selective.layout.waiting()) == 2
    assert max(i.total.pairs for i in selective.backward) == 2 + (4 + 8) * 32


@pytest.mark.parametrize("model", ["llama-3-8b", "qwen2.5-7b", "gemma-2-9b", "phi-3-mini", "mixtral-8x7b", "olmo-2-7b"])
@pytest.mark.parametrize("run", [{}, {"kernel": "eager"}, {"packaged": True}, {"precision": "autocast"}])
def test_selective_checkpointing_lies_between_none_and_full(model: str, run: dict[str, Any]) -> None:
    """In what waits for backward, and in the most that is alive in backward, for 8 sequences of 2048 tokens."""

    def waiting(plan: Plan) -> int:
        return sum(p.times * p.amount.bytes(16384, 2048) for p in plan.layout.layers())

    def peak(plan: Plan) -> int:
        return max(i.total.bytes(16384, 2048) for i in plan.backward)

    none, selective, full = (made(model, checkpointing=c, **run) for c in ("none", "selective", "full"))
    assert waiting(none) > waiting(selective) > waiting(full)
    assert peak(none) > peak(selective) > peak(full)


# --- outputs that stay ---


def test_referenced_outputs_are_beside_every_layers_backward() -> None:
    """bf16 logits, 2V, at every instant of backward, down to the embedding's."""
    held = made(path=Path("cross-entropy", held="backward")).backward
    plain = made().backward
    for name in ("layer: mlp: product", "embedding", "loss: log-softmax"):
        assert named(held, name).total.tokens - named(plain, name).total.tokens == 2 * V


def test_hidden_states_stay_as_layers_give_their_inputs_back() -> None:
    """33 tensors of 2H for 32 layers: beside the checkpoints of all of them one more, at the end of backward all."""
    streams = Path("cut", held="backward", hidden=True, outside=True)
    held, plain = (made(path=path, checkpointing="full").backward for path in (streams, Path("cut")))
    for name, number in (("layer: mlp: product", 1), ("embedding", 33)):
        assert named(held, name).total.tokens - named(plain, name).total.tokens == number * 2 * H


def test_outputs_carried_over_are_beside_the_next_forward() -> None:
    """OpenRLHF's sft loop: the micro-batch before has 4V still in every instant of forward, none of backward twice."""
    path = Path("flash", head_fp32=True, held="backward")
    carried = replace(path, held="next")
    assert made(path=path).layout.over("next") == []
    assert [p.amount.tokens for p in made(path=carried).layout.over("next")] == [4 * V]
    for before, after in zip(made(path=path).forward, made(path=carried).forward, strict=True):
        assert after.total.tokens - before.total.tokens == 4 * V
    assert [i.total for i in made(path=path).backward] == [i.total for i in made(path=carried).backward]
    assert [i.total for i in made(path=path).scoring] == [i.total for i in made(path=carried).scoring]


def test_a_loss_outside_of_the_model_runs_after_its_forward() -> None:
    """Log-probabilities are taken of returned logits; Transformers' own loss is part of the forward, lm_head always."""
    places = {i.name: i.where.segment for i in made(path=Path("log-softmax", upcast=True)).forward}
    assert places["logits: log-softmax"] == "outside"
    assert named(made().forward, "logits: nll").where.segment == "loss"
    assert named(made(path=Path("scalar")).forward, "logits: score").where.segment == "head"


# --- engines that overlap ---


def test_an_engine_that_gathers_layers_sees_the_gather_and_the_last_reduction() -> None:
    """While a layer's weights come together only the residual is new, 2h; at the reduction nothing but outputs held."""
    inner = made(fsdp=2)
    gather = named(inner.forward, "layer: gather")
    assert gather.where.segment == "gather"
    assert gather.total.tokens == 31 * LAYER + 2 * H
    reduction = inner.backward[-1]
    assert (reduction.where.segment, reduction.total.tokens) == ("reduce", 0)
    assert reduction.where.done == parameters(arch("llama-3-8b"))
    assert {i.where.layer for i in inner.backward if i.where.segment == "layer"} == {31, 30, 1, 0}
    assert {i.where.layer for i in made().backward if i.where.segment == "layer"} == {31, 0}


# --- what no engine can make the largest is left out ---


@settings(max_examples=60)
@given(scenarios())
def test_an_instant_that_is_left_out_is_never_the_largest_of_backward(s: Scenario) -> None:
    """Whatever the engine adds at each place, the instants that are kept have the same peak as all of them."""
    e = engine_of(s)
    if e.replica.optimizer is None:
        return
    version = s.sharded.stage if s.sharded.family == "fsdp" else 0
    own = step("actor", e.replica.run, e.replica.path, e.replica.trainable, Batch(s.rows * s.seq_len, s.seq_len),
               masked=False, checkpointing=s.checkpointing, fsdp=version,
               grouped=version == 1 or (version == 2 and not e.replica.adds_singly))  # fmt: skip

    def largest(instants: Iterable[Instant]) -> int:
        return max(i.total.bytes(*own.batch) + sum(line.bytes for line in e.at(i.where)) for i in instants)

    every = list(own.plan.layout.backward())
    assert largest(own.plan.backward) == largest(every)


# --- numbers put in ---


def test_a_step_puts_the_micro_batch_into_every_formula() -> None:
    """2 rows of 512: T = 1024, S = 512; every line's formula gives its bytes with the values it carries."""
    s = step("actor", Run(arch("llama-3-8b"), kernel="eager"), LOSS, 1, Batch(1024, 512), masked=False,
             checkpointing="full")  # fmt: skip
    assert (s.values["T"], s.values["S"], s.values["h"]) == (1024, 512, 4096)
    lines = s.lines(s.plan.layout.waiting())
    assert lines[0] == Line("activations", "actor", 2 * 512 * 1024, "T·(2·S)", s.values, "activations#embedding")
    assert lines[1] == Line("checkpoints", "actor", 32 * 2 * H * 1024, "32·(T·(2·h))", s.values,
                            "activations#checkpoints")  # fmt: skip
    for instant in (*s.plan.forward, *s.backward()):
        for line in s.lines(instant.parts):
            assert evaluate(line.formula, line.values) == line.bytes


def test_an_instants_total_is_the_sum_of_its_parts() -> None:
    """The largest instant is chosen by totals and shown by parts; both must agree."""
    for path in (LOSS, Path("selective"), Path("flash", head_fp32=True, held="next")):
        one = step("actor", Run(arch("gemma-2-9b"), kernel="eager"), path, 1, Batch(640, 128), masked=True,
                   checkpointing="none")  # fmt: skip
        for instant in (*one.plan.forward, *one.plan.scoring, *one.backward()):
            total = sum(line.bytes for line in one.lines(instant.parts))
            assert total == pytest.approx(instant.total.bytes(*one.batch), abs=len(instant.parts))


def doubled(tokens: int, length: int) -> tuple[Step, Step]:
    """A step, and one of twice the tokens in sequences twice as long."""
    return tuple(
        step("actor", Run(arch("qwen2.5-7b")), LOSS, 1, batch, masked=False, checkpointing="none")
        for batch in (Batch(tokens, length), Batch(2 * tokens, 2 * length))
    )  # type: ignore[return-value]


@pytest.mark.parametrize(("tokens", "length"), [(512, 512), (2048, 1024), (64, 1)])
def test_activations_under_flash_grow_in_proportion_to_the_tokens(tokens: int, length: int) -> None:
    """No term of flash attention's knows the length of a sequence: twice the tokens, twice the bytes, always."""
    once, twice = doubled(tokens, length)
    for a, b in zip(once.plan.forward + once.plan.backward, twice.plan.forward + twice.plan.backward, strict=True):
        assert [2 * line.bytes for line in once.lines(a.parts)] == [line.bytes for line in twice.lines(b.parts)]


# --- properties of whole estimates ---


def phases(s: Scenario) -> list[Phase]:
    e = estimate(s)
    return [p for g in e.groups for p in g.phases]


def peak(s: Scenario) -> int:
    return max(p.moment.device_bytes for p in phases(s))


@settings(max_examples=50)
@given(scenarios())
def test_every_phases_lines_add_up_and_every_formula_gives_its_bytes(s: Scenario) -> None:
    """The ledger's promise: lines make the moment, formulas and the values they are shown with make the lines."""
    data = as_dict(estimate(s))
    for phase in [p for g in data["groups"] for p in g["phases"]] + data["host"]["phases"]:
        holds(phase, printed=5e-6)


@settings(max_examples=50)
@given(scenarios())
def test_checkpointing_needs_at_most_one_layers_input_more_than_none(s: Scenario) -> None:
    """In the first layer's backward nothing lies below: there a checkpointed layer has its own input more.

    Without checkpointing nobody keeps that input as it is (the norm keeps its fp32 copy), so where the first layer's
    backward is the peak, with few tokens, one tensor of the residual stream is the price, with its share of what the
    allocator holds back, 5 %. Adapters have checkpointing ask for that input's gradient, so that the first layer keeps
    and computes what any other does. DeepSpeed keeps a tied head gathered while layers run again. Anywhere else
    checkpointing saves.
    """
    rows = s.micro_batch * (2 if s.task in ("rm", "dpo") else 1)
    tokens = rows * (s.expected_len if s.packing else s.seq_len)
    price = (4 if s.precision in ("autocast", "fp32") else 2) * s.architecture.hidden * tokens
    if s.lora:
        (run,) = [placed.engine.replica.run for placed in Roles(s).placed.values() if placed.trained]
        shots = layer(run, of_kind(run.arch, not s.architecture.dense_layers)).backward
        price += max(sum(part.bytes(tokens, tokens // rows) for part in (x.saved, x.passing)) for x in shots)
    if s.sharding == "zero3" and s.architecture.tied:
        price += 2 * embedding_parameters(s.architecture)
    none, full = (peak(replace(s, checkpointing=word)) for word in ("none", "full"))
    sought = none / 1000  # within which a replay tells the least that must be reserved
    assert full <= none + 1.05 * price + sought + 2


@settings(max_examples=40)
@given(scenarios())
def test_a_scenario_and_its_spelled_out_copy_give_the_same_estimate(s: Scenario) -> None:
    """Nothing that decides memory hides outside the scenario's fields."""
    assert as_dict(estimate(parse(s.as_dict()))) == as_dict(estimate(s))


def test_fsdp_1_keeps_what_went_into_frozen_layers_that_reentrant_checkpointing_runs_again() -> None:
    """In the lowest of 32 layers: 32 inputs and the gradients of 31, 63 x 2h, the last of which comes into the layer.

    The hook is that of FSDP 1: `_register_post_backward_reshard_only_hook` (torch 2.13
    `distributed/fsdp/_runtime_utils.py`) refers to the inputs until `_finalize_params`. Without it: 1 x 2h, and the
    gradient that comes in. In the top layer nothing differs.
    """
    lora = Adapter(8, "all-linear", False, 2)
    kept, usual = (
        made(checkpointing="full", fsdp=2, trained=False, adapter=lora, reentrant=True, flat=flat).backward
        for flat in (True, False)
    )

    def checkpoints(instants: tuple[Instant, ...], layer: int) -> set[float]:
        own = [i for i in instants if i.where.segment == "layer" and i.where.layer == layer]
        return {sum(p.times * p.amount.tokens for p in i.parts if p.component == "checkpoints") for i in own}

    assert checkpoints(usual, 0) == {2 * H}
    assert checkpoints(kept, 0) == {63 * 2 * H}
    assert checkpoints(kept, 31) == checkpoints(usual, 31) == {32 * 2 * H}
