"""A vision tower in a step: what it keeps while the language model runs, and the instants of its own passes.

Its forward comes before the first layer's and its backward after it, before that of the embedding, which was called
earlier (transformers 5.23 `models/qwen2_5_vl/modeling_qwen2_5_vl.py`, `Qwen2_5_VLModel.forward`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from calc.autograd.polynomial import Amount, Segment, Shot
from calc.base.ledger import Line, total
from calc.engines.replica import TrainingEngine, Where
from calc.memory import vision
from calc.memory.run import Run
from calc.models.architecture import Architecture, vision_tensors
from calc.models.vision import Tower
from calc.scenario.images import Images
from calc.step.compiled_model import Stack

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

    @property
    def count(self) -> int:
        """Patches of the micro batch."""
        return self.rows * self.images.patches(self.tower)

    @property
    def looks(self) -> bool:
        """True if the blocks are trained."""
        return self.run.trained and self.images.freeze == "none"

    @property
    def projects(self) -> bool:
        """True if the projector is trained."""
        return self.run.trained and self.images.freeze != "vision"

    @property
    def passes(self) -> bool:
        """True if gradients go through the blocks."""
        return self.looks or self.hooked

    @property
    def own(self) -> Run:
        """The settings with which the blocks run."""
        return vision.running(self.run, self.tower, trained=self.looks)

    @property
    def again(self) -> bool:
        """True if the blocks are run again for backward."""
        return bool(self.images.checkpointing) and self.passes

    def elements(self, part: str) -> int:
        """Trained elements of the `blocks` or the `projector`."""
        if not (self.looks if part == "blocks" else self.projects):
            return 0
        return sum(
            t.elements * t.count for t in vision_tensors(self.arch, "blocks" if part == "blocks" else "projector")
        )

    @property
    def trained(self) -> int:
        """All trained elements."""
        whole = sum(t.elements * t.count for t in vision_tensors(self.arch)) if self.looks else 0
        return whole or self.elements("projector")

    def line(self, component: str, amount: Amount, times: int = 1) -> Line:
        """The ledger line of `times` an amount, of which each counts patches."""
        formula = amount.formula.replace("T·", "P_v·")
        values = {**self._dims, "P_v": self.count}
        formula = formula if times == 1 else f"{times}·({formula})"
        return Line(component, self.role, times * amount.bytes(self.count, 0), formula, values, SOURCE)

    @property
    def _dims(self) -> dict[str, float]:
        return {**vision.patches(self.own, self.tower).dims, **vision.projector(self.own, self.tower, first=True).dims}

    def pixels(self) -> list[Line]:
        """The pixels of the micro batch, which lie on the GPU through forward and backward."""
        width = self.tower.pixels
        values = {"P_v": self.count, "pixels": width}
        return [Line("activations", self.role, vision.PIXEL * width * self.count, "4·pixels·P_v", values, SOURCE)]

    def below(self, layers: int) -> list[Line]:
        """What the patches and the lowest blocks keep for backward."""
        if not self.passes:
            return []
        lines = [self.line("activations", vision.patches(self.own, self.tower).saved)]
        if self.again:
            stream = Amount(self.tower.blocks.hidden * self.own.residual, 0, 0, 0, 0, f"T·({self.own.residual}·h)")
            return [*lines, self.line("checkpoints", stream, layers)]
        return [*lines, self.line("activations", self.segment.saved, layers)] if layers else lines

    @property
    def segment(self) -> Segment:
        """One block."""
        return vision.block(self.own, first=not self.passes, counted=self.again)

    @property
    def projector(self) -> Segment:
        """The projector, which is trained apart from the blocks."""
        own = vision.running(self.run, self.tower, trained=self.projects)
        return vision.projector(own, self.tower, first=not self.passes)

    def kept(self) -> list[Line]:
        """Everything that lies on the GPU while the language model runs, until the tower's backward."""
        lines = [*self.pixels(), *self.below(self.tower.blocks.layers)]
        if self.passes or self.projects:
            lines.append(self.line("activations", self.projector.saved))
        return [line for line in lines if line.bytes]

    def alive(self, shot: Shot) -> list[Line]:
        """The lines of one instant: saved for backward, and temporaries."""
        lines = [self.line("activations", shot.saved), self.line("temporary", shot.passing)]
        return [line for line in lines if line.bytes]

    def forward(self, engine: TrainingEngine, *, grad: bool) -> Moment:
        """The peak instant of the tower's forward."""
        where, top = Where("tower", 0, False), self.tower.blocks.layers - 1
        beside, below = [*self.pixels(), *engine.at(where)], self.below(top) if grad else []
        runs = grad and self.passes and not self.again
        shots = self.segment.forward if runs else self.segment.without_grad
        found = [(f"vision block: {shot.name}", [*beside, *below, *self.alive(shot)]) for shot in shots]
        below = self.below(top + 1) if grad else []
        kept = grad and (self.passes or self.projects)
        shots = self.projector.forward if kept else self.projector.without_grad
        found += [(f"projector: {shot.name}", [*beside, *below, *self.alive(shot)]) for shot in shots]
        return max(found, key=lambda moment: total(moment[1]))

    def backward(self, engine: TrainingEngine, stack: Stack) -> Iterator[Moment]:
        """The instants of the tower's backward, when all layers of the language model have their gradients."""
        done, beside = stack.layers_trained, self.pixels()

        def there(above: int, shot: Shot | None = None) -> list[Line]:
            here, making = (shot.gradients, shot.making) if shot else (0, 0)
            return engine.at(Where("tower", 0, True, stack.root_trained, done + above, here, making))

        depth, each = self.tower.blocks.layers, self.elements("blocks") // self.tower.blocks.layers
        if self.passes or self.projects:
            for shot in self.projector.backward:
                lines = [*beside, *self.below(depth), *self.alive(shot), *there(0, shot)]
                yield f"projector: {shot.name}", lines
        if not self.passes:
            return
        above = self.elements("projector")
        for layer in dict.fromkeys((depth - 1, 0)):
            over, below = above + each * (depth - 1 - layer), self.below(layer + self.again)
            for shot in self.segment.again if self.again else ():
                waiting = self.line("temporary", self.segment.waiting)
                yield (
                    f"recompute vision block: {shot.name}",
                    [*beside, *below, waiting, *self.alive(shot), *there(over)],
                )
            for shot in self.segment.backward:
                yield f"vision block: {shot.name}", [*beside, *below, *self.alive(shot), *there(over, shot)]
