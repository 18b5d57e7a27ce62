"""Datasets: records by index from JSON, CSV, Parquet or a `datasets` folder, with their checks and images.

Opening reads an index only; a record is read when it is asked for. Images are files beside the data, or bytes in it.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import io
import itertools
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol, TypeVar

from PIL import Image, UnidentifiedImageError

from distflow.config.run import Data
from distflow.config.shipped import matching
from distflow.data.forms import Form, as_conversation, columns_of, field_names, form_of, reader_of
from distflow.data.parquet import Parquet, read_as_written, readings
from distflow.data.problems import (
    CONVERSATION,
    NAME_IMAGES,
    ONLY_TEXT,
    Record,
    answer_error,
    answer_text,
    conversation_error,
    ends_with_answer,
    has_other_parts,
    holds_answer,
    is_conversation,
    is_empty,
    is_empty_question,
    question_error,
    tools_error,
)
from distflow.data.text_records import CsvRecords, JsonRecords, packed_by, without_packing
from distflow.errors import Diagnostic, InvalidInput, Location, abbreviated, did_you_mean, listing


def open_images(record: Record, field: str, folder: Path) -> list[Image.Image]:
    """Return the images in a field of a record. Each is a path below `folder`, bytes of an image file, {bytes, path} as
    `datasets` writes them, or an image that `datasets` has read. Raises `InvalidInput` if one is none of these."""
    if field not in record:
        hint = f"{did_you_mean(field, record, 'It has')}\nSay which field has them:  --set data.images=FIELD"
        raise InvalidInput(Diagnostic(f"the record has no field `{field}`, where its images should be", None, hint))
    value = record[field]
    found = value if isinstance(value, list) else [] if value is None else [value]
    return [_open(each, field, folder) for each in found]


def _open(value: Any, field: str, folder: Path) -> Image.Image:
    if isinstance(value, Image.Image):
        return value
    if isinstance(value, dict) and (value.get("bytes") or value.get("path")):
        value = value.get("bytes") or value["path"]
    if not isinstance(value, bytes | str):
        raise InvalidInput(f"field `{field}` must be the path of an image, {{bytes, path}} or a list of these, not "
                           f"{abbreviated(value)}")
    source = io.BytesIO(value) if isinstance(value, bytes) else folder / value
    try:
        image = Image.open(source)
        image.load()
    except Image.DecompressionBombError as error:
        raise OversizedImage(f"field `{field}`: an image is too large: {error}") from None
    except (OSError, UnidentifiedImageError) as error:
        shown = f"`{value}`" if isinstance(value, str) else f"{len(value)} bytes"
        raise InvalidInput(f"field `{field}`: {shown} cannot be read as an image: {error}") from None
    return image


class OversizedImage(InvalidInput):
    """An image has more pixels than may be unpacked. Its record is passed over, as one with too long a prompt."""


def check_images(records: Records, field: str, folder: Path, indices: Sequence[int]) -> None:
    for index in indices:
        try:
            open_images(records.get([index])[0], field, folder)
        except OversizedImage:
            continue
        except InvalidInput as error:
            raise InvalidInput(Diagnostic(error.mistakes[0].what, records.location(index),
                                          error.mistakes[0].hint)) from None


_R = TypeVar("_R")
_FILLED = "text that is not empty"
_SHOWN = 10
_BLOCK = 1024


class Records(Protocol):
    """Interface of a dataset: records by index, and the location of each for messages."""

    def __len__(self) -> int: ...

    def get(self, indices: Sequence[int]) -> list[Record]: ...

    def location(self, index: int) -> Location: ...


def open_records(path: Path, data: Data | None = None) -> Records:
    """Open a JSON, CSV or Parquet file, or a folder that `datasets` saved; `data` names the fields that its records are
    to have. Raises `InvalidInput` if it has no records."""
    files = [path] if path.exists() else matching(path) or [path]

    def opened() -> Records:
        parts = [_open_file(file, len(files)) for file in files]
        for part in parts:
            if data and isinstance(part, Parquet):
                part.read_only(columns_of(data, part.names))
        records = parts[0] if len(parts) == 1 else JoinedRecords(parts)
        if not len(records):
            raise InvalidInput(Diagnostic("there is no record in it", Location(str(path))))
        return NamedRecords(records, data) if data else records

    return _once(files, data.model_dump_json() if data else "", opened)


_opened: dict[tuple[Any, ...], Any] = {}


def _once(files: Sequence[Path], use: object, make: Callable[[], _R]) -> _R:
    """Return what files were opened as for this use, and open them if they have changed since. Validation, preflight
    and the loaders of forked workers share it, so that a file is scanned, filtered and unpacked once."""
    if not all(file.is_file() for file in files):  # a folder, or none
        return make()
    states = [file.stat() for file in files]
    key = *files, *((state.st_ino, state.st_size, state.st_mtime_ns) for state in states), use
    if key not in _opened:
        _opened[key] = make()
    return _opened[key]


def _open_file(path: Path, files: int) -> Records:
    kinds: dict[str, Callable[[Path], Records]] = {
        **dict.fromkeys((".jsonl", ".ndjson", ".json"), JsonRecords), ".csv": CsvRecords, ".tsv": CsvRecords,
        ".parquet": functools.partial(Parquet, files=files)}
    try:
        if kind := SavedFolder if path.is_dir() else kinds.get(without_packing(path).suffix.lower()):
            return kind(path)
    except OSError as error:
        raise InvalidInput(Diagnostic(f"it cannot be read: {error.strerror or error}", Location(str(path)))) from None
    hint = "Known are .jsonl, .json, .csv, .parquet and folders that `datasets` saved."
    if path.suffix == ".arrow":
        program = f"import datasets; datasets.Dataset.from_file({str(path)!r}).to_parquet(" \
                  f"{str(path.with_suffix('.parquet'))!r})"
        hint += f"\nInstead:  python -c {shlex.quote(program)}"
    raise InvalidInput(Diagnostic(f"unknown kind of data: `{path.suffix or path.name}`", Location(str(path)), hint))


class NamedRecords:
    """Records with the fields that the run file names at their top level: see `distflow.data.forms`."""

    def __init__(self, records: Records, data: Data):
        self.records, self.location, self.data, self.read = records, records.location, data, reader_of(data)

    def __len__(self) -> int:
        return len(self.records)

    def get(self, indices: Sequence[int]) -> list[Record]:
        return [self._read(index, record) for index, record in zip(indices, self.records.get(indices))]

    def _read(self, index: int, record: Record) -> Record:
        try:
            return self.read(record)
        except InvalidInput as error:
            raise InvalidInput(dataclasses.replace(error.mistakes[0], where=self.location(index))) from None


def open_training_sets(data: Data, path_of: Callable[[str], Path | None]) -> dict[str, Records]:
    """Open what a run trains on; `path_of` finds a set by its name in the run file. Raises `InvalidInput`."""
    paths = {name: (path_of(name) or Path(name)).absolute() for name in data.train}
    found: dict[str, Records] = {name: open_records(path, data) for name, path in paths.items()}
    if len(found) == 1:
        return found
    root = Path(os.path.commonpath([path.parent for path in paths.values()]))
    bare = {name: without_packing(path).with_suffix("") for name, path in paths.items()}
    alike = len({path.name for path in bare.values()}) < len(bare)
    return {name: LabelledRecords(records, str(bare[name].relative_to(root)) if alike else bare[name].name)
            for name, records in found.items()}


def read_blocks(records: Records) -> Iterator[tuple[int, Record]]:
    """Yield each record with its index, read a block at a time."""
    for start in range(0, len(records), _BLOCK):
        indices = range(start, min(start + _BLOCK, len(records)))
        yield from zip(indices, records.get(indices))


def form_in_use(records: Records) -> Form | None:
    """Return the form by which the first record of a training or validation set is read, if the run file names none."""
    while not isinstance(records, NamedRecords):
        if not isinstance(records, LabelledRecords):
            return None
        records = records.records
    return form_of(records.records.get([0])[0], records.data)


class JoinedRecords:
    """Records of several files or data sets, one behind the other."""

    def __init__(self, parts: Sequence[Records]):
        self.parts = parts
        self.starts = [0, *itertools.accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self.starts[-1]

    def get(self, indices: Sequence[int]) -> list[Record]:
        places = itertools.groupby(map(self.place, indices), lambda place: place[0])
        return [record for part, group in places for record in self.parts[part].get([at for _, at in group])]

    def location(self, index: int) -> Location:
        part, at = self.place(index)
        return self.parts[part].location(at)

    def place(self, index: int) -> tuple[int, int]:
        """Return which part has a record, and the record's index there."""
        part = bisect.bisect_right(self.starts, index) - 1
        return part, index - self.starts[part]


