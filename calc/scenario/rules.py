"""Rules across several fields of a scenario: the values that follow from others, and the combinations that are refused.

Every objection is one line that names the field, what was given and what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import lcm
from typing import Any

from calc.base.optimizers import OPTIMIZERS
from calc.base.refusal import Refusal
from calc.base.schema import SCALARS, show
from calc.base.versions import at_least
from calc.catalog.catalog import GPU, Catalog, CatalogError, Model
from calc.catalog.names import adapted
from calc.models.architecture import Architecture, ConfigError, layer_kinds
from calc.models.families import MXFP4
from calc.models.kernels import SDPA_FLASH_HEAD, replaced
from calc.models.lora import adaptable_names, lora_parameters
from calc.models.slices import part, stage
from calc.models.vision import Tower
from calc.scenario.images import WIDEST, Images
from calc.scenario.scenario import Scenario, changed
from calc.scenario.words import NODE, PAIRED, PARTNERS, RL, ROLES, SERVERS, SHARDINGS, TOGETHER, TRAINED_ROLES

# The architectures for which the kernel for attention with sinks is built (build.toml of
# kernels-community/vllm-flash-attn3).
SINKS = ("Ampere", "Hopper")
MAPS_ON_ROCM = "2.12"  # the first PyTorch whose builds for ROCm have expandable segments

UNBUILT_FOR_ROLES = ("expert_parallel", "pipeline_parallel")
GROUPED = ("pretrain", "sft")  # tasks of one sequence a sample, whose lengths the sampler finds
RL_FIELDS = ("prompt_len", "response_len", "rollout")
# Settings that some releases lack, and the value that holds without them. A release that has one has a default for it.
ABSENT: Mapping[str, Any] = {
    "entropy_coeff": 0,
    "entropy_from_logits_with_chunking": False,
    "max_tokens_per_gpu": None,
    "padding_free": False,
    "rollout.micro_batch": None,
    "rollout.max_tokens_per_gpu": None,
    "rollout.max_model_len": None,
    "rollout.max_num_seqs": None,
    "rollout.max_num_batched_tokens": None,
    "rollout.layered_summon": False,
    "rollout.enforce_eager": False,
    "rollout.offload_model": False,
    "rollout.offload_optimizer": False,
    "rollout.move_model_batches": None,
}
# The first releases in which blocks of pinned memory need not be rounded.
PINS_SINCE, PINS_SINCE_VLLM = "2.13", "0.27"
FROZEN_ROLE_FIELDS = (
    "model",
    "gpus",
    "method",
    "precision",
    "sharding",
    "offload.parameters",
    "attention",
    "micro_batch",
    "max_tokens_per_gpu",
)


class Objection(ValueError):
    """The reason that a scenario cannot be used, before the name of its source is put in front."""

    def __init__(self, reason: Refusal | str, field: str = "", refusal: Refusal | None = None) -> None:
        """`field` and `refusal`: the field at fault, and the parts of a reason that is given as a line."""
        super().__init__(str(reason))
        self.refusal = reason if isinstance(reason, Refusal) else refusal
        self.field = self.refusal.field if self.refusal else field


@contextmanager
def part_named(head: str) -> Iterator[None]:
    """Puts the name of a part of a scenario, such as `roles.actor.`, in front of the objections to it."""
    try:
        yield
    except (Objection, CatalogError, ConfigError) as error:
        raise Objection(f"{head}{error}", f"{head}{error.field}", error.refusal and error.refusal.of(head)) from None


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys for nested ones, without nulls; 8.0 is the integer 8."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, SCALARS):
            flat[name] = int(value) if isinstance(value, float) and value.is_integer() else value
        elif isinstance(value, Mapping):
            flat.update({f"{name}.{inner}": item for inner, item in flatten(value).items()})
        elif value is not None:
            flat[name] = value
    return flat


def follow(values: dict[str, Any], given: Mapping[str, Any], task: str) -> None:
    """Fills in fields that are not given and follow from others."""
    gpus = values["gpus"]
    # whole nodes, as large as they come: twelve GPUs are two nodes of six
    values.setdefault("gpus_per_node", next(n for n in range(min(gpus, NODE), 0, -1) if gpus % n == 0))
    if task in RL:
        if "seq_len" in values:
            raise Objection(Refusal("seq_len", f"for {task}", "prompt_len and response_len"))
        values["seq_len"] = values["prompt_len"] + values["response_len"]
        if (response := values.get("rollout.expected_len")) and "expected_len" not in given:
            values["expected_len"] = values["prompt_len"] + response
        alone = values["rollout.engine"] not in SERVERS or given.get("placement") == "separate"
        if alone and "rollout.sleep" not in given:
            values["rollout.sleep"] = False
    else:
        values["prompt_len"] = values["response_len"] = 0
    if (lengths := values["lengths"]) and "expected_len" not in given:
        values["expected_len"] = max(1, round(lengths.mean_below(values["seq_len"])))
    values.setdefault("expected_len", values["seq_len"])
    if values["checkpointing"] == "selective" and "reentrant" not in given:
        values["reentrant"] = False  # as `check` has it


def had(values: Mapping[str, Any], defaults: Mapping[str, Any], release: str) -> None:
    """Refuses settings of `ABSENT` that `release`, whose defaults are `defaults`, does not have."""
    for place, value in values.items():
        if place not in ABSENT and place[:6] != "roles.":
            continue
        field = place.split(".", 2)[2] if place not in ABSENT and place.count(".") > 1 else place
        if field in ABSENT and field not in defaults and value != ABSENT[field]:
            allowed = f"{show(ABSENT[field])}; it has no such setting"
            raise Objection(Refusal(place, show(value), allowed, f"with {release}"))


def check(values: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuses combinations of fields that are each allowed alone."""
    task, gpus, per_node = values["task"], values["gpus"], values["gpus_per_node"]
    for place in given:
        if task not in RL and place.partition(".")[0] in RL_FIELDS:
            raise Objection(Refusal(place, f"for {task}", f"for RL tasks alone; {task} has seq_len"))
    if task in RL and values["lengths"]:
        raise Objection(Refusal("lengths", f"for {task}", f"for tasks without a rollout; {task} has expected_len"))
    if values["lengths"] and "expected_len" in given:
        raise Objection(Refusal("expected_len", f"{given['expected_len']} with lengths", "one of them"))
    if values["group_by_length"] and task not in GROUPED:
        raise Objection(Refusal("group_by_length", f"true for {task}", f"false, or for {', '.join(GROUPED)}"))
    if values["placement"] != "colocated" and task not in RL:
        raise Objection(Refusal("placement", "'separate'", f"colocated; {task} has no role on GPUs of its own"))
    if values["on_policy"] and task != "gkd":
        raise Objection(Refusal("on_policy", f"{show(values['on_policy'])} for {task}", "0; gkd's student generates"))
    if values["sft_alpha"] and not (task in ("dpo", "gkd") and values["trainer"] == "ms-swift"):
        given_for = f"{show(values['sft_alpha'])} for {task} with trainer {values['trainer']}"
        raise Objection(Refusal("sft_alpha", given_for, "0, or for dpo and gkd with trainer ms-swift"))
    if values["method"] == "full":
        no_adapters(given)
    if values["method"] != "qlora" and not values["double_quantization"]:
        raise Objection(Refusal("double_quantization", f"false with method {values['method']}", "with qlora"))
    if values["method"] != "qlora" and values["load_in_8bit"]:
        raise Objection(Refusal("load_in_8bit", f"true with method {values['method']}", "with qlora"))
    if values["load_in_8bit"] and (values["quantize_moe_experts"] or values["checkpoint_gb"]):
        field = "quantize_moe_experts" if values["quantize_moe_experts"] else "checkpoint_gb"
        raise Objection(Refusal("load_in_8bit", f"true with {field}", "false; not modelled"))
    if values["method"] != "qlora" and values["quantize_moe_experts"]:
        raise Objection(Refusal("quantize_moe_experts", f"true with method {values['method']}", "with qlora"))
    if values["method"] != "qlora" and values["checkpoint_gb"]:
        raise Objection(
            Refusal("checkpoint_gb", f"{values['checkpoint_gb']} with method {values['method']}", "with qlora")
        )
    if values["checkpointing"] == "selective" and given.get("reentrant"):
        # torch `utils/checkpoint.py`: context_fn "only when use_reentrant=False"
        raise Objection(Refusal("reentrant", "true with checkpointing selective", "false, or with full"))
    if gpus > per_node and gpus % per_node:
        allowed = f"a multiple of gpus_per_node = {per_node}, as {near(gpus, per_node)}"
        raise Objection(Refusal("gpus", gpus, allowed))
    if (counts := values["pipeline_layers"]) and values["sharding"] != "megatron":
        allowed = "null, or with sharding megatron"
        raise Objection(Refusal("pipeline_layers", f"{[*counts]} with sharding {values['sharding']}", allowed))
    if (each := values["device_map_gpus"]) and (values["device_map"] == "none" or gpus % each):
        allowed = "null, or with device_map auto a divisor of gpus"
        raise Objection(Refusal("device_map_gpus", f"{each} with device_map {values['device_map']}", allowed))
    parts, again = values["recompute_modules"], values["checkpointing"]
    if parts and (values["sharding"] not in ("megatron", "fsdp2") or again != "selective"):
        said = f"{', '.join(parts)} with sharding {values['sharding']} and checkpointing {again}"
        raise Objection(Refusal("recompute_modules", said, "null, or with megatron, fsdp2 and selective"))
    staged = values["sharding"] in ("megatron", "fsdp2") and values["pipeline_parallel"] > 1
    if (chunks := values["virtual_pipeline"]) > 1 and not staged:
        allowed = "1, or with sharding megatron or fsdp2 and pipeline_parallel above 1"
        raise Objection(Refusal("virtual_pipeline", chunks, allowed))
    expected, cap = values["expected_len"], values["seq_len"]
    if expected > cap:
        named = "prompt_len + response_len" if task in RL else "seq_len"
        raise Objection(Refusal("expected_len", expected, f"at most {named} = {cap}"))
    if response := values.get("rollout.expected_len"):
        least, most = max(1, expected - values["prompt_len"]), min(values["response_len"], expected - 1)
        if not least <= response <= most:
            allowed = f"{least} to {most}, a part of expected_len = {expected}"
            raise Objection(Refusal("rollout.expected_len", response, allowed))
    if fullest := values.get("rollout.fullest_len"):
        if not values["packing"] or values["max_tokens_per_gpu"]:
            padded = "max_tokens_per_gpu" if values["max_tokens_per_gpu"] else "batches that are padded"
            allowed = "null, or where padding is removed from micro batches of so many sequences"
            raise Objection(Refusal("rollout.fullest_len", f"{fullest} with {padded}", allowed))
        if not expected <= fullest <= cap:
            raise Objection(Refusal("rollout.fullest_len", fullest, f"{expected} to {cap}"))


