"""The baseline of OPO: Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline"."""

import torch
from torch import Tensor

from distflow import Ragged, node


@node(writes="advantages", keep_together="group")
def optimal_baseline(rewards: Tensor, group: Tensor, responses: Ragged) -> Tensor:
    """Each reward minus the mean of its group's rewards weighted by length, which has the least variance.

    It does if the gradients of different tokens are orthogonal and equally large, so that an answer's grows with its
    length.
    """
    _, prompt = torch.unique(group, return_inverse=True)
    lengths = responses.lengths.to(rewards.dtype)
    weighted, total = (torch.zeros_like(rewards).index_add(0, prompt, part) for part in (lengths * rewards, lengths))
    return rewards - (weighted / total.clamp(min=1))[prompt]
