"""OpenRLHF by version: defaults and refusals, each row read in that release's packages and tags."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
from jobs import job

from calc.base.plan import Path
from calc.base.versions import numbers
from calc.estimate.estimate import estimate
from calc.frameworks.openrlhf import openrlhf
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario, ScenarioError


def run(version: str = "0.6.1", **fields: Any) -> Scenario:
    """An OpenRLHF job."""
    return job(**{"framework": f"openrlhf=={version}"} | fields)


@pytest.mark.parametrize(
    ("version", "task", "seq_len", "micro_batch"),
    [
        ("0.3.1", "sft", 512, 8),
        ("0.3.6", "sft", 2048, 8),
        ("0.11.2", "sft", 2048, 8),
        ("0.3.1", "rm", 512, 8),
        ("0.3.6", "rm", 512, 1),
        ("0.8.10", "rm", 512, 1),
        ("0.3.1", "dpo", 512, 8),
        ("0.11.0", "dpo", 512, 8),
    ],
)
def test_lengths_and_micro_batches_are_the_command_lines(
    version: str, task: str, seq_len: int, micro_batch: int
) -> None:
    """cli/train_{sft,rm,dpo}.py; sft 512 and rm 8 before 0.3.6. train_batch_size is 128 throughout."""
    s = run(version, task=task)
    assert (s.seq_len, s.micro_batch, s.global_batch) == (seq_len, micro_batch, 128)
    assert (s.sharding, s.checkpointing, s.packing, s.offload.optimizer) == ("zero2", "none", False, False)


@pytest.mark.parametrize(
    ("version", "grad_dtype"), [("0.3.0", "fp32"), ("0.5.2", "fp32"), ("0.5.4", "bf16"), ("0.11.2", "bf16")]
)
def test_gradients_accumulate_in_fp32_until_0_5_3(version: str, grad_dtype: str) -> None:
    """`grad_accum_dtype if grad_accum_dtype else "fp32"`; later DeepSpeed decides, bf16 under ZeRO, fp32 without."""
    assert run(version).grad_dtype == grad_dtype
    assert run(version, sharding="none").grad_dtype == "fp32"


@pytest.mark.parametrize(("version", "attention"), [("0.3.8", "eager"), ("0.8.8", "eager"), ("0.8.10", "flash")])
def test_attention_is_eager_without_a_flag_until_0_8_9(version: str, attention: str) -> None:
    """`--flash_attn`; since 0.8.10 `attn_implementation=flash_attention_2` by default. Packing forces it always."""
    assert run(version).attention == attention
    assert run(version, packing=True).attention == "flash"


@pytest.mark.parametrize(
    ("version", "deepspeed", "transformers"),
    [
        ("0.3.1", "0.13.5", "4.41.0"),
        ("0.3.8", "0.14.4", "4.43.1"),
        ("0.4.6", "0.15.0", "4.46.1"),
        ("0.6.1", "0.16.4", "4.48.3"),
        ("0.6.4", "0.16.5", "4.50.0"),
        ("0.8.11", "0.17.6", "4.56.1"),
        ("0.11.0", "0.19.5", "5.15.0"),
        ("0.11.2", "0.19.6", "5.15.0"),
    ],
)
def test_releases_pin_their_libraries(version: str, deepspeed: str, transformers: str) -> None:
    """requirements.txt of the release."""
    versions = run(version).versions
    assert (versions["deepspeed"], versions["transformers"]) == (deepspeed, transformers)


def test_releases_are_in_order_and_0_3_is_the_last_of_its_series() -> None:
    """`openrlhf==0.3` reads as the last 0.3, 0.6 as the last with both trainers; in between, as the one before."""
    assert all(numbers(a) < numbers(b) for a, b in pairwise(openrlhf.KNOWN))
    assert run("0.3").framework_version == "0.3.8"
    assert run("0.6").framework_version == "0.6.1"
    assert run("0.6.10").framework_version == "0.6.4"
    assert run("0.3.2").framework_version == "0.3.1"


@pytest.mark.parametrize(
    ("version", "sharding", "dtype"),
    [("0.6.1", "zero3", "bf16"), ("0.10.4", "zero3", "bf16"), ("0.11.0", "zero3", "fp32"), ("0.11.0", "zero2", "bf16")],
)
def test_adapters_are_cast_to_bf16_but_by_the_newest_deepspeed_under_zero_3(
    version: str, sharding: str, dtype: str
) -> None:
    """`_cast_module_mixed_precision` skips zero.Init models from DeepSpeed 0.19.2 (0.19.1, of 0.10.4, still casts)."""
    s = run(version, method="lora", sharding=sharding)
    assert s.lora is not None
    assert (s.lora.dtype, s.lora.rank, s.lora.dropout) == (dtype, 64, 0)


SEEN: dict[str, Any] = {"model": "qwen2.5-vl-3b", "attention": "flash", "images": {"width": 448, "height": 448}}

REFUSED = {
    "fsdp": {"gpus": 2, "sharding": "fsdp2"},
    "pure bf16": {"precision": "bf16"},
    "another optimizer": {"optimizer": "lion"},
    "the trained model's parameters offloaded": {"sharding": "zero3", "offload__parameters": True},
    "an offloaded optimizer without ZeRO": {"sharding": "none", "offload__optimizer": True},
    "bf16 accumulation without ZeRO": {"sharding": "none", "grad_dtype": "bf16"},
    "selective checkpointing": {"checkpointing": "selective"},
    "a fused loss": {"loss": "fused"},
    "4-bit weights under ZeRO-3": {"sharding": "zero3", "method": "qlora"},
    "packing with eager attention": {"packing": True, "attention": "eager"},
    "packing before 0.3.4": {"framework": "openrlhf==0.3.1", "packing": True},
    "a 4-bit reference before Transformers 4.45": {"framework": "openrlhf==0.3.8", "task": "dpo", "method": "qlora"},
    "a batch that its GPUs cannot share": {"gpus": 6, "micro_batch": 1, "global_batch": 128},
    "images outside RL": {"framework": "openrlhf==0.11.2", **SEEN},
}


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_is_refused_in_one_line(fields: dict[str, Any]) -> None:
    """The line names the field, what was given and what is allowed."""
    with pytest.raises(ScenarioError) as caught:
        run(**fields)
    line = str(caught.value)
    assert line.isprintable()
    assert "given" in line and "allowed" in line


ACCEPTED = {
    "a 4-bit reference from Transformers 4.45 on": {"framework": "openrlhf==0.6.1", "task": "dpo", "method": "qlora"},
    "adam_offload with LoRA": {"method": "lora", "offload__optimizer": True},
    "packing from 0.3.4 on": {"framework": "openrlhf==0.3.4", "packing": True},
    "the reference's parameters offloaded": {"task": "dpo", "roles": {"reference": {"offload.parameters": True}}},
    "the post's 126 pairs on 6 GPUs": {"gpus": 6, "micro_batch": 1, "global_batch": 126},
}


@pytest.mark.parametrize("fields", ACCEPTED.values(), ids=ACCEPTED)
def test_what_no_release_refuses_is_not_refused(fields: dict[str, Any]) -> None:
    """The other side of each refusal."""
    assert openrlhf.refuse(run(**fields)) is None


@pytest.mark.parametrize(
    ("version", "path"),
    [
        ("0.4.5", Path("cross-entropy", head_fp32=True, shift_copy=True, held="next")),
        ("0.4.6", Path("log-softmax", shift_copy=True, held="next")),
        ("0.5.6", Path("cross-entropy", head_fp32=True, shift_copy=True, held="next")),
        ("0.7.0", Path("flash", head_fp32=True, held="next")),
    ],
)
def test_sft_keeps_its_outputs_into_the_next_forward(version: str, path: Path) -> None:
    """`output` is a local of the trainer's loop; until 0.6.4 GPTLMLoss copies the shifted logits of several rows."""
    assert openrlhf.keeps(run(version, micro_batch=2)).role("actor").path == path
    assert not openrlhf.keeps(run(version, micro_batch=1)).role("actor").path.shift_copy


