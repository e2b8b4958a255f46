"""A scenario: a user's description of a job, with everything unsaid filled in by the framework's defaults.

The fields, their values, bounds and units are in `scenario.schema.json`, the rules that join several fields in
`calc.scenario.rules`; `calc.resolve.parse` reads what a user says into this object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from calc.base.plan import Keeps, MegatronShards, Recomputed
from calc.base.schema import InputError
from calc.models.architecture import Architecture
from calc.models.lora import EMBEDDING, HEAD
from calc.models.slices import device_layers
from calc.scenario.data_sets import SHORT
from calc.scenario.images import Images
from calc.scenario.lengths import Lengths, fullest
from calc.scenario.words import (
    PAIRED,
    PARTNERS,
    RL,
    SERVERS,
    SHARDED,
    TRAINED_ROLES,
    AdapterDtype,
    AdapterInit,
    AdapterUnits,
    Attention,
    Checkpointing,
    Compile,
    ContextExchange,
    DeviceMap,
    ExpertsImplementation,
    Float8,
    FusedLoss,
    Generates,
    GradDtype,
    Kernels,
    Layout,
    LinearAttention,
    Logprob,
    Loss,
    MasterDtype,
    Method,
    OuterUnits,
    OutputsKept,
    Placement,
    Precision,
    QatScheme,
    Resharding,
    Sharded,
    Sharding,
    StateDtype,
    Task,
    Trainer,
)

SCHEMA_FILE = Path(__file__).with_name("scenario.schema.json")
SCHEMA: Mapping[str, Any] = json.loads(SCHEMA_FILE.read_text("utf-8"))


class ScenarioError(InputError):
    """A scenario that cannot be used; its text is one line naming the place, the field, what was given and allowed."""


@dataclass(frozen=True, slots=True)
class Lora:
    """Adapters beside frozen weights: `rank` r, the `targets` that get one, input `dropout`, format, FSDP unit.

    `modules_to_save`: modules of which copies are trained whole. `init`: what adapters start from. `dora`: each row of
    an adapted weight has a magnitude, which is trained, too. `count`: adapters beside each linear, one for each token.
    `ia3`: a vector weighs the outputs of each linear, or the inputs of an MLP's last one, in place of both matrices.
    `ref_adapter`: a frozen copy of the adapters is the reference.
    """

    rank: int
    targets: str | tuple[str, ...]
    dropout: float
    dtype: AdapterDtype
    units: AdapterUnits
    modules_to_save: tuple[str, ...] = ()
    init: AdapterInit = "random"
    dora: bool = False
    count: int = 1
    ia3: bool = False
    ref_adapter: bool = False

    @property
    def modules(self) -> str | tuple[str, ...]:
        """`targets`, with embedding and head by their last names: PEFT also matches the end of a module's path."""
        if isinstance(self.targets, str):
            return self.targets
        last = {target: target.rpartition(".")[2] for target in self.targets}
        return tuple([last[target] if last[target] in (EMBEDDING, HEAD) else target for target in self.targets])


@dataclass(frozen=True, slots=True)
class Offload:
    """The tensors that live in host memory; Adam steps a `fraction` of the parameters there.

    `masters`: their fp32 master weights leave the GPU, too.
    """

    optimizer: bool
    parameters: bool
    activations: bool = False
    fraction: float = 0.0
    masters: bool = True

    @property
    def states(self) -> bool:
        """True if optimizer states, or a part of them, are on the host, all the time or in between."""
        return self.optimizer or self.fraction > 0

    @property
    def trained(self) -> bool:
        """True if weights or optimizer states of a trained model are."""
        return self.states or self.parameters


