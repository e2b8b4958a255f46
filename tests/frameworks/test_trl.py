"""TRL 1.16: defaults, refusals, and what its trainers keep, each read in the package."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import job

from calc.base.plan import DeepSpeed, Path, Role, Serving, Stage
from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.frameworks.trl import trl
from calc.launch import launch
from calc.launch.shell import LaunchError
from calc.scenario.scenario import Scenario, ScenarioError

TILED = Path("tiled", tile=4096)
HALF = Path("tiled", kept=0.5, tile=4096)  # 512 of 1024 tokens are the completion's
COLOCATED = {"rollout__engine": "vllm", "gpus": 8}


def run(**fields: Any) -> Scenario:
    """A TRL job."""
    return job(**{"framework": "trl"} | fields)


def grpo(**fields: Any) -> Scenario:
    """A GRPO job."""
    return run(task="grpo", **fields)


# --- defaults ---


@pytest.mark.parametrize("task", ["sft", "rm", "dpo"])
def test_supervised_trainers_take_1024_tokens_in_batches_of_8_and_recompute(task: str) -> None:
    """max_length 1024 in each configuration; gradient_checkpointing is true for all trainers."""
    s = run(task=task, gpus=4)
    assert (s.seq_len, s.micro_batch, s.global_batch, s.checkpointing) == (1024, 8, 32, "full")
    assert s.loss == ("full" if task == "rm" else "fused")


@pytest.mark.parametrize(
    ("fields", "precision", "sharding", "grad_dtype"),
    [
        ({}, "autocast", "none", "fp32"),
        ({"gpus": 2}, "autocast", "ddp", "fp32"),
        ({"gpus": 2, "sharding": "zero2"}, "mixed", "zero2", "bf16"),
        ({"gpus": 2, "sharding": "fsdp2"}, "fsdp-mixed", "fsdp2", "fp32"),
        ({"precision": "bf16"}, "bf16", "none", "bf16"),  # model_init_kwargs dtype bfloat16
    ],
)
def test_models_load_in_fp32_and_train_under_autocast(
    fields: dict[str, Any], precision: str, sharding: str, grad_dtype: str
) -> None:
    """`create_model_from_path` has dtype float32, bf16 is true: DeepSpeed and FSDP keep fp32 in ways of their own."""
    s = run(**fields)
    assert (s.precision, s.sharding, s.grad_dtype, s.optimizer_impl) == (precision, sharding, grad_dtype, "fused")


def test_kto_is_dpo_of_single_sequences() -> None:
    """A pair is two sequences; the reference is scored inside, or is the policy without its adapters."""
    kto, dpo = run(task="kto", micro_batch=2), run(task="dpo", micro_batch=1)
    assert kto.rows == dpo.rows == 2
    assert kto.keeps == dpo.keeps
    assert run(task="kto", method="lora").keeps.role("reference").shares


@pytest.mark.parametrize("task", ["orpo", "simpo"])
def test_orpo_and_simpo_have_whole_logits_and_the_chosen_half_in_a_cross_entropy(task: str) -> None:
    """experimental/orpo/orpo_trainer.py:777-800, experimental/cpo/cpo_trainer.py:824-850; Accelerate's are fp32."""
    [role] = run(task=task, micro_batch=2).keeps.roles
    assert (role.path.kind, role.path.head_fp32, role.path.nll, role.path.shift_copy) == ("flash", True, 0.5, True)
    assert role.rows == 4
    assert not role.dropout
    [narrow] = run(task=task, micro_batch=1, gpus=8, sharding="zero3").keeps.roles
    assert (narrow.path.head_fp32, narrow.path.shift_copy) == (False, False)
    with pytest.raises(LaunchError, match=r"a class of trl\.experimental"):
        launch(run(task=task))


