"""Divides the rows of measured layouts (`rows: measured`) by the pace at which each rank has just sampled.

Ranks that train or infer wait for each other layer by layer, and all take as long as the slowest: a rank's pace shows
where it samples. The seconds of all ranks come with the metrics of a step, and every rank computes the same shares of
them. What a row becomes depends on (seed, step, row) alone, so that samples and losses are those of equal shares.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from distflow.plan import Layout

WINDOW = 2
"""Steps whose seconds are added up before rows are divided again."""
_DAMPING = 0.7
"""How far a pace goes to the measured one at a time: a step that was slow by chance moves few rows."""
_MOST = 2.0
"""Most by which a measured pace may differ from the pace before, as a factor."""


class LoadBalance:
    """Pace of each rank, relative to the others, and the shares that follow from it; the same on all ranks."""

    def __init__(self, ranks: int, prompts: int, layouts: Iterable[Layout] = ()):
        """`prompts`: of a step, of which every share has at least one; `layouts`: those of the plan."""
        self.prompts = prompts
        self.layouts = sorted({each for each in layouts if each.measured}, key=lambda each: (each.first, each.dp))
        self.paces = [1.0] * ranks
        self.seconds, self.rows, self.steps = [0.0] * ranks, [0.0] * ranks, 0
        self.warm = False  # whether this worker has done a step: engines take longer for their first one
        self._known: dict[Layout, Layout] = {}

    def current(self, layout: Layout) -> Layout:
        """Return a layout with the rows that its shares have now; as it is if it is not measured."""
        if not layout.measured:
            return layout
        if layout not in self._known:
            first, width = layout.first, layout.width  # ranks of one share go in step
            paces = [min(self.paces[first + share * width :][:width]) for share in range(layout.dp)]
            rows = divided(self.prompts, paces) if max(paces) > min(paces) else ()
            self._known[layout] = replace(layout, rows=rows)
        return self._known[layout]

    def record(self, sampled: Sequence[tuple[float, float]]) -> bool:
        """Add the (seconds, rows) that each rank took to sample in a step. Return whether rows are divided otherwise
        from the next step on."""
        if not self.layouts or not self.warm:
            self.warm = True
            return False
        for rank, (seconds, rows) in enumerate(sampled):
            self.seconds[rank] += seconds
            self.rows[rank] += rows
        self.steps += 1
        if self.steps < WINDOW:
            return False
        before = list(map(self.current, self.layouts))
        self._correct()
        return before != list(map(self.current, self.layouts))

    def _correct(self) -> None:
        """Move each pace towards the measured one. By sums, products and quotients alone, which IEEE 754 rounds alike
        on every machine: ranks must not disagree in the last digit."""
        measured = {rank: rows / seconds for rank, (rows, seconds) in enumerate(zip(self.rows, self.seconds))
                    if rows > 0 and seconds > 0}
        before = math.fsum(self.paces[rank] for rank in measured)
        scale = before / math.fsum(measured.values()) if measured else 0.0
        for rank, pace in measured.items():
            old = self.paces[rank]
            self.paces[rank] += _DAMPING * (min(max(pace * scale, old / _MOST), old * _MOST) - old)
        ranks = len(self.paces)
        self.seconds, self.rows, self.steps, self._known = [0.0] * ranks, [0.0] * ranks, 0, {}

    def state_dict(self) -> dict[str, Any]:
        return {"paces": [*self.paces], "seconds": [*self.seconds], "rows": [*self.rows], "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; from equal shares if it is of another number of ranks."""
        if len(state["paces"]) == len(self.paces):
            self.paces, self.seconds, self.rows = ([*map(float, state[key])] for key in ("paces", "seconds", "rows"))
            self.steps, self._known = int(state["steps"]), {}


def divided(count: int, paces: Sequence[float]) -> tuple[int, ...]:
    """Return how many of `count` units each share gets: one, and each further one goes to the share that is done with
    it first. Ties go to lower shares."""
    result = [1] * len(paces)
    heap = [(2 / pace, share) for share, pace in enumerate(paces)]
    heapq.heapify(heap)
    for _ in range(count - len(paces)):
        _, share = heap[0]
        result[share] += 1
        heapq.heapreplace(heap, ((result[share] + 1) / paces[share], share))
    return tuple(result)
