"""Placement: the roles of a job, the engine that each lives under, and the GPUs that each runs on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, assert_never

from calc.base.ledger import Line, total
from calc.base.plan import Exchange, Forced, Keeps, Role, Serving
from calc.base.units import GB, MiB
from calc.base.versions import at_least
from calc.catalog.catalog import GPU
from calc.engines.fsdp import Fsdp
from calc.engines.fsdp1 import Fsdp1
from calc.engines.low_level_zero import LowLevelZero
from calc.engines.megatron import Megatron
from calc.engines.megatron_fsdp import MegatronFsdp
from calc.engines.plain import Plain
from calc.engines.replica import Replica, TrainingEngine
from calc.engines.rollout import RolloutEngine
from calc.engines.sglang import Sglang
from calc.engines.staged import Staged
from calc.engines.vllm import Vllm
from calc.engines.zero import Zero
from calc.engines.zero_parameters import ZeroParameters
from calc.memory import weights
from calc.memory.host import HostAllocator
from calc.memory.megatron_adapters import EIGHT_BITS
from calc.memory.optimizer import Optimizer, PrecisionAware
from calc.memory.run import WIDENING, WIDTHS, Adapter, Crossing, Format, Kernel, Narrow, Recipe, Run
from calc.memory.runtime import process, symmetric
from calc.memory.weights import EightBits, Experts
from calc.models.architecture import (
    TOWER,
    Architecture,
    Head,
    Tensor,
    layer_kinds,
    parameters,
    passed_tensors,
    tensors,
    vision_tensors,
)
from calc.models.kernels import SDPA_FLASH_HEAD, replaced
from calc.models.lora import (
    EMBEDDING,
    adapter_matrices,
    bypassed_parameters,
    embedding_matrices,
    end_matrices,
    head_matrices,
    joining_matrices,
    lora_parameters,
    passed_parameters,
    saved_modules,
    vision_matrices,
)
from calc.models.slices import part, stage
from calc.scenario.scenario import Rollout, Scenario
from calc.scenario.words import Attention, ContextExchange, Float8, Generates, Layout

# bytes of a stored weight, of its gradient, of its fp32 master, and of what the optimizer steps in
FORMATS: Mapping[Layout, tuple[int, int, int, int]] = {
    "bf16": (2, 2, 0, 2),
    "mixed": (2, 2, 4, 4),
    "fsdp-mixed": (4, 4, 0, 4),
    "autocast": (4, 4, 0, 4),
    "fp32": (4, 4, 0, 4),
}
# what torchao's recipes keep for backward: `rowwise_with_gw_hp` keeps what linears of 16 bits do
NARROW: Mapping[Float8, Narrow] = {
    "none": "", "tensorwise": "float8", "rowwise": "float8", "rowwise_with_gw_hp": "", "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}  # fmt: skip
RECIPES: Mapping[Float8, Recipe] = {
    "delayed": "delayed", "tensorwise": "tensorwise", "blockwise": "blockwise", "mxfp8": "mxfp8",
}  # fmt: skip
# the precision in which a format's layers run, see `calc.memory.run.Run`
TAPES: Mapping[Layout, Format] = {
    "bf16": "bf16",
    "mixed": "bf16",
    "fsdp-mixed": "bf16",
    "autocast": "autocast",
    "fp32": "fp32",
}
EXCHANGES: Mapping[ContextExchange, Exchange] = {"all_gather": "all-gather", "a2a": "all-to-all"}
MAPPED = "4.51"  # of Transformers: see `copied`
CASTS_ON_CARD = {False: "4.50", True: "4.51"}  # of Transformers, the latter with four bits: see `recast`
STAGED = 2**30  # bytes: see `casts_table`
VALUED = ("critic", "reward")  # roles with a value head in place of one over the vocabulary


def kernel(arch: Architecture, attention: Attention, layout: Layout) -> Kernel:
    """The attention kernel that runs: the one asked for, if the model and PyTorch's SDPA support it.

    GPT-OSS's sinks and GPT-J's code leave eager or flash only, and scores that slope eager alone. SDPA takes its
    memory-efficient kernel in fp32 and for heads whose values are narrower than their queries (DeepSeek), and its plain
    mathematics in fp32 for grouped queries whose keys nothing has repeated, and for queries whose one key it is not
    told that they share (Falcon 7B; torch 2.13 `native/transformers/sdp_utils_cpp.h`,
    `check_batch_size_and_num_heads_dense`).
    """
    match attention:
        case _ if arch.compressed:  # `_supports_sdpa`, `_supports_flash_attn` of `DeepseekV4PreTrainedModel`
            return "eager"
        case "eager" if arch.megatron:  # whose rows are padded to a batch's longest: seldom a multiple of 8
            return "math"
        case "eager" | "flash":
            return attention
        case "sdpa" if arch.attention_sinks or arch.slopes or arch.wide_scores:
            return "eager"
        case "sdpa" if arch.fused_qkv == "picked":
            return "math"
        case "sdpa" if TAPES[layout] == "fp32":
            return "math" if arch.grouped and not arch.repeated else "efficient"
        case "sdpa":
            return "efficient" if arch.v_dim < arch.head_dim or arch.head_dim > SDPA_FLASH_HEAD else "flash"
        case other:
            assert_never(other)


def forced_kernel(arch: Architecture, forced: Forced) -> Kernel:
    """The kernel of SDPA for a model that Unsloth computes in fp32: see `calc.memory.forced_fp32`."""
    return "math" if arch.grouped and forced != "repeated" else "efficient"


@lru_cache(maxsize=1024)
def adapter_tensors(arch: Architecture, adapter: Adapter) -> tuple[Tensor, ...]:
    """LoRA's two matrices beside the embedding and each adapted linear, the head's last."""
    rank, targets, kinds = adapter.rank, adapter.targets, (*layer_kinds(arch), *[(spec, 1) for spec in arch.depths])
    layers = [t for spec, n in kinds for t in adapter_matrices(arch, spec, rank, targets, n * adapter.count)]
    ends = (*joining_matrices(arch, rank, targets), *head_matrices(arch, rank, targets))
    return (*embedding_matrices(arch, rank, targets), *layers, *ends)


def seeing_adapters(s: Scenario, arch: Architecture, rank: int) -> tuple[Tensor, ...]:
    """LoRA's matrices beside the linears of a vision tower and its projectors, of what the job does not freeze."""
    freeze = s.images.freeze if s.images and not s.images.train_whole else "vision"
    tower = [t for part in TOWER for t in vision_matrices(arch, rank, part)] if freeze == "none" else []
    return (*tower, *vision_matrices(arch, rank, "projector")) if freeze != "vision" else ()


