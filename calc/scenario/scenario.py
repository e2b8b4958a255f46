"""A scenario: a user's description of a job, with everything unsaid filled in by the framework's defaults.

The fields, their values, bounds and units are in `scenario.schema.json`. This module has the typed object and the
reading of nested and dotted keys; `calc.scenario.rules` has the rules that join several fields. Every error is one line
that names the field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from calc.base.schema import InputError, closest, show, validator
from calc.catalog.catalog import Catalog, CatalogError, load
from calc.frameworks.choices import Choices
from calc.frameworks.torch import litgpt
from calc.models.architecture import Architecture, ConfigError
from calc.scenario import rules
from calc.scenario.rules import Objection
from calc.scenario.words import DEEPSPEED, PAIRED, PARTNERS, RL, TRAINED_ROLES

if TYPE_CHECKING:
    from calc.base.plan import Keeps

SCHEMA_FILE = Path(__file__).with_name("scenario.schema.json")
SCHEMA: Mapping[str, Any] = json.loads(SCHEMA_FILE.read_text("utf-8"))
NEEDED = tuple(SCHEMA["required"])

FRAMEWORKS = ("torch", "openrlhf", "verl", "trl")
# Defaults that no framework decides. Lengths and batches that follow from other fields are filled in by `parse`.
NEUTRAL: Mapping[str, Any] = {
    "trainer": "own",
    "gpus": 1,
    "method": "full",
    "double_quantization": True,
    "no_sync": False,
    "memory_efficient_linear": True,
    "tensor_parallel": 1,
    "pipeline_parallel": 1,
    "context_parallel": 1,
    "sequence_parallel": False,
    "expert_parallel": 1,
    "packing": False,
    "expandable_segments": False,
    "placement": "colocated",
    "rollout.v0": False,
    **rules.ABSENT,
    "versions.bitsandbytes": "0.50.2",  # no framework pins it
}

_VERSION = re.compile(r"[0-9]+(?:\.[0-9]+)*")
_DEEPEST = 4  # roles.reference.lora.rank


class ScenarioError(InputError):
    """A scenario that cannot be used; its text is one line naming the place, the field, what was given and allowed."""


class Framework(Protocol):
    """The interface of a module of `calc.frameworks`: what one framework keeps in memory, by version."""

    KNOWN: tuple[str, ...]
    CHOICES: Choices

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
        """The reason that the framework cannot run `s`, in one line, or None."""

    def one_thread(self, s: Scenario) -> bool:
        """True if its launcher leaves each rank of `s` one CPU thread, with which Adam runs on the host, too."""

    def keeps(self, s: Scenario) -> Keeps:
        """The roles and stages that the framework runs for `s`, and what they keep in memory."""


@cache
def framework(name: str) -> Framework:
    """The module of `calc.frameworks` called `name`."""
    return cast(Framework, import_module(f"calc.frameworks.{name}.{name}"))


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters beside frozen weights: `rank` r, the `targets` that get one, input `dropout`, format, FSDP unit."""

    rank: int
    targets: str | tuple[str, ...]
    dropout: float
    dtype: str
    units: str

    @property
    def modules(self) -> str | tuple[str, ...]:
        """`targets` by their last names, which are unique in a layer: PEFT also matches the end of a module's path."""
        if isinstance(self.targets, str):
            return self.targets
        return tuple([target.rpartition(".")[2] for target in self.targets])


@dataclass(frozen=True, slots=True)
class Offload:
    """The tensors that live in host memory."""

    optimizer: bool
    parameters: bool


@dataclass(frozen=True, slots=True)
class Rollout:
    """The way responses are generated: by `engine`, `n` for each of `batch` prompts, vLLM on `gpus` of the job's GPUs.

    `micro_batch` sequences are scored at once, as many as the actor trains at once if it is None; if batches are
    dynamic, as many as `max_tokens_per_gpu` hold, by default the actor's. `v0`: vLLM's first engine runs, where a
    release has two. `max_num_seqs` and `max_num_batched_tokens` are None if vLLM decides. `layered_summon`: adapters
    are gathered for the engine a layer at a time.
    """

    engine: str
    tensor_parallel: int
    gpu_memory_utilization: float
    n: int
    micro_batch: int | None
    max_tokens_per_gpu: int | None
    sleep: bool
    v0: bool
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    layered_summon: bool
    batch: int
    gpus: int


