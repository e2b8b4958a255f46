"""Unsloth on TRL's SFTTrainer: adapters beside 4-bit weights, losses and kernels of its own.

Files are those of unsloth 2026.10.9 and unsloth_zoo 2026.10.9 unless a release is named. Defaults are those of its
command, `unsloth train`, which older releases do not have: their users' scripts set the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from calc.base.plan import Chunks, Forced, Path
from calc.base.refusal import Refusal
from calc.base.versions import at_least
from calc.frameworks import trainer
from calc.frameworks.releases import NOTHING, Default, Table, stated
from calc.frameworks.torch.releases import Pins
from calc.frameworks.torch.trainers import habits as shared
from calc.models.architecture import Architecture, layer_kinds, layer_tensors, vision_tensors
from calc.models.lora import EMBEDDING, HEAD, adapted
from calc.scenario.scenario import Scenario

TASKS = ("pretrain", "sft")
FIRST, NEWEST = "2024.8", "2026.10.9"
CUT, SHORT, FUSED = "2024.11.10", "2025.3.19", "2025.9.1"  # releases in which the loss changed
# the release that switches cut-cross-entropy off where PyTorch is as new (__init__.py:112 of 2025.8.9)
OFF, NEWER = "2025.8.9", "2.8"
# the newest first: releases whose fused loss counts its chunks otherwise, see `calc.memory.loss_chunks`; 2026.9.4 asks
# for unsloth_zoo 2026.9.3 or later
COUNTED: Mapping[str, Chunks] = {
    NEWEST: "rows",
    "2026.9.4": "chain",
    "2026.7.1": "capped",
    FUSED: "nearest",
    OFF: "gib",
}
# PyTorch, Transformers: as METADATA allows, of the release's day
RELEASES: Mapping[str, Pins] = {
    FIRST: Pins("0.14.4", "2.4.0", "4.43.3"),
    CUT: Pins("0.15.4", "2.5.1", "4.46.3"),
    SHORT: Pins("0.16.4", "2.6.0", "4.50.2"),
    FUSED: Pins("0.17.5", "2.8.0", "4.55.4"),
    NEWEST: Pins("0.19.8", "2.13.0", "5.17.0"),
}
# the families that run its own attention, the Transformers from which layers share a table, and a table's positions
ROTATES, SHARED, POSITIONS = ("llama", "mistral", "qwen2", "gemma", "gemma2"), "4.48", 32_768
IN_FP32 = ("gemma", "gemma2")  # their tables (models/gemma.py:239 of 2024.8)
# families whose adapters run in its own functions (models/llama.py:2543-2551 of 2025.6.1), and the linears that one
# function takes, without biases
FUNCTIONS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "cohere", "granite")
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj", "down_proj"))
BUFFERED = "2025.2.2"  # has `use_global_buffer` (kernels/utils.py), which 2025.1.8 does not
SHORTER = "2024.9"  # whose masks of Gemma 2 have the positions of `max_seq_length` alone (models/llama.py:740)
SKIPS = "2026.2.1"  # leaves vision towers in 16 bits
MAPS = "2024.3"  # sets PYTORCH_CUDA_ALLOC_CONF (commit c599ae0f27 of 2024-03-17)
GROWS = "2024.7"  # tables that begin with POSITIONS (commit 54dd81de67 of 2024-07-18); before, they had all of them
# models in whose source no pattern found the loss, since they cast logits themselves, and the first release to find it
# (unsloth_zoo compiler.py, `apply_fused_lm_head`, run over Transformers' models from 4.54 to 5.5)
UNMATCHED, MATCHED = ("granitemoehybrid",), "2026.5.2"
FREE = "2025.12.4"  # puts rows end to end by itself (trainer.py:78 and :352 of it)
TEXTS = "2026.7.4"  # what pads other batches than these (trainer.py:225 and :742 of it)
PADDED = ("gemma2", "gpt_oss")  # PADDING_FREE_BLOCKLIST (trainer.py:197)
SEE = ("gemma3n_text", "gemma4_text")  # families whose models all read images, with towers that are not all modelled
# families that FastLanguageModel runs itself (models/loader.py:444-510 of 2026.1.2), the other ones FastModel
OWN = ("llama", "mistral", "gemma", "gemma2", "qwen2", "qwen3")
# a model that overflows in fp16, and is computed in fp32 in its place (FORCE_FLOAT32 of models/loader.py): the first
# release, that whose norms return fp16 (unsloth_zoo 2025.6.3 temporary_patches/gemma.py), and that whose attention gets
# keys repeated (2026.10.8 temporary_patches/sdpa_gqa.py)
OVERFLOWS, FORCED, NARROWED, REPEATED = ("gemma3", "gemma3_text"), "2025.3.15", "2025.6.4", "2026.10.8"
# Copies that leave some linears in 16 bits, which it loads where four bits are asked for: the first release that maps
# a model's name to its copy (models/mapper.py), and the GB of its files by the downloads in the outputs of
# unslothai/notebooks: Llama3.1_(8B)-GRPO, Meta_Synthetic_Data_Llama3_2_(3B), Qwen2.5_(3B)-GRPO, Qwen2_5_7B_VL_GRPO,
# Phi_4-Conversational, Gemma3_(4B)-Vision-GRPO, Magistral_(24B)-Reasoning-Conversational, Qwen3_(14B),
# gpt-oss-(20B)-Fine-tuning, gpt-oss-(120B)_A100-Fine-tuning, Qwen3_VL_(8B)-Vision-GRPO, Granite4.0_350M
COPIES: Mapping[str, tuple[str, float]] = {
    "llama-3.1-8b": ("2025.3.8", 5.964),
    "llama-3.2-3b": ("2025.2.2", 2.355),
    "qwen2.5-3b": ("2025.2.2", 2.356),
    "qwen2.5-vl-7b": ("2025.2.2", 6.9),
    "phi-4": ("2025.1.5", 10.392),
    "gemma-3-4b": ("2025.3.19", 4.562),
    "mistral-small-24b": ("2025.2.2", 14.9),
    "qwen3-14b": ("2025.4.4", 11.119),
    "gpt-oss-20b": ("2025.8.5", 12.526),
    "gpt-oss-120b": ("2025.8.5", 62.088),
    "qwen3-vl-8b": ("2025.10.11", 7.699),
    "granite-4-350m": ("2025.12.8", 0.37),
}
WHOLE = 1024  # tokens of a micro batch up to which logits were made all the same (models/llama.py:1092 of 2025.3.19)
FIXED = {"optimizer": "adamw-8bit"}  # what its command sets for good (unsloth_cli/commands/train.py:63)
ACCUMULATION = 4  # gradient_accumulation_steps (unsloth_cli/config.py:36)

DEFAULTS = Table(
    Default("seq_len", FIRST, 2048, "max_seq_length (unsloth_cli/config.py:30)"),
    Default("micro_batch", FIRST, 2, "batch_size (unsloth_cli/config.py:35)"),
    Default("optimizer", FIRST, FIXED["optimizer"], "adamw_8bit (unsloth_cli/commands/train.py:63)"),
    Default("checkpointing", FIRST, "full", "gradient_checkpointing unsloth (unsloth_cli/config.py:44)"),
    Default("attention", FIRST, "flash", "flash-attn, or else xFormers: both keep the same (models/llama.py)"),
    Default("loss", FIRST, "full", "fast_cross_entropy_loss (models/llama.py of 2024.8)"),
    Default("loss", CUT, "cut", "fused_linear_cross_entropy (models/llama.py of 2024.11.10)"),
    Default("loss", FUSED, "fused", "unsloth_fused_ce_loss (unsloth_zoo/fused_losses/cross_entropy_loss.py)"),
    Default("packing", FIRST, False, "packing (unsloth_cli/config.py:42)"),
)
ADAPTERS = Table(
    Default("lora.rank", FIRST, 64, "lora_r (unsloth_cli/config.py:67)"),
    Default("lora.dropout", FIRST, 0, "lora_dropout (unsloth_cli/config.py:69)"),
    Default(
        "lora.targets", FIRST, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "target_modules (unsloth_cli/config.py:70)",
    ),
    Default("lora.dtype", FIRST, "fp32", "prepare_model_for_training (unsloth_zoo, training_utils.py:359)"),
    Default("double_quantization", FIRST, True, "bnb_4bit_use_double_quant (unsloth/models/llama.py:4017)"),
)  # fmt: skip


def modelled(arch: Architecture, version: str, transformers: str, method: str, *, joined: bool) -> Architecture:
    """The model with the cos and sin that each of its own attention layers keeps (models/llama.py:1004 of 2024.8).

    They have room for 32,768 positions at first, before 2024.7 for all. Where Transformers has one table for the model,
    so has Unsloth (models/llama.py:2250 of 2025.9.1). Phi-3 and Phi-4 are copies of its own with the weights of Llama's
    layers, q, k, v, gate and up apart (models/mapper.py): it runs none that joins them (models/loader.py:203-257 of
    2024.8). Beside four bits GPT-OSS's experts are linears, which bitsandbytes takes, and run one after another
    (unsloth_zoo 2025.9.1 temporary_patches/gpt_oss.py:325, `GptOssExperts`). Rows that are `joined` lie end to end, and
    SDPA gets a mask of their positions (utils/packing.py:254 of 2025.12.8, `build_sdpa_packed_attention_mask`).
    """
    if joined and at_least(version, FREE):
        arch = replace(arch, masked=True, end_to_end=True)
    if arch.experts_clamped and method == "qlora":
        return replace(arch, experts_input_first=False)
    if arch.family == "phi3" and not arch.rotary_dim:  # Llama rotates whole heads
        arch = replace(arch, family="llama", fused_qkv="", fused_gate_up=False, rotation="")
    if arch.family not in ROTATES or at_least(transformers, SHARED):
        return arch
    positions = min(arch.max_positions, POSITIONS) if at_least(version, GROWS) else arch.max_positions
    return replace(arch, cached_positions=positions, cached_bytes=4 if arch.family in IN_FP32 else 0)


def habits(task: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of its command for `task`, by dotted key; weights are bf16, trained whole too (models/vision.py)."""
    version, libraries = shared.release("unsloth", RELEASES, given)
    values = stated(task, version, DEFAULTS, NOTHING if given.get("method", "full") == "full" else ADAPTERS)
    asked, torch = (str({**libraries, **given}[f"versions.{name}"]) for name in ("unsloth", "torch"))
    if values["loss"] == "cut" and at_least(asked, OFF) and at_least(torch, NEWER):
        values["loss"] = "fused"
    return {
        **libraries,
        **values,
        **shared.batches(values, given, ACCUMULATION),
        "sharding": shared.sharded(given),
        "precision": "bf16",
        "expandable_segments": at_least(str(given.get("versions.unsloth", version)), MAPS),
        "padding_free": at_least(str(given.get("versions.unsloth", version)), FREE),
        # the checkpointing named unsloth (unsloth_zoo/gradient_checkpointing.py): of the reentrant kind
        "offload.activations": given.get("checkpointing", values["checkpointing"]) == "full",
        "reentrant": True,
    }


