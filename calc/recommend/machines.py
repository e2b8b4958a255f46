"""The smallest machine that runs a job: the catalog's GPUs, in the numbers in which they are sold.

The catalog has no prices. Machines are tried in order of total usable memory, then of the number of GPUs. The first on
which something fits is the least that holds the job; the smallest is the first on which what makes it fit does not cost
too much time: a step takes at most SENSIBLE times as long as if memory did not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from calc.base.schema import InputError
from calc.catalog.catalog import GPU, Catalog, load
from calc.frameworks.registry import framework
from calc.models.architecture import parameters
from calc.recommend.answer import Recommendation, answering
from calc.recommend.problem import COUNTS, SENSIBLE, Configuration, Problem, configured, posed
from calc.resolve.parse import given
from calc.scenario.scenario import ScenarioError

# A machine that is too small for a job, or holds it; one that is surely slow holds nothing that takes a sensible time.
Standing = Literal["too small", "slow", "fits"]


class Machine(NamedTuple):
    """A number of GPUs of one kind, and how many of them share a node."""

    gpu: GPU
    gpus: int
    per_node: int

    @property
    def bytes(self) -> int:
        """The usable memory of all its GPUs, in bytes."""
        return self.gpus * self.gpu.usable_bytes

    @property
    def fields(self) -> dict[str, Any]:
        """The machine as fields of a scenario."""
        return {"gpu": self.gpu.id, "gpus": self.gpus, "gpus_per_node": self.per_node}


class Least(NamedTuple):
    """The least machine that holds a job, where it is too slow: a step takes `times` what its arithmetic and links
    allow."""

    machine: Machine
    configuration: Configuration
    times: float


class Smallest(NamedTuple):
    """The smallest sensible machine with its recommendation; how many before it are too small, and how many too slow.

    `least` is the first of the slow ones. If all that are large enough are slow, it is the answer itself. If no machine
    is large enough, `machine` is None and the recommendation, made for the largest one, says what it lacks.
    """

    machine: Machine | None
    recommendation: Recommendation
    smaller: int
    slower: int = 0
    least: Least | None = None


def machines(catalog: Catalog, gpu: str | None = None, gpus: int | None = None) -> list[Machine]:
    """Every machine, from small to large: only with the GPU `gpu` if given, and only with `gpus` GPUs if given.

    Cards without bf16 are left out unless `gpu` names one: they are no recommendation.
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
    """The smallest machine that runs `job`. `progress` is told each machine that is tried.

    Without a method it is the smallest for full fine-tuning. Raises ScenarioError if no machine of any size can run the
    job.
    """
    *_, whole = growing(job, catalog or load(), where=where, progress=progress)
    return whole


def growing(
    job: Mapping[str, Any], catalog: Catalog, *, where: str = "scenario", progress: Callable[[str], None]
) -> Iterator[Smallest]:
    """The answer of `smallest` as its recommendation grows, see `calc.recommend.answer.growing`."""
    asked = given(job, where=where, catalog=catalog)
    tried, slow, error = 0, 0, None
    least: Least | None = None
    machine: Machine | None = None
    whole: Problem | None = None  # that of the answer: of the least machine until a better one is found
    for each in machines(catalog, asked.get("gpu"), asked.get("gpus")):
        too_slow = f", {slow} too slow" if slow else ""
        progress(f"{tried} machines too small{too_slow}, now {each.gpus} x {each.gpu.name}")
        try:
            problem = posed({**asked, **each.fields}, catalog, where)
        except InputError as refused:
            error = error or refused
            continue
        if not least:
            whole = problem
        full = problem.full()
        if not _fits(full, each):
            tried += 1
        elif least and full.surely_slow():
            slow += 1
        elif slowed := _slowed(full, each):
            least, slow = least or slowed, slow + 1
        else:
            machine, whole = each, problem
            break
    if whole is None:
        raise error or ScenarioError(
            f"{where}: gpus: given {asked.get('gpus')}, allowed: a number that fills whole nodes"
        )
    if machine is None and least:
        machine, slow, least = least.machine, 0, None
    for answer in answering(whole):
        yield Smallest(machine, answer, tried, slow, least)


def stands(problem: Problem) -> Standing:
    """How a job stands on its machine, far sooner than its fastest configuration is found."""
    if not problem.fits():
        return "too small"
    return "slow" if problem.surely_slow() else "fits"


def _slowed(problem: Problem, machine: Machine) -> Least | None:
    """The machine as one that only just holds the job, if what makes it fit there takes more time than is sensible."""
    first = problem.first()
    if first is None:
        return None
    _, search, found = first
    times = problem.slowed(first)
    return Least(machine, configured(search, search.chosen(found)), times) if times > SENSIBLE else None


def _fits(problem: Problem, machine: Machine) -> bool:
    """True if something fits; False at once if weights that cannot leave the GPUs exceed their total memory."""
    fields = problem.fields
    stay = framework(str(fields.get("framework", "torch")).partition("==")[0]).CHOICES.weights_stay
    if stay and fields.get("method") != "qlora":
        model = problem.catalog.model(fields["model"]).architecture
        if 2 * parameters(model) > machine.bytes:
            return False
    return problem.fits()
