"""Mutation testing: does a test fail for every small fault in the formulas?  `make mutate`

Cosmic Ray says which faults there are: each operator replaced by each other one, each number one up and one down, each
condition and boolean turned round. Left out are faults that are none to the interpreter (in an annotation), those that
it refuses or warns of, those in a decorator (here it caches, or makes a property or a data class), and the numbers of a
table of measured quantiles, which `tests/accuracy` reads off the records again. Cosmic Ray's own runner starts Python
anew for each fault; this one imports and collects once. For each fault it forks, puts the changed function in place
(for a fault outside of functions, runs the changed module again in place), forgets what was cached, and runs the tests
that reach that function: the quick ones, those of its own test file first.

`tests/mutation.yaml` judges faults that no test finds, each with the reason why it changes nothing that matters. The
run fails where one is judged in vain or has no judgement, and under `BAR`. Results lie in `build/mutation.json`: a
fault that was found is not tried again until its file changes, or with `--fresh`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import hashlib
import importlib
import inspect
import json
import os
import random
import re
import resource
import signal
import sys
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import hypothesis  # noqa: F401  # imported once, for all forks
import pytest
import yaml
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.operators.provider import OperatorProvider

ROOT = Path(__file__).parents[1]
TARGETS = (
    *sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "calc" / "memory").glob("[a-z]*.py")),
    "calc/models/architecture.py",
    "calc/models/lora.py",
    "calc/base/ledger.py",
    "calc/base/optimizers.py",
    "calc/estimate/estimate.py",
    "calc/step/stages.py",
    "calc/estimate/gpu_group.py",
    "calc/step/roles.py",
    "calc/estimate/host_nodes.py",
    "calc/estimate/verdict.py",
    "calc/autograd/alloc_trace.py",
    "calc/replay/blocks.py",
    "calc/replay/fsdp2_streams.py",
    "calc/replay/allocator.py",
    "calc/replay/replay.py",
)
BAR = 0.92
TABLE = 40  # numbers
RESULTS = ROOT / "build" / "mutation.json"
REACH = RESULTS.with_name("mutation-reach.json")
LOG = RESULTS.with_name("mutation.log")  # what pytest says
JUDGED = ROOT / "tests" / "mutation.yaml"
# Not the pages, the tools and the residuals, which rest on the formulas but do not say them.
TESTS = [f"tests/{name}" for name in ("memory", "engines", "cases", "frameworks")]
LEFT_OUT = ("tests/frameworks/test_released_defaults.py", "tests/test_house.py")
SLOW, BUDGET = 0.5, 4.0  # seconds: of a test that is left out, of all tests that one fault gets
HANGS = 1.0  # seconds of computing beyond thrice what a test takes, after which a fault counts as found
MEMORY = 4 << 30
# Decorators here cache or make a property; the variable operators need a configuration.
NOT_USED = ("RemoveDecorator", "VariableReplacer", "VariableInserter")


Cache = functools._lru_cache_wrapper
Timed = tuple[float, str]  # a test after its seconds
Reach = dict[str, tuple[float, list[str]]]  # test: seconds, functions reached


class Mutant(NamedTuple):
    """One fault: where it is, what it makes of its line, and the whole changed source."""

    path: str
    function: str  # the outermost function around it, "" outside of any
    line: str  # with what was and what is: `b * trained [/ → //] shards`
    nth: int  # among equals
    source: str

    @property
    def key(self) -> str:
        """Names the fault for as long as its line stays."""
        return f"{self.function or 'module'}: {self.line}" + (f" #{self.nth + 1}" if self.nth else "")


# ---- which faults there are ------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _meaning(source: str) -> str | None:
    """A source as the interpreter reads it, annotations aside; None where it is no Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # `is` with a literal
        try:
            tree = ast.parse(source)
            compile(source, "mutant", "exec")
        except (SyntaxError, ValueError):
            return None
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            node.annotation = ast.Constant(0)
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
    return ast.dump(tree)


