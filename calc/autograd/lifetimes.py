"""The lifetimes of a tape's tensors, as PyTorch's autograd has them: what is alive, what comes and what goes.

A pass over a tape, forward or backward, is a stream of turns, one for each operation that runs. This stream is folded
twice: `calc.autograd.polynomial` adds up what is alive during each turn, for the ledger; `calc.autograd.alloc_trace`
writes down what each allocates and frees, for the allocator's replay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from calc.autograd.tape import NOTHING, Course, Op, Size, Tape, Tensor

Storages = tuple[Tensor, ...]

# What happens between operations: gradients are added up, a checkpoint's last tensors are saved.
BETWEEN = Op("", (), (), (), ())


class Turn(NamedTuple):
    """One operation as it runs, in forward or in `backward`, and the storages that it concerns.

    While it runs, `saved` are kept for backward, and `passing` are alive beside them. It allocates those of `made`, its
    outputs or the gradients of its inputs, that are not there yet, then those of `kept`, which it saves. After it,
    nothing needs `freed`. A turn without outputs takes no time of its own: a function returns, or gradients are added.
    """

    op: Op
    backward: bool
    saved: Storages
    passing: Storages
    made: Storages
    kept: Storages = ()
    freed: Storages = ()

    @property
    def scratch(self) -> Size:
        """The bytes of the operation's temporaries."""
        return self.op.backward_scratch if self.backward else self.op.scratch

    @property
    def course(self) -> Course:
        """The order in which the temporaries come and go."""
        return self.op.backward_course if self.backward else self.op.course


class Pass(NamedTuple):
    """The turns of a pass, and the storage that it hands on: its output, or its input's gradient if that has one."""

    turns: list[Turn]
    out: Tensor | None


