"""EasyR1, verl's fork: defaults by release, what it shares with verl and what not, as read at its tags."""

from __future__ import annotations

from typing import Any

import pytest

from calc.base.plan import Keeps, Path
from calc.catalog.catalog import load
from calc.diagnose.reading import read
from calc.estimate.estimate import estimate
from calc.frameworks.verl import easyr1, verl
from calc.launch import LaunchError, launch
from calc.launch.easyr1 import keys
from calc.models.architecture import parameters
from calc.resolve.parse import parse
from calc.scenario.rules import flatten
from calc.scenario.scenario import Scenario, ScenarioError

NEWEST = easyr1.KNOWN[-1]
# The keys of `examples/config.yaml` and of the dataclasses that it fills (verl/trainer/config.py, workers/*/config.py)
# at v0.3.2, of those that a command may name.
TRAINED = {
    "model.model_path", "model.enable_gradient_checkpointing", "model.freeze_vision_tower", "padding_free",
    "ulysses_size", "global_batch_size", "micro_batch_size_per_device_for_update",
    "micro_batch_size_per_device_for_experience", "fsdp.torch_dtype", "optim.strategy", "offload.offload_params",
    "offload.offload_optimizer",
}  # fmt: skip
KEYS = {
    "config", "trainer.nnodes", "trainer.n_gpus_per_node", "trainer.logger", "data.train_files", "data.val_files",
    "data.max_prompt_length", "data.max_response_length", "data.rollout_batch_size", "data.min_pixels",
    "data.max_pixels", "algorithm.adv_estimator", "algorithm.disable_kl", "worker.ref.fsdp.enable_cpu_offload",
    "worker.rollout.n", "worker.rollout.tensor_parallel_size", "worker.rollout.gpu_memory_utilization",
    "worker.rollout.enforce_eager",
    "worker.rollout.max_num_batched_tokens",
    *(f"worker.{role}.{key}" for role in ("actor", "critic") for key in TRAINED),
}  # fmt: skip
PURE = {"precision": "bf16", "optimizer": "adamw-bf16"}


def run(version: str = NEWEST, **fields: Any) -> Scenario:
    """GRPO of Qwen2.5-7B on 8 H100."""
    return parse(
        {"model": "qwen2.5-7b", "task": "grpo", "gpu": "h100-sxm", "gpus": 8, "framework": f"verl=={version}", **fields}
    )


def kept(version: str = NEWEST, **fields: Any) -> Keeps:
    """EasyR1's plan for `run(version, **fields)`."""
    return verl.keeps(run(version, **fields))


@pytest.mark.parametrize(
    ("asked", "known"),
    [("easyr1", NEWEST), ("easyr1-0.3", NEWEST), ("easyr1-0.3.0", "easyr1-0.3.0"), ("easyr1-0.3.1", "easyr1-0.3.1")],
)
def test_a_version_is_a_release_of_the_fork(asked: str, known: str) -> None:
    assert verl.nearest(asked) == known
    assert verl.KNOWN[-1] == "0.9.1"  # what counts where no version is named


@pytest.mark.parametrize(
    ("version", "vllm", "micro_batch", "scoring"),
    [("easyr1-0.3.0", "0.8.3", 4, 16), ("easyr1-0.3.1", "0.9.1", 4, 16), ("easyr1-0.3.2", "0.10.0", 1, 2)],
)
def test_defaults_are_those_of_its_example_configuration(
    version: str, vllm: str, micro_batch: int, scoring: int
) -> None:
    """examples/config.yaml and Dockerfile of each tag; the mini batch of 128 prompts has 5 responses each."""
    s = run(version)
    assert s.rollout
    assert (s.versions["vllm"], s.micro_batch, s.rollout.micro_batch) == (vllm, micro_batch, scoring)
    assert (s.prompt_len, s.response_len, s.global_batch) == (2048, 2048, 128 * 5)
    assert (s.rollout.batch, s.rollout.n, s.rollout.tensor_parallel) == (512, 5, 2)
    assert (s.rollout.gpu_memory_utilization, s.rollout.max_num_batched_tokens) == (0.6, 8192)
    assert (s.offload.parameters, s.offload.optimizer, s.packing, s.optimizer_impl) == (True, True, True, "fused")
    reference = s.role("reference")
    assert reference
    assert (reference.precision, reference.micro_batch, reference.offload.parameters) == ("bf16", scoring, True)


def test_images_are_enlarged_to_its_least_pixels() -> None:
    """data.min_pixels 262144 and data.max_pixels 4194304, in place of the processor's own bounds."""
    images = run(model="qwen2.5-vl-7b", images={"width": 100, "height": 100}).images
    assert images
    assert (images.min_pixels, images.max_pixels) == (262144, 4194304)


