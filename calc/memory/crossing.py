"""Attention of a text's tokens to the patches of its images, as Llama 3.2 Vision's own layers run it.

Keys and values are made of what the vision tower's projector returns, which lies outside the layers: the tape's sizes
are for each token of the text, so that what is made of patches counts with their `share`, patches for each token.
Read in transformers 5.23 `models/mllama/modeling_mllama.py`, `MllamaTextCrossAttention`,
`MllamaCrossAttentionDecoderLayer`, and `integrations/sdpa_attention.py`.
"""

from __future__ import annotations

from calc.autograd.tape import NOTHING, Size, Tensor, of
from calc.memory.attention import Attention
from calc.memory.linears import WIDTH
from calc.memory.run import Crossing

ROW = 8  # numbers of which a mask's row has a multiple in the memory-efficient kernel
NO_IMAGES = Crossing(0, 1.0, differentiable=False)


class CrossAttention(Attention):
    """Writes the attention block of a layer that attends to images alone."""

    def cross_attention(self, x: Tensor) -> Tensor:
        """Queries of the text, keys and values of the patches, both repeated for every query head, and a mask.

        SDPA takes its memory-efficient kernel under a mask, which has a row of all patches for each token: the model's
        own, where that has whole groups of eight numbers of the products' type, or a copy.
        """
        run, tape = self.run, self.tape
        at = run.crossing or NO_IMAGES
        names = self.arch.names
        q = tape.op("q: heads", [self.linear("q_proj", x, of(q=1))], of(q=1), self.c, view=True)
        q = self.norm(q, names.q_norm, of(H=1))
        seen = self.elsewhere("images", WIDTH * at.share, run.compute)
        seen.differentiable = at.differentiable
        self.row_share = at.share
        k = self.linear("k_proj", seen, of(kv=at.share))
        v = self.linear("v_proj", seen, of(kv=at.share))
        self.row_share = 1.0
        k = self.norm(k, names.k_norm, of(K=at.share))
        named = q, k, v
        k, v = (tape.op(f"{n}: repeat", [t], of(q=at.share), t.b) for n, t in (("k", k), ("v", v)))
        q, k, v = self.in_compute_type(q, k, v)
        copied = at.tokens % ROW or run.compute != run.weight
        mask = [Tensor(Size({"": at.tokens}), self.c)] if copied else []
        mixed = self.kernel(q, k, v, of(H=4) + (of(q=4) if self.c == 2 else NOTHING), mask=mask)
        y = self.linear("o_proj", mixed, WIDTH)
        tape.returns(x, *named)
        return y

    def weighed_output(self, x: Tensor, name: str) -> Tensor:
        """A block's output times the tanh of a number, which keeps the output if the number is trained."""
        b, trained = max(x.b, self.run.weight), self.run.trained
        wide = x.width * b if trained else NOTHING
        return self.tape.op(f"{name}: gate", [x], x.width, b, saves=[x] if trained else [], weight=int(trained),
                            backward_scratch=wide)  # fmt: skip

    def of_rows(self, x: Tensor) -> Tensor:
        """The MLP's output of the tokens that see a patch, 0 of the others: by a product with a mask of tokens."""
        return self.tape.op("mlp: rows", [x], x.width, max(x.b, self.run.weight))
