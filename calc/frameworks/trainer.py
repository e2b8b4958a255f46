"""Transformers' Trainer on Accelerate: what the two do to a model that they train, whichever code calls them.

TRL's trainers are built on it, and those of LLaMA-Factory, Axolotl, ms-swift and Unsloth; with plain Transformers it is
the scenario's `trainer`. Read in transformers 5.23 and accelerate 1.15; where another release is named, in that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from calc.base.plan import DeepSpeed, Holds, Keeps, Loads, Path, Stage
from calc.base.refusal import Refusal
from calc.base.schema import show
from calc.base.versions import at_least
from calc.models.releases import logits_cast, shifts_logits
from calc.scenario.scenario import Scenario
from calc.scenario.words import DEEPSPEED, FSDP, Sharding

TASKS = ("pretrain", "sft", "rm", "dpo", "kto", "orpo", "simpo", "gkd")
GENERATES = "on_policy: what the student generates is held in memory; the time it takes is not computed"
NO_SYNC = "1.11"  # of Accelerate: `no_sync` of FSDP 2 calls set_requires_gradient_sync
# the weights that a sharding gathers to hand them on, on top of those already there
HANDED: Mapping[Sharding, tuple[Holds, ...]] = {"zero3": ("parameter",), "fsdp1": ("units",), "fsdp2": ("parameter",)}


def filled_in(s: Scenario, usual: DeepSpeed) -> DeepSpeed:
    """`usual` with the sizes that Transformers puts in place of `auto`, by the model's width.

    A bucket has h² elements, nine tenths of that are gathered ahead, a parameter of up to 10·h stays whole
    (`integrations/deepspeed.py`, `trainer_config_finalize`).
    """
    h = s.architecture.hidden
    return replace(usual, reduce_bucket=h * h, prefetch=int(0.9 * h * h), persistence_threshold=10 * h)


def sized(s: Scenario, usual: DeepSpeed) -> DeepSpeed:
    """`usual` with the sizes of buckets that the scenario states."""
    filled = filled_in(s, usual)

    def size(stated: int | str | None, own: int, auto: int) -> int:
        return own if stated is None else auto if isinstance(stated, str) else stated

    return replace(
        usual,
        reduce_bucket=size(s.reduce_bucket_size, usual.reduce_bucket, filled.reduce_bucket),
        prefetch=size(s.stage3_prefetch_bucket_size, usual.prefetch, filled.prefetch),
        persistence_threshold=size(
            s.stage3_param_persistence_threshold, usual.persistence_threshold, filled.persistence_threshold
        ),
    )


def habits(task: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Its defaults: none that do not follow from others."""
    return {}


def keeps(s: Scenario, *, placed: bool = False) -> dict[str, Any]:
    """The fields that the Trainer sets in a trained `calc.base.plan.Role`, whatever its loss; `placed` as in `loads`.

    FSDP reduces gradients in the compute type (accelerate `utils/dataclasses.py:2137`). Embeddings: `trainer.py:1338`.
    DDP finds unused parameters, unless the model is Transformers' own, which PEFT's is not, and checkpoints
    (`trainer.py:749`). It switches checkpointing on as training begins (`Trainer.train`).
    """
    return {
        "adapts_first": True,
        "reduce_bytes": 2 if s.precision == "fsdp-mixed" else 0,
        "wrapped": wrapped(s),
        "by_trainer": True,
        "finds_unused": s.checkpointing == "none" or bool(s.lora),
        "loads": loads(s, placed=placed),
        "placed": placed and s.sharding not in FSDP,
    }


def loads(s: Scenario, *, placed: bool = False) -> Loads:
    """The ranks that read the whole model on the host: each, or under FSDP one a node, as our commands ask for.

    With `cpu_ram_efficient_loading` the others build it on the meta device (transformers 5.24 `modeling_utils.py`,
    `is_local_dist_rank_0`). `placed`: without FSDP a `device_map` sends each tensor to the card as it is read.
    """
    if s.sharding in FSDP:
        return "node"
    return "" if placed else "every"


def reduces_once(sharding: str, given: Mapping[str, Any]) -> bool:
    """True if a step's gradients are reduced once unless `sync_each_batch` is asked for.

    Every micro batch but the last runs under `no_sync`, whatever the sharding (`trainer.py:1896`, accelerate
    `accelerator.py:1165`; transformers 4.28 `trainer.py:1926`, before the Trainer was built on Accelerate). For FSDP 2
    Accelerate has one since 1.11; before, it looked for a method that such a model does not have (1.10.1
    `accelerator.py:1170`). The newest release counts unless `given` names one.
    """
    early = not at_least(str(given.get("versions.accelerate", NO_SYNC)), NO_SYNC)
    return sharding in FSDP and not (sharding == "fsdp2" and early)


def trainers(given: Mapping[str, Any]) -> int:
    """The number of GPUs that train: all, or those that a vLLM server leaves (vllm_mode server)."""
    gpus = int(given.get("gpus", 1))
    if given.get("placement", "colocated") == "colocated":
        return gpus
    return int(given.get("roles.actor.gpus") or max(1, gpus - int(given.get("rollout.gpus") or 0)))


def wrapped(s: Scenario) -> bool:
    """True if Accelerate puts autocast around a model's forward: with `bf16`, which is set unless all is fp32.

    Floating outputs then leave it in fp32 (`accelerator.py`, `prepare_model`). DeepSpeed's engine uses no autocast, nor
    does FSDP 2, whose policy casts instead (`_prepare_fsdp2`).
    """
    return s.precision != "fp32" and s.sharding not in (*DEEPSPEED, "fsdp2")


