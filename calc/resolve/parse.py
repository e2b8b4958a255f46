"""The reading of a scenario: fields nested or dotted, defaults of the framework, and every rule applied.

Every error is one line that names the field.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from calc.base.reading import parse_mapping, read_bytes
from calc.base.refusal import Refusal
from calc.base.schema import SCALARS, InputError, closest, show, validator
from calc.catalog.catalog import Catalog, CatalogError, load
from calc.catalog.names import adapted
from calc.frameworks import constraints
from calc.frameworks.base import Framework
from calc.frameworks.registry import FRAMEWORKS, framework, plan, refusal
from calc.frameworks.releases import READ, bitsandbytes
from calc.models.architecture import Architecture, ConfigError, passing
from calc.models.releases import CODE_BESIDE
from calc.models.vision import Tower
from calc.resolve import released
from calc.scenario import rules
from calc.scenario.images import Images
from calc.scenario.lengths import Lengths, known
from calc.scenario.rules import Objection
from calc.scenario.scenario import (
    SCHEMA,
    SCHEMA_FILE,
    Lora,
    Offload,
    Rollout,
    Scenario,
    ScenarioError,
    changed,
    on_card,
)
from calc.scenario.words import RL, Trainer

NEEDED = tuple(SCHEMA["required"])
# Defaults that no framework decides. Lengths and batches that follow from other fields are filled in by `parse`.
NEUTRAL: Mapping[str, Any] = {
    "trainer": "own",
    "gpus": 1,
    "method": "full",
    "double_quantization": True,
    "checkpoint_gb": None,
    "vision_tower": False,
    "quantize_moe_experts": False,
    "qat_scheme": "none",
    "load_in_8bit": False,
    "no_sync": False,
    "reentrant": False,
    "memory_efficient_linear": True,
    "zero_init": True,
    "max_live_parameters": None,
    "sub_group_size": None,
    "reduce_bucket_size": None,
    "stage3_prefetch_bucket_size": None,
    "stage3_param_persistence_threshold": None,
    "compile": "none",
    "float8": "none",
    "float8_all_gather": False,
    "fp8_param_gather": False,
    "bf16_layers_at_end": None,
    "tensor_parallel": 1,
    "data_parallel_sharding_strategy": "no_shard",
    "pipeline_parallel": 1,
    "pipeline_layers": None,
    "virtual_pipeline": 1,
    "device_map": "none",
    "galore_rank": 128,
    "device_map_gpus": None,
    "checkpointed_layers": None,
    "recompute_modules": None,
    "recompute_num_layers": None,
    "mtp_num_layers": None,
    "apply_rope_fusion": False,
    "create_attention_mask_in_dataloader": False,
    "cp_comm_type": "p2p",
    "loss_chunk_size": None,
    "cross_entropy_fusion_impl": "native",
    "outputs_kept": "none",
    "output_hidden_states": False,
    "outputs_fp32": False,
    "loss_fp32": True,
    "experts_implementation": "transformers",
    "outer_units": "root",
    "reshard_after_forward": "default",
    "context_parallel": 1,
    "data_parallel_replicate": 1,
    "sequence_parallel": False,
    "async_tensor_parallel": False,
    "expert_parallel": 1,
    "expert_tensor_parallel": 1,
    "expert_imbalance": 1,
    "expert_capacity": None,
    "expert_padding": False,
    "on_policy": 0,
    "sft_alpha": 0,
    "packing": False,
    "group_by_length": False,
    "lora.modules_to_save": (),
    "lora.init": "random",
    "lora.dora": False,
    "lora.ia3": False,
    "lora.count": 1,
    "lora.ref_adapter": False,
    "optimizer_in_backward": False,
    "use_precision_aware_optimizer": False,
    "main_params_dtype": "fp32",
    "exp_avg_dtype": "fp32",
    "exp_avg_sq_dtype": "fp32",
    "offload.activations": False,
    "offload.fraction": 0.0,
    "offload.masters": True,
    "linear_attention": "fla",  # slow without, as Transformers warns at every start
    "kernels": "eager",
    "expandable_segments": False,
    "pinned_max_round_threshold_mb": None,
    "counts_prompts": False,
    "placement": "colocated",
    "rollout.v0": False,
    **rules.ABSENT,
}

_VERSION = re.compile(r"[0-9]+(?:\.[0-9]+)*")
_DEEPEST = 4  # roles.reference.lora.rank


# The fields that go from values to object as they are.
_PLAIN = tuple(
    name
    for name, kind in get_type_hints(Scenario).items()
    if (kind in (str, int, bool) or get_origin(kind) is Literal) and not name.startswith("framework")
)


def parse(data: Any, *, where: str = "scenario", catalog: Catalog | None = None) -> Scenario:
    """The scenario that `data` describes, with the defaults of the framework and version it names.

    `data` maps fields to values as the contract spells them, nested (`lora: {rank: 8}`) or dotted (`lora.rank: 8`);
    a field that the schema lets be null counts as not given when it is. Raises ScenarioError, one line that starts
    with `where`, for anything that cannot be used.
    """
    with _at(where):
        return _resolved(_valid(data, where, NEEDED), catalog or load())


def given(
    data: Any, *, where: str, catalog: Catalog | None = None, needed: tuple[str, ...] = ("model", "task")
) -> dict[str, Any]:
    """The fields that `data` gives, by dotted key, the others left open; `parse` can use each of them alone.

    All models and the GPU are in the catalog, the framework is known. Raises ScenarioError as `parse` does, also if one
    of `needed` is missing.
    """
    catalog = catalog or load()
    with _at(where):
        nested = _valid(data, where, needed)
        alike = {f"roles.{name}": own for name, own in nested.get("roles", {}).items() if own == {}}
        fields = rules.flatten(nested) | alike  # a role that runs, and differs in nothing
        if "model" in fields:
            catalog.model(fields["model"])
        for name, own in nested.get("roles", {}).items():
            if isinstance(own, Mapping) and "model" in own:
                with rules.part_named(f"roles.{name}."):
                    catalog.model(own["model"])
        if "gpu" in fields:
            catalog.gpu(fields["gpu"])
        if "framework" in fields:
            _framework(fields["framework"])
        return fields


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Puts `where` in front of the objections to a scenario."""
    try:
        yield
    except (Objection, ConfigError, CatalogError) as error:
        raise ScenarioError(f"{where}: {error}", error.refusal, error.field) from None
    except InputError as error:
        raise ScenarioError(str(error), error.refusal, error.field) from None


