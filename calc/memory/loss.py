"""The head and the loss: the memory of logits over V vocabulary entries at each instant.

One program for each way of computing the loss, written as the real code runs it. Widths are elements per token whose
loss is taken. The head's own input is the final norm's output, h elements. Read in transformers `loss/loss_utils.py`
and `models/*/modeling_*.py`, trl `trainer/utils.py` and `kernels/`, torch `LossNLL.cpp`, OpenRLHF
`models/{actor,loss,utils}.py`, verl `workers/actor/dp_actor.py`, `utils/torch_functional.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import assert_never, get_args

from calc.autograd.polynomial import Amount, Segment, amount
from calc.autograd.tape import NOTHING, Size, Tape, Tensor, of
from calc.base.plan import Lasting, Path
from calc.memory.activations import Program
from calc.memory.linears import OUTPUTS, WIDTH
from calc.memory.megatron_depth import MegatronDepth
from calc.memory.run import Run, dimensions

V = of(V=1)
ONE = Size({"": 1})

# what a caller does with the outputs of a model whose own forward has the loss
AFTER = ("outputs: to fp32", "metrics")
# outputs that live longer than their own backward
LASTING = get_args(Lasting)
# pieces of a chunked loss (torchtune `modules/loss`, num_output_chunks)
CHUNKS = 8
# vocabulary entries of which verl's fused head sums, and whose gradients it makes, at a time (`vocab_per_split`)
PARTIAL, SPLIT = 1024, 9504
# vocabulary entries of a chunk (prime-rl `trainer/config.py`, fused_lm_head_chunk_size for RL)
ENTRIES = 2048
# vocabulary entries of a tile (trl 1.16.0 `trainer/utils.py`)
TILE_ENTRIES = 32_768


class Head(Program):
    """Writes the lm_head and a loss on a tape."""

    held: Tensor | None = None
    aside = NOTHING  # what the caller's variables keep with it
    before: Size | None = None  # what is saved before the loss, where that waits for another model
    grad = True
    again = False  # depths of multi-token prediction run again for backward

    def logits(self, path: Path) -> Tensor:
        """The head's output, soft-capped where the model does, as the model returns it."""
        whole = self.whole_logits(path)
        x = self.linear("lm_head", self.gathered(self.read(path), "lm_head"), whole * (1 / self.arch.ranks))
        if self.arch.ranks > 1 and not self.run.sequences and not self.arch.megatron:
            # all ranks' logits, gathered one after another, then joined by a copy
            x = self.tape.op("logits: gather", [x], V, x.b, scratch=V * x.b)
        if self.arch.logits_scaled:
            x = self.tape.op("logits: scale", [x], x.width, x.b)
        if self.arch.softcap_logits and not path.caps:
            x = self.tape.op("logits: over cap", [x], x.width, x.b)
            x = self.tape.op("logits: tanh", [x], x.width, x.b, saves_out=True)
            x = self.tape.op("logits: times cap", [x], x.width, x.b)
        self.tape.returns(self.input)
        if self.run.sequences:
            self.tape.hold(self.input)  # `last_hidden_state`, which the head itself keeps where it is not gathered
        if not path.inside:
            self.leave()
        return self.cast(x, 4, "logits") if path.head_fp32 else x

    def whole_logits(self, path: Path) -> Size:
        """The logits that the model returns, over the tokens of its input."""
        return V * path.kept if path.picked else V

    def read(self, path: Path) -> Tensor:
        """The hidden states that the head reads: all, or those of the last positions (Transformers' `logits_to_keep`).

        The slice is copied where the product sees a matrix, unless autocast copies it anyway.
        """
        if not path.picked:
            return self.input
        cast = self.autocast and self.input.b > self.c
        return self.tape.op("hidden states: slice", [self.input], WIDTH * path.kept, self.input.b, view=cast)

    def write(self, path: Path) -> Tape:
        """The whole head with the loss of `path`."""
        match path.kind:
            case "scalar":
                return self.score(path)
            case "chunked" | "fused":
                return self.in_chunks(path)
            case "fused-rows":
                return self.fused_rows(path)
            case "chunked-logits":
                return self.of_chunks(path)
            case "chunked-views":
                return self.of_views(path)
            case "ahead":
                return self.ahead(path)
            case "cut":
                return self.cut()
            case "pieces":
                return self.in_pieces(path)
            case "tiled":
                return self.tiled(path)
            case "divergence":
                return self.of_logits(path, self.divergence)
            case "cross-entropy":
                return self.of_logits(path, self.cross_entropy)
            case "log-softmax" if path.halves:
                return self.of_logits(path, self.of_halves)
            case "log-softmax":
                return self.of_logits(path, self.log_softmax)
            case "selective":
                return self.of_logits(path, self.selective)
            case "logsumexp":
                return self.of_logits(path, self.logsumexp)
            case "rows":
                return self.of_logits(path, self.rows)
            case "flash":
                return self.of_logits(path, self.flash)
            case "vocab-parallel" | "vocab-parallel-compiled" | "vocab-parallel-te":
                return self.of_logits(path, self.vocab_parallel)
            case "vocab-parallel-softmax":
                return self.of_logits(path, self.one_softmax)
            case "vocab-chunked":
                return self.of_entries()
            case "linear-entropy":
                return self.linear_entropy()
            case "chunked-entropy":
                return self.chunked_entropy(path)
            case other:
                assert_never(other)

    def score(self, path: Path) -> Tape:
        """A value head, whose output is one number a position."""
        self.linear("score", self.gathered(self.input, "score"), ONE)
        self.keep(self.input, path)
        return self.tape

    def of_logits(self, path: Path, loss: Callable[[Tensor, Path], None]) -> Tape:
        """The head, what becomes of its logits on the way to `loss`, and `loss` itself."""
        tape = self.tape
        self.predict(path)
        whole = self.logits(path)
        if not path.metrics:
            tape.hold(whole)  # as long as the outputs, of which metrics take the place
        x = self.divided(whole, path)
        nll = self.nll(x, path) if path.nll else None
        if sliced(path) and not path.halves:
            # backward makes zeros of all positions, into which it copies
            x = tape.op("logits: slice", [x], x.width * path.kept, x.b, view=True)
        if path.upcast:
            x = self.cast(x, 4, "logits")
        self.keep(x, path)
        self.aside = x.width * path.aside
        if path.aside and path.held not in LASTING:
            tape.hold(tape.op("aside", [_detached(x)], x.width, path.aside))
        if path.entropy == "vocab-parallel":
            return self.beside_entropy(x, path, loss)
        loss(x, path)
        # a copy of the logits serves the kernel alone
        self.entropy(x, path)
        if nll:
            tape.op("loss", [tape.final, nll], ONE, 4)
        self.measured(x, path)
        return tape

    def predict(self, path: Path) -> None:
        """Multi-token prediction: each depth's stream, and behind all of them its logits and loss, before the model's.

        Streams are joined and cut into views again, and logits are variables until all losses are there
        (`multi_token_prediction.py`, `MultiTokenPredictionBlock.forward`, `process_mtp_loss`).
        """
        streams = [self.input]
        for spec in self.arch.depths:
            depth = MegatronDepth(self.run.alone(spec), spec)
            depth.tape = self.tape
            streams.append(depth.depth(streams[-1], self.again))
        if len(streams) == 1:
            return
        tape, n = self.tape, len(streams)
        joined = tape.op("mtp: join depths", streams, self.stream * n, self.input.b, aliases=streams)
        own, *further = tape.split("mtp: depths", joined, [self.stream] * n)
        every = []
        for self.input in further:
            every.append(self.logits(path))
            self.vocab_parallel(every[-1], path)
            own = tape.op("mtp: loss", [own, tape.final], self.stream, own.b, view=True, aliases=[own])
        tape.returns(*every)
        self.input = own

    def leave(self) -> None:
        """The model's forward ends, and with it an autocast of its own, whose copies only backward still needs."""
        tape = self.tape
        if self.run.wrapped and tape.cached:
            tape.held = [t for t in tape.held if t not in tape.cached]
            tape.returns(*tape.cached)

    def measured(self, logits: Tensor, path: Path) -> None:
        """The memory that the caller's metrics take for the logits and beside them, once the loss is there, outside
        autograd.

        A loss inside the model has its outputs cast to fp32 first, where Accelerate wraps the model: the caller reads
        those.
        """
        if not (path.aside or path.metrics):
            return
        if path.inside:
            self.leave()
        tape, last, read = self.tape, self.tape.final, _detached(logits)
        if path.outputs_fp32 and path.inside and logits.b < 4:
            read = tape.op("outputs: to fp32", [read], logits.width, 4)
        tape.op("metrics", [read], ONE, 4, scratch=logits.width * path.metrics)
        tape.op("loss", [last], ONE, 4)

    def nll(self, x: Tensor, path: Path) -> Tensor:
        """`CrossEntropyLoss` of some rows of the logits without their last position, in the type that logits have.

        A slice for the rows, and one for the positions; each makes zeros of all that it was cut from in backward. A
        single row is contiguous without its last position. trl 1.16 `experimental/orpo/orpo_trainer.py:779-800`. Where
        all rows count it is the model's, which casts logits (transformers 4.52 `loss/loss_utils.py`, ForCausalLMLoss).
        """
        tape, wide = self.tape, V * path.nll
        if path.nll == 1:
            softmax = tape.op("nll: log-softmax", [self.cast(x, 4, "nll: logits")], x.width, 4, saves_out=True)
            return tape.op("nll", [softmax], ONE, 4)
        rows = tape.op("nll: rows", [x], wide, x.b, view=True)
        shifted = tape.op("nll: slice", [rows], wide, x.b, view=True)
        if path.shift_copy:
            shifted = tape.op("nll: shift", [shifted], wide, x.b, aliases=[shifted])
        softmax = tape.op("nll: log-softmax", [shifted], wide, x.b, saves_out=True)
        return tape.op("nll", [softmax], ONE, 4)

    def divided(self, x: Tensor, path: Path) -> Tensor:
        """The logits over the temperature."""

        def divide(view: bool, clones: Size = NOTHING) -> Tensor:
            return self.tape.op("logits: divide", [x], self.whole_logits(path), x.b, view=view, backward_scratch=clones)

        match path.scaled:
            case "":
                return x
            case "copy":
                return divide(view=False)
            case "in-place":
                return divide(view=True)
            case "view":
                # `div_` of a view: CopySlices clones the gradient and divides the clone beside it
                return divide(view=True, clones=x.size * 2)
            case other:
                assert_never(other)

    def variables(self, path: Path) -> Size:
        """The outputs that the caller's variables keep, but for what waits for backward anyway."""
        if self.held is None:
            return NOTHING
        saved = {t.storage for op in self.tape.ops for t in op.saves}
        waits = path.held == "inside" and self.before is None and self.held.storage in saved
        return self.aside if waits else self.held.storage.size + self.aside

    def keep(self, output: Tensor, path: Path) -> None:
        """Outputs that the caller references live through the whole backward, as if the first operation saved them."""
        if path.held != "forward":
            self.held = self.tape.hold(output)
        if path.held not in ("forward", "inside"):
            self.tape.ops[0].saves += (output,)

    def entropy(self, x: Tensor, path: Path) -> None:
        """The entropy beside the log-probability, if any: `logsumexp(x) - sum(softmax(x)·x)`.

        Compiled, its kernels compute each probability where they read a logit, so that none is a tensor on a GPU, and
        backward writes one gradient (torch `_inductor/ir.py`, `should_realize_on_reuse`: a CPU alone keeps an
        exponential that is read twice). In `pieces` it is compiled anew for each number of tokens, and so runs as it is
        written from the ninth on (torch._dynamo.config.recompile_limit); in backward each piece makes a gradient of all
        logits, beside the sum so far. Eager, autocast casts the logits for the softmax and for the logsumexp, whose
        cast is kept beside the probabilities; backward makes the product's gradients in fp32, then the logsumexp's as
        `logsumexp` here does, then the softmax's.
        """
        tape, log_probability, wide = self.tape, self.tape.final, x.width * 4
        match path.entropy:
            case "" | "softmax":  # the latter by the loss itself: see `one_softmax`
                return
            case "compiled":
                parts = [tape.op("entropy", [x], ONE, 4, saves=[x])]
            case "eager":
                read = self.cast(x, 4, "entropy")
                p = tape.op("entropy: softmax", [read], x.width, 4, saves_out=True)
                read = self.cast(x, 4, "entropy")
                total = tape.op("entropy: logsumexp", [read], ONE, 4, saves=[read], saves_out=True,
                                scratch=wide, backward_scratch=wide * 2)  # fmt: skip
                uncast = wide if x.b < 4 else NOTHING
                product = tape.op(
                    "entropy: product", [p, x], ONE, 4, saves=[p, x], scratch=wide, backward_scratch=uncast
                )
                parts = [total, product]
            case "chunked":
                piece = Size({}, {"V": path.pieces})
                kept = Tensor(
                    x.width, 8
                )  # softmax and cast of all pieces; those of one, and an exponential, in passing
                parts = [tape.op("entropy in pieces", [x], ONE, 4, saves=[kept] if self.grad else [],
                                 scratch=piece * (4 if self.grad else 12), backward_scratch=x.size)]  # fmt: skip
            case "vocab-parallel":
                raise AssertionError("computed before the loss: see `beside_entropy`")
            case other:
                assert_never(other)
        tape.op("loss", [log_probability, *parts], ONE, 4)

    def beside_entropy(self, x: Tensor, path: Path, loss: Callable[[Tensor, Path], None]) -> Tape:
        """verl's entropy over a rank's part of the vocabulary, and `loss` on a copy of the logits where it makes one.

        The entropy keeps the logits and its probabilities, over which backward writes the gradient
        (`utils/megatron/tensor_parallel.py`, `_VocabParallelEntropy`; `_lm_head_logits_processor` of
        `workers/engine/megatron/transformer_impl.py`). slime has the same function, to 0.3.0, and gives it a copy
        `apart` (`utils/ppo_utils.py`, `calculate_log_probs_and_entropy`).
        """
        tape = self.tape
        read = tape.hold(tape.op("logits: clone", [x], x.width, x.b)) if path.copied else x
        own = tape.op("entropy: clone", [x], x.width, x.b) if path.apart else x
        p = tape.op("entropy: softmax", [own], own.width, 4, aliases=[own])
        entropy = tape.op("entropy", [p], ONE, 4, saves=[p, own], overwrites=True)
        loss(read, path)
        tape.op("loss", [tape.final, entropy], ONE, 4)
        return tape

    def one_softmax(self, x: Tensor, path: Path) -> None:
        """slime's log-probabilities and entropies: one softmax in fp32 beside the logits, kept for backward.

        Its gradient is written over it. The logits are kept, too, where an entropy is part of the loss, whose gradient
        is made beside the other (slime 0.3.1 `utils/ppo_utils.py`, `_VocabParallelLogProbEntropy`).
        """
        learns = path.entropy == "softmax"
        p = self.tape.op("softmax", [x], x.width, 4, aliases=[x])
        kept, own = ([p, x], p.size) if learns else ([p], NOTHING)
        self.tape.op("log-probability", [p], ONE, 4, saves=kept, overwrites=True, backward_scratch=own)

    def cross_entropy(self, x: Tensor, path: Path) -> None:
        """`F.cross_entropy(logits.float())`: log-softmax in fp32 is kept, its backward holds three such tensors.

        The cast and its shifted copy are variables of `ForCausalLMLoss`, which live until it returns. A model that
        calls it has the head's input in `hidden_states`; outputs that a caller keeps go to a loss of its own.
        """
        tape = self.tape
        if path.held == "forward":
            tape.hold(self.input)
        if path.compiled:
            return self.fused_cross_entropy(x)
        wide = x if path.uncast else self.cast(x, 4, "logits")
        x = self.shifted(wide, path)
        own = wide, x
        x = self.cast(x, 4, "cross entropy") if self.autocast else x
        # over a part of the vocabulary step by step: shifted logits, and a gradient that is the sum of two tensors
        # (torch `distributed/tensor/parallel/loss.py`, `_nll_loss_and_log_softmax_backward`)
        step = x.size if self.run.sequences else NOTHING
        x = tape.op("log-softmax", [x], x.width, x.b, saves_out=True, scratch=step)
        tape.op("nll", [x], ONE, 4, backward_scratch=step * 2)
        tape.returns(*own)

    def fused_cross_entropy(self, x: Tensor) -> None:
        """The loss as `torch.compile` has it: keeps the logits, and two numbers in fp32 of each position.

        These are the maximum and the logarithm of the sum; the cast, the softmax and its gradient are never tensors.
        Backward writes one gradient, in the type of the logits (traced with torch 2.13 `_functorch/partitioners.py`).
        Over a part of the vocabulary sums of other ranks come between the kernels, so that shifted logits and the
        log-softmax are tensors in fp32, and the latter is kept (torch `distributed/tensor/parallel/loss.py`).
        """
        if self.run.sequences:
            shifted = self.tape.aside("logits: shift", x, x.width, 4)
            self.tape.op("cross entropy", [x, shifted], ONE, 4, saves=[Tensor(x.width, 4)])
        else:
            self.tape.op("cross entropy", [x], ONE, 4, saves=[x, Tensor(ONE, 8)])

    def log_softmax(self, x: Tensor, path: Path) -> None:
        """`F.log_softmax(logits).gather(labels)`, in the type that the logits have by then."""
        tape = self.tape
        x = self.shifted(x, path)
        x = tape.op("log-softmax", [x], x.width, x.b, saves_out=True)
        if not path.metrics:
            tape.hold(x)
        if path.aside and path.held in LASTING:
            tape.ops[0].saves += (x,)  # a variable of the caller, too
        tape.op("gather", [x], ONE, x.b)

    def of_halves(self, x: Tensor, path: Path) -> None:
        """Log-probabilities of the chosen rows and then of the rejected ones, each of a slice of the logits.

        Another slice cuts the last position off, of which the kernel copies several rows. Backward makes zeros for
        either slice (ColossalAI 4f9953be3 `applications/ColossalChat/coati/{trainer/dpo,models/utils}.py`).
        """
        tape, found = self.tape, []
        for half in ("chosen", "rejected"):
            rows = tape.op(f"{half}: rows", [x], x.width * 0.5, x.b, view=True)
            rows = tape.op(f"{half}: slice", [rows], rows.width * path.kept, x.b, view=True)
            p = tape.op(f"{half}: log-softmax", [rows], rows.width, x.b, saves_out=True, scratch=rows.width * x.b)
            found.append(tape.op(f"{half}: gather", [p], ONE, x.b))
            tape.returns(p)
        tape.op("loss", found, ONE, 4)

    def selective(self, x: Tensor, path: Path) -> None:
        """Row by row: keeps every row's log-softmax, without grad one row's at a time.

        Backward holds a row's two gradients beside what it has not released yet, then all rows' and their stack. Under
        autocast a row is cast first; without grad the log-softmax of the row before is a name of the loop until then
        (verl 0.7.0 `utils/torch_functional.py`, `logprobs_from_logits_v2`).
        """
        tape, row = self.tape, Size({}, {"V": path.tile} if path.tile else {"V·S": path.kept})
        x = self.contiguous(x, path)
        b = 4 if path.rows_fp32 else x.b
        cast = row * b if path.rows_fp32 else NOTHING
        rows = tape.op("logits: rows", [x], x.width, x.b, view=True)
        if self.grad:
            kept = Tensor(x.width, b, apart=True)
            tape.op("log-softmax", [rows], ONE, b, saves=[kept], scratch=cast, backward_scratch=row * (2 * b),
                    rowwise=True)  # fmt: skip
        else:
            tape.op("log-softmax", [rows], row, b, scratch=cast if path.turns == 1 else cast * 2)

    def logsumexp(self, x: Tensor, path: Path) -> None:
        """`gather(logits) - logsumexp(logits)`: keeps the logits, backward makes one gradient for each half."""
        tape = self.tape
        picked = tape.op("gather", [x], ONE, x.b, saves=[x])
        total = tape.op(
            "logsumexp", [x], ONE, x.b, saves=[x], saves_out=True, scratch=x.size, backward_scratch=x.size * 2
        )  # grad·exp(x - result) is one expression

        tape.op("log-probability", [picked, total], ONE, x.b)

    def flash(self, x: Tensor, path: Path) -> None:
        """flash-attn's cross entropy: keeps the logits, backward writes one gradient, in place over the logits.

        Not in place where the entropy reads them too (verl `workers/actor/dp_actor.py`: `inplace_backward = False`).
        ms-swift's `ChunkedCrossEntropyLoss` is PyTorch's on a `tile` of the tokens at a time: a log-softmax in forward,
        and in backward two gradients beside it (4.6.0 `sequence_parallel/utils.py`).
        """
        read = self.shifted(x, path)
        in_place = path.in_place and not path.entropy
        tile = Size({}, {"V": path.tile * read.b})
        self.tape.op("cross entropy", [read], ONE, 4, saves=[read], overwrites=in_place, scratch=tile,
                     backward_scratch=tile * 3)  # fmt: skip

    def vocab_parallel(self, x: Tensor, path: Path) -> None:
        """Megatron-core's: a cast to fp32 that is turned into probabilities in place, and then into their gradient.

        Compiled kernels (`cross_entropy_loss_fusion`) do not write over their inputs: the cast stays a variable of the
        forward beside the probabilities, which an output of their own takes. Backward casts the gradient to 16 bits.
        `core/tensor_parallel/cross_entropy.py`, `core/fusions/fused_cross_entropy.py`. Transformer Engine's kernel
        reads logits as they are, and writes their gradient over them, up to 2.17 (`pytorch/triton/cross_entropy.py`).
        """
        if path.kind == "vocab-parallel-te":
            self.tape.op("cross entropy", [x], ONE, 4, saves=[x], overwrites=True)
            return
        read = self.cast(x, 4, "logits")
        beside = read.size if path.kind == "vocab-parallel-compiled" else NOTHING
        self.tape.op("cross entropy", [read], ONE, 4, saves=[read], overwrites=True, scratch=beside)

    def linear_entropy(self) -> Tape:
        """verl's fused head: log-probabilities and entropies, with logits of some of the vocabulary at a time.

        Forward has three numbers in fp32 of a position for every 1,024 entries, and keeps its input and three numbers.
        Backward makes the gradient of 9,504 entries' logits at a time, and adds its product to the input's gradient
        (`utils/kernel/kernels.py`, `efficient_entropy_forward` and `efficient_entropy_backward`, `_Split_Dlogits_N`).
        """
        tape, c = self.tape, self.c
        x = self.gathered(self.input, "lm_head")
        partial = V * (3 * 4 / PARTIAL / self.arch.ranks)
        piece = ONE * (SPLIT * c) + WIDTH * c
        weight = self.elements["lm_head"] if self.run.trained else 0
        tape.op("lm_head, loss and entropy", [x], ONE * 2, 4, saves=[x, Tensor(ONE, 3 * 4)], scratch=partial,
                backward_scratch=piece, weight=weight)  # fmt: skip
        return tape

    def chunked_entropy(self, path: Path) -> Tape:
        """verl's fused head in PyTorch's operations: log-probabilities and entropies of some tokens after others.

        Forward has `tensors` in fp32 of a tile's logits at once: them, their softmax, a log-softmax, and in passing an
        exponential or a product. Backward makes the logits again; beside them and their softmax are the labels' ones,
        what these differ by from the softmax, and the gradient; with the entropy's, a log-softmax and another product.
        The gradient in 16 bits then makes one of the whole head, frozen or not, beside their sum, while variables still
        name those of the tile before. verl 0.5.0 to 0.9.1 `utils/experimental/torch_functional.py:FusedLinearForPPO`.
        """
        tape, c = self.tape, self.c
        x = self.gathered(self.input, "lm_head")
        tile, before = Size({}, {"V": path.tile}), path.turns > 1
        made = Size({}, {"W_lm_head": c, "h": path.tile * c})
        logits = tile * ((7 if path.entropy else 5) * 4) + made * before
        products = tile * ((4 if path.entropy else 3) * 4 + 2) + made * (1 + before)
        most = max(logits, products, key=lambda size: amount(size, head_dimensions(self.run)).fixed)
        weight = self.elements["lm_head"] if self.run.trained else 0
        tape.op("lm_head, loss and entropy", [x], ONE * 2, 4, saves=[x, Tensor(ONE, 8)],
                scratch=tile * (4 * path.tensors), backward_scratch=most, weight=weight)  # fmt: skip
        return tape

    def of_entries(self) -> Tape:
        """prime-rl's fused head: log-probabilities and entropies from the logits of 2,048 entries at a time.

        Keeps its input, the labels and a log-sum-exp. Forward has a chunk's logits, and in fp32 these, what is shifted
        and its exponential. From the second chunk on backward has the first one's probabilities and gradient, too; then
        it casts the gradient, whose product is added to the input's (`trainer/models/layers/lm_head.py` of January
        2026, `_ChunkedLogProbEntropyFn`; `trainer/config.py`, `fused_lm_head_chunk_size`).
        """
        tape, c = self.tape, self.c
        x = self.cast(self.input, c, "lm_head")
        elements = self.elements["lm_head"] if self.run.trained else 0
        forward = ENTRIES * (c + 3 * 4)
        backward = max(ENTRIES * (c + 5 * 4), ENTRIES * (2 * c + 3 * 4) + self.arch.hidden * c)
        tape.op("lm_head, loss and entropy", [x], ONE * 2, 4, saves=[x, Tensor(ONE, 8 + 4)], scratch=ONE * forward,
                backward_scratch=ONE * backward, weight=elements)  # fmt: skip
        return tape

    def rows(self, x: Tensor, path: Path) -> None:
        """`logsumexp` row by row: nothing of all rows in forward, their gradients and a stack of these in backward."""
        x = self.contiguous(x, path)
        self.tape.op("logsumexp of rows", [x], ONE, x.b, saves=[x], backward_scratch=x.size)

    def contiguous(self, x: Tensor, path: Path) -> Tensor:
        """A copy of the positions that enter the loss, where the caller asks for one, or cuts padding off."""
        if path.cut == "unpad":
            return self.shifted(x, path)
        own = [x] if sliced(path) else []
        if not path.copied:
            return x
        return self.tape.hold(self.tape.op("logits: shift", [x], x.width, x.b, aliases=own))

    def divergence(self, x: Tensor, path: Path) -> None:
        """The generalised Jensen-Shannon divergence of GKD, between the student's and a teacher's distributions.

        Both logits are divided by a temperature, which copies them; both halves of the divergence, each a product of
        probabilities and differences, are taken from a mixture, the logsumexp of a stack. All of it are variables until
        the loss is there. trl 1.16 `experimental/gkd/gkd_trainer.py:generalized_jsd_loss`, torch `native/Loss.cpp`.
        Tokens that count are picked at the end, or where logits are `copied`, before.
        """
        tape = self.tape
        self.before = tape.saved()
        teacher = tape.hold(tape.op("teacher: logits", [], self.whole_logits(path), x.b))
        index = Tensor(ONE * path.kept, 16)  # row and column of each label
        if path.tile or path.copied:
            x, teacher = (tape.hold(tape.op("logits: pick", [t], x.width, x.b, saves=[index])) for t in (x, teacher))
        if path.tile:
            return self.in_turn(x, teacher, path)
        one = self.jensen_shannon(x, teacher)
        if path.copied:
            tape.op("divergence", [one], ONE, 4)
        else:
            tape.op("divergence", [one], ONE, 4, saves=[index], scratch=one.size, backward_scratch=NOTHING)

    def in_turn(self, x: Tensor, teacher: Tensor, path: Path) -> None:
        """The divergence of a few tokens at a time; backward needs seven tensors for all of them.

        Of a turn's own tensors three are freed when its mixture's
        backward, which takes eight, begins. Each turn's slice makes a gradient of all tokens, which is added to the one
        so far. ms-swift 4.6 `rlhf_trainers/gkd_loss.py:jsd_loss`.
        """
        tape, w, b, turn = self.tape, x.width, x.b, Size({}, {"V": path.tile * x.b})
        student, _ = (tape.hold(tape.op("logits: divide", [t], w, b)) for t in (x, teacher))
        whole, turns = w * b, path.turns
        # in the first turn, in the second's mixture, in the second's slice; as turns count
        peaks = {5: turn * 5, turns - 2: whole + turn * -2, 2 * turns - 13: whole * 2 + turn * -13}
        backward = peaks[max(peaks) if turns > 1 else 5]
        tape.op("divergence in turn", [student], ONE, 4, saves=[Tensor(w * 7, b)], scratch=turn * 2,
                backward_scratch=backward, rowwise=True)  # fmt: skip

    def jensen_shannon(self, x: Tensor, teacher: Tensor) -> Tensor:
        """The divergence of each entry of the vocabulary: the student's logits `x` against a `teacher`'s."""
        tape, w = self.tape, x.width
        student, other = (tape.hold(tape.op("logits: divide", [each], w, each.b)) for each in (x, teacher))
        if self.run.precision == "autocast" and x.b < 4:
            student, other = (self.cast(each, 4, "logits") for each in (student, other))
        b = student.b
        s = tape.hold(tape.op("student: log-softmax", [student], w, b, saves_out=True))
        t = tape.hold(tape.op("teacher: log-softmax", [other], w, b))
        parts = [tape.op("student: weigh", [s], w, b, aliases=[s]), tape.op("teacher: weigh", [t], w, b)]
        both = tape.op("mixture: stack", parts, w * 2, b, aliases=parts)
        mixture = tape.hold(tape.op("mixture: logsumexp", [both], w, b, saves=[both], saves_out=True,
                                    scratch=both.size, backward_scratch=both.size * 2))  # fmt: skip
        p = tape.op("teacher: exp", [t], w, b)
        gap = tape.op("teacher: difference", [t, mixture], w, b)
        of_teacher = tape.hold(tape.op("teacher: product", [p, gap], w, b, saves=[p]))
        p = tape.op("student: exp", [s], w, b, saves_out=True)
        gap = tape.op("student: difference", [s, mixture], w, b, aliases=[s])
        of_student = tape.hold(tape.op("student: product", [p, gap], w, b, saves=[p, gap]))
        halves = [tape.op("divergence: weigh", [each], w, b) for each in (of_teacher, of_student)]
        return tape.op("divergence: sum", halves, w, b, aliases=halves)

    def shifted(self, x: Tensor, path: Path) -> Tensor:
        """A contiguous copy of all logits but the last position's, where the code or its softmax makes one.

        A cast makes it on the way; where logits are fp32 already, softmax copies the slice it is given. Backward makes
        the gradient of all logits, unless a slice of its own does that. Where padding is cut off, the copy joins the
        rows of a nested tensor, and `unbind` keeps what it has cut.
        """
        if path.cut == "unpad":
            return self.tape.op("logits: unpad", [x], x.width, x.b, saves=[x])
        copied = path.shift_copy or (path.upcast and (self.c == 4 or path.head_fp32))
        own = [x] if sliced(path) else []
        return self.tape.op("logits: shift", [x], x.width, x.b, aliases=own) if copied else x

    def in_chunks(self, path: Path) -> Tape:
        """The head and its loss a piece at a time, so that whole logits never exist.

        `chunked`: eight pieces of the tokens, each recomputed for its backward, which adds a gradient of the whole head
        into the one so far; or pieces of `tile` tokens, see `of_tokens`. `fused` (Liger
        `ops/fused_linear_cross_entropy.py`): forward makes both gradients at once, of the input and of the head, in
        pieces of at most twice T·h/V rows, or in a `buffer` (Unsloth's).
        """
        tape, c, trained = self.tape, self.c, self.run.trained
        head = Size({}, {"W_lm_head": 1}) if trained else NOTHING
        elements = self.elements["lm_head"] if trained else 0
        chunked = path.kind == "chunked"
        if path.tile:
            return self.of_tokens(path) if chunked else self.differentiated(path)
        x = tape.op("lm_head", [self.input], WIDTH, self.input.b, view=True, aliases=[self.input],
                    weight=0 if chunked else elements)  # fmt: skip
        if chunked:
            piece = V * (1 / CHUNKS)
            # compiled, the logits of a piece and their gradient; else three tensors in fp32
            forward, backward = (c, 2 * c) if path.compiled else (c + 4 + 4, 12)
            tape.op("loss in pieces", [x], ONE, 4, saves=[x], scratch=piece * forward,
                    backward_scratch=piece * backward + head * c, weight=elements)  # fmt: skip
        else:
            made = [Tensor(WIDTH, c), Tensor(head, c)]
            scratch = Size({}, {"": path.buffer}) if path.buffer else WIDTH * (2 * c)
            tape.op("fused loss", [x], ONE, 4, saves=made, scratch=scratch)
        return tape

    def differentiated(self, path: Path) -> Tape:
        """A chunk of tokens after another, each differentiated in forward by `torch.func.grad_and_value`.

        Its graph could be differentiated again, and so holds all that it made: a chunk's logits in fp32, their
        log-softmax, the loss's gradient of that, the logits' own in fp32 and in the type of the weights, then the
        gradients of head and input. Variables name the last chunk's logits and gradients until the next ones are there,
        and the head has a gradient though it is frozen. XTuner f5c60e2b4 `xtuner/v1/loss/{chunk_loss,ce_loss}.py`,
        `ChunkLoss`; torch 2.13 `_functorch/eager_transforms.py`, `grad_and_value_impl`, create_graph=True.
        """
        tape, c = self.tape, self.c
        elements = self.elements["lm_head"] if self.run.trained else 0
        piece, head, rows = Size({}, {"V": path.tile}), Size({}, {"W_lm_head": c}), Size({}, {"h": path.tile * c})
        cast = c if c < 4 else 0
        # the last chunk's logits, this one's, their log-softmax and two gradients, and the last chunk's gradients
        logits = piece * (5 * 4 + cast) + head + rows
        # one gradient of the logits is left, of which the products make another of the head and of the input
        products = piece * (4 * 4 + c) + head * 2 + rows * 2
        most = max(logits, products, key=lambda size: amount(size, head_dimensions(self.run)).fixed)
        x = tape.op("lm_head", [self.input], WIDTH, c, view=True, aliases=[self.input], weight=elements)
        tape.op("fused loss", [x], ONE, 4, saves=[Tensor(WIDTH, c), Tensor(head, 1)], scratch=most)
        return tape

    def fused_rows(self, path: Path) -> Tape:
        """Liger's loss of GRPO: forward makes the gradients of the input and of the head, a sequence at a time.

        The head has one though it is frozen, and that of a sequence beside the sum. Compiled, a sequence has its logits
        in the type of the model, over which their gradient is written, and zeros in fp32 into which that of the
        log-probabilities is put. liger-kernel 0.6.4 `chunked_loss/fused_linear_ppo.py`, traced with torch 2.11.
        """
        tape, c, row = self.tape, self.c, Size({}, {"V": path.tile})
        elements = self.elements["lm_head"] if self.run.trained else 0
        head, kept = Size({}, {"W_lm_head": c}), WIDTH * path.kept
        x = tape.op("lm_head", [self.input], kept, c, view=True, weight=elements)
        within = max(row * 4, head, key=lambda size: amount(size, head_dimensions(self.run)).fixed)
        tape.op("fused loss", [x], ONE, 4, saves=[Tensor(kept, c), Tensor(head, 1)], scratch=row * c + within)
        return tape

    def of_tokens(self, path: Path) -> Tape:
        """TRL's `chunked_nll`: pieces of some tokens that count, each run again for its backward, with its entropy.

        Forward has a piece's logits and their log-softmax, its exponential and the product of both in fp32; 16-bit
        weights are cast to fp32 for each piece, others by autocast. Backward has the log-softmax, two gradients of it
        and the head's new gradient, in fp32 and in the type of the weights. Hidden states without the last position are
        a copy, and those that count another. trl 1.7 `trainer/sft_trainer.py:_chunk`.
        """
        tape, b, c = self.tape, self.input.b, self.c
        trained = self.elements["lm_head"] if self.run.trained else 0
        piece = Size({}, {"V": path.tile * 4})
        cast = Size({}, {"W_lm_head": 4 if b < 4 else 2 if c < b else 0})
        made = Size({}, {"W_lm_head": (4 if b < 4 else 0) + b}) if trained else NOTHING
        shifted = tape.op("hidden states: shift", [self.input], WIDTH, b)
        x = tape.op("hidden states: pick", [shifted], WIDTH, b, saves=[Tensor(ONE, 8)])
        tape.op("loss in pieces", [x], ONE, 4, saves=[x], scratch=piece * 4 + cast,
                backward_scratch=piece * 3 + cast + made, weight=trained)  # fmt: skip
        return tape

    def of_chunks(self, path: Path) -> Tape:
        """torchtune's loss: the head on eight chunks of the tokens, and each chunk's cross entropy in fp32.

        The list of logits lives until the loss is there, every chunk's log-softmax until its backward, which comes
        before the head's of any: a chunk has two fp32 gradients and one in the type of the logits, which stays.
        torchtune 0.6.1 `modules/loss/ce_chunked_output_loss.py`, `modules/transformer.py:chunked_output`. Compiled,
        each chunk's cross entropy keeps its logits instead (`training/_compile.py:compile_loss`).

        The head's backward comes chunk by chunk from the last, and each makes a gradient of the weight. It is a
        transposed view, to which autograd adds the next out of place (torch 2.13 `input_buffer.cpp`, `accumulate`):
        with the second chunk's there are two beside the gradients of seven chunks, then three beside those of six.
        """
        tape, piece, trained, b = self.tape, V * (1 / CHUNKS), self.run.trained, self.c
        weight = Size({}, {"W_lm_head": b if trained else 0})
        logits = list[Tensor]()
        for n, chunk in enumerate(tape.split("chunks", self.input, [WIDTH * (1 / CHUNKS)] * CHUNKS)):
            # 1, 2, then 3 gradients of the weight, from the last chunk down; in the first one's one is the engine's
            beside = min(CHUNKS - n, 3) - (n == 0)
            x = tape.op("lm_head", [chunk], piece, b, saves=[chunk] if trained else [],
                        backward_scratch=weight * beside, backward_course=(weight,) * beside if trained else (),
                        weight=self.elements["lm_head"] if trained and n == 0 else 0, product=True,
                        flat=True)  # fmt: skip
            logits.append(tape.hold(x))
        cast, each = piece * 4 if b < 4 else NOTHING, list[Tensor]()
        for chunk in logits:
            if path.compiled:
                each.append(tape.op("loss of a chunk", [chunk], ONE, 4, saves=[chunk, Tensor(ONE * (1 / CHUNKS), 8)]))
                continue
            each.append(tape.op("loss of a chunk", [chunk], ONE, 4, saves=[Tensor(piece, 4)], scratch=cast,
                                backward_scratch=piece * 8,
                                backward_course=(piece * 4, piece * 4, None)))  # fmt: skip
        tape.op("losses of chunks", each, ONE, 4)
        return tape

    def of_views(self, path: Path) -> Tape:
        """Axolotl's loss: all logits at once, in eighths that a compiled cross entropy reads as they are.

        A kernel keeps its eighth of the logits and a log-sum-exp, and writes its gradient beside them; that of all
        logits joins the eighths. Accelerate has made fp32 of the model's outputs by then. axolotl 0.19
        `monkeypatch/loss/chunked.py`.
        """
        tape, piece = self.tape, V * (1 / CHUNKS)
        whole = self.logits(path)
        chunks = tape.split("logits: chunks", whole, [piece] * CHUNKS)
        losses = [tape.op("loss of a chunk", [chunk], ONE, 4, saves=[chunk, Tensor(ONE, 4)]) for chunk in chunks]
        loss = tape.op("losses of chunks", losses, ONE, 4)
        if path.outputs_fp32:
            self.leave()
            returned = tape.op("outputs: to fp32", [_detached(whole)], V, 4)
            tape.op("loss", [loss], ONE, 4)
            tape.returns(returned)
        return tape

    def ahead(self, path: Path) -> Tape:
        """torchtitan's loss: eight chunks of each sequence, each with its backward before the next one's forward.

        The head's weight stays gathered, and its gradients are summed beside the new one. The input's gradient is put
        together in fp32, then cast. Ranks that share the vocabulary have their part of each chunk's logits, and a
        cross entropy step by step: shifted logits and exponentials in forward, three more tensors in backward.
        torchtitan 0.3.0 `components/loss.py`: `ChunkedLossWrapper`, `GradAccumulator`, `_LossParallelCrossEntropy`.
        Compiled, a chunk has its logits and their gradient alone, as `fused_cross_entropy` has them.
        """
        tape, c, trained, ranks = self.tape, self.c, self.run.trained, self.arch.ranks
        piece = V * (1 / ranks / CHUNKS)
        whole = self.gathered(self.input, "lm_head")
        x = tape.op("chunks", [whole], WIDTH, whole.b, view=not path.copied)
        alone = ranks == 1
        head = Size({}, {"W_lm_head": 1}) if trained else NOTHING
        # the sum so far, beside the gradient that the engine counts; of the input's own gradient what fp32 has more
        summed = head * path.summed + WIDTH * (4 - c if c < 4 else 0)
        forward, backward = (0, c) if path.compiled and alone else (8, 12) if alone else (12, 16)
        tape.op("loss of chunks", [x], ONE, 4, saves=[whole, x], scratch=piece * (c + forward),
                backward_scratch=piece * (c + backward) + summed,
                weight=self.elements["lm_head"] if trained else 0)  # fmt: skip
        return tape

    def cut(self) -> Tape:
        """Cut-cross-entropy: logits exist in the kernels alone, which compute them again for backward.

        Keeps the input, and of each token a log-sum-exp, its target and its place among those that count; of each
        vocabulary entry the mean of its logits, by which backward orders them. cut_cross_entropy 25.1.1 `cce.py`.
        """
        tape, entries = self.tape, Size({}, {"": self.arch.vocab})
        elements = self.elements["lm_head"] if self.run.trained else 0
        copies = list[Tensor]()
        if self.run.precision == "autocast":
            copies = [tape.op("lm_head: weight to bf16", [], Size({}, {"W_lm_head": 1}), 2, weight=elements)]
            elements = 0
        x = self.cast(self.input, self.c, "lm_head")
        kept = [Tensor(ONE, 4), Tensor(ONE, 8), Tensor(ONE, 8), Tensor(entries, 4)]
        tape.op("lm_head", [*copies, x], ONE, 4, saves=[*copies, x, *kept], scratch=ONE * 4,
                backward_scratch=entries * 12, weight=elements)  # fmt: skip
        return tape

    def in_pieces(self, path: Path) -> Tape:
        """litgpt's loss: logits of 128 positions at a time in a list, which Fabric casts to fp32, and a loss of each.

        Every piece's log-softmax is kept, and the list lives until the next forward has made another: the 16-bit pieces
        and both lists are there at once. Backward has one piece's gradients of the loss and of the log-softmax. litgpt
        0.4.0 `lora.py`, `utils.py:chunked_cross_entropy`, `finetune/lora.py`; lightning 2.6 `half.py`.
        """
        tape, piece = self.tape, Size({}, {"V": path.tile * 4})
        uncast = V * self.c if self.c < 4 else NOTHING
        x = self.linear("lm_head", self.input, WIDTH)
        logits, softmax = Tensor(V, 4), Tensor(V, 4)
        # the former list where the log-softmax will be
        tape.op("loss in pieces", [x], ONE, 4, saves=[logits, softmax], scratch=uncast, backward_scratch=piece * 2)
        self.keep(logits, path)
        return tape

    def tiled(self, path: Path) -> Tape:
        """A tiled loss: positions that count are picked before the head, whose logits exist a tile at a time.

        Backward makes the tiles again, sums both gradients in fp32, the head's whole, and casts them to their tensors'
        type at the end. A tile has its full width however small the vocabulary.
        """
        tape, b, c, one = self.tape, self.input.b, self.c, ONE * path.kept
        tape.hold(self.input)  # `backbone_outputs` of the patched forward
        index, numbers = Tensor(one, 16), Tensor(one, 16)  # row and column; target, log-sum-exp, entropy
        x = tape.op("hidden states: pick", [self.input], WIDTH * path.kept, b, saves=[index])
        entries, vocab = min(TILE_ENTRIES, self.arch.vocab), self.arch.vocab
        tile = [Size({}, {"": path.tile * TILE_ENTRIES * c})]
        again, sums = [], list[Size]()
        if c < b:
            # autocast does not know the kernel, which casts a tile's hidden states and weights itself; in backward
            # `w_chunk` names those of one tile until the next one's are there
            weights = Size({}, {"h": entries * c})
            tile += [Size({}, {"h": path.tile * c}), weights]
            again = [weights] if entries < vocab else []
        if b < 4:
            sums = [x.width * 4, *([Size({}, {"W_lm_head": 4})] if self.run.trained else [])]
        forward, backward = [one * 28, *tile], [*sums, *tile, *again]
        tape.op("lm_head", [x], one, 4, saves=[x, numbers], scratch=sum(forward, NOTHING), course=(*forward, None),
                backward_scratch=sum(backward, NOTHING), backward_course=(*backward, None),
                weight=self.elements["lm_head"] if self.run.trained else 0)  # fmt: skip
        return tape


