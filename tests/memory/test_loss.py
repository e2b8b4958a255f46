from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from formulas import form, terms
from tapes import backward_of, forward_of, without_grad_of

from calc.autograd.polynomial import Amount, Shot, Snapshot
from calc.autograd.tape import Op, Tape
from calc.base.plan import Path
from calc.catalog.catalog import load
from calc.frameworks.openrlhf.openrlhf import loss_path
from calc.memory.loss import Head, head, sliced, written
from calc.memory.run import Adapter, Run
from calc.models.lora import lora_parameters
from calc.models.slices import part

LLAMA = load().model("llama-3-8b").architecture
GEMMA = load().model("gemma-2-9b").architecture
ELEMENTS = 128_256 * 4096  # of Llama 3's head


def tape(path: Path, arch: Any = LLAMA, *, grad: bool = True, **run: Any) -> Tape:
    program = Head(Run(arch, **run))
    program.elements = {"lm_head": arch.vocab * arch.hidden, "score": arch.hidden}
    program.grad = grad
    return program.write(path)


def logits(shots: list[Snapshot]) -> dict[str, float]:
    """Bytes for each token and vocabulary entry, saved and in passing: the most at instants of each name."""
    found: dict[str, float] = {}
    for s in shots:
        found[s.name] = max(found.get(s.name, 0.0), (s.saved + s.passing).tokens.get("V", 0))
    return found


def peaks(path: Path, **run: Any) -> tuple[float, float, float, float]:
    """Bytes for each token and vocabulary entry: forward's peak, kept, backward's peak, forward's without grad."""
    made = tape(path, **run)
    alone = tape(path, grad=False, **run)
    return (
        max(logits(forward_of(made)).values()),
        made.saved().tokens.get("V", 0),
        max(logits(backward_of(made)).values()),
        max(logits(without_grad_of(alone)).values()),
    )


def test_ms_swifts_chunks_take_a_log_softmax_and_two_gradients_beside_all_logits() -> None:
    """Of 2,048 tokens of bf16 logits, over which gradients are written: 2 bytes, then 6, for each entry.

    ms-swift 4.6.0 sequence_parallel/utils.py, `ChunkedCrossEntropyLoss`.
    """
    made = tape(Path("flash", in_place=True, tile=2048))
    op = next(op for op in made.ops if op.name == "cross entropy")
    assert (op.scratch.fixed, op.backward_scratch.fixed) == ({"V": 2048 * 2}, {"V": 2048 * 6})
    assert made.saved().tokens == tape(Path("flash", in_place=True)).saved().tokens


# --- bytes for each token and vocabulary entry ---


@pytest.mark.parametrize(
    ("path", "forward", "kept", "backward", "without_grad"),
    [
        # logits 2, fp32 copy 4, log-softmax 4; log-softmax 4; log-softmax, nll's and its own gradient, 4 each
        (Path("cross-entropy"), 10, 4, 12, 10),
        # Transformers to 4.48 copies the fp32 logits once more to shift them, and names both: 2 + 4 + 4 + 4
        (Path("cross-entropy", shift_copy=True), 14, 4, 12, 14),
        # to 4.45 the model itself returned fp32 logits, which stay as its output: 4 + 4 + 4
        (Path("cross-entropy", head_fp32=True, shift_copy=True), 12, 4, 12, 12),
        (Path("cross-entropy", head_fp32=True), 8, 4, 12, 8),
        # logits in their own type 2, shifted 2, log-softmax 2; log-softmax and two gradients
        (Path("cross-entropy", uncast=True), 4, 2, 6, 4),
        (Path("cross-entropy", uncast=True, shift_copy=True), 6, 2, 6, 6),
        # log_softmax(logits.float()) with the 16-bit logits still there
        (Path("log-softmax", upcast=True), 10, 4, 12, 10),
        (Path("log-softmax", head_fp32=True), 8, 4, 12, 8),
        (Path("log-softmax", head_fp32=True, shift_copy=True), 12, 4, 12, 12),
        # a log-softmax in bf16: twice 2; with both gradients 6
        (Path("log-softmax"), 4, 2, 6, 4),
        (Path("log-softmax", shift_copy=True), 6, 2, 6, 6),
        # row by row: logits and every row's log-softmax; the gradients of all rows and their stack; nothing kept
        # without grad but the logits, and one row that does not grow with the batch
        (Path("selective"), 4, 2, 4, 2),
        # logits 2 and their exponentials 2; logits 2, gather's gradient... grad·exp(x - result): three of 2 in all
        (Path("logsumexp"), 4, 2, 8, 4),
        (Path("logsumexp", head_fp32=True), 8, 4, 16, 8),
        # gradients of all rows 4 and their stack 4 beside the logits
        (Path("rows", head_fp32=True), 6, 4, 12, 6),
        # the kernel keeps the logits and writes one gradient
        (Path("flash", head_fp32=True), 6, 4, 8, 6),
        (Path("flash", head_fp32=True, shift_copy=True), 8, 4, 8, 8),
        # an eighth of the tokens at a time: 2 + 4 + 4, and 4 + 4 + 4 backward
        (Path("chunked"), 10 / 8, 0, 12 / 8, 10 / 8),
        # all logits 2, an eighth cast 4, all log-softmax 4; then log-softmax, and of an eighth 4 + 4 and 2
        (Path("chunked-logits"), 6.5, 4, 5.25, 2.5),
        # an eighth: 2 + 4 + 4; its log-softmax 4, two gradients 8 and the logits, which a variable names, 2
        (Path("ahead", summed=4), 10 / 8, 0, 14 / 8, 10 / 8),
        # compiled: an eighth's logits 2, then their gradient 2 beside them
        (Path("ahead", summed=4, compiled=True), 2 / 8, 0, 4 / 8, 2 / 8),
        # logits 2 and, once the loss is there, their fp32 copy; logits and an eighth's gradients 2, then both 2 joined
        (Path("chunked-views", outputs_fp32=True), 6, 2, 4, 6),
        (Path("chunked-views"), 2, 2, 4, 2),
        (Path("fused"), 0, 0, 0, 0),
        (Path("cut"), 0, 0, 0, 0),
        (Path("scalar"), 0, 0, 0, 0),
    ],
)  # fmt: skip
def test_logits_cost_these_bytes_by_the_way_to_the_loss(
    path: Path, forward: float, kept: float, backward: float, without_grad: float
) -> None:
    """Protects every program's vocabulary-wide tensors: traced for the first four kinds, the rest counted by hand.

    `nll_loss` and `_log_softmax` backward each write a new tensor (torch LossNLL.cpp, SoftMax.cu).
    """
    assert peaks(path) == (forward, kept, backward, without_grad)


def test_autocast_takes_a_cross_entropy_in_fp32_whatever_its_logits_are() -> None:
    """Logits 2, shifted 2, their fp32 cast 4 and log-softmax 4; only the last is kept."""
    path = Path("cross-entropy", uncast=True, shift_copy=True)
    assert peaks(path, precision="autocast") == (12, 4, 12, 12)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({"arch": GEMMA}, (12, 6, 14, 10)),  # the soft-cap's tanh, 2, stays until its own backward
        ({"precision": "autocast"}, (10, 4, 12, 10)),  # bf16 logits from a bf16 multiplication
        ({"precision": "fp32"}, (8, 4, 12, 8)),  # no cast: logits 4, log-softmax 4
        ({"trained": False}, (10, 4, 12, 10)),  # a frozen head's logits cost the same
    ],
)
def test_the_cross_entropy_of_other_models_and_number_formats(run: dict[str, Any], expected: tuple[float, ...]) -> None:
    """Traced: 12 under every format, 14 for Gemma 2."""
    assert peaks(Path("cross-entropy"), **run) == expected


