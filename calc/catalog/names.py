"""The names of models: as files list them, and as people write them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calc.catalog.catalog import Model

_NAME = re.compile(r"(?:\w[\w.-]*/)?\w[\w.: -]*", re.ASCII)  # no path
_WORD = re.compile(r"bf16|[a-z]+|[0-9]+(?:\.[0-9]+)*(?:bit|[a-z](?![a-z]))?")  # the 2.5vl of a name is two words
# Words that change no tensor: who made a model, how it was tuned or saved, QLoRA's 4 bits, 16, and the 1M of Qwen's
# long context; that it refuses nothing, or was trained to be quantised (QAT). `base` is none of them: tuning often adds
# rows to the vocabulary.
_SAME = frozenset({
    "meta", "deepseek", "instruct", "chat", "it", "pt", "hf", "thinking", "unsloth", "bnb", "4bit", "bf16", "1m",
    "abliterated", "ds", "qat",
})  # fmt: skip

# Words that name another architecture than the model's beside whose name they stand: of what it reads or makes, of cut
# models and of those that draft for it.
_OTHER = frozenset({
    "vl", "vlm", "vision", "omni", "audio", "tts", "ocr", "vla", "internvl", "llava", "embedding", "reranker", "mini",
    "small", "medium", "nano", "tiny", "flash", "moe", "next", "linear", "mamba", "pruned", "reap", "eagle", "eagle3",
    "draft", "dflash", "speculator", "medusa", "chinese",
})  # fmt: skip
_SIZE = re.compile(r"[0-9.]+b|[0-9]+m")
_VERSION = re.compile(r"[0-9]+\.[0-9]+")

# How a checkpoint's weights are stored, where that is not 16 bits, or bitsandbytes' 4 that QLoRA loads: words of names
# of quantised checkpoints (AWQ, GPTQ, GGUF with its kinds, compressed-tensors, MLX, EXL2 and 3).
_STORED = re.compile(
    r"(?<![^\W_])(?:quantized\.)?(awq|gptq|gguf|(?:nv|mx)?fp[48]|int[48]|w[0-9]+a[0-9]+|[2-8]bit|i?q[2-8](?:_[a-z0-9]+)*|exl[23]|mlx"
    r"|aqlm|hqq|autoround)(?![^\W_])(?:[-_]dynamic)?",
    re.ASCII,
)


@lru_cache(maxsize=4096)
def words(name: str) -> str:
    """The words and numbers of a name without the organisation, case and punctuation aside: `llama 3.1 8b`."""
    # Llama-3_1 is Llama 3.1, and ModelScope keeps Qwen2.5 in a folder Qwen2___5
    last = re.sub(r"(?<=[0-9])_{1,3}(?=[0-9])", ".", name.rpartition("/")[2].casefold())
    return " ".join(_WORD.findall(last))


@lru_cache(maxsize=4096)
def plain(name: str) -> str:
    """The words of a name that say which shapes the model has."""
    return " ".join(word for word in words(name).split() if word not in _SAME)


@dataclass(frozen=True, slots=True)
class Names:
    """The ids of models by name.

    `listed`: by id, Hugging Face name and alias, casefolded. `spelled`: by the plain words of these and of the name for
    readers, where they are of one model alone. `unlike`: the reason why a name that looks like a model's is of another,
    by its words.
    """

    listed: Mapping[str, str]
    spelled: Mapping[str, str] = field(default_factory=dict)
    unlike: Mapping[str, str] = field(default_factory=dict)

    def alike(self, name: str) -> str | None:
        """The id of the model whose name this is, spelled otherwise."""
        return None if self.refusal(name) or not _NAME.fullmatch(name) else self.spelled.get(plain(name))

    def refusal(self, name: str) -> str:
        """The reason why the name is not that of the model that it looks like, or ""."""
        if why := self.unlike.get(words(name)) or self.unlike.get(plain(name), ""):
            return why
        made = self.quantised(name)
        if made is None or plain(name) in self.spelled:
            return ""
        original, form = made
        return f"not {original}: its weights are stored as {form}, which is not modelled"

    def quantised(self, name: str) -> tuple[str, str] | None:
        """The id of the model of whose weights this is the name of a quantised checkpoint, and how they are stored."""
        last = name.rpartition("/")[2].casefold()
        forms, rest = _STORED.findall(last), _STORED.sub("", last).rstrip("-_. ")
        known = self.spelled.get(plain(rest)) if forms and _NAME.fullmatch(rest) else None
        return (known, " ".join(forms).upper()) if known else None

    def within(self, name: str) -> str | None:
        """The id of the model with whose name and size another begins, ends or goes on, as those of its tuned do.

        None where a word beside them says that the architecture is another, another size stands there, or a version
        behind.
        """
        said = plain(name).split()
        runs = [(start, stop) for stop in range(1, len(said) + 1) for start in range(stop)]
        for start, stop in sorted(runs, key=lambda run: run[0] - run[1]):
            own, beside = said[start:stop], {*said[:start], *said[stop:]}
            if (found := self.spelled.get(" ".join(own))) and any(map(_SIZE.fullmatch, own)):
                other = beside & _OTHER or any(word[-1] == "b" and _SIZE.fullmatch(word) for word in beside)
                return None if other or any(map(_VERSION.fullmatch, said[stop : stop + 2])) else found
        return None


def names(models: Iterable[Model]) -> Names:
    """The names of these models, none of which two of them list."""
    listed: dict[str, str] = {}
    spelled: dict[str, str] = {}
    unlike: dict[str, str] = {}
    for model in models:
        for name in (model.id, model.hf, *model.aliases):
            listed[name.casefold()] = model.id
        for form in {plain(name) for name in (model.id, model.name, model.hf, *model.aliases)}:
            spelled[form] = "" if form in spelled else model.id
        for name, reason in model.unlike.items():
            unlike[words(name)] = unlike[plain(name)] = f"not {model.id}: {reason}"
    known = {form: id for form, id in spelled.items() if form and id}
    return Names(listed, known, {form: why for form, why in unlike.items() if form not in known})