def tower_of(architecture: Architecture, spoken: bool) -> Tower:
    """The vision tower that reads a sample's images; refuses images for a model without one.

    `spoken`: see `calc.catalog.catalog.Catalog.spoken`.
    """
    if architecture.vision is None:
        if spoken:
            raise Objection(
                Refusal(
                    "images", "for a model whose part for images is not modelled", "with one, such as qwen2.5-vl-7b"
                )
            )
        raise Objection(Refusal("images", "for a model without a vision tower", "with one, such as qwen2.5-vl-7b"))
    return architecture.vision


def seen(images: Images, values: Mapping[str, Any], tower: Tower) -> None:
    """Refuses images that a tower, its processor or the sequences cannot take, and ways to run that are not known."""
    if values["method"] != "full" and images.freeze != "vision" and values["lora.targets"] != "all-linear":
        allowed = "vision with lora.targets by name; adapters in the tower are modelled beside all its linears"
        raise Objection(Refusal("images.freeze", repr(images.freeze), allowed))
    for name in ("min_pixels", "max_pixels", "frames"):
        if tower.edge and f"images.{name}" in values and not (name == "frames" and tower.most):
            allowed = f"nothing; every image is resized to {tower.edge} pixels a side"
            raise Objection(Refusal(f"images.{name}", values[f"images.{name}"], allowed))
    # Megatron-core's attention is its layers' alone, and a tower has Transformers' default
    if values["attention"] == "eager" and values["sharding"] != "megatron":
        raise Objection(Refusal("attention", "'eager' with images", "flash, sdpa; the tower's scores are not modelled"))
    if values["context_parallel"] > 1:
        raise Objection(Refusal("context_parallel", f"{values['context_parallel']} with images", "1; not modelled"))
    if tower.crossed and values["packing"]:
        raise Objection(Refusal("packing", "true with images", f"false; {values['model']} has a mask of each sample"))
    if images.min_pixels > images.most(tower):
        raise Objection(Refusal("images.min_pixels", images.min_pixels, f"at most max_pixels = {images.max_pixels}"))
    if max(images.width, images.height) > WIDEST * min(images.width, images.height):
        allowed = f"sides of which neither is more than {WIDEST} times the other"
        raise Objection(Refusal("images.width", f"{images.width} with height {images.height}", allowed))
    room = "prompt_len" if values["task"] in RL else "seq_len"
    if (tokens := images.tokens(tower)) > values[room]:
        raise Objection(Refusal(room, values[room], f"at least the {tokens} tokens of a sample's images"))


