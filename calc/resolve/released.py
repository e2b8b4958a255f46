"""Models that are newer than the Transformers that a job runs on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from calc.base.refusal import Refusal
from calc.base.schema import show
from calc.catalog.catalog import Model
from calc.frameworks.registry import framework
from calc.frameworks.torch.trainers.registry import RELEASED
from calc.models.releases import FIRST, knows, newest_type
from calc.scenario.scenario import Scenario
from calc.scenario.words import OWN_MODELS


def lacked(s: Scenario, models: Iterable[Model]) -> str | None:
    """The first model type that the job needs of its Transformers and that this does not have yet, or None."""
    version = s.versions.get("transformers")
    if version is None or s.trainer in OWN_MODELS:
        return None
    kinds = [newest_type(model.config) for model in models]
    return next((kind for kind in kinds if kind and not knows(version, kind)), None)


def beside(s: Scenario, kind: str) -> str:
    """The note on a model whose own code an older Transformers runs."""
    older = f"transformers {s.versions['transformers']} runs the code beside its weights, which is computed as its own"
    return f"{kind} came with transformers {FIRST[kind]}: {older}"


def fault(s: Scenario, kind: str, given: Mapping[str, Any]) -> Refusal:
    """The objection to a model type that the job's Transformers lacks, by the field that decided its release."""
    version, own = s.versions["transformers"], f"versions.{s.trainer}"
    if "versions.transformers" in given:
        return Refusal("versions.transformers", f"{show(version)}, which lacks {kind}", f"{FIRST[kind]} or later")
    field = "framework" if s.trainer not in RELEASED else own if own in given else "trainer"
    named = {own: s.versions.get(s.trainer), "trainer": s.trainer, "framework": s.framework_asked}[field]
    came = f"whose transformers {version} lacks {kind}, which came with {FIRST[kind]}"
    later = next(iter(_later(s, kind, given)), "")
    allowed = f"{later} or later, or a newer versions.transformers" if later else "a newer versions.transformers"
    return Refusal(field, f"{show(named)}, {came}", allowed)


def _later(s: Scenario, kind: str, given: Mapping[str, Any]) -> Iterator[str]:
    """The framework's later releases on a Transformers that has the model type."""
    module = framework(s.framework)
    for release in module.KNOWN[module.KNOWN.index(s.framework_version) :]:
        pin = module.defaults(s.task, release, given).get("versions.transformers")
        if release[0].isdigit() and pin and knows(str(pin), kind):
            yield f"{s.framework}=={release}"