def sliced(path: Path) -> bool:
    """True if the loss reads a view of some positions."""
    return path.cut == "slice" or (path.kept < 1 and not path.picked)


def _detached(x: Tensor) -> Tensor:
    """The tensor outside autograd."""
    return Tensor(x.width, x.b, differentiable=False, view_of=x)


def written(run: Run, path: Path, *, grad: bool = True, again: bool = False) -> Head:
    """The head of `run` with the loss of `path` on its tape; `again`: layers before it run again for backward."""
    program = Head(run.head)
    # a tied head's gradient is the embedding's
    program.elements = {"lm_head": run.arch.vocab_part * run.arch.outer, "score": run.arch.outer}
    program.grad, program.again = grad, again
    program.write(path)
    return program


@lru_cache(maxsize=4096)
def head(run: Run, path: Path, again: bool = False) -> tuple[Segment, Amount, Amount]:
    """The head of `run` with the loss of `path`; the bytes of outputs that outlive the head's own backward, and of what
    it keeps while another model's forward runs. See `written` for `again`.
    """
    program = written(run, path, again=again)
    dims = head_dimensions(run)
    alone = written(run, path, grad=False).tape if path.kind == "selective" else None
    compiled = Segment(program.tape, dims, (OUTPUTS, AFTER), alone)
    held = amount(program.variables(path), dims)
    return compiled, held, compiled.saved if program.before is None else amount(program.before, dims)


def head_dimensions(run: Run) -> dict[str, int]:
    """The numbers behind the symbols of a head, whose h is the width of what it reads."""
    return {**dimensions(run.arch), "h": run.arch.outer}
