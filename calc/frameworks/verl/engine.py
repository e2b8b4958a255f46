"""The FSDP engine on which every trainer of verl runs: what it can train, its loss paths, and what it offloads.

Files are named as in `calc.frameworks.verl.verl`.
"""

from __future__ import annotations

from calc.base.optimizers import OPTIMIZERS
from calc.base.plan import Entropy, HostCopies, Leaves, Loads, LossKind, Path, Role, Scaled, Stage
from calc.base.refusal import Refusal
from calc.base.schema import show
from calc.base.versions import at_least
from calc.frameworks.constraints import context_fault, hybrid_fault, own_units, whole_layers
from calc.frameworks.releases import stated
from calc.frameworks.verl import easyr1
from calc.frameworks.verl.releases import DEFAULTS, FORK, forked, reached, shared
from calc.scenario.scenario import Scenario
from calc.scenario.words import FSDP

# parts of a trained model that its offload flags move to the host between its phases
MOVED: tuple[Leaves, ...] = ("weights", "states")


FUSED = "0.5.0"  # model.use_fused_kernels with the backend `torch`, its default (config/ppo_trainer.yaml:94)
PIECES = 2048  # tokens whose entropies it makes at once (`entropy_from_logits_with_chunking`)
TILE = 512  # tokens of which it has logits at once (utils/experimental/torch_functional.py, `FusedLinearForPPO`)


def refuse(s: Scenario) -> Refusal | None:
    """The reason why the engine cannot train the model whose scenario is `s`, in one line, or None."""
    version, lora = s.framework_version, reached(s.framework_version, "0.4.0")
    shardings = FSDP if lora else FSDP[:1]  # fsdp2 and LoRA both came with 0.4.0
    if s.sharding not in shardings:
        return Refusal("sharding", repr(s.sharding), ", ".join(shardings), f"with verl {version}")
    if s.method == "qlora" or (s.method == "lora" and not lora):
        return Refusal("method", repr(s.method), "full, lora" if lora else "full", f"with verl {version}")
    free = reached(version, "0.6.1")  # override_config.attn_implementation (fsdp_workers.py:318 of 0.6.1)
    # adapters are cast to a base of bf16 since 0.9.1 (workers/engine/fsdp/transformer_impl.py:370)
    narrow = s.method == "full" or reached(version, "0.9.1")
    fixed: dict[str, tuple[str | bool, ...]] = {
        "precision": ("fsdp-mixed", "bf16") if narrow else ("fsdp-mixed",),  # fsdp_config.model_dtype
        "optimizer": tuple(name for name, facts in OPTIMIZERS.items() if facts.spelled.verl),
        "grad_dtype": ("bf16",) if s.precision == "bf16" else ("fp32",),
        "checkpointing": ("none", "full"),
        "reentrant": (False,),  # workers/engine/fsdp/transformer_impl.py:336
        "attention": _attention(s, free=free),
        "loss": ("full", "fused") if reached(version, FUSED) and not forked(version) else ("full",),
        "kernels": ("eager",) if forked(version) else ("eager", "liger"),
        "logprob": ("logsumexp",) if forked(version) or s.loss == "fused" else ("logsumexp", "selective"),
    } | (easyr1.fixed(s) if forked(version) else {})
    uncut = whole_layers(s, "its FSDP trainer does not cut layers: take sharding megatron")
    if reason := uncut or context_fault(s) or own_units(s) or hybrid_fault(s):
        return reason
    # models/transformers/monkey_patch.py:291-294 of 0.7.0
    degree, heads, keys = s.context_parallel, s.architecture.heads, s.architecture.kv_heads
    if heads % degree:
        return Refusal("context_parallel", degree, f"a divisor of the model's {heads} attention heads")
    if keys % degree and degree % keys:
        return Refusal("context_parallel", degree, f"a divisor or a multiple of the model's {keys} key heads")
    if s.max_tokens_per_gpu and (fault := full_length(s.max_tokens_per_gpu, s)):
        return fault
    for place, allowed in fixed.items():
        if getattr(s, place) not in allowed:
            with_packing = " with packing" if place == "attention" and free else ""
            given, words = show(getattr(s, place)), ", ".join(map(show, allowed))
            return Refusal(place, given, words, f"with verl {version}{with_packing}")
    if s.loss == "fused" and s.kernels == "liger" and not reached(version, "0.8.0"):
        # until then Liger's own forward takes the place of the one that returns log-probabilities
        return Refusal("loss", "'fused' with kernels liger", "full; both from 0.8.0 on", f"with verl {version}")
    if s.no_sync is not (once := stated(s.task, shared(version), DEFAULTS)["no_sync"]):
        return Refusal("no_sync", str(s.no_sync).lower(), str(once).lower(), f"with verl {version}")
    return None


