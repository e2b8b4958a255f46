"""Rules that refuse impossible measurements: figures unlike the quote, parts unlike the sum, jobs that do not parse."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, get_args

from calc.base.schema import InputError, closest, show
from calc.base.units import GiB, MiB
from calc.catalog.catalog import Catalog
from calc.check.faults import fault
from calc.check.printed import Printed, printed
from calc.check.texts import day
from calc.estimate.estimate import loading_moments
from calc.resolve.parse import parse
from calc.scenario.rules import flatten
from calc.scenario.words import Task

Record = Mapping[str, Any]

# By a record's unit, the bytes that a word beside a figure in its quote may stand for; a bare figure may be any one.
_DECIMAL = {"GB": 10**9, "G": 10**9, "MB": 10**6, "M": 10**6}
_BINARY = {"GiB": GiB, "MiB": MiB, "GB": GiB, "G": GiB, "MB": MiB, "M": MiB}
UNITS: Mapping[str, Mapping[str, int]] = {
    "bytes": {"bytes": 1},
    "GB": _DECIMAL,
    "GiB": _BINARY,
    "GB or GiB": _DECIMAL,
}
# The fields of a rate from the harness, by the first word of its name: all that the pages on speed read.
RATES: Mapping[str, tuple[str, ...]] = {
    "matmul": ("tokens", "inputs", "outputs", "seconds", "tflops"),
    "decode": ("batch", "kv_len", "seconds", "eager_seconds", "tokens_per_second"),
    "vllm": ("batch", "kv_len", "seconds", "tokens_per_second"),
    "copy": ("bytes", "seconds", "gbs"),
}
# The fields from which each rate is computed; a copy within the device reads and writes its bytes.
WORK: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
    "tflops": lambda rate: 2 * rate["tokens"] * rate["inputs"] * rate["outputs"] / rate["seconds"] / 1e12,
    "tokens_per_second": lambda rate: rate["batch"] / rate["seconds"],
    "gbs": lambda rate: (2 if "device to device" in rate["op"] else 1) * rate["bytes"] / rate["seconds"] / 1e9,
}
# The fields that ids say, and the tracer's short names of some.
SAID = frozenset({
    "model", "task", "framework", "gpu", "gpus", "method", "sharding", "checkpointing", "optimizer", "optimizer_impl",
    "micro_batch", "global_batch", "seq_len", "prompt_len", "response_len",
})  # fmt: skip
SHORT = {"ckpt": "checkpointing", "optim": "optimizer", "optim_impl": "optimizer_impl"}
REACHED = 0.01  # relative difference that rounding leaves
COUNTERS = ("allocated", "reserved")  # metrics that PyTorch's allocator counts
TASKS = frozenset(get_args(Task))
LEAST = MiB  # a smaller peak is a figure in another unit
SAME_CARD = 0.02  # totals of the same kind of card differ by less, depending on the driver


def scenario(record: Record, catalog: Catalog) -> Iterator[str]:
    """The job can be estimated, and its estimate has the moment of loading that the record names."""
    try:
        job = parse(record["scenario"], where="scenario", catalog=catalog)
        if record["metric"] == "held" and "moment" in record:
            known = {moment.name for _, moment in loading_moments(job, catalog)}
            if record["moment"] not in known:
                near = closest(record["moment"], known)
                yield fault("moment", record["moment"], ", ".join(sorted(known)) + near)
    except InputError as error:
        yield str(error)


def named(record: Record, catalog: Catalog) -> Iterator[str]:
    """The id of a record of the harness or the tracer agrees with its scenario."""
    if record["class"] not in ("measured", "traced"):
        return
    job = flatten(record["scenario"])
    for part in record["id"].split("/")[1:]:
        name, _, said = part.partition("=")
        if sized := re.fullmatch(r"(s|mb)([0-9]+)", part):
            name, said = {"s": "seq_len", "mb": "micro_batch"}[sized[1]], sized[2]
        elif part in catalog.models:
            name, said = "model", part
        elif part.partition("-")[0] in TASKS and not said:
            name, said = "task", part.partition("-")[0]
        name, said = SHORT.get(name, name), said if said != "reentrant" else "full"
        given = job.get(name) if name in SAID else None
        if {said, str(given)} == {"sft", "pretrain"}:  # one step, traced once
            continue
        if said and isinstance(given, str | int) and said not in (str(given), str(given).partition("==")[0]):
            yield fault(f"scenario.{name}", given, f"{said}, as id says")


def metric(record: Record, _: Catalog) -> Iterator[str]:
    """The metric, the figure, the moment and the verdict go together."""
    of, measured, verdict = record["metric"], record["measured_bytes"], record["verdict"]
    if (measured is None) != (of == "verdict"):
        given = f"given {show(measured)} with metric {of}"
        yield f"measured_bytes: {given}, allowed: bytes, or null with metric verdict"
    if measured is not None and verdict == "oom":
        yield fault("verdict", verdict, "fits or null, as measured_bytes is the peak of a job that ran")
    if of == "verdict" and verdict is None:
        yield "verdict: given null with metric verdict, allowed: fits, oom, failed, untested"
    if of == "held" and "moment" not in record:
        yield "missing field 'moment': the moment of loading at which metric held is meant"
    if of != "held" and "moment" in record:
        yield fault("moment", record["moment"], f"none, as metric is {of} and not held")
    if (verdict == "failed") != ("failure" in record):
        yield fault("verdict", verdict, "failed with a failure that says why, and only then")


def origin(record: Record, _: Catalog) -> Iterator[str]:
    """A published record has an address and a quote; a record of the harness has its machine and its day."""
    if record["class"] in ("published", "blind"):
        if record["url"] is None:
            yield fault("url", None, f"an address, as class is {record['class']}")
        if "quote" not in record:
            yield f"missing field 'quote': the source's own words, as class is {record['class']}"
    elif record["url"] is not None:
        yield fault("url", record["url"], f"null, as class is {record['class']}")
    if (record["class"] == "blind") != ("blind" in record):
        yield fault("class", record["class"], "blind with a field 'blind', and only then")
    if record["class"] == "traced" and record["metric"] != "allocated":
        yield fault("metric", record["metric"], "allocated, as class is traced")
    for part in ("edge", "rates"):
        if part in record and "machine" not in record:
            yield f"missing field 'machine': where {part} was measured"
    if record["class"] == "measured" and "observed" in record and "machine" not in record:
        yield "missing field 'machine': where it was observed"
    if "machine" in record:
        for name in ("date", "versions"):
            if name not in record:
                yield f"missing field {name!r}, which a record with a machine has"


def quoted(record: Record, _: Catalog) -> Iterator[str]:
    """The figure is one that the quote prints, in the unit that the record names, to the digits printed.

    Where a note says that it is added up, all that the quote prints are its parts; where it says that it is a share of
    something, the quote prints both, the share in per cent.
    """
    measured, unit, quote = record["measured_bytes"], record.get("unit"), record.get("quote")
    if unit is not None and measured is None:
        yield fault("unit", unit, "none, as there is no figure")
    if measured is None or quote is None:
        return
    figures = list(printed(quote))
    if unit is not None and (said := [figure for figure in figures if _says(figure, measured, unit)]):
        words = {figure.unit for figure in said}
        if unit == "GiB" and words <= _DECIMAL.keys() and "GiB" not in record.get("note", ""):
            yield fault("unit", unit, f"GB or GiB, as quote says {said[0].text}, or a note that says why it is GiB")
        return
    if unit is not None and "added up" in record.get("note", "") and _adds_up(figures, measured, unit):
        return
    if unit is not None and "share of" in record.get("note", "") and _is_share(figures, measured, unit):
        return
    fits = [name for name in UNITS if any(_says(figure, measured, name) for figure in figures)]
    if unit is None and fits:
        return
    if fits:
        yield fault("unit", unit, f"{' or '.join(fits)}, in which measured_bytes = {measured} is a figure of quote")
        return
    if not figures:
        yield fault("quote", quote, f"words that print the figure, as measured_bytes is {measured}")
        return
    near = min(
        (figure.value * scale for figure in figures for scale in _scales(figure, unit or "GiB")),
        key=lambda value: abs(value - measured),
        default=None,
    )
    nearest = "" if near is None else f"; the nearest is {float(near):.0f}"
    yield fault("measured_bytes", measured, f"a figure that quote prints, in {unit or 'any unit'}{nearest}")


def _scales(figure: Printed, unit: str) -> set[int]:
    """The bytes of the figure's unit, or of every word in `unit` if it has none; empty for a word of another unit."""
    if not figure.unit:
        return set(UNITS[unit].values())
    return {UNITS[unit][figure.unit]} if figure.unit in UNITS[unit] else set()


