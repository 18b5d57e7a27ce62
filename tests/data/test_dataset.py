"""Opening JSON lines finds the records, and takes no memory that grows with their length."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from distflow.config.run import Data
from distflow.data import dataset
from distflow.data.dataset import JsonLines, RequiredFields, check_records, open_records
from distflow.errors import InvalidInput

LINES = ["{\"n\": 1}", "", json.dumps({"n": 2, "long": "x" * 90}), "   ", "{\"n\": 3}", "{\"n\": 4}"]


@pytest.mark.parametrize("scanned", [1, 7, 1000])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_records_and_their_lines_are_found_a_piece_at_a_time(tmp_path, monkeypatch, scanned, end):
    monkeypatch.setattr(dataset, "_SCANNED", scanned)
    file = tmp_path / "some.jsonl"
    file.write_bytes(("\n".join(LINES) + end).encode())
    records = JsonLines(file)
    assert [record["n"] for record in records.get(range(len(records)))] == [1, 2, 3, 4]
    assert [records.location(index).line for index in range(4)] == [1, 3, 5, 6]


def test_a_long_file_is_not_read_into_memory(tmp_path):
    file, size = tmp_path / "long.jsonl", 2**28
    with file.open("wb") as opened:
        opened.write(json.dumps({"n": 1}).encode() + b"\n")
        opened.truncate(size)  # a hole, which takes no room on the disk
        opened.seek(size)
        opened.write(b"\n" + json.dumps({"n": 2}).encode())
    tracemalloc.start()
    records = JsonLines(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < size / 2
    assert records.get([0, 2]) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize(("line", "said"), [
    ('{"question": "1 + 1?", "answer": ' + "9" * 20_000 + "}", "odd.jsonl:1: this record cannot be read: Exceeds the"),
    ('{"question": ' + "[" * 100_000, "odd.jsonl:1: this record cannot be read: it is nested too deeply."),
    ('{"question": ' + "[" * 100_000 + "]" * 100_000 + "}", "it is nested too deeply."),
    ('{"question": "1?", "answer": "1", "question": "2?"}', "this record cannot be read: key `question` stands twice"),
    ('{"question": "1?", "answer": NaN}', "field `answer` must be a finite number, not nan."),
    ('{"question": "1?", "answer": 1e400}', "field `answer` must be a finite number, not inf."),
    ('{"question": "1?", "answer": [Infinity]}', "field `answer` must be text, a number, or a list or a mapping"),
    ("{'question': '1?', 'answer': '1'}", "Python has printed it. Write each record by  json.dumps(record)"),
    ('{"question": "1?", "answer": "1', "The file ends within a record"),
    ('{"question": "1?", "answer": "' + "y" * 200_000, "The file ends within a record"),
    ("\0" * 200_000, "not valid JSON"),
])
def test_an_odd_line_is_refused_in_a_few_lines(tmp_path, line, said):
    (tmp_path / "odd.jsonl").write_text(line)
    with pytest.raises(InvalidInput) as caught:
        check_records(JsonLines(tmp_path / "odd.jsonl"), RequiredFields("question", ["answer"]))
    message = str(caught.value)
    assert said in message
    assert len(message) < 1000


@pytest.mark.parametrize("value", ["y" * 200_000, ["y" * 200_000], {"y" * 200_000: 1}, list(range(100_000))])
def test_a_long_wrong_value_takes_a_line(tmp_path, value):
    (tmp_path / "long.jsonl").write_text(json.dumps({"question": {"asked": value}, "answer": value, "x" * 9000: 1}))
    with pytest.raises(InvalidInput) as caught:
        check_records(JsonLines(tmp_path / "long.jsonl"), RequiredFields("question", ["answer", "solution"],
                                                                       imitated={"answer"}))
    assert max(map(len, str(caught.value).splitlines())) < 1000


def test_records_of_windows_are_read(tmp_path):
    (tmp_path / "bom.jsonl").write_bytes(b'\xef\xbb\xbf{"n": 1}\r\n\r\n{"n": 2}\r\n')
    assert JsonLines(tmp_path / "bom.jsonl").get([0, 1]) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_open_records_opens_a_file_once_until_it_changes(tmp_path, kind):
    path, data = tmp_path / f"records.{kind}", Data(train="")

    def write(count: int) -> None:
        rows = [{"question": f"{number}?", "answer": str(number)} for number in range(count)]
        if kind == "parquet":
            parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(6)
    records = open_records(path, data)
    assert records.get([0])[0]["answer"] == "0"
    assert open_records(path, data) is records
    assert open_records(path, Data(train="", question="answer")) is not records
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:  # as a worker that its supervisor forks
        assert [row["answer"] for row in pool.submit(_read_all, path, data).result()] == [*map(str, range(6))]
    write(3)
    assert len(open_records(path, data)) == 3


def _read_all(path: Path, data: Data) -> list[dict]:
    records = open_records(path, data)
    return records.get(range(len(records)))


def test_a_csv_file_becomes_lines_by_the_command_that_is_named(tmp_path):
    (tmp_path / "a.csv").write_text('question,answer\n"a, ""b""?",007\nNamibia?,NA\n')
    with pytest.raises(InvalidInput) as caught:
        open_records(tmp_path / "a.csv")
    command = str(caught.value).partition("Instead:  python")[2]
    subprocess.run(f"{sys.executable}{command}", shell=True, check=True)
    assert open_records(tmp_path / "a.jsonl").get([0, 1]) == [
        {"question": 'a, "b"?', "answer": "007"}, {"question": "Namibia?", "answer": "NA"}]