@dataclass(frozen=True)
class Scenario:
    """One job, every field filled in; made by `parse`, which also checks it.

    Names, values and units are those of `scenario.schema.json`; `lora` is None if nothing is adapted. `architecture` is
    the trained model's; `architectures` has those of the roles that say which model they run, and `warnings` what a
    reader should know though nothing forbids it, whatever the card. `rollout` is None and `prompt_len` and
    `response_len` are 0 if nothing is generated; for RL `seq_len` is their sum.
    """

    model: str
    task: str
    framework: str
    framework_version: str
    trainer: str
    gpu: str
    gpus: int
    gpus_per_node: int
    host_memory: float | None
    method: str
    lora: Lora | None
    double_quantization: bool
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
    no_sync: bool
    memory_efficient_linear: bool
    checkpointing: str
    attention: str
    loss: str
    logprob: str
    entropy_coeff: float
    micro_batch: int
    max_tokens_per_gpu: int | None
    global_batch: int
    seq_len: int
    prompt_len: int
    response_len: int
    expected_len: int
    packing: bool
    expandable_segments: bool
    rollout: Rollout | None
    roles: Mapping[str, Mapping[str, Any] | str] = field(hash=False)
    versions: Mapping[str, str] = field(hash=False)
    placement: str
    architecture: Architecture = field(repr=False, compare=False)
    architectures: Mapping[str, Architecture] = field(default_factory=dict, repr=False, compare=False)
    warnings: tuple[str, ...] = field(default=(), repr=False, compare=False)
    framework_asked: str = field(default="", repr=False, compare=False)  # with the version that was named, if one was

    @property
    def layout(self) -> str:
        """`precision` without the 16-bit type: fp16 is laid out as bf16 is, by DeepSpeed or by autocast."""
        if self.precision != "fp16":
            return self.precision
        return "mixed" if self.sharding in DEEPSPEED else "autocast"

    @property
    def data_parallel(self) -> int:
        """The number of ranks that work on different sequences."""
        return self.gpus // self.together

    @property
    def together(self) -> int:
        """The number of GPUs that work on the same sequences."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def shards(self) -> int:
        """GPUs with the same part of every layer, over which weights, gradients and states can be spread."""
        return self.data_parallel * self.context_parallel

    @property
    def communicators(self) -> int:
        """The groups in which a GPU communicates: one for its shards, and one for each kind of parallelism."""
        degrees = (self.shards, self.tensor_parallel, self.pipeline_parallel, self.context_parallel)
        return sum([degree > 1 for degree in degrees])

    @property
    def rows(self) -> int:
        """Sequences of one forward on one GPU.

        These are the micro batch, both halves of its pairs, or what a framework makes of it.
        """
        if self.max_tokens_per_gpu:
            return self.filled(self.max_tokens_per_gpu, self.sequences)
        return self._forward(self.micro_batch)

    def filled(self, tokens: int, sequences: int) -> int:
        """Sequences of a dynamic batch of `tokens` a GPU: at least one, at most the GPU's share of all `sequences`."""
        held = tokens * self.context_parallel // self.expected_len
        return max(1, min(held, -(-sequences // self.data_parallel)))

    @property
    def scoring_rows(self) -> int:
        """Sequences of one forward that scores responses, on one GPU: no more than it has of a rollout."""
        if not self.rollout:
            return self.rows
        responses = self.rollout.batch * self.rollout.n
        if self.max_tokens_per_gpu:
            return self.filled(self.rollout.max_tokens_per_gpu or self.max_tokens_per_gpu, responses)
        if self.rollout.micro_batch is None:
            return self.rows
        return min(self._forward(self.rollout.micro_batch), max(1, responses // self.data_parallel))

    def scored_by(self, name: str) -> int:
        """`scoring_rows` of the role `name`; a frozen role may have a micro batch of its own."""
        own = self._own[name]
        return own.rows if name not in TRAINED_ROLES and "micro_batch" in self.roles[name] else own.scoring_rows

    def _forward(self, micro_batch: int) -> int:
        count = getattr(framework(self.framework), "rows", None)
        if count is not None and self.rollout:
            return int(count(self.task, self.framework_version, self._batches(micro_batch)))
        return micro_batch * (2 if self.task in PAIRED else 1)

    def _batches(self, micro_batch: int) -> dict[str, int]:
        assert self.rollout
        return {
            "micro_batch": micro_batch,
            "gpus": self.gpus,
            "rollout.n": self.rollout.n,
            "rollout.batch": self.rollout.batch,
        }

    @property
    def sequences(self) -> int:
        """Sequences of an optimizer step: the global batch, both halves of its pairs."""
        return self.global_batch * (2 if self.task in PAIRED else 1)

    @property
    def accumulation(self) -> int:
        """Micro batches of one GPU in an optimizer step; a dynamic one may be left less full."""
        if self.max_tokens_per_gpu:
            return -(-self.sequences // (self.rows * self.data_parallel))
        return max(1, self.sequences // (self.rows * self.data_parallel))

    @property
    def nodes(self) -> int:
        """The number of nodes that the job's GPUs fill."""
        return -(-self.gpus // self.gpus_per_node)

    def has(self, name: str) -> bool:
        """True if the job runs the role `name`."""
        return self.roles.get(name, "none") != "none"

    def group(self, name: str) -> str:
        """The role whose GPUs the role `name` uses: itself if it has its own, or if all roles share theirs."""
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
        """The scenario as the role `name` sees it, with the role's own values; None if the role does not run."""
        return self._own.get(name)

    @cached_property
    def keeps(self) -> Keeps:
        """The roles and stages that the framework runs for the job, and what they keep in memory."""
        keeps = framework(self.framework).keeps(self)
        return keeps.without_rollout() if self.rollout and self.rollout.engine == "none" else keeps

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
        if "micro_batch" in own:
            differs.setdefault("max_tokens_per_gpu", None)
        if differs.get("method") == "full":
            differs["lora"] = None
        elif lora:
            targets = lora.get("targets")
            differs["lora"] = replace(
                self.lora or Lora(**lora), **lora | ({"targets": tuple(targets)} if isinstance(targets, list) else {})
            )
        differs["architecture"] = self.architectures.get(name, self.architecture)
        if offload:
            differs["offload"] = replace(self.offload, **offload)
        return _with(self, differs)

    def as_dict(self) -> dict[str, Any]:
        """Every field of the contract, defaults filled in, ready for JSON; `parse` of it gives the same scenario."""
        data = {name: getattr(self, name) for name in SCHEMA["properties"]}
        if self.rollout:
            data["seq_len"] = None
            data["rollout"] = {f.name: getattr(self.rollout, f.name) for f in fields(Rollout)}
        else:
            data["prompt_len"] = data["response_len"] = None
        if self.max_tokens_per_gpu:
            data["micro_batch"] = None
        data["framework"] = self.framework_asked
        data["offload"] = {"optimizer": self.offload.optimizer, "parameters": self.offload.parameters}
        if self.lora:
            targets = self.lora.targets if isinstance(self.lora.targets, str) else list(self.lora.targets)
            data["lora"] = {
                "rank": self.lora.rank, "targets": targets, "dropout": self.lora.dropout, "dtype": self.lora.dtype,
                "units": self.lora.units,
            }  # fmt: skip
        data["roles"] = {name: own if isinstance(own, str) else dict(own) for name, own in self.roles.items()}
        data["versions"] = dict(self.versions)
        return data


_FIELDS = tuple(f.name for f in fields(Scenario))


def _with(s: Scenario, changes: Mapping[str, Any]) -> Scenario:
    """`dataclasses.replace` in a tenth of the time, for searches that call it thousands of times; checks no names."""
    own = {name: s.__dict__[name] for name in _FIELDS}  # without cached properties
    own.update(changes)
    made = object.__new__(Scenario)
    made.__dict__.update(own)
    return made


def on_card(s: Scenario, gpu: str) -> Scenario:
    """`s` on another card, or on none, "": scenarios that differ in the card alone become equal."""
    return _with(s, {"gpu": gpu})


# The fields that go from values to object as they are.
_PLAIN = tuple(
    f.name for f in fields(Scenario) if f.type in ("str", "int", "bool") and not f.name.startswith("framework")
)


def parse(data: Any, *, where: str = "scenario", catalog: Catalog | None = None) -> Scenario:
    """The scenario that `data` describes, with the defaults of the framework and version it names.

    `data` maps fields to values as the contract spells them, nested (`lora: {rank: 8}`) or dotted (`lora.rank: 8`);
    a field that the schema lets be null counts as not given when it is. Raises ScenarioError, one line that starts
    with `where`, for anything that cannot be used.
    """
    with _at(where):
        return _fill(_valid(data, where, NEEDED), catalog or load())


def given(
    data: Any, *, where: str, catalog: Catalog | None = None, needed: tuple[str, ...] = ("model", "task")
) -> dict[str, Any]:
    """The fields that `data` gives, by dotted key, the others left open; `parse` can use each of them alone.

    Model and GPU are in the catalog, the framework is known. Raises ScenarioError as `parse` does, also if one of
    `needed` is missing.
    """
    catalog = catalog or load()
    with _at(where):
        nested = _valid(data, where, needed)
        alike = {f"roles.{name}": own for name, own in nested.get("roles", {}).items() if own == {}}
        fields = rules.flatten(nested) | alike  # a role that runs, and differs in nothing
        if "model" in fields:
            catalog.model(fields["model"])
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
        raise ScenarioError(f"{where}: {error}") from None
    except InputError as error:
        raise ScenarioError(str(error)) from None


def _valid(data: Any, where: str, needed: tuple[str, ...]) -> dict[str, Any]:
    """The fields of `data`, nested, as the schema allows them."""
    if not isinstance(data, Mapping):
        raise Objection(f"given {show(data)}, allowed: a mapping of fields")
    nested: dict[str, Any] = {}
    for key, value in data.items():
        _put(nested, key, value, "")
    validator(SCHEMA_FILE, needed)(nested, where)
    return nested


# Fields on which no default depends, so that they can be changed alone: see `vary`.
VARIED = frozenset({
    "micro_batch", "checkpointing", "loss", "logprob", "offload.optimizer", "offload.parameters",
    "rollout.tensor_parallel", "rollout.gpu_memory_utilization", "rollout.sleep",
})  # fmt: skip
_FROZEN_OFFLOAD = re.compile(r"roles\.(reference|reward)\.offload\.parameters")


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
    varied = _with(s, {**own, "offload": offload, "rollout": rollout, "roles": roles})
    given = {**changes, "global_batch": s.global_batch}
    try:
        rules.batched(varied, given)
        reason = rules.serving_fault(varied, given) or framework(s.framework).refuse(varied)
    except Objection as objection:
        reason = str(objection)
    if reason is not None:
        raise ScenarioError(f"scenario: {reason}")
    return varied


def _put(into: dict[str, Any], key: Any, value: Any, path: str) -> None:
    """Adds a field, dotted or not, to a nested mapping; one field twice is an error."""
    if not isinstance(key, str):
        raise Objection(f"{path[:-1] or 'a field'}: given the name {show(key)}, allowed: text")
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
    raise Objection(f"{path}{head}: given twice, allowed: once")


def _fill(nested: dict[str, Any], catalog: Catalog) -> Scenario:
    """The scenario made of `nested` fields that have passed the schema."""
    own_roles = nested.pop("roles", {})
    given = rules.flatten(nested)
    name, version = _framework(given.get("framework", "torch"))
    task = given["task"]
    module = framework(name)
    known = module.nearest(version) if version else module.KNOWN[-1]
    said = given | rules.flatten({"roles": own_roles})
    own = module.defaults(task, known, said)
    usual = {**NEUTRAL, **own}
    values: dict[str, Any] = {**usual, **given}
    rules.had(values | said, own, f"{name} {known}")
    if name != "torch" and values["trainer"] != usual["trainer"]:
        raise Objection(f"trainer: given {values['trainer']!r}, allowed with {name}: {usual['trainer']}")
    if not values["memory_efficient_linear"] and (name, values["sharding"]) != ("torch", "zero3"):
        place = f"with {name} and sharding {values['sharding']}"
        raise Objection(f"memory_efficient_linear: given false {place}, allowed: true, or false with torch and zero3")
    model = catalog.model(given["model"])
    architecture = litgpt.modelled(model.architecture) if values["trainer"] == "litgpt" else model.architecture
    values["model"], values["gpu"] = model.id, catalog.gpu(given["gpu"]).id
    roles = rules.roles_of(values, own_roles, catalog, partial(module.defaults, task, known))
    rules.follow(values, given, task)
    rules.check(values, given)
    roles = rules.placed(values, roles)
    scenario = Scenario(
        **{place: values[place] for place in _PLAIN},
        framework=name,
        host_memory=values.get("host_memory"),
        entropy_coeff=float(values["entropy_coeff"]),
        max_tokens_per_gpu=values["max_tokens_per_gpu"],
        framework_version=known,
        framework_asked=f"{name}=={version or known}",
        lora=_lora(values, architecture),
        offload=Offload(values["offload.optimizer"], values["offload.parameters"]),
        rollout=_rollout(values) if task in RL else None,
        roles=roles,
        versions={place[9:]: value for place, value in values.items() if place.startswith("versions.")},
        architecture=architecture,
        architectures={
            role: catalog.model(own["model"]).architecture for role, own in roles.items() if not isinstance(own, str)
        },
        warnings=tuple(rules.warnings_of(values, architecture, name, version, known)),
    )
    rules.cut(scenario)
    scenario = rules.batched(scenario, given)
    if scenario.max_tokens_per_gpu:
        scenario = replace(scenario, micro_batch=scenario.rows)  # so that other readers of the field see what runs
    if (reason := rules.serving_fault(scenario, given) or module.refuse(scenario)) is not None:
        raise Objection(reason)
    return scenario


def _framework(given: str) -> tuple[str, str | None]:
    """The framework's name, and its version if one is named."""
    name, equals, version = given.partition("==")
    if name not in FRAMEWORKS:
        near = closest(name, FRAMEWORKS)
        raise Objection(f"framework: given {show(given)}, allowed: {', '.join(FRAMEWORKS)}, each with ==version{near}")
    if equals and not _VERSION.fullmatch(version) and version not in framework(name).KNOWN:
        words = "".join(f", or {known}" for known in framework(name).KNOWN if not _VERSION.fullmatch(known))
        raise Objection(f"framework: given {show(given)}, allowed: a version of numbers, such as {name}==1.0{words}")
    return name, version or None


def _rollout(values: Mapping[str, Any]) -> Rollout:
    """The rollout's fields; without GPUs of its own it runs on all."""
    own = {f.name: values.get(f"rollout.{f.name}") for f in fields(Rollout)}
    own["gpus"] = own["gpus"] or values["gpus"]
    return Rollout(**own)  # type: ignore[arg-type]


def _lora(values: Mapping[str, Any], architecture: Architecture) -> Lora | None:
    """The adapters, their targets checked against the model's layers."""
    if values["method"] == "full":
        return None
    targets = rules.adapters(architecture, values["lora.rank"], values["lora.targets"])
    return Lora(values["lora.rank"], targets, float(values["lora.dropout"]), values["lora.dtype"], values["lora.units"])
