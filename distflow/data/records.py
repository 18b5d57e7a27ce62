"""Records of a dataset by index, whatever file they lie in. Opening reads an index; a record is read when asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy

from distflow.schema.errors import InvalidInput, Mistake, Spot

Record = dict[str, Any]
_SHOWN = 10


class Records(Protocol):
    """What a dataset must offer."""

    def __len__(self) -> int: ...

    def get(self, indices: Sequence[int]) -> list[Record]:
        """The records at these indices, in this order."""

    def where(self, index: int) -> str:
        """The place of a record, for messages."""


def open_records(path: Path) -> Records:
    """Open a .jsonl or .parquet file or a folder that `datasets` saved.

    Raises:
        InvalidInput: the format is unknown, or there is no record in it.
    """
    if path.is_dir():
        records: Records = SavedFolder(path)
    elif path.suffix in (".jsonl", ".json"):
        records = JsonLines(path)
    elif path.suffix == ".parquet":
        records = Parquet(path)
    else:
        raise InvalidInput(f"{path}: unknown kind of data; known are .jsonl, .parquet and folders saved by `datasets`")
    if not len(records):
        raise InvalidInput(f"{path}: there is no record in it")
    return records


def check_records(records: Records, fields: Sequence[str], share: int = 0, shares: int = 1) -> None:
    """Read every `shares`-th record from `share` on and require its fields to be text that is not empty.

    Raises:
        InvalidInput: names the file and line of the first mistakes.
    """
    mistakes: list[Mistake] = []
    for index in range(share, len(records), shares):
        try:
            record = records.get([index])[0]
        except InvalidInput as error:
            mistakes += error.mistakes
            record = None
        mistakes += [] if record is None else _check_record(records, index, record, fields)
        if len(mistakes) >= _SHOWN:
            mistakes.append(Mistake(f"stopped after {_SHOWN} mistakes"))
            break
    if mistakes:
        raise InvalidInput(mistakes)


def _check_record(records: Records, index: int, record: Record, fields: Sequence[str]) -> list[Mistake]:
    mistakes = []
    for name in fields:
        if name not in record:
            hint = f"It has {', '.join(map(repr, record)) or 'nothing'}. Name the right ones:  --set data.question=… --set data.answer=…"
            mistakes.append(Mistake(f"{records.where(index)}: the record has no field `{name}`", None, hint))
        elif not isinstance(record[name], str) or not record[name].strip():
            mistakes.append(Mistake(f"{records.where(index)}: field `{name}` must be text, not {record[name]!r}"))
    return mistakes


class JsonLines:
    """One JSON object a line; blank lines are passed over."""

    def __init__(self, path: Path):
        self.path = path
        data = numpy.memmap(path, dtype=numpy.uint8, mode="r") if path.stat().st_size else numpy.empty(0, numpy.uint8)
        ends = numpy.flatnonzero(data == ord("\n")) + 1
        edges = numpy.unique(numpy.concatenate([[0], ends, [len(data)]]))
        spans = [(line, int(start), int(end)) for line, (start, end) in enumerate(zip(edges, edges[1:]), 1)
                 if end - start > 2 or bytes(data[start:end]).strip()]
        self.spans = numpy.array(spans, dtype=numpy.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self.spans)

    def where(self, index: int) -> str:
        return f"{self.path}:{self.spans[index][0]}"

    def get(self, indices: Sequence[int]) -> list[Record]:
        with self.path.open("rb") as file:
            return [self._read(file, index) for index in indices]

    def _read(self, file: Any, index: int) -> Record:
        line, start, end = self.spans[index].tolist()
        file.seek(start)
        text = file.read(end - start).decode(errors="replace").rstrip("\n")
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            spot = Spot(str(self.path), line, error.pos + 1, 1, text)
            raise InvalidInput(Mistake(f"not valid JSON: {error.msg}", spot)) from None
        if not isinstance(record, dict):
            raise InvalidInput(Mistake("each line must be a JSON object {…}", Spot(str(self.path), line, 1, len(text), text)))
        return record


class Parquet:
    """A Parquet file; a row group is read when a record of it is asked for, and the last one read is kept."""

    def __init__(self, path: Path):
        import pyarrow.parquet  # only users of Parquet pay for its import

        self.path = path
        try:
            self.file = pyarrow.parquet.ParquetFile(path)
        except pyarrow.ArrowInvalid as error:
            raise InvalidInput(f"{path}: not a Parquet file: {error}") from None
        metadata = self.file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self.starts = numpy.concatenate([[0], numpy.cumsum(sizes)]).astype(int)
        self.held: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def where(self, index: int) -> str:
        return f"{self.path}: row {index + 1}"

    def get(self, indices: Sequence[int]) -> list[Record]:
        return [self._read(index) for index in indices]

    def _read(self, index: int) -> Record:
        group = int(numpy.searchsorted(self.starts, index, side="right")) - 1
        if self.held[0] != group:
            self.held = (group, self.file.read_row_group(group))
        offset = index - int(self.starts[group])
        return self.held[1].slice(offset, 1).to_pylist()[0]


class SavedFolder:
    """A folder written by `datasets.Dataset.save_to_disk`; memory-mapped."""

    def __init__(self, path: Path):
        import datasets  # takes seconds to import; only users of this format pay for it

        self.path = path
        try:
            self.data = datasets.load_from_disk(str(path))
        except (FileNotFoundError, ValueError) as error:
            raise InvalidInput(f"{path}: not a folder that `datasets` saved: {error}") from None
        if not isinstance(self.data, datasets.Dataset):
            raise InvalidInput(f"{path}: it holds several splits ({', '.join(self.data)}). Name one:  {path}/{next(iter(self.data))}")

    def __len__(self) -> int:
        return len(self.data)

    def where(self, index: int) -> str:
        return f"{self.path}: row {index + 1}"

    def get(self, indices: Sequence[int]) -> list[Record]:
        return [self.data[int(index)] for index in indices]
