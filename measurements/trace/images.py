"""Images before a model's vision tower, whose Transformers code looks into tensors that are fake here.

Grids and lengths are numpy's arrays, which the code reads as it reads tensors; what it would compute of them on the
device is made by its shape alone.
"""

import math
import re
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import LlavaNextProcessor, LlavaOnevisionProcessor
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

from .case import Case
from .reading import CaseError

DEVICE = torch.device("cuda")
SPLIT = torch.Tensor.split
MODULES = (
    "qwen2_vl",
    "qwen2_5_omni",
    "qwen2_5_vl",
    "qwen3_omni_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "gemma3",
    "gemma4",
    "internvl",
    "glm4v",
    "glm4v_moe",
    "idefics3",
    "smolvlm",
    "mistral3",
    "paligemma",
    "llama4",
    "llava",
    "llava_next",
    "llava_onevision",
    "aya_vision",
    "paddleocr_vl",
    "glm_ocr",
    "lighton_ocr",
)
SOUND = re.compile(r"\b(audio_tower|embed_audio)\.")  # it is loaded, and nothing runs it
HEARING = ("qwen2_audio", "voxtral")  # whose projector belongs to what hears
VISION = re.compile(
    r"\b(?:(visual|vision_tower|vision_model|vision_encoder|multi_modal_projector|vision_projection|projector|connector|"
    r"embed_vision|audio_tower|embed_audio)\.|image_newline$)"
)
PROJECTOR = re.compile(
    r"\b(?:(merger|merger_list|deepstack_merger_list|multi_modal_projector|vision_projection|projector|connector|"
    r"embed_vision)\.|image_newline$)"
)
LONG = 4  # squares along an image's longer side, of Idefics 3
SQUARES = 16  # the most into which an image is cut, of Llama 4
CUT = {"llava_next": LlavaNextProcessor, "llava_onevision": LlavaOnevisionProcessor}  # whose images lose their padding
SOFT = 280  # tokens for which an image of Gemma 4 has patches, of which those left over are empty


class Sizes(np.ndarray):  # type: ignore[type-arg]
    """Sizes of images, which code takes for a tensor's."""

    def prod(self, dim: int) -> Any:  # type: ignore[override]
        """The product along a dimension."""
        return np.asarray(self).prod(axis=dim)


