"""Checks of a built site: leaked template code, unclosed elements, broken links, links that run, other sites asked."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from calc.base.reading import decode
from calc.site.build import styles
from calc.site.faults import short

LEAK = re.compile(
    r"Macro (?:Rendering|Syntax) Error|\{\{|\{%|\[\[ |no such element|\[\^[\w-]+\]"
)  # the last: a footnote
CELLS = ("td", "th")
# Elements whose end tag nothing else implies: one that is left out moves the rest of the page into it.
CLOSED = {"a", "article", "aside", "button", "code", "details", "div", "em", "figcaption", "figure", "footer", "form",
          "header", "label", "main", "nav", "ol", "pre", "section", "select", "span", "strong", "summary", "table",
          "ul"}  # fmt: skip
THEME = {"__toc", "__search", "__drawer"}  # ids of the theme's own switches, which some pages have twice or not at all
RAW = re.compile(r"<[^<>]*>")
NAMING = ("for", "aria-labelledby", "aria-describedby", "aria-controls", "aria-owns", "headers", "list", "form")
# Attributes that a browser loads on any element; attributes that only lead somewhere belong to links.
SOURCES = ("src", "poster", "background", "data", "manifest", "action", "formaction", "ping", "xlink:href",
           "attributionsrc")  # fmt: skip
SETS = ("srcset", "imagesrcset")
LINKS = ("a", "area")
CANDIDATE = re.compile(r"[\s,]*(\S*[^\s,])(?:\s+[^,]*)?(?:,|$)")
STYLED = (
    "style",
    "fill",
    "stroke",
    "filter",
    "mask",
    "clip-path",
    "cursor",
    "marker-start",
    "marker-mid",
    "marker-end",
)
# A <link> whose kinds are all among these is an address, not a request.
NO_REQUEST = {"canonical", "alternate", "prev", "next", "author", "license"}
SCHEMES = ("https", "http", "mailto")  # allowed in links
RUN = ("script", "iframe", "object", "embed")  # these run what they load: no page may give them `data:`
ANIMATED = ("values", "from", "to", "by")  # what an element of SVG makes of an attribute of another, a link's too
# Beside plain scripts, which a page's policy allows by their hashes, and data, which no browser runs.
SCRIPTS = re.compile(r"module|importmap|speculationrules|.*(?:java|ecma)script", re.I)
WATCHED = {"href", "srcdoc", "http-equiv", "type", *SOURCES, *SETS, *STYLED, *ANIMATED}
REFRESH = re.compile(r"^[\s\d.]*[;,]?\s*(?:url\s*=\s*)?[\"']?([^\"']*)", re.I)
UNSEEN = re.compile(r"^[\x00-\x20]+|[\x00-\x20]+$|[\t\r\n]+")  # characters that browsers strip from an address


class Page(HTMLParser):
    """The ids, links, loaded files, table cells and text of one page, and its content that no page may have."""

    def __init__(self, html: str) -> None:
        """Parses the page at once."""
        super().__init__(convert_charrefs=True)
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.refused: list[str] = []
        self.text: list[str] = []
        self.cells: list[str] = []
        self.named: list[str] = []
        self.headings = 0
        self._open: list[tuple[str, str]] = []
        self._raw = ""
        self._in_cell = False
        self.feed(html)
        self.close()
        self.refused += [f"leaves {tag} open" for _, tag in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Records ids, links and loads."""
        given = {k: v or "" for k, v in reversed(attrs)}  # the first of two attributes of one name counts
        if "id" in given:
            self.ids.append(given["id"])
        if tag in CLOSED:
            self._open.append((tag, self.get_starttag_text() or ""))
        self.headings += tag == "h1"
        self.named += [name for attribute in NAMING for name in given.get(attribute, "").split()]
        if tag == "base":
            self.refused.append("has a <base>, which moves every address of the page")
        if WATCHED & given.keys():
            self._note(tag, given)
        if tag in CELLS:
            self.cells.append("")
            self._in_cell = True
        if tag in ("script", "style"):
            self._raw = tag

    def _note(self, tag: str, given: Mapping[str, str]) -> None:
        """Records the addresses that an element links to or loads."""
        leads = tag in LINKS
        loads = [given[name] for name in SOURCES if name in given and not (leads and name == "xlink:href")]
        loads += [address for name in SETS if name in given for address in CANDIDATE.findall(given[name])]
        loads += [address for name in STYLED if name in given for address in styles.loaded(given[name])]
        if "href" in given and tag not in (*LINKS, "base"):
            addressed = tag == "link" and set(given.get("rel", "").casefold().split()) <= NO_REQUEST
            loads += [] if addressed else [given["href"]]
        if tag == "meta" and given.get("http-equiv", "").casefold() == "refresh":
            loads += REFRESH.findall(given.get("content", ""))
        if tag == "script" and "src" not in given and SCRIPTS.match(given.get("type", "").strip()):
            self.refused.append(f"has a script of type {given['type'][:80]}, which its policy forbids")
        for name in ANIMATED:
            if any(
                bare(each).casefold().startswith(("javascript:", "vbscript:"))
                for each in given.get(name, "").split(";")
            ):
                self.refused.append(f"makes {given[name][:80]} of a link, which would run")
        for load in loads:
            if tag in RUN and bare(load).casefold().startswith("data:"):
                self.refused.append(f"loads {load[:80]}, which would run")
        self.loads += loads
        self.links += [given[name] for name in ("href", "xlink:href") if leads and name in given]
        if "srcdoc" in given:
            inner = Page(given["srcdoc"])
            self.links, self.loads = self.links + inner.links, self.loads + inner.loads
            self.refused += inner.refused

    def handle_endtag(self, tag: str) -> None:
        """Ends a cell, a script, a style, or the element that was opened last."""
        if tag in CLOSED:
            self._close(tag)
        if tag in CELLS:
            self._in_cell = False
        if tag == self._raw:
            self._raw = ""

    def _close(self, tag: str) -> None:
        """Ends the element of this name that was opened last, and with it whatever was left open inside."""
        if tag not in [name for name, _ in self._open]:
            self.refused.append(f"closes <{tag}>, which is not open")
            return
        while (last := self._open.pop())[0] != tag:
            self.refused.append(f"leaves {last[1]} open")

    def handle_comment(self, data: str) -> None:
        """Refuses a comment that ends sooner for browsers than for this parser: what follows is hidden from here."""
        if data.startswith((">", "->")) or "--!>" in data:
            self.refused.append(f"has a comment that browsers end within {data.strip()[:80]!r}")

    def handle_data(self, data: str) -> None:
        """Records the text that a reader sees, and the addresses that a style loads."""
        if self._raw == "style":
            self.loads += styles.loaded(data)
        if not self._raw:
            self.text.append(data)
            if self._in_cell:
                self.cells[-1] += data


