"""TRL: defaults, refusals, and what its trainers keep, each read in the package: 1.16, and releases before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from jobs import job

from calc.base.plan import DeepSpeed, Path, Role, Serving, Stage
from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.frameworks.trl import trl
from calc.launch import launch
from calc.launch.shell import LaunchError
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario, ScenarioError
from calc.step.roles import Roles

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
    # `logits[:, prompt_lengths - 1 : -1, :]` of trl 0.24 trainer/gkd_trainer.py:370: a quarter is answers
    student, _ = run(task="gkd", lengths={"mean": 800, "longest": 800, "prompt": 600}).keeps.roles
    assert (student.path.kept, student.path.picked, student.path.copied) == (0.25, False, False)
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


@pytest.mark.parametrize(
    ("task", "version", "precision", "adapters"),
    [
        ("sft", "0.24.0", "bf16", "fp32"),  # models/utils.py:538 and :561
        ("sft", "0.26.0", "autocast", "bf16"),  # trainer/sft_trainer.py:718
        ("sft", "0.18.0", "fp32", "fp32"),  # bf16 is off
        ("rm", "0.20.0", "autocast", "fp32"),  # reward_trainer.py:165: nothing goes back to bf16
        ("rm", "0.22.0", "bf16", "fp32"),
        ("dpo", "0.27.0", "bf16", "fp32"),  # dpo_trainer.py:602 and :610
        ("dpo", "0.29.0", "autocast", "bf16"),
        ("orpo", "1.6.0", "bf16", "fp32"),  # experimental/orpo/orpo_trainer.py:231
    ],
)
def test_older_trainers_prepare_four_bits_with_peft(task: str, version: str, precision: str, adapters: str) -> None:
    """Embedding and head end in bf16, and nothing casts the adapters."""
    s = run(task=task, framework=f"trl=={version}", method="qlora")
    assert s.lora
    assert (s.precision, s.lora.dtype) == (precision, adapters)


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
    """Neither `trl.trainer` nor `trl.experimental` has a PPOTrainer since 1.13."""
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
    scalar, trained = Path("scalar"), {"wrapped": True, "by_trainer": True, "adapts_first": True}
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
    """`use_adapter` switches it off; no second model loads. dpo takes another model where one is passed, be it a copy
    of the policy's own (0.12.2 `trainer/dpo_trainer.py:457`, with `force_use_ref_model`).
    """
    for task in ("dpo", "grpo"):
        made = trl.keeps(run(task=task, method="lora", roles={"reference": {}}))
        assert made.role("reference").shares
        assert made.loading == ("actor",)
    for own in ({"model": "llama-3.2-1b"}, {"method": "full"}):
        other = trl.keeps(run(task="dpo", method="lora", roles={"reference": own}))
        assert not other.role("reference").shares
        assert other.loading == ("actor", "reference")
    with pytest.raises(ScenarioError, match="allowed with trl for grpo: none, it has the policy's"):
        run(task="grpo", method="lora", roles={"reference": {"method": "full"}})
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


@pytest.mark.parametrize("task", trl.tasks(trl.KNOWN[-1]))
def test_every_task_is_answered(task: str) -> None:
    """GRPO with vLLM as well: a phase for each stage."""
    fields = COLOCATED if task == "grpo" else {"gpus": 8}
    phases = {phase.name for phase in estimate(run(task=task, sharding="zero3", **fields), load()).groups[0].phases}
    expected = {"load", "forward", "backward", "step"}
    more = {"grpo": {"rollout", "score", "sync", "save"}, "gkd": {"rollout"}}
    assert phases == expected | more.get(task, set())


# --- releases before 1.16 ---

EVERY = [(version, task) for version in trl.KNOWN[:-1] for task in trl.tasks(version)]


@pytest.mark.parametrize(("version", "task"), EVERY)
def test_every_task_of_every_release_is_answered(version: str, task: str) -> None:
    """Whole on a GPU, and under DeepSpeed and FSDP."""
    for fields in ({}, {"gpus": 4, "sharding": "zero3"}, {"gpus": 4, "sharding": "fsdp2"}):
        s = run(framework=f"trl=={version}", task=task, **fields)
        assert s.framework_version == version
        assert all(group.phases for group in estimate(s, load()).groups)


@pytest.mark.parametrize(
    ("asked", "known"),
    [("0.12.2", "0.12.0"), ("0.9", "0.9.6"), ("0.21", "0.20.0"), ("1.5.3", "1.0.0"), ("0.7", "0.7.11")],
)
def test_a_release_in_between_is_the_one_before_it(asked: str, known: str) -> None:
    assert run(framework=f"trl=={asked}").framework_version == known


@pytest.mark.parametrize(
    ("task", "version", "line"),
    [
        ("kto", "0.7.11", r"allowed with trl 0\.7\.11: sft, rm, dpo; its trainer came with 0\.8\.0"),
        ("grpo", "0.13.0", r"its trainer came with 0\.14\.0"),
        ("ppo", "0.9.6", r"its trainer came with 0\.12\.0"),
        ("ppo", "1.14.0", r"its trainer went with 1\.13\.0"),
    ],
)
def test_a_task_that_a_release_has_no_trainer_for_is_refused_with_those_that_have(
    task: str, version: str, line: str
) -> None:
    with pytest.raises(ScenarioError, match=line):
        run(task=task, framework=f"trl=={version}")


BEFORE = {
    "vLLM beside the trainer before 0.18": (
        {"framework": "trl==0.17.0", "task": "grpo", **COLOCATED}, r"allowed with trl 0\.17\.0: hf, or vllm with"
    ),
    "two GPUs for vLLM before 0.16": (
        {"framework": "trl==0.15.2", "task": "grpo", "gpus": 4, "placement": "separate", "rollout__gpus": 2},
        r"rollout\.gpus: given 2, allowed with trl 0\.15\.2: 1",
    ),
    "vLLM that sleeps before 0.23": (
        {"framework": "trl==0.22.0", "task": "grpo", "rollout__sleep": True, **COLOCATED}, r"false, until 0\.23\.0"
    ),
    "groups larger than a micro batch before 0.17": (
        {"framework": "trl==0.16.0", "task": "grpo", "rollout__n": 16}, r"a divisor of the 8 completions"
    ),
    "FSDP with vLLM before 0.18": (
        {"framework": "trl==0.17.0", "task": "grpo", "gpus": 4, "placement": "separate", "rollout__gpus": 1,
         "sharding": "fsdp2"},
        r"sharding: given 'fsdp2' with vllm",
    ),
    "checkpoints in host memory before 0.18": (
        {"framework": "trl==0.17.0", "checkpointing": "full", "offload__activations": True}, r"it came with 0\.18\.0"
    ),
    "adapters in ppo before 0.13": (
        {"framework": "trl==0.12.0", "task": "ppo", "method": "lora"}, r"adapters came with 0\.13\.0"
    ),
    "ppo with vllm": (
        {"framework": "trl==0.15.2", "task": "ppo", "rollout__engine": "vllm"}, r"allowed with trl for ppo: hf"
    ),
    "ppo without a critic": (
        {"framework": "trl==0.15.2", "task": "ppo", "roles": {"critic": "none"}}, r"takes all four"
    ),
    "a tile's logsumexp before 1.15": (
        {"framework": "trl==0.15.2", "task": "dpo", "logprob": "logsumexp"},
        r"allowed with trl: selective in release 0\.15\.2",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "line"), BEFORE.values(), ids=BEFORE)
def test_what_an_earlier_release_cannot_do_is_refused_with_the_first_that_can(
    fields: dict[str, Any], line: str
) -> None:
    with pytest.raises(ScenarioError, match=line):
        run(**fields)


@pytest.mark.parametrize(
    ("version", "precision", "checkpointing", "length", "impl"),
    [
        ("0.12.0", "fp32", "none", 512, "foreach"),
        ("0.15.2", "fp32", "none", 1024, "foreach"),
        ("0.19.0", "autocast", "none", 1024, "foreach"),
        ("0.22.0", "autocast", "full", 1024, "fused"),
    ],
)
def test_defaults_come_with_their_release(
    version: str, precision: str, checkpointing: str, length: int, impl: str
) -> None:
    """bf16 (dpo_config.py of 0.19.0), gradient_checkpointing (0.22.0), max_length (0.14.0); PyTorch 2.8 fuses AdamW."""
    s = run(framework=f"trl=={version}", task="dpo")
    assert (s.precision, s.checkpointing, s.seq_len, s.optimizer_impl) == (precision, checkpointing, length, impl)
    assert run(framework=f"trl=={version}", task="dpo", gpus=2, sharding="zero2").precision == "mixed"


def test_checkpointing_is_reentrant_by_transformers_4_until_0_27_0_asks_for_the_other_kind() -> None:
    """sft_config.py:281-287 of 0.27.0."""
    found = {v: run(framework=f"trl=={v}", checkpointing="full").reentrant for v in ("0.12.0", "0.26.0", "0.27.0")}
    assert found == {"0.12.0": True, "0.26.0": True, "0.27.0": False}


def test_a_reference_is_whole_under_fsdp_until_the_trainer_prepares_it() -> None:
    """`prepare_model(evaluation_mode=True)` wraps nothing in FSDP; `prepare_fsdp` came to DPOTrainer with 0.17.0."""
    for version, expected in (("0.16.0", ("autocast", "ddp")), ("0.17.0", ("fsdp-mixed", "fsdp2"))):
        reference = run(framework=f"trl=={version}", task="dpo", gpus=4, sharding="fsdp2").role("reference")
        assert reference
        assert (reference.precision, reference.sharding) == expected


def test_dpos_logits_by_release() -> None:
    """trainer/dpo_trainer.py of each: what waits for the reference, what is copied, what metrics take."""

    def found(version: str, **fields: Any) -> tuple[Path, Path]:
        s = run(framework=f"trl=={version}", task="dpo", precision="autocast", seq_len=512, micro_batch=1, **fields)
        return s.keeps.role("actor").path, s.keeps.role("reference").path

    wide: dict[str, Any] = {"head_fp32": True, "outputs_fp32": True}
    kept = 511 / 512
    old = Path("log-softmax", kept=kept, shift_copy=True, **wide)
    assert found("0.8.0") == (replace(old, held="inside"), old)
    assert found("0.9.6") == (replace(old, held="inside", aside=2), old)
    assert found("0.12.0") == (replace(old, metrics=2),) * 2
    assert found("0.14.0") == (Path("log-softmax", metrics=2, **wide),) * 2
    assert found("0.15.2") == (Path("rows", metrics=2, **wide),) * 2
    assert found("0.19.0") == (Path("rows", metrics=2, hidden=True, **wide),) * 2
    late = Path("rows", kept=kept, copied=True, metrics=2, **wide)
    assert found("1.0.0") == (replace(late, metrics=0, held="inside"), late)
    # two rows of 511: a copy of the slice, and 3 x 128 tokens of entropies
    sliced = replace(late, copied=False, metrics=4 * (1 + 3 * 128 / 1022))
    assert found("1.6.0") == (replace(sliced, metrics=0, held="inside"), sliced)
    assert found("1.14.0")[0] == Path("flash", kept=kept, held="inside", **wide)


def test_dpo_in_bf16_takes_each_rows_log_softmax() -> None:
    """`selective_log_softmax` of logits that DeepSpeed leaves in bf16; 1.0 has a contiguous copy beside the outputs."""
    given: dict[str, Any] = {"task": "dpo", "gpus": 2, "sharding": "zero3", "seq_len": 512}
    assert run(framework="trl==0.15.2", **given).keeps.role("actor").path == Path("selective", metrics=1)
    policy = run(framework="trl==1.0.0", **given).keeps.role("actor").path
    assert (policy.kind, policy.copied, policy.aside, policy.held) == ("selective", True, 2, "inside")


def test_sfts_accuracy_by_release() -> None:
    """A copy without the last position since 0.15.0, which gathered all ranks' copies; entropies; pieces of 256."""

    def metrics(version: str, **fields: Any) -> float:
        s = run(framework=f"trl=={version}", precision="autocast", micro_batch=2, **fields)
        return s.keeps.roles[0].path.metrics

    assert [metrics(v) for v in ("0.14.0", "0.15.0", "0.15.2", "0.22.0")] == [0, 4, 4, 6]
    assert metrics("0.15.0", gpus=4) == 4 * (1 + 4)
    assert metrics("0.15.2", gpus=4) == 4
    assert run(framework="trl==1.7.0", micro_batch=2).keeps.roles[0].path == Path("chunked", tile=256)