def test_gkd_has_a_teacher_beside_the_student() -> None:
    """experimental/gkd/gkd_trainer.py:176-195: the checkpoint's own type, and `prepare_model` for evaluation."""
    s = run(task="gkd", gpus=8, sharding="fsdp2", roles={"teacher": {"model": "llama-3.1-70b"}})
    teacher = s.role("teacher")
    assert teacher
    assert (teacher.model, teacher.precision, teacher.sharding) == ("llama-3.1-70b", "bf16", "ddp")
    student, other = s.keeps.roles
    assert (student.path.kind, student.path.held, other.scoring.kind) == ("divergence", "inside", "flash")
    assert [stage.does for stage in s.keeps.stages] == ["generate", "train"]  # lmbda 0.5
    sharded = run(task="gkd", gpus=8, sharding="zero3")
    assert sharded.keeps.stages[0].holds == ("whole",)
    assert [stage.does for stage in run(task="gkd", on_policy=0).keeps.stages] == ["train"]
    with pytest.raises(ScenarioError, match=r"roles\.teacher\.model: given 'qwen2\.5-7b' with a vocabulary of 152,064"):
        run(task="gkd", roles={"teacher": {"model": "qwen2.5-7b"}})
    with pytest.raises(LaunchError, match=r"a class of trl\.experimental"):
        launch(run(task="gkd"))


def test_checkpointing_is_reentrant_for_adapters_under_zero_3_alone() -> None:
    """trainer/sft_trainer.py:872-895 of 1.16.0: "PEFT + DeepSpeed ZeRO-3 requires reentrant checkpointing"."""
    assert run(gpus=8, sharding="zero3", method="lora").reentrant
    assert not run(gpus=8, sharding="zero3").reentrant
    assert not run(gpus=8, sharding="zero2", method="lora").reentrant


def test_grpo_generates_with_transformers_and_has_no_reference() -> None:
    """use_vllm false, beta 0.0, 8 completions of 512 tokens for each prompt, functions in place of a reward model."""
    s = grpo(gpus=4)
    assert s.rollout
    assert (s.rollout.engine, s.rollout.n, s.rollout.batch, s.rollout.sleep) == ("hf", 8, 4, False)
    assert (s.prompt_len, s.response_len, s.micro_batch, s.global_batch) == (512, 512, 8, 32)
    assert s.has("actor") and not s.has("reference") and not s.has("reward")


@pytest.mark.parametrize(
    ("fields", "global_batch", "prompts"),
    [
        ({"micro_batch": 1}, 8, 1),  # 1 completion a step: 8 steps make the group of 8
        ({"micro_batch": 2, "gpus": 2}, 8, 1),
        ({"micro_batch": 6}, 24, 3),
        ({"micro_batch": 8, "rollout__n": 16}, 16, 1),
        ({"micro_batch": 4, "global_batch": 64}, 64, 8),
    ],
)
def test_a_generation_batch_is_one_steps_completions_in_whole_groups(
    fields: dict[str, Any], global_batch: int, prompts: int
) -> None:
    """steps_per_generation is gradient_accumulation_steps; num_generations must divide the generation batch."""
    s = grpo(**fields)
    assert s.rollout
    assert (s.global_batch, s.rollout.batch) == (global_batch, prompts)


def test_vllm_takes_30_percent_beside_the_trainer_and_90_as_a_server() -> None:
    """vllm_gpu_memory_utilization 0.3; `trl vllm-serve` has 0.9."""
    beside, server = grpo(**COLOCATED), grpo(gpus=8, placement="separate", rollout__gpus=4)
    assert beside.rollout and server.rollout
    assert beside.rollout.gpu_memory_utilization == 0.3
    assert (server.rollout.engine, server.rollout.gpu_memory_utilization) == ("vllm", 0.9)
    assert server.global_batch == 8 * 4


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, "fp32"),
        ({"gpus": 2, "sharding": "zero2"}, "bf16"),
        ({"gpus": 2, "sharding": "zero3"}, "bf16"),
        ({"method": "qlora"}, "bf16"),
    ],
)
def test_adapters_are_fp32_unless_deepspeed_or_a_4_bit_base_makes_them_bf16(fields: dict[str, Any], dtype: str) -> None:
    """autocast_adapter_dtype is switched off under ZeRO-3, and QLoRA's adapters are cast after they are made."""
    s = run(**{"method": "lora"} | fields)
    assert s.lora
    assert (s.lora.dtype, s.lora.rank, s.lora.dropout) == (dtype, 16, 0.05)


# --- refusals ---