class LabelledRecords:
    """Records of one of several data sets: each has the set's name as `source`, unless it has such a field itself."""

    def __init__(self, records: Records, name: str):
        self.records, self.location, self.name = records, records.location, name

    def __len__(self) -> int:
        return len(self.records)

    def get(self, indices: Sequence[int]) -> list[Record]:
        return [{"source": self.name, **record} for record in self.records.get(indices)]


@dataclass(frozen=True)
class RequiredFields:
    """Fields that each record must have; of `texts`, text or numbers, as the answer. `tools` may be missing."""

    question: str
    texts: Sequence[str] = ()
    tools: str | None = None
    imitated: Set[str] = frozenset()
    """Those of `texts` that become tokens, so that a list or a mapping is none."""
    images: bool = True
    """Whether messages may have parts that are no text."""
    answer: str = ""

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.question, *self.texts)))

    def empty(self, record: Record) -> str:
        """Return the first field that is empty; "" if none is."""
        return next((name for name in self.all if name in record and self.is_empty_field(name, record[name])), "")

    def missing(self, record: Record) -> str:
        """Return the first field that the record does not have; "" if it has all."""
        return next((name for name in self.all if name not in record), "")

    def is_empty_field(self, name: str, value: Any) -> bool:
        return is_empty_question(value) if name == self.question else is_empty(value)


