"""OpenRLHF 0.11's commands: `train_sft`, `train_rm` and `train_dpo` under DeepSpeed's launcher, RL under Ray.

Flags are those of `openrlhf/cli/train_*.py` of 0.11.2. A flag that decides memory is written even at its default, with
two exceptions: `--ds.lora.target_modules` is left at `all-linear`, since a value given for it becomes a list, in which
PEFT does not know that word; and the vLLM engines' eager mode and sequence limits stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

from calc.base.optimizers import OPTIMIZERS
from calc.frameworks.openrlhf import rl
from calc.launch import shell
from calc.launch.shell import ATTENTION, Launch, LaunchError, Placeholder, Words, option, own, switch
from calc.scenario.scenario import Scenario

FIRST = "0.11"

SCRIPTS = {"pretrain": "sft", "sft": "sft", "rm": "rm", "dpo": "dpo"}
ESTIMATORS = {"ppo": "gae", "grpo": "group_norm", "reinforce++": "reinforce"}
UNSAID = ("optimizer_impl", "logprob", "lora.dtype")
DATASET = Placeholder("DATASET", "name or path of the training data")


def launch(s: Scenario) -> Launch:
    """The command for `s`; raises LaunchError if a flag is missing that the job needs."""
    command = ray(s) if s.rollout else supervised(s)
    return Launch(shell.setting(s, command), notes=tuple(notes(s)))


def supervised(s: Scenario) -> str:
    """The command `deepspeed --module openrlhf.cli.train_{sft,rm,dpo}`."""
    if s.task == "dpo" and not s.has("reference"):
        raise LaunchError("roles.reference: given 'none' for dpo, allowed: a reference, which train_dpo always loads")
    hosts = [option("--hostfile", Placeholder("HOSTFILE", "file that lists the nodes"))] if s.nodes > 1 else []
    start = [*hosts, option("--num_nodes", s.nodes), option("--num_gpus", s.gpus // s.nodes)]
    lines = [
        *start,
        option("--module", f"openrlhf.cli.train_{SCRIPTS[s.task]}"),
        option("--model.model_name_or_path", shell.model_name(s.model)),
        *switch("--model.pretrain_mode_enable", s.task == "pretrain"),
        option("--data.dataset", DATASET),
        option("--data.max_len", s.seq_len),
        *shared(s),
        *switch("--model.gradient_checkpointing_enable", s.checkpointing == "full"),
        *switch("--model.gradient_checkpointing_reentrant", reentrant(s)),
        optim("--optim", s),
    ]
    if s.task == "dpo":
        reference = own(s, "reference")
        lines.append(option("--ref.model_name_or_path", shell.role_model(s, "reference")))
        lines += switch("--ref.offload", reference.offload.parameters)
    return shell.command("deepspeed", lines)


def optim(flag: str, s: Scenario) -> Words:
    """The flag for a trained model's optimizer."""
    return option(flag, OPTIMIZERS[s.optimizer].spelled.openrlhf)


def reentrant(s: Scenario) -> bool:
    """True if checkpointing is on and of the reentrant kind."""
    return s.checkpointing == "full" and s.reentrant


def shared(s: Scenario) -> Iterator[Words]:
    """The flags that every script has: batches, DeepSpeed, adapters."""
    if s.max_tokens_per_gpu:
        yield ("--train.dynamic_batch_enable",)
        yield option("--train.max_tokens_per_gpu", s.max_tokens_per_gpu)
    else:
        yield option("--train.micro_batch_size", s.micro_batch)
    yield option("--train.batch_size", s.global_batch)
    yield option("--ds.zero_stage", s.sharded.stage)
    yield option("--ds.param_dtype", "bf16")
    yield option("--ds.grad_accum_dtype", s.grad_dtype)
    yield from switch("--ds.adam_offload", s.offload.optimizer)
    yield option("--ds.attn_implementation", ATTENTION[s.attention])
    yield from switch("--ds.use_liger_kernel", s.kernels == "liger")
    yield from switch("--ds.packing_samples", s.packing)
    if s.context_parallel > 1:
        yield option("--ds.ring_attn_size", s.context_parallel)
    yield from switch("--ds.load_in_4bit", s.method == "qlora")
    yield option("--ds.lora.rank", s.lora.rank if s.lora else 0)
    if s.lora:
        if s.lora.targets != "all-linear":
            yield option("--ds.lora.target_modules", *s.lora.targets)
        yield option("--ds.lora.dropout", s.lora.dropout)