def test_a_loss_that_caps_the_logits_as_it_reads_them_leaves_no_tanh() -> None:
    """bf16 logits, over which the kernel writes their gradient: Unsloth's, on a model whose head caps."""
    capped, plain = (Path("flash", in_place=True, caps=caps) for caps in (True, False))
    assert peaks(capped, arch=GEMMA) == peaks(capped) == (2, 2, 2, 2)
    assert peaks(plain, arch=GEMMA)[1] == 4


@pytest.mark.parametrize(
    ("path", "backward", "held"),
    [
        (Path("cross-entropy", held="backward"), 14, 2),  # bf16 outputs stay referenced: 12 + 2
        (Path("cross-entropy", head_fp32=True, held="backward"), 16, 4),  # fp32 outputs: 12 + 4
        (Path("cross-entropy", upcast=True, held="backward"), 16, 4),  # accelerate's fp32 copies of the outputs
        (Path("flash", head_fp32=True, held="backward"), 10, 4),  # 4 kept either way; cast 4 + 2 beside it at the end
    ],
)
def test_outputs_that_the_caller_references_live_through_the_whole_backward(
    path: Path, backward: float, held: float
) -> None:
    """Protects `held`: the model's outputs beside everything, down to the last layer's backward."""
    assert peaks(path)[2] == backward
    assert head(Run(LLAMA), path)[1].tokens == held * 128_256
    assert all(s.saved.tokens.get("V", 0) >= held for s in backward_of(tape(path)))


@pytest.mark.parametrize("held", ["backward", "step", "next"])
def test_the_head_counts_outputs_alike_however_long_they_live(held: str) -> None:
    """How much longer than the backward they stay is the phases' to say."""
    path = Path("flash", head_fp32=True, held=held)
    assert peaks(path) == peaks(Path("flash", head_fp32=True, held="backward"))
    assert head(Run(LLAMA), path)[1].tokens == 4 * 128_256


def test_outputs_that_nobody_references_are_gone_after_the_head() -> None:
    """`held` is nothing, so that no layer's backward counts logits."""
    assert head(Run(LLAMA), Path("cross-entropy"))[1] == Amount(0, 0, 0, 0, 0, "0")


CROSS_ENTROPY_FORWARD = {"lm_head": 2, "logits: to fp32": 6, "log-softmax": 10, "nll": 10}
CROSS_ENTROPY_BACKWARD = {"nll": 8, "log-softmax": 12, "logits: to fp32": 6, "lm_head": 2}


def test_every_instant_of_the_cross_entropy() -> None:
    """nll makes its gradient beside the kept log-softmax, 4 + 4; the cast's is 2 from 4."""
    made = tape(Path("cross-entropy"))
    assert logits(forward_of(made)) == CROSS_ENTROPY_FORWARD
    assert logits(backward_of(made)) == CROSS_ENTROPY_BACKWARD


def test_soft_capped_logits_are_divided_and_multiplied_by_new_tensors() -> None:
    """Gemma 2: each of the three operations makes 2; forward and backward two at a time, tanh's own kept."""
    made = tape(Path("cross-entropy"), GEMMA)
    assert list(logits(forward_of(made)).items())[:4] == [
        ("lm_head", 2), ("logits: over cap", 4), ("logits: tanh", 4), ("logits: times cap", 4),
    ]  # fmt: skip
    assert list(logits(backward_of(made)).items())[2:] == [
        ("logits: to fp32", 8), ("logits: times cap", 6), ("logits: tanh", 6), ("logits: over cap", 4), ("lm_head", 2),
    ]  # fmt: skip


def test_logsumexp_and_gather_each_make_a_gradient_of_all_logits() -> None:
    """grad·exp(x - result) holds two temporaries beside its result; then gather's own beside the sum.

    Traced: gather saves the logits too, which go after its zeros are made.
    """
    made = tape(Path("logsumexp"))
    assert terms(made.saved()) == form("2h + 2V + 2")  # the logits and their logsumexp
    assert logits(forward_of(made)) == {"lm_head": 2, "gather": 2, "logsumexp": 4, "log-probability": 2}
    assert logits(backward_of(made)) == {"log-probability": 2, "logsumexp": 8, "gather": 6, "lm_head": 2}


def test_selective_log_softmax_holds_one_row_more_at_a_time() -> None:
    """A row of S tokens: its two gradients backward, 4, its log-softmax without grad, 2; bf16."""
    row = {s.name: s.passing.fixed for s in backward_of(tape(Path("selective")))}
    assert row["log-softmax"] == {"V·S": 4}
    alone = {s.name: s.passing.fixed for s in without_grad_of(tape(Path("selective"), grad=False))}
    assert alone["log-softmax"] == {"V·S": 2}


def test_halves_of_the_rows_have_their_log_probabilities_one_after_the_other() -> None:
    """fp32 logits of 4, and both halves' log-softmax of 2 each.

    Forward copies the second half's slice: 4 + 2 + 2 + 2. Backward, with the logits still named: the first half's
    gradient of all logits, 4, beside the other's log-softmax and its two gradients, 2 each: 4 + 4 + 2 + 2 + 2.
    Scoring lets go of a half's log-softmax before the next, so that the largest instant is the cast of the logits or
    that of a half: 2 + 4 or 4 + 2 + 2.
    """
    path = Path("log-softmax", head_fp32=True, halves=True, outside=True, held="next")
    assert peaks(path) == (10, 8, 14, 8)


def test_a_likelihood_of_half_the_rows_beside_log_probabilities() -> None:
    """ORPO on fp32 logits, 4 for each of T x V: half copied, 2, and its log-softmax, 2, which stays; the logits stay.

    Backward: the log-probabilities' gradients of rows and their stack, 4 + 4, come first, then zeros of all positions,
    4, then the half's own: of its softmax, 2, its shift shares that, two slices make zeros of 2 and of 4.
    """
    path = Path("rows", head_fp32=True, kept=0.999, nll=0.5, shift_copy=True)
    made = tape(path)
    forward, backward = logits(forward_of(made)), logits(backward_of(made))
    assert forward["nll: shift"] == 4 + 2
    assert forward["nll: log-softmax"] == 4 + 2 + 2
    assert made.saved().tokens["V"] == 4 + 2
    assert backward["nll: log-softmax"] == pytest.approx(2 + 4 + 2 + 2)
    assert backward["nll: rows"] == 4 + 2 + 4
    assert "nll: shift" not in logits(forward_of(tape(replace(path, shift_copy=False))))


def test_metrics_take_copies_once_the_loss_is_there() -> None:
    """trl 0.15.2 `trainer/sft_trainer.py`, `compute_loss`: bf16 logits cast by Accelerate, 4, and a copy without the
    last position, 4, beside the log-softmax, 4. The loss has returned by then, and its fp32 cast is gone.
    """
    path = Path("cross-entropy", metrics=4, outputs_fp32=True)
    made = tape(path)
    forward = logits(forward_of(made))
    assert forward["log-softmax"] == 2 + 4 + 4
    assert forward["outputs: to fp32"] == 2 + 4 + 4
    assert forward["metrics"] == 4 + 4 + 4
    plain = logits(backward_of(tape(Path("cross-entropy"))))
    assert {name: size for name, size in logits(backward_of(made)).items() if name != "loss"} == plain


