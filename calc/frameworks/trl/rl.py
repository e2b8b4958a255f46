"""TRL's GRPOTrainer and PPOTrainer by release: the half of `calc.frameworks.trl.trl` that generates.

Files are named as there. PPOTrainer is that of 0.12 to 1.12 (trainer/ppo_trainer.py, since 0.26 experimental/ppo/):
`ppov2_trainer.py` before 0.12, and the trainer of a policy with a value head before that, are loops of their users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import lcm
from typing import Any

from calc.base.plan import DeepSpeed, Holds, Keeps, Loads, Path, Role, Serving, Stage
from calc.base.refusal import Refusal
from calc.base.versions import at_least
from calc.frameworks import trainer
from calc.frameworks.constraints import segments_fault
from calc.frameworks.releases import NOTHING, stated
from calc.frameworks.trl import paths
from calc.frameworks.trl.releases import GENERATING, PPO, SERVER
from calc.scenario.scenario import Scenario
from calc.scenario.words import DEEPSPEED, FSDP, Sharding

# The first release with a task's trainer, and the first without it again.
TASKS: Mapping[str, tuple[str, str]] = {"ppo": ("0.12.0", "1.13.0"), "grpo": ("0.14.0", "")}
# The first release that shards a reference with FSDP (`prepare_fsdp`), by task: before, it lies whole on each GPU.
SHARDS_REFERENCES = {"dpo": "0.17.0", "kto": "1.6.0", "grpo": "0.18.0"}
COLOCATES = "0.18.0"  # vllm_mode colocate
SERVES = "0.16.0"  # trl vllm-serve; before, the first rank's process has an engine on the GPU after the trainer's
PLACED = "0.26.0"  # see `loads`
LENGTH = "0.26.0"  # vllm_max_model_length (trainer/grpo_config.py:564)
AT_ONCE = "0.17.0"  # a generation is one of a whole step's completions, before of a micro batch's
STEPS = 8  # gradient_accumulation_steps of 0.14 (trainer/grpo_config.py)


def defaults(task: str, version: str, given: Mapping[str, Any], least: int) -> dict[str, Any]:
    """Defaults of RL alone; a generation batch is one optimizer step's completions, of which `least` run at once."""
    if task == "ppo":
        return of_ppo(version, given, least)
    server = given.get("placement", "colocated") != "colocated"
    values = stated(task, version, GENERATING, SERVER if server else NOTHING)
    n = int(given.get("rollout.n", values["rollout.n"]))
    if not at_least(version, "0.15.0"):
        # a micro batch is of prompts, one of them, and each has n completions; eight are accumulated
        values["micro_batch"] = int(given.get("micro_batch", n))
        least = values["micro_batch"] * trainer.trainers(given) * STEPS
    # n must divide the generation batch (trainer/grpo_config.py:1131): as few accumulation steps as do that
    completions = int(given.get("global_batch", lcm(least, n)))
    values |= {"global_batch": completions, "rollout.n": n, "rollout.batch": max(1, completions // n)}
    return values


def of_ppo(version: str, given: Mapping[str, Any], least: int) -> dict[str, Any]:
    """Defaults of PPOTrainer: a rollout is one optimizer step's prompts, with one response each.

    The critic is of the reward model, whose weights it starts from, and no PEFT model (examples/scripts/ppo/ppo.py).
    """
    values = stated("ppo", version, PPO)
    responses = int(given.get("global_batch", least))
    values |= {"global_batch": responses, "rollout.batch": responses}
    if "roles.reward.model" in given:
        values["roles.critic.model"] = given["roles.reward.model"]
    if given.get("method", "full") != "full":
        values["roles.critic.method"] = "full"
    if given.get("sharding") in DEEPSPEED:
        return values
    placed = "ddp" if trainer.trainers(given) > 1 else "none"
    narrow = given.get("precision") == "bf16"
    for name in ("reference", "reward"):
        # moved to the GPU as they are: no Accelerate around them (trainer/ppo_trainer.py, __init__)
        values[f"roles.{name}.precision"] = "bf16" if narrow else "fp32"
        values[f"roles.{name}.sharding"] = placed
    return values


def alone(role: str, given: Mapping[str, Any], known: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """The defaults of a model that only DeepSpeed shards, and that loads in its checkpoint's type by Transformers 5.

    Transformers 4 loads it in fp32, or as the policy. A reward model: trainer/grpo_trainer.py:1208; a teacher:
    experimental/gkd/gkd_trainer.py:176-195, `prepare_model` with `evaluation_mode`.
    """
    if given.get("sharding") in DEEPSPEED:
        return {}
    narrow = at_least(str(known["versions.transformers"]), "5")
    own = "bf16" if narrow else {"fsdp-mixed": "autocast"}.get(precision, precision)
    return {f"roles.{role}.precision": own, f"roles.{role}.sharding": "ddp" if trainer.trainers(given) > 1 else "none"}


def unsharded(task: str, version: str, given: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """The defaults of a reference beside a policy under FSDP, where the release leaves it whole.

    `prepare_model` with `evaluation_mode` moves it and puts autocast around it, no more.
    """
    if given.get("sharding") not in FSDP or at_least(version, SHARDS_REFERENCES.get(task, version)):
        return {}
    own = "autocast" if precision == "fsdp-mixed" else precision
    return {"roles.reference.precision": own, "roles.reference.sharding": "ddp"}


def refuse(s: Scenario) -> Refusal | None:
    """The reason why a trainer that generates cannot run `s`, in one line, or None."""
    assert s.rollout
    if not s.has("actor"):
        return Refusal("roles.actor", "'none'", "the policy, which it trains", "with trl")
    if s.task == "ppo":
        return _refuse_ppo(s)
    engine, n, version = s.rollout.engine, s.rollout.n, s.framework_version
    if engine == "none":
        return Refusal("rollout.engine", "'none'", "hf, vllm", "with trl")
    if n < 2:  # trainer/grpo_config.py: "GRPO requires at least 2 generations per prompt"
        return Refusal("rollout.n", n, "at least 2", "with trl")
    if fault := segments_fault(s) or _serving_fault(s):
        return fault
    step = s.micro_batch * s.gpus_of(s.group("actor"))
    if s.rollout.batch * n % step:  # trainer/grpo_config.py:1103
        return Refusal(
            "rollout.batch",
            f"{s.rollout.batch} with rollout.n = {n}",
            f"completions that are a multiple of micro_batch x GPUs of the actor = {step}",
        )
    whole = s.micro_batch if not at_least(version, "0.15.0") else step
    if not at_least(version, AT_ONCE) and whole % n:
        # a micro batch has its own generation (trainer/grpo_trainer.py:317 of 0.15.2)
        return Refusal("rollout.n", n, f"a divisor of the {whole} completions of a micro batch", f"with trl {version}")
    if s.placement == "separate":
        if engine != "vllm":
            return Refusal("placement", f"'separate' with rollout.engine {engine!r}", "with vllm, as a server")
        for name in ("reference", "reward"):
            if s.has(name) and "gpus" in s.roles[name]:
                return Refusal(
                    f"roles.{name}.gpus", "for a role of the trainer", "none, it shares the actor's", "with trl"
                )
    return _other_reference(s)


def _other_reference(s: Scenario) -> Refusal | None:
    own = s.role("reference")
    if own and own.model != s.model:  # get_config_model_id(self.model.config)
        return Refusal(
            "roles.reference.model", repr(own.model), f"{s.model}, the policy's own", f"with trl for {s.task}"
        )
    if own and own.method != s.method:
        given = f"{own.method!r} with method {s.method}"
        return Refusal("roles.reference.method", given, "none, it has the policy's", f"with trl for {s.task}")
    return None


def _serving_fault(s: Scenario) -> Refusal | None:
    """The reason why this release cannot have vLLM where `s` has it, in one line, or None."""
    assert s.rollout
    version = s.framework_version
    if s.rollout.engine != "vllm":
        return None
    if s.placement == "colocated" and not at_least(version, COLOCATES):
        return Refusal(
            "rollout.engine",
            "'vllm' with placement colocated",
            "hf, or vllm with placement separate",
            f"with trl {version}",
        )
    if not at_least(version, SERVES) and s.rollout.gpus > 1:  # LLM(device=...), trainer/grpo_trainer.py:404 of 0.15.2
        return Refusal("rollout.gpus", s.rollout.gpus, "1, as one process has the engine", f"with trl {version}")
    if s.sharding in FSDP and not at_least(version, COLOCATES):
        return Refusal(
            "sharding", f"{s.sharding!r} with vllm", f"none, ddp, {', '.join(DEEPSPEED)}", f"with trl {version}"
        )
    if s.rollout.sleep and not at_least(version, "0.23.0"):
        return Refusal("rollout.sleep", "true", "false, until 0.23.0", f"with trl {version}")
    if s.rollout.max_model_len and s.placement == "colocated" and not at_least(version, LENGTH):
        given = s.rollout.max_model_len
        return Refusal("rollout.max_model_len", given, "null; it has no such setting", f"with trl {version}")
    return None


def _refuse_ppo(s: Scenario) -> Refusal | None:
    """The reason why PPOTrainer cannot run `s`, in one line, or None."""
    assert s.rollout
    version = s.framework_version
    if s.rollout.engine != "hf":
        return Refusal("rollout.engine", repr(s.rollout.engine), "hf", "with trl for ppo")
    if s.placement == "separate":
        return Refusal("placement", "'separate'", "colocated", "with trl for ppo")
    if s.rollout.n != 1:
        return Refusal("rollout.n", s.rollout.n, "1", "with trl for ppo")
    if s.lora and not at_least(version, "0.13.0"):
        return Refusal("method", repr(s.method), "full; adapters came with 0.13.0", f"with trl {version} for ppo")
    for name in ("critic", "reward", "reference"):
        if not s.has(name):
            return Refusal(f"roles.{name}", "'none'", "a model, as PPOTrainer takes all four", "with trl for ppo")
    return _other_reference(s)


def unpacks(s: Scenario) -> int:
    """Bytes of an unpacked 4-bit element while it multiplies, if its type is not that of other products; else 0.

    Weights loaded as fp32 come back as fp32 (trainer/utils.py:265), which autocast casts for the product.
    """
    return 4 + 2 if (s.method, s.layout) == ("qlora", "autocast") else 0


def shares(s: Scenario) -> bool:
    """True if the reference is the policy itself without its adapters: nothing says that it is another, or has none."""
    own = s.role("reference")
    return bool(s.lora) and own is not None and own.model == s.model and own.method == s.method


def loads(s: Scenario) -> Loads:
    """The ranks that read a whole model on the host; a single process sends it to the card as it is read.

    `device_map="auto"`, since 0.26 (trainer/utils.py, `create_model_from_path`), which several processes set to None.
    The script of PPO loads its models itself (examples/scripts/ppo/ppo.py).
    """
    alone = s.gpus == 1 and s.task != "ppo"
    return trainer.loads(s, placed=alone and at_least(s.framework_version, PLACED))


def reference(s: Scenario, path: Path) -> Role:
    """The reference, built like the policy, or the policy itself without its adapters.

    A copy of the policy is frozen (`create_reference_model`, until 0.28 in DPOTrainer, until 0.18 in GRPOTrainer), a
    model of its own is not.
    """
    own = s.role("reference")
    assert own
    first = "0.19.0" if s.task == "grpo" else "0.29.0"
    return Role("reference", path, path, s.rows, s.rows, root_stays=own.sharding == "fsdp1", shares=shares(s),
                wrapped=trainer.wrapped(own), unfrozen=at_least(s.framework_version, first),
                unpacks=unpacks(own), loads=loads(own))  # fmt: skip


def grpo(s: Scenario, trained: Mapping[str, Any], deepspeed: DeepSpeed | None) -> Keeps:
    """The plan of GRPO: roles in the order in which they load, and a step of sync, rollout, scores, update, checkpoint.

    trainer/grpo_trainer.py, __init__: policy, vLLM, then reference and reward model move to the GPU. PyTorch's FSDP
    leaves the root gathered after a forward (`_runtime_utils.py`); FSDP2 as Accelerate calls it does not.
    """
    assert s.rollout
    version = s.framework_version
    # labels of the prompt are -100: only the completion is scored (trainer/grpo_trainer.py:1498)
    path = paths.grpo(s, s.rows)
    root = s.sharding == "fsdp1"
    actor = Role("actor", paths.trained(s), path, s.rows, s.rows, root_stays=root, **trained)
    completions = s.rollout.batch * s.rollout.n // s.gpus_of(s.group("actor"))  # of one GPU
    at_once = completions if at_least(version, AT_ONCE) else s.rows
    others = [reference(s, path)] if s.has("reference") else []
    if s.has("reward"):
        # one forward over the whole generation batch (trainer/grpo_trainer.py, _calculate_rewards)
        wrapped = trainer.wrapped(s)
        others.append(Role("reward", Path("scalar"), Path("scalar"), at_once, at_once,
                           wrapped=wrapped, unfrozen=True, loads=loads(s)))  # fmt: skip
    vllm = s.rollout.engine == "vllm"
    zero3 = s.sharding == "zero3"
    stages = []
    if vllm:
        # merging adapters needs all weights at once under ZeRO-3 (generation/vllm_generation.py:447); until 0.15 a
        # state dict of all of them is made (trainer/grpo_trainer.py:489 of 0.15.2)
        whole = zero3 and (s.lora or not at_least(version, SERVES))
        gathered = ("whole",) if whole else trainer.HANDED.get(s.sharding, ())
        stages += [Stage("sync", "actor", engine="weights", holds=gathered), Stage("serve", "rollout")]
    else:
        stages.append(Stage("generate", "actor", rows=at_once, holds=generating(s)))
    inside = ""
    if at_least(version, "0.15.0"):
        stages += scores(s)
    else:
        # the policy's log-probabilities come first (`compute_loss`, trainer/grpo_trainer.py:349 of 0.14.0)
        inside = next((role.name for role in others), "")
        stages += [Stage("score", role.name) for role in others[1:]]
    stages += [Stage("train", "actor", inside=inside), trainer.saving(s)]
    return Keeps(
        roles=(actor, *others),
        stages=tuple(stages),
        loading=("actor", *(["rollout"] if vllm else []), *(role.name for role in others if not role.shares)),
        serving=serving(s, completions) if vllm else None,
        deepspeed=deepspeed,
    )


def scores(s: Scenario) -> list[Stage]:
    """The forwards without gradient between rollout and update."""
    assert s.rollout
    found = [Stage("score", "reward")] if s.has("reward") else []
    if s.rollout.engine == "vllm" and at_least(s.framework_version, "0.23.0"):
        # vllm_importance_sampling_correction true (trainer/grpo_trainer.py:2640)
        found.append(Stage("score", "actor"))
    return [*found, Stage("score", "reference")] if s.has("reference") else found


def generating(s: Scenario) -> tuple[Holds, ...]:
    """The weights that Transformers' generation gathers.

    ds3_gather_for_generation true (trainer/grpo_config.py:498): ZeRO-3 gathers every weight. FSDP 1 gathers its root in
    fp32 (`summon_full_params(recurse=False)`, trainer/grpo_trainer.py).
    """
    gathers: Mapping[Sharding, tuple[Holds, ...]] = {"zero3": ("whole",), "fsdp1": ("root",)}
    return gathers.get(s.sharding, ())


def serving(s: Scenario, completions: int) -> Serving:
    """vLLM in the trainer's own process (generation/vllm_generation.py:347), or `trl vllm-serve` on GPUs of its own.

    Neither is given a length since 0.26.0, so vLLM takes the model's full context; before, the trainer's own engine
    gets that of prompt and completion. CUDA graphs are captured. It sleeps at level 1 until 0.24.
    """
    assert s.rollout
    release, version, length = s.versions["vllm"], s.framework_version, s.architecture.max_positions
    if s.placement == "separate":
        return Serving(release, s.rollout.max_model_len or length)
    return Serving(
        release,
        s.rollout.max_model_len or (length if at_least(version, LENGTH) else s.seq_len),
        max_num_seqs=completions * s.rollout.tensor_parallel,
        max_num_batched_tokens=4096 if at_least(version, "0.19.0") else None,
        sleep_level=2 if at_least(version, "0.25.0") else 1,
        process="trainer",
    )


def ppo(s: Scenario, trained: Mapping[str, Any], deepspeed: DeepSpeed | None) -> Keeps:
    """The plan of PPOTrainer: policy and critic in one graph, with one optimizer, beside reference and reward model.

    `PolicyAndValueWrapper.forward` runs the critic's backbone before the policy. Generation returns the logits of every
    token (`output_scores`, trainer/utils.py:generate), of which `train` keeps a padded copy in `logitss`, a variable,
    until the next. `forward` and `get_reward` ask for all hidden states. Outputs stay variables until the `del` behind
    the micro batches of a step.
    """
    assert s.rollout
    responses = s.rollout.batch // s.gpus  # of one GPU
    at_once = min(responses, s.rollout.micro_batch or responses)
    own = paths.ppo(s, held="step" if s.accumulation == 1 else "next")
    scored = paths.ppo(s)
    scalar, states = Path("scalar", held=own.held), Path("scalar", hidden=True)
    frozen: dict[str, Any] = {"wrapped": False, "unfrozen": True, "loads": loads(s)}
    narrow = replace(scored, head_fp32=trainer.early(s), outputs_fp32=False)
    roles = [
        Role("actor", own, scored, s.rows, at_once, **trained),
        Role("critic", scalar, states, s.rows, at_once, **trained),
        Role("reference", narrow, narrow, at_once, at_once, shares=shares(s), **frozen),
        Role("reward", states, states, at_once, at_once, **frozen),
    ]
    return Keeps(
        roles=tuple(roles),
        stages=(
            Stage("generate", "actor", rows=at_once, holds=generating(s)),
            *[Stage("score", name) for name in ("reference", "critic", "reward")],
            Stage("train", "actor", joint="critic"),
            trainer.saving(s),
        ),
        loading=tuple(role.name for role in roles if not role.shares),
        deepspeed=deepspeed,
        scores=responses,
    )
