"""The real worker on the CPU, with tiny models: every kind of step and rate runs and gives a valid record.

Needs PyTorch, Transformers, PEFT and DeepSpeed: those of the Python that `TORCH_PYTHON` names, or else of this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from calc.base.schema import validator
from calc.models.architecture import parameters
from calc.models.hf_config import from_config
from measurements.bench.__main__ import main
from measurements.bench.record import ROOT, SCHEMA

PYTHON = os.environ.get("TORCH_PYTHON", sys.executable)
if sys.executable == PYTHON:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    pytest.importorskip("deepspeed")
TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
QWEN = {**TINY, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
SUITE = """
defaults: {{model: {tiny}, framework: torch, seq_len: 32, micro_batch: 2}}
cases:
  - {{task: sft, model: {qwen}, checkpointing: full, optimizer_impl: fused}}
  - {{task: sft, precision: autocast, attention: eager}}
  - {{task: sft, precision: fp32, optimizer: sgd-momentum, global_batch: 4, attention: flash}}
  - {{task: sft, optimizer: none}}
  - {{task: sft, method: lora, lora: {{rank: 4, targets: [q_proj, v_proj], dropout: 0.1}}}}
  - {{task: sft, method: lora, checkpointing: full, reentrant: true, optimizer: adafactor}}
  - {{task: sft, gpus: 4, sharding: fsdp2, precision: fsdp-mixed}}
  - {{task: rm, checkpointing: full}}
  - {{task: dpo, each: {{logprob: [log-softmax-fp32, selective, logsumexp]}}}}
  - {{task: dpo, method: lora}}
  - {{task: dpo, roles: {{reference: none}}}}
  - {{task: sft, checkpointing: selective}}
  - {{task: sft, gpus: 4, sharding: zero2, global_batch: 16, method: lora}}
  - {{task: dpo, gpus: 4, sharding: zero3, model: {qwen}, checkpointing: full}}
  - task: ppo
    seq_len: null
    prompt_len: 16
    response_len: 16
    rollout: {{engine: none}}
    each:
      roles:
        - {{critic: none, reference: none, reward: none}}
        - {{actor: none, reference: none, reward: none}}
  - {{task: inference, bench: {{kind: decode, batches: [2], lengths: [16]}}}}
  - {{task: inference, bench: {{kind: matmul, tokens: [4]}}}}
"""


def test_every_kind_of_case_runs(tmp_path: Path) -> None:
    for name, config in (("tiny", TINY), ("qwen", QWEN)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    suite, out = tmp_path / "suite.yaml", tmp_path / "out.jsonl"
    configs = {name: tmp_path / name / "config.json" for name in ("tiny", "qwen")}
    suite.write_text(SUITE.format(**configs))
    assert main([str(suite), "--out", str(out), "--gpu", "rtx4090", "--python", PYTHON]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {record["id"]: record.get("failure") for record in records if record["verdict"] != "untested"} == {}
    assert len(records) == 20
    for record in records[:-2]:
        assert set(record["observed"]["phases"]) >= {"load", "forward"}
        assert record["observed"]["step_seconds"] > 0 and record["measured_bytes"] is None
    for place, config in ((0, QWEN), (1, TINY), (6, TINY), (15, QWEN)):  # the last two are sharded, and counted whole
        assert records[place]["observed"]["parameters"] == parameters(from_config(config))
    assert "flash_attn is not installed" in records[2]["note"] or "note" not in records[2]
    assert {rate["op"].split()[0] for record in records[-2:] for rate in record["rates"]} == {
        "decode",
        "matmul",
        "copy",
    }


# What only a GPU can say is put in its place: the allocator's figures, and an out-of-memory in the second backward.
ON_A_GPU = """
import json, sys, torch
from measurements.bench import meter, steps, worker
GiB, calls = 2**30, []
torch.cuda.mem_get_info = lambda *a: (90 * GiB - len(calls) * GiB, 100 * GiB)
torch.cuda.memory_reserved = lambda *a: 10 * GiB
torch.cuda.reset_peak_memory_stats = lambda *a: calls.append(1)
torch.cuda.synchronize = lambda *a: None
torch.cuda.memory_stats = lambda *a: {
    "allocated_bytes.all.peak": len(calls) * GiB, "reserved_bytes.all.peak": 20 * GiB, "segment.all.peak": 7,
    "num_alloc_retries": 1, "num_ooms": 1,
}
of = meter.Meter.of
def on_a_gpu(self, phase):
    self.cuda, self.at_start = True, 99 * GiB
    return of(self, phase)
