"""Records of text files: JSON objects, one in each line, in one list, or spread over lines; and rows of CSV files.

Opening a file finds where its records are (`spans`); a record is read when it is asked for.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import os
import re
import shlex
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy

from distflow.data.problems import Record
from distflow.errors import Diagnostic, InvalidInput, Location

_SCANNED = 2**26  # bytes in which line ends are looked for at a time
_BLANK = 64
"""A line longer than this counts as a record without a look whether it is blank."""
_COMMENT = b"#/"
"""Letters that begin a line which is no record."""
_NOTE = re.compile(r"^[ \t]*(?:#|//).*$", re.MULTILINE)
_BETWEEN = re.compile(rf"(?:{_NOTE.pattern}|[\s,\[\]])*", re.MULTILINE)


class TextRecords:
    """Interface of the files here. spans [records, 3]: first line, begin and end in bytes; line_begins [lines]."""

    def __init__(self, path: Path):
        self.path, self.file = path, _opened(path)
        empty = not os.fstat(self.file.fileno()).st_size
        data: numpy.ndarray = numpy.empty(0, numpy.uint8) if empty else numpy.memmap(self.file, numpy.uint8, "r")
        if bytes(data[:2]) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise InvalidInput(Diagnostic("not UTF-8: it begins as UTF-16 does", Location(str(path)),
                                          self._iconv("UTF-16")))
        for self.end in ("\n", "\r"):  # the second alone ends lines of old spreadsheets
            ends = [numpy.flatnonzero(data[start : start + _SCANNED] == ord(self.end)) + (start + 1)
                    for start in range(0, len(data), _SCANNED)]
            if any(map(len, ends)):
                break
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
        path, other = (shlex.quote(str(each)) for each in (self.path, without_packing(self.path, "-utf8")))
        program, iconv = packed_by(self.path), f"iconv -f {encoding} -t UTF-8"
        return f"If the file is {encoding}:  {f'{program} -dc {path} | {iconv}' if program else f'{iconv} {path}'} > " \
               f"{other}"


def _opened(path: Path) -> IO[bytes]:
    """Open a file; a packed one is unpacked into a temporary file. Raises InvalidInput: it is damaged, or there is no
    room for it."""
    program = packed_by(path)
    if not program:
        return path.open("rb")
    whole = tempfile.TemporaryFile(prefix="distflow-unpacked-")  # noqa: SIM115 it outlives the call
    try:
        with _UNPACK[program](path) as packed:
            shutil.copyfileobj(packed, whole, 2**20)
        whole.flush()
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise InvalidInput(Diagnostic(f"it cannot be unpacked into {tempfile.gettempdir()}: {error}",
                                      Location(str(path)), "Name a folder on a larger disk:  TMPDIR=/large/folder "
                                      "distflow run …" if isinstance(error, OSError) and error.errno else "")) from None
    return whole


def _open_zstandard(path: Path) -> Any:
    import pyarrow  # only users of this packing pay for its import

    return pyarrow.input_stream(str(path), compression="zstd")


_UNPACK: dict[str, Callable[[Path], Any]] = {
    "gzip": gzip.open, "zstd": _open_zstandard, "bzip2": bz2.open, "xz": lzma.open}
"""Functions that open a packed file, by the program that unpacks it."""
_BEGINS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}


def packed_by(path: Path) -> str:
    """Return the program that unpacks a file; "" if it is not packed."""
    with path.open("rb") as file:
        begin = file.read(6)
    return next((program for start, program in _BEGINS.items() if begin.startswith(start)), "")


def without_packing(path: Path, added: str = "") -> Path:
    """Return the path of what is in a packed file, `train.jsonl` of `train.jsonl.gz`; `added`: behind its stem."""
    bare = path.with_suffix("") if path.suffix.lower() in (".gz", ".bz2", ".xz", ".zst", ".zstd") else path
    return bare.with_name(f"{bare.stem}{added}{bare.suffix}")


class JsonRecords(TextRecords):
    """Dataset of JSON objects. Raises InvalidInput: there is something else between them, or the file is in UTF-16."""

    def _find(self, data: numpy.ndarray, edges: numpy.ndarray) -> numpy.ndarray:
        kept = numpy.diff(edges) > _BLANK
        for line in numpy.flatnonzero(~kept):
            kept[line] = bool(bytes(data[edges[line] : edges[line + 1]]).strip())
        lines = numpy.flatnonzero(kept & ~numpy.isin(data[edges[:-1]], [*_COMMENT]))
        spans = numpy.stack([lines + 1, edges[lines], edges[lines + 1]], 1).astype(numpy.int64)
        if not len(spans):
            return spans
        start, end = spans[0, 1:].tolist()
        start += len(codecs.BOM_UTF8) * (bytes(data[start : start + 3]) == codecs.BOM_UTF8)
        first, last = bytes(data[start : min(start + _BLANK, end)]).strip(), bytes(data[max(start, end - _BLANK) : end])
        ends = last.rstrip()[-1:]
        closed = {b"{": b"}", b"[": b"]"}.get(first[:1])
        if closed and (len(spans) == 1 or ends != closed):
            return self._find_objects(data, start, first.startswith(b"["))
        return spans

    def _find_objects(self, data: numpy.ndarray, start: int, listed: bool) -> numpy.ndarray:
        """Return the spans of the objects that follow each other, in one list or without. The file is read whole."""
        text = bytes(data[start:]).decode(errors="surrogateescape")  # what is not UTF-8 is said when it is read
        size: Callable[[str], int] = len if text.isascii() else lambda part: len(part.encode(errors="surrogateescape"))
        decode = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str, strict=False).raw_decode
        spans, at = list[tuple[int, int]](), 0
        while True:
            begin = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
            between, whole = "".join(_NOTE.sub("", text[at:begin]).split()), begin == len(text)
            between = between.removeprefix("," * bool(spans))
            if between != listed * ("[" * (not spans) + "]" * whole) or not (whole or text[begin] == "{"):
                raise self._malformed(text, begin, "there must be JSON objects alone in it, as {\"question\": …}")
            if whole:
                break
            try:
                _, end = decode(text, begin)
            except json.JSONDecodeError as error:
                raise self._malformed(text, error.pos, f"not valid JSON: {error.msg}", _why_malformed(error)) from None
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
        if (hole := text.find("\0")) >= 0:
            raise InvalidInput(Diagnostic("not valid JSON: byte 0x00", self._at(index, text, hole, 1), _CUT))
        try:
            record = json.loads(text.rstrip().removesuffix(","), object_pairs_hook=_object, strict=False)
        except json.JSONDecodeError as error:
            raise InvalidInput(Diagnostic(f"not valid JSON: {error.msg}", self._at(index, text, error.pos, 1),
                                          _why_malformed(error, index == len(self) - 1))) from None
        except (ValueError, RecursionError) as error:  # too long a number, a key that stands twice; too deep
            what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]
            raise InvalidInput(Diagnostic(f"this record cannot be read: {what}", self._at(index, text))) from None
        if not isinstance(record, dict):
            raise InvalidInput(Diagnostic("each line must be a JSON object, as {\"question\": …, \"answer\": …}",
                                          self._at(index, text, 0, len(text))))
        return record


_CUT = "The file ends within a record: it is still being written, or its download was cut."


def _why_malformed(error: json.JSONDecodeError, last: bool = True) -> str:
    if error.doc[error.pos : error.pos + 1] == "'" and "delimiter" not in error.msg:
        return "Python has printed it. Write each record by  json.dumps(record)"
    ended = last and (error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string"))
    return _CUT if ended or "\0" in error.doc else ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError: a key stands twice, so that one of its values would be lost."""
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = next(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
        raise ValueError(f"key `{twice}` stands twice in it")
    return result


class CsvRecords(TextRecords):
    """Dataset of a CSV file, whose first row names the fields; all values are texts, so that 007 and NA stay what they
    are. Cells are separated by commas; by semicolons, tabs or bars, if the first line has those and no comma; in a
    .tsv file by tabs. Blanks behind separators are left out where the first row has some. Raises InvalidInput: a field
    has no name or two fields the same one."""

    def _find(self, data: numpy.ndarray, edges: numpy.ndarray) -> numpy.ndarray:
        first = re.sub(rb'"[^"]*"', b"", bytes(data[: int(edges[min(1, len(edges) - 1)])]))  # without quoted names
        order = "\t,;|" if ".tsv" in self.path.name.lower() else ",;\t|"
        self.form: dict[str, Any] = {"delimiter": next((each for each in order if each.encode() in first), ",")}
        self.form["skipinitialspace"] = f"{self.form['delimiter']} ".encode() in first
        csv.field_size_limit(sys.maxsize)
        self.spans = numpy.array([*self._rows(edges)], numpy.int64).reshape(-1, 3)
        self.names = self._cells(0) if len(self.spans) else []
        while self.names[1:] and not self.names[-1].strip():  # a spreadsheet's columns without a cell
            self.names.pop()
        if (odd := next((name for name in self.names[1:] if not name or self.names.count(name) > 1), None)) is not None:
            raise InvalidInput(Diagnostic(f"two fields are called `{odd}`" if odd else "a field has no name",
                                          self.location(0), "The first row of the file names its fields."))
        return self.spans[1:]

    def _rows(self, edges: numpy.ndarray) -> Iterator[tuple[int, int, int]]:
        """Yield the span of each row that is not blank; a quoted cell may go over several lines."""
        before = 0
        try:
            self.file.seek(0)
            with open(os.dup(self.file.fileno()), encoding="latin-1", newline=self.end) as lines:
                reader = csv.reader(lines, strict=True, **self.form)
                for row in reader:
                    if row:
                        yield before + 1, edges[before], edges[reader.line_num]
                    before = reader.line_num
        except csv.Error as error:
            raise InvalidInput(Diagnostic(f"not a CSV file: {error}", Location(str(self.path), before + 1),
                                          'A quote within a quoted cell is written twice: ""')) from None

    def _cells(self, index: int) -> list[str]:
        return next(csv.reader(io.StringIO(self._decoded(index), newline=self.end), **self.form), [])

    def _read(self, index: int) -> Record:
        cells = self._cells(index)
        if len(cells) < len(self.names) or any(map(str.strip, cells[len(self.names) :])):
            raise InvalidInput(Diagnostic(f"this row has {len(cells)} cells, and the first one names "
                                          f"{len(self.names)} fields: {', '.join(self.names)}", self.location(index),
                                          "A cell with a separator or a line end in it stands in quotes."))
        return {name: cell for name, cell in zip(self.names, cells) if name}
