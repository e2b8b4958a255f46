"""Combinations of settings that no framework, or none of PyTorch's own parallelism, can run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from calc.base.optimizers import OPTIMIZERS
from calc.base.refusal import Refusal
from calc.base.units import GB
from calc.base.versions import at_least
from calc.models.architecture import BEFORE, parameters
from calc.models.kernels import SDPA_FLASH_HEAD, replaced
from calc.models.lora import EMBEDDING, HEAD, NORMS, adapts_experts
from calc.scenario.scenario import Lora, Scenario
from calc.scenario.words import DEEPSPEED, FSDP, OWN_SHARDINGS, SHARDINGS, Generates

ON_PEFT = ("transformers", "llamafactory", "axolotl", "ms-swift", "unsloth")  # trainers that call PEFT
ON_KERNELS = ("torch", "trl")  # frameworks for which kernels in place of a model's own operations were read
# frameworks with a switch for Liger's kernels, of which the refusals of each say more
ON_LIGER = (*ON_KERNELS, "openrlhf", "verl")
# frameworks and trainers with which a share of Megatron-core's hybrid device optimizer was read
HYBRID = ("verl", "megatron", "megatron-swift")
# the sizes of buckets in DeepSpeed's configuration, and the shardings that read them
BUCKETS: Mapping[str, tuple[str, ...]] = {
    "reduce_bucket_size": DEEPSPEED, "stage3_prefetch_bucket_size": ("zero3",),
    "stage3_param_persistence_threshold": ("zero3",),
}  # fmt: skip
# the first releases of TRL whose trainers keep a frozen copy of an adapter that they train on (`add_adapter("ref", …)`)
REF_ADAPTER: Mapping[str, str] = {"dpo": "0.29.0", "grpo": "0.27.0", "kto": "1.8.0"}
COMPILES = ("own", "torchtitan", "torchtune")  # trainers whose torch.compile is modelled: a layer at a time
# trainers that run PEFT's own linears, with which 8 bits and DoRA are modelled: Unsloth has kernels of its own
PLAIN_PEFT = ("own", *[name for name in ON_PEFT if name != "unsloth"])
# modules outside the layers that adapters may be beside, and what a refusal allows in place of each
BESIDE_ENDS = {EMBEDDING: "any but the embedding", HEAD: "any but the head"}
# trainers whose adapters beside an embedding were read: PEFT's, and ColossalAI's of the same operations
ADAPT_ROWS = ("own", *ON_PEFT, "colossalai")
WHOLE_COPIES = ("none", "ddp", "zero1", "zero2", "zero3")  # sharding beside which modules are trained as copies
QUANTISE_EXPERTS = ("own", "axolotl")  # trainers whose routed experts in four bits are modelled
ORTHOGONAL = ("own", "ms-swift", "llamafactory")  # trainers whose Muon, of PyTorch's operations, was read
MASKS = ("megatron",)  # trainers whose data loader makes masks of all pairs of positions where it is asked to
MEGATRON_FSDP = ("megatron",)  # trainers whose Megatron-FSDP is modelled
ENGINE_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")  # Transformer Engine's, of 8 bits
MEGATRON = ("megatron", "megatron-swift")  # trainers on Megatron-core that choose what its optimizer keeps
FUSES = ("megatron", "megatron-swift")  # trainers that choose what fuses the loss
# pieces of a stage whose weights all stay gathered: torch 2.13 `_add_unshard_reshard`, max_active_stages
ALL_GATHERED = 3
BLOCKS = {"mxfp8": 32, "nvfp4": 128}  # elements, and tokens, of a block that kernels scale


def tensor_fault(s: Scenario) -> Refusal | None:
    """The reason why DTensor cannot cut the layers of `s`, in one line, or None."""
    t, given = s.tensor_parallel, f"with tensor_parallel = {s.tensor_parallel}"
    if s.sequence_parallel and t == 1:
        return Refusal("sequence_parallel", f"true {given}", "with GPUs that share a layer")
    if t == 1:
        return None
    if s.sharding not in ("none", "fsdp2"):
        return Refusal(
            "sharding", f"{s.sharding!r} {given}", "fsdp2, or none where no GPU is left to share shards with"
        )
    if s.method != "full":
        return Refusal("method", f"{s.method!r} {given}", "full; adapters of cut layers are not modelled")
    if s.loss != "full" and not (s.loss == "chunked" and s.trainer == "torchtitan"):
        return Refusal("loss", f"{s.loss!r} {given}", "full, or with trainer torchtitan its chunks")
    if s.sequence_parallel and s.task not in ("pretrain", "sft"):
        return Refusal("sequence_parallel", f"true for {s.task}", "for pretrain and sft, whose loss takes cut logits")
    if s.sequence_parallel and (s.architecture.experts or s.architecture.norms != BEFORE):
        return Refusal(
            "sequence_parallel", "true", "false; no plan is known", f"for the family {s.architecture.family}"
        )
    return None


def context_fault(s: Scenario) -> Refusal | None:
    """The reason why attention cannot reach over GPUs that share sequences, in one line; None if it can or need not."""
    if s.context_parallel == 1:
        return None
    given = f"with context_parallel = {s.context_parallel}"
    if not s.packing:
        return Refusal("packing", f"false {given}", "true; sequences are cut without their padding")
    if s.attention != "flash":
        return Refusal("attention", f"{s.attention!r} {given}", "flash")
    arch = s.architecture
    if arch.mla or arch.attention_sinks or arch.fused_qkv or arch.recurrent:
        return Refusal("context_parallel", s.context_parallel, "1; not modelled", f"for {arch.family}")
    return None


def ring_fault(s: Scenario) -> Refusal | None:
    """The reason why PyTorch's ring attention cannot run over the sequences of `s`, in one line, or None.

    It replaces SDPA's own kernels, supports only a causal mask, and cuts every sequence into equal pieces.
    """
    n, arch = s.context_parallel, s.architecture
    if n == 1:
        return None
    given = f"with context_parallel = {n}"
    if s.task not in ("pretrain", "sft"):
        return Refusal("context_parallel", f"{n} for {s.task}", "1, or for pretrain and sft", "with torch")
    if s.sharding not in ("ddp", "fsdp2"):
        return Refusal("sharding", f"{s.sharding!r} {given}", "ddp, fsdp2")
    if s.attention != "sdpa":
        return Refusal("attention", f"{s.attention!r} {given}", "sdpa, whose place PyTorch's ring takes")
    if s.precision == "fp32":
        return Refusal("precision", f"'fp32' {given}", "16 bits for SDPA's flash kernel")
    if s.packing:
        return Refusal("packing", f"true {given}", "false; the ring knows no borders between sequences")
    if arch.mla or arch.attention_sinks or arch.softcap_attn or arch.head_dim > SDPA_FLASH_HEAD:
        return Refusal("context_parallel", n, "1; SDPA's flash kernel cannot attend for it", f"for {arch.family}")
    if arch.recurrent:
        return Refusal("context_parallel", n, "1; a state passes through all positions", f"for {arch.family}")
    if arch.sliding_window is not None and s.seq_len > arch.sliding_window:
        return Refusal("seq_len", f"{s.seq_len} {given}", f"at most the model's window of {arch.sliding_window}")
    if s.seq_len % (2 * n):
        below = s.seq_len // (2 * n) * 2 * n
        return Refusal("seq_len", f"{s.seq_len} {given}", f"a multiple of 2 x {n}, as {below or 2 * n}")
    return None


def pipeline_fault(s: Scenario) -> Refusal | None:
    """The reason why PyTorch's 1F1B schedule cannot run the stages of `s`, in one line; None if it can or need not."""
    p = s.pipeline_parallel
    if p == 1:
        return None
    given = f"with pipeline_parallel = {p}"
    if s.task not in ("pretrain", "sft"):
        return Refusal("pipeline_parallel", f"{p} for {s.task}", "1, or for pretrain and sft", "with torch")
    fixed: dict[str, tuple[str | int, ...]] = {
        "method": ("full",),
        "loss": ("full",),
        "precision": ("bf16", "fsdp-mixed", "fp32"),
        "sharding": ("none", "fsdp2"),
    }
    for field, allowed in fixed.items():
        if (value := getattr(s, field)) not in allowed:
            return Refusal(field, f"{value!r} {given}", ", ".join(map(str, allowed)))
    if s.optimizer == "none":
        return Refusal("optimizer", f"'none' {given}", "one that trains")
    if s.packing:
        return Refusal("packing", f"true {given}", "false; stages hand on tensors of one size")
    if s.offload.parameters or s.offload.optimizer:
        field = "parameters" if s.offload.parameters else "optimizer"
        return Refusal(f"offload.{field}", f"true {given}", "false")
    window = s.architecture.sliding_window
    if window is not None and s.attention == "sdpa" and s.seq_len > window:
        return Refusal("seq_len", f"{s.seq_len} {given} and sdpa", f"at most the model's window of {window}")
    if s.accumulation < p:
        least = p * s.rows * s.data_parallel
        return Refusal("global_batch", f"{s.global_batch} {given}", f"a micro batch for each stage, at least {least}")
    return _interleaved_fault(s)


