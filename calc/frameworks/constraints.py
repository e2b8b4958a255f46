"""Combinations of settings that no framework, or none of PyTorch's own parallelism, can run."""

from __future__ import annotations

from calc.base.optimizers import OPTIMIZERS
from calc.base.versions import at_least
from calc.models.architecture import BEFORE
from calc.models.kernels import SDPA_FLASH_HEAD, replaced
from calc.scenario.scenario import Scenario
from calc.scenario.words import DEEPSPEED, FSDP, OWN_SHARDINGS, SHARDINGS

ON_KERNELS = ("torch", "trl")  # frameworks for which kernels in place of a model's own operations were read
COMPILES = ("own", "torchtitan", "torchtune")  # trainers whose torch.compile is modelled: a layer at a time
QUANTISE_EXPERTS = ("own", "axolotl")  # trainers whose routed experts in four bits are modelled
BLOCKS = {"mxfp8": 32, "nvfp4": 128}  # elements, and tokens, of a block that kernels scale


def tensor_fault(s: Scenario) -> str | None:
    """The reason why DTensor cannot cut the layers of `s`, in one line, or None."""
    t, given = s.tensor_parallel, f"with tensor_parallel = {s.tensor_parallel}"
    if s.sequence_parallel and t == 1:
        return f"sequence_parallel: given true {given}, allowed: with GPUs that share a layer"
    if t == 1:
        return None
    if s.sharding not in ("none", "fsdp2"):
        return (
            f"sharding: given {s.sharding!r} {given}, allowed: fsdp2, or none where no GPU is left to share shards with"
        )
    if s.method != "full":
        return f"method: given {s.method!r} {given}, allowed: full; adapters of cut layers are not modelled"
    if s.loss != "full" and not (s.loss == "chunked" and s.trainer == "torchtitan"):
        return f"loss: given {s.loss!r} {given}, allowed: full, or with trainer torchtitan its chunks"
    if s.sequence_parallel and s.task not in ("pretrain", "sft"):
        return f"sequence_parallel: given true for {s.task}, allowed: for pretrain and sft, whose loss takes cut logits"
    if s.sequence_parallel and (s.architecture.experts or s.architecture.norms != BEFORE):
        return f"sequence_parallel: given true, allowed for the family {s.architecture.family}: false; no plan is known"
    return None


def context_fault(s: Scenario) -> str | None:
    """The reason why attention cannot reach over GPUs that share sequences, in one line; None if it can or need not."""
    if s.context_parallel == 1:
        return None
    given = f"with context_parallel = {s.context_parallel}"
    if not s.packing:
        return f"packing: given false {given}, allowed: true; sequences are cut without their padding"
    if s.attention != "flash":
        return f"attention: given {s.attention!r} {given}, allowed: flash"
    arch = s.architecture
    if arch.mla or arch.attention_sinks or arch.fused_qkv or arch.recurrent:
        return f"context_parallel: given {s.context_parallel}, allowed for {arch.family}: 1; not modelled"
    return None


def ring_fault(s: Scenario) -> str | None:
    """The reason why PyTorch's ring attention cannot run over the sequences of `s`, in one line, or None.

    It replaces SDPA's own kernels, supports only a causal mask, and cuts every sequence into equal pieces.
    """
    n, arch = s.context_parallel, s.architecture
    if n == 1:
        return None
    given = f"with context_parallel = {n}"
    if s.task not in ("pretrain", "sft"):
        return f"context_parallel: given {n} for {s.task}, allowed with torch: 1, or for pretrain and sft"
    if s.sharding not in ("ddp", "fsdp2"):
        return f"sharding: given {s.sharding!r} {given}, allowed: ddp, fsdp2"
    if s.attention != "sdpa":
        return f"attention: given {s.attention!r} {given}, allowed: sdpa, whose place PyTorch's ring takes"
    if s.precision == "fp32":
        return f"precision: given 'fp32' {given}, allowed: 16 bits for SDPA's flash kernel"
    if s.packing:
        return f"packing: given true {given}, allowed: false; the ring knows no borders between sequences"
    if arch.mla or arch.attention_sinks or arch.softcap_attn or arch.head_dim > SDPA_FLASH_HEAD:
        return f"context_parallel: given {n}, allowed for {arch.family}: 1; SDPA's flash kernel cannot attend for it"
    if arch.recurrent:
        return f"context_parallel: given {n}, allowed for {arch.family}: 1; a state passes through all positions"
    if arch.sliding_window is not None and s.seq_len > arch.sliding_window:
        return f"seq_len: given {s.seq_len} {given}, allowed: at most the model's window of {arch.sliding_window}"
    if s.seq_len % (2 * n):
        below = s.seq_len // (2 * n) * 2 * n
        return f"seq_len: given {s.seq_len} {given}, allowed: a multiple of 2 x {n}, as {below or 2 * n}"
    return None


