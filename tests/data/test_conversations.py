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
    with_parsed_arguments,
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
    "preferences of LLaMA-Factory": (
        {"conversations": [{"from": "human", "value": "1 + 1?"}], "system": "Be brief.",
         "chosen": {"from": "gpt", "value": "2"}, "rejected": {"from": "gpt", "value": "3"}},
        {"columns": ["chosen", "rejected"], "question": "conversations", "answer": "chosen"}),
    "preferences of texts": ({"prompt": ASKED, "chosen": "2", "rejected": "3"}, {"columns": ["chosen", "rejected"]}),
    "texts of two speakers": ({name: f"\n\nHuman: 1 + 1?\n\nAssistant: {answer}" for name, answer in (
        ("chosen", 2), ("rejected", 3))}, {"columns": ["chosen", "rejected"]}),
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
    wanted = TURNS[-2:] if form == "texts of two speakers" else TURNS  # which have no message of the system
    assert (asked, answer_text(answer)) == (wanted[:-1], "2")
    assert conversation_of(record, data) == wanted
    assert {name: answer_text(record[name]) for name in data.columns if name == "rejected"} == \
        ({"rejected": "3"} if "rejected" in data.columns else {})


@pytest.mark.parametrize("answer", [" 2", [{"role": "assistant", "content": " 2"}],
                                    [*ASKED, {"role": "assistant", "content": " 2"}]])
def test_a_begun_answer_is_continued(tmp_path, answer):
    record, data = read(tmp_path, {"prompt": BEGUN, "answer": answer}, question="prompt")
    assert messages_of(record, data) == BEGUN
    assert conversation_of(record, data)[-1] == {"role": "assistant", "content": "It is 2"}


CALL = {"name": "add", "arguments": {"a": 1, "b": 1}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
RESULT, SAID = {"role": "tool", "content": "2"}, {"role": "assistant", "content": "It is 2."}
THOUGHT = {**SAID, "content": "<think>1 + 1</think>It is 2."}
SHAREGPT_CALL = [{"from": "human", "value": "1 + 1?"}, {"from": "function_call", "value": json.dumps(CALL)},
                 {"from": "observation", "value": "2"}, {"from": "gpt", "value": "It is 2."}]
SEVERAL: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {  # turns of an answer, as they are learned
    "two messages of the assistant": ({"messages": [*TURNS, SAID]}, [*TURNS, SAID]),
    "a completion of several turns": ({"prompt": ASKED, "completion": [CALLED, RESULT, SAID]},
                                      [*ASKED, CALLED, RESULT, SAID]),
    "calls as LLaMA-Factory has them": ({"conversations": SHAREGPT_CALL}, [ASKED[1], CALLED, RESULT, SAID]),
    "a result of `ipython`": (  # as Llama's templates have it, whose name others do not know
        {"messages": [ASKED[1], CALLED, {"role": "ipython", "content": "2"}, SAID]}, [ASKED[1], CALLED, RESULT, SAID]),
    "calls as ms-swift has them": (
        {"messages": [ASKED[1], {"role": "tool_call", "content": json.dumps(CALL)},
                      {"role": "tool_response", "content": "2"}, SAID]}, [ASKED[1], CALLED, RESULT, SAID]),
    **{f"calls as {name}": ({"messages": [ASKED[1], {**CALLED, "tool_calls": calls}, RESULT, SAID]},
                            [ASKED[1], CALLED, RESULT, SAID])
       for name, calls in (("JSON text", json.dumps(CALLED["tool_calls"])), ("a list of JSON texts", [
           json.dumps(CALLED["tool_calls"][0])]), ("one mapping", CALLED["tool_calls"][0]))},
    "calls that a table has as a mapping of nulls": (
        {"messages": [*TURNS[:-1], {**SAID, "tool_calls": {"function": None, "id": None}}]}, [*TURNS[:-1], SAID]),
    "a weight of what nobody learns": ({"messages": [{**ASKED[1], "weight": 0.5}, SAID]},
                                       [{**ASKED[1], "weight": 0.5}, SAID]),
    "calls that are none as JSON text": ({"messages": [*TURNS[:-1], {**SAID, "tool_calls": "[]"}]},
                                         [*TURNS[:-1], SAID]),
    "roles of other data sets": ({"messages": [{"role": "prompter", "content": "1 + 1?"}, {**SAID, "role": "AI"}]},
                                 [ASKED[1], SAID]),
    "a call behind its thoughts": (
        {"conversations": [SHAREGPT_CALL[0], {**SHAREGPT_CALL[1], "value": f"<think>1</think>\n{json.dumps(CALL)}"},
                           *SHAREGPT_CALL[2:]]},
        [ASKED[1], {**CALLED, "content": "<think>1</think>"}, RESULT, SAID]),
    "calls that follow each other, behind a text": (
        {"messages": [ASKED[1], SAID, *[{"role": "tool_call", "content": json.dumps(CALL)}] * 2, RESULT, SAID]},
        [ASKED[1], {**SAID, "tool_calls": CALLED["tool_calls"] * 2}, RESULT, SAID]),
    "a call that is not learned": (
        {"messages": [ASKED[1], {"role": "tool_call", "content": json.dumps(CALL), "loss": False}, RESULT, SAID]},
        [ASKED[1], {**CALLED, "loss": False, "weight": 0}, RESULT, SAID]),
    "reasoning under one of its names": (
        {"messages": [ASKED[1], {**SAID, "reasoning": "1 + 1"}]},
        [ASKED[1], {**SAID, **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "1 + 1")}]),
    "reasoning under the second name that has some": (
        {"messages": [ASKED[1], {**SAID, "reasoning_content": " ", "thinking": "1 + 1"}]},
        [ASKED[1], {**SAID, **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "1 + 1")}]),
    "reasoning in the content and under a name": (
        {"messages": [ASKED[1], {**THOUGHT, "thinking": "1 + 1"}]}, [ASKED[1], {**THOUGHT, "thinking": "1 + 1"}]),
    "reasoning in the content beside an empty column": (
        {"messages": [ASKED[1], {**THOUGHT, "reasoning_content": ""}]}, [ASKED[1], THOUGHT]),
    **{f"{name} of an answer that is not learned": (
        {"conversations": [SHAREGPT_CALL[0], {**SHAREGPT_CALL[3], name: value}, *SHAREGPT_CALL[::3]]},
        [ASKED[1], {**SAID, name: value, "weight": 0}, ASKED[1], SAID])
       for name, value in (("loss", False), ("train", False), ("trainable", 0), ("loss_mask", 0),
                           ("step_loss_mask", 0))},
    **{f"a list of what is learned{name}": (
        {"conversations": [*system, *SHAREGPT_CALL[::3] * 2], "loss_mask": [*mask, 0, 0, 0, 1]},
        [*system_message, {**ASKED[1], "loss_mask": 0, "weight": 0}, {**SAID, "loss_mask": 0, "weight": 0},
         {**ASKED[1], "loss_mask": 0, "weight": 0}, {**SAID, "loss_mask": 1}])
       for name, system, mask, system_message in (
           ("", [], [], []), (" without the system's", [{"from": "system", "value": "Be brief."}], [], ASKED[:1]))},
}