class _Function(NamedTuple):
    """An outermost function or method; `first` is where its body begins."""

    name: str
    first: tuple[int, int]
    begin: int
    end: int


def _functions(tree: ast.Module) -> Iterator[_Function]:
    for node in tree.body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        for f in inside:
            if isinstance(f, ast.FunctionDef):
                name = f"{node.name}.{f.name}" if isinstance(node, ast.ClassDef) else f.name
                yield _Function(name, (f.body[0].lineno, f.body[0].col_offset), f.lineno, f.end_lineno or f.lineno)


def _changed(tree: Any, node: Any, operator: Any, index: int) -> str:
    """The source with one node mutated; the tree is as before afterwards."""
    own, parent = list(getattr(node, "children", ())), node.parent
    leaves = [(leaf, leaf.value, leaf.prefix) for leaf in (node, *own) if hasattr(leaf, "value")]
    siblings = list(parent.children) if parent else []
    new = operator.mutate(node, index)
    if new is not node:
        parent.children[next(i for i, child in enumerate(siblings) if child is node)] = new
    source: str = tree.get_code()
    if parent:
        parent.children[:] = siblings
    if own:
        node.children[:] = own
    for leaf, value, prefix in leaves:
        leaf.value, leaf.prefix = value, prefix
    return source


def _left_out(node: Any) -> bool:
    """True if a node is the star before keywords, or lies in a decorator or in a table of measured quantiles."""
    if node.parent and node.parent.type == "parameters":
        return True
    while node.parent and node.type != "decorator" and not _table(node):
        node = node.parent
    return bool(node.type == "decorator") or _table(node)


def _table(node: Any) -> bool:
    """True if a node is a sequence of `TABLE` numbers or more, and nothing else."""
    parts = node.children[::2] if node.type == "testlist_comp" else []
    numbers = [part for part in parts if part.type == "number" or part.get_first_leaf().value == "-"]
    return len(parts) == len(numbers) >= TABLE


def _alike(a: Sequence[str], b: Sequence[str]) -> int:
    """The number of words with which both begin."""
    return next((i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y), len(a))


def _between(was: str, now: str) -> str:
    """A line with its change in brackets, whole words of it."""
    a, b = (re.findall(r"\w+|\s+|\*\*|//|<<|>>|[<>=!]=|.", text.strip()) for text in (was, now))
    head = _alike(a, b)
    tail = _alike(a[head:][::-1], b[head:][::-1])
    old, new = ("".join(x[head : len(x) - tail]).strip() for x in (a, b))
    return f"{''.join(a[:head])}[{old} → {new}]{''.join(a[len(a) - tail :])}"


def mutants(path: str) -> list[Mutant]:
    """Every fault that can be made in a file."""
    source = (ROOT / path).read_text("utf-8")
    tree, lines, functions = get_ast(source), source.splitlines(), list(_functions(ast.parse(source)))
    provider = OperatorProvider()
    operators = [provider[name]() for name in provider if name not in NOT_USED]
    seen: Counter[tuple[str, str]] = Counter()
    found, sources = [], {source}
    for node in list(ast_nodes(tree)):
        if _left_out(node):
            continue
        for operator in operators:
            for index, (start, _) in enumerate(list(operator.mutation_positions(node))):
                changed = _changed(tree, node, operator, index)
                if changed in sources:
                    continue
                sources.add(changed)
                new = changed.splitlines()
                inside = next((f for f in functions if f.begin <= start[0] <= f.end), None)
                # a function alone is quicker to read than its file
                first, last = (inside.begin - 1, inside.end) if inside else (0, len(lines))
                was, now = (dedent("\n".join(x[first : last + len(x) - len(lines)])) for x in (lines, new))
                if _meaning(now) in (None, _meaning(was)):
                    continue
                row = next(i for i, (a, b) in enumerate(zip_longest(lines, new)) if a != b)
                where = (inside.name if inside and inside.first <= start else "", _between(lines[row], new[row]))
                found.append(Mutant(path, *where, seen[where], changed))
                seen[where] += 1
    assert tree.get_code() == source
    return found


