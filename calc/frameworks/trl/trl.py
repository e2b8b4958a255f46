"""TRL's trainers on Transformers' Trainer and Accelerate, by release: SFT, reward models, DPO, KTO, ORPO, CPO and GKD.

`calc.frameworks.trl.rl` adds GRPO and PPO, `calc.frameworks.trl.paths` the ways from logits to a loss. Read in the
packages trl 0.7.11 to 1.16.0, from `trl/` on; files without a release are those of 1.16.0. Other packages are named:
transformers 5.15.0, accelerate 1.10.1. Every release is known that changed a default, a trainer or what its loss keeps;
one in between behaves as the one before it. Models that are given by name load in fp32 and, since 0.19, train under
autocast. REINFORCE++ is in no release, and RLOO runs as GRPO does since 0.22.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from calc.base.optimizers import OPTIMIZERS
from calc.base.plan import DeepSpeed, Keeps, Path, Role, Stage, supervised
from calc.base.refusal import Refusal
from calc.base.versions import at_least
from calc.base.versions import nearest as _nearest
from calc.frameworks import trainer
from calc.frameworks.base import Choices, accumulated, as_published
from calc.frameworks.constraints import (
    cut_alike,
    own_units,
    sharding_fault,
    trainer_fault,
    unmodelled,
    vocabulary_fault,
    whole_layers,
    whole_sequences,
    zero_fault,
)
from calc.frameworks.releases import NOTHING, pinned, stated
from calc.frameworks.trl import paths, rl
from calc.frameworks.trl.releases import ADAPTERS, DEFAULTS, FIRST, RELEASES, SUPERVISED
from calc.models.architecture import Architecture
from calc.models.families import UNSCORED
from calc.scenario.scenario import Scenario
from calc.scenario.words import DEEPSPEED, FSDP, RL

KNOWN: tuple[str, ...] = tuple(RELEASES)
CHOICES = Choices(fp16=True, precision="bf16", serves_whole=True)  # model_init_kwargs

# The first release with a task's trainer, and the first without it again.
TASKS: Mapping[str, tuple[str, str]] = {
    "sft": (FIRST, ""), "rm": (FIRST, ""), "dpo": (FIRST, ""), "kto": ("0.8.0", ""), "orpo": ("0.8.2", ""),
    "simpo": ("0.9.6", ""), "gkd": ("0.11.0", ""), **rl.TASKS,
}  # fmt: skip
ALONE = {"gkd": "teacher", "grpo": "reward"}  # the model that a trainer loads by itself
# The first release whose trainer keeps checkpoints in host memory (`activation_offloading`), by task.
OFFLOADS = {"sft": "0.18.0", "rm": "0.24.0", "dpo": "0.29.0"}
PAIRS = "0.24.0"  # RewardTrainer has chosen and rejected in one batch, and images
BF16 = "0.19.0"  # bf16 is true unless fp16 is, since then
# A 4-bit model by task. From the first release named its trainer has PEFT make fp32 of all else that the model has
# (`prepare_model_for_kbit_training`) and, where bf16 is on, makes bf16 of embedding and head again
# (`peft_module_casting_to_bf16`: trainer/sft_trainer.py:591 of 0.19.0, models/utils.py:561 of 0.24.0). From the second
# on it leaves the model as loaded, and makes bf16 of adapters, which PEFT makes fp32 (sft_trainer.py:718 of 0.26.0).
PREPARES: Mapping[str, tuple[str, str]] = {
    "sft": (FIRST, "0.26.0"), "gkd": (FIRST, "0.26.0"), "rm": ("0.22.0", "0.26.0"), "grpo": ("0.22.0", "0.26.0"),
    "dpo": (FIRST, "0.29.0"), "kto": (FIRST, "1.4.0"), "orpo": (FIRST, ""), "simpo": (FIRST, ""), "ppo": (FIRST, ""),
}  # fmt: skip
NEVER = (FIRST, FIRST)  # for a task that no trainer has


def modelled(architecture: Architecture, values: Mapping[str, Any]) -> Architecture:
    """The model as Transformers has it; rows without padding lie end to end, and SDPA gets a mask of their positions.

    Packs are `padding_free` since 0.19.0 (trainer/sft_trainer.py:394), and Transformers finds sequences by their
    positions since 4.53 (`masking_utils.py`, find_packed_sequence_indices).
    """
    published = as_published(architecture, values)
    told = at_least(str(values["version"]), "0.19.0") and at_least(str(values["versions.transformers"]), "4.53")
    joined = values["packing"] or values["padding_free"]
    return replace(published, masked=True, end_to_end=True) if joined and told else published


def nearest(version: str) -> str:
    """The known version whose memory behaviour `version` shares."""
    return _nearest(version, KNOWN)


def tasks(version: str) -> tuple[str, ...]:
    """The tasks whose trainers a release has."""
    return tuple(
        task
        for task, (first, end) in TASKS.items()
        if at_least(version, first) and not (end and at_least(version, end))
    )


def defaults(task: str, version: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of the trainers' configurations for `task`, by dotted key; `given` is what the user set."""
    gpus, method = trainer.trainers(given), given.get("method", "full")
    adapters = method != "full"
    tables = (DEFAULTS, NOTHING if task in RL else SUPERVISED, ADAPTERS if adapters else NOTHING)
    libraries = {place: pin for place, pin in pinned(RELEASES[version]).items() if pin}
    known = {**libraries, **given}
    del libraries["versions.accelerate"]
    values = stated(task, version, *tables) | libraries
    sharding = str(given.get("sharding", "ddp" if gpus > 1 else "none"))
    optimizer = str(given.get("optimizer", values["optimizer"]))
    micro_batch = int(given.get("micro_batch", values["micro_batch"]))
    precision = str(given.get("precision", loaded(task, version, sharding, method)))
    values |= {
        "micro_batch": micro_batch,
        "global_batch": micro_batch * gpus,
        **(rl.defaults(task, version, given, micro_batch * gpus) if task in RL else {}),
        **(rl.alone(ALONE[task], given, known, precision) if task in ALONE else {}),
        **rl.unsharded(task, version, given, precision),
        "precision": precision,
        "sharding": sharding,
        "optimizer": optimizer,
        "optimizer_impl": stepped(known, optimizer),
        # DeepSpeed's own choice under ZeRO; .grad has the parameter's type else, fp32 for FSDP's fp32 shard
        "grad_dtype": accumulated(precision, sharding),
        "no_sync": trainer.reduces_once(sharding, known),
        "reentrant": reentrant(version, known, peft_in_shards=adapters and sharding == "zero3"),
    }
    if paths.by_liger(task, version, str(given.get("kernels", "eager"))):
        values["loss"] = "fused"
    if adapters:
        # peft makes adapters fp32; DeepSpeed casts them, under ZeRO-3 the trainers ask for the base's type
        narrow = sharding in DEEPSPEED or (method == "qlora" and leaves_as_loaded(task, version))
        values["lora.dtype"] = "bf16" if narrow else "fp32"
        values["double_quantization"] = method != "qlora"  # use_bnb_nested_quant (trainer/model_config.py:164)
    return values


