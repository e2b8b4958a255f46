"""The calculator: its catalog, its archive, its first answer; what it says in a browser is in test_calculating."""

from __future__ import annotations

import ast
import gzip
import json
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import pytest
import yaml
from commands import Run
from sites import ROOT

from calc.answers import answers, published
from calc.base.schema import InputError
from calc.base.units import gib
from calc.catalog.catalog import load
from calc.estimate.estimate import as_dict, estimate
from calc.frameworks.registry import FRAMEWORKS
from calc.frameworks.torch.trainers.registry import RELEASED
from calc.recommend import options, recommend
from calc.resolve.parse import given, parse
from calc.site.calculator import browser, browser_engine, calculator, closure, fields, picker
from calc.site.calculator.calculator import Job, Place
from calc.site.faults import BuildError
from calc.site.tables import tables
from calc.site.text.sources import front
from calc.site.views.advice import recipes

JOB = {"model": "llama-3.1-8b", "task": "sft", "framework": "trl", "gpu": "rtx4090", "gpus": 2, "seq_len": 2048}
PLACE = Place("", tables.to_html)


def test_the_catalog_in_the_browser_is_the_catalog() -> None:
    there, here = browser.catalog(json.loads(json.dumps(published.catalog()))), load()
    assert there.gpus == here.gpus
    assert there.nodes == here.nodes
    assert there.models == here.models
    assert there.names.listed == here.names.listed
    assert there.names.spelled == here.names.spelled
    assert there.names.unlike == here.names.unlike
    assert there.version == here.version


def test_the_archive_is_calc_as_it_stands_and_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = browser_engine.archive()
    monkeypatch.setattr(zlib, "compressobj", lambda *a, **k: pytest.fail("another zlib writes other bytes"))
    browser_engine.archive.cache_clear()
    assert raw == browser_engine.archive()
    names = set(held := json.loads(raw))
    ours = [place for place in names if place.startswith("calc/")]
    assert [place for place in ours if held[place] != (ROOT / place).read_text("utf-8")] == []
    assert {f"calc/{place}.py" for place in ("estimate/estimate", "frameworks/verl/verl", "recommend/search")} <= names
    assert {
        "calc/scenario/scenario.schema.json",
        "calc/site/calculator/browser.py",
        "calc/site/tables/charts.py",
    } <= names
    assert "calc/site/build/build.py" not in names
    assert {name.split("/")[0] for name in names} == {"calc", "yaml", "fastjsonschema"}


def test_the_archive_holds_whatever_its_modules_import() -> None:
    """Imports are found line by line: as many as Python's own parser finds, in all of calc."""
    for path in (ROOT / "calc").rglob("*.py"):
        source = path.read_text("utf-8")
        parsed = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module]
        names = {f"{node.module}.{alias.name}" for node in parsed for alias in node.names}
        found = closure.imported(source)
        assert {name for name in names | {node.module for node in parsed} if name.startswith("calc")} == {
            name for name in found if name.startswith("calc")
        }, path


def test_the_snapshot_is_the_same_whenever_and_wherever_it_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = browser_engine.snapshot()
    for name, value in {"TZ": "XXX-14", "LC_ALL": "de_DE.UTF-8", "USER": "nobody"}.items():
        monkeypatch.setenv(name, value)
    elsewhere = shutil.copytree(browser_engine.PYODIDE, tmp_path / "pyodide")
    monkeypatch.setattr(browser_engine, "PYODIDE", elsewhere)
    monkeypatch.setattr(browser_engine, "MAKER", shutil.copy(browser_engine.MAKER, tmp_path))
    assert browser_engine._made() == here


def test_node_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser_engine, "PYODIDE", tmp_path)
    with pytest.raises(BuildError, match=r"snapshot\.mjs: Error.*Cannot find module"):
        browser_engine._made()


def test_the_engine_is_written_once_and_what_is_old_goes(tmp_path: Path) -> None:
    (tmp_path / "0ld").mkdir()
    browser_engine.write(tmp_path)
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in folder.iterdir()} == {
        *browser_engine.CORE,
        browser_engine.LIBRARY,
        browser_engine.LOCK,
        browser_engine.SNAPSHOT,
    }
    loaded = [folder / name for name in (*browser_engine.CORE, browser_engine.SNAPSHOT)]
    transferred = sum(min(path.stat().st_size, len(gzip.compress(path.read_bytes()))) for path in loaded)
    assert json.loads((folder / browser_engine.LOCK).read_bytes())["megabytes"] == round(transferred / 1e6)
    before = (folder / browser_engine.SNAPSHOT).stat().st_mtime_ns
    browser_engine.write(tmp_path)
    assert (folder / browser_engine.SNAPSHOT).stat().st_mtime_ns == before


