"""Proves that the first records become the tokens that were meant, in the first worker, whose tokenizer is loaded.

    rendered     the chat template renders each record, with the text of each of its messages
    texts        have no token by which the template divides messages
    prompts      end where an answer begins: the template writes nothing more in front of an answer
    dates        no prompt names the day on which it is rendered
    targets      have the text and the calls of each learned answer, and its end, behind the prompt that is asked
    turns        what stands between two answers of a conversation is the template's own rendering, too
    vocabulary   each token is one of the embedding; no text loses characters, and none begins twice
    lengths      prompts and targets fit their limits
    openings     rewards of an answer's form can be earned behind the tag with which the template begins it
    pictures     the prompts of records with pictures have as many tokens for each as the model's image processor says
"""

from __future__ import annotations

import json
import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from transformers import AutoImageProcessor, PreTrainedTokenizerBase

from distflow.config.run import Data
from distflow.config.spec import Spec
from distflow.contracts.forms import ENGINE_TYPES
from distflow.contracts.nodes import TARGETS, token_columns
from distflow.data.dataset import open_images
from distflow.data.problems import (
    Message,
    Record,
    answer_text,
    content_text,
    conversation_of,
    mend_text,
    messages_of,
    template_variables,
    tools_of,
)
from distflow.errors import InvalidInput
from workers.encode import ImageEncoder
from workers.engines.chat import (
    UNRENDERED,
    ImitatedTokens,
    TurnTemplate,
    encode,
    end_tokens,
    imitated_tokens,
    prompt_opening,
    prompt_tokens,
    render_prompt,
    render_whole,
)
from workers.engines.vision import ImageProcessor
from workers.preflight.proofs import FailedProof, FirstRecords, shortened
from workers.preflight.rewards import prove_behind

_CHARACTERS = 400_000
"""Characters of a set's records that are encoded: about a second."""
_EMPTY_TAGS = re.compile(r"<(\w+)>\s*</\1>")  # thoughts that an answer does not have
_CLOCK = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1")
_OBSERVATION = "Go on: 7 + 5?"


def prove_tokens(spec: Spec, tokenizer: PreTrainedTokenizerBase, vocabulary: int | None, known_ends: Collection[int],
                 sets: Sequence[FirstRecords]) -> Iterator[FailedProof]:
    learned = token_columns(spec, ENGINE_TYPES)
    for records in sets if spec.run.data.images is None else ():  # images take tokens of their own
        for other in ("", *sorted(learned - {TARGETS}) * records.training):
            imitates = records.training and (other or TARGETS) in learned
            yield from _TokenTrial(spec, tokenizer, vocabulary, known_ends, _bounded(records), other, imitates).proofs()


def prove_pictures(spec: Spec, tokenizer: PreTrainedTokenizerBase, encoder: ImageEncoder,
                   sets: Sequence[FirstRecords]) -> Iterator[FailedProof]:
    processor = None
    if isinstance(encoder.image_processor, ImageProcessor):
        with TemporaryDirectory() as folder:
            encoder.image_processor.save(Path(folder))
            processor = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
    for records in sets:
        beside = replace(encoder, folder=Path(records.location(0).file).parent)
        wrong, large = dict[int, str](), list[int]()
        for index, row in enumerate(records.rows):
            try:
                if beside.too_long(tokenizer, spec.run.data, row):
                    large.append(index)
                elif differs := _other_pictures(spec.run.data, tokenizer, beside, processor, row):
                    wrong[index] = differs
            except (*UNRENDERED, InvalidInput) as error:
                wrong[index] = " ".join(str(error).split())
        yield from records.failed([*wrong], f" cannot be asked: {next(iter(wrong.values()), '')}", doubt=False)
        most = spec.run.data.max_prompt_tokens
        yield from records.failed(large, f" has a prompt of more than {most:,} tokens with its pictures, or a picture "
                                  "that is too large: another takes its place", "Shrink the pictures, or raise "
                                  "data.max_prompt_tokens.", doubt=True)


