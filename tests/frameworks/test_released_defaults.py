"""Every default that `calc.frameworks` states, beside what the released package says of itself.

Flags of command lines, keys of YAML files, fields of dataclasses and pinned libraries, each read in the package of the
release. Skipped where the registry cannot be reached; what a package does not hold, or holds otherwise, fails.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from jobs import job
from released import Release, read_or_skip

from calc.base.versions import at_least
from calc.frameworks.openrlhf import openrlhf
from calc.frameworks.trl import trl
from calc.frameworks.verl import easyr1, verl

Released = Callable[[str, str], Release]
MODULES: Mapping[str, ModuleType] = {"openrlhf": openrlhf, "verl": verl, "trl": trl}

# Releases whose first package is a later build of the same code, and those that never had one.
BUILDS = {("openrlhf", "0.3.6"): "0.3.6.post1", ("openrlhf", "0.4.0"): "0.4.0.post3", ("verl", "0.3.0"): "0.3.0.post1"}
UNPACKAGED = {
    ("openrlhf", "0.3.0"): "a tag only: packages begin with 0.3.6.post1",
    ("openrlhf", "0.3.1"): "a tag only: packages begin with 0.3.6.post1",
    ("openrlhf", "0.3.4"): "a tag only: packages begin with 0.3.6.post1",
    ("verl", "tinyzero"): "a fork that has no releases",
    **{("verl", version): "a fork whose releases are tags" for version in easyr1.KNOWN},
}


class Row(NamedTuple):
    """The place where releases state one of our fields.

    `called` is the name of the flag, key or field, by the first release that calls it so; "" where it ended. `means`
    puts the release's word into ours where they differ. `given` is what a user says to get the field. Fields joined by
    `+` are added.
    """

    field: str
    called: Mapping[str, str]
    means: Mapping[Any, Any] = {}
    given: Mapping[str, Any] = {}
    scripts: tuple[str, ...] = ()

    def name(self, version: str) -> str:
        """The name in `version`; "" where it does not state the field yet, or no longer."""
        return next((name for first, name in reversed(self.called.items()) if at_least(version, first)), "")


def compare(release: Release, where: str, found: Any, row: Row, stated: Mapping[str, Any]) -> None:
    """One default of one release; a message that says who tells what, and where."""
    parts = [stated.get(part) for part in row.field.split("+")]
    ours = parts[0] if len(parts) == 1 else sum(parts)
    theirs = row.means.get(found, found)
    assert ours == theirs, f"{release.name}, {where} is {found!r}: {row.field} is {theirs!r}; stated: {ours!r}"


@pytest.fixture(scope="session")
def released(pytestconfig: pytest.Config) -> Released:
    """A release by framework and version, fetched once and kept in pytest's cache."""

    @cache
    def release(framework: str, version: str) -> Release:
        builds = {known: BUILDS.get((framework, known), known) for known in packaged(framework)}
        return read_or_skip(pytestconfig, framework, builds[version], tuple(builds.values()))

    return release


def packaged(framework: str) -> list[str]:
    """The known releases that have a package."""
    return [version for version in MODULES[framework].KNOWN if (framework, version) not in UNPACKAGED]


def cases(framework: str, rows: tuple[Row, ...], scripts: Callable[[str], Any]) -> list[Any]:
    """The rows that a release tells, for each of its scripts."""
    return [
        pytest.param(version, script, told, id=f"{framework}-{version}-{script}")
        for version in packaged(framework)
        for script in scripts(version)
        if (told := [row for row in rows if row.name(version) and script in (row.scripts or (script,))])
    ]


# ----------------------------------------------------------------------------------------------------------- OpenRLHF

SUPERVISED = ("sft", "rm", "dpo")
RL = ("ppo", "ppo_ray")  # train_ppo.py, one process group; train_ppo_ray.py
RAY = ("ppo_ray",)
LORA = {"method": "lora"}
SAID = {"ppo_ray": {"placement": "separate"}}  # what makes a job that of the script


NEVER = {False: None}  # a switch that is off


def dotted(old: str, new: str, since: str = "0.3.6") -> dict[str, str]:
    """A flag that exists since a release, and got a dotted name with 0.10.2."""
    return {since: old, "0.10.2": new}


