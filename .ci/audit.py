"""Asks what is known against the packages of the lock files: `make audit`.

Usage: audit.py PIP_AUDIT NPM   (from the project's root; status 1: something is known)
A package that a database does not know is named, and a lock file that could not be asked about too: no answer is no
good news.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

DATABASES = ("pypi", "osv")  # the first that knows any of the packages is believed


class Answer(NamedTuple):
    """What is known of a lock file's packages: those asked about, those that no database knows, and the findings."""

    asked: int
    unknown: Sequence[str]
    found: Sequence[str]


def told(*command: str) -> Any:
    """The JSON that a command prints, whatever its status; None where it prints none."""
    try:
        return json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    except (OSError, json.JSONDecodeError):
        return None


def python(pip_audit: str, lock: Path) -> Answer | None:
    """What a database knows of the packages of a file of requirements; None where none answers."""
    options = ("--require-hashes", "--disable-pip", "--progress-spinner=off", "--format=json")
    for database in DATABASES:
        said = told(pip_audit, *options, "--vulnerability-service", database, "--requirement", str(lock))
        every = said["dependencies"] if said else []
        known = [package for package in every if "skip_reason" not in package]
        if known:
            unknown = [package["name"] for package in every if "skip_reason" in package]
            return Answer(len(known), unknown, [line for package in known for line in _known(package)])
    return None


def _known(package: Any) -> Iterator[str]:
    for one in package["vulns"]:
        mended = ", ".join(one["fix_versions"]) or "no version yet"
        yield f"{package['name']} {package['version']}: {one['id']}, mended in {mended}"


def node(npm: str, lock: Path) -> Answer | None:
    """What the registry knows of the packages of package-lock.json; None where it does not answer."""
    said = told(npm, "audit", "--package-lock-only", "--json")
    if not said or "vulnerabilities" not in said:
        return None
    packages = [name for name in json.loads(lock.read_text("utf-8"))["packages"] if name]
    return Answer(len(packages), [], [f"{name}: {one['severity']}" for name, one in said["vulnerabilities"].items()])


def main(pip_audit: str, npm: str) -> int:
    """A line for each lock file, and for each finding; 1 where there is one."""
    locks = sorted(Path("requirements").glob("*.txt"))
    answers = {lock: python(pip_audit, lock) for lock in locks}
    answers[Path("package-lock.json")] = node(npm, Path("package-lock.json"))
    for lock, answer in answers.items():
        if answer is None:
            print(f"{lock}: NOT ASKED: no database of vulnerabilities is reached from here")
            continue
        without = f"; NOT ASKED, as no database knows them: {', '.join(answer.unknown)}" if answer.unknown else ""
        print(f"{lock}: {answer.asked} packages asked about, {len(answer.found)} findings{without}")
        print("".join(f"  {line}\n" for line in answer.found), end="")
    if not any(answers.values()):
        print("Nothing was asked. This says nothing about the packages: run it where a database is reached.")
    return int(any(answer.found for answer in answers.values() if answer))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
