"""The smallest machine that runs a job: the catalog's GPUs, in the numbers in which they are sold.

The catalog has no prices. Machines are tried from little usable memory in all to much, of equals the one of fewer GPUs
first; the first on which something fits is the smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from calc.architecture import parameters
from calc.catalog import GPU, Catalog, load
from calc.recommend.answer import Recommendation, recommend
from calc.recommend.problem import COUNTS, Problem
from calc.scenario import ScenarioError, given
from calc.schema import InputError


class Machine(NamedTuple):
    """A number of GPUs of one kind, as many to a node as nodes have of it."""

    gpu: GPU
    gpus: int
    per_node: int

    @property
    def bytes(self) -> int:
        """The usable memory of all its GPUs."""
        return self.gpus * self.gpu.usable_bytes

    @property
    def fields(self) -> dict[str, Any]:
        """The machine as fields of a scenario."""
        return {"gpu": self.gpu.id, "gpus": self.gpus, "gpus_per_node": self.per_node}


class Smallest(NamedTuple):
    """The smallest machine with its recommendation, and how many are too small.

    Where none is large enough `machine` is None, and the recommendation is that of the largest: what it lacks.
    """

    machine: Machine | None
    recommendation: Recommendation
    smaller: int


def machines(catalog: Catalog, gpu: str | None = None, gpus: int | None = None) -> list[Machine]:
    """Every machine, from small to large: of one kind of GPU where `gpu` is given, of one number where `gpus` is.

    Cards without bf16 are none that anybody should be sent to: they count where they are asked for.
    """
    kinds = [catalog.gpu(gpu)] if gpu else [kind for kind in catalog.gpus.values() if not kind.lacks_bf16]
    found = []
    for kind in kinds:
        size = max([node.gpus for node in catalog.nodes.values() if kind.id in node.gpu_ids], default=8)
        for count in [gpus] if gpus else COUNTS:
            per_node = min(count, size)
            if count % per_node == 0:
                found.append(Machine(kind, count, per_node))
    return sorted(found, key=lambda m: (m.bytes, m.gpus, m.gpu.id))


def smallest(
    job: Mapping[str, Any],
    catalog: Catalog | None = None,
    *,
    where: str = "scenario",
    progress: Callable[[str], None] = lambda line: None,
) -> Smallest:
    """The smallest machine that runs `job`, each tried named to `progress`.

    Without a method that is the smallest for full fine-tuning. Raises ScenarioError where no machine, of whatever size,
    can run the job.
    """
    catalog = catalog or load()
    asked = given(job, where=where, catalog=catalog)
    job = asked if any(name.startswith("lora.") for name in asked) else {"method": "full", **asked}
    tried, error, largest = 0, None, None
    for machine in machines(catalog, job.get("gpu"), job.get("gpus")):
        progress(f"{tried} machines too small, now {machine.gpus} x {machine.gpu.name}")
        try:
            problem = Problem({**job, **machine.fields}, catalog, where)
        except InputError as refused:
            error = error or refused
            continue
        tried, largest = tried + 1, machine
        if _fits(problem, machine):
            answer = recommend({**asked, **machine.fields}, catalog, where=where)
            return Smallest(machine, answer, tried - 1)
    if largest is None:
        raise error or ScenarioError(
            f"{where}: gpus: given {job.get('gpus')}, allowed: a number that fills whole nodes"
        )
    return Smallest(None, recommend({**asked, **largest.fields}, catalog, where=where), tried)


def _fits(problem: Problem, machine: Machine) -> bool:
    """Whether something fits; not where weights that nothing moves away are more than the machine holds."""
    fields = problem.fields
    stay = str(fields.get("framework", "torch")).partition("==")[0] in ("openrlhf", "verl")
    if stay and fields.get("method") != "qlora":
        model = problem.catalog.model(fields["model"]).architecture
        if 2 * parameters(model) > machine.bytes:
            return False
    return problem.fits()
