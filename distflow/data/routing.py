"""Where each row goes when a layout changes: computed from what the ranks announce, the same on all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgpack
import numpy as np

from distflow.data.batch import Batch
from distflow.data.strips import Form, Strip, form_of, strips_of
from distflow.data.warehouse import Stock
from distflow.schema.errors import ColumnError

_ALIGNED = 64
_SHOWN = 5

Destinations = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""From the ids of all rows [rows] to pairs (row [pairs], share [pairs]): a row may go to several shares, or to none."""


class Notice(NamedTuple):
    """What a rank announces: its rows' ids [rows], and per column its form and its rows' counts, one [rows] a strip.

    Columns whose rows have as many elements each, as all that a policy writes of its tokens, share one array.
    """

    ids: np.ndarray
    forms: dict[str, Form]
    counts: dict[str, list[np.ndarray]]
    stock: Stock


def announce(batch: Batch, stock: Stock) -> tuple[bytes, dict[str, list[Strip]]]:
    """A rank's notice as bytes, and the strips that it speaks of."""
    strips = {name: strips_of(column) for name, column in batch.columns.items()}
    forms, numbers = [], {}
    for name, column in batch.columns.items():
        form = form_of(column)
        counts = [strip.counts.tobytes() for strip in strips[name]] if form.depth else []  # a dense row has one element
        forms.append((name, *form, [numbers.setdefault(part, len(numbers)) for part in counts]))
    header = msgpack.packb([len(batch), forms, stock])
    header += b"\0" * (-len(header) % 8)
    return b"".join([len(header).to_bytes(8, "little"), header, batch.ids.numpy().tobytes(), *numbers]), strips


def read_notice(raw: bytes) -> Notice:
    """What `announce` packed."""
    size = int.from_bytes(raw[:8], "little")
    reader = msgpack.Unpacker()
    reader.feed(raw[8 : 8 + size])
    rows, forms, stock = reader.unpack()
    numbers = np.frombuffer(raw, dtype=np.int64, offset=8 + size)
    ids, *distinct = [numbers[start : start + rows] for start in range(0, len(numbers), rows)] if rows else [numbers]
    once = np.ones(rows, dtype=np.int64)
    described, counts = {}, {}
    for name, depth, dtype, shape, strips in forms:
        described[name] = Form(depth, dtype, tuple(shape))
        counts[name] = [distinct[strip] if rows else ids for strip in strips] if depth else [once]
    return Notice(ids, described, counts, Stock.unpack(stock))


def agree(notices: Sequence[Notice]) -> dict[str, Form]:
    """The form of each column. A rank without rows, or with empty ones only, has no say if another has elements.

    Raises:
        ColumnError: the ranks' elements differ in type or shape, or their columns are not the same.
    """
    holders = [rank for rank, notice in enumerate(notices) if len(notice.ids)] or [0]
    names = notices[holders[0]].forms
    for rank in holders:
        if notices[rank].forms.keys() != names.keys():
            odd = ", ".join(sorted(notices[rank].forms.keys() ^ names.keys()))
            raise ColumnError(f"rank {holders[0]} and rank {rank} do not have the same columns: only one has {odd}")
    return {name: _agree(name, notices, holders) for name in names}


def _agree(name: str, notices: Sequence[Notice], holders: list[int]) -> Form:
    said = {rank: notices[rank].forms[name] for rank in holders}
    if len(set(said.values())) == 1:
        return said[holders[0]]
    full = [rank for rank in holders if notices[rank].counts[name][-1].any()] or holders[:1]
    first = said[full[0]]
    for rank in holders:
        if said[rank].depth != first.depth or (rank in full and said[rank] != first):
            raise ColumnError(f"the parts of column `{name}` do not fit together: rank {full[0]} has {first}, rank "
                              f"{rank} has {said[rank]}")
    return first


class Part(NamedTuple):
    """One strip of the rows that arrive. Per pair: `counts` elements, from element `at` of its share's strip.

    Share `i`'s strip lies at byte `starts[i]` of its memory and has `sizes[i]` bytes, in elements of `width` bytes.
    """

    width: int
    counts: np.ndarray
    at: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray


