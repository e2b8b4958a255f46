"""TRL 1.16: trainers of SFT, reward models, DPO, KTO, ORPO, CPO, GKD and GRPO on Transformers' Trainer and Accelerate.

Files are those of the package trl 1.16.0, from `trl/` on, unless another package is named: transformers 5.15.0,
accelerate 1.10.1. Models that are given by name load in fp32 and train under autocast. Logits are never materialised as
a whole, but by ORPOTrainer, CPOTrainer and GKDTrainer: the head is folded into the loss, in tiles. There is no PPO and
no REINFORCE++ in this release; RLOO runs as GRPO does.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from typing import Any

from calc.base.optimizers import OPTIMIZERS
from calc.base.plan import DeepSpeed, Holds, Keeps, Path, Role, Serving, Stage, supervised
from calc.base.versions import nearest as _nearest
from calc.frameworks import trainer
from calc.frameworks.base import Choices, accumulated, as_published
from calc.frameworks.constraints import (
    cut_alike,
    linear_fault,
    own_units,
    segments_fault,
    sharding_fault,
    trainer_fault,
    unmodelled,
    vocabulary_fault,
    whole_layers,
    whole_sequences,
)
from calc.frameworks.releases import NOTHING, pinned, stated
from calc.frameworks.trl.releases import ADAPTERS, DEFAULTS, GENERATING, RELEASES, SERVER, SUPERVISED
from calc.models.families import UNSCORED
from calc.scenario.scenario import Scenario
from calc.scenario.words import DEEPSPEED, FSDP, RL, Sharding

KNOWN: tuple[str, ...] = tuple(RELEASES)
CHOICES = Choices(fp16=True, precision="bf16")  # model_init_kwargs

TASKS = ("sft", "rm", "dpo", "kto", "orpo", "simpo", "gkd", "grpo")
WHOLE_LOGITS = ("orpo", "simpo")  # trl.experimental: their trainers take the model's own logits
TILE = 4096  # tokens whose logits exist at once, at most (kernels/chunked_logprob.py)

# the weights that a sharding gathers to hand them on, on top of those already there
HANDED: Mapping[Sharding, tuple[Holds, ...]] = {"zero3": ("parameter",), "fsdp1": ("units",), "fsdp2": ("parameter",)}

modelled = as_published


def nearest(version: str) -> str:
    """The known version whose memory behaviour `version` shares."""
    return _nearest(version, KNOWN)


def defaults(task: str, version: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of the trainers' configurations for `task`, by dotted key; `given` is what the user set."""
    gpus, method = trainers(given), given.get("method", "full")
    adapters = method != "full"
    tables = (DEFAULTS, NOTHING if task in RL else SUPERVISED, ADAPTERS if adapters else NOTHING)
    values = stated(task, version, *tables) | pinned(RELEASES[version])
    sharding = str(given.get("sharding", "ddp" if gpus > 1 else "none"))
    optimizer = str(given.get("optimizer", values["optimizer"]))
    facts = OPTIMIZERS[optimizer]
    micro_batch = int(given.get("micro_batch", values["micro_batch"]))
    # fp32 weights (trainer/utils.py:1332) and bf16 (trainer/base_config.py, __post_init__), which is autocast.
    # DeepSpeed casts the weights and keeps fp32 ones beside them; Accelerate gives FSDP a mixed precision of its own
    # (utils/dataclasses.py:2062) and fp32 shards (accelerator.py:1955, utils/fsdp_utils.py:702).
    precision = "mixed" if sharding in DEEPSPEED else "fsdp-mixed" if sharding in FSDP else "autocast"
    precision = str(given.get("precision", precision))
    values |= {
        "micro_batch": micro_batch,
        "global_batch": micro_batch * gpus,
        **(rollout(task, version, given, micro_batch * gpus) if task in RL else {}),
        **(alone("teacher", given) if task == "gkd" else {}),
        "precision": precision,
        "sharding": sharding,
        "optimizer": optimizer,
        # adamw_torch_fused (transformers training_args.py:796-803); DeepSpeed is handed that optimizer
        "optimizer_impl": "fused" if "fused" in facts.spelled.trl else facts.usual,
        # DeepSpeed's own choice under ZeRO; .grad has the parameter's type else, fp32 for FSDP's fp32 shard
        "grad_dtype": accumulated(precision, sharding),
        "no_sync": trainer.reduces_once(sharding, given),
        # off, but PEFT under ZeRO-3 needs it (trainer/sft_trainer.py:872-895, :1075-1081, and the others alike)
        "reentrant": adapters and sharding == "zero3",
    }
    if adapters:
        # peft makes adapters fp32; DeepSpeed casts them, under ZeRO-3 the trainers ask for the base's type, and those
        # of a 4-bit base are cast to bf16 (trainer/grpo_trainer.py, __init__)
        values["lora.dtype"] = "bf16" if sharding in DEEPSPEED or method == "qlora" else "fp32"
        values["double_quantization"] = method != "qlora"  # use_bnb_nested_quant (trainer/model_config.py:164)
    return values


