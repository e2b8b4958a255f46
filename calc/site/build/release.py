"""Making a version, and publishing it beside the others.

`make release VERSION=1.2` compares the working tree with the tag of the last version, and writes the new version into
its files: pyproject.toml, CITATION.cff, docs/changelog/1.2.json. The maintainer looks, commits and tags. `make publish`
then builds the tagged version and puts it on the branch gh-pages as 1.2/, with `latest` for the newest; it pushes
nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import tomllib
from datetime import date
from pathlib import Path

from calc.base.project import ROOT
from calc.site.build import build, diff, exports, ids
from calc.site.faults import BuildError
from calc.site.views.catalog import changelog
from calc.site.views.catalog.changelog import Release

BRANCH, NEWEST = "gh-pages", "latest"


def current() -> str:
    """The version of this tree."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"])


def make(version: str) -> None:
    """Writes a new version into the tree."""
    if not re.fullmatch(r"\d+(\.\d+)*", version):
        raise BuildError(f"VERSION: given {version!r}, allowed: numbers and dots, as in 1.2")
    past = changelog.releases()
    if past and changelog.order(version) <= changelog.order(past[0].version):
        raise BuildError(f"VERSION: given {version!r}, allowed: more than {past[0].version}, the last release")
    before = past[0].version if past else None
    changes = diff.since(f"v{before}")[0] if before else []
    today = date.today().isoformat()
    path = changelog.save(Release(version, today, before, tuple(tuple(change) for change in changes)))
    ids.add(exports.FOLDER)
    _write("pyproject.toml", r'^version = ".*"$', f'version = "{version}"')
    _write("CITATION.cff", r"^version: .*$", f"version: {version}")
    _write("CITATION.cff", r"^date-released: .*$", f"date-released: {today}")
    print(
        f"{path.relative_to(ROOT)}: {len(changes)} changes since {before or 'the beginning'}. Look at them, and then:"
    )
    print(f'git add -A && git commit -m "Version {version}" && git tag v{version} && make publish')


def _write(name: str, pattern: str, text: str) -> None:
    path = ROOT / name
    path.write_text(re.sub(pattern, text, path.read_text("utf-8"), count=1, flags=re.M), "utf-8")


def publish() -> None:
    """Builds the tagged version that is checked out, and commits it to the branch gh-pages."""
    from mike import commands, git_utils

    version = current()
    if f"v{version}" not in _git("tag", "--points-at", "HEAD").split() or _git("status", "--porcelain"):
        raise BuildError(f"what is checked out is not the tag v{version}, unchanged: make publish takes nothing else")
    base = os.environ.get("HEADROOM_SITE_URL", "")
    os.environ |= {"HEADROOM_VERSION": version, "HEADROOM_VERSION_PROVIDER": "mike"}
    if base:  # search engines should find the newest version of a page
        os.environ["HEADROOM_CANONICAL_URL"] = f"{base}{NEWEST}/"
    with tempfile.TemporaryDirectory(prefix="headroom-") as scratch:
        site = Path(scratch, "site")
        done = {"site_dir": str(site), "use_directory_urls": False}
        with commands.deploy(
            done, version, aliases=[NEWEST], update_aliases=True, branch=BRANCH, message=f"Version {version}"
        ):
            build.build(site)
    with contextlib.suppress(git_utils.GitEmptyCommit):  # it is the default already
        commands.set_default(NEWEST, branch=BRANCH, message=f"{NEWEST} is what a reader finds")
    print(f"Version {version} is on the branch {BRANCH}: push it where the site is served from.")
    if not base:
        print(
            "HEADROOM_SITE_URL was not set: no citation has an address, and the version selector leads to home pages."
        )


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
