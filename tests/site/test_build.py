"""The built site: every page there, every derivation at its anchor; and a failed build that leaves the old one.

That there is no broken link and nothing leaked is asked by the build of the site itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sites import NEW_GPU, ROOT, command

from calc.answers import answers
from calc.site.build import checks
from calc.site.tables import charts


def digest(folder: Path) -> str:
    """One hash of every file's path and bytes."""
    whole = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        whole.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return whole.hexdigest()


def test_every_gpu_and_model_has_its_page(project: Path, site: Path) -> None:
    catalog = json.loads((site / "data/catalog.json").read_text("utf-8"))
    for gpu in catalog["gpus"]:
        assert gpu["name"] in (site / f"hardware/gpus/{gpu['id']}.html").read_text("utf-8")
    for model in catalog["models"]:
        assert f"{model['parameters']:,}" in (site / f"models/{model['id']}.html").read_text("utf-8")
    assert len(catalog["gpus"]) == len(list((project / "hardware/gpus").glob("*.yaml"))) > 10


def test_a_gpu_added_to_the_catalog_is_in_every_table_without_further_edit(site: Path) -> None:
    assert "New Card" in (site / f"hardware/gpus/{NEW_GPU}.html").read_text("utf-8")
    assert "New Card," in (site / "data/tables/gpus-overview.csv").read_text("utf-8")
    assert f"{NEW_GPU}_verdict" in (site / "data/tables/fits-sft-full-8.csv").read_text("utf-8")
    assert f'href="hardware/gpus/{NEW_GPU}.html"' in (site / "index.html").read_text("utf-8") or "New Card" in (
        site / "index.html"
    ).read_text("utf-8")


def test_every_page_has_a_description_and_every_table_its_versions(site: Path) -> None:
    versions = json.loads((site / "data/datapackage.json").read_text("utf-8"))
    for path in site.rglob("*.html"):
        html = path.read_text("utf-8")
        if path.name != "404.html":
            assert re.search(r'<meta name="description" content="[^"]{20,}"', html), path
        figures = html.count('<figure class="computed"')
        assert html.count(f" <code>{versions['version']}</code>") >= figures, path


def test_data_package_has_the_hash_of_each_file(site: Path) -> None:
    package = json.loads((site / "data/datapackage.json").read_text("utf-8"))
    named = {r["path"] for r in package["resources"]}
    assert {p.name for p in (site / "data/tables").glob("*.csv")} == {Path(n).name for n in named if n.endswith(".csv")}
    for resource in package["resources"]:
        raw = (site / "data" / resource["path"]).read_bytes()
        assert resource["hash"] == "sha256:" + hashlib.sha256(raw).hexdigest()
        assert resource["bytes"] == len(raw)


@cache
def anchors(site: Path) -> dict[str, set[str]]:
    """The anchors of each method page."""
    return {page.stem: set(checks.Page(page.read_text("utf-8")).ids) for page in (site / "method").glob("*.html")}


def test_every_derivation_that_the_code_names_has_its_anchor(site: Path) -> None:
    found = anchors(site)
    sources = set()
    for path in (ROOT / "calc").rglob("*.py"):
        if "site" not in path.parts:
            sources |= set(re.findall(rf'"((?:{"|".join(found)})#[\w-]+)"', path.read_text("utf-8")))
    assert len(sources) > 20
    assert {s for s in sources if s.split("#")[1] not in found[s.split("#")[0]]} == set()


JOBS = [
    {"framework": "torch", "task": "ppo", "sharding": "fsdp2"},
    {"framework": "torch", "task": "grpo", "gpus": 1, "optimizer": "adamw-8bit"},
    {"framework": "torch", "task": "reinforce++", "sharding": "zero3", "offload.optimizer": True},
    {"framework": "openrlhf==0.3.0", "task": "ppo", "rollout.engine": "hf"},
    {
        "framework": "openrlhf",
        "task": "ppo",
        "sharding": "zero3",
        "rollout.sleep": True,
        "rollout.gpu_memory_utilization": 0.4,
    },
    {
        "framework": "openrlhf",
        "task": "grpo",
        "placement": "separate",
        "roles.actor.gpus": 4,
        "rollout.gpus": 4,
        "roles.reward": "none",
        "offload.optimizer": True,
    },
    {"framework": "verl", "task": "grpo", "sharding": "fsdp2", "roles.reference": {}},
    {"framework": "verl==0.3.0", "task": "ppo", "offload.optimizer": True, "offload.parameters": True},
    {"framework": "verl==tinyzero", "task": "grpo"},
    {"framework": "verl", "task": "grpo", "method": "lora"},
    {"framework": "trl", "task": "grpo"},
    {"framework": "trl", "task": "grpo", "rollout.engine": "vllm", "method": "lora"},
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: "-".join(map(str, list(job.values())[:2])))
def test_every_line_of_an_rl_job_leads_to_an_anchor_and_has_a_colour(site: Path, job: dict[str, Any]) -> None:
    found = anchors(site)
    answer = answers.ask({"model": "llama-3-8b", "gpu": "a100-80-sxm", "gpus": 8, **job})
    moments = [p.moment for g in answer.estimate.groups for p in g.phases]
    moments += [p.moment for p in answer.estimate.host_phases] + [m for _, m in answer.loading()]
    named = {(line.source, line.component) for moment in moments for line in moment.lines}
    for source, _ in named:
        page, _, anchor = source.partition("#")
        assert anchor in {"", *found[page]}, source
    assert {component for _, component in named} <= charts.COMPONENTS.keys()


