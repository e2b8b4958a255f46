"""ms-swift's GRPOTrainer, `swift rlhf --rlhf_type grpo`: its loop of generation, scores and updates, by release.

Read in the packages ms-swift 3.5.0 to 4.6.0. Files are those of 4.6.0 (`swift/`) unless a release is named; 3.12 has
them in `swift/trainers/rlhf_trainer/`, and until 3.9 the rollout's part is in `grpo_trainer.py`, too. It subclasses
TRL's trainer, but has its own generation, scores and loss. No entropy is computed unless `log_entropy` or
`top_entropy_quantile` ask for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import lcm
from typing import Any

from calc.base.plan import Component, DeepSpeed, Holds, Keeps, Path, Role, Serving, Stage
from calc.base.refusal import Refusal
from calc.base.versions import at_least
from calc.frameworks import trainer
from calc.frameworks.constraints import segments_fault
from calc.frameworks.releases import Default, Table, stated
from calc.scenario.scenario import Scenario
from calc.scenario.words import DEEPSPEED

FIRST = "3.9.0"
OLDEST = "3.5"  # of the loop that is modelled: before, some ranks alone had an engine (`num_infer_workers`)
VLLM: Mapping[str, str] = {FIRST: "0.11.0", "4.6.0": "0.31.0"}  # the newest of the day of a release that was read
APART = "3.6"  # the first release that wakes vLLM's weights and its cache one after the other
SEGMENTS = "3.9"  # the first that switches expandable segments off while vLLM has the card
GROUPS = "3.10"  # the first that hands whole models on in groups, where they went parameter by parameter
EVERY = ("3.12", "3.12.6")  # releases from the first, before the second, gather all parameters for each group
SHARDS = "3.12.3"  # the first that moves ZeRO-3's shards, and the states of an optimizer without parameters
PICKS, PICKED = "3.7", "4.55"  # the first that asks models that read images, and Transformers that has them answer
DIVIDES, LOCAL = "4.2", "4.4"  # the first whose own forward divides in place, and the first that has no other

DEFAULTS = Table(
    Default(
        "prompt_len", FIRST, 512, "max_length None: prompts are as long as the data's (base_args/template_args.py)"
    ),
    Default("response_len", FIRST, 512, "max_completion_length (arguments/rlhf_args.py:242)"),
    Default("rollout.engine", FIRST, "hf", "use_vllm false (rlhf_trainers/args_mixin.py:169)"),
    Default("rollout.tensor_parallel", FIRST, 1, "vllm_tensor_parallel_size (rlhf_trainers/args_mixin.py:38)"),
    Default(
        "rollout.gpu_memory_utilization", FIRST, 0.9, "vllm_gpu_memory_utilization (rlhf_trainers/args_mixin.py:37)"
    ),
    Default("rollout.max_model_len", FIRST, None, "vllm_max_model_len (rlhf_trainers/args_mixin.py:42)"),
    Default("rollout.n", FIRST, 8, "num_generations (arguments/rlhf_args.py:164)"),
    Default("rollout.sleep", FIRST, False, "sleep_level 0 (rlhf_trainers/args_mixin.py:188)"),
    Default("rollout.offload_model", FIRST, False, "offload_model (rlhf_trainers/args_mixin.py:191)"),
    Default("rollout.offload_optimizer", FIRST, False, "offload_optimizer (rlhf_trainers/args_mixin.py:190)"),
    Default("rollout.move_model_batches", FIRST, None, "move_model_batches (rlhf_trainers/args_mixin.py:189)"),
    Default("roles.reward", FIRST, "none", "functions score (reward_funcs)"),
)


def habits(version: str, given: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The defaults of GRPO alone; a generation is of one optimizer step's completions, at least `step` of them.

    n must divide them (rlhf_trainers/args_mixin.py:225).
    """
    values = stated("grpo", version, DEFAULTS)
    n = int(given.get("rollout.n", values["rollout.n"]))
    micro_batch = int(given.get("micro_batch", 1))
    least = lcm(micro_batch * trainer.trainers(given), n)
    completions = int(given.get("global_batch", least * -(-step // least)))
    batch = {"global_batch": completions, "rollout.batch": max(1, completions // n)}
    return {**values, **batch, "versions.vllm": VLLM[version]}


def refuse(s: Scenario) -> Refusal | None:
    """The reason why ms-swift cannot run `s`, or is not modelled so, in one line, or None."""
    assert s.rollout
    version = s.versions["ms-swift"]
    if not at_least(version, OLDEST):
        return Refusal("versions.ms-swift", version, f"at least {OLDEST}; not modelled")
    if not s.has("actor"):
        return Refusal("roles.actor", "'none'", "the policy, which it trains", "with ms-swift")
    if s.rollout.engine == "none":
        return Refusal("rollout.engine", "'none'", "hf, vllm", "with ms-swift")
    if s.rollout.n < 2:  # arguments/rlhf_args.py:409
        return Refusal("rollout.n", s.rollout.n, "at least 2", "with ms-swift")
    if s.rollout.micro_batch:
        return Refusal("rollout.micro_batch", s.rollout.micro_batch, "null; it has no such setting", "with ms-swift")
    barred = {
        "method": ("'qlora'", "full, lora", s.method == "qlora"),
        "sharding": (repr(s.sharding), f"none, ddp, {', '.join(DEEPSPEED)}", s.sharded.family == "fsdp"),
        "roles.reward": ("{}", "none", s.has("reward")),
        "packing": ("true", "false", s.packing),
        "padding_free": ("true", "false", s.padding_free),
        "loss": (repr(s.loss), "full", s.loss != "full"),
        "logprob": (repr(s.logprob), "selective", s.logprob != "selective"),
    }
    for field, (asked, allowed, applies) in barred.items():
        if applies:
            return Refusal(field, asked, f"{allowed}; not modelled", "with trainer ms-swift for grpo")
    if fault := None if at_least(version, SEGMENTS) else segments_fault(s):
        return fault
    return _batch_fault(s) or _placement_fault(s) or _offload_fault(s)


def _batch_fault(s: Scenario) -> Refusal | None:
    """The reason why completions do not divide into micro batches, in one line, or None."""
    assert s.rollout
    step = s.micro_batch * s.gpus_of(s.group("actor"))
    if s.rollout.batch * s.rollout.n % step == 0:
        return None
    given = f"{s.rollout.batch} with rollout.n = {s.rollout.n}"
    return Refusal(
        "rollout.batch", given, f"completions that are a multiple of micro_batch x GPUs of the actor = {step}"
    )


def _placement_fault(s: Scenario) -> Refusal | None:
    """The reason why engine or reference cannot be where `s` has them, in one line, or None."""
    assert s.rollout
    own = s.role("reference")
    if own and own.model != s.model:
        return Refusal("roles.reference.model", repr(own.model), f"{s.model}, the policy's own; not modelled")
    if s.placement != "separate":
        return None
    if s.rollout.engine != "vllm":
        return Refusal("placement", f"'separate' with rollout.engine {s.rollout.engine!r}", "with vllm, as a server")
    if own and "gpus" in s.roles["reference"]:
        return Refusal(
            "roles.reference.gpus", "for a role of the trainer", "none, it shares the actor's", "with ms-swift"
        )
    return None


def _offload_fault(s: Scenario) -> Refusal | None:
    """The reason why weights or states cannot wait on the host while vLLM generates, in one line, or None.

    Under ZeRO 1 and 2 parameters are views of a flat tensor, which stays; what comes back lies beside it until the step
    (deepspeed 0.19 `runtime/zero/stage_1_and_2.py`, `_update_model_bit16_weights`).
    """
    assert s.rollout
    asked = {"offload_model": s.rollout.offload_model, "offload_optimizer": s.rollout.offload_optimizer}
    for name in (name for name, on in asked.items() if on):
        if s.rollout.engine != "vllm":
            return Refusal(f"rollout.{name}", f"true with engine {s.rollout.engine!r}", "with vllm")
        if s.placement == "separate":
            return Refusal(f"rollout.{name}", "true with placement 'separate'", "false")
        version = s.versions["ms-swift"]
        if not at_least(version, APART) and s.sharding != "zero3":
            return Refusal(f"rollout.{name}", f"true with ms-swift {version}", "false; not modelled")
    if s.rollout.offload_model and s.sharding in ("zero1", "zero2") and not s.lora:
        return Refusal("rollout.offload_model", f"true with sharding {s.sharding}", "false; not modelled")
    return None


def path(s: Scenario, usual: Path) -> Path:
    """The path of `usual` log-probabilities, for completions alone, which `logits_to_keep` asks a model for.

    The logits are divided by a temperature, in a copy (`_get_per_token_logps`, 3.5.0 and since), which is TRL's where
    the model reads no images (trl 0.16 to 0.29 `trainer/grpo_trainer.py`), or in place of what the model returned
    (`_get_logps_via_local_forward`, rlhf_trainers/grpo_trainer.py:1581). A model that reads images makes the logits of
    prompts, too, unless its forward takes `logits_to_keep`, as Qwen2.5-VL's does since Transformers 4.55.
    """
    version, sees = s.versions["ms-swift"], s.architecture.vision is not None
    picked = not sees or (at_least(version, PICKS) and at_least(s.versions["transformers"], PICKED))
    own = at_least(version, DIVIDES if sees else LOCAL)
    return replace(trainer.selective(usual), picked=picked, scaled="view" if own else "copy")


def plan(s: Scenario, way: Path, deepspeed: DeepSpeed | None) -> Keeps:
    """The plan of a step: sync, rollout, scores, update, checkpoint, of roles in the order in which they load.

    Policy and reference are there before the trainer, which starts vLLM (`prepare_rollout`). The policy scores its own
    responses only where these are of several steps (`old_policy`); the reference does before any update
    (`_prepare_batch_inputs`).
    """
    assert s.rollout
    rows = s.rows
    keeps = trainer.keeps(s, placed=True)
    actor = Role("actor", way, way, rows, rows, away=away(s, flat=not s.lora),
                 groups=s.rollout.move_model_batches or 1, **keeps)  # fmt: skip
    others = [reference(s, way)] if s.has("reference") else []
    completions = s.rollout.batch * s.rollout.n // s.gpus_of(s.group("actor"))  # of one GPU
    vllm = s.rollout.engine == "vllm"
    if vllm:
        apart = at_least(s.versions["ms-swift"], APART)
        made = [
            Stage("sync", "actor", engine="weights" if apart else "all", holds=handed(s)),
            Stage("serve", "rollout", away=s.rollout.offload_model or s.rollout.offload_optimizer),
        ]
    else:
        # ds3_gather_for_generation true (trainers/arguments.py): ZeRO-3 gathers every weight
        gathered: tuple[Holds, ...] = ("whole",) if s.sharding == "zero3" else ()
        made = [Stage("generate", "actor", rows=completions, holds=gathered)]
    old = ["actor"] if s.rollout.batch * s.rollout.n > s.global_batch else []
    scores = [Stage("score", name) for name in (*old, *(role.name for role in others))]
    loading = ("actor", *(role.name for role in others if not role.shares), *(["rollout"] if vllm else []))
    return Keeps(
        roles=(actor, *others),
        stages=(*made, *scores, Stage("train", "actor"), trainer.saving(s)),
        loading=loading,
        serving=serving(s, completions) if vllm else None,
        deepspeed=deepspeed,
    )


def reference(s: Scenario, way: Path) -> Role:
    """The reference: the policy without its adapters, or a frozen model, prepared like it (rlhf_mixin.py)."""
    own = s.role("reference")
    assert own
    return Role("reference", way, way, s.rows, s.rows, shares=bool(s.lora), wrapped=trainer.wrapped(own),
                away=away(own, flat=False, frozen=True), loads=trainer.loads(own, placed=True))  # fmt: skip


def away(s: Scenario, *, flat: bool, frozen: bool = False) -> frozenset[Component]:
    """The components that wait on the host while vLLM generates; `flat`: DeepSpeed has all weights in a flat buffer.

    `offload_model` moves what `param.data` refers to, which under ZeRO-3 is empty until `SHARDS`; from then on shards,
    but those of trained parameters are parts of a buffer to which the engine refers, and which stays (deepspeed 0.19
    `runtime/zero/stage3.py:811`, `lp_param_buffer`). `offload_optimizer` moves the states of parameters that are in the
    groups of the optimizer, of which ZeRO-3 leaves none there between steps (:1100); from `SHARDS` on all states, but
    no master weights (rlhf_trainers/rollout_mixin.py:1415-1477).
    """
    assert s.rollout
    found: set[Component] = set()
    if s.sharding == "zero3" and not at_least(s.versions["ms-swift"], SHARDS):
        return frozenset()
    if s.rollout.offload_model and not (flat and s.sharding in DEEPSPEED):
        found.add("weights")
        if s.sharding not in DEEPSPEED:
            found.add("adapter")
    if s.rollout.offload_optimizer and not frozen:
        found.add("optimizer_states")
    return frozenset(found)


def handed(s: Scenario) -> tuple[Holds, ...]:
    """The weights that ZeRO-3 gathers to hand them to vLLM (`_move_full_model_to_vllm`).

    Parameter by parameter until `GROUPS`, unless adapters are merged; in groups of layers, all of them being one unless
    `move_model_batches` asks for others.
    """
    assert s.rollout
    version = s.versions["ms-swift"]
    if s.sharding != "zero3":
        return ()
    if not (s.lora or at_least(version, GROUPS)):
        return ("parameter",)
    first, end = EVERY
    every = at_least(version, first) and not at_least(version, end)
    return ("group",) if s.rollout.move_model_batches and not every else ("whole",)


def serving(s: Scenario, completions: int) -> Serving:
    """vLLM in the trainer's own process (`_prepare_vllm_engine`), or `swift rollout` on GPUs of its own.

    It starts in the trainer's `__init__`, DeepSpeed and the optimizer in `train` (transformers 5.19 `trainer.py`,
    `_inner_training_loop`). Sleep is that of `sleep_level` 1. A server has `vllm_max_num_seqs`, 256
    (rlhf_trainers/args_mixin.py:41).
    """
    assert s.rollout
    release, length = s.versions["vllm"], s.rollout.max_model_len or s.architecture.max_positions
    if s.placement == "separate":
        return Serving(release, length, max_num_seqs=256)
    seqs = completions * s.rollout.tensor_parallel
    return Serving(release, length, max_num_seqs=seqs, process="trainer", early=True)
