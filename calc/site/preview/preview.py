"""Live preview: each page is made when a browser asks for it, from the files as they are at that moment.

A change discards the pages made so far and tells the browsers, which ask for the page that they show: only that page is
made anew, so it is there within seconds however large the guide is. A page shows what `make site` publishes, except for
answers that take minutes: if none are kept, the page says so. Search finds what the last `make site` wrote.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable
from html import escape
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2
from mkdocs.commands import build as engine
from mkdocs.config import load_config
from mkdocs.livereload import LiveReloadServer
from mkdocs.structure.files import File, InclusionLevel, get_files, set_exclusions
from mkdocs.structure.nav import get_navigation
from mkdocs.structure.pages import Page

from calc.answers.processes import unheard
from calc.base.project import ROOT
from calc.catalog.catalog import load
from calc.site.build.policy import reloading
from calc.site.build.search import LIGHT, WHOLE
from calc.site.faults import BuildError
from calc.site.i18n.languages import LANGUAGES
from calc.site.preview import asked
from calc.site.text.sources import front

DOCS = ROOT / "docs"
CODE = ("calc", "hardware", "models", "measurements")  # sources of the numbers
EMPTY = '{"config":{"lang":["en"],"separator":"\\\\s+","pipeline":[],"fields":{"title":{}}},"docs":[]}'  # of a search
CALCULATOR, DATA, SEARCH = "assets/calculator/", "data/", "search/"
TITLE = re.compile(r"^# +(.*?)(?: +\{.*\})?$", re.M)
log = logging.getLogger("mkdocs.preview")


class Edition:
    """The guide in one language, as the site engine sees it before any page is rendered."""

    def __init__(self, language: str, out: Path, compiled: jinja2.BytecodeCache) -> None:
        """Reads mkdocs.yml and the names of all files, in the same steps as mkdocs' own build."""
        config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(out), strict=False)
        plugins = config.plugins
        plugins.on_startup(command="serve", dirty=False)
        vars(plugins["i18n"])["current_language"] = language or None
        self.config = config = plugins.on_config(config)
        plugins.on_pre_build(config=config)
        files, env = get_files(config), config.theme.get_env()
        env.bytecode_cache = compiled
        files.add_files_from_theme(env, config)
        self.files = plugins.on_files(files, config=config)
        set_exclusions(self.files, config)
        self.nav = plugins.on_nav(get_navigation(self.files, config), config=config, files=self.files)
        self.env = plugins.on_env(env, config=config, files=self.files)
        for page in self.nav.pages:
            if page.title is None:  # the engine sets it only on rendering, but other pages' menus name it
                own, text = front(DOCS / page.file.src_uri)
                found = TITLE.search(text)
                page.title = own.get("title") or (found[1] if found else None)
        self.places = {file.dest_uri: file for file in self.files}

    def make(self, file: File) -> None:
        """Writes a page, or copies any other file."""
        if not file.is_documentation_page():
            file.copy_file()
            return
        log.info(f"Making {file.src_uri}")
        page = file.page or Page(None, file, self.config)
        engine._populate_page(page, self.config, self.files)
        shown = self.files.documentation_pages(inclusion=InclusionLevel.is_in_serve)
        engine._build_page(page, self.config, shown, self.nav, self.env)


