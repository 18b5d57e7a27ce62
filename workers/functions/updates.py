"""Training steps."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from distflow import Batch, Ragged, node
from distflow.observe.metrics import current
from workers.functions.aggregation import weighted_sum
from workers.functions.kl import kl_estimate
from workers.functions.losses import clipped_policy_loss, negative_log_likelihood
from workers.functions.optimizing import optimize, parts_with_rows, weighted
from workers.roles import Role

_ALWAYS = 4
"""Rows that every step trains whatever their advantages, so that trainer and rollout are always compared."""


@node(type="MODEL_TRAIN", requires={"kl": "reference_logprobs"}, keep_together="group",
      bounds={"clip": ">= 0", "clip_high": ">= 0", "dual_clip": "> 1", "kl": ">= 0", "fixed_length": ">= 1",
              "mini_batches": ">= 1", "epochs": ">= 1"},
      belongs_to={"fixed_length": ("aggregate", "fixed_length_sum")})
def policy_update(
    engine: Role, prompts: Ragged, responses: Ragged, rollout_logprobs: Ragged, advantages: Tensor | Ragged,
    group: Tensor, response_mask: Ragged | None = None, reference_logprobs: Ragged | None = None,
    actor_logprobs: Ragged | None = None, images: Ragged | None = None, *, clip: float = 0.2,
    clip_high: float | None = None, dual_clip: float | None = None, kl: float = 0.0,
    kl_kind: Literal["k1", "k2", "k3"] = "k3",
    aggregate: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "fixed_length_sum"] = "token_mean",
    fixed_length: int | None = None, mini_batches: int = 1, epochs: int = 1,
) -> None:
    """PPO's clipped update, with KL to a reference in the loss if `kl` is not zero.

    The old policy is `actor_logprobs` where a node recomputed it, else what the rollout recorded when it sampled.
    `mini_batches` divides a step by prompt, the same way on any number of ranks; each that has a prompt makes one
    optimizer step.
    """
    old = rollout_logprobs if actor_logprobs is None else actor_logprobs
    per_token = advantages if isinstance(advantages, Ragged) else responses.with_values(
        advantages[responses.row_of].float())
    columns = {"prompts": prompts, "responses": responses, "old": old, "behaviour": rollout_logprobs,
               "advantages": per_token}
    if reference_logprobs is not None:
        columns["reference"] = reference_logprobs
    if images is not None:
        columns["images"] = images
    mask = response_mask or responses.with_values(torch.ones(len(responses.values), dtype=torch.bool))
    rows = Batch(group, {**columns, "mask": mask})
    parts = parts_with_rows(engine, group, mini_batches)
    share = 1 / (epochs * max(len(parts), 1))
    loss = _PolicyLoss(clip, clip if clip_high is None else clip_high, dual_clip, kl, kl_kind, share)
    for _ in range(epochs):
        for part in parts:
            chosen = rows if len(parts) == 1 else rows.select((group % mini_batches == part).nonzero().squeeze(1))
            chosen = weighted(engine, chosen, aggregate, fixed_length)
            optimize(engine, chosen if kl else _telling(chosen), loss)
            loss.first = False


@node(type="MODEL_TRAIN")
def supervised_update(
    engine: Role, prompts: Ragged, targets: Ragged, group: Tensor, images: Ragged | None = None, *,
    aggregate: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"] = "token_mean",
) -> None:
    """Maximum likelihood of the targets; the prompt is not trained."""
    mask = targets.with_values(torch.ones(len(targets.values), dtype=torch.bool))
    shown = {} if images is None else {"images": images}
    rows = Batch(group, {"prompts": prompts, "responses": targets, "mask": mask, **shown})
    current().add("tokens", len(targets.values))

    def loss(logprobs_T: Tensor, entropy_T: Tensor, micro: Batch) -> Tensor:
        total = weighted_sum(negative_log_likelihood(logprobs_T), micro["weights"].values.to(logprobs_T.device))
        current().add("loss", total.detach())
        return total

    optimize(engine, weighted(engine, rows, aggregate), loss, temperature=1.0)


def _telling(rows: Batch) -> Batch:
    """The rows that have a gradient: without a KL term a row whose advantages are all 0 has none.

    The first few stay in any case, so that no step goes without its comparison of trainer and rollout.
    """
    advantages = rows["advantages"]
    tells = torch.zeros(len(rows), dtype=torch.bool)
    tells[advantages.row_of[advantages.values != 0]] = True
    current().mean("policy/rows_without_gradient", (~tells).sum(), len(tells))
    tells[:_ALWAYS] = True
    return rows.select(tells.nonzero().squeeze(1))


class _PolicyLoss:
    """The loss of a micro-batch: the sum of its tokens' weighted losses. Reports what it sees on the way."""

    def __init__(self, clip_low: float, clip_high: float, dual_clip: float | None, kl: float, kl_kind: str,
                 share: float):
        self.clip_low, self.clip_high, self.dual_clip = clip_low, clip_high, dual_clip
        self.kl, self.kl_kind, self.share = kl, kl_kind, share
        self.first = True
        """Until the step's first optimizer step the trainer's policy is still the rollout's: they are compared then."""

    def __call__(self, logprobs_T: Tensor, entropy_T: Tensor, micro: Batch) -> Tensor:
        columns = {name: micro[name].values.to(logprobs_T.device) for name in micro.columns}
        mask_T, weights_T = columns["mask"], columns["weights"]
        loss_T, ratio_T, clipped_T = clipped_policy_loss(logprobs_T, columns["old"], columns["advantages"],
                                                         self.clip_low, self.clip_high, self.dual_clip)
        if self.kl:
            kl_T = kl_estimate(logprobs_T, columns["reference"], self.kl_kind)
            loss_T = loss_T + self.kl * kl_T
            current().mean_of("policy/kl_reference", kl_T.detach()[mask_T])
        total = weighted_sum(loss_T, weights_T)
        self._report(total, logprobs_T, ratio_T, clipped_T, entropy_T, mask_T, columns["behaviour"])
        return total

    def _report(self, total, logprobs_T, ratio_T, clipped_T, entropy_T, mask_T, behaviour_T) -> None:
        metrics = current()
        metrics.add("loss", total.detach() * self.share)
        metrics.mean_of("policy/ratio", ratio_T.detach()[mask_T])
        metrics.mean_of("policy/clipped", clipped_T[mask_T])
        metrics.mean_of("policy/entropy", entropy_T[mask_T])
        if not self.first:
            return
        difference_T = (logprobs_T.detach() - behaviour_T)[mask_T].abs()
        metrics.mean_of("mismatch/logprob_mean", difference_T)
        metrics.maximum("mismatch/logprob_max", difference_T.max() if len(difference_T) else 0.0)
