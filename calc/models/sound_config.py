"""The part that hears, read from a config's `audio_config`, and the families that have no other beside their layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calc.models.architecture import ConfigError
from calc.models.reader import Reader
from calc.models.sound import Conformer, Sound, Whisper

_WHISPER = dict(d_model=1280, encoder_layers=32, encoder_ffn_dim=5120, num_mel_bins=128, max_source_positions=1500)


@dataclass(frozen=True, slots=True)
class Hearing:
    """The language model of a family that hears and does not see, read in Transformers 5.23.

    `text` is its family where `text_config` names none, `defaults` are those of absent fields of `text_config`. The
    projector reads `patched` of the encoder's rows side by side, one or as many as make the width of an encoder's MLP,
    and has these `linears`, with biases or without.
    """

    text: str
    defaults: Mapping[str, Any]
    linears: tuple[str, ...]
    patched: bool
    biased: bool


HEARING: Mapping[str, Hearing] = {
    "qwen2_audio": Hearing(
        "qwen2", dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32), ("linear",), False, True
    ),
    "voxtral": Hearing(
        "llama",
        dict(vocab_size=131072, hidden_size=3072, intermediate_size=8192, num_hidden_layers=30, num_key_value_heads=8,
             num_attention_heads=32, max_position_embeddings=131072, head_dim=128),
        ("linear_1", "linear_2"), True, False,
    ),
}  # fmt: skip
# what Transformers 5 calls the fields of Whisper's encoder in Voxtral's files (`VoxtralEncoderConfig.attribute_map`)
_RENAMED = {"d_model": "hidden_size", "encoder_layers": "num_hidden_layers", "encoder_ffn_dim": "intermediate_size"}


def sound(given: object, inner: int, *, whisper: bool) -> Sound | None:
    """The part that hears, of an `audio_config`, in front of a language model `inner` wide; None if there is none.

    `whisper`: it is Whisper's encoder as Qwen-Omni has it, and no conformer.
    """
    if given is None:
        return None
    read = _mapping(given)
    return _thinking(read, inner) if whisper else _conformer(read, inner)


def hearing(family: str, given: object, inner: int) -> Whisper:
    """The part that hears of a `family` in `HEARING`, in front of a language model `inner` wide."""
    own = HEARING[family]
    read = _mapping({} if given is None else given)
    sizes = {old: read[new] for old, new in _RENAMED.items() if new in read and old not in read}
    hidden, layers, wide, bins, positions = _sizes({**read, **sizes}, {})
    if own.patched and wide % hidden:
        raise ConfigError("audio_config.intermediate_size", wide, f"a multiple of hidden_size = {hidden}")
    widths = (wide if own.patched else hidden, *[inner] * len(own.linears))
    linears = [
        (f"multi_modal_projector.{name}", inner, inputs, own.biased)
        for name, inputs in zip(own.linears, widths, strict=False)
    ]
    return Whisper(hidden, layers, wide, bins, positions, tuple(linears), norm="layer_norm", tabled=True)


def _mapping(given: object) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError("audio_config", given, "a mapping, the part that hears, or null")
    return given


def _conformer(given: Mapping[str, Any], inner: int) -> Conformer:
    defaults = dict(hidden_size=1024, num_hidden_layers=12, num_attention_heads=8, conv_kernel_size=5,
                    subsampling_conv_channels=(128, 32), output_proj_dims=1536)  # fmt: skip
    read = Reader(given, defaults, {})
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "conv_kernel_size")
    hidden, layers, heads, kernel = (read.integer(name) for name in names)
    channels = read.value("subsampling_conv_channels")
    listed = channels if isinstance(channels, Sequence) and not isinstance(channels, str) else ()
    if len(listed) != 2 or not all(type(n) is int and n > 0 for n in listed):
        raise ConfigError("audio_config.subsampling_conv_channels", listed, "a list of two numbers")
    first, second = (int(str(n)) for n in listed)
    return Conformer(hidden, layers, heads, kernel, (first, second), read.integer("output_proj_dims"), inner)


def _thinking(given: Mapping[str, Any], inner: int) -> Whisper:
    """Whisper's encoder with what makes tokens inside, as Qwen2.5-Omni and Qwen3-Omni have it."""
    hidden, layers, wide, bins, positions, out = _sizes(given, dict(output_dim=3584))
    if out != inner:
        raise ConfigError("audio_config.output_dim", out, f"hidden_size = {inner} of the language model")
    channels = Reader(given, {}, {}).optional("downsample_hidden_size") or 0
    ends = (("proj1", hidden), ("proj2", out)) if channels else (("proj", out),)
    linears = tuple([(f"audio_tower.{name}", outputs, hidden, True) for name, outputs in ends])
    return Whisper(hidden, layers, wide, bins, positions, linears, channels=channels, marks=0 if channels else out)


def _sizes(given: Mapping[str, Any], more: Mapping[str, Any]) -> tuple[int, ...]:
    """Width, layers and MLP of Whisper's encoder, bins, positions, and what `more` says, by default as these say."""
    defaults = {**_WHISPER, **more}
    return tuple([Reader(given, defaults, {}).integer(name) for name in defaults])
