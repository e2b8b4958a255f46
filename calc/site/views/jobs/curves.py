"""Memory against sequence length or number of GPUs: a drawing with the verdict's bands over the table of its points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from calc.answers import along, answers, fits, topics
from calc.answers.along import NODE, Along, Job, Turns
from calc.answers.answers import Answer
from calc.answers.workings import of_phase
from calc.base.units import GiB
from calc.catalog.catalog import GPU, Model
from calc.site.tables import charts
from calc.site.tables.plots import Band, Plot, Point, picture
from calc.site.tables.tables import WORDS, Cell, Column, Table
from calc.site.views.jobs import ledgers

AXES = {
    "seq_len": "tokens a sequence",
    "response_len": "tokens a response",
    "expected_len": "tokens a sequence on average",
    "gpus": "GPUs",
}


def curve(job: Job, over: str, id: str, caption: str, values: Sequence[int] = (), known: Along | None = None) -> Table:
    """The table of a job at several lengths (`seq_len`, `response_len`, `expected_len`) or `gpus`, with its drawing.

    `values` are the points to ask, by default those of `along.points`; `known`: the answers, where they are known.
    Raises ValueError if the framework can run fewer than two of the points.
    """
    if over not in AXES:
        raise ValueError(f"over: given {over!r}, allowed: {', '.join(AXES)}")
    found, turns = known or along.along(job, over, values)
    if len(found) < 2:
        raise ValueError(f"over {over}: fewer than two points that the framework can run")
    shown = list(found.items())
    bands = _bands(found, turns)
    words = _words(over, bands, found)
    plot = Plot(
        id,
        [Point(at, ledgers.by_component(a.peak.moment.lines), a.estimate.verdict) for at, a in shown],
        bands,
        shown[0][1].group.usable_bytes,
        AXES[over],
        f"{caption}: {words}. {_needs(over, shown)}",
        steps=over == "gpus",
    )
    return _table(plot, shown, over, caption, words)


def _bands(found: Mapping[int, Answer], turns: Turns) -> list[Band]:
    """The verdict along the axis."""
    places = list(found)
    bands = [Band(found[places[0]].estimate.verdict, places[0], places[-1])]
    for start, verdict in turns:
        bands[-1] = bands[-1]._replace(end=start)
        bands.append(Band(verdict, start, places[-1]))
    return bands


def _words(over: str, bands: Sequence[Band], found: Mapping[int, Answer]) -> str:
    """The verdicts along the axis, in words."""
    if over == "gpus":
        return "; ".join(f"{n} GPU{'s' * (n > 1)}: {ledgers.verdict_text(a.estimate)}" for n, a in found.items())
    if len(bands) == 1:
        return f"{WORDS[bands[0].verdict]} at all lengths up to {int(bands[0].end):,} {AXES[over]}"
    said = [f"{WORDS[bands[0].verdict]} up to {int(bands[0].end) - 1:,} {AXES[over]}"]
    return ", ".join([*said, *(f"{WORDS[band.verdict]} from {int(band.start):,} on" for band in bands[1:])])


def _needs(over: str, shown: Sequence[tuple[int, Answer]]) -> str:
    """The numbers of the drawing in words."""
    needs = "; ".join(f"{at:,} {AXES[over]}: {a.device_bytes / GiB:,.1f} GiB" for at, a in shown)
    return f"{needs}. Limit: {shown[0][1].group.usable_bytes / GiB:,.1f} GiB"


AXES_SAID = "The drawing is stacked as the peak is; the horizontal axis is logarithmic, the vertical one linear."


def _table(plot: Plot, shown: Sequence[tuple[int, Answer]], over: str, caption: str, words: str) -> Table:
    components = charts.ordered([c for point in plot.points for c in point.parts])
    columns = (
        Column(over, AXES[over][:1].upper() + AXES[over][1:], "", "number"),
        Column("verdict", "Verdict"),
        Column("total", "Needs", "GiB", "number", 1, "Everything the process takes of the fullest GPU"),
        Column("usable", "Usable", "GiB", "number", 1, "What the card lets a process use"),
        Column("probability", "Likely to fit", "%", "number", 0, "The probability that the peak stays below usable"),
        Column("phase", "Peak in"),
        *(Column(c, charts.title(c), "GiB", "number", 2) for c in components),
    )
    rows = tuple(
        (
            Cell(at, scenario=answer.given),
            ledgers.verdict_cell(answer.estimate, answer),
            ledgers.held(
                of_phase(answer.peak), answer, "over" if answer.device_bytes > answer.group.usable_bytes else ""
            ),
            Cell(answer.group.usable_bytes / GiB),
            Cell(round(100 * answer.estimate.fit_probability)),
            Cell(answer.peak.name),
            *(ledgers.held(of_phase(answer.peak).of(c), answer) for c in components),
        )
        for at, answer in shown
    )
    return Table(
        plot.id,
        caption,
        columns,
        rows,
        ledgers.shared([answer for _, answer in shown]),
        f"{words[:1].upper()}{words[1:]}. {AXES_SAID}",
        versions=answers.versions(),
        folded="The points as a table",
        picture=picture(plot),
    )


def lengths(model: Model) -> Table | None:
    """A model's fine-tuning on the smallest machine that trains it in full, else with adapters; None if none does."""
    _, machines = topics.found(model.id, "sft")
    for trained, (machine, found, known) in machines.items():
        if machine and found.scenario:
            on = f"{machine.gpus} × {answers.catalog().gpu(machine.gpu).name}"
            caption = (
                f"{model.name}, supervised fine-tuning ({trained}) on {on}: memory against the length of sequences"
            )
            return curve(found.scenario, "seq_len", f"model-{model.id}-lengths", caption, known=known)
    return None


def counts(card: GPU) -> Table | None:
    """Full fine-tuning under ZeRO-3 on increasing numbers of a card; None if eight of them train no usual size.

    The model is the largest usual size that eight of the cards train with nothing offloaded.
    """
    for name in reversed(topics.sizes()["sft"]):
        found = fits.best(fits.Asked(name, card.id, "sft", "full", NODE)) if name in answers.catalog().models else None
        if found and found.verdict == "fits" and "offload.optimizer" not in found.given:
            model = answers.catalog().model(name)
            caption = f"{model.name}, full fine-tuning under ZeRO-3: memory against the number of {card.name}"
            return curve({**found.given, **fits.ZERO3.fields}, "gpus", f"gpu-{card.id}-counts", caption)
    return None
