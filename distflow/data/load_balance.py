"""Divides the rows of measured layouts (`rows: measured`) so that all ranks sample equally long, by what each took.

Ranks that train or infer wait for each other layer by layer, and all take as long as the slowest: a rank's throughput,
rows per second, shows where it samples. The seconds of all ranks come with the metrics of a step, and every rank
computes the same shares of them. What a row draws depends on (seed, step, row) alone, but other shares are other
batches, which round otherwise: results are those of equal shares but for that, and shares follow measured time.

A rank takes seconds in proportion to  cost · (1 - slope + slope · rows / an equal share's rows): `cost` is its own, and
`slope`, of all alike, how much seconds depend on rows. A part of them may not: with a slope of 1 the throughput of a
rank with many rows seems higher than it is. What changes of shares have brought shows the slope.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

from distflow.plan import Layout

WINDOW = 2
"""Steps after each of which it is asked whether other rows are better."""
_MEMORY = 64
"""Steps with the same shares after which their weight is halved."""
_TRIAL = 16
"""Steps after a change of shares whose seconds show the slope; later ones may have changed for other causes."""
_DAMPING = 0.7
"""How far a cost goes to the measured one at a time."""
_MOST = 2.0
"""Most by which the seconds of a step count as other than expected, as a factor."""
_CERTAIN = 4.0
"""Standard errors by which a rank's seconds must differ from what is expected, or from those of the steps before."""
_GAIN = 0.02
"""Least part of the slowest rank's seconds that other shares must save by the model."""
_NOISE = 0.1
"""Relative standard deviation of a rank's seconds, counted as if it had been seen in `_SEEN` steps."""
_SEEN, _LEAST_NOISE = 4, 0.02
_TRUST = 4.0
"""Weight of the slope 1, with which all begins; changes of shares weigh up to eight times as much."""
_LEAST_SLOPE = 0.02
_UNLIKE = 4
"""Most rows of a share as a multiple of an equal share, and least as a fraction."""


class _Observed(NamedTuple):
    """Mean seconds and rows of each rank, relative to the mean of all, over `steps` steps; 0.0 of one without rows."""

    seconds: list[float]
    rows: list[float]
    steps: int


