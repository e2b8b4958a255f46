"""What a decoder layer keeps when `torch.compile` has compiled it.

AOTAutograd joins a layer's forward and backward into one graph, and its min-cut partitioner decides what passes from
one to the other; Inductor fuses element-wise work and reductions into kernels whose intermediates are never tensors.
Read in torch 2.13 `_functorch/partitioners.py` (`min_cut_rematerialization_partition`, `get_default_op_list`) and
traced with it: products, attention and reductions are never computed again, and neither is what a product of the
backward reads (`ban_if_materialized_backward`), so that inputs of linears stay, as do gate and up, from which the
kernel before them is computed again. Kept of a Llama layer in bf16: 8·h + 4·q + 4·kv + 6·i + 4·H + 8 bytes a token.

torchao's Float8Linear saves its input as it is, but backward's product reads a cast of it, which is fused with whatever
makes the input: so norms' outputs and the product of gate and up are not kept, and the output of attention is kept
twice, for its own backward and in float8: 4·h + 5·q + 4·kv + 4·i + 4·H + 8 (torchao 0.9 `float8/float8_linear.py`,
traced likewise). Recipe `rowwise_with_gw_hp` makes weights' gradients of uncast inputs, and keeps what bf16 keeps.

In a checkpointed layer the policy's tags decide, as in eager mode, but a product that backward does not need is
dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from calc.autograd.tape import Size, Tape, Tensor, of
from calc.memory.attention import Attention
from calc.memory.linears import OUTPUTS, WIDTH


class Fused(Attention):
    """Writes the fused kernels of a compiled layer: one for each norm, rotation and gate, none for casts and views."""

    _parts: tuple[Tensor, ...] = ()

    def rms_norm(self, x: Tensor, name: str, rows: Size) -> Tensor:
        """One kernel: keeps what its input is the sum of, and the scale of each of its `rows`."""
        weight = self.elements.get(name, self.arch.norm_elements) if self.run.trained else 0
        inputs = self._parts or (x,)
        return self.tape.op(name, [x], x.width, x.b, saves=[*inputs, Tensor(rows, 4)], weight=weight)

    def whole(self, name: str, x: Tensor, out: Size) -> Tensor:
        """The product; in float8 it keeps a cast of the output of attention, and has what else it reads made again."""
        if not self.run.narrow or name in OUTPUTS:
            return super().whole(name, x, out)
        tape, trained = self.tape, self.elements.get(name, 0)
        kept = [Tensor(x.width, 1)] if name == self.arch.names.output else []
        # backward casts its gradient and its input, and the weight, each by columns and by rows
        casts = x.width * (0 if kept else 1) + out * 2 + Size({}, {f"W_{name}": 1})
        return tape.op(name, [x], out, self.c, saves=kept, scratch=x.width + Size({}, {f"W_{name}": 1}),
                       backward_scratch=casts, weight=trained, product=name not in self.biased, flat=True)  # fmt: skip

    def add(self, residual: Tensor, y: Tensor, name: str) -> Tensor:
        """The residual stream, which each of its readers adds up again from its parts."""
        self._parts = (residual, y)
        return super().add(residual, y, name)

    def heads(self, x: Tensor, name: str) -> Tensor:
        """A view of each head, for the gradient, too."""
        return x

    def rotate(self, x: Tensor, name: str, tables: Sequence[Tensor] = ()) -> Tensor:
        """One kernel, that of the norm before it where queries and keys are normed."""
        if not self.spec.rotated:
            return x
        joined = bool(self.arch.qk_norm)
        return self.tape.op(name, [x], x.width, x.b, saves=tables, view=joined, aliases=[x] if joined else ())

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, ...]:
        """The projections; norms of queries and keys read one tensor each."""
        self._parts = ()
        return super().queries_keys_values(x)

    def mlp(self, x: Tensor, width: Size | None = None, owner: str = "") -> Tensor:
        """`down(act(gate(x)) · up(x))`: keeps gate, up and the product that `down` reads."""
        tape, names, i = self.tape, self.arch.names, width or of(i=1)
        if self.arch.fused_gate_up:
            gate, up = tape.split("gate, up", self.linear("gate_up_proj", x, i * 2), [i, i])
        else:
            gate, up = self.linear("gate_proj", x, i), self.linear("up_proj", x, i)
        product = tape.op("mlp: product", [gate, up], i, gate.b, saves=[gate, up])
        return self.block_output(self.linear(names.down, product, WIDTH), "mlp")


def graph(tape: Tape) -> Tape:
    """A layer's tape as one graph: no variable outlives its last use, and nothing is kept that backward does not need.

    Of a checkpointed layer the last product is such a one, though the policy names it.
    """
    tape.ops = [op for op in tape.ops if op.outs]
    tape.held = []
    needed = {t.storage for op in tape.ops for t in op.saves}
    for op in reversed(tape.ops):
        if not needed & {t.storage for t in op.outs}:
            op.kept = ()
        elif not op.kept:
            needed |= {t.storage for t in op.inputs}
    return tape
