"""From a record of a dataset to the columns that every dataset gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from distflow.data.batch import ColumnData, Ragged, encode_text
from distflow.data.images import open_images
from distflow.data.records import Record
from distflow.observe.metrics import current
from distflow.schema.errors import InvalidInput
from distflow.schema.run import Data
from workers.engines.vision import Sight

if TYPE_CHECKING:
    from workers.roles import Role

PLACE = "<image>"
"""Where an image stands in a question."""
NO_IMAGE = Ragged(Ragged(torch.empty(0, 3, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)),
                  torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True)
class Eyes:
    """How the images of a dataset become pixels, and tokens of prompts."""

    sight: Sight
    token: int
    """Stands in a prompt for each token of an image."""
    field: str
    folder: Path
    """Paths in the data are relative to it."""

    def look(self, records: list[Record]) -> Ragged:
        """Of each record its images, of each image its lines, of each line its pixels [width, 3] (uint8)."""
        rows = []
        for record in records:
            images = [self.sight.pixels(image) for image in open_images(record, self.field, self.folder)]
            rows.append(Ragged.from_rows(images) if images else NO_IMAGE)
        return Ragged.from_rows(rows)

    def spread(self, prompt: list[int], images: Ragged, longest: int) -> list[int]:
        """The prompt with as many tokens for each image as the model will see.

        Raises:
            InvalidInput: it is longer than `longest`; nothing can be cut off between images.
        """
        counts = iter([self.sight.tokens(image) for image in images.rows])
        result = [token for each in prompt for token in ([each] * next(counts) if each == self.token else [each])]
        if len(result) > longest:
            raise InvalidInput(f"a prompt with {len(images)} images has {len(result):,} tokens, more than "
                               f"data.max_prompt_tokens ({longest:,}), and images cannot be cut. Raise it, or shrink "
                               "the images.")
        return result


def eyes_of(role: Role, data: Data, path: Path) -> Eyes | None:
    """Eyes for the data at `path`; None where none are asked for."""
    if data.images is None:
        return None
    return Eyes(role.sight, role.config.image_token_id, data.images, path.parent)


def encoder(tokenizer: PreTrainedTokenizerBase, data: Data,
            eyes: Eyes | None = None) -> Callable[[list[Record]], dict[str, ColumnData]]:
    """Questions by the tokenizer's chat template (without one, as they are, on a line of their own), answers with end.

    A prompt longer than `max_prompt_tokens` loses its beginning, a target its end; the metrics count them.
    """

    def encode(records: list[Record]) -> dict[str, ColumnData]:
        questions, answers = [record[data.question] for record in records], [record[data.answer] for record in records]
        prompts, images, cut = encode_prompts(tokenizer, data, records, eyes)
        current().add("data/prompts_cut", cut)
        extra = {name: encode_text(str(record[name]) for record in records) for name in data.columns}
        if images is not None:
            extra["images"] = images
        return {"prompts": prompts,
                "targets": encode_targets(tokenizer, data.max_target_tokens, answers),
                "questions": encode_text(questions), "answers": encode_text(answers), **extra}

    return encode


def encode_targets(tokenizer: PreTrainedTokenizerBase, longest: int, answers: list[str]) -> Ragged:
    """The answers with their ends; what is longer than `longest` tokens loses its end, and the metrics count it."""
    targets = [[*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
               for answer in answers]
    current().add("data/targets_cut", sum(len(row) > longest for row in targets))
    return _ragged([row[:longest] for row in targets])


def encode_prompts(tokenizer: PreTrainedTokenizerBase, data: Data, records: list[Record],
                   eyes: Eyes | None = None) -> tuple[Ragged, Ragged | None, int]:
    """The records' questions, what they show, and how many of them lost their beginning."""
    images = eyes.look(records) if eyes else None
    counts = images.lengths.tolist() if eyes else [0] * len(records)
    prompts = [_prompt(tokenizer, record[data.question], count) for record, count in zip(records, counts)]
    if eyes:
        prompts = [eyes.spread(prompt, row, data.max_prompt_tokens) if len(row) else prompt
                   for prompt, row in zip(prompts, images.rows)]
    cut = sum(len(row) > data.max_prompt_tokens for row in prompts)
    return _ragged([row[-data.max_prompt_tokens :] for row in prompts]), images, cut


def _prompt(tokenizer: PreTrainedTokenizerBase, question: str, images: int = 0) -> list[int]:
    if tokenizer.chat_template:
        message = [{"role": "user", "content": _content(question, images) if images else question}]
        return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    return tokenizer(f"{question}\n")["input_ids"]


def _content(question: str, images: int) -> list[dict[str, str]]:
    """Text and images in turn, as chat templates of models that see take them.

    Raises:
        InvalidInput: the question has another number of places for images than it has images.
    """
    texts = question.split(PLACE) if PLACE in question else [*[""] * images, question]
    if len(texts) != images + 1:
        raise InvalidInput(f"a question has {len(texts) - 1} times {PLACE} and {images} images: {question!r}")
    parts = [[{"type": "text", "text": text}, {"type": "image"}] for text in texts]
    return [part for pair in parts for part in pair][:-1]


def _ragged(rows: list[list[int]]) -> Ragged:
    return Ragged.from_rows([torch.tensor(row, dtype=torch.int64) for row in rows])
