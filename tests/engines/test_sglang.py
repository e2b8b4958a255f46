"""SGLang's division of a card: weights and cache out of what was free, all else beside."""

from __future__ import annotations

from calc.base.ledger import total
from calc.base.plan import Serving
from calc.base.units import GiB
from calc.catalog.catalog import load
from calc.engines.rollout import STARTING
from calc.engines.sglang import KEPT, LARGEST, Sglang
from calc.engines.vllm import Vllm
from calc.models.architecture import Architecture

QWEN = load().models["qwen2.5-7b"].architecture  # 28 layers, 4 key/value heads of 128
WEIGHTS = 2 * 7_615_616_512  # its vocabulary is a multiple of 64


def engine(static: float = 0.7, *, total: int = 80 * GiB, around: int = 2 * GiB, ranks: int = 1) -> Sglang:
    return Sglang(QWEN, Serving("0.5.15", 4096), ranks, static, total, around)


def test_cache_is_the_share_of_what_was_free_less_the_weights() -> None:
    """By hand: 0.7 of 80 - 2 - 8 GiB, less the weights, in tokens of 2·28·4·128 numbers of two bytes."""
    room = int(70 * GiB * 0.7) - WEIGHTS
    cache = engine().cache(others=8 * GiB)
    assert engine().room(8 * GiB) == room
    assert cache.tokens == room // 57_344 and cache.bytes == cache.tokens * 57_344
    assert cache.sequences == min(2048, cache.tokens // 4096) and cache.refusal is None


def test_what_steps_and_graphs_take_is_beside_the_share() -> None:
    """vLLM keeps the same free within its share, and has the smaller cache for it."""
    own = engine()
    vllm = Vllm(QWEN, Serving("0.29.0", 4096), 1, 0.7, 80 * GiB, context=2 * GiB)
    assert own.cache(0).bytes > vllm.cache(0).bytes
    assert total(own.awake(0)) > int(78 * GiB * 0.7) + total(own.graphs())


def test_asleep_it_keeps_what_no_allocator_of_it_holds() -> None:
    """Weights, cache and graphs leave; nothing of them is on the host."""
    lines = engine().asleep()
    assert total(lines) == KEPT and not any(line.allocated for line in lines)
    assert engine().host(1) == engine().host(2) == []
    assert total(engine().with_weights()) == WEIGHTS + KEPT


def test_it_starts_without_a_profile_run() -> None:
    weights, profile, allocated = (total(engine().starting(moment, 0)) for moment in STARTING)
    assert weights == profile == WEIGHTS
    assert allocated == total(engine().awake(0)) - total(engine().working())


def test_a_share_that_its_weights_fill_is_refused_in_its_name() -> None:
    refusal = engine(static=0.15).cache(0).refusal
    assert refusal and refusal.verdict == "SGLang does not start"
    assert refusal.refusal.field == "rollout.gpu_memory_utilization"
    assert engine(ranks=3).cache(0).refusal is not None


def test_larger_cards_take_longer_prefills() -> None:
    """`_handle_gpu_memory_settings`: 2,048 tokens below 35 GiB, 4,096 below 60, 8,192 below 160."""
    taken = [engine(total=size * GiB).chunk for size in (24, 40, 80, 141, 180)]
    assert taken == [2048, 4096, 8192, 8192, LARGEST]


def test_more_ranks_never_need_more_of_each() -> None:
    one, two = engine(), engine(ranks=2)
    assert total(two.weights()) < total(one.weights()) and two.cache(0).tokens > one.cache(0).tokens
    assert isinstance(two.arch, Architecture)
