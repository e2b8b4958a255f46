"""A step replayed block by block through PyTorch's allocator: what it reserves, and where it breaks on a card.

What is allocated at a peak does not decide whether a step runs: between blocks lie freed ones that are too small for
the next request. Which these are follows from the sizes and the order of all blocks, and both follow from the model,
the batch and the code that runs. Where one model is trained on one GPU, or by plain PyTorch under FSDP 2, alone or with
a frozen one beside it, they are all known here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import NamedTuple

from calc.allocator import Allocator, Block, Expandable, OutOfMemory, State
from calc.blocks import Blocks, Piece, blocks
from calc.engines.fsdp import Fsdp
from calc.engines.fsdp1 import Fsdp1
from calc.engines.plain import Plain
from calc.job import Roles
from calc.keeps import Stage
from calc.placement import Placed
from calc.script import CAST, GIVEN, INPUT, MULTIPLY, PASSING, WEIGHT, Script
from calc.shards import Shards

STEPS = 3  # states are made in the first, and lie in the way of the second; later ones find what that left
MICRO_BATCHES = 2  # gradients stay from the first, and are added to from the second on

Own = dict[int, Block]  # a piece's blocks by their slots
Kept = list[Own]  # what each piece keeps for its backward, lowest first


class Act(NamedTuple):
    """What is replayed: a model, whether it is trained, and one that scores inside its forward, maybe as the same.

    `expandable`: PyTorch's segments are.
    """

    model: Blocks
    trained: bool
    micro_batches: int
    inside: Blocks | None = None
    shares: bool = False
    expandable: bool = False


def known(roles: Roles) -> bool:
    """True if what the roles of a job do can be replayed: one stage of models that are whole, or FSDP 2's shards."""
    stages, placed = roles.keeps.stages, [*roles.placed.values()]
    if len(stages) != 1 or stages[0].does not in ("train", "score"):
        return False
    return not stages[0].beside and all(map(_known, placed)) and len(placed) == 1 + bool(stages[0].inside)


def act(roles: Roles) -> Act | None:
    """What the roles of a job do, if that is known."""
    if not known(roles):
        return None
    stage: Stage = roles.keeps.stages[0]
    own = roles.placed[stage.role]
    trained = stage.does == "train" and own.trained
    inside = roles.placed[stage.inside] if stage.inside else None
    return Act(
        _blocks(roles, own, scores=not trained),
        trained,
        min(own.s.accumulation, MICRO_BATCHES) if trained else 1,
        _blocks(roles, inside, scores=True) if inside else None,
        inside is not None and inside.role.shares,
        roles.s.expandable_segments,
    )


def _known(placed: Placed) -> bool:
    """Whether all blocks of a role are known: one GPU that has it whole, or plain PyTorch's shards, by FSDP 2."""
    s, engine = placed.s, placed.engine
    if isinstance(engine, Plain):
        return s.gpus == 1
    if not isinstance(engine, Fsdp) or isinstance(engine, Fsdp1) or s.framework != "torch":
        return False
    uncut = s.gpus == engine.replica.ranks > 1 and s.context_parallel == 1
    return uncut and not engine.offload and not engine.replica.quantised


def _blocks(roles: Roles, placed: Placed, *, scores: bool) -> Blocks:
    rows = placed.role.scoring_rows if scores else placed.role.rows
    batch = roles.batch(placed.s, rows)
    replica = placed.scorer.replica if scores else placed.engine.replica
    sharded = isinstance(placed.engine, Fsdp)
    return blocks(replica, batch, roles.masked(replica, placed.s, batch), placed.s.checkpointing, sharded)


class Reserve:
    """What PyTorch reserves for what is replayed: undisturbed, and the least that it must be allowed.

    Neither depends on a card. The least is sought between the most that is allocated and what is reserved undisturbed,
    to within a thousandth, as far as somebody asks, and always in the same halves: a limit may suffice where a higher
    one does not, so that a search from a card's own limit would find something else for each card.
    """

    def __init__(self, a: Act, workspace: int) -> None:
        """Of `a`, where cuBLAS takes a `workspace` for each thread."""
        self.act, self.workspace = a, workspace
        process = self._replay().heap.process
        self.undisturbed = process.most_reserved
        self._low, self._high = process.most, self.undisturbed

    def _replay(self, limit: int | None = None) -> Replay:
        heap = Expandable(limit) if self.act.expandable else Allocator(limit)
        replay = Replay(heap, self.workspace, _outcomes(self.act, self.workspace))
        replay.all(self.act)
        return replay

    def breaks(self, limit: int) -> bool:
        """True if a request finds nothing left of `limit` bytes."""
        try:
            self._replay(limit)
        except OutOfMemory:
            return True
        return False

    @property
    def least(self) -> int:
        """The bytes that must be allowed, where segments that are all free go back before a request fails."""
        while self._narrow():
            pass
        return self._high

    def meets(self, asked: Callable[[int], bool]) -> bool:
        """True if the least is as small as is `asked`, which holds of all sizes up to some size."""
        while not asked(self._high):
            if not asked(self._low) or not self._narrow():
                return False
        return True

    def _narrow(self) -> bool:
        """Halve what lies between the bounds of the least; False if they are close enough."""
        if self._high - self._low <= self.undisturbed // 1000:
            return False
        middle = (self._low + self._high) // 2
        if self.breaks(middle):
            self._low = middle
        else:
            self._high = middle
        return True


