"""OpenRLHF on DeepSpeed, by version: its releases, what all its trainers share, and `train_{sft,rm,dpo}.py`.

`calc.frameworks.openrlhf.rl` adds RL. Read in the packages and tags v0.3.0 to v0.11.2. Files are those of the release
named: `cli/train_sft.py` stands for `openrlhf/cli/train_sft.py` (before 0.3.6 `examples/train_sft.py`). Every release
is known that changed a default, a pinned library, the way from logits to a loss, or the course of an RL step; one in
between behaves as the one before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from calc.base.optimizers import OPTIMIZERS
from calc.base.plan import DeepSpeed, Exchange, Held, Keeps, LossKind, Path, Role, supervised
from calc.base.refusal import Refusal
from calc.base.versions import at_least
from calc.base.versions import nearest as _nearest
from calc.frameworks.base import Choices, as_published
from calc.frameworks.constraints import (
    context_fault,
    cut_alike,
    fsdp_fault,
    trainer_fault,
    unmodelled,
    whole_layers,
    whole_sequences,
    zero_fault,
)
from calc.frameworks.openrlhf import rl
from calc.frameworks.openrlhf.releases import ADAPTERS, DEFAULTS, RELEASES, SUPERVISED
from calc.frameworks.releases import NOTHING, pinned, stated
from calc.scenario.scenario import Scenario
from calc.scenario.words import DEEPSPEED

KNOWN: tuple[str, ...] = tuple(RELEASES)
# OpenRLHF cuts packed sequences only
CHOICES = Choices(weights_stay=True, shared="context_parallel", cuts=lambda job, rung: bool(job.get("packing")))

# The first release with --ring_attn_size, by task: ring_flash_attn's llama3 variant (utils/deepspeed/deepspeed.py,
# substitute_hf_flash_attn)
RINGS = {"dpo": "0.4.3", "rm": "0.4.4", "sft": "0.5.4", "pretrain": "0.5.4"}
EXCHANGE: Exchange = "all-gather"
TASKS = ("pretrain", "sft", "rm", "dpo", *rl.TASKS)

modelled = as_published


def nearest(version: str) -> str:
    """The known version whose memory behaviour `version` shares.

    `0.6` means 0.6.1, its last release with both trainers, `train_ppo.py` and `train_ppo_ray.py`.
    """
    return "0.6.1" if version == "0.6" else _nearest(version, KNOWN)


def defaults(task: str, version: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The command line's defaults for `task`, by dotted key; `given` is what the user set."""
    pins = pinned(RELEASES[version])
    adapters, of_rl = given.get("method", "full") != "full", task in rl.TASKS
    values = stated(task, version, DEFAULTS, ADAPTERS if adapters else NOTHING) | pins
    if given.get("sharding", values["sharding"]) not in DEEPSPEED:
        values["grad_dtype"] = "fp32"  # without ZeRO (runtime/engine.py:1017-1021 of 0.16.4)
    if given.get("packing"):
        values["attention"] = "flash"  # asserted until 0.5 (models/actor.py:111 of 0.3.8), forced later
    if adapters:
        values["lora.dtype"] = _adapter(given, pins["versions.deepspeed"])
    if of_rl:
        return values | rl.defaults(task, version, given)
    del values["versions.vllm"]  # nothing is generated
    return values | stated(task, version, SUPERVISED)


def _adapter(given: Mapping[str, Any], pin: str) -> str:
    """The type of adapters: PEFT makes them fp32; DeepSpeed casts the module to bf16, from 0.19.2 on not under ZeRO-3.

    runtime/engine.py:1232 of 0.16.4 (`self.module.bfloat16()`), :1496-1504 of 0.19.5 (`not is_zero_init_model`).
    """
    deepspeed = str(given.get("versions.deepspeed", pin))
    return "fp32" if given.get("sharding") == "zero3" and at_least(deepspeed, "0.19.2") else "bf16"


