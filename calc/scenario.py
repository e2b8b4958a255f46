"""A scenario: what a user says about a job, with everything unsaid filled in by the framework's defaults.

The fields, their values, bounds and units stand in `scenario.schema.json`. Here are the typed object, the reading of
nested and dotted keys, and the rules that join several fields. Every error is one line that names the field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from calc.architecture import Architecture, ConfigError, lora_parameters
from calc.catalog import GPU, Catalog, CatalogError, load
from calc.schema import InputError, closest, show, validator

if TYPE_CHECKING:
    from calc.keeps import Keeps

SCHEMA_FILE = Path(__file__).with_name("scenario.schema.json")
SCHEMA: Mapping[str, Any] = json.loads(SCHEMA_FILE.read_text("utf-8"))

# Words of the contract that this version cannot compute yet are refused, never ignored.
MODELLED = {"task": ("pretrain", "sft", "rm", "dpo"), "framework": ("torch", "openrlhf")}
UNBUILT_DEGREES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
FRAMEWORKS = ("torch", "openrlhf", "verl", "trl")
RL_FIELDS = ("prompt_len", "response_len", "rollout")
# The roles beside the one that the scenario's own fields describe: the trained one.
OTHER_ROLES: Mapping[str, tuple[str, ...]] = {"dpo": ("reference",)}
FROZEN_ROLE_FIELDS = ("model", "gpus", "precision", "sharding", "offload.parameters", "attention")

# What no framework decides. Lengths and batches that follow from other fields are filled in by `parse`.
NEUTRAL: Mapping[str, Any] = {
    "gpus": 1,
    "method": "full",
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "context_parallel": 1,
    "sequence_parallel": False,
    "expert_parallel": 1,
    "packing": False,
    "placement": "colocated",
}

_VERSION = re.compile(r"[0-9]+(?:\.[0-9]+)*")
_DEEPEST = 4  # roles.reference.lora.rank


class ScenarioError(InputError):
    """A scenario that cannot be used; its text is one line naming the place, the field, what was given and allowed."""


class Framework(Protocol):
    """What a module of `calc.frameworks` offers: what one framework keeps in memory, by version."""

    KNOWN: tuple[str, ...]

    def nearest(self, version: str) -> str:
        """The known version whose memory behaviour `version` shares."""

    def defaults(self, task: str, version: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Values for the fields that nothing here decides, by dotted key; `given` is what the user said, roles aside.

        Needed: precision, optimizer, optimizer_impl, sharding, offload.*, grad_dtype, checkpointing, attention, loss,
        logprob, micro_batch, global_batch, seq_len, and lora.* for the methods with adapters; allowed: any other field,
        `versions.<library>`, and `roles.<role>: none` for a role that the framework leaves out.
        """

    def refuse(self, s: Scenario) -> str | None:
        """One line on why the framework cannot run `s`; None when it can."""

    def keeps(self, s: Scenario) -> Keeps:
        """What the framework holds in memory for `s`."""