def fields_of(data: Data, own: Iterable[str], answers: bool = True, imitated: Set[str] = frozenset()) -> RequiredFields:
    """Return the fields that a run needs of each record: the question, the answer if it is read, and `own`."""
    return RequiredFields(data.question, (*([data.answer] if answers else ()), *own), data.tools, imitated,
                          data.images is not None, data.answer)


def check_records(records: Records, fields: RequiredFields, nth: int = 1,
                  rewarded: dict[str, list[str]] | None = None) -> list[int]:
    """Require of every `nth` record that its fields can be used; return the indices of those with an empty field.
    One field wrong in many records is one mistake. `rewarded`: by field, the values for
    which there is a reward; others are mistakes."""
    mistakes: list[Diagnostic] = []
    known: set[tuple[str, str]] = set()
    empty: list[int] = []
    read = range(0, len(records), nth)
    for start in range(0, len(read), _BLOCK):
        indices = read[start : start + _BLOCK]
        for index, record in _read_block(records, indices, mistakes):
            if fields.empty(record):
                empty.append(index)
                continue
            mistakes += _check_record(records, index, record, fields, known)
            mistakes += _check_rewarded(records, index, record, rewarded or {}, known)
        if len(mistakes) >= _SHOWN:
            last = dataclasses.replace(mistakes[_SHOWN - 1], hint="There may be more behind it.")
            raise InvalidInput([*mistakes[: _SHOWN - 1], last])
    if empty and not mistakes and len(empty) == len(read):
        mistakes += _check_record(records, empty[0], records.get(empty[:1])[0], fields, known)
    if mistakes:
        raise InvalidInput(mistakes)
    return empty


def _read_block(records: Records, indices: Sequence[int], mistakes: list[Diagnostic]) -> list[tuple[int, Record]]:
    """Return the readable records among `indices`; a block with an unreadable one is read again, one by one."""
    try:
        return list(zip(indices, records.get(indices)))
    except InvalidInput as error:
        if len(indices) == 1:
            told = {mistake.hint for mistake in mistakes} - {""}  # what mends the whole file
            mistakes += [mistake for mistake in error.mistakes if mistake.hint not in told]
            return []
    return [pair for index in indices for pair in _read_block(records, [index], mistakes)]


def _check_record(records: Records, index: int, record: Record, fields: RequiredFields,
                  known: set[tuple[str, str]]) -> list[Diagnostic]:
    mistakes = []
    for name in (*fields.all, *([fields.tools] if fields.tools in record else ())):
        kind = _requirement(record, name, fields)
        if not kind or (name, kind) in known:
            continue
        known.add((name, kind))
        what = f"the record has no field `{name}`" if name not in record else \
            f"field `{name}` must be {kind}, not {abbreviated(record[name])}"
        hint = _unwrapped(records, record) or (_way_out(name, record[name], kind, fields) if name in record else
                                               _remedy(name, _as_written(records, index), record, fields))
        mistakes.append(Diagnostic(what, records.location(index), hint))
    return mistakes