def test_a_reward_model_sees_chosen_and_rejected_in_turn_until_0_23() -> None:
    """`compute_loss` calls the model twice (trainer/reward_trainer.py:270 of 0.12.2), both in one graph."""
    old, new = (run(framework=f"trl=={v}", task="rm", micro_batch=4).keeps for v in ("0.23.0", "0.24.0"))
    assert (old.roles[0].rows, old.stages) == (4, (Stage("train", "reward", joint="reward"),))
    assert (new.roles[0].rows, new.stages) == (8, (Stage("train", "reward"),))


def test_kto_keeps_copies_of_its_logits_beside_the_references() -> None:
    """`chosen_logits` and `rejected_logits` of `forward`; `KL_logits` is a variable of it until 0.16."""

    def found(version: str) -> tuple[float, float, float]:
        s = run(framework=f"trl=={version}", task="kto", precision="autocast")
        policy, reference = s.keeps.role("actor").path, s.keeps.role("reference").path
        return policy.aside, policy.metrics, reference.aside

    assert found("0.15.2") == (4, 4, 4)
    assert found("0.17.0") == (4, 0, 0)
    assert found("1.7.0") == (4, 0, 0)


def test_grpos_course_by_release() -> None:
    """0.14 scores the reference inside the policy's graph; one generation is a micro batch's until 0.16."""
    first = run(framework="trl==0.14.0", task="grpo").keeps
    assert [(x.does, x.role, x.inside, x.rows) for x in first.stages] == [
        ("generate", "actor", "", 8), ("train", "actor", "reference", 0), ("save", "actor", "", 0),
    ]  # fmt: skip
    s = run(framework="trl==0.14.0", task="grpo")
    assert (s.micro_batch, s.global_batch) == (8, 64)  # a prompt of 8 completions, 8 accumulated
    for version, rows in (("0.16.0", 8), ("0.17.0", 32)):
        plan = run(framework=f"trl=={version}", task="grpo", global_batch=32, rollout__batch=4).keeps
        assert plan.stages[0].rows == rows
    kept = {"kept": 256 / 768, "picked": True, "head_fp32": True}
    for version, expected in (
        ("0.14.0", Path("selective", **kept)),
        ("0.15.2", Path("rows", **kept)),
        ("0.16.0", Path("rows", scaled="copy", **kept)),
        ("0.20.0", Path("rows", scaled="copy", metrics=4 * 3 / 8, **kept)),
        ("1.0.0", Path("rows", scaled="view", metrics=4 * (1 + 3 * 128 / 2048), **kept)),
        ("1.14.0", Path("flash", **{**kept, "kept": 0.5})),
    ):
        s = run(framework=f"trl=={version}", task="grpo", precision="autocast")
        assert s.keeps.role("actor").path == expected, version


