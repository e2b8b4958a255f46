"""Rules that refuse impossible machines: links are checked against cards, network and host memory against both."""

from __future__ import annotations

import re
from collections.abc import Iterator

from calc.catalog.catalog import GPU, Catalog, Node
from calc.check.architectures import GENERATIONS, SLOT
from calc.check.faults import fault

BRIDGED = 4  # the most cards that bridges join, as on the H200 NVL
NEAR = 0.05  # relative difference allowed between a link's figure and its specification: 31.5 for 32 GB/s of PCIe Gen4
# All-reduce over a link's nominal speed: 0.78 on the A100, 0.82 on the H200, a little more with sums in the network.
REACHED = (0.1, 1.1)
NETWORK = 0.1  # the least GB/s of a card: 10 Gb/s shared among eight
# Host memory over the cards' memory: 0.3 for four cards of 96 GB in a workstation, 10 for two L4 in a server.
HOST = (0.1, 16)
CORES = (2, 64)  # of a node for each of its cards
OTHERS = {"Infinity Fabric": "AMD", "HCCS": "Huawei", "Xe Link": "Intel"}  # the vendors of these links
_BOTH_WAYS = re.compile(r"([0-9]+(?:\.[0-9]+)?) GB/s both ways")
_NETWORK = re.compile(r"\((?:([0-9]+) x )?([0-9]+) Gb/s\b")


def _cards(node: Node, catalog: Catalog) -> list[GPU]:
    return [catalog.gpus[name] for name in node.gpu_ids]


def cards(node: Node, catalog: Catalog) -> Iterator[str]:
    """A card, or a size of memory (of one card or of all), in the machine's name is that of its cards."""
    named = {word for word in re.split(r"[^a-z0-9]+", node.name.casefold()) if word in _kinds(catalog)}
    sizes = {float(size) for size in re.findall(r"(?<![\w.])([0-9]+) ?GB\b", node.name)}
    for index, card in enumerate(_cards(node, catalog)):
        place = f"gpu_ids[{index}]"
        if named and card.id.partition("-")[0] not in named:
            yield fault(place, card.id, f"{' or '.join(sorted(named))}, as name says: {node.name}")
        elif sizes and not sizes & {card.memory_gb, node.gpus * card.memory_gb}:
            yield fault(place, card.id, f"a card of the memory that name says: {node.name}")


def _kinds(catalog: Catalog) -> set[str]:
    """The beginnings of the cards' ids, up to the first hyphen."""
    return {name.partition("-")[0] for name in catalog.gpus}


def _generation(node: Node) -> int:
    """The generation in the link's name; 0 where it has none."""
    found = re.search(r"(?:NVLink |PCIe Gen)([0-9])", node.link)
    return int(found[1]) if found else 0


def link(node: Node, catalog: Catalog) -> Iterator[str]:
    """The link is one that the cards have."""
    for card in _cards(node, catalog):
        known = GENERATIONS[card.architecture]
        if node.link.startswith("NVLink"):
            has = f"NVLink {known.nvlink}" if known.nvlink and card.nvlink_gbs else "no NVLink"
            if not (card.nvlink_gbs and known.nvlink == _generation(node)):
                yield fault("link", node.link, f"a link of {card.id}, which has {has}")
        elif node.link.startswith("PCIe"):
            own = card.pcie_gen or max(known.pcie)
            if _generation(node) > own:
                yield fault("link", node.link, f"at most PCIe Gen{own}, which {card.id} has")
        elif card.vendor != OTHERS[node.link.split(",")[0]]:
            yield fault("link", node.link, f"a link of {card.id}, which is {card.vendor}'s")


def link_speed(node: Node, catalog: Catalog) -> Iterator[str]:
    """A link's speed in one direction is half of the cards' figure for both; a slot's speed is that of its lanes."""
    if node.intra_gbs is None:
        return
    if node.link.startswith("PCIe"):
        lanes = 8 if node.link.endswith("x8") else 16
        speeds = {node.link: SLOT[_generation(node)] * lanes / 16}
    else:
        speeds = {card.id: card.nvlink_gbs / 2 for card in _cards(node, catalog) if card.nvlink_gbs}
    for name, speed in speeds.items():
        if abs(node.intra_gbs / speed - 1) > NEAR:
            yield fault("intra_gbs", node.intra_gbs, f"{speed:g} GB/s, one direction of {name}")


