"""What a search may choose where a framework's user does, so that no framework has to be told by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Cut = Callable[[Mapping[str, Any], Mapping[str, Any]], bool]


class Choices(NamedTuple):
    """What a framework leaves to whoever runs it.

    `own_loop`: its user writes the loop, and with it the global batch, the loss and how the optimizer steps.
    `fp16`: it computes in fp16 where a card has no bf16.
    `precision`: to what weights are cut in place of fp32, where no DeepSpeed keeps a master; "" where it offers none.
    `offloads_apart`: under FSDP weights and optimizer states move to the host each by itself.
    `shared`: the degree by which its trainer lets GPUs share a sequence, "" for none; `cuts` says of a job's fields and
    a rung of them whether sequences are cut.
    """

    own_loop: bool = False
    fp16: bool = False
    precision: str = ""
    offloads_apart: bool = False
    shared: str = ""
    cuts: Cut = lambda job, rung: True
