"""Finds questions of held-out data among the training data, equal or nearly so, since they make validation too good.

Texts are compared in lower case, without spaces and punctuation; operators stay. Two are nearly equal if of all their
runs of eight bytes at least `NEAR` are in both (Broder 1997). Runs that most held-out questions have, such as those of
an instruction before each problem, tell no two apart and do not count. Candidates are found by MinHash signatures in
bands, which miss one whose share is just `NEAR` once in 4,500 times, and are then compared exactly. Held-out data is
held in memory, training data is read once, a block at a time.
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy

from distflow.data.dataset import Records, read_blocks
from distflow.data.problems import answer_text, question_text

NEAR = 0.8
_RUN, _BANDS, _ROWS = 8, 16, 4
_FEW = 8
"""Questions in which what most have in common is not looked for."""
_SHOWN = 3
_INSIGNIFICANT = re.compile(r"(?!(?<=[0-9])\.(?=[0-9]))[^\w+*/%<>=^|~×÷−-]|_|(?<![0-9)])-(?=[^\W\d])|(?<=[^\W\d])-")
"""What says nothing about a question: spaces, punctuation and hyphens of words."""


@dataclass
class Overlap:
    """What a training set and a held-out set have in common. `examples`: index in both."""

    exact: int = 0  # held-out records whose question is one of the training set's
    near: int = 0  # others that are nearly one of them
    examples: list[tuple[int, int]] = field(default_factory=list)


class HeldOut:
    """Index of one held-out set's questions."""

    def __init__(self, records: Records, question: str, near: bool = True):
        self.texts: dict[str, list[int]] = {}
        self.runs: list[numpy.ndarray] = []
        self.bands: dict[tuple[int, bytes], list[int]] = {}
        self.near = near
        for index, record in read_blocks(records):
            text = normalized(record.get(question))
            self.texts.setdefault(text, []).append(index)
            self.runs.append(_shingles(text) if near else numpy.empty(0))
        self.common = _in_most(self.runs) if near and len(self.runs) >= _FEW else numpy.empty(0, numpy.uint64)
        for index in range(len(self.runs)) if near else ():
            self.runs[index] = numpy.setdiff1d(self.runs[index], self.common, assume_unique=True)
            for band in _bands(self.runs[index]):
                self.bands.setdefault(band, []).append(index)

    def overlap(self, training: Records, question: str) -> Overlap:
        exact: dict[int, int] = {}
        near: dict[int, int] = {}
        for index, record in read_blocks(training):
            text = normalized(record.get(question))
            exact.update((other, index) for other in self.texts.get(text, ()) if text and other not in exact)
            if self.near and text not in self.texts:
                near.update((other, index) for other in self._near(text) if other not in near)
        near = {other: index for other, index in near.items() if other not in exact}
        return Overlap(len(exact), len(near), [(index, other) for found in (exact, near)
                                               for other, index in sorted(found.items())[:_SHOWN]])

    def _near(self, text: str) -> Iterator[int]:
        runs = numpy.setdiff1d(_shingles(text), self.common, assume_unique=True)
        for other in sorted({each for band in _bands(runs) for each in self.bands.get(band, ())}):
            both = len(numpy.intersect1d(runs, self.runs[other], assume_unique=True))
            if both >= NEAR * (len(runs) + len(self.runs[other]) - both):
                yield other


@dataclass
class Repeats:
    """Records whose question an earlier one has, letter for letter but for blanks. `first`: indices of two of them."""

    count: int = 0
    otherwise: int = 0  # of these, with another answer than that one
    first: tuple[int, int] = (0, 0)
    first_otherwise: tuple[int, int] = (0, 0)


def find_repeats(records: Records, question: str, answer: str, most: int) -> Repeats:
    """Find questions that come again, in the first `most` records. A record without an answer contradicts none."""
    seen: dict[str, tuple[int, str]] = {}
    found = Repeats()
    for index, record in itertools.islice(read_blocks(records), most):
        asked = _conversation(record.get(question))
        answered = "" if record.get(answer) is None else \
            answer_text(record[answer]).rpartition("####")[2].strip()
        earlier, other = seen.setdefault(asked, (index, answered)) if asked else (index, answered)
        if earlier == index:
            continue
        found.first = found.first if found.count else (index, earlier)
        found.count += 1
        if answered and other and _spelled(answered) != _spelled(other):
            found.first_otherwise = found.first_otherwise if found.otherwise else (index, earlier)
            found.otherwise += 1
    return found


def _spelled(answer: str) -> str:
    """Return an answer without what is only another spelling of it."""
    return answer.casefold().replace(",", "").rstrip(".")


def _conversation(question: object) -> str:
    text = question if isinstance(question, str) else json.dumps(question, default=str) if question else ""
    return " ".join(text.split())


def normalized(question: object) -> str:
    """Return the letters, digits and operators of a question in lower case; "" of what is none. `1 + 1` is not `1 - 1`,
    and `1.5` is not `15`."""
    try:
        text = question_text(question) if isinstance(question, str | list) else ""
    except (TypeError, LookupError, AttributeError):
        return ""
    return _INSIGNIFICANT.sub("", unicodedata.normalize("NFKC", text).lower())


def _shingles(text: str) -> numpy.ndarray:
    """Return the runs of eight bytes of a text, each once, as numbers; a shorter text is one of them."""
    data = numpy.frombuffer(text.encode().ljust(_RUN, b" "), dtype=numpy.uint8)
    windows = numpy.lib.stride_tricks.sliding_window_view(data, _RUN)
    return numpy.unique(numpy.ascontiguousarray(windows).view(numpy.uint64))


def _in_most(texts: list[numpy.ndarray]) -> numpy.ndarray:
    """Return the runs that more than half of the texts have."""
    runs, counts = numpy.unique(numpy.concatenate(texts), return_counts=True)
    return runs[counts > len(texts) / 2]


_DRAWN = numpy.random.default_rng(0).integers(0, 2**63, (2, _BANDS * _ROWS), dtype=numpy.uint64)


def _bands(runs: numpy.ndarray) -> Iterator[tuple[int, bytes]]:
    if not len(runs):
        return
    mixed = (runs ^ (runs >> numpy.uint64(31)))[:, None] * (_DRAWN[0] | numpy.uint64(1)) + _DRAWN[1]
    lowest = (mixed ^ (mixed >> numpy.uint64(29))).min(0)
    yield from ((band, lowest[band * _ROWS : (band + 1) * _ROWS].tobytes()) for band in range(_BANDS))


def overlaps(training: Mapping[str, Records], held_out: Mapping[str, Records], question: str,
             near: bool = True) -> Iterator[tuple[str, str, Overlap]]:
    """Yield what each held-out set has in common with each training set, by their names."""
    for other, records in held_out.items():
        index = HeldOut(records, question, near)
        yield from ((name, other, index.overlap(each, question)) for name, each in training.items())
