"""The set-up of a traced training step, read from a scenario."""

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from .reading import CaseError, mapping

MODELS = Path(__file__).parents[2] / "models"
# a pattern for the names that models give the list of their decoder layers
LAYERS = r"(?:layers|h|(?<=transformer\.)blocks)"
MEGATRON = Path(sys.prefix) / "megatron"  # where `.ci/trace` puts Megatron-core and Transformer Engine
TURN = 512  # ms-swift's chunk_size (4.6 `rlhf_trainers/gkd_loss.py`)
TASKS = ("sft", "rm", "dpo", "orpo", "gkd", "ppo-actor", "ppo-critic", "logprob")


@dataclass(frozen=True)
class Case:
    """The set-up of one step. Fields are named as in the published trace records."""

    model: str
    task: str = "sft"  # one of TASKS
    seq: int = 2048  # tokens in a row
    mb: int = 1  # rows in a micro batch; pairs for rm, dpo and orpo
    ckpt: str = "none"  # none, full, selective (torchtitan's policy for operators), reentrant
    attn: str = "sdpa"  # sdpa (no mask), sdpa-mask (4-D padding mask), fa2, eager
    prec: str = "bf16"  # bf16, autocast, fp32, mp (FSDP: fp32 shards, bf16 compute, fp32 reduce),
    # mixed (DeepSpeed: bf16 weights, fp32 master weights and states)
    optim: str = "adamw"  # adamw, sgd, none
    optim_impl: str = "fused"  # fused, foreach, single
    lora_r: int = 0
    lora_targets: str = "all"  # all, qv, or names of modules with + between them
    lora_dropout: float = 0.0
    lora_dtype: str = "same"  # same (as the base; beside four bits bf16), fp32
    lora_dora: bool = False  # rows of adapted weights have magnitudes
    lora_units: str = "own"  # under FSDP 1: own (each adapter a unit, by PEFT's policy), layer (in its layer's)
    four_bits: bool = False  # the base's linears in NF4, made from 16-bit weights
    four_bit_experts: bool = False  # routed experts, too, each parameter of a layer's whole
    train: str = "full"  # full, head (lm_head alone)
    fsdp: int = 0  # ranks; 0: none
    flat: bool = False  # FSDP 1, which flattens a unit's parameters
    no_sync: bool | None = None  # FSDP's gradients stay whole until the last micro batch; None: as the trainer does
    reshard: str = "yes"  # "no" for stages of a pipeline
    tp: int = 1  # ranks that share each layer's heads and widths
    sequence_parallel: bool = False  # norms work on parts of the sequence, and logits are cut by vocabulary
    cp: int = 1  # ranks that share each sequence's positions, of which FSDP's are a multiple
    ep: int = 1  # ranks among which Megatron-core spreads experts
    etp: int = 1  # ranks that share each of them
    megatron: bool = False  # Megatron-core's model, optimizer and parallelism, on Transformer Engine
    again: str = ""  # parts of its layers that are run again one by one, with + between them
    pp: int = 1  # stages, each with some of the layers, through which grad_accum micro batches pass
    stage: int = 0  # the stage whose memory is followed
    zero: int = 0  # stage of DeepSpeed's ZeRO; 0: none
    efficient_linear: bool = True  # ZeRO-3 replaces PyTorch's linear by its own
    ranks: int = 0  # all of them, under DeepSpeed or Megatron-core
    rank: int = 0  # the rank whose memory is followed, under DeepSpeed or among those that share a sequence
    grad_dtype: str = "bf16"  # the type in which DeepSpeed accumulates: bf16, fp32
    grad_accum: int = 1
    logprob: str = "fp32"  # fp32 (log_softmax of fp32 logits), trl (selective_log_softmax), lse (logsumexp)
    resp: int = 0  # response tokens for PPO; 0: half of seq
    logits_to_keep: bool = False
    ref: str = "copy"  # dpo's reference: copy, adapter (switched off), none
    teacher: str = ""  # gkd's teacher, named as the model is; empty: a model like the student
    turn: int = 0  # tokens whose distributions gkd compares at once; 0: all
    hold_outputs: bool = False
    use_cache: bool = False
    upcast_outputs: bool = False
    layers: int = 0  # the number of first layers that are kept; 0: all
    images: int = 0  # in each row, of height x width pixels as the model sees them
    height: int = 0
    width: int = 0
    frames: int = 1  # of a video
    freeze: str = "none"  # tower, or vision (tower and projector)
    tower_ckpt: bool = True  # the tower is checkpointed where the language model is
    clip: bool = False
    trainer: bool = False  # Transformers' Trainer: Accelerate's autocast, and no_sync
    workspace: bool = True  # count the memory that kernels take while they run
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)  # the model's config.json

    @property
    def seeing(self) -> bool:
        """True if the model has a vision tower, whether it reads images or not."""
        return "vision_config" in self.config

    @property
    def keeps_whole(self) -> bool:
        """True if gradients stay whole until the last micro batch."""
        return self.fsdp > 0 and (self.trainer if self.no_sync is None else self.no_sync)

    @property
    def name(self) -> str:
        """`model/task/s<seq>/mb<mb>` and every field that is not at its default."""
        plain = Case(self.model, ref="adapter" if self.lora_r else "copy")
        skip = {"model", "task", "seq", "mb", "config", "rank", "stage"}
        given = [f.name for f in fields(self) if f.name not in skip and getattr(self, f.name) != getattr(plain, f.name)]
        listed = (MODELS / f"{self.model}.yaml").exists()  # ids such as qwen2.5-7b have dots of their own
        stem = (self.model if listed else Path(self.model).stem, self.task, f"s{self.seq}", f"mb{self.mb}")
        return "/".join((*stem, *(f"{n}={getattr(self, n)}" for n in given)))

    def as_dict(self) -> dict[str, Any]:
        """The set-up without the model's config."""
        given = asdict(self)
        del given["config"]
        return given


