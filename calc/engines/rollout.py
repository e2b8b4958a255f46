"""The interface of a rollout engine, which generates the responses of RL on a card of its own or beside the trainer."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, get_args

from calc.base.ledger import Line
from calc.base.plan import Serving
from calc.base.refusal import Refusal

ROLE = "rollout"

# The instants of an engine's start.
Starting = Literal["weights on the GPU", "profile run", "KV cache allocated"]
STARTING: tuple[Starting, ...] = get_args(Starting)


class Unstarted(NamedTuple):
    """The reason that an `engine` does not start: the setting that it refuses, and the same in words for readers."""

    refusal: Refusal
    words: str
    engine: str = "vLLM"

    @property
    def verdict(self) -> str:
        """The verdict on the job, whatever the reason."""
        return f"{self.engine} does not start"

    def __str__(self) -> str:
        """The refusal on one line."""
        return str(self.refusal)


class Cache(NamedTuple):
    """The KV cache of one rank: its size, and the number of `sequences` of the full length that it holds at once.

    `refusal`: the reason that the engine would not start. `crowded`: the reason is that others leave it less than its
    share, so that a smaller share may do.
    """

    bytes: int
    tokens: int
    blocks: int
    sequences: int
    refusal: Unstarted | None
    crowded: bool = False


class RolloutEngine(Protocol):
    """One rank of an engine: the lines that it has on its card and its host, state by state.

    `others` are bytes of the card that are not the engine's own.
    """

    @property
    def serving(self) -> Serving:
        """The release, and the settings that the framework passes to it."""

    @property
    def max_num_seqs(self) -> int:
        """The most sequences at once."""

    @property
    def schedules_ahead(self) -> bool:
        """True if it prepares a step while the GPU runs the one before."""

    def weights(self) -> list[Line]:
        """This rank's share of the model."""

    def starting(self, moment: Starting, others: int) -> list[Line]:
        """The lines at one of the instants of `STARTING`."""

    def awake(self, others: int) -> list[Line]:
        """All lines of an engine that serves."""

    def with_weights(self) -> list[Line]:
        """The lines of an engine that is awake for new weights, its cache still unmapped."""

    def asleep(self) -> list[Line]:
        """Memory that sleep cannot free."""

    def cache(self, others: int) -> Cache:
        """The KV cache that the engine allocates, or its reason not to start."""

    def host(self, level: int) -> list[Line]:
        """Host memory of this rank at a sleep level; 0: it never sleeps."""
