"""Loss functions of the training API by name, under the names of Tinker's where it has them.

===================== ======================================= ===================== =================
name                  per token                               a row needs           `loss_fn_config`
===================== ======================================= ===================== =================
`cross_entropy`       `-weights * logprob`, temperature 1     -                     -
`importance_sampling` `-r * advantages`                       advantages, logprobs  -
`ppo`                 clipped surrogate, see functions/losses advantages, logprobs  clip, clip_high,
                                                                                    dual_clip
`gspo`                                                        advantages, logprobs  clip, clip_high
`cispo`                                                       advantages, logprobs  clip_high
`reinforce`           `-advantages * logprob`                 advantages, logprobs  -
===================== ======================================= ===================== =================

`r = exp(logprob - logprobs)`. Losses are summed over tokens, each times its weight, and not averaged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from distflow.data.batch import Batch, Ragged
from distflow.errors import did_you_mean
from workers.endpoint.messages import RequestRefused
from workers.engines.trainer import LossOf
from workers.functions.losses import Surrogate, clipped_policy_loss, surrogate
from workers.functions.updates import PolicyLoss, cross_entropy

_SETTINGS: dict[str, tuple[str, ...]] = {
    "cross_entropy": (), "importance_sampling": (), "ppo": ("clip", "clip_high", "dual_clip"),
    "gspo": ("clip", "clip_high"), "cispo": ("clip_high",), "reinforce": ()}
LOSSES = tuple(_SETTINGS)


def check_loss(name: str, settings: Mapping[str, float]) -> None:
    """Raise RequestRefused: there is no such loss, or it has no such setting, or not of this value."""
    if name not in _SETTINGS:
        raise RequestRefused(f"there is no loss `{name}`. {did_you_mean(name, LOSSES, 'Losses')}")
    for setting, value in settings.items():
        if setting not in _SETTINGS[name]:
            known = f"It has {', '.join(_SETTINGS[name])}" if _SETTINGS[name] else "It has none"
            raise RequestRefused(f"the loss `{name}` has no setting `{setting}`. {known}")
        least = 1.0 if setting == "dual_clip" else 0.0
        if value < least or (setting == "dual_clip" and value == least):
            raise RequestRefused(f"`{setting}` of the loss `{name}` must be {'above 1' if least else 'at least 0'}, "
                                 f"not {value:g}")


def needs_policy(name: str) -> bool:
    """Return whether a loss compares with the policy that sampled: rows then have `advantages` and `logprobs`."""
    return name != "cross_entropy"


class TokenLoss:
    """Loss of a call over this rank's rows. It keeps the log-probabilities of the rows, in their order."""

    def __init__(self, name: str, settings: Mapping[str, float]):
        self.logprobs: list[Tensor] = []
        self.total = 0.0
        self.loss: LossOf = cross_entropy if not needs_policy(name) else _policy_loss(name, settings)

    def __call__(self, logprobs_T: Tensor, entropy_T: Tensor, micro: Batch) -> Tensor:
        total = self.loss(logprobs_T, entropy_T, micro)
        self.logprobs.append(logprobs_T.detach().float().cpu())
        self.total += float(total.detach())
        return total

    def rows_of(self, responses: Ragged) -> list[list[float]]:
        values = torch.cat(self.logprobs) if self.logprobs else torch.empty(0)
        return [row.tolist() for row in responses.with_values(values).rows]


def _policy_loss(name: str, settings: Mapping[str, float]) -> LossOf:
    loss = PolicyLoss(_surrogate(name, settings), 0.0, "k3", 1.0)
    loss.mismatch = None  # rows may be of earlier steps
    return loss


def _surrogate(name: str, settings: Mapping[str, float]) -> Surrogate:
    if name == "importance_sampling":
        return lambda new_T, old_T, gain_T, _: clipped_policy_loss(new_T, old_T, gain_T, math.inf, math.inf)
    return surrogate(name, settings.get("clip"), settings.get("clip_high"), settings.get("dual_clip"))
