"""DoRA beside a linear on a tape: PEFT's, which makes the product of both matrices at each forward to scale its rows.

Read in peft 0.21 `tuners/lora/dora.py`, `DoraLinearLayer`, and `tuners/lora/variants.py`, `DoraLinearVariant`. Symbols
are those of `calc.memory.activations`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from calc.autograd.polynomial import amount
from calc.autograd.tape import NOTHING, Size, Tensor, of
from calc.memory.run import dimensions, symbol
from calc.memory.weights import SCALE

if TYPE_CHECKING:
    from calc.memory.linears import Linears


def scaled(on: Linears, name: str, x: Tensor, y: Tensor) -> Tensor:
    """`y + (m/‖W + BA‖ - 1)·y + m/‖W + BA‖·B(A(dropout(x)))·scaling`, cast back, unless four bits stay under autocast.

    Both factors of each product are kept. With dropout the frozen weight multiplies once more, what is dropped out;
    before peft 0.14 it always does.
    """
    tape, adapter, label = on.tape, on.run.adapter, f"{name}: DoRA"
    assert adapter is not None
    mixes = on.run.quantised and on.autocast
    dims = {**dimensions(on.arch), **on.widths}
    n_in, n_out = (int(amount(t.width, dims).tokens / on.row_share) for t in (x, y))
    source = read = x if mixes else on.cast(x, adapter.reads or adapter.b, label)
    if adapter.dropout:
        source = tape.op(f"{label} dropout", [source], x.width, source.b, saves=[Tensor(x.width, 1)])
    a, b = (on.matrix(f"{label} {part}", n * adapter.rank) for part, n in zip("AB", (n_in, n_out), strict=True))
    weight, norm, alive = normed(on, name, label, source.b, n_in, n_out)
    row = Size({}, {"": n_out})
    wide = max(adapter.b, norm.b)
    m = tape.op(f"{label} magnitude", [], row, wide, saves=[norm], weight=n_out)
    down = on.times(f"{label} A", a, source, of(r=on.row_share))
    up = on.times(f"{label} B", b, down, y.width)
    if adapter.dropout or adapter.dora == "twice":
        base = again(on, name, label, source, weight, y.width)
    else:
        base = unbiased(on, label, y) if name in on.biased else y
    less = tape.op(f"{label} magnitude less 1", [m], row, wide, aliases=[m])
    kept = product(on, f"{label} base", less, base)
    learnt = product(on, f"{label} learnt", m, up)
    learnt = tape.op(f"{label} scale", [learnt], y.width, learnt.b)
    both = tape.op(f"{label} sum", [kept, learnt], y.width, wide, aliases=[kept, learnt])
    tape.returns(*alive, weight, norm, base, up)
    total = tape.op(f"{label} add", [y, both], y.width, max(y.b, both.b), aliases=[t for t in (y, both) if t.b == wide])
    tape.returns(read)
    return total if mixes else on.cast(total, y.b, label)


def normed(on: Linears, name: str, label: str, b: float, n_in: int, n_out: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The weight in `b` bytes an element, the norm of each row of `W + BA`, and what lives until the function returns.

    `A` and `B` multiply a unit matrix, which their graph keeps; no gradient passes.
    """
    tape, adapter = on.tape, on.run.adapter
    assert adapter is not None
    own = on.c if on.autocast else adapter.b
    unit = tape.aside(f"{label} unit matrix", NOTHING_READ, Size({}, {"": n_in * n_in}), adapter.b)
    if own != adapter.b:
        unit = tape.aside(f"{label} unit matrix: cast", unit, unit.width, own)
    down = tape.aside(f"{label} unit matrix: A", unit, Size({}, {"": n_in * adapter.rank}), own)
    delta = tape.aside(f"{label} product", down, Size({}, {symbol(name): 1}), own)
    if own != b:
        delta = tape.aside(f"{label} product: cast", delta, delta.width, b)
    weight = unpacked(on, name, label, b)
    times = tape.aside(f"{label} product: scale", delta, delta.width, b)
    total = tape.aside(f"{label} weight and product", times, delta.width, b)
    norm = tape.aside(f"{label} norm", total, Size({}, {"": n_out}), b)
    return weight, norm, [unit, down, delta]


def unpacked(on: Linears, name: str, label: str, b: float) -> Tensor:
    """The frozen weight in `b` bytes an element: dequantised, cast, or as it is stored."""
    tape, run = on.tape, on.run
    size = Size({}, {symbol(name): 1})
    own = stored(on)
    if run.quantised:
        own = run.unpacked or on.c
        scales = Size({}, {symbol(name): SCALE}) if run.nested else NOTHING
        weight = tape.aside(f"{label} weight", NOTHING_READ, size, own, scales, (scales, None) if run.nested else ())
    else:
        weight = on.elsewhere(f"{label} weight", size, own)
    return weight if b == own else tape.aside(f"{label} weight: cast", weight, size, b)


def unbiased(on: Linears, label: str, y: Tensor) -> Tensor:
    """`y` less the bias, which autocast leaves in the type of the weights."""
    b = max(y.b, stored(on))
    return on.tape.op(f"{label} less bias", [y], y.width, b, aliases=[y] if b == y.b else [])


def stored(on: Linears) -> float:
    """Bytes of an element of the model's own weights."""
    return 4 if on.run.copies else on.c


def again(on: Linears, name: str, label: str, x: Tensor, weight: Tensor, width: Size) -> Tensor:
    """The product of the frozen weight with what is dropped out, which keeps the weight for the gradient of that."""
    if on.autocast:
        weight = on.tape.aside(f"{label} weight: to bf16", weight, weight.width, on.c) if weight.b != on.c else weight
        x = on.cast(x, on.c, label)
    return on.tape.op(f"{label} again", [x], width, x.b, saves=[weight], product=True, flat=True)


def product(on: Linears, label: str, factor: Tensor, x: Tensor) -> Tensor:
    """A vector times each row of `x`: backward makes the gradients of both before it sums that of the vector up."""
    b = max(factor.b, x.b)
    large = x.width * b
    first = (large, None) if x.b == b else (large, large, 0, None)
    scratch = large if x.b == b or not x.differentiable else large * 2
    course = first if x.differentiable else (large, None)
    return on.tape.op(
        label, [factor, x], x.width, b, saves=[factor, x], backward_scratch=scratch, backward_course=course
    )


NOTHING_READ = Tensor(NOTHING, 1, differentiable=False)
