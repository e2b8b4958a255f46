"""The long work that begins beside the first tests: answers about all records, then the site that tests look at.

The pages of that site have most of these records, too: asked by tests and pages at the same time, each would compute
them.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sharing import locked

ROOT = Path(__file__).parents[1]
SITES = ROOT / "tests" / "site" / "sites.py"
# The call that has such answers kept, by the name of the fixture that waits for them.
KEPT = {
    "residuals": "from calc.site.views.accuracy import accuracy; accuracy.residuals()",
    "searches": "from calc.site.views.accuracy import measured; measured.searches()",
}

if __name__ == "__main__":
    for name, call in KEPT.items():
        with locked(Path(sys.argv[1]).parent, name):
            # if it fails, the tests that ask again say why
            subprocess.run([sys.executable, "-c", call], cwd=ROOT, check=False)
    subprocess.run([sys.executable, SITES, sys.argv[1]], check=False)
