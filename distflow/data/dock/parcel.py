"""Rows as buffers: a batch goes onto a line, lies in a warehouse and leaves it again without being rebuilt.

What arrives in one message is a parcel: one buffer, with views of its columns. A request for any of its rows is
answered by slices of that buffer, which the kernel gathers. No pickle: what arrives can only become columns. Their
header travels in the message's: `[name, levels of raggedness, dtype, shape of an element, elements]`.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from distflow.data.batch import Batch, ColumnData, dtype_name, levels, of_levels
from distflow.data.dock.layout import Ids
from distflow.data.strips import elements_of, form_of, raw, strips_of
from distflow.schema.errors import ColumnError

_DTYPES = {dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
Span = tuple["Parcel", int, int]
"""Rows start…stop of a parcel."""
Heads = list[list[Any]]


class Held:
    """A column as raw bytes: its strips, and before them, if it is ragged, one of the rows' own lengths."""

    def __init__(self, column: ColumnData):
        self.form = form_of(column)
        self.strips = [(memoryview(strip.data), width, strip.bounds.tolist())
                       for strip, width in zip(strips_of(column), self.form.widths, strict=True)]
        if self.form.depth:
            self.strips.insert(0, (memoryview(raw(levels(column)[0][0])), 8, range(len(column) + 1)))
        self.nbytes = sum(len(data) for data, *_ in self.strips)

    def cut(self, start: int, stop: int, into: list[list[memoryview]]) -> int:
        """Append the buffers of rows start…stop to `into`, one list a strip; returns how many elements they have."""
        for part, (data, width, bounds) in zip(into, self.strips):
            first, last = bounds[start], bounds[stop]
            part.append(data[first * width : last * width])
        return last - first


class Parcel:
    """The rows of one message as they came. `base` is the place of its first row among all rows of its warehouse."""

    def __init__(self, batch: Batch, base: int, nbytes: int):
        self.batch, self.base, self.nbytes = batch, base, nbytes
        self.live = len(batch)
        """Rows that still have a column here."""
        self.held: dict[str, Held] = {}

    def column(self, name: str) -> Held:
        if name not in self.held:
            self.held[name] = Held(self.batch[name])
        return self.held[name]


def tokens_of(batch: Batch) -> Ids:
    """[rows]: the elements in each row's longest ragged column that is not text; what a row weighs in balancing."""
    result = numpy.zeros(len(batch), numpy.int64)
    for column in batch.columns.values():
        form = form_of(column)
        if form.depth and form.dtype != "uint8":
            result = numpy.maximum(result, elements_of(column))
    return result


def pack(ids: Ids, columns: Iterable[tuple[str, Sequence[Span]]]) -> tuple[Heads, list[Any]]:
    """The header and the buffers of a message that has rows `ids`, each column gathered from its spans.

    Raises:
        ColumnError: the spans of a column do not have one form.
    """
    heads: Heads = []
    buffers: list[Any] = [memoryview(ids).cast("B") if len(ids) else b""]
    for name, spans in columns:
        heads.append(_gather(name, spans, buffers))
    return heads, buffers


def _gather(name: str, spans: Sequence[Span], buffers: list[Any]) -> list[Any]:
    first = spans[0][0].column(name)
    parts: list[list[memoryview]] = [[] for _ in first.strips]
    elements = 0
    for parcel, start, stop in spans:
        held = parcel.column(name)
        if held is not first and held.form != first.form:
            raise ColumnError(f"the rows of column `{name}` do not fit together: some are {first.form}, some "
                              f"{held.form}. Their producers differ")
        elements += held.cut(start, stop, parts)
    for part in parts:
        buffers += part
        buffers.append(bytes(-sum(map(len, part)) % 8))
    return [name, *first.form, elements]


def gather(ids: Ids, names: Iterable[str], spans: Sequence[Span]) -> Batch:
    """Rows of parcels as a batch of their own: one copy, and several times faster than by index for long rows."""
    heads, buffers = pack(ids, [(name, spans) for name in names])
    data = torch.empty(sum(map(len, buffers)), dtype=torch.uint8)
    view, position = memoryview(data.numpy()), 0
    for buffer in buffers:
        view[position : position + len(buffer)] = buffer
        position += len(buffer)
    return unpack(len(ids), heads, data)


def unpack(rows: int, heads: Heads, data: Tensor) -> Batch:
    """The batch of a message; its columns are views of `data` [bytes] uint8.

    Raises:
        ColumnError: the header and the bytes do not fit together.
    """
    take = functools.partial(_take, data, position := [0])
    ids = take("ids", "int64", [rows])
    columns: dict[str, ColumnData] = {}
    for name, depth, dtype, shape, elements in heads:
        lengths: list[Tensor] = []
        for _ in range(depth):
            part = take(name, "int64", [int(lengths[-1].sum()) if lengths else rows])
            if len(part) and int(part.min()) < 0:
                raise ColumnError(f"column `{name}` arrived with a row of negative length")
            lengths.append(part)
        columns[name] = of_levels(lengths, take(name, dtype, [elements, *shape]))
    if position[0] != len(data):
        raise ColumnError(f"a batch of {position[0]} bytes came as {len(data)} bytes")
    return Batch(ids, columns)


def _take(data: Tensor, position: list[int], name: str, dtype: str, shape: list[int]) -> Tensor:
    kind = _DTYPES.get(dtype)
    if kind is None:
        raise ColumnError(f"column `{name}` is of type {dtype}, which torch {torch.__version__} does not have")
    if min(shape) < 0:
        raise ColumnError(f"column `{name}` arrived with the impossible shape {shape}")
    size = math.prod(shape) * kind.itemsize
    part = data[position[0] : position[0] + size]
    if len(part) < size:
        raise ColumnError(f"a batch of {len(data)} bytes ends within column `{name}`, which has {size} bytes")
    position[0] += size + -size % 8
    if part.storage_offset() % kind.itemsize:  # complex128 may lie between two of its own
        part = part.clone()
    return part.view(kind).reshape(shape)


def spans_of(places: Ids, bases: Sequence[int], parcels: Sequence[Parcel]) -> list[Span]:
    """Rows at `places` of a warehouse as few spans: neighbours in a parcel are one. `bases`: of each parcel, ascending.

    Between the places of two parcels there is always one that nobody has, so neighbours are in one parcel.
    """
    if not len(places):
        return []
    edges = numpy.flatnonzero(numpy.diff(places) != 1) + 1
    begins, ends = [0, *edges.tolist()], [*edges.tolist(), len(places)]
    spans = []
    for first, begin, end in zip(places[begins].tolist(), begins, ends):
        parcel = parcels[bisect_right(bases, first) - 1]
        spans.append((parcel, first - parcel.base, first - parcel.base + end - begin))
    return spans


def order_of(wanted: Ids, there: Ids) -> Ids:
    """Places in `there` of those of `wanted` that it has, in the order of `wanted`."""
    sorter = numpy.argsort(there)
    places = numpy.searchsorted(there, wanted, sorter=sorter).clip(max=max(len(there) - 1, 0))
    found = sorter[places] if len(there) else places[:0]
    return found[there[found] == wanted] if len(there) else found
