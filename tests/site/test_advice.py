"""What to run: the tables say what the search says, fit by estimate, and come from the cache as they were computed."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sites import ROOT

from calc.answers import advice, along, answers, kept, processes, topics
from calc.answers.advice import Machine
from calc.answers.topics import Answers
from calc.base.schema import InputError
from calc.base.units import GiB
from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.recommend import recommend, smallest
from calc.recommend.problem import Problem
from calc.resolve.parse import parse
from calc.site.tables.tables import to_html
from calc.site.views.advice import advised

TRANSFERRED = 350_000  # bytes of a page, its tables included


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A catalog of three cards and one model, whose every answer is new."""
    whole = load()
    cards = {name: whole.gpus[name] for name in ("a100-80-sxm", "rtx4090", "v100-16")}
    catalog = replace(whole, gpus=cards, models={"qwen2.5-0.5b": whole.models["qwen2.5-0.5b"]})
    use(monkeypatch, catalog)
    monkeypatch.setattr(advice, "JOBS", {"sft": advice.JOBS["sft"]})
    yield
    forget()


def forget() -> None:
    for each in (kept.of_gpu, kept.of_model, advice.fields_of):
        each.cache_clear()
    topics.FOUND.clear()


def use(monkeypatch: pytest.MonkeyPatch, catalog: Any) -> None:
    """Makes `catalog` that of the site, and computes in this process."""
    forget()
    monkeypatch.setattr(answers, "catalog", lambda: catalog)
    monkeypatch.setattr(answers, "spread", lambda work, *columns: map(work, *columns))


def pages() -> list[str]:
    catalog = answers.catalog()
    made = [advised.on_gpu(g, "sft", "../") for g in catalog.gpus.values() if not g.lacks_bf16]
    return [
        to_html(t)
        for t in (*made, *(advised.for_model(m, "../") for m in catalog.models.values() if topics.searched(m)))
    ]


CELLS = [
    ("sft", "llama-3.1-8b", Machine("rtx4090", 4)),
    ("dpo", "qwen2.5-1.5b", Machine("l4", 1)),
    ("rm", "qwen2.5-14b", Machine("a100-80-sxm", 8)),
    ("ppo", "llama-3.1-8b", Machine("h100-sxm", 4)),
    ("grpo", "qwen2.5-1.5b", Machine("a100-80-sxm", 2)),
    ("grpo", "llama-3.1-70b", Machine("rtx4090", 8)),
]


@pytest.mark.parametrize(("task", "model", "machine"), CELLS)
def test_a_cell_is_the_recommendation_and_fits_by_estimate(task: str, model: str, machine: Machine) -> None:
    given = advice.job(task, model, machine)
    found = Answers(load(), {}).cell(task, model, machine)
    said = recommend(given)
    if said.recommended is None:
        assert found.scenario is None
        assert found.lacks
        return
    assert found.scenario == said.recommended.scenario.as_dict()
    assert said.launch
    assert found.command == said.launch.command
    assert found.files == said.launch.files
    e = estimate(parse(found.scenario))
    assert e.verdict == found.verdict == "fits"
    assert found.working.bytes == max(g.peak.moment.device_bytes for g in e.groups)


@pytest.mark.parametrize(("task", "model"), [("sft", "yi-34b"), ("rm", "llama-3.1-8b"), ("grpo", "qwen2.5-0.5b")])
def test_the_smallest_machine_is_that_of_the_search_among_cards_with_bf16(task: str, model: str) -> None:
    catalog = load()
    modern = replace(catalog, gpus={name: gpu for name, gpu in catalog.gpus.items() if not gpu.lacks_bf16})
    found = Answers(catalog, {}).smallest(model, task, "full")
    said = smallest({"model": model, "task": task, **advice.JOBS[task], **advice.TRAINED["full"]}, modern)
    assert said.machine
    assert found.machine == Machine(said.machine.gpu.id, said.machine.gpus)