def test_dpo_drops_its_outputs() -> None:
    """They are locals of `concatenated_forward`: only what autograd saved survives."""
    for version in openrlhf.KNOWN:
        assert openrlhf.keeps(run(version, task="dpo")).role("actor").path.held == "forward"
    assert openrlhf.keeps(run(task="rm")).role("reward").path == Path("scalar")


def test_dpos_reference_has_weights_of_its_own_with_adapters_too() -> None:
    """Two rows a pair; `Actor(args.ref_pretrain)` beside the adapted model."""
    keeps = openrlhf.keeps(run(task="dpo", method="lora", micro_batch=3))
    assert keeps.loading == ("actor", "reference")
    assert not keeps.role("reference").shares
    assert [(role.rows, role.scoring_rows) for role in keeps.roles] == [(6, 6), (6, 6)]


# ----------------------------------------------------------------------------------------------------------------- RL


def rl(version: str = "0.6.1", **fields: Any) -> Scenario:
    """An OpenRLHF PPO job on 8 GPUs."""
    return run(version, **{"task": "ppo", "gpus": 8} | fields)


def course(s: Scenario) -> list[str]:
    """A step in words: what is done, and on which role."""
    return [f"{stage.does} {stage.role}" for stage in openrlhf.keeps(s).stages]


SEPARATE: dict[str, Any] = {
    "placement": "separate",
    "roles": {"actor": {"gpus": 2}, "critic": {"gpus": 2}, "reference": {"gpus": 1}, "reward": {"gpus": 1}},
    "rollout": {"engine": "vllm", "gpus": 2},
}