def _way_out(name: str, value: Any, kind: str, fields: RequiredFields) -> str:
    """Return what to write where a field has a value that cannot be used."""
    if kind == ONLY_TEXT:
        return NAME_IMAGES
    key = "question" if name == fields.question else "answer" if name == next(iter(fields.texts), "") else "columns"
    inner = f"{name}.0" if isinstance(value, list) and value and not isinstance(value[0], dict) else \
        next((each for each in field_names({name: value}) if each != name), "")
    chosen = f"[{inner}]" if key == "columns" else inner
    return f"To take what is in it:  --set data.{key}={chosen}" if inner else ""


_SYNONYMS = {"question": ("question", "prompt", "problem", "query", "instruction", "input", "messages",
                          "conversation*", "*question", "text"),
             "answer": ("answer", "final_answer", "*answer", "answerkey", "ground_truth", "solution", "response",
                        "completion", "target", "output", "label", "chosen")}
"""Patterns of names under which data sets have a question and an answer, in small letters, likeliest first."""


_ROLE = {"role", "from", "speaker"}
"""Names under which messages have who speaks."""


def _unwrapped(records: Records, record: Record) -> str:
    """Return the command that writes the records of a file of one, in a list of which they are; "" if there is none."""
    path = Path(records.location(0).file)
    held = next((name for name, value in record.items() if isinstance(value, list) and value
                 and isinstance(value[0], dict) and not _ROLE & value[0].keys()
                 and not is_conversation(as_conversation(value))), "")
    split = {"columns", "data"} <= record.keys() <= {"columns", "data", "index"}
    if len(records) > 1 or not path.is_file() or not (held or split or _is_of_columns(record)):
        return ""
    if program := packed_by(path):
        packed, bare = (shlex.quote(str(each)) for each in (path, without_packing(path, "-unpacked")))
        return f"It holds its records in one. Unpack it:  {program} -dc {packed} > {bare}"
    rows = f"d[{held!r}]" if held else "[dict(zip(d['columns'], row)) for row in d['data']]" if split else \
        "[dict(zip(d, row)) for row in zip(*([*c.values()] if isinstance(c, dict) else c for c in d.values()))]"
    other = path.with_name(f"{path.stem}-{held or 'rows'}.json")
    program = f"import json; d = json.load(open({str(path)!r}, encoding='utf-8')); json.dump({rows}, open(" \
              f"{str(other)!r}, 'w'))"
    taken = f"the records in `{held}`" if held else "its columns as records"
    return f"To take {taken}:  python -c {shlex.quote(program)}"


def _is_of_columns(record: Record) -> bool:
    """Return whether a record is a whole table, as pandas writes one: a list, or a mapping by row, of each column. All
    mappings must have their rows in one order."""
    columns = [value.values() if isinstance(value, dict) else value for value in record.values()]
    return len(columns) > 1 and all(isinstance(value, list | dict) and value for value in record.values()) and \
        len({*map(len, columns)}) == 1 and \
        len({(*value,) for value in record.values() if isinstance(value, dict)}) < 2 and \
        not any(isinstance(cell, dict) and _ROLE & cell.keys() for column in columns for cell in column)


def _as_written(records: Any, index: int) -> Record:
    """Return a record with all fields that its file has, and no other."""
    while not isinstance(records, Parquet | JoinedRecords) and hasattr(records, "records"):
        records = records.records
    if isinstance(records, JoinedRecords):
        part, at = records.place(index)
        return _as_written(records.parts[part], at)
    return (Parquet(records.path) if isinstance(records, Parquet) else records).get([index])[0]


