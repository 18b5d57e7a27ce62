"""Which rows a rank owes, for the message of a wait in vain.

The rank that is missing has announced nothing. But its rows follow from the plan: those of its share of the dataset,
or those that the homes of the step gave to its share, each repeated as often as nodes repeated it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distflow.data.assignment import ShardAssignment
from distflow.plan import Layout, RowLineage

_SHOWN, _RANKS_SHOWN = 5, 4


def debts(fans: RowLineage, producer: str, origin: Layout, homes: ShardAssignment | None, drawn: range | None,
          rank: int,
          missing: Sequence[int]) -> str:
    """What the ranks `missing` owe of the rows of `producer`; if it is not known who is missing, what all others owe.

    Args:
        origin: the layout in which the producer wrote its rows.
        homes: of that layout; None if it is the dataset's own, or if no rows have come to it.
        drawn: the rows of the dataset in this step, of all shares; None if this rank does not know them.
        rank: the one that waits.
    """
    owners = [other for other in range(origin.first, origin.last + 1) if origin.leads(other) and other != rank]
    asked = list(missing) or owners
    told = [f"rank {other} owes {_owed(owed(fans, producer, origin, homes, drawn, other), origin, other)}"
            for other in asked[:_RANKS_SHOWN]]
    more = f", and {len(asked) - _RANKS_SHOWN} more ranks theirs" if len(asked) > _RANKS_SHOWN else ""
    return "; ".join(told) + more


def owed(fans: RowLineage, producer: str, origin: Layout, homes: ShardAssignment | None, drawn: range | None,
         rank: int) -> np.ndarray | None:
    """The ids of the rows of `producer` that a rank has by its share [rows]; None if that cannot be known."""
    fan, unit, share = fans.of(producer), fans.unit(origin), origin.share(rank)
    if not origin.leads(rank):
        return np.empty(0, dtype=np.int64)
    if origin == fans.source and drawn is not None:
        mine = origin.cut(len(drawn), share)
        units = np.array(drawn[mine.start : mine.stop], dtype=np.int64)
    elif origin != fans.source and homes is not None:
        units = homes.units[homes.shares == share]
    else:
        return None
    if len(fan) < len(unit):
        return np.unique(units // fans.times(unit[len(fan) :]))
    times = fans.times(fan[len(unit) :])
    return (units[:, None] * times + np.arange(times)).reshape(-1)


def _owed(ids: np.ndarray | None, origin: Layout, rank: int) -> str:
    if ids is None:
        return f"share {origin.share(rank)} of {origin.dp} of them"
    if not len(ids):
        return "none of them, but must come too"
    shown = ", ".join(map(str, ids[:_SHOWN].tolist()))
    return f"{len(ids)} of them by its share: {shown}{', …' if len(ids) > _SHOWN else ''}"
