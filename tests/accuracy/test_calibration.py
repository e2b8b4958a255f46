"""The errors behind a verdict are those of the records, and 'fits' keeps its promise on sources that were left out."""

from __future__ import annotations

import pytest
from jobs import SHORTER, UNMODELLED

from calc.accuracy import calibration
from calc.accuracy.residuals import Residual
from calc.base.units import GiB
from calc.catalog.catalog import Catalog, load
from calc.estimate import verdict
from calc.memory import runtime
from calc.scenario.scenario import Scenario


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load()


@pytest.fixture(scope="module")
def cached(catalog: Catalog) -> list[tuple[Scenario, float]]:
    return list(calibration.caching(catalog))


def test_what_is_held_back_is_what_the_messages_say(catalog: Catalog) -> None:
    """Who adds a message brings the constant up to date: `calc.accuracy.calibration.fragmentation` prints it."""
    found = calibration.fragmentation(catalog)
    print(", ".join(f"{share:.4f}" for share in found))
    assert list(found) == pytest.approx(runtime.FRAGMENTATION, abs=6e-5)
    assert len(calibration.at_the_edge(catalog)) >= 40


def test_what_jobs_with_shards_cache_is_what_the_measured_ones_did(cached: list[tuple[Scenario, float]]) -> None:
    found = calibration.sharded_cache(cached)
    print(f"{found:.3f} of what comes and goes")
    assert found == pytest.approx(runtime.CACHED_SHARDED, abs=0.006)


def test_what_is_usually_cached_is_what_half_of_the_measured_jobs_did(cached: list[tuple[Scenario, float]]) -> None:
    """No job under ZeRO was measured with expandable segments, so that FSDP's stand for it."""
    found = calibration.usual_cache(cached)
    print(found)
    assert ("zero", True) not in found
    for (family, expandable), share in runtime.USUALLY.items():
        measured = "fsdp" if (family, expandable) == ("zero", True) else family
        assert share == pytest.approx(found[measured, expandable], abs=0.006)


def test_the_formulas_spread_is_that_of_the_traces_furthest_off(residuals: tuple[Residual, ...]) -> None:
    found = calibration.formula_spread(r for r in residuals if r.kind == "traced")
    print(f"largest root mean square of any sharding: {found:.4f}")
    assert found == pytest.approx(verdict.FORMULA_SPREAD, abs=1e-3)


def test_the_contexts_spread_is_that_of_the_messages(catalog: Catalog) -> None:
    errors = calibration.outside_errors(catalog)
    print(f"{len(errors)} messages: {[round(error / GiB, 2) for error in errors]}")
    assert len(errors) >= 8
    assert calibration.rms(errors) / GiB == pytest.approx(verdict.CONTEXT_SPREAD / GiB, abs=0.01)


def test_messages_of_sources_left_out_lose_what_the_others_say(catalog: Catalog) -> None:
    """Leave-one-source-out: as many lie below a quantile as it says, within what so few can show."""
    places = [place for _, place in calibration.covered(catalog)]
    for quantile in (0.25, 0.5, 0.75, 0.9, 0.95):
        below = sum(place <= quantile for place in places) / len(places)
        print(f"{quantile:.2f}: {below:.2f} of {len(places)}")
        assert below == pytest.approx(quantile, abs=0.1)


def test_of_published_jobs_that_fit_at_least_95_percent_ran(outcomes: tuple[calibration.Outcome, ...]) -> None:
    """In tables and logs, each probability without the job's own source. Threads were searched for runs that died: of
    their jobs those called out of memory are counted, and no job that ran is among them but of unknown length."""
    fit = [o for o in outcomes if o.probability >= verdict.FITS and not o.sought]
    oom = [o for o in outcomes if o.probability < verdict.TIGHT]
    died = [o for o in outcomes if not o.ran]
    print(f"fits: {sum(o.ran for o in fit)} of {len(fit)} ran; oom: {sum(o.ran for o in oom)} of {len(oom)} ran")
    print(f"died: {sum(o in oom for o in died)} of {len(died)} called out of memory")
    assert len(fit) >= 80
    assert sum(o.ran for o in fit) >= 0.95 * len(fit)
    assert {o.id for o in oom if o.ran} <= SHORTER | UNMODELLED
    assert sum(o in oom for o in died) >= 0.7 * len(died)


MESSAGE = {"url": "https://github.com/a/b/issues/1", "phase": None, "tried_bytes": 10, "total_bytes": 1000}


@pytest.mark.parametrize(("unallocated", "free", "lost"), [(90, 20, 100 / 800), (0, 10, 0.0), (0, 4, 0.0)])
def test_what_is_lost_is_what_was_there_beside_the_request(unallocated: int, free: int, lost: float) -> None:
    """By hand: 790 allocated and 10 asked for; what was there and not enough, or not there, is no loss."""
    message = MESSAGE | {"allocated_bytes": 790, "unallocated_bytes": unallocated, "free_bytes": free}
    assert calibration.share(message) == lost


def test_quantiles_are_the_middles_of_equal_parts() -> None:
    """Of 0 to 40 in 41 steps: the middle of the first fortieth is 0.5, of the last 39.5."""
    found = calibration.quantiles(range(40, -1, -1))
    assert found[0] == pytest.approx(0.5)
    assert found[-1] == pytest.approx(39.5)
    assert found[runtime.MIDDLE] == pytest.approx(20.5)


def test_a_source_is_a_repository_or_a_host() -> None:
    for url, expected in (
        ("https://github.com/a/b/issues/1", "a/b"),
        ("https://discuss.pytorch.org/t/7", "discuss.pytorch.org"),
    ):
        assert calibration.source({"url": url}) == expected
    assert calibration.source({"url": None, "group": "ours"}) == "ours"
