"""Layers of one process on several GPUs, as Accelerate's `device_map="auto"` puts them there."""

from __future__ import annotations

import pytest

from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.models.architecture import language, parameters, vision_tensors
from calc.models.slices import device_layers
from calc.resolve.parse import parse
from calc.scenario.scenario import ScenarioError

JOB = {"model": "llama-2-7b", "task": "sft", "framework": "torch", "trainer": "transformers", "gpu": "a100-80-sxm",
       "method": "lora", "micro_batch": 1, "seq_len": 1024, "checkpointing": "none", "attention": "sdpa"}  # fmt: skip
LAYER, TABLE = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096, 32000 * 4096


def moments(**fields: object) -> list[dict[str, list[object]]]:
    found = estimate(parse(JOB | fields), replays=False).groups
    return [{p.name: list(p.moment.lines) for p in group.phases} for group in found]


def held(lines: list, component: str) -> int:
    return sum(line.bytes for line in lines if line.component == component)


@pytest.mark.parametrize(
    ("model", "devices", "layers"),
    [
        # accelerate 1.15 with Transformers 5.23, on models without weights: the first GPU has fewer, the last the rest
        ("llama-2-7b", 2, (16, 16)),
        ("qwen1.5-7b", 2, (14, 18)),
        ("llama-3-8b", 4, (5, 10, 10, 7)),
        ("qwen2.5-32b", 3, (20, 23, 21)),
        ("qwen3-next-80b-a3b", 4, (12, 13, 13, 10)),
        ("mistral-7b", 8, (3, 5, 5, 5, 5, 5, 4)),
    ],
)
def test_layers_lie_where_accelerate_puts_them(model: str, devices: int, layers: tuple[int, ...]) -> None:
    assert device_layers(load().model(model).architecture, devices) == layers


def test_each_gpu_has_its_layers_and_one_process_no_communicator() -> None:
    first, second = moments(gpus=2, device_map="auto")
    assert held(first["load"], "weights") == 2 * (TABLE + 16 * LAYER)
    assert held(second["load"], "weights") == 2 * (TABLE + 16 * LAYER + 4096)
    assert not held(first["backward"], "nccl") + held(second["backward"], "nccl")
    s = parse(JOB | {"gpus": 2, "device_map": "auto"})
    assert (s.data_parallel, s.shards, s.parts) == (1, 1, 2)


def test_hidden_states_and_their_gradients_are_copied_and_logits_come_back() -> None:
    """1,024 tokens of 4,096 in 16 bits: an input on the second GPU, and a gradient on the first. Logits of 151,936
    come back in 16 bits; accelerate 1.10.0 `hooks.py`, `AlignDevicesHook.post_forward`."""
    how = {"gpus": 2, "device_map": "auto", "precision": "bf16", "checkpointing": "full"}
    first, second = moments(model="qwen1.5-7b", **how)
    state = 1024 * 4096 * 2
    assert held(second["forward"], "communication") == held(second["backward"], "communication") == state
    assert held(first["backward"], "communication") == state and not held(first["forward"], "communication")
    arrived = next(line for line in first["forward"] if line.component == "logits")
    assert arrived.bytes == 1024 * 151936 * 2


def test_a_vision_tower_lies_before_the_embedding_and_its_images_stay_for_backward() -> None:
    """Qwen2.5-VL 7B: as accelerate 1.10 places it (`infer_auto_device_map`), the tower goes to the first GPU."""
    images = {"count": 1, "width": 448, "height": 448, "freeze": "vision"}
    first, second = moments(model="qwen2.5-vl-7b", gpus=2, device_map="auto", precision="bf16", images=images)
    arch = load().model("qwen2.5-vl-7b").reading(images=True)
    tower = sum(t.elements * t.count for t in vision_tensors(arch))
    text = sum(held(group["load"], "weights") for group in (first, second)) // 2 - tower
    assert text == parameters(language(arch)) and held(first["load"], "weights") > 2 * tower
    pixels = [line for line in first["backward"] if "pixels" in line.values]
    assert pixels and not [line for line in second["backward"] if "pixels" in line.values]