def _remedy(name: str, written: Record, record: Record, fields: RequiredFields) -> str:
    """Return what to write where a record lacks a field: for question and answer the fields that are probably meant.
    `written`: the record as its file has it."""
    taken = {"question": fields.question, "answer": next(iter(fields.texts), fields.question)}
    if name not in taken.values():
        return f"{did_you_mean(name, written, 'It has')}\n`data.columns` or the validation asks for `{name}`: name a " \
               "field that the records have, or add it to them."
    listed = [*field_names(written)]
    if name == taken["answer"] and (whole := next((each for each in listed if holds_answer(each) and
                                                   is_conversation(record.get(each))), "")):
        return f"{listing(listed, 'It has')}\nTo learn the messages:  --set data.question={whole}"
    asked = record.get(fields.question)
    role = asked[-1].get("role") if isinstance(asked, list) and asked and isinstance(asked[-1], dict) else None
    answered = isinstance(asked, list) and any(ends_with_answer([each]) for each in asked)
    if name == taken["answer"] and isinstance(role, str) and role != "assistant" and (answered or role != "user"):
        return f"Its messages end with the role {abbreviated(role)}. An answer has the role `assistant`."
    free = [each for each in listed if each not in taken.values()]
    meant = {key: next((each for pattern in _SYNONYMS[key] for each in free
                        if fnmatchcase(each.lower().rpartition(".")[2], pattern)), "FIELD")
             for key, field in taken.items() if field not in record}
    if is_conversation(as_conversation(record.get(meant.get("question", "")))):
        meant.pop("answer", None)  # it is in the conversation
    settings = " ".join(f"--set data.{key}={each}" for key, each in meant.items())
    guess = all(meant.get(key) == "FIELD" for key, field in taken.items() if field == name)
    return f"{did_you_mean(name, listed, 'It has') if guess else listing(listed, 'It has')}\n" \
           f"Say which field{'s' * (len(meant) > 1)} to take:  {settings}"


def _check_rewarded(records: Records, index: int, record: Record, rewarded: dict[str, list[str]],
                    known: set[tuple[str, str]]) -> Iterator[Diagnostic]:
    for name, values in rewarded.items():
        answer: Any = record.get(name)
        value = "" if is_empty(answer) or answer_error(answer) else answer_text(answer)
        if value and value not in values and (name, value) not in known:
            known.add((name, value))
            yield Diagnostic(f"field `{name}` is {abbreviated(value)}, for which no reward is given",
                             records.location(index), did_you_mean(value, values, "There are rewards for"))


def _requirement(record: Record, name: str, fields: RequiredFields) -> str:
    asked = record.get(fields.question)
    if name not in record:
        return "there"
    if name == fields.question and name in fields.texts and not is_conversation(asked):
        return CONVERSATION
    if name == fields.tools:
        return tools_error(record[name])
    if fields.is_empty_field(name, record[name]):
        return _FILLED
    value = record[name]
    if name != fields.question and (wrong := conversation_error(value, asked, name == fields.answer,
                                                                    name in fields.imitated)):
        return wrong
    if not fields.images and has_other_parts(value):
        return ONLY_TEXT
    return question_error(value) if name == fields.question else answer_error(value, name in fields.imitated)


class SavedFolder:
    """Dataset in a folder written by `datasets.Dataset.save_to_disk`; memory-mapped."""

    def __init__(self, path: Path):
        import datasets  # takes seconds to import; only users of this format pay for it

        self.path = path
        try:
            loaded: Any = datasets.load_from_disk(str(path))
        except (FileNotFoundError, ValueError) as error:
            kinds = [f"{depth}.{kind}" for depth in ("*", "*/*") for kind in ("parquet", "jsonl")]
            file = min(itertools.chain.from_iterable(map(path.glob, kinds)), default=None,
                       key=lambda file: ("train" not in file.name, file))
            hint = f"Name its files, such as  data: {{train: {file.parent}/{file.stem.partition('-')[0]}*" \
                   f"{file.suffix}}}" if file else ""
            raise InvalidInput(Diagnostic(f"not a folder that `datasets` saved: {error}", Location(str(path)),
                                          hint)) from None
        one = isinstance(loaded, dict) and len(loaded) == 1
        self.data: Any = next(iter(loaded.values())) if one else loaded
        if not isinstance(self.data, datasets.Dataset):
            hint = f"Name one:  {path}/{next(iter(self.data))}"
            raise InvalidInput(Diagnostic(f"it holds several splits: {', '.join(self.data)}", Location(str(path)),
                                          hint))
        self.readings = readings(self.data.features.arrow_schema)

    def __len__(self) -> int:
        return len(self.data)

    def location(self, index: int) -> Location:
        return Location(f"{self.path}: row {index + 1}")

    def get(self, indices: Sequence[int]) -> list[Record]:
        return [read_as_written(self.data[int(index)], self.readings) for index in indices]
