"""Prompts that are made from what other nodes wrote: how one role answers another."""

from __future__ import annotations

import torch

from distflow import Ragged, node
from distflow.observe.metrics import current
from distflow.schema.registry import Template
from workers.engines.chat import prompt_tokens
from workers.roles import Role


@node(type="MODEL_INFERENCE", writes="{role}_prompts", bounds={"max_prompt_tokens": ">= 1"}, row_wise=True)
def ask(engine: Role, *, template: Template, max_prompt_tokens: int = 1024, **columns: list[str]) -> Ragged:
    """Prompts for a role: the template with each row's columns in the place of their names, as a question by the role's
    own chat template. One that is longer than `max_prompt_tokens` loses its beginning, and is counted.
    """
    texts = [template.format(**dict(zip(columns, row))) for row in zip(*columns.values())]
    rows = [torch.tensor(prompt_tokens(engine.tokenizer, text), dtype=torch.int64) for text in texts]
    current().add(f"{engine.name}/prompts_cut", sum(len(row) > max_prompt_tokens for row in rows))
    return Ragged.from_rows([row[-max_prompt_tokens:] for row in rows])