def refuse(s: Scenario) -> Refusal | None:
    """The reason why OpenRLHF cannot run `s`, in one line, or None."""
    version, method = s.framework_version, s.method
    if reason := trainer_fault(s) or zero_fault(s) or unmodelled(s):
        return reason
    if s.task not in TASKS:
        return Refusal("task", repr(s.task), ", ".join(TASKS), "with openrlhf")
    if reason := whole_layers(s, "DeepSpeed's AutoTP is not modelled") or _ring(s) or cut_alike(s) or fsdp_fault(s):
        return reason
    if s.sharding not in (*DEEPSPEED, "none", "ddp"):
        allowed = f"{', '.join(DEEPSPEED)}, or none and ddp for zero_stage 0"
        return Refusal("sharding", repr(s.sharding), allowed, "with openrlhf, which trains on DeepSpeed")
    if s.precision != "mixed":
        return Refusal("precision", repr(s.precision), "mixed, as DeepSpeed keeps fp32 master weights", "with openrlhf")
    if not OPTIMIZERS[s.optimizer].spelled.openrlhf:  # muon, since 0.10.4, is no value here
        allowed = ", ".join(name for name, facts in OPTIMIZERS.items() if facts.spelled.openrlhf)
        return Refusal("optimizer", repr(s.optimizer), allowed, "with openrlhf")
    if s.offload.parameters:
        return Refusal("offload.parameters", "true", "false for the trained model", "with openrlhf")
    if s.sharding in ("none", "ddp"):
        if s.offload.optimizer:
            return Refusal("offload.optimizer", f"true with sharding {s.sharding}", f"with {', '.join(DEEPSPEED)}")
        if s.grad_dtype != "fp32":  # deepspeed runtime/engine.py:1333-1343 of 0.16.4
            return Refusal("grad_dtype", f"{s.grad_dtype!r} with sharding {s.sharding}", "fp32, DeepSpeed demands it")
    if not s.double_quantization:  # bnb_4bit_use_double_quant=True (models/actor.py:59 of 0.3.8)
        return Refusal("double_quantization", "false", "true", "with openrlhf")
    if s.checkpointing == "selective":
        return Refusal("checkpointing", "'selective'", "none, full", "with openrlhf")
    if s.loss != "full":
        return Refusal("loss", repr(s.loss), "full", "with openrlhf")
    if fault := _liger(s):
        return fault
    if s.images and s.task not in rl.TASKS:  # datasets/{sft,reward}_dataset.py of 0.11.2 have text alone
        return Refusal("images", f"{s.images.size!r} for {s.task}", "none", f"with openrlhf {version}")
    if method == "qlora" and s.sharding == "zero3":  # zero.Init skips 4-bit models: modeling_utils.py:3760 of 4.43.1
        return Refusal("sharding", "'zero3' with method qlora", "zero1, zero2; 4-bit weights are not partitioned")
    frozen = s.task == "dpo" or s.has("reference") or s.has("reward")
    if method == "qlora" and frozen and not at_least(s.versions["transformers"], "4.45"):
        # the reference is a bare 4-bit model, and its .to() raises: modeling_utils.py:2820-2829 of 4.43.1
        return Refusal("method", f"'qlora' for {s.task}", "full, lora; this Transformers cannot move a 4-bit model")
    packs = "0.3.7" if s.task in ("rm", "dpo") else "0.3.4"
    if s.packing and not at_least(version, packs):
        return Refusal("packing", "true", f"false; packing for {s.task} came with {packs}", f"with openrlhf {version}")
    if s.packing and s.attention != "flash":  # asserted until 0.5 (models/actor.py:111 of 0.3.8), forced later
        return Refusal("packing", f"true with attention {s.attention!r}", "with flash")
    return rl.refuse(s) if s.task in rl.TASKS else None


def _ring(s: Scenario) -> Refusal | None:
    """The reason why ring attention cannot run, in one line; None if it can or is not asked for."""
    first = RINGS.get(s.task)
    if first is None:
        return whole_sequences(s, f"its ring attention is modelled for {', '.join(RINGS)}")
    if not at_least(s.framework_version, first):
        return whole_sequences(s, f"ring attention for {s.task} came with {first}")
    return context_fault(s)


def threads(s: Scenario) -> int | None:
    """One under Ray; DeepSpeed's launcher leaves threads alone without `--bind_cores_to_rank`.

    An actor has the CPUs that it asks for, at least one (ray 2.60 `_private/utils.py:235`,
    `set_omp_num_threads_if_unset`); OpenRLHF's asks for as many as GPUs. deepspeed 0.19.8 `launcher/launch.py:219`.
    """
    return 1 if s.task in rl.TASKS else None


