"""Tables of recommendations: on a GPU's page by model and number of GPUs, on a model's page the smallest machines."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from calc.answers import advice, answers, topics, words
from calc.answers.advice import Advice
from calc.answers.fits import by_size
from calc.base.units import GiB, gb
from calc.catalog.catalog import GPU, Model
from calc.estimate.verdict import FITS
from calc.recommend.problem import SENSIBLE
from calc.site.tables import tables
from calc.site.tables.tables import Cell, Column, Table
from calc.site.text.inline import inline
from calc.site.views.jobs import ledgers

TITLES = {"sft": "Supervised fine-tuning", "rm": "Reward model", "dpo": "DPO", "ppo": "PPO", "grpo": "GRPO"}
LEARNED = {"full": "in full", "LoRA or QLoRA": "with LoRA or QLoRA"}
ANSWER = (
    Column("fits", "Fullest GPU", "GiB", "verdict", 1),
    ledgers.TOKENS,
    Column("run", "What to run: open it for the command"),
)


def heading(task: str) -> str:
    """The heading over a task's table."""
    name = TITLES[task] if TITLES[task].isupper() else TITLES[task].lower()
    return f"Train a {name}" if task == "rm" else f"Run {name}"


def about(card: GPU) -> str:
    """The reason why a card has no recommendation."""
    return (
        f"Nothing is recommended here for the {card.name}, which has no bf16 and does not run FlashAttention-2: the "
        "tables below show what fits in fp16. The calculator recommends a configuration for it in fp16, with PyTorch's "
        "attention, where the framework can train in it."
    )


def _settings(task: str) -> str:
    """The assumptions that all jobs of a task's table share."""
    job = advice.JOBS[task]
    lengths = (
        f"sequences of {job['seq_len']} tokens, {job['global_batch']} {_counted(task)} a step"
        if "seq_len" in job
        else f"prompts of {job['prompt_len']} and responses of {job['response_len']} tokens, batches as the framework "
        "has them"
    )
    return (
        f"{words.FRAMEWORKS[job['framework']]}, newest known version, {lengths}. The simplest configuration that fits "
        f"with a probability of {100 * FITS:.0f} % and is as fast as any: full fine-tuning where that fits at all, if "
        "need be with AdamW in 8 bits or offloaded to host memory, else LoRA, else QLoRA; a tight one where nothing is "
        "safer. Tokens a second are estimated, over the whole job."
    )


def _counted(task: str) -> str:
    return "sequences" if task == "sft" else "pairs"


def on_gpu(card: GPU, task: str, root: str) -> Table:
    """Recommendations for one task on one kind of GPU: models by size, each on increasing numbers of GPUs."""
    catalog = answers.catalog()
    rows, all_advice = [], []
    for model in by_size(m for m in catalog.models.values() if topics.asked(card, m, task, catalog)):
        cells, _ = topics.found(model.id, task)
        for gpus in topics.asked(card, model, task, catalog):
            all_advice.append(cells[advice.Machine(card.id, gpus)])
            link = f'<a href="{root}models/{model.id}.html">{escape(model.name)}</a>'
            rows.append((Cell(model.name, link), Cell(gpus, style=f"count n{gpus}")))
    common = _common(all_advice)
    options = {"task": task, **advice.JOBS[task], "gpu": card.id}
    table_id = f"gpu-{card.id}-run-{task}"
    return Table(
        table_id,
        f"{TITLES[task]} on the {card.name}: what to run",
        (Column("model", "Model"), Column("gpus", "GPUs", "", "number"), *ANSWER),
        tuple(
            (*row, *_cells(a, common, f"{table_id}-{i}"))
            for i, (row, a) in enumerate(zip(rows, all_advice, strict=True), 1)
        ),
        _settings(task),
        _note(common, options | {"gpus": "N", "model": "M"}),
        versions=answers.versions(),
        folded=f"{len(rows)} configurations, from one card on",
    )


def choice() -> str:
    """Buttons that leave only the rows of one number of GPUs in the tables below them; they need no script."""
    counts = {"": "any number", **{str(n): str(n) for n in (*topics.COUNTS, *topics.SEVERAL_NODES)}}
    buttons = "".join(
        f'<label><input type="radio" name="count" value="{value}"{" checked" * (not value)}> {words}</label>'
        for value, words in counts.items()
    )
    return f'<fieldset class="choice"><legend>Number of cards</legend>{buttons}</fieldset>'


def unsearched(model: Model) -> str:
    """The reason why a model's page lists no machines."""
    return (
        f"The search for machines of a model as large as {model.name} takes too long for a page. "
        f"`python -m calc recommend --model {model.id} --task sft` makes it, and shows how far it is."
    )


def untrained(model: str) -> str:
    """The reason why there is no machine to fine-tune a model on."""
    _, machines = topics.found(model, "sft")
    pending = any(s.advice == advice.PENDING for s in machines.values())
    return advice.PENDING.lacks if pending else "no machine of the catalog trains it"


