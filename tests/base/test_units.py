from __future__ import annotations

import pytest

from calc.base.units import GB, GiB, MiB, gb, gib


def test_binary_units_are_powers_of_two_and_gb_is_decimal() -> None:
    """NVML and PyTorch count in MiB and GiB, data sheets in GB: 80 GiB are 85.9 GB."""
    assert (MiB, GiB, GB) == (1_048_576, 1_073_741_824, 1_000_000_000)
    assert GiB == 1024 * MiB


@pytest.mark.parametrize(
    ("n_bytes", "shown"),
    [
        (0, "0.0 GiB"),
        (16_060_522_496, "15.0 GiB"),  # Llama 3 8B in bf16: 14.957
        (2_411_724_800_000, "2,246.1 GiB"),
        (GiB // 2, "0.5 GiB"),
        (-GiB, "-1.0 GiB"),  # a difference of two estimates
    ],
)
def test_memory_is_shown_in_gibibytes_with_one_digit(n_bytes: int, shown: str) -> None:
    """The guide's unit; thousands are grouped."""
    assert gib(n_bytes) == shown


def test_digits_can_be_asked_for() -> None:
    """Tables that compare small differences show two."""
    assert gib(16_060_522_496, 2) == "14.96 GiB"
    assert gib(16_060_522_496, 0) == "15 GiB"
    assert gb(1_650_000_000, 1) == "1.6 GB"


def test_host_memory_is_shown_in_decimal_gigabytes() -> None:
    """Servers are sold with 1000 GB as 10^12 bytes: 1118 GB of ZeRO-Offload, no digits."""
    assert gb(1_118_000_000_000) == "1,118 GB"
    assert gb(499_999_999) == "0 GB"
