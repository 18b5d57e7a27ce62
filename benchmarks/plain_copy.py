"""The bytes of a redistribution, and nothing but the bytes: no ids, no lengths, no balance. What a machine can do.

Consumers own shared memory, which is warm; each producer copies its bytes there, a column at a time. With `out`,
consumers then copy them into memory of their own, as one does who must give the shared memory back.
"""

from __future__ import annotations

import zlib

import numpy as np
from torch import Tensor

from benchmarks.rows import Case, Columns
from distflow.data.host_group import HostGroup
from distflow.data.redistribute import PoolNotice, RowMemory


class PlainCopy:
    """One rank's part."""

    def __init__(self, case: Case, rank: int, out: bool = False):
        self.case, self.rank, self.out = case, rank, out
        self.host_group = HostGroup(rank, 60.0)
        self.shared = RowMemory(self.host_group.secret)
        self.got = np.empty(0, dtype=np.uint8)

    def load(self, ids: Tensor, columns: Columns) -> None:
        """Take what goes to each consumer: an even piece of every column."""
        values = [column[0] if isinstance(column, tuple) else column for column in columns.values()]
        raw = [tensor.numpy().reshape(-1).view("uint8") for tensor in values]
        self.consumers = range(self.case.first, self.case.first + self.case.consumers)
        self.pieces = {rank: [np.array_split(part, len(self.consumers))[number] for part in raw]
                       for number, rank in enumerate(self.consumers)}
        sizes = {rank: sum(map(len, pieces)) for rank, pieces in self.pieces.items()}
        told = self.host_group.gather(sizes)
        self.sizes = {rank: [said[rank] for said in told] for rank in self.consumers}
        wanted = sum(self.sizes.get(self.rank, [0]))
        if wanted > max((address.size for address in self.shared.notice().spare), default=0):
            self.shared.add(wanted)
            self.got = np.zeros(wanted, dtype=np.uint8)
        stocks = [PoolNotice.unpack(notice) for notice in self.host_group.gather(self.shared.notice())]
        self.memory = {rank: self.shared.open(stocks[rank].spare[-1]) for rank in self.consumers}

    def move(self) -> None:
        for rank in self.consumers:
            position, target = sum(self.sizes[rank][: self.rank]), memoryview(self.memory[rank])
            for piece in self.pieces[rank]:
                target[position : position + len(piece)] = memoryview(piece)
                position += len(piece)
        self.host_group.barrier()
        if self.out and self.rank in self.consumers:
            size = sum(self.sizes[self.rank])
            memoryview(self.got)[:size] = memoryview(self.memory[self.rank])[:size]

    def through(self) -> int:
        """Return the bytes that this rank sent; compares what arrived with what was sent.

        Raises:
            SystemExit: they differ.
        """
        sent = {rank: zlib.crc32(b"".join(map(bytes, pieces))) for rank, pieces in self.pieces.items()}
        told = self.host_group.gather(sent)
        if self.rank in self.consumers:
            arrived, position = self.got if self.out else self.memory[self.rank], 0
            for said, size in zip(told, self.sizes[self.rank]):
                if size and zlib.crc32(arrived[position : position + size]) != said[self.rank]:
                    raise SystemExit("the plain copy copied wrongly")
                position += size
        return sum(len(piece) for pieces in self.pieces.values() for piece in pieces)