def whole_tower(s: Scenario, arch: Architecture) -> tuple[Tensor, ...]:
    """The tensors of a vision tower and its projectors that are trained beside adapters on the language model."""
    if not (s.images and s.images.train_whole):
        return ()
    unread = vision_tensors(arch, "unread")
    return tuple([t for t in vision_tensors(arch) if t not in unread])


def pins(s: Scenario) -> HostAllocator:
    """PyTorch's allocator of pinned host memory, as the job's environment sets it."""
    threshold = s.pinned_max_round_threshold_mb
    return HostAllocator(None if threshold is None else threshold * MiB)


def frozen_tensors(s: Scenario, arch: Architecture) -> tuple[Tensor, ...]:
    """The tensors that stay as they are in a model that is trained otherwise, most of them a vision tower's.

    Those that are frozen, and those that get no gradients, which an optimizer passes by.
    """
    return (*passed_tensors(arch), *_frozen_tower(s, arch))


def _frozen_tower(s: Scenario, arch: Architecture) -> tuple[Tensor, ...]:
    """Those of a vision tower."""
    freeze = s.images.freeze if s.images else "vision" if s.vision_tower else "none"
    if freeze == "none":
        return vision_tensors(arch, "unread")
    trained = vision_tensors(arch, "projector") if freeze == "tower" else ()
    return tuple(t for t in vision_tensors(arch) if t not in trained)


def architecture(s: Scenario, role: Role) -> Architecture:
    """The part of the model that one GPU holds: its stage of the pipeline, cut as tensor and expert parallelism say."""
    whole = stage(s.architecture, *role.pipeline, s.stage_layers, s.virtual_pipeline)
    return part(whole, s.tensor_parallel, s.expert_parallel, s.expert_tensor_parallel)


