"""verl: PPO, GRPO and REINFORCE++ on FSDP with vLLM, by version; `tinyzero` is the fork that Logic-RL is built on.

Read in the packages 0.2 to 0.9.1, and in Unakar/Logic-RL at 9d2c457 for the fork. Files are those of the release named:
`fsdp_workers.py` stands for `verl/workers/fsdp_workers.py`, which ended with 0.7; `engine.py` for
`verl/workers/engine/fsdp/transformer_impl.py`, which took its place. Every release is known that changed what stays in
memory; one in between behaves as the one before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from calc.base.plan import Awake, Holds, Keeps, Leaves, Path, Role, Serving, Stage
from calc.base.versions import at_least
from calc.base.versions import nearest as _nearest
from calc.frameworks.base import Choices, as_published
from calc.frameworks.constraints import linear_fault, trainer_fault
from calc.frameworks.verl import engine, sft
from calc.frameworks.verl.engine import FORK
from calc.scenario.scenario import Scenario


class Pins(NamedTuple):
    """The libraries that a release runs on: its own pins, else the newest vLLM that it allows and what vLLM needs."""

    vllm: str
    transformers: str
    torch: str


RELEASES: Mapping[str, Pins] = {
    FORK: Pins("0.6.3", "4.47.1", "2.4.0"),  # requirements.txt: transformers<4.48, vllm==0.6.3
    "0.2": Pins("0.6.3", "4.47.1", "2.4.0"),  # micro batches a GPU; the reference always on the host
    # vllm<=0.8.2, whose worker verl does not patch; its own is for 0.6.3
    "0.3.0": Pins("0.6.3", "4.47.1", "2.4.0"),
    "0.4.0": Pins("0.8.5", "4.51.3", "2.6.0"),  # reference by flag, entropy by flag, backward in place, fsdp2, LoRA
    "0.6.0": Pins("0.9.1", "4.56.1", "2.7.0"),  # CUDA graphs, sleep level 2, a reference in fp32
    "0.6.1": Pins("0.11.0", "4.56.1", "2.8.0"),
    "0.7.0": Pins("0.12.0", "4.57.1", "2.9.0"),  # the actor's padding removed by default
    "0.7.1": Pins("0.12.0", "4.57.1", "2.9.0"),  # vLLM in processes of its own, weights sent in buckets
    "0.8.0": Pins("0.12.0", "4.57.6", "2.9.0"),  # engines alone: the root unit stays gathered after an evaluation
    "0.9.0": Pins("0.24.0", "5.9.0", "2.11.0"),  # 256 sequences; allows vllm>=0.18 and transformers 5.5.3 to 5.10
    "0.9.1": Pins("0.24.0", "5.9.0", "2.11.0"),  # logits are not divided by a temperature of 1
}
KNOWN: tuple[str, ...] = tuple(RELEASES)
CHOICES = Choices(offloads_apart=True, weights_stay=True, shared="context_parallel")

TASKS = ("ppo", "grpo", "reinforce++")

modelled = as_published


def nearest(version: str) -> str:
    """The known version whose memory behaviour `version` shares; releases before 0.2 are as the fork, made of them."""
    return _nearest(version, KNOWN)


def defaults(task: str, version: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """`trainer/config/ppo_trainer.yaml` of the release, by dotted key; `given` is what the user set."""
    pins = RELEASES[version]
    gpus, fork = int(given.get("gpus", 1)), version == FORK
    prompts = int(given.get("rollout.batch", 1024))
    # the flag's default is 1, with which a group has no advantage: examples/grpo_trainer and
    # examples/reinforce_plus_plus_trainer set 5
    n = int(given.get("rollout.n", 1 if task == "ppo" else 5))
    adapters, dynamic = given.get("method", "full") != "full", "max_tokens_per_gpu" in given
    values: dict[str, Any] = {
        # data.max_prompt_length, max_response_length, train_batch_size: the same in every release
        "prompt_len": 512,
        "response_len": 512,
        "rollout.batch": prompts,
        "rollout.n": n,
        # the fork: ppo_micro_batch_size 64 for the whole job; later it has no default, and 1 is the smallest
        "micro_batch": max(1, 64 // gpus) if fork else 1,
        # actor.ppo_mini_batch_size 256 prompts, times n (fsdp_workers.py:97-100 of the fork, :121 of 0.2)
        "global_batch": min(256, prompts) * n,
        # from_pretrained in fp32 for what is trained, MixedPrecision(bf16, reduce fp32) (fsdp_workers.py:167 of 0.2)
        "precision": "fsdp-mixed",
        "sharding": "fsdp1",  # actor.strategy: fsdp
        "optimizer": "adamw",
        "optimizer_impl": "foreach",  # torch.optim.AdamW without fused (fsdp_workers.py:267 of 0.2)
        "offload.optimizer": False,  # fsdp_config.optimizer_offload
        "offload.parameters": False,  # fsdp_config.param_offload
        "grad_dtype": "fp32",  # the shard that reduce_dtype fp32 leaves
        "no_sync": engine.reduces_once(version),
        "checkpointing": "none" if fork else "full",  # model.enable_gradient_checkpointing
        "attention": "flash",  # attn_implementation='flash_attention_2' (fsdp_workers.py:202 of 0.2)
        "loss": "full",  # model.use_fused_kernels: False
        "logprob": "logsumexp",  # flash-attn's cross entropy (utils/torch_functional.py:52-67 of 0.2)
        # use_remove_padding: False in ppo_trainer.yaml:21 of 0.2, True in model/hf_model.yaml:40 of 0.7.0
        "packing": at_least(version, "0.7.0"),
        "rollout.engine": "vllm",  # rollout.name; 0.9 wants it given
        "rollout.tensor_parallel": min(2, gpus),  # rollout.tensor_model_parallel_size 2, which one GPU cannot do
        "rollout.gpu_memory_utilization": 0.5,
        # rollout.log_prob_micro_batch_size_per_gpu has no default and must be given, in the fork it is 128 for all GPUs
        "rollout.micro_batch": max(1, 128 // gpus) if fork and not dynamic else None,
        # actor.use_dynamic_bsz is false; log_prob_max_token_len_per_gpu is the actor's ppo_max_token_len_per_gpu
        "max_tokens_per_gpu": None,
        "rollout.max_tokens_per_gpu": None,
        "rollout.sleep": True,  # rollout.free_cache_engine
        # on once vLLM has its weights (workers/fsdp_workers.py of 0.6.0, workers/engine_workers.py:805 of 0.9.0)
        "expandable_segments": at_least(version, "0.6.0"),
        "versions.vllm": pins.vllm,
        "versions.transformers": pins.transformers,
        "versions.torch": pins.torch,
        "roles.reward": "none",  # reward_model.enable: False, a function scores
        # RewardModelWorker: bf16 (fsdp_workers.py:943 of 0.2), CPUOffload as flagged in the fork, always later (:960)
        "roles.reward.precision": "bf16",
        "roles.reward.offload.parameters": not fork,
        # fsdp_workers.py:96-101 of the fork: `//= world size`, `*= rollout.n`; `batch.split`
        # (workers/actor/dp_actor.py) hands out what there is
        "counts_prompts": fork,
    }
    if task == "ppo" and at_least(version, "0.7.0") and not at_least(version, "0.8.0"):
        values["roles.critic.packing"] = False  # critic/dp_critic.yaml:44 of 0.7.1, which became the actor's in 0.8.0
    if task in TASKS:
        # actor.entropy_coeff, ppo_trainer.yaml:31 of 0.2, :56 of 0.4.0
        values["entropy_coeff"] = 0 if at_least(version, "0.4.0") else 0.001
    if not fork:
        values["rollout.max_num_batched_tokens"] = 8192  # passed since 0.2 (vllm_rollout.py:104)
    if at_least(version, "0.6.0"):
        # passed since then (vllm_rollout_spmd.py:203); rollout.yaml:84 of 0.9.0
        values["rollout.max_num_seqs"] = 256 if at_least(version, "0.9.0") else 1024
    if dynamic and task in TASKS:
        # critic.ppo_max_token_len_per_gpu, which reward models use, too (ppo_trainer.yaml:120 and :145 of 0.2)
        own = [name for name in ("critic", "reward") if f"roles.{name}.micro_batch" not in given]
        values |= {f"roles.{name}.max_tokens_per_gpu": 32768 for name in own}
    if task not in TASKS:
        values |= sft.defaults(given) | {"expandable_segments": False}
    if at_least(version, "0.4.0"):
        values["rollout.layered_summon"] = False  # ppo_trainer.yaml:115 of 0.4.0, rollout/rollout.yaml:103 of 0.9.1
        # use_kl_loss and use_kl_in_reward are both false (main_ppo.py:130 of 0.4.0); until 0.3 main_ppo.py always maps
        # Role.RefPolicy
        values["roles.reference"] = "none"
    if not adapters:
        # bf16 where fsdp_config has no model_dtype (fsdp_workers.py:167 of 0.2); engine/fsdp.yaml has fp32 since 0.6.0
        values["roles.reference.precision"] = "fsdp-mixed" if at_least(version, "0.6.0") else "bf16"
        # by ref.fsdp_config.param_offload, False, in the fork (fsdp_workers.py:342); later CPUOffload whatever the flag
        # says (fsdp_workers.py:248 of 0.2, engine.py:433 of 0.9.1)
        values["roles.reference.offload.parameters"] = not fork
    if fork and not dynamic:
        values["roles.reference.micro_batch"] = max(1, 128 // gpus)  # ref.log_prob_micro_batch_size
    if adapters:
        values |= {
            "lora.rank": 64,  # model.lora_rank 0 means none; examples set 32 to 128
            "lora.targets": "all-linear",  # model.target_modules
            "lora.dropout": 0,  # not passed to LoraConfig (engine.py:359-368 of 0.9.1)
            "lora.units": "own",  # peft/utils/other.py: fsdp_auto_wrap_policy
            # a flat parameter has one type, the base's fp32 (engine.py:370-381 of 0.9.1)
            "lora.dtype": "fp32",
        }
    return values


def refuse(s: Scenario) -> str | None:
    """The reason why verl cannot run `s`, in one line, or None."""
    version = s.framework_version
    if reason := trainer_fault(s) or linear_fault(s):
        return reason
    if s.task in sft.TASKS:
        return sft.refuse(s) or engine.refuse(s)
    if s.task not in TASKS or not s.rollout:
        return f"task: given {s.task!r}, allowed with verl: {', '.join((*TASKS, *sft.TASKS))}"
    if s.placement != "colocated":
        return "placement: given 'separate', allowed with verl: colocated; trainer and rollout share one pool of GPUs"
    if s.rollout.engine == "hf":
        return "rollout.engine: given 'hf', allowed with verl: vllm, none"
    if not s.has("actor"):
        return "roles.actor: given 'none', allowed with verl: an actor, which it always trains"
    for name, place in (("actor", ""), ("critic", "roles.critic.")):
        role = s.role(name)
        if role and (reason := engine.refuse(role)):
            return place + reason
    if s.rollout.layered_summon and not s.lora:
        return "rollout.layered_summon: given true with method full, allowed: with lora, whose adapters it gathers"
    sequences = s.rollout.batch * s.rollout.n
    if sequences % s.data_parallel:  # utils/config.py:124 of 0.9.1; before, DataProto.chunk
        allowed = f"with rollout.n = {s.rollout.n} a multiple of {s.data_parallel}"
        return f"rollout.batch: given {s.rollout.batch}, allowed: {allowed}"
    if s.global_batch > sequences:  # config.validate: train_batch_size >= ppo_mini_batch_size; one rollout has no more
        return f"global_batch: given {s.global_batch}, allowed: at most rollout.batch x rollout.n = {sequences}"
    if s.has("reward") and at_least(version, "0.7.1"):
        return f"roles.reward: given a model, allowed with verl {version}: none; its server is not modelled yet"
    if (tokens := s.rollout.max_tokens_per_gpu) and (fault := engine.full_length(tokens, s)):
        return f"rollout.{fault}"
    reference = s.role("reference")
    if reference and (tokens := reference.max_tokens_per_gpu) and (fault := engine.full_length(tokens, s)):
        return f"roles.reference.{fault}"
    if reference and s.lora and s.roles["reference"] != {"model": s.model}:
        return "roles.reference: given with method lora, allowed: none, or {} for the actor without its adapters"
    if reference and not s.lora and version != FORK and not reference.offload.parameters:
        return f"roles.reference.offload.parameters: given false, allowed with verl {version}: true, which it forces"
    return None


def one_thread(s: Scenario) -> bool:
    """False: what verl offloads comes back to the card for its step."""
    return False


def keeps(s: Scenario) -> Keeps:
    """The plan of verl's workers: roles in turn on the same GPUs, and vLLM, which sleeps while they work."""
    if s.task in sft.TASKS:
        return sft.keeps(s)
    assert s.rollout
    version, vllm = s.framework_version, s.versions["vllm"]
    found = tuple(_roles(s))
    notes = []
    if version == FORK:
        whole = s.rollout.batch * s.rollout.n // s.gpus
        notes.append(
            f"The fork runs {found[-1].rows} sequences in one forward: it multiplies its micro-batch flag, here "
            f"{s.micro_batch} for each GPU, by rollout.n = {s.rollout.n}, so that {s.rollout.n} are the least, and a "
            f"GPU's whole rollout, {whole}, the most."
        )
    return Keeps(
        roles=found,
        stages=tuple(_stages(s, [role.name for role in found])),
        # ray_trainer.py, init_workers of 0.2: "create rollout at the end so that vllm can have a better estimation of
        # kv cache memory"; engine_workers.py:541-640 of 0.9.1 builds the reference before the actor
        loading=(*[role.name for role in found if not role.shares], "rollout"),
        serving=Serving(
            version=vllm,
            max_model_len=s.seq_len,
            max_num_seqs=s.rollout.max_num_seqs,
            max_num_batched_tokens=s.rollout.max_num_batched_tokens,
            graphs=at_least(version, "0.6.0"),  # enforce_eager: True in rollout.yaml:35 of 0.5.0, False in :38 of 0.6.0
            # third_party/vllm/vllm_v_0_6_3/worker.py:210 of the fork; vLLM's own worker from 0.7 on
            share_of_free=not at_least(vllm, "0.7"),
            sleep_level=_sleep_level(s),
            # until 0.7.0 vLLM's worker lives in the trainer's (vllm_rollout.py:112 of 0.7.0), then in a server's
            process="vllm" if at_least(version, "0.7.1") else "trainer",
        ),
        notes=tuple(notes),
    )


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
    keeps_base = s.lora and (s.rollout.layered_summon or at_least(version, "0.7.1"))
    return 1 if not at_least(version, "0.6.0") or keeps_base else 2


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
            # v1/trainer_base.py:1653 of 0.9.1), the reference's without
            engine.loss_path(role, scored, entropy=name == "actor") if language else scalar,
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
        summoned = "adapter" if at_least(version, "0.9.0") else "layer"
    # bucketed_weight_transfer.py:165 of 0.7.1
    bucket: tuple[Holds, ...] = ("bucket",) if at_least(version, "0.7.1") else ()
    before: Awake = "weights" if at_least(version, "0.8.0") else "asleep"
    if s.sharding == "fsdp2":
        yield Stage("sync", "actor", engine="weights", holds=bucket if s.lora else ("parameter", *bucket))
        return
    yield Stage("sync", "actor", engine=before, holds=(summoned,) if s.lora else ("units", "copies"))
    yield Stage("sync", "actor", engine="weights", holds=bucket if s.lora else ("copies", "parameter", *bucket))
