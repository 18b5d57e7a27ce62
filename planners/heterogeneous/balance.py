"""Load balance: as much for each as lets the slowest finish first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ROUNDS = 32
"""Halvings of the interval in which the best time lies: to a part in four billions."""


def layers_of_stages(layers: int, seconds: Sequence[float], most: Sequence[float], even: bool = False) -> \
        tuple[int, ...] | None:
    """How many of `layers` each stage has, so that the slowest is as fast as can be; None if they do not fit.

    Args:
        seconds: what a layer takes in each stage.
        most: how many layers fit each stage.
        even: give all stages as many (the last ones may have one less).
    """
    stages = len(seconds)
    if even:
        counts = [layers // stages + (stage < layers % stages) for stage in range(stages)]
        return tuple(counts) if all(count <= limit for count, limit in zip(counts, most)) else None
    if stages > layers or min(most) < 1 or sum(min(limit, layers) for limit in most) < layers:
        return None
    rate = layers / sum(1 / each for each in seconds)
    counts = [max(1, min(int(rate / each), int(limit))) for each, limit in zip(seconds, most)]
    while sum(counts) > layers:
        counts[max((count * each, stage) for stage, (count, each) in enumerate(zip(counts, seconds))
                   if count > 1)[1]] -= 1
    while sum(counts) < layers:
        counts[min(((count + 1) * each, stage) for stage, (count, each, limit) in enumerate(zip(counts, seconds, most))
                   if count + 1 <= limit)[1]] += 1
    return tuple(counts)


def rows_of_shares(total: int, counts: Sequence[int], times: Sequence[np.ndarray]) -> tuple[int, ...]:
    """How many parcels of rows a share of each kind has, so that the slowest is as fast as can be.

    Args:
        total: parcels, over all shares.
        counts: how many shares there are of each kind.
        times: of each kind, seconds for 0, 1, …, `total` parcels; never falling.
    """
    even = -(-total // sum(counts))
    low, high = 0.0, max(float(table[even]) for table in times)
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        done = sum(count * (int(table.searchsorted(middle, "right")) - 1) for count, table in zip(counts, times))
        low, high = (low, middle) if done >= total else (middle, high)
    rows = [min(total, int(table.searchsorted(high, "right")) - 1) for table in times]
    return _trimmed(total, counts, rows, times)


def _trimmed(total: int, counts: Sequence[int], rows: list[int], times: Sequence[np.ndarray]) -> tuple[int, ...]:
    """Without what is too much, taken from the slowest first."""
    for kind in sorted(range(len(rows)), key=lambda kind: -times[kind][rows[kind]]):
        surplus = sum(count * each for count, each in zip(counts, rows)) - total
        rows[kind] -= min(rows[kind], surplus // counts[kind])
    return tuple(rows)