@lru_cache(maxsize=1024)
def reserve(a: Act, workspace: int) -> Reserve:
    """What PyTorch reserves for `a`, which a search and the estimates after it ask for one after another."""
    return Reserve(a, workspace)


class Left(NamedTuple):
    """What a piece leaves: its `own` blocks, and those that outlive it; `threads` have called cuBLAS."""

    own: Own
    gradients: list[Block]
    casts: list[Block]
    late: Block | None
    head: Block | None
    threads: int


class Outcome(NamedTuple):
    """What comes of a `script` that no limit is in the way of: what is left, of the allocator too, and added to sums.

    `peak` is the most that is allocated more meanwhile.
    """

    script: Script
    left: Left
    state: State
    reserved: int
    allocated: int
    peak: int


Known = dict[Hashable, Outcome]  # by the identity of the script and all that it finds


@lru_cache(maxsize=4)
def _outcomes(a: Act, workspace: int) -> Known:
    """What has come of pieces in the replays of `a` so far, under whatever limit."""
    return {}


class Replay:
    """What one GPU has of models and their steps, through an allocator; raises OutOfMemory where that does.

    Layer after layer and step after step find the same free blocks, and so do replays under one limit after another:
    what comes of a piece is `known` then.
    """

    def __init__(self, heap: Allocator, workspace: int, known: Known | None = None) -> None:
        """Nothing is there yet."""
        self.heap = heap
        self.known = {} if known is None else known
        self.phase = "load"
        self.workspace, self.threads = workspace, 0
        self.shards: dict[int, Shards] = {}  # by the identity of the model's blocks
        self.gradients: list[Block] = []
        self.adding = False  # gradients of the micro-batches before are there
        self.apart = False  # the gradient that comes is a tied head's, which waits for the embedding's
        self.head: Block | None = None
        self.late: Block | None = None  # outputs that outlive their backward
        self.casts: list[Block] = []  # autocast's cache
        self.stepped = False

    def all(self, a: Act) -> None:
        """The models arrive, then STEPS steps."""
        self.load(a.model)
        if a.inside and not a.shares:
            self.load(a.inside)
        elif a.inside and a.model.units:
            self.shards[id(a.inside)] = self.shards[id(a.model)]
        for _ in range(STEPS):
            for _ in range(a.micro_batches):
                kept = self.forward(a.model)
                if a.inside:
                    self.leave(self.forward(a.inside))
                self.uncache()
                if a.trained:
                    self.backward(a.model, kept)
                    self.adding = True
                else:
                    self.leave(kept)
            if a.trained:
                self.step(a.model)

    def take(self, size: int) -> Block | None:
        """A block, or nothing where there is nothing to take."""
        return self.heap.take(size) if size else None

    def give(self, *given: Block | None) -> None:
        """Take blocks back."""
        for block in given:
            if block:
                self.heap.give(block)

    def load(self, m: Blocks) -> None:
        """A model's weights arrive, and stay, whole or in shards."""
        for size in m.weights:
            self.take(size)
        if m.units:
            self.shards[id(m)] = Shards(m, self.heap)

    def play(self, script: Script, own: Own, late: int | None = None) -> None:
        """The steps of a piece over its blocks; the one in slot `late` is not given back yet."""
        heap, process = self.heap, self.heap.process
        *found, _ = heap.state
        key = id(script), late, self.adding, self.apart, self.threads, *found, *own.items()
        known = self.known.get(key)
        if known and not process.lacks(known.reserved):
            heap.state, left = known.state, known.left
            process.add(known.reserved, known.allocated, known.peak)
        else:
            reserved, allocated, most, released = process.reserved, process.allocated, process.most, process.released
            process.most = allocated
            left = self._played(script, {**own}, late)
            if process.released == released:
                added = process.reserved - reserved, process.allocated - allocated, process.most - allocated
                self.known[key] = Outcome(script, left, heap.state, *added)
            process.most = max(most, process.most)
        self.gradients += left.gradients
        self.casts += left.casts
        self.late, self.head, self.threads = left.late or self.late, left.head or self.head, left.threads
        own.clear()
        own.update(left.own)

    def _played(self, script: Script, own: Own, late: int | None) -> Left:
        """What the steps of a piece leave, one after another."""
        take, give = self.heap.take, self.heap.give
        adds = self.adding and not self.shards
        gradients: list[Block] = []
        casts: list[Block] = []
        outlives: Block | None = None
        head: Block | None = None
        threads = self.threads
        for slot, size in script.steps:
            if not size:
                block = own.pop(slot, None)
                if block and slot == late:
                    outlives = block
                elif block:
                    give(block)
            elif slot == MULTIPLY:
                # cuBLAS takes its workspace with a thread's first product
                if threads < size:
                    threads = size
                    self.take(self.workspace)
            elif slot == CAST:
                casts.append(take(size))
            elif slot != WEIGHT:
                own[slot] = take(size)
            elif self.apart:
                head = take(size)
            elif adds:
                give(take(size))
            else:
                gradients.append(take(size))
        return Left(own, gradients, casts, outlives, head, threads)

    def keep(self, block: Block | None) -> None:
        """A weight's gradient has been made: it stays, or is added to the one that is there."""
        if self.adding and not self.shards:
            self.give(block)
        elif block:
            self.gradients.append(block)

    def forward(self, m: Blocks) -> Kept:
        """A forward; what its pieces keep."""
        self.phase = "forward"
        shards = self.shards.get(id(m))
        if shards:
            shards.begin()
        block = self.take(m.stream)
        kept: Kept = [{PASSING - n: self.heap.take(size) for n, size in enumerate(m.tables)}]
        for n, piece in enumerate((*m.layers, m.norm, m.head)):
            layer = shards if n < len(m.layers) else None
            if layer:
                layer.enter(n)
            elif shards and piece is m.head and not m.inside:
                shards.end()
            own = {INPUT: block} if block else {}
            self.play(piece.forward, own)
            block = own.pop(piece.forward.out, None)
            kept.append(own)
            if layer:
                layer.leave(n)
        if shards and m.inside:
            shards.end()
        self.give(block)
        if m.wrapped:
            self.uncache()
        if m.held == "next":
            self.drop()
        return kept

    def leave(self, kept: Kept) -> None:
        """What a forward keeps ends."""
        for own in kept:
            self.give(*own.values())

    def uncache(self) -> None:
        """An autocast ends, and its cache with it."""
        self.give(*self.casts)
        self.casts = []

    def drop(self) -> None:
        """Outputs that outlived their backward end."""
        self.give(self.late)
        self.late = None

    def backward(self, m: Blocks, kept: Kept) -> None:
        """The backward of a forward."""
        self.phase = "backward"
        block: Block | None = None
        self.apart = bool(m.tied)
        shards = self.shards.get(id(m))
        if shards:
            shards.turn()
        for n, piece in reversed([*enumerate((*m.layers, m.norm, m.head))]):
            layer = shards if n < len(m.layers) else None
            if layer:
                layer.reenter(n)
            before = len(self.gradients)
            block = self.back(piece, kept.pop(), block)
            self.apart = False
            if layer:
                own, self.gradients = self.gradients[before:], self.gradients[:before]
                layer.reduce(n, own, adding=self.adding)
        self.leave(kept)
        if m.embedding:
            made = self.take(m.embedding)
            self.give(self.take(m.sorting))
            self.give(block)
            self.keep(self.tie(m, made))
        else:
            self.give(block)
        if shards:
            shards.reduce(-1, self.gradients, adding=self.adding)
            shards.wait()
            self.gradients = []

    def back(self, piece: Piece, own: Own, given: Block | None) -> Block | None:
        """One piece's backward; the gradient of its input."""
        assert piece.backward
        if given:
            own[GIVEN] = given
        self.play(piece.backward, own, piece.late)
        block = own.pop(piece.backward.out, None)
        self.give(*own.values())
        return block

    def tie(self, m: Blocks, made: Block | None) -> Block | None:
        """The embedding's gradient with a tied head's, added in place only into what is contiguous.

        See `calc.memory.gradients.tied_embedding`.
        """
        if not m.tied:
            return made
        total = self.head
        if m.tied == "apart":
            total = self.take(m.embedding)
            self.give(self.head)
        self.give(made)
        self.head = None
        return total

    def step(self, m: Blocks) -> None:
        """The optimizer's step, which makes its states the first time, and the end of all gradients."""
        self.phase = "step"
        if not self.stepped:
            self.stepped = True
            for sizes in m.states:
                for size in sizes:
                    self.take(size)
        if m.at_once:
            self.give(*[self.take(size) for size in m.passing])
        else:
            for size in m.passing:
                self.give(self.take(size))
        if m.held == "step":
            self.drop()
        self.give(*self.gradients)
        for shards in self.shards.values():
            shards.zero()
        self.gradients, self.adding = [], False
