"""The part of a model that hears, which a job of text or images loads, too, though nothing runs it: its tensors alone.

Read in transformers 5.23 `{configuration,modeling}_*.py` of `models/{gemma4,qwen2_5_omni,qwen3_omni_moe,qwen2_audio,
voxtral}`: `Gemma4AudioModel`, `Qwen2_5OmniAudioEncoder`, `Qwen3OmniMoeAudioEncoder`, `Qwen2AudioModel`, `VoxtralModel`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Heard = tuple[str, tuple[tuple[int, ...], int, str]]  # the name of a tensor; its shape, number and kind


@dataclass(frozen=True, slots=True)
class Conformer:
    """A conformer behind two convolutions of `channels`, and a linear to the language model, `inner` wide (Gemma 4)."""

    hidden: int
    layers: int
    heads: int
    kernel: int
    channels: tuple[int, int]
    out: int
    inner: int

    @property
    def tensors(self) -> Iterable[Heard]:
        """The name of each tensor, and its shape, number and kind."""
        h, (first, second) = self.hidden, self.channels
        begin, layer = "audio_tower.subsample_conv_projection", "audio_tower.layers.*"
        for name, shape in ("layer0", (first, 1, 3, 3)), ("layer1", (second, first, 3, 3)):
            yield f"{begin}.{name}.conv.weight", (shape, 1, "patches")
            yield f"{begin}.{name}.norm.weight", (shape[:1], 1, "norm")
        yield f"{begin}.input_proj_linear.weight", ((h, first // 4 * second), 1, "linear")
        for block in "feed_forward1", "feed_forward2":
            yield f"{layer}.{block}.ffw_layer_1.linear.weight", ((4 * h, h), self.layers, "linear")
            yield f"{layer}.{block}.ffw_layer_2.linear.weight", ((h, 4 * h), self.layers, "linear")
            for norm in "pre_layer_norm", "post_layer_norm":
                yield f"{layer}.{block}.{norm}.weight", ((h,), self.layers, "norm")
        yield f"{layer}.self_attn.per_dim_scale", ((h // self.heads,), self.layers, "norm")
        for name in "q_proj.linear", "k_proj.linear", "v_proj.linear", "post.linear", "relative_k_proj":
            yield f"{layer}.self_attn.{name}.weight", ((h, h), self.layers, "linear")
        yield f"{layer}.lconv1d.linear_start.linear.weight", ((2 * h, h), self.layers, "linear")
        yield f"{layer}.lconv1d.linear_end.linear.weight", ((h, h), self.layers, "linear")
        yield f"{layer}.lconv1d.depthwise_conv1d.weight", ((h, 1, self.kernel), self.layers, "convolution")
        for norm in "lconv1d.pre_layer_norm", "lconv1d.conv_norm", "norm_pre_attn", "norm_post_attn", "norm_out":
            yield f"{layer}.{norm}.weight", ((h,), self.layers, "norm")
        yield "audio_tower.output_proj.weight", ((self.out, h), 1, "linear")
        yield "audio_tower.output_proj.bias", ((self.out,), 1, "bias")
        yield "embed_audio.embedding_projection.weight", ((self.inner, self.out), 1, "linear")


@dataclass(frozen=True, slots=True)
class Whisper:
    """Whisper's encoder, over `bins` of a spectrogram, and `linears` that make tokens: name, outputs, inputs, bias.

    Two convolutions over time come first; keys have no bias. With `channels`, three convolutions with so many over time
    and pitch, each of which halves both, and a linear behind them; keys have a bias (Qwen3-Omni). Sines of `positions`
    are a buffer, or (`tabled`) a parameter that is never trained. `marks`: the width of the two tokens around a sound.
    """

    hidden: int
    layers: int
    intermediate: int
    bins: int
    positions: int
    linears: tuple[tuple[str, int, int, bool], ...]
    norm: str = "ln_post"
    channels: int = 0
    tabled: bool = False
    marks: int = 0

    @property
    def tensors(self) -> Iterable[Heard]:
        """The name of each tensor, and its shape, number and kind."""
        h, c = self.hidden, self.channels
        if c:
            for n, inputs in enumerate((1, c, c), 1):
                yield from _biased(f"audio_tower.conv2d{n}", (c, inputs, 3, 3), "patches")
            yield "audio_tower.conv_out.weight", ((h, c * -(-self.bins // 8)), 1, "linear")
        else:
            for n, inputs in enumerate((self.bins, h), 1):
                yield from _biased(f"audio_tower.conv{n}", (h, inputs, 3), "patches")
        if self.marks:
            yield "audio_tower.audio_bos_eos_token.weight", ((2, self.marks), 1, "patches")
        if self.tabled:
            yield "audio_tower.embed_positions.weight", ((self.positions, h), 1, "patches")
        layer = "audio_tower.layers.*"
        for name in "q_proj", "k_proj", "v_proj", "out_proj":
            yield from _biased(f"{layer}.self_attn.{name}", (h, h), "linear", self.layers, name != "k_proj" or c > 0)
        for name, size in ("fc1", (self.intermediate, h)), ("fc2", (h, self.intermediate)):
            yield from _biased(f"{layer}.{name}", size, "linear", self.layers)
        for name in "self_attn_layer_norm", "final_layer_norm":
            yield from _biased(f"{layer}.{name}", (h,), "norm", self.layers)
        yield from _biased(f"audio_tower.{self.norm}", (h,), "norm")
        for name, outputs, inputs, bias in self.linears:
            yield from _biased(name, (outputs, inputs), "linear", 1, bias)


def _biased(name: str, shape: tuple[int, ...], kind: str, count: int = 1, bias: bool = True) -> Iterable[Heard]:
    """A module's weight, and its bias if it has one."""
    yield f"{name}.weight", (shape, count, kind)
    if bias:
        yield f"{name}.bias", (shape[:1], count, "norm" if kind == "norm" else "bias")


Sound = Conformer | Whisper
