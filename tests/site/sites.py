"""Copies of the project for tests, and the command that builds them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
IGNORED = shutil.ignore_patterns(".git", ".venv", "site", "build", ".*_cache", "__pycache__", ".hypothesis")
# What the pages written by hand name; the small project has nothing else.
SMALL_GPUS = {"rtx4090", "a100-80-sxm", "a800-80", "h100-sxm"}
SMALL_MODELS = {"llama-3-8b", "llama-2-7b", "llama-2-70b", "llama-3.2-1b"}
NEW_GPU = "newcard"


def command(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m calc.site …` in a copy of the project."""
    return subprocess.run(
        [sys.executable, "-m", "calc.site", *arguments], cwd=project, capture_output=True, text=True, check=False
    )


def copy(target: Path) -> Path:
    """A copy of the project without what was built in it."""
    shutil.copytree(
        ROOT, target, ignore=lambda d, names: IGNORED(d, names) - ({"site"} if d.endswith("calc") else set())
    )
    return target


def add_gpu(project: Path) -> None:
    """A new card is one new file."""
    text = (project / "hardware/gpus/rtx4090.yaml").read_text("utf-8")
    text = text.replace("id: rtx4090", f"id: {NEW_GPU}").replace("name: GeForce RTX 4090", "name: New Card")
    (project / f"hardware/gpus/{NEW_GPU}.yaml").write_text(text, "utf-8")
