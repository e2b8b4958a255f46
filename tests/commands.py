"""The command line as a test sees it: what one command printed, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """Exit status, standard output and standard error of one command."""

    status: int
    out: str
    err: str

    def refused(self) -> str:
        """The one line of an error; asserts that it is one, and all there is."""
        assert (self.status, self.out) == (2, "")
        assert self.err.endswith("\n")
        line = self.err[:-1]
        assert line.isprintable()
        assert line
        return line
