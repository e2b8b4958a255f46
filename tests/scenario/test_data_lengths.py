"""Lengths counted from a data set, as `python -m calc lengths` writes them and a scenario reads them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from commands import Run

from calc.base.reading import parse_yaml
from calc.base.schema import InputError
from calc.scenario.data_lengths import KEPT, binned, counted, text, tokenizer
from calc.scenario.lengths import known

LINES = [b'{"input_ids": [5, 6, 7]}', b"12", b"[1, 2]", b"", b'{"num_tokens": 12, "id": "x"}']


def words(given: Any) -> int:
    """A tokenizer that counts words."""
    return len(given.split()) if isinstance(given, str) else sum(1 + words(message["content"]) for message in given)


def test_lengths_are_counted_whatever_they_stand_under() -> None:
    assert counted(LINES, "d.jsonl") == Counter({12: 2, 3: 1, 2: 1})


def test_a_pair_is_two_sequences() -> None:
    assert counted([b'{"chosen_length": 4, "rejected_input_ids": [1], "length": 99}'], "d") == Counter({4: 1, 1: 1})


def test_texts_and_conversations_go_through_the_tokenizer() -> None:
    lines = [
        b'{"text": "a b c"}',
        b'{"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]}',
        b'{"conversations": [{"from": "human", "value": "a"}]}',
        b'{"instruction": "a b", "input": "", "output": "c d e"}',
        b'{"prompt": "a ", "completion": "b c d e f g"}',
        b'{"prompt": "a b ", "chosen": "c d e f g h", "rejected": "c d e f g h i"}',
        b'{"text": ""}',
    ]
    found = counted(lines[:-1], "d", words)
    assert sorted(found.elements()) == [2, 3, 5, 5, 7, 8, 9]
    with pytest.raises(InputError, match=r"^d:1: given fields 'text', allowed: one of text, messages"):
        counted(lines[-1:], "d", words)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "hi"}', "d.jsonl:2: given text under 'text' and no tokenizer, allowed: one of length, num_tokens"),
        (b'{"a": 1}', "d.jsonl:2: given fields 'a', allowed: one of length"),
        (b"0", "d.jsonl:2: given 0, allowed: a number of tokens"),
        (b'{"length": true}', "d.jsonl:2: length: given true, allowed: a number of tokens"),
        (b"{", "d.jsonl:2: not JSON"),
        (b"\xff", "d.jsonl:2:1: not UTF-8: byte 0xff"),
    ],
)
def test_a_line_that_says_no_length_is_named(line: bytes, said: str) -> None:
    with pytest.raises(InputError) as caught:
        counted([b"3", line], "d.jsonl")
    assert str(caught.value).startswith(said)


def test_no_sequence_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="given no sequence"):
        counted([b" \n"], "d.jsonl")


def test_many_lengths_are_binned_without_loss_of_the_mean_the_number_and_the_longest() -> None:
    every = dict.fromkeys(range(1, 6001), 1)
    pairs = binned(every)
    kept = known({"counts": pairs})
    assert len(pairs) <= KEPT + 1
    assert (kept.samples, kept.longest) == (6000, 6000)
    assert kept.mean == pytest.approx(3000.5, rel=1e-3)
    assert binned({7: 2, 3: 1}) == [(3, 1), (7, 2)]


def test_what_is_written_is_what_a_scenario_reads() -> None:
    found = counted(LINES, "d.jsonl")
    assert known(parse_yaml(text(found), "x")) == known({"counts": sorted(found.items())})
    assert text(found).startswith("# 4 sequences, 7.2 tokens on average; 99 % have at most 12, the longest 12\n")


def test_the_command(run: Callable[..., Run], tmp_path: Any) -> None:
    data = tmp_path / "data.jsonl"
    data.write_bytes(b"\n".join(LINES))
    assert run("lengths", str(data), "--json").out == '{"counts": [[2, 1], [3, 1], [12, 2]]}\n'
    assert run("lengths", "-", stdin=b"3").out.endswith("counts:\n  - [3, 1]\n")
    assert "no such file" in run("lengths", str(tmp_path / "none.jsonl")).refused()


def test_without_transformers_the_tokenizer_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="given without the package transformers, allowed: with it installed"):
        tokenizer("any")


def test_the_tokenizer_is_that_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is encoded as it is, a conversation by the chat template."""

    class Made:
        def __call__(self, given: str) -> dict[str, list[int]]:
            return {"input_ids": [0] * len(given)}

        def apply_chat_template(self, given: list[Any], *, tokenize: bool) -> list[int]:
            assert tokenize
            return [0] * 100 * len(given)

    def load(name: str) -> Made:
        if name != "here":
            raise OSError("not a folder\nand no name")
        return Made()

    module = ModuleType("transformers")
    vars(module)["AutoTokenizer"] = SimpleNamespace(from_pretrained=load)
    monkeypatch.setitem(sys.modules, "transformers", module)
    count = tokenizer("here")
    assert (count("abc"), count([{}, {}])) == (3, 200)
    with pytest.raises(InputError, match=r"given 'there', which cannot be read: not a folder$"):
        tokenizer("there")
