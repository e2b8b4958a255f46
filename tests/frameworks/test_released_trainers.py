"""Every default that `calc.frameworks.torch.trainers` states, beside what the released package says of itself.

As `test_released_defaults.py` does for the frameworks: fields of dataclasses and of pydantic's models, keys of recipes.
Skipped where the registry cannot be reached; what a package does not hold, or holds otherwise, fails.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import pytest
import yaml
from released import LOADER, Release, read_or_skip

from calc.base.versions import at_least
from calc.catalog.catalog import load
from calc.frameworks.releases import Default, Table
from calc.frameworks.torch import torch
from calc.frameworks.torch.trainers import (
    torchtune,
    unsloth,
)
from calc.frameworks.torch.trainers.registry import REINFORCES, RELEASED
from calc.launch.unsloth import PADS

Released = Callable[[str, str], Release]
MODULES: Mapping[str, Any] = RELEASED
PACKAGES = {"megatron-swift": "ms_swift"}  # where a trainer is a part of a package with another name
# where the modules lie in the wheel that the sources' file names are relative to
ROOTS = {"llamafactory": "llamafactory/", "axolotl": "axolotl/", "ms-swift": "swift/", "torchtitan": "torchtitan/",
         "megatron-swift": "swift/megatron/"}  # fmt: skip
LORA, QLORA, EIGHT = {"method": "lora"}, {"method": "qlora"}, {"gpus": 8}


class Row(NamedTuple):
    """The place where a trainer's releases state one of our fields: file and name, by the first release that has it
    there.

    A name is that of a class and its field, of a field, or of a key; `means`: their word in ours; `given`: what a user
    says to get the field.
    """

    field: str
    told: Mapping[str, str]
    means: Mapping[Any, Any] = {}
    given: Mapping[str, Any] = {}
    task: str = "sft"


@pytest.fixture(scope="session")
def released(pytestconfig: pytest.Config) -> Released:
    """A release by trainer and version, fetched once and kept in pytest's cache."""

    @cache
    def release(trainer: str, version: str) -> Release:
        package = PACKAGES.get(trainer, trainer.replace("-", "_"))
        return read_or_skip(pytestconfig, package, version, tuple(MODULES[trainer].RELEASES))

    return release


def told(release: Release, place: str) -> Any:
    """The value at a place of a release: the field of a module, of a class in it, or the key of a recipe."""
    path, _, name = place.partition(":")
    if path.endswith(".yaml"):
        found: Any = yaml.load(release.text(path), Loader=LOADER)
        for part in name.split("."):
            found = found[part]
        return found
    if "." not in name:
        return release.field(path, name)
    within, _, name = name.partition(".")
    [node] = [n for n in ast.walk(release.tree(path)) if isinstance(n, ast.ClassDef) and n.name == within]
    [value] = [n.value for n in node.body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == name]
    assert value
    return ast.literal_eval(value)


def stated(trainer: str, version: str, row: Row) -> Any:
    """The value stated for a row's field in one release."""
    given = {"trainer": trainer, f"versions.{trainer}": version, **row.given}
    return torch.defaults(row.task, torch.KNOWN[-1], given)[row.field]


HPARAMS = "llamafactory/hparams"
SCHEMAS = "axolotl/utils/schemas"
OLD, NEW = "swift/llm/argument", "swift/arguments"
RECIPES = "recipes/configs/llama3_1"
CLI = "unsloth_cli/config.py"
ENGINE, MIXIN = (
    f"swift/rlhf_trainers/args_mixin.py:{name}" for name in ("VllmArguments", "RolloutTrainerArgumentsMixin")
)
ENGINES = {"gpu_memory_utilization": "gpu_memory_utilization", "tensor_parallel": "tensor_parallel_size",
           "max_model_len": "max_model_len"}  # fmt: skip


def field(path: str, since: str) -> dict[str, str]:
    """One place, since the first release that is known."""
    return {since: path}


