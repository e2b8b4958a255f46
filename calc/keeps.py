"""The words in which a framework says what it keeps in memory; `calc.frameworks` fills them in, others read them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Path:
    """How logits become a loss.

    `kind`: `cross-entropy` (a model's own loss, in fp32), `log-softmax` (of all logits, then gather), `selective` (row
    by row), `logsumexp` (gather minus logsumexp, `rows` the same row by row), `flash` (a kernel that keeps its logits
    and writes one gradient), `chunked`, `fused`, `scalar` (a value head, no vocabulary).
    `head_fp32`: logits are cast to fp32 at once, the 16-bit ones dropped. `upcast`: the loss casts them and the model's
    own stay referenced meanwhile. `shift_copy`: logits without the last position are copied. `held`: the outputs stay
    referenced through backward; `carried`: through the step and the next forward too.
    """

    kind: str
    head_fp32: bool = False
    upcast: bool = False
    shift_copy: bool = False
    held: bool = False
    carried: bool = False


@dataclass(frozen=True, slots=True)
class DeepSpeed:
    """A DeepSpeed release with its configuration's defaults, in elements (`deepspeed/runtime/zero/config.py`).

    A framework that passes "auto" gets these, since DeepSpeed drops the word (`runtime/config_utils.py`).
    """

    version: str
    reduce_bucket: int = 500_000_000
    persistence_threshold: int = 100_000
    max_live: int = 1_000_000_000
    sub_group: int = 1_000_000_000
    overlap_comm: bool = False


@dataclass(frozen=True, slots=True)
class Keeps:
    """What a framework keeps for one scenario.

    `path` is how the trained model's logits become a loss, `reference_path` the frozen one's. `reference` is `copy`
    where a second model is loaded and `adapter` where the policy runs with its adapter switched off.
    """

    path: Path
    reference_path: Path
    reference: str = "copy"
    deepspeed: DeepSpeed | None = None
    notes: tuple[str, ...] = ()
