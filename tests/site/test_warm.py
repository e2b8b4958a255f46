"""What one build keeps for the next is found again only where nothing has changed, and never trusted when damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from calc.site import warm


def counted(root: Path, calls: list[int]) -> int:
    def compute() -> int:
        calls.append(1)
        return len(calls)

    return warm.kept("x", warm.PAGES, compute, root)


def test_a_change_of_code_data_prose_or_settings_computes_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    for name in ("calc/a.py", "models/a.yaml", "docs/a.md", "docs/data/a.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1", "utf-8")
    assert [counted(tmp_path, calls), counted(tmp_path, calls)] == [1, 1]
    for n, name in enumerate(("calc/a.py", "models/a.yaml", "docs/a.md"), 2):
        (tmp_path / name).write_text("2", "utf-8")
        assert counted(tmp_path, calls) == n
    (tmp_path / "docs/data/a.json").write_text("what a build writes", "utf-8")
    assert counted(tmp_path, calls) == 4
    monkeypatch.setenv("HEADROOM_SITE_URL", "https://example.org/")
    assert counted(tmp_path, calls) == 5


def test_a_damaged_file_is_as_good_as_none(tmp_path: Path) -> None:
    calls: list[int] = []
    counted(tmp_path, calls)
    file = tmp_path / "build/warm/x.pickle"
    file.write_bytes(file.read_bytes()[:-3])
    assert counted(tmp_path, calls) == 2