def swift(old: str, new: str) -> dict[str, str]:
    """A place of ms-swift 3.9, and since 4.0."""
    return {"3.9.0": old, "4.6.0": new}


def megatron(name: str, within: str = "MegatronArguments") -> dict[str, str]:
    """A field of ms-swift's Megatron arguments, which have moved with 4.0."""
    of = f"{within}.{name}"
    return {
        "3.12.0": f"swift/megatron/argument/megatron_args.py:{of}",
        "4.6.0": f"swift/megatron/arguments/megatron_args.py:{of}",
    }


def titan(of: str, name: str) -> dict[str, str]:
    """A place of torchtitan, whose configuration has moved twice."""
    return {
        "0.1.0": f"torchtitan/config_manager.py:{of}.{name}",
        "0.2.2": f"torchtitan/config/job_config.py:{of}.{name}",
        "0.3.0": f"torchtitan/config/configs.py:{of}Config.{name}",
    }


ROWS: Mapping[str, tuple[Row, ...]] = {
    "llamafactory": (
        Row("seq_len", field(f"{HPARAMS}/data_args.py:cutoff_len", "0.9.0")),
        Row(
            "checkpointing",
            field(f"{HPARAMS}/model_args.py:disable_gradient_checkpointing", "0.9.0"),
            {False: "full"},
        ),
        Row("loss", field(f"{HPARAMS}/model_args.py:enable_liger_kernel", "0.9.0"), {False: "full"}),
        Row("packing", field(f"{HPARAMS}/data_args.py:packing", "0.9.0"), {None: False}),
        Row("packing", field(f"{HPARAMS}/data_args.py:packing", "0.9.0"), {None: True}, task="pretrain"),
        Row("lora.rank", field(f"{HPARAMS}/finetuning_args.py:lora_rank", "0.9.0"), {}, LORA),
        Row("lora.dropout", field(f"{HPARAMS}/finetuning_args.py:lora_dropout", "0.9.0"), {}, LORA),
        Row("lora.targets", field(f"{HPARAMS}/finetuning_args.py:lora_target", "0.9.0"), {"all": "all-linear"}, LORA),
        Row("double_quantization", field(f"{HPARAMS}/model_args.py:double_quantization", "0.9.0"), {}, QLORA),
    ),
    "axolotl": (
        Row("seq_len", field(f"{SCHEMAS}/config.py:sequence_len", "0.19.0")),
        Row("micro_batch", field(f"{SCHEMAS}/training.py:micro_batch_size", "0.19.0")),
        Row("global_batch", field(f"{SCHEMAS}/training.py:gradient_accumulation_steps", "0.19.0")),
        Row("optimizer", field(f"{SCHEMAS}/training.py:optimizer", "0.19.0"), {"adamw_torch_fused": "adamw"}),
        Row("checkpointing", field(f"{SCHEMAS}/config.py:gradient_checkpointing", "0.19.0"), {False: "none"}),
        Row("attention", field(f"{SCHEMAS}/config.py:attn_implementation", "0.19.0"), {None: "sdpa"}),
        Row("packing", field(f"{SCHEMAS}/config.py:sample_packing", "0.19.0"), {None: False}),
        Row("lora.dropout", field(f"{SCHEMAS}/peft.py:lora_dropout", "0.19.0"), {}, LORA),
    ),
    "ms-swift": (
        Row(
            "micro_batch",
            field("swift/trainers/arguments.py:per_device_train_batch_size", "3.9.0"),
        ),
        Row(
            "checkpointing",
            field("swift/trainers/arguments.py:gradient_checkpointing", "3.9.0"),
            {True: "full"},
        ),
        Row(
            "attention",
            swift(f"{OLD}/base_args/model_args.py:attn_impl", f"{NEW}/base_args/model_args.py:attn_impl"),
            {None: "sdpa"},
        ),
        Row("on_policy", swift(*(f"{at}/rlhf_args.py:lmbda" for at in (OLD, NEW))), task="gkd"),
        Row("packing", swift(f"{OLD}/base_args/base_args.py:packing", f"{NEW}/base_args/base_args.py:packing")),
        Row("padding_free", swift(*(f"{at}/base_args/template_args.py:padding_free" for at in (OLD, NEW)))),
        Row("lora.rank", swift(f"{OLD}/tuner_args.py:lora_rank", f"{NEW}/tuner_args.py:lora_rank"), {}, LORA),
        Row("lora.dropout", swift(f"{OLD}/tuner_args.py:lora_dropout", f"{NEW}/tuner_args.py:lora_dropout"), {}, LORA),
        Row(
            "double_quantization",
            swift(*(f"{at}/base_args/quant_args.py:bnb_4bit_use_double_quant" for at in (OLD, NEW))),
            {},
            QLORA,
        ),
        Row("prompt_len", swift(*(f"{at}/base_args/template_args.py:max_length" for at in (OLD, NEW))), {None: 512}, {},
            "grpo"),
        Row("response_len", swift(*(f"{at}/rlhf_args.py:max_completion_length" for at in (OLD, NEW))), task="grpo"),
        Row("rollout.n", swift(*(f"{at}/rlhf_args.py:num_generations" for at in (OLD, NEW))), task="grpo"),
        Row("rollout.engine", swift(f"{OLD}/rlhf_args.py:use_vllm", f"{MIXIN}.use_vllm"), {False: "hf"}, task="grpo"),
        *(
            Row(f"rollout.{name}", swift(f"swift/trainers/arguments.py:vllm_{word}", f"{ENGINE}.vllm_{word}"),
                task="grpo")
            for name, word in ENGINES.items()
        ),
        *(
            Row(f"rollout.{name}", swift(f"swift/trainers/arguments.py:{name}", f"{MIXIN}.{name}"), task="grpo")
            for name in ("offload_model", "offload_optimizer", "move_model_batches")
        ),
        Row("rollout.sleep", swift("swift/trainers/arguments.py:sleep_level", f"{MIXIN}.sleep_level"), {0: False}, {},
            "grpo"),
    ),
    "megatron-swift": (
        Row("micro_batch", megatron("micro_batch_size")),
        Row("loss", megatron("cross_entropy_loss_fusion"), {False: "full", True: "fused"}),
        Row("attention", megatron("attention_backend")),
        Row("sequence_parallel", megatron("sequence_parallel")),
        Row(
            "padding_free",
            megatron("padding_free", "ExtraMegatronArguments") | {"4.6.0": megatron("padding_free")["4.6.0"]},
        ),
        Row("expert_tensor_parallel", megatron("expert_tensor_parallel_size")),
        Row("lora.rank", megatron("lora_rank", "MegatronTunerMixin"), {}, LORA),
        Row("lora.dropout", megatron("lora_dropout", "MegatronTunerMixin"), {}, LORA),
        Row("sharding", megatron("use_distributed_optimizer"), {True: "megatron"}),
        Row("offload.optimizer", megatron("optimizer_cpu_offload")),
        Row("checkpointing", megatron("recompute_granularity"), {"selective": "none"}),
        Row(
            "packing",
            {version: f"{at}/base_args/base_args.py:packing" for version, at in (("3.12.0", OLD), ("4.6.0", NEW))},
        ),
    ),
    "torchtune": (
        Row("micro_batch", field(f"{RECIPES}/8B_full.yaml:batch_size", "0.3.1"), {}, EIGHT),
        Row("precision", field(f"{RECIPES}/8B_full.yaml:dtype", "0.3.1"), {}, EIGHT),
        Row("grad_dtype", field(f"{RECIPES}/8B_full.yaml:dtype", "0.3.1"), {}, EIGHT),
        Row(
            "optimizer",
            field(f"{RECIPES}/8B_full.yaml:optimizer._component_", "0.3.1"),
            {"torch.optim.AdamW": "adamw"},
            EIGHT,
        ),
        Row(
            "optimizer",
            field(f"{RECIPES}/8B_full_single_device.yaml:optimizer._component_", "0.3.1"),
            {"bitsandbytes.optim.PagedAdamW8bit": "adamw-paged-8bit"},
        ),
        Row("optimizer_in_backward", field(f"{RECIPES}/8B_full_single_device.yaml:optimizer_in_bwd", "0.3.1")),
        Row("optimizer_in_backward", field(f"{RECIPES}/8B_full.yaml:optimizer_in_bwd", "0.4.0"), {}, EIGHT),
        Row("optimizer_impl", field(f"{RECIPES}/8B_full.yaml:optimizer.fused", "0.3.1"), {True: "fused"}, EIGHT),
        Row(
            "checkpointing",
            field(f"{RECIPES}/8B_full.yaml:enable_activation_checkpointing", "0.3.1"),
            {True: "full"},
            EIGHT,
        ),
        Row(
            "checkpointing",
            field(f"{RECIPES}/8B_lora.yaml:enable_activation_checkpointing", "0.3.1"),
            {False: "none"},
            {**LORA, **EIGHT},
        ),
        Row(
            "checkpointing",
            field(f"{RECIPES}/8B_lora_single_device.yaml:enable_activation_checkpointing", "0.3.1"),
            {True: "full"},
            LORA,
        ),
        Row(
            "loss",
            field(f"{RECIPES}/8B_full.yaml:loss._component_", "0.3.1"),
            {"torchtune.modules.loss.CEWithChunkedOutputLoss": "chunked"},
            EIGHT,
        ),
        Row("packing", field(f"{RECIPES}/8B_full.yaml:dataset.packed", "0.4.0"), {}, EIGHT),
        Row("lora.rank", field(f"{RECIPES}/8B_lora.yaml:model.lora_rank", "0.3.1"), {}, {**LORA, **EIGHT}),
        Row("lora.dropout", field(f"{RECIPES}/8B_lora.yaml:model.lora_dropout", "0.3.1"), {}, {**LORA, **EIGHT}),
        Row("lora.dtype", field(f"{RECIPES}/8B_lora.yaml:dtype", "0.3.1"), {}, {**LORA, **EIGHT}),
        Row(
            "global_batch",  # of a micro batch of 1 on one GPU
            field(f"{RECIPES}/8B_lora_single_device.yaml:gradient_accumulation_steps", "0.3.1"),
            {},
            {**LORA, "micro_batch": 1},
        ),
        Row(
            "global_batch",  # of 1 on each of eight
            field(f"{RECIPES}/8B_lora.yaml:gradient_accumulation_steps", "0.3.1"),
            {8: 64, 32: 256},
            {**LORA, **EIGHT, "micro_batch": 1},
        ),
    ),
    "torchtitan": (
        Row("micro_batch", titan("Training", "local_batch_size")),
        Row("seq_len", titan("Training", "seq_len")),
        Row("grad_dtype", titan("Training", "mixed_precision_reduce"), {"float32": "fp32"}, EIGHT),
        Row("precision", titan("Training", "mixed_precision_param"), {"bfloat16": "fsdp-mixed"}, EIGHT),
        Row(
            "checkpointing",
            {"0.1.0": "torchtitan/config_manager.py:ActivationCheckpoint.mode",
             "0.2.2": "torchtitan/config/job_config.py:ActivationCheckpoint.mode", "0.3.0": ""},
        ),
        Row(
            "optimizer",
            {"0.1.0": "torchtitan/config_manager.py:Optimizer.name",
             "0.2.2": "torchtitan/config/job_config.py:Optimizer.name", "0.3.0": ""},
            {"AdamW": "adamw"},
        ),
        Row(
            "optimizer_impl",
            {"0.1.0": "torchtitan/config_manager.py:Optimizer.implementation",
             "0.2.2": "torchtitan/config/job_config.py:Optimizer.implementation",
             "0.3.0": "torchtitan/components/optimizer/optimizer.py:implementation"},
        ),
        Row(
            "sequence_parallel",
            {"0.3.0": "torchtitan/config/configs.py:ParallelismConfig.enable_sequence_parallel"},
            {},
            {**EIGHT, "tensor_parallel": 2},
        ),
    ),
    "unsloth": (
        Row("seq_len", field(f"{CLI}:max_seq_length", "2026.10.9")),
        Row("micro_batch", field(f"{CLI}:batch_size", "2026.10.9")),
        Row("global_batch", field(f"{CLI}:gradient_accumulation_steps", "2026.10.9"), {}, {"micro_batch": 1}),
        Row("checkpointing", field(f"{CLI}:gradient_checkpointing", "2026.10.9"), {"unsloth": "full"}),
        Row("offload.activations", field(f"{CLI}:gradient_checkpointing", "2026.10.9"), {"unsloth": True}),
        Row("packing", field(f"{CLI}:packing", "2026.10.9")),
        Row("lora.rank", field(f"{CLI}:lora_r", "2026.10.9"), {}, QLORA),
        Row("lora.dropout", field(f"{CLI}:lora_dropout", "2026.10.9"), {}, QLORA),
    ),
}  # fmt: skip


