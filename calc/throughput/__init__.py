"""Step time as a sum of named terms: arithmetic, memory bandwidth, links, offload, and for RL the rollout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, assert_never

from calc.base.plan import Keeps
from calc.catalog.catalog import GPU, Catalog, Node
from calc.models.architecture import Head
from calc.scenario.scenario import Scenario, changed
from calc.step.placement import VALUED, serving
from calc.throughput.rates import Rates, rated
from calc.throughput.rollout import SWAP, Engine, generated, served, swapped, synced
from calc.throughput.terms import Term, Unrated, within
from calc.throughput.training import Load, update

__all__ = ["Term", "Throughput", "Unrated", "node_of", "throughput"]


@dataclass(frozen=True, slots=True)
class Throughput:
    """The time of a step and its terms.

    `step_seconds` is one optimizer step: forward, backward and update for `global_batch` sequences (pairs, for rm and
    dpo). For RL it is one whole iteration over `rollout.batch` × `rollout.n` responses: generation, scoring, and as
    many optimizer steps as they make. Data loading, evaluation, checkpoints and the first steps' warm-up are left out.
    `tokens_per_second` counts the tokens of all sequences of that step, prompts included, over the whole job. `terms`
    add up to `step_seconds`; a term below zero is time hidden behind other terms. `bound_by` names the largest.
    """

    step_seconds: float
    tokens_per_second: float
    bound_by: str
    terms: tuple[Term, ...]

    def as_dict(self) -> dict[str, Any]:
        """The fields as the contract's section 4 spells them."""
        return {
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "bound_by": self.bound_by,
            "terms": {term.name: term.seconds for term in self.terms},
        }


def throughput(s: Scenario, gpu: GPU, node: Node | None, cache_tokens: int | None = None) -> Throughput:
    """The step time of `s` on `gpu`, joined as in `node` (None: by the card's own link).

    Sequences count with their mean length, `expected_len`, by default the cap; for RL it is divided between prompt and
    response as their caps are. Padding takes time where `lengths` tell how much there is, and is no token of the rate.
    `cache_tokens` is the size of the KV cache that an estimate found; without it, the cache is sized as if the rollout
    had its card alone. Raises Unrated, one line, if the catalog lacks a rate that the job needs, or if vLLM would not
    start.
    """
    if s.load_in_8bit:
        raise Unrated("load_in_8bit: given true, of which no step has been timed, so speed is not estimated")
    terms = tuple(terms_of(s, gpu, node, cache_tokens))
    sequences = _responses(s) if s.rollout else s.sequences
    seconds = sum([t.seconds for t in terms])
    return Throughput(seconds, sequences * s.expected_len / seconds, max(terms, key=_seconds).name, terms)


def terms_of(
    s: Scenario, gpu: GPU, node: Node | None, cache_tokens: int | None = None, *, served: bool = True
) -> list[Term]:
    """The terms of `throughput`; unless `served`, without the time in which vLLM generates, which others share."""
    r = rated(gpu, node, s.gpus_per_node, s.precision)
    found = iteration(s, gpu, r, cache_tokens, serves=served) if s.rollout else supervised(s, r)
    return [t for t in found if t.seconds]


def swaps_of(s: Scenario, gpu: GPU, node: Node | None) -> list[Term]:
    """Those terms of an RL iteration that copy what leaves the GPUs between its phases."""
    found = swapped(s, s.keeps, rated(gpu, node, s.gpus_per_node, s.precision))
    return [t for t in found if t.name.endswith(SWAP)]


