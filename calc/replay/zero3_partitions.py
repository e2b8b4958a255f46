"""A model's parameters as ZeRO-3 cuts them: its modules in the order in which they run, and what each step reduces.

Read in DeepSpeed 0.19.8 `runtime/zero/{parameter_offload,stage3}.py` and `runtime/comm/coalesced_collectives.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from calc.engines.zero import NORM_CHUNK, B, Zero
from calc.models.architecture import Tensor
from calc.replay.allocator import asked
from calc.replay.zero3_fetches import Limits, Module, Steps, Use, blocks

# Modules around the embedding, which begin before it: the model, the decoder in it, and two of PEFT's around both
OUTER, ADAPTED = 2, 2
NORM = 4  # bytes per element of a gradient as its norm is taken
SQUARED = 8  # and of one that leaves for the host (`_constant_buffered_norm2`)


class Stored(NamedTuple):
    """A parameter tensor with the bytes of one element as it is stored, and whether it is trained."""

    tensor: Tensor
    bytes: int
    trained: bool

    @property
    def elements(self) -> int:
        """Elements of the whole tensor."""
        return self.tensor.elements

    @property
    def path(self) -> tuple[str, ...]:
        """The names of the modules that hold it, from the layer inwards; LoRA's matrices are named as modules."""
        outside, inside, below = self.tensor.name.partition(".*.")
        *path, last = (below if inside else outside).split(".")
        if last.startswith("lora_"):
            return (*path, last)
        return tuple(path) if inside else tuple(path[-1:])


class Partitioned(NamedTuple):
    """A model's parameters under ZeRO-3, each cut over all ranks; in bytes, but for `groups`.

    `whole` has the sizes of the tensors as they are loaded, `parts` those of this rank's parts, of which some are
    `trained`. `groups` are the optimizer's sub-groups in elements, none where nothing is trained; each element has
    `weight_bytes`, `master_bytes` in fp32 and a kept gradient of `grad_bytes`. `first` and `later` have what comes and
    goes at each place of the first pass, and of all others: before the layers, in each, after them, and back.
    A gradient of more than the `bucket` is not copied into it. `reductions` has the blocks of reducing, in the order of
    backward: with each layer, and at the end. `norms` are the copies of gradients whose norms are taken in the step.
    `built_whole`: the whole model lies on the GPU before it is cut. `offload`: the optimizer is on the host, with the
    kept gradients.
    """

    whole: tuple[int, ...]
    parts: tuple[int, ...]
    trained: tuple[bool, ...]
    groups: tuple[int, ...]
    weight_bytes: int
    master_bytes: int
    grad_bytes: int
    first: tuple[Steps, ...]
    later: tuple[Steps, ...]
    bucket: int
    reductions: tuple[Steps, ...]
    norms: tuple[int, ...]
    built_whole: bool = False
    offload: bool = False

    @property
    def events(self) -> int:
        """About how many blocks come and go in a pass."""
        return sum(map(len, (*self.later, *self.reductions)))


class Node(NamedTuple):
    """A module with its `own` parameters and the modules that it calls, in that order."""

    own: Module = ()
    calls: tuple[Node, ...] = ()

    def forward(self) -> Iterator[Use]:
        """The module and all that it calls, as forward begins and ends them."""
        yield Use(self.own, True)
        for node in self.calls:
            yield from node.forward()
        yield Use(self.own, False)

    def backward(self) -> Iterator[Use]:
        """The same as backward does."""
        yield Use(self.own, True)
        for node in reversed(self.calls):
            yield from node.backward()
        yield Use(self.own, False)

    def again(self, *, reentrant: bool) -> Iterator[Use]:
        """Backward with forward in it, which runs once the module that is differentiated first has been fetched.

        It ends where it has what that module needs, so that the modules around it do not end. Reentrant checkpointing
        runs it first, to its end.
        """
        back, forth = [*self.backward()], [*self.forward()]
        if reentrant:
            yield from (*forth, *back)
            return
        begun = next(n for n, use in enumerate(back) if not use.begins)
        yield from (*back[:begun], *forth[:-begun], *back[begun:])


