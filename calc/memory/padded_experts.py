"""Routed experts as torchtitan's first code ran them, and as prime-rl's models do: grouped products of padded rows.

Read in prime-rl c330a6d4e `trainer/models/layers/moe.py` (`MoE.forward`, `_run_experts_grouped_mm`), and in the wrapper
around its products, torchtitan a1fdd7e (August 2025) `distributed/expert_parallel.py`, `expert_parallel`. Symbols are
those of `calc.memory.activations`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from calc.autograd.tape import Size, Tensor, of
from calc.memory.run import routed

if TYPE_CHECKING:
    from calc.memory.activations import Program


def padded(on: Program, x: Tensor, weights: Tensor) -> Tensor:
    """The experts' outputs, each weighed in fp32 and added to a tensor of zeros.

    Every token is gathered once for each of its experts, a row of zeros is put below these by a copy, and another copy
    has them in order, each expert's filled up to a multiple of eight rows from that one. Gate, up and down multiply
    that in turn; a last copy has the rows as they were. The gathered rows live as long as the function. Where GPUs
    share the experts, rows go to theirs before these copies and come back after them, and torchtitan's selective
    checkpointing keeps what all-to-alls bring (c4e229115 `distributed/expert_parallel.py`, `ExpertParallel`).
    """
    tape, c, shared = on.tape, on.run.residual, on.arch.expert_ranks > 1
    kh, k = Size({routed(on.arch): 1}), of(k=1)
    tokens, order = Tensor(k, 8, differentiable=False), Tensor(k, 4, differentiable=False)
    weights = tape.op("experts: sort weights", [weights], k, weights.b, saves=[Tensor(k, 8)])
    rows = tape.op("experts: gather", [x], kh, c, saves=[tokens])
    got = Size({routed(on.arch): on.run.imbalance})
    there = tape.op("experts: all-to-all", [rows], got, c, spared=[]) if shared else rows
    below = tape.op("experts: row of zeros", [there], got, c, aliases=[there])
    filled = tape.op("experts: fill up", [below], got, c, saves=[order])
    down = adapted_product(on, filled) if on.adapted_experts() else product(on, filled)
    unfilled = tape.op("experts: take out", [down], got, c, saves=[order])
    outputs = tape.op("experts: without the last row", [unfilled], got, c, view=True)
    if shared:
        outputs = tape.op("experts: all-to-all back", [outputs], kh, c, spared=[])
    wide = on.cast(outputs, 4, "experts")
    weighed = tape.op("experts: weigh", [wide, weights], kh, 4, saves=[wide, weights], backward_scratch=kh * 4)
    narrow = on.cast(weighed, c, "experts: weighed")
    tape.returns(outputs)
    zeros = tape.op("experts: zeros", [], x.width, c)
    y = tape.op("experts: sum", [zeros, narrow], x.width, c, saves=[tokens])
    tape.returns(rows, zeros)
    return y


def adapted_product(on: Program, rows: Tensor) -> Tensor:
    """The experts' product with adapters beside gate, up and down: `W·x + scaling·B(A(x))`, by grouped products.

    Of several runs' adapters one serves a whole batch. What is read, both terms of each sum, the sums and their product
    are variables until the function returns (prime-rl 559b44772 `trainer/models/layers/lora/multi_moe.py`,
    `MultiLoRAGroupedExperts.forward`). Dropout is counted for each product; gate's and up's share one there.
    """
    tape, c, kj = on.tape, on.run.residual, Size({"k·j": on.run.imbalance})
    gate, first = beside(on, "gate_proj", rows, kj)
    up, second = beside(on, "up_proj", rows, kj)
    act = tape.op("experts: activation", [gate], kj, c, saves=[gate])
    both = tape.op("experts: product", [act, up], kj, c, saves=[act, up])
    down, third = beside(on, "down_proj", both, rows.width)
    tape.returns(rows, *first, gate, *second, up, both, *third)
    return down


def beside(on: Program, name: str, x: Tensor, out: Size) -> tuple[Tensor, list[Tensor]]:
    """The frozen product of each expert's rows and its adapter's, and both of them apart."""
    base = on.tape.op(f"experts: {name}", [x], out, on.run.residual, multiplies=True)
    if name not in on.adapted_experts():
        return base, []
    up, scaled = on.expert_adapter(name, x, out, on.run.imbalance)
    return on.with_adapters(f"experts {name}: LoRA", base, [scaled]), [base, up]


def product(on: Program, rows: Tensor) -> Tensor:
    """`down(act(gate(x)) · up(x))` of each expert's rows: three grouped products, each of which keeps what it reads."""
    tape, c, kj = on.tape, on.run.residual, Size({"k·j": on.run.imbalance})
    saves, first = [rows] if on.run.trained else [], on.trained_expert("gate_up_proj")
    kh = rows.width
    gate = tape.op("experts: gate", [rows], kj, c, saves=saves, weight=first // 2, multiplies=True)
    act = tape.op("experts: activation", [gate], kj, c, saves=[gate])
    up = tape.op("experts: up", [rows], kj, c, saves=saves, weight=first - first // 2, multiplies=True)
    both = tape.op("experts: product", [act, up], kj, c, saves=[act, up])
    kept = [both] if on.run.trained else []
    weight = on.trained_expert("down_proj")
    return tape.op("experts: down", [both], kh, c, saves=kept, weight=weight, multiplies=True)
