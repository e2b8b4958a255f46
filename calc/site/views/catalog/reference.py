"""Sentences about the catalog, and the reference of scenario fields, both generated from the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from calc.answers import answers, fits
from calc.base.units import gib
from calc.catalog.catalog import GPU, Model
from calc.estimate.report import TRAINERS
from calc.frameworks.torch.trainers.registry import RELEASED
from calc.resolve.parse import parse
from calc.scenario.scenario import SCHEMA, ScenarioError
from calc.site.tables.tables import Cell, Column, Table
from calc.site.text.inline import inline, within
from calc.site.text.sources import front
from calc.site.views.catalog import sheets
from calc.site.views.jobs import strategies


def how_many(what: str) -> int:
    """The number of `remedies`, `records`, `messages`, or of another collection of the catalog."""
    found = answers.catalog()
    if what == "remedies":
        return sum("remedy" in front(path)[0] for path in strategies.FOLDER.glob("*.md"))
    return len(getattr(found, {"records": "measurements", "messages": "exhausted"}.get(what, what)))


def gpu_summary(card: GPU) -> str:
    """The first paragraph of a GPU's page: the answer before the numbers."""
    lines = [f"{gpu_memory(card)} The largest models that it fine-tunes with the usual settings:\n"]
    for n in fits.COUNTS:
        place = "On one card" if n == 1 else f"On {n} cards"
        lines.append(
            f"- **{place}**: "
            + ", ".join(f"{largest(card, 'sft', m, n)} with {t}" for m, t in fits.LEARNING.items())
            + "."
        )
    return "\n".join(lines)


def gpu_memory(card: GPU) -> str:
    """The memory that a process can use of a card, in a sentence."""
    how = "derived from comparable cards, not observed" if card.usable_derived else "as PyTorch reports it"
    return (
        f"A process can use **{gib(card.usable_bytes, 2)}** of the {card.memory_gb:g} GB that the {inline(card.name)} "
        f"is sold with ({how})."
    )


def largest(card: GPU, task: str, method: str, gpus: int) -> str:
    """The largest model of the catalog that fits on so many of a card, and how if there are several ways; or none."""
    for model in reversed(fits.by_size(answers.catalog().models.values())):
        found = fits.best(fits.Asked(model.id, card.id, task, method, gpus))
        if found is fits.PENDING:
            return found.rung
        if found is not None and found.verdict == "fits":
            how = f" ({inline(found.rung)})" if found.rung else ""
            return f"{inline(model.name)}{how}"
    return "none"


def gpu_links(card: GPU) -> str:
    """The effect of a card's links on a job that uses several."""
    nodes = sheets.nodes_of(card)
    direct = {n.p2p for n in nodes.values()}
    if card.nvlink_gbs:
        first = f"NVLink carries {card.nvlink_gbs:,.0f} GB/s, both directions together."
    elif card.nvlink_gbs == 0:
        first = "This card has no NVLink: whatever GPUs exchange goes over PCIe."
    else:
        first = "Whether and how fast this card has NVLink is not published in the sources of this catalog."
    if direct == {False}:
        second = (
            "In its nodes the cards do not reach each other directly: each transfer passes through host memory. "
            "ZeRO-3 gathers all weights for each micro-batch and pays that price every time; ZeRO-2 only exchanges "
            "gradients, so it is the faster of the two wherever its full copy of the weights fits."
        )
    elif True in direct:
        second = (
            "In nodes with direct links ZeRO-3's gathering of weights hides behind the arithmetic for all but small "
            "micro-batches; between nodes the network is the slower part, and the table says by how much."
        )
    else:
        second = "How it reaches its neighbours is not published, so prefer what moves less: ZeRO-2 where it fits."
    return f"{first} {second}"


def model_summary(model: Model) -> str:
    """The first paragraph of a model's page, and the model's other names behind a click."""
    a = model.architecture
    exactly = "exactly the published count" if model.published_parameters else "counted tensor by tensor"
    experts = f" Each token uses {a.experts_per_token} of {a.experts} experts." if a.experts else ""
    passed = f" {a.passed} more layers attend to images: they are loaded, and text passes over them."
    alone = " It reads images by a part that is not modelled: numbers are those of its language model over text."
    shared = f" over {a.kv_heads} key-value head{'s' * (a.kv_heads > 1)}" if a.heads != a.kv_heads else ""
    heads = f"{a.heads} heads{shared}" if a.attending else "none of which attends"
    return (
        f"{inline(model.name)} has <strong>{model.parameters:,} parameters</strong>, {exactly}: "
        f"{a.layers} layers of width {a.hidden:,}, {heads}, and a vocabulary of {a.vocab:,}"
        f"{', whose embedding is also the output head' if a.tied else ''}.{experts}"
        f"{passed * (a.passed > 0)}{alone * model.text_alone} Source of the count: {inline(model.parameters_source)}. "
        f"Configuration: {within(sheets.linked(model.source))}. Hugging Face name: <code>{inline(model.hf)}</code>."
        f"{_aliases(model)}"
    )


