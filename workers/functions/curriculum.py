"""Curriculum: nodes that set how many prompts each training set gives in the next step, by how hard it is now."""

from __future__ import annotations

import torch
from pydantic import PositiveFloat
from torch import Tensor

from distflow.contracts.decorators import node
from distflow.data.dataloader import source_weight
from distflow.telemetry.metrics import current


@node(keep_together="group")
def weigh_by_difficulty(rewards: Tensor, group: Tensor, source: list[str], *, least: PositiveFloat = 0.05) -> None:
    """Weigh each training set by the variance of rewards among the answers to a prompt, the mean over its prompts, plus
    `least`. What is always solved or never teaches nothing; with rewards of 0 and 1 the variance is p (1 - p) (Foster &
    Foerster 2025, "Learning to Reason at the Frontier of Learnability")."""
    _, index, counts = torch.unique(group, return_inverse=True, return_counts=True)
    rewards_B = rewards.double()
    means = torch.zeros(len(counts), dtype=torch.float64).index_add(0, index, rewards_B) / counts
    squares = (rewards_B - means[index]).square()
    variances_B = (torch.zeros_like(means).index_add(0, index, squares) / counts)[index]
    for name in sorted(set(source)):
        values = variances_B[[each == name for each in source]]
        current().mean_of(f"data/variance/{name}", values)
        source_weight(name, values + least)
