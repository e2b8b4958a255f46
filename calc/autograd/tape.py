"""A tape: the operations of a piece of a model, and what each reads, makes and keeps for its backward.

A program (`calc.memory.activations`, `calc.memory.loss`) writes the operations of the real implementation on a tape;
`calc.autograd.lifetimes` runs forward and backward over it. Nothing here knows a model: sizes are sums of named terms
(`2·h + 4·H`), so the closed forms that the method pages print are read off the same tape that the estimates use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

CHUNK = 64  # positions that linear attention works on at once


class Size:
    """A sum of terms: those in `tokens` scale with the micro batch's tokens, those in `fixed` do not.

    A term's symbol is looked up in the model's dimensions; a symbol that ends in `·S` also scales with the length, so
    that a fixed `V·S` is one row of logits. One that ends in `·C` scales with the tokens of sequences that are filled
    up to whole chunks.
    """

    __slots__ = ("fixed", "tokens")

    def __init__(self, tokens: Mapping[str, float] | None = None, fixed: Mapping[str, float] | None = None) -> None:
        self.tokens = _nonzero(tokens) if tokens else {}
        self.fixed = _nonzero(fixed) if fixed else {}

    def __add__(self, other: Size) -> Size:
        if not other:
            return self
        return Size(_sum(self.tokens, other.tokens), _sum(self.fixed, other.fixed)) if self else other

    def __mul__(self, factor: float) -> Size:
        if factor == 1:
            return self
        return Size({s: c * factor for s, c in self.tokens.items()}, {s: c * factor for s, c in self.fixed.items()})

    def __bool__(self) -> bool:
        return bool(self.tokens or self.fixed)

    def renamed(self, names: Mapping[str, str]) -> Size:
        """The same sum with other names for some symbols."""

        def name(symbol: str) -> str:
            base = symbol.removesuffix("·S").removesuffix("·C")
            return names.get(base, base) + symbol[len(base) :]

        tokens, fixed = ({name(s): c for s, c in terms.items()} for terms in (self.tokens, self.fixed))
        return Size(tokens, fixed)

    def __repr__(self) -> str:
        return f"Size({text(self.tokens)} per token, {text(self.fixed)})"


NOTHING = Size()


def of(**terms: float) -> Size:
    """A size per token, `of(h=2, kv=1)`."""
    return Size(terms)


def chunked(**terms: float) -> Size:
    """A size per token of whole chunks, `chunked(d_v=4)`."""
    return Size({f"{symbol}·C": c for symbol, c in terms.items()})


def _nonzero(terms: Mapping[str, float]) -> Mapping[str, float]:
    """The terms with a coefficient, which are most often all."""
    return terms if all(terms.values()) else {symbol: c for symbol, c in terms.items() if c}


def _sum(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    out = dict(a)
    for symbol, c in b.items():
        out[symbol] = out.get(symbol, 0) + c
    return out


def text(terms: Mapping[str, float]) -> str:
    """The sum as a formula, `16·h + 4·kv + 8`; evaluable once `·` is read as a product."""
    order = sorted(terms.items(), key=lambda item: (not item[0], "·S" in item[0]))
    return " + ".join(f"{c:g}" if not s else s if c == 1 else f"{c:g}·{s}" for s, c in order) or "0"


# The temporaries that an operation allocates and frees while it runs, in order: a size allocates one, a number, counted
# from 0, frees the one that was allocated as that, and None allocates the outputs. Those left at the end are freed.
Course = tuple["Size | int | None", ...]


class Tensor:
    """`width` elements of `b` bytes each; a view shares the storage of the tensor it looks into.

    `apart`: it stands for one tensor per sequence.
    """

    __slots__ = ("apart", "b", "differentiable", "size", "storage", "width")

    def __init__(
        self,
        width: Size,
        b: float,
        *,
        differentiable: bool = True,
        view_of: Tensor | None = None,
        apart: bool = False,
    ) -> None:
        self.apart = apart
        self.width = width
        self.b = b
        self.size = width * b
        self.differentiable = differentiable
        self.storage: Tensor = view_of.storage if view_of else self


@dataclass(slots=True)
class Op:
    """One operation: reads `inputs`, makes `outs`, keeps `saves` for its backward.

    `aliases` are inputs whose gradient is the output's gradient itself (views, additions). `overwrites`: the gradient
    of a saved input is written over that input. `scratch` and `backward_scratch` live only while the operation runs, in
    the order of `course` and `backward_course` where these are given, or else in pieces before its outputs;
    `weight` counts the trainable elements whose gradient its backward makes. `kept` is what selective checkpointing
    keeps of it, so that it is not run again; `product` says that it is a matrix product of two dimensions, `multiplies`
    that its time is that of its products, whatever it moves. `flat`: it is a linear, whose input is seen as a matrix,
    so that the input's gradient is a view. `rowwise`: it runs once for each sequence, and its backward makes the
    gradient of one and frees what was saved of it before it comes to the next. `restores` are operations that run again
    before its backward: the storages `lost`, which they made or saved, go once it has run.
    """

    name: str
    inputs: tuple[Tensor, ...]
    outs: tuple[Tensor, ...]
    saves: tuple[Tensor, ...]
    aliases: tuple[Tensor, ...]
    scratch: Size = NOTHING
    backward_scratch: Size = NOTHING
    weight: int = 0
    overwrites: bool = False
    kept: tuple[Tensor, ...] = ()
    product: bool = False
    flat: bool = False
    course: Course = ()
    backward_course: Course = ()
    rowwise: bool = False
    multiplies: bool = False
    restores: tuple[Op, ...] = ()
    lost: tuple[Tensor, ...] = ()

    def gradients(self, incoming: Tensor) -> dict[Tensor, Tensor]:
        """The gradient of each input that needs one, in storage of its own unless it shares another's."""
        return {
            t: incoming
            if t in self.aliases
            else Tensor(t.width, t.b, view_of=t if self.overwrites and t in self.saves else None, apart=self.rowwise)
            for t in self.inputs
            if t.differentiable
        }


