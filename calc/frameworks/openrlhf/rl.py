"""OpenRLHF's PPO, GRPO and REINFORCE++ by version: the half of `calc.frameworks.openrlhf.openrlhf` that is RL alone.

`train_ppo.py`, until 0.6.1, runs every role in each process of one group and generates with Transformers;
`train_ppo_ray.py` gives each role processes of its own, on GPUs of their own or on shared ones, and supports vLLM. Read
in the tags v0.3.0 to v0.11.0 and the package 0.11.2. `ppo.py` and `ray.py` stand for `openrlhf/cli/train_ppo.py` and
`openrlhf/cli/train_ppo_ray.py` of the release named (before 0.3.6 in `examples/`), other files for those of their name
in `openrlhf/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from calc.base.plan import Awake, DeepSpeed, Holds, Keeps, Leaves, Path, Role, Serving, Stage
from calc.base.refusal import Refusal
from calc.base.versions import at_least
from calc.frameworks.constraints import segments_fault
from calc.frameworks.openrlhf.releases import COLOCATED, ONE_GROUP, RL
from calc.frameworks.releases import NOTHING, stated
from calc.scenario.scenario import Scenario
from calc.scenario.words import DEEPSPEED

# The first release with the task's advantage_estimator: gae; group_norm; reinforce (ray.py's choices of each).
TASKS = {"ppo": "0.3.0", "grpo": "0.6.0", "reinforce++": "0.5.1"}
SEEING = "0.10.0"  # --max_images_per_prompt: cli/train_ppo_ray.py
TRAINED = ("actor", "critic")
# Fields that one flag sets for all roles, and fields that one flag sets for the trained roles.
SHARED = (
    "method", "lora", "precision", "optimizer", "optimizer_impl", "sharding", "grad_dtype", "checkpointing",
    "reentrant", "attention", "loss", "logprob", "packing",
)  # fmt: skip
SHARED_BY_TRAINED = ("micro_batch", "max_tokens_per_gpu", "offload.optimizer", "offload.parameters")
SET = {place: attrgetter(place) for place in (*SHARED, *SHARED_BY_TRAINED)}


def defaults(task: str, version: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that only the RL command lines have, or set otherwise, by dotted key; `given` is the user's."""
    shared = given.get("placement", "colocated") == "colocated"
    values = stated(task, version, RL, COLOCATED if shared else NOTHING)
    engine = values["rollout.engine"] = str(given.get("rollout.engine", values["rollout.engine"]))
    if shared and engine == "hf":
        values |= stated(task, version, ONE_GROUP)
    if "max_tokens_per_gpu" in values and "max_tokens_per_gpu" in given:
        # dynamic batches turn packing_samples on (ray.py:304-307, :509-515 of 0.9.0)
        values |= {"packing": True, "attention": "flash", "rollout.micro_batch": None}
    if task == "ppo" and "roles.reward.model" in given:
        # critic_pretrain = reward_pretrain.split(",")[0], or pretrain for a remote reward model: ray.py:417-423 (0.6.1)
        values["roles.critic.model"] = given["roles.reward.model"]
    return values


def one_group(s: Scenario) -> bool:
    """True if `s` is a job of `train_ppo.py`, which 0.6.2 no longer has."""
    assert s.rollout
    return s.placement == "colocated" and s.rollout.engine != "vllm" and not at_least(s.framework_version, "0.6.2")


def states_sleep(s: Scenario) -> bool:
    """True if `ds.enable_sleep` can be set where vLLM sleeps, as in OpenRLHF's template (README of 0.11.2).

    `offload_deepspeed_states` raises unless stage 3 runs (utils/deepspeed/deepspeed_utils.py:113 of 0.6.1), since
    0.8.10 only up to DeepSpeed 0.17.5 (:145); before raising, it returns if the optimizer is in host memory anyway.
    """
    assert s.rollout
    version, later = s.framework_version, not at_least("0.17.5", s.versions["deepspeed"])
    if not s.rollout.sleep or not at_least(version, "0.6.1"):
        return False
    stages = DEEPSPEED if at_least(version, "0.8.10") and later else ("zero3",)
    return s.offload.optimizer or s.sharding in stages


