"""Encodes records of a dataset as columns: prompts and targets as tokens, images as pixels and tokens of prompts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase

from distflow.config.run import Data
from distflow.config.spec import Spec
from distflow.contracts.nodes import TARGETS, samples, token_columns
from distflow.data.batch import ColumnData, Ragged, encode_text
from distflow.data.checks import training_fields
from distflow.data.data_files import data_files, frozen_weights
from distflow.data.dataloader import ONE, Dataloader, Encode, Mixture, UsableRecords
from distflow.data.dataset import LabelledRecords, OversizedImage, Record, open_images, open_training_sets
from distflow.data.problems import (
    Message,
    answer_text,
    asked_and_answered,
    conversation_of,
    differs_from_question,
    mended_record,
    messages_of,
    question_text,
    template_variables,
    tools_of,
)
from distflow.errors import InvalidInput
from distflow.plan import Layout
from distflow.telemetry.metrics import current
from workers.engines.chat import UNRENDERED, ImitatedTokens, imitated_tokens, prompt_tokens, require_template
from workers.engines.role_engines import RoleEngines
from workers.engines.vision import LibraryProcessor, Processor

PLACEHOLDER = "<image>"  # stands for an image in a question
NO_IMAGE = Ragged(Ragged(torch.empty(0, 3, dtype=torch.uint8), torch.empty(0, dtype=torch.int64)),
                  torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True)
class ImageEncoder:

    image_processor: Processor
    token: int  # what a chat template writes in place of an image
    folder: Path  # paths in the data are relative to it

    def prompts(self, tokenizer: PreTrainedTokenizerBase, data: Data, records: list[Record]) -> tuple[Ragged, Ragged]:
        """Return the questions by the chat template, and the images as lines of pixels [width, 3] (uint8)."""
        prompts, pixels = [], []
        for record in records:
            images = open_images(record, data.images or "", self.folder)
            messages = _with_image_parts(messages_of(record, data), len(images))
            prompt = prompt_tokens(tokenizer, messages, tools_of(record, data), **template_variables(record, data))
            prompts.append(torch.tensor(self._spread(prompt, images, data.max_prompt_tokens)))
            pixels.append(Ragged.from_rows([*map(self.image_processor.pixels, images)]) if images else NO_IMAGE)
        return Ragged.from_rows(prompts), Ragged.from_rows(pixels)

    def too_long(self, tokenizer: PreTrainedTokenizerBase, data: Data, record: Record) -> bool:
        """Return whether a question with its images is longer than prompts may be, of which nothing can be cut."""
        try:
            images = open_images(record, data.images or "", self.folder)
        except OversizedImage:
            return True
        messages = _with_image_parts(messages_of(record, data), len(images))
        text = len(prompt_tokens(tokenizer, messages, tools_of(record, data), **template_variables(record, data)))
        added = sum(len(span) - 1 for span in self._spans(images))
        return text + added > data.max_prompt_tokens

    def _spans(self, images: list[Image.Image]) -> list[list[int]]:
        return self.image_processor.spans(images, self.token) if images else []

    def _spread(self, prompt: list[int], images: list[Image.Image], longest: int) -> list[int]:
        count = sum(token == self.token for token in prompt)
        if count != len(images):
            raise InvalidInput(f"the chat template has {count} places for the {len(images)} images of a question. "
                               'Take the model\'s own, which turns {"type": "image"} into one token')
        spans = iter(self._spans(images))
        result = [token for each in prompt for token in (next(spans) if each == self.token else [each])]
        if len(result) > longest:
            raise InvalidInput(f"a prompt with {len(images)} images has {len(result):,} tokens, more than "
                               f"data.max_prompt_tokens ({longest:,}), and images cannot be cut. Raise it, or shrink "
                               "the images")
        return result


def image_encoder_of(role: RoleEngines, data: Data, path: Path) -> ImageEncoder | None:
    if data.images is None:
        return None
    processor = role.image_processor
    assert processor, "a model that is loaded for images has their processor"
    token = processor.token if isinstance(processor, LibraryProcessor) else role.config.image_token_id
    return ImageEncoder(processor, token, path.parent)


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


def encoder(tokenizer: PreTrainedTokenizerBase, data: Data, tokens: Collection[str] = (TARGETS,),
            image_encoder: ImageEncoder | None = None, asks: bool = True, ends: Collection[int] = ()) -> Encode:
    """Return a function that encodes questions and answers by the chat template, if there is one. Of longer prompts
    than `max_prompt_tokens` the beginning is lost, of targets the end; metrics count them. `tokens`: see
    `token_columns`; other columns are texts, and targets left out. Unless the run `asks` (samples answers), prompts are
    what precedes a target in its conversation, and not what the template would have continued. `ends`: see
    `imitated_tokens`."""
    require_template(tokenizer, data)

    def encode(given: list[Record]) -> dict[str, ColumnData]:
        records = [*map(mended_record, given)]
        current().add("data/texts_mended", sum(one is not other for one, other in zip(records, given)))
        asked, answers = zip(*(asked_and_answered(record, data) for record in records)) if records else ((), ())
        learns = TARGETS in tokens
        imitated = [_imitated(tokenizer, data, record, ends) for record in records] if learns or not asks else []
        prompts, images, cut = encode_prompts(tokenizer, data, records, image_encoder) if asks or image_encoder else \
            _cut([each.prompt for each in imitated], data)
        current().add("data/prompts_cut", cut)
        extra: dict[str, ColumnData] = {
            name: _cut_targets([_imitated(tokenizer, data, record, ends, name) for record in records], data)
            if name in tokens else encode_text(_text(record, name, data) for record in records)
            for name in data.columns}
        if images is not None:
            extra["images"] = images
        return {"prompts": prompts, **(_targets(imitated, data) if learns else {}), **extra,
                "questions": encode_text(map(question_text, asked)), "answers": encode_text(map(answer_text, answers))}

    return encode


def _imitated(tokenizer: PreTrainedTokenizerBase, data: Data, record: Record, ends: Collection[int],
              field: str = "") -> ImitatedTokens:
    """Return the tokens of the record's answer, or of that in another `field`, of which the last message is learned."""
    if field:
        _check_question(record, field, data)
    messages = conversation_of(record, data, field)
    with _rendering(messages):
        return imitated_tokens(tokenizer, messages, tools_of(record, data), "last" if field else data.targets, ends,
                               **template_variables(record, data))