@cache
def framework(name: str) -> Framework:
    """The module of `calc.frameworks` called `name`."""
    return cast(Framework, import_module(f"calc.frameworks.{name}"))


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters beside frozen weights: `rank` r, the `targets` that get one, input `dropout`, and number format."""

    rank: int
    targets: str | tuple[str, ...]
    dropout: float
    dtype: str


@dataclass(frozen=True, slots=True)
class Offload:
    """What lives in host memory."""

    optimizer: bool
    parameters: bool


@dataclass(frozen=True, slots=True)
class Scenario:
    """One job, every field filled in; made by `parse`, which also checks it.

    Names, values and units are those of `scenario.schema.json`; `lora` is None where nothing is adapted.
    `architecture` is the trained model's, and `warnings` is what a reader should know but nothing forbids.
    """

    model: str
    task: str
    framework: str
    framework_version: str
    gpu: str
    gpus: int
    gpus_per_node: int
    method: str
    lora: Lora | None
    precision: str
    optimizer: str
    optimizer_impl: str
    sharding: str
    tensor_parallel: int
    pipeline_parallel: int
    context_parallel: int
    sequence_parallel: bool
    expert_parallel: int
    offload: Offload
    grad_dtype: str
    checkpointing: str
    attention: str
    loss: str
    logprob: str
    micro_batch: int
    global_batch: int
    seq_len: int
    expected_len: int
    packing: bool
    roles: Mapping[str, Mapping[str, Any] | str] = field(hash=False)
    versions: Mapping[str, str] = field(hash=False)
    placement: str
    architecture: Architecture = field(repr=False, compare=False)
    warnings: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def data_parallel(self) -> int:
        """How many ranks work on different sequences."""
        return self.gpus // (self.tensor_parallel * self.pipeline_parallel * self.context_parallel)

    @property
    def accumulation(self) -> int:
        """Micro-batches of one GPU in an optimizer step."""
        return self.global_batch // (self.micro_batch * self.data_parallel)

    @property
    def nodes(self) -> int:
        """Nodes that the job's GPUs fill."""
        return -(-self.gpus // self.gpus_per_node)

    def role(self, name: str, catalog: Catalog | None = None) -> Scenario | None:
        """The scenario as role `name` sees it, what differs for the role put in; None where it does not run."""
        own = self.roles.get(name, "none")
        if isinstance(own, str):
            return None
        given = {"model": self.model, "offload.parameters": self.offload.parameters, **own}
        model = (catalog or load()).model(given["model"])
        offload = replace(self.offload, parameters=given.pop("offload.parameters"))
        return replace(self, architecture=model.architecture, offload=offload, roles={}, **given)

    def as_dict(self) -> dict[str, Any]:
        """Every field of the contract, defaults filled in, ready for JSON; `parse` of it gives the same scenario."""
        data = {name: None if name in RL_FIELDS else getattr(self, name) for name in SCHEMA["properties"]}
        data["framework"] = f"{self.framework}=={self.framework_version}"
        data["offload"] = {"optimizer": self.offload.optimizer, "parameters": self.offload.parameters}
        if self.lora:
            targets = self.lora.targets if isinstance(self.lora.targets, str) else list(self.lora.targets)
            data["lora"] = {
                "rank": self.lora.rank, "targets": targets, "dropout": self.lora.dropout, "dtype": self.lora.dtype,
            }  # fmt: skip
        data["roles"] = {name: own if isinstance(own, str) else dict(own) for name, own in self.roles.items()}
        data["versions"] = dict(self.versions)
        return data


# The fields that go from values to object as they are.
_PLAIN = tuple(
    f.name for f in fields(Scenario) if f.type in ("str", "int", "bool") and not f.name.startswith("framework")
)
_SHARDINGS = tuple(word for word in SCHEMA["properties"]["sharding"]["enum"] if word != "none")


def parse(data: Any, *, where: str = "scenario", catalog: Catalog | None = None) -> Scenario:
    """The scenario that `data` describes, with the defaults of the framework and version it names.

    `data` maps fields to values as the contract spells them, nested (`lora: {rank: 8}`) or dotted (`lora.rank: 8`);
    a field that the schema lets be null counts as not given when it is. Raises ScenarioError, one line that starts
    with `where`, for anything that cannot be used.
    """
    catalog = catalog or load()
    try:
        if not isinstance(data, Mapping):
            raise _Objection(f"given {show(data)}, allowed: a mapping of fields")
        nested: dict[str, Any] = {}
        for key, value in data.items():
            _put(nested, key, value, "")
        validator(SCHEMA_FILE)(nested, where)
        return _fill(nested, catalog)
    except (_Objection, ConfigError, CatalogError) as error:
        raise ScenarioError(f"{where}: {error}") from None
    except InputError as error:
        raise ScenarioError(str(error)) from None


class _Objection(ValueError):
    """Why a scenario cannot be used, before the place it stands in is put in front."""


def _put(into: dict[str, Any], key: Any, value: Any, path: str) -> None:
    """Adds a field, dotted or not, to a nested mapping; one field twice is an error."""
    if not isinstance(key, str):
        raise _Objection(f"{path[:-1] or 'a field'}: given the name {show(key)}, allowed: text")
    head, _, rest = key.partition(".")
    branch = {rest: value} if rest else value
    if isinstance(branch, Mapping) and path.count(".") < _DEEPEST:
        inner = into.setdefault(head, {})
        if isinstance(inner, dict):
            for name, item in branch.items():
                _put(inner, name, item, f"{path}{head}.")
            return
    elif head not in into:
        into[head] = branch
        return
    raise _Objection(f"{path}{head}: given twice, allowed: once")


def _flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys for nested ones, without nulls; 8.0 is the integer 8."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{inner}": item for inner, item in _flatten(value).items()})
        elif value is not None:
            flat[name] = int(value) if isinstance(value, float) and value.is_integer() else value
    return flat