class LoadBalance:
    """Cost of each rank, relative to the others, and the shares that follow from it; the same on all ranks.

    By sums, products and quotients alone, which IEEE 754 rounds alike on every machine: ranks must not disagree in the
    last digit.
    """

    _KEPT = ("costs", "slope", "seconds", "rows", "steps", "recent", "latest", "noise", "seen", "before", "evidence",
             "trial")

    def __init__(self, ranks: int, prompts: int, layouts: Iterable[Layout] = ()):
        """`prompts`: of a step, of which every share has at least one; `layouts`: those of the plan."""
        self.prompts = prompts
        self.layouts = sorted({each for each in layouts if each.measured}, key=lambda each: (each.first, each.dp))
        self.costs, self.slope = [1.0] * ranks, 1.0
        self.seconds, self.rows, self.steps = [0.0] * ranks, [0.0] * ranks, 0  # relative, since shares have changed
        self.recent, self.latest = [0.0] * ranks, [0.0] * ranks  # seconds of this window, and of the last step
        self.noise, self.seen = _NOISE * _NOISE, _SEEN  # variance of one step, and steps of which it is the mean
        self.before: list[Any] = []  # what was observed with the shares before
        self.evidence, self.trial = [0.0, 0.0], [0.0, 0.0]  # of the slope: earlier changes of shares, and the last one
        self.warm = False  # whether this worker has done a step: engines take longer for their first one
        self._known: dict[Layout, Layout] = {}

    def rebalanced(self, layout: Layout) -> Layout:
        """Return a layout with the rows that its shares have now; as it is if it is not measured."""
        if not layout.measured:
            return layout
        if layout not in self._known:
            costs = _costs_of_shares(layout, self.costs)
            rows = divide(self.prompts, costs, self.slope) if max(costs) > min(costs) else ()
            self._known[layout] = replace(layout, rows=rows)
        return self._known[layout]

    def record(self, sampled: Sequence[tuple[float, float]]) -> bool:
        """Add the (seconds, rows) that each rank took to sample in a step. Return whether rows are divided otherwise
        from the next step on."""
        if not self.layouts or not self.warm:
            self.warm = True
            return False
        known = [rank for rank, (seconds, rows) in enumerate(sampled) if seconds > 0 and rows > 0]
        if not known:
            return False
        self._add(known, *([each[part] / (math.fsum(sampled[rank][part] for rank in known) / len(known))
                            for each in sampled] for part in (0, 1)))
        if self.steps % WINDOW:
            return False
        self._restart_if_unlike(known)
        seconds, rows = ([value / self.steps for value in values] for values in (self.seconds, self.rows))
        changed = self._correct(_Observed(seconds, rows, self.steps))
        if self.steps >= _MEMORY:
            self._forget()
        return changed

    def _add(self, known: Sequence[int], seconds: Sequence[float], rows: Sequence[float]) -> None:
        expected = self._expected(known, rows)
        differences = []
        for rank in known:
            taken = min(max(seconds[rank], expected[rank] / _MOST), expected[rank] * _MOST)
            if self.latest[rank]:
                relative = 2 * (taken - self.latest[rank]) / (taken + self.latest[rank])
                differences.append(relative * relative / 2)
            self.latest[rank] = taken
            self.seconds[rank] += taken
            self.recent[rank] += taken
            self.rows[rank] += rows[rank]
        self.steps += 1
        if differences:
            self.seen = min(self.seen + 1, _TRIAL)
            self.noise += (math.fsum(differences) / len(differences) - self.noise) / self.seen

    def _restart_if_unlike(self, known: Sequence[int]) -> None:
        """Go on with the seconds of the last window alone if a rank has become slower or quicker in it."""
        far = [self.recent[rank] / WINDOW * self.steps / self.seconds[rank] - 1 for rank in known if self.seconds[rank]]
        if any(each * each * WINDOW > _CERTAIN * _CERTAIN * self._variance() for each in far):
            self.rows = [rows * WINDOW / self.steps for rows in self.rows]
            self.seconds, self.steps = self.recent, WINDOW
            self.before = []
            self.evidence = self._weights()
            self.trial = [0.0, 0.0]
        self.recent = [0.0] * len(self.recent)

    def _variance(self) -> float:
        return max(self.noise, _LEAST_NOISE * _LEAST_NOISE)

    def _weights(self) -> list[float]:
        """Return the evidence of the slope, weighing at most eight times as much as the slope 1."""
        found = [earlier + last for earlier, last in zip(self.evidence, self.trial)]
        kept = min(1.0, 8 * _TRUST / found[1]) if found[1] else 1.0
        return [kept * each for each in found]

    def _expected(self, known: Sequence[int], rows: Sequence[float]) -> list[float]:
        """Return the seconds of each rank with so many rows, relative to the mean of the `known` ones."""
        found = [cost * _factor(self.slope, count) for cost, count in zip(self.costs, rows)]
        mean = math.fsum(found[rank] for rank in known) / len(known)
        return [each / mean for each in found]

    def _correct(self, seen: _Observed) -> bool:
        """Take other costs where seconds differ from what is expected by more than chance, and other shares if they
        are worth it by these costs. Return whether shares have changed."""
        known = [rank for rank, rows in enumerate(seen.rows) if rows > 0]
        noise = self._variance()
        if self.before and seen.steps <= _TRIAL:
            self.trial = self._evidence(_Observed(*self.before), seen, noise)
        weights = self._weights()
        slope = min(max((_TRUST + weights[0]) / (_TRUST + weights[1]), _LEAST_SLOPE), 1.0)
        expected, costs = self._expected(known, seen.rows), [*self.costs]
        measured = {rank: seen.seconds[rank] / _factor(slope, seen.rows[rank]) for rank in known}
        scale = math.fsum(self.costs[rank] for rank in known) / math.fsum(measured.values())
        for rank in known:
            far = seen.seconds[rank] / expected[rank] - 1
            if far * far * seen.steps > _CERTAIN * _CERTAIN * noise:
                costs[rank] += _DAMPING * (measured[rank] * scale - costs[rank])
        if costs == self.costs or not any(self._is_worthwhile(layout, costs, slope) for layout in self.layouts):
            return False
        before = list(map(self.rebalanced, self.layouts))
        ranks = len(costs)
        self.evidence, self.trial = weights, [0.0, 0.0]
        self.costs, self.slope, self.before, self._known = costs, slope, [*seen], {}
        self.seconds, self.rows, self.latest, self.steps = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks, 0
        return before != list(map(self.rebalanced, self.layouts))

    def _evidence(self, before: _Observed, now: _Observed, noise: float) -> list[float]:
        """Return the weighted sums of products and of squares whose quotient is the slope that a change of shares has
        shown."""
        known = [rank for rank, (one, other) in enumerate(zip(before.rows, now.rows)) if one > 0 and other > 0]
        more = {rank: (now.rows[rank] - before.rows[rank]) / _factor(self.slope, before.rows[rank]) for rank in known}
        mean = math.fsum(before.seconds[rank] * more[rank] for rank in known) \
            / math.fsum(before.seconds[rank] for rank in known) if known else 0.0
        weight = 1 / (noise * (1 / before.steps + 1 / now.steps))
        longer = {rank: now.seconds[rank] / before.seconds[rank] - 1 for rank in known}
        pairs = [(more[rank] - mean * (1 + longer[rank]), longer[rank]) for rank in known]
        return [weight * math.fsum(one * other for one, other in pairs),
                weight * math.fsum(one * one for one, _ in pairs)]

    def _is_worthwhile(self, layout: Layout, costs: Sequence[float], slope: float) -> bool:
        """Return whether a layout's slowest share would be quicker by enough with the rows that such costs give it."""
        now = self.rebalanced(layout).proportion or _equal_shares(self.prompts, layout.dp)
        old, new = (max(cost * _factor(slope, rows * layout.dp / self.prompts)
                        for cost, rows in zip(_costs_of_shares(layout, costs), each))
                    for each in (now, divide(self.prompts, _costs_of_shares(layout, costs), slope)))
        return new <= (1 - _GAIN) * old

    def _forget(self) -> None:
        """Halve the weight of what was seen, so that a change shows soon, and that of the slope, so that it is tried
        again after a while."""
        self.seconds, self.rows = ([value / 2 for value in values] for values in (self.seconds, self.rows))
        self.steps //= 2
        self.evidence = [each / 2 for each in self._weights()]
        self.trial = [0.0, 0.0]

    def state_dict(self) -> dict[str, Any]:
        return {name: deepcopy(getattr(self, name)) for name in self._KEPT}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; from equal shares if it is of another number of ranks."""
        if len(state.get("costs", ())) == len(self.costs):
            for name in self._KEPT:
                setattr(self, name, deepcopy(state[name]))
            self._known = {}


def _factor(slope: float, rows: float) -> float:
    """Return the seconds for `rows` over those for an equal share's, which are 1."""
    return 1 - slope + slope * rows


def _costs_of_shares(layout: Layout, costs: Sequence[float]) -> list[float]:
    """Return the cost of each share: its ranks go in step."""
    return [max(costs[rank] for rank in layout.ranks_of(share)) for share in range(layout.dp)]


def _equal_shares(count: int, shares: int) -> list[int]:
    return [len(Layout(shares).cut(count, share)) for share in range(shares)]


def divide(count: int, costs: Sequence[float], slope: float = 1.0) -> tuple[int, ...]:
    """Return how many of `count` units each share gets: at least one and a quarter of an equal share, at most four
    times as many, and each further unit goes to the share that is done with it first. Ties go to lower shares."""
    shares = len(costs)
    result = [max(1, count // (_UNLIKE * shares))] * shares
    most = -(-_UNLIKE * count // shares)
    heap = [(cost * _factor(slope, (result[share] + 1) * shares / count), share) for share, cost in enumerate(costs)]
    heapq.heapify(heap)
    for _ in range(count - sum(result)):
        _, share = heap[0]
        result[share] += 1
        if result[share] == most:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (costs[share] * _factor(slope, (result[share] + 1) * shares / count), share))
    return tuple(result)