def _valid(data: Any, where: str, needed: tuple[str, ...]) -> dict[str, Any]:
    """The fields of `data`, nested, as the schema allows them."""
    if not isinstance(data, Mapping):
        raise Objection(f"given {show(data)}, allowed: a mapping of fields")
    nested: dict[str, Any] = {}
    for key, value in data.items():
        _put(nested, key, value, "")
    _spell_out(nested)
    check = validator(SCHEMA_FILE, needed)
    check(nested, where)
    if isinstance(file := nested.get("lengths"), str):
        nested["lengths"] = parse_mapping(read_bytes(Path(file), f"{where}: lengths: {file}"), file)
        check(nested, f"{where}: {file}")
    return nested


# Fields on which no default depends, so that they can be changed alone: see `vary`.
VARIED = frozenset({
    "micro_batch", "checkpointing", "loss", "logprob", "offload.optimizer", "offload.parameters",
    "offload.fraction",
    "rollout.tensor_parallel", "rollout.gpu_memory_utilization", "rollout.sleep", "rollout.max_model_len",
})  # fmt: skip
_FROZEN_OFFLOAD = re.compile(r"roles\.(reference|reward|teacher)\.offload\.parameters")


def vary(s: Scenario, changes: Mapping[str, Any]) -> Scenario:
    """`s` with the values of `changes` for fields of `VARIED`, or `roles.<role>.offload.parameters` of a frozen role.

    The same as `parse` of its fields with those changes, its global batch and rollout batch being given, in a quarter
    of the time; raises ScenarioError where `parse` would. The values are those that the schema allows.
    """
    own: dict[str, Any] = {}
    branches: dict[str, dict[str, Any]] = {"offload": {}, "rollout": {}}
    roles = dict(s.roles)
    for place, value in changes.items():
        branch, _, leaf = place.partition(".")
        if _FROZEN_OFFLOAD.fullmatch(place):
            name = place.split(".")[1]
            role = roles[name]
            assert not isinstance(role, str)
            roles[name] = {**role, "offload.parameters": value}
        elif place not in VARIED:
            raise AssertionError(f"{place}: other fields may follow from it")
        elif leaf:
            branches[branch][leaf] = value
        else:
            own[place] = value
    offload = replace(s.offload, **branches["offload"]) if branches["offload"] else s.offload
    rollout = replace(s.rollout, **branches["rollout"]) if s.rollout and branches["rollout"] else s.rollout
    if s.max_tokens_per_gpu:
        own.pop("micro_batch", None)  # not read where batches are dynamic
    if own.get("checkpointing") == "selective":
        own["reentrant"] = False
    varied = changed(s, {**own, "offload": offload, "rollout": rollout, "roles": roles})
    given = {**changes, "global_batch": s.global_batch}
    try:
        rules.batched(varied, given)
        reason = rules.serving_fault(varied, given) or refusal(varied)
    except Objection as error:
        raise ScenarioError(f"scenario: {error}", error.refusal, error.field) from None
    if reason is not None:
        raise ScenarioError(f"scenario: {reason}", reason)
    return varied


