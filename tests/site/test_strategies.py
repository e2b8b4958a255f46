"""Pages about remedies: each has its pairs of jobs, and a sentence that claims a direction fails where it is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from sites import ROOT

from calc.base.units import GiB
from calc.site.i18n import languages
from calc.site.macros.macros import Macros, PageError, Record, View
from calc.site.text.sources import front
from calc.site.views.jobs import strategies

FOLDER = ROOT / "docs" / "strategies"
PAGES = sorted(p for p in FOLDER.glob("*.md") if p.stem != "index" and not languages.split(p.name)[1])
HEADINGS = [
    "Before and after",
    "What it costs in time",
    "When it helps, and when it changes nothing",
    "How to switch it on",
    "What the posts claim",
    "More",
]
# every remedy that the five posts name; two that they do not are in the test below
NAMED = {
    "gradient-accumulation", "mixed-precision", "model-parallelism", "activation-checkpointing", "8-bit-adam", "lora",
    "flashattention", "zero-stages", "shorter-sequences", "smaller-micro-batch", "packing", "bf16-gradients", "offload",
    "expandable-segments", "ray-and-vllm", "fewer-samples", "fewer-workers", "smaller-rollout-n",
}  # fmt: skip
JOB = {"model": "llama-3.1-8b", "task": "sft", "framework": "openrlhf", "gpu": "a100-80-sxm", "gpus": 8,
       "sharding": "zero3", "attention": "flash", "micro_batch": 1, "global_batch": 64, "seq_len": 4096}  # fmt: skip
JOBS = {
    "kept": JOB | {"checkpointing": "none"},
    "recomputed": JOB | {"checkpointing": "full"},
    "twice": JOB | {"checkpointing": "full", "global_batch": 128},
    "offloaded": JOB | {"checkpointing": "full", "offload.optimizer": True},
}


@pytest.fixture
def macros() -> Macros:
    pairs = {"sft": {"job": "SFT", "before": "kept", "after": "recomputed"}}
    view = View("strategies/x.md", "strategies/x.html", {"scenarios": JOBS, "remedy": {"name": "X", "pairs": pairs}})
    return Macros(lambda: view, Record())


def test_every_remedy_of_the_posts_has_a_page() -> None:
    assert {p.stem for p in PAGES} == NAMED | {"pinned-memory", "expert-parallelism"}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_page_has_two_jobs_before_and_after_and_all_its_parts(page: Path) -> None:
    meta, body = front(page)
    assert re.findall(r"^## (.*)$", body, re.M) == HEADINGS
    assert [b for b in body.split("\n\n") if b.strip()][1].startswith("**The short answer.**")
    assert "[[ switch_on() ]]" in body
    assert {row["framework"] for row in meta["switch"]} >= {"openrlhf", "trl", "verl"}
    assert "[[ post(" in body
    assert "](../method/" in body
    assert "](../recipes/" in body
    shown = re.findall(r'before_after\("([\w-]+)"\)', body)
    assert len(shown) >= 2
    assert len(set(shown)) == len(shown)
    assert sorted(shown) == sorted(meta["remedy"]["pairs"])
    assert "[[ remedy_table() ]]" in body
    assert re.search(r"\[\[ (unchanged|adds|refused)\(", body), "no word on where it changes nothing, shown by a job"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_pair_differs_in_the_remedy_alone(page: Path) -> None:
    """A before and an after are the same job: same model, task and cards, but for what the page is about."""
    meta, _ = front(page)
    for pair in strategies.pairs(meta).values():
        before, after = pair.before.scenario, pair.after.scenario
        assert (before.model, before.task, before.gpu) == (after.model, after.task, after.gpu)
        if page.stem != "fewer-workers":
            assert before.gpus == after.gpus


def test_a_summarys_numbers_are_differences_of_estimates(macros: Macros) -> None:
    pair = macros._pairs()["sft"]
    table = strategies.summary([pair], "x", "X")
    row = dict(zip([c.key for c in table.columns], table.rows[0], strict=True))
    saved = pair.before.device_bytes - pair.after.device_bytes
    assert row["saves"].exact == saved
    assert row["saves"].value == saved / GiB
    assert row["verdict_before"].value == "fits"
    assert row["times"].value > 1


def test_what_components_save_in_a_phase_adds_up(macros: Macros) -> None:
    """Components that move by less than five MiB have no column of their own."""
    table = strategies.by_phase(macros._pairs()["sft"], "x", "X")
    first = [c.key for c in table.columns].index("saves")
    assert {row[0].value for row in table.rows} == {"load", "forward", "backward", "step"}
    for row in table.rows:
        whole, *parts = [cell.exact for cell in row[first:] if cell.exact is not None]
        assert abs(whole - sum(parts)) < 17 * 5 * 2**20


def test_the_overview_has_every_pair_of_every_page() -> None:
    table = strategies.overview(strategies.remedies(), "../")
    pairs = sum(len(front(p)[0]["remedy"]["pairs"]) for p in PAGES)
    assert len(table.rows) == pairs
    assert {row[0].value for row in table.rows} == {
        front(p)[0]["remedy"]["name"] for p in PAGES if "remedy" in front(p)[0]
    }


RIGHT = [
    ("saves", "kept", "recomputed"),
    ("adds", "recomputed", "kept"),
    ("unchanged", "recomputed", "twice"),
    ("longer", "kept", "recomputed"),
    ("faster", "recomputed", "kept"),
    ("as_fast", "recomputed", "twice"),
    ("adds_host", "recomputed", "offloaded"),
    ("saves_host", "offloaded", "recomputed"),
]
WRONG = [
    ("saves", "recomputed", "kept"),
    ("saves", "recomputed", "twice"),
    ("adds", "kept", "recomputed"),
    ("unchanged", "kept", "recomputed"),
    ("longer", "recomputed", "kept"),
    ("faster", "kept", "recomputed"),
    ("as_fast", "kept", "recomputed"),
    ("adds_host", "kept", "recomputed"),
    ("saves_host", "recomputed", "offloaded"),
]


@pytest.mark.parametrize(("claim", "before", "after"), RIGHT)
def test_a_claim_that_is_right_is_said(macros: Macros, claim: str, before: str, after: str) -> None:
    assert getattr(macros, claim)(before, after)


@pytest.mark.parametrize(("claim", "before", "after"), WRONG)
def test_a_claim_that_is_wrong_stops_the_build(macros: Macros, claim: str, before: str, after: str) -> None:
    with pytest.raises(PageError):
        getattr(macros, claim)(before, after)


def test_a_claim_of_a_phase_is_about_that_phase(macros: Macros) -> None:
    assert macros.unchanged("kept", "recomputed", phase="load")
    with pytest.raises(PageError):
        macros.unchanged("kept", "recomputed", phase="forward")


def test_a_pair_that_is_not_there_is_one_line(macros: Macros) -> None:
    with pytest.raises(PageError, match="no pair 'rl'"):
        macros.before_after("rl")


def test_pages_say_their_answer_first_and_describe_themselves() -> None:
    """By-hand pages but the home page, the method and the reference, whose first paragraph is the answer."""
    docs = ROOT / "docs"
    descriptions: dict[str, Path] = {}
    for page in sorted(docs.rglob("*.md")):
        meta, body = front(page)
        if meta.get("generated"):
            continue
        about = str(meta.get("description", ""))
        assert 40 <= len(about) <= 200, f"{page}: {about}"
        assert about not in descriptions, page
        descriptions[about] = page
        blocks: list[Any] = [b for b in body.split("\n\n") if b.strip()]
        opening = blocks[next(i for i, b in enumerate(blocks) if b.lstrip().startswith("# ")) + 1]
        assert opening[0] not in "#|[", f"{page} opens with no sentence: {opening[:60]}"
        short = "**结论。**" if languages.split(page.name)[1] else "**The short answer.**"
        if page.parent.name in ("strategies", "recipes", "case-studies", "hardware", "models"):
            assert opening.startswith(short), page


def test_gpu_hours_are_hours_times_gpus_and_the_comparison_holds_the_job(macros: Macros) -> None:
    """Eight cards: samples take eight times as many GPU hours as hours; the link has model, count and samples."""
    hours, gpu_hours = (float(shown(macros)) for shown in (
        lambda m: m.hours("kept", 1000, 4), lambda m: m.gpu_hours("kept", 1000, 4)))  # fmt: skip
    assert gpu_hours == pytest.approx(8 * hours, abs=1e-3)
    link = macros.priced(["kept", "recomputed"], 1000, "prices")
    assert link.count("compare=") == 2
    assert "samples=1000" in link
    assert "llama-3.1-8b" in link and link.endswith(">prices</a>")
