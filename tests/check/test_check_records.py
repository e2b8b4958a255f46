"""Rules on measurements and out-of-memory messages, each alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
from planted import RECORDS

from calc.base.units import GiB
from calc.catalog.catalog import load
from calc.check import messages, records
from calc.check.faults import Rule


def changed(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A record of the catalog with other values; None takes a field out, and dots lead inside."""
    catalog = load()
    every = (*catalog.measurements, *catalog.exhausted)
    record = copy.deepcopy(dict(next(r for r in every if r["id"] == RECORDS[name])))
    for field, value in changes.items():
        *above, last = field.split(".")
        into = record
        for part in above:
            into = into[part]
        if value is None:
            del into[last]
        else:
            into[last] = value
    return record


def said(rule: Rule[Any], name: str, **changes: Any) -> list[str]:
    return list(rule(changed(name, changes), load()))


CASES: list[tuple[Rule[Any], str, dict[str, Any], dict[str, Any], str]] = [
    (
        records.scenario,
        "gib",
        {},
        {"scenario.optimizer": "adam"},
        "scenario: optimizer: given 'adam', allowed: adamw, ",
    ),
    (
        records.scenario,
        "held",
        {},
        {"moment": "actor: shard on the GPU"},
        "moment: given 'actor: shard on the GPU', allowed: ",
    ),
    (
        records.named,
        "measured",
        {"scenario.framework": "torch"},
        {"scenario.method": "lora", "id": "measured/h100-2026-11-22/qwen2.5-0.5b/sft/s2048/method=full"},
        "scenario.method: given 'lora', allowed: full, as id says",
    ),
    (
        records.named,
        "traced",
        {"scenario.task": "pretrain"},  # the same step
        {"scenario.task": "dpo"},
        "scenario.task: given 'dpo', allowed: sft, as id says",
    ),
    (
        records.named,
        "traced",
        {"id": "traced/qwen2.5-0.5b/sft/s2048/mb1/ckpt=none"},
        {"id": "traced/qwen2.5-0.5b/sft/s2048/mb1/ckpt=reentrant"},
        "scenario.checkpointing: given 'none', allowed: full, as id says",
    ),
    (records.metric, "held", {}, {"moment": None}, "missing field 'moment': the moment of loading"),
    (records.metric, "gib", {}, {"moment": "x"}, "moment: given 'x', allowed: none, as metric is unknown and not held"),
    (
        records.metric,
        "gib",
        {},
        {"metric": "verdict"},
        "measured_bytes: given 17394617549 with metric verdict, allowed: bytes, or null with metric verdict",
    ),
    (
        records.metric,
        "edge",
        {"verdict": "untested"},
        {"verdict": "failed"},
        "verdict: given 'failed', allowed: failed",
    ),
    (records.origin, "gib", {}, {"quote": None}, "missing field 'quote': the source's own words"),
    (records.origin, "traced", {}, {"metric": "reserved"}, "metric: given 'reserved', allowed: allocated, as class is"),
    (records.origin, "edge", {}, {"machine": None}, "missing field 'machine': where edge was measured"),
    (records.origin, "matmul", {}, {"machine": None, "observed": None}, "missing field 'machine': where rates was"),
    (records.origin, "measured", {}, {"date": None}, "missing field 'date', which a record with a machine has"),
    (
        records.quoted,
        "gib",
        {"measured_bytes": 17448304640},  # 16.25 GiB, which 16.2 may round
        {"measured_bytes": 17448304642 + 1},
        "measured_bytes: given 17448304643, allowed: a figure that quote prints, in GiB; the nearest is 17394617549",
    ),
    (
        records.quoted,
        "gib",
        {"unit": None},  # a record need not name it
        {"unit": "GB or GiB"},
        "unit: given 'GB or GiB', allowed: GiB, in which measured_bytes = 17394617549 is a figure of quote",
    ),
    (
        records.quoted,
        "gb",
        {"unit": "GiB", "measured_bytes": round(21.3 * GiB), "note": "It counts in GiB."},
        {"unit": "GiB", "measured_bytes": round(21.3 * GiB)},
        "unit: given 'GiB', allowed: GB or GiB, as quote says 21.3 GB, or a note that says why it is GiB",
    ),
    (
        records.quoted,
        "gb",
        {"unit": "GB", "quote": "2.940GB (+8.185GB cache", "measured_bytes": 11_125_000_000, "note": "Both added up."},
        {"unit": "GB", "quote": "2.940GB (+8.185GB cache", "measured_bytes": 11_125_000_000, "note": "Both."},
        "measured_bytes: given 11125000000, allowed: a figure that quote prints, in GB; the nearest is 8185000000",
    ),
    (
        records.quoted,
        "gb",
        {
            "unit": "GiB",
            "quote": "64 GB, 65% 66%",
            "measured_bytes": round(0.66 * 64 * GiB),
            "note": "Its share of GiB.",
        },
        {"unit": "GiB", "quote": "64 GB, 65%", "measured_bytes": round(0.66 * 64 * GiB), "note": "A share of GiB."},
        "measured_bytes: given 45354854646, allowed: a figure that quote prints, in GiB; the nearest is 68719476736",
    ),
    (records.quoted, "gib", {}, {"quote": "it fits"}, "quote: given 'it fits', allowed: words that print the figure"),
    (
        records.quoted_rate,
        "gb or gib",
        {"measured_rate": {"unit": "step_seconds", "value": 10.0, "note": "Of 10 micro-steps."}},
        {"measured_rate.value": 10.0},
        "measured_rate.value: given 10, allowed: a figure that its quote prints, or one times or over a number in its "
        "note",
    ),
    (
        records.quoted_stages,
        "gb or gib",
        {
            "quote": "gen 58.5 s, refit 4 s",
            "measured_stages": {"rollout": 58.5, "sync": [4, 58.5], "calibrates": {"sync": "X"}},
        },
        {"quote": "gen 58.5 s, refit 4 s", "measured_stages": {"rollout": 58.5, "sync": [4, 5]}},
        "measured_stages.sync: given 5, allowed: a figure that its quote prints",
    ),
    (
        records.quoted_stages,
        "gb or gib",
        {"quote": "gen 58.5 s", "measured_stages": {"rollout": 58.5, "calibrates": {"rollout": "X"}}},
        {"quote": "gen 58.5 s", "measured_stages": {"rollout": 58.5, "calibrates": {"sync": "X"}}},
        "measured_stages.calibrates: given 'sync', allowed: a stage that has seconds",
    ),
    (
        records.quoted_rate,
        "gb or gib",
        {},
        {"measured_rate.unit": "sequences_per_second"},
        "measured_rate.unit: given 'sequences_per_second', allowed: step_seconds, as quote says 1.0s/it",
    ),
    (
        records.size,
        "measured",
        {"measured_bytes": 80 * GiB},
        {"measured_bytes": 80 * GiB + 1},
        "measured_bytes: given 85899345921, allowed: at most 85899345920, the memory of h100-sxm",
    ),
    (
        records.size,
        "measured",
        {"metric": "reserved", "measured_bytes": 120 * GiB, "scenario.rollout": {"gpu_memory_utilization": 0.5}},
        {"metric": "nvidia-smi", "measured_bytes": 120 * GiB, "scenario.rollout": {"gpu_memory_utilization": 0.5}},
        "measured_bytes: given 128849018880, allowed: at most 85899345920, the memory of h100-sxm",
    ),
    (
        records.size,
        "traced",
        {"measured_bytes": 2**50},
        {"measured_bytes": 16},
        "measured_bytes: given 16, allowed: bytes",
    ),
    (records.parts, "measured", {}, {"observed.allocated_bytes": 1}, "observed.allocated_bytes: given 1, allowed: "),
    (records.parts, "traced", {}, {"observed.components.gradients": 1}, "observed.components: given "),
    (records.parts, "traced", {}, {"observed.phases.step.allocated_bytes": 2**50}, "measured_bytes: given "),
    (
        records.parts,
        "traced",
        {},
        {"observed.phases.step.allocated_bytes": None},
        "missing field 'observed.phases.step.allocated_bytes', or 0",
    ),
    (
        records.allocator,
        "measured",
        {},
        {"observed.reserved_bytes": 1},
        "observed.reserved_bytes: given 1, allowed: at",
    ),
    (
        records.allocator,
        "measured",
        {},
        {"observed.allocator.requested_bytes": None},
        "missing field 'observed.allocator.requested_bytes'",
    ),
    (
        records.allocator,
        "measured",
        {},
        {"observed.context_bytes": None},
        "missing field 'observed.context_bytes', which goes with observed.allocator",
    ),
    (records.outcome, "died", {}, {"verdict": "fits"}, "verdict: given 'fits', allowed: oom, as observed.oom says"),
    (records.outcome, "edge", {}, {"edge.fails_at": 20}, "edge.fails_at: given 20, allowed: above edge.found = 20"),
    (records.outcome, "edge", {}, {"edge.predicted_fits": 500}, "edge.predicted_fits: given 500, allowed: at most "),
    (
        records.outcome,
        "edge",
        {},
        {"scenario.micro_batch": 3},
        "scenario.micro_batch: given 3, allowed: 20, the largest",
    ),
    (
        records.machine,
        "measured",
        {"machine.total_bytes": 85_000_000_000},
        {"machine.total_bytes": 150_000_000_000},
        "machine.total_bytes: given 150000000000, allowed: about 84944093184, the usable memory of h100-sxm",
    ),
    (
        records.machine,
        "measured",
        {"scenario.gpu": "rtx4090"},  # which it can stand in for
        {"scenario.gpu": "h200"},
        "machine.gpu: given 'h100-sxm', allowed: a card with the memory of h200, which scenario.gpu names",
    ),
    (
        records.rates,
        "matmul",
        {},
        {"rates": [{"op": "matmull", "seconds": 1}]},
        "rates[0].op: given 'matmull', allowed: matmul, decode, vllm, copy; did you mean 'matmul'?",
    ),
    (
        records.rates,
        "matmul",
        {"rates": [{"op": "copy device to device", "bytes": 10**9, "seconds": 1, "gbs": 2}]},
        {"rates": [{"op": "copy device to device", "bytes": 1, "seconds": 1}]},
        "missing field 'rates[0].gbs', or 0",
    ),
    (
        records.rates,
        "matmul",
        {},
        {"machine.gpu": "ascend910b"},
        "machine.gpu: given 'ascend910b', allowed: a card of which the catalog has bandwidth and rates",
    ),
    (
        records.rates,
        "matmul",
        {},
        {"rates": [{"op": "matmul", "tokens": 1e4, "inputs": 1e4, "outputs": 1e4, "seconds": 2.0, "tflops": 2.0}]},
        "rates[0].tflops: given 2, allowed: 1, the work over the seconds",
    ),
    (
        records.rates,
        "matmul",
        {},
        {"rates": [{"op": "matmul", "tokens": 1e4, "inputs": 1e4, "outputs": 1e4, "seconds": 1e-3, "tflops": 2e3}]},
        "rates[0].tflops: given 2000, allowed: at most 989, the peak of h200",
    ),
    (
        records.quoted_rate,
        "bytes",
        {"measured_rate.note": "The 250 steps took 0.36219 s each."},
        {"measured_rate.note": "Of the last steps."},
        "measured_rate.value: given 0.12295, allowed: a figure that its quote prints, or one times or over a number in "
        "its note",
    ),
    (
        records.quoted_card,
        "gib",
        {"scenario.gpu": "rtx3090", "note": "gpu=rtx3090: another stands for it"},
        {"scenario.gpu": "rtx3090"},
        "scenario.gpu: given 'rtx3090', allowed: 4090, which quote says, or a note on gpu=",
    ),
    (
        records.quoted_method,
        "gib",
        {"scenario.method": "qlora"},
        {"scenario.method": "full"},
        "scenario.method: given 'full', allowed: lora or qlora, as quote says, or a note on method=",
    ),
    (
        records.phases,
        "measured",
        {},
        {"observed.phases.backward.reserved_bytes": 1},
        "observed.phases.backward.reserved_bytes: given 1, allowed: at least allocated_bytes = 9681076736",
    ),
    (
        records.phases,
        "measured",
        {},
        {"observed.phases.forward.allocated_bytes": 9681076737},
        "observed.allocated_bytes: given 9681076736, allowed: 9681076737, that of the largest of observed.phases",
    ),
    (
        records.device,
        "measured",
        {"observed.limit_bytes": 2**30},
        {"observed.limit_bytes": 2**40},
        "observed.limit_bytes: given 1099511627776, allowed: at most machine.total_bytes = 85017493504",
    ),
    (
        records.device,
        "measured",
        {},
        {"observed.free_before_bytes": 1},
        "observed.free_after_bytes: given 73182412800, allowed: at most free_before_bytes = 1",
    ),
    (
        records.device,
        "measured",
        {},
        {"observed.device_bytes": 1},
        "observed.device_bytes: given 1, allowed: 11835080704, machine.total_bytes less free_after_bytes",
    ),
    (
        records.counted,
        "measured",
        {"observed.parameters": 1, "scenario.method": "lora"},
        {"observed.parameters": 1},
        "observed.parameters: given 1, allowed: 494032768, those of qwen2.5-0.5b",
    ),
    (
        records.first,
        "blind",
        {},
        {"blind.first.low_bytes": 2**50},
        "blind.first.low_bytes: given 1125899906842624, allowed: at most high_bytes = ",
    ),
    (records.first, "blind", {}, {"blind.first.date": "2026-02-31"}, "blind.first.date: given '2026-02-31', allowed: "),
    (records.first, "blind", {}, {"blind.lacks": "a word"}, "blind.lacks: given 'a word', allowed: what is lacking "),
    (
        records.torch,
        "measured",
        {"scenario.versions.torch": "2.11"},
        {"scenario.versions.torch": "2.1"},
        "versions.torch: given '2.11.0+cu130', allowed: 2.1, as scenario.versions.torch",
    ),
    (
        records.machine,
        "measured",
        {},
        {"machine.name": "NVIDIA H200"},
        "machine.name: given 'NVIDIA H200', allowed: a name that machine.words has: one NVIDIA H100",
    ),
    (records.machine, "measured", {}, {"source": "a benchmark"}, "machine.words: given 'one NVIDIA H100"),
    (records.outcome, "died", {}, {"observed.oom": None}, "missing field 'observed.oom': where it ran out of memory"),
    (
        records.outcome,
        "died",
        {},
        {"observed.oom.message": "it broke"},
        "observed.oom.message: given 'it broke', allowed: a message that says out of memory",
    ),
    (records.outcome, "traced", {}, {"verdict": "fits"}, "verdict: given 'fits', allowed: null, as class is traced"),
    (
        records.origin,
        "traced",
        {},
        {"url": "https://github.com/a/b"},
        "url: given 'https://github.com/a/b', allowed: null, as class is traced",
    ),
    (messages.figures, "message", {}, {"free_bytes": 1}, "free_bytes: given 1, allowed: "),
    (messages.card, "message", {"gpu": "rtx3090"}, {"gpu": "h200"}, "gpu: given 'h200', allowed: a card of 23.64 GiB"),
    (messages.processes, "message", {}, {"processes": 2}, "processes: given 2, allowed: 1, which quote lists"),
    (
        messages.release,
        "older message",
        {"torch": "1.13.1+cu117"},
        {"torch": "2.1.0"},
        "torch: given '2.1.0', allowed: a",
    ),
    (
        messages.release,
        "message",
        {"torch": "2.1.0"},
        {"torch": "2.0.1"},
        "torch: given '2.0.1', allowed: 2.1 or later",
    ),
    (messages.release, "message", {}, {"torch": "latest"}, "torch: given 'latest', allowed: a version such as 2.1.0"),
]


@pytest.mark.parametrize(("rule", "name", "within", "beyond", "line"), CASES)
def test_a_rule_refuses_what_it_is_for(
    rule: Rule[Any], name: str, within: dict[str, Any], beyond: dict[str, Any], line: str
) -> None:
    assert said(rule, name, **within) == []
    found = said(rule, name, **beyond)
    assert len(found) == 1 and found[0].startswith(line), found
