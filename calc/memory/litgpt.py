"""litgpt's own attention on a tape: `CausalSelfAttention`, its rotation, and LoRA beside the product for q, k and v.

Read in litgpt 0.4.0 `model.py` and `lora.py`, which do not differ here from lit-gpt in spring 2024, which its tables
are from.
"""

from __future__ import annotations

from calc.autograd.polynomial import amount
from calc.autograd.tape import Tensor, of
from calc.memory.attention import Attention
from calc.memory.linears import WIDTH
from calc.memory.run import dimensions

PRODUCT = "qkv"  # queries, keys and values, from one linear


class LitgptAttention(Attention):
    """Writes the attention block of a layer as litgpt runs it."""

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, ...]:
        """One product, split into views; where heads share, queries are copied, and keys and values expanded.

        With as many keys as queries the values stay a view, which keeps the whole product.
        """
        tape, arch, q, kv = self.tape, self.arch, of(q=1), of(kv=1)
        self.elements = {**self.elements, PRODUCT: sum(self.elements[f"{name}_proj"] for name in "qkv")}
        product = self.linear(PRODUCT, x, of(q=1, kv=2))
        queries, keys, values = tape.split("q, k, v", product, [q, kv, kv])
        if arch.heads != arch.kv_heads:
            queries = tape.op("q: heads", [queries], q, queries.b, aliases=[queries])
            keys = tape.op("k: expand", [keys], q, keys.b)
            values = tape.op("v: expand", [values], q, values.b)
        return self.rotate(queries, "q: rotate"), self.rotate(keys, "k: rotate"), values, product

    def rotate(self, x: Tensor, name: str) -> Tensor:  # type: ignore[override]
        """`apply_rope` with fp32 tables, which make its products fp32, a cast back, and a concatenation.

        The tables are made anew when the longest sequence is known, after the model was cast to 16 bits.
        """
        tape, own, wide = self.tape, x.size, x.width * 4
        # half of x negated, both halves joined, x·cos, that times sin, their sum
        y = tape.op(name, [x], x.width, 4, scratch=own + wide * 2, backward_scratch=own + wide * 2,
                    course=(own * 0.5, own, 0, wide, wide, None), backward_course=(wide, wide, own, None))  # fmt: skip
        y = self.cast(y, x.b, name)
        return tape.op(f"{name}: join", [y], x.width, x.b, aliases=[y])

    def is_adapted(self, name: str) -> bool:
        """True if LoRA adapts this linear; qkv is adapted if q, k or v is."""
        return any(self.parts()) if name == PRODUCT else super().is_adapted(name)

    def parts(self) -> tuple[bool, ...]:
        """Three flags, for queries, keys and values: True if adapted."""
        return tuple([Attention.is_adapted(self, f"{name}_proj") for name in "qkv"])

    def adapted(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """`LoRAQKVLinear`: one dropout and one matrix A for all that are adapted, a grouped convolution for B.

        Unless all three are adapted, the result is padded with zeros to the width of the product, which keeps it for
        backward. At the end it is scaled.
        """
        if name != PRODUCT:
            return super().adapted(name, x, y)
        adapter, tape, label = self.run.adapter, self.tape, f"{name}: LoRA"
        assert adapter is not None
        source, b, parts = x, adapter.b, self.parts()
        if adapter.dropout:
            source = tape.op(f"{label} dropout", [x], x.width, x.b, saves=[Tensor(x.width, 1)])
        width = of(q=parts[0], kv=parts[1] + parts[2])
        dims = dimensions(self.arch)
        n_in, n_out = (int(amount(w, dims).tokens) * adapter.rank for w in (WIDTH * sum(parts), width))
        down = tape.op(f"{label} A", [source], of(r=sum(parts)), b, saves=[source], weight=n_in, multiplies=True)
        up = tape.op(f"{label} B", [down], width, b, saves=[down], weight=n_out, multiplies=True)
        if not all(parts):
            up = tape.op(f"{label} pad", [up], y.width, b, saves=[up])
        scaled = tape.op(f"{label} scale", [up], y.width, b)
        total = tape.op(f"{label} add", [y, scaled], y.width, b, aliases=[y, scaled])
        tape.returns(x, source)
        return total
