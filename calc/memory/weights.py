"""Weights: the bytes of the parameters themselves, in the format they are stored in.

NF4 (bitsandbytes 0.45.5 `functional.py:quantize_4bit`): half a byte an element and an fp32 scale for each 64 elements,
or with double quantisation an 8-bit scale, and an fp32 one for each 256 of the 8-bit scales. Only `nn.Linear` weights
are quantised, the head is not. Before Transformers 5 each routed expert is three linears and the router one
(`modeling_mixtral.py` of 4.48.1); since, they are bare parameters, as GPT-OSS's have always been. These are quantised
only where they are asked for by name, each whole (bitsandbytes 0.50.2 `nn/parametrize.py:replace_parameter_4bit`, by
axolotl 0.19 `monkeypatch/moe_quant.py`, which leaves their biases). A checkpoint in four bits may leave some linears in
16: those that `llm_int8_skip_modules` of its config names (Transformers 5.23 `quantizers/base.py:214`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple, assert_never

from calc.base.ledger import Line
from calc.models.architecture import Architecture, Head, Tensor, tensors
from calc.models.sound import Whisper

# routed experts in four bits: none, each of them three linears, or all of a layer's in two parameters
Experts = Literal["", "linears", "whole"]

SCALE = 4 / 64  # bytes of an element's part of an fp32 scale
ROW = 4  # bytes of the scale of a row of a weight in 8 bits
PACKED = 0.5  # bytes of an element without its part of the scales
# bytes of an element with it, by whether scales are quantised themselves
NF4 = {True: PACKED + 1 / 64 + SCALE / 256, False: PACKED + SCALE}


def weights(role: str, count: int, b: float, shards: int = 1, source: str = "weights") -> Line:
    """`count` parameters of `b` bytes over `shards` GPUs."""
    return Line("weights", role, int(b * count / shards), "b·P/N", {"b": b, "P": count, "N": shards}, source)


def adapter(role: str, count: int, b: int, shards: int = 1) -> Line:
    """LoRA's matrices, `count` parameters of `b` bytes over `shards` GPUs."""
    return Line("adapter", role, b * count // shards, "b·A/N", {"b": b, "A": count, "N": shards}, "weights#lora")


def decomposed(role: str, init: Literal["pissa", "olora"], m: int, n: int) -> Line:
    """The decomposition of a weight of `m` by `n` from which an adapter starts, in fp32, on the card.

    PiSSA has the weight, both factors of its singular value decomposition, the product of the adapter's matrices, and
    what is left; OLoRA takes the product off in place (peft 0.14 `tuners/lora/layer.py`, `pissa_init`, `olora_init`).
    What the solvers take besides is left out.
    """
    c = 3 if init == "pissa" else 2
    values = {"c": c, "m": m, "n": n, "k": min(m, n)}
    return Line(
        "temporary", role, 4 * (c * m * n + min(m, n) * (m + n)), "4·(c·m·n + k·(m + n))", values, "weights#init"
    )


def saved(role: str, count: int, b: int, shards: int = 1) -> Line:
    """The copies of modules that PEFT trains whole beside adapters, `count` elements of `b` bytes."""
    return Line("adapter", role, b * count // shards, "b·A_w/N", {"b": b, "A_w": count, "N": shards}, "weights#saved")


def tables(role: str, arch: Architecture, positions: int, b: int) -> Line:
    """The cos and sin of all `positions` that each layer keeps in buffers of its own, in `b` bytes.

    Every GPU has them whole; no checkpoint has them. Which releases do so: `calc.models.releases.SHARE_TABLES`.
    """
    values = {"b": b, "L": arch.layers, "S_max": positions, "d": arch.rotary_dim or arch.head_dim}
    size = 2 * b * values["L"] * values["S_max"] * values["d"]
    return Line("rotary_tables", role, size, "2·b·L·S_max·d", values, "weights#tables")


def masks(role: str, positions: int, b: int) -> Line:
    """Two masks of each two `positions`, with a window and without, in `b` bytes, which the first forward makes.

    Unsloth's Gemma 2 keeps them in the model (unsloth 2024.8 `models/llama.py:684`, `SWA_mask` and `GA_mask`).
    """
    return Line("weights", role, 2 * b * positions**2, "2·b·S_max^2", {"b": b, "S_max": positions}, "weights#tables")


def triangle(role: str, positions: int) -> Line:
    """The mask of all `positions` by all that StarCoder's model has in a buffer, a byte each, though nothing reads it.

    Transformers 5.23 `models/gpt_bigcode/modeling_gpt_bigcode.py`, `GPTBigCodeModel.bias`, as in 4.28.
    """
    return Line("weights", role, positions**2, "S_max^2", {"S_max": positions}, "weights#tables")


def triangles(role: str, arch: Architecture) -> Line:
    """The mask of all positions by all that each layer of GPT-Neo has in a buffer, a byte each.

    Every second has a window in it (transformers 5.23 `models/gpt_neo/modeling_gpt_neo.py`, `GPTNeoSelfAttention`).
    """
    values = {"L": arch.layers, "S_max": arch.max_positions}
    return Line("weights", role, arch.layers * arch.max_positions**2, "L·S_max^2", values, "weights#tables")


def decays(role: str, arch: Architecture, b: int) -> Line:
    """The decays of each head's positions in a block that every layer of lightning attention has in buffers.

    Between each two positions, to the last and from the first (transformers 5.23
    `models/minimax/modeling_minimax.py`, `decay_factors`); every GPU has them whole.
    """
    values = {"b": b, "L": arch.recurrent, "H": arch.heads, "y": arch.lightning}
    size = b * values["L"] * values["H"] * values["y"] * (values["y"] + 2)
    return Line("weights", role, size, "b·L·H·y·(y + 2)", values, "weights#tables")


def sines(role: str, sound: Whisper) -> Line:
    """The sines of Whisper's positions, which its encoder has in a buffer, in fp32.

    Transformers 5.23 `models/qwen2_5_omni/modeling_qwen2_5_omni.py`, `SinusoidsPositionEmbedding`.
    """
    values = {"S_max": sound.positions, "h": sound.hidden}
    return Line("weights", role, 4 * sound.positions * sound.hidden, "4·S_max·h", values, "weights#tables")


def sinusoids(role: str, arch: Architecture) -> Line:
    """GPT-J's sines and cosines of all positions, which each layer has in a buffer, in fp32: one of a pair's two.

    Transformers 5.23 `models/gptj/modeling_gptj.py`, `GPTJAttention.embed_positions`.
    """
    values = {"L": arch.layers, "S_max": arch.max_positions, "d": arch.rotary_dim or arch.head_dim}
    size = 4 * values["L"] * values["S_max"] * values["d"]
    return Line("rotary_tables", role, size, "4·L·S_max·d", values, "weights#tables")


def master(role: str, count: int, b: int, shards: int = 1) -> Line:
    """The fp32 copy of 16-bit weights that the optimizer updates under mixed precision."""
    return Line(
        "master_weights", role, b * count // shards, "b·P_t/N", {"b": b, "P_t": count, "N": shards}, "weights#master"
    )


class EightBits(NamedTuple):
    """Transformer Engine's weights in 8 bits: in so many `layouts`, each of `b` bytes an element.

    A product reads rows, its backward columns: two, for cards before Blackwell, whose products take no other layout,
    and where rows and columns have scales of their own (TransformerEngine d0067d0d `pytorch/module/base.py`,
    `quantize_weight`; `pytorch/utils.py`, `is_non_tn_fp8_gemm_supported`). Modules keep them for all micro batches,
    beside the weights in bf16, or `alone` (`fp8_param_gather`).
    """

    b: float
    layouts: int
    alone: bool


def eight_bits(role: str, count: int, own: EightBits) -> Line:
    """The weights of linears in 8 bits, `count` elements."""
    values = {"b": own.b, "n": own.layouts, "W": count}
    return Line("weights", role, int(own.b * own.layouts * count), "b·n·W", values, "weights#eight-bits")


@lru_cache(maxsize=1024)
def quantised_elements(arch: Architecture, *, experts: Experts = "") -> int:
    """Elements that 4-bit loading quantises: every linear inside the layers, not embeddings, norms or head.

    litgpt's plugin quantises the head, too.
    """
    return sum(t.elements * t.count for t in tensors(arch) if is_quantised(arch, t, experts))


def left_wide(arch: Architecture, total: int, size: float, *, experts: Experts = "", nested: bool = True) -> int:
    """Elements of linears that a checkpoint in NF4 leaves in 16 bits, by the `size` of its files in bytes.

    Its `total` elements are in 16 bits or four, and its files hold what is loaded: packed weights with their scales.
    """
    four = quantised_elements(arch, experts=experts)
    return round((size - NF4[nested] * four - 2 * (total - four)) / (2 - NF4[nested]))


def is_quantised(arch: Architecture, t: Tensor, experts: Experts) -> bool:
    """True if 4-bit loading quantises `t`; routers are linears where experts are."""
    if arch.quantises_head:
        return t.kind in ("linear", "head")
    match experts:
        case "whole":
            return t.kind == "linear" or is_opened(t)
        case "linears":
            apart = t.kind in ("expert", "router") and not arch.experts_input_first
            return t.kind == "linear" or (apart and not t.name.endswith("bias"))
        case "":
            return t.kind == "linear"
        case other:
            assert_never(other)


def quantised(
    role: str,
    arch: Architecture,
    total: int,
    rest_bytes: int,
    shards: int = 1,
    *,
    experts: Experts = "",
    nested: bool = True,
    cut_scales: bool = False,
    wide: int = 0,
) -> Line:
    """A model of `total` elements in NF4: `P_4` of them in four bits, the rest in `rest_bytes`, over `shards` GPUs.

    `nested`: their scales are quantised, too. Scales are no parameter: every GPU has all of them, in the `quant_state`
    that a linear keeps beside its weight (bitsandbytes 0.50.2 `nn/modules.py:393`, :487-501). With `cut_scales` they
    are tensors within the weight, which is cut with them: torchao's NF4Tensor (`dtypes/nf4tensor.py`). `wide` elements
    of linears are left in 16 bits.
    """
    four = quantised_elements(arch, experts=experts) - wide
    if shards == 1 or cut_scales:
        values = {"P_4": four, "P": total, "b": rest_bytes, "n": NF4[nested], "N": shards}
        size, formula = int((NF4[nested] * four + rest_bytes * (total - four)) / shards), "(n·P_4 + b·(P - P_4))/N"
        return Line("weights", role, size, formula, values, "weights#nf4")
    scale = NF4[nested] - PACKED
    values = {"P_4": four, "P": total, "b": rest_bytes, "p": PACKED, "s": scale, "N": shards}
    return Line(
        "weights",
        role,
        int((PACKED * four + rest_bytes * (total - four)) / shards + scale * four),
        "(p·P_4 + b·(P - P_4))/N + s·P_4",
        values,
        "weights#nf4",
    )


def int8(role: str, arch: Architecture, total: int, rest_bytes: int, *, experts: Experts = "") -> Line:
    """A model of `total` elements of which `P_8` are in 8 bits, with an fp32 scale for each of `R` rows.

    bitsandbytes 0.50.2 `nn/modules.py`, `Int8Params`: `CB` and `SCB`. The rest is in `rest_bytes`.
    """
    own = [t for t in tensors(arch) if is_quantised(arch, t, experts)]
    eight = sum([t.elements * t.count for t in own])
    rows = sum([t.elements // t.shape[-1] * t.count for t in own])
    values = {"P_8": eight, "R": rows, "P": total, "b": rest_bytes}
    size = eight + ROW * rows + rest_bytes * (total - eight)
    return Line("weights", role, size, "P_8 + 4·R + b·(P - P_8)", values, "weights#int8")


def dequantised(role: str, count: int, b: int) -> Line:
    """The buffers in which weights in NF4 are dequantised one after another, as large as the largest, `count` elements.

    One has weights in `b` bytes, the other scales in fp32 (`WEIGHT_BUFFER` and `ABSMAX_BUFFER` of unsloth 2025.2.2
    `kernels/utils.py`).
    """
    values = {"b": b, "W": count, "s": SCALE}
    return Line("temporary", role, int((b + SCALE) * count), "(b + s)·W", values, "weights#nf4-buffer")


def opened_experts(role: str, arch: Architecture, b: int) -> Line:
    """The weights of all routed experts in `b` bytes, which `parametrize` has cached and clears no more.

    A forward hook of bitsandbytes clears its cache; PyTorch's early stop leaves a module by an exception, which skips
    such a hook until 0.50.0 (bitsandbytes `nn/parametrize.py`, `always_call=True`).
    """
    count = sum(t.elements * t.count for t in tensors(arch) if is_opened(t))
    return Line("temporary", role, b * count, "b·P_e", {"b": b, "P_e": count}, "weights#nf4")


def is_opened(t: Tensor) -> bool:
    """True if `t` is a parameter of all experts of a layer that is quantised whole."""
    return t.kind == "expert" and not t.name.endswith("_bias")


def stacked_experts(role: str, arch: Architecture, b: int) -> Line:
    """The largest parameter of routed experts in `b` bytes, twice: its parts, as they are joined before four bits.

    Transformers 5.23 `core_model_loading.py`: `MergeModulelist` stacks each projection of a layer's experts,
    `Concatenate` joins gate and up; on-the-fly quantisation loads them one by one.
    """
    most = max([t.elements for t in tensors(arch) if t.kind == "expert"], default=0)
    return Line("temporary", role, 2 * b * most, "2·b·P_e", {"b": b, "P_e": most}, "weights#nf4")


def published(role: str, arch: Architecture, head: Head, b: int) -> Line | None:
    """The table that loads last as it was published, in `b` bytes an element, beside its cast; None if it comes first.

    Behind the layers comes a table of the layers' own inputs (`Gemma3nTextModel` of Transformers), or a head.
    """
    behind = [t.elements for t in tensors(arch, head=head) if t.kind == "head" or "per_layer.weight" in t.name]
    if not behind:
        return None
    return Line("temporary", role, b * behind[-1], "b·P_e", {"b": b, "P_e": behind[-1]}, "weights#loading")


def cast_table(role: str, arch: Architecture, b: int) -> Line:
    """The table of tokens in `b` bytes an element as it was loaded, beside its cast to another type as wide."""
    table = arch.vocab * arch.outer
    return Line("temporary", role, b * table, "b·P_e", {"b": b, "P_e": table}, "weights#loading")


def scales(role: str, arch: Architecture, *, experts: Experts = "", nested: bool = True) -> Line:
    """The scales of a model in NF4, which stay on the GPU where its shards lie on the host."""
    four, scale = quantised_elements(arch, experts=experts), NF4[nested] - PACKED
    return Line("weights", role, int(scale * four), "s·P_4", {"s": scale, "P_4": four}, "weights#nf4")