def test_positions_that_are_not_scored_have_no_logits_where_the_head_is_told() -> None:
    """`logits_to_keep` (transformers `modeling_llama.py`): half of the logits, and no zeros of all in backward."""
    picked, cut = (tape(Path("rows", kept=0.5, picked=told)) for told in (True, False))
    assert logits(forward_of(picked))["lm_head"] == 1
    assert logits(forward_of(cut))["lm_head"] == 2
    assert logits(backward_of(picked)) == {"logsumexp of rows": 1 + 1 + 1, "lm_head": 1, "hidden states: slice": 0}
    # the rows' gradients and their stack, each of half the positions, then zeros of all
    assert logits(backward_of(cut)) == {"logsumexp of rows": 2 + 1 + 1, "logits: slice": 1 + 2, "lm_head": 2}


def test_a_contiguous_copy_is_kept_in_place_of_the_outputs() -> None:
    """trl 0.29 `trainer/dpo_trainer.py`: `outputs.logits[..., :-1, :].contiguous()`, of which each row is read."""
    made = tape(Path("rows", head_fp32=True, kept=0.5, copied=True))
    assert made.saved().tokens["V"] == 4 * 0.5
    assert logits(forward_of(made))["logsumexp of rows"] == 4 + 2


def test_tensors_beside_the_logits_live_as_long() -> None:
    """trl 0.17 `trainer/kto_trainer.py`: logits that backward needs, 4, and copies, which wait for a reference."""
    run = Run(LLAMA)
    _, held, waiting = head(run, Path("rows", head_fp32=True, held="inside", aside=4))
    assert (held.tokens, waiting.tokens) == (4 * run.arch.vocab, 4 * run.arch.vocab + 2 * run.arch.hidden)
    # the outputs of a log-softmax wait apart from what it saves
    _, held, _ = head(run, Path("log-softmax", head_fp32=True, held="inside"))
    assert held.tokens == 4 * run.arch.vocab


def test_pieces_of_so_many_tokens_have_their_logits_in_turn() -> None:
    """trl 1.7 `trainer/sft_trainer.py`, `_chunk`, 256 tokens: four tensors of a piece, the head's weight in fp32."""
    made = tape(Path("chunked", tile=256))
    [forward] = [s.passing.fixed for s in forward_of(made) if s.name == "loss in pieces"]
    [backward] = [s.passing.fixed for s in backward_of(made) if s.name == "loss in pieces"]
    assert forward == {"V": 4 * 256 * 4, "W_lm_head": 4}
    assert backward == {"V": 3 * 256 * 4, "W_lm_head": 4 + 4 + 2}
    assert "V" not in made.saved().tokens


def test_a_loss_puts_out_one_fp32_number_a_token() -> None:
    """4 bytes a token, beside the logits that flash-attn's kernel and nll read."""
    for path in (Path("cross-entropy"), Path("flash", head_fp32=True)):
        assert terms(forward_of(tape(path))[-1].passing)[0][""] == 4


# --- reinforcement learning ---


@pytest.mark.parametrize(
    ("path", "forward", "kept", "backward", "without_grad"),
    [
        # verl to 0.3: no probability is a tensor; gradients 2 of the kernel and of the entropy, added up in place, then
        # the division: what comes in, its clone, the quotient and the result, 2 each
        (Path("flash", scaled="view", entropy="compiled"), 2, 2, 8, 2),
        (Path("flash", head_fp32=True, scaled="view", entropy="compiled"), 6, 4, 16, 6),
        # 0.4 to 0.8: the gradient lies where the logits lay, until the division
        (Path("flash", in_place=True, scaled="view"), 2, 2, 8, 2),
        # the entropy reads the logits as well, so they are not written over
        (Path("flash", in_place=True, scaled="view", entropy="compiled"), 2, 2, 8, 2),
        # 0.9: no division at temperature 1; logits 2 and two gradients
        (Path("flash", in_place=True), 2, 2, 2, 2),
        (Path("flash", in_place=True, entropy="compiled"), 2, 2, 6, 2),
        # divided out of place otherwise: the quotient is written over, the division makes 2
        (Path("flash", in_place=True, scaled="copy"), 4, 2, 4, 4),
        (Path("flash", in_place=True, scaled="copy", entropy="compiled"), 4, 2, 6, 4),
        # OpenRLHF to 0.4.5: outputs 4, their copy 4, log-softmax 4; outputs, log-softmax and two gradients
        (Path("log-softmax", head_fp32=True, shift_copy=True, held="step"), 12, 8, 16, 12),
        (Path("log-softmax", head_fp32=True, held="step"), 8, 8, 16, 8),
        (Path("log-softmax", shift_copy=True, held="step"), 6, 4, 8, 6),
        (Path("rows", head_fp32=True, held="step"), 6, 4, 12, 6),
        (Path("logsumexp", head_fp32=True, held="step"), 8, 4, 16, 8),
        (Path("flash", head_fp32=True, shift_copy=True, held="step"), 8, 8, 12, 8),
        (Path("flash", head_fp32=True, held="step"), 6, 4, 10, 6),
        # 0.6.2 to 0.6.4 with one row: outputs 4, the kernel's gradient 4, and the slice's 4 of all positions
        (Path("flash", head_fp32=True, cut="slice", held="step"), 6, 4, 12, 6),
    ],
)
def test_logits_of_an_actor_cost_these_bytes(
    path: Path, forward: float, kept: float, backward: float, without_grad: float
) -> None:
    """Bytes for each token and vocabulary entry, measured with torch's allocator on the releases' loss code."""
    assert peaks(path) == (forward, kept, backward, without_grad)


RESPONSE: dict[str, Any] = {"scaled": "in-place", "kept": 0.5}  # verl with padding, a response as long as its prompt


@pytest.mark.parametrize(
    ("path", "forward", "kept", "backward", "without_grad"),
    [
        # to 0.3, one row: logits 2, probabilities and the logsumexp's cast 4 each, of half; its exponentials 4 beside;
        # backward 2 + half of these 8, the product's gradients 4 + 2, and 12 of the logsumexp's
        (Path("flash", entropy="eager", **RESPONSE), 8, 6, 15, 8),
        # several: the kernel's copy, half of 2; the logits themselves are gone once the product's backward has run
        (Path("flash", shift_copy=True, entropy="eager", **RESPONSE), 9, 7, 14, 8),
        # an early Transformers: fp32 logits need no cast, which the logsumexp keeps instead
        (Path("flash", head_fp32=True, entropy="eager", **RESPONSE), 8, 6, 16, 8),
        (Path("flash", head_fp32=True, shift_copy=True, entropy="eager", **RESPONSE), 10, 8, 18, 8),
        # 0.4 to 0.7: the gradient over the slice lies in the logits 2, beside zeros 2; in the copy, half as much
        (Path("flash", in_place=True, **RESPONSE), 2, 2, 4, 2),
        (Path("flash", in_place=True, shift_copy=True, **RESPONSE), 3, 1, 4, 3),
        # 0.8: logits 2 stay for the backward of their unpadded copy 2, which makes 2
        (Path("flash", in_place=True, scaled="in-place", cut="unpad"), 4, 4, 6, 4),
        # 0.9.0: a quotient 2 between them, of which the logits are not kept
        (Path("flash", in_place=True, scaled="copy", cut="unpad"), 6, 4, 6, 6),
        (Path("flash", in_place=True, cut="unpad"), 4, 4, 6, 4),
    ],
)
def test_logits_that_keep_their_padding_cost_these_bytes(
    path: Path, forward: float, kept: float, backward: float, without_grad: float
) -> None:
    """Bytes for each token and vocabulary entry, measured with torch's allocator on the releases' loss code."""
    assert peaks(path) == (forward, kept, backward, without_grad)


