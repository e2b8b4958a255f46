"""OpenRLHF: `train_sft.py`, `train_rm.py` and `train_dpo.py` on DeepSpeed, by version.

Read in the packages and tags v0.3.0 to v0.11.2. Files are those of the release named: `cli/train_sft.py` stands for
`openrlhf/cli/train_sft.py` (before 0.3.6 `examples/train_sft.py`). Every release is known that changed a default, a
pinned library or the way from logits to a loss; one in between behaves as the one before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from calc.frameworks import at_least
from calc.frameworks import nearest as _nearest
from calc.keeps import DeepSpeed, Keeps, Path

if TYPE_CHECKING:
    from calc.scenario import Scenario


class Pins(NamedTuple):
    """The libraries that a release's requirements.txt pins; torch is never pinned."""

    deepspeed: str
    transformers: str
    flash_attn: str


RELEASES: Mapping[str, Pins] = {
    "0.3.0": Pins("0.13.5", "4.40.0", "2.5.8"),
    "0.3.1": Pins("0.13.5", "4.41.0", "2.5.8"),
    "0.3.4": Pins("0.13.5", "4.41.0", "2.5.8"),  # packing
    "0.3.6": Pins("0.14.4", "4.42.4", "2.6.1"),  # sft 2048 tokens, rm micro batch 1
    "0.3.8": Pins("0.14.4", "4.43.1", "2.6.1"),
    "0.4.0": Pins("0.14.4", "4.43.3", "2.6.1"),
    "0.4.3": Pins("0.15.0", "4.44.2", "2.6.1"),
    "0.4.4": Pins("0.15.0", "4.44.2", "2.6.1"),  # no log-softmax thrown away
    "0.4.6": Pins("0.15.0", "4.46.1", "2.6.1"),  # Transformers' logits stay bf16
    "0.5.2": Pins("0.15.0", "4.46.3", "2.6.1"),
    "0.5.4": Pins("0.15.0", "4.46.3", "2.7.0.post2"),  # gradients accumulate in DeepSpeed's type, bf16
    "0.5.5": Pins("0.15.0", "4.47.1", "2.7.0.post2"),
    "0.5.6": Pins("0.15.0", "4.46.3", "2.7.0.post2"),  # logits cast to fp32 in Actor.forward
    "0.5.8": Pins("0.16.3", "4.48.2", "2.7.0.post2"),  # gather minus logsumexp, row by row
    "0.6.0": Pins("0.16.3", "4.48.3", "2.7.0.post2"),
    "0.6.1": Pins("0.16.4", "4.48.3", "2.7.0.post2"),
    "0.6.2": Pins("0.16.4", "4.48.3", "2.7.0.post2"),  # flash-attn's cross entropy for log-probs
    "0.6.3": Pins("0.16.4", "4.50.0", "2.7.4.post1"),
    "0.6.4": Pins("0.16.5", "4.50.0", "2.7.4.post1"),
    "0.7.0": Pins("0.16.5", "4.50.0", "2.7.4.post1"),  # sft by log-probs too; no slice of the logits
    "0.7.1": Pins("0.16.6", "4.51.3", "2.7.4.post1"),
    "0.7.3": Pins("0.16.7", "4.51.3", "2.7.4.post1"),
    "0.8.1": Pins("0.16.8", "4.51.3", "2.7.4.post1"),
    "0.8.2": Pins("0.16.9", "4.52.3", "2.7.4.post1"),
    "0.8.3": Pins("0.17.0", "4.52.3", "2.7.4.post1"),
    "0.8.5": Pins("0.17.1", "4.52.4", "2.8.0.post2"),
    "0.8.6": Pins("0.17.2", "4.53.1", "2.8.0.post2"),
    "0.8.8": Pins("0.17.3", "4.54.1", "2.8.2"),
    "0.8.10": Pins("0.17.5", "4.55.2", "2.8.3"),  # attn_implementation, FlashAttention-2 by default
    "0.8.11": Pins("0.17.6", "4.56.1", "2.8.3"),
    "0.9.0": Pins("0.18.1", "4.57.0", "2.8.3"),
    "0.9.1": Pins("0.18.3", "4.57.3", "2.8.3"),
    "0.9.3": Pins("0.18.5", "4.57.6", "2.8.3"),
    "0.9.5": Pins("0.18.7", "5.3.0", "2.8.3"),
    "0.9.10": Pins("0.18.9", "5.5.0", "2.8.3"),
    "0.10.0": Pins("0.18.9", "5.5.3", "2.8.3"),
    "0.10.4": Pins("0.19.1", "5.7.0", "2.8.3"),
    "0.11.0": Pins("0.19.5", "5.15.0", "2.8.3"),
    "0.11.2": Pins("0.19.6", "5.15.0", "2.8.3"),
}
KNOWN = tuple(RELEASES)

