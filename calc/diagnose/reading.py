"""A pasted text read as a job: fields of a scenario, the error, the phase, and what could not be read.

A text may hold a command, files of settings, a scenario, an error and a traceback at once, in any order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from calc.base.schema import InputError
from calc.base.units import GB
from calc.catalog import oom_message
from calc.catalog.catalog import Catalog
from calc.diagnose import (
    easyr1,
    errors,
    files,
    flags,
    frames,
    hints,
    megatron_swift,
    names,
    openrlhf,
    pasted,
    recipes,
    scripts,
    shell,
    slime,
    tracker,
    trainer,
    verl,
)
from calc.diagnose.errors import Error
from calc.diagnose.flags import Flags
from calc.diagnose.frames import Told
from calc.resolve.parse import given
from calc.scenario.scenario import SCHEMA
from calc.scenario.words import RL

# The fields that tell a scenario from another file of settings: no trainer has settings of these names.
SCENARIO = ("task", "gpu")
PINNING = re.compile(r"pinned_max_round_threshold_mb ?: ?(\d{1,7})")
THREADS = re.compile(r"(?:\bOMP_NUM_THREADS=|--num_cpu_threads_per_process[ =])(\d{1,3})\b")
SERVED = re.compile(r"max seq len \((\d{3,7})\)")  # the context for which vLLM starts
EVALUATES = re.compile(r"\bin (?:evaluation_loop|prediction_step)\b")
SEGMENTS = re.compile(r"expandable_segments ?: ?True", re.IGNORECASE)
# Paths in a traceback that show whose code runs.
FRAMEWORKS: tuple[tuple[str, str], ...] = (
    (r"/openrlhf/|/openllama2/|\b\w+ModelRayActor\b", "openrlhf"),
    (r"/verl/(?:workers|trainer|single_controller|third_party)|\bWorkerDict\b", "verl"),
    (r"/trl/trainer/", "trl"),
    (r"/slime/(?:backends|ray|rollout)/|MegatronTrainRayActor", "slime"),
)
TRAINERS: tuple[tuple[str, str], ...] = (
    (r"llamafactory|LLaMA-Factory|LLaMA-Efficient|llmtuner", "llamafactory"),
    (r"/axolotl/", "axolotl"),
    (r"/swift/(?:llm|trainers|pipelines)/", "ms-swift"),
    (r"/unsloth(?:_zoo)?/|\bUnsloth - 2x faster|\bUnsloth\b.{0,12}: Fast \w+ patching", "unsloth"),
    (r"/torchtune/|/recipes/(?:full|lora)_finetune_", "torchtune"),
    (r"/torchtitan/", "torchtitan"),
    (r"/litgpt/", "litgpt"),
    (r"transformers/trainer\.py", "transformers"),
)
TASKS: tuple[tuple[str, str], ...] = (
    (r"\bvllm serve \S|vllm\.entrypoints\.|sglang\.launch_server", "inference"),
    (r"train_ppo_ray\.py|ppo_trainer\.py|train_ppo\.py|/ppo/workflow\.py", "ppo"),
    (r"grpo_trainer\.py|grpo", "grpo"),
    (r"\bdpo[_ ]?trainer|train_dpo|/dpo/workflow\.py", "dpo"),
    (r"\bkto[_ ]?trainer|/kto/workflow\.py", "kto"),
    (r"\borpo[_ ]?trainer", "orpo"),
    (r"\bcpo[_ ]?trainer", "simpo"),
    (r"\bgkd[_ ]?trainer", "gkd"),
    (r"rm_trainer\.py|train_rm|\breward[_ ]?trainer|/rm/workflow\.py", "rm"),
    (r"/pt/workflow\.py", "pretrain"),
    (r"\b\w+ModelRayActor\b", "ppo"),
    (r"\bCriticWorker\b|\bupdate_critic\b|\bcompute_values\b", "ppo"),
    (r"\bWorkerDict\b|/verl/trainer/(?:main_)?ppo", "grpo"),
    (r"sft_trainer\.py|train_sft|/sft/workflow\.py|in run_sft\b|finetun|/sft\.py", "sft"),
)
_RANK = re.compile(r"rank(\d+)|local_rank[=:] ?(\d+)")
_CARD = re.compile(r"GPU (\d+)(?:;| has a total)|\|\s+(\d+)\s+(?:NVIDIA|Tesla|GeForce)\s")
_CUDA_DEVICES = re.compile(r"\d+(?:,\d+)*")


class Commands(Protocol):
    """The interface of a module that reads the commands of one program; `IGNORED`: flags that decide no memory."""

    IGNORED: re.Pattern[str]

    def recognised(self, flags: Flags) -> bool:
        """True for a command of this program."""

    def fields(self, flags: Flags) -> dict[str, Any]:
        """The fields that a command states."""


# By project, in the order in which they are asked: a fork before the project whose flags it shares.
COMMANDS: tuple[tuple[str, Commands], ...] = (
    ("openrlhf", openrlhf), ("verl", easyr1), ("verl", verl), ("slime", slime), ("Megatron-SWIFT", megatron_swift),
)  # fmt: skip


class Reader(NamedTuple):
    """The function that reads a command of `project`, and the flags of it that decide no memory.

    `versioned`: the command says which FSDP it runs, or its project has one alone.
    """

    project: str
    fields: Callable[[Flags], dict[str, Any]]
    ignored: re.Pattern[str]
    versioned: bool = True


class Assumed(NamedTuple):
    """A field that the text does not say, with the value that is taken and why."""

    field: str
    value: Any
    why: str


@dataclass
class Reading:
    """A text as read: `fields` by dotted key, and everything said about them.

    `parts` names what the text holds; `flags` are the settings of the command that was read, `project` whose it is.
    `tracked` are the bytes of a table of MemTracker, `node` those in use and in all of a node, by Ray's message;
    `accumulation` are the micro batches of a step.
    `unread` are settings that may matter and are not understood, `variables` those whose value the text does not show.
    """

    parts: list[str] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    assumed: list[Assumed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    error: Error | None = None
    told: Told | None = None
    figures: dict[str, int] | None = None
    tracked: dict[str, int] | None = None
    node: tuple[int, int] | None = None
    cards: list[str] = field(default_factory=list)
    flags: Flags | None = None
    accumulation: int | None = None
    project: str = ""
    models: list[names.Named] = field(default_factory=list)

    @property
    def phase(self) -> str | None:
        """The phase in which the job died, as far as the text tells."""
        return self.told.phase if self.told else self.error.row.phase if self.error else None


def read(text: str, catalog: Catalog) -> Reading:
    """The reading of `text`; without `parts` if nothing in it is recognised."""
    lines = pasted.lines(text)
    found = Reading()
    _settings(found, text, lines, catalog)
    found.error = errors.error(lines)
    found.figures = oom_message.stated(pasted.joined(lines))
    found.tracked = tracker.largest(lines)
    found.node = hints.node(pasted.joined(lines))
    found.told = frames.phase(lines, beside_code="a Python script" in found.parts)
    if found.error:
        found.parts.append("an error message")
    if any(re.match(r'\s*File ".*", line \d+', line.text[:500]) for line in lines) or (found.told and not found.flags):
        found.parts.append("a traceback")
    if found.tracked:
        found.parts.append("a table of MemTracker")
    if not found.parts and _described(text, catalog):
        found.parts.append("a job in words")
    if not found.parts:
        return found
    _framework(found, text)
    _in_passing(found, text, stated=found.flags is not None or "a scenario" in found.parts)
    if found.node and "host_memory" not in found.fields:
        _assume(found, "host_memory", round(found.node[1] / GB), "Ray's message states it")
    _served(found)
    _evaluated(found, text)
    if "model" not in found.fields and len(named := hints.models(text, catalog)) == 1:
        _assume(found, "model", catalog.names.listed.get(named[0].casefold(), named[0]), "the text names it")
    _models(found, catalog)
    _gpu(found, text, catalog)
    _gpus(found, text)
    batch(found.fields, found.accumulation)
    if SEGMENTS.search(text) and _set_segments(text):
        found.fields.setdefault("expandable_segments", True)
    if (pinned := PINNING.search(text)) and int(pinned[1]):
        found.fields.setdefault("pinned_max_round_threshold_mb", int(pinned[1]))
    if (threads := THREADS.search(text)) and int(threads[1]):
        found.fields.setdefault("cpu_threads", int(threads[1]))
    return found


def _set_segments(text: str) -> bool:
    """True if the allocator's setting is made, and not only advised by PyTorch's message."""
    return any(
        SEGMENTS.search(line) and "try setting" not in line and re.search(r"ALLOC_CONF\W{1,3}", line)
        for line in text.splitlines()
    )


# ---- settings: commands, files, scenarios --------------------------------------------------------------------------


def _settings(found: Reading, text: str, lines: list[pasted.Line], catalog: Catalog) -> None:
    """Reads the scenario, or the command with the most settings and the files beside it."""
    mappings = list(files.mappings(lines))
    for data in mappings:
        if _is_scenario(data):
            found.parts.append("a scenario")
            _scenario(found, data, catalog)
            return
    commands = [(flags.of(command), command) for command in shell.commands(text)]
    servers = [own for own, _ in commands if "vllm-serve" in own.program]
    commands = [(own, command) for own, command in commands if own not in servers]
    merged: dict[str, str] = {}
    for data in mappings:
        merged |= flags.flat(data)
    script = scripts.settings(pasted.joined(lines))
    coded, program = (script.values, script.program) if script else ({}, "")
    for read_flags, command in commands:
        read_flags.values = {**merged, **coded, **read_flags.values}
        read_flags.program += f" {program}" if program else ""
        _devices(read_flags, command)
    if merged or coded:
        commands.append((Flags({**merged, **coded}, {}, program), shell.Command((), {})))
    readers = [(own, reader) for own, _ in commands if (reader := _reader(own, text))]
    if not readers:
        return
    found.parts += ["a file of settings"] if merged else []
    found.parts += ["a Python script"] if coded else []
    own, reader = max(readers, key=lambda pair: len(pair[0].values))
    if any(command.words for read_flags, command in commands if read_flags is own):
        found.parts.insert(0, "a launch command")
    found.flags, found.project = own, reader.project
    said = reader.fields(own)
    found.accumulation = said.pop("accumulation", None)
    found.fields = said
    if not reader.versioned and said.get("sharding") == "fsdp1" and ("sharding", "fsdp2") in hints.fields(text):
        _assume(found, "sharding", "fsdp2", "the text names it")
    found.variables = dict(own.variables)
    found.unread = own.left(reader.ignored)
    if servers and said.get("placement") == "separate":
        found.fields |= trainer.served(servers[0])
        found.fields["gpus"] = said.get("gpus", 1) + found.fields["rollout.gpus"]


def _devices(own: Flags, command: shell.Command) -> None:
    """The number of GPUs that the environment shows a command, unless the command says it itself."""
    shown = command.environment.get("CUDA_VISIBLE_DEVICES", "")
    if _CUDA_DEVICES.fullmatch(shown) and not {"num_gpus", "nproc_per_node", "num_processes"} & set(own.values):
        own.values["num_gpus"] = str(shown.count(",") + 1)
    for name in ("NPROC_PER_NODE", "CELOSS_PARALLEL_SIZE"):  # the latter is ms-swift's, of its loss
        if value := command.environment.get(name):
            own.values.setdefault(name.casefold(), value)
    if per_node := command.environment.get("NGPU"):
        own.values.setdefault("ngpu", per_node)
    if config := command.environment.get("CONFIG_FILE") or command.environment.get("CONFIG"):
        own.values.setdefault("config", config)
    if hosts := own.text("include"):  # DeepSpeed's: localhost:0,1, or worker-0:0,1@worker-1:0,1
        ids = [host.partition(":")[2].split(",") for host in hosts.split("@")]
        own.values.setdefault("num_gpus", str(max(map(len, ids))))
        own.values.setdefault("num_nodes", str(len(ids)))
    if nodes := command.environment.get("NNODES"):
        own.values.setdefault("nnodes", nodes)


def _reader(own: Flags, text: str) -> Reader | None:
    """The reader of a command, or None."""
    for project, module in COMMANDS:
        if module.recognised(own):
            return Reader(project, module.fields, module.IGNORED)
    if program := recipes.project(own):
        return Reader(program, partial(recipes.fields, program=program), recipes.IGNORED)
    if trainer.recognised(own):
        project = trainer.built_on(own, text)
        versioned = own.has(*trainer.FSDP_VERSION)
        return Reader(project, partial(trainer.fields, project=project), trainer.IGNORED, versioned)
    return None


def batch(fields: dict[str, Any], accumulation: int | None) -> None:
    """Fills in the global batch that accumulation makes over the GPUs that train: one unless said."""
    micro, gpus = fields.get("micro_batch"), fields.get("gpus", 1)
    if accumulation and micro and "global_batch" not in fields:
        trains = gpus - fields.get("rollout.gpus", 0)
        fields["global_batch"] = micro * (trains // fields.get("context_parallel", 1)) * accumulation


def _is_scenario(data: Mapping[str, Any]) -> bool:
    return "model" in data and any(name in data for name in SCENARIO) and "trainer.n_gpus_per_node" not in data


def _scenario(found: Reading, data: Mapping[str, Any], catalog: Catalog) -> None:
    """The fields of a scenario; those that it does not have are named and left out, a bad value too."""
    known = {name: value for name, value in data.items() if str(name).partition(".")[0] in SCHEMA["properties"]}
    found.unread = [str(name) for name in data if name not in known]
    for _ in range(len(known) + 1):
        try:
            loose = {name: value for name, value in known.items() if name not in ("model", "gpu")}
            found.fields = given(loose, where="pasted", catalog=catalog, needed=())
            break
        except InputError as error:
            found.notes.append(str(error).removeprefix("pasted: "))
            fault = error.field.partition(".")[0]
            known.pop(next((name for name in known if str(name).partition(".")[0] == fault), next(iter(known))))
    for name in ("model", "gpu"):
        if isinstance(data.get(name), str):
            found.fields[name] = data[name]


# ---- what the text does not say in so many words --------------------------------------------------------------------


def _framework(found: Reading, text: str) -> None:
    """Framework and task from the files of a traceback, where no command says them."""
    if "framework" not in found.fields:
        if name := next((name for pattern, name in FRAMEWORKS if re.search(pattern, text)), None):
            found.fields["framework"] = name
            found.notes.append(f"framework {name}: its files are in the traceback")
        elif name := next((name for pattern, name in TRAINERS if re.search(pattern, text)), None):
            found.fields["trainer"] = name
    if found.fields.get("task") is None:
        found.fields.pop("task", None)
        task = next((task for pattern, task in TASKS if re.search(pattern, text, re.IGNORECASE)), None)
        if task:
            _assume(found, "task", task, "the text names it")
        else:
            _assume(found, "task", "sft", "nothing says what is trained")


def _described(text: str, catalog: Catalog) -> bool:
    """True if a text names one model and one kind of card, which is a job even where nothing of a program is pasted."""
    return len(hints.models(text, catalog)) == 1 and bool(names.cards_named(text, catalog))


def _in_passing(found: Reading, text: str, *, stated: bool) -> None:
    """Reads the hints of a text: its own words, and the files of its traceback.

    `stated`: a command or a scenario states the job, so that words tell the machine alone.
    """
    for name, value in hints.fields(text):
        if stated and name not in hints.MACHINE:
            continue
        runs = name in hints.PROGRAMS and not found.fields.keys().isdisjoint(hints.PROGRAMS)
        if name not in found.fields and not runs:
            _assume(found, name, value, "the text names it")


def _served(found: Reading) -> None:
    """What an error of vLLM tells of a job of reinforcement learning: that it runs, and for how long a context."""
    if found.error is None or not found.error.row.name.startswith("vllm-") or found.fields.get("task") not in RL:
        return
    if "rollout.engine" not in found.fields:
        _assume(found, "rollout.engine", "vllm", "the error is vLLM's")
    if (length := SERVED.search(found.error.line)) and "rollout.max_model_len" not in found.fields:
        _assume(found, "rollout.max_model_len", int(length[1]), "the error states it")


def _evaluated(found: Reading, text: str) -> None:
    """Says of a job that died in evaluation by Transformers what its batch is (`TrainingArguments` of 5.23)."""
    if EVALUATES.search(text) and not (found.flags and found.flags.has("per_device_eval_batch_size")):
        found.notes.append(
            "it died in evaluation, which is not computed: that takes per_device_eval_batch_size sequences at once, "
            "8 in Transformers unless set"
        )


def _assume(found: Reading, name: str, value: Any, why: str) -> None:
    found.fields[name] = value
    found.assumed.append(Assumed(name, value, why))


def _models(found: Reading, catalog: Catalog) -> None:
    """Catalog ids for the models of the job and its roles; what is not in the catalog is left out, and named."""
    for place in [name for name in found.fields if name == "model" or name.endswith(".model")]:
        value = str(found.fields.pop(place))
        named = names.model(value, catalog)
        if place == "model":
            found.models.append(named)
        if named.id is None:
            if place != "model":
                found.notes.append(
                    f"{place}: {named.given} is not in the catalog{named.near}; taken to be the policy's"
                )
            continue
        found.fields[place] = named.id
        if named.alike:
            found.assumed.append(Assumed(place, named.id, f"the shape that {named.given!r} is named after"))


def _gpu(found: Reading, text: str, catalog: Catalog) -> None:
    """The GPU that the text names, or whose size the message states."""
    name = found.fields.pop("gpu", None)
    if isinstance(name, str):
        own = [catalog.gpus[name.casefold()]] if name.casefold() in catalog.gpus else names.cards_named(name, catalog)
        found.cards = [gpu.id for gpu in own]
        if own:
            found.fields["gpu"] = own[0].id
            return
    total = (found.figures or {}).get("total_bytes", 0)
    sized = names.cards_of_size(total, catalog)
    said = names.cards_named(text, catalog)
    if not sized and total and re.search(r"\bNPU out of memory", text):
        sized = names.cards_of_size(total, catalog, names.COARSE, vendor="Huawei")
    close = names.cards_of_size(total, catalog, names.COARSE)  # a card that is named need not be told by its size
    cards = [gpu for gpu in said if gpu in sized] or [gpu for gpu in said if gpu in close] or sized or said
    found.cards = [gpu.id for gpu in cards]
    if cards:
        why = "the card that the text names"
        if cards[0] not in said and len(cards) > 1:
            why = f"the message's total is that of {names.listed(cards)}: the memory is theirs, speed may differ"
        elif cards[0] not in said:
            why = "the card whose memory the message states"
        _assume(found, "gpu", cards[0].id, why)


def _gpus(found: Reading, text: str) -> None:
    """The number of GPUs, as the text tells it in its own words, and at least as many as ranks and cards that speak."""
    if found.fields.get("gpus"):
        return
    found.fields.pop("gpus", None)
    shown = [n for pattern in (_RANK, _CARD) for match in pattern.finditer(text) for n in match.groups() if n]
    seen = [int(n) for n in shown if len(n) < 4]
    card = names.spelled(found.fields["gpu"]) if "gpu" in found.fields else ""
    if (said := hints.gpus(text, card)) and said > max(seen, default=0):
        _assume(found, "gpus", said, "the text names it")
    elif seen and max(seen) > 0:
        count = 1 << max(seen).bit_length()
        _assume(found, "gpus", count, f"rank or card {max(seen)} appears, so there are at least {max(seen) + 1}")


def near(reading: Reading) -> Iterator[str]:
    """Models that are not in the catalog, with near misses."""
    for named in reading.models:
        if named.id is None:
            yield f"model {named.given!r} is not in the catalog{named.near}"


def _sentences(lines: Iterator[str]) -> str:
    return "".join(f" {line}" if line.endswith("?") else f" {line}." for line in lines)


def questions(reading: Reading, fields: Mapping[str, Any]) -> Sequence[str]:
    """The facts that are still needed to compute the job, one question each."""
    asked = []
    if "model" not in fields:
        variable = next(
            (v for n, v in reading.variables.items() if n in trainer.MODEL or "pretrain" in n or "path" in n), ""
        )
        missing = f" ${variable} is not set in the text." if variable else _sentences(near(reading))
        asked.append(f"Which model is trained?{missing}")
    if "gpu" not in fields:
        asked.append("Which GPU?")
    return asked