def trainers(given: Mapping[str, Any]) -> int:
    """The number of GPUs that train: all, or those that a vLLM server leaves (vllm_mode server)."""
    gpus = int(given.get("gpus", 1))
    if given.get("placement", "colocated") == "colocated":
        return gpus
    return int(given.get("roles.actor.gpus") or max(1, gpus - int(given.get("rollout.gpus") or 0)))


def rollout(task: str, version: str, given: Mapping[str, Any], least: int) -> dict[str, Any]:
    """Defaults of GRPO alone; a generation batch is one optimizer step's completions, of which `least` run at once."""
    server = given.get("placement", "colocated") != "colocated"
    values = stated(task, version, GENERATING, SERVER if server else NOTHING)
    n = int(given.get("rollout.n", values["rollout.n"]))
    # n must divide the generation batch (trainer/grpo_config.py:1131): as few accumulation steps as do that
    completions = int(given.get("global_batch", lcm(least, n)))
    values |= {"global_batch": completions, "rollout.n": n, "rollout.batch": max(1, completions // n)}
    return values | alone("reward", given)


def alone(role: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a model that loads in its checkpoint's type, and that only DeepSpeed shards.

    A reward model: trainer/grpo_trainer.py:1208; a teacher: experimental/gkd/gkd_trainer.py:176-195, `prepare_model`
    with `evaluation_mode`.
    """
    if given.get("sharding") in DEEPSPEED:
        return {}
    return {f"roles.{role}.precision": "bf16", f"roles.{role}.sharding": "ddp" if trainers(given) > 1 else "none"}


def refuse(s: Scenario) -> str | None:
    """The reason why TRL cannot run `s`, in one line, or None."""
    if reason := trainer_fault(s, "transformers") or linear_fault(s) or unmodelled(s) or vocabulary_fault(s):
        return reason
    if s.task not in TASKS:
        return f"task: given {s.task!r}, allowed with trl {s.framework_version}: {', '.join(TASKS)}"
    if s.task == "rm" and s.architecture.family in UNSCORED:
        return f"model: given {s.model!r} for rm, allowed with trl: one that Transformers can make score sequences"
    usual = defaults(s.task, s.framework_version, {})
    if s.loss != usual["loss"]:
        return f"loss: given {s.loss!r}, allowed with trl for {s.task}: {usual['loss']}"
    if s.logprob != usual["logprob"]:
        return f"logprob: given {s.logprob!r}, allowed with trl: {usual['logprob']}, over tiles of the logits"
    if s.checkpointing == "selective":
        return "checkpointing: given 'selective', allowed with trl: none, full"
    if s.packing and s.task != "sft":
        return f"packing: given true for {s.task}, allowed with trl: false; SFTTrainer alone packs"
    uncut = whole_layers(s, "its losses read the whole head") or cut_alike(s)
    if reason := sharding_fault(s) or uncut or whole_sequences(s, "accelerate's ring attention is not modelled"):
        return reason
    if s.precision == "mixed" and s.sharding not in DEEPSPEED:
        return f"precision: given 'mixed' with sharding {s.sharding}, allowed: with {', '.join(DEEPSPEED)}"
    if s.precision == "autocast" and s.sharding in FSDP:
        return (
            f"precision: given 'autocast' with sharding {s.sharding}, allowed: fsdp-mixed, which bf16 sets, bf16, fp32"
        )
    if reason := own_units(s):
        return reason
    if s.lora and "lm_head" in s.lora.targets:
        return "lora.targets: given lm_head, allowed: any but the head, whose weight the loss reads itself"
    return refuse_rollout(s) if s.rollout else None


def refuse_rollout(s: Scenario) -> str | None:
    """The reason why GRPOTrainer cannot run `s`, in one line, or None."""
    assert s.rollout
    engine, n = s.rollout.engine, s.rollout.n
    if not s.has("actor"):
        return "roles.actor: given 'none', allowed with trl: the policy, which it trains"
    if engine == "none":
        return "rollout.engine: given 'none', allowed with trl: hf, vllm"
    if n < 2:  # trainer/grpo_config.py: "GRPO requires at least 2 generations per prompt"
        return f"rollout.n: given {n}, allowed with trl: at least 2"
    if fault := segments_fault(s):
        return fault
    step = s.micro_batch * s.gpus_of(s.group("actor"))
    if s.rollout.batch * n % step:  # trainer/grpo_config.py:1103
        return (
            f"rollout.batch: given {s.rollout.batch} with rollout.n = {n}, allowed: completions that are a multiple of "
            f"micro_batch x GPUs of the actor = {step}"
        )
    if s.placement == "separate":
        if engine != "vllm":
            return f"placement: given 'separate' with rollout.engine {engine!r}, allowed: with vllm, as a server"
        for name in ("reference", "reward"):
            if s.has(name) and "gpus" in s.roles[name]:
                return (
                    f"roles.{name}.gpus: given for a role of the trainer, allowed with trl: none, it shares the actor's"
                )
    reference = s.role("reference")
    if reference and reference.model != s.model:  # get_config_model_id(self.model.config)
        return (
            f"roles.reference.model: given {reference.model!r}, allowed with trl for grpo: {s.model}, the policy's own"
        )
    return None


def one_thread(s: Scenario) -> bool:
    """True: `accelerate launch` leaves each rank one thread, even a single one.

    commands/launch.py:1365 of 1.15.0, utils/launch.py:195.
    """
    return True


def keeps(s: Scenario) -> Keeps:
    """The plan of the trainers: loading, generation and weight sync; no logits, and no outputs worth counting."""
    # `accelerate_configs/zero*.yaml` name the stage and offload alone. Accelerate and Transformers fill in bucket sizes
    # by the model's width only where a DeepSpeed file says "auto" (accelerator.py:2205, integrations/deepspeed.py:200),
    # so that DeepSpeed's own defaults are left.
    deepspeed = DeepSpeed(s.versions["deepspeed"]) if s.sharding in DEEPSPEED else None
    if s.task == "grpo":
        return grpo(s, deepspeed)
    if s.task == "rm":
        return supervised("reward", Path("scalar"), s.rows, deepspeed=deepspeed, **trained(s))
    if s.task in WHOLE_LOGITS:
        return supervised("actor", whole(s), s.rows, deepspeed=deepspeed, **trained(s))
    if s.task == "gkd":
        plan = supervised("actor", compared(s), s.rows, scored=teacher(s), deepspeed=deepspeed, **trained(s))
        return trainer.distilled(s, plan)
    path = Path("tiled", tile=min(TILE, s.rows * (s.longest_len - 1)))
    if s.has("reference"):
        # a PEFT policy is its own reference unless another model is passed (trainer/dpo_trainer.py, __init__)
        other = reference_of(s, path)
        return supervised("actor", path, s.rows, scored=other, deepspeed=deepspeed, **trained(s))
    return supervised("actor", path, s.rows, deepspeed=deepspeed, **trained(s))


def whole(s: Scenario) -> Path:
    """The path of ORPOTrainer and CPOTrainer: a kernel that keeps the logits, and the chosen half's cross entropy.

    `selective_log_softmax` has a kernel on any NVIDIA card (trainer/utils.py:510, kernels/logprob_entropy.py:146).
    SimPO is CPOTrainer's loss_type simpo, whose cross entropy cpo_alpha, 1.0, leaves on (experimental/cpo/
    cpo_trainer.py:842). Accelerate's autocast makes the logits fp32.
    """
    kept = (s.longest_len - 1) / s.longest_len
    return trainer.likelihood(s, Path("flash", head_fp32=trainer.wrapped(s), kept=kept))


def compared(s: Scenario) -> Path:
    """The path of GKDTrainer: the student's whole logits, which wait for the teacher's (experimental/gkd/)."""
    kept = (s.longest_len - 1) / s.longest_len
    return Path("divergence", head_fp32=trainer.wrapped(s), kept=kept, held="inside")


def teacher(s: Scenario) -> Role:
    """GKDTrainer's teacher, which returns logits (experimental/gkd/gkd_trainer.py:176)."""
    own = s.role("teacher")
    assert own
    wrapped = trainer.wrapped(own)
    logits = Path("flash", head_fp32=wrapped)
    return Role("teacher", logits, logits, s.rows, s.rows, wrapped=wrapped, unfrozen=True)


def trained(s: Scenario) -> dict[str, Any]:
    """The fields that Transformers' Trainer sets in the trained role; trainers of pairs and KTO switch dropout off."""
    # adapters' dropout, too
    own: dict[str, Any] = {"dropout": s.task == "sft" or bool(s.rollout), "unpacks": unpacks(s)}
    if s.offload.activations:
        own["streams"] = "stash"  # models/activation_offloading.py
    return trainer.keeps(s) | own


def unpacks(s: Scenario) -> int:
    """Bytes of an unpacked 4-bit element while it multiplies, if its type is not that of other products; else 0.

    Weights loaded as fp32 come back as fp32 (trainer/utils.py:265), which autocast casts for the product.
    """
    return 4 + 2 if (s.method, s.layout) == ("qlora", "autocast") else 0


def reference_of(s: Scenario, path: Path) -> Role:
    """The reference, built like the policy, or the policy itself without its adapters."""
    own = s.role("reference")
    assert own
    shares = bool(s.lora) and own.model == s.model
    return Role("reference", path, path, s.rows, s.rows, root_stays=own.sharding == "fsdp1", shares=shares,
                wrapped=trainer.wrapped(own), unfrozen=True, unpacks=unpacks(own))  # fmt: skip


def grpo(s: Scenario, deepspeed: DeepSpeed | None) -> Keeps:
    """The plan of GRPO: roles in the order in which they load, and a step of sync, rollout, scores, update, checkpoint.

    trainer/grpo_trainer.py, __init__: policy, vLLM, then reference and reward model move to the GPU. PyTorch's FSDP
    leaves the root gathered after a forward (`_runtime_utils.py`); FSDP2 as Accelerate calls it does not.
    """
    assert s.rollout
    # labels of the prompt are -100: only the completion is scored (trainer/grpo_trainer.py:1498)
    path = Path("tiled", kept=s.response_len / s.seq_len, tile=min(TILE, s.rows * s.response_len))
    root = s.sharding == "fsdp1"
    actor = Role("actor", path, path, s.rows, s.rows, root_stays=root, **trained(s))
    completions = s.rollout.batch * s.rollout.n // s.gpus_of(s.group("actor"))  # of one GPU
    others = [reference_of(s, path)] if s.has("reference") else []
    if s.has("reward"):
        # one forward over the whole generation batch (trainer/grpo_trainer.py, _calculate_rewards)
        wrapped = trainer.wrapped(s)
        others.append(Role("reward", Path("scalar"), Path("scalar"), completions, completions,
                           wrapped=wrapped, unfrozen=True))  # fmt: skip
    vllm = s.rollout.engine == "vllm"
    zero3 = s.sharding == "zero3"
    stages = []
    if vllm:
        # merging adapters needs all weights at once under ZeRO-3 (generation/vllm_generation.py:447)
        gathered = ("whole",) if zero3 and s.lora else HANDED.get(s.sharding, ())
        stages += [Stage("sync", "actor", engine="weights", holds=gathered), Stage("serve", "rollout")]
    else:
        # ds3_gather_for_generation true (trainer/grpo_config.py:498): ZeRO-3 gathers every weight
        # FSDP 1 gathers its root in fp32 (`summon_full_params(recurse=False)`, trainer/grpo_trainer.py)
        gathers: Mapping[Sharding, tuple[Holds, ...]] = {"zero3": ("whole",), "fsdp1": ("root",)}
        held = gathers.get(s.sharding, ())
        stages.append(Stage("generate", "actor", rows=completions, holds=held))
    if s.has("reward"):
        stages.append(Stage("score", "reward"))
    if vllm:
        stages.append(
            Stage("score", "actor")
        )  # vllm_importance_sampling_correction true (trainer/grpo_trainer.py:2640)
    if s.has("reference"):
        stages.append(Stage("score", "reference"))
    # below stage 3 every rank copies the state dict to the host (accelerate accelerator.py:3926), else the first alone
    every = s.sharding in ("zero1", "zero2")
    stages += [
        Stage("train", "actor"),
        Stage("save", "actor", holds=HANDED.get(s.sharding, ()), host="every" if every else "first",
              host_bytes=2 if s.layout in ("mixed", "bf16") else 4),
    ]  # fmt: skip
    return Keeps(
        roles=(actor, *others),
        stages=tuple(stages),
        loading=("actor", *(["rollout"] if vllm else []), *(role.name for role in others if not role.shares)),
        serving=serving(s, completions) if vllm else None,
        deepspeed=deepspeed,
    )


def serving(s: Scenario, completions: int) -> Serving:
    """vLLM in the trainer's own process (generation/vllm_generation.py:347), or `trl vllm-serve` on GPUs of its own.

    Neither is given a length, so vLLM takes the model's full context. CUDA graphs are captured.
    """
    assert s.rollout
    version, length = s.versions["vllm"], s.architecture.max_positions
    if s.placement == "separate":
        return Serving(version, length)
    return Serving(
        version,
        length,
        max_num_seqs=completions * s.rollout.tensor_parallel,
        max_num_batched_tokens=4096,
        sleep_level=2,
        process="trainer",
    )