def _interleaved_fault(s: Scenario) -> Refusal | None:
    """The reason why PyTorch's interleaved 1F1B cannot run the pieces of a stage, in one line, or None.

    Micro batches go through a piece in equal rounds (torch 2.13 `distributed/pipelining/schedules.py`,
    `ScheduleInterleaved1F1B`).
    """
    if s.virtual_pipeline == 1:
        return None
    if s.virtual_pipeline > ALL_GATHERED:
        allowed = f"at most {ALL_GATHERED}; of more not all stay gathered"
        return Refusal("virtual_pipeline", s.virtual_pipeline, allowed)
    if s.accumulation % (s.accumulation // s.pipeline_parallel):
        step = s.pipeline_parallel * s.rows * s.data_parallel
        given = f"{s.global_batch} with virtual_pipeline = {s.virtual_pipeline}"
        return Refusal("global_batch", given, f"a multiple of {step}, so that stages take turns")
    return None


def whole_sequences(s: Scenario, why: str) -> Refusal | None:
    """The reason why a framework's trainer cannot cut sequences, in one line; None if no cut is asked for."""
    if s.context_parallel == 1:
        return None
    return Refusal("context_parallel", s.context_parallel, f"1; {why}", f"with {s.framework}")


def whole_layers(s: Scenario, why: str) -> Refusal | None:
    """The reason why a framework's trainer cannot spread layers over GPUs, in one line; None if it is not asked to."""
    if s.pipeline_parallel > 1:
        return Refusal("pipeline_parallel", s.pipeline_parallel, "1; it has no stages", f"with {s.framework}")
    if s.tensor_parallel > 1:
        return Refusal("tensor_parallel", s.tensor_parallel, f"1; {why}", f"with {s.framework}")
    return Refusal("sequence_parallel", "true", f"false; {why}", f"with {s.framework}") if s.sequence_parallel else None


def cut_alike(s: Scenario) -> Refusal | None:
    """The reason why a role's layers or sequences cannot be cut as it asks, in one line; None if all match the job."""
    for name in s.roles:
        role = s.role(name)
        for degree in ("tensor_parallel", "context_parallel") if role else ():
            given, job = getattr(role, degree), getattr(s, degree)
            if given != job:
                return Refusal(f"roles.{name}.{degree}", given, f"{job}, as in the whole job", f"with {s.framework}")
    return None


def segments_fault(s: Scenario) -> Refusal | None:
    """The reason why expandable segments do not go with a vLLM that sleeps, in one line; None if they do or need not.

    vllm/device_allocator/cumem.py asserts it; verl switches expandable segments off while its vLLM has the card.
    """
    if not (s.rollout and s.rollout.sleep and s.expandable_segments):
        return None
    return Refusal("expandable_segments", "true with rollout.sleep", "false, as vLLM that sleeps refuses them")


def fsdp_fault(s: Scenario) -> Refusal | None:
    """The reason why FSDP cannot reduce gradients or keep adapters as `s` asks, in one line, or None.

    A flat parameter has one type: "Must flatten tensors with uniform dtype" (torch `distributed/fsdp/_flat_param.py`).
    """
    if s.no_sync and s.sharding not in FSDP:
        return Refusal("no_sync", f"true with sharding {s.sharding}", f"with {', '.join(FSDP)}")
    if s.no_sync and s.pipeline_parallel > 1:
        return Refusal("no_sync", "true with pipeline_parallel", "false; stages reduce once a step anyway")
    if not s.lora or s.lora.units == "own":
        return None
    for place, given, allowed in (("sharding", s.sharding, "fsdp1"), ("method", s.method, "lora")):
        if given != allowed:
            return Refusal("lora.units", f"'layer' with {place} {given}", f"own, or with {allowed}")
    one = "bf16" if s.precision == "bf16" else "fp32"
    if s.lora.dtype != one:
        return Refusal("lora.dtype", f"{s.lora.dtype!r} with lora.units layer", f"{one}, as the layer")
    return None


def own_units(s: Scenario) -> Refusal | None:
    """The reason why adapters cannot lie in their layer's flat parameter: PEFT's wrapping policy (`utils/other.py`)."""
    if s.lora and s.lora.units != "own":
        return Refusal("lora.units", repr(s.lora.units), "own, by PEFT's wrapping policy", f"with {s.framework}")
    return None


def sharding_fault(s: Scenario) -> Refusal | None:
    """The reason why precision, offload, method or FSDP settings do not go with the sharding of `s`, or None."""
    if fault := fsdp_fault(s):
        return fault
    if s.expert_imbalance > 1 and s.expert_parallel == 1:
        return Refusal("expert_imbalance", f"{s.expert_imbalance:g}", "1, or with expert_parallel above 1")
    if s.sharding not in SHARDINGS and s.sharding != "none" and s.sharding not in OWN_SHARDINGS.get(s.trainer, ()):
        owners = ", ".join(name for name, own in OWN_SHARDINGS.items() if s.sharding in own)
        return Refusal("sharding", f"{s.sharding!r} with {s.framework}", f"with torch and trainer {owners}")
    if s.precision == "fsdp-mixed" and s.sharding not in FSDP:
        return Refusal("precision", f"'fsdp-mixed' with sharding {s.sharding}", f"with {', '.join(FSDP)}")
    if s.sharding in DEEPSPEED and s.layout != "mixed":
        return Refusal("precision", f"{s.precision!r} with sharding {s.sharding}", "mixed, fp16; DeepSpeed has both")
    if s.precision == "fp16" and s.sharding in FSDP:
        return Refusal("sharding", f"{s.sharding!r} with precision fp16", f"none, ddp, {', '.join(DEEPSPEED)}")
    if (s.grad_dtype == "fp16") is not (s.precision == "fp16" and s.sharding in DEEPSPEED and s.grad_dtype != "fp32"):
        allowed = "fp16, fp32" if s.precision == "fp16" and s.sharding in DEEPSPEED else "bf16, fp32"
        return Refusal("grad_dtype", f"{s.grad_dtype!r} with precision {s.precision}", allowed)
    if s.offload.parameters and s.sharding not in ("zero3", *FSDP):  # zero/config.py of deepspeed 0.16.4: stage 3 alone
        return Refusal("offload.parameters", f"true with sharding {s.sharding}", f"with zero3, {', '.join(FSDP)}")
    if s.offload.optimizer and s.sharding not in (*DEEPSPEED, *FSDP, "megatron"):
        allowed = ", ".join((*DEEPSPEED, *FSDP, "megatron"))
        return Refusal("offload.optimizer", f"true with sharding {s.sharding}", f"with {allowed}")
    along = s.offload.parameters and s.sharding in FSDP and s.framework != "verl"  # the step runs where the weights are
    if (s.offload.optimizer or along) and OPTIMIZERS[s.optimizer].bitsandbytes:
        allowed = "adamw; bitsandbytes steps on a GPU, and Accelerate makes it DeepSpeedCPUAdam, with fp32 states"
        moved = "offload.optimizer" if s.offload.optimizer else "offload.parameters"
        return Refusal("optimizer", f"{s.optimizer!r} with {moved}", allowed)
    if s.sharding == "fsdp2" and OPTIMIZERS[s.optimizer].bitsandbytes:
        # `zeros_like(p)` and the kernels' `data_ptr()` see a DTensor (optim/optimizer.py:384 of 0.50.2, issue 1633)
        allowed = "adamw, adamw-torchao-8bit; bitsandbytes' kernels take no DTensors, as parameters of FSDP 2 are"
        return Refusal("optimizer", f"{s.optimizer!r} with sharding fsdp2", allowed)
    if s.method == "qlora" and s.sharding == "zero3" and s.checkpointing != "full":
        # `matmul_4bit(x, self.weight.t())` of older bitsandbytes keeps a view of the gathered weight for backward
        return Refusal("checkpointing", f"{s.checkpointing!r} with method qlora and sharding zero3", "full")
    if s.method == "qlora" and s.sharding == "zero3" and s.offload.parameters:
        return Refusal("offload.parameters", "true with method qlora and sharding zero3", "false; not modelled")
    return None


def eight_bits_fault(s: Scenario) -> Refusal | None:
    """The reason why the frozen linears of `s` cannot be in 8 bits, in one line, or None."""
    if not s.load_in_8bit:
        return None
    if not _on_plain_peft(s):
        other = f"trainer {s.trainer}" if s.framework == "torch" else s.framework
        allowed = f"false, or with trl, or torch and trainer {', '.join(PLAIN_PEFT)}"
        return Refusal("load_in_8bit", f"true with {other}", allowed)
    if s.sharding not in ("none", "ddp") or s.together > 1:
        return Refusal("load_in_8bit", f"true with sharding {s.sharding}", "false, or with none, ddp; not modelled")
    return None


def kernels_fault(s: Scenario) -> Refusal | None:
    """The reason why the kernels of `s` cannot run its layers, in one line, or None.

    Liger's norms gather DTensors whole (liger-kernel 0.8.5 `ops/rms_norm.py:658`).
    """
    if s.kernels == "eager":
        return None
    if s.framework not in (ON_LIGER if s.kernels == "liger" else ON_KERNELS):
        allowed = "eager, liger" if s.framework in ON_LIGER else "eager; not modelled there"
        return Refusal("kernels", f"{s.kernels!r} with {s.framework}", allowed)
    if s.kernels == "automodel" and (s.framework, s.trainer) != ("torch", "own"):
        return Refusal("kernels", f"'automodel' with {_loop(s)}", "eager, liger")
    if s.tensor_parallel > 1:
        return Refusal("kernels", f"{s.kernels!r} with tensor_parallel = {s.tensor_parallel}", "eager")
    if not replaced(s.kernels, s.architecture.family):
        allowed = "eager; Liger has none for it that is modelled" if s.kernels == "liger" else "eager, liger"
        return Refusal("kernels", repr(s.kernels), allowed, f"for the family {s.architecture.family}")
    return None


def _beside(
    s: Scenario, field: str, given: str, usual: str, fixed: Mapping[str, tuple[str | int, ...]]
) -> Refusal | None:
    """The refusal of what a field was given beside the first other one that has none of its `fixed` values, if any."""
    for name, values in fixed.items():
        if (value := getattr(s, name)) not in values:
            with_these = f"{usual}, or with {name} {', '.join(map(str, values))}"
            return Refusal(field, f"{given} with {name} {value}", with_these)
    return None


def _barred(field: str, given: str, usual: str, barred: Mapping[str, bool]) -> Refusal | None:
    """The refusal of what a field was given with the first of what is `barred` and there, if any."""
    found = next((place for place, there in barred.items() if there), None)
    return Refusal(field, f"{given} with {found}", f"{usual}; not modelled there") if found else None


def outputs_fault(s: Scenario) -> Refusal | None:
    """The reason why a loop cannot treat its outputs as `s` says, in one line, or None: trainers do as their code does.

    Of losses that stream there are no logits to keep, but hidden states if the model returns them, and a pipeline's
    schedule keeps those of its own. A model of reference has outputs, too, which no field says of a loop of one's own.
    """
    if s.output_hidden_states and (s.outputs_kept == "none" or s.trainer != "own"):
        given = f"true with outputs_kept {s.outputs_kept}" if s.trainer == "own" else f"true with {_loop(s)}"
        return Refusal("output_hidden_states", given, "false, or in your own loop with outputs_kept")
    if s.outputs_kept == "none" and not s.outputs_fp32:
        return None
    field = "outputs_kept" if s.outputs_kept != "none" else "outputs_fp32"
    asked, usual = (s.outputs_kept, "none") if field == "outputs_kept" else ("true", "false")
    fixed: dict[str, tuple[str | int, ...]] = {
        "framework": ("torch",), "trainer": ("own", "colossalai"),
        "task": ("pretrain", "sft", "dpo", "orpo", "simpo"),
        "loss": ("full", "fused", "cut") if s.output_hidden_states else ("full",), "pipeline_parallel": (1,),
    }  # fmt: skip
    if fault := _beside(s, field, asked, usual, fixed):
        return fault
    if s.has("reference") and s.trainer == "own":
        return Refusal(field, f"{asked} with roles.reference", f"{usual}, or roles.reference none")
    return None


def narrow_fault(s: Scenario) -> Refusal | None:
    """The reason why a loop's cross entropy does not read logits as they are, in one line, or None."""
    if s.loss_fp32:
        return None
    fixed: dict[str, tuple[str | int, ...]] = {
        "framework": ("torch",), "trainer": ("own",), "task": ("pretrain", "sft"), "loss": ("full",),
        "layout": ("bf16", "fsdp-mixed"), "compile": ("none",), "pipeline_parallel": (1,), "outputs_fp32": (0,),
    }  # fmt: skip
    return _beside(s, "loss_fp32", "false", "true", fixed)


def grouping_fault(s: Scenario) -> Refusal | None:
    """The reason why batches cannot be grouped by length, in one line; None if they can or need not.

    Packs are all as long; of sequences end to end other batches would be the fullest.
    """
    if not s.group_by_length:
        return None
    field = "group_by_length"
    if s.framework not in ON_KERNELS or s.trainer not in ("own", *ON_PEFT):
        who = f"trainer {s.trainer}" if s.framework in ON_KERNELS else s.framework
        return Refusal(field, f"true with {who}", f"false; with torch, trl and trainer own, {', '.join(ON_PEFT)}")
    for name in ("packing", "padding_free"):
        if getattr(s, name):
            return Refusal(field, f"true with {name}", "false, or with batches that are padded")
    return None


def streams_fault(s: Scenario) -> Refusal | None:
    """The reason why checkpoints cannot wait on the host, in one line; None if they can or need not."""
    if not s.offload.activations:
        return None
    field = "offload.activations"
    if s.framework not in ON_KERNELS:
        return Refusal(field, f"true with {s.framework}", "false; not modelled there")
    if s.checkpointing != "full":
        return Refusal(field, f"true with checkpointing {s.checkpointing}", "with full, whose checkpoints move")
    if s.task not in ("pretrain", "sft", "rm", "dpo"):
        return Refusal(field, f"true for {s.task}", "false")
    return Refusal(field, "true where GPUs share sequences", "false; not modelled") if s.together > 1 else None


def hybrid_fault(s: Scenario) -> Refusal | None:
    """The reason why Adam cannot step a part of the parameters on the host, in one line; None if it can or need not.

    Megatron-core's `HybridDeviceOptimizer` does.
    """
    if not (share := s.offload.fraction):
        return None if s.offload.masters else Refusal("offload.masters", "false", "true, or with offload.fraction")
    field = "offload.fraction"
    if s.framework not in HYBRID and s.trainer not in HYBRID:
        return Refusal(field, f"{share:g} with {s.framework}", "0; not modelled there")
    if s.sharding != "megatron":
        return Refusal(field, f"{share:g} with sharding {s.sharding}", "0")
    if s.trainer in HYBRID and ((share == 1 and s.offload.masters) or s.offload.optimizer):
        given = "with offload.optimizer" if s.offload.optimizer else f"with trainer {s.trainer}"
        return Refusal(field, f"{share:g} {given}", "below 1; offload.optimizer alone steps all of it there")
    return None


def precision_fault(s: Scenario) -> Refusal | None:
    """The reason why Adam cannot keep masters and moments in formats of their own, in one line; None if it can or
    need not.

    `OptimizerConfig.__post_init__`; a hybrid device optimizer has fp32 alone.
    """
    field = "use_precision_aware_optimizer"
    if not s.use_precision_aware_optimizer:
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if (asked := getattr(s, name)) != "fp32":
                return Refusal(name, asked, f"fp32, or with {field}")
        return None
    if s.trainer not in MEGATRON:
        return Refusal(field, f"true with {_loop(s)}", f"false, or with trainer {', '.join(MEGATRON)}")
    if not OPTIMIZERS[s.optimizer].aware:
        allowed = ", ".join(name for name, own in OPTIMIZERS.items() if own.aware)
        return Refusal("optimizer", f"{s.optimizer} with {field}", allowed)
    if s.data_parallel_sharding_strategy != "no_shard":
        return Refusal(field, "true with Megatron-FSDP", "false; not modelled")
    if s.offload.states:
        moved = "optimizer" if s.offload.optimizer else "fraction"
        return Refusal(field, f"true with offload.{moved}", "false; offload.masters says where its masters are")
    return None


def vocabulary_fault(s: Scenario) -> Refusal | None:
    """The reason why a teacher's distributions cannot be compared with the student's, in one line, or None."""
    if not (teacher := s.role("teacher")) or teacher.architecture.vocab == (own := s.architecture.vocab):
        return None
    given = f"{teacher.model!r} with a vocabulary of {teacher.architecture.vocab:,}"
    return Refusal("roles.teacher.model", given, f"one with the student's, {own:,}")


def in_backward_fault(s: Scenario) -> Refusal | None:
    """The reason why parameters cannot step in backward, in one line; None if they can or need not.

    A parameter steps once a step: on one micro batch, without clipping, which needs all gradients first.
    """
    own = OPTIMIZERS[s.optimizer].in_backward
    if not s.optimizer_in_backward:
        given = f"false with optimizer {s.optimizer}"
        return Refusal("optimizer_in_backward", given, "true, as it steps no other way") if own else None
    given = "with optimizer_in_backward"
    allowed = ("none", "zero3") if own else ("none", "fsdp2")
    if s.sharding not in allowed:
        return Refusal("sharding", f"{s.sharding!r} {given} and optimizer {s.optimizer}", ", ".join(allowed))
    fixed: dict[str, tuple[str | int | bool, ...]] = {
        "task": ("pretrain", "sft"), "method": ("full",), "together": (1,),
        "precision": ("bf16", "fp32", "fsdp-mixed", "autocast"),
    }  # fmt: skip
    if s.sharding == "zero3":
        fixed["precision"] = ("mixed",)
    for field, values in fixed.items():
        if (value := getattr(s, field)) not in values:
            return Refusal(field, f"{value!r} {given}", ", ".join(map(str, values)))
    if s.accumulation > 1:
        one = s.rows * s.data_parallel
        return Refusal("global_batch", f"{s.global_batch} {given}", f"one micro batch a GPU, {one}")
    if s.optimizer == "none":
        return Refusal("optimizer", f"'none' {given}", "one that trains")
    if s.offload.optimizer or (s.offload.parameters and s.sharding != "zero3"):
        field = "optimizer" if s.offload.optimizer else "parameters"
        return Refusal(f"offload.{field}", f"true {given}", "false")
    return None


def _orthogonal_fault(s: Scenario) -> Refusal | None:
    """The reason why Muon is not modelled as `s` asks for it, in one line, or None; Megatron-core's loops say theirs.

    DeepSpeed has one of its own, which its configuration names (0.19.6 `runtime/zero/muon`).
    """
    given = repr(s.optimizer)
    if (s.framework, s.sharding) == ("torch", "megatron"):
        return None
    if s.framework != "torch" or s.trainer not in (*ORTHOGONAL, "transformers"):
        return Refusal("optimizer", given, f"with torch and trainer {', '.join(ORTHOGONAL)}, megatron, megatron-swift")
    if s.sharding == "zero2":
        if s.trainer not in ("own", "transformers"):
            return Refusal("optimizer", f"{given} with sharding zero2", "with trainer own, transformers; not modelled")
        if s.method != "full" or s.precision != "mixed" or s.offload.optimizer:
            return Refusal("optimizer", f"{given} with sharding zero2", "for method full in mixed, without offload")
        if not at_least(s.versions["deepspeed"], "0.18"):
            return Refusal("optimizer", f"{given} with deepspeed {s.versions['deepspeed']}", "0.18 or later")
        return None
    if s.sharding not in ("none", "ddp") or s.trainer not in ORTHOGONAL:
        return Refusal("optimizer", f"{given} with sharding {s.sharding}", "with none, ddp, zero2; not modelled")
    return None


def _low_rank_fault(s: Scenario) -> Refusal | None:
    """The reason why gradients are not projected, or are not modelled so, in one line, or None.

    ms-swift projects those of linears alone, and DeepSpeed's flat partitions have no rows.
    """
    fixed: dict[str, tuple[str | int, ...]] = {
        "framework": ("torch",), "trainer": ("own", "ms-swift"), "method": ("full",), "sharding": ("none", "ddp"),
        "tensor_parallel": (1,), "pipeline_parallel": (1,), "device_map": ("none",),
    }  # fmt: skip
    if fault := _beside(s, "optimizer", repr(s.optimizer), "adamw", fixed):
        return fault
    barred = {
        "routed experts": s.architecture.experts > 0,
        "images": s.images is not None,
        "optimizer_in_backward": s.optimizer_in_backward,
    }
    return _barred("optimizer", repr(s.optimizer), "adamw", barred)


def states_fault(s: Scenario) -> Refusal | None:
    """The reason why an optimizer is not modelled for `s`, or None: its states are bf16 whatever it steps in, or it
    makes matrices orthogonal, whole ones on each rank, or projects their gradients.
    """
    if OPTIMIZERS[s.optimizer].low_rank and (fault := _low_rank_fault(s)):
        return fault
    if OPTIMIZERS[s.optimizer].orthogonal and (fault := _orthogonal_fault(s)):
        return fault
    if not OPTIMIZERS[s.optimizer].narrow or (s.precision == "bf16" and s.sharding in ("none", "ddp", *FSDP)):
        return None
    shardings = ", ".join(("none", "ddp", *FSDP))
    return Refusal("optimizer", repr(s.optimizer), f"with precision bf16 and one of the shardings {shardings}")


def whole_gradients(s: Scenario) -> Refusal | None:
    """The reason why a framework cannot step parameters in backward, in one line; None if it need not."""
    if OPTIMIZERS[s.optimizer].in_backward:
        return Refusal("optimizer", repr(s.optimizer), "one that steps after backward", f"with {s.framework}")
    if s.optimizer_in_backward:
        return Refusal("optimizer_in_backward", f"true with {s.framework}", "false")
    return None


def experts_fault(s: Scenario) -> Refusal | None:
    """The reason why routed experts in four bits are not modelled for `s`, in one line, or None.

    Under FSDP every rank has loaded all of them before they are cut (axolotl 0.19 `loaders/model.py:700`).
    """
    if not s.quantize_moe_experts:
        return None
    field, arch = "quantize_moe_experts", s.architecture
    if not arch.experts or arch.experts_apart or arch.routing == "all" or arch.modeling:
        return Refusal(field, f"true with model {s.model}", "false; modelled for routed experts of Transformers")
    if s.framework != "torch" or s.trainer not in QUANTISE_EXPERTS:
        who = s.framework if s.framework != "torch" else f"trainer {s.trainer}"
        allowed = f"false; modelled with torch and trainer {', '.join(QUANTISE_EXPERTS)}"
        return Refusal(field, f"true with {who}", allowed)
    if not at_least(s.versions["transformers"], "5"):
        given = f"true with transformers {s.versions['transformers']}"
        return Refusal(field, given, "false; its experts are linears")
    if s.sharding not in ("none", "ddp"):
        return Refusal(field, f"true with sharding {s.sharding}", "false, or with none, ddp; not modelled")
    return None


# the loops, and the families of models, whose experts another library's code runs
READ_EXPERTS = {
    "torchtitan": (("own", "torchtitan"), ("qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v3")),
    "automodel": (("own",), ("qwen3_moe", "deepseek_v3", "gpt_oss")),
}


def implementation_fault(s: Scenario) -> Refusal | None:
    """The reason why another library's experts do not run, or are not modelled, in one line, or None."""
    field, arch = "experts_implementation", s.architecture
    if s.experts_implementation == "transformers":
        return None
    loops, families = READ_EXPERTS[s.experts_implementation]
    if s.framework != "torch" or s.trainer not in loops:
        return Refusal(field, f"{s.experts_implementation} with {_loop(s)}", "transformers")
    if not arch.experts or arch.family not in families:
        allowed = f"transformers; read for {', '.join(families)}"
        return Refusal(field, f"{s.experts_implementation} with model {s.model}", allowed)
    barred = {
        f"method {s.method}": s.method != "full" and (s.method, s.experts_implementation) != ("lora", "torchtitan"),
        f"precision {s.precision}": s.precision not in ("bf16", "fsdp-mixed"),
        f"sharding {s.sharding}": s.sharding not in ("none", "ddp", "fsdp2"),
        "tensor_parallel": s.tensor_parallel > 1,
        f"kernels {s.kernels}": s.kernels != "eager",
        f"compile {s.compile}": s.compile not in ("none", "loss"),
    }
    return _barred(field, s.experts_implementation, "transformers", barred)


def units_fault(s: Scenario) -> Refusal | None:
    """The reason why embedding and head are no FSDP units of their own, or are not modelled so, in one line, or None.

    Trainers do as their code does. A tied embedding belongs to the root.
    """
    if s.outer_units == "root":
        return None
    fixed: dict[str, tuple[str | int, ...]] = {
        "framework": ("torch",), "trainer": ("own",), "task": ("pretrain", "sft"),
        "sharding": ("fsdp1",) if s.outer_units == "embedding" else ("fsdp2",),
        "method": ("full",) if s.outer_units == "embedding" else ("full", "lora", "qlora"),
        "pipeline_parallel": (1,), "tensor_parallel": (1,),
    }  # fmt: skip
    if fault := _beside(s, "outer_units", s.outer_units, "root", fixed):
        return fault
    if s.architecture.tied:
        return Refusal("outer_units", f"{s.outer_units} with model {s.model}", "root; its embedding is the head, too")
    return None


def chunk_fault(s: Scenario) -> Refusal | None:
    """The reason why a fused loss is not made of chunks of so many tokens, or is not modelled so, in one line, or None.

    Trainers have chunks of their own, but ms-swift's GPUs that share sequences are told (CELOSS_PARALLEL_SIZE).
    """
    if s.loss_chunk_size is None or (s.trainer == "ms-swift" and s.loss == "chunked"):
        return None
    fixed: dict[str, tuple[str | int, ...]] = {
        "framework": ("torch",), "trainer": ("own",), "task": ("pretrain", "sft"), "loss": ("fused",),
        "pipeline_parallel": (1,), "tensor_parallel": (1,),
    }  # fmt: skip
    return _beside(s, "loss_chunk_size", str(s.loss_chunk_size), "null", fixed)


def layers_fault(s: Scenario) -> Refusal | None:
    """The reason why some layers alone are not run again, or are not modelled so, in one line, or None."""
    field, count = "checkpointed_layers", s.checkpointed_layers
    if count is None:
        return None
    fixed: dict[str, tuple[str | int, ...]] = {
        "framework": ("torch",), "trainer": ("own",), "task": ("pretrain", "sft"), "method": ("full",),
        "checkpointing": ("full",), "sharding": ("none", "ddp", "fsdp2"), "precision": ("bf16", "fsdp-mixed"),
        "pipeline_parallel": (1,), "tensor_parallel": (1,), "device_map": ("none",),
    }  # fmt: skip
    if fault := _beside(s, field, str(count), "null", fixed):
        return fault
    if count > s.architecture.layers:
        return Refusal(field, str(count), f"{s.architecture.layers} at most, all of its layers")
    barred = {"offload.activations": s.offload.activations, "images": s.images is not None}
    return _barred(field, str(count), "null", barred)


def resharding_fault(s: Scenario) -> Refusal | None:
    """The reason why gathered weights do not stay after forward, or are not modelled so, in one line, or None.

    Stages of a pipeline keep them in any case.
    """
    field, given = "reshard_after_forward", s.reshard_after_forward
    if given == "default":
        return None
    fixed: dict[str, tuple[str | int, ...]] = {
        "framework": ("torch",), "sharding": ("fsdp2",), "task": ("pretrain", "sft"), "pipeline_parallel": (1,),
        "trainer": ("own", "torchtitan", "axolotl") if given == "never" else ("own",),
    }  # fmt: skip
    if fault := _beside(s, field, given, "default", fixed):
        return fault
    barred = {
        "method qlora": s.method == "qlora",
        "images": s.images is not None,
        "outer_units freed": s.outer_units == "freed" and given == "never",
    }
    return _barred(field, given, "default", barred)


def replicate_fault(s: Scenario) -> Refusal | None:
    """The reason why groups of GPUs do not each shard the model, or are not modelled so, in one line, or None."""
    field, given = "data_parallel_replicate", s.data_parallel_replicate
    if given == 1:
        return None
    fixed: dict[str, tuple[str | int, ...]] = {
        "framework": ("torch", "verl"), "trainer": ("own", "transformers", "torchtitan"), "sharding": ("fsdp2",),
        "task": ("pretrain", "sft"), "pipeline_parallel": (1,),
    }  # fmt: skip
    if s.framework == "verl":  # fsdp_size, of either FSDP (workers/engine/fsdp/utils.py, create_device_mesh)
        fixed = {"sharding": FSDP}
    if fault := _beside(s, field, str(given), "1", fixed):
        return fault
    ranks = s.data_parallel * s.context_parallel
    if ranks % given or ranks == given:
        return Refusal(field, given, f"a divisor of {ranks} below it: the GPUs that can share one model's shards")
    return None


def devices_fault(s: Scenario) -> Refusal | None:
    """The reason why one process does not spread layers over its GPUs, or is not modelled so, in one line, or None."""
    if s.devices == 1:
        return None
    several, field = s.data_parallel > 1, "device_map"
    fixed: dict[str, tuple[str | int, ...]] = {
        "framework": ("torch",), "trainer": ("ms-swift",) if several else ("own", "transformers", "ms-swift"),
        "task": ("pretrain", "sft"), "sharding": ("ddp",) if several else ("none",), "method": ("full", "lora"),
        "tensor_parallel": (1,),
        "pipeline_parallel": (1,), "context_parallel": (1,), "expert_parallel": (1,), "compile": ("none",),
    }  # fmt: skip
    if fault := _beside(s, field, "auto", "none", fixed):
        return fault
    if s.devices > s.gpus_per_node:
        return Refusal(field, f"auto with {s.devices} GPUs", f"at most a node's {s.gpus_per_node} GPUs, in one process")
    barred = {
        "layers that attend to images": s.architecture.passed > 0,
        "a part that hears": s.architecture.sound is not None,
        "offload": s.offload.trained or s.offload.activations,
        "optimizer_in_backward": s.optimizer_in_backward,
        "a model whose head is its embedding": s.architecture.tied,
    }
    return _barred(field, "auto", "none", barred)


def checkpoint_fault(s: Scenario) -> Refusal | None:
    """The reason why a checkpoint in four bits is not read as its size says for `s`, in one line, or None.

    Transformers loads it as it is; trainers with models of their own quantise what they load.
    """
    if not s.checkpoint_gb:
        return None
    field, given = "checkpoint_gb", f"{s.checkpoint_gb:g}"
    if s.framework not in ON_KERNELS or s.trainer not in ("own", *ON_PEFT):
        who = f"trainer {s.trainer}" if s.framework in ON_KERNELS else s.framework
        return Refusal(field, f"{given} with {who}", f"null; with torch, trl and trainer own, {', '.join(ON_PEFT)}")
    if s.sharding not in ("none", "ddp"):
        return Refusal(field, f"{given} with sharding {s.sharding}", "null, or with none, ddp; not modelled")
    least, most = (b * parameters(s.architecture) / GB for b in (0.5, 2))
    if not least <= s.checkpoint_gb <= most:
        return Refusal(field, f"{given} for {s.model}", f"{least:.1f} to {most:.1f}, all in four bits and all in 16")
    return None


def unmodelled(s: Scenario) -> Refusal | None:
    """The reason why a framework that is not plain PyTorch cannot have some of its settings, in one line, or None."""
    faults = (
        kernels_fault, whole_gradients, states_fault, streams_fault, hybrid_fault, compile_fault, experts_fault,
        outputs_fault, checkpoint_fault, grouping_fault,
    )  # fmt: skip
    return next((reason for fault in faults if (reason := fault(s))), None)


def engine_fault(s: Scenario, engines: Sequence[Generates]) -> Refusal | None:
    """The reason why a framework's rollout cannot run where `s` has it, in one line; None if it can or need not.

    `engines`: those whose use by the framework was read.
    """
    if not s.rollout or s.rollout.engine in (*engines, "none"):
        return None
    return Refusal("rollout.engine", repr(s.rollout.engine), ", ".join((*engines, "none")), f"with {s.framework}")


def trainer_fault(s: Scenario, usual: str = "own") -> Refusal | None:
    """The reason why a framework cannot run another trainer than its `usual` one, in one line, or None."""
    return None if s.trainer == usual else Refusal("trainer", repr(s.trainer), usual, f"with {s.framework}")


def zero_fault(s: Scenario) -> Refusal | None:
    """The reason why settings of DeepSpeed's configuration for ZeRO-3 cannot be used, in one line, or None.

    The other frameworks write the configuration themselves, before they build the model: its memory-efficient linear
    stays on, its sizes are DeepSpeed's own.
    """
    where = f"with {s.framework} and sharding {s.sharding}"
    for field, on in {"memory_efficient_linear": s.memory_efficient_linear, "zero_init": s.zero_init}.items():
        if not on:
            return Refusal(field, f"false {where}", "true, or false with torch and zero3")
    sizes = {"max_live_parameters": s.max_live_parameters, "sub_group_size": s.sub_group_size}
    for field, size in sizes.items():
        if size is not None:
            return Refusal(field, f"{size} {where}", "none, or a size with torch and zero3")
    return None


def bucket_fault(s: Scenario) -> Refusal | None:
    """The reason why sizes of buckets of DeepSpeed's configuration cannot be used, in one line, or None."""
    for field, shardings in BUCKETS.items():
        size = getattr(s, field)
        if size is None:
            continue
        if s.framework not in ON_KERNELS or s.trainer == "colossalai":
            return Refusal(field, f"{size!r} with {_loop(s)}", "null; it writes the configuration itself")
        if s.sharding not in shardings:
            return Refusal(field, f"{size!r} with sharding {s.sharding}", f"null, or with {', '.join(shardings)}")
        if size == "auto" and s.trainer == "own":
            return Refusal(field, "'auto' with trainer own", "a number; DeepSpeed puts none in its place")
    return None


def compile_fault(s: Scenario) -> Refusal | None:
    """The reason why compiled layers or a compiled loss are not modelled for `s`, in one line, or None.

    What the partitioner saves was traced for layers of Llama's shape alone: two RMSNorms, a gated MLP, and beside its
    linears adapters of their type, without dropout.
    """
    if fault := float8_fault(s):
        return fault
    if s.async_tensor_parallel and not (s.sequence_parallel and s.compile in ("model", "model-and-loss")):
        given = f"true with sequence_parallel {str(s.sequence_parallel).lower()} and compile {s.compile}"
        allowed = "false, or with both sequence_parallel and compiled layers"
        return Refusal("async_tensor_parallel", given, allowed)
    if s.compile == "none":
        return None
    given = f"{s.compile!r}"
    if s.framework != "torch" or s.trainer not in COMPILES:
        who = s.framework if s.framework != "torch" else f"trainer {s.trainer}"
        return Refusal("compile", f"{given} with {who}", "none; not modelled")
    if s.task not in ("pretrain", "sft"):
        return Refusal("compile", f"{given} for {s.task}", "none; modelled for pretrain, sft")
    if s.loss in ("fused", "cut", "vocab-chunked") and s.compile != "model":
        return Refusal("compile", f"{given} with loss {s.loss}", "none, model; this loss is a kernel already")
    if s.kernels != "eager" and s.compile != "loss":
        allowed = "none, loss; modelled for a model's own operations"
        return Refusal("compile", f"{given} with kernels {s.kernels}", allowed)
    if s.compile == "loss":
        return None
    arch, norms = s.architecture, s.architecture.norms
    plain = (
        arch.norm in ("rms", "kernel", "kernel-listed")
        and arch.gated
        and not (arch.experts or arch.mla or arch.parallel or arch.joined)
    )
    plain = plain and not (arch.vision or arch.sound or arch.recurrent or arch.qk_norm_late)
    plain = plain and arch.names.mlp == "mlp"
    if not plain or norms.attention_output or norms.mlp_output or arch.residual_dropout or arch.attention_sinks:
        return Refusal("compile", f"{given} with model {s.model}", "none, loss; modelled for layers as Llama's")
    if s.method == "qlora":
        return Refusal("compile", f"{given} with method {s.method}", "none, loss; modelled for full, lora")
    if s.lora and (s.lora.dropout or s.lora.dtype == "fp32"):
        allowed = "none, loss; modelled for adapters in bf16 without dropout"
        return Refusal("compile", f"{given} with method {s.method}", allowed)
    if s.attention == "eager":
        return Refusal("compile", f"{given} with attention eager", "none, loss; modelled with sdpa, flash")
    if s.precision not in ("bf16", "fsdp-mixed") or s.sharded.family == "zero":
        allowed = "none, loss; modelled with bf16, fsdp-mixed"
        return Refusal("compile", f"{given} with precision {s.precision}", allowed)
    return None


def float8_fault(s: Scenario) -> Refusal | None:
    """The reason why float8 linears are not modelled for `s`, in one line, or None.

    Eager, torchao keeps a float8 copy of each weight, which was not traced. Kernels of MXFP8 take blocks of 32 elements
    of a weight and of the tokens, those of NVFP4 blocks of 128 (torchao 0.18 `mx_formats/kernels.py`,
    `mxfp8_quantize_cuda`; `nvfp4_training/nvfp4_linear.py`, `nvfp4_mm_triton`).
    """
    if s.trainer in MEGATRON or s.float8 in ("delayed", "blockwise") or s.fp8_param_gather:
        return engine_float8_fault(s)
    if s.float8 == "none":
        for field, asked, off in (
            ("float8_all_gather", s.float8_all_gather, "false, or with float8 tensorwise"),
            ("bf16_layers_at_end", s.bf16_layers_at_end, "null, or with float8"),
        ):
            if asked:
                return Refusal(field, str(asked).lower(), off)
        return None
    if s.compile not in ("model", "model-and-loss"):
        return Refusal("float8", f"{s.float8!r} with compile {s.compile}", "none; modelled with compiled layers")
    if s.float8_all_gather and (s.float8 != "tensorwise" or s.sharding != "fsdp2"):
        given = f"true with float8 {s.float8} and sharding {s.sharding}"
        return Refusal("float8_all_gather", given, "false; torchao gathers so with tensorwise under fsdp2")
    arch, n = s.architecture, BLOCKS.get(s.float8, 16)
    if s.bf16_layers_at_end and (s.pipeline_parallel > 1 or s.bf16_layers_at_end >= arch.layers):
        given = f"{s.bf16_layers_at_end} with pipeline_parallel = {s.pipeline_parallel}"
        return Refusal("bf16_layers_at_end", given, f"below the model's {arch.layers} layers, all of them on one GPU")
    cut = s.tensor_parallel if s.float8 in BLOCKS else 1
    widths = (arch.intermediate, arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim)
    if arch.hidden % n or any(width // cut % n for width in widths):
        return Refusal("float8", f"{s.float8!r} with model {s.model}", f"none; its linears are no multiples of {n}")
    tokens = s.micro_batch * s.seq_len // s.context_parallel
    if s.float8 in BLOCKS and tokens % n:
        return Refusal("float8", f"{s.float8!r} with {tokens} tokens a GPU", f"with a multiple of {n}")
    return None


def engine_float8_fault(s: Scenario) -> Refusal | None:
    """The reason why Transformer Engine's linears cannot multiply in 8 bits as `s` asks, or are not modelled so."""
    field, given = "float8", f"{s.float8!r} with {_loop(s)}"
    if s.trainer not in MEGATRON:
        if s.float8 in ("delayed", "blockwise"):
            return Refusal(field, given, f"none, or with trainer {', '.join(MEGATRON)}")
        return Refusal("fp8_param_gather", f"true with {_loop(s)}", f"false, or with trainer {', '.join(MEGATRON)}")
    for name, asked, off in (("float8_all_gather", s.float8_all_gather, "false"),
                             ("bf16_layers_at_end", s.bf16_layers_at_end, "null; not modelled")):  # fmt: skip
        if asked:
            return Refusal(name, f"{str(asked).lower()} with {_loop(s)}", off)
    if s.float8 == "none":
        return Refusal("fp8_param_gather", "true with float8 none", "false") if s.fp8_param_gather else None
    if s.float8 not in ENGINE_RECIPES:
        return Refusal(field, given, f"none, {', '.join(ENGINE_RECIPES)}")
    if s.fp8_param_gather and s.float8 == "mxfp8":  # its buffers stay bf16 unless those of gradients are reused
        return Refusal("fp8_param_gather", "true with float8 mxfp8", "false; not modelled")
    if s.data_parallel_sharding_strategy != "no_shard":
        return Refusal(field, f"{s.float8!r} with Megatron-FSDP", "none; not modelled")
    return None


def _on_peft(s: Scenario) -> bool:
    """True if PEFT makes the adapters, and Transformers' loop or one of its kin trains them."""
    return s.framework in ON_KERNELS and s.trainer in ("own", *ON_PEFT)


def _on_plain_peft(s: Scenario) -> bool:
    """True if PEFT's own code runs the linears beside which the adapters are."""
    return _on_peft(s) and s.trainer in PLAIN_PEFT


def saved_fault(s: Scenario) -> Refusal | None:
    """The reason why no copies of modules are trained beside adapters, in one line, or None."""
    if not s.lora or not s.lora.modules_to_save:
        return None
    field, asked = "lora.modules_to_save", f"[{', '.join(s.lora.modules_to_save)}]"
    if s.trainer == "megatron-swift":
        return _megatron_copies_fault(s)
    if not _on_peft(s) or s.task == "ppo":
        return Refusal(field, f"{asked} with {_loop(s)}", "none; not modelled there")
    if s.sharding not in WHOLE_COPIES or s.together > 1:
        return Refusal(
            field, f"{asked} with sharding {s.sharding}", f"none, or with sharding {', '.join(WHOLE_COPIES)}"
        )
    if s.precision == "fp16" and s.trainer != "unsloth":
        return Refusal(field, f"{asked} with precision 'fp16'", "none, or with bf16; copies in fp32 are not modelled")
    return _norms_fault(s) if NORMS in s.lora.modules_to_save else None


def _megatron_copies_fault(s: Scenario) -> Refusal | None:
    """The reason why Megatron-core's embedding and head have no copies, or are not modelled so, in one line, or None.

    A head that shares the embedding's weight has none of its own to copy (`output_layer` of GPTModel).
    """
    assert s.lora
    barred = {
        f"task {s.task}": s.task not in ("pretrain", "sft"),
        f"pipeline_parallel {s.pipeline_parallel}": s.pipeline_parallel > 1,
        NORMS: NORMS in s.lora.modules_to_save,
        "tied embeddings": s.architecture.tied,
    }
    asked = f"[{', '.join(s.lora.modules_to_save)}] with trainer megatron-swift"
    return _barred("lora.modules_to_save", asked, "none", barred)


def _norms_fault(s: Scenario) -> Refusal | None:
    """The reason why copies of all norms are not modelled, in one line, or None: of layers whose norms run alone."""
    arch = s.architecture
    barred = {
        f"trainer {s.trainer}": s.trainer in ("llamafactory", "unsloth"),
        f"compile {s.compile}": s.compile not in ("none", "loss"),
        f"model {s.model}": bool(arch.vision or arch.sound) or any(spec.mixer != "attention" for spec in arch.specs),
    }
    return _barred("lora.modules_to_save", NORMS, "none, or others", barred)


def ends_fault(s: Scenario) -> Refusal | None:
    """The reason why no adapter stands beside the embedding or the head, in one line, or None.

    A loss that reads the head's weight itself passes an adapter by.
    """
    if not s.lora:
        return None
    for module, others in BESIDE_ENDS.items():
        if module in s.lora.modules and (fault := _end_fault(s, s.lora, module, others)):
            return fault
    return None


def _end_fault(s: Scenario, lora: Lora, module: str, others: str) -> Refusal | None:
    """The reason why no adapter stands beside the `module`, in one line, or None; `others` stand for the rest."""
    field, either = "lora.targets", set(lora.modules_to_save) & {*BESIDE_ENDS}
    if either:
        return Refusal(field, f"{module} with lora.modules_to_save {min(either)}", "one of them")
    rows = module == EMBEDDING and s.framework == "torch" and s.trainer not in ADAPT_ROWS
    if s.framework != "torch" or s.architecture.megatron or rows:
        return Refusal(field, f"{module} with {_loop(s)}", f"{others}; not modelled there")
    if s.loss != "full" and module == HEAD and s.trainer != "unsloth":
        return Refusal(field, f"{module} with loss {s.loss}", f"{others}, or with loss full")
    if s.together > 1:
        return Refusal(field, f"{module} where GPUs share sequences", f"{others}; not modelled there")
    own = ("zero1", "zero2") if s.trainer == "colossalai" else ("none", "ddp")
    if s.sharding not in own:
        return Refusal(field, f"{module} with sharding {s.sharding}", f"{others}, or with sharding {', '.join(own)}")
    return None


def init_fault(s: Scenario) -> Refusal | None:
    """The reason why adapters do not start from a decomposition of weights, in one line, or None.

    PEFT refuses PiSSA beside packed weights (0.14 `tuners/lora/layer.py`, `pissa_init`).
    """
    if not s.lora or s.lora.init == "random":
        return None
    if not _on_peft(s):
        return Refusal("lora.init", f"{s.lora.init!r} with {_loop(s)}", "random")
    if s.lora.init == "pissa" and s.method == "qlora":
        return Refusal("lora.init", "'pissa' with method qlora", "random, olora")
    return None


def dora_fault(s: Scenario) -> Refusal | None:
    """The reason why rows of adapted weights have no magnitudes, or are not modelled so, in one line, or None."""
    if not s.lora or not s.lora.dora:
        return None
    if not _on_plain_peft(s):
        return Refusal("lora.dora", f"true with {_loop(s)}", "false; not modelled there")
    if s.sharding not in ("none", "ddp", "zero1", "zero2", "fsdp1") or s.together > 1:
        return Refusal("lora.dora", f"true with sharding {s.sharding}", "false, or with none, ddp, zero1, zero2, fsdp1")
    barred = {
        "compile": s.compile != "none",
        "load_in_8bit": s.load_in_8bit,
        "lora.init": s.lora.init != "random",
        # views of a flat parameter require gradients, and so would the product with the frozen weight
        "lora.units": s.sharding == "fsdp1" and s.lora.units != "own",
        **{f"lora.targets {end}": end in s.lora.modules for end in BESIDE_ENDS},
        "images.freeze": s.images is not None and s.images.freeze != "vision",
        "experts that get adapters": adapts_experts(s.architecture, s.lora.modules),
    }
    return _barred("lora.dora", "true", "false", barred)


def rounding_fault(s: Scenario) -> Refusal | None:
    """The reason why adapters are not trained beside rounded weights, or are not modelled so, in one line, or None."""
    if s.qat_scheme == "none":
        return None
    fixed: dict[str, tuple[str | int, ...]] = {
        "framework": ("torch",), "trainer": ("unsloth",), "task": ("pretrain", "sft"), "method": ("lora",),
        "precision": ("bf16", "fp16"),
    }  # fmt: skip
    if fault := _beside(s, "qat_scheme", s.qat_scheme, "none", fixed):
        return fault
    barred = {"images": s.images is not None, "routed experts": s.architecture.experts > 0}
    return _barred("qat_scheme", s.qat_scheme, "none", barred)


def ref_adapter_fault(s: Scenario) -> Refusal | None:
    """The reason why no copy of adapters is the reference, or is not modelled so, in one line, or None."""
    if not s.lora or not s.lora.ref_adapter:
        return None
    fixed: dict[str, tuple[str | int, ...]] = {
        "framework": ("trl",), "trainer": ("transformers",), "task": tuple(REF_ADAPTER), "sharding": ("none", "ddp"),
    }  # fmt: skip
    if fault := _beside(s, "lora.ref_adapter", "true", "false", fixed):
        return fault
    if not at_least(s.framework_version, REF_ADAPTER[s.task]):
        allowed = f"false; it came with {REF_ADAPTER[s.task]}"
        return Refusal("lora.ref_adapter", "true", allowed, f"with trl {s.framework_version}")
    other = s.role("reference")
    barred = {
        "no reference": other is None,
        "roles.reference.model": other is not None and other.model != s.model,
        "lora.modules_to_save": bool(s.lora.modules_to_save),
        "experts that get adapters": adapts_experts(s.architecture, s.lora.modules),
    }
    return _barred("lora.ref_adapter", "true", "false", barred)


def ia3_fault(s: Scenario) -> Refusal | None:
    """The reason why no vectors weigh what linears make, or are not modelled so, in one line, or None."""
    if not s.lora or not s.lora.ia3:
        return None
    fixed: dict[str, tuple[str | int, ...]] = {
        "framework": ("torch",), "trainer": ("own", "transformers"), "task": ("pretrain", "sft"), "method": ("lora",),
        "sharding": ("none", "ddp"), "tensor_parallel": (1,), "pipeline_parallel": (1,), "context_parallel": (1,),
        "compile": ("none",), "kernels": ("eager",),
    }  # fmt: skip
    if fault := _beside(s, "lora.ia3", "true", "false", fixed):
        return fault
    barred = {
        "lora.dora": s.lora.dora,
        "lora.count": s.lora.count > 1,
        "lora.init": s.lora.init != "random",
        "lora.dropout": s.lora.dropout > 0,
        "lora.modules_to_save": bool(s.lora.modules_to_save),
        **{f"lora.targets {end}": end in s.lora.modules for end in BESIDE_ENDS},
        "images": s.images is not None,
        "experts that get adapters": adapts_experts(s.architecture, s.lora.modules),
    }
    return _barred("lora.ia3", "true", "false", barred)


def tower_fault(s: Scenario) -> Refusal | None:
    """The reason why no vision tower is trained whole beside adapters, or is not modelled so, in one line, or None.

    DeepSpeed gives tower and adapters one type of 16 bits, with masters in fp32.
    """
    if not (s.images and s.images.train_whole):
        return None
    fixed: dict[str, tuple[str | int, ...]] = {
        "framework": ("torch",), "trainer": ("ms-swift",), "task": ("pretrain", "sft"), "method": ("lora",),
        "sharding": ("zero1", "zero2"),
    }  # fmt: skip
    if fault := _beside(s, "images.train_whole", "true", "false", fixed):
        return fault
    barred = {"images.freeze": s.images.freeze != "none", "layers that attend to images": s.architecture.passed > 0}
    return _barred("images.train_whole", "true", "false", barred)


def chosen_fault(s: Scenario) -> Refusal | None:
    """The reason why tokens have no adapters of their own, or are not modelled so, in one line, or None."""
    if not s.lora or s.lora.count == 1:
        return None
    field, given = "lora.count", str(s.lora.count)
    if s.framework != "torch" or s.trainer != "own":
        return Refusal(field, f"{given} with {_loop(s)}", "1; not modelled there")
    barred = {
        f"method {s.method}": s.method != "lora",
        f"sharding {s.sharding}": s.sharding not in ("none", "ddp", "fsdp2") or s.together > 1,
        f"precision {s.precision}": s.precision not in ("bf16", "fsdp-mixed"),
        f"compile {s.compile}": s.compile not in ("none", "loss"),
        "lora.dora": s.lora.dora,
        "lora.init": s.lora.init != "random",
        "lora.modules_to_save": bool(s.lora.modules_to_save),
        **{f"lora.targets {end}": end in s.lora.modules for end in BESIDE_ENDS},
        "images.freeze": s.images is not None and s.images.freeze != "vision",
        "experts that get adapters": s.experts_implementation == "transformers"
        and adapts_experts(s.architecture, s.lora.modules),
    }
    return _barred(field, given, "1", barred)


def mask_fault(s: Scenario) -> Refusal | None:
    """The reason why no data loader makes masks of all pairs of positions, in one line, or None."""
    if not s.create_attention_mask_in_dataloader or s.trainer in MASKS:
        return None
    return Refusal("create_attention_mask_in_dataloader", f"true with {_loop(s)}", "false")


def strategy_fault(s: Scenario) -> Refusal | None:
    """The reason why Megatron-FSDP does not share what is asked for, or is not modelled so, in one line, or None."""
    field, asked = "data_parallel_sharding_strategy", s.data_parallel_sharding_strategy
    if asked == "no_shard":
        return None
    if s.trainer not in MEGATRON_FSDP:
        return Refusal(field, f"{asked} with {_loop(s)}", "no_shard, or with megatron")
    if s.pipeline_parallel > 1:
        return Refusal("pipeline_parallel", f"{s.pipeline_parallel} with Megatron-FSDP", "1; not modelled")
    if s.offload.optimizer:
        return Refusal("offload.optimizer", "true with Megatron-FSDP", "false; not modelled")
    return None


def _loop(s: Scenario) -> str:
    """The training loop as a refusal names it: a trainer, or the framework itself."""
    return s.framework if s.trainer == "own" else f"trainer {s.trainer}"


def depths_fault(s: Scenario) -> Refusal | None:
    """The reason why no further tokens are predicted as is asked for, in one line, or None.

    slime and verl build no such layers unless asked (`--mtp-num-layers`, `model.mtp.enable`). ms-swift's `all-linear`
    is every linear of Transformer Engine's but the head (3.12 `swift/megatron/utils/utils.py`, `find_all_linears`), and
    so the one that joins both streams of a depth, whose adapters are modelled where ranks do not cut it.
    """
    field, asked = "mtp_num_layers", s.mtp_num_layers
    if asked is None:
        return None
    if s.trainer not in MEGATRON:
        return Refusal(field, f"{asked} with {_loop(s)}", "null; not modelled")
    if s.architecture.ssm:  # whose depths have several layers, which may be the same in each
        return Refusal(field, f"{asked} for the family {s.architecture.family}", "null; not modelled")
    if s.lora and s.lora.targets == "all-linear" and s.tensor_parallel > 1:
        given = f"'all-linear' with mtp_num_layers = {asked} and tensor_parallel = {s.tensor_parallel}"
        return Refusal("lora.targets", given, "a list; not modelled")
    if s.data_parallel_sharding_strategy != "no_shard":
        return Refusal(field, f"{asked} with Megatron-FSDP", "null; not modelled")
    return None


ONE_BY_ONE = ("layernorm", "self_attn", "mlp")  # parts of a layer around which a loop may put checkpoints of their own


def parts_fault(s: Scenario) -> Refusal | None:
    """The reason why parts of Transformers' layers do not run again one by one, or are not modelled so, or None."""
    if s.sharding == "megatron" or not s.recompute_modules:
        return None
    field, given = "recompute_modules", ", ".join(s.recompute_modules)
    if other := next((name for name in s.recompute_modules if name not in ONE_BY_ONE), None):
        return Refusal(field, f"{other} with sharding {s.sharding}", ", ".join(ONE_BY_ONE))
    fixed: dict[str, tuple[str | int, ...]] = {
        "framework": ("torch",), "trainer": ("own",), "task": ("pretrain", "sft"), "method": ("full",),
        "pipeline_parallel": (1,), "tensor_parallel": (1,), "context_parallel": (1,), "compile": ("none", "loss"),
        "precision": ("bf16", "fsdp-mixed"), "float8": ("none",),
    }  # fmt: skip
    if fault := _beside(s, field, given, "null", fixed):
        return fault
    arch = s.architecture
    plain = all(spec.mixer == "attention" and spec.mlp == "dense" for spec in arch.specs)
    ordered = not (arch.joined or arch.normed_after or arch.normed_stream or arch.parallel or arch.altup or arch.hyper)
    barred = {f"model {s.model}": not (plain and ordered and not arch.modeling), "images": s.images is not None}
    return _barred(field, given, "null", barred)


def together_fault(s: Scenario) -> Refusal | None:
    """The reason why layers do not run again together, or are not modelled so, in one line, or None.

    Chunks of an interleaved pipeline begin anew (Megatron-core 0.16.1 `transformer/transformer_block.py`,
    `_checkpointed_forward`).
    """
    field, count = "recompute_num_layers", s.recompute_num_layers
    if count is None or count == 1:
        return None
    fixed: dict[str, tuple[str | int, ...]] = {
        "framework": ("torch",), "trainer": MEGATRON, "checkpointing": ("full",), "virtual_pipeline": (1,),
        "data_parallel_sharding_strategy": ("no_shard",),
    }  # fmt: skip
    return _beside(s, field, str(count), "null", fixed)


def loss_fault(s: Scenario) -> Refusal | None:
    """The reason why a loss is not fused as is asked for, in one line, or None."""
    known = s.loss == "fused" and s.trainer in FUSES
    if s.cross_entropy_fusion_impl == "native" or known:
        return None
    allowed = "native, or with loss fused and trainer megatron, megatron-swift"
    return Refusal("cross_entropy_fusion_impl", repr(s.cross_entropy_fusion_impl), allowed)
