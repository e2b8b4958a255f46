"""Tables of the catalogs themselves: GPUs, the links between them, models, and a model tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from calc.answers import answers
from calc.answers.fits import by_memory, by_size
from calc.autograd.polynomial import amount
from calc.autograd.tape import Tensor, of, text
from calc.base.units import GB, GiB, gib
from calc.catalog.catalog import GPU, Model, Node
from calc.memory.activations import Program, layer
from calc.memory.run import Adapter, Run, dimensions
from calc.models.architecture import parameters, tensors
from calc.site.tables.tables import Cell, Column, Table

# The catalog's data on a GPU: (attribute, the file's field, title, unit).
GPU_FACTS = (
    ("memory_gb", "memory.marketing_gb", "Memory, as sold", "GB"),
    ("usable_mib", "memory.usable_mib", "Memory a process can use", "MiB"),
    ("bandwidth_gbs", "bandwidth_gbs", "Memory bandwidth", "GB/s"),
    ("bf16_tflops", "dense_tflops.bf16", "BF16, dense", "TFLOPS"),
    ("fp16_tflops", "dense_tflops.fp16", "FP16, dense", "TFLOPS"),
    ("fp8_tflops", "dense_tflops.fp8", "FP8, dense", "TFLOPS"),
    ("nvlink_gbs", "nvlink_gbs", "NVLink or alike, both directions", "GB/s"),
    ("pcie_gen", "pcie_gen", "PCIe generation", ""),
    ("tdp_w", "tdp_w", "Power limit", "W"),
    ("ecc", "ecc", "Error correction", ""),
    ("architecture", "architecture", "Architecture", ""),
)
DERIVED = "derived, not observed"
NONE = "none"


def _quantity(value: float | None) -> Cell:
    """A rate or a link's bandwidth: where the card has none, the cell says so."""
    return Cell(value, NONE if value == 0 else "")


def gpus(root: str) -> Table:
    """Every GPU of the catalog, by usable memory."""
    columns = (
        Column("gpu", "GPU"),
        Column("memory_gb", "As sold", "GB", "number"),
        Column("usable_gib", "Usable", "GiB", "number", 2, "What a process can use, as PyTorch sees it"),
        Column("usable_observed", "Usable is"),
        Column("bandwidth_gbs", "Bandwidth", "GB/s", "number"),
        Column("bf16_tflops", "BF16 dense", "TFLOPS", "number", 1),
        Column("fp8_tflops", "FP8 dense", "TFLOPS", "number", 1),
        Column("nvlink_gbs", "NVLink, both ways", "GB/s", "number"),
        Column("pcie_gen", "PCIe gen", "", "number"),
        Column("tdp_w", "Power", "W", "number"),
        Column("architecture", "Architecture"),
    )
    rows = tuple(
        (
            Cell(g.name, f'<a href="{root}hardware/gpus/{g.id}.html">{escape(g.name)}</a>'),
            Cell(g.memory_gb),
            Cell(g.usable_bytes / GiB, exact=g.usable_bytes),
            Cell("derived" if g.usable_derived else "observed", style="derived" if g.usable_derived else ""),
            Cell(g.bandwidth_gbs),
            _quantity(g.bf16_tflops),
            _quantity(g.fp8_tflops),
            _quantity(g.nvlink_gbs),
            Cell(g.pcie_gen),
            Cell(g.tdp_w),
            Cell(g.architecture),
        )
        for g in by_memory(answers.catalog().gpus.values())
    )
    return Table(
        "gpus-overview",
        "Every GPU of the catalog, by the memory a process can use",
        columns,
        rows,
        "Each value has its source on the GPU's page. Rates are dense, with fp32 accumulation where that differs.",
        versions=answers.versions(),
    )


def units(cards: Sequence[GPU], table_id: str, caption: str) -> Table:
    """The memory in a card's name, read in decimal and in binary units, and the memory that a process gets."""
    columns = (
        Column("gpu", "Card"),
        Column("sold", "Sold with", "GB", "number"),
        Column("decimal", "If that were 10⁹ bytes each", "GiB", "number", 2),
        Column("binary", "If that were 2³⁰ bytes each", "GiB", "number", 2),
        Column("usable", "A process gets", "GiB", "number", 2),
        Column("less", "Less than the second", "%", "number", 1),
        Column("ecc", "Error correction"),
    )
    rows = tuple(
        (
            Cell(g.name),
            Cell(g.memory_gb),
            Cell(g.memory_gb * GB / GiB),
            Cell(float(g.memory_gb)),
            Cell(g.usable_bytes / GiB, exact=g.usable_bytes),
            Cell(100 * (1 - g.usable_bytes / GiB / g.memory_gb)),
            Cell(g.ecc),
        )
        for g in cards
    )
    return Table(table_id, caption, columns, rows, versions=answers.versions())