def speeds_as_printed(node: Node, _: Catalog) -> Iterator[str]:
    """A speed agrees with its source: half of a figure for both directions, or a card's share of a network."""
    said = _BOTH_WAYS.search(node.sources.get("intra_gbs", ""))
    if node.intra_gbs is not None and said and abs(2 * node.intra_gbs / float(said[1]) - 1) > NEAR:
        yield fault("intra_gbs", node.intra_gbs, f"{float(said[1]) / 2:g}, half of the {said[0]} of its source")
    said = _NETWORK.search(node.sources.get("inter_gbs", ""))
    if node.inter_gbs is not None and said:
        each = int(said[1] or 1) * int(said[2]) / 8 / node.gpus
        if abs(node.inter_gbs / each - 1) > NEAR:
            shared = f"the {said[0][1:]} of its source, eight bits a byte, among {node.gpus} cards"
            yield fault("inter_gbs", node.inter_gbs, f"{each:g}, {shared}")


def measured(node: Node, _: Catalog) -> Iterator[str]:
    """The measured all-reduce bandwidth is a plausible share of the link's."""
    if node.measured_gbs is None:
        return
    if node.intra_gbs is None:
        yield "missing field 'intra_gbs', which measured_gbs is a share of"
        return
    low, high = (bound * node.intra_gbs for bound in REACHED)
    if not low <= node.measured_gbs <= high:
        yield fault("measured_gbs", node.measured_gbs, f"{low:g} to {high:g}, beside intra_gbs = {node.intra_gbs:g}")


def network(node: Node, catalog: Catalog) -> Iterator[str]:
    """A card's share of the network is no faster than its slot."""
    if node.inter_gbs is None:
        return
    # a slot of the next generation leaves room for an adapter with a switch of its own
    slots = [2 * SLOT[max(GENERATIONS[card.architecture].pcie)] for card in _cards(node, catalog)]
    if not NETWORK <= node.inter_gbs <= min(slots):
        allowed = f"{NETWORK:g} to {min(slots):g} GB/s, a card's share in one direction"
        yield fault("inter_gbs", node.inter_gbs, allowed)


def host_memory(node: Node, catalog: Catalog) -> Iterator[str]:
    """The host memory is in proportion to the cards' memory."""
    if node.host_ram_gb is None:
        return
    sums = [node.gpus * card.memory_gb for card in _cards(node, catalog)]
    low, high = HOST[0] * min(sums), HOST[1] * max(sums)
    if not low <= node.host_ram_gb <= high:
        yield fault("host_ram_gb", node.host_ram_gb, f"{low:.0f} to {high:.0f} GB, beside {max(sums):g} GB of cards")


def cores(node: Node, _: Catalog) -> Iterator[str]:
    """The cores are a plausible number for each card: threads or those of one processor are not."""
    if node.cpu_cores is None:
        return
    low, high = (bound * node.gpus for bound in CORES)
    if not low <= node.cpu_cores <= high:
        yield fault("cpu_cores", node.cpu_cores, f"{low} to {high}, beside {node.gpus} cards")


def bridges(node: Node, _: Catalog) -> Iterator[str]:
    """Bridges join only a few cards."""
    if node.link.endswith("bridge") and node.gpus > BRIDGED:
        yield fault("gpus", node.gpus, f"at most {BRIDGED}, which a bridge joins")


def peers(node: Node, catalog: Catalog) -> Iterator[str]:
    """Cards with a link of their own reach each other; NVIDIA's driver lets no GeForce card do so over PCIe."""
    if node.p2p is False and not node.link.startswith("PCIe"):
        yield fault("p2p", node.p2p, f"true, over {node.link}")
    if node.p2p and node.link.startswith("PCIe") and (games := [c.id for c in _cards(node, catalog) if c.geforce]):
        yield fault("p2p", node.p2p, f"false, over PCIe between {games[0]}, whose driver has no peer-to-peer")
