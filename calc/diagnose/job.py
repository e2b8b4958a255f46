"""The job of a reading: a scenario of its fields, without those that cannot stand together, and what was assumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from calc.catalog.catalog import Catalog
from calc.diagnose.reading import Assumed, Reading, batch
from calc.frameworks.registry import framework
from calc.models.releases import FIRST, newest_type
from calc.resolve.parse import parse
from calc.scenario.rules import flatten
from calc.scenario.scenario import Scenario, ScenarioError
from calc.scenario.words import RL

ENTROPY = ("entropy_coeff", "entropy_from_logits_with_chunking")
NEEDED = ("model", "gpu", "task")
# The fields whose defaults decide most of the memory, and so are named where the text does not say them.
SHOWN = (
    "framework", "gpus", "method", "precision", "optimizer", "sharding", "offload.optimizer", "checkpointing",
    "attention", "loss", "packing", "micro_batch", "global_batch", "seq_len", "prompt_len", "response_len",
    "rollout.engine", "rollout.tensor_parallel", "rollout.gpu_memory_utilization", "rollout.n", "rollout.sleep",
    "placement",
)  # fmt: skip
# The value that is tried where one field makes a job impossible, before the field is left open.
INSTEAD: Mapping[str, Any] = {
    "sharding": "ddp", "rollout.tensor_parallel": 1, "attention": "sdpa",
    "sequence_parallel": True,
}  # fmt: skip
# Fields that give way where they contradict one that says more about the job.
SOFT = ("precision", "grad_dtype", "global_batch", "gpus_per_node", "packing", "optimizer_impl", "rollout.sleep")
TRANSFORMERS = "versions.transformers"
# What runs in place of a trainer that is modelled for other tasks alone. Unsloth patches TRL's trainers
# (`models/rl.py:PatchFastRL`), and loads 4 bits and bf16 unless told (`models/loader.py`, `load_in_4bit`, `dtype`).
PATCHED: Mapping[str, Mapping[str, Any]] = {"unsloth": {"framework": "trl", "method": "qlora", "precision": "bf16"}}
PLAIN = {"transformers": "plain Transformers' default"}  # trainers whose defaults are not those of plain PyTorch
_ROUNDS = 12


class Job(NamedTuple):
    """A scenario with the fields that were `given` for it, what was left out of them and why, and what is assumed."""

    scenario: Scenario
    given: dict[str, Any]
    left_out: tuple[str, ...]
    assumed: tuple[Assumed, ...]


def job(reading: Reading, more: Mapping[str, Any], catalog: Catalog) -> Job | None:
    """The job that a text describes, completed by `more`; None if a field is missing that has no default.

    Raises ScenarioError if what is left cannot be computed.
    """
    read = dict(reading.fields)
    if "gpus" in more and reading.accumulation:
        read.pop("global_batch", None)  # it follows from the number of GPUs
    given = {**read, **more}
    batch(given, reading.accumulation)
    if any(name not in given for name in NEEDED):
        return None
    _fitting(given)
    left: list[str] = []
    tried: set[str] = set()
    stands: tuple[Assumed, ...] = ()
    for _ in range(_ROUNDS):
        try:
            scenario = parse(given, where="job", catalog=catalog)
        except ScenarioError as error:
            reason = str(error).removeprefix("job: ")
            soft = (name for name in SOFT if name in given and _contradicts(name, given, error.field, catalog))
            place = next(soft, _place(error.field, given))
            if place in more:
                raise
            newer = _newer(error.field, given, catalog)
            if error.field == "trainer" and given.get("trainer") in PATCHED:
                stands = _patched(given)
            elif newer and newer != given.get(TRANSFORMERS):
                given[TRANSFORMERS] = newer
            elif place in INSTEAD and place not in tried and given.get(place) != INSTEAD[place]:
                tried.add(place)
                given[place] = INSTEAD[place]
            elif place in given and place not in NEEDED:
                given.pop(place)
            else:
                raise
            left.append(reason)
            continue
        return Job(scenario, given, tuple(dict.fromkeys(left)), (*stands, *_assumed(reading, scenario, given, more)))
    raise ScenarioError(f"job: {left[-1]}")


def _fitting(given: dict[str, Any]) -> None:
    """Takes out the fields of another kind of task, which a command states of its program and not of the job."""
    task = given["task"]
    for place in list(given):
        head = place.partition(".")[0]
        if (
            (task not in RL and (head in ("rollout", "prompt_len", "response_len", *ENTROPY, "placement")))
            or (task in RL and place == "seq_len")
            or (head == "lora" and given.get("method") not in ("lora", "qlora"))
        ):
            given.pop(place)
    if given.get("method") == "full":
        given.pop("double_quantization", None)


def _patched(given: dict[str, Any]) -> tuple[Assumed, ...]:
    """Puts what a trainer patches in its place, and says so."""
    other = PATCHED[given.pop("trainer")]
    stands = {place: value for place, value in other.items() if given.get(place, "torch") == "torch"}
    given |= stands
    return tuple(
        [Assumed(place, value, "what Unsloth patches and loads by default") for place, value in stands.items()]
    )


def _newer(place: str, given: Mapping[str, Any], catalog: Catalog) -> str | None:
    """The first release of Transformers that has the job's model, where the field that decides it names an older one.

    A job that died in a step had loaded its model, so its Transformers was newer than the framework's own.
    """
    if place not in ("framework", "trainer") and not place.startswith("versions."):
        return None
    kind = newest_type(catalog.model(given["model"]).config)
    return FIRST[kind] if kind else None


def _contradicts(name: str, given: Mapping[str, Any], place: str, catalog: Catalog) -> bool:
    """True if `place` could be used, were it not for the field `name`."""
    try:
        parse({field: value for field, value in given.items() if field != name}, where="job", catalog=catalog)
    except ScenarioError as error:
        return error.field != place
    return True


def _place(place: str, given: Mapping[str, Any]) -> str:
    """The field that an error names; of a role without that field, the job's own."""
    while place and place not in given and place not in INSTEAD and "." in place:
        place = (
            place.partition(".")[2] if place.startswith("roles.") and place.count(".") > 1 else place.rpartition(".")[0]
        )
        place = next((name for name in given if name.startswith(f"{place}.")), place)
    return place


def _assumed(reading: Reading, s: Scenario, given: Mapping[str, Any], more: Mapping[str, Any]) -> tuple[Assumed, ...]:
    """Everything assumed because the text does not say it: by the reading, and as defaults of the framework."""
    read = [each for each in reading.assumed if each.field not in more and given.get(each.field) == each.value]
    whole = flatten(s.as_dict())
    whose = f"the default of {s.framework} {s.framework_version}"
    if framework(s.framework).CHOICES.own_loop:
        named = f"the default of {s.trainer} {s.versions[s.trainer]}" if s.trainer in s.versions else ""
        whose = PLAIN.get(s.trainer, named or "the default of plain PyTorch")
    defaults = [
        Assumed(name, whole[name], "one GPU unless said" if name == "gpus" else whose)
        for name in SHOWN
        if name in whole and name not in given
    ]
    asked = str(given.get("framework", ""))
    if reading.flags and "==" in asked and not any(a.field == "framework" for a in read):
        defaults.append(Assumed("framework", asked, "the newest release with flags of this age"))
    return (*read, *defaults)
