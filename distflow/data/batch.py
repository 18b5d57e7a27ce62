"""Rows of named columns. Token columns are ragged: values back to back and a length per row, no padding anywhere."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgpack
import torch
from torch import Tensor

from distflow.schema.errors import ColumnError


@dataclass(frozen=True)
class Ragged:
    """`values` [T, …] holds all rows back to back, `lengths` [B] (int64) says how many elements each row has."""

    values: Tensor
    lengths: Tensor

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor], dtype: torch.dtype = torch.int64) -> Ragged:
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        return cls(torch.cat(list(rows)) if rows else torch.empty(0, dtype=dtype), lengths)

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor) -> Ragged:
        """From [B, L] with each row's elements at its beginning."""
        keep = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
        return cls(padded[keep], lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    @functools.cached_property
    def offsets(self) -> Tensor:
        """[B + 1]: row `i` lies at `values[offsets[i] : offsets[i + 1]]`."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    @property
    def rows(self) -> list[Tensor]:
        """Each row as a view."""
        return list(self.values.split(self.lengths.tolist()))

    @property
    def row_of(self) -> Tensor:
        """[T]: the row that each element belongs to."""
        return torch.repeat_interleave(torch.arange(len(self), device=self.lengths.device), self.lengths)

    def slice(self, start: int, stop: int) -> Ragged:
        """Rows start…stop as views."""
        begin, end = self.offsets[start].item(), self.offsets[stop].item()
        return Ragged(self.values[begin:end], self.lengths[start:stop])

    def select(self, index: Tensor) -> Ragged:
        """Rows in the order of `index`; copies those rows and nothing else."""
        lengths = self.lengths[index]
        before = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))[:-1]
        shift = torch.repeat_interleave(self.offsets[:-1][index] - before, lengths)
        return Ragged(self.values[torch.arange(len(shift)) + shift], lengths)

    def padded(self, fill: float = 0, side: str = "right") -> Tensor:
        """[B, longest row], rows pushed to the left end (`side="right"` pads on the right) or to the right end."""
        width = int(self.lengths.max()) if len(self) else 0
        result = self.values.new_full((len(self), width), fill)
        column = torch.arange(len(self.values), device=self.lengths.device) - self.offsets[:-1][self.row_of]
        if side == "left":
            column = column + (width - self.lengths)[self.row_of]
        result[self.row_of, column] = self.values
        return result

    def with_values(self, values: Tensor) -> Ragged:
        """The same row lengths with other values [T, …]."""
        return Ragged(values, self.lengths)


ColumnData = Tensor | Ragged


def encode_text(texts: Iterable[str]) -> Ragged:
    """Text as a ragged column of UTF-8 bytes."""
    raw = [text.encode() for text in texts]
    lengths = torch.tensor([len(item) for item in raw], dtype=torch.int64)
    return Ragged(torch.frombuffer(bytearray(b"".join(raw)) or bytearray(1), dtype=torch.uint8)[: sum(map(len, raw))],
                  lengths)


def decode_text(column: Ragged) -> list[str]:
    data, ends = column.values.numpy().tobytes(), column.offsets.tolist()
    return [data[start:end].decode() for start, end in zip(ends, ends[1:])]


@dataclass(frozen=True)
class Batch:
    """Rows with ids. `ids` [B] (int64) are unique in a step; the columns' rows stand in the same order.

    A row that a node repeats `k` times becomes the rows `id * k` … `id * k + k - 1`, so that a row's origin is
    known from its id alone.
    """

    ids: Tensor
    columns: dict[str, ColumnData] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            if len(column) != len(self.ids):
                raise ColumnError(f"column `{name}` has {len(column)} rows, the batch has {len(self.ids)}")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, name: str) -> ColumnData:
        if name not in self.columns:
            raise ColumnError(f"there is no column `{name}`; there are {', '.join(sorted(self.columns))}")
        return self.columns[name]

    @property
    def nbytes(self) -> int:
        tensors = [self.ids]
        for column in self.columns.values():
            tensors += [column.values, column.lengths] if isinstance(column, Ragged) else [column]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def only(self, names: Iterable[str]) -> Batch:
        return Batch(self.ids, {name: self[name] for name in names})

    def with_columns(self, columns: dict[str, ColumnData]) -> Batch:
        return Batch(self.ids, {**self.columns, **columns})

    def slice(self, start: int, stop: int) -> Batch:
        """Rows start…stop as views."""
        parts = {name: column.slice(start, stop) if isinstance(column, Ragged) else column[start:stop]
                 for name, column in self.columns.items()}
        return Batch(self.ids[start:stop], parts)

    def select(self, index: Tensor) -> Batch:
        """Rows in the order of `index` [any length]; copies those rows and nothing else."""
        parts = {name: column.select(index) if isinstance(column, Ragged) else column[index]
                 for name, column in self.columns.items()}
        return Batch(self.ids[index], parts)

    def repeat(self, times: int) -> Batch:
        """Each row `times` times in succession, with the ids that `times` repetitions have."""
        index = torch.arange(len(self)).repeat_interleave(times)
        ids = self.ids[index] * times + torch.arange(times).repeat(len(self))
        return Batch(ids, self.select(index).columns)

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """All rows, one batch after the other; the batches must have the same columns."""
        names = list(batches[0].columns)
        return Batch(torch.cat([batch.ids for batch in batches]),
                     {name: _concat([batch[name] for batch in batches]) for name in names})

    def to_wire(self) -> Tensor:
        """[bytes] uint8: header length (8 bytes), msgpack header, raw buffers. No pickle."""
        header, buffers = [], [_raw(self.ids)]
        for name, column in self.columns.items():
            values = column.values if isinstance(column, Ragged) else column
            header.append([name, isinstance(column, Ragged), str(values.dtype).removeprefix("torch."), list(values.shape)])
            buffers += [_raw(column.lengths), _raw(values)] if isinstance(column, Ragged) else [_raw(values)]
        packed = msgpack.packb([len(self), header])
        packed += b" " * (-len(packed) % 8)
        head = len(packed).to_bytes(8, "little") + packed
        return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), *buffers])

    @classmethod
    def from_wire(cls, wire: Tensor) -> Batch:
        """The batch that `to_wire` packed; its columns are views of `wire` [bytes] where alignment allows."""
        size = int.from_bytes(wire[:8].numpy().tobytes(), "little")
        rows, header = msgpack.unpackb(wire[8 : 8 + size].numpy().tobytes().rstrip(b" "))
        reader = _Reader(wire, 8 + size)
        ids = reader.take(torch.int64, [rows])
        columns: dict[str, ColumnData] = {}
        for name, ragged, dtype, shape in header:
            lengths = reader.take(torch.int64, [rows]) if ragged else None
            values = reader.take(getattr(torch, dtype), shape)
            columns[name] = Ragged(values, lengths) if lengths is not None else values
        return cls(ids, columns)


def _concat(columns: list[ColumnData]) -> ColumnData:
    if isinstance(columns[0], Ragged):
        return Ragged(torch.cat([column.values for column in columns]), torch.cat([column.lengths for column in columns]))
    return torch.cat(columns)


def _raw(tensor: Tensor) -> Tensor:
    """A tensor's bytes, filled up to a multiple of 8 so that what follows is aligned."""
    flat = tensor.contiguous().flatten().view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % 8))


class _Reader:
    def __init__(self, wire: Tensor, position: int):
        self.wire, self.position = wire, position

    def take(self, dtype: torch.dtype, shape: list[int]) -> Tensor:
        count = 1
        for size in shape:
            count *= size
        raw = count * dtype.itemsize
        part = self.wire[self.position : self.position + raw]
        self.position += raw + (-raw % 8)
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        return part.view(dtype).reshape(shape)
