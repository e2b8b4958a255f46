"""The theme's templates as Jinja compiles them, kept between builds: a hook for the site engine.

Jinja takes what is kept of a template only if the hash of its source is the same.
"""

from __future__ import annotations

from typing import Any

from jinja2 import FileSystemBytecodeCache

from calc.base.project import ROOT

FOLDER = ROOT / "build" / "templates"


def on_env(env: Any, **others: Any) -> None:
    """Gives templates the folder of what has been compiled before."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    env.bytecode_cache = FileSystemBytecodeCache(str(FOLDER))