@pytest.mark.parametrize(
    ("version", "micro_batch", "engine", "batch", "utilization", "vllm"),
    [
        ("0.3.1", 4, "hf", 512, 0.9, "0.4.2"),
        ("0.3.8", 4, "hf", 512, 0.9, "0.4.2"),
        ("0.5.3", 4, "hf", 512, 0.9, "0.6.4"),
        ("0.6.0", 4, "hf", 512, 0.4, "0.7.2"),
        ("0.6.1", 4, "hf", 512, 0.9, "0.7.2"),
        ("0.6.2", 4, "vllm", 1024, 0.9, "0.7.2"),
        ("0.6.4", 4, "vllm", 1024, 0.95, "0.8.2"),
        ("0.9.10", 4, "vllm", 1024, 0.95, "0.19.0"),
        ("0.11.2", 1, "vllm", 1024, 0.95, "0.29.0"),
    ],
)
def test_rl_has_the_defaults_of_its_command_line(
    version: str, micro_batch: int, engine: str, batch: int, utilization: float, vllm: str
) -> None:
    """cli/train_ppo.py where Transformers generates, cli/train_ppo_ray.py else; 128 sequences a step throughout."""
    s = rl(version)
    assert s.rollout
    assert (s.prompt_len, s.response_len, s.micro_batch, s.global_batch) == (1024, 1024, micro_batch, 128)
    assert (s.rollout.engine, s.rollout.batch, s.rollout.gpu_memory_utilization) == (engine, batch, utilization)
    assert (s.rollout.n, s.rollout.tensor_parallel, s.rollout.sleep) == (1, 1, False)
    assert s.versions["vllm"] == vllm
    assert (s.sharding, s.checkpointing, s.packing, s.offload.optimizer) == ("zero2", "none", False, False)


@pytest.mark.parametrize(("version", "batch"), [("0.3.4", 512), ("0.3.6", 1024)])
def test_ray_rolls_out_1024_prompts_since_0_3_6(version: str, batch: int) -> None:
    """rollout_batch_size of examples/train_ppo_ray.py and cli/train_ppo_ray.py."""
    rollout = rl(version, **SEPARATE).rollout
    assert rollout and rollout.batch == batch


def test_a_group_has_the_eight_responses_of_the_examples() -> None:
    """n_samples_per_prompt is 1, which group_norm is refused with; reinforce runs with it."""
    for task, n in (("ppo", 1), ("grpo", 8), ("reinforce++", 1)):
        rollout = rl("0.8.5", task=task).rollout
        assert rollout and rollout.n == n


def test_the_critic_starts_as_the_reward_model() -> None:
    """critic_pretrain = reward_pretrain; the policy's model where the reward is remote."""
    named = rl(roles__reward__model="qwen2.5-0.5b")
    critic = named.role("critic")
    assert critic and critic.model == "qwen2.5-0.5b"
    other = rl(roles__reward__model="qwen2.5-0.5b", roles__critic__model="qwen2.5-7b").role("critic")
    assert other and other.model == "qwen2.5-7b"
    remote = rl(roles__reward="none").role("critic")
    assert remote and remote.model == "llama-3-8b"


def test_ppo_has_four_roles_and_the_others_no_critic() -> None:
    """advantage_estimator other than gae: critic_pretrain is None."""
    assert {role.name for role in openrlhf.keeps(rl()).roles} == {"actor", "critic", "reference", "reward"}
    for task in ("grpo", "reinforce++"):
        names = {role.name for role in openrlhf.keeps(rl("0.6.1", task=task)).roles}
        assert names == {"actor", "reference", "reward"}
    alone = openrlhf.keeps(rl("0.11.2", task="grpo", roles={"reference": "none", "reward": "none"}))
    assert [role.name for role in alone.roles] == ["actor"]


def test_train_ppo_holds_every_role_in_one_process_and_takes_turns() -> None:
    """cli/train_ppo.py: strategy.prepare(actor, critic, reward, reference); training_step at each micro-batch."""
    s = rl(micro_batch=2, rollout__micro_batch=3)
    keeps = openrlhf.keeps(s)
    assert keeps.loading == ("actor", "critic", "reward", "reference")
    assert {role.process for role in keeps.roles} == {"trainer"}
    assert keeps.serving is None
    assert course(s) == [
        "generate actor", "score actor", "score reference", "score critic", "score reward", "train actor",
        "train critic", "save actor",
    ]  # fmt: skip
    assert [stage.alternating for stage in keeps.stages if stage.does == "train"] == [True, True]
    assert keeps.stages[0].rows == 3
    [update] = [stage for stage in openrlhf.keeps(rl(task="grpo")).stages if stage.does == "train"]
    assert not update.alternating  # nobody to take turns with


@pytest.mark.parametrize(("version", "holds"), [("0.4.4", ("prompt-logits",)), ("0.4.6", ())])
def test_transformers_keeps_the_last_logits_of_a_prompt_since_4_45(version: str, holds: tuple[str, ...]) -> None:
    """Transformers 4.44.2 and 4.46.1."""
    assert openrlhf.keeps(rl(version)).stages[0].holds == holds


