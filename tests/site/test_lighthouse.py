"""Lighthouse's marks for three pages, offline: a phone's processor on a slow connection, as Lighthouse has it."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from browsing import CHROMIUM
from playwright.sync_api import sync_playwright
from sites import ROOT

GOAL = 95
CATEGORIES = ("performance", "accessibility", "best-practices", "seo")
TRIES = 3  # other work on the machine can only lower the mark for performance


def chromium() -> str:
    """The browser that Lighthouse starts."""
    if CHROMIUM:
        return CHROMIUM
    with sync_playwright() as playwright:
        return playwright.chromium.executable_path


def marks(address: str) -> tuple[dict[str, float], list[str]]:
    """The mark of each category, 0 to 100, and the audits that lost points."""
    run = subprocess.run(
        [
            Path(sys.executable).parent / "node",
            ROOT / "node_modules/lighthouse/cli/index.js",
            address,
            "--quiet",
            "--output=json",
            f"--only-categories={','.join(CATEGORIES)}",
            "--chrome-flags=--headless=new --no-sandbox --disable-gpu",
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"CHROME_PATH": chromium()},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    report = json.loads(run.stdout)
    lost = [
        f"{audit['id']}: {audit['score']} {audit.get('displayValue', '')}"
        for audit in report["audits"].values()
        if audit["score"] is not None and audit["score"] < 0.9
    ]
    return {name: 100 * report["categories"][name]["score"] for name in CATEGORIES}, lost


@pytest.mark.parametrize("page", ["index.html", "hardware/gpus/rtx4090.html", "case-studies/ppo-llama-3-8b-4xa40.html"])
def test_lighthouse_marks(origin: str, project: Path, page: str) -> None:
    best, lost = dict.fromkeys(CATEGORIES, 0.0), []
    for _ in range(TRIES):
        with (project / "lighthouse.lock").open("w") as lock:  # one at a time
            fcntl.flock(lock, fcntl.LOCK_EX)
            found, lost = marks(f"{origin}/{page}")
        best = {name: max(best[name], found[name]) for name in CATEGORIES}
        if min(best.values()) >= GOAL:
            return
    raise AssertionError(f"{page}: {best}; {'; '.join(lost)}")
