"""Known data sets by name: how many sequences they have, and how long these are.

ms-swift's documentation counts its data sets, each sequence with its template, by Qwen2.5's tokenizer (commit
3602360a56 `docs/source_en/Instruction/Supported-models-and-datasets.md`, column Statistic). Other tokenizers count
otherwise: Llama's makes more of Chinese. Of preferences it counts a prompt with one of its answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from calc.base.schema import closest


class DataSet(NamedTuple):
    """The number of a data set's sequences, and the mean and the most of their tokens."""

    samples: int
    mean: float
    longest: int


DATA_SETS: Mapping[str, DataSet] = {
    "advertisegen": DataSet(97_484, 130.9, 232),
    "alpaca-cleaned": DataSet(51_760, 170.1, 1028),
    "alpaca-gpt4-data-en": DataSet(52_002, 167.6, 607),
    "alpaca-gpt4-data-zh": DataSet(48_818, 157.2, 544),
    "codealpaca-20k": DataSet(20_022, 99.3, 857),
    "coig-cqia": DataSet(44_694, 331.2, 19_288),
    "databricks-dolly-15k": DataSet(15_011, 199.0, 5987),
    "firefly-train-1.1m": DataSet(1_649_399, 204.3, 9306),
    "function-calling-chatml": DataSet(112_958, 465.3, 6106),
    "lmsys-chat-1m": DataSet(166_211, 545.8, 219_116),
    "hh-rlhf-cn": DataSet(362_909, 142.3, 1571),
    "longalpaca-12k": DataSet(11_998, 9941.8, 25_826),
    "longwriter-6k": DataSet(6000, 5009.0, 30_354),
    "magpie-qwen2-pro-200k-chinese": DataSet(200_000, 448.4, 4098),
    "magpie-qwen2-pro-200k-english": DataSet(200_000, 609.9, 4098),
    "magpie-qwen2-pro-300k-filtered": DataSet(300_000, 556.6, 4098),
    "math-plus": DataSet(893_929, 301.4, 1162),
    "mathinstruct": DataSet(262_040, 253.3, 2193),
    "ms-bench": DataSet(316_820, 353.4, 2924),
    "open-platypus": DataSet(24_926, 389.0, 3153),
    "openo1-sft": DataSet(125_894, 1080.7, 11_637),
    "orpo-dpo-mix-40k": DataSet(43_666, 938.1, 8483),
    "school-math-0.25m": DataSet(248_481, 158.8, 980),
    "self-cognition": DataSet(108, 58.9, 131),
    "sft-nectar": DataSet(131_201, 441.9, 3136),
    "shareai-llama3-dpo-zh-en-emoji": DataSet(2449, 334.0, 1801),
    "sharegpt-gpt4": DataSet(103_329, 3476.6, 115_132),
    "train-0.5m-cn": DataSet(519_255, 128.4, 936),
    "tulu-v2-sft-mixture": DataSet(326_154, 523.3, 2549),
    "ultrafeedback-binarized-preferences-cleaned-kto": DataSet(230_720, 471.5, 2232),
    "wizardlm-evol-instruct-v2-196k": DataSet(109_184, 483.3, 3735),
}
# other names of the same data: of Hugging Face's copy, of LLaMA-Factory's list
ALIASES: Mapping[str, str] = {
    "alpaca-gpt4": "alpaca-gpt4-data-en",
    "alpaca-gpt4-en": "alpaca-gpt4-data-en",
    "alpaca-gpt4-zh": "alpaca-gpt4-data-zh",
}

# The longest sequence of a data set of which nothing is known is shorter than this in one case of twenty.
SHORT = sorted(each.longest for each in DATA_SETS.values())[len(DATA_SETS) // 20]


def mixture(names: Sequence[str]) -> DataSet:
    """The data sets `names` together, each whole or, with `#500` behind its name, that many of its sequences.

    Owners and the cases of letters do not count. Raises ValueError, one line, for a name that is not known.
    """
    found = [_drawn(name) for name in names]
    samples = sum(each.samples for each in found)
    mean = sum(each.samples * each.mean for each in found) / samples
    return DataSet(samples, mean, max(each.longest for each in found))


def _drawn(name: str) -> DataSet:
    """One data set, of as many sequences as its name says."""
    plain, _, number = name.partition("#")
    key = plain.rpartition("/")[2].casefold().replace("_", "-")
    known = DATA_SETS.get(ALIASES.get(key, key))
    if known is None:
        allowed = f"one of {len(DATA_SETS)} known data sets, or mean and longest"
        raise ValueError(f"lengths.data: given {name!r}, allowed: {allowed}{closest(key, [*DATA_SETS, *ALIASES])}")
    if number and not (number.isdecimal() and int(number)):
        raise ValueError(f"lengths.data: given {name!r}, allowed: a positive number behind '#'")
    return known._replace(samples=int(number) if number else known.samples)
