"""verl's Megatron engine, `strategy: megatron`: actor and critic train on it, reference and reward model score.

Read in the packages 0.4.0, 0.4.1, 0.5.0, 0.6.0, 0.7.0, 0.8.0, 0.9.0 and 0.9.1: `workers/megatron_workers.py`,
`workers/actor/megatron_actor.py` until 0.7, `workers/engine/megatron/transformer_impl.py` since,
`utils/megatron_utils.py` and `trainer/config/*megatron*.yaml`. Its layers are what mbridge 0.15.1 configures until
0.8 (`vanilla_mbridge: True` in `engine/megatron.yaml`), no fusions, and Megatron-Bridge 0.3.1 since, with them. Linear
attention is that of Megatron-Bridge 0.5, which 0.9.1 asks for (`models/qwen/{qwen3_next,qwen35}_bridge.py`): packed
sequences and context parallelism are in the Megatron-core that it carries, which has them since 0.18.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from calc.base.plan import Holds, Leaves, Path, Role, Stage
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
ORDER = ("critic", "reference", "reward", "actor")  # in which roles load (`init_workers`)
SCORE = ("reward", "actor", "reference", "critic")
TRAINED = ("critic", "actor")
GRADIENTS: tuple[Holds, ...] = ("gradients",)
VALUED = ("critic", "reward")  # LinearForLastLayer in the head's place: one number, cast to fp32
# what all roles of a process share
ALIKE = (
    "sharding", "precision", "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel",
    "expert_tensor_parallel", "virtual_pipeline",
)  # fmt: skip


def modelled(arch: Architecture, version: str) -> Architecture:
    """The model as Megatron-core has it, with the fusions that the release's bridge asks for."""
    fused = reached(version, BRIDGE)
    layers: Literal["megatron", "megatron-plain"] = "megatron" if fused else "megatron-plain"
    linear = "" if fused else f"verl from {BRIDGE} on: mbridge 0.15.1 does not know it"
    return megatron_core.modelled(arch, "sharding", "fsdp1, fsdp2", layers, linear=linear, adapters="shared")


