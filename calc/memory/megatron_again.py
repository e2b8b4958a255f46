"""Parts of layers that are run again for their backward, one by one: Megatron-core's selective recomputation.

PyTorch's `checkpoint_wrapper` around `layernorm`, `self_attn` and `mlp` of Transformers' layers keeps their inputs, too
(NeMo Automodel b4733bdc1 `components/distributed/parallelizer.py`).

Of Megatron-core's parts, `core_attn`, `mlp`, `moe` and `shared_experts` keep their inputs
(`tensor_parallel.checkpoint`). Others keep theirs, and their outputs go once what is behind them has run
(`CheckpointWithoutOutput`): `moe_act` with the experts' second product, `layernorm` with its whole block, `mla_up_proj`
with attention, `gdn_norm_out` with the output projection. Read in Megatron-LM d98e8a64dd
`megatron/core/tensor_parallel/random.py`, `core/transformer/{transformer_config,transformer_layer,
multi_latent_attention}.py`, `core/transformer/moe/{moe_layer,experts}.py`, `core/ssm/gated_delta_net/gdn.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from calc.autograd.lifetimes import Lifetimes, Turn
from calc.autograd.polynomial import amount
from calc.autograd.tape import Size, Tape, Tensor, total
from calc.base.plan import Recomputed
from calc.memory.linears import Linears
from calc.memory.run import dimensions


class Again(Linears):
    """Writes a part of a layer as one operation that keeps its input, or lets outputs go until its backward."""

    within = False  # what is written is a part that runs again as a whole

    def behind(self, name: Recomputed, first: int, end: int, stay: Sequence[Tensor] = ()) -> None:
        """The part `name` is the operations from `first` to before `end`, whose results go if the run says so.

        They go once the last operation so far has run; what is to `stay` is another's.
        """
        if name in self.run.again and not self.within:
            self.tape.restore(first, end, stay)

    def once_more(self, name: Recomputed, x: Tensor, write: Callable[[Tensor], Tensor]) -> Tensor:
        """The output of the part that `write` makes of `x`, run again for its backward if the run says so."""
        return self.checkpointed(name, [x], write) if name in self.run.again else write(x)

    def checkpointed(self, name: str, inputs: Sequence[Tensor], write: Callable[..., Tensor]) -> Tensor:
        """What `write` makes of `inputs`, run again as a whole for its backward.

        Its forward has the part's own peak as a temporary, its backward that of another forward and the backward.
        """
        own_inputs = [Tensor(x.width, x.b) for x in inputs]
        outer, self.tape, self.within = self.tape, Tape(), True
        y = write(*own_inputs)
        inner, self.tape, self.within = self.tape, outer, False
        own = Lifetimes(inner)
        forward, backward = own.without_grad, own.again
        apart = {*own_inputs, own.given, y.storage, backward.out}
        return outer.op(
            name,
            inputs,
            y.width,
            y.b,
            saves=inputs,
            scratch=self.peak(forward.turns, apart),
            backward_scratch=self.peak(backward.turns, apart),
            weight=sum(op.weight for op in inner.ops),
        )

    def peak(self, turns: Iterable[Turn], apart: Container[Tensor | None]) -> Size:
        """The largest sum of what is alive during a turn, without the storages `apart`, which others count."""
        dims = dimensions(self.arch, self.run.adapter.rank if self.run.adapter else 0)
        sizes = [total([t for t in (*turn.saved, *turn.passing) if t not in apart]) + turn.scratch for turn in turns]
        return max(sizes, key=lambda size: amount(size, dims)[:3])