def keeps(s: Scenario, path: Callable[[int], Path], deepspeed: DeepSpeed) -> Keeps:
    """The plan of an RL job; `path` gives the path from logits to log-probabilities for a number of sequences."""
    assert s.rollout
    version, alone = s.framework_version, one_group(s)
    sleeping = states_sleep(s) and not s.offload.optimizer

    def role(name: str) -> Role:
        """The role called `name`; the critic and the reward model have scalar heads.

        `training_step` also holds the last hidden states to its own end (trainer/ppo_trainer.py:339 of 0.3.8,
        trainer/ray/ppo_critic.py:142 of 0.11.0).
        """
        own = s.role(name)
        assert own
        language = name in ("actor", "reference")
        scored = dynamic(s) if s.max_tokens_per_gpu else s.scored_by(name)
        logits, scores = [path(rows) if language else Path("scalar", held="step") for rows in (own.rows, scored)]
        if name == "actor" and s.entropy_coeff:
            logits = replace(logits, entropy="compiled")  # models/actor.py:14 and :167 of 0.8.0
        # reloaded for its own update alone: trainer/ray/ppo_actor.py:130-156 of 0.6.1; asleep from loading on, :383
        leaves = frozenset[Leaves]({"states"} if sleeping and name in TRAINED else ())
        # scalar heads are on classes of OpenRLHF's own, which Liger's loader does not make (models/model.py)
        process = "trainer" if alone else name
        return Role(name, logits, scores, own.rows, scored, leaves, patched=language, process=process)

    # strategy.prepare: ppo.py:189 of 0.3.8. Ray starts actor, reference and reward model together and the critic after
    # them, ray.py:128-155 of 0.3.8.
    order = ["actor", "critic", "reward", "reference"] if alone else ["actor", "reference", "reward", "critic"]
    order = [name for name in order if s.has(name)]
    serving = None
    if s.rollout.engine == "vllm":
        # Engines come first since 0.5.8 (ray.py:73), but are put to sleep there only since 0.6.1
        # (trainer/ray/vllm_engine.py:185): until then a whole engine is in memory when the last model loads.
        first = at_least(version, "0.6.1") or not s.rollout.sleep
        order = ["rollout", *order] if first else [*order, "rollout"]
        # Neither max_num_seqs nor max_num_batched_tokens is passed; AsyncLLMEngine, made of arguments
        # (trainer/ray/vllm_engine.py:63 of 0.9.1), has the scheduler's own defaults, not those of `LLM` (vllm
        # config/scheduler.py).
        by_scheduler = at_least(version, "0.9.1")
        serving = Serving(
            s.versions["vllm"],
            # until 0.3.1 no length is passed, and vLLM takes the model's own
            max_model_len=s.seq_len if at_least(version, "0.3.2") else s.architecture.max_positions,
            max_num_seqs=128 if by_scheduler else None,
            max_num_batched_tokens=2048 if by_scheduler else None,
            graphs=not s.rollout.enforce_eager,
            executor="ray" if s.rollout.tensor_parallel > 1 else "mp",  # trainer/ray/vllm_engine.py:240 of 0.11.2
        )
    notes = []
    if sleeping:
        notes.append("rollout.sleep also sets ds.enable_sleep, as in OpenRLHF's template: optimizer states wait in "
                     "host memory outside their own updates")  # fmt: skip
    elif s.rollout.sleep and not s.offload.optimizer:
        notes.append("this release cannot put the optimizer's states to sleep with this sharding: they stay on the GPU")
    return Keeps(
        roles=tuple([role(name) for name in order if name != "rollout"]),
        stages=tuple(stages(s)),
        loading=tuple(order),
        serving=serving,
        deepspeed=deepspeed,
        notes=tuple(notes),
    )


