"""The turns of a conversation as tokens, by the tokenizer's chat template."""

from __future__ import annotations

import threading
from typing import Any, Literal

from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from distflow.config.run import Data
from distflow.data.problems import content_text
from distflow.errors import InvalidInput

_ANSWER, _OBSERVATION = "\ue001answer\ue001", "\ue002observation\ue002"
"""Texts that no template writes of its own."""
encoding = threading.Lock()
"""A tokenizer keeps how it is to treat special tokens from one call to the next: two threads would mix that up."""


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, question: str | list[dict[str, Any]],
                  tools: list[dict[str, Any]] | None = None, enable_thinking: bool | None = None) -> list[int]:
    """Return the tokens of a question, text or chat messages, by the chat template; without one, as it is, each message
    on a line of its own.

    Messages that end with one of the assistant have it gone on with.
    """
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    with encoding:
        if not tokenizer.chat_template:
            return tokenizer("".join(f"{content_text(message.get('content'))}\n" for message in messages))["input_ids"]
        more = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        begun = messages[-1]["role"] == "assistant"
        return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=not begun,
                                             continue_final_message=begun, return_dict=False, **more)


def require_template(tokenizer: PreTrainedTokenizerBase, data: Data) -> None:
    """
    Raises:
        InvalidInput: the data has what the chat template knows no place for, so that the model would never see it.
    """
    template = str(tokenizer.chat_template or "")
    wanted = {"enable_thinking": data.enable_thinking is not None, "tools": data.tools is not None}
    for name in (name for name, wished in wanted.items() if wished and name not in template):
        lacks = f"does not know `{name}`" if template else "is missing"
        raise InvalidInput(f"`data.{name}` would change nothing: the tokenizer's chat template {lacks}. Take it out of "
                           "the run file, or give the role a model whose template has it")


class Between:
    """The tokens between a sampled answer and the next one: what the template writes around an observation.

    They are found once, from a conversation in which answer and observation are known texts; no sampled token is ever
    decoded and encoded again. Special tokens that stand in an observation's text are mere text.

    Args:
        end_tokens: any of them ends an answer.
        role: whose turn the observation is.

    Raises:
        InvalidInput: the template does not write such a conversation; proposes the other role.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_tokens: list[int],
                 role: Literal["user", "tool"] = "user"):
        self.tokenizer, self.end_tokens = tokenizer, set(end_tokens)
        before, after = _around(tokenizer, role) if tokenizer.chat_template else ("\n", "\n")
        with encoding:
            self.before, self.after = (tokenizer(text, add_special_tokens=False)["input_ids"]
                                       for text in (before, after))
        ends = [place for place, token in enumerate(self.before) if token in end_tokens]
        self._behind_end = self.before[ends[0] + 1 :] if ends else self.before

    def ended(self, answer: Tensor) -> bool:
        """Whether an answer has its end token: not if it was cut off, or ended by a text of `generation.stop`."""
        return len(answer) > 0 and int(answer[-1]) in self.end_tokens

    def tokens(self, observation: str, ended: bool) -> list[int]:
        """`ended`: the answer before has its end token; else the template's is put after it."""
        with encoding:
            text = self.tokenizer(observation, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        return [*(self._behind_end if ended else self.before), *text, *self.after]


def _around(tokenizer: PreTrainedTokenizerBase, role: str) -> tuple[str, str]:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER},
                {"role": role, "content": _OBSERVATION}]
    why = ""
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        text, why = "", f": {error}"
    before, found, after = text.partition(_ANSWER)[2].partition(_OBSERVATION)
    if not found:
        other = "user" if role == "tool" else "tool"
        raise InvalidInput(f"the tokenizer's chat template writes no turn of `{role}` after one of `assistant`{why}. "
                           f"Instead:  with: {{observation_role: {other}}}   or give the tokenizer another template")
    return before, after
