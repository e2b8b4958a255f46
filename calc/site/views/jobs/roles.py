"""The roles of a job with the place of their weights and states, and the capacity of vLLM's KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

from calc.answers import answers, words
from calc.answers.answers import Answer
from calc.answers.workings import Working, of_phase
from calc.base.ledger import Line
from calc.base.plan import Does, Leaves
from calc.models.architecture import parameters
from calc.scenario.scenario import Scenario
from calc.site.tables.tables import Cell, Column, Table, verdict_html
from calc.site.views.jobs.ledgers import held, shared
from calc.step.placement import Placed
from calc.step.roles import Job

DOES: Mapping[Does, str] = {"train": "trained", "score": "scores", "generate": "generates"}


def roles(answer: Answer, table_id: str, caption: str) -> Table:
    """One row per running role: its model, its work, and the place of its weights and states."""
    job, s = answer.placed, answer.scenario
    columns = (
        Column("role", "Role"),
        Column("model", "Model"),
        Column("does", "What it does"),
        Column("gpus", "GPUs", "", "number"),
        Column("weights", "Weights on each GPU", "GiB", "number", 2, "While the role works"),
        Column("states", "Optimizer states there", "GiB", "number", 2, "With fp32 master weights"),
        Column("between", "While others work"),
        Column("held", "Held by"),
        Column("parameters", "Parameters", "", "number"),
    )
    rows = []
    for name, placed in job.placed.items():
        r, own = placed.engine.replica, placed.s
        weights = _lying(placed.engine.weights(), "weights", "adapter")
        states = _lying(placed.engine.states(), "master_weights", "optimizer_states")
        adapters = f", LoRA r={own.lora.rank}" if own.lora and r.adapter else ""
        held_in = f"{words.SHARDINGS[own.sharding]}, {words.PRECISIONS.get(own.precision, own.precision)}"
        by = f"{held_in}{adapters}"
        if placed.role.shares:
            by = "the actor, its adapters off" if own.lora else "the actor's place, its weights copied there"
        rows.append(
            (
                Cell(name),
                _model(own),
                Cell(_does(job, name)),
                Cell(own.gpus),
                Cell(None, "—") if placed.role.shares else held(weights, answer),
                held(states, answer) if placed.trained else Cell(None, "—"),
                Cell("—" if placed.role.shares else _between(placed, weights.bytes, states.bytes)),
                Cell(by),
                Cell(r.parameters + r.adapter),
            )
        )
    if job.engine and s.rollout and job.keeps.serving:
        asleep = ("weights go to host memory", "weights are dropped")[job.keeps.serving.sleep_level - 1]
        weights = Working("while the role works", tuple(job.engine.weights()))
        rows.append(
            (
                Cell("rollout"),
                _model(s),
                Cell("generates"),
                Cell(s.rollout.gpus),
                held(weights, answer),
                Cell(None, "—"),
                Cell(f"sleeps: its {asleep}" if s.rollout.sleep else "stays on the GPU"),
                Cell(f"{s.rollout.server} {job.keeps.serving.version}, tensor parallel {s.rollout.tensor_parallel}"),
                Cell(parameters(s.architecture)),
            )
        )
    return Table(table_id, caption, columns, tuple(rows), words.describe(answer), versions=answers.versions())


def _lying(lines: Iterable[Line], *components: str) -> Working:
    return Working("while the role works", tuple(x for x in lines if x.component in components))


def _model(s: Scenario) -> Cell:
    found = answers.catalog().models.get(s.model)
    return Cell(found.name if found else s.model)


def _does(job: Job, name: str) -> str:
    """A role's work in a step: `scores, trained`."""
    at_work = [stage for stage in job.keeps.stages if name in (stage.role, stage.beside, stage.joint)]
    done = [DOES[stage.does] for stage in at_work if stage.does in DOES]
    done += ["scores" for stage in job.keeps.stages if stage.inside == name]
    return ", ".join(dict.fromkeys(done)) or "nothing on the GPU"


def _between(placed: Placed, weights: int, states: int) -> str:
    """The place of a role's weights and states while other roles work."""
    parts: dict[Leaves, int] = {"weights": weights, **({"states": states} if placed.trained else {})}
    always = [part for part, there in parts.items() if not there]
    moved = [part for part in parts if part in placed.role.leaves and part not in always]
    stay = [part for part in parts if part not in always and part not in moved]
    places = {"always in host memory": always, "go to host memory": moved, "stay on the GPU": stay}
    return "; ".join(f"{' and '.join(what)} {where}" for where, what in places.items() if what)


def caches(answered: Mapping[str, Answer], table_id: str, caption: str) -> Table:
    """The capacity of vLLM's KV cache, job by job, or the reason why vLLM does not start."""
    columns = (
        Column("job", "Job"),
        Column("vllm", "vLLM"),
        Column("tensor_parallel", "Tensor parallel", "", "number"),
        Column("utilization", "Utilization", "", "number", 2, "The share of the card that the engine may take"),
        Column("cache", "KV cache of each GPU", "GiB", "number", 2),
        Column("tokens", "It holds", "tokens", "number"),
        Column("length", "Full length", "tokens", "number", 0, "The longest sequence that the engine is built for"),
        Column("sequences", "Of full length at once", "sequences", "number", 0, "No more than the engine runs at once"),
        Column("asked", "To generate, each engine", "sequences", "number", 0, "In one rollout"),
        Column("starts", "Starts"),
    )
    rows = []
    for label, answer in answered.items():
        rollout, serving = answer.scenario.rollout, answer.placed.keeps.serving
        if rollout is None or serving is None:
            raise ValueError(f"{label}: vLLM does not serve in this job")
        (group,) = answer.serving
        (rolling,) = [of_phase(p) for p in group.phases if p.name == "rollout"] or [Working("", ())]
        cache = Working(rolling.at, tuple(x for x in rolling.of("kv_cache").lines if x.role == "rollout"))
        asked = -(-rollout.batch * rollout.n * rollout.tensor_parallel // rollout.gpus)
        rows.append(
            (
                Cell(label),
                Cell(serving.version),
                Cell(rollout.tensor_parallel),
                Cell(float(rollout.gpu_memory_utilization)),
                held(cache, answer),
                Cell(group.cache_tokens),
                Cell(serving.max_model_len),
                Cell(group.cache_sequences),
                Cell(asked),
                Cell(
                    f"no {group.refusal}" if group.refusal else "yes",
                    verdict_html("oom", "no") + f" {escape(str(group.refusal))}" if group.refusal else "",
                ),
            )
        )
    return Table(table_id, caption, columns, tuple(rows), shared(list(answered.values())), versions=answers.versions())
