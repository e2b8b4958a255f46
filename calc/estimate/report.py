"""An estimate as text for a terminal: the verdict in words, then phases, the peak's lines, host memory and notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from calc.base.columns import table
from calc.base.ledger import Line, Phase
from calc.base.units import GiB, gb, gib
from calc.estimate.estimate import host_verdict, shown_values, speed
from calc.estimate.result import Estimate, Group
from calc.estimate.verdict import Verdict, room
from calc.estimate.wording import spoken
from calc.frameworks.registry import framework
from calc.scenario.scenario import Scenario
from calc.scenario.words import PAIRED
from calc.throughput import Throughput, Unrated

VERDICTS: Mapping[Verdict, str] = {
    "fits": "fits",
    "tight": "tight, it may run and may die on a long batch",
    "oom": "out of memory",
}
TRAINERS = {
    "transformers": "Transformers' Trainer", "litgpt": "litgpt", "llamafactory": "LLaMA-Factory", "axolotl": "Axolotl",
    "ms-swift": "ms-swift", "torchtune": "torchtune", "torchtitan": "torchtitan", "unsloth": "Unsloth",
    "megatron": "Megatron-LM", "megatron-swift": "Megatron-SWIFT", "colossalai": "ColossalAI",
}  # fmt: skip


def text(e: Estimate, gpu_name: str) -> str:
    """The whole report, `gpu_name` being the card's name in words; it ends with a newline."""
    return (
        "\n".join([verdict(e, gpu_name), "", *_job(e), *_groups(e), *_host(e), *_speed(e), *_notes(e)]).rstrip() + "\n"
    )


def deciding(e: Estimate) -> Group:
    """The GPU group that decides: one on which an engine does not start, else the one with the least room."""
    return max(e.groups, key=lambda g: (g.refusal is not None, g.peak.moment.device_bytes / g.usable_bytes))


def verdict(e: Estimate, gpu_name: str) -> str:
    """One line: the verdict, its phase, the peak and the usable memory; or the reason that an engine does not start."""
    group = deciding(e)
    if group.refusal:
        return f"{group.refusal.verdict}: {group.refusal}"
    first = f" in {e.verdict_phase}" if e.verdict_phase else ""
    if e.on_host:
        return (
            f"out of host memory{first}: {gb(e.host_peak)} needed of {e.host_memory}; each {gpu_name} needs "
            f"{gib(group.peak.moment.device_bytes)} of {gib(group.usable_bytes)} usable"
        )
    return (
        f"{VERDICTS[e.verdict]}{first}: {span(group)} of {gib(group.usable_bytes)} usable on each {gpu_name}, in "
        f"{_instant(group.peak)}; fits with probability {e.fit_probability:.2f}"
    )


def span(group: Group) -> str:
    """The peak in words: its bytes, those that tensors take of it, and those that a card needs for the verdict `fits`.

    Memory that PyTorch keeps cached besides, up to all of a card, decides nothing.
    """
    moment = group.peak.moment
    return f"peak {gib(moment.device_bytes)} ({gib(moment.allocated_bytes)} allocated; needs {gib(needed(group))})"


def needed(group: Group) -> int:
    """Bytes that a process must be allowed for all its phases to fit with the probability that the verdict asks."""
    return group.usable_bytes - min([room(phase.moment.sums, group.usable_bytes) for phase in group.phases])


def _job(e: Estimate) -> Iterator[str]:
    s = e.scenario
    several = f", {s.lora.count} side by side" if s.lora and s.lora.count > 1 else ""
    rank = ", IA3" if s.lora and s.lora.ia3 else f" of rank {s.lora.rank}" if s.lora else ""
    adapters = rank + ", DoRA" * s.lora.dora + several if s.lora else ""
    yield (
        f"{s.model}, {s.task}, {s.method}{adapters}, {runs(s)}, {s.precision}, "
        f"{', '.join([f'sharding {s.sharding}', *degrees(s)])}, {s.gpus} x {s.gpu}, "
        f"{batched(s)}, {', '.join([lengths(s), *segments(s)])}"
    )
    if s.rollout:
        yield f"{rollout(s)}; {roles(s, {})}"
    yield from holds(s)
    yield ""


def batched(s: Scenario) -> str:
    """The size of one forward: its micro batch and, for dynamic batches, the most tokens."""
    tokens = f" of up to {s.max_tokens_per_gpu} tokens" if s.max_tokens_per_gpu else ""
    return f"micro batch {s.micro_batch}{tokens}"