def fuses(transformers: str, torch: str) -> bool:
    """True if AdamW is fused where no optimizer is named: `adamw_torch_fused`, since 4.54 (`training_args.py`)."""
    return at_least(transformers, "4.54") and at_least(torch, "2.8")


def refuse(s: Scenario) -> Refusal | None:
    """The reason why Transformers' Trainer cannot run `s`, in one line, or None."""
    if s.task not in TASKS:
        return Refusal("trainer", f"'transformers' for {s.task}", f"own; the Trainer is for {', '.join(TASKS)}")
    if s.offload.activations:
        return Refusal("offload.activations", "true with trainer transformers", "false; it has no switch for it")
    if s.together > s.devices:
        return Refusal("trainer", "'transformers' where GPUs share sequences", "own; not modelled")
    return frozen_fault(s)


def frozen_fault(s: Scenario) -> Refusal | None:
    """The reason why a frozen model cannot be offloaded unlike the trained one, in one line, or None.

    It is prepared with the settings of the trained one (trl 1.16 `models/utils.py`, `prepare_deepspeed` and
    `prepare_fsdp`, which LLaMA-Factory and ms-swift call, too).
    """
    trained = (s.role("actor") or s).offload.parameters
    for name in ("reference", "reward", "teacher"):
        own = s.role(name)
        if own and own.offload.parameters != trained:
            place, allowed = f"roles.{name}.offload.parameters", f"{show(trained)}, as for the trained model"
            return Refusal(place, show(own.offload.parameters), allowed, "with Transformers' Trainer")
    return None


def path(s: Scenario, usual: Path) -> Path:
    """The loss path: the model's own."""
    return usual


def early(s: Scenario) -> bool:
    """True if the model casts its logits to fp32, as most of Transformers' do up to 4.45."""
    return logits_cast(s.architecture.family, s.versions["transformers"]) == "model"


def targets(s: Scenario) -> int:
    """Tokens of a micro batch that have a next token to predict: all but each row's last."""
    return s.rows * (s.longest_len - 1)


def predicting(s: Scenario) -> float:
    """The share of the positions whose logits are left where each row's last is cut off."""
    return (s.longest_len - 1) / s.longest_len


def compared(s: Scenario) -> int:
    """Tokens of a micro batch whose distributions GKD compares: answers', or all but each row's first.

    A distribution stands at the position before its token's; `lengths.prompt` tells where answers begin.
    """
    prompt = max(1, s.lengths.prompt if s.lengths else 0)
    return s.rows * max(1, s.held_len(s.rows) - prompt)


def divergence(s: Scenario, *, wide: bool) -> Path:
    """The loss of GKD, of tokens that a slice leaves of all logits.

    trl 0.24 `trainer/gkd_trainer.py`, compute_loss: `logits[:, prompt_lengths - 1 : -1, :]`.
    """
    share = compared(s) / (s.rows * s.held_len(s.rows))
    return Path("divergence", head_fp32=wide, kept=share, held="inside")


def own_loss(s: Scenario) -> Path:
    """The loss of Transformers' models, `ForCausalLMLoss` (`loss/loss_utils.py`).

    The cast to fp32 is in most models up to 4.45 and in the loss since; some have none before. Up to 4.48, and by some
    models since, logits are shifted by one position, which copies them unless there is a single sequence.

    fms-acceleration's plugin casts and shifts them in any release, and writes the gradient over the shifted ones
    (fms_acceleration_foak 0.3 and 0.7 `kernels/unsloth/cross_entropy_loss.py`).
    """
    transformers = s.versions["transformers"]
    cast = logits_cast(s.architecture.family, transformers)
    if s.kernels == "foak":
        return Path("flash", head_fp32=True, shift_copy=s.rows > 1, in_place=True)
    shifts = s.rows > 1 and shifts_logits(s.architecture.family, transformers)
    return Path("cross-entropy", head_fp32=cast == "model", uncast=not cast, shift_copy=shifts)


def selective(usual: Path) -> Path:
    """The loss path of TRL's `selective_log_softmax`, which takes the logsumexp of fp32 logits row by row.

    See trl `trainer/utils.py`; Accelerate's autocast makes the logits fp32.
    """
    return replace(usual, kind="rows", upcast=False) if usual.kind == "selective" and usual.head_fp32 else usual


def distilled(s: Scenario, plan: Keeps) -> Keeps:
    """The plan of GKD where the student also generates, as `on_policy` says: before the step, by Transformers.

    ZeRO-3 gathers every weight for it (trl `models/utils.py:unwrap_model_for_generation`).
    """
    if not s.on_policy:
        return plan
    gathered: tuple[Holds, ...] = ("whole",) if s.sharding == "zero3" else ()
    own = Stage("generate", "actor", rows=s.rows, holds=gathered)
    return replace(plan, stages=(own, *plan.stages), notes=(*plan.notes, GENERATES))


def likelihood(s: Scenario, usual: Path) -> Path:
    """The loss path of log-probabilities with the chosen half's cross entropy beside them: ORPO's, and CPO's.

    One row without its last position is contiguous, several are copied.
    """
    return replace(usual, nll=0.5, shift_copy=s.micro_batch > 1)


def saving(s: Scenario) -> Stage:
    """The checkpoint of RL.

    Below stage 3 every rank copies the state dict to the host (accelerate accelerator.py:3926), else the first alone.
    """
    every = s.sharding in ("zero1", "zero2")
    return Stage("save", "actor", holds=HANDED.get(s.sharding, ()), host="every" if every else "first",
                 host_bytes=2 if s.layout in ("mixed", "bf16") else 4)  # fmt: skip


def notes(s: Scenario) -> tuple[str, ...]:
    """Notes on what no field of a scenario says: none."""
    return ()
