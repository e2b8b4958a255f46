"""A vision tower that is trained whole beside adapters on the language model."""

from __future__ import annotations

import pytest

from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.models.architecture import vision_tensors
from calc.models.lora import lora_parameters
from calc.resolve.parse import parse
from calc.scenario.scenario import ScenarioError

JOB = {"model": "qwen2.5-vl-7b", "task": "sft", "framework": "torch", "trainer": "ms-swift", "gpu": "a100-80-sxm",
       "gpus": 4, "sharding": "zero2", "method": "lora", "lora": {"rank": 16, "targets": "all-linear"},
       "micro_batch": 1, "seq_len": 1024}  # fmt: skip
SIGHT = {"width": 448, "height": 448, "freeze": "none"}


def held(component: str, phase: str, **images: object) -> int:
    (group,) = estimate(parse(JOB | {"images": SIGHT | images}), replays=False).groups
    (found,) = [p for p in group.phases if p.name == phase]
    return sum(line.bytes for line in found.moment.lines if line.component == component)


def test_its_weights_have_gradients_masters_and_moments_in_place_of_adapters() -> None:
    """ms-swift's `lora_llm` (tuner_plugin/lora_llm.py): rank 16 beside the language model's linears alone; of all that
    is trained each of four ranks has its part of a master of 4 bytes an element and of two moments.
    """
    arch = load().model("qwen2.5-vl-7b").reading(images=True)
    tower = sum(t.elements * t.count for t in vision_tensors(arch))
    adapters = lora_parameters(arch, 16, "all-linear")
    assert held("adapter", "step", train_whole=True) == 2 * adapters < held("adapter", "step")
    assert held("master_weights", "step", train_whole=True) == pytest.approx(4 * (tower + adapters) / 4, rel=1e-6)
    assert held("optimizer_states", "step", train_whole=True) == pytest.approx(8 * (tower + adapters) / 4, rel=1e-6)
    assert held("weights", "step", train_whole=True) == held("weights", "step")


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"trainer": "transformers"}, "trainer transformers"),
        ({"sharding": "zero3"}, "sharding zero3"),
        ({"method": "full", "lora": None}, "method full"),
        ({"images": SIGHT | {"freeze": "tower", "train_whole": True}}, "images.freeze"),
    ],
)
def test_it_is_trained_so_only_where_that_is_modelled(fields: dict[str, object], given: str) -> None:
    asked = JOB | {"images": SIGHT | {"train_whole": True}} | fields
    with pytest.raises(ScenarioError, match=f"images.train_whole: given true with {given}"):
        parse({name: value for name, value in asked.items() if value is not None})
