"""Rules that refuse impossible models: a field that no config.json of the family has, a count unlike the tensors'."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any

from calc.base.schema import closest
from calc.catalog.catalog import Catalog, Model
from calc.check.faults import fault
from calc.models.architecture import active_parameters, language, parameters
from calc.models.config_keys import known, known_around
from calc.models.families import ALIKE, FAMILIES, SEEING
from calc.models.hf_config import seeing
from calc.models.sound_config import HEARING

# The parameters counted over the size in a name, which is a round number: 1.67 for Falcon 3 1B, 0.68 for FlexOlmo 7x7B,
# whose experts share their attention, embedding and head.
SIZE = (0.65, 1.7)
# The same for active parameters: 1.29 for Qwen3-Next 80B-A3B, whose embedding and head count too.
ACTIVE = (0.75, 1.35)
# difflib's measure of two names, of which one is meant by the other: 0.73 for window_size and hidden_size
MISSPELT = 0.85
# What the names of Transformers' classes end in.
HEADS = (
    "ForCausalLM",
    "LMHeadModel",
    "ForConditionalGeneration",
    "ForSequenceClassification",
    "ForTokenClassification",
)
# The fields that each kind of scaled positions needs: `_validate_*_rope_parameters` of Transformers 5.23
# (modeling_rope_utils.py).
ROPE: Mapping[str | None, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
# families whose classes are not named as their model_type is, and the names' beginnings
CLASSES = {
    "bailing_moe": "bailingmoe", "gpt2": "gpt2lmhead", "hunyuan_v1_dense": "hunyuandensev1for",
    "hunyuan_v1_moe": "hunyuanmoev1for", "mllama_text_model": "mllamafor", "nemotron-nas": "decilmfor",
}  # fmt: skip

SEVERAL = ("_token_id", "use_bidirectional_attention")  # ends of fields that have values of several kinds


def config_fields(model: Model, _: Catalog) -> Iterator[str]:
    """Each field of the config is one that its family's config.json files have."""
    yield from _unknown(model.config, known_around(model.config["model_type"]), "config")
    if (inner := _inner(model)) is not model.config:
        named, own = str(inner.get("model_type")), model.architecture.family
        around = HEARING if own in HEARING else SEEING
        family = named if named in FAMILIES else around[own].text if own in around else own
        yield from _unknown(inner, known(family), "config.text_config")


def _inner(model: Model) -> Mapping[str, Any]:
    """The config fields of the language model."""
    inner: Mapping[str, Any] = model.config.get("text_config", model.config)
    return inner


def _unknown(fields: Mapping[str, Any], allowed: frozenset[str], where: str) -> Iterator[str]:
    for name in fields:
        if name not in allowed:
            near = closest(name, allowed - fields.keys())
            near = near.replace("did you mean '", f"did you mean '{where}.")
            yield f"unknown field '{where}.{name}'" + (near or f", allowed: {', '.join(sorted(allowed))}")


def named_class(model: Model, _: Catalog) -> Iterator[str]:
    """The class that the config names belongs to the family that it names."""
    given = model.config.get("architectures", ())
    own = model.config["model_type"]
    family = ALIKE.get(own, own)
    stems = [CLASSES.get(name) or name.replace("_", "").removesuffix("text") + "for" for name in (family, own)]
    if not all(name.replace("_", "").casefold().startswith(tuple(stems)) for name in given):
        yield fault("config.architectures", given, f"a class of the family {family}, as model_type says")
    elif not all(name.endswith(HEADS) for name in given):
        yield fault("config.architectures", given, f"a class whose name ends in {' or '.join(HEADS)}")


def one_dtype(model: Model, _: Catalog) -> Iterator[str]:
    """Both names of the field for the checkpoint's number format say the same."""
    config = _inner(model)
    if {"dtype", "torch_dtype"} <= config.keys() and config["dtype"] != config["torch_dtype"]:
        yield fault("config.dtype", config["dtype"], f"{config['torch_dtype']}, as torch_dtype, or one of the two")


def positions(model: Model, _: Catalog) -> Iterator[str]:
    """Scaled rotary positions have the fields that their kind needs, and begin with no more than the model has."""
    config = _inner(model)
    if not (scaling := config.get("rope_scaling")):
        return
    kind = scaling.get("rope_type", scaling.get("type"))
    for name in ROPE.get(kind, ()):
        if name not in scaling and name not in config:
            yield f"missing field 'config.rope_scaling.{name}', which rope_type {kind} needs"
    first, most = scaling.get("original_max_position_embeddings"), config.get("max_position_embeddings")
    if first and most and first > most:
        allowed = f"at most max_position_embeddings = {most}"
        yield fault("config.rope_scaling.original_max_position_embeddings", first, allowed)


def groups(model: Model, _: Catalog) -> Iterator[str]:
    """Experts in groups: the groups are equal, and no more of them are picked than there are."""
    config, experts = _inner(model), model.architecture.experts
    every, picked = config.get("n_group") or 1, config.get("topk_group") or 1
    if experts and experts % every:
        yield fault("config.n_group", every, f"a divisor of the number of experts, {experts}")
    if picked > every:
        yield fault("config.topk_group", picked, f"at most n_group = {every}")