OPENRLHF = (
    Row("micro_batch", dotted("micro_train_batch_size", "train.micro_batch_size")),
    Row("global_batch", dotted("train_batch_size", "train.batch_size")),
    Row("seq_len", dotted("max_len", "data.max_len"), scripts=SUPERVISED),
    Row("sharding", dotted("zero_stage", "ds.zero_stage"), {2: "zero2"}),
    # a flag, off, that every example script sets; later three values, of which this is the first
    Row(
        "precision",
        {"0.3.6": "bf16", "0.9.2": "param_dtype", "0.10.2": "ds.param_dtype"},
        dict.fromkeys((False, "bf16"), "mixed"),
    ),
    Row("offload.optimizer", dotted("adam_offload", "ds.adam_offload")),
    Row(
        "checkpointing",
        dotted("gradient_checkpointing", "model.gradient_checkpointing_enable"),
        {False: "none"},
        scripts=SUPERVISED,
    ),
    Row(
        "checkpointing",
        dotted("gradient_checkpointing", "actor.gradient_checkpointing_enable"),
        {False: "none"},
        scripts=RL,
    ),
    Row(
        "reentrant",
        dotted("gradient_checkpointing_use_reentrant", "model.gradient_checkpointing_reentrant"),
        scripts=SUPERVISED,
    ),
    Row(
        "reentrant",
        dotted("gradient_checkpointing_use_reentrant", "actor.gradient_checkpointing_reentrant"),
        scripts=RL,
    ),
    Row(
        "attention",
        {"0.3.6": "flash_attn", "0.8.10": "attn_implementation", "0.10.2": "ds.attn_implementation"},
        {False: "eager", "flash_attention_2": "flash"},
    ),
    Row("packing", dotted("packing_samples", "ds.packing_samples"), scripts=("sft",)),
    Row("packing", dotted("packing_samples", "ds.packing_samples", "0.3.7"), scripts=("rm", "dpo")),
    Row("packing", dotted("packing_samples", "ds.packing_samples", "0.4.4"), scripts=RAY),
    # no adapter unless asked for; one that is asked for has the rank of the example scripts
    Row("lora.rank", dotted("lora_rank", "ds.lora.rank"), {0: None}),
    Row("lora.rank", dotted("lora_rank", "ds.lora.rank"), {0: 64}, LORA),
    Row("lora.targets", dotted("target_modules", "ds.lora.target_modules"), given=LORA),
    Row("lora.dropout", dotted("lora_dropout", "ds.lora.dropout"), given=LORA),
    Row("prompt_len", {"0.3.6": "prompt_max_len", "0.9.8": ""}, scripts=RL),
    Row("response_len", {"0.3.6": "generate_max_len", "0.9.8": ""}, scripts=RL),
    Row("prompt_len+response_len", {"0.9.8": "max_len", "0.10.2": "data.max_len"}, scripts=RL),
    Row("rollout.batch", dotted("rollout_batch_size", "rollout.batch_size"), scripts=RL),
    Row("rollout.enforce_eager", dotted("enforce_eager", "vllm.enforce_eager", "0.4.4"), scripts=RAY),
    Row("entropy_coeff", dotted("entropy_loss_coef", "actor.entropy_coef", "0.8.0"), {None: 0}, scripts=RAY),
    Row("max_tokens_per_gpu", dotted("use_dynamic_batch", "train.dynamic_batch_enable", "0.8.6"), NEVER, scripts=RAY),
    Row(
        "rollout.max_tokens_per_gpu",
        dotted("rollout_max_tokens_per_gpu", "rollout.max_tokens_per_gpu", "0.8.6"),
        scripts=RAY,
    ),
    Row("rollout.micro_batch", dotted("micro_rollout_batch_size", "rollout.micro_batch_size"), scripts=RL),
    Row("rollout.n", dotted("n_samples_per_prompt", "rollout.n_samples_per_prompt"), scripts=RL),
    Row("rollout.tensor_parallel", dotted("vllm_tensor_parallel_size", "vllm.tensor_parallel_size"), scripts=RAY),
    Row(
        "rollout.gpu_memory_utilization",
        dotted("vllm_gpu_memory_utilization", "vllm.gpu_memory_utilization", "0.5.8"),
        scripts=RAY,
    ),
    Row("rollout.sleep", dotted("vllm_enable_sleep", "vllm.enable_sleep", "0.5.8"), scripts=RAY),
    # no engine: Transformers generates; 0.6.2 has no example for that, and 0.7.1 cannot do it
    Row("rollout.engine", {"0.3.6": "vllm_num_engines", "0.6.2": ""}, {None: "hf"}, scripts=RAY),
    Row("rollout.engine", {"0.6.2": "vllm_num_engines", "0.10.2": "vllm.num_engines"}, {None: "vllm"}, scripts=RAY),
    Row("roles.reference.offload.parameters", dotted("ref_offload", "ref.offload"), {False: None}, scripts=("dpo",)),
    Row("roles.reference.offload.parameters", dotted("ref_reward_offload", "ref.offload"), {False: None}, scripts=RAY),
    # a coefficient above zero: there is a reference
    Row("roles.reference", dotted("init_kl_coef", "algo.kl.init_coef"), {0.01: None}, scripts=RL),
    Row("roles.critic", dotted("advantage_estimator", "algo.advantage.estimator", "0.5.1"), {"gae": None}, scripts=RL),
)


