from __future__ import annotations

from dataclasses import replace

import pytest

from calc.base.ledger import Line, Moment, Phase
from calc.base.refusal import Refusal
from calc.base.units import GiB
from calc.engines.rollout import Unstarted
from calc.estimate.host_memory import HostMemory
from calc.estimate.report import deciding, degrees, lengths, needed, roles, rollout, table, text, verdict
from calc.estimate.result import Estimate, Group
from calc.estimate.verdict import odds
from calc.resolve.parse import parse

SCENARIO = parse(
    {
        "model": "llama-3-8b",
        "task": "rm",
        "framework": "openrlhf==0.6.1",
        "gpu": "rtx4090",
        "gpus": 6,
        "method": "lora",
        "lora.rank": 64,
        "sharding": "zero3",
        "micro_batch": 1,
        "seq_len": 8192,
    }
)
WEIGHTS = Line("weights", "actor", 2 * GiB, "2·P/N", {"P": 8_030_261_248, "N": 6}, "weights#zero")
CONTEXT = Line("context", "actor", GiB, "c", {}, "runtime#context", allocated=False)
CHECKPOINTS = Line("checkpoints", "actor", 4 * GiB, "2·T·H·L", {"T": 8192}, "activations#checkpointing")
IDS = Line("temporary", "actor", 512, "8·T", {}, "activations#ids")
LOAD = Phase("load", Moment("model read", (WEIGHTS, CONTEXT)))
BACKWARD = Phase("backward", Moment("layer MLP", (WEIGHTS, CHECKPOINTS, CONTEXT, IDS)))
HOST = Phase(
    "step", Moment("Adam's moments", (Line("optimizer_states", "actor", 1670 * 10**9, "8·P", {}, "host#adam"),))
)
FITS = Estimate(
    scenario=SCENARIO,
    groups=(Group("actor", 6, (LOAD, BACKWARD), 24 * GiB, (6 * GiB, 8 * GiB), 0.97, "fits", None),),
    host_phases=(HOST,),
    host_memory=HostMemory(2048, "catalog", "taken from the catalog: the 2,048 GB of the DGX"),
    verdict="fits",
    verdict_phase=None,
    on_host=False,
    fit_probability=0.97,
    notes=("seq_len 9000 is beyond the 8192 positions of llama-3-8b",),
    catalog_version="0123456789ab",
    calc_version="1.0",
)


def test_the_verdict_names_peak_range_room_card_and_moment() -> None:
    assert verdict(FITS, "GeForce RTX 4090") == (
        f"fits: peak 7.0 GiB (6.0 GiB allocated; needs {needed(FITS.groups[0]) / GiB:.1f} GiB) of 24.0 GiB usable on "
        "each GeForce RTX 4090, in backward (layer MLP); fits with probability 0.97"
    )


def test_what_a_card_needs_fits_on_it_just_so() -> None:
    group = FITS.groups[0]
    assert odds(group.peak.moment.sums, needed(group)) == pytest.approx(0.95, abs=0.005)
    assert needed(group) > group.peak.moment.allocated_bytes


def test_an_out_of_memory_verdict_names_the_phase_it_happens_in_first() -> None:
    # The case of OpenRLHF issue 858: it dies while loading, although a later moment would need more.
    died = replace(FITS, verdict="oom", verdict_phase="load", fit_probability=0.0)
    assert verdict(died, "A40").startswith("out of memory in load: peak 7.0 GiB")


def test_a_host_that_lacks_memory_is_named_and_not_the_gpu() -> None:
    died = replace(FITS, host_memory=HostMemory(1500, "given", "as given"), verdict="oom", verdict_phase="step")
    assert verdict(replace(died, on_host=True), "A800") == (
        "out of host memory in step: 1,670 GB needed of 1,500 GB a node, as given; each A800 needs 7.0 GiB of 24.0 GiB "
        "usable"
    )
    assert "host memory, per node: oom, 1,670 GB needed" in text(died, "A800")


def test_the_verdict_is_about_the_group_with_least_room() -> None:
    (group,) = FITS.groups
    tight = replace(group, name="critic", usable_bytes=7 * GiB, phases=(LOAD,), verdict="tight")
    assert "peak 3.0 GiB" in verdict(replace(FITS, groups=(replace(group, usable_bytes=80 * GiB), tight)), "x")


def test_phases_show_their_moment_and_the_peak_its_lines_largest_first() -> None:
    rows = [line.split() for line in text(FITS, "x").splitlines()]
    assert ["load", "model", "read", "2.00", "3.00"] in rows
    assert ["backward", "layer", "MLP", "6.00", "7.00"] in rows
    order = [row[0] for row in rows if row and row[0] in ("weights", "checkpoints", "context", "temporary")]
    assert order == ["checkpoints", "weights", "context", "temporary"]
    assert "2·P/N  with P = 8,030,261,248, N = 6" in text(FITS, "x")


def test_what_is_there_is_never_shown_as_nothing() -> None:
    (row,) = [line for line in text(FITS, "x").splitlines() if "temporary" in line]
    assert "< 0.01" in row
    assert "0.00" not in row


