"""Step time as a sum of named terms: arithmetic, memory bandwidth, links, offload, and for RL the rollout."""

from __future__ import annotations

from dataclasses import dataclass

from calc.architecture import Head
from calc.catalog import GPU, Catalog, Node
from calc.rules import PAIRED, RL
from calc.scenario import Scenario
from calc.throughput.rates import Rates, rates
from calc.throughput.terms import Term, Unrated, within
from calc.throughput.update import Load, update

__all__ = ["Term", "Throughput", "Unrated", "node_of", "throughput"]


@dataclass(frozen=True, slots=True)
class Throughput:
    """How long a step takes and where the time goes.

    `step_seconds` is one optimizer step: forward, backward and update for `global_batch` sequences (pairs, for rm and
    dpo). For RL it is one whole iteration over `rollout.batch` × `rollout.n` responses: generation, scoring, and as
    many optimizer steps as they make. Data loading, evaluation, checkpoints and the first steps' warm-up are left out.
    `tokens_per_second` counts the tokens of all sequences of that step, prompts included, over the whole job.
    `terms` add up to `step_seconds`; one below zero is time that others hide. `bound_by` names the largest.
    """

    step_seconds: float
    tokens_per_second: float
    bound_by: str
    terms: tuple[Term, ...]


def throughput(s: Scenario, gpu: GPU, node: Node | None) -> Throughput:
    """The step time of `s` on `gpu`, joined as in `node` (None: by the card's own link).

    Sequences count with their mean length, `expected_len`, which is the cap where nothing else is said. Raises
    Unrated, one line, where the catalog lacks a rate that the job needs.
    """
    r = rates(gpu, node, s.gpus_per_node, s.precision)
    if s.task in RL:
        raise Unrated(f"task: the speed of {s.task} is not computed yet")
    terms = tuple(t for t in supervised(s, r) if t.seconds)
    seconds = sum([t.seconds for t in terms])
    tokens = s.global_batch * (2 if s.task in PAIRED else 1) * s.expected_len
    return Throughput(seconds, tokens / seconds, max(terms, key=lambda t: t.seconds).name, terms)


def supervised(s: Scenario, r: Rates) -> list[Term]:
    """The terms of a task that trains one model on given sequences; for dpo its reference scores them first."""
    load = Load(s.rows, s.expected_len, s.accumulation, 1)
    head: Head = "scalar" if s.task == "rm" else "lm"
    terms = list(update(s, r, load, head))
    reference = s.role("reference")
    if reference:
        terms += within("reference", list(update(reference, r, load, "lm", trained=False)))
    return terms


def node_of(s: Scenario, catalog: Catalog) -> Node | None:
    """The node that the job's GPUs stand in: of those built with the card and large enough, the one with slowest links.

    A scenario does not name its node; None where the catalog knows none.
    """
    found = [node for node in catalog.nodes.values() if s.gpu in node.gpu_ids]
    fitting = [node for node in found if node.gpus >= s.gpus_per_node] or found
    return min(fitting, key=lambda node: (node.intra_gbs or 0, node.id), default=None)
