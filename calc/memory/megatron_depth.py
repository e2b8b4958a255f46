"""A depth of Megatron-core's multi-token prediction on a tape: a layer that also reads the embedding of a later token.

The final norm's output and that embedding are normed, joined and multiplied into one stream, which goes through a layer
and a norm of its own. Read in Megatron-LM d98e8a64dd `megatron/core/transformer/multi_token_prediction.py`,
`MultiTokenPredictionLayer`.
"""

from __future__ import annotations

from calc.autograd.tape import NOTHING, Size, Tensor, of
from calc.memory.linears import WIDTH
from calc.memory.megatron import MegatronLayer
from calc.memory.megatron_adapters import BF16


class MegatronDepth(MegatronLayer):
    """Writes one depth."""

    def depth(self, x: Tensor, again: bool) -> Tensor:
        """From the stream of the depth before to this one's; `again`: all but the embedding runs again for backward."""
        e = self.embedded()
        return self.checkpointed("mtp", [x, e], self.whole_depth) if again else self.whole_depth(x, e)

    def embedded(self) -> Tensor:
        """The embedding of each token's successor, whose gradient is made whole in the weights' type."""
        gradient = Size({}, {"W_lm_head": BF16}) if self.run.trained else NOTHING
        whole = WIDTH * BF16 if self.arch.ranks > 1 else NOTHING
        return self.tape.op("mtp: embedding", [], self.stream, BF16, scratch=whole, backward_scratch=gradient + whole,
                            weight=int(self.run.trained))  # fmt: skip

    def whole_depth(self, x: Tensor, e: Tensor) -> Tensor:
        """Both norms, the product that joins them, a layer, and its norm."""
        hidden, later = self.normed(x, "mtp: hnorm"), self.normed(e, "mtp: enorm")
        y = self.eh_proj(self.tape.op("mtp: join", [later, hidden], self.stream * 2, BF16))
        norms = self.arch.norms
        return self.normed(self.feed_forward(self.mixed(y, norms.attention), norms.mlp), "mtp: final norm")

    def eh_proj(self, both: Tensor) -> Tensor:
        """The product of both, cut by its outputs, which all ranks gather; each then has a view of its positions."""
        tape, ranks, trained = self.tape, self.arch.ranks, self.run.trained
        whole = WIDTH * (2 * BF16) if self.run.sequences else NOTHING
        weight = 2 * self.arch.hidden**2 // ranks if trained else 0
        y = tape.op("mtp: eh_proj", [both], of(h=1 / ranks), BF16, saves=self.read(both), scratch=whole,
                    backward_scratch=whole * (1 + trained), weight=weight, multiplies=True)  # fmt: skip
        y = self.adapted_by("eh_proj", both, y, of(r=1))
        if ranks > 1:
            y = tape.op("mtp: gather", [y], WIDTH, BF16, scratch=WIDTH * BF16)
        return tape.op("mtp: scatter", [y], self.stream, BF16, view=True) if self.run.sequences else y
