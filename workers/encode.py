"""From a record of a dataset to the columns that every dataset gives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedTokenizerBase

from distflow.data.batch import ColumnData, Ragged, encode_text
from distflow.data.problems import answer_text, messages_of, question_text, tools_of
from distflow.data.records import Record
from distflow.observe.metrics import current
from distflow.schema.run import Data
from workers.engines.chat import prompt_tokens, require_template
from workers.eyes import Eyes
from workers.roles import encode_targets


def encoder(tokenizer: PreTrainedTokenizerBase, data: Data,
            eyes: Eyes | None = None) -> Callable[[list[Record]], dict[str, ColumnData]]:
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
                   eyes: Eyes | None = None) -> tuple[Ragged, Ragged | None, int]:
    """The records' questions, what they show (None without `eyes`), and how many of them lost their beginning."""
    if eyes:
        return *eyes.prompts(tokenizer, data, records), 0
    prompts = [prompt_tokens(tokenizer, messages_of(record, data), tools_of(record, data), data.enable_thinking)
               for record in records]
    cut = sum(len(row) > data.max_prompt_tokens for row in prompts)
    return _ragged([row[-data.max_prompt_tokens :] for row in prompts]), None, cut


def _ragged(rows: list[list[int]]) -> Ragged:
    return Ragged.from_rows([torch.tensor(row, dtype=torch.int64) for row in rows])