class Preview(LiveReloadServer):
    """A server that makes pages as they are requested."""

    def __init__(self, host: str, port: int, out: Path) -> None:
        """Serves from the folder `out`, which fills as pages are requested."""
        super().__init__(self.forget, host, port, str(out))
        self.RequestHandlerClass = asked.Handler
        self.out = out
        self._bound = host
        self._lock = threading.Lock()
        self._made: dict[str, bytes] = {}  # for each requested path, the fault page to show instead, if any
        self._editions: dict[str, Edition] = {}
        self._compiled = jinja2.FileSystemBytecodeCache(tempfile.mkdtemp(dir=out.parent))
        self._seen = _state()
        self._helpers: list[SpawnProcess] = []
        for path in (DOCS, ROOT / "mkdocs.yml", *load_config(str(ROOT / "mkdocs.yml")).watch):
            self.watch(str(path))

    def forget(self) -> None:
        """Discards what was made, so that it is made again on request; and calc's modules if code or data changed."""
        with self._lock:
            self._made.clear()
            self._editions.clear()
            if (now := _state()) != self._seen:
                self._seen = now
                for helper in self._helpers:
                    helper.terminate()
                self._helpers = []
                for name in [n for n in sys.modules if n == "calc" or n.startswith("calc.")]:
                    del sys.modules[name]
            if rendered := sys.modules.get("calc.site.macros.rendered"):
                rendered.pages.cache_clear()

    def serve_request(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        """Answers a request, with the file made from its sources as they are now."""
        try:
            path = asked.place(environ, self._bound)
            with self._lock:
                fault = self._make(path) if path else b""
        except asked.Refused as refused:
            start_response(str(refused), [("Content-Type", "text/plain"), ("Allow", ", ".join(asked.METHODS))])
            return [str(refused).encode()]
        if fault:
            start_response("200 OK", [("Content-Type", "text/html; charset=utf-8")])
            found: Iterable[bytes] = [self._inject_js_into_html(fault, self._visible_epoch)]
        else:
            found = super().serve_request(environ, start_response)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else found

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores a reader that goes away in the middle of an answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def _inject_js_into_html(self, content: bytes, epoch: float) -> bytes:
        """The page with the script that reloads it, and a policy that allows that script."""
        return reloading(super()._inject_js_into_html(content, epoch))  # type: ignore[no-untyped-call]

    def _catch_up(self) -> None:
        """Has other processes answer the cells that pages have left out; then browsers reload those pages."""
        fits, count = _fresh("answers.fits"), os.cpu_count() or 1
        files = [self.out.parent / f"share-{n}" for n in range(count)]
        spawn = get_context("spawn")
        helpers = [spawn.Process(target=fits.share, args=(n, count, file), daemon=True) for n, file in enumerate(files)]
        with unheard():
            for helper in helpers:
                helper.start()
        self._helpers = helpers

        def take() -> None:
            for helper in helpers:
                helper.join()
            with self._lock:
                if self._helpers is not helpers or _state() != self._seen:
                    return  # their answers are from files that have changed since
                self._helpers = []
                if any(helper.exitcode for helper in helpers):
                    log.error("What fits where could not be computed: the messages above say why.")
                    return
                fits.take(files)
            with self._rebuild_cond:
                self._want_rebuild = True
                self._rebuild_cond.notify_all()

        threading.Thread(target=take, daemon=True).start()

    def _make(self, path: str) -> bytes:
        """Makes the file at `path` if the site has one; returns the page to show instead if that fails."""
        target = os.path.realpath(self.out / path)
        if not target.startswith(f"{os.path.realpath(self.out)}/"):
            raise asked.Refused("404 Not Found")
        if path in self._made:
            return self._made[path]
        if os.path.isfile(target):
            os.unlink(target)  # its source may be gone
        fault = b""
        try:
            self._write(path)
        except Exception as error:
            # somebody is about to mend this file: its message is shown in place of its page
            log.error(str(error), exc_info=None if _known(error) else error)
            fault = FAULT.format(escape(str(error) or repr(error))).encode()
        if fault or os.path.isfile(target):
            self._made[path] = fault
        if (answers := sys.modules.get("calc.answers.answers")) and answers.Preview.behind and not self._helpers:
            self._catch_up()
        return fault

    def _edition(self, path: str) -> Edition:
        language = next((name for name in LANGUAGES if path.startswith(f"{name}/")), "")
        if language not in self._editions:
            _fresh("site.build.pages").write(DOCS)
            self._editions[language] = Edition(language, self.out, self._compiled)
        return self._editions[language]

    def _write(self, path: str) -> None:
        _fresh("answers.answers").Preview.on = True
        if path.startswith(DATA):
            self._export(path.removeprefix(DATA))
        elif path.startswith(CALCULATOR):
            _fresh("site.calculator.browser_engine").write(self.out / CALCULATOR)
        elif path.startswith(SEARCH):
            self._search(path)
        else:
            edition = self._edition(path)
            if found := edition.places.get(path):
                edition.make(found)

    def _export(self, path: str) -> None:
        """Writes the files of a table, or the catalog; files about all tables are left out."""
        exports, published = _fresh("site.build.exports"), _fresh("answers.published")
        pages, name = _fresh("site.macros.rendered").pages(DOCS), Path(path)
        made: dict[str, str | bytes] = {}
        if path == "catalog.json":
            made = {path: published.as_json(published.catalog())}
        elif path.startswith("tables/"):
            if name.stem not in pages.record.tables and _published(name.stem):
                pages.all()
            if name.stem in pages.record.tables:
                twins = exports.twins(*pages.record.tables[name.stem])
                made = {f"tables/{name.stem}.{kind}": content for kind, content in twins.items()}
        exports.add(self.out / DATA, made)

    def _search(self, path: str) -> None:
        """Copies a file of the search index from the last site; without one, nothing is found."""
        target, last = self.out / path, ROOT / "site" / path
        if os.path.isfile(last):  # a name that is too long for a file is none
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(last, target)
        elif path in (LIGHT, WHOLE):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(EMPTY, "utf-8")


FAULT = "<!doctype html><html lang=en><title>Fault</title><body><h1>This page cannot be made</h1><pre>{}</pre></body>"


def _known(error: Exception) -> bool:
    """True for a fault of data or pages, reported in one line; matched by name, as its class may be reimported."""
    return any(kind.__name__ in ("InputError", "BuildError", "CatalogError") for kind in type(error).__mro__)


def _fresh(name: str) -> ModuleType:
    """A module of calc, freshly imported after a change."""
    return import_module(f"calc.{name}")


def _published(table: str) -> bool:
    """True if some page may have a table: it was published once, or nothing says which were."""
    known = _fresh("site.build.ids").known()
    return not known or table in known


def _state() -> int:
    """A hash that changes when a file behind numbers or words, other than a page, is edited, added or removed."""
    found = [path for name in CODE for path in (ROOT / name).rglob("*.*") if path.suffix != ".pyc"]
    found += [path for path in DOCS.iterdir() if path.suffix == ".yaml"]
    return hash(tuple(sorted((str(path), path.stat().st_mtime_ns) for path in found)))


def serve(address: str) -> None:
    """Serves at `address` until it is stopped; raises a fault that the data has at the start."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise BuildError(f"--address: given {address!r}, allowed: host:port, as in 127.0.0.1:8000")
    _ = load().places  # of records, which that validates
    _fresh("site.build.pages").write(DOCS)  # before the watch starts
    # what is compiled is read, and nothing written, because calc/ is watched: a change compiles the changed file alone
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    logging.basicConfig(format="%(levelname)-7s -  %(message)s")
    logging.getLogger("mkdocs").setLevel(logging.INFO)
    logging.getLogger("mkdocs.plugins").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="headroom-") as scratch:
        out = Path(scratch, "site")
        out.mkdir()
        server = Preview(host.strip("[]"), int(port), out)
        for end in (signal.SIGINT, signal.SIGTERM):  # the two ways in which a preview ends
            signal.signal(end, signal.default_int_handler)
        try:
            server.serve()  # type: ignore[no-untyped-call]
        except KeyboardInterrupt:
            pass
        except OSError as error:
            raise BuildError(f"--address: given {address!r}, allowed: one that is free ({error.strerror})") from None
        finally:
            server.shutdown()
