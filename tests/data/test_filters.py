"""Filters of the run file keep what they say, and what they drop is counted; mistakes name the record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distflow.config.expressions import expression
from distflow.config.load import load
from distflow.data.checks import check_data
from distflow.data.dataset import FilteredRecords, filter_digest, open_records, open_training_sets
from distflow.errors import InvalidInput

RECORDS = [{"question": f"What is {number}?", "answer": str(number), "level": number % 5,
            "tags": ["a", "b"][: number % 3], "meta": {"from": "web"}} for number in range(20)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "some.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in RECORDS))
    return tmp_path / "some.jsonl"


@pytest.mark.parametrize(("text", "keeps"), [
    ("level >= 3", lambda each: each["level"] >= 3),
    ("len(question) < 11 and not level in [1, 2]",
     lambda each: len(each["question"]) < 11 and each["level"] not in (1, 2)),
    ("'b' in tags or int(answer) % 7 == 0", lambda each: "b" in each["tags"] or int(each["answer"]) % 7 == 0),
    ("meta['from'] == 'web' and 0 < level <= 2", lambda each: 0 < each["level"] <= 2)])
def test_expressions(file, text, keeps):
    found = FilteredRecords(open_records(file), [text])
    expected = [index for index, each in enumerate(RECORDS) if keeps(each)]
    assert [each["answer"] for each in found.get(range(len(found)))] == [str(index) for index in expected]
    assert [found.location(place).line for place in range(len(found))] == [index + 1 for index in expected]
    assert found.dropped == {text: 20 - len(expected)}


@pytest.mark.parametrize(("text", "says"), [
    ("level >=", "is no expression over the fields of a record"), ("level = 3", "is no expression"),
    ("__import__('os')", "cannot have"), ("question.upper()", "has `question.upper"),
    ("[x for x in tags]", "cannot have"), ("(lambda: 1)()", "cannot have"),
    ("len(*tags)", "cannot have"),
    ("lower(question, a=1)", "cannot have")])
def test_what_no_expression_may_have(text, says):
    with pytest.raises(ValueError, match="`.*`") as caught:
        expression(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(("text", "says"), [
    ("levl > 3", ("some.jsonl:1: `data.filter`: the record has no field `levl`", "Did you mean `level`?")),
    ("answer > 3", ("some.jsonl:1: `data.filter`: `answer > 3` fails: TypeError",)),
    ("level > 9", ("`data.filter` keeps none of its 20 records", "`level > 9` drops 20"))])
def test_filters_that_fail_or_keep_nothing(file, text, says):
    with pytest.raises(InvalidInput) as caught:
        FilteredRecords(open_records(file), [text])
    assert all(part in str(caught.value) for part in says)


def test_what_ones_own_filter_raises_names_filter_and_record(file, tmp_path, monkeypatch):
    (tmp_path / "bad_filters.py").write_text(
        "def full(record):\n    if record['answer'] == '3':\n        raise RuntimeError('disk full')\n    return True\n"
        "def unknown(record):\n    return levl > 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    for text, says in (("bad_filters:full", "some.jsonl:4: .*`bad_filters:full` fails: RuntimeError: disk full"),
                       ("bad_filters:unknown", "some.jsonl:1: .*`bad_filters:unknown` fails: NameError")):
        with pytest.raises(InvalidInput, match=says):
            FilteredRecords(open_records(file), [text])


def test_a_run_says_what_its_filters_drop_and_its_functions_are_ones_own(file, tmp_path, monkeypatch):
    odd = "def odd(record):\n    return int(record['answer']) % 2\n"
    (tmp_path / "my_filters.py").write_text(odd)
    monkeypatch.syspath_prepend(tmp_path)
    spec = load("sft", None, [f"data.train={file}", "data.filter=[my_filters:odd, level > 1]", "validation=null"])
    (records,) = open_training_sets(spec.run.data, spec.data_path).values()
    assert [each["answer"] for each in records.get(range(len(records)))] == ["3", "7", "9", "13", "17", "19"]
    (note,) = [note for note in check_data(spec) if "filter" in note]
    assert f"`data.filter` keeps 6 of the 20 records of {file}: `my_filters:odd` drops 10, `level > 1` drops 4" == note
    kept = filter_digest(spec.run.data, spec.data_path)
    file.write_text("".join(f"{json.dumps({**each, 'level': 4})}\n" for each in RECORDS))
    assert filter_digest(spec.run.data, spec.data_path) != kept
