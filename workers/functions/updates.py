"""Training steps."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from distflow import Batch, Ragged, node
from distflow.observe.metrics import current
from distflow.schema.registry import Loss
from workers.functions.aggregation import weighted_sum
from workers.functions.losses import negative_log_likelihood, own_loss, surrogate
from workers.functions.mismatch import report_staleness
from workers.functions.optimizing import normalized, optimize, parts_with_rows, weighted
from workers.functions.policy_loss import PolicyLoss
from workers.roles import Role

_ALWAYS = 4
"""Rows that every step trains whatever their advantages, so that trainer and rollout are always compared."""


@node(type="MODEL_TRAIN", requires={"kl": "reference_logprobs"}, keep_together="group",
      bounds={"clip": ">= 0", "clip_high": ">= 0", "dual_clip": "> 1", "kl": ">= 0", "fixed_length": ">= 1",
              "mini_batches": ">= 1", "epochs": ">= 1"},
      belongs_to={"fixed_length": ("aggregate", "fixed_length_sum")},
      only_with={"clip": ("loss", ("ppo", "gspo")), "clip_high": ("loss", ("ppo", "gspo", "cispo")),
                 "dual_clip": ("loss", ("ppo",))},
      refuses={"kl_kind": {"k1": "The gradient of k1 in a loss is zero on average. Use k2 or k3 here, or k1 in the "
                                 "reward: a node with  function: kl_in_reward"}})
def policy_update(
    engine: Role, prompts: Ragged, responses: Ragged, rollout_logprobs: Ragged, advantages: Tensor | Ragged,
    group: Tensor, response_mask: Ragged | None = None, reference_logprobs: Ragged | None = None,
    actor_logprobs: Ragged | None = None, importance: Ragged | None = None, versions: Ragged | None = None,
    images: Ragged | None = None, *,
    loss: Literal["ppo", "gspo", "cispo", "reinforce"] | Loss = "ppo", loss_settings: dict | None = None,
    clip: float | None = None, clip_high: float | None = None, dual_clip: float | None = None, kl: float = 0.0,
    kl_kind: Literal["k2", "k3"] = "k3", normalize: Literal["none", "batch"] = "none",
    aggregate: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "fixed_length_sum"] = "token_mean",
    fixed_length: int | None = None, mini_batches: int = 1, epochs: int = 1,
) -> None:
    """A policy-gradient step with a loss for each token, and with KL to a reference in it if `kl` is not zero.

    The four shipped losses, and the bounds that they have where none are given, stand in `workers/functions/losses.py`.
    One of your own is a function under `@loss`, named as `MODULE:FUNCTION`; `loss_settings` are its. The old policy is
    `actor_logprobs` where a node recomputed it, else what the rollout recorded when it sampled. `importance` weighs
    each token (see `corrections`); `normalize: batch` gives the advantages of all trained tokens mean 0 and deviation
    1. `mini_batches` divides a step by prompt, the same way on any number of ranks; each that has a prompt makes one
    optimizer step.
    """
    tokens, old = responses, rollout_logprobs if actor_logprobs is None else actor_logprobs
    per_token = advantages if isinstance(advantages, Ragged) else tokens.with_values(advantages[tokens.row_of].float())
    mask = response_mask or tokens.with_values(torch.ones(len(tokens.values), dtype=torch.bool))
    if normalize == "batch":
        per_token = normalized(engine, per_token, mask)
    current().spread_of("advantages", per_token.values[mask.values])
    if versions is not None:
        report_staleness(engine, versions, mask)
    columns = {"prompts": prompts, "responses": responses, "old": old, "behaviour": rollout_logprobs, "mask": mask,
               "advantages": per_token, "reference": reference_logprobs, "importance": importance, "images": images}
    rows = Batch(group, {name: column for name, column in columns.items() if column is not None})
    parts = parts_with_rows(engine, group, mini_batches)
    own = ":" in loss
    of_token = own_loss(loss, loss_settings or {}) if own else surrogate(loss, clip, clip_high, dual_clip)
    objective = PolicyLoss(of_token, kl, kl_kind, 1 / (epochs * max(len(parts), 1)))
    for part in parts * epochs:
        chosen = rows if len(parts) == 1 else rows.select((group % mini_batches == part).nonzero().squeeze(1))
        chosen = weighted(engine, chosen, aggregate, fixed_length)
        optimize(engine, chosen if kl or own else _telling(chosen), objective)
        objective.end_step(engine)


@node(type="MODEL_TRAIN")
def supervised_update(
    engine: Role, prompts: Ragged, targets: Ragged, group: Tensor, images: Ragged | None = None, *,
    aggregate: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"] = "token_mean",
) -> None:
    """Maximum likelihood of the targets; the prompt is not trained. Without a row on any rank there is no step."""
    mask = targets.with_values(torch.ones(len(targets.values), dtype=torch.bool))
    shown = {} if images is None else {"images": images}
    rows = Batch(group, {"prompts": prompts, "responses": targets, "mask": mask, **shown})
    current().add("tokens", len(targets.values))
    current().add("samples", len(targets))

    def loss(logprobs_T: Tensor, entropy_T: Tensor, micro: Batch) -> Tensor:
        total = weighted_sum(negative_log_likelihood(logprobs_T), micro["weights"].values.to(logprobs_T.device))
        current().add("loss", total.detach())
        return total

    if parts_with_rows(engine, group, 1):
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
