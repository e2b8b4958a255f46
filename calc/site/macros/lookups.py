"""The macros that use nothing of their page: tables of the catalog, of what is published, and of the errors."""

from __future__ import annotations

from collections.abc import Sequence

from calc.answers import answers, topics
from calc.scenario.data_sets import DATA_SETS
from calc.site.i18n import languages
from calc.site.macros.bound import Bound
from calc.site.tables import tables
from calc.site.text import glossary
from calc.site.text.inline import inline
from calc.site.views.accuracy import accuracy, blind, golden, measured, odds, peers, rates, reports, scatter, simumax
from calc.site.views.advice import advised, symptoms
from calc.site.views.catalog import reference, sheets
from calc.site.views.fit import glance, heat, lookup
from calc.site.views.jobs import curves, speed

LEAST = 0.001  # smaller errors are said to be under it


class Lookups(Bound):
    """Macros over the whole catalog and all records."""

    # --- tables of the catalog

    def matrix(self, task: str, method: str, gpus: int) -> str:
        """All models against all GPUs."""
        return self._place(heat.matrix(task, method, gpus, self._root))

    def task_switch(self) -> str:
        """Links to the what-fits heatmaps, task by task."""
        original, _ = languages.split(self._current().source)
        return self._worded(heat.switch(languages.url(original).removesuffix(".html"), self._root))

    def fits_filters(self) -> str:
        """The form that filters the page's heatmaps."""
        return self._worded(heat.filters(self._root))

    def fits_glance(self, task: str, jobs: Sequence[tuple[str, int]]) -> str:
        """The models that fit on a card of each size, as a picture, for (method, number of GPUs) of `jobs`."""
        return self._place(glance.on_sizes(task, jobs, self._root))

    def gpu_glance(self, gpu: str) -> str:
        """The models that fit on one kind of GPU, as a picture."""
        return self._place(glance.on_gpu(answers.catalog().gpu(gpu), self._root))

    def model_glance(self, model: str) -> str:
        """The kinds of GPU on which a model fits, in words and as a picture."""
        found = answers.catalog().model(model)
        short = advised.short if topics.searched(found) else glance.summary
        return f"{short(found)}\n\n{self._place(glance.of_model(found, self._root))}"

    def fits_table(self, gpu: str, task: str) -> str:
        """All models on one kind of GPU."""
        return self._place(lookup.on_gpu(answers.catalog().gpu(gpu), task, self._root))

    def smallest_table(self, model: str) -> str:
        """The smallest card for each task and method."""
        return self._place(lookup.smallest(answers.catalog().model(model), self._root))

    def advice_table(self, gpu: str, task: str) -> str:
        """Recommendations for one kind of GPU and one task."""
        return self._place(advised.on_gpu(answers.catalog().gpu(gpu), task, self._root))

    def count_choice(self) -> str:
        """The choice of a number of GPUs for the tables of recommendations below it."""
        return advised.choice()

    def machines_table(self, model: str) -> str:
        """The smallest machine for each task, and the configuration to run there."""
        return self._place(advised.for_model(answers.catalog().model(model), self._root))

    def lengths_curve(self, model: str) -> str:
        """The sequence lengths of a model that fit on the smallest machine that trains it."""
        found = self._or_fault(model, lambda: curves.lengths(answers.catalog().model(model)))
        return self._place(found) if found else f"Nothing to draw: {inline(advised.untrained(model))}."

    def counts_curve(self, gpu: str) -> str:
        """The number of GPUs of one kind that full fine-tuning takes."""
        found = self._or_fault(gpu, lambda: curves.counts(answers.catalog().gpu(gpu)))
        return self._place(found) if found else "Nothing to draw: eight of them train no usual size in full."

    def gpus_table(self) -> str:
        """Every GPU."""
        return self._place(sheets.gpus(self._root))

    def units_table(self, gpus: Sequence[str], id: str, caption: str) -> str:
        """The memory that cards are named after, and the part of it that a process gets."""
        return self._place(sheets.units([answers.catalog().gpu(gpu) for gpu in gpus], id, caption))

    def gpu_table(self, gpu: str) -> str:
        """One GPU, each value with its source."""
        return self._place(sheets.gpu(answers.catalog().gpu(gpu)))

    def nodes_table(self, gpu: str | None = None) -> str:
        """Links between GPUs: of all nodes, or of the nodes that one GPU comes in."""
        if gpu is None:
            found, table_id, caption = answers.catalog().nodes, "nodes-overview", "How GPUs are linked"
        else:
            card = answers.catalog().gpu(gpu)
            found, table_id = sheets.nodes_of(card), f"gpu-{gpu}-nodes"
            caption = f"The nodes that the {card.name} comes in"
            if not found:
                return f"The catalog knows no node with the {inline(card.name)}: its links are not published."
        return self._place(sheets.nodes(found, table_id, caption, self._root))

    def node_sources_table(self) -> str:
        """The source of each value of each node."""
        return self._place(sheets.node_sources())

    def models_table(self) -> str:
        """Every model."""
        return self._place(sheets.models(self._root))

    def parameters_table(self, model: str) -> str:
        """One model tensor by tensor."""
        return self._place(sheets.model_tensors(answers.catalog().model(model)))

    def glossary(self) -> str:
        """Every term."""
        return glossary.page(self._root, languages.split(self._current().source)[1])

    def fields_table(self) -> str:
        """Every field of a scenario, from its schema."""
        return self._place(reference.fields())

    def errors_table(self) -> str:
        """Every error of a job that ran out of memory."""
        return self._place(symptoms.messages())

    def tracebacks_table(self) -> str:
        """The functions that tell the phase in which a job died."""
        return self._place(symptoms.phases())

    def trainers_table(self) -> str:
        """The values that each trainer fills in where a job leaves a setting open."""
        return self._place(reference.trainers())

    # --- how wrong it all is

    def accuracy(self, what: str) -> str:
        """An accuracy figure: `count`, or an error in per cent: `median`, `mean`, `p95`, `worst`."""
        every = accuracy.overall()
        if not every:
            return self._say(f"accuracy({what})", "0" if what == "count" else tables.NOT_PUBLISHED)
        value = getattr(every, what)
        shown = (
            str(value) if what == "count" else f"{100 * value:.1f} %" if value >= LEAST else f"under {100 * LEAST} %"
        )
        return self._say(f"accuracy({what})", shown)

    def accuracy_table(self) -> str:
        """Errors by kind of job, by phase and by component."""
        return "\n\n".join(self._place(table) for table in (accuracy.by_kind(), accuracy.by_part()))

    def odds_tables(self) -> str:
        """The evidence behind verdicts: how often 'fits' did fit, memory lost to fragmentation, comparable records."""
        return "\n\n".join(self._place(table) for table in (odds.outcomes(), odds.fragmentation(), odds.comparable()))

    def odds(self, what: str) -> str:
        """A figure of the calibration: see `odds.figure`."""
        return self._say(f"odds({what})", self._or_fault("odds", lambda: odds.figure(what)))

    def worst_table(self, count: int) -> str:
        """The traced steps whose estimates are furthest off."""
        return self._place(accuracy.worst(count))

    def accuracy_chart(self) -> str:
        """Every record as a point, with its table."""
        return self._place(scatter.scattered())

    def measured_tables(self, *names: str) -> str:
        """Estimates against what was measured on real GPUs: see `measured.TABLES`."""
        found = self._or_fault("measured_tables", lambda: [measured.shown(name) for name in names])
        return "\n\n".join(self._place(table) for table in found)

    def measured(self, what: str) -> str:
        """A figure of the measured jobs: see `measured.figure`."""
        return self._say(f"measured({what})", self._or_fault("measured", lambda: measured.figure(what)))

    def peers_table(self) -> str:
        """Six jobs, as this guide and known calculators answer them."""
        return self._place(peers.side_by_side())

    def peers_reasons(self) -> str:
        """The reasons why known calculators give other answers."""
        return self._place(peers.reasons())

    def peers_range(self, what: str) -> str:
        """The range of answers to the six jobs, as shares of the reference: see `peers.spread`."""
        return self._say(f"peers_range({what})", f"{self._or_fault('peers', lambda: peers.spread(what)):.2f}")

    def simumax_table(self) -> str:
        """Peaks that SimuMax publishes, beside estimates."""
        return self._place(simumax.each())

    def simumax_error(self, what: str) -> str:
        """An error on these peaks in per cent: see `simumax.error`."""
        return self._say(f"simumax_error({what})", f"{self._or_fault('simumax', lambda: simumax.error(what)):.2f} %")

    def published_tables(self) -> str:
        """Estimates against what others published: numbers, ranges, verdicts, and every disagreement."""
        made = (
            accuracy.published_numbers(),
            accuracy.published_ranges(),
            accuracy.published_verdicts(),
            accuracy.published_by_job(),
            accuracy.published_off(),
        )
        return "\n\n".join(self._place(table) for table in made)

    def blind_tables(self) -> str:
        """Published figures that were kept back: errors at first and today, verdicts, and every figure."""
        return "\n\n".join(self._place(made()) for made in (blind.summary, blind.verdicts, blind.one_by_one))

    def blind_unsaid(self) -> str:
        """The jobs with figures that were kept back which no scenario says."""
        return self._place(blind.unsaid())

    def blind(self, what: str) -> str:
        """A figure of what was kept back: see `blind.figure`."""
        return self._say(f"blind({what})", self._or_fault("blind", lambda: blind.figure(what)))

    def data_sets(self, what: str) -> str:
        """The data sets whose lengths are known: their `count`, or their `names`."""
        known = {"count": str(len(DATA_SETS)), "names": ", ".join(f"`{name}`" for name in DATA_SETS)}
        return self._say(f"data_sets({what})", known[what])

    def reports_table(self) -> str:
        """Every published report of an RL job beside what `calc` computes for it."""
        return self._place(reports.table())

    def reports(self, what: str) -> str:
        """A figure of the published RL reports, such as `count`, `jobs` or `agree`: see `reports.count`."""
        return self._say(f"reports({what})", str(self._or_fault("reports", lambda: reports.count(what))))

    # --- how far off the times are

    def speed_error(self, what: str, of: str = "published") -> str:
        """An error of step times against `published` or `measured` ones, or against `iterations` of RL or `stages`.

        `what`: their `count`, or in per cent the `median` error, the `worst`, or the share `within` a fifth.
        """
        found = self._or_fault("speed_error", lambda: speed.error(what, of))
        shown = tables.NOT_PUBLISHED if found is None else f"{found:.0f}" + (" %" if what != "count" else "")
        return self._say(f"speed_error({what}, {of})", shown)

    def megatron_error(self, what: str, experts: bool = False) -> str:
        """An error against peaks that Megatron-LM's tests store: the `median` or the `worst`, or their `count`."""
        found = self._or_fault("megatron_error", lambda: golden.error(what, experts=experts))
        shown = tables.NOT_PUBLISHED if found is None else f"{found:.0f}" if what == "count" else f"{found:.1f} %"
        return self._say(f"megatron_error({what}, {experts})", shown)

    def megatron_golden(self, experts: bool = False) -> str:
        """Every peak that Megatron-LM's tests store, beside its estimate."""
        return self._place(golden.each(experts=experts))

    def speed_constants(self) -> str:
        """Every constant of a step time, with its source."""
        return self._place(speed.constants())

    def speed_tables(self) -> str:
        """Estimated step times against published ones: by source, and one by one."""
        return "\n\n".join(self._place(table) for table in (speed.by_source(), speed.each()))

    def speed_measured(self) -> str:
        """Estimated step times against measured ones: by kind of job, and those furthest off."""
        return "\n\n".join(self._place(table) for table in (speed.by_kind(), speed.furthest()))

    def speed_iterations(self) -> str:
        """Estimated times of RL iterations, and of their stages, against published ones."""
        return "\n\n".join(self._place(table) for table in (speed.rollouts(), speed.by_stage()))

    def speed_rates(self) -> str:
        """The rates that cards and hosts reached in this project's measurements."""
        made = (rates.products(), rates.copies(), rates.decoding(), rates.hosts())
        return "\n\n".join(self._place(table) for table in made)

    # --- sentences about the catalog

    def gpu_summary(self, gpu: str) -> str:
        """A card in one paragraph, with the largest model that each method fits on it."""
        return reference.gpu_summary(answers.catalog().gpu(gpu))

    def gpu_memory(self, gpu: str) -> str:
        """The memory that a process can use of a card."""
        return reference.gpu_memory(answers.catalog().gpu(gpu))

    def largest(self, gpu: str, task: str, method: str, gpus: int) -> str:
        """The largest model of the catalog that fits on so many cards of one kind."""
        found = reference.largest(answers.catalog().gpu(gpu), task, method, gpus)
        return self._say(f"largest({gpu}, {task}, {method}, {gpus})", found)

    def gpu_links(self, gpu: str) -> str:
        """The effect of a card's links on a job."""
        return reference.gpu_links(answers.catalog().gpu(gpu))

    def model_summary(self, model: str) -> str:
        """A model in one paragraph, with its parameter count against the published one."""
        return reference.model_summary(answers.catalog().model(model))
