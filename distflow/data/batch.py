"""Batch: rows of named columns. Token columns are ragged: values back to back and a length per row, without padding."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from distflow.data.row_copies import as_bytes, copy_runs
from distflow.errors import ColumnError, InvalidInput

if TYPE_CHECKING:
    from tensordict import TensorDict

_IDS, _LENGTHS = "ids", "_lengths"
Allocate = Callable[..., Tensor]
"""As `torch.empty`: `allocate(size, dtype=torch.uint8)` returns [size] uint8."""


@dataclass(frozen=True, eq=False)
class Ragged:
    """Ragged column: `values` [T, …] holds all rows back to back, `lengths` [B] (int64) the number of elements of each.
    Ragged elements (tokens of each turn, pixels of each image): `values` is a Ragged of T rows. Raises `ColumnError` if
    lengths do not add up to T."""

    values: Any
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
        return cls(_concat_columns(rows) if rows else torch.empty(0, dtype=dtype), lengths)

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
    def rows(self) -> list[Any]:
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
        begin, end = int(self.offsets[start]), int(self.offsets[stop])
        return Ragged(_slice(self.values, begin, end), self.lengths[start:stop])

    def select(self, index: Tensor) -> Ragged:
        """Return a copy of rows in the order of `index`."""
        return _gather_ragged([self], index)

    def padded(self, fill: float = 0, side: Literal["left", "right"] = "right") -> Tensor:
        """Return [B, longest row, …]. Raises `ColumnError` if the elements are ragged themselves."""
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
        return Ragged(values, self.lengths)


ColumnData = Tensor | Ragged


def encode_text(texts: Iterable[str]) -> Ragged:
    """Return text as a ragged column of UTF-8 bytes; half of a surrogate pair, which JSON may hold, survives."""
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
    """Rows with ids [B] (int64), unique in a step; columns' rows stand in the same order. A row that a node repeats `k`
    times becomes the rows `id * k` … `id * k + k - 1`, so that its origin is known from its id."""

    ids: Tensor
    columns: dict[str, ColumnData] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            if len(column) != len(self.ids):
                raise ColumnError(f"column `{name}` has {len(column)} rows, the batch has {len(self.ids)}")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, name: str) -> Any:
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
        return Batch.gather([self], index)

    @staticmethod
    def gather(batches: Sequence[Batch], index: Tensor, allocate: Allocate = torch.empty) -> Batch:
        """Return rows of several batches, numbered through, in the order of `index` [any length]. Of several batches
        dense columns are joined first. `allocate` gives memory for ragged ones. Raises `ColumnError` if columns differ
        in name, form, type or shape."""
        _check_names(batches)
        parts = {name: [batch[name] for batch in batches] for name in batches[0].columns}
        for name, columns in parts.items():
            forms = {(len(lengths), dtype_name(values.dtype), *values.shape[1:]) for lengths, values in
                     map(levels, columns)}
            if len(forms) > 1:
                raise ColumnError(f"the rows of column `{name}` do not fit together: some are {forms.pop()}, some "
                                  f"{forms.pop()} (levels of lengths, type, shape). Their producers differ")
        return Batch(torch.cat([batch.ids for batch in batches])[index],
                     {name: _gather(columns, index, allocate) for name, columns in parts.items()})

    def repeat(self, times: int) -> Batch:
        """Return each row `times` times in succession, with the ids of its repetitions."""
        index = torch.arange(len(self)).repeat_interleave(times)
        ids = self.ids[index] * times + torch.arange(times).repeat(len(self))
        return Batch(ids, self.select(index).columns)

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Return all rows, one batch after the other. Raises `ColumnError` if columns differ in name, form or shape."""
        _check_names(batches)
        return Batch(torch.cat([batch.ids for batch in batches]),
                     {name: _concat(name, [batch[name] for batch in batches]) for name in batches[0].columns})

    def to_padded(self, fill: float = 0) -> dict[str, Tensor]:
        """Return one tensor a column, `ids` [B] among them. A ragged column becomes [B, longest, …], padded on the
        right, with its lengths [B] as `NAME_lengths`. Raises `ColumnError` if a column is nested."""
        padded: dict[str, Tensor] = {_IDS: self.ids}
        for name, column in self.columns.items():
            padded |= {name: column.padded(fill), name + _LENGTHS: column.lengths} if isinstance(column, Ragged) \
                else {name: column}
        return padded

    @staticmethod
    def from_padded(tensors: dict[str, Tensor]) -> Batch:
        """Return the batch that `to_padded` made these tensors of."""
        lengths = {name for name in tensors if name.endswith(_LENGTHS) and name.removesuffix(_LENGTHS) in tensors}
        return Batch(tensors[_IDS], {
            name: Ragged.from_padded(tensor, tensors[name + _LENGTHS]) if name + _LENGTHS in lengths else tensor
            for name, tensor in tensors.items() if name != _IDS and name not in lengths})

    def to_tensordict(self) -> TensorDict:
        """Return B rows: ragged columns as jagged tensors, uncopied. Raises `ColumnError` if one is nested."""
        try:
            from tensordict import TensorDict  # optional
        except ImportError:
            raise InvalidInput("tensordict is not installed:  pip install tensordict") from None
        return TensorDict({_IDS: self.ids} | {name: jagged(name, column) for name, column in self.columns.items()},
                          batch_size=[len(self)])

    @staticmethod
    def from_tensordict(rows: TensorDict) -> Batch:
        """Return the entries as columns; `ids`, if there are none, are 0 … B - 1."""
        entries: dict[str, Any] = {str(name): value for name, value in rows.items()}
        return _with_ids({name: Ragged(value.values(), value.offsets().diff()) if value.is_nested else value
                          for name, value in entries.items()}, len(rows))


