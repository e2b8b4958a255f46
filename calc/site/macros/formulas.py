"""A function of `calc` as pages show it: its docstring, its source, and an example worked by calling it.

A method page therefore publishes exactly what the tests exercise; nothing is typed twice.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from functools import cached_property
from html import escape
from typing import Any

from calc.answers.workings import values_text
from calc.base.ledger import Line
from calc.base.units import gib
from calc.estimate.report import seconds
from calc.models.architecture import Architecture
from calc.throughput import Term


def find(name: str) -> Callable[..., Any]:
    """The function called `module:function`; TypeError for one that is inherited, whose name says something else."""
    module, _, function = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in function.split("."):
        found = getattr(found, part)
    if isinstance(found, property | cached_property):
        found = found.fget if isinstance(found, property) else found.func
    if not callable(found):
        raise TypeError(f"{name} is not a function")
    function_found: Callable[..., Any] = inspect.unwrap(found)
    own = f"{function_found.__module__}:{function_found.__qualname__}"
    if own != name:
        raise TypeError(f"{name} is {own}")
    return function_found


def show(name: str, example: Mapping[str, Any] | None = None, bytes_: bool = True, label: str = "") -> str:
    """Markdown: what the docstring says first, the rest of it folded, the source, and the example with its result."""
    function = find(name)
    summary, _, rest = (inspect.getdoc(function) or "").partition("\n\n")
    source = without_docstring(textwrap.dedent(inspect.getsource(function)))
    code = f'```python title="{name.replace(":", ".")}"\n{source}```'
    parts = [summary, *([f'??? note "In detail"\n\n{textwrap.indent(rest, "    ")}'] if rest else []), code]
    if example is not None:
        parts.append(worked(function, example, bytes_, label))
    return "\n\n".join(parts)


def without_docstring(source: str) -> str:
    """A function's source without its docstring, which the page shows as text."""
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef | ast.ClassDef)
    first = function.body[0]
    if not (isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(function.body) > 1):
        return source
    lines = source.splitlines(keepends=True)
    return "".join(lines[: first.lineno - 1] + lines[first.end_lineno :]).replace(":\n\n", ":\n", 1)


def worked(function: Callable[..., Any], example: Mapping[str, Any], bytes_: bool, label: str) -> str:
    """One line: the call and its result."""
    arguments = ", ".join(f"{k}={_argument(v)}" for k, v in example.items())
    result = function(**example)
    call = f"<code>{escape(function.__name__)}({escape(arguments)})</code>"
    intro = f"{escape(label)}: " if label else ""
    return f'<p class="worked">{intro}{call} = <strong>{_result(result, bytes_)}</strong></p>'


def _argument(value: Any) -> str:
    if isinstance(value, Architecture):
        return f"<{value.family}, {value.layers} layers, hidden {value.hidden}>"
    if isinstance(value, float) and abs(value) >= 1e6:
        return f"{value:.4g}"
    return f"{value:_}" if isinstance(value, int) and not isinstance(value, bool) else repr(value)


def _result(value: Any, bytes_: bool) -> str:
    if isinstance(value, Line):
        with_ = escape(values_text(value.values, value.formula))
        return (
            f"{value.bytes:,} bytes = {gib(value.bytes, 2)}</strong>, by {escape(value.formula)} with <strong>{with_}"
        )
    if isinstance(value, Term):
        with_ = ", ".join(f"{name} = {number:,.4g}" for name, number in value.values.items())
        return f"{seconds(value.seconds)} s</strong>, by {escape(value.formula)} with <strong>{escape(with_)}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,} bytes = {gib(value, 2)}" if bytes_ and value >= 2**20 else f"{value:,}" + " bytes" * bytes_
    if isinstance(value, float):
        return f"{value:,.4g}" + " bytes" * bytes_
    return escape(str(value))
