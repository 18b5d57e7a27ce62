"""Public forms of data sets: the question, the answer and the columns as they are meant, or the line to write."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from distflow.config.run import Data
from distflow.data.dataset import check_records, fields_of, open_records
from distflow.data.forms import as_messages, columns_of, reader_of
from distflow.data.problems import answer_text, messages_of
from distflow.errors import InvalidInput

ASKED = [{"role": "user", "content": "1 + 1?"}]
TURNS = [*ASKED, {"role": "assistant", "content": "2"}]
SHAREGPT = [{"from": "human", "value": "1 + 1?"}, {"from": "gpt", "value": "2"}]
TESTS = ["assert f(1) == 2", "assert f(2) == 3"]


def as_roles(asks: str, answers: str) -> list[dict[str, str]]:
    return [{"role": asks, "content": "1 + 1?"}, {"role": answers, "content": "2"}]


CALL = {"name": "add", "arguments": '{"a": 1}'}
READ = {  # form → record, settings, question as messages, answer, columns
    "question and answer": ({"question": "1 + 1?", "answer": "2"}, {}, ASKED, "2", {}),
    "GSM8K": ({"question": "1 + 1?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}, {}, ASKED,
              "1 + 1 = <<1+1=2>>2\n#### 2", {}),
    "number": ({"question": "1 + 1?", "answer": 2.0}, {}, ASKED, "2", {}),
    "boolean": ({"question": "1 + 1?", "answer": True}, {}, ASKED, "true", {}),
    "several answers": ({"question": "1 + 1?", "answer": ["2", "zwei"]}, {}, ASKED, '["2", "zwei"]', {}),
    "several numbers": ({"question": "1 + 1?", "answer": [2, 2.5]}, {}, ASKED, '["2", "2.5"]', {}),
    "numbers of another field": ({"question": "1 + 1?", "answer": "2", "tests": [1, 2]}, {"columns": ["tests"]}, ASKED,
                                 "2", {"tests": "[1, 2]"}),
    "parts of text": ({"question": [{"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]}], "answer": "2"},
                      {}, ASKED, "2", {}),
    "one of several answers": ({"question": "1 + 1?", "answer": ["2", "zwei"]}, {"answer": "answer.0"}, ASKED, "2", {}),
    "SQuAD": ({"question": "1 + 1?", "answers": {"text": ["2"], "answer_start": [3]}}, {"answer": "answers.text.0"},
              ASKED, "2", {}),
    "MBPP": ({"text": "1 + 1?", "code": "f", "test_list": TESTS},
             {"question": "text", "answer": "code", "columns": {"tests": "test_list"}}, ASKED, "f",
             {"tests": json.dumps(TESTS)}),
    "APPS": ({"question": "1 + 1?", "answer": "-", "input_output": {"inputs": ["1\n"], "outputs": ["2\n"]}},
             {"columns": ["input_output"]}, ASKED, "-",
             {"input_output": '{"inputs": ["1\\n"], "outputs": ["2\\n"]}'}),
    "verl": ({"data_source": "sums", "prompt": ASKED, "ability": "math", "extra_info": {"index": 7},
              "reward_model": {"style": "rule", "ground_truth": "2"}},
             {"columns": ["data_source", "extra_info.index"]}, ASKED, "2", {"data_source": "sums", "index": "7"}),
    "verl, named": ({"prompt": ASKED, "reward_model": {"ground_truth": "2"}},
                    {"question": "prompt", "answer": "reward_model.ground_truth"}, ASKED, "2", {}),
    "verl, beside the question that it was made of": (  # Search-R1: instructions and tools stand in `prompt`
        {"question": "1 + 1", "golden_answers": ["2"], "prompt": ASKED, "reward_model": {"ground_truth": "2"}}, {},
        ASKED, "2", {}),
    "verl, an answer that is named beside a question": (
        {"question": "1 + 1?", "prompt": "2 + 2?", "reward_model": {"ground_truth": "2"}},
        {"answer": "reward_model.ground_truth"}, ASKED, "2", {}),
    "variables of the template in another field": (
        {"question": "1 + 1?", "answer": "2", "extra": {"of_template": '{"effort": "low", "other": null}'}},
        {"columns": {"chat_template_kwargs": "extra.of_template"}}, ASKED, "2",
        {"chat_template_kwargs": '{"effort": "low"}'}),
    "TRL, prompts": ({"prompt": ASKED}, {}, ASKED, None, {}),
    "TRL, prompts as text": ({"prompt": "1 + 1?"}, {}, ASKED, None, {}),
    "TRL, prompt and answer": ({"prompt": "1 + 1?", "answer": "2"}, {}, ASKED, "2", {}),
    "TRL, prompt and completion": ({"prompt": "1 + 1?", "completion": "2"}, {}, ASKED, "2", {}),
    "TRL, preferences": ({"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}, {"columns": ["chosen", "rejected"]},
                         ASKED, None, {"chosen": "2", "rejected": "3"}),
    "Alpaca": ({"instruction": "1 + 1?", "input": "", "output": "2"}, {}, ASKED, "2", {}),
    "Alpaca with an input": ({"instruction": "Add.", "input": "1 + 1", "output": "2"}, {},
                             [{"role": "user", "content": "Add.\n\n1 + 1"}], "2", {}),
    "Alpaca, named": ({"instruction": "Add.", "input": "1 + 1", "output": "2"},
                      {"question": "instruction", "answer": "output"},
                      [{"role": "user", "content": "Add.\n\n1 + 1"}], "2", {}),
    "Alpaca with system and history": (
        {"instruction": "1 + 1?", "input": "", "output": "2", "system": "Add.", "history": [["0 + 1?", "1"]]}, {},
        [{"role": "system", "content": "Add."}, {"role": "user", "content": "0 + 1?"},
         {"role": "assistant", "content": "1"}, *ASKED], "2", {}),
    "Dolly": ({"instruction": "Add.", "context": "1 + 1", "response": "2", "category": "sums"}, {},
              [{"role": "user", "content": "Add.\n\n1 + 1"}], "2", {}),
    "Dolly, named": ({"instruction": "Add.", "context": "1 + 1", "response": "2"},
                     {"question": "instruction", "answer": "response"},
                     [{"role": "user", "content": "Add.\n\n1 + 1"}], "2", {}),
    "ShareGPT with system": ({"conversations": SHAREGPT, "system": "Add."}, {},
                             [{"role": "system", "content": "Add."}, *ASKED], "2", {}),
    "ShareGPT with an empty system": ({"conversations": SHAREGPT, "system": "", "tools": ""}, {}, ASKED, "2", {}),
    "ShareGPT, questions": ({"conversations": SHAREGPT[:1], "answer": "2"}, {"question": "conversations"}, ASKED, "2",
                            {}),
    "OpenAI's messages": ({"messages": TURNS}, {}, ASKED, "2", {}),
    "ShareGPT": ({"conversations": SHAREGPT}, {}, ASKED, "2", {}),
    "roles with capitals": ({"messages": as_roles("User", "Assistant")}, {}, ASKED, "2", {}),
    "role model": ({"messages": as_roles("user", "model")}, {}, ASKED, "2", {}),
    "roles human and gpt": ({"messages": as_roles("human", "gpt")}, {}, ASKED, "2", {}),
    "role developer": ({"messages": [{"role": "developer", "content": "Add."}, *TURNS]}, {},
                       [{"role": "system", "content": "Add."}, *ASKED], "2", {}),
    "role Human in a prompt": ({"prompt": as_roles("Human", "")[:1], "answer": "2"}, {}, ASKED, "2", {}),
    "ShareGPT with capitals": ({"conversations": [{"from": "Human", "value": "1 + 1?"},
                                                  {"from": "Model", "value": "2"}]}, {}, ASKED, "2", {}),
    "ShareGPT with content": ({"conversations": [{"from": "human", "content": "1 + 1?"},
                                                 {"from": "gpt", "content": "2"}]}, {}, ASKED, "2", {}),
    "questions with their answers": (  # as ms-swift and Firefly have them
        {"conversation": [{"human": "0 + 1?", "assistant": "1"}, {"human": "1 + 1?", "assistant": "2"}],
         "system": "Add."}, {"question": "conversation"},
        [{"role": "system", "content": "Add."}, {"role": "user", "content": "0 + 1?"},
         {"role": "assistant", "content": "1"}, *ASKED], "2", {}),
    "questions with their answers and a system": (  # as XTuner has them
        {"conversations": [{"system": "Add.", "input": "1 + 1?", "output": "2"}]}, {},
        [{"role": "system", "content": "Add."}, *ASKED], "2", {}),
    "tests are no conversation": (
        {"question": "1 + 1?", "answer": "2", "tests": [{"input": "1", "output": "2"}]}, {"columns": ["tests"]}, ASKED,
        "2", {"tests": '[{"input": "1", "output": "2"}]'}),
    "speakers": ({"conversation": [{"speaker": "user", "text": "1 + 1?"}, {"speaker": "assistant", "text": "2"}]},
                 {"question": "conversation"}, ASKED, "2", {}),
    "OpenAI's older calls": (  # phoenix#11372
        {"messages": [*ASKED, {"role": "assistant", "content": "", "function_call": CALL},
                      {"role": "function", "name": "add", "content": "2"}, TURNS[1]]}, {},
        [*ASKED, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {
            "name": "add", "arguments": {"a": 1}}}]}, {"role": "tool", "name": "add", "content": "2"}], "2", {}),
    "a result that is data": (
        {"messages": json.dumps([*ASKED, {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]},
                                 {"role": "tool", "content": {"sum": 2}}, TURNS[1]])}, {},
        [*ASKED, {"role": "assistant", "content": "", "tool_calls": [{"function": {
            "name": "add", "arguments": {"a": 1}}}]}, {"role": "tool", "content": '{"sum": 2}'}], "2", {}),
    "Anthropic's parts": (  # llama.cpp#20090: thoughts were lost; a refusal asked for a field with images
        {"messages": json.dumps([
            {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "I add.", "signature": "x"},
                                              {"type": "redacted_thinking", "data": "x"}, {"type": "tool_use",
                                               "id": "1", "name": "add", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2"},
                                         {"type": "text", "text": "Now?"}]}, TURNS[1]])}, {},
        [*ASKED, {"reasoning_content": "I add.", "reasoning": "I add.", "thinking": "I add.", "role": "assistant",
                  "content": "", "tool_calls": [{"type": "function", "id": "1", "function": {
                      "name": "add", "arguments": {"a": 1}}}]},
         {"role": "tool", "tool_call_id": "1", "content": "2"}, {"role": "user", "content": "Now?"}], "2", {}),
    "parts of OpenAI's Responses": (
        {"messages": [{"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]},
                      {"role": "assistant", "content": [{"type": "output_text", "text": "2"}]}]}, {}, ASKED, "2", {}),
    "no calls in a list": ({"messages": json.dumps([{**turn, "tool_calls": []} for turn in TURNS])}, {}, ASKED, "2",
                           {}),  # vllm#13978: Llama's template refuses it
    "a question that is JSON": ({"question": '[{"role": "king", "content": "crown"}]', "answer": "2"}, {},
                                [{"role": "user", "content": '[{"role": "king", "content": "crown"}]'}], "2", {}),
    "ShareGPT with weights": (
        {"conversations": [{**SHAREGPT[0], "weight": 0}, SHAREGPT[1]]}, {}, [{**ASKED[0], "weight": 0}], "2", {}),
    "messages as JSON text": ({"prompt": json.dumps(ASKED), "answer": "2"}, {}, ASKED, "2", {}),
    "messages as JSON text, other keys first": (
        {"prompt": json.dumps([{"id": "a", **ASKED[0]}]), "answer": "2"}, {}, [{"id": "a", **ASKED[0]}], "2", {}),
    "one message as JSON text": ({"prompt": json.dumps(ASKED[0]), "answer": "2"}, {}, ASKED, "2", {}),
    "ShareGPT as JSON text": ({"conversations": json.dumps([{"id": 1, **turn} for turn in SHAREGPT])}, {}, ASKED, "2",
                              {}),
    "an answer that is JSON": ({"question": "1 + 1?", "answer": '[{"value":1}]'}, {}, ASKED, '[{"value":1}]', {}),
    "an answer that Python prints": ({"question": "1 + 1?", "answer": "[{'content': 1}]"}, {}, ASKED,
                                     "[{'content': 1}]", {}),
    "a question about roles": ({"question": "[{'role': 'a', 'content': 'b'}] has how many?", "answer": "1"}, {},
                               [{"role": "user", "content": "[{'role': 'a', 'content': 'b'}] has how many?"}], "1", {}),
    "one message": ({"question": ASKED[0], "answer": "2"}, {}, ASKED, "2", {}),
    "a question that begins as JSON does": ({"question": "[1, 2] reversed?", "answer": "[2, 1]"}, {},
                                            [{"role": "user", "content": "[1, 2] reversed?"}], "[2, 1]", {}),
    "a field whose name has a dot": ({"a.b": "1 + 1?", "a": {"b": "other"}, "answer": "2"}, {"question": "a.b"}, ASKED,
                                     "2", {}),
}
REFUSED = {  # form → record, settings, what the message says
    "only a likely field": ({"problem": "1 + 1?", "solution": "2"}, {},
                            "--set data.question=problem --set data.answer=solution"),
    "nested": ({"question": "1 + 1?", "extra_info": {"answer": "2", "index": 3}}, {},
               "It has: question, extra_info.answer, extra_info.index.\nSay which field to take:  "
               "--set data.answer=extra_info.answer"),
    "messages that Python has printed": ({"question": str(ASKED), "answer": "2"}, {},
                                         "must be JSON or a list: Python has written its messages as text"),
    "messages that Python has printed, other keys first": (
        {"question": str([{"id": 1, **ASKED[0]}]), "answer": "2"}, {}, "Python has written its messages as text"),
    "one message that Python has printed": ({"question": str(ASKED[0]), "answer": "2"}, {},
                                            "Python has written its messages as text"),
    "unknown speakers": ({"question": [{"from": "bard", "value": "1 + 1?"}], "answer": "2"}, {}, "list of messages"),
    "an answer of an unknown role": ({"messages": as_roles("user", "assistent")}, {},
                                     "end with the role 'assistent'. An answer has the role `assistant`."),
    "a mapping as question": ({"question": {"text": "1 + 1?"}, "answer": "2"}, {},
                              "To take what is in it:  --set data.question=question.text"),
    "a list as question": ({"question": ["1 + 1?"], "answer": "2"}, {}, "--set data.question=question.0"),
    "a list that is imitated": ({"question": "1 + 1?", "answer": ["2"]}, {"imitated": {"answer"}},
                                'must be text or a number, not [\'2\'].\n\n    1 |  {"question": "1 + 1?", "answer": '
                                '["2"]}\n\nTo take what is in it:  --set data.answer=answer.0'),
    "an image, and no field of images": (
        {"question": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}],
         "answer": "2"}, {}, "Say which field has them:  --set data.images=FIELD"),
    "no such path": ({"question": "1 + 1?", "a": {"c": "2"}}, {"answer": "a.b"}, "the record has no field `a.b`"),
}


def written(folder: Path, record: dict[str, Any]) -> Path:
    (folder / "records.jsonl").write_text(json.dumps(record) + "\n")
    return folder / "records.jsonl"


@pytest.mark.parametrize("form", READ)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_record_is_read_as_it_was_meant(tmp_path, form, kind):
    record, settings, question, answer, columns = READ[form]
    path = written(tmp_path, record)
    if kind == "parquet":
        path = tmp_path / "records.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([record]), path)
    data = Data(train="", **settings)
    records = open_records(path, data)
    check_records(records, fields_of(data, data.columns, answers=answer is not None))
    (read,) = records.get([0])
    assert messages_of(read, data) == question
    assert answer is None or answer_text(read[data.answer]) == answer
    assert {name: answer_text(read[name]) for name in data.columns} == columns


@pytest.mark.parametrize("form", REFUSED)
def test_a_record_of_another_form_gets_the_line_to_write(tmp_path, form):
    record, settings, said = REFUSED[form]
    imitated = settings.get("imitated", frozenset())
    data = Data(train="", **{name: value for name, value in settings.items() if name != "imitated"})
    with pytest.raises(InvalidInput) as caught:
        check_records(open_records(written(tmp_path, record), data), fields_of(data, data.columns, imitated=imitated))
    assert said in str(caught.value)


@pytest.mark.parametrize(("fields", "line"), [
    ({"env_class": "gsm8k", "reward_spec": {"ground_truth": "2"}}, "answer=reward_spec.ground_truth"),  # SkyRL
    ({"ground_truth": "2", "response": "?"}, "answer=ground_truth"), ({"response": "2"}, "answer=response")])
def test_the_fields_that_a_table_has_are_proposed(tmp_path, fields, line):
    """Also those that the run does not read, and none that only the reading makes."""
    parquet.write_table(pyarrow.Table.from_pylist([{"prompt": ASKED, **fields}]), tmp_path / "a.parquet")
    records = open_records(tmp_path / "a.parquet", data := Data(train=""))
    with pytest.raises(InvalidInput, match=rf"It has: prompt, (?!.*question).*\n.*--set data.{line}\Z"):
        check_records(records, fields_of(data, data.columns))


def test_text_that_a_table_has_as_bytes_is_text(tmp_path):
    """As Spark and Hive write it; what is no text stays bytes."""
    picture = b"P6\n1 1\n3\n\x01\x02\x03"
    table = {"question": [b"1 + 1?"], "answer": ["2"], "hints": [["Zähle.".encode()]], "picture": [picture]}
    parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    record = open_records(tmp_path / "a.parquet", Data(train="", columns=["hints", "picture"])).get([0])[0]
    assert record == {"question": "1 + 1?", "answer": "2", "hints": ["Zähle."], "picture": picture}


def test_numbers_and_dates_of_tables_are_answers(tmp_path):
    values = [decimal.Decimal("4.00"), decimal.Decimal("0.50"), datetime.date(2020, 1, 2)]
    assert [answer_text(value) for value in values] == ["4", "0.50", "2020-01-02"]
    for value in values:
        table = pyarrow.table({"question": ["?"], "answer": pyarrow.array([value])})
        parquet.write_table(table, tmp_path / "a.parquet")
        data = Data(train="")
        check_records(open_records(tmp_path / "a.parquet", data), fields_of(data, ()))


@pytest.mark.parametrize("value", [b"\x89PNG", [b"\x89PNG"], {"a": float("nan")}])
def test_what_has_no_text_is_no_answer(tmp_path, value):
    parquet.write_table(pyarrow.Table.from_pylist([{"question": "?", "answer": value}]), tmp_path / "a.parquet")
    data = Data(train="")
    with pytest.raises(InvalidInput, match="field `answer` must be text"):
        check_records(open_records(tmp_path / "a.parquet", data), fields_of(data, ()))


def test_tables_have_the_fields_of_which_notes_speak():
    names = ["messages", "tools", "label", "context", "wide"]
    assert columns_of(Data(train=""), names) == names[:-1]


def test_two_fields_of_one_name_are_to_be_named():
    with pytest.raises(ValueError, match=r"columns: \{a_id: a.id, b_id: b.id\}"):
        Data(train="", columns=["a.id", "b.id"])  # pyright: ignore[reportArgumentType]


def test_messages_beside_a_prompt_are_named_where_answers_are_learned(tmp_path):
    """As ultrachat has them: the prompt alone would have no answer."""
    talk = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "one?", "prompt_id": "1", "messages": talk}) + "\n")
    data = Data(train="train.jsonl")
    with pytest.raises(InvalidInput, match="To learn the messages:  --set data.question=messages"):
        check_records(open_records(tmp_path / "train.jsonl", data), fields_of(data, ()))


@pytest.mark.parametrize("history", [[["x"]], "x", [[1, 2]]])
def test_a_history_that_is_none_is_refused(history):
    read = reader_of(Data(train="x"))
    with pytest.raises(InvalidInput, match="field `history` must be a list of pairs"):
        read({"instruction": "q", "input": "", "output": "a", "history": history})


def test_a_part_whose_type_is_no_name_stays_for_the_check_that_tells_it():
    asked = [{"role": "user", "content": [{"type": ["text"], "text": "1 + 1?"}]}, {"role": "assistant", "content": "2"}]
    assert as_messages(asked) == asked
