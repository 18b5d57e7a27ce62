"""Data files are opened without being read whole, and say what in them is no record."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import multiprocessing
import shlex
import shutil
import subprocess
import sys
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from distflow.config.load import load
from distflow.config.run import Data
from distflow.data import text_records
from distflow.data.dataset import RequiredFields, check_records, open_records, open_training_sets
from distflow.data.text_records import JsonRecords
from distflow.errors import InvalidInput

LINES = ["{\"n\": 1}", "", json.dumps({"n": 2, "long": "x" * 90}), "   ", "{\"n\": 3}", "{\"n\": 4}"]


@pytest.mark.parametrize("scanned", [1, 7, 1000])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_records_and_their_lines_are_found_a_piece_at_a_time(tmp_path: Path, monkeypatch, scanned, end):
    monkeypatch.setattr(text_records, "_SCANNED", scanned)
    file = tmp_path / "some.jsonl"
    file.write_bytes(("\n".join(LINES) + end).encode())
    records = JsonRecords(file)
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
    records = JsonRecords(file)
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
    ('{"question": "1\0\0?", "answer": "1"}', "The file ends within a record"),
    ("{'question': '1?', 'answer': '1'}", "Python has printed it. Write each record by  json.dumps(record)"),
    ('{"question": "1?", "answer": "1', "The file ends within a record"),
    ('{"question": "1?", "answer": "' + "y" * 200_000, "The file ends within a record"),
    ("\0" * 200_000, "not valid JSON"),
])
def test_an_odd_line_is_refused_in_a_few_lines(tmp_path, line, said):
    (tmp_path / "odd.jsonl").write_text(line)
    with pytest.raises(InvalidInput) as caught:
        check_records(JsonRecords(tmp_path / "odd.jsonl"), RequiredFields("question", ["answer"]))
    message = str(caught.value)
    assert said in message
    assert len(message) < 1000


@pytest.mark.parametrize("value", ["y" * 200_000, ["y" * 200_000], {"y" * 200_000: 1}, list(range(100_000))])
def test_a_long_wrong_value_takes_a_line(tmp_path, value):
    (tmp_path / "long.jsonl").write_text(json.dumps({"question": {"asked": value}, "answer": value, "x" * 9000: 1}))
    with pytest.raises(InvalidInput) as caught:
        check_records(JsonRecords(tmp_path / "long.jsonl"), RequiredFields("question", ["answer", "solution"],
                                                                         imitated={"answer"}))
    assert max(map(len, str(caught.value).splitlines())) < 1000


def test_records_of_windows_are_read(tmp_path):
    (tmp_path / "bom.jsonl").write_bytes(b'\xef\xbb\xbf{"n": 1}\r\n\r\n{"n": 2}\r\n')
    assert JsonRecords(tmp_path / "bom.jsonl").get([0, 1]) == [{"n": 1}, {"n": 2}]


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


def _read_all(path: Path, data: Data | None = None) -> list[dict]:
    records = open_records(path, data)
    return records.get(range(len(records)))


Q, A = {"question": "1 + 1?", "answer": "2"}, {"question": "{[\"", "answer": {"of": ["a", {"b": "]}"}]}}


@pytest.mark.parametrize(("text", "records"), [
    (json.dumps([Q, A, Q]), [Q, A, Q]),
    (json.dumps([Q, A, Q], indent=2), [Q, A, Q]),
    ("\ufeff[\r\n" + json.dumps(A) + ",\r\n" + json.dumps(Q) + "\r\n]\r\n", [A, Q]),
    (json.dumps(A, indent=2) + "\n" + json.dumps(Q, indent=2), [A, Q]),
    ('{"n": [\n{"m": 1},\n{"m": 2}]}\n', [{"n": [{"m": 1}, {"m": 2}]}]),
    ('{"n": 1,\n"m": 2}\n{"n": 3}', [{"n": 1, "m": 2}, {"n": 3}]),
    ('{"n": 1}{"n": 2} {"n": "}{"}', [{"n": 1}, {"n": 2}, {"n": "}{"}]),  # written by json.dump, without line ends
    ('{"n": "a\tb"}\n{"n": 2}', [{"n": "a\tb"}, {"n": 2}]), ('[{"n": "a\tb"}]', [{"n": "a\tb"}]),
    ('[{"n": 1},]', [{"n": 1}]), ('[{"n": 1}\n{"n": 2}\n]', [{"n": 1}, {"n": 2}]),
    ('{"n": 1},\n{"n": 2},\n', [{"n": 1}, {"n": 2}]), ('{"n": 1},\n{"n": 2}\n', [{"n": 1}, {"n": 2}]),
    ('// mine\n# ours\n{"n": 1}\n//\n{"n": "//"}', [{"n": 1}, {"n": "//"}]), ('# mine\n[{"n": 1}]', [{"n": 1}]),
    ('{"n": 1},\n# ours\n{"n": 2},\n', [{"n": 1}, {"n": 2}]), ('[\n  // ours\n{"n": 1}\n]', [{"n": 1}]),
    ('{"n": 1}\r{"n": 2}\r', [{"n": 1}, {"n": 2}]), ("[]", []), ("[\n]\n", []), ('[{}, {"n": 1}]', [{}, {"n": 1}]),
    (json.dumps([{"n": "\\\\"}, {"n": '\\"'}, {"n": "é\u2028"}], ensure_ascii=False),
     [{"n": "\\\\"}, {"n": '\\"'}, {"n": "é\u2028"}])])
def test_json_records_in_one_list_or_over_several_lines_are_read(tmp_path, text, records):
    (tmp_path / "all.json").write_text(text, newline="")
    found = JsonRecords(tmp_path / "all.json")
    assert found.get(range(len(found))) == records


@pytest.mark.parametrize(("text", "said"), [
    ('[{"n": 1}, 2, {"n": 3}]', "all.json:1: there must be JSON objects alone in it"),
    ('[,{"n": 1}]', "all.json:1: there must be JSON objects alone in it"),
    ('[{"n": 1},,{"n": 3}]', "there must be JSON objects alone in it"),
    ('["a", "b"]', "there must be JSON objects alone in it"), ("[1, 2]", "there must be JSON objects alone in it"),
    ('[{"n": 1}] {"n": 2}', "there must be JSON objects alone in it"),
    ('{\n"n": 1}\nx', "all.json:3: there must be JSON objects alone in it"),
    ('[\n{"n": 1},\n{"n": [1', "The file ends within a record"),
    ('[\n{"n": 1},\n{"n": "1', "The file ends within a record"),
    ('[\n{"n": 1},\n{"n": 1}', "there must be JSON objects alone in it"),
    ('[\n{"n": 1},\n{"n": 2,\n "m": x}]', 'all.json:4: not valid JSON: Expecting value.\n\n    4 |  "m": x}'),
    ("{\n" + '"n": ' + "[" * 100_000, "it is nested too deeply"),
])
def test_json_records_name_the_line_of_what_is_none(tmp_path, text, said):
    (tmp_path / "all.json").write_text(text)
    with pytest.raises(InvalidInput) as caught:
        _read_all(tmp_path / "all.json")
    assert said in str(caught.value)


@pytest.mark.parametrize(("text", "records"), [
    ('question,answer\n"a, ""b""?",007\n\nNamibia?,NA\n', [{"question": 'a, "b"?', "answer": "007"},
                                                         {"question": "Namibia?", "answer": "NA"}]),
    ('\ufeffquestion;answer\r\n"1,5\r\n+ 1?";2,5\r\n', [{"question": "1,5\r\n+ 1?", "answer": "2,5"}]),
    ("question\tanswer\nä\u2028\x85?\t", [{"question": "ä\u2028\x85?", "answer": ""}]),
    (",question,answer\n0,1 + 1?,2\n", [{"question": "1 + 1?", "answer": "2"}]),  # with pandas' index
    ("question,answer\n" + "y" * 200_000 + ",1", [{"question": "y" * 200_000, "answer": "1"}]),
    ('question,answer\r1?,2\r"2\r?",3\r', [{"question": "1?", "answer": "2"}, {"question": "2\r?", "answer": "3"}]),
    ("question|answer\n1, 2?|3\n", [{"question": "1, 2?", "answer": "3"}]),
    ('question, answer\n"1, 2?", "3"\n', [{"question": "1, 2?", "answer": "3"}]),
    ("question,answer,, \n1?,2,,\n3?,4,,\n", [{"question": "1?", "answer": "2"}, {"question": "3?", "answer": "4"}]),
    ('"a, b",c\n x,y\n', [{"a, b": " x", "c": "y"}]), ('"a,b";c\n1;2\n', [{"a,b": "1", "c": "2"}])])
def test_csv_records_are_read_as_texts(tmp_path, text, records):
    (tmp_path / "all.csv").write_text(text, newline="")
    assert _read_all(tmp_path / "all.csv") == records


def test_csv_records_of_a_tsv_file_are_separated_by_tabs(tmp_path):
    (tmp_path / "all.tsv").write_text("question, as it is\tanswer\n1, 2\t3\n")
    assert _read_all(tmp_path / "all.tsv") == [{"question, as it is": "1, 2", "answer": "3"}]


@pytest.mark.parametrize(("text", "said"), [
    ("question,answer\n1 + 1?,2\n1,5 + 1?,2\n", "all.csv:3: this row has 3 cells, and the first one names 2 fields"),
    ('question,answer\n1?,1\n"2?,2\n3?,3\n', "all.csv:3: not a CSV file: unexpected end of data."),
    ("question,answer,answer\n", "all.csv:1: two fields are called `answer`."),
    ("question,,answer\n", "all.csv:1: a field has no name."), ("question,answer\n", "there is no record in it")])
def test_csv_records_name_the_line_of_what_is_none(tmp_path, text, said):
    (tmp_path / "all.csv").write_text(text)
    with pytest.raises(InvalidInput) as caught:
        _read_all(tmp_path / "all.csv")
    assert said in str(caught.value)


def test_json_records_name_the_byte_that_is_no_text(tmp_path):
    (tmp_path / "all.json").write_bytes('[{"n": "é"},\n {"n": "€"},\n{"n": "'.encode() + b'\xe9"}, {"n": 4}]')
    found = JsonRecords(tmp_path / "all.json")
    assert found.get([0, 1, 3]) == [{"n": "é"}, {"n": "€"}, {"n": 4}]
    with pytest.raises(InvalidInput, match="all.json:3: not UTF-8: byte 0xe9"):
        found.get([2])


def test_a_file_that_datasets_caches_is_converted_by_the_command_that_is_named(tmp_path):
    table = pyarrow.Table.from_pylist([{"question": "1 + 1?", "answer": "2"}])
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
        stream.write_table(table)
    with pytest.raises(InvalidInput) as caught:
        open_records(tmp_path / "a.arrow")
    command = str(caught.value).partition("Instead:  python")[2]
    subprocess.run(f"{sys.executable}{command}", shell=True, check=True)
    assert open_records(tmp_path / "a.parquet").get([0]) == table.to_pylist()


@pytest.mark.parametrize(("whole", "said"), [
    ({"version": 1, "data": [Q, Q]}, "the records in `data`"),
    ({"question": ["1 + 1?"] * 2, "answer": ["2"] * 2}, "its columns as records"),
    ({"question": {"0": "1 + 1?", "3": "1 + 1?"}, "answer": {"0": "2", "3": "2"}}, "its columns as records"),
    ({"columns": ["question", "answer"], "index": [0, 1], "data": [["1 + 1?", "2"]] * 2}, "its columns as records"),
    ({"columns": ["answer", "question"], "data": [["2", "1 + 1?"]] * 2}, "its columns as records")])
def test_records_within_one_are_taken_by_the_command_that_is_named(tmp_path, whole, said):
    """As pandas writes a table by `to_json`: the line to take `question.0` would have taken one record of it."""
    (tmp_path / "all.json").write_text(json.dumps(whole, indent=2))
    with pytest.raises(InvalidInput, match=f"To take {said}:") as caught:
        check_records(open_records(tmp_path / "all.json"), RequiredFields("question", ["answer"]))
    command = next(line for line in str(caught.value).splitlines() if line.startswith("To take")).split("python ")[1]
    subprocess.run([sys.executable, *shlex.split(command)], check=True)
    (written,) = tmp_path.glob("all-*.json")
    assert _read_all(written) == [Q, Q]


def test_columns_with_rows_in_other_orders_get_no_command_that_mixes_them(tmp_path):
    (tmp_path / "all.json").write_text('{"question": {"0": "a", "1": "b"}, "answer": {"1": "B", "0": "A"}}')
    with pytest.raises(InvalidInput) as caught:
        check_records(open_records(tmp_path / "all.json"), RequiredFields("question", ["answer"]))
    assert "its columns as records" not in str(caught.value)


@pytest.mark.parametrize(("suffix", "pack"), [
    (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress),
    (".zst", lambda data: pyarrow.compress(data, "zstd", asbytes=True))])
def test_a_packed_file_is_read(tmp_path, suffix, pack):
    """OpenRLHF#751, datasets#7741: data sets are often files as `train.jsonl.gz`."""
    lines, rows = b"".join(json.dumps(row).encode() + b"\n" for row in (Q, A, Q)), b"question,answer\n1 + 1?,2\n"
    (tmp_path / f"a.jsonl{suffix}").write_bytes(pack(lines))
    (tmp_path / "plain.jsonl").write_bytes(pack(lines))
    (tmp_path / f"a.csv{suffix}").write_bytes(pack(rows))
    for name in (f"a.jsonl{suffix}", "plain.jsonl"):
        assert _read_all(tmp_path / name) == [Q, A, Q]
        assert open_records(tmp_path / name).location(1).line == 2
    assert _read_all(tmp_path / f"a.csv{suffix}") == [Q]
    (tmp_path / f"b.jsonl{suffix}").write_bytes(pack(lines * 99)[:-9])
    with pytest.raises(InvalidInput, match=f"b.jsonl{suffix}: it cannot be unpacked"):
        open_records(tmp_path / f"b.jsonl{suffix}")
    files = {name: tmp_path / name for name in (f"a.jsonl{suffix}", "plain.jsonl")}
    sets = open_training_sets(Data(train=dict.fromkeys(files, 1.0)), files.get)
    assert [records.get([0])[0]["source"] for records in sets.values()] == ["a", "plain"]


