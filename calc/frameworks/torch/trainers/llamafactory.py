"""LLaMA-Factory on Transformers' Trainer: what it trains in fp32, and its own checkpointing and DPO loss.

Files are those of llamafactory 0.9.5 (`src/llamafactory/`) unless a release is named. `bf16` is off unless it is asked
for, which every example does: it is taken to be on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from calc.base.plan import DeepSpeed, Path
from calc.base.refusal import Refusal
from calc.frameworks import trainer
from calc.frameworks.releases import NOTHING, Default, Table, stated
from calc.frameworks.torch.releases import Pins
from calc.frameworks.torch.trainers import habits as shared
from calc.scenario.scenario import Scenario

TASKS = ("pretrain", "sft", "rm", "dpo", "orpo", "simpo")

# Transformers as new as METADATA allows, DeepSpeed as its extra allows where there is one, PyTorch as new as its day's.
RELEASES: Mapping[str, Pins] = {
    "0.9.0": Pins("0.14.4", "2.4.1", "4.45.0"),
    "0.9.1": Pins("0.14.4", "2.5.1", "4.46.1"),
    "0.9.2": Pins("0.16.4", "2.6.0", "4.49.0"),
    "0.9.3": Pins("0.16.9", "2.7.1", "4.52.4"),
    "0.9.4": Pins("0.16.9", "2.9.1", "4.57.1"),
    "0.9.5": Pins("0.19.8", "2.13.0", "5.6.0"),
}
FIRST = "0.9.0"

DEFAULTS = Table(
    Default("seq_len", FIRST, 1024, "cutoff_len (hparams/data_args.py:44 of 0.9.0)"),
    Default("seq_len", "0.9.1", 2048, "cutoff_len (hparams/data_args.py:46)"),
    Default("micro_batch", FIRST, 8, "per_device_train_batch_size (transformers training_args.py)"),
    Default("checkpointing", FIRST, "full", "disable_gradient_checkpointing false (hparams/model_args.py:145)"),
    Default("attention", FIRST, "sdpa", "flash_attn auto: Transformers' choice (hparams/model_args.py:117)"),
    Default("loss", FIRST, "full", "enable_liger_kernel false (hparams/model_args.py:137)"),
    Default("logprob", FIRST, "log-softmax-fp32", "logits.to(torch.float32), log_softmax (train/dpo/trainer.py:230)"),
    Default("packing", FIRST, False, "packing None (hparams/parser.py:520)"),
    Default("packing", FIRST, True, "packing None in stage pt (hparams/parser.py:520)", ("pretrain",)),
)
ADAPTERS = Table(
    Default("lora.rank", FIRST, 8, "lora_rank (hparams/finetuning_args.py:77)"),
    Default("lora.dropout", FIRST, 0, "lora_dropout (hparams/finetuning_args.py:73)"),
    Default("lora.targets", FIRST, "all-linear", "lora_target all (hparams/finetuning_args.py:81)"),
    Default("double_quantization", FIRST, True, "double_quantization (hparams/model_args.py:291)"),
)


def habits(task: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Its defaults for `task`, by dotted key; trained weights are upcast to fp32 (model/adapter.py:313-325)."""
    version, libraries = shared.release("llamafactory", RELEASES, given)
    adapters = given.get("method", "full") != "full"
    values = stated(task, version, DEFAULTS, ADAPTERS if adapters else NOTHING)
    sharding = shared.sharded(given)
    return {
        **libraries,
        **values,
        **shared.liger(task, given),
        # freeze_vision_tower and freeze_multi_modal_projector (hparams/finetuning_args.py:493 of 0.9.4)
        **({"images.freeze": "vision"} if "images.width" in given else {}),
        **shared.batches(values, given, 1),
        "sharding": sharding,
        "precision": shared.narrow(given, sharding, wide="autocast"),
        "no_sync": trainer.reduces_once(sharding, given),
        # use_reentrant_gc, but for FSDP 2 (model_utils/checkpointing.py:148); use_unsloth_gc is always of that kind
        "reentrant": sharding != "fsdp2" or bool(given.get("offload.activations")),
    }


def refuse(s: Scenario) -> Refusal | None:
    """The reason why LLaMA-Factory cannot run `s`, in one line, or None."""
    return shared.refuse(s, TASKS, {"loss": ("full", "fused"), "checkpointing": ("none", "full")})


def deepspeed(s: Scenario) -> DeepSpeed:
    """DeepSpeed with the file of its examples (examples/deepspeed/ds_z2_config.json, ds_z3_config.json)."""
    return shared.shipped(s)


def keeps(s: Scenario) -> dict[str, Any]:
    """The Trainer's fields of the trained role.

    Its own switch for checkpointing hooks no embedding (model/model_utils/checkpointing.py:106 of 0.9.4); PEFT does.
    All that is trained beside a frozen model is made fp32, but with `pure_bf16` (model/adapter.py:314-316 and :347).
    """
    # use_unsloth_gc: `hidden_states.to("cpu", non_blocking=True)`
    own = {"streams": "each", "pageable": True} if s.offload.activations else {}
    upcasts = s.lora is not None and s.lora.dtype == "fp32"
    return trainer.keeps(s, placed=True) | {"hooks": bool(s.lora), "upcasts": upcasts} | own


def path(s: Scenario, usual: Path) -> Path:
    """The loss path: the model's own, as the Trainer calls it.

    DPO's logits are variables of `get_batch_loss_metrics` while the reference runs (train/dpo/trainer.py:283); ORPO's
    loss takes its log-probabilities for the likelihood (:56).
    """
    if s.task == "orpo":
        return replace(usual, nll=0.0, shift_copy=False)
    return replace(usual, held="inside") if s.task == "dpo" else usual


def notes(s: Scenario) -> Iterator[str]:
    """Notes on parts of LLaMA-Factory that are computed otherwise."""
    yield from shared.told(s, RELEASES)
    yield from shared.liger_notes(s)
