"""ColossalAI's LowLevelZeroOptimizer, ZeRO 1 and 2: each parameter is cut over the ranks on its own.

Read in ColossalAI 4f9953be3: `zero/low_level/low_level_optim.py` and `bookkeeping/`, `nn/optimizer/hybrid_adam.py`,
`booster/plugin/low_level_zero_plugin.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from calc.base.ledger import Line
from calc.base.plan import Handed
from calc.engines.replica import Holder, Moments, Replica, Where, times
from calc.engines.zero_partition import in_order
from calc.memory import communication, gradients, host, optimizer, weights
from calc.models.architecture import Tensor

B = 2  # bytes of a weight, of its gradient, and of what is reduced and gathered


class Cuts(NamedTuple):
    """One optimizer's parameters, in elements.

    `share`: a rank's parts of all of them, each padded to a multiple of the ranks. `part`: its part of the largest.
    `waiting`: the most whose gradients stand in the bucket while those of another parameter are made, and `last` those
    that stand there when backward has ended. `gathered`: the most parts that are gathered at once.
    """

    share: int
    part: int
    waiting: int
    last: int
    gathered: int


@lru_cache(maxsize=2048)
def cuts(tensors: tuple[Tensor, ...], ranks: int, bucket: int) -> Cuts:
    """The cuts of `tensors` over `ranks` with a `bucket` of so many elements; all of them 0 where nothing is trained.

    Gradients come in the reverse order of the parameters. One that does not fit sends off what is there, and waits for
    the next, however large it is (`_add_to_bucket`). Parts are gathered as many at a time as a bucket holds; larger
    ones alone and in place (`step`).
    """
    if not tensors:
        return Cuts(0, 0, 0, 0, 0)
    sizes = [*in_order(tensors)]
    parts = [-(-size // ranks) for size in sizes]
    *waiting, last = fills(sizes[::-1], bucket)
    small = fills([part for part in parts if part <= bucket], bucket)
    return Cuts(sum(parts), max(parts), max(waiting, default=0), last, max(small))


def fills(sizes: Iterable[int], bucket: int) -> list[int]:
    """The elements in a bucket each time that the next of `sizes` does not fit, and at the end."""
    found = [0]
    for size in sizes:
        if found[-1] and found[-1] + size > bucket:
            found.append(0)
        found[-1] += size
    return found


@dataclass(frozen=True, slots=True)
class LowLevelZero(Holder):
    """`replica` under ZeRO `stage` with buckets of so many elements; `offload`: masters, states and steps on the host.

    A frozen model is whole. Gradients are reduced as backward makes them, at stage 1 too: the plugin overlaps both.
    """

    replica: Replica
    stage: int
    bucket: int
    offload: bool = False
    cut: Cuts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Cut the parameters once: every place of a step asks for it."""
        r = self.replica
        object.__setattr__(self, "cut", cuts(r.trained_tensors, r.ranks, self.bucket))

    def weights(self) -> list[Line]:
        """Whole weights, which are also where all ranks' parts are gathered."""
        r = self.replica
        lines = [weights.weights(r.role, r.parameters, r.weight_bytes, source="weights#zero")]
        if r.adapter:
            lines.append(weights.adapter(r.role, r.adapter, r.adapter_bytes))
        return [*lines, *self.tables()]

    def loading(self) -> Moments:
        """Weights move in, then the master of each parameter's part is made of it, one after another."""
        lines = self.weights()
        yield "weights on the GPU", lines
        if self.replica.optimizer is not None:
            yield "ready", [*lines, *self.states(adam=False)]

    def root(self) -> list[Line]:
        """Empty: nothing is gathered for a forward."""
        return []

    def states(self, *, adam: bool = True) -> list[Line]:
        """A rank's masters and moments, of each parameter its part; moments exist from the first step on."""
        r = self.replica
        if r.optimizer is None or self.offload:
            return []
        lines = [weights.master(r.role, r.trainable, r.master_bytes, r.ranks)]
        if adam:
            lines.append(optimizer.states(r.optimizer, r.role, r.trainable, r.step_bytes, r.trained_tensors, r.ranks))
        return lines

    def at(self, where: Where) -> list[Line]:
        """Gradients: those in the bucket, whole, and of those before them the rank's parts, or at stage 1 all.

        As a bucket leaves it is copied flat, and reduced into another tensor, which the gradients then are parts of.
        """
        r, c = self.replica, self.cut
        if r.optimizer is None:
            return []
        done = where.done if where.backward else 0
        waits, making = min(c.waiting, done) if where.making else 0, where.making
        if where.segment == "end":
            # an adapter's rows join others in the last bucket, where they fit
            waits = max(0, min(c.last, done) - making) if where.relaid else 0
            done -= making
        elif where.segment == "reduce":
            waits = min(c.last, done)
        # those of earlier micro batches are complete
        reduced = r.trainable if r.accumulates else done - waits
        lines = [self.kept(reduced)] if reduced else []
        if tied := self.tied(where, B):
            return [*lines, *tied]
        lines += [*self.waiting_head(where, B), *self.laid_anew(where, B)]
        if where.backward and waits + making:
            lines += [gradients.new(r.role, making + waits, B), self.leaving(0 if where.relaid else waits)]
        return lines

    def kept(self, done: int) -> Line:
        """The gradients of `done` elements that have been reduced."""
        r = self.replica
        return gradients.accumulated(r.role, done, B, r.ranks if self.stage > 1 else 1)

    def leaving(self, elements: int) -> Line:
        """A bucket's flat copy and, at stage 2, the rank's part of its sum over all ranks (`_run_reduction`)."""
        own = -(-elements // self.replica.ranks) if self.stage > 1 else 0
        return communication.flush(self.replica.role, elements + own, B)

    def stepping(self) -> Moments:
        """The gradients in fp32 beside those in 16 bits, their norm, the optimizer, and the gathering of new weights.

        Where the optimizer is on the host, each part's goes there as soon as it is fp32 (`step`).
        """
        r, c = self.replica, self.cut
        if r.optimizer is None:
            return
        kept = self.kept(r.trainable)
        wide = gradients.flattened(r.role, c.part if self.offload else c.share, 4)
        if self.offload:
            yield "gradients to the host", [kept, wide]
            yield "gradient norm", [kept, gradients.squared_norm(r.role, c.part)]
        else:
            yield "gradient norm", [kept, wide, gradients.squared_norm(r.role, c.part)]
            parts = (r.optimizer, r.role, c.part, r.trainable, 4, r.ranks)
            yield "optimizer step", [kept, wide, optimizer.step_scratch(*parts)]
        # parts in 16 bits, the same flat, and all ranks', of which a parameter is joined before it is copied
        joined = communication.flush(r.role, c.gathered * (2 + 2 * r.ranks), B)
        yield "weights gathered", [kept, joined]

    def handing(self, word: Handed) -> Line:
        """The memory to hand weights on: they are whole, so that a clone alone takes any."""
        r = self.replica
        return communication.handed(r.role, word, r.embedding if word == "clone" else 0, B)

    def host(self, ranks: int) -> Moments:
        """Host memory of the node's ranks, from loading to after the first step."""
        for name, lines in self.on_rank():
            yield name, times(lines, ranks)

    def on_rank(self) -> Moments:
        """Host memory of one rank: the model as it is loaded, and with offload masters, gradients and moments."""
        r, c = self.replica, self.cut
        yield "loading", [host.loading(r.role, r.parameters, r.weight_bytes, streamed=False)]
        if r.optimizer is None or not self.offload:
            return
        built = [host.master(r.role, c.share)]
        yield "before the first step", built
        states = optimizer.state_bytes_per_parameter(r.optimizer, r.step_bytes)
        grads = host.wide_gradients(r.role, c.share)
        yield "after the first step", [*built, grads, host.moments(r.role, c.share, states)]
