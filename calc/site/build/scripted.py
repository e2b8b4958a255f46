"""The words of scripts, in the language of a page: hooks for overrides/partials/scripted.html.

A script asks for its words by `t("…")`, in English; a page in another language brings their translations with it.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from calc.base.project import ROOT
from calc.site.i18n import speech
from calc.site.tables import charts

ASSETS = ROOT / "docs" / "assets"
SAID = re.compile(r'\b(?:t|say)\("([^"]+)"')


@cache
def said() -> tuple[str, ...]:
    """The words that scripts ask for, in English; the components come from the files beside tables."""
    texts = [path.read_text("utf-8") for path in sorted(ASSETS.glob("*.js"))]
    asked = [words for text in texts for words in SAID.findall(text)]
    return tuple(dict.fromkeys([*asked, *charts.COMPONENTS.values()]))


def words(language: str) -> dict[str, str]:
    """The words of scripts in a language, by the English ones; none for English."""
    found = speech.CATALOGUES.get(language, {})
    return {english: found[english] for english in said() if english in found}


def on_env(env: Any, **others: Any) -> None:
    """Gives templates the filter `scripted`, from a language to the words of scripts."""
    env.filters["scripted"] = words
