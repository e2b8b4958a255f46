"""Activations: what a decoder keeps for backward and what its operations allocate, written as the real code runs it.

Each method of `Program` puts one piece of Transformers' eager implementation on a tape, operation by operation, with
what PyTorch's autograd formula of that operation saves. Widths are elements per token of the micro batch:

    h hidden   q heads·head_dim   kv kv_heads·head_dim   i intermediate   H heads   K kv_heads   S length   r LoRA rank
    E experts   k experts a token   j expert intermediate   s shared experts' intermediate   W_x elements of weight x

so that what a Llama layer saves in bf16 reads 16·h + 4·q + 4·kv + 8·i + 4·H + 8 bytes a token.
Read in transformers 5.23 `models/*/modeling_*.py` and `integrations/moe.py`, torch 2.13 `derivatives.yaml` and
`native/transformers/cuda/attention*.cu`, peft 0.21 `tuners/lora/layer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from calc.amounts import Segment, amount, segment
from calc.architecture import Architecture, layer_tensors
from calc.tape import NOTHING, Size, Tape, Tensor, of


@dataclass(frozen=True, slots=True)
class Adapter:
    """LoRA beside the linears that `targets` names: their rank, whether inputs are dropped out, bytes of a weight."""

    rank: int
    targets: str | tuple[str, ...]
    dropout: bool
    b: int


@dataclass(frozen=True, slots=True)
class Run:
    """How a model's layers run: number format, what is trained, and which kernel attends."""

    arch: Architecture
    precision: str = "bf16"  # bf16: every tensor; autocast: fp32 weights and residual stream; fp32: every tensor
    trained: bool = True  # the model's own weights get gradients
    adapter: Adapter | None = None
    kernel: str = "flash"  # flash, efficient (what SDPA takes for fp32 or unequal head sizes), masked, eager
    quantised: bool = False  # linears in four bits, dequantised for each multiplication
    keeps_inputs: bool = False  # of these, though a frozen weight needs none: bitsandbytes before 0.43.2
    sequences: bool = False  # tensor-parallel ranks have parts of the residual stream, each some of the positions
    context: int = 1  # context-parallel ranks, each with some of the positions in all layers
    exchange: str = ""  # how attention sees the others' positions, a word of `calc.keeps.Role`

    @property
    def compute(self) -> int:
        """Bytes of an element that a matrix multiplication reads and writes."""
        return 4 if self.precision == "fp32" else 2

    @property
    def residual(self) -> int:
        """Bytes of an element of the residual stream."""
        return 2 if self.precision == "bf16" else 4

    @property
    def share(self) -> float:
        """The share of the positions of which a rank has the residual stream."""
        return 1 / self.arch.ranks if self.sequences else 1


@lru_cache(maxsize=4096)
def dimensions(arch: Architecture, rank: int = 0) -> Mapping[str, int]:
    """The numbers behind the symbols of the formulas, all counts of elements."""
    mla = arch.mla
    return {
        "h": arch.hidden,
        "q": arch.heads * arch.head_dim,
        "kv": arch.kv_heads * arch.head_dim,
        "o": arch.heads * (mla.v_head_dim if mla else arch.head_dim),
        "i": arch.intermediate,
        "H": arch.heads,
        "K": arch.kv_heads,
        "D": arch.head_dim,
        "V": arch.vocab,
        "E": arch.experts,
        "k": arch.experts_per_token,
        "k·h": arch.experts_per_token * arch.hidden,
        "k·j": arch.experts_per_token * arch.moe_intermediate,
        "j": arch.moe_intermediate,
        "s": arch.shared_intermediate,
        "r": rank,
        **(
            {
                "c_q": mla.q_lora_rank or 0,
                "c_kv": mla.kv_lora_rank,
                "rope": mla.qk_rope_head_dim,
                "H·rope": arch.heads * mla.qk_rope_head_dim,
                "kvb": arch.heads * (mla.qk_nope_head_dim + mla.v_head_dim),
            }
            if mla
            else {}
        ),
        "W_lm_head": arch.vocab_part * arch.hidden,
        "W_score": arch.hidden,
        **{f"W_{_short(t.name)}": t.elements for i in (0, -1) for t in layer_tensors(arch, i)},
    }