@pytest.mark.parametrize("task", ["sft", "grpo"])
def test_nothing_fits_on_a_card_that_is_called_far_too_small(task: str) -> None:
    catalog, given = load(), {"model": "qwen2.5-32b", "task": task, **advice.JOBS[task], "method": "full"}
    limit = advice.IMAGINED[-1] * GiB
    for gpus in (1, 4):
        before, limit = limit, advice.limit(given, gpus, catalog, limit)
        # of more GPUs smaller cards suffice, and those that fewer ruled out are all that is tried
        assert limit <= before
        below = [g for g in catalog.gpus.values() if g.usable_bytes <= limit and not g.lacks_bf16]
        largest = max(below, key=lambda g: g.usable_bytes, default=None)
        if largest:
            job = given | {"gpu": largest.id, "gpus": gpus, "gpus_per_node": gpus}
            assert Problem(job, catalog).first() is None


@pytest.mark.usefixtures("few")
def test_cached_pages_are_those_that_were_computed(tmp_path: Path) -> None:
    first = topics.fill(tmp_path)
    fresh = pages()
    assert first.computed == first.answers > 0
    forget()
    second = topics.fill(tmp_path)
    assert (second.computed, second.answers) == (0, first.answers)
    assert pages() == fresh


@pytest.mark.usefixtures("few")
def test_a_changed_gpu_computes_only_what_depends_on_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    topics.fill(tmp_path)
    whole, asked = answers.catalog(), []
    changed = replace(whole.gpus["rtx4090"], bandwidth_gbs=500.0)
    use(monkeypatch, replace(whole, gpus={**whole.gpus, "rtx4090": changed}))
    for module, name in ((advice, "Problem"), (advice, "fits"), (topics, "Problem"), (along, "along")):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda given, *rest, own=own: asked.append(given) or own(given, *rest))
    assert topics.fill(tmp_path).computed > 0
    assert {given["gpu"] for given in asked} == {"rtx4090"}
    from_cache = pages()
    use(monkeypatch, answers.catalog())
    topics.fill(tmp_path / "empty")
    assert pages() == from_cache


@pytest.mark.usefixtures("few")
def test_a_share_leaves_out_what_is_no_fine_tuning_and_is_not_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs = {task: {"framework": "openrlhf", **advice.LENGTHS} for task in ("sft", "rm", "dpo")}
    monkeypatch.setattr(advice, "JOBS", jobs)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")

    def pending() -> set[str]:
        small = {task: topics.found("qwen2.5-0.5b", task)[1] for task in jobs}
        return {task for task, found in small.items() for s in found.values() if s.advice == advice.PENDING}

    part = topics.fill(tmp_path, share=3)
    assert pending() == {"dpo"}
    assert "nothing fits" not in to_html(advised.for_model(answers.catalog().models["qwen2.5-0.5b"], ""))
    forget()
    assert 0 < topics.fill(tmp_path).computed < part.computed
    assert not pending()


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("damage", ["cut", "changed", "foreign"])
def test_a_damaged_file_is_computed_again(tmp_path: Path, damage: str) -> None:
    topics.fill(tmp_path)
    fresh = pages()
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    raw = file.read_bytes()
    middle = len(raw) // 2
    file.write_bytes(
        {
            "cut": raw[:middle],
            "changed": raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :],
            "foreign": b"\xff\xfe" + raw,
        }[damage]
    )
    assert file.read_bytes() != raw
    forget()
    assert topics.fill(tmp_path).computed > 0
    assert pages() == fresh


@pytest.mark.usefixtures("few")
def test_what_a_build_of_another_catalog_keeps_meanwhile_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    topic, *_ = topics.topics(answers.catalog())

    def meanwhile(work: Callable[..., Any], *columns: Any) -> list[Any]:
        kept.Kept(tmp_path).write(topic.name, {"theirs": 1})
        return [work(*each) for each in zip(*columns, strict=True)]

    monkeypatch.setattr(answers, "spread", meanwhile)
    computed = topics.fill(tmp_path).computed
    found = kept.Kept(tmp_path).read(topic.name)
    assert found["theirs"] == 1
    assert 1 < len(found) <= computed + 1


def test_one_call_alone_starts_no_process_and_is_counted_by_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(asked: int) -> int:
        answers.Clock.asked += asked
        return 2 * asked

    monkeypatch.setattr(processes, "Pool", lambda **_: pytest.fail("a process"))
    before = answers.Clock.asked
    assert [*answers.spread(work, [3])] == [6]
    assert answers.Clock.asked == before