def adapter_bytes(s: Scenario) -> int:
    """Bytes of an element of the adapters, as they are stored."""
    assert s.lora
    # adapters beside fp32 weights have the weights' type, adapters beside 4-bit weights a type of their own
    own = FORMATS[s.layout][0] == 2 or (s.method == "qlora" and s.layout == "autocast")
    return 2 if s.lora.dtype == "bf16" and own else 4


def ref_adapter_bytes(s: Scenario) -> int:
    """Bytes of an element of the frozen copy of adapters that TRL adds as the reference, 0 without one.

    Beside four bits it is made in fp32, and stays so; beside others PEFT casts it to the type of the weight, and since
    0.19 back to fp32 (peft `peft_model.py:add_adapter`, `tuners/tuners_utils.py:cast_adapter_dtype`).
    """
    if not s.lora or not s.lora.ref_adapter:
        return 0
    widened = s.method == "qlora" or at_least(s.versions["peft"], "0.19")
    return 4 if widened else FORMATS[s.layout][0]


def upcasts(s: Scenario, role: Role) -> bool:
    """True if copies of modules are fp32; DeepSpeed makes all of a model bf16 (0.19.2 `runtime/engine.py:1570`)."""
    return role.upcasts and s.sharded.family != "zero"


def adapter_of(s: Scenario, role: Role) -> Adapter:
    """The adapters that the job trains."""
    assert s.lora
    # FSDP's mixed precision gathers adapters, too, in the compute type; where they are units of FSDP 1, PEFT has
    # read the stored type before, which autocast makes good
    gathers = s.precision == "fsdp-mixed"
    joined = s.lora.units == "layer"
    reads = 4 if gathers and s.sharding == "fsdp1" and role.wrapped and not joined else 0
    used = 2 if gathers else adapter_bytes(s)
    saved = s.lora.modules_to_save
    # a copy in fp16 is made fp32: the loss scaler steps no fp16
    wide = 4 if s.precision == "fp16" or upcasts(s, role) else FORMATS[s.layout][0]
    # `base_result` came with peft 0.14 (tuners/lora/dora.py)
    dora: Literal["", "once", "twice"] = ""
    if s.lora.dora:
        dora = "once" if at_least(s.versions.get("peft", "0.14"), "0.14") else "twice"
    targets = s.lora.modules
    if not isinstance(targets, str):
        targets = tuple([target for target in targets if target not in role.untrained])
    own = s.lora.rank, targets, s.lora.dropout > 0
    return Adapter(*own, used, reads, joined, saved, wide, dora, s.lora.count, s.lora.ia3)