def leaves_as_loaded(task: str, version: str) -> bool:
    """True if the trainer of `task` takes a 4-bit model as it is, and makes bf16 of its adapters."""
    _, end = PREPARES.get(task, NEVER)
    return bool(end) and at_least(version, end)


def loaded(task: str, version: str, sharding: str, method: str) -> str:
    """The default precision: fp32 weights (trainer/utils.py:1332), and since 0.19.0 bf16, which is autocast.

    A 4-bit model on a single GPU is in bf16 otherwise where its trainer sees to that: see `PREPARES`.

    DeepSpeed casts the weights and keeps fp32 ones beside them; Accelerate gives FSDP a mixed precision of its own
    (utils/dataclasses.py:2062) and fp32 shards (accelerator.py:1955, utils/fsdp_utils.py:702). Until 0.18 bf16 is a
    flag that is off; for DeepSpeed and FSDP, which run by a file, `accelerate_configs` have it on.
    """
    if sharding in DEEPSPEED:
        return "mixed"
    if sharding in FSDP:
        return "fsdp-mixed"
    if not at_least(version, BF16):
        return "fp32"
    since, _ = PREPARES.get(task, NEVER)
    prepares = at_least(version, since) and not leaves_as_loaded(task, version)
    return "bf16" if method == "qlora" and prepares else "autocast"


