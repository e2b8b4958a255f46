"""The calculator's answers as HTML: the build writes the first one, the reader's browser all others.

Both come from the functions behind `python -m calc recommend` and `python -m calc estimate`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from html import escape
from typing import Any, Literal, NamedTuple

import yaml

from calc.answers import answers, words
from calc.answers.answers import Answer
from calc.base.reading import parse_mapping
from calc.base.units import gb, gib
from calc.catalog.catalog import Catalog
from calc.estimate import report
from calc.estimate.estimate import estimate, speed
from calc.estimate.verdict import FITS
from calc.launch import Launch
from calc.recommend import Recommendation, Smallest, answer, machines, options
from calc.recommend.problem import Configuration
from calc.resolve.parse import given, parse
from calc.scenario.scenario import Scenario
from calc.site.calculator import addresses
from calc.site.tables.tables import Table, verdict_html
from calc.site.views.jobs import ledgers
from calc.throughput import Throughput, Unrated

# The page of each task's recipes.
RECIPES = {
    "sft": "sft", "rm": "reward-model", "dpo": "dpo", "kto": "dpo", "orpo": "dpo", "simpo": "dpo", "gkd": "sft",
    "ppo": "ppo", "grpo": "grpo", "reinforce++": "grpo",
}  # fmt: skip
TABLE = "calculator-phases"
PROVISIONAL = "Provisional: PyTorch's allocator is being replayed, which may change the verdict."
Job = Mapping[str, Any]
Stage = Literal["provisional", "growing", "whole"]


class Place(NamedTuple):
    """The page that shows an answer: the relative path to the top of the site, and the function that shows a table.

    `translated`: the addresses of the pages in the page's language, where that is not English.
    """

    root: str
    table: Callable[[Table], str]
    translated: Collection[str] = ()


class Shown(NamedTuple):
    """An answer: in one line, as HTML, and as a scenario file.

    `fields`: of a job that came as a file, the fields by which an address asks for it. `stage`: a `provisional` answer
    may become another one, a `growing` one stays and gets more HTML at its end, or in it where nothing fits.
    """

    line: str
    html: str
    file: str
    fields: Mapping[str, str] | None = None
    stage: Stage = "whole"


# ---- asking --------------------------------------------------------------------------------------------------------


def question(job: Job, catalog: Catalog) -> dict[str, Any]:
    """The fields of a job as pages ask it: with nodes of the size in which the GPU is sold.

    InputError, one line, for a bad job.
    """
    own = given(job, where="recommend", catalog=catalog)
    found = machines.machines(catalog, own["gpu"], own["gpus"]) if "gpu" in own and "gpus" in own else []
    return {**own, **(found[0].fields if found else {}), **own}


def call(job: Job) -> str:
    """The command line that asks the same question."""
    texts = {name.replace("_", "-"): shlex.quote(text) for name, text in options.spelled(job).items()}
    return f"python -m calc recommend {' '.join(f'--{name} {text}' for name, text in texts.items())}"


def find(job: Job, catalog: Catalog, place: Place, progress: Callable[[str], None] = lambda line: None) -> Shown:
    """The recommendation for a job; if its machine is open, on the smallest. InputError, one line, for a bad job."""
    *_, whole = finding(job, catalog, place, progress)
    return whole


def finding(job: Job, catalog: Catalog, place: Place, progress: Callable[[str], None]) -> Iterator[Shown]:
    """The answer of `find` as it grows; one that has nothing new to show comes again."""
    shown: Shown | None = None
    for own, found, tried in searching(job, catalog, progress):
        if shown is None or found.whole:
            shown = recommended(own, found, place, tried)
        yield shown


def searching(
    job: Job, catalog: Catalog, progress: Callable[[str], None] = lambda line: None
) -> Iterator[tuple[Job, Recommendation, Smallest | None]]:
    """A job's fields with its machine, the recommendation, and the smallest machine if the job leaves it open.

    The recommendation grows, see `calc.recommend.answer.growing`.
    """
    own = question(job, catalog)
    if "gpu" in own and "gpus" in own:
        yield from ((own, found, None) for found in answer.growing(own, catalog, where="recommend"))
    else:
        tries = machines.growing(own, catalog, where="recommend", progress=progress)
        yield from ((own, tried.recommendation, tried) for tried in tries)


def asked(texts: Mapping[str, str], catalog: Catalog, place: Place, progress: Callable[[str], None]) -> Iterator[Shown]:
    """The answer to a job as an address holds it, its fields as text, as it grows.

    With `ask` as `estimate` the fields that it leaves open take the framework's defaults; else they are searched.
    """
    job, defaults = addresses.read(texts)
    if defaults:
        text = yaml.safe_dump(job, sort_keys=False, default_flow_style=None)
        yield from (shown._replace(fields=None) for shown in _checked(job, text, "estimate", catalog, place))
    else:
        yield from finding(job, catalog, place, progress)


def check(text: str, catalog: Catalog, place: Place) -> Shown:
    """The estimate of a scenario file. InputError, one line, for a bad one."""
    *_, whole = checking(text, catalog, place)
    return whole


def checking(text: str, catalog: Catalog, place: Place) -> Iterator[Shown]:
    """The answer of `check`, after a provisional one where PyTorch's allocator is replayed."""
    where = "scenario.yaml"
    yield from _checked(parse_mapping(text, where), text, where, catalog, place)