class Route:
    """The rows' way: pairs of a row and a share, by share and then by id.

    holder, position, ids: [pairs]: the rank that has the row, where in its batch, its id. `bounds` [shares + 1]: share
    `i` has the pairs `bounds[i]` … `bounds[i + 1] - 1`. `totals` [shares]: bytes of a share's memory.

    Raises:
        ColumnError: a share would get a row twice.
    """

    def __init__(self, notices: Sequence[Notice], forms: dict[str, Form], destinations: Destinations, shares: int):
        ids = np.concatenate([notice.ids for notice in notices])
        rows = np.array([len(notice.ids) for notice in notices])
        row, share = destinations(ids)
        order = _by_share(ids[row], share, shares)
        row, share = row[order], share[order]
        self.holder = np.repeat(np.arange(len(notices)), rows)[row]
        self.position = row - (rows.cumsum() - rows)[self.holder]
        self.ids, self.share = ids[row], share
        self.bounds = np.searchsorted(share, np.arange(shares + 1))
        twice = (self.ids[1:] == self.ids[:-1]) & (share[1:] == share[:-1])
        if twice.any():
            one, other = self.holder[:-1][twice][0], self.holder[1:][twice][0]
            raise ColumnError(f"rows {self.ids[1:][twice][:_SHOWN].tolist()} of columns {', '.join(forms)} exist "
                              f"twice, on rank {one} and rank {other}")
        self.totals = np.zeros(shares, dtype=np.int64)
        holders = [notice for notice in notices if len(notice.ids)]
        known: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.parts = {name: [self._part([notice.counts[name][level] for notice in holders], row, width, known)
                             for level, width in enumerate(form.widths)] if holders else []
                      for name, form in forms.items()}

    def _part(self, said: list[np.ndarray], row: np.ndarray, width: int, known: dict) -> Part:
        """`said`: each holder's counts. Strips for which all said the same share their arrays, which are `known`."""
        key = tuple(map(id, said))
        if key not in known:
            counts = np.concatenate(said)[row]
            ends = np.zeros(len(counts) + 1, dtype=np.int64)
            counts.cumsum(out=ends[1:])
            edges = ends[self.bounds]
            known[key] = counts, ends[:-1] - edges[self.share], edges[1:] - edges[:-1]
        counts, at, elements = known[key]
        sizes, starts = elements * width, self.totals
        self.totals = starts + -(-sizes // _ALIGNED) * _ALIGNED
        return Part(width, counts, at, starts, sizes)

    def pairs(self, share: int, holder: int | None = None) -> np.ndarray:
        """The pairs of a share, or those of them whose rows a rank has; by id."""
        every = np.arange(self.bounds[share], self.bounds[share + 1])
        return every if holder is None else every[self.holder[every] == holder]

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """[pairs]: bytes of each row."""
        alike: dict[int, list[Part]] = {}
        for part in (part for parts in self.parts.values() for part in parts):
            alike.setdefault(id(part.counts), []).append(part)
        return sum((parts[0].counts * sum(part.width for part in parts) for parts in alike.values()),
                   np.zeros(len(self.ids), dtype=np.int64))

    def traffic(self, ranks: int) -> np.ndarray:
        """[ranks, shares]: bytes of rows that a rank has and a share gets."""
        shares = len(self.totals)
        sums = np.bincount(self.holder * shares + self.share, self.sizes, ranks * shares)
        return sums.astype(np.int64).reshape(ranks, shares)


def _by_share(ids: np.ndarray, share: np.ndarray, shares: int) -> np.ndarray:
    """[pairs]: their order by share and then by id."""
    if (ids[1:] >= ids[:-1]).all():  # the usual case; numbers as small as these are sorted in one pass
        return np.argsort(share.astype(np.min_scalar_type(shares)), kind="stable")
    return np.lexsort((ids, share))
