"""What rewards of single tokens are worth to the tokens before them.

Rows lie back to back in `[T]` tensors, `lengths_B` tokens each; nothing crosses from one row into another. A row ends
where its response ends, truncated or not: after its last token there is no reward and the value is 0.

Tokens that the policy did not choose (of a tool or an environment: `mask_T` is False) are no steps in time. They are
passed over: the next state of a token is the next trained one, and a reward that stands on one of them counts for the
last trained token before it, which is the action that it answers. (verl skips them too, and loses such rewards.)
"""

import torch
from torch import Tensor


def discounted_returns(rewards_T: Tensor, lengths_B: Tensor, gamma: float, mask_T: Tensor | None = None) -> Tensor:
    """The return of each token: `G_t = r_t + gamma * G_(t+1)`, and 0 for tokens that are not trained.

    Args:
        rewards_T: one reward per token.
        lengths_B: int64, tokens per row; a row may have none.
        gamma: discount per trained token, from 0 to 1.
        mask_T: bool, True where the token is trained; None trains every token.

    Returns:
        `[T]`, computed in float64 and returned in the dtype of the rewards.

    Raises:
        ValueError: shapes that do not fit, or a discount out of range.
    """
    _check(rewards_T, lengths_B, mask_T, gamma=gamma)
    mask_T = torch.ones_like(rewards_T, dtype=torch.bool) if mask_T is None else mask_T
    steps_S, lengths_R = _steps(rewards_T.double(), lengths_B, mask_T)
    return _spread(_discounted_sum(steps_S, lengths_R, gamma), mask_T).to(rewards_T.dtype)


def generalized_advantage(
    rewards_T: Tensor, values_T: Tensor, lengths_B: Tensor, gamma: float, lam: float, mask_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (GAE: Schulman et al. 2016, Eq. 16) over ragged rows.

    With `delta_t = r_t + gamma * V_(t+1) - V_t` it is `A_t = delta_t + gamma * lam * A_(t+1)`. `lam` 1 gives the
    discounted return minus the value, `lam` 0 the one-step error.

    Args:
        rewards_T: one reward per token.
        values_T: the critic's value of the state that the token was chosen in; a constant.
        lengths_B: int64, tokens per row; a row may have none.
        gamma, lam: each from 0 to 1.
        mask_T: bool, True where the token is trained; None trains every token.

    Returns:
        `advantages_T`, and `returns_T = advantages_T + values_T`, which the critic is to foretell; both 0 where the
        token is not trained. Computed in float64 and returned in the dtype of the values.

    Raises:
        ValueError: shapes that do not fit, or a discount out of range.
    """
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
    """`x_t + discount * x_(t+1) + …` to the row's end.

    Each pass doubles how far a token sees, so that the longest row costs its logarithm and not its length.
    """
    reach, longest = 1, int(lengths_R.max()) if len(lengths_R) else 0
    while reach < longest:
        values_S = values_S + discount**reach * _later(values_S, lengths_R, reach)
        reach *= 2
    return values_S


def _later(values_S: Tensor, lengths_R: Tensor, steps: int) -> Tensor:
    """The value `steps` further in the same row, or 0."""
    end_S = torch.repeat_interleave(lengths_R.cumsum(0), lengths_R)
    place_S = torch.arange(len(values_S), device=values_S.device) + steps
    shifted_S = torch.nn.functional.pad(values_S, (0, steps))[steps:]
    return torch.where(place_S < end_S, shifted_S, 0.0)


def _steps(rewards_T: Tensor, lengths_B: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
    """The reward of each trained token, with those of the untrained ones behind it; and trained tokens per row."""
    row_T = torch.repeat_interleave(torch.arange(len(lengths_B), device=lengths_B.device), lengths_B)
    trained_R = torch.zeros_like(lengths_B).index_add(0, row_T, mask_T.to(lengths_B.dtype))
    step_T = mask_T.cumsum(0) - 1  # the last trained token up to here, of whatever row
    first_R = trained_R.cumsum(0) - trained_R
    answers_T = step_T >= first_R[row_T]  # what stands before the row's first trained token answers no action of it
    rewards_S = rewards_T.new_zeros(int(trained_R.sum()))
    return rewards_S.index_add(0, step_T[answers_T], rewards_T.detach()[answers_T]), trained_R


def _spread(values_S: Tensor, mask_T: Tensor) -> Tensor:
    """Back to all tokens, 0 where untrained."""
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
