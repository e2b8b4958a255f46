"""Translations: the same numbers and tables as the page that they translate, and nothing of their own."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from sites import ROOT, command

from calc.answers import answers, words
from calc.base.refusal import Refusal
from calc.scenario.scenario import SCHEMA
from calc.site.build import scripted
from calc.site.calculator import browser, browser_engine, fields, picker
from calc.site.calculator.closure import closure
from calc.site.i18n import chinese, languages, speech
from calc.site.macros import menus
from calc.site.tables import charts, tables
from calc.site.tables.tables import Table
from calc.site.text import fullwidth
from calc.site.text.sources import front


def test_a_translation_has_the_numbers_and_tables_of_its_original(tiny: Path) -> None:
    project = tiny
    english, chinese = ((project / "site" / name).read_text("utf-8") for name in ("index.html", "zh/index.html"))
    assert '<html lang="zh"' in chinese
    assert '<html lang="en"' in (project / "site/404.html").read_text("utf-8")
    peaks = [re.search(r"([\d.]+)(?:&nbsp;|\xa0)(?:<abbr[^>]*>)?GiB", page) for page in (english, chinese)]
    assert peaks[0] and peaks[1] and peaks[0][1] == peaks[1][1]
    rows = [re.findall(r"<tbody>.*?</tbody>", page) for page in (english, chinese)]
    numbers = [re.findall(r"\d+(?:[.,]\d+)*", re.sub("<[^>]*>", " ", "".join(found))) for found in rows]
    assert numbers[0] == numbers[1] != []
    assert "加载" in rows[1][0]
    assert "按阶段的显存" in chinese
    heads = [re.findall(r"<th scope=\"col\"[^>]*>([^<]*?) ?<", page) for page in (english, chinese)]
    assert heads[0][:3] == ["Phase", "Needs", "Peak at"]
    assert heads[1][:3] == ["阶段", "需要", "显存峰值时刻"]
    assert not set(heads[0]) & set(heads[1]) - {"NCCL", "Logits"}
    assert 'href="../hardware/index.html#cards"' in chinese
    assert 'hreflang="zh"' in english
    assert 'href="zh/index.html" hreflang="zh"' in english
    other = (project / "site/hardware/index.html").read_text("utf-8")
    assert 'rel="alternate"' not in english + other  # the theme would ask for a sitemap beside the page
    assert 'href="../zh/index.html"' in other

    page = project / "docs/index.zh.md"
    page.write_text(page.read_text("utf-8").replace("job-phases", "its-own"), "utf-8")
    failed = command(project, "write")
    assert failed.returncode == 2
    assert "docs/index.zh.md:8: has [[ phases_table(job, its-own) ]], where line 10 of the page" in failed.stderr


# Words that a Chinese engineer reads in English, and the names of packages, fields and their values.
NAMES = {
    "accelerate", "actor", "adamw", "autocast", "bash", "batch", "bf", "bin", "bitsandbytes", "calc", "channels",
    "chunked", "config", "connections", "critic", "cublas", "ddp", "deepspeed", "device", "dict", "div", "docs",
    "dpo", "eager", "entropy", "flash", "fp", "fsdp", "full", "fused", "generate", "gkd", "grpo", "hf", "json",
    "kernel", "kto", "kv", "lengths", "lite", "litgpt", "log", "logits", "logsumexp", "lora", "max", "medium",
    "megatron", "mini", "mixed", "mod", "mul", "none", "norm", "nvidia", "openrlhf", "optimizer", "orpo", "parquet",
    "perf", "ppo", "pretrain", "price", "proj", "qlora", "rm", "rollout", "scenario", "sdpa", "selective", "sft",
    "sglang", "simpo", "sleep", "slime", "softmax", "state", "tinyzero", "token", "torch", "torchao", "torchrun",
    "torchtitan", "torchtune", "transformers", "trl", "unsloth", "up", "verl", "vllm", "zero",
}  # fmt: skip
MARKUP = re.compile(r"<(code|pre|q|cite|script|style|textarea|title)\b.*?</\1>|<[^>]*>|https?://\S+", re.S)
ENGLISH = re.compile(r"(?<![\w./#&<=-])[a-z]{2,}(?![\w/=.#-])")
FIELD = re.compile(rf"(?:{'|'.join(SCHEMA['properties'])})(?:\.\w+)*(?: \S+)?(?:：.*)?")
DATA = ("gpus-overview", "nodes-overview", "nodes-sources")  # names and sources as the catalog has them


def english(html: str) -> list[str]:
    """The lines of HTML that still have an English word; a field alone in a line has its own name."""
    lines = [unescape(line).strip() for line in re.split("\x00+", MARKUP.sub("\x00", html))]
    return [line for line in lines if set(ENGLISH.findall(line)) - NAMES and not FIELD.fullmatch(line)]


def test_a_line_is_said_message_by_message_and_what_the_catalogue_lacks_stays_whole() -> None:
    said = {
        "fits": "放得下",
        "out of memory in backward": "显存不足（反向）",
        "Full activation checkpointing saves 1.2 GiB in `forward`.": "完整的激活重计算，在`forward`阶段节省 1.2 GiB。",
        "Qwen2.5 7B, PPO on 8 × A100 80GB PCIe: memory by phase": "Qwen2.5 7B，PPO，8 × A100 80GB PCIe：各阶段的显存",
        "LoRA of rank 64, ZeRO-2, micro batch 4": "秩 64 的 LoRA，ZeRO-2，微批次 4",
        "gpu: given 'rtx409', allowed: 'rtx4090'; did you mean 'rtx4090'?": (
            "gpu：给定 'rtx409'，允许：'rtx4090'；是不是想写 'rtx4090'？"
        ),
        "fits, in a way that nobody foresaw": "fits, in a way that nobody foresaw",
        "12.5": "12.5",
    }
    assert {line: speech.say(line, "zh") for line in said} == said
    assert speech.say("fits", "") == speech.say("fits", "en") == "fits"


def test_markup_code_and_quotations_stay_as_they_are() -> None:
    html = (
        '<p title="Memory">Host memory: <b>60 GB a node, as given</b></p>'
        "<pre>fits</pre><td><b>tight</b> <span>3.1</span> <small>ZeRO-3, offload</small></td>"
        "<td><q>fits</q> &amp; <code>fits</code></td>"
    )
    assert speech.speak(html, "zh") == (
        '<p title="显存">主机内存： <b>每节点 60 GB，由您给出</b></p>'
        "<pre>fits</pre><td><b>勉强</b> <span>3.1</span> <small>ZeRO-3，卸载</small></td>"
        "<td><q>fits</q> &amp; <code>fits</code></td>"
    )
    assert speech.speak(html, "") == html


def test_placeholders_of_a_message_and_of_its_translation_are_the_same() -> None:
    for message, said in chinese.MESSAGES.items():
        names = [sorted(set(re.findall(r"\{(\w+)[#*!?@]?\}", text))) for text in (message, said)]
        assert names[0] == names[1], message


def _literals() -> list[str]:
    """Every text that code, scripts, pages and the catalog have, f-strings without what they put in."""
    found: list[str] = []
    for path in (ROOT / "calc").rglob("*.py"):
        if path.stem != "chinese":
            found += [str(n.value) for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Constant)]
    texts = [
        p.read_text("utf-8")
        for folder in ("docs/assets", "calc")
        for p in (ROOT / folder).rglob("*.[jp][sy]")
        if p.stem != "chinese"
    ]
    found += [words for text in texts for words in re.split('[<>"`]|: ', text)]
    found += [words for p in (ROOT / "docs").rglob("*.md") for words in re.split("['\" ]", str(front(p)[0]))]
    found += [str(front(p)[0]) for p in (ROOT / "docs").rglob("*.md")]
    found += [p.read_text("utf-8") for p in (ROOT / "hardware").rglob("*.yaml")]
    found.append((ROOT / "calc/scenario/scenario.schema.json").read_text("utf-8"))
    return [text.casefold() for text in found]


def _text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_no_message_is_translated_that_nothing_says() -> None:
    literals = _literals()
    anywhere, wholes = "\0".join(literals), {text.strip(AROUND) for text in literals}

    def bare(run: str) -> str:
        """Words without what stands around them; of a number of things the one, since code adds the letter."""
        word = run.strip(AROUND)
        return word if word in wholes else word.removesuffix("s")

    @cache
    def said(words: tuple[str, ...]) -> bool:
        """True if code says the words at once, or puts them together of whole texts and of pieces of some words."""
        runs = [(" ".join(words[:n]), words[n:]) for n in range(len(words), 0, -1)]
        found = (rest for run, rest in runs if bare(run) in wholes or (" " in run and run in anywhere))
        return not words or any(said(rest) for rest in found)

    pieces = {
        (m, piece.strip(AROUND)) for m in chinese.MESSAGES for piece in re.split(r"\{\w+[#*!?@]?\}", m.casefold())
    }
    assert [m for m, piece in pieces if re.search("[a-z]{2}", piece) and not said(tuple(piece.split()))] == []


AROUND = " ,;:.()"


def test_components_phases_verdicts_tasks_and_scripts_have_translations() -> None:
    asked = {
        *charts.COMPONENTS.values(),
        *map(charts.title, charts.COMPONENTS),
        *tables.WORDS.values(),
        *words.TASKS.values(),
        *words.METHODS.values(),
        *words.PRECISIONS.values(),
        *words.ATTENTION.values(),
        *(said for field in FIELDS for said in (field.title, field.empty, field.about, *field.choices.values())),
        *(said for field in fields.FIRST for said in (field.title, field.empty)),
        *(group.title for group in fields.GROUPS),
        *picker.ASKS.values(),
        *scripted.said(),
        *PHASES,
    }
    known = chinese.MESSAGES.keys()
    lacking = {a for a in asked if not {a, a[:1].lower() + a[1:]} & known}
    assert {a for a in lacking if set(ENGLISH.findall(speech.say(a, "zh"))) - NAMES} == set()


FIELDS = [*(field for group in fields.GROUPS for field in group.fields)]
PHASES = ("load", "rollout", "score", "forward", "backward", "step", "sync", "save")


def _templates(node: ast.AST) -> str | None:
    """An f-string or a text, with 7 in place of what is put in, and without a near miss."""
    if isinstance(node, ast.JoinedStr):
        parts = [(v, re.search(r"closest|near\b(?!\()", ast.unparse(v))) for v in node.values]
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "" if near else "7" for v, near in parts)
    return str(node.value) if _text(node) else None  # type: ignore[attr-defined]


def _refusal(node: ast.AST) -> str | None:
    """The line of a `Refusal` that the code makes."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Refusal"):
        return None
    return str(Refusal(*[_templates(part) or "7" for part in node.args]))