# Switches that move memory and that no table of ours fills in, since a release leaves them off.
OFF: Mapping[str, tuple[Mapping[str, str], ...]] = {
    "torchtitan": (
        {"0.1.0": "torchtitan/config_manager.py:Training.compile",
         "0.2.2": "torchtitan/config/job_config.py:Compile.enable",
         "0.3.0": "torchtitan/config/configs.py:CompileConfig.enable"},
        titan("Training", "enable_cpu_offload"),
        {"0.1.0": "torchtitan/config_manager.py:Optimizer.early_step_in_backward",
         "0.2.2": "torchtitan/config/job_config.py:Optimizer.early_step_in_backward", "0.3.0": ""},
        {"0.1.0": "torchtitan/config_manager.py:Parallelism.enable_async_tensor_parallel",
         "0.2.2": "torchtitan/config/job_config.py:Parallelism.enable_async_tensor_parallel",
         "0.3.0": "torchtitan/config/configs.py:CompileConfig.enable_async_tensor_parallel"},
        {"0.1.0": "torchtitan/config_manager.py:Parallelism.disable_loss_parallel",
         "0.2.2": "torchtitan/config/job_config.py:Parallelism.disable_loss_parallel", "0.3.0": ""},
        {"0.1.0": "torchtitan/config_manager.py:Float8.enable_fsdp_float8_all_gather",
         "0.2.2": "torchtitan/config/job_config.py:Float8Linear.enable_fsdp_float8_all_gather", "0.3.0": ""},
    ),
    "unsloth": (
        {"2026.10.9": f"{CLI}:use_dora"},
        {"2026.10.9": f"{CLI}:use_loftq"},
        {"2026.10.9": f"{CLI}:vision_all_linear"},
    ),
}  # fmt: skip


