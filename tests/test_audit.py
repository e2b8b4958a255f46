"""`make audit`: what a database knows is told, and what could not be asked about is never taken for good news."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
CLEAN = {"name": "yaml", "version": "1.0", "vulns": []}
HIT = {"name": "jinja", "version": "2.0", "vulns": [{"id": "CVE-1", "fix_versions": ["2.1"]}]}
STRANGE = {"name": "torch", "skip_reason": "not found"}
SOUND: dict[str, Any] = {"vulnerabilities": {}}


def told(tmp_path: Path, packages: list[Any] | None, npm: Any) -> tuple[int, list[str]]:
    """The status and the lines of an audit where pip-audit and npm say this; None stands for no database."""
    commands = []
    for name, said in (("pip-audit", packages and {"dependencies": packages}), ("npm", npm)):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\ncat <<'X'\n{json.dumps(said) if said else 'unreachable'}\nX\nexit 1\n", "utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        commands.append(str(path))
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/site.txt").write_text("yaml==1.0\n", "utf-8")
    (tmp_path / "package-lock.json").write_text('{"packages": {"": {}, "node_modules/pyodide": {}}}', "utf-8")
    ran = subprocess.run(
        [sys.executable, ROOT / ".ci/audit.py", *commands], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.stderr == ""
    return ran.returncode, ran.stdout.splitlines()


NOT_ASKED = ": NOT ASKED: no database of vulnerabilities is reached from here"
NPM = "package-lock.json: 1 packages asked about, 0 findings"


@pytest.mark.parametrize(
    ("packages", "npm", "status", "lines"),
    [
        ([CLEAN], SOUND, 0, ["requirements/site.txt: 1 packages asked about, 0 findings", NPM]),
        (
            [CLEAN, HIT], SOUND, 1,
            ["requirements/site.txt: 2 packages asked about, 1 findings", "  jinja 2.0: CVE-1, mended in 2.1", NPM],
        ),
        (
            [CLEAN, STRANGE], {"vulnerabilities": {"left-pad": {"severity": "high"}}}, 1,
            [
                "requirements/site.txt: 1 packages asked about, 0 findings"
                "; NOT ASKED, as no database knows them: torch",
                "package-lock.json: 1 packages asked about, 1 findings", "  left-pad: high",
            ],
        ),
        # an index without the database answers that it knows no package, and pip-audit then finds nothing
        ([STRANGE], SOUND, 0, [f"requirements/site.txt{NOT_ASKED}", NPM]),
        (
            None, {"message": "405 Method Not Allowed"}, 0,
            [
                f"requirements/site.txt{NOT_ASKED}", f"package-lock.json{NOT_ASKED}",
                "Nothing was asked. This says nothing about the packages: run it where a database is reached.",
            ],
        ),
    ],
    ids=["nothing known", "a finding", "partly unknown", "unknown alone", "no database"],
)  # fmt: skip
def test_audit_tells_what_is_known_and_what_could_not_be_asked(
    tmp_path: Path, packages: list[Any] | None, npm: Any, status: int, lines: list[str]
) -> None:
    assert told(tmp_path, packages, npm) == (status, lines)
