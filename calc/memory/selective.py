"""Selective scans on a tape: Mamba-1 as Jamba has it, in PyTorch's operations and in mamba-ssm's kernel.

Widths, beside those of `calc.memory.ssm`: s_r of a time step before its projection, s_d of a channel's state, so that
s_s is that of all channels' states at one position. Read in transformers 5.23 `models/jamba/modeling_jamba.py`,
`JambaMambaMixer` and `mamba_selective_scan`, and mamba-ssm 2.2 `ops/selective_scan_interface.py`, `SelectiveScanFn`,
with `csrc/selective_scan/selective_scan.cpp`.
"""

from __future__ import annotations

from calc.autograd.tape import NOTHING, Size, Tensor, of
from calc.memory.linears import WIDTH
from calc.memory.run import symbol
from calc.memory.ssm import INNER, StateSpace

RANK, CHANNEL, STATE = of(s_r=1), of(s_d=1), of(s_s=1)
DECAYS = Size({}, {"s_s": 1})  # a number for each channel and each element of its state


class SelectiveScan(StateSpace):
    """Writes the block of a state-space mixer whose channels have time steps of their own."""

    def selective_scan(self, x: Tensor) -> Tensor:
        """The block from its normalised input to the output projection."""
        tape = self.tape
        projected = self.linear("ssm_in_proj", x, INNER * 2)
        decays = self.decays()
        if self.arch.ssm and self.arch.ssm.whole and self.run.linear_kernels:
            y = self.at_once(projected, decays)
            tape.returns(x, projected, decays)
            return y
        mixed, gate = tape.split("ssm: x, gate", projected, [INNER, INNER])
        read = self.let_through(mixed)
        rows = read
        if not (self.run.linear_kernels or self.run.single):
            rows = tape.op("ssm: contiguous", [read], INNER, read.b)
        parts = tape.split("ssm: step, B, C", self.linear("ssm_x_proj", rows, RANK + CHANNEL * 2),
                           [RANK, CHANNEL, CHANNEL])  # fmt: skip
        step, b, c = (self.part_norm(part, name) for name, part in zip(("dt", "b", "c"), parts, strict=True))
        # the weight itself is multiplied, past an adapter beside it, unless it is quantised
        project = self.linear if self.run.quantised else self.whole
        steps = project("ssm_dt_proj", step, INNER)
        if self.run.linear_kernels:
            scanned = self.by_kernel(read, steps, decays, b, c, gate)
        else:
            scanned = self.by_operations_alone(read, steps, decays, b, c, gate)
        out = self.cast(scanned, projected.b, "ssm: output")
        y = self.linear("ssm_out_proj", out, WIDTH)
        tape.returns(x, projected, decays, gate, read, rows, steps, b, c, scanned)
        return y

    def part_norm(self, x: Tensor, name: str) -> Tensor:
        """The norm of time steps, of B or of C, where the family has one."""
        ssm, module = self.arch.ssm, f"ssm_{name}_layernorm"
        assert ssm
        if ssm.parts == "bare":
            return self.cast(self.unweighed(self.cast(x, 4, module), module, Size({"": 1})), x.b, module)
        return self.norm(x, module) if ssm.parts else x

    def at_once(self, projected: Tensor, decays: Tensor) -> Tensor:
        """mamba-ssm's one operation from the input projection to the output's, whose convolution runs again backward.

        It keeps its input, copied position by position, what makes time steps, B and C, copies of these two, its output
        before the gate, and a state of every 2048 positions. Backward has the convolution's output and time steps
        again, gradients of both and of the output, and the output behind its gate (`MambaInnerFn`).
        """
        ssm, b = self.arch.ssm, projected.b
        assert ssm
        read = self.tape.op("ssm: contiguous", [projected], INNER * 2, b)
        # under autocast the weights that it multiplies with are copies, which it keeps
        copied = ("ssm_x_proj", "ssm_dt_proj", "ssm_out_proj") if self.run.copies else ()
        copies = [Tensor(Size({}, {symbol(name): 1}), 2) for name in copied]
        made, states = Tensor(RANK + CHANNEL * 2, b), Tensor(of(s_s=2 / ssm.chunk), 4)
        out = self.tape.op(
            "ssm: scan",
            [read, decays],
            WIDTH,
            self.c,
            saves=[read, decays, made, Tensor(CHANNEL * 2, b), states, Tensor(INNER, b), *copies],
            scratch=INNER * (3 * b),
            backward_scratch=INNER * (6 * b) + CHANNEL * 8,
            weight=self.part("conv1d", "x_proj", "dt_proj", "D", "out_proj"),
        )
        self.tape.returns(read)
        return out

    def decays(self) -> Tensor:
        """`-exp(A_log)` in fp32."""
        weight = self.part("A_log")
        powers = self.tape.op("ssm: exponential of A_log", [], DECAYS, 4, saves_out=True, weight=weight)
        return self.tape.op("ssm: A", [powers], DECAYS, 4)

    def let_through(self, x: Tensor) -> Tensor:
        """The causal convolution of each channel, and SiLU: one kernel that keeps its input, or several operations."""
        tape, weight = self.tape, self.part("conv1d")
        if self.run.linear_kernels:
            return tape.op("ssm: convolution", [x], INNER, x.b, saves=[x], weight=weight)
        y = tape.op("ssm: convolution", [x], INNER, x.b, saves=[x], weight=weight)
        cut = tape.op("ssm: convolution: cut", [y], INNER, y.b, view=True)
        return tape.op("ssm: activation", [cut], INNER, y.b, saves=[cut])

    def by_kernel(self, x: Tensor, steps: Tensor, decays: Tensor, b: Tensor, c: Tensor, gate: Tensor) -> Tensor:
        """mamba-ssm's kernel: input, gate, B and C are copied, position by position in a row.

        It keeps them, time steps, its output before the gate, and in fp32 two numbers for each element of the state
        of every 2048 positions. Backward makes gradients of B and C in fp32 first.
        """
        ssm, tape = self.arch.ssm, self.tape
        assert ssm
        names = {"x": x, "gate": gate, "B": b, "C": c}
        kept = [tape.op(f"ssm: {name}: contiguous", [t], t.width, t.b) for name, t in names.items()]
        states = Tensor(of(s_s=2 / ssm.chunk), 4)
        out = tape.op(
            "ssm: scan",
            [*kept, steps, decays],
            INNER,
            x.b,
            saves=[*kept, steps, decays, states, Tensor(INNER, x.b)],
            backward_scratch=CHANNEL * 8,
            weight=self.part("D"),
        )
        tape.returns(*kept)
        return out

    def by_operations_alone(
        self, x: Tensor, steps: Tensor, decays: Tensor, b: Tensor, c: Tensor, gate: Tensor
    ) -> Tensor:
        """`mamba_selective_scan`: a decay and an input of each element of the state at each position, then a loop.

        The loop keeps the state of every position, and its copy in the type of the input. Its backward makes zeros of
        a whole gradient for each position that it adds to.
        """
        tape, wide = self.tape, STATE * 4
        steps = tape.op("ssm: time step", [steps], INNER, steps.b)
        steps = self.cast(steps, 4, "ssm: softplus") if self.autocast else steps
        steps = tape.op("ssm: softplus", [steps], INNER, steps.b, saves=[steps])
        decay = tape.op(
            "ssm: decay times step", [decays, steps], STATE, 4, saves=[decays, steps], backward_scratch=wide
        )
        decay = tape.op("ssm: decay", [decay], STATE, 4, saves_out=True)
        b32 = self.cast(b, 4, "ssm: B")
        inputs = tape.op("ssm: B times step", [steps, b32], STATE, 4, saves=[steps, b32], backward_scratch=wide)
        x32 = self.cast(x, 4, "ssm: x")
        read = tape.op("ssm: B times x", [inputs, x32], STATE, 4, saves=[inputs, x32], backward_scratch=wide)
        states = [Tensor(STATE, 4), Tensor(STATE, x.b)]
        scanned = tape.op(
            "ssm: recurrence",
            [decay, read, c],
            INNER,
            x.b,
            saves=[decay, c, *states],
            scratch=INNER * x.b,
            backward_scratch=wide,
        )
        skip = self.weighed_channels(x)
        out = tape.op("ssm: add D", [scanned, skip], INNER, 4, aliases=[skip])
        act = tape.op("ssm: gate", [gate], INNER, gate.b, saves=[gate])
        y = tape.op("ssm: weigh", [out, act], INNER, 4, saves=[out, act])
        tape.returns(steps, decay, inputs, read, scanned, skip, out, act)
        return y

    def weighed_channels(self, x: Tensor) -> Tensor:
        """The product of each channel and its D, in fp32."""
        trained = self.run.trained
        scratch = INNER * 4 if trained else NOTHING
        return self.tape.op("ssm: D", [x], INNER, 4, saves=[x] if trained else [], weight=self.part("D"),
                            backward_scratch=scratch)  # fmt: skip