def test_vllm_beside_the_trainer_has_the_length_of_prompt_and_completion_until_0_25() -> None:
    """trainer/grpo_trainer.py:649 of 0.18.2, :832 of 0.20.0; sleep(level=2) since 0.25.0."""
    for version, serving in (
        ("0.18.0", Serving("0.8.5", 768, 8, None, process="trainer")),
        ("0.19.0", Serving("0.9.1", 768, 8, 4096, process="trainer")),
        ("0.26.0", Serving("0.11.2", 8192, 8, 4096, sleep_level=2, process="trainer")),
    ):
        assert run(framework=f"trl=={version}", task="grpo", **COLOCATED).keeps.serving == serving


# --- PPOTrainer ---


def test_ppo_has_four_models_and_two_of_them_in_one_graph() -> None:
    """trainer/ppo_trainer.py of 0.12.0: `PolicyAndValueWrapper`, `get_reward`, and `logitss` of the whole rollout."""
    s = run(framework="trl==0.12.0", task="ppo", precision="autocast", micro_batch=4, prompt_len=203)
    plan = s.keeps
    assert [(x.does, x.role, x.joint) for x in plan.stages] == [
        ("generate", "actor", ""), ("score", "reference", ""), ("score", "critic", ""), ("score", "reward", ""),
        ("train", "actor", "critic"), ("save", "actor", ""),
    ]  # fmt: skip
    assert plan.loading == ("actor", "critic", "reference", "reward")
    assert (plan.scores, s.response_len, s.rollout and s.rollout.micro_batch) == (4, 53, 64)
    actor = plan.role("actor").path
    assert (actor.kind, actor.held, actor.hidden, actor.scaled) == ("log-softmax", "step", True, "view")
    assert actor.aside == 4  # `new_all_logprobs`, a variable
    reference = s.role("reference")
    assert reference
    assert (reference.precision, reference.sharding) == ("fp32", "none")