def holds(s: Scenario) -> list[str]:
    """The size of a step in one line: sequences and tokens of the whole job, and what each GPU makes of them.

    For RL first that of an iteration. Nothing where nothing is trained.
    """
    if s.optimizer == "none":
        return []
    trained = s.role("actor") or s
    ranks = "each GPU takes" if trained.together == 1 else f"every {trained.together} GPUs take"
    share = -(-trained.global_batch // trained.data_parallel)
    takes = f"{ranks} {share:,} of them in {_count(trained.accumulation, 'forward')}, {batched(trained)}"
    step = f"a step: {_count(trained.global_batch, sample(s))}"
    if not s.rollout:
        return [f"{step}, {s.sequences * s.expected_len:,} tokens; {takes}"]
    responses, prompts = _count(samples(s), sample(s)), _count(s.rollout.batch, "prompt")
    whole = f"{responses} for {prompts}, {samples(s) * s.expected_len:,} tokens"
    return [f"an iteration: {whole}; {step}; {takes}"]


def sample(s: Scenario) -> str:
    """The unit that a job counts: sequences, pairs, or for RL responses."""
    return "pair" if s.task in PAIRED else "response" if s.rollout else "sequence"


def samples(s: Scenario) -> int:
    """The sequences or pairs of a step, or the responses of an iteration."""
    return s.rollout.batch * s.rollout.n if s.rollout else s.global_batch


def trainer(s: Scenario) -> list[str]:
    """The trainer whose loop runs, if the framework does not say it."""
    return [TRAINERS[s.trainer]] if framework(s.framework).CHOICES.own_loop and s.trainer in TRAINERS else []


def runs(s: Scenario) -> str:
    """The code that runs, with its version: the framework, or the trainer and the PyTorch that it runs on."""
    if not trainer(s):
        return f"{s.framework}=={s.framework_version}"
    versions = s.versions or {}
    name = f"{s.trainer}=={versions[s.trainer]}" if s.trainer in versions else trainer(s)[0]
    return f"{name} on torch=={versions.get('torch', s.framework_version)}"


def degrees(s: Scenario) -> list[str]:
    """The degrees of parallelism within a layer, a model or a sequence that are above 1; what Megatron-FSDP cuts."""
    found = [
        ("tensor parallel", s.tensor_parallel),
        ("pipeline parallel", s.pipeline_parallel),
        ("layers over GPUs", s.devices),
        ("virtual pipeline", s.virtual_pipeline),
        ("context parallel", s.context_parallel),
        ("expert parallel", s.expert_parallel),
        ("expert tensor parallel", s.expert_tensor_parallel),
        ("groups of shards", s.data_parallel_replicate),
    ]
    shared = [f"{name} {count}" for name, count in found if count > 1]
    if (strategy := s.data_parallel_sharding_strategy) != "no_shard":
        shared.insert(0, f"Megatron-FSDP {strategy}")
    if s.reshard_after_forward == "never":
        shared.append("gathered weights stay")
    return [*shared, "sequence parallel"] if s.sequence_parallel else shared


def segments(s: Scenario) -> list[str]:
    """The settings that a job gives PyTorch's allocators; jobs with a rollout switch expandable segments themselves."""
    told = ["expandable segments"] if s.expandable_segments and not s.rollout else []
    size = s.pinned_max_round_threshold_mb
    return [*told, f"pinned memory not rounded above {size} MiB"] if size else told


def lengths(s: Scenario) -> str:
    """The lengths of sequences: for RL, of prompts and responses separately; of the data, where they are known."""
    if s.rollout:
        return f"prompts of {s.prompt_len} and responses of {s.response_len} tokens"
    if s.lengths:
        grouped = ", grouped by length" if s.group_by_length else ""
        return f"{s.seq_len} tokens at most, the longest {s.longest_len}, {s.expected_len} on average{grouped}"
    return f"{s.seq_len} tokens"


def rollout(s: Scenario) -> str:
    """The rollout engine, the number of responses, and the engine's share of the card."""
    r = s.rollout
    if r is None or r.engine == "none":
        return "no rollout"
    number = str(r.n) if r.n > 1 else "one"
    many = f"{number} for each of {r.batch} prompts" if r.batch > 1 else f"{number} for one prompt"
    if r.engine == "hf":
        return f"rollout by Transformers, {many}"
    sleep = "sleeps while others work" if r.sleep else "never sleeps"
    share = f"utilization {r.gpu_memory_utilization:g}, {sleep}"
    return f"rollout by {r.server} {s.versions.get(r.engine, '')}, tensor parallel {r.tensor_parallel}, {share}, {many}"


def roles(s: Scenario, names: Mapping[str, str]) -> str:
    """The roles that run, with their models where these differ and their GPUs where they have some of their own.

    `names` maps catalog ids to the names of models in words.
    """
    found = []
    for role, own in s.roles.items():
        if isinstance(own, str):
            continue
        model = f" ({names.get(own['model'], own['model'])})" if own["model"] != s.model else ""
        place = s.group(role)
        where = "" if s.placement == "colocated" else f" with {place}" if place != role else f" on {own['gpus']}"
        found.append(f"{role}{model}{where}")
    apart = s.placement == "separate"
    if s.rollout and s.rollout.serves:
        found.append(f"{s.rollout.server} on {s.rollout.gpus}" if apart else s.rollout.server)
    return f"{'GPUs apart' if apart else 'on all GPUs'}: {', '.join(found)}"


def _groups(e: Estimate) -> Iterator[str]:
    for group in e.groups:
        word = group.refusal.verdict if group.refusal else group.verdict
        yield f"{group.name}: {word} on {_count(group.gpus, 'GPU')}, per GPU{_cache(group)}"
        moments = [(p.name, p.moment) for p in group.phases]
        rows = [(name, spoken(m.name), _number(m.allocated_bytes), _number(m.device_bytes)) for name, m in moments]
        yield from table(("phase", "peak at", "allocated GiB", "device GiB"), rows, right=(2, 3))
        yield ""
        yield f"{group.name} at its peak, in {_instant(group.peak)}"
        yield from _lines(group.peak)
        shown = group.shown_peak.moment.device_bytes
        if shown > group.peak.moment.device_bytes:
            yield f"a monitor usually shows {gib(shown)}: PyTorch caches freed blocks until memory is short"
        yield ""


def _cache(group: Group) -> str:
    if not group.cache_tokens:
        return ""
    at_once = _count(group.cache_sequences, "sequence")
    return f"; KV cache of {_count(group.cache_tokens, 'token')}, {at_once} of full length at once"


def _host(e: Estimate) -> Iterator[str]:
    if e.host_phases:
        yield f"host memory, per node: {host_verdict(e)}, {gb(e.host_peak)} needed of {e.host_memory}"
        rows = [(p.name, p.moment.name, _number(p.moment.device_bytes)) for p in e.host_phases]
        yield from table(("phase", "peak at", "GiB"), rows, right=(2,))
        yield ""


def _speed(e: Estimate) -> Iterator[str]:
    """The estimated speed and where the time goes, or the reason that there is no estimate."""
    try:
        t = speed(e)
    except Unrated as error:
        yield from (f"speed: not estimated, {error}", "")
        return
    yield pace(e.scenario, t) + (", if it fitted" if e.verdict == "oom" else "")
    rows = [(term.name, seconds(term.seconds), term.formula) for term in t.terms]
    yield from table(("term", "seconds", "formula"), rows, right=(1,))
    yield ""


def pace(s: Scenario, t: Throughput) -> str:
    """One line: the time of a step, tokens per second, and the term that takes most of the time."""
    what = f"one {'iteration' if s.rollout else 'step'} of {_count(samples(s), sample(s))}"
    return f"speed: {what} in {seconds(t.step_seconds)} s, {tokens(t)}, most of it {t.bound_by}"


def tokens(t: Throughput) -> str:
    """The speed in the one unit that all answers share."""
    return f"{t.tokens_per_second:,.0f} tokens a second over the whole job"


def seconds(time: float) -> str:
    """Seconds with three significant digits, or whole seconds from 100 on."""
    return f"{time:,.0f}" if abs(time) >= 100 else f"{time:.3g}"


def _notes(e: Estimate) -> Iterator[str]:
    yield from (f"note: {note}" for note in noted(e))


def noted(e: Estimate) -> Iterator[str]:
    """The notes, those of an engine that does not start with its name."""
    refusals = {str(group.refusal): group.refusal.verdict for group in e.groups if group.refusal}
    yield from (f"{refusals[note]}: {note}" if note in refusals else note for note in e.notes)


def _instant(phase: Phase) -> str:
    return f"{phase.name} ({spoken(phase.moment.name)})"


def _lines(phase: Phase) -> Iterator[str]:
    largest = sorted(phase.moment.lines, key=lambda line: -line.bytes)
    rows = [(line.component, line.role, _number(line.bytes), f"{line.formula}{_values(line)}") for line in largest]
    return table(("component", "role", "GiB", "formula"), rows, right=(2,))


def _values(line: Line) -> str:
    values = ", ".join(f"{name} = {_value(value)}" for name, value in shown_values(line).items())
    return f"  with {values}" if values else ""


def _value(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _number(n_bytes: int) -> str:
    """GiB with two decimals, and never 0.00 for what is there."""
    return "< 0.01" if 0 < n_bytes < GiB / 200 else f"{n_bytes / GiB:,.2f}"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"
