"""A set of whole numbers as the ranges that they fill: what a run has consumed, in a few words however long it runs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class Intervals:
    """Numbers that mostly follow each other. Memory and time go with the number of gaps, not of members."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()):
        self.starts: list[int] = []
        self.ends: list[int] = []
        """Of each range, the first number behind it."""
        for start, end in ranges:
            self.starts.append(start)
            self.ends.append(end)

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self.starts, number) - 1
        return place >= 0 and number < self.ends[place]

    def __len__(self) -> int:
        """How many numbers are in it."""
        return sum(self.ends) - sum(self.starts)

    def add(self, number: int) -> None:
        place = bisect_right(self.starts, number)
        if place and number < self.ends[place - 1]:
            return
        joins_left = place > 0 and self.ends[place - 1] == number
        joins_right = place < len(self.starts) and self.starts[place] == number + 1
        if joins_left and joins_right:
            self.ends[place - 1] = self.ends.pop(place)
            self.starts.pop(place)
        elif joins_left:
            self.ends[place - 1] = number + 1
        elif joins_right:
            self.starts[place] = number
        else:
            self.starts.insert(place, number)
            self.ends.insert(place, number + 1)

    def remove(self, number: int) -> None:
        """Take a member out."""
        place = bisect_right(self.starts, number) - 1
        if place < 0 or number >= self.ends[place]:
            return
        start, end = self.starts.pop(place), self.ends.pop(place)
        kept = [(first, last) for first, last in ((start, number), (number + 1, end)) if first < last]
        self.starts[place:place] = [first for first, _ in kept]
        self.ends[place:place] = [last for _, last in kept]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(first, first behind) of each range, ascending."""
        return list(zip(self.starts, self.ends))