def run_of(s: Scenario, role: Role, arch: Architecture, *, trained: bool) -> Run:
    """The settings with which the layers of `arch`, a rank's part of the model of `role`, run."""
    trained = trained and s.optimizer != "none"
    adapter = adapter_of(s, role) if trained and s.lora else None
    library = replaced(s.kernels if role.patched else "eager", arch.family)
    wide_stream = role.forced or (arch.wide_stream and TAPES[s.layout] == "bf16")
    precision: Format = "wide-stream" if wide_stream else TAPES[s.layout]
    if role.wrapped and precision == "bf16":
        # autocast leaves an embedding as it is: with a copy in fp32 so is all that is added to its output
        wide = adapter is not None and EMBEDDING in adapter.saved and upcasts(s, role)
        # nor does it square, exponentiate or run LayerNorm in bf16, and a 4-bit linear returns the type it is given
        # (bitsandbytes 0.50.2 nn/modules.py, Linear4bit.forward: inp_dtype), to be added to the stream
        widens = arch.activation in WIDENING and "activation" not in library
        wide |= s.method == "qlora" and (widens or arch.norm == "layer" or (adapter is not None and adapter.widens))
        precision = "autocast-wide" if wide else "autocast-bf16"
    return Run(
        arch=arch,
        precision=precision,
        half=s.precision == "fp16" and (WIDTHS[precision].residual == 2 or bool(role.forced)),
        forced=role.forced,
        trained=trained and adapter is None,
        training=trained and role.dropout,
        # PEFT freezes what it puts adapters beside
        differentiable=role.unfrozen and not trained and not s.lora,
        wrapped=role.wrapped,
        adapter=adapter,
        kernel=forced_kernel(arch, role.forced) if role.forced else kernel(arch, s.attention, s.layout),
        packaged=s.attention == "flash" and not role.varlen,
        sequences=s.sequence_parallel and s.tensor_parallel > 1,
        within=s.async_tensor_parallel,
        reentrant=s.reentrant and s.checkpointing == "full",
        flat=s.sharding == "fsdp1",
        context=s.context_parallel,
        imbalance=s.expert_received,
        sent=s.expert_sent,
        capacity=s.expert_capacity or 0,
        looped=arch.experts > 0 and experts_apart(s, arch),
        padded=s.experts_implementation == "torchtitan",
        dispatched=s.experts_implementation == "automodel",
        replaced=library,
        compiled=trained and s.compile in ("model", "model-and-loss"),
        narrow=NARROW.get(s.float8, "") if trained and s.sharding != "megatron" else "",
        recipe=RECIPES.get(s.float8, "") if s.sharding == "megatron" else "",
        at_once=s.recompute_num_layers or 1,
        kept_end=arch.layers - s.checkpointed_layers if s.checkpointed_layers and trained else 0,
        wide_end=(s.bf16_layers_at_end or 0) if trained else 0,
        linear_kernels=s.linear_attention == "fla",
        again=s.recomputed,
        rotates=s.apply_rope_fusion,
        # DeepSpeed casts all to 16 bits, and FSDP gathers all in the compute type
        keeps_wide=bool(arch.kept_wide) and s.layout == "bf16" and s.sharded.family in ("none", "ddp"),
        rounded=s.qat_scheme == "int4",
        exchange=EXCHANGES.get(s.cp_comm_type, role.exchange),
        single=max(role.rows, role.scoring_rows) == 1 and arch.views_one,
        sees=s.images is not None and arch.vision is not None and not arch.vision.crossed,
        fed=adapter is not None
        and bool(
            seeing_adapters(s, arch, adapter.rank)
            or whole_tower(s, arch)
            or EMBEDDING in adapter.saved
            or embedding_matrices(arch, adapter.rank, adapter.targets)
        ),
        # `prepare_model_for_kbit_training`; Transformers from 5 on (`gradient_checkpointing_enable`)
        hooked=not role.adapts_first and (s.method == "qlora" or at_least(s.versions.get("transformers", "5"), "5")),
        quantised=s.method == "qlora",
        int8=s.load_in_8bit,
        nested=s.double_quantization,
        wide=wide_elements(s, arch) or role.wide,
        # quantised in fp16 before 0.43, whatever is computed in: bitsandbytes nn/modules.py, Params4bit.cuda
        unpacked=role.unpacks or (0 if at_least(s.versions["bitsandbytes"], "0.43") else 4),
        buffer=role.buffer if adapter else 0,
        four_bit_experts=four_bit_experts(s),
        frees_inputs=role.frees_inputs,
        caches_experts=trained and caches_experts(s, arch),
        # autograd/_functions.py:MatMul4Bit, ctx.tensors = (A, B) up to 0.43.1, (None, B) from 0.43.2 on
        keeps_inputs=s.method == "qlora" and not at_least(s.versions["bitsandbytes"], "0.43.2"),
        keeps_columns=s.load_in_8bit and not at_least(s.versions["bitsandbytes"], "0.45"),
    )


def experts_apart(s: Scenario, arch: Architecture) -> bool:
    """True if routed experts are linears of their own: before Transformers 5, or in a model's own code."""
    joined = s.experts_implementation != "transformers"
    return arch.experts_apart or not (joined or at_least(s.versions.get("transformers", "5"), "5"))


def copied(s: Scenario, arch: Architecture) -> bool:
    """True if a process that loads weights on the host copies them: it casts them, joins experts, or fills a model.

    Experts of which gates and ups lie side by side are joined in the files (GPT-OSS, Llama 4). Since Transformers 4.51
    models are built on the meta device, and a tensor of the files' type, bf16 or fp16, stays in the mapped file until
    it is on the card: the kernel shares such pages and takes them back when it needs room. With 5.23 a model of
    1,465 MiB took 3 MiB of the process's own in bf16, and 2,934 in fp32 (modeling_utils.py, `get_init_context`;
    core_model_loading.py, `_materialize_copy`; before, `low_cpu_mem_usage`).
    """
    cast = FORMATS[s.layout][0] != 2 or (s.precision == "fp16") != arch.half
    joined = arch.experts > 0 and not experts_apart(s, arch) and not arch.experts_input_first
    return cast or joined or not at_least(s.versions.get("transformers", MAPPED), MAPPED)


