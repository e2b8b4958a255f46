"""Megatron-core's own layers on a tape: fused norms and products, fused activations, dropout with bias and residual.

Both of its specs are written: Transformer Engine's modules, and the `local` one, whose attention keeps probabilities.
A layer keeps the input of each norm, the norm's output, which the product behind it multiplies, queries, keys and
values in one tensor, attention's output with its log-sum-exp, and the input and output of the activation: for the first
GPT's layer with dropout 34·h bytes a token. Read in Megatron-LM d98e8a64dd `megatron/core/transformer/
{transformer_layer,attention,dot_product_attention,mlp}.py`, `fusions/fused_bias_{gelu,swiglu,dropout}.py`,
`tensor_parallel/{layers,cross_entropy}.py`, and TransformerEngine `pytorch/module/{layernorm_linear,linear}.py`,
`pytorch/attention/dot_product_attention/backends.py`.
"""

from __future__ import annotations

from calc.autograd.tape import NOTHING, Size, Tape, Tensor, of, total
from calc.memory.megatron_adapters import BF16
from calc.memory.megatron_beside import MegatronBeside
from calc.memory.megatron_delta import MegatronDelta
from calc.memory.megatron_scores import MegatronScores
from calc.memory.megatron_ssm import MegatronStateSpace


class MegatronLayer(MegatronBeside, MegatronDelta, MegatronStateSpace, MegatronScores):
    """Writes one of Megatron-core's layers, or its final norm."""

    def layer(self) -> Tape:
        """A layer: attention and MLP, each behind a norm, each added to the residual stream with bias and dropout."""
        norms, x = self.arch.norms, self.input
        if self.spec.mixer != "none":
            x = self.mixed(x, norms.attention)
        if self.spec.mlp != "none":
            self.feed_forward(x, norms.mlp)
        return self.tape.renamed(self.marks)

    def mixed(self, x: Tensor, norm: str) -> Tensor:
        """The block in which positions see each other, from the residual stream to the residual stream."""
        match self.spec.mixer:
            case "latent":
                return self.latent(x, norm)
            case "delta":
                return self.delta_rule(x, norm)
            case "ssm":
                return self.state_space(x, norm)
            case _:
                return self.attention(x, norm)

    def final_norm(self) -> Tape:
        """The norm between the last layer and the head."""
        self.normed(self.input, self.arch.names.final_norm)
        return self.tape

    def attention(self, x: Tensor, norm: str) -> Tensor:
        """The attention block, from the residual stream to the residual stream."""
        tape = self.tape
        n = self.normed(x, norm)
        queries, keys, values, gate = self.projected(n)
        tape.returns(n)
        normed = self.arch.qk_norm not in ("", "bare") or (self.arch.qk_norm == "bare" and self.spec.rotated)
        if normed:  # before the rotation, which leaves the length of what has no weights as it is (Llama 4)
            queries, keys = self.head_norm(queries, "q_norm", of(H=1)), self.head_norm(keys, "k_norm", of(K=1))
        if self.arch.values_normed:
            values = self.values_norm(values)
        if self.spec.rotated:
            queries, keys = self.rotated(queries, "q"), self.rotated(keys, "k")
        if self.run.whole_scores:
            context = self.unfused(queries, keys, values)
        elif not (self.arch.grouped or normed or self.spec.rotated):
            context = self.fused(queries, keys, values)
        else:
            # only where all three still lie in one tensor as the kernels know it (`get_qkv_layout`, sbh3d)
            context = self.fused(queries, keys, values, (normed or self.spec.rotated, self.arch.values_normed))
        if gate:
            # one compiled kernel with a sigmoid in fp32 (`_apply_output_gate`)
            context = tape.op("attention: gate", [context, gate], of(q=1), BF16, saves=[context, gate])
        y = self.row("linear_proj", context, self.trained_elements("o_proj"))
        if after := self.arch.norms.attention_output:
            y = self.normed(y, after)
        if self.arch.o_bias and self.arch.expert_bias:
            # by itself, as experts' biases go with no fused kernel (`bias_dropout_fusion` of `TEGroupedMLP`)
            y = self.tape.op("attention: bias", [y], self.stream, BF16, aliases=[y])
        return self.added(x, y, "attention")

    def projected(self, n: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values, and the gate of attention's output if there is one, out of one product.

        Queries of a group, and their gates, lie together: `reshape` to heads copies them. In mcore-bridge each query
        lies beside its gate, so that what is copied stays whole (1.6.5 `model/modules/gated_self_attention.py`).
        """
        tape, q, kv = self.tape, of(q=1), of(kv=1)
        weight, heads = self.trained_elements("q_proj", "k_proj", "v_proj"), self.arch.kv_heads > 1
        if self.arch.keys_as_values:  # one product makes both (Gemma 4)
            queries, keys = tape.split("q, k", self.column("linear_qkv", n, of(q=1, kv=1), weight), [q, kv])
            return self.in_groups(queries, "q", self.arch.grouped), keys, keys, None
        if not self.arch.output_gate:
            joined = self.column("linear_qkv", n, of(q=1, kv=2), weight)
            queries, keys, values = tape.split("q, k, v", joined, [q, kv, kv])
            return self.in_groups(queries, "q", self.arch.grouped), keys, values, None
        joined = self.column("linear_qkv", n, of(q=2, kv=2), weight)
        if self.arch.delta and self.arch.delta.by_head:
            both, keys, values = tape.split("q and gate, k, v", joined, [q * 2, kv, kv])
            queries, gate = tape.split("q, gate", self.in_groups(both, "q", heads), [q, q])
            return tape.op("q: contiguous", [queries], q, BF16), keys, values, gate
        queries, gate, keys, values = tape.split("q, gate, k, v", joined, [q, q, kv, kv])
        queries, gate = self.in_groups(queries, "q", self.arch.grouped), self.in_groups(gate, "gate", heads)
        return queries, keys, values, gate

    def in_groups(self, x: Tensor, name: str, copied: bool) -> Tensor:
        """A tensor that lies group by group, head by head, for which it may have to be `copied`."""
        return self.tape.op(f"{name}: heads", [x], x.width, BF16) if copied else x

    def latent(self, x: Tensor, norm: str) -> Tensor:
        """Multi-head latent attention: products down to low ranks, a norm of each, and products up to the heads.

        Every rank makes the whole of the low ranks, with sequence parallelism for its own positions. Rotation leaves
        new queries; keys are joined with the one rotary key that all heads share, and values copied (`megatron/core/
        transformer/multi_latent_attention.py`, `MLASelfAttention.get_query_key_value_tensors`).
        """
        tape, low, share = self.tape, self.arch.mla, self.run.share
        assert low
        begins = len(tape.ops)
        n = self.normed(x, norm)
        normed, down = len(tape.ops), n
        if low.q_lora_rank:
            down = self.whole_product("linear_q_down_proj", n, of(c_q=share), "q_a_proj")
        joined = self.whole_product("linear_kv_down_proj", n, of(c_kv=share, rope=share), "kv_a_proj_with_mqa")
        compressed, rotary = tape.split("kv, rotary key", joined, [of(c_kv=share), of(rope=share)])
        if self.run.sequences:
            rotary = tape.op("rotary key: gather", [rotary], of(rope=1), BF16)
        first = len(tape.ops)
        queries, keys, values = self.up(down, compressed, rotary)
        tape.returns(n)
        end = len(tape.ops)
        context = (self.unfused if self.run.whole_scores else self.fused)(queries, keys, values)
        self.behind("mla_up_proj", first, end)
        y = self.row("linear_proj", context, self.trained_elements("o_proj"))
        self.behind("layernorm", begins, normed)
        return self.added(x, y, "attention")

    def up(self, down: Tensor, compressed: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all heads from the low ranks, or queries from the norm's output itself."""
        tape, low = self.tape, self.arch.mla
        assert low
        if low.q_lora_rank:
            seen = self.normed(down, "q_a_layernorm")
            q = self.column("linear_q_up_proj", seen, of(q=1), self.trained_elements("q_b_proj"))
        else:
            q = self.column("linear_q_proj", down, of(q=1), self.trained_elements("q_proj"))
        kv = self.column(
            "linear_kv_up_proj",
            self.normed(compressed, "kv_a_layernorm"),
            of(kvb=1),
            self.trained_elements("kv_b_proj"),
        )
        queries = tape.op("q: rotate", [q], of(q=1), BF16)
        keys = tape.op("k: join", [kv, rotary], of(q=1), BF16)
        return queries, keys, self.apart(tape.op("v", [kv], of(o=1), BF16, view=True), "v")

    def rotated(self, x: Tensor, name: str) -> Tensor:
        """Rotation in one kernel; the plain one joins sequences again, and keeps a cosine and a sine of each position.

        `core/models/common/embeddings/rope_utils.py`, `_apply_rotary_pos_emb_thd`.
        """
        if self.run.rotates or not self.arch.unfused:
            return self.tape.op(f"{name}: rotate", [x], x.width, BF16)
        angles = Tensor(of(D=2), BF16)
        return self.tape.op(f"{name}: rotate", [x], x.width, BF16, saves=[angles], scratch=x.size * 2)

    def head_norm(self, x: Tensor, name: str, rows: Size) -> Tensor:
        """A norm of each head, which keeps its input and the scale of each of its `rows`.

        One without weights is compiled, and reads the product of all three where it lies (`torch_norm.py`, `L2Norm`).
        """
        weight = self.trained_elements(name)
        x = x if self.arch.qk_norm == "bare" else self.alone(x, name)
        scales = 8 if self.arch.norm == "layer" and self.arch.qk_norm != "bare" else 4  # and means
        return self.tape.op(name, [x], x.width, BF16, saves=[x, Tensor(rows, scales)], weight=weight)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, own: tuple[bool, bool] = (True, True)) -> Tensor:
        """cuDNN's or FlashAttention's kernel, on all positions of a part of the heads if those are swapped.

        Keys and values that have no tensor of their `own` are copied for it. Where attention runs again, so do the
        copies, and what is kept is the product of all three (`attention.py`, `_checkpointed_attention_forward`).
        """
        copied = [x for x, alone in zip((k, v), own, strict=True) if not alone]
        if "core_attn" not in self.run.again:
            k, v = (self.apart(x, name, alone) for x, name, alone in zip((k, v), "kv", own, strict=True))
            copied = []
        if not self.swaps:
            return self.attended(q, k, v, total(copied))
        q, k, v = self.swapped(q, "q"), self.swapped(k, "k"), self.swapped(v, "v")
        return self.swapped(self.attended(q, k, v), "attention")

    @property
    def swaps(self) -> bool:
        """True if GPUs that share sequences swap positions for heads, so that attention runs without its neighbours."""
        return self.run.context > 1 and self.run.exchange == "all-to-all"

    def swapped(self, x: Tensor, name: str) -> Tensor:
        """Heads for positions, or positions for heads: what is sent and what is received are copies.

        TransformerEngine `pytorch/attention/dot_product_attention/context_parallel.py`, `flash_attn_a2a_communicate`.
        """
        return self.tape.op(f"{name}: all-to-all", [x], x.width, BF16, scratch=x.size, backward_scratch=x.size)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, copied: Size = NOTHING) -> Tensor:
        """The kernel keeps q, k, v, its output and a log-sum-exp; dq is summed in fp32.

        Where it runs again, it reads what is `copied` before, in forward and in backward.
        """
        sums = of(q=4, H=4)
        lse = Tensor(of(H=1), 4)
        alone = self.run.context == 1 or self.swaps
        passed, back = (NOTHING, NOTHING) if alone else self.passed(q, k, v)
        if "core_attn" in self.run.again:
            # output and log-sum-exp are made once more, beside the output that the next product keeps
            back = back + self.context * BF16 + lse.size + copied
            return self.tape.op("attention", [q, k, v], self.context, BF16, saves=[q, k, v],
                                scratch=passed + copied, backward_scratch=sums + back, multiplies=True)  # fmt: skip
        return self.tape.op("attention", [q, k, v], self.context, BF16, saves=[q, k, v, lse], saves_out=True,
                            scratch=passed, backward_scratch=sums + back, multiplies=True)  # fmt: skip

    def passed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Size, Size]:
        """The temporaries of context parallelism: forward, backward.

        Where keys and values go from rank to rank, forward has those of every rank in the end, one of which it keeps,
        and the outputs of every step, on the last rank each of all its queries. Backward has two buffers of keys,
        values and their gradients, and the gradients of a step (TransformerEngine
        `pytorch/attention/dot_product_attention/context_parallel.py`, `AttnFuncWithCPAndKVP2P`). Where they are
        gathered, they are put in order and copied for each half of the queries; backward gathers them again, beside
        their gradients and those of a half (`AttnFuncWithCPAndKVAllGather`).
        """
        n, both = self.run.context, k.size + v.size
        if self.run.exchange == "all-gather":
            out = self.context * BF16
            return both * (2 * n) + q.size + out * 2, both * (4 * n) + q.size * 2 + out * 2
        return both * n + self.context * (BF16 * n), both * 5 + q.size

    def feed_forward(self, x: Tensor, norm: str) -> Tensor:
        """The MLP block, from the residual stream to the residual stream: an MLP, or routed experts, and shared ones.

        An MLP's norm is a part of its first product.
        """
        after = self.arch.norms.mlp_output
        if self.spec.mlp == "dense" or self.arch.experts_beside:
            y = self.once_more("mlp", x, lambda x: self.mlp(self.normed(x, norm), of(i=1)))
            if self.spec.mlp == "experts":
                y = self.routed_beside(x, y)
            return self.added(x, self.normed(y, after) if after else y, "mlp")
        first = len(self.tape.ops)
        n = self.normed(x, norm)
        end = len(self.tape.ops)
        y = self.once_more("moe", n, self.mixture)
        self.behind("layernorm", first, end)
        return self.added(x, y, "mlp")

    def mixture(self, n: Tensor) -> Tensor:
        """Routed experts, and shared ones that run before them (`moe_layer.py`, `custom_forward`)."""
        shared = None
        if self.arch.shared_experts:
            shared = self.once_more("shared_experts", n, self.shared)
        y = self.latent_experts(n) if self.arch.latent_experts else self.experts(n)
        if shared:
            y = self.tape.op("experts: add shared", [y, shared], self.stream, BF16, aliases=[y, shared])
        return y

    def shared(self, n: Tensor) -> Tensor:
        """The shared experts' MLP, weighed by a sigmoid of its own in some models (`shared_experts.py`)."""
        y = self.mlp(n, of(s=1), "shared_")
        if not self.arch.shared_gate:
            return y
        tape, one, name = self.tape, Size({"": self.run.share}), "shared_expert_gate"
        gate = tape.op(name, [n], one, BF16, saves=self.kept(n), weight=self.trained_elements(name), multiplies=True)
        gate = tape.op("shared: sigmoid", [gate], one, BF16, saves_out=True)
        return tape.op("shared: weigh", [y, gate], self.stream, BF16, saves=[y, gate], backward_scratch=y.size)

    def mlp(self, n: Tensor, inner: Size, owner: str = "") -> Tensor:
        """Two products with an activation between, which is one kernel; `owner`: the prefix of their names."""
        names = ("gate_proj", "up_proj") if self.arch.gated else (self.arch.names.up,)
        weight = self.trained_elements(*(f"{owner}{name}" for name in names))
        pair = self.column(f"{owner}linear_fc1", n, inner * 2 if self.arch.gated else inner, weight)
        act = self.activated(pair, inner, f"{owner}mlp")
        self.tape.returns(n)
        return self.row(f"{owner}linear_fc2", act, self.trained_elements(f"{owner}{self.arch.names.down}"))

    def activated(self, pair: Tensor, inner: Size, name: str) -> Tensor:
        """The activation as one kernel; a plain gated one is two operations, and keeps the activated half, too."""
        if self.arch.gated and self.arch.activation != "silu":
            return self.plain_gate(pair, inner, name)
        if not (self.arch.unfused and self.arch.gated):
            return self.tape.op(f"{name}: activation", [pair], inner, BF16, saves=[pair])
        gate, up = self.tape.split(f"{name}: gate, up", pair, [inner, inner])
        silu = self.tape.op(f"{name}: activation", [gate], inner, BF16, saves=[gate])
        return self.tape.op(f"{name}: product", [silu, up], inner, BF16, saves=[silu, up])
