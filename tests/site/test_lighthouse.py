"""Lighthouse's marks for three pages, offline: a phone's processor on a slow connection, as Lighthouse has it."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from browsing import CHROMIUM
from playwright.sync_api import sync_playwright
from sites import ROOT

GOAL = 95
CATEGORIES = ("performance", "accessibility", "best-practices", "seo")
TRIES = 6  # other work on the machine can only lower the mark for performance
PHONE = 4.0  # how many times as slow as this machine Lighthouse takes a phone to be
# By benchmark index, how many times as fast as that phone a machine is: Lighthouse's own calculator for its multiplier.
SPEEDS = ((150, 1.0), (800, 2.0), (1300, 3.0), (1533, PHONE))


def chromium() -> str:
    """The browser that Lighthouse starts."""
    if CHROMIUM:
        return CHROMIUM
    with sync_playwright() as playwright:
        return playwright.chromium.executable_path


def slowdown(index: float) -> float:
    """How many times as fast as the phone a machine is: less where other work keeps it busy."""
    if index <= SPEEDS[0][0]:
        return SPEEDS[0][1]
    for (low, slow), (high, fast) in pairwise(SPEEDS):
        if index <= high:
            return slow + (fast - slow) * (index - low) / (high - low)
    return PHONE


def marks(address: str, times: float) -> tuple[dict[str, float], list[str], float]:
    """The mark of each category, 0 to 100, the audits that lost points, and the machine's benchmark index meanwhile.

    `times`: how many times as slow as this machine the phone is.
    """
    run = subprocess.run(
        [
            Path(sys.executable).parent / "node",
            ROOT / "node_modules/lighthouse/cli/index.js",
            address,
            "--quiet",
            "--output=json",
            f"--only-categories={','.join(CATEGORIES)}",
            f"--throttling.cpuSlowdownMultiplier={times:.2f}",
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
    reached = {name: 100 * report["categories"][name]["score"] for name in CATEGORIES}
    return reached, lost, report["environment"]["benchmarkIndex"]


@pytest.mark.parametrize("page", ["index.html", "hardware/gpus/rtx4090.html", "case-studies/ppo-llama-3-8b-4xa40.html"])
def test_lighthouse_marks(origin: str, project: Path, page: str) -> None:
    best, lost, times = dict.fromkeys(CATEGORIES, 0.0), [], PHONE
    for _ in range(TRIES):
        with (project / "lighthouse.lock").open("w") as lock:  # one at a time
            fcntl.flock(lock, fcntl.LOCK_EX)
            found, lost, index = marks(f"{origin}/{page}", times)
        times = slowdown(index)
        best = {name: max(best[name], found[name]) for name in CATEGORIES}
        if min(best.values()) >= GOAL:
            return
    raise AssertionError(f"{page}: {best}, at {times:.1f} times; {'; '.join(lost)}")


def test_a_busy_machine_is_fewer_times_as_fast_as_the_phone() -> None:
    assert [slowdown(index) for index in (100, 150, 475, 1050, 1533, 2500)] == [1, 1, 1.5, 2.5, 4, 4]