meter.Meter.of = on_a_gpu
backward = torch.Tensor.backward
def scarce(self):
    if len(calls) > 5:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.\\nTried to allocate 2.00 GiB.")
    backward(self)
torch.Tensor.backward = scarce
config, scenario = worker.PROBE_CONFIG, worker.PROBE_SCENARIO
print(json.dumps(worker.run({"kind": "step", "scenario": scenario, "configs": {"model": config}, "steps": 3})))
"""


def test_what_the_allocator_says_reaches_the_record() -> None:
    ran = subprocess.run([PYTHON, "-c", ON_A_GPU], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    result, gib = json.loads(ran.stdout), 2**30
    # phases so far: load, forward, backward, step, forward, backward
    assert result["outcome"] == "oom"
    assert result["oom"] == {"phase": "backward", "message": "CUDA out of memory. Tried to allocate 2.00 GiB."}
    observed = result["observed"]
    peaks = {name: phase["allocated_bytes"] // gib for name, phase in observed["phases"].items()}
    assert peaks == {"load": 1, "forward": 5, "backward": 6, "step": 4}
    assert observed["allocated_bytes"] == 6 * gib and observed["reserved_bytes"] == 20 * gib
    assert observed["device_bytes"] == 16 * gib
    assert observed["context_bytes"] == observed["device_bytes"] - 10 * gib
    assert observed["context_at_start_bytes"] == gib
    record = {"id": "x", "source": "x", "url": None, "class": "measured", "metric": "verdict", "measured_bytes": None}
    scenario = {"model": "x", "task": "sft", "gpu": "x"}
    record |= {"verdict": "oom", "confidence": "high", "scenario": scenario}
    validator(SCHEMA)({**record, "observed": {**observed, "oom": result["oom"]}}, "record")
    assert observed["allocator"]["segments"] == 7 and observed["allocator"]["retries"] == 1


# Rank 0 of four under each stage: the states of its quarter alone, and weights that are no numbers.
UNDER_ZERO = """
import json, math, sys, torch
from measurements.bench import model, worker
from measurements.bench.meter import Meter
from measurements.bench.steps import Job
sharding, grad_dtype = sys.argv[1:]
scenario = {**worker.PROBE_SCENARIO, "gpus": 4, "global_batch": 8, "sharding": sharding, "grad_dtype": grad_dtype,
            "precision": "mixed", "optimizer_impl": "fused", "seq_len": 16}
cpu = torch.device("cpu")
job = Job(scenario, {"model": worker.PROBE_CONFIG}, cpu, Meter(cpu))
job.run(3)
(state,) = job.optimizer.state.values()
seen = {name: [tensor.numel(), str(tensor.dtype)] for name, tensor in state.items()}
with torch.no_grad():
    for parameter in job.model.parameters():
        getattr(parameter, "ds_tensor", parameter).fill_(math.nan)
try:
    job.step()
    seen["after"] = "taken"
except RuntimeError as error:
    seen["after"] = str(error)
print(json.dumps({**seen, "parameters": job.parameters, "steps": state["step"].item()}))
"""


@pytest.mark.parametrize(
    ("sharding", "grad_dtype", "after"),
    [("zero1", "fp32", "DeepSpeed skipped the step"), ("zero3", "bf16", "taken")],
)
def test_zero_keeps_one_ranks_states_and_takes_its_steps(sharding: str, grad_dtype: str, after: str) -> None:
    command = [PYTHON, "-c", UNDER_ZERO, sharding, grad_dtype]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout.splitlines()[-1])
    for moment in ("exp_avg", "exp_avg_sq"):
        elements, dtype = seen[moment]
        assert dtype == "torch.float32"
        # a quarter, padded at most to an element a rank and parameter
        assert 0 <= elements - seen["parameters"] / 4 < 32
    assert seen["after"] == after
    assert seen["steps"] == (3 if after != "taken" else 4)


# TRL's own trainers on a small model: the phases in their order, of two steps of two micro-batches.
UNDER_TRL = """
import contextlib, json, sys, torch
from measurements.bench import worker
from measurements.bench.meter import Meter
from measurements.bench.trl import Job
task, method, options = sys.argv[1:]
scenario = {**worker.PROBE_SCENARIO, "task": task, "method": method, "micro_batch": 2, "global_batch": 4,
            "seq_len": 32, "precision": "autocast", "checkpointing": "full", "kernels": "eager",
            "packing": False, "offload": {"activations": False},
            "lora": {"rank": 4, "targets": "all-linear", "dropout": 0.0, "dtype": "fp32"}, **json.loads(options)}
