"""The only way into `calc`: pages ask here, and the time spent inside is measured."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

from calc import __version__
from calc.base.collecting import collect_rarely
from calc.base.ledger import Moment, Phase
from calc.catalog.catalog import Catalog, load
from calc.estimate.estimate import course, estimate, loading_moments
from calc.estimate.report import deciding
from calc.estimate.result import Estimate, Group
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario, ScenarioError
from calc.step.roles import Job

T = TypeVar("T")


class Clock:
    """The seconds spent in `calc`, and the number of scenarios asked, since the start of the build."""

    seconds = 0.0
    asked = 0


class Preview:
    """The state of the live preview, which leaves out answers that are not kept, because its page would wait for them.

    `behind`: a page has left out some that take seconds, and is to be made again with them.
    """

    on = False
    behind = False


class Answer(NamedTuple):
    """A scenario as given, as parsed, and its estimate."""

    given: Mapping[str, Any]
    scenario: Scenario
    estimate: Estimate

    @property
    def group(self) -> Group:
        """The GPU group that decides the verdict."""
        return deciding(self.estimate)

    def group_of(self, name: str) -> Group:
        """The group called `name`, or the one that has the role `name`; ValueError where there is none."""
        for group in self.estimate.groups:
            if name == group.name or name in group.name.split("+"):
                return group
        raise ValueError(f"no group {name!r}; this job has {', '.join(g.name for g in self.estimate.groups)}")

    @property
    def serving(self) -> tuple[Group, ...]:
        """The GPU group on which vLLM serves; empty if there is none."""
        return tuple(g for g in self.estimate.groups if "rollout" in g.name.split("+"))

    @property
    def placed(self) -> Job:
        """The roles of the job on their GPUs."""
        return Job(self.scenario, load().gpu(self.scenario.gpu))

    def loading(self) -> list[tuple[str, Moment]]:
        """Every moment of loading, with the name of the group that it happens on."""
        return loading_moments(self.scenario, load())

    def course(self) -> list[tuple[str, list[Phase]]]:
        """Every instant from loading to the end of a step that can be the peak of its phase, by GPU group, in order."""
        return course(self.scenario, load())

    @property
    def peak(self) -> Phase:
        """The phase in which the deciding group peaks."""
        return self.group.peak

    @property
    def device_bytes(self) -> int:
        """The bytes that the fullest GPU needs at its peak, context and all."""
        return self.peak.moment.device_bytes

    @property
    def allocated_bytes(self) -> int:
        """The bytes that PyTorch's allocator counts at that peak."""
        return self.peak.moment.allocated_bytes


def catalog() -> Catalog:
    """The validated catalog."""
    return load()


def versions() -> dict[str, str]:
    """The versions of catalog and calc, on which every published number rests."""
    return {"catalog": load().version, "calc": __version__}


def ask(given: Mapping[str, Any], where: str = "scenario") -> Answer:
    """The answer to one scenario, cached; raises ScenarioError, one line, for one that cannot be used."""
    return _kept(json.dumps(given, sort_keys=True), where)


def attempt(given: Mapping[str, Any]) -> Answer | None:
    """The answer, or None if the framework refuses the scenario. Not cached: look-up tables ask for thousands."""
    try:
        return _answer(given, "scenario")
    except ScenarioError:
        return None


@cache
def _kept(key: str, where: str) -> Answer:
    return _answer(json.loads(key), where)


def _answer(given: Mapping[str, Any], where: str) -> Answer:
    start = time.perf_counter()
    try:
        scenario = parse(given, where=where, catalog=load())
        return Answer(given, scenario, estimate(scenario, load()))
    finally:
        Clock.seconds += time.perf_counter() - start
        Clock.asked += 1


def spread(work: Callable[..., T], *columns: Sequence[Any]) -> Iterator[T]:
    """`map` over all cores; one call alone stays in this process, as another takes a second to begin."""
    if len(columns[0]) == 1:
        seconds, asked = Clock.seconds, Clock.asked
        found = work(*(column[0] for column in columns))
        Clock.seconds, Clock.asked = seconds, asked  # they are counted by who asks for all
        yield found
        return
    # imported here, because a browser has no processes, and would wait for a tenth of a second for their module
    from calc.answers.processes import Pool

    with Pool(initializer=collect_rarely) as pool:
        yield from pool.map(work, *columns)


def plain(record: Any) -> dict[str, Any]:
    """A record of the catalog as JSON has it."""
    return {f.name: _jsonable(getattr(record, f.name)) for f in dataclasses.fields(record)}


def _jsonable(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return plain(value)
    if isinstance(value, Mapping):
        return {k: _jsonable(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_jsonable(v) for v in value]
    return value
