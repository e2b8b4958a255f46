"""The interface of a framework, and what the frameworks share. No byte is counted here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple, Protocol

from calc.base.plan import Keeps
from calc.base.refusal import Refusal
from calc.frameworks.releases import READ
from calc.models.architecture import Architecture
from calc.models.releases import with_experts, with_heads, with_outputs, with_scores, with_tables
from calc.scenario.scenario import Scenario
from calc.scenario.words import DEEPSPEED, TOGETHER, Generates, Sharding

Cut = Callable[[Mapping[str, Any], Mapping[str, Any]], bool]
Pads = Callable[[Mapping[str, Any], Architecture, bool], bool]
Copy = Callable[[Mapping[str, Any], str], float | None]


class Choices(NamedTuple):
    """The choices that a framework leaves to its user.

    `own_loop`: the user writes the loop, and with it the global batch, the loss and the optimizer's implementation,
    unless one of the `trainers` is named, who have habits of their own.
    `fixed`: fields that a trainer's command sets for good, by trainer. `fp16`: it computes in fp16 on a card without
    bf16. `precision`: the type in which weights can be loaded in place of
    fp32, unless DeepSpeed keeps a master copy; "" if it offers none. `offloads_apart`: under FSDP weights and optimizer
    states move to the host independently. `weights_stay`: no configuration that the search tries has the weights of a
    trained model leave the GPUs. `megatron`: the model that RL trains may be on Megatron-core in place of FSDP.
    `sharding`: how several GPUs hold a model that is too large for one; Megatron-core's where there is no other.
    `serves_whole`: vLLM is started for sequences of the model's whole length unless it is told another.
    `liger`: trainers with a switch for Liger's kernels, its fused loss among them.
    `pure`: trainers that train in bf16 alone if they are told to, and in fp32 else.
    `adapters`: trainers with a switch for the type of adapters.
    `engines`: what may generate the responses of RL, beside nothing that does; `serves`: trainers that start vLLM, too.
    `shared`: the degree by which its trainer lets GPUs share a sequence, "" for none; `cuts` tells from a job's fields
    and a rung of them whether sequences are cut.
    `pads` tells from fields, a model and whether it can read images if batches of that model are padded in any case.
    `copy` tells from fields and a model's id how many GB the copy in four bits has that is loaded in the model's place.
    """

    own_loop: bool = False
    trainers: frozenset[str] = frozenset()
    fixed: Mapping[str, Mapping[str, Any]] = {}
    fp16: bool = False
    precision: str = ""
    offloads_apart: bool = False
    weights_stay: bool = False
    megatron: bool = False
    sharding: Sharding = "zero3"
    serves_whole: bool = False
    liger: frozenset[str] = frozenset()
    pure: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()
    engines: tuple[Generates, ...] = ("vllm", "hf")
    serves: frozenset[str] = frozenset()
    shared: str = ""
    cuts: Cut = lambda job, rung: True
    pads: Pads = lambda values, architecture, sees: False
    copy: Copy = lambda values, model: None


class Framework(Protocol):
    """The interface of a module of `calc.frameworks`: what one framework keeps in memory, by version."""

    KNOWN: tuple[str, ...]
    CHOICES: Choices

    def modelled(self, architecture: Architecture, values: Mapping[str, Any]) -> Architecture:
        """The model as the code that runs it has it, by a role's fields `values`; ConfigError if that was not read."""

    def nearest(self, version: str) -> str:
        """The known version whose memory behaviour `version` shares."""

    def defaults(self, task: str, version: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Values for the fields that nothing here decides, by dotted key; `given` is what the user said.

        Needed: precision, optimizer, optimizer_impl, sharding, offload.*, grad_dtype, checkpointing, attention, loss,
        logprob, micro_batch, global_batch, seq_len (for RL prompt_len, response_len and rollout.*), and lora.* for the
        methods with adapters; allowed: any other field, `versions.<library>`, `roles.<role>: none` for a role that the
        framework leaves out, and `roles.<role>.<field>`.
        """

    def refuse(self, s: Scenario) -> Refusal | None:
        """The reason that the framework cannot run `s`, in one line, or None."""

    def threads(self, s: Scenario) -> int | None:
        """The OpenMP threads that its launcher leaves each rank of `s`, with which Adam runs on the host, too.

        None if it leaves them alone: then OpenMP starts one for each core.
        """

    def keeps(self, s: Scenario) -> Keeps:
        """The roles and stages that the framework runs for `s`, and what they keep in memory."""


def as_published(architecture: Architecture, values: Mapping[str, Any]) -> Architecture:
    """The `modelled` of a framework that runs Transformers' code, in the release of its scenario."""
    version = str(values["versions.transformers"])
    published = with_scores(with_tables(architecture, version), version)
    if values["attention"] == "sdpa":
        published = with_heads(published, version, str(values.get("versions.torch", READ["torch"])))
    experts = version if values["experts_implementation"] == "transformers" else "5"
    return with_experts(with_outputs(published, str(values.get("versions.peft", READ["peft"]))), experts)


def accumulated(precision: str, sharding: str) -> str:
    """The default type of gradients: that of the weights, which DeepSpeed and pure bf16 keep in 16 bits."""
    if precision == "fp16":
        return "fp16" if sharding in DEEPSPEED else "fp32"
    return "bf16" if precision in ("bf16", "mixed") else "fp32"


def together(fields: Mapping[str, Any]) -> int:
    """The number of GPUs that work on the same sequences: the product of the degrees in `fields`."""
    own = fields.get("device_map_gpus") or fields.get("gpus", 1)
    devices = int(own) if fields.get("device_map") == "auto" else 1
    return devices * prod(int(fields.get(place, 1)) for place in TOGETHER)
