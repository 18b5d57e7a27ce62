"""Reads the question, the tools and the answer of a record, in all the forms in which datasets have them."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import re
from typing import Any, TypeGuard

from distflow.config.run import Data
from distflow.errors import Diagnostic, InvalidInput

Record = dict[str, Any]
_PYTHON_TEXT = re.compile(r"\s*\[?\s*\{\s*'\w+':.*[\]}]\s*\Z", re.DOTALL)
_PYTHON = "JSON or a list: Python has written its messages as text; write them by `json.dumps`"
_TOOLS = 'a list of tools as {"type": "function", "function": {…}}, or JSON text of one'
ONLY_TEXT = "messages whose parts are all text, since the run file names no field with images"
LEARNED = ("weight", "loss", "loss_mask", "step_loss_mask", "train", "trainable", "training")
"""Names under which a message of the assistant says whether it is learned, as `weight: 0` or `loss: false`."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names under which messages have their reasoning: each chat template knows one."""
VARIABLES = "chat_template_kwargs"
"""Field with a record's own variables of the chat template."""
NAME_IMAGES = "Say which field has them:  --set data.images=FIELD"
CONVERSATION = "a conversation: a list of messages that ends with an answer of the assistant"
_MESSAGES = 'a list of messages as {"role": "assistant", "content": …}'
Message = dict[str, Any]
"""Message of a conversation: `role`, `content` (text, or a list of parts), and what else the chat template knows."""


def messages_of(record: Record, data: Data) -> list[Message]:
    """Return the question as chat messages, with the run file's system prompt (unless it has its own) and suffix."""
    return asked_messages(asked_and_answered(record, data)[0], data)


def asked_messages(asked: str | list[Message], data: Data) -> list[Message]:
    """Return a question as `messages_of` returns that of a record."""
    asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    messages = [_message(each, data) for each in asked]
    if data.system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    last = next((each for each in reversed(messages) if each["role"] == "user"), None)
    if data.prompt_suffix and last:
        last["content"] = _with_suffix(last["content"], data.prompt_suffix)
    return messages


def asked_and_answered(record: Record, data: Data) -> tuple[Any, Any]:
    """Return the question and the answer of a record. Where both are one field, or `holds_answer` says so, they are a
    conversation, which is the answer: what precedes its last message is the question. With `data.drop_answer` it is
    left out of the question in any case."""
    asked, answer = record[data.question], record.get(data.answer, "")
    if not is_conversation(asked):
        return asked, answer
    if answer == asked or (data.answer not in record and holds_answer(data.question)):
        return asked[:-1], asked
    return asked[:-1] if data.drop_answer else asked, answer


def holds_answer(field: str) -> bool:
    """Return whether a field of messages has, by its name, a whole conversation. Another one, such as a `prompt`, may
    begin an answer for the model to continue."""
    return field.rpartition(".")[2] in ("messages", "conversation", "conversations")


def conversation_of(record: Record, data: Data, field: str = "") -> list[Message]:
    """Return a record's question and answer as the messages of one conversation; an answer of one message that the
    question begins is one message with it. `field`: of another answer than the record's."""
    asked, answer = asked_and_answered(record, data)
    answer = record[field] if field else answer
    messages, several = asked_messages(asked, data), has_more_turns(answer, asked)
    if not ends_with_answer(answer):
        answer = [{"role": "assistant", "content": answer_text(answer)}]
    own = answer if begins_with_answer(answer) and answer[:-1] != asked else answer[-1:]
    said = [_message(message, data) for message in own]
    if field:  # a pair needs both of its answers, whatever they weigh
        said[-1].pop("weight", None)
    if several or messages[-1]["role"] != "assistant":
        return [*messages, *said]
    begun = f"{content_text(messages[-1].get('content'))}{content_text(said[0].get('content'))}"
    return [*messages[:-1], {**messages[-1], **said[0], "content": begun}]


def ends_with_answer(value: Any) -> TypeGuard[list[Any]]:
    """Return whether a field has messages of which the last one is the assistant's."""
    return isinstance(value, list) and bool(value) and isinstance(value[-1], dict) and \
        value[-1].get("role") == "assistant"


def begins_with_answer(value: Any) -> bool:
    """Return whether a field has the messages of an answer alone, as a completion of several turns."""
    return ends_with_answer(value) and isinstance(value[0], dict) and value[0].get("role") == "assistant"