def _fill(nested: dict[str, Any], catalog: Catalog) -> Scenario:
    """The scenario of fields that the schema has passed."""
    own_roles = nested.pop("roles", {})
    given = _flatten(nested)
    name, version = _framework(given.get("framework", "torch"))
    for place, word in (("task", given["task"]), ("framework", name)):
        if word not in MODELLED[place]:
            raise _Objection(f"{place}: given {word!r}, not modelled yet, allowed: {', '.join(MODELLED[place])}")
    module = framework(name)
    known = module.nearest(version) if version else module.KNOWN[-1]
    values: dict[str, Any] = {**NEUTRAL, **module.defaults(given["task"], known, given), **given}
    model = catalog.model(given["model"])
    architecture = model.architecture
    gpu = catalog.gpu(given["gpu"])
    values["model"], values["gpu"] = model.id, gpu.id
    _follow(values, given)
    _check(values, given)
    scenario = Scenario(
        **{place: values[place] for place in _PLAIN},
        framework=name,
        framework_version=known,
        lora=_lora(values, architecture),
        offload=Offload(values["offload.optimizer"], values["offload.parameters"]),
        roles=_roles(values, own_roles, catalog),
        versions={place[9:]: value for place, value in values.items() if place.startswith("versions.")},
        architecture=architecture,
        warnings=tuple(_warnings(values, architecture, gpu, name, version, known)),
    )
    if (reason := module.refuse(scenario)) is not None:
        raise _Objection(reason)
    return scenario


def _framework(given: str) -> tuple[str, str | None]:
    """The framework's name, and its version if one is named."""
    name, equals, version = given.partition("==")
    if name not in FRAMEWORKS:
        near = closest(name, FRAMEWORKS)
        raise _Objection(f"framework: given {show(given)}, allowed: {', '.join(FRAMEWORKS)}, each with ==version{near}")
    if equals and not _VERSION.fullmatch(version):
        raise _Objection(f"framework: given {show(given)}, allowed: a version of numbers, such as {name}==1.0")
    return name, version or None


