"""Opening JSON lines finds the records, and takes no memory that grows with their length."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from distflow.data import dataset
from distflow.data.dataset import JsonLines

LINES = ["{\"n\": 1}", "", json.dumps({"n": 2, "long": "x" * 90}), "   ", "{\"n\": 3}", "{\"n\": 4}"]


@pytest.mark.parametrize("scanned", [1, 7, 1000])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_records_and_their_lines_are_found_a_piece_at_a_time(tmp_path: Path, monkeypatch, scanned, end):
    monkeypatch.setattr(dataset, "_SCANNED", scanned)
    file = tmp_path / "some.jsonl"
    file.write_bytes(("\n".join(LINES) + end).encode())
    records = JsonLines(file)
    assert [record["n"] for record in records.get(range(len(records)))] == [1, 2, 3, 4]
    assert [records.location(index).line for index in range(4)] == [1, 3, 5, 6]


def test_a_long_file_is_not_read_into_memory(tmp_path: Path):
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