def copied(values: Mapping[str, Any], model: str) -> float | None:
    """GB of the copy in four bits that it loads in the place of `model`, or None where none is known to leave linears
    in 16 bits (models/loader_utils.py, `get_model_name`, of 2025.3.19)."""
    if values["method"] != "qlora" or model not in COPIES:
        return None
    first, size = COPIES[model]
    return size if at_least(str(values["versions.unsloth"]), first) else None


def pads(values: Mapping[str, Any], arch: Architecture, *, sees: bool) -> bool:
    """True if it pads the batches of a model whatever is asked, as it does with a collator of the user's own.

    Until 2026.7.4 it does so if the model can read images (`is_vlm`: trainer.py:316-329 of 2025.12.4), which `sees`
    says; since, if images are read, and if a state passes through positions without kernels that keep rows apart.
    """
    version = str(values["versions.unsloth"])
    if not at_least(version, FREE):
        return False
    if arch.family in PADDED or "images.width" in values:
        return True
    if at_least(version, TEXTS):
        return bool(arch.recurrent) and values["linear_attention"] == "torch"
    return sees or arch.family in SEE


def refuse(s: Scenario) -> Refusal | None:
    """The reason why Unsloth cannot run `s`, in one line, or None."""
    fixed: dict[str, tuple[str, ...]] = {
        "sharding": ("none", "ddp"),
        # chosen by the card (models/vision.py:2294); what is trained whole in fp16 is kept in fp32 (:4043)
        "precision": ("bf16",) if s.method == "full" else ("bf16", "fp16"),
        "kernels": ("eager",),
        "loss": ("full", "fused", "cut"),
        "checkpointing": ("none", "full"),
    }
    return shared.refuse(s, TASKS, fixed) or _copied(s)