def test_host_memory_and_notes_follow() -> None:
    report = text(FITS, "x")
    assert (
        report.index("actor at its peak") < report.index("host memory, per node") < report.index("note: seq_len 9000")
    )
    assert "1,555.31" in report
    assert (
        "per node: fits, 1,670 GB needed of 2,048 GB a node, taken from the catalog: the 2,048 GB of the DGX" in report
    )
    assert "host memory" not in text(replace(FITS, host_phases=()), "x")
    assert report.endswith("llama-3-8b\n")


def test_the_job_is_named_with_what_was_filled_in() -> None:
    job = text(FITS, "x").splitlines()[2]
    for word in ("llama-3-8b, rm, lora of rank 64, openrlhf==0.6.1, mixed, sharding zero3, 6 x rtx4090", "8192 tokens"):
        assert word in job


def test_how_gpus_share_a_model_is_named() -> None:
    job = {"model": "llama-3-8b", "task": "sft", "gpu": "h100-sxm", "gpus": 8}
    kept = {"sharding": "fsdp2", "data_parallel_replicate": 2, "reshard_after_forward": "never"}
    assert degrees(parse(job | kept)) == ["groups of shards 2", "gathered weights stay"]
    assert degrees(parse(job | {"gpus": 2, "device_map": "auto"})) == ["layers over GPUs 2"]


def test_a_tables_columns_line_up() -> None:
    lines = list(table(("id", "GiB"), [("a", "1.00"), ("long name", "10.00")], right=(1,)))
    assert lines == ["  id           GiB", "  a           1.00", "  long name  10.00"]


REFUSAL = "rollout.gpu_memory_utilization: given 0.9, allowed: less; vLLM finds less than that free"
UNSTARTED = Unstarted(
    Refusal("rollout.gpu_memory_utilization", 0.9, "less; vLLM finds less than that free"), "too full"
)


def test_an_engine_that_does_not_start_decides_whatever_another_group_needs() -> None:
    (group,) = FITS.groups
    full = replace(group, name="actor", usable_bytes=GiB, verdict="oom", verdict_phase="load")
    serving = replace(group, name="rollout", refusal=UNSTARTED, verdict="oom", verdict_phase="load")
    died = replace(FITS, groups=(full, serving), verdict="oom", verdict_phase="load", notes=(REFUSAL,))
    assert deciding(died) is serving
    assert verdict(died, "A100") == f"vLLM does not start: {REFUSAL}"
    report = text(died, "A100")
    assert "actor: oom on 6 GPUs" in report
    assert "rollout: vLLM does not start on 6 GPUs" in report
    assert report.endswith(f"note: vLLM does not start: {REFUSAL}\n")


def test_a_group_that_serves_says_what_its_cache_holds() -> None:
    (group,) = FITS.groups
    serving = replace(group, name="rollout", cache_tokens=480_896, cache_sequences=1)
    assert (
        "rollout: fits on 6 GPUs, per GPU; KV cache of 480,896 tokens, 1 sequence of full length at once"
        in text(replace(FITS, groups=(serving,)), "x").splitlines()
    )


RL = {"model": "llama-3-8b", "gpu": "a100-80-sxm", "gpus": 8, "prompt_len": 512, "response_len": 1536}


def test_an_rl_job_is_named_by_its_lengths_its_rollout_and_its_roles() -> None:
    served = {"tensor_parallel": 2, "gpu_memory_utilization": 0.6, "n": 8, "batch": 64, "sleep": True}
    s = parse({**RL, "task": "grpo", "framework": "verl==0.4.0", "rollout": served, "roles.reference": {}})
    assert lengths(s) == "prompts of 512 and responses of 1536 tokens"
    assert rollout(s) == (
        "rollout by vLLM 0.8.5, tensor parallel 2, utilization 0.6, sleeps while others work, 8 for each of 64 prompts"
    )
    assert roles(s, {}) == "on all GPUs: actor, reference, vLLM"
    job = text(replace(FITS, scenario=s), "x").splitlines()
    assert job[2].endswith("prompts of 512 and responses of 1536 tokens")
    assert job[3] == f"{rollout(s)}; {roles(s, {})}"


def test_roles_apart_are_named_with_their_models_and_gpus() -> None:
    s = parse(
        {
            **RL,
            "task": "ppo",
            "framework": "openrlhf==0.9.0",
            "placement": "separate",
            "rollout.gpus": 4,
            "roles": {"critic": {"gpus": 2, "model": "llama-3.2-1b"}},
        }
    )
    names = {"llama-3.2-1b": "Llama 3.2 1B"}
    assert roles(s, names) == (
        "GPUs apart: actor on 2, critic (Llama 3.2 1B) on 2, reference with actor, reward with critic, vLLM on 4"
    )


def test_a_job_that_generates_nothing_or_by_transformers_says_so() -> None:
    alone = {**RL, "task": "ppo", "roles": {"critic": "none", "reference": "none", "reward": "none"}, "gpus": 1}
    assert rollout(parse({**alone, "rollout.engine": "none"})) == "no rollout"
    assert rollout(parse({**alone, "rollout.batch": 4})) == "rollout by Transformers, one for each of 4 prompts"
