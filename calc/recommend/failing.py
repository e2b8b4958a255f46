"""The reasons against: what the next faster configuration lacks, or the closest miss, and what would help."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import ceil, inf

from calc.base.units import GB
from calc.catalog.catalog import Catalog
from calc.estimate.host_memory import SHARE as HOST_SHARE
from calc.recommend.clock import TOLERANCE
from calc.recommend.problem import COUNTS, Configuration, Miss, Problem, fits
from calc.recommend.search import Fit, Found, Judged, Place, Search, room
from calc.recommend.space import SHARE, SHARES, Fields, shares_packed

# Programs that spread layers or a sequence over GPUs, in the order in which they are tried.
SPREADING: tuple[tuple[str, str], ...] = (
    ("framework", "verl"), ("trainer", "megatron-swift"), ("trainer", "torchtitan"),
)  # fmt: skip
SHORTEST = 128  # tokens; shorter sequences are not suggested


def miss(search: Search, judged: Judged) -> Miss:
    """The memory that a configuration which does not fit lacks."""
    e = judged.estimate
    throughput = search.clock.full(judged.scenario, judged.cache_tokens)
    refusal = next((g.refusal for g in e.groups if g.refusal), None)
    # a larger share of the card would start vLLM, were it not for the others' memory
    if refusal and not (judged.slack < 0 and search.branches[0].shares):
        return Miss(judged, throughput, "vllm", "load", None, refusal)
    if judged.slack < 0:
        _, phase = min(((g, p) for g in e.groups for p in g.phases), key=lambda at: room(*at))
        return Miss(judged, throughput, "gpu", phase.name, -judged.slack)
    phase = max(e.host_phases, key=lambda p: p.moment.device_bytes)
    return Miss(judged, throughput, "host", phase.name, judged.short)


def next_faster(search: Search, found: Found) -> Miss | None:
    """The next faster configuration and what it lacks; faster is what gains more than the error of times.

    Along each setting the first faster value is taken, and of these configurations the slowest. If no single setting
    makes it faster: of all faster configurations that the search has looked at, the one that lacks least.
    """
    limit = found.seconds / (1 + TOLERANCE) if search.rated else found.seconds  # without rates, steps stand for time

    def faster(search: Search, b: int, place: Place) -> bool:
        return search.time(b, place) < limit

    near = []
    for axis, index in enumerate(found.place):
        along = ((*found.place[:axis], n, *found.place[axis + 1 :]) for n in reversed(range(index)))
        if first := next((place for place in along if faster(search, found.branch, place)), None):
            near.append((search.time(found.branch, first), first))
    for _, place in sorted(near, reverse=True):
        fit = search.fit(found.branch, place)
        judged = search.judged(found.branch, place) if fit and not fit.fits else None
        if judged:
            return miss(search, judged)
    return _least([search], faster)


def closest(problem: Problem) -> Miss | None:
    """The configuration that lacks least, of all that the searches looked at; None if none can be run."""
    return _least(problem.misses)


def passed(problem: Problem, rung: Fields) -> Miss | None:
    """The closest miss of the method that would come first, where the method was open and `rung` has another.

    None where it fits, and takes too long.
    """
    first = problem.rungs[0]["method"]
    if rung["method"] == first or problem.slow:
        return None
    return _least(search for search in problem.misses if search.branches[0].base.method == first)


def _least(searches: Iterable[Search], asked: Callable[[Search, int, Place], bool] = lambda *at: True) -> Miss | None:
    """The place that lacks least, of those that searches looked at, that do not fit and that `asked` accepts.

    The first of equals in the order in which they were looked at. A share of the card too small for vLLM to start
    counts last where larger ones were open: whatever rules those out is what lacks.
    """
    places = [(search, *at) for search in searches for at in search.lacking() if asked(search, *at[:2])]
    starved: set[int] = set()
    lacks, first = -inf, -1
    for n, above, fit in _promising(places):
        search, b, place, _ = places[n]
        if above < lacks:
            break
        # it must be more than this to come before the one that was found
        more = lacks if n > first else lacks - 1
        if above <= more or not fit.leaves(more) or fit.fits:
            continue
        if fit.slack >= 0 and fit.too_lean and search.branches[b].shares:
            starved.add(n)
        elif fit.slack - fit.short > more:
            lacks, first = fit.slack - fit.short, n
    if first < 0 and not starved:
        return None
    search, b, place, _ = places[first if first >= 0 else min(starved)]
    judged = search.judged(b, place)
    assert judged
    return miss(search, judged)


def _promising(places: Sequence[tuple[Search, int, Place, int]]) -> Iterator[tuple[int, int, Fit]]:
    """The numbers of places, by falling upper bounds of what they have to spare, with these and their fits.

    Each bound is closer than the one before, and asked for only when the turn of the place would come: by what is
    resident; by what the host lacks at least, too; by what training leaves; and by all that the host lacks.
    """
    ahead = [(-bound, n, 0) for n, (*_, bound) in enumerate(places)]
    heapify(ahead)
    while ahead:
        below, n, close = heappop(ahead)
        search, b, place, bound = places[n]
        if close == 0:
            heappush(ahead, (search.host_lacks(b, place) - bound, n, 1))
            continue
        if close == 1:
            if (training := search.training_at_most(b, place)) is not None:
                heappush(ahead, (search.host_lacks(b, place) - min(bound, training), n, 2))
            continue
        fit = search.fit(b, place)
        if not fit:
            continue
        # where CPU and GPU share one memory it takes the room on the GPUs to tell what the host lacks
        if close == 2 and not search.host.unified:
            heappush(ahead, (fit.short - min(bound, fit.training_at_most), n, 3))
        else:
            yield n, -below, fit


def tight(nearest: Miss | None) -> Configuration | None:
    """The closest miss if its verdict is `tight`, since nothing safer was found; else None."""
    if nearest is None or nearest.judged.estimate.verdict != "tight":
        return None
    return Configuration(nearest.judged, nearest.throughput)


def changes(problem: Problem, nearest: Miss | None) -> Iterator[str]:
    """For each thing that could be changed, the least change with which something fits; `nearest`: the closest miss."""
    rung = problem.rungs[0] if problem.rungs else None
    if (enough := _hosting(problem)) is not None:
        host = problem.misses[0].host
        yield f"host_memory {enough} (GB a node) fits on this machine, instead of {host}"
    given = int(problem.fields.get("gpus", 1))
    more = [n for n in COUNTS if given < n <= 16 * given]
    likely = bisect_left(more, given * _cards(nearest))
    if count := _fewest(more, likely, lambda n: _fits(problem.job, problem.catalog, {"gpus": n})):
        yield f"{count} GPUs instead of {given} suffice"
    if SHARE in problem.job and any(fit.too_lean for search in problem.misses for _, _, fit in search.looked()):
        for share in (n for n in reversed(SHARES) if n > problem.job[SHARE]):
            if _fits(problem.job, problem.catalog, {SHARE: share}):
                yield f"{SHARE} {share} fits on this machine"
                break
    if rung and "method" in problem.job:
        for method in ("lora", "qlora"):
            if method != rung["method"] and _fits(problem.job, problem.catalog, {"method": method}):
                yield f"method {method} fits on this machine"
                break
    if rung and shares_packed(problem.job, rung) and _fits(problem.job, problem.catalog, {"packing": True}):
        yield "packing true fits on this machine"
    yield from _elsewhere(problem) if given > 1 else ()
    s = problem.misses[0].branches[0].base if problem.misses else None
    name = "response_len" if s and s.rollout else "seq_len"
    length = (s.response_len if s.rollout else s.seq_len) if s else 0
    lengths = [half for n in range(1, length.bit_length()) if (half := length >> n) >= SHORTEST]
    if shorter := _longest(lengths, lambda length: _fits(problem.job, problem.catalog, {name: length})):
        yield f"{name} {shorter} fits on this machine"


def _elsewhere(problem: Problem) -> Iterator[str]:
    """The first other program in which something fits, of those that spread what the job's own keeps on one GPU.

    One in which the method fits that comes first is named before others.
    """
    job = {name: value for name, value in problem.job.items() if name not in ("framework", "trainer")}
    methods = [{"method": rung["method"]} for rung in problem.rungs[:1] if "method" not in job]
    for method in (*methods, {}):
        for field, name in SPREADING:
            if problem.job.get(field) != name and _fits(job, problem.catalog, {field: name, **method}):
                yield f"{field} {name} fits on this machine"
                return


def _cards(nearest: Miss | None) -> float:
    """The memory that the closest miss needs of a GPU, in cards; 1 where GPU memory is not what it lacks."""
    if nearest is None or nearest.where != "gpu" or nearest.shortfall is None:
        return 1.0
    usable = min(g.usable_bytes for g in nearest.judged.estimate.groups)
    return 1 + nearest.shortfall / usable


def _fewest(counts: Sequence[int], likely: int, fits: Callable[[int], bool]) -> int | None:
    """The first of rising `counts` that fits, or None; where one fits, so do more, if the framework takes so many.

    They are asked from the `likely` one on, as asking takes longest of many GPUs that are too few.
    """
    likely = min(likely, len(counts) - 1) if counts else 0
    found = next((n for n in range(likely, len(counts)) if fits(counts[n])), None)
    if found == likely:
        found = next((n + 1 for n in reversed(range(likely)) if not fits(counts[n])), 0)
    return None if found is None else counts[found]


def _longest(lengths: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The first of falling `lengths` that fits, or None; nothing longer than a length that fails can fit."""
    if not lengths or not fits(lengths[-1]):
        return None
    return lengths[bisect_left(lengths, True, hi=len(lengths) - 1, key=fits)]


def _hosting(problem: Problem) -> int | None:
    """The least host memory, in GB a node, with which a configuration fits that lacks nothing else, or None."""
    searches = [search for search in problem.misses if not search.host.unified]
    places = [(search, *at) for search in searches for at in search.lacking() if at[-1] >= 0]
    least = inf
    for search, b, place, _ in sorted(places, key=lambda at: at[0].host_lacks(*at[1:3])):
        if search.host_lacks(b, place) >= least:
            break
        fit = search.fit(b, place)
        if fit and 0 < fit.short < least and fit.on_device and not fit.refused:
            least = fit.short
    return ceil((searches[0].host.bytes + least) / (HOST_SHARE * GB)) if least < inf else None


def _fits(job: Fields, catalog: Catalog, changes: Fields) -> bool:
    """True if something fits with some fields changed."""
    changed = {k: v for k, v in job.items() if not (k == "gpus_per_node" and "gpus" in changes)}
    return fits({**changed, **changes}, catalog)
