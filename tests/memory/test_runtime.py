"""What a process takes beside its tensors, and how likely an estimate fits."""

from __future__ import annotations

from math import erf, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calc.ledger import Line
from calc.memory import runtime
from calc.units import GiB, MiB

SIZES = st.integers(0, 10**12)


def test_a_lone_process_has_a_context_and_two_cublas_workspaces() -> None:
    """0.47 GiB; 8,320 KiB twice on an A100 (`CUBLAS_WORKSPACE_CONFIG` :4096:2:16:8), which PyTorch allocates itself."""
    context, workspace = runtime.process("Ampere", 1, nvlink=True)
    assert (context.component, context.bytes, context.allocated) == ("context", int(0.47 * GiB), False)
    assert (workspace.component, workspace.bytes, workspace.allocated) == ("workspace", 2 * 8320 * 1024, True)


@pytest.mark.parametrize("architecture", ["Hopper", "Blackwell"])
def test_workspaces_are_32_mib_from_compute_capability_9_on(architecture: str) -> None:
    """aten/src/ATen/cuda/CublasHandlePool.cpp."""
    (workspace,) = [line for line in runtime.process(architecture, 1, nvlink=True) if line.component == "workspace"]
    assert workspace.bytes == 2 * 32 * MiB


@pytest.mark.parametrize(("nvlink", "channels"), [(False, 2), (True, 24)])
def test_nccl_keeps_three_connections_a_channel(nvlink: bool, channels: int) -> None:
    """4 MiB Simple + 4,915,200 LL128 + 524,288 LL bytes a connection; none on a single GPU; not PyTorch's to count."""
    (nccl,) = [line for line in runtime.process("Ampere", 8, nvlink=nvlink) if line.component == "nccl"]
    assert nccl.bytes == channels * 3 * (4_194_304 + 4_915_200 + 524_288)
    assert not nccl.allocated
    assert all(line.component != "nccl" for line in runtime.process("Ampere", 1, nvlink=nvlink))


def test_roles_in_processes_of_their_own_have_a_context_workspaces_and_buffers_each() -> None:
    """Ray starts an actor a role: three processes take three times what one does."""
    one, three = (runtime.process("Ampere", 8, nvlink=True, processes=n, role="rollout") for n in (1, 3))
    assert [line.component for line in three] == ["context", "workspace", "nccl"]
    assert [line.bytes for line in three] == [3 * line.bytes for line in one]
    assert {line.role for line in three} == {"rollout"}
    assert all(line.bytes == 0 for line in runtime.process("Ampere", 1, nvlink=True, processes=0))


def test_fragmentation_is_a_share_of_what_comes_and_goes() -> None:
    """5 % of activations and the like; weights and states are allocated once and leave no holes."""
    lines = [Line(component, "actor", 1000, "1000", {}, "x") for component in ("weights", "optimizer_states")]
    assert runtime.fragmentation(lines).bytes == 0
    lines += [Line(component, "actor", 1000, "1000", {}, "x") for component in ("activations", "communication")]
    held = runtime.fragmentation(lines)
    assert held.bytes == 100
    assert not held.allocated


def test_independent_deviations_add_in_squares() -> None:
    """1 % of 40 GiB, 0.15 GiB of context, 0.3 GiB held back: √(0.4² + 0.15² + 0.3²) = 0.522 GiB."""
    assert runtime.spread(40 * GiB, int(0.3 * GiB)) / GiB == pytest.approx(0.52202, abs=1e-4)


def test_a_job_as_large_as_the_card_fits_every_second_time() -> None:
    """The middle of a normal distribution, whatever its width."""
    assert runtime.fit_probability(70 * GiB, 0.5 * GiB, 70 * GiB) == 0.5
    assert runtime.fit_probability(70 * GiB, 5.0 * GiB, 70 * GiB) == 0.5


@given(SIZES, SIZES, st.integers(1, 10**11), SIZES)
def test_more_memory_needed_never_fits_better(one: int, other: int, deviation: int, usable: int) -> None:
    """Monotone in both: needing more is never likelier to fit, having more never less likely."""
    low, high = sorted((one, other))
    assert runtime.fit_probability(low, deviation, usable) >= runtime.fit_probability(high, deviation, usable)
    assert runtime.fit_probability(usable, deviation, low) <= runtime.fit_probability(usable, deviation, high)
    assert 0 <= runtime.fit_probability(one, deviation, usable) <= 1


def test_cached_blocks_are_a_share_of_what_differs_from_batch_to_batch() -> None:
    """Weights and gradients have one size for ever; 3.6 and 0.25 of the rest."""
    lines = [Line(c, "actor", 1000, "1000", {}, "x#y") for c in ("weights", "gradients", "logits", "activations")]
    assert runtime.cached(lines, lengths_vary=True) == 7200
    assert runtime.cached(lines, lengths_vary=False) == 500


def test_the_printed_range_holds_the_middle_nine_tenths() -> None:
    """A normal distribution has 0.9 within 1.645 deviations, so 0.05 and 0.95 at the range's ends."""
    assert erf(runtime.RANGE / sqrt(2)) == pytest.approx(0.9, abs=2e-4)
    peak, deviation = 60 * GiB, GiB
    margin = int(runtime.RANGE * deviation)
    assert runtime.fit_probability(peak, deviation, peak + margin) == pytest.approx(0.95, abs=1e-4)
    assert runtime.fit_probability(peak, deviation, peak - margin) == pytest.approx(0.05, abs=1e-4)