def _put(into: dict[str, Any], key: Any, value: Any, path: str) -> None:
    """Adds a field, dotted or not, to a nested mapping; one field twice is an error."""
    if not isinstance(key, str):
        raise Objection(Refusal(path[:-1] or "a field", f"the name {show(key)}", "text"))
    head, _, rest = key.partition(".")
    branch = {rest: value} if rest else value
    if not isinstance(branch, SCALARS) and isinstance(branch, Mapping) and path.count(".") < _DEEPEST:
        inner = into.setdefault(head, {})
        if isinstance(inner, dict):
            for name, item in branch.items():
                _put(inner, name, item, f"{path}{head}.")
            return
    elif head not in into:
        into[head] = branch
        return
    raise Objection(Refusal(f"{path}{head}", "twice", "once"))


def _resolved(nested: dict[str, Any], catalog: Catalog) -> Scenario:
    """The scenario made of `nested` fields that have passed the schema."""
    card = catalog.gpu(nested.pop("gpu"))
    asked = (nested, *nested.get("roles", {}).values())
    named = [own["model"] for own in asked if isinstance(own, dict) and "model" in own]
    # a config may be another one the next time
    fill = _filled.__wrapped__ if any(map(os.path.exists, named)) else _filled
    found = fill(json.dumps(nested), card.vendor, catalog)
    if isinstance(found, Objection):
        raise found.with_traceback(None)  # or it would keep what each of its raisings has passed through
    scenario = on_card(found, card.id)
    if (reason := rules.pinning_fault(scenario, card)) is not None:
        raise Objection(reason)
    return scenario


# Look-up tables and searches ask for a job on one card after another, and for much that is refused on all of them.
@lru_cache(maxsize=1024)
def _filled(asked: str, vendor: str, catalog: Catalog) -> Scenario | Objection:
    """The scenario of `_fill`, or its objection."""
    try:
        return _fill(asked, vendor, catalog)
    except Objection as objection:
        return objection.with_traceback(None)


