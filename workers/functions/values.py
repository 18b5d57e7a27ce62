"""Value models: values and scores of models with a value head, GAE, and the critic's update."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from distflow.contracts.decorators import node
from distflow.data.batch import Batch, Ragged
from distflow.telemetry.metrics import current
from workers.engines.role_engines import RoleEngines
from workers.functions.advantages import generalized_advantage
from workers.functions.aggregation import trained_mask, weighted_sum
from workers.functions.kl import kl_estimate
from workers.functions.rewards import note_rewards
from workers.functions.updates import optimize, split_mini_batches, with_token_weights


def clipped_value_loss(values_T: Tensor, old_T: Tensor, returns_T: Tensor,
                       clip: float | None) -> tuple[Tensor, Tensor]:
    """Return half of `max((V - R)**2, (V_old + clamp(V - V_old, -clip, clip) - R)**2)`, and where the bound was active:
    PPO's pessimistic clipping (Huang et al. 2022, "The 37 implementation details of PPO", number 9)."""
    if not values_T.shape == old_T.shape == returns_T.shape:
        shapes = [tuple(x_T.shape) for x_T in (values_T, old_T, returns_T)]
        raise ValueError(f"values, old values and returns differ in shape: {shapes}")
    free_T = (values_T - returns_T.detach()).square()
    if clip is None:
        return free_T / 2, torch.zeros_like(free_T, dtype=torch.bool)
    if not clip > 0:
        raise ValueError(f"clip is how far a value may move, so it must be above 0; got {clip}")
    bounded_T = old_T.detach() + (values_T - old_T.detach()).clamp(-clip, clip)
    bounded_T = (bounded_T - returns_T.detach()).square()
    return torch.maximum(free_T, bounded_T) / 2, bounded_T > free_T


@node(type="MODEL_INFERENCE", head="value", writes="values", default_for="critic", row_wise=True)
def values(engine: RoleEngines, prompts: Ragged, responses: Ragged) -> Ragged:
    """Return the value of the tokens before each response token."""
    return engine.values(prompts, responses)


@node(type="MODEL_INFERENCE", head="value", writes="rewards", default_for="reward", row_wise=True)
def model_score(engine: RoleEngines, prompts: Ragged, responses: Ragged) -> Tensor:
    """Return each response's reward by a reward model [B], float32, read at its last token."""
    rewards = engine.score(prompts, responses)
    note_rewards(rewards, None)
    return rewards


@node(writes=("advantages", "returns"), requires={"kl": "reference_logprobs"})
def gae(rewards: Tensor | Ragged, values: Ragged, rollout_logprobs: Ragged, reference_logprobs: Ragged | None = None,
        response_mask: Ragged | None = None, *, gamma: Annotated[float, Field(ge=0, le=1)] = 1.0,
        lam: Annotated[float, Field(ge=0, le=1)] = 0.95, kl: NonNegativeFloat = 0.0,
        kl_kind: Literal["k1", "k2", "k3"] = "k1") -> tuple[Ragged, Ragged]:
    """Return advantages and returns of each token by generalised advantage estimation (Schulman et al. 2016, Eq. 16).

    A reward of a whole row stands at its last token. With `kl` each token also pays for its KL estimate to the
    reference (Ziegler et al. 2019, Eq. 2; Ouyang et al. 2022, section 3.5).
    """
    rewards_T = _at_last_token(rewards, values) if isinstance(rewards, Tensor) else rewards.values.double()
    mask_T = None if response_mask is None else response_mask.values
    if kl:
        if reference_logprobs is None:
            raise ValueError("a KL penalty needs reference_logprobs")
        kl_T = kl_estimate(rollout_logprobs.values, reference_logprobs.values, kl_kind).double()
        kl_T = kl_T if mask_T is None else torch.where(mask_T, kl_T, 0.0)
        current().mean("reward/kl", kl_T.sum(), len(values))
        rewards_T = rewards_T - kl * kl_T
    advantages_T, returns_T = generalized_advantage(rewards_T, values.values, values.lengths, gamma, lam, mask_T)
    return values.with_values(advantages_T), values.with_values(returns_T)


def _at_last_token(rewards_B: Tensor, rows: Ragged) -> Tensor:
    some_B = rows.lengths > 0
    rewards_T = torch.zeros(len(rows.values), dtype=torch.float64)
    rewards_T[rows.offsets[1:][some_B] - 1] = rewards_B[some_B].double()
    return rewards_T


@node(type="MODEL_TRAIN", head="value", default_for="critic", keep_together="group",
      belongs_to={"fixed_length": ("aggregate", "fixed_length_sum")})
def value_update(
    engine: RoleEngines, prompts: Ragged, responses: Ragged, values: Ragged, returns: Ragged, group: Tensor,
    response_mask: Ragged | None = None, *, clip: PositiveFloat | None = 0.2,
    aggregate: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "fixed_length_sum"] = "token_mean",
    fixed_length: PositiveInt | None = None, mini_batches: PositiveInt = 1, epochs: PositiveInt = 1,
) -> None:
    """Make the critic's step of PPO: squared error to the returns, clipped around the old values."""
    mask = trained_mask(responses, response_mask)
    # A return that is no number, where nothing is trained, would spoil the gradient even with a weight of 0.
    targets = returns.with_values(torch.where(mask.values, returns.values, values.values))
    rows = Batch(group, {"prompts": prompts, "responses": responses, "old": values, "returns": targets, "mask": mask})
    parts = split_mini_batches(engine, rows, mini_batches) * epochs
    share = 1 / max(len(parts), 1)
    _report_explained(engine, returns.values[mask.values], values.values[mask.values])

    def loss(values_T: Tensor, scores_B: Tensor, micro: Batch) -> Tensor:
        columns = {name: micro[name].values.to(values_T.device)
                   for name in ("old", "returns", "mask", "weights")}
        loss_T, clipped_T = clipped_value_loss(values_T, columns["old"], columns["returns"], clip)
        total = weighted_sum(loss_T, columns["weights"])
        current().add("value/loss", total.detach() * share)
        current().mean_of("value/clipped", clipped_T[columns["mask"]])
        return total

    for part in parts:
        optimize(engine, with_token_weights(engine, rows.select(part), aggregate, fixed_length), loss, prefix="value/")


def _report_explained(engine: RoleEngines, returns_T: Tensor, values_T: Tensor) -> None:
    returns_T, errors_T = returns_T.double(), (returns_T - values_T).double()
    moments = [returns_T.sum(), returns_T.square().sum(), errors_T.sum(), errors_T.square().sum()]
    count, *sums = engine.total(torch.stack([torch.tensor(len(returns_T), dtype=torch.float64), *moments])).tolist()
    if count:
        returns, squares, errors, square_errors = (each / count for each in sums)
        current().maximum("value/mean", returns - errors)
        if (spread := squares - returns**2) > 1e-12:
            current().maximum("value/explained", 1 - (square_errors - errors**2) / spread)
