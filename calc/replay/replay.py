"""A step replayed block by block through PyTorch's allocator: the memory it reserves, and the limits it fails under.

The bytes allocated at a peak do not decide whether a step runs: between blocks lie freed ones that are too small for
the next request. This fragmentation follows from the sizes and the order of all blocks, and both follow from the model,
the batch and the code that runs. They are all known here where one model is trained on one GPU, under DDP, or by plain
PyTorch under FSDP or ZeRO, alone or with a frozen model beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import lru_cache
from typing import NamedTuple

from calc.autograd.alloc_trace import CAST, ENDED, GIVEN, INPUT, MULTIPLY, PASSING, REPLACED, WEIGHT, Script
from calc.base.plan import Stage
from calc.engines.fsdp import Fsdp
from calc.engines.fsdp1 import Fsdp1
from calc.engines.plain import Plain
from calc.engines.zero import B, Zero
from calc.models.lora import adapts_experts
from calc.replay.allocator import (
    NO_BLOCK,
    Allocator,
    Block,
    Expandable,
    OutOfMemory,
    Process,
    Steps,
    asked,
    length,
)
from calc.replay.blocks import Blocks, Buckets, Flattened, Piece, blocks
from calc.replay.fsdp1_streams import Gathers
from calc.replay.fsdp2_streams import EMBEDDING, ROOT, Shards
from calc.replay.zero2_buckets import Partition
from calc.replay.zero3_streams import Partitions
from calc.scenario.lengths import in_turn
from calc.step.instants import STASH
from calc.step.placement import Placed, masked
from calc.step.roles import Roles

STEPS = 3  # the first makes the states, which lie in the way of the second; later ones find what the second left
MICRO_BATCHES = 2  # the first leaves its gradients, later ones are added to them

# Events of a replay at most, and of all that seek the least memory for it: under a microsecond of a processor each
MOST, SOUGHT = 1_500_000, 750_000
BESIDE = 64  # adapters beside each linear, at most: to find the blocks of hundreds takes seconds
FINE = 250  # the least is sought to one part in so many of what is reserved, finer than measurements tell it
NEAR = 16  # expandable segments leave few gaps: most jobs can do with this part of the interval above its least
MARKED = 8  # parts between marks among batches of other lengths

Own = dict[int, Block]  # a piece's blocks by their slots
Kept = list[Own]  # the blocks that each piece keeps for its backward, lowest piece first
STEPPED = 1 << 29  # the slot of the temporaries of a step in backward
OUTLIVING = 1 << 30  # the first slot of blocks that outlive their piece
RETURNED = 2  # buffers for checkpoints that come back (unsloth_zoo gradient_checkpointing.py of 2024.11.10)
INFLIGHT = 2  # broadcasts at once (torch 2.13 `csrc/distributed/c10d/comm.cpp`, `max_in_flight`)

UnderZero = Partition | Partitions  # stages 1 and 2, and stage 3
Sharded = Shards | Gathers | UnderZero
Both = tuple[Blocks, Blocks | None]  # a model, and one that scores inside its forward, if any


class Act(NamedTuple):
    """The job to replay: a model, whether it is trained, and perhaps one that scores inside its forward.

    `shares`: the scoring model is the trained one, without weights of its own. `expandable`: PyTorch's segments are
    expandable. `others`: both models in batches of other lengths, in the order in which an epoch has them; none where
    all batches are alike.
    """

    model: Blocks
    trained: bool
    micro_batches: int
    inside: Blocks | None = None
    shares: bool = False
    expandable: bool = False
    others: tuple[Both, ...] = ()

    @property
    def events(self) -> int:
        """About how many blocks come and go in a whole replay, which is what it takes."""
        m, steps = self.model, STEPS + len(self.others) // self.micro_batches
        every = (*m.passing, *m.copies)
        passing = len(every if m.at_once else {*every})
        tensors = len(m.weights) + sum(map(len, m.states)) + 2 * steps * passing
        fullest = [(self.model, self.inside)] * STEPS * self.micro_batches
        return tensors + sum([m.events for both in (*fullest, *self.others) for m in both if m])

    def parts(self) -> Iterator[tuple[Callable[[Replay, Act], None], Act]]:
        """The parts replayed in turn: batches of other lengths, if any, then steps of the fullest ones alone."""
        yield Replay.run_load, self
        for n, (model, inside) in enumerate(self.others, 1):
            one = self._replace(model=model, inside=inside)
            yield from ((Replay.run_forward, one), (Replay.run_backward, one))
            if n % self.micro_batches == 0:
                yield Replay.run_step, self
        for _ in range(STEPS):
            for _ in range(self.micro_batches):
                yield from ((Replay.run_forward, self), (Replay.run_backward, self))
            yield Replay.run_step, self


def known(roles: Roles) -> bool:
    """True if a job can be replayed: it has one stage, of models that are whole or sharded by FSDP or ZeRO."""
    stages = roles.keeps.stages
    if len(stages) != 1 or stages[0].does not in ("train", "score"):
        return False
    return (
        not (stages[0].beside or stages[0].joint)
        and len(roles.placed) == 1 + bool(stages[0].inside)
        and all(blocks_known(own, roles.keeps.bare) for own in roles.placed.values())
        and not any(own.role.path.held == "inside" or own.role.path.hidden for own in roles.placed.values())
    )


def act(roles: Roles) -> Act | None:
    """The job of these roles to replay, or None if it cannot be replayed."""
    if not known(roles):
        return None
    stage: Stage = roles.keeps.stages[0]
    own = roles.placed[stage.role]
    trained = stage.does == "train" and own.trained
    inside = roles.placed[stage.inside] if stage.inside else None

    def models(length: int = 0) -> Both:
        other = blocks_of(roles, inside, scores=True, length=length) if inside else None
        return blocks_of(roles, own, scores=not trained, length=length), other

    model, scorer = models()
    return Act(
        model,
        trained,
        min(own.s.accumulation, MICRO_BATCHES) if trained else 1,
        scorer,
        inside is not None and inside.role.shares,
        roles.s.expandable_segments,
        _others(own, models) if trained else (),
    )


def _others(own: Placed, models: Callable[[int], Both]) -> tuple[Both, ...]:
    """The models in batches that are padded to their own longest sequence, where the lengths of the data are known."""
    s = own.s
    if s.lengths is None or s.unpadded:
        return ()
    rows = own.role.rows
    lengths = in_turn(s.lengths, s.seq_len, rows, s.sorted_together(rows))
    made = {length: models(length) for length in sorted(set(lengths))}
    return tuple([made[length] for length in lengths])


def blocks_known(placed: Placed, bare: bool) -> bool:
    """True if all blocks of a role are known: it is whole on its GPU, or sharded beside `bare` PyTorch alone.

    The blocks of a vision tower are not, unless it just lies there.
    """
    s, engine = placed.s, placed.engine
    if s.lora and s.lora.count > BESIDE:
        return False
    if engine.replica.path.compiled and s.expandable_segments:
        return False  # measured with fixed segments alone; three published runs reserve 3 to 6 GiB less than a replay
    run = engine.replica.run
    if run.again:
        return False  # of parts that run again one by one no block is known
    if s.checkpointing != "none" and not run.reentrant and (run.int8 or run.keeps_inputs):
        return False  # contexts keep what checkpointing drops
    if engine.replica.streams and not isinstance(engine, Plain):
        return False
    if engine.replica.arch.vision and (s.images or not s.lora or not isinstance(engine, Plain)):
        return False
    uncut = s.gpus == s.shards * s.data_parallel_replicate * s.tensor_parallel
    if isinstance(engine, Plain):
        return uncut and (s.gpus == 1 or not engine.replica.in_backward)
    if engine.replica.in_backward or engine.replica.arch.expert_ranks > 1:
        return False
    if isinstance(engine, Zero):
        # DeepSpeed learns the order of one forward; that of a model which also scores without adapters is another
        learns = engine.stage == 3 and placed.role.shares
        return bare and uncut and s.shards > 1 and not learns and _partitioned(engine)
    if not isinstance(engine, Fsdp) or not bare or not uncut:
        return False
    if isinstance(engine, Fsdp1):
        return s.shards > 1 and not engine.replica.ends and _flattened(engine)  # over one GPU it does not shard
    return not (engine.offload or engine.replica.quantised or _unreduced(engine))


def _unreduced(engine: Fsdp) -> bool:
    """True if the gradients of several micro batches add up whole, and are reduced with the last of them."""
    return engine.replica.defers and engine.replica.accumulates


def _partitioned(engine: Zero) -> bool:
    """True if the blocks of ZeRO are known: in 16 bits.

    Stages 1 and 2 have the optimizer on the GPU, and stage 1 runs in one stream. Stage 3 has its weights on the GPU and
    streams of its own: no measured job has shown a replay right yet in which gathers and reductions share the stream
    that computes. Nor is it known when copies that are trained beside frozen modules are gathered there.
    """
    r = engine.replica
    if engine.scaled or r.leaves or engine.orthogonal:
        return False
    if r.weight_bytes != B or (r.adapter and r.adapter_bytes != B):
        return False
    if engine.stage < 3:
        beside = engine.overlaps and engine.stage == 1
        return not (engine.plain_bf16 or beside or engine.offload_optimizer)
    return engine.overlaps and not (engine.keeps_weights or engine.offload_parameters or r.quantised or r.saved)


def _flattened(engine: Fsdp1) -> bool:
    """True if the blocks of flat parameters are known: gradients are reduced in every micro batch, and types agree.

    Adapters of routed experts, which run in a loop, are units of which no order is known.
    """
    r = engine.replica
    mixed = r.quantised and (engine.joined or r.weight_bytes != r.run.compute)
    looped = engine.apart and r.run.adapter and adapts_experts(r.arch, r.run.adapter.targets)
    return not (mixed or looped) and not _unreduced(engine) and r.run.precision != "autocast"


def blocks_of(roles: Roles, placed: Placed, *, scores: bool, length: int = 0) -> Blocks:
    """The blocks of a role in its fullest batch, or in one that is padded to `length`."""
    rows = placed.role.scoring_rows if scores else placed.role.rows
    batch = roles.batch(placed.s, rows, length)
    engine = placed.scorer if scores else placed.engine
    return blocks(engine, batch, masked(placed.s, engine.replica.arch, batch.length), placed.s.checkpointing)


class Tried(NamedTuple):
    """The outcome of a replay under a limit, which is the same under any limit from `low` to below `high`.

    `broke`: a request failed.
    """

    low: int
    high: float
    broke: bool


class Reserve:
    """The bytes that PyTorch reserves for a replayed job: undisturbed, and the least that it must be allowed.

    Neither depends on a card. The least is sought between the most that is allocated and what is reserved undisturbed,
    to one part in FINE, only as far as a caller asks, and always by the same halvings (the first cut lies lower where
    segments expand): a limit may suffice where a higher one does not, so that a search from a card's own limit would
    find something else for each card.

    Where its replays could take more than SOUGHT events, batches of other lengths are left out of the rest: what they
    leave cached goes back to the driver before a request fails. Where as many events are not enough for that either,
    the search ends with the smallest limit that sufficed.

    A replay under a limit goes on from the last mark of another one that would have come there under this limit, too:
    the undisturbed one, or one under a limit that has been in the way of the same requests.
    """

    def __init__(self, a: Act, workspace: int) -> None:
        """The reserve for `a`, where cuBLAS takes a `workspace` for each thread."""
        self.workspace = workspace
        self.spent = 0.0  # events of replays under limits, if each went on from the undisturbed one
        self.cut = False  # the search has ended early
        process = self._begin(a)
        self.undisturbed = process.most_reserved
        self._low, self._high = process.most, self.undisturbed
        self._share = NEAR if a.expandable else 2  # of the interval, up to where it is cut next

    def _begin(self, a: Act) -> Process:
        """Replays `a` from now on, within SOUGHT more events; its process as no limit disturbs it."""
        self.act, self._bound = a, self.spent + SOUGHT
        self._count = len([*a.parts()])
        self._each = a.events / self._count  # events of a part
        process = _undisturbed(a, self.workspace).end
        self._tried = [Tried(process.most_reserved, process.refused, broke=False)]
        return process

    def breaks(self, limit: int) -> bool:
        """True if a request fails when at most `limit` bytes may be reserved."""
        known = self._known(limit)
        return self._try(limit) if known is None else known

    def _known(self, limit: int) -> bool | None:
        """`breaks` by the replays so far; None if they do not tell."""
        return next((tried.broke for tried in self._tried if tried.low <= limit < tried.high), None)

    def _parts(self, limit: int) -> int:
        """The parts that are the same under `limit` as undisturbed, up to a mark."""
        own = _undisturbed(self.act, self.workspace).own
        return max([done for done, process in own if process.same(limit)])

    def _affords(self, limit: int) -> bool:
        """True if a replay under `limit` to its end takes no more events than are left."""
        return self.spent + (self._count - self._parts(limit)) * self._each <= self._bound

    def _try(self, limit: int) -> bool:
        """Replays under `limit`, from the last mark that is the same under it; True if a request fails."""
        marks = _undisturbed(self.act, self.workspace).marks
        replay = max([m for m in marks if m.heap.process.same(limit)], key=lambda m: m.done).copy(limit)
        begun, broke = list[Replay](), False
        try:
            replay.all(self.act, begun)
        except OutOfMemory:
            broke = True
        marks += begun[1:]
        process = replay.heap.process
        self._tried.append(Tried(process.most_reserved, process.refused, broke))
        self.spent += (replay.done - self._parts(limit)) * self._each
        return broke

    @property
    def least(self) -> int:
        """The bytes that must be allowed, given that wholly free segments are released before a request fails."""
        while self.narrow():
            pass
        return self._high

    @property
    def known(self) -> tuple[int, int]:
        """The interval known to hold the least; both its ends are the least once that is found."""
        return (self._high, self._high) if self._found else (self._low, self._high)

    @property
    def unknown(self) -> int:
        """The bytes by which the least may be smaller than `known` says."""
        return self._high - self._low

    def meets(self, asked: Callable[[int], bool]) -> bool:
        """True if `asked` holds of the least; it must hold of all sizes up to some size, and of none above."""
        while not asked(self._high):
            if not asked(self._low) or not self.narrow():
                return False
        return True

    @property
    def _found(self) -> bool:
        return self.cut or self._high - self._low <= self.undisturbed // FINE

    def narrow(self) -> bool:
        """Halves the interval in which the least lies; False if it is narrow enough."""
        if self._found:
            return False
        middle = self._low + (self._high - self._low) // self._share
        if self._known(middle) is None and not self._affords(middle):
            if not self.act.others:
                self.cut = True
                return False
            self._begin(self.act._replace(others=()))
            return self.narrow()
        self._share = 2
        if self.breaks(middle):
            self._low = middle
        else:
            self._high = middle
        return True


@lru_cache(maxsize=64)
def reserve(a: Act, workspace: int) -> Reserve:
    """The reserve for `a`, cached: a search and the estimates after it ask for the same one."""
    return Reserve(a, workspace)


class Undisturbed(NamedTuple):
    """The replay of a job without a limit: the process at its `end`, and the `marks`, its states before each part.

    Replays under limits add their own marks; its `own` have the number of parts before each, and the process there.
    """

    end: Process
    marks: list[Replay]
    own: tuple[tuple[int, Process], ...]


# Only a few are cached: those of a large model take megabytes.
@lru_cache(maxsize=4)
def _undisturbed(a: Act, workspace: int) -> Undisturbed:
    """The replay of `a` without a limit."""
    marks: list[Replay] = []
    replay = Replay((Expandable if a.expandable else Allocator)(), workspace)
    replay.all(a, marks)
    return Undisturbed(replay.heap.process, marks, tuple([(m.done, m.heap.process) for m in marks]))


def _split(shards: Sharded | None) -> Shards | None:
    """The shards of a model whose embedding and head are FSDP units of their own, else None."""
    return shards if isinstance(shards, Shards) and shards.ends else None


class Course(NamedTuple):
    """The steps that a script takes on one occasion, and the slots of the blocks that outlive the piece.

    `threads`: the number of threads that have called cuBLAS by then. `wrapped`: the steps before these, at the end of
    which the autocast around the model's forward ends; none if it does not end in this piece. `arriving`: for each
    gradient that leaves as soon as it is made, the steps before these that make it, its slot and its bytes.
    """

    steps: Steps
    workspaces: list[int]
    gradients: list[int]
    casts: list[int]
    late: list[int]
    arriving: list[tuple[Steps, int, int]]
    threads: int
    wrapped: Steps = ()


class State(NamedTuple):
    """Everything that decides how a replay goes on.

    `found` decides it alone, unless there is a limit or small blocks are asked for: then the other fields matter, too.
    """

    found: tuple[object, ...]
    spare: tuple[int, ...]
    mapped: tuple[int, ...]
    reserved: int
    released: int

    def repeats(self, before: State | None) -> bool:
        """True if the replay goes on exactly as it did a step `before`.

        A step leaves behind nothing but what was `found`. So if nothing went back to the driver, small blocks find at
        least as much room as they did, and all blocks find pages mapped that were mapped for them.
        """
        if before is None or self.found != before.found:
            return False
        return self.released == before.released or self[1:4] == before[1:4]


class Replay:
    """The models on one GPU and their steps, put through an allocator; raises OutOfMemory where the allocator does."""

    def __init__(self, heap: Allocator, workspace: int) -> None:
        """Starts with nothing allocated; cuBLAS takes a `workspace` for each thread."""
        self.heap = heap
        self.phase = "load"
        self.workspace, self.threads = workspace, 0
        self.courses: dict[tuple[object, ...], Course] = {}
        self.shards: dict[int, Sharded] = {}  # by the identity of the model's blocks
        self.buckets: list[Block] = []  # DDP's
        self.rebuilt = False  # they have the order of the gradients
        self.retained: list[Block] = []  # inputs of layers that ran again, and their gradients
        self.returned: list[Block] = []  # buffers into which checkpoints come back from the host
        self.stashed: list[Block] = []  # checkpoints on their way to the host
        self.kept: Kept = []
        self.gradients: list[Block] = []
        self.adding = False  # gradients of earlier micro batches exist, or none stays
        self.beside = 0.0  # see `calc.replay.blocks.Blocks`
        self.apart = False  # the next gradient is a tied head's, which waits for the embedding's
        self.head = NO_BLOCK
        self.late = NO_BLOCK  # outputs that outlive their backward
        self.leaving: UnderZero | None = None  # where each gradient goes as soon as it is made
        self.casts: list[Block] = []  # autocast's cache
        self.stepped = False
        self.done = 0  # number of parts that have been replayed, or counted: see `repeats`
        self.before: dict[int, State] = {}  # what each part of the last step found

    def copy(self, limit: int | None) -> Replay:
        """A copy of the replay under another limit."""
        other, process = copy(self), self.heap.process.copy(limit)
        other.heap = process.streams[0]
        shards = {id(own): own.copy(process) for own in self.shards.values()}
        other.shards = {model: shards[id(own)] for model, own in self.shards.items()}
        other.kept = [own.copy() for own in self.kept]
        other.gradients, other.casts, other.before = self.gradients.copy(), self.casts.copy(), self.before.copy()
        other.buckets, other.retained = self.buckets.copy(), self.retained.copy()
        other.returned, other.stashed = self.returned.copy(), self.stashed.copy()
        return other

    def all(self, a: Act, marks: list[Replay] | None = None) -> None:
        """Runs the parts of `a` that are not done; `marks` gets copies: before those that repeat, some of the others.

        Steps of the fullest batches end where they repeat themselves.
        """
        parts, step = [*a.parts()], 2 * a.micro_batches + 1
        for n, (part, one) in [*enumerate(parts)][self.done :]:
            self.done, alike = n, n == 0 or n >= len(parts) - STEPS * step
            if marks is not None and (alike or n % MARKED == 0):
                marks.append(self.copy(None))
            if alike and self.repeats(len(parts) - n, step):
                return
            part(self, one)

    def repeats(self, left: int, step: int) -> bool:
        """True if the next part, with which `left` are left, finds what it found a `step` before: nothing new follows.

        Of those parts the ones count as done before which fewer pages were mapped a step before.
        """
        before, now = self.before.get(-left % step), self.state
        if now.repeats(before):
            for n in range(min(left - 1, step)):
                if self.before[(n - left) % step].mapped == now.mapped:
                    return True
                self.done += 1
            return True
        self.before[-left % step] = now
        return False

    @property
    def state(self) -> State:
        """The state that decides how the replay goes on."""
        process = self.heap.process
        spare, mapped, *found = zip(*[stream.state for stream in process.streams], strict=True)
        ours = process.allocated, self.threads, self.stepped, self.adding, self.late, self.head
        own = *self.gradients, *self.casts, *self.buckets, *self.returned, *self.stashed
        blocks = *own, *[(*own.items(),) for own in self.kept]
        shards = [own.state for own in self.shards.values()]
        return State((*found, *ours, blocks, shards), spare, mapped, process.reserved, process.released)

    def run_load(self, a: Act) -> None:
        """Loads the models."""
        self.load(a.model)
        if a.inside and not a.shares:
            self.load(a.inside)
        elif a.inside and a.model.sharded:
            self.shards[id(a.inside)] = self.shards[id(a.model)]
        for model, inside in a.others:
            for other, own in ((model, a.model), (inside, a.inside)):
                if other and own and own.sharded:
                    self.shards[id(other)] = self.shards[id(own)]

    def run_forward(self, a: Act) -> None:
        """Runs the forward of a micro batch, and that of the model that scores inside it."""
        self.rebuild(a.model)
        self.kept = self.forward(a.model)
        if a.inside:
            self.leave(self.forward(a.inside))
        self.uncache()

    def run_backward(self, a: Act) -> None:
        """Runs the backward of a micro batch or, if nothing is trained, frees what its forward keeps."""
        if a.trained:
            self.backward(a.model, self.kept)
            self.adding = True
        else:
            self.leave(self.kept)
        self.kept = []

    def run_step(self, a: Act) -> None:
        """Runs the optimizer's step."""
        if a.trained:
            self.step(a.model)

    def take(self, size: int) -> Block:
        """A new block of `size` bytes, or no block if the size is 0."""
        return self.heap.take(size) if size else NO_BLOCK

    def give(self, *given: Block) -> None:
        """Frees blocks."""
        self.heap.give_all(given)

    def load(self, m: Blocks) -> None:
        """Loads a model's weights, which stay, whole or in shards."""
        self.heap.take_all(m.weights)
        if m.sharded:
            kind: type[Sharded] = Gathers if m.flats else Shards
            if m.partitioned:
                kind = Partition if isinstance(m.partitioned, Flattened) else Partitions
            self.shards[id(m)] = kind(m, self.heap)
        if m.buckets:
            self.broadcast(m.buckets)

    def broadcast(self, buckets: Buckets) -> None:
        """Sends the weights to all ranks, two copies at a time, and makes the first buckets of gradients.

        Where copies are `recorded` none serves the next one: the host, which waits for nothing, is done with all of
        them before the GPU is. They stay in the cache.
        """
        process, sent = self.heap.process, list[Block]()
        for size in buckets.broadcast:
            if len(sent) == INFLIGHT:
                self.sent(sent.pop(0), buckets)
            sent.append(self.take(size))
        for block in sent:
            self.sent(block, buckets)
        self.buckets = self.heap.take_all(buckets.first)
        process.met = process.issued
        process.wait(process.record())

    def sent(self, block: Block, buckets: Buckets) -> None:
        """Frees a copy that has been sent."""
        if buckets.recorded:
            self.heap.process.issued += 1
            self.heap.give_later(block, collective=self.heap.process.issued)
        else:
            self.give(block)

    def rebuild(self, m: Blocks) -> None:
        """Replaces DDP's first buckets by those in the order of the gradients, before the second step's forward."""
        if m.buckets and m.buckets.rebuilt and self.stepped and not self.rebuilt:
            self.rebuilt = True
            self.give(*self.buckets)
            self.buckets = self.heap.take_all(m.buckets.rebuilt)

    def play(self, script: Script, own: Own, late: int | None = None) -> None:
        """Plays a script's steps over the blocks of its piece; the block in slot `late` is not freed yet."""
        course = self.course(script, late)
        if course.wrapped:
            self.heap.play(course.wrapped, own)
            self.uncache()
        for steps, slot, size in course.arriving:
            assert self.leaving
            self.heap.play(steps, own)
            self.leaving.arrive(own.pop(slot), size)
        self.heap.play(course.steps, own)
        for slot in course.workspaces:
            del own[slot]
        made = [own.pop(slot) for slot in course.gradients]
        if self.apart:
            self.head = made[-1] if made else self.head
        else:
            self.gradients += made
        self.casts += [own.pop(slot) for slot in course.casts]
        for slot in course.late:
            self.late = own.pop(slot, NO_BLOCK) or self.late
        self.threads = course.threads

    def course(self, script: Script, late: int | None) -> Course:
        """The steps that a script takes in the present situation, worked out once."""
        adds = self.adding and not self.shards
        key = id(script), late, adds, self.apart, self.threads, self.beside, self.leaving is not None
        if key not in self.courses:
            self.courses[key] = self._course(script, late, adds=adds and not self.apart)
        return self.courses[key]

    def _course(self, script: Script, late: int | None, *, adds: bool) -> Course:
        steps: list[tuple[int, int]] = []
        course = Course(
            steps, [], [], [], [], [], max([self.threads, *[n for slot, n in script.steps if slot == MULTIPLY]])
        )
        outlives = {WEIGHT: course.gradients, CAST: course.casts, MULTIPLY: course.workspaces}
        threads = self.threads
        for n, (slot, size) in enumerate(script.steps, OUTLIVING):
            if slot == MULTIPLY:
                # cuBLAS allocates its workspace at a thread's first product
                size, threads = self.workspace if threads < size else 0, max(threads, size)
                if not size:
                    continue
            if size and slot in outlives:
                steps.append((n, asked(size)))
                if slot == WEIGHT and adds:
                    if self.beside:
                        steps += [(STEPPED, asked(int(size * self.beside))), (STEPPED, 0)]
                    steps.append((n, 0))
                elif slot == WEIGHT and self.leaving and not self.apart:
                    course.arriving.append((tuple(steps), n, size))
                    steps.clear()
                else:
                    outlives[slot].append(n)
            elif slot == ENDED:
                course = course._replace(wrapped=tuple(steps))
                steps.clear()
            elif not size and slot == late:
                course.late.append(slot)
            else:
                steps.append((slot, asked(size)))
        return course

    def keep(self, block: Block, size: int) -> None:
        """Takes over a new weight gradient: it stays, or is freed once it has been added to an earlier one."""
        if self.adding and not self.shards:
            if self.beside and block:
                self.give(self.take(int(length(block) * self.beside)))
            self.give(block)
        elif self.leaving:
            self.leaving.arrive(block, size)
        elif block:
            self.gradients.append(block)

    def forward(self, m: Blocks) -> Kept:
        """Runs a forward and returns the blocks that its pieces keep."""
        self.phase = "forward"
        shards = self.shards.get(id(m))
        if shards:
            shards.begin()
        block = self.take(m.stream)
        ends = _split(shards)
        if ends:
            ends.embedded()
        kept: Kept = [{PASSING - n: block for n, block in enumerate(self.heap.take_all(m.tables))}]
        for n, piece in enumerate((*m.layers, m.norm, m.head)):
            layer = shards if n < len(m.layers) else None
            if layer:
                layer.enter(n)
            elif ends and piece is m.norm:
                ends.enter_head()
            elif shards and piece is m.head and not m.inside:
                shards.end()
            own = {INPUT: block} if block else {}
            if piece is m.head and (m.outside or m.held == "step") and self.late:
                own[REPLACED], self.late = self.late, NO_BLOCK
            self.play(piece.forward, own)
            block = own.pop(piece.forward.out, NO_BLOCK)
            kept.append(own)
            if m.streams and n < len(m.layers):
                self.depart(m, own, last=n == len(m.layers) - 1)
            elif piece is m.norm:
                self.crowd_out(m.beside_norm)
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

    def depart(self, m: Blocks, own: Own, *, last: bool) -> None:
        """Sends a layer's checkpoint to the host; the `last` stays where others come back into buffers."""
        if m.streams == "buffers" and last:
            return
        if m.streams == "stash":
            self.stashed.append(own.pop(INPUT))
            self.crowd_out(STASH)
            return
        self.give(own.pop(INPUT))
        if m.streams == "buffers" and m.stream > length(self.returned[0] if self.returned else NO_BLOCK):
            self.give(*self.returned)
            self.returned = self.heap.take_all([m.stream] * RETURNED)

    def crowd_out(self, room: int) -> None:
        """Frees the checkpoints that have been stashed first, until no more are left than there is `room` for."""
        while len(self.stashed) > room:
            self.give(self.stashed.pop(0))

    def leave(self, kept: Kept) -> None:
        """Frees what a forward keeps."""
        self.give(*[block for own in kept for block in own.values()])

    def uncache(self) -> None:
        """Frees autocast's cache, as an autocast ends."""
        self.give(*self.casts)
        self.casts = []

    def drop(self) -> None:
        """Frees the outputs that outlived their backward."""
        self.give(self.late)
        self.late = NO_BLOCK

    def backward(self, m: Blocks, kept: Kept) -> None:
        """Runs the backward of a forward that kept `kept`."""
        self.phase = "backward"
        block = ahead = NO_BLOCK
        self.crowd_out(0)
        self.apart = bool(m.tied)
        if m.beside is not None:
            self.adding, self.beside = True, m.beside
        shards = self.shards.get(id(m))
        ends = _split(shards)
        self.leaving = shards if isinstance(shards, UnderZero) else None
        if shards:
            shards.turn()
        for n, piece in reversed([*enumerate((*m.layers, m.norm, m.head))]):
            layer = shards if n < len(m.layers) else None
            if layer:
                layer.reenter(n)
            before, saved = len(self.gradients), kept.pop()
            if m.streams in ("each", "stash") and n < len(m.layers):
                saved[INPUT], ahead = ahead or self.take(m.stream), NO_BLOCK
            if m.streams == "stash" and 0 < n < len(m.layers):
                ahead = self.take(m.stream)  # in place of the one before, which is in use until this one is there
            block = self.back(piece, saved, block, retains=m.retains and layer is not None)
            self.apart = False
            if layer:
                own, self.gradients = self.gradients[before:], self.gradients[:before]
                layer.reduce(n, own, adding=self.adding)
            elif ends and piece is m.norm:
                ends.reduce(ROOT, self.gradients, adding=self.adding)
                self.gradients = []
        self.leave(kept)
        # the lowest gradient is among those that are retained
        self.give(*[each for each in self.retained if each != block])
        self.retained = []
        if ends:
            ends.reenter(EMBEDDING)
        self.back_embedding(m, block)
        if shards:
            shards.reduce(EMBEDDING if ends else ROOT, self.gradients, adding=self.adding)
            shards.wait()
            self.gradients = []
        self.leaving = None

    def back_embedding(self, m: Blocks, block: Block) -> None:
        """Runs the embedding's backward, if it has one, over the gradient of its output.

        Beside an adapter that is scaled first. Its second matrix has a gradient, then the first, whose own lies
        otherwise than the parameter: it is copied, unless it is added to an earlier one.
        """
        if m.second:
            scaled = self.take(m.stream)
            self.give(block)
            self.keep(self.take(m.second), m.second)
            block = scaled
        if not m.embedding:
            self.give(block)
            return
        made = self.take(m.embedding)
        self.give(self.take(m.sorting))
        self.give(block)
        if m.second and not self.adding:
            laid_anew = self.take(m.embedding)
            self.give(made)
            made = laid_anew
        self.keep(self.tie(m, made), m.embedding)

    def back(self, piece: Piece, own: Own, given: Block, *, retains: bool) -> Block:
        """Runs one piece's backward and returns the gradient of its input.

        `retains`: its input stays, with that gradient, until backward ends.
        """
        assert piece.backward
        if given:
            own[GIVEN] = given
        held = own.pop(INPUT) if retains else NO_BLOCK
        self.play(piece.backward, own, piece.late)
        block = own.pop(piece.backward.out, NO_BLOCK)
        if given in self.retained:
            own.pop(GIVEN, NO_BLOCK)
        self.give(*own.values())
        if retains:
            self.retained += [held, block]
        return block

    def tie(self, m: Blocks, made: Block) -> Block:
        """Sums the embedding's gradient and a tied head's, in place only if the head's is contiguous.

        See `calc.memory.gradients.tied_embedding`.
        """
        if not m.tied:
            return made
        total = self.head
        if m.tied == "apart":
            total = self.take(m.embedding)
            self.give(self.head)
        self.give(made)
        self.head = NO_BLOCK
        return total

    def step(self, m: Blocks) -> None:
        """Runs the optimizer's step, which makes its states the first time, and frees all gradients."""
        self.phase = "step"
        shards = self.shards.get(id(m))
        if isinstance(shards, UnderZero):
            shards.step(m.states, m.passing, first=not self.stepped)
        else:
            self.optimize(m)
        self.stepped = True
        if m.held == "step":
            self.drop()
        self.give(*self.gradients)
        for shards in self.shards.values():
            shards.zero()
        self.gradients, self.adding = [], False

    def optimize(self, m: Blocks) -> None:
        """Steps each tensor, or all at once."""
        if not self.stepped:
            self.heap.take_all([size for sizes in m.states for size in sizes])
        if m.at_once:
            self.give(*self.heap.take_all(m.passing))
            self.give(*self.heap.take_all(m.copies))
        else:
            self.pass_by((*m.passing, *m.copies))

    def pass_by(self, sizes: Iterable[int]) -> None:
        """Allocates and frees blocks one after another.

        A size that was served before finds room again, and leaves everything as it is, unless cached segments have
        gone back to the driver since.
        """
        process, served, released = self.heap.process, {0}, self.heap.process.released
        for size in sizes:
            if size not in served:
                self.give(self.take(size))
                if process.released > released:
                    served, released = {0}, process.released
                served.add(size)