def _fill(asked: str, vendor: str, catalog: Catalog) -> Scenario:
    """The scenario made of the fields `asked`, as JSON, on any card of a vendor: that decides no other field."""
    nested = json.loads(asked)
    own_roles = nested.pop("roles", {})
    given = rules.flatten(nested)
    name, version = _framework(given.get("framework", "torch"))
    task = given["task"]
    if task == "inference":
        catalog.unquantised(given["model"])
    _, stored = catalog.names.quantised(given["model"]) or ("", "")
    if given.get("method") == "lora" and adapted(stored):
        given["method"] = "qlora"
    module = framework(name)
    known = module.nearest(version) if version else module.KNOWN[-1]
    said = given | rules.flatten({"roles": own_roles})
    own = module.defaults(task, known, said)
    usual = {**NEUTRAL, **own}
    transformers = given.get("versions.transformers") or usual.get("versions.transformers") or READ["transformers"]
    usual.setdefault("versions.bitsandbytes", bitsandbytes(str(transformers)))
    values: dict[str, Any] = {**usual, **given}
    rules.had(values | said, own, f"{name} {known}")
    model = catalog.model(given["model"])
    spoken = catalog.spoken(given["model"])
    sees = "images.width" in values or values["vision_tower"]
    rules.tower_loads(values, model)
    if "checkpoint_gb" not in given:
        values["checkpoint_gb"] = module.CHOICES.copy(values, model.id)
    rules.joined(values, given, padded=module.CHOICES.pads(values, model.architecture, model.seeing is not None))
    modelled = partial(_modelled, module, values | {"version": known})
    architecture = modelled(model.reading(images=sees))
    values["model"], values["gpu"] = model.id, ""
    values["expandable_segments"] &= rules.maps_pages(vendor, str(values.get("versions.torch", "0")))
    if "lora.targets" in usual and "lora.targets" not in given:
        values["lora.targets"] = rules.usual(architecture, usual["lora.targets"])
    roles = rules.roles_of(values, own_roles, catalog, partial(module.defaults, task, known), modelled)
    values["lengths"] = _lengths(given)
    rules.follow(values, given, task)
    rules.check(values, given)
    roles = rules.placed(values, roles)
    scenario = Scenario(
        **{place: values[place] for place in _PLAIN},
        framework=name,
        host_memory=values.get("host_memory"),
        cpu_threads=values.get("cpu_threads"),
        checkpoint_gb=values["checkpoint_gb"],
        lengths=values["lengths"],
        entropy_coeff=float(values["entropy_coeff"]),
        expert_imbalance=float(values["expert_imbalance"]),
        expert_capacity=values["expert_capacity"],
        loss_chunk_size=values["loss_chunk_size"],
        checkpointed_layers=values["checkpointed_layers"],
        device_map_gpus=values["device_map_gpus"],
        on_policy=float(values["on_policy"]),
        sft_alpha=float(values["sft_alpha"]),
        max_tokens_per_gpu=values["max_tokens_per_gpu"],
        pipeline_layers=tuple(values["pipeline_layers"]) if values["pipeline_layers"] else None,
        recompute_modules=tuple(values["recompute_modules"]) if values["recompute_modules"] else None,
        recompute_num_layers=values["recompute_num_layers"],
        bf16_layers_at_end=values["bf16_layers_at_end"],
        max_live_parameters=values["max_live_parameters"],
        sub_group_size=values["sub_group_size"],
        **{name: values[name] for name in constraints.BUCKETS},
        mtp_num_layers=values["mtp_num_layers"],
        pinned_max_round_threshold_mb=values["pinned_max_round_threshold_mb"],
        framework_version=known,
        framework_asked=f"{name}=={version or known}",
        lora=_lora(values, architecture),
        offload=Offload(**{f.name: values[f"offload.{f.name}"] for f in fields(Offload)}),
        images=_images(values, architecture, spoken),
        rollout=_rollout(values) if task in RL else None,
        roles=roles,
        versions={place[9:]: value for place, value in values.items() if place.startswith("versions.")},
        architecture=architecture,
        plan=plan,
        architectures={
            role: module.modelled(
                catalog.model(own["model"]).reading(images=sees), values | {"version": known} | dict(own)
            )
            for role, own in roles.items()
            if not isinstance(own, str)
        },
        warnings=tuple(
            rules.warnings_of(
                values,
                architecture,
                name,
                version,
                known,
                apart=bool(model.seeing) and not sees,
                stored=stored or model.stored,
                tuned=given["model"] if catalog.tuned(given["model"]) else "",
                makes=model.makes,
                spoken=given["model"] if spoken else "",
            )
        ),
    )
    if scenario.cpu_threads is None:
        scenario = changed(scenario, {"cpu_threads": module.threads(scenario)})
    rules.cut(scenario)
    scenario = rules.batched(scenario, given)
    if scenario.max_tokens_per_gpu:
        scenario = changed(scenario, {"micro_batch": scenario.rows})  # so that other readers of the field see what runs
    reason = (
        rules.serving_fault(scenario, given)
        or rules.linear_fault(scenario)
        or rules.rotation_fault(scenario)
        or rules.spread_fault(scenario)
        or rules.capacity_fault(scenario)
        or rules.exchange_fault(scenario)
        or constraints.mask_fault(scenario)
        or constraints.eight_bits_fault(scenario)
        or constraints.saved_fault(scenario)
        or constraints.ends_fault(scenario)
        or constraints.init_fault(scenario)
        or constraints.dora_fault(scenario)
        or constraints.tower_fault(scenario)
        or constraints.ia3_fault(scenario)
        or constraints.ref_adapter_fault(scenario)
        or constraints.bucket_fault(scenario)
        or constraints.rounding_fault(scenario)
        or constraints.chosen_fault(scenario)
        or constraints.implementation_fault(scenario)
        or constraints.units_fault(scenario)
        or constraints.chunk_fault(scenario)
        or constraints.layers_fault(scenario)
        or constraints.resharding_fault(scenario)
        or constraints.replicate_fault(scenario)
        or constraints.devices_fault(scenario)
        or constraints.narrow_fault(scenario)
        or constraints.loss_fault(scenario)
        or constraints.depths_fault(scenario)
        or constraints.together_fault(scenario)
        or constraints.parts_fault(scenario)
        or constraints.strategy_fault(scenario)
        or constraints.precision_fault(scenario)
    )
    models = (model, *[catalog.model(own["model"]) for own in roles.values() if not isinstance(own, str)])
    if kind := released.lacked(scenario, models):
        if kind in CODE_BESIDE:
            scenario = changed(scenario, {"warnings": (*scenario.warnings, released.beside(scenario, kind))})
        else:
            reason = reason or released.fault(scenario, kind, said)
    if (reason := reason or refusal(scenario)) is not None:
        raise Objection(reason)
    return scenario