def _follow(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Fills in what follows from other fields where it is not given."""
    values.setdefault("gpus_per_node", min(values["gpus"], 8))
    values.setdefault("expected_len", values["seq_len"])
    if "global_batch" not in given:
        # A framework's default batch is made for its own number of GPUs: the largest whole number of steps within it.
        step = values["micro_batch"] * values["gpus"]
        values["global_batch"] = max(1, values["global_batch"] // step) * step


def _check(values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuses fields that are fine alone and not together."""
    task, gpus, per_node = values["task"], values["gpus"], values["gpus_per_node"]
    for place in given:
        if place.partition(".")[0] in RL_FIELDS:
            raise _Objection(f"{place}: given for {task}, allowed: for RL tasks alone; {task} has seq_len")
    for place in UNBUILT_DEGREES:
        if values[place] > 1:
            raise _Objection(f"{place}: given {values[place]}, not modelled yet, allowed: 1")
    if values["sequence_parallel"]:
        raise _Objection("sequence_parallel: given true, not modelled yet, allowed: false")
    if values["placement"] != "colocated":
        raise _Objection(f"placement: given 'separate', allowed: colocated; {task} has no role on GPUs of its own")
    if values["method"] == "full":
        for place in given:
            if place.startswith("lora."):
                raise _Objection(f"{place}: given with method full, which has no adapters, allowed: with lora, qlora")
    if gpus > per_node and gpus % per_node:
        allowed = f"a multiple of gpus_per_node = {per_node}, as {_near(gpus, per_node)}"
        raise _Objection(f"gpus: given {gpus}, allowed: {allowed}")
    if gpus > 1 and values["sharding"] == "none":
        raise _Objection(f"sharding: given 'none' with gpus = {gpus}, allowed: {', '.join(_SHARDINGS)}")
    step = values["micro_batch"] * gpus
    if values["global_batch"] % step:
        raise _Objection(
            f"global_batch: given {values['global_batch']}, allowed: a multiple of micro_batch x data-parallel GPUs = "
            f"{values['micro_batch']} x {gpus} = {step}, as {_near(values['global_batch'], step)}"
        )
    expected, cap = values["expected_len"], values["seq_len"]
    if expected > cap:
        raise _Objection(f"expected_len: given {expected}, allowed: at most seq_len = {cap}")


def _near(given: int, step: int) -> str:
    """The multiples of `step` around `given`."""
    below = given // step * step
    return f"{below} or {below + step}" if below else f"{step}"


def _lora(values: Mapping[str, Any], architecture: Architecture) -> Lora | None:
    """The adapters, their targets checked against the model's layers."""
    if values["method"] == "full":
        return None
    targets = values["lora.targets"] if isinstance(values["lora.targets"], str) else tuple(values["lora.targets"])
    lora_parameters(architecture, values["lora.rank"], targets)
    return Lora(values["lora.rank"], targets, float(values["lora.dropout"]), values["lora.dtype"])


def _roles(values: Mapping[str, Any], own: Mapping[str, Any], catalog: Catalog) -> dict[str, Mapping[str, Any] | str]:
    """Every role beside the trained one, by name: `none`, or its model and what else differs, as dotted keys."""
    names = OTHER_ROLES.get(values["task"], ())
    for name in own:
        if name not in names:
            allowed = ", ".join(names) or "none beside the trained model, which the other fields describe"
            raise _Objection(f"roles.{name}: not a role of {values['task']}, allowed: {allowed}")
    roles: dict[str, Mapping[str, Any] | str] = {}
    for name in names:
        role = own.get(name, values.get(f"roles.{name}", {}))
        if isinstance(role, str):
            roles[name] = role
            continue
        differs = _flatten(role)
        for place in differs:
            if place not in FROZEN_ROLE_FIELDS:
                allowed = ", ".join(FROZEN_ROLE_FIELDS)
                raise _Objection(f"roles.{name}.{place}: given for a role that is not trained, allowed: {allowed}")
        if differs.pop("gpus", values["gpus"]) != values["gpus"]:
            allowed = f"{values['gpus']}, as all roles share the GPUs"
            raise _Objection(f"roles.{name}.gpus: given {role['gpus']}, allowed: {allowed}")
        try:
            model = catalog.model(differs.get("model", values["model"]))
        except CatalogError as error:
            raise _Objection(f"roles.{name}.{error}") from None
        roles[name] = differs | {"model": model.id}
    return roles


def _warnings(
    values: Mapping[str, Any], architecture: Architecture, gpu: GPU, name: str, version: str | None, known: str
) -> Iterator[str]:
    """What a reader should know of a scenario that nothing forbids."""
    if values["seq_len"] > architecture.max_positions:
        yield f"seq_len {values['seq_len']} is beyond the {architecture.max_positions} positions of {values['model']}"
    if architecture.experts and values["method"] == "qlora":
        yield "routed experts stay in 16 bits: Transformers 5 has fused them, and 4-bit loading takes linears alone"
    if architecture.experts and values["method"] != "full" and values["lora.targets"] == "all-linear":
        yield "all-linear is computed without routed experts; PEFT 0.21 adapts those of some families too"
    if gpu.lacks_bf16 and values["precision"] != "fp32":
        yield f"the {gpu.name} has no bf16: a job would run in fp16, with the same memory"
    if gpu.lacks_bf16 and values["attention"] == "flash":
        yield f"FlashAttention-2 does not run on the {gpu.name}, a {gpu.architecture} card: take sdpa"
    if version and known != version and not known.startswith(f"{version}."):
        yield f"{name} {version} is computed as {known}, the nearest version that is known"