def _other_pictures(data: Data, tokenizer: PreTrainedTokenizerBase, encoder: ImageEncoder, processor: Any,
                    row: Record) -> str:
    """Return how the pictures of a record have other tokens in its prompt than the image processor says; "" if not."""
    prompts, _ = encoder.prompts(tokenizer, data, [row])
    if processor is None:  # it has made them
        return ""
    images = [image.convert("RGB") for image in open_images(row, data.images or "", encoder.folder)]
    grids = processor(images=images, return_tensors="pt")["image_grid_thw"].tolist() if images else []
    wanted = sum(math.prod(grid) // processor.merge_size**2 for grid in grids)
    had = int((prompts.values == encoder.token).sum())
    return "" if had == wanted else f"its {len(images)} pictures have {had:,} tokens, and {wanted:,} by the model's " \
        "image processor"


def _bounded(records: FirstRecords) -> FirstRecords:
    """Return the records that have `_CHARACTERS` together in what is encoded, at least one."""
    total, kept, data = 0, 0, records.data
    for row in records.rows:
        total += sum(len(str(row.get(name, ""))) for name in {data.question, data.answer, data.tools} if name)
        kept += not kept or total <= _CHARACTERS
    return records.only(range(kept))


@dataclass(frozen=True)
class _Rendered:
    """One record by the chat template: the text and the tokens of its prompt, and those with its answer behind it."""

    messages: list[Message]
    answer: str
    text: str
    prompt: list[int]
    asked: str
    """Text of the prompt's messages alone, without what asks for an answer."""
    whole: list[Message]
    answered: str
    learned: ImitatedTokens

    @property
    def header(self) -> str:
        """What the template writes between the prompt and the answer."""
        text, said = _EMPTY_TAGS.sub("", self.answered.removeprefix(self.text)).lstrip(), self.answer.strip()
        follows = self.messages[-1]["role"] == "assistant" and len(self.whole) > len(self.messages)
        if not said or follows or not self.answered.startswith(self.text) or text.startswith(said):
            return ""
        between, found, _ = text.partition(said)
        return between.strip() if found else ""

    @property
    def opened(self) -> str:
        """What the template writes at the end of the prompt, and not in front of the answer of a whole conversation."""
        return self.text[len(os.path.commonprefix([self.text, self.answered])) :].strip()


class _TokenTrial:
    """The first records of one data set as a tokenizer and its chat template encode them. `other`: field of another
    answer than the record's, of which the last message is learned. `imitates`: whether the answer is learned."""

    def __init__(self, spec: Spec, tokenizer: PreTrainedTokenizerBase, vocabulary: int | None,
                 known_ends: Collection[int], records: FirstRecords, other: str, imitates: bool):
        self.spec, self.tokenizer, self.vocabulary, self.data = spec, tokenizer, vocabulary, spec.run.data
        self.options: dict[str, Any] = self.data.chat_template_kwargs
        self.known_ends, self.ends = known_ends, end_tokens(tokenizer, known_ends, **self.options)
        self.given, self.other, self.imitates = records, other, imitates
        self.targets: Literal["last", "all"] = "last" if self.other else self.data.targets
        self.refused: dict[int, str] = {}
        found = [self._render(index) for index in range(len(records))]
        self.records = records.only([index for index, each in enumerate(found) if each])
        self.rendered = [each for each in found if each]

    def _render(self, index: int) -> _Rendered | None:
        row, other = self.given.rows[index], self.other
        answer = answer_text(row[other]) if other else self.given.answers[index]
        tools, options = tools_of(row, self.data), template_variables(row, self.data)
        try:
            messages, whole = messages_of(row, self.data), conversation_of(row, self.data, other)
            if self.imitates and len(whole) > len(messages):
                messages = whole[:-1]  # an answer may have several turns
            return _Rendered(messages, answer, render_prompt(self.tokenizer, messages, tools, **options),
                             prompt_tokens(self.tokenizer, messages, tools, **options),
                             render_whole(self.tokenizer, messages, tools, **options), whole,
                             render_whole(self.tokenizer, whole, tools, **options),
                             imitated_tokens(self.tokenizer, whole, tools, self.targets, self.known_ends, **options))
        except (*UNRENDERED, InvalidInput) as error:
            self.refused[index] = " ".join(str(error).split())
            return None

    def proofs(self) -> Iterator[FailedProof]:
        why = next(iter(self.refused.values()), "")
        yield from self.given.failed([*self.refused], f" is refused by the chat template: {why}", doubt=False)
        for proof in (self._messages, self._texts, self._prompts, self._dates, self._targets, self._turns,
                      self._vocabulary, self._characters, self._lengths, self._openings) if self.rendered else ():
            yield from proof()

    def _failed(self, holds: Callable[[_Rendered], Any], what: Callable[[_Rendered], str] = lambda _: "",
                hint: str = "", before: str = "", doubt: bool | None = None,
                kind: str = "") -> Iterator[FailedProof]:
        """Yield the failed proof for the records of which `holds` is true; `what` says what is wrong with the first.
        `doubt`: True, the run starts with a note; False, it is refused; None, a note where some records are good.
        `before`: how the sentence begins, in front of the records."""
        bad = [index for index, each in enumerate(self.rendered) if holds(each)]
        if bad:
            yield from self.records.failed(bad, what(self.rendered[bad[0]]), hint, doubt, before, kind)

    def _messages(self) -> Iterator[FailedProof]:
        for role in dict.fromkeys(message["role"] for each in self.rendered for message in each.messages):
            missing = partial(_missing, role)
            yield from self._failed(missing, lambda each, missing=missing: f": {shortened(missing(each))}",
                                    "Take `system_prompt` out, or put it into the questions." if role == "system" else
                                    "Take a template that writes it, or name the role as the template does.",
                                    before=f"the chat template leaves out the message of `{role}` of ")
        yield from self._failed(_dropped_call, lambda each: f": of {shortened(_dropped_call(each))}",
                                "Take a template that writes `tool_calls`.",
                                "the chat template leaves out a tool call of the question of ",
                                doubt=True)

    def _texts(self) -> Iterator[FailedProof]:
        talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        written = _EMPTY_TAGS.sub("", render_whole(self.tokenizer, talk, **self.options))
        dividers = [str(token) for token in self.tokenizer.added_tokens_decoder.values()
                    if token.special and str(token) in written]

        def within(each: _Rendered) -> str:
            texts = [content_text(message.get("content")) for message in each.whole]
            return next((token for token in dividers for text in texts if token in text), "")

        yield from self._failed(within, lambda each: f" has {shortened(within(each))} in a text, which becomes the "
                                "token by which the chat template divides messages", "Take it out of the data.",
                                doubt=True, kind="marks_in_texts")

    def _prompts(self) -> Iterator[FailedProof]:
        yield from self._failed(lambda each: each.header and each.text == each.asked,
                                lambda each: f": it writes {shortened(each.header)} there",
                                "The template lacks  {% if add_generation_prompt %}…{% endif %}  at its end.",
                                "the chat template does not begin an answer at the end of the prompt of ")
        yield from self._failed(lambda each: self.imitates and each.header and each.text != each.asked,
                                lambda each: f": {shortened(each.header)}",
                                "Answers are sampled behind the prompt, and learned with that before them.",
                                "the chat template writes more before the answer than at the end of the prompt of ",
                                doubt=True)
        yield from self._failed(lambda each: self.imitates and each.opened and each.opened not in each.answer,
                                lambda each: f" ends with {shortened(each.opened)}, and its answer lacks that",
                                "Answers are sampled behind it, and learned without. Write it into them.",
                                "the prompt of ", doubt=True)

    def _dates(self) -> Iterator[FailedProof]:
        template = str(self.tokenizer.chat_template or "")
        fixed = str([*self.options.values()])  # also where it is today's
        today = [day for _, form in _CLOCK.findall(template) if (day := datetime.now().strftime(form)) not in fixed]

        def named(each: _Rendered) -> str:
            return next((day for day in today if day in each.text), "")

        yield from self._failed(named, lambda each: f" says {shortened(named(each))}, which the chat template reads "
                                "from the clock: a run that is resumed on another day has other prompts",
                                'Name one:  data: {chat_template_kwargs: {date_string: "26 Jul 2024"}}'
                                if "date_string" in template else
                                "Write a date in place of `strftime_now(…)` in the model's chat template.",
                                "the prompt of ", doubt=True)

    def _targets(self) -> Iterator[FailedProof]:
        if not self.imitates:
            return

        yield from self._failed(self._left_out, lambda each: f": {self._left_out(each)}",
                                "What it leaves out is not learned. Take a template that keeps it.",
                                "the chat template changes the answer of ")
        yield from self._failed(_lost_thought, lambda each: f": {shortened(_lost_thought(each))}",
                                "Take a template that writes it, or write it into `content`.",
                                "the chat template leaves out the reasoning of the answer of ", doubt=True)
        yield from self._failed(self._not_learned, lambda each: " has a target without what the assistant says: "
                                f"{shortened(self._not_learned(each))}", "Learn the last answers alone:  "
                                "--set data.targets=last" if self.targets == "all" else "")
        yield from self._failed(lambda each: any(map(_says_nothing, self._said(each))), lambda _: " has an answer "
                                "without a text, of which the end alone is learned", 'Leave it out:  "weight": 0',
                                doubt=True)
        yield from self._failed(lambda each: each.learned.target[-1] not in self.ends,
                                lambda _: " has a target without an end")
        if self.targets == "last":
            yield from self._failed(
                lambda each: not (each.header or each.opened or each.messages[-1]["role"] == "assistant") and
                each.prompt != each.learned.prompt,
                lambda _: " is asked by other tokens than those behind which its answer is learned")

    def _said(self, each: _Rendered) -> list[Message]:
        """Return the messages of the assistant that are learned."""
        said = [message for message in each.whole if message["role"] == "assistant" and message.get("weight") != 0]
        return said if self.targets == "all" else said[-1:]

    def _left_out(self, each: _Rendered) -> str:
        """Return what the template leaves out of the answer, or of the calls that are learned, in words; "" if nothing.
        """
        if _dense(mend_text(each.answer)) not in _dense(each.answered):
            return f"of {shortened(each.answer)} it leaves out something"
        name = next((name for name in _called(self._said(each)) if name not in each.answered), "")
        return name and f"it leaves out the call of {shortened(name)}"

    def _not_learned(self, each: _Rendered) -> str:
        """Return a text or the name of a call that the template writes of a learned message, and that is not among the
        learned tokens; "" if all are. What it strips from earlier answers is its own."""
        tokens = [token for token, learned in zip(each.learned.target, each.learned.mask) if learned]
        answered, learned = _dense(each.answered), _dense(self._text(tokens))
        said = self._said(each)
        texts = [mend_text(content_text(message.get("content"))) for message in said]
        return next((text for text in [*texts, *_called(said)] if _dense(text) in answered and not
                     (_dense(text) in learned or _dense(self._text(encode(self.tokenizer, text))) in learned)), "")

    def _turns(self) -> Iterator[FailedProof]:
        """Prove the tokens between two answers, for nodes that converse."""
        for role in {self.spec.dag.nodes[node].settings.get("observation_role", "user")
                     for node in self.spec.environments}:
            between = TurnTemplate(self.tokenizer, self.ends, role, self.options)
            yield from self._failed(partial(self._other_turn, between), lambda _: " is followed by a turn of other "
                                    "tokens than the chat template writes")

    def _other_turn(self, between: TurnTemplate, each: _Rendered) -> bool:
        messages = [*each.messages, {"role": "assistant", "content": each.answer},
                    {"role": between.role, "content": _OBSERVATION}]
        tokens = between.tokens(_OBSERVATION, ended=True)
        return prompt_tokens(self.tokenizer, messages, **self.options)[-len(tokens) :] != tokens

    def _vocabulary(self) -> Iterator[FailedProof]:
        def largest(each: _Rendered) -> int:
            return max(each.prompt + each.learned.target)

        rows = self.vocabulary or len(self.tokenizer)
        yield from self._failed(lambda each: largest(each) >= rows, lambda each: f" has the token {largest(each):,} "
                                f"({self.tokenizer.convert_ids_to_tokens(largest(each))!r}), and the embedding of the "
                                f"model has {rows:,} rows", "Take the tokenizer of this "
                                "model, or add rows to its embedding (`resize_token_embeddings`).", doubt=False)
        first = self.tokenizer.bos_token_id
        yield from self._failed(lambda each: first is not None and each.prompt[:2] == [first, first],
                                lambda _: f" begins with {self.tokenizer.bos_token!r} twice", "Take it out of the chat "
                                "template, or out of the text.")

    def _characters(self) -> Iterator[FailedProof]:
        def lost(each: _Rendered) -> str:
            return _lost(each.answered, self._text(encode(self.tokenizer, each.answered)))

        yield from self._failed(lost, lambda each: f": {shortened(' '.join(dict.fromkeys(lost(each))))}",
                                "Take a tokenizer that was trained with them.",
                                "the tokenizer has no tokens for characters of ")

    def _lengths(self) -> Iterator[FailedProof]:
        drops = self.data.long_prompts == "drop" and self.records.training
        yield from self._too_long(lambda each: each.prompt, "prompt", "max_prompt_tokens",
                                  "another takes its place" if drops else "it loses its beginning", doubt=True)
        if self.imitates:
            yield from self._too_long(lambda each: each.learned.target, "target", "max_target_tokens",
                                      "it loses its end")

    def _too_long(self, tokens: Callable[[_Rendered], list[int]], kind: str, key: str, fate: str,
                  doubt: bool | None = None) -> Iterator[FailedProof]:
        most, longest = getattr(self.data, key), max(len(tokens(each)) for each in self.rendered)
        yield from self._failed(lambda each: len(tokens(each)) > most, lambda _: f" has a {kind} of more than {most:,} "
                                f"tokens, up to {longest:,}: {fate}", f"To keep them:  --set data.{key}={longest}",
                                doubt=doubt, kind="texts_cut")

    def _openings(self) -> Iterator[FailedProof]:
        if opening := prompt_opening(self.tokenizer, **self.options):
            yield from prove_behind(self.spec, self.records, opening)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode([*tokens], clean_up_tokenization_spaces=False))


