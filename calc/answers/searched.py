"""Recommendations that pages ask for by name, kept between builds; missing ones are computed over all cores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from calc.answers import answers
from calc.answers.kept import Kept, fingerprint, of_gpu, of_models
from calc.recommend import Recommendation, recommend
from calc.scenario.scenario import ScenarioError


@cache
def catalog() -> str:
    """A hash of all GPUs, nodes and models, any of which may be an alternative."""
    return fingerprint([*map(of_gpu, answers.catalog().gpus), of_models()])


def _topic(job: Mapping[str, Any]) -> str:
    """A file for each catalog: builds of several share the folder, and none takes another's answer away."""
    return f"recipe-{fingerprint([dict(job), catalog()])[:24]}"


def recommendation(job: Mapping[str, Any], where: str) -> Recommendation:
    """The recommendation for a job of flat fields; raises ScenarioError, one line, for one that cannot be used."""
    store, topic, key = Kept(), _topic(job), catalog()
    kept: Recommendation | None = store.read(topic).get(key)
    if kept:
        return kept
    found = recommend(job, answers.catalog(), where=where)
    store.write(topic, {key: found})
    return found


def fill(jobs: Iterable[Mapping[str, Any]]) -> None:
    """Computes the recommendations for jobs of flat fields that are missing; faults are left to the page."""
    store, key = Kept(), catalog()
    if missing := [job for job in jobs if key not in store.read(_topic(job))]:
        for _ in answers.spread(_computed, missing):
            pass


def _computed(job: Mapping[str, Any]) -> None:
    with suppress(ScenarioError):
        recommendation(job, "recipes")
