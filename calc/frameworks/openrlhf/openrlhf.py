"""OpenRLHF on DeepSpeed, by version: its releases, what all its trainers share, and `train_{sft,rm,dpo}.py`.

`calc.frameworks.openrlhf.rl` adds RL. Read in the packages and tags v0.3.0 to v0.11.2. Files are those of the release
named: `cli/train_sft.py` stands for `openrlhf/cli/train_sft.py` (before 0.3.6 `examples/train_sft.py`). Every release
is known that changed a default, a pinned library, the way from logits to a loss, or the course of an RL step; one in
between behaves as the one before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from calc.base.optimizers import OPTIMIZERS
from calc.base.plan import DeepSpeed, Exchange, Held, Keeps, LossKind, Path, Role, supervised
from calc.base.versions import at_least
from calc.base.versions import nearest as _nearest
from calc.frameworks.base import Choices, as_published
from calc.frameworks.constraints import (
    context_fault,
    cut_alike,
    fsdp_fault,
    linear_fault,
    trainer_fault,
    whole_layers,
    whole_sequences,
)
from calc.frameworks.openrlhf import rl
from calc.scenario.scenario import Scenario
from calc.scenario.words import DEEPSPEED


class Pins(NamedTuple):
    """The libraries that a release pins: in requirements.txt, and vLLM in an extra of setup.py; torch is never pinned.

    Before 0.3.6 vLLM is a comment in requirements.txt.
    """

    deepspeed: str
    transformers: str
    flash_attn: str
    vllm: str


RELEASES: Mapping[str, Pins] = {
    "0.3.0": Pins("0.13.5", "4.40.0", "2.5.8", "0.4.2"),
    "0.3.1": Pins("0.13.5", "4.41.0", "2.5.8", "0.4.2"),
    "0.3.4": Pins("0.13.5", "4.41.0", "2.5.8", "0.4.2"),  # packing
    "0.3.6": Pins("0.14.4", "4.42.4", "2.6.1", "0.4.2"),  # sft 2048 tokens, rm micro batch 1
    "0.3.7": Pins("0.14.4", "4.42.4", "2.6.1", "0.4.2"),  # packing for rm and dpo
    "0.3.8": Pins("0.14.4", "4.43.1", "2.6.1", "0.4.2"),
    "0.4.0": Pins("0.14.4", "4.43.3", "2.6.1", "0.4.2"),
    "0.4.3": Pins("0.15.0", "4.44.2", "2.6.1", "0.4.2"),
    "0.4.4": Pins("0.15.0", "4.44.2", "2.6.1", "0.4.2"),  # no log-softmax thrown away
    "0.4.5": Pins("0.15.0", "4.44.2", "2.6.1", "0.4.2"),  # several samples per prompt
    "0.4.6": Pins("0.15.0", "4.46.1", "2.6.1", "0.4.2"),  # Transformers' logits stay bf16
    "0.5.1": Pins("0.15.0", "4.46.1", "2.6.1", "0.4.2"),  # reinforce
    "0.5.2": Pins("0.15.0", "4.46.3", "2.6.1", "0.4.2"),
    "0.5.3": Pins("0.15.0", "4.46.3", "2.7.0.post2", "0.6.4.post1"),
    "0.5.4": Pins("0.15.0", "4.46.3", "2.7.0.post2", "0.6.4.post1"),  # gradients accumulate in DeepSpeed's type, bf16
    "0.5.5": Pins("0.15.0", "4.47.1", "2.7.0.post2", "0.6.5"),
    "0.5.6": Pins("0.15.0", "4.46.3", "2.7.0.post2", "0.6.5"),  # logits cast to fp32 in Actor.forward
    "0.5.8": Pins("0.16.3", "4.48.2", "2.7.0.post2", "0.7.2"),  # gather minus logsumexp, row by row
    "0.5.9": Pins("0.16.3", "4.48.2", "2.7.0.post2", "0.7.2"),  # weights to vLLM by CUDA IPC
    "0.6.0": Pins("0.16.3", "4.48.3", "2.7.0.post2", "0.7.2"),  # group_norm; a reference only with a KL coefficient
    "0.6.1": Pins("0.16.4", "4.48.3", "2.7.0.post2", "0.7.2"),  # optimizer states can sleep
    "0.6.2": Pins("0.16.4", "4.48.3", "2.7.0.post2", "0.7.2"),  # flash-attn's cross entropy for log-probs
    "0.6.3": Pins("0.16.4", "4.50.0", "2.7.4.post1", "0.8.1"),
    "0.6.4": Pins("0.16.5", "4.50.0", "2.7.4.post1", "0.8.2"),  # vLLM's share 0.95
    "0.7.0": Pins("0.16.5", "4.50.0", "2.7.4.post1", "0.8.3"),  # sft by log-probs too; no slice of the logits
    "0.7.1": Pins("0.16.6", "4.51.3", "2.7.4.post1", "0.8.3"),  # no generation by Transformers
    "0.7.3": Pins("0.16.7", "4.51.3", "2.7.4.post1", "0.8.3"),  # the reward model scores first
    "0.7.5": Pins("0.16.7", "4.51.3", "2.7.4.post1", "0.8.5.post1"),  # every rank copies the weights that it saves
    "0.8.0": Pins("0.16.7", "4.51.3", "2.7.4.post1", "0.8.5.post1"),  # asynchronous training
    "0.8.1": Pins("0.16.8", "4.51.3", "2.7.4.post1", "0.8.5.post1"),
    "0.8.2": Pins("0.16.9", "4.52.3", "2.7.4.post1", "0.8.5.post1"),
    "0.8.3": Pins("0.17.0", "4.52.3", "2.7.4.post1", "0.8.5.post1"),
    "0.8.4": Pins("0.17.1", "4.52.3", "2.7.4.post1", "0.9.0.1"),
    "0.8.5": Pins("0.17.1", "4.52.4", "2.8.0.post2", "0.9.1"),
    "0.8.6": Pins("0.17.2", "4.53.1", "2.8.0.post2", "0.9.2"),
    "0.8.8": Pins("0.17.3", "4.54.1", "2.8.2", "0.10.0"),
    "0.8.9": Pins("0.17.4", "4.54.1", "2.8.2", "0.10.0"),
    "0.8.10": Pins("0.17.5", "4.55.2", "2.8.3", "0.10.1.1"),  # attn_implementation, FlashAttention-2 by default
    "0.8.11": Pins("0.17.6", "4.56.1", "2.8.3", "0.10.2"),
    "0.9.0": Pins("0.18.1", "4.57.0", "2.8.3", "0.11.0"),
    "0.9.1": Pins("0.18.3", "4.57.3", "2.8.3", "0.13.0"),  # actor and critic train at once
    "0.9.2": Pins("0.18.3", "4.57.3", "2.8.3", "0.13.0"),  # vLLM's weights alone wake for new ones
    "0.9.3": Pins("0.18.5", "4.57.6", "2.8.3", "0.15.0"),
    "0.9.5": Pins("0.18.7", "5.3.0", "2.8.3", "0.17.0"),
    "0.9.6": Pins("0.18.8", "5.3.0", "2.8.3", "0.17.1"),
    "0.9.7": Pins("0.18.8", "5.3.0", "2.8.3", "0.18.0"),
    "0.9.8": Pins("0.18.8", "5.3.0", "2.8.3", "0.18.0"),  # max_len for prompt and response together
    "0.9.10": Pins("0.18.9", "5.5.0", "2.8.3", "0.19.0"),
    "0.10.0": Pins("0.18.9", "5.5.3", "2.8.3", "0.19.0"),  # RL micro batch 1
    "0.10.2": Pins("0.18.9", "5.5.4", "2.8.3", "0.19.1"),
    "0.10.3": Pins("0.18.9", "5.7.0", "2.8.3", "0.19.1"),
    "0.10.4": Pins("0.19.1", "5.7.0", "2.8.3", "0.22.1"),
    "0.11.0": Pins("0.19.5", "5.15.0", "2.8.3", "0.27.1"),
    "0.11.2": Pins("0.19.6", "5.15.0", "2.8.3", "0.29.0"),
}
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
    pins = RELEASES[version]
    grown = at_least(version, "0.3.6")
    sft = task in ("pretrain", "sft")  # pretraining is train_sft.py --pretrain_mode, with the same defaults
    values: dict[str, Any] = {
        # 8 in train_sft.py:147 and train_dpo.py:153 (0.3.8), train.micro_batch_size :166 and :188 (0.11.0);
        # 1 in train_rm.py:169 (0.3.8) and :246 (0.11.0), 8 before 0.3.6 (examples/train_rm.py:130 of 0.3.1)
        "micro_batch": 1 if task == "rm" and grown else 8,
        # train_sft.py:148, train_rm.py:170, train_dpo.py:154 (0.3.8); :167, :247, :189 (0.11.0)
        "global_batch": 128,
        # ds.param_dtype bf16 (train_sft.py:179-185, 0.11.0). Until 0.9.1 a flag, --bf16, off (train_sft.py:154, 0.3.8):
        # every example script sets it, and DeepSpeed then keeps fp32 master weights beside bf16 ones.
        "precision": "mixed",
        "sharding": "zero2",  # train_sft.py:153 (0.3.8), :163 (0.6.1), :178 (0.11.0), on one GPU too
        "optimizer": "adamw",  # utils/deepspeed.py:89 (0.3.8); "AdamW" in DeepSpeed's config, deepspeed.py:359 (0.11.0)
        "optimizer_impl": "fused",  # FusedAdam, or DeepSpeedCPUAdam with adam_offload: neither has temporaries
        "offload.optimizer": False,  # --adam_offload, train_sft.py:156 (0.3.8), :187 (0.11.0)
        "offload.parameters": False,  # never for a trained model: get_train_ds_config(offload=False)
        # utils/deepspeed_utils.py:56 (0.3.8): None becomes fp32; since 0.5.4 None reaches DeepSpeed, which takes bf16
        # under ZeRO (runtime/engine.py:1017-1021 of 0.16.4) and fp32 without it
        "grad_dtype": "bf16" if at_least(version, "0.5.4") and given.get("sharding", "zero2") in DEEPSPEED else "fp32",
        "checkpointing": "none",  # --gradient_checkpointing, train_sft.py:150 (0.3.8), :168 (0.11.0)
        # eager unless --flash_attn (models/actor.py:45, model.py:60 of 0.3.8); train_sft.py:188-193 (0.11.0)
        "attention": "flash" if at_least(version, "0.8.10") or given.get("packing") else "eager",
        "loss": "full",  # Liger's fused loss is never reached: the model gets no labels (models/actor.py:265, 0.11.0)
        # trainer/dpo_trainer.py log_softmax until 0.5.7, log_probs_from_logits (models/utils.py:91-106, 0.6.1) since
        "logprob": _logprob(version),
        "packing": False,  # train_sft.py:181 (0.3.8), :264 (0.11.0)
        "versions.deepspeed": pins.deepspeed,
        "versions.transformers": pins.transformers,
        "versions.flash-attn": pins.flash_attn.partition(".post")[0],
    }
    if task in rl.TASKS:
        values |= rl.defaults(task, version, given) | {"versions.vllm": pins.vllm.partition(".post")[0]}
    else:
        # train_sft.py:197, train_rm.py:192, train_dpo.py:210 (0.3.8); :284, :298, :318 (0.11.0); sft 512 before 0.3.6
        values["seq_len"] = 2048 if sft and grown else 512
    if given.get("method", "full") != "full":
        values |= {
            "lora.rank": 64,  # the flag's default is 0, no adapter (train_sft.py:175); the example scripts set 64
            "lora.targets": "all-linear",  # train_sft.py:177 (0.3.8), :260 (0.11.0)
            "lora.dropout": 0,  # train_sft.py:178 (0.3.8), :261 (0.11.0)
            "lora.units": "own",
            "lora.dtype": _adapter(given, pins),
        }
    return values


def _logprob(version: str) -> str:
    """The way in which a release turns logits into log-probabilities."""
    return "logsumexp" if at_least(version, "0.5.8") else "log-softmax-fp32"


def _adapter(given: Mapping[str, Any], pins: Pins) -> str:
    """The type of adapters: PEFT makes them fp32; DeepSpeed casts the module to bf16, from 0.19.2 on not under ZeRO-3.

    runtime/engine.py:1232 of 0.16.4 (`self.module.bfloat16()`), :1496-1504 of 0.19.5 (`not is_zero_init_model`).
    """
    deepspeed = str(given.get("versions.deepspeed", pins.deepspeed))
    return "fp32" if given.get("sharding") == "zero3" and at_least(deepspeed, "0.19.2") else "bf16"


def refuse(s: Scenario) -> str | None:
    """The reason why OpenRLHF cannot run `s`, in one line, or None."""
    version, method = s.framework_version, s.method
    if reason := trainer_fault(s) or linear_fault(s):
        return reason
    if s.task not in TASKS:
        return f"task: given {s.task!r}, allowed with openrlhf: {', '.join(TASKS)}"
    if reason := whole_layers(s, "DeepSpeed's AutoTP is not modelled") or _ring(s) or cut_alike(s) or fsdp_fault(s):
        return reason
    if s.sharding not in (*DEEPSPEED, "none", "ddp"):
        allowed = f"{', '.join(DEEPSPEED)}, or none and ddp for zero_stage 0"
        return f"sharding: given {s.sharding!r}, allowed with openrlhf, which trains on DeepSpeed: {allowed}"
    if s.precision != "mixed":
        return f"precision: given {s.precision!r}, allowed with openrlhf: mixed, as DeepSpeed keeps fp32 master weights"
    if not OPTIMIZERS[s.optimizer].spelled.openrlhf:  # muon, since 0.10.4, is no value here
        allowed = ", ".join(name for name, facts in OPTIMIZERS.items() if facts.spelled.openrlhf)
        return f"optimizer: given {s.optimizer!r}, allowed with openrlhf: {allowed}"
    if s.offload.parameters:
        return "offload.parameters: given true, allowed with openrlhf: false for the trained model"
    if s.sharding in ("none", "ddp"):
        if s.offload.optimizer:
            return f"offload.optimizer: given true with sharding {s.sharding}, allowed: with {', '.join(DEEPSPEED)}"
        if s.grad_dtype != "fp32":  # deepspeed runtime/engine.py:1333-1343 of 0.16.4
            return f"grad_dtype: given {s.grad_dtype!r} with sharding {s.sharding}, allowed: fp32, DeepSpeed demands it"
    if not s.double_quantization:  # bnb_4bit_use_double_quant=True (models/actor.py:59 of 0.3.8)
        return "double_quantization: given false, allowed with openrlhf: true"
    if s.checkpointing == "selective":
        return "checkpointing: given 'selective', allowed with openrlhf: none, full"
    if s.loss != "full":
        return f"loss: given {s.loss!r}, allowed with openrlhf: full"
    if method == "qlora" and s.sharding == "zero3":  # zero.Init skips 4-bit models: modeling_utils.py:3760 of 4.43.1
        return "sharding: given 'zero3' with method qlora, allowed: zero1, zero2; 4-bit weights are not partitioned"
    frozen = s.task == "dpo" or s.has("reference") or s.has("reward")
    if method == "qlora" and frozen and not at_least(s.versions["transformers"], "4.45"):
        # the reference is a bare 4-bit model, and its .to() raises: modeling_utils.py:2820-2829 of 4.43.1
        return f"method: given 'qlora' for {s.task}, allowed: full, lora; this Transformers cannot move a 4-bit model"
    packs = "0.3.7" if s.task in ("rm", "dpo") else "0.3.4"
    if s.packing and not at_least(version, packs):
        return f"packing: given true, allowed with openrlhf {version}: false; packing for {s.task} came with {packs}"
    if s.packing and s.attention != "flash":  # asserted until 0.5 (models/actor.py:111 of 0.3.8), forced later
        return f"packing: given true with attention {s.attention!r}, allowed: with flash"
    return rl.refuse(s) if s.task in rl.TASKS else None


def _ring(s: Scenario) -> str | None:
    """The reason why ring attention cannot run, in one line; None if it can or is not asked for."""
    first = RINGS.get(s.task)
    if first is None:
        return whole_sequences(s, f"its ring attention is modelled for {', '.join(RINGS)}")
    if not at_least(s.framework_version, first):
        return whole_sequences(s, f"ring attention for {s.task} came with {first}")
    return context_fault(s)


def one_thread(s: Scenario) -> bool:
    """True under Ray, which leaves Adam one thread a rank; DeepSpeed's launcher leaves threads alone.

    Source: `ray/_private/utils.py:set_omp_num_threads_if_unset`.
    """
    return s.task in rl.TASKS


def keeps(s: Scenario) -> Keeps:
    """The plan of this release's trainers: roles with their loss paths, DeepSpeed's buffers, for RL a step's stages.

    A reference has weights of its own, with adapters too.
    """
    deepspeed = DeepSpeed(s.versions["deepspeed"])

    def path(rows: int) -> Path:
        """The loss path for the logits of `rows` sequences: the release's own unless `logprob` asks for another."""
        found = loss_path(s.task, s.framework_version, one_row=s.packing or rows == 1)
        if s.task not in ("dpo", *rl.TASKS) or s.logprob == _logprob(s.framework_version):
            return found
        kind = "log-softmax" if s.logprob == "log-softmax-fp32" else s.logprob
        return Path(kind, head_fp32=s.logprob == "log-softmax-fp32", held=found.held)

    if s.task in rl.TASKS:
        found = rl.keeps(s, path, deepspeed)
    else:
        own = path(s.rows)
        reference = Role("reference", own, own, s.rows, s.rows, exchange=EXCHANGE) if s.has("reference") else None
        trained = "reward" if s.task == "rm" else "actor"
        found = supervised(trained, own, s.rows, reference=reference, exchange=EXCHANGE, deepspeed=deepspeed)
    return replace(found, notes=(*found.notes, *_in_vain(s)))


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