class Lifetimes:
    """The passes over a tape, each worked out when it is first asked for.

    Reentrant checkpointing runs a piece again to its end, and the piece's backward within its own: the output stays
    until then, and so does its gradient, an argument (torch 2.13 `utils/checkpoint.py`, `CheckpointFunction`).
    """

    def __init__(self, tape: Tape) -> None:
        """Takes a tape with at least one operation that has an input: the first such input is the piece's."""
        self.tape = tape
        self.input = next(op.inputs[0].storage for op in tape.ops if op.inputs)
        final = tape.final
        self.given = Tensor(NOTHING if tape.received else final.width, final.b)
        saving = [n for n, op in enumerate(tape.ops) if op.saves]
        self.saves_last = len(tape.ops) if tape.reentrant or not saving else saving[-1]
        self.stays: Storages = (final.storage, self.given) if tape.reentrant else ()

    @cached_property
    def forward(self) -> Pass:
        """A forward that is followed by a backward."""
        return self._whole(lambda op: op.saves)

    @cached_property
    def without_grad(self) -> Pass:
        """A forward without gradient, which saves nothing."""
        return self._whole(lambda op: ())

    @cached_property
    def once(self) -> Pass:
        """A forward that checkpointing will run again: its input stays, and what selective checkpointing keeps."""
        return self._whole(lambda op: op.kept, [self.input])

    @cached_property
    def backward(self) -> Pass:
        """The backward of a forward that saved everything."""
        backward = Backward(self)
        return Pass([*backward.through(self.tape.ops)], backward.of_input)

    @cached_property
    def again(self) -> Pass:
        """The backward of a checkpointed piece, whose forward runs again once an operation asks for what it saved.

        Selective checkpointing's cache is freed whole as backward goes on: for the allocator's replay, which gives back
        none of it earlier, while closed forms let go of each tensor where it is read for the last time.
        """
        ops, after = self.tape.ops, self.saves_last + 1
        backward = Backward(self)
        above = [*backward.through(ops[after:])]
        cache = {t.storage for op in ops for t in op.kept}
        below = [*backward.through(ops[:after], stay=[self.input], cache=cache)]
        end = Turn(BETWEEN, True, (), (), (), freed=(self.input, *self.stays))
        return Pass([*above, *self.recomputed(), *below, end], backward.of_input)

    def waiting(self) -> Storages:
        """The gradients that exist when recomputation starts: those on backward's way to the last saved tensor."""
        backward = Backward(self)
        for _ in backward.through(self.tape.ops[self.saves_last + 1 :]):
            pass
        return tuple(dict.fromkeys([g.storage for g in backward.gradient.values()]))

    def recomputed(self) -> list[Turn]:
        """The recomputed forward, which stops before the operation that saves the last tensor, unless reentrant.

        See torch 2.13 `utils/checkpoint.py`, `_StopRecomputationError`. An operation whose output was kept takes it
        from the cache (`_CachedTorchDispatchMode`).
        """
        ops = self.tape.ops
        cached = [t.storage for op in ops for t in op.kept]
        asked = tuple([t.storage for op in ops[self.saves_last :][:1] for t in op.saves])
        held = {self.input, *cached, *asked, *self.stays}
        turns = [*self._run(self.saves_last, lambda op: op.saves, held, cached)]
        return [*turns, Turn(BETWEEN, False, (), (), (), asked)]

    def _whole(self, stays: Callable[[Op], Iterable[Tensor]], held: Iterable[Tensor] = ()) -> Pass:
        out = self.tape.final.storage
        return Pass([*self._run(len(self.tape.ops), stays, {*held, out})], out)

    def _run(
        self,
        end: int,
        stays: Callable[[Op], Iterable[Tensor]],
        held: Collection[Tensor],
        cached: Iterable[Tensor] = (),
    ) -> Iterator[Turn]:
        """Runs the operations before `end`; what `stays` of each is saved, and what is `held` is not freed.

        Tensors that operations after `end` would use live until then: variables of the layer's forward name them.
        `cached` are tensors of an earlier forward, each alive until the operation that made it takes it again.
        """
        ops = self.tape.ops
        last = {t.storage: n for n, op in enumerate(ops) for t in (*op.inputs, *op.outs)}
        last.update((t.storage, len(ops)) for t in self.tape.held)
        lost = set[Tensor]()
        waiting, saved, alive = dict.fromkeys(cached), dict[Tensor, None](), dict[Tensor, None]()
        there: Storages = (*waiting,)
        for n, op in enumerate(ops[:end], 1):
            kept = tuple([t.storage for t in stays(op)])
            if kept or op.kept:
                saved.update(dict.fromkeys(kept))
                for t in op.kept:
                    waiting.pop(t.storage, None)
                there = (*saved, *waiting)
            made = tuple([t.storage for t in op.outs])
            alive.update(dict.fromkeys([t.storage for t in op.inputs if t.storage not in lost]))
            alive.update(dict.fromkeys(made))
            passing = tuple([t for t in alive if t not in saved])
            gone = [t for t in alive if last[t] < n]
            for t in gone:
                del alive[t]
            during, going = there, [t for t in op.lost if t in saved or t in alive]
            if going:
                lost.update(going)
                saved, alive = ({t: None for t in those if t not in lost} for those in (saved, alive))
                gone, there = [*gone, *going], (*saved, *waiting)
            if n == end:
                gone += alive
            freed = tuple([t for t in dict.fromkeys(gone) if t not in saved and t not in held])
            yield Turn(op, False, during, passing, made, kept, freed)


