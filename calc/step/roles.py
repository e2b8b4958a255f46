"""A job with its roles placed, from which its GPU groups and its host nodes are computed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from calc.base.plan import Path
from calc.catalog.catalog import GPU
from calc.engines.replica import Replica
from calc.engines.rollout import RolloutEngine
from calc.models.architecture import Architecture
from calc.scenario.scenario import Scenario, changed, on_card
from calc.step import first_loss, placement
from calc.step.instants import Batch, Step, step
from calc.step.placement import Placed

T = TypeVar("T")


class Memo:
    """A cache of computed values, by the key that determines each."""

    def __init__(self) -> None:
        """Starts empty."""
        self._known: dict[Hashable, Any] = {}

    def once(self, what: Hashable, found: Callable[[], T]) -> T:
        """The value of the key `what`, computed by `found` the first time."""
        if what not in self._known:
            self._known[what] = found()
        known: T = self._known[what]
        return known


class Places(Mapping[str, Placed]):
    """The roles of a scenario by name, each placed when it is first asked for: a search may need one alone."""

    def __init__(self, s: Scenario) -> None:
        """The roles of `s`, in their order."""
        self._s, self._roles, self._placed = s, {role.name: role for role in s.keeps.roles}, dict[str, Placed]()

    def __getitem__(self, name: str) -> Placed:
        """The role called `name`; raises KeyError where there is none."""
        if name not in self._placed:
            self._placed[name] = placement.place(self._s, self._roles[name], self._s.keeps)
        return self._placed[name]

    def __contains__(self, name: object) -> bool:
        """True if there is a role called `name`."""
        return name in self._roles

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._roles)

    def __len__(self) -> int:
        """The number of roles."""
        return len(self._roles)


class Roles(Memo):
    """The roles of a scenario, each under its engine: everything that is the same on every card, computed once for all.

    `training` caches what the training and scoring roles need, and `serving` what they need in the phases of vLLM:
    scenarios that differ only in vLLM's settings may share the first, and those that differ only in its share of the
    card and in the micro batch the second. `within` caches what a role adds in its own phases: those that differ only
    in what leaves the GPUs between these may share it, too.
    """

    def __init__(
        self, s: Scenario, training: Memo | None = None, serving: Memo | None = None, within: Memo | None = None
    ) -> None:
        """The roles of `s`, whose card does not matter."""
        super().__init__()
        self.s, self.training, self.serving = s, training or Memo(), serving or Memo()
        self.within = within or Memo()
        self.keeps, self.placed = s.keeps, Places(s)

    def batch(self, s: Scenario, rows: int, length: int = 0) -> Batch:
        """The fullest batch of `rows` sequences that a role with scenario `s` runs, or one padded to `length`.

        One GPU has the share of their tokens that context parallelism leaves it.
        """
        length = length or s.held_len(rows)
        tokens = -(-rows * length // s.context_parallel)
        return Batch(tokens, tokens if s.architecture.end_to_end else length)

    def step(self, r: Replica, s: Scenario, batch: Batch) -> Step:
        """The activations of a model on one micro-batch."""
        fsdp = s.sharded.stage if s.sharded.family == "fsdp" and not r.stays else 0
        config = self.keeps.deepspeed
        plain = not config and s.sharded.family in ("none", "ddp")
        return step(
            r.role,
            placement.reading(s, r.run, batch.length),
            r.path,
            r.trainable,
            batch,
            masked=placement.masked(s, r.arch, batch.length),
            checkpointing=s.checkpointing if r.optimizer and not r.run.again else "none",
            fsdp=fsdp,
            grouped=fsdp == 1 or (fsdp == 2 and not r.adds_singly) or (plain and r.keeps_all),
            bucket=config.reduce_bucket if config and s.sharding in ("zero2", "zero3") else self.keeps.low_level,
            streams=r.streams if r.optimizer else "",
            head_unit=bool(fsdp == 2 and r.ends and r.optimizer) and not r.defers,
        )


# A search and the look-up tables estimate the same configurations of a model on one card after another.
@lru_cache(maxsize=1024)
def _roles(s: Scenario, *models: Architecture) -> Roles:
    """The roles of `s`; its `models` are part of the cache's key because scenarios do not compare by them."""
    return Roles(s)


@lru_cache(maxsize=1024)
def _settled(s: Scenario, paths: tuple[Path, ...], *models: Architecture) -> Roles:
    """The same whose roles have other `paths`."""
    roles = tuple([replace(role, path=path) for role, path in zip(s.keeps.roles, paths, strict=True)])
    return Roles(changed(s, {"keeps": replace(s.keeps, roles=roles)}))


def settled(roles: Roles, gpu: GPU) -> Roles:
    """The roles with losses that have counted their chunks by what is free on this card."""
    if not any([role.path.chunks for role in roles.keeps.roles]):
        return roles
    paths = []
    for role in roles.keeps.roles:
        placed = roles.placed[role.name]
        batch = roles.batch(placed.s, role.rows)
        paths.append(first_loss.path(placed, roles.step(placed.engine.replica, placed.s, batch), gpu))
    return _settled(roles.s, tuple(paths), roles.s.architecture, *roles.s.architectures.values())


class Job:
    """One scenario with its roles placed on a card."""

    def __init__(self, s: Scenario, gpu: GPU, roles: Roles | None = None) -> None:
        """The job of `s` on GPUs of this kind; `roles` are its own, where they are known."""
        self.s, self.gpu = s, gpu
        self.roles = settled(roles or _roles(on_card(s, ""), s.architecture, *s.architectures.values()), gpu)
        self.keeps, self.placed = self.roles.keeps, self.roles.placed

    @cached_property
    def engine(self) -> RolloutEngine | None:
        """vLLM where it serves the rollout, else None."""
        return placement.serving(self.s, self.keeps, self.gpu)
