"""The tensors that a decoder layer keeps when `torch.compile` has compiled it.

AOTAutograd joins a layer's forward and backward into one graph, and its min-cut partitioner decides what passes from
one to the other; Inductor fuses element-wise work and reductions into kernels whose intermediates are never tensors.
Read in torch 2.13 `_functorch/partitioners.py` (`min_cut_rematerialization_partition`, `get_default_op_list`) and
traced with it: products, attention and reductions are never computed again, and neither is what a product of the
backward reads (`ban_if_materialized_backward`), so that inputs of linears stay, as do gate and up, from which the
kernel before them is computed again. Kept of a Llama layer in bf16: 8·h + 4·q + 4·kv + 6·i + 4·H + 8 bytes a token.

torchao's Float8Linear saves its input as it is, but backward's product reads a cast of it, which is fused with whatever
makes the input: so norms' outputs and the product of gate and up are not kept, and the output of attention is cast
again in backward: 4·h + 4·q + 4·kv + 4·i + 4·H + 8 (torchao 0.18 `float8/float8_linear.py`, traced likewise, behind
Inductor's passes over the joint graph). Recipe `rowwise_with_gw_hp` makes weights' gradients of uncast inputs, and
keeps what bf16 keeps.

MXFP8Linear casts by kernels that Inductor cannot fuse, along rows for the product that reads rows, along columns for
the weight's gradient. The partitioner moves the cast by columns of what nothing else keeps into forward, and keeps it
in the input's place: 4·h + 4·q + 4·kv + 4·i + 4·H + 8 + (33/32)·(2·h + i) (torchao 0.18
`prototype/moe_training/mxfp8_linear.py`, `mx_mm`, with stand-ins for the kernels on a CPU). Scales rearranged in blocks
are left out: selective checkpointing keeps h/16 bytes of them. NVFP4Linear makes both casts in one kernel, and saves
those by columns of its input and of its weight, 9/16 of a byte an element with its scales
(`nvfp4_training/nvfp4_linear.py`).

In a checkpointed layer the policy's tags decide, as in eager mode, but a product that backward does not need is
dropped. It sees the `mm` of float8's and MXFP8's tensors as any other; NVFP4's products are `_scaled_mm_v2`, which it
does not know, and all are computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

from calc.autograd.polynomial import amount
from calc.autograd.tape import Size, Tape, Tensor, of
from calc.memory.attention import Attention
from calc.memory.linears import OUTPUTS, WIDTH
from calc.memory.run import dimensions, symbol

# Bytes of an element and of its part of a scale: a byte for 32 elements in MXFP8, for 16 in NVFP4
SCALED: Mapping[str, float] = {"mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}
COLUMNS = "cast by columns"


class Fused(Attention):
    """Writes the fused kernels of a compiled layer: one for each norm, rotation and gate, none for casts and views."""

    _parts: tuple[Tensor, ...] = ()

    def rms_norm(self, x: Tensor, name: str, rows: Size) -> Tensor:
        """One kernel: keeps what its input is the sum of, and the scale of each of its `rows`."""
        weight = self.elements.get(name, self.arch.norm_elements) if self.run.trained else 0
        inputs = self._parts or (x,)
        return self.tape.op(name, [x], x.width, x.b, saves=[*inputs, Tensor(rows, 4)], weight=weight)

    def kernel_norm(self, x: Tensor, name: str, rows: Size) -> Tensor:
        """The same: Inductor takes PyTorch's kernel apart."""
        return self.rms_norm(x, name, rows)

    def whole(self, name: str, x: Tensor, out: Size) -> Tensor:
        """The product, in the format in which linears multiply; the head's is PyTorch's own."""
        narrow = "" if name in OUTPUTS else self.run.narrow
        match narrow:
            case "":
                return super().whole(name, x, out)
            case "float8":
                return self.in_float8(name, x, out)
            case "mxfp8":
                return self.in_mxfp8(name, x, out)
            case "nvfp4":
                return self.in_nvfp4(name, x, out)
            case other:
                assert_never(other)

    def adapted(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """`y` plus LoRA's product, which one kernel scales where it is; backward scales the gradient for it."""
        adapter = self.run.adapter
        assert adapter is not None
        dims, label = dimensions(self.arch), f"{name}: LoRA"
        inputs, outputs = (int(amount(t.width, dims).tokens) * adapter.rank for t in (x, y))
        down = self.through(f"{label} A", x, of(r=1), inputs)
        up = self.through(f"{label} B", down, y.width, outputs)
        return self.tape.op(f"{label} add", [up, y], y.width, y.b, view=True, aliases=[y])

    def in_float8(self, name: str, x: Tensor, out: Size) -> Tensor:
        """torchao's Float8Linear, which keeps nothing: what it reads is made again and cast."""
        casts = x.width + Size({}, {symbol(name): 1})
        # backward casts its gradient both by rows and by columns
        return self.tape.op(name, [x], out, self.c, scratch=casts, backward_scratch=casts + out * 2,
                            weight=self.elements.get(name, 0), product=name not in self.biased, flat=True)  # fmt: skip

    def in_mxfp8(self, name: str, x: Tensor, out: Size) -> Tensor:
        """torchao's MXFP8Linear: keeps its input by columns, or casts what another operation keeps in backward.

        Its product is `mm`; a bias is added behind it. Backward casts the gradient by rows and the weight by columns,
        then the gradient by columns.
        """
        b, weight = SCALED["mxfp8"], Size({}, {symbol(name): 1})
        there = any(x.storage is t.storage for op in self.tape.ops for t in op.saves)
        again = [x.width * b] if there else []
        return self.tape.op(
            name, [x], out, self.c, saves=[] if there else [self.by_columns(x, b)], scratch=(x.width + weight) * b,
            backward_scratch=sum(again, (out + weight) * b),
            backward_course=(out * b, weight * b, None, 0, 1, out * b, *again),
            weight=self.elements.get(name, 0), product=True, flat=True,
        )  # fmt: skip

    def in_nvfp4(self, name: str, x: Tensor, out: Size) -> Tensor:
        """torchao's NVFP4Linear: keeps its input and its weight by columns; backward casts the gradient both ways."""
        b, weight = SCALED["nvfp4"], Size({}, {symbol(name): 1})
        kept = [self.by_columns(x, b), self.tape.op(f"{name}: weight by columns", [], weight, b)]
        return self.tape.op(name, [x], out, self.c, saves=kept, scratch=(x.width + weight) * b,
                            backward_scratch=out * 2 * b, weight=self.elements.get(name, 0), flat=True)  # fmt: skip

    def by_columns(self, x: Tensor, b: float) -> Tensor:
        """`x` in `b` bytes an element, scaled along the tokens; all linears that read it share one cast."""
        found = [op.outs[0] for op in self.tape.ops if op.name == COLUMNS and op.inputs[0].storage is x.storage]
        return found[0] if found else self.tape.op(COLUMNS, [x], x.width, b)

    def add(self, residual: Tensor, y: Tensor, name: str) -> Tensor:
        """The residual stream, which each of its readers adds up again from its parts."""
        self._parts = (residual, y)
        return super().add(residual, y, name)

    def heads(self, x: Tensor, name: str) -> Tensor:
        """A view of each head, for the gradient, too."""
        return x

    def tables(self) -> list[Tensor]:
        """Picks of cos and sin are made again in backward, from the tokens' positions."""
        return [] if self.arch.rotary_picked else super().tables()

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
