"""Parquet files: records by index, from batches of the columns that are needed.

A row group is decoded when a record of it is first asked for, a batch at a time. Its batches stay in memory while all
that are held fit `_MEMORY`; those of further row groups go to a temporary file, compressed, of which a read maps one.
So a shuffled epoch decodes each row group once, and memory does not grow with the file.

Values are read as they were written, see `readings`.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from distflow.errors import Diagnostic, InvalidInput, Location

Reading = Callable[[Any], Any]
_MEMORY = 2**27
"""Bytes of decoded batches that a file may hold in memory."""
_ROWS = 256
"""Rows of a batch."""
_PAGES, _RATIO = 2**30, 1000
"""A column of a row group that would unpack to more bytes than these, and to so many times what it takes in the file,
is refused, since one page of it may be all of that."""


class Parquet:
    """Dataset in a Parquet file, one of `files` that are read together. Raises InvalidInput: it is none."""

    def __init__(self, path: Path, files: int = 1):
        import pyarrow.parquet  # only users of Parquet pay for its import

        self.path, self.files = path, files  # which share memory and room
        try:
            self.file = pyarrow.parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False)
        except pyarrow.ArrowInvalid as error:
            raise InvalidInput(f"{path}: not a Parquet file: {error}") from None
        metadata = self.file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self.starts = numpy.concatenate([[0], numpy.cumsum(sizes)]).astype(int)
        self.names: list[str] = self.file.schema_arrow.names
        if twice := next((name for name in self.names if self.names.count(name) > 1), ""):
            raise InvalidInput(Diagnostic(f"it has column `{twice}` twice", Location(str(path)), "Rename one of them."))
        self.readings = readings(self.file.schema_arrow)
        self.columns: list[str] | None = None
        self.groups: dict[int, _Batches] = {}
        self.held = 0  # bytes of batches in memory

    def read_only(self, columns: list[str] | None) -> None:
        """Read these columns alone; None: all. Raises InvalidInput: the temporary folder has no room for them."""
        self.columns = columns
        metadata = self.file.metadata
        groups = map(metadata.row_group, range(metadata.num_row_groups))
        size = sum(column.total_uncompressed_size for group in groups
                   for column in map(group.column, range(group.num_columns)) if self._is_read(column))
        size *= self.files
        if size > _MEMORY and size > shutil.disk_usage(tempfile.gettempdir()).free:
            raise self._no_room(f": its columns take up to {size / 2**30:.1f} GiB")

    def _is_read(self, column: Any) -> bool:
        return self.columns is None or column.path_in_schema.partition(".")[0] in self.columns

    def _no_room(self, need: str = "") -> InvalidInput:
        what = f"the temporary folder {tempfile.gettempdir()} has no room for the unpacked file{need}"
        return InvalidInput(Diagnostic(what, Location(str(self.path)),
                                       "Each process unpacks its own copy. Name a folder on a larger disk:  "
                                       "TMPDIR=/large/folder distflow run …"))

    def __len__(self) -> int:
        return int(self.starts[-1])

    def location(self, index: int) -> Location:
        return Location(f"{self.path}: row {index + 1}")

    def get(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        wanted = numpy.asarray(indices, dtype=numpy.int64)
        groups = numpy.searchsorted(self.starts, wanted, side="right") - 1
        found: dict[int, dict[str, Any]] = {}
        for group in numpy.unique(groups).tolist():
            own = numpy.unique(wanted[groups == group])
            found.update(zip(own.tolist(), self._group(group).rows(own - self.starts[group])))
        return [read_as_written(found[index], self.readings) for index in wanted.tolist()]

    def _group(self, number: int) -> _Batches:
        import pyarrow

        if number not in self.groups:
            self._check_size(number)
            fields = [self.file.schema_arrow.field(name) for name in self.columns or self.names]
            batches = _Batches(pyarrow.schema(fields))
            try:
                for batch in self.file.iter_batches(_ROWS, [number], self.columns, use_threads=False):
                    batches.add(batch, _MEMORY // self.files - self.held)
                batches.finish()
            except (pyarrow.ArrowInvalid, OSError) as error:
                if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                    raise self._no_room() from None
                raise InvalidInput(f"{self.location(int(self.starts[number]))} and those behind it cannot be read: "
                                   f"{error}") from None
            self.held += batches.size
            self.groups[number] = batches
        return self.groups[number]

    def _check_size(self, number: int) -> None:
        group = self.file.metadata.row_group(number)
        for column in map(group.column, range(group.num_columns)):
            name = column.path_in_schema.partition(".")[0]
            large = max(_PAGES, _RATIO * column.total_compressed_size)
            if self._is_read(column) and column.total_uncompressed_size > large:
                what = f"column `{name}` unpacks {column.total_compressed_size:,} bytes to " \
                       f"{column.total_uncompressed_size:,}"
                raise InvalidInput(Diagnostic(what, self.location(int(self.starts[number])),
                                              "No text does: the file is damaged, or made to fill the memory."))


def read_as_written(record: dict[str, Any], readings: Mapping[str, Reading]) -> dict[str, Any]:
    return {**record, **{name: read(record[name]) for name, read in readings.items() if name in record}}


def readings(schema: Any) -> dict[str, Reading]:
    """Return, by the name of each column that needs it, a function that makes of a value what was written: the names of
    classes of `datasets` and its JSON, 0.1 where 32 or 16 bits have 0.10000000149011612, a mapping, text of bytes."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))["info"]["features"]
    except (ValueError, LookupError, TypeError):
        features = {}
    found = {field.name: _reading(field.type, _inner(features, field.name)) for field in schema}
    return {name: reading for name, reading in found.items() if reading}