def test_ppos_outputs_wait_for_the_next_micro_batch_in_a_step_of_several() -> None:
    """The `del` comes behind the loop over micro batches; `prob_dist` is there by then, too."""
    several = run(framework="trl==0.15.2", task="ppo", precision="autocast", micro_batch=2, global_batch=4)
    path = several.keeps.role("actor").path
    assert (path.kind, path.held, path.aside) == ("rows", "next", 4)


def test_ppos_logits_of_the_responses_stay() -> None:
    """2 responses of 53 tokens over 128,256 entries in fp32."""
    s = run(framework="trl==0.12.0", task="ppo", model="llama-3.2-1b", micro_batch=2)
    (group,) = estimate(s, load()).groups
    one = 4 * 2 * 53 * 128_256

    def kept(phase: str) -> list[int]:
        (moment,) = (each.moment for each in group.phases if each.name == phase)
        return [line.bytes for line in moment.lines if line.component == "logits" and "k·n·R·V" in line.formula]

    assert [kept(phase) for phase in ("score", "forward", "backward", "step")] == [[one]] * 4


def test_ppos_critic_is_no_peft_model() -> None:
    """examples/scripts/ppo/ppo.py passes `peft_config` for the policy alone, whose base is then the reference."""
    s = run(framework="trl==0.13.0", task="ppo", method="lora", roles={"reward": {"model": "llama-3.2-1b"}})
    critic = s.role("critic")
    assert critic
    assert (critic.method, critic.model) == ("full", "llama-3.2-1b")
    assert s.keeps.role("reference").shares


