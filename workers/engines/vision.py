"""Images for models: pixels, the tokens that stand for them in a prompt, and the model's inputs.

    ImageProcessor     of the Qwen-VL family (Wang et al. 2024; Bai et al. 2025), with its patches and positions
    LibraryProcessor   of any other family, by transformers' own processor

An image is stored and moved as uint8 pixels, an eighth of the size of its normalised float32 patches, which are
computed next to the model.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.processing_auto import (
    PROCESSOR_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
)

from distflow.data.batch import Ragged
from distflow.errors import InvalidInput

_FILES = ("preprocessor_config.json", "processor_config.json")
_TEXT = ("input_ids", "attention_mask", "token_type_ids", "text_replacement_offsets")
"""What a processor makes of a text; the rest is of its images."""
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
        return _lines(image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC))

    def spans(self, images: list[Image.Image], token: int) -> list[list[int]]:
        """Return the tokens in a prompt of each of its images, before they are resized."""
        sizes = (self.size(image.height, image.width) for image in images)
        return [[token] * (rows * columns // (self.patch * self.merge) ** 2) for rows, columns in sizes]

    def patches(self, image: Ragged) -> tuple[Tensor, tuple[int, int, int]]:
        """Return patches [N, 3 · frames · patch²] float32, ordered by token, and the grid (1, rows, columns)."""
        height, side, merge = len(image), self.patch, self.merge
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        pixels = (image.values.float() / 255 - mean) / std
        rows, columns = height // side, len(image.values) // height // side
        cut = pixels.view(rows // merge, merge, side, columns // merge, merge, side, 3)
        cut = cut.permute(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, side * side)
        return cut.expand(-1, -1, self.frames, -1).reshape(rows * columns, -1), (1, rows, columns)

    def inputs(self, rows: list[Ragged]) -> dict[str, Tensor]:
        """Return the model's inputs for the images of some rows."""
        patches, grids = zip(*(self.patches(image) for images in rows for image in images.rows))
        return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}


class LibraryProcessor:
    """Processor of transformers: it resizes and cuts images next to the model, and says which tokens stand for them."""

    def __init__(self, processor: Any, folder: Path, tokenizer: PreTrainedTokenizerBase):
        """`tokenizer`: another object than the processor's, whose padding threads that encode text must not see."""
        self.processor, self.folder, self.tokenizer = processor, folder, tokenizer
        self.token: int = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
        """What a chat template writes in place of an image."""

    @classmethod
    def read(cls, folder: Path, kind: str, tokenizer: PreTrainedTokenizerBase) -> LibraryProcessor:
        """Read the processor of `model_type: kind` from a model folder. Raises InvalidInput: it cannot be had."""
        files = [json.loads((folder / name).read_text(encoding="utf-8")) for name in reversed(_FILES)
                 if (folder / name).is_file()]
        try:
            found = getattr(transformers, PROCESSOR_MAPPING_NAMES.get(kind) or "", None)
            if found is None or not files:
                raise InvalidInput(f"{folder} has no image processor that transformers knows for `model_type: {kind}`. "
                                   "Take a model with one, or leave `data.images` out")
            takes = inspect.signature(found.__init__).parameters
            given = {name: value for name, value in files[0].items() if name in takes and not isinstance(value, dict)}
            still = type(found.__name__, (found,), {"check_argument_for_proper_class": _unchecked})
            nothing = {name: None for name in ("video_processor", "feature_extractor") if name in takes}
            images = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
            return cls(still(**given, **nothing, image_processor=images, tokenizer=copy.deepcopy(tokenizer)), folder,
                       tokenizer)
        except (ImportError, ValueError) as error:  # such as one that is code in the folder, which is never run
            raise InvalidInput(f"the image processor of {folder} cannot be loaded: {error}") from None

    def save(self, folder: Path) -> None:
        for name in _FILES:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, folder / name)

    def pixels(self, image: Image.Image) -> Ragged:
        """Return the lines of an image, each a row of pixels [width, 3] uint8."""
        return _lines(image.convert("RGB"))

    def spans(self, images: list[Image.Image], token: int) -> list[list[int]]:
        """Return the tokens in a prompt of each of its images."""
        (offsets,) = self._processed([[image.convert("RGB") for image in images]])["text_replacement_offsets"]
        return [self.tokenizer.encode(each["replacement"], add_special_tokens=False) for each in offsets]

    def inputs(self, rows: list[Ragged]) -> dict[str, Tensor]:
        """Return the model's inputs for the images of some rows."""
        found = self._processed([[Image.fromarray(image.values.view(len(image), -1, 3).numpy())
                                  for image in images.rows] for images in rows])
        return {name: value for name, value in found.items() if name not in _TEXT}

    def _processed(self, rows: list[list[Image.Image]]) -> Any:
        texts = [self.processor.image_token * len(images) for images in rows]
        return self.processor(text=texts, images=rows, add_special_tokens=False, padding=True, return_tensors="pt",
                              return_text_replacement_offsets=True)


