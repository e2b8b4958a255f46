"""The argument parser of this folder's commands, without packages that the tracer's environment lacks."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser that answers unusable arguments with one line and exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is, then exit."""
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: {line}; {self.prog} --help shows what is\n")