def pipeline_fault(s: Scenario) -> str | None:
    """The reason why PyTorch's 1F1B schedule cannot run the stages of `s`, in one line; None if it can or need not."""
    p = s.pipeline_parallel
    if p == 1:
        return None
    given = f"with pipeline_parallel = {p}"
    if s.task not in ("pretrain", "sft"):
        return f"pipeline_parallel: given {p} for {s.task}, allowed with torch: 1, or for pretrain and sft"
    fixed: dict[str, tuple[str | int, ...]] = {
        "method": ("full",),
        "loss": ("full",),
        "precision": ("bf16", "fsdp-mixed", "fp32"),
        "sharding": ("none", "fsdp2"),
    }
    for field, allowed in fixed.items():
        if (value := getattr(s, field)) not in allowed:
            return f"{field}: given {value!r} {given}, allowed: {', '.join(map(str, allowed))}"
    if s.optimizer == "none":
        return f"optimizer: given 'none' {given}, allowed: one that trains"
    if s.packing:
        return f"packing: given true {given}, allowed: false; stages hand on tensors of one size"
    if s.offload.parameters or s.offload.optimizer:
        field = "parameters" if s.offload.parameters else "optimizer"
        return f"offload.{field}: given true {given}, allowed: false"
    window = s.architecture.sliding_window
    if window is not None and s.attention == "sdpa" and s.seq_len > window:
        return f"seq_len: given {s.seq_len} {given} and sdpa, allowed: at most the model's window of {window}"
    if s.accumulation < p:
        least = p * s.rows * s.data_parallel
        return f"global_batch: given {s.global_batch} {given}, allowed: a micro batch for each stage, at least {least}"
    return None


def whole_sequences(s: Scenario, why: str) -> str | None:
    """The reason why a framework's trainer cannot cut sequences, in one line; None if no cut is asked for."""
    if s.context_parallel == 1:
        return None
    return f"context_parallel: given {s.context_parallel}, allowed with {s.framework}: 1; {why}"


def whole_layers(s: Scenario, why: str) -> str | None:
    """The reason why a framework's trainer cannot spread layers over GPUs, in one line; None if it is not asked to."""
    if s.pipeline_parallel > 1:
        return f"pipeline_parallel: given {s.pipeline_parallel}, allowed with {s.framework}: 1; it has no stages"
    if s.tensor_parallel > 1:
        return f"tensor_parallel: given {s.tensor_parallel}, allowed with {s.framework}: 1; {why}"
    return f"sequence_parallel: given true, allowed with {s.framework}: false; {why}" if s.sequence_parallel else None


def cut_alike(s: Scenario) -> str | None:
    """The reason why a role's layers or sequences cannot be cut as it asks, in one line; None if all match the job."""
    for name in s.roles:
        role = s.role(name)
        for degree in ("tensor_parallel", "context_parallel") if role else ():
            given, job = getattr(role, degree), getattr(s, degree)
            if given != job:
                return f"roles.{name}.{degree}: given {given}, allowed with {s.framework}: {job}, as in the whole job"
    return None


def segments_fault(s: Scenario) -> str | None:
    """The reason why expandable segments do not go with a vLLM that sleeps, in one line; None if they do or need not.

    vllm/device_allocator/cumem.py asserts it; verl switches expandable segments off while its vLLM has the card.
    """
    if not (s.rollout and s.rollout.sleep and s.expandable_segments):
        return None
    return "expandable_segments: given true with rollout.sleep, allowed: false, as vLLM that sleeps refuses them"


