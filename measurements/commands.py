"""How the commands of this folder read their arguments, without what the tracer's environment lacks."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Arguments that cannot be used are one line, and exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is, and exit."""
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: {line}; {self.prog} --help shows what is\n")
