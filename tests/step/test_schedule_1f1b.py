"""A model in stages: which layers each has, what is under way in it at once, and what its neighbours hand it."""

from __future__ import annotations

from typing import Any

import pytest
from formulas import holds
from hypothesis import given
from hypothesis import strategies as st
from tapes import backward_of

from calc.autograd.tape import Tape, of
from calc.base.ledger import Line
from calc.catalog.catalog import load
from calc.estimate.estimate import as_dict, estimate
from calc.estimate.result import Estimate, Group
from calc.models.architecture import ConfigError, parameters
from calc.models.slices import layers_of, stage
from calc.resolve.parse import parse
from calc.scenario.scenario import ScenarioError
from calc.step.schedule_1f1b import Turn, turns

H, V, LAYERS = 4096, 128_256, 32  # Llama 3 8B
LAYER = 2 * H * H + 2 * H * 1024 + 3 * H * 14_336 + 2 * H
SFT = {
    "model": "llama-3-8b", "task": "sft", "gpu": "h200", "gpus": 4, "pipeline_parallel": 4, "optimizer_impl": "fused",
    "micro_batch": 1, "global_batch": 8, "seq_len": 2048,
}  # fmt: skip
WHOLE = sorted(
    name
    for name, model in load().models.items()
    if not model.architecture.tied
    and (model.architecture.vision or model.architecture.passed or model.architecture.sound)
)
UNTIED = sorted(name for name, model in load().models.items() if not model.architecture.tied and name not in WHOLE)


def of_job(**changes: Any) -> Estimate:
    return estimate(parse(SFT | changes))


def lines(group: Group, phase: str, component: str) -> list[Line]:
    """The lines of one component at the largest moment of a phase."""
    found = next(p for p in group.phases if p.name == phase)
    return [line for line in found.moment.lines if line.component == component]


def refused(**changes: Any) -> str:
    with pytest.raises(ScenarioError) as caught:
        parse(SFT | changes, where="job.yaml")
    return str(caught.value)


# --- layers ---


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        (32, 1, (32,)),
        (32, 2, (16, 16)),
        (32, 4, (8, 9, 8, 7)),  # 34 in fours: 9, 9, 8, 8; the first and the last have one less
        (22, 4, (5, 6, 6, 5)),
        (80, 8, (10, 11, 10, 10, 10, 10, 10, 9)),
        (6, 4, (1, 2, 2, 1)),
    ],
)
def test_layers_are_spread_as_torchtitan_spreads_them(layers: int, stages: int, counts: tuple[int, ...]) -> None:
    """`generate_llm_fqn_per_model_part` with input and output weighing a layer each."""
    assert layers_of(layers, stages) == counts


