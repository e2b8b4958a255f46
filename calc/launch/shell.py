"""The writing of a command: words for the shell, placeholders, and notes on what no flag says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from calc.base.schema import InputError
from calc.catalog.catalog import load
from calc.frameworks.registry import framework
from calc.models.families import MXFP4
from calc.resolve.parse import NEUTRAL
from calc.scenario.rules import flatten
from calc.scenario.scenario import Scenario
from calc.scenario.words import PARTNERS, Attention

# Transformers' names, which all frameworks pass on
ATTENTION: Mapping[Attention, str] = {"flash": "flash_attention_2", "sdpa": "sdpa", "eager": "eager"}


class LaunchError(InputError):
    """Raised if no command of the framework starts the job; the text is one line."""


@dataclass(frozen=True)
class Launch:
    """The command that starts a job, with its files.

    `command` is for a POSIX shell, one flag a line; `files` maps names, in the folder it runs in, to their text.
    `notes` says what the reader must fill in, and which parts of the scenario the command cannot state.
    """

    command: str
    files: Mapping[str, str] = field(default_factory=dict, hash=False)
    notes: tuple[str, ...] = ()


# characters that end a word between `:?` and the closing brace, or start another expansion
_ENDS = str.maketrans("", "", "\"'`$\\{}")


class Placeholder(str):
    """A shell variable that the reader sets; the shell stops with the message `why` if it is not set."""

    def __new__(cls, name: str, why: str) -> Placeholder:
        """The expansion of the variable `name`; characters of `why` that a message cannot hold there are left out."""
        return super().__new__(cls, f'"${{{name}:?{why.translate(_ENDS)}}}"')


Words = tuple[str, ...]


def word(value: object) -> str:
    """A value as one word, quoted so that the shell reads it back."""
    return value if isinstance(value, Placeholder) else shlex.quote(str(value))


def option(flag: str, *values: object) -> Words:
    """A flag with its values."""
    return (flag, *[word(value) for value in values])


def switch(flag: str, on: bool) -> list[Words]:
    """A flag without a value: present if it is on."""
    return [(flag,)] if on else []


def command(start: str, lines: Iterable[Words]) -> str:
    """A command with one flag a line."""
    return " \\\n  ".join([start, *[" ".join(line) for line in lines]])


def setting(s: Scenario, started: str, *, switches_segments: bool = False) -> str:
    """A command with the environment variables of PyTorch's allocator and of threads in front, unless at their default.

    `switches_segments`: the framework makes segments expandable itself. Thresholds of pinned memory are those of the
    variable that holds for every device (c10/core/AllocatorConfig.h of torch 2.13), both the same: 2.13 hands out a
    smaller block for a larger one where blocks are cached that were not rounded (pytorch/pytorch#192722).
    """
    options = ["expandable_segments:True"] if s.expandable_segments and not switches_segments else []
    device = "NPU_" if load().gpu(s.gpu).lacks_cuda else "CUDA_"  # torch_npu/csrc/core/npu/NPUAllocatorConfig
    if size := s.pinned_max_round_threshold_mb:
        options += [f"pinned_max_round_threshold_mb:{size}", f"pinned_max_cached_size_mb:{size}"]
        device = ""
    allocator = f"PYTORCH_{device}ALLOC_CONF={','.join(options)} " if options else ""
    return f"{threads(s)}{allocator}{started}"


def threads(s: Scenario) -> str:
    """The environment variable of a rank's CPU threads; empty where the launcher leaves it as many anyway."""
    told = s.cpu_threads and s.cpu_threads != framework(s.framework).threads(s)
    return f"OMP_NUM_THREADS={s.cpu_threads} " if told else ""


PORT = 29500


def torchrun(s: Scenario) -> list[Words]:
    """torchrun's flags for the nodes and GPUs of a job."""
    lines = [option("--nproc_per_node", s.gpus // s.nodes)]
    if s.nodes > 1:
        lines += [
            option("--nnodes", s.nodes),
            option("--rdzv_backend", "c10d"),
            option("--rdzv_endpoint", Placeholder("MASTER_ADDR", f"address of the first node, as in node1:{PORT}")),
        ]
    return lines


def several(s: Scenario) -> str:
    """Environment variables by which a command line starts torchrun itself; empty for one process."""
    if s.gpus == s.devices:
        return ""
    told = f"NPROC_PER_NODE={s.gpus // s.devices // s.nodes} "
    if s.nodes == 1:
        return told
    rank = Placeholder("NODE_RANK", "0 on the first node, then 1, 2, ...")
    address = Placeholder("MASTER_ADDR", "address of the first node")
    return f"{told}NNODES={s.nodes} NODE_RANK={rank} MASTER_ADDR={address} MASTER_PORT={PORT} "


def assigned(name: str, value: object) -> str:
    """A setting on a command line that overrides a file's: `name=value`."""
    return f"{name}={word(value)}"


def of_files(s: Scenario, files: Iterable[str]) -> Iterator[str]:
    """Notes on files beside the command, on a model that the reader puts in there, and on several nodes."""
    if files:
        yield f"{', '.join(files)}: put into the folder where the command runs"
    if isinstance(model_name(s.model), Placeholder):
        yield needs("MODEL", f"in the file or the command, the model computed as {s.model}")
    yield from on_every_node(s)


def on_every_node(s: Scenario) -> Iterator[str]:
    """The note on a command that runs on every node."""
    if s.nodes > 1:
        yield f"run it on each of the {s.nodes} nodes, with the same files there"


def model_name(name: str, *, variable: bool = False) -> str:
    """The Hugging Face name of a catalog model; a placeholder for one given by path, or stored in 8 bits or fewer.

    `variable`: of a placeholder its name alone, for a file that no shell reads.
    """
    found = _model_name(name)
    return "MODEL" if variable and isinstance(found, Placeholder) else found


def _model_name(name: str) -> str:
    try:
        model = load().models[name]
    except KeyError:
        return Placeholder("MODEL", f"the model whose config.json is {name}")
    if model.architecture.family in MXFP4:
        return Placeholder("MODEL", f"{model.hf} in bf16, as saved after Mxfp4Config(dequantize=True)")
    if model.stored:  # quantizers/quantizer_finegrained_fp8.py of 5.23: not `is_qat_trainable`
        return Placeholder("MODEL", f"{model.hf} in bf16, as saved after FineGrainedFP8Config(dequantize=True)")
    return model.hf


def renamed(made: Launch, model: str, other: str) -> Launch:
    """A command of weights of the same shapes as a `model` of the catalog's, by an `other` Hub name."""
    try:
        name = load().models[model].hf
    except KeyError:
        return made
    word = re.compile(rf"(?<![\w./-]){re.escape(name)}(?![\w/-])")

    def told(text: str) -> str:
        return word.sub(other, text)

    files = {file: told(text) for file, text in made.files.items()}
    return Launch(told(made.command), files, tuple(map(told, made.notes)))


def own(s: Scenario, name: str) -> Scenario:
    """The scenario of a role that runs."""
    found = s.role(name)
    assert found
    return found


def role_model(s: Scenario, name: str) -> str:
    """The model of a role as a command names it; of a reward model the catalog knows the size alone."""
    model = model_name(own(s, name).model)
    reward = s.role("reward")
    if name == "reward" or (name == "critic" and reward and reward.model == own(s, name).model):
        return Placeholder("REWARD_MODEL", f"a reward model made of {model}")
    return model


def needs(name: str, why: str) -> str:
    """The note on a variable that the reader sets."""
    return f"set {name}: {why}"


# ---- what no flag says ---------------------------------------------------------------------------------------------


def runner(s: Scenario) -> tuple[str, str]:
    """The code that runs the job, and its release: the framework, or with plain PyTorch the trainer."""
    if s.framework == "torch" and s.trainer in s.versions:
        return s.trainer, s.versions[s.trainer]
    return s.framework, s.framework_version


def unsaid(s: Scenario, *places: str) -> Iterator[str]:
    """A note for each of these fields whose value is not what the framework does anyway."""
    said = flatten(s.as_dict())
    for place in places:
        if place not in said:
            continue
        usual = does(s, place)
        usual = NEUTRAL.get(place) if usual is None else usual
        if said[place] != usual:
            yield f"{place} {said[place]}: {runner(s)[0]} has no flag for it, and runs {usual}"


def unsaid_of_roles(s: Scenario, sayable: Iterable[str] = ()) -> Iterator[str]:
    """A note for each field of a frozen role that is neither the trained role's nor what the framework does anyway.

    `sayable` names the fields that have flags: of every such role (`offload.parameters`), or of one
    (`reference.model`). A reward model always has a flag.
    """
    for name, differs in s.roles.items():
        if name not in PARTNERS or name == "critic" or isinstance(differs, str):
            continue
        trained = s.role("actor") or s
        for place, value in differs.items():
            if place == "gpus" or {place, f"{name}.{place}"} & {*sayable, "reward.model"}:
                continue
            usual = does(s, f"roles.{name}.{place}")
            usual = _field(trained, place) if usual is None else usual
            if value != usual:
                yield f"roles.{name}.{place} {value}: {runner(s)[0]} has no flag for it, and runs {usual}"


def does(s: Scenario, place: str) -> Any:
    """The framework's own value for a field, with all other fields as they are."""
    others = {name: value for name, value in flatten(s.as_dict()).items() if name != place}
    return framework(s.framework).defaults(s.task, s.framework_version, others).get(place)


def _field(s: Scenario, place: str) -> Any:
    branch, _, leaf = place.partition(".")
    value = getattr(s, branch)
    return getattr(value, leaf) if leaf else value


def common_notes(s: Scenario) -> Iterator[str]:
    """Notes for every command: libraries, the mean length of the data, and what is left to the framework."""
    name, release = runner(s)
    libraries = ", ".join(f"{own} {version}" for own, version in sorted(s.versions.items()) if own != name)
    yield f"computed for {name} {release} with {libraries}; other versions may need more or less memory"
    if s.lengths:
        mean, longest = s.expected_len, s.longest_len
        yield f"sequences of {mean} tokens on average, {longest} at most: your data's, which no flag sets"
    elif s.expected_len != s.seq_len:
        yield f"expected_len {s.expected_len} is the mean length of your data, which no flag sets"
    if fullest := s.rollout and s.rollout.fullest_len:
        yield f"rollout.fullest_len {fullest} is the mean length in the fullest micro batch, which no flag sets"
    if s.vision_tower:
        yield "vision_tower true: the class that your trainer loads decides, such as AutoModelForImageTextToText"
    if s.checkpoint_gb:
        yield f"checkpoint_gb {s.checkpoint_gb:g} is the size of the files that are loaded, which no flag sets"
    if s.kernels == "xielu":
        yield "kernels xielu: install github.com/nickjbrowning/XIELU, which Transformers then takes by itself"
    if s.kernels == "foak":
        yield "kernels foak: fms-acceleration-foak with fast_loss, fast_rms_layernorm and fast_rope_embeddings"
    if s.pinned_max_round_threshold_mb:
        yield (
            "pinned_max_cached_size_mb stands beside pinned_max_round_threshold_mb with the same size: without it "
            "torch 2.13 would hand out a smaller block for a larger one"
        )
    if s.images:
        yield (
            f"{s.images.count} x {s.images.size} pixels a sample, resized to at most "
            f"{s.images.max_pixels}: your data's column of images and its processor decide; images.freeze "
            f"{s.images.freeze}: freeze the tower so where no flag above says it"
        )
    yield "learning rate, epochs and how often it saves are the framework's defaults: they do not affect memory"


def ray_on_every_node(s: Scenario) -> str:
    """The note on a Ray cluster over several nodes, which the command joins."""
    where = f"on each of the {s.nodes} nodes (gpus_per_node {s.gpus_per_node})"
    told = "ray start, with --head on the one where the command runs, else --address of that"
    if s.pinned_max_round_threshold_mb:
        told += "; PYTORCH_ALLOC_CONF set there as for the command, as workers have Ray's environment"
    if threads(s):
        told += "; OMP_NUM_THREADS set there as for the command, as workers have Ray's environment"
    return f"{where}: {told}"


def nodes_of(gpus: int, per_node: int) -> tuple[int, int]:
    """The number of nodes for `gpus` GPUs and the GPUs on each: the fewest nodes that divide them evenly."""
    nodes = next(n for n in range(-(-gpus // per_node), gpus + 1) if gpus % n == 0)
    return nodes, gpus // nodes
