"""Rules on cards: each passes what is at its bound, and refuses what lies beyond, alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from calc.catalog.catalog import load
from calc.check import gpus
from calc.check.faults import Rule


def said(rule: Rule[Any], card: str, **fields: Any) -> list[str]:
    catalog = load()
    return list(rule(replace(catalog.gpu(card), **fields), catalog))


@pytest.mark.parametrize(
    ("rule", "card", "within", "beyond", "line"),
    [
        (gpus.vendor, "mi300x", {}, {"vendor": "NVIDIA"}, "vendor: given 'NVIDIA', allowed: AMD, which makes CDNA 3"),
        (
            gpus.memory,
            "h100-sxm",
            {"smi_mib": 81920, "usable_mib": 73728},
            {"smi_mib": 81921},
            "memory.smi_mib: given 81921, allowed: 73728 to 81920, as marketing_gb is 80, times 1024",
        ),
        (
            gpus.memory,
            "mi300x",
            {"usable_mib": 176948},
            {"usable_mib": 176947},
            "memory.usable_mib: given 176947, allowed: 176948 to 196608, as marketing_gb is 192, times 1024",
        ),
        (
            gpus.usable,
            "h100-sxm",
            {"smi_mib": 81559, "usable_mib": 81559},
            {"usable_mib": 81560},
            "memory.usable_mib: given 81560, allowed: at most 81559, which smi_mib says",
        ),
        (
            gpus.usable_as_printed,
            "a10",
            {"usable_mib": 22522},  # 21.99 GiB to two digits
            {"usable_mib": 22525},
            "memory.usable_mib: given 22525, allowed: 22518, the 21.99 GiB of its source",
        ),
        (
            gpus.correction,
            "a10",
            {},
            {"ecc": "off, inline when on"},
            "ecc: given 'off, inline when on', allowed: on, inline, where smi_mib is 15/16 of the memory, and only "
            "there; it is 23028 MiB of 24 GB",
        ),
        (
            gpus.memory_in_name,
            "a100-80-sxm",
            {"name": "A100"},
            {"memory_gb": 40.0},
            "memory.marketing_gb: given 40, allowed: 80, as name says: A100-SXM4-80GB",
        ),
        (
            gpus.bandwidth,
            "l4",
            {"bandwidth_gbs": 36.0},  # 1.5 for each of 24 GB
            {"bandwidth_gbs": 35.0},
            "bandwidth_gbs: given 35, allowed: 36 to 1512 GB/s, of Ada Lovelace with 24 GB",
        ),
        (
            gpus.bandwidth,
            "h100-sxm",
            {"bandwidth_gbs": 7350.0},  # half as much again as the fastest Hopper's 4900
            {"bandwidth_gbs": 7351.0},
            "bandwidth_gbs: given 7351, allowed: 120 to 7350 GB/s, of Hopper with 80 GB",
        ),
        (
            gpus.rates,
            "h100-sxm",
            {"bf16_tflops": 1485.0, "fp8_tflops": 2970.0},
            {"bf16_tflops": 1486.0},
            "dense_tflops.bf16: given 1486, allowed: 33.5 to 1485 TFLOPS, dense, of Hopper with such a memory",
        ),
        (
            gpus.rates,
            "l4",
            {"bf16_tflops": 188.5},  # half as much again as 419 FLOP for each of 300 GB/s
            {"bf16_tflops": 189.0},
            "dense_tflops.bf16: given 189, allowed: 3 to 188.6 TFLOPS, dense, of Ada Lovelace with such a memory",
        ),
        (
            gpus.formats,
            "v100-32",
            {},
            {"bf16_tflops": 125.0},
            "dense_tflops.bf16: given 125, allowed: 0, for none: Volta has fp16",
        ),
        (
            gpus.formats,
            "a40",
            {},
            {"fp8_tflops": None},  # what the card does not have is known
            "dense_tflops.fp8: given null, allowed: 0, for none: Ampere has bf16, fp16",
        ),
        (
            gpus.formats,
            "l4",
            {"fp8_tflops": None},
            {"fp8_tflops": 0.0},
            "dense_tflops.fp8: given 0, allowed: a rate, or none given: Ada Lovelace has fp8",
        ),
        (
            gpus.formats_agree,
            "h100-sxm",
            {"fp16_tflops": 1000.0, "fp8_tflops": 2070.0},
            {"fp8_tflops": 989.0},
            "dense_tflops.fp8: given 989, allowed: 1978, twice the rate in 16 bits",
        ),
        (
            gpus.formats_agree,
            "rtx3090",
            {},
            {"fp16_tflops": 142.0},  # with fp16 accumulation
            "dense_tflops.fp16: given 142, allowed: 71, as bf16: dense, accumulating in fp32",
        ),
        (
            gpus.power,
            "h100-sxm",
            {"tdp_w": 168},
            {"tdp_w": 70},
            "tdp_w: given 70, allowed: 168 to 3350 W, beside 3350 GB/s",
        ),
        (
            gpus.rates,
            "rtx4090",
            {"fp16_tflops": None, "fp8_tflops": None},
            {"bf16_tflops": 330.3, "fp16_tflops": None, "fp8_tflops": None},  # with fp16 accumulation
            "dense_tflops.bf16: given 330.3, allowed: 10.1 to 248 TFLOPS, dense, of Ada Lovelace with such a memory",
        ),
        (gpus.slot, "h100-sxm", {}, {"pcie_gen": 4}, "pcie_gen: given 4, allowed: 5, which Hopper has"),
        (
            gpus.link,
            "a100-80-sxm",
            {"nvlink_gbs": 64.0},
            {"nvlink_gbs": 63.0},
            "nvlink_gbs: given 63, allowed: 64 to 900 GB/s, both directions added, or 0 for none",
        ),
        (
            gpus.link,
            "rtx4090",
            {"nvlink_gbs": 0.0},
            {"nvlink_gbs": 112.5},
            "nvlink_gbs: given 112.5, allowed: 0: Ada Lovelace has no link between cards",
        ),
        (
            gpus.link,
            "l4",
            {},
            {"nvlink_gbs": None},
            "nvlink_gbs: given null, allowed: 0: Ada Lovelace has no link between cards",
        ),
    ],
)
def test_a_rule_has_a_bound(
    rule: Rule[Any], card: str, within: dict[str, Any], beyond: dict[str, Any], line: str
) -> None:
    assert said(rule, card, **within) == []
    assert said(rule, card, **beyond) == [line]


def test_what_no_source_gives_is_not_judged() -> None:
    """A card without rates, power, links or error correction in its file passes every rule."""
    bare: dict[str, Any] = dict.fromkeys(
        (
            "smi_mib",
            "bandwidth_gbs",
            "bf16_tflops",
            "fp16_tflops",
            "fp8_tflops",
            "tdp_w",
            "ecc",
            "pcie_gen",
            "nvlink_gbs",
        )
    )
    rules = [rule for name, rule in vars(gpus).items() if getattr(rule, "__module__", "") == "calc.check.gpus"]
    assert [line for rule in rules for line in said(rule, "h100-sxm", **bare)] == []
