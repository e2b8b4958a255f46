"""What an engine spreads over GPUs, where in a step it is asked, and what every engine answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from calc.architecture import Architecture, Head, Tensor
from calc.keeps import Path
from calc.ledger import Line
from calc.memory.activations import Run
from calc.memory.optimizer import Optimizer


@dataclass(frozen=True, slots=True)
class Replica:
    """One role's model before an engine spreads it: its parameters and the number formats they are kept in.

    Bytes are per parameter: `weight_bytes` of the model's own weights, `adapter_bytes` of LoRA's, `grad_bytes` of what
    backward leaves behind, `master_bytes` of an fp32 copy beside 16-bit weights, `step_bytes` of what the optimizer
    steps in. `ranks` is the data-parallel size; `accumulates` says that a step has several micro-batches.
    """

    role: str
    arch: Architecture
    head: Head
    run: Run
    path: Path
    parameters: int
    weight_bytes: int
    quantised: bool
    adapter: int
    adapter_bytes: int
    trainable: int
    trained_tensors: tuple[Tensor, ...]
    grad_bytes: int
    master_bytes: int
    step_bytes: int
    optimizer: Optimizer | None
    ranks: int
    accumulates: bool

    @property
    def ties_gradients(self) -> bool:
        """Whether the embedding's gradient has two contributions, the head's and the input's."""
        return self.arch.tied and self.head == "lm" and self.run.trained

    @property
    def largest(self) -> int:
        """Elements of the largest trained tensor."""
        return max([t.elements for t in self.trained_tensors], default=0)


class Where(NamedTuple):
    """A place in the step, as an engine needs to know it.

    `segment`: gather (a layer's weights come together), layer, norm, head, loss (in the model's own forward), outside
    (a loss that is no part of the model), waiting (another model runs), end (the embedding's backward), reduce (the
    last gradients leave).
    `layer` counts from 0. In backward, `root` trained elements of head and final norm and `above` of the layers above
    have their gradient, and `here` of this layer; `making` is what the operation that runs makes.
    """

    segment: str
    layer: int
    backward: bool
    root: int = 0
    above: int = 0
    here: int = 0
    making: int = 0

    @property
    def done(self) -> int:
        """All trained elements that have their gradient."""
        return self.root + self.above + self.here


Moments = Iterator[tuple[str, list[Line]]]


class Engine(Protocol):
    """What every engine answers about its replica."""

    @property
    def replica(self) -> Replica:
        """The model it spreads."""

    def loading(self) -> Moments:
        """The moments of loading, in order: a name and the lines of this role alive at it."""

    def resident(self) -> list[Line]:
        """What stays on the GPU through every step, optimizer states included."""

    def at(self, where: Where) -> list[Line]:
        """What the engine adds at a place of forward or backward: gradients, gathered parameters, buckets."""

    def stepping(self) -> Moments:
        """The moments of the optimizer step: what is alive beside `resident`."""

    def host(self) -> Moments:
        """Host memory of one rank from loading to the first step, cumulative."""
