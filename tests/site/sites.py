"""Copies of the project for tests, and the command that builds them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
IGNORED = shutil.ignore_patterns(
    ".git", ".venv", "node_modules", "site", ".site-*", "build", ".*_cache", ".hypothesis",
    "pytest-cache-files-*",  # pytest's cache for a moment, where it makes its first one
)  # fmt: skip
NEW_GPU = "newcard"
SIZES = """sft: [qwen2.5-0.5b, qwen2.5-1.5b]
rm: [qwen2.5-1.5b]
dpo: [qwen2.5-1.5b]
ppo: [qwen2.5-1.5b]
grpo: [qwen2.5-1.5b]
largest: 1.6
"""
# Rows of recipes for models above 8 billion parameters, half of all recipes' time; a test names the one that is left.
LARGER = re.compile(r"(?<!budget-8-14b: {<<: \*budget), model: (?:qwen2\.5-(?:14|32)b|llama-3\.1-70b)\b")


def command(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m calc.site …` in a copy of the project."""
    return subprocess.run(
        [sys.executable, "-m", "calc.site", *arguments], cwd=project, capture_output=True, text=True, check=False
    )


def copy(target: Path) -> Path:
    """A copy of the project without what was built in it, but for the answers that are kept by content, and for what
    Python has compiled, which it knows again by the time of a file's last change.
    """

    def ignored(folder: str, names: list[str]) -> set[str]:
        here = IGNORED(folder, names)
        return here if folder == str(ROOT) else here - {"site", "build"}  # calc has folders of those names, too

    shutil.copytree(ROOT, target, ignore=ignored)
    kept = ROOT / "build" / "kept"
    kept.mkdir(parents=True, exist_ok=True)
    (target / "build").mkdir()
    (target / "build" / "kept").symlink_to(kept)
    (target / "node_modules").symlink_to(ROOT / "node_modules")
    (target / "calc/site/build/ids.txt").unlink()  # these tests publish fewer tables
    drawing = target / "calc/site/formats/drawing.py"
    # a picture with fewer pixels takes less time
    drawing.write_text(drawing.read_text("utf-8").replace("ZOOM = 1.5", "ZOOM = 1"), "utf-8")
    return target


def named(folder: str) -> set[str]:
    """The files of a catalog folder that the code, other calculators' jobs or a page by hand name, by id."""
    pages = [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "measurements").glob("peers/*.yaml"),
        *(ROOT / "measurements").glob("simumax/*.yaml"),
        ROOT / "calc/recommend/published.py",
        *([ROOT / "docs/sizes.yaml"] if folder == "models" else []),
    ]
    texts = [text for text in (p.read_text("utf-8") for p in pages) if "generated: true" not in text]
    words = {word for text in texts for word in re.findall(r"[\w.-]*\w", text)}
    return {path.stem for path in (ROOT / folder).glob("*.yaml")} & words


def sample(target: Path) -> Path:
    """A copy with those GPUs and models alone that are named, and with their measurements: all pages in half the time.

    Pages of GPUs and models are all made in one way, and `make site` checks each of them. What to run is asked of few
    models: `tests/recommend` and `test_advice.py` hold answers, the pages here their tables.
    """
    made = copy(target)
    gpus, models = named("hardware/gpus"), named("models")
    joined = {path.stem for path in (made / "hardware/nodes").glob("*.yaml") if _joins(path, gpus)}
    for folder, kept in (("hardware/gpus", gpus), ("hardware/nodes", joined), ("models", models)):
        for path in (made / folder).glob("*.yaml"):
            if path.stem not in kept:
                path.unlink()
    (made / "docs/sizes.yaml").write_text(SIZES, "utf-8")
    for page in (made / "docs/recipes").glob("*.md"):  # several rows for the price of one
        text = re.sub(r"(experts-(?:235|671)b: ){.*}", r"\1*experts", page.read_text("utf-8"))
        page.write_text(LARGER.sub("", text), "utf-8")
    shutil.rmtree(made / "measurements/suites")
    for path in (made / "measurements").rglob("*.jsonl"):
        records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        if path.parent.name == "exhausted":  # all stay, as the odds rest on them
            records = [r | {"gpu": r["gpu"] if r["gpu"] in gpus else None} for r in records]
        path.write_text("".join(f"{json.dumps(r)}\n" for r in records if _about(r, gpus, models)), "utf-8")
    return made


