"""Gemma 3 as Unsloth computes it where fp16 would overflow: a residual stream in fp32 around products in fp16.

Weights are in fp16, adapters in fp32, and no autocast runs: the patched modules cast, and most of what lies between two
products is one kernel that `torch.compile` has made. Norms keep their input and a scale of each row in fp32. Their
outputs are fp16 (`norms`: fp32, and attention and MLP then cast what they read). Queries, keys and values are in fp32
from before their norms to the end of attention (`norms`: values in fp16, and all three are cast back for attention).
SDPA gets them for grouped heads, which leaves its plain mathematics alone: flash takes no fp32 and no mask, and the
memory-efficient kernel no groups; in the newest releases (`repeated`) it gets a copy of them for each query head.

Read in unsloth_zoo 2025.3.17 `temporary_patches.py`, 2025.8.8, 2025.12.7 and 2026.10.9 `temporary_patches/gemma.py`
(`patch_Gemma3RMSNorm`, `patch_Gemma3MLP`, `patch_Gemma3Attention`), `compiler.py`
(COMPILED_LORA_FORWARD_forced_float32) and `patching_utils.py` (`patch_model_and_tokenizer`, do_forced_float32).
"""

from __future__ import annotations

from calc.autograd.polynomial import amount
from calc.autograd.tape import Size, Tensor, of
from calc.memory.attention import Attention
from calc.memory.linears import WIDTH
from calc.memory.run import dimensions


class ForcedFp32(Attention):
    """Writes norms, adapters, attention and the MLP of a layer as Unsloth's patches run them."""

    @property
    def normed_bytes(self) -> int:
        """Bytes of an element of a norm's output."""
        return 4 if self.run.forced == "norms" else self.c

    def rms_norm(self, x: Tensor, name: str, rows: Size) -> Tensor:
        """One kernel: keeps its input as it comes, and the scale of each of its `rows`."""
        return self.tape.op(name, [x], x.width, self.normed_bytes, saves=[x, Tensor(rows, 4)])

    @property
    def casts_adapters(self) -> bool:
        """True: each product casts its adapter's matrix."""
        return True

    def adapted(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """`addmm(y, dropout(x)·A, B, alpha=scaling)`, of matrices that are cast to fp16 for it."""
        adapter, tape = self.run.adapter, self.tape
        assert adapter is not None
        if adapter.dora:
            return super().adapted(name, x, y)
        dims, label = {**dimensions(self.arch), **self.widths}, f"{name}: LoRA"
        inputs, outputs = (round(amount(t.width, dims).tokens / self.row_share) * adapter.rank for t in (x, y))
        source = x
        if adapter.dropout:
            source = tape.op(f"{label} dropout", [x], x.width, x.b, saves=[Tensor(x.width, 1)])
        down = self.through(f"{label} A", source, of(r=self.row_share), inputs)
        matrix = self.matrix(f"{label} B", outputs)
        own, trained = ([], matrix) if isinstance(matrix, int) else ([matrix], 0)
        total = tape.op(f"{label} add", [y, *own, down], y.width, y.b, saves=[down, *own], aliases=[y],
                        weight=trained, product=True, flat=True)  # fmt: skip
        tape.returns(x, y, source)
        return total

    def mlp(self, x: Tensor, width: Size | None = None, owner: str = "") -> Tensor:
        """`down(act(gate(x)) · up(x))`: one kernel between the products, which keeps gate and up.

        In the expression of `norms` an adapter's product parts it in two, and act(gate) is kept, too.
        """
        if not self.arch.gated:
            return super().mlp(x, width, owner)  # type: ignore[misc, no-any-return]
        tape, names, i = self.tape, self.arch.names, width or of(i=1)
        read = self.cast(x, self.c, "mlp")
        act = gate = self.linear(f"{owner}{names.gate}", read, i)
        if self.run.forced == "norms":
            act = tape.op("mlp: activation", [gate], i, gate.b, saves=[gate])
        up = self.linear(f"{owner}{names.up}", read, i)
        product = tape.op("mlp: product", [act, up], i, act.b, saves=[act, up])
        return self.cast(self.linear(f"{owner}{names.down}", product, WIDTH), self.normed_bytes, "mlp")

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, ...]:
        """The projections, and one kernel that norms and rotates queries and keys, and makes all three fp32."""
        if self.run.forced == "norms" or self.arch.qk_norm != "heads":
            return super().queries_keys_values(x)
        names, q_width, kv_width = self.arch.names, of(q=1), of(kv=1)
        q, k, v = (
            self.linear(name, x, width)
            for name, width in ((names.q, q_width), (names.k, kv_width), (names.v, kv_width))
        )
        queries, keys = (
            self.tape.op(f"{label}: rotate", [t], t.width, 4, saves=[t, Tensor(rows, 4)])
            for label, t, rows in (("q", q, of(H=1)), ("k", k, of(K=1)))
        )
        return queries, keys, self.cast(v, 4, "v"), q, k, v

    def attention(self, x: Tensor) -> Tensor:
        """The block, which reads fp16."""
        y = super().attention(self.cast(x, self.c, "attention"))
        self.tape.returns(x)
        return y

    def in_compute_type(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors as SDPA gets them: as they are, but for those that a norm has left in fp32."""
        return super().in_compute_type(*tensors) if self.run.forced == "norms" else list(tensors)

    def mathematics(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """SDPA's plain mathematics, which makes a mask of booleans one of fp32.

        There is one wherever a window or a padded row needs it; the patched mask of `norms` is added as it is.
        """
        if self.run.forced == "norms":
            return super().mathematics(q, k, v)
        mask = self.tape.op("mask: to fp32", [], Size({"S": 1}), 4)
        out = super().mathematics(q, k, v)
        self.tape.returns(mask)
        return out

    def fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """SDPA's memory-efficient kernel, in fp32: keeps what it reads, its output and a log-sum-exp."""
        if q.b < 4 or self.run.forced == "norms":
            return super().fused(q, k, v)
        k, v = self.repeat(k, of(q=1), "k"), self.repeat(v, of(o=1), "v")
        out = self.tape.op("attention", [q, k, v], of(o=1), 4, saves=[q, k, v, Tensor(of(H=1), 4)], saves_out=True,
                           backward_scratch=of(H=4), multiplies=True)  # fmt: skip
        return self.by_token(out)

    def by_token(self, mixed: Tensor) -> Tensor:
        """The output of attention laid out by token as it is, then cast for the last linear."""
        laid = self.tape.op("attention: contiguous", [mixed], of(o=1), mixed.b)
        out = self.cast(laid, self.c, "attention: output")
        self.tape.returns(laid)
        return out
