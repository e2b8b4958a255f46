"""`python -m calc.site COMMAND`: what the Makefile calls."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path


def main() -> None:
    """Runs one command; a fault in data or pages is one line and exit status 2."""
    # until everything is imported, which takes a second; after that faults.py handles Ctrl-C
    signal.signal(signal.SIGINT, lambda *_: (print("interrupted", file=sys.stderr), os._exit(130)))
    from calc.base.collecting import collect_rarely
    from calc.site.faults import one_line

    collect_rarely()
    with one_line():
        _run()


def _run() -> None:
    from calc.site import faults
    from calc.site.build import build, compare_engines, diff, exports, ids, readability, release, strict

    parser = argparse.ArgumentParser(prog="python -m calc.site", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("write", help="write the generated pages, and the data under build/")
    making = commands.add_parser("build", help="build the site")
    making.add_argument("dir", type=Path)
    making.add_argument("--engine", choices=strict.ENGINES, default=strict.ENGINES[0])
    making.add_argument("--share", type=int, default=1, metavar="N", help="search one in N recommendations, for CI")
    same = commands.add_parser("same", help="whether two engines built the same site")
    same.add_argument("one", type=Path)
    same.add_argument("other", type=Path)
    serve = commands.add_parser("serve", help="live preview")
    serve.add_argument("--address", default="127.0.0.1:8000", help="host and port")
    commands.add_parser("diff", help="what changes in the published numbers since a revision").add_argument("rev")
    commands.add_parser("ids", help="list the tables that the last build published for the first time")
    commands.add_parser("release", help="write a new version into the tree").add_argument("version")
    readable = commands.add_parser("readable", help="long and passive sentences of the pages, as a list to look at")
    readable.add_argument("only", nargs="?", default="", help="part of a page's path")
    commands.add_parser("publish", help="put the tagged version on the branch gh-pages")
    arguments = parser.parse_args()
    match arguments.command:
        case "write":
            build.write()
        case "build":
            build.build(arguments.dir.resolve(), arguments.engine, arguments.share)
        case "same":
            if found := list(compare_engines.differences(arguments.one, arguments.other)):
                raise faults.BuildError("\n".join(found))
        case "serve":
            from calc.site.preview import preview  # imports all of mkdocs, which would displace another site engine

            preview.serve(arguments.address)
        case "diff":
            diff.report(arguments.rev)
        case "ids":
            print(f"{ids.add(exports.FOLDER)} new ids of tables in {ids.FILE.name}.")
        case "release":
            release.make(arguments.version)
        case "readable":
            print("\n".join(readability.report(build.DOCS, arguments.only)))
        case "publish":
            release.publish()


if __name__ == "__main__":
    main()
