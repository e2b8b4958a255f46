"""The names of models: as files list them, and as people write them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calc.catalog.catalog import Model

_NAME = re.compile(r"(?:\w[\w.-]*/)?\w[\w.: +-]*", re.ASCII)  # no path
_WORD = re.compile(r"bf16|[a-z]+|[0-9]+(?:\.[0-9]+)*(?:bit|[a-z](?![a-z]))?")  # the 2.5vl of a name is two words
# Of models that refuse nothing, by the tool or the people that made them so, whose own version may follow.
_UNREFUSING = re.compile(r"\b(?:abliterated|derestricted|heretic|uncensored)(?: v [0-9.]+)?(?= |$)")
# Words that change no tensor: a model's maker, its tuning, its file format, QLoRA's 4 bits, 16, and models trained to
# be quantised (QAT). `base` is none of them: tuning often adds rows to the vocabulary.
_SAME = frozenset({
    "meta", "deepseek", "instruct", "chat", "it", "pt", "hf", "thinking", "unsloth", "bnb", "4bit", "bf16", "huihui",
    "ds", "qat", "pretrained", "preview", "sft", "dpo", "mpo",
    # makers that people write before a model's name
    "alibaba", "allenai", "baidu", "bytedance", "databricks", "eleutherai", "google", "huggingface", "ibm", "lg",
    "liquidai", "microsoft", "mistralai", "moonshot", "moonshotai", "nvidia", "openai", "stabilityai", "tencent",
    "tii", "tiiuae", "xiaomi", "ai21labs", "bigcode", "bigscience", "c4ai", "coherelabs", "facebook", "huggingfaceh4",
    "huggingfacetb", "inclusionai", "lgai", "minimaxai", "mosaicml", "openbmb", "opengvlab", "salesforce", "stepfun",
    "thudm", "zai", "zyphra",
})  # fmt: skip
# The context that a model was lengthened to, which changes no tensor either, but the positions, for which it may have a
# file of its own.
_CONTEXT = re.compile(r"[0-9]+k|1m")

# Words that mean another architecture beside a model's name: other inputs or outputs, other depths and widths, pruned
# models, and draft models.
_OTHER = frozenset({
    "vl", "vlm", "vision", "omni", "audio", "tts", "ocr", "vla", "internvl", "llava", "embedding", "reranker", "mini",
    "small", "medium", "nano", "tiny", "flash", "moe", "next", "linear", "mamba", "pruned", "reap", "eagle", "eagle3",
    "draft", "dflash", "speculator", "medusa", "chinese", "deep", "depth", "width", "wide", "hybrid", "embed",
    "colbert", "asr", "speech", "diffusion", "bitnet", "sae", "prm", "rm", "fast",
})  # fmt: skip
_SIZE = re.compile(r"[0-9.]+b|[0-9]+m")
_VERSION = re.compile(r"[0-9]+\.[0-9]+")
_ACTIVE = re.compile(r"(?<=b) a [0-9.]+b")  # the parameters that are active for a token: people leave them out

# Formats of a checkpoint's weights other than 16 bits and the 4 of bitsandbytes that QLoRA loads: words in names of
# quantised checkpoints (AWQ, GPTQ, GGUF with its kinds, compressed-tensors, MLX, EXL2 and 3).
_STORED = re.compile(
    r"(?<![^\W_])(?:quantized\.|ud-)?(awq|gptq|gguf|(?:nv|mx)?fp[48]|int[48]|w[0-9]+a[0-9]+|[2-8]bits?|i?q[2-8](?:_[a-z0-9]+)*|exl[23]|mlx"
    r"|aqlm|hqq|autoround|compressed-tensors)(?![^\W_])(?:[-_]dynamic|-[2-8]b-[0-9]+g|-v[0-9])?",
    re.ASCII,
)
# Those of 4 bits in which PEFT leaves the weights beside an adapter (0.21 `tuners/lora/{awq,gptq}.py`; Transformers
# 5.23 `quantizers/quantizer_compressed_tensors.py:122`). MXFP4, NVFP4 and GGUF do not train (`is_trainable` beside it):
# whoever trains such a checkpoint dequantises it.
_ADAPTED = re.compile(r"AWQ|GPTQ|INT4|W4A16|4BIT")
_WIDER = re.compile(r"GGUF|MLX|FP[48]|INT8|W8A|8BIT")


# weights of 16 bits that were trained to be quantised so, and are not (Gemma's QAT)
_UNQUANTIZED = re.compile(r"[-_]q[0-9]_[0-9][-_]unquantized(?![a-z0-9])")

# a hyphen between the numbers of a version: the second is no size, and no more than one digit
_HYPHENED = re.compile(r"(?<=[0-9])-(?=[0-9](?![a-zA-Z0-9.]))")


def adapted(form: str) -> bool:
    """True if an adapter trains beside weights of 4 bits that are stored in this form."""
    return bool(_ADAPTED.search(form)) and not _WIDER.search(form)


@lru_cache(maxsize=4096)
def words(name: str) -> str:
    """The words and numbers of a name without the organisation, case and punctuation aside: `llama 3.1 8b`."""
    last = name.rpartition("/")[2].casefold().replace("+", " plus ")  # Command R+
    last = _UNQUANTIZED.sub("", last)
    last = re.sub(r"(?<=[a-z0-9])_(?=[0-9]+b(?![a-z0-9]))", " ", last)  # the 8B of Qwen3_8B is a size
    # Llama-3_1 is Llama 3.1, and ModelScope keeps Qwen2.5 in a folder Qwen2___5
    last = re.sub(r"(?<=[0-9])_{1,3}(?=[0-9])", ".", last)
    return " ".join(_WORD.findall(last))


@lru_cache(maxsize=4096)
def plain(name: str) -> str:
    """The words of a name that say which shapes the model has."""
    return " ".join(word for word in lengthened(name).split() if not _CONTEXT.fullmatch(word))


@lru_cache(maxsize=4096)
def lengthened(name: str) -> str:
    """The words of a name that say which shapes and positions the model has."""
    return " ".join(word for word in _UNREFUSING.sub("", words(name)).split() if word not in _SAME)


def dotted(name: str) -> str:
    """A name with points for the hyphens that stand for them in a version, as in llama-3-1-8b."""
    return _HYPHENED.sub(".", name)


def joined(name: str) -> str:
    """The words of a name in one: `deepseekmath7b`."""
    return words(name).replace(" ", "")


@dataclass(frozen=True)
class Names:
    """The ids of models by name; `listed`: by id, Hugging Face name and alias, casefolded.

    What is not listed is looked for among the spellings of all `models`, which are then read.
    """

    models: Collection[Model] = field(repr=False)
    listed: Mapping[str, str]

    @property
    def spelled(self) -> Mapping[str, str]:
        """By the words of listed names and of the name for readers, by those of shapes and positions, by the plain
        ones, by all in one, and by the plain ones without active parameters, where they are of one model alone.
        """
        return self._spellings[0]

    @property
    def unlike(self) -> Mapping[str, str]:
        """The reason why a name that looks like a model's is another's, by the words of that name."""
        return self._spellings[1]

    @cached_property
    def _spellings(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        known: list[tuple[str, str]] = []
        unlike: dict[str, str] = {}
        for model in self.models:
            known += [(name, model.id) for name in (model.id, model.name, model.hf, *model.aliases)]
            for name, reason in model.unlike.items():
                unlike[words(name)] = unlike[plain(name)] = f"not {model.id}: {reason}"
        short = _of_one((_ACTIVE.sub("", plain(name)), id) for name, id in known)
        forms = short
        for form in (joined, plain, lengthened, words):
            forms |= _of_one((form(name), id) for name, id in known)
        spelled = {form: id for form, id in forms.items() if form and id}
        return spelled, {form: why for form, why in unlike.items() if form not in spelled}

    def alike(self, name: str) -> str | None:
        """The id of the model whose name this is in another spelling."""
        if self.refusal(name) or self.refusal(dotted(name)):
            return None
        return self._spelled(name) or self._spelled(dotted(name))

    def _spelled(self, name: str) -> str | None:
        """The id of the model with the words of this name, or with those of them that say most."""
        if not _NAME.fullmatch(name):
            return None
        return next(filter(None, [self.spelled.get(form(name)) for form in (words, lengthened, plain, joined)]), None)

    def refusal(self, name: str) -> str:
        """The reason why the name is not that of the model that it looks like, or ""."""
        return self.unlike.get(words(name)) or self.unlike.get(plain(name), "")

    def quantised(self, name: str) -> tuple[str, str] | None:
        """The id of the model that a checkpoint of this name was quantised from, and the format of its weights.

        None for a name that the catalog lists, and for one that ends in no format.
        """
        if name.casefold() in self.listed or self._spelled(name):
            return None
        last = name.rpartition("/")[2].casefold()
        forms, rest = _STORED.findall(last), _STORED.sub("", last).rstrip("-_. ")
        known = self._spelled(rest) if forms else None
        return (known, " ".join(forms).upper()) if known else None

    def sizes(self, name: str) -> list[str]:
        """The ids of the models of a family named without a size, the smallest first."""
        said = plain(name).split()
        found: dict[str, float] = {}
        for form, id in self.spelled.items():
            own = form.split()
            size, *active = own[len(said) :] or [""]
            if (
                own[: len(said)] == said
                and all(w == "a" or _SIZE.fullmatch(w) for w in (size, *active))
                and size != "a"
            ):
                found.setdefault(id, float(size[:-1]) * (1 if size[-1] == "b" else 1e-3))
        return sorted(found, key=lambda id: found[id])

    def within(self, name: str) -> str | None:
        """The id of the model whose name and size a longer name contains, as names of fine-tuned models do.

        None if a word beside them names another architecture, or another size or a version number follows.
        """
        if not _NAME.fullmatch(name):
            return None
        said = plain(name).split()
        runs = [(start, stop) for stop in range(1, len(said) + 1) for start in range(stop)]
        for start, stop in sorted(runs, key=lambda run: run[0] - run[1]):
            own, beside = said[start:stop], {*said[:start], *said[stop:]}
            if (found := self.spelled.get(" ".join(own))) and any(map(_SIZE.fullmatch, own)):
                other = beside & _OTHER or any(word[-1] == "b" and _SIZE.fullmatch(word) for word in beside)
                behind = said[stop + (said[stop : stop + 1] == ["v"]) :][:1]
                return None if other or any(map(_VERSION.fullmatch, behind)) else found
        return None


def names(models: Collection[Model]) -> Names:
    """The names of these models, each listed by one of them alone."""
    return Names(models, {name.casefold(): m.id for m in models for name in (m.id, m.hf, *m.aliases)})


def _of_one(spelled: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The id of the model that alone is spelled so, by form; "" where several are."""
    found: dict[str, str] = {}
    for form, id in spelled:
        found[form] = id if found.get(form, id) == id else ""
    return found
