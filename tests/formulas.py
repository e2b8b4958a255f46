"""Formulas as the ledger prints them: evaluated with their values, and read into coefficients."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil, log2
from typing import Any

import pytest

from calc.autograd.tape import Size
from calc.models.architecture import Architecture

# A formula in words, for a sum over parts of which `values` names only the largest.
IN_WORDS = re.compile(r"\bsum of\b")
DECIMAL = re.compile(r"\d\.\d")
_TERM = re.compile(r"(\d+(?:\.\d+)?)?(\D\S*)?")


def pow2(n: float) -> float:
    """The next power of two, to which PyTorch's pinned allocator rounds."""
    return 2.0 ** ceil(log2(n)) if n > 0 else 0.0


def pin(n: float, t: float) -> float:
    """A block of pinned memory where those above `t` bytes are not rounded."""
    return n if n > t else pow2(n)


def evaluate(formula: str, values: Mapping[str, Any]) -> float:
    """`formula` with its values put in; NameError for a symbol that has none."""
    known = {"__builtins__": {}, "min": min, "pin": pin, "pow2": pow2}
    return float(eval(formula.replace("·", "*").replace("^", "**"), known, dict(values)))


def holds(phase: Mapping[str, Any], printed: float | None = 0) -> None:
    """Asserts the ledger's promise for a phase as JSON: lines make the moment, formulas and the values shown the lines.

    One byte of rounding for each line, or for each of the parts it counts (`32·(…)`), and the share `printed` of one
    whose formula has a decimal, printed with six digits; formulas in words are left out, all of them if that is None.
    """
    assert phase["device_bytes"] == sum(line["bytes"] for line in phase["lines"])
    assert phase["allocated_bytes"] == sum(x["bytes"] for x in phase["lines"] if x.get("allocated", True))
    for line in phase["lines"]:
        assert line["bytes"] >= 0
        if printed is not None and not IN_WORDS.search(line["formula"]):
            times = line["formula"].partition("·(")[0]
            rounding = int(times) if times.isdigit() else 1
            share = printed if DECIMAL.search(line["formula"]) else 0
            value = evaluate(line["formula"], line["values"])
            assert value == pytest.approx(line["bytes"], rel=0, abs=rounding + share * line["bytes"]), line


def form(text: str) -> tuple[dict[str, float], dict[str, float]]:
    """`16h + 4q + 8 | 2W_q_proj` as coefficients per token and of fixed size, as `terms` gives those of a Size."""
    per_token, _, fixed = text.partition("|")
    return _coefficients(per_token), _coefficients(fixed)


def _coefficients(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for term in map(str.strip, text.split("+")):
        if term not in ("", "0"):
            match = _TERM.fullmatch(term)
            assert match, term
            symbol = (match[2] or "").removeprefix("·")
            assert symbol not in found, f"{symbol} twice in {text}"
            found[symbol] = float(match[1] or 1)
    return found


def terms(size: Size, arch: Architecture | None = None) -> tuple[dict[str, float], dict[str, float]]:
    """A Size's coefficients; what attention puts out is as wide as the queries, `q`, unless the model has MLA."""
    per_token: dict[str, float] = {}
    for symbol, c in size.tokens.items():
        name = "q" if symbol == "o" and arch is not None and arch.mla is None else symbol
        per_token[name] = per_token.get(name, 0) + c
    return {s: c for s, c in per_token.items() if c}, dict(size.fixed)
