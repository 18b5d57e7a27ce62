"""Bodies of the OpenAI API as far as an agent can use it: requests that are read, answers that are written.

What a request cannot have (several choices, other likely tokens, a forced tool) is refused by name. How tokens are
drawn is the run's: `temperature`, `top_p`, `seed` and penalties of a request change nothing.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, PositiveInt, ValidationError, field_validator

from distflow.config.run import NO_VARIABLES
from distflow.data.problems import mended_record, parsed_arguments, with_parsed_arguments
from distflow.errors import DistflowError
from distflow.telemetry.run_folder import finite

MAX_MESSAGES = 1000
_CALL = re.compile(r"<tool_call>\s*(\{.*?\}|<function=.*?</function>)\s*</tool_call>", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^<>\s]+)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>", re.DOTALL)
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (None, 1), "best_of": (None, 1), "top_logprobs": (None, 0), "tool_choice": (None, "auto", "none"),
    "response_format": (None, {"type": "text"}), "logit_bias": (None, {}), "echo": (None, False), "suffix": (None, ""),
    "ignore_eos": (None, False), "min_tokens": (None, 0), "continue_final_message": (None, False),
    "add_generation_prompt": (None, True), "stop_token_ids": (None, []), "documents": (None, []),
    **dict.fromkeys(("functions", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
                     "guided_grammar", "chat_template", "prompt_logprobs"), (None,))}
"""Values that a field may have, where others would need another answer than the one that is sampled."""


class RequestRefused(DistflowError):
    """A request that cannot be answered; its sender gets the reason."""

    def __init__(self, message: str, code: str = "invalid_request", status: int = 400):
        super().__init__(message)
        self.code, self.status = code, status

    def body(self) -> dict[str, Any]:
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


def _as_json(arguments: Any) -> Any:
    return json.dumps(arguments) if isinstance(arguments, dict) else arguments


class CalledFunction(BaseModel):
    name: str
    arguments: Annotated[str, BeforeValidator(_as_json)]


class ToolCall(BaseModel):
    id: str
    type: Annotated[Literal["function"], BeforeValidator(lambda kind: kind or "function")] = "function"
    function: CalledFunction


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        content = self.content
        return "".join(part.text for part in content) if isinstance(content, list) else content or ""

    def says_the_same(self, other: ChatMessage) -> bool:
        """Return whether it says the same. White space around what an assistant said does not count: the tokens that
        were sampled stay as they are."""
        mine, theirs = (each.text.strip() if each.role == "assistant" else each.text for each in (self, other))
        return mine == theirs and (self.role, self.meant_calls, self.tool_call_id, self.name) == (
            other.role, other.meant_calls, other.tool_call_id, other.name)

    @property
    def meant_calls(self) -> list[tuple[str, str, Any]]:
        """Calls with their arguments as what the JSON says: clients may write it again in another way."""
        return [(each.id, each.function.name, parsed_arguments(each.function.arguments))
                for each in self.tool_calls or []]

    def for_template(self) -> dict[str, Any]:
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.tool_calls:
            found["tool_calls"] = [with_parsed_arguments(each.model_dump()) for each in self.tool_calls]
        return found | {name: value for name in ("tool_call_id", "name") if (value := getattr(self, name)) is not None}


class StreamOptions(BaseModel):
    include_usage: bool | None = False


class AgentRequest(BaseModel):
    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: PositiveInt | None = None
    stop: str | list[str] | None = None
    return_token_ids: bool = False


class ChatRequest(AgentRequest):
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | None = None
    logprobs: bool = False
    max_completion_tokens: PositiveInt | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] = {}

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_variables(cls, value: dict[str, Any]) -> dict[str, Any]:
        if odd := value.keys() & NO_VARIABLES:
            raise ValueError(f"`{min(odd)}` is no variable of chat templates")
        return value

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        effort = {"reasoning_effort": self.reasoning_effort}
        return {name: value for name, value in {**effort, **self.chat_template_kwargs}.items() if value is not None}

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def with_logprobs(self) -> bool:
        return self.logprobs


class CompletionRequest(AgentRequest):
    prompt: str | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def with_logprobs(self) -> bool:
        return self.logprobs is not None


def read_request(kind: type[ChatRequest] | type[CompletionRequest], body: bytes) -> ChatRequest | CompletionRequest:
    """Return what a body asks for. Raises RequestRefused: it is malformed, or asks for what cannot be had."""
    try:
        given = mended_record(json.loads(body))
        if not isinstance(given, dict):
            raise RequestRefused("the body must be a JSON object")
        for name, allowed in _ONLY.items():
            if given.get(name) not in allowed:
                fitting = " or ".join(map(json.dumps, allowed[1:])) or "left out"
                raise RequestRefused(f"`{name}` must be {fitting} here, not {json.dumps(given[name])[:100]}: each "
                                     "request continues the row's one trajectory by one sampled turn",
                                     "unsupported_parameter")
        return kind.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        deepest = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
        where = ".".join(map(str, deepest["loc"]))
        raise RequestRefused(f"`{where}`: {deepest['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is not JSON: {str(error)[:200]}") from None


@dataclass(frozen=True)
class ServedTurn:
    """Sampled turn as it is answered: `text` without the `calls` of tools in it. `finished`: not cut off."""

    id: str
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    version: int
    finished: bool
    text: str
    calls: list[ToolCall] = field(default_factory=list)

    @property
    def message(self) -> ChatMessage:
        return ChatMessage(role="assistant", content=self.text or None, tool_calls=self.calls or None)

    @property
    def finish_reason(self) -> str:
        return ("tool_calls" if self.calls else "stop") if self.finished else "length"

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": len(self.prompt), "completion_tokens": len(self.tokens),
                "total_tokens": len(self.prompt) + len(self.tokens)}


def find_tool_calls(text: str, name: str, tools: Iterable[Any] | None = None) -> tuple[str, list[ToolCall]]:
    """Return the text before the calls of tools, and these, as Qwen and Hermes models write them, with `parameters` as
    Llama does, or in tags as Qwen3-Coder and Qwen3.5 do; if one of them is malformed, the whole text and none. Calls
    before a `</think>` are none, nor those behind a `<think>` of the text, unless the tag is in a call itself. `name`
    begins their ids. The schemas of `tools` say which arguments in tags are JSON; others are texts."""
    calls, outside = list[ToolCall](), _CALL.sub(_blanked, text)
    thoughts = outside.rfind("</think>") + 1
    if "<think>" in outside[thoughts:]:  # which do not end
        return text, []
    found = [*_CALL.finditer(text, thoughts)]
    for number, match in enumerate(found):
        called = _tagged(match[1], tools or ()) or parsed_arguments(match[1])
        given = called.get("arguments", called.get("parameters")) if isinstance(called, dict) else False
        given = parsed_arguments(given) if isinstance(given, str) and given.strip() else given
        alone = isinstance(called, dict) and not any(isinstance(value, dict) for value in called.values())
        arguments = {} if given in (None, "") and alone else given
        if not isinstance(arguments, dict) or not isinstance(called.get("name"), str):
            return text, []
        function = CalledFunction(name=called["name"], arguments=json.dumps(finite(arguments)))
        calls.append(ToolCall(id=f"call-{name}-{number}", function=function))
    return (text[: found[0].start()].strip() if calls else text), calls


def _blanked(call: re.Match[str]) -> str:
    """Return blanks as long as a call of a tool; the text itself if it is none, as where thoughts mention the tag."""
    return " " * len(call[0]) if _tagged(call[1], ()) or isinstance(parsed_arguments(call[1]), dict) else call[0]


def _tagged(text: str, tools: Iterable[Any]) -> dict[str, Any] | None:
    """Return the call that `<function=NAME>` writes with a `<parameter=NAME>` for each argument; None if it is none."""
    function = _FUNCTION.fullmatch(text)
    if not function or _PARAMETER.sub("", function[2]).strip():
        return None
    given, kinds = _PARAMETER.findall(function[2]), _kinds(function[1], tools)
    if len(dict(given)) < len(given):
        return None
    return {"name": function[1], "arguments": {
        key: value if kinds.get(key, "string") == "string" else parsed_arguments(value) for key, value in given}}


def _kinds(name: str, tools: Iterable[Any]) -> dict[str, Any]:
    """Return the type of each parameter of a tool; None where its schema has none."""
    for tool in tools:
        found = tool.get("function", tool) if isinstance(tool, dict) else None
        if isinstance(found, dict) and found.get("name") == name and isinstance(found.get("parameters"), dict):
            properties = found["parameters"].get("properties")
            return {key: each.get("type") if isinstance(each, dict) else None for key, each in properties.items()} \
                if isinstance(properties, dict) else {}
    return {}


def response_body(request: ChatRequest | CompletionRequest, turn: ServedTurn, created: int,
                  decode: Callable[[int], str]) -> dict[str, Any]:
    """Return the body of an answer. `decode` gives the text of one token."""
    kind = "chat.completion" if isinstance(request, ChatRequest) else "text_completion"
    return {**_head(request, turn, created, kind), "choices": [_choice(request, turn, decode)], "usage": turn.usage,
            **({"prompt_token_ids": turn.prompt} if request.return_token_ids else {})}


def stream_chunks(request: ChatRequest | CompletionRequest, turn: ServedTurn, created: int,
                  decode: Callable[[int], str]) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a streamed answer: a turn is sampled whole, so that one chunk holds all of its text."""
    kind = "chat.completion.chunk" if isinstance(request, ChatRequest) else "text_completion"
    head, choice = _head(request, turn, created, kind), _choice(request, turn, decode)
    head |= {"prompt_token_ids": turn.prompt} if request.return_token_ids else {}
    usage = {"usage": None} if request.stream_options.include_usage else {}
    if isinstance(request, ChatRequest):
        message = choice.pop("message")
        calls = [{"index": index, **call} for index, call in enumerate(message.pop("tool_calls", []))]
        delta = {**message, **({"tool_calls": calls} if calls else {})}
        yield {**head, "choices": [{**choice, "delta": delta, "finish_reason": None}], **usage}
        last = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": turn.finish_reason}
    else:
        yield {**head, "choices": [{**choice, "finish_reason": None}], **usage}
        last = {"index": 0, "text": "", "logprobs": None, "finish_reason": turn.finish_reason}
    yield {**head, "choices": [last], **usage}
    if usage:
        yield {**head, "choices": [], "usage": turn.usage}


