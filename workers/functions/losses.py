"""Per-token losses. None of them averages: `aggregation.token_weights` alone says what a token counts for.

====================== =========== ===================================================== ==============================
function               `loss:`     per token, with `r = exp(logprobs - old)`             gradient beyond a bound
====================== =========== ===================================================== ==============================
clipped_policy_loss    ppo         `-min(r * A, clip(r) * A)`                            none
sequence_policy_loss   gspo        the same, `r` the row's geometric mean                none, for the whole row
capped_policy_gradient cispo       `-sg[min(r, 1 + clip_high)] * A * logprobs`           with the bound as its weight
policy_gradient        reinforce   `-A * logprobs`                                       has no bounds
====================== =========== ===================================================== ==============================

`sg` stops the gradient. Each returns `loss_T`; `ratio_T`, detached, for metrics; and `clipped_T`, bool: a bound was
active, on a token whose advantage is not 0. All tensors are [T] of trained tokens, and gradients flow to `logprobs_T`
alone. Log-ratios are clamped to +-`LOG_RATIO_LIMIT` before exp; a token beyond that has no gradient.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distflow.contracts.definitions import live
from distflow.contracts.losses import PARAMETERS, load_loss
from distflow.errors import Diagnostic, InvalidInput
from workers.functions.kl import LOG_RATIO_LIMIT

Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]
"""(logprobs [T], old [T], advantages [T], lengths [B]) → loss [T], ratio [T], clipped [T]; all tokens are trained.
`clipped` is None where the loss's bounds are not known."""

