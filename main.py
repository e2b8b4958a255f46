"""The entry of mkdocs-macros.

Under `make serve` one process builds the site again and again, and mkdocs-macros imports anew only this file. So when
calc or a catalog has changed, everything of calc is forgotten here and read again; generated pages follow each build.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent
SERVING = "HEADROOM_SERVE"


def state() -> str:
    """Changes with any file that numbers come from: edited, added or removed."""
    found = [p for name in ("calc", "hardware", "models", "measurements") for p in (ROOT / name).rglob("*.*")]
    return str(hash(tuple(sorted((str(p), p.stat().st_mtime_ns) for p in found if p.suffix != ".pyc"))))


if SERVING in os.environ and os.environ[SERVING] != (now := state()):
    os.environ[SERVING] = now
    for name in [n for n in sys.modules if n == "calc" or n.startswith("calc.")]:
        del sys.modules[name]

from calc.site.macros import define_env  # noqa: E402

if SERVING in os.environ:
    from calc.site.build import write

    write(preview=True)

__all__ = ["define_env"]