@dataclass(slots=True)
class Tape:
    """Operations in the order in which forward runs them."""

    ops: list[Op] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)
    cached: list[Tensor] = field(default_factory=list)
    attached: list[Tensor] = field(default_factory=list)
    received: bool = False  # the gradient of the last output lies in a buffer that others count
    selective: bool = False  # checkpointing keeps what `keeps` says
    reentrant: bool = False  # checkpointing is PyTorch's reentrant kind, see `calc.autograd.lifetimes.Lifetimes`
    products: int = 0  # matrix products recorded so far

    def op(
        self,
        name: str,
        inputs: Sequence[Tensor],
        width: Size,
        b: float,
        *,
        saves: Sequence[Tensor] = (),
        saves_out: bool = False,
        aliases: Sequence[Tensor] = (),
        scratch: Size = NOTHING,
        backward_scratch: Size = NOTHING,
        weight: int = 0,
        view: bool = False,
        overwrites: bool = False,
        product: bool = False,
        flat: bool = False,
        spared: Sequence[Tensor] | None = None,
        course: Course = (),
        backward_course: Course = (),
        rowwise: bool = False,
        multiplies: bool = False,
    ) -> Tensor:
        """Record an operation and return its output; `saves_out` keeps the output for its own backward (softmax).

        `spared`: selective checkpointing never runs the operation again: it keeps the output and these other results.
        """
        differentiable = weight > 0 or any(t.differentiable for t in inputs)
        out = Tensor(width, b, differentiable=differentiable, view_of=inputs[0] if view else None)
        saved = (*saves, out) if saves_out else tuple(saves)
        self.ops.append(
            Op(
                name,
                tuple(inputs),
                (out,),
                saved if differentiable else (),
                tuple(aliases),
                scratch,
                backward_scratch,
                weight,
                overwrites,
                self.keeps(out, product, spared),
                product,
                flat,
                course,
                backward_course,
                rowwise,
                multiplies or flat or product,
            )
        )
        return out

    def keeps(self, out: Tensor, product: bool, spared: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
        """The tensors that selective checkpointing keeps of an operation: none, unless it is spared or a kept product.

        Products are `aten.mm`: the first of a layer is kept, the second is not, and so in turn. Spared are PyTorch's
        own attention, with its log-sum-exp, and a reduce-scatter. The policy, run by PyTorch's
        `create_selective_checkpoint_contexts`, is torchtitan's `selective_ac_option = "op"` (`_custom_policy`).
        """
        self.products += product
        kept = spared is not None or (product and self.products % 2 == 1)
        return (out, *(spared or ())) if self.selective and kept else ()

    def split(self, name: str, x: Tensor, widths: Sequence[Size]) -> tuple[Tensor, ...]:
        """`torch.split` or `chunk`: views forward, one concatenation of the gradients backward."""
        outs = tuple(Tensor(width, x.b, differentiable=x.differentiable, view_of=x) for width in widths)
        self.ops.append(Op(name, (x,), outs, (), ()))
        return outs

    def restore(self, first: int, end: int, stay: Sequence[Tensor] = ()) -> None:
        """Lets what the operations from `first` to before `end` made and saved go once the last one so far has run.

        They run again before that one's backward. Tensors of others that they read stay, and those in `stay`.
        """
        again, last = tuple(self.ops[first:end]), self.ops[-1]
        if not any(op.saves for op in again):
            return
        made, read = dict[Tensor, None](), {t.storage: t for t in stay}
        for op in again:
            read.update((t.storage, t) for t in op.inputs if t.storage not in made)
            made.update((t.storage, None) for t in (*op.outs, *op.saves) if t.storage not in read)
        again[0].saves = tuple(dict.fromkeys((*again[0].saves, *read.values())))
        last.restores, last.lost = again, tuple(made)

    @property
    def lost(self) -> frozenset[Tensor]:
        """The storages that are not there between forward and backward, though operations save them."""
        return frozenset(t for op in self.ops for t in op.lost)

    def hold(self, tensor: Tensor) -> Tensor:
        """Keep `tensor` alive to the end of forward, as a Python variable of the caller does."""
        self.held.append(tensor)
        return tensor

    def cache(self, tensor: Tensor) -> None:
        """Keep `tensor` alive to the end of forward and beyond, until the forward of the whole model ends."""
        self.cached.append(self.hold(tensor))

    def aside(self, name: str, x: Tensor, size: Size, b: float, scratch: Size = NOTHING, course: Course = ()) -> Tensor:
        """The output of an operation on `x` that no gradient passes: the function that reads it has a backward."""
        out = Tensor(size, b, differentiable=False)
        self.ops.append(Op(name, (x,), (out,), (), (), scratch=scratch, course=course))
        return out

    def attach(self, out: Tensor, tensors: Sequence[Tensor]) -> None:
        """Keep what the context of the function that made `out` names itself, though the forward runs again.

        Hooks of checkpointing see what autograd saves, and no attribute of a context. Reentrant checkpointing has no
        context the first time.
        """
        if out.differentiable and not self.reentrant:
            self.attached += tensors

    def returns(self, *variables: Tensor) -> None:
        """Record that a function returns: until then its own or its caller's `variables` keep their tensors alive."""
        self.ops.append(Op("", variables, (), (), ()))

    def renamed(self, names: Mapping[str, str]) -> Tape:
        """The tape itself, with other names for some of the symbols in its sizes."""
        if not names:
            return self

        def course(steps: Course) -> Course:
            return tuple([step.renamed(names) if isinstance(step, Size) else step for step in steps])

        tensors = [*self.held, *self.cached, *self.attached]
        for op in self.ops:
            tensors += (*op.inputs, *op.outs, *op.saves, *op.kept)
            op.scratch, op.backward_scratch = op.scratch.renamed(names), op.backward_scratch.renamed(names)
            op.course, op.backward_course = course(op.course), course(op.backward_course)
        for tensor in dict.fromkeys([*tensors, *[t.storage for t in tensors]]):
            tensor.width, tensor.size = tensor.width.renamed(names), tensor.size.renamed(names)
        return self

    @property
    def final(self) -> Tensor:
        """The output of the last operation."""
        return next(op.outs[0] for op in reversed(self.ops) if op.outs)

    def saved(self) -> Size:
        """Everything kept for backward once forward has ended."""
        lost = self.lost
        return total([t.storage for op in self.ops for t in op.saves if t.storage not in lost])

    def kept(self) -> Size:
        """Everything that checkpointing keeps besides the input: what it is told to, and what contexts name."""
        return total([t.storage for t in (*[t for op in self.ops for t in op.kept], *self.attached)])


def total(storages: Iterable[Tensor]) -> Size:
    """The bytes of these storages, each counted once."""
    tokens: dict[str, float] = {}
    fixed: dict[str, float] = {}
    for t in dict.fromkeys(storages):
        for symbol, c in t.size.tokens.items():
            tokens[symbol] = tokens.get(symbol, 0) + c
        for symbol, c in t.size.fixed.items():
            fixed[symbol] = fixed.get(symbol, 0) + c
    return Size(tokens, fixed)
