"""The tracer gives the stored records again, to the byte: it and they cannot drift apart unseen.

Needs PyTorch, Transformers and PEFT in the versions of `measurements/trace/requirements.in`: those of the Python that
`TORCH_PYTHON` names, or else of this one (`make torch-check TORCH=…`).
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
ROOT = Path(__file__).parents[2]
CASES = (
    "traced/qwen2.5-0.5b/sft/s512/mb4",
    "traced/qwen2.5-1.5b/rm/s1024/mb4",
    "traced/qwen2.5-0.5b/dpo/s1024/mb1",
    "traced/qwen2.5-1.5b/sft/s1024/mb4/prec=autocast/lora_r=16",
    "traced/llama-3-8b/sft/s4096/mb1/ckpt=full/prec=mp/fsdp=8",
)


def stored() -> dict[str, dict[str, object]]:
    lines = (ROOT / "measurements" / "traced.jsonl").read_text("utf-8").splitlines()
    return {record["id"]: record for record in map(json.loads, lines)}


def test_stored_records_are_traced_again_to_the_byte() -> None:
    """One case a kind: tied embeddings, a scalar head, a reference model, autocast with LoRA, FSDP 2."""
    records = stored()
    batch = "".join(json.dumps(records[case]["scenario"]) + "\n" for case in CASES)
    done = subprocess.run(
        [PYTHON, "-m", "measurements.trace", "--batch", "-"],
        input=batch,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=540,
        check=True,
    )
    peaks = [json.loads(line)["total_peak_bytes"] for line in done.stdout.splitlines()]
    assert peaks == [records[case]["measured_bytes"] for case in CASES]


def test_a_scenario_that_cannot_be_traced_is_one_line() -> None:
    """DeepSpeed's partitioning is not followed; the field is named."""
    scenario = json.dumps({"model": "llama-3-8b", "task": "sft", "sharding": "zero2"})
    done = subprocess.run(
        [PYTHON, "-m", "measurements.trace", "-"], input=scenario, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2
    assert done.stderr.startswith("sharding: 'zero2' cannot be traced")
    assert done.stderr.count("\n") == 1