@dataclass(frozen=True, slots=True)
class Rollout:
    """The way responses are generated: by `engine`, `n` for each of `batch` prompts, on `gpus` of the job's GPUs.

    `micro_batch` sequences are scored at once, as many as the actor trains at once if it is None; if batches are
    dynamic, as many as `max_tokens_per_gpu` hold, by default the actor's. `v0`: vLLM's first engine runs, where a
    release has two. `offload_model` and `offload_optimizer`: weights and optimizer states wait on the host while the
    engine generates; weights are handed to it in `move_model_batches` groups of layers, None for the framework's usual
    way. `max_model_len` is None if the framework decides, `max_num_seqs` and `max_num_batched_tokens` are
    None if vLLM does. `layered_summon`: adapters are gathered for the engine a layer at a time. `enforce_eager`: it
    captures no CUDA graphs. `expected_len` is the
    mean length of a response, `fullest_len` that of the sequences in the fullest micro batch, prompts included; None
    where they are not known.
    """

    engine: Generates
    tensor_parallel: int
    gpu_memory_utilization: float
    n: int
    micro_batch: int | None
    max_tokens_per_gpu: int | None
    sleep: bool
    v0: bool
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    layered_summon: bool
    enforce_eager: bool
    offload_model: bool
    offload_optimizer: bool
    move_model_batches: int | None
    batch: int
    expected_len: int | None
    fullest_len: int | None
    gpus: int

    @property
    def serves(self) -> bool:
        """True if an engine of its own generates, and not the trainer's model."""
        return self.engine in SERVERS

    @property
    def server(self) -> str:
        """The name of that engine as its readers know it; empty if there is none."""
        return SERVERS.get(self.engine, "")


