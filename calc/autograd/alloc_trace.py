"""A tape as a script: the blocks that a piece of a model allocates and frees, one after another.

`calc.autograd.tape` says what is alive at each instant; a script has the order in which blocks come and go, so that
`calc.replay.replay` can put them through the allocator. Sizes are in bytes: a script is of one micro batch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from calc.autograd.polynomial import amount
from calc.autograd.tape import NOTHING, Course, Op, Size, Tape, Tensor

# Slots that are not a piece's own: its input, the gradient of its output, gradients of weights, which stay, and what an
# operation takes and gives back while it runs. MULTIPLY is where cuBLAS is called first, by forward's thread, 1, or
# autograd's, 2. CAST is taken for autocast's cache, and stays until that ends.
INPUT, GIVEN, WEIGHT, MULTIPLY, CAST, PASSING = -1, -2, -3, -4, -5, -6  # and below

FEW = 4  # temporaries of one operation

Steps = tuple[tuple[int, int], ...]  # a slot and the bytes that it takes, or 0 where it is given back


class Script(NamedTuple):
    """The steps of a piece, and the slot of the block that it hands on: its output, or the gradient of its input."""

    steps: Steps
    out: int


class Writer:
    """Writes the scripts of a tape for `tokens` in sequences of `length`, with a model's dimensions `dims` put in.

    Gradients of weights have `grad_bytes` an element. One slot is one storage, forward and backward.
    """

    def __init__(self, tape: Tape, dims: Mapping[str, int], tokens: int, length: int, grad_bytes: int) -> None:
        self.tape, self.dims, self.batch, self.grad_bytes = tape, dims, (tokens, length), grad_bytes
        self.input = next(op.inputs[0].storage for op in tape.ops if op.inputs)
        self.rows = tokens // length
        self.slots: dict[Tensor, int] = {self.input: INPUT}
        self.used = 0
        self.steps: list[tuple[int, int]] = []
        self.alive: dict[Tensor, None] = {}
        self.sizes: dict[Size, int] = {}
        self.views: set[Tensor] = set()

    def forward(self) -> Script:
        """A forward that keeps what backward needs."""
        return self._whole(lambda op: op.saves)

    def without_grad(self) -> Script:
        """A forward that keeps nothing."""
        return self._whole(lambda op: ())

    def once(self) -> Script:
        """A forward that checkpointing will run again: its input stays, and what selective checkpointing keeps."""
        return self._whole(lambda op: op.kept, {self.input})

    def _whole(self, stays: Callable[[Op], Iterable[Tensor]], held: Iterable[Tensor] = ()) -> Script:
        self.alive, self.steps = {self.input: None}, []
        out = self.tape.final.storage
        saved = {t.storage for op in self.tape.ops for t in stays(op)}
        self._run(len(self.tape.ops), stays, {*held, out}, cached={*self.tape.cached} - saved)
        return Script(tuple(self.steps), self.slots[out])

    def _run(
        self, end: int, stays: Callable[[Op], Iterable[Tensor]], held: set[Tensor], cached: Container[Tensor] = ()
    ) -> None:
        """Runs the operations before `end`, after which what `stays` of each is alive, and what is `held` anyway.

        Tensors that autocast has `cached` are not the piece's own. Tensors that operations after `end` would use live
        until then: variables of the layer's forward name them.
        """
        ops = self.tape.ops[:end]
        last = {t.storage: n for n, op in enumerate(self.tape.ops) for t in (*op.inputs, *op.outs)}
        last.update((t.storage, end) for t in self.tape.held)
        saved = set(held)
        for n, op in enumerate(ops):
            kept = [t.storage for t in stays(op)]
            if op.outs[:1] and op.outs[0] in cached:
                self.steps.append((CAST, self._bytes(op.outs[0].size)))
                continue
            self._take([t.storage for t in op.outs], op.scratch, op.course)
            if op.flat:
                self._multiply(1)
            self._take(kept)
            saved.update(kept)
            self._leave(t for t in self.alive if t in saved or last.get(t, -1) > n)
        self._leave(t for t in self.alive if t in saved)

    def backward(self) -> Script:
        """The backward of a forward that kept everything."""
        self.alive, self.steps = dict.fromkeys(t.storage for op in self.tape.ops for t in op.saves), []
        gradient = self._gradients(0, len(self.tape.ops), {})
        return Script(tuple(self.steps), self._handed(gradient))

    def again(self) -> Script:
        """The backward of a checkpointed piece, whose forward runs again once an operation asks for what it saved.

        That forward stops before the operation that saves last (torch 2.13 `utils/checkpoint.py`).
        """
        ops = self.tape.ops
        kept = {t.storage for op in ops for t in op.kept}
        self.alive, self.steps = dict.fromkeys((self.input, *kept)), []
        last = max((n for n, op in enumerate(ops) if op.saves), default=len(ops))
        gradient = self._gradients(last + 1, len(ops), {}, {self.input, *kept})
        asked = {t.storage for t in ops[last].saves} if last < len(ops) else set()
        waiting = {g.storage for g in gradient.values()}
        self._run(last, lambda op: op.saves, {self.input, *kept, *asked, *waiting})
        self._take([*asked])
        gradient = self._gradients(0, last + 1, gradient, {self.input})
        return Script((*self.steps, (INPUT, 0)), self._handed(gradient))

    def _gradients(
        self, first: int, end: int, gradient: dict[Tensor, Tensor], held: Iterable[Tensor] = ()
    ) -> dict[Tensor, Tensor]:
        """Runs backward through the operations from `first` to before `end`, last one first."""
        ops, final = self.tape.ops[first:end], self.tape.final
        users: dict[Tensor, int] = {}
        for op in self.tape.ops[:end]:
            for t in op.saves:
                users[t.storage] = users.get(t.storage, 0) + 1
        if not gradient:
            given = Tensor(final.width, final.b)
            self.slots[given], gradient = GIVEN, {final: given}
            self.alive[given] = None
        stay = set(held)
        for op in reversed(ops):
            incoming = [gradient[out] for out in op.outs if out in gradient]
            if incoming:
                made = op.gradients(incoming[0])
                if op.weight:
                    self.steps.append((WEIGHT, op.weight * self.grad_bytes))
                if op.flat:
                    self._multiply(2)
                if op.rowwise:
                    self._row_by_row([*made.values()], [t.storage for t in op.saves], op.backward_scratch)
                else:
                    self._take([g.storage for g in made.values()], op.backward_scratch, op.backward_course)
                for out in op.outs:
                    gradient.pop(out, None)
            for t in op.saves:
                users[t.storage] -= 1
                if not users[t.storage]:
                    del users[t.storage]
            if incoming:
                needed = (g.storage for g in (*made.values(), *gradient.values()))
                self._leave({*users, *stay, *needed})
                for t, g in made.items():
                    gradient[t] = self._sum(gradient[t], g) if t in gradient else g
                if op.flat:
                    self.views.update(g.storage for g in made.values())
            self._leave({*users, *stay, *(g.storage for g in gradient.values())})
        return gradient

    def _handed(self, gradient: Mapping[Tensor, Tensor]) -> int:
        """The slot of the input's gradient; PASSING where it needs none."""
        found = [g for t, g in gradient.items() if t.storage is self.input]
        return self.slots[found[0].storage] if found else PASSING

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
        slot, parts = self._slot(t), self.rows if t.apart else 1
        return [(slot + n, self._bytes(t.size) // parts) for n in range(parts)]

    def _bytes(self, size: Size) -> int:
        if size not in self.sizes:
            self.sizes[size] = amount(size, self.dims).bytes(*self.batch)
        return self.sizes[size]

    def _take(self, storages: Sequence[Tensor], scratch: Size = NOTHING, course: Course = ()) -> None:
        """Allocates `storages`, and temporaries beside them: in the order of `course`, or else temporaries first.

        Without a `course`, `scratch` is a few temporaries no larger than the largest of `storages`, or else a single
        one.
        """
        if not course and scratch:
            whole, most = self._bytes(scratch), max([self._bytes(t.size) for t in storages], default=0)
            pieces = -(-whole // most) if whole <= FEW * most else 1
            course = (*[scratch * (1 / pieces)] * pieces, None)
        passing: dict[int, int] = {}  # the slots of temporaries that are still there, by their order
        free = PASSING
        for each in course or (None,):
            if each is None:
                for t in storages:
                    if t not in self.alive:
                        self.alive[t] = None
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
        for n in reversed(range(self.rows)):
            taken = [self._parts(t)[n] for t in made]
            given = [(self._slot(t) + n, 0) for t in saved]
            self.steps += [(PASSING, self._bytes(scratch) // 2), *taken, (PASSING, 0), *given]
        self.alive.update(dict.fromkeys(made))
        for t in saved:
            self.alive.pop(t, None)

    def _sum(self, first: Tensor, second: Tensor) -> Tensor:
        """The sum of a gradient's two parts: in place, unless the first part is a view (torch `input_buffer.cpp`)."""
        if first.storage not in self.views or first.storage is second.storage:
            return first
        total = Tensor(first.width, first.b)
        self._take([total])
        return total

    def _leave(self, needed: Iterable[Tensor]) -> None:
        """Frees whatever is not `needed` any more."""
        stay = set(needed)
        for t in [t for t in self.alive if t not in stay]:
            del self.alive[t]
            self.steps += [(slot, 0) for slot, _ in self._parts(t)]