@pytest.mark.skipif(not shutil.which("iconv"), reason="iconv is not installed")
def test_the_commands_that_mend_a_packed_file_unpack_it(tmp_path):
    for name, content, said in (("latin.jsonl.gz", b'{"question": "\xe9", "answer": "1"}\n', "If the file is ISO-8859"),
                                ("all.json.gz", json.dumps({"data": [Q, Q]}).encode(), "It holds its records in one")):
        (tmp_path / name).write_bytes(gzip.compress(content))
        with pytest.raises(InvalidInput, match=said) as caught:
            check_records(open_records(tmp_path / name), RequiredFields("question", ["answer"]))
        subprocess.run(next(line for line in str(caught.value).splitlines() if said in line).partition(":  ")[2],
                       shell=True, check=True)
    assert _read_all(tmp_path / "latin-utf8.jsonl") == [{"question": "é", "answer": "1"}]
    assert _read_all(tmp_path / "all-unpacked.json") == [{"data": [Q, Q]}]


def test_a_folder_of_files_gets_the_line_that_names_them(tmp_path):
    """OpenRLHF#751: a data set as the hub has it. The line named a list, which is refused, too."""
    file = tmp_path / "data/train-00000-of-00001.parquet"
    file.parent.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist([Q]), file)
    with pytest.raises(InvalidInput) as caught:
        open_records(tmp_path)
    assert f"data: {{train: {file.parent}/train*.parquet}}" in str(caught.value)
    with pytest.raises(ValueError, match="Instead:  train: {a.jsonl: 1, b.jsonl: 1}"):
        Data(train=["a.jsonl", "b.jsonl"])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("pattern", "read"), [("train-*.parquet", [Q, A, Q]), ("**/part[0-9].jsonl.gz", [A, Q])])