def _inner(feature: Any, name: str) -> Any:
    return feature.get(name) if isinstance(feature, dict) else None


def _reading(kind: Any, feature: Any) -> Reading | None:
    """Return the reading of values of an Arrow type, which `datasets` has described as a `feature`; None: none."""
    import pyarrow

    types, special = pyarrow.types, _inner(feature, "_type")
    names = _inner(feature, "names") if special == "ClassLabel" else None
    if isinstance(names, list):
        return lambda value: names[value] if value is not None and 0 <= value < len(names) else None
    if isinstance(kind, pyarrow.BaseExtensionType) and kind.extension_name == "arrow.json":
        return lambda value: json.loads(value) if isinstance(value, str) else value
    if types.is_float32(kind) or types.is_float16(kind):
        narrow = numpy.float32 if types.is_float32(kind) else numpy.float16
        return lambda value: value if value is None else float(str(narrow(value)))
    if types.is_binary(kind) or types.is_large_binary(kind):
        return _text
    if types.is_dictionary(kind):
        return _reading(kind.value_type, feature)
    if types.is_map(kind):
        item = _reading(kind.item_type, None) or _as_it_is
        return lambda pairs: {key: item(value) for key, value in pairs} if isinstance(pairs, list) else pairs
    if types.is_struct(kind):
        columns = special in ("Sequence", "List")  # a list of mappings, which Arrow has as a mapping of lists
        fields = _inner(feature, "feature") if columns else feature
        own = {field.name: reading for field in kind if (reading := _reading(
            field.type, {"feature": _inner(fields, field.name)} if columns else _inner(fields, field.name)))}
        return (lambda value: {**value, **{name: read(value.get(name)) for name, read in own.items()}}
                if isinstance(value, dict) else value) if own else None
    if any(is_one(kind) for is_one in (types.is_list, types.is_large_list, types.is_fixed_size_list,
                                       types.is_list_view, types.is_large_list_view)):
        inner = _reading(kind.value_type, feature[0] if isinstance(feature, list) else _inner(feature, "feature"))
        return (lambda values: [*map(inner, values)] if isinstance(values, list) else values) if inner else None
    return None


def _as_it_is(value: Any) -> Any:
    return value


_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f]")


def _text(value: Any) -> Any:
    """Return the text that bytes are, as Spark and Hive write columns of text; others, such as images, stay bytes, and
    so do those with control characters."""
    try:
        return value.decode() if isinstance(value, bytes) and not _CONTROL.search(value) else value
    except UnicodeDecodeError:
        return value


class _Batches:
    """Decoded batches of a row group, in memory or in a temporary file."""

    def __init__(self, schema: Any):
        self.schema, self.size = schema, 0
        self.held: list[Any] = []
        self.ends: Any = []
        self.file: Any = None
        self.writer: Any = None
        self.reader: Any = None

    def add(self, batch: Any, room: int) -> None:
        """Add a batch; with those in memory it takes at most `room` bytes, else all go to the file."""
        self.ends.append((self.ends[-1] if self.ends else 0) + len(batch))
        self.held.append(batch)
        self.size += batch.nbytes
        if self.size > room or self.writer:
            self._write()

    def _write(self) -> None:
        import pyarrow

        if self.writer is None:
            self.file = tempfile.NamedTemporaryFile(prefix="distflow-parquet-")  # noqa: SIM115 it outlives the call
            options = pyarrow.ipc.IpcWriteOptions(compression="lz4")
            self.writer = pyarrow.ipc.new_file(self.file, self.schema, options=options)
        for batch in self.held:
            self.writer.write_batch(batch.cast(self.schema))
        self.held, self.size = [], 0

    def finish(self) -> None:
        import pyarrow

        self.ends = numpy.array(self.ends)
        if self.writer:
            self.writer.close()
            self.file.flush()
            self.reader = pyarrow.ipc.open_file(pyarrow.memory_map(self.file.name))
            self.file.close()  # the map keeps what it needs

    def rows(self, offsets: numpy.ndarray) -> Iterator[dict[str, Any]]:
        """Yield the rows at these offsets, which ascend."""
        batches = numpy.searchsorted(self.ends, offsets, side="right")
        for number in numpy.unique(batches).tolist():
            batch = self.reader.get_batch(number) if self.reader else self.held[number]
            own = offsets[batches == number] - (self.ends[number] - len(batch))
            first, last = int(own[0]), int(own[-1])
            some = batch.slice(first, last + 1 - first).to_pylist() if len(own) == last + 1 - first else None
            yield from some or (batch.slice(int(offset), 1).to_pylist()[0] for offset in own)