@pytest.mark.parametrize("form", SEVERAL)
def test_an_answer_of_several_turns_is_learned_as_it_is_written(tmp_path, form):
    record, turns = SEVERAL[form]
    assert conversation_of(*read(tmp_path, record)) == turns
    settings = [f"data.train={tmp_path / 'data.jsonl'}", "data.batch=1", "data.targets=all"]
    assert all("read in" in note for note in check_data(load("sft", None, settings)))


def test_rejected_answers_are_noted_where_answers_are_imitated(tmp_path):
    rows = [{"prompt": f"{number} + 1?", "completion": "2", "label": label}
            for number, label in enumerate((True, False, None, "true", "False", "false", 0, 1, "0"))]  # ms-swift#1513
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = [f"data.train={tmp_path / 'data.jsonl'}", "data.batch=1"]
    noted = [note for note in check_data(load("sft", None, settings)) if "label: false" in note]
    assert [note[:14] for note in noted] == ["5 of 9 records"]


def test_a_role_that_no_template_knows_is_noted(tmp_path):
    turns = [{"role": "reader", "content": "1 + 1?"}, {"role": "listener", "content": "?"}, *TURNS[1:]]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in (TURNS, turns)))
    notes = check_data(load("sft", None, [f"data.train={tmp_path / 'data.jsonl'}", "data.batch=1"]))
    told, = (note for note in notes if "has the role" in note)
    assert "the role 'reader', at" in told
    assert "data.jsonl:2 (and 1 more have others), which is written" in told


@pytest.mark.parametrize(("text", "noted"), [
    ("<image>\nWhat is it?", True), ("<|vision_start|><|image_pad|><|vision_end|>What?", True), ("<video>What?", True),
    ("<start_of_image>What?", True), ("Which tag shows an image, <img>?", False), ("What is an image?", False)])
def test_places_of_images_without_a_field_of_images_are_noted(tmp_path, text, noted):
    """The model would learn the tag as text."""
    (tmp_path / "data.jsonl").write_text(json.dumps({"question": text, "answer": "2", "images": ["a.png"]}))
    notes = check_data(load("sft", None, [f"data.train={tmp_path / 'data.jsonl'}", "data.batch=1"]))
    assert any("1 of 1 questions of" in note and "--set data.images=FIELD" in note for note in notes) == noted


