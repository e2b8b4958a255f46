"""Rules that refuse impossible models: a field that no config.json of the family has, a count unlike the tensors'."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from calc.base.schema import closest
from calc.catalog.catalog import Catalog, Model
from calc.check.faults import fault
from calc.models.config_keys import known, known_around
from calc.models.families import ALIKE, NESTED

# The parameters counted over the size in a name, which is a round number: 1.31 for Gemma 2 2B, whose name leaves out
# the embedding, 0.80 for Mixtral 8x22B, whose experts share their attention.
SIZE = (0.75, 1.35)
# families whose classes are not named as their model_type is, and the names' beginnings
CLASSES = {"gpt2": "gpt2lmhead", "hunyuan_v1_dense": "hunyuandensev1for", "hunyuan_v1_moe": "hunyuanmoev1for"}


def config_fields(model: Model, _: Catalog) -> Iterator[str]:
    """Each field of the config is one that its family's config.json files have."""
    yield from _unknown(model.config, known_around(model.config["model_type"]), "config")
    if (inner := _inner(model)) is not model.config:
        yield from _unknown(inner, known(model.architecture.family), "config.text_config")


def _inner(model: Model) -> Mapping[str, Any]:
    """The config fields of the language model."""
    return model.config["text_config"] if model.config["model_type"] in NESTED else model.config


def _unknown(fields: Mapping[str, Any], allowed: frozenset[str], where: str) -> Iterator[str]:
    for name in fields:
        if name not in allowed:
            near = closest(name, allowed - fields.keys())
            near = near.replace("did you mean '", f"did you mean '{where}.")
            yield f"unknown field '{where}.{name}'" + (near or f", allowed: {', '.join(sorted(allowed))}")


def named_class(model: Model, _: Catalog) -> Iterator[str]:
    """The class that the config names belongs to the family that it names."""
    given = model.config.get("architectures")
    family = ALIKE.get(model.config["model_type"], model.config["model_type"])
    stem = CLASSES.get(family) or family.replace("_", "").removesuffix("text") + "for"
    if given and not given[0].replace("_", "").casefold().startswith(stem):
        yield fault("config.architectures", given, f"a class of the family {family}, as model_type says")


def published_count(model: Model, _: Catalog) -> Iterator[str]:
    """A published number of parameters is that of the config's tensors."""
    if model.published_parameters not in (None, model.parameters):
        allowed = f"{model.parameters}, as its config counts, or null where nobody states it exactly"
        yield fault("published_parameters", model.published_parameters, allowed)


def size_in_name(model: Model, _: Catalog) -> Iterator[str]:
    """A number of parameters in the model's name is close to the number counted, unless an exact one is published.

    Llama 4's names have the parameters that are active, and the number of experts.
    """
    said = re.search(r"(?<![A-Za-z0-9.])((?:[0-9]+x)?)([0-9]+(?:\.[0-9]+)?)[Bb](?![A-Za-z0-9]|-[0-9]+E)", model.hf)
    if said is None or model.published_parameters:
        return
    named = prod(float(part) for part in (said[1].rstrip("x") or "1", said[2]))
    low, high = (bound * named * 1e9 for bound in SIZE)
    if not low <= model.parameters <= high:
        yield f"config: given {model.parameters:,} parameters, allowed: {low:,.0f} to {high:,.0f}, as hf says {said[0]}"


def names(model: Model, catalog: Catalog) -> Iterator[str]:
    """A model has each name once, the one for readers is no Hugging Face name, and its config.json is its own.

    What it is unlike is no model of the catalog.
    """
    own = [name.casefold() for name in (model.id, model.hf, *model.aliases)]
    for index, name in enumerate(own[2:]):
        if name in own[: index + 2]:
            yield fault(f"aliases[{index}]", model.aliases[index], "a name that the model does not have yet")
    for name in model.unlike:
        if owner := catalog.names.listed.get(name.casefold()):
            yield f"unlike: given {name!r}, which models/{owner}.yaml lists, allowed: names that no model has"
    if "/" in model.name:
        yield fault("name", model.name, "the name that readers write, such as Llama 3 8B")
    found = re.match(r"https://huggingface\.co/([^/]+/[^/]+)", model.source)
    if found and found[1].casefold() not in own:
        yield fault("source", model.source, f"a file of {model.hf} or of one of aliases")