def _checked(job: Job, text: str, where: str, catalog: Catalog, place: Place) -> Iterator[Shown]:
    texts: Mapping[str, str] | None = None
    for estimated in estimating(job, where, catalog):
        texts = texts or addresses.of_scenario(given(job, where=where, catalog=catalog), catalog)
        html = "".join(_estimated(estimated, rate(estimated, catalog), place, texts))
        stage: Stage = "provisional" if estimated.estimate.provisional else "whole"
        yield Shown(_said(estimated), html, text, texts, stage)


def estimating(job: Job, where: str, catalog: Catalog) -> Iterator[Answer]:
    """The estimate of a job, after a provisional one where PyTorch's allocator is replayed, which takes longer.

    InputError, one line that starts with `where`, for a bad job.
    """
    s = parse(job, where=where, catalog=catalog)
    quick = estimate(s, catalog, replays=False)
    yield Answer(s.as_dict(), s, quick)
    if quick.provisional:
        yield Answer(s.as_dict(), s, estimate(s, catalog))


def rate(answer: Answer, catalog: Catalog) -> Throughput | None:
    """The speed of a job; None if a rate is unknown."""
    try:
        return speed(answer.estimate, catalog)
    except Unrated:
        return None


# ---- showing -------------------------------------------------------------------------------------------------------


def recommended(job: Job, found: Recommendation, place: Place, tried: Smallest | None = None) -> Shown:
    """A recommendation; if nothing fits, the configuration that comes closest."""
    first = found.recommended or found.fails
    if first is None:
        line = f"nothing can be run: {'; '.join(found.notes)}"
        return Shown(line, f'<p class="headline">{verdict_html("oom", "nothing fits")} {escape(line)}.</p>', "")
    best = words.answered(first.judged)
    machine = {name: getattr(best.scenario, name) for name in ("gpu", "gpus", "gpus_per_node")}
    parts = [*_estimated(best, first.throughput, place, options.spelled({**job, **machine}), found, tried)]
    if found.launch:
        parts += _command(found.launch)
    parts.append(f'<p class="call">The same on the command line: <code>{escape(call(job))}</code></p>')
    if found.whole:
        parts += _others(found)
    stage: Stage = "whole" if found.whole else "growing"
    return Shown(_said(best, found), "".join(parts), file(best.scenario), stage=stage)


def file(s: Scenario) -> str:
    """A scenario as a file for `python -m calc estimate`, null fields left out."""
    known = {name: value for name, value in s.as_dict().items() if value is not None}
    return yaml.safe_dump(known, sort_keys=False, default_flow_style=False)


def _said(answer: Answer, found: Recommendation | None = None) -> str:
    """The answer in one line, for screen readers."""
    verdict = found.verdict if found else ledgers.verdict_text(answer.estimate)
    group = answer.group
    return f"{verdict}: {_title(answer.scenario)}, peak {gib(answer.device_bytes)} of {gib(group.usable_bytes)} usable"


def _title(s: Scenario) -> str:
    return f"{words.model(s.model)}, {words.task(s.task)} on {words.machine(s)}"


