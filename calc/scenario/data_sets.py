"""Known data sets by name: how many sequences they have, and how long these are.

ms-swift's documentation counts its data sets, each sequence with its template, by Qwen2.5's tokenizer (commit
3602360a56 `docs/source_en/Instruction/Supported-models-and-datasets.md`, column Statistic). Other tokenizers count
otherwise: Llama's makes more of Chinese. Of preferences it counts a prompt with one of its answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import NamedTuple

from calc.base.schema import closest


class DataSet(NamedTuple):
    """The number of a data set's sequences; mean, most, standard deviation and least of their tokens."""

    samples: int
    mean: float
    longest: int
    deviation: float
    shortest: int


DATA_SETS: Mapping[str, DataSet] = {
    "advertisegen": DataSet(97_484, 130.9, 232, 21.9, 73),
    "alpaca-cleaned": DataSet(51_760, 170.1, 1028, 122.9, 29),
    "alpaca-gpt4-data-en": DataSet(52_002, 167.6, 607, 123.9, 29),
    "alpaca-gpt4-data-zh": DataSet(48_818, 157.2, 544, 93.2, 27),
    "codealpaca-20k": DataSet(20_022, 99.3, 857, 57.6, 30),
    "coig-cqia": DataSet(44_694, 331.2, 19_288, 693.8, 34),
    "databricks-dolly-15k": DataSet(15_011, 199.0, 5987, 268.8, 26),
    "firefly-train-1.1m": DataSet(1_649_399, 204.3, 9306, 365.3, 28),
    "function-calling-chatml": DataSet(112_958, 465.3, 6106, 320.1, 36),
    "lmsys-chat-1m": DataSet(166_211, 545.8, 219_116, 3272.8, 22),
    "hh-rlhf-cn": DataSet(362_909, 142.3, 1571, 107.5, 25),
    "longalpaca-12k": DataSet(11_998, 9941.8, 25_826, 3417.1, 4695),
    "longwriter-6k": DataSet(6000, 5009.0, 30_354, 2932.8, 117),
    "magpie-qwen2-pro-200k-chinese": DataSet(200_000, 448.4, 4098, 223.5, 87),
    "magpie-qwen2-pro-200k-english": DataSet(200_000, 609.9, 4098, 277.1, 257),
    "magpie-qwen2-pro-300k-filtered": DataSet(300_000, 556.6, 4098, 288.6, 175),
    "math-plus": DataSet(893_929, 301.4, 1162, 196.7, 50),
    "mathinstruct": DataSet(262_040, 253.3, 2193, 177.4, 42),
    "ms-bench": DataSet(316_820, 353.4, 2924, 424.5, 29),
    "open-platypus": DataSet(24_926, 389.0, 3153, 256.4, 55),
    "openo1-sft": DataSet(125_894, 1080.7, 11_637, 622.9, 145),
    "orpo-dpo-mix-40k": DataSet(43_666, 938.1, 8483, 694.2, 36),
    "school-math-0.25m": DataSet(248_481, 158.8, 980, 73.4, 39),
    "self-cognition": DataSet(108, 58.9, 131, 20.3, 32),
    "sft-nectar": DataSet(131_201, 441.9, 3136, 307.0, 45),
    "shareai-llama3-dpo-zh-en-emoji": DataSet(2449, 334.0, 1801, 162.8, 36),
    "sharegpt-gpt4": DataSet(103_329, 3476.6, 115_132, 5959.0, 33),
    "train-0.5m-cn": DataSet(519_255, 128.4, 936, 87.4, 31),
    "tulu-v2-sft-mixture": DataSet(326_154, 523.3, 2549, 439.3, 68),
    "ultrafeedback-binarized-preferences-cleaned-kto": DataSet(230_720, 471.5, 2232, 274.3, 27),
    "wizardlm-evol-instruct-v2-196k": DataSet(109_184, 483.3, 3735, 338.4, 27),
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
    squares = sum(each.samples * (each.mean**2 + each.deviation**2) for each in found) / samples
    longest, shortest = max(each.longest for each in found), min(each.shortest for each in found)
    return DataSet(samples, mean, longest, sqrt(squares - mean**2), shortest)


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
