"""The time to build the whole site, and the same pages with their tables pasted in: `python -m benchmarks.site`.

Each is built in a process of its own, the whole site with what an earlier build has kept. Pasted pages hold what the
macros give, written into copies of the pages, so that only Markdown, templates and the search index are left.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from shutil import copytree

ROOT = Path(__file__).parents[1]
BAR = 1.2
RUNS = 3
# A script that runs the macros of every page in place of mkdocs-macros and leaves front matter as it is.
PASTE = """
import sys
from pathlib import Path
from calc.site.macros import rendered
from calc.site.text import sources
docs = Path(sys.argv[1])
for source, page in rendered.pages(docs).all().items():
    whole = (docs / source).read_text("utf-8")
    _, body = sources.front(docs / source)
    (docs / source).write_text(whole.removesuffix(body) + page.whole, "utf-8")
"""


def seconds(*arguments: str) -> float:
    """Wall-clock time of a Python process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Prints the whole build, and both builds of mkdocs with their ratio."""
    with tempfile.TemporaryDirectory(prefix="headroom-") as scratch:
        whole = seconds("-m", "calc.site", "build", f"{scratch}/site")
        print(f"whole site, checked: {whole:.1f} s")
        docs = Path(copytree(ROOT / "docs", Path(scratch, "docs")))
        subprocess.run([sys.executable, "-c", PASTE, str(docs)], cwd=ROOT, check=True)
        config = (ROOT / "mkdocs.yml").read_text("utf-8")
        start, _, rest = config.partition("  - macros:\n")
        plain = start + "".join(line for line in rest.splitlines(keepends=True) if not line.startswith("      "))
        pasted = ROOT / ".pasted.yml"
        pasted.write_text(plain.replace("strict: true", f"strict: true\ndocs_dir: {docs}"), "utf-8")
        try:
            times = [
                (
                    seconds("-m", "calc.site", "build", f"{scratch}/site"),
                    seconds("-m", "mkdocs", "build", "--strict", "-f", str(pasted), "-d", f"{scratch}/pasted"),
                )
                for _ in range(RUNS)
            ]
        finally:
            pasted.unlink()
        macros, plainly = (min(run[i] for run in times) for i in (0, 1))
        print(f"with macros {macros:.1f} s, pasted {plainly:.1f} s: ratio {macros / plainly:.2f}, bar {BAR}")


if __name__ == "__main__":
    main()
