"""Conversations as data: which of their messages is the answer, and what of them is no text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distflow.config.load import load
from distflow.config.run import Data
from distflow.data.checks import check_data
from distflow.data.dataset import check_records, fields_of, open_records
from distflow.data.problems import (
    answer_text,
    asked_and_answered,
    conversation_of,
    mend_text,
    mended_record,
    messages_of,
)
from distflow.errors import InvalidInput

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
TURNS = [*ASKED, {"role": "assistant", "content": "2"}]
WORSE = [*ASKED, {"role": "assistant", "content": "3"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "It is"}]

FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one column": ({"messages": TURNS}, {}),
    "the column named": ({"messages": TURNS}, {"question": "messages"}),
    "the column named twice": ({"messages": TURNS}, {"question": "messages", "answer": "messages"}),
    "another column": ({"dialogue": TURNS}, {"question": "dialogue", "answer": "dialogue"}),
    "prompt and completion": ({"prompt": ASKED, "completion": TURNS[-1:]}, {}),
    "preferences": ({"chosen": TURNS, "rejected": WORSE}, {"columns": ["chosen", "rejected"]}),
    "preferences with a prompt": ({"prompt": ASKED, "chosen": TURNS[-1:], "rejected": WORSE[-1:]},
                                  {"columns": ["chosen", "rejected"]}),
    "preferences of texts": ({"prompt": ASKED, "chosen": "2", "rejected": "3"}, {"columns": ["chosen", "rejected"]}),
    "the answer beside": ({"messages": TURNS, "answer": "2"}, {"question": "messages", "drop_answer": True}),
}


def read(folder: Path, record: dict[str, Any], **settings: Any) -> tuple[dict[str, Any], Data]:
    (folder / "data.jsonl").write_text(json.dumps(record) + "\n")
    data = Data(train="", **settings)
    records = open_records(folder / "data.jsonl", data)
    check_records(records, fields_of(data, data.columns, imitated={data.answer, *data.columns}))
    return records.get([0])[0], data


@pytest.mark.parametrize("form", FORMS)
def test_a_conversation_has_its_question_and_its_answer(tmp_path, form):
    record, data = read(tmp_path, FORMS[form][0], **FORMS[form][1])
    asked, answer = asked_and_answered(record, data)
    assert (asked, answer_text(answer)) == (ASKED, "2")
    assert conversation_of(record, data) == TURNS
    assert {name: answer_text(record[name]) for name in data.columns if name == "rejected"} == \
        ({"rejected": "3"} if "rejected" in data.columns else {})


def test_a_begun_answer_is_continued(tmp_path):
    record, data = read(tmp_path, {"prompt": BEGUN, "answer": " 2"}, question="prompt")
    assert messages_of(record, data) == BEGUN
    assert conversation_of(record, data)[-1] == {"role": "assistant", "content": "It is 2"}


@pytest.mark.parametrize(("record", "settings", "says"), [
    ({"messages": ASKED}, {"question": "messages", "answer": "messages"},
     "field `messages` must be a conversation: a list of messages that ends with an answer of the assistant"),
    ({"prompt": [{"role": "user", "content": "2 + 2?"}], "chosen": TURNS, "rejected": WORSE},
     {"columns": ["chosen", "rejected"]}, "field `chosen` must be an answer to the question of its record"),
    ({"dialogue": TURNS}, {}, "--set data.question="),
])
def test_a_conversation_that_is_none_is_refused(tmp_path, record, settings, says):
    with pytest.raises(InvalidInput) as caught:
        read(tmp_path, record, **settings)
    assert says in str(caught.value)


@pytest.mark.parametrize("arguments", ['{"a": 3}', {"a": 3}])
def test_calls_of_tools_have_their_arguments_as_objects(arguments):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    record = {"messages": [*ASKED, said, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "7"}]}
    for message in messages_of(record, Data(train="", question="messages")):
        for each in message.get("tool_calls", []):
            assert each["function"]["arguments"] == {"a": 3}


@pytest.mark.parametrize(("text", "mended"), [
    ("7 \ud83d", "7 \ufffd"), ("\ude00 7", "\ufffd 7"), ("\ud83d\ude00", "\U0001f600"),
    ("\ud83dx\ude00", "\ufffdx\ufffd"),
    ("plain", "plain"), ("日本 🙂", "日本 🙂")])
def test_half_of_a_pair_becomes_the_replacement_character(text, mended):
    assert mend_text(text) == mended
    record = {"question": [{"role": "user", "content": text}], "answer": 7}
    assert mended_record(record) == {"question": [{"role": "user", "content": mended}], "answer": 7}
    assert (mended_record(record) is record) == (text == mended)


@pytest.mark.parametrize("dag", ["sft", "grpo"])
@pytest.mark.parametrize("question", ["question", "messages"])
def test_an_answer_beside_messages_that_have_one_is_not_imitated(tmp_path: Path, dag: str, question: str) -> None:
    path = tmp_path / "math.jsonl"
    path.write_text(json.dumps({"problem": "1 + 1?", "answer": "2", "messages": TURNS}) + "\n")
    settings = [f"data.train={path}", f"validation.data={{test: {path}}}", "data.batch=1", f"data.question={question}"]
    if dag == "grpo":
        assert any("drop_answer" in note for note in check_data(load(dag, None, settings)))
        return
    with pytest.raises(InvalidInput, match="To learn the messages:  --set data.answer=messages"):
        check_data(load(dag, None, settings))
    check_data(load(dag, None, [*settings, "data.answer=messages"]))