def keeps(s: Scenario) -> Keeps:
    """The plan of this release's trainers: roles with their loss paths, DeepSpeed's buffers, for RL a step's stages.

    A reference has weights of its own, with adapters too.
    """
    deepspeed = DeepSpeed(s.versions["deepspeed"])

    def path(rows: int) -> Path:
        """The loss path for the logits of `rows` sequences: the release's own unless `logprob` asks for another."""
        found = loss_path(s.task, s.framework_version, one_row=s.packing or rows == 1)
        if s.task not in ("dpo", *rl.TASKS) or s.logprob == stated(s.task, s.framework_version, DEFAULTS)["logprob"]:
            return found
        kind = "log-softmax" if s.logprob == "log-softmax-fp32" else s.logprob
        return Path(kind, head_fp32=s.logprob == "log-softmax-fp32", held=found.held)

    if s.task in rl.TASKS:
        found = rl.keeps(s, path, deepspeed)
    else:
        own = path(s.rows)
        # train_dpo passes `use_liger_kernel` to the trained model alone (cli/train_dpo.py:32 of 0.8.7)
        frozen = Role("reference", own, own, s.rows, s.rows, exchange=EXCHANGE, patched=False)
        reference = frozen if s.has("reference") else None
        trained = "reward" if s.task == "rm" else "actor"
        found = supervised(trained, own, s.rows, scored=reference, exchange=EXCHANGE, deepspeed=deepspeed)
    return replace(found, notes=(*found.notes, *_in_vain(s)))


def _liger(s: Scenario) -> Refusal | None:
    """The reason why Liger's kernels cannot run the model: `use_liger_kernel` is of `Actor` alone, since 0.6.2."""
    if s.kernels == "eager":
        return None
    version = s.framework_version
    if not at_least(version, "0.6.2"):
        return Refusal("kernels", "'liger'", "eager; it came with 0.6.2", f"with openrlhf {version}")
    if s.task == "rm":
        return Refusal("kernels", "'liger' for rm", "eager; it has no switch for it", "with openrlhf")
    if s.images:  # models/actor.py:130 of 0.11.2
        return Refusal("kernels", "'liger' with images", "eager; it raises", "with openrlhf")
    return None


def _in_vain(s: Scenario) -> list[str]:
    """Notes on frozen models whose offload has no effect: below ZeRO-3 they run at stage 0, which reads no offload.

    `get_ds_eval_config`: utils/deepspeed.py:222 of 0.3.8, utils/deepspeed/deepspeed.py:489 of 0.11.0.
    """
    frozen = {name: own for name in ("reference", "reward") if name in s.roles and (own := s.role(name))}
    return [
        f"roles.{name}.offload.parameters has no effect with sharding {s.sharding}: the weights stay on the GPU"
        for name, own in frozen.items()
        if own.offload.parameters and s.sharding != "zero3"
    ]


def loss_path(task: str, version: str, *, one_row: bool) -> Path:
    """The loss path, by release; `one_row`: one sequence, or several packed, whose slices need no copy.

    models/actor.py, models/loss.py, models/utils.py and trainer/{sft,dpo,ppo}_trainer.py of each release. The sft
    trainer keeps `output` in a variable of its loop, into the next forward; RL's `training_step` keeps it to its own
    end, beyond the optimizer step (trainer/ppo_trainer.py:273-316 of 0.3.8); the dpo trainer does not keep it.
    """
    if task == "rm":
        return Path("scalar")
    # until 0.4.5 Transformers itself returned fp32 logits, since 0.5.6 Actor.forward casts them
    fp32 = not at_least(version, "0.4.6") or at_least(version, "0.5.6")
    if task in ("dpo", *rl.TASKS):
        held: Held = "forward" if task == "dpo" else "step"
        if at_least(version, "0.7.0"):
            return Path("flash", head_fp32=True, held=held)
        if at_least(version, "0.6.2"):
            return Path("flash", head_fp32=True, cut="slice" if one_row else "", shift_copy=not one_row, held=held)
        if at_least(version, "0.5.8"):
            return Path("logsumexp" if one_row else "rows", head_fp32=True, held=held)
        return Path("log-softmax", head_fp32=fp32, shift_copy=not one_row, held=held)
    if at_least(version, "0.7.0"):
        return Path("flash", head_fp32=True, held="next")
    kind: LossKind = "cross-entropy" if fp32 else "log-softmax"
    return Path(kind, head_fp32=fp32, shift_copy=not one_row, held="next")