# By what finds them: each is one line, and nothing else is said.
DATA = {("hardware/gpus/rtx4090.yaml", "marketing_gb", "marketting_gb"): "hardware/gpus/rtx4090.yaml: unknown field"}
IMPOSSIBLE = {
    ("hardware/gpus/rtx4090.yaml", "value: 1008\n", "value: 1.008\n"): "rtx4090.yaml: bandwidth_gbs: given 1.008",
}  # fmt: skip
MACRO = {("docs/index.md", "It needs", "[[ no_such_macro ]]"): "docs/index.md:8: 'no_such_macro' is undefined"}
LINKS = {
    ("docs/index.md", "\nIt needs", "\n[a](nowhere.md)\n\nIt needs"): "'index.md' contains a link 'nowhere.md', but",
    ("docs/index.md", "\nIt needs", "\n![a](gone.png)\n\nIt needs"): "'index.md' contains a link 'gone.png', but",
    ("docs/index.md", "\nIt needs", "\n[a](#gone)\n\nIt needs"): "'index.md' contains a link '#gone', but there is no",
    ("docs/index.md", "index.md#cards", "index.md#gone"): "'index.md' contains a link 'hardware/index.md#gone', but",
    ("docs/models/index.md", "# Models", "# Models\n\n[a](/x.md)"): "'models/index.md' contains an absolute link",
    ("docs/models/index.md", "# Models", "# Models\n\n[a](b)"): "'models/index.md' contains an unrecognized relative",
    ("mkdocs.yml", "nav:\n", "nav:\n  - left.md\n"): "'left.md' is included in the 'nav' configuration, which is not",
    ("mkdocs.yml", "redirect_maps: {}", "redirect_maps: {old.md: new.md}"): "Redirect target 'new.md' does not exist",
    ("docs/omitted.md", "", "---\ndescription: In no menu.\n---\n# Omitted\n"): "omitted.md",
}
PARTS = {
    (
        "docs/index.md",
        "\nIt needs",
        "\n<a href='javascript:x'>x</a>\n\nIt needs",
    ): "docs/index.md:8: links to javascript",
    ("docs/index.md", "\nIt needs", "\n<img src='gone.png'>\n\nIt needs"): "docs/index.md:10: loads gone.png, which is",
    ("docs/index.md", "\nIt needs", "\n<embed src='//x.org/y'>\n\nIt needs"): "docs/index.md:12: loads //x",
    ("docs/assets/extra.css", "", "@import 'https://x.org/y.css';\n"): "docs/assets/extra.css:",
    ("mkdocs.yml", "assets/scroll.js", "assets/scrol.js"): "loads assets/scrol.js, which is not there (9",
    ("overrides/main.html", "{{ super() }}", "{{ super() }}<base href='x/'>"): "has a <base>, which moves",
}


def test_a_fault_is_one_line_and_leaves_the_old_site(tiny: Path) -> None:
    assert "lastmod" not in (tiny / "site/sitemap.xml").read_text("utf-8")  # no commit, no date: not the clock's
    before = digest(tiny / "site")
    for faults in (DATA, IMPOSSIBLE, MACRO, LINKS, PARTS):
        originals: dict[Path, str] = {}
        for name, old, new in faults:
            path = tiny / name
            text = path.read_text("utf-8") if path.exists() else ""
            originals.setdefault(path, text)
            assert old in text
            path.write_text(text.replace(old, new, 1) if old else text + new, "utf-8")
        run = command(tiny, "build", "site")
        for path, text in originals.items():
            path.write_text(text, "utf-8") if text else path.unlink()
        assert (run.returncode, run.stdout) == (2, "")
        lines = run.stderr.splitlines()
        assert [expected for expected in faults.values() if sum(expected in line for line in lines) != 1] == [], lines
        assert len(lines) == len(faults), lines
        assert digest(tiny / "site") == before
        assert not list(tiny.glob(".site-*"))


def test_a_gpu_that_is_gone_loses_its_page_and_a_published_table_that_is_gone_fails_the_build(tiny: Path) -> None:
    project, before = tiny, digest(tiny / "site")
    page, table = project / "docs/hardware/gpus/a100-80-sxm.md", project / "build/data/tables/gpu-a100-80-sxm.csv"
    assert page.exists() and table.exists()
    files = [project / "hardware/gpus/a100-80-sxm.yaml", project / "hardware/nodes/hgx-a100.yaml"]  # its only node
    gone = {path: path.read_bytes() for path in files}
    for path in files:
        path.unlink()
    run = command(project, "write")
    assert run.returncode == 0, run.stderr
    assert not page.exists() and not table.exists()
    assert command(project, "ids").returncode == 0
    for path, content in gone.items():
        path.write_bytes(content)
    listed = project / "calc/site/build/ids.txt"
    assert "job-phases" in listed.read_text("utf-8").split()
    page = project / "docs/index.md"
    page.write_text(page.read_text("utf-8").replace('id="job-phases"', 'id="job-by-phase"'), "utf-8")
    translated = project / "docs/index.zh.md"
    translated.write_text(translated.read_text("utf-8").replace('id="job-phases"', 'id="job-by-phase"'), "utf-8")
    run = command(project, "build", "site")
    assert (run.returncode, digest(project / "site")) == (2, before)
    assert "ids.txt: table 'job-phases' was published and is gone: an id never changes" in run.stderr
