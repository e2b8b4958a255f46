"""vLLM's division of a card, release by release, against its logs and by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calc.base.ledger import Line
from calc.base.plan import Serving
from calc.base.units import GB, GiB
from calc.catalog.catalog import load
from calc.engines.rollout import STARTING
from calc.engines.vllm import Vllm
from calc.memory import kv_cache

QWEN = load().model("qwen2.5-7b").architecture
LLAMA = load().model("llama-3-8b").architecture
CARD = 79 * GiB
BLOCK = 16 * 57_344  # Qwen2.5 7B
RELEASES = (
    "0.4.2",
    "0.6.3",
    "0.7.2",
    "0.8.5",
    "0.9.0",
    "0.9.1",
    "0.10.2",
    "0.11.0",
    "0.14.0",
    "0.18.0",
    "0.20.0",
    "0.29.0",
)


def engine(version: str, *, utilization: float = 0.6, **changes: Any) -> Vllm:
    """Qwen2.5 7B on an H100, 2,048 tokens a sequence, 256 at once, 8,192 tokens a step; `serving__` for a field."""
    fields = {k.removeprefix("serving__"): changes.pop(k) for k in list(changes) if k.startswith("serving__")}
    usual = {"max_model_len": 2048, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    serving = Serving(version, **usual | fields)
    return replace(Vllm(QWEN, serving, 1, utilization, CARD, "H100 SXM 80GB HBM3"), **changes)


def held(lines: Iterable[Line], *components: str) -> int:
    return sum(line.bytes for line in lines if not components or line.component in components)


def used(e: Vllm) -> int:
    """Weights and the profile run's peak."""
    return held(e.weights()) + held(e.profile())


def test_the_pool_of_vllm_0_6_is_the_one_its_author_logs() -> None:
    """vllm #10511, Llama 3 8B on 79.22 GiB: 71.29 GiB, of it 14.96 weights, 1.79 outside PyTorch, 1.26 the peak; 53.29
    remain for the cache."""
    serving = Serving("0.6.5", 8192)
    e = Vllm(LLAMA, serving, 1, 0.9, int(79.22 * GiB), growth=int(1.79 * GiB))
    assert held(e.weights()) / GiB == pytest.approx(14.96, abs=0.005)
    assert e.cache(0).bytes / GiB == pytest.approx(53.29, abs=0.06)


