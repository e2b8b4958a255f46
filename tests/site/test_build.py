"""The built site: every page there, no broken link, nothing leaked; and a failed build that leaves the old one."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from sites import NEW_GPU, ROOT, add_gpu, command, tiny

from calc.site import answers, charts, checks


def digest(folder: Path) -> str:
    """One hash of every file's path and bytes."""
    whole = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        whole.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return whole.hexdigest()


def test_no_leak_no_broken_link_no_request_elsewhere(site: Path) -> None:
    assert list(checks.faults(site)) == []


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
        assert html.count(f"catalog <code>{versions['version']}</code>") >= figures, path


def test_data_package_has_the_hash_of_each_file(site: Path) -> None:
    package = json.loads((site / "data/datapackage.json").read_text("utf-8"))
    named = {r["path"] for r in package["resources"]}
    assert {p.name for p in (site / "data/tables").glob("*.csv")} == {Path(n).name for n in named if n.endswith(".csv")}
    for resource in package["resources"]:
        raw = (site / "data" / resource["path"]).read_bytes()
        assert resource["hash"] == "sha256:" + hashlib.sha256(raw).hexdigest()
        assert resource["bytes"] == len(raw)


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


PLANTED = {
    '<p>[[ peak("x") ]]</p>': "template code leaked",
    "<p>{{ x }}</p>": "template code leaked",
    '<a href="nowhere.html">x</a>': "which is not there",
    '<a href="#nothing">x</a>': "no such anchor",
    '<script src="https://example.org/x.js"></script>': "from elsewhere",
    '<img src="missing.png">': "which is not there",
    '<p id="a"></p><p id="a"></p>': "given twice",
}


@pytest.mark.parametrize("html", PLANTED)
def test_the_checker_finds_planted_faults(tmp_path: Path, html: str) -> None:
    (tmp_path / "page.html").write_text(f"<html><body>{html}</body></html>", "utf-8")
    (found,) = checks.faults(tmp_path)
    assert PLANTED[html] in found


def test_a_fault_in_data_or_a_page_is_one_line_and_leaves_the_old_site(tmp_path: Path) -> None:
    project = tiny(tmp_path / "project")
    assert command(project, "build", "site").returncode == 0
    before = digest(project / "site")
    gpu, page = project / "hardware/gpus/rtx4090.yaml", project / "docs/index.md"
    faults = [
        (gpu, gpu.read_text("utf-8").replace("marketing_gb", "marketting_gb"), "hardware/gpus/rtx4090.yaml"),
        (page, page.read_text("utf-8") + "\n[[ no_such_macro ]]\n", "docs/index.md: 'no_such_macro' is undefined"),
        (page, page.read_text("utf-8") + '\n[[ peak("no-such-job") ]]\n', "docs/index.md: no scenario 'no-such-job'"),
        (page, page.read_text("utf-8") + '\n[[ formula("calc.units:nothing") ]]\n', "docs/index.md: formula"),
        (page, page.read_text("utf-8") + "\n[[ unclosed\n", "docs/index.md"),
    ]
    for path, text, expected in faults:
        original = path.read_text("utf-8")
        path.write_text(text, "utf-8")
        run = command(project, "build", "site")
        path.write_text(original, "utf-8")
        assert (run.returncode, run.stdout) == (2, "")
        assert len(run.stderr.splitlines()) == 1
        assert expected in run.stderr
        assert digest(project / "site") == before


def test_a_broken_link_fails_the_build_and_leaves_the_old_site(tmp_path: Path) -> None:
    project = tiny(tmp_path / "project")
    (project / "site").mkdir()
    (project / "site" / "kept").write_text("as it was", "utf-8")
    page = project / "docs/index.md"
    page.write_text(page.read_text("utf-8") + "\n[a link](nowhere.md)\n", "utf-8")
    run = command(project, "build", "site")
    assert run.returncode == 2
    assert "nowhere.md" in run.stderr
    assert [p.name for p in (project / "site").iterdir()] == ["kept"]
    assert not list(project.glob(".site-*"))


def test_a_table_that_was_published_and_is_gone_fails_the_build(tmp_path: Path) -> None:
    project = tiny(tmp_path / "project")
    assert command(project, "write").returncode == 0
    assert command(project, "ids").returncode == 0
    listed = project / "calc/site/ids.txt"
    assert "job-phases" in listed.read_text("utf-8").split()
    page = project / "docs/index.md"
    page.write_text(page.read_text("utf-8").replace('id="job-phases"', 'id="job-by-phase"'), "utf-8")
    translated = project / "docs/index.zh.md"
    translated.write_text(translated.read_text("utf-8").replace('id="job-phases"', 'id="job-by-phase"'), "utf-8")
    run = command(project, "build", "site")
    assert (run.returncode, not (project / "site").exists()) == (2, True)
    assert "ids.txt: table 'job-phases' was published and is gone: an id never changes" in run.stderr


def test_a_gpu_that_is_gone_loses_its_page(tmp_path: Path) -> None:
    project = tiny(tmp_path / "project")
    add_gpu(project)
    assert command(project, "write").returncode == 0
    assert (project / f"docs/hardware/gpus/{NEW_GPU}.md").exists()
    (project / f"hardware/gpus/{NEW_GPU}.yaml").unlink()
    run = command(project, "write")
    assert run.returncode == 0, run.stderr
    assert not (project / f"docs/hardware/gpus/{NEW_GPU}.md").exists()
    assert not (project / f"build/data/tables/gpu-{NEW_GPU}.csv").exists()