def _refusals() -> list[str]:
    """Every line about a field's value that the calculator can show, 7 standing for what is put in."""
    found: list[str] = []
    for path in closure(browser_engine.ENTRY):
        if path.relative_to(ROOT).as_posix().startswith(UNTRANSLATED):
            continue
        inner = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                inner |= {id(part) for part in ast.walk(node) if part is not node}
            text = _refusal(node) or (_templates(node) if id(node) not in inner else None)
            if text and re.match(r"[\w.]+: given .*allowed", text) and not FILES.search(text):
                found.append(text)
    return sorted(set(found))


FILES = re.compile("no such folder|no regular file|an option, as ")  # of the command line alone
UNTRANSLATED = ("calc/diagnose/snapshot.py", "calc/catalog/oom_message.py")  # of files that are read


def test_every_refusal_of_a_job_has_a_translation() -> None:
    found = _refusals()
    assert len(found) > 100
    known = set(re.findall(r"[a-z]+", (ROOT / "calc/scenario/scenario.schema.json").read_text("utf-8")))
    known -= {
        "as",
        "in",
        "is",
        "of",
        "on",
        "or",
        "the",
        "to",
        "which",
        "its",
        "has",
        "for",
        "with",
        "a",
        "it",
        "no",
        "that",
    }
    left = {line: set(ENGLISH.findall(speech.say(line, "zh"))) - NAMES - known for line in found}
    assert {line: words for line, words in left.items() if words} == {}


