"""Lists the releases that the package index has and that calc does not know yet: `make versions`.

Usage: versions.py PIP...   (the command that asks the index, as configured; calc importable)
Known are each framework's newest release, and of each library the newest that has been read. What pip could not find
is named: no answer is no news.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from calc.base.versions import numbers
from calc.frameworks.registry import FRAMEWORKS
from calc.frameworks.releases import READ
from calc.frameworks.torch.trainers.registry import RELEASED

ASK = ("index", "versions", "--ignore-requires-python", "--disable-pip-version-check", "--retries=1", "--timeout=10")


def known() -> dict[str, str]:
    """The newest release that is known, by package."""
    trainers = {name: tuple(own.RELEASES)[-1] for name, own in RELEASED.items()}
    return {name: framework.KNOWN[-1] for name, framework in FRAMEWORKS.items()} | trainers | READ


def released(pip: Sequence[str], package: str) -> list[str]:
    """The releases of a package in the index, oldest first; none where pip finds no index, or not in it."""
    said = subprocess.run([*pip, *ASK, package], capture_output=True, text=True).stdout
    found = re.search(r"^Available versions: (.+)$", said, re.MULTILINE)
    return found[1].split(", ")[::-1] if found else []


def main(*pip: str) -> int:
    """A line for each package; a single one where nothing could be asked. 0, as a new release is no fault."""
    newest = known()
    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(newest, pool.map(lambda package: released(pip, package), newest), strict=True))
    if not any(found.values()):
        print("Nothing was asked: pip reaches no package index from here.")
        return 0
    for package, last in sorted(newest.items()):
        later = [version for version in found[package] if numbers(version) > numbers(last)]
        since = f"since then {', '.join(later)}" if later else "none since"
        print(f"{package}: known to {last}, {since if found[package] else 'NOT ASKED: the index does not have it'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
