"""`python -m calc.site write | build DIR | serve | diff REV`: what the Makefile calls."""

from __future__ import annotations

import argparse
from pathlib import Path

from calc.site import build, diff


def main() -> None:
    """Runs one command; a fault in data or pages is one line and exit status 2."""
    parser = argparse.ArgumentParser(prog="python -m calc.site", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write", help="write the generated pages and data under docs/")
    commands.add_parser("build", help="build the site").add_argument("dir", type=Path)
    serve = commands.add_parser("serve", help="live preview")
    serve.add_argument("--address", default="127.0.0.1:8000", help="host and port")
    commands.add_parser("diff", help="what changes in the published numbers since a revision").add_argument("rev")
    arguments = parser.parse_args()
    with build.one_line():
        match arguments.command:
            case "write":
                build.write()
            case "build":
                build.build(arguments.dir.resolve())
            case "serve":
                build.serve(arguments.address)
            case "diff":
                diff.report(arguments.rev)


if __name__ == "__main__":
    main()
