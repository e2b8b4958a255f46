"""ms-swift's `swift pt`, `swift sft` and `swift rlhf` on Transformers' Trainer; megatron-swift is another engine.

Files are those of ms-swift 4.6.0 (`swift/`) unless a release is named; 3.9.0 has the same in `swift/llm/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import gcd
from typing import Any

from calc.base.plan import DeepSpeed, Path
from calc.base.refusal import Refusal
from calc.base.versions import at_least
from calc.frameworks import trainer
from calc.frameworks.constraints import vocabulary_fault
from calc.frameworks.releases import NOTHING, Default, Table, stated
from calc.frameworks.torch.releases import Pins
from calc.frameworks.torch.trainers import habits as shared
from calc.frameworks.torch.trainers import ms_swift_grpo
from calc.scenario.scenario import Scenario

TASKS = ("pretrain", "sft", "rm", "dpo", "kto", "orpo", "simpo", "gkd", "grpo")
FIRST = "3.9.0"
# Transformers as new as METADATA allows; PyTorch and DeepSpeed, which it leaves open, as new as their day's.
RELEASES: Mapping[str, Pins] = {
    FIRST: Pins("0.17.6", "2.8.0", "4.57.1"),
    "4.6.0": Pins("0.19.8", "2.13.0", "5.19.0"),
}
BUCKET = 200_000_000  # reduce_bucket_size of zero1.json and zero2.json (llm/ds_config of 3.12.0)
ONE_STREAM = "3.2.2"  # whose files switch overlap_comm off (commit e5c4c39ec of 2025-03-24), which was on before
TURN = 512  # chunk_size (rlhf_trainers/gkd_loss.py:100)
TURNS_SINCE = "3.12"  # the first release read that has it; 3.8 has TRL's own loss
# The releases with a DPO loss of its own: until then all logits are normalised, and the chosen half's cross entropy is
# another; and the first whose `rpo_alpha`, the weight of that, is not 1 (commit 8ae0ade71 of 2025-08-15)
ROWWISE, BARE = "3.5.1", "3.8"
ROLLED = "3.5.0"  # the release whose labels are rolled, where logits were sliced before
STEP = 16  # sequences of a step over all GPUs, unless a number of micro batches is given (trainers/arguments.py:291)

DEFAULTS = Table(
    Default("micro_batch", FIRST, 1, "per_device_train_batch_size (trainers/arguments.py:130)"),
    Default("checkpointing", FIRST, "full", "gradient_checkpointing true (trainers/arguments.py:135)"),
    Default("attention", FIRST, "sdpa", "attn_impl None: Transformers' choice (arguments/base_args/model_args.py:79)"),
    Default("loss", FIRST, "full", "the model's own; use_liger_kernel false (transformers training_args.py)"),
    Default("logprob", FIRST, "selective", "selective_log_softmax (rlhf_trainers/rlhf_mixin.py:169)"),
    Default("on_policy", FIRST, 0, "nothing is generated, but in GKD"),
    Default("on_policy", FIRST, 0.5, "lmbda (arguments/rlhf_args.py:263)", ("gkd",)),
    Default("padding_free", FIRST, False, "padding_free (arguments/base_args/template_args.py)"),
    Default("packing", FIRST, False, "packing false (arguments/base_args/base_args.py:133)"),
)
ADAPTERS = Table(
    Default("lora.rank", FIRST, 8, "lora_rank (arguments/tuner_args.py:133)"),
    Default("lora.dropout", FIRST, 0.05, "lora_dropout (arguments/tuner_args.py:135)"),
    Default("lora.targets", FIRST, "all-linear", "target_modules (arguments/tuner_args.py:126)"),
    Default("double_quantization", FIRST, True, "bnb_4bit_use_double_quant (arguments/base_args/quant_args.py:42)"),
)


def habits(task: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Its defaults for `task`, by dotted key; weights load in their checkpoint's type (base_args/model_args.py:114)."""
    version, libraries = shared.release("ms-swift", RELEASES, given)
    given = {**given, "gpus": trainer.trainers(given)}
    values = stated(task, version, DEFAULTS, NOTHING if given.get("method", "full") == "full" else ADAPTERS)
    sharding = shared.sharded(given)
    # over all GPUs, those that share sequences among them (trainers/arguments.py:290)
    one = shared.batches(values, {**given, "context_parallel": 1}, 1)["global_batch"]
    return {
        **libraries,
        **values,
        **shared.liger(task, given),
        **shared.batches(values, given, max(1, -(-STEP // one))),
        "sharding": sharding,
        "precision": shared.narrow(given, sharding, wide="bf16"),
        "no_sync": trainer.reduces_once(sharding, given),
        "reentrant": sharding != "ddp",  # trainers/mixin.py:950
        **({"sft_alpha": 1} if task == "dpo" and not at_least(_given(given, version), BARE) else {}),
        **(seen(given) if "images.width" in given else {}),
        **(ms_swift_grpo.habits(version, given, STEP) if task == "grpo" else {}),
    }


def _given(given: Mapping[str, Any], version: str) -> str:
    """The release that is given, which may be older than any that was read, else `version`."""
    return str(given.get("versions.ms-swift", version))


def seen(given: Mapping[str, Any]) -> dict[str, Any]:
    """A frozen tower and projector (`freeze_vit`, `freeze_aligner`: arguments/tuner_args.py:123 of 4.4.0).

    `vit_gradient_checkpointing` is on where the tower is trained (arguments/sft_args.py:212).
    """
    freeze = given.get("images.freeze", "vision")
    return {"images.freeze": freeze, "images.checkpointing": freeze == "none"}


def refuse(s: Scenario) -> Refusal | None:
    """The reason why ms-swift cannot run `s`, in one line, or None."""
    if s.offload.activations:
        return Refusal("offload.activations", "true with trainer ms-swift", "false; it has no switch for it")
    if s.unpadded and s.attention != "flash":  # argument/train_args.py, `_check_padding_free`
        feature = "packing" if s.packing else "padding_free"
        return Refusal(feature, f"true with attention {s.attention!r}", "with flash", "with trainer ms-swift")
    losses = ("full", "fused") if s.context_parallel == 1 else ("full", "chunked")
    fixed = {"loss": losses, "checkpointing": ("none", "full")}
    fault = shared.refuse(s, TASKS, fixed, together=s.together == s.context_parallel) or shared_fault(s)
    return fault or (ms_swift_grpo.refuse(s) if s.task == "grpo" else None)


def shared_fault(s: Scenario) -> Refusal | None:
    """The reason why GPUs cannot share sequences (`sequence_parallel_size`), or are not modelled so, in one line, or
    None.

    A ring takes the place of heads that no more ranks divide (sequence_parallel/sequence_parallel.py:658); it knows
    flash alone, and no padding (:380). Liger's loss is not run (trainers/seq2seq_trainer.py:139).
    """
    n, arch, given = s.context_parallel, s.architecture, f"with context_parallel = {s.context_parallel}"
    if n == 1:
        return None
    if s.task not in ("pretrain", "sft"):
        return Refusal("context_parallel", f"{n} for {s.task}", "1, or for pretrain and sft; not modelled")
    if s.attention != "flash":
        return Refusal("attention", f"{s.attention!r} {given}", "flash; others are not modelled")
    if not s.unpadded:
        return Refusal("padding_free", f"false {given}", "true, or packing; padded sequences are not modelled")
    if (s.loss_chunk_size is None) == (s.loss == "chunked"):
        allowed = "a number with loss chunked, as CELOSS_PARALLEL_SIZE says, else null"
        return Refusal("loss_chunk_size", str(s.loss_chunk_size or "null"), allowed)
    if arch.recurrent:
        return linear_fault(s)
    if arch.mla or arch.attention_sinks or arch.broad:
        return Refusal("context_parallel", n, "1; not modelled", f"for {arch.family}")
    return None


def linear_fault(s: Scenario) -> Refusal | None:
    """The reason why GPUs cannot share sequences of linear attention, or are not modelled so, in one line, or None.

    Qwen3.5's alone, by heads, with no ring beside (model/models/qwen.py:1276 of 4.6.0).
    """
    n, arch = s.context_parallel, s.architecture
    if not (arch.delta and arch.family.startswith("qwen3_5")):
        return Refusal("context_parallel", n, "1; not modelled", f"for {arch.family}")
    heads = gcd(arch.delta.key_heads, arch.delta.value_heads, arch.kv_heads)
    if heads % n:
        return Refusal("context_parallel", n, f"a divisor of {heads}, heads of every kind", f"for {arch.family}")
    return None


def deepspeed(s: Scenario) -> DeepSpeed:
    """DeepSpeed with the file that `--deepspeed zero2` names, or another stage (llm/ds_config of 3.12.0)."""
    usual = replace(shared.shipped(s), overlap_comm=not at_least(s.versions["ms-swift"], ONE_STREAM))
    return usual if s.sharding == "zero3" else replace(usual, reduce_bucket=BUCKET)


def keeps(s: Scenario) -> dict[str, Any]:
    """The Trainer's fields of the trained role."""
    own = trainer.keeps(s, placed=True)
    return own | {"exchange": "zigzag"} if s.context_parallel > 1 else own


def path(s: Scenario, usual: Path) -> Path:
    """The loss path: the model's own; for preferences TRL's, see `trainer.selective`.

    SimPO is CPO's: cpo_alpha, 1, adds the chosen half's cross entropy (arguments/rlhf_args.py:251). GKD picks the
    answers' logits (rlhf_trainers/gkd_loss.py:208; `logits[mask]` in gkd_trainer.py:104 of 3.8.0), and compares
    distributions in turn, `TURN` tokens at once; `sft_alpha` adds the model's own loss, of labels that it is given
    (rlhf_trainers/gkd_trainer.py:93 of 3.9.0).
    """
    if s.task == "gkd":
        usual = replace(usual, nll=1 if s.sft_alpha else 0, picked=picks(s))
        if not at_least(s.versions["ms-swift"], TURNS_SINCE):
            return replace(usual, copied=True)
        tokens = trainer.compared(s)
        return replace(usual, tile=min(TURN, tokens), turns=-(-tokens // TURN))
    if s.task == "grpo":
        return ms_swift_grpo.path(s, usual)
    if s.context_parallel > 1:
        return across(s)
    path = preferred(s, usual) if s.task == "dpo" else trainer.selective(usual)
    return trainer.likelihood(s, path) if s.task == "simpo" else path


def across(s: Scenario) -> Path:
    """The loss of a GPU's own tokens, where GPUs share sequences: PyTorch's, of logits as the model returns them.

    trainers/utils.py:167, `per_token_loss_func_sp`.
    """
    wide = trainer.wrapped(s)
    if s.loss_chunk_size:
        return Path("flash", head_fp32=wide, in_place=True, tile=s.loss_chunk_size)
    return Path("cross-entropy", head_fp32=wide, uncast=True, outside=True)


def preferred(s: Scenario, usual: Path) -> Path:
    """DPO's loss path: TRL's log-probabilities, which `rpo_alpha` (`sft_alpha` here) adds those of the chosen half to.

    Until `ROWWISE` the chosen half has a cross entropy of its own, in the logits' type; before `ROLLED` logits are
    sliced, which softmax copies, and normalised as a whole (rlhf_trainer/dpo_trainer.py of 3.1.0 to 3.5.1,
    `concatenated_forward`, `get_nll_loss`, `get_batch_logps`; until then TRL's, which does the same).
    """
    version = s.versions["ms-swift"]
    if at_least(version, ROWWISE):
        return trainer.selective(usual)
    nll = 0.5 if s.sft_alpha else 0
    if at_least(version, ROLLED):
        return replace(trainer.selective(usual), kept=1, nll=nll)
    return replace(usual, kind="log-softmax", upcast=False, shift_copy=True, nll=nll)


def picks(s: Scenario) -> bool:
    """True if GKD has no logits of prompts, which a model that reads images makes until Transformers 5.

    trainers/mixin.py:213, `get_use_logits_to_keep`.
    """
    sees = s.architecture.vision is not None and not at_least(s.versions["transformers"], "5")
    return s.task == "gkd" and s.lengths is not None and s.lengths.prompt > 0 and not sees


def notes(s: Scenario) -> Iterator[str]:
    """Notes on parts of ms-swift that are computed otherwise."""
    yield from shared.told(s, RELEASES)
    if s.task in ("pretrain", "sft") and s.loss == "full" and s.context_parallel == 1:
        yield "use_logits_to_keep cuts prompts off before the head: computed as if every position were a response's"
    yield from shared.liger_notes(s)
    if vocabulary_fault(s):
        yield "student and teacher have other vocabularies: the copies that pad the smaller one are not computed"