REFUSED = {
    "PPO": {"task": "ppo"},
    "REINFORCE++": {"task": "reinforce++"},
    "pretraining": {"task": "pretrain"},
    "logits of all tokens": {"loss": "full"},
    "log-probabilities row by row": {"task": "dpo", "logprob": "selective"},
    "selective checkpointing": {"checkpointing": "selective"},
    "packed pairs": {"task": "dpo", "packing": True},
    "fp32 master weights without DeepSpeed": {"precision": "mixed"},
    "autocast under DeepSpeed": {"gpus": 2, "sharding": "zero2", "precision": "autocast"},
    "autocast under FSDP": {"gpus": 2, "sharding": "fsdp2", "precision": "autocast"},
    "sharded fp32 without FSDP": {"precision": "fsdp-mixed"},
    "offloaded parameters below ZeRO-3": {"gpus": 2, "sharding": "zero2", "offload__parameters": True},
    "an offloaded optimizer without shards": {"offload__optimizer": True},
    "4-bit weights under ZeRO-3": {"gpus": 2, "sharding": "zero3", "method": "qlora", "checkpointing": "none"},
    "an adapter on the head": {"method": "lora", "lora__targets": ["q_proj", "lm_head"]},
    "a policy of cut sequences": {"task": "grpo", "gpus": 4, "roles": {"actor": {"context_parallel": 2}}},
    "a policy of cut layers": {"task": "grpo", "gpus": 4, "roles": {"actor": {"tensor_parallel": 2}}},
    "a reward model without a class that scores": {"task": "rm", "model": "granite-4-h-micro"},
    "no rollout": {"task": "grpo", "rollout__engine": "none"},
    "one completion a prompt": {"task": "grpo", "rollout__n": 1},
    "completions that fill no step": {"task": "grpo", "gpus": 4, "rollout__batch": 3},
    "another reference": {"task": "grpo", "roles": {"reference": {"model": "llama-3.2-1b"}}},
    "a policy that does not train": {"task": "grpo", "roles": {"actor": "none"}},
    "a trainer apart from its own generation": {"task": "grpo", "gpus": 2, "placement": "separate",
                                                "rollout__engine": "hf", "roles": {"actor": {"gpus": 2}}},
    "a reference with GPUs of its own": {"task": "grpo", "gpus": 4, "placement": "separate", "rollout__gpus": 1,
                                         "roles": {"actor": {"gpus": 2}, "reference": {"gpus": 1}}},
}  # fmt: skip


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_is_refused_in_one_line(fields: dict[str, Any]) -> None:
    """The line names the field, what was given and what is allowed."""
    with pytest.raises(ScenarioError) as caught:
        run(**fields)
    line = str(caught.value)
    assert line.isprintable()
    assert "given" in line and "allowed" in line


@pytest.mark.parametrize("task", ["ppo", "reinforce++"])
def test_the_tasks_that_are_gone_are_named(task: str) -> None:
    """Neither `trl.trainer` nor `trl.experimental` has a PPOTrainer."""
    with pytest.raises(ScenarioError, match=r"allowed with trl 1\.16\.0: sft, rm, dpo, kto, orpo, simpo, gkd, grpo"):
        run(task=task)


ACCEPTED = {
    "bf16 weights under FSDP": {"gpus": 2, "sharding": "fsdp2", "precision": "bf16"},
    "packing for sft": {"packing": True},
    "two rollouts' worth of steps": {"task": "grpo", "gpus": 4, "rollout__batch": 8},
    "a reference of the policy's own": {"task": "grpo", "roles": {"reference": {}}},
}


@pytest.mark.parametrize("fields", ACCEPTED.values(), ids=ACCEPTED)
def test_what_the_release_runs_is_not_refused(fields: dict[str, Any]) -> None:
    """The other side of the refusals."""
    assert trl.refuse(run(**fields)) is None


# --- what is kept ---


def test_every_loss_but_the_reward_models_is_tiled() -> None:
    """`add_fused_lm_head` in sft, dpo and grpo; outputs are vectors, so nothing is held."""
    assert trl.keeps(run(task="sft")).roles[0].path == TILED
    scalar, trained = Path("scalar"), {"wrapped": True, "wide_embeddings": True}
    assert trl.keeps(run(task="rm")).roles == (Role("reward", scalar, scalar, 16, 16, dropout=False, **trained),)
    assert trl.keeps(run(task="dpo")).roles == (
        Role("actor", TILED, TILED, 16, 16, dropout=False, **trained),
        Role("reference", TILED, TILED, 16, 16, wrapped=True, unfrozen=True),
    )
    assert trl.keeps(grpo()).roles == (Role("actor", HALF, HALF, 8, 8, **trained),)


def test_a_tile_is_no_larger_than_the_tokens_that_are_scored() -> None:
    """Two rows of 1,024 tokens, each but its first; four completions of 128."""
    assert trl.keeps(run(task="sft", micro_batch=2)).roles[0].path.tile == 2 * 1023
    assert trl.keeps(grpo(micro_batch=4, response_len=128)).roles[0].path.tile == 4 * 128


