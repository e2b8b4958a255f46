"""One case in a process of its own: a job as a line of JSON in, its result as a line out. It imports nothing of `calc`.

Standard input stays open while the case runs; when it ends, so does the process, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

LIBRARIES = (
    "torch", "transformers", "peft", "bitsandbytes", "flash-attn", "accelerate", "deepspeed", "trl", "torchtune",
    "torchtitan", "torchao", "liger-kernel", "vllm",
)  # fmt: skip
PROBE_CONFIG = {
    "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 1024, "vocab_size": 4096, "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}  # fmt: skip
PROBE_SCENARIO = {
    "model": "probe", "task": "sft", "gpus": 1, "method": "full", "precision": "bf16", "optimizer": "adamw",
    "optimizer_impl": "foreach", "sharding": "none", "checkpointing": "none", "reentrant": False, "attention": "sdpa",
    "micro_batch": 1, "global_batch": 1, "seq_len": 256, "roles": {}, "logprob": "selective",
}  # fmt: skip


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a job: `outcome` ran, oom or failed, what was observed, and the reason if it did not run."""
    import torch

    from .meter import Meter

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    meter = Meter(device)
    if job.get("limit_bytes") and meter.cuda:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job["limit_bytes"] / total))
    result: dict[str, Any] = {"outcome": "ran", "notes": []}
    try:
        result |= _KINDS[job["kind"]](job, device, meter)
    except Exception as error:
        line = _line(error)
        if isinstance(error, torch.cuda.OutOfMemoryError) or "out of memory" in line or "ALLOC_FAILED" in line:
            result |= {"outcome": "oom", "oom": {"phase": meter.phase, "message": line}}
        else:
            named = type(error).__name__ != "NotRun"
            result |= {
                "outcome": "failed",
                "reason": f"{meter.phase}: {type(error).__name__}: {line}" if named else line,
            }
    return {**result, "observed": {**meter.observed(), **result.get("observed", {})}}


def _line(error: BaseException) -> str:
    """The error's message on one line."""
    return " ".join(str(error).split())[:1000] or type(error).__name__


def _steps(job: Mapping[str, Any], device: Any, meter: Any) -> dict[str, Any]:
    from .steps import WARM_UP

    work = _module().Job(job["scenario"], job["configs"], device, meter)
    seconds = work.run(job["steps"])
    timed = seconds[WARM_UP:]
    return {
        "notes": work.notes,
        "observed": {
            "parameters": work.parameters,
            "steps": len(seconds),
            "step_seconds": round(statistics.median(timed), 6) if timed else None,
        },
    }


def _module() -> Any:
    """The module that runs steps in this process: `steps`, or the one that the environment names."""
    return importlib.import_module(f".{os.environ.get('BENCH_STEPS', 'steps')}", __package__)


def _decode(job: Mapping[str, Any], device: Any, meter: Any) -> dict[str, Any]:
    from .rates import decode

    with meter.of("forward"):
        return {"rates": decode(job["configs"]["model"], job["options"], device)}


def _matmul(job: Mapping[str, Any], device: Any, meter: Any) -> dict[str, Any]:
    from .rates import copies, matmul

    with meter.of("forward"):
        return {"rates": [*matmul(job["configs"]["model"], job["options"], device), *copies(device)]}


def _serve(job: Mapping[str, Any], device: Any, meter: Any) -> dict[str, Any]:
    from .serving import serve

    return {"rates": serve(job["configs"]["model"], job["options"])}


def _probe(job: Mapping[str, Any], device: Any, meter: Any) -> dict[str, Any]:
    """The machine, with its CUDA context measured after a small job of the same kernels has run."""
    import torch

    from .steps import Job

    Job(PROBE_SCENARIO, {"model": PROBE_CONFIG}, device, meter).run(2)
    seen: dict[str, Any] = {"device": device.type, "cores": os.cpu_count(), "versions": versions()}
    seen["host_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not meter.cuda:
        return {"machine": {**seen, "name": "CPU"}}
    properties = torch.cuda.get_device_properties(device)
    observed = meter.observed()
    return {
        "machine": {
            **seen,
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "total_bytes": int(torch.cuda.mem_get_info()[1]),
            "used_bytes": observed["context_at_start_bytes"],
            "context_bytes": observed["context_bytes"],
        }
    }


_KINDS = {"step": _steps, "decode": _decode, "matmul": _matmul, "serve": _serve, "probe": _probe}


def versions() -> dict[str, str]:
    """Versions of the installed libraries, by name; missing ones are left out."""
    import torch

    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        driver = []
    return {**found, "driver": driver[0]} if driver else found


def _leave_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def main() -> None:
    """Import first, then wait for the job, so that a process can be made ready while another one runs."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to standard error
    warnings.filterwarnings("ignore")
    with contextlib.suppress(ImportError):  # a missing library is reported when it is asked for
        import transformers.modeling_utils  # noqa: F401

        _module()

    line = sys.stdin.readline()
    if line.strip():
        threading.Thread(target=_leave_with_parent, daemon=True).start()
        print(json.dumps(run(json.loads(line))), file=answer, flush=True)
    os._exit(0)  # nothing is left to tidy up, and CUDA would take its time over it


if __name__ == "__main__":
    main()
