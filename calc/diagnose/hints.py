"""Hints at a job in passing: in a question's own words, or by the files that a traceback runs through.

People write "LoRA on 8x A100, batch size 1, ZeRO-3" above an error and paste no command. Each hint is a field that no
command states; what is taken from it is named as assumed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from calc.base.units import GiB
from calc.catalog.catalog import Catalog

LARGEST_NODE = 16  # cards
LONGEST = 50_000  # characters in which models and numbers are looked for


class Hint(NamedTuple):
    """A field and its value where a pattern is found; of a field the first hint counts."""

    field: str
    value: Any
    pattern: str


HINTS: tuple[Hint, ...] = (
    Hint(
        "method",
        "qlora",
        r"\bq-?lora\b|\bLinear4bit\b|bitsandbytes/(?:autograd/_)?functions?(?:al)?\.py\", line \d+, in \w*4bit",
    ),
    Hint("method", "lora", r"\blora\b|peft/tuners/lora|peft/peft_model\.py"),
    Hint("method", "full", r"\bfull[- ](?:parameter )?(?:fine-?tun|sft)|全参|全量微调"),
    Hint("sharding", "zero3", r"\bzero[- _]?(?:stage[- _]?)?3\b|zero/stage3\.py|zero/partition_parameters\.py"),
    Hint("sharding", "zero2", r"\bzero[- _]?(?:stage[- _]?)?2\b|zero/stage_1_and_2\.py"),
    Hint("sharding", "zero1", r"\bzero[- _]?(?:stage[- _]?)?1\b"),
    Hint("sharding", "fsdp2", r"\bfsdp2\b|_composable/fsdp|fsdp/_fully_shard"),
    Hint("sharding", "fsdp1", r"\bfsdp\b|distributed/fsdp/"),
    Hint(
        "offload.optimizer",
        True,
        r"(?:\bcpu[- _]?offload(?:ing)?|offload(?:ing)? to (?:the )?cpu|zero[- _]?(?:[23][- _]?)?offload)\b"
        r"(?!['\": =]{1,4}(?:false|no))",
    ),
    # programs by name; `unsloth/…` is a model that others load, too
    Hint("trainer", "unsloth", r"\bunsloth\b(?![/-])"),
    Hint("trainer", "llamafactory", r"\bllama[- ]?factory\b"),
    Hint("trainer", "axolotl", r"\baxolotl\b(?!/)"),
    Hint("trainer", "ms-swift", r"\bms-swift\b"),
    Hint("trainer", "torchtune", r"\btorchtune\b"),
    Hint("trainer", "torchtitan", r"\btorchtitan\b"),
    Hint("framework", "verl", r"\bverl\b"),
    Hint("framework", "openrlhf", r"\bopenrlhf\b"),
    Hint("framework", "trl", r"\btrl\b"),
    Hint("rollout.engine", "vllm", r"\bvllm(?:_mode)?\b|\buse_vllm ?[=:]? ?true\b"),
    Hint("checkpointing", "full", r"torch/utils/checkpoint\.py|with gradient[- ]checkpointing|开启?了?(?:激活)?重计算"),
)
PROGRAMS = ("framework", "trainer")  # of a job there is one
MACHINE = ("host_memory",)  # what no command states
_HINTS = tuple((re.compile(hint.pattern, re.IGNORECASE | re.ASCII), hint) for hint in HINTS)
# Numbers in words: the field, and where its number stands. A server of vLLM or SGLang has options of its own.
_IS = r" ?(?:of|is|to|=|:|：|为|是|设为|只能设置)? ?"
_OTHER_BATCH = "".join(rf"(?<!{word} )" for word in ("global", "total", "effective", "train", "rollout", "mini"))
_LENGTHS = (
    r"(?:(?:\b(?:max )?seq(?:uence)?[- _]?len(?:gth)?|\bcontext length|\bcutoff_len|\bmax(?:imum)?[- _]length)"
    r"|(?:序列|截断|最大)长度)"
)
NUMBERS: tuple[tuple[str, str], ...] = (
    ("micro_batch", rf"{_OTHER_BATCH}\bbatch[- _]?size{_IS}(\d{{1,4}})\b"),
    ("micro_batch", r"\bbatch size per device = (\d{1,4})\b"),  # what Unsloth's and Transformers' trainers log
    ("gpus", r"\bNum GPUs(?: used)? = (\d{1,3})\b"),
    ("tensor_parallel", r"--(?:tensor-parallel-size|tp-size|tp)[ =](\d{1,3})\b"),
    ("gpus", r"--(?:tensor-parallel-size|tp-size|tp)[ =](\d{1,3})\b"),
    ("seq_len", rf"--(?:max-model-len|context-length)[ =](\d{{2,7}})\b|{_LENGTHS}{_IS}(\d{{2,7}})\b"),
    ("prompt_len", rf"\bmax_prompt_len(?:gth)?{_IS}(\d{{2,6}})\b"),
    ("response_len", rf"\bmax_(?:response|completion)_len(?:gth)?{_IS}(\d{{2,6}})\b"),
    ("seq_len", r"\b(\d{1,3}k) (?:context|tokens|sequence)|\b(\d{1,3}k)的?(?:序列|上下文|长度)"),
    ("rollout.n", rf"\bnum_generations?{_IS}(\d{{1,4}})\b"),
    ("host_memory", r"\b(\d{2,5}) ?Gi?B? (?:of )?(?:cpu|host|system) (?:memory|ram)\b"),
    ("host_memory", r"(?<!GPU)(?<!显卡)内存[为是有共只]{0,2}[:： (（]?(\d{2,5}) ?Gi?B?\b"),
)
# A node's memory, used and whole, as Ray prints it where it ends a worker. Its GB are GiB: of a node with 1081 GB it
# says 1006.84GB.
RAY_NODE = re.compile(
    r"([\d.]{1,9}) ?GB / ([\d.]{1,9}) ?GB \([01]\.\d{1,9}\),\s{0,9}which exceeds the memory usage threshold"
)
_NUMBERS = tuple((name, re.compile(pattern, re.IGNORECASE | re.ASCII)) for name, pattern in NUMBERS)
_COUNTS = {
    "单": 1,
    "一": 1,
    "双": 2,
    "两": 2,
    "三": 3,
    "四": 4,
    "五": 5,
    "六": 6,
    "七": 7,
    "八": 8,
    "one": 1,
    "single": 1,
    "two": 2,
    "four": 4,
    "eight": 8,
}
_BEHIND = r"(\d{1,4}|[单一双两三四五六七八]|one|single|two|four|eight)"
_COUNT = rf"(?<![A-Za-z0-9_.]){_BEHIND}"
_CARDS = (
    re.compile(rf"{_COUNT} ?(?:张|块|片)?(?:显?卡)", re.IGNORECASE),
    re.compile(rf"{_COUNT} (?:gpus?|cards?)\b(?! ?:?\d)", re.IGNORECASE),
)
_NODES = re.compile(rf"{_COUNT} ?(?:机|台|(?:nodes?|machines?)\b)", re.IGNORECASE)
_LISTED = re.compile(r"\bdevice\(s\): ([^\n]+)")  # of `trl env`, each card by its name
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
_QWEN = re.compile("(?:通义)?千问")
_SIZE = re.compile(r"(?<![a-z0-9])\d+(?:\.\d+)?[bm](?![a-z0-9])|\dx\d+b", re.IGNORECASE)
_LONGEST_NAME = 5  # words of a model's name


def fields(text: str) -> Iterator[tuple[str, Any]]:
    """The fields that hints tell, each once."""
    told: set[str] = set()
    for pattern, hint in _HINTS:
        if hint.field not in told and pattern.search(text):
            told.add(hint.field)
            yield hint.field, hint.value
    for name, number in _NUMBERS:
        seen = {next(group for group in match.groups() if group) for match in number.finditer(text[:LONGEST])}
        if len(seen) == 1 and (value := _integer(seen.pop())):
            yield name, value


def node(text: str) -> tuple[int, int] | None:
    """The bytes in use and in all of the node on which Ray ended a worker, by its message; None if there is none."""
    found = RAY_NODE.search(text)
    return (round(float(found[1]) * GiB), round(float(found[2]) * GiB)) if found else None


def _integer(given: str) -> int:
    return int(given[:-1]) * 1024 if given[-1] in "kK" else int(given)


def gpus(text: str, card: str) -> int | None:
    """The number of cards that a text names beside `card`, the pattern of its name, or alone: `8x A100`, `四卡`."""
    text = text[:LONGEST]
    if (listed := _LISTED.search(text)) and len({*(cards := listed[1].split(", "))}) == 1:
        return len(cards)
    grid = card and re.search(
        rf"(?<![\w.])(\d{{1,3}}) ?[x×*] ?(\d{{1,2}}) ?[x×*]? ?{card}(?![A-Za-z0-9])", text, re.IGNORECASE
    )
    if grid:
        return (int(grid[1]) * int(grid[2])) or None
    beside = (
        rf"{_COUNT} ?(?:x|×|\*|张|块|片|卡)? ?(?:nvidia |geforce |tesla |rtx )*{card}(?![A-Za-z0-9])",
        rf"{card}(?:[- ](?:sxm\d?|pcie|\d{{2,3}} ?gb?))*\)? ?(?:x|×|\*) ?{_BEHIND}(?![\w.])",
    )
    found: set[int] = set()
    for pattern in (*((re.compile(each, re.IGNORECASE) for each in beside) if card else ()), *_CARDS):
        found |= {_counted(match[1]) for match in pattern.finditer(text)}
        if found:
            break
    found.discard(0)
    nodes = {_counted(match[1]) for match in _NODES.finditer(text)} - {0}
    if len(found) != 1:
        return None
    count = found.pop()
    # beside nodes people count the cards of one, or all of them where one node has no room for as many
    return count * nodes.pop() if len(nodes) == 1 and count <= LARGEST_NODE else count


def _counted(given: str) -> int:
    return _COUNTS.get(given.casefold()) or (int(given) if given.isdigit() else 0)


def models(text: str, catalog: Catalog) -> list[str]:
    """The catalog's models that a text names with their sizes, as it spells them, in order."""
    words = _WORD.findall(_QWEN.sub("Qwen", text[:LONGEST]))
    found: dict[str, str] = {}
    start = 0
    while start < len(words):
        taken = 1
        for count in range(min(_LONGEST_NAME, len(words) - start), 0, -1):
            name = "-".join(words[start : start + count]).strip("._/-")
            if not _SIZE.search(name):
                continue
            if id := catalog.names.listed.get(name.casefold()) or catalog.names.alike(name.rpartition("/")[2]):
                found.setdefault(id, " ".join(words[start : start + count]).strip("._/-"))
                taken = count
                break
        start += taken
    return [*found.values()]