def _missing(role: str, each: _Rendered) -> str:
    """Return the text of a message of this role that is not in the rendered prompt, as it is or as JSON; "" if all
    are. What a template leaves out of earlier answers is its own."""
    texts = [content_text(message.get("content")) for message in each.messages
             if message["role"] == role != "assistant"]
    written = _dense(each.text)
    return next((text for text in texts if _dense(mend_text(text)) not in written and
                 _dense(json.dumps(mend_text(text), ensure_ascii=False)[1:-1]) not in written), "")


def _lost_thought(each: _Rendered) -> str:
    """Return the reasoning of the last message that has a field of its own and is not rendered; "" if it is."""
    thoughts = (each.whole[-1].get(name) for name in ("reasoning_content", "reasoning", "thinking"))
    return next((text for text in thoughts if isinstance(text, str) and _dense(mend_text(text)) not in
                 _dense(each.answered)), "")


def _says_nothing(message: Message) -> bool:
    thoughts = any(message.get(name) for name in ("reasoning_content", "reasoning", "thinking"))
    return not (content_text(message.get("content")).strip() or message.get("tool_calls") or thoughts)


def _dropped_call(each: _Rendered) -> str:
    """Return the name of a call in the question that is not in the rendered prompt; "" if all are."""
    return next((name for name in _called(each.messages) if name not in each.text), "")


def _called(messages: Iterable[Message]) -> list[str]:
    """Return the names of the tools that messages call."""
    calls = [call for message in messages for call in message.get("tool_calls") or () if isinstance(call, dict)]
    return [str((call.get("function") or call).get("name", "")) for call in calls]


def _dense(text: str) -> str:
    return "".join(text.split())


def _lost(text: str, decoded: str) -> str:
    """Return the characters of a text that are missing after encoding and decoding it; compatible forms are equal."""
    counts = [Counter(_dense(unicodedata.normalize("NFKC", each))) for each in (text, decoded)]
    return "".join(counts[0] - counts[1])