def test_answers_on_a_card_stay_when_another_joins_its_node_and_go_when_its_links_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = load()
    use(monkeypatch, whole)
    before = kept.of_gpu("rtx4090")
    for fields, same in (({"gpu_ids": ("rtx4090", "rtx3090", "new")}, True), ({"intra_gbs": 1.0}, False)):
        nodes = {name: replace(n, **fields) if "rtx4090" in n.gpu_ids else n for name, n in whole.nodes.items()}
        use(monkeypatch, replace(whole, nodes=nodes))
        assert (kept.of_gpu("rtx4090") == before) is same
    forget()


def test_answers_of_another_calc_are_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.Kept(tmp_path).write("topic", {"key": 1})
    assert kept.Kept(tmp_path).read("topic") == {"key": 1}
    monkeypatch.setattr(kept, "source", lambda: "f" * 64)
    assert kept.Kept(tmp_path).read("topic") == {}
    kept.Kept(tmp_path).forget()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_source_is_all_of_calc_but_the_site_that_shows_it(tmp_path: Path) -> None:
    def state(name: str, text: str) -> str:
        kept.source.cache_clear()
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
        return kept.source(tmp_path)

    first = state("units.py", "1")
    assert state("site/pages.py", "1") == first
    assert len({first, state("answers/advice.py", "1"), state("units.py", "2")}) == 3
    assert state("site/pages.py", "2") == state("site/pages.py", "3")


def test_every_gpu_and_model_has_its_tables_or_says_why_not(project: Path, site: Path) -> None:
    for gpu in load(project).gpus.values():
        page = (site / f"hardware/gpus/{gpu.id}.html").read_text("utf-8")
        for task in advice.JOBS:
            assert (f'<figure class="computed" id="gpu-{gpu.id}-run-{task}"' in page) != gpu.lacks_bf16
        assert ("Nothing is recommended" in page) == gpu.lacks_bf16
    largest = topics.sizes(project / "docs/sizes.yaml")["largest"] * 10**9
    searched = {model.id: model.parameters <= largest for model in load(project).models.values()}
    assert len({*searched.values()}) == 2
    for model, has in searched.items():
        page = (site / f"models/{model}.html").read_text("utf-8")
        assert (f'id="model-{model}-run"' in page) == has
        assert ("takes too long for a page" in page) != has


def test_sizes_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "sizes.yaml"
    text = topics.FILE.read_text("utf-8")
    for old, new, said in (
        ("largest: 100", "largest: 0", "largest: given 0, allowed: a number above 0"),
        ("sft: [", "sfd: [", "unknown field 'sfd'; did you mean 'sft'?"),
    ):
        file.write_text(text.replace(old, new), "utf-8")
        with pytest.raises(InputError, match=rf"^sizes.yaml: {re.escape(said)}$"):
            topics.sizes(file)
    assert {name for task in advice.JOBS for name in topics.sizes()[task]} <= load().models.keys()


def test_no_page_of_the_catalog_transfers_too_much(site: Path) -> None:
    for path in (*site.glob("hardware/gpus/*.html"), *site.glob("models/*.html")):
        assert len(gzip.compress(path.read_bytes())) < TRANSFERRED, path


def test_a_choice_of_cards_leaves_the_rows_of_one_number_without_a_script() -> None:
    css = (ROOT / "docs/assets/extra.css").read_text("utf-8")
    for count in (*topics.COUNTS, *topics.SEVERAL_NODES):
        assert f'value="{count}"' in advised.choice()
        assert f'.choice [value="{count}"]:checked) tr:has(.count):not(:has(.n{count}))' in css
    assert advised.choice().count("<input") == 1 + len({*topics.COUNTS, *topics.SEVERAL_NODES})


def test_the_short_answer_of_a_models_page_names_the_machines_of_its_table() -> None:
    model = answers.catalog().model("smollm2-135m")
    said, table = advised.short(model), advised.for_model(model, "")
    named = [str(row[1].values[0]) for row in table.rows]
    assert said.count("\n- ") == len({task for task in advice.JOBS})
    assert all(machine in said for machine in named if "×" in machine)
