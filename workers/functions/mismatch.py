"""How far the trainer's policy is from the one that sampled, on the tokens that are trained.

Two engines give one set of weights slightly different probabilities (Yao et al. 2025, "Your Efficient RL Framework
Secretly Brings You Off-Policy RL Training"), and in the asynchronous modes the weights differ too. With
`d = trainer - rollout`, the difference of a token's natural-log probabilities, and `w = exp(d)` over n tokens:

============================= ======================================= ===============================================
metric, `mismatch/…`          formula                                 when both agree
============================= ======================================= ===============================================
`logprob_mean`, `logprob_max` mean and maximum of abs(d)              0
`kl`                          mean of `w - 1 - d`, the k3 estimate    0; it is KL(rollout || trainer), in nats
`perplexity_ratio`            `exp(-mean of d)`                       1; the trainer's perplexity over the rollout's
`effective_samples`           `(sum of w)**2 / (n * sum of w**2)`     1; the share of tokens that importance weighting
                                                                      would leave (Kish 1965), 1/n at worst
============================= ======================================= ===============================================

`staleness/mean` and `staleness/max` count the optimizer steps between the weights that sampled a token and those that
are about to train on it; `staleness/tokens/N` is how many tokens are so old.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distflow import Ragged
from distflow.observe.metrics import current
from workers.functions.kl import LOG_RATIO_LIMIT, kl_estimate
from workers.roles import Role


class Mismatch:
    """Gathers what the micro-batches of the step's first optimizer step show, while the weights are still the old."""

    def __init__(self) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64)
        """Tokens, and the sums of d, w and w**2."""

    def add(self, logprobs_T: Tensor, rollout_T: Tensor) -> None:
        """Of the trained tokens of a micro-batch, both `[T]`."""
        difference_T = (logprobs_T.detach() - rollout_T).double()
        weight_T = difference_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        parts = (torch.ones_like(weight_T), difference_T, weight_T, weight_T.square())
        self.sums += torch.stack([part.sum() for part in parts]).cpu()
        metrics = current()
        metrics.mean_of("mismatch/logprob_mean", difference_T.abs())
        metrics.maximum("mismatch/logprob_max", difference_T.abs().max() if len(difference_T) else 0.0)
        metrics.mean_of("mismatch/kl", kl_estimate(rollout_T.double(), logprobs_T.detach().double(), "k3"))

    def report(self, engine: Role) -> None:
        """What is no mean over tokens. Every rank calls it."""
        tokens, difference, weight, squares = engine.total(self.sums).tolist()
        if tokens:
            current().mean("mismatch/effective_samples", weight**2 / (tokens * squares))
            current().mean("mismatch/perplexity_ratio", float(torch.tensor(-difference / tokens).exp()))


def report_staleness(engine: Role, versions: Ragged, mask: Ragged) -> None:
    """Of the tokens that are trained, in optimizer steps."""
    age_T = engine.version - versions.values[mask.values].long()
    current().mean_of("staleness/mean", age_T)
    current().maximum("staleness/max", age_T.max() if len(age_T) else 0)
    for age, tokens in zip(*(counted.tolist() for counted in age_T.unique(return_counts=True))):
        current().add(f"staleness/tokens/{age}", tokens)
