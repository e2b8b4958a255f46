"""The way DeepSpeed cuts parameters: in the order of the module, into equal partitions, sub-groups and buckets."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from calc.models.architecture import Tensor


class Cut(NamedTuple):
    """One optimizer's parameters over N ranks, in elements.

    `share`: one rank's partition. `touched`: the parameters that lie at least partly in a rank's partition, each
    counted whole, for the rank with most of them; `kept` is their sum, `inside` the most of any rank without the first
    parameter, the embedding, whose gradient comes last. `slice`: the largest part of one parameter inside one
    partition. `largest`: the largest parameter. `rank_elements`: a rank's share if each parameter is padded to N on its
    own (ZeRO-3), `sub_groups` its cuts. `persistent`: the sum of the parameters that ZeRO-3 keeps whole.
    """

    share: int
    touched: tuple[int, ...]
    kept: int
    inside: int
    slice: int
    largest: int
    rank_elements: int
    sub_groups: tuple[int, ...]
    persistent: int


def in_order(tensors: tuple[Tensor, ...]) -> Iterator[int]:
    """Elements of every parameter in the order of the module, layer by layer."""
    groups: dict[int, list[Tensor]] = {}
    for t in tensors:
        groups.setdefault(t.count, []).append(t)
    before = True
    for t in tensors:
        if t.count == 1:
            yield t.elements
        elif before:
            before = False
            for count, members in groups.items():
                if count > 1:
                    for _ in range(count):
                        yield from (member.elements for member in members)


@lru_cache(maxsize=2048)
def cut(tensors: tuple[Tensor, ...], ranks: int, sub_group: int, persistence: int) -> Cut:
    """The cuts of `tensors` over `ranks`; all of them empty for a model that is not trained.

    DeepSpeed `stage_1_and_2.py:get_data_parallel_partitions`, `stage3.py:_create_fp16_sub_groups`.
    """
    if not tensors:
        return Cut(0, (), 0, 0, 0, 0, 0, (), 0)
    sizes = list(in_order(tensors))
    partition = -(-sum(sizes) // ranks)
    largest_slice = start = 0
    # by rank; the first of the ranks that hold a piece of one parameter and nothing else stands for all of them
    held: dict[int, list[int]] = {}
    for size in sizes:
        first, last = start // partition, (start + size - 1) // partition
        for rank in sorted({first, min(first + 1, last), last}):
            held.setdefault(rank, []).append(size)
            inside = min(start + size, (rank + 1) * partition) - max(start, rank * partition)
            largest_slice = max(largest_slice, inside)
        start += size
    touched = tuple(max(held.values(), key=sum))
    # the embedding stands first on every rank that holds a part of it
    inside = max(sum(found) - (sizes[0] if rank * partition < sizes[0] else 0) for rank, found in held.items())
    parts = [-(-size // ranks) for size in sizes]
    groups, running = [], 0
    for part in parts:
        running += part
        if running >= sub_group:
            groups.append(running)
            running = 0
    return Cut(
        partition,
        touched,
        sum(touched),
        inside,
        largest_slice,
        max(sizes),
        sum(parts),
        (*groups, running) if running else tuple(groups),
        sum(size for size in sizes if size <= persistence),
    )


def both(a: Cut, b: Cut) -> Cut:
    """The cuts of two groups of an optimizer's parameters, each cut by itself; the embedding, if any, is in `b`."""
    return Cut(
        a.share + b.share,
        (*a.touched, *b.touched),
        a.kept + b.kept,
        a.kept + b.inside,
        max(a.slice, b.slice),
        max(a.largest, b.largest),
        a.rank_elements + b.rank_elements,
        (*a.sub_groups, *b.sub_groups),
        a.persistent + b.persistent,
    )


def part_of(t: Tensor, ranks: int) -> Tensor:
    """A rank's part of a tensor under FSDP 2, cut along its first dimension; all are as large as the first.

    torch 2.13 `distributed/fsdp/_fully_shard/_fsdp_param.py`, `_init_sharded_param`.
    """
    return t._replace(shape=(-(-t.shape[0] // ranks), *t.shape[1:]))


@lru_cache(maxsize=4096)
def padded(tensors: tuple[Tensor, ...], ranks: int) -> int:
    """Elements over all ranks where FSDP 2 cuts each tensor along its first dimension, all cuts as large as the first.

    More than the tensors have where that dimension is smaller than `ranks` or no multiple of it: eight fused experts
    on 16 ranks are stored twice (torch `_fsdp_param.py`, `padded_sharded_param_size`).
    """
    return sum(t.count * ranks * part_of(t, ranks).elements for t in tensors)
