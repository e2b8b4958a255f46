"""The memory that PyTorch reserves in a step of RL whose micro batches differ in length, phase by phase.

A trainer that removes padding has micro batches of as many lengths as there are of them. A freed block of logits serves
no micro batch that is a token longer than its own, so that one that is longer than all before it has its large blocks
reserved anew, beside those that were there, until the cache is emptied. How often that happens follows from the order
of lengths alone. So a phase is replayed with as many micro batches, from the shortest to the longest, as are such
records in the step of a run that has most of them. What a rollout engine asleep in the same process still has on
PyTorch's books is none of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from calc.base.ledger import total
from calc.base.plan import Stage
from calc.replay.allocator import Allocator, Expandable, OutOfMemory
from calc.replay.blocks import Blocks
from calc.replay.fsdp1_streams import Gathers
from calc.replay.fsdp2_streams import ROOT, Shards
from calc.replay.replay import Replay, Sharded, blocks_known, blocks_of
from calc.scenario.lengths import SAMPLES, Lengths, middles
from calc.scenario.scenario import Scenario
from calc.step.placement import Placed
from calc.step.roles import Roles
from calc.step.stages import RESTING, Stages

HALF = 0.5  # of all runs meet as many records


class Pass(NamedTuple):
    """A role's forwards, each with its backward if it trains: tokens of a sequence in each, and passes to a step."""

    placed: Placed
    trains: bool
    lengths: tuple[int, ...]
    each: int = 1


Section = list[Pass]  # between two calls of `empty_cache`


def reserved(roles: Roles, names: Sequence[str], limit: int, workspace: int) -> int | None:
    """The most bytes that PyTorch reserves as the roles `names` score and train, where it may reserve `limit`.

    None if the blocks of a trained role are not known. cuBLAS takes a `workspace` for each thread.
    """
    stages = Stages(roles, names)
    found = [*sections(roles, stages)]
    if not found or not all(blocks_known(p.placed, bare=True) for section in found for p in section if p.trains):
        return None
    return max(_replayed(roles, stages, section, limit, workspace) for section in found)


def sections(roles: Roles, stages: Stages) -> Iterator[Section]:
    """The phases of a step as the cache is emptied between them; none if it never is.

    Roles that only score are left out where their blocks are not known: they take less than those that train. So is a
    reference that is the actor without its adapters: it finds the blocks of the actor's own scores.
    """
    empties, section = roles.keeps.empties, Section()
    for stage in roles.keeps.stages if empties else ():
        if stage.does not in RESTING or stage.role not in stages.placed:
            continue
        placed = stages.placed[stage.role]
        if stage.does == "train" or blocks_known(placed, bare=True):
            section.append(_pass(roles.s, placed, stage))
        if empties == "each" or "weights" in placed.role.leaves:
            yield from [section] if section else []
            section = []
    yield from [section] if section else []


def _pass(s: Scenario, placed: Placed, stage: Stage) -> Pass:
    """The forwards of a stage: only the records among them.

    A dynamic batch is cut into parts of nearly equal tokens, the largest first (verl 0.4.0 `utils/seqlen_balancing.py`,
    `karmarkar_karp`), so that only the first part of each update may be a record.
    """
    assert s.rollout
    own, trains = placed.s, stage.does == "train"
    rows = placed.role.rows if trains else placed.role.scoring_rows
    mine = -(-s.rollout.batch * s.rollout.n // s.data_parallel)
    updates = max(1, s.rollout.batch * s.rollout.n // s.global_batch) if trains else 1
    dynamic = own.max_tokens_per_gpu is not None
    passes = updates if dynamic else max(1, mine // rows)
    steps = max(1, SAMPLES // s.rollout.batch)
    each = 1 if dynamic else max(1, passes // updates)
    return Pass(placed, trains, _lengths(own, s, rows, records(passes, steps)), each)


def _lengths(own: Scenario, s: Scenario, rows: int, count: int) -> tuple[int, ...]:
    """Tokens of a sequence in each of `count` micro batches of `rows`, the least first; one where all are alike.

    Prompts count with their mean.
    """
    assert s.rollout
    prompt, response = s.prompt_and_response
    if not own.unpadded or response >= s.response_len:
        return (own.held_len(rows),)
    tokens = middles(Lengths(response, s.response_len, SAMPLES), s.response_len, rows, count)
    found = [round(prompt + each / rows) for each in tokens]
    most = own.max_tokens_per_gpu
    return tuple([min(each, max(most * own.context_parallel // rows, 1)) if most else each for each in found])


@lru_cache(maxsize=256)
def records(passes: int, steps: int) -> int:
    """The most of `passes` in random order that are longer than all before, in the one of `steps` that has most.

    Half of all runs have no more. The n-th is a record with the probability 1/n, whatever came before it (Renyi, 1962).
    """
    share = [1.0]  # by the number of records so far
    for n in range(1, passes + 1):
        share = [(one + (n - 1) * same) / n for one, same in zip([0.0, *share], [*share, 0.0], strict=True)]
    below = 0.0
    for count, each in enumerate(share):
        below += each
        if below**steps >= HALF:
            return max(1, count)
    return passes


def _replayed(roles: Roles, stages: Stages, section: Section, limit: int, workspace: int) -> int:
    """The most that is reserved in a section, `limit` where that is not enough."""
    heap = (Expandable if roles.s.expandable_segments else Allocator)(limit)
    replay = Replay(heap, workspace)
    running = {p.placed.role.name for p in section}
    beside = [line for name, placed in stages.placed.items() if name not in running for line in stages.idle(placed)]
    try:
        replay.take(total([line for line in beside if line.allocated]))
        models = _load(roles, replay, section)
        for each in section:
            _run(roles, replay, each, models)
    except OutOfMemory:
        return limit
    return heap.process.most_reserved


def _load(roles: Roles, replay: Replay, section: Section) -> dict[str, Blocks]:
    """Loads the models of a section by the names of their roles, with the states of those that train there or stay."""
    models: dict[str, Blocks] = {}
    trained = {p.placed.role.name for p in section if p.trains}
    for each in section:
        name, role = each.placed.role.name, each.placed.role
        if name in models:
            continue
        models[name] = blocks_of(roles, each.placed, scores=not each.placed.trained)
        replay.load(models[name])
        if name in trained or "states" not in role.leaves:
            replay.heap.take_all([size for sizes in models[name].states for size in sizes])
    replay.stepped = True
    process = replay.heap.process
    process.release()
    process.most_reserved = process.reserved
    return models


def _run(roles: Roles, replay: Replay, each: Pass, models: dict[str, Blocks]) -> None:
    """Runs the forwards of a role, and where it trains their backwards and its steps."""
    own = models[each.placed.role.name]
    shards = replay.shards[id(own)]
    for n, length in enumerate(each.lengths, 1):
        m = blocks_of(roles, each.placed, scores=not each.trains, length=length)
        replay.shards[id(m)] = shards
        kept = replay.forward(m)
        replay.uncache()
        if each.trains:
            replay.backward(m, kept)
            replay.adding = True
        else:
            replay.leave(kept)
        if each.trains and (n % each.each == 0 or n == len(each.lengths)):
            replay.step(own)
    if not each.placed.role.root_stays:
        _reshard(shards)


def _reshard(shards: Sharded) -> None:
    """Frees the root unit by hand, where it has stayed gathered."""
    gathered = isinstance(shards, Gathers) and ROOT in shards.gathered
    if gathered or (isinstance(shards, Shards) and ROOT in shards.copied):
        shards.leave(ROOT)
