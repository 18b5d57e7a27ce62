"""Per-token estimates of KL(policy || reference) from sampled tokens (Schulman, "Approximating KL Divergence", 2020).

With `d = logprobs - reference`:

==== ==================== ======================================= ==============================================
kind per token            mean of the value                       mean of the gradient (autograd, tokens fixed)
==== ==================== ======================================= ==============================================
k1   d                    unbiased; either sign, high variance    zero: no use as a loss, right inside a reward
k2   d**2 / 2             biased, little while d is small; >= 0   unbiased: the gradient of KL(policy||reference)
k3   exp(-d) - 1 + d      unbiased; >= 0, low variance            biased: the gradient of KL(reference||policy)
==== ==================== ======================================= ==============================================

Means are over tokens drawn from the policy itself; gradients as in Tang & Munos 2025, "On a few pitfalls in KL
divergence gradient estimation for RL". GRPO (Shao et al. 2024, Eq. 4) uses k3.

In k3 `-d` is clamped from above alone, where exp would overflow: on the other side k3 is linear, and its gradient is
what pulls a runaway token back.
"""

import torch
from torch import Tensor

KINDS = ("k1", "k2", "k3")

# For every exp of a log-ratio. exp(20) is 4.9e8: finite in all dtypes but float16, and far beyond any ratio that still
# says something about the policy.
LOG_RATIO_LIMIT = 20.0


def kl_estimate(logprobs_T: Tensor, reference_T: Tensor, kind: str) -> Tensor:
    """Return the estimate of each token [T], in nats; gradients flow to `logprobs_T` alone."""
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
