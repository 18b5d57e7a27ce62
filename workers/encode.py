"""Encodes records of a dataset as columns: prompts and targets as tokens, images as pixels and tokens of prompts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from distflow.config.load import Spec
from distflow.config.run import Data
from distflow.data.batch import ColumnData, Ragged, encode_text
from distflow.data.checks import training_fields
from distflow.data.data_files import data_files
from distflow.data.dataloader import ONE, Dataloader, Mixture, UsableRecords
from distflow.data.dataset import LabelledRecords, OversizedImage, Record, open_images, open_training_sets
from distflow.data.load_balance import LoadBalance
from distflow.data.problems import Message, answer_text, messages_of, question_text, tools_of
from distflow.errors import InvalidInput
from distflow.plan import Layout
from distflow.telemetry.metrics import current
from workers.engines.chat import prompt_tokens, require_template
from workers.engines.role_engines import RoleEngines, encode_targets
from workers.engines.vision import ImageProcessor

PLACEHOLDER = "<image>"  # stands for an image in a question
NO_IMAGE = Ragged(Ragged(torch.empty(0, 3, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)),
                  torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True)
class ImageEncoder:

    image_processor: ImageProcessor
    token: int  # the prompt has it once for each token of an image
    folder: Path  # paths in the data are relative to it

    def prompts(self, tokenizer: PreTrainedTokenizerBase, data: Data, records: list[Record]) -> tuple[Ragged, Ragged]:
        """Return the questions by the chat template, and the images as lines of pixels [width, 3] (uint8)."""
        prompts, pixels = [], []
        for record in records:
            images = [self.image_processor.pixels(image)
                      for image in open_images(record, data.images or "", self.folder)]
            messages = _with_image_parts(messages_of(record, data), len(images))
            prompt = prompt_tokens(tokenizer, messages, tools_of(record, data), **data.for_template)
            prompts.append(torch.tensor(self._spread(prompt, images, data.max_prompt_tokens)))
            pixels.append(Ragged.from_rows(images) if images else NO_IMAGE)
        return Ragged.from_rows(prompts), Ragged.from_rows(pixels)

    def too_long(self, tokenizer: PreTrainedTokenizerBase, data: Data, record: Record) -> bool:
        """Return whether a question with its images is longer than prompts may be, of which nothing can be cut."""
        try:
            images = open_images(record, data.images or "", self.folder)
        except OversizedImage:
            return True
        messages = _with_image_parts(messages_of(record, data), len(images))
        text = len(prompt_tokens(tokenizer, messages, tools_of(record, data), **data.for_template))
        added = sum(self.image_processor.tokens_of(image.height, image.width) - 1 for image in images)
        return text + added > data.max_prompt_tokens

    def _spread(self, prompt: list[int], images: list[Ragged], longest: int) -> list[int]:
        count = sum(token == self.token for token in prompt)
        if count != len(images):
            raise InvalidInput(f"the chat template has {count} places for the {len(images)} images of a question. "
                               'Take the model\'s own, which turns {"type": "image"} into one token')
        counts = iter([self.image_processor.tokens(image) for image in images])
        result = [token for each in prompt for token in ([each] * next(counts) if each == self.token else [each])]
        if len(result) > longest:
            raise InvalidInput(f"a prompt with {len(images)} images has {len(result):,} tokens, more than "
                               f"data.max_prompt_tokens ({longest:,}), and images cannot be cut. Raise it, or shrink "
                               "the images")  # a record that was not judged before
        return result


def image_encoder_of(role: RoleEngines, data: Data, path: Path) -> ImageEncoder | None:
    if data.images is None:
        return None
    assert role.image_processor, "the planner refuses images for a model without an image processor"
    return ImageEncoder(role.image_processor, role.config.image_token_id, path.parent)


def _with_image_parts(messages: list[Message], images: int) -> list[Message]:
    """Return messages as lists of text and images, as vision-language templates take them; lists stay as they are."""
    count = sum(_image_count(message) for message in messages)
    if count not in (0, images):
        raise InvalidInput(f"a question says {PLACEHOLDER} {count} times and has {images} images: {messages!r}")
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), 0)
    return [message if isinstance(message.get("content"), list) else
            {**message, "content": _content(message.get("content") or "", images * (index == first and not count))}
            for index, message in enumerate(messages)]


def _image_count(message: Message) -> int:
    content = message.get("content") or ""
    if isinstance(content, list):
        return sum(part.get("type") == "image" for part in content)
    return content.count(PLACEHOLDER)


def _content(text: str, before: int) -> str | list[dict[str, str]]:
    """Return the parts of a text, with `before` more images in front of it; the text itself without any image."""
    texts = [*[""] * before, *text.split(PLACEHOLDER)]
    parts = [part for text in texts for part in ({"type": "text", "text": text}, {"type": "image"})][:-1]
    return [part for part in parts if part.get("text") != ""] if len(texts) > 1 else text


def encoder(tokenizer: PreTrainedTokenizerBase, data: Data,
            image_encoder: ImageEncoder | None = None) -> Callable[[list[Record]], dict[str, ColumnData]]:
    """Return a function that encodes questions by the chat template, if there is one, and answers with an end token. Of
    longer prompts than `max_prompt_tokens` the beginning is lost, of targets the end; metrics count them."""
    require_template(tokenizer, data)

    def encode(records: list[Record]) -> dict[str, ColumnData]:
        questions = [question_text(record[data.question]) for record in records]
        answers = [answer_text(record.get(data.answer, "")) for record in records]  # where nobody reads them
        prompts, images, cut = encode_prompts(tokenizer, data, records, image_encoder)
        current().add("data/prompts_cut", cut)
        extra = {name: encode_text(answer_text(record[name]) for record in records) for name in data.columns}
        if images is not None:
            extra["images"] = images
        return {"prompts": prompts,
                "targets": encode_targets(tokenizer, data.max_target_tokens, answers),
                "questions": encode_text(questions), "answers": encode_text(answers), **extra}

    return encode


def encode_prompts(tokenizer: PreTrainedTokenizerBase, data: Data, records: list[Record],
                   image_encoder: ImageEncoder | None = None) -> tuple[Ragged, Ragged | None, int]:
    """Return the records' questions, their images (None without an encoder), and how many questions were cut."""
    if image_encoder:
        return *image_encoder.prompts(tokenizer, data, records), 0
    prompts = [_prompt(tokenizer, data, record) for record in records]
    cut = sum(len(row) > data.max_prompt_tokens for row in prompts)
    kept = [torch.tensor(row[-data.max_prompt_tokens :], dtype=torch.int64) for row in prompts]
    return Ragged.from_rows(kept), None, cut


