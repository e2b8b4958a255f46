"""slime: GRPO and REINFORCE++ on Megatron-core with SGLang, on the same GPUs or on others.

With `--colocate` everything that training has on a GPU leaves for the host while SGLang generates: torch_memory_saver,
loaded before the process starts, pauses all blocks that PyTorch's allocator has, and NCCL's groups are destroyed. Then
all of it comes back, to score and to train. The weights that SGLang gets come from a copy on the host, made after each
step. A reference has no place of its own: its weights are copied over the actor's, and back (`ray/actor_group.py`,
`backends/megatron_utils/actor.py`, `utils/{tensor_backper,reloadable_process_group}.py`). Files are those of
THUDM/slime, below `slime/`, in the tags that `releases.RELEASES` names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any

from calc.base.plan import Keeps, Leaves, Path, Role, Serving, Stage
from calc.base.refusal import Refusal
from calc.base.schema import show
from calc.base.versions import at_least
from calc.base.versions import nearest as _nearest
from calc.frameworks import megatron_core
from calc.frameworks.base import Choices
from calc.frameworks.constraints import cut_alike, trainer_fault, unmodelled, zero_fault
from calc.frameworks.releases import NOTHING, pinned, stated
from calc.frameworks.slime.releases import ADAPTERS, DEFAULTS, RELEASES
from calc.models.architecture import Architecture
from calc.scenario.scenario import Scenario

KNOWN: tuple[str, ...] = tuple(RELEASES)
CHOICES = Choices(megatron=True, sharding="megatron", engines=("sglang",))
TASKS = ("grpo", "reinforce++")


def modelled(architecture: Architecture, values: Mapping[str, Any]) -> Architecture:
    """The model as Megatron-core has it; linear attention runs in layers of slime's own, `slime_plugins/models`."""
    linear = "another framework: slime's own layers of it are not modelled"
    return megatron_core.modelled(architecture, "framework", "verl, trl", given="slime", linear=linear)


def nearest(version: str) -> str:
    """The known version whose memory behaviour `version` shares."""
    return _nearest(version, KNOWN)