@pytest.mark.parametrize(("sharding", "once"), [("fsdp1", True), ("fsdp2", True), ("zero3", False), ("ddp", False)])
def test_transformers_trainer_reduces_fsdps_gradients_once_a_step(sharding: str, once: bool) -> None:
    """transformers 5.23 trainer.py:1896: `accelerator.no_sync` for all micro-batches but the last, DeepSpeed apart."""
    for task in ("sft", "rm", "dpo", "grpo"):
        assert job(task=task, framework="trl", gpus=8, sharding=sharding).no_sync is once


def test_a_scoring_micro_batch_of_its_own_is_refused() -> None:
    """grpo_trainer.py scores by per_device_train_batch_size."""
    with pytest.raises(ScenarioError, match=r"rollout\.micro_batch: given 4, allowed with trl 1\.16\.0: null"):
        job(task="grpo", framework="trl", gpus=8, rollout={"micro_batch": 4})


# --- what released code takes ---

# Peaks in bytes of forward (scoring included) and backward, cuBLAS workspaces left out: the loss functions of the
# release, taken from its package and run on the tracer's fake tensors (torch 2.13.0, transformers 5.23.0): llama-3.2-1b
# in fp32 under Accelerate's autocast, full checkpointing, foreach AdamW. DPO, ORPO: two pairs of 1,024 tokens; KTO:
# four sequences; reward models: four pairs; GRPO: four completions of 512 tokens for a prompt of 512.
TRACED = [
    ("dpo", "0.7.11", 31_420_570_624, 27_217_624_064),
    ("dpo", "0.11.0", 32_470_235_136, 27_217_624_064),
    ("dpo", "0.12.0", 29_319_319_552, 27_217_624_064),
    ("dpo", "0.14.0", 27_224_145_920, 27_223_780_352),
    ("dpo", "0.15.2", 26_173_468_672, 27_223_829_504),
    ("dpo", "0.19.0", 26_743_894_016, 27_223_829_504),
    ("dpo", "0.29.0", 30_370_919_424, 27_217_673_216),
    ("dpo", "1.6.0", 27_418_862_592, 27_219_692_544),
    ("kto", "0.8.0", 33_521_970_176, 27_217_625_088),
    ("kto", "0.15.2", 31_426_761_728, 27_219_726_336),
    ("kto", "1.0.0", 29_325_414_400, 27_219_726_336),
    ("orpo", "0.8.2", 23_326_232_576, 23_324_029_440),
    ("rm", "0.12.0", 18_169_747_968, 21_078_682_624),
    ("rm", "0.24.0", 18_353_742_848, 20_028_582_912),
    ("grpo", "0.14.0", 23_541_170_176, 25_837_689_344),
    ("grpo", "0.16.0", 23_417_450_496, 25_837_689_344),
    ("grpo", "1.0.0", 23_417_450_496, 25_837_689_344),
]
WORKSPACES = 67_108_864
RUN: dict[str, Any] = {
    "model": "llama-3.2-1b", "precision": "autocast", "checkpointing": "full", "reentrant": False, "gpu": "h200",
    "optimizer_impl": "foreach",
    "attention": "flash",  # keeps what SDPA does in 5.23: before 4.54 it gets keys and values of every query head
}  # fmt: skip
OF_TASK: dict[str, dict[str, Any]] = {
    "dpo": {"micro_batch": 2, "seq_len": 1024}, "orpo": {"micro_batch": 2, "seq_len": 1024},
    "kto": {"micro_batch": 4, "seq_len": 1024}, "rm": {"micro_batch": 4, "seq_len": 1024},
    "grpo": {"micro_batch": 4, "global_batch": 4, "prompt_len": 512, "response_len": 512, "rollout__n": 4,
             "roles": {"reference": {}}},
}  # fmt: skip