def dynamic(s: Scenario) -> int:
    """Sequences that a GPU scores at once with dynamic batches, the same for every role.

    `split_rollout_samples` rounds the number of batches down to one that the actor's ranks share evenly, so that they
    may hold more tokens than rollout_max_tokens_per_gpu (trainer/ppo_utils/experience_maker.py:467-475 of 0.9.0).
    """
    assert s.rollout and s.max_tokens_per_gpu
    actor = s.role("actor") or s
    tokens, responses = s.rollout.max_tokens_per_gpu or s.max_tokens_per_gpu, s.rollout.batch * s.rollout.n
    held = max(1, tokens * s.context_parallel // s.expected_len)
    batches = max(1, -(-responses // held) // actor.data_parallel) * actor.data_parallel
    return -(-responses // batches)


def stages(s: Scenario) -> Iterator[Stage]:
    """The stages of one step, in order."""
    assert s.rollout
    version, serves, zero3 = s.framework_version, s.rollout.engine == "vllm", s.sharding == "zero3"
    actor = s.role("actor")
    assert actor
    if serves:
        yield Stage("serve", "rollout", engine="all")
    else:
        # trainer/ppo_utils/experience_maker.py:254 of 0.5.8: micro batch by micro batch; Transformers keeps the last
        # position of the prompts alone since 4.45 (num_logits_to_keep)
        every: tuple[Holds, ...] = () if at_least(s.versions["transformers"], "4.45") else ("prompt-logits",)
        yield Stage("generate", "actor", holds=every, rows=actor.scoring_rows)
    for name in scoring(s):
        if s.has(name):
            yield Stage("score", name)
    yield from training(s)
    gathered: tuple[Holds, ...] = ("parameter",) if zero3 else ()
    # Until 0.6.0 vLLM, once woken for new weights, stays awake (trainer/ray/ppo_actor.py:138-150 of 0.5.8); then it
    # sleeps again (:165-168 of 0.6.1), and since 0.9.2 its weights alone wake and stay
    # (trainer/ppo_trainer.py:178-197).
    woken: Awake = "weights" if at_least(version, "0.9.2") else "all"
    kept: Awake = "asleep" if at_least(version, "0.6.1") and woken == "all" else woken
    if serves:
        # trainer/ray/ppo_actor.py:210 of 0.6.1 broadcasts a parameter as it is; :225 sends a clone's CUDA IPC handle
        ipc = s.placement == "colocated" and at_least(version, "0.5.9")
        yield Stage("sync", "actor", engine=woken, holds=(*gathered, "clone") if ipc else gathered)
    # All ranks copy parameters one by one, and the first keeps them (utils/deepspeed.py:271 of 0.3.8); since 0.7.5
    # every rank clones its own state dict to the host, except under stage 3, which gathers for the first
    # (utils/deepspeed/deepspeed.py:357-366).
    every_rank = at_least(version, "0.7.5") and not zero3
    yield Stage("save", "actor", engine=kept, holds=gathered, host="every" if every_rank else "first")


def scoring(s: Scenario) -> tuple[str, ...]:
    """The roles in the order in which they score: trainer/ppo_utils/experience_maker.py, `make_experience`.

    :124-133 of 0.3.8 without Ray, :246-267 with; :496-550 of 0.8.5, so ordered since 0.7.3.
    """
    if one_group(s):
        return ("actor", "reference", "critic", "reward")
    if at_least(s.framework_version, "0.7.3"):
        return ("reward", "actor", "critic", "reference")
    return ("reference", "critic", "reward", "actor")


def training(s: Scenario) -> Iterator[Stage]:
    """The updates of the actor and of the critic, if there is one.

    Without Ray both take turns at each micro batch (`training_step`, trainer/ppo_trainer.py:261 of 0.3.8). Under Ray
    the critic comes first and is waited for (trainer/ray/ppo_actor.py:123-135 of 0.5.8); since 0.9.1 only if states
    sleep, else both train at once (trainer/ppo_trainer.py:159-174).
    """
    if not s.has("critic"):
        yield Stage("train", "actor")
    elif one_group(s):
        yield from [Stage("train", name, alternating=True) for name in TRAINED]
    elif at_least(s.framework_version, "0.9.1") and not states_sleep(s) and together(s, "critic"):
        yield Stage("train", "actor", beside="critic")
    else:
        yield from [Stage("train", name) for name in ("critic", "actor")]


def together(s: Scenario, name: str) -> bool:
    """True if the role `name` runs on the actor's GPUs."""
    return s.placement == "colocated" or s.group(name) == "actor"


def refuse(s: Scenario) -> Refusal | None:
    """The reason why the RL trainers of this release cannot run `s`, in one line, or None."""
    first = TASKS[s.task]
    if not at_least(s.framework_version, first):
        allowed = ", ".join(task for task, since in TASKS.items() if at_least(s.framework_version, since))
        return Refusal("task", repr(s.task), allowed, f"with openrlhf {s.framework_version}")
    return segments_fault(s) or next((line for rule in (_roles, _images, _rollout, _gpus) for line in rule(s)), None)


def _roles(s: Scenario) -> Iterator[Refusal]:
    """Faults in which roles run, and in fields that one flag sets for several roles."""
    version = s.framework_version
    needed = [
        ("actor", True, "an actor, which always trains"),
        ("critic", s.task == "ppo", "a critic, which gae needs"),
        # init_kl_coef 0 leaves it out: ray.py, since 0.6.0
        ("reference", not at_least(version, "0.6.0"), "a reference, whatever the KL coefficient"),
        # --remote_rm_url, since 0.4.0
        ("reward", not at_least(version, "0.4.0"), "a reward model"),
    ]
    for name, always, allowed in needed:
        if always and not s.has(name):
            yield Refusal(f"roles.{name}", "'none'", allowed, f"with openrlhf {version}")
    running = {name: own for name in s.roles if (own := s.role(name))}
    for name, own in running.items():
        for place in (*SHARED, *(SHARED_BY_TRAINED if name in TRAINED else ())):
            given, allowed = SET[place](own), SET[place](s)
            frozen_bf16 = name not in TRAINED and given == "bf16"  # mixed precision without an optimizer is bf16
            if given != allowed and not frozen_bf16:
                yield Refusal(f"roles.{name}.{place}", repr(given), f"{allowed!r}, as for all roles", "with openrlhf")
    offloaded = {name: own.offload.parameters for name, own in running.items() if name not in TRAINED}
    for name in [name for name, moved in offloaded.items() if moved]:
        if one_group(s):  # get_ds_eval_config(offload=False): ppo.py:78 of 0.3.8
            yield Refusal(f"roles.{name}.offload.parameters", "true without Ray", "false")
        if not (at_least(version, "0.10.2") or all(offloaded.values())):
            yield Refusal(f"roles.{name}.offload.parameters", "true", "for reference and reward, by one flag")


def _images(s: Scenario) -> Iterator[Refusal]:
    """Faults in images, which a release has to know; it asserts that neither a critic nor packed batches see any."""
    if not s.images:
        return
    version, seen = s.framework_version, s.images.size
    if s.has("critic") or not at_least(version, SEEING):  # cli/train_ppo_ray.py:663 of 0.11.2
        yield Refusal("images", f"{seen!r} for {s.task}", "none", f"with openrlhf {version}")
    if s.packing:  # :667
        yield Refusal("packing", "true with images", "false", f"with openrlhf {version}")
    if s.images.freeze == "tower":  # the projector is frozen beside it (models/actor.py:171 of 0.11.2)
        yield Refusal("images.freeze", repr(s.images.freeze), "none, vision", f"with openrlhf {version}")


def _rollout(s: Scenario) -> Iterator[Refusal]:
    """Faults in the rollout: the engine, the number of responses, and settings that do not go with the engine."""
    assert s.rollout
    version, engine, n = s.framework_version, s.rollout.engine, s.rollout.n
    hf = not at_least(version, "0.7.1")  # NotImplementedError since: trainer/ppo_utils/experience_maker.py:627 of 0.7.1
    if engine == "hf" and not hf:
        yield Refusal("rollout.engine", "'hf'", "vllm, none", f"with openrlhf {version}")
    if s.task == "grpo" and n < 2:
        yield Refusal("rollout.n", f"{n} for grpo", "2 or more in a group")
    if n > 1 and not at_least(version, "0.4.5"):  # --n_samples_per_prompt, since 0.3.2, is not read until then
        yield Refusal("rollout.n", n, "1", f"with openrlhf {version}")
    if engine != "vllm":
        if s.packing and engine == "hf":  # asserted: ray.py:445 of 0.6.1
            yield Refusal("packing", "true with rollout.engine 'hf'", "with vllm")
        if s.sharding == "zero3" and engine == "hf" and not one_group(s):  # asserted: ray.py:32 of 0.6.1
            yield Refusal("sharding", "'zero3' under Ray with rollout.engine 'hf'", "zero1, zero2, or vllm")
        return
    if s.max_tokens_per_gpu and not s.packing:
        yield Refusal("packing", "false with max_tokens_per_gpu", "true, which it then turns on", "with openrlhf")
    if s.packing and not at_least(version, "0.4.4"):
        yield Refusal("packing", "true", "false; RL got it with 0.4.4", f"with openrlhf {version}")
    if s.method != "full":
        # the adapters' names are sent as they are, and vLLM knows none of them: issues 546 and 1349
        release = f"openrlhf {version} and vLLM"
        yield Refusal("method", repr(s.method), "full; vLLM cannot take adapters over", f"with {release}")
    if s.placement == "colocated":
        share = s.rollout.gpu_memory_utilization
        if not at_least(version, "0.5.8"):  # --colocate_all_models
            yield Refusal("placement", "'colocated' with vllm", "separate", f"with openrlhf {version}")
        if share >= 0.9 and not at_least(version, "0.6.1"):
            yield Refusal("rollout.gpu_memory_utilization", share, "less than 0.9, of which ray.py makes 0.4")


def _gpus(s: Scenario) -> Iterator[Refusal]:
    """Faults in how Ray's groups divide the GPUs: `_validate_args` of ray.py, until 0.7.0."""
    assert s.rollout
    version, actor = s.framework_version, s.gpus_of("actor")
    if one_group(s):
        return
    if s.placement == "separate" and not at_least(version, "0.8.0"):
        # colocate_all_models takes vLLM along until training can be asynchronous; other flags pair reference and actor,
        # reward model and critic
        for name in ("critic", "reward"):
            if s.has(name) and together(s, name):
                yield Refusal(f"roles.{name}.gpus", "none", "GPUs without the actor", f"with openrlhf {version}")
    if at_least(version, "0.7.1"):
        return
    trained = {"actor": actor} | ({"critic": s.gpus_of(s.group("critic"))} if s.has("critic") else {})
    for name, gpus in trained.items():
        if gpus & (gpus - 1) and not at_least(version, "0.5.6"):
            yield Refusal(f"roles.{name}.gpus", gpus, "a power of two", f"with openrlhf {version}")
        if actor % gpus:
            yield Refusal(f"roles.{name}.gpus", gpus, f"a divisor of the actor's {actor}", f"with openrlhf {version}")
    if not at_least(version, "0.5.6"):
        return
    if s.rollout.batch % actor:
        yield Refusal("rollout.batch", s.rollout.batch, f"a multiple of {actor} GPUs", f"with openrlhf {version}")
    engines = s.rollout.gpus // s.rollout.tensor_parallel
    if s.rollout.engine == "vllm" and actor % engines and (engines % actor or not at_least(version, "0.6.0")):
        yield Refusal("rollout.gpus", f"{s.rollout.gpus}, {engines} engines", f"a number that divides {actor} GPUs")