def test_four_bits_come_back_in_the_type_that_was_loaded() -> None:
    """`bnb_4bit_compute_dtype` is dtype (trainer/utils.py:265), float32 unless it is given; autocast adds its copy."""
    for fields, unpacks in (({}, 6), ({"precision": "bf16"}, 0), ({"method": "lora"}, 0)):
        assert trl.keeps(run(**{"method": "qlora"} | fields)).roles[0].unpacks == unpacks
    assert [role.unpacks for role in trl.keeps(run(method="qlora", task="dpo")).roles] == [6, 6]


def test_adapters_beside_four_bits_and_their_states_are_bf16() -> None:
    """`param.data.to(torch.bfloat16)` (trainer/sft_trainer.py:911): 2 bytes, and AdamW's moments 2 each."""
    (group,) = estimate(run(method="qlora", model="llama-3-8b", lora__rank=16)).groups
    (step,) = (phase.moment for phase in group.phases if phase.name == "step")
    found = {line.component: line.bytes for line in step.lines}
    assert (found["adapter"], found["optimizer_states"]) == (2 * 41_943_040, 4 * 41_943_040)


def test_trainers_of_pairs_disable_dropout() -> None:
    """`disable_dropout` is true for them (reward_config.py:128, dpo_config.py:185), false for GRPO; SFT has none."""
    given = {"method": "lora", "model": "llama-3.2-1b"}
    found = {task: run(task=task, **given) for task in ("sft", "rm", "dpo", "grpo")}
    assert {task: s.lora.dropout for task, s in found.items()} == {"sft": 0.05, "rm": 0, "dpo": 0, "grpo": 0.05}
    dropout = {task: trl.keeps(s).roles[0].dropout for task, s in found.items()}
    assert dropout == {"sft": True, "rm": False, "dpo": False, "grpo": True}


def test_a_peft_policy_is_its_own_reference() -> None:
    """`use_adapter` switches it off; no second model loads. dpo takes another model where one is passed."""
    for task in ("dpo", "grpo"):
        made = trl.keeps(run(task=task, method="lora", roles={"reference": {}}))
        assert made.role("reference").shares
        assert made.loading == ("actor",)
    other = trl.keeps(run(task="dpo", method="lora", roles={"reference": {"model": "llama-3.2-1b"}}))
    assert not other.role("reference").shares
    assert len(trl.keeps(run(task="dpo", roles={"reference": "none"})).roles) == 1


@pytest.mark.parametrize(("sharding", "held"), [("zero3", ("whole",)), ("zero2", ()), ("fsdp2", ()), ("ddp", ())])
def test_generation_takes_the_whole_generation_batch_at_once(sharding: str, held: tuple[str, ...]) -> None:
    """32 prompts of 8 on 8 GPUs: 32 rows; ds3_gather_for_generation gathers every weight."""
    stages = trl.keeps(grpo(gpus=8, sharding=sharding, rollout__batch=32)).stages
    assert stages[0] == Stage("generate", "actor", rows=32, holds=held)
    assert [stage.does for stage in stages] == ["generate", "train", "save"]


def test_with_vllm_the_policy_scores_its_own_completions_too() -> None:
    """The importance-sampling correction; the engine arrives after the policy, before reference and reward model."""
    made = trl.keeps(grpo(roles={"reference": {}, "reward": {"model": "llama-3.2-1b"}}, rollout__batch=32, **COLOCATED))
    assert [(stage.does, stage.role) for stage in made.stages] == [
        ("sync", "actor"), ("serve", "rollout"), ("score", "reward"), ("score", "actor"), ("score", "reference"),
        ("train", "actor"), ("save", "actor"),
    ]  # fmt: skip
    assert made.loading == ("actor", "rollout", "reference", "reward")
    assert made.role("reward").scoring_rows == 32  # of one forward
    assert made.role("reference").scoring_rows == 8


def test_vllm_shares_the_trainers_process_and_gets_no_length() -> None:
    """The model's 8192 tokens; batch x TP x steps_per_generation sequences, 4096 tokens a batch, sleep level 2."""
    made = trl.keeps(grpo(rollout__tensor_parallel=2, rollout__batch=32, **COLOCATED))
    assert made.serving == Serving("0.31.0", 8192, 64, 4096, sleep_level=2, process="trainer")
    server = trl.keeps(grpo(gpus=8, placement="separate", rollout__gpus=4))
    assert server.serving == Serving("0.31.0", 8192)


