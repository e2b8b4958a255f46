"""The seconds to check 1,000 GPUs and 1,000 models: copies of the catalog's own files, under other names.

Run as `python -m benchmarks.catalog`.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from pathlib import Path

from calc.catalog.catalog import load
from calc.check import check

ROOT = Path(__file__).parent.parent
MANY = 1000


def grow(root: Path) -> None:
    """Fills a copy of the data folders up to MANY GPUs and models."""
    for folder in ("hardware", "models", "measurements"):
        shutil.copytree(ROOT / folder, root / folder)
    for folder in ("hardware/gpus", "models"):
        files = sorted((root / folder).glob("*.yaml"))
        for number in range(MANY - len(files)):
            text = files[number % len(files)].read_text("utf-8")
            text = re.sub(r"^id: .*$", f"id: copy-{number}", text, flags=re.M)
            text = re.sub(r"^hf: .*$", f"hf: copy/{number}", text, flags=re.M)
            text = re.sub(r"^name: .*$", f"name: Copy {number}", text, flags=re.M)
            text = re.sub(r"^source: .*$", f"source: https://huggingface.co/copy/{number}", text, flags=re.M)
            text = re.sub(r"^aliases:.*\n(  - .*\n)*", "aliases: []\n", text, flags=re.M)
            (root / folder / f"copy-{number}.yaml").write_text(text, "utf-8")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        grow(root)
        for name, where in (("this catalog", ROOT), (f"{MANY} GPUs, {MANY} models", root)):
            began = time.perf_counter()
            check(where)
            seconds = time.perf_counter() - began
            catalog = load(where)
            print(f"{name}: {len(catalog.gpus)} GPUs, {len(catalog.models)} models in {seconds:.2f} s")


if __name__ == "__main__":
    main()
