"""Entropies of a policy, and its tokens of the highest entropy, of which alone it may learn.

Most tokens of a chain of thought follow from those before; a few decide how it goes on, and have a high entropy (Wang
et al. 2025, "Beyond the 80/20 Rule"). Which are high is decided before the rows of an optimizer step are divided into
micro-batches: of all ranks' trained tokens, by the entropies that the policy had when the step began.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from distflow.contracts.decorators import node
from distflow.data.batch import Batch, Ragged
from distflow.telemetry.metrics import current
from workers.engines.role_engines import RoleEngines

_HALF = 16
_BUCKETS = 1 << _HALF
_UNSIGNED = 0x7FFF_FFFF  # all bits of a float but its sign, which -0.0 and some that are not a number have


@node(type="MODEL_INFERENCE", writes="{role}_entropies", row_wise=True)
def entropies(engine: RoleEngines, prompts: Ragged, responses: Ragged, images: Ragged | None = None,
              routed_experts: Ragged | None = None) -> Ragged:
    """Return the entropy of the distribution from which each response token was drawn, in nats, at the temperature at
    which the role samples."""
    return engine.entropies(prompts, responses, images, routed_experts)


def high_entropy(engine: RoleEngines, rows: Batch, quantile: float) -> Batch:
    """Return the rows of an optimizer step with the column `high_entropy`: whether a trained token's entropy is among
    the highest 1 - `quantile` of those of all ranks. Of equal entropies at the bound all are. Collective."""
    mask = rows["mask"]
    keys_T = _keys(rows["entropies"].values)
    least = _kth_largest(engine, keys_T[mask.values], 1 - Fraction(str(quantile)))
    high_T = mask.values & (keys_T >= least)
    current().mean_of("policy/high_entropy", high_T[mask.values])
    current().maximum("policy/entropy_bound", torch.tensor(least, dtype=torch.int32).view(torch.float32))
    return rows.with_columns({"high_entropy": mask.with_values(high_T)})


def _keys(entropies_T: Tensor) -> Tensor:
    """Return whole numbers in the order of the entropies: the bits of positive floats are in theirs. What is not a
    number is the highest, whatever its sign: the gradient then is not finite either, which all ranks see alike."""
    return entropies_T.float().clamp(min=0).view(torch.int32).long() & _UNSIGNED


def _kth_largest(engine: RoleEngines, keys_S: Tensor, share: Fraction) -> int:
    """Return the smallest key of the largest `share` of all ranks' keys, found by counting their upper half, and then
    the lower half of those that share it: exact, however rows are divided. 0 if there are none. Collective."""
    upper_S = keys_S >> _HALF
    counts = engine.total(torch.bincount(upper_S, minlength=_BUCKETS))
    if not counts.any():
        return 0
    upper, left = _bucket(counts, math.ceil(share * int(counts.sum())))
    counts = engine.total(torch.bincount(keys_S[upper_S == upper] & (_BUCKETS - 1), minlength=_BUCKETS))
    lower, _ = _bucket(counts, left)
    return (upper << _HALF) + lower


def _bucket(counts: Tensor, wanted: int) -> tuple[int, int]:
    """Return the bucket with the `wanted`-th largest item, and which of the bucket's it is, from above."""
    above = counts.flip(0).cumsum(0)
    from_end = min(int((above < wanted).sum()), len(counts) - 1)
    return len(counts) - 1 - from_end, wanted - int(above[from_end] - counts.flip(0)[from_end])