@pytest.mark.parametrize(
    ("fields", "held"),
    [
        ({"sharding": "ddp"}, ()),
        ({"sharding": "zero3"}, ("parameter",)),
        ({"sharding": "zero3", "method": "lora"}, ("whole",)),  # gathered to be merged
        ({"sharding": "fsdp1"}, ("units",)),
        ({"sharding": "fsdp2", "method": "lora"}, ("parameter",)),
    ],
)
def test_weights_go_to_vllm_parameter_by_parameter(fields: dict[str, Any], held: tuple[str, ...]) -> None:
    """`_iter_named_params`; of a sleeping engine only the weights are awake."""
    sync = trl.keeps(grpo(**COLOCATED, **fields)).stages[0]
    assert (sync.does, sync.engine, sync.holds) == ("sync", "weights", held)


@pytest.mark.parametrize(
    ("sharding", "host", "host_bytes"), [("ddp", "first", 4), ("zero2", "every", 2), ("zero3", "first", 2)]
)
def test_a_checkpoint_is_gathered_on_the_first_rank_but_below_zero_3(sharding: str, host: str, host_bytes: int) -> None:
    """accelerate's `get_state_dict` clones the module's state dict on every rank below stage 3."""
    save = trl.keeps(grpo(gpus=8, sharding=sharding)).stages[-1]
    assert (save.does, save.host, save.host_bytes) == ("save", host, host_bytes)


def test_deepspeed_runs_with_its_own_defaults() -> None:
    """The package's `accelerate_configs/zero*.yaml` name no bucket size, and nothing says "auto"."""
    assert trl.keeps(run(gpus=2, sharding="zero3")).deepspeed == DeepSpeed("0.19.8")
    assert trl.keeps(run(gpus=2)).deepspeed is None


def test_only_fsdp1_leaves_the_root_gathered_after_a_forward() -> None:
    """PyTorch's FSDP does not free the root's parameters there; Accelerate tells FSDP2 to reshard it too."""
    for sharding, stays in (("fsdp1", True), ("fsdp2", False)):
        made = trl.keeps(run(task="dpo", gpus=2, sharding=sharding))
        assert made.role("reference").root_stays is stays


def test_a_reward_model_is_whole_in_bf16_unless_deepspeed_shards_it() -> None:
    """`accelerator.prepare_model(evaluation_mode=True)` moves it; `prepare_deepspeed` shards it under stage 3."""
    for sharding, expected in (("fsdp2", ("bf16", "ddp")), ("zero3", ("mixed", "zero3"))):
        reward = grpo(gpus=8, sharding=sharding, roles={"reward": {"model": "llama-3.2-1b"}}).role("reward")
        assert reward
        assert (reward.precision, reward.sharding) == expected


@pytest.mark.parametrize("task", trl.TASKS)
def test_every_task_is_answered(task: str) -> None:
    """GRPO with vLLM as well: a phase for each stage."""
    fields = COLOCATED if task == "grpo" else {"gpus": 8}
    phases = {phase.name for phase in estimate(run(task=task, sharding="zero3", **fields), load()).groups[0].phases}
    expected = {"load", "forward", "backward", "step"}
    more = {"grpo": {"rollout", "score", "sync", "save"}, "gkd": {"rollout"}}
    assert phases == expected | more.get(task, set())


@pytest.mark.parametrize(("sharding", "once"), [("fsdp1", True), ("fsdp2", True), ("zero3", False), ("ddp", False)])
def test_transformers_trainer_reduces_fsdps_gradients_once_a_step(sharding: str, once: bool) -> None:
    """transformers 5.23 trainer.py:1896: `accelerator.no_sync` for all micro-batches but the last, DeepSpeed apart."""
    for task in ("sft", "rm", "dpo", "grpo"):
        assert job(task=task, framework="trl", gpus=8, sharding=sharding).no_sync is once


def test_a_scoring_micro_batch_of_its_own_is_refused() -> None:
    """grpo_trainer.py scores by per_device_train_batch_size."""
    with pytest.raises(ScenarioError, match=r"rollout\.micro_batch: given 4, allowed with trl 1\.16\.0: null"):
        job(task="grpo", framework="trl", gpus=8, rollout={"micro_batch": 4})
