"""The addresses that a style loads: all those in CSS, whether of a file, a `<style>` or an attribute."""

from __future__ import annotations

import re

COMMENT = re.compile(r"/\*.*?(?:\*/|\Z)", re.S)
ESCAPED = re.compile(r"\\(?:([0-9a-fA-F]{1,6})\s?|(.))", re.S)
TEXT = r"""(?:"([^"]*)"|'([^']*)')"""
LOADED = re.compile(rf"""(?:url|src)\(\s*(?:{TEXT}|([^)"'\s]*))|@import\s*{TEXT}""", re.I)
SETS, TEXTS = re.compile(r"image-set\(([^;}]*)", re.I), re.compile(TEXT)


def loaded(css: str) -> list[str]:
    """The addresses that CSS names, as written there."""
    if not re.search(r"url|src|@|image-set|\\", css, re.I):
        return []
    plain = ESCAPED.sub(_character, COMMENT.sub(" ", css))
    found = [match for match in LOADED.findall(plain)]
    found += [match for images in SETS.findall(plain) for match in TEXTS.findall(LOADED.sub("", images))]
    return [next(filter(None, texts), "") for texts in found]


def _character(escaped: re.Match[str]) -> str:
    """The character that an escape stands for; a quote becomes a space, so that it ends no string."""
    code, plain = escaped.groups()
    said = chr(min(int(code, 16), 0x10FFFF)) if code else plain
    return " " if said in "\"'" else str(said)
