"""Kimi's delta attention on a tape: a gated delta rule whose decay each channel of a key has for itself (KDA).

Widths are those of `calc.memory.delta`, of which keys and values have the same; d_f the rank of the gates'
projections. Pairs of a chunk's positions are compared channel by channel, so that PyTorch's operations keep 64 numbers
for each of a key: nobody trains so who has fla's kernels.
Read in transformers 5.23 `models/kimi_linear/modeling_kimi_linear.py` and fla-core 0.6.0 `ops/kda/chunk.py`,
`chunk_fwd.py`, `chunk_bwd.py`, `chunk_intra.py`.
"""

from __future__ import annotations

from calc.autograd.tape import CHUNK, NOTHING, Tensor, chunked, of
from calc.memory.delta import (
    CHANNELS,
    GATES,
    PAIRS,
    REPEATED,
    STATES,
    VALUES,
    WHOLE_GATES,
    WHOLE_KEYS,
    WHOLE_VALUES,
    DeltaRule,
)
from calc.memory.linears import WIDTH

LOW = of(d_f=1)
BY_CHANNEL = chunked(d_e=CHUNK)  # pairs of a chunk's positions, for each channel of a key
# rows of a chunk's system and the squares above them, which solving one row after the other copies
SOLVED = chunked(n_v=sum(n + n * n for n in range(1, CHUNK)) / CHUNK)


def factors(left: Tensor, right: Tensor) -> list[Tensor]:
    """The factors that a product keeps: each where the other needs a gradient."""
    return [x for x, other in ((left, right), (right, left)) if other.differentiable]