USUAL_BOUNDS = {"ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (0.0, 4.0), "reinforce": (0.0, 0.0)}
"""Default (clip, clip_high) by kind: PPO's and GSPO's papers; CISPO's cap of 5 is from Khatri et al. 2025 ("The Art of
Scaling Reinforcement Learning Compute")."""


def surrogate(kind: str, clip: float | None, clip_high: float | None, dual_clip: float | None) -> Surrogate:
    """Return the loss of that kind with its bounds. `clip` alone is both bounds; with neither the usual ones hold."""
    low, high = USUAL_BOUNDS[kind] if clip is None else (clip, clip)
    high = high if clip_high is None else clip_high
    kinds: dict[str, Surrogate] = {
        "ppo": lambda new_T, old_T, gain_T, _: clipped_policy_loss(new_T, old_T, gain_T, low, high, dual_clip),
        "gspo": lambda new_T, old_T, gain_T, rows_B: sequence_policy_loss(new_T, old_T, gain_T, rows_B, low, high),
        "cispo": lambda new_T, old_T, gain_T, _: capped_policy_gradient(new_T, old_T, gain_T, high),
        "reinforce": lambda new_T, old_T, gain_T, _: policy_gradient(new_T, old_T, gain_T)}
    return kinds[kind]


def user_loss(key: str, settings: dict[str, Any]) -> Surrogate:
    """Return the user's loss `MODULE:FUNCTION` as `surrogate` returns one; it is checked when called."""
    function = load_loss(key)
    wanted = [name for name in inspect.signature(function).parameters if name in PARAMETERS]

    def loss(new_T: Tensor, old_T: Tensor, gain_T: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor, None]:
        if not len(new_T):  # no token of the micro-batch is trained: users need not think of it
            return new_T, new_T.detach(), None
        given: dict[str, Tensor] = dict(zip(PARAMETERS, (new_T, old_T.detach(), gain_T.detach(), lengths_B)))
        loss_T = function(*(given[name] for name in wanted), **settings)
        if wrong := _not_per_token(loss_T, new_T):
            raise InvalidInput(Diagnostic(f"loss `{function.__name__}` returned {wrong[0]}", live(function).where,
                                          wrong[1]))
        return loss_T, _ratio(new_T, old_T).detach(), None

    return loss


def _not_per_token(loss_T: Any, logprobs_T: Tensor) -> tuple[str, str] | None:
    if not isinstance(loss_T, Tensor):
        return f"{type(loss_T).__name__}, not a tensor", "It returns the loss of each token, a tensor like `logprobs`."
    if loss_T.shape != logprobs_T.shape:
        return (f"a tensor of shape {list(loss_T.shape)} for {len(logprobs_T)} tokens",
                "It returns one value for each token, without mean() or sum():  aggregate:  says how tokens count.")
    if logprobs_T.requires_grad and not loss_T.requires_grad:
        return "a tensor without a gradient", "Compute it from `logprobs` without detach() and no_grad()."
    return None


def clipped_policy_loss(logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float,
                        dual_clip: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return PPO's clipped surrogate (Schulman et al. 2017, Eq. 7); DAPO raises `clip_high` alone (Yu et al. 2025,
    3.1). `dual_clip`, above 1, caps the loss of a negative advantage at `-dual_clip * A` (Ye et al. 2020, "Mastering
    Complex Control in MOBA Games with Deep Reinforcement Learning")."""
    _check_shapes(logprobs_T, old_T, advantages_T)
    advantages_T = advantages_T.detach()
    ratio_T = _ratio(logprobs_T, old_T)
    free_T = -ratio_T * advantages_T
    bounded_T = -ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_T
    loss_T, clipped_T = torch.maximum(free_T, bounded_T), bounded_T > free_T
    if dual_clip is not None:
        # For a positive advantage the cap would be a floor under a negative loss.
        capped_T = (advantages_T < 0) & (ratio_T > dual_clip)
        loss_T = torch.where(capped_T, -dual_clip * advantages_T, loss_T)
        clipped_T |= capped_T
    return loss_T, ratio_T.detach(), clipped_T


def sequence_policy_loss(logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, lengths_B: Tensor, clip_low: float,
                         clip_high: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the clipped surrogate with one ratio per row, `s = exp(mean(logprobs - old))` (GSPO: Zheng et al. 2025,
    Eq. 5 to 7), as GSPO-token (Eq. 13 to 16), `sg[s] * exp(logprobs - sg[logprobs])`, for advantages per token."""
    _check_shapes(logprobs_T, old_T, advantages_T)
    row_T = torch.repeat_interleave(torch.arange(len(lengths_B), device=lengths_B.device), lengths_B,
                                    output_size=len(logprobs_T))
    constant_T = logprobs_T.detach()
    change_T = constant_T - old_T.detach()
    mean_B = change_T.new_zeros(len(lengths_B)).index_add(0, row_T, change_T) / lengths_B.clamp(min=1)
    log_ratio_T = mean_B[row_T] + (logprobs_T - constant_T)
    return clipped_policy_loss(log_ratio_T, torch.zeros_like(constant_T), advantages_T, clip_low, clip_high)


def capped_policy_gradient(logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor,
                           clip_high: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the policy gradient with capped importance weights (CISPO: MiniMax-M1 2025, Eq. 4 and 5). The cap never
    takes a token's gradient away; there is no bound from below, as in the paper's runs."""
    _check_shapes(logprobs_T, old_T, advantages_T)
    ratio_T = _ratio(logprobs_T, old_T).detach()
    loss_T = -ratio_T.clamp(max=1.0 + clip_high) * advantages_T.detach() * logprobs_T
    return loss_T, ratio_T, (ratio_T > 1.0 + clip_high) & (advantages_T != 0)


def policy_gradient(logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `-A * logprobs` (REINFORCE: Williams 1992); unbiased if this very policy has sampled."""
    _check_shapes(logprobs_T, old_T, advantages_T)
    ratio_T = _ratio(logprobs_T, old_T).detach()
    return -advantages_T.detach() * logprobs_T, ratio_T, torch.zeros_like(ratio_T, dtype=torch.bool)



def _ratio(logprobs_T: Tensor, old_T: Tensor) -> Tensor:
    return (logprobs_T - old_T.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _check_shapes(logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor) -> None:
    if not logprobs_T.shape == old_T.shape == advantages_T.shape:
        shapes = [tuple(x_T.shape) for x_T in (logprobs_T, old_T, advantages_T)]
        raise ValueError(f"log-probabilities, old log-probabilities and advantages differ in shape: {shapes}")