def place(row: Row, version: str) -> str:
    """The place where `version` states a row; "" where it does not."""
    return since(row.told, version)


def since(told: Mapping[str, str], version: str) -> str:
    """The last of the places that `version` has reached; "" for none."""
    return next((path for first, path in reversed(told.items()) if at_least(version, first)), "")


CASES = [
    pytest.param(trainer, version, row, id=f"{trainer}-{version}-{row.field}-{n}")
    for trainer, rows in ROWS.items()
    for version in MODULES[trainer].RELEASES
    for n, row in enumerate(rows)
    if place(row, version)
]


@pytest.mark.parametrize(("trainer", "version", "row"), CASES)
def test_a_trainer_states_its_configuration(released: Released, trainer: str, version: str, row: Row) -> None:
    release, where = released(trainer, version), place(row, version)
    found = told(release, where)
    theirs, ours = row.means.get(found, found), stated(trainer, version, row)
    assert ours == theirs, f"{release.name}, {where} is {found!r}: {row.field} is {theirs!r}; stated: {ours!r}"


@pytest.mark.parametrize("trainer", OFF)
def test_a_switch_that_no_table_fills_in_is_off(released: Released, trainer: str) -> None:
    """A release that turns one on changes a job's memory where its user says nothing."""
    for version in MODULES[trainer].RELEASES:
        for places in OFF[trainer]:
            if where := since(places, version):
                assert told(released(trainer, version), where) is False, f"{trainer} {version}, {where}"