def stepped(known: Mapping[str, Any], optimizer: str) -> str:
    """The optimizer's implementation: `adamw_torch_fused` by today's default, which DeepSpeed is handed, too.

    See transformers training_args.py:796-803.
    """
    facts = OPTIMIZERS[optimizer]
    fused = trainer.fuses(str(known["versions.transformers"]), str(known["versions.torch"]))
    return "fused" if fused and "fused" in facts.spelled.trl else facts.usual


def reentrant(version: str, known: Mapping[str, Any], *, peft_in_shards: bool) -> bool:
    """True if checkpointing is reentrant where nothing is asked: Transformers' way until 5, switched off by 0.27.0.

    PEFT under ZeRO-3 needs it (trainer/sft_trainer.py:872-895, :1075-1081, and the others alike).
    """
    if at_least(version, "0.27.0"):
        return peft_in_shards
    return not at_least(str(known["versions.transformers"]), "5")


def refuse(s: Scenario) -> Refusal | None:
    """The reason why TRL cannot run `s`, in one line, or None."""
    if reason := trainer_fault(s, "transformers") or zero_fault(s) or unmodelled(s) or vocabulary_fault(s):
        return reason
    version = s.framework_version
    if s.task not in tasks(version):
        return _absent(s)
    if s.task == "rm" and s.architecture.family in UNSCORED:
        return Refusal("model", f"{s.model!r} for rm", "one that Transformers can make score sequences", "with trl")
    usual = _usual(s.task, version, s.kernels)
    if s.loss != usual["loss"]:
        return Refusal("loss", repr(s.loss), usual["loss"], f"with trl for {s.task}")
    if s.logprob != usual["logprob"]:
        return Refusal("logprob", repr(s.logprob), f"{usual['logprob']}{_ways(version)}", "with trl")
    if s.checkpointing == "selective":
        return Refusal("checkpointing", "'selective'", "none, full", "with trl")
    if s.packing and s.task != "sft":
        return Refusal("packing", f"true for {s.task}", "false; SFTTrainer alone packs", "with trl")
    # KTOTrainer pairs each prompt with the next one's completion (trainer/kto_trainer.py:844 of 1.16.0)
    if s.task == "kto" and s.micro_batch == 1:
        return Refusal("micro_batch", "1 for kto", "at least 2; its KL term mixes the pairs of a batch", "with trl")
    if s.images and (s.task == "ppo" or (s.task == "rm" and not at_least(version, PAIRS))):
        return Refusal("images", f"{s.images.size!r} for {s.task}", "none", f"with trl {version}")
    if s.offload.activations and not at_least(version, OFFLOADS[s.task]):
        return Refusal("offload.activations", "true", f"false; it came with {OFFLOADS[s.task]}", f"with trl {version}")
    uncut = whole_layers(s, "its losses read the whole head") or cut_alike(s)
    if reason := sharding_fault(s) or uncut or whole_sequences(s, "accelerate's ring attention is not modelled"):
        return reason
    if s.precision == "mixed" and s.sharding not in DEEPSPEED:
        return Refusal("precision", f"'mixed' with sharding {s.sharding}", f"with {', '.join(DEEPSPEED)}")
    if s.precision == "autocast" and s.sharding in FSDP:
        return Refusal("precision", f"'autocast' with sharding {s.sharding}", "fsdp-mixed, which bf16 sets, bf16, fp32")
    if reason := own_units(s) or trainer.frozen_fault(s):
        return reason
    if s.lora and "lm_head" in s.lora.targets:
        return Refusal("lora.targets", "lm_head", "any but the head, whose weight the loss reads itself")
    return rl.refuse(s) if s.rollout else None


@lru_cache(maxsize=1024)
def _usual(task: str, version: str, kernels: str) -> Mapping[str, Any]:
    """The defaults of a task, which a search compares thousands of scenarios with."""
    return defaults(task, version, {"kernels": kernels})


