"""Questions, tools and answers in the forms in which datasets have them."""

import json

import pyarrow
import pytest
from pyarrow import parquet

from distflow.config.run import Data
from distflow.data.dataset import open_records
from distflow.data.problems import (
    answer_text,
    is_empty_question,
    messages_of,
    question_error,
    question_text,
    tools_error,
    tools_of,
)

USER = {"role": "user", "content": "1 + 1?"}
SYSTEM = {"role": "system", "content": "Be brief."}
CHAT = [SYSTEM, {"role": "user", "content": "2?"}, {"role": "assistant", "content": "2"}, USER]


@pytest.mark.parametrize(("answer", "text"), [("x", "x"), (24, "24"), (24.0, "24"), (-0.5, "-0.5"), (1e3, "1000"),
                                              (0.1, "0.1")])
def test_a_number_is_an_answer(answer, text):
    assert answer_text(answer) == text


@pytest.mark.parametrize(("asked", "more", "expected"), [
    ("1 + 1?", {}, [USER]),
    ([USER], {}, [USER]),
    ("1 + 1?", {"system_prompt": "Be brief."}, [SYSTEM, USER]),
    ([USER], {"system_prompt": "Be brief."}, [SYSTEM, USER]),
    (CHAT, {"system_prompt": "Be long."}, CHAT),
    ("1 + 1?", {"prompt_suffix": " Think."}, [{"role": "user", "content": "1 + 1? Think."}]),
    (CHAT, {"prompt_suffix": " Think."}, [*CHAT[:3], {"role": "user", "content": "1 + 1? Think."}]),
    ([{"role": "user", "content": [{"type": "image"}]}], {"prompt_suffix": "!", "images": "images"},
     [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "!"}]}]),
    ([{**USER, "tool_calls": None}], {}, [USER]),
])
def test_a_question_as_messages(asked, more, expected):
    record = {"question": asked}
    assert messages_of(record, Data(train="", **more)) == expected
    assert record == {"question": asked}, "the record itself stays"


@pytest.mark.parametrize(("asked", "text"), [
    ("1 + 1?", "1 + 1?"), (CHAT, "1 + 1?"), ([SYSTEM], "Be brief."),
    ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}], "How many?"),
])
def test_what_rewards_get_as_the_question(asked, text):
    assert question_text(asked) == text


@pytest.mark.parametrize(("value", "empty", "wrong"), [
    *((value, True, False) for value in (
        None, "", " \n", [], [{"role": "user", "content": " "}], [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}])),
    *((value, False, False) for value in (
        "0", [USER], [{"role": "user", "content": [{"type": "image"}]}],
        [{"role": "assistant", "content": None, "tool_calls": [{}]}])),
    *((value, False, True) for value in (
        5, ["1 + 1?"], [5], [{"content": "1 + 1?"}], [{"role": "user", "content": 5}],
        [{"role": "user", "content": ["1 + 1?"]}], [{"role": "user", "content": [{"type": "text", "text": 5}]}]))])
def test_question_is_empty_or_of_a_wrong_form(value, empty, wrong):
    assert is_empty_question(value) == empty
    assert empty or bool(question_error(value)) == wrong


def test_keys_that_parquet_has_added_are_taken_out_however_deep(tmp_path):
    def tool(name, **properties):
        return {"type": "function", "function": {"name": name, "parameters": {"type": "object",
                                                                              "properties": properties}}}

    asked = [[{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what?"}]}],
             [{"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]},
              {"role": "assistant", "content": None, "tool_calls": [
                  {"function": {"name": "add", "arguments": {"x": 1}}},
                  {"function": {"name": "sub", "arguments": {"y": 1}}}]}]]
    tools = [tool("add", x={"type": "int"}), tool("sub", y={"type": "int", "enum": [1, 2]})]
    rows = [{"question": question, "answer": "2", "tools": tools} for question in asked]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chat.parquet")
    records = open_records(tmp_path / "chat.parquet").get([0, 1])
    data = Data(train="", tools="tools", images="images")
    assert records != rows, "Parquet has added keys"
    assert [messages_of(record, data) for record in records] == asked
    assert [tools_of(record, data) for record in records] == [tools, tools]


def test_tools_as_a_list_or_as_json():
    data, tool = Data(train="", tools="tools"), {"type": "function", "function": {"name": "add"}}
    for tools in ([tool], tool, json.dumps(tool), [json.dumps(tool)]):
        assert tools_of({"tools": tools}, data) == [tool]
    assert tools_of({"tools": '[{"type": "function", "function": {"name": "add"}}]'}, data) == [tool]
    assert [tools_of(record, data) for record in ({}, {"tools": None}, {"tools": ""}, {"tools": []})] == [None] * 4
    assert tools_of({"tools": json.dumps(json.dumps([tool]))}, data) == [tool]  # prime-rl#2942
    inner, schema = {"name": "add", "parameters": {"type": "object"}}, {"type": "object"}
    for flat in ({"type": "function", **inner}, inner, {"name": "add", "input_schema": schema},  # OpenAI's Responses,
                 {"type": "custom", "name": "add", "inputSchema": schema}):  # LLaMA-Factory, Anthropic, MCP
        assert tools_of({"tools": [flat]}, data) == [{"type": "function", "function": inner}]
    assert tools_of({"tools": [{"type": "web_search", "name": "w"}]}, data) == [{"type": "web_search", "name": "w"}]
    assert tools_of({"tools": [tool]}, Data(train="")) is None
    assert not any(tools_error(value) for value in ([tool], "[]", None, "", tool, [json.dumps(tool)]))
    assert all(tools_error(value) for value in ("{", 3, "7", {"a": 1}, [3, "x"], "[3]"))
