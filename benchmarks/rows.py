"""The rows that contenders redistribute: made in the producers, known by their ids, checked at the far end.

What a row holds follows from its number, so that any process can check any row without having seen it. A repeat
renumbers all rows and changes `rewards`: what is left over from an earlier repeat cannot pass for what was asked for.
Needs torch only: the peers' environment has no distflow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

PADDED, RAGGED = "padded", "ragged"
PER_TOKEN = {"prompts": torch.int64, "responses": torch.int64, "response_mask": torch.bool,
             "old_log_probs": torch.float32, "ref_log_probs": torch.float32, "advantages": torch.float32}
"""Columns with an element per token; one more, `rewards`, has a number per row."""
NAMES = (*PER_TOKEN, "rewards")
FILL = 0.4
"""Mean length of a ragged row, of the longest that there may be. Lengths are spread evenly from 1 to twice the mean."""
_BLOCK, _VALUES = 16, 50_021

Columns = dict[str, Tensor | tuple[Tensor, Tensor]]
"""Padded [B, L], or values [T] and lengths [B]."""


@dataclass(frozen=True)
class Case:
    """`mib` MiB of padded rows that go from ranks 0 … producers - 1 to `consumers` ranks from `first` on.

    machines: the ranks are spread over, in their order, as far as distflow knows.
    form: "padded" (all rows are of full length) or "ragged" (the same number of rows with a mean fill of 40%).
    """

    mib: float
    producers: int
    consumers: int
    first: int = 0
    form: str = PADDED
    prompt: int = 512
    response: int = 2048
    machines: int = 1

    @property
    def name(self) -> str:
        where = f" on {self.machines} machines" if self.machines > 1 else ""
        return f"{self.mib:g} MiB {self.producers}→{self.consumers}{where} {self.form}"

    @property
    def ranks(self) -> int:
        return max(self.producers, self.first + self.consumers)

    @property
    def rows(self) -> int:
        """A multiple of 8, so that every layout divides it: verl's chunks must be even."""
        row = sum(self.width(name) * dtype.itemsize for name, dtype in PER_TOKEN.items()) + 4 + 8
        return max(8, int(self.mib * 2**20 / row) // 8 * 8)

    @property
    def nbytes(self) -> int:
        """Of all rows without padding, ids included; the lengths of ragged columns are left out."""
        tokens = {name: int(self.lengths(name, torch.arange(self.rows)).sum()) for name in PER_TOKEN}
        return sum(tokens[name] * dtype.itemsize for name, dtype in PER_TOKEN.items()) + self.rows * (4 + 8)

    def width(self, column: str) -> int:
        return self.prompt if column == "prompts" else self.response

    def lengths(self, column: str, rows: Tensor) -> Tensor:
        """[B] int64."""
        width = self.width(column)
        if self.form == PADDED:
            return torch.full_like(rows, width)
        longest = max(1, round(2 * FILL * width) - 1)
        return (rows * 2_654_435_761 + width) % 4_294_967_291 % longest + 1

    def first_id(self, repeat: int) -> int:
        return repeat * self.rows

    def ids(self, repeat: int, producer: int) -> Tensor:
        """[B]: those of one producer, in a repeat."""
        count = self.rows // self.producers
        return self.first_id(repeat) + producer * count + torch.arange(count)


def make(case: Case, producer: int, pad: bool) -> Columns:
    """Return a producer's per-token columns, the same in every repeat; `pad` for who must carry ragged rows padded."""
    return {name: _column(case, name, case.ids(0, producer), pad) for name in PER_TOKEN}


def rewards(case: Case, repeat: int, ids: Tensor) -> Tensor:
    """[B] float32, other in every repeat."""
    return ((ids - case.first_id(repeat)) * 31 + repeat * 17).remainder(_VALUES).float()


def wrong(case: Case, repeat: int, ids: Tensor, columns: Columns) -> str:
    """Return what is wrong with rows that have arrived; nothing if they hold what they should."""
    if not torch.equal(columns["rewards"], rewards(case, repeat, ids)):
        return "rewards are not those of the rows"
    numbers = ids - case.first_id(repeat)
    for name in PER_TOKEN:
        column = columns[name]
        for start, stop in _blocks(len(ids)):
            expected = _column(case, name, numbers[start:stop], not isinstance(column, tuple))
            if not _same(_part(column, start, stop), expected):
                return f"{name} of some of rows {ids[start:stop].tolist()[:3]}… are not those of the rows"
    return ""


def _column(case: Case, name: str, rows: Tensor, pad: bool) -> Tensor | tuple[Tensor, Tensor]:
    lengths, width = case.lengths(name, rows), case.width(name)
    total = int(lengths.sum())
    flat = torch.zeros(len(rows) * width if pad else total, dtype=PER_TOKEN[name])
    ends = lengths.cumsum(0).tolist()
    for start, stop in _blocks(len(rows)):
        values = _values(name, rows[start:stop], lengths[start:stop], width)
        keep = torch.arange(width) < lengths[start:stop, None]
        if pad:
            flat[start * width : stop * width] = (values * keep).flatten()
        else:
            flat[ends[start] - int(lengths[start]) : ends[stop - 1]] = values[keep]
    return flat.view(len(rows), width) if pad else (flat, lengths)


def _values(name: str, rows: Tensor, lengths: Tensor, width: int) -> Tensor:
    salt = sum(map(ord, name))
    values = (rows[:, None] * 9_973 + torch.arange(width) * salt + salt).remainder(_VALUES)
    return (values % 7 > 0) if PER_TOKEN[name] == torch.bool else values.to(PER_TOKEN[name])


def _part(column: Tensor | tuple[Tensor, Tensor], start: int, stop: int) -> Tensor | tuple[Tensor, Tensor]:
    if not isinstance(column, tuple):
        return column[start:stop]
    values, lengths = column
    before = int(lengths[:start].sum())
    return values[before : before + int(lengths[start:stop].sum())], lengths[start:stop]


def _same(found: Tensor | tuple[Tensor, Tensor], expected: Tensor | tuple[Tensor, Tensor]) -> bool:
    if isinstance(found, tuple):
        return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(found, expected))
    return found.dtype == expected.dtype and torch.equal(found, expected)


def _blocks(count: int) -> Iterator[tuple[int, int]]:
    """Return ranges of a few rows each: checking must not need the memory whose peak is measured."""
    return ((start, min(count, start + _BLOCK)) for start in range(0, count, _BLOCK))
