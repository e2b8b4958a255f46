"""Additions to the catalog: a Hugging Face config.json becomes a file of models/, a GPU's YAML one of hardware/gpus/.

A file is put in its place, whole, only if the catalog with it in it passes every rule of `calc.check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from calc.add import gpus, models
from calc.add.draft import Draft, tried
from calc.base import project
from calc.base.reading import parse_mapping, read_input
from calc.base.schema import InputError, show
from calc.base.writing import replace
from calc.check import folders


def add(path: str, given: Mapping[str, str], *, over: bool = False, root: Path | None = None) -> str:
    """Adds the file at `path` (`-`: standard input) to the catalog of the project at `root`, and says what was done.

    `given` says what the config of a model does not: see `models.OPTIONS`. A file that is there already is replaced
    only if `over`. Raises InputError, with nothing written, for what the catalog cannot take.
    """
    root = root or project.ROOT
    draft, where = _draft(path, given)
    if folders.misnamed(f"{draft.id}.yaml", ".yaml"):
        wanted = "lower-case letters and digits, with . or - or _ between them"
        raise InputError(f"{where}: id: given {show(draft.id)}, allowed: {wanted}")
    place = root / draft.where
    if place.exists() and not over:
        raise InputError(
            f"{where}: id: given {show(draft.id)}, allowed: one that {draft.where} does not have; --replace"
        )
    catalog = tried(draft, root, where)
    try:
        replace(place, draft.raw)
    except OSError as error:
        raise InputError(f"{draft.where}: {str(error.strerror).lower()}; nothing was added") from None
    lines = (f"wrote {draft.where}", *draft.told(catalog), f"catalog {catalog.version}: all valid")
    return "".join(f"{line}\n" for line in lines)


def _draft(path: str, given: Mapping[str, str]) -> tuple[Draft, str]:
    """The draft of the file at `path`, and the file's name in messages."""
    raw, where = read_input(path)
    data = parse_mapping(raw, where)
    if path.endswith(".json") or "model_type" in data:
        return models.draft(data, where, given), where
    if given:
        raise InputError(f"{where}: given --{min(given)} with the file of a GPU, allowed: only with a config.json")
    return gpus.draft(data, raw, where), where