def _copied(s: Scenario) -> Refusal | None:
    """The reason why no adapter stands beside embedding or head: FastLanguageModel trains copies of them instead.

    It moves both names to `modules_to_save` (models/llama.py:2846-2867 of 2026.1.2).
    """
    for module in (EMBEDDING, HEAD):
        if s.lora and module in s.lora.modules and s.architecture.family in OWN:
            allowed = f"lora.modules_to_save {module}, as it trains a copy whole"
            return Refusal("lora.targets", f"{module} with trainer unsloth", allowed)
    if s.lora and not isinstance(s.lora.targets, str) and len(untrained(s)) == len(s.lora.targets):
        given = f"{', '.join(s.lora.targets)} with trainer unsloth"
        return Refusal("lora.targets", given, "linears of layers, too; it trains none of these")
    return None


def untrained(s: Scenario) -> tuple[str, ...]:
    """The modules whose adapters get no gradients in a model that FastModel runs.

    It freezes what has neither `.lora_A.` nor `.lora_B.` in its name, and so the matrices `lora_embedding_A` and `_B`
    (unsloth_zoo 2026.1.2 training_utils.py:133, `prepare_model_for_training`, called after PEFT in unsloth's
    models/vision.py:1118; the same in unsloth_zoo 2025.3.17). Its losses read the head's own weight, whatever
    UNSLOTH_RETURN_LOGITS is (compiler.py:1068 of 2026.1.2).
    """
    own = s.lora.modules if s.lora else ()
    passed = (EMBEDDING,) if s.loss == "full" else (EMBEDDING, HEAD)
    return () if isinstance(own, str) else tuple([module for module in passed if module in own])


