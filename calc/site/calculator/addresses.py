"""Jobs as text in addresses: `?model=…&offload.optimizer=true` of the calculator, `?compare=…` of the comparison.

A field has the name and the spelling that it has on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl, urlencode

from calc.base.schema import InputError, show
from calc.catalog.catalog import Catalog
from calc.recommend import options
from calc.resolve.parse import parse
from calc.site.calculator import fields

# The names in an address beside the fields of a scenario: the treatment of open fields, and the reader's $ an hour.
ASK, ESTIMATE = "ask", "estimate"
PRICE = "price"
SAMPLES = 100_000  # of a comparison, unless its address says otherwise
Texts = Mapping[str, str]


def read(texts: Texts) -> tuple[dict[str, Any], bool]:
    """The fields of an address as values, and True if those that it leaves open take the framework's defaults."""
    if texts.get(ASK, "") not in ("", ESTIMATE):
        raise InputError(f"{ASK}: given {show(texts[ASK])}, allowed: {ESTIMATE}")
    job = options.typed({name: text for name, text in texts.items() if name != ASK}, "recommend")
    return job, texts.get(ASK) == ESTIMATE


def query(texts: Texts) -> str:
    """A job as the query of an address, the same for the same fields: in the order of the schema."""
    order = [name for name, _ in options.names()]
    return urlencode(
        sorted(texts.items(), key=lambda field: order.index(field[0]) if field[0] in order else len(order))
    )


def of_scenario(job: Mapping[str, Any], catalog: Catalog) -> dict[str, str]:
    """A scenario by dotted names: the fields that the form has, and of the others those that make a difference."""
    whole, kept = parse(job, catalog=catalog).as_dict(), dict(job)
    for name in [name for name in job if name not in fields.NAMES]:
        fewer = {other: value for other, value in kept.items() if other != name}
        with suppress(InputError):
            kept = fewer if parse(fewer, catalog=catalog).as_dict() == whole else kept
    return options.spelled(kept) | {ASK: ESTIMATE}


def compare(root: str, asked: Sequence[str], samples: int = SAMPLES) -> str:
    """The address that compares jobs, each of them the query of an address of its own."""
    count = [] if samples == SAMPLES else [("samples", str(samples))]
    return f"{root}compare.html?{urlencode([('compare', one) for one in asked] + count)}"


def change(root: str, asked: Sequence[str], at: int) -> str:
    """The calculator with one of the jobs, from which it comes back to the others."""
    own = [pair for pair in parse_qsl(asked[at]) if pair[0] != PRICE]
    others = [("compare", one) for n, one in enumerate(asked) if n != at]
    return f"{root}index.html?{urlencode(own + others)}#calculator"
