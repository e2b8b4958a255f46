"""Whatever is in a name, a source or a quotation stays text: no element, attribute, link or macro comes from data."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from sites import ROOT, command

from calc.site.text.inline import coded, inline, within

EVIL = (
    """A|B <script>planted(1)</script> "onplanted='1' <planted:y> <!-- planted --> &planted; #planted""" + "\n"
    """*planted* **planted** _planted_ `planted` ![planted](planted:x) [[planted]] [[config]] {: .planted } \\*p #"""
)
SAID = " ".join(EVIL.split())
LINK = """https://planted.dev/"onplanted="1"><planted>*a*_b_`c`[d](planted:x)z"""
RECORD = {
    "id": "published/planted", "source": f"{EVIL} seen", "url": LINK, "quote": f"{EVIL} 16.2 GiB", "note": EVIL,
    "group": EVIL, "class": "published", "metric": "verdict", "measured_bytes": None, "verdict": "fits",
    "confidence": "medium", "explanation": EVIL,
    "scenario": {"model": "qwen2.5-0.5b", "task": "grpo", "framework": "trl", "gpu": "rtx4090", "gpus": 1},
}  # fmt: skip
MACROS = """
[[ gpu_name("rtx4090") ]]

[[ calculator("first") ]]

[[ recipe_table("first", id="recipe") ]]

[[ commands(["first"]) ]]

[[ reports_table() ]]

[[ matrix("sft", "lora", 1) ]]

[[ operations_table("qwen2.5-0.5b") ]]

[[ curve("job", id="curve", caption="Memory", values=[512, 1024]) ]]

[[ published_data() ]]
"""


class Texts(HTMLParser):
    """The texts of a page, each with the elements around it; and what of its markup has to do with `planted`."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.around: list[str] = []
        self.found: list[tuple[tuple[str, ...], str]] = []
        self.markup: list[tuple[str, str, str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.markup += [(tag, name, value or "") for name, value in attrs if "planted" in f"{tag}{name}{value}"]
        if tag not in ("meta", "link", "input", "img", "br", "wbr", "hr", "path", "circle", "rect"):
            self.around.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while tag in self.around and self.around.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "planted" in data:
            self.found.append((tuple(self.around), " ".join(data.split())))

    def handle_comment(self, data: str) -> None:
        assert "planted" not in data

    def of(self, tag: str) -> Iterator[str]:
        return (text for around, text in self.found if around[-1] == tag)


def hostile(project: Path) -> None:
    """Changes the words of a small project's catalog, and what its pages show of it."""
    (project / "hardware/gpus/a100-80-sxm.yaml").unlink()
    (project / "hardware/nodes/hgx-a100.yaml").unlink()
    shutil.copy(ROOT / "hardware/nodes/consumer-pcie.yaml", project / "hardware/nodes")
    for path in [*project.glob("hardware/*/*.yaml"), project / "models/qwen2.5-0.5b.yaml"]:
        data = yaml.safe_load(path.read_text("utf-8"))
        for field in (each for each in data.values() if isinstance(each, dict) and "source" in each):
            field |= {"source": f"{EVIL} {LINK}", "note": f"{EVIL} {LINK}"}
        data["name"] = f"{EVIL}{path.stem}"
        if path.parent.name == "models":
            data |= {"source": LINK, "licence": EVIL, "parameters_source": f"{EVIL} counted"}
        elif path.parent.name == "nodes":
            data["gpu_ids"] = ["rtx4090"]
        path.write_text(yaml.safe_dump(data), "utf-8")
    (project / "measurements/published_rl.jsonl").write_text(f"{json.dumps(RECORD)}\n", "utf-8")
    messages = (ROOT / "measurements/exhausted/messages.jsonl").read_text("utf-8").splitlines(keepends=True)
    lost = "".join(line for line in messages if '"gpu": null' in line)
    (project / "measurements/exhausted/messages.jsonl").write_text(lost, "utf-8")
    page = project / "docs/index.md"
    text = page.read_text("utf-8").replace("# A job {#calculator}", "# A job")
    job = "{model: qwen2.5-0.5b, task: sft, gpu: rtx4090, gpus: 1}"
    page.write_text(text.replace("scenarios:", f"recipes:\n  first: {job}\nscenarios:") + MACROS, "utf-8")
    translated = project / "docs/index.zh.md"
    translated.write_text(translated.read_text("utf-8") + MACROS, "utf-8")
    (project / "docs/recipes").mkdir()
    (project / "docs/recipes/sft.md").write_text("---\ndescription: What to run.\n---\n# Recipes\n", "utf-8")
    config = project / "mkdocs.yml"
    config.write_text(config.read_text("utf-8").replace("nav:\n", "nav:\n  - recipes/sft.md\n", 1), "utf-8")


