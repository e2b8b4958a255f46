"""The catalog's name that somebody may have meant: never another card or model, whose letters or numbers differ."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from calc.base.schema import LONGEST

PARTS = re.compile(r"[a-z]+|[0-9]+(?:\.[0-9]+)?")
MEMORY = re.compile(r"([0-9]+) ?gi?b\b")
SOCKET = re.compile(r"\b(sxm|hbm)[0-9]e?")  # the generation of a socket or memory: SXM4, HBM3
# Words that people and drivers add, and that tell no card or model from another of the same numbers.
ADDED = frozenset(
    {"nvidia", "amd", "geforce", "tesla", "instinct", "pcie", "sxm", "hbm", "instruct", "chat", "it", "base", "hf"}
)
TYPED = 3  # characters of a word or number from which on it may be misspelt, or cut short
ALIKE = 0.5  # of difflib's measure
FEW = 4  # names that are put forward at once


# What trains elsewhere, and why it is no GPU of the catalog.
ELSEWHERE = (
    (
        re.compile(r"\b(?:apple|i?mac|macbook|mps|m[1-9][ -]?(?:pro|max|ultra)?)\b"),
        "Apple's GPUs are not modelled, which share the memory of the whole Mac",
    ),
    (re.compile(r"\btpu"), "TPUs are not modelled, where XLA plans the memory"),
    (re.compile(r"\bcpus?\b"), "a job without a GPU is not modelled"),
)


def elsewhere(name: str) -> str:
    """The reason why a name is that of no GPU which could be in the catalog; empty if it may be one."""
    given = name.casefold()[:LONGEST]
    return next((why for pattern, why in ELSEWHERE if pattern.search(given)), "")


def meant(name: str, names: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the nearest of `names` that differs from `name` by a typo alone; empty for none.

    Of names that all begin with `name` a few are told, as none of them is nearer.
    """
    given = name.casefold()[:LONGEST]
    found = [(score, known) for known in names if (score := likeness(given, known.casefold())) >= ALIKE]
    best = max(found, key=lambda pair: pair[0], default=None)
    if best is None:
        return ""
    alike = [known for score, known in found if score == best[0] > 1 and known.casefold().startswith(f"{given}-")]
    some = alike if 1 < len(alike) <= FEW else [best[1]]
    return f"; did you mean {', '.join(map(repr, some))}?"


def likeness(given: str, known: str) -> float:
    """The nearness of two names, from 0 to 1, and 2 for a beginning; 0 if a model's letter or number differs."""
    given, memory = SOCKET.sub(r"\1", given), MEMORY.findall(given)
    ours, left = PARTS.findall(MEMORY.sub(r"\1 ", given)), PARTS.findall(known)
    if "".join(ours) == "".join(left) or re.sub(r"\W", "", given) == re.sub(r"\W", "", known):
        return 2
    said = []
    for part in ours:
        match = part if part in left else misspelt(part, left)
        if match:
            left.remove(match)
            said.append(part)
        elif part not in ADDED and part not in memory:
            return 0
    other_size = len(said) < len(ours) and memory and any(part.isdecimal() for part in left)
    other_letter = any(len(part) == 1 and part.isalpha() and part != "b" for part in left)  # b: billions
    if not said or other_size or other_letter:
        return 0
    return 2 if known.startswith(given) else difflib.SequenceMatcher(None, "".join(said), known).ratio()


def misspelt(part: str, others: Iterable[str]) -> str:
    """The word that `part` is a misspelling of, or the word or number that it is the beginning of; empty for none."""
    same = [other for other in others if other.isalpha() == part.isalpha()]
    begun = [other for other in same if other.startswith(part) and len(part) >= TYPED - part.isalpha()]
    if begun or not part.isalpha() or len(part) < TYPED:
        return next(iter(begun), "")
    return next(iter(difflib.get_close_matches(part, [other for other in same if len(other) >= TYPED], n=1)), "")