def has_more_turns(answer: Any, asked: Any) -> bool:
    """Return whether an answer is messages behind all of the question's, so that none continues its last one."""
    return ends_with_answer(answer) and len(answer) > 1 and (answer[:-1] == asked or begins_with_answer(answer))


def conversation_error(value: Any, asked: Any, answer: bool, imitated: bool) -> str:
    """Return the requirement that messages in a field fail; "" if there is none. `answer`: they are the record's
    answer, which may have several turns; of other fields the last message alone is taken, and its text alone unless it
    is `imitated`."""
    if differs_from_question(value, asked) and not (answer and begins_with_answer(value)):
        return "an answer to the question of its record, and it is a conversation about another one"
    calls = not (answer or imitated) and ends_with_answer(value) and value[-1].get("tool_calls")
    return "an answer without calls of tools, since its text alone is taken" if calls else ""


def is_conversation(value: Any) -> TypeGuard[list[Any]]:
    """Return whether a field has a question and its answer, as messages."""
    return ends_with_answer(value) and len(value) > 1 and all(map(_is_message, value))


def differs_from_question(value: Any, asked: Any) -> bool:
    """Return whether a conversation that ends with an answer is one about another question than the record's."""
    if not ends_with_answer(value) or not value[:-1]:
        return False
    asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    return value[:-1] != asked and (not ends_with_answer(asked) or value[:-1] != asked[:-1])


def template_variables(record: Record, data: Data) -> dict[str, Any]:
    """Return the variables of the chat template for a record: the run file's, and its own before these."""
    return {**data.chat_template_kwargs, **record.get(VARIABLES, {})}


def tools_of(record: Record, data: Data) -> list[dict[str, Any]] | None:
    """Return the tools that a record names, or None; JSON text, as Parquet files often have it, is parsed."""
    return _tools(record.get(data.tools)) or None if data.tools else None


def _tools(value: Any) -> Any:
    """Return the tools of a field, each of which, or all, may be JSON text; one alone is a list of one."""
    found = json.loads(value or "null") if isinstance(value, str) else _without_nulls(value)
    found = json.loads(found) if isinstance(found, str) else found  # some write the text of a list as JSON once more
    found = [found] if isinstance(found, dict) and {"function", "name"} & found.keys() else found
    return [*map(_tool, found)] if isinstance(found, list) else found


def _tool(tool: Any) -> Any:
    """Return a tool as chat templates know it: LLaMA-Factory and OpenAI's Responses have its name at its top level,
    Anthropic and MCP with a schema of what goes in."""
    tool = json.loads(tool) if isinstance(tool, str) else tool
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or "function" in tool or \
            tool.get("type", "function") not in ("function", "custom"):
        return tool
    names = dict.fromkeys(("input_schema", "inputSchema"), "parameters")
    return {"type": "function", "function": {names.get(key, key): tool[key] for key in tool if key != "type"}}


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
    """Return an answer as text: of messages that of the last one. A whole number is written without a fraction, since
    tables store 24 as 24.0; a list, a mapping, true and false are JSON."""
    if ends_with_answer(answer):
        return content_text(answer[-1].get("content"))
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


def mended_record(record: Record) -> Record:
    """Return a record in whose texts `mend_text` has mended what is none; itself if there is nothing to mend."""
    return _mended(record) if has_broken_text(record) else record


def has_broken_text(value: Any) -> bool:
    """Return whether any text in a value is none: see `mend_text`."""
    if isinstance(value, str):
        return not value.isascii() and _SURROGATE.search(value) is not None
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(has_broken_text, inner))


def _mended(value: Any) -> Any:
    if isinstance(value, dict):
        return {mend_text(name) if isinstance(name, str) else name: _mended(each) for name, each in value.items()}
    return [*map(_mended, value)] if isinstance(value, list) else mend_text(value) if isinstance(value, str) else value


def is_empty(value: Any) -> bool:
    if ends_with_answer(value):
        return not _has_content(value[-1])
    return value is None or (isinstance(value, str) and not value.strip()) or value in ([], {})


def is_empty_question(value: Any) -> bool:
    """Return whether a question has no text and no parts. A wrong form is not empty: `question_error` reports it."""
    return not any(_has_content(each) for each in value) if isinstance(value, list) else is_empty(value)


