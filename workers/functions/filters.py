"""Row filters: functions that write `keep`. Rows with False leave the step for all later nodes."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from distflow.contracts.decorators import node
from distflow.telemetry.metrics import current
from workers.engines.sampling import key_of, uniform
from workers.functions.rewards import all_equal

_FILTERS = 1 << 32  # random stream of filters, apart from those of roles that sample, which are numbered from 0


@node(writes="keep", keep_together="group", refills="max_draws")
def informative_groups(rewards: Tensor, group: Tensor, *, max_draws: int = 10) -> Tensor:
    """Keep prompts with different rewards, and draw others, up to `max_draws` times (DAPO: Yu et al. 2025, Eq. 11)."""
    del max_draws  # read by the training loop, which draws again
    _, index = torch.unique(group, return_inverse=True)
    keep = ~all_equal(rewards, group)[index]
    current().mean_of("filter/kept", keep)
    return keep


@node(writes="keep", keep_together="group")
def rank_filter(rewards: Tensor, group: Tensor, row: Tensor, *, best: PositiveInt = 1,
                others: NonNegativeInt = 1,
                kind: Literal["worst", "random"] = "worst") -> Tensor:
    """Keep each prompt's `best` best answers, and `others` of the rest: policy filtration (Shen & Zhang 2024).

    `kind: worst` is the paper's BW, `random` its BR, `others: 0` its BoN; numbers are exact here, and drawn there.
    Equal rewards are ranked by chance, from (seed, step, row id) alone.
    """
    chance = uniform(_key(), row, 0)
    by_rank = _order(group, -rewards.double(), chance)
    rank, size = _rank(group, by_rank)
    if kind == "worst":
        keep = (rank < best) | (rank >= size - others)
    else:
        rest = rank >= best
        again, _ = _rank(group, _order(group, (~rest).double(), uniform(_key(), row, 1)))
        keep = ~rest | (again < others)
    current().mean_of("filter/kept", keep)
    return keep


@node(writes="keep")
def drop_truncated(finished: Tensor) -> Tensor:
    """Drop answers that were cut off at the limit (overlong filtering, DAPO: Yu et al. 2025, 3.4). After the
    advantages they still count in the means of their groups, as in TRL; before them, nowhere."""
    current().mean_of("filter/kept", finished)
    return finished


def _order(group: Tensor, *keys: Tensor) -> Tensor:
    order = torch.arange(len(group))
    for key in (*reversed(keys), group):
        order = order[torch.argsort(key[order], stable=True)]
    return order


def _rank(group: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    _, index, counts = torch.unique(group, return_inverse=True, return_counts=True)
    first = counts.cumsum(0) - counts
    rank = torch.empty_like(index)
    rank[order] = torch.arange(len(order)) - first[index[order]]
    return rank, counts[index]


def _key() -> int:
    return key_of(torch.initial_seed() & ((1 << 63) - 1), _FILTERS)
