"""Per-token losses. None of them averages: `aggregation.token_weights` alone says what a token counts for.

Log-ratios are clamped to +-`LOG_RATIO_LIMIT` (20) before exp, so that float32 holds the ratio times any advantage; a
token beyond that has no gradient.
"""

import torch
from torch import Tensor

from workers.functions.kl import LOG_RATIO_LIMIT


def clipped_policy_loss(
    logprobs_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The clipped surrogate of PPO (Schulman et al. 2017, Eq. 7), as a loss to minimise, per token.

    With `r = exp(logprobs - old)` and the advantage `A` it is `-min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)`.
    PPO has both bounds equal; DAPO raises the upper one alone (Yu et al. 2025, section 3.1). For `A < 0` the loss has
    no bound in `r` unless `dual_clip` caps it at `-dual_clip * A` (Ye et al. 2020, "Mastering Complex Control in MOBA
    Games with Deep Reinforcement Learning").

    Args:
        logprobs_T: natural-log probabilities of the sampled tokens under the policy; gradients flow here alone.
        old_T, advantages_T: the same under the policy that the step started from; one advantage per token.
        clip_low, clip_high: how far the ratio may fall below 1 and rise above it, each at least 0.
        dual_clip: the cap's ratio, above 1; None leaves it out.

    Returns:
        `loss_T`; `ratio_T`, detached, for metrics; `clipped_T`, bool: a bound was active, so the token has no gradient.

    Raises:
        ValueError: a bound out of range, or shapes that differ.
    """
    _check_bounds(clip_low, clip_high, dual_clip)
    _check_shapes(logprobs_T, old_T, advantages_T)
    advantages_T = advantages_T.detach()
    ratio_T = (logprobs_T - old_T.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    free_T = -ratio_T * advantages_T
    bounded_T = -ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_T
    loss_T, clipped_T = torch.maximum(free_T, bounded_T), bounded_T > free_T
    if dual_clip is not None:
        # For a positive advantage the cap would be a floor under a negative loss.
        capped_T = (advantages_T < 0) & (ratio_T > dual_clip)
        loss_T = torch.where(capped_T, -dual_clip * advantages_T, loss_T)
        clipped_T |= capped_T
    return loss_T, ratio_T.detach(), clipped_T


def negative_log_likelihood(logprobs_T: Tensor) -> Tensor:
    """Per-token loss of supervised training: `[T]` natural-log probabilities in, `[T]` nats out."""
    return -logprobs_T


def _check_shapes(logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor) -> None:
    if not logprobs_T.shape == old_T.shape == advantages_T.shape:
        shapes = [tuple(x_T.shape) for x_T in (logprobs_T, old_T, advantages_T)]
        raise ValueError(f"log-probabilities, old log-probabilities and advantages differ in shape: {shapes}")


def _check_bounds(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    # `not >=` rather than `<`, so that NaN is refused as well.
    if not clip_low >= 0 or not clip_high >= 0:
        raise ValueError(f"clip bounds are distances from a ratio of 1, so at least 0; got {clip_low} and {clip_high}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip bounds a ratio that has grown, so it must exceed 1 (3 is usual); got {dual_clip}")
