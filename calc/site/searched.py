"""Recommendations that pages ask for by name, kept between builds; missing ones are computed over all cores."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from calc.recommend import Recommendation, recommend
from calc.rules import flatten
from calc.scenario import ScenarioError
from calc.site import answers
from calc.site.kept import Kept, fingerprint, of_gpu, of_models
from calc.site.sources import front


@cache
def catalog() -> str:
    """A hash of all GPUs, nodes and models, any of which may be an alternative."""
    return fingerprint([*map(of_gpu, answers.catalog().gpus), of_models()])


def _topic(job: Mapping[str, Any]) -> str:
    return f"recipe-{fingerprint(dict(job))[:24]}"


def recommendation(job: Mapping[str, Any], where: str) -> Recommendation:
    """The recommendation for a job of flat fields; raises ScenarioError, one line, for one that cannot be used."""
    store, topic, key = Kept(), _topic(job), catalog()
    kept: Recommendation | None = store.read(topic).get(key)
    if kept:
        return kept
    found = recommend(job, answers.catalog(), where=where)
    store.write(topic, {key: found})
    return found


def fill(docs: Path) -> None:
    """Computes missing recommendations that front matter under `docs` asks for; faults are left to the page."""
    asked = [
        flatten(job) for page in sorted(docs.rglob("*.md")) for job in (front(page)[0].get("recipes", {})).values()
    ]
    store, key = Kept(), catalog()
    if missing := [job for job in asked if key not in store.read(_topic(job))]:
        for _ in answers.spread(_computed, missing):
            pass


def _computed(job: Mapping[str, Any]) -> None:
    with suppress(ScenarioError):
        recommendation(job, "recipes")