# ---- running them --------------------------------------------------------------------------------------------------


def _forked(body: Callable[[], int], limit: float = HANGS) -> bool:
    """True if `body()` came to its end and gave 0, in a silent child of limited memory and seconds of computing."""
    child = os.fork()
    if not child:
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            signal.setitimer(signal.ITIMER_PROF, limit)
            os._exit(body())
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _pytest(ids: Sequence[str], plugin: object = None) -> int:
    """Pytest in this process, without what belongs to a run that someone watches."""
    options = ("-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist", "-x", "--tb=no", "--capture=sys", "-q")
    plugins = [plugin] if plugin else []
    return int(pytest.main([*options, *[f"--ignore={path}" for path in LEFT_OUT], *ids], plugins=plugins))


class Session:
    """A pytest session that has imported and collected everything, and forks for each fault."""

    def __init__(self, faults: Sequence[Mutant], out: int) -> None:
        self.faults, self.out = faults, out
        self.items: dict[str, pytest.Item] = {}

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """The first failure decides; who has put no fault in reads of it in the log."""
        if call.excinfo and not call.excinfo.errisinstance(pytest.skip.Exception):
            print(f"\n{item.nodeid}, {call.when}: {call.excinfo.exconly()}", file=sys.__stdout__, flush=True)
            os._exit(1)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Instead of the tests: the faults."""
        self.items = {item.nodeid: item for item in session.items}
        importlib.import_module("calc.catalog.catalog").load()
        reach = self.reach()
        functions = [thing for thing in gc.get_objects() if isinstance(thing, types.FunctionType)]
        caches = _caches()
        gc.freeze()
        with os.fdopen(self.out, "w") as out:
            for nth, fault in enumerate(self.faults):
                begun, tests = time.perf_counter(), chosen(reach, fault)
                put_in = functools.partial(put, fault, functions, caches)
                survived = _forked(lambda put_in=put_in, tests=tests: put_in() or self.run(tests))
                print(json.dumps([nth, survived, time.perf_counter() - begun]), file=out, flush=True)
        return True

    def run(self, tests: Sequence[Timed]) -> int:
        """0 where all of these tests pass; pytest_runtest_makereport ends the process otherwise."""
        for seconds, i in tests:
            signal.setitimer(signal.ITIMER_PROF, HANGS + 3 * seconds)
            self.items[i].config.hook.pytest_runtest_protocol(item=self.items[i], nextitem=None)
        return 0

    def reach(self) -> Reach:
        """The code that each test reaches, recorded anew for the files of tests that have changed, for all where calc
        has.
        """
        RESULTS.parent.mkdir(exist_ok=True)
        stored = json.loads(REACH.read_text("utf-8")) if REACH.exists() else {}
        known = {}
        for path in sorted({i.split("::")[0] for i in self.items}):
            version = _digest(path, "tests/[!t]*.py", "calc/**/*.py")
            same = path in stored and stored[path][0] == version
            known[path] = [version, stored[path][1] if same else None]
        new = [i for i in self.items if known[i.split("::")[0]][1] is None]
        if new:
            read, write = os.pipe()
            child = os.fork()
            if not child:
                os.close(read)
                os._exit(self.record(new, write))
            os.close(write)
            with os.fdopen(read) as lines:
                for i, seconds, names in map(json.loads, lines):
                    file = known[i.split("::")[0]]
                    file[1] = {**(file[1] or {}), i: [seconds, names]}
            if os.waitpid(child, 0)[1]:
                pytest.exit("A test fails without any fault.", returncode=1)
            REACH.write_text(json.dumps(known), "utf-8")
        return {i: found for _, tests in known.values() for i, found in tests.items()}

    def record(self, ids: Sequence[str], pipe: int) -> int:
        """Writes which functions each test reaches, and how long it takes."""
        wanted, caches = {str(ROOT / path): path for path in TARGETS}, _caches()
        with os.fdopen(pipe, "w") as out:
            for i in ids:
                found: set[str] = set()

                def called(frame: types.FrameType, event: str, arg: object, found: set[str] = found) -> None:
                    code = frame.f_code
                    if code.co_filename in wanted:
                        found.add(f"{wanted[code.co_filename]}:{code.co_qualname.split('.<locals>')[0]}")

                forget(caches, catalog=False)
                begun = time.process_time()
                sys.settrace(called)
                self.run([(3600, i)])
                sys.settrace(None)
                print(json.dumps([i, time.process_time() - begun, sorted(found)]), file=out, flush=True)
        return 0


def _digest(*patterns: str) -> str:
    digest = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)} - {Path(__file__)}):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def chosen(reach: Reach, fault: Mutant) -> list[Timed]:
    """The tests that a fault gets: its own test file's first, then those of all other files in turn."""
    own = f"/test_{Path(fault.path).stem}.py"
    files: dict[str, list[Timed]] = {}
    for i, (seconds, names) in reach.items():
        hits = f"{fault.path}:{fault.function}" in names
        if not fault.function:
            hits = i.split("::")[0].endswith(own) or any(name.startswith(f"{fault.path}:") for name in names)
        if hits and seconds <= SLOW:
            files.setdefault(i.split("::")[0], []).append((seconds, i))
    first = [test for name in files if name.endswith(own) for test in sorted(files[name])]
    turns = zip_longest(*(sorted(files[name]) for name in files if not name.endswith(own)))
    spent, tests = 0.0, list[Timed]()
    for seconds, i in chain(first, (test for turn in turns for test in turn if test)):
        if spent < BUDGET:
            spent += seconds
            tests.append((seconds, i))
    return tests


