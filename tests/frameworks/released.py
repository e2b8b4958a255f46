"""Released packages, read without being installed: wheels that pip fetches, argparse flags, YAML, dataclass fields.

Nothing in here forgives: what a release does not hold where it is looked for is an error. Only a registry that cannot
be reached is no failure, and has an exception of its own.
"""

from __future__ import annotations

import ast
import fcntl
import functools
import posixpath
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

# Wheels are asked for by the platform of the releases, whatever runs the tests: text is read, nothing is executed.
PIP = [
    *("pip", "download", "--no-deps", "--only-binary=:all:", "--platform=manylinux1_x86_64", "--python-version=3.11"),
    *("--implementation=cp", "--retries=1", "--timeout=10", "--disable-pip-version-check", "--quiet", "--dest"),
]
# Two releases of one package cannot be asked for at once, and most of pip's time goes into starting: one process, and
# in it pip for each.
EACH = """
import runpy, sys
end = sys.argv.index("--")
pip, requirements = sys.argv[1:end], sys.argv[end + 1:]
for requirement in requirements:
    sys.argv = [*pip, requirement]
    try:
        runpy.run_module("pip", run_name="__main__")
    except SystemExit as done:
        if done.code:
            raise
"""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # several times as fast, where PyYAML has it


class Unreachable(Exception):
    """The registry gave no answer."""


@functools.cache
def fetch(folder: Path, package: str, versions: tuple[str, ...]) -> str:
    """Puts the wheels of all these releases into `folder`, once however many processes ask; what pip could not do."""
    with (folder / f"{package}.lock").open("w") as lock, tempfile.TemporaryDirectory(dir=folder) as fresh:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [f"{package}=={version}" for version in versions if not wheel(folder, package, version)]
        if not missing:
            return ""
        command = [sys.executable, "-c", EACH, *PIP, fresh, "--", *missing]
        done = subprocess.run(command, capture_output=True, text=True)
        for path in Path(fresh).glob("*.whl"):
            path.rename(folder / path.name)
    return next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), done.stderr[-200:])


def wheel(folder: Path, package: str, version: str) -> Path | None:
    """The wheel of one release, if it is there."""
    return next(folder.glob(f"{package}-{version}-*.whl"), None)


def read(folder: Path, package: str, version: str, versions: tuple[str, ...]) -> Release:
    """One of several releases, all fetched at once."""
    refusal = fetch(folder, package, versions)
    if found := wheel(folder, package, version):
        return Release(found, package, version)
    if re.search(r"from versions: (?!none)", refusal):
        raise LookupError(f"the registry has {package}, and not all of its releases: {refusal}")
    raise Unreachable(refusal)


def read_or_skip(config: pytest.Config, package: str, version: str, versions: tuple[str, ...]) -> Release:
    """`read` from pytest's cache; the test is skipped where the registry cannot be reached."""
    try:
        return read(config.cache.mkdir("released"), package, version, versions)
    except Unreachable as reason:
        pytest.skip(f"the registry cannot be reached: {reason}")