def _says(figure: Printed, measured: int, unit: str) -> bool:
    return any(figure.means(measured, scale, 1) for scale in _scales(figure, unit))


def _adds_up(figures: Sequence[Printed], measured: int, unit: str) -> bool:
    together = float(sum(figure.value for figure in figures))
    return any(round(together * scale) == measured for figure in figures[:1] for scale in _scales(figure, unit))


def _is_share(figures: Sequence[Printed], measured: int, unit: str) -> bool:
    """True if the measured bytes are some per cent of a size, both of which are printed."""
    shares, sizes = ([f for f in figures if bool(f.unit) == named] for named in (False, True))
    return any(
        round(share.value * size.value * scale / 100) == measured
        for share in shares
        for size in sizes
        for scale in _scales(size, unit)
    )


def quoted_rate(record: Record, _: Catalog) -> Iterator[str]:
    """A rate is one that its quote prints, or a note says how it was read; seconds per iteration are per step."""
    if (rate := record.get("measured_rate")) is None:
        return
    quote, value = rate.get("quote", record.get("quote", "")), rate["value"]
    said = [figure for figure in printed(quote) if figure.means(value, 1, 1e-9)]
    if (
        quote
        and not said
        and not any(_reckoned(figure.value, value, rate.get("note", "")) for figure in printed(quote))
    ):
        allowed = "a figure that its quote prints, or one times or over a number in its note"
        yield fault("measured_rate.value", value, allowed)
    for figure in said:
        if re.search(rf"{re.escape(figure.text)} ?s/it\b", quote) and rate["unit"] != "step_seconds":
            yield fault("measured_rate.unit", rate["unit"], f"step_seconds, as quote says {figure.text}s/it")


