"""Images for models of the Qwen-VL family (Wang et al. 2024; Bai et al. 2025): pixels, patches, tokens and positions.

An image is stored and moved as resized uint8 pixels, an eighth of the size of its normalised float32 patches, which are
computed next to the model.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from distflow.data.batch import Ragged

_FILES = ("preprocessor_config.json", "processor_config.json")
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class ImageProcessor:
    """Image processor: the part of Hugging Face's `preprocessor_config.json` that Qwen's models use."""

    patch: int  # side of a patch in pixels
    merge: int  # side of a token in patches
    frames: int = 2  # frames of a patch; a still image is repeated
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280  # bounds on the pixels of a resized image
    mean: tuple[float, float, float] = _CLIP_MEAN
    std: tuple[float, float, float] = _CLIP_STD

    @classmethod
    def read(cls, folder: Path) -> ImageProcessor | None:
        """Read from a model folder; return None if the model takes no images."""
        for name in _FILES:
            if (folder / name).is_file():
                config = json.loads((folder / name).read_text(encoding="utf-8"))
                config = config.get("image_processor", config)
                if "patch_size" in config and "merge_size" in config:
                    return cls._from(config)
        return None

    @classmethod
    def _from(cls, config: dict) -> ImageProcessor:
        size = config.get("size") or {}
        return cls(config["patch_size"], config["merge_size"], config.get("temporal_patch_size", 2),
                   size.get("shortest_edge") or config.get("min_pixels", cls.min_pixels),
                   size.get("longest_edge") or config.get("max_pixels", cls.max_pixels),
                   tuple(config.get("image_mean", _CLIP_MEAN)), tuple(config.get("image_std", _CLIP_STD)))

    def save(self, folder: Path) -> None:
        config = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": self.patch, "merge_size": self.merge,
                  "temporal_patch_size": self.frames, "image_mean": self.mean, "image_std": self.std,
                  "size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}}
        (folder / _FILES[0]).write_text(json.dumps(config, indent=2) + "\n")

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width after resizing: whole tokens, within the bounds, with the closest aspect ratio."""
        unit = self.patch * self.merge
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit**2 > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
        elif rows * columns * unit**2 < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
        return rows * unit, columns * unit

    def pixels(self, image: Image.Image) -> Ragged:
        """Resize an image; return its lines, each a row of pixels [width, 3] uint8."""
        height, width = self.size(image.height, image.width)
        resized = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
        values = torch.from_numpy(numpy.array(resized)).reshape(-1, 3)
        return Ragged(values, torch.full((height,), width))

    def tokens_of(self, height: int, width: int) -> int:
        """Return the tokens of an image of this size, before it is resized."""
        rows, columns = self.size(height, width)
        return rows * columns // (self.patch * self.merge) ** 2

    def tokens(self, image: Ragged) -> int:
        return len(image.values) // (self.patch * self.merge) ** 2

    def patches(self, image: Ragged) -> tuple[Tensor, tuple[int, int, int]]:
        """Return patches [N, 3 · frames · patch²] float32, ordered by token, and the grid (1, rows, columns)."""
        height, side, merge = len(image), self.patch, self.merge
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        pixels = (image.values.float() / 255 - mean) / std
        rows, columns = height // side, len(image.values) // height // side
        cut = pixels.view(rows // merge, merge, side, columns // merge, merge, side, 3)
        cut = cut.permute(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, side * side)
        return cut.expand(-1, -1, self.frames, -1).reshape(rows * columns, -1), (1, rows, columns)


def same_as_previous(images: Ragged) -> Tensor:
    """Return [B - 1] whether a row has the same images as the row before."""
    rows = [(row.lengths, row.values.lengths, row.values.values) if len(row) else None for row in images.rows]
    return torch.tensor([_equal(one, other) for one, other in zip(rows, rows[1:])], dtype=torch.bool)


def _equal(one: tuple[Tensor, ...] | None, other: tuple[Tensor, ...] | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(torch.equal(left, right) for left, right in zip(one, other))


def image_inputs(model: Any, images: Ragged) -> dict[str, Tensor]:
    """Return the model's inputs for the images of some prompts, in order; {} if they have none."""
    if not len(images.values):
        return {}
    patches, grids = zip(*(model.image_processor.patches(image) for image in images.values.rows))
    return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}


def with_dummy_image(model: Any, inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Append a prompt with one black image token: every rank must compute gradients of the vision weights."""
    prompts, lengths, *rest = inputs
    image_processor = model.image_processor
    side = image_processor.patch * image_processor.merge
    dark = Ragged(torch.zeros(side * side, 3, dtype=torch.uint8), torch.full((side,), side))
    dummy_prompt = prompts.new_zeros(1, prompts.shape[1])
    dummy_prompt[0, -1] = model.config.image_token_id
    column = Ragged(Ragged(dark, torch.tensor([side])), torch.tensor([1]))
    with_dummy = (torch.cat([prompts, dummy_prompt]), torch.cat([lengths, lengths.new_ones(1)]), *rest)
    return with_dummy, image_inputs(model, column)


def position_inputs(model: Any, tokens: Tensor, mask: Tensor,
                    images: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the model's inputs for positions and images of prompts [P, L], padded on the left, and the position [P] of
    the token after each: with images there are fewer positions than tokens (M-RoPE, Wang et al. 2024, §2.1)."""
    positions, lengths = (mask.cumsum(1) - 1).clamp(min=0), mask.sum(1)
    if not images:
        return {"position_ids": positions}, lengths
    kinds = torch.eq(tokens, model.config.image_token_id).int()
    positions, shift = model.base_model.get_rope_index(tokens, mm_token_type_ids=kinds, attention_mask=mask,
                                                       image_grid_thw=images["image_grid_thw"])
    return {"position_ids": positions, **images}, lengths + shift.squeeze(1)


def attach_images(model: PreTrainedModel, image_processor: ImageProcessor | None) -> PreTrainedModel:
    vars(model)["image_processor"] = image_processor
    return model
