"""Gemma 4's layers on Megatron-core on a tape: norms without weights, and experts beside a dense MLP.

Read in mcore-bridge 1.6.5 `mcore_bridge/model/mm_gpts/gemma4.py`, which runs Megatron-core's products and experts.
"""

from __future__ import annotations

from calc.autograd.tape import Size, Tensor, of
from calc.memory.megatron_adapters import BF16
from calc.memory.megatron_experts import MegatronExperts
from calc.models.architecture import BESIDE

FP32 = 4


class MegatronBeside(MegatronExperts):
    """Writes what Gemma 4 adds to one of Megatron-core's layers."""

    def unweighed_norm(self, x: Tensor, name: str, rows: Size) -> Tensor:
        """A norm without weights, of PyTorch's operations in fp32 (`Gemma4RMSNormNoScale`): keeps its input widened.

        In backward the gradient goes through a product and a square, each of which makes one as wide.
        """
        wide = self.tape.op(f"{name}: to fp32", [x], x.width, FP32)
        n = self.tape.op(name, [wide], x.width, FP32, saves=[wide, Tensor(rows, FP32)], scratch=wide.size,
                         backward_scratch=wide.size * 2)  # fmt: skip
        return self.tape.op(f"{name}: to bf16", [n], x.width, BF16)

    def values_norm(self, x: Tensor) -> Tensor:
        """The norm of each head's values."""
        return self.unweighed_norm(x, "v_norm", of(K=1))

    def routed_beside(self, x: Tensor, dense: Tensor) -> Tensor:
        """The experts' output, whose norms are their own, and the dense MLP's, added up."""
        first, before, after = BESIDE
        dense = self.normed(dense, first)
        y = self.once_more("moe", x, lambda x: self.experts(self.normed(x, before), self.scaled_for_router(x)))
        y = self.normed(y, after)
        return self.tape.op("experts: add dense", [dense, y], self.stream, BF16, aliases=[dense, y])

    def scaled_for_router(self, x: Tensor) -> Tensor:
        """What the router reads: the stream behind a norm without weights, times a trained scale, and a number."""
        n = self.unweighed_norm(x, "router: norm", Size({"": self.run.share}))
        weight = self.trained_elements("scale")
        n = self.tape.op("router: scale", [n], n.width, BF16, saves=self.kept(n), weight=weight,
                         backward_scratch=n.size * self.run.trained)  # fmt: skip
        return self.tape.op("router: over root", [n], n.width, BF16)