def defaults(task: str, version: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The release's own defaults, by dotted key, or what its scripts have where a flag has none."""
    adapters = NOTHING if given.get("method", "full") == "full" else ADAPTERS
    values = stated(task, version, DEFAULTS, adapters) | pinned(RELEASES[version])
    for place in ("rollout.batch", "rollout.n"):
        values[place] = int(given.get(place, values[place]))
    return values | {
        # one step for each rollout, as the scripts have it: 256 of 32 x 8 samples
        "global_batch": values["rollout.batch"] * values["rollout.n"],
        "sequence_parallel": int(given.get("tensor_parallel", 1)) > 1,
        # --offload-rollout, which --colocate switches on
        "rollout.sleep": given.get("placement", "colocated") == "colocated",
    }


def refuse(s: Scenario) -> Refusal | None:
    """The reason why slime cannot run `s`, or is not modelled for it, in one line, or None."""
    if reason := trainer_fault(s) or zero_fault(s) or unmodelled(s):
        return reason
    if s.task not in TASKS or not s.rollout:
        return Refusal("task", repr(s.task), ", ".join(TASKS), "with slime")
    for name in ("critic", "reward"):
        if s.has(name):
            return Refusal(f"roles.{name}", "a model with slime", "none; not modelled")
    fixed: dict[str, tuple[Any, ...]] = {
        "method": ("full",),
        "sharding": ("megatron",),
        "precision": ("mixed",),
        "grad_dtype": ("fp32",),
        "optimizer": ("adamw",),
        "optimizer_impl": ("fused",),
        "attention": ("flash",),
        "loss": ("full",),
        "logprob": ("logsumexp",),
        "packing": (True,),
        "no_sync": (False,),
        "reentrant": (False,),
        "rollout.sleep": (s.placement == "colocated",),
        "offload.parameters": (False,),
        "cp_comm_type": ("p2p",),
    }
    for field, allowed in fixed.items():
        if (value := attrgetter(field)(s)) not in allowed:
            return Refusal(field, f"{show(value)} with slime", ", ".join(map(show, allowed)))
    if s.sequence_parallel is not (cut := s.tensor_parallel > 1):
        # "needed with MoE"; every script has it, too
        return Refusal("sequence_parallel", f"{show(s.sequence_parallel)} with slime", show(cut))
    own = s.role("actor") or s
    spread = placed_fault(s) or megatron_core.spread_fault(own, "with slime") or megatron_core.chunks_fault(own)
    return spread or megatron_core.stages_fault(s) or megatron_core.parts_fault(s, known=False)


def placed_fault(s: Scenario) -> Refusal | None:
    """The reason why the roles cannot be where they are, in one line, or None."""
    assert s.rollout
    sequences = s.rollout.batch * s.rollout.n
    if sequences % s.global_batch:  # utils/arguments.py: num_steps_per_rollout
        return Refusal("global_batch", s.global_batch, f"a divisor of rollout.batch x rollout.n = {sequences}")
    reference = s.role("reference")
    own = ", ".join(sorted(set(s.roles["reference"]) - {"model"})) if reference else ""
    if reference and (given := own or (repr(reference.model) if reference.model != s.model else "")):
        return Refusal("roles.reference", given, "{}, or none; it runs in the actor's place", "with slime")
    return cut_alike(s)


def threads(s: Scenario) -> int | None:
    """One: its actors ask Ray for a part of a CPU (`num_cpus=num_gpus_per_actor`, slime/ray/actor_group.py).

    Ray then leaves each a single thread (ray 2.60 `_private/utils.py:235`, `set_omp_num_threads_if_unset`).
    """
    return 1


def loss_path(s: Scenario, *, training: bool) -> Path:
    """The path from a rank's part of the logits, in fp32, to log-probabilities, and in training to entropies.

    To 0.2.4 each sample's response is cut out, and copied for each of the two; in 0.3.0 all logits are; from 0.3.1 on
    one softmax serves both, and the entropy keeps nothing unless it is part of the loss
    (`backends/megatron_utils/loss.py`, `get_log_probs_and_entropy`; `utils/ppo_utils.py`,
    `calculate_log_probs_and_entropy`).
    """
    if at_least(s.framework_version, "0.3.1"):
        learns = training and s.entropy_coeff != 0
        return Path("vocab-parallel-softmax", head_fp32=True, entropy="softmax" if learns else "")
    cuts = not at_least(s.framework_version, "0.3.0")
    return Path(
        "vocab-parallel-compiled",
        head_fp32=True,
        cut="slice" if cuts else "",
        kept=s.response_len / s.seq_len if cuts else 1.0,
        copied=True,
        apart=training,
        entropy="vocab-parallel" if training else "",
    )


def roles(s: Scenario) -> Iterator[Role]:
    """The models of the job, in the job's pipeline stages: the actor, and a reference in its place."""
    colocated = s.placement == "colocated"
    for name in ("reference", "actor"):
        own = s.role(name)
        if own is None:
            continue
        actor = name == "actor"
        # Adam on the host leaves no states to leave
        states: tuple[Leaves, ...] = () if own.offload.optimizer else ("states",)
        whole = Role(
            name,
            loss_path(own, training=True),
            loss_path(own, training=False),
            own.rows,
            own.scoring_rows,
            leaves=frozenset(("weights", *states)) if colocated and actor else frozenset(),
            shares=not actor,
            backups=1 + s.has("reference") if actor else 0,
            paused="" if not colocated else "states" if at_least(s.framework_version, "0.3.0") else "all",
        )
        yield from megatron_core.stages_of(whole, s.pipeline_parallel)


@lru_cache(maxsize=1024)
def stages(names: tuple[str, ...], *, colocated: bool) -> tuple[Stage, ...]:
    """The stages of one step: rollout, scores, the actor's update, a checkpoint, weights to SGLang (`train.py`)."""
    return tuple(_step(names, colocated=colocated))


def _step(names: tuple[str, ...], *, colocated: bool) -> Iterator[Stage]:
    """The same, one after the other."""
    yield Stage("serve", "rollout", engine="all")
    for does in ("reference", "actor"):
        for name in names:
            if name.partition(",")[0] == does:
                yield Stage("score", name, back="all")
    trained = [name for name in names if name.partition(",")[0] == "actor"]
    for name in trained:
        yield Stage("train", name)
    for name in trained:
        yield Stage("save", name, back="all")
    for name in trained:
        yield Stage("sync", name, engine="weights", holds=("flattened",), back="none" if colocated else "all")


def keeps(s: Scenario) -> Keeps:
    """The plan of slime's training actors, and of SGLang, which starts first and sleeps while they work."""
    assert s.rollout
    found, colocated = tuple(roles(s)), s.placement == "colocated"
    return Keeps(
        roles=found,
        stages=stages(tuple(role.name for role in found), colocated=colocated),
        # `create_rollout_manager` before `create_training_models` (train.py)
        loading=("rollout", *[role.name for role in found if not role.shares]),
        serving=Serving(
            version=s.versions["sglang"],
            max_model_len=s.seq_len,
            max_num_seqs=s.rollout.max_num_seqs,
            sleep_level=2,
            process="sglang",
        ),
        disconnects=colocated,
        notes=tuple(notes(s)),
    )


def notes(s: Scenario) -> Iterator[str]:
    """Notes on what no field of a scenario says."""
    yield megatron_core.computed(s)
    if s.checkpointing == "full":
        yield "full recomputation is --recompute-method uniform with one layer at a time"
    if s.rollout and s.rollout.serves:
        yield "SGLang is taken to be cut by tensor parallelism alone, and to decode without speculation"
