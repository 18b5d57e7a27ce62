"""Forms of records: nested fields by dotted names, the forms of public data sets, conversations in their spellings.

`reader_of` gives each record the fields that the run file names at its top level, so that all else reads
`record[data.question]`. A form is taken only where the run file names no field and the record has all of its.
"""

from __future__ import annotations

import decimal
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from distflow.config.run import NO_VARIABLES, Data
from distflow.data.problems import LEARNED, VARIABLES, answer_text, content_text, holds_answer, is_conversation
from distflow.errors import Diagnostic, InvalidInput, abbreviated

Record = dict[str, Any]
QUESTION, ANSWER = (str(Data.model_fields[name].default) for name in ("question", "answer"))
OF_QUESTIONS = ("system", "system_prompt", "context", "passage", "choices", "options")
"""Fields by whose names their text belongs to the question."""
SCORES = tuple((form.format("chosen"), form.format("rejected"))
               for form in ("score_{}", "rating_{}", "{}_score", "{}_rating", "{}-rating"))
"""Pairs of fields that say by their names how good the answers of a pair are."""
_ABSENT = object()
_SPEAKER, _SAID = ("from", "speaker"), ("value", "content", "text")
_TURNS = (("role", "content"), ("role", "tool_calls"), *itertools.product(_SPEAKER, _SAID))
"""Pairs of keys by one of which a mapping is a message."""
_TEXTS = frozenset(["input_text", "output_text"])
_PARTS = _TEXTS | {"thinking", "redacted_thinking", "tool_use", "tool_result"}
"""Types of parts of messages that OpenAI's Responses and Anthropic have, and templates do not know."""
_EXCHANGES = (("human", "assistant"), ("user", "assistant"), ("input", "output"), ("query", "response"))
"""Pairs of keys by one of which a mapping is a question with its answer, as ms-swift, Firefly and XTuner have them."""
_CALL = "tool_call"
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
          "prompter": "user", "ai": "assistant", "chatbot": "assistant", "developer": "system",
          "observation": "tool", "tool_response": "tool", "function": "tool", "ipython": "tool",
          "function_call": _CALL} | {
              role: role for role in ("user", "assistant", "system", "tool", _CALL)}
"""Roles of messages by the names that data sets have for them, in small letters. Another role stays as it is."""
_THOUGHTS = re.compile(r"\s*(<think>.*?</think>|)(.*)", re.DOTALL)
_SPEAKERS = re.compile(r"\n\n(Human|Assistant): ?")


@dataclass(frozen=True)
class Form:
    """Form in which public data sets have a question and an answer. `fields`: all that a record of it has."""

    name: str
    fields: tuple[str, ...]
    question: str
    answer: str = ""
    input: str = ""
    """Field with what the question is about, which may be empty and is put behind it."""


_SHAREGPT_FIELD, _SHAREGPT_FIELDS = "conversations", ("conversations", "conversation")
FORMS = (
    Form("verl's form", ("prompt", "reward_model.ground_truth"), "prompt", "reward_model.ground_truth"),
    Form("TRL's form of prompt and completion", ("prompt", "completion"), "prompt", "completion"),
    Form("TRL's form of preferences", ("prompt", "chosen", "rejected"), "prompt", "chosen"),
    Form("TRL's form of preferences between conversations", ("chosen", "rejected"), "chosen", "chosen"),
    Form("TRL's form of prompts", ("prompt",), "prompt"),
    Form("TRL's form of conversations", ("messages",), "messages"),
    Form("ShareGPT's form", (_SHAREGPT_FIELD,), _SHAREGPT_FIELD),
    Form("Alpaca's form", ("instruction", "input", "output"), "instruction", "output", "input"),
    Form("Dolly's form", ("instruction", "context", "response"), "instruction", "response", "context"),
)