if task == "grpo":
    scenario |= {"prompt_len": 16, "response_len": 16, "rollout": {"n": 2, "batch": 2}}
if task in ("grpo", "kto", "dpo"):
    scenario["roles"] = {"reference": {"model": "probe"}}
cpu = torch.device("cpu")
meter, phases = Meter(cpu), []
of = meter.of
meter.of = lambda phase: phases.append(phase) or of(phase)
job = Job(scenario, {"model": worker.PROBE_CONFIG}, cpu, meter)
seconds = job.run(2)
batch = next(iter(job.trainer.get_train_dataloader()))
rows = [] if task == "grpo" else sorted({tuple(ids.shape) for name, ids in batch.items() if name.endswith("input_ids")})
trained = sum(p.numel() for p in job.trainer.model.parameters() if p.requires_grad)
print(json.dumps({"phases": phases, "steps": len(seconds), "parameters": job.parameters, "trained": trained,
                  "rows": rows, "optimizer": type(job.trainer.optimizer.optimizer).__name__,
                  "reference": getattr(job.trainer, "ref_model", None) is not None}))
"""


def under_trl(task: str, method: str = "full", **options: object) -> dict[str, object]:
    command = [PYTHON, "-c", UNDER_TRL, task, method, json.dumps(options)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    seen: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    return seen


@pytest.mark.parametrize(
    ("task", "method"),
    [("sft", "full"), ("rm", "lora"), ("dpo", "full"), ("kto", "full"), ("simpo", "lora"), ("grpo", "lora")],
)
def test_trl_trains_as_it_was_installed_and_its_phases_are_told_apart(task: str, method: str) -> None:
    """Every row has the scenario's length, so that the trainer neither cuts nor pads it."""
    seen = under_trl(task, method)
    rollout = ["rollout", "score"] if task == "grpo" else []
    assert seen["phases"] == ["load", *[*rollout, "forward", "backward", "forward", "backward", "step"] * 2]
    assert seen["steps"] == 2
    # pairs are rows of one batch; SimPO's collator keeps the prompts, of one token, beside them
    rows = {"grpo": [], "rm": [[4, 32]], "dpo": [[4, 32]], "simpo": [[2, 1], [2, 32]]}
    assert seen["rows"] == rows.get(task, [[2, 32]])
    assert (seen["trained"] == seen["parameters"]) == (method == "full")
    assert seen["reference"] == (task in ("dpo", "kto"))


def test_trls_trainers_get_the_options_of_a_scenario() -> None:
    seen = under_trl("sft", packing=True, optimizer="adafactor", optimizer_impl="single", reentrant=True)
    assert (seen["rows"], seen["optimizer"]) == ([[1, 64]], "Adafactor")  # packed, rows follow one another in one
    assert under_trl("kto", roles={"reference": "none"}, global_batch=2)["steps"] == 2


# torchtune's modules on a small model, two steps of two micro-batches; all that a GPU alone can run is left out.
UNDER_TORCHTUNE = """
import json, sys, torch
from measurements.bench import model, worker
from measurements.bench.meter import Meter
from measurements.bench.torchtune import Job
family, options = sys.argv[1], json.loads(sys.argv[2])
llama = family != "qwen2"
config = {**worker.PROBE_CONFIG, "model_type": family.partition("-")[0], "hidden_size": 256, "vocab_size": 512,
          "tie_word_embeddings": family != "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5,
          "rope_scaling": {"rope_type": "llama3", "factor": 8.0} if llama else None}
scenario = {**worker.PROBE_SCENARIO, "micro_batch": 2, "global_batch": 4, "seq_len": 32, "checkpointing": "full",
            "loss": "chunked", "compile": "none", "optimizer_in_backward": False, "packing": False,
            "offload": {"activations": False}, **options}
cpu = torch.device("cpu")
meter, phases = Meter(cpu), []
of = meter.of
meter.of = lambda phase: phases.append(phase) or of(phase)
try:
    job = Job(scenario, {"model": config}, cpu, meter)
    before = [p.detach().clone() for p in job.model.parameters() if p.requires_grad]
    job.run(2)
except model.NotRun as reason:
    sys.exit(print(json.dumps({"not run": str(reason)})))
after = [p for p in job.model.parameters() if p.requires_grad]
print(json.dumps({"phases": phases, "parameters": job.parameters, "trained": sum(p.numel() for p in after),
                  "dtypes": sorted({str(p.dtype) for p in job.model.parameters()}),
                  "four bits": sum("NF4" in type(p.data).__name__ for p in job.model.parameters()),
                  "moved": any(not torch.equal(old, new) for old, new in zip(before, after))}))
"""
ADAPTERS = {"rank": 4, "targets": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], "dropout": 0.0}