def test_no_entropy_is_computed_when_the_actor_scores() -> None:
    """dp_actor.py divides the logits in place, then flash-attn's cross entropy with inplace_backward; no entropy in
    either forward, where verl 0.4 takes one over all logits in scoring."""
    actor = kept().role("actor")
    path = Path("flash", scaled="view", in_place=True)
    assert (actor.path, actor.scoring) == (path, path)
    shared = verl.keeps(run("0.4.0", packing=True)).role("actor")
    assert (shared.path.entropy, shared.scoring.entropy) == ("", "compiled")
    assert not actor.root_stays  # `_handle.reshard(True)` (fsdp_workers.py:597 of 0.3.2)


def test_vllm_lives_in_the_trainer_keeps_its_weights_and_captures_graphs() -> None:
    """sleep(level=1), enforce_eager: false, the external launcher (vllm_rollout_spmd.py)."""
    serving = kept().serving
    assert serving
    assert (serving.sleep_level, serving.graphs, serving.process) == (1, True, "trainer")


@pytest.mark.parametrize(
    ("version", "before"), [("easyr1-0.3.0", "asleep"), ("easyr1-0.3.1", "weights"), (NEWEST, "weights")]
)
def test_from_0_3_1_on_vllms_weights_wake_before_the_state_dict(version: str, before: str) -> None:
    """fsdp_vllm.py:76-80 of 0.3.0, :124-129 of 0.3.1."""
    syncs = [(stage.engine, stage.holds) for stage in kept(version).stages if stage.does == "sync"]
    assert syncs == [(before, ("units", "copies")), ("weights", ("copies", "parameter"))]


def test_bf16_shards_have_gradients_of_their_type_and_three_states() -> None:
    """fsdp.torch_dtype bf16 with optim.strategy adamw_bf16: gradients are reduced in fp32 and cast, and each parameter
    has two moments and what the Kahan summation is behind, 2 bytes each (torch_functional.py, AnyPrecisionAdamW)."""
    s = run(**PURE)
    assert (s.grad_dtype, s.optimizer_impl) == ("bf16", "single")
    assert kept(**PURE).role("actor").reduce_bytes == 4
    step = next(phase for phase in estimate(s).groups[0].phases if phase.name == "step").moment
    states = sum(line.bytes for line in step.lines if line.component == "optimizer_states")
    weights = sum(line.bytes for line in step.lines if line.component == "weights" and line.role == "actor")
    share = parameters(s.architecture) / 8
    assert states == pytest.approx(3 * 2 * share, rel=1e-3)
    assert weights == pytest.approx(2 * share, rel=1e-3)


def test_it_needs_less_than_with_fp32_shards() -> None:
    assert estimate(run(**PURE)).groups[0].peak.moment.device_bytes <= (
        estimate(run()).groups[0].peak.moment.device_bytes
    )


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"method": "lora"}, "method"),
        ({"sharding": "fsdp2"}, "sharding"),
        ({"task": "sft"}, "task"),
        ({"optimizer": "adamw-bf16"}, "optimizer"),
        ({"precision": "bf16", "optimizer": "lion"}, "optimizer"),
        ({"optimizer_impl": "foreach"}, "optimizer_impl"),
        ({"prompt_len": 8192}, "rollout.max_num_batched_tokens"),
        ({"entropy_coeff": 0.01}, "entropy_coeff"),
        ({"roles": {"reward": {}}}, "roles.reward"),
    ],
)
def test_what_it_cannot_run_is_refused_by_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ScenarioError, match=rf"^scenario: {field}: given .*allowed"):
        run(**fields)


@pytest.mark.parametrize(("given", "told"), [("EasyR1", "verl==easyr1"), ("easyr1==0.3.0", "verl==easyr1-0.3.0")])
def test_its_name_as_a_framework_is_the_fork(given: str, told: str) -> None:
    asked = {"model": "qwen2.5-7b", "task": "grpo", "gpu": "h100-sxm"}
    assert parse(asked | {"framework": given}) == parse(asked | {"framework": told})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"model": "qwen2.5-vl-7b", "images": {"width": 512, "height": 512, "freeze": "vision"}},
        {**PURE, "roles": {"reference": "none"}},
        {"task": "ppo", "rollout": {"tensor_parallel": 4}},
        {"task": "reinforce++", "roles": {"reference": {"offload.parameters": False}}, "offload.optimizer": False},
    ],
)
def test_a_command_names_keys_of_the_release_and_is_read_back(fields: dict[str, Any]) -> None:
    s = run(**fields)
    names = {word.strip("'").partition("=")[0] for [word] in keys(s)}
    assert names <= KEYS
    assert len(names) == len(list(keys(s)))
    said = flatten(s.as_dict())
    back = read(launch(s).command, load())
    assert not back.unread
    for place, value in back.fields.items():
        if place in ("roles.reference", "framework"):
            continue
        name, _, leaf = place.removeprefix("roles.").partition(".")
        role = s.role(name) if place.startswith("roles.") else None
        assert value == (flatten(role.as_dict())[leaf] if role else said[place]), place


def test_older_releases_have_other_keys_and_no_command() -> None:
    with pytest.raises(LaunchError, match=r"allowed: verl==easyr1-0\.3\.2"):
        launch(run("easyr1-0.3.0"))