@pytest.mark.parametrize("version", torchtune.RELEASES)
def test_torchtune_states_what_it_adapts(released: Released, version: str) -> None:
    """Its names of attention's products, and the MLP's three where they are adapted."""
    release = released("torchtune", version)
    model = yaml.load(release.text(f"{RECIPES}/8B_lora.yaml"), Loader=LOADER)["model"]
    names = [name.replace("output_proj", "o_proj") for name in model["lora_attn_modules"]]
    names += ["gate_proj", "up_proj", "down_proj"] if model["apply_lora_to_mlp"] else []
    assert stated("torchtune", version, Row("lora.targets", {}, {}, {**LORA, **EIGHT})) == names


def test_unsloth_states_what_it_adapts(released: Released) -> None:
    found = told(released("unsloth", unsloth.NEWEST), f"{CLI}:target_modules")
    assert stated("unsloth", unsloth.NEWEST, Row("lora.targets", {}, {}, QLORA)) == found.split(",")


@pytest.mark.parametrize(
    ("word", "since", "until"),
    [
        ("= fast_cross_entropy_loss(", unsloth.FIRST, ""),
        ("fused_linear_cross_entropy(", unsloth.CUT, unsloth.FUSED),
        ("if bsz*q_len <= 1024: RETURN_LOGITS = True", unsloth.SHORT, unsloth.NEWEST),
        ("unsloth_fused_ce_loss(", unsloth.FUSED, ""),
        ("logit_softcapping = logit_softcapping", unsloth.FIRST, ""),
    ],
)
def test_unsloth_has_its_losses_in_the_releases_that_are_stated(
    released: Released, word: str, since: str, until: str
) -> None:
    for version in unsloth.RELEASES:
        text = released("unsloth", version).text("unsloth/models/llama.py")
        there = re.search(rf"^[^#\n]*{re.escape(word)}", text, re.MULTILINE) is not None
        assert there is (at_least(version, since) and not (until and at_least(version, until))), version


