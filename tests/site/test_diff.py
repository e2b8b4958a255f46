"""`make diff` prints each published number and verdict that changes between a revision and the working tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

from sites import command

from calc.site.diff import compare


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


def test_a_card_with_less_memory_moves_its_numbers_and_no_other_card_s(small: Path) -> None:
    for arguments in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "t"],
    ):
        subprocess.run(["git", *arguments], cwd=small, check=True)
    card = small / "hardware/gpus/rtx4090.yaml"
    card.write_text(card.read_text("utf-8").replace("value: 24207", "value: 20007"), "utf-8")
    run = command(small, "diff", "HEAD")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert "table gpus-overview · GeForce RTX 4090 · usable_gib: 23.64 → 19.54" in lines
    assert any(
        line.startswith("page case-studies/reward-model-6x4090.html · verdict(lora-zero2-4096)") for line in lines
    )
    assert any("fits-sft-lora-1 · Llama 3 8B · rtx4090_verdict" in line for line in lines)
    assert not any("h100_sxm" in line for line in lines)
    assert lines[-1].startswith(f"{len(lines) - 1} changes")


def test_an_unknown_revision_is_one_line(small: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=small, check=True)
    run = command(small, "diff", "no-such-revision")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "REV: given 'no-such-revision', allowed: a revision of this repository\n"