@pytest.mark.parametrize(
    ("version", "scored"),
    [
        ("0.6.4", ["reference", "critic", "reward", "actor"]),
        ("0.7.1", ["reference", "critic", "reward", "actor"]),
        ("0.7.3", ["reward", "actor", "critic", "reference"]),
        ("0.11.2", ["reward", "actor", "critic", "reference"]),
    ],
)
def test_under_ray_roles_score_in_their_releases_order(version: str, scored: list[str]) -> None:
    """trainer/ppo_utils/experience_maker.py."""
    assert [stage.role for stage in openrlhf.keeps(rl(version)).stages if stage.does == "score"] == scored


def test_under_ray_every_role_has_its_own_process_and_vllm_comes_first() -> None:
    """cli/train_ppo_ray.py since 0.5.8; the critic waits for the actor."""
    keeps = openrlhf.keeps(rl("0.8.5"))
    assert keeps.loading == ("rollout", "actor", "reference", "reward", "critic")
    assert [role.process for role in keeps.roles] == ["actor", "reference", "reward", "critic"]
    assert keeps.serving and keeps.serving.process == "vllm"
    assert (keeps.serving.version, keeps.serving.max_model_len) == ("0.9.1", 2048)
    assert (keeps.serving.max_num_seqs, keeps.serving.graphs, keeps.serving.sleep_level) == (None, True, 1)


def test_a_sleeping_engine_is_awake_while_models_load_until_0_6_0() -> None:
    """create_vllm_engines puts engines to sleep since 0.6.1; before, only the end of a generation does."""
    early = rl("0.6.0", rollout={"engine": "vllm", "sleep": True})
    assert openrlhf.keeps(early).loading[-1] == "rollout"
    assert openrlhf.keeps(rl("0.6.1", rollout={"engine": "vllm", "sleep": True})).loading[0] == "rollout"


def test_actor_and_critic_train_at_once_since_0_9_1_unless_states_sleep() -> None:
    """`ppo_train`: the critic first and waited for; then both started together but with ds.enable_sleep."""

    def updates(s: Scenario) -> list[tuple[str, str]]:
        return [(stage.role, stage.beside) for stage in openrlhf.keeps(s).stages if stage.does == "train"]

    one_by_one = [("critic", ""), ("actor", "")]
    assert updates(rl("0.9.0")) == one_by_one
    assert updates(rl("0.9.1")) == [("actor", "critic")]
    assert updates(rl("0.11.2", rollout__sleep=True)) == one_by_one
    assert updates(rl("0.11.2", rollout__sleep=True, offload__optimizer=True)) == one_by_one
    assert updates(rl("0.11.2", rollout__sleep=True, versions__deepspeed="0.17.5")) == [("actor", "critic")]
    assert updates(rl("0.11.2", **SEPARATE)) == one_by_one
    joined = SEPARATE | {"roles": {"actor": {"gpus": 4}, "reference": {"gpus": 1}, "reward": {"gpus": 1}}}
    assert updates(rl("0.11.2", **joined)) == [("actor", "critic")]
    assert updates(rl("0.11.2", task="grpo")) == [("actor", "")]


@pytest.mark.parametrize(
    ("version", "fields", "leaves"),
    [
        ("0.6.1", {"sharding": "zero3"}, True),
        ("0.6.1", {}, False),  # NotImplementedError below stage 3
        ("0.6.0", {"sharding": "zero3"}, False),
        ("0.8.10", {}, False),  # DeepSpeed 0.17.5
        ("0.8.11", {}, True),
        ("0.11.2", {}, True),
        ("0.11.2", {"offload__optimizer": True}, False),
        ("0.11.2", {"sharding": "zero3", "offload__optimizer": True}, False),
    ],
)
def test_states_sleep_with_vllm_where_the_release_can(version: str, fields: dict[str, Any], leaves: bool) -> None:
    """ds.enable_sleep, as in OpenRLHF's template: the trained roles' alone, and a note says so."""
    keeps = openrlhf.keeps(rl(version, rollout={"engine": "vllm", "sleep": True}, **fields))
    left = {role.name for role in keeps.roles if role.leaves == {"states"}}
    assert left == ({"actor", "critic"} if leaves else set())
    assert any("ds.enable_sleep" in note for note in keeps.notes) == leaves
    awake = openrlhf.keeps(rl(version, rollout__engine="vllm", **fields))
    assert not any(role.leaves for role in awake.roles)