def _joins(path: Path, gpus: set[str]) -> bool:
    """Leaves a node the cards that are kept; whether there are any."""
    text = path.read_text("utf-8")
    kept = [card for card in yaml.safe_load(text)["gpu_ids"] if card in gpus]
    path.write_text(re.sub(r"gpu_ids:.*?(?=^gpus:)", f"gpu_ids: {kept}\n", text, flags=re.S | re.M), "utf-8")
    return bool(kept)


def _about(record: dict[str, Any], gpus: set[str], models: set[str]) -> bool:
    """True if a record's job, where it has one, has only these."""
    job = record.get("scenario") or record
    roles = [role for role in job.get("roles", {}).values() if isinstance(role, dict)]
    return job["gpu"] in {None, *gpus} and {each["model"] for each in (job, *roles) if "model" in each} <= models


def add_gpu(project: Path) -> None:
    """A new card is one new file."""
    text = (project / "hardware/gpus/rtx4090.yaml").read_text("utf-8")
    text = text.replace("id: rtx4090", f"id: {NEW_GPU}").replace("name: GeForce RTX 4090", "name: New Card")
    (project / f"hardware/gpus/{NEW_GPU}.yaml").write_text(text, "utf-8")


def build(target: Path) -> subprocess.CompletedProcess[str]:
    """Builds the site of a sample with one GPU more, in `site/`, whatever a killed run has left at `target`."""
    shutil.rmtree(target, ignore_errors=True)
    add_gpu(sample(target))
    return command(target, "build", "site")


def tiny(target: Path) -> Path:
    """A project with two cards, one model and a few pages by hand, one of them translated: it builds in seconds.

    Its calculator answers nothing: to load calc takes as long as all else, and each change of the catalog asks for it.
    """
    copy(target)
    for folder, kept in (
        ("hardware/gpus", {"rtx4090", "a100-80-sxm"}),
        ("hardware/nodes", {"hgx-a100"}),
        ("models", {"qwen2.5-0.5b"}),
    ):
        for path in (target / folder).glob("*.yaml"):
            if path.stem not in kept:
                path.unlink()
    for name in ("peers", "simumax", "suites"):
        shutil.rmtree(target / "measurements" / name)
    for path in (target / "measurements").rglob("*.jsonl"):
        path.unlink()
    for path in (target / "docs").iterdir():
        if path.name not in ("assets", "sizes.yaml") and not path.match("glossary*.yaml"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, text in TINY.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(text, "utf-8")
    (target / "calc/site/calculator/snapshot.mjs").write_text(NO_MEMORY, "utf-8")
    config = (target / "mkdocs.yml").read_text("utf-8")
    pages = "".join(f"  - {name.removeprefix('docs/')}\n" for name in TINY if ".zh." not in name)
    config = re.sub(r"^nav:\n(?:  .*\n)+", f"nav:\n{pages}", config, flags=re.M)
    config = re.sub(r"^(          nav:\n            - .*\n)(?:            .*\n)*", r"\1", config, flags=re.M)
    (target / "mkdocs.yml").write_text(config, "utf-8")
    return target


NO_MEMORY = 'import { writeFileSync } from "node:fs";\nwriteFileSync(process.argv[5], "");\n'
TINY = {
    "docs/index.md": """---
description: A page with a job, a number and a table.
scenarios:
  job: {model: qwen2.5-0.5b, task: sft, gpu: rtx4090, framework: trl}
---
# A job {#calculator}

It needs [[ peak("job") ]]: [[ verdict("job") ]]. See [the cards](hardware/index.md#cards).

[[ phases_table("job", id="job-phases") ]]
""",
    "docs/index.zh.md": """---
description: 一个任务、一个数字和一张表，都在构建网站时由同一份代码算出来。
---
# 任务

需要 [[ peak("job") ]]：[[ verdict("job") ]]。见 [[ english("hardware/index.md#cards", "显卡") ]]。

[[ phases_table("job", id="job-phases", caption="按阶段的显存") ]]
""",
    "docs/compare.md": "---\ndescription: Jobs side by side.\n---\n\n# Compare\n",  # to which pages of cards lead
    "docs/hardware/index.md": """---
description: All of the cards.
---
# Cards {#cards}

[[ gpus_table() ]]

[[ node_sources_table() ]]
""",
    "docs/models/index.md": "---\ndescription: All of the models.\n---\n# Models\n\n[[ models_table() ]]\n",
    "docs/changelog.md": "---\ndescription: What moved, and when.\n---\n# Changelog\n\n[[ changelog() ]]\n",
    "docs/validation.md": "---\ndescription: What the verdicts rest on.\n---\n# Validation\n\n[[ odds_tables() ]]\n",
}

if __name__ == "__main__":
    build(Path(sys.argv[1]))