def _short(name: str) -> str:
    """`…mlp.down_proj.weight` as `down_proj`, `…mlp.experts.down_proj` as `experts_down_proj`."""
    *_, inside, last = ("", *name.removesuffix(".weight").split("."))
    return {"experts": "experts_", "shared_expert": "shared_", "shared_experts": "shared_"}.get(inside, "") + last


@lru_cache(maxsize=4096)
def _elements(arch: Architecture, layer: int) -> Mapping[str, int]:
    """Elements of a layer's tensors by short name, a linear's bias counted with its weight."""
    found: dict[str, int] = {}
    for t in layer_tensors(arch, layer):
        name = _short(t.name.removesuffix(".bias"))
        found[name] = found.get(name, 0) + t.elements
    return found


WIDTH = of(h=1)  # the residual stream
# How tensor parallelism cuts linears: by outputs, or by inputs.
COLWISE = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"})
ROWWISE = frozenset({"o_proj", "down_proj"})


class Program:
    """Writes the operations of one decoder layer, the final norm or a head on a tape."""

    def __init__(self, run: Run, layer: int = -1, *, first: bool = False, recomputed: bool = False) -> None:
        """`first`: nothing before this piece is trained, so that its input needs no gradient.

        `recomputed`: the input is a checkpoint, which others count.
        """
        self.run = run
        self.arch = run.arch
        self.tape = Tape()
        self.c = run.compute
        self.autocast = run.precision == "autocast"
        self.elements = _elements(run.arch, layer)
        self.stream = WIDTH * run.share
        self.input = Tensor(self.stream, run.residual, differentiable=not first)
        if recomputed:
            self.input.size = NOTHING

    # ---- pieces ------------------------------------------------------------------------------------------------

    def cast(self, x: Tensor, b: float, name: str) -> Tensor:
        """`x.to(dtype)`: the tensor itself where it already has that type."""
        return x if x.b == b else self.tape.op(f"{name}: to {'fp32' if b == 4 else 'bf16'}", [x], x.width, b)

    def norm(self, x: Tensor, name: str, rows: Size | None = None) -> Tensor:
        """RMSNorm: keeps an fp32 copy of its input, the scale of each of its `rows`, and what the weight multiplies."""
        tape, width, one = self.tape, x.width, rows or Size({"": self.run.share})
        wide = width * 4
        # weight · x in fp32, then cast (Gemma, GPT-OSS), or cast, then weight · x
        late = self.arch.family in ("gemma", "gemma2", "gpt_oss")
        x32 = self.cast(x, 4, name)
        # grad·(2·x^1) is one expression: its power and its product live to the end of it
        square = tape.op(f"{name}: square", [x32], width, 4, saves=[x32], backward_scratch=wide * 2)
        mean = tape.op(f"{name}: mean", [square], one, 4)
        scale = tape.op(f"{name}: rsqrt", [mean], one, 4, saves_out=True)
        n = tape.op(f"{name}: scale", [x32, scale], width, 4, saves=[x32, scale], backward_scratch=wide)
        if not late:
            n = self.cast(n, x.b, name)
        trained = self.run.trained
        out = tape.op(
            f"{name}: weight",
            [n],
            width,
            n.b,
            saves=[n] if trained else [],
            backward_scratch=n.size if trained else NOTHING,
            weight=self.elements.get(name, self.arch.hidden) if trained else 0,
        )
        return self.cast(out, x.b, name)

    def linear(self, name: str, x: Tensor, out: Size) -> Tensor:
        """`nn.Linear`: keeps its input where its weight is trained; LoRA adds two small linears beside it."""
        run, tape, elements = self.run, self.tape, self.elements.get(name, 0)
        x = self.entering(name, x)
        weight = Size({}, {f"W_{name}": 1})
        trained = elements if run.trained else 0
        source, reads = x, [x]
        if self.autocast:
            source = self.cast(x, self.c, name)
            # the weight's bf16 copy gets the bf16 gradient, which the copy's own backward casts to fp32
            reads = [source, tape.op(f"{name}: weight to bf16", [], weight, 2, weight=trained)]
        four_bits = run.quantised and name not in ("lm_head", "score")
        dequantised = weight * self.c if four_bits else NOTHING
        y = tape.op(
            name,
            reads,
            out,
            self.c,
            saves=([source] if run.trained or (four_bits and run.keeps_inputs) else []) + reads[1:],
            scratch=dequantised,
            backward_scratch=dequantised,
            weight=0 if self.autocast else trained,
        )
        y = self.adapted(name, x, y) if run.adapter and self.is_adapted(name) else y
        return self.summed(name, y) if name in ROWWISE else y

    def entering(self, name: str, x: Tensor) -> Tensor:
        """The input of a linear whose outputs are spread over ranks: each makes a part of the input's gradient.

        The parts are summed into a tensor of its own, one for each such linear, unless sequences are spread too: then
        the input was gathered, and `gathered` sends all its gradients back at once.
        """
        if self.arch.ranks == 1 or self.run.sequences or name not in COLWISE:
            return x
        return self.tape.op(f"{name}: all-reduce", [x], x.width, x.b, view=True)

    def summed(self, name: str, y: Tensor) -> Tensor:
        """The output of a linear whose inputs are spread over ranks: parts of a sum, added up for all or in pieces."""
        if self.arch.ranks == 1:
            return y
        if self.run.sequences:
            # cut along the second dimension by a copy (torch `_functional_collectives.py`, `reduce_scatter_tensor`)
            return self.tape.op(
                f"{name}: reduce-scatter", [y], self.stream, y.b, scratch=y.size, backward_scratch=y.size
            )
        return self.tape.op(f"{name}: all-reduce", [y], y.width, y.b, aliases=[y])

    def gathered(self, x: Tensor, name: str) -> Tensor:
        """All positions of a block's input where ranks have parts of the sequence: gathered, then joined by a copy."""
        if not self.run.sequences:
            return x
        whole = WIDTH * x.b
        return self.tape.op(f"{name}: gather sequence", [x], WIDTH, x.b, scratch=whole, backward_scratch=whole)

    def is_adapted(self, name: str) -> bool:
        """Whether PEFT puts an adapter beside this linear; the head is never among `all-linear`."""
        targets = self.run.adapter.targets if self.run.adapter else ()
        own = name.removeprefix("shared_")
        return name not in ("lm_head", "score") and (targets == "all-linear" or name in targets or own in targets)

    def adapted(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """`y + lora_B(lora_A(dropout(x)))·scaling`, x cast to the adapter's type first, the sum cast back."""
        adapter = self.run.adapter
        assert adapter is not None
        tape, label = self.tape, f"{name}: LoRA"
        source = read = self.cast(x, adapter.b, label)
        if adapter.dropout:
            mask = Tensor(x.width, 1)
            source = tape.op(f"{label} dropout", [source], x.width, source.b, saves=[mask])
        b = self.c if self.autocast else adapter.b
        source = self.cast(source, b, label)
        dims = dimensions(self.arch)
        n_in, n_out = (int(amount(t.width, dims).tokens) * adapter.rank for t in (x, y))
        down = tape.op(f"{label} A", [source], of(r=1), b, saves=[source], weight=n_in)
        up = tape.op(f"{label} B", [down], y.width, b, saves=[down], weight=n_out)
        scaled = tape.op(f"{label} scale", [up], y.width, b)
        total = tape.op(
            f"{label} add", [y, scaled], y.width, max(y.b, b), aliases=[t for t in (y, scaled) if t.b == max(y.b, b)]
        )
        tape.returns(x, read)
        return self.cast(total, y.b, label)

    def add(self, residual: Tensor, y: Tensor, name: str) -> Tensor:
        """The residual stream: its gradient is the gradient of both inputs that share its type."""
        b = max(residual.b, y.b)
        return self.tape.op(name, [residual, y], self.stream, b, aliases=[t for t in (residual, y) if t.b == b])

    # ---- attention ---------------------------------------------------------------------------------------------

    def rotate(self, x: Tensor, name: str) -> Tensor:
        """`x·cos + rotate_half(x)·sin`: cos and sin are constants, so nothing of x is kept."""
        b = max(x.b, self.run.residual)
        return self.tape.op(name, [x], x.width, b, scratch=x.width * (3 * b), backward_scratch=x.width * (3 * b))

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The projections, QK norm and rotation of plain, fused (Phi-3) and grouped-query attention."""
        tape, arch = self.tape, self.arch
        q_width, kv_width = of(q=1), of(kv=1)
        if arch.fused_qkv:
            qkv = self.linear("qkv_proj", x, of(q=1, kv=2))
            q, k, v = (tape.op(f"{n}: slice", [qkv], w, qkv.b, view=True) for n, w in _named(q_width, kv_width))
        else:
            q = self.linear("q_proj", x, q_width)
            k = self.linear("k_proj", x, kv_width)
            v = self.linear("v_proj", x, kv_width)
        if arch.qk_norm:
            q, k = self.norm(q, "q_norm", of(H=1)), self.norm(k, "k_norm", of(K=1))
        return self.rotate(q, "q: rotate"), self.rotate(k, "k: rotate"), v

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
        q_pass, q_rot = tape.split("q: split", states, [of(q=1) + heads_rope * -1, heads_rope])
        low = self.linear("kv_a_proj_with_mqa", x, of(c_kv=1, rope=1))
        latent, k_rot = tape.split("kv: split", low, [of(c_kv=1), rope])
        latent = self.norm(latent, "kv_a_layernorm")
        q_rot, k_rot = self.rotate(q_rot, "q: rotate"), self.rotate(k_rot, "k: rotate")
        q = tape.op("q: join", [q_pass, q_rot], of(q=1), q_rot.b)
        expanded = self.linear("kv_b_proj", latent, of(kvb=1))
        k_pass, v = tape.split("k: split", expanded, [of(kvb=1, o=-1), of(o=1)])
        k = tape.op("k: join", [k_pass, k_rot], of(q=1), k_rot.b)
        return q, k, v

    def attention(self, x: Tensor) -> Tensor:
        """The attention block from its normalised input to the output projection."""
        x = self.gathered(x, "attention")
        q, k, v = self.latent_queries_keys_values(x) if self.arch.mla else self.queries_keys_values(x)
        if self.autocast:
            q, k, v = (self.cast(t, 2, n) for t, n in ((q, "q"), (k, "k"), (v, "v")))
        attend = self.eager if self.run.kernel == "eager" else self.fused
        y = self.linear("o_proj", attend(q, k, v), WIDTH)
        self.tape.returns(x, q, k, v)
        return y

    def repeat(self, x: Tensor, width: Size, name: str) -> Tensor:
        """`repeat_kv`: a copy for every query head where heads share keys and values."""
        return x if self.arch.heads == self.arch.kv_heads else self.tape.op(f"{name}: repeat", [x], width, x.b)

    @property
    def sinks(self) -> int:
        """GPT-OSS's sinks, a number a head, where they are trained."""
        return self.elements.get("sinks", 0) if self.run.trained else 0

    def fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """FlashAttention, or the memory-efficient kernel that SDPA takes under a mask, in fp32 or for unequal heads.

        Keeps q, k, v, the output and a log-sum-exp in fp32 per head. Flash's backward accumulates dq in fp32 and,
        with grouped queries, dk and dv for every query head before they are summed.
        """
        tape, arch = self.tape, self.arch
        lse = Tensor(of(H=1), 4)
        if self.run.context > 1:
            return self.all_to_all(q, k, v) if self.run.exchange == "all-to-all" else self.all_gather(q, k, v)
        # queries that a concatenation made lie head by head, and so does flash's output, which o_proj then copies
        joined = arch.fused_qkv or arch.mla is not None or arch.family == "gpt_oss"
        if self.run.kernel == "flash":
            scratch = of(q=4, H=4) + (of(q=2, o=2) if arch.heads != arch.kv_heads else NOTHING)
            out = tape.op("attention", [q, k, v], of(o=1), self.c, saves=[q, k, v, lse], saves_out=True,
                          backward_scratch=scratch, weight=self.sinks)  # fmt: skip
            return tape.op("attention: contiguous", [out], of(o=1), self.c) if joined else out
        k, v = self.repeat(k, of(q=1), "k"), self.repeat(v, of(o=1), "v")
        mask = [Tensor(of(**{"S": 1}), self.c)] if self.run.kernel == "masked" else []
        return tape.op("attention", [q, k, v], of(o=1), self.c, saves=[q, k, v, lse, *mask], saves_out=True,
                       backward_scratch=of(H=4) + (of(q=4) if self.c == 2 else NOTHING))  # fmt: skip

    def all_to_all(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Ulysses: each rank attends to all positions with some of the heads, keys and values repeated to one a rank.

        An exchange cuts its input into pieces, receives as many and joins them: three copies (verl `utils/ulysses.py`,
        `all_to_all_tensor`, `models/transformers/monkey_patch.py`, 0.9.0).
        """
        tape, repeats = self.tape, max(1, self.run.context // self.arch.kv_heads)

        def exchanged(x: Tensor, name: str) -> Tensor:
            return tape.op(f"{name}: all-to-all", [x], x.width, x.b, scratch=x.size * 2, backward_scratch=x.size * 2)

        if repeats > 1:
            k, v = (tape.op(f"{n}: repeat", [x], x.width * repeats, x.b) for n, x in (("k", k), ("v", v)))
        q, k, v = exchanged(q, "q"), exchanged(k, "k"), exchanged(v, "v")
        expanded = of(q=2, o=2) if self.arch.heads > self.arch.kv_heads * repeats else NOTHING
        out = tape.op("attention", [q, k, v], of(o=1), self.c, saves=[q, k, v, Tensor(of(H=1), 4)], saves_out=True,
                      backward_scratch=of(q=4, H=4) + expanded)  # fmt: skip
        return exchanged(out, "attention")

    def all_gather(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Each rank attends with its own queries, one key head after another, whose positions are gathered meanwhile.

        Two buffers of keys and values of that head forward; backward one more for their gradients, and flash's own
        accumulators of its queries, keys and values (ring_flash_attn 0.1.8 `llama3_flash_attn_varlen.py`).
        """
        tape, head = self.tape, Size({"D": 1})
        positions, grouped = self.run.context, self.arch.heads // self.arch.kv_heads
        buffers = head * (2 * 2 * positions * self.c) + head * (2 * self.c)
        gradients = head * (2 * positions * self.c) + head * (2 * self.c)
        flash = head * (4 * grouped) + (head * (2 * positions * grouped * self.c) if grouped > 1 else NOTHING)
        return tape.op("attention", [q, k, v], of(o=1), self.c, saves=[q, k, v, Tensor(of(H=1), 4)], saves_out=True,
                       scratch=of(o=self.c) + buffers, backward_scratch=buffers + gradients + flash)  # fmt: skip

    def eager(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Scores and probabilities as real tensors: 6 bytes kept for each pair of tokens and head, in passing more."""
        tape, scores = self.tape, Size({"H·S": 1})
        k, v = self.repeat(k, of(q=1), "k"), self.repeat(v, of(o=1), "v")
        x = tape.op("scores", [q, k], scores, self.c, saves=[q, k])
        x = tape.op("scores: scale", [x], scores, self.c)
        if self.arch.softcap_attn:
            x = tape.op("scores: over cap", [x], scores, self.c)
            x = tape.op("scores: tanh", [x], scores, self.c, saves_out=True)
            x = tape.op("scores: times cap", [x], scores, self.c)
        x = tape.op("scores: mask", [x], scores, self.c, aliases=[x])
        named = [x]  # by `attn_weights`, until the probabilities get that name
        if self.arch.attention_sinks:
            # the sink is a column of its own, and probabilities stay in the compute type
            scores = scores + of(H=1)
            x = tape.op("scores: join sink", [x], scores, self.c, weight=self.sinks)
            best = Tensor(of(H=1), 8)
            x = tape.op("scores: less maximum", [x], scores, self.c, saves=[best], aliases=[x],
                        backward_scratch=scores * self.c)  # fmt: skip
            combined = x
            x = tape.op("softmax", [x], scores, self.c, saves_out=True)
            x = tape.op("probabilities: drop sink", [x], scores, self.c, view=True)
            tape.returns(*named)
            named = [combined]
        else:
            x = tape.op("softmax: to fp32", [x], scores, 4) if self.c == 2 else x
            x = tape.op("softmax", [x], scores, 4, saves_out=True)
            x = self.cast(x, self.c, "probabilities")
        tape.returns(*named)
        # the decoder layer gets the probabilities too, and keeps them as `_`
        tape.hold(x)
        mixed = tape.op("values", [x, v], of(o=1), self.c, saves=[x, v])
        return tape.op("attention: contiguous", [mixed], of(o=1), self.c)

    # ---- feed-forward ------------------------------------------------------------------------------------------

    def mlp(self, x: Tensor, width: Size | None = None, owner: str = "") -> Tensor:
        """`down(act(gate(x)) · up(x))`: keeps gate, act(gate), up and their product.

        `owner` begins the names of its weights.
        """
        tape, i = self.tape, width or of(i=1)
        if self.arch.fused_gate_up:
            pair = self.linear("gate_up_proj", x, i * 2)
            gate, up = tape.split("gate, up", pair, [i, i])
            act = tape.op("mlp: activation", [gate], i, gate.b, saves=[gate])
        else:
            gate = self.linear(f"{owner}gate_proj", x, i)
            act = tape.op("mlp: activation", [gate], i, gate.b, saves=[gate])
            up = self.linear(f"{owner}up_proj", x, i)
        product = tape.op("mlp: product", [act, up], i, act.b, saves=[act, up])
        return self.linear(f"{owner}down_proj", product, WIDTH)

    def experts(self, x: Tensor) -> Tensor:
        """Routed experts as Transformers 5 runs them: tokens sorted by expert, two grouped matrix multiplications."""
        # a grouped multiplication runs in its weights' type: autocast does not know it
        tape, arch, c = self.tape, self.arch, self.run.residual
        kh, kj = Size({"k·h": 1}), Size({"k·j": 1})
        order, tokens, inverse = (Tensor(of(k=1), 8) for _ in range(3))
        trained = self.run.trained
        weights = self.route(x)
        picked = tape.op("experts: sort", [x], kh, x.b, saves=[tokens], backward_scratch=x.size)
        # the rows of the biases are picked by expert
        picks = [Tensor(of(k=1), 8)] * arch.expert_bias
        pair = tape.op("experts: gate_up", [picked], kj * 2, c, saves=[picked, *picks] if trained else [],
                       weight=self.trained_expert("gate_up_proj"))  # fmt: skip
        if arch.family == "gpt_oss":
            product = self.clamped_gate(pair, kj, c)
        else:
            gate, up = tape.split("experts: gate, up", pair, [kj, kj])
            act = tape.op("experts: activation", [gate], kj, c, saves=[gate])
            product = tape.op("experts: product", [act, up], kj, c, saves=[act, up])
        down = tape.op("experts: down", [product], kh, c, saves=[product] if trained else [],
                       weight=self.trained_expert("down_proj"))  # fmt: skip
        wide = max(c, weights.b)
        weights = tape.op("experts: sort weights", [weights], of(k=1), weights.b, saves=[order])
        weighted = tape.op(
            "experts: weigh", [down, weights], kh, wide, saves=[down, weights], backward_scratch=kh * wide
        )
        weighted = tape.op("experts: unsort", [weighted], kh, wide, saves=[inverse])
        return self.cast(tape.op("experts: sum", [weighted], WIDTH, wide), c, "experts")

    def trained_expert(self, name: str) -> int:
        """Elements of the routed experts' weights and biases called `name`, where they are trained."""
        weight = self.elements[f"experts_{name}"] + self.elements.get(f"experts_{name}_bias", 0)
        return weight if self.run.trained else 0

    def clamped_gate(self, pair: Tensor, kj: Size, c: int) -> Tensor:
        """GPT-OSS's gate: strided halves, both clamped, `(up + 1)·gate·sigmoid(1.702·gate)`."""
        tape = self.tape
        gate = tape.op("experts: gate", [pair], kj, c, view=True)
        up = tape.op("experts: up", [pair], kj, c, view=True)
        gate = tape.op("experts: clamp gate", [gate], kj, c, saves=[gate])
        up = tape.op("experts: clamp up", [up], kj, c, saves=[up])
        scaled = tape.op("experts: scale gate", [gate], kj, c)
        sigmoid = tape.op("experts: sigmoid", [scaled], kj, c, saves_out=True)
        glu = tape.op("experts: glu", [gate, sigmoid], kj, c, saves=[gate, sigmoid])
        up = tape.op("experts: up + 1", [up], kj, c, aliases=[up])
        return tape.op("experts: product", [up, glu], kj, c, saves=[up, glu])

    def route(self, x: Tensor) -> Tensor:
        """The router: logits over all experts, softmax or sigmoid in fp32, the k best."""
        tape, arch, experts, k = self.tape, self.arch, of(E=1), of(k=1)
        trained = self.run.trained
        weight = self.elements.get("gate", self.elements.get("router", 0)) if trained else 0
        index = Tensor(k, 8, differentiable=False)
        reads = [x]
        if arch.family == "deepseek_v3":
            # routing runs in fp32, on casts of the input and of the router's weight
            reads = [
                self.cast(x, 4, "router"),
                tape.op("router: to fp32", [], Size({}, {"W_gate": 1}), 4, weight=weight),
            ]
            weight = 0
        logits = tape.op("router", reads, experts, reads[-1].b, saves=reads[:1] * trained + reads[1:], weight=weight)
        if arch.family == "gpt_oss":
            best = tape.op("router: top k", [logits], k, logits.b, saves=[index])
            return tape.op("router: softmax", [best], k, best.b, saves_out=True)
        probabilities = tape.op("router: softmax", [self.cast(logits, 4, "router")], experts, 4, saves_out=True)
        best = tape.op("router: top k", [probabilities], k, 4, saves=[index])
        best = tape.op("router: normalise", [best], k, 4, saves=[Tensor(Size({"": 1}), 4)], saves_out=True)
        return best if arch.family in ("mixtral", "deepseek_v3") else self.cast(best, self.c, "router")

    def feed_forward(self, x: Tensor, *, moe: bool) -> Tensor:
        """A layer's MLP, its routed experts, or routed and shared experts."""
        x = self.gathered(x, "mlp")
        y = self.routed(x) if moe else self.mlp(x)
        self.tape.returns(x)
        return y

    def routed(self, x: Tensor) -> Tensor:
        """Routed experts, and shared ones beside them where the model has some."""
        y = self.experts(x)
        if not self.arch.shared_experts:
            return y
        shared = self.mlp(x, of(s=1), "shared_")
        if "shared_expert_gate" in self.elements:
            # Qwen2-MoE weighs the shared expert by a sigmoid of its own
            one = Size({"": 1})
            gate = self.linear("shared_expert_gate", x, one)
            gate = self.tape.op("shared: sigmoid", [gate], one, self.c, saves_out=True)
            shared = self.tape.op(
                "shared: weigh", [gate, shared], WIDTH, self.c, saves=[gate, shared], backward_scratch=WIDTH * self.c
            )
        return self.add(y, shared, "experts: add shared")

    # ---- whole segments ----------------------------------------------------------------------------------------

    def layer(self, *, moe: bool) -> Tape:
        """One decoder layer; Gemma 2 norms the output of both blocks too."""
        sandwich = self.arch.norms_per_layer == 4
        a = self.attention(self.norm(self.input, "input_layernorm"))
        if sandwich:
            a = self.norm(a, "post_attention_layernorm")
        x = self.add(self.input, a, "attention: add")
        f = self.norm(x, "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm")
        f = self.feed_forward(f, moe=moe)
        if sandwich:
            f = self.norm(f, "post_feedforward_layernorm")
        self.add(x, f, "mlp: add")
        return self.tape

    def final_norm(self) -> Tape:
        """The norm between the last layer and the head."""
        self.norm(self.input, "norm")
        return self.tape


def _named(q: Size, kv: Size) -> tuple[tuple[str, Size], ...]:
    return ("q", q), ("k", kv), ("v", kv)


@lru_cache(maxsize=4096)
def layer(run: Run, *, moe: bool, first: bool = False, recomputed: bool = False) -> Segment:
    """A decoder layer of `run`: bytes it keeps a token, and the instants of its forward and backward.

    `first`: the layer above a frozen embedding, which keeps less since its input needs no gradient. `recomputed`: the
    layer's input is a checkpoint and not counted here.
    """
    tape = Program(run, -1 if moe else 0, first=first, recomputed=recomputed).layer(moe=moe)
    return segment(tape, dimensions(run.arch, run.adapter.rank if run.adapter else 0))


@lru_cache(maxsize=4096)
def final_norm(run: Run) -> Segment:
    """The norm after the last layer."""
    return segment(Program(run).final_norm(), dimensions(run.arch))