@pytest.mark.parametrize(
    ("version", "sync", "save"),
    [
        ("0.6.0", "all", "all"),
        ("0.6.1", "all", "asleep"),
        ("0.9.1", "all", "asleep"),
        ("0.9.2", "weights", "weights"),
    ],
)
def test_what_of_vllm_wakes_for_new_weights(version: str, sync: str, save: str) -> None:
    """wake_up() takes the cache along; since 0.9.2 tags=["weights"], which stay awake through a checkpoint."""
    stages = openrlhf.keeps(rl(version, rollout={"engine": "vllm", "sleep": True})).stages
    assert [(stage.does, stage.engine) for stage in stages if stage.engine != "asleep" or stage.does == "save"] == [
        ("serve", "all"), ("sync", sync), ("save", save),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("version", "fields", "holds"),
    [
        ("0.5.8", {}, ()),
        ("0.5.9", {}, ("clone",)),
        ("0.11.2", {"sharding": "zero3"}, ("parameter", "clone")),
        ("0.11.2", SEPARATE, ()),
        ("0.11.2", SEPARATE | {"sharding": "zero3"}, ("parameter",)),
    ],
)
def test_a_clone_goes_to_an_engine_on_the_same_gpu_since_0_5_9(
    version: str, fields: dict[str, Any], holds: tuple[str, ...]
) -> None:
    """`_broadcast_to_vllm`: param.data.clone() for a CUDA IPC handle; stage 3 gathers the parameter."""
    s = rl(version, **({"rollout__engine": "vllm"} if "rollout" not in fields else {}) | fields)
    [sync] = [stage for stage in openrlhf.keeps(s).stages if stage.does == "sync"]
    assert sync.holds == holds


@pytest.mark.parametrize(
    ("version", "sharding", "host", "holds"),
    [
        ("0.3.8", "zero2", "first", ()),
        ("0.7.3", "zero3", "first", ("parameter",)),
        ("0.7.5", "zero2", "every", ()),
        ("0.11.2", "zero3", "first", ("parameter",)),
    ],
)
def test_every_rank_copies_what_is_saved_since_0_7_5(
    version: str, sharding: str, host: str, holds: tuple[str, ...]
) -> None:
    """`save_model`: clone_tensors_for_torch_save of every rank's state dict, below stage 3."""
    save = openrlhf.keeps(rl(version, sharding=sharding)).stages[-1]
    assert (save.does, save.role, save.host, save.host_bytes, save.holds) == ("save", "actor", host, 2, holds)


@pytest.mark.parametrize(
    ("version", "rows", "path"),
    [
        ("0.4.4", 2, Path("log-softmax", head_fp32=True, shift_copy=True, held="step")),
        ("0.4.6", 1, Path("log-softmax", held="step")),
        ("0.5.8", 2, Path("rows", head_fp32=True, held="step")),
        ("0.6.1", 1, Path("logsumexp", head_fp32=True, held="step")),
        ("0.6.4", 2, Path("flash", head_fp32=True, shift_copy=True, held="step")),
        ("0.6.4", 1, Path("flash", head_fp32=True, cut="slice", held="step")),  # one row's slice needs no copy
        ("0.11.2", 2, Path("flash", head_fp32=True, held="step")),
    ],
)
def test_rl_keeps_its_outputs_through_the_step(version: str, rows: int, path: Path) -> None:
    """`output` is a local of training_step, gone with the next call: the actor's logits, the critic's hidden states."""
    keeps = openrlhf.keeps(rl(version, micro_batch=rows, rollout__micro_batch=rows))
    assert keeps.role("actor").path == keeps.role("actor").scoring == keeps.role("reference").scoring == path
    assert keeps.role("critic").path == keeps.role("reward").path == Path("scalar", held="step")
    assert {(role.rows, role.scoring_rows) for role in keeps.roles} == {(rows, rows)}


@pytest.mark.parametrize(("sharding", "told"), [("zero2", True), ("zero3", False)])
def test_host_memory_for_a_frozen_model_is_said_to_be_in_vain_below_zero3(sharding: str, told: bool) -> None:
    """`get_ds_eval_config(offload, stage=self.stage if self.stage == 3 else 0)`."""
    note = f"roles.{{}}.offload.parameters has no effect with sharding {sharding}: the weights stay on the GPU"
    offloaded = {"offload.parameters": True}
    vllm = {"rollout__engine": "vllm", "rollout__gpu_memory_utilization": 0.5}
    job = rl("0.6.1", sharding=sharding, roles={"reference": offloaded, "reward": offloaded}, **vllm)
    for name in ("reference", "reward"):
        assert (note.format(name) in openrlhf.keeps(job).notes) == told
    notes = openrlhf.keeps(run("0.11.2", task="dpo", sharding=sharding, roles={"reference": offloaded})).notes
    assert notes == ((note.format("reference"),) if told else ())
    assert openrlhf.keeps(run("0.11.2", task="dpo", sharding=sharding)).notes == ()


def test_all_roles_are_scored_by_micro_rollout_batch_size_unless_a_frozen_one_says_its_own() -> None:
    """trainer/ppo_utils/experience_maker.py splits samples by it, whatever the update takes at once."""
    keeps = openrlhf.keeps(rl(micro_batch=1, rollout__micro_batch=2, roles__reference__micro_batch=1))
    assert {role.name: (role.rows, role.scoring_rows) for role in keeps.roles} == {
        "actor": (1, 2), "critic": (1, 2), "reward": (1, 2), "reference": (1, 1),
    }  # fmt: skip
    actor = keeps.role("actor")
    reference = keeps.role("reference")
    assert (actor.path.kind, actor.scoring.kind, reference.scoring.kind) == ("logsumexp", "rows", "logsumexp")


