"""Gated delta rules in Megatron-core on a tape: one product to queries, keys, values and gates, cut by heads, and fla.

A rank's heads see all positions: with context parallelism an all-to-all gives each of its ranks some of the heads for
that, and another gives them back. What fla's kernels read is made by compiled functions (`jit_fuser`), which keep their
inputs in place of what lies between. Widths are those of `calc.memory.delta`. Read in Megatron-LM d98e8a64dd
`megatron/core/ssm/gated_delta_net/{common,gdn}.py`, `core/ssm/mamba_context_parallel.py`, fla-core 0.6.0
`modules/causal_conv1d/ops.py`, `modules/norm/l2norm.py`, and mcore-bridge 1.6.5 `model/modules/gated_delta_net.py`.
"""

from __future__ import annotations

from calc.autograd.tape import CHUNK, NOTHING, Size, Tensor, of
from calc.memory.delta import CHANNELS, GATES, KEYS, REPEATED, VALUES, ruled
from calc.memory.linears import WIDTH
from calc.memory.megatron_adapters import BF16
from calc.memory.megatron_linears import MegatronLinears

FP32 = 4
PROJECTED = CHANNELS + VALUES + GATES * 2  # queries, keys and values, output gates, and both gates of the state


class MegatronDelta(MegatronLinears):
    """Writes the gated delta rule of one of Megatron-core's layers."""

    def delta_rule(self, x: Tensor, norm: str) -> Tensor:
        """The block, from the residual stream to the residual stream."""
        delta = self.arch.delta
        assert delta
        joined = self.joined(x, norm, whole=delta.by_head)
        read = self.parts(self.to_heads(joined), delta.by_head)
        mixed, gate, beta, alpha = read
        y = self.convolved(mixed)
        if delta.by_head:
            q, k, v = self.apart_by_head(y)
        else:
            q, k, v = self.apart_normed(y)
            gate = self.copied(gate, "z")
        decay = self.decayed(alpha, compiled=not delta.by_head)
        beta = self.tape.op("delta: beta", [beta], GATES, BF16, saves_out=True)
        out = ruled(self.tape, (q, k, v, decay, beta), (q, k, v))
        first = len(self.tape.ops)
        context = self.to_positions(self.gated(out, gate))
        end = len(self.tape.ops)
        projected = self.projected_out(context, whole=delta.by_head)
        self.behind("gdn_norm_out", first, end)
        self.tape.returns(joined, *read, y, q, k, v, gate, decay, beta, out, context)
        return self.added(x, projected, "attention")

    def parts(self, x: Tensor, by_head: bool) -> tuple[Tensor, ...]:
        """Queries, keys and values, output gates, beta's and decay's inputs: each copied out if they lie by heads."""
        mixed, *gates = self.tape.split("delta: qkv, z, b, a", x, [CHANNELS, VALUES, GATES, GATES])
        if not by_head:
            return mixed, *gates
        gates = [self.copied(t, name) for t, name in zip(gates, "zba", strict=True)]
        return self.copied(mixed, "qkv"), *gates

    def joined(self, x: Tensor, norm: str, *, whole: bool) -> Tensor:
        """The norm and the product behind it; `whole`: every rank gathers and norms all positions (mcore-bridge)."""
        name = "in_proj"
        weight = self.trained_elements(*[own for own in self.elements if own.startswith(f"delta_{name}")])
        if not whole:
            return self.column(name, self.normed(x, norm), PROJECTED, weight)
        if self.run.sequences:
            x = self.tape.op("delta: gather", [x], WIDTH, BF16)
        n = self.normed(x, norm, Size({"": 1}))
        back = n.size if self.beside(name) else NOTHING  # as in `column`
        back += self.narrowed(PROJECTED) * 2
        y = self.tape.op(name, [n], PROJECTED, BF16, scratch=self.narrowed(n.width), saves=self.read(n),
                         backward_scratch=back, weight=weight, multiplies=True)  # fmt: skip
        return self.adapted_by(name, n, y, of(r=1))

    def projected_out(self, x: Tensor, *, whole: bool) -> Tensor:
        """The output projection; `whole`: its sums are added up for all positions, of which a rank takes its own."""
        name, weight = "out_proj", self.trained_elements("delta_out_proj")
        if not whole:
            return self.row(name, x, weight)
        y = self.tape.op(name, [x], WIDTH, BF16, saves=self.read(x), weight=weight, scratch=self.narrowed(x.width),
                         backward_scratch=self.narrowed(WIDTH) * 2, multiplies=True)  # fmt: skip
        y = self.adapted_by(name, x, y, of(r=1))
        return self.tape.op("delta: scatter", [y], self.stream, BF16, view=True) if self.run.sequences else y

    def to_heads(self, x: Tensor) -> Tensor:
        """With context parallelism some heads of all positions, in order, for all heads of a rank's positions."""
        return self.exchanged(x, ("order heads", "all-to-all", "order positions"))

    def to_positions(self, x: Tensor) -> Tensor:
        """All heads of a rank's positions again."""
        return self.exchanged(x, ("order positions back", "all-to-all back"))

    def exchanged(self, x: Tensor, steps: tuple[str, ...]) -> Tensor:
        """Copies of `x`, one after the other; an all-to-all takes another for what it sends, or has got."""
        if self.run.context == 1:
            return x
        for step in steps:
            sent = x.size if "all-to-all" in step else NOTHING
            x = self.tape.op(f"delta: {step}", [x], x.width, BF16, scratch=sent, backward_scratch=sent)
        return x

    def convolved(self, x: Tensor) -> Tensor:
        """fla's causal convolution with SiLU, which reads its input where it lies, and keeps it.

        Backward makes the convolution's output again, and a gradient of the weight in fp32 for each chunk.
        """
        assert self.arch.delta
        each = FP32 * self.arch.delta.kernel / CHUNK
        return self.tape.op("delta: convolution", [x], CHANNELS, BF16, saves=[x],
                            backward_scratch=CHANNELS * (BF16 + each),
                            weight=self.trained_elements("delta_conv1d"))  # fmt: skip

    def copied(self, x: Tensor, name: str) -> Tensor:
        """A contiguous copy."""
        return self.tape.op(f"delta: {name}: contiguous", [x], x.width, BF16)

    def unit(self, x: Tensor, name: str, scales: Size) -> Tensor:
        """fla's `l2norm` of a contiguous copy: keeps its output and the scale of each head in fp32."""
        x = self.copied(x, name)
        return self.tape.op(f"delta: {name}: norm", [x], x.width, BF16, saves=[Tensor(scales, FP32)], saves_out=True)

    def apart_normed(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normed together, then copied for each value head, and values."""
        both, v = self.tape.split("delta: qk, v", y, [KEYS * 2, VALUES])
        q, k = self.tape.split("delta: q, k", self.unit(both, "qk", of(n_k=2)), [KEYS, KEYS])
        return self.repeated(q, "q"), self.repeated(k, "k"), self.copied(v, "v")

    def apart_by_head(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normed one by one, then copied where value heads share one, and values."""
        assert self.arch.delta
        q, k, v = self.tape.split("delta: q, k, v", y, [KEYS, KEYS, VALUES])
        v = self.copied(v, "v")
        q, k = (self.unit(x, name, of(n_k=1)) for x, name in ((q, "q"), (k, "k")))
        if self.arch.delta.key_heads == self.arch.delta.value_heads:
            return q, k, v
        return self.repeated(q, "q"), self.repeated(k, "k"), v

    def repeated(self, x: Tensor, name: str) -> Tensor:
        """`repeat_interleave`: a copy for each value head."""
        return self.tape.op(f"delta: {name}: repeat", [x], REPEATED, BF16)

    def decayed(self, alpha: Tensor, *, compiled: bool) -> Tensor:
        """`-exp(A_log)·softplus(alpha + dt_bias)` in fp32; `compiled` it is one kernel, which keeps what it reads."""
        weight = self.trained_elements("delta_dt_bias", "delta_A_log")
        if compiled:
            return self.tape.op("delta: decay", [alpha], GATES, FP32, saves=[alpha], weight=weight)
        wide = self.tape.op("delta: decay: to fp32", [alpha], GATES, FP32)
        x = self.tape.op("delta: time step", [wide], GATES, FP32, weight=self.trained_elements("delta_dt_bias"))
        x = self.tape.op("delta: softplus", [x], GATES, FP32, saves=[x])
        return self.tape.op("delta: decay", [x], GATES, FP32, saves=self.kept(x),
                            weight=self.trained_elements("delta_A_log"))  # fmt: skip

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """The norm of each head, then one compiled kernel, which weighs it by SiLU of its gate and keeps both."""
        n = self.tape.op("delta_norm", [x], VALUES, BF16, saves=[x, Tensor(GATES, FP32)],
                         weight=self.trained_elements("delta_norm"))  # fmt: skip
        return self.tape.op("delta: weigh", [n, gate], VALUES, BF16, saves=[n, gate])
