"""Bounds within which two right computations of the same numbers differ: for proofs of models, tests and pages."""

from __future__ import annotations

from typing import NamedTuple


class Rounding(NamedTuple):
    """Differences of log-probabilities, in nats, that are rounding."""

    token: float  # of one token of a tiny model, by two ways of one library
    again: float  # mean: tokens that are read one at a time, and as whole rows
    mean: float  # mean: two engines, or an engine and transformers
    most: float  # of one token, there: a token that is not likely differs most, and a mixture may take other experts


ROUNDING = {4: Rounding(2e-5, 3e-5, 1e-3, 5e-3), 2: Rounding(0.1, 0.05, 0.25, 4.0)}
"""Bounds by the bytes of a number."""
SHARE, LOOSE_SHARE = 2e-5, 2e-4
"""Of the largest value, in float32; the second one of gradients, and where one token is computed by another formula."""
