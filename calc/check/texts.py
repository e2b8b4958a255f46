"""Rules on the texts of every kind of file: sources that lead somewhere, addresses, dates, unique names."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from calc.catalog.catalog import GPU, Catalog, Model, Node, newer_first
from calc.check.faults import fault

_ADDRESS = re.compile(r"https?://(?:[a-z0-9-]+\.)+[a-z]{2,}(?::[0-9]+)?(?:[/?#]\S*)?", re.IGNORECASE)
# Names that resolve nowhere or only in a private network: RFC 2606, RFC 6761, RFC 6762, and ICANN's .internal.
_NOWHERE = re.compile(
    r"https?://(?:[a-z0-9-]+\.)*(?:example\.[a-z]+|(?:example|test|invalid|localhost|local|internal|lan|home|corp)"
    r"(?=[:/?#]|$))",
    re.IGNORECASE,
)
# Pages that show the next reader something else: search results and chats.
_FOUND = re.compile(
    r"https?://(?:[a-z0-9-]+\.)*(?:google\.[a-z.]+/search|bing\.com/(?:search|chat)|duckduckgo\.com|chatgpt\.com"
    r"|chat\.openai\.com|claude\.ai|gemini\.google\.com|perplexity\.ai|copilot\.microsoft\.com)(?![\w.-])",
    re.IGNORECASE,
)
_LETTER = re.compile(r"[^\W\d_]")
# Addresses of files that only their owner has, and of code that a browser would run.
_PATH = re.compile(r"(?:~?/|[A-Za-z]:\\|(?:file|javascript|vbscript|data):)\S", re.IGNORECASE)
_MARKUP = re.compile(r"[<>|*`\[\]{}\\]")
# Words that stand in for a source that is missing, or was to be written later.
_PLACEHOLDER = re.compile(
    r"\b(?:to ?do|tbd|tba|fix ?me|xxx+|lorem ipsum|placeholder|change ?me|trust me|chat ?gpt|i (?:think|guess))\b|\?\?"
    r"|^(?:no source|not? known|from memory|common knowledge|the (?:internet|web)|some \w+|some(?:one|where|body)\b.*"
    r"|(?:see|as|same as) above|my (?:own )?(?:guess|estimate|head))$",
    re.IGNORECASE,
)
_THREAD = re.compile(r"([\w.-]+/[\w.-]+)(?: (?:issue|pull request) #?([0-9]+))?(?=[ @]|$)")
_LATER = re.compile(r"\b(?:TODO|todo|TBD|tbd|FIXME|fixme|XXX|lorem ipsum)\b")
_DAY = re.compile(r"(?<![\w/.-])[0-9]{4}-[0-9]{2}-[0-9]{2}(?![\w/-])")
FIRST = date(2016, 9, 1)  # PyTorch's first release
A_SUITE = timedelta(days=31)  # the most between the day that a suite is named after and its last record
SOURCE = "an http(s) address, or the title of a document or what was seen where, in words"
ADDRESS = "an http(s) address such as https://arxiv.org/abs/2407.21783"


@cache
def leads_somewhere(text: str) -> bool:
    """True if `text` is an address or the title of something: two words at least, and no placeholder."""
    found = [word.strip("(<\"'") for word in text.split() if "://" in word]
    if not all(address(word.rstrip(").,;>\"'")) for word in found):
        return False
    if any(_PATH.match(word) for word in text.split()) or len(text.strip().splitlines()) > 1:
        return False
    words = [word for word in text.split() if _LETTER.search(word)]
    return bool(found) or (len(words) >= 2 and not _PLACEHOLDER.search(text.strip()))


@cache
def address(text: str) -> bool:
    """True if `text` is an http(s) address of a host that may exist, and no search or chat."""
    return bool(_ADDRESS.fullmatch(text)) and not _NOWHERE.match(text) and not _FOUND.match(text)


def sources(thing: GPU | Node, _: Catalog) -> Iterator[str]:
    """Each value of a card or node has a source that leads somewhere."""
    for name, source in thing.sources.items():
        if not leads_somewhere(source):
            yield fault(f"{name}.source", source, SOURCE)


def model_sources(model: Model, _: Catalog) -> Iterator[str]:
    """A model's source is an address, and the source of its parameter count leads somewhere."""
    if not address(model.source):
        yield fault("source", model.source, ADDRESS)
    if not leads_somewhere(model.parameters_source):
        yield fault("parameters_source", model.parameters_source, SOURCE)


def record_sources(record: Mapping[str, Any], _: Catalog) -> Iterator[str]:
    """A record's source leads somewhere, and its url, if any, is an address."""
    if not leads_somewhere(record["source"]):
        yield fault("source", record["source"], SOURCE)
    if record["url"] is not None and not address(record["url"]):
        yield fault("url", record["url"], ADDRESS)


def thread(record: Mapping[str, Any], _: Catalog) -> Iterator[str]:
    """A source that names a repository on GitHub, or an issue of it, goes with the address of that as url."""
    said = _THREAD.match(record["source"])
    if not said or not record["url"] or not record["url"].startswith("https://github.com/"):
        return
    repository, number = said.groups()
    given = record["url"].casefold()
    if f"github.com/{repository.casefold()}" not in given:
        yield fault("url", record["url"], f"an address of {repository}, which source names")
    elif number and not re.search(rf"/(?:issues|pull|discussions)/{number}\b", given):
        yield fault("url", record["url"], f"that of number {number}, which source names")


