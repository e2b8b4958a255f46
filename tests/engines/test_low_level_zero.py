"""ColossalAI's ZeRO 1 and 2, worked by hand for Llama 2 7B: P = 6,738,415,616, V·h = 131,072,000.

The rules are those of ColossalAI 4f9953be3, `zero/low_level/low_level_optim.py` and `bookkeeping/`.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import engine_of

from calc.base.ledger import Line, total
from calc.engines.low_level_zero import LowLevelZero, cuts, fills
from calc.engines.replica import Where
from calc.estimate.estimate import estimate
from calc.models.architecture import Tensor
from calc.resolve.parse import parse

P, VH, GATE, QKV = 6_738_415_616, 131_072_000, 45_088_768, 16_777_216
CHAT = {
    "model": "llama-2-7b", "task": "sft", "trainer": "colossalai", "gpu": "h800", "gpus": 2, "micro_batch": 4,
    "checkpointing": "full", "attention": "flash", "seq_len": 2048,
    "versions": {"transformers": "4.39", "torch": "2.1"},
}  # fmt: skip


def engine(**fields: object) -> LowLevelZero:
    found = engine_of(parse({**CHAT, **fields}))
    assert isinstance(found, LowLevelZero)
    return found


def by_component(lines: list[Line]) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in lines:
        found[line.component] = found.get(line.component, 0) + line.bytes
    return found


def test_rows_beside_an_embedding_wait_with_others_and_are_copied_in_their_order() -> None:
    """Rank 8 beside q, embedding and head of Llama 2 7B: 32 · 8 · 8,192 and twice 8 · 36,096 elements fit one bucket.

    While the rows', 8 · 32,000, are made all other gradients are in it, and their copy is beside them.
    """
    lora = {"rank": 8, "targets": ["q_proj", "embed_tokens", "lm_head"]}
    e, rows, trained = engine(method="lora", lora=lora), 8 * 32_000, 32 * 8 * 8192 + 2 * 8 * 36_096
    names = [t.name.partition(".")[0] for t in e.replica.trained_tensors]
    assert names[0] == names[1] == "embed_tokens" and names[-1] == names[-2] == "lm_head"
    assert (e.cut.last, sum(t.elements * t.count for t in e.replica.trained_tensors)) == (trained, trained)
    head, layers = 8 * 36_096, 32 * 8 * 8192
    lines = e.at(Where("end", 0, True, head, layers, 8 * 36_096, rows, relaid=True))
    assert total(lines) == 2 * (trained + rows)


def test_a_bucket_leaves_before_the_gradient_that_does_not_fit() -> None:
    """5 + 30, then 30 alone, then 100, which is larger than the bucket, alone; 40 + 24 fill it to the brim."""
    assert fills([5, 30, 30, 100], 64) == [35, 30, 100]
    assert fills([40, 24, 1], 64) == [64, 1]
    assert fills([], 64) == [0]


def test_parameters_are_cut_one_by_one() -> None:
    """Elements of 7, 10 and 3 over two ranks: 4 + 5 + 2; a bucket of 12 has 3, then 10, and the first one last."""
    tensors = tuple(Tensor(name, (size,), 1, "linear", "mlp") for name, size in (("a", 7), ("b", 10), ("c", 3)))
    assert cuts(tensors, 2, 12) == (11, 5, 10, 7, 11)
    assert cuts((), 2, 12) == (0, 0, 0, 0, 0)


def test_llama_2_7b_over_two_ranks() -> None:
    """Every matrix is larger than 12 Mi elements, so that each waits alone; norms, of 65 · h in all, share a bucket."""
    c = engine().cut
    assert (c.share, c.part, c.waiting, c.last) == (P // 2, VH // 2, VH, VH)
    # parts of q, k, v and o are 8 Mi elements, and gathered with those of norms of 2048
    assert QKV // 2 < c.gathered <= 12 << 20


def test_a_rank_keeps_its_part_of_what_has_left_the_bucket() -> None:
    """In a layer whose up_proj is made while gate_proj's gradient waits; the sum over ranks is a tensor of its own."""
    own = engine()
    lines = own.at(Where("layer", 5, True, root=VH + 4096, above=1_000_000_000, here=GATE, making=GATE))
    done, waits = VH + 4096 + 1_000_000_000 + GATE, VH
    assert by_component(lines) == {
        "gradients": 2 * (done - waits) // 2,
        "temporary": 2 * (GATE + waits),
        "communication": 2 * (waits + waits // 2),
    }
    whole = engine(sharding="zero1").at(Where("layer", 5, True, root=VH, above=1_000_000_000, here=GATE, making=GATE))
    assert by_component(whole)["gradients"] == 2 * (1_000_000_000 + GATE)


def test_the_embeddings_gradient_leaves_alone_at_the_end() -> None:
    """V·h in .grad, its flat copy, and a half of it for the rank, beside the halves of all others."""
    lines = engine().at(Where("reduce", 0, True, VH + 4096, P - 2 * VH - 4096, VH))
    assert by_component(lines) == {"gradients": P - VH, "temporary": 2 * VH, "communication": 3 * VH}


def test_the_step_has_gradients_in_both_types_and_the_norm_of_the_largest_part_in_fp64() -> None:
    """2P/2 in bf16, 4P/2 in fp32, 8 · V·h/2; masters and moments are 12P/2."""
    own = engine()
    at, lines = max(own.stepping(), key=lambda moment: total(moment[1]))
    assert at == "gradient norm"
    assert total(lines) == 3 * P + 4 * VH
    assert total(own.states()) == 6 * P


def test_an_optimizer_on_the_host_takes_each_part_as_it_is_made() -> None:
    """No state is on the GPU; bf16 parts stay until zero_grad, and the norm is taken of them there."""
    own = engine(offload={"optimizer": True})
    assert own.states() == []
    assert [total(lines) for _, lines in own.stepping()][:2] == [P + 4 * (VH // 2), P + 8 * (VH // 2)]
    *_, (_, held) = own.on_rank()
    # 4 of masters, 4 of gradients and 8 of moments a parameter of a half of all
    assert total(held) == 16 * P // 2


@pytest.mark.parametrize(
    ("fields", "row"),
    [
        ({}, 72390.95), ({"offload": {"optimizer": True}}, 22457.98),
        ({"gpus": 4, "micro_batch": 16}, 58082.30),
        ({"task": "simpo"}, 73375.04), ({"task": "simpo", "gpus": 4, "micro_batch": 8}, 56086.12),
        ({"task": "dpo", "micro_batch": 2, "offload": {"optimizer": True}}, 36989.37),
    ],
)  # fmt: skip
def test_colossalchats_table_is_met(fields: dict[str, object], row: float) -> None:
    """Its rows of max_memory_allocated in MiB; `applications/ColossalChat/examples/README.md`, on H800."""
    e = estimate(parse({**CHAT, **fields}))
    assert max(p.moment.allocated_bytes for p in e.groups[0].phases) / 2**20 == pytest.approx(row, rel=0.025)


@given(st.integers(1, 64), st.integers(1, 1 << 24))
def test_more_ranks_never_have_more(ranks: int, bucket: int) -> None:
    tensors = engine().replica.trained_tensors
    fewer, more = cuts(tensors, ranks, bucket), cuts(tensors, ranks + 1, bucket)
    assert more.share <= fewer.share + len(tensors) * 32
    assert more.part <= fewer.part
