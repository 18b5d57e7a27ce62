"""A conversation has the tokens that its template gives for the whole of it, however it is put together."""

from __future__ import annotations

import functools

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenizers_of_kinds import KINDS
from workers.engines.chat import (
    TurnTemplate,
    answer_tokens,
    end_tokens,
    imitated_tokens,
    prompt_tokens,
    sampled_text,
    template_end,
    whole_tokens,
)

THINKS = {"opens_think", "strips_thinking"}  # their prompts, or last answers, have what the whole does not always have
kinds = pytest.mark.parametrize("kind", KINDS)
build = functools.cache(lambda kind: KINDS[kind]())
words = st.sampled_from(["What", "is", "3", "+", "The answer", "7.", "é", "日本", "🙂", "\n", "\n\n", " ", "  ", "<b>", "?"])
texts = st.lists(words, min_size=1, max_size=8).map(" ".join).filter(str.strip)
answers = texts.filter(lambda text: not text[0].isspace())  # else its first token may be one with the template's last


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


@kinds
@settings(max_examples=25, deadline=None)
@given(asked=texts, said=texts, more=texts, again=texts)
def test_imitated_tokens_are_those_of_the_whole(kind, asked, said, more, again):
    tokenizer, messages = build(kind), talk(asked, said, more, again)
    whole = whole_tokens(tokenizer, messages)
    if tokenizer.chat_template:
        assert whole == tokenizer.apply_chat_template(messages, return_dict=False)
    for turns in ("last", "all"):
        found = imitated_tokens(tokenizer, messages, turns=turns)
        row, end = [*found.prompt, *found.target], template_end(tokenizer)
        learned = row if end is not None else row[:-1]
        assert whole[: len(learned)] == learned
        assert row[-1] == (tokenizer.eos_token_id if end is None else end)
        assert len(found.mask) == len(found.target)
        rest = tokenizer.decode(whole[len(learned) :], clean_up_tokenization_spaces=False)
        assert rest.replace("<|endoftext|>", "").strip() == ""
    assert again.strip() in tokenizer.decode(imitated_tokens(tokenizer, messages).target)


@kinds
@settings(max_examples=25, deadline=None)
@given(asked=texts, said=answers, more=texts, again=answers)
def test_all_turns_learn_what_the_assistant_said_and_no_more(kind, asked, said, more, again):
    tokenizer = build(kind)
    found = imitated_tokens(tokenizer, talk(asked, said, more, again), turns="all")
    learned = [token for token, kept in zip(found.target, found.mask) if kept]
    text = tokenizer.decode([token for token in learned if token not in end_tokens(tokenizer)])
    empty = "<think>\n\n</think>\n\n" if kind == "strips_thinking" else ""
    assert text.split() == f"{said} {empty}{again}".split()
    ends = [token for token in learned if token in end_tokens(tokenizer)]
    assert len(ends) == (1 if kind == "no_end" else 2)


@kinds
@settings(max_examples=25, deadline=None)
@given(asked=texts, said=answers, more=texts)
def test_turn_by_turn_gives_the_tokens_of_the_whole(kind, asked, said, more):
    tokenizer = build(kind)
    between = TurnTemplate(tokenizer, end_tokens(tokenizer)).tokens(more, ended=True)
    whole = prompt_tokens(tokenizer, talk(asked, said, more))
    assert whole[-len(between) :] == between
    if kind not in THINKS:
        begun = imitated_tokens(tokenizer, talk(asked, said))
        target = begun.target if template_end(tokenizer) is not None or not tokenizer.chat_template else begun.target[:-1]
        assert begun.prompt == prompt_tokens(tokenizer, asked)
        assert [*begun.prompt, *target, *between] == whole


@kinds
@settings(max_examples=10, deadline=None)
@given(better=answers, worse=answers)
def test_pairs_have_the_tokens_of_their_conversations(kind, better, worse):
    tokenizer = build(kind)
    for said in (better, worse):
        assert answer_tokens(tokenizer, said) == imitated_tokens(tokenizer, talk("What?", said)).target


@kinds
@settings(max_examples=10, deadline=None)
@given(asked=texts, shown=texts)
def test_first_observations_are_part_of_the_question(kind, asked, shown):
    tokenizer = build(kind)
    if not asked.isascii() and "byte" not in kind:
        asked = "What"
    template = TurnTemplate(tokenizer, end_tokens(tokenizer))
    found = template.into_prompt(numpy.array(prompt_tokens(tokenizer, asked.strip())), shown.strip())
    assert found == prompt_tokens(tokenizer, f"{asked.strip()}\n{shown.strip()}")


@kinds
@settings(max_examples=10, deadline=None)
@given(said=answers)
def test_sampled_text_is_all_but_the_end(kind, said):
    tokenizer = build(kind)
    said = f"<think>{said}</think> <tool_call>7</tool_call>"
    tokens = [*tokenizer(said, add_special_tokens=False)["input_ids"], *end_tokens(tokenizer)]
    assert sampled_text(tokenizer, tokens, end_tokens(tokenizer)) == said
