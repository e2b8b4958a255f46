"""The guide's words outside its pages' prose, in the language of the page: tables, charts, forms, answers, refusals.

English is the source: a message is found in a catalogue by its English words, so that code that makes a sentence knows
nothing of other languages. What varies in a message is a placeholder:

    {phase}     one message or name, looked up in turn
    {reason*}   one message, or several in a line
    {n#}        a number
    {allowed?}  any text, looked up in turn
    {given!}    any text, left as it is
    {place@}    a file, its line and a field, left as they are

A line of which the catalogue lacks a part stays English as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache, partial
from html import escape, unescape
from typing import NamedTuple

from calc.site.i18n import chinese

CATALOGUES: Mapping[str, Mapping[str, str]] = {"zh": chinese.MESSAGES}

PLACEHOLDER = re.compile(r"\{(\w+)([#*!?@]?)\}")
LETTERS = re.compile("[A-Za-z]{2}")
WORD = re.compile(
    r"(?<![\w./`<-])[a-z]{2,}(?![\w./=-])"
)  # of English: names have capitals, fields and files have signs
# What stands between messages in one line, in English and in Chinese. A space belongs to each, so that no number is
# taken apart.
JOINTS = ((". ", "。"), (" · ", " · "), ("; ", "；"), (": ", "："), (", ", "，"), (" and ", "和"))

ENDS = {".": "。", ":": "："}

KEPT = r"<(script|style|textarea|pre)\b.*?</\1>"  # whose text is no message
TAG = r"</?(?:a|abbr|b|cite|code|em|i|q|s|small|span|strong)\b[^<>]*>"
INLINE = re.compile(rf"<(code|q|cite)\b.*?</\1>|{TAG}", re.S)  # within a line; code and quotations are no messages
BLOCK = re.compile(rf"{KEPT}|(?!{TAG})</?[a-z][^<>]*>", re.S)  # between lines
BROKEN = re.compile(r"<text [^<>]*>((?:<tspan [^<>]*>[^<>]*</tspan>){2,})</text>")  # a sentence of a drawing, in lines
LINE = re.compile("(<tspan [^<>]*>)([^<>]*)(</tspan>)")
PIECE = re.compile(r"[A-Za-z0-9.%-]+ ?|.")  # what a line is not broken within
NAMED = re.compile(r'(\s(?:alt|aria-label|placeholder|title)=")([^"]+)(?=")')
# Inline markup within a line, a character for each: elements that are no messages, and tags.
FIRST_WHOLE, FIRST_TAG = 0xE000, 0xF000
ASIDE, TAGS = re.compile("[\ue000-\uf8ff]"), re.compile("([\uf000-\uf8ff]+)")

BETWEEN = "|".join(re.escape(joint) for joint, _ in JOINTS[:-1])
KINDS = {
    "": rf"(?:(?!{BETWEEN}|{TAGS.pattern[1:-1]}).)+?(?<!\.)",
    "#": r"[\d.,]+",
    "*": ".+?",
    "!": "(?:(?!, allowed).)*?",
    "?": ".*?",
    "@": r"[\w./:<>\[\]-]+(?:: [\w.\[\]-]+)*?",
}


class Template(NamedTuple):
    """A message: the longest text that it always has, its pattern, the kinds of its placeholders, its translation."""

    always: str
    pattern: str
    kinds: Mapping[str, str]
    translation: str


@cache
def _templates(language: str) -> list[Template]:
    """The messages with placeholders, those first that say most themselves."""
    split = [(PLACEHOLDER.split(message), said) for message, said in CATALOGUES[language].items()]
    return [
        Template(max(p[::3], key=len), _pattern(p), dict(zip(p[1::3], p[2::3], strict=True)), said)
        for p, said in sorted(split, key=lambda each: -sum(map(len, each[0][::3])))
        if len(p) > 1
    ]


def _pattern(parts: list[str]) -> str:
    """The pattern of a message that is split into its text and the names and kinds of its placeholders."""
    pattern = re.escape(parts[0])
    for name, kind, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        pattern += f"(?P<{name}>{KINDS[kind]}){re.escape(text)}"
    return pattern


# few of the messages are on any page
_compiled = cache(partial(re.compile, flags=re.S))


@cache
def say(text: str, language: str) -> str:
    """A line in a language; what its catalogue lacks stays as it is."""
    if language not in CATALOGUES or not LETTERS.search(text):
        return text
    plain = text.replace("\xa0", " ")
    core = plain.strip()
    start, end = plain.split(core, 1)
    found = _said(core, language)
    return text if found is None else f"{start}{found}{end}"


def _said(text: str, language: str) -> str | None:
    """A message, or several in a line, in a language; None if the catalogue lacks any of it."""
    for form in (text, text[:1].lower() + text[1:]):
        if (found := _message(form, language)) is not None:
            return found
    if text[-1:] in ENDS and (found := _said(text[:-1], language)) is not None:
        return found + ENDS[text[-1]]
    if len(parts := TAGS.split(text)) > 1:
        spoken = "".join(say(part, language) for part in parts)
        return None if spoken == text else spoken
    for joint, said in JOINTS:
        if joint in text:
            each = [_part(part, language) for part in text.split(joint)]
            return None if None in each else said.join(map(str, each))
    return None


def _message(text: str, language: str) -> str | None:
    """One message in a language, what its placeholders stand for included."""
    found = CATALOGUES[language].get(text)
    if found is not None:
        return found
    for template in _templates(language):
        if template.always in text and (match := _compiled(template.pattern).fullmatch(text)):
            said = {name: _put(text, template.kinds[name], language) for name, text in match.groupdict().items()}
            if None not in said.values():
                return PLACEHOLDER.sub(lambda place, said=said: said[place[1]], template.translation)  # type: ignore[misc]
    return None


def _put(text: str, kind: str, language: str) -> str | None:
    """The text for which a placeholder of a kind stands, in a language."""
    if kind in ("!", "@"):
        return text
    return say(text, language) if kind == "?" else _part(text, language)


def _part(text: str, language: str) -> str | None:
    """A part of a line in a language: a message, or a name or number as it is; None if it has an English word."""
    found = _said(text, language) if LETTERS.search(text) else text
    return text if found is None and not WORD.search(text) else found


def speak(html: str, language: str) -> str:
    """HTML with its lines, and the names and hints in its tags, in a language."""
    if language not in CATALOGUES:
        return html
    html = BROKEN.sub(lambda found: found[0].replace(found[1], _rebroken(found[1], language)), html)
    made, end = [], 0
    for found in BLOCK.finditer(html):
        made += [_line(html[end : found.start()], language), _named(found[0], language)]
        end = found.end()
    return "".join(made) + _line(html[end:], language)


def _rebroken(markup: str, language: str) -> str:
    """A sentence that stands in lines, in a language and in as many lines, which are equally long."""
    lines = LINE.findall(markup)
    text = " ".join(unescape(words) for _, words, _ in lines)
    if (said := say(text, language)) == text:
        return markup
    parts, at, longest = [""] * len(lines), 0, len(said) / len(lines)
    for piece in PIECE.findall(said):
        at += at < len(lines) - 1 and len(parts[at]) + len(piece) / 2 >= longest
        parts[at] += piece
    return "".join(
        f"{start}{escape(part, quote=False)}{end}" for (start, _, end), part in zip(lines, parts, strict=True)
    )


def _named(markup: str, language: str) -> str:
    """Markup with the names and hints of its first tag in a language."""
    tag, end, rest = markup.partition(">")
    return NAMED.sub(lambda it: it[1] + escape(say(unescape(it[2]), language)), tag) + end + rest


def _line(html: str, language: str) -> str:
    """A line of HTML, which has inline markup alone, in a language."""
    if not LETTERS.search(html):
        return html
    aside: dict[str, str] = {}

    def put(found: re.Match[str]) -> str:
        sign = chr((FIRST_WHOLE if found[1] else FIRST_TAG) + len(aside))
        aside[sign] = found[0] if found[1] else _named(found[0], language)
        return sign

    said = say(unescape(INLINE.sub(put, html)), language)
    return ASIDE.sub(lambda found: aside[found[0]], escape(said, quote=False))


def lead(html: str, root: str, language: str, translated: Collection[str]) -> str:
    """HTML whose links lead to pages in a language, where their addresses are among `translated`.

    `root` is the top of the site from there.
    """

    def there(link: re.Match[str]) -> str:
        address = f"{language}/{link[1]}"
        return f'href="{root}{address}' if address in translated else link[0]

    return re.sub(rf'href="{re.escape(root)}([\w./-]+\.html)', there, html)
