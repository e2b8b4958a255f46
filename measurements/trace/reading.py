"""File reading for the tracer: JSON and plain YAML; any fault is reported in one line that names the file.

`calc.base.reading` gives fuller messages, with packages that the tracer's environment lacks.
"""

import json
from pathlib import Path
from typing import Any

import yaml


class CaseError(ValueError):
    """Raised if the input cannot be traced; the message is one line."""


def mapping(path: Path) -> dict[str, Any]:
    """The fields of a file, JSON if its name ends in .json."""
    text = read_text(path)
    # YAML takes the 1e-05 of a config.json for a word
    found = [_json(text, str(path))] if path.suffix == ".json" else documents(text, str(path))
    return only(found, str(path))


def only(found: list[Any], where: str) -> dict[str, Any]:
    """The single document found, which must hold fields."""
    if len(found) != 1 or not isinstance(found[0], dict):
        given = f"{found[0]!r:.60}" if len(found) == 1 else f"{len(found)} documents"
        raise CaseError(f"{where}: given {given}, allowed: a mapping of fields")
    return found[0]


def regular(path: Path) -> Path:
    """The path, of a file that has an end: a device need not have one, and a pipe may never begin."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise CaseError(f"{path}: given what is no regular file, allowed: a file, or - for standard input")
    return path


def read_text(path: Path) -> str:
    """The text of a file."""
    try:
        return regular(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise CaseError(f"{path}: not UTF-8: {error.reason}") from None
    except OSError as error:
        raise CaseError(f"{path}: {str(error.strerror).lower()}") from None


def documents(text: str, where: str) -> list[Any]:
    """The documents of a YAML text."""
    try:
        # PyYAML raises errors of its own if a value does not fit its explicit tag
        if tag := next((t for t in yaml.scan(text, yaml.SafeLoader) if isinstance(t, yaml.TagToken)), None):
            raise yaml.MarkedYAMLError(problem="given a tag, allowed: plain values", problem_mark=tag.start_mark)
        return list(yaml.safe_load_all(text))
    except yaml.MarkedYAMLError as error:
        place = f"{where}:{error.problem_mark.line + 1}" if error.problem_mark else where
        raise CaseError(f"{place}: {' '.join(str(error.problem).split())}") from None
    except RecursionError:
        raise CaseError(f"{where}: nested too deep") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise CaseError(f"{where}: not YAML: {str(error).partition(chr(10))[0]}") from None


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise CaseError(f"{where}: nested too deep") from None
    except ValueError as error:
        raise CaseError(f"{where}: not JSON: {error}") from None
