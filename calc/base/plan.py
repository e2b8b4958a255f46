"""The terms in which a framework says what a job keeps in memory; `calc.frameworks` fills them in, others read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, assert_never

# The words of `Path`, explained there.
LossKind = Literal[
    "cross-entropy", "log-softmax", "selective", "logsumexp", "rows", "flash", "chunked", "chunked-logits",
    "chunked-views", "ahead", "fused", "fused-rows", "cut", "tiled", "pieces", "divergence", "scalar", "vocab-parallel",
    "vocab-parallel-compiled", "vocab-parallel-te", "vocab-parallel-softmax", "vocab-chunked", "linear-entropy",
    "chunked-entropy",
]  # fmt: skip
Scaled = Literal["", "view", "in-place", "copy"]
Cut = Literal["", "slice", "unpad"]
Empties = Literal["", "leaving", "each"]
Entropy = Literal["", "compiled", "eager", "chunked", "vocab-parallel", "softmax"]
Lasting = Literal["step", "next", "turn"]  # outputs outlive their own backward
Held = Literal["forward", "inside", "backward", Lasting]
Chunks = Literal["", "gib", "nearest", "capped", "chain", "rows"]

# The words of `Role`.
Leaves = Literal["weights", "states"]
Component = Literal["weights", "adapter", "master_weights", "optimizer_states"]
Paused = Literal["", "all", "states", "weights"]
Loads = Literal["", "first", "node", "every"]
Streams = Literal["", "each", "stash", "buffers"]
Ends = Literal["", "kept", "freed", "embedding"]
Exchange = Literal["", "all-to-all", "all-gather", "ring", "zigzag"]
Forced = Literal["", "norms", "grouped", "repeated"]

# Parts of Megatron-core's layers that can be run again for their backward, see `calc.memory.megatron_again`.
Recomputed = Literal[
    "core_attn", "moe_act", "mlp", "moe", "shared_experts", "layernorm", "mla_up_proj", "gdn_norm_out", "self_attn"
]  # fmt: skip

# The tensors that Megatron-FSDP shards over data-parallel ranks.
MegatronShards = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]

# The words of `Stage`.
Does = Literal["train", "score", "generate", "serve", "sync", "save"]
Awake = Literal["asleep", "weights", "all"]
Handed = Literal[
    "parameter", "clone", "units", "root", "copies", "bucket", "flattened", "whole", "layer", "group", "adapter",
    "gradients",
]  # fmt: skip
Holds = Literal[Handed, "weights", "prompt-logits"]
HostCopies = Literal["", "first", "every", "shards"]
Back = Literal["own", "all", "none"]


@dataclass(frozen=True, slots=True)
class Path:
    """The way from logits to a loss, or to log-probabilities.

    `kind`: `cross-entropy` (a model's own loss, in fp32), `log-softmax` (of all logits, then gather), `selective` (row
    by row), `logsumexp` (gather minus logsumexp), `rows` (the same row by row), `flash` (a kernel that keeps its logits
    and writes one gradient), `chunked`, `chunked-logits` (torchtune's: all logits, each chunk cast for its own loss),
    `chunked-views` (Axolotl's: all logits of one product, whose chunks compiled kernels read),
    `ahead` (torchtitan's: chunks whose backward runs at once), `fused`, `fused-rows` (Liger's of GRPO), `cut`
    (cut-cross-entropy), `tiled`, `pieces` (litgpt's), `divergence` (of a student's distributions from a teacher's),
    `scalar` (a value head, no vocabulary), `vocab-chunked` (prime-rl's log-probabilities and entropies, from logits of
    some of the vocabulary at a time), `vocab-parallel` (Megatron-core's, in fp32 over a rank's part of the vocabulary),
    `vocab-parallel-compiled` (the same as compiled kernels), `vocab-parallel-te` (Transformer Engine's kernel),
    `vocab-parallel-softmax` (slime's, log-probabilities and entropies of one softmax), `linear-entropy` (verl's
    kernels, which make both from the head's input) and `chunked-entropy` (the same in PyTorch's operations, some tokens
    at a time).

    `head_fp32`: logits are cast to fp32 at once, the 16-bit ones dropped. `uncast`: a `cross-entropy` reads them in
    the type that they have. `rows_fp32`: `selective` casts row by row. `scaled`: a temperature divides the logits,
    `view` in place through a view, `in-place`, or `copy`. `upcast`: the loss casts the logits, and meanwhile the
    model's own stay referenced. `cut`: a `slice`, whose backward makes a gradient of all logits, or `unpad`, a copy of
    the real tokens whose backward still needs all logits. `shift_copy`: logits without the last position are copied.
    `in_place`: `flash` writes its gradient over the logits. `entropy`: the entropy of every position is computed beside
    the log-probability, in a `compiled` kernel, `eager`, under autocast, `chunked`, `pieces` tokens at a time, or
    `vocab-parallel`, by verl's own function for a rank's part of the vocabulary; or of the same `softmax` as that.

    `held`: how long the caller's variables keep the outputs: to the end of `forward`, of another model's forward
    `inside` it, of `backward`, the `step`, the `next` forward, or, in a step of several micro-batches, of the `turn`
    after their own. `kept` is the share of the positions that enter the loss, where the others are cut off by a slice
    after the head, or before the head (`tiled`). `tile` is the number of tokens whose logits `tiled`, `fused-rows` or
    `chunked` has at once (0: an eighth of all), whose gradients `pieces` has, of which a `fused` loss that is no kernel
    makes gradients in forward, of which a `flash` loss that is no kernel makes them in backward, which `divergence`
    compares at once, or `selective` (0: those of a sequence), 0 for all. `turns`: the number of such tiles of
    `divergence`, of `selective` with `rows_fp32`, and of `chunked-entropy`, which has `tensors` in fp32 of a tile's
    logits in forward. `chunks`: Unsloth's `fused` counts them by the memory that is free on the card, see
    `calc.memory.loss_chunks`; then `buffer` has the bytes that one takes. For `ahead` `summed` has the bytes of an
    element of the head's gradients so far, and `copied` says that chunks are copies; for a `vocab-parallel` entropy,
    for `rows`, `selective` and `divergence`, that the loss reads a copy of the logits; `apart` says that the entropy
    reads another. `compiled`: the loss runs in kernels that `torch.compile` has fused. `nll` is the share of the rows
    that enter a cross entropy of their own, beside their log-probabilities; `shift_copy` then says whether that copies
    them.

    `picked`: positions that do not enter the loss are cut off before the head, so that their logits never exist.
    `aside` and `metrics` are bytes for each logit of the loss: those of further tensors that the caller's variables
    keep as long as `held` says, and those that metrics take in passing once the loss is there. `hidden`: the outputs
    also have every layer's input, and `outputs_fp32` says that they are cast to fp32 as they leave the model.
    `outside`: the training loop computes the loss, once the model has returned. `halves`: `log-softmax` takes the
    chosen rows first, then the rejected ones. `caps`: the loss caps the logits as it reads them, where the model would.
    """

    kind: LossKind
    head_fp32: bool = False
    uncast: bool = False
    rows_fp32: bool = False
    scaled: Scaled = ""
    upcast: bool = False
    cut: Cut = ""
    shift_copy: bool = False
    in_place: bool = False
    entropy: Entropy = ""
    pieces: int = 0
    held: Held = "forward"
    kept: float = 1.0
    tile: int = 0
    turns: int = 0
    tensors: int = 0
    chunks: Chunks = ""
    buffer: int = 0
    summed: int = 0
    copied: bool = False
    apart: bool = False
    compiled: bool = False
    nll: float = 0.0
    picked: bool = False
    aside: float = 0.0
    metrics: float = 0.0
    hidden: bool = False
    outputs_fp32: bool = False
    outside: bool = False
    halves: bool = False
    caps: bool = False

    @property
    def inside(self) -> bool:
        """True if the loss runs in the model's own forward, and not in a schedule that keeps outputs for a turn."""
        match self.kind:
            case "cross-entropy" | "chunked" | "chunked-views" | "fused" | "fused-rows" | "cut" | "tiled" | "scalar":
                return self.held != "turn" and not self.outside
            case (
                "vocab-parallel"
                | "vocab-parallel-compiled"
                | "vocab-parallel-te"
                | "vocab-parallel-softmax"
                | "vocab-chunked"
                | "linear-entropy"
                | "chunked-entropy"
            ):
                return True
            case (
                "log-softmax"
                | "selective"
                | "logsumexp"
                | "rows"
                | "flash"
                | "pieces"
                | "chunked-logits"
                | "ahead"
                | "divergence"
            ):
                return False
            case other:
                assert_never(other)


@dataclass(frozen=True, slots=True)
class DeepSpeed:
    """A DeepSpeed release with its configuration's defaults, in elements (`deepspeed/runtime/zero/config.py`).

    A framework that passes "auto" gets these, since DeepSpeed drops the word (`runtime/config_utils.py`), unless it is
    Transformers, which fills in sizes of its own first.
    """

    version: str
    reduce_bucket: int = 500_000_000
    persistence_threshold: int = 100_000
    max_live: int = 1_000_000_000
    prefetch: int = 50_000_000
    sub_group: int = 1_000_000_000
    overlap_comm: bool | None = None  # None: at stage 3


@dataclass(frozen=True, slots=True)
class Role:
    """One model of a job: how it runs, and which of its parts stay on the GPUs while other roles run.

    `path` leads from the model's output to a loss, `scoring` to numbers without gradient; `rows` and `scoring_rows` are
    the sequences of one such forward on one GPU. `leaves` names what moves to the host between the role's own phases:
    `weights`, `states` (of the optimizer). `root_stays`: the root FSDP unit stays gathered after a forward without
    gradient. `shares`: the role has no weights of its own on the GPUs: it is the trained model with its adapters
    switched off, or its weights are copied over the trained ones. `backups`: copies of weights that stay in pinned host
    memory, the trained model's own and those that take its place. `paused`: what leaves does so as the blocks of the
    allocator that it lies in (torch_memory_saver), the buffer of gradients among them; of `all` the host gets a copy,
    of the `states` alone, or of these and the `weights`. `away`: components of the ledger that wait on the host in the
    stages that say so, while the rollout engine generates, and are back for all others. `groups`: the number of groups
    of layers in which weights are handed on.

    `loads`: the ranks that read the whole model on the host before it moves to a GPU or FSDP cuts it, in its type: the
    `first` of the job, the first of each `node`, or `every` one; none that was read where it is empty. `placed`: a
    `device_map` sends each tensor to the card as it is read.

    `reduce_bytes`: bytes per element of the gradients that FSDP's ranks exchange; where it is 0, as many as are kept.
    `exchange`: the context-parallel communication of attention, `all-to-all` (Ulysses), `all-gather` of keys and values
    head by head, PyTorch's `ring`, or ms-swift's `zigzag`.

    `dropout`: dropout is on while the role trains. `wrapped`: each forward runs under an autocast of its own, whatever
    the type of the weights. `unfrozen`: the weights of a model that is only scored require gradients all the same, as
    they were loaded. `unpacks`: bytes per element of a 4-bit weight while it multiplies; where it is 0, those of other
    products. `buffer`: elements of the largest 4-bit weight of those that are dequantised into one buffer, which stays.
    `wide`: elements of linears that are left in 16 bits where others are loaded in four.
    `frees_inputs`: a layer's input that runs again is freed with its gradient at once, whatever refers to them.
    `mask_positions`: the positions of two masks that stay, one of which has a window. `by_trainer`: Transformers'
    Trainer builds the optimizer. `blockwise`: Muon makes each rank's part of a matrix orthogonal. `finds_unused`: DDP
    looks for parameters without a gradient. `cut_scales`: the scales of 4-bit weights are sharded with them, and
    PyTorch's operations unpack them (torchao's NF4Tensor). `ends`: under FSDP 2 the embedding is a unit of its own, and
    so are the final norm and the head, which stay gathered after forward (`kept`) or do not (`freed`). `masks`: the
    loader makes a mask of every pair of a sequence's positions. `hooks`: checkpointing is switched on by Transformers,
    which makes input embeddings require a gradient then, and a vision tower's patches. `patched`: a library's kernels
    take the place of the model's own operations, where the job has them.

    `keeps_originals`: modules of which copies are trained beside adapters stay on the GPU themselves. `upcasts`: the
    copies are made fp32. `untrained`: modules whose adapters are there and get no gradients.
    `adapts_first`: PEFT has put adapters into the model before anything switches its checkpointing on.

    `streams`: how checkpoints leave for the host and come back, if they do: `each` on its own, `stash` (a few wait on
    the GPU until their copies are there), `buffers` (two on the GPU stay for them, and the last checkpoint does not
    leave). `pageable`: the copies lie in host memory that is not pinned.

    `forced`: Unsloth has the residual stream in fp32, though products run in fp16: beside it `norms`' outputs, or
    attention, which reads keys as they are shared (`grouped`) or `repeated`; see `calc.memory.forced_fp32`.

    `varlen`: flash attention is PyTorch's own operator, `varlen_attn`, and not that of the flash-attn package.
    `caches`: a forward without gradients fills a cache of keys and values, as Transformers' models do unless they are
    told not to.
    `handed`: tensors of the residual stream that Megatron-core's stages hand on for a micro batch, joined in one.
    `pipeline`: the pipeline stage, from 0, and the number of stages, where a role is one stage of a model and runs its
    layers alone; `model` then names the role whose part it is. Roles with the same `process` live in one process of the
    operating system, with one CUDA context.
    """

    name: str
    path: Path
    scoring: Path
    rows: int
    scoring_rows: int
    leaves: frozenset[Leaves] = frozenset()
    root_stays: bool = False
    shares: bool = False
    backups: int = 0
    paused: Paused = ""
    away: frozenset[Component] = frozenset()
    groups: int = 1
    loads: Loads = ""
    placed: bool = False
    reduce_bytes: int = 0
    exchange: Exchange = ""
    dropout: bool = True
    wrapped: bool = False
    unfrozen: bool = False
    unpacks: int = 0
    buffer: int = 0
    wide: int = 0
    frees_inputs: bool = False
    mask_positions: int = 0
    by_trainer: bool = False
    blockwise: bool = False
    streams: Streams = ""
    pageable: bool = False
    forced: Forced = ""
    finds_unused: bool = False
    cut_scales: bool = False
    ends: Ends = ""
    masks: bool = False
    varlen: bool = False
    caches: bool = False
    handed: int = 1
    hooks: bool = True
    patched: bool = True
    keeps_originals: bool = True
    untrained: tuple[str, ...] = ()
    adapts_first: bool = False
    upcasts: bool = False
    pipeline: tuple[int, int] = (0, 1)
    model: str = ""
    process: str = "trainer"


@dataclass(frozen=True, slots=True)
class Serving:
    """The rollout engine, vLLM or SGLang: its release, and the settings that the framework passes to it.

    `max_num_seqs` and `max_num_batched_tokens`: None where the engine decides. `graphs`: CUDA graphs are captured
    (eager mode is not enforced). `share_of_free`: verl's patched worker takes its share of the free memory, where vLLM
    itself takes its share of the whole card. `sleep_level`: 1 keeps the weights in host memory while the engine sleeps,
    2 drops them. `executor`: vLLM's `distributed_executor_backend`; under `ray` no step is prepared ahead. `early`: it
    starts beside weights alone, before the trainer has built an optimizer.
    """

    version: str
    max_model_len: int
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    graphs: bool = True
    share_of_free: bool = False
    sleep_level: int = 1
    process: str = "vllm"
    executor: Literal["mp", "ray"] = "mp"
    early: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a step: which role runs, and what it does.

    `does`: `train` (forward, backward, step), `score` (a forward without gradient), `generate` (Transformers' own, on
    the role), `serve` (vLLM generates), `sync` (weights to the rollout engine), `save` (a checkpoint).

    `engine` is the part of a rollout engine that is on the GPU, if it can sleep: `asleep`, `weights`, `all`. `back`
    says what of a trained model is on the GPU again, where parts of it leave: `own`, the weights of the role that runs;
    `all` that it has; or `none`, as copies on the host are read. `away`: what roles have `away` is on the host.

    For `train`: `inside` is scored within the forward, while the role's graph is alive; `beside` trains at the same
    time on the same GPUs; `alternating` says that trained roles take turns micro-batch by micro-batch, so that the
    gradients of each stay while the other runs. `joint` names a role whose forward runs before, and whose backward
    after, in one graph with one optimizer; the role itself if it runs in two forwards of as many rows.

    For `serve`, `holds` names `weights` where the trained roles' weights are still on the GPU: until vLLM has started
    and generated. For `generate`, `sync` and `save`, `holds` names what the peak takes beside what is resident:
    `parameter` (the largest one gathered), `clone` (a copy of that), `units` (FSDP units gathered in the type they are
    stored in, the root while the layers go by), `root` (the root unit alone), `copies` (of this rank's shards),
    `bucket` (of 2 GiB), `flattened` (buckets as slime makes them), `whole` (all parameters gathered), `layer` (the
    parameters of one layer, with a copy of this rank's shards of it), `group` (the largest of the role's groups of
    layers, or all outside layers), `adapter` (one matrix of an adapter gathered),
    `gradients` (a buffer that has come back with the weights), `prompt-logits` (logits of every position of the
    prompts). `rows` is the number of sequences of one generation on one GPU.

    For `save`, `host` says which ranks hold a copy in host memory, of `host_bytes` per parameter: `first`, `every`, or
    `shards` (each rank its own).
    """

    does: Does
    role: str
    engine: Awake = "asleep"
    inside: str = ""
    beside: str = ""
    joint: str = ""
    alternating: bool = False
    holds: tuple[Holds, ...] = ()
    rows: int = 0
    host: HostCopies = ""
    host_bytes: int = 2
    back: Back = "own"
    away: bool = False

    @property
    def handed(self) -> tuple[Handed, ...]:
        """The words of `holds` for what an engine takes to hand its weights on."""
        return tuple(word for word in self.holds if word != "weights" and word != "prompt-logits")


@dataclass(frozen=True)
class Keeps:
    """The plan of one scenario under its framework: the models, the stages of a step, and the order of loading.

    `roles` are the models of the job, `stages` one step in its order. `loading` names the roles, `rollout` among them
    where vLLM serves, in the order in which they arrive on the GPUs. `low_level`: elements of a bucket of ColossalAI's
    LowLevelZeroOptimizer, where that runs in place of DeepSpeed. `bare`: nothing but PyTorch allocates beside the
    models, so that each block that FSDP or ZeRO-3 takes is known. `disconnects`: a trainer's process groups, and with
    them NCCL's buffers, are gone while it sleeps: one trainer is awake at a time, and none while the rollout engine
    generates. `empties`: PyTorch's cache is emptied as a rollout begins and ends, and when a role's weights have left
    for the host (`leaving`) or whenever a role has run (`each`); not at all where it is empty. `scores`: the sequences
    on a GPU for which generation returns fp32 logits of every token of the response,
    which stay until the next generation has returned others.
    """

    roles: tuple[Role, ...]
    stages: tuple[Stage, ...]
    loading: tuple[str, ...]
    serving: Serving | None = None
    deepspeed: DeepSpeed | None = None
    low_level: int = 0
    notes: tuple[str, ...] = ()
    bare: bool = False
    disconnects: bool = False
    empties: Empties = ""
    scores: int = 0

    def without_rollout(self) -> Keeps:
        """The plan of the same job where nothing generates: responses come from elsewhere."""
        return replace(
            self,
            stages=tuple(stage for stage in self.stages if stage.does not in ("serve", "generate", "sync")),
            loading=tuple(name for name in self.loading if name != "rollout"),
            serving=None,
        )

    @cached_property
    def _named(self) -> Mapping[str, Role]:
        return {role.name: role for role in self.roles}

    def role(self, name: str) -> Role:
        """The role called `name`; raises KeyError where the job has none."""
        return self._named[name]

    def at(self, name: str, stage: int) -> bool:
        """True if `name` is that of a role in this pipeline stage."""
        return name in self._named and self._named[name].pipeline[0] == stage


def supervised(
    name: str,
    path: Path,
    rows: int,
    *,
    scored: Role | None = None,
    before: bool = False,
    deepspeed: DeepSpeed | None = None,
    notes: tuple[str, ...] = (),
    **how: Any,
) -> Keeps:
    """The plan of a job that trains one model; a model that is `scored`, if any, runs within its forward, or `before`.

    `how` are fields of the trained role.
    """
    trained = Role(name, path, path, rows, rows, **how)
    roles = (trained, *([scored] if scored else []))
    inside = scored.name if scored and not before else ""
    return Keeps(
        roles=roles,
        stages=(*([Stage("score", scored.name)] if scored and before else []), Stage("train", name, inside=inside)),
        loading=tuple(role.name for role in roles if not role.shares),
        deepspeed=deepspeed,
        notes=notes,
    )


def pipelined(
    name: str,
    path: Path,
    rows: int,
    stages: int,
    *,
    scored: Role | None = None,
    notes: tuple[str, ...] = (),
    **how: Any,
) -> Keeps:
    """The plan of a job that trains one model in `stages` pipeline stages, each on GPUs of its own.

    A model that is `scored`, if any, is in as many stages on the same GPUs. `how` are fields of the trained roles.
    """
    trained = tuple(
        Role(f"stage {index + 1}", path, path, rows, rows, pipeline=(index, stages), model=name, **how)
        for index in range(stages)
    )
    frozen = tuple(
        replace(each, name=f"{each.name}, stage {index + 1}", model=each.name, pipeline=(index, stages))
        for each in ([scored] if scored else [])
        for index in range(stages)
    )
    return Keeps(
        roles=(*trained, *frozen),
        stages=(*[Stage("score", role.name) for role in frozen], *[Stage("train", role.name) for role in trained]),
        loading=tuple(role.name for role in (*trained, *frozen) if not role.shares),
        notes=notes,
    )