@given(st.integers(2, 200), st.data())
def test_every_stage_has_a_layer_and_all_have_as_many_as_the_model(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, (layers + 2) // 2))
    counts = layers_of(layers, stages)
    assert sum(counts) == layers
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 2


@pytest.mark.parametrize("model", WHOLE)
def test_a_vision_tower_is_not_cut(model: str) -> None:
    with pytest.raises(ConfigError, match=r"^pipeline_parallel: given 2, allowed: 1 for the family"):
        stage(load().models[model].architecture, 0, 2)


@pytest.mark.parametrize("model", UNTIED)
def test_stages_add_up_to_the_model(model: str) -> None:
    whole = load().model(model).architecture
    for asked in (2, 3, 4, 8):
        stages = min(asked, (whole.layers + 2) // 2)  # Pythia's smallest have six layers
        parts = [stage(whole, index, stages) for index in range(stages)]
        assert sum(parameters(part) for part in parts) == parameters(whole), stages
        assert sum(part.dense_layers for part in parts) == whole.dense_layers, stages


def test_the_first_stage_embeds_and_the_last_has_norm_and_head() -> None:
    whole = load().model("llama-3-8b").architecture
    first, second, _, last = (parameters(stage(whole, index, 4)) for index in range(4))
    assert first == 8 * LAYER + V * H
    assert second == 9 * LAYER
    assert last == 7 * LAYER + H + V * H


@given(st.sampled_from(UNTIED), st.sampled_from((1, 2, 4)))
def test_more_stages_never_need_more_weights_on_a_gpu(model: str, stages: int) -> None:
    whole = load().model(model).architecture
    most = []
    for count in (stages, 2 * stages):
        try:
            most.append(max(parameters(stage(whole, index, count)) for index in range(count)))
        except ConfigError:
            return
    assert most[1] <= most[0]


# --- micro-batches ---


@pytest.mark.parametrize(
    ("index", "stages", "micro", "expected"),
    [
        (0, 4, 8, (Turn(True, 3),)),  # four forwards, then backward and forward in turn
        (2, 4, 8, (Turn(True, 1),)),
        (3, 4, 8, (Turn(True, 0),)),
        (0, 4, 4, (Turn(False, 3), Turn(True, 2))),  # no forward after the first backward
        (1, 4, 4, (Turn(True, 2),)),
    ],
)
def test_a_stage_has_as_many_micro_batches_as_stages_follow(
    index: int, stages: int, micro: int, expected: tuple[Turn, ...]
) -> None:
    assert turns(index, stages, micro) == expected


def test_each_stage_is_a_group_of_gpus_and_the_fullest_decides() -> None:
    e = of_job(gpus=8, sharding="fsdp2", global_batch=16)
    assert [(g.name, g.gpus) for g in e.groups] == [(f"stage {n}", 2) for n in (1, 2, 3, 4)]
    assert e.fit_probability == min(g.fit_probability for g in e.groups)
    assert {line.role for g in e.groups for p in g.phases for line in p.moment.lines} == {"actor", "process"}
    uneven = of_job(gpu="a100-80-sxm", gpus=8, sharding="fsdp2", global_batch=16, seq_len=10_752)
    assert (uneven.groups[0].verdict, uneven.groups[2].verdict, uneven.verdict) == ("oom", "fits", "oom")


def test_inputs_and_gradients_have_a_buffer_for_every_micro_batch() -> None:
    """2·h bytes a token, for eight micro-batches: one of each kind in the middle, one kind at either end."""
    buffer = 2 * H * 2048
    kinds = [[line.bytes // buffer for line in lines(group, "step", "communication")] for group in of_job().groups]
    assert kinds == [[8], [16], [16], [8]]


def test_layers_of_micro_batches_under_way_keep_their_activations() -> None:
    """16·h + 4·q + 4·kv + 8·i + 4·H + 8 a token and layer; in the top layer backward has begun."""
    kept = (16 * H + 4 * H + 4 * 1024 + 8 * 14_336 + 4 * 32 + 8) * 2048
    first, second, third, _ = of_job().groups
    for group, layers, waiting in ((first, 8, 3), (second, 9, 2), (third, 8, 1)):
        found = sum(line.bytes for line in lines(group, "backward", "activations"))
        found -= (waiting + 1) * 2 * 2 * 128 * 2048  # cosines and sines of each
        assert layers * kept * waiting + (layers - 1) * kept <= found <= layers * kept * (waiting + 1)


def test_the_last_stage_alone_has_logits() -> None:
    *others, last = of_job().groups
    assert not [line for group in others for phase in ("forward", "backward") for line in lines(group, phase, "logits")]
    assert sum(line.bytes for line in lines(last, "backward", "logits")) >= 4 * V * 2048


def test_a_gradient_in_anothers_buffer_is_not_counted_and_not_added_into() -> None:
    """What comes from the stage above costs nothing here, until a second gradient of the same tensor makes a sum."""
    for received, first, after in ((False, 8, 8), (True, 4, 8)):
        tape = Tape(received=received)
        x = tape.op("input", [], of(h=1), 4, weight=1)
        y = tape.op("double", [x], of(h=1), 4)
        tape.op("add", [x, y], of(h=1), 4, aliases=[x, y])
        shots = {shot.name: shot.passing.tokens.get("h", 0) for shot in backward_of(tape)}
        assert shots["double"] == first
        assert shots["input"] == after - 4


def test_under_fsdp_whole_gradients_wait_for_the_last_micro_batch() -> None:
    """Sums in fp32 of a stage's own parameters, and its weights in bf16 beside them, on every GPU."""
    e = of_job(gpus=8, sharding="fsdp2", precision="fsdp-mixed", global_batch=16)
    (whole, *_) = lines(e.groups[1], "backward", "gradients")
    assert whole.bytes == 4 * 9 * LAYER
    gathered = [line for line in lines(e.groups[1], "backward", "communication") if line.values.get("what") == "layers"]
    assert [line.bytes for line in gathered] == [2 * 9 * LAYER]


@given(
    st.sampled_from(("llama-3-8b", "mixtral-8x7b", "qwen2.5-7b", "mistral-7b")),
    st.sampled_from((2, 4)),
    st.sampled_from((4, 6, 16)),
    st.sampled_from(("none", "full")),
    st.sampled_from(("none", "fsdp2")),
)
def test_lines_make_moments_and_formulas_their_bytes(
    model: str, stages: int, micro: int, checkpointing: str, sharding: str
) -> None:
    data = 2 if sharding == "fsdp2" else 1
    e = of_job(
        model=model, pipeline_parallel=stages, gpus=stages * data, sharding=sharding, checkpointing=checkpointing,
        global_batch=micro * data,
    )  # fmt: skip
    for group in as_dict(e)["groups"]:
        for phase in group["phases"]:
            holds(phase, printed=1e-4)


@given(st.sampled_from(("none", "full")), st.sampled_from((512, 4096)), st.sampled_from(("none", "fsdp2")))
def test_more_micro_batches_never_need_less(checkpointing: str, length: int, sharding: str) -> None:
    data = 2 if sharding == "fsdp2" else 1
    each = []
    for micro in (4, 5, 8, 16):
        e = of_job(
            checkpointing=checkpointing, seq_len=length, sharding=sharding, gpus=4 * data, global_batch=micro * data
        )
        each.append([g.peak.moment.allocated_bytes for g in e.groups])
    for peaks in zip(*each, strict=True):
        assert list(peaks) == sorted(peaks)


def test_the_default_batch_fills_the_stages_once() -> None:
    s = parse({name: SFT[name] for name in ("model", "task", "gpu", "gpus", "pipeline_parallel")} | {"gpus": 8})
    assert (s.sharding, s.data_parallel, s.global_batch, s.accumulation) == ("fsdp2", 2, 8, 4)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"task": "dpo"}, "pipeline_parallel: given 4 for dpo, allowed with torch: 1"),
        ({"method": "lora"}, "method: given 'lora' with pipeline_parallel = 4, allowed: full"),
        ({"loss": "fused"}, "loss: given 'fused' with pipeline_parallel = 4, allowed: full"),
        ({"optimizer": "none"}, "optimizer: given 'none' with pipeline_parallel = 4"),
        ({"precision": "autocast"}, "precision: given 'autocast' with pipeline_parallel = 4, allowed: bf16"),
        ({"gpus": 8, "sharding": "ddp"}, "sharding: given 'ddp' with pipeline_parallel = 4, allowed: none, fsdp2"),
        (
            {"gpus": 8, "context_parallel": 2, "sharding": "fsdp2", "attention": "flash"},
            "attention: given 'flash' with context_parallel = 2, allowed: sdpa",
        ),
        ({"packing": True}, "packing: given true with pipeline_parallel = 4, allowed: false"),
        ({"model": "qwen2.5-0.5b"}, "1 for a model whose head is its embedding"),
        ({"gpus": 24, "gpus_per_node": 8, "pipeline_parallel": 24}, "pipeline_parallel: given 24, allowed: at most 17"),
        ({"gpus": 6}, "gpus: given 6, allowed: a multiple of pipeline_parallel = 4, as 4 or 8"),
        (
            {"global_batch": 3},
            "global_batch: given 3 with pipeline_parallel = 4, allowed: a micro batch for each stage",
        ),
        ({"model": "mistral-7b-v0.1", "seq_len": 8192}, "and sdpa, allowed: at most the model's window of 4096"),
        ({"framework": "openrlhf", "global_batch": 128}, "pipeline_parallel: given 4, allowed with openrlhf: 1"),
        ({"framework": "trl"}, "pipeline_parallel: given 4, allowed with trl: 1"),
        ({"framework": "verl"}, "pipeline_parallel: given 4, allowed with verl: 1"),
    ],
)
def test_what_has_no_stages_is_refused(changes: dict[str, Any], line: str) -> None:
    assert line in refused(**changes)


def test_roles_have_no_stages() -> None:
    with pytest.raises(ScenarioError, match=r"roles\.actor\.pipeline_parallel: given 2, not modelled yet"):
        parse({"model": "llama-3-8b", "task": "ppo", "gpu": "h200", "roles": {"actor": {"pipeline_parallel": 2}}})
