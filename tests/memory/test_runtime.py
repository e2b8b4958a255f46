"""The memory of a process beside its tensors."""

from __future__ import annotations

import pytest

from calc.base.ledger import Line
from calc.base.units import GiB, MiB
from calc.memory import runtime


def test_a_lone_process_has_a_context_and_two_cublas_workspaces() -> None:
    """0.47 GiB; 8,320 KiB twice on an A100 (`CUBLAS_WORKSPACE_CONFIG` :4096:2:16:8), which PyTorch allocates itself."""
    context, workspace = runtime.process("Ampere", 0, nvlink=True)
    assert (context.component, context.bytes, context.allocated) == ("context", int(0.47 * GiB), False)
    assert (workspace.component, workspace.bytes, workspace.allocated) == ("workspace", 2 * 8320 * 1024, True)


@pytest.mark.parametrize("architecture", ["Hopper", "Blackwell"])
def test_workspaces_are_32_mib_from_compute_capability_9_on(architecture: str) -> None:
    """aten/src/ATen/cuda/CublasHandlePool.cpp."""
    (workspace,) = [line for line in runtime.process(architecture, 0, nvlink=True) if line.component == "workspace"]
    assert workspace.bytes == 2 * 32 * MiB


@pytest.mark.parametrize(("nvlink", "channels"), [(False, 2), (True, 24)])
def test_nccl_keeps_three_connections_a_channel(nvlink: bool, channels: int) -> None:
    """4 MiB Simple + 4,915,200 LL128 + 524,288 LL bytes a connection; none on a single GPU; not PyTorch's to count."""
    (nccl,) = [line for line in runtime.process("Ampere", 1, nvlink=nvlink) if line.component == "nccl"]
    assert nccl.bytes == channels * 3 * (4_194_304 + 4_915_200 + 524_288)
    assert not nccl.allocated
    assert all(line.component != "nccl" for line in runtime.process("Ampere", 0, nvlink=nvlink))


def test_a_group_for_data_and_one_for_tensors_have_buffers_each() -> None:
    one, two = (runtime.process("Ampere", n, nvlink=True)[-1] for n in (1, 2))
    assert two.bytes == 2 * one.bytes


def test_roles_in_processes_of_their_own_have_a_context_workspaces_and_buffers_each() -> None:
    """Ray starts an actor a role: three processes take three times what one does."""
    one, three = (runtime.process("Ampere", 1, nvlink=True, processes=n, role="rollout") for n in (1, 3))
    assert [line.component for line in three] == ["context", "workspace", "nccl"]
    assert [line.bytes for line in three] == [3 * line.bytes for line in one]
    assert {line.role for line in three} == {"rollout"}
    assert all(line.bytes == 0 for line in runtime.process("Ampere", 1, nvlink=True, processes=0))


def test_what_is_held_back_is_a_share_of_all_that_pytorch_hands_out() -> None:
    """The median of the messages; an engine takes its pool at once, and the context is not PyTorch's."""
    lines = [Line(component, "actor", 10**6, "b", {}, "x") for component in ("weights", "activations")]
    lines += [Line("kv_cache", "rollout", 10**9, "b", {}, "x"), Line("context", "process", 10**9, "b", {}, "x", False)]
    held = runtime.fragmentation(lines)
    assert held.values == {"f": runtime.FRAGMENTATION[20], "B": 2 * 10**6}
    assert held.bytes == int(2 * 10**6 * runtime.FRAGMENTATION[20])
    assert not held.allocated


def test_what_a_replay_has_reserved_beyond_the_tensors_is_held_back() -> None:
    """10,000 bytes reserved for 3,000 that lines of PyTorch's own have: the context is none of them."""
    lines = [Line(component, "actor", 1500, "b", {}, "x") for component in ("weights", "activations")]
    lines.append(Line("context", "process", 10**6, "b", {}, "x", False))
    held = runtime.replayed(lines, 10_000, 9000)
    assert (held.component, held.bytes) == ("fragmentation", 7000)
    assert held.values == {"R": 10_000, "A": 3000, "least": 9000}
    assert not held.allocated


def test_every_role_but_the_engine_fragments() -> None:
    """Whatever the role's name, before or after the engine's in the alphabet, and however its text was made."""
    lines = [Line("weights", role, 1, "b", {}, "x") for role in ("actor", "reward", "stage 2", "rollout")]
    assert runtime.fragmenting(lines) == 3
    assert runtime.fragmenting([Line("kv_cache", "".join(("roll", "out")), 5, "b", {}, "x")]) == 0


def test_an_all_to_all_connects_each_pair_of_gpus_of_a_node() -> None:
    """3.28 GB on eight GPUs, as measured, whichever collectives come besides; over PCIe nothing is counted."""

    def taken(peers: int, *, nvlink: bool = True) -> int:
        return sum(x.bytes for x in runtime.process("Hopper", 1, nvlink, peers=peers) if x.component == "nccl")

    assert taken(7) - taken(0) == pytest.approx(3.28e9, rel=1e-8)
    assert taken(7, nvlink=False) == taken(0, nvlink=False)


def test_a_communicator_may_take_as_much_as_was_reported() -> None:
    """Two of them, 2 GB each; nothing is added to a context, or to connections that were measured."""
    lines = runtime.process("Hopper", 2, nvlink=True, peers=7)
    channels = sum(x.bytes for x in lines if "channels" in x.values)
    assert channels + runtime.beyond(lines) == pytest.approx(2 * 2e9, rel=1e-8)
    assert runtime.beyond(runtime.process("Hopper", 0, nvlink=False)) == 0


def test_cached_blocks_are_a_share_of_what_differs_from_batch_to_batch() -> None:
    """Weights and gradients have one size for ever; 3.65, 0.25 or 0.31 of the rest."""
    lines = [Line(c, "actor", 1000, "1000", {}, "x#y") for c in ("weights", "gradients", "logits", "activations")]
    assert runtime.cached(lines, "lengths vary") == 7300
    assert runtime.cached(lines, "one length") == 500
    assert runtime.cached(lines, "one segment") == 620


def test_rccl_takes_more_for_a_process_s_first_communicator() -> None:
    """LUMI-AI-Guide issue 111, measured on MI250X: about 1 GiB, and 0.65 GiB for each one more."""

    def taken(communicators: int) -> int:
        return sum(x.bytes for x in runtime.process("CDNA 2", communicators, nvlink=True) if x.component == "nccl")

    assert taken(0) == 0
    assert taken(1) == pytest.approx(GiB, rel=0.01)
    assert taken(3) - taken(1) == pytest.approx(1.3 * GiB, rel=0.01)
