"""Importance corrections for tokens that another policy than the trainer's has sampled, and metrics of the mismatch.

They use the ratio `r = exp(actor_logprobs - rollout_logprobs)` of a token, or one for all trained tokens of a row:

============ ==================================== ====================================================================
level        ratio                                what it is good for
============ ==================================== ====================================================================
`token`      r                                    low variance; biased, since it ignores the tokens before
`sequence`   product of the row's r               unbiased; grows or vanishes with length: short answers, tight engines
`geometric`  geometric mean of the row's r        independent of length; a test of rows rather than a weight
============ ==================================== ====================================================================

A weight multiplies the surrogate and not the KL term. A token of weight 0 counts in averages. A rejected token leaves
`response_mask`, so that it neither has a gradient nor counts in an average. Recipes are in `docs/algorithms.md`,
metrics in `docs/metrics.md`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from distflow.contracts.decorators import node
from distflow.data.batch import Ragged
from distflow.telemetry.metrics import current
from workers.engines.role_engines import RoleEngines
from workers.functions.aggregation import trained_mask
from workers.functions.kl import LOG_RATIO_LIMIT, kl_estimate

_UNLIKELY = -1.0  # a token that the trainer finds less probable was not sampled with a probability of 1


class Mismatch:
    """Metrics of the step's first optimizer step, whose weights are those that sampled: see `docs/metrics.md`."""

    def __init__(self) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64)  # tokens, and the sums of d, w and w**2

    def add(self, logprobs_T: Tensor, rollout_T: Tensor, lengths_B: Tensor) -> None:
        """Compare the trained tokens of some rows, of which each has as many as `lengths_B` says."""
        difference_T = (logprobs_T.detach() - rollout_T).double()
        weight_T = difference_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        parts = (torch.ones_like(weight_T), difference_T, weight_T, weight_T.square())
        self.sums = self.sums.to(weight_T.device) + torch.stack([part.sum() for part in parts])
        metrics = current()
        metrics.mean_of("mismatch/logprob_mean", difference_T.abs())
        late_T = difference_T.abs() * _in_second_half(lengths_B, len(difference_T))
        metrics.mean_of("mismatch/unsampled", (rollout_T == 0) & (logprobs_T < _UNLIKELY))
        metrics.mean("mismatch/logprob_late", late_T.sum(), (lengths_B // 2).sum())
        metrics.maximum("mismatch/logprob_max", difference_T.abs().max() if len(difference_T) else 0.0)
        metrics.mean_of("mismatch/kl", kl_estimate(rollout_T.double(), logprobs_T.detach().double(), "k3"))

    def report(self, engine: RoleEngines) -> None:
        """Report the metrics that are no means over tokens. Collective."""
        tokens, difference, weight, squares = engine.total(self.sums).tolist()
        if tokens:
            current().mean("mismatch/effective_samples", weight**2 / (tokens * squares))
            current().mean("mismatch/perplexity_ratio", float(torch.tensor(-difference / tokens).exp()))


def _in_second_half(lengths_B: Tensor, tokens: int) -> Tensor:
    """Return which of all tokens are in the second half of their row. A GPU is not waited for."""
    ends_B, place_T = lengths_B.cumsum(0), torch.arange(tokens, device=lengths_B.device)
    row_T = torch.bucketize(place_T, ends_B, right=True)
    return place_T >= (ends_B - lengths_B // 2)[row_T]


def report_staleness(engine: RoleEngines, versions: Ragged, mask: Ragged) -> None:
    age_T = engine.version - versions.values[mask.values].long()
    current().mean_of("staleness/mean", age_T)
    current().maximum("staleness/max", age_T.max() if len(age_T) else 0)
    for age, tokens in zip(*(counted.tolist() for counted in age_T.unique(return_counts=True))):
        current().add(f"staleness/tokens/{age}", tokens)


@node(writes="importance")
def truncated_importance(
    rollout_logprobs: Ragged, actor_logprobs: Ragged, response_mask: Ragged | None = None, *,
    level: Literal["token", "sequence", "geometric"] = "token", cap: Annotated[float, Field(ge=1)] = 2.0,
    low: Annotated[float, Field(ge=0, le=1)] = 0.0, above: Literal["cap", "zero"] = "cap",
) -> Ragged:
    """Return each token's weight `min(ratio, cap)`, float32, 1 if untrained (bias and variance: Ionides 2008). It is 0
    where the ratio is below `low`, and with `above: zero` where it is above `cap` (IcePop: Ling Team 2025)."""
    mask_T = trained_mask(rollout_logprobs, response_mask).values
    ratio_T = importance_ratio(actor_logprobs, rollout_logprobs, mask_T, level)
    outside_T = (ratio_T < low) | ((ratio_T > cap) if above == "zero" else torch.zeros_like(mask_T))
    weight_T = torch.where(mask_T, ratio_T.clamp(max=cap).masked_fill(outside_T, 0.0), 1.0)
    current().mean_of("importance/mean", weight_T[mask_T])
    current().mean_of("importance/truncated", ((ratio_T > cap) | (ratio_T < low))[mask_T])
    return rollout_logprobs.with_values(weight_T.float())


@node(writes="response_mask")
def reject_mismatch(
    rollout_logprobs: Ragged, actor_logprobs: Ragged, response_mask: Ragged | None = None, *,
    level: Literal["token", "sequence", "geometric"] = "token",
    low: Annotated[float, Field(ge=0, le=1)] = 0.5, high: Annotated[float, Field(ge=1)] = 5.0,
) -> Ragged:
    """Remove from `response_mask` the tokens, or rows, whose ratio is below `low` or above `high`."""
    mask_T = trained_mask(rollout_logprobs, response_mask).values
    ratio_T = importance_ratio(actor_logprobs, rollout_logprobs, mask_T, level)
    inside_T = (ratio_T >= low) & (ratio_T <= high)
    current().mean_of("importance/rejected", ~inside_T[mask_T])
    return rollout_logprobs.with_values(mask_T & inside_T)


def importance_ratio(new: Ragged, old: Ragged, mask_T: Tensor, level: str) -> Tensor:
    """Return the ratio of each token, or of its row, float64 `[T]`; NaN where the token is not trained."""
    log_T = torch.where(mask_T, new.values.double() - old.values.double(), 0.0)
    if level != "token":
        log_B = log_T.new_zeros(len(old)).index_add(0, old.row_of, log_T)
        if level == "geometric":
            log_B = log_B / log_T.new_zeros(len(old)).index_add(0, old.row_of, mask_T.double()).clamp(min=1)
        log_T = log_B[old.row_of]
    return torch.where(mask_T, log_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), torch.nan)
