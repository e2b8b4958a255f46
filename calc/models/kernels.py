"""Triton kernels in place of a model's own operations: which of them a library replaces in each family.

Liger's are those of liger-kernel 0.8.5, `transformers/monkey_patch.py`, with the defaults of `apply_liger_kernel_to_*`;
they keep what 0.5.10 kept. What each keeps is written in `calc.memory`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Literal

# norm: keeps its input and a number a row; in place: its gradient is written over the output's. rotation: of queries
# and keys, in place. gate: the MLP's activation and product, which keeps gate and up alone. activation: that of an MLP
# without a gate, which keeps its input alone and returns its type.
Replaced = Literal["norm", "norm in place", "rotation", "gate", "activation"]

SDPA_FLASH_HEAD = 256  # torch sdp_utils.cpp: FlashAttention takes heads up to this size, all equal, not in fp32

_ALL: tuple[Replaced, ...] = ("norm in place", "rotation", "gate")
# a residual stream or a second norm reads the same gradient: `in_place=False`
_APART: tuple[Replaced, ...] = ("norm", "rotation", "gate")
# Routed experts have kernels of their own under Transformers 5, which are not computed; a shared one has the MLP's.
_ROUTED: tuple[Replaced, ...] = ("norm in place", "rotation")
# liger_rotary_pos_emb does not fit them
_UNROTATED: tuple[Replaced, ...] = ("norm", "gate")

LIGER: Mapping[str, tuple[Replaced, ...]] = {
    **dict.fromkeys(("llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "phi3", "granite", "smollm3"), _ALL),
    **dict.fromkeys(("gemma2", "gemma3_text", "olmo2", "olmo3", "exaone4"), _APART),
    **dict.fromkeys(("mixtral", "qwen3_moe", "gpt_oss"), _ROUTED),
    "glm4": ("norm", "gate"),
    **dict.fromkeys(("glm4v", "glm4v_moe"), ("norm in place", "gate")),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), ("norm in place", "gate")),
    # Qwen3.5's and Qwen3-Next's gated norms of delta rules stay as they are
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gemma4_text", "gemma4", "qwen3_5", "qwen3_5_moe"),
        _UNROTATED,
    ),
    # around a vision tower; the language model of InternVL gets what its own family does
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "internvl"), _ALL),
    "gemma3": _APART,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), _ROUTED),
}
# The blocks of vision towers: `_patch_layer_norm_module` keeps what PyTorch's layer norm does, and
# `liger_rotary_pos_emb_vision` (Qwen3-VL) casts to fp32 as Transformers does. Their projectors are left alone.
LIGER_TOWERS: Mapping[str, tuple[Replaced, ...]] = {
    "qwen2_5_vl": ("norm in place",),
    **dict.fromkeys(("glm4v", "glm4v_moe"), ("norm in place", "gate")),
}
# `_xielu_cuda` of github.com/nickjbrowning/XIELU, in which Transformers runs `XIELUActivation` where it is installed
XIELU: Mapping[str, tuple[Replaced, ...]] = {"apertus": ("activation",)}
# The plugin of fms-acceleration for fused operations and kernels (0.3 to 0.7), with `fast_rms_layernorm` and
# `fast_rope_embeddings` (fms_acceleration_foak `models/*.py`, `kernels/unsloth/{rms_layernorm,rope_embedding}.py`): a
# norm keeps its input and a number a row, and its gradient and a rotation's are written over the output's.
FOAK: Mapping[str, tuple[Replaced, ...]] = dict.fromkeys(
    ("llama", "mistral", "mixtral", "granite"), ("norm in place", "rotation")
)
# NeMo Automodel's own models, whose norms are compiled in fp32 by default (`BackendConfig.rms_norm` of 36044ad3d
# `components/models/common/utils.py`, `_float32_rms_norm_fwd`); a compiled norm keeps its input and a number a row.
# Rotation, in Transformer Engine's kernel where that is installed, keeps what Transformers' does, as does the gate.
AUTOMODEL: Mapping[str, tuple[Replaced, ...]] = dict.fromkeys(("llama", "qwen2"), ("norm",))
LIBRARIES: Mapping[str, Mapping[str, tuple[Replaced, ...]]] = {
    "eager": {},
    "liger": LIGER,
    "foak": FOAK,
    "automodel": AUTOMODEL,
    "xielu": XIELU,
}


@cache
def replaced(library: str, family: str) -> frozenset[Replaced]:
    """The operations that a library's kernels take over in a family, none where it does not know the family."""
    return frozenset(LIBRARIES[library].get(family, ()))


def replaced_in_tower(family: str, around: frozenset[Replaced]) -> frozenset[Replaced]:
    """The operations that are taken over in the blocks of a family's vision tower, where `around` are in its layers."""
    return around and frozenset(LIGER_TOWERS.get(family, ()))
