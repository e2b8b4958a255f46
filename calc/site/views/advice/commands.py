"""A recommended configuration behind a click: its command with the files that it reads, and its memory by phase."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from html import escape
from pathlib import PurePosixPath

from calc.answers import words
from calc.launch import Launch
from calc.site.tables.tables import Table
from calc.site.text.inline import coded, inline
from calc.site.views.advice import recipes
from calc.site.views.advice.recipes import Recipe
from calc.site.views.jobs import ledgers

LANGUAGES = {".yaml": "yaml", ".json": "json", ".py": "python"}


def command(recipe: Recipe, say: Callable[[str], str] = str) -> str:
    """Markdown: the command that starts the recommended configuration and its files, folded; or why there is none.

    `say` puts its lines into the page's language.
    """
    found = recipe.answer
    if found.recommended is None:
        return inline(say(f"{recipes.title(recipe)}: {found.verdict}, so there is no command."))
    if found.launch is None:
        why = next((note for note in found.notes if note.startswith("no command")), "no command")
        return coded(say(f"{recipes.title(recipe)}: {why}."))
    s = found.recommended.scenario
    body = "\n\n".join(_blocks(found.launch, say))
    inner = "\n".join(f"    {line}".rstrip() for line in body.splitlines())
    title = f"{recipes.title(recipe)}: the command, for {words.FRAMEWORKS[s.framework]} {s.framework_version}"
    return f'??? example "{inline(say(title))}"\n\n{inner}\n'


def _blocks(launch: Launch, say: Callable[[str], str]) -> Iterator[str]:
    yield _fenced("bash", say("command"), launch.command)
    for name, content in launch.files.items():
        yield _fenced(LANGUAGES.get(PurePosixPath(name).suffix, "text"), name, content)
    yield f"<ul>{''.join(f'<li>{coded(say(note))}</li>' for note in launch.notes)}</ul>"


def _fenced(kind: str, name: str, content: str) -> str:
    """A fenced block of code, with a fence longer than any inside it."""
    fence = "`" * max([3, *[len(ticks) + 1 for ticks in re.findall("`+", content)]])
    return f'{fence}{kind} title="{name}"\n{content.rstrip()}\n{fence}'


def phases(recipe: Recipe, id: str) -> Table | None:
    """The recommended configuration phase by phase; None if nothing fits."""
    best = recipe.answer.recommended
    if best is None:
        return None
    answer = words.answered(best.judged)
    return ledgers.phases(answer, id, f"{recipes.title(recipe)}: {ledgers.headline(answer)}")


def folded(title: str, figure: str) -> str:
    """A figure behind a click, on one line, so that no Markdown rule can touch it."""
    return f'<details class="twin"><summary>{escape(title)}</summary>{figure}</details>'
