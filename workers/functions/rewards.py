"""Rewards: scores of users' reward functions, and rewards shaped by KL, length and other rewards."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from distflow.contracts.decorators import Reward, node
from distflow.data.batch import ColumnData, Ragged, to_list
from distflow.telemetry import events
from distflow.telemetry.metrics import current
from workers.functions.aggregation import trained_mask
from workers.functions.kl import kl_estimate
from workers.isolation.scoring import Scorer, Scores, report

_REASONS, _ROWS = 8, 32  # reasons of failure with an event in a step, and rows named in each event


@node(writes=("rewards", "keep", "reward_parts"), default_for="reward")
def score(completions: list[str], row: Tensor, answers: list[str] | None = None, group: Tensor | None = None, *,
          reward: Reward = "math", workers: PositiveInt | None = None, memory_gib: PositiveFloat = 8.0,
          limit: PositiveFloat = 300.0, patience: PositiveInt = 3, **columns: Any) -> tuple[Tensor, Tensor, list[str]]:
    """Return each completion's reward [B] float32 (0.0 if it has none), whether it has one [B] bool, and the values of
    the recipe's parts before their weights, as JSON.

    Rows whose reward failed (raised, hung, ended its process, gave no finite number) leave the step. `workers`
    processes (default: the rank's cores, 2 to 8) of `memory_gib` each have `limit` seconds for a step's rewards. Raises
    RewardsFailed if every row of `patience` steps in a row has failed.
    """
    settings = {"recipe": reward, "workers": workers, "memory_gib": memory_gib, "limit": limit, "patience": patience}
    scorer, names = _scorer(current().scope, json.dumps(settings)), row.tolist()
    given = {name: as_list(column) for name, column in columns.items()}
    given |= {} if answers is None else {"answers": answers}
    scores = scorer.score({**given, "completions": completions, "row": names}, names)
    rewards, keep = torch.tensor(scores.rewards, dtype=torch.float32), torch.tensor(scores.keep, dtype=torch.bool)
    _note(scores, names)
    note_rewards(rewards[keep], None if group is None else group[keep])
    scorer.count(scores, current().step)
    return rewards, keep, [json.dumps(parts) for parts in scores.parts]


def note_rewards(rewards: Tensor, group: Tensor | None) -> None:
    """Report rewards [B]; with the group of each [B] also the share of groups in which all are equal."""
    current().spread_of("reward", rewards)
    if group is not None and len(group):
        current().mean_of("reward/zero_std_groups", all_equal(rewards, group))


def all_equal(rewards: Tensor, group: Tensor) -> Tensor:
    groups, index = torch.unique(group, return_inverse=True)
    lowest, highest = (rewards.new_zeros(len(groups)).scatter_reduce(0, index, rewards, how, include_self=False)
                       for how in ("amin", "amax"))
    return lowest == highest


@functools.cache
def _scorer(scope: str, settings: str) -> Scorer:
    return Scorer(**json.loads(settings))


def as_list(column: ColumnData | list[str]) -> Sequence[Any]:
    return column if isinstance(column, list) else to_list(column)


def _note(scores: Scores, names: list[int]) -> None:
    metrics = current()
    for term, values in scores.of_term.items():
        metrics.mean(f"reward/{term}", sum(values), len(values))
    for name, total, count in scores.metrics:
        metrics.mean(name, total, count)
    metrics.maximum("reward/seconds", scores.seconds)
    metrics.add("reward/failed", scores.keep.count(False))
    metrics.add("reward/retried", scores.retried)
    metrics.add("reward/timeouts", scores.timeouts)
    report_failures(scores, names)


def report_failures(scores: Scores, names: Sequence[int]) -> None:
    """Report failed rewards: one line in the output, and an event for each reward and reason."""
    if not scores.failures:
        return
    alike: dict[tuple[str, str], list[int]] = {}
    for index, (name, _, failed) in enumerate(scores.failures):
        alike.setdefault((name, failed.reason), []).append(index)
    events.show(f"[rank {events.current().rank}] {report(scores, names)}", sys.stderr)
    for (name, reason), indices in list(alike.items())[:_REASONS]:
        rows = [names[scores.failures[index][1]] for index in indices]
        events.record("reward_failed", reward=name, reason=reason, rows=rows[:_ROWS], count=len(rows),
                      trace=scores.failures[indices[0]][2].trace)


@node(writes="rewards")
def kl_in_reward(
    rewards: Tensor, rollout_logprobs: Ragged, reference_logprobs: Ragged, response_mask: Ragged | None = None, *,
    kl: NonNegativeFloat = 0.001, kl_kind: Literal["k1", "k2", "k3"] = "k1",
) -> Tensor:
    """Subtract from each reward `kl` times the row's KL estimate to the reference (Ziegler et al. 2019, Eq. 2)."""
    kl_T = _trained_kl(rollout_logprobs, reference_logprobs, response_mask, kl_kind)
    kl_B = torch.zeros(len(rewards), dtype=torch.float64).index_add_(0, rollout_logprobs.row_of, kl_T)
    current().mean_of("reward/kl", kl_B)
    return _like(rewards, rewards.double() - kl * kl_B)


@node(writes="token_rewards", requires={"kl": "reference_logprobs"})
def token_rewards(
    rewards: Tensor, rollout_logprobs: Ragged, reference_logprobs: Ragged | None = None,
    response_mask: Ragged | None = None, *, kl: NonNegativeFloat = 0.0,
    kl_kind: Literal["k1", "k2", "k3"] = "k1",
) -> Ragged:
    """Return a reward for each token, float32: the row's own on its last trained token, minus `kl` times each token's
    KL estimate (Ouyang et al. 2022, Eq. 2; Hu et al. 2025). Untrained tokens get 0."""
    mask_T = trained_mask(rollout_logprobs, response_mask).values
    index_T = torch.arange(len(mask_T))[mask_T]
    last_B = torch.full((len(rewards),), -1).scatter_reduce(0, rollout_logprobs.row_of[mask_T], index_T, "amax")
    result_T = torch.zeros(len(mask_T), dtype=torch.float64)
    result_T[last_B[last_B >= 0]] = rewards[last_B >= 0].double()
    if reference_logprobs is not None and kl:
        kl_T = _trained_kl(rollout_logprobs, reference_logprobs, response_mask, kl_kind)
        current().mean_of("reward/kl", torch.zeros(len(rewards), dtype=torch.float64).index_add_(
            0, rollout_logprobs.row_of, kl_T))
        result_T -= kl * kl_T
    return rollout_logprobs.with_values(result_T.float())


@node(writes="rewards")
def overlong_penalty(rewards: Tensor, responses: Ragged, *, max_length: PositiveInt,
                     margin: Annotated[float, Field(gt=0, le=1)] = 0.2, penalty: NonNegativeFloat = 1.0) -> Tensor:
    """Add to each reward `penalty` times the soft overlong punishment (DAPO: Yu et al. 2025, Eq. 13), which falls from
    0 to -1 over the last `margin` of `max_length` tokens."""
    cache = margin * max_length
    punishment_B = ((max_length - cache - responses.lengths) / cache).clamp(-1.0, 0.0)
    current().mean_of("reward/overlong", punishment_B < 0)
    return _like(rewards, rewards.double() + penalty * punishment_B)


def _like(rewards: Tensor, shaped_B: Tensor) -> Tensor:
    return shaped_B.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def _trained_kl(rollout: Ragged, reference: Ragged, response_mask: Ragged | None, kind: str) -> Tensor:
    kl_T = kl_estimate(rollout.values.double(), reference.values.double(), kind)
    return torch.where(trained_mask(rollout, response_mask).values, kl_T, 0.0)