def met(s: Scenario) -> dict[str, int]:
    """The peaks of the phases, without cuBLAS workspaces."""
    (group,) = estimate(s, load()).groups
    return {phase.name: phase.moment.allocated_bytes - WORKSPACES for phase in group.phases}


@pytest.mark.parametrize(("task", "version", "forward", "backward"), TRACED)
def test_what_released_code_takes_is_met_within_a_tenth_of_a_percent(
    task: str, version: str, forward: int, backward: int
) -> None:
    # the layers traced are those of 5.23, without the rotary tables that each has before 4.38
    layers = {"versions": {"transformers": "4.38"}} if version == "0.7.11" else {}
    found = met(run(framework=f"trl=={version}", task=task, **RUN, **OF_TASK[task], **layers))
    assert max(found["forward"], found.get("score", 0)) == pytest.approx(forward, rel=1e-3)
    assert found["backward"] == pytest.approx(backward, rel=1e-3)


@pytest.mark.parametrize(
    ("version", "more", "backward", "step"),
    [
        ("0.12.0", {"checkpointing": "full", "global_batch": 4}, 51_836_310_016, 61_706_039_296),
        ("0.15.2", {"checkpointing": "full", "global_batch": 4}, 51_310_973_440, 61_180_702_720),
        ("0.12.0", {"checkpointing": "none", "global_batch": 4}, 57_783_345_664, 61_706_039_296),
        ("0.15.2", {"checkpointing": "full", "global_batch": 8}, 56_375_213_568, 62_231_481_344),
    ],
)
def test_what_ppo_takes_is_met(version: str, more: dict[str, Any], backward: int, step: int) -> None:
    """The same of PPOTrainer's `train` with `PolicyAndValueWrapper`: 4 prompts and responses of 256 tokens.

    Outputs that live on are counted from the head's first operation, and the division's clones twice: 2 % at most.
    """
    fields = {**RUN, "micro_batch": 4, "prompt_len": 256, "response_len": 256, **more}
    found = met(run(framework=f"trl=={version}", task="ppo", **fields))
    assert found["backward"] == pytest.approx(backward, rel=2e-2)
    assert found["backward"] > backward * (1 - 1e-3)
    assert found["step"] == pytest.approx(step, rel=1e-3)


def test_one_engine_of_deepspeed_has_policy_and_critic() -> None:
    """`accelerator.prepare(PolicyAndValueWrapper)`: one reduce bucket of ZeRO-3, where two engines would have two."""
    s = run(framework="trl==0.15.2", task="ppo", model="llama-3.2-1b", gpus=8, sharding="zero3")
    (group,) = estimate(s, load()).groups
    for phase in group.phases:
        buckets = [line.role for line in phase.moment.lines if line.formula == "n·b·E_b"]
        assert buckets in ([], ["actor"]), phase.name