class ChannelDelta(DeltaRule):
    """Writes the block of Kimi's delta attention."""

    def channel_delta(self, x: Tensor) -> Tensor:
        """The block from its normalised input to the output projection."""
        tape = self.tape
        parts = [self.linear(f"delta_{name}_proj", x, REPEATED) for name in "qkv"]
        y = self.convolved(tape.op("delta: join q, k, v", parts, CHANNELS, parts[0].b, aliases=parts))
        q, k, v = tape.split("delta: q, k, v", y, [REPEATED, REPEATED, VALUES])
        decay = self.forgetting(x)
        b = self.linear("delta_b_proj", x, GATES)
        beta = tape.op("delta: beta", [b], GATES, b.b, saves_out=True)
        rule = self.by_channel_kernels if self.run.linear_kernels else self.by_channel_operations
        mixed = rule(q, k, v, decay, beta)
        z = self.linear("delta_g_b_proj", self.linear("delta_g_a_proj", x, LOW), VALUES)
        out = self.sigmoid_norm(mixed, z)
        out = self.linear("delta_o_proj", out, WIDTH)
        tape.returns(x, q, decay, beta, mixed, z)
        return out

    def forgetting(self, x: Tensor) -> Tensor:
        """`-exp(A_log)·log(1 + exp(f + dt_bias))` in fp32, f from two projections; large f stay as they are."""
        tape, trained = self.tape, self.run.trained
        low = self.linear("delta_f_b_proj", self.linear("delta_f_a_proj", x, LOW), REPEATED)
        f = tape.op("delta: forget: bias", [self.cast(low, 4, "delta: forget")], REPEATED, 4,
                    weight=self.elements["delta_dt_bias"] if trained else 0)  # fmt: skip
        large = Tensor(REPEATED, 1)
        grown = tape.op("delta: forget: exponential", [f], REPEATED, 4, saves_out=True)
        more = tape.op("delta: forget: 1 more", [grown], REPEATED, 4)
        soft = tape.op("delta: forget: logarithm", [more], REPEATED, 4, saves=[more])
        soft = tape.op("delta: forget: where", [f, soft], REPEATED, 4, saves=[large])
        decay = tape.op("delta: decay", [soft], REPEATED, 4, saves=[soft] if trained else [],
                        backward_scratch=REPEATED * 4 if trained else NOTHING,
                        weight=self.elements["delta_A_log"] if trained else 0)  # fmt: skip
        tape.returns(low, f, soft)
        return decay

    def by_channel_kernels(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """`ChunkKDAFunction`, which norms queries and keys, copies values, and computes states again for its backward.

        It keeps them, decays as they came and summed, beta, and two rows of pairs. Forward has two more of keys and
        one of values, which its transform makes, corrected values, and a state for each chunk, beside queries and keys
        as they came. Backward is at its highest in `chunk_kda_bwd_intra`: all that again and queries so, states'
        gradients, those of queries, keys and decays in fp32 and twice, and of both kinds of pairs. Of the gradients
        that it leaves, only that of values is there by then.
        """
        b = q.b
        scales = [Tensor(GATES, 4) for _ in range(2)]
        pairs = [Tensor(of(n_v=CHUNK), b) for _ in range(2)]
        kept = [Tensor(REPEATED, b), Tensor(REPEATED, b), *scales, Tensor(VALUES, b)]
        again = (REPEATED * 2 + VALUES * 2 + STATES) * b
        later = REPEATED * (2 * b + 4)  # gradients of queries, keys and decays, as they are left
        back = (REPEATED + STATES) * b + REPEATED * (6 * 4) + of(n_v=CHUNK) * (2 * 4) + later * -1
        return self.tape.op(
            "delta: rule", [q, k, v, decay, beta], VALUES, b,
            saves=[*kept, Tensor(REPEATED, 4), decay, beta, *pairs],
            scratch=REPEATED * (2 * b) + again, backward_scratch=again + back,
        )  # fmt: skip

    def by_channel_operations(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """`chunk_kimi_delta_attention`: PyTorch's operations in fp32, then a loop over chunks."""
        tape, b = self.tape, q.b
        parts = {"q": q, "k": k, "v": v, "beta": beta, "decay": decay}
        wide = dict[str, Tensor]()
        for name, x in parts.items():
            copied = tape.op(f"delta: {name}: contiguous", [x], x.width, x.b)
            wide[name] = self.cast(copied, 4, f"delta: {name}")
        before = list(wide.values())
        wide |= {name: self.unit(wide[name], name, "root") for name in "qk"}
        sizes = {"q": WHOLE_KEYS, "k": WHOLE_KEYS, "v": WHOLE_VALUES, "decay": WHOLE_KEYS, "beta": WHOLE_GATES}
        q = tape.op("delta: q: pad", [wide["q"]], WHOLE_KEYS, 4)
        q = tape.op("delta: q: scale", [q], WHOLE_KEYS, 4)
        k, v, decay, beta = (tape.op(f"delta: {n}: pad", [wide[n]], sizes[n], 4) for n in ("k", "v", "decay", "beta"))
        v_beta, k_beta = self.weighed_by(v, beta, "values times beta"), self.weighed_by(k, beta, "keys times beta")
        sums = tape.op("delta: sum decays", [decay], WHOLE_KEYS, 4)
        pairs = self.pairwise(sums, BY_CHANNEL)
        system = self.compared_by_channel(k_beta, k, pairs, "keys to keys")
        system = tape.op("delta: system: sign", [system], PAIRS, 4)
        rows = Tensor(SOLVED, 4)
        system = tape.op("delta: solve rows", [system], PAIRS, 4, view=True, saves=[rows], backward_scratch=PAIRS * 8)
        system = tape.op("delta: system: add one", [system], PAIRS, 4, aliases=[system])
        values = tape.op("delta: system times values", [system, v_beta], WHOLE_VALUES, 4, saves=[system, v_beta])
        grown = tape.op("delta: exponential", [sums], WHOLE_KEYS, 4, saves_out=True)
        decayed = tape.op("delta: decayed keys times beta", [k_beta, grown], WHOLE_KEYS, 4, saves=[k_beta, grown])
        keys = tape.op("delta: system times keys", [system, decayed], WHOLE_KEYS, 4, saves=[system, decayed])
        out = self.scanned_by_channel(values, keys, q, k, sums, pairs)
        copied = tape.op("delta: contiguous", [out], VALUES, 4)
        copied = self.cast(copied, b, "delta: output")
        tape.returns(*before[2:3], q, k, beta, v_beta, k_beta, sums, pairs, system, values, keys, out)
        return copied

    def compared_by_channel(self, left: Tensor, right: Tensor, decays: Tensor, name: str) -> Tensor:
        """The sum over channels of products of each two positions of a chunk and the decay between them."""
        tape = self.tape
        x = tape.op(f"delta: {name}", [left, right], BY_CHANNEL, 4, saves=factors(left, right),
                    backward_scratch=BY_CHANNEL * 4)  # fmt: skip
        x = tape.op(f"delta: {name}: decay", [x, decays], BY_CHANNEL, 4, saves=factors(x, decays))
        x = tape.op(f"delta: {name}: sum", [x], PAIRS, 4, aliases=[x])
        return tape.op(f"delta: {name}: mask", [x], PAIRS, 4)

    def scanned_by_channel(
        self, values: Tensor, keys: Tensor, q: Tensor, k: Tensor, sums: Tensor, pairs: Tensor
    ) -> Tensor:
        """The loop over chunks, which compares queries to keys, and keeps each chunk's state and corrected values.

        A chunk is a slice: backward fills a tensor of all chunks with zeros for its gradient, and adds that to the
        gradient so far.
        """
        compared = Tensor(BY_CHANNEL, 4, differentiable=q.differentiable or k.differentiable)
        within = Tensor(PAIRS, 4)
        states, corrected = Tensor(STATES, 4), Tensor(WHOLE_VALUES, 4)
        # decays from the first position and to the last, and queries and keys times these
        made = [Tensor(WHOLE_KEYS, 4) for _ in range(4)]
        return self.tape.op(
            "delta: scan", [values, keys, q, k, sums, pairs], WHOLE_VALUES, 4,
            saves=[keys, q, k, *factors(compared, pairs), within, states, corrected, *made],
            backward_scratch=BY_CHANNEL * 4,
        )  # fmt: skip

    def sigmoid_norm(self, x: Tensor, z: Tensor) -> Tensor:
        """`KimiLinearRMSNormGated`: each head is normed, weighed, and multiplied by a gate's sigmoid, all in fp32."""
        tape, name, trained = self.tape, "delta_o_norm", self.run.trained
        n = self.unweighed(self.cast(x, 4, name), name, GATES)
        y = tape.op(f"{name}: weight", [n], VALUES, 4, saves=[n] if trained else [],
                    backward_scratch=VALUES * 4 if trained else NOTHING,
                    weight=self.elements[name] if trained else 0)  # fmt: skip
        gate = tape.op("delta: gate", [self.cast(z, 4, "delta: gate")], VALUES, 4, saves_out=True)
        y = tape.op("delta: weigh", [y, gate], VALUES, 4, saves=[y, gate])
        return self.cast(y, x.b, name)