def finished(thing: GPU | Node | Model, _: Catalog) -> Iterator[str]:
    """No text of a card, node or model is marked as unfinished."""
    written = {"name": thing.name}
    if isinstance(thing, Model):
        written["licence"] = thing.licence
    else:
        written |= {f"{name}.note": note for name, note in thing.notes.items()}
    yield from _unfinished(written)


def tidy(thing: GPU | Node | Model, _: Catalog) -> Iterator[str]:
    """A name is plain text, with one space between its words, of ASCII: a Cyrillic H looks like the other, and is not.

    A licence is plain text, too.
    """
    named = {"name": thing.name} | ({"licence": thing.licence} if isinstance(thing, Model) else {})
    for field, text in named.items():
        if text != " ".join(text.split()) or not text.isascii() or _MARKUP.search(text):
            yield fault(field, text, "words of ASCII with one space between them, without markup")


def record_finished(record: Mapping[str, Any], _: Catalog) -> Iterator[str]:
    """No text of a record is marked as unfinished."""
    yield from _unfinished({name: record.get(name) for name in ("note", "group", "explanation", "failure")})


def _unfinished(written: Mapping[str, str | None]) -> Iterator[str]:
    for name, text in written.items():
        if text and (found := _LATER.search(text)):
            yield fault(name, text, f"a text without {found[0]}")


def dates(record: Mapping[str, Any], _: Catalog) -> Iterator[str]:
    """The date is one that has been, and near the date in the id, if that has one: a suite may go on the next day.

    A date that passes once passes for good, as today is in the past from tomorrow on.
    """
    if (given := record.get("date")) is None:
        return
    if wrong := list(day(given, "date")):
        yield from wrong
        return
    named = re.search(r"(?<![0-9])[0-9]{4}-[0-9]{2}-[0-9]{2}(?![0-9])", record["id"])
    if named and abs(date.fromisoformat(given) - date.fromisoformat(named[0])) > A_SUITE:
        yield fault("date", given, f"within {A_SUITE.days} days of {named[0]}, which id says")


def day(given: str, field: str) -> Iterator[str]:
    """A date is a day of the calendar that has been, since PyTorch is there."""
    today = (datetime.now(UTC) + timedelta(hours=14)).date()  # the latest date anywhere on Earth
    try:
        passed = FIRST <= date.fromisoformat(given) <= today
    except ValueError:
        yield fault(field, given, "a day of the calendar, such as 2026-11-22")
        return
    if not passed:
        yield fault(field, given, f"{FIRST} to {today}, today")


def days(thing: GPU | Node | Model, _: Catalog) -> Iterator[str]:
    """A day that a source or a note tells of has been: that of a visit, say."""
    if isinstance(thing, Model):
        written: Mapping[str, str] = {"source": thing.source, "parameters_source": thing.parameters_source}
    else:
        notes = {f"{name}.note": note for name, note in thing.notes.items()}
        written = {f"{name}.source": source for name, source in thing.sources.items()} | notes
    yield from _told(written)


def record_days(record: Mapping[str, Any], _: Catalog) -> Iterator[str]:
    """A day that a record's source or note tells of has been."""
    yield from _told({name: record.get(name) or "" for name in ("source", "note")})


def _told(written: Mapping[str, str]) -> Iterator[str]:
    for name, text in written.items():
        for given in _DAY.findall(text):
            yield from day(given, name)


def own_names(catalog: Catalog, root: Path) -> Iterator[str]:
    """No two cards, nodes or models have the same name, as they do when a copied file is not changed throughout."""
    kinds: Mapping[str, Mapping[str, GPU | Node | Model]] = {
        "hardware/gpus": catalog.gpus, "hardware/nodes": catalog.nodes, "models": catalog.models,
    }  # fmt: skip
    for folder, things in kinds.items():
        named = {f"{folder}/{thing.id}.yaml": thing.name for thing in things.values()}
        for blamed, other in _repeated(((name.casefold(), place) for place, name in named.items()), root):
            yield f"{blamed}: {fault('name', named[blamed], f'a name of its own, as this is that of {other}')}"


def own_records(catalog: Catalog, root: Path) -> Iterator[str]:
    """No record occurs twice under two ids."""
    messages = [((record["url"], record["quote"]), record) for record in catalog.exhausted]
    alike: dict[Hashable, list[Mapping[str, Any]]] = {}
    for record in catalog.measurements:
        alike.setdefault(tuple(map(record.get, ("metric", "measured_bytes", "source", "quote"))), []).append(record)
    jobs = [
        (str({**record, "id": None}), record) for records in alike.values() if len(records) > 1 for record in records
    ]
    for found in (messages, jobs):
        ids = {catalog.places[record["id"]]: record["id"] for _, record in found}
        for blamed, other in _repeated([(key, catalog.places[record["id"]]) for key, record in found], root):
            yield f"{blamed}: {fault('id', ids[blamed], f'a record of its own, as this is that of {other}')}"


def _repeated(claims: Iterable[tuple[Hashable, str]], root: Path) -> Iterator[tuple[str, str]]:
    """Pairs of places that claim the same key, the one to blame first."""
    owners: dict[Hashable, str] = {}
    for key, place in claims:
        if (owner := owners.setdefault(key, place)) != place:
            yield newer_first(root, owner, place)