def test_files_of_one_pattern_are_one_set(tmp_path, pattern, read):
    """As shards are named on the hub; the files are read in the order of their names, a table's needed columns alone.
    """
    (tmp_path / "deep").mkdir()
    for number, rows in enumerate(([Q, A], [Q])):
        text = [{**row, "answer": json.dumps(row["answer"]), "wide": "x"} for row in rows]
        parquet.write_table(pyarrow.Table.from_pylist(text), tmp_path / f"train-0000{number}-of-2.parquet")
    for number, row in ((2, Q), (1, A)):
        (tmp_path / f"deep/part{number}.jsonl.gz").write_bytes(gzip.compress(json.dumps(row).encode()))
    spec = load("grpo", None, [f"data.train={tmp_path / pattern}"])
    (records,) = open_training_sets(spec.run.data, spec.data_path).values()
    assert [record["question"] for record in records.get([*range(len(read))][::-1])] == [row["question"] for row in
                                                                                        read[::-1]]
    assert not any("wide" in record for record in records.get([0, 1]))
    assert open_records(tmp_path / pattern, spec.run.data) is records
    assert len(records) == len(read)
    assert str(records.location(len(read) - 1)).startswith(str(max(tmp_path.glob(pattern))))
    with pytest.raises(InvalidInput, match="there is no data `none-[*].jsonl`"):
        load("grpo", None, ["data.train=none-*.jsonl"])


def test_a_folder_with_one_split_is_read(tmp_path):
    """axolotl#2193, Visual-RFT#110."""
    one = datasets.Dataset.from_list([Q, Q])
    datasets.DatasetDict({"train_sft": one}).save_to_disk(tmp_path / "one")
    assert _read_all(tmp_path / "one") == [Q, Q]
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "two")
    with pytest.raises(InvalidInput, match="it holds several splits: train, test(.|\\n)*Name one:  .*two/train"):
        open_records(tmp_path / "two")
