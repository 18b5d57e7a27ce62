"""Conversions of a batch behind `Batch.to_padded`, `to_tensordict`, `to_arrow` and their inverses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch
from torch import Tensor

from distflow.data.batch import Batch, ColumnData, Ragged, dtype_name
from distflow.errors import ColumnError, InvalidInput

if TYPE_CHECKING:
    from tensordict import TensorDict

IDS, LENGTHS = "ids", "{}_lengths"
_TORCH = {pa.bool_(): torch.bool, pa.uint8(): torch.uint8, pa.int8(): torch.int8, pa.int16(): torch.int16,
          pa.int32(): torch.int32, pa.int64(): torch.int64, pa.float16(): torch.float16, pa.float32(): torch.float32,
          pa.float64(): torch.float64}


def to_padded(batch: Batch, fill: float = 0) -> dict[str, Tensor]:
    padded: dict[str, Tensor] = {IDS: batch.ids}
    for name, column in batch.columns.items():
        if isinstance(column, Ragged):
            padded |= {name: column.padded(fill), LENGTHS.format(name): column.lengths}
        else:
            padded[name] = column
    return padded


def from_padded(tensors: dict[str, Tensor]) -> Batch:
    columns: dict[str, ColumnData] = {}
    lengths = {name for name in tensors if name.endswith("_lengths") and name.removesuffix("_lengths") in tensors}
    for name, tensor in tensors.items():
        if name not in lengths and name != IDS:
            other = tensors.get(LENGTHS.format(name))
            columns[name] = tensor if other is None else Ragged.from_padded(tensor, other)
    return Batch(tensors[IDS], columns)


def to_tensordict(batch: Batch) -> TensorDict:
    kind = _tensordict()
    columns: dict[str, Any] = {IDS: batch.ids}
    for name, column in batch.columns.items():
        if isinstance(column, Ragged) and isinstance(column.values, Ragged):
            raise ColumnError(f"column `{name}` is nested; a TensorDict has at most one ragged dimension")
        columns[name] = torch.nested.nested_tensor_from_jagged(column.values, column.offsets) \
            if isinstance(column, Ragged) else column
    return kind(columns, batch_size=[len(batch)])


def from_tensordict(rows: TensorDict) -> Batch:
    columns = {name: Ragged(value.values(), value.offsets().diff()) if value.is_nested else value
               for name, value in rows.items()}
    ids = columns.pop(IDS, torch.arange(len(rows)))
    return Batch(ids, columns)


def to_arrow(batch: Batch) -> pa.Table:
    fields, arrays = [pa.field(IDS, pa.int64())], [pa.array(batch.ids.numpy())]
    for name, column in batch.columns.items():
        array, dtype, shape = _to_arrow(column)
        meaning = {"dtype": dtype_name(dtype), "shape": ",".join(map(str, shape))}
        fields.append(pa.field(name, array.type, metadata=meaning))
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def from_arrow(table: pa.Table) -> Batch:
    columns = {}
    for field in table.schema:
        meaning = {key.decode(): value.decode() for key, value in (field.metadata or {}).items()}
        chunks = table.column(field.name).combine_chunks()
        array = pa.concat_arrays(chunks.chunks) if isinstance(chunks, pa.ChunkedArray) else chunks
        columns[field.name] = _from_arrow(field.name, array, meaning.get("dtype"))
    ids = columns.pop(IDS, torch.arange(table.num_rows))
    return Batch(ids, columns)


def _to_arrow(column: ColumnData) -> tuple[pa.Array, torch.dtype, tuple[int, ...]]:
    if isinstance(column, Ragged):
        values, dtype, shape = _to_arrow(column.values)
        return pa.LargeListArray.from_arrays(pa.array(column.offsets.numpy()), values), dtype, shape
    values = column.detach().cpu().contiguous()
    if values.dtype not in _TORCH.values():
        values = values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.dtype.itemsize])
    array, shape = pa.array(values.flatten().numpy()), tuple(values.shape[1:])
    for size in reversed(shape):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array, column.dtype, shape


def _from_arrow(name: str, array: pa.Array, dtype: str | None) -> ColumnData:
    if array.null_count:
        raise ColumnError(f"column `{name}` has {array.null_count} nulls; a tensor has none. Fill or drop them first")
    kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        offsets = torch.from_numpy(array.offsets.to_numpy().astype("int64"))
        return Ragged(_from_arrow(name, array.flatten(), dtype), offsets.diff())
    shape, rows = [], len(array)
    while pa.types.is_fixed_size_list(array.type):
        shape.append(array.type.list_size)
        array = array.flatten()
    if array.type not in _TORCH:
        raise ColumnError(f"column `{name}` has values of type {array.type}, which no tensor holds")
    flat = torch.empty(len(array), dtype=_TORCH[array.type])
    flat.numpy()[:] = array.to_numpy(zero_copy_only=False)
    wanted = getattr(torch, dtype) if dtype else flat.dtype
    return (flat if flat.dtype == wanted else flat.view(wanted)).reshape(rows, *shape)


def _tensordict() -> type[TensorDict]:
    try:
        from tensordict import TensorDict
    except ImportError:
        raise InvalidInput("tensordict is not installed:  pip install tensordict") from None
    return TensorDict
