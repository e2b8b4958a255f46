"""The fields of the calculator's form: their labels, their groups, and the tasks that have them.

Their allowed values and their meaning are in `scenario.schema.json` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from calc.answers import words
from calc.base.optimizers import OPTIMIZERS
from calc.estimate.report import TRAINERS
from calc.frameworks.registry import FRAMEWORKS
from calc.frameworks.torch.trainers.registry import RELEASED
from calc.recommend import options
from calc.scenario.words import RL, ROLES, SERVERS

TASKS = (*words.TASKS, *words.UNPICKED)
SINGLE = tuple(task for task in TASKS if task not in RL)
LOSSES = ("pretrain", "sft")  # tasks whose loss is a cross entropy over the vocabulary
CHOSEN, USUAL = "the calculator chooses", "the framework's default"
# Words for the values of fields that choose; a value that has none is its own word.
WORDS: Mapping[str, Mapping[str, str]] = {
    "method": words.METHODS,
    "precision": words.PRECISIONS,
    "sharding": dict(words.SHARDINGS.items()),
    "attention": dict(words.ATTENTION.items()),
    "optimizer": {name: facts.label + facts.in_bits for name, facts in OPTIMIZERS.items()},
    "checkpointing": {"full": "every layer"},
    "loss": {
        "full": "all tokens at once",
        "chunked": "in chunks",
        "cut": "in kernels alone",
        "vocab-chunked": "of some of the vocabulary at a time",
    },
    "rollout.engine": {**dict[str, str](SERVERS.items()), "hf": "Transformers", "none": "nothing"},
    "placement": {"colocated": "all on the same GPUs", "separate": "GPUs apart"},
}


class Field(NamedTuple):
    """A field of the form: dotted name in a scenario, label, words for an empty one, and the tasks that have it."""

    name: str
    title: str
    empty: str = USUAL
    tasks: tuple[str, ...] = TASKS

    @property
    def definition(self) -> Mapping[str, Any]:
        """The field in JSON Schema."""
        return _definitions()[self.name]

    @property
    def about(self) -> str:
        """The sentence that says what the field means."""
        return str(self.definition["description"])

    @property
    def kind(self) -> str:
        """The JSON type of its values."""
        return dict(options.names())[self.name]

    @property
    def choices(self) -> dict[str, str]:
        """Its values as text, each with its word; empty where any number will do."""
        if self.kind == "boolean":
            return {"true": "yes", "false": "no"}
        if self.name.startswith("roles."):
            return {"{}": "runs", "none": "does not run"}
        known = WORDS.get(self.name, {})
        return {value: known.get(value, value) for value in self.definition.get("enum", ())}


class Group(NamedTuple):
    """Fields behind one click."""

    title: str
    fields: tuple[Field, ...]


def _role(name: str) -> Field:
    return Field(
        f"roles.{name}", f"{name.capitalize()} model", tasks=tuple(t for t in TASKS if name in ROLES.get(t, ()))
    )


GROUPS = (
    Group(
        "Method, framework, lengths",
        (
            Field("method", "Method", "full if it fits, else LoRA, else QLoRA"),
            Field("lora.rank", "LoRA rank"),
            Field("framework", "Framework and version"),
            Field("seq_len", "Tokens a sequence", tasks=SINGLE),
            Field("prompt_len", "Tokens a prompt", tasks=RL),
            Field("response_len", "Tokens a response", tasks=RL),
            Field("expected_len", "Mean real length, tokens"),
            Field("rollout.expected_len", "Mean response, tokens", tasks=RL),
            Field("packing", "Packing"),
            Field("global_batch", "Sequences or pairs a step"),
            Field("images.count", "Images a sample", "1, if there are any"),
            Field("images.width", "Width of an image, pixels", "no images"),
            Field("images.height", "Height of an image, pixels", "no images"),
        ),
    ),
    Group(
        "Precision, sharding, offload, batches",
        (
            Field("micro_batch", "Micro batch", CHOSEN),
            Field("precision", "Precision"),
            Field("optimizer", "Optimizer", CHOSEN),
            Field("sharding", "Sharding", CHOSEN),
            Field("offload.optimizer", "Optimizer in host memory", CHOSEN),
            Field("offload.parameters", "Weights in host memory", CHOSEN),
            Field("checkpointing", "Activation checkpointing", CHOSEN),
            Field("attention", "Attention"),
            Field("loss", "Cross entropy", tasks=LOSSES),
            Field("tensor_parallel", "Tensor parallel"),
            Field("context_parallel", "Context parallel"),
        ),
    ),
    Group(
        "Rollout, placement, roles",
        (
            Field("placement", "Placement", CHOSEN, RL),
            Field("rollout.engine", "What generates", CHOSEN, RL),
            Field("rollout.gpu_memory_utilization", "vLLM's share of the card", CHOSEN, RL),
            Field("rollout.tensor_parallel", "vLLM's tensor parallel", CHOSEN, RL),
            Field("rollout.n", "Responses for a prompt", tasks=RL),
            Field("rollout.sleep", "vLLM sleeps", CHOSEN, RL),
            _role("reference"),
            _role("critic"),
            _role("reward"),
            _role("teacher"),
        ),
    ),
    Group(
        "Nodes and host memory",
        (
            Field("gpus_per_node", "GPUs in a node", "as they are sold"),
            Field("host_memory", "Host memory, GB a node", "its share"),
            Field("cpu_threads", "CPU threads of a rank", "its launcher's"),
        ),
    ),
)
# The fields above the groups have no word for empty but that of their machine, which is then searched.
FIRST = (Field("model", "Model"), Field("task", "Task"), Field("gpu", "GPU"), Field("gpus", "How many", "any"))
NAMES = frozenset(field.name for field in (*FIRST, *(each for group in GROUPS for each in group.fields)))


@cache
def _definitions() -> dict[str, Mapping[str, Any]]:
    return dict(options.fields())


def frameworks() -> Iterator[tuple[str, dict[str, str]]]:
    """Each framework and trainer in words, with the words for its newest known version and for each one before."""
    known = {name: FRAMEWORKS[name].KNOWN for name in words.FRAMEWORKS} | {
        name: tuple(module.RELEASES) for name, module in RELEASED.items()
    }
    for name, said in (words.FRAMEWORKS | TRAINERS).items():
        versions = {f"{name}=={version}": f"{said} {version}" for version in reversed(known.get(name, ()))}
        yield said, {name: f"{said}, newest", **versions}
