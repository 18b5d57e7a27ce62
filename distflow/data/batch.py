"""Batch: rows of named columns. Token columns are ragged: values back to back and a length per row, without padding."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from distflow.errors import ColumnError

if TYPE_CHECKING:
    import pyarrow as pa
    from tensordict import TensorDict


@dataclass(frozen=True, eq=False)
class Ragged:
    """Ragged column: `values` [T, …] holds all rows back to back, `lengths` [B] (int64) the number of elements of each
    row.

    The elements may be ragged themselves, as the tokens of each turn of a conversation or the pixels of each image:
    `values` is then a Ragged of T rows.

    Raises:
        ColumnError: the lengths are not whole numbers, or do not add up to T.
    """

    values: Tensor | Ragged
    lengths: Tensor

    def __post_init__(self) -> None:
        if self.lengths.dtype != torch.int64 or self.lengths.ndim != 1:
            raise ColumnError(f"lengths of a ragged column must be [rows] of int64, not {list(self.lengths.shape)} of "
                              f"{dtype_name(self.lengths.dtype)}")
        if int(self.lengths.sum()) != len(self.values):
            raise ColumnError(f"the lengths of a ragged column add up to {int(self.lengths.sum())}, "
                              f"but it has {len(self.values)} values")

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor | Ragged], dtype: torch.dtype = torch.int64) -> Ragged:
        """Make a column of one tensor [length, …] or one Ragged a row; `dtype` is that of a column without rows."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        return cls(_join(rows) if rows else torch.empty(0, dtype=dtype), lengths)

    @classmethod
    def from_padded(cls, padded: Tensor, lengths: Tensor) -> Ragged:
        """Make a column of [B, L, …] with each row's elements at its beginning."""
        keep = torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]
        return cls(padded[keep], lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    @functools.cached_property
    def offsets(self) -> Tensor:
        """[B + 1]: row `i` lies at `values[offsets[i] : offsets[i + 1]]`."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    @property
    def rows(self) -> list[Tensor | Ragged]:
        """Each row as a view."""
        if isinstance(self.values, Tensor):
            return list(self.values.split(self.lengths.tolist()))
        ends = self.offsets.tolist()
        return [self.values.slice(start, end) for start, end in zip(ends, ends[1:])]

    @property
    def row_of(self) -> Tensor:
        """Row that each element belongs to [T]."""
        return torch.repeat_interleave(torch.arange(len(self), device=self.lengths.device), self.lengths)

    def slice(self, start: int, stop: int) -> Ragged:
        """Return rows start…stop (counted from 0, stop excluded, both within the column) as views."""
        begin, end = self.offsets[start].item(), self.offsets[stop].item()
        return Ragged(_slice(self.values, begin, end), self.lengths[start:stop])

    def select(self, index: Tensor) -> Ragged:
        """Return rows in the order of `index`; copies those rows and nothing else."""
        lengths = self.lengths[index]
        before = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))[:-1]
        shift = torch.repeat_interleave(self.offsets[:-1][index] - before, lengths)
        return Ragged(_select(self.values, torch.arange(len(shift), device=shift.device) + shift), lengths)

    def padded(self, fill: float = 0, side: Literal["left", "right"] = "right") -> Tensor:
        """Return [B, longest row, …], padded on the right or on the left. Raises `ColumnError` if the elements are
        ragged themselves."""
        if isinstance(self.values, Ragged):
            raise ColumnError("a nested ragged column has no padded form; pad its `values`, one level at a time")
        width = int(self.lengths.max()) if len(self) else 0
        result = self.values.new_full((len(self), width, *self.values.shape[1:]), fill)
        column = torch.arange(len(self.values), device=self.lengths.device) - self.offsets[:-1][self.row_of]
        if side == "left":
            column = column + (width - self.lengths)[self.row_of]
        result[self.row_of, column] = self.values
        return result

    def with_values(self, values: Tensor | Ragged) -> Ragged:
        """Return the same row lengths with other values [T, …]."""
        return Ragged(values, self.lengths)


ColumnData = Tensor | Ragged


def encode_text(texts: Iterable[str]) -> Ragged:
    """Return text as a ragged column of UTF-8 bytes. Half of a surrogate pair, which JSON may hold, survives decoding.
    """
    raw = [text.encode(errors="surrogatepass") for text in texts]
    lengths = torch.tensor([len(item) for item in raw], dtype=torch.int64)
    joined = bytearray(b"".join(raw))
    return Ragged(torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8), lengths)


def decode_text(column: Ragged) -> list[str]:
    """Return the text of each row. Raises `ColumnError` if the column does not hold text."""
    if isinstance(column.values, Ragged) or column.values.dtype != torch.uint8 or column.values.ndim != 1:
        held = "rows of rows" if isinstance(column.values, Ragged) else dtype_name(column.values.dtype)
        raise ColumnError(f"a column of text holds bytes (uint8), not {held}. Is another column meant?")
    data, ends = column.values.numpy().tobytes(), column.offsets.tolist()
    try:
        return [data[start:end].decode(errors="surrogatepass") for start, end in zip(ends, ends[1:])]
    except UnicodeDecodeError as error:
        raise ColumnError(f"a column of bytes is not text: {error}. Is another column meant?") from None


@dataclass(frozen=True, eq=False)
class Batch:
    """Rows with ids. `ids` [B] (int64) are unique in a step; the columns' rows stand in the same order.

    A row that a node repeats `k` times becomes the rows `id * k` … `id * k + k - 1`, so that a row's origin is known
    from its id alone.
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
            raise ColumnError(f"there is no column `{name}`; there are {', '.join(sorted(self.columns)) or 'none'}")
        return self.columns[name]

    def only(self, names: Iterable[str]) -> Batch:
        return Batch(self.ids, {name: self[name] for name in names})

    def with_columns(self, columns: dict[str, ColumnData]) -> Batch:
        return Batch(self.ids, {**self.columns, **columns})

    def slice(self, start: int, stop: int) -> Batch:
        """Return rows start…stop (counted from 0, stop excluded, both within the batch) as views."""
        return Batch(self.ids[start:stop], {name: _slice(column, start, stop) for name, column in self.columns.items()})

    def select(self, index: Tensor) -> Batch:
        """Return rows in the order of `index` [any length]; copies those rows and nothing else."""
        return Batch(self.ids[index], {name: _select(column, index) for name, column in self.columns.items()})

    def repeat(self, times: int) -> Batch:
        """Return each row `times` times in succession, with the ids of its repetitions."""
        index = torch.arange(len(self)).repeat_interleave(times)
        ids = self.ids[index] * times + torch.arange(times).repeat(len(self))
        return Batch(ids, self.select(index).columns)

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Return all rows, one batch after the other. Raises `ColumnError` if the batches do not have the same columns,
        or a column's rows differ in form or shape."""
        names = list(batches[0].columns)
        for batch in batches:
            if batch.columns.keys() != set(names):
                odd = ", ".join(sorted(batch.columns.keys() ^ set(names)))
                raise ColumnError(f"batches with different columns cannot be joined: not all of them have {odd}")
        return Batch(torch.cat([batch.ids for batch in batches]),
                     {name: _concat(name, [batch[name] for batch in batches]) for name in names})

    def to_padded(self, fill: float = 0) -> dict[str, Tensor]:
        """Return one tensor a column, `ids` [B] among them. A ragged column becomes [B, longest, …], padded on the
        right, with its lengths [B] as `NAME_lengths`. Raises `ColumnError` if a column is nested."""
        from distflow.data import convert  # as below: loads pyarrow, which most processes never use

        return convert.to_padded(self, fill)

    @staticmethod
    def from_padded(tensors: dict[str, Tensor]) -> Batch:
        """Return the batch that `to_padded` made these tensors of."""
        from distflow.data import convert

        return convert.from_padded(tensors)

    def to_tensordict(self) -> TensorDict:
        """Return a TensorDict of B rows: dense columns as they are, ragged ones as jagged nested tensors, uncopied.

        Raises:
            ColumnError: a column is nested: a jagged tensor has one ragged dimension.
            InvalidInput: tensordict is not installed.
        """
        from distflow.data import convert

        return convert.to_tensordict(self)

    @staticmethod
    def from_tensordict(rows: TensorDict) -> Batch:
        """Return the entries as columns; `ids`, if there are none, are 0 … B - 1."""
        from distflow.data import convert

        return convert.from_tensordict(rows)

    def to_arrow(self) -> pa.Table:
        """Return a table of B rows: a ragged column is a list, elements with a shape are lists of fixed size. Views,
        except for booleans. Each field's metadata has the shape, and the type where Arrow lacks it (bfloat16 travels
        as int16)."""
        from distflow.data import convert

        return convert.to_arrow(self)

    @staticmethod
    def from_arrow(table: pa.Table) -> Batch:
        """Return a table as a batch. Lists become ragged columns; `ids`, if there are none, are 0 … B - 1. Raises
        `ColumnError` if a column has nulls, or values that no tensor holds, such as strings."""
        from distflow.data import convert

        return convert.from_arrow(table)


def levels(column: ColumnData) -> tuple[list[Tensor], Tensor]:
    """Return the lengths of each level of raggedness, outermost first, and the elements themselves [T, …]."""
    lengths = []
    while isinstance(column, Ragged):
        lengths.append(column.lengths)
        column = column.values
    return lengths, column


def of_levels(lengths: Sequence[Tensor], values: Tensor) -> ColumnData:
    """Return the column that has these `levels`. Raises `ColumnError` if they do not fit together."""
    column: ColumnData = values
    for level in reversed(lengths):
        column = Ragged(column, level)
    return column


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _concat(name: str, columns: list[ColumnData]) -> ColumnData:
    filled = [column for column in columns if len(column)] or columns[:1]  # a rank without rows only guesses the form
    parts = [levels(column) for column in filled]
    depths = sorted({len(lengths) for lengths, _ in parts})
    shapes = sorted({tuple(values.shape[1:]) for _, values in parts if len(values)})
    if len(depths) > 1 or len(shapes) > 1:
        kinds = ["Tensor" if depth == 0 else "Ragged" if depth == 1 else f"{depth}-fold Ragged" for depth in depths]
        raise ColumnError(f"the parts of column `{name}` do not fit together: {' and '.join(sorted(kinds))} with "
                          f"elements of shape {' and '.join(str(list(shape)) for shape in shapes)}")
    return _join(filled)


def _join(parts: Sequence[ColumnData]) -> ColumnData:
    """Concatenate columns. An empty part does not affect the result's type: `torch.tensor([])` is float32."""
    parts = [part for part in parts if len(part)] or [parts[0]]
    if isinstance(parts[0], Ragged):
        return Ragged(_join([part.values for part in parts]), torch.cat([part.lengths for part in parts]))
    return torch.cat(parts)


def _slice(column: ColumnData, start: int, stop: int) -> ColumnData:
    return column.slice(start, stop) if isinstance(column, Ragged) else column[start:stop]


def _select(column: ColumnData, index: Tensor) -> ColumnData:
    return column.select(index) if isinstance(column, Ragged) else column[index]