def test_an_answer_is_that_of_recommend_with_its_machine_its_command_and_its_file() -> None:
    shown = calculator.find(JOB, load(), PLACE)
    found = recommend({**JOB, "gpus_per_node": 2}, load())
    assert found.recommended and found.launch
    peak = recipes.words.answered(found.recommended.judged).device_bytes
    assert gib(peak) in shown.line
    assert "--gpus-per-node 2" in shown.html
    assert found.launch.command.splitlines()[0].rstrip(" \\") in shown.html
    assert parse(yaml.safe_load(shown.file)).as_dict() == found.recommended.scenario.as_dict()


def test_a_file_is_estimated_as_the_command_line_does() -> None:
    text = calculator.find(JOB, load(), PLACE).file.replace("micro_batch: 1\n", "micro_batch: 2\n")
    answer = as_dict(estimate(parse(yaml.safe_load(text))))
    peak = max(g["peak_device_bytes"] for g in answer["groups"])
    assert gib(peak) in calculator.check(text, load(), PLACE).line


def grown(**question: Any) -> list[dict[str, Any]]:
    """The parts of an answer in which something is new."""
    return [json.loads(part) for part in browser.parts(json.dumps({"root": "", **question}), print) if part]


def test_an_answer_starts_with_what_to_run_and_only_gets_longer() -> None:
    first, whole = grown(job={name: str(value) for name, value in JOB.items()})
    assert (first["stage"], whole["stage"]) == ("growing", "whole")
    assert whole["html"].startswith(first["html"]) and len(whole["html"]) > len(first["html"])
    assert {**first, "html": "", "stage": ""} == {**whole, "html": "", "stage": ""}
    assert whole["html"] == calculator.find(JOB, load(), PLACE).html


def test_an_estimate_is_provisional_until_the_allocator_has_been_replayed() -> None:
    job = {"model": "qwen2.5-1.5b", "task": "sft", "gpu": "rtx4090", "gpus": 4, "framework": "torch",
           "sharding": "fsdp2", "micro_batch": 4, "seq_len": 1024}  # fmt: skip
    first, whole = grown(file=yaml.safe_dump(job))
    assert (first["stage"], whole["stage"]) == ("provisional", "whole")
    assert calculator.PROVISIONAL in first["html"] and calculator.PROVISIONAL not in whole["html"]
    assert whole["line"] == calculator.check(yaml.safe_dump(job), load(), PLACE).line != first["line"]
    assert as_dict(estimate(parse(job)))["verdict"] == whole["line"].partition(":")[0]
    # DeepSpeed's blocks are not known, so nothing is replayed, and the first answer is the last
    (only,) = grown(file=yaml.safe_dump({**job, "framework": "openrlhf", "sharding": "zero3"}))
    assert only["stage"] == "whole"


def test_what_would_have_to_change_follows_the_closest_miss() -> None:
    job = {"model": "llama-3.1-70b", "task": "sft", "gpu": "rtx4090", "gpus": "1", "framework": "trl", "method": "lora"}
    first, whole = grown(job=job)
    assert [("What would have to change" in each["html"], each["stage"]) for each in (first, whole)] == [
        (False, "growing"),
        (True, "whole"),
    ]
    assert first["line"] == whole["line"]


@pytest.mark.parametrize("task", ["pretrain", "inference"])
def test_tasks_that_no_form_offers_are_answered_too(task: str) -> None:
    text = yaml.safe_dump({"model": "llama-3.2-1b", "task": task, "gpu": "h100-sxm"})
    assert calculator.check(text, load(), PLACE).line.startswith("fits")
    assert calculator.find({"model": "llama-3.2-1b", "task": task, "gpu": "h100-sxm"}, load(), PLACE).file


def test_an_open_machine_is_the_smallest() -> None:
    lines: list[str] = []
    job = {name: value for name, value in JOB.items() if name not in ("gpu", "gpus")} | {"method": "qlora"}
    shown = calculator.find(job, load(), PLACE, lines.append)
    assert lines
    assert f"{len(lines) - 1} of the catalog are too small" in shown.html