class Release:
    """One released package; paths are those inside it, `openrlhf/cli/train_sft.py`."""

    def __init__(self, wheel: Path, package: str, version: str) -> None:
        self.name = f"{package} {version}"
        self.archive = zipfile.ZipFile(wheel)
        # a wheel with compiled tags keeps its modules under `openrlhf-0.6.1.data/purelib/`
        self.members = {re.sub(r"^[^/]+\.data/(pure|plat)lib/", "", name): name for name in self.archive.namelist()}

    def text(self, path: str) -> str:
        """A file, whole."""
        assert path in self.members, f"{self.name} has no file {path}"
        return self.archive.read(self.members[path]).decode("utf-8")

    @functools.cache  # noqa: B019  (a handful of releases, kept as long as the tests run)
    def tree(self, path: str) -> ast.Module:
        """A module, parsed."""
        return ast.parse(self.text(path))

    @functools.cache  # noqa: B019
    def flags(self, path: str) -> Mapping[str, ast.expr]:
        """The defaults of a command line's flags, by name without dashes, as written."""
        found: dict[str, ast.expr] = {}
        for node in ast.walk(self.tree(path)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            assert node.func.attr != "set_defaults", f"{self.name}, {path}: a set_defaults that nobody reads"
            if node.func.attr == "add_argument" and isinstance(node.args[0], ast.Constant):
                told = {keyword.arg: keyword.value for keyword in node.keywords}
                action = ast.literal_eval(told.get("action", ast.Constant("store")))
                unset = {"store_true": False, "store_false": True}.get(action)
                found[node.args[0].value.lstrip("-")] = told.get("default", ast.Constant(unset))
        return found

    def flag(self, path: str, name: str) -> Any:
        """The default of one flag."""
        assert name in self.flags(path), f"{self.name}, {path}: no flag --{name}"
        return ast.literal_eval(self.flags(path)[name])

    def field(self, path: str, name: str) -> Any:
        """The default of the one dataclass field of this name in a module."""
        nodes = [node for node in ast.walk(self.tree(path)) if isinstance(node, ast.AnnAssign)]
        told = [node.value for node in nodes if isinstance(node.target, ast.Name) and node.target.id == name]
        assert len(told) == 1, f"{self.name}, {path}: {len(told)} fields {name}"
        value = told[0]
        if isinstance(value, ast.Call):  # field(default=..., metadata=...)
            value = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), None)
        assert value, f"{self.name}, {path}: {name} has no default"
        return ast.literal_eval(value)

    @functools.cache  # noqa: B019
    def configuration(self, path: str, **chosen: str) -> Mapping[str, Any]:
        """A YAML file with the files that its `defaults` name, or those `chosen` of their groups, as Hydra composes it.

        By dotted key.
        """
        whole: dict[str, Any] = {}
        self._compose(path, "", whole, chosen)
        return whole

    def _compose(self, path: str, where: str, whole: dict[str, Any], chosen: Mapping[str, str]) -> None:
        """Writes one file's keys into `whole` below `where`; later ones win, and `_self_` says when its own come."""
        text = self.text(path)
        own = yaml.load(text, Loader=LOADER)
        where = "" if "# @package _global_" in text else where
        for entry in own.pop("defaults", ["_self_"]):
            if entry == "_self_":
                whole |= flat(own, where)
                continue
            # `group@package: name`, or `name@package` of this folder
            [(place, name)] = entry.items() if isinstance(entry, dict) else [(entry, "")]
            group, _, package = place.partition("@")
            name = chosen.get(group, name).replace("${model_engine}", str(whole.get("model_engine")))
            file = posixpath.normpath(f"{posixpath.dirname(path)}/{group}/{name}".rstrip("/") + ".yaml")
            self._compose(file, f"{where}.{package}".strip("."), whole, chosen)

    def key(self, path: str, name: str) -> Any:
        """One value of a composed configuration."""
        values = self.configuration(path)
        assert name in values, f"{self.name}, {path}: no key {name}"
        value = values[name]
        assert not str(value).startswith("${"), f"{self.name}, {path}: {name} points elsewhere: {value}"
        return value

    def requires(self, library: str, extra: str = "") -> SpecifierSet:
        """The versions of a library that the package asks for, of itself or with one of its extras."""
        [metadata] = [name for name in self.members if name.endswith(".dist-info/METADATA")]
        lines = [
            line.partition(": ")[2] for line in self.text(metadata).splitlines() if line.startswith("Requires-Dist")
        ]
        asked = [each for each in map(Requirement, lines) if each.name.lower() == library]
        met = [each for each in asked if not each.marker or (extra and each.marker.evaluate({"extra": extra}))]
        assert met, f"{self.name}, METADATA: nothing on {library} {extra and f'with the extra {extra}'}"
        return functools.reduce(lambda one, two: one & two, (each.specifier for each in met))


def flat(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Nested mappings by dotted key."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        dotted = f"{where}.{key}".strip(".")
        found |= flat(value, dotted) if isinstance(value, dict) else {dotted: value}
    return found
