"""What all training functions share: mini-batches that are alike on any number of ranks, weights, the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distflow import Batch, Ragged
from distflow.observe.metrics import current
from workers.engines.trainer import LossOf
from workers.functions.aggregation import local_totals, token_weights
from workers.roles import Role


def parts_with_rows(engine: Role, group: Tensor, count: int) -> list[int]:
    """Which of the `count` mini-batches have a prompt on any rank.

    An optimizer step without data would still decay the weights and use up Adam's moments.
    """
    rows = engine.total(torch.bincount(group.long() % count, minlength=count))  # an empty column is float
    return rows.nonzero().squeeze(1).tolist()


def weighted(engine: Role, rows: Batch, aggregate: str, fixed_length: int | None = None) -> Batch:
    """`rows` with each token's weight in the loss as column `weights`, from totals over all ranks."""
    mask = rows["mask"]
    totals = engine.total(local_totals(mask.values, mask.lengths))
    weights = token_weights(mask.values, mask.lengths, aggregate, totals, fixed_length)
    return rows.with_columns({"weights": mask.with_values(weights)})


def normalized(engine: Role, advantages: Ragged, mask: Ragged) -> Ragged:
    """`(A - mean) / deviation` over the trained tokens of all ranks, float32; untrained tokens get 0.

    Both moments count every token once (REINFORCE++, Hu et al. 2025; as verl and OpenRLHF have it). The deviation is
    unbiased, and 1e-8 under its root lets equal advantages become 0 rather than magnified rounding.
    """
    values_S = advantages.values[mask.values].double()
    tokens, total = engine.total(torch.stack([mask.values.sum(), values_S.sum()]).double())
    centred_S = values_S - total / tokens.clamp(min=1)
    variance = engine.total(centred_S.square().sum()) / (tokens - 1).clamp(min=1)
    result_T = torch.zeros(len(mask.values), dtype=torch.float64)
    result_T[mask.values] = centred_S * (variance + 1e-8).rsqrt()
    return advantages.with_values(result_T.float())


def optimize(engine: Role, rows: Batch, loss: LossOf, temperature: float | None = None, prefix: str = "",
             **options: Any) -> None:
    """One optimizer step over all ranks' rows; what the engine reports of it goes to the metrics, under `prefix`.

    `options` are those of `Role.update`.
    """
    report = engine.update(rows, loss, temperature, **options)
    for name, value in report.items():
        current().maximum(f"{prefix}{name}", value)
