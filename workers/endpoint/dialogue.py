"""The one trajectory of a row: which tokens each request adds to what was sampled before.

A first request is the prompt. Each later one begins with all that was said before, as it was said, and only what
follows is encoded: the sampled tokens stay as they are. One that says something else (a branch, a shortened history) is
refused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from distflow.errors import InvalidInput
from workers.endpoint.messages import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    RequestRefused,
    ServedTurn,
    find_tool_calls,
)
from workers.engines.chat import (
    UNRENDERED,
    TurnTemplate,
    continued_tokens,
    prompt_tokens,
    render_prompt,
    render_whole,
    sampled_text,
    text_tokens,
)


class AnsweredTurn(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    version: int  # of the weights at its last token
    finished: bool  # not cut off


@dataclass(frozen=True)
class DialogueLimits:
    """Most turns of a row, tokens after its prompt, tokens of one turn, tokens of its prompt."""

    turns: int
    tokens: int
    new_tokens: int
    prompt_tokens: int
    stop: tuple[str, ...] = ()  # texts that end a turn


class Addition(NamedTuple):
    """Tokens before the next turn: the prompt, or what stands between two turns. `limit`: longest turn in tokens."""

    tokens: list[int]
    limit: int
    text: str  # shown in trajectories


@dataclass
class Dialogue:
    name: str  # of the row, in ids of answers
    tokenizer: PreTrainedTokenizerBase
    between: TurnTemplate
    limits: DialogueLimits
    messages: list[ChatMessage] = field(default_factory=list)  # what was said, sampled turns among it
    tools: list[dict[str, Any]] | None = None
    text: str = ""  # the same of plain completions
    tokens: list[int] = field(default_factory=list)
    prompt: int = 0  # length of the prompt in tokens
    turns: int = 0
    ended: bool = False  # the last turn has its end token
    cut: bool = False  # a limit has refused a request

    def addition(self, request: ChatRequest | CompletionRequest) -> Addition:
        """Return what a request adds. Raises RequestRefused; the dialogue is then as before."""
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        if unknown := [text for text in stops if text not in self.limits.stop]:
            raise RequestRefused(f"a turn cannot end at {', '.join(map(repr, unknown))}: name it in the run file,  "
                                 f"generation: {{stop: {[*self.limits.stop, *unknown]}}}", "unsupported_parameter")
        tokens, text = self._chat(request) if isinstance(request, ChatRequest) else self._completion(request)
        return Addition(tokens, self._room(len(tokens), request.limit), text)

    def sampled(self, request: ChatRequest | CompletionRequest, addition: Addition, turn: AnsweredTurn) -> ServedTurn:
        """Take up a sampled turn, and return it as it is answered."""
        self.prompt = self.prompt if self.turns else len(addition.tokens)
        before = [*self.tokens, *addition.tokens]
        self.tokens, self.turns = [*before, *turn.tokens], self.turns + 1
        self.ended = bool(turn.tokens) and turn.tokens[-1] in self.between.end_tokens
        text = sampled_text(self.tokenizer, turn.tokens, self.between.end_tokens)
        name = f"{self.name}-{self.turns}"
        if isinstance(request, CompletionRequest):
            self.text = request.prompt + text if isinstance(request.prompt, str) else ""
            return ServedTurn(f"cmpl-{name}", before, *turn, text)
        with_calls = request.tools and request.tool_choice != "none"
        text, calls = find_tool_calls(text, name, request.tools) if with_calls else (text, [])
        served = ServedTurn(f"chatcmpl-{name}", before, *turn, text, calls)
        self.messages, self.tools = [*request.messages, served.message], request.tools
        return served

    def _chat(self, request: ChatRequest) -> tuple[list[int], str]:
        messages = request.messages
        if messages[-1].role == "assistant":
            raise RequestRefused("the last message is the assistant's: a turn is sampled whole, and not continued")
        try:
            between = self.between.with_options(**request.variables)
        except (InvalidInput, *UNRENDERED) as error:
            raise RequestRefused(f"the chat template refuses {request.variables}: {str(error)[:300]}") from None
        if not self.turns:
            try:
                tokens = prompt_tokens(self.tokenizer, [each.for_template() for each in messages], request.tools,
                                       **between.options)
            except UNRENDERED as error:
                raise RequestRefused(f"the chat template cannot render these messages: {str(error)[:300]}") from None
            if request.tools and request.tool_choice != "none":
                self._require_readable_calls(request.tools, between.options)
            return tokens, messages[-1].text
        if not self.messages:
            raise RequestRefused("the row began with /v1/completions, and is one trajectory: go on there",
                                 "not_extended")
        new = self._following(messages)
        if (request.tools or []) != (self.tools or []):
            raise RequestRefused("other `tools` than in the row's first request, of which the prompt was made",
                                 "not_extended")
        try:
            tokens = between.of_messages([("system" if each.role == "developer" else each.role, each.text)
                                          for each in new], self.ended)
        except InvalidInput as error:
            roles = ", ".join(each.role for each in new)
            raise RequestRefused(f"the chat template cannot render {roles} after a turn of the assistant: "
                                 f"{str(error)[:300]}") from None
        return tokens, "\n".join(each.text for each in new)

    def _require_readable_calls(self, tools: list[dict[str, Any]], options: Mapping[str, Any]) -> None:
        """Raise RequestRefused if the chat template writes a call in a form that is not read, as no turn had calls."""
        name, asked = str(tools[0].get("function", tools[0]).get("name")), [{"role": "user", "content": "?"}]
        call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": {}}}
        said = [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            prompt, whole = (render(self.tokenizer, messages, tools, **options)
                             for render, messages in ((render_prompt, asked), (render_whole, said)))
        except UNRENDERED:
            return  # as where it takes calls with an answer alone
        written = whole[len(os.path.commonprefix([prompt, whole])) :]
        if name in written and not find_tool_calls(written, "", tools)[1]:
            raise RequestRefused(f"the chat template writes a call of a tool as {written[:200]!r}, and calls are read "
                                 'as <tool_call>{"name": …, "arguments": {…}}</tool_call>, or in tags as Qwen3.5 has '
                                 "them. Take a model with such a template, or read the calls of its texts yourself, "
                                 "without `tools`", "unsupported_parameter")

    def _following(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        if what := _difference(messages, self.messages):
            raise RequestRefused(
                f"the messages do not extend the {len(self.messages)} of the row so far: {what}. A row is one "
                "trajectory: send all messages so far as they were sent and answered, and then new ones. Branches, "
                "shortened histories and several conversations of one row are not supported", "not_extended")
        return messages[len(self.messages) :]

    def _completion(self, request: CompletionRequest) -> tuple[list[int], str]:
        prompt = request.prompt
        if isinstance(prompt, list):
            if max(prompt) >= len(self.tokenizer):
                raise RequestRefused(f"`prompt` has the token {max(prompt)}, and the vocabulary {len(self.tokenizer)}")
            if prompt[: len(self.tokens)] != self.tokens or self.messages:
                raise self._other_prompt("tokens")
            new = prompt[len(self.tokens) :]
            return new, str(self.tokenizer.decode(new))
        if not prompt.startswith(self.text) or self.messages or (self.turns and not self.text) or not prompt:
            raise self._other_prompt("text")
        rest = prompt[len(self.text) :]
        return (continued_tokens if self.turns else text_tokens)(self.tokenizer, rest), rest

    @staticmethod
    def _other_prompt(what: str) -> RequestRefused:
        return RequestRefused(f"the prompt does not begin with the {what} of the row so far: prompts and answers, in "
                              "their order. Branches of a row are not supported", "not_extended")

    def _room(self, new: int, wanted: int | None) -> int:
        limits = self.limits
        if not self.turns and not new:
            raise RequestRefused("the prompt has no tokens")
        if not self.turns and new > limits.prompt_tokens:
            self.cut = True
            raise RequestRefused(f"the prompt has {new} tokens, and the node's `max_prompt_tokens` is "
                                 f"{limits.prompt_tokens}", "context_length_exceeded")
        after = len(self.tokens) - self.prompt + new if self.turns else 0
        if self.turns >= limits.turns or after >= limits.tokens:
            self.cut = True
            raise RequestRefused(f"the row has {self.turns} turns and would have {after} tokens after its prompt; "
                                 f"`max_turns` is {limits.turns} and `max_tokens` {limits.tokens}",
                                 "context_length_exceeded")
        return min(limits.new_tokens, limits.tokens - after, wanted or limits.new_tokens)


def _difference(given: list[ChatMessage], known: list[ChatMessage]) -> str:
    """Return why messages do not extend those that are known; "" if they do."""
    for index, (one, other) in enumerate(zip(given, known)):
        if not one.says_the_same(other):
            return f"message {index}, of role {one.role}, is another one"
    if len(given) <= len(known):
        return "they end before the last turn"
    added = any(each.role == "assistant" for each in given[len(known) :])
    return "a turn of the assistant follows that was not sampled" if added else ""