def model_config(model: str, *, images: bool = False) -> dict[str, Any]:
    """The config.json of a catalog model, or of a path; with its part for `images`, which may stand apart."""
    catalog, path = MODELS / f"{model}.yaml", Path(model)
    if catalog.exists():
        listed = mapping(catalog)
        return {**listed["config"], **(listed["vision"]["config"] if images and "vision" in listed else {})}
    if path.is_file():
        data = mapping(path)
        return dict(data.get("config", data))
    raise CaseError(f"model: {model!r} is neither in {MODELS.name}/ nor a file")


def from_record(given: Mapping[str, Any]) -> Case:
    """A case from the field names of the records."""
    known = {f.name for f in fields(Case)} - {"config"}
    if unknown := sorted(set(given) - known):
        raise CaseError(f"{unknown[0]}: unknown field; allowed: {', '.join(sorted(known))}")
    config = model_config(given["model"], images=bool(given.get("images")))
    case = Case(**{"ref": "adapter" if given.get("lora_r") else "copy", **given}, config=config)
    if case.task not in TASKS:
        raise CaseError(f"task: {case.task!r} is not one of {', '.join(TASKS)}")
    return case


_PRECISION = {"bf16": "bf16", "autocast": "autocast", "fp32": "fp32", "fsdp-mixed": "mp", "mixed": "mixed"}
_ATTENTION = {"flash": "fa2", "sdpa": "sdpa", "eager": "eager", "sdpa-mask": "sdpa-mask"}
_CHECKPOINTING = {"none": "none", "full": "full", "selective": "selective"}
_OPTIMIZERS = {"adamw": "adamw", "sgd": "sgd", "none": "none"}
_SHARDING = {"none": 0, "fsdp1": 0, "fsdp2": 0, "megatron": 0, "zero1": 1, "zero2": 2, "zero3": 3}
_GRADIENTS = {"bf16": "bf16", "fp32": "fp32"}
_METHODS = {"full": "full", "lora": "lora", "qlora": "qlora"}
_TARGETS = {"all-linear": "all", "q_proj, v_proj": "qv"}
_FREEZE = {"none": "none", "tower": "tower", "vision": "vision"}
_LOGPROB = {"log-softmax-fp32": "fp32", "selective": "trl", "logsumexp": "lse"}


