"""Settings in Python code: the calls of Transformers, PEFT, TRL and Unsloth that people paste, as flags of a command.

A keyword of `TrainingArguments` and of TRL's configurations is called as the flag that sets it, so that what reads
commands (`calc/diagnose/trainer.py`) reads these, too. Nothing is run: a call is parsed, and of its arguments only
literals count, and names to which the text assigns one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from calc.diagnose.flags import Flags

LONGEST = 10_000  # characters of a call
MOST = 100  # calls of a text that are read
_CALL = re.compile(
    r"\b(?:(?:Seq2Seq|Unsloth)?TrainingArguments|(?:SFT|DPO|GRPO|KTO|ORPO|CPO|GKD|Reward)(?:Config|Trainer)|LoraConfig|"
    r"BitsAndBytesConfig|(?:\w+\.)?(?:from_pretrained|get_peft_model)|LLM)\("
)
_CONSTANT = re.compile(r"""(?m)^[ \t]*(\w+)[ \t]*=[ \t]*("[^"\n]*"|'[^'\n]*'|[\d_.e-]+|True|False)[ \t]*(?:#.*)?$""")
# The class of a task, and the command of TRL that runs it.
_PROGRAMS = {"SFT": "sft", "DPO": "dpo", "GRPO": "grpo", "KTO": "kto", "Reward": "reward"}
_SCRIPTS = {"ORPO": "orpo.py", "CPO": "cpo.py", "GKD": "gkd.py"}
_TASK = re.compile(r"(SFT|DPO|GRPO|KTO|ORPO|CPO|GKD|Reward)(?:Config|Trainer)")
_ADAPTER = {"r": "lora_r", "target_modules": "lora_target_modules", "lora_dropout": "lora_dropout"}
_LOADED = ("torch_dtype", "dtype", "attn_implementation", "load_in_4bit", "use_flash_attention_2")
_QUANTIZED = {"load_in_4bit": "load_in_4bit", "bnb_4bit_use_double_quant": "use_bnb_nested_quant"}


class Call(NamedTuple):
    """A call: its name, its first argument, the keywords whose values are known, and the names of all."""

    name: str
    first: Any
    keywords: Mapping[str, Any]
    given: frozenset[str]


def settings(text: str) -> Flags | None:
    """The settings that the Python code of a text makes, as flags; None if it makes none."""
    found: dict[str, str] = {}
    program = ""
    for call in calls(text):
        owner, _, name = call.name.rpartition(".")
        unsloth = owner == "FastLanguageModel" or owner == "FastModel"
        if task := _TASK.fullmatch(name):
            program = f"trl {_PROGRAMS[task[1]]}" if task[1] in _PROGRAMS else _SCRIPTS[task[1]]
        if name == "LoraConfig" or (name == "get_peft_model" and unsloth):
            found |= {"use_peft": "true", **({"unsloth": "true"} if unsloth else {}), **_named(call, _ADAPTER)}
            if recomputed := call.keywords.get("use_gradient_checkpointing"):
                found |= {"gradient_checkpointing": "true"}
                found |= {"use_unsloth_gc": "true"} if recomputed == "unsloth" else {}
        elif name == "BitsAndBytesConfig":
            found |= _named(call, _QUANTIZED)
        elif name == "from_pretrained":
            _loaded(found, call, unsloth=unsloth)
        elif name.endswith("Trainer"):
            _model(found, call.keywords.get("model", call.first))
            if "reward_funcs" in call.given:
                found["reward_funcs"] = "own"
        elif name.endswith(("Config", "Arguments")):
            found |= {key: _word(value) for key, value in call.keywords.items()}
    return Flags(found, {}, program) if found else None


def _loaded(found: dict[str, str], call: Call, *, unsloth: bool) -> None:
    """The settings in the loading of a model; a tokenizer's names the model as well, where nothing else does."""
    named = call.keywords
    given = named.get("model_name", named.get("pretrained_model_name_or_path", call.first))
    if "AutoModel" in call.name or unsloth or call.name.startswith("model"):
        _model(found, given, first=True)
        found |= {key: _word(named[key]) for key in _LOADED if key in named}
        if unsloth:  # its default, `unsloth/models/loader.py` of 2025.3
            found["unsloth"] = "true"
            found.setdefault("load_in_4bit", "true")
            found["max_length"] = _word(named.get("max_seq_length", 2048))
    elif call.name.endswith("ForCausalLM.from_pretrained") or "Tokenizer" in call.name:
        _model(found, given)


def _model(found: dict[str, str], given: Any, *, first: bool = False) -> None:
    if isinstance(given, str) and (first or "model_name_or_path" not in found):
        found["model_name_or_path"] = given


def _named(call: Call, names: Mapping[str, str]) -> dict[str, str]:
    return {names[key]: _word(value) for key, value in call.keywords.items() if key in names}


def _word(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


# ---- calls ---------------------------------------------------------------------------------------------------------


def calls(text: str) -> Iterator[Call]:
    """The calls of a text that set something, in order."""
    found = islice(_CONSTANT.finditer(text), 10 * MOST)
    constants = {match[1]: value for match in found if (value := _literal(match[2])) is not None}
    for match in islice(_CALL.finditer(text), MOST):
        source = _whole(text, match.start(), match.end())
        try:
            tree = ast.parse(source, mode="eval").body if source else None
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if isinstance(tree, ast.Call):
            yield _read(match[0].removesuffix("("), tree, constants)


def _literal(source: str | ast.expr) -> Any:
    """The value of a literal; None for anything else."""
    try:
        return ast.literal_eval(source)
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError):
        return None


def _whole(text: str, start: int, end: int) -> str:
    """The call that starts there, to its closing parenthesis; "" if it has none."""
    depth, quote = 1, ""
    for position in range(end, min(len(text), end + LONGEST)):
        letter = text[position]
        if quote:
            quote = "" if letter == quote and text[position - 1] != "\\" else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
            if not depth:
                return text[start : position + 1]
    return ""


def _read(name: str, tree: ast.Call, constants: Mapping[str, Any]) -> Call:
    known = {
        keyword.arg: value
        for keyword in tree.keywords
        if keyword.arg and (value := _value(keyword.value, constants)) is not None
    }
    given = frozenset(keyword.arg for keyword in tree.keywords if keyword.arg)
    return Call(name, _value(tree.args[0], constants) if tree.args else None, known, given)


def _value(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    """The value of an argument; of `torch.bfloat16` its last name; None if the text does not tell it."""
    if isinstance(node, ast.Attribute):
        return node.attr if isinstance(node.value, ast.Name) and node.value.id == "torch" else None
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    value = _literal(node)
    return value if isinstance(value, str | bool | int | float | list | tuple) else None
