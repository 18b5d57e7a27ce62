"""From a record of a dataset to the columns that every dataset gives.

Questions with images: what they show as a column, and as many tokens in the prompt as the model will see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from distflow.config.run import Data
from distflow.data.batch import ColumnData, Ragged, encode_text
from distflow.data.dataset import Record, open_images
from distflow.data.problems import Message, answer_text, messages_of, question_text, tools_of
from distflow.errors import InvalidInput
from distflow.telemetry.metrics import current
from workers.engines.chat import prompt_tokens, require_template
from workers.engines.vision import ImageProcessor
from workers.roles import RoleEngines, encode_targets

PLACE = "<image>"
"""Where an image stands in a question."""
NO_IMAGE = Ragged(Ragged(torch.empty(0, 3, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)),
                  torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True)
class ImageEncoder:
    """How the images of a dataset become pixels, and tokens of prompts."""

    sight: ImageProcessor
    token: int
    """Stands in a prompt for each token of an image."""
    folder: Path
    """Paths in the data are relative to it."""

    def prompts(self, tokenizer: PreTrainedTokenizerBase, data: Data, records: list[Record]) -> tuple[Ragged, Ragged]:
        """The records' questions by the chat template; and of each record its images, of each image its lines, of each
        line its pixels [width, 3] (uint8).

        Raises:
            InvalidInput: an image cannot be read, stands nowhere, or makes its prompt longer than is allowed.
        """
        prompts, shown = [], []
        for record in records:
            images = [self.sight.pixels(image) for image in open_images(record, data.images, self.folder)]
            messages = _placed(messages_of(record, data), len(images))
            prompt = prompt_tokens(tokenizer, messages, tools_of(record, data), data.enable_thinking)
            prompts.append(torch.tensor(self._spread(prompt, images, data.max_prompt_tokens)))
            shown.append(Ragged.from_rows(images) if images else NO_IMAGE)
        return Ragged.from_rows(prompts), Ragged.from_rows(shown)

    def _spread(self, prompt: list[int], images: list[Ragged], longest: int) -> list[int]:
        places = sum(token == self.token for token in prompt)
        if places != len(images):
            raise InvalidInput(f"the chat template has {places} places for the {len(images)} images of a question. "
                               'Take the model\'s own, which turns {"type": "image"} into one token')
        counts = iter([self.sight.tokens(image) for image in images])
        result = [token for each in prompt for token in ([each] * next(counts) if each == self.token else [each])]
        if len(result) > longest:
            raise InvalidInput(f"a prompt with {len(images)} images has {len(result):,} tokens, more than "
                               f"data.max_prompt_tokens ({longest:,}), and images cannot be cut. Raise it, or shrink "
                               "the images")
        return result


def image_encoder_of(role: RoleEngines, data: Data, path: Path) -> ImageEncoder | None:
    """Eyes for the data at `path`; None where none are asked for."""
    return ImageEncoder(role.sight, role.config.image_token_id, path.parent) if data.images else None


def _placed(messages: list[Message], images: int) -> list[Message]:
    """The messages with text and images in turn, as chat templates of models that see take them. Messages that are
    lists of parts already say where their images stand."""
    said = sum(_places(message) for message in messages)
    if said not in (0, images):
        raise InvalidInput(f"a question says {PLACE} {said} times and has {images} images: {messages!r}")
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), 0)
    return [message if isinstance(message.get("content"), list) else
            {**message, "content": _content(message.get("content") or "", images * (index == first and not said))}
            for index, message in enumerate(messages)]


def _places(message: Message) -> int:
    content = message.get("content") or ""
    return sum(part.get("type") == "image" for part in content) if isinstance(content, list) else content.count(PLACE)


def _content(text: str, before: int) -> str | list[dict[str, str]]:
    """The parts of a text: images where it says so, and `before` more in front of it; the text itself without any."""
    texts = [*[""] * before, *text.split(PLACE)]
    parts = [part for text in texts for part in ({"type": "text", "text": text}, {"type": "image"})][:-1]
    return [part for part in parts if part.get("text") != ""] if len(texts) > 1 else text


def encoder(tokenizer: PreTrainedTokenizerBase, data: Data,
            eyes: ImageEncoder | None = None) -> Callable[[list[Record]], dict[str, ColumnData]]:
    """Questions by the tokenizer's chat template (without one, as they are, on a line of their own), answers with end.

    A prompt longer than `max_prompt_tokens` loses its beginning, a target its end; the metrics count them.

    Raises:
        InvalidInput: the run file asks for what the tokenizer's chat template does not have.
    """
    require_template(tokenizer, data)

    def encode(records: list[Record]) -> dict[str, ColumnData]:
        questions = [question_text(record[data.question]) for record in records]
        answers = [answer_text(record[data.answer]) for record in records]
        prompts, images, cut = encode_prompts(tokenizer, data, records, eyes)
        current().add("data/prompts_cut", cut)
        extra = {name: encode_text(answer_text(record[name]) for record in records) for name in data.columns}
        if images is not None:
            extra["images"] = images
        return {"prompts": prompts,
                "targets": encode_targets(tokenizer, data.max_target_tokens, answers),
                "questions": encode_text(questions), "answers": encode_text(answers), **extra}

    return encode


def encode_prompts(tokenizer: PreTrainedTokenizerBase, data: Data, records: list[Record],
                   eyes: ImageEncoder | None = None) -> tuple[Ragged, Ragged | None, int]:
    """The records' questions, what they show (None without `eyes`), and how many of them lost their beginning."""
    if eyes:
        return *eyes.prompts(tokenizer, data, records), 0
    prompts = [prompt_tokens(tokenizer, messages_of(record, data), tools_of(record, data), data.enable_thinking)
               for record in records]
    cut = sum(len(row) > data.max_prompt_tokens for row in prompts)
    return _ragged([row[-data.max_prompt_tokens :] for row in prompts]), None, cut


def _ragged(rows: list[list[int]]) -> Ragged:
    return Ragged.from_rows([torch.tensor(row, dtype=torch.int64) for row in rows])