def recast(s: Scenario, role: Role, arch: Architecture) -> int:
    """Bytes of a published element, where each tensor is cast once it is on the card, else 0.

    Before Transformers 5 a tensor of a model that is on one card goes there before it is cast (4.54.1
    modeling_utils.py, `_load_state_dict_into_meta_model`: `tensor_device`, then `param.to(casting_dtype)`).
    """
    transformers = s.versions.get("transformers", "5")
    casts = at_least(transformers, CASTS_ON_CARD[s.method == "qlora"]) and not at_least(transformers, "5")
    as_published = FORMATS[s.layout][0] == 2 and (bool(role.forced) or (s.precision == "fp16") == arch.half)
    return 2 if casts and role.placed and not as_published else 0


def casts_table(role: Role, arch: Architecture) -> bool:
    """True if a model that was loaded in bf16 is then cast to fp16 on the card, module by module, the table as a whole.

    unsloth_zoo 2025.3.17 patching_utils.py, `patch_model_and_tokenizer`. The newest releases cast a parameter of
    `STAGED` bytes piece by piece in its own place (2026.10.9, `_cast_large_param`).
    """
    return bool(role.forced) and (role.forced != "repeated" or 2 * arch.vocab * arch.outer < STAGED)


def records_streams(s: Scenario) -> bool:
    """True if collectives call `record_stream` for their tensors, which PyTorch stopped in 2.8.

    Since then a collective keeps a reference until it has been waited for (pytorch pull request 148590;
    `csrc/distributed/c10d/ProcessGroupNCCL.cpp`, TORCH_NCCL_AVOID_RECORD_STREAMS).
    """
    return not at_least(s.versions.get("torch", "2.8"), "2.8")


def four_bit_experts(s: Scenario) -> Experts:
    """The routed experts of the job that are in four bits."""
    if s.quantize_moe_experts:
        return "whole"
    return "linears" if s.method == "qlora" and experts_apart(s, s.architecture) else ""


def caches_experts(s: Scenario, arch: Architecture) -> bool:
    """True if experts in four bits stay 16 bits wide, once backward has run their layers again.

    Non-reentrant checkpointing stops as soon as the last tensor that a layer keeps is there
    (torch `utils/checkpoint.py`, `_StopRecomputationError`). Where nothing after its experts keeps one, that is within
    their forward, and bitsandbytes before 0.50.0 clears no cache then: `weights.opened_experts`.
    """
    if not s.quantize_moe_experts or s.checkpointing != "full" or s.reentrant:
        return False
    after = arch.shared_experts and (arch.shared_gate or not arch.shared_first)
    last = not after and not arch.experts_beside and not arch.norms.mlp_output
    return last and not at_least(s.versions["bitsandbytes"], "0.50.0")


def wide_elements(s: Scenario, arch: Architecture) -> int:
    """Elements of linears that the checkpoint leaves in 16 bits, none where its files are smaller than all in four."""
    if not s.checkpoint_gb:
        return 0
    experts, nested = four_bit_experts(s), s.double_quantization
    return max(0, weights.left_wide(arch, parameters(arch), s.checkpoint_gb * GB, experts=experts, nested=nested))


def four_bit_elements(s: Scenario, arch: Architecture) -> int:
    """Elements of the job's model that are in four bits."""
    if s.method != "qlora" or s.load_in_8bit:
        return 0
    return weights.quantised_elements(arch, experts=four_bit_experts(s)) - wide_elements(s, arch)


def reading(s: Scenario, run: Run, length: int) -> Run:
    """The settings of a model whose layers attend to the patches of images, beside sequences of `length`."""
    arch = run.arch
    if not (s.images and arch.vision and arch.vision.crossed):
        return run
    tokens, rank = s.images.read(arch.vision), run.adapter.rank if run.adapter else 0
    makes = (run.trained and s.images.freeze != "vision") or bool(rank and seeing_adapters(s, arch, rank))
    return replace(run, crossing=Crossing(tokens, tokens / length, makes))


def masked(s: Scenario, arch: Architecture, length: int) -> bool:
    """True if SDPA gets a mask: the window is no longer than a rank's sequences, or the family always has one."""
    window, seen = arch.sliding_window, length // s.context_parallel
    shorter = window is not None and (arch.windows_masked or seen >= window)
    return s.attention == "sdpa" and (arch.masked or shorter)


