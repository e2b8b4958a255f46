"""What a built site must never contain: leaked template code, broken links, requests to anyone else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LEAK = re.compile(r"Macro (?:Rendering|Syntax) Error|\{\{|\{%|\[\[ |no such element")
LOADS = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "link": "href",
}
CELLS = ("td", "th")
# A <link> of these kinds is an address, not a request.
NO_REQUEST = {"canonical", "alternate", "prev", "next", "author", "license"}


class Page(HTMLParser):
    """The ids, links, loaded files, table cells and text of one page."""

    def __init__(self, html: str) -> None:
        """Parses at once."""
        super().__init__(convert_charrefs=True)
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []
        self.cells: list[str] = []
        self._raw = 0
        self._in_cell = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes ids, links and loads."""
        given = {k: v or "" for k, v in attrs}
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADS and LOADS[tag] in given and not NO_REQUEST & set(given.get("rel", "").split()):
            self.loads.append(given[LOADS[tag]])
        if tag in CELLS:
            self.cells.append("")
            self._in_cell = True
        if tag in ("script", "style"):
            self._raw += 1

    def handle_endtag(self, tag: str) -> None:
        """Leaves a cell, a script or a style."""
        if tag in CELLS:
            self._in_cell = False
        if tag in ("script", "style"):
            self._raw -= 1

    def handle_data(self, data: str) -> None:
        """Notes the text that a reader sees."""
        if not self._raw:
            self.text.append(data)
            if self._in_cell:
                self.cells[-1] += data


def read(site: Path) -> dict[str, Page]:
    """Every page of the built site at `site`, by its path."""
    return {p.relative_to(site).as_posix(): Page(p.read_text("utf-8")) for p in sorted(site.rglob("*.html"))}


def external(pages: Mapping[str, Page]) -> dict[str, list[str]]:
    """The pages that link to each address elsewhere: nothing follows them at build, so that they can be looked at."""
    found: dict[str, list[str]] = {}
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            if urlsplit(link).netloc:
                found.setdefault(link, []).append(path)
    return dict(sorted(found.items()))


def faults(site: Path, pages: Mapping[str, Page] | None = None) -> Iterator[str]:
    """One line for each fault of the built site at `site`."""
    pages = pages or read(site)
    ids = {path: set(page.ids) for path, page in pages.items()}
    top = site.resolve()

    @cache  # every page has the same navigation
    def target(folder: Path, address: str) -> tuple[Path, bool]:
        """What an address leads to from a folder, and whether it is there."""
        found = (folder / unquote(address)).resolve()
        found = found / "index.html" if found.is_dir() else found
        return found, found.exists()

    for path, page in pages.items():
        folder = (top / path).parent
        if leak := LEAK.search("".join(page.text)):
            yield f"{path}: template code leaked: {leak.group()!r}"
        doubled = (
            sorted({i for i in page.ids if page.ids.count(i) > 1} - {"__toc", "__search", "__drawer"})
            if len(ids[path]) < len(page.ids)
            else []
        )
        for one in doubled:
            yield f"{path}: id {one!r} given twice"
        for load in page.loads:
            if urlsplit(load).scheme not in ("", "data") or load.startswith("//"):
                yield f"{path}: loads {load} from elsewhere"
            elif not urlsplit(load).scheme and path != "404.html" and not target(folder, urlsplit(load).path)[1]:
                yield f"{path}: loads {load}, which is not there"
        if path == "404.html":  # served from anywhere, so its links are absolute
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            leads, there = target(folder, parts.path) if parts.path else (top / path, True)
            if not there:
                yield f"{path}: links to {link}, which is not there"
            elif parts.fragment and leads.suffix == ".html":
                known = ids.get(leads.relative_to(top).as_posix(), set())
                if unquote(parts.fragment) not in known:
                    yield f"{path}: links to {link}, which has no such anchor"