def scripts(version: str) -> tuple[str, ...]:
    """The command lines of a release; train_ppo.py ended with 0.6.1."""
    return (*SUPERVISED, *(RAY if at_least(version, "0.6.2") else RL))


@pytest.mark.parametrize(("version", "script", "rows"), cases("openrlhf", OPENRLHF, scripts))
def test_openrlhf_states_its_command_lines(released: Released, version: str, script: str, rows: list[Row]) -> None:
    release, path = released("openrlhf", version), f"openrlhf/cli/train_{script}.py"
    for row in rows:
        flag = row.name(version)
        stated = openrlhf.defaults(script.removesuffix("_ray"), version, {**SAID.get(script, {}), **row.given})
        compare(release, f"{path}: --{flag}", release.flag(path, flag), row, stated)


# What the trainer passes to vLLM beside, since it passes it: stated by `keeps`.
EAGER = Row("graphs", dotted("enforce_eager", "vllm.enforce_eager", "0.4.4"), {False: True})


@pytest.mark.parametrize(("version", "script", "rows"), cases("openrlhf", (EAGER,), lambda version: RAY))
def test_openrlhf_does_not_enforce_eager_mode(released: Released, version: str, script: str, rows: list[Row]) -> None:
    release, path, [row] = released("openrlhf", version), f"openrlhf/cli/train_{script}.py", rows
    flag = row.name(version)
    roles = {"actor": {"gpus": 1}, "critic": {"gpus": 1}}
    rollout = {"engine": "vllm", "gpus": 1}
    s = job(framework=f"openrlhf=={version}", task="ppo", gpus=3, placement="separate", rollout=rollout, roles=roles)
    serving = openrlhf.keeps(s).serving
    assert serving
    compare(release, f"{path}: --{flag}", release.flag(path, flag), row, asdict(serving))


@pytest.mark.parametrize("version", packaged("openrlhf"), ids=lambda v: f"openrlhf-{v}-pins")
def test_openrlhf_states_its_pins(released: Released, version: str) -> None:
    release, pins = released("openrlhf", version), openrlhf.RELEASES[version]
    found = {name: str(release.requires(name.replace("_", "-"), "vllm")) for name in pins._fields}
    assert found == {name: f"=={pin}" for name, pin in pins._asdict().items()}, f"{release.name}, METADATA"
    stated = openrlhf.defaults("ppo", version, {})
    for name, pin in pins._asdict().items():
        assert stated[f"versions.{name.replace('_', '-')}"] == pin.partition(".post")[0]


@pytest.mark.parametrize("version", packaged("openrlhf"), ids=lambda v: f"openrlhf-{v}-grad_dtype")
def test_openrlhf_states_in_what_gradients_accumulate(released: Released, version: str) -> None:
    """The flag says nothing, which the configuration for DeepSpeed makes fp32, or leaves to DeepSpeed: bf16."""
    release = released("openrlhf", version)
    [path] = [member for member in release.members if member.endswith("/deepspeed_utils.py")]
    told = {
        ast.unparse(value)
        for node in ast.walk(release.tree(path))
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and key.value == "grad_accum_dtype"
    }
    dtypes = {"grad_accum_dtype if grad_accum_dtype else 'fp32'": "fp32", "grad_accum_dtype": "bf16"}
    assert {dtypes[expression] for expression in told} == {openrlhf.defaults("sft", version, {})["grad_dtype"]}
    row = Row("grad_dtype", dotted("grad_accum_dtype", "ds.grad_accum_dtype"))
    for script in scripts(version):
        assert release.flag(f"openrlhf/cli/train_{script}.py", row.name(version)) is None


# --------------------------------------------------------------------------------------------------------------- verl

VERL_FILE = "verl/trainer/config/ppo_trainer.yaml"
ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
EIGHT = {"gpus": 8}

