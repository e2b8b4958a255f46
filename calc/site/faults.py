"""Errors that end a command of the site with one line and exit status 2: data, pages, the disk; Ctrl-C gives 130."""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from calc.base.project import ROOT
from calc.base.schema import InputError

TEMPLATES = ("<template>", "<unknown>", ".html", ".xml")  # endings of the names of Jinja's templates


class BuildError(Exception):
    """A site that cannot be built; the text is the message to print."""


class Interrupted(SystemExit):
    """Ctrl-C. After a KeyboardInterrupt has passed through `exec`, Python exits by the signal although it is caught."""


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Turns the errors that can stop a command into their line and exit status."""
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    except (InputError, BuildError) as error:
        _end(str(error), 2)
    except OSError as error:
        _end(of_files(error), 2)


def _interrupt(_: int, __: FrameType | None) -> None:
    """Handles Ctrl-C: ends child processes, which would otherwise work to the end of what they were given."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignored from now on: tidying up takes less than a second
    for child in multiprocessing.active_children():
        child.terminate()
    print("interrupted", file=sys.stderr)
    raise Interrupted(130)


def _end(line: str, status: int) -> NoReturn:
    print(line, file=sys.stderr)
    sys.exit(status)


def of_files(error: OSError) -> str:
    """An error of the operating system in one line: a full disk, a read-only folder."""
    if isinstance(error, shutil.Error):  # an error of many files; the first is enough
        _, place, reason = error.args[0][0]
    else:
        place, reason = error.filename, error.strerror or str(error)
    reason = f"{reason[:1].lower()}{reason[1:]}"
    return f"{short(Path(place))}: {reason}" if isinstance(place, str | Path) else reason


def short(path: Path) -> str:
    """A path as a message names it: relative to the project's root if it lies there."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def line_of(error: BaseException) -> tuple[str, int] | None:
    """The template, and its line, in which an error arose; None if no template is involved."""
    found, trace = None, error.__traceback__
    while trace:
        name = trace.tb_frame.f_code.co_filename
        if name.endswith(TEMPLATES):
            found = name, trace.tb_lineno
        trace = trace.tb_next
    return found
