"""Redistribution by way of rank 0, and nothing else between: what the architecture alone costs.

Rank 0 receives every producer's rows and sends every consumer an even, contiguous share: raw tensors by gloo's
point-to-point calls, no pickle, no packing, no padding beyond the rows' own. It receives each column straight into its
place among all rows and sends each share straight out of it, and it sends a column on while later ones still arrive.
Ragged rows go as values back to back, after one small message with all lengths. Receiving tensors are kept for the next
round: a fresh one would cost page faults.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rows import NAMES, PER_TOKEN, Case, Columns

_IDS, _LENGTHS = "ids", "lengths"
_WIDTHS = ("prompts", "responses")
"""The two columns whose lengths all others share."""


class Rank0:
    """One rank's part."""

    def __init__(self, case: Case, rank: int, padded: bool):
        """`padded`: rows come as [B, L], whatever the case says of them."""
        self.case, self.rank, self.padded = case, rank, padded
        self.kept: dict[str, Tensor] = {}
        self.counted = 0

    def load(self, ids: Tensor, columns: Columns) -> None:
        self.mine = {_IDS: ids, **{name: column[0] if isinstance(column, tuple) else column
                                   for name, column in columns.items()}}
        if columns and not self.padded:
            self.mine[_LENGTHS] = torch.stack([columns[name][1] for name in _WIDTHS], 1)

    def move(self) -> None:
        self.got: dict[str, Tensor] = {}
        self.sending: list[dist.Work] = []
        lengths = None if self.padded else self._lengths()
        pending = {name: self._collect(name, lengths) for name in (_IDS, *NAMES)} if self.rank == 0 else {}
        for name in (_IDS, *NAMES):
            if self.rank == 0:
                for work in pending[name]:
                    work.wait()
                self._give(name, lengths)
            elif self.rank < self.case.producers:
                self._send(self.mine[name], 0, name)
        self._take(lengths)
        for work in self.sending:
            work.wait()

    def result(self) -> tuple[Tensor, Columns]:
        if not self._consumes(self.rank):
            return torch.empty(0, dtype=torch.int64), {}
        columns: Columns = {name: self.got[name] for name in NAMES}
        if self.padded:
            return self.got[_IDS], columns
        for name in PER_TOKEN:
            columns[name] = (self.got[name], self.got[_LENGTHS][:, self._which(name)].clone())
        return self.got[_IDS], columns

    def through(self) -> int:
        counted, self.counted = self.counted, 0
        return counted

    def _lengths(self) -> Tensor:
        """[rows, 2]: of all rows, on every rank that needs them: rank 0, and each consumer of its own rows."""
        case, size = self.case, self.case.rows // self.case.producers
        if 0 < self.rank < case.producers:
            self._send(self.mine[_LENGTHS], 0, _LENGTHS)
        if self.rank:
            if not self._consumes(self.rank):
                return torch.empty(0, 2, dtype=torch.int64)
            self.got[_LENGTHS] = self._buffer(_LENGTHS, (case.rows // case.consumers, 2), torch.int64)
            self._receive(self.got[_LENGTHS], 0, _LENGTHS).wait()
            return self.got[_LENGTHS]
        whole = self._buffer(_LENGTHS, (case.rows, 2), torch.int64)
        whole[:size] = self.mine[_LENGTHS]
        for work in [self._receive(whole[peer * size : (peer + 1) * size], peer, _LENGTHS)
                     for peer in range(1, case.producers)]:
            work.wait()
        self._share_out(_LENGTHS, whole, [whole.shape[0] // case.consumers] * case.consumers)
        return whole

    def _collect(self, name: str, lengths: Tensor | None) -> list[dist.Work]:
        """Rank 0: receive a column of all rows; its own are copied to their place."""
        sizes = self._sizes(name, lengths, self.case.producers)
        shape = () if name in (_IDS, "rewards") or lengths is not None else (self.case.width(name),)
        whole = self._buffer(name, (sum(sizes), *shape), self.mine[name].dtype)
        parts = whole.split(sizes)
        parts[0].copy_(self.mine[name])
        return [self._receive(parts[peer], peer, name) for peer in range(1, self.case.producers)]

    def _give(self, name: str, lengths: Tensor | None) -> None:
        """Rank 0: each consumer its share of a column; its own is a view."""
        self._share_out(name, self.kept[name], self._sizes(name, lengths, self.case.consumers))

    def _share_out(self, name: str, whole: Tensor, sizes: list[int]) -> None:
        used = whole[: sum(sizes)]
        for share, part in enumerate(used.split(sizes)):
            if self.case.first + share == 0:
                self.got[name] = part
            else:
                self._send(part, self.case.first + share, name)

    def _take(self, lengths: Tensor | None) -> None:
        """Receive, at a consumer other than rank 0, its share of all columns."""
        if self.rank == 0 or not self._consumes(self.rank):
            return
        waiting = []
        for name in (_IDS, *NAMES):
            size, = self._sizes(name, lengths, 1, self.case.rows // self.case.consumers)
            shape = () if name in (_IDS, "rewards") or lengths is not None else (self.case.width(name),)
            self.got[name] = self._buffer(name, (size, *shape), _dtype(name))
            waiting.append(self._receive(self.got[name], 0, name))
        for work in waiting:
            work.wait()

    def _sizes(self, name: str, lengths: Tensor | None, parts: int, rows: int | None = None) -> list[int]:
        """Elements in each of `parts` even shares of the rows."""
        size = (rows or self.case.rows) // parts
        if lengths is None or name not in PER_TOKEN:
            return [size] * parts
        ends = list(accumulate(part.sum().item() for part in lengths[:, self._which(name)].split(size)))
        return [end - begin for begin, end in zip([0, *ends], ends)]

    def _which(self, name: str) -> int:
        return 0 if name == "prompts" else 1

    def _consumes(self, rank: int) -> bool:
        return self.case.first <= rank < self.case.first + self.case.consumers

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name not in self.kept or self.kept[name].shape != shape:
            self.kept[name] = torch.empty(shape, dtype=dtype)
        return self.kept[name]

    def _send(self, tensor: Tensor, rank: int, name: str) -> None:
        self.counted += tensor.nbytes
        self.sending.append(dist.isend(tensor, rank, tag=_tag(name)))

    def _receive(self, tensor: Tensor, rank: int, name: str) -> dist.Work:
        self.counted += tensor.nbytes
        return dist.irecv(tensor, rank, tag=_tag(name))


def _tag(name: str) -> int:
    return (_IDS, _LENGTHS, *NAMES).index(name)


def _dtype(name: str) -> torch.dtype:
    return torch.int64 if name == _IDS else PER_TOKEN.get(name, torch.float32)