TASKS = ("pretrain", "sft", "rm", "dpo")
SHARDINGS = ("zero1", "zero2", "zero3")


def nearest(version: str) -> str:
    """The known version whose memory behaviour `version` shares."""
    return _nearest(version, KNOWN)


def defaults(task: str, version: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The command line's defaults for `task`, by dotted key; `given` is what the user said."""
    pins = RELEASES[version]
    grown = at_least(version, "0.3.6")
    sft = task in ("pretrain", "sft")  # pretraining is train_sft.py --pretrain_mode, with the same defaults
    values: dict[str, Any] = {
        # 8 in train_sft.py:147 and train_dpo.py:153 (0.3.8), train.micro_batch_size :166 and :188 (0.11.0);
        # 1 in train_rm.py:169 (0.3.8) and :246 (0.11.0), 8 before 0.3.6 (examples/train_rm.py:130 of 0.3.1)
        "micro_batch": 1 if task == "rm" and grown else 8,
        # train_sft.py:148, train_rm.py:170, train_dpo.py:154 (0.3.8); :167, :247, :189 (0.11.0)
        "global_batch": 128,
        # train_sft.py:197, train_rm.py:192, train_dpo.py:210 (0.3.8); :284, :298, :318 (0.11.0); sft 512 before 0.3.6
        "seq_len": 2048 if sft and grown else 512,
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
        "grad_dtype": "bf16" if at_least(version, "0.5.4") and given.get("sharding", "zero2") in SHARDINGS else "fp32",
        "checkpointing": "none",  # --gradient_checkpointing, train_sft.py:150 (0.3.8), :168 (0.11.0)
        # eager unless --flash_attn (models/actor.py:45, model.py:60 of 0.3.8); train_sft.py:188-193 (0.11.0)
        "attention": "flash" if at_least(version, "0.8.10") or given.get("packing") else "eager",
        "loss": "full",  # Liger's fused loss is never reached: the model gets no labels (models/actor.py:265, 0.11.0)
        # trainer/dpo_trainer.py log_softmax until 0.5.7, log_probs_from_logits (models/utils.py:91-106, 0.6.1) since
        "logprob": "logsumexp" if at_least(version, "0.5.8") else "log-softmax-fp32",
        "packing": False,  # train_sft.py:181 (0.3.8), :264 (0.11.0)
        "versions.deepspeed": pins.deepspeed,
        "versions.transformers": pins.transformers,
        "versions.flash-attn": pins.flash_attn.partition(".post")[0],
    }
    if given.get("method", "full") != "full":
        values |= {
            "lora.rank": 64,  # the flag's default is 0, no adapter (train_sft.py:175); the example scripts set 64
            "lora.targets": "all-linear",  # train_sft.py:177 (0.3.8), :260 (0.11.0)
            "lora.dropout": 0,  # train_sft.py:178 (0.3.8), :261 (0.11.0)
            "lora.dtype": _adapter(given, pins),
        }
    return values


def _adapter(given: Mapping[str, Any], pins: Pins) -> str:
    """PEFT makes adapters fp32; DeepSpeed then casts the module to bf16, but from 0.19.2 on not under ZeRO-3.

    runtime/engine.py:1232 of 0.16.4 (`self.module.bfloat16()`), :1496-1504 of 0.19.5 (`not is_zero_init_model`).
    """
    deepspeed = str(given.get("versions.deepspeed", pins.deepspeed))
    return "fp32" if given.get("sharding") == "zero3" and at_least(deepspeed, "0.19.2") else "bf16"


def refuse(s: Scenario) -> str | None:
    """One line on why OpenRLHF cannot run `s`; None when it can."""
    version, method = s.framework_version, s.method
    if s.task not in TASKS:
        return f"task: given {s.task!r}, allowed with openrlhf: {', '.join(TASKS)}"
    if s.sharding not in (*SHARDINGS, "none", "ddp"):
        allowed = f"{', '.join(SHARDINGS)}, or none and ddp for zero_stage 0"
        return f"sharding: given {s.sharding!r}, allowed with openrlhf, which trains on DeepSpeed: {allowed}"
    if s.precision != "mixed":
        return f"precision: given {s.precision!r}, allowed with openrlhf: mixed, as DeepSpeed keeps fp32 master weights"
    if s.optimizer != "adamw":
        return f"optimizer: given {s.optimizer!r}, allowed with openrlhf: adamw"  # muon, since 0.10.4, is no word here
    if s.offload.parameters:
        return "offload.parameters: given true, allowed with openrlhf: false for the trained model"
    if s.sharding in ("none", "ddp"):
        if s.offload.optimizer:
            return f"offload.optimizer: given true with sharding {s.sharding}, allowed: with {', '.join(SHARDINGS)}"
        if s.grad_dtype != "fp32":  # deepspeed runtime/engine.py:1333-1343 of 0.16.4
            return f"grad_dtype: given {s.grad_dtype!r} with sharding {s.sharding}, allowed: fp32, DeepSpeed demands it"
    if s.checkpointing == "selective":
        return "checkpointing: given 'selective', allowed with openrlhf: none, full"
    if s.loss != "full":
        return f"loss: given {s.loss!r}, allowed with openrlhf: full"
    if method == "qlora" and s.sharding == "zero3":  # zero.Init skips 4-bit models: modeling_utils.py:3760 of 4.43.1
        return "sharding: given 'zero3' with method qlora, allowed: zero1, zero2; 4-bit weights are not partitioned"
    if method == "qlora" and s.task == "dpo" and not at_least(s.versions["transformers"], "4.45"):
        # the reference is a bare 4-bit model, and its .to() raises: modeling_utils.py:2820-2829 of 4.43.1
        return "method: given 'qlora' for dpo, allowed: full, lora; this Transformers cannot move a 4-bit reference"
    if s.packing and not at_least(version, "0.3.4"):
        return f"packing: given true, allowed with openrlhf {version}: false; packing came with 0.3.4"
    if s.packing and s.attention != "flash":  # asserted until 0.5 (models/actor.py:111 of 0.3.8), forced later
        return f"packing: given true with attention {s.attention!r}, allowed: with flash"
    return None


def keeps(s: Scenario) -> Keeps:
    """What the trainers of this release keep: the task's loss path, a reference of its own, DeepSpeed's buffers."""
    path = loss_path(s.task, s.framework_version, one_row=s.packing or (s.micro_batch == 1 and s.task != "dpo"))
    if s.task == "dpo" and s.logprob != defaults("dpo", s.framework_version, {})["logprob"]:
        kind = "log-softmax" if s.logprob == "log-softmax-fp32" else s.logprob
        path = Path(kind, head_fp32=s.logprob == "log-softmax-fp32")
    return Keeps(path=path, reference_path=path, deepspeed=DeepSpeed(s.versions["deepspeed"]))


def loss_path(task: str, version: str, *, one_row: bool) -> Path:
    """From logits to a loss, by release; `one_row`: one sequence, or several packed, whose slices need no copy.

    models/actor.py, models/loss.py, models/utils.py and trainer/{sft,dpo}_trainer.py of each release. The sft trainer
    keeps `output` in a variable of its loop, through the step and into the next forward; the dpo trainer does not.
    """
    if task == "rm":
        return Path("scalar")
    # until 0.4.5 Transformers itself returned fp32 logits, since 0.5.6 Actor.forward casts them
    fp32 = not at_least(version, "0.4.6") or at_least(version, "0.5.6")
    if task == "dpo":
        if at_least(version, "0.6.2"):
            return Path("flash", head_fp32=True, shift_copy=not (one_row or at_least(version, "0.7.0")))
        if at_least(version, "0.5.8"):
            return Path("logsumexp" if one_row else "rows", head_fp32=True)
        return Path("log-softmax", head_fp32=fp32, shift_copy=not one_row)
    if at_least(version, "0.7.0"):
        return Path("flash", head_fp32=True, held=True, carried=True)
    kind = "cross-entropy" if fp32 else "log-softmax"
    return Path(kind, head_fp32=fp32, shift_copy=not one_row, held=True, carried=True)
