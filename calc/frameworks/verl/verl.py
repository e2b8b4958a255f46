"""verl: PPO, GRPO and REINFORCE++ on FSDP with vLLM, by version; `tinyzero` is the fork that Logic-RL is built on.

Read in the packages 0.2 to 0.9.1, and in Unakar/Logic-RL at 9d2c457 for the fork. Files are those of the release named:
`fsdp_workers.py` stands for `verl/workers/fsdp_workers.py`, which ended with 0.7; `engine.py` for
`verl/workers/engine/fsdp/transformer_impl.py`, which took its place. Every release is known that changed what stays in
memory; one in between behaves as the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from calc.base.plan import Awake, Back, Empties, Holds, Keeps, Leaves, Path, Role, Serving, Stage
from calc.base.refusal import Refusal
from calc.base.versions import at_least
from calc.base.versions import nearest as _nearest
from calc.frameworks import megatron_core
from calc.frameworks.base import Choices, as_published
from calc.frameworks.constraints import trainer_fault, unmodelled, zero_fault
from calc.frameworks.releases import NOTHING, pinned, stated
from calc.frameworks.verl import easyr1, engine, megatron, sft
from calc.frameworks.verl.releases import (
    ADAPTERS,
    DEFAULTS,
    DYNAMIC,
    FORK,
    FULL,
    RELEASES,
    RL,
    SFT,
    STATIC,
    forked,
    reached,
    shared,
)
from calc.models.architecture import Architecture
from calc.scenario.scenario import Scenario

KNOWN: tuple[str, ...] = (FORK, *easyr1.KNOWN, *[release for release in RELEASES if release != FORK])
CHOICES = Choices(offloads_apart=True, weights_stay=True, megatron=True, sharding="fsdp2", shared="context_parallel",
                  engines=("vllm",))  # fmt: skip

TASKS = ("ppo", "grpo", "reinforce++")


def modelled(architecture: Architecture, values: Mapping[str, Any]) -> Architecture:
    """The model as Megatron-core has it where that trains, else as Transformers has it.

    Without padding it gets positions and no mask, by which Transformers tells the sequences of a row apart since 4.53
    (`masking_utils.py`, find_packed_sequence_indices; workers/actor/dp_actor.py:200 of 0.7.0): SDPA gets a mask then.
    """
    if values["sharding"] != "megatron":
        published = as_published(architecture, values)
        joined = values["packing"] and engine.told_apart(values["versions.transformers"])
        return replace(published, masked=True, end_to_end=True) if joined else published
    return megatron.modelled(architecture, values["version"])


def nearest(version: str) -> str:
    """The known version whose memory behaviour `version` shares; releases before 0.2 are as the fork, made of them."""
    return easyr1.nearest(version) if forked(version) else _nearest(version, tuple(RELEASES))


def defaults(task: str, version: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The release's own defaults, by dotted key, as they work out on the job's GPUs; `given` is what the user set."""
    rl, gpus = task in TASKS, int(given.get("gpus", 1))
    adapters, dynamic = given.get("method", "full") != "full", "max_tokens_per_gpu" in given
    tables = (DEFAULTS, RL if rl else SFT, ADAPTERS if adapters else FULL, NOTHING if dynamic else STATIC)
    known = shared(version)
    values = stated(task, known, *tables) | pinned(RELEASES[known])
    if given.get("precision") == "bf16":  # FSDP casts what it has reduced to the parameters' type
        values |= {"grad_dtype": "bf16"} | ({"lora.dtype": "bf16"} if adapters else {})
    if rl and forked(version):
        values |= easyr1.defaults(task, version, given)
        values.pop("roles.reference", None)  # algorithm.disable_kl: false
    values["rollout.tensor_parallel"] = min(values["rollout.tensor_parallel"], gpus)
    for place in ("rollout.batch", "rollout.n"):
        values[place] = int(given.get(place, values[place]))
    if rl:
        values["global_batch"] = min(values["global_batch"], values["rollout.batch"]) * values["rollout.n"]
        values |= _bounds(task, known, given) if dynamic else {}
    else:
        values |= sft.defaults(values, given)
    values |= megatron.defaults(task, given) if given.get("sharding") == "megatron" else {}
    if version == FORK:  # its flags count the micro batches of all GPUs
        total = ("micro_batch", "rollout.micro_batch", "roles.reference.micro_batch")
        values |= {place: max(1, values[place] // gpus) for place in total if values.get(place)}
    return values


def _bounds(task: str, version: str, given: Mapping[str, Any]) -> dict[str, int]:
    """The bounds of dynamic batches for the roles that are given no micro batch."""
    bounds = stated(task, version, DYNAMIC)
    return {place: n for place, n in bounds.items() if f"{place.rpartition('.')[0]}.micro_batch" not in given}


def refuse(s: Scenario) -> Refusal | None:
    """The reason why verl cannot run `s`, in one line, or None."""
    version = s.framework_version
    if reason := trainer_fault(s) or zero_fault(s) or unmodelled(s):
        return reason
    if s.task in sft.TASKS:
        return sft.refuse(s) or (megatron.refuse if s.sharding == "megatron" else engine.refuse)(s)
    if s.task not in TASKS or not s.rollout:
        return Refusal("task", repr(s.task), ", ".join((*TASKS, *sft.TASKS)), "with verl")
    if s.placement != "colocated":
        # trainer/main_ppo.py; experimental/{one_step_off_policy,fully_async_policy} of 0.9.1 have trainers of their own
        allowed = "colocated; main_ppo has one pool of GPUs, and the trainers with two are not modelled yet"
        return Refusal("placement", "'separate'", allowed, "with verl")
    if not s.has("actor"):
        return Refusal("roles.actor", "'none'", "an actor, which it always trains", "with verl")
    for name, place in (("actor", ""), ("critic", "roles.critic.")):
        role = s.role(name)
        refused = megatron.refuse if role and role.sharding == "megatron" else engine.refuse
        if role and (reason := refused(role)):
            return reason.of(place)
    if s.sharding == "megatron" and (reason := megatron.unlike(s)):
        return reason
    if s.rollout.sleep and not s.rollout.enforce_eager and not reached(version, "0.5.0") and not forked(version):
        # asserted in vllm_rollout_spmd.py:90 of 0.4.0
        given = "false with rollout.sleep true"
        return Refusal("rollout.enforce_eager", given, "true, or with rollout.sleep false", f"with verl {version}")
    if s.rollout.layered_summon and not s.lora:
        return Refusal("rollout.layered_summon", "true with method full", "with lora, whose adapters it gathers")
    sequences = s.rollout.batch * s.rollout.n
    if sequences % s.data_parallel:  # utils/config.py:124 of 0.9.1; before, DataProto.chunk
        allowed = f"with rollout.n = {s.rollout.n} a multiple of {s.data_parallel}"
        return Refusal("rollout.batch", s.rollout.batch, allowed)
    if s.global_batch > sequences:  # config.validate: train_batch_size >= ppo_mini_batch_size; one rollout has no more
        return Refusal("global_batch", s.global_batch, f"at most rollout.batch x rollout.n = {sequences}")
    if forked(version) and (reason := easyr1.refuse(s)):
        return reason
    if s.has("reward") and reached(version, "0.7.1"):
        return Refusal("roles.reward", "a model", "none; its server is not modelled yet", f"with verl {version}")
    if (tokens := s.rollout.max_tokens_per_gpu) and (fault := engine.full_length(tokens, s)):
        return fault.of("rollout.")
    reference = s.role("reference")
    if reference and (tokens := reference.max_tokens_per_gpu) and (fault := engine.full_length(tokens, s)):
        return fault.of("roles.reference.")
    if reference and s.lora and s.roles["reference"] != {"model": s.model}:
        return Refusal("roles.reference", "with method lora", "none, or {} for the actor without its adapters")
    forced = version != FORK and not forked(version) and s.sharding != "megatron"
    if reference and not s.lora and forced and not reference.offload.parameters:
        return Refusal("roles.reference.offload.parameters", "false", "true, which it forces", f"with verl {version}")
    return None


def threads(s: Scenario) -> int | None:
    """One for RL, whose workers ask Ray for no CPUs (ray 2.60 `_private/utils.py:257`); SFT runs under torchrun.

    No step of an optimizer takes longer for it: what verl offloads comes back to the card for its step.
    """
    return 1 if s.task in TASKS or min(s.gpus, s.gpus_per_node) > 1 else None


def keeps(s: Scenario) -> Keeps:
    """The plan of verl's workers: roles in turn on the same GPUs, and vLLM, which sleeps while they work."""
    if s.task in sft.TASKS:
        return sft.keeps(s)
    assert s.rollout
    version, vllm = s.framework_version, s.versions["vllm"]
    on_megatron = s.sharding == "megatron"
    found = tuple(megatron.roles(s) if on_megatron else _roles(s))
    notes = list(megatron_core.notes(s)) if on_megatron else []
    if version == FORK:
        whole = s.rollout.batch * s.rollout.n // s.gpus
        notes.append(
            f"The fork runs {found[-1].rows} sequences in one forward: it multiplies its micro-batch flag, here "
            f"{s.micro_batch} for each GPU, by rollout.n = {s.rollout.n}, so that {s.rollout.n} are the least, and a "
            f"GPU's whole rollout, {whole}, the most."
        )
    return Keeps(
        roles=found,
        stages=tuple((megatron.stages if on_megatron else _stages)(s, [role.name for role in found])),
        # ray_trainer.py, init_workers of 0.2: "create rollout at the end so that vllm can have a better estimation of
        # kv cache memory"; engine_workers.py:541-640 of 0.9.1 builds the reference before the actor
        loading=(*[role.name for role in found if not role.shares], "rollout"),
        serving=Serving(
            version=vllm,
            max_model_len=s.rollout.max_model_len or s.seq_len,
            max_num_seqs=s.rollout.max_num_seqs,
            max_num_batched_tokens=s.rollout.max_num_batched_tokens,
            graphs=not s.rollout.enforce_eager,
            # third_party/vllm/vllm_v_0_6_3/worker.py:210 of the fork; vLLM's own worker from 0.7 on
            share_of_free=not at_least(vllm, "0.7"),
            sleep_level=_sleep_level(s),
            # until 0.7.0 vLLM's worker lives in the trainer's (vllm_rollout.py:112 of 0.7.0), then in a server's
            process="vllm" if reached(version, "0.7.1") else "trainer",
        ),
        notes=tuple(notes),
        empties="" if on_megatron else _empties(version),
    )


def _empties(version: str) -> Empties:
    """When PyTorch's cache is emptied.

    To 0.2 each method of a worker ends so (fsdp_workers.py:450 of 0.2); then only what moves weights to the host does
    (`offload_fsdp_model_to_cpu`, utils/fsdp_utils.py:115 of 0.3.0, :169 of 0.9.1), and a rollout at both its ends
    (sharding_manager/fsdp_vllm.py:83 and :133 of 0.3.0; engine_workers.py:691 and :769 of 0.9.1).
    """
    return "each" if version in (FORK, "0.2") else "leaving"


def _sleep_level(s: Scenario) -> int:
    """1 until 0.5 (sharding_manager/fsdp_vllm.py:240 of 0.5.0), and again for adapters from 0.7.1 on; else 2.

    third_party/vllm/__init__.py:49 of 0.6.0; vllm_async_server.py:636-639 of 0.7.1: adapters leave the base in vLLM, as
    they do before with layered_summon (vllm_rollout_spmd.py:105 of 0.6.0, vllm_rollout.py:131 of 0.7.0).
    """
    assert s.rollout
    version = s.framework_version
    if not at_least(s.versions["vllm"], "0.7"):
        return (
            2  # pages never touched: `torch.empty_like(param, device="cpu")`, third_party/vllm/vllm_v_0_6_3/worker.py
        )
    keeps_base = s.lora and (s.rollout.layered_summon or reached(version, "0.7.1"))
    return 1 if not reached(version, "0.6.0") or keeps_base else 2


def _roles(s: Scenario) -> Iterator[Role]:
    """The models of the job, in the order in which they load."""
    assert s.rollout
    version, scalar = s.framework_version, Path("scalar")
    learns = s.entropy_coeff != 0  # calculate_entropy, dp_actor.py:386 of 0.4.0, :580 of 0.7.1
    whole = max(1, s.rollout.batch * s.rollout.n // s.data_parallel)
    for name in ("critic", "reference", "reward", "actor"):
        role = s.role(name)
        if role is None:
            continue
        # critic and reward model keep their micro batches as they are in the fork, too (fsdp_workers.py:535-537)
        count = role.rows if name in ("actor", "reference") else min(role.micro_batch, whole)
        scored = role.scoring_rows if name == "actor" else count
        if role.max_tokens_per_gpu:
            count = role.rows
            if name != "actor":
                scored = role.filled(role.max_tokens_per_gpu, s.rollout.batch * s.rollout.n)
        # verl itself moves trained models; models that only score are on the host with PyTorch's CPUOffload, except the
        # fork's reference, which it moves by hand (fsdp_workers.py:342 of the fork)
        by_hand: dict[str, tuple[Leaves, ...]] = {
            "actor": engine.MOVED,
            "critic": engine.MOVED,
            "reference": ("weights",) if version == FORK else (),
        }
        language = name in ("actor", "reference")
        yield engine.role(
            name,
            role,
            engine.loss_path(role, count, entropy=learns and name == "actor") if language else scalar,
            # old log-probabilities come with the entropy in every release (fsdp_workers.py:706 of 0.4.1,
            # v1/trainer_base.py:1653 of 0.9.1), the reference's and EasyR1's without
            engine.loss_path(role, scored, entropy=name == "actor" and not forked(version)) if language else scalar,
            count,
            scored,
            moved=by_hand.get(name, ()),
            shares=bool(name == "reference" and s.lora),  # ref_in_actor (ray_trainer.py:393 of 0.4.0)
        )


def _stages(s: Scenario, names: list[str]) -> Iterator[Stage]:
    """The stages of one step: rollout, scores, critic, actor, a checkpoint, weights to vLLM. They run one at a time.

    trainer/ppo/v1/trainer_base.py:533-620 of 0.9.1; until 0.7 the weights reach vLLM as the next rollout begins.
    """
    # until 0.2 the weights stay on the GPU for the state dict of the first sync, and leave once vLLM has generated
    kept: tuple[Holds, ...] = ("weights",) if s.framework_version in (FORK, "0.2") else ()
    yield Stage("serve", "rollout", engine="all", holds=kept)
    for name in ("reward", "actor", "reference", "critic"):
        if name in names:
            yield Stage("score", name)
    trained = [name for name in ("critic", "actor") if name in names]
    for name in trained:
        yield Stage("train", name)
    for name in reversed(trained):
        yield engine.saving(s, name)
    yield from _syncs(s)


def _syncs(s: Scenario) -> Iterator[Stage]:
    """The sync of the actor's fp32 weights to vLLM, one by one, gathered from a state dict of shards.

    engine.py:977-1036 and engine_workers.py:772-805 of 0.9.1: vLLM's weights are there first; until 0.7 they come only
    then (fsdp_workers.py:740-822 of 0.7.1, sharding_manager/fsdp_vllm.py:156-200 of 0.4.1). FSDP 1's state dict is a
    copy of the shards, FSDP 2's refers to them. With adapters only these are sent, for which FSDP 1 gathers the whole
    model (`summon_full_params`, utils/fsdp_utils.py:629 of 0.6.0), or with layered_summon a layer at a time
    (`layered_summon_lora_params`, :464 of 0.4.0), from 0.9.0 on a unit that has adapters (:645 of 0.9.1), while FSDP 2
    gathers each adapter anyway.
    """
    assert s.rollout
    version = s.framework_version
    summoned: Holds = "whole"
    if s.rollout.layered_summon:
        summoned = "adapter" if reached(version, "0.9.0") else "layer"
    # bucketed_weight_transfer.py:165 of 0.7.1
    bucket: tuple[Holds, ...] = ("bucket",) if reached(version, "0.7.1") else ()
    before: Awake = "weights" if reached(version, "0.8.0") or easyr1.wakes_first(version) else "asleep"
    if s.sharding == "fsdp2":
        # shards on the host are sent from there, one by one (_skip_staging, engine/fsdp/transformer_impl.py:961 of
        # 0.9.0), and until 0.8 come back before
        back: Back = "none" if reached(version, "0.9.0") and s.offload.parameters and not s.lora else "own"
        yield Stage("sync", "actor", engine="weights", holds=bucket if s.lora else ("parameter", *bucket), back=back)
        return
    yield Stage("sync", "actor", engine=before, holds=(summoned,) if s.lora else ("units", "copies"))
    yield Stage("sync", "actor", engine="weights", holds=bucket if s.lora else ("copies", "parameter", *bucket))