def test_a_chinese_page_has_no_english_line_in_its_tables_and_its_calculator(site: Path) -> None:
    found, pages = {}, sorted((site / "zh").rglob("*.html"))
    assert len(pages) == len([*(ROOT / "docs").rglob("*.zh.md")])
    for page in pages:
        html = page.read_text("utf-8")
        made = re.findall(r'<figure class="computed" id="([^"]+)".*?</figure>', html, re.S)
        figures = re.findall(r'<figure class="computed".*?</figure>', html, re.S)
        shown = [figure for name, figure in zip(made, figures, strict=True) if name not in DATA]
        shown += re.findall(r"<span data-address.*?</span>", html)
        shown += re.findall(r'<div id="(?:calculator|compare|diagnose)".*?(?=<script type)', html, re.S)
        if lines := [line for figure in shown for line in english(figure)]:
            found[page.relative_to(site).as_posix()] = lines
    assert found == {}


def test_every_note_of_a_node_has_a_translation() -> None:
    notes = {note for node in answers.catalog().nodes.values() for note in node.notes.values()}
    assert notes
    assert [line for note in notes for line in english(speech.say(note, "zh"))] == []


def test_a_citation_is_said_in_the_language_of_its_page() -> None:
    table = Table("an-id", "Where each value is read", (), (), versions={"catalog": "0a", "calc": "1.0"})
    said = speech.speak(menus.footer(table, "zh/page.html", "../", "zh"), "zh")
    assert english(said) == []
    assert "[数据集]. Headroom. zh/page.html#an-id" in said and 'title = "{各数值的出处}"' in unescape(said)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"method": "full", "model": "qwen2.5-7b"},
        {"task": "dpo", "gpus": "8"},
        {"task": "grpo", "framework": "verl", "gpus": "8", "prompt_len": "512", "response_len": "512", "seq_len": None},
        {"model": "llama-3.1-70b", "method": "full"},
    ],
)
def test_the_calculator_answers_in_the_language_of_its_page(changed: dict[str, Any]) -> None:
    job = {name: value for name, value in {**JOB, **changed}.items() if value is not None}
    said: list[str] = []
    answer = json.loads(browser.answer(json.dumps({"root": "", "language": "zh", "job": job}), said.append))
    assert [*english(answer["html"]), *english(answer["line"])] == []
    assert "显存" in answer["html"]
    other = json.loads(browser.answer(json.dumps({"root": "", "job": job}), said.append))
    assert other["file"] == answer["file"]
    assert re.findall(r"\d+\.\d+ GiB", other["line"]) and "usable" in other["line"]


