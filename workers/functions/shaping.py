"""Rewards made of other rewards."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from distflow import Ragged, node
from distflow.observe.metrics import current
from workers.functions.kl import kl_estimate


@node(writes="rewards", bounds={"kl": ">= 0"})
def kl_in_reward(
    rewards: Tensor, rollout_logprobs: Ragged, reference_logprobs: Ragged, response_mask: Ragged | None = None, *,
    kl: float = 0.001, kl_kind: Literal["k1", "k2", "k3"] = "k1",
) -> Tensor:
    """[B]: each reward minus `kl` times the KL estimate to the reference, summed over the row's trained tokens.

    The KL term of RLHF (Ziegler et al. 2019, Eq. 2) as one number a row; with `kl_kind` k1 its expectation is the
    KL divergence itself. A row without tokens keeps its reward.
    """
    kl_T = _trained_kl(rollout_logprobs, reference_logprobs, response_mask, kl_kind)
    kl_B = torch.zeros(len(rewards), dtype=torch.float64).index_add_(0, rollout_logprobs.row_of, kl_T)
    current().mean_of("reward/kl", kl_B)
    return _like(rewards, rewards.double() - kl * kl_B)


@node(writes="token_rewards", bounds={"kl": ">= 0"}, requires={"kl": "reference_logprobs"})
def token_rewards(
    rewards: Tensor, rollout_logprobs: Ragged, reference_logprobs: Ragged | None = None,
    response_mask: Ragged | None = None, *, kl: float = 0.0, kl_kind: Literal["k1", "k2", "k3"] = "k1",
) -> Ragged:
    """A reward for each token, float32: the row's own on its last trained token, minus `kl` times each token's KL.

    The reward of RLHF as PPO and REINFORCE++ use it (Ouyang et al. 2022, Eq. 2; Hu et al. 2025), with the KL estimate
    where it arises. Untrained tokens get 0, and a row without trained tokens has nowhere to put its reward.
    """
    mask_T = torch.ones(len(rollout_logprobs.values), dtype=torch.bool)
    mask_T = mask_T if response_mask is None else response_mask.values
    place_T = torch.arange(len(mask_T))[mask_T]
    last_B = torch.full((len(rewards),), -1).scatter_reduce(0, rollout_logprobs.row_of[mask_T], place_T, "amax")
    result_T = torch.zeros(len(mask_T), dtype=torch.float64)
    result_T[last_B[last_B >= 0]] = rewards[last_B >= 0].double()
    if reference_logprobs is not None and kl:
        kl_T = _trained_kl(rollout_logprobs, reference_logprobs, response_mask, kl_kind)
        current().mean_of("reward/kl", torch.zeros(len(rewards), dtype=torch.float64).index_add_(
            0, rollout_logprobs.row_of, kl_T))
        result_T -= kl * kl_T
    return rollout_logprobs.with_values(result_T.float())


@node(writes="rewards", bounds={"max_length": ">= 1", "margin": "> 0, <= 1", "penalty": ">= 0"})
def overlong_penalty(rewards: Tensor, responses: Ragged, *, max_length: int, margin: float = 0.2,
                     penalty: float = 1.0) -> Tensor:
    """[B]: each reward plus `penalty` times the soft overlong punishment (DAPO: Yu et al. 2025, Eq. 13).

    The punishment falls linearly from 0 to -1 over the last `margin` of `max_length` tokens, where generation usually
    stops, and is -1 beyond. The paper punishes the last 4096 of 20480 tokens, a fifth, and answers that earn 1 or -1.
    """
    cache = margin * max_length
    punishment_B = ((max_length - cache - responses.lengths) / cache).clamp(-1.0, 0.0)
    current().mean_of("reward/overlong", punishment_B < 0)
    return _like(rewards, rewards.double() + penalty * punishment_B)


def _like(rewards: Tensor, shaped_B: Tensor) -> Tensor:
    """In the dtype of the rewards; rewards of whole numbers would round a penalty away."""
    return shaped_B.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def _trained_kl(rollout: Ragged, reference: Ragged, response_mask: Ragged | None, kind: str) -> Tensor:
    """float64 `[T]`, 0 where the token is not trained."""
    kl_T = kl_estimate(rollout.values.double(), reference.values.double(), kind)
    return kl_T if response_mask is None else torch.where(response_mask.values, kl_T, 0.0)
