"""Routed experts one after another, as Transformers ran them before release 5: each on the tokens that it gets.

Read in transformers 4.55.4 `models/{qwen3_moe,mixtral,glm4_moe}/modeling_*.py`, whose experts are modules of linears,
and `models/gpt_oss/modeling_gpt_oss.py`, `GptOssExperts`, whose experts are rows of two parameters. See
`calc.memory.activations` for the symbols.
"""

from __future__ import annotations

from collections.abc import Callable

from calc.autograd.tape import NOTHING, Size, Tape, Tensor, of, total
from calc.memory.linears import WIDTH, Linears
from calc.memory.run import routed, symbol
from calc.memory.weights import SCALE
from calc.models.architecture import Linear
from calc.models.lora import adapted

Gate = Callable[[Tensor, Size, int], Tensor]


class ExpertLoop(Linears):
    """Writes a loop over routed experts on a tape, as one operation."""

    def one_by_one(self, x: Tensor, weights: Tensor, gate: Gate) -> Tensor:
        """The sum of the experts' outputs, each added to a tensor of zeros; `gate` writes their activation.

        What one expert makes and nothing saves is gone when the next begins, in forward and in backward. A one-hot mask
        of 64-bit integers says who gets which tokens, and lives to the end of the function.
        """
        tape, wide = self.tape, max(self.run.residual, weights.b)
        mask = tape.op("experts: mask", [], of(E=self.arch.experts_per_token), 8)
        zeros = tape.op("experts: zeros", [], x.width, wide)
        linears = self.expert_linears()
        each = self.each_expert(x, weights, gate).ops
        saved = dict.fromkeys(t.storage for op in each for t in op.saves)
        passing = total([t.storage for op in each for t in op.outs if t.storage not in saved])
        of_one = passing * (1 / self.arch.experts) + self.expert_in_16_bits()
        y = tape.op(
            "experts: one by one",
            [zeros, x, weights, *linears],
            x.width,
            wide,
            saves=[*saved, *linears],
            view=True,
            scratch=of_one,
            backward_scratch=of_one + x.size + self.row_gradient(),
            weight=sum(op.weight for op in each),
            multiplies=True,
        )
        tape.returns(mask)
        return self.cast(y, self.run.residual, "experts")

    def written_in_turn(self, x: Tensor, weights: Tensor, gate: Gate) -> Tensor:
        """Ling's loop: every token is copied for each of its experts, which write over the rows of an empty tensor.

        In backward each expert makes the gradient of all rows anew, once with zeros where it wrote and once with its
        own rows alone. `moe_infer`, which runs while nothing is trained, is counted as this loop, though it holds more:
        outputs of all experts beside sorted copies (inclusionAI/Ling-V2 `models/modeling_bailing_moe_v2.py`).
        """
        tape, kh, k = self.tape, Size({routed(self.arch): 1}), of(k=1)
        copies = tape.op("experts: copies", [x], kh, x.b)
        empty = tape.op("experts: empty", [], kh, x.b)
        linears = self.expert_linears()
        outside, self.tape = tape, Tape()
        picked = self.tape.op("pick", [copies], kh, x.b, saves=[Tensor(k, 8)])
        pair = self.by_expert(self.first_of_experts, picked, Size({"k·j": 1}) * (2 if self.arch.gated else 1))
        down = self.by_expert("down_proj", gate(pair, Size({"k·j": 1}), self.c), kh)
        self.tape.op("write", [down], Size(), down.b, saves=[Tensor(k, 8)])
        each, self.tape = self.tape.ops, outside
        saved = dict.fromkeys(t.storage for op in each for t in op.saves)
        passing = total([t.storage for op in each for t in op.outs if t.storage not in saved])
        of_one = passing * (1 / self.arch.experts) + self.expert_in_16_bits()
        y = tape.op(
            "experts: in turn",
            [empty, copies, *linears],
            kh,
            x.b,
            saves=[*saved, *linears],
            view=True,
            scratch=of_one,
            backward_scratch=of_one + kh * (2 * x.b),
            weight=sum(op.weight for op in each),
            multiplies=True,
        )
        weighed = tape.op("experts: weigh", [y, weights], kh, 4, saves=[y, weights], backward_scratch=kh * (8 - x.b))
        summed = tape.op("experts: sum", [weighed], WIDTH, 4)
        tape.returns(copies)
        return self.cast(summed, x.b, "experts")

    def each_expert(self, x: Tensor, weights: Tensor, gate: Gate) -> Tape:
        """The operations of all experts on a tape of their own, as if they ran at once."""
        outside, self.tape = self.tape, Tape()
        tape, c = self.tape, self.c
        kh, kj, k = Size({routed(self.arch): 1}), Size({"k·j": 1}), of(k=1)
        picked = tape.op("pick", [x], kh, x.b, saves=[Tensor(k, 8)])
        pair = self.by_expert(self.first_of_experts, picked, kj * (2 if self.arch.gated else 1))
        down = self.by_expert("down_proj", gate(pair, kj, c), kh)
        own = tape.op("weights", [weights], k, weights.b, saves=[Tensor(k, 8)])
        weighed = tape.op("weigh", [down, own], kh, max(c, weights.b), saves=[down, own])
        # the sum keeps what it adds for its shape (torch 2.13 `derivatives.yaml`, `index_add`)
        tape.op("add", [weighed], Size(), weighed.b, saves=[weighed])
        self.tape = outside
        return tape

    @property
    def first_of_experts(self) -> str:
        """The name of the experts' weights that read their input."""
        return "gate_up_proj" if self.arch.gated else "up_proj"

    def by_expert(self, name: str, x: Tensor, out: Size) -> Tensor:
        """The product with each expert's own weight; GPT-OSS copies its row of the parameter, and keeps the copy."""
        trained = self.run.trained
        source = self.cast(x, self.c, name) if self.autocast else x
        saves = [source] if trained else []
        if self.arch.experts_input_first:
            saves.append(self.tape.op("row", [], Size({}, {f"W_experts_{name}": 1}), self.c))
        elif trained and source is not x and name == "gate_up_proj":
            saves.append(Tensor(x.width, self.c))  # gate and up are two linears, each of which casts its input
        rows = trained and self.arch.experts_input_first
        weight = self.elements[f"experts_{name}"] + self.elements.get(f"experts_{name}_bias", 0) if rows else 0
        y = self.tape.op(name, [source], out, self.c, saves=saves, weight=weight)
        return self.with_expert_adapters(name, x, y)

    def with_expert_adapters(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """`y` with the outputs of adapters beside each expert's own linears; `gate_up_proj` stands for two of them."""
        last = name == "down_proj"
        out = y.width if last else Size({"k·j": 1})
        named = [own for own in self.adapted_experts() if (own == self.arch.expert_linears[-1]) == last]
        scaled = [self.expert_adapter(own, x, out)[1] for own in named]
        return self.with_adapters(f"experts {name}: LoRA", y, scaled) if scaled else y

    def adapted_experts(self) -> dict[str, Linear]:
        """The experts' linears that have adapters, by the last part of their names."""
        found = adapted(self.arch, self.spec, self.run.adapter.targets) if self.run.adapter else ()
        return {linear.name.rpartition(".")[2]: linear for linear in found if linear.experts}

    def expert_adapter(self, own: str, x: Tensor, out: Size, uneven: float = 1) -> tuple[Tensor, Tensor]:
        """The outputs of all experts' adapters beside one of their linears, as they come and scaled."""
        linear, adapter = self.adapted_experts()[own], self.run.adapter
        assert adapter is not None
        n_in, n_out = (linear.experts * adapter.rank * width for width in (linear.inputs, linear.outputs))
        low = Size({"k·r": uneven})
        return self.through_both(f"experts {own}: LoRA", x, out, low, n_in, n_out)[1:]

    def expert_linears(self) -> list[Tensor]:
        """The weights of experts that are linears, of which autocast makes copies; none of GPT-OSS.

        The gradient of each comes as what it saved goes: the most is there before the first, or after the last.
        """
        run, names = self.run, [f"experts_{name}" for name in (self.first_of_experts, "down_proj")]
        if self.arch.experts_input_first:
            return []
        copies = run.copies and not run.four_bit_experts
        weight = sum(self.elements[name] for name in names) if run.trained else 0
        size = Size({}, {symbol(name): 1 for name in names}) if copies else NOTHING
        linears = self.tape.op("experts: weights", [], size, self.c, weight=weight)
        if copies and run.caches:
            self.tape.cache(linears)
        return [linears]

    def expert_in_16_bits(self) -> Size:
        """A linear of four bits while it multiplies, with its scales; of three linears those that read the input."""
        run, arch = self.run, self.arch
        if run.four_bit_experts != "linears" or arch.experts_input_first:
            return NOTHING
        share = 1 / arch.experts / (2 if arch.gated else 1)
        return Size({}, {f"W_experts_{self.first_of_experts}": share * ((run.unpacked or self.c) + SCALE * run.nested)})

    def row_gradient(self) -> Size:
        """The gradient of a parameter's row: a parameter of zeros but for it, which is added to those before it."""
        if not self.arch.experts_input_first or not self.run.trained:
            return NOTHING
        return Size({}, {f"W_experts_{self.first_of_experts}": self.run.weight})