Processor = ImageProcessor | LibraryProcessor


def _unchecked(_: Any, __: str, argument: Any) -> type:
    """Stand in for a check that wants a processor of videos, which need packages of their own."""
    return type(argument)


def _lines(image: Image.Image) -> Ragged:
    values = torch.from_numpy(numpy.array(image)).reshape(-1, 3)
    return Ragged(values, torch.full((image.height,), image.width))


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
    rows = [row for row in images.rows if len(row)]
    return model.image_processor.inputs(rows) if rows else {}


def with_dummy_image(model: Any, inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Append a prompt of one small black image: every rank must compute gradients of the vision weights."""
    prompts, lengths, *rest = inputs
    image = Image.new("RGB", (32, 32))
    (span,) = model.image_processor.spans([image], model.config.image_token_id)
    prompts = nn.functional.pad(prompts, (max(len(span) - prompts.shape[1], 0), 0))
    dummy_prompt = prompts.new_zeros(1, prompts.shape[1])
    dummy_prompt[0, -len(span) :] = torch.tensor(span)
    with_dummy = (torch.cat([prompts, dummy_prompt]), torch.cat([lengths, lengths.new_full((1,), len(span))]), *rest)
    return with_dummy, model.image_processor.inputs([Ragged.from_rows([model.image_processor.pixels(image)])])


def position_inputs(model: Any, tokens: Tensor, mask: Tensor,
                    images: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Return the model's inputs for positions and images of prompts [P, L], padded on the left, and the position [P] of
    the token after each: in the Qwen-VL family images have fewer positions than tokens (M-RoPE, Wang et al. 2024,
    §2.1)."""
    positions, lengths = (mask.cumsum(1) - 1).clamp(min=0), mask.sum(1)
    if not images:
        return {"position_ids": positions}, lengths
    kinds = torch.eq(tokens, model.config.image_token_id).int()
    if not hasattr(model.base_model, "get_rope_index"):
        seen = {"token_type_ids": kinds} if "token_type_ids" in _forward_parameters(type(model.base_model)) else {}
        return {"position_ids": positions, **seen, **images}, lengths
    positions, shift = model.base_model.get_rope_index(tokens, mm_token_type_ids=kinds, attention_mask=mask,
                                                       image_grid_thw=images["image_grid_thw"])
    return {"position_ids": positions, **images}, lengths + shift.squeeze(1)


@functools.cache
def _forward_parameters(model_class: type[nn.Module]) -> frozenset[str]:
    """Return the names of the parameters of a model's forward pass."""
    return frozenset(inspect.signature(model_class.forward).parameters)


def attach_images(model: PreTrainedModel, image_processor: Processor | None) -> PreTrainedModel:
    vars(model)["image_processor"] = image_processor
    return model
