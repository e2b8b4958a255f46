"""The smallest machine that runs a job: the catalog's GPUs, in the numbers in which they are sold.

The catalog has no prices. Machines are tried from little usable memory in all to much, of equals the one of fewer GPUs
first; the first on which something fits is the smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from calc.architecture import parameters
from calc.catalog import GPU, Catalog, load
from calc.recommend.answer import COUNTS, Problem, Recommendation, recommend
from calc.scenario import ScenarioError
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


def machines(catalog: Catalog, gpu: str | None = None, gpus: int | None = None) -> list[Machine]:
    """Every machine, from small to large: of one kind of GPU where `gpu` is given, of one number where `gpus` is."""
    kinds = [catalog.gpu(gpu)] if gpu else list(catalog.gpus.values())
    found = []
    for kind in kinds:
        size = max([node.gpus for node in catalog.nodes.values() if kind.id in node.gpu_ids], default=8)
        for count in [gpus] if gpus else COUNTS:
            per_node = min(count, size)
            if count % per_node == 0:
                found.append(Machine(kind, count, per_node))
    return sorted(found, key=lambda m: (m.bytes, m.gpus, m.gpu.id))


def smallest(
    job: Mapping[str, Any], catalog: Catalog | None = None, *, where: str = "scenario",
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[Machine | None, Recommendation | None, int]:
    """The smallest machine that runs `job`, the recommendation for it, and how many were too small.

    Without a method the machine is the smallest for full fine-tuning. None where no machine runs it. Raises ScenarioError
    where the job cannot be run on any machine, for whatever size.
    """
    catalog = catalog or load()
    job = {"method": "full", **job} if not any(name.startswith("lora.") for name in job) else dict(job)
    tried, error = 0, None
    for machine in machines(catalog, job.get("gpu"), job.get("gpus")):
        progress(f"{tried} machines too small, now {machine.gpus} x {machine.gpu.name}")
        try:
            problem = Problem({**job, **machine.fields}, catalog, where)
        except InputError as refused:
            error = error or refused
            continue
        tried += 1
        if any(True for _ in _fitting(problem, machine)):
            return machine, recommend({**job, **machine.fields}, catalog, where=where), tried - 1
    if not tried and error:
        raise ScenarioError(str(error))
    return None, None, tried


def _fitting(problem: Problem, machine: Machine) -> Iterator[bool]:
    """One answer where something fits; nothing where the weights alone are more than the machine holds."""
    first = problem.fields
    model = problem.catalog.model(first["model"]).architecture
    offloads = str(first.get("framework", "torch")).partition("==")[0] in ("torch", "trl")
    least = 0 if offloads or first.get("method") == "qlora" else 2 * parameters(model)
    if least <= machine.bytes and problem.first():
        yield True
