"""A tape as a script: the blocks that a piece of a model allocates and frees, one after another.

`calc.autograd.tape` says what is alive at each instant; a script has the order in which blocks come and go, so that
`calc.replay.replay` can put them through the allocator. Sizes are in bytes: a script is of one micro batch.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from calc.autograd.lifetimes import Lifetimes, Pass, Turn
from calc.autograd.polynomial import in_bytes
from calc.autograd.tape import NOTHING, Course, Size, Tensor

# Slots that are not a piece's own: its input, the gradient of its output, gradients of weights, which stay, and what an
# operation takes and gives back while it runs. MULTIPLY is where cuBLAS is called first, by forward's thread, 1, or
# autograd's, 2. CAST is taken for autocast's cache, and stays until that ends. REPLACED has the outputs of the
# micro batch before, which go as the model returns. ENDED is where an autocast around the model's forward ends.
INPUT, GIVEN, WEIGHT, MULTIPLY, CAST, REPLACED, ENDED, PASSING = -1, -2, -3, -4, -5, -6, -7, -8  # and below

FEW = 4  # temporaries of one operation

Steps = tuple[tuple[int, int], ...]  # a slot and the bytes that it takes, or 0 where it is given back


class Script(NamedTuple):
    """The steps of a piece, and the slot of the block that it hands on: its output, or the gradient of its input."""

    steps: Steps
    out: int


class Writer:
    """Writes the scripts of a tape's passes for `tokens` in sequences of `length`, with a model's `dims` put in.

    Gradients of weights have `grad_bytes` an element. One slot is one storage, forward and backward.
    """

    def __init__(
        self, lifetimes: Lifetimes, dims: Mapping[str, int], tokens: int, length: int, grad_bytes: int
    ) -> None:
        self.lifetimes = lifetimes
        self.dims, self.batch, self.grad_bytes = dims, (tokens, length), grad_bytes
        self.rows = tokens // length
        self.slots: dict[Tensor, int] = {self.lifetimes.input: INPUT, self.lifetimes.given: GIVEN}
        self.used = 0
        self.steps: list[tuple[int, int]] = []
        self.alive: set[Tensor] = set()
        self.sizes: dict[Size, int] = {}

    def forward(self, outside: Container[str] = ()) -> Script:
        """A forward that keeps what backward needs; operations named in `outside` run once the model's has ended."""
        return self._whole(self.lifetimes.forward, outside)

    def without_grad(self) -> Script:
        """A forward that keeps nothing."""
        return self._whole(self.lifetimes.without_grad)

    def once(self) -> Script:
        """A forward that checkpointing will run again: its input stays, and what selective checkpointing keeps."""
        return self._whole(self.lifetimes.once)

    def backward(self) -> Script:
        """The backward of a forward that kept everything."""
        tape, lost = self.lifetimes.tape, self.lifetimes.tape.lost
        saved = [t.storage for op in tape.ops for t in op.saves]
        return self._script(self.lifetimes.backward, [t for t in saved if t not in lost])

    def again(self) -> Script:
        """The backward of a checkpointed piece, whose forward runs again."""
        kept = [t.storage for op in self.lifetimes.tape.ops for t in op.kept]
        return self._script(self.lifetimes.again, [self.lifetimes.input, *kept])

    def _whole(self, run: Pass, outside: Container[str] = ()) -> Script:
        """A forward; casts that autocast keeps are not the piece's own, unless it saves them."""
        casts = {*self.lifetimes.tape.cached}.difference(run.turns[-1].saved)
        return self._script(run, [self.lifetimes.input], casts, outside)

    def _script(
        self, run: Pass, there: Iterable[Tensor], casts: Container[Tensor] = (), outside: Container[str] = ()
    ) -> Script:
        """The script of a pass that finds these tensors there, and a given gradient."""
        self.alive, self.steps = {*there, self.lifetimes.given}, []
        for turn in run.turns:
            if turn.op.name in outside and (ENDED, 0) not in self.steps:
                self.steps.append((ENDED, 0))
            self._backward(turn) if turn.backward else self._forward(turn, casts)
            self._free(turn.freed)
        return Script(tuple(self.steps), self.slots[run.out] if run.out else PASSING)

    def _forward(self, turn: Turn, casts: Container[Tensor]) -> None:
        if turn.made and turn.made[0] in casts:
            self.steps.append((CAST, self._bytes(turn.made[0].size)))
            return
        self._take(turn.made, turn.scratch, turn.course)
        if turn.op.flat:
            self._multiply(1)
        self._take(turn.kept)

    def _backward(self, turn: Turn) -> None:
        op = turn.op
        if op.weight:
            self.steps.append((WEIGHT, op.weight * self.grad_bytes))
        if op.flat:
            self._multiply(2)
        if op.rowwise:
            self._row_by_row(turn.made, [t.storage for t in op.saves], turn.scratch)
        else:
            self._take(turn.made, turn.scratch, turn.course)

    def _multiply(self, thread: int) -> None:
        if (MULTIPLY, thread) not in self.steps:
            self.steps.append((MULTIPLY, thread))

    def _slot(self, t: Tensor) -> int:
        """The first slot of a storage."""
        if t not in self.slots:
            self.slots[t] = self.used
            self.used += self.rows if t.apart else 1
        return self.slots[t]

    def _parts(self, t: Tensor) -> list[tuple[int, int]]:
        """The slots of a storage with their bytes: one slot, or one for each sequence."""
        slot, size = self._slot(t), self._bytes(t.size)
        return [(slot + n, size // self.rows) for n in range(self.rows)] if t.apart else [(slot, size)]

    def _bytes(self, size: Size) -> int:
        if size not in self.sizes:
            self.sizes[size] = in_bytes(size, self.dims, *self.batch)
        return self.sizes[size]

    def _take(self, storages: Sequence[Tensor], scratch: Size = NOTHING, course: Course = ()) -> None:
        """Allocates `storages`, and temporaries beside them: in the order of `course`, or else temporaries first.

        Without a `course`, `scratch` is a few temporaries no larger than the largest of `storages`, or else a single
        one.
        """
        if not course and scratch:
            whole, most = self._bytes(scratch), max([self._bytes(t.size) for t in storages], default=0)
            pieces = -(-whole // most) if 0 < whole <= FEW * most else 1
            course = (*[scratch * (1 / pieces)] * pieces, None)
        passing: dict[int, int] = {}  # the slots of temporaries that are still there, by their order
        free = PASSING
        for each in course or (None,):
            if each is None:
                for t in storages:
                    if t not in self.alive:
                        self.alive.add(t)
                        self.steps += self._parts(t)
            elif isinstance(each, int):
                self.steps.append((passing.pop(each), 0))
            else:
                passing[PASSING - free] = free
                self.steps.append((free, self._bytes(each)))
                free -= 1
        self.steps += [(slot, 0) for slot in passing.values()]

    def _row_by_row(self, made: Sequence[Tensor], saved: Sequence[Tensor], scratch: Size) -> None:
        """Backward sequence by sequence, the last first.

        Each allocates a temporary, half of `scratch`, and its part of `made`, then frees its part of `saved`.
        """
        parts, passing = [self._parts(t) for t in made], self._bytes(scratch) // 2
        for n in reversed(range(self.rows)):
            taken = [part[n] for part in parts]
            given = [(self._slot(t) + n, 0) for t in saved]
            self.steps += [(PASSING, passing), *taken, (PASSING, 0), *given]
        self.alive.update(made)
        self.alive.difference_update(saved)

    def _free(self, storages: Iterable[Tensor]) -> None:
        """Frees those of the `storages` that are blocks of the piece and still there."""
        others = self.lifetimes.given if self.lifetimes.tape.received else None
        for t in storages:
            if t in self.alive and t is not others:
                self.alive.remove(t)
                slot = self._slot(t)
                self.steps += [(slot + n, 0) for n in range(self.rows if t.apart else 1)]
