"""Names the rows that a missing rank is to send, for the message of a timeout.

A missing rank has announced nothing. But its rows follow from the plan: those of its share of the dataset, or those
that the assignment of the step gave to its share, each repeated as often as nodes repeated it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distflow.data.assignment import ShardAssignment
from distflow.plan import Layout, RowLineage

_SHOWN, _RANKS_SHOWN = 5, 4


def missing_rows(lineage: RowLineage, producer: str, origin: Layout, assignment: ShardAssignment | None,
                 drawn: range | None, rank: int, missing: Sequence[int], now: Layout | None = None) -> str:
    """Describe which rows of `producer` the ranks `missing` are to send to `rank`; if none is known, those of all
    others. `assignment`: of the layout `origin`; `drawn`: the step's rows of the dataset, of all shares; `now`:
    `origin` with the shares of this step."""
    owners = [other for other in range(origin.first, origin.last + 1) if origin.leads(other) and other != rank]
    asked = list(missing) or owners
    expected = {other: expected_rows(lineage, producer, origin, assignment, drawn, other, now)
                for other in asked[:_RANKS_SHOWN]}
    descriptions = [f"rank {other} is to send {_describe(ids, origin, other)}" for other, ids in expected.items()]
    more = f", and {len(asked) - _RANKS_SHOWN} more ranks theirs" if len(asked) > _RANKS_SHOWN else ""
    return "; ".join(descriptions) + more


def expected_rows(lineage: RowLineage, producer: str, origin: Layout, assignment: ShardAssignment | None,
                  drawn: range | None, rank: int, now: Layout | None = None) -> np.ndarray | None:
    fan, unit, share = lineage.of(producer), lineage.unit(origin), origin.share(rank)
    if share is None or not origin.leads(rank):
        return np.empty(0, dtype=np.int64)
    if origin == lineage.source and drawn is not None:
        mine = (now or origin).cut(len(drawn), share)
        units = np.array(drawn[mine.start : mine.stop], dtype=np.int64)
    elif origin != lineage.source and assignment is not None:
        units = assignment.units[assignment.shares == share]
    else:
        return None
    if len(fan) < len(unit):
        return np.unique(units // lineage.times(unit[len(fan) :]))
    times = lineage.times(fan[len(unit) :])
    return (units[:, None] * times + np.arange(times)).reshape(-1)


def _describe(ids: np.ndarray | None, origin: Layout, rank: int) -> str:
    if ids is None:
        return f"share {origin.share(rank)} of {origin.dp} of them"
    if not len(ids):
        return "none of them, but must join in"
    shown = ", ".join(map(str, ids[:_SHOWN].tolist()))
    return f"{len(ids)} of them by its share: {shown}{', …' if len(ids) > _SHOWN else ''}"
