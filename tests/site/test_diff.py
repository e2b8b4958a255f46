"""`make diff` prints each published number and verdict that changes between a revision and the working tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

from sites import command

from calc.site.build.diff import compare


def test_compare_names_what_is_new_gone_and_different() -> None:
    before = {"table a": {"x · peak": 1.5, "y · peak": 2.0}, "table b": {"z": 1}}
    after = {"table a": {"x · peak": 1.6, "w · peak": 3.0}, "table c": {"z": 1}}
    assert [str(change) for change in compare(before, after)] == [
        "table a · x · peak: 1.5 → 1.6",
        "table a · y · peak: 2.0 → gone",
        "table a · w · peak: new, 3.0",
        "table b: gone",
        "table c: new",
    ]


def test_a_card_with_less_memory_moves_its_numbers_and_no_other_card_s(tiny: Path) -> None:
    project = tiny
    for arguments in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "t"],
    ):
        subprocess.run(["git", *arguments], cwd=project, check=True)
    card = project / "hardware/gpus/rtx4090.yaml"
    card.write_text(card.read_text("utf-8").replace("value: 24207", "value: 4007"), "utf-8")
    run = command(project, "diff", "HEAD")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert "table gpus-overview · GeForce RTX 4090 · usable_gib: 23.64 → 3.91" in lines
    assert any(line.startswith("page index.html · verdict(job): fits → out of memory in") for line in lines)
    assert any("gpu-rtx4090-sft · Qwen2.5 0.5B · full_1_verdict: fits → oom" in line for line in lines)
    assert not any("gpu-a100-80-sxm" in line for line in lines)
    assert lines[-1].startswith(f"{len(lines) - 1} changes")


def test_an_unknown_revision_is_one_line(tiny: Path) -> None:
    project = tiny
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    run = command(project, "diff", "no-such-revision")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "REV: given 'no-such-revision', allowed: a revision of this repository\n"
