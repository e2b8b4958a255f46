"""The catalog's name that somebody may have meant: never another card or model, whose letters or numbers differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher, get_close_matches
from functools import lru_cache

from calc.base.schema import LONGEST

PARTS = re.compile(r"[a-z]+|[0-9]+(?:\.[0-9]+)?")
MEMORY = re.compile(r"(?<![a-z0-9])([0-9]+) ?g(?:i?b)?\b")
SOCKET = re.compile(r"\b(sxm|hbm)[0-9]e?")  # the generation of a socket or memory: SXM4, HBM3
# Words that people and drivers add, and that tell no card or model from another of the same numbers.
ADDED = frozenset({
    "nvidia", "amd", "geforce", "rtx", "tesla", "instinct", "pcie", "sxm", "hbm", "instruct", "chat", "it", "base",
    "hf",
})  # fmt: skip
# Words of a card's name that tell no card from another: makers and their brands, and the unit of its memory.
_MAKERS = re.compile(r"nvidia|huawei|geforce|tesla|instinct|quadro|\bamd\b|\bgpu\b|rtx|hbm|(?<=[0-9]) ?gi?b\b")
OTHER = frozenset({"ti", "super", "nvl"})  # words that make another card of the same number
TYPED = 3  # characters of a word or number from which on it may be misspelt, or cut short
ALIKE = 0.5  # of difflib's measure
FEW = 4  # names that are put forward at once


Told = tuple[tuple[re.Pattern[str], str], ...]  # patterns, the first that is found counts, each with what it tells


def _named(told: Mapping[str, str]) -> Told:
    """Patterns of names, none of which begins or ends within a word."""
    return tuple([(re.compile(rf"(?<![a-z])(?:{pattern})(?![a-z])"), what) for pattern, what in told.items()])


# Devices that train and are no GPUs of the catalog, each with the reason.
ELSEWHERE: Told = (
    (
        re.compile(r"\b(?:apple|i?mac|macbook|mps|m[1-9][ -]?(?:pro|max|ultra)?)\b"),
        "Apple's GPUs are not modelled, which share the memory of the whole Mac",
    ),
    (re.compile(r"\btpu"), "TPUs are not modelled, where XLA plans the memory"),
    (re.compile(r"\barc\b|\bxpu\b"), "Intel's GPUs are not modelled, where PyTorch has another allocator (torch.xpu)"),
    (re.compile(r"\bgaudi|\bhpu\b"), "Intel's Gaudi is not modelled, where a compiler of graphs plans the memory"),
    (
        re.compile(r"\b(?:jetson|orin|xavier)\b"),
        "Jetson modules are not modelled, which share the board's memory and take NVIDIA's own builds of PyTorch",
    ),
    (re.compile(r"\bcpus?\b"), "a job without a GPU is not modelled"),
)

# Models that people train and no file describes: the feature that is not modelled, and the nearest modelled one, if
# any.
_IMAGES = "reads images, and its vision tower is not modelled"
_NO_TOWER = f"{_IMAGES}; those of qwen3-vl-8b and gemma-3-12b are"
_BESIDE = "whose code lies beside its weights"
_SOUND = "hears or speaks, which is not modelled; qwen2.5-omni-7b and qwen2-audio-7b are, without sound"
# Models that read images by towers that are not modelled, whose language model has the shapes of one of the catalog.
SPEAKS = _named(
    {
        r"lfm2[.0-9]*[ _-]vl[ _-]450m": "lfm2-350m",
        r"lfm2[.0-9]*[ _-]vl[ _-]1\.6b": "lfm2-1.2b",
        r"lfm2[.0-9]*[ _-]vl[ _-]3b": "lfm2-2.6b",
        r"molmo[ _-]7b[ _-]d": "qwen2-7b",
        r"intern[ _-]?s1[ _-]mini": "qwen3-8b",
        r"intern[ _-]?s1": "qwen3-235b-a22b",
        r"internvl[ _-]?3[ _-]9b": "internlm3-8b",
        r"internvl[ _-]?3[._]5[ _-]241b": "qwen3-235b-a22b",
        r"molmo2[ _-]8b": "qwen3-8b",
        r"molmo2[ _-]4b": "qwen3-4b",
        r"mistral[ _-]?medium[ _-]?3[._]5": "devstral-2-123b",
        r"phi-?4-multimodal": "phi-4-mini",
        r"phi-?4-reasoning-vision": "phi-4",
        r"ovis[ _-]?2[._]5[ _-]9b": "qwen3-8b",
        r"ovis[ _-]?2[._]5[ _-]2b": "qwen3-1.7b",
        r"ovis[ _-]?2[ _-]8b": "qwen2.5-7b",
        r"keye[ _-]vl(?:[ _-]1[._]5)?[ _-]8b": "qwen3-8b",
        r"llava[ _-]onevision[ _-]1[._]5[ _-]8b": "qwen3-8b",
        r"llava[ _-]onevision[ _-]1[._]5[ _-]4b": "qwen3-4b",
        r"llava[ _-]video[ _-]7b": "qwen2-7b",
        r"nemotron[ _-]nano[ _-](?:12b[ _-])?(?:v2[ _-])?vl": "nemotron-nano-12b-v2",
        r"glm[ _-]?4v[ _-]9b": "glm-4-9b",
        r"command[ _-]a[ _-]vision": "command-a",
        r"minicpm[ _-]llama3[ _-]v": "llama-3-8b",
        r"deepseek[ _-]vl[ _-]7b": "deepseek-llm-7b",
        r"yi[ _-]vl[ _-]6b": "yi-6b",
        r"jina-embeddings-v4": "qwen2.5-3b",
        r"yi[ _-]vl[ _-]34b": "yi-34b",
        r"ovis[ _-]?1[._]6[ _-]gemma2[ _-]9b": "gemma-2-9b",
        r"ovis[ _-]?1[._]6[ _-]gemma2[ _-]27b": "gemma-2-27b",
        r"ovis[ _-]?1[._]6[ _-]llama3[._]2[ _-]3b": "llama-3.2-3b",
        r"ovis[ _-]?2[ _-]1b": "qwen2.5-0.5b",
        r"ovis[ _-]?2[ _-]2b": "qwen2.5-1.5b",
        r"ovis[ _-]?2[ _-]4b": "qwen2.5-3b",
        r"ovis[ _-]?2[ _-]16b": "qwen2.5-14b",
        r"ovis[ _-]?2[ _-]34b": "qwen2.5-32b",
        r"sail[ _-]vl2[ _-]2b": "qwen3-1.7b",
        r"sail[ _-]vl2[ _-]8b": "qwen3-8b",
        r"step3[ _-]vl[ _-]10b": "qwen3-8b",
        r"internvl2[ _-]4b": "phi-3-mini-128k",
        r"internvl2[ _-]40b": "yi-34b",
        r"internvl2[ _-]llama3[ _-]76b": "llama-3-70b",
        r"internvl[ _-]?3[._]5[ _-]gpt[ _-]oss[ _-]20b": "gpt-oss-20b",
        r"llava[ _-]next[ _-]video[ _-]7b[ _-]32k": "mistral-7b-v0.2",
        r"llava[ _-]next[ _-]video[ _-]7b": "llama-2-7b",
        r"llava[ _-]next[ _-]video[ _-]34b": "yi-34b",
        r"llava[ _-]next[ _-]72b": "qwen1.5-72b",
        r"llava[ _-]next[ _-]110b": "qwen1.5-110b",
        r"llava[ _-]llama-?3[ _-]8b": "llama-3-8b",
        r"minicpm[ _-]o[ _-]2[._]6": "qwen2.5-7b",
        r"minicpm[ _-]o[ _-]4[._]5": "qwen3-8b",
        r"minicpm[ _-]v[ _-]4[._]6": "qwen3.5-0.8b",
        r"deepseek[ _-]vl2[ _-]small": "deepseek-v2-lite",
        r"janus[ _-]pro[ _-]7b": "deepseek-llm-7b",
        r"qwen[ _-]vl": "qwen1.5-7b",
        r"minimax[ _-]vl[ _-]01": "minimax-text-01",
        r"moondream-?2": "phi-1.5",
        r"mineru[ _-]?2[._]5[a-z0-9._ -]*": "qwen2-0.5b",
        r"got[ _-]ocr[ _-]?2[._]0": "qwen1.5-0.5b",
        r"hunyuan[ _-]?ocr": "hunyuan-0.5b",
        r"pixtral[ _-]?large": "mistral-large-2407",
        r"aya[ _-]vision[ _-]32b": "command-r-32b",
        r"granite[ _-]vision[ _-]3[._][12][ _-]2b": "granite-3.1-2b",
        r"exaone[ _-]?4[._]5[ _-]33b": "exaone-4-32b",
        r"molmo[ _-]72b": "qwen2-72b",
    }
)
UNMODELLED = _named(
    {
        **{
            pattern: f"has attention of a kind that is not modelled; {id} is the nearest"
            for pattern, id in {
                r"deepseek[ _-]?v4[._]1|deepseek[ _-]?v4[a-z _-]*vision": "deepseek-v4-flash",
                r"minimax[ _-]?m3": "minimax-m2",
            }.items()
        },
        r"dbrx|grok|snowflake-arctic|jetmoe|santacoder|persimmon|fuyu|chameleon|"
        r"mobilellm": "is of an architecture that few train today, and that is not modelled; gpt2, gpt-neox-20b and "
        "mixtral-8x7b are",
        r"kimi[ _-]?audio": _SOUND,
        r"(?:ling|ring)[ _-]?(?:2[._]5|(?:[a-z0-9._]+[ _-])?linear)": "has lightning attention in most layers, which "
        "is not modelled; ling-flash-2.0 and ling-1t are the nearest",
        r"(?:ling|ring)[ _-]?(?:mini|flash|lite|plus|coder|1t|2\.|v2)": "is of a BailingMoE that is not modelled; "
        "ling-lite-1.5, ling-mini-2.0, ling-flash-2.0 and ling-1t are",
        r"falcon[ _-]rw": "slopes attention's scores by position (ALiBi) in layers that are not modelled; falcon-7b, "
        "bloom-1b1 and mpt-7b are",
        r"(?:falcon-?)?mamba|rwkv|xlstm|zamba|hymba|recurrentgemma|nemotron-flash|"
        r"phi-?4-mini-flash[a-z-]*": "has a state space or recurrence of another kind than nemotron-nano-9b-v2's and "
        "qwen3-next-80b-a3b's, which are modelled",
        r"baichuan2?-13b": "slopes attention's scores by position (ALiBi) in code that lies beside its weights; "
        "bloom-7b1 and mpt-7b do so, too",
        r"kimi[ _-]?k3|zaya[0-9]*|(?:ling|ring)[ _-]?3|inkling|muse[ _-]?(?:glimmer|spark)": "has layers of a "
        "kind that is not modelled; deepseek-v3.2 and minimax-m2 are large MoE models that are",
        r"step[ _-]?3|step[ _-]?[0-9.]+-flash": "has layers of a kind that is not modelled; minimax-m2 is of like size",
        **{
            pattern: f"is of the family of {id}, but no file of the catalog describes it"
            for pattern, id in {
                r"laguna": "laguna-xs-2.1",
                r"codegen2?": "codegen-2b",
                r"apriel": "apriel-1.6-15b",
                r"granite[ _-]vision[ _-]3": "granite-vision-3.3-2b",
                r"mimo[ _-]?v2": "mimo-v2-flash",
                r"paligemma[ _-]?3b": "paligemma-3b-448",
                r"paligemma[ _-]?2[ _-]3b": "paligemma2-3b-448",
                r"paligemma[ _-]?2[ _-]10b": "paligemma2-10b-448",
                r"paligemma[ _-]?2[ _-]28b": "paligemma2-28b-224",
                r"lfm2[ _-]24b": "lfm2-8b-a1b",
                r"qwen3[._][678][ _-](?:max|plus|[0-9.]+t)": "qwen3.5-397b-a17b",
                r"kanana": "kanana-1.5-8b",
                r"a\.x[ _-][34]": "a.x-3.1-light",
                r"qwen3guard[ _-]stream": "qwen3-8b",
                r"biomedlm|cerebras[ _-]gpt": "gpt2-xl",
                r"glm[ _-]edge": "glm-4-9b",
                r"megrez|minimind": "smollm2-1.7b",
                r"galactica": "opt-6.7b",
                r"hunyuan[ _-]mt": "hunyuan-7b",
                r"sailor2|oreal-7b|acemath[ _-]7b|qwen2[._]5[ _-]math[ _-]prm": "qwen2.5-7b",
                r"(?:openmath|acemath)[a-z _-]*1[._]5b": "qwen2.5-1.5b",
                r"seallms?[ _-]v3": "qwen2-7b",
                r"sea[ _-]lion[ _-]v3[ _-]9b": "gemma-2-9b",
                r"xgen|orca[ _-]?2|alpaca|meditron|longchat|xwin": "llama-2-7b",
                r"mammoth2[ _-]8b|llama[ _-]?3[ _-]sqlcoder|armorm": "llama-3-8b",
                r"toolace": "llama-3.1-8b",
                r"wizardmath[ _-]7b": "mistral-7b-v0.1",
                r"hermes[ _-]?2[ _-]mixtral": "mixtral-8x7b",
                r"granite[ _-]4[.0-9]*[ _-](?:350m|1b)": "granite-4-micro",
            }.items()
        },
        r"longcat": "has two attentions in a layer and experts that do nothing, which are not modelled; deepseek-v3 "
        "has neither, and is",
        r"phi-?3-small": f"has attention by blocks, {_BESIDE}; phi-3-medium is modelled",
        r"bitnet|falcon-e": "has weights of three values, which are not modelled; qwen2.5-1.5b is of like size",
        r"olmo-hybrid": "has a gated delta rule of a kind of its own, which is not modelled; qwen3.5-9b has another",
        r"telechat|xverse|bluelm|yuan2|orion-14b|skywork-(?:13b|moe)|aquila[0-9]*|^internlm-|"
        r"sarvam-(?:30|105)b|decilm": f"is of a family {_BESIDE}; qwen3-8b, qwen3-32b and qwen3-30b-a3b are modelled",
        r"phi-?(?:mini|tiny)-moe": "is of SlimMoE, whose code lies beside its weights; phi-3.5-moe is of like build",
        r"nemotron[ _-]?51b": "has linears in place of some attention, which is not modelled; nemotron-super-49b is of "
        "like build",
        r"minicpm[ _-]?(?:v|o)": _NO_TOWER,
        r"minicpm": "has attention of a kind that is not modelled; qwen3-8b is of like size",
        r"deepseek[ _-]?ocr|[a-z0-9]*ocr[a-z0-9]*": _NO_TOWER,
        r"mistral[ _-]?medium[ _-]?[4-9]": "reads images, and its layers are not those of the Mistral models that are "
        "modelled, such as mistral-small-3.2-24b",
        r"ouro|huginn": "runs its layers several times over, which is not modelled; smollm3-3b is of like size",
        r"(?:glm[ _-]?4v|cogvlm[0-9]?|cogagent)": f"{_IMAGES}; glm-4.1v-9b is of a later kind",
        r"llava|bakllava|idefics-?2?|molmo|ovis|aya-vision|phi-?[34][.0-9]*-(?:vision|multimodal)|"
        r"granite-vision|mineru[0-9.]*|"
        r"deepseek-?vl|janus|florence|lfm2?[.0-9]*-vl|moondream|nvila|keye|mplug|"
        r"docowl|emu3": _NO_TOWER,
        r"[a-z0-9.]+[ _-]vl[0-9]*[ _-]?[0-9a-z.]*|internvl2|internvl-chat|internlm-xcomposer[0-9a-z.]*|"
        r"video-?llama[0-9]*|granite[ _-]docling": _NO_TOWER,
        r"voxtral": "is of the family of voxtral-mini-3b, but no file of the catalog describes it",
        r"vibevoice|midashenglm|whisper|[a-z0-9.]+-(?:omni|audio|tts|asr)|csm-1b": _SOUND,
        r"(?:flan-?|m|u|by|code|long)?t5|t5gemma|aya-101|bart|mbart|pegasus|nllb": "has an encoder beside its decoder, "
        "which is not modelled; decoders of every size are, from qwen3-0.6b on",
        r"(?:modern|distil|ro|al|de|electra)?bert[a-z]*|deberta|roberta|bge|minilm|mpnet|prompt-guard|"
        r"(?:e5|gte)-(?:small|base|large)|"
        r"[a-z0-9.]*embeddings?|"
        r"embeddinggemma": "is an encoder, which is not modelled; qwen3-reranker-0.6b is a decoder that scores texts, "
        "and is",
        r"llada|dream-v0|diffusiongemma|labs-diffusion": "makes text by diffusion, which is not modelled; llama-3-8b "
        "and qwen2.5-7b are of like size",
        r"stable-?diffusion|sdxl|flux|qwen-image": "makes images, which is no job of this guide",
    }
)


def speaks(name: str) -> str:
    """The id of the model with the shapes of the language model of this name, whose part for images is not modelled."""
    return _told(SPEAKS, name.rpartition("/")[2])


def unmodelled(name: str) -> str:
    """The reason why the catalog cannot have the model of this name; empty if it could."""
    return _told(UNMODELLED, name.rpartition("/")[2])


def elsewhere(name: str) -> str:
    """The reason why the catalog cannot have the GPU of this name; empty if it could."""
    return _told(ELSEWHERE, name)


def _told(table: Told, name: str) -> str:
    """What `table` says of the first pattern that a name has inside; empty if it has none."""
    given = name.casefold()[:LONGEST]
    return next((what for pattern, what in table if pattern.search(given)), "")


def card(name: str) -> tuple[str, ...]:
    """The letters and numbers that tell a card from others, in any spelling: `RTX 4090`, `NVIDIA A100 SXM 80GB`."""
    return tuple(sorted(re.findall(r"[a-z]+|[0-9]+", _MAKERS.sub(" ", SOCKET.sub(r"\1", name.casefold())))))


def meant(name: str, names: Mapping[str, str]) -> str:
    """`"; did you mean 'x'?"` for the nearest of `names` that differs from `name` by a typo alone; empty for none.

    `names` maps each to what is put forward for it. Of names that all begin with `name` a few are told, as none of
    them is nearer.
    """
    given = name.casefold()[:LONGEST]
    found = [(score, known) for known in names if (score := likeness(given, known.casefold())) >= ALIKE]
    best = max(found, key=lambda pair: pair[0], default=None)
    if best is None:
        return ""
    alike = [known for score, known in found if score == best[0] > 1 and known.casefold().startswith(f"{given}-")]
    begun = list(dict.fromkeys(names[known] for known in alike))
    some = begun if 1 < len(begun) <= FEW else [names[best[1]]]
    return f"; did you mean {', '.join(map(repr, some))}?"


def likeness(given: str, known: str) -> float:
    """The nearness of two names, from 0 to 1, and 2 for a beginning; 0 if a model's letter or number differs."""
    given, memory, ours = _typed(given)
    left = [*_parts(known)]
    if "".join(ours) == "".join(left) or _unspaced(given) == _unspaced(known):
        return 2
    said = []
    for part in ours:
        match = part if part in left else misspelt(part, left)
        if match:
            left.remove(match)
            said.append(part)
        elif part not in ADDED and part not in memory:
            return 0
    other_size = len(said) < len(ours) and memory and any(part.isdecimal() for part in left)
    letters = {part for part in left if len(part) == 1 and part.isalpha()} - {"b"}  # b: billions
    other_letter = letters or OTHER & {*left}
    if not said or other_size or other_letter:
        return 0
    return 2 if known.startswith(given) else SequenceMatcher(None, "".join(said), known).ratio()