def _caches() -> list[Cache]:
    """Every cache of calc and the tests."""
    ours = (f"{ROOT}/calc/", f"{ROOT}/tests/")
    caches = [thing for thing in gc.get_objects() if isinstance(thing, functools._lru_cache_wrapper)]
    return [
        c for c in caches if inspect.isfunction(c.__wrapped__) and c.__wrapped__.__code__.co_filename.startswith(ours)
    ]


def forget(caches: Sequence[Cache], *, catalog: bool) -> None:
    """Empties caches; the catalog's too where the fault may be in what it was read with."""
    for cache in caches:
        if catalog or not cache.__wrapped__.__code__.co_filename.endswith(("/catalog.py", "/schema.py")):
            cache.cache_clear()


def put(fault: Mutant, functions: Sequence[types.FunctionType], caches: Sequence[Cache]) -> int:
    """Puts what has changed in place of what was imported, for all who imported it."""
    path = str(ROOT / fault.path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = compile(fault.source, path, "exec", dont_inherit=True)
    if fault.function:
        (new,) = [c for c in _codes(code) if c.co_qualname == fault.function]
        (old,) = [f for f in functions if f.__code__.co_filename == path and f.__code__.co_qualname == fault.function]
        old.__code__ = new
    else:
        module = vars(sys.modules[fault.path.removesuffix(".py").replace("/", ".")])
        before = dict(module)
        exec(code, module)
        ours = [vars(m) for m in list(sys.modules.values()) if str(getattr(m, "__file__", "")).startswith(str(ROOT))]
        for names in ours:
            for name in names.keys() & before.keys():
                if names[name] is before[name] and not name.startswith("__"):
                    names[name] = module[name]
    forget(caches, catalog=fault.path == "calc/models/architecture.py")
    return 0


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


# ---- the answer ----------------------------------------------------------------------------------------------------


def run(faults: Sequence[Mutant]) -> Iterator[tuple[Mutant, bool, float]]:
    """Each fault, whether it survived, and the seconds it took."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        LOG.parent.mkdir(exist_ok=True)
        os.dup2(os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os._exit(_pytest([*TESTS, *sorted(str(p) for p in Path("tests").glob("test_*.py"))], Session(faults, write)))
    os.close(write)
    with os.fdopen(read) as lines:
        for nth, survived, seconds in map(json.loads, lines):
            yield faults[nth], survived, seconds
    if os.waitpid(child, 0)[1]:
        raise SystemExit(f"The tests could not be run: {LOG.relative_to(ROOT)} says why.")


def main() -> int:
    """Runs what the arguments name, prints the table and the survivors; 1 where one has no judgement."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="", help="files whose path has this in it, several after commas")
    options.add_argument("--sample", type=int, help="so many faults, drawn by --seed")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--fresh", action="store_true", help="try again what was found before")
    given = options.parse_args()

    paths = [path for path in TARGETS if any(part in path for part in given.only.split(","))]
    every = [fault for path in paths for fault in mutants(path)]
    some = every if given.sample is None else random.Random(given.seed).sample(every, min(given.sample, len(every)))
    version = {path: hashlib.sha256((ROOT / path).read_bytes()).hexdigest()[:16] for path in paths}
    stored = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() and not given.fresh else {}
    known = {path: stored.get(path, {}) if stored.get(path, {}).get("") == version[path] else {} for path in paths}

    survived: dict[Mutant, bool] = {f: False for f in some if known[f.path].get(f.key) == "found"}
    todo = [fault for fault in some if fault not in survived]
    print(f"{len(every)} faults, {len(some)} to try, {len(survived)} of them found before", flush=True)
    begun = time.perf_counter()
    for nth, (fault, lives, seconds) in enumerate(run(todo) if todo else (), 1):
        survived[fault] = lives
        known[fault.path][fault.key] = "survived" if lives else "found"
        if lives:
            print(f"  survived {fault.path} {fault.key}  [{seconds:.1f} s]", flush=True)
        if nth % 50 == 0 or nth == len(todo):
            stored |= {path: {**known[path], "": version[path]} for path in paths}
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(stored), "utf-8")
            print(f"  {nth} of {len(todo)}, {(time.perf_counter() - begun) / nth:.2f} s each", flush=True)

    judged = yaml.safe_load(JUDGED.read_text("utf-8")) if JUDGED.exists() else {}
    reasons = {(path, key) for path, groups in judged.items() for group in groups for key in group["faults"]}
    print(f"\n{'file':32}{'faults':>8}{'tried':>8}{'found':>8}{'survived':>10}{'judged':>8}{'found':>9}")
    for path in [*paths, "all"]:
        own = [fault for fault in some if path in ("all", fault.path)]
        lives = [fault for fault in own if survived[fault]]
        known_lives = sum((fault.path, fault.key) in reasons for fault in lives)
        total = sum(path in ("all", fault.path) for fault in every)
        share = 1 - len(lives) / len(own) if own else 1.0
        print(f"{path:32}{total:8}{len(own):8}{len(own) - len(lives):8}{len(lives):10}{known_lives:8}{share:9.1%}")
    unjudged = [f for f in some if survived[f] and (f.path, f.key) not in reasons]
    in_vain = sorted(reasons & {(f.path, f.key) for f in some if not survived[f]})
    gone = sorted({(p, k) for p, k in reasons if p in paths} - {(f.path, f.key) for f in every})
    for title, rows in (
        ("Survived, and nobody has said why", [(f.path, f.key) for f in unjudged]),
        ("Judged in vain: a test finds it", in_vain),
        ("Judged, but no longer there", gone),
    ):
        if rows:
            print(f"\n{title}:\n" + "\n".join(f"  {path} {key}" for path, key in rows))
    share = 1 - sum(survived[fault] for fault in some) / max(1, len(some))
    return int(bool(unjudged or in_vain or gone or share < BAR))


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT)]
    sys.exit(main())