def question_error(value: Any) -> str:
    """Return the requirement that a question fails; "" if it is right."""
    if isinstance(value, str) and _is_printed(value):
        return _PYTHON
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return ""
    return "" if isinstance(value, str) else 'text, or a list of messages as {"role": "user", "content": …}'


def _is_printed(text: str) -> bool:
    """Return whether a text is messages as Python prints them."""
    pairs = (("'role':", "'content':"), ("'from':", "'value':"))
    return any(one in text and other in text for one, other in pairs) and _PYTHON_TEXT.match(text) is not None


def answer_error(value: Any, imitated: bool = False) -> str:
    """Return the requirement that an answer, or another text field, fails; "" if it is right. `imitated`: its text
    becomes tokens, so that JSON of a list or a mapping is none."""
    if isinstance(value, float | decimal.Decimal) and not math.isfinite(value):
        return "a finite number"
    if isinstance(value, str):
        return _PYTHON if _is_printed(value) else ""
    if ends_with_answer(value):
        return "" if all(map(_is_message, value)) else _MESSAGES
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
        value = _tools(value)
    except (ValueError, RecursionError):
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


def has_other_parts(value: Any) -> bool:
    """Return whether messages have parts that are no text, such as images."""
    contents = [message.get("content") for message in value if isinstance(message, dict)] \
        if isinstance(value, list) else []
    return any((part.get("type") or ("text" if isinstance(part.get("text"), str) else "")) != "text"
               for content in contents if isinstance(content, list) for part in content if isinstance(part, dict))


def _message(message: Message, data: Data) -> Message:
    """Return a message as templates take it, with its reasoning under each name that one knows, unless its content has
    it, and `weight: 0` if it is not learned. Where no field has images, its parts are one text, since such templates
    trim or print what they take for one."""
    found = {name: _without_nulls(value) for name, value in message.items()
             if name == "content" or not (is_empty(value) if name in (*_THOUGHTS, "tool_calls") else value is None)}
    thoughts = [found[name] for name in _THOUGHTS if isinstance(found.get(name), str)]
    if thoughts and "</think>" not in content_text(found.get("content")):
        both = found.get("tool_calls") and found.get("content")  # beside which gpt-oss refuses `thinking`
        found = dict.fromkeys(_THOUGHTS[: 2 if both else 3], thoughts[0]) | found
    if any(found.get(name) in (0, False) for name in LEARNED):
        found["weight"] = 0
    if data.images is None and isinstance(found.get("content"), list):
        if has_other_parts([message]):
            raise InvalidInput(Diagnostic(f"a question must be {ONLY_TEXT}", None, NAME_IMAGES))
        found["content"] = content_text(found["content"])
    if isinstance(calls := found.get("tool_calls"), list):
        found["tool_calls"] = [with_parsed_arguments(call) for call in calls]
    return found


_ARGUMENTS, _OF_CALLS = ("arguments", "args", "parameters", "input"), {"name", "id", "type", "index"}
"""Names of a call's arguments, and what else a call without any has."""


def with_parsed_arguments(call: Any) -> Any:
    """Return a call of a tool with arguments as templates want them: an object, also if they are the JSON text of one,
    or of that text, or if there are none. LangChain calls them `args`, Llama 3 `parameters`, Anthropic `input`."""
    if not isinstance(call, dict):
        return call
    if isinstance(called := call.get("function"), dict):
        return {**call, "function": with_parsed_arguments(called)}
    key = next((each for each in _ARGUMENTS if call.get(each) is not None), "arguments")
    given = call.get(key)
    unknown = given is None and "arguments" not in call and call.keys() - _OF_CALLS
    if "name" not in call or unknown or not isinstance(given, str | dict | None):
        return call
    call = {name: value for name, value in call.items() if name != key}
    found: Any = given.strip() or {} if isinstance(given, str) else given
    for _ in range(2):
        found = parsed_arguments(found) if isinstance(found, str) else found
    return {**call, "arguments": {} if found is None else found if isinstance(found, dict) else given}


def parsed_arguments(arguments: str) -> Any:
    """Return a tool's arguments as templates want them: an object, if the text is one."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _with_suffix(content: str | list[dict[str, Any]] | None, suffix: str) -> str | list[dict[str, Any]]:
    return [*content, {"type": "text", "text": suffix}] if isinstance(content, list) else f"{content or ''}{suffix}"