def field_names(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of a record's fields, those of a mapping in it as dotted names."""
    for name, value in record.items():
        yield from (f"{name}.{inner}" for inner in value) if isinstance(value, dict) and value else (name,)


def form_of(record: Mapping[str, Any], data: Data) -> Form | None:
    """Return the form by which a record is read, or None where the run file's own names say what to read."""
    if named := next((form for form in FORMS if form.input and form.question == data.question and _has(record, form)),
                     None):
        return named
    if data.question != QUESTION or (QUESTION in record and (
            ANSWER in record or data.answer != ANSWER or not _has(record, FORMS[0]))):
        return None  # verl asks `prompt`, also beside a `question` that it was made of
    return next((form for form in FORMS if _has(record, form) and (
        form.question != form.answer or is_conversation(as_messages(_walk(record, form.question))))), None)


def reader_of(data: Data) -> Callable[[Record], Record]:
    """Return a function that gives a record the fields that the run file names, under these names at its top level."""
    named = {name: name for name in (data.question, data.answer, data.tools, data.images) if name}
    moved = {name: field for name, field in {**named, **data.columns}.items() if name != field or "." in field}
    texts = {data.question, data.answer, *data.columns}

    def read(record: Record) -> Record:
        result = {**record, **{name: value for name, field in moved.items()
                               if (value := _walk(record, field)) is not _ABSENT}}
        if VARIABLES in result:
            result[VARIABLES] = _variables(result[VARIABLES])
        if form := form_of(record, data):
            result[data.question] = _question(record, form)
            if form.answer and data.answer == ANSWER and ANSWER not in record:
                result[ANSWER] = _walk(record, form.answer)
        for name in texts:
            if isinstance(value := result.get(name), str | list | dict):
                result[name] = as_conversation(_with_mask(value, record)) if name == data.question else \
                    as_messages(value)
        if (form and form.input) or (form.question if form else data.question) in _SHAREGPT_FIELDS:
            result[data.question] = _with_context(result.get(data.question), record)
        if isinstance(answer := result.get(data.answer), list) and answer and all(map(_is_number, answer)):
            result[data.answer] = [*map(answer_text, answer)]  # each is right; as numbers they would be an interval
        whole = data.answer not in result and holds_answer(form.question if form else data.question)
        if whole and is_conversation(asked := result.get(data.question)):
            result[data.question], result[data.answer] = asked[:-1], asked
        return result

    return read


def _variables(value: Any) -> dict[str, Any]:
    """Return a record's own variables of the chat template, which may be JSON text. Raises InvalidInput: it has others.
    """
    value = value.strip() if isinstance(value, str) else value
    found = _parsed(value) if isinstance(value, str) and value else value or {}
    if not isinstance(found, dict) or found.keys() & NO_VARIABLES:
        raise InvalidInput(Diagnostic(f'field `{VARIABLES}` must have variables of the chat template, such as '
                                      f'{{"enable_thinking": false}}, not {abbreviated(value)}'))
    return {name: each for name, each in found.items() if each is not None}


def _with_mask(value: Any, record: Record) -> Any:
    """Return messages with what the record's `loss_mask` says of each, as LLaMA-Factory has it: 1 if it is learned. The
    system's may be left out. Raises InvalidInput: it is none, or a message is to be learned in part, or somewhat."""
    turns = [turn for turn in value if isinstance(turn, dict)] if isinstance(value, list) else []
    odd = ((name, turn[name]) for turn in turns for name in LEARNED if turn.get(name) not in (None, 0, 1)
           and _role(_own_role(turn) or turn.get("from")) == "assistant")
    for name, weight in odd:
        raise InvalidInput(Diagnostic(f"a message has `{name}` {abbreviated(weight)}; a message is learned (1), or it "
                                      "is not (0)", None, "Write one of these, or take it out."))
    if any(turn.get("train_detail") for turn in turns):
        raise InvalidInput(Diagnostic("a message has `train_detail`, by which parts of it are not learned; a message "
                                      "is learned whole, or not at all", None, 'Take it out, or write  "train": false'))
    mask = record.get("loss_mask") if turns and len(turns) == len(value) else None
    if not isinstance(mask, list):
        return value
    system = int(len(mask) == len(turns) - 1 and _role(_own_role(turns[0]) or turns[0].get("from")) == "system")
    if len(mask) + system != len(turns) or not all(flag in (0, 1) for flag in mask):
        raise InvalidInput(Diagnostic(f"field `loss_mask` must have 0 or 1 for each of the {len(turns)} messages, not "
                                      f"{abbreviated(mask)}"))
    return [*turns[:system], *({**turn, "loss_mask": flag} for turn, flag in zip(turns[system:], mask))]


def _with_context(asked: Any, record: Record) -> Any:
    """Return a question behind its record's `system` text and `history` of pairs, as LLaMA-Factory has them."""
    system, history = record.get("system"), record.get("history")
    turns = history if isinstance(history, list) else [history] if history else []
    if not all(isinstance(turn, list | tuple) and [*map(type, turn)] == [str, str] for turn in turns):
        raise InvalidInput(Diagnostic(f"field `history` must be a list of pairs of question and answer, not "
                                      f"{abbreviated(history)}", None, 'Write it as [["question", "answer"], …]'))
    before = [{"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn)]
    if isinstance(system, str) and system.strip():
        before.insert(0, {"role": "system", "content": system})
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    alone = isinstance(messages, list) and messages and isinstance(messages[0], dict) and \
        messages[0].get("role") != "system"
    return [*before, *messages] if before and alone else asked


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | decimal.Decimal) and not isinstance(value, bool) and math.isfinite(value)


def as_conversation(value: Any) -> Any:
    """Return a conversation as `as_messages` does, also where it is a list of questions with their answers."""
    turns = value if isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value) else []
    keys = next((keys for keys in _EXCHANGES if turns and all(
        {*keys} <= turn.keys() <= {*keys, "system"} for turn in turns)), None)
    said = [("system", "system"), *zip(keys or (), ("user", "assistant"))]
    return as_messages([{"role": role, "content": turn[key]} for turn in turns for key, role in said
                        if turn.get(key) or key != "system"] if keys else value)


def as_messages(value: Any) -> Any:
    """Return a conversation as messages with `role` and `content`, by the roles that templates know: also those of
    ShareGPT (`from`, `value`), of `User` and `model`, one message, JSON text of any, or text in which `Human:` and
    `Assistant:` speak in turn. OpenAI's older `function_call` is a call of a tool. Whatever else it is stays."""
    if isinstance(value, str) and value.startswith("\n\nHuman:"):
        speakers, texts = (_SPEAKERS.split(value)[first::2] for first in (1, 2))
        return [{"role": _role(speaker), "content": text.strip()}
                for speaker, text in zip(speakers, texts)]
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") and ('"role"' in value or '"from"' in value):
        parsed = _parsed(value)
        turns = parsed if isinstance(parsed, list) else [parsed]
        if turns and all(any(isinstance(turn, dict) and {*pair} <= turn.keys() for pair in _TURNS) for turn in turns) \
                and any(_role(turn.get("role", turn.get("from", turn.get("speaker")))) in _ROLES.values()
                        for turn in turns):
            value = parsed
    if isinstance(value, dict) and (isinstance(value.get("role"), str) and "content" in value or _keys_of(value)):
        value = [value]
    if not isinstance(value, list):
        return value
    keys = [*filter(None, map(_keys_of, value))]
    if keys and len(keys) == len(value):
        return _with_calls([{"role": _role(turn[speaker]), "content": _content(_role(turn[speaker]), turn[said]),
                             **{key: each for key, each in turn.items() if key in LEARNED}}
                            for turn, (speaker, said) in zip(value, keys)], value)
    turns = [message for turn in value for message in (_modern(turn) if _own_role(turn) else [turn])]
    if any(_role(turn) != turn or turn == _CALL for turn in map(_own_role, turns)):
        return _with_calls([{**turn, "role": _role(turn["role"])} if _own_role(turn) else turn for turn in turns],
                           turns)
    return turns


def _with_calls(messages: list[Any], written: list[Any]) -> list[Any]:
    """Return messages with the calls of tools that LLaMA-Factory and ms-swift write as messages of their own, within
    messages of the assistant: calls that follow each other, or its text, are one message, with the thoughts before
    them. `written`: the messages as the record has them."""
    result: list[Any] = []
    for message, turn in zip(messages, written):
        if _own_role(message) != _CALL:
            result.append(message)
            continue
        thoughts, parsed = "", message.get("content")
        if isinstance(parsed, str):
            thoughts, text = _THOUGHTS.findall(parsed)[0]
            parsed = _parsed(text)
        calls = parsed if isinstance(parsed, list) else [parsed]
        if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
            what = f"a message of `{turn.get('role', turn.get('from'))}` must be JSON as {{\"name\": …, " \
                   f"\"arguments\": {{…}}}}, not {abbreviated(message.get('content'))}"
            raise InvalidInput(Diagnostic(what, None, "Mend it, or name its role `assistant` if it calls no tool."))
        flags = {key: message[key] for key in LEARNED if key in message}
        before = result[-1] if result and _own_role(result[-1]) == "assistant" else None
        if before is None or {key: before[key] for key in LEARNED if key in before} != flags:
            result.append(before := {"role": "assistant", "content": "", **flags})
        else:
            result[-1] = before = dict(before)
        if thoughts:
            before["content"] = content_text(before.get("content")) + thoughts
        before["tool_calls"] = [*(before.get("tool_calls") or ()),
                                *({"type": "function", "function": call} for call in calls)]
    return result


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _own_role(turn: Any) -> Any:
    return turn.get("role") if isinstance(turn, dict) else None


def _role(name: Any) -> Any:
    return _ROLES.get(name.strip().lower(), name) if isinstance(name, str) else name


def _modern(turn: Record) -> list[Record]:
    """Return a message as templates take it, behind those of the tools whose results are parts of it: with the call of
    OpenAI's older `function_call`, and the thoughts and calls that Anthropic has as parts."""
    called, content = turn.get("function_call"), _content(_role(turn["role"]), turn.get("content"))
    if isinstance(called, dict) and called.get("name") and not turn.get("tool_calls"):
        turn = {**turn, "function_call": None, "tool_calls": [{"type": "function", "function": called}]}
    elif isinstance(calls := turn.get("tool_calls"), str | dict | list):
        turn = turn if (read := _tool_calls(calls)) == calls else {**turn, "tool_calls": read}
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    if not {str(part.get("type")) for part in parts} & _PARTS:
        return [turn if content is turn.get("content") else {**turn, "content": content}]
    kinds = {kind: [part for part in parts if part.get("type") == kind] for kind in _PARTS}
    results = [{"role": "tool", "tool_call_id": part.get("tool_use_id"),
                "content": _content("tool", part.get("content"))} for part in kinds["tool_result"]]
    calls = [{"type": "function", "id": part.get("id"), "function": {"name": part.get("name"),
                                                                     "arguments": part.get("input") or {}}}
             for part in kinds["tool_use"]]
    rest = [{"type": "text", "text": part.get("text")} if str(part.get("type")) in _TEXTS else part for part in parts
            if str(part.get("type")) in _TEXTS or str(part.get("type")) not in _PARTS]
    thoughts = "\n".join(str(part.get("thinking") or "") for part in kinds["thinking"])
    message = {**turn, "content": rest or "", **({"reasoning_content": thoughts} if thoughts else {}),
               **({"tool_calls": calls} if calls else {})}
    return [*results, message] if rest or not results else results


def _tool_calls(calls: Any) -> Any:
    """Return calls of tools, of which each, or all, may be JSON text; one alone is a list of one. Raises InvalidInput:
    there is another text."""
    read = (_parsed(calls) if calls.strip() not in ("", "null") else []) if isinstance(calls, str) else calls
    read = [read] * any(each is not None for each in read.values()) if isinstance(read, dict) else read
    read = [_parsed(call) if isinstance(call, str) else call for call in read] if isinstance(read, list) else None
    if read is None or None in read and read != calls:
        what = '`tool_calls` of a message must be a list as [{"function": {"name": …, "arguments": {…}}}], or JSON text'
        raise InvalidInput(Diagnostic(f"{what} of one, not {abbreviated(calls)}"))
    return read


def _content(role: Any, content: Any) -> Any:
    """Return the content of a message: JSON where a tool's result is data."""
    parts = isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
    return content if role != "tool" or content is None or isinstance(content, str) or parts else answer_text(content)


def _keys_of(turn: Any) -> tuple[str, str] | None:
    """Return the keys of who speaks and of what is said, in a message that has one of each and no `role`."""
    keys = [[key for key in keys if key in turn] for keys in (_SPEAKER, _SAID)] \
        if isinstance(turn, dict) and "role" not in turn else []
    right = [*map(len, keys)] == [1, 1] and _role(turn[keys[0][0]]) in _ROLES.values()
    return (keys[0][0], keys[1][0]) if right else None


def _has(record: Mapping[str, Any], form: Form) -> bool:
    return all(_walk(record, name) is not _ABSENT for name in form.fields)


def _question(record: Record, form: Form) -> Any:
    question, about = _walk(record, form.question), record.get(form.input)
    return f"{question}\n\n{about}" if isinstance(question, str) and isinstance(about, str) and about.strip() \
        else question


def _walk(record: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field, `_ABSENT` if there is none. A dotted name is that of a field, or else a path:
    `extra_info.index`, `answers.0`."""
    if name in record or "." not in name:
        return record.get(name, _ABSENT)
    value: Any = record
    for part in name.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return _ABSENT
    return value


def columns_of(data: Data, names: list[str]) -> list[str] | None:
    """Return which of a table's columns a run reads; None: all, since a field is missing."""
    forms = [form for form in FORMS if {field.partition(".")[0] for field in form.fields} <= {*names}]
    asked = {data.question: QUESTION, data.answer: ANSWER} if forms else {}
    fields = [*data.columns.values(), *(field for field in (data.question, data.answer) if asked.get(field) != field)]
    if not {*map(_column_of(names), fields)} <= {*names}:
        return None
    fields += [data.question, data.answer, *filter(None, (data.tools, data.images))]
    fields += [field for form in forms for field in form.fields] + ["history"] * bool(forms)
    fields += ["loss_mask", VARIABLES]
    fields += ["prompt", "tools", "label", *itertools.chain(*SCORES), *OF_QUESTIONS]  # of which notes speak
    return [name for name in names if name in {*map(_column_of(names), fields)}]


def _column_of(names: list[str]) -> Callable[[str], str]:
    """Return a function that says which column of a table has a field."""
    return lambda field: field if field in names else field.partition(".")[0]
