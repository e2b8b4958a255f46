"""From the catalogs to `site/`: check, write what is generated, build strictly, check the result, then swap."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jinja2
import yaml

from calc.catalog import load
from calc.schema import InputError
from calc.site import advice, answers, cards, checks, engine, exports, fits, ids, languages, pages, searched
from calc.site.macros import Macros, PageError, Record, View

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Two engines read one mkdocs.yml: the second outlives the first.
ENGINES = ("mkdocs", "properdocs")
EXTERNAL = "external-links.json"
QUIET = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}


class BuildError(Exception):
    """A site that cannot be built; the text is what to print."""


def collect(docs: Path = DOCS, keep: Callable[[str, str], object] | None = None) -> Record:
    """Runs the macros of every page under `docs`, returns what they publish, and gives `keep` each Markdown."""
    record = Record()
    view = View("", "", {})
    environment = jinja2.Environment(
        # As mkdocs.yml gives them to mkdocs-macros; {#anchor} and {{ }} belong to Markdown and to quoted code.
        variable_start_string="[[",
        variable_end_string="]]",
        block_start_string="[%",
        block_end_string="%]",
        comment_start_string="[#",
        comment_end_string="#]",
        undefined=jinja2.StrictUndefined,
    )
    environment.globals.update(Macros(lambda: view, record).all())
    for path in sorted(docs.rglob("*.md")):
        source = path.relative_to(docs).as_posix()
        try:
            own, body = languages.front(path)
            view = View(source, languages.url(source), languages.meta(source, own, docs))
            text = environment.from_string(body).render(page=view)  # of which mkdocs-macros too gives `page.meta`
            if keep:
                keep(source, text)
        except (InputError, PageError, jinja2.TemplateError, yaml.YAMLError) as error:
            raise BuildError(f"docs/{source}: {' '.join(str(error).split())}") from error
    return record


def write(docs: Path = DOCS, *, preview: bool = False) -> Record:
    """Writes what is generated, all of it in places that git ignores: pages, data, the calculator's engine.

    A `preview` does without recommendations that a changed formula makes it compute anew.
    """
    fits.fill()
    advice.fill(preview=preview)
    searched.fill(docs)
    pages.write(docs)
    record = collect(docs)
    exports.save(docs / "data", exports.files(record))
    try:
        engine.write(docs / "assets" / "calculator")
    except FileNotFoundError as error:
        raise BuildError(
            f"{error.filename}: given no such file, allowed: after `make site`, which installs it"
        ) from None
    return record


def build(out: Path, engine: str = ENGINES[0]) -> None:
    """Builds the site into `out`; on any fault `out` stays as it was, and BuildError says why."""
    started = time.perf_counter()
    record = write()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".site-", dir=out.parent) as scratch:
        fresh = Path(scratch, "site")
        _mkdocs(["build", "--strict", "--config-file", str(ROOT / "mkdocs.yml"), "--site-dir", str(fresh)], engine)
        exports.add(fresh / "data", exports.markdown(record))
        found = checks.read(fresh)
        if faults := [*checks.faults(fresh, found), *ids.lost(fresh)]:
            raise BuildError("\n".join(faults))
        cards.write(fresh)
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


def serve(address: str) -> None:
    """Live preview at `address`; `main.py` reads calc and the catalogs again whenever they change."""
    load()  # a fault in the data is one line here, and a message in the log once the preview runs
    # calc/ is watched, so compiled files there would start one more build.
    os.environ |= {"HEADROOM_SERVE": "start", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    _mkdocs(["serve", "--config-file", str(ROOT / "mkdocs.yml"), "--dev-addr", address])