def _pick(scenario: Mapping[str, Any], name: str, table: Mapping[str, Any], default: str) -> Any:
    value = scenario.get(name, default)
    if not isinstance(value, str) or value not in table:
        raise CaseError(f"{name}: {value!r} cannot be traced; allowed: {', '.join(table)}")
    return table[value]


def _targets(given: str | list[str]) -> str:
    """The linears that get adapters, as a case names them."""
    if isinstance(given, list):
        return _TARGETS.get(", ".join(given), "+".join(given))
    if given not in _TARGETS:
        raise CaseError(f"lora.targets: {given!r} cannot be traced; allowed: {', '.join(_TARGETS)}, or a list")
    return _TARGETS[given]


def _deepspeed(flat: Mapping[str, Any]) -> None:
    """Checks that the DeepSpeed release asked for is the one installed, as its memory differs between releases."""
    here = installed("deepspeed")
    if here is None:
        raise CaseError(f"sharding: {flat['sharding']!r} cannot be traced without DeepSpeed")
    if flat.get("versions.deepspeed") != here:
        raise CaseError(f"versions.deepspeed: {flat.get('versions.deepspeed')!r} cannot be traced; allowed: {here}")
    if flat.get("precision", "mixed") != "mixed":
        raise CaseError(f"precision: {flat['precision']!r} cannot be traced with {flat['sharding']}; allowed: mixed")


def installed(package: str) -> str | None:
    """The release of a package that is installed here, Megatron-core's folder included, or None."""
    found = next(iter(distributions(name=package, path=[*sys.path, str(MEGATRON)])), None)
    return found.version if found else None


# Settings of a scenario that Megatron-core's step is traced with, and none other
_MEGATRON = {
    "trainer": ("megatron",), "task": ("sft", "pretrain"), "precision": ("mixed",), "grad_dtype": ("fp32",),
    "optimizer": ("adamw",), "attention": ("flash",), "loss": ("full",), "pipeline_parallel": (1,),
    "context_parallel": (1,), "method": ("full",), "data_parallel_sharding_strategy": ("no_shard",),
    "create_attention_mask_in_dataloader": (True,), "float8": ("none",), "mtp_num_layers": (None,),
}  # fmt: skip


_PARTS = ("core_attn", "mlp", "moe", "shared_experts", "layernorm", "moe_act", "mla_up_proj")


def _megatron(flat: Mapping[str, Any]) -> None:
    """Checks that Megatron-core is installed, and that its step is traced as `flat` has it."""
    for package in ("megatron-core", "transformer-engine"):
        if installed(package) is None:
            raise CaseError(f"sharding: 'megatron' cannot be traced without {package}: make trace sets it up")
    for name, allowed in _MEGATRON.items():
        if (value := flat.get(name, allowed[0])) not in allowed:
            known = ", ".join(str(x) for x in allowed)
            raise CaseError(f"{name}: {value!r} cannot be traced with sharding megatron; allowed: {known}")
    for part in flat.get("recompute_modules") or ():
        if part not in _PARTS:
            raise CaseError(f"recompute_modules: {part!r} cannot be traced; allowed: {', '.join(_PARTS)}")


