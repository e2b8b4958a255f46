"""The macros of the pages: every number of the guide enters here, and every table is recorded for the exports.

A page names its jobs in its front matter, with the fields of a scenario file:

    scenarios:
      zero3-8192: {model: llama-3-8b, task: rm, gpu: rtx4090, gpus: 6, sharding: zero3, seq_len: 8192}

and writes `[[ peak("zero3-8192") ]]` where the number goes. Jobs that leave settings open, to ask for the configuration
to run, are listed under `recipes:`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import yaml

from calc.answers import answers, words
from calc.answers.words import refusal
from calc.base.schema import closest
from calc.base.units import GiB, gb, gib
from calc.estimate.verdict import FITS
from calc.memory.optimizer import Optimizer
from calc.models.architecture import Architecture, Head, parameters
from calc.models.families import ALIKE, FAMILIES, NESTED
from calc.models.lora import lora_parameters
from calc.models.sound_config import HEARING
from calc.recommend.clock import TOLERANCE
from calc.recommend.problem import PATIENCE, SENSIBLE
from calc.scenario.scenario import ScenarioError
from calc.site.calculator import addresses, comparison, pasting, picker
from calc.site.calculator.calculator import Place
from calc.site.formats import cite, published
from calc.site.i18n import languages
from calc.site.macros import formulas, notices
from calc.site.macros.bound import PageError, Record, Spoken, View
from calc.site.macros.effects import Effects
from calc.site.macros.lookups import Lookups
from calc.site.tables import charts, tables
from calc.site.text.inline import inline
from calc.site.views.advice import commands, minimal, recipes
from calc.site.views.catalog import changelog, reference, sheets
from calc.site.views.jobs import course, curves, hosts, layouts, ledgers, placements, roles, shares, speed
from calc.throughput.work import Passes


class Macros(Effects, Lookups):
    """All macros, bound to the page that is being rendered."""

    def all(self) -> dict[str, Callable[..., Any]]:
        """The macros by the names that pages use."""
        return {name: getattr(self, name) for name in dir(type(self)) if not name.startswith("_") and name != "all"}

    # --- one number in a sentence

    def peak(self, job: str, digits: int = 1, group: str | None = None) -> str:
        """The peak of the job's most loaded GPU, or of a group's, context and all."""
        moment = self._phase(job, None, group).moment
        return self._say(f"peak({_call(job, group=group)})", gib(moment.device_bytes, digits))

    def allocated(self, job: str, digits: int = 1, group: str | None = None) -> str:
        """The bytes that PyTorch's allocator counts at the peak."""
        moment = self._phase(job, None, group).moment
        return self._say(f"allocated({_call(job, group=group)})", gib(moment.allocated_bytes, digits))

    def gib(self, job: str, what: str, phase: str | None = None, digits: int = 2, group: str | None = None) -> str:
        """Memory of a job at a phase's peak: `peak`, `allocated`, `usable`, or a component."""
        moment = self._phase(job, phase, group).moment
        parts = ledgers.by_component(moment.lines)
        usable = self._ask(job).group.usable_bytes
        known = {"peak": moment.device_bytes, "allocated": moment.allocated_bytes, "usable": usable}
        if what not in known and what not in parts:
            allowed = ", ".join([*known, *parts])
            raise PageError(f"{job} has no {what!r} there; it has {allowed}{closest(what, [*known, *parts])}")
        call = f"gib({_call(job, what, str(phase), group=group)})"
        return self._say(call, gib(known.get(what, parts.get(what, 0)), digits))

    def host(self, job: str, phase: str | None = None, digits: int = 0) -> str:
        """Host memory of one node, in GB as machines are sold: in a phase, or the maximum."""
        held = {p.name: p.moment.device_bytes for p in self._ask(job).estimate.host_phases}
        if not held or (phase is not None and phase not in held):
            raise PageError(f"{job} has no host memory in {phase or 'any phase'}; it has {', '.join(held) or 'none'}")
        return self._say(f"host({job}, {phase})", gb(held[phase] if phase else max(held.values()), digits))

    def verdict(self, job: str, group: str | None = None) -> str:
        """The job's verdict, or a group's, with the first phase that does not fit."""
        answer = self._ask(job)
        found = self._or_fault(job, lambda: answer.group_of(group)) if group else answer.estimate
        word = ledgers.verdict_text(found)
        self._say(f"verdict({_call(job, group=group)})", word)
        return tables.verdict_html(found.verdict, self._said(word))

    def kv(self, job: str, what: str = "tokens", digits: int = 1) -> str:
        """The capacity of a job's KV cache: `tokens`, or `sequences` of full length at once; or `gib` on each GPU."""
        serving = self._ask(job).serving
        if not serving or what not in ("tokens", "sequences", "gib"):
            raise PageError(f"kv({job}, {what!r}): vLLM serves in that job: {bool(serving)}; tokens, sequences or gib")
        if what == "gib":
            return self.gib(job, "kv_cache", "rollout", digits, serving[0].name)
        count = serving[0].cache_tokens if what == "tokens" else serving[0].cache_sequences
        return self._say(f"kv({job}, {what})", f"{count:,}")

    def loaded(self, job: str, moment: int | str, digits: int = 1, what: str = "device") -> str:
        """The memory in use on a GPU at a moment of loading, given by index or by the start of its name.

        `what`: `device`, context and all, or `allocated`, what PyTorch's allocator counts.
        """
        held = self._or_fault(job, lambda: ledgers.loaded(self._ask(job), moment, what))
        call = f"loaded({job}, {moment}{'' if what == 'device' else f', {what}'})"
        return self._say(call, gib(held, digits))

    def held(self, job: str, moment: int | str) -> float:
        """The GiB allocated at a moment of loading, for comparison with a source's figure."""
        return self._or_fault(job, lambda: ledgers.loaded(self._ask(job), moment, "allocated")) / GiB

    def usable(self, gpu: str, digits: int = 2) -> str:
        """The memory of a card that a process can use."""
        return self._say(f"usable({gpu})", gib(answers.catalog().gpu(gpu).usable_bytes, digits))

    def sold(self, gpu: str) -> str:
        """The memory a card is sold with."""
        return self._say(f"sold({gpu})", f"{answers.catalog().gpu(gpu).memory_gb:g} GB")

    def gpu_name(self, gpu: str) -> str:
        """A card's name, linked to its page."""
        card = answers.catalog().gpu(gpu)
        return f'<a href="{self._root}hardware/gpus/{card.id}.html">{inline(card.name)}</a>'

    def count(self, model: str, head: Head = "lm") -> str:
        """A model's parameters, counted tensor by tensor."""
        return self._say(f"count({model}, {head})", f"{self.parameters(model, head):,}")

    def how_many(self, what: str) -> str:
        """The number of `gpus`, `nodes`, `models`, `records`, `messages` or `remedies`, or of the site's `tables`."""
        if what != "tables":
            return f"{reference.how_many(what):,}"
        return published.UNKNOWN if self._every is None else f"{len(self._every):,}"

    def families(self) -> str:
        """The families whose `config.json` works as a model, by their `model_type`."""
        return ", ".join(f"`{name}`" for name in sorted((*FAMILIES, *ALIKE, *NESTED, *HEARING)))

    # --- tables of jobs

    def phases_table(self, job: str, id: str, caption: str = "") -> str:
        """A job's memory, phase by phase."""
        answer = self._ask(job)
        return self._place(ledgers.phases(answer, id, caption or f"{self._label(job)}: {ledgers.headline(answer)}"))

    def curve(self, job: str, id: str, caption: str, over: str = "seq_len", values: Sequence[int] = ()) -> str:
        """A job's memory against its sequence length (`seq_len`, `response_len`) or its number of `gpus`."""
        self._ask(job)
        return self._place(self._or_fault(job, lambda: curves.curve(self._scenarios[job], over, id, caption, values)))

    def lines_table(
        self, job: str, id: str, caption: str = "", phase: str | None = None, group: str | None = None
    ) -> str:
        """Every line of the ledger at a job's peak."""
        caption = caption or f"{self._label(job)}: every line of the ledger"
        shown = self._phase(job, phase, group)
        return self._place(ledgers.lines(self._ask(job), id, caption, shown, self._root))

    def roles_table(self, job: str, id: str, caption: str = "") -> str:
        """The roles of a job, and the place of their weights and states."""
        return self._place(roles.roles(self._ask(job), id, caption or f"{self._label(job)}: its roles"))

    def timeline(self, job: str, id: str, caption: str = "") -> str:
        """Memory during loading, moment by moment."""
        return self._place(ledgers.timeline(self._ask(job), id, caption or f"{self._label(job)}: loading"))

    def course(self, job: str, id: str, caption: str) -> str:
        """A job from loading to the end of a step, instant by instant."""
        return self._place(course.course(self._ask(job), id, caption))

    def placements(self, jobs: Sequence[str], id: str, caption: str) -> str:
        """The roles of each job on their GPUs, filled to the peak of each group."""
        return self._place(placements.placements({self._label(job): self._ask(job) for job in jobs}, id, caption))

    def shares(self, jobs: Sequence[str], id: str, caption: str) -> str:
        """Weights, gradients and states on each rank of each job."""
        asked = {self._label(job): self._ask(job) for job in jobs}
        return self._place(self._or_fault(id, lambda: shares.shares(asked, id, caption)))

    def layouts(self, model: str, gpus: int, tensor: int, id: str, caption: str) -> str:
        """A model spread over `gpus` in each way that there is, the last with stages whose layers `tensor` share."""
        found = answers.catalog().model(model)
        return self._place(self._or_fault(id, lambda: layouts.table(found, gpus, tensor, id, caption)))

    def kv_table(self, jobs: Sequence[str], id: str, caption: str) -> str:
        """The capacity of each job's KV cache."""
        asked = {self._label(job): self._ask(job) for job in jobs}
        return self._place(self._or_fault(id, lambda: roles.caches(asked, id, caption)))

    def compare(self, jobs: Sequence[str], id: str, caption: str) -> str:
        """Jobs side by side, with a source's reports about them if the page quotes any."""
        return self._place(ledgers.compare(*self._labelled(jobs, id, caption)))

    def bars(self, jobs: Sequence[str], id: str, caption: str) -> str:
        """The peak of each job as a bar, stacked by component."""
        return self._place(ledgers.bars({self._label(job): self._ask(job) for job in jobs}, id, caption))

    def remedies(self, base: str, jobs: Sequence[str], id: str, caption: str) -> str:
        """The effect of each change to `base`, one row per job."""
        return self._place(ledgers.compare(*self._labelled([base, *jobs], id, caption), base=self._ask(base)))

    def host_table(
        self, jobs: Sequence[str], id: str, caption: str, node_gb: int | None = None, killed_at: float = 1.0
    ) -> str:
        """Host memory of jobs side by side; with `node_gb` against a node that kills jobs at the share `killed_at`."""
        node = None if node_gb is None else hosts.Node(node_gb, killed_at)
        return self._place(hosts.host(*self._labelled(jobs, id, caption), node))

    def scenario(self, job: str) -> str:
        """A job as a scenario file, to copy and run."""
        self._ask(job)
        text = yaml.safe_dump(dict(self._scenarios[job]), sort_keys=False, default_flow_style=False)
        return f'```yaml title="{job}.yaml"\n{text}```'

    # --- what to run

    def recipes_table(self, jobs: Sequence[str], id: str, caption: str) -> str:
        """The recommendation for each of these jobs, and what the next faster configuration lacks."""
        return self._place(recipes.overview([self._recipe(job) for job in jobs], id, caption))

    def recipe_table(self, job: str, id: str, caption: str = "") -> str:
        """The recommendation for a job, its alternatives, the next faster configuration, and each setting's effect."""
        found = self._recipe(job)
        return self._place(recipes.whole(found, id, caption or f"{recipes.title(found)}: what to run, and what else"))

    def commands(self, jobs: Sequence[str]) -> str:
        """For each of these jobs, behind a click: the complete command with the files that it reads, and the phases."""
        page = languages.split(self._current().source)[0].removesuffix(".md").replace("/", "-")
        tables = [commands.phases(self._recipe(job), f"{page}-{job}-phases") for job in jobs]
        pictures = [commands.folded(self._said(table.caption), self._place(table)) if table else "" for table in tables]
        shown = [commands.command(self._recipe(job), self._said) for job in jobs]
        return "\n\n".join(part for both in zip(shown, pictures, strict=True) for part in both)

    def recipe_course(self, job: str, id: str, caption: str) -> str:
        """The recommended configuration for a job from loading to the end of a step, instant by instant."""
        best = self._recipe(job).answer.recommended
        if best is None:
            raise PageError(f"recipe {job}: nothing is recommended, so there is nothing to draw")
        return self._place(course.course(words.answered(best.judged), id, caption))

    def recipes_matrix(self, jobs: Sequence[Sequence[str]], id: str, caption: str) -> str:
        """Recommendations, one row of jobs per task, one column per machine."""
        return self._place(recipes.matrix([[self._recipe(job) for job in row] for row in jobs], id, caption))

    def recipe(self, job: str, what: str) -> str:
        """A figure of a recommendation, such as `verdict`, `peak` or `considered`: see `recipes.said`."""
        found = self._recipe(job)
        return self._say(f"recipe({job}, {what})", self._or_fault(job, lambda: recipes.said(found, what)))

    def wanted(self) -> str:
        """The probability of fitting that a recommendation asks for, in per cent."""
        return self._say("wanted()", f"{100 * FITS:.0f} %")

    def tolerance(self) -> str:
        """The difference between times, in per cent, up to which neither counts as quicker."""
        return self._say("tolerance()", f"{100 * TOLERANCE:.0f} %")

    def sensible(self) -> str:
        """The factor by which a smaller machine may take more GPU hours."""
        return self._say("sensible()", f"{SENSIBLE:g}")

    def patience(self) -> str:
        """The times as long from which an offloaded optimizer gives way to what stays on the card."""
        return self._say("patience()", f"{PATIENCE:g}")

    def published_minimum(self) -> str:
        """verl's published minimal configurations beside ours."""
        return self._place(minimal.table())

    def refused(self, job: str) -> str:
        """The field and value of a job that its framework refuses."""
        try:
            self._ask(job)
        except ScenarioError as error:
            reason = refusal(error)
            self._say(f"refused({job})", reason)
            return f"<code>{inline(reason)}</code>"
        raise PageError(f"{job} is not refused: the sentence around it is wrong")

    def calculator(self, job: str) -> str:
        """The calculator, with the answer to its first job."""
        return self._worded(picker.show(self._recipe(job), Place(self._root, self._place, self._translated)))

    def comparison(self, jobs: Sequence[str], id: str, caption: str) -> str:
        """Jobs side by side, and the form to compare others."""
        found = [self._recipe(job) for job in jobs]
        return self._worded(comparison.show(found, id, caption, Place(self._root, self._place, self._translated)))

    def diagnosis(self, job: str) -> str:
        """The door for a job that died, with a job's command and log as the worked example."""
        return self._worded(pasting.show(self._ask(job), Place(self._root, self._place, self._translated)))

    # --- how fast it runs

    def speed_table(self, job: str, id: str, caption: str = "") -> str:
        """A job's step time, term by term."""
        caption = caption or f"{self._label(job)}: where the time goes"
        return self._place(self._or_fault(job, lambda: speed.terms(self._ask(job), id, caption, self._root)))

    def speed_compare(self, jobs: Sequence[str], id: str, caption: str, items: int) -> str:
        """Step times of jobs side by side, and the hours that `items` sequences or pairs take."""
        asked = {self._label(job): self._ask(job) for job in jobs}
        return self._place(self._or_fault(id, lambda: speed.compare(asked, id, caption, items)))

    def quicker(self, job: str, base: str, digits: int = 1) -> str:
        """The speed-up of a job over `base` on the same sequences, as a factor."""
        times = self._or_fault(job, lambda: speed.hours(self._ask(base), 1) / speed.hours(self._ask(job), 1))
        return self._say(f"quicker({job}, {base})", f"{times:.{digits}f}")

    def hours(self, job: str, items: int, digits: int = 0) -> str:
        """Hours that a job takes for `items` sequences or pairs."""
        found = self._or_fault(job, lambda: speed.hours(self._ask(job), items))
        return self._say(f"hours({job}, {items})", f"{found:,.{digits}f}")

    def even_price(self, job: str, base: str, digits: int = 1) -> str:
        """The price of a GPU hour, in those of `base`, at which a job costs as much as `base` on the same sequences."""

        def ratio() -> float:
            spent = [speed.hours(self._ask(each), 1) * self._ask(each).scenario.gpus for each in (base, job)]
            return spent[0] / spent[1]

        return self._say(f"even_price({job}, {base})", f"{self._or_fault(job, ratio):.{digits}f}")

    def short_of(self, job: str, items: int, reported: float, digits: int = 1) -> str:
        """The factor by which the hours computed for `items` sequences or pairs fall short of those `reported`."""
        found = self._or_fault(job, lambda: reported / speed.hours(self._ask(job), items))
        return self._say(f"short_of({job}, {items}, {reported})", f"{found:.{digits}f}")

    def gpu_hours(self, job: str, items: int, digits: int = 0) -> str:
        """Hours for `items` sequences or pairs, times the job's GPUs: what a GPU hour's price multiplies."""
        found = self._or_fault(job, lambda: speed.hours(self._ask(job), items)) * self._ask(job).scenario.gpus
        return self._say(f"gpu_hours({job}, {items})", f"{found:,.{digits}f}")

    def priced(self, jobs: Sequence[str], items: int, words: str) -> str:
        """A link to the comparison of these jobs, where readers put in their own prices."""
        given = [dict(self._ask(job).given) for job in jobs]
        asked = [addresses.query(addresses.of_scenario(job, answers.catalog())) for job in given]
        return f'<a href="{escape(addresses.compare(self._root, asked, items))}">{words}</a>'

    # --- formulas and versions

    def formula(self, name: str, example: Mapping[str, Any] | None = None, size: bool = True, label: str = "") -> str:
        """A function of `calc`, as tested, with a worked example; `size` says that its result is in bytes."""
        try:
            return formulas.show(name, example, size, label)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            raise PageError(f"formula {name}: {error}") from error

    def arch(self, model: str) -> Architecture:
        """A model's architecture, as an example's argument."""
        return answers.catalog().model(model).architecture

    def parameters(self, model: str, head: Head = "lm") -> int:
        """A model's parameters, as an example's argument."""
        return parameters(self.arch(model), head=head)

    def adapter_parameters(self, model: str, rank: int) -> int:
        """The parameters of adapters on all linear layers, as an example's argument."""
        return lora_parameters(self.arch(model), rank, "all-linear")

    def optimizer(self, kind: str, impl: str = "fused") -> Optimizer:
        """An optimizer, as an example's argument."""
        return Optimizer(kind, impl)

    def passes(self) -> Passes:
        """One forward, as an example's argument."""
        return Passes()

    def saved_table(self) -> str:
        """The bytes that a decoder layer of every model keeps for backward."""
        return self._place(sheets.saved(self._root))

    def operations_table(self, model: str, linear: str = "") -> str:
        """The bytes that each operation of a decoder layer keeps for backward; see `sheets.operations`."""
        return self._place(sheets.operations(answers.catalog().model(model), linear))

    def components(self) -> str:
        """The key to the components' colours."""
        return charts.legend(list(charts.COMPONENTS), "what a process can use")

    def published_data(self) -> str:
        """Every published table with its downloads."""
        return published.UNKNOWN if self._every is None else published.listed(self._every, self._root)

    def english(self, page: str, words: str) -> str:
        """From a translation, a link to a page that has no translation: `hardware/index.md#cards`."""
        path, _, anchor = page.partition("#")
        address = languages.url(path) + (f"#{anchor}" if anchor else "")
        return f'<a href="{self._root}{address}" hreflang="en">{words}</a>'

    def changelog(self) -> str:
        """The changes of each release, the newest first."""
        return "\n\n".join(self._released(release) for release in changelog.releases()) or changelog.NONE

    def third_parties(self) -> str:
        """The third-party software that the site redistributes."""
        return notices.table()

    def clone(self) -> str:
        """The commands that fetch the project and set it up, as a block of code."""
        address = cite.repository()
        where = "" if address else "  # ADDRESS: of this project's repository"
        return f"```sh\ngit clone {address or 'ADDRESS'} headroom{where}\ncd headroom\nmake site\n```"

    def versions(self) -> str:
        """The versions of catalog and calc behind this build."""
        v = answers.versions()
        return f"catalog <code>{v['catalog']}</code>, calc <code>{v['calc']}</code>"


def _call(*arguments: str, group: str | None) -> str:
    """The arguments of a macro, as the record of spoken numbers writes them."""
    return ", ".join([*arguments, *([group] if group else [])])


__all__ = ["Macros", "PageError", "Record", "Spoken", "View"]