def forced(s: Scenario) -> Forced:
    """The parts of a model that it computes in fp32, in place of fp16, whatever the card: of adapters alone.

    What it trains whole has weights in fp32, and no release takes it in fp16. The trainer's own fp16 is switched off
    (models/rl.py, `force_float32`). GPT-OSS and Gemma 3n are in the list, too, with patches that are not followed.
    """
    version = str(s.versions["unsloth"])
    if s.architecture.family not in OVERFLOWS or s.precision != "fp16" or not at_least(version, FORCED):
        return ""
    if not at_least(version, NARROWED):
        return "norms"
    return "repeated" if at_least(version, REPEATED) else "grouped"


def keeps(s: Scenario) -> dict[str, Any]:
    """The Trainer's fields of the trained role.

    Checkpoints went to host memory one at a time (`hidden_states.to("cpu", non_blocking = True)`, models/_utils.py:657
    of 2024.8) until 2024.11.10 had buffers for them.
    """
    # embedding and head leave the card for their trained copies (models/llama.py:1930-1960 of 2024.8)
    own = trainer.keeps(s, placed=True) | {"keeps_originals": False, "buffer": buffered(s), "mask_positions": masked(s)}
    own |= {"untrained": untrained(s), "wide": skipped(s)}
    if wide := forced(s):
        own |= {"forced": wide, "wrapped": False}
    if not s.offload.activations:
        return own
    early: dict[str, Any] = {"streams": "each", "pageable": True}
    return own | ({"streams": "buffers"} if at_least(shared.ran(s, RELEASES), CUT) else early)