def under_torchtune(family: str, **options: object) -> dict[str, Any]:
    command = [PYTHON, "-c", UNDER_TORCHTUNE, family, json.dumps(options)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    seen: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    if "missing" in seen.get("not run", ""):
        pytest.skip(seen["not run"])
    return seen


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama-tied", {"optimizer_in_backward": True, "global_batch": 2}),
        ("llama", {"packing": True, "loss": "full", "precision": "fp32"}),
        ("qwen2", {"optimizer": "adafactor", "optimizer_impl": "single", "checkpointing": "none"}),
        ("qwen2", {"method": "lora", "lora": {**ADAPTERS, "targets": "all-linear"}}),
        ("llama", {"method": "qlora", "lora": ADAPTERS}),
    ],
)
def test_torchtunes_modules_step_as_its_recipes_do(family: str, options: dict[str, Any]) -> None:
    seen = under_torchtune(family, **options)
    micro_batches = options.get("global_batch", 4) // 2
    assert seen["phases"] == ["load", *[*["forward", "backward"] * micro_batches, "step"] * 2]
    assert seen["moved"]
    assert seen["dtypes"] == [f"torch.{'float32' if options.get('precision') == 'fp32' else 'bfloat16'}"]
    assert (seen["trained"] == seen["parameters"]) == ("method" not in options)
    # all linears of two layers but k_proj, which has no adapter, and it too
    assert seen["four bits"] == (14 if options.get("method") == "qlora" else 0)


def test_a_model_that_torchtune_has_no_builder_for_is_not_run() -> None:
    seen = under_torchtune("mistral")
    assert seen == {"not run": "not run: no builder of torchtune for a mistral with these rotary embeddings"}


# torchtitan's trainer on a small model, two steps, as one of several ranks.
UNDER_TORCHTITAN = """
import json, sys
try:
    import torchtitan.train
except ImportError as error:
    sys.exit(print(json.dumps({"missing": str(error)})))
import torch
from measurements.bench import worker
from measurements.bench.meter import Meter
from measurements.bench.torchtitan import Job
options = json.loads(sys.argv[1])
config = {**worker.PROBE_CONFIG, "hidden_size": 256, "intermediate_size": 768, "vocab_size": 512, "head_dim": 64}
config["model_type"] = options.pop("family", "llama")
scenario = {**worker.PROBE_SCENARIO, "gpus": 8, "micro_batch": 2, "global_batch": 16, "seq_len": 64, "compile": "none",
            "float8": "none", "precision": "fsdp-mixed", "sharding": "fsdp2", "tensor_parallel": 1,
            "context_parallel": 1, "optimizer_in_backward": False, **options}
cpu = torch.device("cpu")
meter, phases = Meter(cpu), []
of = meter.of
meter.of = lambda phase: phases.append(phase) or of(phase)
job = Job(scenario, {"model": config}, cpu, meter)
job.run(2)
shard = sum(p.to_local().numel() for p in job.trainer.model_parts[0].parameters())
print(json.dumps({"phases": phases, "parameters": job.parameters, "shard": shard}))
"""


@pytest.mark.parametrize(
    ("options", "micro_batches"),
    [({"checkpointing": "selective"}, 1), ({"family": "qwen3", "checkpointing": "full", "global_batch": 32}, 2)],
)
def test_torchtitans_trainer_steps_as_one_rank_of_eight(options: dict[str, Any], micro_batches: int) -> None:
    command = [PYTHON, "-c", UNDER_TORCHTITAN, json.dumps(options)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout.splitlines()[-1])
    if "missing" in seen:
        pytest.skip(seen["missing"])
    assert seen["phases"] == ["load", *[*["forward", "backward"] * micro_batches, "step"] * 2]
    assert seen["shard"] * 8 == seen["parameters"]