LEAF = Node()


def partitioned(
    e: Zero, before: Sequence[Stored], layers: Sequence[Sequence[Stored]], after: Sequence[Stored], *, again: bool
) -> Partitioned:
    """The parameters of a model: those before its layers, in each of them, and after; `again`: layers run again."""
    r, c = e.replica, e.config
    stored = (*before, *[one for layer in layers for one in layer], *after)
    elements, limits = tuple([one.elements for one in stored]), Limits(c.prefetch, c.max_live)
    places = _places(e, before, layers, after, again=again)
    first, later = (blocks(places, elements, r.ranks, limits, learnt=learnt) for learnt in (False, True))
    return Partitioned(
        whole=tuple([one.elements * one.bytes for one in stored]),
        parts=tuple([-(-one.elements // r.ranks) * one.bytes for one in stored]),
        trained=tuple([one.trained for one in stored]),
        groups=e.cut.sub_groups,
        weight_bytes=r.weight_bytes,
        master_bytes=r.master_bytes,
        grad_bytes=r.grad_bytes,
        first=first,
        later=later,
        bucket=c.reduce_bucket * B,
        reductions=tuple(_reductions(e, [after, *layers[::-1], before])),
        norms=tuple([-(-one.elements // r.ranks) * NORM for one in stored if one.trained]),
        built_whole=e.built_whole,
        offload=e.offload_optimizer,
    )


def _places(
    e: Zero, before: Sequence[Stored], layers: Sequence[Sequence[Stored]], after: Sequence[Stored], *, again: bool
) -> tuple[tuple[Use, ...], ...]:
    """The modules that begin and end at each place of a pass, which ends with forward where nothing is trained.

    The embedding's backward ends no module, as its input has no gradient.
    """
    r, found, start = e.replica, list[tuple[Node, ...]](), 0
    for place in (before, *layers, after):
        found.append(_modules(place, start, e.config.persistence_threshold))
        start += len(place)
    below, *inside, above = found
    if any(spec.rotated for spec in r.arch.specs):
        below = (*below, LEAF)  # the cosines and sines
    if r.arch.tied and r.head == "lm":
        above = (*above, below[0])
    begun = [Use((), True)] * (OUTER + ADAPTED * bool(r.run.adapter))
    tops = [Node(calls=calls) for calls in inside]
    forward = [[*begun, *_forward(below)], *[[*top.forward()] for top in tops], [*_forward(above)]]
    if r.optimizer is None:
        return tuple(map(tuple, forward))
    last, *others = [[*node.backward()] for node in reversed(above)]
    back = [[*(top.again(reentrant=r.run.reentrant) if again else top.backward())] for top in reversed(tops)]
    back[0] = [*[use for uses in others for use in uses], *back[0]]
    end = [Use(node.own, True) for node in reversed(below) if node.own]
    return tuple(_late([*forward, [*begun, *last], *back, end]))


def _late(places: Iterable[Sequence[Use]]) -> Iterator[tuple[Use, ...]]:
    """The same places where the modules that begin last end at the next one: their parameters are there meanwhile."""
    ended = list[Use]()
    for place in places:
        begun = max([n for n, use in enumerate(place, 1) if use.begins], default=0)
        yield (*ended, *place[:begun])
        ended = [*place[begun:]]


def _forward(nodes: Iterable[Node]) -> Iterator[Use]:
    for node in nodes:
        yield from node.forward()


def _modules(place: Sequence[Stored], start: int, threshold: int) -> tuple[Node, ...]:
    """The modules of a place in the order in which they run, whose parameters are numbered from `start` on.

    Parameters of up to `threshold` elements are not gathered, but their modules begin and end all the same. A norm runs
    before the module beside it, or before and after it.
    """
    tree = Tree()
    for n, one in enumerate(place, start):
        tree.enter(one.path, () if one.elements <= threshold else (n,))
    norms = [tree.calls[name].node(name) for name in tree.calls if not tree.calls[name].calls and "norm" in name]
    others = [tree.calls[name].node(name) for name in tree.calls if tree.calls[name].calls or "norm" not in name]
    each = len(norms) // max(len(others), 1)
    if each < 2:
        return tuple([node for pair in zip_longest(norms, others) for node in pair if node])
    return tuple([node for n, other in enumerate(others) for node in (norms[2 * n], other, norms[2 * n + 1])])


@dataclass(slots=True)
class Tree:
    """Modules by their names, with their own parameters."""

    own: Module = ()
    calls: dict[str, Tree] = field(default_factory=dict)

    def enter(self, path: Sequence[str], own: Module) -> None:
        """Adds a module's parameters."""
        if path:
            self.calls.setdefault(path[0], Tree()).enter(path[1:], own)
        else:
            self.own += own

    def node(self, name: str) -> Node:
        """The module with those that it calls.

        PEFT's calls its base, drops out, and calls the adapter's two. It looks at the type of the first one's weight,
        which DeepSpeed counts as its own from then on (`ZeROOrderedDict`).
        """
        calls = tuple([each.node(inner) for inner, each in self.calls.items()])
        if "lora_A" in self.calls:
            return Node(self.calls["lora_A"].own, (Node(self.own), LEAF, *calls))
        if name in ("mlp", "feed_forward", "block_sparse_moe"):
            calls = (*calls[:1], LEAF, *calls[1:])  # the activation
        return Node(self.own, calls)


def _reductions(e: Zero, places: Sequence[Sequence[Stored]]) -> Iterator[Steps]:
    """The blocks of reducing gradients, as the buckets fill: with each place of backward but the first, which goes with
    the second, and at the end (`reduce_independent_p_g_buckets_and_remove_grads`, `reduce_scatter_coalesced`).
    """
    size, bucket, steps = e.config.reduce_bucket, list[int](), list[tuple[int, int]]()

    for n, place in enumerate(places):
        for one in reversed(place):
            if not one.trained:
                continue
            if bucket and sum(bucket) + one.elements > size:
                steps += _reduced(e, bucket)
                bucket = []
            bucket.append(one.elements)
        if n == len(places) - 1 and bucket:
            steps += _reduced(e, bucket)
        if n:
            yield tuple(steps)
            steps = []


def _reduced(e: Zero, bucket: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The blocks of reducing a bucket: all of it, sorted by rank, and this rank's parts in the type that is kept.

    Parts leave for the host in the order of the parameters, not of backward; equal ones find the same blocks again.
    """
    ranks, kept = e.replica.ranks, e.replica.grad_bytes
    parts = [-(-n // ranks) for n in bucket[::-1]]
    made = [] if len(bucket) == 1 and bucket[0] % ranks == 0 else [sum(parts) * ranks * B]
    if kept != B:
        made += [part * kept for part in parts]
    yield from enumerate(map(asked, made))
    for part in dict.fromkeys(parts) if e.offload_optimizer else ():
        yield from _leaving(part, kept, len(made), e.replica.master_bytes)
    yield from [(n, 0) for n in range(len(made))]


def _leaving(part: int, kept: int, slot: int, master: int) -> Iterator[tuple[int, int]]:
    """The blocks of a part of a gradient that leaves for the host, as in the last micro batch (`partition_grads`).

    What the host keeps comes back for its norm, which is taken in fp64 chunk by chunk, and for its cast to the
    optimizer's type.
    """
    yield slot, asked(part * kept)
    passing = [min(NORM_CHUNK, part - start) * SQUARED for start in range(0, part, NORM_CHUNK)]
    for size in (*passing, *[part * master] * (kept != master)):
        yield from ((slot + 1, asked(size)), (slot + 1, 0))
    yield slot, 0