@pytest.mark.parametrize(
    "changed",
    [{"gpu": "rtx409"}, {"seq_len": "long"}, {"framework": "trl", "task": "ppo"}, {"gpus": 0}, {"model": "x"}],
)
def test_a_bad_job_is_answered_with_the_command_lines_one_line(changed: Job, run: Callable[..., Run]) -> None:
    job = {name: str(value) for name, value in {**JOB, **changed}.items()}
    error = json.loads(browser.answer(json.dumps({"root": "", "job": job}), print))["error"]
    options = [word for name, value in job.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert run("recommend", *options) == Run(2, "", f"{error}\n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: [\n", "scenario.yaml:2: not YAML"),
        ("model: llama-3-8b\ntask: sft\ngpu: h100-sxm\nzero: 3\n", "scenario.yaml: unknown field 'zero'"),
    ],
)
def test_a_bad_file_is_answered_with_one_line(text: str, said: str) -> None:
    error = json.loads(browser.answer(json.dumps({"root": "", "file": text, "job": {}}), print))["error"]
    assert error.startswith(said)
    assert "\n" not in error


def test_every_model_task_and_gpu_can_be_picked_and_what_a_reader_types_stays_text() -> None:
    first = recipes.recommended(front(ROOT / "docs/index.md")[0]["recipes"]["first"])
    html = picker.show(first, PLACE)
    for name in (*load().models, *load().gpus, *picker.DEFAULTS):
        assert f'<option value="{name}"' in html
    assert "\n" not in html
    with pytest.raises(InputError) as refused:
        calculator.find({**JOB, "model": "<img src=x>"}, load(), PLACE)
    assert "<img" in str(refused.value)  # shown as text, never as HTML
    assert "&lt;img" in calculator._code("<img>", "x")


