"""The styles of a built site without what no page needs: every page loads them."""

from __future__ import annotations

import re
from pathlib import Path

from lightningcss import process_stylesheet

from calc.site.faults import BuildError

THEME = "assets/stylesheets/main.*.css"
CLASS, SET = re.compile(r"\.(-?[A-Za-z_](?:[\w-]|\\.)*)"), re.compile(r"(--[\w-]+)\s*:")
WORD, READ = re.compile(r"[\w-]+"), re.compile(r"var\(\s*(--[\w-]+)")
MARKS = re.compile(r'\s(?:class|id)="?([^">]+)')  # ids, too: what goes by its name is gone as an id


def trim(site: Path) -> None:
    """Takes comments and room out of all styles, and out of the theme's the rules for classes that nothing names.

    So it does there with the variables that then no style and no script reads. What answers in a reader's browser
    look like is up to the other styles, whose classes no page need name.
    """
    scripted = {word for path in site.rglob("*.js") for word in WORD.findall(path.read_text("utf-8"))}
    marks = {names for path in site.rglob("*.html") for names in MARKS.findall(path.read_text("utf-8"))}
    marked = scripted.union(*(names.split() for names in marks))
    styles = {path: _small(path.read_text("utf-8"), path.relative_to(site)) for path in site.rglob("*.css")}
    for path in site.glob(THEME):
        classes = {name.replace("\\", "") for name in CLASS.findall(styles[path])}
        styles[path] = process_stylesheet(styles[path], unused_symbols=classes - marked)
        read = scripted.union(*(READ.findall(css) for css in styles.values()))
        styles[path] = process_stylesheet(styles[path], unused_symbols={*SET.findall(styles[path])} - read)
    for path, css in styles.items():
        path.write_text(css, "utf-8")


def _small(css: str, path: Path) -> str:
    try:
        return process_stylesheet(css)
    except ValueError as error:
        raise BuildError(f"{path}: {error}") from None