@pytest.mark.parametrize(
    ("tokens", "rows", "scored"),
    [
        (4096, 2, 2),
        (20_480, 10, 11),  # 103 batches of 10 become 96, of which 8 GPUs have 12 each
        (18_432, 9, 10),  # 114 become 112
        (143_360, 16, 128),  # 15 batches of 70 become 8
        (10**9, 16, 128),
    ],
)
def test_dynamic_batches_that_are_scored_may_hold_more_than_their_tokens(tokens: int, rows: int, scored: int) -> None:
    """experience_maker.py:467-475 of 0.9.0: as many as the actor's GPUs share, rounded down; 1,024 responses of 2,048.

    The update's are first fits of 16 sequences a GPU (utils/seqlen_balancing.py, `get_minimum_num_micro_batch_size`).
    """
    s = rl("0.9.1", max_tokens_per_gpu=tokens, rollout__engine="vllm", rollout__sleep=True)
    assert (s.packing, s.attention, s.rollout and s.rollout.micro_batch) == (True, "flash", None)
    keeps = openrlhf.keeps(s)
    assert {(role.rows, role.scoring_rows) for role in keeps.roles} == {(rows, scored)}
    assert parse(s.as_dict()) == s


def test_the_entropy_is_compiled_beside_the_actors_log_probability() -> None:
    """--entropy_loss_coef since 0.8.0 (trainer/ray/ppo_actor.py:214), in the update alone."""
    vllm = {"rollout__engine": "vllm", "rollout__sleep": True}
    actor = openrlhf.keeps(rl("0.8.0", entropy_coeff=0.01, **vllm)).role("actor")
    assert (actor.path.entropy, actor.scoring.entropy) == ("compiled", "")
    assert openrlhf.keeps(rl("0.8.0", **vllm)).role("actor").path.entropy == ""
    with pytest.raises(ScenarioError, match=r"entropy_coeff: given 0\.01, allowed with openrlhf 0\.7\.5: 0; it has no"):
        rl("0.7.5", entropy_coeff=0.01, **vllm)


@pytest.mark.parametrize(
    ("version", "fields", "line"),
    [
        ("0.8.5", {}, "max_tokens_per_gpu: given 8192, allowed with openrlhf 0.8.5: null; it has no such setting"),
        ("0.11.2", {"task": "sft"}, "max_tokens_per_gpu: given 8192, allowed with openrlhf 0.11.2: null; it has no"),
        (
            "0.11.2",
            {"packing": False, "rollout__engine": "vllm"},
            "packing: given false with max_tokens_per_gpu, allowed with openrlhf: true",
        ),
    ],
)
def test_dynamic_batches_are_refused_where_there_are_none(version: str, fields: dict[str, Any], line: str) -> None:
    """ray.py has use_dynamic_batch since 0.8.6; no other script does."""
    with pytest.raises(ScenarioError, match=re.escape(line)):
        rl(version, **{"max_tokens_per_gpu": 8192} | fields)


@pytest.mark.parametrize(("version", "rows"), [("0.3.8", 8), ("0.9.10", 8), ("0.10.0", 1)])
def test_a_gpu_scores_no_more_at_once_than_it_has_of_the_rollout(version: str, rows: int) -> None:
    """The default is 8, since 0.10.0 it is 1; four prompts on a GPU are four at most."""
    vllm = {"placement": "separate", **SEPARATE}

    def scored(batch: int) -> int:
        rollout = {**SEPARATE["rollout"], "batch": batch}
        return openrlhf.keeps(rl(version, **{**vllm, "rollout": rollout})).role("actor").scoring_rows

    assert (scored(1024), scored(8)) == (rows, min(rows, 4))


def test_the_log_probability_that_is_asked_for_is_kept_as_long() -> None:
    """`logprob` of another release."""
    found = openrlhf.keeps(rl("0.11.2", logprob="selective")).role("actor").path
    assert found == Path("selective", held="step")


