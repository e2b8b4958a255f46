"""Routed experts as NeMo Automodel runs them: a kernel sends each token's rows to its experts, and brings sums back.

Read in NVIDIA-NeMo/Automodel 36044ad3d `components/moe/experts.py` (`GroupedExpertsDeepEP`), `megatron/{fused_a2a,
token_dispatcher,moe_utils}.py`. DeepEP's and HybridEP's own buffers lie outside PyTorch's allocator. Symbols are those
of `calc.memory.activations`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from calc.autograd.tape import Size, Tensor, of
from calc.memory.run import routed

if TYPE_CHECKING:
    from calc.memory.activations import Program


def dispatched(on: Program, x: Tensor, weights: Tensor) -> Tensor:
    """The experts' weighted sums: rows arrive in the order of their experts, with weights in fp32, and leave at once.

    The activation is one compiled kernel, which weighs its output and keeps only what it reads (`WeightedSwiGLU`).
    """
    tape, c, uneven = on.tape, on.run.residual, on.run.imbalance
    kh, k, kj = (Size({symbol: uneven}) for symbol in (routed(on.arch), "k", "k·j"))
    trained = on.run.trained
    maps = Tensor(of(E=1), 1, differentiable=False)
    spread = tape.op("experts: weights by expert", [weights], of(E=1), 4, saves=[maps])
    rows = tape.op("experts: dispatch", [x, spread], kh, c, saves=[maps])
    sent = tape.op("experts: dispatched weights", [spread], k, 4)
    first = "gate_up_proj" if on.arch.gated else "up_proj"
    pair = tape.op("experts: gate_up", [rows], kj * (2 if on.arch.gated else 1), c, saves=[rows] * trained,
                   weight=on.trained_expert(first), multiplies=True)  # fmt: skip
    act = tape.op("experts: activation", [pair, sent], kj, c, saves=[pair, sent])
    down = tape.op("experts: down", [act], kh, c, saves=[act] * trained, weight=on.trained_expert("down_proj"),
                   multiplies=True)  # fmt: skip
    y = tape.op("experts: combine", [down], x.width, c, saves=[maps])
    tape.returns(rows, down)
    return y
