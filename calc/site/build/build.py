"""From the catalogs to `site/`: check, write what is generated, build strictly, check the result, then swap."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from calc.answers import answers, fits, searched, topics
from calc.base.project import ROOT
from calc.base.reading import decode
from calc.check import check
from calc.site.build import cards, checks, exports, ids, pages, policy, search, strict, swap, theme
from calc.site.build.guide import Guide
from calc.site.calculator import browser_engine
from calc.site.faults import BuildError, short
from calc.site.macros import notices, rendered
from calc.site.macros.rendered import Pages
from calc.site.text import sources

DOCS = ROOT / "docs"
SOURCES = (
    "benchmarks",
    "calc",
    "docs",
    "hardware",
    "measurements",
    "models",
    "overrides",
    "requirements",
    "tests",
    "third-party",
)
EXTERNAL = "external-links.json"
UNDATED = "0"  # overrides/sitemap.xml leaves this date out


def write() -> None:
    """Writes the generated pages and the data, and nothing else."""
    with swap.alone(ROOT), writing():
        pass


@contextlib.contextmanager
def writing(docs: Path = DOCS, share: int = 1) -> Iterator[None]:
    """Writes the generated pages and the data, all in places that git ignores; `share` as in `topics.fill`.

    The data is complete only when the context ends: the files of tables are written while the caller works.
    """
    pages.write(docs)
    last = Guide(rendered.pages(docs), exports.FOLDER, share)
    if last.recall():
        yield
        return
    with _rendering(rendered.pages(docs), share):
        yield
    last.keep()


@contextlib.contextmanager
def _rendering(found: Pages, share: int) -> Iterator[None]:
    """Runs the macros of all pages, and writes the data meanwhile."""
    found.check()  # first, because what follows takes minutes
    fits.fill()
    topics.fill(share=share)
    searched.fill(sources.recipes(found.docs))
    with exports.Tables(exports.FOLDER) as tables:
        found.all(tables.write)
        yield
        tables.finish(found.record)


def build(out: Path, engine: str = strict.ENGINES[0], share: int = 1) -> None:
    """Builds the site into `out`; on any fault `out` stays as it was, and BuildError or InputError says why.

    With a `share` some of the recommendations are left out: see `topics.fill`.
    """
    started = time.perf_counter()
    if share < 1:
        raise BuildError(f"--share: given {share}, allowed: a whole number from 1")
    _refuse(out)
    check()
    out.parent.mkdir(parents=True, exist_ok=True)
    with swap.alone(ROOT, out.parent) as alone:
        if alone:
            swap.sweep(out.parent)
        with swap.scratch(out) as scratch:
            fresh = scratch / "fresh"
            _into(fresh, engine, share)
            swap.place(fresh, out)
    seconds = time.perf_counter() - started
    percent = 100 * answers.Clock.seconds / seconds
    print(
        f"{out.name}/ built in {seconds:.1f} s; {answers.Clock.seconds:.1f} s of it ({percent:.0f} %) "
        f"in calc, for {answers.Clock.asked:,} scenarios."
    )


def _refuse(out: Path) -> None:
    """Refuses an `out` that holds the sources or lies among them: the build replaces what is there."""
    lost = ROOT.is_relative_to(out) or any(out.is_relative_to(ROOT / name) for name in SOURCES)
    if lost or out.is_file():
        raise BuildError(f"dir: given {str(out)!r}, allowed: a folder of its own, as in site")


def _into(fresh: Path, engine: str, share: int) -> None:
    """Builds and checks the site in a folder that nobody reads yet."""
    os.environ.setdefault("SOURCE_DATE_EPOCH", _committed() or UNDATED)
    for template in sorted((ROOT / "overrides").rglob("*.html")):
        decode(template.read_bytes(), short(template))
    made = strict.Strict(engine, ROOT / "mkdocs.yml", fresh)  # so that its faults are reported before the computing
    try:
        browser_engine.write(DOCS / "assets" / "calculator")
    except FileNotFoundError as error:
        raise BuildError(
            f"{error.filename}: given no such file, allowed: after `make site`, which installs it"
        ) from None
    with writing(share=share):
        made.build()
        search.set_aside(fresh)
        cards.write(fresh)
    shutil.copytree(exports.FOLDER, fresh / "data")
    found = checks.read(fresh)
    if faults := [
        *checks.faults(fresh, found, ROOT),
        *policy.faults(fresh),
        *notices.faults(fresh),
        *ids.lost(fresh),
        *search.lost(fresh),
    ]:
        raise BuildError("\n".join(faults))
    theme.trim(fresh)  # last, because a style that others find fault with may be none that can be read
    (fresh / EXTERNAL).write_text(json.dumps(checks.external(found), indent=1) + "\n", "utf-8")


def _committed() -> str:
    """The time of the checked-out commit, in seconds since 1970; empty if it is not known.

    The clock is not used: the same sources give the same bytes on another day.
    """
    try:
        found = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return found.stdout.strip()