def _head(request: AgentRequest, turn: ServedTurn, created: int, kind: str) -> dict[str, Any]:
    return {"id": turn.id, "object": kind, "created": created, "model": request.model,
            "system_fingerprint": f"weights-{turn.version}"}


def _choice(request: ChatRequest | CompletionRequest, turn: ServedTurn, decode: Callable[[int], str]) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": turn.finish_reason}
    texts = [decode(token) for token in turn.tokens] if request.with_logprobs else []
    if isinstance(request, ChatRequest):
        message: dict[str, Any] = {"role": "assistant", "content": turn.message.content, "refusal": None}
        choice["message"] = message | ({"tool_calls": [each.model_dump() for each in turn.calls]} if turn.calls else {})
        if texts:
            choice["logprobs"] = {"content": [
                {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else [*text.encode()],
                 "top_logprobs": []} for text, logprob in zip(texts, turn.logprobs)], "refusal": None}
    else:
        choice["text"] = turn.text
        if texts:
            offsets = [0, *itertools.accumulate(map(len, texts[:-1]))]
            choice["logprobs"] = {"tokens": texts, "token_logprobs": turn.logprobs, "top_logprobs": None,
                                  "text_offset": offsets}
    return choice | ({"token_ids": turn.tokens} if request.return_token_ids else {})