@pytest.mark.parametrize(("scaled", "score"), [("in-place", 14), ("copy", 16), ("", 14)])
def test_an_eager_entropy_of_all_positions_is_scored_in_fp32(scaled: str, score: float) -> None:
    """From 0.8 on: logits 2 (0.9.0 a quotient 2 more), probabilities 4, the logsumexp's cast 4 and exponentials 4."""
    assert peaks(Path("flash", scaled=scaled, cut="unpad", entropy="eager"))[3] == score


def test_every_instant_of_an_eager_entropy() -> None:
    """In steps: `product` has both its gradients in fp32, 4 + 4, before the logits' is cast to 2."""
    made = tape(Path("flash", entropy="eager"))
    assert [(s.name, (s.saved + s.passing).tokens["V"]) for s in forward_of(made)] == [
        ("lm_head", 2), ("cross entropy", 2), ("entropy: to fp32", 6), ("entropy: softmax", 10),
        ("entropy: to fp32", 10), ("entropy: logsumexp", 14), ("entropy: product", 14), ("loss", 10),
    ]  # fmt: skip
    assert [(s.name, (s.saved + s.passing).tokens["V"]) for s in backward_of(made)] == [
        ("loss", 10), ("entropy: product", 20), ("entropy: logsumexp", 28), ("entropy: to fp32", 18),
        ("entropy: softmax", 16), ("entropy: to fp32", 10), ("cross entropy", 6), ("lm_head", 2),
    ]  # fmt: skip


@pytest.mark.parametrize(("scaled", "largest"), [("view", 8), ("in-place", 4), ("copy", 4)])
def test_a_division_costs_most_through_a_view(scaled: str, largest: float) -> None:
    """What comes in and the quotient, 2 each; a view's backward has a clone and its own result beside them."""
    assert logits(backward_of(tape(Path("flash", scaled=scaled))))["logits: divide"] == largest


def test_a_gradient_written_over_the_logits_lives_on_until_the_head_has_read_it() -> None:
    """2 in all at the kernel; the head's own gradient comes of them, 2 beside 2h."""
    made = tape(Path("flash", in_place=True))
    assert logits(backward_of(made)) == {"cross entropy": 2, "lm_head": 2}
    assert terms(backward_of(made)[-1].passing) == form("2h + 2V")


def test_outputs_that_are_held_and_written_over_count_once() -> None:
    """The caller's variable names the gradient by then."""
    assert logits(backward_of(tape(Path("flash", in_place=True, held="step")))) == {"cross entropy": 2, "lm_head": 2}


@pytest.mark.parametrize(
    ("path", "forward", "backward"),
    [
        (
            Path("log-softmax", upcast=True, kept=0.5),
            {"lm_head": 2, "logits: slice": 2, "logits: to fp32": 4, "log-softmax": 6, "gather": 4},
            {"gather": 4, "log-softmax": 6, "logits: to fp32": 3, "logits: slice": 3, "lm_head": 2},
        ),
        (
            Path("logsumexp", kept=0.5),
            {"lm_head": 2, "logits: slice": 2, "gather": 2, "logsumexp": 3, "log-probability": 2},
            {"log-probability": 2, "logsumexp": 5, "gather": 4, "logits: slice": 3, "lm_head": 2},
        ),
        (
            Path("selective", kept=0.5),
            {"lm_head": 2, "logits: slice": 2, "logits: rows": 2, "log-softmax": 3},
            {"log-softmax": 1, "logits: rows": 2, "logits: slice": 3, "lm_head": 2},
        ),
        # a slice of several rows is copied for a kernel that takes two dimensions; the copy's gradient is its own
        (
            Path("flash", in_place=True, shift_copy=True, kept=0.5),
            {"lm_head": 2, "logits: slice": 2, "logits: shift": 3, "cross entropy": 3},
            {"cross entropy": 1, "logits: shift": 1, "logits: slice": 3, "lm_head": 2},
        ),
        # the entropy reads the slice itself, so all logits stay until its backward: 2, the copy 1, its gradient 1
        (
            Path("flash", shift_copy=True, entropy="compiled", kept=0.5),
            {"lm_head": 2, "logits: slice": 2, "logits: shift": 3, "cross entropy": 3, "entropy": 3, "loss": 3},
            {"loss": 3, "entropy": 4, "cross entropy": 3, "logits: shift": 2, "logits: slice": 3, "lm_head": 2},
        ),
    ],
)
def test_half_of_the_positions_cost_half_behind_a_head_of_all(
    path: Path, forward: dict[str, float], backward: dict[str, float]
) -> None:
    """Traced for the first three: the slice is a view, its backward zeros of all logits beside the gradient of half."""
    made = tape(path)
    assert logits(forward_of(made)) == forward
    assert logits(backward_of(made)) == backward


def test_rows_of_half_the_positions_are_half_as_long() -> None:
    """A row's log-softmax without grad, 2 bytes for S/2 tokens."""
    alone = {s.name: s.passing.fixed for s in without_grad_of(tape(Path("selective", kept=0.5), grad=False))}
    assert alone["log-softmax"] == {"V·S": 1}


# --- the head itself ---


def test_a_trained_head_keeps_its_input_and_makes_its_gradient_last() -> None:
    """2h of the final norm's output, which nobody else keeps; 128,256 x 4096 gradients at the end."""
    made = tape(Path("cross-entropy"))
    assert terms(made.saved()) == form("2h + 4V")
    last = backward_of(made)[-1]
    assert (last.name, last.gradients, last.making) == ("lm_head", ELEMENTS, ELEMENTS)
    assert terms(last.passing) == form("2h + 2V")


def test_a_frozen_head_keeps_no_input_and_makes_no_gradient() -> None:
    """LoRA leaves the head alone: the gradient passes through it, 2V in and 2h out."""
    made = tape(Path("cross-entropy"), trained=False)
    assert terms(made.saved()) == form("4V")
    assert backward_of(made)[-1].gradients == 0


def test_a_frozen_heads_input_lives_as_long_as_the_models_forward() -> None:
    """`hidden_states` of LlamaForCausalLM.forward (modeling_llama.py 5.23.0), 2h that nothing saves, gone in backward.

    OpenRLHF's sft trainer computes the loss of the logits that the model has returned (`held="next"`).
    """
    made = tape(Path("cross-entropy"), trained=False)
    assert {terms(s.saved + s.passing)[0]["h"] for s in forward_of(made)} == {2}
    assert [terms(s.saved + s.passing)[0].get("h", 0) for s in backward_of(made)] == [0, 0, 0, 2]
    outside = forward_of(tape(Path("cross-entropy", held="next"), trained=False))
    assert "h" not in terms(outside[-1].saved + outside[-1].passing)[0]


def test_under_autocast_the_head_keeps_casts_of_its_input_and_weight() -> None:
    """2h in bf16 and 2 bytes for each element of the weight, whose fp32 gradient comes of the cast's backward."""
    made = tape(Path("cross-entropy"), precision="autocast")
    assert terms(made.saved()) == form("2h + 4V | 2W_lm_head")
    making = {s.name: s.making for s in backward_of(made)}
    assert making["lm_head"] == 0
    assert making["lm_head: weight to bf16"] == ELEMENTS