class Backward:
    """Autograd on its way down a tape: the gradients that exist, and the storages that are still saved."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        """Begins with the gradient of the last output, and with everything saved."""
        self._lifetimes, tape = lifetimes, lifetimes.tape
        # a gradient is a tensor of its own; aliases share it
        self.gradient: dict[Tensor, Tensor] = {tape.final: lifetimes.given}
        self._users: dict[Tensor, int] = {}  # operations that have saved a storage and not run yet
        for op in tape.ops:
            for t in op.saves:
                self._users[t.storage] = self._users.get(t.storage, 0) + 1
        self._lost = {t: self._users.pop(t) for t in tape.lost if t in self._users}
        # the cache is freed with the last saved tensor; what recomputation has not come to is still in it
        self._cached = [t.storage for op in tape.ops[lifetimes.saves_last :] for t in op.kept]
        self._saved: Storages = tuple(dict.fromkeys([*self._users, *self._cached]))
        self._flat: set[Tensor] = set()  # gradients that are views

    @property
    def of_input(self) -> Tensor | None:
        """The gradient of the piece's input, if it has one by now."""
        found = [g.storage for t, g in self.gradient.items() if t.storage is self._lifetimes.input]
        return found[0] if found else None

    def through(self, ops: list[Op], stay: Collection[Tensor] = (), cache: Collection[Tensor] = ()) -> Iterator[Turn]:
        """The backward of `ops`, last first: each frees what it alone saved, but `stay`; the first frees `cache`."""
        gradient = self.gradient
        for op in reversed(ops):
            if op.restores:
                yield from self._restored(op)
            incoming = [gradient[out] for out in op.outs if out in gradient]
            made = op.gradients(incoming[0]) if incoming else {}
            new = tuple([g.storage for g in made.values()])
            saved, there = self._saved, [g.storage for g in gradient.values()]
            there += () if op.rowwise else new
            there = [*self._lifetimes.stays, *there]
            passing = tuple([t for t in dict.fromkeys(there) if t not in self._users])
            for out in op.outs:
                gradient.pop(out, None)
            gone = [*self._release(op), *[g.storage for g in incoming], *cache]
            cache = ()
            freed = self._free(gone, {*stay, *new})
            yield Turn(op if incoming else BETWEEN, True, saved, passing, new, freed=freed)
            yield from self._add(made, stay)
            if op.flat:
                self._flat.update(new)

    def _restored(self, op: Op) -> Iterator[Turn]:
        """The forward of operations whose results are lost runs again, beside the gradients that exist."""
        gradients = tuple(dict.fromkeys([*self._lifetimes.stays, *[g.storage for g in self.gradient.values()]]))
        saved, made = dict.fromkeys(self._saved), dict[Tensor, None]()
        for again in op.restores:
            kept = tuple([t.storage for t in again.saves if t.storage not in saved])
            outs = tuple([t.storage for t in again.outs])
            saved.update(dict.fromkeys(kept))
            made.update(dict.fromkeys(outs))
            passing = tuple([t for t in (*gradients, *made) if t not in saved])
            yield Turn(again, False, (*saved,), passing, outs, kept)
        self._users.update({t: self._lost.pop(t) for t in op.lost if t in self._lost})
        self._saved = tuple(dict.fromkeys([*self._users, *self._cached]))
        yield Turn(BETWEEN, True, (), (), (), freed=tuple([t for t in made if t not in self._users]))

    def _release(self, op: Op) -> list[Tensor]:
        """The storages that no operation needs for its backward any more, once `op` has run."""
        released = []
        for t in op.saves:
            self._users[t.storage] -= 1
            if not self._users[t.storage]:
                del self._users[t.storage]
                released.append(t.storage)
        if released:
            self._saved = tuple(dict.fromkeys([*self._users, *self._cached])) if self._users else ()
        return released

    def _free(self, gone: Iterable[Tensor], stay: Collection[Tensor]) -> Storages:
        """Those of `gone` that are neither gradients nor saved, and do not `stay`."""
        gradients = [*self._lifetimes.stays, *[g.storage for g in self.gradient.values()]]
        return tuple([t for t in dict.fromkeys(gone) if t not in self._users and t not in stay and t not in gradients])

    def _add(self, made: dict[Tensor, Tensor], stay: Collection[Tensor]) -> Iterator[Turn]:
        """Adds gradients to those that their tensors have: in place, unless the first part is a view.

        A first part in a buffer of others gives way to the second. See torch `input_buffer.cpp`.
        """
        gradient, totals, parts = self.gradient, list[Tensor](), list[Tensor]()
        for t, g in made.items():
            first = gradient.setdefault(t, g)
            if first is g:
                continue
            parts.append(g.storage)
            if first is self._lifetimes.given and (self._lifetimes.tape.received or self._lifetimes.stays):
                gradient[t] = g
            elif first.storage in self._flat and first.storage is not g.storage:
                gradient[t] = total = Tensor(first.width, first.b)
                totals.append(total)
                parts.append(first.storage)
        if parts:
            yield Turn(BETWEEN, True, (), (), tuple(totals), freed=self._free(parts, stay))