@contextlib.contextmanager
def _rendering(messages: list[Message]) -> Iterator[None]:
    """Raise InvalidInput where the chat template refuses messages."""
    try:
        yield
    except UNRENDERED as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise InvalidInput(f"the chat template cannot render a record with messages of {roles}: {error}. Take out of "
                           "the records (or `data.system_prompt`) what it refuses, or take a model whose template has "
                           "it") from None


def _targets(imitated: list[ImitatedTokens], data: Data) -> dict[str, ColumnData]:
    targets = _cut_targets(imitated, data)
    if data.targets == "last":
        return {TARGETS: targets}
    masks = [torch.tensor(each.mask[: data.max_target_tokens], dtype=torch.bool) for each in imitated]
    return {TARGETS: targets, "target_mask": Ragged.from_rows(masks, torch.bool)}


def _cut_targets(imitated: list[ImitatedTokens], data: Data) -> Ragged:
    longest = data.max_target_tokens
    current().add("data/targets_cut", sum(len(each.target) > longest for each in imitated))
    return Ragged.from_rows([torch.tensor(each.target[:longest], dtype=torch.int64) for each in imitated])


def _text(record: Record, name: str, data: Data) -> str:
    _check_question(record, name, data)
    return answer_text(record[name])


def _check_question(record: Record, name: str, data: Data) -> None:
    """Raise InvalidInput if a field is an answer to another question than the record's."""
    if differs_from_question(record[name], record[data.question]):
        raise InvalidInput(f"field `{name}` is a conversation that begins unlike the question of its record")


def _cut(prompts: list[list[int]], data: Data) -> tuple[Ragged, None, int]:
    """Return the ends of prompts, which have no images, and how many were longer."""
    cut = sum(len(row) > data.max_prompt_tokens for row in prompts)
    kept = [torch.tensor(row[-data.max_prompt_tokens :], dtype=torch.int64) for row in prompts]
    return Ragged.from_rows(kept), None, cut


def encode_prompts(tokenizer: PreTrainedTokenizerBase, data: Data, records: list[Record],
                   image_encoder: ImageEncoder | None = None) -> tuple[Ragged, Ragged | None, int]:
    """Return the records' questions, their images (None without an encoder), and how many questions were cut."""
    if image_encoder:
        return *image_encoder.prompts(tokenizer, data, records), 0
    return _cut([_prompt(tokenizer, data, record) for record in records], data)


def _prompt(tokenizer: PreTrainedTokenizerBase, data: Data, record: Record) -> list[int]:
    messages = messages_of(record, data)
    with _rendering(messages):
        return prompt_tokens(tokenizer, messages, tools_of(record, data), **template_variables(record, data))


def _too_long(tokenizer: PreTrainedTokenizerBase, data: Data, record: Record) -> bool:
    return len(_prompt(tokenizer, data, record)) > data.max_prompt_tokens


def data_file(spec: Spec, name: str) -> Path:
    path = spec.data_path(name)
    assert path is not None
    return path


def dataloader(spec: Spec, role: RoleEngines, share: int | None = None, layout: Layout = ONE,
               tokenizer: PreTrainedTokenizerBase | None = None) -> Dataloader:
    """Return the loader of prompts for a role. `tokenizer`: of another role, whose prompts they are."""
    data, fields = spec.run.data, training_fields(spec)
    training = open_training_sets(data, spec.data_path)
    opened = [*training.values()]
    ends = role.known_ends if tokenizer in (None, role.tokenizer) else ()
    tokenizer, too_long = tokenizer or role.tokenizer, None
    images = image_encoder_of(role, data, data_file(spec, next(iter(data.train))))
    if images:
        too_long = functools.partial(images.too_long, tokenizer, data)
    elif data.long_prompts == "drop":
        too_long = functools.partial(_too_long, tokenizer, data)
    sets = [UsableRecords(records, fields, too_long) for records in opened]
    names = [each.name for each in opened if isinstance(each, LabelledRecords)]
    records = Mixture(sets, data.turns, names)
    encode = encoder(tokenizer, data, token_columns(spec), images, samples(spec), ends)
    return Dataloader(records, encode, data.batch, spec.run.seed, share, layout,
                      data_files(spec, training) | frozen_weights(spec))