VERL = (
    Row("prompt_len", {"0.2": "data.max_prompt_length"}),
    Row("response_len", {"0.2": "data.max_response_length"}),
    Row("rollout.batch", {"0.2": "data.train_batch_size"}),
    Row("rollout.n", {"0.2": f"{ROLLOUT}.n"}),
    Row("micro_batch", {"0.2": f"{ACTOR}.ppo_micro_batch_size_per_gpu"}, {None: 1}),  # must be given: the smallest
    Row("global_batch", {"0.2": f"{ACTOR}.ppo_mini_batch_size"}),  # prompts, with n = 1
    Row("precision", {"0.6.0": f"{ACTOR}.fsdp_config.model_dtype"}, {"fp32": "fsdp-mixed"}),
    Row("sharding", {"0.2": f"{ACTOR}.strategy"}, {"fsdp": "fsdp1"}),
    Row("offload.optimizer", {"0.2": f"{ACTOR}.fsdp_config.optimizer_offload"}),
    Row("offload.parameters", {"0.2": f"{ACTOR}.fsdp_config.param_offload"}),
    Row("checkpointing", {"0.2": f"{MODEL}.enable_gradient_checkpointing"}, {True: "full"}),
    Row("loss", {"0.4.0": f"{MODEL}.use_fused_kernels"}, {False: "full"}),
    Row("packing", {"0.2": f"{MODEL}.use_remove_padding"}),
    # the critic's own key, to be stated where it is not what the actor's says
    Row("roles.critic.packing", {"0.2": "critic.model.use_remove_padding", "0.7.0": ""}, {False: None}),
    Row("roles.critic.packing", {"0.7.0": "critic.model.use_remove_padding"}, {True: None}),
    Row("rollout.engine", {"0.2": f"{ROLLOUT}.name"}, {"???": "vllm"}),  # since 0.6.0 it must be given
    Row("rollout.tensor_parallel", {"0.2": f"{ROLLOUT}.tensor_model_parallel_size"}, given=EIGHT),
    Row("rollout.gpu_memory_utilization", {"0.2": f"{ROLLOUT}.gpu_memory_utilization"}),
    Row("rollout.sleep", {"0.2": f"{ROLLOUT}.free_cache_engine"}),
    Row("entropy_coeff", {"0.2": f"{ACTOR}.entropy_coeff"}),
    Row("entropy_from_logits_with_chunking", {"0.5.0": f"{ACTOR}.entropy_from_logits_with_chunking"}),
    Row("rollout.max_model_len", {"0.4.0": f"{ROLLOUT}.max_model_len"}),
    Row("rollout.max_num_seqs", {"0.6.0": f"{ROLLOUT}.max_num_seqs"}),  # until then not passed
    Row("rollout.max_num_batched_tokens", {"0.2": f"{ROLLOUT}.max_num_batched_tokens"}),
    Row("max_tokens_per_gpu", {"0.2": f"{ACTOR}.use_dynamic_bsz"}, NEVER),
    Row(
        "roles.critic.max_tokens_per_gpu",
        {"0.2": "critic.ppo_max_token_len_per_gpu"},
        given={"max_tokens_per_gpu": 16_384},
    ),
    Row("rollout.micro_batch", {"0.2": f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"}),  # must be given
    Row("rollout.layered_summon", {"0.4.0": f"{ROLLOUT}.layered_summon"}),
    Row("rollout.enforce_eager", {"0.2": f"{ROLLOUT}.enforce_eager"}),
    Row("roles.critic", {"0.2": "algorithm.adv_estimator"}, {"gae": None}),
    Row("roles.reference", {"0.4.0": f"{ACTOR}.use_kl_loss"}, {False: "none"}),
    Row("roles.reference", {"0.4.0": "algorithm.use_kl_in_reward"}, {False: "none"}),
    Row(
        "roles.reference.precision", {"0.6.0": "actor_rollout_ref.ref.fsdp_config.model_dtype"}, {"fp32": "fsdp-mixed"}
    ),
    Row("roles.reward", {"0.2": "reward_model.enable", "0.7.1": "reward.reward_model.enable"}, {False: "none"}),
    Row("lora.rank", {"0.4.0": f"{MODEL}.lora_rank"}, {0: None}),
    Row("lora.rank", {"0.4.0": f"{MODEL}.lora_rank"}, {0: 64}, LORA),  # examples set 32 to 128
    Row("lora.targets", {"0.4.0": f"{MODEL}.target_modules"}, given=LORA),
)


@pytest.mark.parametrize(("version", "script", "rows"), cases("verl", VERL, lambda version: ("ppo",)))
def test_verl_states_its_configuration(released: Released, version: str, script: str, rows: list[Row]) -> None:
    release = released("verl", version)
    for row in rows:
        key, stated = row.name(version), verl.defaults(script, version, row.given)
        compare(release, f"{VERL_FILE}: {key}", release.key(VERL_FILE, key), row, stated)


VERL_SFT_FILE = "verl/trainer/config/sft_trainer_engine.yaml"
VERL_SFT = (
    Row("seq_len", {"0.7.1": "data.max_length"}),
    Row("global_batch", {"0.7.1": "data.train_batch_size"}),
    Row("max_tokens_per_gpu", {"0.7.1": "data.max_token_len_per_gpu"}),  # of which use_dynamic_bsz makes use
    Row("sharding", {"0.7.1": "engine.strategy"}, {"fsdp": "fsdp1"}),
    Row("offload.optimizer", {"0.7.1": "engine.optimizer_offload"}),
    Row("offload.parameters", {"0.7.1": "engine.param_offload"}),
    Row("checkpointing", {"0.7.1": "model.enable_gradient_checkpointing"}, {True: "full"}),
    Row("loss", {"0.7.1": "model.use_fused_kernels"}, {False: "full"}),
    Row("packing", {"0.7.1": "model.use_remove_padding"}),
    Row("lora.targets", {"0.7.1": "model.target_modules"}, given=LORA),
)


@pytest.mark.parametrize(("version", "script", "rows"), cases("verl", VERL_SFT, lambda version: ("sft",)))
def test_verl_states_its_configuration_of_sft(released: Released, version: str, script: str, rows: list[Row]) -> None:
    release = released("verl", version)
    assert release.key(VERL_SFT_FILE, "data.use_dynamic_bsz") is True
    for row in rows:
        key, stated = row.name(version), verl.defaults(script, version, row.given)
        compare(release, f"{VERL_SFT_FILE}: {key}", release.key(VERL_SFT_FILE, key), row, stated)


# What the trainer passes to vLLM beside: stated by `keeps`.
SERVING = (
    Row("max_num_seqs", {"0.6.0": f"{ROLLOUT}.max_num_seqs"}),  # until then not passed
    Row("max_num_batched_tokens", {"0.2": f"{ROLLOUT}.max_num_batched_tokens"}),
    Row("graphs", {"0.2": f"{ROLLOUT}.enforce_eager"}, {True: False, False: True}),
)


@pytest.mark.parametrize(("version", "script", "rows"), cases("verl", SERVING, lambda version: ("ppo",)))
def test_verl_states_what_it_passes_to_vllm(released: Released, version: str, script: str, rows: list[Row]) -> None:
    release, serving = (
        released("verl", version),
        verl.keeps(job(framework=f"verl=={version}", task=script, gpus=8)).serving,
    )
    assert serving
    for row in rows:
        key = row.name(version)
        compare(release, f"{VERL_FILE}: {key}", release.key(VERL_FILE, key), row, asdict(serving))


@pytest.mark.parametrize("version", packaged("verl"), ids=lambda v: f"verl-{v}-pins")
def test_verl_states_libraries_that_it_allows(released: Released, version: str) -> None:
    release, pins = released("verl", version), verl.RELEASES[version]
    # torch is named from 0.9.1 on; before, vLLM decides
    for name in ("vllm", "transformers", *(["torch"] if at_least(version, "0.9.1") else [])):
        pin, allowed = getattr(pins, name), release.requires(name, "vllm")
        assert allowed.contains(pin), f"{release.name}, METADATA: {name} {allowed}; stated: {pin}"
        assert verl.defaults("ppo", version, {})[f"versions.{name}"] == pin


# ---------------------------------------------------------------------------------------------------------------- TRL

# Fields by their module. per_device_train_batch_size and optim are in none: they are Transformers' TrainingArguments.
SFT, DPO, REWARD, KTO, GRPO, BASE, MODEL_CONFIG = (
    f"trainer/{name}_config" for name in ("sft", "dpo", "reward", "kto", "grpo", "base", "model")
)
UTILS, SERVE, PPO = "trainer/utils", "scripts/vllm_serve", "experimental/ppo/ppo_config"
SERVED = {"gpus": 2, "placement": "separate", "rollout.gpus": 1}
AUTOCAST, LENGTH = {None: "autocast"}, {None: 512}
FULL = {True: "full"}


def of(name: str, **modules: str) -> dict[str, str]:
    """A field by the modules that have it: `since_0_14_0="trainer/dpo_config"`; "" where none has."""
    named = {since.removeprefix("since_").replace("_", "."): module for since, module in modules.items()}
    return {since: f"{module}.{name}" if module else "" for since, module in named.items()}


def moved(kin: str, name: str, first: str, to: str) -> dict[str, str]:
    """A field of a trainer that became experimental with the release `to`."""
    return {first: f"trainer/{kin}_config.{name}", to: f"experimental/{kin}/{kin}_config.{name}"}


ORPO = {"seq_len": "max_length", "lora.dropout": "disable_dropout"}
TRL = (
    Row("seq_len", of("max_seq_length", since_0_15_0=SFT, since_0_16_0="", ), scripts=("sft",)),
    Row("seq_len", of("max_seq_length", since_0_9_2=SFT, since_0_15_0=""), {None: 1024}, scripts=("sft",)),
    Row("seq_len", of("max_length", since_0_16_0=SFT), scripts=("sft",)),
    Row("seq_len", of("max_length", since_0_9_2=DPO), LENGTH, scripts=("dpo",)),
    Row("seq_len", of("max_length", since_0_7_11=REWARD), LENGTH, scripts=("rm",)),
    Row("seq_len", of("max_length", since_0_8_0=KTO, since_0_26_0="", since_1_10_0=KTO), LENGTH, scripts=("kto",)),
    Row("seq_len", moved("orpo", "max_length", "0.8.2", "0.26.0"), LENGTH, scripts=("orpo",)),
    Row("seq_len", moved("cpo", "max_length", "0.9.6", "0.26.0"), LENGTH, scripts=("simpo",)),
    Row("packing", of("packing", since_0_9_2=SFT), scripts=("sft",)),
    Row("padding_free", of("padding_free", since_0_24_0=SFT), scripts=("sft",)),
    Row("offload.activations", of("activation_offloading", since_0_18_0=SFT), NEVER, scripts=("sft",)),
    # what TrainingArguments have until a configuration says otherwise
    Row("checkpointing", of("gradient_checkpointing", since_0_22_0=SFT, since_0_29_0=BASE), FULL, scripts=("sft",)),
    Row("checkpointing", of("gradient_checkpointing", since_0_22_0=DPO, since_0_29_0=BASE), FULL, scripts=("dpo",)),
    Row("checkpointing", of("gradient_checkpointing", since_0_22_0=REWARD, since_0_29_0=BASE), FULL, scripts=("rm",)),
    Row("checkpointing", of("gradient_checkpointing", since_0_22_0=GRPO, since_0_29_0=BASE), FULL, scripts=("grpo",)),
    Row("precision", of("bf16", since_0_19_0=SFT, since_0_29_0=BASE), AUTOCAST, scripts=("sft",)),
    Row("precision", of("bf16", since_0_19_0=DPO, since_0_29_0=BASE), AUTOCAST, scripts=("dpo",)),
    Row("precision", of("bf16", since_0_19_0=REWARD, since_0_29_0=BASE), AUTOCAST, scripts=("rm",)),
    Row("precision", of("bf16", since_0_19_0=GRPO, since_0_29_0=BASE), AUTOCAST, scripts=("grpo",)),
    # fp32, as Transformers 4 loads where nothing is asked
    Row("precision", of("torch_dtype", since_0_7_11=MODEL_CONFIG, since_0_19_0=""), {None: "fp32"}),
    Row("precision", of("torch_dtype", since_0_19_0=MODEL_CONFIG, since_0_27_0=""), AUTOCAST),
    Row("precision", of("dtype", since_0_27_0=MODEL_CONFIG), {"float32": "autocast"}),
    Row("attention", of("attn_implementation", since_0_7_11=MODEL_CONFIG), {None: "sdpa"}),  # Transformers' choice
    Row(
        "double_quantization",
        of("use_bnb_nested_quant", since_0_7_11=MODEL_CONFIG),
        given={**LORA, "method": "qlora"},
    ),
    Row("lora.rank", of("lora_r", since_0_7_11=MODEL_CONFIG), given=LORA),
    Row("lora.dropout", of("lora_dropout", since_0_7_11=MODEL_CONFIG), given=LORA, scripts=("sft", "grpo")),
    Row("lora.dropout", of("lora_dropout", since_0_7_11=MODEL_CONFIG, since_0_14_0=""), {}, LORA, ("rm",)),
    Row("lora.dropout", of("disable_dropout", since_0_14_0=REWARD), {True: 0}, LORA, ("rm",)),
    Row("lora.dropout", of("disable_dropout", since_0_9_2=DPO), {True: 0}, LORA, ("dpo",)),
    Row("lora.dropout", of("disable_dropout", since_0_12_0=KTO, since_0_26_0="", since_1_10_0=KTO),
        {True: 0}, LORA, ("kto",)),
    Row("lora.dropout", moved("orpo", "disable_dropout", "0.8.2", "0.26.0"), {True: 0}, LORA, ("orpo",)),
    Row("lora.dropout", moved("cpo", "disable_dropout", "0.9.6", "0.26.0"), {True: 0}, LORA, ("simpo",)),
    Row("lora.dropout", moved("gkd", "disable_dropout", "0.11.0", "0.26.0"), {True: 0}, LORA, ("gkd",)),
    Row("on_policy", moved("gkd", "lmbda", "0.11.0", "0.26.0"), scripts=("gkd",)),
    Row("lora.targets", of("lora_target_modules", since_0_7_11=MODEL_CONFIG), {None: "all-linear"}, LORA),
    Row("prompt_len", of("max_prompt_length", since_0_14_0=GRPO, since_0_26_0=""), scripts=("grpo",)),
    Row("response_len", of("max_completion_length", since_0_14_0=GRPO), scripts=("grpo",)),
    Row("placement", of("vllm_mode", since_1_0_0=GRPO), {"colocate": None}, scripts=("grpo",)),  # need not be said
    Row("rollout.engine", of("use_vllm", since_0_14_0=GRPO), {False: "hf"}, scripts=("grpo",)),
    Row("rollout.n", of("num_generations", since_0_14_0=GRPO), scripts=("grpo",)),
    Row("rollout.sleep", of("vllm_enable_sleep_mode", since_0_23_0=GRPO), scripts=("grpo",)),
    Row("rollout.tensor_parallel", of("vllm_tensor_parallel_size", since_0_18_0=GRPO), scripts=("grpo",)),
    Row("rollout.tensor_parallel", of("tensor_parallel_size", since_0_16_0=SERVE), {}, SERVED, ("grpo",)),
    Row(
        "rollout.gpu_memory_utilization",
        of("vllm_gpu_memory_utilization", since_0_14_0=GRPO, since_0_16_0="", since_0_18_0=GRPO),
        scripts=("grpo",),
    ),
    Row(
        "rollout.gpu_memory_utilization", of("gpu_memory_utilization", since_0_16_0=SERVE), {}, SERVED, ("grpo",)
    ),
    Row("rollout.max_model_len", of("vllm_max_model_length", since_0_26_0=GRPO), scripts=("grpo",)),
    Row("rollout.max_model_len", of("max_model_len", since_0_16_0=SERVE), {}, SERVED, ("grpo",)),
    Row("micro_batch", of("per_device_train_batch_size", since_0_14_0=GRPO, since_0_15_0=""), {1: 8}, {}, ("grpo",)),
    Row("roles.reference", of("beta", since_0_14_0=GRPO), {0.04: None, 0.0: "none"}, scripts=("grpo",)),
    Row("response_len", of("response_length", since_0_12_0=UTILS, since_0_27_0=PPO), scripts=("ppo",)),
    Row(
        "rollout.micro_batch",
        of("local_rollout_forward_batch_size", since_0_12_0=UTILS, since_0_27_0=PPO),
        scripts=("ppo",),
    ),
)  # fmt: skip


@pytest.mark.parametrize(("version", "script", "rows"), cases("trl", TRL, trl.tasks))
def test_trl_states_its_configurations(released: Released, version: str, script: str, rows: list[Row]) -> None:
    release = released("trl", version)
    for row in rows:
        module, _, name = row.name(version).rpartition(".")
        path, stated = f"trl/{module}.py", trl.defaults(script, version, row.given)
        compare(release, f"{path}: {name}", release.field(path, name), row, stated)


@pytest.mark.parametrize("library", ["vllm", "transformers", "deepspeed", "accelerate"])
@pytest.mark.parametrize("version", packaged("trl"))
def test_trl_states_libraries_that_it_allows(released: Released, version: str, library: str) -> None:
    release, pin = released("trl", version), getattr(trl.RELEASES[version], library)
    assert trl.defaults("sft", version, {}).get(f"versions.{library}", pin) == pin
    if not pin:
        assert not any("vllm" in name for name in release.members), f"{release.name} knows vLLM"
        return
    allowed = release.requires(library, library)
    assert allowed.contains(pin), f"{release.name}, METADATA: {library} {allowed}; stated: {pin}"


# What no field tells, as it is in a trainer's code: the words that each release's module has, or no longer.
CODE = {
    "trainer/dpo_trainer": {
        "get_batch_logps": ("0.7.11", "0.12.0"),
        "log_softmax(-1)": ("0.7.11", "0.15.0"),
        "nll_loss = cross_entropy_loss(all_logits[:len_chosen]": ("0.9.6", "0.12.0"),
        'output["mean_chosen_logits"]': ("0.12.0", "0.29.0"),
        'model_kwargs["output_hidden_states"] = True': ("0.19.0", "0.29.0"),
        "outputs.logits[..., :-1, :].contiguous()": ("0.29.0", "1.6.0"),
        "torch.roll(input_ids, shifts=-1, dims=1)": ("0.14.0", "0.29.0"),
        "create_reference_model(model)": ("0.7.11", "0.29.0"),
        "fused_lm_head=True": ("1.15.0", ""),
    },
    "trainer/sft_trainer": {
        "mean_token_accuracy": ("0.15.0", ""),
        "gather_for_metrics(shift_logits)": ("0.15.0", "0.15.2"),
        "entropy_from_logits(": ("0.22.0", "1.15.0"),
        "patch_chunked_ce_lm_head(": ("1.6.0", "1.15.0"),
        "fused_lm_head=True": ("1.15.0", ""),
    },
    "trainer/reward_trainer": {'model(\n            input_ids=inputs["input_ids_chosen"]': ("0.7.11", "0.24.0")},
    "trainer/grpo_trainer": {
        "log_softmax(dim=-1)": ("0.14.0", "0.15.0"),
        "logits.div_(self.temperature)": ("1.0.0", "1.10.0"),
        "split_tensor_dict(": ("0.17.0", ""),
        'vllm_mode == "colocate"': ("0.18.0", ""),
        "vllm_importance_sampling_correction": ("0.23.0", ""),
    },
    "trainer/utils": {
        "def selective_log_softmax": ("0.15.0", ""),
        "chunk_size: int = 128": ("0.23.0", ""),
        "_fused_logprob_entropy(": ("1.14.0", ""),
    },
}


@pytest.mark.parametrize("version", packaged("trl"))
def test_trl_has_in_its_code_what_is_stated_of_it(released: Released, version: str) -> None:
    """The turning points of `calc.frameworks.trl.paths` and `calc.frameworks.trl.rl`."""
    release = released("trl", version)
    for module, words in CODE.items():
        if (path := f"trl/{module}.py") not in release.members:
            continue
        text = release.text(path)
        for word, span in words.items():
            first, end = span
            there = at_least(version, first) and not (end and at_least(version, end))
            assert (word in text) is there, f"{release.name}, {path}: {word} is {'not ' * there}there"


@pytest.mark.parametrize("version", packaged("trl"))
def test_trl_has_the_trainers_of_its_tasks_and_no_others(released: Released, version: str) -> None:
    """A class in `trl.trainer` or `trl.experimental`; PPOTrainer means another one before 0.12."""
    release = released("trl", version)
    kin = {"rm": "reward", "simpo": "cpo"}
    for task in trl.TASKS:
        name = kin.get(task, task)
        folders = "trainer", f"experimental/{name}"
        there = any(f"trl/{folder}/{name}_trainer.py" in release.members for folder in folders)
        if task == "ppo":
            there = there and at_least(version, "0.12.0")
        if task == "simpo":
            there = there and at_least(version, "0.9.6")  # loss_type simpo
        assert there is (task in trl.tasks(version)), f"{release.name}: {task}"


# ---------------------------------------------------------------------------------------------------- nothing is left

# What no flag, key or field tells: it is in a release's code, in its examples, or in a library beneath it.
IN_CODE = {"optimizer_impl", "logprob", "lora.dtype", "lora.units", "grad_dtype", "optimizer"}
UNTOLD = {
    "openrlhf": IN_CODE | {"offload.parameters", "loss"},
    "verl": IN_CODE
    | {"no_sync", "attention", "expandable_segments", "lora.dropout", "roles.reference.offload.parameters"}
    | {"counts_prompts"}
    | {"rollout.max_tokens_per_gpu"}  # a reference to the actor's
    | {"roles.reference.micro_batch", "roles.reward.precision", "roles.reward.offload.parameters"},
    "trl": IN_CODE
    | {"global_batch", "sharding", "offload.optimizer", "offload.parameters", "loss"}
    | {
        "no_sync",
        "reentrant",
        "trainer",
        "rollout.batch",
        "roles.reward",
        "roles.reward.precision",
        "roles.reward.sharding",
        "roles.teacher.precision",
        "roles.teacher.sharding",
        "roles.reference.precision",
        "roles.reference.sharding",
        "roles.critic.method",
    },
}


@pytest.mark.parametrize(("framework", "rows"), [("openrlhf", OPENRLHF), ("verl", VERL), ("trl", TRL)])
def test_every_default_is_read_somewhere(framework: str, rows: tuple[Row, ...]) -> None:
    """Libraries have tests of their own."""
    stated = {
        field
        for version in MODULES[framework].RELEASES
        for task in MODULES[framework].TASKS
        for given in ({}, LORA)
        for field in MODULES[framework].defaults(task, version, given)
        if not field.startswith("versions.")
    }
    told = {part for row in rows for part in row.field.split("+")}
    assert stated - told == UNTOLD[framework]


def test_releases_without_a_package_are_known_ones() -> None:
    """The lists above name releases that the calculator knows."""
    known = {(name, version) for name, module in MODULES.items() for version in module.KNOWN}
    assert {*BUILDS, *UNPACKAGED} <= known
