"""The memory of generation: the KV cache, in vLLM's blocks or as Transformers grows it, and vLLM's other memory.

A rank of vLLM's tensor parallelism holds its share of heads; a key/value head is never split, but copied where there
are fewer of them than ranks. Read in vLLM 0.4.2 to 0.29.0.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, assert_never

from calc.base.ledger import Line
from calc.base.units import GiB, MiB
from calc.memory.host import ROUNDED, HostAllocator
from calc.models.architecture import Architecture, LayerSpec, Tensor, layer_kinds, layer_tensors, tensors

BYTES = 2  # a bf16 number: weights, activations and cache
# vLLM's `block_size` in tokens, and `DEFAULT_VOCAB_PADDING_SIZE` (model_executor/layers/vocab_parallel_embedding.py)
BLOCK, PADDING = 16, 64
# `swap_space` of the V0 engine, for each GPU (engine/arg_utils.py)
SWAP = 4 * GiB
# Assumed for each layer. Published: 13 MiB (Llama 3.2 1B: 0.21 GiB, vllm #11349), 41 MiB (Yi 34B on four GPUs:
# 2.41 GiB, vllm #7553), 23 MiB (Kimi K2.6 on eight: 1.40 GiB, vllm #47654); start-up logs of other models lie
# between 7 and 50.
GRAPHS = 20 * MiB
# Bytes that sampling takes for each logit, read off logs: by sorting, 38 (Llama 3 8B: 1.26 GiB for 256 rows, on one GPU
# and on two, vllm #10511; Qwen2.5 7B: 1.42 GiB, vllm #13882); by a Triton kernel, 12 (vllm #32558); where nothing asks
# for the largest logits, 8 (Llama 3 8B: 1.10 GiB for 1,024 rows, by vLLM 0.24 on an H200).
SORTED, SEARCHED, DRAWN = 38, 12, 8


# The modules that every rank holds whole, beside norms, routers and the biases of what is summed over the ranks
_WHOLE = ("q_a_proj", "kv_a_proj_with_mqa", "f_a_proj", "g_a_proj", "shared_expert_gate", "down_proj_bias")
# The projections of linear attention that vLLM loads in one: of queries, keys, values and output gates, and of both
# gates of the state (models/qwen3_5.py, `packed_modules_mapping`); divided by heads, as the rest is
_MERGED = {"in_proj_qkv": "in_proj_qkvz", "in_proj_z": "in_proj_qkvz", "in_proj_b": "in_proj_ba",
           "in_proj_a": "in_proj_ba"}  # fmt: skip


class Pool(NamedTuple):
    """The blocks of vLLM's cache: `tokens` and `bytes` of one, and the number that a sequence takes for `states`."""

    tokens: int
    bytes: int
    states: int

    def blocks(self, length: int) -> int:
        """The blocks of a sequence of `length` tokens."""
        return -(-length // self.tokens) + self.states


class Share(NamedTuple):
    """A parameter as a rank of vLLM holds it: its name, elements of one, and how many layers have one."""

    name: str
    elements: int
    layers: int


def heads(arch: Architecture, tensor_parallel: int) -> int:
    """Key/value heads of one rank."""
    return max(1, arch.kv_heads // tensor_parallel)


def token_bytes(arch: Architecture, tensor_parallel: int = 1) -> int:
    """Bytes of one token in a rank's cache: a key and a value for each of its heads in every layer.

    With multi-head latent attention it is one latent and the rotary part of the keys, whole on every rank (vLLM 0.7 and
    later). Layers with a sliding window count like the others.
    """
    return BYTES * sum(layers * cached(arch, spec, tensor_parallel) for spec, layers in layer_kinds(arch))


def cached(arch: Architecture, spec: LayerSpec, tensor_parallel: int = 1) -> int:
    """Elements of one token in a rank's cache of a layer of the kind `spec`."""
    if spec.borrows:
        return 0
    arch = arch.at(spec)
    match spec.mixer:
        case "attention" | "both":
            return heads(arch, tensor_parallel) * (arch.head_dim + (arch.value_dim or arch.head_dim))
        case "latent":
            assert arch.mla
            # an indexer's keys are kept in 8 bits, with a scale (vLLM's `DeepseekV32IndexerCache`)
            indexed = (arch.indexer.head_dim + 4) // BYTES if arch.indexer and spec.chooses else 0
            return arch.mla.kv_lora_rank + arch.mla.qk_rope_head_dim + indexed
        case "compressed":  # entries alone, as a window keeps no more than its length; generation is not modelled
            assert arch.compressed
            keys = arch.head_dim + (arch.compressed.indexer.head_dim if spec.pools == "sparse" else 0)
            return keys // arch.compressed.rate(spec.pools) if spec.pools else 0
        case "cross" | "delta" | "lightning" | "ssm" | "conv" | "none":  # generation with images is not modelled
            return 0  # at most a state of fixed size
        case other:
            assert_never(other)


def state_bytes(arch: Architecture, tensor_parallel: int = 1) -> int:
    """Bytes of a sequence's state in one layer that passes one on, on a rank: of the convolution, and of all heads.

    vLLM 0.33 `model_executor/layers/mamba/mamba_utils.py`, `gated_delta_net_state_shape`, `mamba2_state_shape`; the
    state's type is the config's `mamba_ssm_dtype` (`models/config.py`, `Qwen3_5ForConditionalGenerationConfig`) or
    `mamba_ssm_cache_dtype` (Nemotron-H), or the model's.
    """
    if arch.conv:  # `short_conv_state_shape`
        return arch.hidden * (arch.conv.kernel - 1) * BYTES // tensor_parallel
    if arch.lightning:  # `linear_attention_state_shape`, in the model's type
        return arch.heads * arch.head_dim**2 * BYTES // tensor_parallel
    if (d := arch.delta or arch.ssm) is None:
        return 0
    return (d.convolved * (d.kernel - 1) * BYTES + d.state * d.state_bytes) // tensor_parallel


def read_bytes(arch: Architecture, context: float, tensor_parallel: int = 1) -> float:
    """Bytes that a decoding step moves for each of `context` tokens of a sequence: its cache, and states both ways."""
    return token_bytes(arch, tensor_parallel) + 2 * arch.recurrent * state_bytes(arch, tensor_parallel) / context


@lru_cache(maxsize=1024)
def pool(arch: Architecture, tensor_parallel: int = 1) -> Pool:
    """The blocks of a rank's cache.

    With linear attention a block holds either so many tokens or one state, so that it is as many tokens long as a
    state needs, in steps of 16. The layers stand in groups as large as the smallest kind, one of which shares a block's
    memory with each other: a group of attention layers takes a block for its tokens, each group of the others two for
    states, the one at work and the last one that prefix caching keeps (vLLM 0.33 `platforms/interface.py`,
    `_align_hybrid_block_size`; `v1/core/kv_cache_planning.py`, `_get_kv_cache_groups_uniform_page_size`;
    `v1/kv_cache_interface.py`, `MambaSpec.max_memory_usage_bytes`).
    """
    if not arch.recurrent:
        return Pool(BLOCK, BLOCK * token_bytes(arch, tensor_parallel), 0)
    token = BYTES * max(cached(arch, spec, tensor_parallel) for spec, _ in layer_kinds(arch))
    if not token:  # no layer attends: a block is one state
        return Pool(BLOCK, state_bytes(arch, tensor_parallel) * arch.recurrent, 2)
    tokens = BLOCK * max(1, -(-state_bytes(arch, tensor_parallel) // (BLOCK * token)))
    counts = sorted(count for count in (arch.recurrent, arch.attending) if count)
    size = counts[-1] if counts[-1] < 1.5 * counts[0] else counts[0]
    return Pool(tokens, size * tokens * token, 2 * -(-arch.recurrent // size))


def cache(role: str, blocks: int, arch: Architecture, tensor_parallel: int = 1) -> Line:
    """The block pool, allocated whole before the first request."""
    each = pool(arch, tensor_parallel)
    values = {"n": blocks, "s": each.tokens, "b": each.bytes // each.tokens}
    return Line("kv_cache", role, blocks * each.bytes, "n·s·b", values, "kv-cache#blocks")


def slots(role: str, tokens: int, arch: Architecture, tensor_parallel: int = 1) -> Line:
    """SGLang's cache: a slot for each token, allocated whole before the first request."""
    values = {"n": tokens, "b": token_bytes(arch, tensor_parallel)}
    return Line("kv_cache", role, tokens * values["b"], "n·b", values, "kv-cache#sglang")


def kept(role: str, count: int) -> Line:
    """Memory outside PyTorch's allocator that SGLang's process does not give back while it sleeps."""
    return Line("context", role, count, "K", {"K": count}, "kv-cache#sglang", False)


def swap(role: str, arch: Architecture, tensor_parallel: int = 1, pins: HostAllocator = ROUNDED) -> Line:
    """The V0 engine's blocks in host memory, pinned, one buffer for each layer (worker/cache_engine.py)."""
    block = BLOCK * token_bytes(arch, tensor_parallel)
    share = SWAP // block * block // arch.layers if block else 0  # a model that attends to nothing keeps none
    values = {"L": arch.layers, "s": share} | pins.values
    return Line("kv_cache", role, arch.layers * pins.block(share), f"L·{pins.formula('s')}", values, "kv-cache#swap")


@lru_cache(maxsize=1024)
def shares(arch: Architecture, tensor_parallel: int = 1) -> tuple[Share, ...]:
    """The parameters of one rank as vLLM loads them: queries, keys and values in one, gate and up in one.

    Linear layers, experts and the padded vocabulary are divided; norms, routers, latent attention's down projections
    and the biases of what is summed over the ranks are not.
    """
    merged = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"} | _MERGED
    names = arch.names
    if arch.attends:
        merged |= {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
    # a tower's block that nothing reads has the names of the others
    found: dict[tuple[str, LayerSpec | None, int], Share] = {}
    for t, spec in _placed(arch):
        own = arch.at(spec) if spec else arch
        path, _, last = t.name.rpartition(".")
        module = path.rpartition(".")[2] if last in ("weight", "bias") else last
        if module == names.positions:
            elements = t.elements
        elif t.kind in ("embedding", "head"):
            elements = -(-t.shape[0] // PADDING) * PADDING * t.shape[1] // tensor_parallel
        elif t.kind in ("norm", "router", "patches") or module in _WHOLE:
            elements = t.elements
        elif module in ("k_proj", "v_proj") and spec:  # a tower's heads are no groups
            elements = t.elements // own.kv_heads * heads(own, tensor_parallel)
        elif module == names.qkv and arch.fused_qkv:
            rows = arch.head_dim * (arch.heads // tensor_parallel + 2 * heads(arch, tensor_parallel))
            elements = t.elements // t.shape[-1 if arch.transposed else 0] * rows
        elif t.kind == "bias" and module in (names.output, names.down):
            elements = t.elements
        else:
            elements = -(-t.elements // tensor_parallel)
        name = t.name.replace(module, merged.get(module, module))
        key = name, spec, t.count
        before = found[key].elements if key in found else 0
        found[key] = Share(name, before + elements, t.count)
    return tuple(found.values())


def _placed(arch: Architecture) -> list[tuple[Tensor, LayerSpec | None]]:
    """Every parameter tensor with the kind of the layers that it is in, if it is in one."""
    kinds = layer_kinds(arch)
    inside = [(t._replace(count=count), spec) for spec, count in kinds for t in layer_tensors(arch, spec)]
    names = {t.name for t, _ in inside}
    return [*inside, *[(t, None) for t in tensors(arch) if t.name not in names]]


@lru_cache(maxsize=1024)
def weights(role: str, arch: Architecture, tensor_parallel: int = 1) -> Line:
    """A rank's weights in bf16."""
    count = sum(s.elements * s.layers for s in shares(arch, tensor_parallel))
    return Line("weights", role, BYTES * count, "b·P_r", {"b": BYTES, "P_r": count}, "kv-cache#weights")


def backup(role: str, arch: Architecture, tensor_parallel: int = 1, pins: HostAllocator = ROUNDED) -> Line:
    """A rank's weights in pinned host memory while it sleeps, each tensor on its own (device_allocator/cumem.py)."""
    parts = shares(arch, tensor_parallel)
    values = {"p": max(s.elements for s in parts), "P_r": sum(s.elements * s.layers for s in parts)} | pins.values
    count = sum(s.layers * pins.block(BYTES * s.elements) for s in parts)
    return Line("weights", role, count, f"sum of {pins.formula('2·p')}", values, "kv-cache#sleep")


def profile(role: str, arch: Architecture, tokens: int, rows: int, logit_bytes: int, tensor_parallel: int = 1) -> Line:
    """The memory that the profile run takes besides the weights, as serving then does: the larger of two peaks.

    One is an MLP on the most tokens of one step: gate and up, their product, and hidden states: the layer's input,
    the attention's output, the residual, the MLP's output and, with several ranks, its sum. The other is sampling for
    the most sequences, with the hidden states of all tokens.
    """
    h, copies = arch.hidden, 4 if tensor_parallel == 1 else 5
    width = -(-arch.intermediate // tensor_parallel) if arch.dense_layers else 0
    inside = 3 * width
    if arch.experts:
        inside = max(inside, arch.experts_per_token * (3 * -(-arch.moe_intermediate // tensor_parallel) + h))
    values = {"T": tokens, "b": BYTES, "w": inside, "c": copies, "h": h, "a": logit_bytes, "R": rows, "V": arch.vocab}
    mlp = BYTES * tokens * (inside + copies * h)
    sampling = logit_bytes * rows * arch.vocab + BYTES * tokens * h
    formula = "T·b·(w + c·h)" if mlp >= sampling else "a·R·V + T·b·h"
    return Line("temporary", role, max(mlp, sampling), formula, values, "kv-cache#profile")


def graphs(role: str, arch: Architecture) -> Line:
    """CUDA graphs of decoding, captured once for each batch size: assumed, a fixed amount for each layer."""
    values = {"L": arch.layers, "g": GRAPHS}
    return Line("cuda_graphs", role, arch.layers * GRAPHS, "L·g", values, "kv-cache#graphs", False)


def cached_heads(arch: Architecture) -> int:
    """Heads whose keys `DynamicCache` keeps: one for every query head if a model has expanded them before."""
    return arch.kv_heads if arch.grouped else arch.heads


def cached_width(arch: Architecture) -> int:
    """Elements of one token's keys and values in `DynamicCache`, in all layers."""
    if arch.mla:
        return arch.attending * arch.heads * (arch.head_dim + arch.v_dim)
    own = [(spec, count) for spec, count in layer_kinds(arch) if spec.mixer in ("attention", "both")]
    kinds = [(arch.at(spec), count) for spec, count in own if not spec.borrows]
    return sum([count * cached_heads(own) * (own.head_dim + own.v_dim) for own, count in kinds])


def dynamic(role: str, arch: Architecture, tokens: int, b: int) -> Line:
    """Transformers' `DynamicCache`: keys and values of all `tokens`, with latent attention in full width.

    `b` bytes an element, as keys have: rotary cosines make them as wide as the residual stream, and the values, which
    join an empty tensor of the keys' type, too (transformers 5.23 `cache_utils.py`, `DynamicLayer`).
    """
    width, layers = cached_width(arch), arch.attending
    if arch.broad:
        return Line(
            "kv_cache", role, tokens * b * width, "T·b·w", {"T": tokens, "b": b, "w": width}, "kv-cache#dynamic"
        )
    width //= layers or 1
    values = {"T": tokens, "L": layers, "b": b, "w": width}
    return Line("kv_cache", role, tokens * layers * b * width, "T·L·b·w", values, "kv-cache#dynamic")


def states(role: str, arch: Architecture, rows: int, b: int) -> Line:
    """The states that Transformers keeps of `rows` sequences in layers that pass one on.

    Inputs of the convolution in `b` bytes, and a state in fp32 (transformers 5.23 `cache_utils.py`,
    `LinearAttentionLayer`).
    """
    layers = arch.recurrent
    if arch.conv:
        values = {"R": rows, "L": layers, "c": arch.hidden * arch.conv.kernel, "b": b}
        return Line("kv_cache", role, rows * layers * values["c"] * b, "R·L·c·b", values, "kv-cache#states")
    if arch.lightning:  # `MiniMaxCache`: a state in the type of the values
        values = {"R": rows, "L": layers, "s": arch.heads * arch.head_dim**2, "b": b}
        return Line("kv_cache", role, rows * layers * values["s"] * b, "R·L·s·b", values, "kv-cache#states")
    d = arch.delta or arch.ssm
    assert d
    values = {"R": rows, "L": layers, "c": d.convolved * d.kernel, "b": b, "s": d.state}
    count = rows * layers * (d.convolved * d.kernel * b + 4 * d.state)
    return Line("kv_cache", role, count, "R·L·(c·b + 4·s)", values, "kv-cache#states")


def grown(role: str, arch: Architecture, tokens: int, b: int) -> Line:
    """The longer copy of one layer's keys that `torch.cat` makes beside the old one for each new token."""
    kinds = {arch.at(spec) for spec, _ in layer_kinds(arch)}
    width = max([(own.heads if own.mla else cached_heads(own)) * own.head_dim for own in kinds])
    values = {"T": tokens, "b": b, "w": width}
    return Line("temporary", role, tokens * b * width, "T·b·w", values, "kv-cache#dynamic")
