"""verl's Megatron engine: `strategy: megatron`, on which an actor trains and a reference scores, with vLLM beside them.

Read in the packages 0.4.0, 0.4.1, 0.5.0, 0.6.0, 0.7.0, 0.8.0, 0.9.0 and 0.9.1: `workers/megatron_workers.py`,
`workers/actor/megatron_actor.py` until 0.7, `workers/engine/megatron/transformer_impl.py` since,
`utils/megatron_utils.py` and `trainer/config/*megatron*.yaml`. Its layers are what mbridge 0.15.1 configures until
0.8 (`vanilla_mbridge: True` in `engine/megatron.yaml`), no fusions, and Megatron-Bridge 0.3.1 since, with them. Linear
attention is that of Megatron-Bridge 0.5, which 0.9.1 asks for (`models/qwen/{qwen3_next,qwen35}_bridge.py`): packed
sequences and context parallelism are in the Megatron-core that it carries, which has them since 0.18.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal

from calc.base.plan import Awake, Holds, Leaves, Path, Role, Stage
from calc.base.refusal import Refusal
from calc.base.schema import show
from calc.frameworks import megatron_core
from calc.frameworks.verl.releases import reached
from calc.models.architecture import Architecture
from calc.scenario.scenario import Scenario

FIRST = "0.4.0"
BRIDGE = "0.9.0"  # vanilla_mbridge: False (engine/megatron.yaml:102)
FUSED = "0.5.0"  # model.use_fused_kernels (models/mcore/model_forward_fused.py)
HYBRID = "0.6.0"  # optim.override_optimizer_config, and states of the hybrid optimizer that leave by device
PARTS = "0.5.0"  # recompute_modules (config/actor/megatron_actor.yaml)


def modelled(arch: Architecture, version: str) -> Architecture:
    """The model as Megatron-core has it, with the fusions that the release's bridge asks for."""
    fused = reached(version, BRIDGE)
    layers: Literal["megatron", "megatron-plain"] = "megatron" if fused else "megatron-plain"
    linear = "" if fused else f"verl from {BRIDGE} on: mbridge 0.15.1 does not know it"
    return megatron_core.modelled(arch, "sharding", "fsdp1, fsdp2", layers, linear=linear)


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that differ from the FSDP engine's, by dotted key.

    `actor/megatron_actor.yaml` and `engine/megatron.yaml`; gradients are reduced in fp32 (`grad_reduce_in_fp32`,
    megatron_utils.py:129 of 0.4.0), sequences packed (`preprocess_packed_seqs`), and nothing is recomputed
    (`recompute_granularity: null`).
    """
    return {
        "precision": "mixed",
        "grad_dtype": "fp32",
        "optimizer": "adamw",
        "optimizer_impl": "fused",  # Transformer Engine's FusedAdam, of Megatron-core
        "no_sync": False,
        "packing": True,
        "checkpointing": "none",
        "sequence_parallel": int(given.get("tensor_parallel", 1)) > 1,
        "roles.reference.precision": "mixed",
        "roles.reference.offload.parameters": False,  # ref.megatron.param_offload
    }


def refuse(s: Scenario) -> Refusal | None:
    """The reason why the engine cannot train the model whose scenario is `s`, in one line, or None."""
    version, given = s.framework_version, "with sharding megatron"
    if not reached(version, FIRST):
        return Refusal("sharding", "'megatron'", f"fsdp1; megatron is modelled from {FIRST} on", f"with verl {version}")
    fixed: dict[str, tuple[Any, ...]] = {
        "task": ("grpo", "reinforce++"),
        "method": ("full",),
        "precision": ("mixed",),
        "grad_dtype": ("fp32",),
        "optimizer": ("adamw",),
        "optimizer_impl": ("fused",),
        "attention": ("flash",),
        "loss": ("full", "fused") if reached(version, FUSED) else ("full",),
        "logprob": ("logsumexp",),
        "checkpointing": ("none", "full", "selective") if reached(version, PARTS) else ("none", "full"),
        "packing": (True,),
        "no_sync": (False,),
        "reentrant": (False,),
    }
    for field, allowed in fixed.items():
        if (value := getattr(s, field)) not in allowed:
            return Refusal(field, f"{show(value)} {given}", ", ".join(map(show, allowed)), "with verl")
    if s.sequence_parallel is not (cut := s.tensor_parallel > 1):
        # `sequence_parallel` of the configuration, which is on, counts only then (config_converter.py:49 of 0.4.1)
        return Refusal("sequence_parallel", f"{show(s.sequence_parallel)} {given}", show(cut), "with verl")
    if s.offload.fraction and not reached(version, HYBRID):
        return Refusal(
            "offload.fraction", f"{s.offload.fraction:g}", f"0; it came with {HYBRID}", f"with verl {version}"
        )
    if fault := megatron_core.spread_fault(s, given):
        return fault
    if s.max_tokens_per_gpu and s.max_tokens_per_gpu * s.context_parallel < s.seq_len:
        least = -(-s.seq_len // s.context_parallel)
        return Refusal("max_tokens_per_gpu", s.max_tokens_per_gpu, f"at least {least}", "with verl")
    stages = megatron_core.stages_fault(s) or megatron_core.chunks_fault(s)
    return stages or megatron_core.linear_fault(s) or megatron_core.parts_fault(s, known=False)


def unlike(s: Scenario) -> Refusal | None:
    """The reason why the job cannot have another role than the actor on it as given, in one line, or None."""
    for name in ("critic", "reward"):
        if s.has(name):
            return Refusal(f"roles.{name}", "a model with sharding megatron", "none; not modelled")
    reference = s.role("reference")
    if reference and reference.sharding != "megatron":
        return Refusal("roles.reference.sharding", repr(reference.sharding), "megatron, as the actor's")
    if reference and reference.precision != "mixed":
        return Refusal("roles.reference.precision", f"{reference.precision!r} with sharding megatron", "mixed")
    return None


def loss_path(s: Scenario, *, entropy: bool) -> Path:
    """The path from a rank's part of the logits to log-probabilities, and to the `entropy` beside them.

    `Float16Module` casts the model's output to fp32. From 0.6.0 on the temperature divides in place and a copy of the
    logits goes to the cross entropy if there is an entropy (megatron_actor.py:541-554 of 0.6.0, `logits_bak`).
    """
    if s.loss == "fused":
        return Path("linear-entropy")
    later = reached(s.framework_version, "0.6.0")
    return Path(
        "vocab-parallel",
        head_fp32=True,
        scaled="in-place" if later else "",
        entropy="vocab-parallel" if entropy else "",
        copied=later and entropy,
    )


def roles(s: Scenario) -> Iterator[Role]:
    """The models of the job: reference and actor, each of them in the job's pipeline stages.

    With `param_offload` the buffer of gradients goes, too, whatever `grad_offload` says, a flag that is never read
    (`offload_megatron_model_to_cpu`).
    """
    learns, count = s.entropy_coeff != 0, s.pipeline_parallel
    for name in ("reference", "actor"):
        own = s.role(name)
        if own is None:
            continue
        asked: dict[Leaves, bool] = {
            "weights": own.offload.parameters,
            "states": own.offload.optimizer and name == "actor",
        }
        scored = own.scoring_rows
        if name == "reference" and own.max_tokens_per_gpu and s.rollout:
            scored = own.filled(own.max_tokens_per_gpu, s.rollout.batch * s.rollout.n)
        actor = name == "actor"
        whole = Role(
            name,
            loss_path(own, entropy=learns and actor),
            # old log-probabilities come with the entropy, the reference's without (megatron_workers.py:543 of 0.4.1)
            loss_path(own, entropy=actor),
            own.rows,
            scored,
            leaves=frozenset(word for word, moved in asked.items() if moved),
        )
        yield from megatron_core.stages_of(whole, count)


def stages(s: Scenario, names: list[str]) -> tuple[Stage, ...]:
    """The stages of one step, in which the models called `names` work."""
    return _stages(s.framework_version, s.offload.parameters, tuple(names))


@lru_cache(maxsize=1024)
def _stages(version: str, offloaded: bool, names: tuple[str, ...]) -> tuple[Stage, ...]:
    """See `_step`."""
    return tuple(_step(version, offloaded, names))


def _step(version: str, offloaded: bool, names: tuple[str, ...]) -> Iterator[Stage]:
    """The stages of one step: rollout, scores, the actor's update, a checkpoint, weights to vLLM.

    A checkpoint loads the model with its gradients (`save_checkpoint`) if the weights are `offloaded`. Until 0.5 so
    does the sync (sharding_manager/megatron_vllm.py:126 of 0.4.1, :150 of 0.5.0), later without (:152 of 0.6.0).
    """
    back: tuple[Holds, ...] = ("gradients",) if offloaded else ()
    yield Stage("serve", "rollout", engine="all")
    for does in ("actor", "reference"):
        for name in names:
            if name.partition(",")[0] == does:
                yield Stage("score", name)
    trained = [name for name in names if name.partition(",")[0] == "actor"]
    for name in trained:
        yield Stage("train", name)
    for name in trained:
        yield Stage("save", name, holds=back)
    loaded = () if reached(version, "0.6.0") else back
    bucket: tuple[Holds, ...] = ("bucket",) if reached(version, "0.7.1") else ()
    before: Awake = "weights"
    for name in trained:
        yield Stage("sync", name, engine=before, holds=("parameter", *bucket, *loaded))
