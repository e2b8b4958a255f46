"""The calculator in Chromium: what it answers there is what the command line answers, and the page stays usable."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
import yaml
from axe import shuts_nobody_out
from browsing import opened, until
from playwright.sync_api import Browser, Page, Route
from sites import ROOT

from calc.base.units import GiB
from calc.catalog.catalog import load
from calc.site.calculator import addresses, calculator, compare
from calc.site.calculator.calculator import Place
from calc.site.tables import tables

WIDE = {"width": 1280, "height": 900}
LENGTHS = {"prompt_len": 512, "response_len": 1024}
LLAMA = {"model": "llama-3.1-8b", "task": "sft", "framework": "trl", "seq_len": "2048", "global_batch": "128"}
JOBS: Mapping[str, Mapping[str, Any]] = {
    "sft": {
        "model": "llama-3.1-8b",
        "task": "sft",
        "gpu": "rtx4090",
        "gpus": 2,
        "framework": "trl",
        "seq_len": 3000,
        "host_memory": 256,
    },
    "ppo": {
        "model": "qwen2.5-1.5b",
        "task": "ppo",
        "gpu": "a100-80-sxm",
        "gpus": 8,
        "framework": "openrlhf",
        **LENGTHS,
    },
    "grpo": {"model": "qwen2.5-7b", "task": "grpo", "gpu": "h200", "gpus": 4, "framework": "verl", **LENGTHS},
    "nothing fits": {"model": "llama-3.1-70b", "task": "sft", "gpu": "rtx4090", "gpus": 1, "framework": "trl"},
    "dpo by LoRA": {"model": "qwen2-7b", "task": "dpo", "gpu": "a40", "gpus": 1, "method": "lora", "framework": "trl"},
}
# fields that a job leaves out are emptied, so that calc's own defaults hold
PICK = """job => {
  const form = document.querySelector('#calculator form');
  form.task.value = job.task;
  form.task.dispatchEvent(new Event('change', {bubbles: true}));
  for (const field of form.elements) if (field.name) field.value = job[field.name] ?? '';
  form.requestSubmit();
}"""
SAME = "html => { const box = document.createElement('div'); box.innerHTML = html; return box.innerHTML; }"


def asked_of(project: Path, *words: str, file: str = "") -> Any:
    """The answer of `python -m calc`, as JSON."""
    command = [sys.executable, "-m", "calc", *words, "--json"]
    ran = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True, input=file)
    return json.loads(ran.stdout)


def settle(page: Page) -> str:
    """The text of the picker once it has an answer."""
    until(page, "document.querySelector('#calculator .stop').hidden", seconds=120)
    return page.locator("#calculator .state").inner_text()


@pytest.fixture(scope="module")
def home(browser: Browser, origin: str) -> Iterator[Page]:
    """The home page, its engine loaded once for all tests here."""
    page, requests, complaints = opened(browser, f"{origin}/index.html", viewport=WIDE)
    assert [r for r in requests if "assets/calculator/" in r or "catalog.json" in r or "calculator-worker" in r] == []
    assert "Llama 3.1 8B" in page.locator("#calculator .headline").inner_text()  # an answer before anything is loaded
    yield page
    assert [r for r in requests if not r.startswith((origin, "data:", "blob:"))] == []
    assert complaints == []
    page.context.close()


def test_a_first_answer_is_four_fields_away_and_needs_no_button(home: Page) -> None:
    for name, value in (("model", "qwen2.5-7b"), ("task", "grpo"), ("gpu", "rtx4090")):
        home.locator(f"#calculator [name={name}]").select_option(value)
    home.locator("#calculator [name=gpus]").fill("8")
    home.locator("#calculator [name=gpus]").blur()
    settle(home)
    assert "Qwen2.5 7B, GRPO on 8 × GeForce RTX 4090" in home.locator("#calculator .headline").inner_text()


@pytest.mark.parametrize("name", JOBS)
def test_an_answer_is_the_command_lines(home: Page, project: Path, name: str) -> None:
    job = dict(JOBS[name])
    home.evaluate(PICK, job)
    said = settle(home)
    expected = calculator.find(job, load(project), Place("", tables.to_html))
    assert said == expected.line
    assert home.locator("#calculator .answer").inner_html() == home.evaluate(SAME, expected.html)
    assert home.locator("#calculator textarea").input_value() == expected.file
    asked = parse_qs(urlsplit(home.url).query)
    assert {name: values[0] for name, values in asked.items()}.items() >= {
        "model": job["model"],
        "gpu": job["gpu"],
    }.items()


def test_on_a_chinese_page_the_answer_and_the_refusal_are_chinese(browser: Browser, origin: str) -> None:
    page, _, complaints = opened(browser, f"{origin}/zh/index.html", viewport=WIDE)
    page.evaluate(PICK, JOBS["sft"])
    assert settle(page).startswith("放得下：Llama 3.1 8B，监督微调，2 × GeForce RTX 4090")
    answer = page.locator("#calculator .answer").text_content() or ""
    assert [word for word in ("显存峰值时刻", "反向", "主机内存") if word not in answer] == []
    assert [word for word in ("Largest moment", "Phase", "Host memory") if word in answer] == []
    page.evaluate(PICK, {**JOBS["sft"], "task": "ppo"})
    refused = settle(page)
    assert "允许：" in refused
    assert "allowed" not in refused
    assert complaints == []
    page.context.close()


def test_the_very_command_that_an_answer_shows_gives_the_same_phases(home: Page, project: Path) -> None:
    home.evaluate(PICK, JOBS["grpo"])
    settle(home)
    words = home.locator("#calculator .call code").inner_text().split()
    ran = subprocess.run(
        [sys.executable, *words[1:], "--json"], cwd=project, capture_output=True, text=True, check=True
    )
    best = json.loads(ran.stdout)["recommended"]
    rows = home.locator("#calculator-phases tbody tr")
    shown = {row.locator("th").inner_text(): float(row.locator("td").first.inner_text()) for row in rows.all()}
    assert shown == {phase: pytest.approx(n / GiB, abs=0.005) for phase, n in best["phases"].items()}
    file = home.locator("#calculator textarea").input_value()
    assert asked_of(project, "estimate", "-", file=file)["groups"][0]["peak_device_bytes"] == best["peak_device_bytes"]


def test_a_bad_combination_is_one_line_and_no_answer(home: Page) -> None:
    home.evaluate(PICK, {**JOBS["ppo"], "framework": "trl"})
    assert settle(home).startswith("recommend: task: given 'ppo', allowed with trl")
    assert not home.locator("#calculator .answer").is_visible()
    home.evaluate(PICK, JOBS["sft"])
    settle(home)
    assert home.locator("#calculator .answer").is_visible()


def test_a_changed_file_is_estimated(home: Page) -> None:
    home.evaluate(PICK, JOBS["sft"])
    settle(home)
    home.locator("#calculator .scenario summary").click()
    home.locator("#calculator textarea").fill("{model: llama-3-8b, task: sft, gpu: rtx4090, sharding: zero9}")
    home.locator("#calculator .estimate").click()
    assert settle(home).startswith("scenario.yaml: sharding: given 'zero9'")
    text = "model: llama-3-8b\ntask: sft\ngpu: rtx4090\nframework: openrlhf\nseq_len: 2048\n"
    home.locator("#calculator textarea").fill(text)
    home.locator("#calculator .estimate").click()
    assert settle(home) == calculator.check(text, load(), Place("", tables.to_html)).line


def test_an_address_is_a_question_which_the_keyboard_can_ask_too(browser: Browser, origin: str) -> None:
    page, _, complaints = opened(
        browser, f"{origin}/index.html?model=qwen2.5-7b&task=dpo&gpu=h100-sxm&gpus=4&method=lora", viewport=WIDE,
        permissions=["clipboard-read", "clipboard-write"],
    )  # fmt: skip
    first = settle(page)
    assert "Qwen2.5 7B, DPO on 4 × H100" in first
    assert page.locator("#calculator [name=method]").input_value() == "lora"
    page.locator("#calculator [name=gpus]").focus()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("2")
    page.keyboard.press("Enter")
    assert "on 2 × H100" in settle(page)
    page.locator("#calculator .copy-link").click()
    until(page, "document.querySelector('.copy-link').textContent == 'Copied'")
    link = page.evaluate("navigator.clipboard.readText()")
    assert link == page.url
    query = {name: value for name, (value,) in parse_qs(urlsplit(link).query).items()}
    assert query == {"model": "qwen2.5-7b", "task": "dpo", "gpu": "h100-sxm", "gpus": "2", "method": "lora"}
    assert complaints == []
    page.context.close()


SCENARIO = """
model: llama-3-8b
task: sft
gpu: h100-sxm
gpus: 4
framework: openrlhf
sharding: zero3
offload: {optimizer: true}
micro_batch: 2
seq_len: 3072
versions: {torch: "2.4"}
"""
FIELD = "name => document.querySelector('#calculator form').elements[name].value"


def test_a_pasted_scenario_fills_the_form_and_its_link_restores_it(browser: Browser, origin: str) -> None:
    page, _, complaints = opened(
        browser, f"{origin}/index.html", viewport=WIDE, permissions=["clipboard-read", "clipboard-write"]
    )
    page.locator("#calculator .scenario summary").click()
    page.locator("#calculator textarea").fill(SCENARIO)
    page.locator("#calculator .estimate").click()
    said = settle(page)
    assert said == calculator.check(SCENARIO, load(), Place("", tables.to_html)).line
    filled = {"model": "llama-3-8b", "sharding": "zero3", "offload.optimizer": "true", "micro_batch": "2",
              "seq_len": "3072", "ask": "estimate", "global_batch": "", "method": ""}  # fmt: skip
    assert {name: page.evaluate(FIELD, name) for name in filled} == filled
    assert "versions.torch: 2.4" in page.locator("#calculator .rest").inner_text()
    page.locator("#calculator .copy-link").click()
    until(page, "document.querySelector('.copy-link').textContent == 'Copied'")
    link = page.evaluate("navigator.clipboard.readText()")
    html = page.locator("#calculator .answer").inner_html()
    page.goto("about:blank")
    page.goto(link)
    assert settle(page) == said
    assert {name: page.evaluate(FIELD, name) for name in filled} == filled
    assert page.locator("#calculator .answer").inner_html() == html
    page.locator("#calculator .rest button").click()  # what the form has no field for can be left out
    settle(page)
    assert not page.locator("#calculator .rest").is_visible()
    assert "versions" not in page.url
    assert complaints == []
    page.context.close()


def test_an_address_never_shows_another_jobs_answer(browser: Browser, origin: str) -> None:
    page, _, complaints = opened(browser, f"{origin}/index.html", viewport=WIDE)
    assert page.locator("#calculator .headline").is_visible()
    endless = "onmessage = () => { for (;;); }"
    page.route("**/calculator-worker.js", lambda route: route.fulfill(body=endless, content_type="text/javascript"))
    page.route("**/calculator.js", lambda route: route.abort())  # before the form's own script has come, too
    for name in ("calculator.js", "calculator-worker.js"):
        page.goto(f"{origin}/index.html?model=llama-3.1-70b&task=sft&gpu=rtx4090&gpus=1")
        assert not page.locator("#calculator .headline").is_visible(), name
        page.unroute("**/calculator.js")
    page.locator("#calculator .stop").click()
    assert not page.locator("#calculator .headline").is_visible()
    complaints[:] = [line for line in complaints if "ERR_FAILED" not in line]
    assert complaints == []
    page.context.close()


def test_another_job_hides_the_answer_until_its_own_is_there(home: Page) -> None:
    home.evaluate(PICK, JOBS["sft"])
    settle(home)
    shown = """() => {
      const form = document.querySelector('#calculator form');
      form.gpus.value = '4';
      form.gpus.dispatchEvent(new Event('change', {bubbles: true}));
      return getComputedStyle(document.querySelector('#calculator .headline')).visibility;
    }"""
    assert home.evaluate(shown) == "hidden"
    settle(home)
    assert home.locator("#calculator .headline").is_visible()


# What the answer shows whenever that changes, and something to do once it is `growing`
WATCH = """doing => {
  const shown = document.querySelector('#calculator .answer');
  const form = document.querySelector('#calculator form');
  const first = {
    mark() {
      shown.querySelector('.headline').dataset.same = '';
    },
    ask() {
      form.gpus.value = 2;
      form.requestSubmit();
    },
    stop() {
      form.querySelector('.stop').click();
    },
  };
  window.stages = [];
  window.watch?.disconnect();
  window.watch = new MutationObserver(() => {
    if (shown.hasAttribute('aria-busy') || !shown.dataset.stage) return;
    const { stage } = shown.dataset;
    const verdict = shown.querySelector('.headline').textContent;
    const last = window.stages.at(-1);
    if (last?.stage === stage && last.verdict === verdict) return;
    window.stages.push({stage, verdict, marked: !!shown.querySelector('.provisional')});
    if (stage === 'growing') {
      first[doing]?.();
      doing = '';
    }
  });
  window.watch.observe(shown, {attributes: true, childList: true});
}"""
EDGE = {
    "model": "qwen2.5-1.5b", "task": "sft", "gpu": "rtx4090", "gpus": 4, "framework": "torch", "sharding": "fsdp2",
    "micro_batch": 4, "seq_len": 1024, "ask": "estimate",
}  # fmt: skip


def test_what_may_change_is_marked_until_the_final_answer_is_there(home: Page) -> None:
    home.evaluate(WATCH, "")
    home.evaluate(PICK, EDGE)
    said = settle(home)
    first, last = home.evaluate("window.stages")
    assert (first["stage"], first["marked"]) == ("provisional", True)
    assert (last["stage"], last["marked"]) == ("whole", False)
    assert first["verdict"] != last["verdict"]  # this job's does change
    job = {name: value for name, value in EDGE.items() if name != "ask"}
    assert said == calculator.check(yaml.safe_dump(job), load(), Place("", tables.to_html)).line


def test_an_answer_grows_and_what_is_there_is_not_made_anew(home: Page) -> None:
    home.evaluate(WATCH, "mark")
    home.evaluate(PICK, JOBS["dpo by LoRA"])
    settle(home)
    first, last = home.evaluate("window.stages")
    assert (first["stage"], last["stage"]) == ("growing", "whole")
    assert first["verdict"] == last["verdict"]
    assert home.locator("#calculator .headline[data-same]").count() == 1


def test_a_newer_question_takes_the_place_of_an_answer_that_grows(home: Page, project: Path) -> None:
    home.evaluate(WATCH, "ask")
    home.evaluate(PICK, JOBS["dpo by LoRA"])
    said = settle(home)
    job = {**JOBS["dpo by LoRA"], "gpus": 2}
    assert said == calculator.find(job, load(project), Place("", tables.to_html)).line
    assert [("on 2 ×" in part["verdict"], part["stage"]) for part in home.evaluate("window.stages")] == [
        (False, "growing"),
        (True, "growing"),
        (True, "whole"),
    ]


def test_an_answer_that_only_lacks_what_stands_beside_it_is_kept_when_it_is_stopped(home: Page) -> None:
    home.evaluate(WATCH, "stop")
    home.evaluate(PICK, JOBS["dpo by LoRA"])
    assert settle(home) == "Stopped."
    assert home.locator("#calculator .headline").is_visible()
    assert [part["stage"] for part in home.evaluate("window.stages")] == ["growing"]


def test_a_field_that_the_reader_set_is_kept(browser: Browser, origin: str) -> None:
    page, requests, complaints = opened(browser, f"{origin}/index.html", viewport=WIDE)
    for group in page.locator("#calculator form details").all():
        if group.is_visible():
            group.locator("summary").click()
    page.locator("#calculator [name=checkpointing]").select_option("none")
    settle(page)
    page.locator("#calculator [name=micro_batch]").fill("1")
    page.locator("#calculator [name=gpu]").select_option("h200")
    said = settle(page)
    assert "no checkpointing" in page.locator("#calculator .answer dl").inner_text()
    page.locator("#calculator [name=seq_len]").fill("")
    page.locator("#calculator [name=seq_len]").blur()
    assert settle(page) != said  # an emptied field is the framework's default, not ours
    assert parse_qs(urlsplit(page.url).query, keep_blank_values=True)["seq_len"] == [""]
    page.locator("#calculator [name=task]").select_option("ppo")
    settle(page)
    kept = {"checkpointing": "none", "micro_batch": "1", "gpu": "h200", "framework": "openrlhf", "seq_len": ""}
    assert {name: page.evaluate(FIELD, name) for name in kept} == kept
    assert page.locator("#calculator [name=prompt_len]").is_visible()
    assert not page.locator("#calculator [name=seq_len]").is_visible()
    assert len([r for r in requests if "pyodide.asm.wasm" in r]) == 1  # one engine for all of it
    page.reload()
    settle(page)
    assert {name: page.evaluate(FIELD, name) for name in kept} == kept
    assert complaints == []
    page.context.close()


def test_a_config_json_is_a_model_that_stays_in_the_browser(browser: Browser, origin: str) -> None:
    page, requests, complaints = opened(browser, f"{origin}/index.html", viewport=WIDE)
    page.locator("#calculator form details summary").first.click()
    config = json.dumps(dict(load().model("qwen2.5-0.5b").config)).encode()
    file = {"name": "config.json", "mimeType": "application/json", "buffer": config}
    page.locator("#calculator [type=file]").set_input_files(file)  # type: ignore[arg-type]
    assert "qwen2.json, supervised fine-tuning on" in settle(page)
    assert page.evaluate(FIELD, "model") == "qwen2.json"
    assert "it stays in this browser" in page.locator("#calculator .answer").inner_text()
    page.locator("#calculator [name=gpu]").select_option("h200")
    assert settle(page).startswith("fits: qwen2.json")
    assert [r for r in requests if "python_stdlib" in r] == []  # all that answers import is in memory
    assert [r for r in requests if not r.startswith((origin, "data:", "blob:"))] == []
    assert complaints == []
    page.context.close()


def test_a_module_that_is_not_in_memory_is_read_from_the_site(browser: Browser, origin: str) -> None:
    page, requests, complaints = opened(browser, f"{origin}/index.html", viewport=WIDE)
    worker = (ROOT / "docs/assets/calculator-worker.js").read_text("utf-8")
    entry = 'return py.pyimport("calc.'
    late = worker.replace(entry, f"py.runPython(\"import sys; assert 'wave' not in sys.modules; import wave\");{entry}")
    page.route("**/calculator-worker.js", lambda route: route.fulfill(body=late, content_type="text/javascript"))
    page.evaluate(PICK, JOBS["sft"])
    assert settle(page).startswith("fits: Llama 3.1 8B")
    assert [r for r in requests if "python_stdlib" in r] != []
    assert complaints == []
    page.context.close()


COMPARED = [
    urlencode({**LLAMA, "gpu": "h100-sxm", "gpus": "8", "price": "2"}),
    urlencode({**LLAMA, "gpu": "rtx4090", "gpus": "8"}),
]


def test_jobs_are_compared_by_address_and_from_an_answer(browser: Browser, origin: str) -> None:
    address = addresses.compare(f"{origin}/", COMPARED, 5000)
    page, requests, complaints = opened(browser, address, "load", viewport=WIDE)
    until(
        page, "document.querySelector('#compare .stop').hidden && document.getElementById('compare-live')", seconds=120
    )
    expected = compare.compared(COMPARED, "5000", Place("", tables.to_html), print)
    assert page.locator("#compare .state").inner_text() == expected.line
    rows = page.locator("#compare-live tbody tr")
    assert [row.locator("th").inner_text() for row in rows.all()] == ["8 × H100 SXM 80GB HBM3", "8 × GeForce RTX 4090"]
    assert page.locator("#compare [name=samples]").input_value() == "5000"
    cost = page.locator("#compare-live tbody tr").first.locator("td").nth(7).text_content
    before = float(cost())
    page.locator("#compare [name=price-0]").fill("4000")
    page.keyboard.press("Tab")
    until(page, "document.querySelector('#compare .stop').hidden && location.search.includes('4000')")
    assert page.url != address
    assert float(cost().replace(",", "")) > 100 * before
    focused = page.evaluate("document.activeElement.textContent")
    assert focused == "Change"
    assert len([r for r in requests if "pyodide.asm.wasm" in r]) == 1
    page.locator("#compare .ask").last.click()
    until(page, "document.querySelectorAll('#compare-live tbody tr').length == 1")
    page.go_back()
    until(page, "document.querySelectorAll('#compare-live tbody tr').length == 2")
    with page.expect_navigation():
        page.locator("#compare .sides a", has_text="Change").last.click()
    assert "rtx4090" in page.url and "compare=" in page.url
    until(page, "!!document.querySelector('#calculator:not(.asked) .beside')", seconds=120)
    with page.expect_navigation():
        page.locator("#calculator .beside").click()
    until(page, "document.querySelectorAll('#compare-live tbody tr').length == 2", seconds=120)
    assert parse_qs(urlsplit(page.url).query)["compare"][0].endswith("price=4000")
    assert complaints == []
    page.context.close()


def test_every_field_of_the_form_is_for_everybody(browser: Browser, origin: str) -> None:
    page, _, _ = opened(browser, f"{origin}/index.html", color_scheme="light", viewport={"width": 360, "height": 740})
    page.evaluate("document.querySelectorAll('#calculator details').forEach(d => { d.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    small = """() => [...document.querySelectorAll('#calculator form :is(select, input, button, summary)')]
      .filter(e => e.offsetParent && Math.min(e.offsetHeight, e.offsetWidth) < 24).map(e => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(small) == []
    shuts_nobody_out(page, "#calculator")
    page.context.close()


EVIL = "<img src=x onerror='document.title = 1'>\"&amp;"


def test_an_address_with_markup_in_every_field_is_one_line(browser: Browser, origin: str) -> None:
    page, requests, complaints = opened(browser, f"{origin}/index.html", viewport=WIDE)
    title, images = page.title(), page.locator("img").count()
    fields = [field.get_attribute("name") for field in page.locator("#calculator [name]").all()]
    assert {"model", "task", "gpu", "gpus", "framework", "seq_len"} <= {*fields}
    every = {name: EVIL for name in [*fields, "no-such-field", "__proto__"]}
    page.goto(f"{origin}/index.html?{urlencode(every | {'task': '__proto__', 'seq_len': '9' * 400})}")
    assert ", allowed: " in settle(page)
    assert not page.locator("#calculator .answer").is_visible()
    assert page.locator("#calculator [name=model]").input_value() == EVIL
    assert (page.title(), page.locator("img").count()) == (title, images)
    assert [r for r in requests if not r.startswith((origin, "data:", "blob:"))] == []
    assert complaints == []
    page.context.close()


def test_a_fault_of_calc_is_told_in_words_and_the_next_question_is_answered(browser: Browser, origin: str) -> None:
    page, _, complaints = opened(browser, f"{origin}/index.html", viewport=WIDE)

    def broken(route: Route) -> None:
        fault = "import calc.site.calculator.calculator as c; c.finding = lambda *_: {}['maybe']"
        ready = "return py.pyimport("
        worker = route.fetch().text()
        assert ready in worker
        route.fulfill(body=worker.replace(ready, f'py.runPython("{fault}"); {ready}'), content_type="text/javascript")

    page.route("**/calculator-worker.js", broken)
    page.locator("#calculator [type=submit]").click()
    said = settle(page)
    assert said.startswith("This question hit a bug in the calculator")
    assert "Error" not in said and "maybe" not in said
    assert not page.locator("#calculator .answer").is_visible()
    assert any("KeyError: 'maybe'" in line for line in complaints)
    page.unroute("**/calculator-worker.js")

    def cut(route: Route) -> None:
        route.fulfill(body="cut", content_type="application/wasm")

    for fails in (lambda route: route.abort(), cut):
        page.route("**/pyodide.asm.wasm", fails)
        page.locator("#calculator [type=submit]").click()
        assert settle(page).startswith("The calculator could not be loaded")
        page.unroute("**/pyodide.asm.wasm")
    page.locator("#calculator [type=submit]").click()
    assert settle(page).startswith("fits: ")
    assert page.locator("#calculator .answer").is_visible()
    page.context.close()


def test_a_question_that_takes_long_can_be_stopped(browser: Browser, origin: str) -> None:
    page, _, complaints = opened(browser, f"{origin}/index.html", viewport=WIDE)
    endless = "onmessage = () => { postMessage({ words: 'Computing …' }); for (;;); }"
    page.route("**/calculator-worker.js", lambda route: route.fulfill(body=endless, content_type="text/javascript"))
    page.locator("#calculator [type=submit]").click()
    until(page, "document.querySelector('#calculator .state').textContent == 'Computing …'")
    page.locator("#calculator .stop").click()
    assert settle(page) == "Stopped."
    assert complaints == []
    page.context.close()


def test_an_answer_fits_a_phone_and_shuts_nobody_out(browser: Browser, origin: str) -> None:
    page, _, _ = opened(browser, f"{origin}/index.html", color_scheme="light", viewport={"width": 360, "height": 740})
    shown = calculator.find(JOBS["nothing fits"], load(), Place("", tables.to_html))
    page.evaluate("html => { document.querySelector('#calculator .answer').innerHTML = html; }", shown.html)
    page.evaluate("document.querySelectorAll('#calculator details').forEach(d => { d.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    shuts_nobody_out(page, "#calculator")
    page.context.close()


def test_without_script_there_is_an_answer_and_no_dead_button(browser: Browser, origin: str) -> None:
    page, requests, _ = opened(browser, f"{origin}/index.html", java_script_enabled=False)
    assert page.locator("#calculator .headline").is_visible()
    assert page.locator("#calculator .offline").is_visible()
    assert [b.inner_text() for b in page.locator("#calculator button").all() if b.is_visible()] == []
    assert page.locator("#fits-sft-full-8-lora-1-glance svg").first.is_visible()
    assert [r for r in requests if "calculator" in r] == []
    page.context.close()


def test_from_a_folder_the_calculator_says_why_it_does_not_answer(browser: Browser, site: Path) -> None:
    page, _, _ = opened(browser, (site / "index.html").as_uri(), viewport=WIDE)
    page.locator("#calculator [name=gpu]").select_option("h200")
    assert "not from a folder" in page.locator("#calculator .state").inner_text()
    page.context.close()


# a reader who has been at each figure
SEEN = """async () => { for (const figure of document.querySelectorAll("figure.computed")) {
    figure.scrollIntoView();
    await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
} }"""


@pytest.mark.parametrize("place", ["what-fits/ppo.html", "case-studies/ppo-qwen1.5-8x4090.html"])
def test_heatmaps_and_curves_are_for_everybody(browser: Browser, origin: str, place: str) -> None:
    page, _, complaints = opened(
        browser, f"{origin}/{place}", color_scheme="light", viewport={"width": 360, "height": 740}
    )
    page.evaluate("document.querySelectorAll('details.twin').forEach(d => { d.open = true; })")
    page.evaluate(SEEN)  # laid out, so that none lies over the next
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    shuts_nobody_out(page, "main")
    assert complaints == []
    page.context.close()
