"""In which numbers a role computes, and with which token it pads."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from distflow.config.run import RoleRun


def is_half(settings: RoleRun, device: str) -> bool:
    """Whether the role computes in bfloat16."""
    return settings.dtype == "bfloat16" or (settings.dtype == "auto" and device == "cuda")


def halve(parameters: Iterable[nn.Parameter]) -> None:
    """To bfloat16, in place. Buffers stay float32: rounded rotary frequencies are another model."""
    for parameter in parameters:
        parameter.data = parameter.data.to(torch.bfloat16)


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """A token that may stand where nothing is."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
