"""Buffers of DDP, ZeRO and FSDP, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calc.memory import communication


def test_each_buffer_takes_its_bytes() -> None:
    """Elements times bytes times copies."""
    for line, expected in (
        (communication.ddp_buckets("actor", 100, 2), 200),
        (communication.gathered("actor", "layers", 100, 2, 3), 600),
        (communication.gathered("actor", "4-bit layers", 1000, 0.5, 3), 1500),
        (communication.cast_shard("actor", 800, 2, 8), 200),
        (communication.reducing("actor", 100, 4), 400),
        # 500 million elements of bf16, twice where communication overlaps
        (communication.bucket("actor", 500_000_000, 2), 10**9),
        (communication.bucket("actor", 500_000_000, 2, 2), 2 * 10**9),
        (communication.flush("actor", 500_000_000, 2), 10**9),
        (communication.offload_buffer("actor", 525_336_576, 2), 1_050_673_152),
        (communication.persistent("actor", 65 * 4096, 2), 532_480),
        (communication.handed("actor", "parameter", 525_336_576, 4), 2_101_346_304),
        # verl's bucket of 2048 MiB, whatever goes through it
        (communication.handed("actor", "bucket", 525_336_576, 4), 2 << 30),
    ):
        assert line.bytes == expected
        assert line.component == "communication"


@given(st.integers(0, 10**12), st.integers(1, 10**10), st.integers(1, 10**10))
def test_zero_3_never_gathers_more_than_the_model_or_the_window_and_one_module(
    p: int, window: int, module: int
) -> None:
    """The prefetcher stops at `stage3_max_live_parameters`, overshot by the parameter that comes last."""
    found = communication.live_parameters("actor", p, window, module, 2).bytes
    assert found == min(2 * p, 2 * window + 2 * module)


def test_a_shard_is_whole_bytes() -> None:
    """FSDP 1's copy of 7 bf16 elements over 4 ranks: 3.5 bytes, rounded down."""
    found = communication.cast_shard("actor", 7, 2, 4).bytes
    assert (found, type(found)) == (3, int)


@pytest.mark.parametrize("what", ["parameter", "clone", "adapter"])
def test_only_verls_bucket_has_a_fixed_size(what: str) -> None:
    """Whatever else is handed takes what its elements take."""
    line = communication.handed("actor", what, 100, 2)
    assert (line.bytes, line.values["what"]) == (200, what)
