"""Parquet: the columns that a run reads, a batch at a time, in bounded memory."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import datasets
import pyarrow
import pytest
from pyarrow import parquet as files

from distflow.config.run import Data
from distflow.data import parquet
from distflow.data.dataset import NamedRecords, open_records
from distflow.data.parquet import Parquet
from distflow.errors import InvalidInput


def written(folder: Path, rows: int, group: int, **more: list) -> Path:
    table = {"question": [f"{n} + 1?" for n in range(rows)], "answer": [str(n + 1) for n in range(rows)], **more}
    files.write_table(pyarrow.table(table), folder / "some.parquet", row_group_size=group)
    return folder / "some.parquet"


@pytest.mark.parametrize("memory", [0, 20_000, 2**27])
@pytest.mark.parametrize("group", [7, 600, 3000])
def test_rows_are_found_in_any_order(tmp_path, monkeypatch, memory, group):
    monkeypatch.setattr(parquet, "_MEMORY", memory)
    records = Parquet(written(tmp_path, 2000, group))
    order = random.Random(0).choices(range(2000), k=300)
    assert records.get(order) == [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in order]
    assert records.get(range(250, 600)) == [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(250, 600)]
    assert records.held <= memory
    assert records.get([]) == []


@pytest.mark.parametrize(("settings", "read"), [
    ({}, ["question", "answer"]), ({"columns": ["level"]}, ["question", "answer", "level"]),
    ({"columns": ["extra.index"]}, ["question", "answer", "extra"]),
    ({"columns": ["lost"]}, None), ({"answer": "extra.index"}, ["question", "extra"])])
def test_only_the_columns_of_the_run_are_read(tmp_path, settings, read):
    path = written(tmp_path, 4, 4, level=[1] * 4, extra=[{"index": 1}] * 4, wide=["z"] * 4)
    records = open_records(path, Data(train="", **settings))
    assert isinstance(records, NamedRecords)
    assert isinstance(records.records, Parquet)
    assert records.records.columns == read


def test_a_small_file_of_large_values_takes_bounded_memory(tmp_path, monkeypatch):
    """The file says in a kilobyte what would take 500 MB."""
    monkeypatch.setattr(parquet, "_MEMORY", 2**22)
    path, rows, size = tmp_path / "some.parquet", 20_000, 25_000
    files.write_table(pyarrow.table({"question": pyarrow.DictionaryArray.from_arrays([0] * rows, ["x" * size]),
                                     "answer": ["1"] * rows}), path, store_schema=False)
    pool = pyarrow.default_memory_pool()
    before = pool.bytes_allocated()
    records = open_records(path, Data(train=""))
    assert len(records.get([rows - 1])[0]["question"]) == size
    assert pool.bytes_allocated() - before < 2**25
    assert path.stat().st_size < 10_000


def test_pages_that_would_fill_the_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "_PAGES", 2**16)
    path = tmp_path / "some.parquet"
    files.write_table(pyarrow.table({"question": ["x" * 2**24], "answer": ["1"], "wide": ["1"]}), path,
                      compression="zstd", use_dictionary=False)
    with pytest.raises(InvalidInput, match="column `question` unpacks [0-9,]+ bytes to 16,777,"):
        open_records(path, Data(train="")).get([0])
    assert open_records(path, Data(train="", question="wide")).get([0])[0]["wide"] == "1"


def test_a_full_temporary_folder_is_named(tmp_path, monkeypatch):
    path = written(tmp_path, 2000, 600)
    monkeypatch.setattr(parquet, "_MEMORY", 0)
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", lambda **_: open("/dev/full", "wb"))  # noqa: SIM115
    with pytest.raises(InvalidInput, match=r"no room for the unpacked file(.|\n)*TMPDIR="):
        open_records(path, Data(train="")).get([0])


def test_a_column_that_stands_twice_is_refused(tmp_path):
    columns = [pyarrow.array([text]) for text in ("1 + 1?", "2", "3")]
    files.write_table(pyarrow.Table.from_arrays(columns, ["question", "answer", "answer"]), tmp_path / "a.parquet")
    with pytest.raises(InvalidInput, match="it has column `answer` twice"):
        open_records(tmp_path / "a.parquet")


@pytest.mark.parametrize("folder", [False, True])
def test_values_within_others_are_read_as_they_were_written(tmp_path, folder):
    """datasets#6311: classes in lists and mappings; ms-swift#10125: messages as JSON of `datasets`."""
    names = datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features({
        "question": datasets.Value("string"), "answer": {"label": names, "score": datasets.Value("float32")},
        "more": datasets.List(names), "turns": [{"label": names}], "messages": datasets.List(datasets.Json()),
        "of_lists": datasets.Sequence({"label": names, "score": datasets.Value("float16")})})
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [{"name": "f", "n": None}]}]
    rows = [{"question": "?", "answer": {"label": 1, "score": 0.1}, "more": [1, 0, None], "turns": [{"label": 1}],
             "messages": messages, "of_lists": {"label": [1, 0], "score": [0.1, None]}},
            dict.fromkeys(features)]
    made = datasets.Dataset.from_list(rows, features=features)
    made.save_to_disk(str(tmp_path / "made")) if folder else made.to_parquet(str(tmp_path / "made.parquet"))
    first, second = open_records(tmp_path / ("made" if folder else "made.parquet")).get([0, 1])
    assert first == {"question": "?", "answer": {"label": "yes", "score": 0.1}, "more": ["yes", "no", None],
                     "turns": [{"label": "yes"}], "messages": messages,
                     "of_lists": {"label": ["yes", "no"], "score": [0.1, None]}}
    assert not any(value for name, value in second.items() if name not in ("answer", "of_lists"))