def _estimated(
    answer: Answer,
    rate: Throughput | None,
    place: Place,
    asked: Mapping[str, str],
    found: Recommendation | None = None,
    tried: Smallest | None = None,
) -> Iterator[str]:
    """Verdict, configuration, links, and the peak phase by phase; `asked` is the job as an address holds it."""
    s, group = answer.scenario, answer.group
    miss = found.fails if found and found.verdict != "fits" else None
    word = found.verdict if found else ledgers.verdict_text(answer.estimate)
    yield f'<p class="headline">{verdict_html(answer.estimate.verdict, word)} <b>{escape(_title(s))}</b></p>'
    if answer.estimate.provisional:
        yield f'<p class="provisional">{PROVISIONAL}</p>'
    if tried and tried.machine:
        yield f"<p>The smallest machine that runs it: {tried.smaller} of the catalog are too small.</p>"
    if tried and (least := tried.least):
        where = f"{least.machine.gpus} x {least.machine.gpu.name}"
        told = f"{where}, where a step takes {least.times:.1f} times what it would if memory did not count"
        yield f"<p>The least that holds it is {escape(told)}.</p>"
    yield "<dl>"
    if s.model not in answers.catalog().models:
        own = "a file of your own: it stays in this browser, and a link to this job does not carry it"
        yield _pair("Model", f"<code>{escape(s.model)}</code>, {own}")
    run = "Run" if found and found.recommended else "The closest" if found else "Settings"
    yield _pair(run, escape(", ".join(words.settings(s))))
    if found and found.passed:
        yield _pair(*map(escape, words.passed(found)))
    if miss:
        yield _pair("It", escape(words.lacks(miss)))
        yield _pair("What would have to change", "; ".join(map(words.code, found.advice)) if found else "")
    yield _pair(
        "Peak",
        f"{gib(answer.device_bytes)} of {gib(group.usable_bytes)} usable on each card, in {escape(answer.peak.name)}; "
        f"{gib(answer.peak.moment.allocated_bytes)} of it tensors. It fits with a probability of "
        f"{_likely(answer.estimate.fit_probability)}; for {100 * FITS:.0f} %, a card needs {gib(report.needed(group))} "
        "usable",
    )
    if host := answer.estimate.host_peak:
        yield _pair("Host memory", f"{gb(host)} needed of {escape(str(answer.estimate.host_memory))}")
    yield _pair("Batch", escape(_sized(s)))
    if rate:
        yield _pair("Speed", escape(_pace(rate)) + (", if it fitted" if answer.estimate.verdict == "oom" else ""))
    yield _pair("More", f"{_links(s, place.root)} · {_beside(asked, place.root)}")
    yield "</dl>"
    yield place.table(ledgers.phases(answer, TABLE, f"{_title(s)}: {ledgers.headline(answer)}"))


def _pair(name: str, html: str) -> str:
    return f"<dt>{name}</dt><dd>{html}</dd>" if html else ""


def _sized(s: Scenario) -> str:
    """The size of a step as a sentence."""
    return ". ".join(line[:1].upper() + line[1:] for line in report.holds(s))


def _likely(probability: float) -> str:
    """A probability in per cent, never shown as certain."""
    if probability > 0.99:
        return "more than 99 %"
    return "less than 1 %" if probability < 0.01 else f"{100 * probability:.0f} %"


def _pace(rate: Throughput) -> str:
    return f"{report.tokens(rate)}, one step in {report.seconds(rate.step_seconds)} s, most of it {rate.bound_by}"


def _links(s: Scenario, root: str) -> str:
    pages = {f"hardware/gpus/{s.gpu}.html": words.machine(s).partition(" × ")[2]}
    if s.model in answers.catalog().models:
        pages[f"models/{s.model}.html"] = words.model(s.model)
    if s.task in RECIPES:
        pages[f"recipes/{RECIPES[s.task]}.html"] = f"{words.TASKS[s.task]} recipes"
    return " · ".join(f'<a href="{root}{escape(page)}">{escape(name)}</a>' for page, name in pages.items())


def _beside(asked: Mapping[str, str], root: str) -> str:
    """The link that sets the job beside others."""
    there = addresses.compare(root, [addresses.query(asked)])
    return f'<a class="beside" href="{escape(there)}">Compare with other jobs</a>'


def _command(found: Launch) -> Iterator[str]:
    """The command, with the files that it reads behind a click."""
    button = '<button type="button" class="md-button copy-command">Copy the command</button>'
    yield f'{_code(found.command, "command")}<p class="buttons">{button}</p>'
    for name, content in found.files.items():
        yield f"<details><summary>{escape(name)}</summary>{_code(content, name)}</details>"
    if found.notes:
        yield f"<ul>{''.join(f'<li>{words.code(note)}</li>' for note in found.notes)}</ul>"


def _code(text: str, name: str) -> str:
    inner = escape(text.rstrip("\n")).replace("\n", "&#10;")
    return f'<pre><code tabindex="0" role="region" aria-label="{escape(name)}">{inner}</code></pre>'


def _others(found: Recommendation) -> Iterator[str]:
    """The next faster configuration and what it lacks, the effect of each setting, and the alternatives."""
    fits = found.verdict == "fits"
    lines = [f"Next faster: {escape(words.against(found))}."] if fits else []
    lines += [f"Or, {_other(c)}." for c in found.alternatives]
    lines += [words.code(words.sentence(line)) for line in found.advice] if fits else []
    lines += [words.code(words.sentence(note)) for note in found.notes]
    lines.append(f"{found.considered:,} configurations estimated, {found.pruned:,} excluded by quick checks.")
    items = "".join(f"<li>{line}</li>" for line in lines)
    yield f"<details><summary>What else could be run, and why not faster</summary><ul>{items}</ul></details>"


def _other(c: Configuration) -> str:
    answer = words.answered(c.judged)
    pace = f", {report.tokens(c.throughput)}" if c.throughput else ""
    settings = ", ".join(words.settings(c.scenario))
    return f"{escape(c.trades)}: {escape(settings)}; {gib(answer.device_bytes)} at the peak{pace}"
