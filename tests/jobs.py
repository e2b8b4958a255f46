"""Jobs for tests: a scenario in a few words, its engine, and sums over the lines that it answers with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from calc.base.ledger import Line
from calc.base.plan import Keeps, Stage
from calc.engines.replica import Replica, TrainingEngine, Where
from calc.frameworks.registry import framework
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario
from calc.step import placement

BASE = {"model": "llama-3-8b", "task": "sft", "gpu": "a100-80-sxm"}
# Phases in which all of vLLM may be on the GPU, or its weights, and whose memory no micro batch changes.
SERVING = ("load", "rollout", "sync", "save")
OPENRLHF = {"framework": "openrlhf==0.6.1", "gpus": 8, "micro_batch": 1, "global_batch": 8}
# Published jobs that ran: of lengths that the source does not state, below caps at which they are computed not to fit.
SHORTER = {
    "published/logicrl-4a100",
    "published/verl-235b-32gpu-96gb",
    *(f"published/caikit-llama2-7b-len{cap}-mb6" for cap in (512, 1024, 4096)),
}
# Published as running, and called impossible for want of a mechanism that the record's explanation names.
UNMODELLED = {"published/verl-lora-14b-2h100"}

# Llama 3 8B by hand: V·h = 128,256 · 4,096; a layer: 2·4096² (q, o) + 2·1024·4096 (k, v) + 3·14336·4096 + 2·4096
P = 8_030_261_248
VH = 525_336_576
LAYER = 218_112_000
GATE = 58_720_256  # 14,336 · 4,096, the largest tensor of a layer


def job(**fields: Any) -> Scenario:
    """SFT of Llama 3 8B in plain PyTorch with these changes; `__` in a name is a dot."""
    return parse(BASE | {name.replace("__", "."): value for name, value in fields.items()})


def engine(*, trained: bool = True, **fields: Any) -> TrainingEngine:
    """The engine of `job(**fields)`: of the trained model, or of one that is frozen under the same settings."""
    return engine_of(job(**fields), trained=trained)


def engine_of(s: Scenario, *, trained: bool = True) -> TrainingEngine:
    """The engine of a scenario."""
    keeps = framework(s.framework).keeps(s)
    return placement.engine(s, replica_of(s, trained=trained), keeps)


def replica_of(s: Scenario, *, trained: bool = True) -> Replica:
    """The model that a scenario trains, or one that is frozen under the same settings."""
    return placement.replica(s, framework(s.framework).keeps(s).roles[0], trained=trained)


def under(s: Scenario, sharding: str) -> Scenario:
    """`s` in plain PyTorch on at least two GPUs under another sharding, with the precision that it takes."""
    precision = "fsdp-mixed" if sharding.startswith("fsdp") else "mixed" if sharding.startswith("zero") else "bf16"
    more = 1 if s.gpus > 1 else 2
    batch = s.global_batch * more
    return replace(s, framework="torch", sharding=sharding, precision=precision, gpus=s.gpus * more, global_batch=batch)


def planned(s: Scenario, *stages: Stage, **changed: Any) -> Scenario:
    """`s` with a step of these stages in place of its framework's, and with these fields of every role changed."""

    def plan(own: Scenario) -> Keeps:
        keeps = s.plan(own)
        return replace(keeps, stages=stages, roles=tuple(replace(role, **changed) for role in keeps.roles))

    return replace(s, plan=plan)


def deepspeed(**fields: Any) -> TrainingEngine:
    """The engine of an OpenRLHF 0.6.1 job (DeepSpeed 0.16.4) on 8 GPUs without accumulation, with these changes."""
    return engine(**OPENRLHF | fields)


def total(lines: Iterable[Line], *components: str) -> int:
    """Bytes of all lines, or of those of the components named."""
    return sum(line.bytes for line in lines if not components or line.component in components)


def at(lines: Iterable[Line], *sources: str) -> int:
    """Bytes of the lines that these sections of the method derive."""
    return sum(line.bytes for line in lines if line.source in sources)


def moments(engine: TrainingEngine, what: str) -> dict[str, list[Line]]:
    """The named moments of `loading`, `stepping`, or of one rank's `host` memory."""
    return dict(engine.host(1) if what == "host" else getattr(engine, what)())


def head(making: int = VH) -> Where:
    """The backward of an untied head, just where its gradient is made."""
    return Where("head", 32, True, root=making, making=making)


def norm() -> Where:
    """The final norm's backward: its own gradient comes, the head's is there."""
    return Where("norm", 32, True, root=VH + 4096, making=4096)


def top(making: int = GATE) -> Where:
    """The top layer's backward as its last gradient is made."""
    return Where("layer", 31, True, VH + 4096, 0, LAYER, making)


def bottom(making: int = GATE) -> Where:
    """The first layer's backward as its last gradient is made."""
    return Where("layer", 0, True, VH + 4096, 31 * LAYER, LAYER, making)


def end() -> Where:
    """The embedding's backward, which makes the last gradient."""
    return Where("end", 0, True, VH + 4096, 32 * LAYER, VH, VH)


FORWARD = Where("layer", 31, False)


def places(engine: TrainingEngine) -> tuple[Where, ...]:
    """Forward, the loss, and backward where its first and its last gradients come, for any job."""
    r = engine.replica
    root = r.trainable - embedded(engine) - r.arch.layers * in_layer(engine) if r.run.trained else 0
    top_ = Where("layer", r.arch.layers - 1, True, root, 0, in_layer(engine), 1)
    below = Where("layer", 0, True, root, (r.arch.layers - 1) * in_layer(engine), in_layer(engine), 1)
    whole = Where("end", 0, True, root, r.arch.layers * in_layer(engine), embedded(engine), max(embedded(engine), 1))
    return (Where("layer", r.arch.layers - 1, False), Where("loss", r.arch.layers, True), top_, below, whole)


def embedded(engine: TrainingEngine) -> int:
    """Trained elements of the embedding."""
    return engine.replica.arch.vocab * engine.replica.arch.hidden if engine.replica.run.trained else 0


def in_layer(engine: TrainingEngine) -> int:
    """Trained elements of a layer, as if all layers were alike."""
    r = engine.replica
    return sum(t.elements * t.count for t in r.trained_tensors if t.count > 1) // r.arch.layers