def listed_layers(model: Model, _: Catalog) -> Iterator[str]:
    """A list of layers, those with experts or without, names layers that there are, by their numbers from 0."""
    config, layers = _inner(model), model.architecture.layers
    for field in ("mlp_only_layers", "moe_layers"):
        for number in config.get(field) or ():
            if number not in range(layers):
                yield fault(f"config.{field}", number, f"0 to {layers - 1}, of num_hidden_layers = {layers}")


def images(model: Model, _: Catalog) -> Iterator[str]:
    """No field of a vision tower is misspelt: the class's default would silently take its place."""
    given, sight = model.config.get("vision_config", {}), SEEING.get(seeing(model.config))
    known = sight.defaults if sight else {}
    for name in given.keys() - known.keys():
        for near in get_close_matches(name, known.keys() - given.keys(), n=1, cutoff=MISSPELT):
            yield f"unknown field 'config.vision_config.{name}'; did you mean 'config.vision_config.{near}'?"


def kinds(catalog: Catalog, _: Path) -> Iterator[str]:
    """A config's field has the kind, say number or list, that it has in all other models.

    No other rule reads the fields that change no tensor. Where only two models have a field, neither is refused. A
    token that ends a text may be one or several, and Gemma's attention sees all positions, or those of an image.
    """
    given = {(model.id, name): value for model in catalog.models.values() for name, value in _inner(model).items()}
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for (_owner, name), value in given.items():
        found[name][_kind(value)] += value is not None and not name.endswith(SEVERAL)
    for (owner, name), value in given.items():
        usual, times = found[name].most_common(1)[0]
        if value is not None and _kind(value) != usual and found[name][_kind(value)] == 1 < times:
            yield f"models/{owner}.yaml: {fault(f'config.{name}', value, f'{usual}, as in the other models')}"


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    names = {int: "a number", float: "a number", str: "text", list: "a list", dict: "a mapping of fields"}
    return names.get(type(value), "null")


def published_count(model: Model, _: Catalog) -> Iterator[str]:
    """A published number of parameters is that of the config's tensors."""
    if model.published_parameters not in (None, model.parameters):
        allowed = f"{model.parameters}, as its config counts, or null where nobody states it exactly"
        yield fault("published_parameters", model.published_parameters, allowed)
    if model.seeing and model.published_seeing not in (None, counted := parameters(model.seeing)):
        yield fault("vision.published_parameters", model.published_seeing, f"{counted}, as its config counts")


def size_in_name(model: Model, _: Catalog) -> Iterator[str]:
    """A number in a model's name is close to the parameters counted; of several the largest, as of OLMoE 1B-7B.

    The name on Hugging Face may round as it likes where the exact number is published. Llama 4's names have the
    parameters that are active, and the number of experts. An alias of another size would answer for another model.
    """
    exact = model.published_parameters == model.parameters
    named = [("name", model.name), *([] if exact else [("hf", model.hf)])]
    named += [(f"aliases[{n}]", alias) for n, alias in enumerate(model.aliases)]
    for field, name in named:
        found = re.finditer(r"(?<![A-Za-z0-9._])((?:[0-9]+x)?)([0-9]+(?:\.[0-9]+)?)[Bb](?![A-Za-z0-9]|-[0-9]+E)", name)
        said = {prod(float(part) for part in (one[1].rstrip("x") or "1", one[2])): one[0] for one in found}
        if not said:
            continue
        alone = parameters(language(model.architecture))  # LLaVA-OneVision 0.5B: its tower is nearly as large
        counts = [
            model.parameters,
            alone,
            *([active_parameters(model.architecture)] if field.startswith("alias") else []),
        ]
        low, high = (bound * max(said) * 1e9 for bound in SIZE)
        if not any(low <= count <= high for count in counts):
            allowed = f"{low:,.0f} to {high:,.0f}, as {field} says {said[max(said)]}"
            yield f"config: given {model.parameters:,} parameters, allowed: {allowed}"


def active_in_name(model: Model, _: Catalog) -> Iterator[str]:
    """The active parameters of the language model are those that a name states, such as the A3B of Qwen3 30B-A3B.

    A name may leave out a fraction: the A1B of LFM2 8B A1B stands for 1.5 billion.
    """
    if not (said := re.search(r"(?<![A-Za-z0-9])[Aa]([0-9]+(?:\.[0-9]+)?)[Bb](?![A-Za-z0-9])", model.name)):
        return
    low, high = (bound * float(said[1]) * 1e9 for bound in ACTIVE)
    high = max(high, (float(said[1]) + 1) * 1e9)
    if not low <= (active := active_parameters(language(model.architecture))) <= high:
        yield f"config: given {active:,} active parameters, allowed: {low:,.0f} to {high:,.0f}, as name says {said[0]}"


def names(model: Model, catalog: Catalog) -> Iterator[str]:
    """A model has each name once, the one for readers is no Hugging Face name, and its config.json is its own.

    No name under `unlike` is a model of the catalog.
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
    found = re.match(r"https://huggingface\.co(?:/([^/]+/[^/]+)/.)?", model.source)
    if found and (found[1] or "").casefold() not in own:
        yield fault("source", model.source, f"a file of {model.hf} or of one of aliases")