def quoted_stages(record: Record, _: Catalog) -> Iterator[str]:
    """The seconds of a stage are those that the quote prints, or add up from such."""
    said = [*printed(record.get("quote", ""))]
    stages = record.get("measured_stages", {})
    for stage in stages.get("calibrates", {}):
        if stage not in stages:
            yield fault("measured_stages.calibrates", stage, "a stage that has seconds")
    for stage, told in stages.items():
        for value in told if isinstance(told, list) else [told] if stage != "calibrates" else ():
            if not any(figure.means(value, 1, 1e-9) for figure in said):
                yield fault(f"measured_stages.{stage}", value, "a figure that its quote prints")


def _reckoned(printed_value: Fraction, value: float, note: str) -> bool:
    """True if `value` is the printed one, times or over a number that the note says."""
    by = [figure.value for figure in printed(note) if figure.value]
    return any(abs(float(made) / value - 1) < REACHED for n in by for made in (printed_value * n, printed_value / n))


def quoted_card(record: Record, catalog: Catalog) -> Iterator[str]:
    """A card in the quote is the scenario's, or the note says `gpu=` and why another stands for it."""
    if not (quote := record.get("quote")):
        return
    name = record["scenario"]["gpu"]
    kinds = {card.partition("-")[0].removeprefix("rtx") for card in catalog.gpus}
    words = {word.removeprefix("rtx") for word in re.findall("[a-z0-9]+", quote.casefold())}
    said = words & kinds
    if said and name.partition("-")[0].removeprefix("rtx") not in said and "gpu=" not in record.get("note", ""):
        yield fault("scenario.gpu", name, f"{' or '.join(sorted(said))}, which quote says, or a note on gpu=")


def quoted_method(record: Record, _: Catalog) -> Iterator[str]:
    """A quote that says LoRA or QLoRA has a scenario of that method, or the note says `method=` and the reason.

    A source may call adapters over four bits LoRA.
    """
    said = set(re.findall(r"\bq?lora\b", record.get("quote", "").casefold()))
    said |= {"qlora"} if said else set()
    method = record["scenario"].get("method", "full")
    if said and method not in said and "method=" not in record.get("note", ""):
        yield fault("scenario.method", method, f"{' or '.join(sorted(said))}, as quote says, or a note on method=")


def size(record: Record, catalog: Catalog) -> Iterator[str]:
    """A peak is no larger than the card's memory; a trace, which needs no card, may be.

    PyTorch's counters also hold the share of the card that a vLLM in the trainer's process gave back when it slept.
    """
    measured = record["measured_bytes"]
    if measured is None:
        return
    name = record["scenario"]["gpu"]
    whole = int(catalog.gpu(name).memory_gb * GiB)
    rollout = record["scenario"].get("rollout", {})
    asleep = rollout.get("gpu_memory_utilization", 0) if record["metric"] in COUNTERS else 0
    if measured < LEAST:
        yield fault("measured_bytes", measured, f"bytes, at least {LEAST}")
    elif measured > whole * (1 + asleep) and record["class"] != "traced":
        yield fault("measured_bytes", measured, f"at most {whole}, the memory of {name}")


