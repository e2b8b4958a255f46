"""The choices that a framework leaves to its user, for a search that must not compare frameworks by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Cut = Callable[[Mapping[str, Any], Mapping[str, Any]], bool]


class Choices(NamedTuple):
    """The choices that a framework leaves to its user.

    `own_loop`: the user writes the loop, and with it the global batch, the loss and the optimizer's implementation.
    `fp16`: it computes in fp16 on a card without bf16. `precision`: the type in which weights can be loaded in place of
    fp32, unless DeepSpeed keeps a master copy; "" if it offers none. `offloads_apart`: under FSDP weights and optimizer
    states move to the host independently. `shared`: the degree by which its trainer lets GPUs share a sequence, "" for
    none; `cuts` tells from a job's fields and a rung of them whether sequences are cut.
    """

    own_loop: bool = False
    fp16: bool = False
    precision: str = ""
    offloads_apart: bool = False
    shared: str = ""
    cuts: Cut = lambda job, rung: True