def _aliases(model: Model) -> str:
    """The other names that the numbers are true of, which the site's search finds, and which would hide the answer."""
    if not model.aliases:
        return ""
    listed = ", ".join(f"<code>{inline(name)}</code>" for name in model.aliases)
    count = "Another name" if len(model.aliases) == 1 else f"{len(model.aliases)} other names"
    said = f"{count} of the same shapes, and so the same numbers"
    return f'\n\n<details class="twin"><summary>{said}</summary>{listed}</details>'


def _leaves(schema: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, entry in schema.get("properties", {}).items():
        yield f"{prefix}{name}", entry
        if name != "roles":  # a role takes the same fields, listed already
            yield from _leaves(entry, f"{prefix}{name}.")


def _values(entry: Mapping[str, Any]) -> str:
    if "enum" in entry:
        return " ".join("null" if v is None else str(v) for v in entry["enum"])
    kinds = entry.get("type", "")
    kind = ", ".join(k for k in ([kinds] if isinstance(kinds, str) else kinds) if k != "null")
    low, high = entry.get("minimum", entry.get("exclusiveMinimum")), entry.get("maximum")
    span = (
        f", {low} to {high}" if low is not None and high is not None else f", at least {low}" if low is not None else ""
    )
    return f"{kind}{span}"


def _default(framework: str, task: str, gpus: int) -> dict[str, Any]:
    found = answers.catalog()
    given = {
        "model": min(found.models),
        "task": task,
        "gpu": min(found.gpus),
        "gpus": gpus,
        "method": "lora",
        "framework": framework,
    }
    return parse(given).as_dict()


def _look_up(data: Mapping[str, Any], field: str) -> str:
    value: Any = data
    for part in field.split("."):
        if not isinstance(value, Mapping):
            return "—"
        value = value.get(part)
    if value is None or isinstance(value, Mapping):
        return "—"
    return str(value).lower() if isinstance(value, bool) else str(value)


def fields() -> Table:
    """Every field of a scenario: its values, its meaning, and what frameworks fill in for a job with LoRA."""
    torch, openrlhf, verl = _default("torch", "sft", 1), _default("openrlhf", "sft", 1), _default("verl", "grpo", 8)
    columns = (
        Column("field", "Field"),
        Column("values", "Values"),
        Column("meaning", "Meaning"),
        Column("torch", "Default: torch"),
        Column("openrlhf", "Default: openrlhf"),
        Column("verl", "Default: verl, GRPO"),
    )
    rows = tuple(
        (
            Cell(name, f"<code>{escape(name)}</code>"),
            Cell(_values(entry)),
            Cell(entry.get("description", "")),
            Cell(_look_up(torch, name)),
            Cell(_look_up(openrlhf, name)),
            Cell(_look_up(verl, name)),
        )
        for name, entry in _leaves(SCHEMA)
    )
    return Table(
        "scenario-fields",
        "The fields of a scenario",
        columns,
        rows,
        "Defaults are those of the newest known version, for supervised fine-tuning with LoRA on one GPU; verl's for "
        "GRPO with LoRA on eight.",
        versions=answers.versions(),
    )


# The fields in which trainers differ where a job leaves them open.
HABITS = (
    "seq_len", "micro_batch", "global_batch", "precision", "grad_dtype", "optimizer", "optimizer_impl", "sharding",
    "no_sync", "checkpointing", "reentrant", "attention", "loss", "packing", "padding_free", "expandable_segments",
    "lora.rank", "lora.targets", "lora.dropout", "lora.dtype",
)  # fmt: skip


def trainers() -> Table:
    """The defaults of every trainer that has releases of its own, for a job of LoRA on eight GPUs."""
    told = {}
    for name in RELEASED:
        try:
            told[name] = _habits(name, "lora")
        except ScenarioError:
            told[name] = _habits(name, "full")
    columns = (
        Column("field", "Field"),
        *(Column(name, f"{TRAINERS[name]} {data['versions'][name]}") for name, data in told.items()),
    )
    rows = tuple(
        (Cell(field, f"<code>{escape(field)}</code>"), *(Cell(_listed(data, field)) for data in told.values()))
        for field in HABITS
    )
    return Table(
        "scenario-trainers",
        "What a trainer fills in",
        columns,
        rows,
        "Supervised fine-tuning of Llama 3.1 8B with LoRA on eight GPUs; torchtitan and Megatron-SWIFT train all "
        "weights. A length that a trainer leaves to the model is that of plain Transformers.",
        versions=answers.versions(),
    )


def _habits(trainer: str, method: str) -> dict[str, Any]:
    given = {"model": "llama-3.1-8b", "task": "sft", "gpu": "h100-sxm", "gpus": 8, "method": method, "trainer": trainer}
    return parse(given).as_dict()


def _listed(data: Mapping[str, Any], field: str) -> str:
    return _look_up(data, field).strip("[]").replace("'", "")