def parts(record: Record, _: Catalog) -> Iterator[str]:
    """The observed parts add up to the measured figure."""
    seen, measured = record.get("observed", {}), record["measured_bytes"]
    if measured is None:
        return
    if seen.get("allocated_bytes") not in (None, measured):
        yield fault("observed.allocated_bytes", seen["allocated_bytes"], f"{measured}, as measured_bytes")
    components, phases = seen.get("components"), seen.get("phases", {})
    if components and None not in components.values() and sum(components.values()) != measured:
        given = sum(components.values())
        yield fault("observed.components", given, f"parts that add up to {measured}, as measured_bytes")
    if record["class"] != "traced":
        return
    if bare := [name for name, phase in phases.items() if not phase.get("allocated_bytes")]:
        yield f"missing field 'observed.phases.{bare[0]}.allocated_bytes', or 0"
    elif phases and max(phase["allocated_bytes"] for phase in phases.values()) != measured:
        yield fault("measured_bytes", measured, "that of the largest phase of observed.phases")


def allocator(record: Record, _: Catalog) -> Iterator[str]:
    """PyTorch reserved no less than it allocated; a record with allocator statistics has all those that pages read."""
    seen = record.get("observed", {})
    allocated, reserved = seen.get("allocated_bytes"), seen.get("reserved_bytes")
    if allocated is not None and reserved is not None and allocated > reserved:
        yield fault("observed.reserved_bytes", reserved, f"at least allocated_bytes = {allocated}")
    if "allocator" not in seen or record["metric"] != "allocated":
        return
    for name in ("requested_bytes", "retries"):
        if name not in seen["allocator"]:
            yield f"missing field 'observed.allocator.{name}'"
    for name in ("reserved_bytes", "expandable_segments", "context_bytes", "context_at_start_bytes"):
        if seen.get(name) is None:
            yield f"missing field 'observed.{name}', which goes with observed.allocator"
    if seen["allocator"].get("requested_bytes") == 0:
        yield fault("observed.allocator.requested_bytes", 0, "at least 1")


def phases(record: Record, _: Catalog) -> Iterator[str]:
    """No phase allocates more than was reserved in it, and the largest are the peaks of the whole run."""
    seen = record.get("observed", {})
    by_phase = seen.get("phases", {})
    for name, phase in by_phase.items():
        allocated, reserved = phase.get("allocated_bytes"), phase.get("reserved_bytes")
        if allocated is not None and reserved is not None and allocated > reserved:
            yield fault(f"observed.phases.{name}.reserved_bytes", reserved, f"at least allocated_bytes = {allocated}")
    for part in ("allocated_bytes", "reserved_bytes"):
        peaks = [phase[part] for phase in by_phase.values() if phase.get(part)]
        if peaks and seen.get(part) is not None and max(peaks) != seen[part]:
            yield fault(f"observed.{part}", seen[part], f"{max(peaks)}, that of the largest of observed.phases")


def device(record: Record, _: Catalog) -> Iterator[str]:
    """The device's figures fit into it, and the memory that was not free at the end was in use."""
    seen, total = record.get("observed", {}), record.get("machine", {}).get("total_bytes")
    before, after = seen.get("free_before_bytes"), seen.get("free_after_bytes")
    if total is None:
        return
    for name in ("reserved_bytes", "device_bytes", "free_before_bytes", "free_after_bytes", "limit_bytes"):
        if (seen.get(name) or 0) > total:
            yield fault(f"observed.{name}", seen[name], f"at most machine.total_bytes = {total}")
    if before is not None and after is not None and after > before:
        yield fault("observed.free_after_bytes", after, f"at most free_before_bytes = {before}")
    if after is not None and seen.get("device_bytes") not in (None, total - after):
        allowed = f"{total - after}, machine.total_bytes less free_after_bytes"
        yield fault("observed.device_bytes", seen["device_bytes"], allowed)


def counted(record: Record, catalog: Catalog) -> Iterator[str]:
    """The observed number of parameters is the model's, unless it has adapters or a value head."""
    seen, job = record.get("observed", {}).get("parameters"), record["scenario"]
    if (
        seen is None
        or job["task"] not in ("pretrain", "sft", "dpo", "inference")
        or job.get("method", "full") != "full"
    ):
        return
    if seen != (known := catalog.model(job["model"]).parameters):
        yield fault("observed.parameters", seen, f"{known}, those of {job['model']}")


