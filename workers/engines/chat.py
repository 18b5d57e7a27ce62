"""Converts text to tokens and sampled tokens to text, for every caller.

A conversation is rendered by the tokenizer's chat template and encoded whole: a row has the tokens that
`apply_chat_template` gives. A part that is encoded later (an observation, an answer) is encoded behind what precedes
it, since a tokenizer may write a text otherwise at the beginning than within.
"""

from __future__ import annotations

import bisect
import json
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast
from weakref import WeakKeyDictionary

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from distflow.config.run import Data
from distflow.config.templates import lack_of, template_options
from distflow.data.problems import Message, content_text, mend_text
from distflow.errors import InvalidInput

if TYPE_CHECKING:
    from torch import Tensor

_ANSWER = "\ue001answer\ue001"  # marker that no template contains
_LINES = ("{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
          "{% elif message['content'] %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
          "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}")
"""Template of tokenizers that have none: each message is a line."""
_BEFORE = "a"  # stands before a text that is encoded as one that does not begin there
UNRENDERED = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template raises for messages or tools that it does not expect."""
_OPENING_TAG = re.compile(r"<\w+>\s*\Z")

Tools = list[dict[str, Any]] | None
tokenizer_lock = threading.Lock()  # a tokenizer keeps state between calls: threads must not interleave


class ImitatedTokens(NamedTuple):
    """Conversation from which a model learns. `mask`: which tokens of `target` it learns."""

    prompt: list[int]
    target: list[int]
    mask: list[bool]


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int:
    return cast(int, tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, plain: bool = False) -> list[int]:
    """Return the tokens of a text, without any that a tokenizer puts around it. `plain`: special tokens in it are mere
    letters."""
    with tokenizer_lock:
        return tokenizer(mend_text(text), add_special_tokens=False, split_special_tokens=plain)["input_ids"]


def encode_behind(tokenizer: PreTrainedTokenizerBase, before: str, text: str, plain: bool = False) -> list[int]:
    """Return the tokens of a text as they stand behind another one; those of the text alone where the two merge."""
    known, whole = (encode(tokenizer, each, plain) for each in (before, before + text))
    return whole[len(known) :] if whole[: len(known)] == known else encode(tokenizer, text, plain)


def text_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text that begins a row: behind the token with which the tokenizer begins texts, unless the
    text has it, and without the one with which it may end them."""
    tokens, first = encode(tokenizer, text), _first_tokens(tokenizer)
    return tokens if tokens[: len(first)] == first else [*first, *tokens]


def continued_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text behind a row's tokens."""
    return encode_behind(tokenizer, _BEFORE, text)


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, question: str | list[Message], tools: Tools = None,
                  **options: Any) -> list[int]:
    """Return the tokens of a question (text or chat messages). A final message of the assistant is continued. The
    `options` are variables of the chat template."""
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    return _tokens(tokenizer, render_prompt(tokenizer, messages, tools, **options))


def sampled_text(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], ends: Collection[int] = ()) -> str:
    """Return the text of sampled tokens: all of them but ends and padding. Tags that are special tokens stay."""
    silent = {*end_tokens(tokenizer, ends), cast(Any, tokenizer.pad_token_id)}
    return _decoded(tokenizer, [token for token in tokens if token not in silent])


