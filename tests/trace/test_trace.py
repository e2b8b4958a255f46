"""The tracer counts what a hand counts and a real allocator sees, and gives the stored records again, to the byte.

Needs the packages of `requirements/trace.txt`: those of the Python that `TORCH_PYTHON` names, or else of this one
(`make trace-check`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PYTHON = os.environ.get("TORCH_PYTHON", sys.executable)
if sys.executable == PYTHON:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    pytest.importorskip("deepspeed")
ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
MIB = 2**20
# One a kind: tied embeddings, a scalar head, a reference model, autocast with LoRA, FSDP 2, layers run again in part,
# DeepSpeed, DTensor, a ring, stages, Transformers' Trainer with four bits and with FSDP's no_sync, FSDP 1's adapters,
# images.
CASES = (
    "traced/qwen2.5-0.5b/sft/s512/mb4",
    "traced/qwen2.5-1.5b/rm/s1024/mb4",
    "traced/qwen2.5-0.5b/dpo/s1024/mb1",
    "traced/qwen2.5-1.5b/sft/s1024/mb4/prec=autocast/lora_r=16",
    "traced/llama-3-8b/sft/s4096/mb1/ckpt=full/prec=mp/fsdp=8",
    "traced/llama-3.2-1b/rm/s4096/mb2/ckpt=selective",
    "traced/llama-3.2-1b/sft/s2048/mb1/ckpt=full/attn=fa2/prec=mixed/zero=2/ranks=8",
    "traced/llama-3.2-1b/sft/s2048/mb1/ckpt=full/attn=fa2/prec=mixed/zero=3/ranks=8",
    "traced/llama-3-8b/sft/s2048/mb2/ckpt=full/attn=fa2/tp=2",
    "traced/llama-3-8b/sft/s2048/mb2/attn=fa2/prec=mp/fsdp=8/tp=8/sequence_parallel=True",
    "traced/llama-3.2-1b/sft/s8192/mb1/fsdp=2/cp=2",
    "traced/tinyllama-1.1b/sft/s2048/mb1/reshard=no/pp=4/grad_accum=4",
    "traced/llama-3.2-1b/sft/s2048/mb1/lora_r=16/lora_dropout=0.05/lora_dtype=fp32/four_bits=True/trainer=True",
    "traced/qwen2.5-1.5b/rm/s1024/mb1/ckpt=full/prec=mp/fsdp=4/grad_accum=2/trainer=True",
    "traced/qwen2.5-1.5b/sft/s1024/mb1/ckpt=full/optim_impl=foreach/lora_r=8/lora_targets=qv/lora_dropout=0.05/"
    "lora_units=layer/fsdp=2/flat=True/no_sync=True/grad_accum=3",
    "traced/qwen2.5-0.5b/sft/s64/mb1/lora_r=256/lora_targets=q_proj+v_proj+embed_tokens/freeze=vision",
    "traced/qwen3-vl-2b/sft/s1100/mb1/ckpt=full/optim=sgd/optim_impl=foreach/images=1/height=1024/width=1024",
)


def run(*command: str | Path, given: str = "") -> subprocess.CompletedProcess[str]:
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [PYTHON, *command], input=given, capture_output=True, text=True, cwd=ROOT, timeout=540, env=path
    )


def answers(*command: str | Path, given: str = "") -> list:
    done = run(*command, given=given)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_two_layers_counted_by_hand() -> None:
    """256 rows of 1024 fp32 numbers through weights of 1024 × 1024 and 256 × 1024, ReLU between them, AdamW."""
    resident = (4 + 1 + 1 + 2 * (4 + 1)) * MIB  # the weights, the rows, two moments of the weights
    steps = 2 * 512  # fused AdamW counts steps on the device, 4 bytes a weight; the smallest block has 512
    loss = 2 * 512  # the loss, and the one that backward starts with
    forward = (1 + 1) * MIB  # the ReLU's input and output
    # the first layer's gradient comes last, beside that of its output and that of the second layer
    backward = (4 + 1 + 1) * MIB + loss
    gradients = (4 + 1) * MIB
    assert answers(HERE / "toy.py", "fused") == [
        {
            "forward": resident + steps + forward,
            "backward": resident + steps + backward,
            "optim": resident + steps + gradients,
        }
    ]
    # foreach takes a copy of all weights' size, the square roots of the second moments; its counters are on the host
    assert answers(HERE / "toy.py", "foreach") == [
        {
            "forward": resident + forward,
            "backward": resident + backward,
            "optim": resident + gradients + (4 + 1) * MIB,
        }
    ]


SMALL = {
    "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "vocab_size": 2048, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip
FAMILIES = {
    "llama": {"hidden_act": "silu", "tie_word_embeddings": False},
    "qwen2": {"hidden_act": "silu", "tie_word_embeddings": True},
    "qwen3": {"hidden_act": "silu", "tie_word_embeddings": False},
    "gemma2": {"tie_word_embeddings": True, "query_pre_attn_scalar": 64, "sliding_window": 128},
    "phi3": {"hidden_act": "silu", "tie_word_embeddings": False},
}
STEPS = (
    *({"model": family, "task": "sft"} for family in FAMILIES),
    {"model": "llama", "task": "rm"},
    {"model": "qwen2", "task": "dpo", "ckpt": "full"},
    {"model": "gemma2", "task": "dpo"},
    {"model": "qwen3", "task": "ppo-actor"},
    {"model": "phi3", "task": "ppo-critic", "ckpt": "full"},
    {"model": "qwen3", "task": "sft", "lora_r": 8},
    {"model": "gemma2", "task": "sft", "ckpt": "full", "grad_accum": 2},
    {"model": "llama", "task": "rm", "ckpt": "selective"},
    {"model": "qwen2", "task": "rm", "ckpt": "selective", "lora_r": 8},
    {"model": "llama", "task": "sft", "seq": 64, "mb": 1, "optim_impl": "foreach"},
    {"model": "qwen2", "task": "sft", "seq": 64, "mb": 1, "optim_impl": "single"},
)


def test_real_steps_take_what_their_traces_say(tmp_path: Path) -> None:
    """Small models on the CPU: the same step with real tensors, by the events of PyTorch's own allocator.

    What differs is that the CUDA allocator rounds up to 512 bytes. Dropout, whose mask has four bytes on the CPU and
    one on a GPU, and kernels that only a GPU has stay outside.
    """
    for family, config in FAMILIES.items():
        (tmp_path / f"{family}.json").write_text(json.dumps({**SMALL, "model_type": family, **config}))
    cases = [
        {"seq": 256, "mb": 2, "prec": "fp32", "attn": "eager", **step, "model": str(tmp_path / f"{step['model']}.json")}
        for step in STEPS
    ]
    given = "".join(json.dumps(case) + "\n" for case in cases)
    real = answers(HERE / "real.py", given=given)
    traced = [
        record["total_peak_bytes"] - record["resident_before_step_bytes"]
        for record in answers("-m", "measurements.trace", "--batch", "-", given=given)
    ]
    assert traced == [pytest.approx(taken, rel=0.0005) for taken in real]


def stored() -> dict[str, dict]:
    lines = (ROOT / "measurements" / "traced.jsonl").read_text("utf-8").splitlines()
    return {record["id"]: record for record in map(json.loads, lines)}


@pytest.mark.parametrize("half", range(2))
def test_stored_records_are_traced_again_to_the_byte(half: int) -> None:
    records, cases = stored(), CASES[half::2]
    batch = "".join(json.dumps(records[case]["scenario"]) + "\n" for case in cases)
    peaks = [answer["total_peak_bytes"] for answer in answers("-m", "measurements.trace", "--batch", "-", given=batch)]
    assert peaks == [records[case]["measured_bytes"] for case in cases]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"optimizer": "lion"}, "optimizer: 'lion' cannot be traced; allowed: adamw, sgd, none"),
        (
            {"method": "qlora", "double_quantization": False},
            "double_quantization: false cannot be traced; allowed: true",
        ),
        ({"sharding": "zero2"}, "versions.deepspeed: None cannot be traced; allowed: "),
    ],
)
def test_a_scenario_that_cannot_be_traced_is_one_line(fields: dict, complaint: str) -> None:
    """The field is named, and what it may be."""
    done = run("-m", "measurements.trace", "-", given=json.dumps({"model": "llama-3-8b", "task": "sft", **fields}))
    assert done.returncode == 2
    assert done.stderr.startswith(complaint)
    assert done.stderr.count("\n") == 1
