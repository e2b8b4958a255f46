"""Random scenarios for property tests: `scenarios()` draws valid ones, `fields()` the mappings they are parsed from.

`valid()` draws from the whole language, whatever the schema says; the others what their tests are about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from calc.base.optimizers import OPTIMIZERS
from calc.catalog.catalog import load
from calc.frameworks.registry import framework as module
from calc.resolve.parse import parse
from calc.scenario.rules import FROZEN_ROLE_FIELDS, RL_FIELDS
from calc.scenario.scenario import SCHEMA, Scenario, ScenarioError
from calc.scenario.words import RL as TASKS_OF_RL
from calc.scenario.words import ROLES, TRAINED_ROLES

TASKS = ("pretrain", "sft", "rm", "dpo", "kto", "orpo", "simpo", "gkd")
RL = {
    "torch": ("ppo", "grpo", "reinforce++"),
    "openrlhf": ("ppo", "grpo", "reinforce++"),
    "verl": ("ppo", "grpo", "reinforce++"),
    "trl": ("grpo",),
}
# Role for role what can differ; frozen roles are those of `FROZEN`.
FROZEN = ("reference", "reward")
SHARDINGS = {
    "torch": ("ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"),
    "openrlhf": ("zero1", "zero2", "zero3"),
}
# What OpenRLHF leaves no choice in.
FIXED = {"optimizer", "loss", "offload.parameters"}
OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    "optimizer": st.sampled_from([name for name in OPTIMIZERS if name != "none"]),
    "optimizer_impl": st.sampled_from(("fused", "foreach", "single")),
    "offload.optimizer": st.booleans(),
    "offload.parameters": st.booleans(),
    "grad_dtype": st.sampled_from(("bf16", "fp32")),
    "no_sync": st.booleans(),
    "checkpointing": st.sampled_from(("none", "full")),
    "reentrant": st.booleans(),
    "attention": st.sampled_from(("flash", "sdpa", "eager")),
    "loss": st.sampled_from(("full", "chunked", "fused", "cut")),
    "logprob": st.sampled_from(("log-softmax-fp32", "selective", "logsumexp")),
    "packing": st.booleans(),
    "lora.rank": st.integers(1, 256),
    "lora.units": st.sampled_from(("own", "layer")),
    "lora.targets": st.one_of(st.just("all-linear"), st.just(["o_proj"]), st.just(["down_proj", "o_proj"])),
    "lora.dropout": st.sampled_from((0, 0.0, 0.05, 0.5)),
    "lora.dtype": st.sampled_from(("fp32", "bf16")),
    "lora.dora": st.booleans(),
    "lora.ref_adapter": st.booleans(),
    "versions.transformers": st.sampled_from(("4.44", "4.48", "4.57")),
}


@st.composite
def fields(draw: st.DrawFn, tasks: tuple[str, ...] = TASKS) -> dict[str, Any]:
    """A scenario as a user writes it: the required fields and a few others, most often parsed without error."""
    catalog = load()
    framework = draw(st.sampled_from(("torch", "openrlhf")))
    nodes, per_node = draw(st.sampled_from(((1, 1), (1, 2), (1, 6), (1, 8), (2, 4), (2, 8), (4, 8))))
    data: dict[str, Any] = {
        "model": draw(st.sampled_from(sorted(catalog.models))),
        "task": draw(st.sampled_from(tasks)),
        "framework": draw(
            st.sampled_from((framework, *(f"{framework}=={known}" for known in module(framework).KNOWN)))
        ),
        "gpu": draw(st.sampled_from(sorted(catalog.gpus))),
        "gpus": nodes * per_node,
        "gpus_per_node": per_node,
        "method": draw(st.sampled_from(("full", "full", "lora", "qlora"))),
        "micro_batch": draw(st.integers(1, 16)),
        "seq_len": draw(st.integers(1, 16_384)),
    }
    if draw(st.integers(0, 3)):
        data["expected_len"] = draw(st.integers(1, data["seq_len"]))
    else:
        longest = draw(st.integers(1, 2 * data["seq_len"]))
        data["lengths"] = {"mean": draw(st.integers(1, longest)), "longest": longest}
    data["global_batch"] = data["micro_batch"] * data["gpus"] * draw(st.integers(1, 4))
    if data["gpus"] > 1 or draw(st.booleans()):
        data["sharding"] = draw(st.sampled_from(SHARDINGS[framework]))
    if framework == "torch":
        sharding = data.get("sharding", "none")
        fsdp = ("fsdp-mixed",) if sharding.startswith("fsdp") else ()
        plain = ("bf16", "autocast", "fp32", *fsdp)
        data["precision"] = draw(st.sampled_from(("mixed",) if sharding.startswith("zero") else plain))
    if data["task"] == "dpo" and draw(st.booleans()):
        other = {"model": draw(st.sampled_from(sorted(catalog.models)))}
        data["roles.reference"] = draw(st.sampled_from(("none", {"offload.parameters": True}, other)))
    choices = [
        name
        for name in OPTIONAL
        if not (name.startswith("lora.") and data["method"] == "full")
        and not (framework == "openrlhf" and name in FIXED)
    ]
    for name in draw(st.lists(st.sampled_from(choices), max_size=4, unique=True)):
        data[name] = draw(OPTIONAL[name])
    return data


@st.composite
def rl_fields(draw: st.DrawFn, frameworks: tuple[str, ...] = tuple(RL)) -> dict[str, Any]:
    """An RL job as a user writes it: placement, rollout and roles as the framework has them, some others drawn."""
    catalog = load()
    framework = draw(st.sampled_from(frameworks))
    known = module(framework).KNOWN
    task = draw(st.sampled_from(RL[framework]))
    data: dict[str, Any] = {
        "model": draw(st.sampled_from(sorted(catalog.models))),
        "task": task,
        "framework": draw(st.sampled_from((framework, *(f"{framework}=={version}" for version in known)))),
        "gpu": draw(st.sampled_from(sorted(catalog.gpus))),
        "prompt_len": draw(st.integers(1, 8192)),
        "response_len": draw(st.integers(1, 8192)),
        "micro_batch": draw(st.integers(1, 8)),
        "rollout.n": 1 if framework == "torch" else draw(st.sampled_from((2, 4, 8))),
    }
    if task == "ppo" and framework == "openrlhf":
        data["rollout.n"] = 1
    data["expected_len"] = draw(st.integers(1, data["prompt_len"] + data["response_len"]))
    most = min(data["response_len"], data["expected_len"] - 1)
    if most and draw(st.booleans()):
        data["rollout.expected_len"] = draw(st.integers(max(1, data["expected_len"] - data["prompt_len"]), most))
    apart = framework in ("openrlhf", "trl") and draw(st.booleans())
    trainers = draw(st.sampled_from((1, 2, 4, 8)))
    if apart:
        data |= {"placement": "separate", "roles.actor.gpus": trainers, "rollout.engine": "vllm"}
        data["rollout.gpus"] = draw(st.sampled_from((1, 2, 4)))
        own = ("critic", *FROZEN) if task == "ppo" else FROZEN
        alone = draw(st.lists(st.sampled_from(own), max_size=3, unique=True)) if framework == "openrlhf" else []
        data |= {f"roles.{name}.gpus": draw(st.sampled_from((1, 2, trainers))) for name in alone}
        data["gpus"] = sum(count for name, count in data.items() if name.endswith(".gpus"))
    else:
        data["gpus"] = trainers
    data["gpus_per_node"] = data["gpus"]
    data["global_batch"] = 8 * data["micro_batch"] * trainers * draw(st.integers(1, 2))
    data["rollout.batch"] = max(data["global_batch"] // data["rollout.n"], trainers) * draw(st.sampled_from((1, 2)))
    if framework != "torch" and not apart and (framework == "verl" or draw(st.booleans())):
        data["rollout.engine"] = "vllm"
        data["rollout.sleep"] = draw(st.booleans())
    elif framework == "openrlhf" and not apart:
        # its releases that generate with Transformers
        data["framework"] = f"openrlhf=={draw(st.sampled_from(known[: known.index('0.6.2')]))}"
    if data.get("rollout.engine") == "vllm":
        most = data.get("rollout.gpus", trainers)
        data["rollout.tensor_parallel"] = draw(st.sampled_from([n for n in (1, 2, 4) if n <= most]))
        data["rollout.gpu_memory_utilization"] = draw(st.floats(0.05, 0.95))
    data |= _held(draw, framework, trainers)
    if framework == "openrlhf" and data.get("rollout.engine") == "vllm":
        data["method"] = "full"  # vLLM cannot take its adapters over
    for name in FROZEN:
        if f"roles.{name}.gpus" not in data:
            small = {"model": draw(st.sampled_from(("llama-3.2-1b", data["model"])))}
            found = draw(st.sampled_from((None, "none", {}, small) if framework in ("torch", "openrlhf") else
                                         (None, "none", {})))  # fmt: skip
            data |= {} if found is None else {f"roles.{name}": found}
    if task == "ppo" and "roles.critic.gpus" not in data and draw(st.booleans()):
        data["roles.critic.model"] = draw(st.sampled_from(("llama-3.2-1b", "qwen2.5-7b")))
    return data


def _held(draw: st.DrawFn, framework: str, trainers: int) -> dict[str, Any]:
    """Placements of the trained roles of an RL job on `trainers` GPUs."""
    data: dict[str, Any] = {"method": draw(st.sampled_from(("full", "full", "full", "lora")))}
    if framework == "verl":
        data["sharding"] = draw(st.sampled_from(("fsdp1", "fsdp1", "fsdp2")))
    elif trainers > 1 or draw(st.booleans()):
        data["sharding"] = draw(st.sampled_from(SHARDINGS["openrlhf" if framework == "openrlhf" else "torch"]))
    sharding = data.get("sharding", "none")
    moves = sharding.startswith("fsdp") or (framework != "openrlhf" and sharding == "zero3")
    data["offload.parameters"] = moves and draw(st.booleans())
    data["offload.optimizer"] = sharding.startswith(("fsdp", "zero")) and draw(st.booleans())
    data["packing"] = framework in ("verl", "openrlhf") and draw(st.booleans())
    if data["packing"] and framework == "openrlhf":
        data["attention"] = "flash"
    if framework != "verl" or draw(st.booleans()):
        data["checkpointing"] = draw(st.sampled_from(("none", "full")))
    return data


def rl_scenarios(*frameworks: str, **fixed: Any) -> st.SearchStrategy[Scenario]:
    """RL jobs that a framework accepts, `fixed` put over what is drawn; `__` in a name is a dot."""
    over = {name.replace("__", "."): value for name, value in fixed.items()}
    drawn = rl_fields(frameworks or tuple(RL)).map(lambda data: _parsed(data | over))
    return drawn.filter(lambda scenario: scenario is not None)  # type: ignore[return-value]


def _parsed(data: dict[str, Any]) -> Scenario | None:
    try:
        return parse(data)
    except ScenarioError:
        return None


def scenarios(tasks: tuple[str, ...] = TASKS) -> st.SearchStrategy[Scenario]:
    """Scenarios that a framework accepts."""
    return fields(tasks).map(_parsed).filter(lambda scenario: scenario is not None)  # type: ignore[return-value]


# ---- the whole language ---------------------------------------------------------------------------------------------

# What the schema leaves open. Beside these a leaf has its words, or numbers from its least up.
LENGTHS = st.one_of(
    st.sampled_from((128, 512, 1024, 2048, 4096, 8192)), st.integers(1, 16_384), st.integers(1, 10_000_000)
)
NAMED: dict[str, st.SearchStrategy[Any]] = {
    "host_memory": st.sampled_from((64, 256, 512.5, 2048)),
    "checkpoint_gb": st.sampled_from((1.5, 6.5, 25.0)),
    "gpus": st.sampled_from((1, 2, 4, 6, 8, 16, 64)),
    "gpus_per_node": st.sampled_from((1, 2, 4, 8, 16, 72)),
    "seq_len": LENGTHS,
    "prompt_len": LENGTHS,
    "response_len": LENGTHS,
    "expected_len": LENGTHS,
    "micro_batch": st.one_of(st.integers(1, 4), st.integers(1, 64), st.integers(1, 1_000_000)),
    "entropy_coeff": st.sampled_from((0, 0.001)),
    "entropy_from_logits_with_chunking": st.booleans(),
    "max_model_len": st.sampled_from((1024, 8192, 65_536)),
    "max_num_seqs": st.sampled_from((1, 64, 1024)),
    "max_num_batched_tokens": st.sampled_from((512, 8192, 65_536)),
    "max_tokens_per_gpu": st.one_of(st.sampled_from((4096, 16_384, 65_536)), st.integers(1, 1_000_000)),
    "rank": st.sampled_from((1, 8, 16, 64, 256)),
    "targets": st.one_of(
        st.just("all-linear"),
        st.lists(
            st.sampled_from(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")),
            min_size=1,
            unique=True,
        ),
    ),
    "dropout": st.sampled_from((0, 0.05, 0.5)),
    "gpu_memory_utilization": st.floats(0.05, 1),
    "lengths": st.builds(
        lambda mean, more: {"mean": mean, "longest": mean * more}, LENGTHS, st.sampled_from((1, 2, 9))
    ),
}
VERSIONS = {
    "torch": ("1.13", "2.0", "2.1", "2.4", "2.5", "2.6", "2.8"),
    "transformers": ("4.31", "4.38", "4.44", "4.45", "4.47", "4.48", "4.51", "4.57", "5.0"),
    "deepspeed": ("0.9", "0.12", "0.15", "0.16.4", "0.18"),
    "bitsandbytes": ("0.41", "0.43", "0.43.2", "0.46"),
    "vllm": ("0.4.2", "0.6.3", "0.7", "0.8.5", "0.10", "0.12"),
}  # fmt: skip
BATCHES = ("global_batch", "batch")  # whole steps of what the other fields say


def leaves(properties: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every field of the schema that has a value of its own, by dotted key; a role is one, too."""
    for name, node in properties.items():
        node = SCHEMA["properties"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        place = f"{under}{name}"
        if "properties" not in node or "string" in node["type"]:
            yield place, node
        if "properties" in node:
            yield from leaves(node["properties"], f"{place}.")


# the parts of `lengths` go together
LEAVES = {
    place: node
    for place, node in leaves(SCHEMA["properties"])
    if place not in SCHEMA["required"] and not place.startswith("lengths.")
}
# What decides most of what else may be said comes first, and often.
FIRST = ("method", "sharding", "precision", "trainer", "optimizer", "tensor_parallel", "context_parallel")


def applies(place: str, s: Scenario) -> bool:
    """True if a job may have a field at all, however the others stand."""
    branch, _, name = place.removeprefix("roles.").partition(".")
    if place.startswith("roles."):
        trained = branch in TRAINED_ROLES and s.task in TASKS_OF_RL
        return branch in ROLES.get(s.task, ()) and (
            not name or (s.has(branch) and (trained or name in FROZEN_ROLE_FIELDS))
        )
    if branch in RL_FIELDS or place == "placement":
        return s.rollout is not None
    return not (branch == "lora" and s.lora is None) and not (place in ("seq_len", "lengths") and s.rollout)


def value(place: str, node: Mapping[str, Any], sofar: Scenario) -> st.SearchStrategy[Any]:
    """A value for a field beside what has been said so far."""
    branch, _, name = place.rpartition(".")
    if name == "model":
        return st.sampled_from((sofar.model, *sorted(load().models)))
    if branch == "versions":
        return st.sampled_from(VERSIONS.get(name, ("1.0",)))
    if name == "framework":
        return st.sampled_from((sofar.framework, *(f"{sofar.framework}=={v}" for v in module(sofar.framework).KNOWN)))
    if branch == "roles":
        return st.sampled_from(("none", {}))
    if name in BATCHES:
        step = sofar.micro_batch * sofar.gpus
        return st.sampled_from((1, 2, 3, 8, 64)).map(lambda times: times * step)
    if name in NAMED:
        return NAMED[name]
    if "enum" in node:
        return st.sampled_from(node["enum"])
    if "boolean" in node["type"]:
        return st.booleans()
    if "minimum" in node:
        return st.sampled_from([node["minimum"] * 2**n for n in range(5)])
    return st.sampled_from(node["examples"])


@st.composite
def valid(draw: st.DrawFn) -> dict[str, Any]:
    """A job as a user writes it, over the whole language: fields one by one, each kept where the job remains valid."""
    catalog = load()
    name = draw(st.sampled_from(sorted(RL)))
    data: dict[str, Any] = {
        "model": draw(st.sampled_from(sorted(catalog.models))),
        "task": draw(st.sampled_from(SCHEMA["properties"]["task"]["enum"])),
        "gpu": draw(st.sampled_from(sorted(catalog.gpus))),
        "framework": name,
        "gpus": draw(NAMED["gpus"]),
    }
    if draw(st.booleans()):
        data |= _apart(draw, data)
    found = _parsed(data)
    assume(found)
    asked = draw(st.lists(st.sampled_from(FIRST), max_size=3, unique=True))
    for n in range(draw(st.integers(0, 16))):
        place = asked[n] if n < len(asked) else draw(st.sampled_from([x for x in LEAVES if applies(x, found)]))
        wider = data | {place: draw(value(place, LEAVES[place], found))}
        known = _parsed(wider)
        data, found = (wider, known) if known else (data, found)
    return data


def _apart(draw: st.DrawFn, data: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that only go together: GPUs of their own for the roles of an RL job, or GPUs that share sequences."""
    if data["task"] in RL["torch"]:
        own = {
            f"roles.{role}.gpus": draw(st.sampled_from((1, 2, 4)))
            for role in draw(
                st.sampled_from(
                    (
                        ("actor",),
                        ("actor", "critic"),
                        ("actor", "reference"),
                        ("actor", "critic", "reference", "reward"),
                    )
                )
            )
        }
        own["rollout.gpus"] = draw(st.sampled_from((1, 2, 4)))
        total = sum(own.values())
        return own | {"placement": "separate", "rollout.engine": "vllm", "gpus": total, "gpus_per_node": total}
    degree = draw(st.sampled_from(("tensor_parallel", "pipeline_parallel", "context_parallel")))
    return {degree: draw(st.sampled_from((2, 4)))} if data["gpus"] % 4 == 0 else {}