def from_scenario(scenario: Mapping[str, Any]) -> Case:
    """The case of a scenario file: the step of its one trained model."""
    flat: dict[str, Any] = {}
    for key, value in scenario.items():
        if isinstance(value, Mapping) and key != "roles":
            flat.update({f"{key}.{k}": v for k, v in value.items()})
        else:
            flat[key] = value
    if "model" not in flat:
        raise CaseError("model: missing")
    roles = flat.get("roles") or {}
    for absent in ("offload.optimizer", "offload.parameters"):
        if flat.get(absent):
            raise CaseError(f"{absent}: cannot be traced")
    lora = _pick(flat, "method", _METHODS, "full") != "full"
    if not flat.get("double_quantization", True):
        raise CaseError("double_quantization: false cannot be traced; allowed: true")
    task = flat.get("task", "sft")
    if task == "ppo":
        scored = flat.get("optimizer") == "none"
        if scored and roles.get("actor") == "none":
            raise CaseError("optimizer: 'none' cannot be traced for a critic; allowed: with an actor")
        task = "ppo-critic" if roles.get("actor") == "none" else "logprob" if scored else "ppo-actor"
    resp = int(flat.get("response_len", 0))
    megatron = flat.get("sharding") == "megatron"
    zero, gpus = _pick(flat, "sharding", _SHARDING, "none"), int(flat.get("gpus", 1))
    if zero != 0:
        _deepspeed(flat)
    if megatron:
        _megatron(flat)
    micro, tp = int(flat.get("micro_batch", 1)), int(flat.get("tensor_parallel", 1))
    cp, pp = int(flat.get("context_parallel", 1)), int(flat.get("pipeline_parallel", 1))
    rows = micro * gpus // (tp * cp * pp)
    if cp > 1 and flat.get("attention", "sdpa") != "sdpa":
        raise CaseError(f"attention: {flat['attention']!r} cannot be traced with context_parallel; allowed: sdpa")
    reference, again = "adapter" if lora else "copy", flat.get("checkpointing")
    trainer = flat.get("trainer") in ("transformers", "ms-swift")
    teacher = roles.get("teacher") or {}
    return from_record(
        {
            "model": flat["model"],
            "task": {"pretrain": "sft"}.get(task, task),
            "seq": int(flat.get("seq_len", int(flat.get("prompt_len", 0)) + resp)),
            "mb": micro,
            "ckpt": _pick(flat, "checkpointing", _CHECKPOINTING, "none"),
            "attn": _pick(flat, "attention", _ATTENTION, "flash" if megatron else "sdpa"),
            "prec": _pick(flat, "precision", _PRECISION, "mixed" if zero or megatron else "bf16"),
            "optim": _pick(flat, "optimizer", _OPTIMIZERS, "adamw"),
            "optim_impl": flat.get("optimizer_impl", "fused" if zero or trainer or megatron else "foreach"),
            "lora_r": int(flat.get("lora.rank", 16)) if lora else 0,
            "lora_targets": _targets(flat.get("lora.targets", "all-linear")),
            "lora_dropout": float(flat.get("lora.dropout", 0.0)),
            "lora_dtype": "fp32" if flat.get("lora.dtype") == "fp32" else "same",
            "lora_dora": bool(flat.get("lora.dora", False)),
            "lora_units": flat.get("lora.units", "own"),
            "four_bits": flat.get("method") == "qlora",
            "four_bit_experts": bool(flat.get("quantize_moe_experts", False)),
            "fsdp": gpus // (tp * pp) if flat.get("sharding") in ("fsdp1", "fsdp2") else 0,
            "flat": flat.get("sharding") == "fsdp1",
            "no_sync": flat.get("no_sync"),
            "tp": tp,
            "cp": cp,
            "pp": pp,
            "sequence_parallel": bool(flat.get("sequence_parallel", megatron and tp > 1)),
            "ep": int(flat.get("expert_parallel", 1)),
            "etp": int(flat.get("expert_tensor_parallel", 1)),
            "megatron": megatron,
            "again": "+".join(flat.get("recompute_modules") or ["core_attn"] * (megatron and again == "selective")),
            "reshard": "no" if pp > 1 or flat.get("reshard_after_forward") == "never" else "yes",
            "zero": zero,
            "efficient_linear": bool(flat.get("memory_efficient_linear", True)),
            "ranks": gpus if zero or megatron else 0,
            "grad_dtype": _pick(flat, "grad_dtype", _GRADIENTS, "bf16") if zero else "bf16",
            "trainer": trainer,
            "grad_accum": max(1, int(flat.get("global_batch", rows * pp)) // rows),
            "logprob": _pick(flat, "logprob", _LOGPROB, "log-softmax-fp32"),
            "resp": resp,
            "ref": "none" if roles.get("reference") == "none" else reference,
            "teacher": teacher.get("model", ""),
            "turn": TURN if flat.get("trainer") == "ms-swift" else 0,
            "images": int(flat.get("images.count", "images.width" in flat)),
            "height": int(flat.get("images.height", 0)),
            "width": int(flat.get("images.width", 0)),
            "frames": int(flat.get("images.frames", 1)),
            "freeze": _pick(flat, "images.freeze", _FREEZE, "vision" if lora else "none"),
            "tower_ckpt": bool(flat.get("images.checkpointing", True)),
        }
    )
