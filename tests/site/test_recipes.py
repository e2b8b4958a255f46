"""The recipes: what stands there is what the search answers and what an estimate confirms, with a command for each."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sites import ROOT

from calc.answers import answers, kept, searched, words
from calc.base.refusal import Refusal
from calc.base.units import GB, GiB
from calc.catalog.catalog import load
from calc.engines.rollout import Unstarted
from calc.estimate.estimate import estimate
from calc.estimate.verdict import FITS
from calc.launch import Launch
from calc.recommend import Recommendation, recommend
from calc.recommend.problem import Miss
from calc.recommend.text import as_dict
from calc.resolve.parse import parse
from calc.scenario.rules import flatten
from calc.site.macros import rendered
from calc.site.macros.macros import Macros, PageError, Record, View
from calc.site.tables import tables
from calc.site.text import sources
from calc.site.views.advice import commands, minimal, recipes

DOCS = ROOT / "docs/recipes"
NOTHING = ("nothing fits", "vLLM does not start")
TASKS = ("sft", "reward-model", "dpo", "ppo", "grpo")
TIERS = {"entry": ("a100-40-sxm", {2}), "production": ("a100-80-sxm", {8}), "budget": ("rtx4090", {2, 4, 8})}


@cache
def record() -> Record:
    """The record of what the macros of the recipes pages publish."""
    found = rendered.pages(DOCS)
    found.all()
    return found.record


@pytest.fixture(scope="module", autouse=True)
def answered(project: Path) -> Iterator[None]:
    """The catalog and the pages of the sample, whose build has searched all of these recipes and kept them.

    Its cards are all that alternatives are made of.
    """
    catalog = load(project)
    known = (kept.of_gpu, kept.of_model, kept.of_models, searched.catalog, record, front)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(globals(), "DOCS", project / "docs/recipes")
        patched.setattr(answers, "catalog", lambda: catalog)
        for each in known:
            each.cache_clear()
        yield
    for each in known:
        each.cache_clear()


@cache
def front(page: str) -> Mapping[str, Any]:
    return sources.front(DOCS / f"{page}.md")[0]


def named(page: str, macro: str) -> list[tuple[list[str], str]]:
    """The calls of a macro over a list of jobs on a page: the jobs, and the table's id."""
    body = sources.front(DOCS / f"{page}.md")[1]
    calls = re.findall(rf"\[\[ {macro}\(\[(.*?)\](.*?)\) \]\]", body, re.S)
    return [(re.findall(r'"([^"]+)"', jobs), "".join(re.findall(r'id="([^"]+)"', rest))) for jobs, rest in calls]