def test_unsloth_maps_names_to_copies_from_the_releases_that_are_stated(released: Released) -> None:
    models = load().models
    for version in unsloth.RELEASES:
        text = released("unsloth", version).text("unsloth/models/mapper.py").lower()
        for model, (first, _) in unsloth.COPIES.items():
            name = models[model].hf.rpartition("/")[2].lower()
            assert (f'"unsloth/{name}-unsloth-bnb-4bit"' in text) == at_least(version, first), (version, model)


def test_unsloth_makes_segments_expandable_and_keeps_tables_for_its_positions(released: Released) -> None:
    """The newest release does the former in unsloth_zoo, of which it is a package of its own."""
    for version in (unsloth.FIRST, unsloth.CUT, unsloth.SHORT, unsloth.FUSED):
        release = released("unsloth", version)
        assert "expandable_segments:True" in release.text("unsloth/__init__.py")
        assert "self.current_rope_size = min(4 * 8192, self.max_position" in release.text("unsloth/models/llama.py")
    assert unsloth.POSITIONS == 4 * 8192


def test_unsloth_has_a_buffer_for_dequantised_weights_in_the_releases_that_are_stated(released: Released) -> None:
    """The release before does not, nor do the rows of 2024."""
    for version in unsloth.RELEASES:
        text = released("unsloth", version).text("unsloth/kernels/utils.py")
        assert ("WEIGHT_BUFFER" in text) is at_least(version, unsloth.BUFFERED), version


