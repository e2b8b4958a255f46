"""Copies of the project for tests, and the command that builds them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
IGNORED = shutil.ignore_patterns(
    ".git", ".venv", "node_modules", "site", "build", ".*_cache", "__pycache__", ".hypothesis"
)
NEW_GPU = "newcard"


def command(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m calc.site …` in a copy of the project."""
    return subprocess.run(
        [sys.executable, "-m", "calc.site", *arguments], cwd=project, capture_output=True, text=True, check=False
    )


def copy(target: Path) -> Path:
    """A copy of the project without what was built in it, but for the answers that are kept by content."""
    shutil.copytree(
        ROOT, target, ignore=lambda d, names: IGNORED(d, names) - ({"site"} if d.endswith("calc") else set())
    )
    kept = ROOT / "build" / "advice"
    kept.mkdir(parents=True, exist_ok=True)
    (target / "build").mkdir()
    (target / "build" / "advice").symlink_to(kept)
    (target / "node_modules").symlink_to(ROOT / "node_modules")
    return target


def named(folder: str) -> set[str]:
    """The files of a catalog folder that the pages written by hand name, or the settings that verl publishes, by id."""
    pages = [p.read_text("utf-8") for p in (*(ROOT / "docs").rglob("*.md"), ROOT / "calc/recommend/published.py")]
    words = {word for page in pages if "generated: true" not in page for word in re.findall(r"[\w.-]*\w", page)}
    return {path.stem for path in (ROOT / folder).glob("*.yaml")} & words


def add_gpu(project: Path) -> None:
    """A new card is one new file."""
    text = (project / "hardware/gpus/rtx4090.yaml").read_text("utf-8")
    text = text.replace("id: rtx4090", f"id: {NEW_GPU}").replace("name: GeForce RTX 4090", "name: New Card")
    (project / f"hardware/gpus/{NEW_GPU}.yaml").write_text(text, "utf-8")
