"""A vision tower in a step: the tensors it keeps while the language model runs, and the instants of its own passes.

Its forward comes before the first layer's and its backward after it, before that of the embedding, which was called
earlier, except by Llama 3.2 Vision (transformers
5.23 `models/qwen2_5_vl/modeling_qwen2_5_vl.py`, `Qwen2_5_VLModel.forward`, and its siblings').
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from calc.autograd.polynomial import NO_BYTES, Amount, Segment, Shot, amount
from calc.base.ledger import Line, total
from calc.engines.replica import TrainingEngine, Where
from calc.memory import tiles, vision
from calc.memory.projector import projector
from calc.memory.run import Run
from calc.models.architecture import TOWER, Architecture, Seeing, vision_tensors
from calc.models.lora import vision_matrices
from calc.models.vision import Tower
from calc.scenario.images import Images
from calc.step import peaks
from calc.step.compiled_model import Stack, casts
from calc.step.instants import Step

SOURCE = "activations#vision"
Moment = tuple[str, list[Line]]


@dataclass(frozen=True, slots=True)
class Seen:
    """The images of one micro batch of `rows` samples before a role's vision tower.

    `hooked`: a hook makes the embedded patches require a gradient, so that even a frozen tower keeps what its input's
    gradient needs (transformers 5.23 `modeling_utils.py`, `enable_input_require_grads`).
    """

    role: str
    arch: Architecture
    tower: Tower
    run: Run
    images: Images
    rows: int
    hooked: bool = False
    pairs: int = 0  # tokens of the text by patches of their own images, where layers attend to these

    @property
    def count(self) -> int:
        """Patches of the micro batch."""
        return self.rows * self.images.patches(self.tower)

    @property
    def looks(self) -> bool:
        """True if the blocks are trained."""
        return (self.run.trained or self.images.train_whole) and self.images.freeze == "none"

    @property
    def projects(self) -> bool:
        """True if the projector is trained."""
        return (self.run.trained or self.images.train_whole) and self.images.freeze != "vision"

    def adapted(self, part: Seeing) -> bool:
        """True if there are adapters beside a part's linears."""
        frozen = ("vision",) if part == "projector" else ("tower", "vision")
        return self.run.adapter is not None and not self.images.train_whole and self.images.freeze not in frozen

    @property
    def embeds(self) -> bool:
        """True if gradients reach the embedded patches."""
        adapted = self.tower.unfolds and self.adapted("blocks")  # beside the linear that reads pixels
        return self.looks or (self.hooked and self.tower.hooked) or adapted

    @property
    def passes(self) -> bool:
        """True if gradients go through the blocks."""
        return self.embeds or self.adapted("blocks")

    @property
    def own(self) -> Run:
        """The settings with which the blocks run."""
        adapted = self.adapted("blocks")
        how = dict(trained=self.looks, adapted=adapted, short=self.images.short(self.tower))
        return vision.running(self.run, self.tower, count=self.count, **how)

    @property
    def length(self) -> int:
        """Patches that see each other: of all images, or of one."""
        squares = self.tower.tiles if self.tower.crossed else 1
        return squares * self.images.row(self.tower) if self.tower.alone else self.count

    @property
    def again(self) -> bool:
        """True if the blocks are run again for backward."""
        return bool(self.images.checkpointing) and self.passes and not self.tower.resized

    def elements(self, part: Seeing) -> int:
        """Trained elements of a part, or of the adapters beside its linears."""
        if self.run.adapter and self.adapted(part):
            return sum(t.elements * t.count for t in vision_matrices(self.arch, self.run.adapter.rank, part))
        trained = self.projects if part == "projector" else self.looks
        return sum(t.elements * t.count for t in vision_tensors(self.arch, part)) if trained else 0

    @property
    def trained(self) -> int:
        """All trained elements."""
        idle = vision_tensors(self.arch, "unread")
        whole = sum(t.elements * t.count for t in vision_tensors(self.arch) if t not in idle) if self.looks else 0
        return whole or sum([self.elements(part) for part in (*TOWER, "projector")])

    def line(self, component: str, amount: Amount, times: int = 1) -> Line:
        """The ledger line of `times` an amount, of which each counts patches."""
        formula = amount.formula.replace("T·", "P_v·")
        values = {**self._dims, "P_v": self.count}
        if self.tower.alone:
            values["S"] = self.length
        else:
            formula = formula.replace("P_v·S", "P_v·P_v")
        formula = formula if times == 1 else f"{times}·({formula})"
        return Line(component, self.role, times * amount.bytes(self.count, self.length), formula, values, SOURCE)

    @property
    def _dims(self) -> dict[str, int]:
        between = self.between.dims if self.tower.deep else {}
        between = self.middle.dims if self.tower.crossed else between
        return {**self.patches.dims, **self.projector.dims, **between}

    def pixels(self) -> list[Line]:
        """The pixels of the micro batch, and a mask of those of ragged squares, through forward and backward."""
        width, mask = self.tower.pixels, self.tower.patch**2 * self.tower.ragged
        values = {"P_v": self.count, "pixels": width} | ({"mask": mask} if mask else {})
        b = vision.pixel(self.run, self.tower)
        each, formula = b * width, f"{b}·pixels·P_v"
        if mask:
            each, formula = each + vision.MASKED * mask, "(4·pixels + 8·mask)·P_v"
        return [Line("activations", self.role, each * self.count, formula, values, SOURCE)]

    @property
    def mask(self) -> list[Line]:
        """The mask of one row of all images' patches, which lets those of one see each other, or of a filled tower.

        A framed tower's is in the weights' type, that of all squares of an image in the products'; others are bytes.
        """
        if self.tower.filled and self.own.kernel == "masked":
            values = {"P_v": self.count, "S": self.length}
            return [Line("activations", self.role, self.count * self.length, "P_v·S", values, SOURCE)]
        if self.tower.crossed:
            b, values = self.own.compute, {"P_v": self.count, "S": self.length}
            return [Line("activations", self.role, b * self.count * self.length, f"{b}·P_v·S", values, SOURCE)]
        if not (self.tower.framed or self.tower.resized) or self.own.packaged:
            return []
        b = self.own.weight if self.tower.framed else 1
        return [Line("activations", self.role, b * self.count**2, f"{b}·P_v^2", {"P_v": self.count}, SOURCE)]

    @property
    def keeps_mask(self) -> bool:
        """True if the mask itself stays for backward: every block that is run again gets it, or its kernel keeps it."""
        return self.passes and (self.again or self.own.kernel == "efficient")

    def deep(self, layers: int) -> int:
        """The number of the lowest `layers` blocks whose output goes to the language model, too."""
        return sum(index < layers for index in self.tower.deep)

    def below(self, layers: int, deep: int | None = None) -> list[Line]:
        """Tensors that the patches, the lowest blocks, and `deep` projectors between them keep for backward.

        These are the projectors of all of these blocks if nothing is given.
        """
        deep = self.deep(layers) if deep is None else deep
        between = [self.line("activations", self.between.saved, deep)] if deep and self.keeps else []
        if not self.passes:
            return between
        lines = [*between, self.line("activations", self.patches.saved), *(self.mask if self.keeps_mask else [])]
        if self.again:
            return [*lines, self.line("checkpoints", self.stream, layers)]
        above = max(0, layers - (self.tower.blocks.layers - self.tower.crossed)) if self.tower.crossed else 0
        layers -= above
        if layers and not self.embeds:
            lines, layers = [*lines, self.line("activations", self.lowest.saved)], layers - 1
        lines += [self.line("activations", self.segment.saved, layers)] if layers else []
        if above:
            lines += [self.line("activations", self.middle.saved)]
            lines += [self.line("activations", self.block(top=True).saved, above)]
        return lines

    @property
    def stream(self) -> Amount:
        """The output of a block."""
        b = self.own.residual
        return Amount(b * self.tower.blocks.hidden, 0, 0, 0, 0, f"T·({b}·h)")

    @property
    def keeps(self) -> bool:
        """True if the projectors keep something for backward."""
        return self.passes or self.projects or self.adapted("projector")

    @property
    def patches(self) -> Segment:
        """The patches, from pixels to the first block's input."""
        joins = bool(self.tower.grids) and self.images.frames == 1  # a video's frames are seen as squares as they lie
        return vision.patches(self.own, self.tower, embeds=self.embeds, joins=joins)

    @property
    def segment(self) -> Segment:
        """One block, of the first transformer where there are two."""
        return self.block(top=False)

    def block(self, *, top: bool) -> Segment:
        """One block, the `top` one or the lowest."""
        spec = self.tower.blocks.specs[-1 if top else 0]
        return vision.block(self.own, spec, first=not self.passes, counted=self.again)

    @property
    def lowest(self) -> Segment:
        """The lowest block over frozen patches, beside whose linears there are adapters: its input has no gradient."""
        return vision.block(self.own, self.tower.blocks.specs[0], first=True, counted=False)

    @property
    def middle(self) -> Segment:
        """The norm between two transformers."""
        return tiles.between(self.own, self.tower, first=not self.passes)

    @property
    def projector(self) -> Segment:
        """The projector after the last block."""
        return projector(self._projecting, self.tower, self.tower.merger, first=not self.passes, below=self.own)

    @property
    def between(self) -> Segment:
        """The projector of a deep block, whose output the next one's norm keeps, too, or its checkpoint is."""
        passes = self.passes
        return projector(self._projecting, self.tower, self.tower.deep_merger, first=not passes, counted=passes)

    @property
    def _projecting(self) -> Run:
        """The settings with which projectors run, which are trained apart from the blocks."""
        return vision.running(self.run, self.tower, trained=self.projects, adapted=self.adapted("projector"))

    def features(self, deep: int) -> list[Line]:
        """The output of `deep` blocks for the language model, or its gradient."""
        b = self.own.residual
        each = Amount(b * self.tower.out / self.tower.merge**2, 0, 0, 0, 0, f"T·({b}·out)")
        return [self.line("temporary", each, deep)] if deep else []

    def waiting(self, layers: int) -> list[Line]:
        """The output of those of the lowest `layers` blocks that the projector reads, too, where nothing else holds it.

        That of the last block of all is the projector's input. Two transformers return the outputs of all their blocks.
        """
        if self.tower.crossed:
            number = min(layers, self.tower.blocks.layers - 1)
            return [self.line("temporary", self.stream, number)] if number else []
        number = sum(taken <= layers for taken in self.tower.taken if taken < self.tower.blocks.layers)
        return [self.line("temporary", self.stream, number)] if number else []

    def joined(self, layer: int) -> list[Line]:
        """The gradient of all blocks' output that the projector reads, while backward is in `layer` and comes to more.

        That of the last block's output is a view of it, but for two transformers, whose last one is not among these.
        """
        taken, last = self.tower.taken, layer == self.tower.blocks.layers - 1
        more = any(number <= layer for number in taken)
        number = len(taken) - 1 if self.tower.crossed else len(taken) - last
        return [self.line("temporary", self.stream, number)] if more else []

    def kept(self) -> list[Line]:
        """Everything that lies on the GPU while the language model runs, until the tower's backward."""
        return [*self.pixels(), *self.saved(), *self.read()]

    def read(self) -> list[Line]:
        """The patches to which layers of the language model attend, and the mask that says which of them a token sees.

        Variables of the model refer to both until its forward ends, and its layers keep both for backward.
        """
        if not self.tower.crossed:
            return []
        b, values = self.run.weight, {"T·N_v": self.pairs}
        return [
            self.line("activations", self.features_of),
            Line("activations", self.role, b * self.pairs, f"{b}·T·N_v", values, SOURCE),
        ]

    @property
    def features_of(self) -> Amount:
        """The projector's output, of which no row is of a patch that fills a square up."""
        b = self.run.compute
        width = b * self.tower.out * self.tower.filling
        return Amount(width, 0, 0, 0, 0, f"T·({b * self.tower.filling:g}·out)")

    def saved(self) -> list[Line]:
        """Tensors that the tower keeps for backward beside the pixels."""
        lines = self.below(self.tower.blocks.layers)
        if self.keeps:
            lines.append(self.line("activations", self.projector.saved))
        if self.tower.deep:
            added = amount(vision.added(self.tower), self._dims)
            lines.append(self.line("activations", added, len(self.tower.deep)))
        return [line for line in lines if line.bytes]

    def copies(self) -> list[Line]:
        """Autocast's copies of the weights of blocks that will run again, until its context ends."""
        amount = casts(self.own, self.tower.blocks.specs) if self.again else NO_BYTES
        return [self.line("temporary", amount)] if amount.fixed else []

    def made(self, layer: int) -> int:
        """The number of gradients that the language model's backward has made for the tower when it comes to `layer`.

        These are gradients of the output of `deep` blocks, which was added to the lowest layers' output, or the sum of
        what layers that attend to patches have made.
        """
        if self.tower.crossed:
            return int(any(spec.mixer == "cross" for spec in self.arch.specs[layer + 1 :]))
        return max(0, len(self.tower.deep) - layer)

    def above(self, made: int) -> list[Line]:
        """So many of these gradients."""
        if not (self.keeps and made):
            return []
        return [self.line("temporary", self.features_of)] if self.tower.crossed else self.features(made)

    def alive(self, shot: Shot) -> list[Line]:
        """The lines of one instant: saved for backward, and temporaries."""
        lines = [self.line("activations", shot.saved), self.line("temporary", shot.passing)]
        return [line for line in lines if line.bytes]

    def forward(self, engine: TrainingEngine, *, grad: bool) -> Moment:
        """The peak instant of the tower's forward."""
        depth = self.tower.blocks.layers
        beside = [*self.pixels(), *engine.at(Where("tower", 0, False))]
        beside += [] if grad and self.keeps_mask else self.mask

        def moments(name: str, segment: Segment, keeps: bool, below: list[Line]) -> Iterator[Moment]:
            for shot in segment.forward if keeps else segment.without_grad:
                yield f"{name}: {shot.name}", [*beside, *below, *self.alive(shot)]

        def under(layers: int, deep: int) -> list[Line]:
            held = self.below(layers, deep) if grad else []
            return [*held, *self.features(deep), *([] if grad and self.passes else self.waiting(layers))]

        runs = grad and self.passes and not self.again
        found = [*moments("patches", self.patches, grad and self.passes, [])]
        found += moments("vision block", self.block(top=True), runs, under(depth - 1, self.deep(depth - 1)))
        if self.tower.deep:
            last = len(self.tower.deep) - 1
            found += moments("projector", self.between, grad and self.keeps, under(self.tower.deep[-1] + 1, last))
        found += moments("projector", self.projector, grad and self.keeps, under(depth, self.deep(depth)))
        return max(found, key=lambda moment: total(moment[1]))

    def backward(self, engine: TrainingEngine, stack: Stack) -> Iterator[Moment]:
        """The instants of the tower's backward, when all layers of the language model have their gradients.

        The gradients of deep blocks' output wait for theirs.
        """
        done, beside = stack.layers_trained, self.pixels()
        done += stack.embedding_own if self.tower.crossed else 0

        def there(above: int, shot: Shot | None = None) -> list[Line]:
            here, making = (shot.gradients, shot.making) if shot else (0, 0)
            return engine.at(Where("tower", 0, True, stack.root_trained, done + above, here, making))

        depth, each = self.tower.blocks.layers, self.elements("blocks") // self.tower.blocks.layers
        deep = self.tower.deep
        main = _gradients(self.projector)
        between = _gradients(self.between) if deep else 0

        def over(layers: int, left: int) -> int:
            """Trained elements above the lowest `layers` blocks, where `left` projectors between blocks remain."""
            return main + each * (depth - layers) + between * (len(deep) - left)

        def projected(segment: Segment, layers: int, left: int, above: int, waiting: list[Line]) -> Iterator[Moment]:
            for shot in segment.backward:
                lines = [*beside, *waiting, *self.below(layers, left), *self.features(left), *self.alive(shot)]
                yield f"projector: {shot.name}", [*lines, *there(above, shot)]

        if self.keeps:
            yield from projected(self.projector, depth, len(deep), 0, [])
            come = [self.line("temporary", self.stream)] if self.passes else []  # from the block above
            for left, index in enumerate(deep):
                yield from projected(self.between, index + 1, left, over(index + 1, left + 1), come)
        if not self.passes:
            return
        for layer in dict.fromkeys((depth - 1, 0)):
            segment, left = self.block(top=layer > 0), self.deep(layer)
            below = [*self.below(layer + self.again, left), *self.features(left), *self.joined(layer)]
            for shot in segment.again if self.again else ():
                waiting = self.line("temporary", segment.waiting)
                yield (
                    f"recompute vision block: {shot.name}",
                    [*beside, *below, waiting, *self.alive(shot), *there(over(layer + 1, left))],
                )
            for shot in segment.backward:
                yield (
                    f"vision block: {shot.name}",
                    [*beside, *below, *self.alive(shot), *there(over(layer + 1, left), shot)],
                )


