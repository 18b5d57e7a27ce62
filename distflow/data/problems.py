"""Reads the question, the tools and the answer of a record, in all the forms in which datasets have them."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import re
from typing import Any

from distflow.config.run import Data

Record = dict[str, Any]
_PYTHON_TEXT = re.compile(r"\s*\[\s*\{\s*'(role|from|content|value)'\s*:")
_PYTHON = "JSON or a list: Python has written its messages as text; write them by `json.dumps`"
_TOOLS = 'a list of tools as {"type": "function", "function": {…}}, or JSON text of one'
Message = dict[str, Any]
"""Message of a conversation: `role`, `content` (text, or a list of parts), and what else the chat template knows."""


def messages_of(record: Record, data: Data) -> list[Message]:
    """Return the question as chat messages, with the run file's system prompt (unless it has its own) and suffix."""
    asked = record[data.question]
    asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    messages = [_message(each) for each in asked]
    if data.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    last = next((each for each in reversed(messages) if each["role"] == "user"), None)
    if data.prompt_suffix and last:
        last["content"] = _with_suffix(last["content"], data.prompt_suffix)
    return messages


def tools_of(record: Record, data: Data) -> list[dict[str, Any]] | None:
    """Return the tools that a record names, or None; JSON text, as Parquet files often have it, is parsed."""
    value = record.get(data.tools) if data.tools else None
    return (json.loads(value or "null") if isinstance(value, str) else _without_nulls(value)) or None


def question_text(asked: str | list[Message]) -> str:
    """Return the question as one text: itself, or the content of the last user message."""
    if isinstance(asked, str):
        return asked
    users = [each for each in asked if each["role"] == "user"]
    return content_text((users or asked)[-1].get("content"))


def content_text(content: str | list[dict[str, Any]] | None) -> str:
    """Return the text of a message: its content, or the text parts of it."""
    return content or "" if not isinstance(content, list) else "".join(part.get("text") or "" for part in content)


def answer_text(answer: Any) -> str:
    """Return an answer as text. A whole number is written without a fraction, since tables store 24 as 24.0; a list, a
    mapping, true and false are JSON."""
    if isinstance(answer, float | decimal.Decimal) and math.isfinite(answer) and answer == int(answer):
        return str(int(answer))
    if isinstance(answer, datetime.date | datetime.time):
        return answer.isoformat()
    if isinstance(answer, bool | list | dict):
        return json.dumps(answer, ensure_ascii=False, default=answer_text)
    return str(answer)


_SURROGATE = re.compile("[\ud800-\udfff]")


def mend_text(text: str) -> str:
    """Return a text in which each half of a surrogate pair is U+FFFD, and two halves that belong together are one
    character: such a half is no text, and no tokenizer takes it."""
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or value in ([], {})


def is_empty_question(value: Any) -> bool:
    """Return whether a question has no text and no parts. A wrong form is not empty: `question_error` reports it."""
    return not any(_has_content(each) for each in value) if isinstance(value, list) else is_empty(value)


def question_error(value: Any) -> str:
    """Return the requirement that a question fails; "" if it is right."""
    if isinstance(value, str) and _PYTHON_TEXT.match(value):
        return _PYTHON
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return ""
    return "" if isinstance(value, str) else 'text, or a list of messages as {"role": "user", "content": …}'


def answer_error(value: Any, imitated: bool = False) -> str:
    """Return the requirement that an answer, or another text field, fails; "" if it is right. `imitated`: its text
    becomes tokens, so that JSON of a list or a mapping is none."""
    if isinstance(value, float | decimal.Decimal) and not math.isfinite(value):
        return "a finite number"
    if isinstance(value, str):
        return _PYTHON if _PYTHON_TEXT.match(value) else ""
    if isinstance(value, list | dict) and not imitated and question_error(value):  # messages are no data
        return _json_error(value)
    simple = int | float | decimal.Decimal | datetime.date | datetime.time
    return "" if isinstance(value, simple) else "text or a number"


def _json_error(value: list | dict) -> str:
    try:
        json.dumps(value, default=_no_bytes, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return "text, a number, or a list or a mapping of these"
    return ""


def _no_bytes(value: Any) -> str:
    if isinstance(value, decimal.Decimal | datetime.date | datetime.time):
        return answer_text(value)
    raise TypeError(f"{type(value).__name__} has no text")


def tools_error(value: Any) -> str:
    """Return the requirement that a field of tools fails; "" if it is right."""
    try:
        value = json.loads(value or "null") if isinstance(value, str) else value
    except ValueError:
        return _TOOLS
    right = value is None or (isinstance(value, list) and all(isinstance(tool, dict) for tool in value))
    return "" if right else _TOOLS


def _has_content(message: Any) -> bool:
    if isinstance(message, dict) and not _is_message(message):
        return True
    content = message.get("content") if isinstance(message, dict) else message
    if isinstance(content, list):
        return any(not isinstance(part, dict) or part.get("type", "text") != "text" or not is_empty(part.get("text"))
                   for part in content)
    return not is_empty(content) or (isinstance(message, dict) and bool(message.get("tool_calls")))


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    parts = content if isinstance(content, list) else []
    return isinstance(content, str | list | None) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str | None) for part in parts)


def _message(message: Message) -> Message:
    return {name: _without_nulls(value) for name, value in message.items() if value is not None or name == "content"}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _with_suffix(content: str | list[dict[str, Any]] | None, suffix: str) -> str | list[dict[str, Any]]:
    return [*content, {"type": "text", "text": suffix}] if isinstance(content, list) else f"{content or ''}{suffix}"