def told_apart(transformers: str) -> bool:
    """True if Transformers makes a mask of the sequences that lie end to end in a row, by their positions."""
    return at_least(transformers, "4.53")


def _attention(s: Scenario, *, free: bool) -> tuple[str, ...]:
    """The kinds of attention, of which all but FlashAttention came with `free` choice.

    On rows without padding SDPA needs a mask. verl patches FlashAttention alone where ranks share a sequence, and the
    attention of vision-language models always (models/transformers/monkey_patch.py:360-407 of 0.8.0).
    """
    if not free:
        return ("flash",)
    if not s.packing:
        return ("flash", "sdpa", "eager")
    alone = s.context_parallel == 1 and not s.architecture.vision
    return ("flash", "sdpa") if alone and told_apart(s.versions["transformers"]) else ("flash",)


def full_length(tokens: int, s: Scenario) -> Refusal | None:
    """The reason why a dynamic batch of `tokens` a GPU cannot be made, in one line; None if a whole sequence fits.

    "max_token_len must be greater than the sequence length" (utils/seqlen_balancing.py:248 of 0.4.0).
    """
    least = -(-s.seq_len // s.context_parallel)
    return None if tokens >= least else Refusal("max_tokens_per_gpu", tokens, f"at least {least}", "with verl")


def role(
    name: str,
    s: Scenario,
    path: Path,
    scoring: Path,
    rows: int,
    scoring_rows: int,
    *,
    moved: tuple[Leaves, ...] = MOVED,
    shares: bool = False,
) -> Role:
    """A model on the engine, with `rows` sequences in a forward, `scoring_rows` in one without gradients.

    `moved`: the parts that verl may offload to the host by itself.
    """
    asked = {"weights": s.offload.parameters, "states": s.offload.optimizer}
    return Role(
        name,
        path,
        scoring,
        rows,
        scoring_rows,
        leaves=frozenset(word for word in moved if asked[word]),
        loads=loads(name, s),
        reduce_bytes=4,  # MixedPrecision(reduce_dtype=torch.float32), in every release
        root_stays=_root_stays(s),
        shares=shares,
        patched=name in ("actor", "reference"),  # actor_rollout_ref.model.use_liger; a critic's model has its own
        exchange="all-to-all",  # Ulysses, in every release (models/transformers/monkey_patch.py)
    )


def loads(name: str, s: Scenario) -> Loads:
    """The ranks that build the actor in host memory: the job's first, or all where head and embedding are tied.

    The others build it on the meta device (utils/fsdp_utils.py, `get_init_weight_context_manager`, in every release).
    Other roles are built before it, and have left the host by then.
    """
    if name != "actor":
        return ""
    return "every" if s.architecture.tied else "first"


def _root_stays(s: Scenario) -> bool:
    """True if the root FSDP unit stays gathered after a forward, as FSDP leaves it.

    From 0.2 to 0.7 verl reshards FSDP 1's by hand: `_handle.reshard(True)` in fsdp_workers.py:519 of 0.2 to :1137 of
    0.7.1, for FSDP 2 since 0.6.0 (:1018); from 0.8.0 on only where `fsdp_size > 1` (engine.py:894), and FSDP 2 reshards
    its root itself since torch 2.8.
    """
    version = s.framework_version
    if s.sharding == "fsdp2":
        return not reached(version, "0.6.0")
    return version == FORK or (reached(version, "0.8.0") and s.data_parallel_replicate == 1)


def loss_path(s: Scenario, rows: int, *, entropy: bool) -> Path:
    """The path from the logits of `rows` sequences to log-probabilities.

    `entropy`: computed beside them; until 0.3 it always is.

    workers/actor/dp_actor.py `_forward_micro_batch` until 0.7, engine.py `prepare_model_outputs` since. Until 0.8 the
    temperature divides in place, 0.9.0 makes a copy (engine.py:1352), 0.9.1 leaves a temperature of 1 alone (:95-103).
    Without padding the logits are a view of one row by then (`squeeze(0)`), and the entropy is compiled. Where padding
    stays, the logits are the model's own, and the entropy is not compiled (`verl_F.entropy_from_logits`): until 0.7 it
    is taken over the response, a slice that the cross entropy copies if there are several rows; since then over all
    positions.
    """
    version = s.framework_version
    tokens = s.max_tokens_per_gpu or -(-rows * s.seq_len // s.context_parallel)
    if s.loss == "fused":
        # the log-probabilities of flash-attn's kernel, which makes no log-softmax, since 0.8.0 (torch_functional.py:40)
        tensors, tile = 3 if reached(version, "0.8.0") else 4, min(TILE, tokens)
        asked: Entropy = "eager" if entropy else ""
        return Path("chunked-entropy", tile=tile, turns=-(-tokens // tile), tensors=tensors, entropy=asked)
    early, padded = not reached(version, "0.4.0"), not s.packing
    in_pieces = s.entropy_from_logits_with_chunking and not padded and entropy
    later = reached(version, "0.8.0")
    # where flash-attn's cross entropy is not installed: `logprobs_from_logits_v2` (utils/torch_functional.py), in turn
    # for each sequence, or for each token where there is no padding, or it is cut off before (engine.py:1212 of 0.8.0);
    # of fp32 logits a logsumexp
    held = -(-rows * s.held_len(rows) // s.context_parallel)
    by_token = not padded or later
    fp32 = not at_least(s.versions["transformers"], "4.46")
    kind: LossKind = "flash" if s.logprob == "logsumexp" else "rows" if fp32 else "selective"
    divided: Scaled = "copy" if version == "0.9.0" else "in-place" if padded else "view"
    return Path(
        kind,
        head_fp32=fp32,
        rows_fp32=kind == "selective",  # under autocast
        tile=1 if by_token and kind != "flash" else 0,
        turns=(held if by_token else rows) if kind == "selective" else 0,
        scaled="" if reached(version, "0.9.1") else divided,
        cut=("unpad" if later else "slice") if padded else "",
        shift_copy=padded and not later and rows > 1,
        # inplace_backward, unless the entropy needs the logits as they were (dp_actor.py:158-165 of 0.4.0)
        in_place=kind == "flash" and not early and not entropy,
        entropy=("eager" if padded else "chunked" if in_pieces else "compiled") if early or entropy else "",
        pieces=min(PIECES, held) if in_pieces else 0,
        kept=s.response_len / s.seq_len if padded and not later else 1.0,
    )


def saving(s: Scenario, name: str) -> Stage:
    """The stage of a checkpoint: a state dict of shards, moved to the host as FSDP units are gathered.

    utils/checkpoint/fsdp_checkpoint_manager.py; 0.3.0 lists hf_model but saves its configuration alone (:161-168). The
    fork gathers everything on rank 0 (fsdp_workers.py:489). FSDP 2 keeps references to its shards.
    """
    if s.sharding == "fsdp2":
        return Stage("save", name)
    host: HostCopies = "first" if s.framework_version == FORK else "shards"
    return Stage("save", name, holds=("units",), host=host, host_bytes=4)