def bare(address: str) -> str:
    """An address as browsers read it."""
    return UNSEEN.sub("", address).replace("\\", "/")


def _split(address: str) -> SplitResult | None:
    try:
        return urlsplit(address)
    except ValueError:
        return None


def read(site: Path) -> dict[str, Page]:
    """Every page of the built site at `site`, by its path."""
    return {name: Page(text) for name, text in _texts(site, "html")}


def _texts(site: Path, kind: str) -> Iterator[tuple[str, str]]:
    for path in sorted(site.rglob(f"*.{kind}")):
        name = path.relative_to(site).as_posix()
        yield name, decode(path.read_bytes(), name)


def external(pages: Mapping[str, Page]) -> dict[str, list[str]]:
    """The pages that link to each external address: the build follows none, so the list is for looking at."""
    found: dict[str, list[str]] = {}
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            if urlsplit(link).netloc:
                found.setdefault(link, []).append(path)
    return dict(sorted(found.items()))


class Fault(NamedTuple):
    """A fault of a page: the message, the offending text as the page has it, and the key that tells it from others."""

    path: str
    words: str
    given: str
    key: object


def faults(site: Path, pages: Mapping[str, Page] | None = None, root: Path | None = None) -> Iterator[str]:
    """One line for each fault of the built site at `site`; a fault on many pages names the first.

    With the project's `root` a line names the source file and line, if the offending text occurs there literally.
    """
    found: dict[object, list[Fault]] = {}
    for fault in _Checked(site, pages or read(site)).all():
        found.setdefault(fault.key, []).append(fault)
    for first, *more in found.values():
        others = len({fault.path for fault in more} - {first.path})
        yield f"{_place(first, root)}: {first.words}{f' ({others} more pages do)' if others else ''}"


