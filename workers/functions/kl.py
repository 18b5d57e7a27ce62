"""Per-token estimates of how far the policy has moved from a reference.

The quantity is the reverse divergence KL(policy || reference) of one token's distribution, estimated from the token
that was sampled. Estimators: John Schulman, "Approximating KL Divergence" (blog post, 2020).

With `d = logprobs - reference` of the sampled token:

==== ==================== ======================================= ==============================================
kind per token            mean of the value                       mean of the gradient (autograd, tokens fixed)
==== ==================== ======================================= ==============================================
k1   d                    unbiased; either sign, high variance    zero: no use as a loss, right inside a reward
k2   d**2 / 2             biased, little while d is small; >= 0   unbiased: the gradient of KL(policy||reference)
k3   exp(-d) - 1 + d      unbiased; >= 0, low variance            biased: the gradient of KL(reference||policy)
==== ==================== ======================================= ==============================================

All means are over tokens drawn from the policy itself; once it has moved from the one that sampled, each needs the
importance ratio. For the gradients see Tang & Munos, "On a few pitfalls in KL divergence gradient estimation for
RL" (2025). GRPO (Shao et al. 2024, Eq. 4) uses k3.

In k3, `-d` is clamped from above at `LOG_RATIO_LIMIT` (20): a token that the reference finds e**20 times likelier
than the policy costs 4.9e8 and has no gradient, where exp would overflow. Nothing is clamped on the other side,
though some peers do: there k3 is linear and safe, and its gradient is what pulls a runaway token back.
"""

import torch
from torch import Tensor

KINDS = ("k1", "k2", "k3")

# For every exp of a log-ratio. exp(20) is 4.9e8: finite in all dtypes but float16, and far beyond any ratio that still
# says something about the policy.
LOG_RATIO_LIMIT = 20.0


def kl_estimate(logprobs_T: Tensor, reference_T: Tensor, kind: str) -> Tensor:
    """Estimate KL(policy || reference) per token with one of the estimators above; not aggregated.

    As a value k1 and k3 are unbiased and k2 is not; as a gradient only k2 is.

    Args:
        logprobs_T: natural-log probabilities of the sampled tokens under the policy, finite; gradients flow here.
        reference_T: the same tokens under the reference, finite; a constant.
        kind: one of `KINDS`.

    Returns:
        `[T]`, nats, in the dtype of the inputs.

    Raises:
        ValueError: unknown kind, or shapes that differ.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown KL estimator `{kind}`. Estimators: {', '.join(KINDS)}")
    if logprobs_T.shape != reference_T.shape:
        raise ValueError(f"log-probabilities {tuple(logprobs_T.shape)} and reference {tuple(reference_T.shape)} differ")
    difference_T = logprobs_T - reference_T.detach()
    if kind == "k1":
        return difference_T
    if kind == "k2":
        return difference_T.square() / 2
    to_reference_T = (-difference_T).clamp(max=LOG_RATIO_LIMIT)
    # expm1 keeps the digits that exp(x) - 1 loses where policy and reference almost agree, which is most tokens.
    return torch.expm1(to_reference_T) - to_reference_T