def short(model: Model) -> str:
    """Markdown: the smallest machine of each task, in the words of the table that has what to run there."""
    lines = []
    for task in advice.JOBS:
        _, machines = topics.found(model.id, task)
        ways: dict[str, list[str]] = {}
        for trained, (machine, _, _) in machines.items():
            if machine:
                ways.setdefault(_machine(machine), []).append(LEARNED[trained])
        if ways:
            said = ", ".join(f"{' or '.join(how)} on {where}" for where, how in ways.items())
            lines.append(f"- **{TITLES[task]}**: {said}.")
    if not lines:
        return f"Nothing trains it: {inline(untrained(model.id))}."
    return "The smallest machines that train it, with every setting that saves memory:\n\n" + "\n".join(lines)


def _machine(machine: advice.Machine) -> str:
    return f"{machine.gpus} × {inline(answers.catalog().gpu(machine.gpu).name)}"


def for_model(model: Model, root: str) -> Table:
    """The smallest machine for each task of a model, with full fine-tuning and with adapters."""
    rows, all_advice = [], []
    catalog = answers.catalog()
    for task in advice.JOBS:
        _, machines = topics.found(model.id, task)
        for trained, (machine, found, _) in machines.items():
            if machine:
                card = catalog.gpu(machine.gpu)
                name = f"{machine.gpus} × {card.name}"
                link = f'{machine.gpus} × <a href="{root}hardware/gpus/{card.id}.html">{escape(card.name)}</a>'
                where = Cell(name, link)
            else:
                where = Cell("—" if found == advice.PENDING else f"none, up to {max(topics.SEVERAL_NODES)} GPUs")
            rows.append((Cell(f"{TITLES[task]}, {trained}"), where))
            all_advice.append(found)
    common = _common(all_advice)
    table_id = f"model-{model.id}-run"
    return Table(
        table_id,
        f"The smallest machine on which {model.name} trains, and what to run there",
        (Column("job", "Job"), Column("machine", "Smallest machine"), *ANSWER),
        tuple(
            (*row, *_cells(a, common, f"{table_id}-{i}"))
            for i, (row, a) in enumerate(zip(rows, all_advice, strict=True), 1)
        ),
        "Machines stand from little usable memory in all to much, of equals the one with fewer GPUs first: the catalog "
        "has no prices. One on which saving memory makes a step take more than "
        f"{SENSIBLE} times as long is passed over, unless all are so slow. Cards with bf16, up to "
        f"{max(topics.SEVERAL_NODES)} of them. Small is slow: mind the tokens a second, and what is offloaded to host "
        "memory. "
        + " ".join(f"{TITLES[task]}: {words.FRAMEWORKS[job['framework']]}." for task, job in advice.JOBS.items())
        + " Lengths and batches are those of the GPUs' pages; adapters have rank "
        f"{advice.ADAPTERS['lora.rank']}.",
        _note(common, {"model": model.id, "task": "T", "framework": "F"}),
        versions=answers.versions(),
    )


def _common(found: Iterable[Advice]) -> list[str]:
    """The notes that all commands of a table share."""
    notes = [a.notes for a in found if a.scenario]
    return [note for note in notes[0] if all(note in other for other in notes)] if notes else []


def _cells(a: Advice, common: list[str], place: str) -> tuple[Cell, Cell, Cell]:
    """The verdict, the speed, and the configuration with its command behind a click; `place` begins the ids in them."""
    if a.scenario is None:
        return Cell((None, None, a.verdict)), Cell(None, "—"), Cell(a.lacks or "—")
    needed = a.working.bytes
    run = a.words + (f"; host {gb(a.host)}" if "offloaded" in a.words else "")
    notes = [note for note in a.notes if note not in common]
    inner = _code(a.command, place) if a.command else ""
    inner += "".join(
        f"<p>{escape(name)}</p>{_code(text, f'{place}-{n}')}" for n, (name, text) in enumerate(a.files.items(), 1)
    )
    inner += "".join(f"<p>{words.code(note)}</p>" for note in notes)
    return (
        Cell((a.verdict, needed / GiB, ""), exact=needed, scenario=a.scenario, working=a.working),
        Cell(None if a.tokens is None else round(a.tokens)),
        Cell(run, f'<details class="run"><summary>{tables.whole(run)}</summary>{inner}</details>'),
    )


def _code(text: str, place: str) -> str:
    """A block to copy. It has no `<code>`: the theme would measure each, even if closed, before a reader can scroll."""
    code = escape(text.rstrip("\n")).replace("\n", "&#10;")
    button = (
        f'<button class="md-code__button" data-md-type="copy" data-clipboard-target="#{place}" title="Copy"></button>'
    )
    return f'<div class="block">{button}<pre tabindex="0" id="{place}">{code}</pre></div>'


def _note(common: list[str], options: dict[str, object]) -> str:
    """The notes that apply to all commands, and the call that shows alternatives."""
    call = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())
    shared = "".join(f" {words.code(words.sentence(note))}" for note in common)
    code = f"<code>python -m calc recommend {escape(call)}</code>"
    return f"Alternatives, and why the next faster configuration fails: {code}.{shared}"
