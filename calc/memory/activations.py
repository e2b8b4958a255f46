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

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, assert_never

from calc.autograd import kernels
from calc.autograd.lifetimes import Lifetimes
from calc.autograd.polynomial import Amount, Segment, amount
from calc.autograd.tape import NOTHING, Size, Tape, Tensor, of
from calc.memory import dispatched_experts, padded_experts
from calc.memory.compiled import Fused, graph
from calc.memory.compressed import CompressedAttention
from calc.memory.crossing import CrossAttention
from calc.memory.expert_loop import ExpertLoop
from calc.memory.forced_fp32 import ForcedFp32
from calc.memory.kda import ChannelDelta
from calc.memory.lightning import Lightning
from calc.memory.linears import WIDTH
from calc.memory.litgpt import LitgptAttention
from calc.memory.megatron import MegatronLayer
from calc.memory.megatron_again import Again
from calc.memory.run import PREFIXES, Run, dimensions, routed, symbol
from calc.memory.selective import SelectiveScan
from calc.memory.weights import SCALE
from calc.models.architecture import BESIDE, BLOCKS, LATENT, PROJECTIONS, LayerSpec, Norms, layer_kinds
from calc.models.lora import EMBEDDING, adapted
from calc.models.mixers import AltUp, Hyper


class Program(ChannelDelta, Lightning, SelectiveScan, ExpertLoop, CompressedAttention, CrossAttention, Again):
    """Writes the operations of one decoder layer, the final norm or a head on a tape."""

    def mlp(self, x: Tensor, width: Size | None = None, owner: str = "") -> Tensor:
        """`down(act(gate(x)) · up(x))`: keeps gate, act(gate), up and their product.

        `owner` is the prefix of the names of its weights.
        """
        tape, names, i = self.tape, self.arch.names, width or of(i=1)
        if "gate" in self.run.replaced and self.arch.gated:
            product = self.gate_kernel(x, i, owner)
            return self.block_output(self.linear(f"{owner}{names.down}", product, WIDTH), "mlp")
        if self.arch.fused_gate_up:
            pair = self.linear(f"{owner}{names.gate_up}", x, i * 2)
            gate, up = tape.split("gate, up", pair, [i, i])
            act = self.activated(gate)
        elif self.arch.multipliers:
            up = self.linear(f"{owner}up_proj", x, i)
            act = self.activated(self.multiplied(self.linear(f"{owner}{names.gate}", x, i), "mlp: gate"))
        elif self.arch.clamped:
            gate, up = (self.between(self.linear(f"{owner}{name}", x, i), name) for name in (names.gate, names.up))
            act = self.activated(gate)
        elif self.arch.gated:
            gate = self.linear(f"{owner}{names.gate}", x, i)
            act = self.activated(self.cut_off(gate) if self.spec.sparse else gate)
            up = self.linear(f"{owner}{names.up}", x, i)
        else:
            act = self.activated(self.linear(f"{owner}{names.up}", x, i))
            return self.block_output(self.linear(f"{owner}{names.down}", act, WIDTH), "mlp")
        product = tape.op("mlp: product", [act, up], i, act.b, saves=[act, up])
        y = self.block_output(self.linear(f"{owner}{names.down}", product, WIDTH), "mlp")
        return self.multiplied(y, "mlp")

    def gate_kernel(self, x: Tensor, i: Size, owner: str) -> Tensor:
        """Liger's `act(gate)·up`: keeps gate and up alone, and writes their gradients over them.

        Halves of one product are copied first (`ensure_contiguous`). liger-kernel 0.8.5 `ops/swiglu.py`, `geglu.py`.
        """
        tape = self.tape
        if self.arch.fused_gate_up:
            halves = tape.split("gate, up", self.linear(f"{owner}{self.arch.names.gate_up}", x, i * 2), [i, i])
            gate, up = (tape.op("mlp: contiguous", [half], i, half.b, aliases=[half]) for half in halves)
        else:
            names = self.arch.names
            gate, up = (self.linear(f"{owner}{name}", x, i) for name in (names.gate, names.up))
        return tape.op("mlp: gate", [gate, up], i, gate.b, saves=[gate, up], overwrites=True)

    def between(self, x: Tensor, name: str) -> Tensor:
        """`torch.clamp` between numbers: keeps its input, and backward makes a mask (DeepSeek-V4)."""
        return self.tape.op(f"mlp: clamp {name}", [x], x.width, x.b, saves=[x], backward_scratch=x.width)

    def cut_off(self, gate: Tensor) -> Tensor:
        """Gemma 3n's gates, less so many standard deviations above their mean, where that is above 0.

        Transformers 5.23 `models/gemma3n/modeling_gemma3n.py`, `Gemma3nTextMLP._gaussian_topk`: the deviation keeps its
        input and itself, and its backward makes the distances from the mean.
        """
        tape, i, b, one = self.tape, gate.width, gate.b, Size({"": 1})
        mean = tape.op("mlp: mean", [gate], one, b)
        wide = tape.op("mlp: deviation", [gate], one, b, saves=[gate], saves_out=True, backward_scratch=i * (2 * b))
        cutoff = tape.op("mlp: cutoff", [mean, tape.op("mlp: deviations", [wide], one, b)], one, b)
        less = tape.op("mlp: less cutoff", [gate, cutoff], i, b, aliases=[gate])
        return tape.op("mlp: cut off", [less], i, b, saves_out=True)

    def activated(self, x: Tensor) -> Tensor:
        """The activation: one kernel that keeps its input or, ReLU, its output; `gelu_new` and `gelu_fast` run many.

        Transformers `activations.py`, `NewGELUActivation` (the first GPT's GELU), `FastGELUActivation` (GPT-NeoX's),
        `QuickGELUActivation` (CLIP's) and
        `ReLUSquaredActivation`.
        """
        tape, kind, i = self.tape, self.arch.activation, x.width
        if kind.startswith("relu"):
            x = tape.op("mlp: activation", [x], i, x.b, saves_out=True)
            if kind == "relu":
                return x
            x = self.cast(x, 4, "mlp: square") if self.autocast else x  # autocast takes powers in fp32
            return tape.op("mlp: square", [x], i, x.b, saves=[x], backward_scratch=x.size * 2)
        if kind == "quick_gelu":
            share = tape.op("mlp: sigmoid", [tape.op("mlp: scale", [x], i, x.b)], i, x.b, saves_out=True)
            return tape.op("mlp: activation", [x, share], i, x.b, saves=[x, share])
        if kind == "gelu_new":
            half = tape.op("mlp: half", [x], i, x.b)
            read = self.cast(x, 4, "mlp: cube") if self.autocast else x
            cube = tape.op("mlp: cube", [read], i, read.b, saves=[read], backward_scratch=read.size * 2)
            cube = tape.op("mlp: part of cube", [cube], i, cube.b)
            inner = tape.op("mlp: add cube", [x, cube], i, cube.b, aliases=[t for t in (x, cube) if t.b == cube.b])
            inner = tape.op("mlp: scale", [inner], i, inner.b)
            tanh = tape.op("mlp: tanh", [inner], i, inner.b, saves_out=True)
            tanh = tape.op("mlp: tanh + 1", [tanh], i, tanh.b, aliases=[tanh])
            return tape.op("mlp: activation", [half, tanh], i, tanh.b, saves=[half, tanh])
        if kind == "xielu" and "activation" not in self.run.replaced:
            return self.expanded_gate(x)
        if kind == "bloom_gelu":
            return self.bloom_gelu(x)
        if kind == "gelu_fast":
            half = tape.op("mlp: half", [x], i, x.b)
            scaled = tape.op("mlp: scale", [x], i, x.b)
            part = tape.op("mlp: part of square", [x], i, x.b)
            square = tape.op("mlp: square", [part, x], i, x.b, saves=[part, x])
            square = tape.op("mlp: square + 1", [square], i, x.b, aliases=[square])
            inner = tape.op("mlp: inner", [scaled, square], i, x.b, saves=[scaled, square])
            tanh = tape.op("mlp: tanh", [inner], i, x.b, saves_out=True)
            tanh = tape.op("mlp: tanh + 1", [tanh], i, x.b, aliases=[tanh])
            return tape.op("mlp: activation", [half, tanh], i, x.b, saves=[half, tanh])
        return tape.op("mlp: activation", [x], i, x.b, saves=[x])

    def bloom_gelu(self, x: Tensor) -> Tensor:
        """BLOOM's GELU: a function of its own, whose operations keep its input alone, one expression each way.

        Transformers 5.23 `models/bloom/modeling_bloom.py`, `bloom_gelu_forward`, `bloom_gelu_back`.
        """
        i = x.size
        # half of x; the tanh's two factors, their product, the tanh, and 1 more
        course = (i, i, i, i, 2, i, 3, i, 1, 4, i, 5, i, 6, None)
        # the tanh again; half of x, the tanh's slope and its argument's, their products, half of 1 more, and the sum
        back = (i, i, i, 1, i, 2, i, 0, 3, i, 4, i, i, i, 7, i, i, 9, i, 10, i, 8, 11, i, 6, 12, i, i, 14, i, 13, 15,
                None)  # fmt: skip
        # beside what is made last there are at most three, and four
        return self.tape.op("mlp: activation", [x], x.width, x.b, saves=[x], scratch=i * 3, backward_scratch=i * 4,
                            course=course, backward_course=back)  # fmt: skip

    def expanded_gate(self, x: Tensor) -> Tensor:
        """xIELU without its CUDA kernel, both sides of which have a slope that is trained (Apertus).

        Transformers `activations.py`, `XIELUActivation._xielu_python`.
        """
        tape, i, b = self.tape, x.width, x.b
        wide = max(b, 4 if self.run.precision == "autocast" else b)  # slopes of fp32 widen what they multiply

        def sloped(x: Tensor, name: str, b: float) -> Tensor:
            """A product with a slope, whose gradient is the sum of a whole product."""
            if not self.run.trained:
                return tape.op(name, [x], i, b)
            return tape.op(name, [x], i, b, saves=[x], weight=1, backward_scratch=i * b)

        def added(x: Tensor, name: str) -> Tensor:
            """The sum with a multiple of the input."""
            part = tape.op("mlp: part", [source], i, source.b)
            b = max(x.b, part.b)
            return tape.op(name, [x, part], i, b, aliases=[t for t in (x, part) if t.b == b])

        source, sides = x, Tensor(i, 1)  # which elements are above 0
        square = sloped(x, "mlp: slope", wide)
        square = tape.op("mlp: square", [square, x], i, wide, saves=[square, x])
        above = added(square, "mlp: above")
        low = tape.op("mlp: lower", [x], i, b, saves=[x])
        low = self.cast(low, 4, "mlp: exponential") if self.autocast else low
        low = tape.op("mlp: exponential", [low], i, low.b, saves_out=True)
        low = tape.op("mlp: less input", [low, x], i, low.b, aliases=[low])
        below = added(sloped(low, "mlp: lower slope", max(low.b, wide)), "mlp: below")
        return tape.op("mlp: activation", [above, below], i, max(above.b, below.b), saves=[sides])

    def experts(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Routed experts as Transformers 5 runs them: tokens sorted by expert, two grouped matrix multiplications.

        `weights` are those of a token's experts, if another than `route` makes them.
        """
        weights = weights or self.route(x)
        if self.arch.latent_experts:
            there, back = LATENT
            y = self.by_experts(self.linear(there, x, of(l=1)), weights)
            return self.linear(back, y, WIDTH)
        return self.by_experts(x, weights)

    def by_experts(self, x: Tensor, weights: Tensor) -> Tensor:
        """The output of experts for the features that they read."""
        if self.run.padded:
            return padded_experts.padded(self, x, weights)
        if self.run.dispatched:
            return dispatched_experts.dispatched(self, x, weights)
        if self.run.looped:
            loop = self.written_in_turn if self.arch.experts_apart else self.one_by_one
            return loop(x, weights, self.expert_gate)
        # a grouped multiplication runs in its weights' type: autocast does not know it
        tape, arch, c = self.tape, self.arch, self.run.residual
        kh, kj = Size({routed(arch): 1}), Size({"k·j": 1})
        order, tokens, inverse = (Tensor(of(k=1), 8) for _ in range(3))
        trained = self.run.trained
        picked = tape.op("experts: sort", [x], kh, x.b, saves=[tokens], backward_scratch=x.size)
        # the rows of the biases are picked by expert
        picks = [Tensor(of(k=1), 8)] * arch.expert_bias
        first = "gate_up_proj" if arch.gated else "up_proj"
        opened = self.opened_experts(first)
        pair = tape.op("experts: gate_up", [picked], kj * (2 if arch.gated else 1), c,
                       saves=[*opened, *([picked, *picks] if trained else [])], weight=self.trained_expert(first),
                       multiplies=True)  # fmt: skip
        product = self.expert_gate(pair, kj, c)
        opened += (last := self.opened_experts("down_proj"))
        down = tape.op("experts: down", [product], kh, c, saves=[*last, *([product] if trained else [])],
                       weight=self.trained_expert("down_proj"), multiplies=True)  # fmt: skip
        wide = max(c, weights.b)  # of both gradients, until the engine casts that of `down`
        weights = tape.op("experts: sort weights", [weights], of(k=1), weights.b, saves=[order])
        weighted = tape.op(
            "experts: weigh", [down, weights], kh, wide, saves=[down, weights], backward_scratch=kh * (2 * wide - c)
        )
        weighted = tape.op("experts: unsort", [weighted], kh, wide, saves=[inverse])
        y = self.cast(tape.op("experts: sum", [weighted], x.width, wide), c, "experts")
        tape.returns(picked, down, *opened)
        return y

    def opened_experts(self, name: str) -> list[Tensor]:
        """A parameter of all experts made 16 bits wide, which `parametrize` caches to the end of the block's forward.

        The product keeps it for its input's gradient (bitsandbytes 0.50.2 `nn/parametrize.py:Bnb4bitParametrization`).
        Its scales, which were quantised, are dequantised before it.
        """
        if self.run.four_bit_experts != "whole" or self.run.caches_experts:
            return []
        weight, scales = (Size({}, {f"W_experts_{name}": each}) for each in (1, SCALE))
        scales = scales if self.run.nested else NOTHING
        return [self.tape.op(f"experts: dequantise {name}", [], weight, self.c, scratch=scales)]

    def trained_expert(self, name: str) -> int:
        """Elements of the routed experts' weights and biases called `name`; 0 if they are not trained."""
        weight = self.elements[f"experts_{name}"] + self.elements.get(f"experts_{name}_bias", 0)
        return weight if self.run.trained else 0

    def expert_gate(self, pair: Tensor, kj: Size, c: int) -> Tensor:
        """The input of the experts' last product, of width `kj`: the family's activation, gated or not."""
        if self.arch.experts_clamped:
            return self.clamped_gate(pair, kj, c)
        if not self.arch.gated:
            return self.activated(pair)
        gate, up = self.tape.split("experts: gate, up", pair, [kj, kj])
        if self.arch.clamped:
            gate, up = self.between(gate, "experts' gate"), self.between(up, "experts' up")
        act = self.tape.op("experts: activation", [gate], kj, c, saves=[gate])
        return self.tape.op("experts: product", [act, up], kj, c, saves=[act, up])

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
        name = arch.router.rpartition(".")[2]
        weight = self.elements[name] if trained else 0
        index = Tensor(k, 8, differentiable=False)
        reads = [x]
        if arch.routing == "fp32":
            # routing runs in fp32, on casts of the input and of the router's weight
            reads = [
                self.cast(x, 4, "router"),
                tape.op("router: to fp32", [], Size({}, {symbol(name): 1}), 4, weight=weight),
            ]
            weight = 0
        if arch.router_linear:
            logits = self.linear(name, x, experts)
        else:
            logits = tape.op("router", reads, experts, reads[-1].b, saves=reads[:1] * trained + reads[1:],
                             weight=weight, product=name not in self.biased, multiplies=True)  # fmt: skip
        if arch.routing == "sampled":
            return self.drawn_experts(logits)
        if arch.routing.startswith("best"):
            logits = self.cast(logits, 4 if arch.routing == "best-fp32" else logits.b, "router")
            best = tape.op("router: top k", [logits], k, logits.b, saves=[index])
            best = tape.op("router: softmax", [best], k, best.b, saves_out=True)
            return self.cast(best, x.b if arch.routing == "best-fp32" else best.b, "router")
        if arch.routing == "softplus":
            wide = self.cast(logits, 4, "router") if self.autocast else logits
            soft = tape.op("router: softplus", [wide], experts, wide.b, saves=[wide])
            shares = tape.op("router: root", [soft], experts, soft.b, saves_out=True)
            best = tape.op("router: gather", [shares], k, shares.b, saves=[index])
            best = tape.op("router: normalise", [best], k, best.b, saves=[best, Tensor(Size({"": 1}), best.b)])
            return tape.op("router: scale", [best], k, best.b)
        if arch.routing == "sigmoid":
            shares = tape.op("router: sigmoid", [logits], experts, logits.b, saves_out=True)
            best = tape.op("router: gather", [shares], k, logits.b, saves=[index])
            if arch.routing_normed:
                best = tape.op("router: normalise", [best], k, best.b, saves=[best, Tensor(Size({"": 1}), best.b)])
            return tape.op("router: scale", [best], k, best.b)
        b = logits.b if arch.routing == "narrow" and not self.autocast else 4  # autocast takes every softmax in fp32
        probabilities = tape.op("router: softmax", [self.cast(logits, b, "router")], experts, b, saves_out=True)
        best = tape.op("router: top k", [probabilities], k, b, saves=[index])
        if arch.routing_normed:
            best = tape.op("router: normalise", [best], k, b, saves=[Tensor(Size({"": 1}), b)], saves_out=True)
        return best if arch.routing_uncast or self.run.padded else self.cast(best, self.c, "router")

    def drawn_experts(self, logits: Tensor) -> Tensor:
        """Phi-3.5 MoE's two experts: each is drawn from those near the best, the second without the first.

        Transformers 5.23 `models/phimoe/modeling_phimoe.py`, `sparsemixer`.
        """
        tape, experts, one, drawn = self.tape, logits.width, Size({"": 1}), list[Tensor]()
        index = Tensor(one, 8, differentiable=False)
        for turn in ("first", "second"):
            far = tape.op(f"router: {turn}: mask", [logits], experts, logits.b, saves=[Tensor(experts, 1), index])
            far = self.cast(far, 4, "router") if self.autocast else far
            shares = tape.op(f"router: {turn}: softmax", [far], experts, far.b, saves_out=True)
            drawn.append(tape.op(f"router: {turn}: weight", [shares], one, far.b, saves=[shares, index]))
        return tape.op("router: join", drawn, of(k=1), drawn[0].b)

    def jittered(self, x: Tensor) -> Tensor:
        """A tensor that noise multiplies in place, twice: before the router, and inside it."""
        for _ in range(2 * (self.arch.jittered and self.run.training)):
            x = self.tape.op("router: jitter", [x], x.width, x.b, view=True, saves=[Tensor(x.width, x.b)])
        return x

    def feed_forward(self, x: Tensor) -> Tensor:
        """A layer's MLP, its routed experts, or routed and shared experts."""
        x = self.gathered(x, "mlp")
        routed = self.spec.mlp == "experts" and not self.arch.experts_beside
        y = self.routed(x) if routed else self.mlp(x, owner=PREFIXES.get(self.arch.names.mlp, ""))
        self.tape.returns(x)
        return y

    def routed(self, x: Tensor) -> Tensor:
        """Routed experts, and shared ones beside them where the model has some."""
        if self.arch.routing == "all":
            return self.all_experts(x)
        if not self.arch.shared_experts:
            return self.experts(self.jittered(x))
        if not self.arch.shared_first:
            y = self.experts(x)
            shared = self.mlp(x, of(s=1), "shared_")
        else:
            shared = self.mlp(x, of(s=1), "shared_")
            y = self.experts(x)
        if self.arch.shared_gate:
            # Qwen2-MoE weighs the shared expert by a sigmoid of its own
            one = Size({"": 1})
            gate = self.linear("shared_expert_gate", x, one)
            gate = self.tape.op("shared: sigmoid", [gate], one, self.c, saves_out=True)
            shared = self.tape.op(
                "shared: weigh", [gate, shared], WIDTH, self.c, saves=[gate, shared], backward_scratch=WIDTH * self.c
            )
        if self.arch.shared_fp32:
            wide = self.add(self.cast(y, 4, "experts"), self.cast(shared, 4, "shared"), "experts: add shared")
            return self.cast(wide, self.run.residual, "experts: add shared")
        return self.add(y, shared, "experts: add shared")

    def all_experts(self, x: Tensor) -> Tensor:
        """Llama 4's: every expert works on every token, weighed by a sigmoid that is 0 for those not chosen.

        Transformers 5.23 `models/llama4/modeling_llama4.py`, `Llama4TextMoe`.
        """
        tape, c = self.tape, self.c
        rows, inner, experts, k = Size({"E·h": 1}), Size({"E·j": 1}), of(E=1), of(k=1)
        logits = self.linear(self.arch.router.rpartition(".")[2], x, experts)
        index = Tensor(k, 8, differentiable=False)
        best = tape.op("router: top k", [logits], k, logits.b, saves=[index])
        scores = tape.op("router: scatter", [best], experts, best.b, saves=[index])
        scores = tape.op("router: sigmoid", [self.cast(scores, 4, "router")], experts, 4, saves_out=True)
        scores = self.cast(scores, best.b, "router")
        copies = tape.op("experts: repeat", [x], rows, x.b)
        picked = tape.op("experts: weigh", [copies, scores], rows, x.b, saves=[copies, scores],
                         backward_scratch=rows * x.b)  # fmt: skip
        pair = self.of_each_expert("gate_up", picked, inner * 2)
        gate, up = tape.split("experts: gate, up", pair, [inner, inner])
        act = tape.op("experts: activation", [gate], inner, c, saves=[gate])
        product = tape.op("experts: product", [up, act], inner, c, saves=[up, act])
        down = self.of_each_expert("down", product, rows)
        shared = self.mlp(x, of(s=1), "shared_")
        total = tape.op("experts: sum", [down], WIDTH, c)
        y = tape.op("experts: add shared", [shared, total], WIDTH, c, view=True, aliases=[shared, total])
        tape.returns(picked, down)
        return y

    def of_each_expert(self, name: str, x: Tensor, out: Size) -> Tensor:
        """A batched product of every expert with every token, which autocast runs on copies in bf16."""
        tape, run, weight, copies = self.tape, self.run, self.trained_expert(f"{name}_proj"), list[Tensor]()
        if run.copies:
            elements = Size({}, {f"W_experts_{name}_proj": 1})
            copies = [tape.op(f"experts: {name}: weight to bf16", [], elements, 2, weight=weight)]
            if run.caches:
                tape.cache(*copies)
        source = self.cast(x, self.c, "experts") if self.autocast else x
        kept = [source] if run.trained else []
        return tape.op(f"experts: {name}", [*copies, source], out, self.c, saves=[*kept, *copies],
                       weight=0 if copies else weight, multiplies=True)  # fmt: skip

    def layer(self) -> Tape:
        """One decoder layer, in the symbols of its kind."""
        return self.written().renamed(self.marks)

    def written(self) -> Tape:
        """A layer: two blocks, normed before or after as the family has it, added to the residual stream."""
        norms = self.arch.norms_of(self.spec)
        if self.arch.altup:
            return self.of_streams(self.arch.altup)
        if self.arch.hyper:
            return self.of_connections(self.arch.hyper)
        self.tape.hold(self.input)  # the model's `hidden_states`, until the layer returns the next
        if self.arch.normed_after:
            return self.of_normed_sums(norms)
        n = self.once_more("layernorm", self.input, lambda x: self.norm(self.narrowed(x), norms.attention))
        if self.arch.joined:
            return self.both_at_once(n)
        if "none" in (self.spec.mixer, self.spec.mlp):
            y = self.feed_forward(n) if self.spec.mixer == "none" else self.mixed_by(n)
            self.add(self.input, y, "add")
            return self.tape
        a = self.once_more("self_attn", n, self.mixed_by)
        if self.arch.normed_stream:
            return self.of_normed(n, a)
        if self.arch.parallel:
            f = self.feed_forward(self.norm(self.input, norms.mlp) if norms.mlp else n)
            self.add(self.add(self.input, a, "attention: add"), f, "mlp: add")
            return self.tape
        a = self.delivered(self.norm(a, norms.attention_output), "attention")
        x = self.add(self.input, a, "attention: add")
        f = self.once_more("mlp", self.once_more("layernorm", x, lambda x: self.norm(x, norms.mlp)), self.feed_forward)
        f = self.of_rows(f) if self.spec.mixer == "cross" else f
        if self.arch.experts_beside and self.spec.mlp == "experts":
            f = self.beside(x, f)
        y = self.add(x, self.delivered(self.norm(f, norms.mlp_output), "mlp"), "mlp: add")
        if self.arch.layer_inputs:
            y = self.with_own_input(y)
        if self.arch.output_scaled:
            self.tape.op("output: scale", [y], y.width, y.b, view=True)
        return self.tape

    def delivered(self, x: Tensor, name: str) -> Tensor:
        """A block's output as it is added to the residual stream: scaled, or weighed by a number of the layer's own."""
        return self.weighed_output(x, name) if self.spec.weighed else self.scaled(x, name)

    def of_normed_sums(self, norms: Norms) -> Tape:
        """OPT 350M's layer: both blocks read the residual stream, and what they add to it is normed with it.

        Transformers 5.23 `models/opt/modeling_opt.py`, `OPTDecoderLayer` with `do_layer_norm_before` off.
        """
        x = self.norm(self.add(self.input, self.mixed_by(self.input), "attention: add"), norms.attention)
        y = self.norm(self.add(x, self.feed_forward(x), "mlp: add"), norms.mlp)
        self.tape.returns(x, y)
        return self.tape

    def of_connections(self, own: Hyper) -> Tape:
        """DeepSeek-V4's layer: both blocks read a sum of all streams, and write to all."""
        x = self.tape.hold(self.streamed(own.streams))
        first, second = BLOCKS
        x = self.connected(x, first, own, lambda n: self.mixed_by(self.norm(n, self.arch.norms.attention)))
        self.connected(x, second, own, lambda n: self.feed_forward(self.norm(n, self.arch.norms.mlp)))
        return self.tape

    def of_normed(self, n: Tensor, a: Tensor) -> Tape:
        """MiniMax-Text-01's residual stream: each block's normed input and its output, both multiplied and added.

        Transformers 5.23 `models/minimax/modeling_minimax.py`, `MiniMaxDecoderLayer`.
        """
        m = self.norm(self.both_scaled(n, a, "attention"), self.arch.norms.mlp)
        self.both_scaled(m, self.feed_forward(m), "mlp")
        return self.tape

    def both_scaled(self, n: Tensor, y: Tensor, name: str) -> Tensor:
        """The sum of multiples of a block's normed input and of its output."""
        kept = self.tape.op(f"{name}: input: scale", [n], n.width, n.b)
        made = self.tape.op(f"{name}: output: scale", [y], y.width, y.b)
        return self.add(kept, made, f"{name}: add")

    def with_own_input(self, x: Tensor) -> Tensor:
        """Gemma 4's last block, which multiplies by the layer's own embedding of the token, a slice of all layers'.

        The gradient of a slice is a tensor as large as all of them, which is added to that of the layers above.
        """
        return self.add(x, self.from_own_input(x), "layer input: add")

    def from_own_input(self, x: Tensor) -> Tensor:
        """The output of that block."""
        tape, width = self.tape, of(p=1)
        act = self.activated(self.linear("per_layer_input_gate", x, width))
        own = self.elsewhere("layer input: pick", width, self.run.residual)
        own.differentiable = self.run.trained or self.counted
        saved = [*[act] * own.differentiable, own]
        y = tape.op("layer input: product", [act, own], width, max(act.b, own.b), saves=saved,
                    backward_scratch=of(Lp=own.b) if own.differentiable else NOTHING)  # fmt: skip
        return self.norm(self.linear("per_layer_projection", y, WIDTH), "post_per_layer_input_norm")

    def of_streams(self, up: AltUp) -> Tape:
        """Gemma 3n's layer: it predicts all streams, computes on the first, and corrects all by what came of that.

        Transformers 5.23 `models/gemma3n/modeling_gemma3n.py`, `Gemma3nTextDecoderLayer`, `Gemma3nTextAltUp`.
        """
        tape, norms, n = self.tape, self.arch.norms, up.streams
        x, all_streams, b = self.streamed(up.streams), WIDTH * n, self.run.residual
        tape.hold(x)
        active = tape.op("altup: active", [x], WIDTH, x.b, view=True)
        shares = self.linear("prediction_coefs", self.modalities(active, up), Size({"": n * n}))
        read = [self.cast(t, self.c, "altup: predict") for t in (x, shares)]
        y = tape.op("altup: predict", read, all_streams, self.c, saves=read)
        y = tape.op("altup: add input", [y, x], all_streams, y.b, view=True, aliases=[y])
        predicted = self.cast(tape.op("altup: contiguous", [y], all_streams, y.b), b, "altup: predict")
        active = tape.op("altup: active prediction", [predicted], WIDTH, b, view=True)
        normed = self.norm(active, norms.attention)
        low = self.linear("linear_right", self.linear("linear_left", normed, Size({"": up.laurel})), WIDTH)
        laurel = self.add(normed, self.norm(low, "post_laurel_norm"), "laurel: add")
        a = self.norm(self.attention(normed), norms.attention_output)
        both = self.add(self.add(active, a, "attention: add"), laurel, "laurel: add both")
        middle = tape.op("laurel: scale", [both], WIDTH, both.b)
        f = self.norm(self.feed_forward(self.norm(middle, norms.mlp)), norms.mlp_output)
        out = self.add(middle, f, "mlp: add")
        shares = self.modalities(out, up, again=True)
        news = tape.op("altup: innovation", [out, active], WIDTH, out.b, aliases=[out])
        news = tape.op("altup: repeat", [news], all_streams, news.b)
        shares = self.linear("correction_coefs", shares, Size({"": n}))
        shares = tape.op("altup: correction + 1", [shares], Size({"": n}), shares.b, aliases=[shares])
        y = tape.op("altup: correct", [news, shares], all_streams, max(news.b, shares.b), saves=[news, shares],
                    backward_scratch=all_streams * news.b)  # fmt: skip
        y = self.cast(tape.op("altup: add prediction", [y, predicted], all_streams, y.b, view=True,
                              aliases=[y, predicted]), b, "altup: correct")  # fmt: skip
        first = tape.op("altup: first", [y], WIDTH, b)
        weight = self.elements["correct_output_scale"] if self.run.trained else 0
        scaled = tape.op("altup: scale", [first], WIDTH, first.b, saves=[first] if weight else [], weight=weight,
                         backward_scratch=WIDTH * first.b if weight else NOTHING)  # fmt: skip
        own = self.from_own_input(scaled)
        # written into a slice, whose gradient is that of the whole with zeros there
        tape.op("layer input: add", [y, own], all_streams, b, view=True, aliases=[y],
                backward_scratch=all_streams * b)  # fmt: skip
        tape.returns(predicted, laurel, both, middle, out)
        return tape

    def modalities(self, x: Tensor, up: AltUp, *, again: bool = False) -> Tensor:
        """A layer's router of streams; its second use in a layer adds to the gradients of its first, `again`."""
        tape, few = self.tape, Size({"": up.streams})
        if again:
            self.elements = {**self.elements, "router_norm": 0, "modality_router": 0}
        n = self.norm(x, "router_norm")
        n = tape.op("altup: scale router", [n], WIDTH, n.b)
        y = self.cast(self.linear("modality_router", n, few), 4, "altup: tanh")
        return self.cast(tape.op("altup: tanh", [y], few, 4, saves_out=True), x.b, "altup: tanh")

    def merged(self, up: AltUp) -> Tensor:
        """One stream of all after the last layer: projections with the first one's magnitude, and their mean."""
        tape, x, b = self.tape, self.streamed(up.streams), self.run.residual
        tape.hold(x)
        first = tape.op("streams: first", [x], WIDTH, b, view=True)
        size = self.magnitude(first)
        parts = [first]
        for n in range(1, up.streams):
            own = tape.op(f"streams: {n}", [x], WIDTH, b, view=True)
            parts.append(self.resized(f"altup_unembed_projections.{n}", own, size))
        y = tape.op("streams: stack", parts, WIDTH * up.streams, b)
        return tape.op("streams: mean", [y], WIDTH, b)

    def magnitude(self, x: Tensor) -> Tensor:
        """The root of the mean square, which keeps what it is made of."""
        one = Size({"": 1})
        square = self.tape.op("streams: square", [x], WIDTH, x.b, saves=[x], backward_scratch=WIDTH * (2 * x.b))
        mean = self.tape.op("streams: mean square", [square], one, x.b)
        return self.tape.op("streams: magnitude", [mean], one, x.b, saves=[mean])

    def resized(self, name: str, x: Tensor, size: Tensor) -> Tensor:
        """A projection of a stream, brought to the magnitude `size`."""
        tape = self.tape
        self.elements = {**self.elements, name: self.arch.hidden**2}
        y = self.whole(name, x, WIDTH)
        own = self.magnitude(y)
        times = tape.op("streams: times", [y, size], WIDTH, y.b, saves=[y, size], backward_scratch=WIDTH * y.b)
        return tape.op("streams: over", [times, own], WIDTH, y.b, saves=[times, own], backward_scratch=WIDTH * y.b)

    def parted(self, up: AltUp) -> Tape:
        """The streams that the first layer reads, of the embedding."""
        size = self.magnitude(self.input)
        parts = [self.resized(f"altup_projections.{n}", self.input, size) for n in range(1, up.streams)]
        self.tape.hold(self.tape.op("streams: stack", [self.input, *parts], WIDTH * up.streams, self.run.residual))
        return self.tape

    def outer_linear(self, way: int) -> Tensor:
        """The linear without bias between the stream and a narrower embedding, or what a head reads instead (OPT 350M).

        PEFT's `all-linear` puts adapters beside both, which are left out.
        """
        name, out = PROJECTIONS[way], (WIDTH, of(e=1))[way]
        self.elements = {**self.elements, name: self.arch.hidden * self.arch.outer}
        return self.linear(name, self.input, out)

    def projected_embedding(self) -> Tape:
        """That before the first layer."""
        self.input = Tensor(of(e=1), self.run.residual, differentiable=self.input.differentiable)
        self.outer_linear(0)
        return self.tape

    def adapted_embedding(self) -> Tape:
        """The embedding's rows and, beside them, those of its adapter's first matrix times the second, in its type.

        What comes of the frozen rows needs no gradient. peft 0.21 `tuners/lora/layer.py`, `Embedding.forward`; nothing
        is dropped out, and autocast leaves the rows as they are.
        """
        adapter, tape, label = self.run.adapter, self.tape, f"{EMBEDDING}: LoRA"
        assert adapter is not None
        rank, outer, rows = adapter.rank, self.arch.outer, of(e=1) if self.arch.narrow else WIDTH
        y = tape.op(EMBEDDING, [], rows, self.run.residual)
        down = tape.op(f"{label} A", [], of(r=1), adapter.b, weight=rank * self.arch.embedding_rows)
        up = self.through(f"{label} B", down, rows, outer * rank)
        scaled = tape.op(f"{label} scale", [up], rows, up.b)
        self.with_adapters(label, y, [scaled])
        return tape

    def embedding_norm(self) -> Tape:
        """The norm between the embedding and the first layer (BLOOM)."""
        self.norm(self.input, self.arch.names.embedding_norm)
        return self.tape

    def layer_inputs(self) -> Tape:
        """All layers' own embeddings of a token: a row of a table, and a projection of the model's embedding, normed.

        Transformers 5.23 `models/gemma4/modeling_gemma4.py`, `project_per_layer_inputs`.
        """
        tape, run, all_layers = self.tape, self.run, of(Lp=1)
        rows = tape.op("layer inputs: rows", [], all_layers, run.residual, weight=int(run.trained))
        rows = tape.op("layer inputs: scale", [rows], all_layers, rows.b)
        x = self.whole("per_layer_model_projection", self.input, all_layers)
        x = tape.op("layer inputs: scale projection", [x], all_layers, x.b)
        x = self.norm(x, "per_layer_projection_norm", of(L=1))
        both = tape.op("layer inputs: add", [x, rows], all_layers, rows.b, aliases=[x, rows])
        scaled = tape.op("layer inputs: scale sum", [both], all_layers, both.b)
        tape.hold(scaled)
        return tape

    def narrowed(self, x: Tensor) -> Tensor:
        """The residual stream as a layer reads it, in the type of its norm's weight where the stream is in fp32."""
        return self.cast(x, self.run.weight, "norm") if self.arch.wide_stream else x

    def lending(self) -> Tape:
        """The keys and values of a layer whose own are borrowed by others, from the layer's input."""
        tape, kv = self.tape, of(kv=1)
        n = self.norm(self.input, self.arch.norms.attention)
        k = self.linear("k_proj", n, kv)
        v = k if self.arch.keys_as_values else self.linear("v_proj", n, kv)
        v = self.unweighed_heads(v, "v: norm", of(K=1))
        k = self.rotate(self.norm(k, self.arch.names.k_norm, of(K=1)), "k: rotate")
        tape.op("lend", [k, v], kv * 2, (k.b + v.b) / 2)
        return tape.renamed(self.marks)

    def beside(self, x: Tensor, dense: Tensor) -> Tensor:
        """Gemma 4's experts, whose output is added to that of a dense MLP; each has norms of its own.

        Transformers 5.23 `models/gemma4/modeling_gemma4.py`, `Gemma4TextDecoderLayer`.
        """
        before, after = BESIDE[1:]
        dense = self.norm(dense, BESIDE[0])
        weights = self.route_normed(x)
        y = self.norm(self.experts(self.norm(x, before), weights), after)
        return self.add(dense, y, "experts: add dense")

    def route_normed(self, x: Tensor) -> Tensor:
        """Gemma 4's router (`Gemma4TextRouter`): a norm without weights, a scale of each channel and of each expert."""
        tape, trained = self.tape, self.run.trained
        n = self.cast(self.unweighed(self.cast(x, 4, "router: norm"), "router: norm", Size({"": 1})), x.b, "router")
        weight = self.elements["scale"] if trained else 0
        n = tape.op("router: weight", [n], n.width, n.b, saves=[n] if trained else [], weight=weight,
                    backward_scratch=n.size if trained else NOTHING)  # fmt: skip
        n = tape.op("router: scale", [n], n.width, n.b)
        best = self.route(n)
        index, own = Tensor(best.width, 8), Tensor(best.width, self.run.weight)
        weight = self.elements["per_expert_scale"] if trained else 0
        return tape.op("router: scale of expert", [best], best.width, best.b, saves=[best, own, index], weight=weight)

    def mixed_by(self, n: Tensor) -> Tensor:
        """The block in which positions see each other."""
        match self.spec.mixer:
            case "attention" | "latent":
                return self.attention(n)
            case "compressed":
                return self.compressed_attention(n)
            case "cross":
                return self.cross_attention(n)
            case "delta":
                return self.channel_delta(n) if self.arch.delta and self.arch.delta.low else self.delta_rule(n)
            case "lightning":
                return self.lightning(n)
            case "ssm":
                return self.selective_scan(n) if self.arch.ssm and self.arch.ssm.rank else self.state_space(n)
            case "both":
                states = self.multiplied(self.state_space(n), "ssm")
                heads = self.multiplied(self.attention(self.multiplied(n, "attention: input")), "attention")
                return self.add(states, heads, "mixers: add")
            case "conv":
                return self.short_convolution(n)
            case "none":
                return n
            case other:
                assert_never(other)

    def short_convolution(self, x: Tensor) -> Tensor:
        """LFM2's block: an input gate, a causal convolution of each channel, and an output gate, from one projection.

        Transformers 5.23 `models/lfm2/modeling_lfm2.py`, `Lfm2ShortConv`, with its own `causal_conv1d_fn` or, where
        kernels run, causal-conv1d's.
        """
        tape, c = self.tape, self.c
        joined = self.linear("conv_in_proj", x, WIDTH * 3)
        before, after, value = tape.split("conv: B, C, x", joined, [WIDTH] * 3)
        gated = tape.op("conv: B·x", [before, value], WIDTH, joined.b, saves=[before, value])
        weight = self.elements["conv_conv"] if self.run.trained else 0
        read = gated
        if not self.run.linear_kernels:
            read = self.cast(gated, 4 if self.run.precision == "autocast" else gated.b, "conv: convolution")
            read = self.cast(read, c, "conv: convolution")
        y = tape.op("conv: convolution", [read], WIDTH, read.b, saves=[read], weight=weight)
        y = tape.op("conv: cut", [y], WIDTH, y.b, view=True)
        y = tape.op("conv: C·y", [after, y], WIDTH, y.b, saves=[after, y])
        y = tape.op("conv: contiguous", [y], WIDTH, y.b)
        out = self.linear("conv_out_proj", y, WIDTH)
        tape.returns(x, joined, gated, y)
        return out

    def both_at_once(self, n: Tensor) -> Tape:
        """Falcon's layer: both norms before both blocks, whose outputs are added in place of the MLP's."""
        m = self.norm(self.input, self.arch.norms.mlp) if self.arch.norms.mlp else n
        a = self.attention(n)
        f = self.feed_forward(m)
        both = self.tape.op("mlp: add attention", [f, a], f.width, f.b, view=True, aliases=[f, a])
        self.add(self.input, both, "mlp: add")
        self.tape.returns(n, m, a)
        return self.tape

    def final_norm(self) -> Tape:
        """The norm between the last layer and the head, or what is there instead."""
        if self.arch.hyper:
            x = self.one_stream(self.arch.hyper)
        else:
            x = self.merged(self.arch.altup) if self.arch.altup else self.tape.hold(self.input)
        self.norm(x, self.arch.names.final_norm)
        if self.arch.narrow:
            self.outer_linear(1)
        if not self.tape.ops:  # the last layer's output goes to the head as it is
            self.tape.op("view", [x], x.width, x.b, view=True)
        return self.tape


def below_layers(run: Run, recompute: bool, masked: bool = False) -> Size:
    """Bytes kept below the first layer: a dropout mask and, with checkpointing, embedding output and attention masks.

    PEFT makes the embedding's output a leaf that requires a gradient (`_prepare_model_for_gradient_checkpointing`); if
    a number or a dropout mask multiplies it, or tokens of images are put in a copy (`masked_scatter` in
    `modeling_{qwen2_vl,internvl,…}.py`), the first layer's input is another tensor, and the leaf counts here. Eager
    attention gets a mask in the type of the residual stream, and another one if some of the layers slide: checkpoints
    keep both. SDPA's mask of rows that lie end to end, or of images whose tokens see each other, has a byte for each
    two positions. Beside an adapter the frozen rows are that leaf, where a hook was there before PEFT.
    """
    dropped = run.arch.embedding_dropout and run.training
    masks = len({spec.slides for spec in run.arch.specs})
    leaf = recompute and run.adapter is not None
    first = not (run.trained or leaf or run.adapts_embedding)
    kept = of(h=1) if dropped and (run.trained or leaf) else NOTHING
    if recompute and run.kernel == "eager":
        kept += Size({"S": masks * run.residual})
    if recompute and masked and (run.arch.end_to_end or run.arch.windows_masked):
        kept += Size({"S": 1})
    if recompute:
        kept += lent(run)
    if run.arch.narrow:
        kept += Program(run, first=first).projected_embedding().saved()
    if run.adapts_embedding:
        kept += Program(run).adapted_embedding().saved()
    if run.arch.names.embedding_norm:
        kept += Program(run, first=first).embedding_norm().saved()
    if run.arch.layer_inputs:
        tape = Program(run, first=first, counted=recompute).layer_inputs()
        kept += tape.saved() + of(Lp=run.residual)
    if run.arch.altup:
        tape = Program(run, first=first, counted=recompute).parted(run.arch.altup)
        kept += tape.saved()
    if run.adapts_embedding:
        leaf = leaf and run.hooked
    if leaf and run.arch.narrow:
        return kept + of(e=run.residual)
    apart = dropped or run.arch.embedding_scaled or run.sees or run.arch.hyper or run.adapts_embedding
    return kept + (of(h=run.residual) if leaf and apart else NOTHING)


def lent(run: Run) -> Size:
    """Bytes of the keys and values that several layers read, to whose checkpoints they are inputs."""
    kinds = [run.arch.at(spec) for spec, _ in layer_kinds(run.arch) if spec.borrows]
    return Size({"": sum([own.kv_heads * own.head_dim * (run.residual + run.compute) for own in kinds])})


def handed_on(run: Run, spec: LayerSpec) -> Size:
    """Bytes of the choice of keys, four a key, that a layer hands on to the next, to whose checkpoint it is an input.

    A sequence shorter than the keys that are chosen has fewer, which is not followed (transformers 5.23
    `models/glm_moe_dsa/modeling_glm_moe_dsa.py`, `prev_topk_indices`).
    """
    x = run.arch.indexer
    return Size({"": 4 * x.keys}) if x and x.passed and spec.chooses else NOTHING


def lent_again(run: Run) -> tuple[tuple[int, Amount], ...]:
    """Bytes of keys and values that each lending layer makes when it runs again, and what their backward would need.

    The layers below hold the dictionary into which the layer puts them, as an argument of their checkpoints.
    """
    specs = run.arch.specs
    kinds = dict.fromkeys(spec.shapes._replace(borrows=False) for spec in specs if spec.borrows)
    found = []
    for kind in kinds:
        tape = Program(run, kind, counted=True).lending()
        last = max([n for n, spec in enumerate(specs) if spec.shapes == kind], default=0)
        found.append((last, amount(tape.saved() + tape.final.size, dimensions(run.arch))))
    return tuple(found)


class Litgpt(LitgptAttention, Program):
    """Writes the operations of a model that litgpt's code runs."""


class Compiled(Fused, Program):
    """Writes the operations of a layer that `torch.compile` has compiled."""

    def layer(self) -> Tape:
        """The layer as one graph."""
        return graph(super().layer())


class Forced(ForcedFp32, Program):
    """Writes the operations of a layer that Unsloth forces to fp32 between its products."""


def program(run: Run, spec: LayerSpec | None = None, **how: bool) -> Program | MegatronLayer:
    """The program of a layer of the kind `spec`, by the library whose code runs it; `how`: see `Linears`."""
    match run.arch.modeling:
        case "":
            return (Forced if run.forced else Compiled if run.compiled else Program)(run, spec, **how)
        case "litgpt":
            return Litgpt(run, spec, **how)
        case "megatron" | "megatron-plain" | "megatron-local":
            return MegatronLayer(run, spec, **how)
        case other:
            assert_never(other)


class Kind(NamedTuple):
    """The properties of a layer, beside the run, on which its tape depends.

    `spec` has no window: all that a tape sees of one is that SDPA is `masked`. `first`: the layer lies
    above a frozen embedding, or above frozen layers without adapters, whose output needs no gradient. `wide`: its
    linears multiply in 16 bits, though others cast what they read. `again`: it runs again for its backward.
    """

    spec: LayerSpec
    masked: bool
    first: bool
    wide: bool = False
    again: bool = False

    def run(self, run: Run) -> Run:
        """The settings of `run` for such a layer."""
        own = replace(run, kept_end=0) if run.kept_end else run
        own = replace(own, narrow="" if self.wide else own.narrow, wide_end=0) if own.wide_end else own
        plain = own.arch.fused_qkv == "picked" or own.forced  # what SDPA takes without a mask, it takes with one
        return replace(own, kernel="masked") if self.masked and not plain else own


def lowest_adapted(run: Run) -> int:
    """The first layer with an adapter, whose input needs no gradient unless something makes it; 0 without adapters."""
    if run.adapter is None:
        return 0
    targets = run.adapter.targets
    found = {spec: bool(adapted(run.arch, spec, targets)) for spec, _ in layer_kinds(run.arch)}
    return next((n for n, spec in enumerate(run.arch.specs) if found[spec.shapes]), 0)


def kinds(run: Run, masked: bool, recompute: bool) -> list[Kind]:
    """The kind of each layer; `masked`: windows shorter than the sequence force SDPA's masked kernel on sliding layers.

    Sinks leave eager attention or flash, whatever the window. With checkpointing, PEFT makes the embedding's output
    require a gradient, see `below_layers`; in ms-swift's model on Megatron-core it always does (mcore-bridge 1.6.5
    `model/gpt_model.py`, `_preprocess`).
    """
    arch, lowest = run.arch, lowest_adapted(run)
    required = recompute or arch.megatron
    return [
        Kind(
            spec._replace(slides=False),
            masked and (arch.masked or spec.slides) and not arch.attention_sinks,
            n <= lowest and not run.trained and not required and not run.fed,
            n >= arch.layers - run.wide_end,
            recompute and n < arch.layers - run.kept_end,
        )
        for n, spec in enumerate(arch.specs)
    ]


def layer(
    run: Run,
    spec: LayerSpec,
    *,
    first: bool = False,
    counted: bool = False,
    received: bool = False,
    selective: bool = False,
    reentrant: bool = False,
) -> Segment:
    """A decoder layer of the kind `spec`: bytes it keeps a token, and the instants of its forward and backward.

    `first`: the layer above a frozen embedding, which keeps less since its input needs no gradient. `counted`: the
    layer's input is a checkpoint, or a buffer, and not counted here; `received`: nor is the gradient of its output.
    `selective`: the layer is run again except for what a policy keeps; `reentrant`: as a whole.
    """
    return _layer(run.alone(spec), spec, first, counted, received, selective, reentrant)


@lru_cache(maxsize=1024)
def _layer(
    run: Run, spec: LayerSpec, first: bool, counted: bool, received: bool, selective: bool, reentrant: bool
) -> Segment:
    how = {"first": first, "counted": counted, "received": received, "selective": selective, "reentrant": reentrant}
    tape = program(run, spec, **how).layer()
    return Segment(tape, dimensions(run.arch, run.adapter.rank if run.adapter else 0))


@lru_cache(maxsize=256)
def lifetimes(run: Run, spec: LayerSpec, first: bool, received: bool, selective: bool) -> Lifetimes:
    """The passes over the tape of a layer of the kind `spec`, see `layer`: the same for every batch."""
    return Lifetimes(program(run, spec, first=first, received=received, selective=selective).layer())


class Traffic(NamedTuple):
    """The kernels of a layer besides matrix products: bytes forward and backward, and their number in each.

    `kept`: tensors that forward saves.
    """

    forward: Amount
    backward: Amount
    kernels: tuple[int, int]
    kept: int


def traffic(run: Run, spec: LayerSpec) -> Traffic:
    """The traffic of a layer of the kind `spec`; see `calc.autograd.kernels`."""
    return _traffic(run.alone(spec), spec)


@lru_cache(maxsize=4096)
def _traffic(run: Run, spec: LayerSpec) -> Traffic:
    dims = dimensions(run.arch, run.adapter.rank if run.adapter else 0)
    tape = program(run, spec).layer()
    there, back = kernels.forward(tape), kernels.backward(tape)
    return Traffic(amount(there.moved, dims), amount(back.moved, dims), (there.number, back.number), there.kept)


@lru_cache(maxsize=4096)
def kept_products(run: Run) -> int:
    """Elements, over all layers, of the matrices whose products selective checkpointing does not compute again.

    A token is multiplied with each element once; `run.arch` is the whole model, and its adapters count, too.
    """
    arch, total = run.arch, 0.0
    dims = dimensions(arch, run.adapter.rank if run.adapter else 0)
    for spec, layers in layer_kinds(arch):
        ops = program(run, spec, selective=True).layer().ops
        sizes = [
            [amount(t.width, dims).tokens for t in (op.inputs[0], op.outs[0])] for op in ops if op.product and op.kept
        ]
        total += layers * sum(inputs * outputs for inputs, outputs in sizes)
    return int(total)


@lru_cache(maxsize=4096)
def final_norm(run: Run) -> Segment:
    """The norm after the last layer."""
    return Segment(program(run).final_norm(), dimensions(run.arch))
