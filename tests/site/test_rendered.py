"""A fault of a page is one line that names its file and the line or field, before anything is built."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sites import TINY

from calc.base.schema import InputError
from calc.site.faults import BuildError
from calc.site.macros.rendered import Pages
from calc.site.text import glossary
from calc.site.views.catalog import changelog

INDEX, CHINESE, CARDS = "index.md", "index.zh.md", "hardware/index.md"
TABLE = '\n[[ phases_table("job", id="{}") ]]'
LACKS, BESIDES = "the page that it translates has", "the page that it translates lacks"
PLANTED = [
    # macros; the faults stand on the last line, behind which the page ends
    (INDEX, "", "\n[[ peek('job') ]]", ":12: 'peek' is undefined"),
    (INDEX, "", "\n\n[[ peak('jub') ]]", ":13: no scenario 'jub' in the front matter; it has job; did you mean 'job'?"),
    (INDEX, "", "\n[[ peak() ]]", ":12: TypeError: Macros.peak() missing 1 required positional argument: 'job'"),
    (INDEX, "", "\n[[ peak('job', digits='two') ]]", ":12: ValueError: "),
    (INDEX, "", "\n[[ gib('job', 'weight') ]]", ":12: job has no 'weight' there; it has peak, "),
    (INDEX, "", "\n[[ verdict('job', group='critic') ]]", ":12: job: no group 'critic'; this job has "),
    (INDEX, "", "\n[[ gpu_name('rtx4091') ]]", ":12: gpu: given 'rtx4091', allowed: "),
    (INDEX, "", "\n[[ count('qwen') ]]", ":12: model: given 'qwen', allowed: "),
    (INDEX, "", "\n[[ formula('calc.base.units:nothing') ]]", ":12: formula calc.base.units:nothing: "),
    (INDEX, "", "\n[[ peak('job') ]", ":12: unexpected ']'"),
    (INDEX, "", "\n[[ peak('job')", ":12: unexpected end of template"),
    (INDEX, "", "\n[% for x in %]", ":12: Expected an expression"),
    (INDEX, "", "\n[[ 1 / 0 ]]", ":12: ZeroDivisionError: division by zero"),
    (INDEX, "", "\n[% for n in range(10 ** 12) %]x[% endfor %]", ":12: OverflowError: Range too big."),
    (INDEX, "", "\n[[ ''.__class__.__mro__ ]]", ":12: access to attribute '__class__' of 'str' object is unsafe."),
    (INDEX, "", "\n[[ kv_table(5, id='x', caption='y') ]]", ":12: TypeError: 'int' object is not iterable"),
    (INDEX, "", TABLE.format("job-phases"), ":12: table id 'job-phases' stands on index.html already"),
    (INDEX, "", TABLE.format("Job phases"), ":12: table id 'Job phases', allowed: lower-case letters"),
    (CARDS, "", TABLE.format("x"), ":10: no scenario 'job' in the front matter; it has none"),
    # figures that nobody computed
    (INDEX, "", "\nIt needs 24 GB.", ":12: given '24 GB' typed in, allowed: a macro that computes it"),
    (INDEX, "", "\n> 1 GiB is quoted.\n\nSome 13.8GiB\nare not.", ":14: given '13.8GiB' typed in"),
    # front matter
    (INDEX, "---\n", "", ":1: given 'description: A page with a job, a number and a table.', allowed: front matter"),
    (INDEX, "\n---", "\n--", ":1: given '---', allowed: front matter between two lines of ---"),
    (INDEX, "description", "descripton", ": unknown field 'descripton'; did you mean 'description'?"),
    (INDEX, "description: A page with a job, a number and a table.\n", "", ": missing field 'description'"),
    (INDEX, "A page with a job, a number and a table.", "12", ": description: given 12, allowed: text"),
    (INDEX, "A page", "[A page", ":3: not YAML: "),
    (INDEX, "scenarios:", "\tscenarios:", ":3: not YAML: "),
    (INDEX, "scenarios:\n", "scenarios: {}\nscenarios:\n", ":4: field 'scenarios' given twice"),
    (INDEX, "scenarios:\n", "hide: [navigaton]\nscenarios:\n", ": hide[0]: given 'navigaton', allowed: navigation, "),
    (INDEX, "  job: {model", "  job: [model", ":4: not YAML: "),
    (INDEX, "  job: {", "  jub: {", ": scenarios.jub: given a job that no macro of the page names"),
    (INDEX, "scenarios:\n", "labels: {jub: x}\nscenarios:\n", ": labels.jub: allowed: job; did you mean 'job'?"),
    (INDEX, "framework: trl", "frameworks: trl", ":8: scenarios.job: unknown field 'frameworks'; did you mean"),
    (INDEX, "framework: trl", "gpus: many", ":8: scenarios.job: gpus: given 'many', allowed: an integer"),
    (INDEX, "gpu: rtx4090", "gpu: rtx409", ":8: scenarios.job: gpu: given 'rtx409', allowed: "),
    # translations
    (CHINESE, '[[ verdict("job") ]]', "", f":4: lacks [[ verdict(job) ]], which line 8 of {LACKS}"),
    (CHINESE, "[[ phases_table", "[ phases_table", ":4: lacks [[ phases_table(job, job-phases) ]], which line 10 of"),
    (
        CHINESE, "job-phases", "its-own",
        f":8: has [[ phases_table(job, its-own) ]], where line 10 of {LACKS} [[ phases_table(job, job-phases) ]]",
    ),
    (CHINESE, "peak", "peek", ":6: 'peek' is undefined"),
    (CHINESE, '[[ peak("job") ]]：[[ verdict("job") ]]', "",
     f":4: lacks [[ peak(job) ]], which line 8 of {LACKS}; 1 more calls differ"),
    (INDEX, "peak", "peek", ":8: 'peek' is undefined"),
    (CHINESE, "", '\n[[ usable("rtx4090") ]]', f":10: has [[ usable(rtx4090) ]], which {BESIDES}"),
]  # fmt: skip


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """The pages of a small project."""
    for name, text in TINY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    return tmp_path / "docs"


def told(docs: Path, page: str) -> str:
    """The fault that stops a page, from its name on."""
    with pytest.raises((BuildError, InputError)) as stopped:
        Pages(docs).page(page)
    return str(stopped.value).removeprefix(f"{docs.parent}/").removeprefix(f"docs/{page}")


@pytest.mark.parametrize(("page", "old", "new", "expected"), PLANTED, ids=lambda text: text[:40])
def test_a_planted_fault_is_one_line_with_its_place(docs: Path, page: str, old: str, new: str, expected: str) -> None:
    path = docs / page
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1) if old else text + new, "utf-8")
    found = told(docs, page)
    assert found.startswith(expected)
    assert "\n" not in found


@pytest.mark.parametrize(
    ("old", "new"), [('peak("job")', 'peak("jub")'), ("peak", "peek"), ('("job") ]]:', '("job" ]]:')]
)
def test_a_fault_of_a_translated_page_is_one_line_for_both(docs: Path, old: str, new: str) -> None:
    """The whole guide is read first: a call misspelt in the original is no second fault in each translation."""
    path = docs / INDEX
    path.write_text(path.read_text("utf-8").replace(old, new, 1), "utf-8")
    with pytest.raises(BuildError) as stopped:
        Pages(docs).check()
    assert "\n" not in str(stopped.value)
    assert "line 8 of the page that it translates" in str(stopped.value) or f"{INDEX}:8: " in str(stopped.value)


def test_a_page_that_is_no_text_or_not_there_is_one_line(docs: Path) -> None:
    path = docs / INDEX
    path.write_bytes(path.read_bytes().replace(b"It needs", b"It \xff needs"))
    assert told(docs, INDEX) == ":8: not UTF-8: byte 0xff"
    os.remove(path)
    assert told(docs, CHINESE) == ": a translation of docs/index.md, which is not there"


def test_a_page_with_a_control_character_is_refused_at_its_line(docs: Path) -> None:
    page = docs / INDEX
    page.write_bytes(page.read_bytes() + b"\n\0\n")
    line = page.read_bytes().count(b"\n")
    assert told(docs, INDEX) == rf":{line}: given the control character '\x00', allowed: text"


@pytest.mark.parametrize(
    ("left", "words"),
    [
        ("A\u200bb.", r"given the control character '\u200b', allowed: text"),
        ("A\u202eb.", r"given the control character '\u202e', allowed: text"),
        ("<<<<<<< HEAD", "given '<<<<<<< HEAD', a conflict of a merge, allowed: text"),
    ],
)
def test_what_is_not_seen_and_what_a_merge_left_are_refused(docs: Path, left: str, words: str) -> None:
    page = docs / INDEX
    page.write_text(f"{page.read_text('utf-8')}\n{left}\n", "utf-8")
    assert told(docs, INDEX) == f":12: {words}"


def test_lines_end_as_any_editor_ends_them(docs: Path) -> None:
    path = docs / INDEX
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n[[ peek ]]")
    assert told(docs, INDEX) == ":12: 'peek' is undefined"


def test_yaml_that_leads_back_to_itself_is_one_line(docs: Path) -> None:
    path = docs / INDEX
    text = path.read_text("utf-8")
    path.write_text(text.replace("  job: {", "  job: &job {<<: *job, roles: *job, "), "utf-8")
    assert told(docs, INDEX).startswith(":")
    bombs = "".join(f"  b{n}: &b{n} {{x: *b{n - 1}, y: *b{n - 1}}}\n" for n in range(1, 60))
    path.write_text(text.replace("scenarios:\n", f"labels:\n  b0: &b0 {{x: y}}\n{bombs}scenarios:\n"), "utf-8")
    assert told(docs, INDEX) == ": given more than 20,000 values, allowed: no more"


TERM = "- {term: one, tip: A thing., see: index.md}\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (TERM.replace("tip", "tipp"), "glossary.yaml: unknown field '[0].tipp'; did you mean '[0].tip'?"),
        (TERM + TERM, "glossary.yaml: 'one' stands for 'one' and for 'one'"),
        (
            TERM.replace("index.md", "javascript:x"),
            "glossary.yaml: [0].see: given 'javascript:x', allowed: text such as",
        ),
        (TERM.replace("one", "[one"), "glossary.yaml:1: not YAML: "),
        ("one: two\n", "glossary.yaml: given a mapping of fields, allowed: a list"),
    ],
)
def test_a_fault_of_the_glossary_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "glossary.yaml"
    file.write_text(text, "utf-8")
    with pytest.raises(InputError) as found:
        glossary.terms(file)
    assert line in str(found.value)


def test_a_fault_of_a_release_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changelog, "FOLDER", tmp_path)
    for text, line in {
        '{"version": "1<b>", "date": "2026-01-01", "since": null, "changes": []}': "1.2.json: version: given '1<b>'",
        '{"version": "1.2", "date": "2026-01-01", "since": null, "changes": [[1]]}': "1.2.json: changes[0]: given a ",
        '{"version": "1.2",': "1.2.json:1: not JSON: ",
    }.items():
        (tmp_path / "1.2.json").write_text(text, "utf-8")
        changelog.releases.cache_clear()
        with pytest.raises(InputError) as found:
            changelog.releases()
        assert line in str(found.value)
    changelog.releases.cache_clear()
