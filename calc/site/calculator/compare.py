"""Jobs side by side, each given by its address: the page's first comparison, and those that a reader asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from html import escape
from math import isfinite
from urllib.parse import parse_qsl

from calc.answers import answers, words
from calc.base.schema import InputError, show
from calc.recommend import Recommendation
from calc.site.calculator import addresses, calculator
from calc.site.calculator.addresses import PRICE
from calc.site.calculator.calculator import Place, Shown
from calc.site.views.jobs import sides
from calc.site.views.jobs.sides import Side

LEAST, MOST = 1, 4  # jobs of one page; a reader who comes with one adds the next
TABLE = "compare-live"
WHOLE, ANY = 'min="1" step="1"', 'min="0" step="any"'  # what a field takes


# ---- asking --------------------------------------------------------------------------------------------------------


def compared(asked: Sequence[str], samples: str, place: Place, progress: Callable[[str], None]) -> Shown:
    """The comparison that an address asks for. InputError, one line, for too many jobs or a number that is none."""
    if not LEAST <= len(asked) <= MOST:
        raise InputError(f"compare: given {len(asked)} jobs, allowed: {LEAST} to {MOST}")
    count = _count(samples)
    found = []
    for n, one in enumerate(asked, 1):
        progress(f"Computing {n} of {len(asked)} …")
        found.append(_side(one))
    table = sides.table(found, count, TABLE, caption(found))
    html = place.table(table) + _cited(asked, count, place.root) + controls(found, asked, count, place.root)
    return Shown(f"{table.caption}.", html, "")


def caption(found: Sequence[Side]) -> str:
    """The jobs in a few words."""
    known = [side.answer.scenario for side in found if side.answer]
    jobs = dict.fromkeys(f"{words.model(s.model)}, {words.task(s.task)}" for s in known)
    return f"{' and '.join(jobs) or 'Nothing that runs'}: {len(found)} side by side"


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text[:16]) < 10**15):
        raise InputError(f"samples: given {show(text)}, allowed: a whole number above 0")
    return int(text)


def _price(text: str) -> float | None:
    """The price in $ per GPU hour; None if none is given."""
    try:
        price = float(text) if text.strip() else None
    except ValueError:
        price = -1.0
    if price is not None and not (isfinite(price) and price >= 0):
        raise InputError(f"price: given {show(text)}, allowed: a number of $ per GPU hour, 0 or more")
    return price


def _side(one: str) -> Side:
    """One job with its price; one that cannot be asked is a side that says why."""
    texts = dict(parse_qsl(one))
    price = _price(texts.pop(PRICE, ""))
    # a model file of the reader's own may have changed
    ask = _asked.__wrapped__ if texts.get("model", "").endswith(".json") else _asked
    try:
        return ask(tuple(sorted(texts.items())))._replace(price=price)
    except InputError as error:
        return Side(None, price=price, refused=str(error).removeprefix("recommend: "), name=_named(texts))


def _named(texts: Mapping[str, str]) -> str:
    """A job that cannot be asked, by the names of what it asks for; what nobody knows is as its reader spelled it."""
    known = {gpu.id: gpu.name for gpu in answers.catalog().gpus.values()} | words.TASKS
    said = {name: known.get(text, words.model(text)) for name, text in texts.items()}
    machine = " × ".join(said[name] for name in ("gpus", "gpu") if name in said) or "no GPU"
    return ", ".join([machine, *(said[name] for name in ("model", "task") if name in said)])


@lru_cache(maxsize=64)
def _asked(texts: tuple[tuple[str, str], ...]) -> Side:
    """The answer to a job's address: another price, or another number of samples, asks nothing anew."""
    catalog = answers.catalog()
    job, defaults = addresses.read(dict(texts))
    if not defaults:
        return side(next(calculator.searching(job, catalog))[1])
    *_, answer = calculator.estimating(job, "estimate", catalog)
    return Side(answer, calculator.rate(answer, catalog))


def side(found: Recommendation) -> Side:
    """A recommendation as one side: the configuration to run, or the one that comes closest."""
    first = found.recommended or found.fails
    if first is None:
        return Side(None, refused="; ".join(found.notes), name="this job")
    return Side(words.answered(first.judged), first.throughput)


# ---- showing -------------------------------------------------------------------------------------------------------


def _cited(asked: Sequence[str], samples: int, root: str) -> str:
    """The versions of a comparison, and its address, which is all that it takes."""
    v, here = answers.versions(), escape(addresses.compare(root, asked, samples))
    return (
        f'<p class="provenance"><span>catalog <code>{v["catalog"]}</code>, calc <code>{v["calc"]}</code></span>'
        f'<a class="here" href="{here}">The address of this comparison</a></p>'
    )


def controls(found: Sequence[Side], asked: Sequence[str], samples: int, root: str) -> str:
    """The form below a comparison: prices, the number of samples, another machine, and the ways to change a job."""
    rows = "".join(_control(name, n, asked, samples, root) for n, name in enumerate(sides.names(found)))
    count = _number("samples", "Samples to train on", str(samples), WHOLE)
    more = _adding() if len(asked) < MOST else ""
    return f'<form class="sides picker" aria-label="Compare" autocomplete="off">{rows}{count}{more}</form>'


def _control(name: str, n: int, asked: Sequence[str], samples: int, root: str) -> str:
    others = [one for k, one in enumerate(asked) if k != n]
    price = dict(parse_qsl(asked[n])).get(PRICE, "")
    links = f'<a href="{escape(addresses.change(root, asked, n))}" aria-label="Change {escape(name)}">Change</a>'
    if others:
        away = escape(addresses.compare(root, others, samples))
        links += f' <a class="ask" href="{away}" aria-label="Leave out {escape(name)}">Leave out</a>'
    label = f"{escape(name)}: $ per GPU hour"
    return f'<div class="side">{_number(f"{PRICE}-{n}", label, price, ANY)}<p>{links}</p></div>'


def _number(name: str, label: str, value: str, limits: str) -> str:
    field = f'<input type="number" name="{name}" {limits} value="{escape(value)}">'
    return f'<div class="field"><label>{label} {field}</label></div>'


def _adding() -> str:
    """The fields that add the first job on another machine."""
    cards = sorted(answers.catalog().gpus.values(), key=lambda gpu: gpu.name)
    items = "".join(f'<option value="{escape(gpu.id)}">{escape(gpu.name)}</option>' for gpu in cards)
    return (
        '<div class="field"><label>The first job on another GPU '
        f'<select name="gpu">{items}</select></label></div>'
        f"{_number('gpus', 'How many', '8', WHOLE)}"
        '<p class="buttons"><button type="submit" class="md-button">Add it</button></p>'
    )
