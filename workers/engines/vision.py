"""Images for models of the Qwen-VL family (Wang et al. 2024; Bai et al. 2025): pixels, patches, tokens and positions.

An image travels as the pixels that the model will see, resized and in whole numbers: one byte for each colour of each,
an eighth of the normalised patches in float32 that the model takes. Those are made where the model is.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedModel

from distflow.data.batch import Ragged

_FILES = ("preprocessor_config.json", "processor_config.json")
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class ImageProcessor:
    """How a model wants its images: the part of Hugging Face's `preprocessor_config.json` that Qwen's models use."""

    patch: int
    """Pixels of a patch's side."""
    merge: int
    """Patches of the side of what becomes one token."""
    frames: int = 2
    """A patch spans so many frames; a still image is repeated."""
    smallest: int = 56 * 56
    largest: int = 28 * 28 * 1280
    """Pixels that an image is resized to have at least and at most."""
    mean: tuple[float, float, float] = _CLIP_MEAN
    std: tuple[float, float, float] = _CLIP_STD

    @classmethod
    def read(cls, folder: Path) -> ImageProcessor | None:
        """From a model folder; None if the model there takes no images."""
        for name in _FILES:
            if (folder / name).is_file():
                said = json.loads((folder / name).read_text(encoding="utf-8"))
                said = said.get("image_processor", said)
                if "patch_size" in said and "merge_size" in said:
                    return cls._from(said)
        return None

    @classmethod
    def _from(cls, said: dict) -> ImageProcessor:
        size = said.get("size") or {}
        return cls(said["patch_size"], said["merge_size"], said.get("temporal_patch_size", 2),
                   size.get("shortest_edge") or said.get("min_pixels", cls.smallest),
                   size.get("longest_edge") or said.get("max_pixels", cls.largest),
                   tuple(said.get("image_mean", _CLIP_MEAN)), tuple(said.get("image_std", _CLIP_STD)))

    def save(self, folder: Path) -> None:
        """As transformers reads it."""
        said = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": self.patch, "merge_size": self.merge,
                "temporal_patch_size": self.frames, "image_mean": self.mean, "image_std": self.std,
                "size": {"shortest_edge": self.smallest, "longest_edge": self.largest}}
        (folder / _FILES[0]).write_text(json.dumps(said, indent=2) + "\n")

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width after resizing: whole tokens, within the bounds, the ratio as near as can be."""
        unit = self.patch * self.merge
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit**2 > self.largest:
            shrink = math.sqrt(height * width / self.largest)
            rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
        elif rows * columns * unit**2 < self.smallest:
            grow = math.sqrt(self.smallest / (height * width))
            rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
        return rows * unit, columns * unit

    def pixels(self, image: Image.Image) -> Ragged:
        """The resized image: its lines, each a row of pixels [width, 3] uint8."""
        height, width = self.size(image.height, image.width)
        resized = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC)
        values = torch.from_numpy(numpy.array(resized)).reshape(-1, 3)
        return Ragged(values, torch.full((height,), width))

    def tokens(self, image: Ragged) -> int:
        """How many tokens an image becomes."""
        return len(image.values) // (self.patch * self.merge) ** 2

    def patches(self, image: Ragged) -> tuple[Tensor, tuple[int, int, int]]:
        """Patches [N, 3 · frames · patch²] float32, those of a token together, and the grid (1, rows, columns)."""
        height, side, merge = len(image), self.patch, self.merge
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        pixels = (image.values.float() / 255 - mean) / std
        rows, columns = height // side, len(image.values) // height // side
        cut = pixels.view(rows // merge, merge, side, columns // merge, merge, side, 3)
        cut = cut.permute(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, side * side)
        return cut.expand(-1, -1, self.frames, -1).reshape(rows * columns, -1), (1, rows, columns)


def alike(images: Ragged) -> Tensor:
    """[B - 1]: whether the images of a row are those of the row before."""
    rows = [(row.lengths, row.values.lengths, row.values.values) if len(row) else None for row in images.rows]
    return torch.tensor([_equal(one, other) for one, other in zip(rows, rows[1:])], dtype=torch.bool)


def _equal(one: tuple[Tensor, ...] | None, other: tuple[Tensor, ...] | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(torch.equal(left, right) for left, right in zip(one, other))


def shown(model: nn.Module, images: Ragged) -> dict[str, Tensor]:
    """What the model takes for the images of some prompts, in their order; nothing if they have none."""
    if not len(images.values):
        return {}
    patches, grids = zip(*(model.sight.patches(image) for image in images.values.rows))
    return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}


def with_dummy_image(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Another prompt, of one dark token, to which no response belongs.

    Every rank must make gradients for the same weights, those that see included, though only some have images.
    """
    prompts, lengths, *rest = inputs
    sight = model.sight
    side = sight.patch * sight.merge
    dark = Ragged(torch.zeros(side * side, 3, dtype=torch.uint8), torch.full((side,), side))
    glance = prompts.new_zeros(1, prompts.shape[1])
    glance[0, -1] = model.config.image_token_id
    column = Ragged(Ragged(dark, torch.tensor([side])), torch.tensor([1]))
    return (torch.cat([prompts, glance]), torch.cat([lengths, lengths.new_ones(1)]), *rest), shown(model, column)


def places_of(model: nn.Module, tokens: Tensor, mask: Tensor,
              images: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """What goes with prompts: their positions and what they show; and the position [P] of the token after each.

    Text has one position for each token. An image's tokens stand at its rows and columns, and what follows at one more
    than the largest of both (M-RoPE, Wang et al. 2024, §2.1): fewer positions than tokens.

    Args:
        tokens, mask: [P, L], padded on the left.
        images: from `shown`; empty for text alone.
    """
    positions, lengths = (mask.cumsum(1) - 1).clamp(min=0), mask.sum(1)
    if not images:
        return {"position_ids": positions}, lengths
    kinds = (tokens == model.config.image_token_id).int()
    positions, shift = model.base_model.get_rope_index(tokens, mm_token_type_ids=kinds, attention_mask=mask,
                                                       image_grid_thw=images["image_grid_thw"])
    return {"position_ids": positions, **images}, lengths + shift.squeeze(1)


def attach_images(model: PreTrainedModel, sight: ImageProcessor | None) -> PreTrainedModel:
    """The model with its `sight` beside it, or without one."""
    model.sight = sight
    return model
