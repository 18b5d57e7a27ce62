"""Records of text files: JSON objects, one in each line, in one list, or spread over lines; and rows of CSV files.

Opening a file finds where its records are (`spans`); a record is read when it is asked for.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy

from distflow.data.problems import Record
from distflow.errors import Diagnostic, InvalidInput, Location

_SCANNED = 2**26  # bytes in which line ends are looked for at a time
_BLANK = 64
"""A line longer than this counts as a record without a look whether it is blank."""
_BETWEEN = re.compile(r"[\s,\[\]]*")


class TextRecords:
    """Interface of the files here. spans [records, 3]: first line, begin and end in bytes; line_begins [lines]."""

    def __init__(self, path: Path):
        self.path, self.file = path, path.open("rb")
        data = numpy.memmap(path, numpy.uint8, "r") if path.stat().st_size else numpy.empty(0, numpy.uint8)
        if bytes(data[:2]) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise InvalidInput(Diagnostic("not UTF-8: it begins as UTF-16 does", Location(str(path)),
                                          self._iconv("UTF-16")))
        ends = [numpy.flatnonzero(data[start : start + _SCANNED] == ord("\n")) + (start + 1)
                for start in range(0, len(data), _SCANNED)]
        self.line_begins = numpy.concatenate([[0], *ends]).astype(numpy.int64)
        begins = self.line_begins[: len(self.line_begins) - (self.line_begins[-1] == len(data))]
        self.spans = self._find(data, numpy.append(begins, len(data)))

    def __len__(self) -> int:
        return len(self.spans)

    def get(self, indices: Sequence[int]) -> list[Record]:
        return [self._read(index) for index in indices]

    def location(self, index: int) -> Location:
        return self._at(index, self._bytes(index).decode(errors="replace").removeprefix("\ufeff"))

    def _find(self, data: numpy.ndarray, edges: numpy.ndarray) -> numpy.ndarray:
        """Return the spans of the records in the file's bytes; `edges`: where lines begin and the last one ends."""
        raise NotImplementedError

    def _read(self, index: int) -> Record:
        raise NotImplementedError

    def _bytes(self, index: int) -> bytes:
        _, start, end = self.spans[index].tolist()
        return os.pread(self.file.fileno(), end - start, start)  # forked processes share the file's position

    def _decoded(self, index: int) -> str:
        try:
            return self._bytes(index).decode().removeprefix("\ufeff").rstrip("\r\n")
        except UnicodeDecodeError as error:
            before = error.object[: error.start].decode(errors="replace")
            where = self._at(index, error.object.decode(errors="replace"), len(before), 1)
            raise InvalidInput(Diagnostic(f"not UTF-8: byte 0x{error.object[error.start]:02x}", where,
                                          self._iconv("ISO-8859-1"))) from None

    def _at(self, index: int, text: str, position: int = -1, length: int = 0) -> Location:
        """Return the location of a character of a record, or of its first line."""
        before = text[: max(position, 0)]
        line, column = before.count("\n"), len(before) - (before.rfind("\n") + 1)
        return Location(str(self.path), int(self.spans[index, 0]) + line, column + 1 if position >= 0 else 0, length,
                        text.split("\n")[line].rstrip("\r"))

    def _iconv(self, encoding: str) -> str:
        other = self.path.with_name(f"{self.path.stem}-utf8{self.path.suffix}")
        return f"If the file is {encoding}:  iconv -f {encoding} -t UTF-8 {shlex.quote(str(self.path))} > " \
               f"{shlex.quote(str(other))}"