def answered(**question: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(browser.answer(json.dumps({"root": "", **question}), print))
    return found


PASTED = {
    "ZeRO and offload": """
model: llama-3-8b
task: sft
gpu: h100-sxm
gpus: 8
framework: openrlhf==0.8.3
sharding: zero3
offload: {optimizer: true}
micro_batch: 2
checkpointing: full
versions: {torch: "2.4"}
seq_len: 4096
""",
    "roles": """
model: qwen2.5-0.5b
task: ppo
gpu: rtx4090
gpus: 4
framework: openrlhf
roles.critic.model: qwen2.5-1.5b
roles.reward: none
rollout: {gpu_memory_utilization: 0.4, n: 2}
""",
    "adapters": "{model: qwen2.5-7b, task: sft, gpu: a40, method: lora, lora: {rank: 8, targets: [q_proj, v_proj]}}",
}


@pytest.mark.parametrize("name", PASTED)
def test_a_pasted_scenario_is_an_address_that_asks_for_the_same(name: str) -> None:
    shown = answered(file=PASTED[name], job={"model": "llama-3.1-8b", "task": "dpo"})
    again = answered(job=dict(parse_qsl(urlencode(shown["fields"]))))
    assert (again["line"], again["html"]) == (shown["line"], shown["html"])
    assert shown["file"] == PASTED[name]
    assert again["fields"] is None  # the form has them


def test_an_address_keeps_of_a_whole_scenario_what_the_form_shows_and_what_makes_a_difference() -> None:
    whole = answered(job={name: str(value) for name, value in JOB.items()})["file"]
    kept = answered(file=whole, job={})["fields"]
    assert {"micro_batch", "sharding", "checkpointing", "offload.optimizer"} <= {*kept}
    assert {*kept} - fields.NAMES <= {"ask", "expandable_segments"}  # this search sets segments that grow
    other = yaml.safe_load(whole)
    other["versions"]["torch"] = "2.4"
    assert answered(file=yaml.safe_dump(other), job={})["fields"]["versions.torch"] == "2.4"


def test_a_config_json_is_a_model_of_the_same_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = json.dumps(dict(load().model("qwen2.5-0.5b").config))
    job = {"model": "llama-3.1-8b", "task": "sft", "framework": "trl", "gpu": "rtx4090", "gpus": "1"}
    shown = answered(file=config, job=job)
    assert shown["fields"] == job | {"model": "qwen2.json"}
    assert "it stays in this browser" in shown["html"]
    known = answered(job=job | {"model": "qwen2.5-0.5b"})["line"]
    assert shown["line"].partition("peak")[2] == known.partition("peak")[2]
    assert answered(job=shown["fields"])["line"] == shown["line"]
    broken = answered(file=config.replace('"hidden_size": 896', '"hidden_size": -1'), job=job)
    assert "qwen2.json" in broken["error"] and "hidden_size" in broken["error"]


@pytest.mark.parametrize("name", [field.name for group in fields.GROUPS for field in group.fields])
def test_a_field_of_the_form_is_a_field_of_a_scenario_with_its_words(name: str) -> None:
    field = next(field for group in fields.GROUPS for field in group.fields if field.name == name)
    definition = dict(options.fields())[name]
    assert field.about == definition["description"]
    assert set(definition.get("enum", ())) <= set(field.choices)
    usual = {"integer": "1", "number": "0.5", "string": "trl"}
    value = next(iter(field.choices), usual.get(field.kind, ""))
    job = {"model": "llama-3.1-8b", "task": field.tasks[1 if field.tasks[0] == "pretrain" else 0], name: value}
    if name.startswith("images."):
        job = {"images.width": "512", "images.height": "512", **job}
    given(options.typed(job, "form"), where="form", catalog=load())


def test_every_known_version_of_a_framework_or_trainer_can_be_picked() -> None:
    offered = {value for _, versions in fields.frameworks() for value in versions}
    assert offered >= {f"{name}=={known}" for name, module in FRAMEWORKS.items() for known in module.KNOWN}
    assert offered >= {f"{name}=={known}" for name, module in RELEASED.items() for known in module.RELEASES}
    for value in offered:
        given({"model": "llama-3.1-8b", "task": "sft", "framework": value}, where="form", catalog=load())


def test_settings_left_open_are_searched_or_the_frameworks() -> None:
    job = {"model": "llama-3.1-8b", "task": "sft", "framework": "openrlhf", "gpu": "h100-sxm", "gpus": "8"}
    estimated = answered(job=job | {"ask": "estimate"})
    assert estimated["line"] == calculator.check(yaml.safe_dump(options.typed(job, "")), load(), PLACE).line
    assert answered(job=job)["line"] != estimated["line"]
    assert answered(job=job | {"ask": "guess"})["error"] == "ask: given 'guess', allowed: estimate"


def test_an_answer_says_why_adapters_what_a_step_holds_and_the_memory_of_the_host() -> None:
    job = {"model": "llama-3.1-8b", "task": "sft", "framework": "trl", "gpu": "rtx4090", "gpus": "1"}
    html = answered(job=job | {"global_batch": "64", "seq_len": "2048"})["html"]
    assert "<dt>Why LoRA</dt><dd>full fine-tuning comes first, and lacks " in html
    assert "A step: 64 sequences, 131,072 tokens; each GPU takes 64 of them in" in html
    assert "tokens a second over the whole job" in html
    assert "none needed of" in html and "as given" not in html
    assert "GB a node, as given" in answered(job=job | {"host_memory": "500"})["html"]


EVIL = "\"'><img src=x onerror=run()>&lt;b"
OWN = {"model": f"{EVIL}/config.json", "task": "sft", "gpu": "rtx4090", "gpus": 1}
HOSTILE: Mapping[str, Job] = {
    "a model's path": OWN,
    "a role's model": {**OWN, "model": "qwen2.5-0.5b", "task": "ppo", "roles": {"critic": {"model": OWN["model"]}}},
    "names of the catalog": {**OWN, "model": "qwen2.5-0.5b", "framework": "trl==99.1"},
    "a version": {**OWN, "framework": f"trl=={EVIL}"},
    "a role": {**OWN, "roles": {EVIL: "none"}},
    "a target": {**OWN, "method": "lora", "lora": {"rank": 8, "targets": [EVIL]}},
    "a field": {**OWN, EVIL: 1},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_markup_in_a_job_is_shown_as_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = load()
    model, gpu = known.model("qwen2.5-0.5b"), known.gpu("rtx4090")
    catalog = replace(
        known,
        models={**known.models, model.id: replace(model, name=EVIL)},
        gpus=known.gpus | {gpu.id: replace(gpu, name=EVIL)},
    )
    monkeypatch.setattr(answers, "catalog", lambda: catalog)
    monkeypatch.chdir(tmp_path)
    (tmp_path / EVIL).mkdir()
    (tmp_path / EVIL / "config.json").write_text(json.dumps(dict(model.config)), "utf-8")
    try:
        shown = calculator.check(yaml.safe_dump(dict(HOSTILE[name])), catalog, PLACE).html
        if {*HOSTILE[name]} <= {*JOB}:
            shown += calculator.find(HOSTILE[name], catalog, PLACE).html
    except InputError as error:
        assert "<img" in str(error) and "\n" not in str(error)  # calc's line, which the page shows as text
        return
    assert escape(EVIL) in shown
    tags: list[tuple[str, list[tuple[str, str | None]]]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append((tag, attrs))  # type: ignore[method-assign]
    parser.feed(shown)
    assert "img" not in {tag for tag, _ in tags}
    assert [name for _, attrs in tags for name, _ in attrs if name.startswith("on")] == []


def test_the_first_answer_is_what_the_picker_asks_first() -> None:
    given = front(ROOT / "docs/index.md")[0]["recipes"]["first"]
    picked = {**picker.DEFAULTS[given["task"]], **{k: given[k] for k in ("model", "task", "gpu", "gpus")}}
    assert calculator.question(picked, answers.catalog()) == given