def test_no_part_of_a_page_comes_from_data(tiny: Path) -> None:
    project = tiny
    hostile(project)
    build = project / "calc/site/build/build.py"  # without the rules that refuse such names before anything is built
    build.write_text(build.read_text("utf-8").replace("    check()\n", ""), "utf-8")
    run = command(project, "build", "site")
    assert run.returncode == 0, run.stderr[-2000:]
    site = project / "site"
    pages = {path.relative_to(site).as_posix(): Texts(path.read_text("utf-8")) for path in site.rglob("*.html")}

    for name, page in pages.items():
        for tag, attribute, value in page.markup:
            assert "planted" not in f"{tag}{attribute}", (name, tag, attribute)
            assert attribute in ("href", "id", "title", "aria-label", "content", "value", "data-family"), (
                name,
                tag,
                attribute,
            )
            assert value.startswith(("https://planted.dev/", "#")) or attribute != "href", (name, value)
        assert not [around for around, _ in page.found if {"em", "strong", "style", "cite"} & {*around}], name
        for text in page.of("script"):
            assert json.loads(text)["@context"] == "https://schema.org", name  # nothing else of a script knows a name

    card, model = pages["hardware/gpus/rtx4090.html"], pages["models/qwen2.5-0.5b.html"]
    for page, name in ((card, f"{SAID}rtx4090"), (model, f"{SAID}qwen2.5-0.5b")):
        assert [*page.of("h1")] == [name]
        assert [*page.of("title")] == [f"{name} - Headroom"]
        assert next(page.of("p")).endswith(name)  # the way to the page
    described = [value for tag, attribute, value in card.markup if (tag, attribute) == ("meta", "content")]
    assert f"What fits on the {SAID}rtx4090: usable memory" in described[0]
    assert LINK in model.of("a")
    assert f"{SAID}consumer-pcie" in card.of("th")
    assert SAID in pages["models/index.html"].of("td")
    assert f"{SAID} 16.2 GiB" in pages["index.html"].of("q")
    assert {f"{SAID}rtx4090", f"{SAID}qwen2.5-0.5b"} <= {*pages["index.html"].of("option")}
    exported = (site / "data/tables/gpus-overview.md").read_text("utf-8").splitlines()
    assert re.split(r"(?<!\\)\|", exported[4])[1].replace("\\", "").strip() == f"{SAID}rtx4090".replace("\\", "")


@pytest.mark.parametrize("words", ["GeForce RTX 4090", "A100-SXM4-80GB", "Llama 3.1 (8B), v0.3/4 + x: 50 %"])
def test_a_name_without_marks_is_written_as_it_is(words: str) -> None:
    assert inline(words) == words


def test_marks_are_written_as_references_and_html_stays_html() -> None:
    assert inline("a\n\n# *b* <c> `d`") == "a &#35; &#42;b&#42; &#60;c&#62; &#96;d&#96;"
    assert coded("run `a_b` <now>") == "run <code>a&#95;b</code> &#60;now&#62;"
    assert within('<a href="x_y&amp;#z">*</a>') == '<a href="x&#95;y&amp;#z">&#42;</a>'
