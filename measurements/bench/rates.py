"""Hardware rates at the shapes of a model: matrix products, a decoding step, copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

REPEATS, WARM_UP = 20, 3
COPY_BYTES = 2**30
BATCHES, LENGTHS, TOKENS = (1, 8, 32, 128), (512, 2048, 8192), (1, 64, 2048, 8192)


def seconds(work: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> float:
    """Median time of `work`, by CUDA events if there are any."""
    for _ in range(WARM_UP):
        work()
    if device.type != "cuda":
        taken = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median([float(a.elapsed_time(b)) for a, b in pairwise(marks)]) / 1000


def _sizes(config: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """Hidden size, query heads, key-value heads, head size, MLP width of a dense decoder."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv = config.get("num_key_value_heads") or heads
    return hidden, heads, kv, config.get("head_dim") or hidden // heads, config["intermediate_size"]


def matmul(config: Mapping[str, Any], options: Mapping[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """bf16 matrix products (tokens × inputs by inputs × outputs) of each linear shape of the model and of its head."""
    hidden, heads, kv, head, width = _sizes(config)
    shapes = [(hidden, heads * head), (hidden, kv * head), (heads * head, hidden), (hidden, width), (width, hidden)]
    rows = []
    for inputs, outputs in dict.fromkeys([*shapes, (hidden, config["vocab_size"])]):
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device)
        for tokens in options.get("tokens", TOKENS):
            x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device=device)
            taken = seconds(lambda x=x, weight=weight: F.linear(x, weight), device)  # type: ignore[misc]
            rate = 2 * tokens * inputs * outputs / taken / 1e12
            rows.append(
                {
                    "op": "matmul",
                    "tokens": tokens,
                    "inputs": inputs,
                    "outputs": outputs,
                    "seconds": taken,
                    "tflops": rate,
                }
            )
    return rows


def copies(device: torch.device) -> list[dict[str, Any]]:
    """Copies within the device, counting bytes read and written, and each way to the host, pinned or not, in GB/s."""
    size = COPY_BYTES if device.type == "cuda" else 2**20
    here, there = (torch.randint(0, 255, (size,), dtype=torch.uint8, device=device) for _ in range(2))
    rows = [_copy("device to device", here, there, 2, device)]
    for pinned in (True, False) if device.type == "cuda" else (False,):
        host = torch.randint(0, 255, (size,), dtype=torch.uint8, pin_memory=pinned)
        kind = "pinned" if pinned else "pageable"
        rows += [
            _copy(f"{kind} host to device", here, host, 1, device),
            _copy(f"device to {kind} host", host, here, 1, device),
        ]
    return rows


def _copy(op: str, to: torch.Tensor, of: torch.Tensor, moves: int, device: torch.device) -> dict[str, Any]:
    taken = seconds(lambda: to.copy_(of, non_blocking=True), device, 5)
    return {"op": f"copy {op}", "bytes": of.numel(), "seconds": taken, "gbs": moves * of.numel() / taken / 1e9}


class Decoder:
    """One decoding step of a dense Llama-like model in bf16, by plain kernels, with a KV cache that is already full.

    Rotary embeddings are left out: their cost is nothing next to the weights and the cache that a step reads.
    """

    def __init__(self, config: Mapping[str, Any], device: torch.device) -> None:
        hidden, self.heads, self.kv, self.head, self.width = _sizes(config)
        self.q, self.kv_width = self.heads * self.head, self.kv * self.head

        def weight(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device=device) * 0.02

        self.layers = [
            (
                weight(self.q + 2 * self.kv_width, hidden),
                weight(hidden, self.q),
                weight(2 * self.width, hidden),
                weight(hidden, self.width),
            )
            for _ in range(config["num_hidden_layers"])
        ]
        self.embedding, self.out = weight(config["vocab_size"], hidden), weight(config["vocab_size"], hidden)
        self.norm = torch.ones(hidden, dtype=torch.bfloat16, device=device)

    def cache(self, batch: int, length: int) -> torch.Tensor:
        """Keys and values, (layers, 2, batch, kv heads, length, head size)."""
        shape = (len(self.layers), 2, batch, self.kv, length, self.head)
        return torch.zeros(shape, dtype=torch.bfloat16, device=self.norm.device).normal_()

    def step(self, tokens: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """The next token of each row, (batch,)."""
        batch = tokens.shape[0]
        x = self.embedding[tokens]
        for (qkv, o, up, down), (keys, values) in zip(self.layers, cache, strict=True):
            q, k, v = F.linear(self._normal(x), qkv).split((self.q, self.kv_width, self.kv_width), dim=-1)
            keys[:, :, -1], values[:, :, -1] = (t.view(batch, self.kv, self.head) for t in (k, v))
            # query heads that share keys are treated as rows, so that no kernel expands the cache
            grouped = q.view(batch, self.kv, self.heads // self.kv, self.head)
            x = x + F.linear(F.scaled_dot_product_attention(grouped, keys, values).reshape(batch, self.q), o)
            gate, value = F.linear(self._normal(x), up).split(self.width, dim=-1)
            x = x + F.linear(F.silu(gate) * value, down)
        return F.linear(self._normal(x), self.out).argmax(-1)

    def _normal(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.norm.shape, self.norm)


def decode(config: Mapping[str, Any], options: Mapping[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """Seconds and tokens/s of a decoding step by batch and tokens in the cache, from a CUDA graph and launched eagerly.

    A pair whose cache does not fit is left out.
    """
    rows = []
    batches: Sequence[int] = options.get("batches", BATCHES)
    with torch.inference_mode():
        decoder = Decoder(config, device)
        for batch in batches:
            for length in options.get("lengths", LENGTHS):
                try:
                    taken = _step_seconds(decoder, batch, length, device)
                except torch.cuda.OutOfMemoryError:
                    continue
                finally:
                    if device.type == "cuda":
                        torch.cuda.empty_cache()
                row = {"op": "decode", "batch": batch, "kv_len": length, **taken}
                rows.append({**row, "tokens_per_second": batch / taken["seconds"]})
    return rows


def _step_seconds(decoder: Decoder, batch: int, length: int, device: torch.device) -> dict[str, float]:
    cache, tokens = decoder.cache(batch, length), torch.zeros(batch, dtype=torch.long, device=device)
    eager = seconds(lambda: decoder.step(tokens, cache), device, 5)
    if device.type != "cuda":
        return {"seconds": eager}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decoder.step(tokens, cache)
    return {"seconds": seconds(graph.replay, device), "eager_seconds": eager}
