"""A build takes the last one's place whole, and leaves nothing behind, however it ends."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from calc.site.build import build, swap
from calc.site.faults import BuildError


def sites(folder: Path) -> tuple[Path, Path]:
    """A site that stands, and a fresh one in a build's folder."""
    out, fresh = folder / "site", folder / ".site-now" / "fresh"
    for site in (out, fresh):
        site.mkdir(parents=True)
        (site / "index.html").write_text(site.name, "utf-8")
    return out, fresh


def test_at_every_moment_there_is_a_site(tmp_path: Path) -> None:
    out, fresh = sites(tmp_path)
    index, over, lost = out / "index.html", threading.Event(), []

    def watch() -> None:
        while not over.is_set():
            if not index.exists():
                lost.append(True)

    watching = threading.Thread(target=watch)
    watching.start()
    for _ in range(500):
        swap.place(fresh, out)
    over.set()
    watching.join()
    assert lost == []
    assert {(out / "index.html").read_text("utf-8"), (fresh / "index.html").read_text("utf-8")} == {"site", "fresh"}
    swap.place(fresh, tmp_path / "first")
    assert not fresh.exists()


class KilledError(Exception):
    pass


@pytest.mark.parametrize("kill", [False, True])
def test_where_folders_cannot_be_exchanged_a_killed_build_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill: bool
) -> None:
    monkeypatch.setattr(swap, "_exchanged", lambda one, other: False)
    out, fresh = sites(tmp_path)
    rename = Path.rename

    def once(path: Path, target: Path) -> Path:
        if kill and path == fresh:
            monkeypatch.setattr(Path, "exists", lambda path: True)  # the process is gone: nobody brings it back
            raise KilledError
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", once)
    if kill:
        with pytest.raises(KilledError):
            swap.place(fresh, out)
        monkeypatch.undo()
        assert not out.exists()
    else:
        swap.place(fresh, out)
    swap.sweep(tmp_path)
    assert (out / "index.html").read_text("utf-8") == ("site" if kill else "fresh")
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_a_build_that_stops_in_between_puts_the_old_site_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "_exchanged", lambda one, other: False)
    out, fresh = sites(tmp_path)
    rename = Path.rename

    def stop(path: Path, target: Path) -> Path:
        if path == fresh:
            raise KilledError
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(KilledError):
        swap.place(fresh, out)
    assert (out / "index.html").read_text("utf-8") == "site"


def test_a_second_build_waits_for_the_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    begun, done = threading.Event(), []

    def second() -> None:
        begun.set()
        with swap.alone(tmp_path) as locked:
            done.append(locked)

    with swap.alone(tmp_path, tmp_path) as locked:
        other = threading.Thread(target=second)
        other.start()
        begun.wait()
        other.join(0.2)
        assert (locked, done) == (True, [])
    other.join()
    assert done == [True]
    assert capfd.readouterr().err == f"{tmp_path}: another build works here; this one waits for it\n"


@pytest.mark.parametrize(
    "out", [build.ROOT, build.ROOT.parent, build.DOCS, build.DOCS / "new", build.ROOT / "README.md"]
)
def test_no_site_takes_the_place_of_what_it_is_made_of(out: Path) -> None:
    with pytest.raises(BuildError, match="allowed: a folder of its own"):
        build.build(out)
