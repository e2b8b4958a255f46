"""DoRA beside a linear on a tape: PEFT's, which makes the product of both matrices at each forward to scale its rows.

Read in peft 0.21 `tuners/lora/dora.py`, `DoraLinearLayer`, and `tuners/lora/variants.py`, `DoraLinearVariant`. Symbols
are those of `calc.memory.activations`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from calc.autograd.tape import NOTHING, Size, Tensor, of
from calc.memory.run import symbol
from calc.memory.weights import SCALE

if TYPE_CHECKING:
    from calc.memory.linears import Linears

UNREAD = Tensor(NOTHING, 1, differentiable=False)  # in place of the input of an operation that has none


class Sides(NamedTuple):
    """Inputs and outputs of an adapted linear, and the rank of its adapter, 0 where an earlier use has trained it."""

    inputs: int
    outputs: int
    rank: int


def scaled(on: Linears, name: str, x: Tensor, y: Tensor, sides: Sides) -> Tensor:
    """`y + (m/‖W + BA‖ - 1)·y + m/‖W + BA‖·B(A(dropout(x)))·scaling`, cast back, unless four bits stay under autocast.

    Both factors of each product are kept. With dropout the frozen weight multiplies once more, what is dropped out;
    before peft 0.14 it always does.
    """
    tape, adapter, label = on.tape, on.run.adapter, f"{name}: DoRA"
    assert adapter is not None
    read, source = on.dropped_before(label, x)
    a, b = (on.matrix(f"{label} {part}", n * sides.rank) for part, n in zip("AB", sides[:2], strict=True))
    weight, norm, alive = normed(on, name, label, source.b, sides)
    wide = max(adapter.b, norm.b)
    m = tape.op(f"{label} magnitude", [], norm.width, wide, saves=[norm], weight=sides.outputs * (sides.rank > 0))
    down = on.times(f"{label} A", a, source, of(r=on.row_share))
    up = on.times(f"{label} B", b, down, y.width)
    if adapter.dropout or adapter.dora == "twice":
        base = again(on, name, label, source, weight, y.width)
    else:
        base = unbiased(on, label, y) if name in on.biased else y
    less = tape.op(f"{label} magnitude less 1", [m], m.width, wide, aliases=[m])
    kept = product(on, f"{label} base", less, base)
    learnt = product(on, f"{label} learnt", m, up)
    learnt = tape.op(f"{label} scale", [learnt], y.width, learnt.b)
    both = tape.op(f"{label} sum", [kept, learnt], y.width, wide, aliases=[kept, learnt])
    tape.returns(*alive, weight, norm, base, up)
    total = tape.op(f"{label} add", [y, both], y.width, max(y.b, both.b), aliases=[t for t in (y, both) if t.b == wide])
    tape.returns(read)
    return total if on.run.quantised and on.autocast else on.cast(total, y.b, label)


def normed(on: Linears, name: str, label: str, b: float, sides: Sides) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The weight in `b` bytes an element, the norm of each row of `W + BA`, and what lives until the function returns.

    `A` and `B` multiply a unit matrix, which their graph keeps; no gradient passes.
    """
    tape, adapter = on.tape, on.run.adapter
    assert adapter is not None
    own = on.c if on.autocast else adapter.b
    unit = tape.aside(f"{label} unit matrix", UNREAD, Size({}, {"": sides.inputs**2}), adapter.b)
    if own != adapter.b:
        unit = tape.aside(f"{label} unit matrix: cast", unit, unit.width, own)
    down = tape.aside(f"{label} unit matrix: A", unit, Size({}, {"": sides.inputs * adapter.rank}), own)
    delta = tape.aside(f"{label} product", down, Size({}, {symbol(name): 1}), own)
    if own != b:
        delta = tape.aside(f"{label} product: cast", delta, delta.width, b)
    weight = unpacked(on, name, label, b)
    times = tape.aside(f"{label} product: scale", delta, delta.width, b)
    total = tape.aside(f"{label} weight and product", times, delta.width, b)
    norm = tape.aside(f"{label} norm", total, Size({}, {"": sides.outputs}), b)
    return weight, norm, [unit, down, delta]


def unpacked(on: Linears, name: str, label: str, b: float) -> Tensor:
    """The frozen weight in `b` bytes an element: dequantised, cast, or as it is stored."""
    tape, run = on.tape, on.run
    size = Size({}, {symbol(name): 1})
    own = run.unpacked or on.c if run.quantised else run.weight
    if run.quantised:
        scales = Size({}, {symbol(name): SCALE}) if run.nested else NOTHING
        weight = tape.aside(f"{label} weight", UNREAD, size, own, scales, (scales, None) if run.nested else ())
    else:
        weight = on.elsewhere(f"{label} weight", size, own)
    return weight if b == own else tape.aside(f"{label} weight: cast", weight, size, b)


def unbiased(on: Linears, label: str, y: Tensor) -> Tensor:
    """`y` less the bias, which autocast leaves in the type of the weights."""
    b = max(y.b, on.run.weight)
    return on.tape.op(f"{label} less bias", [y], y.width, b, aliases=[y] if b == y.b else [])


def again(on: Linears, name: str, label: str, x: Tensor, weight: Tensor, width: Size) -> Tensor:
    """The product of the frozen weight with what is dropped out, which keeps the weight for the gradient of that."""
    if on.autocast:
        if weight.b != on.c:
            weight = on.tape.aside(f"{label} weight: to bf16", weight, weight.width, on.c)
        x = on.cast(x, on.c, label)
    return on.tape.op(f"{label} again", [x], width, x.b, saves=[weight], product=True, flat=True)


def product(on: Linears, label: str, factor: Tensor, x: Tensor) -> Tensor:
    """A vector times each row of `x`: backward makes the gradients of both before it sums that of the vector up."""
    b = max(factor.b, x.b)
    large = x.width * b
    casts = x.differentiable and x.b != b  # the gradient of `x`, too, is first as wide as the product
    return on.tape.op(
        label,
        [factor, x],
        x.width,
        b,
        saves=[factor, x],
        backward_scratch=large * 2 if casts else large,
        backward_course=(large, large, 0, None) if casts else (large, None),
    )
