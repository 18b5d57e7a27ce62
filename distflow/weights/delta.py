"""Lossless delta of a run of chunks against the version before: which 16-bit words changed, and what they are now.

After a step of reinforcement learning in bfloat16 most weights are what they were: the update is smaller than their
precision. One byte says how many words are skipped, two say what the next one is; 255 skips as many and nothing more.
"""

from __future__ import annotations

import numpy

_SKIP = 255
_WORTHWHILE = 4
"""How many times fewer the bytes of a delta must be, or the chunks are sent as they are."""
_TRIED, _AGAIN = 2, 32
"""How often each way is tried before the faster one is taken, and after how many runs the other is tried again."""


def encode(old: numpy.ndarray, new: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray] | None:
    """Return what makes `new` of `old` ([bytes] uint8, as many of each): skips [codes] uint8 and words [changed]
    uint16. None if they have an odd length, or so much has changed that it is not worthwhile."""
    if len(new) % 2:
        return None
    words = new.view(numpy.uint16)
    differs = old.view(numpy.uint16) != words
    if 3 * numpy.count_nonzero(differs) > len(new) // _WORTHWHILE:
        return None
    changed = numpy.flatnonzero(differs)
    gaps = numpy.diff(changed, prepend=-1) - 1
    codes = gaps // _SKIP + 1
    if int(codes.sum()) + 2 * len(changed) > len(new) // _WORTHWHILE:
        return None
    skips = numpy.full(int(codes.sum()), _SKIP, numpy.uint8)
    skips[codes.cumsum() - 1] = gaps % _SKIP
    return skips, words[changed]


def decode(old: numpy.ndarray, codes: int, delta: numpy.ndarray, into: numpy.ndarray) -> None:
    """Write what `encode` was given as `new` into memory of that length. `delta`: `codes` skips, and the words. Raises
    ConnectionError: it is no delta of these bytes."""
    skips = delta[:codes]
    ends = numpy.cumsum(skips + (skips != _SKIP), dtype=numpy.int64)
    changed = ends[skips != _SKIP] - 1
    if len(delta) != codes + 2 * len(changed) or (len(ends) and 2 * int(ends[-1]) > len(into)):
        raise ConnectionError(f"{len(delta)} bytes are no delta of chunks of {len(into)}")
    numpy.copyto(into, old)
    into.view(numpy.uint16)[changed] = numpy.frombuffer(delta[codes:].tobytes(), numpy.uint16)


class DeltaChoice:
    """Choice between deltas and whole chunks, by the bytes per second that each has brought from one source."""

    def __init__(self) -> None:
        self.runs = {True: 0, False: 0}
        self.rates = {True: 0.0, False: 0.0}

    def choose(self) -> bool:
        """Return whether to ask for the next run as a delta."""
        fewer = min(self.runs, key=lambda way: self.runs[way])
        faster = self.rates[True] >= self.rates[False]
        again = not sum(self.runs.values()) % _AGAIN
        chosen = fewer if self.runs[fewer] < _TRIED else faster is not again
        self.runs[chosen] += 1  # now: many may be asked for before the first one has come
        return chosen

    def record_rate(self, delta: bool, rate: float) -> None:
        """Record the bytes per second of a run."""
        self.rates[delta] = (self.rates[delta] + rate) / 2 if self.rates[delta] else rate