def gpu(card: GPU) -> Table:
    """One GPU: each value with its source."""
    columns = (
        Column("property", "Property"),
        Column("value", "Value"),
        Column("source", "Source"),
        Column("note", "Note"),
    )
    rows = []
    for attribute, field, title, unit in GPU_FACTS:
        value = getattr(card, attribute)
        number = f"{value:,.6g} {unit}".strip() if isinstance(value, int | float) else value
        shown = NONE if value == 0 else number
        if attribute == "usable_mib":
            shown = f"{shown} = {gib(card.usable_bytes, 2)}" + (f" ({DERIVED})" if card.usable_derived else "")
        source, note = card.sources.get(field, ""), card.notes.get(field, "")
        rows.append((Cell(title), Cell(shown), Cell(source, linked(source)), Cell(note, linked(note))))
    return Table(
        f"gpu-{card.id}",
        f"{card.name}: what the catalog knows, and from where",
        columns,
        tuple(rows),
        versions=answers.versions(),
    )


def linked(source: str) -> str:
    """A source's text with its addresses as links."""
    words = []
    for word in source.split(" "):
        bare = word.rstrip(".,;:)")
        if bare.lstrip("(").startswith(("https://", "http://")):
            address = bare.lstrip("(")
            before, after = word.split(address, 1)
            words.append(f'{escape(before)}<a href="{escape(address)}">{escape(address)}</a>{escape(after)}')
        else:
            words.append(escape(word))
    return " ".join(words)


NODES = (
    Column("node", "Node"),
    Column("gpus", "GPUs", "", "number"),
    Column("cards", "Cards"),
    Column("link", "Link"),
    Column("p2p", "Direct (peer to peer)"),
    Column("intra_gbs", "In the node, per GPU, one way", "GB/s", "number", 1),
    Column("measured_gbs", "All-reduce, measured", "GB/s", "number", 1, "Bus bandwidth"),
    Column("inter_gbs", "Between nodes, per GPU, one way", "GB/s", "number", 1),
    Column("host_ram_gb", "Host RAM, as usually sold", "GB", "number"),
    Column("cpu_cores", "CPU cores", "", "number"),
)


def nodes(found: Mapping[str, Node], table_id: str, caption: str, root: str) -> Table:
    """Links between GPUs: their bandwidths, and whether cards reach each other directly."""
    cards = answers.catalog().gpus
    rows = tuple(
        (
            Cell(n.name),
            Cell(n.gpus),
            Cell(
                ", ".join(cards[i].name for i in n.gpu_ids),
                ", ".join(f'<a href="{root}hardware/gpus/{i}.html">{escape(cards[i].name)}</a>' for i in n.gpu_ids),
            ),
            Cell(n.link),
            Cell(None if n.p2p is None else "yes" if n.p2p else "no"),
            Cell(n.intra_gbs),
            Cell(n.measured_gbs),
            Cell(n.inter_gbs),
            Cell(n.host_ram_gb),
            Cell(n.cpu_cores),
        )
        for n in found.values()
    )
    note = f'Sources: see <a href="{root}hardware/index.html#nodes-sources">where each value is read</a>.'
    return Table(table_id, caption, NODES, rows, note=note, versions=answers.versions())


def node_sources() -> Table:
    """The source of each value of each node."""
    titles = {column.key: column.title for column in NODES}
    columns = (Column("node", "Node"), Column("field", "Value"), Column("source", "Source"), Column("note", "Note"))
    rows = tuple(
        (
            Cell(n.name),
            Cell(field, escape(titles[field])),
            Cell(source, linked(source)),
            Cell(note := n.notes.get(field, ""), linked(note)),
        )
        for n in answers.catalog().nodes.values()
        for field, source in n.sources.items()
    )
    return Table("nodes-sources", "Where each value is read", columns, rows, versions=answers.versions())


def nodes_of(card: GPU) -> dict[str, Node]:
    """The nodes of the catalog that this GPU comes in."""
    return {n.id: n for n in answers.catalog().nodes.values() if card.id in n.gpu_ids}


def models(root: str) -> Table:
    """Every model of the catalog, by size."""
    columns = (
        Column("model", "Model"),
        Column("parameters", "Parameters, counted", "", "number"),
        Column("published", "Published", "", "number"),
        Column("family", "Family"),
        Column("layers", "Layers", "", "number"),
        Column("hidden", "Hidden", "", "number"),
        Column("heads", "Heads (key-value)"),
        Column("vocab", "Vocabulary", "", "number"),
        Column("tied", "Tied head"),
        Column("experts", "Experts (per token)"),
        Column("licence", "Licence"),
    )
    rows = []
    for m in by_size(answers.catalog().models.values()):
        a = m.architecture
        rows.append(
            (
                Cell(m.name, f'<a href="{root}models/{m.id}.html">{escape(m.name)}</a>'),
                Cell(parameters(a)),
                Cell(m.published_parameters),
                Cell(a.family),
                Cell(a.layers),
                Cell(a.hidden),
                Cell(f"{a.heads} ({a.kv_heads})" if a.attending else "—"),
                Cell(a.vocab),
                Cell("yes" if a.tied else "no"),
                Cell(f"{a.experts} ({a.experts_per_token})" if a.experts else "—"),
                Cell(m.licence),
            )
        )
    return Table(
        "models-overview",
        "Every model of the catalog, by size",
        columns,
        tuple(rows),
        "Counted tensor by tensor from the published configuration; a tied head counts once.",
        versions=answers.versions(),
    )


