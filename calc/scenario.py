"""A scenario: what a user says about a job, with everything unsaid filled in by the framework's defaults.

The fields, their values, bounds and units stand in `scenario.schema.json`. Here are the typed object, the reading of
nested and dotted keys, and the rules that join several fields. Every error is one line that names the field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, partial
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
MODELLED_TASKS = ("pretrain", "sft", "rm", "dpo", "ppo", "grpo", "reinforce++")
UNBUILT_DEGREES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
FRAMEWORKS = ("torch", "openrlhf", "verl", "trl")
RL = ("ppo", "grpo", "reinforce++")
PAIRED = ("rm", "dpo")  # a micro batch counts pairs: chosen and rejected run as one batch
RL_FIELDS = ("prompt_len", "response_len", "rollout")
# The roles that a scenario can describe one by one. The trained model of the other tasks is described by the scenario's
# own fields, which every role takes over where its own say nothing else.
ROLES: Mapping[str, tuple[str, ...]] = {
    "dpo": ("reference",),
    "ppo": ("actor", "critic", "reference", "reward"),
    "grpo": ("actor", "reference", "reward"),
    "reinforce++": ("actor", "reference", "reward"),
}
TRAINED_ROLES = ("actor", "critic")
FROZEN_ROLE_FIELDS = ("model", "gpus", "precision", "sharding", "offload.parameters", "attention", "micro_batch")
# With `separate`, a role without GPUs of its own shares those of the first of these that runs.
PARTNERS: Mapping[str, tuple[str, ...]] = {
    "reference": ("actor", "critic"),
    "reward": ("critic", "actor"),
    "critic": ("actor", "reward"),
}

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
        """Values for the fields that nothing here decides, by dotted key; `given` is what the user said.

        Needed: precision, optimizer, optimizer_impl, sharding, offload.*, grad_dtype, checkpointing, attention, loss,
        logprob, micro_batch, global_batch, seq_len (for RL prompt_len, response_len and rollout.*), and lora.* for the
        methods with adapters; allowed: any other field, `versions.<library>`, `roles.<role>: none` for a role that the
        framework leaves out, and `roles.<role>.<field>`.
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
class Rollout:
    """How responses are generated: by `engine`, `n` for each of `batch` prompts, vLLM on `gpus` of the job's GPUs."""

    engine: str
    tensor_parallel: int
    gpu_memory_utilization: float
    n: int
    sleep: bool
    batch: int
    gpus: int