def replica(s: Scenario, role: Role, *, trained: bool) -> Replica:
    """The model of `role`, whose scenario is `s`: one that the job trains, or a frozen one beside it."""
    arch = architecture(s, role)
    run = run_of(s, role, arch, trained=trained)
    head: Head = "scalar" if (role.model or role.name) in VALUED else "lm"
    weight, grad, master, stepped = FORMATS[s.layout]
    count, elements, each = parameters(arch, head=head), 0, weight
    changed: tuple[Tensor, ...] = ()
    untrained: tuple[Tensor, ...] = ()
    vision = saved = idle = whole = 0
    trained = trained and s.optimizer != "none"
    if run.adapter:
        each = adapter_bytes(s)
        rank, targets = run.adapter.rank, run.adapter.targets
        seeing = seeing_adapters(s, arch, rank)
        vision = sum(t.elements * t.count for t in seeing)
        copies = saved_modules(arch, run.adapter.saved)
        saved = sum(t.elements * t.count for t in copies)
        seeing_whole = whole_tower(s, arch)
        whole = sum(t.elements * t.count for t in seeing_whole)
        untrained = end_matrices(arch, rank, role.untrained)
        idle = sum(t.elements for t in untrained)
        elements = lora_parameters(arch, rank, targets) * run.adapter.count + vision + saved + idle + whole
        idle += passed_parameters(arch, rank, targets)
        if not run.quantised:
            at_once = bool(arch.ssm and arch.ssm.whole and run.linear_kernels)
            idle += bypassed_parameters(arch, rank, targets, whole=at_once)
        first = [t for t in copies if t.kind == "embedding"]
        changed = (
            *first,
            *adapter_tensors(arch, run.adapter),
            *seeing,
            *seeing_whole,
            *[t for t in copies if t not in first],
        )
        count -= 0 if role.keeps_originals else saved
        grad, stepped = each, stepped if master else each
        master = master if each == 2 else 0
    elif trained:
        frozen = frozen_tensors(s, arch)
        changed = tuple(t for t in tensors(arch, head=head) if t not in frozen)
        elements = sum(t.elements * t.count for t in changed) if frozen else 0
    if s.layout == "mixed" and s.grad_dtype == "fp32":
        grad = 4
    return Replica(
        role=role.model or role.name,
        arch=arch,
        head=head,
        run=run,
        path=role.path,
        parameters=count,
        weight_bytes=weight,
        quantised=run.quantised,
        cut_scales=role.cut_scales,
        adapter=elements - saved - whole if run.adapter else 0,
        saved=saved,
        untrained=untrained,
        init=s.lora.init if run.adapter and s.lora and s.lora.init != "random" else "",
        ref_bytes=ref_adapter_bytes(s) if run.adapter else 0,
        vision_adapter=vision,
        adapter_bytes=each,
        trainable=(elements - idle or count) if trained else 0,
        trained_tensors=changed,
        grad_bytes=grad,
        master_bytes=master,
        step_bytes=stepped,
        optimizer=Optimizer(s.optimizer, s.optimizer_impl, role.by_trainer, role.blockwise, s.galore_rank)
        if trained
        else None,
        ranks=s.shards,
        micro_batches=s.accumulation,
        leaves=role.leaves,
        backups=role.backups,
        paused=role.paused,
        loads="" if role.shares else role.loads,
        copied=copied(s, arch),
        recast=recast(s, role, arch),
        casts_table=casts_table(role, arch),
        reduce_bytes=role.reduce_bytes or grad,
        defers=s.no_sync,
        stays=role.pipeline[1] > 1 and s.devices == 1,
        pins=pins(s),
        in_backward=trained and s.optimizer_in_backward,
        streams=role.streams if trained else "",
        gathers=1 if trained and s.float8_all_gather else 0,
        ends=role.ends,
        mask_positions=role.mask_positions,
        keeps_gathered=trained and s.reshard_after_forward == "never",
        keeps_last=trained and s.reshard_after_forward == "all-but-last",
        groups=role.groups,
    )