def first(record: Record, _: Catalog) -> Iterator[str]:
    """A first comparison was made on a past day; a scenario that lacks something says what."""
    if (blind := record.get("blind")) is None:
        return
    if (blind["said"] == "all") != (blind["lacks"] is None):
        allowed = "what is lacking where said is part, and null where it is all"
        yield fault("blind.lacks", blind["lacks"], allowed)
    if (then := blind["first"]) is None:
        return
    if then["low_bytes"] > then["high_bytes"]:
        yield fault("blind.first.low_bytes", then["low_bytes"], f"at most high_bytes = {then['high_bytes']}")
    yield from day(then["date"], "blind.first.date")


def torch(record: Record, _: Catalog) -> Iterator[str]:
    """The release of PyTorch that ran is the one that the scenario says."""
    said, ran = (part.get("versions", {}).get("torch") for part in (record["scenario"], record))
    if isinstance(said, str) and ran and not f"{ran.partition('+')[0]}.".startswith(f"{said.partition('+')[0]}."):
        yield fault("versions.torch", ran, f"{said}, as scenario.versions.torch")


def machine(record: Record, catalog: Catalog) -> Iterator[str]:
    """The machine's memory is that of the card it names, and no less than that of the card it stands in for."""
    if (given := record.get("machine")) is None:
        return
    real, named = catalog.gpu(given["gpu"]), catalog.gpu(record["scenario"]["gpu"])
    if given["name"] not in given["words"]:
        yield fault("machine.name", given["name"], f"a name that machine.words has: {given['words']}")
    if given["words"] not in record["source"]:
        yield fault("machine.words", given["words"], "words that source repeats")
    total = given.get("total_bytes")
    if total is not None and abs(total / real.usable_bytes - 1) > SAME_CARD:
        yield fault("machine.total_bytes", total, f"about {real.usable_bytes}, the usable memory of {real.id}")
    if real.usable_mib < named.usable_mib:
        larger = f"a card with the memory of {named.id}, which scenario.gpu names"
        yield fault("machine.gpu", real.id, larger)


def outcome(record: Record, _: Catalog) -> Iterator[str]:
    """The verdict is how the run ended; a search's sizes are in order, and its scenario has the largest one found."""
    seen = record.get("observed", {})
    if "oom" in seen and record["verdict"] != "oom":
        yield fault("verdict", record["verdict"], "oom, as observed.oom says")
    if "oom" in seen and "out of memory" not in seen["oom"]["message"].casefold():
        yield fault("observed.oom.message", seen["oom"]["message"], "a message that says out of memory")
    if "machine" in record and record["verdict"] == "oom" and "oom" not in seen:
        yield "missing field 'observed.oom': where it ran out of memory, as verdict is oom"
    if record["class"] == "traced" and record["verdict"] is not None:
        yield fault("verdict", record["verdict"], "null, as class is traced: no card was asked")
    if (edge := record.get("edge")) is None:
        return
    if edge["fails_at"] is not None and edge["fails_at"] <= edge["found"]:
        yield fault("edge.fails_at", edge["fails_at"], f"above edge.found = {edge['found']}")
    if edge["predicted_fits"] > edge["predicted"]:
        yield fault("edge.predicted_fits", edge["predicted_fits"], f"at most edge.predicted = {edge['predicted']}")
    if edge["found"] and record["scenario"].get(edge["field"], edge["found"]) != edge["found"]:
        field = f"scenario.{edge['field']}"
        yield fault(field, record["scenario"][edge["field"]], f"{edge['found']}, the largest found")


def rates(record: Record, catalog: Catalog) -> Iterator[str]:
    """A rate is of a known kind, with all fields of that kind, from a card whose bandwidth and rates are known."""
    if "rates" not in record:
        return
    for index, rate in enumerate(record["rates"]):
        kind = rate["op"].partition(" ")[0]
        if kind not in RATES:
            yield fault(f"rates[{index}].op", rate["op"], ", ".join(RATES) + closest(kind, RATES))
            continue
        if absent := [name for name in RATES[kind] if not rate.get(name)]:
            yield f"missing field 'rates[{index}].{absent[0]}', or 0"
            continue
        for name in WORK.keys() & RATES[kind]:
            if abs((worked := WORK[name](rate)) / rate[name] - 1) > REACHED:
                yield fault(f"rates[{index}].{name}", rate[name], f"{worked:.5g}, the work over the seconds")
    if "machine" in record:
        card = catalog.gpu(record["machine"]["gpu"])
        if not card.bandwidth_gbs or not (peak := card.bf16_tflops or card.fp16_tflops):
            yield fault("machine.gpu", card.id, "a card of which the catalog has bandwidth and rates")
            return
        for index, rate in enumerate(record["rates"]):
            if rate.get("tflops", 0) > peak:
                yield fault(f"rates[{index}].tflops", rate["tflops"], f"at most {peak:g}, the peak of {card.id}")
