"""The functions of a table in a real browser: the ledger behind a cell, sorting, copying, printing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from axe import CONTRAST, bring, shuts_nobody_out, violations
from browsing import opened, until
from playwright.sync_api import Browser, Locator, Page

from calc.base.units import GB, GiB

GPU = "hardware/gpus/rtx4090.html"
CASE = "case-studies/reward-model-6x4090.html"
# Tables of each kind by their page: fits on all cards and on one, what to run, the smallest card, phases, lines, jobs
# side by side, what changes save, host memory, roles, loading, caches, recipes.
TABLES = {
    "what-fits/sft-full-8.html": ["fits-sft-full-8"],
    GPU: ["gpu-rtx4090-sft", "gpu-rtx4090-run-grpo"],
    "models/qwen2.5-1.5b.html": ["model-qwen2.5-1.5b-gpus", "model-qwen2.5-1.5b-run"],
    CASE: ["rm-6x4090-zero3-8192", "rm-6x4090-zero2-4096-lines", "rm-6x4090", "rm-6x4090-remedies"],
    "case-studies/ppo-llama-2-70b-16xa800.html": ["ppo-70b-host"],
    "case-studies/ppo-llama-3-8b-4xa40.html": ["ppo-4xa40-roles", "ppo-4xa40-loading"],
    "case-studies/grpo-logic-rl-4xa100.html": ["logic-rl-kv"],
    "recipes/index.html": ["recipes-at-a-glance"],
    "recipes/dpo.html": ["recipes-dpo-production"],
}


def column(place: Locator) -> str:
    return str(place.evaluate("e => e.closest('table').tHead.rows[0].cells[e.closest('td').cellIndex].textContent"))


def shown(cell: str) -> tuple[float, int]:
    """The number that a cell shows, and its decimals."""
    text = re.findall(r"(?:^|fits |tight |memory )(-?[\d,]+(?:\.\d+)?)", cell)[0]
    return float(text.replace(",", "")), len(text.partition(".")[2])


@pytest.mark.parametrize("page_at", TABLES)
def test_the_workings_lines_add_up_to_the_cell(browser: Browser, origin: str, page_at: str) -> None:
    page, _, complaints = opened(browser, f"{origin}/{page_at}", viewport={"width": 1280, "height": 900})
    for table_id in TABLES[page_at]:
        figure = page.locator(f'[id="{table_id}"]')
        figure.get_by_role("button", name="Show the working").click()
        cells = figure.locator("button.work")
        cells.first.wait_for()
        count = cells.count()
        for place in sorted({0, count // 2, count - 1}):
            worked(page, cells.nth(place))
    assert complaints == []
    page.context.close()


def worked(page: Page, cell: Locator) -> None:
    """Opens the working of a cell, whose lines must add up to what it shows."""
    unit = GB if "(GB)" in column(cell) else GiB
    value, digits = shown(cell.inner_text().replace("\n", " "))
    cell.click()
    working = page.get_by_role("dialog", name=re.compile("·"))
    rows = working.locator("tbody tr")
    sums = [int(n.replace(",", "")) for n in rows.locator("td:nth-of-type(3)").all_inner_texts()]
    total = working.locator("tfoot td").nth(1).inner_text()
    assert sums and int(total.replace(",", "")) == sum(sums)
    assert round(sum(sums) / unit, digits) == value
    for row in rows.all():
        _, _, _, formula, values, source = row.locator("td").all_inner_texts()
        assert formula and values and source
    page.keyboard.press("Escape")
    page.locator("dialog.working").wait_for(state="detached")


def test_each_link_of_a_working_leads_to_its_derivation(browser: Browser, origin: str, site: Path) -> None:
    page, _, _ = opened(browser, f"{origin}/{CASE}", viewport={"width": 1280, "height": 900})
    figure = page.locator("#rm-6x4090")
    figure.get_by_role("button", name="Show the working").click()
    figure.locator("button.work").first.click()
    links = [str(a.get_attribute("href")) for a in page.locator("dialog.working tbody a").all()]
    assert len(set(links)) > 5
    for link in links:
        path, _, anchor = link.removeprefix(f"{origin}/").partition("#")
        assert f'id="{anchor}"' in (site / path).read_text("utf-8"), link
    page.context.close()


def test_the_working_is_reached_by_the_keyboard_alone_and_put_away_again(browser: Browser, origin: str) -> None:
    page, _, _ = opened(browser, f"{origin}/{CASE}", viewport={"width": 1280, "height": 900})
    figure = page.locator("#rm-6x4090")
    before = figure.locator("tbody").inner_html()
    switch = figure.get_by_role("button", name="Show the working")
    switch.focus()
    page.keyboard.press("Enter")
    first = figure.locator("button.work").first
    first.wait_for()
    first.focus()
    page.keyboard.press("Enter")
    assert page.locator("dialog.working").evaluate("e => e.contains(document.activeElement)")
    page.keyboard.press("Escape")
    assert first.evaluate("e => e === document.activeElement")
    switch.press("Enter")
    assert switch.get_attribute("aria-pressed") == "false"
    assert figure.locator("tbody").inner_html() == before
    page.context.close()


def rows_of(figure: Locator) -> list[list[str]]:
    return figure.locator("tbody").evaluate("b => [...b.rows].map(r => [...r.cells].map(c => c.textContent))")


def test_a_header_sorts_verdicts_by_their_peak_and_rows_stay_whole(browser: Browser, origin: str) -> None:
    page, _, _ = opened(browser, f"{origin}/{GPU}", viewport={"width": 1280, "height": 900})
    figure = page.locator("#gpu-rtx4090-grpo")
    figure.locator("details.twin > summary").click()
    before = rows_of(figure)
    head = figure.locator("thead th").nth(1)
    for turn in ("ascending", "descending"):
        head.get_by_role("button").click()
        assert head.get_attribute("aria-sort") == turn
        after = rows_of(figure)
        assert sorted(after) == sorted(before)
        assert after != before
        peaks = [shown(row[1])[0] for row in after if re.search(r"\d", row[1])]
        assert peaks == sorted(peaks, reverse=turn == "descending")
        words = [bool(re.search(r"\d", row[1])) for row in after]
        assert words == sorted(words, reverse=True)  # what cannot run goes last both ways
    head.get_by_role("button").click()
    assert head.get_attribute("aria-sort") is None
    assert rows_of(figure) == before
    page.context.close()


def test_the_working_of_a_sorted_table_is_that_of_its_cell(browser: Browser, origin: str) -> None:
    page, _, _ = opened(browser, f"{origin}/{CASE}", viewport={"width": 1280, "height": 900})
    figure = page.locator("#rm-6x4090")
    figure.locator("thead th", has_text="Needs").get_by_role("button").click()
    figure.get_by_role("button", name="Show the working").click()
    cell = figure.locator("button.work").first
    value, digits = shown(cell.inner_text())
    cell.click()
    total = page.locator("dialog.working tfoot td").nth(1).inner_text()
    assert round(int(total.replace(",", "")) / GiB, digits) == value
    page.context.close()


def test_a_table_is_copied_as_its_files_are_and_its_citation(browser: Browser, origin: str, site: Path) -> None:
    page, _, _ = opened(browser, f"{origin}/{CASE}", permissions=["clipboard-read", "clipboard-write"])
    figure = page.locator("#rm-6x4090")
    figure.locator("details.take summary").click()

    def copies(name: str, text: str) -> None:
        button = figure.get_by_role("button", name=name, exact=True).element_handle()
        button.click()
        until(page, "b => b.textContent === 'Copied'", button)
        assert page.evaluate("navigator.clipboard.readText()") == text

    for name, end in (("Markdown", "md"), ("CSV", "csv"), ("LaTeX", "tex")):
        copies(name, (site / f"data/tables/rm-6x4090.{end}").read_text("utf-8"))
    figure.locator("details.cite summary").click()
    copies("Copy BibTeX", str(figure.locator("details.cite pre").text_content()))
    assert not figure.locator("details.take").evaluate("e => e.open")  # one at a time
    page.context.close()


def test_axe_finds_nothing_in_an_open_menu_and_a_working(browser: Browser, origin: str) -> None:
    page, _, _ = opened(browser, f"{origin}/{CASE}", color_scheme="light")
    figure = page.locator("#rm-6x4090")
    figure.locator("details.cite summary").click()
    figure.get_by_role("button", name="Show the working").click()
    figure.locator("thead th button").nth(2).click()
    figure.locator("button.work").first.wait_for()
    bring(page)
    assert violations(page, "#rm-6x4090") == []
    figure.locator("button.work").first.click()
    shuts_nobody_out(page, "dialog.working")
    page.keyboard.press("Escape")
    assert violations(page, "#rm-6x4090", CONTRAST) == []
    page.context.close()


def test_bars_have_the_width_and_components_stand_behind_a_switch_that_needs_no_script(
    browser: Browser, origin: str
) -> None:
    for width, table_id in ((1280, "ppo-4xa40-phases"), (360, "ppo-4xa40-remedies")):
        page, _, _ = opened(
            browser,
            f"{origin}/case-studies/ppo-llama-3-8b-4xa40.html",
            viewport={"width": width, "height": 900},
            java_script_enabled=False,
        )
        figure = page.locator(f"#{table_id}")
        box = sides(figure.locator(".scroll"))
        if width > 360:
            assert figure.locator("table").evaluate("e => e.offsetWidth") <= box[1] - box[0]
        for bar in figure.locator("tbody .stack").all():
            limit, label = sides(bar.locator("i")), bar.locator("em")
            assert box[0] < limit[0] and limit[1] < box[1]
            assert not label.is_visible() or sides(label)[0] >= limit[1]
        weights = figure.locator("thead th", has_text=re.compile("^Weights"))
        assert not weights.is_visible()
        figure.get_by_label("Numbers").check()
        assert weights.is_visible()
        assert sides(figure.locator(".scroll")) == box  # it scrolls within
        page.context.close()


def sides(place: Locator) -> tuple[float, float]:
    """The left and the right edge."""
    box = place.bounding_box()
    assert box
    return box["x"], box["x"] + box["width"]


def test_print_keeps_caption_assumptions_and_versions_and_drops_the_menu(browser: Browser, origin: str) -> None:
    # what A4 upright leaves between its margins, in CSS pixels
    page, _, _ = opened(browser, f"{origin}/{CASE}", viewport={"width": 703, "height": 1009})
    page.emulate_media(media="print")
    figure = page.locator("#rm-6x4090")
    assert figure.evaluate("e => getComputedStyle(e).page") == "auto"
    assert figure.evaluate("e => e.querySelector('table').offsetWidth <= e.offsetWidth")
    assert (
        max(figure.locator("tbody tr").evaluate_all("rows => rows.map(row => row.offsetHeight)")) < 60
    )  # no word broken
    bar = figure.locator("tbody .stack").first
    assert bar.evaluate("e => e.offsetWidth") > 60
    assert bar.locator("span").first.evaluate("e => getComputedStyle(e).printColorAdjust") == "exact"
    for kept in ("figcaption", ".assumptions", ".provenance code"):
        assert figure.locator(kept).first.is_visible()
    for dropped in ("details.take summary", "details.cite summary", "button.show", ".numbers", "thead .behind"):
        assert not figure.locator(dropped).first.is_visible()
    assert figure.locator("tbody tr").first.evaluate("e => getComputedStyle(e).breakInside") == "avoid"
    assert figure.locator(".scroll").evaluate("e => getComputedStyle(e).overflow") == "visible"
    page.context.close()


def test_a_matrix_is_printed_once_it_fits_a_sheet_in_letters_that_can_be_read(browser: Browser, origin: str) -> None:
    page, _, _ = opened(browser, f"{origin}/what-fits/ppo.html", viewport={"width": 1032, "height": 680})
    page.emulate_media(media="print")
    figure = page.locator("#fits-ppo-full-8")
    assert not figure.locator("table").is_visible()
    said = figure.locator("figcaption").evaluate("e => getComputedStyle(e, '::after').content")
    assert "choose up to 12 cards" in said
    page.emulate_media(media="screen")
    memory = page.locator("form.filters [name=memory]")
    for n in range(1, memory.locator("option").count()):
        memory.select_option(index=n)
        if figure.locator("table.few").count():
            break
    page.emulate_media(media="print")
    assert figure.locator("table").evaluate("e => getComputedStyle(document.body).page") == "wide"
    assert figure.locator("table").evaluate("e => e.offsetWidth <= e.closest('figure').offsetWidth")
    assert figure.locator("td").first.evaluate("e => parseFloat(getComputedStyle(e).fontSize)") >= 8  # 6 pt
    page.context.close()


def test_what_is_folded_is_printed_if_the_reader_has_opened_it(browser: Browser, origin: str) -> None:
    page, _, _ = opened(browser, f"{origin}/recipes/dpo.html", viewport={"width": 1280, "height": 900})
    commands = page.locator("details.example")
    assert commands.count() > 2
    commands.nth(1).locator("summary").click()
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    until(page, "document.querySelectorAll('details.example')[0].open")  # the theme opens all for a printer
    assert [c.is_visible() for c in commands.all()[:3]] == [False, True, False]
    page.context.close()


@pytest.mark.parametrize(
    ("page_at", "pages"),
    [("recipes/sft.html", 8), (CASE, 12), ("index.html", 4), ("what-fits/ppo.html", 2), ("compare.html", 2)],
)
def test_a_page_that_one_would_hand_in_takes_few_sheets_and_says_how_to_cite_it(
    browser: Browser, origin: str, page_at: str, pages: int
) -> None:
    page, _, _ = opened(browser, f"{origin}/{page_at}", viewport={"width": 1280, "height": 900})
    made = page.pdf(format="A4", prefer_css_page_size=True)
    assert 0 < len(re.findall(rb"/Type\s*/Page\b", made)) <= pages
    cited = page.locator("p.printed")
    assert not cited.is_visible()
    page.emulate_media(media="print")
    assert cited.is_visible()
    assert cited.inner_text().startswith("The Headroom authors. (2026). ")
    assert cited.inner_text().endswith(f"Headroom. {origin}/{page_at}")
    page.context.close()


def test_a_citation_takes_the_address_at_which_it_is_read(browser: Browser, origin: str) -> None:
    page, _, _ = opened(browser, f"{origin}/{CASE}", viewport={"width": 1280, "height": 900})
    cited, whole = page.locator("#rm-6x4090 details.cite"), f"{origin}/{CASE}#rm-6x4090"
    assert str(cited.locator("p").first.text_content()).endswith(whole)
    assert f'url = "{whole}"' in str(cited.locator("pre").text_content())
    assert cited.locator("p a").text_content() == whole
    assert cited.locator("p a").evaluate("e => e.href") == whole
    page.context.close()


def test_without_a_script_the_files_and_the_citation_are_there(browser: Browser, origin: str) -> None:
    page: Page
    page, _, _ = opened(browser, f"{origin}/{CASE}", java_script_enabled=False)
    figure = page.locator("#rm-6x4090")
    assert figure.get_by_role("button").count() == 0
    figure.locator("details.take summary").click()
    with page.expect_download() as download:
        figure.get_by_role("link", name="JSON").click()
    data = json.loads(Path(download.value.path()).read_text("utf-8"))
    assert sum(data["lines"][i]["bytes"] for i in data["cells"][1]["lines"]) == data["cells"][1]["bytes"]
    page.context.close()
