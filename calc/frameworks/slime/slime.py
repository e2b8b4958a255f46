"""slime: PPO, GRPO and REINFORCE++ on Megatron-core with SGLang, on the same GPUs or on others, and SFT.

With `--colocate` everything that training has on a GPU leaves for the host while SGLang generates: torch_memory_saver,
loaded before the process starts, pauses all blocks that PyTorch's allocator has, and NCCL's groups are destroyed. Then
all of it comes back, to score and to train. The weights that SGLang gets come from a copy on the host, made after each
step. A reference has no place of its own: its weights are copied over the actor's, and back. A critic is a process
beside the actor's, and one of the two is awake at a time (`ray/{actor_group,placement_group}.py`,
`backends/megatron_utils/actor.py`, `utils/{tensor_backper,reloadable_process_group}.py`). Files are those of
THUDM/slime, below `slime/`, in the tags that `releases.RELEASES` names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any

from calc.base.plan import Back, Keeps, Leaves, Path, Paused, Role, Serving, Stage
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
TASKS = ("ppo", "grpo", "reinforce++", "sft")
BESIDE = "0.3.0"  # the critic shares the actor's GPUs; before, it had others (`create_placement_groups`)


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
    if task == "sft":
        return values | {"sequence_parallel": int(given.get("tensor_parallel", 1)) > 1}
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
    if s.task not in TASKS:
        return Refusal("task", repr(s.task), ", ".join(TASKS), "with slime")
    if s.has("reward"):
        return Refusal("roles.reward", "a model with slime", "none; not modelled")
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
        "reentrant": megatron_core.reruns(s),
        "offload.parameters": (False,),
        "cp_comm_type": ("p2p",),
        **({"rollout.sleep": (s.placement == "colocated",)} if s.rollout else {}),
    }
    for field, allowed in fixed.items():
        if (value := attrgetter(field)(s)) not in allowed:
            return Refusal(field, f"{show(value)} with slime", ", ".join(map(show, allowed)))
    if s.sequence_parallel is not (cut := s.tensor_parallel > 1):
        # "needed with MoE"; every script has it, too
        return Refusal("sequence_parallel", f"{show(s.sequence_parallel)} with slime", show(cut))
    own = s.role("actor") or s
    placed = placed_fault(s) if s.rollout else None
    spread = placed or megatron_core.spread_fault(own, "with slime") or megatron_core.chunks_fault(own)
    return spread or megatron_core.stages_fault(s) or megatron_core.parts_fault(s, known=False)


def placed_fault(s: Scenario) -> Refusal | None:
    """The reason why the roles cannot be where they are, in one line, or None."""
    assert s.rollout
    sequences = s.rollout.batch * s.rollout.n
    if sequences % s.global_batch:  # utils/arguments.py: num_steps_per_rollout
        return Refusal("global_batch", s.global_batch, f"a divisor of rollout.batch x rollout.n = {sequences}")
    for name, allowed in (
        ("reference", "{}, or none; it runs in the actor's place"), ("critic", "{}; it has the actor's flags"),
    ):  # fmt: skip
        role = s.role(name)
        own = ", ".join(sorted(set(s.roles[name]) - {"model"})) if role else ""
        if role and (given := own or (repr(role.model) if role.model != s.model else "")):
            return Refusal(f"roles.{name}", given, allowed, "with slime")
    return critic_fault(s) or cut_alike(s)


def critic_fault(s: Scenario) -> Refusal | None:
    """The reason why PPO's critic cannot be where it is, or is not modelled there, in one line, or None."""
    if s.task != "ppo":
        return None
    if not at_least(s.framework_version, BESIDE):
        return Refusal("task", "'ppo' with slime", f"grpo, reinforce++, sft; ppo is modelled from {BESIDE} on")
    if not s.has("critic"):  # args.use_critic = args.advantage_estimator == "ppo"
        return Refusal("roles.critic", "'none' for ppo", "{}, which it always trains", "with slime")
    if s.placement != "colocated":
        return Refusal("placement", "'separate' for ppo", "colocated; not modelled", "with slime")
    return None


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
    `calculate_log_probs_and_entropy`). SFT has no entropy (`sft_loss_function`).
    """
    if at_least(s.framework_version, "0.3.1"):
        learns = training and s.entropy_coeff != 0 and s.rollout is not None
        return Path("vocab-parallel-softmax", head_fp32=True, entropy="softmax" if learns else "")
    cuts = not at_least(s.framework_version, "0.3.0")
    both = training and s.rollout is not None
    return Path(
        "vocab-parallel-compiled",
        head_fp32=True,
        cut="slice" if cuts else "",
        kept=s.response_len / s.seq_len if cuts and s.rollout else 1.0,
        copied=True,
        apart=both,
        entropy="vocab-parallel" if both else "",
    )


def roles(s: Scenario) -> Iterator[Role]:
    """The models of the job, in the job's pipeline stages: the actor, a reference in its place, and a critic."""
    for name in ("reference", "actor", "critic"):
        own = megatron_core.owner(s, name)
        if own is None:
            continue
        scalar, trained = name == "critic", name != "reference"
        # Adam on the host leaves no states to leave
        states: tuple[Leaves, ...] = () if own.offload.optimizer else ("states",)
        whole = Role(
            name,
            Path("scalar") if scalar else loss_path(own, training=True),
            Path("scalar") if scalar else loss_path(own, training=False),
            own.rows,
            own.scoring_rows,
            leaves=frozenset(("weights", *states)) if pauses(s) and trained else frozenset(),
            shares=not trained,
            backups=1 + s.has("reference") if name == "actor" else 0,
            paused=paused(s, name),
            process="critic" if scalar else "trainer",
        )
        yield from megatron_core.stages_of(whole, s.pipeline_parallel)


