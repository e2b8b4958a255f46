"""The cases of a suite, in order, each with its name, its job for the worker, and its expected time."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from calc.accuracy.largest_size import LIKELY, SIZES, predicted
from calc.base.optimizers import OPTIMIZERS
from calc.base.reading import parse_mapping, read_bytes
from calc.base.schema import InputError, validator
from calc.catalog.catalog import GPU, Catalog, CatalogError
from calc.estimate.verdict import FITS
from calc.models.architecture import parameters
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario
from calc.scenario.words import DEEPSPEED, PAIRED

from .machine import Machine

ROOT = Path(__file__).resolve().parents[2]
SUITE_SCHEMA = Path(__file__).with_name("suite.schema.json")
STEPS = 5  # the worker leaves the first two out of the median
RATES = ("decode", "matmul", "serve")
# The values that `steps` supports; anything else is recorded as not run.
SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "task": ("pretrain", "sft", "rm", "dpo", "ppo"),
    "framework": ("torch",),
    "trainer": ("own",),
    "method": ("full", "lora", "qlora"),
    "precision": ("bf16", "autocast", "fsdp-mixed", "fp32"),
    "optimizer": (
        "adamw", "adamw-8bit", "adamw-paged-8bit", "adamw-paged", "adamw-torchao-8bit", "adafactor", "sgd",
        "sgd-momentum", "none",
    ),
    "optimizer_in_backward": (False,),
    "sharding": ("none", "fsdp2", *DEEPSPEED),
    "tensor_parallel": (1,),
    "context_parallel": (1,),
    "pipeline_parallel": (1,),
    "checkpointing": ("none", "selective", "full"),
    "compile": ("none",),
    "float8": ("none",),
    "kernels": ("eager",),
    "loss": ("full",),
    "packing": (False,),
}  # fmt: skip
ZERO: Mapping[str, tuple[Any, ...]] = {  # the values supported if DeepSpeed's engine runs the step
    "method": ("full", "lora"),
    "precision": ("mixed",),
    "optimizer": ("adamw", "sgd"),
}
TRL: Mapping[str, tuple[Any, ...]] = {  # the values that the module `trl` supports instead
    "task": ("sft", "rm", "dpo", "kto", "orpo", "simpo", "grpo"),
    "framework": ("trl",),
    "trainer": ("transformers",),
    "precision": ("bf16", "autocast", "fp16", "fp32"),
    "sharding": ("none",),
    "optimizer": (
        "adamw", "adamw-8bit", "adamw-paged-8bit", "adamw-paged", "adamw-torchao-8bit", "adafactor", "lion", "sgd",
        "sgd-momentum",
    ),
    "checkpointing": ("none", "full"),
    "kernels": ("eager", "liger"),
    "loss": ("full", "fused"),
    "packing": (False, True),
}  # fmt: skip
TORCHTUNE: Mapping[str, tuple[Any, ...]] = {  # those that the module `torchtune` supports instead
    "task": ("pretrain", "sft"),
    "trainer": ("torchtune",),
    "precision": ("bf16", "fp32"),
    "optimizer_in_backward": (False, True),
    "sharding": ("none",),
    "checkpointing": ("none", "full"),
    "attention": ("sdpa",),
    "compile": ("none", "model", "loss", "model-and-loss"),
    "loss": ("full", "chunked"),
    "packing": (False, True),
}
TORCHTITAN: Mapping[str, tuple[Any, ...]] = {  # the values that the module `torchtitan` supports instead
    "task": ("pretrain",),
    "method": ("full",),
    "precision": ("fsdp-mixed", "autocast"),
    "optimizer": ("adamw",),
    "sharding": ("none", "ddp", "fsdp2"),
    "tensor_parallel": (1, 2, 4, 8),
    "context_parallel": (1, 2, 4, 8),
    "trainer": ("torchtitan",),
    "compile": ("none", "model", "loss", "model-and-loss"),
    "float8": ("none", "tensorwise", "rowwise", "rowwise_with_gw_hp"),
    "optimizer_in_backward": (False, True),
}
MODULES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "steps": {}, "trl": TRL, "torchtune": TORCHTUNE, "torchtitan": TORCHTITAN,
}  # fmt: skip
OFFLOADING = ("trl", "torchtune")  # the modules whose checkpoints can wait in host memory
# What torchtune's builders place adapters on: any product of attention, with all of the MLP's or none.
ATTENTION, MLP = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
# Assumptions on time: a share of the card's bf16 rate, and the seconds of a process before its first step. Only the
# display of the time left and `--minutes` depend on them, and both are corrected by the cases already run.
SHARE_OF_PEAK, TFLOPS_UNKNOWN, TFLOPS_CPU = 0.35, 100.0, 0.02
START_SECONDS, TOKEN_SECONDS, PROBES = 10.0, 0.001, 4  # TOKEN_SECONDS: for each token and layer, on the host
COMPILE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Edge:
    """A field, and the search for its largest value that runs among the multiples of `step` up to `highest`."""

    field: str
    step: int
    highest: int


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure: a scenario's given fields, and how it is run. `where` is its place in the suite."""

    scenario: Mapping[str, Any]
    where: str = "case"
    kind: str = "step"
    steps: int = STEPS
    edge: Edge | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of the rates

    @property
    def name(self) -> str:
        """`model/task/s<seq_len>/mb<micro_batch>` and every other field given; unique in a suite."""
        flat = _flatten(self.scenario)
        if flat.get("framework") == "torch":
            flat.pop("framework")
        model = str(flat.pop("model")).removesuffix("/config.json").rpartition("/")[2]
        parts = [model, str(flat.pop("task"))]
        for name, short in (("seq_len", "s"), ("micro_batch", "mb")):
            given = flat.pop(name, None)
            if self.edge and self.edge.field == name:
                parts.append(f"{short}-edge")
            elif given is not None:
                parts.append(f"{short}{given}")
        parts += [f"{name}={'+'.join(v) if isinstance(v, list) else v}" for name, v in flat.items()]
        parts += [self.kind] if self.kind != "step" else []
        return "/".join(parts)

    def at(self, value: int) -> Case:
        """The case with one value of the edge's field, an ordinary case of its own."""
        assert self.edge is not None
        return replace(self, scenario={**self.scenario, self.edge.field: value}, edge=None)


