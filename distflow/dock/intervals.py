"""Sets of whole numbers as ranges: committed rows, leases and steps are long runs with few gaps."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import numpy

from distflow.dock.slots import Ids


class Intervals:
    """Set of whole numbers, kept as ranges: memory and time grow with the number of gaps, not of members."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()):
        self.starts: list[int] = []
        self.ends: list[int] = []  # exclusive
        for start, end in ranges:
            self.starts.append(start)
            self.ends.append(end)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self.starts, number) - 1
        return at >= 0 and number < self.ends[at]

    def __len__(self) -> int:
        return sum(self.ends) - sum(self.starts)

    def contains_each(self, numbers: Ids) -> numpy.ndarray:
        """Return which of `numbers` are members, [numbers] bool."""
        if not self.starts:
            return numpy.zeros(len(numbers), bool)
        at = numpy.searchsorted(self.starts, numbers, side="right") - 1
        return (at >= 0) & (numbers < numpy.array([*self.ends, 0])[at])

    def add(self, start: int, end: int | None = None) -> None:
        """Add one number, or all of start…end (exclusive)."""
        end = start + 1 if end is None else end
        first, last = bisect_left(self.ends, start), bisect_right(self.starts, end)  # the ranges that it joins
        if first < last:
            start, end = min(start, self.starts[first]), max(end, self.ends[last - 1])
        self.starts[first:last], self.ends[first:last] = [start], [end]

    def remove_all(self, numbers: Ids) -> None:
        """Remove all of `numbers`."""
        for number in numbers.tolist():
            self.remove(number)

    def update(self, numbers: Ids) -> None:
        """Add all of `numbers`."""
        numbers = numpy.unique(numbers)
        edges = numpy.flatnonzero(numpy.diff(numbers, prepend=numbers[:1] - 2, append=numbers[-1:] + 2) > 1)
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist()):
            self.add(int(numbers[begin]), int(numbers[end - 1]) + 1)

    def remove(self, number: int) -> None:
        at = bisect_right(self.starts, number) - 1
        if at < 0 or number >= self.ends[at]:
            return
        start, end = self.starts.pop(at), self.ends.pop(at)
        rest = [(first, last) for first, last in ((start, number), (number + 1, end)) if first < last]
        self.starts[at:at] = [first for first, _ in rest]
        self.ends[at:at] = [last for _, last in rest]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(start, exclusive end) of each range, ascending."""
        return list(zip(self.starts, self.ends))