def ray(s: Scenario) -> str:
    """The command `python3 -m openrlhf.cli.train_ppo_ray`; it joins the Ray cluster of its node, or starts one."""
    assert s.rollout
    if s.rollout.engine != "vllm":
        raise LaunchError(f"rollout.engine: given {s.rollout.engine!r}, allowed for a command of openrlhf: vllm")
    actor = own(s, "actor")
    scored = 1 if s.max_tokens_per_gpu else s.rollout.micro_batch or s.micro_batch
    if s.rollout.batch * s.rollout.n // scored < s.gpus_of("actor"):  # asserted by train_ppo_ray.py
        least = -(-s.gpus_of("actor") * scored // s.rollout.n)
        raise LaunchError(
            f"rollout.batch: given {s.rollout.batch}, allowed with openrlhf: at least {least}, "
            f"a micro batch of {scored} for each of the actor's {s.gpus_of('actor')} GPUs"
        )
    return shell.command(
        "python3",
        [
            option("-m", "openrlhf.cli.train_ppo_ray"),
            *placement(s),
            option("--actor.model_name_or_path", shell.role_model(s, "actor")),
            *others(s),
            option("--data.prompt_dataset", Placeholder("DATASET", "name or path of the prompts")),
            *([option("--data.max_images_per_prompt", s.images.count)] if s.images else []),
            option("--data.max_len", s.seq_len),
            option("--rollout.max_new_tokens", s.response_len),
            option("--rollout.batch_size", s.rollout.batch),
            option("--rollout.n_samples_per_prompt", s.rollout.n),
            tokens_scored(s) if s.max_tokens_per_gpu else option("--rollout.micro_batch_size", scored),
            option("--algo.advantage.estimator", ESTIMATORS[s.task]),
            *shared(actor),
            *switch("--actor.gradient_checkpointing_enable", actor.checkpointing == "full"),
            *switch("--actor.gradient_checkpointing_reentrant", reentrant(actor)),
            *switch("--actor.freeze_visual_encoder", s.images is not None and s.images.freeze == "vision"),
            optim("--actor.optim", actor),
            *([option("--actor.entropy_coef", f"{s.entropy_coeff:g}")] if s.entropy_coeff else []),
            *([optim("--critic.optim", own(s, "critic"))] if s.has("critic") else []),
            option("--vllm.num_engines", s.rollout.gpus // s.rollout.tensor_parallel),
            option("--vllm.tensor_parallel_size", s.rollout.tensor_parallel),
            option("--vllm.gpu_memory_utilization", s.rollout.gpu_memory_utilization),
            *switch("--vllm.enable_sleep", s.rollout.sleep),
            *switch("--vllm.enforce_eager", s.rollout.enforce_eager),
            *switch("--ds.enable_sleep", rl.states_sleep(s)),
        ],
    )


def tokens_scored(s: Scenario) -> Words:
    """The flag for the tokens of a dynamic batch in scoring."""
    assert s.rollout
    return option("--rollout.max_tokens_per_gpu", s.rollout.max_tokens_per_gpu or s.max_tokens_per_gpu)


def others(s: Scenario) -> Iterator[Words]:
    """The flags of the other roles; a reference, which has the actor's model, runs if a KL coefficient is set."""
    if s.has("critic"):
        yield option("--critic.model_name_or_path", shell.role_model(s, "critic"))
    if s.has("reward"):
        yield option("--reward.model_name_or_path", shell.role_model(s, "reward"))
        yield from switch("--reward.offload", own(s, "reward").offload.parameters)
    else:
        yield option("--reward.remote_url", Placeholder("REWARD", "address of a reward server, or reward_func.py"))
    yield option("--algo.kl.init_coef", 0.01 if s.has("reference") else 0)  # 0.01 is the default
    if s.has("reference"):
        yield from switch("--ref.offload", own(s, "reference").offload.parameters)


def placement(s: Scenario) -> Iterator[Words]:
    """The flags for the GPUs of every role, and for which roles share them.

    `colocate_all` puts every role with the actor, and vLLM too unless training is asynchronous; `colocate_actor_ref`
    and `colocate_critic_reward` join two.
    """
    homes = {name: s.group(name) for name in ("critic", "reference", "reward") if s.has(name)}
    for name in ("actor", *homes):
        nodes, each = shell.nodes_of(s.gpus_of(homes.get(name, name)), s.gpus_per_node)
        flag = "ref" if name == "reference" else name
        yield option(f"--{flag}.num_nodes", nodes)
        yield option(f"--{flag}.num_gpus_per_node", each)
    if s.placement == "colocated":
        yield ("--train.colocate_all",)
        return
    alone = [name for name, home in homes.items() if home == name]
    with_actor = [name for name, home in homes.items() if home == "actor"]
    if set(with_actor) - {"reference"}:
        if alone:
            given = " and ".join(with_actor)
            raise LaunchError(
                f"roles.{alone[0]}.gpus: given where {given} shares the actor's GPUs, allowed with openrlhf: none, "
                "as one flag puts all roles there"
            )
        yield ("--train.colocate_all",)
        yield ("--train.async_enable",)
    elif with_actor:
        yield ("--train.colocate_actor_ref",)
    yield from switch("--train.colocate_critic_reward", homes.get("reward") == "critic")


def notes(s: Scenario) -> Iterator[str]:
    """Notes on the values that the reader fills in, and on fields that no flag sets."""
    if not s.rollout:
        keys = "--data.input_key, --data.output_key" if s.task in ("pretrain", "sft") else "--data.chosen_key"
        yield shell.needs("DATASET", f"your data; {keys} and --data.apply_chat_template say how to read it")
        if s.nodes > 1:
            yield shell.needs(
                "HOSTFILE", "a line `<node> slots=<GPUs>` for each node, which the launcher reaches by ssh"
            )
        yield from shell.unsaid(s, *UNSAID)
        yield from shell.unsaid_of_roles(s, ("offload.parameters", "reference.model"))
        yield from shell.common_notes(s)
        return
    yield shell.needs("DATASET", "your prompts; --data.input_key and --data.apply_chat_template say how to read them")
    if s.has("reward"):
        yield shell.needs("REWARD_MODEL", "a reward model of the size of the one computed")
    else:
        yield shell.needs("REWARD", "what scores the responses")
    if s.nodes > 1:
        yield shell.ray_on_every_node(s)
    if "--train.async_enable" in {words[0] for words in placement(s)}:
        yield "roles share GPUs without vLLM only where training is asynchronous: --train.async_enable"
    yield f"--data.max_len bounds prompt and response together; keep prompts within prompt_len {s.prompt_len}"
    yield from shell.unsaid(s, *UNSAID)
    yield from shell.unsaid_of_roles(s, ("offload.parameters",))
    if s.has("critic") and (batch := own(s, "critic").global_batch) != own(s, "actor").global_batch:
        yield f"roles.critic.global_batch {batch}: openrlhf has one --train.batch_size for both"
    yield from shell.common_notes(s)