def _absent(s: Scenario) -> Refusal:
    """The line on a task whose trainer this release does not have, with those that do."""
    version = s.framework_version
    why, (first, end) = "", TASKS.get(s.task, ("", ""))
    if first and not at_least(version, first):
        why = f"; its trainer came with {first}"
    elif first and not at_least(version, paths.FOLDED):
        why = f"; its trainer went with {end}"
    return Refusal("task", repr(s.task), ", ".join(tasks(version)) + why, f"with trl {version}")


def _ways(version: str) -> str:
    return ", over tiles of the logits" if at_least(version, paths.FOLDED) else f" in release {version}"


def threads(s: Scenario) -> int | None:
    """One: `accelerate launch` leaves each rank so many, even a single one, unless OMP_NUM_THREADS is set.

    accelerate 1.15.0 `commands/launch.py:1365`, `utils/launch.py:195`.
    """
    return 1


def keeps(s: Scenario) -> Keeps:
    """The plan of the trainers: loading, generation and weight sync, and the loss of this release."""
    # `accelerate_configs/zero*.yaml` name the stage and offload alone. Accelerate and Transformers fill in bucket sizes
    # by the model's width only where a DeepSpeed file says "auto" (accelerator.py:2205, integrations/deepspeed.py:200),
    # so that DeepSpeed's own defaults are left.
    deepspeed = trainer.sized(s, DeepSpeed(s.versions["deepspeed"])) if s.sharding in DEEPSPEED else None
    if s.task == "grpo":
        return rl.grpo(s, trained(s), deepspeed)
    if s.task == "ppo":
        return rl.ppo(s, trained(s), deepspeed)
    if s.task == "rm":
        return rewards(s, deepspeed)
    if s.task in ("orpo", "simpo"):
        return supervised("actor", paths.whole(s), s.rows, deepspeed=deepspeed, **trained(s))
    if s.task == "gkd":
        plan = supervised("actor", paths.compared(s), s.rows, scored=teacher(s), deepspeed=deepspeed, **trained(s))
        return trainer.distilled(s, plan)
    if s.task == "sft":
        return supervised("actor", paths.sft(s), s.rows, deepspeed=deepspeed, **trained(s))
    scored = s.has("reference")
    policy, path = paths.pairs(s, scored=scored) if s.task == "dpo" else paths.kto(s)
    if scored:
        # a PEFT policy is its own reference unless another model is passed (trainer/dpo_trainer.py, __init__)
        other = rl.reference(s, path)
        return supervised("actor", policy, s.rows, scored=other, deepspeed=deepspeed, **trained(s))
    return supervised("actor", policy, s.rows, deepspeed=deepspeed, **trained(s))


def rewards(s: Scenario, deepspeed: DeepSpeed | None) -> Keeps:
    """The plan of RewardTrainer: a forward of all pairs, or until 0.23 one of the chosen and one of the rejected."""
    path = Path("scalar")
    if at_least(s.framework_version, PAIRS):
        return supervised("reward", path, s.rows, deepspeed=deepspeed, **trained(s))
    half = s.rows // 2
    role = Role("reward", path, path, half, half, **trained(s))
    return Keeps((role,), (Stage("train", "reward", joint="reward"),), ("reward",), deepspeed=deepspeed)


def teacher(s: Scenario) -> Role:
    """GKDTrainer's teacher, which returns logits (experimental/gkd/gkd_trainer.py:176)."""
    own = s.role("teacher")
    assert own
    wrapped = trainer.wrapped(own)
    logits = Path("flash", head_fp32=wrapped or trainer.early(s))
    return Role("teacher", logits, logits, s.rows, s.rows, wrapped=wrapped, unfrozen=True, loads=rl.loads(own))


def trained(s: Scenario) -> dict[str, Any]:
    """The fields that Transformers' Trainer sets in the trained role; most trainers disable dropout."""
    # adapters' dropout, too
    drops = s.task in ("sft", "grpo") or (s.task == "rm" and not at_least(s.framework_version, "0.14.0"))
    own: dict[str, Any] = {"dropout": drops, "unpacks": rl.unpacks(s)}
    if s.offload.activations:
        own["streams"] = "stash"  # models/activation_offloading.py
    return trainer.keeps(s) | own | {"loads": rl.loads(s)}
