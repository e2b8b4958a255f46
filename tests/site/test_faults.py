"""A command that is stopped says so in one line: by a full disk, a folder that it cannot write, Ctrl-C."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sites import command

from calc.answers.kept import Kept
from calc.site import faults

ROOT = faults.ROOT
FULL = (errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(*FULL), "no space left on device"),
        (OSError(errno.EROFS, "Read-only file system", str(ROOT / "site")), "site: read-only file system"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/site"), "/x/site: permission denied"),
        (shutil.Error([("a", "/x/b", "No space left on device"), ("c", "/x/d", "…")]), "/x/b: no space left on device"),
        (faults.BuildError("docs/x.md:3: given y"), "docs/x.md:3: given y"),
    ],
)
def test_what_stops_a_command_is_one_line_and_status_2(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as stopped, faults.one_line():
        raise error
    signal.signal(signal.SIGINT, before)
    assert stopped.value.code == 2
    assert capsys.readouterr() == ("", f"{line}\n")


def test_a_full_disk_leaves_no_part_of_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, raw: bytes) -> int:
        path.touch()
        raise OSError(*FULL)

    monkeypatch.setattr(Path, "write_bytes", full)
    kept = Kept(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        kept.write("topic", {1: 2})
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_what_stops_a_build_leaves_the_old_site_and_nothing_else(tiny: Path) -> None:
    """Also what a killed build has left goes with the next one, even where that fails."""
    project = tiny
    old, left = project / "site/index.html", project / ".site-killed/fresh"
    left.mkdir(parents=True)
    shutil.rmtree(project / "build/data")  # which shows below that the build is at work
    old.write_text("old", "utf-8")
    page = project / "docs/models/qwen2.5-0.5b.md"
    page.unlink()
    page.symlink_to("/dev/full")
    full = command(project, "build", "site")
    assert (full.returncode, full.stdout, full.stderr) == (2, "", "no space left on device\n")
    page.unlink()
    nowhere = command(project, "build", "/proc/site")
    assert (nowhere.returncode, nowhere.stdout, nowhere.stderr.count("\n")) == (2, "", 1)
    assert nowhere.stderr.startswith("/proc/.site-")

    build = subprocess.Popen(
        [sys.executable, "-m", "calc.site", "build", "site"],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    end = time.monotonic() + 60
    while not list(project.glob("build/data/tables/*")) and time.monotonic() < end:  # others are at work, too
        time.sleep(0.01)
    os.killpg(build.pid, signal.SIGINT)
    assert build.communicate() == ("", "interrupted\n")
    assert build.returncode == 130
    assert old.read_text("utf-8") == "old"
    assert list(project.glob(".site-*")) == []


POOL = """import os, time
from calc.answers.processes import Pool
if __name__ == "__main__":
    pool = Pool(1)
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(60)
"""


def test_processes_end_with_the_one_that_started_them_however_it_ends(tmp_path: Path) -> None:
    """A killed build would leave some hundred megabytes of them for good."""
    (tmp_path / "pool.py").write_text(POOL, "utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    starter = subprocess.Popen([sys.executable, "pool.py"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
    assert starter.stdout
    assert int(starter.stdout.readline()) != starter.pid
    starter.kill()
    assert starter.communicate(timeout=30) == (b"", None)  # nobody holds the pipe any more