def defaults(task: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that differ from the FSDP engine's, by dotted key.

    `actor/megatron_actor.yaml` and `engine/megatron.yaml`; gradients are reduced in fp32 (`grad_reduce_in_fp32`,
    megatron_utils.py:129 of 0.4.0), sequences packed (`preprocess_packed_seqs`), and nothing is recomputed
    (`recompute_granularity: null`). Adapters have the weights' type (Megatron-Bridge `peft/utils.py`, `.bfloat16()`);
    the reference is then the actor without them (`ref_in_actor`).
    """
    adapters = given.get("method", "full") != "full"
    # 16-bit weights alone, which param_offload moves where it is set (megatron_workers.py:1233 of 0.6.0)
    scores: dict[str, Any] = {"precision": "mixed", "offload.parameters": False}
    roles: dict[str, dict[str, Any]] = {
        "reward": {} if task == "sft" else scores,
        "reference": {} if task == "sft" or adapters else scores,
        "critic": {"packing": True} if task == "ppo" else {},  # `preprocess_packed_seqs` for all roles
    }
    return {
        "precision": "mixed",
        "grad_dtype": "fp32",
        "optimizer": "adamw",
        "optimizer_impl": "fused",  # Transformer Engine's FusedAdam, of Megatron-core
        "no_sync": False,
        "packing": True,
        "checkpointing": "none",
        "reentrant": True,  # Megatron-core's own `CheckpointFunction`
        "sequence_parallel": int(given.get("tensor_parallel", 1)) > 1,
        **({"lora.dtype": "bf16"} if adapters else {}),
        **{f"roles.{role}.{name}": value for role, own in roles.items() for name, value in own.items()},
    }


def refuse(s: Scenario) -> Refusal | None:
    """The reason why the engine cannot train the model whose scenario is `s`, in one line, or None."""
    version, given = s.framework_version, "with sharding megatron"
    if not reached(version, FIRST):
        return Refusal("sharding", "'megatron'", f"fsdp1; megatron is modelled from {FIRST} on", f"with verl {version}")
    fixed: dict[str, tuple[Any, ...]] = {
        "method": ("full", "lora") if reached(version, BRIDGE) else ("full",),
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
        "entropy_from_logits_with_chunking": (False,),
        "kernels": ("eager",),  # use_liger is "only valid when we use hf model definition" (config/model/hf_model.yaml)
        "reentrant": megatron_core.reruns(s),
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
    if s.lora and (fault := adapters_fault(s)):
        return fault
    stages = megatron_core.stages_fault(s) or megatron_core.chunks_fault(s)
    return stages or megatron_core.linear_fault(s) or megatron_core.parts_fault(s, known=False)


def adapters_fault(s: Scenario) -> Refusal | None:
    """The reason why Megatron-Bridge's adapters cannot be as `s` asks, or are not modelled so, in one line, or None.

    Tensor-parallel ranks share the first matrix's rows (`ColumnParallelLinear`, which divides them evenly).
    """
    assert s.lora
    if s.lora.dtype != "bf16":
        return Refusal("lora.dtype", f"{s.lora.dtype!r} with sharding megatron", "bf16")
    if s.lora.rank % s.tensor_parallel:
        return Refusal("lora.rank", s.lora.rank, f"a multiple of tensor_parallel = {s.tensor_parallel}")
    if s.architecture.experts and s.expert_tensor_parallel > 1:
        return Refusal("expert_tensor_parallel", f"{s.expert_tensor_parallel} with method lora", "1; not modelled")
    if s.rollout and s.rollout.layered_summon:
        return Refusal("rollout.layered_summon", "true with sharding megatron", "false; FSDP's units have it")
    return None


def unlike(s: Scenario) -> Refusal | None:
    """The reason why another role than the actor cannot be on it as given, in one line, or None.

    The first role to start divides the GPUs for all in its process (`_init_device_mesh` of 0.9.1; megatron_workers.py,
    `torch.distributed.is_initialized` before).
    """
    for name in ("critic", "reference", "reward"):
        role = s.role(name)
        for field in ALIKE if role else ():
            if (given := getattr(role, field)) != (job := getattr(s, field)):
                allowed = f"{show(job)}, as the actor's with sharding megatron"
                return Refusal(f"roles.{name}.{field}", show(given), allowed)
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
    """The models of the job, each of them in the job's pipeline stages.

    With `param_offload` the buffer of gradients goes, too, whatever `grad_offload` says, a flag that is never read
    (`offload_megatron_model_to_cpu`).
    """
    learns, count = s.entropy_coeff != 0, s.pipeline_parallel
    for name in ORDER:
        own = megatron_core.owner(s, name)
        if own is None:
            continue
        asked: dict[Leaves, bool] = {
            "weights": own.offload.parameters,
            "states": own.offload.optimizer and name in TRAINED,
        }
        actor, valued = name == "actor", name in VALUED
        # a value model scores as many at once as it trains on (forward_micro_batch_size_per_gpu)
        scored = own.rows if valued else own.scoring_rows
        if not actor and own.max_tokens_per_gpu and s.rollout:
            scored = own.filled(own.max_tokens_per_gpu, s.rollout.batch * s.rollout.n)
        whole = Role(
            name,
            Path("scalar") if valued else loss_path(own, entropy=learns and actor),
            # old log-probabilities come with the entropy, the reference's without (megatron_workers.py:543 of 0.4.1)
            Path("scalar") if valued else loss_path(own, entropy=actor and s.rollout is not None),
            own.rows,
            scored,
            leaves=frozenset(word for word, moved in asked.items() if moved),
            shares=bool(name == "reference" and s.lora),
            # models/mcore/patch.py of 0.8.0, apply_patch_megatron_recomputation_backward; not yet in 0.7.1
            frees_inputs=reached(s.framework_version, "0.8.0"),
        )
        yield from megatron_core.stages_of(whole, count)


def stages(s: Scenario, names: list[str]) -> tuple[Stage, ...]:
    """The stages of one step, in which the models called `names` work."""
    owners = {name: megatron_core.owner(s, name) for name in TRAINED}
    offloaded = frozenset(name for name, own in owners.items() if own and own.offload.parameters)
    return _stages(
        s.framework_version, offloaded, tuple(names), serves=s.rollout is not None, adapters=s.lora is not None
    )


@lru_cache(maxsize=1024)
def _stages(
    version: str, offloaded: frozenset[str], names: tuple[str, ...], *, serves: bool, adapters: bool
) -> tuple[Stage, ...]:
    """The stages of one step: rollout, scores, the updates of critic and actor, checkpoints, weights to vLLM.

    A checkpoint loads a model with its gradients (`save_checkpoint`) if its weights are `offloaded`.
    """
    trained = [(role, name) for role in TRAINED for name in megatron_core.named(names, role)]
    found = [Stage("train", name) for _, name in trained]
    found += [Stage("save", name, holds=GRADIENTS if role in offloaded else ()) for role, name in reversed(trained)]
    if not serves:
        return tuple(found)
    scored = [Stage("score", name) for role in SCORE for name in megatron_core.named(names, role)]
    synced = _synced(version, "actor" in offloaded, adapters=adapters)
    sent = [replace(synced, role=name) for name in megatron_core.named(names, "actor")]
    return (Stage("serve", "rollout", engine="all"), *scored, *found, *sent)


def _synced(version: str, offloaded: bool, *, adapters: bool) -> Stage:
    """The stage in which vLLM gets the actor's weights.

    Until 0.5 gradients come back with weights that are `offloaded` (sharding_manager/megatron_vllm.py:126 of 0.4.1,
    :150 of 0.5.0), later they do not (:152 of 0.6.0). Where adapters train, they alone are sent, as vLLM has read the
    base from its checkpoint, and an `offloaded` base stays on the host (`get_per_tensor_param`, `load_frozen_params`).
    """
    if adapters:
        return Stage("sync", "actor", engine="weights", holds=("bucket",), back="none" if offloaded else "own")
    loaded = () if reached(version, "0.6.0") or not offloaded else GRADIENTS
    bucket: tuple[Holds, ...] = ("bucket",) if reached(version, "0.7.1") else ()
    return Stage("sync", "actor", engine="weights", holds=("parameter", *bucket, *loaded))