def model_tensors(model: Model) -> Table:
    """A model tensor by tensor: shape, count, and parameters of each and in all."""
    total = parameters(model.architecture)
    columns = (
        Column("tensor", "Tensor"),
        Column("shape", "Shape"),
        Column("count", "How many", "", "number"),
        Column("each", "Parameters each", "", "number"),
        Column("all", "Together", "", "number"),
        Column("share", "Share", "%", "number", 2),
    )
    rows = []
    for t in tensors(model.architecture):
        each = 1
        for side in t.shape:
            each *= side
        shape = " × ".join(str(side) for side in t.shape)
        name = Cell(t.name, f"<code>{escape(t.name)}</code>")
        rows.append(
            (name, Cell(shape), Cell(t.count), Cell(each), Cell(each * t.count), Cell(100 * each * t.count / total))
        )
    rows.append(
        (
            Cell("all"),
            Cell("—"),
            Cell(sum(t.count for t in tensors(model.architecture))),
            Cell(None, "—"),
            Cell(total),
            Cell(100.0),
        )
    )
    return Table(
        f"model-{model.id}",
        f"{model.name}, tensor by tensor",
        columns,
        tuple(rows),
        "Counted from the published configuration; a tied head counts once.",
        versions=answers.versions(),
    )


def saved(root: str) -> Table:
    """The bytes that one decoder layer of each model keeps for backward, per token, with the closed form."""
    columns = (
        Column("model", "Model"),
        Column("bytes", "Full", "bytes per token", "number"),
        Column("lora", "LoRA, rank 64", "bytes per token", "number"),
        Column("selective", "Full, selective checkpointing", "bytes per token", "number"),
        Column("formula", "Closed form, full"),
    )
    adapter = Adapter(64, "all-linear", False, 2)
    rows = []
    for m in by_size(answers.catalog().models.values()):
        spec = m.architecture.specs[-1].shapes
        full = layer(Run(m.architecture), spec).saved
        lora = layer(Run(m.architecture, trained=False, adapter=adapter), spec).saved
        spared = layer(Run(m.architecture), spec, selective=True).kept
        selective = round(spared.tokens) + Run(m.architecture).residual * m.architecture.hidden
        rows.append(
            (
                Cell(m.name, f'<a href="{root}models/{m.id}.html">{escape(m.name)}</a>'),
                Cell(round(full.tokens), exact=round(full.tokens)),
                Cell(round(lora.tokens), exact=round(lora.tokens)),
                Cell(selective, exact=selective),
                Cell(full.formula, html=f"<code>{escape(full.formula)}</code>"),
            )
        )
    return Table(
        "saved-per-layer",
        "What a decoder layer keeps for backward",
        columns,
        tuple(rows),
        "bf16, FlashAttention, no checkpointing; LoRA in bf16 on all linear layers, no dropout. With selective "
        "checkpointing the layer's input is part of it, and attention PyTorch's. Of a model with experts, a layer with "
        "experts. T tokens, h hidden, q and kv the widths of queries and of keys, i the "
        "intermediate width, H heads, K key-value heads, E experts, k experts a token, j an expert's width.",
        versions=answers.versions(),
    )


# the part of a layer that a table of its operations covers
LINEAR = {"": "a layer", "torch": "linear attention", "fla": "linear attention in kernels"}


def operations(model: Model, linear: str = "") -> Table:
    """A decoder layer operation by operation: the tensors that backward needs, each counted where it is first kept.

    `linear`: the model's linear attention alone, in PyTorch's operations (`torch`) or in kernels (`fla`).
    """
    specs = model.architecture.specs
    spec = next(spec for spec in specs if spec.mixer == "delta") if linear else specs[-1].shapes
    program = Program(Run(model.architecture, linear_kernels=linear == "fla"), spec)
    dims = dimensions(model.architecture)
    seen: set[Tensor] = set()
    columns = (
        Column("operation", "Operation"),
        Column("formula", "Keeps, per token"),
        Column("bytes", "That is", "bytes per token", "number"),
    )
    rows = []
    for op in program.layer().ops:
        if linear and not op.name.startswith("delta"):
            continue
        size = of()
        for tensor in op.saves:
            if tensor.storage not in seen:
                seen.add(tensor.storage)
                size = size + tensor.storage.size
        if size:
            whole = amount(size, dims)
            kept = round(whole.tokens + whole.chunked)
            formula = text(size.tokens)
            rows.append((Cell(op.name), Cell(formula, html=f"<code>{escape(formula)}</code>"), Cell(kept, exact=kept)))
    total = sum(row[2].exact or 0 for row in rows)
    rows.append((Cell("all"), Cell("—"), Cell(total, exact=total)))
    return Table(
        f"operations-{model.id}" + (f"-{linear}" if linear else ""),
        f"{model.name}: what each operation of {LINEAR[linear]} keeps for backward",
        columns,
        tuple(rows),
        "bf16, FlashAttention, all weights trained. A tensor that several operations need counts once."
        + (" C is the length in whole chunks over the length." if linear else ""),
        versions=answers.versions(),
    )
