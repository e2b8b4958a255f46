"""Norms, linears and the residual stream on a tape: what they keep for backward, with adapters and over several ranks.

See `calc.memory.activations` for the symbols and for what was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from calc.autograd.polynomial import amount
from calc.autograd.tape import NOTHING, Course, Size, Tape, Tensor, of
from calc.memory import dora, ia3
from calc.memory.run import ROWWISE, Run, biased, dimensions, elements, marks, short, symbol
from calc.memory.weights import SCALE
from calc.models.architecture import PROJECTIONS, SCALES, Architecture, LayerSpec
from calc.models.lora import HEAD, NORMS, adapted

WIDTH = of(h=1)  # the residual stream
# linears that PEFT leaves, as Llama 4's router, which returns two tensors, and those that get no adapters here
UNADAPTED = ("score", "router", *PROJECTIONS)
OUTPUTS = ("lm_head", "score")  # the linears at the end of a model, whose weights an engine gathers
# The linears that tensor parallelism cuts by outputs.
COLWISE = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_fc", "fc1", "lm_head"})


class Linears:
    """Writes norms, linears and additions on a tape, with adapters beside linears and sums over ranks behind them."""

    def __init__(
        self,
        run: Run,
        spec: LayerSpec | None = None,
        *,
        first: bool = False,
        counted: bool = False,
        received: bool = False,
        selective: bool = False,
        reentrant: bool = False,
    ) -> None:
        """A piece of `run`: a layer of the kind `spec`, by default the last one's, if there is one.

        `first`: nothing before this piece is trained, so that its input needs no gradient. `counted`: the input is a
        checkpoint, or a buffer, that others count; `received`: so is the output's gradient. `selective`: some
        operations are not run again for backward. `reentrant`: the layer runs again as a whole.
        """
        self.spec = spec or (*run.arch.specs[-1:], LayerSpec())[0].shapes
        self.marks = marks(run.arch, self.spec) if spec else {}
        run = run.at(spec) if spec else run
        self.run = run
        self.arch = run.arch
        self.tape = Tape(received=received, selective=selective, reentrant=reentrant)
        self.c = run.compute
        self.autocast = run.autocast
        self.elements = elements(run.arch, self.spec)
        self.biased = biased(run.arch, self.spec)
        self.widths: dict[str, int] = {}  # of symbols that the architecture does not have
        self.counted = counted
        self.row_share = 1.0  # rows that linears read, over the tape's tokens
        self.stream = WIDTH * run.share
        self.input = Tensor(self.stream, run.residual, differentiable=not first)
        if counted:
            self.input.size = NOTHING

    @property
    def kept_bytes(self) -> int:
        """Bytes of an element of a weight that Transformers keeps in fp32, if the model's others are in 16 bits."""
        return 4 if self.run.keeps_wide else self.run.weight

    def elsewhere(self, name: str, width: Size, b: float) -> Tensor:
        """A tensor that lies outside this piece, and is counted there."""
        out = self.tape.op(name, [], width, b)
        out.size = NOTHING
        return out

    def cast(self, x: Tensor, b: float, name: str) -> Tensor:
        """`x.to(dtype)`: the tensor itself where it already has that type."""
        return x if x.b == b else self.tape.op(f"{name}: to {'fp32' if b == 4 else 'bf16'}", [x], x.width, b)

    def norm(self, x: Tensor, name: str, rows: Size | None = None) -> Tensor:
        """The family's norm of each of the `rows` of `x`, one a token if not given; `x` itself without a `name`."""
        rows = rows or Size({"": self.run.share})
        if self.run.replaced & {"norm", "norm in place"} and self.arch.norm == "rms" and name:
            return self.norm_kernel(x, name, rows)
        kinds = {
            "rms": self.rms_norm, "centred": self.centred_norm, "layer": self.layer_norm, "bare": self.bare_norm,
            "one-plus": self.layer_norm, "kernel": self.kernel_norm,
            "kernel-listed": self.kernel_norm,
        }  # fmt: skip
        return kinds[self.arch.norm](x, name, rows) if name else x

    @property
    def norms_trained(self) -> bool:
        """True if norms are trained: with the model, or as copies beside adapters."""
        return self.run.trained or self.run.saves(NORMS)

    def norm_weight(self, name: str) -> int:
        """Elements of a norm's weight that get a gradient, 0 where it is frozen."""
        return self.elements.get(name, self.arch.norm_elements) if self.norms_trained else 0

    def rms_norm(self, x: Tensor, name: str, rows: Size) -> Tensor:
        """Keeps an fp32 copy of its input, the scale of each of its `rows`, and what the weight multiplies."""
        return self.weighed(self.unweighed(self.cast(x, 4, name), name, rows), x.b, name)

    def unweighed(self, x32: Tensor, name: str, rows: Size) -> Tensor:
        """An RMS norm in fp32, before its weight."""
        tape, width = self.tape, x32.width
        wide = width * 4
        # grad·(2·x^1) is one expression: its power and its product live to the end of it
        square = tape.op(f"{name}: square", [x32], width, 4, saves=[x32], backward_scratch=wide * 2)
        mean = tape.op(f"{name}: mean", [square], rows, 4)
        if self.arch.norm_power:
            scale = tape.op(f"{name}: power", [mean], rows, 4, saves=[mean])
        else:
            scale = tape.op(f"{name}: rsqrt", [mean], rows, 4, saves_out=True)
        return tape.op(f"{name}: scale", [x32, scale], width, 4, saves=[x32, scale], backward_scratch=wide)

    def norm_kernel(self, x: Tensor, name: str, rows: Size) -> Tensor:
        """Liger's: keeps its input and the scale of each row in fp32, and makes the input's gradient over the output's.

        It runs in the input's type. A weight's gradient is first a row for each of the card's processors, in fp32: a
        few MiB, left out (liger-kernel 0.8.5 `ops/rms_norm.py:449,526,674`).
        """
        weight = self.norm_weight(name)
        over = [x] if "norm in place" in self.run.replaced else []
        return self.tape.op(name, [x], x.width, x.b, saves=[x, Tensor(rows, 4)], aliases=over, weight=weight)

    def kernel_norm(self, x: Tensor, name: str, rows: Size) -> Tensor:
        """PyTorch's own RMS norm: keeps its input and the scale of each row in fp32.

        Before autocast knew it, an input of another type than the weight's went through many operations instead (torch
        2.12 `autocast_mode.h`, `AT_FORALL_FP32`; 2.9 `native/layer_norm.cpp`, `rms_norm_composite`).
        """
        if not self.autocast or x.b == 4:
            return self.norm_kernel(x, name, rows)
        if self.arch.norm == "kernel-listed":
            return self.norm_kernel(self.cast(x, 4, name), name, rows)
        return self.rms_norm(x, name, rows)

    def centred_norm(self, x: Tensor, name: str, rows: Size) -> Tensor:
        """Cohere's: subtracts the mean twice, once to be squared and once to be scaled, and keeps both differences."""
        tape, width = self.tape, x.width
        wide = width * 4
        x32 = self.cast(x, 4, name)
        mean = tape.op(f"{name}: mean", [x32], rows, 4)
        away = tape.op(f"{name}: less mean", [x32, mean], width, 4, aliases=[x32])
        square = tape.op(f"{name}: square", [away], width, 4, saves=[away], backward_scratch=wide * 2)
        variance = tape.op(f"{name}: variance", [square], rows, 4)
        away = tape.op(f"{name}: less mean", [x32, mean], width, 4, aliases=[x32])
        scale = tape.op(f"{name}: rsqrt", [variance], rows, 4, saves_out=True)
        n = tape.op(f"{name}: scale", [away, scale], width, 4, saves=[away, scale], backward_scratch=wide)
        return self.weighed(n, x.b, name)

    def weighed(self, n: Tensor, b: float, name: str) -> Tensor:
        """The product of `n` and a norm's weight, in elements of `b` bytes; a trained weight keeps `n`."""
        trained, scaled = self.norms_trained, n
        if not self.arch.norm_fp32:
            n = self.cast(n, b, name)
        promoted = self.run.precision == "autocast-narrow"  # the weight is in fp32, and so is the product
        out = self.tape.op(
            f"{name}: weight",
            [n],
            n.width,
            4 if promoted else n.b,
            saves=[n] if trained else [],
            backward_scratch=n.size if trained else NOTHING,
            weight=self.norm_weight(name),
        )
        self.tape.returns(scaled)
        return out if promoted and not self.arch.norm_fp32 else self.cast(out, b, name)

    def layer_norm(self, x: Tensor, name: str, rows: Size) -> Tensor:
        """PyTorch's: one kernel keeps its input, and the mean and the scale of each row; in fp32 under autocast.

        Nemotron's, which adds 1 to the weight, leaves autocast with its input in 16 bits.
        """
        x = self.cast(x, self.c if self.arch.norm == "one-plus" else 4, name) if self.autocast else x
        weight = self.norm_weight(name)
        return self.tape.op(name, [x], x.width, x.b, saves=[x, Tensor(rows, 8)], weight=weight)

    def bare_norm(self, x: Tensor, name: str, rows: Size) -> Tensor:
        """OLMo's: PyTorch's without a weight, in fp32."""
        x32 = self.cast(x, 4, name)
        return self.cast(self.tape.op(name, [x32], x.width, 4, saves=[x32, Tensor(rows, 8)]), x.b, name)

    def linear(self, name: str, x: Tensor, out: Size) -> Tensor:
        """`nn.Linear`: keeps its input where its weight is trained; LoRA adds two small linears beside it."""
        x = self.bounded(self.entering(name, x), f"{name}: input")
        weighs = bool(self.run.adapter and self.run.adapter.ia3 and self.is_adapted(name))
        if weighs and name == self.arch.names.down:
            x, weighs = ia3.weighed(self, name, x), False
        four_bits = self.run.quantised and (name not in OUTPUTS or self.arch.quantises_head)
        product = self.in_eight_bits if self.run.int8 else self.in_four_bits
        y = product(name, x, out) if four_bits else self.whole(name, x, out)
        if self.run.adapter and not self.run.adapter.ia3 and self.is_adapted(name):
            y = self.adapted(name, x, y)
        y = ia3.weighed(self, name, y) if weighs else y
        y = self.bounded(y, f"{name}: output")
        return self.summed(name, y) if name in ROWWISE else y

    def bounded(self, x: Tensor, name: str) -> Tensor:
        """`torch.clamp` between bounds that are tensors, where linears have some: keeps its input.

        Backward makes two masks, both of which a third joins (torch 2.13 `derivatives.yaml`, `clamp.Tensor`;
        transformers 5.23 `models/gemma4/modeling_gemma4.py`, `Gemma4ClippableLinear`).
        """
        if self.arch.wrapped != "clamped":
            return x
        return self.tape.op(name, [x], x.width, x.b, saves=[x], backward_scratch=x.width * 3)

    def whole(self, name: str, x: Tensor, out: Size) -> Tensor:
        """The product with a weight of 16 or 32 bits, of which autocast makes a copy."""
        run, tape, elements = self.run, self.tape, self.elements.get(name, 0)
        weight = Size({}, {symbol(name): 1})
        trained = elements if run.trained else 0
        wide, copies = run.copies, list[Tensor]()
        if name == HEAD and self.arch.head_normed:
            copies = [self.normed_head(weight, trained)]
            if wide:
                copies = [tape.op(f"{name}: weight to bf16", copies, weight, 2)]
        elif wide:
            # cast before the input is, it gets the bf16 gradient, which the copy's own backward casts to fp32
            copies = [tape.op(f"{name}: weight to bf16", [], weight, 2, weight=trained)]
            if run.caches:
                tape.cache(*copies)
        elif run.rounded:
            copies = [self.rounded(name, weight)]
        source = self.cast(x, self.c, name) if self.autocast else x
        return tape.op(
            name,
            [*copies, source],
            out,
            self.c,
            saves=([source] if run.trained else []) + copies,
            weight=0 if copies else trained,
            product=name not in self.biased,  # with a bias it is `addmm`
            flat=True,
        )

    def rounded(self, name: str, weight: Size) -> Tensor:
        """A frozen weight, rounded to four bits in groups and back, which its product keeps.

        At most there are four of it in fp32: the weight, its steps, these times their scales, and the sum with what a
        group's zero stands for (torchao 0.14.1 `quantization/qat/fake_quantizer.py`, `Int4WeightFakeQuantizer.
        _bf16_activations_forward`; unsloth 2025.10.9 `kernels/utils.py`, `get_lora_parameters`). An adapter's own first
        matrix is rounded, too, and left out.
        """
        return self.tape.op(f"{name}: to 4 bits and back", [], weight, self.c, scratch=weight * (16 - self.c))

    def normed_head(self, weight: Size, trained: int) -> Tensor:
        """The head's weight with each row divided by its norm, in the type of the weight (`NormHead` of Baichuan 2)."""
        b = 4 if self.run.copies else self.c
        scratch = weight * (2 * b) if trained else NOTHING  # gradients of the quotient's both sides
        return self.tape.op("lm_head: normalise", [], weight, b, weight=trained, backward_scratch=scratch)

    def in_four_bits(self, name: str, x: Tensor, out: Size) -> Tensor:
        """bitsandbytes' `Linear4bit`: its weight is dequantised for the product alone.

        In forward, scales that were quantised are dequantised, too; the input is cast to the product's type, the output
        to the input's (`backends/cuda/ops.py`). Unsloth's buffer serves forward and, of backward, the MLP's last linear
        (unsloth 2025.2.2 `kernels/fast_lora.py`: `matmul_lora`, but `fast_dequantize`).
        """
        source, b = self.cast(x, self.c, name), self.run.unpacked or self.c
        weight, scales = (Size({}, {symbol(name): each}) for each in (b, SCALE))
        nested, there = self.run.nested, self.run.buffer > 0
        y = self.tape.op(
            name,
            [source],
            out,
            self.c,
            saves=[source] if self.run.keeps_inputs else [],
            scratch=NOTHING if there else weight + scales if nested else weight,
            course=(scales, weight, None) if nested and not there else (),
            backward_scratch=NOTHING if there and name == self.arch.names.down else weight,
            product=name not in self.biased,
            flat=True,
        )
        self.tape.attach(y, [source] if self.run.keeps_inputs else [])
        return self.cast(y, x.b, name)

    def in_eight_bits(self, name: str, x: Tensor, out: Size) -> Tensor:
        """bitsandbytes' `Linear8bitLt`: the input is cast to 8 bits for the product, which is made in 32.

        The input is cast in fp16, beside its magnitudes and a mask of outliers; the product is dequantised in fp16.
        Backward dequantises the weight. The context keeps the input, which a frozen weight does not need, and before
        0.45 that in 8 bits, too (bitsandbytes 0.50.2 and 0.43.3 `autograd/_functions.py`, `MatMul8bitLt`; 0.50.2
        `backends/cuda/ops.py`). Columns of outliers, which depend on the data, are left out.
        """
        half, fits = x.width * 2, x.b == 2 and self.run.half
        before, wide = ((), half) if fits else ((half,), half + half)
        course: Course = (*before, None, half, x.width, len(before))
        narrow = self.tape.aside(f"{name}: to 8 bits", x, x.width, 1, wide + x.width, course)
        kept = [x, Tensor(x.width, 1)] if self.run.keeps_columns else [x]
        y = self.tape.op(
            name,
            [x, narrow],
            out,
            x.b,
            saves=kept,
            scratch=out * 4 if fits else out * 6,
            course=(out * 4, None) if fits else (out * 4, out * 2, None),
            backward_scratch=Size({}, {symbol(name): x.b}),
            product=name not in self.biased,
            flat=True,
        )
        self.tape.attach(y, kept)
        return y

    def entering(self, name: str, x: Tensor) -> Tensor:
        """The input of a linear whose outputs are spread over ranks: each rank makes a part of the input's gradient.

        The parts are summed into a tensor of its own, one for each such linear, unless sequences are spread too: then
        the input was gathered, and `gathered` sends all its gradients back at once.
        """
        if self.arch.ranks == 1 or self.run.sequences or name not in COLWISE:
            return x
        return self.tape.op(f"{name}: all-reduce", [x], x.width, x.b, view=True)

    def summed(self, name: str, y: Tensor) -> Tensor:
        """The output of a linear whose inputs are spread over ranks: partial sums, all-reduced or reduce-scattered.

        Async TP scatters them as they are made, and adds up what has come (torch 2.13
        `distributed/_symmetric_memory/__init__.py`, `_fused_matmul_reduce_scatter_impl`).
        """
        if self.arch.ranks == 1:
            return y
        if self.run.within:
            return self.tape.op(f"{name}: reduce-scatter", [y], self.stream, y.b, spared=())
        if self.run.sequences:
            # cut along the second dimension by a copy (torch `_functional_collectives.py`, `reduce_scatter_tensor`)
            return self.tape.op(
                f"{name}: reduce-scatter", [y], self.stream, y.b, scratch=y.size, backward_scratch=y.size, spared=()
            )
        return self.tape.op(f"{name}: all-reduce", [y], y.width, y.b, aliases=[y])

    def gathered(self, x: Tensor, name: str) -> Tensor:
        """All positions of a block's input where ranks have parts of the sequence: gathered, then joined by a copy.

        Async TP gathers them where they belong (`_fused_all_gather_matmul_impl`).
        """
        if not self.run.sequences:
            return x
        whole = NOTHING if self.run.within else WIDTH * x.b
        return self.tape.op(f"{name}: gather sequence", [x], WIDTH, x.b, scratch=whole, backward_scratch=whole)

    def is_adapted(self, name: str) -> bool:
        """True if PEFT puts an adapter beside this linear; the head is never among `all-linear`."""
        targets = self.run.adapter.targets if self.run.adapter else ()
        if name == HEAD:
            return targets != "all-linear" and name in targets
        if name == "ssm_out_proj" and self.arch.ssm and not self.arch.ssm.adapted:
            return False
        own = name
        for block in ("shared_", "delta_", "lightning_", "ssm_", "attn_", "conv_", "sparse_", "heavy_"):
            own = own.removeprefix(block)
        if name in UNADAPTED or targets == "all-linear":
            return name not in UNADAPTED
        return name in targets or own in targets or name in named_at_length(self.arch, self.spec, tuple(targets))

    def adapted(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """`y + lora_B(lora_A(dropout(x)))·scaling`, x cast to the adapter's type first, the sum cast back.

        Beside four bits autocast casts what it multiplies (peft `tuners/lora/bnb.py`: `requires_conversion`).
        """
        adapter = self.run.adapter
        assert adapter is not None
        dims = {**dimensions(self.arch), **self.widths}
        rank = adapter.rank if self.elements.get(name, 1) else 0  # no gradients: an earlier use has made them
        inputs, outputs = (round(amount(t.width, dims).tokens / self.row_share) for t in (x, y))
        if adapter.dora:
            return dora.scaled(self, name, x, y, dora.Sides(inputs, outputs, rank))
        label = f"{name}: LoRA"
        if adapter.count > 1:
            return self.adapted_by_token(label, x, y, inputs * rank, outputs * rank)
        read, _, scaled = self.through_both(label, x, y.width, of(r=self.row_share), inputs * rank, outputs * rank)
        return self.with_adapters(label, y, [scaled], (x, read))

    def adapted_by_token(self, label: str, x: Tensor, y: Tensor, n_in: int, n_out: int) -> Tensor:
        """`y + scaling·B(A(dropout(x)))` with the adapter that each token has, of `n_in` and `n_out` elements.

        The matrices of all adapters are stacked by a copy, with which grouped products multiply tokens that lie in the
        order of their adapters. Each token has a factor of its own, in bf16. Only a Hopper card has grouped products;
        elsewhere each adapter multiplies its own tokens, of which one adapter has all in the runs that were measured.
        Read in prime-rl c330a6d4e `trainer/models/layers/lora/multi_linear.py`, `MultiLoRALinear.forward`.
        """
        adapter, tape = self.run.adapter, self.tape
        assert adapter is not None
        read, source = self.dropped_before(label, x)
        every = (("A", n_in * adapter.count), ("B", n_out * adapter.count))
        a, b = (tape.op(f"{label} {part}: stack", [], Size({}, {"": n}), adapter.b, weight=n) for part, n in every)
        down = self.times(f"{label} A", a, source, of(r=self.row_share))
        up = self.times(f"{label} B", b, down, y.width)
        factor = Tensor(Size({"": self.row_share}), 2, differentiable=False)
        scaled = tape.op(f"{label} scale", [up], y.width, up.b, saves=[factor])
        total = self.with_adapters(label, y, [scaled], (x, read, source))
        tape.returns(a, b, y, up)
        return total

    def through_both(
        self, label: str, x: Tensor, out: Size, low: Size, n_in: int, n_out: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What an adapter reads, and its output of width `out`, as it comes and scaled.

        `low` is the width between its two matrices, of `n_in` and `n_out` elements.
        """
        adapter = self.run.adapter
        assert adapter is not None
        read, source = self.dropped_before(label, x)
        down = self.through(f"{label} A", source, low, n_in)
        up = self.through(f"{label} B", down, out, n_out)
        return read, up, self.tape.op(f"{label} scale", [up], out, self.c if self.autocast else adapter.b)

    def dropped_before(self, label: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """What an adapter reads, and what its dropout leaves of that."""
        adapter = self.run.adapter
        assert adapter is not None
        read = x if self.run.quantised and self.autocast else self.cast(x, adapter.reads or adapter.b, label)
        if not adapter.dropout:
            return read, read
        return read, self.tape.op(f"{label} dropout", [read], x.width, read.b, saves=[Tensor(x.width, 1)])

    def with_adapters(self, label: str, y: Tensor, scaled: Sequence[Tensor], read: Sequence[Tensor] = ()) -> Tensor:
        """The output of a linear and that of what is beside it, in the type of the former; `read` lives until then."""
        every, b = [y, *scaled], max(t.b for t in (y, *scaled))
        total = self.tape.op(f"{label} add", every, y.width, b, aliases=[t for t in every if t.b == b])
        self.tape.returns(*read)
        return self.cast(total, y.b, label)

    def through(self, name: str, x: Tensor, out: Size, weight: int) -> Tensor:
        """The product with one of an adapter's matrices, of `weight` elements."""
        return self.times(name, self.matrix(name, weight), x, out)

    def matrix(self, name: str, weight: int) -> Tensor | int:
        """One of an adapter's matrices: a 16-bit copy of one in fp32, which autocast keeps, or its elements."""
        adapter = self.run.adapter
        assert adapter is not None
        if not self.casts_adapters or adapter.b == 2:
            return weight
        copy = self.tape.op(f"{name}: weight to bf16", [], Size({}, {"": weight}), 2, weight=weight)
        if self.autocast:
            self.tape.cache(copy)
        return copy

    @property
    def casts_adapters(self) -> bool:
        """True if products with an adapter's matrices run in the compute type, whatever these are stored in."""
        return self.autocast

    def times(self, name: str, matrix: Tensor | int, x: Tensor, out: Size) -> Tensor:
        """The product of `x` with one of an adapter's matrices, see `matrix`."""
        adapter = self.run.adapter
        assert adapter is not None
        x = self.cast(x, self.c if self.casts_adapters else adapter.b, name)
        if isinstance(matrix, int):
            return self.tape.op(name, [x], out, x.b, saves=[x], weight=matrix, product=True, flat=True)
        return self.tape.op(name, [matrix, x], out, x.b, saves=[x, matrix], product=True, flat=True)

    def dropped_out(self, x: Tensor, name: str) -> Tensor:
        """Dropout of a model that trains: a new tensor and a mask of a byte an element."""
        if not self.run.training:
            return x
        return self.tape.op(f"{name}: dropout", [x], x.width, x.b, saves=[Tensor(x.width, 1)])

    def block_output(self, x: Tensor, name: str) -> Tensor:
        """The output of a block's last linear, dropped out where the family does so."""
        return self.dropped_out(x, name) if self.arch.residual_dropout else x

    def scaled(self, x: Tensor, name: str) -> Tensor:
        """A block's output as it is added to the residual stream: scaled where the family has a factor, or a vector."""
        if self.arch.layer_scaled:
            trained = self.run.trained
            weight, b = self.elements[SCALES[name]] if trained else 0, max(x.b, self.run.residual)
            return self.tape.op(f"{name}: scale", [x], x.width, b, saves=[x] if trained else [], weight=weight,
                                backward_scratch=x.width * b if trained else NOTHING)  # fmt: skip
        return self.tape.op(f"{name}: scale", [x], x.width, x.b) if self.arch.residual_scaled else x

    def add(self, residual: Tensor, y: Tensor, name: str) -> Tensor:
        """The residual stream: its gradient is the gradient of both inputs that share its type."""
        b = max(residual.b, y.b)
        return self.tape.op(name, [residual, y], self.stream, b, aliases=[t for t in (residual, y) if t.b == b])


@lru_cache(maxsize=1024)
def named_at_length(arch: Architecture, spec: LayerSpec, targets: tuple[str, ...]) -> frozenset[str]:
    """The short names of linears that a target names with what it lies in, such as `shared_expert.up_proj`."""
    at_length = [target for target in targets if "." in target]
    if not at_length:
        return frozenset()
    return frozenset(short(linear.name) for linear in adapted(arch, spec, at_length))
