"""Load balance: as much for each as lets the slowest finish first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


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
        times: of each kind, seconds for 0, 1, … parcels, never falling; up to total / count at least.
    """
    parts = np.concatenate([table[1:] for table in times])
    weights = np.repeat(counts, [len(table) - 1 for table in times])
    order = np.argsort(parts, kind="stable")
    limit = parts[order[int(weights[order].cumsum().searchsorted(total))]]  # by then all parcels are done
    rows = [int(table.searchsorted(limit, "right")) - 1 for table in times]
    for kind in sorted(range(len(rows)), key=lambda kind: -times[kind][rows[kind]]):
        surplus = sum(count * each for count, each in zip(counts, rows)) - total
        rows[kind] -= min(rows[kind], surplus // counts[kind])
    return tuple(rows)