def test_jobs_side_by_side_are_said_in_the_language_of_the_page_and_lead_to_its_pages() -> None:
    jobs = [urlencode({**JOB, "gpu": gpu, "gpus": "8"}) for gpu in ("h100-sxm", "h200", "rtx409")]
    asked = {"root": "../", "language": "zh", "translated": ["zh/index.html"], "compare": jobs, "samples": "20000"}
    answer = json.loads(browser.answer(json.dumps(asked), print))
    assert [line for line in english(answer["html"]) if "rtx409" not in line] == []
    assert 'href="../zh/index.html?' in answer["html"] and 'href="../compare.html' in answer["html"]


def test_a_diagnosis_is_said_in_the_language_of_its_page() -> None:
    text = (
        "deepspeed --num_gpus 4 --module openrlhf.cli.train_sft --pretrain meta-llama/Meta-Llama-3-8B --max_len 2048 "
        "--micro_train_batch_size 8 --train_batch_size 128 --zero_stage 2 --bf16 --flash_attn\n"
        "torch.OutOfMemoryError: CUDA out of memory."
    )
    for more in ({}, {"gpu": "a100-80-sxm"}):
        asked = {"root": "", "language": "zh", "diagnose": text, "fields": more}
        answer = json.loads(browser.answer(json.dumps(asked), print))
        lines = [line for part in ("html", "line") for line in english(answer[part])]
        assert lines == []
    assert "改动" in answer["html"] and "显存" in answer["html"]


def test_the_calculator_refuses_in_the_language_of_its_page() -> None:
    asked = {"root": "", "language": "zh", "job": JOB | {"gpu": "rtx409"}}
    error = json.loads(browser.answer(json.dumps(asked), print))["error"]
    assert error.endswith("；是不是想写 'rtx4090'？")
    assert "允许：" in error and "given" not in error


JOB = {"model": "llama-3.1-8b", "task": "sft", "framework": "trl", "gpu": "rtx4090", "gpus": "2", "seq_len": "2048"}


def test_text_has_no_holes_beside_chinese_punctuation() -> None:
    given = "**答案。** 在六张\n卡上，\n  [见](x.md) 第 2 页 （附录）\nGiB\n\n- 一、\n- 二"
    assert fullwidth.close(given) == "**答案。**在六张卡上，[见](x.md) 第 2 页（附录）GiB\n\n- 一、\n- 二"
    assert fullwidth.close("## 多宽？ { #how-wide }") == "## 多宽？ { #how-wide }", "attributes need their space"
    english = "One, two\nthree (four) — five.\n\n    code  is left"
    assert fullwidth.close(english) == english


def test_links_lead_to_the_translation_where_there_is_one(tmp_path: Path) -> None:
    for name in ("index.md", "index.zh.md", "a/b.md", "a/b.zh.md", "a/c.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    html = '<a href="../a/b.html#x">b</a> <a href="../a/c.html">c</a> <a href="https://example.org/a/b.html">d</a>'
    led = html.replace("../a/b.html#x", "../zh/a/b.html#x")
    assert speech.lead(html, "../", "zh", languages.translated("zh", tmp_path)) == led
    assert languages.translated("", tmp_path) == frozenset()
    assert speech.lead(html, "../", "", ()) == html


def test_addresses() -> None:
    assert languages.split("a/b.zh.md") == ("a/b.md", "zh")
    assert languages.split("a/qwen2.5.md") == ("a/qwen2.5.md", "")
    assert languages.url("a/b.zh.md") == "zh/a/b.html"
    assert languages.url("models/qwen2.5-7b.md") == "models/qwen2.5-7b.html"