def test_verls_worker_takes_its_share_of_what_is_free() -> None:
    """verl's log of Qwen2.5 0.5B: 93.74 GB free after the profile run, utilization 0.4, a cache of 37.497 GB."""
    arch = load().model("qwen2.5-0.5b").architecture
    e = Vllm(arch, Serving("0.6.3", 1024, share_of_free=True), 1, 0.4, 102 * GB)
    others = e.total - int(93.74 * GB) - used(e)
    assert e.cache(others).bytes == pytest.approx(37.497 * GB, rel=1e-4)


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("0.4.2", ("growth",)),
        ("0.7.2", ("growth",)),
        ("0.8.5", ("growth", "context", "others")),
        ("0.9.0", ("growth", "context", "others")),
        ("0.9.1", ("growth",)),
        ("0.10.2", ("growth",)),
        ("0.11.0", ()),
        ("0.19.0", ()),
        ("0.20.0", ("graphs",)),
        ("0.29.0", ("graphs",)),
    ],
)
def test_each_generation_takes_other_things_off_its_share(version: str, inside: tuple[str, ...]) -> None:
    """0.6 · 79 GiB, less weights and peak, less what that release finds in its pool."""
    e = engine(version, context=GiB // 2, growth=GiB // 4)
    sizes = {"others": 8 * GiB, "context": GiB // 2, "growth": GiB // 4, "graphs": held(e.asleep())}
    rest = int(0.6 * CARD) - used(e) - sum(sizes[name] for name in inside)
    cache = e.cache(sizes["others"])
    assert cache.blocks == rest // BLOCK
    assert (cache.bytes, cache.tokens, cache.refusal) == (cache.blocks * BLOCK, cache.blocks * 16, None)


@pytest.mark.parametrize(
    ("model", "version", "pooled"),
    [
        ("qwen2.5-7b", "0.24.0", True),
        ("qwen2.5-7b", "0.25.0", False),  # from there on every dense model
        ("llama-3-8b", "0.22.0", True),
        ("llama-3-8b", "0.24.0", False),
        ("qwen3-8b", "0.22.0", False),
        ("qwen3-30b-a3b", "0.28.0", True),
        ("qwen3.5-4b", "0.28.0", True),  # a hybrid
        ("llama-3-8b", "0.29.0", True),
    ],
)
def test_the_second_runners_graphs_come_on_top_of_the_pool_until_it_estimates_them(
    model: str, version: str, pooled: bool
) -> None:
    arch = load().model(model).architecture
    captured, eager = (engine(version, arch=arch, serving__graphs=graphs) for graphs in (True, False))
    assert eager.room(0) - captured.room(0) == (held(captured.asleep()) if pooled else 0)


def test_the_pool_of_vllm_0_24_is_the_one_that_it_logged_on_an_h200() -> None:
    """Llama 3 8B, 0.9 of 139.8 GiB: 125.82 GiB, of them 14.96 weights, 0.22 outside PyTorch, 1.1 the peak; 109.53 are
    left for the cache, beside which the graphs of ten sizes took 0.75. Kernels of 0.2 GiB are not counted.
    """
    serving = Serving("0.24.0", 4096, max_num_seqs=1024, max_num_batched_tokens=8192)
    e = Vllm(LLAMA, serving, 1, 0.9, 150109880320, "NVIDIA H200", growth=241172480)
    assert held(e.weights()) == pytest.approx(16062685184, rel=1e-3)
    assert held(e.profile()) / GiB == pytest.approx(1.10, abs=0.07)
    assert e.cache(0).bytes / GiB == pytest.approx(109.53, abs=0.3)


def test_eager_mode_leaves_a_newer_releases_cache_what_graphs_would_take() -> None:
    """20 MiB for each of 28 layers."""
    with_graphs, eager = engine("0.29.0"), engine("0.29.0", serving__graphs=False)
    assert held(with_graphs.asleep()) == 560 * 2**20
    assert eager.asleep() == []
    assert eager.room(0) - with_graphs.room(0) == 560 * 2**20


def test_only_0_8_and_0_9_0_count_the_trainers_memory() -> None:
    """40 GiB of a trainer: 0.7 does not see it, 0.8 has 14 GiB less than nothing left, 0.9.1 does not start."""
    assert engine("0.7.2").cache(40 * GiB) == engine("0.7.2").cache(0)
    for version in ("0.8.5", "0.9.0"):
        assert "no available memory" in str(engine(version).cache(40 * GiB).refusal)
    refusal = str(engine("0.9.1").cache(40 * GiB).refusal)
    assert refusal == (
        "rollout.gpu_memory_utilization: given 0.6, allowed: less; vLLM finds 39.00 GiB free on startup, less than the"
        " 47.40 GiB it is to use"
    )


def test_from_0_11_nccls_buffers_are_no_longer_free_on_startup() -> None:
    """79 GiB less 31 of others leave 48, enough for 47.4; less another one of NCCL's, too little."""
    assert engine("0.10.2", growth=GiB).cache(31 * GiB).refusal is None
    assert "free on startup" in str(engine("0.11.0", growth=GiB).cache(31 * GiB).refusal)


def test_a_cache_smaller_than_a_sequence_is_refused_in_one_line() -> None:
    """Ten blocks hold 160 tokens of 2,048."""
    e = engine("0.7.2")
    e = replace(e, utilization=(used(e) + 10.5 * BLOCK) / CARD)
    cache = e.cache(0)
    assert (cache.blocks, cache.sequences) == (10, 0)
    assert "max seq len (2048) is larger than the 160 tokens" in str(cache.refusal)
    assert "\n" not in str(cache.refusal)


def test_a_model_larger_than_its_share_has_no_cache() -> None:
    """14.2 GiB of weights fit in a fifth of 79 GiB, in a tenth not: then no bytes, not less than none."""
    assert engine("0.7.2", utilization=0.2).cache(0).refusal is None
    cache = engine("0.7.2", utilization=0.1).cache(0)
    assert (cache.bytes, cache.tokens, cache.sequences) == (0, 0, 0)
    assert "no available memory" in str(cache.refusal)


def test_heads_that_ranks_cannot_share_are_refused() -> None:
    """Phi 3 Medium's ten key/value heads on four ranks; latent attention has none to share."""
    phi, lite = (load().model(m).architecture for m in ("phi-3-medium", "deepseek-v2-lite"))
    refusal = engine("0.7.2", arch=phi, tensor_parallel=4).cache(0).refusal
    assert str(refusal) == "rollout.tensor_parallel: given 4, allowed: a divisor or multiple of 10 key/value heads"
    assert engine("0.7.2", arch=phi, tensor_parallel=20).cache(0).refusal is None
    assert engine("0.29.0", arch=lite, tensor_parallel=3).cache(0).refusal is None


@pytest.mark.parametrize(
    ("version", "card", "total", "expected"),
    [
        ("0.6.3", "H100", 79, (256, 4096)),  # V0: a whole prompt in one step
        ("0.8.5", "A100-SXM4-80GB", 79, (1024, 16384)),
        ("0.9.2", "A100-SXM4-80GB", 79, (256, 8192)),  # vllm #17885
        ("0.9.2", "H100", 79, (1024, 16384)),
        ("0.9.2", "GeForce RTX 4090", 23, (256, 8192)),
        ("0.29.0", "H100", 79, (1024, 16384)),
        ("0.29.0", "A800 80GB", 79, (1024, 16384)),
    ],
)
def test_batches_by_default(version: str, card: str, total: int, expected: tuple[int, int]) -> None:
    """`LLM`'s defaults by release and card."""
    e = Vllm(QWEN, Serving(version, 4096), 1, 0.6, total * GiB, card)
    assert (e.max_num_seqs, e.max_num_batched_tokens) == expected


def test_short_prompts_and_small_steps_bound_each_other() -> None:
    """V0 takes 2,048 tokens at least; 64 sequences of 32 are 2,048 tokens after 0.11; 100 tokens are 100 sequences."""
    assert Vllm(QWEN, Serving("0.7.2", 512), 1, 0.6, CARD).max_num_batched_tokens == 2048
    few = Serving("0.14.0", 32, max_num_seqs=64)
    assert Vllm(QWEN, few, 1, 0.6, CARD).max_num_batched_tokens == 2048
    assert Vllm(QWEN, replace(few, version="0.11.0"), 1, 0.6, CARD).max_num_batched_tokens == 16384
    assert Vllm(QWEN, Serving("0.14.0", 32, max_num_batched_tokens=100), 1, 0.6, CARD).max_num_seqs == 100


def test_sampling_by_triton_needs_a_third_of_sorting() -> None:
    """1,024 rows of 152,064 logits: 38 bytes of each, from 0.18 only 12, beside 8,192 hidden states of 3,584."""
    hidden = 2 * 8192 * 3584
    for version, each in (("0.14.0", 38), ("0.18.0", 12)):
        e = engine(version, serving__max_num_seqs=1024)
        assert held(e.profile()) == each * 1024 * 152_064 + hidden


def test_sequences_at_once_are_those_that_fit_in_full_length() -> None:
    """2,048 tokens are 128 blocks; 2,049 would be 129. Never more than `max_num_seqs`."""
    cache = engine("0.7.2", serving__max_num_seqs=300).cache(0)
    assert 256 < cache.sequences == cache.blocks // 128
    longer = engine("0.7.2", serving__max_num_seqs=300, serving__max_model_len=2049).cache(0)
    assert longer.sequences == longer.blocks // 129
    assert engine("0.7.2", serving__max_num_seqs=3).cache(0).sequences == 3


def test_it_loads_weights_then_tries_then_takes_its_cache() -> None:
    """Each moment holds what the one before it kept; the last one is the engine awake before its first step, whose
    activations the profile run has tried and given back."""
    e = engine("0.9.2")
    ready = held(e.awake(0)) - held(e.profile())
    assert [held(e.starting(at, 0)) for at in STARTING] == [held(e.weights()), used(e), ready]
    assert held(e.profile()) > 0
    assert held(e.awake(0), "kv_cache") == e.cache(0).bytes
    assert {line.role for line in e.awake(0)} == {"rollout"}


def test_sleep_keeps_graphs_and_wakes_in_two_steps() -> None:
    """Asleep only the graphs, then with weights, then with everything."""
    e = engine("0.9.2")
    asleep, weights, awake = held(e.asleep()), held(e.with_weights()), held(e.awake(0))
    assert {line.component for line in e.asleep()} == {"cuda_graphs"}
    assert weights - asleep == held(e.weights())
    assert awake - weights == e.cache(0).bytes + held(e.profile())


def test_host_memory_is_the_sleeping_weights_and_v0s_swap_space() -> None:
    """Level 2 drops the weights; without sleep there is only what V0 always pins."""
    new, old = engine("0.9.2"), engine("0.7.2")
    backup, swap = kv_cache.backup("rollout", QWEN), kv_cache.swap("rollout", QWEN)
    assert (new.host(0), new.host(1), new.host(2)) == ([], [backup], [])
    assert (old.host(0), old.host(1), old.host(2)) == ([swap], [swap, backup], [swap])


versions = st.sampled_from(RELEASES)


@given(versions, st.floats(0.05, 1.0), st.integers(0, 20 * GiB), st.integers(0, GiB))
def test_the_pool_adds_up_to_the_share_of_the_card(version: str, share: float, others: int, growth: int) -> None:
    """Weights, peak and cache, with NCCL's buffers to 0.10 and graphs from 0.20: the share, but for less than a block.
    0.8 and 0.9.0 alone take others off."""
    e = engine(version, utilization=share, growth=growth)
    cache = e.cache(others)
    if cache.blocks == 0 or (0, 8) <= e.release < (0, 9, 1):
        return
    inside = (growth if e.release < (0, 11) else 0) + (held(e.asleep()) if e.release >= (0, 20) else 0)
    assert 0 <= int(share * CARD) - used(e) - inside - cache.bytes < BLOCK


@given(versions, st.lists(st.floats(0.05, 1.0), min_size=2, max_size=5), st.booleans())
def test_more_utilization_never_means_fewer_blocks(version: str, shares: list[float], of_free: bool) -> None:
    """As long as the card is the engine's own."""
    engines = [engine(version, utilization=u, serving__share_of_free=of_free) for u in sorted(shares)]
    for less, more in pairwise(e.cache(0) for e in engines):
        assert less.blocks <= more.blocks
        assert less.sequences <= more.sequences


@given(versions, st.integers(0, 60 * GiB), st.integers(0, 10 * GiB), st.booleans())
def test_more_of_others_never_means_more_blocks(version: str, others: int, more: int, of_free: bool) -> None:
    """And what vLLM refuses it still refuses."""
    e = engine(version, serving__share_of_free=of_free)
    before, after = e.cache(others), e.cache(others + more)
    assert after.blocks <= before.blocks
    assert before.refusal is None or after.refusal is not None


@given(versions, st.floats(0.0, 1.0), st.integers(0, 80 * GiB))
def test_an_engine_that_starts_can_serve_a_sequence(version: str, share: float, others: int) -> None:
    """Either a refusal in one line, or room for one of full length."""
    cache = engine(version, utilization=share).cache(others)
    assert (cache.refusal is None) == (cache.sequences > 0)
    assert cache.bytes >= 0
    assert "\n" not in str(cache.refusal)


def test_the_first_engine_of_a_release_with_two_counts_as_up_to_0_7() -> None:
    """vLLM 0.8.5 with VLLM_USE_V1=0: worker/worker.py, and `_set_default_args_v0`: 256 sequences on any card."""
    first, second = engine("0.8.5", v0=True), engine("0.8.5")
    assert first.room(0) == first.room(10 * GiB) > second.room(10 * GiB)
    own = {"serving__max_num_seqs": None}
    assert engine("0.8.5", v0=True, **own).max_num_seqs == 256
    assert [line.formula for line in first.host(2)] == [line.formula for line in engine("0.7.2").host(2)] != []
    assert second.host(2) == []