@pytest.mark.parametrize(
    ("version", "transformers", "joined"),
    [("1.16.0", "5.17", True), ("0.17.0", "4.57", False), ("0.19.0", "4.52", False)],
)
def test_packed_rows_are_one_row_under_a_mask(version: str, transformers: str, joined: bool) -> None:
    """Eight packs of 2,048 tokens: SDPA's mask is of 16,384 positions squared, and tells sequences apart."""
    packed = {"model": "llama-3.2-1b", "gpu": "h200", "task": "sft", "packing": True, "micro_batch": 8, "seq_len": 2048}
    given = {**packed, "framework": f"trl=={version}", "versions": {"transformers": transformers}}
    s = parse(given, where="job", catalog=load())
    assert (s.architecture.masked, s.architecture.end_to_end) == (joined, joined)
    batch = Roles(s).batch(s, 8)
    assert batch == (16_384, 16_384 if joined else 2048)


def test_ligers_switch_has_its_losses_where_a_release_has_them() -> None:
    """SFT: the model's own forward; GRPO: a loss of TRL's own from 0.25.0 to 1.13, a completion at a time."""
    sizes = {"prompt_len": 512, "response_len": 256}
    for version, own in ("0.24.0", False), ("0.25.0", True), ("1.10.0", True), ("1.14.0", False):
        s = run(task="grpo", framework=f"trl=={version}", kernels="liger", **sizes)
        assert (s.keeps.role("actor").path == Path("fused-rows", kept=1 / 3, tile=256)) is own
        assert s.keeps.role("actor").scoring.kind != "fused-rows"
    assert run(task="sft", framework="trl==0.26.0", kernels="liger").keeps.role("actor").path == Path("fused")
    assert run(task="sft", framework="trl==1.16.0", kernels="liger").keeps.role("actor").path.kind == "tiled"


def test_rows_without_padding_are_one_row_as_packs_are() -> None:
    real: dict[str, Any] = {"task": "sft", "micro_batch": 8, "lengths": {"mean": 300, "longest": 900}}
    free, packed = run(padding_free=True, **real), run(packing=True, **real)
    assert free.held_len(8) == packed.held_len(8) < run(**real).held_len(8) == 900
    assert free.architecture.end_to_end and free.architecture == packed.architecture
    assert "--padding_free True" in launch(free).command


def test_an_adapter_that_is_trained_on_has_a_frozen_copy() -> None:
    """`model.add_adapter("ref", …)` (trainer/dpo_trainer.py:632 of 1.7.1): fp32 beside four bits, or with PEFT 0.19.

    Qwen2.5 0.5B, rank 8 beside q_proj and v_proj: 24 · 8 · (896 + 896 + 896 + 128) elements.
    """
    fields = {"model": "qwen2.5-0.5b", "task": "dpo", "gpus": 1, "framework": "trl==1.7.1", "lora__rank": 8,
              "lora__targets": ["q_proj", "v_proj"], "roles": {"reference": {}}}  # fmt: skip
    elements = 24 * 8 * (896 + 896 + 896 + 128)

    def copies(**more: Any) -> list[int]:
        """The bytes of the reference's adapters in the phase in which the job peaks."""
        lines = estimate(run(**fields, lora__ref_adapter=True, **more)).groups[0].peak.moment.lines
        return [line.bytes for line in lines if (line.component, line.role) == ("adapter", "reference")]

    assert copies(method="qlora") == [4 * elements]
    assert copies(method="lora", precision="bf16", versions={"peft": "0.19"}) == [4 * elements]
    assert copies(method="lora", precision="bf16", versions={"peft": "0.18"}) == [2 * elements]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"framework": "trl==0.27.0"},
            "lora.ref_adapter: given true, allowed with trl 0.27.0: false; it came with 0.29.0",
        ),
        ({"task": "sft", "roles": {}}, "lora.ref_adapter: given true with task sft"),
        ({"roles": {"reference": "none"}}, "lora.ref_adapter: given true with no reference, allowed: false"),
        ({"sharding": "zero2", "gpus": 2}, "lora.ref_adapter: given true with sharding zero2"),
    ],
)
def test_a_copy_of_adapters_is_refused_where_none_is_made(fields: dict[str, Any], message: str) -> None:
    usual = {"task": "dpo", "method": "lora", "roles": {"reference": {}}, "lora__ref_adapter": True}
    with pytest.raises(ScenarioError) as caught:
        run(**usual | fields)
    assert message in str(caught.value)
