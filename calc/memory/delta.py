"""Gated delta rules on a tape: linear attention as Qwen3-Next and Qwen3.5 have it, in PyTorch and in fla's kernels.

Widths, beside those of `calc.memory.activations`: d_k of queries and of keys, d_e of keys repeated for each value head,
d_v of values, d_c channels of the convolution, d_s elements of the state, n_k and n_v heads. A size that ends in `·C`
counts positions up to whole chunks of 64, which is what the rule works on.
Read in transformers 5.23 `models/qwen3_5/modeling_qwen3_5.py`, fla-core 0.6.0 `ops/gated_delta_rule/chunk.py`,
`ops/common/chunk_delta_h.py`, `ops/common/chunk_o.py` and causal-conv1d 1.5 `causal_conv1d_interface.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from calc.autograd.tape import CHUNK, NOTHING, Size, Tape, Tensor, chunked, of
from calc.memory.linears import WIDTH, Linears

KEYS, VALUES, REPEATED, CHANNELS, GATES = of(d_k=1), of(d_v=1), of(d_e=1), of(d_c=1), of(n_v=1)
# of whole chunks: values, repeated keys, gates, what positions of a chunk are to each other, and a chunk's state
WHOLE_VALUES, WHOLE_KEYS, WHOLE_GATES = chunked(d_v=1), chunked(d_e=1), chunked(n_v=1)
PAIRS, STATES = chunked(n_v=CHUNK), chunked(d_s=1 / CHUNK)


def ruled(
    tape: Tape, parts: Sequence[Tensor], kept: Sequence[Tensor], *, normed: Size = NOTHING, summed: Size = NOTHING
) -> Tensor:
    """fla's `ChunkGatedDeltaRuleFunction`, which computes states and corrected values again for its backward.

    `parts`: queries, keys, values, decay and beta. It keeps queries, keys and values as the kernels read them, in
    `kept`, summed decays, and for each position a row of its chunk's inverted matrix. Forward has keys and values of
    the transform, corrected values, and a state for each chunk, beside inputs that were `normed`. Backward is at its
    highest in `prepare_wy_repr_bwd`: all of these but those inputs, a state's gradient for each chunk, gradients of
    values, and of keys twice, and what sums them over the value heads that share a key (`summed`).
    """
    b, beta = parts[0].b, parts[-1]
    again = (REPEATED + VALUES * 2 + STATES) * b
    return tape.op(
        "delta: rule",
        parts,
        VALUES,
        b,
        saves=[*kept, Tensor(GATES, 4), Tensor(of(n_v=CHUNK), b), beta],
        scratch=normed + again,
        backward_scratch=again + (STATES + VALUES + REPEATED * 2) * b + summed,
    )


class DeltaRule(Linears):
    """Writes the block of a gated delta rule."""

    def delta_rule(self, x: Tensor) -> Tensor:
        """The block from its normalised input to the output projection."""
        tape = self.tape
        mixed, z, b, a, *named = self.projected(x)
        if self.run.context > 1:
            mixed, b, a, *named = self.by_heads(mixed, b, a)
        y = self.convolved(mixed)
        q, k, v = tape.split("delta: q, k, v", y, [KEYS, KEYS, VALUES])
        tape.returns(*named)
        beta = tape.op("delta: beta", [b], GATES, b.b, saves_out=True)
        decay = self.decay(a)
        rule = self.by_kernels if self.run.linear_kernels else self.by_operations
        if self.run.context > 1 and self.arch.delta and self.arch.delta.key_heads != self.arch.delta.value_heads:
            q, k = (tape.op(f"delta: {n}: repeat", [x], REPEATED, x.b) for n, x in (("q", q), ("k", k)))
        ruled_out = rule(q, k, v, decay, beta)
        out = self.gated_norm(self.swapped(ruled_out, "output") if self.run.context > 1 else ruled_out, z)
        out = self.linear("delta_out_proj", out, WIDTH)
        tape.returns(x, z, b, a, q, decay)
        return out

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values side by side, output gates, and the inputs of beta and of decay.

        Then any tensor that a variable names until the convolution is done. Joined projections (Qwen3-Next) lie group
        by group, and each part is copied out.
        """
        tape, delta = self.tape, self.arch.delta
        assert delta
        if not delta.joined:
            widths = {"qkv": CHANNELS, "z": VALUES, "b": GATES, "a": GATES}
            return tuple(self.linear(f"delta_in_proj_{name}", x, width) for name, width in widths.items())
        joined = self.linear("delta_in_proj_qkvz", x, CHANNELS + VALUES)
        gates = self.linear("delta_in_proj_ba", x, GATES * 2)
        parts = tape.split("delta: q, k, v, z", joined, [KEYS, KEYS, VALUES, VALUES])
        halves = tape.split("delta: b, a", gates, [GATES, GATES])

        def copied(t: Tensor, name: str) -> Tensor:
            return tape.op(f"delta: {name}: contiguous", [t], t.width, t.b)

        q, k, v, z = parts
        v, z = copied(v, "v"), copied(z, "z")
        b, a = (copied(t, n) for t, n in zip(halves, "ba", strict=True))
        q, k = copied(q, "q"), copied(k, "k")
        return tape.op("delta: join q, k, v", [q, k, v], CHANNELS, v.b, aliases=[q, k, v]), z, b, a, q, k, v

    def by_heads(self, mixed: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, ...]:
        """The same where ranks share a sequence: each gets all positions of its own heads, joined for the convolution.

        Queries, keys and values are exchanged one by one, then the inputs of beta and of decay (ms-swift of commit
        5a1ff4bf9, `model/models/qwen.py`, `_run_qwen3_5_gated_delta_net_sequence_parallel_forward`).
        """
        tape = self.tape
        parts = tape.split("delta: parts", mixed, [KEYS, KEYS, VALUES])
        q, k, v = (self.swapped(x, name) for x, name in zip(parts, "qkv", strict=True))
        b, a = self.swapped(b, "b"), self.swapped(a, "a")
        return tape.op("delta: join heads", [q, k, v], CHANNELS, v.b, aliases=[q, k, v]), b, a, q, k, v

    def swapped(self, x: Tensor, name: str) -> Tensor:
        """A tensor cut into pieces, sent and joined again (`sequence_parallel/ulysses.py`, `_SeqAllToAll`)."""
        wide = x.size * 2
        return self.tape.op(f"delta: {name}: all-to-all", [x], x.width, x.b, scratch=wide, backward_scratch=wide)

    def convolved(self, x: Tensor) -> Tensor:
        """The causal convolution of each channel, and SiLU; a joint backward keeps the input, trained or not.

        Without causal-conv1d the input is cast to the weight's type, and under autocast back again.
        """
        tape, weight = self.tape, self.elements["delta_conv1d"] if self.run.trained else 0
        if self.run.linear_kernels:
            return tape.op("delta: convolution", [x], CHANNELS, x.b, saves=[x], weight=weight)
        read = self.cast(x, 4 if self.run.precision == "autocast" else x.b, "delta: convolution")
        read = self.cast(read, self.c, "delta: convolution")
        y = tape.op("delta: convolution", [read], CHANNELS, self.c, saves=[read], weight=weight)
        cut = tape.op("delta: convolution: cut", [y], CHANNELS, self.c, view=True)
        return tape.op("delta: activation", [cut], CHANNELS, self.c, saves=[cut])

    def decay(self, a: Tensor) -> Tensor:
        """`-exp(A_log)·softplus(a + dt_bias)` in fp32."""
        tape, weight = self.tape, self.elements["delta_dt_bias"] if self.run.trained else 0
        x = tape.op("delta: time step", [self.cast(a, 4, "delta: decay")], GATES, 4, weight=weight)
        x = tape.op("delta: softplus", [x], GATES, 4, saves=[x])
        return tape.op("delta: decay", [x], GATES, 4, saves=[x] if self.run.trained else [], weight=weight)

    def by_kernels(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """fla's kernels, which norm queries and keys, and copy values; value heads that share a key are its kernels'.

        Forward has queries and keys as they came, too.
        """
        assert self.arch.delta
        b, keys = q.b, q.width
        scales = of(n_k=4) if keys == KEYS else of(n_v=4)
        kept = [Tensor(keys, b), Tensor(scales, 1), Tensor(keys, b), Tensor(scales, 1), Tensor(VALUES, b)]
        fewer = keys == KEYS and self.arch.delta.key_heads != self.arch.delta.value_heads
        summed = KEYS * b if fewer else NOTHING
        return ruled(self.tape, (q, k, v, decay, beta), kept, normed=keys * (2 * b), summed=summed)

    def by_operations(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """`torch_chunk_gated_delta_rule`: PyTorch's operations in fp32, then a loop over chunks."""
        tape, delta, b = self.tape, self.arch.delta, q.b
        assert delta
        if delta.key_heads != delta.value_heads:
            q, k = (tape.op(f"delta: {n}: repeat", [x], REPEATED, x.b) for n, x in (("q", q), ("k", k)))
        parts = {"q": q, "k": k, "v": v, "beta": beta, "decay": decay}
        wide = {n: self.cast(x, 4, f"delta: {n}") for n, x in parts.items()}
        wide["q"] = tape.op("delta: q: scale", [self.unit(wide["q"], "q")], REPEATED, 4)
        wide["k"] = self.unit(wide["k"], "k")
        sizes = {"q": WHOLE_KEYS, "k": WHOLE_KEYS, "v": WHOLE_VALUES, "beta": WHOLE_GATES, "decay": WHOLE_GATES}
        for names in (("q", "k", "v"), ("beta", "decay")):
            before = [wide[n] for n in names]
            wide |= {n: tape.op(f"delta: {n}: pad", [wide[n]], sizes[n], 4) for n in names}
            tape.returns(*before)
        q, k, v, beta, decay = wide.values()
        v_beta = self.weighed_by(v, beta, "values times beta")
        k_beta = self.weighed_by(k, beta, "keys times beta")
        sums = tape.op("delta: sum decays", [decay], WHOLE_GATES, 4)
        pairs = self.pairwise(sums)
        system = self.compared(k_beta, k, pairs, "keys to keys")
        within = self.compared(q, k, pairs, "queries to keys")
        decayed = self.weighed_by(k_beta, self.exponential(sums), "decayed keys times beta")
        values, keys = self.solved(system, v_beta, "values"), self.solved(system, decayed, "keys")
        q = self.weighed_by(q, self.exponential(sums), "decayed queries")
        k = self.weighed_by(k, self.exponential(sums), "decayed keys")
        out = self.scanned(values, keys, q, within, k)
        # solved triangular systems lie column by column, and so does the output
        out = tape.op("delta: contiguous", [out], VALUES, 4, aliases=[out])
        out = tape.op("delta: to type", [out], VALUES, b)
        tape.returns(v, beta, decay, v_beta, k_beta, sums, pairs, system, within, decayed, values, keys, q, k)
        return out

    def unit(self, x: Tensor, name: str, scale: str = "rsqrt") -> Tensor:
        """`l2norm`: keeps its input and the scale of each head, which it multiplies by, or the `root` it divides by."""
        tape, wide = self.tape, x.size
        total = tape.op(f"delta: {name}: square", [x], GATES, 4, saves=[x], scratch=wide, backward_scratch=wide)
        by = tape.op(f"delta: {name}: {scale}", [total], GATES, 4, saves_out=True)
        back = wide * 2 if scale == "root" else wide
        return tape.op(f"delta: {name}: norm", [x, by], x.width, 4, saves=[x, by], backward_scratch=back)

    def weighed_by(self, x: Tensor, gate: Tensor, name: str) -> Tensor:
        """A product with a number for each head and position; the number's gradient is a sum over a whole product."""
        return self.tape.op(f"delta: {name}", [x, gate], x.width, 4, saves=[x, gate], backward_scratch=x.size)

    def exponential(self, x: Tensor) -> Tensor:
        """`exp` of sums of decays."""
        return self.tape.op("delta: exponential", [x], WHOLE_GATES, 4, saves_out=True)

    def pairwise(self, sums: Tensor, pairs: Size = PAIRS) -> Tensor:
        """The decay between each two positions of a chunk: differences, masked, their exponentials."""
        tape = self.tape
        x = tape.op("delta: pairs", [sums], pairs, 4, backward_scratch=pairs * 4)
        x = tape.op("delta: pairs: mask", [x], pairs, 4)
        return tape.op("delta: pairs: exponential", [x], pairs, 4, saves_out=True)

    def compared(self, left: Tensor, right: Tensor, decays: Tensor, name: str) -> Tensor:
        """Products of each two positions of a chunk, which autocast takes in 16 bits, times the decay between them.

        A cast to fp32 has put heads before positions; in a model that is fp32 already, a copy does so here.
        """
        read = [left, right]
        if self.autocast:
            read = [self.cast(x, 2, f"delta: {name}") for x in read]
        elif self.c == 4:
            read = [self.tape.op(f"delta: {name}: contiguous", [x], x.width, 4) for x in read]
        x = self.tape.op(f"delta: {name}", read, PAIRS, read[0].b, saves=read)
        return self.tape.op(f"delta: {name}: decay", [x, decays], PAIRS, 4, saves=[x, decays])

    def solved(self, system: Tensor, x: Tensor, name: str) -> Tensor:
        """`linalg.solve_triangular`: keeps the system and its solution."""
        return self.tape.op(
            f"delta: solve for {name}",
            [system, x],
            x.width,
            4,
            saves=[system],
            saves_out=True,
            backward_scratch=PAIRS * 4,
        )

    def scanned(self, values: Tensor, keys: Tensor, q: Tensor, within: Tensor, k: Tensor) -> Tensor:
        """The loop over chunks, which keeps each chunk's state and corrected values.

        A chunk is a slice: backward fills a tensor of all chunks with zeros for its gradient, and adds that to the
        gradient so far. Autocast casts what it multiplies, states and corrected values twice; states are scaled in
        fp32.
        """
        states = Tensor(STATES, 4)
        kept = [keys, q, within, k, Tensor(WHOLE_VALUES, 4)]
        if self.autocast:
            kept = [Tensor(x.width, 2) for x in (keys, q, within, k)]
            kept += [Tensor(size, 2) for size in (WHOLE_VALUES, STATES) for _ in range(2)]
        return self.tape.op(
            "delta: scan",
            [values, keys, q, within, k],
            WHOLE_VALUES,
            4,
            saves=[*kept, states],
            backward_scratch=WHOLE_VALUES * 4,
        )

    def gated_norm(self, x: Tensor, z: Tensor) -> Tensor:
        """`RMSNormGated`: each head is normed, weighed, and multiplied by SiLU of its gate in fp32."""
        tape, name, b = self.tape, "delta_norm", x.b
        n = self.cast(self.unweighed(self.cast(x, 4, name), name, GATES), b, name)
        trained = self.run.trained
        wide = 4 if self.run.precision == "autocast" else b  # of a product with the weight
        y = tape.op(f"{name}: weight", [n], VALUES, wide, saves=[n] if trained else [],
                    backward_scratch=VALUES * wide if trained else NOTHING,
                    weight=self.elements[name] if trained else 0)  # fmt: skip
        gate = self.cast(z, 4, "delta: gate")
        gate = tape.op("delta: gate", [gate], VALUES, 4, saves=[gate])
        y = tape.op("delta: weigh", [y, gate], VALUES, 4, saves=[y, gate],
                    backward_scratch=NOTHING if wide == 4 else VALUES * 4)  # fmt: skip
        return self.cast(y, b, name)
