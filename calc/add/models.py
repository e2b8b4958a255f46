"""The draft of a model: a catalog file made of a Hugging Face config.json, and of what that does not say."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import yaml

from calc.add.draft import Draft
from calc.base.reading import scalar
from calc.base.schema import InputError, show
from calc.catalog.catalog import Catalog
from calc.models.architecture import Architecture, ConfigError, parameters
from calc.models.families import ALIKE, FAMILIES, NESTED, SEEING
from calc.models.hf_config import from_config, seeing, thinker
from calc.models.sound_config import HEARING

# What a config.json does not say, and what each option gives.
OPTIONS: Mapping[str, str] = {
    "hf": "the model's Hugging Face name, organisation/name",
    "id": "the file's name in models/; by default the Hugging Face name's in lower case",
    "name": "as readers write it; by default from the Hugging Face name",
    "source": "the address of the config.json; by default where the Hub has it",
    "licence": "the model's licence",
    "parameters": "the published number of parameters, exactly",
    "parameters-source": "where that number is stated",
}
UNKNOWN = "not stated"
# Fields of a config.json that say how a file was made, not what the model is.
_PASSING = ("_name_or_path", "transformers_version", "unsloth_version", "auto_map", "_attn_implementation")
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")  # which the schema asks for
_HF = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def draft(data: Mapping[str, Any], where: str, given: Mapping[str, str]) -> Draft:
    """The draft of a model; InputError for a config of which no architecture can be read, and for bad options."""
    hf = given.get("hf") or data.get("_name_or_path")
    try:
        data = thinker(data)
        from_config(data)
    except ConfigError as error:
        raise InputError(f"{where}: {error}") from None
    vision, unseen = _vision(data)
    if not isinstance(hf, str) or not _HF.fullmatch(hf):
        raise InputError(f"{where}: hf: given {show(hf)}, allowed: --hf with the Hugging Face name, organisation/name")
    short = hf.partition("/")[2]
    id = given.get("id", short.casefold())
    fields = {
        "name": given.get("name", re.sub(r"[-_]+", " ", short)),
        "hf": hf,
        "aliases": [],
        "source": given.get("source", f"https://huggingface.co/{hf}/blob/main/config.json"),
        **_count(where, given),
        "licence": given.get("licence", UNKNOWN),
        "config": _kept(data),
    }
    if vision:
        total, fields["published_parameters"] = fields["published_parameters"], None
        fields["vision"] = {"published_parameters": total, "config": vision}
    return Draft("models", id, _yaml(fields).encode(), partial(_told, id, given, unseen))


def _vision(data: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The fields around a language model that a job without images loads alone, and why its tower is left out, if so.

    Both are empty where the tower's fields stand beside the language model's, or there is none.
    """
    sight = SEEING.get(data["model_type"])
    if not (sight and sight.apart and data.get("vision_config")):
        return {}, ""
    try:
        from_config(data, images=True)
    except ConfigError as error:
        return {}, str(error)
    return {name: value for name, value in data.items() if name not in (*_PASSING, "text_config")}, ""


def _count(where: str, given: Mapping[str, str]) -> dict[str, Any]:
    """The fields on the published number of parameters."""
    count, source = given.get("parameters"), given.get("parameters-source")
    if count is None:
        return {
            "published_parameters": None,
            "parameters_source": "counted from the config; no published count is given",
        }
    digits = count.replace(",", "").replace("_", "")
    if not re.fullmatch("[0-9]{1,18}", digits):
        raise InputError(f"{where}: --parameters: given {show(count)}, allowed: the exact number, such as 8030261248")
    if source is None:
        raise InputError(f"{where}: given --parameters alone, allowed: with --parameters-source, where it is stated")
    return {"published_parameters": int(digits), "parameters_source": source}


def _kept(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the language model, with the sizes that its family's class knows by default, and its tower's."""
    family = text = data["model_type"]
    if family in NESTED:
        data = {"model_type": NESTED[family], **data["text_config"]}
        text = data["model_type"]
    elif family in HEARING or (family in SEEING and _names_another(data)):
        inner = {name: value for name, value in (data.get("text_config") or {}).items() if name not in _PASSING}
        outer = {name: value for name, value in data.items() if name not in _PASSING}
        return {**outer, "text_config": inner}
    elif family in SEEING:
        # the fields of the language model stand beside those of the tower
        inner = data.get("text_config") or {}
        data = {**inner, **{name: value for name, value in data.items() if name != "text_config"}}
        text = SEEING[seeing(data)].text
    defaults = FAMILIES[ALIKE.get(text, text)].defaults
    sizes = {name: defaults[name] for name in _SIZES if name not in data and name in defaults}
    return {name: value for name, value in {**data, **sizes}.items() if name not in _PASSING}


def _names_another(data: Mapping[str, Any]) -> bool:
    """True if the language model inside is of another family than most of those before such a tower."""
    inner = data.get("text_config")
    named = inner.get("model_type") if isinstance(inner, Mapping) else None
    return named in FAMILIES and named != SEEING[seeing(data)].text


class _Dumper(yaml.SafeDumper):
    """Writes YAML that `calc.base.reading` reads back as it was."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    plain = scalar(value, "") == value if len(value) < 30 else True
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if plain else "'")


def _list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.SequenceNode:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)


def _yaml(fields: Mapping[str, Any]) -> str:
    """The file's text: lists of values on one line, long text unbroken."""
    return yaml.dump(fields, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=10**6)


def _told(id: str, given: Mapping[str, str], unseen: str, catalog: Catalog) -> Iterable[str]:
    model = catalog.models[id]
    agrees = ", as published" if model.published_parameters else ""
    yield f"{model.name}: {model.parameters:,} parameters, counted tensor by tensor{agrees}"
    if model.seeing:
        yield f"with its vision tower, which a job with images loads: {parameters(model.seeing):,} parameters"
    if unseen:
        yield f"without its vision tower: {unseen}"
    if "source" not in given:
        yield f"source: {model.source}, assumed; --source says another"
    absent = [f"{name} (--{name})" for name in ("licence", "parameters") if name not in given]
    if absent:
        yield f"not found: {', '.join(absent)}"
    for other in catalog.models.values():
        if other.id != id and _shapes(other.architecture) == _shapes(model.architecture):
            yield f"the same shapes as {other.id}: a name under aliases in models/{other.id}.yaml would do"


def _shapes(architecture: Architecture) -> Architecture:
    return replace(architecture, max_positions=0)
