"""IA3 beside a linear on a tape: one trained vector weighs its outputs, or the inputs of an MLP's last linear.

Read in peft 0.21 `tuners/ia3/layer.py`, `Linear.forward`. Symbols are those of `calc.memory.activations`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from calc.autograd.polynomial import amount
from calc.autograd.tape import Size, Tensor
from calc.memory import dora
from calc.memory.run import dimensions

if TYPE_CHECKING:
    from calc.memory.linears import Linears


def weighed(on: Linears, name: str, x: Tensor) -> Tensor:
    """`(x·l)` in the wider type of both, cast back: the product keeps both factors, an MLP's input a copy in l's type.

    What multiplies is a copy of the vector, its product with a 1.
    """
    adapter, label = on.run.adapter, f"{name}: IA3"
    assert adapter is not None
    source = on.cast(x, adapter.b, label) if name == on.arch.names.down else x
    elements = round(amount(x.width, {**dimensions(on.arch), **on.widths}).tokens / on.row_share)
    vector = on.tape.op(f"{label} vector", [], Size({}, {"": elements}), adapter.b, weight=elements)
    return on.cast(dora.product(on, label, vector, source), x.b, label)
