"""The lengths of a data set's sequences, counted: the field `lengths` of a scenario.

A line of the data is a number of tokens, a list of token ids, or a mapping with one of these under a name that data
sets use; texts and conversations need the tokenizer that will read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from calc.base.reading import decode, parse_json
from calc.base.schema import InputError, show

COUNTS = ("length", "num_tokens", "n_tokens", "token_count", "input_length", "input_ids")
TEXTS = ("text", "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "chosen")
KEPT = 512  # different lengths that are kept as they are

Tokenize = Callable[[Any], int]


def counted(raw: Iterable[bytes], where: str, tokenize: Tokenize | None = None) -> Counter[int]:
    """The number of sequences of each length in the lines of a data set; blank lines count for nothing.

    A pair of a chosen and a rejected response is two sequences. Raises InputError, one line with the line's number.
    """
    found: Counter[int] = Counter()
    for number, line in enumerate(raw, 1):
        place = f"{where}:{number}"
        if text := decode(line, place).strip():
            found.update(_lengths(parse_json(text, where, number), place, tokenize))
    if not found:
        raise InputError(f"{where}: given no sequence, allowed: a line of JSON for each")
    return found


def _lengths(sample: Any, place: str, tokenize: Tokenize | None) -> Iterator[int]:
    """The lengths of one line's sequences."""
    if isinstance(sample, Mapping):
        pair = [name for side in ("chosen", "rejected") for name in (f"{side}_input_ids", f"{side}_length")]
        names = [name for name in (*pair, *COUNTS) if name in sample]
        if not names and tokenize:
            yield from (max(1, tokenize(text)) for text in _texts(sample, place))
            return
        if not names:
            texts = [name for name in TEXTS if name in sample]
            given = (
                f"text under {show(texts[0])} and no tokenizer" if texts else f"fields {', '.join(map(show, sample))}"
            )
            raise InputError(f"{place}: given {given}, allowed: one of {', '.join(COUNTS)}, or text with --tokenizer")
        pairs = [name for name in names if name in pair]
        yield from (_length(sample[name], f"{place}: {name}") for name in (pairs or names[:1]))
    else:
        yield _length(sample, place)


def _length(value: Any, place: str) -> int:
    length = len(value) if isinstance(value, list) else value
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise InputError(f"{place}: given {show(value)}, allowed: a number of tokens, or their ids, at least one")
    return length


def _texts(sample: Mapping[str, Any], place: str) -> Iterator[Any]:
    """The texts of one line as sequences: text, or a conversation as a list of messages."""
    if "chosen" in sample and "rejected" in sample:
        for side in ("chosen", "rejected"):
            yield _after(sample.get("prompt"), sample[side], f"{place}: {side}")
    elif "prompt" in sample and "completion" in sample:
        yield _after(sample["prompt"], sample["completion"], f"{place}: completion")
    elif whole := sample.get("text") or sample.get("messages") or sample.get("conversations"):
        yield _after(None, whole, place)
    elif parts := [sample[name] for name in ("instruction", "input", "output") if sample.get(name)]:
        yield _after(None, "\n".join(map(str, parts)), place)
    else:
        raise InputError(f"{place}: given fields {', '.join(map(show, sample))}, allowed: one of {', '.join(TEXTS)}")


def _after(prompt: Any, answer: Any, place: str) -> Any:
    """A prompt and its answer, both texts or both lists of messages, as one sequence."""
    if isinstance(answer, str) and isinstance(prompt, str | None):
        return (prompt or "") + answer
    if isinstance(answer, list) and isinstance(prompt, list | None):
        return [_message(message, place) for message in (prompt or []) + answer]
    raise InputError(f"{place}: given {show(answer)}, allowed: text, or a list of messages, as its prompt is")


ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's words


def _message(message: Any, place: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise InputError(f"{place}: given {show(message)}, allowed: a message, with role and content")
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise InputError(f"{place}: given a message without the text of role and content, allowed: both")
    return {"role": ROLES.get(role, role), "content": content}


def tokenizer(name: str) -> Tokenize:
    """The number of tokens that the tokenizer `name`, a folder or a name of the hub, makes of a text or conversation.

    A conversation goes through the tokenizer's chat template. Raises InputError without Transformers, which only this
    needs, or if it has no such tokenizer.
    """
    try:
        from transformers import AutoTokenizer  # type: ignore[import-not-found]  # a reader's own
    except ImportError:
        raise InputError("--tokenizer: given without the package transformers, allowed: with it installed") from None
    try:
        made = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise InputError(
            f"--tokenizer: given {show(name)}, which cannot be read: {str(error).splitlines()[0]}"
        ) from None

    def count(text: Any) -> int:
        ids = made(text)["input_ids"] if isinstance(text, str) else made.apply_chat_template(text, tokenize=True)
        return len(ids["input_ids"] if isinstance(ids, Mapping) else ids)

    return count


def binned(found: Mapping[int, int]) -> list[tuple[int, int]]:
    """Pairs of a length and the sequences that have it, shortest first, at most some KEPT of them.

    Where there are more, those of a bin of equal width stand at the mean of their bin, rounded; the longest stays.
    """
    longest = max(found)
    width = -(-longest // KEPT) if len(found) > KEPT else 1
    bins: dict[int, list[int]] = {}
    for length, count in found.items():
        bin = bins.setdefault(-1 if length == longest else length // width, [0, 0])
        bin[0] += length * count
        bin[1] += count
    merged: Counter[int] = Counter()
    for tokens, sequences in bins.values():
        merged[round(tokens / sequences)] += sequences
    return sorted(merged.items())


def text(found: Mapping[int, int]) -> str:
    """The histogram as a YAML file that a scenario's `lengths` can name, with a summary in its first line."""
    samples = sum(found.values())
    mean = sum([length * count for length, count in found.items()]) / samples
    rank = 0
    for most in sorted(found):
        rank += found[most]
        if rank >= 0.99 * samples:
            break
    long = f"99 % have at most {most:,}, the longest {max(found):,}"
    head = f"# {samples:,} sequences, {mean:,.1f} tokens on average; {long}"
    pairs = "".join(f"  - [{length}, {count}]\n" for length, count in binned(found))
    return f"{head}\ncounts:\n{pairs}"
