"""The part of a model that hears, which a job with images loads, too, though nothing runs it: its tensors alone.

Read in transformers 5.23 `models/gemma4/{configuration,modeling}_gemma4.py`, `Gemma4AudioModel`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sound:
    """A conformer behind two convolutions of `channels`, and a linear to the language model, `inner` wide."""

    hidden: int
    layers: int
    heads: int
    kernel: int
    channels: tuple[int, int]
    out: int
    inner: int

    @property
    def tensors(self) -> Iterable[tuple[str, tuple[tuple[int, ...], int, str]]]:
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
