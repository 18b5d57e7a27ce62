"""What an answer is worth."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distflow import Ragged, node
from distflow.data.batch import ColumnData, decode_text
from distflow.observe import events, lines
from distflow.observe.metrics import current
from distflow.schema.registry import Reward
from workers.rewards.scoring import Scorer, Scores, report

_REASONS, _ROWS = 8, 32
"""Of a step's failures, so many reasons become events, and so many rows stand in each."""


@node(writes=("rewards", "keep", "reward_parts"), default_for="reward",
      bounds={"workers": ">= 1", "memory_gib": "> 0", "limit": "> 0", "patience": ">= 1"})
def score(completions: list[str], answers: list[str], row: Tensor, group: Tensor | None = None, *,
          reward: Reward = "math", workers: int | None = None, memory_gib: float = 8.0, limit: float = 300.0,
          patience: int = 3, **columns: Any) -> tuple[Tensor, Tensor, list[str]]:
    """[B] float32, [B] bool and B texts: each completion's reward; whether it has one, with 0.0 where it has none; and
    what each part of the recipe gave, before its weight, as JSON.

    `reward` is a name, a list or weights of several, or one for each value of a column: see `distflow.schema.recipe`.
    A row of which a reward has failed (it raised, hung, ended its process or gave no finite number) leaves the step.

    Args:
        workers: processes in which rewards run; default: the rank's cores, 2 at least and 8 at most.
        memory_gib: of each of them.
        limit: seconds for all rewards of a step on this rank; what is not done then has failed.
        patience: steps in a row of which every row has failed, after which the run ends.

    Raises:
        RewardsFailed: every row of `patience` steps in a row has failed.
    """
    settings = {"recipe": reward, "workers": workers, "memory_gib": memory_gib, "limit": limit, "patience": patience}
    scorer, names = _scorer(current().scope, json.dumps(settings)), row.tolist()
    given = {name: as_list(column) for name, column in columns.items()}
    scores = scorer.score({**given, "completions": completions, "answers": answers, "row": names}, names)
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
    """Return for each group whether all its rewards are equal."""
    groups, index = torch.unique(group, return_inverse=True)
    lowest, highest = (rewards.new_zeros(len(groups)).scatter_reduce(0, index, rewards, how, include_self=False)
                       for how in ("amin", "amax"))
    return lowest == highest


@functools.cache
def _scorer(scope: str, settings: str) -> Scorer:
    """One for each node, as it counts what fails."""
    return Scorer(**json.loads(settings))


def as_list(column: ColumnData | list[str]) -> Sequence[Any]:
    """A column as reward functions get it: text, numbers or lists of numbers, one for each row."""
    if isinstance(column, list):
        return column
    if isinstance(column, Tensor):
        return column.tolist()
    if not isinstance(column.values, Ragged) and column.values.dtype == torch.uint8:
        return decode_text(column)
    return [as_list(each) for each in column.rows]


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
    tell(scores, names)


def tell(scores: Scores, names: Sequence[int]) -> None:
    """Say what has failed: one line for people, and an event for each reward and reason."""
    if not scores.failures:
        return
    alike: dict[tuple[str, str], list[int]] = {}
    for place, (name, _, failed) in enumerate(scores.failures):
        alike.setdefault((name, failed.reason), []).append(place)
    lines.show(report(scores, names), sys.stderr)
    for (name, reason), places in list(alike.items())[:_REASONS]:
        rows = [names[scores.failures[place][1]] for place in places]
        events.record("reward_failed", reward=name, reason=reason, rows=rows[:_ROWS], count=len(rows),
                      trace=scores.failures[places[0]][2].trace)
