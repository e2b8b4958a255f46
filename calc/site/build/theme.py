"""The theme's style without what no page of the site needs: every page loads it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from calc.site.build.styles import COMMENT

THEME = "assets/stylesheets/main.*.css"
QUOTED = r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
PART = re.compile(rf"""{QUOTED}|[{{}};]|[^{{}};"']+""", re.S)
DECLARED = re.compile(rf"""(?<=[{{;}}])(--[\w-]+):(?:{QUOTED}|[^;{{}}"'])*;?""", re.S)
BETWEEN = re.compile(r",(?![^(]*\))")  # selectors
INNER, CLASS = re.compile(r"\([^()]*\)"), re.compile(r"\.(-?[A-Za-z_](?:[\w-]|\\.)*)")
CLASSES, WORD, READ = re.compile(r'class="?([^">]+)'), re.compile(r"[\w-]+"), re.compile(r"var\(\s*(--[\w-]+)")


def trim(site: Path) -> None:
    """Leaves out of the theme's style the rules for classes that no page and no script of the site names.

    So it does with the variables that then no style and no script reads.
    """
    named = {word for path in site.rglob("*.js") for word in WORD.findall(path.read_text("utf-8"))}
    classes = {name for path in site.rglob("*.html") for name in CLASSES.findall(path.read_text("utf-8"))}
    used = named.union(*(name.split() for name in classes))
    for path in site.glob(THEME):
        css = "".join(_rules(COMMENT.sub("", path.read_text("utf-8")), lambda selector: _classes(selector) <= used))
        others = [other.read_text("utf-8") for other in site.rglob("*.css") if other != path]
        read = named.union(*(READ.findall(text) for text in (css, *others)))
        path.write_text(_declaring(css, read), "utf-8")


def _declaring(css: str, read: Collection[str]) -> str:
    """A style with those of its variables that are read."""
    return DECLARED.sub(lambda found: found[0] if found[1] in read else "", css)


def _rules(css: str, kept: Callable[[str], bool]) -> Iterator[str]:
    """The rules of a style, each with those of its selectors that are kept; none without one."""
    parts, head = iter(PART.findall(css)), ""
    for part in parts:
        head += part if part != "{" else ""
        if part == ";":  # a rule without a body
            yield head
            head = ""
        elif part == "{":
            body = _body(parts)
            if head.startswith(("@media", "@supports")):
                inner = "".join(_rules(body, kept))
                yield f"{head}{{{inner}}}" if inner else ""
            elif head.startswith("@"):
                yield f"{head}{{{body}}}"
            elif selectors := ",".join(filter(kept, BETWEEN.split(head))):
                yield f"{selectors}{{{body}}}"
            head = ""


def _body(parts: Iterator[str]) -> str:
    """What stands in front of the brace that closes the one before `parts`."""
    depth, body = 1, ""
    for part in parts:
        depth += (part == "{") - (part == "}")
        if not depth:
            break
        body += part
    return body


def _classes(selector: str) -> set[str]:
    """The classes that an element needs for a selector; what stands in `:not(…)` and the like is not among them."""
    while selector != (selector := INNER.sub("", selector)):
        pass
    return {name.replace("\\", "") for name in CLASS.findall(selector)}
