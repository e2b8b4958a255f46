"""Attention on a tape: projections, rotation, the kernels, and the communication of context parallelism.

See `calc.memory.activations` for the symbols and for what was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import assert_never

from calc.autograd.tape import NOTHING, Course, Size, Tensor, of
from calc.memory.linears import WIDTH, Linears
from calc.memory.run import output_name

OUTPUT = of(o=1)


class Attention(Linears):
    """Writes the attention block of a decoder layer."""

    def rotate(self, x: Tensor, name: str, tables: Sequence[Tensor] = ()) -> Tensor:
        """`x·cos + rotate_half(x)·sin`: cos and sin are constants, so nothing of x is kept.

        All layers share cos and sin, unless a layer makes its own `tables`.
        """
        if not self.spec.rotated:
            return x
        if "rotation" in self.run.replaced:
            # in place on what lies by token, as gradients do but for those of scores that are written out; a slice of
            # a product is copied (liger-kernel 0.8.5 `ops/rope.py`, `rope_forward`, `rope_backward`)
            return self.tape.op(
                name, [x], x.width, x.b, view=not self.arch.fused_qkv, aliases=[] if self.run.whole_scores else [x]
            )
        if share := self.arch.rotary_dim / self.arch.head_dim:
            # both are slices, whose gradients are tensors of the whole width; joined again, gradients are slices
            part, rest = (
                self.tape.op(f"{name}: {which}", [x], x.width * each, x.b, view=True)
                for which, each in (("part", share), ("rest", 1 - share))
            )
            y = self.turned(part, name, tables)
            return self.tape.op(f"{name}: join", [y, rest], x.width, y.b, aliases=[y, rest])
        return self.turned(x, name, tables)

    def tables(self) -> list[Tensor]:
        """Cos and sin that a layer makes for itself: of every position, or picked for each token's."""
        arch, b = self.arch, self.run.residual
        if arch.rotary_picked:
            return [Tensor(Size({"D": 1}), 4) if arch.rotation == "stacked" else Tensor(Size({"D": 2}), b)]
        b = 4 if arch.rotation in ("fp32", "widened") else b
        return [Tensor(Size({}, {"tables·S": 1}), b)] if arch.rotary_tables else []

    def turned(self, x: Tensor, name: str, tables: Sequence[Tensor] = ()) -> Tensor:
        """The operations of a rotation."""
        if self.arch.rotation == "complex":
            return self.turned_pairs(x, name)
        if self.arch.rotation == "stacked":
            return self.turned_halves(x, name, tables)
        if self.arch.rotation == "axes":
            return self.turned_axes(x, name)
        fp32 = self.arch.rotation == "fp32"
        b = 4 if fp32 or self.arch.rotation == "widened" else max(x.b, self.run.residual)
        passing, whole = x.width * (3 * b), x.width * b
        # x·cos, half of x negated, both halves joined, that times sin, their sum
        course = (whole, whole * 0.5, whole, 1, whole, 2, None)
        # the gradient times sin, half of it negated, two halves within zeros, their sum, and the gradient times cos
        back = (whole, whole * 0.5, whole, 1, whole, 0, 3, None)
        y = self.tape.op(name, [x], x.width, b, saves=tables, scratch=passing, backward_scratch=passing,
                         course=course, backward_course=back)  # fmt: skip
        return self.cast(y, x.b, name) if fp32 else y

    def turned_axes(self, x: Tensor, name: str) -> Tensor:
        """Half of a head by a patch's column, half by its row (`apply_multidimensional_rope` of Gemma 4's tower)."""
        half, b = x.width * 0.5, max(x.b, self.run.residual)
        turned = list[Tensor]()
        for axis, part in zip(("column", "row"), self.tape.split(f"{name}: axes", x, [half, half]), strict=True):
            passing, whole = half * (3 * b), half * b
            turned.append(self.tape.op(
                f"{name}: {axis}", [part], half, b, scratch=passing, backward_scratch=passing,
                course=(whole, whole * 0.5, whole, 1, whole, 2, None),
                backward_course=(whole, whole * 0.5, whole, 1, whole, 0, 3, None),
            ))  # fmt: skip
        return self.tape.op(f"{name}: join", turned, x.width, b)

    def turned_pairs(self, x: Tensor, name: str) -> Tensor:
        """Pairs of neighbours as complex numbers, times others of which the table consists; both types are fp32.

        torchtitan 0.2.2 `models/llama3/model/model.py`, `apply_rotary_emb`.
        """
        wide = self.cast(x, 4, name)
        return self.cast(self.tape.op(name, [wide], x.width, 4), x.b, name)

    def turned_halves(self, x: Tensor, name: str, tables: Sequence[Tensor]) -> Tensor:
        """Neighbours in fp32: two products, their difference, two more, their sum, and both stacked.

        In backward a select of each product becomes a tensor of the whole width, to which the next is added (torchtune
        0.4.0 `modules/position_embeddings.py`, `RotaryPositionalEmbeddings`).
        """
        half, whole = x.width * 2, x.width * 4
        y = self.tape.op(
            name, [self.cast(x, 4, name)], x.width, 4, saves=tables,
            scratch=half * 2, backward_scratch=whole + half * 2,
            course=(half, half, half, 0, 1, half, half, half, 3, 4, None),
            backward_course=(half, half, None, 0, whole, 1, half, half, 3, whole, 4),
        )  # fmt: skip
        return self.cast(y, x.b, name)

    def heads(self, x: Tensor, name: str) -> Tensor:
        """A view of each head; the gradient that rotation makes lies head by head, and is copied to lie by token."""
        copied = self.spec.rotated and not self.arch.by_token and "rotation" not in self.run.replaced
        return self.tape.op(name, [x], x.width, x.b, view=True) if copied else x

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, ...]:
        """The projections, QK norm and rotation of plain, fused (Phi-3) and grouped-query attention.

        Returns queries, keys and values, then any other tensor that a variable of the block names to its end.
        """
        tape, arch = self.tape, self.arch
        q_width, kv_width = of(q=1), of(kv=1)
        named = list[Tensor]()
        if arch.fused_qkv:
            qkv = self.linear(arch.names.qkv, x, of(q=1, kv=2))
            if arch.fused_qkv in ("expanded", "picked"):
                q, k, v = self.falcon_heads(qkv)
                named = [qkv]
            elif arch.fused_qkv == "quartered":
                parts = tape.split("q, v, k", qkv, [q_width, kv_width, kv_width])
                q, v, k = (tape.op(f"{n}: heads", [x], x.width, x.b) for n, x in zip("qvk", parts, strict=True))
                named = [qkv]
            elif arch.fused_qkv == "split":
                q, k, v = tape.split("q, k, v", qkv, [q_width, kv_width, kv_width])
            else:
                q, k, v = (tape.op(f"{n}: slice", [qkv], w, qkv.b, view=True) for n, w in _named(q_width, kv_width))
        else:
            if arch.output_gate == "joined":
                q, gate = tape.split("q, gate", self.linear(arch.names.q, x, q_width * 2), [q_width, q_width])
                named = [tape.op("gate: contiguous", [gate], q_width, gate.b)]
            else:
                q = self.heads(self.linear(arch.names.q, x, q_width), "q: heads")
            if self.spec.borrows:
                return self.borrowed(q)
            k = self.heads(self.linear(arch.names.k, x, kv_width), "k: heads")
            k = self.tape.op("k: scale", [k], kv_width, k.b) if arch.multipliers else k
            v = k if arch.keys_as_values else self.linear(arch.names.v, x, of(v=1) if arch.value_dim else kv_width)
            v = tape.op("v: scale", [v], v.width, v.b) if arch.values_scaled else v
            if arch.output_gate == "apart":
                named = [self.linear("attn_gate_proj", x, q_width)]
        if arch.values_normed:
            v = self.unweighed_heads(v, "v: norm", of(K=1))
        if arch.qk_norm and not arch.qk_norm_late:
            q, k = self.normed(q, k)
        tables = self.tables()
        rotated = (
            self.rotate(q, "q: rotate", tables),
            self.rotate(k, "k: rotate", self.tables() if arch.rotary_picked else tables),
        )
        tape.returns(q, k)
        if arch.qk_norm and arch.qk_norm_late and (self.spec.rotated or arch.qk_norm != "bare"):
            rotated = self.normed(*rotated)
        if arch.tuned and not self.spec.rotated:
            queries = tape.op("q: tune", [rotated[0]], q_width, 4)
            rotated = self.cast(queries, rotated[0].b, "q: tune"), rotated[1]
        return *rotated, v, *named

    def borrowed(self, q: Tensor) -> tuple[Tensor, ...]:
        """Queries beside the keys and values of a lower layer, which are counted there (Gemma 4)."""
        rotated = self.rotate(self.norm(q, self.arch.names.q_norm, of(H=1)), "q: rotate")
        self.tape.returns(q)
        k, v = (self.elsewhere(f"{n}: borrow", of(kv=1), b) for n, b in (("k", rotated.b), ("v", self.c)))
        k.differentiable = v.differentiable = True
        return rotated, k, v

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Norms of queries and of keys, head by head or over all heads."""
        if self.arch.qk_norm == "bare":
            return self.unweighed_heads(q, "q: norm", of(H=1)), self.unweighed_heads(k, "k: norm", of(K=1))
        names = self.arch.names
        if self.arch.qk_norm == "apart":
            return self.normed_apart(q, names.q_norm, of(H=1)), self.normed_apart(k, names.k_norm, of(K=1))
        rows = (None, None) if self.arch.qk_norm == "width" else (of(H=1), of(K=1))
        return self.norm(q, names.q_norm, rows[0]), self.norm(k, names.k_norm, rows[1])

    def normed_apart(self, x: Tensor, name: str, rows: Size) -> Tensor:
        """PyTorch's norm of each head, whose outputs are joined; so are their inputs' gradients.

        Transformers 5.23 `models/stablelm/modeling_stablelm.py`, `StableLmLayerNormPerHead`.
        """
        x = self.cast(x, 4, name) if self.autocast else x
        kept, own = [x, Tensor(rows, 8)], self.norm_weight(name)
        return self.tape.op(name, [x], x.width, x.b, saves=kept, scratch=x.size, backward_scratch=x.size, weight=own)

    def unweighed_heads(self, x: Tensor, name: str, rows: Size) -> Tensor:
        """A norm of each head without weights."""
        return self.cast(self.unweighed(self.cast(x, 4, name), name, rows), x.b, name)

    def falcon_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Falcon's `_split_heads`: groups of queries, a key and a value, both written out for every query but in 7B."""
        tape, q, kv = self.tape, of(q=1), of(kv=1)
        sliced = tape.op("q: slice", [qkv], q, qkv.b, view=True)
        picked = [tape.op(f"{name}: pick", [qkv], kv, qkv.b) for name in "kv"]
        if self.arch.fused_qkv == "picked":
            return sliced, picked[0], picked[1]
        heads = tape.op("q: heads", [sliced], q, qkv.b, aliases=[sliced])
        k, v = (tape.op(f"{name}: expand", [x], q, qkv.b) for name, x in zip("kv", picked, strict=True))
        tape.returns(*picked)
        return heads, k, v

    def latent_queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """DeepSeek's multi-head latent attention: low ranks up and down, one rotated key for all heads."""
        tape, arch = self.tape, self.arch
        assert arch.mla is not None
        rope, heads_rope = of(rope=1), Size({"H·rope": 1})
        if arch.mla.q_lora_rank:
            low = self.norm(self.linear("q_a_proj", x, of(c_q=1)), "q_a_layernorm")
            states = self.linear("q_b_proj", low, of(q=1))
        else:
            states = self.linear("q_proj", x, of(q=1))
        rotated = self.spec.rotated
        halves = [of(q=1) + heads_rope * -1, heads_rope]
        q_pass, q_rot = tape.split("q: split", states, halves) if rotated else (states, states)
        low = self.linear("kv_a_proj_with_mqa", x, of(c_kv=1, rope=1))
        latent, k_rot = tape.split("kv: split", low, [of(c_kv=1), rope])
        latent = self.norm(latent, "kv_a_layernorm")
        q_rot, k_rot = self.rotate(q_rot, "q: rotate"), self.rotate(k_rot, "k: rotate")
        q = tape.op("q: join", [q_pass, q_rot], of(q=1), q_rot.b) if rotated else states
        q = tape.op("q: tune", [q], of(q=1), q.b) if arch.tuned else q
        expanded = self.linear("kv_b_proj", latent, of(kvb=1))
        k_pass, v = tape.split("k: split", expanded, [of(kvb=1, o=-1), of(o=1)])
        k = tape.op("k: join", [k_pass, k_rot], of(q=1), k_rot.b)
        if arch.indexer:
            self.chosen()
        return q, k, v

    def chosen(self) -> None:
        """DeepSeek V3.2's indexer, whose scores of all pairs are fp32.

        Of several sequences a product copies the keys for every query, of one it reads them again and again.
        Nothing is kept of it, and no gradients are made: it runs without them (transformers 5.23
        `models/deepseek_v32/modeling_deepseek_v32.py`, `DeepseekV32Indexer`). A layer that chooses no keys makes the
        mask of those that one below it has chosen (`models/glm_moe_dsa`, `GlmMoeDsaAttention`).
        """
        if not self.spec.chooses:
            self.tape.returns(self.tape.op("indexer: mask", [], Size({"S": 1}), 1, scratch=Size({"S": 1})))
            return
        pairs = Size({"x·S": 4, "S": 1} | ({} if self.run.single else {"x_d·S": 4}))  # scores, the mask, copied keys
        # its queries, joined and in fp32; attention's before they were rotated, and what was
        named = of(x_q=8, q=2) + Size({"H·rope": 2})
        mask = self.tape.op("indexer", [], Size({"S": 1}), 1, scratch=pairs + named)
        self.tape.returns(mask)

    def attention(self, x: Tensor) -> Tensor:
        """The attention block from its normalised input to the output projection."""
        x = self.gathered(x, "attention")
        latent = self.spec.mixer == "latent"
        q, k, v, *named = self.latent_queries_keys_values(x) if latent else self.queries_keys_values(x)
        attend = self.sloped if self.arch.slopes else self.eager if self.run.whole_scores else self.fused
        attend = self.mathematics if self.run.kernel == "math" else attend
        mixed = attend(q, k, v)
        if self.arch.output_gate == "heads":
            mixed = self.weighed_heads(x, mixed)
        elif self.arch.output_gate:
            gate = self.tape.op("gate: sigmoid", [named[-1]], of(q=1), named[-1].b, saves_out=True)
            mixed = self.tape.op("gate: weigh", [mixed, gate], of(q=1), mixed.b, saves=[mixed, gate])
        y = self.block_output(self.linear(output_name(self.arch), mixed, WIDTH), "attention")
        self.tape.returns(x, q, k, v, *named)
        return y

    def weighed_heads(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Each head's output times the softplus of a number in fp32, whose gradient is first as wide as the heads.

        Transformers 5.23 `models/laguna/modeling_laguna.py`, `LagunaAttention.forward`.
        """
        numbers = self.cast(self.linear("g_proj", x, of(H=1)), 4, "gate: cast")
        gate = self.tape.op("gate: softplus", [numbers], of(H=1), 4, saves=[numbers])
        gate = self.cast(gate, mixed.b, "gate")
        return self.tape.op(
            "gate: weigh", [mixed, gate], of(q=1), mixed.b, saves=[mixed, gate], backward_scratch=of(q=mixed.b)
        )

    def repeat(self, x: Tensor, width: Size, name: str) -> Tensor:
        """`repeat_kv`: a copy for every query head where heads share keys and values, a view where all share one.

        Eager attention's product copies such a view of several sequences itself, and reads that of one again and again.
        """
        if not self.arch.grouped or self.reads_again:
            return x
        copied = self.run.whole_scores and not (self.arch.compressed and self.run.single)
        one = self.arch.kv_heads == 1 and not copied and not self.arch.repeated
        return self.tape.op(f"{name}: repeat", [x], width, x.b, view=one)

    @property
    def reads_again(self) -> bool:
        """True if products of scores read a lone key and value again for each head, whose gradients they add up."""
        return self.arch.fused_qkv == "picked" and self.run.single and self.run.whole_scores

    @property
    def seen(self) -> float:
        """Keys of a layer over its positions: entries that are made of several come on top."""
        own = self.arch.compressed
        return 1 + 1 / own.rate(self.spec.pools) if own and self.spec.pools else 1

    def product_of_scores(self, name: str, x: Tensor, y: Tensor, out: Size, heads: Size, b: float) -> Tensor:
        """A product of `heads` with keys or values, or of scores with these, which keeps both."""
        summed = heads * b if self.reads_again else NOTHING
        return self.tape.op(name, [x, y], out, b, saves=[x, y], backward_scratch=summed)

    def in_compute_type(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors as autocast hands them to a kernel or a product; a view of repeated heads is copied."""
        return [self.cast(t, self.c, n) for t, n in zip(tensors, "qkv", strict=True)]

    @property
    def sinks(self) -> int:
        """Elements of GPT-OSS's sinks, one a head; 0 if they are not trained."""
        return self.elements.get("sinks", 0) if self.run.trained else 0

    def fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """FlashAttention, or the memory-efficient kernel that SDPA takes under a mask, in fp32 or for unequal heads.

        Keeps q, k, v, the output and a log-sum-exp in fp32 per head. Flash's backward accumulates dq in fp32 and,
        with grouped queries, dk and dv for every query head before they are summed.
        """
        tape, arch = self.tape, self.arch
        if self.run.kernel != "flash" or arch.repeated:
            k, v = self.repeat(k, of(q=1), "k"), self.repeat(v, of(o=1), "v")
        q, k, v = self.in_compute_type(q, k, v)
        if self.run.context > 1:
            return self.across_ranks(q, k, v)
        # queries that a concatenation made lie head by head, and so does flash's output, which o_proj then copies
        rotated = self.spec.rotated and "rotation" not in self.run.replaced
        partly = arch.rotary_dim > 0 and not arch.by_token
        joined = rotated and (arch.mla is not None or arch.rotation == "joined" or partly)
        joined = joined or (arch.pieces and not self.run.packaged)
        if self.run.kernel == "flash":
            sums = self.accumulators(grouped=arch.grouped and not arch.repeated)
            if arch.v_dim < arch.head_dim and not arch.modeling:
                return self.filled_up(q, k, v, sums)
            out = self.kernel(q, k, v, sums, course=(None, sums))
            return tape.op("attention: contiguous", [out], of(o=1), self.c) if joined else out
        mask = [Tensor(of(**{"S": 1}), self.c)] if self.run.kernel == "masked" else []
        return self.kernel(q, k, v, of(H=4) + (of(q=4) if self.c == 2 else NOTHING), mask=mask)

    def filled_up(self, q: Tensor, k: Tensor, v: Tensor, sums: Size) -> Tensor:
        """FlashAttention on values that are narrower than queries: filled up to their width, and the output cropped.

        transformers 5.23 `integrations/flash_attention.py:75`.
        """
        tape = self.tape
        wide = tape.op("v: pad", [v], of(q=1), v.b)
        out = self.kernel(q, k, wide, sums, course=(None, sums), out=of(q=1))
        cropped = tape.op("attention: crop", [out], of(o=1), out.b, view=True)
        return tape.op("attention: contiguous", [cropped], of(o=1), self.c)

    def across_ranks(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention to the positions of other ranks, too, in the way that the framework exchanges them."""
        assert self.run.exchange, "a run of several context-parallel ranks says how they exchange positions"
        match self.run.exchange:
            case "all-to-all":
                return self.all_to_all(q, k, v)
            case "all-gather":
                return self.all_gather(q, k, v)
            case "ring":
                return self.ring(q, k, v)
            case "zigzag":
                return self.zigzag(q, k, v)
            case other:
                assert_never(other)

    def kernel(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        backward: Size,
        *,
        scratch: Size = NOTHING,
        mask: Sequence[Tensor] = (),
        course: Course = (),
        out: Size = OUTPUT,
    ) -> Tensor:
        """Attention in one operation, with its temporaries: `scratch` in forward, `backward` in backward."""
        lse = Tensor(of(H=1), 4)
        spared = None if self.run.packaged else [lse]
        return self.tape.op("attention", [q, k, v], out, self.c, saves=[q, k, v, lse, *mask], saves_out=True,
                            scratch=scratch, backward_scratch=backward, backward_course=course, weight=self.sinks,
                            spared=spared, multiplies=True)  # fmt: skip

    def accumulators(self, *, grouped: bool) -> Size:
        """The sums of flash's backward: dq in fp32 and, with grouped queries, dk and dv for every query head."""
        return of(q=4, H=4) + (of(q=2, o=2) if grouped else NOTHING)

    def all_to_all(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Ulysses: each rank attends to all positions with some heads; keys and values are repeated to one a rank.

        An exchange cuts its input into pieces, receives as many and joins them: three copies (verl `utils/ulysses.py`,
        `all_to_all_tensor`, `models/transformers/monkey_patch.py`, 0.9.0).
        """
        tape, repeats, exchanged = self.tape, max(1, self.run.context // self.arch.kv_heads), self.exchanged
        if repeats > 1:
            k, v = (tape.op(f"{n}: repeat", [x], x.width * repeats, x.b) for n, x in (("k", k), ("v", v)))
        q, k, v = exchanged(q, "q"), exchanged(k, "k"), exchanged(v, "v")
        grouped = self.arch.heads > self.arch.kv_heads * repeats
        return exchanged(self.kernel(q, k, v, self.accumulators(grouped=grouped)), "attention")

    def exchanged(self, x: Tensor, name: str) -> Tensor:
        """Heads for positions, or positions for heads."""
        return self.tape.op(f"{name}: all-to-all", [x], x.width, x.b, scratch=x.size * 2, backward_scratch=x.size * 2)

    def zigzag(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """ms-swift: Ulysses among as many ranks as divide both their number and the key heads, a ring of the others.

        In the ring a rank has an early and a late piece of each sequence. Queries, keys and values are masked into
        copies, beside which what was given and exchanged are variables. Forward merges outputs in fp32: the one so far,
        the next, also in 16 bits, their difference and its share; keys and values that attend come with the next ones',
        and half of them are picked. Backward runs every step's forward again and keeps its merged output and its own,
        then makes a gradient of each step's output in fp32, and sums those of queries, keys and values in fp32, the
        latter in buffers that go, come and are made. Counted is the last rank, which has all its queries in every step
        (ms-swift 4.6.0 `sequence_parallel/{ulysses,sequence_parallel,zigzag_ring_attn}.py`, the same in 3.9.0).
        """
        tape, c = self.tape, self.c
        heads = gcd(self.arch.kv_heads, self.run.context)
        steps, given = self.run.context // heads, (q, k, v)
        if heads > 1:
            q, k, v = (self.exchanged(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
        if steps == 1:
            out = self.kernel(q, k, v, self.accumulators(grouped=self.arch.heads > self.arch.kv_heads))
            out = self.exchanged(out, "attention")
            tape.returns(*given)
            return out
        before = q, k, v
        q, k, v = (tape.op(f"{n}: mask", [x], x.width, c) for x, n in ((q, "q"), (k, "k"), (v, "v")))
        picked, pair = of(q=c / 2), of(kv=2 * c)  # late queries; keys and values
        passed = pair * 2.5  # those that attend, the next, and half of these picked
        merged = of(q=4 * 4 + c, H=4 * 4)
        again = of(q=(4 + c) * steps + 4 * steps, H=4 * 5 * steps)
        # flash's own of half of the keys, the gradients that it writes, those in fp32, a step's in 16 bits
        flash = of(q=4, H=4) + (of(q=c / 2, o=c / 2) if self.arch.grouped else NOTHING)
        summed = of(q=4 + c + c, kv=2 * c + 3 * 2 * 4)
        out = self.kernel(q, k, v, again + summed + flash + passed + picked, scratch=merged + passed + picked)
        if heads > 1:
            out = self.exchanged(out, "attention")
        tape.returns(*given, *before)
        return out

    def all_gather(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Each rank attends with its own queries, one key head after another, whose positions are gathered meanwhile.

        Forward has two buffers of keys and values of that head; backward has one more for their gradients, and flash's
        own accumulators for the head's queries, keys and values (ring_flash_attn 0.1.8 `llama3_flash_attn_varlen.py`).
        """
        head = Size({"D": 1})
        positions, grouped = self.run.context, self.arch.heads // self.arch.kv_heads
        buffers = head * (2 * 2 * positions * self.c) + head * (2 * self.c)
        gradients = head * (2 * positions * self.c) + head * (2 * self.c)
        flash = head * (4 * grouped) + (head * (2 * positions * grouped * self.c) if grouped > 1 else NOTHING)
        return self.kernel(q, k, v, buffers + gradients + flash, scratch=of(o=self.c) + buffers)

    def ring(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """PyTorch's ring: each rank attends with its own queries to the ranks' keys and values in turn.

        All are gathered first, PyTorch's default way of passing them on. Forward merges outputs in fp32: the one so
        far, the next, and their difference twice, beside the next in 16 bits. Backward sums gradients in fp32, those of
        keys and values in one buffer that comes and one that goes, beside the gradients that the kernel makes now and
        made before. To balance the work a rank has two pieces of a sequence: the lower the rank, the earlier the first
        piece and the later the second. Counted is a rank between the first and the last: it meets the keys of another
        rank's first piece, then has queries of its own second piece alone, whose output it joins head by head, so that
        o_proj takes a copy (torch 2.13 `distributed/tensor/experimental/_context_parallel/_attention.py`,
        `_templated_ring_attention`).
        """
        gathered = of(kv=2 * self.c * self.run.context)
        merged = of(q=4 * 4, H=2 * 4)
        summed = of(q=4, kv=2 * 4) + of(kv=2 * 2 * 4)
        before = of(q=self.c, kv=2 * self.c) + of(kv=2 * self.c)  # gradients, and the keys and values as they were sent
        # the kernel's own, of all queries and the first half of another's positions, whose gradients are halves too
        kernel = of(q=4, H=4) + of(kv=-self.c)
        if self.arch.grouped:
            kernel += of(q=self.c)
        out = self.kernel(q, k, v, gathered + summed + before + kernel, scratch=gathered + merged)
        return self.tape.op("attention: contiguous", [out], of(o=1), self.c)

    def eager(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Scores and probabilities as real tensors: 6 bytes kept for each pair of tokens and head, and temporaries."""
        tape, scores, seen = self.tape, Size({"H·S": self.seen}), self.seen
        if self.arch.masks_positions and not self.run.single:
            q = tape.op("q: copy", [q], q.width, q.b)  # StarCoder's, a slice that a product of several sequences copies
        k, v = self.repeat(k, of(q=seen), "k"), self.repeat(v, of(o=seen), "v")
        b: float = 4 if self.arch.wide_scores and not self.autocast else self.c
        q, k, v = self.read_wide(q, k, v) if self.arch.wide_scores else self.in_compute_type(q, k, v)
        x = self.product_of_scores("scores", q, k, scores, of(q=seen), b)
        x = tape.op("scores: scale", [x], scores, b, view=self.arch.own_eager)
        if self.arch.softcap_attn:
            x = tape.op("scores: over cap", [x], scores, self.c)
            x = tape.op("scores: tanh", [x], scores, self.c, saves_out=True)
            x = tape.op("scores: times cap", [x], scores, self.c)
        # the mask has the type of the residual stream
        b = max(x.b, self.run.residual)
        x = tape.op("scores: mask", [x], scores, b, aliases=[x] if b == x.b else [])
        x = self.at_least_bound(x) if self.arch.scores_bounded else x
        named = [x]  # by `attn_weights`, until the probabilities get that name
        if self.arch.lowered:
            # probabilities stay in the compute type, and a sink is a column of its own
            if self.arch.attention_sinks:
                scores, b = scores + of(H=1), 4 if self.run.keeps_wide else b
                x = tape.op("scores: join sink", [x], scores, b, weight=self.sinks)
            best = Tensor(of(H=1), 8)
            x = tape.op("scores: less maximum", [x], scores, b, saves=[best], aliases=[x],
                        backward_scratch=scores * b)  # fmt: skip
            low = x
            x = tape.op("softmax", [x], scores, b, saves_out=True)
            if self.arch.attention_sinks:
                x = tape.op("probabilities: drop sink", [x], scores, b, view=True)
            x = self.cast(x, self.c, "probabilities")
            tape.returns(*(named if self.arch.lowered == "beside" else []))
            named = [low]
        else:
            wide = self.softmax_bytes(x)
            # PyTorch's kernel reads fp16 as it is (torch `native/SoftMax.cpp`, `half_to_float`)
            x = x if self.run.half else self.cast(x, wide, "softmax")
            x = tape.op("softmax", [x], scores, wide, saves_out=True)
            x = self.cast(x, self.c, "probabilities")
        if self.arch.attention_dropout:
            x = self.dropped_out(x, "probabilities")
        tape.returns(*named)
        # the decoder layer gets the probabilities too, and keeps them as `_`
        tape.hold(x)
        mixed = self.product_of_scores("values", x, v, of(o=1), of(o=seen), self.c)
        return tape.op("attention: contiguous", [mixed], of(o=1), self.c)

    def read_wide(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """GPT-J's queries and keys in fp32, and values, head by head: a product of several sequences copies all three.

        Transformers 5.23 `models/gptj/modeling_gptj.py`, `GPTJAttention._attn`; so does GPT-Neo, `models/gpt_neo`.
        """
        read = [self.cast(q, 4, "q"), self.cast(k, 4, "k"), v]
        read = self.in_compute_type(*read) if self.autocast else read
        if self.run.single:
            return read
        return [self.tape.op(f"{n}: copy", [x], x.width, x.b) for n, x in zip("qkv", read, strict=True)]

    def mathematics(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """SDPA's plain mathematics, all of it in fp32: queries and keys are scaled before their product.

        A row of scores that is masked as a whole becomes 0: the softmax is a tensor, and so is what takes its place
        (torch 2.13 `native/transformers/attention.cpp`, `_scaled_dot_product_attention_math`, `SoftMax.cpp`,
        `_safe_softmax`).
        """
        tape, scores = self.tape, Size({"H·S": 1})
        q, k, v = wide = [self.cast(x, 4, n) for n, x in zip("qkv", self.in_compute_type(q, k, v), strict=True)]
        q = tape.op("q: scale", [q], q.width, 4)
        if self.arch.fused_qkv == "picked":  # a product of several sequences copies keys and values for each head
            k = self.repeat(tape.op("k: scale", [k], k.width, 4), of(q=1), "k")
        else:
            k = tape.op("k: scale", [self.repeat(k, of(q=1), "k")], of(q=1), 4)
        v = self.repeat(v, of(o=1), "v")
        x = self.product_of_scores("scores", q, k, scores, of(q=1), 4)
        x = tape.op("scores: mask", [x], scores, 4, view=True)
        x = tape.op("softmax", [x], scores, 4, saves_out=True, scratch=scores * 4)
        x = self.dropped_out(x, "probabilities") if self.arch.attention_dropout else x
        mixed = self.product_of_scores("values", x, v, of(o=1), of(o=1), 4)
        tape.returns(*wide)
        return self.by_token(mixed)

    def by_token(self, mixed: Tensor) -> Tensor:
        """The output of plain mathematics in the compute type, laid out by token."""
        return self.tape.op("attention: contiguous", [self.cast(mixed, self.c, "values")], of(o=1), self.c)

    def at_least_bound(self, scores: Tensor) -> Tensor:
        """The larger of masked scores and the least number of their type, which keeps the scores.

        Backward makes two masks and half of the gradient (torch `derivatives.yaml`, `maximum`).
        """
        w, b = scores.width, scores.b
        return self.tape.op("scores: bound", [scores], w, b, saves=[scores], backward_scratch=w * (b + 2))

    def softmax_bytes(self, scores: Tensor) -> float:
        """Bytes of an element of eager attention's softmax."""
        if self.arch.own_eager:
            return self.run.residual
        narrow = self.arch.narrow_softmax == "always" or (self.arch.narrow_softmax and not self.run.half)
        return scores.b if narrow and not self.autocast else 4

    def sloped(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Eager attention whose scores fall with distance (ALiBi).

        BLOOM copies queries, keys and values head by head, and keeps a name on the scores; MPT's slopes are fp32, and
        so are the scores from there on. Transformers 5.23 `models/bloom/modeling_bloom.py`, `models/mpt/`.
        """
        tape, scores, wide = self.tape, Size({"H·S": 1}), self.arch.slopes == "added"
        if not wide:
            q, k, v = (tape.op(f"{n}: copy", [t], t.width, t.b) for n, t in zip("qkv", (q, k, v), strict=True))
        q, k, v = self.in_compute_type(q, k, v)
        made = x = tape.op("scores", [q, k], scores, self.c, saves=[q, k])
        if wide:
            x = tape.op("scores: scale", [x], scores, self.c)
            x = tape.op("scores: slope", [x], scores, 4, aliases=[x] if x.b == 4 else [])
            x = tape.op("scores: mask", [x], scores, 4)  # all layers keep one mask
        else:
            x = tape.op("scores: mask", [x], scores, self.c, aliases=[x])
        masked = x = self.cast(x, 4, "softmax")
        x = self.cast(tape.op("softmax", [x], scores, 4, saves_out=True), self.c, "probabilities")
        x = self.dropped_out(x, "probabilities") if self.arch.attention_dropout else x
        tape.returns(*([masked] if wide else [made, masked]))
        tape.hold(x)  # the layer gets the probabilities, too
        mixed = tape.op("values", [x, v], of(o=1), self.c, saves=[x, v])
        return tape.op("attention: contiguous", [mixed], of(o=1), self.c)


def _named(q: Size, kv: Size) -> tuple[tuple[str, Size], ...]:
    return ("q", q), ("k", kv), ("v", kv)