@dataclass(frozen=True)
class Scenario:
    """One job, every field filled in; made by `parse`, which also checks it.

    Names, values and units are those of `scenario.schema.json`; `lora` is None where nothing is adapted.
    `architecture` is the trained model's, `architectures` those of the roles that say which model they run, and
    `warnings` is what a reader should know but nothing forbids. `rollout` is None and `prompt_len` and `response_len`
    are 0 where nothing is generated; for RL `seq_len` is their sum.
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
    prompt_len: int
    response_len: int
    expected_len: int
    packing: bool
    rollout: Rollout | None
    roles: Mapping[str, Mapping[str, Any] | str] = field(hash=False)
    versions: Mapping[str, str] = field(hash=False)
    placement: str
    architecture: Architecture = field(repr=False, compare=False)
    architectures: Mapping[str, Architecture] = field(default_factory=dict, repr=False, compare=False)
    warnings: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def data_parallel(self) -> int:
        """How many ranks work on different sequences."""
        return self.gpus // (self.tensor_parallel * self.pipeline_parallel * self.context_parallel)

    @property
    def rows(self) -> int:
        """Sequences of one forward on one GPU: the micro batch, both halves of its pairs, or what a framework makes of
        it."""
        count = getattr(framework(self.framework), "rows", None)
        if count is not None and self.rollout:
            return int(count(self.task, self.framework_version, self._batches()))
        return self.micro_batch * (2 if self.task in PAIRED else 1)

    def _batches(self) -> dict[str, int]:
        assert self.rollout
        return {
            "micro_batch": self.micro_batch,
            "gpus": self.gpus,
            "rollout.n": self.rollout.n,
            "rollout.batch": self.rollout.batch,
        }

    @property
    def accumulation(self) -> int:
        """Micro-batches of one GPU in an optimizer step."""
        sequences = self.global_batch * (2 if self.task in PAIRED else 1)
        return max(1, sequences // (self.rows * self.data_parallel))

    @property
    def nodes(self) -> int:
        """Nodes that the job's GPUs fill."""
        return -(-self.gpus // self.gpus_per_node)

    def has(self, name: str) -> bool:
        """Whether the job runs the role `name`."""
        return self.roles.get(name, "none") != "none"

    def group(self, name: str) -> str:
        """The role whose GPUs the role `name` uses, its own name where it has some or all roles share theirs."""
        if self.placement == "colocated" or name == "rollout" or "gpus" in self.roles[name]:
            return name
        return next(other for other in PARTNERS[name] if "gpus" in self.roles.get(other, ()))

    def gpus_of(self, name: str) -> int:
        """GPUs of a role that has its own, of the rollout, or of all roles together."""
        if self.placement == "colocated":
            return self.gpus
        if name == "rollout" and self.rollout:
            return self.rollout.gpus
        own = self.roles[name]
        assert not isinstance(own, str)
        return int(own["gpus"])

    def role(self, name: str) -> Scenario | None:
        """The scenario as role `name` sees it, what differs for the role put in; None where it does not run."""
        return self._own.get(name)

    @cached_property
    def _own(self) -> dict[str, Scenario]:
        return {name: self._differing(name, own) for name, own in self.roles.items() if not isinstance(own, str)}

    def _differing(self, name: str, own: Mapping[str, Any]) -> Scenario:
        differs: dict[str, Any] = {"gpus": self.gpus_of(self.group(name))}
        lora: dict[str, Any] = {}
        offload: dict[str, bool] = {}
        for place, value in own.items():
            branch, _, leaf = place.partition(".")
            {"lora": lora, "offload": offload}.get(branch, differs)[leaf or branch] = value
        if differs.get("method") == "full":
            differs["lora"] = None
        elif lora:
            targets = lora.get("targets")
            differs["lora"] = replace(
                self.lora or Lora(**lora), **lora | ({"targets": tuple(targets)} if isinstance(targets, list) else {})
            )
        architecture = self.architectures.get(name, self.architecture)
        return replace(self, architecture=architecture, offload=replace(self.offload, **offload), **differs)

    def as_dict(self) -> dict[str, Any]:
        """Every field of the contract, defaults filled in, ready for JSON; `parse` of it gives the same scenario."""
        data = {name: getattr(self, name) for name in SCHEMA["properties"]}
        if self.rollout:
            data["seq_len"] = None
            data["rollout"] = {f.name: getattr(self.rollout, f.name) for f in fields(Rollout)}
        else:
            data["prompt_len"] = data["response_len"] = None
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
    task = given["task"]
    if task not in MODELLED_TASKS:
        raise _Objection(f"task: given {task!r}, not modelled yet, allowed: {', '.join(MODELLED_TASKS)}")
    module = framework(name)
    known = module.nearest(version) if version else module.KNOWN[-1]
    said = given | _flatten({"roles": own_roles})
    values: dict[str, Any] = {**NEUTRAL, **module.defaults(task, known, said), **given}
    model = catalog.model(given["model"])
    architecture = model.architecture
    gpu = catalog.gpu(given["gpu"])
    values["model"], values["gpu"] = model.id, gpu.id
    roles = _roles(values, own_roles, catalog, partial(module.defaults, task, known))
    _follow(values, task)
    _check(values, given)
    roles = _placed(values, roles)
    scenario = Scenario(
        **{place: values[place] for place in _PLAIN},
        framework=name,
        framework_version=known,
        lora=_lora(values, architecture),
        offload=Offload(values["offload.optimizer"], values["offload.parameters"]),
        rollout=_rollout(values) if task in RL else None,
        roles=roles,
        versions={place[9:]: value for place, value in values.items() if place.startswith("versions.")},
        architecture=architecture,
        architectures={
            role: catalog.model(own["model"]).architecture for role, own in roles.items() if not isinstance(own, str)
        },
        warnings=tuple(_warnings(values, architecture, gpu, name, version, known)),
    )
    scenario = _batched(scenario, given)
    if (reason := _serving(scenario, given) or module.refuse(scenario)) is not None:
        raise _Objection(reason)
    return scenario


def _framework(given: str) -> tuple[str, str | None]:
    """The framework's name, and its version if one is named."""
    name, equals, version = given.partition("==")
    if name not in FRAMEWORKS:
        near = closest(name, FRAMEWORKS)
        raise _Objection(f"framework: given {show(given)}, allowed: {', '.join(FRAMEWORKS)}, each with ==version{near}")
    if equals and not _VERSION.fullmatch(version) and version not in framework(name).KNOWN:
        words = "".join(f", or {known}" for known in framework(name).KNOWN if not _VERSION.fullmatch(known))
        raise _Objection(f"framework: given {show(given)}, allowed: a version of numbers, such as {name}==1.0{words}")
    return name, version or None


def _follow(values: dict[str, Any], task: str) -> None:
    """Fills in what follows from other fields where it is not given."""
    values.setdefault("gpus_per_node", min(values["gpus"], 8))
    if task in RL:
        if "seq_len" in values:
            raise _Objection(f"seq_len: given for {task}, allowed: prompt_len and response_len")
        values["seq_len"] = values["prompt_len"] + values["response_len"]
    else:
        values["prompt_len"] = values["response_len"] = 0
    values.setdefault("expected_len", values["seq_len"])


def _check(values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuses fields that are fine alone and not together."""
    task, gpus, per_node = values["task"], values["gpus"], values["gpus_per_node"]
    for place in given:
        if task not in RL and place.partition(".")[0] in RL_FIELDS:
            raise _Objection(f"{place}: given for {task}, allowed: for RL tasks alone; {task} has seq_len")
    _unbuilt(values)
    if values["placement"] != "colocated" and task not in RL:
        raise _Objection(f"placement: given 'separate', allowed: colocated; {task} has no role on GPUs of its own")
    if values["method"] == "full":
        _no_adapters(given)
    if gpus > per_node and gpus % per_node:
        allowed = f"a multiple of gpus_per_node = {per_node}, as {_near(gpus, per_node)}"
        raise _Objection(f"gpus: given {gpus}, allowed: {allowed}")
    expected, cap = values["expected_len"], values["seq_len"]
    if expected > cap:
        named = "prompt_len + response_len" if task in RL else "seq_len"
        raise _Objection(f"expected_len: given {expected}, allowed: at most {named} = {cap}")


def _batched(s: Scenario, given: Mapping[str, Any]) -> Scenario:
    """`s` with a global batch of whole steps; refuses one that is not, and GPUs that nothing joins."""
    roles = {name: own for name in TRAINED_ROLES if s.has(name) and (own := s.role(name))}
    for name, own in roles.items() or [("", s)]:
        if own.gpus > 1 and own.sharding == "none":
            place = _place(s, name, "sharding")
            raise _Objection(f"{place}: given 'none' with gpus = {own.gpus}, allowed: {', '.join(_SHARDINGS)}")
        step = _step(own)
        place = _place(s, name, "global_batch")
        if own.global_batch % step and (place in given or place.startswith("roles.")):
            raise _Objection(
                f"{place}: given {own.global_batch}, allowed: a multiple of micro_batch x data-parallel GPUs = "
                f"{step // own.data_parallel} x {own.data_parallel} = {step}, as {_near(own.global_batch, step)}"
            )
    if "global_batch" in given:
        return s
    # A framework's default batch is made for its own number of GPUs: the largest whole number of steps within it.
    step = _step(next(iter(roles.values()), s))
    return replace(s, global_batch=max(1, s.global_batch // step) * step)


def _step(s: Scenario) -> int:
    """The least global batch: one forward on every data-parallel GPU."""
    return s.rows // (2 if s.task in PAIRED else 1) * s.data_parallel


def _place(s: Scenario, name: str, field: str) -> str:
    """Where a field of a role stands: with the role if it says something of its own, else with the job."""
    own = s.roles.get(name, "none")
    return f"roles.{name}.{field}" if not isinstance(own, str) and field in own else field


def _rollout(values: Mapping[str, Any]) -> Rollout:
    """The rollout's fields; without GPUs of its own it runs on all."""
    own = {f.name: values.get(f"rollout.{f.name}") for f in fields(Rollout)}
    own["gpus"] = own["gpus"] or values["gpus"]
    return Rollout(**own)  # type: ignore[arg-type]


def _serving(s: Scenario, given: Mapping[str, Any]) -> str | None:
    """One line on why the rollout cannot run where it is; None when it can."""
    if not s.rollout:
        return None
    tp, heads = s.rollout.tensor_parallel, s.architecture.heads
    if s.rollout.engine != "vllm":
        if s.rollout.sleep and "rollout.sleep" in given:
            return f"rollout.sleep: given true with engine {s.rollout.engine!r}, allowed: with vllm"
        return None
    if heads % tp:
        return f"rollout.tensor_parallel: given {tp}, allowed: a divisor of the model's {heads} attention heads"
    if s.rollout.gpus % tp:
        return f"rollout.tensor_parallel: given {tp}, allowed: a divisor of the rollout's {s.rollout.gpus} GPUs"
    if s.rollout.sleep and s.placement == "separate":
        return (
            "rollout.sleep: given true with placement 'separate', allowed: with colocated, where others need the GPUs"
        )
    return None


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


def _roles(
    values: Mapping[str, Any],
    own: Mapping[str, Any],
    catalog: Catalog,
    defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> dict[str, Mapping[str, Any] | str]:
    """Every role of the task by name: `none`, or its model and what else differs, as dotted keys.

    `defaults` are the framework's for what a user says: they complete the adapters of a role that alone has some.
    """
    task = values["task"]
    names = ROLES.get(task, ())
    for name, role in own.items():
        if name not in names and role != "none":
            allowed = ", ".join(names) or "none beside the trained model, which the other fields describe"
            raise _Objection(f"roles.{name}: not a role of {task}, allowed: {allowed}")
    roles: dict[str, Mapping[str, Any] | str] = {}
    for name in names:
        role = own.get(name, values.get(f"roles.{name}", {}))
        if isinstance(role, str):
            roles[name] = role
            continue
        differs = _flatten(role)
        if not (task in RL and name in TRAINED_ROLES):
            for place in differs:
                if place not in FROZEN_ROLE_FIELDS:
                    allowed = ", ".join(FROZEN_ROLE_FIELDS)
                    raise _Objection(f"roles.{name}.{place}: given for a role that is not trained, allowed: {allowed}")
        head = f"roles.{name}."
        differs = {k.removeprefix(head): v for k, v in values.items() if k.startswith(head)} | differs
        if values["placement"] == "colocated" and differs.pop("gpus", values["gpus"]) != values["gpus"]:
            allowed = f"{values['gpus']}, as all roles share the GPUs"
            raise _Objection(f"roles.{name}.gpus: given {role['gpus']}, allowed: {allowed}")
        try:
            roles[name] = _role(values, differs, catalog, defaults)
        except (_Objection, CatalogError, ConfigError) as error:
            raise _Objection(f"roles.{name}.{error}") from None
    if task in RL and not any(roles.get(name, "none") != "none" for name in TRAINED_ROLES):
        raise _Objection(f"roles.actor: given 'none', allowed: a role to train for {task}")
    return roles


def _role(
    values: Mapping[str, Any],
    own: dict[str, Any],
    catalog: Catalog,
    defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> dict[str, Any]:
    """What one role has otherwise than the job, checked as the job's own fields are."""
    model = catalog.model(own.get("model", values["model"]))
    _unbuilt(own)
    method = own.get("method", values["method"])
    if method == "full":
        _no_adapters(own)
    else:
        if values["method"] == "full":
            filled = defaults({**values, "method": method})
            own = {place: value for place, value in filled.items() if place.startswith("lora.")} | own
        _lora({**values, **own}, model.architecture)
    return own | {"model": model.id}


def _unbuilt(fields: Mapping[str, Any]) -> None:
    """Refuses parallelism that is not computed yet."""
    for place in UNBUILT_DEGREES:
        if fields.get(place, 1) > 1:
            raise _Objection(f"{place}: given {fields[place]}, not modelled yet, allowed: 1")
    if fields.get("sequence_parallel"):
        raise _Objection("sequence_parallel: given true, not modelled yet, allowed: false")


def _no_adapters(given: Mapping[str, Any]) -> None:
    """Refuses what only adapters have."""
    for place in given:
        if place.startswith("lora."):
            raise _Objection(f"{place}: given with method full, which has no adapters, allowed: with lora, qlora")


def _placed(values: dict[str, Any], roles: dict[str, Mapping[str, Any] | str]) -> dict[str, Mapping[str, Any] | str]:
    """The roles with GPUs of their own where placement is separate: who says nothing of the actor and vLLM gets what
    is left, other roles join a partner's."""
    if values["placement"] == "colocated":
        if values.get("rollout.gpus") not in (None, values["gpus"]):
            raise _Objection(
                f"rollout.gpus: given {values['rollout.gpus']}, allowed: {values['gpus']}, as all roles share the GPUs"
            )
        return roles
    total = values["gpus"]
    own = {name: role["gpus"] for name, role in roles.items() if not isinstance(role, str) and "gpus" in role}
    open_ends = ["actor"] if roles.get("actor", "none") != "none" and "actor" not in own else []
    if values["rollout.engine"] == "vllm":
        if values.get("rollout.gpus"):
            own["rollout"] = values["rollout.gpus"]
        else:
            open_ends.append("rollout")
    left = total - sum(own.values())
    if len(open_ends) == 1 and left > 0:
        own[open_ends[0]] = left
    elif open_ends or left:
        place = "rollout.gpus" if "rollout" in open_ends else "roles.actor.gpus" if open_ends else "gpus"
        parts = " + ".join(f"{name} {count}" for name, count in own.items()) or "none"
        asked = "".join(f" + {name} ?" for name in open_ends) or f" = {sum(own.values())}"
        raise _Objection(
            f"{place}: given {total} GPUs for {parts}{asked}, allowed: GPUs of roles and rollout that add up to "
            f"gpus = {total}"
        )
    values["rollout.gpus"] = own.get("rollout")
    return {
        name: role if isinstance(role, str) or name not in own else {**role, "gpus": own[name]}
        for name, role in roles.items()
    }


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