def test_a_value_head_puts_out_one_number_a_token() -> None:
    """Reward models: 2h kept, 2 bytes a token out, h gradients; under autocast a cast of the h weights too."""
    made = tape(Path("scalar"))
    assert terms(made.saved()) == form("2h")
    assert terms(forward_of(made)[-1].passing) == form("2")
    assert terms(backward_of(made)[-1].passing) == form("2h + 2")
    assert backward_of(made)[-1].gradients == 4096
    segment, held, _ = head(Run(LLAMA, "autocast"), Path("scalar"))
    assert segment.saved.fixed == 2 * 4096
    assert held.formula == "0"


def test_a_value_models_output_is_its_last_hidden_state() -> None:
    """2h, of the head's own input while that is there, and kept where a frozen head keeps nothing."""
    assert terms(tape(Path("scalar", held="step")).saved()) == form("2h")
    assert terms(tape(Path("scalar", held="step"), trained=False).saved()) == form("2h")
    assert head(Run(LLAMA), Path("scalar", held="step"))[1].tokens == 2 * 4096


def test_a_chunked_loss_holds_a_piece_of_the_logits_and_two_gradients_of_the_head() -> None:
    """The sum so far counts as made, 128,256 x 4096 elements; the piece's own, 2 bytes an element, is scratch."""
    pieces = backward_of(tape(Path("chunked")))[0]
    assert terms(pieces.passing) == form("2h + 1.5V + 4 | 2W_lm_head")
    assert (pieces.gradients, pieces.making) == (ELEMENTS, ELEMENTS)
    assert backward_of(tape(Path("chunked")))[-1].gradients == ELEMENTS
    assert terms(tape(Path("chunked")).saved()) == form("2h")
    assert terms(forward_of(tape(Path("chunked")))[0].passing) == form("2h")  # the input itself, no copy
    assert terms(forward_of(tape(Path("chunked")))[-1].passing) == form("1.25V + 4")
    frozen = backward_of(tape(Path("chunked"), trained=False))[0]
    assert terms(frozen.passing) == form("2h + 1.5V + 4")
    assert frozen.gradients == 0


def test_chunks_whose_backward_runs_at_once_sum_both_gradients_in_fp32() -> None:
    """torchtitan's: of the head the sum so far, 4 bytes an element, beside the new one; of the input 4h.

    Chunks of several sequences are copies, 2h. Ranks that share the vocabulary have a half of the logits each: 2 + 12
    forward (fp32, shifted, exponentials), 2 + 16 backward (log-softmax, zeros, exponentials, their sum). The released
    class, followed on a CPU without FSDP: 16.19 bytes an entry of a chunk where these sums make 16.13.
    """
    path = Path("ahead", summed=4)
    shot = backward_of(tape(path))[0]
    assert terms(shot.saved) == form("2h")
    assert terms(shot.passing) == form("4h + 1.75V + 4 | 4W_lm_head")
    assert shot.making == ELEMENTS
    copied = backward_of(tape(replace(path, copied=True)))[0]
    assert terms(copied.saved) == form("4h")
    cut = Run(part(LLAMA, 2), sequences=True)
    shots = backward_of(written(cut, path).tape)
    assert terms(shots[0].passing)[0]["V"] == 18 / 16
    assert terms(forward_of(written(cut, path).tape)[-1].passing)[0]["V"] == 14 / 16


def test_a_head_in_chunks_of_the_vocabulary_has_2048_logits_of_each_token_at_a_time() -> None:
    """Forward: 2 bytes and three numbers in fp32; backward has two more, of the chunk before, once there is one.

    Kept are the input, a label of 8 bytes and a log-sum-exp in fp32; the weight's gradient is made whole.
    """
    made = tape(Path("vocab-chunked"))
    assert made.saved().tokens == {"h": 2, "": 12}
    (op,) = made.ops
    assert (op.scratch.tokens, op.backward_scratch.tokens) == ({"": 2048 * 14}, {"": 2048 * 22})
    assert op.weight == ELEMENTS
    wide = replace(LLAMA, hidden=8192)
    # the gradient's cast and its product with the weight: 16 bytes an entry, and the input's width once more
    assert tape(Path("vocab-chunked"), wide).ops[0].backward_scratch.tokens == {"": 2048 * 16 + 8192 * 2}


def test_cut_cross_entropy_keeps_its_input_and_twenty_bytes_a_token() -> None:
    """A log-sum-exp 4, the target 8, its place 8, and 4 for each entry of the vocabulary; no logits."""
    kept = tape(Path("cut"))
    assert terms(kept.saved()) == form(f"2h + 20 | {4 * 128_256}")
    shot = backward_of(kept)[0]
    assert shot.making == ELEMENTS and "V" not in terms(shot.passing)[0]
    cast = tape(Path("cut"), precision="autocast")
    assert terms(cast.saved())[1]["W_lm_head"] == 2


def test_a_fused_loss_makes_the_gradients_of_input_and_head_in_forward() -> None:
    """Liger: 2h and 2 bytes an element of the head, kept; pieces of at most twice h entries a token, 4h, beside input.

    Backward hands them out: no more than what was kept and the gradient's own 4 bytes a token.
    """
    made = tape(Path("fused"))
    assert terms(made.saved()) == form("2h | 2W_lm_head")
    assert terms(forward_of(made)[-1].passing) == form("6h + 4")
    assert [terms(s.passing) for s in backward_of(made)] == [form("2h + 4"), form("2h")]
    assert backward_of(made)[-1].gradients == ELEMENTS
    assert terms(tape(Path("fused"), trained=False).saved()) == form("2h")


def test_a_fused_loss_of_chunks_holds_what_it_made_of_one_until_the_next_is_there() -> None:
    """XTuner, counted by PyTorch's profiler on `ChunkLoss` of f5c60e2b4 with chunks of 1,024 of 4,096 tokens.

    For each token and entry of a chunk 22 bytes beside the sum of the head's gradients, 2 an element, and the last
    chunk's; or 18 with a third one. Llama 3's head has 4096 elements for each entry: the third is the larger one.
    """
    kept = [({"h": 2}, {}), ({}, {"W_lm_head": 2})]
    for trained in (True, False):
        ops = tape(Path("fused", tile=1024), trained=trained).ops
        (op,) = [op for op in ops if op.name == "fused loss"]
        assert [(t.size.tokens, t.size.fixed) for t in op.saves] == kept
        assert op.scratch.fixed == {"V": 18 * 1024, "W_lm_head": 4, "h": 4 * 1024}
    (wide,) = [op for op in tape(Path("fused", tile=4096)).ops if op.name == "fused loss"]
    assert wide.scratch.fixed == {"V": 22 * 4096, "W_lm_head": 2, "h": 2 * 4096}
    (fp32,) = [op for op in tape(Path("fused", tile=8192), precision="fp32").ops if op.name == "fused loss"]
    assert fp32.scratch.fixed == {"V": 20 * 8192, "W_lm_head": 8, "h": 8 * 8192}


TILE = 4096 * 32_768  # TRL's tokens and vocabulary entries at a time
TILED = Path("tiled", tile=4096)


def test_a_tiled_loss_holds_one_tile_and_sums_its_gradients_in_fp32() -> None:
    """TRL in bf16: 2h of the picked positions kept, and 32 bytes of indices, targets and numbers for each.

    Forward has the backbone's output, 2h, a tile and seven numbers of 4; backward a tile, 4h and 4 bytes an element of
    the head beside 2h and the head's own gradient, then 2h of all positions beside those of the picked.
    """
    made = tape(TILED)
    assert terms(made.saved()) == form("2h + 32")
    pick, loss = forward_of(made)
    assert terms(pick.passing) == form("4h")  # the copy, not yet kept, beside the output
    assert terms(loss.passing) == ({"h": 2, "": 32}, {"": 2 * TILE})
    backward = {s.name: s for s in backward_of(made)}
    assert terms(backward["lm_head"].passing) == ({"h": 6, "": 4}, {"": 2 * TILE, "W_lm_head": 4})
    assert (backward["lm_head"].gradients, backward["lm_head"].making) == (ELEMENTS, ELEMENTS)
    assert terms(backward["hidden states: pick"].passing) == form("4h")
    assert peaks(TILED) == (0, 0, 0, 0)