@dataclass(frozen=True)
class Scenario:
    """One job, every field filled in; made by `parse`, which also checks it.

    Names, values and units are those of `scenario.schema.json`; `lora` is None if nothing is adapted. `architecture` is
    the trained model's; `architectures` has those of the roles that say which model they run, and `warnings` what a
    reader should know though nothing forbids it, whatever the card. `plan` is the framework's part: the roles and
    stages that it runs for a scenario. `counts_prompts`: for RL a micro batch counts prompts, each with its responses,
    and not sequences, which no user can ask for. `rollout` is None and `prompt_len` and
    `response_len` are 0 if nothing is generated; for RL `seq_len` is their sum.
    """

    model: str
    task: Task
    framework: str
    framework_version: str
    trainer: Trainer
    gpu: str
    gpus: int
    gpus_per_node: int
    host_memory: float | None
    cpu_threads: int | None
    method: Method
    lora: Lora | None
    double_quantization: bool
    load_in_8bit: bool
    qat_scheme: QatScheme
    checkpoint_gb: float | None
    quantize_moe_experts: bool
    precision: Precision
    optimizer: str
    optimizer_impl: str
    galore_rank: int
    optimizer_in_backward: bool
    use_precision_aware_optimizer: bool
    main_params_dtype: MasterDtype
    exp_avg_dtype: StateDtype
    exp_avg_sq_dtype: StateDtype
    sharding: Sharding
    data_parallel_sharding_strategy: MegatronShards
    tensor_parallel: int
    pipeline_parallel: int
    pipeline_layers: tuple[int, ...] | None
    virtual_pipeline: int
    device_map: DeviceMap
    device_map_gpus: int | None
    context_parallel: int
    data_parallel_replicate: int
    sequence_parallel: bool
    async_tensor_parallel: bool
    expert_parallel: int
    expert_tensor_parallel: int
    expert_imbalance: float
    expert_capacity: float | None
    expert_padding: bool
    on_policy: float
    sft_alpha: float
    offload: Offload
    grad_dtype: GradDtype
    no_sync: bool
    memory_efficient_linear: bool
    zero_init: bool
    max_live_parameters: int | None
    sub_group_size: int | None
    reduce_bucket_size: int | str | None
    stage3_prefetch_bucket_size: int | str | None
    stage3_param_persistence_threshold: int | str | None
    checkpointing: Checkpointing
    checkpointed_layers: int | None
    recompute_modules: tuple[Recomputed, ...] | None
    recompute_num_layers: int | None
    mtp_num_layers: int | None
    reentrant: bool
    attention: Attention
    create_attention_mask_in_dataloader: bool
    cp_comm_type: ContextExchange
    apply_rope_fusion: bool
    linear_attention: LinearAttention
    kernels: Kernels
    compile: Compile
    float8: Float8
    float8_all_gather: bool
    fp8_param_gather: bool
    bf16_layers_at_end: int | None
    loss: Loss
    loss_chunk_size: int | None
    cross_entropy_fusion_impl: FusedLoss
    outputs_kept: OutputsKept
    output_hidden_states: bool
    outputs_fp32: bool
    loss_fp32: bool
    experts_implementation: ExpertsImplementation
    outer_units: OuterUnits
    reshard_after_forward: Resharding
    logprob: Logprob
    entropy_coeff: float
    entropy_from_logits_with_chunking: bool
    micro_batch: int
    max_tokens_per_gpu: int | None
    global_batch: int
    seq_len: int
    prompt_len: int
    response_len: int
    lengths: Lengths | None
    expected_len: int
    packing: bool
    padding_free: bool
    group_by_length: bool
    expandable_segments: bool
    pinned_max_round_threshold_mb: int | None
    counts_prompts: bool
    vision_tower: bool
    images: Images | None
    rollout: Rollout | None
    roles: Mapping[str, Mapping[str, Any] | str] = field(hash=False)
    versions: Mapping[str, str] = field(hash=False)
    placement: Placement
    architecture: Architecture = field(repr=False, compare=False)
    plan: Callable[[Scenario], Keeps] = field(repr=False, compare=False)
    architectures: Mapping[str, Architecture] = field(default_factory=dict, repr=False, compare=False)
    warnings: tuple[str, ...] = field(default=(), repr=False, compare=False)
    framework_asked: str = field(default="", repr=False, compare=False)  # with the version that was named, if one was

    @property
    def sharded(self) -> Sharded:
        """`sharding` as its family, and its stage or version."""
        return SHARDED[self.sharding]

    @property
    def gathers(self) -> bool:
        """True if a rank has a part of the weights, and gathers whole ones to compute with."""
        return self.sharded.gathers or self.data_parallel_sharding_strategy == "optim_grads_params"

    @property
    def recomputed(self) -> frozenset[Recomputed]:
        """The parts of layers that are run again, one by one; none if whole layers are, or nothing is."""
        if self.checkpointing != "selective":
            return frozenset()
        usual: tuple[Recomputed, ...] = ("core_attn",) if self.sharding == "megatron" else ()
        return frozenset(self.recompute_modules or usual)

    @property
    def layout(self) -> Layout:
        """`precision` without the 16-bit type: fp16 is laid out as bf16 is, by DeepSpeed or by autocast.

        A model that is served alone is loaded in fp16, as is one that stays frozen beside adapters.
        """
        if self.precision != "fp16":
            return self.precision
        if self.sharded.family == "zero":
            return "mixed"
        return "bf16" if self.task == "inference" or self.method != "full" else "autocast"

    @property
    def data_parallel(self) -> int:
        """The number of ranks that work on different sequences."""
        return self.gpus // self.together

    @property
    def together(self) -> int:
        """The number of GPUs that work on the same sequences."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.devices

    @property
    def devices(self) -> int:
        """The number of GPUs over which one process spreads the layers of a model, by a `device_map`."""
        return (self.device_map_gpus or self.gpus) if self.device_map == "auto" else 1

    @cached_property
    def stage_layers(self) -> tuple[int, ...] | None:
        """The layers of each pipeline stage, or on each GPU of a `device_map`; None where the stages' are equal."""
        return device_layers(self.architecture, self.devices) if self.devices > 1 else self.pipeline_layers

    @property
    def parts(self) -> int:
        """The number of parts that hold different layers: pipeline stages, or GPUs of a `device_map` that have some."""
        return len(self.stage_layers or ()) if self.devices > 1 else self.pipeline_parallel

    @property
    def shards(self) -> int:
        """GPUs with the same part of every layer, over which weights, gradients and states can be spread."""
        return self.data_parallel * self.context_parallel // self.data_parallel_replicate

    @property
    def communicators(self) -> int:
        """The groups in which a GPU communicates: one for its shards, and one for each kind of parallelism.

        DeepSpeed works in a copy of the group of all GPUs, in which the trainer waits and gathers losses (deepspeed
        0.18 `utils/groups.py`, `_clone_world_group`); Megatron-core has groups of its own.
        """
        own = (
            self.tensor_parallel, self.pipeline_parallel, self.context_parallel, self.expert_parallel,
            self.data_parallel_replicate,
        )  # fmt: skip
        further = {"zero": (self.gpus,), "megatron": self.megatron_groups}.get(self.sharded.family, ())
        return sum([degree > 1 for degree in (self.shards, *own, *further)])

    @property
    def expert_sent(self) -> float:
        """Tokens that a GPU sends to experts, over those that its router picks: what a capacity leaves, or fills up.

        An even router is meant, whose experts a capacity below 1 alone cuts. Megatron-LM d98e8a64dd
        `megatron/core/transformer/moe/moe_utils.py`, `apply_router_token_dropping`.
        """
        if self.expert_capacity is None:
            return 1
        return self.expert_capacity if self.expert_padding else min(1, self.expert_capacity)

    @property
    def expert_received(self) -> float:
        """Tokens that the experts of the fullest GPU get, over those that an average router picks."""
        if self.expert_capacity is None:
            return self.expert_imbalance
        return self.expert_capacity if self.expert_padding else min(self.expert_imbalance, self.expert_capacity)

    @property
    def peers(self) -> int:
        """Other GPUs of its node to which a GPU sends tokens for their experts."""
        return max(1, min(self.expert_parallel, self.gpus_per_node // self.expert_tensor_parallel)) - 1

    @property
    def megatron_groups(self) -> tuple[int, ...]:
        """The GPUs in each further group in which Megatron-core communicates.

        All of them start together, and the optimizer's own group of all sums up the norm of the gradients; those with
        parts of one model agree on each step. Experts' tokens are counted and their gradients reduced in groups of
        their own. Megatron-LM d98e8a64dd `megatron/training/training.py`, `train_step`; `megatron/core/
        parallel_state.py`, `optimizer/__init__.py`, `transformer/moe/token_dispatcher.py`.
        """
        shared = self.expert_parallel * self.expert_tensor_parallel
        same = self.gpus // (self.pipeline_parallel * shared) if self.expert_parallel > 1 else 1
        return (self.gpus, self.gpus, self.tensor_parallel * self.pipeline_parallel, self.expert_parallel, same)

    @property
    def rows(self) -> int:
        """Sequences of one forward on one GPU.

        These are the micro batch, both halves of its pairs, or what a framework makes of it.
        """
        if self.max_tokens_per_gpu:
            return self.filled(self.max_tokens_per_gpu, self.sequences)
        return self._forward(self.micro_batch)

    def filled(self, tokens: int, sequences: int) -> int:
        """Sequences of a dynamic batch of `tokens` a GPU: at least one, at most the GPU's share of all `sequences`."""
        held = tokens * self.context_parallel // self.expected_len
        return max(1, min(held, -(-sequences // self.data_parallel)))

    @property
    def unpadded(self) -> bool:
        """True if the sequences of a batch lie end to end, packed or as they come."""
        return self.packing or self.padding_free

    @property
    def longest_len(self) -> int:
        """Tokens of the longest sequence: the cap, unless `lengths` say that the data has none so long."""
        return self.lengths.longest_below(self.seq_len) if self.lengths else self.seq_len

    @property
    def prompt_and_response(self) -> tuple[float, float]:
        """Mean lengths of prompt and response: as given, or the mean of both together, divided as their caps are."""
        known = self.rollout and self.rollout.expected_len
        response = float(known or self.expected_len * self.response_len / self.seq_len)
        return self.expected_len - response, response

    @property
    def least_len(self) -> int:
        """Tokens of the longest sequence where nothing says how long the data are, and they are as short as any known.

        Texts for pretraining fill every sequence, and stages of a pipeline exchange tensors of one shape.
        """
        said = self.lengths or self.packing or self.expected_len < self.seq_len or self.pipeline_parallel > 1
        return self.longest_len if said or self.task in ("pretrain", *RL) else min(self.seq_len, SHORT)

    def held_len(self, rows: int) -> int:
        """Tokens of a sequence, padding included, in the fullest batch of `rows`, the whole batch over `rows`.

        Without padding each has its mean length, unless `lengths` or `rollout.fullest_len` say how full the fullest
        batch is; else each is padded to the longest. A dynamic batch is no fuller than its bound, but for a single
        sequence that is longer.
        """
        if not self.unpadded:
            return self.longest_len
        if self.lengths is None:
            known = self.rollout and not self.max_tokens_per_gpu and self.rollout.fullest_len
            return known or self.expected_len
        if self.max_tokens_per_gpu:
            return max(self.expected_len, -(-self.longest_len // rows))
        return -(-fullest(self.lengths, self.seq_len, rows) // rows)

    def computed_len(self, rows: int) -> float:
        """Tokens of a sequence in an average batch of `rows`, with its padding, which only `lengths` tell."""
        if self.lengths is None or self.unpadded:
            return self.expected_len
        return self.lengths.padded(self.seq_len, rows, self.sorted_together(rows))

    def sorted_together(self, rows: int) -> int:
        """Batches of `rows` sequences that are sorted together by length: one where they come at random."""
        if self.lengths is None or not self.group_by_length:
            return 1
        return self.lengths.sorted_together(rows, self.accumulation)

    @property
    def scoring_rows(self) -> int:
        """Sequences of one forward that scores responses, on one GPU: no more than it has of a rollout."""
        if not self.rollout:
            return self.rows
        responses = self.rollout.batch * self.rollout.n
        if self.max_tokens_per_gpu:
            return self.filled(self.rollout.max_tokens_per_gpu or self.max_tokens_per_gpu, responses)
        if self.rollout.micro_batch is None:
            return self.rows
        return min(self._forward(self.rollout.micro_batch), max(1, responses // self.data_parallel))

    def scored_by(self, name: str) -> int:
        """`scoring_rows` of the role `name`; a frozen role may have a micro batch of its own."""
        own = self._own[name]
        return own.rows if name not in TRAINED_ROLES and "micro_batch" in self.roles[name] else own.scoring_rows

    def _forward(self, micro_batch: int) -> int:
        if self.counts_prompts and self.rollout:
            # never below the responses to one prompt, and at most the GPU's share of the rollout, all that can be had
            n = self.rollout.n
            return min(micro_batch * n, max(1, self.rollout.batch * n // self.gpus))
        return micro_batch * (2 if self.task in PAIRED else 1)

    @property
    def sequences(self) -> int:
        """Sequences of an optimizer step: the global batch, both halves of its pairs."""
        return self.global_batch * (2 if self.task in PAIRED else 1)

    @property
    def accumulation(self) -> int:
        """Micro batches of one GPU in an optimizer step; a dynamic one may be left less full."""
        if self.max_tokens_per_gpu:
            return -(-self.sequences // (self.rows * self.data_parallel))
        return max(1, self.sequences // (self.rows * self.data_parallel))

    @property
    def nodes(self) -> int:
        """The number of nodes that the job's GPUs fill."""
        return -(-self.gpus // self.gpus_per_node)

    def has(self, name: str) -> bool:
        """True if the job runs the role `name`."""
        return self.roles.get(name, "none") != "none"

    def group(self, name: str) -> str:
        """The role whose GPUs the role `name` uses: itself if it has its own, or if all roles share theirs."""
        if self.placement == "colocated" or name == "rollout" or "gpus" in self.roles[name]:
            return name
        return next(other for other in PARTNERS[name] if "gpus" in self.roles.get(other, ()))

    def gpus_of(self, name: str) -> int:
        """GPUs of a role that has its own, of the rollout, or of all roles together."""
        if self.placement == "colocated":
            return self.gpus
        if name == "rollout" and self.rollout:
            return self.rollout.gpus
        own = self.roles[name]
        assert not isinstance(own, str)
        return int(own["gpus"])

    def role(self, name: str) -> Scenario | None:
        """The scenario as the role `name` sees it, with the role's own values; None if the role does not run."""
        return self._own.get(name)

    @property
    def offloaded(self) -> list[str]:
        """The things in host memory, in words: of the trained model, then frozen roles that are there without it."""
        off = self.offload
        named = (
            ("optimizer", off.optimizer and self.optimizer != "none"),
            ("weights", off.parameters),
            ("checkpoints", off.activations),
            ("Adam's step", off.fraction > 0),
        )
        frozen = [name for name, own in self._own.items() if own.offload.parameters and not off.parameters]
        return [*(name for name, on in named if on), *frozen]

    @cached_property
    def keeps(self) -> Keeps:
        """The roles and stages that the framework runs for the job, and what they keep in memory."""
        return self.plan(self)

    @cached_property
    def _own(self) -> dict[str, Scenario]:
        return {name: self._differing(name, own) for name, own in self.roles.items() if not isinstance(own, str)}

    def _differing(self, name: str, own: Mapping[str, Any]) -> Scenario:
        differs: dict[str, Any] = {"gpus": self.gpus_of(self.group(name))}
        lora: dict[str, Any] = {}
        offload: dict[str, Any] = {}
        for place, value in own.items():
            branch, _, leaf = place.partition(".")
            {"lora": lora, "offload": offload}.get(branch, differs)[leaf or branch] = value
        if "micro_batch" in own:
            differs.setdefault("max_tokens_per_gpu", None)
        if differs.get("method") == "full":
            differs |= {"lora": None, "load_in_8bit": False, "quantize_moe_experts": False}
        elif lora:
            lists = {name: tuple(value) for name, value in lora.items() if isinstance(value, list)}
            differs["lora"] = replace(self.lora or Lora(**lora), **lora | lists)
        differs["architecture"] = self.architectures.get(name, self.architecture)
        if offload:
            differs["offload"] = replace(self.offload, **offload)
        return changed(self, differs)

    def as_dict(self) -> dict[str, Any]:
        """Every field of the contract, defaults filled in, ready for JSON; `parse` of it gives the same scenario."""
        data = {name: getattr(self, name) for name in SCHEMA["properties"]}
        if self.rollout:
            data["seq_len"] = None
            data["rollout"] = {f.name: getattr(self.rollout, f.name) for f in fields(Rollout)}
        else:
            data["prompt_len"] = data["response_len"] = None
        if self.images:
            data["images"] = {f.name: getattr(self.images, f.name) for f in fields(Images)}
        if self.max_tokens_per_gpu:
            data["micro_batch"] = None
        if self.lengths:
            data |= {"lengths": self.lengths.as_dict(), "expected_len": None}
        data["framework"] = self.framework_asked
        data["offload"] = {f.name: getattr(self.offload, f.name) for f in fields(Offload)}
        if self.lora:
            targets = self.lora.targets if isinstance(self.lora.targets, str) else list(self.lora.targets)
            data["lora"] = {
                "rank": self.lora.rank, "targets": targets, "dropout": self.lora.dropout, "dtype": self.lora.dtype,
                "units": self.lora.units, "modules_to_save": list(self.lora.modules_to_save),
                "init": self.lora.init, "dora": self.lora.dora, "count": self.lora.count, "ia3": self.lora.ia3,
                "ref_adapter": self.lora.ref_adapter,
            }  # fmt: skip
        for name in ("pipeline_layers", "recompute_modules"):
            data[name] = list(data[name]) if data[name] else None
        data["roles"] = {name: own if isinstance(own, str) else dict(own) for name, own in self.roles.items()}
        data["versions"] = dict(self.versions)
        return data


_CACHED = tuple(name for name, own in vars(Scenario).items() if isinstance(own, cached_property))


def changed(s: Scenario, changes: Mapping[str, Any]) -> Scenario:
    """`dataclasses.replace` in a tenth of the time, for searches that call it thousands of times; checks no names."""
    made = object.__new__(Scenario)
    own = made.__dict__
    own.update(s.__dict__)
    for name in _CACHED:
        own.pop(name, None)
    own.update(changes)
    return made


def on_card(s: Scenario, gpu: str) -> Scenario:
    """`s` on another card, or on none, "": scenarios that differ in the card alone become equal, and share their plan.

    What a framework keeps in memory does not depend on the card.
    """
    return changed(s, {"gpu": gpu, "keeps": s.keeps})