def precision_aware(s: Scenario) -> PrecisionAware | None:
    """The formats of masters and moments where FusedAdam keeps both, or None."""
    if not s.use_precision_aware_optimizer:
        return None
    # beside fp8, but for delayed scaling, masters in fp32 are Megatron-core's (`OptimizerConfig.__post_init__`)
    apart = s.float8 not in ("none", "delayed") and s.main_params_dtype == "fp32"
    fuses = at_least(s.versions.get("transformer-engine", "2.13"), "2.13")
    return PrecisionAware(s.main_params_dtype, s.exp_avg_dtype, s.exp_avg_sq_dtype, apart, fuses)


def eight_bits(s: Scenario) -> EightBits | None:
    """The form of Transformer Engine's weights in 8 bits, if its linears multiply so."""
    if not (b := EIGHT_BITS.get(s.float8)):
        return None
    # weights of blocks of 128 x 128 have few scales
    return EightBits(1.0 if s.float8 == "blockwise" else b, 2, s.fp8_param_gather)


def engine(s: Scenario, model: Replica, keeps: Keeps, *, unused: bool = False) -> TrainingEngine:
    """The engine that the scenario's sharding names; DeepSpeed at stage 0 partitions its fp32 states all the same.

    `unused`: DDP looks for parameters without a gradient.
    """
    match s.sharded.family:
        case "fsdp":
            # a framework that moves shards between phases does without PyTorch's own offload
            asked = s.offload.parameters or (s.offload.optimizer and model.optimizer is not None)
            offload = asked and not model.leaves
            if s.sharding == "fsdp1":
                return Fsdp1(model, offload)
            return (Staged if model.stays else Fsdp)(model, offload)
        case "zero" if keeps.deepspeed and model.in_backward:
            return ZeroParameters(
                model, 3, keeps.deepspeed, offload_parameters=s.offload.parameters, recomputes=s.checkpointing != "none"
            )
        case "megatron":
            fuses = not model.arch.unfused
            if (strategy := s.data_parallel_sharding_strategy) != "no_shard":
                return MegatronFsdp(model, fuses=fuses, strategy=strategy)
            # a framework that moves states between phases does without Megatron-core's own offload
            own = s.offload.optimizer and "states" not in model.leaves
            hosted = 1.0 if own else s.offload.fraction
            return Megatron(
                model, fuses=fuses, hosted=hosted, hosts_masters=s.offload.masters, aware=precision_aware(s),
                eight_bits=eight_bits(s),
            )  # fmt: skip
        case "zero" if keeps.low_level:
            return LowLevelZero(model, s.sharded.stage, keeps.low_level, s.offload.optimizer)
        case "none" | "ddp" | "zero" if keeps.deepspeed:
            again = s.checkpointing != "none"
            return Zero(
                model, s.sharded.stage or 1, keeps.deepspeed, s.offload.optimizer, s.offload.parameters,
                recomputes=again, keeps_weights=not (s.memory_efficient_linear or again), scaled=s.precision == "fp16",
                built_whole=not s.zero_init,
            )  # fmt: skip
        case "none" | "ddp" | "zero":
            return Plain(
                model, buckets=s.sharding == "ddp" and s.shards > 1, unused=unused, recorded=records_streams(s)
            )
        case other:
            assert_never(other)


@dataclass(frozen=True)
class Placed:
    """A role on its GPUs: its view of the scenario, and the plan it belongs to."""

    role: Role
    s: Scenario
    keeps: Keeps

    @cached_property
    def engine(self) -> TrainingEngine:
        """The engine that holds its model."""
        stages = [stage for stage in self.keeps.stages if stage.does == "train"]
        trained = any(self.role.name in (stage.role, stage.beside, stage.joint) for stage in stages)
        model = replica(self.s, self.role, trained=trained)
        return engine(self.s, model, self.keeps, unused=self.role.finds_unused)

    @cached_property
    def scorer(self) -> TrainingEngine:
        """The engine where the role scores, which trains nothing then."""
        model = self.engine.replica
        run = replace(
            model.run, trained=False, training=False, differentiable=model.run.trained or model.run.differentiable
        )
        frozen = replace(model, path=self.role.scoring, run=run, optimizer=None, micro_batches=1)
        return engine(self.s, frozen, self.keeps, unused=self.role.finds_unused)

    @property
    def trained(self) -> bool:
        """True if the role has an optimizer."""
        return self.engine.replica.optimizer is not None

    def workspaces(self) -> list[Line]:
        """The memory outside PyTorch's allocator in which the role's ranks exchange parts of layers."""
        s = self.s
        if not s.async_tensor_parallel:
            return []
        run = self.engine.replica.run
        tokens = self.role.rows * s.held_len(self.role.rows) // s.context_parallel
        return [symmetric("process", tokens * run.arch.hidden, run.compute, s.tensor_parallel)]