def beside(own: Step, seen: Seen | None, *, trained: bool) -> list[Line]:
    """What is there of the images while the language model's forward runs."""
    if seen is None:
        return []
    kept = seen.kept() if trained else [*seen.pixels(), *seen.read()]
    return kept if own.plan.layout.stack.wrapped else [*kept, *seen.copies()]


def backward(engine: TrainingEngine, own: Step, waiting: list[Line], seen: Seen | None) -> tuple[str, list[Line]]:
    """The peak instant of backward: of the language model while a tower waits, of the tower, of the embedding."""
    if seen is None:
        return peaks.beside(waiting, peaks.peak(engine, own, own.backward()))
    early = ("end",) if seen.tower.crossed else ()  # its tokens are embedded after the images
    over = [i for i in own.backward() if i.where.segment in ("end", "reduce") and i.where.segment not in early]
    trained, looks = seen.trained, seen.looks
    over = [i._replace(where=i.where._replace(above=i.where.above + trained, seen=looks)) for i in over]
    before = [i for i in own.backward() if i.where.segment not in ("end", "reduce")]
    embedded = [i for i in own.backward() if i.where.segment in early]
    found = []
    for made in sorted({seen.made(i.where.layer) for i in before}, reverse=True):
        there = [i for i in before if seen.made(i.where.layer) == made]
        found.append(peaks.beside([*waiting, *seen.kept(), *seen.above(made)], peaks.peak(engine, own, there)))
    if embedded:
        beside = [*waiting, *seen.pixels(), *seen.saved(), *seen.above(seen.made(-1))]
        found.append(peaks.beside(beside, peaks.peak(engine, own, embedded)))
    found += [peaks.beside(waiting, moment) for moment in seen.backward(engine, own.plan.layout.stack)]
    if over:
        found.append(peaks.beside([*waiting, *seen.pixels()], peaks.peak(engine, own, over)))
    return peaks.largest(found)


def _gradients(segment: Segment) -> int:
    """Elements of the gradients of a segment's weights when its backward is over."""
    return max([shot.gradients for shot in segment.backward])