def imitated_tokens(tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: Tools = None,
                    turns: Literal["last", "all"] = "last", known_ends: Collection[int] = (),
                    **options: Any) -> ImitatedTokens:
    """Return the tokens of a conversation as a model learns from it: what precedes the last message of the assistant,
    or with `turns="all"` the first one, and what follows up to the end of the last one. Each message of the assistant
    is learned with the end of its turn; one of `weight: 0` is not. Where the template writes no end, it is `eos_token`,
    and behind an earlier message the first token of the next one if that is one of `known_ends`."""
    text = _render(tokenizer, messages, tools, options)
    tokens, stop_of = _with_stops(tokenizer, text)
    ends, spans = _remembered(tokenizer, "ends", options, _find_ends), []
    said = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    known = _earlier_answers(tokenizer, text, messages, said, tools, options) if turns == "all" else {}
    weighed = [place for place in said if messages[place].get("weight") != 0]
    if not weighed:
        raise InvalidInput("nothing of it is learned: each message of the assistant has `weight: 0`")
    for place in weighed if turns == "all" else weighed[-1:]:
        found = known.get(place) or _learned_text(tokenizer, text, messages, place, tools, options)
        if not found and turns == "all":
            raise InvalidInput(f"the tokens of message {place + 1}, which is the assistant's, cannot be told from the "
                               "others' in the chat template's text. To learn the last message alone:  targets: last")
        start, stop = found or (len(text), len(text))
        first = _first_token(tokenizer, text, tokens, start, stop_of)
        last = bisect.bisect_left(range(len(tokens)), stop, key=stop_of) + 1 if stop > start else first
        end, rest = ends[place != said[-1]], range(max(first, last - 1), len(tokens))
        behind = (index for index in (rest[::-1] if place == said[-1] else rest) if tokens[index] == end)
        opens_next = end is None and place != said[-1] and last < len(tokens) and tokens[last] in known_ends
        spans.append((first, last + 1 if opens_next else next(behind, last - 1) + 1))
    begin, until = spans[0][0], spans[-1][1]
    target, learned = tokens[begin:until], {index for span in spans for index in range(*span)}
    mask = [index in learned for index in range(begin, until)]
    if not target or target[-1] not in (ends[weighed[-1] != said[-1]], tokenizer.eos_token_id, *known_ends):
        if tokenizer.eos_token_id is None:
            raise InvalidInput("neither the tokenizer nor its chat template ends an answer: set `eos_token` in the "
                               "model's tokenizer_config.json")
        target, mask = [*target, cast(int, tokenizer.eos_token_id)], [*mask, True]
    return ImitatedTokens(tokens[:begin], target, mask)


def template_end(tokenizer: PreTrainedTokenizerBase, **options: Any) -> int | None:
    """Return the token by which the chat template ends a turn of the assistant; None if it writes none."""
    return _remembered(tokenizer, "ends", options, _find_ends)[0]


def end_tokens(tokenizer: PreTrainedTokenizerBase, known: Iterable[int] = (), **options: Any) -> list[int]:
    """Return the tokens that end an answer: the template's, the tokenizer's and those `known` beside them."""
    ends = {*known, template_end(tokenizer, **options), cast(Any, tokenizer.eos_token_id)}
    return sorted(int(end) for end in ends if end is not None)


def prompt_opening(tokenizer: PreTrainedTokenizerBase, **options: Any) -> str:
    """Return the tag with which the template's prompt begins an answer, such as "<think>"; "" if there is none."""
    return _remembered(tokenizer, "opening", options, _find_opening)


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: Tools = None,
                  **options: Any) -> str:
    """Return the text of a prompt by the chat template. A last message of the assistant that says nothing yet is left
    to the template, which begins it."""
    last, continues = messages[-1], messages[-1]["role"] == "assistant"
    if continues and len(messages) > 1 and not (content_text(last.get("content")) or last.get("tool_calls")):
        messages, continues = messages[:-1], False
    return _render(tokenizer, messages, tools, options, add_generation_prompt=not continues,
                   continue_final_message=continues)


def render_whole(tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: Tools = None,
                 **options: Any) -> str:
    """Return the text of a whole conversation by the chat template."""
    return _render(tokenizer, messages, tools, options)


def require_template(tokenizer: PreTrainedTokenizerBase, data: Data) -> None:
    """Check the tokenizer as `distflow.config.templates.check_chat_options` checks its files."""
    for option, path in template_options(data).items():
        if lacks := lack_of(option, str(tokenizer.chat_template or "")):
            raise InvalidInput(f"`{'.'.join(path)}` would change nothing: the tokenizer's chat template {lacks}. Take "
                               "it out of the run file, or give the role a model whose template has it")


