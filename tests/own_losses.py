"""Losses as users write them: two shipped ones written again, and one that no shipped loss is like."""

import torch
from torch import Tensor

from distflow import loss, metric


@loss
def clipped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip: float = 0.2) -> Tensor:
    """PPO's."""
    ratio = (logprobs - old_logprobs).exp()
    metric("own/logprobs", logprobs)
    return torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip, 1 + clip) * advantages)


@loss
def geometric(logprobs: Tensor, old_logprobs: Tensor, lengths: Tensor, advantages: Tensor, *, low: float,
              high: float) -> Tensor:
    """GSPO's, by its equation 14."""
    constant = logprobs.detach()
    of_rows = [row.mean().expand(len(row)) for row in (constant - old_logprobs).split(lengths.tolist())]
    ratio = (torch.cat(of_rows) + logprobs - constant).exp()
    return torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)


@loss
def unsure(logprobs: Tensor) -> Tensor:
    """Draws the tokens that were sampled towards a probability of 1, whatever they have earned."""
    return logprobs.square()


@loss
def averaged(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Returns one number for all tokens."""
    return (-logprobs * advantages).mean()


@loss
def cut_off(logprobs: Tensor) -> Tensor:
    """Returns what has no gradient."""
    return -logprobs.detach()


@loss
def forgotten(logprobs: Tensor) -> None:
    """Returns nothing."""


@loss
def demanding(logprobs: Tensor, *, most: int) -> Tensor:
    """Asks for 64 TiB where a micro-batch has more than `most` tokens."""
    if len(logprobs) > most:
        torch.empty(1 << 46, dtype=torch.uint8)
    return -logprobs