def _prompt(tokenizer: PreTrainedTokenizerBase, data: Data, record: Record) -> list[int]:
    return prompt_tokens(tokenizer, messages_of(record, data), tools_of(record, data), **data.for_template)


def _too_long(tokenizer: PreTrainedTokenizerBase, data: Data, record: Record) -> bool:
    return len(_prompt(tokenizer, data, record)) > data.max_prompt_tokens


def data_file(spec: Spec, name: str) -> Path:
    path = spec.data_path(name)
    assert path is not None
    return path


def dataloader(spec: Spec, role: RoleEngines, share: int | None = None, layout: Layout = ONE,
               balance: LoadBalance | None = None, tokenizer: PreTrainedTokenizerBase | None = None) -> Dataloader:
    """Return the loader of prompts for a role. `tokenizer`: of another role, whose prompts they are."""
    data, fields = spec.run.data, training_fields(spec)
    training = open_training_sets(data, spec.data_path)
    opened = [*training.values()]
    tokenizer, too_long = tokenizer or role.tokenizer, None
    images = image_encoder_of(role, data, data_file(spec, next(iter(data.train))))
    if images:
        too_long = functools.partial(images.too_long, tokenizer, data)
    elif data.long_prompts == "drop":
        too_long = functools.partial(_too_long, tokenizer, data)
    sets = [UsableRecords(records, fields, too_long) for records in opened]
    names = [each.name for each in opened if isinstance(each, LabelledRecords)]
    records = sets[0] if len(sets) == 1 else Mixture(sets, data.turns, names)
    encode = encoder(tokenizer, data, images)
    return Dataloader(records, encode, data.batch, spec.run.seed, share, layout, balance, data_files(spec, training))
