"""The roles of a GPU group, stage by stage: what they hold on one GPU at each instant of a step, on any card.

A framework says what happens in a step (`calc.base.plan.Stage`); here each stage becomes the instants that can be its
peak: what the running role computes with, and what the others leave on the GPU. Whatever differs from card to card, the
process itself and the memory of vLLM, is only named here; `calc.estimate.gpu_group` adds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, assert_never

from calc.base.ledger import Line, Sums, staying
from calc.base.plan import Awake, Back, Does, Path, Stage
from calc.base.versions import at_least
from calc.engines.megatron import Megatron
from calc.engines.replica import TrainingEngine, Where
from calc.engines.rollout import STARTING, Starting
from calc.memory import kv_cache, runtime
from calc.models.releases import tower_again
from calc.models.slices import chunk, part
from calc.step import device_map, peaks, placement, schedule_1f1b, schedule_interleaved, schedule_megatron, tower
from calc.step.instants import Batch, Instant, Step
from calc.step.placement import Placed
from calc.step.roles import Roles
from calc.step.tower import Seen

BETWEEN = Where("waiting", 0, False)  # between two micro batches
FIRST = Where("gather", 0, False)  # the first layer's parameters are gathered
RESTING: tuple[Does, ...] = ("score", "train")  # the stages in which vLLM has no part

Moments = Iterable[tuple[str, str, list[Line]]]  # a phase, an instant's name, its lines


State = Literal["", Starting, Awake]


class Candidate(NamedTuple):
    """An instant that may be its phase's peak, without the lines of the process and of vLLM.

    `engine` is the state in which vLLM is: one of `rollout.STARTING`, the word that a stage has for it, or empty if
    vLLM has not started yet or is elsewhere.
    """

    phase: str
    at: str
    lines: list[Line]
    engine: State = ""


Candidates = Iterator[Candidate]


class Stages:
    """The stages of the roles called `names`, which share their GPUs."""

    def __init__(self, roles: Roles, names: Sequence[str]) -> None:
        """The stages of the roles `names`, of a job with these `roles`."""
        self.roles, self.names = roles, names
        self.placed = {name: roles.placed[name] for name in names if name in roles.placed}
        self.serves = "rollout" in names
        self.gathered = self.frozen_roots()  # roles whose root FSDP unit is gathered now
        self.joint = {stage.joint for stage in roles.keeps.stages if stage.joint != stage.role}

    def largest(self, *, serving: bool) -> list[tuple[Candidate, Sums]]:
        """The peak instants among `moments`."""
        return largest(self.moments(serving=serving))

    def moments(self, *, serving: bool | None = None) -> Candidates:
        """The candidates of the job's stages, in their order.

        `serving`: those of the stages in which vLLM has a part, as it starts, generates or gets weights, or as a
        checkpoint is written, or else those of the stages that train and score; all of them if it is None.
        """
        self.gathered = self.frozen_roots()
        if serving is not False:
            yield from self.loading()
        for stage in self.roles.keeps.stages:
            if stage.role in self.placed or (stage.role == "rollout" and self.serves):
                if serving in (None, stage.does not in RESTING):
                    awake: Awake = "all" if stage.does == "serve" else stage.engine
                    for phase, at, lines in self.instants(stage):
                        yield Candidate(phase, at, lines, awake if self.serves else "")
                self.leave(stage)
            elif stage.does == "sync" and self.serves and self.elsewhere(stage) and serving is not False:
                yield Candidate("sync", "weights arrive", [], "all")

    def elsewhere(self, stage: Stage) -> bool:
        """True if the role of `stage` has no part on these GPUs, and not just another pipeline stage than theirs."""
        return self.roles.keeps.role(stage.role).pipeline[1] == 1

    def instants(self, stage: Stage) -> Moments:
        """The instants of a stage that can be the peak of its phase, each with all lines that are on the GPU."""
        match stage.does:
            case "train":
                return self.train(stage)
            case "score":
                return self.score(stage)
            case "generate":
                return self.generate(stage)
            case "serve":
                return self.serve(stage)
            case "sync":
                return self.sync(stage)
            case "save":
                return self.save(stage)
            case other:
                assert_never(other)

    def frozen_roots(self) -> set[str]:
        """Frozen roles that leave their root FSDP unit gathered from their first forward on."""
        return {name for name, placed in self.placed.items() if placed.role.root_stays and not placed.trained}

    def leave(self, stage: Stage) -> None:
        """Notes what a stage changes for later ones: a root FSDP unit stays gathered until its role's backward."""
        if stage.does == "score" and self.placed[stage.role].role.root_stays:
            self.gathered.add(stage.role)
        elif stage.does == "train":
            self.gathered.discard(stage.role)

    def loading(self) -> Candidates:
        """The instants of loading: models arrive one after another, and stay unless they move to the host."""
        if not self.names:
            yield Candidate("load", "the process", [runtime.started()])
        there: list[Line] = []
        before: list[Line] = []
        engine: State = ""
        for name in self.names:
            if name == "rollout":
                yield from [Candidate("load", f"{name}: {at}", [*before], at) for at in STARTING]
                engine = "asleep"
            else:
                for at, lines in self.placed[name].engine.loading():
                    loaded = self.unjoined(name, lines)
                    yield Candidate("load", f"{name}: {at}", [*there, *loaded], engine)
                left = self.remaining(name, loaded)
                there += left
                before += self.at_start(name, left) if self.serves else []

    def arrived(self, name: str) -> list[Line]:
        """The lines of a role that are on the GPU as the rollout engine starts, once it has been loaded."""
        *_, (_, lines) = self.placed[name].engine.loading()
        return self.at_start(name, self.remaining(name, self.unjoined(name, lines)))

    def at_start(self, name: str, left: list[Line]) -> list[Line]:
        """Those of a role that are there as the engine starts, of all lines that loading has `left` on the GPU."""
        keeps = self.roles.keeps
        lines = self.placed[name].engine.weights() if keeps.serving and keeps.serving.early else left
        return next((self.here(s, lines) for s in keeps.stages if s.does == "serve"), lines)

    def remaining(self, name: str, loaded: list[Line]) -> list[Line]:
        """The lines of a role's last instant of loading that stay on the GPU."""
        placed = self.placed[name]
        staying = {word for stage in self.roles.keeps.stages if stage.does == "serve" for word in stage.holds}
        leaves = placed.engine.replica.leaves - (staying if placed.trained else set())
        return [line for line in loaded if placed.engine.goes(line) not in leaves] if leaves else loaded

    def beside(self, stage: Stage, *running: str) -> list[Line]:
        """The lines that the roles that do not run have on the GPU."""
        lines, awake = self.scores(), self.placed[stage.role].role.process if stage.role in self.placed else ""
        for name, placed in self.placed.items():
            if name not in running:
                # what has paused comes back a process at a time
                back = stage.back == "all" and placed.trained and placed.role.process == awake
                lines += placed.engine.resident() if back else self.idle(placed)
                if stage.alternating and placed.trained:
                    lines += [x for x in placed.engine.at(BETWEEN) if x.component == "gradients"]
        return lines

    def scores(self, copies: int = 1) -> list[Line]:
        """The logits that generation has returned, `copies` of them; none where it returns tokens alone."""
        keeps, s = self.roles.keeps, self.roles.s
        generates = next((stage.role for stage in keeps.stages if stage.does == "generate"), "")
        if not keeps.scores or generates not in self.placed:
            return []
        found = self.placed[generates].engine.replica
        values = {"k": copies, "n": keeps.scores, "R": s.response_len, "V": found.arch.vocab}
        size = 4 * copies * keeps.scores * s.response_len * found.arch.vocab
        return [Line("logits", generates, size, "4·k·n·R·V", values, "loss#held")]

    def idle(self, placed: Placed) -> list[Line]:
        """The lines that a role keeps on the GPU outside its own phases."""
        engine = placed.engine
        if placed.role.shares:
            return []
        return [
            *([] if "weights" in placed.role.leaves else engine.weights()),
            *self.unjoined(placed.role.name, engine.staying()),
            *(engine.root() if placed.role.name in self.gathered else []),
        ]

    def unjoined(self, name: str, lines: list[Line]) -> list[Line]:
        """`lines` without the buffers of a role in another one's graph: one engine of DeepSpeed has those of both."""
        return [line for line in lines if line.component != "communication"] if name in self.joint else lines

    def resident(self) -> int:
        """Bytes that are resident whenever a role trains, whatever it computes, and cannot leave for the host."""
        return max([self._resident(stage) for stage in self._updates()], default=0)

    def working(self) -> int:
        """Bytes at some instant of a role's training: what is resident, and its activations there.

        No more than that instant has: what its engine adds there is left out.
        """
        most = 0
        for stage in self._updates():
            placed, there = self.placed[stage.role], self._resident(stage)
            if placed.trained and not placed.engine.replica.stays:
                own = self._step(placed)
                # bytes of its lines are rounded down, each by less than one
                there += max(0, *[i.total.bytes(*own.batch) - len(i.parts) for i in own.backward()])
            most = max(most, there)
        return most

    def _updates(self) -> Iterator[Stage]:
        """The stages in which a role of these GPUs trains."""
        yield from [s for s in self.roles.keeps.stages if s.does == "train" and s.role in self.placed]

    def _resident(self, stage: Stage) -> int:
        """Bytes that are resident as the roles of a stage train."""
        return self.roles.training.once(("resident", stage, *self.names), lambda: self._residing(stage))

    def _residing(self, stage: Stage) -> int:
        there = self.beside(stage, stage.role, stage.beside, stage.joint)
        for name in dict.fromkeys(filter(None, (stage.role, stage.beside, stage.joint))):
            there += self.unjoined(name, self.placed[name].engine.resident())
        return staying(there)

    def present(self, placed: Placed, back: Back = "own") -> list[Line]:
        """The lines that a role has on the GPU while it computes without training, or hands its weights on."""
        if placed.role.shares:
            return []
        if back != "own" and placed.trained:
            return placed.engine.resident() if back == "all" else self.idle(placed)
        return [*placed.engine.weights(), *self.unjoined(placed.role.name, placed.engine.staying())]

    def score(self, stage: Stage) -> Moments:
        """The peak instant of a forward without gradient, with everything else that is on the GPU."""
        placed = self.placed[stage.role]
        at, lines = self.scoring(placed)
        there = [*self.beside(stage, stage.role), *self.present(placed, stage.back)]
        yield "score", f"{stage.role}: {at}", [*there, *lines]

    def scoring(self, placed: Placed) -> tuple[str, list[Line]]:
        """The peak instant of a forward without gradient."""
        # a root FSDP unit that is gathered already leaves no buffer to the first layer
        there = placed.role.shares or placed.role.name in self.gathered
        return self.roles.within.once(("score", placed.role.name, there), lambda: self._scoring(placed, there))

    def _scoring(self, placed: Placed, there: bool) -> tuple[str, list[Line]]:
        scored = self.roles.step(placed.scorer.replica, placed.s, self.roles.batch(placed.s, placed.role.scoring_rows))
        if seen := self.seen(placed, placed.role.scoring_rows):
            run = peaks.peak(placed.scorer, scored, scored.plan.scoring)
            images = [*seen.pixels(), *seen.read()]
            return peaks.largest([seen.forward(placed.scorer, grad=False), peaks.beside(images, run)])
        instants = [i for i in scored.plan.scoring if not (there and i.where == FIRST)]
        run = peaks.peak(placed.scorer, scored, instants)
        if not placed.role.caches:
            return run
        r, batch = placed.scorer.replica, scored.batch
        model = replace(r, path=Path("flash", head_fp32=placed.role.scoring.head_fp32))  # as far as the model itself
        own = self.roles.step(model, placed.s, batch)
        cache = kv_cache.dynamic(r.role, r.arch, batch.tokens, r.run.residual)
        return peaks.largest([peaks.beside([cache], peaks.peak(placed.scorer, own, own.plan.scoring)), run])

    def lasting(self, scored: Placed) -> list[Line]:
        """The outputs of a scored model that variables refer to until those of the next micro batch replace them."""
        step = self.roles.step(scored.scorer.replica, scored.s, self.roles.batch(scored.s, scored.role.scoring_rows))
        return step.lines(step.plan.layout.over("next")) if scored.role.caches else []

    def train(self, stage: Stage) -> Moments:
        """Forward, backward and optimizer step of a role, and of another one that trains beside it."""
        name, placed = stage.role, self.placed[stage.role]
        several = len(self.roles.keeps.roles) > 1 and not (stage.inside or stage.joint) and not placed.role.model
        others = self.beside(stage, name, stage.beside, stage.inside, stage.joint)
        if stage.beside:
            other = self.placed[stage.beside]
            _, lines = peaks.largest((at, lines) for _, at, lines in self.training(other, stage))
            others += [*other.engine.resident(), *lines]
        if stage.joint and stage.joint != name:
            others += self.unjoined(stage.joint, self.placed[stage.joint].engine.resident())
        kept = [*others, *placed.engine.resident()]
        for phase, at, lines in self.training(placed, stage):
            yield phase, f"{name}: {at}" if several else at, [*kept, *lines]

    def training(self, placed: Placed, stage: Stage) -> Iterable[tuple[str, str, list[Line]]]:
        """The peak instant of each phase of one role's update, without the resident tensors."""
        # a frozen role that is scored inside may have its root FSDP unit gathered already
        what = placed.role.name, stage, stage.inside in self.gathered
        if stage.joint:
            other = self.roles.placed[stage.joint]
            return self.roles.training.once(what, lambda: [*self._together(placed, other)])
        # what a role scores inside is there as far as it stays on the GPU
        memo = self.roles.training if stage.inside else self.roles.within
        return memo.once(what, lambda: [*self._training(placed, stage)])

    def _together(self, placed: Placed, other: Placed) -> Moments:
        """The peak instant of each phase of two forwards in one graph: the `other`'s comes first, its backward last.

        Of one model that runs twice, the first backward leaves gradients that the second adds to.
        """
        first, second = self._step(other), self._step(placed)
        twice, layout = placed is other, first.plan.layout
        there = other.engine.at(Where("waiting", layout.stack.layers, False))
        # the two run in one module, whose autocast spans both forwards
        begun = [*first.lines(layout.waiting(spanned=not twice)), *there]
        waiting = [*first.lines(layout.waiting(spanned=False)), *there]
        over = [] if twice else second.lines(second.plan.layout.over("step"))
        made = [] if twice else _complete(placed)
        r, last = placed.engine.replica, other.engine
        if twice:
            adding = replace(r, micro_batches=max(2, r.micro_batches))
            last = placement.engine(placed.s, adding, self.roles.keeps, unused=placed.role.finds_unused)

        def peak(
            own: Placed, step: Step, instants: Iterable[Instant], engine: TrainingEngine | None = None
        ) -> tuple[str, list[Line]]:
            at, lines = peaks.peak(engine or own.engine, step, instants)
            return (at, lines) if twice else (f"{own.role.name}: {at}", lines)

        yield "forward", *peaks.largest([
            peak(other, first, first.plan.forward),
            peaks.beside(begun, peak(placed, second, second.plan.forward)),
        ])  # fmt: skip
        yield "backward", *peaks.largest([
            peaks.beside(waiting, peak(placed, second, second.backward())),
            peaks.beside([*over, *made], peak(other, first, first.backward(), last)),
        ])  # fmt: skip
        at, lines = peaks.largest(placed.engine.stepping())
        also = [] if twice else peaks.largest(other.engine.stepping())[1]
        lasting = [] if twice else first.lines(layout.over("step"))
        yield "step", at, [*over, *lasting, *also, *lines]

    def _training(self, placed: Placed, stage: Stage) -> Moments:
        engine, own = placed.engine, self._step(placed)
        seen = self.seen(placed, placed.role.rows)
        if isinstance(engine, Megatron):
            for piece in self.pieces(placed):
                yield from schedule_megatron.training(
                    engine, piece, *placed.role.pipeline, placed.s.virtual_pipeline, placed.s.accumulation,
                    masked=placed.role.masks, handed=placed.role.handed, seen=seen,
                )  # fmt: skip
            return
        if engine.replica.stays and placed.s.virtual_pipeline > 1:
            turns = [(piece, self._step(piece)) for piece in placement.in_turn(placed)]
            yield from schedule_interleaved.training(placed, turns)
            return
        if engine.replica.stays:
            yield from schedule_1f1b.training(placed, own)
            return
        if placed.role.pipeline[1] > 1:
            yield from device_map.training(placed, own, seen)
            return
        inside = self.roles.placed[stage.inside] if stage.inside else None
        waiting = [*self.idle(inside), *self.lasting(inside)] if inside else []
        # where nothing is trained, nothing is kept for a backward
        instants = own.plan.forward if placed.trained else own.plan.scoring
        kept = [*waiting, *tower.beside(own, seen, trained=placed.trained)]
        forward = [peaks.beside(kept, peaks.peak(engine, own, instants))]
        if seen:
            forward.append(peaks.beside(waiting, seen.forward(engine, grad=placed.trained)))
        if inside:
            forward.append(
                peaks.beside([*seen.saved(), *seen.read()] if seen else [], self.within(placed, own, inside))
            )
        yield "forward", *peaks.largest(forward)
        if placed.trained:
            yield "backward", *tower.backward(engine, own, waiting, seen)
            over = own.lines(own.plan.layout.over("step"))
            yield "step", *peaks.beside([*waiting, *over], peaks.largest(engine.stepping()))

    def seen(self, placed: Placed, rows: int) -> Seen | None:
        """The images of a micro batch before the role's vision tower; None where it has none, or reads none.

        Checkpointing hooks the input embeddings of each model inside, from Transformers 5 on (5.23 `modeling_utils.py`,
        `activation_checkpointing_enable`). A loop on Megatron-core hooks a tower itself, or does not.
        """
        r, images = placed.engine.replica, placed.s.images
        if not (images and r.arch.vision):
            return None
        transformers = placed.s.versions.get("transformers", "5")
        switched = placed.s.checkpointing != "none" and at_least(transformers, "5")
        hooked = placed.trained and placed.role.hooks and (switched or r.arch.megatron)
        if images.checkpointing is None:
            images = replace(images, checkpointing=placed.s.checkpointing != "none")
        if not tower_again(r.arch.family, transformers):
            images = replace(images, checkpointing=False)
        pairs = self.roles.batch(placed.s, rows).tokens * images.read(r.arch.vision)
        return Seen(r.role, r.arch, r.arch.vision, r.run, images, rows, hooked, pairs)

    def _step(self, placed: Placed) -> Step:
        """The step of a role that trains."""
        return self.roles.step(placed.engine.replica, placed.s, self.roles.batch(placed.s, placed.role.rows))

    def pieces(self, placed: Placed) -> Iterator[Step]:
        """The steps of the pieces of a pipeline stage that can be its peak: the last, and the one with the embedding.

        The stage itself where it is a single piece.
        """
        s, (index, stages) = placed.s, placed.role.pipeline
        if s.virtual_pipeline == 1:
            yield self._step(placed)
            return
        r = placed.engine.replica
        for n in (s.virtual_pipeline - 1, 0)[: 1 if index else 2]:
            whole = chunk(s.architecture, index, stages, s.virtual_pipeline, n, s.pipeline_layers)
            arch = part(whole, s.tensor_parallel, s.expert_parallel, s.expert_tensor_parallel)
            piece = replace(r, run=replace(r.run, arch=arch))
            yield self.roles.step(piece, s, self.roles.batch(s, placed.role.rows))

    def within(self, placed: Placed, own: Step, scored: Placed) -> tuple[str, list[Line]]:
        """The instant of another role's forward while everything that this role keeps for backward is alive."""
        at, lines = self.scoring(scored)
        waiting = placed.engine.at(Where("waiting", own.plan.layout.stack.layers, False))
        if scored.role.shares:
            # it shares the root FSDP unit, which is gathered already
            lines = [line for line in lines if line not in scored.scorer.root()]
        kept = own.lines(own.plan.layout.waiting())
        there = [*self.present(scored), *self.lasting(scored)]
        return f"{scored.role.name}, {at}", [*there, *kept, *waiting, *lines]

    def serve(self, stage: Stage) -> Moments:
        """The instant at which vLLM generates."""
        yield "rollout", "generation", [*self.here(stage, self.beside(stage, "rollout")), *self.staying(stage)]

    def here(self, stage: Stage, lines: Iterable[Line]) -> list[Line]:
        """The `lines` that are on the GPU during a stage: not those that wait on the host while responses are made."""
        if not stage.away:
            return list(lines)
        gone = {(placed.engine.replica.role, what) for placed in self.placed.values() for what in placed.role.away}
        return [line for line in lines if (line.role, line.component) not in gone]

    def staying(self, stage: Stage) -> list[Line]:
        """Weights of trained roles that have not left for the host yet while vLLM runs."""
        kept = [p.engine for p in self.placed.values() if p.trained and "weights" in p.role.leaves]
        return [line for engine in kept for line in engine.weights()] if "weights" in stage.holds else []

    def generate(self, stage: Stage) -> Moments:
        """The instants at which Transformers generates: over the prompts, then token by token with a growing cache.

        For inference, which has no prompts of its own, a prompt has the full length.
        """
        placed, s = self.placed[stage.role], self.roles.s
        prompt = s.prompt_len or s.seq_len
        r = placed.scorer.replica
        kept = [*self.beside(stage, stage.role), *self.present(placed)]
        kept += [placed.scorer.handing(word) for word in stage.handed]
        logits = Path("flash", head_fp32=placed.role.scoring.head_fp32)
        every = "prompt-logits" in stage.holds
        prompts = Batch(stage.rows * prompt, prompt)
        last = Batch(stage.rows, 1)
        model = replace(r, path=logits)
        made = self.roles.step(model, placed.s, prompts)
        first = self.roles.step(model, placed.s, prompts if every else last)
        b = r.run.residual
        states = [kv_cache.states(r.role, r.arch, stage.rows, b)] if r.arch.recurrent else []
        begun = [kv_cache.dynamic(r.role, r.arch, prompts.tokens, b), *states]
        inside = peaks.peak(
            placed.scorer, made, [i for i in made.plan.scoring if i.where.segment in ("layer", "gather")]
        )
        outside = peaks.peak(placed.scorer, first, [i for i in first.plan.scoring if i.where.layer == r.arch.layers])
        for at, lines in (inside, outside):
            yield "rollout", f"prompts: {at}", [*kept, *begun, *lines]
        total = stage.rows * s.seq_len
        token = self.roles.step(model, placed.s, last)
        at, lines = peaks.peak(placed.scorer, token, token.plan.scoring)
        cache = [kv_cache.dynamic(r.role, r.arch, total, b), *states, kv_cache.grown(r.role, r.arch, total, b)]
        yield "rollout", f"last token: {at}", [*kept, *self.scores(), *cache, *lines]
        if joined := self.scores(copies=2):
            # one tensor of each token's logits; padded, it is copied once more
            yield "rollout", "logits of the responses joined", [*kept, *joined]

    def sync(self, stage: Stage) -> Moments:
        """The instant at which the engine gets the new weights."""
        yield "sync", "weights to the engine", self.handing(stage)

    def save(self, stage: Stage) -> Moments:
        """The instant at which a checkpoint is written."""
        yield "save", f"{stage.role}: state dict", self.handing(stage)

    def handing(self, stage: Stage) -> list[Line]:
        """The lines that are alive while a role's weights are handed on."""
        placed = self.placed[stage.role]
        held = [line for word in stage.handed if (line := placed.engine.handing(word)).bytes]
        there = [*self.beside(stage, stage.role), *self.present(placed, stage.back)]
        return [*self.here(stage, there), *held]


def _complete(placed: Placed) -> list[Line]:
    """The gradients of a role once its backward has ended."""
    _, lines = peaks.largest(placed.engine.stepping())
    return [line for line in lines if line.component == "gradients"]


def largest(moments: Iterable[Candidate]) -> list[tuple[Candidate, Sums]]:
    """The peak instant of each phase in each state of vLLM, the first of equals, with the sums of its lines."""
    found: dict[tuple[str, str], tuple[Candidate, Sums]] = {}
    most: dict[tuple[str, str], float] = {}
    for candidate in moments:
        # nothing has been freed while models load
        known = sums(candidate.lines, fragmenting=candidate.phase != "load")
        size = known.needed + runtime.FRAGMENTATION[runtime.MIDDLE] * known.fragmenting
        key = candidate.phase, candidate.engine
        if size > most.get(key, -1):
            most[key], found[key] = size, (candidate, known)
    return [*found.values()]


def sums(lines: Sequence[Line], *, fragmenting: bool) -> Sums:
    """The sums of `lines`; `fragmenting`: blocks have come and gone, so that fragmentation counts."""
    allocated = sum([line.bytes for line in lines if line.allocated])
    return Sums(staying(lines), allocated, runtime.fragmenting(lines) if fragmenting else 0)
