"""The comparison on its page: the jobs that the page names, and the form for others."""

from __future__ import annotations

from collections.abc import Sequence

from calc.recommend import options
from calc.site.calculator import addresses, compare, page
from calc.site.calculator.calculator import Place
from calc.site.views.advice.recipes import Recipe
from calc.site.views.jobs import sides


def show(found: Sequence[Recipe], id: str, caption: str, place: Place) -> str:
    """The comparison's HTML, on one line, so that no Markdown rule can touch it."""
    asked = [addresses.query(options.spelled(recipe.job)) for recipe in found]
    shown = [compare.side(recipe.answer) for recipe in found]
    table = place.table(sides.table(shown, addresses.SAMPLES, id, caption))
    inner = (
        f'<div class="answer">{table}</div>{compare.controls(shown, asked, addresses.SAMPLES, place.root)}'
        '<p class="buttons"><button type="button" class="md-button stop" hidden>Stop</button></p>'
        '<p class="state" role="status" aria-live="polite"></p>'
    )
    return page.box("compare", place, ["compare"], inner, compare=asked, samples=str(addresses.SAMPLES))