def _framework(given: str) -> tuple[str, str | None]:
    """The framework's name, and its version if one is named."""
    name, equals, version = given.partition("==")
    if name not in FRAMEWORKS:
        near = closest(name, [*FRAMEWORKS, *get_args(Trainer)])
        raise Objection(Refusal("framework", show(given), f"{', '.join(FRAMEWORKS)}, each with ==version{near}"))
    if equals and not _VERSION.fullmatch(version) and not _names(name, version):
        words = "".join(f", or {known}" for known in framework(name).KNOWN if not _VERSION.fullmatch(known))
        raise Objection(Refusal("framework", show(given), f"a version of numbers, such as {name}==1.0{words}"))
    return name, version or None


def _names(name: str, version: str) -> bool:
    """True if `version` is a known one of the framework `name` without numbers, or a fork's name alone."""
    return any(version in (known, known.partition("-")[0]) for known in framework(name).KNOWN)


def _spell_out(nested: dict[str, Any]) -> None:
    """Puts a trainer, or a framework's fork, that is given as the framework into the fields that name it.

    `ms-swift==3.12` is plain PyTorch with ms-swift's loop, in that release; `easyr1` is a fork of verl.
    """
    said = nested.get("framework")
    name, equals, version = said.partition("==") if isinstance(said, str) else ("", "", "")
    if not name or name in FRAMEWORKS:
        return
    plain = re.sub(r"[\W_]", "", name.casefold())
    trainer = next((own for own in get_args(Trainer) if plain == own.replace("-", "") and own != "own"), None)
    forks = {known.partition("-")[0]: of for of in FRAMEWORKS for known in framework(of).KNOWN}
    if plain in FRAMEWORKS:
        nested["framework"] = f"{plain}{equals}{version}"
    elif trainer:
        nested["framework"] = "torch"
        _agree(nested, "trainer", trainer, "trainer")
        if equals and isinstance(versions := nested.setdefault("versions", {}), dict):
            _agree(versions, trainer, version, f"versions.{trainer}")
    elif plain in forks:
        nested["framework"] = f"{forks[plain]}=={plain}{'-' if equals else ''}{version}"


