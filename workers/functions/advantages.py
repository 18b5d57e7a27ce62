"""Advantages: of whole rows against the other rows of their prompt, and of tokens from the rewards that follow them.

Computed in float64 and returned in the dtype of the rewards (or values). After a row's last token, truncated or not,
there is no reward and the value is 0. Tokens that the policy did not choose (`mask_T` is False) are no steps in time:
the next state of a token is the next trained one, and a reward on an untrained token counts for the last trained token
before it, the action that it answers. (verl skips such tokens too, and loses their rewards.)
"""

from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from distflow.contracts.decorators import node
from distflow.data.batch import Ragged


def discounted_returns(rewards_T: Tensor, lengths_B: Tensor, gamma: float, mask_T: Tensor | None = None) -> Tensor:
    """Return the discounted return of each token: `G_t = r_t + gamma * G_(t+1)`, and 0 where it is not trained."""
    _check(rewards_T, lengths_B, mask_T, gamma=gamma)
    mask_T = torch.ones_like(rewards_T, dtype=torch.bool) if mask_T is None else mask_T
    steps_S, lengths_R = _steps(rewards_T.double(), lengths_B, mask_T)
    return _spread(_discounted_sum(steps_S, lengths_R, gamma), mask_T).to(rewards_T.dtype)


def generalized_advantage(rewards_T: Tensor, values_T: Tensor, lengths_B: Tensor, gamma: float, lam: float,
                          mask_T: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return advantages by GAE (Schulman et al. 2016, Eq. 16), and returns; both 0 where the token is not trained. With
    `delta_t = r_t + gamma * V_(t+1) - V_t` it is `A_t = delta_t + gamma * lam * A_(t+1)`; returns are `A + V`."""
    _check(rewards_T, lengths_B, mask_T, gamma=gamma, lam=lam)
    if values_T.shape != rewards_T.shape:
        raise ValueError(f"rewards {tuple(rewards_T.shape)} and values {tuple(values_T.shape)} differ: one per token")
    mask_T = torch.ones_like(rewards_T, dtype=torch.bool) if mask_T is None else mask_T
    rewards_S, lengths_R = _steps(rewards_T.double(), lengths_B, mask_T)
    values_S = values_T.detach().double()[mask_T]
    delta_S = rewards_S + gamma * _later(values_S, lengths_R, 1) - values_S
    advantages_S = _discounted_sum(delta_S, lengths_R, gamma * lam)
    return (_spread(advantages_S, mask_T).to(values_T.dtype),
            _spread(advantages_S + values_S, mask_T).to(values_T.dtype))


def _discounted_sum(values_S: Tensor, lengths_R: Tensor, discount: float) -> Tensor:
    summed, longest = 1, int(lengths_R.max()) if len(lengths_R) else 0
    while summed < longest:
        values_S = values_S + discount**summed * _later(values_S, lengths_R, summed)
        summed *= 2
    return values_S


def _later(values_S: Tensor, lengths_R: Tensor, steps: int) -> Tensor:
    end_S = torch.repeat_interleave(lengths_R.cumsum(0), lengths_R)
    index_S = torch.arange(len(values_S), device=values_S.device) + steps
    shifted_S = torch.nn.functional.pad(values_S, (0, steps))[steps:]
    return torch.where(index_S < end_S, shifted_S, 0.0)


def _steps(rewards_T: Tensor, lengths_B: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
    row_T = torch.repeat_interleave(torch.arange(len(lengths_B), device=lengths_B.device), lengths_B)
    trained_R = torch.zeros_like(lengths_B).index_add(0, row_T, mask_T.to(lengths_B.dtype))
    step_T = mask_T.cumsum(0) - 1  # the last trained token up to here, of whatever row
    first_R = trained_R.cumsum(0) - trained_R
    answers_T = step_T >= first_R[row_T]  # before the row's first trained token there is no action
    rewards_S = rewards_T.new_zeros(int(trained_R.sum()))
    return rewards_S.index_add(0, step_T[answers_T], rewards_T.detach()[answers_T]), trained_R


def _spread(values_S: Tensor, mask_T: Tensor) -> Tensor:
    return values_S.new_zeros(mask_T.shape).masked_scatter(mask_T, values_S)


def _check(rewards_T: Tensor, lengths_B: Tensor, mask_T: Tensor | None, **shares: float) -> None:
    if rewards_T.shape != (int(lengths_B.sum()),):
        raise ValueError(f"rewards have shape {tuple(rewards_T.shape)}, but the lengths add up to "
                         f"{int(lengths_B.sum())} tokens")
    if mask_T is not None and (mask_T.dtype != torch.bool or mask_T.shape != rewards_T.shape):
        raise ValueError(f"the mask says which tokens are trained: bool {tuple(rewards_T.shape)}, not "
                         f"{mask_T.dtype} {tuple(mask_T.shape)}")
    for name, value in shares.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be from 0 to 1; got {value}")


@node(writes="advantages", keep_together="group")
def group_advantage(rewards: Tensor, group: Tensor, *, epsilon: NonNegativeFloat = 1e-6, scale: bool = True) -> Tensor:
    """Compare each reward with its group's mean, in units of the group's deviation (GRPO: Shao et al. 2024, 4.1.2).

    `(r - mean) / (std + epsilon)`, `std` unbiased; 0 in groups of equal rewards or of one row (verl: the raw reward).
    Without `scale` there is no division, which favours prompts of little spread (Dr. GRPO: Liu et al. 2025).
    """
    if not epsilon >= 0:
        raise ValueError(f"epsilon is added to a deviation and must be at least 0; got {epsilon}")
    centred_B, size_B, index_B = _centred(rewards, group)
    if not scale:
        return centred_B.to(_result_dtype(rewards))
    variance_B = _group_sum(centred_B.square(), index_B) / (size_B - 1).clamp(min=1)
    deviation_B = variance_B.sqrt()
    # Where the deviation is 0 so is the numerator: any divisor will do but 0, which epsilon may be.
    divisor_B = torch.where(deviation_B > 0, deviation_B + epsilon, 1.0)
    return (centred_B / divisor_B).to(_result_dtype(rewards))


@node(writes="advantages", keep_together="group")
def leave_one_out_advantage(rewards: Tensor, group: Tensor) -> Tensor:
    """Subtract from each reward the mean of its group's others (RLOO: Kool et al. 2019; Ahmadian et al. 2024)."""
    centred_B, size_B, _ = _centred(rewards, group)
    return (centred_B * size_B / (size_B - 1).clamp(min=1)).to(_result_dtype(rewards))


def _centred(rewards_B: Tensor, group_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _check_advantages(rewards_B, group_B)
    _, index_B = torch.unique(group_B, return_inverse=True)
    rewards_B = rewards_B.detach().to(torch.float64)
    # Taking a group's least reward off first makes equal rewards exactly 0. Their mean in floating point need not be
    # their value, and a small epsilon would blow that rounding error up into an advantage.
    least_G = torch.full_like(rewards_B, torch.inf).scatter_reduce(0, index_B, rewards_B, "amin")
    above_B = rewards_B - least_G[index_B]
    size_B = _group_sum(torch.ones_like(above_B), index_B)
    return above_B - _group_sum(above_B, index_B) / size_B, size_B, index_B


def _group_sum(values_B: Tensor, index_B: Tensor) -> Tensor:
    return torch.zeros_like(values_B).index_add(0, index_B, values_B)[index_B]


def _result_dtype(rewards_B: Tensor) -> torch.dtype:
    return rewards_B.dtype if rewards_B.is_floating_point() else torch.get_default_dtype()


def _check_advantages(rewards_B: Tensor, group_B: Tensor) -> None:
    if rewards_B.dim() != 1 or rewards_B.shape != group_B.shape:
        shapes = f"{tuple(rewards_B.shape)} and {tuple(group_B.shape)}"
        raise ValueError(f"rewards and group ids are one number per row each; got shapes {shapes}")
    if group_B.is_floating_point() or group_B.is_complex():
        raise ValueError(f"group ids must be integers, not {group_B.dtype}: equal floats are no way to find a group")
    bad = (~torch.isfinite(rewards_B)).nonzero().flatten().tolist()
    if bad:
        rows = ", ".join(map(str, bad[:8])) + (", …" if len(bad) > 8 else "")
        raise ValueError(f"{len(bad)} of {rewards_B.numel()} rewards are not finite (rows {rows}); one would spoil its "
                         "whole group. Return a number for every sample from the reward function, or leave the row out")


@node(writes="advantages")
def baseline_advantage(rewards: Tensor, baselines: Tensor) -> Tensor:
    """Subtract a baseline from each reward: in ReMax the reward of the greedy answer (Li et al. 2024)."""
    return rewards - baselines


@node(writes="advantages")
def discounted_advantage(token_rewards: Ragged, response_mask: Ragged | None = None, *,
                         gamma: Annotated[float, Field(ge=0, le=1)] = 1.0) -> Ragged:
    """Take each token's discounted return as its advantage: with `gamma` 1 and a KL penalty per token REINFORCE++'s
    (Hu et al. 2025), to be normalised over the whole batch by the update."""
    mask_T = None if response_mask is None else response_mask.values
    return token_rewards.with_values(discounted_returns(token_rewards.values, token_rewards.lengths, gamma, mask_T))