def test_a_tile_has_as_many_rows_as_tokens_enter_the_loss() -> None:
    """`mm_buf` is min(N, 4096) x 32,768: 2,047 tokens in bf16."""
    assert tape(Path("tiled", tile=2047)).ops[-1].scratch.fixed == {"": 2 * 2047 * 32_768}


def test_only_the_positions_that_count_are_tiled() -> None:
    """Half of them are completions: h kept, and h of gradient beside the 2h of all."""
    made = tape(Path("tiled", kept=0.5))
    assert terms(made.saved()) == form("h + 16")
    assert terms(backward_of(made)[-1].passing) == form("3h")


def test_a_tiled_loss_under_autocast_casts_what_a_tile_reads() -> None:
    """fp32 gradients are the parameters' own; 4096 tokens and 32,768 rows of the head in bf16, 2h each.

    In backward the rows of the tile before are still named when those of the next are cast.
    """
    made = tape(TILED, precision="autocast")
    assert terms(made.saved()) == form("4h + 32")
    backward = backward_of(made)[0]
    assert terms(backward.passing) == ({"h": 4, "": 4}, {"": 2 * TILE, "h": 2 * (4096 + 2 * 32_768)})
    assert made.ops[-1].scratch.fixed == {"": 2 * TILE, "h": 2 * (4096 + 32_768)}
    assert backward.making == ELEMENTS


def test_a_frozen_tiled_head_sums_no_gradient_of_its_own() -> None:
    """LoRA: 4h in fp32 beside 2h, and a tile."""
    backward = backward_of(tape(TILED, trained=False))[0]
    assert terms(backward.passing) == ({"h": 6, "": 4}, {"": 2 * TILE})
    assert backward.gradients == 0


def test_the_final_logits_are_held_to_the_end_of_forward() -> None:
    """A model's forward returns them: at nll there are logits 2, the fp32 copy 4 and the log-softmax 4."""
    assert logits(forward_of(tape(Path("cross-entropy"))))["nll"] == 10


def test_a_heads_numbers_are_the_models_own() -> None:
    """Llama 3 8B: backward's largest instant has 12·128,256 bytes a token, and is the log-softmax's."""
    segment, held, _ = head(Run(LLAMA), Path("cross-entropy"))
    assert held.formula == "0"

    def total(shot: Shot) -> float:
        return shot.saved.tokens + shot.passing.tokens

    largest = max(segment.backward, key=total)
    assert largest.name == "log-softmax"
    assert total(largest) == 12 * 128_256 + 2 * 4096
    assert segment.saved.tokens == 4 * 128_256 + 2 * 4096
    assert max(segment.without_grad, key=total).passing.tokens == 10 * 128_256 + 2 * 4096 + 4  # the loss
    selective = head(Run(LLAMA), Path("selective"))[0]
    assert max(shot.passing.row for shot in selective.without_grad) == 2 * 128_256
    assert {shot.saved.formula for shot in selective.without_grad} == {"0"}
    assert selective.saved.tokens == 2 * 128_256 + 2 * 4096


# --- OpenRLHF, release by release ---


@pytest.mark.parametrize(
    ("version", "one_row", "forward", "backward", "after"),
    [
        # fp32 logits 4 (from 2: 6), shift 4, log-softmax 4; backward outputs 4, log-softmax 4, two gradients 8
        ("0.3.0", False, 12, 16, 4),
        ("0.3.8", False, 12, 16, 4),
        ("0.3.8", True, 8, 16, 4),  # one row needs no copy to be shifted
        ("0.4.5", False, 12, 16, 4),
        # Transformers 4.46: bf16 logits, all of it half
        ("0.4.6", False, 6, 8, 2),
        ("0.4.6", True, 4, 8, 2),
        ("0.5.5", False, 6, 8, 2),
        # Actor.forward casts to fp32
        ("0.5.6", False, 12, 16, 4),
        ("0.6.1", False, 12, 16, 4),
        ("0.6.4", True, 8, 16, 4),
        # flash-attn's cross entropy saves the outputs themselves: 4, its gradient 4, cast to bf16 2
        ("0.7.0", False, 6, 10, 4),
        ("0.11.2", True, 6, 10, 4),
    ],
)
def test_openrlhf_sft_holds_these_logits_by_release(
    version: str, one_row: bool, forward: float, backward: float, after: float
) -> None:
    """Bytes for each token and vocabulary entry, measured with torch's allocator on each release's loss code.

    From the second micro-batch on forward has the outputs of the one before too, which the trainer's loop references.
    """
    path = loss_path("sft", version, one_row=one_row)
    assert path.held == "next"
    assert peaks(path)[0] == forward
    assert peaks(path)[2] == backward
    assert head(Run(LLAMA), path)[1].tokens == after * 128_256


@pytest.mark.parametrize(
    ("version", "one_row", "policy", "kept", "reference", "backward"),
    [
        ("0.3.0", False, 12, 4, 16, 12),
        ("0.3.8", False, 12, 4, 16, 12),
        ("0.3.8", True, 8, 4, 12, 12),
        ("0.4.5", False, 12, 4, 16, 12),
        ("0.4.6", False, 6, 2, 8, 6),
        ("0.5.6", False, 12, 4, 16, 12),
        ("0.5.8", False, 6, 4, 10, 12),  # the gradients of all rows 4 and their stack 4 beside the logits
        ("0.6.1", False, 6, 4, 10, 12),
        ("0.6.1", True, 8, 4, 12, 16),  # one row is all rows: its exponentials forward, two temporaries backward
        ("0.6.2", False, 8, 4, 12, 8),
        ("0.6.4", False, 8, 4, 12, 8),
        ("0.6.4", True, 6, 4, 10, 8),
        ("0.7.0", False, 6, 4, 10, 8),
        ("0.11.2", False, 6, 4, 10, 8),
    ],
)
def test_openrlhf_dpo_holds_these_logits_by_release(
    version: str, one_row: bool, policy: float, kept: float, reference: float, backward: float
) -> None:
    """As for sft; packing makes a micro-batch one row. The reference runs while the policy's logits are kept.

    Nothing outlives a step: outputs are local to `concatenated_forward`.
    """
    path = loss_path("dpo", version, one_row=one_row)
    assert path.held == "forward"
    found = peaks(path)
    assert (found[0], found[1], found[1] + found[3], found[2]) == (policy, kept, reference, backward)


def test_openrlhf_reward_models_have_no_logits() -> None:
    """A value head on every release."""
    assert loss_path("rm", "0.3.0", one_row=False) == loss_path("rm", "0.11.2", one_row=True) == Path("scalar")


# --- what is small, or the same for most number formats ---


def ops(path: Path, arch: Any = LLAMA, **run: Any) -> dict[str, Op]:
    return {op.name: op for op in tape(path, arch, **run).ops}