def test_maps_are_mappings_and_encoded_values_are_read(tmp_path):
    pairs = pyarrow.array([[("a", 0.1), ("b", None)], None], pyarrow.map_(pyarrow.string(), pyarrow.float32()))
    table = pyarrow.table({"question": pyarrow.array(["?", "!"]).dictionary_encode(), "meta": pairs,
                           "answer": pyarrow.array([0.1, None], pyarrow.float16()),
                           "view": pyarrow.array([[0.1], None], pyarrow.list_view(pyarrow.float32())),
                           "long": pyarrow.array([["x"], None], pyarrow.large_list(pyarrow.large_string()))})
    files.write_table(table, tmp_path / "a.parquet")
    assert open_records(tmp_path / "a.parquet", Data(train="", columns={"a": "meta.a"})).get([0])[0]["a"] == 0.1
    assert open_records(tmp_path / "a.parquet").get([0, 1]) == [
        {"question": "?", "meta": {"a": 0.1, "b": None}, "answer": 0.1, "view": [0.1], "long": ["x"]},
        {"question": "!", "meta": None, "answer": None, "view": None, "long": None}]


@pytest.mark.parametrize("folder", [False, True])
def test_classes_have_names_and_narrow_numbers_are_as_written(tmp_path, folder):
    """As MMLU has its answers, and as pandas keeps small tables."""
    features = datasets.Features({"question": datasets.Value("string"), "answer": datasets.ClassLabel(names=[*"ABCD"]),
                                  "price": datasets.Value("float32"), "exact": datasets.Value("float64")})
    rows = {"question": ["?"] * 4, "answer": [1, 0, None, -1], "price": [0.1, 2.5, None, 1e-7], "exact": [0.1] * 4}
    made = datasets.Dataset.from_dict(rows, features=features)
    made.save_to_disk(str(tmp_path / "made")) if folder else made.to_parquet(str(tmp_path / "made.parquet"))
    path = tmp_path / ("made" if folder else "made.parquet")
    records = open_records(path, Data(train="", columns=["price", "exact"]))
    assert [(row["answer"], row["price"], row["exact"]) for row in records.get(range(4))] == [
        ("B", 0.1, 0.1), ("A", 2.5, 0.1), (None, None, 0.1), (None, 1e-7, 0.1)]