@pytest.mark.parametrize(("prompt", "noted"), [([{"role": "user", "content": "1 + 1?"}], True), ("a name", False)])
@pytest.mark.parametrize("settings", [[], ["data.question=prompt"]])
def test_messages_beside_the_question_that_is_asked_are_noted(tmp_path, prompt, noted, settings):
    """As a data set has them once it was mapped for TRL: it trains on `prompt`."""
    (tmp_path / "data.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2", "prompt": prompt}))
    settings = [f"data.train={tmp_path / 'data.jsonl'}", "data.batch=1", "validation=null", *settings]
    notes = check_data(load("grpo", None, settings))
    assert any("--set data.question=prompt" in note for note in notes) == (noted and len(settings) == 3)


def test_variables_of_a_record_are_refused_where_further_turns_are_rendered(tmp_path):
    row = {"question": "1 + 1?", "answer": "2", "chat_template_kwargs": {"enable_thinking": False}}
    (tmp_path / "data.jsonl").write_text(json.dumps(row))
    settings = [f"data.train={tmp_path / 'data.jsonl'}", "data.batch=1"]
    check_data(load("grpo", None, settings))
    with pytest.raises(InvalidInput, match="`chat_template_kwargs` of its own, and node `rollout` renders"):
        check_data(load("grpo_tools", None, settings))


@pytest.mark.parametrize(("record", "settings", "says"), [
    ({"messages": [ASKED[1], {"role": "tool_call", "content": "add(1, 1)"}, RESULT, SAID]}, {},
     "data.jsonl:1: a message of `tool_call` must be JSON"),
    ({"conversations": [SHAREGPT_CALL[0], {**SHAREGPT_CALL[1], "value": "add(1, 1)"}, *SHAREGPT_CALL[2:]]}, {},
     "data.jsonl:1: a message of `function_call` must be JSON"),
    ({"messages": [*TURNS, ASKED[1]]}, {}, "Its messages end with the role 'user'"),
    ({"messages": [ASKED[1], {**CALLED, "tool_calls": "add(1, 1)"}, RESULT, SAID]}, {},
     "data.jsonl:1: `tool_calls` of a message must be a list"),
    ({"messages": [*ASKED, {**SAID, "weight": 0.5}]}, {}, "data.jsonl:1: a message has `weight` 0.5; a message is"),
    ({"messages": TURNS, "loss_mask": [0]}, {}, "field `loss_mask` must have 0 or 1 for each of the 3 messages"),
    ({"messages": TURNS, "loss_mask": [0, 0, 0.5]}, {}, "field `loss_mask` must have 0 or 1"),
    ({"messages": [*ASKED, {**SAID, "train_detail": [{"begin_offset": 0, "end_offset": 2, "train": False}]}]}, {},
     "data.jsonl:1: a message has `train_detail`, by which parts of it are not learned"),
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


@pytest.mark.parametrize(("arguments", "read_as"), [
    ('{"a": 3}', {"a": 3}), ({"a": 3}, {"a": 3}), ('"{\\"a\\": 3}"', {"a": 3}), ("", {}), ("null", {}), (None, {}),
    ('"x"', '"x"'), ("[1]", "[1]"), ("a=3", "a=3")])  # vllm#43851
def test_calls_of_tools_have_their_arguments_as_objects(arguments, read_as):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    record = {"messages": [*ASKED, said, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "7"}]}
    for message in messages_of(record, Data(train="", question="messages")):
        for each in message.get("tool_calls", []):
            assert each["function"]["arguments"] == read_as


@pytest.mark.parametrize(("call", "read_as"), [
    ({"name": "add", "args": {"a": 3}, "id": "c", "type": "tool_call"}, {"a": 3}),  # LangChain
    ({"name": "add", "parameters": '{"a": 3}'}, {"a": 3}), ({"name": "now", "id": "c"}, {}),
    ({"name": "add", "kwargs": {"a": 3}}, None)])
def test_calls_of_tools_have_arguments_by_other_names_and_none_that_nobody_knows(call, read_as):
    assert with_parsed_arguments(call).get("arguments") == read_as
    assert with_parsed_arguments({"function": call})["function"].get("arguments") == read_as


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
@pytest.mark.parametrize("answer", ["2", WORSE])
def test_an_answer_beside_messages_that_have_one_is_not_imitated(tmp_path, dag, question, answer):
    path = tmp_path / "math.jsonl"
    path.write_text(json.dumps({"problem": "1 + 1?", "answer": answer, "messages": TURNS}) + "\n")
    settings = [f"data.train={path}", f"validation.data={{test: {path}}}", "data.batch=1", f"data.question={question}"]
    if dag == "grpo":
        assert any("drop_answer" in note for note in check_data(load(dag, None, settings)))
        return
    with pytest.raises(InvalidInput, match="To learn the messages:  --set data.answer=messages"):
        check_data(load(dag, None, settings))
    check_data(load(dag, None, [*settings, "data.answer=messages"]))
