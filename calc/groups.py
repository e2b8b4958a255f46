"""The GPUs that hold the same roles: what is on one of them at every moment of a step, and whether it fits.

A framework says what happens in a step, stretch by stretch (`calc.keeps.Stage`); here each stretch becomes the moments
that can be its largest: what the running role computes with, what the others leave on the GPU, and the process itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from calc import peaks, pipelined, placement, verdict
from calc.engines.replica import Where
from calc.engines.vllm import Cache
from calc.job import Job
from calc.keeps import Path, Stage
from calc.ledger import Group, Line, Moment, Phase
from calc.memory import kv_cache, runtime
from calc.phases import Batch, Step
from calc.placement import Placed

PHASES = ("load", "rollout", "score", "forward", "backward", "step", "sync", "save")
BETWEEN = Where("waiting", 0, False)  # between two micro-batches
FIRST = Where("gather", 0, False)  # the first layer's parameters are gathered
WEIGHTS = frozenset({"weights", "adapter"})

Moments = Iterator[tuple[str, list[Line]]]
Staged = Iterator[tuple[str, str, list[Line]]]  # a phase, a moment's name, its lines


class Shared:
    """A set of GPUs that hold the same roles, seen from one of them."""

    def __init__(self, job: Job, names: Sequence[str], gpus: int) -> None:
        """The roles called `names` on `gpus` GPUs."""
        self.job, self.names, self.gpus = job, names, gpus
        self.placed = {name: job.placed[name] for name in names if name in job.placed}
        self.engine = job.engine if "rollout" in names else None
        self.process = self.processes(self.placed)
        self.around = placement.around(job.s, job.keeps, job.gpu) if self.engine else []
        self.others = 0  # what else lies on the GPU when the engine measures it
        # root groups left gathered: a frozen model's stays from its first forward on, a trained one's to its backward
        self.gathered = {name for name, placed in self.placed.items() if placed.role.root_stays and not placed.trained}

    def processes(self, names: Iterable[str]) -> list[Line]:
        """What the processes of the roles called `names` take of a GPU beside tensors."""
        gpu, found = self.job.gpu, [self.placed[name] for name in names]
        communicators = max([placed.s.communicators for placed in found], default=0)
        return runtime.process(gpu.architecture, communicators, gpu.linked, len({p.role.process for p in found}))

    def phases(self) -> tuple[Phase, ...]:
        """The phases of these GPUs, each at its largest moment."""
        if self.engine:
            return self._phases()
        # without vLLM, which measures the card, cards differ in what a process takes alone
        return self.job.roles.once(("phases", *self.names, *_figures(self.process)), self._phases)

    def _phases(self) -> tuple[Phase, ...]:
        largest: dict[str, Moment] = {}
        for phase, at, lines in self.moments():
            moment = self.moment(phase, at, lines)
            if phase not in largest or moment.device_bytes > largest[phase].device_bytes:
                largest[phase] = moment
        return tuple(Phase(name, largest[name]) for name in PHASES if name in largest)

    def cache(self) -> Cache | None:
        """What vLLM makes of what it finds on the card once `phases` are known; None where it does not serve."""
        if not self.engine:
            return None
        cache = self.engine.cache(self.others)
        # an engine that never gets its turn refuses nothing
        turn = self.others < self.job.gpu.usable_bytes
        return cache if turn else cache._replace(refusal=None, crowded=False)

    def group(self) -> Group:
        """The phases of these GPUs and the verdict."""
        phases, usable, cache = self.phases(), self.job.gpu.usable_bytes, self.cache()
        peak = max((phase.moment for phase in phases), key=lambda moment: moment.device_bytes)
        refusal = cache.refusal if cache else None
        # a smaller moment may be the less certain one
        probability = 0.0 if refusal else min([verdict.odds(p.moment, usable) for p in phases])
        word = verdict.word(probability)
        first = _first_to_break(phases, word, usable)
        low, high = verdict.reach(peak)
        kept = max(runtime.cached(p.moment.lines, lengths_vary=not self.job.s.packing) for p in phases)
        return Group(
            name="+".join(self.names),
            gpus=self.gpus,
            phases=phases,
            usable_bytes=usable,
            # cached blocks fill at most what the card has
            device_range=(low, max(high, min(high + kept, usable))),
            fit_probability=probability,
            verdict=word,
            verdict_phase="load" if refusal else first,
            refusal=refusal,
            cache_tokens=cache.tokens if cache else 0,
            cache_sequences=cache.sequences if cache else 0,
            crowded=bool(cache and cache.crowded),
        )

    def moment(self, phase: str, at: str, lines: list[Line]) -> Moment:
        """A moment with the process's own lines, and with what the allocator holds back.

        cuBLAS takes its workspaces at the first multiplication, after loading.
        """
        process = [x for x in (*self.process, *self.around) if phase != "load" or x.component != "workspace"]
        every = [line for line in (*process, *lines) if line.bytes]
        # nothing has been freed while models load
        return Moment(at, tuple(every) if phase == "load" else (*every, runtime.fragmentation(every)))

    def moments(self) -> Staged:
        """The largest moment of every stretch of the job, with its phase."""
        yield from (("load", *moment) for moment in self.loading())
        for stage in self.job.keeps.stages:
            if stage.role in self.placed or (stage.role == "rollout" and self.engine):
                yield from getattr(self, stage.does)(stage)
            elif stage.does == "sync" and self.engine:
                yield "sync", "weights arrive", self.serving("all")

    def loading(self) -> Moments:
        """Models arrive one after another, and each stays, as far as it does not leave for the host."""
        there: list[Line] = []
        staying = {word for stage in self.job.keeps.stages if stage.does == "serve" for word in stage.holds}
        for name in self.names:
            last: list[Line] = []
            if self.engine and name == "rollout":
                earlier = self.processes(self.names[: self.names.index(name)])
                self.others = sum([line.bytes for line in (*earlier, *there)])
                for at, last in self.engine.loading(self.others):
                    yield f"{name}: {at}", [*there, *last]
                there += self.serving("asleep")
                continue
            engine = self.placed[name].engine
            for at, last in engine.loading():
                yield f"{name}: {at}", [*there, *last]
            leaves = engine.replica.leaves - (staying if self.placed[name].trained else set())
            there += [x for x in last if ("weights" if x.component in WEIGHTS else "states") not in leaves]

    def serving(self, state: str) -> list[Line]:
        """What is there of vLLM: `all` of it, its `weights`, or what stays of it `asleep`, where it can sleep."""
        if not self.engine or not self.job.s.rollout:
            return []
        if state == "all" or not self.job.s.rollout.sleep:
            return self.engine.awake(self.others)
        return self.engine.with_weights() if state == "weights" else self.engine.asleep()

    def beside(self, stage: Stage, *running: str) -> list[Line]:
        """What stays on the GPU of the roles that do not run, and of the engine."""
        lines = [] if "rollout" in running else self.serving(stage.engine)
        for name, placed in self.placed.items():
            if name not in running:
                lines += self.idle(placed)
                if stage.alternating and placed.trained:
                    lines += [x for x in placed.engine.at(BETWEEN) if x.component == "gradients"]
        return lines

    def idle(self, placed: Placed) -> list[Line]:
        """What a role keeps on the GPU outside its own phases."""
        engine, leaves = placed.engine, placed.role.leaves
        if placed.role.shares:
            return []
        return [
            *([] if "weights" in leaves else engine.weights()),
            *([] if "states" in leaves else engine.states()),
            *(engine.root() if placed.role.name in self.gathered else []),
        ]

    def present(self, placed: Placed) -> list[Line]:
        """What a role has on the GPU while it computes without training."""
        if placed.role.shares:
            return []
        return [*placed.engine.weights(), *([] if "states" in placed.role.leaves else placed.engine.states())]

    def score(self, stage: Stage) -> Staged:
        """A forward without gradient."""
        placed = self.placed[stage.role]
        at, lines = self.scoring(placed)
        yield "score", f"{stage.role}: {at}", [*self.beside(stage, stage.role), *self.present(placed), *lines]
        if placed.role.root_stays:
            self.gathered.add(stage.role)

    def scoring(self, placed: Placed) -> tuple[str, list[Line]]:
        """The largest instant of a forward without gradient."""
        # a root group that is gathered already leaves no buffer to the first layer
        there = placed.role.shares or placed.role.name in self.gathered
        return self.job.roles.once(("score", placed.role.name, there), lambda: self._scoring(placed, there))

    def _scoring(self, placed: Placed, there: bool) -> tuple[str, list[Line]]:
        scored = self.job.step(placed.scorer.replica, placed.s, self.job.batch(placed.s, placed.role.scoring_rows))
        return peaks.peak(placed.scorer, scored, [i for i in scored.plan.scoring if not (there and i.where == FIRST)])

    def train(self, stage: Stage) -> Staged:
        """Forward, backward and optimizer step of a role, and of another one that trains beside it."""
        name, placed = stage.role, self.placed[stage.role]
        self.gathered -= {name}
        several = len(self.job.keeps.roles) > 1 and not stage.inside and not placed.role.model
        others = self.beside(stage, name, stage.beside, stage.inside)
        if stage.beside:
            other = self.placed[stage.beside]
            _, lines = peaks.largest((at, lines) for _, at, lines in self.training(other, stage))
            others += [*other.engine.resident(), *lines]
        kept = [*others, *placed.engine.resident()]
        for phase, at, lines in self.training(placed, stage):
            yield phase, f"{name}: {at}" if several else at, [*kept, *lines]

    def training(self, placed: Placed, stage: Stage) -> Iterable[tuple[str, str, list[Line]]]:
        """The largest moment of each phase of one role's update, without what is resident."""
        # a frozen role that is scored inside may have its root group gathered already
        what = placed.role.name, stage, stage.inside in self.gathered
        return self.job.roles.once(what, lambda: [*self._training(placed, stage)])

    def _training(self, placed: Placed, stage: Stage) -> Staged:
        engine = placed.engine
        own = self.job.step(engine.replica, placed.s, self.job.batch(placed.s, placed.role.rows))
        if engine.replica.stays:
            yield from pipelined.training(placed, own)
            return
        inside = self.job.placed[stage.inside] if stage.inside else None
        waiting = self.idle(inside) if inside else []
        forward = [peaks.beside(waiting, peaks.peak(engine, own, own.plan.forward))]
        if inside:
            forward.append(self.within(placed, own, inside))
        yield "forward", *peaks.largest(forward)
        if placed.trained:
            yield "backward", *peaks.beside(waiting, peaks.peak(engine, own, own.backward()))
            over = own.lines(own.plan.layout.over("step"))
            yield "step", *peaks.beside([*waiting, *over], peaks.largest(engine.stepping()))

    def within(self, placed: Placed, own: Step, scored: Placed) -> tuple[str, list[Line]]:
        """Another role's forward, while everything that this one keeps for backward is alive."""
        at, lines = self.scoring(scored)
        waiting = placed.engine.at(Where("waiting", own.plan.layout.stack.layers, False))
        if scored.role.shares:
            # the root group that is gathered already is its own
            lines = [line for line in lines if line not in scored.scorer.root()]
        kept = own.lines(own.plan.layout.waiting())
        return f"{scored.role.name}, {at}", [*self.present(scored), *kept, *waiting, *lines]

    def serve(self, stage: Stage) -> Staged:
        """vLLM generates."""
        yield "rollout", "generation", [*self.beside(stage, "rollout"), *self.staying(stage), *self.serving("all")]

    def staying(self, stage: Stage) -> list[Line]:
        """Weights of trained roles that have not left for the host yet while vLLM runs."""
        kept = [p.engine for p in self.placed.values() if p.trained and "weights" in p.role.leaves]
        return [line for engine in kept for line in engine.weights()] if "weights" in stage.holds else []

    def generate(self, stage: Stage) -> Staged:
        """Transformers generates: a forward over the prompts, then token by token with a growing cache.

        Inference, which says nothing of prompts, gets one of the full length.
        """
        placed, s = self.placed[stage.role], self.job.s
        prompt = s.prompt_len or s.seq_len
        r = placed.scorer.replica
        kept = [*self.beside(stage, stage.role), *self.present(placed)]
        kept += [placed.scorer.handing(word) for word in stage.holds if word != "prompt-logits"]
        logits = Path("flash", head_fp32=placed.role.scoring.head_fp32)
        every = "prompt-logits" in stage.holds
        prompts = Batch(stage.rows * prompt, prompt)
        last = Batch(stage.rows, 1)
        model = replace(r, path=logits)
        made = self.job.step(model, placed.s, prompts)
        first = self.job.step(model, placed.s, prompts if every else last)
        begun = kv_cache.dynamic(r.role, r.arch, prompts.tokens)
        inside = peaks.peak(
            placed.scorer, made, [i for i in made.plan.scoring if i.where.segment in ("layer", "gather")]
        )
        outside = peaks.peak(placed.scorer, first, [i for i in first.plan.scoring if i.where.layer == r.arch.layers])
        for at, lines in (inside, outside):
            yield "rollout", f"prompts: {at}", [*kept, begun, *lines]
        total = stage.rows * s.seq_len
        token = self.job.step(model, placed.s, last)
        at, lines = peaks.peak(placed.scorer, token, token.plan.scoring)
        cache = [kv_cache.dynamic(r.role, r.arch, total), kv_cache.grown(r.role, r.arch, total)]
        yield "rollout", f"last token: {at}", [*kept, *cache, *lines]

    def sync(self, stage: Stage) -> Staged:
        """The engine gets the new weights."""
        yield "sync", "weights to the engine", self.handing(stage)

    def save(self, stage: Stage) -> Staged:
        """A checkpoint is written."""
        yield "save", f"{stage.role}: state dict", self.handing(stage)

    def handing(self, stage: Stage) -> list[Line]:
        """What is there while a role's weights are handed on."""
        placed = self.placed[stage.role]
        held = [placed.engine.handing(word) for word in stage.holds]
        return [*self.beside(stage, stage.role), *self.present(placed), *held]


def sets(job: Job) -> list[Shared]:
    """The GPUs of a job, set by set."""
    return [Shared(job, names, gpus) for names, gpus in placement.groups(job.s, job.keeps)]


def _figures(lines: Iterable[Line]) -> tuple[Hashable, ...]:
    """What lines are equal by, hashable."""
    return tuple([(x.component, x.role, x.bytes, *x.values.items()) for x in lines])


def _first_to_break(phases: Iterable[Phase], word: str, usable: int) -> str | None:
    """The first phase whose own moment is at least as doubtful as the whole job; None where the job fits."""
    if word == "fits":
        return None
    for phase in phases:
        if verdict.odds(phase.moment, usable) < (verdict.TIGHT if word == "oom" else verdict.FITS):
            return phase.name
    return None
