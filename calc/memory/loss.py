"""The head and the loss: what logits over V vocabulary entries cost at each instant.

One program a way of computing the loss, each written as the code it stands for runs it. Widths are elements per token
whose loss is taken. The head's own input is the final norm's output, h elements.
Read in transformers `loss/loss_utils.py` and `models/*/modeling_*.py`, trl `trainer/utils.py`, torch `LossNLL.cpp`,
OpenRLHF `models/{actor,loss,utils}.py`.
"""

from __future__ import annotations

from functools import lru_cache

from calc.amounts import NO_BYTES, Amount, Segment, amount, peaks, segment
from calc.keeps import Path
from calc.memory.activations import WIDTH, Program, Run, dimensions
from calc.tape import NOTHING, Size, Tape, Tensor, of

V = of(V=1)
ONE = Size({"": 1})

# pieces of a chunked loss (torchtune `modules/loss`, num_output_chunks)
CHUNKS = 8


class Head(Program):
    """Writes the lm_head and a loss on a tape."""

    held: Tensor | None = None
    grad = True

    def logits(self, path: Path) -> Tensor:
        """The head's output, soft-capped where the model does, as the model returns it."""
        x = self.linear("lm_head", self.input, V)
        if self.arch.softcap_logits:
            x = self.tape.op("logits: over cap", [x], V, x.b)
            x = self.tape.op("logits: tanh", [x], V, x.b, saves_out=True)
            x = self.tape.op("logits: times cap", [x], V, x.b)
        return self.cast(x, 4, "logits") if path.head_fp32 else x

    def write(self, path: Path) -> Tape:
        """The whole head with the loss of `path`."""
        if path.kind == "scalar":
            self.linear("score", self.input, ONE)
            return self.tape
        if path.kind in ("chunked", "fused"):
            return self.in_chunks(path)
        tape = self.tape
        x = tape.hold(self.logits(path))
        if path.upcast:
            x = self.cast(x, 4, "logits")
        if path.held:
            # outputs that the caller references live through the whole backward, as if the first operation kept them
            self.held = tape.hold(x)
            tape.ops[0].saves += (x,)
        getattr(self, path.kind.replace("-", "_"))(x, path)
        return tape

    def cross_entropy(self, x: Tensor, path: Path) -> None:
        """`F.cross_entropy(logits.float())`: log-softmax in fp32 is kept, its backward holds three such tensors."""
        tape = self.tape
        x = tape.hold(self.shifted(self.cast(x, 4, "logits"), path))
        x = tape.op("log-softmax", [x], V, x.b, saves_out=True)
        tape.op("nll", [x], ONE, 4)

    def log_softmax(self, x: Tensor, path: Path) -> None:
        """`F.log_softmax(logits).gather(labels)`, in the type the logits have by then."""
        tape = self.tape
        x = tape.hold(tape.op("log-softmax", [self.shifted(x, path)], V, x.b, saves_out=True))
        tape.op("gather", [x], ONE, x.b)

    def selective(self, x: Tensor, path: Path) -> None:
        """Row by row: keeps every row's log-softmax, without grad one row's at a time.

        Backward holds a row's two gradients beside what it has not released yet, then all rows' and their stack.
        """
        tape, row = self.tape, Size({}, {"V·S": 1})
        rows = tape.op("logits: rows", [x], V, x.b, view=True, backward_scratch=V * x.b)
        if self.grad:
            kept = Tensor(V, x.b)
            tape.op("log-softmax", [rows], ONE, x.b, saves=[kept], aliases=[rows], backward_scratch=row * (2 * x.b))
        else:
            tape.op("log-softmax", [rows], row, x.b)

    def logsumexp(self, x: Tensor, path: Path) -> None:
        """`gather(logits) - logsumexp(logits)`: keeps the logits, backward makes one gradient for each half."""
        tape = self.tape
        picked = tape.op("gather", [x], ONE, x.b)
        total = tape.op(
            "logsumexp", [x], ONE, x.b, saves=[x], saves_out=True, scratch=x.size, backward_scratch=x.size * 2
        )  # grad·exp(x - result) is one expression

        tape.op("log-probability", [picked, total], ONE, x.b)

    def flash(self, x: Tensor, path: Path) -> None:
        """flash-attn's cross entropy, out of place: keeps the logits, backward writes one gradient."""
        x = self.shifted(x, path)
        self.tape.op("cross entropy", [x], ONE, 4, saves=[x])

    def rows(self, x: Tensor, path: Path) -> None:
        """`logsumexp` row by row: nothing of all rows forward, the gradients of all rows and their stack backward."""
        self.tape.op("logsumexp of rows", [x], ONE, x.b, saves=[x], backward_scratch=x.size)

    def shifted(self, x: Tensor, path: Path) -> Tensor:
        """A contiguous copy of all logits but the last position's, where the code or its softmax makes one.

        A cast makes it on the way; where logits are fp32 already, softmax copies the slice it is given.
        """
        copied = path.shift_copy or (path.upcast and self.c == 4)
        return self.tape.op("logits: shift", [x], V, x.b) if copied else x

    def in_chunks(self, path: Path) -> Tape:
        """The head and its loss a piece at a time, so that whole logits never exist.

        `chunked`: eight pieces of the tokens, each recomputed for its backward, which adds a gradient of the whole head
        into the one so far. `fused` (Liger `ops/fused_linear_cross_entropy.py`): forward makes both gradients at once,
        of the input and of the head, in pieces of at most twice T·h/V rows.
        """
        tape, c, trained = self.tape, self.c, self.run.trained
        head = Size({}, {"W_lm_head": 1}) if trained else NOTHING
        elements = self.elements["lm_head"] if trained else 0
        chunked = path.kind == "chunked"
        x = tape.op("lm_head", [self.input], WIDTH, self.input.b, view=True, aliases=[self.input],
                    weight=0 if chunked else elements)  # fmt: skip
        if chunked:
            piece = V * (1 / CHUNKS)
            tape.op("loss in pieces", [x], ONE, 4, saves=[x], scratch=piece * (c + 4 + 4),
                    backward_scratch=piece * 12 + head * c, weight=elements)  # fmt: skip
        else:
            made = [Tensor(WIDTH, c), Tensor(head, c)]
            tape.op("fused loss", [x], ONE, 4, saves=made, scratch=WIDTH * (2 * c))
        return tape


@lru_cache(maxsize=4096)
def head(run: Run, path: Path) -> tuple[Segment, Amount]:
    """The head of `run` with the loss of `path`, and what of it outlives the head's own backward."""
    program = Head(run)
    # a tied head's gradient is the embedding's
    program.elements = {"lm_head": run.arch.vocab * run.arch.hidden, "score": run.arch.hidden}
    dims = {**dimensions(run.arch), "W_score": run.arch.hidden}
    compiled = segment(program.write(path), dims)
    if path.kind == "selective":
        alone = Head(run)
        alone.grad = False
        compiled = compiled._replace(without_grad=peaks(alone.write(path).forward(grad=False), dims))
    return compiled, amount(program.held.size, dims) if program.held else NO_BYTES