@lru_cache(maxsize=64)
def _typed(given: str) -> tuple[str, list[str], tuple[str, ...]]:
    """A name that was typed, without generations of sockets, its sizes of memory, and its words and numbers."""
    return SOCKET.sub(r"\1", given), MEMORY.findall(given), _parts(MEMORY.sub(r"\1 ", SOCKET.sub(r"\1", given)))


@lru_cache(maxsize=8192)
def _parts(name: str) -> tuple[str, ...]:
    """The words and numbers of a name."""
    return tuple(PARTS.findall(name))


@lru_cache(maxsize=8192)
def _unspaced(name: str) -> str:
    """A name without spaces and punctuation."""
    return re.sub(r"\W", "", name)


def misspelt(part: str, others: Iterable[str]) -> str:
    """The word that `part` is a misspelling of, or the word or number that it is the beginning of; empty for none."""
    same = [other for other in others if other.isalpha() == part.isalpha()]
    begun = [other for other in same if other.startswith(part) and len(part) >= TYPED - part.isalpha()]
    if begun or not part.isalpha() or len(part) < TYPED:
        return next(iter(begun), "")
    scored = [(score, other) for other in same if len(other) >= TYPED and (score := closeness(part, other))]
    return max(scored, default=(0.0, ""))[1]


# names share most of their words, so that few pairs differ
@lru_cache(maxsize=16384)
def closeness(part: str, other: str) -> float:
    """The score of `other` among difflib's close matches for `part`; 0 if it is none of them."""
    return SequenceMatcher(None, other, part).ratio() if get_close_matches(part, [other]) else 0.0