def in_turn(placed: Placed) -> list[Placed]:
    """The pieces of a pipeline rank, each as a stage of its own: one after every `pipeline_parallel`-th of them."""
    (index, stages), s = placed.role.pipeline, placed.s
    places = [(n * stages + index, stages * s.virtual_pipeline) for n in range(s.virtual_pipeline)]
    alone = replace(s, virtual_pipeline=1)
    return [replace(placed, role=replace(placed.role, pipeline=place), s=alone) for place in places]


def place(s: Scenario, role: Role, keeps: Keeps) -> Placed:
    """`role` of the job `s` on its GPUs."""
    return Placed(role, s.role(role.model or role.name) or s, keeps)


def around(s: Scenario, keeps: Keeps, gpu: GPU) -> list[Line]:
    """The lines beside a rollout engine's pool: of its own process or, in a trainer's, of a communicator of its own.

    vLLM makes new groups for its ranks in either case (`distributed/parallel_state.py`, `init_model_parallel_group`).
    """
    assert keeps.serving and s.rollout
    own = keeps.serving.process not in {role.process for role in keeps.roles}
    lines = process(gpu.architecture, int(s.rollout.tensor_parallel > 1), gpu.linked, int(own), "rollout", awake=1)
    return [line for line in lines if line.bytes and (own or line.component == "nccl")]


def serving(s: Scenario, keeps: Keeps, gpu: GPU) -> RolloutEngine | None:
    """The engine that serves the rollout, or None if Transformers generates or nothing does."""
    if keeps.serving is None or s.rollout is None:
        return None
    return SERVING[s.rollout.engine](s, s.rollout, keeps.serving, gpu, around(s, keeps, gpu))


def _sglang(s: Scenario, rollout: Rollout, asked: Serving, gpu: GPU, lines: Sequence[Line]) -> RolloutEngine:
    return Sglang(
        arch=(s.role("actor") or s).architecture,
        serving=asked,
        tensor_parallel=rollout.tensor_parallel,
        static=rollout.gpu_memory_utilization,
        total=gpu.usable_bytes,
        around=total(lines),
    )


def _vllm(s: Scenario, rollout: Rollout, asked: Serving, gpu: GPU, lines: Sequence[Line]) -> RolloutEngine:
    growth = sum([line.bytes for line in lines if line.component == "nccl"])
    return Vllm(
        arch=(s.role("actor") or s).architecture,
        serving=asked,
        tensor_parallel=rollout.tensor_parallel,
        utilization=rollout.gpu_memory_utilization,
        total=gpu.usable_bytes,
        card=gpu.id,
        context=total(lines) - growth,
        growth=growth,
        v0=rollout.v0,
        pins=pins(s),
    )


# The rollout engines that are servers of their own, by the scenario's word for each.
SERVING: Mapping[Generates, Callable[[Scenario, Rollout, Serving, GPU, Sequence[Line]], RolloutEngine]] = {
    "vllm": _vllm,
    "sglang": _sglang,
}


def groups(s: Scenario, keeps: Keeps) -> list[tuple[tuple[str, ...], int]]:
    """The GPU groups: the roles that live on each, in the order in which they load, and its number of GPUs.

    GPUs on which a `device_map` puts no layer come last, with no role.
    """
    if s.parts > 1:
        beside = ("rollout",) if s.placement == "colocated" else ()
        stages = [
            tuple(name for name in keeps.loading if name in beside or keeps.at(name, index)) for index in range(s.parts)
        ]
        apart = [] if beside or "rollout" not in keeps.loading else [(("rollout",), s.gpus_of("rollout"))]
        own = s.gpus_of("actor") if apart else s.gpus
        each = s.data_parallel if s.devices > 1 else own // s.parts
        left = own - each * s.parts
        return [*[(names, each) for names in stages], *([((), left)] if left else []), *apart]
    if s.placement == "colocated":
        return [(keeps.loading, s.gpus)]
    found: dict[str, list[str]] = {}
    for name in keeps.loading:
        found.setdefault(s.group(name), []).append(name)
    return [(tuple(names), s.gpus_of(home)) for home, names in found.items()]
