"""Attention over compressed keys, read from a config (DeepSeek-V4).

Transformers 5.23 `models/deepseek_v4/configuration_deepseek_v4.py`, `__post_init__`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from calc.models.architecture import ConfigError
from calc.models.mixers import Compressed, Indexer, Pools
from calc.models.reader import Reader

SPARSE, HEAVY, WINDOW = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
POOLS: Mapping[str, Pools] = {WINDOW: "", SPARSE: "sparse", HEAVY: "heavy"}  # the ways of layers, by `layer_types`
RATIOS: Mapping[int, Pools] = {0: "", 4: "sparse", 128: "heavy"}  # and by `compress_ratios`
RATES = {SPARSE: 4, HEAVY: 128}  # positions of an entry
ROTATED = 64 / 512  # the share of a head that rotates, where the config does not say


def pools(read: Reader, layers: int) -> Sequence[Pools]:
    """The way in which each layer makes entries: of the listed types or ratios, else heavy and sparse ones in turn."""
    if (types := read.value("layer_types")) is not None:
        if not isinstance(types, Sequence) or isinstance(types, str) or len(types) < layers:
            raise ConfigError("layer_types", types, f"a list of num_hidden_layers = {layers} names")
        return [POOLS[kind] for kind in types[:layers]]
    if (ratios := read.value("compress_ratios")) is not None:
        listed = isinstance(ratios, Sequence) and len(ratios) >= layers
        if not listed or any(type(ratio) is not int or ratio not in RATIOS for ratio in ratios):
            allowed = f"a list of num_hidden_layers = {layers} times {', '.join(map(str, RATIOS))}"
            raise ConfigError("compress_ratios", ratios, allowed)
        return [RATIOS[ratio] for ratio in ratios[:layers]]
    return [("heavy" if n < 2 or n % 2 == 0 else "sparse") for n in range(layers)]


def compressed(read: Reader, heads: int, head_dim: int) -> Compressed:
    """The sizes of such attention, with `heads` queries of `head_dim` numbers."""
    low, groups, out = (read.integer(name) for name in ("q_lora_rank", "o_groups", "o_lora_rank"))
    window = read.optional("sliding_window") or 0
    index_heads, index_dim, chosen = (read.integer(name) for name in ("index_n_heads", "index_head_dim", "index_topk"))
    indexer = Indexer(index_heads, index_dim, chosen)
    if heads % groups:
        raise ConfigError("o_groups", groups, f"a divisor of num_attention_heads = {heads}")
    for name, only in ("scoring_func", "sqrtsoftplus"), ("n_shared_experts", 1):
        if read.value(name) != only:
            raise ConfigError(name, read.value(name), f"{only}; others are not modelled")
    sparse, heavy = _rates(read)
    return Compressed(low, rotated(read, head_dim), groups, out, window, sparse, heavy, indexer)


def rotated(read: Reader, head_dim: int) -> int:
    """The dimensions of a head that rotate: a share of them, or their number, as older files have it."""
    share, number = read.value("partial_rotary_factor"), read.optional("qk_rope_head_dim")
    if share is None:
        found = number or int(head_dim * ROTATED)
    elif isinstance(share, bool) or not isinstance(share, int | float):
        raise ConfigError("partial_rotary_factor", share, "a number above 0, at most 1")
    else:
        found = int(head_dim * share)
    if not 0 < found <= head_dim or found % 2:
        raise ConfigError("qk_rope_head_dim", found, f"an even number, at most {head_dim}, a head's width")
    return found


def _rates(read: Reader) -> tuple[int, int]:
    """Positions that become one entry, in layers of either kind: older files have them one by one."""
    given = read.value("compress_rates")
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise ConfigError("compress_rates", given, "a mapping of the kinds of layers to numbers")
    found = []
    for kind, own in (SPARSE, "compress_rate_csa"), (HEAVY, "compress_rate_hca"):
        rate = read.optional(own) or given.get(kind, RATES[kind])
        if type(rate) is not int or rate < 1:
            raise ConfigError(f"compress_rates.{kind}", rate, "a positive integer")
        found.append(rate)
    return found[0], found[1]
