"""Rules of the house that the linters cannot express."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The YAML reader and the validator at the catalog's edge: the same files must run in a reader's browser.
ALLOWED = {"calc", "yaml", "fastjsonschema"} | sys.stdlib_module_names
# What answers nothing may use what its user has: `lengths --tokenizer` counts tokens with the user's own Transformers.
USERS = {"data_lengths.py": {"transformers"}}


def imported(path: Path) -> set[str]:
    """The top-level packages that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_calc_below_the_site_needs_nothing_but_the_standard_library_a_yaml_reader_and_a_validator() -> None:
    files = [p for p in (ROOT / "calc").rglob("*.py") if "site" not in p.relative_to(ROOT).parts]
    assert len(files) > 20
    assert {p.name: imported(p) - ALLOWED for p in files if imported(p) - ALLOWED} == USERS


def test_nobody_reads_what_a_refusal_says() -> None:
    """Its parts are data; only translations match lines."""
    for path in (ROOT / "calc").rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
        asked = [node for node in calls if ast.unparse(node.func).startswith(("re.", "str(error)."))]
        texts = [part.value for node in asked for part in ast.walk(node) if isinstance(part, ast.Constant)]
        read = [text for text in texts if isinstance(text, str) and re.search(r": given|, allowed", text)]
        assert "i18n" in path.parts or not read, path


def test_lock_files_pin_by_hash_and_name_no_address() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        text = path.read_text("utf-8")
        pins = [line for line in text.splitlines() if "==" in line]
        assert pins
        assert "://" not in text and "index-url" not in text
        assert all(line.rstrip().endswith("\\") for line in pins)


def test_what_contributors_are_told_to_touch_is_there() -> None:
    """A path that has moved would send a newcomer nowhere."""
    told = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    paths = re.findall(r"`((?:calc|tests|hardware|models|docs)(?:/[\w./-]+)?)`", told) + re.findall(
        r"\]\(([\w./-]+)\)", told
    )
    assert len(paths) > 25
    assert [path for path in paths if not (ROOT / path).exists()] == []
