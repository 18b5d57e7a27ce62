"""Rewards made of other rewards."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from distflow import Ragged, node
from distflow.observe.metrics import current
from workers.functions.kl import kl_estimate


@node(writes="rewards", bounds={"kl": ">= 0"})
def kl_in_reward(rewards: Tensor, rollout_logprobs: Ragged, reference_logprobs: Ragged, *, kl: float = 0.001,
                 kl_kind: Literal["k1", "k2", "k3"] = "k1") -> Tensor:
    """[B]: each reward minus `kl` times the KL estimate to the reference, summed over the row's tokens.

    The KL term of RLHF (Ziegler et al. 2019, Eq. 2) as one number a row; with `kl_kind` k1 its expectation is the
    KL divergence itself. A row without tokens keeps its reward.
    """
    kl_T = kl_estimate(rollout_logprobs.values, reference_logprobs.values, kl_kind)
    kl_B = torch.zeros(len(rewards), dtype=torch.float64).index_add_(0, rollout_logprobs.row_of, kl_T.double())
    current().mean_of("reward/kl", kl_B)
    return (rewards - kl * kl_B).to(rewards.dtype)