@pytest.mark.parametrize("entropy", ["compiled", "eager"])
def test_an_entropys_numbers_are_fp32_and_its_logsumexp_is_kept(entropy: str) -> None:
    """One number a token each: the entropy or its two halves, and the loss that joins them."""
    found = ops(Path("logsumexp", entropy=entropy))
    ones = [op for name, op in found.items() if name in ("entropy", "entropy: logsumexp", "entropy: product", "loss")]
    assert len(ones) == (2 if entropy == "compiled" else 3)
    assert {op.outs[0].b for op in ones} == {4}
    if entropy == "eager":
        assert found["entropy: logsumexp"].outs[0] in found["entropy: logsumexp"].saves


def test_an_eager_entropys_product_casts_its_gradient_where_logits_are_16_bit() -> None:
    """fp32 logits take it as it is."""
    product = [ops(Path("logsumexp", entropy="eager", head_fp32=wide))["entropy: product"] for wide in (False, True)]
    assert [op.backward_scratch.tokens for op in product] == [{"V": 4}, {}]


def test_a_rows_two_gradients_are_as_wide_as_the_logits() -> None:
    """Twice 4 bytes for fp32 logits, whatever the number of rows."""
    assert ops(Path("selective", head_fp32=True))["log-softmax"].backward_scratch.fixed == {"V·S": 8}


def test_fp32_logits_are_copied_where_the_softmax_is_given_a_slice() -> None:
    """In a model that computes in fp32 there is no cast to copy on the way."""
    path = Path("cross-entropy", upcast=True)
    assert "logits: shift" in ops(path, precision="fp32")
    assert "logits: shift" not in ops(path)


def test_ligers_loss_of_grpo_makes_the_gradient_of_a_head_that_is_frozen() -> None:
    """Of 256 tokens, a third of all: logits in 16 bits, then 4 bytes each or a second gradient of the head."""
    (op,) = [op for op in tape(Path("fused-rows", kept=1 / 3, tile=256), trained=False).ops if op.name == "fused loss"]
    assert [(t.size.tokens, t.size.fixed) for t in op.saves] == [({"h": 2 / 3}, {}), ({}, {"W_lm_head": 2})]
    assert op.scratch.fixed == {"V": 512, "W_lm_head": 2}  # 2 · 4096 · V is more than 4 · 256 · V
    (long,) = [op for op in tape(Path("fused-rows", tile=4096)).ops if op.name == "fused loss"]
    assert long.scratch.fixed == {"V": 6 * 4096}


def test_an_adapter_stands_beside_a_head_that_is_named_alone() -> None:
    """Of rank 8: 8 · (4096 + V) elements; `all-linear` leaves the head as it is."""
    own = {"trained": False, "adapter": Adapter(8, ("q_proj", "lm_head"), False, 2)}
    made = tape(Path("cross-entropy"), **own)
    assert sum(op.weight for op in made.ops) == 8 * (4096 + 128_256)
    every = tape(Path("cross-entropy"), trained=False, adapter=Adapter(8, "all-linear", False, 2))
    assert sum(op.weight for op in every.ops) == 0
    assert lora_parameters(LLAMA, 8, ["q_proj", "lm_head"]) == 8 * (32 * 2 * 4096 + 4096 + 128_256)


def test_a_fused_loss_in_fp32_passes_two_fp32_hidden_states() -> None:
    """2 · 4 bytes of h a token."""
    assert ops(Path("fused"), precision="fp32")["fused loss"].scratch.tokens == {"h": 8}


def test_a_tile_casts_its_tokens_and_the_vocabulary_that_there_is() -> None:
    """Under autocast: 4,096 tokens and 30,000 entries in bf16, where the model has fewer than a tile's 32,768.

    One tile is as wide as the vocabulary, so that backward casts the head once.
    """
    op = ops(TILED, replace(LLAMA, vocab=30_000), precision="autocast")["lm_head"]
    assert op.scratch.fixed["h"] == op.backward_scratch.fixed["h"] == 2 * (4096 + 30_000)


def test_unpadding_is_no_slice_of_positions() -> None:
    """It copies rows of its own."""
    assert [sliced(Path("logsumexp", cut=cut)) for cut in ("unpad", "slice", "")] == [False, True, False]


def test_the_heads_gradient_is_vocabulary_times_hidden() -> None:
    """Llama 3: 128,256 · 4,096; a frozen head makes none."""
    segment, _, _ = head(Run(LLAMA), Path("cross-entropy"))
    assert max(shot.making for shot in segment.backward) == ELEMENTS
    assert max(shot.gradients for shot in segment.backward) == ELEMENTS
    frozen, _, _ = head(Run(LLAMA, trained=False), Path("cross-entropy"))
    assert max(shot.making for shot in frozen.backward) == 0


def test_two_ranks_gather_their_logits_and_one_does_not() -> None:
    """Each has half of the vocabulary; the parts of all are joined by a copy."""
    path = Path("cross-entropy")
    assert "logits: gather" in ops(path, part(LLAMA, 2))
    assert "logits: gather" not in ops(path)


def test_the_heads_input_lives_as_long_as_a_forward_that_computes_its_loss() -> None:
    """2h named in the model's own frame; a caller that keeps the outputs computes the loss itself."""
    for held, inside in (("forward", True), ("backward", False), ("turn", False)):
        made = tape(Path("cross-entropy", held=held), trained=False)
        assert (made.ops[0].inputs[0] in made.held) == inside


@pytest.mark.parametrize("field", ["kind", "scaled", "entropy"])
def test_a_word_of_the_path_that_nothing_knows_fails_at_once(field: str) -> None:
    words: Any = {"kind": "logsumexp", field: "unknown"}
    with pytest.raises(AssertionError, match="unknown"):
        tape(Path(**words))


def test_verls_entropy_keeps_logits_and_probabilities_beside_the_cross_entropys() -> None:
    """fp32 logits 4, their clone 4, probabilities 4; without the clone the cross entropy writes over the logits."""
    path = Path("vocab-parallel", head_fp32=True, scaled="in-place", entropy="vocab-parallel", copied=True)
    forward, kept, backward, alone = peaks(path)
    assert (forward, kept, alone) == (12, 12, 12)
    assert backward == 12  # gradients are written over both probabilities, while the logits are there
    assert peaks(replace(path, copied=False))[1] == 8


def test_verls_fused_head_has_no_logits() -> None:
    """Three numbers for each 1,024 entries in forward; gradients of 9,504 entries at a time in backward."""
    made = tape(Path("linear-entropy"))
    assert logits(forward_of(made)) == {"lm_head, loss and entropy": 12 / 1024}
    assert made.saved().tokens == {"h": 2, "": 12}
    [snapshot] = backward_of(made)
    assert snapshot.passing.tokens[""] >= 9504 * 2


@pytest.mark.parametrize(
    ("model", "entropy", "turns", "fixed"),
    [
        # 512 tokens: 3 of 4 bytes and 2 for a logit, and of head and hidden states this tile's gradient and the last's
        ("llama-3-8b", "", 4, {"V": 512 * 14, "W_lm_head": 2 * 2, "h": 512 * 2 * 2}),
        ("llama-3-8b", "eager", 4, {"V": 512 * 18, "W_lm_head": 2 * 2, "h": 512 * 2 * 2}),
        # a head of 896 columns is smaller than what of logits is there before: 5 of 4 bytes, 7 with the entropy
        ("qwen2.5-0.5b", "", 4, {"V": 512 * 20, "W_lm_head": 2, "h": 512 * 2}),
        ("qwen2.5-0.5b", "eager", 4, {"V": 512 * 28, "W_lm_head": 2, "h": 512 * 2}),
        ("qwen2.5-0.5b", "", 1, {"V": 512 * 20}),
    ],
)
def test_verls_head_in_pytorchs_operations_has_the_logits_of_a_few_tokens(
    model: str, entropy: Any, turns: int, fixed: dict[str, float]
) -> None:
    """`FusedLinearForPPO` of verl 0.7.0, whose storages were counted as it ran on the CPU.

    With 2,048 tokens, 32,000 entries and 4,096 columns its backward took 46.51 bytes for each of 512 x 32,000 logits
    beside the gradients that it returns: 14 + 2 x 16 + 0.51; with 64 columns 20.25: 20 + 0.25, and 28.25 with entropy.
    Forward took 16; 0.9.1 took 12, with the log-probabilities of flash-attn's kernel.
    """
    arch = load().model(model).architecture
    made = tape(Path("chunked-entropy", tile=512, turns=turns, tensors=4, entropy=entropy), arch)
    [op] = [op for op in made.ops if op.name == "lm_head, loss and entropy"]
    assert op.scratch.fixed == {"V": 512 * 16} and op.backward_scratch.fixed == fixed
    assert made.saved().tokens == {"h": 2, "": 8}


