"""The attention kernels that CUDA would choose.

A PyTorch built without CUDA falls back to a kernel that saves other tensors for backward.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.falcon import modeling_falcon
from transformers.models.gpt_neo import modeling_gpt_neo
from transformers.models.gptj import modeling_gptj

aten = torch.ops.aten
calls: Counter[str] = Counter()
# classes of attention, and those in their place with the flash-attn package
PACKAGED: dict[type, type] = {
    modeling_falcon.FalconAttention: modeling_falcon.FalconFlashAttention2,
    modeling_gptj.GPTJAttention: modeling_gptj.GPTJFlashAttention2,
    modeling_gpt_neo.GPTNeoSelfAttention: modeling_gpt_neo.GPTNeoFlashAttention2,
}
in_package = False  # the kernel that runs is the flash-attn package's, an operator of its own


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, causal: bool, scale: float | None) -> Any:
    return aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)[0]


def _additive(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The mask in the mem-efficient kernel's form: additive, in q's dtype, rows aligned, expanded to all heads."""
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=q.dtype, device=q.device)
        mask = torch.where(mask, zero, torch.full((), -torch.inf, dtype=q.dtype, device=q.device))
    if short := -mask.shape[-1] % 8:
        mask = torch.nn.functional.pad(mask, (0, short))[..., : mask.shape[-1]]
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`F.scaled_dot_product_attention` as on an A100: flash if dtype, head size and mask allow, else mem-efficient.

    Grouped heads that flash cannot take, and heads that share a key without saying so, are computed by plain operators
    (math). Shapes are (batch, heads, tokens, head
    size). Source of the rules: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    q, k, v, mask = query, key, value, attn_mask
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        mask = mask.to(dtype) if mask is not None and mask.is_floating_point() else mask
    half = q.dtype in (torch.bfloat16, torch.float16)
    alike = enable_gqa or q.shape[1] == k.shape[1] == v.shape[1]
    if half and alike and mask is None and q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256:
        calls["flash"] += 1
        return _flash(q, k, v, dropout_p, is_causal, scale)
    if alike and not enable_gqa:
        calls["efficient"] += 1
        bias = None if mask is None else _additive(mask, q, k)
        keep_lse = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        op = aten._scaled_dot_product_efficient_attention
        return op(q, k, v, bias, keep_lse, dropout_p, is_causal, scale=scale)[0]
    calls["math"] += 1
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -torch.inf).to(q.dtype)
    op = aten._scaled_dot_product_attention_math
    with torch.autocast("cuda", enabled=False):  # as autocast leaves what a function it casts for calls
        return op(q, k, v, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]


@contextlib.contextmanager
def _package() -> Iterator[None]:
    global in_package
    in_package = True
    try:
        yield
    finally:
        in_package = False


def flash_attention_2(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The flash-attn package's kernel on unpadded rows, which keeps the same tensors as PyTorch's own copy of it."""
    calls["fa2"] += 1
    if query.dtype == torch.float32:
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else module.config.dtype
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    # Multi-head latent attention has narrower values: they are padded to the width of the queries, the output is
    # cropped.
    width = value.shape[-1]
    if short := query.shape[-1] - width:
        value = torch.nn.functional.pad(value, (0, short))
    with _package():
        out = _flash(query, key, value, dropout, True, scaling)
    return out.transpose(1, 2)[..., :width], None


def _flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, dropout: float, **__: Any) -> Any:
    """`_flash_attention_forward` of shapes (batch, tokens, heads, head size); its caller casts fp32 itself."""
    calls["fa2"] += 1
    with _package():
        return _flash(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), dropout, True, None).transpose(1, 2)


def take_package(model: Any) -> None:
    """Make a model that was built without the flash-attn package use it, where some families have another class."""
    model.config._attn_implementation = "flash_attention_2"
    for module in model.modules():
        if (own := PACKAGED.get(type(module))) is not None:
            module.__class__ = own
            module._flash_attn_uses_top_left_mask = False


torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
ALL_ATTENTION_FUNCTIONS.register("flash_attention_2", flash_attention_2)
for module in (modeling_falcon, modeling_gptj, modeling_gpt_neo):
    module._flash_attention_forward = _flash_forward
