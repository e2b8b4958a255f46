"""The parts of a page that asks calc in a reader's browser: the answer's place, its scripts, the way to the engine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from calc.site.calculator import browser_engine
from calc.site.calculator.calculator import Place


def box(name: str, place: Place, asks: Iterable[str], inner: str, **more: Any) -> str:
    """The HTML around the form and the answer of the script `name`, on one line, so that no Markdown rule can touch it.

    An address with one of the names `asks` asks for another answer than `inner` has, which is then never painted.
    """
    root = place.root
    data = {
        "root": root,
        "translated": sorted(place.translated),
        **more,
    }
    closed = json.dumps(data).replace("<", "\\u003c")  # JSON that cannot close its tag
    return (
        f'<div id="{name}" class="calculator">'
        f'<script src="{root}assets/asked.js" data-names="{" ".join(asks)}" '
        f'data-engine="{root}assets/calculator/{browser_engine.version()}/"></script>{inner}'
        f'<script type="application/json">{closed}</script>'
        f'<script defer src="{root}assets/calculator-engine.js"></script>'
        f'<script defer src="{root}assets/{name}.js"></script></div>'
    )
