"""Precision of a role, and its padding token."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from distflow.config.run import RoleRun


def is_half(settings: RoleRun, device: str) -> bool:
    """Return whether the role computes in bfloat16."""
    return settings.dtype == "bfloat16" or (settings.dtype == "auto" and device == "cuda")


def halve(parameters: Iterable[nn.Parameter]) -> None:
    """Convert parameters to bfloat16 in place. Buffers stay float32: rounded rotary frequencies change the model."""
    for parameter in parameters:
        parameter.data = parameter.data.to(torch.bfloat16)


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the padding token, or the end token if the tokenizer has none."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