def to_list(column: ColumnData) -> list[Any]:
    """Return a column as Python values, one for each row; of text, strings."""
    if not isinstance(column, Ragged):
        return column.tolist()
    return decode_text(column) if is_text(column) else [to_list(row) for row in column.rows]


def is_text(column: ColumnData) -> bool:
    return isinstance(column, Ragged) and isinstance(column.values, Tensor) and column.values.dtype == torch.uint8


def levels(column: ColumnData) -> tuple[list[Tensor], Tensor]:
    """Return the lengths of each level of raggedness, outermost first, and the elements themselves [T, …]."""
    lengths = []
    while isinstance(column, Ragged):
        lengths.append(column.lengths)
        column = column.values
    return lengths, column


def from_levels(lengths: Sequence[Tensor], values: Tensor) -> ColumnData:
    """Return the column that has these `levels`. Raises `ColumnError` if they do not fit together."""
    column: ColumnData = values
    for level in reversed(lengths):
        column = Ragged(column, level)
    return column


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_names(batches: Sequence[Batch]) -> None:
    for batch in batches:
        if batch.columns.keys() != batches[0].columns.keys():
            odd = ", ".join(sorted(batch.columns.keys() ^ batches[0].columns.keys()))
            raise ColumnError(f"batches with different columns cannot be joined: not all of them have {odd}")


def _concat(name: str, columns: list[ColumnData]) -> ColumnData:
    filled = [column for column in columns if len(column)] or columns[:1]  # a rank without rows only guesses the form
    parts = [levels(column) for column in filled]
    depths = sorted({len(lengths) for lengths, _ in parts})
    shapes = sorted({tuple(values.shape[1:]) for _, values in parts if len(values)})
    if len(depths) > 1 or len(shapes) > 1:
        kinds = ["Tensor" if depth == 0 else "Ragged" if depth == 1 else f"{depth}-fold Ragged" for depth in depths]
        raise ColumnError(f"the parts of column `{name}` do not fit together: {' and '.join(sorted(kinds))} with "
                          f"elements of shape {' and '.join(str(list(shape)) for shape in shapes)}")
    return _concat_columns(filled)


def _concat_columns(parts: Sequence[ColumnData]) -> ColumnData:
    """Concatenate columns. An empty part does not affect the result's type: `torch.tensor([])` is float32."""
    parts = [part for part in parts if len(part)] or [parts[0]]
    ragged = [part for part in parts if isinstance(part, Ragged)]
    if ragged:
        return Ragged(_concat_columns([part.values for part in ragged]), torch.cat([part.lengths for part in ragged]))
    return torch.cat([part for part in parts if isinstance(part, Tensor)])


def _slice(column: ColumnData, start: int, stop: int) -> ColumnData:
    return column.slice(start, stop) if isinstance(column, Ragged) else column[start:stop]


def _gather(parts: Sequence[ColumnData], index: Tensor, allocate: Allocate = torch.empty) -> ColumnData:
    ragged = [part for part in parts if isinstance(part, Ragged)]
    if ragged:
        return _gather_ragged(ragged, index, allocate)
    dense = [part for part in parts if isinstance(part, Tensor)]
    return (torch.cat(dense) if len(dense) > 1 else dense[0])[index]


def _gather_ragged(parts: Sequence[Ragged], index: Tensor, allocate: Allocate = torch.empty) -> Ragged:
    every, values = torch.cat([part.lengths for part in parts]), [part.values for part in parts]
    index = torch.arange(len(every), device=every.device)[index]  # which may be negative, or a mask
    lengths, begin = every[index], (every.cumsum(0) - every)[index]
    at, total = lengths.cumsum(0) - lengths, int(lengths.sum())
    if not all(isinstance(each, Tensor) and each.is_cpu and not each.requires_grad for each in values):
        shift = torch.repeat_interleave(begin - at, lengths)
        return Ragged(_gather(values, torch.arange(total, device=shift.device) + shift), lengths)
    width = math.prod(values[0].shape[1:]) * values[0].element_size()
    gathered = allocate(total * width, dtype=torch.uint8).view(values[0].dtype).reshape(total, *values[0].shape[1:])
    row = element = 0
    for part in parts:
        there = ((index >= row) & (index < row + len(part))).nonzero().flatten() if len(parts) > 1 else slice(None)
        copy_runs(as_bytes(part.values), as_bytes(gathered), (begin[there] - element).numpy(), at[there].numpy(),
                  lengths[there].numpy(), width)
        row, element = row + len(part), element + len(part.values)
    return Ragged(gathered, lengths)


def _with_ids(columns: dict[str, ColumnData], rows: int) -> Batch:
    ids = columns.pop(_IDS, None)
    return Batch(ids if isinstance(ids, Tensor) else torch.arange(rows), columns)


def jagged(name: str, column: ColumnData) -> Tensor:
    """Return a column as one tensor, a ragged one jagged, uncopied; torch pads it to its longest row only if that is
    given. Raises `ColumnError`: it is nested."""
    if isinstance(column, Tensor):
        return column
    if isinstance(column.values, Ragged):
        raise ColumnError(f"column `{name}` is nested; a TensorDict has at most one ragged dimension")
    least, most = (int(column.lengths.min()), int(column.lengths.max())) if len(column) else (0, 0)
    return torch.nested.nested_tensor_from_jagged(column.values, column.offsets, min_seqlen=least, max_seqlen=most)
