"""Attention over a window and over entries made of more positions, on a tape (DeepSeek-V4).

All queries share one head of keys, which are its values, too; Transformers has eager attention alone. Read in
transformers 5.23 `models/deepseek_v4/modeling_deepseek_v4.py`. A sequence's last positions, too few for an entry, are
counted as the share of one that they are. See `calc.memory.activations` for the symbols.
"""

from __future__ import annotations

from calc.autograd.tape import Size, Tensor, of
from calc.memory.attention import Attention
from calc.memory.hyper import HyperConnections
from calc.memory.linears import WIDTH
from calc.memory.run import output_name, symbol


class CompressedAttention(HyperConnections, Attention):
    """Writes the attention block of such a layer."""

    def compressed_attention(self, x: Tensor) -> Tensor:
        """The block from its normalised input to the output projection (`DeepseekV4Attention`)."""
        tape, kv = self.tape, of(kv=1)
        low = self.norm(self.linear("q_a_proj", x, of(c_q=1)), "q_a_norm")
        q = self.rooted(self.heads(self.linear("q_b_proj", low, of(q=1)), "q: heads"), "q_b_norm", of(H=1))
        q = self.rotate(q, "q: rotate", [self.repeated_tables()])
        k = self.heads(self.norm(self.linear("kv_proj", x, kv), "kv_norm"), "kv: heads")
        k = self.rotate(k, "kv: rotate", [self.repeated_tables()])
        named = list[Tensor]()
        if self.spec.pools:
            entries, *named = self.made_entries(x)
            named.append(entries)
            k = tape.op("kv: join", [k, entries], kv * self.seen, k.b)
            named.append(tape.op("mask: join", [], Size({"S": self.seen}), self.run.residual))
        mixed = self.rotate(self.eager(q, k, k), "attention: rotate", [self.repeated_tables()])
        grouped = tape.op("attention: by group", [mixed], of(o=1), mixed.b)
        y = self.linear(output_name(self.arch), self.by_group(grouped), WIDTH)
        tape.returns(x, low, q, k, *named, mixed, grouped)
        return y

    def repeated_tables(self, share: float = 1) -> Tensor:
        """Cos and sin, which each rotation repeats for both of a pair; of entries, a `share` of the positions'."""
        return Tensor(Size({}, {"tables·S": share}), self.run.residual)

    def by_group(self, x: Tensor) -> Tensor:
        """The first output projection, of each group of heads for itself: its product is copied to lie by token."""
        tape, trained = self.tape, self.run.trained
        weight, copies = self.elements["o_a_proj"] if trained else 0, list[Tensor]()
        if self.run.copies:  # of a view, which autocast does not cache
            copies = [tape.op("o_a_proj: weight to bf16", [], Size({}, {symbol("o_a_proj"): 1}), 2, weight=weight)]
        source = self.cast(x, self.c, "o_a_proj") if self.autocast else x
        y = tape.op("o_a_proj", [*copies, source], of(o_r=1), self.c, saves=[*([source] if trained else []), *copies],
                    weight=0 if copies else weight, multiplies=True)  # fmt: skip
        return tape.op("o_a_proj: flatten", [y], y.width, y.b)

    def made_entries(self, x: Tensor) -> list[Tensor]:
        """The entries, each a sum of positions weighed by a softmax over them, and tensors that have names until then.

        Those of sparse layers are made of their own positions and of those of the entry before, which lie apart in two
        halves of a product and are copied beside each other (`DeepseekV4CSACompressor`, `DeepseekV4HCACompressor`).
        """
        tape, name, share = self.tape, self.spec.pools, self.seen - 1
        twice = name == "sparse"
        width = of(kv=2 if twice else 1)
        values, gate = (self.linear(f"{name}_{part}_proj", x, width) for part in ("kv", "gate"))
        b = max(gate.b, self.kept_bytes)
        bias = self.elements[f"{name}_position_bias"] if self.run.trained else 0
        biased = tape.op("pool: bias", [gate], width, b, aliases=[gate] if b == gate.b else [], weight=bias)
        named = [values, gate, biased]
        if twice:
            values, biased = (
                # gradients are written into whole copies, first of one half, then of the other
                tape.op(f"pool: {part}: overlap", [t], width, t.b, backward_scratch=t.size * 1.5)
                for part, t in (("values", values), ("gate", biased))
            )
            named += [values, biased]
        shares = tape.op("pool: softmax", [self.cast(biased, 4, "pool: softmax")], width, 4, saves_out=True)
        shares = self.cast(shares, values.b, "pool: shares")
        b = max(values.b, shares.b)
        each = tape.op("pool: weigh", [values, shares], width, b, saves=[values, shares])
        entries = tape.op("pool: sum", [each], of(kv=share), b, aliases=[each])
        entries = self.norm(entries, f"{name}_kv_norm", Size({"": share}))
        entries = self.rotate(entries, "pool: rotate", [self.repeated_tables(share)])
        if twice:
            named.append(self.chosen_entries(share))
        pairs = Size({"S": share})
        mask = tape.op("pool: mask", [], pairs, entries.b, scratch=pairs * (entries.b + 1))
        tape.returns(*named)
        return [entries, mask]

    def chosen_entries(self, share: float) -> Tensor:
        """The entries that the indexer chooses for each query, by fp32 scores of all pairs (`DeepseekV4Indexer`).

        It makes queries of its own and entries as the layer does. Scores are the product, its positive part and that
        times a number, then times a weight of each head: three are there at once. Of several sequences the product
        copies entries for every query. No gradients come back, as numbers of entries have none, but until it returns
        it keeps what they would need.
        """
        assert self.arch.compressed
        x = self.arch.compressed.indexer
        pairs = Size({"x·S": 3 * 4 * share, "S": 4 * share} | ({} if self.run.single else {"x_d·S": 4 * share}))
        own = of(x_q=4 + 2 * self.c) + of(x_d=2 * (3 * self.c + 4))
        return self.tape.op("indexer", [], Size({"": x.keys}), 8, scratch=pairs + own)