def _place(fault: Fault, root: Path | None) -> str:
    """The source file and line with the offending text; else the page."""
    for path in _sources(fault.path, root) if root and fault.given else ():
        for number, line in enumerate(path.read_text("utf-8").splitlines() if path.is_file() else (), 1):
            if fault.given in line:
                return f"{short(path)}:{number}"
    return fault.path


def _sources(path: str, root: Path) -> list[Path]:
    """The files in which a fault of a page or style may arise: its own sources, and those that all pages share."""
    page, (language, _, rest) = path.removesuffix(".html"), path.removesuffix(".html").partition("/")
    own = [root / "docs" / name for name in (path, f"{page}.md", f"{rest}.{language}.md")]
    return [*own, root / "mkdocs.yml", *sorted((root / "overrides").rglob("*.html"))]


class _Checked:
    """All checks of one site."""

    def __init__(self, site: Path, pages: Mapping[str, Page]) -> None:
        self.site, self.top, self.pages = site, site.resolve(), pages
        self.ids = {path: set(page.ids) for path, page in pages.items()}
        self.target = cache(self._target)  # cached: every page has the same navigation

    def all(self) -> Iterator[Fault]:
        """The faults of all pages, then of the drawings and the styles beside them."""
        for path, page in self.pages.items():
            yield from self._page(path, page)
        for name, text in _texts(self.top, "svg"):
            yield from self._loads(name, Page(text).loads)
        for name, text in _texts(self.top, "css"):
            yield from self._loads(name, styles.loaded(text))

    def _page(self, path: str, page: Page) -> Iterator[Fault]:
        if leak := LEAK.search("".join(page.text)):
            yield Fault(path, f"template code leaked: {leak.group()!r}", leak.group(), (path, "leak"))
        if len(self.ids[path]) < len(page.ids):
            for one in sorted({i for i in page.ids if page.ids.count(i) > 1} - THEME):
                yield Fault(path, f"id {one!r} given twice", one, (path, one))
        if page.headings > 1:
            yield Fault(path, f"has {page.headings} headings of the first level, allowed: 1", "", (path, "h1"))
        for name in sorted(set(page.named) - self.ids[path] - THEME):
            yield Fault(path, f"names the id {name!r}, which no element of it has", name, ("names", name))
        for words in page.refused:
            yield Fault(path, words, next(iter(RAW.findall(words)), "data:"), words)
        yield from self._loads(path, page.loads)
        for link in page.links:
            yield from self._link(path, link)

    def _loads(self, path: str, loads: list[str]) -> Iterator[Fault]:
        """The loads of a page, a style or a drawing that go to another site, or to a file that does not exist."""
        for load in loads:
            address = bare(load)
            parts = _split(address)
            if parts is None or parts.netloc or parts.scheme not in ("", "data"):
                yield Fault(path, f"loads {load} from elsewhere", load, ("elsewhere", address))
            elif not parts.scheme and parts.path and path != "404.html":
                leads, there = self.target((self.top / path).parent, parts.path)
                if not there:
                    yield Fault(path, f"loads {load}, which is not there", load, ("load", leads))

    def _link(self, path: str, link: str) -> Iterator[Fault]:
        address = bare(link)
        parts = _split(address)
        if parts is None or (parts.scheme and parts.scheme not in SCHEMES):
            allowed = f"allowed: a page, {', '.join(SCHEMES)}"
            yield Fault(path, f"links to {link[:80]}, {allowed}", link, ("scheme", address))
        elif (
            not parts.scheme and not parts.netloc and path != "404.html"
        ):  # 404.html is served from any address, so its links are absolute
            leads, there = self.target((self.top / path).parent, parts.path) if parts.path else (path, True)
            if not there:
                yield Fault(path, f"links to {link}, which is not there", link, ("link", leads))
            elif parts.fragment and leads in self.ids and unquote(parts.fragment) not in self.ids[leads]:
                yield Fault(path, f"links to {link}, which has no such anchor", link, (leads, parts.fragment))

    def _target(self, folder: Path, address: str) -> tuple[str, bool]:
        """The path, relative to the site's top, that an address in a folder leads to, and True if it exists."""
        found = Path(os.path.normpath(folder / unquote(address)))
        if not found.is_relative_to(self.top):
            return str(found), False
        try:
            found = found / "index.html" if found.is_dir() else found
            return found.relative_to(self.top).as_posix(), found.exists()
        except (OSError, ValueError):  # not a valid file name
            return str(found), False
