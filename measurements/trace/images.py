"""Images before a model's vision tower, whose Transformers code looks into tensors that are fake here.

Grids and lengths are numpy's arrays, which the code reads as it reads tensors; what it would compute of them on the
device is made by its shape alone.
"""

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch

from .case import Case
from .reading import CaseError

DEVICE = torch.device("cuda")
MODULES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
VISION = re.compile(r"\b(visual|vision_tower|multi_modal_projector)\.")
PROJECTOR = re.compile(r"\b(merger|deepstack_merger_list|multi_modal_projector)\.")


def patches(case: Case, eyes: Any) -> tuple[int, int]:
    """The rows and columns of patches of one image, whose sides must be whole tokens."""
    side = eyes.patch_size * eyes.spatial_merge_size
    for name, edge in ("height", case.height), ("width", case.width):
        if edge % side:
            raise CaseError(f"images.{name}: {edge} cannot be traced; allowed: multiples of {side}")
    return case.height // eyes.patch_size, case.width // eyes.patch_size


def inputs(case: Case, model: Any, rows: int) -> dict[str, Any]:
    """The pixels of `rows` samples, in fp32 as the processor makes them, and the grid of each image."""
    config = getattr(model, "module", model).config
    eyes = config.vision_config
    down, right = patches(case, eyes)
    width = eyes.in_channels * eyes.temporal_patch_size * eyes.patch_size**2
    count = rows * case.images
    return {
        "pixel_values": torch.zeros(count * down * right, width, device=DEVICE),
        "image_grid_thw": np.array([[1, down, right]] * count),
        "position_ids": torch.zeros(3, rows, case.seq, dtype=torch.long, device=DEVICE),
    }


def tokens(case: Case, model: Any, rows: int) -> int:
    """Tokens of `rows` samples that stand for images: those that a mask over all tokens picks."""
    eyes = getattr(model, "module", model).config.vision_config
    down, right = patches(case, eyes)
    return rows * case.images * down * right // eyes.spatial_merge_size**2


def tower(model: Any) -> Any:
    """The vision tower of a model."""
    return next(module for name, module in model.named_modules() if name.endswith((".visual", ".vision_tower")))


def linear_names(case: Case, model: Any) -> list[str]:
    """The names of the linear modules beside which there are adapters: all but the head, and what is frozen."""
    linear = (name for name, module in model.named_modules() if hasattr(module, "in_features"))
    frozen = VISION if case.freeze == "tower" else re.compile("$^")
    return [n for n in linear if n != "lm_head" and (not frozen.search(n) or PROJECTOR.search(n))]


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
    "torch_compilable_check": lambda *_: None,  # of the number of image tokens
}


def take_helpers() -> None:
    """Put these functions in the place of those that look into tensors."""
    for family in MODULES:
        module = import_module(f"transformers.models.{family}.modeling_{family}")
        for name, function in INSTEAD.items():
            if hasattr(module, name):
                setattr(module, name, function)