VLLM = {"rollout__engine": "vllm"}
REFUSED_RL = {
    "grpo before 0.6.0": ("task", "0.5.9", {"task": "grpo"}),
    "reinforce before 0.5.1": ("task", "0.4.6", {"task": "reinforce++"}),
    "a group of one": ("rollout.n", "0.6.4", {"task": "grpo", "rollout__n": 1}),
    "several responses before 0.4.5": ("rollout.n", "0.4.4", {"rollout__n": 2}),
    "Transformers' generation since 0.7.1": ("rollout.engine", "0.7.1", {"rollout__engine": "hf"}),
    "no actor": ("roles.actor", "0.6.1", {"roles__actor": "none"}),
    "PPO without a critic": ("roles.critic", "0.6.1", {"roles__critic": "none"}),
    "no reference before 0.6.0": ("roles.reference", "0.5.9", {"roles__reference": "none"}),
    "no reward model before 0.4.0": ("roles.reward", "0.3.8", {"roles__reward": "none"}),
    "vLLM on the same GPUs before 0.5.8": ("placement", "0.5.6", VLLM),
    "a share that becomes another": (
        "rollout.gpu_memory_utilization",
        "0.6.0",
        VLLM | {"rollout__gpu_memory_utilization": 0.9},
    ),
    "adapters with vLLM": ("method", "0.11.2", {"method": "lora"}),
    "packing without vLLM": ("packing", "0.6.1", {"packing": True}),
    "packing before 0.4.4": ("packing", "0.4.3", SEPARATE | {"packing": True}),
    "zero3 under Ray without vLLM": ("sharding", "0.6.4", {"rollout__engine": "hf", "sharding": "zero3"}),
    "a 4-bit reference before Transformers 4.45": ("method", "0.4.4", {"method": "qlora"}),
    "another sharding for the critic": ("roles.critic.sharding", "0.6.1", {"roles__critic__sharding": "zero3"}),
    "another precision for the reference": (
        "roles.reference.precision",
        "0.6.1",
        {"roles__reference__precision": "fp32"},
    ),
    "another micro batch for the critic": ("roles.critic.micro_batch", "0.6.1", {"roles__critic__micro_batch": 1}),
    "the critic's optimizer alone offloaded": (
        "roles.critic.offload.optimizer",
        "0.6.1",
        {"roles__critic__offload__optimizer": True},
    ),
    "the critic's parameters offloaded": (
        "roles.critic.offload.parameters",
        "0.11.2",
        {"roles__critic__offload__parameters": True},
    ),
    "a frozen model offloaded without Ray": (
        "roles.reference.offload.parameters",
        "0.6.1",
        {"roles__reference__offload__parameters": True},
    ),
    "the reference alone offloaded before 0.10.2": (
        "roles.reference.offload.parameters",
        "0.10.0",
        {"roles__reference__offload__parameters": True},
    ),
    "three GPUs for an actor before 0.5.6": (
        "roles.actor.gpus",
        "0.5.5",
        {"placement": "separate", "gpus": 4, "roles": {"actor": {"gpus": 3}, "critic": {"gpus": 1}}},
    ),
    "a critic that does not divide its actor": (
        "roles.critic.gpus",
        "0.6.4",
        SEPARATE | {"roles": {"actor": {"gpus": 2}, "critic": {"gpus": 4}}},
    ),
    "prompts that its GPUs cannot share": ("rollout.batch", "0.6.4", {"gpus": 6}),
    "engines that its GPUs cannot share": (
        "rollout.gpus",
        "0.5.8",
        SEPARATE | {"gpus": 8, "roles": {"actor": {"gpus": 2}, "critic": {"gpus": 2}}, "rollout": {"engine": "vllm"}},
    ),
    "a critic on the actor's GPUs alone": (
        "roles.critic.gpus",
        "0.6.4",
        SEPARATE | {"roles": {"actor": {"gpus": 4}, "reward": {"gpus": 2}}},
    ),
    "images before 0.10.0": ("images", "0.9.10", {"task": "grpo", "rollout__n": 4, **SEEN}),
    "images with a critic": ("images", "0.11.2", SEEN),
    "images in packed batches": ("packing", "0.11.2", {"task": "grpo", "rollout__n": 4, "packing": True, **SEEN}),
    "a frozen tower without its projector": (
        "images.freeze",
        "0.11.2",
        {"task": "grpo", "rollout__n": 4, **SEEN, "images": {**SEEN["images"], "freeze": "tower"}},
    ),
    "a reward model on the actor's GPUs alone": (
        "roles.reward.gpus",
        "0.7.5",
        SEPARATE | {"task": "grpo", "roles": {"actor": {"gpus": 6}}},
    ),
}


@pytest.mark.parametrize(("place", "version", "fields"), REFUSED_RL.values(), ids=REFUSED_RL)
def test_rl_that_cannot_run_is_refused_in_one_line(place: str, version: str, fields: dict[str, Any]) -> None:
    """The line names the field, what was given and what is allowed."""
    with pytest.raises(ScenarioError) as caught:
        rl(version, **fields)
    line = str(caught.value)
    assert line.isprintable()
    assert line.startswith(f"scenario: {place}: given ") and "allowed" in line