def _flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        flat.update(_flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value})
    return flat


def read(path: Path) -> list[Case]:
    """The cases of a suite's file, or the one of a scenario's.

    Raises InputError, one line that names the file and the field, for a case that cannot be used.
    """
    where = str(path)
    data = parse_mapping(read_bytes(path, where), where)
    if "cases" not in data and "model" in data:
        data = {"cases": [data]}
    validator(SUITE_SCHEMA)(data, where)
    defaults = data.get("defaults", {})
    cases = [c for n, given in enumerate(data["cases"]) for c in _expand(given, defaults, f"{where}: cases[{n}]")]
    count = Counter(case.name for case in cases)
    for case in cases:
        if count[case.name] > 1:
            raise InputError(f"{case.where}: given {case.name} twice, allowed: each case once")
    return cases


def _expand(given: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> Iterator[Case]:
    """A case for each combination of the lists under `each`, the last field varying fastest."""
    each: Mapping[str, Sequence[Any]] = given.get("each", {})
    own = {name: value for name, value in given.items() if name not in ("each", "bench")}
    bench = dict(given.get("bench", {}))
    edge = bench.pop("edge", None)
    if edge:
        step, highest = SIZES[edge["field"]]
        edge = Edge(edge["field"], edge.get("step", step), edge.get("highest", highest))
    for values in itertools.product(*each.values()):
        fields = {**defaults, **own, **dict(zip(each, values, strict=True))}
        scenario = {name: value for name, value in fields.items() if value is not None}
        for name in ("model", "task"):
            if not isinstance(scenario.get(name), str):
                raise InputError(f"{where}: missing field {name!r}")
        yield Case(
            scenario,
            where,
            bench.get("kind", "step"),
            bench.get("steps", STEPS),
            edge,
            {name: bench[name] for name in ("batches", "lengths", "tokens") if name in bench},
        )


def module_of(s: Scenario) -> str:
    """The worker's module that runs a scenario's steps, a key of MODULES."""
    return next((name for name in ("trl", "torchtune", "torchtitan") if name in (s.framework, s.trainer)), "steps")


@dataclass(frozen=True, slots=True)
class Plan:
    """The cases of a suite on one machine: their scenarios, their jobs for the worker, and their expected times."""

    catalog: Catalog
    machine: Machine
    gpu: GPU  # the GPU at hand, as the catalog knows it

    def card(self, case: Case) -> GPU:
        """The card of the case: its own `gpu`, or the one at hand."""
        return self.catalog.gpu(str(case.scenario["gpu"])) if "gpu" in case.scenario else self.gpu

    def check(self, case: Case) -> None:
        """Raises InputError if the case's scenario cannot be read."""
        try:
            if case.kind in RATES:
                self.catalog.model(case.scenario["model"])
            else:
                self.scenario(case.at(case.edge.step) if case.edge else case)
            self.card(case)
        except CatalogError as error:
            raise InputError(f"{case.where}: {error}") from None

    def runnable(self, cases: Sequence[Case]) -> list[Case]:
        """The cases whose card has no more memory than the one at hand; raises InputError if there is none."""
        whole = self.gpu.usable_bytes if self.machine.cuda else inf
        found = [case for case in cases if self.card(case).usable_bytes <= whole]
        if cases and not found:
            raise InputError(
                f"{cases[0].where}: gpu: given {self.card(cases[0]).id}, which has more memory than the {self.gpu.id} "
                "at hand, allowed: one with less"
            )
        return found

    def given(self, case: Case) -> dict[str, Any]:
        """The case's fields, with the card and the versions of the machine filled in."""
        versions = {**self.machine.plain_versions, **case.scenario.get("versions", {})}
        given = {**case.scenario, "gpu": self.card(case).id}
        return given if case.kind in RATES else {**given, "versions": versions}

    def scenario(self, case: Case) -> Scenario:
        """The case as `calc` reads it."""
        return parse(self.given(case), where=case.where, catalog=self.catalog)

    def fields(self, case: Case) -> dict[str, Any]:
        """The scenario as a record holds it: defaults filled in, nulls left out."""
        full = self.given(case) if case.kind in RATES else self.scenario(case).as_dict()
        return {name: value for name, value in full.items() if value is not None}

    def refuse(self, case: Case) -> str | None:
        """The reason why the worker cannot run the case, in one line, or None."""
        if case.kind in RATES:
            return None
        s = self.scenario(case)
        scenario = s.as_dict()
        module = module_of(s)
        supported = {**SUPPORTED, **(ZERO if s.sharding in DEEPSPEED else {}), **MODULES[module]}
        for name, known in supported.items():
            given = scenario[name].partition("==")[0] if name == "framework" else scenario[name]
            if given not in known:
                return f"not run: {name} {given} is not built here"
        offloads = {name for name, on in scenario["offload"].items() if on} - {"masters"}  # of no share here
        if offloads - ({"activations"} if module in OFFLOADING else set()):
            return "not run: offload is not built here"
        if s.expected_len != s.seq_len:
            return "not run: rows shorter than seq_len are not built here"
        if module == "trl":
            return self._refuse_trl(s)
        if module == "torchtitan":
            return self._refuse_torchtitan(s)
        if module == "torchtune":
            return self._refuse_torchtune(s)
        if s.rollout and (s.rollout.engine != "none" or sum(s.has(name) for name in scenario["roles"]) > 1):
            return "not run: of RL one role's update or score is built here, without generation"
        for name, role in scenario["roles"].items():
            if not isinstance(role, str) and set(role) > {"model"}:
                return f"not run: roles.{name} with fields of its own is not built here"
        return None

    def _refuse_trl(self, s: Scenario) -> str | None:
        """The reason why TRL as installed cannot run a scenario whose fields are all supported here, or None."""
        installed = self.machine.versions.get("trl")
        if installed != s.framework_version:
            return f"not run: trl {s.framework_version}, with {installed or 'none'} installed"
        if s.lora and s.lora.dtype != ("bf16" if s.method == "qlora" else "fp32"):
            return f"not run: adapters in {s.lora.dtype}, which the trainer would not make"
        if s.lora and s.lora.dropout and s.task in PAIRED:
            return "not run: dropout of adapters, which the trainer of pairs disables"
        if s.rollout and (s.rollout.engine != "hf" or s.has("reward")):
            return "not run: GRPO with vLLM or a reward model is not built here"
        if s.optimizer_impl not in OPTIMIZERS[s.optimizer].spelled.trl:
            return f"not run: {s.optimizer} as {s.optimizer_impl}, for which the trainer has no name"
        return None

    def _refuse_torchtune(self, s: Scenario) -> str | None:
        """The reason why torchtune as installed cannot run a scenario whose fields are all supported here, or None."""
        installed = self.machine.versions.get("torchtune")
        if installed != s.versions["torchtune"]:
            return f"not run: torchtune {s.versions['torchtune']}, with {installed or 'none'} installed"
        if s.architecture.family not in ("llama", "qwen2"):
            return f"not run: torchtune's {s.architecture.family} is not built here"
        if s.method == "qlora" and s.architecture.family != "llama":
            return f"not run: qlora of {s.architecture.family}, in which torchtune leaves some linears in 16 bits"
        if s.lora and not isinstance(s.lora.targets, str):
            named = {*s.lora.targets}
            if named - ATTENTION - MLP or named & MLP not in (set(), MLP) or not named & ATTENTION:
                return f"not run: adapters on {', '.join(s.lora.targets)}, which torchtune's builders do not place"
        return None

    def _refuse_torchtitan(self, s: Scenario) -> str | None:
        """The reason why torchtitan as installed cannot run a scenario whose fields are all supported, or None."""
        installed = self.machine.versions.get("torchtitan")
        if installed != s.versions["torchtitan"]:
            return f"not run: torchtitan {s.versions['torchtitan']}, with {installed or 'none'} installed"
        family = s.architecture.family
        return None if family in ("llama", "qwen3") else f"not run: torchtitan has no {family}"

    def job(self, case: Case) -> dict[str, Any]:
        """The worker's job: the scenario in full, the configs of its models, and the limit on its memory."""
        fields = self.fields(case)
        reference = fields.get("roles", {}).get("reference", "none")
        models = {"model": fields["model"], **({} if isinstance(reference, str) else {"reference": reference["model"]})}
        return {
            "kind": case.kind,
            "scenario": fields,
            "configs": {role: dict(self.catalog.model(name).config) for role, name in models.items()},
            "steps": case.steps,
            "limit_bytes": self.limit(case),
            "options": dict(case.options),
        }

    def guesses(self, case: Case) -> dict[str, int]:
        """The sizes that `calc` predicts for an edge, in its steps.

        `predicted` is the largest size more likely to fit than not, `predicted_fits` the largest with verdict `fits`.
        """
        edge = case.edge
        assert edge is not None
        # the smallest size is a valid scenario, and only the edge's field differs in the others
        s = self.scenario(case.at(edge.step))
        ways = {"predicted": LIKELY, "predicted_fits": FITS}
        highest = edge.highest // edge.step
        return {name: predicted(s, edge.field, edge.step, highest, self.catalog, p) for name, p in ways.items()}

    def limit(self, case: Case) -> int | None:
        """Bytes that PyTorch may reserve if the card is a smaller one: its memory less a CUDA context.

        None on the card at hand. The context is the one that the machine's probe saw with kernels loaded.
        """
        card = self.card(case)
        if card.id == self.gpu.id or not self.machine.cuda:
            return None
        return card.usable_bytes - (self.machine.context_bytes or 0)

    def environment(self, case: Case) -> dict[str, str]:
        """Environment variables of the case's process; PyTorch before 2.9 read the first name."""
        whole = case.at(case.edge.step) if case.edge else case
        rates = case.kind in RATES
        module = "steps" if rates else module_of(self.scenario(whole))
        setting = f"expandable_segments:{not rates and self.scenario(whole).expandable_segments}"
        return {
            "PYTORCH_CUDA_ALLOC_CONF": setting,
            "PYTORCH_ALLOC_CONF": setting,
            **({"BENCH_STEPS": module} if module != "steps" else {}),  # the module whose `Job` the worker runs
        }

    def seconds(self, case: Case) -> float:
        """The rough time of the case: 6 (8 with recomputation) operations a parameter and token, and the start."""
        if case.kind in RATES:
            return 6 * START_SECONDS
        if case.edge:
            return PROBES * self.seconds(case.at(case.edge.step * max(1, self.guesses(case)["predicted"])))
        s = self.scenario(case)
        rows = s.rows * s.accumulation
        work: float = (8 if s.checkpointing == "full" else 6) * parameters(s.architecture) * rows * s.seq_len
        work *= 4 / 3 if s.task == "dpo" else 1
        rate = (self.gpu.bf16_tflops or TFLOPS_UNKNOWN) * SHARE_OF_PEAK if self.machine.cuda else TFLOPS_CPU
        slower = 8 if s.precision == "fp32" else 1
        drawn = (
            s.response_len * s.architecture.layers * TOKEN_SECONDS if s.rollout and s.rollout.engine == "hf" else 0.0
        )
        # layers, the loss, torchao's step, and attention to packed rows
        compiles = s.compile != "none" or s.optimizer == "adamw-torchao-8bit" or (s.packing and s.framework == "torch")
        start = START_SECONDS + COMPILE_SECONDS * compiles
        return start + case.steps * (slower * work / (rate * 1e12) + drawn)