def fsdp_fault(s: Scenario) -> str | None:
    """The reason why FSDP cannot reduce gradients or keep adapters as `s` asks, in one line, or None.

    A flat parameter has one type: "Must flatten tensors with uniform dtype" (torch `distributed/fsdp/_flat_param.py`).
    """
    if s.no_sync and s.sharding not in FSDP:
        return f"no_sync: given true with sharding {s.sharding}, allowed: with {', '.join(FSDP)}"
    if s.no_sync and s.pipeline_parallel > 1:
        return "no_sync: given true with pipeline_parallel, allowed: false; stages reduce once a step anyway"
    if not s.lora or s.lora.units == "own":
        return None
    for place, given, allowed in (("sharding", s.sharding, "fsdp1"), ("method", s.method, "lora")):
        if given != allowed:
            return f"lora.units: given 'layer' with {place} {given}, allowed: own, or with {allowed}"
    one = "bf16" if s.precision == "bf16" else "fp32"
    if s.lora.dtype != one:
        return f"lora.dtype: given {s.lora.dtype!r} with lora.units layer, allowed: {one}, as the layer"
    return None


def own_units(s: Scenario) -> str | None:
    """The reason why adapters cannot lie in their layer's flat parameter: PEFT's wrapping policy (`utils/other.py`)."""
    if s.lora and s.lora.units != "own":
        return f"lora.units: given {s.lora.units!r}, allowed with {s.framework}: own, by PEFT's wrapping policy"
    return None


def sharding_fault(s: Scenario) -> str | None:
    """The reason why precision, offload, method or FSDP settings do not go with the sharding of `s`, or None."""
    if fault := fsdp_fault(s):
        return fault
    for field in ("expert_parallel", "expert_tensor_parallel"):
        if (degree := getattr(s, field)) > 1 and s.sharding != "megatron":
            return f"{field}: given {degree} with sharding {s.sharding}, allowed: 1, or with sharding megatron"
    if s.expert_imbalance > 1 and s.expert_parallel == 1:
        return f"expert_imbalance: given {s.expert_imbalance:g}, allowed: 1, or with expert_parallel above 1"
    if s.sharding not in SHARDINGS and s.sharding != "none" and s.sharding not in OWN_SHARDINGS.get(s.trainer, ()):
        owners = ", ".join(name for name, own in OWN_SHARDINGS.items() if s.sharding in own)
        return f"sharding: given {s.sharding!r} with {s.framework}, allowed: with torch and trainer {owners}"
    if s.precision == "fsdp-mixed" and s.sharding not in FSDP:
        return f"precision: given 'fsdp-mixed' with sharding {s.sharding}, allowed: with {', '.join(FSDP)}"
    if s.sharding in DEEPSPEED and s.layout != "mixed":
        return f"precision: given {s.precision!r} with sharding {s.sharding}, allowed: mixed, fp16; DeepSpeed has both"
    if s.precision == "fp16" and s.sharding in FSDP:
        return f"sharding: given {s.sharding!r} with precision fp16, allowed: none, ddp, {', '.join(DEEPSPEED)}"
    if (s.grad_dtype == "fp16") is not (s.precision == "fp16" and s.sharding in DEEPSPEED and s.grad_dtype != "fp32"):
        allowed = "fp16, fp32" if s.precision == "fp16" and s.sharding in DEEPSPEED else "bf16, fp32"
        return f"grad_dtype: given {s.grad_dtype!r} with precision {s.precision}, allowed: {allowed}"
    if s.offload.parameters and s.sharding not in ("zero3", *FSDP):  # zero/config.py of deepspeed 0.16.4: stage 3 alone
        return f"offload.parameters: given true with sharding {s.sharding}, allowed: with zero3, {', '.join(FSDP)}"
    if s.offload.optimizer and s.sharding not in (*DEEPSPEED, *FSDP, "megatron"):
        allowed = ", ".join((*DEEPSPEED, *FSDP, "megatron"))
        return f"offload.optimizer: given true with sharding {s.sharding}, allowed: with {allowed}"
    along = s.offload.parameters and s.sharding in FSDP and s.framework != "verl"  # the step runs where the weights are
    if (s.offload.optimizer or along) and OPTIMIZERS[s.optimizer].bitsandbytes:
        allowed = "adamw; bitsandbytes steps on a GPU, and Accelerate makes it DeepSpeedCPUAdam, with fp32 states"
        moved = "offload.optimizer" if s.offload.optimizer else "offload.parameters"
        return f"optimizer: given {s.optimizer!r} with {moved}, allowed: {allowed}"
    if s.method == "qlora" and s.sharding == "zero3" and s.checkpointing != "full":
        # `matmul_4bit(x, self.weight.t())` of older bitsandbytes keeps a view of the gathered weight for backward
        return f"checkpointing: given {s.checkpointing!r} with method qlora and sharding zero3, allowed: full"
    if s.method == "qlora" and s.sharding == "zero3" and s.offload.parameters:
        return "offload.parameters: given true with method qlora and sharding zero3, allowed: false; not modelled"
    return None


