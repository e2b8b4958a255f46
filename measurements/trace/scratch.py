"""Scratch memory that a CUDA kernel takes and frees inside one operator, where it is not small; sizes as in ATen."""

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def rounded(n_bytes: int) -> int:
    """Bytes as the CUDA caching allocator hands them out: multiples of 512."""
    return -(-n_bytes // 512) * 512


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _embedding_backward(grad: torch.Tensor, indices: torch.Tensor, num_weights: int, *_: Any) -> int:
    """`embedding_backward_cuda_kernel` (Embedding.cu, EmbeddingBackwardKernel.cu), used above 3072 indices."""
    n, width = indices.numel(), grad.shape[-1]
    if n <= 3072:
        return 0
    segments = min(n, num_weights)
    partial = n // 10 + segments
    ids = 2 * rounded(8 * n) + 3 * rounded(8 * segments) + rounded(8 * partial)
    return ids + rounded(4 * partial * _up(width, 32))


def _flash_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *_: Any) -> int:
    """`mha_bwd` (flash_api.cpp): dq's fp32 accumulator, softmax's d; with grouped heads dk and dv of every head."""
    batch, heads, tokens, size = q.shape
    rows = batch * heads * _up(tokens, 128)
    n = rounded(4 * rows * (_up(size, 32) if size <= 192 else 256)) + rounded(4 * rows)
    if k.shape[1] != heads:
        n += 2 * rounded(q.element_size() * batch * k.shape[2] * heads * size)
    return n


def _efficient_backward(dout: torch.Tensor, q: torch.Tensor, *_: Any) -> int:
    """`_efficient_attention_backward` (attention_backward.cu): delta, and dq's fp32 accumulator in blocks of 128."""
    batch, heads, tokens, size = q.shape
    return rounded(4 * batch * heads * _up(tokens, 32)) + rounded(4 * batch * heads * _up(tokens, 128) * _up(size, 32))


def _logsumexp(x: torch.Tensor, *_: Any) -> int:
    """`logsumexp_out_impl` (ReduceOps.cpp): the exponentials of the whole input."""
    return rounded(x.numel() * x.element_size())


def _softmax_copy(x: torch.Tensor, *_: Any) -> int:
    """The contiguous copy on which softmax kernels run if their input is not contiguous (SoftMax.cu)."""
    return 0 if x.is_contiguous() else rounded(x.numel() * x.element_size())


def _safe_softmax(x: torch.Tensor, *_: Any) -> int:
    """`_safe_softmax` (SoftMax.cpp): the softmax, of which another tensor is made with 0 in masked rows."""
    return rounded(x.numel() * x.element_size())


RULES: dict[Any, Callable[..., int]] = {
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten.logsumexp.default: _logsumexp,
    aten._safe_softmax.default: _safe_softmax,
    aten._softmax.default: _softmax_copy,
    aten._log_softmax.default: _softmax_copy,
}


def scratch(op: Any, args: tuple[Any, ...]) -> int:
    """Bytes of scratch memory that one call of `op` takes on the device while it runs."""
    rule = RULES.get(op)
    return rule(*args) if rule else 0
