"""Plain PyTorch and Transformers: models, a loss, an optimizer of torch.optim, and nothing hidden.

The loop is `loss = model(**batch).loss; loss.backward(); optimizer.step(); optimizer.zero_grad()`. For RL all roles
live in one process: Transformers generates, every role scores the batch, then each trained role is updated. Where GPUs
share sequences, the model is cut by Transformers' plan or PyTorch's tutorial (DTensor), attention runs within
`context_parallel`, and pipeline stages run under `Schedule1F1B`, divided and called as torchtitan does it. Sources are
torch 2.13.0, transformers 5.23.0 and peft 0.21.2, by file and line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from calc.base.optimizers import OPTIMIZERS
from calc.base.plan import DeepSpeed, Does, Held, Keeps, Path, Role, Stage, pipelined, supervised
from calc.base.refusal import Refusal
from calc.base.versions import at_least
from calc.base.versions import nearest as _nearest
from calc.frameworks import trainer
from calc.frameworks.base import Choices, accumulated, as_published, together
from calc.frameworks.constraints import (
    checkpoint_fault,
    compile_fault,
    cut_alike,
    experts_fault,
    grouping_fault,
    hybrid_fault,
    in_backward_fault,
    kernels_fault,
    outputs_fault,
    pipeline_fault,
    ring_fault,
    sharding_fault,
    states_fault,
    streams_fault,
    tensor_fault,
    vocabulary_fault,
    zero_fault,
)
from calc.frameworks.releases import pinned
from calc.frameworks.torch.releases import RELEASES
from calc.frameworks.torch.trainers import axolotl, litgpt, megatron, megatron_swift, torchtitan, torchtune, unsloth
from calc.frameworks.torch.trainers.registry import (
    LOW_LEVEL,
    ON_TRANSFORMERS,
    REINFORCES,
    RELEASED,
    SHIPPED,
    TRAINERS,
)
from calc.models.architecture import Architecture
from calc.scenario.scenario import Scenario
from calc.scenario.words import DEEPSPEED, FSDP, PREFERENCE, RL

KNOWN: tuple[str, ...] = tuple(RELEASES)
CHOICES = Choices(own_loop=True, trainers=frozenset({*RELEASED, "megatron"}), fp16=True, shared="tensor_parallel",
                  engines=("hf",), serves=frozenset(REINFORCES),
                  fixed={"unsloth": unsloth.FIXED, "torchtune": torchtune.FIXED, "torchtitan": torchtitan.FIXED},
                  liger=frozenset({"llamafactory", "axolotl", "ms-swift"}), pure=frozenset({"llamafactory"}),
                  adapters=frozenset({"own", "axolotl", "ms-swift"}),
                  cuts=lambda job, rung: rung["method"] == "full",
                  pads=lambda values, arch, sees: values["trainer"] == "unsloth" and values["task"] not in RL
                  and unsloth.pads(values, arch, sees=sees),
                  copy=lambda values, model: unsloth.copied(values, model)
                  if values["trainer"] == "unsloth" and values["task"] not in RL else None
                  )  # fmt: skip

# Loops that can step each parameter in backward, torchtitan to 0.2 (`early_step_in_backward`); for others some
# optimizers do so by themselves, such as LOMO.
STEPPING = ("own", "torchtune", "torchtitan")
# torchtitan's train.py asks for no outputs; by default `PipelineScheduleSingle.step` returns them
RETURNED = "the schedule is asked for no outputs: with return_outputs the last stage keeps all micro batches' logits"


WITH_ADAPTERS = ("lora", "qlora")


def modelled(architecture: Architecture, values: Mapping[str, Any]) -> Architecture:
    """The model as litgpt or Megatron-core has it where they train, else as Transformers has it.

    No trainer runs RL: see `defaults`.
    """
    match "own" if values["task"] in RL else values["trainer"]:
        case "megatron":
            return megatron.modelled(architecture, int(values["mtp_num_layers"] or 0))
        case "megatron-swift":
            version, depths = str(values["versions.megatron-swift"]), int(values["mtp_num_layers"] or 0)
            return megatron_swift.modelled(architecture, version, depths)
        case "litgpt":
            return litgpt.modelled(architecture)
        case "torchtitan":
            return torchtitan.modelled(architecture, str(values["versions.torchtitan"]), str(values["versions.torch"]))
        case "torchtune":
            return torchtune.modelled(architecture, str(values["versions.torchtune"]), packing=bool(values["packing"]))
        case "axolotl":
            return as_published(axolotl.modelled(architecture), values)
        case "unsloth":
            release, library = (str(values[f"versions.{name}"]) for name in ("unsloth", "transformers"))
            joined = bool(values["packing"] or values["padding_free"])
            own = unsloth.modelled(architecture, release, library, str(values["method"]), joined=joined)
            return as_published(own, values)
        case _:
            return as_published(architecture, values)


def nearest(version: str) -> str:
    """The known version whose memory behaviour `version` shares."""
    return _nearest(version, KNOWN)


def defaults(task: str, version: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a loop without further settings for `task`, by dotted key; `given` is what the user set.

    The habits of a trainer that is named go before them, and others follow from those.
    """
    name = given.get("trainer", "own")
    loops = name in (REINFORCES if task in RL else TRAINERS)
    habits = TRAINERS[name].habits(task, given) if loops else {}
    given = {**habits, **given}
    shared, pins = together(given), pinned(RELEASES[version])
    gpus = max(1, trainer.trainers(given) // shared)  # groups of GPUs, each with sequences of its own
    micro_batch = int(given.get("micro_batch", 1))
    several = "fsdp2" if shared > 1 else "ddp"
    copies = gpus * int(given.get("context_parallel", 1))  # copies of each layer
    sharding = str(given.get("sharding", several if copies > 1 else "none"))
    precision = str(given.get("precision", "mixed" if sharding in DEEPSPEED else "bf16"))
    optimizer = str(given.get("optimizer", "none" if task == "inference" else "adamw"))
    values: dict[str, Any] = {
        "micro_batch": micro_batch,  # the smallest; no library chooses one
        "global_batch": micro_batch * gpus * int(given.get("pipeline_parallel", 1)),  # the least that fills all stages
        **({"seq_len": 2048} if task not in RL else rollout(micro_batch * gpus)),
        # the type the checkpoint names, bf16 for today's models (transformers modeling_utils.py, dtype "auto");
        # DeepSpeed beside bf16 weights keeps fp32 ones (runtime/zero/stage_1_and_2.py:400 of 0.16.4)
        "precision": precision,
        "sharding": sharding,
        "optimizer": optimizer,
        "optimizer_in_backward": OPTIMIZERS[optimizer].in_backward,
        "optimizer_impl": stepped({**pins, **given}, sharding, optimizer),
        "offload.optimizer": False,
        "offload.parameters": False,
        # .grad has the parameter's type; under fsdp-mixed the reduced shard has that of the fp32 shard
        # (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:696)
        "grad_dtype": accumulated(precision, sharding),
        "no_sync": name in ON_TRANSFORMERS and trainer.reduces_once(sharding, given),
        "checkpointing": "none",  # gradient_checkpointing_enable() is a call of its own
        # what that sets where nothing is asked: modeling_utils.py, `use_reentrant`, its pull request 43203
        "reentrant": not at_least(str({**pins, **given}["versions.transformers"]), "5"),
        "attention": "sdpa",  # transformers modeling_utils.py: sdpa where the model has it and nothing else is asked
        "linear_attention": "torch" if name == "own" else "fla",  # alone, neither library needs the kernels
        "loss": "full",  # transformers/loss/loss_utils.py: ForCausalLMLoss
        "logprob": "log-softmax-fp32",  # as DPO's paper and first implementations: log_softmax(logits.float())
        "packing": False,
        **pins,
    }
    if given.get("method", "full") in WITH_ADAPTERS:
        values |= {
            "lora.rank": 8,  # peft/tuners/lora/config.py: r
            "lora.targets": "all-linear",  # peft itself would take q_proj and v_proj of a Llama
            "lora.dropout": 0,  # peft/tuners/lora/config.py: lora_dropout
            "lora.units": "own",  # peft/utils/other.py: fsdp_auto_wrap_policy
            "lora.dtype": "bf16" if sharding in DEEPSPEED else "fp32",  # peft/mapping_func.py:36 autocast_adapter_dtype
        }
    return values | habits


def stepped(given: Mapping[str, Any], sharding: str, optimizer: str) -> str:
    """The optimizer implementation where none is; `given` also names the libraries.

    torch/optim/optimizer.py:161-186: foreach on CUDA unless fused=True, except in torch/optim/_adafactor.py and
    lion-pytorch; DeepSpeed has its own FusedAdam, in whose place the Trainer hands it PyTorch's if its configuration
    names none (transformers `integrations/deepspeed.py:deepspeed_optim_sched`).
    """
    facts = OPTIMIZERS[optimizer]
    if given.get("trainer") in ON_TRANSFORMERS and "fused" in facts.spelled.trl:
        fused = trainer.fuses(str(given["versions.transformers"]), str(given["versions.torch"]))
    else:
        fused = sharding in DEEPSPEED and facts.usual == "foreach"
    return "fused" if fused else facts.usual


def rollout(sequences: int) -> dict[str, Any]:
    """Defaults of RL alone; no library chooses lengths or batches. A rollout is one optimizer step's sequences."""
    return {
        "prompt_len": 1024,
        "response_len": 1024,
        "rollout.engine": "hf",
        "rollout.tensor_parallel": 1,
        "rollout.gpu_memory_utilization": 0.9,
        "rollout.n": 1,
        "rollout.micro_batch": None,
        "rollout.sleep": False,
        "rollout.batch": sequences,
    }


def refuse(s: Scenario) -> Refusal | None:
    """The reason why plain PyTorch cannot run `s`, in one line, or None."""
    if fault := compile_fault(s) or experts_fault(s) or outputs_fault(s) or checkpoint_fault(s) or grouping_fault(s):
        return fault
    if s.sharding != "zero3" and (fault := zero_fault(s)):
        return fault
    if fault := kernels_fault(s) or in_backward_fault(s) or states_fault(s) or streams_fault(s) or hybrid_fault(s):
        return fault
    if s.trainer != "own" and (fault := TRAINERS[s.trainer].refuse(s)):
        return fault
    if s.optimizer_in_backward and s.trainer not in STEPPING and not OPTIMIZERS[s.optimizer].in_backward:
        given = f"true with trainer {s.trainer} and optimizer {s.optimizer}"
        return Refusal("optimizer_in_backward", given, "false; it has no switch for it")
    if s.task == "inference" and s.optimizer != "none":
        return Refusal("optimizer", f"{s.optimizer!r} for inference", "none; nothing is trained")
    if s.task == "inference" and s.method == "lora":
        return Refusal("method", "'lora' for inference", "full, or qlora for weights in four bits")
    if s.placement != "colocated" and s.trainer not in REINFORCES:
        return Refusal("placement", "'separate'", "colocated", "with torch")
    if fault := cut_alike(s):
        return fault
    for name in s.roles:
        role = s.role(name)
        if role is None:
            continue
        if role.sharding in DEEPSPEED and s.sharding not in DEEPSPEED:
            return Refusal(f"roles.{name}.sharding", repr(role.sharding), "with DeepSpeed for the whole job")
        if fault := checkpointing_fault(role):
            return fault if checkpointing_fault(s) else fault.of(f"roles.{name}.")
        reason = sharding_fault(role)
        if reason and reason.field in s.roles[name]:
            return reason.of(f"roles.{name}.")
    if s.task == "gkd" and s.together > 1:
        return Refusal("task", "'gkd' where GPUs share sequences", "dpo, sft; not modelled")
    if s.trainer != "ms-swift" and (fault := vocabulary_fault(s)):
        return fault
    if s.sharding == "megatron":
        return sharding_fault(s)  # its parallelism is its own
    # ms-swift has a ring of its own
    ring = None if s.trainer == "ms-swift" else ring_fault(s)
    return sharding_fault(s) or checkpointing_fault(s) or tensor_fault(s) or ring or pipeline_fault(s)


def checkpointing_fault(s: Scenario) -> Refusal | None:
    """The reason why layers cannot be recomputed in part, in one line; None if they can or need not.

    Recomputation must run the same operators as the forward, one by one (`_CachedTorchDispatchMode`); ZeRO-3 gathers
    within a layer, the second time by other operators.
    """
    if s.checkpointing == "selective" and s.sharding == "zero3":
        return Refusal("checkpointing", "'selective' with sharding zero3", "none, full")
    return None


def threads(s: Scenario) -> int | None:
    """One for each of several ranks on a node, which torchrun starts (torch 2.13 `distributed/run.py:872`).

    torchtune shares the cores out itself (`torchtune/training/_distributed.py`, `set_torch_num_threads`); Axolotl
    starts a single rank with accelerate, which leaves it one, too (accelerate 1.15.0 `commands/launch.py:1365`).
    """
    if s.trainer == "torchtune":
        return None
    return 1 if min(s.gpus, s.gpus_per_node) > 1 or s.trainer == "axolotl" else None


def keeps(s: Scenario) -> Keeps:
    """The plan of plain PyTorch: Transformers' own loss, and nothing referenced longer than the loss needs it."""
    plan = _plan(s)
    own = TRAINERS[s.trainer].notes(s) if s.trainer != "own" else ()
    return replace(plan, bare=True, notes=(*plan.notes, *own), low_level=LOW_LEVEL.get(s.trainer, 0))


def configured(s: Scenario) -> DeepSpeed | None:
    """DeepSpeed with the trainer's file or its own defaults, and the sizes of `s`; None where it does not run."""
    if s.sharding not in DEEPSPEED or s.trainer in LOW_LEVEL:
        return None
    shipped = SHIPPED.get(s.trainer)
    usual = shipped(s) if shipped else DeepSpeed(s.versions["deepspeed"])
    live, group = s.max_live_parameters, s.sub_group_size
    return replace(
        trainer.sized(s, usual),
        max_live=usual.max_live if live is None else live,
        sub_group=usual.sub_group if group is None else group,
    )


def _own(s: Scenario) -> dict[str, Any]:
    """Fields of the role that your own loop trains; under FSDP `grad_dtype` is its policy's reduce_dtype."""
    other = {("fsdp-mixed", "bf16"): 2, ("bf16", "fp32"): 4} if s.sharding in FSDP else {}
    ends = "" if s.outer_units == "root" else s.outer_units
    return {"loads": trainer.loads(s), "ends": ends, "reduce_bytes": other.get((s.precision, s.grad_dtype), 0)}


def _plan(s: Scenario) -> Keeps:
    deepspeed = configured(s)
    path = loss_path(s)
    if s.task in RL:
        loop = REINFORCES[s.trainer].plan if s.trainer in REINFORCES else reinforcement
        return loop(s, path, deepspeed)
    own: dict[str, Any] = TRAINERS[s.trainer].keeps(s) if s.trainer != "own" else _own(s)
    alike: dict[str, Any] = {name: own[name] for name in ("wrapped", "loads", "caches") if name in own}
    if s.offload.activations:
        own = {"streams": "each"} | own  # torch/autograd/graph.py: save_on_cpu(pin_memory=True)
    exchange = own.pop("exchange", "ring" if s.context_parallel > 1 else "")
    name, stages = "reward" if s.task == "rm" else "actor", s.pipeline_parallel
    if s.devices > 1:
        return pipelined(name, path, s.rows, s.parts, **own)
    if stages > 1 and s.sharding == "megatron" and not s.has("reference"):
        return pipelined(name, path, s.rows, stages, **own)
    if stages > 1 and s.sharding != "megatron":
        how = {"exchange": exchange, **own}
        return pipelined("actor", replace(path, held="turn"), s.rows, stages, notes=(RETURNED,), **how)
    if s.task == "inference":
        model = Role("actor", path, path, s.rows, s.rows, **own)
        return Keeps((model,), (Stage("generate", "actor", rows=s.rows),), ("actor",), deepspeed=deepspeed)
    if s.has("reference"):
        # disable_adapter() makes the base model the reference, unless that is another model or placed otherwise
        shares = bool(s.lora) and s.roles["reference"] == {"model": s.model}
        reference = Role("reference", path, path, s.rows, s.rows, root_stays=True, shares=shares, **alike)
        if stages > 1:
            return pipelined("actor", path, s.rows, stages, scored=reference, **own)
        before = s.sharding == "megatron"  # ms-swift's `forward_step`, for each micro batch
        return supervised("actor", path, s.rows, scored=reference, before=before, deepspeed=deepspeed, **own)
    if s.has("teacher"):
        logits = Path("flash", head_fp32=path.head_fp32, kept=path.kept if path.picked else 1, picked=path.picked)
        teacher = Role("teacher", logits, logits, s.rows, s.rows, root_stays=True, **alike)
        plan = supervised("actor", path, s.rows, scored=teacher, deepspeed=deepspeed, **own)
        return trainer.distilled(s, plan)
    return supervised(name, path, s.rows, exchange=exchange, deepspeed=deepspeed, **own)


def reinforcement(s: Scenario, path: Path, deepspeed: DeepSpeed | None) -> Keeps:
    """The plan of RL, all roles in one process: generation, scores, the critic's update, the actor's."""
    roles = []
    for name in ("actor", "critic", "reference", "reward"):
        own = s.role(name)
        if own:
            way = path if name in ("actor", "reference") else Path("scalar")
            shares = name == "reference" and bool(s.lora) and s.roles[name] == {"model": s.model}
            rows, scored = own.rows, s.scored_by(name)
            loads = trainer.loads(own)
            roles.append(Role(name, way, way, rows, scored, root_stays=True, shares=shares, loads=loads))
    names = [role.name for role in roles]
    stages = []
    if "actor" in names:
        stages.append(Stage("generate", "actor", rows=roles[0].scoring_rows))
    if len(names) > 1:
        # a job of one role is that role's update alone
        stages += [Stage("score", name) for name in names]
    does: Does = "score" if s.optimizer == "none" else "train"
    stages += [Stage(does, name) for name in ("critic", "actor") if name in names]
    loading = tuple(role.name for role in roles if not role.shares)
    return Keeps(tuple(roles), tuple(stages), loading, deepspeed=deepspeed)


def loss_path(s: Scenario) -> Path:
    """The loss path of `s`: that of Transformers' models, or the trainer's own."""
    usual = _loss_path(s)
    path = usual if s.trainer == "own" or s.task == "rm" else TRAINERS[s.trainer].path(s, usual)
    compiled = s.compile in ("loss", "model-and-loss") and (s.trainer != "torchtune" or torchtune.compiles_loss(s))
    return replace(path, compiled=compiled)


def _loss_path(s: Scenario) -> Path:
    """The loss path of Transformers' models.

    It is `loss_utils.py` for sft, the scenario's `logprob` for preference losses and RL, a value head for rm. ORPO adds
    the chosen sequences' cross entropy (its paper, section 4.3). GKD compares a student's logits, which its caller
    names, with a teacher's: TRL's `generalized_jsd_loss`.

    Transformers cast logits to fp32 in the model up to 4.45. Outputs under Accelerate's autocast are fp32, too. RL
    takes the log-probabilities of the response, cut off behind the head.
    """
    if s.task == "rm":
        return Path("scalar")
    wide = trainer.early(s) or (s.trainer in ON_TRANSFORMERS and trainer.wrapped(s))
    if s.task in PREFERENCE or s.task in RL:
        kind = "log-softmax" if s.logprob == "log-softmax-fp32" else s.logprob
        kept = s.response_len / s.seq_len if s.task in RL else trainer.predicting(s)
        path = Path(kind, head_fp32=wide, upcast=s.logprob == "log-softmax-fp32", kept=kept)
        return _kept(s, trainer.likelihood(s, path) if s.task == "orpo" else path)
    if s.task == "gkd":
        return trainer.divergence(s, wide=wide)
    if s.loss != "full":
        streamed = Path(s.loss, tile=min(s.loss_chunk_size or 0, s.rows * s.seq_len))
        # a loss of hidden states, which the model returns without any logits
        returned = s.output_hidden_states
        return replace(streamed, held=_held(s), hidden=True, outside=True) if returned else streamed
    return replace(_kept(s, trainer.own_loss(s)), hidden=s.output_hidden_states)


def _kept(s: Scenario, usual: Path) -> Path:
    """The path of a loop whose variables keep the model's outputs, and which may cast them to fp32 before its loss."""
    held = _held(s)
    if not s.loss_fp32:  # `F.cross_entropy` of the model's own logits, whose labels are shifted
        return replace(usual, held=held, head_fp32=False, uncast=True, shift_copy=False, outside=True)
    return replace(usual, held=held, head_fp32=usual.head_fp32 or s.outputs_fp32, outside=s.outputs_fp32)


def _held(s: Scenario) -> Held:
    """How long a loop's variables keep the model's outputs."""
    if s.outputs_kept == "none":
        return "forward"
    return "next" if s.outputs_kept == "step" and s.accumulation > 1 else s.outputs_kept
