"""The search: what a reader types leads to the page that answers it, and its index is loaded only then."""

from __future__ import annotations

from pathlib import Path

import pytest
from browsing import opened, until
from playwright.sync_api import Browser, Page

from calc.base.schema import InputError
from calc.site.build import search

FOUND = [
    ("why does my job die loading the third model", "case-studies/ppo-llama-3-8b-4xa40.html"),
    ("OOM", "diagnose.html|errors.html"),
    ("CUDA out of memory", "diagnose.html"),
    ("OOMKilled", "errors.html"),
    ("No available memory for the cache blocks", "errors.html|method/kv-cache.html"),
    ("显存", "zh/"),
    ("爆显存", "zh/diagnose.html"),
    ("为什么加载第三个模型时显存不足", "zh/case-studies/ppo-llama-3-8b-4xa40.html"),  # no spaces between its words
    ("比较显卡", "zh/compare.html"),
    ("八张 4090 能跑 GRPO 吗", "zh/"),
    ("compare H100 H200 A100", "compare.html"),
    ("R1-Distill", "models/llama-3.1-|models/qwen2.5-|models/deepseek-r1-distill-"),
    ("DeepSeek-R1-Distill-Qwen-7B", "models/qwen2.5-7b.html"),
    ("DeepSeek-R1-Distill-Llama-8B", "models/llama-3.1-8b.html"),
    ("VRAM", "index.html"),
    ("ZeRO3", "strategies/zero-stages.html"),
    ("RTX 4090", "rtx4090"),
    ("A100", "a100"),
    ("70B", "70b"),
]


def typed(page: Page, words: str) -> str:
    """The address of the first thing that is found."""
    box, first = page.locator("input.md-search__input"), ".md-search-result__link"
    for text, there in (("", False), (words, True)):
        box.fill(text)
        box.press("End")  # the theme listens for keys
        until(page, f"!!document.querySelector('{first}') === {str(there).lower()}")
    return str(page.locator(first).first.get_attribute("href"))


def test_what_readers_call_things_leads_to_their_pages(browser: Browser, origin: str) -> None:
    page, _, complaints = opened(browser, f"{origin}/index.html", viewport={"width": 1280, "height": 900})
    until(page, "window.component$ !== undefined")  # the theme's script has come
    found = {words: typed(page, words) for words, _ in FOUND}
    assert {
        words: places for words, places in FOUND if not any(place in found[words] for place in places.split("|"))
    } == {}, found
    assert complaints == []
    page.context.close()


def test_the_index_is_loaded_once_with_the_first_word(browser: Browser, origin: str) -> None:
    page, requests, complaints = opened(browser, f"{origin}/reference/about.html")

    def loaded() -> int:
        return sum(request.endswith(f"/{search.WHOLE}") for request in requests)

    until(page, "window.component$ !== undefined")
    page.locator("input.md-search__input").focus()
    page.wait_for_timeout(300)
    assert loaded() == 0
    for words in ("checkpointing", "offload"):
        typed(page, words)
    assert loaded() == 1
    assert complaints == []
    page.context.close()


def test_an_index_that_cannot_be_loaded_finds_nothing_and_is_asked_for_again(browser: Browser, origin: str) -> None:
    page, _, _ = opened(browser, f"{origin}/reference/about.html")
    until(page, "window.component$ !== undefined")
    page.context.route(f"**/{search.WHOLE}", lambda route: route.abort())
    box = page.locator("input.md-search__input")
    box.fill("check")
    box.press("End")
    page.wait_for_timeout(300)
    assert page.locator(".md-search-result__link").count() == 0
    page.context.unroute(f"**/{search.WHOLE}")
    assert typed(page, "checkpointing")
    page.context.close()


def test_every_name_leads_to_an_entry_that_is_there(site: Path) -> None:
    assert list(search.lost(site)) == []
    assert len(search.said()) > 5


def test_names_are_a_field_that_weighs_as_much_as_a_title() -> None:
    index = {"config": {"fields": {"title": {}}}, "docs": [{"location": "a.html"}, {"location": "b.html"}]}
    made = search.named(index, {"a.html": ["VRAM", "GPU memory"]})
    assert made["docs"] == [{"location": "a.html", "names": "VRAM GPU memory"}, {"location": "b.html"}]
    assert made["config"]["fields"] == {"title": {}, "names": {"boost": 1000.0}}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("- {words: [x], lead: [index.md]}", "unknown field '[0].lead'; did you mean '[0].leads'?"),
        ("- {words: [], leads: [index.md]}", "[0].words: given "),
        ("- {words: [x], leads: [index.html]}", "[0].leads[0]: given 'index.html', allowed: text such as"),
    ],
)
def test_a_fault_of_the_names_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "search.yaml"
    file.write_text(text, "utf-8")
    with pytest.raises(InputError) as found:
        search.said(file)
    assert line in str(found.value) and "\n" not in str(found.value)


def test_without_a_file_of_names_there_are_none(tmp_path: Path) -> None:
    assert search.said(tmp_path / "search.yaml") == {}