def kernels_fault(s: Scenario) -> str | None:
    """The reason why the kernels of `s` cannot run its layers, in one line, or None.

    Liger's norms gather DTensors whole (liger-kernel 0.8.5 `ops/rms_norm.py:658`).
    """
    if s.kernels == "eager":
        return None
    if s.framework not in ON_KERNELS:
        return f"kernels: given {s.kernels!r} with {s.framework}, allowed: eager; not modelled there"
    if s.tensor_parallel > 1:
        return f"kernels: given {s.kernels!r} with tensor_parallel = {s.tensor_parallel}, allowed: eager"
    if not replaced(s.kernels, s.architecture.family):
        known = f"allowed for the family {s.architecture.family}: eager"
        return f"kernels: given {s.kernels!r}, {known}; Liger has none for it"
    return None


def streams_fault(s: Scenario) -> str | None:
    """The reason why checkpoints cannot wait on the host, in one line; None if they can, or shall not."""
    if not s.offload.activations:
        return None
    given = "offload.activations: given true"
    if s.framework not in ON_KERNELS:
        return f"{given} with {s.framework}, allowed: false; not modelled there"
    if s.checkpointing != "full":
        return f"{given} with checkpointing {s.checkpointing}, allowed: with full, whose checkpoints move"
    if s.task not in ("pretrain", "sft", "rm", "dpo"):
        return f"{given} for {s.task}, allowed: false"
    return f"{given} where GPUs share sequences, allowed: false; not modelled" if s.together > 1 else None


def vocabulary_fault(s: Scenario) -> str | None:
    """The reason why a teacher's distributions cannot be compared with the student's, in one line, or None."""
    if not (teacher := s.role("teacher")) or teacher.architecture.vocab == (own := s.architecture.vocab):
        return None
    given = f"roles.teacher.model: given {teacher.model!r} with a vocabulary of {teacher.architecture.vocab:,}"
    return f"{given}, allowed: one with the student's, {own:,}"


def in_backward_fault(s: Scenario) -> str | None:
    """The reason why parameters cannot step in backward, in one line; None if they can, or shall not.

    A parameter steps once a step: on one micro batch, without clipping, which needs all gradients first.
    """
    own = OPTIMIZERS[s.optimizer].in_backward
    if not s.optimizer_in_backward:
        given = f"optimizer_in_backward: given false with optimizer {s.optimizer}"
        return f"{given}, allowed: true, as it steps no other way" if own else None
    given = "with optimizer_in_backward"
    allowed = ("none", "zero3") if own else ("none", "fsdp2")
    if s.sharding not in allowed:
        return f"sharding: given {s.sharding!r} {given} and optimizer {s.optimizer}, allowed: {', '.join(allowed)}"
    fixed: dict[str, tuple[str | int | bool, ...]] = {
        "task": ("pretrain", "sft"), "method": ("full",), "together": (1,),
        "precision": ("bf16", "fp32", "fsdp-mixed", "autocast"),
    }  # fmt: skip
    if s.sharding == "zero3":
        fixed["precision"] = ("mixed",)
    for field, values in fixed.items():
        if (value := getattr(s, field)) not in values:
            return f"{field}: given {value!r} {given}, allowed: {', '.join(map(str, values))}"
    if s.accumulation > 1:
        one = s.rows * s.data_parallel
        return f"global_batch: given {s.global_batch} {given}, allowed: one micro batch a GPU, {one}"
    if s.optimizer == "none":
        return f"optimizer: given 'none' {given}, allowed: one that trains"
    if s.offload.optimizer or (s.offload.parameters and s.sharding != "zero3"):
        field = "optimizer" if s.offload.optimizer else "parameters"
        return f"offload.{field}: given true {given}, allowed: false"
    return None