def buffered(s: Scenario) -> int:
    """Elements of the largest 4-bit weight that its own functions dequantise into a buffer, which they keep for good.

    The functions run where adapters have no dropout, and those of linears that belong together are all there
    (models/llama.py:2613-2680 of 2025.6.1). 0 if there is no buffer.
    """
    arch = s.architecture
    if s.method != "qlora" or not s.lora or s.lora.dropout or arch.family not in FUNCTIONS:
        return 0
    if not at_least(str(s.versions["unsloth"]), BUFFERED):
        return 0
    sizes = [0]
    for spec, _ in layer_kinds(arch):
        here = {linear.name.rpartition(".")[2]: linear for linear in adapted(arch, spec, s.lora.modules)}
        biased = {t.name.split(".")[-2] for t in layer_tensors(arch, spec) if t.name.endswith(".bias")}
        for names in TOGETHER:
            if here.keys() >= set(names) and biased.isdisjoint(names):
                sizes += [here[name].inputs * here[name].outputs for name in names]
    return max(sizes)


def skipped(s: Scenario) -> int:
    """Elements of a vision tower's linears that stay in 16 bits beside a base in four.

    Modules called vision_tower are among those that its loader never quantises (unsloth_zoo 2026.2.1 peft_utils.py:35,
    `SKIP_QUANTIZATION_MODULES`; not yet in 2026.1.1).
    """
    if s.method != "qlora" or not (s.images or s.vision_tower) or not at_least(str(s.versions["unsloth"]), SKIPS):
        return 0
    tower = vision_tensors(s.architecture)
    return sum(t.elements * t.count for t in tower if t.kind == "linear" and "vision_tower" in t.name)


def masked(s: Scenario) -> int:
    """Positions of the masks that Gemma 2 keeps where no flash-attn caps its scores: in fp16, on a card before Ampere.

    It has done so from the first release with the model, 2024.7, on (commit cc4c5d7785).
    """
    if s.architecture.family != "gemma2" or s.precision != "fp16":
        return 0
    return s.seq_len if at_least(str(s.versions["unsloth"]), SHORTER) else s.architecture.max_positions


def path(s: Scenario, usual: Path) -> Path:
    """The loss path, by release.

    A kernel reads the logits in the type of the model, caps them where the model would (`DO_SOFTCAPPING`), and writes
    their gradient over them (kernels/cross_entropy_loss.py of 2024.8); Accelerate then casts those that the model
    returns to fp32. From 2025.3.19 on, before the newest, short micro batches took that way, too. 2025.9.1 makes the
    gradients in forward, compiled, in chunks: see `counted`. Where linears round their weights, the head does so in the
    former way alone, which takes more than a long micro batch's chunks do.

    It finds the loss in a model's source by patterns. A model that none of them matches makes all logits, casts them to
    fp32 itself, and hands them to that kernel (unsloth_zoo 2025.10.12 loss_utils.py:112, `UnslothForCausalLMLoss`).
    """
    if s.architecture.family in UNMATCHED and not at_least(str(s.versions["unsloth"]), MATCHED):
        return Path("flash", head_fp32=True, in_place=True)
    ran, version = shared.ran(s, RELEASES), str(s.versions["unsloth"])
    between = at_least(ran, SHORT) and ran != NEWEST
    whole = Path("flash", in_place=True, caps=True, metrics=4 if trainer.wrapped(s) and not forced(s) else 0)
    if s.loss == "full" or (between and s.rows * s.longest_len <= WHOLE):
        return whole
    if between and s.qat_scheme != "none":
        return replace(whole, kept=WHOLE / (s.rows * s.longest_len))
    if s.loss != "fused" or not at_least(version, OFF):
        return usual
    return replace(usual, chunks=counted(version))


def counted(version: str) -> Chunks:
    """The way in which the fused loss of a release, OFF or later, counts its chunks."""
    return next(way for first, way in COUNTED.items() if at_least(version, first))


def notes(s: Scenario) -> Iterator[str]:
    """Notes on parts of Unsloth that are computed otherwise."""
    yield from shared.told(s, RELEASES)
    if forced(s):
        yield "Unsloth does not compute Gemma 3 in fp16, but in fp32 around products in fp16"
    else:
        kernels = "Unsloth's kernels for norms, rotation, MLP and adapters"
        yield f"{kernels} keep less than the layers computed, Transformers'"
    if s.checkpoint_gb:
        yield f"it loads a copy in four bits of {s.checkpoint_gb:g} GB, linears that it leaves in 16 bits among them"
