"""Finds the texts that end a response in what has been sampled of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from workers.engines.rollout import SampledRow

_SLACK = 4
"""Tokens before those that could make up a text: the first ones of a list may be decoded unlike in their place."""


class StopStrings:
    """Texts that end a turn (`generation.stop`).

    A turn ends with the token that completes one of them. Nothing is cut off: every token that was sampled stays, with
    its log-probability, so that what is trained is what was sampled.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]):
        self.tokenizer, self.texts = tokenizer, tuple(texts)
        self.window = max(len(text.encode()) for text in self.texts) + _SLACK
        """How many of a turn's last tokens are looked at: a token has a byte or more."""

    def reached(self, row: SampledRow, tokens: Sequence[int]) -> bool:
        """Whether a text is complete with the last of the `tokens` that a turn has got here; those that another engine
        has sampled in the same turn come before them."""
        last = list(tokens[-self.window :])
        if row.begun is not None and len(last) < self.window:
            last = row.begun[0][len(last) - self.window :].tolist() + last
        said = self.tokenizer.decode(last)
        return any(text in said for text in self.texts)


def last_tokens(tokens: Tensor, counts: Tensor, slots: Tensor, window: int) -> list[list[int]]:
    """Return the last `window` of the `counts` tokens of each of these slots; no more leave the device."""
    counts = counts[slots]
    columns = counts[:, None] - window + torch.arange(window, device=tokens.device)
    last = tokens[slots[:, None], columns.clamp(min=0)].tolist()
    return [row[max(0, window - count) :] for row, count in zip(last, counts.tolist())]