def states_fault(s: Scenario) -> str | None:
    """The reason why an optimizer whose states are bf16 whatever it steps in is not modelled for `s`, or None."""
    if not OPTIMIZERS[s.optimizer].narrow or (s.precision == "bf16" and s.sharding in ("none", "ddp", *FSDP)):
        return None
    shardings = ", ".join(("none", "ddp", *FSDP))
    return f"optimizer: given {s.optimizer!r}, allowed: with precision bf16 and one of the shardings {shardings}"


def whole_gradients(s: Scenario) -> str | None:
    """The reason why a framework cannot step parameters in backward, in one line; None if it shall not."""
    if OPTIMIZERS[s.optimizer].in_backward:
        return f"optimizer: given {s.optimizer!r}, allowed with {s.framework}: one that steps after backward"
    if s.optimizer_in_backward:
        return f"optimizer_in_backward: given true with {s.framework}, allowed: false"
    return None


def experts_fault(s: Scenario) -> str | None:
    """The reason why routed experts in four bits are not modelled for `s`, in one line, or None.

    Under FSDP every rank has loaded all of them before they are cut (axolotl 0.19 `loaders/model.py:700`).
    """
    if not s.quantize_moe_experts:
        return None
    given, arch = "quantize_moe_experts: given true", s.architecture
    if not arch.experts or arch.routing == "all" or arch.modeling:
        return f"{given} with model {s.model}, allowed: false; modelled for routed experts of Transformers"
    if s.framework != "torch" or s.trainer not in QUANTISE_EXPERTS:
        who = s.framework if s.framework != "torch" else f"trainer {s.trainer}"
        return f"{given} with {who}, allowed: false; modelled with torch and trainer {', '.join(QUANTISE_EXPERTS)}"
    if not at_least(s.versions["transformers"], "5"):
        return f"{given} with transformers {s.versions['transformers']}, allowed: false; its experts are linears"
    if s.sharding not in ("none", "ddp"):
        return f"{given} with sharding {s.sharding}, allowed: false, or with none, ddp; not modelled"
    return None


def unmodelled(s: Scenario) -> str | None:
    """The reason why a framework that is not plain PyTorch cannot have some of its settings, in one line, or None."""
    faults = (kernels_fault, whole_gradients, states_fault, streams_fault, compile_fault, experts_fault)
    return next((reason for fault in faults if (reason := fault(s))), None)


def trainer_fault(s: Scenario, usual: str = "own") -> str | None:
    """The reason why a framework cannot run another trainer than its `usual` one, in one line, or None."""
    return None if s.trainer == usual else f"trainer: given {s.trainer!r}, allowed with {s.framework}: {usual}"


def linear_fault(s: Scenario) -> str | None:
    """The reason why DeepSpeed's memory-efficient linear cannot be switched off, in one line; None if it can or is on.

    DeepSpeed puts it in place of every linear layer under ZeRO-3; the other frameworks leave it on.
    """
    if s.memory_efficient_linear:
        return None
    given = f"given false with {s.framework} and sharding {s.sharding}"
    return f"memory_efficient_linear: {given}, allowed: true, or false with torch and zero3"


