"""Converts the turns of a conversation to tokens by the tokenizer's chat template."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distflow.config.models import lack_of, template_options
from distflow.config.run import Data
from distflow.data.problems import content_text
from distflow.errors import InvalidInput

_ANSWER, _OBSERVATION = "\ue001answer\ue001", "\ue002observation\ue002"  # markers that no template contains
tokenizer_lock = threading.Lock()  # a tokenizer keeps state between calls: threads must not interleave


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    return cast(int, tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, question: str | list[dict[str, Any]],
                  tools: list[dict[str, Any]] | None = None, **options: Any) -> list[int]:
    """Return the tokens of a question (text or chat messages). A final message of the assistant is continued. The
    `options` are variables of the chat template."""
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    with tokenizer_lock:
        if not tokenizer.chat_template:
            return tokenizer("".join(f"{content_text(message.get('content'))}\n" for message in messages))["input_ids"]
        continues, render = messages[-1]["role"] == "assistant", cast(Any, tokenizer.apply_chat_template)
        return render(messages, tools=tools, add_generation_prompt=not continues, continue_final_message=continues,
                      return_dict=False, **options)


def require_template(tokenizer: PreTrainedTokenizerBase, data: Data) -> None:
    """Check the tokenizer as `distflow.config.models.check_chat_options` checks its files."""
    for option, path in template_options(data).items():
        if lacks := lack_of(option, str(tokenizer.chat_template or "")):
            raise InvalidInput(f"`{'.'.join(path)}` would change nothing: the tokenizer's chat template {lacks}. Take "
                               "it out of the run file, or give the role a model whose template has it")


class TurnTemplate:
    """Tokens between a sampled answer and the next one: the template's text around messages by others, derived once
    from a known conversation, so that no sampled token is encoded again. Special tokens of messages are plain text.
    `options`: variables of the template, as the prompt had them. Raises InvalidInput: the template cannot render such a
    conversation."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_tokens: list[int],
                 role: Literal["user", "tool"] = "user", options: Mapping[str, Any] | None = None):
        self.tokenizer, self.end_tokens, self.options = tokenizer, set(end_tokens), options or {}
        self.role: Literal["user", "tool"] = role
        self.around: dict[tuple[str, ...], list[list[int]]] = {}  # by the roles of the messages
        self._around((role,))

    def with_options(self, **options: Any) -> TurnTemplate:
        """Return the same with further variables of the template."""
        merged = {**self.options, **options}
        return self if merged == self.options else TurnTemplate(self.tokenizer, [*self.end_tokens], self.role, merged)

    def ended(self, answer: Tensor) -> bool:
        """Return whether an answer has its end token: not if it was cut off or ended by `generation.stop`."""
        return len(answer) > 0 and int(answer[-1]) in self.end_tokens

    def tokens(self, observation: str, ended: bool) -> list[int]:
        """Return the tokens around `observation`; unless the answer has `ended`, they start with the end token."""
        return self.of_messages([(self.role, observation)], ended)

    def of_messages(self, messages: Sequence[tuple[str, str]], ended: bool) -> list[int]:
        """Return the tokens of (role, text) messages and around them, as `tokens` does for one."""
        before, *after = self._around(tuple(role for role, _ in messages))
        ends = [place for place, token in enumerate(before) if token in self.end_tokens] if ended else []
        found = before[ends[0] + 1 :] if ends else list(before)
        for (_, text), behind in zip(messages, after):
            with tokenizer_lock:
                found += self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            found += behind
        return found

    def into_prompt(self, prompt: Tensor, text: str) -> list[int]:
        """Return the tokens of a prompt with `text` behind its last message. Raises InvalidInput: it has no end there,
        as when the template writes one that no message of a user has."""
        with tokenizer_lock:
            text = f"\n{text}" if text else ""
            added = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        tokens, end = prompt.tolist(), self._around(("user",))[-1]
        if not self.tokenizer.chat_template:
            return [*tokens, *added, *end]
        places = [place for place in range(len(tokens)) if tokens[place : place + len(end)] == end]
        if not end or not places:
            raise InvalidInput("a prompt does not end as the chat template ends a user's message, so that nothing can "
                               "be put behind its question: the last message of the data must be the user's")
        return [*tokens[: places[-1]], *added, *tokens[places[-1] :]]

    def _around(self, roles: tuple[str, ...]) -> list[list[int]]:
        if roles not in self.around:
            texts = _texts_around(self.tokenizer, roles, self.options) if self.tokenizer.chat_template else \
                ["\n"] * (len(roles) + 1)
            with tokenizer_lock:
                self.around[roles] = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        return self.around[roles]


def _texts_around(tokenizer: PreTrainedTokenizerBase, roles: tuple[str, ...], options: Mapping[str, Any]) -> list[str]:
    marks = [f"{_OBSERVATION}{number}\ue003" for number in range(len(roles))]
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER},
                *({"role": role, "content": mark} for role, mark in zip(roles, marks))]
    why = ""
    try:
        with tokenizer_lock:
            render = cast(Any, tokenizer.apply_chat_template)
            text = str(render(messages, add_generation_prompt=True, tokenize=False, **options))
    except TemplateError as error:
        text, why = "", f": {error}"
    found, rest = [], text.partition(_ANSWER)[2]
    for role, mark in zip(roles, marks):
        before, there, rest = rest.partition(mark)
        if not there:
            other = "user" if role == "tool" else "tool"
            raise InvalidInput(f"the tokenizer's chat template writes no turn of `{role}` after one of `assistant`{why}"
                               f". Instead:  with: {{observation_role: {other}}}   or give the tokenizer another "
                               "template")
        found.append(before)
    return [*found, rest]
