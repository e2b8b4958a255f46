"""State-space mixers on a tape: Mamba-2 as Nemotron-H, Granite 4 and Falcon-H1 have it, in PyTorch and in its kernels.

Widths, beside those of `calc.memory.activations`: s_i of the input that is scanned, its gate and the output, s_c
channels of the convolution, s_g of B and of C in all groups, s_e of B and of C repeated for each head, s_n heads, s_p
pairs of a position with those of its chunk in each head, s_q such pairs in each group, s_s elements of the state, of
which a chunk has one. Sequences are taken to be whole chunks long.
Read in transformers 5.23 `models/nemotron_h/modeling_nemotron_h.py`, `mamba2_chunk_scan`, and mamba-ssm 2.2
`ops/triton/ssd_combined.py`, `MambaSplitConv1dScanCombinedFn`.
"""

from __future__ import annotations

from calc.autograd.tape import NOTHING, Size, Tensor, of
from calc.memory.linears import WIDTH, Linears

INNER, CHANNELS, GROUPED, REPEATED, HEADS, PAIRS = of(s_i=1), of(s_c=1), of(s_g=1), of(s_e=1), of(s_n=1), of(s_p=1)
GROUP_PAIRS = of(s_q=1)


class StateSpace(Linears):
    """Writes the block of a state-space mixer."""

    @property
    def states(self) -> Size:
        """Elements of the state of one chunk, for each of its positions."""
        assert self.arch.ssm
        return of(s_s=1 / self.arch.ssm.chunk)

    def state_space(self, x: Tensor) -> Tensor:
        """The block from its normalised input to the output projection."""
        x = self.multiplied(x, "ssm: input")
        projected = self.linear("ssm_in_proj", x, INNER + CHANNELS + HEADS)
        if self.arch.multipliers:  # by a vector of the model's type
            wide = 4 if self.run.precision == "autocast" else projected.b
            projected = self.tape.op("ssm: projection: scale", [projected], projected.width, wide)
        if self.run.linear_kernels:
            return self.scanned_by_kernel(projected)
        gate, mixed, step = self.tape.split("ssm: gate, x, step", projected, [INNER, CHANNELS, HEADS])
        scanned, b, c = self.tape.split("ssm: x, B, C", self.mixed(mixed), [INNER, GROUPED, GROUPED])
        out = self.gated(self.scanned_by_operations(scanned, b, c, step), gate, projected.b)
        y = self.linear("ssm_out_proj", out, WIDTH)
        self.tape.returns(x, projected, gate, out)
        return y

    def multiplied(self, x: Tensor, name: str) -> Tensor:
        """A multiple of a tensor, in a family that has factors (Falcon-H1)."""
        return self.tape.op(f"{name}: scale", [x], x.width, x.b) if self.arch.multipliers else x

    def part(self, *names: str) -> int:
        """Elements of the mixer's own parameters with these names, where they are trained."""
        return sum(self.elements.get(f"ssm_{name}", 0) for name in names) if self.run.trained else 0

    def scanned_by_kernel(self, projected: Tensor) -> Tensor:
        """mamba-ssm's one operation from the input projection to the output's, which scans again for its backward.

        It keeps its input, the scanned output and the norm's scales. Forward has the convolution's output, time steps
        and decays, states in fp32 and as they are passed on, what positions of a chunk are to each other, and the
        normed output. Backward is at its highest where it passes states' gradients back: states and gradients in fp32
        and in 16 bits, beside both convolutions' outputs and gradients, the output again, and its gradients.
        """
        ssm, b = self.arch.ssm, projected.b
        assert ssm
        steps, pairs = HEADS * 8, GROUP_PAIRS * 4
        norm = [Tensor(of(**{"": ssm.groups}), 4)] * ssm.normed
        return self.tape.op(
            "ssm: scan",
            [projected],
            WIDTH,
            self.c,
            saves=[projected, Tensor(INNER, b), *norm],
            scratch=(CHANNELS + INNER + self.states) * b + self.states * 4 + steps + pairs,
            backward_scratch=(CHANNELS * 2 + INNER * 3) * b + self.states * (8 + 2 * b) + steps + pairs,
            weight=self.part("conv1d", "dt_bias", "A_log", "D", "norm", "out_proj"),
        )

    def mixed(self, x: Tensor) -> Tensor:
        """The causal convolution of each channel, and SiLU, which keeps what is cut of the padded output."""
        tape, b = self.tape, x.b
        read = self.cast(x, 4 if self.run.precision == "autocast" else b, "ssm: convolution")
        read = self.cast(read, self.c, "ssm: convolution")
        y = tape.op("ssm: convolution", [read], CHANNELS, self.c, saves=[read], weight=self.part("conv1d"))
        cut = tape.op("ssm: convolution: cut", [y], CHANNELS, self.c, view=True)
        return self.cast(tape.op("ssm: activation", [cut], CHANNELS, self.c, saves=[cut]), b, "ssm: x, B, C")

    def steps(self, x: Tensor) -> Tensor:
        """`clamp(softplus(dt + dt_bias))`, which autocast takes in fp32."""
        tape = self.tape
        x = tape.op("ssm: time step", [x], HEADS, x.b, weight=self.part("dt_bias"))
        x = self.cast(x, 4, "ssm: softplus") if self.autocast else x
        x = tape.op("ssm: softplus", [x], HEADS, x.b, saves=[x])
        return tape.op("ssm: clamp", [x], HEADS, x.b, saves=[x])

    def repeated(self, x: Tensor, name: str) -> Tensor:
        """B or C in fp32, for each head."""
        wide = self.cast(x, 4, f"ssm: {name}")
        return self.tape.op(f"ssm: {name}: repeat", [wide], REPEATED, 4)

    def padded(self, x: Tensor, name: str) -> Tensor:
        """`pad`, a copy even where nothing is added."""
        return self.tape.op(f"ssm: {name}: pad", [x], x.width, x.b)

    def weighed_by_steps(self, x: Tensor, gate: Tensor, name: str) -> Tensor:
        """A product with a number for each head and position; the number's gradient is a sum over a whole product."""
        return self.tape.op(f"ssm: {name}", [x, gate], x.width, 4, saves=[x, gate], backward_scratch=x.size)

    def contracted(self, left: Tensor, right: Tensor, out: Size, name: str, copied: str = "both") -> Tensor:
        """`einsum`: its operands are copied to lie head by head, unless one does already; autocast takes 16 bits."""
        tape, read = self.tape, list[Tensor]()
        for side, x in (("left", left), ("right", right)):
            b = 2 if self.autocast else 4
            if b == 2:
                x = self.cast(x, 2, f"ssm: {name}")
            if copied in (side, "both"):
                x = tape.op(f"ssm: {name}: {side}", [x], x.width, x.b)
            read.append(x)
        y = tape.op(f"ssm: {name}", read, out, read[0].b, saves=read)
        tape.returns(*read)
        return y

    def scanned_by_operations(self, x: Tensor, b: Tensor, c: Tensor, step: Tensor) -> Tensor:
        """`mamba2_chunk_scan`: PyTorch's operations in fp32, chunks beside each other."""
        tape = self.tape
        step = self.steps(step)
        wide = self.cast(x, 4, "ssm: x")
        b, c = self.repeated(b, "B"), self.repeated(c, "C")
        trained = self.run.trained
        read = self.padded(wide, "x beside")
        skip = tape.op("ssm: D", [read], INNER, 4, saves=[read] if trained else [], weight=self.part("D"),
                       backward_scratch=INNER * 4 if trained else NOTHING)  # fmt: skip
        tape.returns(read)
        scaled = self.weighed_by_steps(wide, self.cast(step, 4, "ssm: step"), "x times step")
        step32 = self.cast(step, 4, "ssm: step")
        decay = tape.op("ssm: decay", [step32], HEADS, 4, saves=[step32] if trained else [], weight=self.part("A_log"))
        unpadded = [scaled, decay, b, c]
        scaled, decay, b, c = (self.padded(t, n) for t, n in zip(unpadded, ("x", "decay", "B", "C"), strict=True))
        tape.returns(*unpadded)
        sums = tape.op("ssm: sum decays", [decay], HEADS, 4)
        pairs = self.decays_between(decay)
        compared = self.contracted(c, b, PAIRS, "C to B")
        within = tape.op("ssm: pairs", [compared, pairs], PAIRS, 4, saves=[compared, pairs])
        inside = self.contracted(within, scaled, INNER, "within chunks", "right")
        late = tape.op("ssm: less last", [sums], HEADS, 4)
        late = tape.op("ssm: decay to last", [late], HEADS, 4, saves_out=True)
        decayed = self.weighed_by_steps(b, late, "decayed B")
        states = self.contracted(scaled, decayed, self.states, "states")
        states = tape.op("ssm: states: join", [states], self.states, states.b)
        passed = tape.op("ssm: pass states", [states], self.states, states.b, saves=[states])
        early = tape.op("ssm: decay from first", [sums], HEADS, 4, saves_out=True)
        across = self.contracted(c, passed, INNER, "C times states")
        across = self.weighed_by_steps(across, early, "across chunks")
        out = tape.op("ssm: add chunks", [inside, across], INNER, 4, aliases=[t for t in (inside, across) if t.b == 4])
        out = tape.op("ssm: contiguous", [out], INNER, 4, aliases=[out])
        out = tape.op("ssm: add D", [out, skip], INNER, 4, aliases=[out, skip])
        tape.returns(wide, scaled, decay, b, c, sums, pairs, compared, within, inside, late, decayed, states, passed,
                     early, across, skip)  # fmt: skip
        return out

    def decays_between(self, decay: Tensor) -> Tensor:
        """The decay between each two positions of a chunk: `exp(segment_sum(A))`, masked before and after its sums."""
        tape = self.tape
        whole = PAIRS * 4
        first = tape.op("ssm: pairs: mask", [decay], PAIRS, 4)
        sums = tape.op("ssm: pairs: sum", [first], PAIRS, 4, backward_scratch=whole)
        x = tape.op("ssm: pairs: mask again", [sums], PAIRS, 4)
        tape.returns(first, sums)
        return tape.op("ssm: pairs: exponential", [x], PAIRS, 4, saves_out=True)

    def gated(self, x: Tensor, gate: Tensor, b: float) -> Tensor:
        """`RMSNormGated`: SiLU of the gate in fp32 multiplies, then each group is normed; Falcon-H1 has no norm."""
        tape, name = self.tape, "ssm_norm"
        ssm = self.arch.ssm
        assert ssm
        wide = self.cast(gate, 4, "ssm: gate") if ssm.normed else gate
        act = tape.op("ssm: gate", [wide], INNER, wide.b, saves=[wide])
        y = tape.op("ssm: weigh", [x, act], INNER, 4, saves=[x, act])
        if not ssm.normed:
            return self.cast(y, b, "ssm: output")
        n = self.unweighed(y, name, of(**{"": ssm.groups}))
        trained = self.run.trained
        out = tape.op(f"{name}: weight", [n], INNER, 4, saves=[n] if trained else [], weight=self.part("norm"),
                      backward_scratch=INNER * 4 if trained else NOTHING)  # fmt: skip
        tape.returns(n, y)
        return self.cast(out, b, name)