def test_unsloth_pads_the_models_that_are_stated(released: Released) -> None:
    text = released("unsloth", unsloth.NEWEST).text("unsloth/trainer.py")
    found = re.search(r"^PADDING_FREE_BLOCKLIST = \{(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    assert found and tuple(re.findall(r'^ *"(\w+)"', found[1], re.MULTILINE)) == unsloth.PADDED
    assert "configure_padding_free(config_arg)" in text and PADS.partition("=")[0] in text
    assert "padding_free" not in released("unsloth", unsloth.FUSED).text("unsloth/trainer.py")


@pytest.mark.parametrize("trainer", ["llamafactory", "axolotl", "ms-swift", "unsloth"])
def test_a_trainer_states_a_transformers_that_it_allows(released: Released, trainer: str) -> None:
    for version, pins in MODULES[trainer].RELEASES.items():
        # the first release of Unsloth asks for it in an extra alone
        allowed = released(trainer, version).requires("transformers", "huggingface")
        assert allowed.contains(pins.transformers), f"{trainer} {version}: {allowed}; stated: {pins.transformers}"


# What no field or key tells: it is in a release's code, in its examples, or in a library beneath it.
IN_CODE = {
    "sharding",
    "precision",
    "no_sync",
    "reentrant",
    "logprob",
    "attention",
    "loss",
    "optimizer",
    "optimizer_impl",
    "grad_dtype",
}
IN_CODE |= {"lora.dtype", "lora.units", "lora.targets", "double_quantization", "expandable_segments", "global_batch"}
IN_CODE |= {"create_attention_mask_in_dataloader"}
UNTOLD = {
    "llamafactory": {"micro_batch"},
    "ms-swift": {"rollout.batch", "roles.reward"},
    "torchtune": {"packing"},
    "torchtitan": {"packing"},
    "unsloth": {"padding_free"},
}


@pytest.mark.parametrize("trainer", MODULES)
def test_every_default_is_read_somewhere(trainer: str) -> None:
    module = MODULES[trainer]
    found = {
        name
        for version in module.RELEASES
        for task in module.TASKS
        for given in ({}, LORA, QLORA)
        for name in module.habits(task, {f"versions.{trainer}": version, **given})
        if not name.startswith("versions.")
    }
    assert found - {row.field for row in ROWS[trainer]} <= IN_CODE | UNTOLD.get(trainer, set())


SOURCE = re.compile(r"(\w+)[^(]*\((\w\S+\.py):(\d+)\)")


@pytest.mark.parametrize("trainer", MODULES)
def test_a_source_names_the_line_of_the_newest_release(released: Released, trainer: str) -> None:
    """The word that a source begins with stands in the line that it names."""
    module = MODULES[trainer]
    release = released(trainer, list(module.RELEASES)[-1])
    places = [module, *([REINFORCES[trainer]] if trainer in REINFORCES else [])]
    tables = [table for place in places for table in vars(place).values() if isinstance(table, Table)]
    rows: list[Default] = [row for table in tables for row in table.rows]
    found = [match for row in rows if (match := SOURCE.fullmatch(row.source))]
    assert len(found) > 1
    for word, path, line in (match.groups() for match in found):
        whole = next(p for p in (ROOTS.get(trainer, "") + path, path, f"{trainer}/{path}") if p in release.members)
        there = release.text(whole).splitlines()[int(line) - 1]
        assert word in there, f"{release.name}, {whole}:{line} has no {word}: {there}"
