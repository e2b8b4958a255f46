"""Rules on machines: each passes what is at its bound, and refuses what lies beyond, alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from calc.catalog.catalog import load
from calc.check import nodes
from calc.check.faults import Rule


def said(rule: Rule[Any], node: str, **fields: Any) -> list[str]:
    catalog = load()
    return list(rule(replace(catalog.nodes[node], **fields), catalog))


@pytest.mark.parametrize(
    ("rule", "node", "within", "beyond", "line"),
    [
        (
            nodes.cards,
            "hgx-h100",
            {"name": "HGX H100 or H200", "gpu_ids": ("h100-sxm", "h200")},
            {"gpu_ids": ("h200",)},
            "gpu_ids[0]: given 'h200', allowed: h100, as name says: HGX H100, as in the DGX H100",
        ),
        (
            nodes.cards,
            "hgx-a100-40",
            {"name": "DGX A100 320GB"},  # of all eight
            {"name": "HGX A100 80GB"},
            "gpu_ids[0]: given 'a100-40-sxm', allowed: a card of the memory that name says: HGX A100 80GB",
        ),
        (
            nodes.link,
            "hgx-h100",
            {"link": "NVLink 4 bridge"},
            {"link": "NVLink 3, NVSwitch"},
            "link: given 'NVLink 3, NVSwitch', allowed: a link of h100-sxm, which has NVLink 4",
        ),
        (
            nodes.link,
            "consumer-pcie-gen5",
            {"link": "PCIe Gen4 x16"},  # an older slot takes a newer card
            {"link": "PCIe Gen6 x16", "gpu_ids": ("rtx5090",)},
            "link: given 'PCIe Gen6 x16', allowed: at most PCIe Gen5, which rtx5090 has",
        ),
        (
            nodes.link,
            "mi300x-platform",
            {"link": "Infinity Fabric, mesh"},
            {"link": "HCCS, all to all"},
            "link: given 'HCCS, all to all', allowed: a link of mi300x, which is AMD's",
        ),
        (
            nodes.link_speed,
            "hgx-h100",
            {"intra_gbs": 440.0},
            {"intra_gbs": 900.0},
            "intra_gbs: given 900, allowed: 450 GB/s, one direction of h100-sxm",
        ),
        (
            nodes.link_speed,
            "consumer-pcie",
            {"intra_gbs": 31.5},  # less the encoding
            {"intra_gbs": 64.0},
            "intra_gbs: given 64, allowed: 32 GB/s, one direction of PCIe Gen4 x16",
        ),
        (
            nodes.speeds_as_printed,
            "hgx-h100",
            {},
            {"intra_gbs": 600.0},
            "intra_gbs: given 600, allowed: 450, half of the 900 GB/s both ways of its source",
        ),
        (
            nodes.speeds_as_printed,
            "dgx-1-v100",
            {},
            {"inter_gbs": 12.5},
            "inter_gbs: given 12.5, allowed: 6.25, the 4 x 100 Gb/s of its source, eight bits a byte, among 8 cards",
        ),
        (
            nodes.measured,
            "hgx-h200",
            {"measured_gbs": 480.0},  # sums in the network
            {"measured_gbs": 500.0},
            "measured_gbs: given 500, allowed: 45 to 495, beside intra_gbs = 450",
        ),
        (
            nodes.measured,
            "hgx-h200",
            {"measured_gbs": None, "intra_gbs": None},
            {"intra_gbs": None},
            "missing field 'intra_gbs', which measured_gbs is a share of",
        ),
        (
            nodes.network,
            "hgx-h100",
            {"inter_gbs": 0.1},
            {"inter_gbs": 400.0},
            "inter_gbs: given 400, allowed: 0.1 to 128 GB/s, a card's share in one direction",
        ),
        (
            nodes.host_memory,
            "hgx-h100",
            {"host_ram_gb": 10240},
            {"host_ram_gb": 2_097_152},
            "host_ram_gb: given 2097152, allowed: 64 to 10240 GB, beside 640 GB of cards",
        ),
        (
            nodes.cores,
            "hgx-h100",
            {"cpu_cores": 512},
            {"cpu_cores": 8},
            "cpu_cores: given 8, allowed: 16 to 512, beside 8 cards",
        ),
        (
            nodes.bridges,
            "nvlink-bridge-h100",
            {"gpus": 4},
            {"gpus": 8},
            "gpus: given 8, allowed: at most 4, which a bridge joins",
        ),
        (
            nodes.peers,
            "hgx-h100",
            {"p2p": None},
            {"p2p": False},
            "p2p: given false, allowed: true, over NVLink 4, NVSwitch",
        ),
        (
            nodes.peers,
            "consumer-pcie",
            {"gpu_ids": ("l4",), "p2p": True},
            {"p2p": True},
            "p2p: given true, allowed: false, over PCIe between rtx3060, whose driver has no peer-to-peer",
        ),
    ],
)
def test_a_rule_has_a_bound(
    rule: Rule[Any], node: str, within: dict[str, Any], beyond: dict[str, Any], line: str
) -> None:
    assert said(rule, node, **within) == []
    assert said(rule, node, **beyond) == [line]
