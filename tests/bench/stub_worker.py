"""Stands in for a Python with PyTorch: answers jobs as a worker on a large GPU would, from the scenario alone.

`BENCH_LOG` names a file to which each job is added; `BENCH_LARGEST` is the largest micro_batch·seq_len that runs.
"""

import json
import os
import sys
import time

MACHINE = {
    "device": "cuda",
    "name": "NVIDIA H200",
    "total_bytes": 143156 * 2**20,
    "used_bytes": 2**29,
    "context_bytes": 2**29,
    "capability": "9.0",
    "cores": 8,
    "host_bytes": 2**37,
    "versions": {
        "python": "3.12.3",
        "torch": "2.11.0+cu130",
        "transformers": "5.17.0",
        "cuda": "13.0",
        "driver": "580.1",
    },
}
SEEN = {
    "allocated_bytes": 10 * 2**30,
    "reserved_bytes": 11 * 2**30,
    "device_bytes": 12 * 2**30,
    "context_bytes": 2**30,
    "context_at_start_bytes": 2**29,
    "free_before_bytes": 130 * 2**30,
    "free_after_bytes": 120 * 2**30,
    "phases": {"load": {"allocated_bytes": 2**30, "reserved_bytes": 2**30}},
    "allocator": {"segments": 30, "retries": 0},
}


def answer(job: dict) -> dict:
    if job["kind"] == "probe":
        return {"outcome": "ran", "machine": MACHINE, "observed": {}}
    s = job["scenario"]
    if job["kind"] != "step":
        return {"outcome": "ran", "rates": [{"op": "matmul", "seconds": 0.123456789, "tflops": 700}], "observed": SEEN}
    if s["attention"] == "eager":
        return {"outcome": "failed", "reason": "forward: ValueError: no eager attention today", "observed": SEEN}
    if s["precision"] == "fp32":
        print("a last word", file=sys.stderr)
        sys.exit(3)
    if s["optimizer"] == "sgd":  # a long case, which ends with its parent as the real ones do
        sys.stdin.read()
        sys.exit(1)
    if s["optimizer"] == "sgd-momentum":  # one that hangs
        time.sleep(600)
    if s["micro_batch"] * s["seq_len"] > int(os.environ.get("BENCH_LARGEST", "1000000")):
        oom = {"phase": "backward", "message": "CUDA out of memory. Tried to allocate 2.00 GiB."}
        return {"outcome": "oom", "oom": oom, "observed": SEEN}
    more = {"parameters": 494032768, "steps": job["steps"], "step_seconds": 0.25}
    return {"outcome": "ran", "notes": ["a stub"], "observed": {**SEEN, **more}}


if __name__ == "__main__":
    line = sys.stdin.readline()
    if line.strip():
        given = json.loads(line)
        if "BENCH_LOG" in os.environ:
            job = {"pid": os.getpid(), "kind": given["kind"], "conf": os.environ.get("PYTORCH_ALLOC_CONF")}
            with open(os.environ["BENCH_LOG"], "a") as log:
                print(json.dumps({**job, "limit_bytes": given.get("limit_bytes")}), file=log)
        print("noise on standard error", file=sys.stderr)
        print(json.dumps(answer(given)), flush=True)
