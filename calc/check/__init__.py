"""The checks of the catalog, which refuse the impossible: rules on each card, node, model and record, and across all.

Each rule is a function of its own, with the bounds and their sources beside it, and a test. `python -m calc check`,
`python -m calc add`, the site's build and `python -m measurements.add` apply all of them; an estimate reads the catalog
without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from calc.base import project
from calc.base.schema import validator
from calc.catalog import catalog as files
from calc.catalog.catalog import GPU, Catalog, CatalogError, Model, Node, check_names
from calc.check import beside, folders, gpus, messages, models, nodes, records, texts
from calc.check.faults import Rule, fault

GPUS: tuple[Rule[GPU], ...] = (
    texts.sources, texts.days, texts.finished, texts.tidy, gpus.vendor, gpus.memory, gpus.usable,
    gpus.usable_as_printed, gpus.correction, gpus.memory_in_name, gpus.formats, gpus.bandwidth, gpus.rates,
    gpus.formats_agree, gpus.power, gpus.slot, gpus.link,
)  # fmt: skip
NODES: tuple[Rule[Node], ...] = (
    texts.sources, texts.days, texts.finished, texts.tidy, nodes.cards, nodes.link, nodes.bridges, nodes.peers,
    nodes.speeds_as_printed, nodes.link_speed, nodes.measured, nodes.network, nodes.host_memory,
    nodes.cores,
)  # fmt: skip
MODELS: tuple[Rule[Model], ...] = (
    models.config_fields, models.named_class, models.published_count, models.size_in_name, models.active_in_name,
    models.names, texts.model_sources, texts.days, texts.finished, texts.tidy, models.one_dtype, models.positions,
    models.groups, models.listed_layers, models.images,
)  # fmt: skip
RECORDS: tuple[Rule[Mapping[str, Any]], ...] = (
    texts.record_sources, texts.thread, texts.record_finished, texts.dates, texts.record_days, records.named,
    records.metric, records.origin, records.quoted, records.quoted_rate, records.quoted_stages, records.quoted_card,
    records.quoted_method, records.size, records.parts, records.allocator, records.phases, records.device,
    records.counted, records.outcome, records.first, records.machine, records.torch, records.rates, records.scenario,
)  # fmt: skip
MESSAGES: tuple[Rule[Mapping[str, Any]], ...] = (
    texts.record_sources, texts.record_days, texts.record_finished, messages.figures,
    messages.card, messages.processes, messages.release,
)  # fmt: skip
# Rules across all files, which name the place to blame themselves.
ALL: tuple[Callable[[Catalog, Path], Iterator[str]], ...] = (
    models.kinds, texts.own_names, texts.own_records, beside.faults,
)  # fmt: skip


def check(root: Path | None = None) -> Catalog:
    """The catalog of the project at `root` (this one by default, which is read once), after every rule.

    Raises CatalogError for the first fault: one line that names the file and the field (or the line), what was given
    and what is allowed.
    """
    where = root or project.ROOT
    for line in folders.faults(where):
        raise CatalogError(line)
    catalog = files.load.__wrapped__(root) if root else files.load()
    for line in faults(catalog.whole(), where):
        raise CatalogError(line)
    return catalog


def faults(catalog: Catalog, root: Path) -> Iterator[str]:
    """Every fault of the catalog at `root`, a line each."""
    for gpu in catalog.gpus.values():
        yield from _judged(GPUS, gpu, f"hardware/gpus/{gpu.id}.yaml", catalog)
    for node in catalog.nodes.values():
        yield from _judged(NODES, node, f"hardware/nodes/{node.id}.yaml", catalog)
    for model in catalog.models.values():
        yield from _judged(MODELS, model, f"models/{model.id}.yaml", catalog)
    for record in catalog.measurements:
        yield from _judged(RECORDS, record, catalog.places[record["id"]], catalog)
    for message in catalog.exhausted:
        yield from _judged(MESSAGES, message, catalog.places[message["id"]], catalog)
    for rule in ALL:
        yield from rule(catalog, root)


def _judged(rules: tuple[Rule[Any], ...], thing: Any, place: str, catalog: Catalog) -> Iterator[str]:
    for rule in rules:
        for line in rule(thing, catalog):
            yield f"{place}: {line}"


def check_record(record: Any, where: str, catalog: Catalog) -> None:
    """Raises InputError for a record that could not be added to measurements/; messages call it `where`."""
    validator(project.ROOT / "measurements" / "schema.json")(record, where)
    if owner := catalog.places.get(record["id"]):
        given = f"given {record['id']!r}, which a record has already, {owner}, allowed: one of its own"
        raise CatalogError(f"{where}: id: {given}")
    for other in catalog.measurements:
        if {**other, "id": record["id"]} == record:
            allowed = f"a record of its own, as this is that of {catalog.places[other['id']]}"
            raise CatalogError(f"{where}: {fault('id', record['id'], allowed)}")
    check_names(record, where, catalog.gpus, catalog.names.listed)
    for line in _judged(RECORDS, record, where, catalog):
        raise CatalogError(line)