def _side(config: Any) -> int:
    """The side in pixels of the square that becomes one token."""
    eyes = config.vision_config
    if hasattr(eyes, "spatial_merge_size"):
        return int(eyes.patch_size * eyes.spatial_merge_size)
    if hasattr(eyes, "pooling_kernel_size"):
        return int(eyes.patch_size * eyes.pooling_kernel_size)
    if hasattr(config, "spatial_merge_size"):
        return int(eyes.patch_size * config.spatial_merge_size)
    if hasattr(config, "downsample_ratio"):
        return int(eyes.patch_size[0] / config.downsample_ratio)
    if config.model_type == "aya_vision":
        return int(eyes.patch_size * config.downsample_factor)
    if hasattr(config, "scale_factor"):
        return int(eyes.patch_size * config.scale_factor)
    if config.model_type in ("paligemma", "llava", *CUT):
        return int(eyes.patch_size)
    if config.model_type == "llama4":
        return int(eyes.patch_size / eyes.pixel_shuffle_ratio)
    if config.model_type == "mllama":
        return int(eyes.image_size)
    return int(eyes.image_size // config.mm_tokens_per_image**0.5)


def _of(model: Any) -> Any:
    return getattr(model, "module", model).config


def inputs(case: Case, model: Any, rows: int) -> dict[str, Any]:
    """The pixels of `rows` samples, in fp32 as the processor makes them, and what else says where images are.

    Images are as large as the model sees them, so that their sides must be whole tokens.
    """
    config = _of(model)
    eyes, side, count = config.vision_config, _side(config), rows * case.images
    if case.frames > 1:
        if config.model_type != "llava_onevision":
            raise CaseError(f"images.frames: {case.frames} cannot be traced; allowed: 1")
        shape = (count, case.frames, eyes.num_channels, eyes.image_size, eyes.image_size)
        return {"pixel_values_videos": torch.zeros(shape, device=DEVICE)}
    if hasattr(config, "downsample_ratio") or config.model_type == "aya_vision":
        tile = _tile(eyes)
        return {"pixel_values": torch.zeros(count * _tiles(case, tile), eyes.num_channels, tile, tile, device=DEVICE)}
    if config.model_type == "mllama":
        return _squares(case, eyes, rows)
    if config.model_type == "llama4":  # whose processor makes pixels of bf16
        tile, b = eyes.image_size, torch.float32 if case.prec == "fp32" else torch.bfloat16
        squares = count * _tiles(case, tile, SQUARES)
        return {"pixel_values": torch.zeros(squares, eyes.num_channels, tile, tile, dtype=b, device=DEVICE)}
    if config.model_type in CUT:
        edge = eyes.image_size
        squares = image_size_to_num_patches([case.height, case.width], config.image_grid_pinpoints, edge)
        many = {"batch_num_images": np.array([case.images] * rows)} if config.model_type == "llava_onevision" else {}
        squares = 1 if many and case.images > 1 else squares  # of several images of a sample each is one
        return {
            **many,
            "pixel_values": torch.zeros(count, squares, eyes.num_channels, edge, edge, device=DEVICE),
            "image_sizes": np.array([[case.height, case.width]] * count),
        }
    if hasattr(config, "scale_factor"):
        edge, number = eyes.image_size, case.images * _cut(case)
        mask = torch.zeros(rows, number, edge, edge, dtype=torch.long, device=DEVICE)
        pixels = torch.zeros(rows, number, eyes.num_channels, edge, edge, device=DEVICE)
        return {"pixel_values": pixels, "pixel_attention_mask": mask}
    framed, filled = eyes.model_type == "pixtral", hasattr(eyes, "pooling_kernel_size")
    square = None if framed or filled or hasattr(eyes, "spatial_merge_size") else eyes.image_size
    for name, edge in ("height", case.height), ("width", case.width):
        if edge % side or edge != (square or edge):
            allowed = str(square) if square else f"multiples of {side}"
            raise CaseError(f"images.{name}: {edge} cannot be traced; allowed: {allowed}")
    if filled:
        cells, numbers = SOFT * eyes.pooling_kernel_size**2, 3 * eyes.patch_size**2
        return {
            "pixel_values": torch.zeros(count, cells, numbers, device=DEVICE),
            "image_position_ids": torch.zeros(count, cells, 2, dtype=torch.long, device=DEVICE),
            "mm_token_type_ids": torch.zeros(rows, case.seq, dtype=torch.long, device=DEVICE),
        }
    if square:
        kinds = {} if config.model_type == "llava" else {"token_type_ids": (rows, case.seq)}
        return {
            "pixel_values": torch.zeros(count, eyes.num_channels, case.height, case.width, device=DEVICE),
            **{name: torch.zeros(shape, dtype=torch.long, device=DEVICE) for name, shape in kinds.items()},
        }
    if framed:
        sizes = np.array([[case.height, case.width]] * count).view(Sizes)
        pixels = torch.zeros(count, eyes.num_channels, case.height, case.width, device=DEVICE)
        return {"pixel_values": pixels, "image_sizes": sizes}
    down, right = case.height // eyes.patch_size, case.width // eyes.patch_size
    if config.model_type == "paddleocr_vl":
        patch = (eyes.num_channels, eyes.patch_size, eyes.patch_size)
    else:
        patch = (eyes.in_channels * eyes.temporal_patch_size * eyes.patch_size**2,)
    return {
        "pixel_values": torch.zeros(count * down * right, *patch, device=DEVICE),
        "image_grid_thw": np.array([[1, down, right]] * count).view(Sizes),
        "position_ids": torch.zeros(3, rows, case.seq, dtype=torch.long, device=DEVICE),
    }


def _squares(case: Case, eyes: Any, rows: int) -> dict[str, Any]:
    """Llama 3.2 Vision's pixels, of as many squares for every image, and the masks that its processor makes."""
    edge, squares = eyes.image_size, eyes.max_num_tiles

    def whole(*shape: int) -> torch.Tensor:
        return torch.ones(rows, *shape, dtype=torch.long, device=DEVICE)

    return {
        "pixel_values": torch.zeros(rows, case.images, squares, eyes.num_channels, edge, edge, device=DEVICE),
        "aspect_ratio_ids": whole(case.images),
        "aspect_ratio_mask": whole(case.images, squares),
        "cross_attention_mask": whole(case.seq, case.images, squares),
    }


def _tile(eyes: Any) -> int:
    """The side of a square, which InternVL's config gives in either direction."""
    return int(eyes.image_size if isinstance(eyes.image_size, int) else eyes.image_size[0])


def _tiles(case: Case, tile: int, most: int = 12) -> int:
    """Squares of an image that is whole squares large: these, and one of all of it if there are several."""
    if case.height % tile or case.width % tile or case.height * case.width > most * tile**2:
        raise CaseError(f"images.height: {case.height} cannot be traced; allowed: multiples of {tile}, {most} squares")
    number = case.height * case.width // tile**2
    return number + (number > 1)


def _cut(case: Case) -> int:
    """Squares of an image of Idefics 3, which makes every image as long, and one of all of it."""
    short, long = sorted((case.width, case.height))
    return LONG * -(-LONG * short // long) + 1


def _features(case: Case, config: Any) -> int:
    """Tokens of an image that loses its padding, as the model's processor counts them."""
    edge, patch = config.vision_config.image_size, config.vision_config.patch_size
    processor = object.__new__(CUT[config.model_type])
    processor.image_processor = SimpleNamespace(image_grid_pinpoints=config.image_grid_pinpoints)
    processor.patch_size, processor.num_additional_image_tokens = patch, 0
    processor.num_image_tokens = (edge // patch) ** 2
    processor.vision_aspect_ratio = getattr(config, "vision_aspect_ratio", "")
    if case.frames > 1:  # `_get_num_multimodal_tokens`
        return case.frames * math.ceil(edge // patch / 2) ** 2 + 1
    if case.images > 1 and config.model_type == "llava_onevision":
        return processor.num_image_tokens + 1  # `replace_image_token`
    return int(processor._get_number_of_features(case.height, case.width, edge, edge))


def tokens(case: Case, model: Any, rows: int) -> int:
    """Tokens of `rows` samples that stand for images: those that a mask over all tokens picks."""
    config = _of(model)
    if config.model_type == "mllama":
        return rows * case.images
    if config.model_type in CUT:
        return rows * case.images * _features(case, config)
    if hasattr(config, "downsample_ratio") or config.model_type == "aya_vision":
        tile = _tile(config.vision_config)
        return rows * case.images * _tiles(case, tile) * (tile // _side(config)) ** 2
    if config.model_type == "llama4":
        tile = config.vision_config.image_size
        return rows * case.images * _tiles(case, tile, SQUARES) * (tile // _side(config)) ** 2
    if hasattr(config, "scale_factor"):
        return int(rows * case.images * _cut(case) * (config.vision_config.image_size // _side(config)) ** 2)
    return rows * case.images * (case.height * case.width // _side(config) ** 2)


def tower(model: Any) -> Any:
    """The vision tower of a model."""
    ends = (".visual", ".vision_tower", ".vision_model", ".vision_encoder")
    return next(module for name, module in model.named_modules() if f".{name}".endswith(ends))


def linear_names(case: Case, model: Any) -> list[str]:
    """The names of the linear modules beside which there are adapters: all but the head, and what is frozen."""
    linear = (name for name, module in model.named_modules() if hasattr(module, "in_features"))
    frozen = VISION if case.freeze == "tower" else re.compile("$^")
    ends = ("lm_head", "router")  # Llama 4's router returns two tensors
    return [n for n in linear if not n.endswith(ends) and (not frozen.search(n) or PROJECTOR.search(n))]


def unread(case: Case, model: Any) -> set[int]:
    """The ids of parameters without gradients.

    What hears, LLaVA's blocks behind the one whose output it takes, and layers that attend to images in a text.
    """
    if case.config["model_type"] == "mllama_text_model":
        crossing = "|".join(map(str, model.config.get_text_config().cross_attention_layers))
        return {id(p) for name, p in model.named_parameters() if re.search(rf"\blayers\.({crossing})\.", name)}
    if case.config["model_type"] in HEARING:
        return {id(p) for name, p in model.named_parameters() if SOUND.search(name) or PROJECTOR.search(name)}
    if case.config["model_type"] not in ("llava", "aya_vision", *CUT):
        return {id(parameter) for name, parameter in model.named_parameters() if SOUND.search(name)}
    config = _of(model)
    depth, layers = config.vision_config.num_hidden_layers, config.vision_feature_layer
    last = max(layer % (depth + 1) for layer in (layers if isinstance(layers, list) else [layers]))
    behind = "|".join(map(str, range(last, depth))) or "none"
    idle = re.compile(rf"vision_tower\.(encoder\.layers\.({behind})|post_layernorm|head)\.")
    return {id(parameter) for name, parameter in model.named_parameters() if idle.search(name)}


def freeze(case: Case, model: torch.nn.Module) -> None:
    """Freeze the tower, or tower and projector, as the case says."""
    for name, parameter in model.named_parameters():
        projects = case.freeze == "tower" and PROJECTOR.search(name)
        if case.freeze != "none" and VISION.search(name) and not projects:
            parameter.requires_grad_(False)


def _count(grid: Any) -> int:
    return int(grid.prod(-1).sum())


def _positions(grid: Any, *_: Any, kwargs: Any = None) -> torch.Tensor:
    return torch.zeros(_count(grid), 2, dtype=torch.long, device=DEVICE)


def _lengths(grid: Any, *_: Any, kwargs: Any = None) -> tuple[Any, int]:
    each = np.repeat(grid[:, 1] * grid[:, 2], grid[:, 0])
    return np.concatenate([[0], each.cumsum()]), int(each.max())


def _windows(
    grid: Any, spatial_merge_size: int, window_size: int, patch_size: int, kwargs: Any = None
) -> tuple[torch.Tensor, Any]:
    """The order of tokens, and the cumulative numbers of patches in windows, cut where an image ends."""
    tokens, side = spatial_merge_size**2, window_size // spatial_merge_size // patch_size
    ends = [0]
    for frames, height, width in grid.tolist():
        down, right = (
            [min(side, edge // spatial_merge_size - at) for at in range(0, edge // spatial_merge_size, side)]
            for edge in (height, width)
        )
        ends += [high * wide * tokens for _ in range(frames) for high in down for wide in right]
    order = torch.zeros(_count(grid) // tokens, dtype=torch.long, device=DEVICE)
    return order, np.cumsum(ends)


def _taps(grid: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows = _count(grid)
    return torch.zeros(rows, 4, dtype=torch.long, device=DEVICE), torch.zeros(rows, 4, device=DEVICE)


INSTEAD: dict[str, Callable[..., Any]] = {
    "get_vision_position_ids": _positions,
    "get_vision_attention_seqlens": _lengths,
    "get_vision_window_index": _windows,
    "get_vision_interpolation_indices_and_weights": _taps,
    "create_bidirectional_mask": lambda **_: None,  # every patch of a square is of pixels
    "torch_compilable_check": lambda *_: None,  # of the number of image tokens
}


def _sampled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """GLM-4V's positions, whose code counts on the device: the images' lengths and grids are there, too."""

    def run(self: Any, patches: Any, lengths: Any, grid: Any, *coordinates: Any) -> Any:
        there = (torch.zeros(given.shape, dtype=torch.long, device=DEVICE) for given in (lengths, grid))
        return forward(self, patches, *there, *coordinates)

    return run


def _together(method: Callable[..., Any]) -> Callable[..., Any]:
    """Idefics 3's tokens of all samples at once, where the numbers of each sample's are counted on the device."""

    def split(tokens: Any, sizes: Any, dim: int = 0) -> Any:
        return SPLIT(tokens, sizes, dim) if sizes != [0] * len(sizes) else (tokens,)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(torch.Tensor, "split", split):
            return method(self, *args, **kwargs)

    return run


def _there(method: Callable[..., Any]) -> Callable[..., Any]:
    """Features behind Pixtral's tower, where the number of each image's tokens is counted on the device."""
    made = torch.as_tensor

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(torch, "as_tensor", lambda x, **to: x if isinstance(x, Sizes) else made(x, **to)):
            return method(self, *args, **kwargs)

    return run


def _over(inputs_embeds: torch.Tensor, **_: Any) -> torch.Tensor:
    """The mask of Gemma 4's patches, some of which are empty."""
    count, cells, _ = inputs_embeds.shape
    return torch.zeros(count, 1, cells, cells, dtype=torch.bool, device=DEVICE)


def take_helpers(case: Case, model: Any) -> None:
    """Put these functions in the place of those that look into tensors."""
    for family in MODULES:
        module = import_module(f"transformers.models.{family}.modeling_{family}")
        for name, function in INSTEAD.items():
            if hasattr(module, name):
                setattr(module, name, function)
        for name in ("Idefics3Model", "SmolVLMModel", "Gemma4Model"):
            if hasattr(module, name):
                getattr(module, name).get_image_features = _together(getattr(module, name).get_image_features)
        for name in ("Mistral3Model", "LlavaModel"):
            if hasattr(module, name):
                getattr(module, name).get_image_features = _there(getattr(module, name).get_image_features)
        if hasattr(module, "Gemma4Model") and case.height * case.width < SOFT * _side(_of(model)) ** 2:
            module.create_bidirectional_mask = _over
        for name in vars(module):
            if name.startswith("Glm") and name.endswith("VisionEmbeddings"):
                getattr(module, name).forward = _sampled(getattr(module, name).forward)
