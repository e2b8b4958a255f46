"""Traffic over links: collectives by ZeRO stage, offload over PCIe; and the bytes of the optimizer step."""

from __future__ import annotations

from calc.throughput.terms import Term

BUBBLE = "bubble"  # the term of idle pipeline stages, which more micro batches make shorter


def collective(name: str, elements: float, b: float, times: float, ranks: int, bus: float) -> Term:
    """A ring's all-gather or reduce-scatter over `ranks` GPUs, `times` in a step; an all-reduce counts as two.

    Every rank receives what the others have, (N - 1)/N of the whole.
    """
    values = {"n": times, "b": b, "P": elements, "N": ranks, "B": bus}
    return Term(name, times * b * elements * (ranks - 1) / ranks / bus, "n·b·P·(N - 1)/(N·B)", values,
                "throughput#communication")  # fmt: skip


def exchanged(
    name: str, elements: float, b: float, times: float, ranks: int, own: int, bus: float, network: float
) -> Term:
    """An all-to-all over `ranks` GPUs, `own` of them in a node, `times` in a step.

    Every rank sends each other rank its part by itself: within the node over the bus, to other nodes over its own share
    of the network, both at once.
    """
    near, far = min(own, ranks) - 1, max(0, ranks - own)
    values = {"n": times, "b": b, "P": elements, "N": ranks, "i": near, "B": bus, "o": far, "W": network}
    seconds = times * b * elements / ranks * max(near / bus, far / network)
    return Term(name, seconds, "n·b·P/N·max(i/B, o/W)", values, "throughput#communication")


def hidden(moved: float, share: float, computed: float) -> Term:
    """Traffic that runs while the GPU computes: at most `share` of it, and no longer than the computation."""
    values = {"o": share, "C": moved, "G": computed}
    return Term("overlap", -min(share * moved, computed), "-min(o·C, G)", values, "throughput#overlap")


def stepped(elements: float, per_element: float, ranks: int, bandwidth: float) -> Term:
    """The optimizer step on the GPU: its bytes are read and written once."""
    values = {"P": elements, "o": per_element, "N": ranks, "B": bandwidth}
    return Term("optimizer", elements * per_element / (ranks * bandwidth), "P·o/(N·B)", values, "throughput#optimizer")


def stepped_on_host(elements: float, per_element: float, ranks: int, on_node: int, rate: float) -> Term:
    """CPU Adam's step: the ranks of a node share its memory bandwidth."""
    values = {"P": elements, "o": per_element, "N": ranks, "g": on_node, "R": rate}
    return Term("optimizer", elements * per_element * on_node / (ranks * rate), "P·o·g/(N·R)", values,
                "throughput#optimizer")  # fmt: skip


def copied(elements: float, per_element: float, ranks: int, pcie: float) -> Term:
    """Copies of gradient and parameter shards between GPU and host."""
    values = {"P": elements, "b": per_element, "N": ranks, "B": pcie}
    return Term("offload", elements * per_element / (ranks * pcie), "b·P/(N·B)", values, "throughput#offload")


def bubble(stages: int, chunks: int, micro: float, busy: float) -> Term:
    """The pipeline bubble: stages idle while the first micro batch comes down and the last of an optimizer step's
    `micro` goes up.

    With several chunks a stage it is that many times shorter (arXiv:2104.04473, section 2.2).
    """
    values = {"p": stages, "v": chunks, "m": micro, "G": busy}
    return Term(BUBBLE, busy * (stages - 1) / (chunks * micro), "G·(p - 1)/(v·m)", values, "throughput#pipeline")