def supervised(s: Scenario, r: Rates) -> list[Term]:
    """The terms of a task that trains one model on given sequences; a frozen one's forward is added, for kto twice."""
    rows = s.rows
    if s.max_tokens_per_gpu:  # dynamic batches are balanced
        rows = -(-s.sequences // (s.data_parallel * s.accumulation))
    load = Load(rows, s.computed_len(rows), s.accumulation, 1)
    head: Head = "scalar" if s.task == "rm" else "lm"
    keeps = s.keeps
    own = keeps.roles[0]
    terms = list(update(s, own, r, load, head))
    scored = load
    if s.task == "kto":  # each completion with the next one's prompt, by the policy and by the reference
        scored = load._replace(micro=2 * load.micro)
        terms += within("actor, scoring", list(update(s, own, r, load, head, trained=False)))
    for name in ("reference", "teacher"):
        if frozen := s.role(name):
            first = next(role for role in keeps.roles if name == (role.model or role.name))  # of its pipeline's stages
            terms += within(name, list(update(frozen, first, r, scored, "lm", trained=False)))
    return terms


def iteration(s: Scenario, gpu: GPU, r: Rates, cache_tokens: int | None, *, serves: bool = True) -> list[Term]:
    """The terms of an RL iteration, stage by stage; unless `serves`, without the time in which vLLM generates.

    Stages follow each other. Where roles have GPUs of their own, all that score run at once, as do all that train: the
    GPU group that takes longest counts.
    """
    keeps = s.keeps
    terms: list[Term] = []
    side: dict[str, dict[str, list[Term]]] = {"score": {}, "train": {}}
    synced_to = set()
    for stage in keeps.stages:
        if stage.role != "rollout" and keeps.role(stage.role).pipeline[0] > 0:
            continue  # stages of a pipeline work at once, and the time of one counts for all
        match stage.does:
            case "serve" if not serves:
                pass
            case "serve":
                terms += within("rollout", served(s, r, _engine(s, keeps, gpu, cache_tokens)))
            case "generate":
                terms += within("rollout", generated(s, r, stage, _responses(s)))
            case "sync":
                if stage.role not in synced_to:
                    synced_to.add(stage.role)
                    terms += synced(s, r, keeps.role(stage.role).model or stage.role)
            case "score" | "train":
                for name in dict.fromkeys(filter(None, (stage.role, stage.beside, stage.joint, stage.inside))):
                    trained = stage.does == "train" and name != stage.inside
                    known = keeps.role(name).model or name
                    group = s.group(known) if s.placement == "separate" else ""
                    label = f"{known}, scoring" if not trained else known
                    ran = within(label, role(s, keeps, r, name, trained=trained))
                    side[stage.does].setdefault(group, []).extend(ran)
            case "save":
                pass  # not every step writes a checkpoint
            case other:
                assert_never(other)
    for groups in side.values():
        terms += max(groups.values(), key=lambda ran: sum([t.seconds for t in ran]), default=[])
    return [*terms, *swapped(s, keeps, r)]


def role(s: Scenario, keeps: Keeps, r: Rates, name: str, *, trained: bool) -> list[Term]:
    """The terms of a role's pass over all responses: its update, or its forward alone."""
    known = keeps.role(name)
    name = known.model or name
    own = s.role(name) or s
    # what the framework moves to the host between phases is on the GPU during the role's own phase
    if known.leaves:
        stepping = own.offload.optimizer and "states" not in known.leaves
        own = changed(own, {"offload": replace(own.offload, optimizer=stepping, parameters=False, activations=False)})
    rows = known.rows if trained else known.scoring_rows
    steps = max(1, _responses(s) // s.global_batch) if trained else 1
    mine = max(1, _responses(s) // (own.data_parallel * steps))  # in each step
    rows = min(rows, mine)
    if own.max_tokens_per_gpu:  # dynamic batches are balanced
        rows = -(-mine // -(-mine // rows))
    load = Load(rows, s.expected_len, steps * -(-mine // rows), steps)
    return list(update(own, known, r, load, "scalar" if name in VALUED else "lm", trained=trained))


def _responses(s: Scenario) -> int:
    assert s.rollout
    return s.rollout.batch * s.rollout.n


def _engine(s: Scenario, keeps: Keeps, gpu: GPU, tokens: int | None) -> Engine:
    """One engine of the rollout, with `tokens` in its KV cache, or as many as the engine allocates."""
    engine = serving(s, keeps, gpu)
    assert engine
    cache = engine.cache(0)
    tokens = cache.tokens if tokens is None else tokens
    if not tokens:
        raise Unrated(f"rollout: {cache.refusal or 'its KV cache has no room'}")
    return Engine(tokens, engine.max_num_seqs, engine.serving.graphs, engine.schedules_ahead)


def node_of(s: Scenario, catalog: Catalog) -> Node | None:
    """The node that the job's GPUs are in: the one with the slowest links that is built with the card and large enough.

    A scenario does not name its node; None if the catalog knows none.
    """
    found = [node for node in catalog.nodes.values() if s.gpu in node.gpu_ids]
    fitting = [node for node in found if node.gpus >= s.gpus_per_node] or found
    return min(fitting, key=lambda node: (node.intra_gbs or 0, node.id), default=None)


def _seconds(term: Term) -> float:
    return term.seconds
