"""Recommendations that pages ask for by name, kept between builds; missing ones are computed over all cores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from calc.answers import answers
from calc.answers.kept import Kept, fingerprint, of_gpu, of_job, of_models
from calc.catalog.catalog import CatalogError
from calc.recommend import Recommendation, recommend
from calc.scenario.scenario import ScenarioError


@cache
def catalog() -> str:
    """A hash of all GPUs, nodes and models, any of which may be an alternative."""
    return fingerprint([*map(of_gpu, answers.catalog().gpus), of_models()])


def _topic(job: Mapping[str, Any]) -> str:
    """The file of a job's answer, which depends on the job, its card and its models: catalogs that have these alike
    share it. CatalogError for a job that names what the catalog lacks.
    """
    return f"recipe-{fingerprint([dict(job), *of_job(job)])[:24]}"


def recommendation(job: Mapping[str, Any], where: str) -> Recommendation:
    """The recommendation for a job of flat fields; raises ScenarioError, one line, for one that cannot be used."""
    try:
        topic = _topic(job)
    except CatalogError:
        return recommend(job, answers.catalog(), where=where)  # which says what is wrong
    store = Kept()
    kept: Recommendation | None = store.read(topic).get(topic)
    if kept:
        return kept
    found = recommend(job, answers.catalog(), where=where)
    store.write(topic, {topic: found})
    return found


def fill(jobs: Iterable[Mapping[str, Any]]) -> None:
    """Computes the recommendations for jobs of flat fields that are missing; faults are left to the page."""
    if missing := [job for job in jobs if not _known(job)]:
        for _ in answers.spread(_computed, missing):
            pass


def _known(job: Mapping[str, Any]) -> bool:
    try:
        return bool(Kept().read(_topic(job)))
    except CatalogError:
        return True  # there is none to compute


def _computed(job: Mapping[str, Any]) -> None:
    with suppress(ScenarioError):
        recommendation(job, "recipes")
