"""Rates that cards reached against their peaks, as tables: matrix products, copies, decoding steps, host dispatch."""

from __future__ import annotations

from itertools import groupby
from statistics import median

from calc.accuracy import timing
from calc.accuracy.timing import Rate
from calc.answers import answers, words
from calc.site.tables.tables import Cell, Column, Table
from calc.throughput.work import START

SEQUENCES = (1, 32, 256)
RESTS_ON = "The rates of measurements/, by measurements/bench on rented cards: each the median of repeated runs."


def products() -> Table:
    """The share of the peak that matrix products in a model's shapes reach, by number of tokens."""
    found = sorted(timing.rates(answers.catalog(), "matmul"), key=lambda r: (r.gpu.id, r.model))
    tokens = sorted({r.row["tokens"] for r in found})
    columns = (
        Column("card", "Card"),
        Column("model", "Shapes of"),
        *(Column(f"tokens_{n}", f"{n:,} tokens", "%", "number", 0) for n in tokens),
    )
    rows = []
    for (card, model), members in groupby(found, key=lambda r: (r.gpu.name, r.model)):
        own = list(members)
        shares = [timing.share([r for r in own if r.row["tokens"] == n]) for n in tokens]
        rows.append((Cell(card), Cell(words.model(model)), *(Cell(100 * share) for share in shares)))
    caption = "bf16 products of each linear layer's shape and of the head: share of the card's peak"
    note = f"{RESTS_ON} A product shorter than the launch of a kernel took as long as that."
    return Table("speed-rates-matrix", caption, columns, tuple(rows), note, versions=answers.versions())


def copies() -> Table:
    """Bytes per second of copies within a card and to its host, and the share of the peak."""
    columns = (
        Column("card", "Card"),
        Column("copy", "Copy"),
        Column("rate", "Rate", "GB/s", "number", 1, "Within a card bytes read and bytes written count"),
        Column("share", "Of the peak", "%", "number", 0),
    )
    found = sorted(timing.rates(answers.catalog(), "copy"), key=lambda r: (r.gpu.id, r.row["op"]))
    rows = []
    for (card, op), members in groupby(found, key=lambda r: (r.gpu.name, r.row["op"])):
        own = list(members)
        rate, peak = median(r.row["gbs"] for r in own), timing.copy_peak(own[0])
        rows.append((Cell(card), Cell(op.removeprefix("copy ")), Cell(rate), Cell(100 * rate / peak)))
    caption = "Copies within a card and between it and its host"
    return Table("speed-rates-copies", caption, columns, tuple(rows), RESTS_ON, versions=answers.versions())


def decoding() -> Table:
    """Decoding steps beside their estimates, with short caches, by number of sequences."""
    columns = (
        Column("card", "Card"),
        Column("model", "Model"),
        Column("sequences", "Sequences", kind="number"),
        Column("measured", "Measured step", "ms", "number", 2),
        Column("estimated", "Estimated step", "ms", "number", 2),
        Column("error", "Error", "%", "number", 0),
        Column("eager", "Launched eagerly", "ms", "number", 2),
    )
    catalog = answers.catalog()

    def seconds(r: Rate) -> float:
        return timing.decoding(catalog, r.gpu, r.model, r.row, START)

    decoded = timing.rates(catalog, "decode")
    short = [r for r in decoded if r.row["kv_len"] == timing.SHORT and r.row["batch"] in SEQUENCES]
    rows = [
        (Cell(r.gpu.name), Cell(words.model(r.model)), Cell(r.row["batch"]), Cell(1e3 * r.row["seconds"]),
         Cell(1e3 * seconds(r)), Cell(100 * (seconds(r) / r.row["seconds"] - 1)), Cell(1e3 * r.row["eager_seconds"]))
        for r in short
    ]  # fmt: skip
    caption = f"A decoding step with {timing.SHORT} tokens in each cache, from a CUDA graph"
    note = f"{RESTS_ON} The estimate is that of a rollout, without an engine's scheduler."
    return Table("speed-rates-decode", caption, columns, tuple(rows), note, versions=answers.versions())


def hosts() -> Table:
    """The time that hosts take to dispatch an operation."""
    columns = (
        Column("host", "Host"),
        Column("each", "One operation", "µs", "number", 1),
    )
    found = timing.launches(answers.catalog()) | {"of Megatron-LM's tests, by its own layers": timing.megatron_launch()}
    rows = [(Cell(name), Cell(1e6 * each)) for name, each in found.items()]
    caption = "Time that a host takes to dispatch an operation, from steps that wait for it"
    return Table("speed-hosts", caption, columns, tuple(rows), versions=answers.versions())
