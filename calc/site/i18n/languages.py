"""Pages in other languages: `index.zh.md` is a translation of `index.md`, and takes its jobs and tables from it.

A translation has its own title, description, labels and prose. Jobs, and the change that a page is about, are read from
the page that it translates, so a number cannot differ between languages; a table keeps its id, and only the original is
exported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from calc.site.text.sources import CHANGES, JOBS, SPEAK, Source, front

LANGUAGES = ("zh",)
CALL = re.compile(r"\[\[ (\w+)\((.*?)\) \]\]", re.S)
NAMED = re.compile(r'"([a-z0-9][\w.:#/+-]*)"')  # a job, a table, a GPU; captions are translated
OWN = "english"  # the one macro that only a translation has


def split(source: str) -> tuple[str, str]:
    """A page's source without its language, and the language: `("index.md", "zh")`, `("index.md", "")`."""
    stem, _, language = source.removesuffix(".md").rpartition(".")
    return (f"{stem}.md", language) if language in LANGUAGES else (source, "")


def url(source: str) -> str:
    """The address of a page within the site."""
    original, language = split(source)
    address = original.removesuffix(".md") + ".html"
    return f"{language}/{address}" if language else address


def meta(source: str, own: MutableMapping[str, Any], docs: Path) -> MutableMapping[str, Any]:
    """A page's front matter; a translation has the jobs of its original."""
    original, language = split(source)
    if not language:
        return own
    shared, _ = front(docs / original)
    return (
        {name: shared[name] for name in SPEAK if name in shared}
        | dict(own)
        | {name: shared[name] for name in (*JOBS, *CHANGES) if name in shared}
    )


def translated(language: str, docs: Path) -> frozenset[str]:
    """The addresses of the pages that `docs` has in a language; none for English, which is nobody's translation."""
    found = docs.rglob(f"*.{language}.md") if language else ()
    return frozenset(url(f"{path.relative_to(docs)}") for path in found)


Call = tuple[str, tuple[str, ...]]  # a macro, and the names among its arguments


def calls(page: Source) -> dict[Call, int]:
    """The macro calls of a page, each with the line of its first occurrence."""
    found: dict[Call, int] = {}
    for call in CALL.finditer(page.text):
        if call[1] != OWN:
            asked = call[1], tuple(NAMED.findall(call[2]))
            found.setdefault(asked, page.line + page.text.count("\n", 0, call.start()))
    return found


def strays(original: Source, translation: Source) -> Iterator[tuple[int, str]]:
    """The first macro call in which a translation differs from its original: a line of it, and what differs there.

    A call that one lacks and the other has is one difference, of the same macro where there are several.
    """
    there, here = calls(original), calls(translation)
    lacking = {call: line for call, line in there.items() if call not in here}
    added = {call: line for call, line in here.items() if call not in there}
    more = max(len(lacking), len(added)) - 1
    others = f"; {more} more calls differ" if more > 0 else ""
    for call, line in [*lacking.items()][:1]:
        for other in sorted(added, key=lambda each: each[0] != call[0])[:1]:
            has = f"has {_spelled(other)}, where line {line} of the page that it translates has {_spelled(call)}"
            yield added[other], has + others
            return
        yield translation.line, f"lacks {_spelled(call)}, which line {line} of the page that it translates has{others}"
        return
    for call, line in [*added.items()][:1]:
        yield line, f"has {_spelled(call)}, which the page that it translates lacks{others}"


def _spelled(call: Call) -> str:
    name, asked = call
    return f"[[ {name}({', '.join(asked)}) ]]"
