"""A job at several lengths or on several numbers of GPUs, and the very place at which its verdict changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import NormalDist
from typing import Any, NamedTuple

from calc.answers import answers
from calc.answers.answers import Answer
from calc.estimate.verdict import FITS, TIGHT, deviation
from calc.scenario.rules import flatten
from calc.scenario.scenario import Scenario

GPUS = (1, 2, 4, 8, 16, 32, 64)
NODE = 8
SHORTEST = 512
BEYOND = 2  # points out of memory that are shown
NORMAL, SURE = NormalDist(), 1e-6  # a probability so near to 0 or 1 says no more
SAFE = 1 / 32  # of the way between two places
Job = Mapping[str, Any]
Place = tuple[int, Answer]
Turns = tuple[tuple[float, str], ...]  # places on the axis at which the verdict changes, each with the new verdict


class Along(NamedTuple):
    """A job along an axis: the answers at some places, and where the verdict changes."""

    points: Mapping[int, Answer]
    turns: Turns


def along(job: Job, over: str, values: Sequence[int] = ()) -> Along:
    """A job along an axis, at `values` or at the usual places; see `points`."""
    found = points(job, over, values)
    return Along(found, turns(job, over, found))


def at(job: Job, over: str, value: int) -> Answer | None:
    """The job with another length, or on another number of GPUs; None if the framework refuses it."""
    given = {**flatten(job), over: value}
    if over == "gpus":
        sizes = (int(given.get("gpus_per_node", NODE)), NODE, 1)
        given["gpus_per_node"] = next(min(value, n) for n in sizes if value % min(value, n) == 0)
        given.pop("global_batch", None)  # it would have to be a multiple of micro_batch x data-parallel GPUs
    elif given.get("expected_len", 0) > value:
        del given["expected_len"]
    return answers.attempt(given)


def points(job: Job, over: str, values: Sequence[int] = ()) -> dict[int, Answer]:
    """The answers by place on the axis, at `values`.

    By default lengths double up to the model's positions, and GPUs are those of `GPUS`, points far out of memory left
    out.
    """
    doubled = GPUS if over == "gpus" else [SHORTEST << n for n in range(12)]
    found: dict[int, Answer] = {}
    for value in values or doubled:
        answer = at(job, over, value)
        if answer is None:
            continue
        if over != "gpus" and _length(answer.scenario) > answer.scenario.architecture.max_positions:
            break
        found[value] = answer
        if over != "gpus" and [a.estimate.verdict for a in found.values()].count("oom") == BEYOND:
            break
    while over == "gpus" and not values and len(found) > 2 and _verdicts(found)[-3:] == ["fits"] * 3:
        found.popitem()  # more GPUs than anybody needs
    while over == "gpus" and not values and _verdicts(found)[: BEYOND + 1] == ["oom"] * (BEYOND + 1):
        del found[next(iter(found))]
    return found


def _length(s: Scenario) -> int:
    return s.seq_len or s.prompt_len + s.response_len


def _verdicts(found: Mapping[int, Answer]) -> list[str]:
    return [answer.estimate.verdict for answer in found.values()]


def turns(job: Job, over: str, found: Mapping[int, Answer]) -> Turns:
    """The changes of the verdict between the points `found`: to the token for lengths, halfway for GPUs."""
    return tuple([turn for low, high in pairwise(found.items()) for turn in _between(job, over, low, high)])


def _between(job: Job, over: str, low: Place, high: Place) -> list[tuple[float, str]]:
    """The places between two points at which the verdict changes, each with the new verdict."""
    before, after = low[1].estimate.verdict, high[1].estimate.verdict
    if before == after:
        return []
    if over == "gpus":
        return [((low[0] * high[0]) ** 0.5, after)]
    if high[0] - low[0] <= 1:
        return [(high[0], after)]
    middle = _middle(low, high)
    between = at(job, over, middle)
    if between is None:  # a length that the framework refuses: no closer look
        return [(high[0], after)]
    return [*_between(job, over, low, (middle, between)), *_between(job, over, (middle, between), high)]


def _middle(low: Place, high: Place) -> int:
    """A place between two, near the one at which the first verdict ends: there what is spare is just enough.

    Memory grows nearly evenly with length. A little nearer to the middle than that says, so that the change comes to
    lie between this place and the next one asked.
    """
    enough = NORMAL.inv_cdf(FITS if low[1].estimate.verdict == "fits" else TIGHT)
    above, below = _spare(low[1]) - enough, _spare(high[1]) - enough
    share = above / (above - below) if above > 0 > below else 0.5
    share += SAFE if share < 0.5 else -SAFE
    return min(max(low[0] + round(share * (high[0] - low[0])), low[0] + 1), high[0] - 1)


def _spare(answer: Answer) -> float:
    """The memory that the fullest GPU has left, in standard deviations of the estimate's error."""
    probability = answer.estimate.fit_probability
    if 1 - SURE > probability > SURE:
        return NORMAL.inv_cdf(probability)
    return (answer.group.usable_bytes - answer.device_bytes) / deviation(answer.allocated_bytes)