def compile_fault(s: Scenario) -> str | None:
    """The reason why compiled layers or a compiled loss are not modelled for `s`, in one line, or None.

    What the partitioner saves was traced for layers of Llama's shape alone: two RMSNorms, a gated MLP, and beside its
    linears adapters of their type, without dropout.
    """
    if fault := float8_fault(s):
        return fault
    if s.async_tensor_parallel and not (s.sequence_parallel and s.compile in ("model", "model-and-loss")):
        given = f"given true with sequence_parallel {str(s.sequence_parallel).lower()} and compile {s.compile}"
        return f"async_tensor_parallel: {given}, allowed: false, or with both sequence_parallel and compiled layers"
    if s.compile == "none":
        return None
    given = f"compile: given {s.compile!r}"
    if s.framework != "torch" or s.trainer not in COMPILES:
        who = s.framework if s.framework != "torch" else f"trainer {s.trainer}"
        return f"{given} with {who}, allowed: none; not modelled"
    if s.task not in ("pretrain", "sft"):
        return f"{given} for {s.task}, allowed: none; modelled for pretrain, sft"
    if s.loss in ("fused", "cut") and s.compile != "model":
        return f"{given} with loss {s.loss}, allowed: none, model; this loss is a kernel already"
    if s.kernels != "eager" and s.compile != "loss":
        return f"{given} with kernels {s.kernels}, allowed: none, loss; modelled for a model's own operations"
    if s.compile == "loss":
        return None
    arch, norms = s.architecture, s.architecture.norms
    plain = arch.norm == "rms" and arch.gated and not (arch.experts or arch.mla or arch.parallel or arch.joined)
    plain = plain and arch.vision is None and not (arch.recurrent or arch.qk_norm_late) and arch.names.mlp == "mlp"
    if not plain or norms.attention_output or norms.mlp_output or arch.residual_dropout or arch.attention_sinks:
        return f"{given} with model {s.model}, allowed: none, loss; modelled for layers as Llama's"
    if s.method == "qlora":
        return f"{given} with method {s.method}, allowed: none, loss; modelled for full, lora"
    if s.lora and (s.lora.dropout or s.lora.dtype == "fp32"):
        return f"{given} with method {s.method}, allowed: none, loss; modelled for adapters in bf16 without dropout"
    if s.attention == "eager":
        return f"{given} with attention eager, allowed: none, loss; modelled with sdpa, flash"
    if s.precision not in ("bf16", "fsdp-mixed") or s.sharded.family == "zero":
        return f"{given} with precision {s.precision}, allowed: none, loss; modelled with bf16, fsdp-mixed"
    return None


def float8_fault(s: Scenario) -> str | None:
    """The reason why float8 linears are not modelled for `s`, in one line, or None.

    Eager, torchao keeps a float8 copy of each weight, which was not traced. Kernels of MXFP8 take blocks of 32 elements
    of a weight and of the tokens, those of NVFP4 blocks of 128 (torchao 0.18 `mx_formats/kernels.py`,
    `mxfp8_quantize_cuda`; `nvfp4_training/nvfp4_linear.py`, `nvfp4_mm_triton`).
    """
    if s.float8 == "none":
        for field, asked, off in (
            ("float8_all_gather", s.float8_all_gather, "false, or with float8 tensorwise"),
            ("bf16_layers_at_end", s.bf16_layers_at_end, "null, or with float8"),
        ):
            if asked:
                return f"{field}: given {str(asked).lower()}, allowed: {off}"
        return None
    if s.compile not in ("model", "model-and-loss"):
        return f"float8: given {s.float8!r} with compile {s.compile}, allowed: none; modelled with compiled layers"
    if s.float8_all_gather and (s.float8 != "tensorwise" or s.sharding != "fsdp2"):
        given = f"float8_all_gather: given true with float8 {s.float8} and sharding {s.sharding}"
        return f"{given}, allowed: false; torchao gathers so with tensorwise under fsdp2"
    arch, n = s.architecture, BLOCKS.get(s.float8, 16)
    if s.bf16_layers_at_end and (s.pipeline_parallel > 1 or s.bf16_layers_at_end >= arch.layers):
        given = f"bf16_layers_at_end: given {s.bf16_layers_at_end} with pipeline_parallel = {s.pipeline_parallel}"
        return f"{given}, allowed: below the model's {arch.layers} layers, all of them on one GPU"
    cut = s.tensor_parallel if s.float8 in BLOCKS else 1
    widths = (arch.intermediate, arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim)
    if arch.hidden % n or any(width // cut % n for width in widths):
        return f"float8: given {s.float8!r} with model {s.model}, allowed: none; its linears are no multiples of {n}"
    tokens = s.micro_batch * s.seq_len // s.context_parallel
    if s.float8 in BLOCKS and tokens % n:
        return f"float8: given {s.float8!r} with {tokens} tokens a GPU, allowed: with a multiple of {n}"
    return None