def test_processes_that_each_spread_their_layers_reduce_gradients_of_their_own() -> None:
    """Two of two GPUs each: on either GPU as one process of two, with DDP's buckets (ms-swift, `patch_mp_ddp`)."""
    fields = {"device_map": "auto", "trainer": "ms-swift"}
    alone = moments(gpus=2, **fields)
    several = moments(gpus=4, device_map_gpus=2, sharding="ddp", **fields)
    for one, many in zip(alone, several, strict=True):
        assert held(one["load"], "weights") == held(many["load"], "weights")
        assert held(many["step"], "communication") == held(many["step"], "gradients") + held(
            one["step"], "communication"
        )
    s = parse(JOB | {"gpus": 4, "device_map_gpus": 2, "sharding": "ddp", **fields})
    assert (s.data_parallel, s.shards, s.parts, s.communicators) == (2, 2, 2, 1)
    assert [group.gpus for group in estimate(s, replays=False).groups] == [2, 2]


def test_a_gpu_without_layers_has_the_context_of_the_process_alone() -> None:
    """Accelerate 1.10.0 `get_max_memory` starts CUDA on every GPU; MiniCPM-V 4.5 leaves the last of eight empty."""
    s = parse(JOB | {"model": "minicpm-v-4.5", "method": "full", "gpus": 8, "device_map": "auto"})
    *_, last, empty = estimate(s).groups
    assert (s.parts, last.name, empty.name, empty.gpus) == (7, "stage 7", "no layers", 1)
    assert [(p.name, {line.component for line in p.moment.lines}) for p in empty.phases] == [
        ("load", {"context", "temporary"})
    ]


def test_more_gpus_never_need_more_on_any() -> None:
    peaks = []
    for gpus in (1, 2, 4, 8):
        found = estimate(parse(JOB | {"gpus": gpus, **({"device_map": "auto"} if gpus > 1 else {})}), replays=False)
        peaks.append(max(p.moment.allocated_bytes for group in found.groups for p in group.phases))
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"sharding": "fsdp2"}, "auto with sharding fsdp2"),
        ({"method": "qlora"}, "auto with method qlora"),
        ({"task": "dpo"}, "auto with task dpo"),
        ({"model": "llama-3.2-1b"}, "a model whose head is its embedding"),
        ({"gpus": 16, "gpus_per_node": 8}, "auto with 16 GPUs"),
        ({"trainer": "axolotl"}, "auto with trainer axolotl"),
        ({"gpus": 4, "device_map_gpus": 2, "sharding": "ddp"}, "auto with trainer transformers"),
        ({"gpus": 4, "device_map_gpus": 2, "trainer": "ms-swift", "sharding": "zero2"}, "auto with sharding zero2"),
    ],
)
def test_layers_are_spread_only_where_that_is_modelled(fields: dict[str, object], given: str) -> None:
    with pytest.raises(ScenarioError, match="device_map: given") as error:
        parse(JOB | {"gpus": 2, "device_map": "auto", "sharding": "none"} | fields)
    assert given in str(error.value)


@pytest.mark.parametrize("fields", [{"gpus": 4, "device_map": "none"}, {"gpus": 5, "device_map": "auto"}])
def test_processes_have_as_many_gpus_each(fields: dict[str, object]) -> None:
    with pytest.raises(ScenarioError, match="device_map_gpus: given 2 with device_map"):
        parse(JOB | {"device_map_gpus": 2, "trainer": "ms-swift", "sharding": "ddp"} | fields)


def test_a_first_gpu_has_room_for_the_whole_tower() -> None:
    """Eight GPUs of an InternVL whose tower of 5.5 billion weights is a fifth of it."""
    images = {"count": 1, "width": 448, "height": 448, "freeze": "vision"}
    with pytest.raises(ScenarioError, match="device_map: given 'auto', allowed: GPUs of which the first holds"):
        parse(JOB | {"model": "internvl2.5-26b", "gpus": 8, "device_map": "auto", "images": images})