class TurnTemplate:
    """Tokens between a sampled answer and the next one: the template's text around messages by others, rendered behind
    a known conversation, so that no sampled token is encoded again. Special tokens of messages are plain text.
    `options`: variables of the template, as the prompt had them. Raises InvalidInput: the template cannot render such
    a conversation."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_tokens: list[int],
                 role: Literal["user", "tool"] = "user", options: Mapping[str, Any] | None = None):
        self.tokenizer, self.end_tokens, self.options = tokenizer, set(end_tokens), options or {}
        self.role: Literal["user", "tool"] = role
        self.special = _SpecialTexts(tokenizer)
        self.rendered: set[tuple[str, ...]] = set()  # roles of messages that the template renders
        self._require(role)

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
        self._require(*(role for role, _ in messages))
        text = self._behind_answer([{"role": role, "content": self.special.mark(text)} for role, text in messages])
        tokens = self.special.encode_behind(_BEFORE, text)
        ends = [place for place, token in enumerate(tokens) if token in self.end_tokens] if ended else []
        return tokens[ends[0] + 1 :] if ends else tokens

    def into_prompt(self, prompt: Tensor, text: str) -> list[int]:
        """Return the tokens of a prompt with `text` behind its last message. Raises InvalidInput: it has no end there,
        as when the template writes one that no message of a user has."""
        self._require("user")
        tokens, added = prompt.tolist(), self.special.mark(f"\n{text}" if text else "")
        rest = self._behind_answer([_asked(_ANSWER)]).rpartition(_ANSWER)[2]
        end = continued_tokens(self.tokenizer, rest)
        places = [place for place in range(len(tokens)) if tokens[place : place + len(end)] == end]
        if end and places:
            known = tokens[: places[-1]]
            return [*(self._extended(known, added) or [*known, *self.special.encode_behind(_BEFORE, added)]), *end]
        extended = self._extended(tokens, added, rest) if rest else []
        if not extended:
            raise InvalidInput("a prompt does not end as the chat template ends a user's message, so that nothing can "
                               "be put behind its question: the last message of the data must be the user's")
        return extended

    def _extended(self, tokens: list[int], added: str, rest: str = "") -> list[int]:
        """Return the tokens with a text before their `rest`, encoded together with the text behind the last special
        token; [] if these tokens are not what that text is encoded as."""
        named = self.tokenizer.added_tokens_decoder
        start = max((place for place, token in enumerate(tokens) if token in named), default=-1) + 1
        before, last = (_decoded(self.tokenizer, part) for part in (tokens[max(start - 1, 0) : start], tokens[start:]))
        if not last.endswith(rest) or encode_behind(self.tokenizer, before, last) != tokens[start:]:
            return []
        known = last.removesuffix(rest)
        return [*tokens[:start], *self.special.encode_behind(before, f"{known}{added}{rest}")]

    def _behind_answer(self, messages: list[Message]) -> str:
        text = _render(self.tokenizer, [_asked("?"), _said(_ANSWER), *messages], None, self.options,
                       add_generation_prompt=True)
        return text.partition(_ANSWER)[2]

    def _require(self, *roles: str) -> None:
        if roles in self.rendered:
            return
        marks, why = [f"\ue002{number}\ue002" for number in range(len(roles))], ""
        try:
            rest = self._behind_answer([{"role": role, "content": mark} for role, mark in zip(roles, marks)])
        except TemplateError as error:
            rest, why = "", f": {error}"
        for role, mark in zip(roles, marks):
            _, there, rest = rest.partition(mark)
            if not there:
                other = "user" if role == "tool" else "tool"
                raise InvalidInput(f"the tokenizer's chat template writes no turn of `{role}` after one of `assistant`"
                                   f"{why}. Instead:  with: {{observation_role: {other}}}   or give the tokenizer "
                                   "another template")
        self.rendered.add(roles)


class _SpecialTexts:
    """Special tokens in texts by others, which are marked before the template renders them and encoded as letters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.texts = [str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
        longest_first = sorted(self.texts, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def mark(self, text: str) -> str:
        return self.pattern.sub(lambda found: f"\ue003{self.texts.index(found[0])}\ue004", text)

    def encode_behind(self, before: str, text: str) -> list[int]:
        first, *rest = re.split("\ue003(\\d+)\ue004", text)
        tokens = encode_behind(self.tokenizer, before, first)
        for special, following in zip(rest[::2], rest[1::2]):
            tokens += encode_behind(self.tokenizer, _BEFORE, self.texts[int(special)], plain=True)
            tokens += encode_behind(self.tokenizer, _BEFORE, following)
        return tokens


def _asked(text: str) -> Message:
    return {"role": "user", "content": text}


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: Tools, options: Mapping[str, Any],
            **how: Any) -> str:
    template = None if tokenizer.chat_template else _LINES
    if not template and _remembered(tokenizer, "parts", {}, _find_parts):
        messages = [{**message, "content": [{"type": "text", "text": message["content"]}]}
                    if isinstance(message.get("content"), str) else message for message in messages]
    with tokenizer_lock:
        render = cast(Any, tokenizer.apply_chat_template)
        how = {"tools": tools, "chat_template": template, "tokenize": False, **how, **options}
        try:
            return str(render(messages, **how))
        except TypeError:  # DeepSeek's templates join the arguments of a call to other texts
            written = [{**message, "tool_calls": [*map(_with_arguments_as_text, message["tool_calls"])]}
                       if message.get("tool_calls") else message for message in messages]
            if written == messages:
                raise
            return str(render(written, **how))


def _with_arguments_as_text(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(called := call.get("function"), dict):
        return {**call, "function": _with_arguments_as_text(called)}
    given = call.get("arguments")
    return {**call, "arguments": json.dumps(given, ensure_ascii=False)} if isinstance(given, dict) else call


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return encode(tokenizer, text) if tokenizer.chat_template else text_tokens(tokenizer, text)


def _decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    with tokenizer_lock:
        return str(tokenizer.decode([*tokens], clean_up_tokenization_spaces=False))


def _first_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that a tokenizer puts before a text."""
    plain = encode(tokenizer, _BEFORE)
    with tokenizer_lock:
        whole = tokenizer(_BEFORE)["input_ids"]
    return next((whole[:start] for start in range(len(whole)) if whole[start : start + len(plain)] == plain), [])


def _with_stops(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], Callable[[int], int]]:
    """Return the tokens of a rendered conversation, and a function that says where one of them stops in the text."""
    text, tokens = mend_text(text), _tokens(tokenizer, text)
    if not tokenizer.is_fast:
        return tokens, lambda place: len(_decoded(tokenizer, tokens[: place + 1]))
    with tokenizer_lock:
        found = tokenizer(text, add_special_tokens=False, split_special_tokens=False, return_offsets_mapping=True)
    stops = [*[0] * (len(tokens) - len(found["input_ids"])), *(stop for _, stop in found["offset_mapping"])]
    return tokens, stops.__getitem__


def _first_token(tokenizer: PreTrainedTokenizerBase, text: str, tokens: list[int], start: int,
                 stop_of: Callable[[int], int]) -> int:
    """Return the first token of what starts at a place of a text. A special token that takes the blanks behind it
    (`rstrip`, as in Phi) belongs to what precedes them."""
    first = bisect.bisect_right(range(len(tokens)), start, key=stop_of)
    takes_blanks = first < len(tokens) and not text[start : stop_of(first)].strip() and \
        str(tokenizer.added_tokens_decoder.get(tokens[first], "")).strip()
    return first + bool(takes_blanks)


def _learned_text(tokenizer: PreTrainedTokenizerBase, text: str, messages: list[Message], place: int, tools: Tools,
                  options: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return where a message of the assistant starts and stops in the text of its conversation, from what the template
    writes about another one in its place; None if that does not tell."""
    other = _with_other(tokenizer, messages, place, _said(_ANSWER), tools, options)
    if _ANSWER not in other:  # a result needs its call before it
        if found := _between_prompts(tokenizer, text, messages, place, tools, options):
            return found
        other = _with_other(tokenizer, messages, place, {**messages[place], "content": _ANSWER}, tools, options)
    if _ANSWER not in other:
        return None
    start = _common_prefix(text, other)
    return _behind_header(tokenizer, text, start, len(text) - _common_prefix(text[start:][::-1], other[::-1]), options)


def _earlier_answers(tokenizer: PreTrainedTokenizerBase, text: str, messages: list[Message], said: list[int],
                     tools: Tools, options: Mapping[str, Any]) -> dict[int, tuple[int, int]]:
    """Return where the messages of the assistant but the last one start and stop in the text of their conversation, as
    `_learned_text` does for one, from a single other text: what the template writes about others in the places of all.
    Empty if that does not tell."""
    others = [_said(_ANSWER) if place in said[:-1] else message for place, message in enumerate(messages)]
    try:
        between = _render(tokenizer, others, tools, options).split(_ANSWER)
    except TemplateError:
        return {}
    first, last, begin, end = list[int](), list[int](), 0, len(text)
    for each, other in zip(between, between[::-1]):
        first.append(text.find(each, begin))
        last.insert(0, text.rfind(other, 0, end))
        begin, end = first[-1] + len(each), last[0]
    if len(between) != len(said) or first != last or -1 in first or first[0] or begin != len(text):
        return {}
    return {place: _behind_header(tokenizer, text, start + len(each), stop, options)
            for place, each, start, stop in zip(said, between, first, first[1:])}


def _behind_header(tokenizer: PreTrainedTokenizerBase, text: str, start: int, stop: int,
                   options: Mapping[str, Any]) -> tuple[int, int]:
    """Return where a message starts and stops in a text in which a template writes it from `start` on: it starts where
    a prompt would end."""
    header, own = _remembered(tokenizer, "header", options, _find_header)
    begin = text.rfind(header, 0, start + len(header)) if header else -1
    if begin >= max(start - len(header) - len(own), 0):
        start = begin + len(header)
    elif not header and text[:start].endswith(own):
        start -= len(own)
    return start, max(stop, start)


def _with_other(tokenizer: PreTrainedTokenizerBase, messages: list[Message], place: int, other: Message, tools: Tools,
                options: Mapping[str, Any]) -> str:
    """Return the text of a conversation with another message at a place; "" if the template refuses it."""
    try:
        return _render(tokenizer, [*messages[:place], other, *messages[place + 1 :]], tools, options)
    except TemplateError:
        return ""


def _between_prompts(tokenizer: PreTrainedTokenizerBase, text: str, messages: list[Message], place: int, tools: Tools,
                     options: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return where a message starts and stops that is what the template writes behind its prompt; None if the text of
    the conversation does not begin with that."""
    try:
        asked = _render(tokenizer, messages[:place], tools, options, add_generation_prompt=True) if place else ""
        said = _render(tokenizer, messages[: place + 1], tools, options).rstrip()
    except TemplateError:
        return None
    return (len(asked), len(said)) if text.startswith(said) and said.startswith(asked) and said != asked else None


def _common_prefix(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike, in fewer steps than one for each."""
    lengths = range(1, min(len(one), len(other)) + 1)
    return bisect.bisect_left(lengths, True, key=lambda length: one[:length] != other[:length])


def _find_header(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> tuple[str, str]:
    """Return what a prompt and a conversation both write before an answer, and what the conversation alone writes."""
    asked = _render(tokenizer, [_asked("?")], None, options)
    prompt = _render(tokenizer, [_asked("?")], None, options, add_generation_prompt=True)
    before = _render(tokenizer, [_asked("?"), _said(_ANSWER)], None, options).partition(_ANSWER)[0]
    common = os.path.commonprefix([prompt, before])
    return (common[len(asked) :], before[len(common) :]) if common.startswith(asked) else ("", "")


def _find_opening(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> str:
    prompt = _render(tokenizer, [_asked("?")], None, options, add_generation_prompt=True)
    before = _render(tokenizer, [_asked("?"), _said(_ANSWER)], None, options).partition(_ANSWER)[0]
    tag = _OPENING_TAG.search(prompt)
    return tag[0] if tag and prompt != before else ""


def _find_parts(tokenizer: PreTrainedTokenizerBase, _: Mapping[str, Any]) -> bool:
    """Return whether the template writes contents that are parts, and none that are texts, as LLaVA's does."""
    def writes(content: Any) -> bool:
        try:
            with tokenizer_lock:
                render = cast(Any, tokenizer.apply_chat_template)
                return _ANSWER in str(render([{"role": "user", "content": content}], tokenize=False))
        except UNRENDERED:
            return False

    return not writes(_ANSWER) and writes([{"type": "text", "text": _ANSWER}])


def _find_ends(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the tokens that end the assistant's last message and those before it; None where the template has none."""
    talk = [_asked("?"), _said(_ANSWER)]
    last, inner = (encode_behind(tokenizer, _BEFORE, _render(tokenizer, messages, None, options).partition(_ANSWER)[2])
                   for messages in (talk, [*talk, _asked("?")]))
    named = set(tokenizer.added_tokens_decoder)
    if always := [token for token in os.path.commonprefix([last, inner]) if token in named]:
        end = cast(int, tokenizer.eos_token_id if tokenizer.eos_token_id in always else always[-1])
        return end, end
    first = [next((token for token in tokens if token in named), None) for tokens in (last, inner)]
    return first[0], first[1] if first[0] is not None else None


_FOUND: WeakKeyDictionary[PreTrainedTokenizerBase, dict[Any, Any]] = WeakKeyDictionary()


def _remembered(tokenizer: PreTrainedTokenizerBase, name: str, options: Mapping[str, Any], find: Any) -> Any:
    """Return what is found from a tokenizer's template, each once."""
    found = _FOUND.setdefault(tokenizer, {})
    key = (name, str(tokenizer.chat_template), tokenizer.eos_token_id, repr(sorted(options.items())))
    if key not in found:
        found[key] = find(tokenizer, options)
    return found[key]
