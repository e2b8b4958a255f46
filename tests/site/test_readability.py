"""The list of sentences to look at: what counts as a sentence, as long and as passive."""

from __future__ import annotations

from pathlib import Path

from calc.site.build import readability

PAGE = """# A heading of its own

**The short answer.** It takes [[ peak("a") ]] of each card.
The weights are kept whole, e.g. by ZeRO-2, and are never read.

| a table | is no sentence. |

```sh
code is none. Either.
```

- [Links](x.md) are read as words; `code.py` stays out.
- Two items
"""


def test_sentences_are_those_of_the_prose() -> None:
    texts = [s.text for s in readability.sentences("x.md", readability.OPENS.sub("", PAGE))]
    assert texts == [
        "It takes … of each card.",
        "The weights are kept whole, e.g. by ZeRO-2, and are never read.",
        "Two items",
    ]


def test_words_and_passives_are_counted() -> None:
    _, second, _ = readability.sentences("x.md", readability.OPENS.sub("", PAGE))
    assert (second.words, second.passives) == (12, 2)
    assert readability.Sentence("x.md", "GPUs need memory; they are many.").passives == 0


def test_the_list_has_first_longest_and_most_passive_sentences(tmp_path: Path) -> None:
    """Translations and generated pages stay out; `only` picks pages."""
    long = "This sentence goes on " + "and on " * 30 + "to its end."
    (tmp_path / "a.md").write_text(
        f"---\ndescription: A page of sentences.\n---\n# A\n\nFirst is asked. {long} [% set x = 1 %]It mends that.\n",
        "utf-8",
    )
    (tmp_path / "a.zh.md").write_text("---\ndescription: A page of sentences.\n---\n# A\n\nNot this one.\n", "utf-8")
    (tmp_path / "b.md").write_text(
        "---\ndescription: A page made by code.\ngenerated: true\n---\n# B\n\nNor this one.\n", "utf-8"
    )
    found = list(readability.report(tmp_path))
    assert "  a.md: First is asked." in found
    assert any(line.startswith("  67 words, a.md: This sentence") for line in found)
    assert "  1 of 3 words, a.md: First is asked." in found
    assert "  mends, a.md: It mends that." in found
    assert not any("this one" in line for line in found)
    assert next(readability.report(tmp_path, "nowhere")) == "0 sentences, 0.0 words each"