def pauses(s: Scenario) -> bool:
    """True if training leaves the GPUs while SGLang generates (`offload_train`)."""
    return s.rollout is not None and s.placement == "colocated"


def paused(s: Scenario, name: str) -> Paused:
    """What of a role's blocks the host gets copies of as they pause (`disable_param_buffers_cpu_backup`)."""
    if not pauses(s):
        return ""
    if not at_least(s.framework_version, "0.3.0"):
        return "all"
    return "weights" if name == "critic" else "states"


@lru_cache(maxsize=1024)
def stages(names: tuple[str, ...], *, serves: bool, colocated: bool) -> tuple[Stage, ...]:
    """The stages of one step: rollout, values and the critic's update, scores and the actor's, checkpoints, a sync.

    `train.py`; `train_critic` and `train_actor` of `backends/megatron_utils/actor.py`. SFT trains alone.
    """
    actor, critic, reference = (megatron_core.named(names, role) for role in ("actor", "critic", "reference"))
    trained = [Stage("train", name) for name in actor]
    saved = [Stage("save", name, back="all") for name in (*actor, *critic)]
    if not serves:
        return (*trained, *saved)
    back: Back = "none" if colocated else "all"
    return (
        Stage("serve", "rollout", engine="all"),
        *[Stage("score", name, back="all") for name in critic],
        *[Stage("train", name) for name in critic],
        *[Stage("score", name, back="all") for name in (*reference, *actor)],
        *trained,
        *saved,
        *[Stage("sync", name, engine="weights", holds=("flattened",), back=back) for name in actor],
    )


def keeps(s: Scenario) -> Keeps:
    """The plan of slime's training actors, and of SGLang, which starts first and sleeps while they work."""
    found = tuple(roles(s))
    loading = [role.name for role in found if not role.shares]
    serving: Serving | None = None
    if s.rollout:
        serving = Serving(
            version=s.versions["sglang"],
            max_model_len=s.seq_len,
            max_num_seqs=s.rollout.max_num_seqs,
            sleep_level=2,
            process="sglang",
        )
    return Keeps(
        roles=found,
        stages=stages(
            tuple(role.name for role in found), serves=s.rollout is not None, colocated=s.placement == "colocated"
        ),
        # `create_rollout_manager` before `create_training_models` (train.py)
        loading=("rollout", *loading) if serving else tuple(loading),
        serving=serving,
        disconnects=pauses(s),
        notes=tuple(notes(s)),
    )


def notes(s: Scenario) -> Iterator[str]:
    """Notes on what no field of a scenario says."""
    yield megatron_core.computed(s)
    if s.checkpointing == "full":
        yield "full recomputation is --recompute-method uniform with one layer at a time"
    if s.rollout and s.rollout.serves:
        yield "SGLang is taken to be cut by tensor parallelism alone, and to decode without speculation"