class JsonRecords(TextRecords):
    """Dataset of JSON objects. Raises InvalidInput: there is something else between them, or the file is in UTF-16."""

    def _find(self, data: numpy.ndarray, edges: numpy.ndarray) -> numpy.ndarray:
        kept = numpy.diff(edges) > _BLANK
        for line in numpy.flatnonzero(~kept):
            kept[line] = bool(bytes(data[edges[line] : edges[line + 1]]).strip())
        lines = numpy.flatnonzero(kept)
        spans = numpy.stack([lines + 1, edges[lines], edges[lines + 1]], 1).astype(numpy.int64)
        if not len(spans):
            return spans
        start, end = spans[0, 1:].tolist()
        start += len(codecs.BOM_UTF8) * (bytes(data[start : start + 3]) == codecs.BOM_UTF8)
        first, last = bytes(data[start : min(start + _BLANK, end)]).strip(), bytes(data[max(start, end - _BLANK) : end])
        ends = last.rstrip()[-1:]
        if (first.startswith(b"{") and ends != b"}") or (first.startswith(b"[") and (len(spans) == 1 or ends != b"]")):
            return self._find_objects(data, start, first.startswith(b"["))
        return spans

    def _find_objects(self, data: numpy.ndarray, start: int, listed: bool) -> numpy.ndarray:
        """Return the spans of the objects that follow each other, in one list or without. The file is read whole."""
        text = bytes(data[start:]).decode(errors="surrogateescape")  # what is not UTF-8 is said when it is read
        size: Callable[[str], int] = len if text.isascii() else lambda part: len(part.encode(errors="surrogateescape"))
        decode = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str).raw_decode
        spans, at = list[tuple[int, int]](), 0
        while True:
            begin = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
            between, whole = "".join(text[at:begin].split()), begin == len(text)
            expected = "" if not listed else "[" * (not spans) + "]" if whole else "," if spans else "["
            if between != expected or not (whole or text[begin] == "{"):
                raise self._malformed(text, begin, "there must be JSON objects alone in it, as {\"question\": …}")
            if whole:
                break
            try:
                _, end = decode(text, begin)
            except json.JSONDecodeError as error:
                raise self._malformed(text, error.pos, f"not valid JSON: {error.msg}", _why_cut(error)) from None
            except RecursionError:
                raise self._malformed(text, begin, "this record cannot be read: it is nested too deeply") from None
            first = start + size(text[at:begin])
            start = first + size(text[begin:end])
            spans.append((first, start))
            at = end
        found = numpy.array(spans, numpy.int64).reshape(-1, 2)
        return numpy.column_stack([numpy.searchsorted(self.line_begins, found[:, 0], "right"), found])

    def _malformed(self, text: str, position: int, what: str, hint: str = "") -> InvalidInput:
        line, begin = text.count("\n", 0, position) + 1, text.rfind("\n", 0, position) + 1
        shown = text[begin : text.find("\n", position) % (len(text) + 1)].encode(errors="replace").decode()
        return InvalidInput(Diagnostic(what, Location(str(self.path), line, position - begin + 1, 1, shown), hint))

    def _read(self, index: int) -> Record:
        text = self._decoded(index)
        try:
            record = json.loads(text, object_pairs_hook=_object)
        except json.JSONDecodeError as error:
            raise InvalidInput(Diagnostic(f"not valid JSON: {error.msg}", self._at(index, text, error.pos, 1),
                                          self._why_malformed(index, error))) from None
        except (ValueError, RecursionError) as error:  # too long a number, a key that stands twice; too deep
            what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]
            raise InvalidInput(Diagnostic(f"this record cannot be read: {what}", self._at(index, text))) from None
        if not isinstance(record, dict):
            raise InvalidInput(Diagnostic("each line must be a JSON object, as {\"question\": …, \"answer\": …}",
                                          self._at(index, text, 0, len(text))))
        return record

    def _why_malformed(self, index: int, error: json.JSONDecodeError) -> str:
        if error.doc.lstrip().startswith("{'"):
            return "Python has printed it. Write each record by  json.dumps(record)"
        return _why_cut(error) if index == len(self) - 1 or "\0" in error.doc else ""


def _why_cut(error: json.JSONDecodeError) -> str:
    ended = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
    return "The file ends within a record: it is still being written, or its download was cut." \
        if ended or "\0" in error.doc else ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError: a key stands twice, so that one of its values would be lost."""
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = next(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
        raise ValueError(f"key `{twice}` stands twice in it")
    return result


class CsvRecords(TextRecords):
    """Dataset of a CSV file, whose first row names the fields; all values are texts, so that 007 and NA stay what they
    are. Cells are separated by commas; by semicolons or tabs, if the first line has those and no comma; in a
    .tsv file by tabs. Raises InvalidInput: a field has no name or two fields the same one."""

    def _find(self, data: numpy.ndarray, edges: numpy.ndarray) -> numpy.ndarray:
        first = bytes(data[: int(edges[min(1, len(edges) - 1)])])
        order = "\t,;" if self.path.suffix.lower() == ".tsv" else ",;\t"
        self.separator = next((each for each in order if each.encode() in first), ",")
        csv.field_size_limit(sys.maxsize)
        self.spans = numpy.array([*self._rows(edges)], numpy.int64).reshape(-1, 3)
        self.names = self._cells(0) if len(self.spans) else []
        if (odd := next((name for name in self.names[1:] if not name or self.names.count(name) > 1), None)) is not None:
            raise InvalidInput(Diagnostic(f"two fields are called `{odd}`" if odd else "a field has no name",
                                          self.location(0), "The first row of the file names its fields."))
        return self.spans[1:]

    def _rows(self, edges: numpy.ndarray) -> Iterator[tuple[int, int, int]]:
        """Yield the span of each row that is not blank; a quoted cell may go over several lines."""
        before = 0
        try:
            with self.path.open(encoding="latin-1", newline="\n") as lines:
                reader = csv.reader(lines, delimiter=self.separator, strict=True)
                for row in reader:
                    if row:
                        yield before + 1, edges[before], edges[reader.line_num]
                    before = reader.line_num
        except csv.Error as error:
            raise InvalidInput(Diagnostic(f"not a CSV file: {error}", Location(str(self.path), before + 1),
                                          'A quote within a quoted cell is written twice: ""')) from None

    def _cells(self, index: int) -> list[str]:
        return next(csv.reader(io.StringIO(self._decoded(index), newline="\n"), delimiter=self.separator), [])

    def _read(self, index: int) -> Record:
        cells = self._cells(index)
        if len(cells) != len(self.names):
            raise InvalidInput(Diagnostic(f"this row has {len(cells)} cells, and the first one names "
                                          f"{len(self.names)} fields: {', '.join(self.names)}", self.location(index),
                                          "A cell with a separator or a line end in it stands in quotes."))
        return {name: cell for name, cell in zip(self.names, cells) if name}
