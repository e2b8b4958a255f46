"""From the catalogs to `site/`: check, write what is generated, build strictly, check the result, then swap."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from calc.check import check
from calc.schema import InputError
from calc.site import answers, cards, checks, exports, fits, ids, notices, pages, policy, rendered, searched, topics
from calc.site import engine as calculator
from calc.site.guide import Guide
from calc.site.rendered import BuildError, Pages

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Two engines read one mkdocs.yml: the second outlives the first.
ENGINES = ("mkdocs", "properdocs")
EXTERNAL = "external-links.json"
QUIET = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}


@contextlib.contextmanager
def writing(docs: Path = DOCS) -> Iterator[None]:
    """Writes what is generated, all of it in places that git ignores: pages, the calculator's engine, data.

    The data is there at the end: the files of tables are written beside what is done meanwhile.
    """
    try:
        pages.write(docs)
        calculator.write(docs / "assets" / "calculator")
    except FileNotFoundError as error:
        raise BuildError(
            f"{error.filename}: given no such file, allowed: after `make site`, which installs it"
        ) from None
    last = Guide(rendered.pages(docs), exports.FOLDER)
    if last.recall():
        yield
        return
    with _rendering(rendered.pages(docs)):
        yield
    last.keep()


@contextlib.contextmanager
def _rendering(found: Pages) -> Iterator[None]:
    """Runs the macros of all pages, and writes the data meanwhile."""
    fits.fill()
    topics.fill()
    searched.fill(found.docs)
    with exports.Tables(exports.FOLDER) as tables:
        found.all(tables.write)
        yield
        tables.finish(found.record)


def build(out: Path, engine: str = ENGINES[0]) -> None:
    """Builds the site into `out`; on any fault `out` stays as it was, and BuildError or InputError says why."""
    started = time.perf_counter()
    check()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".site-", dir=out.parent) as scratch:
        fresh = Path(scratch, "site")
        with writing():
            _mkdocs(["build", "--strict", "--config-file", str(ROOT / "mkdocs.yml"), "--site-dir", str(fresh)], engine)
            cards.write(fresh)
        shutil.copytree(exports.FOLDER, fresh / "data")
        found = checks.read(fresh)
        if faults := [*checks.faults(fresh, found), *policy.faults(fresh), *notices.faults(fresh), *ids.lost(fresh)]:
            raise BuildError("\n".join(faults))
        (fresh / EXTERNAL).write_text(json.dumps(checks.external(found), indent=1) + "\n", "utf-8")
        if out.exists():
            out.rename(Path(scratch, "old"))
        fresh.rename(out)
    seconds = time.perf_counter() - started
    share = 100 * answers.Clock.seconds / seconds
    print(
        f"{out.name}/ built in {seconds:.1f} s; {answers.Clock.seconds:.1f} s of it ({share:.0f} %) "
        f"in calc, for {answers.Clock.asked:,} scenarios."
    )


def _mkdocs(arguments: list[str], engine: str = ENGINES[0]) -> None:
    """Runs the engine in this process, so that its macros find every scenario answered already."""
    os.environ.update(QUIET)
    # Only its INFO lines: a warning must still be heard, and counted by --strict.
    logging.getLogger("mkdocs.plugins.mkdocs_macros.util").setLevel(logging.WARNING)
    try:
        importlib.import_module(f"{engine}.__main__").cli.main(arguments, standalone_mode=False)
    except SystemExit as stopped:
        if stopped.code:
            raise BuildError(f"{engine} stopped; its messages above say why") from None
    except Exception as error:
        raise BuildError(f"{engine}: {error}") from error


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Turns what a writer of data or pages can get wrong into its line, and exit status 2."""
    try:
        yield
    except (InputError, BuildError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