def rows(table_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tables.to_dict(record().tables[table_id][0])["rows"]
    return found


@pytest.mark.parametrize("page", TASKS)
def test_an_answer_that_was_kept_is_what_the_search_answers(page: str) -> None:
    job = next(iter(front(page)["recipes"].values()))
    before, fresh = recipes.recommended(job).answer, recommend(flatten(job), answers.catalog())
    # the version of the catalog aside: what is kept serves every catalog with the same data behind it
    assert as_dict(before) == as_dict(fresh)


@pytest.mark.parametrize("page", TASKS)
def test_each_row_is_the_answer_and_what_an_estimate_confirms(page: str) -> None:
    jobs = front(page)["recipes"]
    shown = named(page, "recipes_table")
    assert {job for group, _ in shown for job in group} == set(jobs)
    for group, table_id in shown:
        for job, row in zip(group, rows(table_id), strict=True):
            answer = recipes.recommended(jobs[job]).answer
            best = answer.recommended
            if best is None:
                assert answer.verdict in NOTHING
                assert (row["verdict"], row["total"]) == (answer.verdict, None)
                continue
            again = estimate(parse(best.scenario.as_dict()))
            peak = max(p.moment.device_bytes for g in again.groups for p in g.phases)
            assert again.verdict == row["verdict"] == "fits"
            assert again.fit_probability >= FITS
            assert (row["total"], row["probability"]) == (round(peak / GiB, 1), round(100 * again.fit_probability))
            assert row["settings"] == ", ".join(words.settings(best.scenario))
            assert best.throughput
            assert row["step"] == round(best.throughput.step_seconds, 1)
            assert row["bound"] == best.throughput.bound_by
            held = max([p.moment.device_bytes for p in again.host_phases], default=0)
            assert row["host"] == round(held / GB)


@pytest.mark.parametrize("page", TASKS)
def test_each_job_of_each_tier_has_its_command_or_the_reason_why_not(page: str) -> None:
    jobs = front(page)["recipes"]
    given = [job for group, _ in named(page, "commands") for job in group]
    assert sorted(given) == sorted(jobs)
    for gpu, counts in TIERS.values():
        assert {jobs[job]["gpus"] for job in given if jobs[job]["gpu"] == gpu} <= counts | {2, 4, 8}
        assert counts <= {jobs[job]["gpus"] for job in given if jobs[job]["gpu"] == gpu}
    for job in given:
        recipe = recipes.recommended(jobs[job])
        shown = commands.command(recipe)
        if recipe.answer.launch is None:
            assert "no command" in shown
            continue
        inside = "\n".join(line.removeprefix("    ") for line in shown.splitlines())
        assert recipe.answer.launch.command in inside
        for name, content in recipe.answer.launch.files.items():
            assert f'title="{name}"' in inside
            assert content.rstrip() in inside
        for note in recipe.answer.launch.notes:
            assert note.replace("`", "") in html.unescape(re.sub("<[^>]+>", "", inside))


@pytest.mark.parametrize("page", TASKS)
def test_each_tier_has_the_posted_claim_with_a_computed_verdict_beside_it(page: str) -> None:
    meta = front(page)
    shown = {job: table_id for group, table_id in named(page, "compare") for job in group}
    body = sources.front(DOCS / f"{page}.md")[1]
    for tier, (gpu, _) in TIERS.items():
        claims = [job for job, quote in meta["said"].items() if job.startswith(f"posted-{tier}") and quote]
        assert len(claims) == 1
        assert meta["scenarios"][claims[0]]["gpu"] == gpu
        assert f"{{#{tier}}}" in body
        row = next(r for r in rows(shown[claims[0]]) if r["reported"])
        assert row["reported"] == meta["said"][claims[0]]
        computed = answers.ask(meta["scenarios"][claims[0]])
        assert row["total"] == round(computed.device_bytes / GiB, 2)
        assert row["verdict"].startswith("out of memory" if computed.estimate.verdict == "oom" else "")


def test_what_the_pages_say_of_the_posted_tiers_holds() -> None:
    """Sentences that no macro makes: each is a verdict here."""

    def said(page: str, job: str) -> tuple[str, str | None]:
        found = answers.ask(front(page)["scenarios"][job]).estimate
        return found.verdict, found.verdict_phase

    for page in ("ppo", "grpo"):
        assert said(page, "posted-entry-0.7") == ("oom", "load")
        assert said(page, "posted-budget-8") == ("oom", "load")
        assert said(page, "posted-production")[0] == "oom"
        assert said(page, "posted-production-sleep")[0] == "fits"
    assert said("dpo", "posted-budget-2") == said("dpo", "posted-budget-8") == ("oom", "load")
    for page in ("sft", "reward-model"):
        assert said(page, "posted-entry")[0] == said(page, "posted-budget-2")[0] == "fits"
        assert said(page, "posted-production")[0] == "fits"
    methods = {page: recipes.recommended(front(page)["recipes"]["entry-8b"]) for page in ("sft", "reward-model", "dpo")}
    assert {recipes.said(found, "method") for found in methods.values()} == {"full fine-tuning"}
    for job in ("entry-7b", "entry-8b"):
        best = recipes.recommended(front("ppo")["recipes"][job]).answer.recommended
        assert best
        assert {"full fine-tuning", "ZeRO-3", "asleep while others work"} <= set(words.settings(best.scenario))
        assert best.scenario.offload.optimizer
    grpo = {job: recipes.recommended(given) for job, given in front("grpo")["recipes"].items()}
    assert recipes.said(grpo["budget-8-14b"], "verdict") == "fits"


def test_the_whole_table_has_the_next_faster_one_the_alternatives_and_the_advice() -> None:
    job = front("sft")["recipes"]["entry-8b"]
    found = recommend(flatten(job), answers.catalog())
    assert found.recommended
    assert found.fails
    table, _ = record().tables["recipes-sft-entry-8b"]
    shown = rows("recipes-sft-entry-8b")
    assert [r["job"] for r in shown] == ["Run this", recipes.NEXT, *[f"Or: {a.trades}" for a in found.alternatives]]
    assert shown[1]["verdict"] == words.lacks(found.fails)
    assert shown[1]["step"] < shown[0]["step"]
    for line in found.advice:
        assert line[1:].replace("`", "") in re.sub("<[^>]+>", "", table.note)


def test_where_nothing_fits_the_row_says_what_would_have_to_change() -> None:
    found = recipes.recommended(front("grpo")["recipes"]["budget-2-7b"])
    assert found.answer.recommended is None
    row = next(r for r in rows("recipes-grpo-budget") if r["verdict"] == found.answer.verdict)
    assert row["faster"].startswith("; ".join(found.answer.advice))
    assert row["settings"] is row["total"] is row["step"] is None
    closest = recipes.whole(found, "x", "x").rows[0]
    assert closest[0].value == recipes.CLOSEST


def test_matrix_cells_have_the_scenario_that_reaches_them() -> None:
    table, _ = record().tables["recipes-at-a-glance"]
    cells = [cell for row in table.rows for cell in row[1:]]
    assert len(cells) == 25
    for cell in cells:
        verdict, peak, how = cell.values
        if verdict is None:
            assert str(how).startswith(NOTHING)
            continue
        assert cell.scenario
        again = estimate(parse(cell.scenario))
        assert again.verdict == verdict
        assert cell.exact == max(p.moment.device_bytes for g in again.groups for p in g.phases)
        assert isinstance(peak, float)


def test_published_minimum_says_what_is_different_where_ours_is_smaller() -> None:
    shown = tables.to_dict(minimal.table())["rows"]
    assert len(shown) == 5
    assert all(r["ours"] <= r["theirs"] for r in shown)
    assert all("→" in r["different"] for r in shown if r["ours"] < r["theirs"])


def test_a_command_keeps_its_text_whatever_is_in_it() -> None:
    job = front("sft")["recipes"]["entry-8b"]
    found = recipes.recommended(job)
    nasty = Launch("run \\\n  --a='<b> & ```'\n", {"x.json": '{"a": "<i>"}'}, ("a `b` <c>",))
    answer = Recommendation(**{**vars(found.answer), "launch": nasty})
    shown = commands.command(found._replace(answer=answer))
    assert shown.startswith('??? example "')
    assert "    ````bash" in shown
    assert "      --a='<b> & ```'" in shown
    assert '    {"a": "<i>"}' in shown
    assert "<li>a <code>b</code> &#60;c&#62;</li>" in shown


def test_lacking_is_said_of_what_lacks() -> None:
    found = recipes.recommended(front("sft")["recipes"]["entry-8b"]).answer.fails
    assert isinstance(found, Miss)
    assert words.lacks(found._replace(where="gpu", phase="step", shortfall=3 * GiB)) == "lacks 3.0 GiB in step"
    host = found._replace(where="host", phase="save", shortfall=5 * GB)
    assert words.lacks(host) == "lacks 5 GB of host memory (save)"
    unstarted = Unstarted(Refusal("rollout.gpu_memory_utilization", "0.2", "more"), "too little")
    assert "too little" in words.lacks(found._replace(where="vllm", shortfall=None, reason=unstarted))


def test_a_page_that_asks_for_a_recipe_it_does_not_name_is_refused() -> None:
    view = View("x.md", "x.html", {"recipes": {"one": front("sft")["recipes"]["entry-8b"]}, "scenarios": {}})
    macros = Macros(lambda: view)
    with pytest.raises(PageError, match="no recipe 'on' in the front matter; it has one"):
        macros.commands(["on"])
    with pytest.raises(PageError, match="no 'pace' of this recommendation"):
        macros.recipe("one", "pace")


def test_a_job_that_is_not_refused_is_no_refusal() -> None:
    scenarios = {"runs": front("sft")["scenarios"]["posted-entry"], "not": front("ppo")["scenarios"]["posted-entry"]}
    macros = Macros(lambda: View("x.md", "x.html", {"scenarios": scenarios}))
    assert macros.refused("not") == "<code>method lora</code>"
    with pytest.raises(PageError, match="runs is not refused"):
        macros.refused("runs")


def test_every_page_leads_to_the_recipes(site: Path) -> None:
    assert 'href="recipes/index.html"' in (site / "index.html").read_text("utf-8")
    for page in TASKS:
        shown = (site / f"recipes/{page}.html").read_text("utf-8")
        jobs = front(page)["recipes"].values()
        launched = [j for j in jobs if recipes.recommended(j).answer.launch]
        assert len(re.findall('<details class="example">', shown)) == len(launched)
        fitting = [j for j in jobs if recipes.recommended(j).answer.recommended]
        assert len(re.findall(rf'<figure class="computed" id="recipes-{page}-[^"]+-phases"', shown)) == len(fitting)