ACCEPTED_RL = {
    "grpo since 0.6.0": ("0.6.0", {"task": "grpo"}),
    "reinforce since 0.5.1": ("0.5.1", {"task": "reinforce++"}),
    "several responses since 0.4.5": ("0.4.5", {"rollout__n": 2}),
    "Transformers' generation until 0.7.0": ("0.7.0", {"rollout__engine": "hf"}),
    "no reference since 0.6.0": ("0.6.0", {"roles__reference": "none"}),
    "no reward model since 0.4.0": ("0.4.0", {"roles__reward": "none"}),
    "vLLM on the same GPUs since 0.5.8": ("0.5.8", VLLM),
    "nine tenths since 0.6.1": ("0.6.1", VLLM | {"rollout__gpu_memory_utilization": 0.9}),
    "adapters with Transformers' generation": ("0.6.1", {"method": "lora"}),
    "4-bit weights since Transformers 4.45": ("0.6.1", {"method": "qlora"}),
    "zero3 in one group": ("0.6.1", {"sharding": "zero3"}),
    "a frozen model in bf16, which mixed precision means": ("0.6.1", {"roles__reference__precision": "bf16"}),
    "packing since 0.4.4": ("0.4.4", SEPARATE | {"packing": True}),
    "the reference alone offloaded since 0.10.2": ("0.10.2", {"roles__reference__offload__parameters": True}),
    "reference and reward model offloaded by one flag": (
        "0.10.0",
        {f"roles__{name}__offload__parameters": True for name in ("reference", "reward")},
    ),
    "three GPUs for an actor since 0.5.6": (
        "0.5.6",
        {"placement": "separate", "gpus": 4, "rollout__batch": 1020}
        | {"roles": {"actor": {"gpus": 3}, "critic": {"gpus": 1}}},
    ),
    "more engines than actors since 0.6.0": (
        "0.6.0",
        SEPARATE | {"gpus": 8, "roles": {"actor": {"gpus": 2}, "critic": {"gpus": 2}}, "rollout": {"engine": "vllm"}},
    ),
    "any number of prompts since 0.7.1": ("0.7.1", {"gpus": 6}),
    "images since 0.10.0": ("0.10.0", {"task": "grpo", "rollout__n": 4, **SEEN}),
    "a reward model on the actor's GPUs since 0.8.0": (
        "0.8.0",
        SEPARATE | {"task": "grpo", "roles": {"actor": {"gpus": 6}}},
    ),
}


@pytest.mark.parametrize(("version", "fields"), ACCEPTED_RL.values(), ids=ACCEPTED_RL)
def test_rl_that_no_release_refuses_is_not_refused(version: str, fields: dict[str, Any]) -> None:
    """The other side of each refusal."""
    assert openrlhf.refuse(rl(version, **fields)) is None


@pytest.mark.parametrize("task", ["ppo", "grpo", "reinforce++"])
def test_every_release_that_knows_a_task_says_what_it_keeps(task: str) -> None:
    """Every stage runs a role that is loaded, and every role is trained or scored."""
    for version in openrlhf.KNOWN:
        try:
            s = rl(version, task=task)
        except ScenarioError as refused:
            assert "task" in str(refused)
            continue
        keeps = openrlhf.keeps(s)
        assert {role.name for role in keeps.roles} == set(keeps.loading) - {"rollout"}
        assert {stage.role for stage in keeps.stages} == set(keeps.loading)
        assert ("rollout" in keeps.loading) == (keeps.serving is not None)


def kept(s: Scenario) -> int:
    """The bytes of activations at the end of a forward whose layers keep all that backward needs."""
    moments = [p.moment for g in estimate(s).groups for p in g.phases if p.name == "forward"]
    return sum(line.bytes for moment in moments for line in moment.lines if line.component == "activations")


def test_ligers_kernels_run_the_language_models_that_actor_loads() -> None:
    """`use_liger_kernel` of `Actor` (models/actor.py:78 of 0.8.7): what a layer keeps is what plain PyTorch's keeps."""
    fields = {"model": "llama-3.1-8b", "task": "sft", "gpus": 8, "sharding": "zero3", "attention": "flash"}
    fields |= {"seq_len": 1024, "micro_batch": 1, "global_batch": 8, "checkpointing": "none", "precision": "mixed"}
    saved = [
        kept(job(**fields, framework=name)) - kept(job(**fields, framework=name, kernels="liger"))
        for name in ("openrlhf==0.8.7", "torch")
    ]
    # RMSNorm's fp32 input and what it scales, for 16 bits of input: 4 bytes of 4096, twice; SiLU's 16 bits of 14,336
    assert saved[0] == pytest.approx(1024 * 32 * (2 * 4 * 4096 + 2 * 14_336), rel=0.1)
    assert saved[0] == pytest.approx(saved[1], rel=0.03)


def test_ligers_kernels_leave_other_models_alone() -> None:
    """train_dpo's reference (cli/train_dpo.py:32 of 0.8.7, one of two) and scalar heads have none."""
    for task, name in (("dpo", "reference"), ("ppo", "critic"), ("ppo", "reward")):
        roles = {role.name: role.patched for role in run("0.8.7", task=task, gpus=8, kernels="liger").keeps.roles}
        assert roles["actor"] and not roles[name]
    assert {r.name: r.patched for r in run("0.8.7", task="ppo", gpus=8, kernels="liger").keeps.roles}["reference"]


@pytest.mark.parametrize(
    ("version", "fields", "words"),
    [
        ("0.6.1", {"task": "sft"}, "kernels: given 'liger', allowed with openrlhf 0.6.1: eager; it came with 0.6.2"),
        (
            "0.8.7",
            {"task": "rm"},
            "kernels: given 'liger' for rm, allowed with openrlhf: eager; it has no switch",
        ),
    ],
)
def test_ligers_kernels_are_refused_where_no_switch_is(version: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(words)):
        run(version, kernels="liger", **fields)
