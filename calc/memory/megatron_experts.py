"""Megatron-core's routed experts on a tape: the router, tokens on their way to their experts and back, the experts.

With expert parallelism each rank has some of the experts and gets the tokens for them, as many as it sends where the
experts are called equally often. A capacity bounds what an expert gets of each rank, or fills it up to that. With
expert tensor parallelism its ranks gather these tokens, and each has a part of every expert. A layer keeps the input of
the router, where each token goes, and of each token and expert the input of the experts, of the activation, and of the
second product. Read in Megatron-LM d98e8a64dd `megatron/core/transformer/moe/{moe_layer,router,moe_utils,
token_dispatcher,experts}.py`, `fusions/fused_bias_swiglu.py`.
"""

from __future__ import annotations

from calc.autograd.tape import Size, Tensor
from calc.memory.megatron_adapters import BF16
from calc.memory.megatron_linears import MegatronLinears
from calc.memory.run import routed
from calc.models.architecture import LATENT

FP32, INDEX = 4, 8


class MegatronExperts(MegatronLinears):
    """Writes the routed experts of one of Megatron-core's layers."""

    def picked(self, symbol: str, times: float = 1) -> Size:
        """A size for each token and expert that it is sent to, of the tokens that this rank's router sees."""
        return Size({symbol: times * self.run.share})

    def latent_experts(self, x: Tensor) -> Tensor:
        """Experts of a width of their own, between two products that no rank shares; the router reads the stream."""
        first, last = LATENT
        own = Size({"l": self.run.share})
        y = self.experts(self.whole_product(first, x, own, first), x, own)
        return self.whole_product(last, y, self.stream, last)

    def experts(self, x: Tensor, routed_by: Tensor | None = None, out: Size | None = None) -> Tensor:
        """From the norm's output to the experts' weighted sum; the router may read another tensor than they.

        `out`: the width of the sum, if not the stream's.
        """
        tape, received = self.tape, self.arch.expert_tensor * self.run.imbalance
        probabilities = self.route(routed_by or x)
        goes, picks = self.picked(routed(self.arch), self.run.sent), self.picked("k", self.run.sent)
        places = [Tensor(picks, INDEX)]
        sent = tape.op("experts: permute", [x, probabilities], goes, BF16, saves=places)
        got = self.picked(routed(self.arch), self.run.imbalance)
        there = tape.op("experts: all-to-all", [sent], got, BF16) if self.arch.expert_ranks > 1 else sent
        whole = self.picked(routed(self.arch), received)
        if self.arch.expert_tensor > 1:
            there = tape.op("experts: gather", [there], whole, BF16)
        several = self.arch.local_experts > 1
        tokens = tape.op("experts: sort", [there], whole, BF16) if several else there
        y = self.multiplied(tokens, whole, received)
        if several:
            y = tape.op("experts: unsort", [y], whole, BF16)
        if self.arch.expert_tensor > 1:
            y = tape.op("experts: reduce-scatter", [y], got, BF16)
        back = tape.op("experts: all-to-all back", [y], sent.width, BF16) if self.arch.expert_ranks > 1 else y
        tape.returns(sent, there)
        # `index_add_`, which is deterministic, keeps what it adds; `scatter_add_` does not (`unpermute`)
        added = [back] if self.run.deterministic else []
        return tape.op("experts: unpermute", [back], out or self.stream, BF16, saves=added)

    def route(self, x: Tensor) -> Tensor:
        """The router: a number for each token and expert, the best of them, and the load-balancing loss's scores.

        Its input is kept, whether it is trained or not (`RouterGatingLinearFunction`). Scores are computed in fp32 and
        have the type of the logits again. To pick the weights of the rows that are sent, `permute` turns both maps, and
        keeps its copies (`masked_select` of Megatron-core 0.16.1; d98e8a64dd sorts the map: 8·E).
        """
        tape, each, best = self.tape, self.picked("E"), self.picked("k")
        name = self.arch.router.rpartition(".")[2]
        weight = self.trained_elements(name)
        logits = tape.op("router", [x], each, BF16, saves=[x], weight=weight, multiplies=True)
        scores = Tensor(each, FP32)  # of the load-balancing loss, over all experts
        chosen = tape.op("router: top k", [logits], best, BF16, saves=[Tensor(best, INDEX), scores])
        weighed = tape.op("router: softmax", [chosen], best, FP32, saves_out=True)
        maps = [Tensor(each, 1), Tensor(each, BF16)]
        if self.run.capacity:
            probabilities = self.dropped(tape.op("router: scatter", [weighed], each, BF16), each, maps)
        else:
            probabilities = tape.op("router: scatter", [weighed], each, BF16, saves=maps)
        if not self.arch.experts_beside:
            return probabilities
        scale = self.trained_elements("per_expert_scale")
        saves = self.kept(probabilities)
        return tape.op("router: scale of expert", [probabilities], each, BF16, saves=saves, weight=scale)

    def dropped(self, probabilities: Tensor, each: Size, maps: list[Tensor]) -> Tensor:
        """Probabilities without those of tokens beyond each expert's capacity (`apply_router_token_dropping`).

        The dispatcher keeps the maps that are left, of which the product reads one. On the way the best tokens of each
        expert are there with their places, and what becomes a map of these: zeros, and a copy with ones.
        """
        best = self.picked("k", min(self.run.capacity, self.arch.experts / self.arch.experts_per_token)) * (
            BF16 + INDEX
        )
        return self.tape.op("router: drop", [probabilities], each, BF16, saves=maps, scratch=best + each * (2 * BF16))

    def multiplied(self, tokens: Tensor, whole: Size, received: float) -> Tensor:
        """Two grouped products with the activation between, which weighs each token.

        The gate of SwiGLU is fused with the weight; other activations are three operations, each of which keeps what it
        reads.
        """
        tape = self.tape
        weight = [Tensor(self.picked("k", received), BF16)]
        if self.arch.routing == "all":
            tokens = self.weighed_before(tokens, received)
        inner, low = self.picked("k·j", received), self.picked("k·r", received)
        first = inner * 2 if self.arch.gated else inner
        names = ("gate_up_proj" if self.arch.gated else "up_proj", "down_proj")
        up, down = (self.trained_elements(f"experts_{name}", f"experts_{name}_bias") for name in names)
        pair = tape.op("experts: fc1", [tokens], first, BF16, saves=self.read(tokens), weight=up,
                       scratch=self.narrowed(whole), backward_scratch=self.narrowed(first) * 2,
                       multiplies=True)  # fmt: skip
        pair = self.adapted_by("experts_linear_fc1", tokens, pair, low)
        first_op = len(tape.ops)
        if self.arch.gated and self.arch.activation != "silu":
            act = self.weighed_apart(self.plain_gate(pair, inner, "experts"), inner, weight)
        elif self.arch.gated:
            read = self.clamped(pair, inner) if self.arch.experts_clamped else pair
            act = tape.op("experts: activation", [read], inner, BF16, saves=[read, *weight])
        else:
            act = tape.op("experts: activation", [pair], inner, BF16, saves=[pair])
            act = tape.op("experts: weigh", [act], inner, BF16, saves=[act, *weight])
        end = len(tape.ops)
        saves = self.read(act, original="moe_act" in self.run.again)
        out = tape.op("experts: fc2", [act], whole, BF16, saves=saves, weight=down, scratch=self.narrowed(inner),
                      backward_scratch=self.narrowed(whole) * 2, multiplies=True)  # fmt: skip
        out = self.adapted_by("experts_linear_fc2", act, out, low)
        self.behind("moe_act", first_op, end, weight)
        return self.with_bias(out, weight) if self.arch.expert_bias else out

    def plain_gate(self, pair: Tensor, inner: Size, owner: str) -> Tensor:
        """A gated activation that no kernel fuses (`mlp.py`, `glu`): a copy of the ups, to which a number is added.

        Backward needs the gate's half of the product, the activated gate and that copy.
        """
        gate, up = self.tape.split(f"{owner}: gate, up", pair, [inner, inner])
        activated = self.tape.op(f"{owner}: activation", [gate], inner, BF16, saves=[gate])
        up = self.tape.op(f"{owner}: offset", [up], inner, BF16, aliases=[up])
        return self.tape.op(f"{owner}: product", [activated, up], inner, BF16, saves=[activated, up])

    def weighed_apart(self, act: Tensor, inner: Size, weight: list[Tensor]) -> Tensor:
        """The product with the router's probabilities, in fp32 as these are, and cast back."""
        wide = self.tape.op("experts: weigh", [act], inner, FP32, saves=[act, *weight])
        return self.tape.op("experts: to bf16", [wide], inner, BF16)

    def weighed_before(self, tokens: Tensor, received: float) -> Tensor:
        """What experts read, weighed before them in fp32 (`moe_apply_probs_on_input`): their outputs' weights are 1."""
        weight = Tensor(self.picked("k", received), BF16)
        wide = self.tape.op("experts: weigh input", [tokens], tokens.width, FP32, saves=[tokens, weight])
        return self.tape.op("experts: input to bf16", [wide], tokens.width, BF16)

    def clamped(self, pair: Tensor, inner: Size) -> Tensor:
        """Gates and ups, clamped one by one, which keep their halves, and joined again (`fused_bias_geglu.py`)."""
        halves = self.tape.split("experts: gate, up", pair, [inner, inner])
        kept = [self.tape.op(f"experts: clamp {n}", [x], inner, BF16, saves=[x], backward_scratch=inner)
                for n, x in zip(("gate", "up"), halves, strict=True)]  # fmt: skip
        return self.tape.op("experts: join", kept, inner * 2, BF16)

    def with_bias(self, out: Tensor, weight: list[Tensor]) -> Tensor:
        """Each expert's bias times each of its tokens' probabilities, added in fp32 (`TEGroupedMLP._apply_bias`).

        Parts of all experts are there before they are joined; probabilities of a router in fp32 widen both.
        """
        wide = self.tape.op("experts: bias", [out], out.width, FP32, saves=weight)
        joined = self.tape.op("experts: join biased", [wide], out.width, FP32, aliases=[wide])
        biased = self.tape.op("experts: bias to bf16", [joined], out.width, BF16)
        self.tape.returns(out)
        return biased
