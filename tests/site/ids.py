"""The ids of all tables ever published, in ids.txt: `make ids` adds those of the last build, and removes none."""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).with_name("ids.txt")


def known() -> set[str]:
    return set(FILE.read_text("utf-8").split()) if FILE.exists() else set()


def published(root: Path) -> set[str]:
    """The ids of the tables that were written last under `root`, the project or its site."""
    return {path.stem for path in (root / "data" / "tables").glob("*.json")}


if __name__ == "__main__":
    every = known() | published(Path(__file__).parents[2] / "docs")
    FILE.write_text("".join(f"{name}\n" for name in sorted(every)), "utf-8")
    print(f"{len(every)} ids in {FILE.name}.")
