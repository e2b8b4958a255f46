"""Attention that writes its scores out, in both of Megatron-core's specs on a tape.

Keys and values are written out for every query where heads share them. Read in Megatron-LM d98e8a64dd
`megatron/core/transformer/dot_product_attention.py`, and TransformerEngine d0067d0d
`pytorch/attention/dot_product_attention/{backends,softmax}.py`, `UnfusedDotProductAttention` (NVTE_UNFUSED_ATTN).
"""

from __future__ import annotations

from calc.autograd.tape import Size, Tensor, of
from calc.memory.megatron_adapters import BF16
from calc.memory.megatron_linears import MASK, MegatronLinears

SCORES = Size({"H·S": 1})
FP32 = 4


class MegatronScores(MegatronLinears):
    """Writes the attention of one of Megatron-core's layers where no fused kernel attends."""

    @property
    def context(self) -> Size:
        """The width of attention's output over all heads."""
        return of(o=1) if self.arch.mla else of(q=1)

    def unfused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Scores, their softmax, and the product with the values."""
        tape = self.tape
        if self.arch.grouped:
            k, v = (tape.op(f"{n}: repeat", [t], of(q=1), BF16) for n, t in (("k", k), ("v", v)))
        plain = self.arch.attention_sinks or self.run.kernel == "math"
        p, scores = self.plain_softmax(q, k) if plain else self.fused_softmax(q, k)
        mixed = tape.op("values", [p, v], self.context, BF16, saves=[p, v])
        y = tape.op("attention: contiguous", [mixed], self.context, BF16)
        tape.returns(*scores)
        return y

    def fused_softmax(self, q: Tensor, k: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The softmax of either spec as one kernel, which keeps its output, and dropout."""
        tape = self.tape
        x = tape.op("scores", [q, k], SCORES, BF16, saves=[q, k])
        p = tape.op("softmax", [x], SCORES, BF16, saves_out=True)
        tape.returns(x)
        if self.run.training and self.arch.attention_dropout:
            p = tape.op("probabilities: dropout", [p], SCORES, BF16, saves=[Tensor(SCORES, MASK)])
        return p, []

    def plain_softmax(self, q: Tensor, k: Tensor) -> tuple[Tensor, list[Tensor]]:
        """PyTorch's softmax in fp32, and the scores, which the caller's variable keeps.

        Transformer Engine's without its kernel, which takes no sinks, and no batch whose length is no multiple of 8.
        The product writes beside an empty tensor of its output's size. A sink is one more column, which a copy joins to
        the scores, and which is cut off the probabilities.
        """
        tape = self.tape
        x = tape.op("scores", [q, k], SCORES, BF16, saves=[q, k], scratch=SCORES * BF16, multiplies=True)
        if self.arch.attention_sinks:
            x = tape.op("scores: sinks", [x], SCORES, BF16, weight=self.trained_elements("sinks"))
        wide = tape.op("softmax: to fp32", [x], SCORES, FP32)
        p = tape.op("softmax", [wide], SCORES, FP32, saves_out=True)
        p = tape.op("softmax: to bf16", [p], SCORES, BF16)
        tape.returns(wide)
        if self.arch.attention_sinks:
            p = tape.op("probabilities: cut", [p], SCORES, BF16, view=True)
        return p, [x]
