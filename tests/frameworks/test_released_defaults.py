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
from released import Release, Unreachable, read

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
    """Where releases tell one of our fields.

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
        """What `version` calls it; "" where it does not yet tell, or no longer."""
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
    folder = pytestconfig.cache.mkdir("released")

    @cache
    def release(framework: str, version: str) -> Release:
        builds = {known: BUILDS.get((framework, known), known) for known in packaged(framework)}
        try:
            return read(folder, framework, builds[version], tuple(builds.values()))
        except Unreachable as reason:
            pytest.skip(f"the registry cannot be reached: {reason}")

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
SFT, DPO, REWARD, GRPO, BASE, MODEL_CONFIG = (
    f"trainer/{name}_config" for name in ("sft", "dpo", "reward", "grpo", "base", "model")
)
SERVED = {"gpus": 2, "placement": "separate", "rollout.gpus": 1}


def of(module: str, name: str) -> dict[str, str]:
    """A field of the only release that is known."""
    return {"1.16.0": f"{module}.{name}"}


TRL = (
    Row("seq_len", of(SFT, "max_length"), scripts=("sft",)),
    Row("seq_len", of(DPO, "max_length"), scripts=("dpo",)),
    Row("seq_len", of(REWARD, "max_length"), scripts=("rm",)),
    Row("packing", of(SFT, "packing"), scripts=("sft",)),
    Row("checkpointing", of(BASE, "gradient_checkpointing"), {True: "full"}),
    Row("precision", of(BASE, "bf16"), {None: "autocast"}),  # __post_init__: true unless fp16 is
    Row("precision", of(MODEL_CONFIG, "dtype"), {"float32": "autocast"}),
    Row("attention", of(MODEL_CONFIG, "attn_implementation"), {None: "sdpa"}),  # Transformers' choice
    Row("double_quantization", of(MODEL_CONFIG, "use_bnb_nested_quant"), given={**LORA, "method": "qlora"}),
    Row("lora.rank", of(MODEL_CONFIG, "lora_r"), given=LORA),
    Row("lora.dropout", of(MODEL_CONFIG, "lora_dropout"), given=LORA, scripts=("sft", "grpo")),
    Row("lora.dropout", of(REWARD, "disable_dropout"), {True: 0}, LORA, ("rm",)),
    Row("lora.dropout", of(DPO, "disable_dropout"), {True: 0}, LORA, ("dpo",)),
    Row("lora.dropout", of("trainer/kto_config", "disable_dropout"), {True: 0}, LORA, ("kto",)),
    Row("lora.dropout", of("experimental/orpo/orpo_config", "disable_dropout"), {True: 0}, LORA, ("orpo",)),
    Row("lora.dropout", of("experimental/cpo/cpo_config", "disable_dropout"), {True: 0}, LORA, ("simpo",)),
    Row("lora.dropout", of("experimental/gkd/gkd_config", "disable_dropout"), {True: 0}, LORA, ("gkd",)),
    Row("on_policy", of("experimental/gkd/gkd_config", "lmbda"), scripts=("gkd",)),
    Row("seq_len", of("trainer/kto_config", "max_length"), scripts=("kto",)),
    Row("seq_len", of("experimental/orpo/orpo_config", "max_length"), scripts=("orpo",)),
    Row("seq_len", of("experimental/cpo/cpo_config", "max_length"), scripts=("simpo",)),
    Row("lora.targets", of(MODEL_CONFIG, "lora_target_modules"), {None: "all-linear"}, LORA),
    Row("response_len", of(GRPO, "max_completion_length"), scripts=("grpo",)),
    Row("placement", of(GRPO, "vllm_mode"), {"colocate": None}, scripts=("grpo",)),  # what no framework need say
    Row("rollout.engine", of(GRPO, "use_vllm"), {False: "hf"}, scripts=("grpo",)),
    Row("rollout.n", of(GRPO, "num_generations"), scripts=("grpo",)),
    Row("rollout.sleep", of(GRPO, "vllm_enable_sleep_mode"), scripts=("grpo",)),
    Row("rollout.tensor_parallel", of(GRPO, "vllm_tensor_parallel_size"), scripts=("grpo",)),
    Row("rollout.tensor_parallel", of("scripts/vllm_serve", "tensor_parallel_size"), {}, SERVED, ("grpo",)),
    Row("rollout.gpu_memory_utilization", of(GRPO, "vllm_gpu_memory_utilization"), scripts=("grpo",)),
    Row("rollout.gpu_memory_utilization", of("scripts/vllm_serve", "gpu_memory_utilization"), {}, SERVED, ("grpo",)),
    Row("roles.reference", of(GRPO, "beta"), {0.0: "none"}, scripts=("grpo",)),
)


@pytest.mark.parametrize(("version", "script", "rows"), cases("trl", TRL, lambda version: trl.TASKS))
def test_trl_states_its_configurations(released: Released, version: str, script: str, rows: list[Row]) -> None:
    release = released("trl", version)
    for row in rows:
        module, _, name = row.name(version).rpartition(".")
        path, stated = f"trl/{module}.py", trl.defaults(script, version, row.given)
        compare(release, f"{path}: {name}", release.field(path, name), row, stated)


@pytest.mark.parametrize("library", ["vllm", "transformers", "deepspeed"])
@pytest.mark.parametrize("version", packaged("trl"))
def test_trl_states_libraries_that_it_allows(released: Released, version: str, library: str) -> None:
    release, pin = released("trl", version), trl.defaults("grpo", version, {})[f"versions.{library}"]
    allowed = release.requires(library, library)
    assert allowed.contains(pin), f"{release.name}, METADATA: {library} {allowed}; stated: {pin}"


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
    | {"micro_batch", "global_batch", "sharding", "offload.optimizer", "offload.parameters", "loss", "prompt_len"}
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
