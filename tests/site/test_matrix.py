"""What-fits tables: their order, their filters, and the way from a cell to the calculator with the cell's job."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from browsing import opened, until
from figures import table_of
from playwright.sync_api import Browser, Locator

from calc.answers import answers, fits
from calc.estimate.estimate import host_verdict
from calc.site.views.fit import heat

PAGE, TABLE = "what-fits/sft-full.html", "fits-sft-full-1"
WIDE = {"width": 1280, "height": 900}


def test_newest_cards_come_first_and_one_of_an_unknown_architecture_before_all() -> None:
    cards = heat.newest(answers.catalog().gpus.values())
    places = [heat.ARCHITECTURES.index(card.architecture) for card in cards]  # each is known
    assert places == sorted(places)
    for one, next_one in pairwise(cards):
        assert one.architecture != next_one.architecture or one.usable_mib <= next_one.usable_mib
    strange = replace(cards[-1], architecture="Rubin")
    assert heat.newest([*cards, strange])[0] is strange


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ("qwen2.5-7b", "Qwen"),
        ("deepseek-v3", "DeepSeek"),
        ("codellama-34b", "Code Llama"),
        ("gpt-oss-20b", "gpt-oss"),
        ("phi-4", "Phi"),
    ],
)
def test_a_family_is_the_name_up_to_its_first_number(model: str, family: str) -> None:
    assert heat.family(answers.catalog().model(model)) == family


def test_families_that_differ_in_case_alone_have_one_order_whatever_the_hash_seed() -> None:
    # a set's order is that of hashes; two builds of one catalog give the same bytes
    names = sorted({heat.family(m) for m in answers.catalog().models.values()})
    assert len({name.casefold() for name in names}) == len(names)
    models = answers.catalog().models
    some = [replace(models["llama-2-7b"], id=f"m{n}", name=f"{name} 1") for n, name in enumerate(("lLaMa", "Llama"))]
    assert heat.families(some) == heat.families(some[::-1]) == ["Llama", "lLaMa"]


@pytest.mark.parametrize("task", fits.TASKS)
def test_what_differs_from_the_calculators_defaults_is_said(task: str) -> None:
    method, gpus = next(iter(fits.TASKS[task].ladders))
    job = {"method": method, **fits.TASKS[task].job}
    said = heat.differs(task, job, fits.TASKS[task].ladders[method, gpus])
    assert ("framework openrlhf (not trl)" in said) is (task in ("sft", "dpo"))
    assert f"method {method}" in said and "micro_batch 1" in said
    assert "seq_len" not in said and "prompt_len" not in said  # as the calculator has them


def job_of(address: str) -> dict[str, Any]:
    return dict(parse_qsl(urlsplit(address).query))


def test_a_cells_link_has_the_job_that_the_cell_was_computed_for(browser: Browser, origin: str, site: Path) -> None:
    page, _, complaints = opened(browser, f"{origin}/{PAGE}", viewport=WIDE)
    table = page.locator(f"#{TABLE}")
    table.scroll_into_view_if_needed()
    table.locator("a.job").first.wait_for()
    data = table_of(site, TABLE)
    heads = table.locator("thead th").evaluate_all("es => es.map(e => e.dataset.gpu)")
    links = table.locator("tbody").evaluate(
        "b => [...b.rows].map(r => [...r.cells].map(c => c.querySelector('a.job')?.href))"
    )
    for cell in data["cells"][::7]:
        row, place = cell["row"], [h and h.replace("-", "_").replace(".", "_") for h in heads].index(cell["column"])
        given = {name: v if isinstance(v, str) else json.dumps(v) for name, v in cell["scenario"].items()}
        assert job_of(links[row][place]) == given
    assert complaints == []
    page.context.close()


def test_a_cell_opens_the_calculator_by_the_keyboard_and_arrows_lead_from_cell_to_cell(
    browser: Browser, origin: str
) -> None:
    page, _, _ = opened(browser, f"{origin}/{PAGE}", viewport=WIDE)
    table = page.locator(f"#{TABLE}")
    table.scroll_into_view_if_needed()
    table.locator("a.job").first.wait_for()
    assert table.locator("a.job[tabindex='0']").count() == 1
    table.locator("a.job[tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    head = table.locator("thead th").nth(2)
    asked = job_of(str(page.evaluate("document.activeElement.href")))
    assert asked["gpu"] == head.get_attribute("data-gpu")
    page.keyboard.press("Enter")
    page.wait_for_url("**/index.html?*")
    for name in ("model", "task", "gpu", "gpus", "method", "framework", "seq_len"):
        assert page.locator(f"#calculator [name={name}]").input_value() == asked[name]
    page.context.close()


def shown(table: Locator) -> tuple[list[str], list[str]]:
    """The models and the cards that a table shows."""
    rows = table.locator("tbody th").evaluate_all("es => es.filter(e => e.checkVisibility()).map(e => e.textContent)")
    heads = table.locator("thead th").evaluate_all(
        "es => es.slice(1).filter(e => e.checkVisibility()).map(e => e.dataset.gpu)"
    )
    return rows, heads


def test_filters_stand_in_the_address_and_go_along_to_other_tasks(browser: Browser, origin: str) -> None:
    page, _, complaints = opened(browser, f"{origin}/{PAGE}?memory=24-48&other=kept", viewport=WIDE)
    table = page.locator(f"#{TABLE}")
    table.scroll_into_view_if_needed()
    models, cards = shown(table)
    catalog = answers.catalog()
    assert cards and all(24 < catalog.gpu(card).memory_gb <= 48 for card in cards)
    page.get_by_label("Family").select_option("Llama")
    page.get_by_label("Parameters").select_option("2-10")
    fewer, _ = shown(table)
    assert 0 < len(fewer) < len(models) and all("Llama" in name for name in fewer)
    assert f"{len(fewer)} models × {len(cards)} cards" in " ".join(
        page.locator("form.filters output").inner_text().split()
    )
    assert job_of(page.url) == {"memory": "24-48", "other": "kept", "family": "Llama", "size": "2-10"}
    page.reload()
    page.locator(".switch").get_by_role("link", name="DPO", exact=True).click()
    page.wait_for_url("**/dpo.html?*")
    other = page.locator("#fits-dpo-full-8")
    other.scroll_into_view_if_needed()
    assert shown(other) == (fewer, cards)
    assert complaints == []
    page.context.close()


def test_head_and_first_column_stay_in_sight(browser: Browser, origin: str) -> None:
    page, _, _ = opened(browser, f"{origin}/{PAGE}", viewport={"width": 360, "height": 740})
    box = page.locator(f"#{TABLE} .scroll")
    box.scroll_into_view_if_needed()
    corner = box.locator("thead th").first
    before = corner.bounding_box()
    box.evaluate("e => e.scrollTo(e.scrollWidth, e.scrollHeight)")
    until(page, "e => e.scrollLeft > 0 && e.scrollTop > 0", box.element_handle())
    assert corner.bounding_box() == before
    page.context.close()


def test_without_a_script_everything_is_shown_and_no_dead_field(browser: Browser, origin: str) -> None:
    page, _, _ = opened(browser, f"{origin}/{PAGE}?vendor=AMD", java_script_enabled=False)
    assert not page.locator("form.filters").is_visible()
    models, cards = shown(page.locator(f"#{TABLE}"))
    assert len(models) > 5 and len(cards) > 5
    page.context.close()


def test_a_cell_is_tight_where_no_known_node_has_the_host_memory_that_its_job_needs() -> None:
    """Full fine-tuning of Llama 3.1 405B: eight H200 stand in a known node, MI325X merely in an assumed one."""
    found = fits.best(fits.Asked("llama-3.1-405b", "mi325x", "sft", "full", 8))
    assert found is not None
    answer = answers.attempt(found.given)
    assert answer is not None and answer.estimate.verdict == "fits" and host_verdict(answer.estimate) == "tight"
    assert found.verdict == "tight" and "host 8," in found.rung
