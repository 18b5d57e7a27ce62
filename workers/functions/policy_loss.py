"""The loss of a policy update: one of the surrogates, importance weights, a KL term, and what they show."""

from __future__ import annotations

import torch
from torch import Tensor

from distflow import Batch
from distflow.observe.metrics import current
from workers.functions.aggregation import weighted_sum
from workers.functions.kl import kl_estimate
from workers.functions.losses import Surrogate
from workers.functions.mismatch import Mismatch
from workers.roles import Role

_PER_TOKEN = ("old", "behaviour", "advantages", "weights", "importance", "reference")


class PolicyLoss:
    """Called with a micro-batch it answers the sum of its tokens' weighted losses, and reports what it sees.

    Untrained tokens are left out at the very beginning: they may carry log-probabilities of -inf, and no mean or
    gradient must see them.

    Args:
        surrogate: the loss of a token; see `losses`.
        kl, kl_kind: weight and estimator of the KL term, which needs column `reference`.
        share: of one call in the step's reported loss.
    """

    def __init__(self, surrogate: Surrogate, kl: float, kl_kind: str, share: float):
        self.surrogate, self.kl, self.kl_kind, self.share = surrogate, kl, kl_kind, share
        self.mismatch: Mismatch | None = Mismatch()
        """Until the step's first optimizer step the trainer's policy is still the rollout's: they are compared then."""

    def __call__(self, logprobs_T: Tensor, entropy_T: Tensor, micro: Batch) -> Tensor:
        mask = micro["mask"]
        device, trained_T = logprobs_T.device, mask.values  # _S below: trained tokens only
        columns = {name: micro[name].values[trained_T].to(device) for name in micro.columns if name in _PER_TOKEN}
        logprobs_S, entropy_S = logprobs_T[trained_T.to(device)], entropy_T[trained_T.to(device)]
        lengths_B = torch.zeros_like(mask.lengths).index_add(0, mask.row_of, trained_T.long()).to(device)
        loss_S, ratio_S, clipped_S = self.surrogate(logprobs_S, columns["old"], columns["advantages"], lengths_B)
        if "importance" in columns:
            loss_S = loss_S * columns["importance"]
        metrics = current()
        if self.kl:
            kl_S = kl_estimate(logprobs_S, columns["reference"], self.kl_kind)
            loss_S = loss_S + self.kl * kl_S
            metrics.mean_of("policy/kl_reference", kl_S.detach())
        total = weighted_sum(loss_S, columns["weights"])
        metrics.add("loss", total.detach() * self.share)
        metrics.mean_of("policy/ratio", ratio_S)
        if clipped_S is not None:
            metrics.mean_of("policy/clip_ratio", clipped_S)
            metrics.mean_of("policy/clip_ratio_low", clipped_S & (ratio_S < 1))
            metrics.mean_of("policy/clip_ratio_high", clipped_S & (ratio_S > 1))
        metrics.mean_of("policy/entropy", entropy_S)
        if self.mismatch:
            self.mismatch.add(logprobs_S, columns["behaviour"])
        return total

    def end_step(self, engine: Role) -> None:
        """After each optimizer step; every rank calls it."""
        if self.mismatch:
            self.mismatch.report(engine)
            self.mismatch = None