def test_verls_log_probabilities_in_turn_for_each_token() -> None:
    """`logprobs_from_logits_v2` on a view that was divided in place, whose storages were counted as it ran on the CPU.

    Forward: logits 2 and log-softmaxes 4; these alone are kept, as nothing saves the logits. In backward their
    gradients take the place of the log-softmaxes; then their stack, a copy of it and what the division makes are there.
    """
    forward, kept, backward, alone = peaks(Path("selective", scaled="view", rows_fp32=True, tile=1))
    assert (forward, kept, backward, alone) == (6, 4, 8, 2)
    [row] = [op for op in tape(Path("selective", rows_fp32=True, tile=1), grad=False).ops if op.name == "log-softmax"]
    assert row.outs[0].width.fixed == {"V": 1}


@pytest.mark.parametrize(("rows", "alone"), [(1, 8), (5, 12)])
def test_verls_log_probabilities_of_padded_sequences_hold_up_to_three_of_one(rows: int, alone: int) -> None:
    """Bytes for a logit of a sequence: its cast to fp32 and its log-softmax, 4 each, and that of the sequence before.

    Storages of `logprobs_from_logits_v2` as it ran on the CPU, with autocast's cast written out, in sequences of fp32:
    2 for one row, 3 for several; with a gradient all log-softmaxes and the cast.
    """
    path = Path("selective", cut="slice", rows_fp32=True, turns=rows, kept=0.5)
    made = {s.name: s.passing.fixed for s in without_grad_of(tape(path, grad=False))}
    assert made["log-softmax"] == {"V·S": 0.5 * alone}
    trained = {s.name: s.passing.fixed for s in forward_of(tape(path))}
    assert trained["log-softmax"] == {"V·S": 0.5 * 4}


def test_verls_log_probabilities_read_a_copy_where_padding_is_cut_off() -> None:
    """verl 0.8.0 joins the real tokens of padded rows, `torch.cat`: the logits and their copy, 2 each, without grad."""
    path = Path("selective", cut="unpad", rows_fp32=True, tile=1, turns=9)
    assert peaks(path)[3] == 4
    assert max(logits(without_grad_of(tape(replace(path, cut=""), grad=False))).values()) == 2


def test_verls_entropies_in_pieces() -> None:
    """`entropy_from_logits_with_chunking`, whose storages were counted as it ran on the CPU on an eighth at a time.

    Without a gradient 12 bytes for each logit of a piece: the cast, its softmax and an exponential. With one a softmax
    and a cast of all pieces are kept, 8, and backward has 12 at once: these, the gradient so far and a piece's own of
    all logits.
    """
    path = Path("flash", entropy="chunked", pieces=2048)
    [alone] = [op for op in tape(path, grad=False).ops if op.name == "entropy in pieces"]
    assert (alone.scratch.fixed, alone.saves) == ({"V": 2048 * 12}, ())
    made = tape(path)
    assert made.saved().tokens["V"] == 2 + 8
    assert logits(backward_of(made))["entropy in pieces"] == 2 + 8 + 2 + 2  # the kernel keeps the logits, too


# --- divergences ---


@pytest.mark.parametrize(
    ("path", "forward", "kept"),
    [
        # logits 2 + 2, divided 2 + 2, log-softmaxes 2 + 2, stack 4, mixture 2, probabilities 2 + 2, a difference 2,
        # products 2 + 2, both weighed 2 + 2, their sum 2; kept: log-softmax, stack, mixture, probabilities, difference
        (Path("divergence", held="inside"), 34, 14),
        # logits 2 + 2, picked 2 + 2, divided 2 + 2, and what is kept, of one turn after another
        (Path("divergence", held="inside", tile=512, turns=8), 26, 14),
        # the same picked first, of a quarter of the tokens: all logits 2 + 2, and 2 + 2 + 30 of those
        (Path("divergence", held="inside", kept=0.25, copied=True), 4 + 34 / 4, 14 / 4),
        # of which alone there are logits
        (Path("divergence", held="inside", kept=0.25, copied=True, picked=True), 38 / 4, 14 / 4),
        # and the model's own loss before, of which an fp32 log-softmax stays
        (Path("divergence", held="inside", nll=1), 34 + 4, 14 + 4),
    ],
)
def test_a_divergence_names_both_models_logits(path: Path, forward: float, kept: float) -> None:
    """trl 1.16 `experimental/gkd/gkd_trainer.py:238-322`, ms-swift 4.6 `rlhf_trainers/gkd_loss.py`."""
    made = tape(path)
    assert max(logits(forward_of(made)).values()) == forward
    assert made.saved().tokens["V"] == kept


def test_a_student_keeps_its_logits_alone_while_a_teacher_runs() -> None:
    segment, held, waiting = head(Run(LLAMA), Path("divergence", held="inside"))
    assert held.tokens == 2 * LLAMA.vocab  # the logits, a variable of the trainer
    assert waiting.tokens == 2 * LLAMA.hidden  # the head's input; the loss has not begun
    assert segment.saved.tokens > 14 * LLAMA.vocab


@pytest.mark.parametrize(
    ("turns", "whole", "tiles"),
    [(1, 0, 5), (4, 0, 5), (8, 1, -2), (40, 2, -13)],  # of all tokens, and of a turn's
)
def test_the_gradients_of_many_turns_are_each_as_large_as_all_tokens(turns: int, whole: int, tiles: int) -> None:
    made = tape(Path("divergence", held="inside", tile=512, turns=turns))
    scratch = made.ops[-1].backward_scratch
    assert (scratch.tokens.get("V", 0), scratch.fixed["V"]) == (2 * whole, 2 * 512 * tiles)


@pytest.mark.parametrize(("trained", "weights"), [(True, (1, 2, 3, 3, 3, 3, 3, 3)), (False, (0,) * 8)])
def test_the_weights_gradients_of_chunks_are_added_out_of_place(trained: bool, weights: tuple[int, ...]) -> None:
    """Traced on fake tensors: beside the gradients of 8, 7 and 6 chunks there are 1, 2 and 3 of the head's weight, 3
    beside fewer.

    The first is a transposed view, which autograd does not add to in place.
    """
    made = tape(Path("chunked-logits", compiled=True), trained=trained)
    shots = [s for s in backward_of(made) if s.name == "lm_head"]
    logits_gone = [s.passing.tokens["V"] / 2 * 8 for s in shots]
    assert logits_gone == [8, 7, 6, 5, 4, 3, 2, 1]
    assert [s.passing.fixed.get("W_lm_head", 0) / 2 + s.making / ELEMENTS for s in shots] == [
        pytest.approx(n) for n in weights
    ]
