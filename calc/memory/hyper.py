"""Hyper-connections on a tape: residual streams side by side, of which each block reads a sum and writes to all.

Weights of a token are made of all its streams, in fp32: how much a block reads of each, how much of its output each
gets, and how streams are mixed. Read in transformers 5.23 `models/deepseek_v4/modeling_deepseek_v4.py`,
`DeepseekV4HyperConnection`, `DeepseekV4HyperHead` and `DeepseekV4DecoderLayer`. See `calc.memory.activations` for the
symbols.
"""

from __future__ import annotations

from collections.abc import Callable

from calc.autograd.tape import NOTHING, Size, Tensor
from calc.memory.linears import WIDTH, Linears
from calc.memory.run import HYPER_HEAD, symbol
from calc.models.mixers import Hyper

Block = Callable[[Tensor], Tensor]
ONE = Size({"": 1})


class HyperConnections(Linears):
    """Writes what is around the blocks of a layer with several residual streams."""

    def streamed(self, streams: int) -> Tensor:
        """The piece's input as a stack of so many streams."""
        whole = Tensor(WIDTH * streams, self.run.residual, differentiable=self.input.differentiable)
        if self.counted:
            whole.size = NOTHING
        self.input = whole
        return whole

    def rooted(self, x: Tensor, name: str, rows: Size) -> Tensor:
        """An RMS norm without weights whose scales, made in fp32, are cast to the type of what they multiply."""
        tape, width = self.tape, x.width
        wide = self.cast(x, 4, name)
        square = tape.op(f"{name}: square", [wide], width, 4, saves=[wide], backward_scratch=width * 8)
        mean = tape.op(f"{name}: mean", [square], rows, 4)
        scale = self.cast(tape.op(f"{name}: rsqrt", [mean], rows, 4, saves_out=True), x.b, name)
        return tape.op(f"{name}: scale", [x, scale], width, x.b, saves=[x, scale], backward_scratch=width * x.b)

    def connected(self, x: Tensor, name: str, own: Hyper, block: Block) -> Tensor:
        """All streams after a block: its output in shares, and a mixture of what they were."""
        tape, several = self.tape, x.width
        n = Size({"": own.streams})
        weights = self.weights_of_streams(f"{name}_fn", x, name, Size({"": own.weights}))
        read, write, mix = tape.split(f"{name}: split", weights, [n, n, n * own.streams])
        extra = sum(self.elements[f"{name}_{part}"] for part in ("base", "scale")) if self.run.trained else 0
        kept = [weights] if self.run.trained else []  # what the scales multiply
        pre = tape.op(f"{name}: read", [read], n, 4, saves=[*kept, Tensor(n, 4)], weight=extra)
        post = tape.op(f"{name}: write", [write], n, 4, saves=[*kept, Tensor(n, 4)])
        # a softmax, then sums of columns and of rows in turn, by which all is divided
        rounds = (2 * own.rounds - 1) * (own.streams + 1) + own.streams
        comb = tape.op(f"{name}: mix", [mix], n * own.streams, 4, saves=[*kept, Tensor(n * rounds, 4)])
        y = block(self.summed_streams(x, pre, name))
        tape.hold(y)
        post = self.cast(post, x.b, name)
        b = max(y.b, post.b)
        shared = tape.op(f"{name}: expand", [post, y], several, b, saves=[post, y],
                         backward_scratch=several * (2 * b))  # fmt: skip
        comb = self.cast(comb, x.b, name)
        both = [self.cast(t, self.c, name) for t in (comb, x)] if self.autocast else [comb, x]
        mixed = tape.op(f"{name}: mix streams", both, several, both[1].b, saves=both, multiplies=True)
        b = max(shared.b, mixed.b)
        return tape.op(f"{name}: add", [shared, mixed], several, b, aliases=[t for t in (shared, mixed) if t.b == b])

    def weights_of_streams(self, module: str, x: Tensor, name: str, out: Size) -> Tensor:
        """The product of a token's streams, joined and normed in fp32, with a weight that is cast to fp32."""
        flat = self.rooted(self.cast(x, 4, name), f"{name}: norm", ONE)
        if self.autocast:
            return self.whole(module, flat, out)
        weight, copies = self.elements[module] if self.run.trained else 0, list[Tensor]()
        if self.kept_bytes == 2:
            copies = [self.tape.op(f"{name}: weight to fp32", [], Size({}, {symbol(module): 1}), 4, weight=weight)]
        saves = [*([flat] if self.run.trained else []), *copies]
        return self.tape.op(f"{name}: weights", [*copies, flat], out, 4, saves=saves, weight=0 if copies else weight)

    def summed_streams(self, x: Tensor, shares: Tensor, name: str) -> Tensor:
        """The sum of all streams, each times its share in fp32, in the type of the streams."""
        tape = self.tape
        # both gradients are fp32, until one is summed up and the other cast
        each = tape.op(f"{name}: weigh streams", [shares, x], x.width, 4, saves=[shares, x],
                       backward_scratch=x.width * (8 - x.b))  # fmt: skip
        return self.cast(tape.op(f"{name}: collapse", [each], WIDTH, 4, aliases=[each]), x.b, name)

    def one_stream(self, own: Hyper) -> Tensor:
        """The stream that the final norm reads, of all after the last layer."""
        x = self.tape.hold(self.streamed(own.streams))
        self.elements = {**self.elements, HYPER_HEAD: own.streams**2 * self.arch.hidden}
        weights = self.weights_of_streams(HYPER_HEAD, x, "hc_head", Size({"": own.streams}))
        extra, kept = (own.streams + 1, [weights]) if self.run.trained else (0, [])
        n = weights.width
        pre = self.tape.op("hc_head: read", [weights], n, 4, saves=[*kept, Tensor(n, 4)], weight=extra)
        return self.summed_streams(x, pre, "hc_head")