def batched(s: Scenario, given: Mapping[str, Any]) -> Scenario:
    """`s` with a global batch of whole steps; refuses any other that is given, and several GPUs without sharding."""
    roles = {name: own for name in TRAINED_ROLES if s.has(name) and (own := s.role(name))}
    for name, own in roles.items() or [("", s)]:
        if own.shards > 1 and own.sharding == "none":
            place = place_of(s, name, "sharding")
            raise Objection(Refusal(place, f"'none' with gpus = {own.gpus}", ", ".join(SHARDINGS)))
        step = whole_step(own)
        place = place_of(s, name, "global_batch")
        if own.global_batch % step and (place in given or place.startswith("roles.")):
            raise Objection(
                Refusal(
                    place,
                    own.global_batch,
                    (
                        f"a multiple of micro_batch x data-parallel GPUs = {step // own.data_parallel} x "
                        f"{own.data_parallel} = {step}, as {near(own.global_batch, step)}"
                    ),
                )
            )
    if "global_batch" in given:
        return s
    # A framework's default batch is made for its own number of GPUs: the largest whole number of steps within it, and
    # of groups of responses if that is what it was made of.
    shared = [own for name, own in roles.items() if place_of(s, name, "global_batch") == "global_batch"]
    step = lcm(*[whole_step(own) for own in shared or [next(iter(roles.values()), s)]])
    if s.rollout and s.global_batch % s.rollout.n == 0 and lcm(step, s.rollout.n) <= s.global_batch:
        step = lcm(step, s.rollout.n)
    return changed(s, {"global_batch": max(1, s.global_batch // step) * step})


def whole_step(s: Scenario) -> int:
    """The smallest global batch: one forward on every data-parallel GPU, or one sequence of a dynamic batch."""
    if s.max_tokens_per_gpu:
        return s.data_parallel
    return s.rows // (2 if s.task in PAIRED else 1) * s.data_parallel


def place_of(s: Scenario, name: str, field: str) -> str:
    """The dotted name of a role's field: the role's own if the role sets it, else the job's."""
    own = s.roles.get(name, "none")
    return f"roles.{name}.{field}" if not isinstance(own, str) and field in own else field


def pinning_fault(s: Scenario, gpu: GPU) -> Refusal | None:
    """The reason that PyTorch rounds all pinned memory of the job, in one line; None if it need not.

    The threshold came with torch 2.13.0 (ATen/core/CachingHostAllocator.h), on which vLLM runs from 0.27.0: each of its
    wheels needs one torch (METADATA: 2.11.0 in 0.26.0, 2.13.0 in 0.27.0 to 0.31.0).
    """
    if s.pinned_max_round_threshold_mb is None:
        return None
    field, given = "pinned_max_round_threshold_mb", s.pinned_max_round_threshold_mb
    if gpu.lacks_cuda:
        return Refusal(field, f"{given} on {gpu.id}", "null; PyTorch's setting is for CUDA")
    for name, version, since in (("vllm", _vllm(s), PINS_SINCE_VLLM), ("torch", s.versions.get("torch"), PINS_SINCE)):
        if version is not None and not at_least(version, since):
            return Refusal(field, f"{given} with {name} {version}", f"null, or with {name} {since} or later")
    return None


def _vllm(s: Scenario) -> str | None:
    """The release of vLLM that generates, if it does."""
    return s.versions.get("vllm") if s.rollout and s.rollout.engine == "vllm" else None


def serving_fault(s: Scenario, given: Mapping[str, Any]) -> Refusal | None:
    """The reason that the rollout cannot run where it is, in one line, or None."""
    if not s.rollout:
        return None
    unmade = s.architecture.compressed or s.architecture.crosses
    if unmade and s.rollout.engine != "none":
        given_engine = f"{s.rollout.engine!r} for the family {s.architecture.family}"
        return Refusal("rollout.engine", given_engine, "none; generation is not modelled there")
    if s.rollout.max_tokens_per_gpu and not (s.role("actor") or s).max_tokens_per_gpu:
        given_tokens = s.rollout.max_tokens_per_gpu
        return Refusal("rollout.max_tokens_per_gpu", given_tokens, "with max_tokens_per_gpu, for dynamic batches")
    if s.max_tokens_per_gpu and "rollout.micro_batch" in given:
        return Refusal(
            "rollout.micro_batch",
            f"{given['rollout.micro_batch']} with max_tokens_per_gpu",
            "rollout.max_tokens_per_gpu, as batches that are scored are dynamic, too",
        )
    if s.rollout.v0:
        version = _vllm(s)
        if version is None or not at_least(version, "0.8") or at_least(version, "0.11"):
            return Refusal(
                "rollout.v0", f"true with vllm {version or 'none'}", "with vllm 0.8 to 0.10, which have two engines"
            )
    tp, heads = s.rollout.tensor_parallel, s.architecture.heads
    if not s.rollout.serves:
        if s.rollout.sleep and "rollout.sleep" in given:
            return Refusal("rollout.sleep", f"true with engine {s.rollout.engine!r}", "with vllm")
        if length := given.get("rollout.max_model_len"):
            return Refusal("rollout.max_model_len", f"{length} with engine {s.rollout.engine!r}", "with vllm")
        return None
    if s.architecture.passed:
        # vLLM has dropped its code for layers that read images, with its first engine (pull request 24907, 0.11)
        given_engine = f"{s.rollout.engine!r} for the family {s.architecture.family}"
        return Refusal("rollout.engine", given_engine, "hf, none; not modelled there")
    if s.rollout.max_model_len and not s.seq_len <= s.rollout.max_model_len <= s.architecture.max_positions:
        least, most = s.seq_len, s.architecture.max_positions
        return Refusal("rollout.max_model_len", s.rollout.max_model_len, f"{least}, prompt and response, to {most}")
    if heads % tp:
        return Refusal("rollout.tensor_parallel", tp, f"a divisor of the model's {heads} attention heads")
    if s.rollout.gpus % tp:
        return Refusal("rollout.tensor_parallel", tp, f"a divisor of the rollout's {s.rollout.gpus} GPUs")
    if s.rollout.sleep and s.placement == "separate":
        return Refusal("rollout.sleep", "true with placement 'separate'", "with colocated, where others need the GPUs")
    return None


def near(given: int, step: int) -> str:
    """The multiples of `step` around `given`."""
    below = given // step * step
    return f"{below} or {below + step}" if below else f"{step}"


def roles_of(
    values: Mapping[str, Any],
    own: Mapping[str, Any],
    catalog: Catalog,
    defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    modelled: Callable[[Architecture], Architecture],
) -> dict[str, Mapping[str, Any] | str]:
    """Every role of the task by name: `none`, or its model and the fields that differ from the job's, by dotted key.

    `defaults` gives the framework's defaults for what a user says: they complete the adapters of a role if the job
    itself has none.
    """
    task = values["task"]
    names = ROLES.get(task, ())
    for name, role in own.items():
        if name not in names and role != "none":
            allowed = ", ".join(names) or "none beside the trained model, which the other fields describe"
            raise Objection(f"roles.{name}: not a role of {task}, allowed: {allowed}", f"roles.{name}")
    roles: dict[str, Mapping[str, Any] | str] = {}
    for name in names:
        role = own.get(name, values.get(f"roles.{name}", {}))
        if isinstance(role, str):
            roles[name] = role
            continue
        differs = flatten(role)
        if not (task in RL and name in TRAINED_ROLES):
            for place in differs:
                if place not in FROZEN_ROLE_FIELDS:
                    allowed = ", ".join(FROZEN_ROLE_FIELDS)
                    raise Objection(Refusal(f"roles.{name}.{place}", "for a role that is not trained", allowed))
            if differs.get("method", "full") != "full":
                given = f"{differs['method']!r} for a role that is not trained"
                raise Objection(Refusal(f"roles.{name}.method", given, "full"))
        head = f"roles.{name}."
        differs = {k.removeprefix(head): v for k, v in values.items() if k.startswith(head)} | differs
        if values["placement"] == "colocated" and differs.pop("gpus", values["gpus"]) != values["gpus"]:
            allowed = f"{values['gpus']}, as all roles share the GPUs"
            raise Objection(Refusal(f"roles.{name}.gpus", role["gpus"], allowed))
        with part_named(f"roles.{name}."):
            roles[name] = role_of(values, differs, catalog, defaults, modelled)
    if roles.get("teacher") == "none":
        raise Objection(Refusal("roles.teacher", "'none'", "a teacher, from whom gkd learns"))
    if task in RL and not any(roles.get(name, "none") != "none" for name in TRAINED_ROLES):
        raise Objection(Refusal("roles.actor", "'none'", f"a role to train for {task}"))
    return roles


def role_of(
    values: Mapping[str, Any],
    own: dict[str, Any],
    catalog: Catalog,
    defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    modelled: Callable[[Architecture], Architecture],
) -> dict[str, Any]:
    """The fields in which one role differs from the job, checked as the job's own fields are."""
    model = catalog.model(own.get("model", values["model"]))
    catalog.unquantised(own.get("model", ""))
    unbuilt(own)
    method = own.get("method", values["method"])
    if method == "full":
        no_adapters(own)
    else:
        if values["method"] == "full":
            filled = defaults({**values, "method": method})
            own = {place: value for place, value in filled.items() if place.startswith("lora.")} | own
        values = {**values, **own}
        adapters(modelled(model.architecture), values["lora.rank"], values["lora.targets"])
    return own | {"model": model.id}


EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj"})  # targets that also name parts of an expert
# Routings by a linear that returns several tensors: PEFT wraps it among all linears, and its adapter takes one (Llama
# 4, Phi-3.5 MoE: "'tuple' object has no attribute 'dtype'", 0.21 `tuners/lora/layer.py:1089`)
BY_SEVERAL = ("all", "sampled")


def unsuited(architecture: Architecture) -> str:
    """The reason why adapters on all linears of a model fail, or add others than were meant; empty if there is none.

    PEFT refuses the output projection of some state spaces, and does not leave it out either (0.21
    `tuners/tuners_utils.py`, `_check_lora_target_modules_mamba`). Of some models it adapts routed experts where it is
    told to adapt linears of an MLP (0.21 `utils/transformers_weight_conversion.py`,
    `convert_peft_config_for_transformers`).
    """
    if architecture.megatron:
        return ""
    if architecture.ssm and not architecture.ssm.adapted:
        return "PEFT refuses the out_proj of these state spaces"
    if architecture.compressed:  # 0.21 `tuners/lora/layer.py`, `Linear.forward`: its output has other dimensions
        return "PEFT's adapter fails beside o_a_proj, which multiplies group by group"
    if architecture.sparse_layers and architecture.routing in BY_SEVERAL:
        return "PEFT would wrap the router, too, and fail on what it returns"
    return "PEFT would adapt routed experts, too" if architecture.experts_converted else ""


def taken(architecture: Architecture) -> list[str]:
    """The targets that stand for all linears where those are unsuited: all that PEFT takes and adapts alone."""
    experts = EXPERTS if architecture.experts_converted else set()
    return [name for name in adaptable_names(architecture) if name not in experts]


def usual(architecture: Architecture, targets: str | list[str]) -> str | list[str]:
    """A framework's default targets, or those that stand for them; of a list those that the model has.

    PEFT objects to names only where none is found (0.21 `tuners/tuners_utils.py`, `inject_adapter`).
    """
    if isinstance(targets, str):
        return taken(architecture) if targets == "all-linear" and unsuited(architecture) else targets
    own = taken(architecture)
    return [name for name in targets if name in own] or own


def adapters(architecture: Architecture, rank: int, targets: str | list[str]) -> tuple[str, ...] | str:
    """The targets of adapters, checked against the model's layers."""
    found = targets if isinstance(targets, str) else tuple(targets)
    experts = architecture.experts_converted and EXPERTS & {*found}
    if (reason := unsuited(architecture)) and (found == "all-linear" or experts):
        raise Objection(Refusal("lora.targets", show(targets), f"[{', '.join(taken(architecture))}]; {reason}"))
    lora_parameters(architecture, rank, found)
    return found


def cut(s: Scenario) -> None:
    """Refuses models that cannot be cut into as many parts as asked, and GPUs that the degrees do not divide evenly."""
    for name in ("", *s.roles):
        own = s.role(name) if name else s
        if own is None:
            continue
        place = f"roles.{name}." if name else ""
        with part_named(place):
            part(own.architecture, own.tensor_parallel, own.expert_parallel, own.expert_tensor_parallel)
            stage(own.architecture, 0, own.pipeline_parallel, own.pipeline_layers, own.virtual_pipeline)
        if own.gpus % own.together:
            degrees = " x ".join(d for d in TOGETHER if getattr(own, d) > 1)
            allowed = f"a multiple of {degrees} = {own.together}, as {near(own.gpus, own.together)}"
            raise Objection(Refusal(f"{place}gpus", own.gpus, allowed))


def unbuilt(fields: Mapping[str, Any]) -> None:
    """Refuses parallelism of a role that is not computed yet."""
    for place in UNBUILT_FOR_ROLES:
        if fields.get(place, 1) > 1:
            raise Objection(Refusal(place, f"{fields[place]}, not modelled yet", "1"))


def no_adapters(given: Mapping[str, Any]) -> None:
    """Refuses what only adapters have."""
    for place in given:
        if place.startswith("lora."):
            raise Objection(Refusal(place, "with method full, which has no adapters", "with lora, qlora"))


def placed(values: dict[str, Any], roles: dict[str, Mapping[str, Any] | str]) -> dict[str, Mapping[str, Any] | str]:
    """The roles, with their numbers of GPUs filled in where placement is separate.

    If only one of the actor and vLLM is given no GPUs, it gets those that are left; other roles join a partner's.
    """
    if values["placement"] == "colocated":
        if values.get("rollout.gpus") not in (None, values["gpus"]):
            raise Objection(
                Refusal("rollout.gpus", values["rollout.gpus"], f"{values['gpus']}, as all roles share the GPUs")
            )
        return roles
    total = values["gpus"]
    own = {name: role["gpus"] for name, role in roles.items() if not isinstance(role, str) and "gpus" in role}
    open_ends = ["actor"] if roles.get("actor", "none") != "none" and "actor" not in own else []
    if values["rollout.engine"] in SERVERS:
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
        raise Objection(
            Refusal(
                place, f"{total} GPUs for {parts}{asked}", f"GPUs of roles and rollout that add up to gpus = {total}"
            )
        )
    for name, role in roles.items():
        if not isinstance(role, str) and not own.keys() & {name, *PARTNERS.get(name, ())}:
            raise Objection(
                Refusal(
                    f"roles.{name}.gpus",
                    "none with placement 'separate'",
                    "GPUs of its own, as no role runs whose GPUs it could share",
                )
            )
    values["rollout.gpus"] = own.get("rollout")
    return {
        name: role if isinstance(role, str) or name not in own else {**role, "gpus": own[name]}
        for name, role in roles.items()
    }


def tower_loads(values: Mapping[str, Any], model: Model) -> None:
    """Refuses a tower that is loaded beside text where the model has none, or where images are read with it."""
    if values["vision_tower"] and not (model.seeing or model.architecture.vision):
        raise Objection(Refusal("vision_tower", f"true for {model.id}", "false; it has none that is modelled"))
    if values["vision_tower"] and "images.width" in values:
        raise Objection(Refusal("vision_tower", "true with images", "false; images.freeze says if it is trained"))


def joined(values: dict[str, Any], given: Mapping[str, Any], *, padded: bool) -> None:
    """Pads batches of a model that are `padded` in any case; refuses to have such a model's padding removed."""
    for field in ("packing", "padding_free") if padded else ():
        if given.get(field):
            allowed = f"false; batches of {values['model']} are padded"
            raise Objection(Refusal(field, "true", allowed, f"with trainer {values['trainer']}"))
    values["padding_free"] &= not padded


def warnings_of(
    values: Mapping[str, Any],
    architecture: Architecture,
    name: str,
    version: str | None,
    known: str,
    *,
    apart: bool,
    stored: str,
    tuned: str,
    makes: str,
    spoken: str,
) -> Iterator[str]:
    """Warnings that hold on any card, about a scenario that nothing forbids.

    `apart`: the model has a vision tower that this job leaves out. `stored`: the form in which the checkpoint that the
    user names has its weights, where that is not 16 bits. `tuned`: the name that the user gives a model that is known
    by another's name inside it alone. `makes`: see `calc.catalog.catalog.Model`; `spoken`: the name
    that the user gives a model of which the language model alone is described.
    """
    if spoken:
        yield f"{spoken} reads images by a part that is not modelled: computed as its language model alone, over text"
    if tuned:
        yield f"{tuned} is not in the catalog: computed as {values['model']}"
    if makes == "embeddings" and values["task"] not in ("rm", "inference"):
        yield f"{values['model']} makes embeddings, without an output head: task rm, also without one, is nearest"
    if makes == "yes or no" and values["task"] == "rm":
        yield f"{values['model']} answers yes or no: task sft trains that, task rm a scalar in place of its output head"
    if values["seq_len"] > architecture.max_positions:
        yield f"seq_len {values['seq_len']} is beyond the {architecture.max_positions} positions of {values['model']}"
    if architecture.family in MXFP4 and values["task"] != "inference":
        yield "the checkpoint is in MXFP4, which does not train: computed from weights that were dequantised to bf16"
    elif adapted(stored) and values["method"] == "qlora":
        yield f"an adapter beside weights stored as {stored} is computed as QLoRA, whose 4 bits take nearly as much"
    elif stored:
        yield f"the checkpoint's weights are stored as {stored}: computed from weights that were dequantised to bf16"
    if apart:
        yield f"{values['model']} without images is its language model alone: with images its vision tower counts, too"
    if architecture.vision and "images.width" not in values and not values["vision_tower"]:
        yield f"{values['model']} without images reads text alone: images.width and images.height say their size"
    if architecture.sound:
        yield f"{values['model']} is computed without sound: the part that hears is loaded, and does not run"
    fused = architecture.experts and not (architecture.experts_apart or architecture.expert_linears)
    if fused and values["method"] == "qlora" and not values["quantize_moe_experts"]:
        yield "routed experts stay in 16 bits: Transformers 5 has fused them, and 4-bit loading takes linears alone"
    frozen = architecture.experts and not architecture.megatron and not architecture.expert_linears
    if (
        values["method"] != "full"
        and (reason := unsuited(architecture))
        and values["lora.targets"] == taken(architecture)
    ):
        yield f"the linears with adapters are named one by one in place of all-linear: {reason}"
    if frozen and values["method"] != "full" and values["lora.targets"] == "all-linear":
        yield "all-linear is computed without routed experts; PEFT 0.21 adapts those of some families too"
    if version and known != version and not known.startswith(f"{version}."):
        yield f"{name} {version} is computed as {known}, the nearest version that is known"


def maps_pages(vendor: str, torch: str) -> bool:
    """True if PyTorch's allocator can map the pages of an expandable segment on cards of this vendor.

    Builds for ROCm warn that it is "not supported on this platform" and go on without (`c10/cuda/CUDAAllocatorConfig.h`
    of 2.9); pytorch/pytorch pull request 177974 of March 2026 brought it, with release 2.12.
    """
    return vendor != "AMD" or at_least(torch, MAPS_ON_ROCM)


def card_warnings(s: Scenario, gpu: GPU) -> Iterator[str]:
    """Warnings about `s` on this card."""
    if gpu.lacks_bf16 and s.precision not in ("fp16", "fp32"):
        yield f"the {gpu.name} has no bf16: take precision fp16, with torch, its trainers or trl"
    if s.attention == "flash":
        yield from flash_faults(s.architecture, gpu)
    # vllm-project/vllm issue 42756: wheels for CUDA 12.9 and 13 alone
    if gpu.before_turing and (version := _vllm(s)) and at_least(version, "0.21"):
        yield f"vLLM's wheels from 0.21 on have no kernels for the {gpu.name}: generate with rollout.engine hf"
    # torchao `prototype/mx_formats/kernels.py` asks for compute capability 10.0
    if s.float8 in ("mxfp8", "nvfp4") and gpu.architecture != "Blackwell":
        yield f"{s.float8.upper()} needs a Blackwell card: torchao's kernels do not run on the {gpu.name}"
    if s.sharding == "megatron" and s.float8 in ("delayed", "tensorwise") and gpu.architecture == "Blackwell":
        counted = f"weights in float8 {s.float8} are counted in two layouts"
        yield f"{counted}, of which Transformer Engine needs one on Blackwell"
    if reason := lacks_kernels(s, gpu):
        yield reason


def flash_faults(architecture: Architecture, gpu: GPU) -> Iterator[str]:
    """The reasons that FlashAttention does not run for a model on this card."""
    # Ascend has an attention of that name, its own (transformers/integrations/npu_flash_attention.py)
    if gpu.lacks_bf16:
        yield f"FlashAttention-2 does not run on the {gpu.name}, a {gpu.architecture} card: take sdpa"
    # flash-attn 2.8 `flash_api.cpp`: "FlashAttention forward only supports head dimension at most 256"
    if architecture.broad:
        largest = max([architecture.at(spec).head_dim for spec, _ in layer_kinds(architecture)])
        if largest > SDPA_FLASH_HEAD:
            yield f"FlashAttention-2 takes no heads of {largest}, as some layers of this model have: take sdpa"
    # MiMo-V2-Flash runs with the fourth (transformers 5.23 `modeling_mimo_v2_flash.py`, its compatible ones)
    own = architecture.attention_sinks and architecture.value_dim
    own = own or architecture.fused_qkv == "quartered"  # `modeling_codegen.py` has no other than its own products
    if (architecture.slopes or architecture.compressed or own) and not architecture.megatron:
        yield f"FlashAttention-2 does not run for models of the family {architecture.family}: take eager"
    elif architecture.passed or architecture.crosses:  # `_supports_flash_attn` of `MllamaPreTrainedModel` is false
        yield f"Transformers has no code with FlashAttention for the family {architecture.family}: take sdpa"
    # transformers 5.15 `modeling_gpt_oss.py`, _compatible_flash_implementations; build.toml of the kernel
    elif architecture.attention_sinks and not architecture.megatron and gpu.architecture not in SINKS:
        yield (
            "attention flash with sinks is kernels-community/vllm-flash-attn3, built for Ampere and Hopper, not for "
            f"the {gpu.name}: take eager"
        )


def card_notes(s: Scenario, gpu: GPU) -> Iterator[str]:
    """Notes on what has to be installed for `s` to start on this card, and on what is not known of the card."""
    if gpu.vendor == "AMD":
        yield (
            f"nobody has measured what a process takes besides its tensors on the {gpu.name}: an NVIDIA card's figure "
            "is used"
        )
        if not maps_pages(gpu.vendor, s.versions.get("torch", "0")):
            yield f"PyTorch's builds for ROCm have expandable segments from {MAPS_ON_ROCM} on: computed without"
    sinks = s.architecture.attention_sinks and not (s.architecture.megatron or s.architecture.compressed)
    if sinks and s.attention == "flash" and gpu.architecture in SINKS:
        yield (
            "attention flash with sinks is a kernel that Transformers fetches with the package kernels: "
            "kernels-community/vllm-flash-attn3, built for Ampere and Hopper"
        )
    # dev-discuss.pytorch.org/t/3290: Volta is dropped from CUDA 12.8 builds for 2.11
    if gpu.before_turing and at_least(s.versions.get("torch", "0"), "2.11"):
        yield f"PyTorch from 2.11 on has kernels for the {gpu.name} in its builds for CUDA 12.6 alone"


def linear_fault(s: Scenario) -> Refusal | None:
    """The reason why linear attention cannot run in PyTorch's operations, in one line, or None.

    Transformers 5.23 `integrations/hub_kernels.py`, `use_kernel_func_from_hub_with_fallback`: "can't keep packed
    sequences apart without" the kernels.
    """
    if s.architecture.recurrent and s.unpadded and s.linear_attention == "torch":
        return Refusal("linear_attention", "'torch' with packing", "fla; only its kernels keep sequences apart")
    return None


def rotation_fault(s: Scenario) -> Refusal | None:
    """The reason why queries and keys are not rotated in a kernel that is asked for, in one line, or None.

    Megatron-core's other layers fuse rotation by themselves; that of latent attention has a kernel of its own.
    """
    if not s.apply_rope_fusion or (s.architecture.unfused and not s.architecture.mla):
        return None
    return Refusal("apply_rope_fusion", "true", "false, or with layers of Megatron-core that have no fusions")


def spread_fault(s: Scenario) -> Refusal | None:
    """The reason why experts are not spread over GPUs as asked: Megatron-core, or code under FSDP 2 that is known."""
    if s.expert_parallel > 1 and s.sharding == "fsdp2" and s.expert_tensor_parallel == 1:
        return _shared_fault(s)
    for field in ("expert_parallel", "expert_tensor_parallel"):
        if (degree := getattr(s, field)) > 1 and s.sharding != "megatron":
            return Refusal(field, f"{degree} with sharding {s.sharding}", "1, or with sharding megatron")
    return None


def capacity_fault(s: Scenario) -> Refusal | None:
    """The reason why experts have no capacity as asked, in one line, or None: Megatron-core gives it to routed ones.

    Filled up, an expert gets tokens of a GPU once each (`token_dispatcher.py`, `get_capacity`).
    """
    arch, factor = s.architecture, s.expert_capacity
    if s.expert_padding and factor is None:
        return Refusal("expert_padding", "true", "false, or with expert_capacity")
    if factor is None:
        return None
    if not (s.sharding == "megatron" and arch.experts):
        return Refusal("expert_capacity", f"{factor:g}", "null, or with routed experts under Megatron-core")
    if s.expert_padding and factor > (most := arch.experts / arch.experts_per_token):
        return Refusal("expert_capacity", f"{factor:g} with expert_padding", f"{most:g} at most, all of its tokens")
    return None


def _shared_fault(s: Scenario) -> Refusal | None:
    """The reason why GPUs do not share experts under FSDP 2, or are not modelled so, in one line, or None."""
    given = f"{s.expert_parallel} with sharding fsdp2"
    if s.experts_implementation == "transformers":
        return Refusal("expert_parallel", given, "1, or with experts_implementation torchtitan, automodel")
    if s.shards % s.expert_parallel:
        return Refusal("expert_parallel", given, f"a divisor of the {s.shards} GPUs that shard the model")
    barred = {
        "tensor_parallel": s.tensor_parallel > 1,
        "pipeline_parallel": s.pipeline_parallel > 1,
        "offload": s.offload.trained,
        "optimizer_in_backward": s.optimizer_in_backward,
        f"method {s.method}": s.method != "full",
    }
    found = next((name for name, there in barred.items() if there), None)
    return Refusal("expert_parallel", f"{given} and {found}", "1; not modelled there") if found else None


def exchange_fault(s: Scenario) -> Refusal | None:
    """The reason why GPUs do not exchange keys and values as is asked for, in one line, or None."""
    if s.cp_comm_type == "p2p":
        return None
    if s.context_parallel > 1 and s.architecture.megatron:
        arch, ranks = s.architecture, s.tensor_parallel * s.context_parallel
        if s.cp_comm_type == "all_gather" or not (arch.heads % ranks or arch.kv_heads % ranks):
            return None
        return Refusal(
            "cp_comm_type", "'a2a'", f"p2p, all_gather, or heads of queries and keys that {ranks} GPUs share"
        )
    return Refusal("cp_comm_type", repr(s.cp_comm_type), "p2p, or with context_parallel under Megatron-core")


def linear_notes(s: Scenario) -> Iterator[str]:
    """Notes on what computes linear attention, which no framework's settings say; Megatron-core needs the kernels."""
    if not s.architecture.recurrent or s.architecture.conv or s.architecture.megatron:
        return
    ssm = s.architecture.ssm is not None
    layers, library = ("state spaces are", "mamba-ssm") if ssm else ("linear attention is", "flash-linear-attention")
    if s.linear_attention == "fla":
        yield f"{layers} taken to run in the kernels of {library} and causal-conv1d"
        yield "without them Transformers keeps far more: linear_attention torch says how much"
        return
    yield f"{layers} taken to run in PyTorch's operations, without {library}"
    yield "its kernels keep far less: linear_attention fla says how much"


def activation_notes(s: Scenario) -> Iterator[str]:
    """The note on an activation that has a kernel, where it runs in Transformers' operations."""
    if s.architecture.activation == "xielu" and "activation" not in replaced(s.kernels, s.architecture.family):
        yield "xIELU is taken to run in PyTorch's operations; its kernel keeps far less: kernels xielu says how much"


def lacks_kernels(s: Scenario, gpu: GPU) -> str | None:
    """The reason that `s` does not start on this card unless its method or optimizer changes, or None.

    bitsandbytes is built for CUDA, ROCm and XPU (README of 0.50).
    """
    states = "states of 8 bits" if OPTIMIZERS[s.optimizer].bitsandbytes else ""
    needed = "4-bit weights" if s.method == "qlora" else states
    return (
        f"bitsandbytes, which {needed} need, has no kernels for the {gpu.name}" if needed and gpu.lacks_cuda else None
    )
