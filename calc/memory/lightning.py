"""Lightning attention on a tape: linear attention whose decay each head has for good (MiniMax-Text-01).

Widths, beside those of `calc.memory.activations`: y_p pairs of a position with those of its block in each head, y_s
elements of the state of all heads, of which a block has one.
Read in transformers 5.23 `models/minimax/modeling_minimax.py`, `MiniMaxLightningAttention`; no kernels take its place.
"""

from __future__ import annotations

from calc.autograd.tape import Tensor, of
from calc.memory.linears import WIDTH, Linears

HEADS, PAIRS = of(q=1), of(y_p=1)


class Lightning(Linears):
    """Writes the block of lightning attention."""

    def lightning(self, x: Tensor) -> Tensor:
        """The block from its normalised input to the output projection."""
        tape = self.tape
        qkv = self.linear("lightning_qkv_proj", x, HEADS * 3)
        qkv = tape.op("lightning: activation", [qkv], HEADS * 3, qkv.b, saves=[qkv])
        out = self.by_blocks(qkv)
        mixed = tape.op("lightning: contiguous", [out], HEADS, out.b)
        mixed = self.norm(mixed, "lightning_norm")
        gate = self.linear("lightning_output_gate", x, HEADS)
        gate = tape.op("lightning: sigmoid", [gate], HEADS, gate.b, saves_out=True)
        mixed = tape.op("lightning: weigh", [gate, mixed], HEADS, max(gate.b, mixed.b), saves=[gate, mixed])
        y = self.linear("lightning_out_proj", mixed, WIDTH)
        tape.returns(x, qkv, mixed)
        return y

    def by_blocks(self, qkv: Tensor) -> Tensor:
        """The loop over blocks, which keeps of each a state, decayed pairs, and decayed queries and keys.

        Products of several sequences copy queries, keys and values out of what joins them. A block is a slice: backward
        fills a tensor of all blocks with zeros for its gradient, and adds that to the gradient so far.
        """
        tape, b, c = self.tape, qkv.b, self.c
        states = of(y_s=1 / self.arch.lightning)
        parts = [qkv] if self.run.single and c == b else [Tensor(HEADS, c) for _ in range(4)]
        blocks = tape.op(
            "lightning: blocks", [qkv], HEADS, c,
            saves=[*parts, Tensor(PAIRS, c), Tensor(HEADS, c), Tensor(HEADS, c), Tensor(states, c)],
            backward_scratch=HEADS * (2 * b),
        )  # fmt: skip
        return tape.op("lightning: join", [blocks], HEADS, c)