def _agree(fields: dict[str, Any], key: str, value: str, place: str) -> None:
    """Sets a field to what the framework's name says of it; another value there is refused."""
    if (given := fields.setdefault(key, value)) != value:
        raise Objection(Refusal(place, show(given), f"{value}, which framework names"))


def _rollout(values: Mapping[str, Any]) -> Rollout:
    """The rollout's fields; without GPUs of its own it runs on all."""
    own = {f.name: values.get(f"rollout.{f.name}") for f in fields(Rollout)}
    own["gpus"] = own["gpus"] or values["gpus"]
    return Rollout(**own)  # type: ignore[arg-type]


def _images(values: Mapping[str, Any], architecture: Architecture, spoken: bool) -> Images | None:
    """The images of a sample, checked against the model and the lengths; None where the job reads none.

    `spoken`: see `Catalog.spoken`.
    """
    if "images.width" not in values:
        return None
    tower = rules.tower_of(architecture, spoken)
    images = images_of(values, tower)
    rules.seen(images, values, tower)
    return images


def images_of(values: Mapping[str, Any], tower: Tower) -> Images:
    """The images that fields describe, whose width and height are given, before a vision tower."""
    adapted, limits = values.get("method", "full") != "full", tower.bounds(values.get("images.frames", 1))
    usual = {
        "count": 1, "frames": 1, "min_pixels": limits.fewest, "max_pixels": limits.most,
        "freeze": "vision" if adapted else "none", "checkpointing": None,
    }  # fmt: skip
    said = {f.name: values[f"images.{f.name}"] for f in fields(Images) if f"images.{f.name}" in values}
    return Images(**{**usual, **said})


def _lengths(given: Mapping[str, Any]) -> Lengths | None:
    """The data's lengths, if any are given."""
    said = {place.removeprefix("lengths."): value for place, value in given.items() if place.startswith("lengths.")}
    try:
        return known(said) if said else None
    except ValueError as error:
        raise Objection(str(error), "lengths") from None


def _modelled(module: Framework, values: Mapping[str, Any], architecture: Architecture) -> Architecture:
    """The model as the framework has it, and as its adapters are."""
    found = module.modelled(architecture if "images.width" in values else passing(architecture), values)
    if found.experts and values["experts_implementation"] == "torchtitan":
        # it has three parameters of all experts, and an adapter beside each
        found = replace(found, expert_linears=("gate_proj", "up_proj", "down_proj"), experts_converted=False)
    if values["method"] == "full":
        return found
    own = "vectors" if values["lora.ia3"] else "scaled" if values["lora.dora"] else found.adapters
    return replace(found, adapters=own)


def _lora(values: Mapping[str, Any], architecture: Architecture) -> Lora | None:
    """The adapters, their targets checked against the model's layers."""
    if values["method"] == "full":
        return None
    targets = rules.adapters(architecture, values["lora.rank"], values["lora.targets"])
    how = values["lora.dtype"], values["lora.units"], tuple(values["lora.modules_to_save"]), values["lora.init"]
    beside = values["lora.dora"], values["lora.count"], values["lora.ia3"], values["lora.ref_adapter"]
    return Lora(values["lora.rank"], targets, float(values["lora.dropout"]), *how, *beside)
