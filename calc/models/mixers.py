"""The sizes of what mixes positions in a layer, and of residual streams that are several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention (DeepSeek): queries and keys/values pass through low ranks."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class Indexer(NamedTuple):
    """The part of sparse attention that chooses the keys that a query sees (DeepSeek V3.2), or their entries (V4).

    `passed`: each layer hands the next what it has chosen (GLM-5).
    """

    heads: int
    head_dim: int
    keys: int
    passed: bool = False


Pools = Literal["", "sparse", "heavy"]  # the ways in which layers make entries of positions


class Compressed(NamedTuple):
    """Attention whose one head of keys is its values, too: over a window and over entries made of more (DeepSeek-V4).

    `low`: the rank of the queries' projection; `rope`: dimensions of a head that rotate. `groups` of heads have an
    output projection of their own each, of rank `out`. `sparse` and `heavy`: positions that become one entry, in layers
    of either kind; of the former's entries a query sees those that `indexer` chooses.
    """

    low: int
    rope: int
    groups: int
    out: int
    window: int
    sparse: int
    heavy: int
    indexer: Indexer

    def rate(self, pools: Pools) -> int:
        """Positions that become one entry in a layer that `pools` so."""
        return {"sparse": self.sparse, "heavy": self.heavy}[pools]


class Hyper(NamedTuple):
    """Hyper-connections: each block reads a weighed sum of several residual streams, and all get a share of its output.

    Streams are mixed by a matrix whose rows and columns sum up to 1, after so many `rounds` of dividing each by its sum
    (Sinkhorn and Knopp's; DeepSeek-V4).
    """

    streams: int
    rounds: int

    @property
    def weights(self) -> int:
        """Weights of a block for each token: to read each stream, to write to it, and to mix any two."""
        return (2 + self.streams) * self.streams


@dataclass(frozen=True, slots=True)
class Delta:
    """Gated DeltaNet (Qwen3-Next, Qwen3.5): linear attention, whose state is a matrix for each value head.

    `kernel`: positions that the causal convolution of queries, keys and values sees. `state_bytes`: of an element of
    the state, as an engine that generates keeps it. `joined`: queries, keys, values and output gates are one
    projection, both gates of the state another (Qwen3-Next). `by_head`: under Megatron-core, what belongs to a key head
    lies side by side, and each part is copied out of that (mcore-bridge). `low`: each channel of a key has a decay of
    its own, and the projections of decays and of output gates have this rank (Kimi); 0: a head has one.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    state_bytes: int
    joined: bool = False
    by_head: bool = False
    low: int = 0

    @property
    def keys(self) -> int:
        """The width of queries, and of keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The width of values, of output gates and of the output."""
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution."""
        return 2 * self.keys + self.values

    @property
    def state(self) -> int:
        """Elements of the state of all value heads."""
        return self.value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class Ssm:
    """A state-space mixer (Mamba-2, or Mamba-1), whose state is a matrix for each head.

    `groups`: heads that share B and C are one. `kernel`: positions that the causal convolution of the input, B and C
    sees. `chunk`: positions that are scanned at once. `state_bytes`: of an element of the state, as an engine that
    generates keeps it. `normed`: a norm follows the output's gate. `adapted`: PEFT adapts the output projection, too.
    `rank`: of the time steps, of which each channel has its own, as a head of width 1 (Mamba-1); 0: a head has one.
    With it B and C are those of all channels, and are made, as time steps are, of what the convolution lets through;
    `parts`: all three have norms, with weights or without. `whole`: mamba-ssm runs convolution and scan as one, from
    the input projection on (Mamba, Falcon Mamba).
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    kernel: int
    chunk: int
    state_bytes: int
    normed: bool = True
    adapted: bool = True
    conv_bias: bool = True
    bias: bool = False
    rank: int = 0
    parts: Literal["", "weighed", "bare"] = ""
    whole: bool = False

    @property
    def inner(self) -> int:
        """The width of what is scanned, of its gate and of the output."""
        return self.heads * self.head_dim

    @property
    def grouped(self) -> int:
        """The width of B, and of C."""
        return self.groups * self.state_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.grouped

    @property
    def state(self) -> int:
        """Elements of the state of all heads."""
        return self.inner * self.state_dim


class ShortConv(NamedTuple):
    """A causal convolution of `kernel` positions between two gates (LFM2)."""

    kernel: int
    bias: bool


class Broad(NamedTuple):
    """The heads of layers that attend to all positions, where they differ from those of layers with a window.

    `keys_as_values`: one projection makes both (Gemma 4). `attention_sinks`: see Architecture (MiMo-V2-Flash). `heads`:
    of queries, and `rotary_dim`: see Architecture (Laguna); None: those of layers with a window.
    """

    kv_heads: int
    head_dim: int
    keys_as_values: bool = False
    attention_sinks: bool = False
    heads: int | None = None
    rotary_dim: int | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of Architecture that differ."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class LayerInputs(NamedTuple):
    """Embeddings that each layer has of a token for itself, all of them in one table (Gemma 4).

    `width`: of one layer's; `layers`: of the whole model; `rows`: of the table.
    """

    width: int
    layers: int
    rows: int

    @property
    def columns(self) -> int:
        """The width of the table."""
        return self.layers * self.width


class AltUp(NamedTuple):
    """A residual stream of several, of which each layer computes on the first and predicts and corrects all (Gemma 3n).

    `laurel`: the rank of what is added beside attention.
    """

    streams: int
    laurel: int
