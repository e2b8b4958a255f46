"""The errors of a job that ran out of memory, a row each: what they say, and of whose memory."""

from __future__ import annotations

import re
from typing import NamedTuple

from calc.diagnose.pasted import LONGEST, Line


class Row(NamedTuple):
    """A pattern, what the error means in one sentence, whose memory is short, and the phase if the error tells it.

    `kind`: `gpu`, `host`, or `vllm` for an engine that does not start. `example`: a line as logs have it. The first row
    that is found counts.
    """

    name: str
    pattern: str
    kind: str
    phase: str | None
    means: str
    example: str


ROWS: tuple[Row, ...] = (
    Row(
        "vllm-no-cache",
        r"No available memory for the cache blocks",
        "vllm",
        "load",
        "Weights and profiling use up vLLM's share of the card, so no room is left for its KV cache.",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    ),
    Row(
        "vllm-short-cache",
        r"max seq len \(\d+\) is larger than the maximum number of tokens|to serve at least one request",
        "vllm",
        "load",
        "vLLM's KV cache does not hold one sequence of full length.",
        "max seq len (32768) is larger than the maximum number of tokens that can be stored in KV cache (21504)",
    ),
    Row(
        "vllm-share",
        r"is less than desired GPU memory utilization",
        "vllm",
        "load",
        "When vLLM starts, other processes hold so much of the card that its share is not free.",
        "Free memory on device (39.0/79.15 GiB) on startup is less than desired GPU memory utilization (0.6)",
    ),
    Row(
        "vllm-warming",
        r"occurred when warming up sampler",
        "vllm",
        "load",
        "vLLM runs out of memory while it tries a step with the most sequences that it may run at once.",
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests",
    ),
    Row(
        "sglang-share",
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        "vllm",
        "load",
        "Weights use up SGLang's share of the card, so no room is left for its KV cache.",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    ),
    Row(
        "shared-memory",
        r"insufficient shared memory \(shm\)|/dev/shm\b.*No space left|No space left on device: ?'?/dev/shm",
        "host",
        None,
        "/dev/shm, through which the data loader's workers pass batches, is full: give the container more of it.",
        "Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
    ),
    Row(
        "ray-host",
        r"node running low on memory|killed due to memory pressure|OutOfMemoryError: Task was killed",
        "host",
        None,
        "Ray ends workers when a node's host memory is 95 % full: what is short is host memory, not GPU memory.",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory",
    ),
    Row(
        "host-allocation",
        r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|cudaHostAlloc|Cannot allocate memory|"
        r"std::bad_alloc|^(?:\w+\.)*_?(?:Array)?MemoryError\b",
        "host",
        None,
        "An allocation in host memory failed: pinned buffers and offloaded states need more than the node has.",
        "RuntimeError: [enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory",
    ),
    Row(
        "evaluation",
        r"\bnested_concat\b|\bpreds_host\b",
        "gpu",
        None,
        "Evaluation keeps the logits of its whole data set on the card: set eval_accumulation_steps, or reduce them by "
        "preprocess_logits_for_metrics.",
        "preds_host = logits if preds_host is None else nested_concat(preds_host, logits, padding_index=-100)",
    ),
    Row(
        "cuda",
        r"(?:CUDA|HIP|NPU) out of memory\. Tried|\(GPU \d+; [\d.]+ \w+ total capacity|Tried to allocate [\d.]+ [KMG]iB",
        "gpu",
        None,
        "PyTorch's allocator found no room on the card.",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    ),
    Row(
        "dispatched",
        r"Some modules are dispatched on the CPU or the disk",
        "gpu",
        "load",
        "The weights do not fit on the cards that are free, so some of them would be left in host memory.",
        "ValueError: Some modules are dispatched on the CPU or the disk.",
    ),
    Row(
        "nccl",
        r"cuda failure (?:2|'out of memory')|ncclUnhandledCudaError[^\n]*out of memory|"
        r"unhandled cuda error[^\n]*out of memory",
        "gpu",
        None,
        "NCCL allocates outside PyTorch's allocator and found the card full.",
        "ncclUnhandledCudaError: Call to CUDA function failed. Last error: Cuda failure 2 'out of memory'",
    ),
    Row(
        "cublas",
        r"CUBLAS_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED",
        "gpu",
        None,
        "cuBLAS found no room for its workspace: PyTorch holds all of the card.",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ),
    Row(
        "cuda-error",
        r"(?:CUDA|HIP) error: out of memory|CUDA_ERROR_OUT_OF_MEMORY",
        "gpu",
        None,
        "The driver found the card full; another process may hold it.",
        "RuntimeError: CUDA error: out of memory",
    ),
    Row(
        "out-of-memory",
        r"torch\.(?:cuda\.)?OutOfMemoryError|(?:CUDA|HIP) out of memory|^out of memory",
        "gpu",
        None,
        "The card is full.",
        "torch.OutOfMemoryError",
    ),
    Row(
        "killed",
        # DeepSpeed's launcher calls its handler sigkill_handler, whatever the reason
        r"exit ?code:? -9|exitcode ?: -9|return code = -9|(?-i:SIGKILL)|^Killed\b|\d+ Killed\b|code:? *137|"
        r"status:? 137|signal 9|by signal: Killed|oom[-_]kill|OOM ?Killed|Out of memory: Killed|^srun: .*Out Of Memory|"
        r"using all available RAM",
        "host",
        None,
        "The kernel killed the process, as it does when host memory runs out.",
        "exitcode: -9, Signal 9 (SIGKILL) received by PID 4242",
    ),
    Row(
        "host-in-words",
        r"\b(?:system|cpu|host) (?:ram|memory)\b[^.;]{0,60}"
        r"(?:out[- ]of[- ]memory|\boom\b|exhausted|fills? up|full\b|reaches)|"
        r"\b(?:out of|not enough|insufficient) (?:ram|(?:cpu|host|system) (?:ram|memory))\b|"
        r"(?<!GPU)(?<!显卡)内存.{0,12}(?:占满|不足|不够|溢出|爆|用完|耗尽)",
        "host",
        None,
        "The text says that host memory ran out.",
        "system RAM usage reaches 500 GB",
    ),
    Row(
        "in-words",
        r"(?<![A-Za-z0-9_-])(?:oom|out[- ]?of[- ]?memory)(?![A-Za-z0-9_-])|"
        r"(?:显存|GPU ?内存|显卡内存).{0,4}(?:不足|不够|溢出|爆|炸|占满|用完|耗尽)|"
        r"爆显存",
        "gpu",
        None,
        "The text says that the card's memory ran out.",
        "it runs into OOM",
    ),
)

_COMPILED = tuple((re.compile(row.pattern, re.IGNORECASE), row) for row in ROWS)


class Error(NamedTuple):
    """An error that a text shows, and the line that shows it."""

    row: Row
    line: str


def error(lines: list[Line]) -> Error | None:
    """The most telling error of a text."""
    for pattern, row in _COMPILED:
        for line in lines:
            if "PYTORCH_CUDA_ALLOC_CONF" not in line.text[:20] and pattern.search(line.text[:LONGEST]):
                return Error(row, line.text.strip()[:300])
    return None
