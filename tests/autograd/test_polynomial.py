"""From tapes to numbers: symbols get a model's dimensions, and instants that another one always covers drop out."""

from __future__ import annotations

from typing import Any

import pytest
from formulas import evaluate
from tapes import backward_of, of_kind

from calc.autograd.polynomial import NO_BYTES, Snapshot, amount, peaks
from calc.autograd.tape import Size, Tape, of
from calc.catalog.catalog import load
from calc.memory import activations
from calc.memory.activations import Program
from calc.memory.run import Adapter, Run, dimensions
from calc.models.architecture import Architecture

BF16_LORA = Adapter(64, "all-linear", False, 2)


def arch(model: str) -> Architecture:
    return load().model(model).architecture


def tape(model: str, *, moe: bool = False, first: bool = False, **run: Any) -> Tape:
    """One layer of `model` on a tape; `run` are fields of Run."""
    return Program(Run(arch(model), **run), of_kind(arch(model), moe), first=first).layer()


def test_an_amount_puts_a_models_numbers_into_a_size() -> None:
    """Llama-3-8B: 16·4096 + 8 a token, 6·32 a pair, 2·16,777,216 once, 3·4096 a token of a sequence."""
    size = Size({"h": 16, "": 8, "H·S": 6, "S": 2}, {"W_q_proj": 2, "h·S": 3})
    a = amount(size, dimensions(arch("llama-3-8b")))
    assert (a.tokens, a.pairs, a.fixed, a.row) == (65_544, 194, 33_554_432, 12_288)
    assert a.formula == "T·(16·h + 2·S + 6·H·S + 8) + 2·W_q_proj + 3·h·S"
    assert a.bytes(100, 50) == 100 * 65_544 + 100 * 50 * 194 + 33_554_432 + 50 * 12_288
    values = {**dimensions(arch("llama-3-8b")), "T": 100, "S": 50}
    assert evaluate(a.formula, values) == a.bytes(100, 50)


def test_an_amount_of_nothing_is_zero_and_says_so() -> None:
    """`0` is the formula that leaves a line out."""
    assert amount(Size(), {}) == NO_BYTES
    assert NO_BYTES.bytes(1000, 1000) == 0
    assert NO_BYTES.formula == "0"


def test_an_amount_of_fixed_size_has_no_term_of_tokens() -> None:
    """Autocast's weights do not grow with the micro-batch."""
    a = amount(Size({}, {"W_o_proj": 2}), dimensions(arch("llama-3-8b")))
    assert a.formula == "2·W_o_proj"
    assert a.bytes(1, 1) == a.bytes(99, 9) == 2 * 4096 * 4096


def test_dimensions_name_every_symbol_by_the_models_config() -> None:
    """Read off the config.json of DeepSeek-V3 and Mixtral 8x7B; the dense layers' weights keep their own size."""
    d = dimensions(arch("deepseek-v3"), 16)
    assert (d["h"], d["q"], d["o"], d["H"], d["i"], d["r"]) == (7168, 128 * 192, 128 * 128, 128, 18432, 16)
    assert (d["c_q"], d["c_kv"], d["rope"], d["H·rope"], d["kvb"]) == (1536, 512, 64, 8192, 128 * 256)
    assert (d["E"], d["k"], d["j"], d["k·h"], d["k·j"], d["s"]) == (256, 8, 2048, 57_344, 16_384, 2048)
    assert d["W_down_proj"] == 18432 * 7168
    assert d["W_shared_down_proj"] == 2048 * 7168
    assert d["W_gate"] == 256 * 7168
    assert d["W_lm_head"] == 129_280 * 7168
    assert dimensions(arch("deepseek-v2-lite"))["c_q"] == 0
    m = dimensions(arch("mixtral-8x7b"))
    assert (m["kv"], m["K"], m["D"], m["V"], m["W_score"]) == (1024, 8, 128, 32_000, 4096)


# --- which instants are kept ---


def test_an_instant_that_another_covers_in_every_respect_is_left_out() -> None:
    """b has more of everything than a; c is smaller but has more gradients; d's gradient alone is new."""
    shots = [
        Snapshot("a", of(h=1), of(h=1), 0, 0),
        Snapshot("b", of(h=2), of(h=1), 0, 0),
        Snapshot("c", of(h=1), of(h=1), 7, 0),
        Snapshot("d", of(h=1), of(h=0), 7, 5),
        Snapshot("e", Size({"H·S": 1}), Size(), 0, 0),
        Snapshot("f", Size({}, {"h": 1}), Size(), 0, 0),
        Snapshot("g", Size({}, {"h·S": 1}), Size(), 0, 0),
    ]
    kept = peaks(shots, {"h": 10, "H": 2})
    assert [shot.name for shot in kept] == ["b", "c", "d", "e", "f", "g"]


def test_of_equal_instants_the_first_is_kept() -> None:
    """One name for one number, however many operations reach it."""
    shots = [Snapshot(name, of(h=1), of(q=2), 3, 0) for name in "abc"]
    assert [s.name for s in peaks(shots, {"h": 1, "q": 1})] == ["a"]


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b", "gpt-oss-20b"])
def test_no_instant_that_is_left_out_can_be_the_largest(model: str) -> None:
    """For few and many tokens, short and long: the largest sum of bytes and gradients is among those kept."""
    a = arch(model)
    moe = bool(a.experts)
    made = tape(model, moe=moe, kernel="eager")
    dims = dimensions(a)
    kept = peaks(backward_of(made), dims)
    for tokens, length in ((1, 1), (64, 64), (2048, 128), (8192, 8192)):
        for g, m in ((0, 0), (2, 0), (4, 0), (0, 2), (2, 2)):
            every = max(
                amount(s.saved, dims).bytes(tokens, length)
                + amount(s.passing, dims).bytes(tokens, length) + g * s.gradients + m * s.making
                for s in backward_of(made)
            )  # fmt: skip
            assert every == max(
                s.saved.bytes(tokens, length) + s.passing.bytes(tokens, length) + g * s.gradients + m * s.making
                for s in kept
            )


def test_a_segment_tells_what_it_keeps_and_all_its_instants() -> None:
    """Forward with and without grad and backward come from one tape."""
    run = Run(arch("llama-3-8b"))
    segment = activations.layer(run, of_kind(run.arch, False))
    assert segment.saved.tokens == 200_840
    assert max(s.saved.tokens + s.passing.tokens for s in segment.backward) == 200_840 + 4 * 14336 + 2 * 4096
    assert {s.saved.formula for s in segment.without_grad} == {"0"}
    # without grad the largest is the MLP's product: act(gate), up and the product, 2i each, beside the layer's input,
    # the residual and the norm's output, which callers' variables name until layer and MLP return
    assert max(s.passing.tokens for s in segment.without_grad) == 6 * 14336 + 6 * 4096
