"""A conversation has the tokens that its template gives for the whole of it, however it is put together."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from tokenizers_of_kinds import KINDS, byte_level

from distflow.errors import InvalidInput
from workers.engines.chat import (
    TurnTemplate,
    encode,
    end_tokens,
    imitated_tokens,
    prompt_tokens,
    render_whole,
    sampled_text,
    template_end,
    text_tokens,
)

ROLES = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|tool|>"]
OPENS_NEXT = ("{% for message in messages %}<|{{ message.role }}|>\n{{ message.content | trim }}{% endfor %}"
              "{% if add_generation_prompt %}<|assistant|>\n{% endif %}")
THINKS = {"opens_think", "strips_thinking"}  # their prompts, or last answers, have what the whole does not always have
WORDS = ["What", "is", "3", "+", "The answer", "7.", "é", "日本", "🙂", "\n", "\n\n", " ", "  ", "<b>", "?", "user:"]
CALLS = (  # a call is written instead of the message's text, and a result needs one
    "{% for message in messages %}{% if message.tool_calls %}[call] {{ message.tool_calls[0].function.name }}</s>"
    "{% elif message.role == 'tool' %}{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}"
    "{% endif %}[result] {{ message.content }}{% elif message.role == 'assistant' %} {{ message.content }} </s>"
    "{% else %}[INST] {{ message.content }} [/INST]{% endif %}{% endfor %}")
MERGES = {"no_end"}  # its text behind an answer may be one token with the answer's last sign, which stays as sampled
kinds = pytest.mark.parametrize("kind", KINDS)
build = functools.cache(lambda kind: KINDS[kind]())


def conversations(kind: str, begin: bool = True) -> list[list[str]]:
    """Return texts of some conversations. `begin`: each begins with a word, since a template's last token may be one
    with the first of a text that begins with a line's end."""
    drawn = random.Random(kind)
    return [[drawn.choice(WORDS[:7]) * begin + " ".join(drawn.choices(WORDS, k=5)) + "." for _ in range(4)]
            for _ in range(12)]


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def whole_tokens(tokenizer, messages):
    text = render_whole(tokenizer, messages)
    return encode(tokenizer, text) if tokenizer.chat_template else text_tokens(tokenizer, text)


def learned_of(found):
    return [token for token, kept in zip(found.target, found.mask) if kept]


@kinds
def test_imitated_tokens_are_those_of_the_whole(kind):
    tokenizer = build(kind)
    for texts in conversations(kind, begin=False):
        messages = talk(*texts)
        whole = whole_tokens(tokenizer, messages)
        if tokenizer.chat_template:
            given = messages if kind != "parts" else [{**message, "content": [{"type": "text", "text": text}]}
                                                      for message, text in zip(messages, texts)]
            assert whole == tokenizer.apply_chat_template(given, return_dict=False)
        for turns in ("last", "all"):
            found = imitated_tokens(tokenizer, messages, turns=turns)
            row, end = [*found.prompt, *found.target], template_end(tokenizer)
            learned = row if end is not None else row[:-1]
            assert whole[: len(learned)] == learned
            assert row[-1] == (tokenizer.eos_token_id if end is None else end)
            assert len(found.mask) == len(found.target)
            rest = tokenizer.decode(whole[len(learned) :], clean_up_tokenization_spaces=False)
            assert rest.replace("<|endoftext|>", "").strip() == ""
        assert texts[-1].strip() in tokenizer.decode(imitated_tokens(tokenizer, messages).target)


@kinds
def test_all_turns_learn_what_the_assistant_said_and_no_more(kind):
    tokenizer = build(kind)
    for texts in conversations(kind):
        found = imitated_tokens(tokenizer, talk(*texts), turns="all")
        learned = learned_of(found)
        text = tokenizer.decode([token for token in learned if token not in end_tokens(tokenizer)])
        empty = "<think>\n\n</think>\n\n" if kind == "strips_thinking" else ""
        assert "".join(text.split()) == "".join(f"{texts[1]} {empty}{texts[3]}".split())
        assert sum(token in end_tokens(tokenizer) for token in learned) == (1 if kind == "no_end" else 2)


@pytest.mark.parametrize("begins", ["", "\n", " ", "\n\n"])
def test_a_header_that_takes_blanks_is_not_learned(begins):
    """transformers#32136, iree#23805: special tokens of Phi take the blanks behind them, of an answer too."""
    tokenizer = build("takes_blanks")
    asked = talk("What is 3?", f"{begins}The answer.", "And?", f"{begins}Seven.")
    assert imitated_tokens(tokenizer, asked).prompt == prompt_tokens(tokenizer, asked[:3])
    assert tokenizer.convert_tokens_to_ids("<|assistant|>") not in learned_of(
        imitated_tokens(tokenizer, asked, turns="all"))


@kinds
@pytest.mark.parametrize(("left_out", "said"), [(1, "Second one."), (3, "First one.")])
def test_answers_of_weight_0_are_not_learned(kind, left_out, said):
    tokenizer, messages = build(kind), talk("What?", "First one.", "And?", "Second one.")
    messages = [{**each, "weight": int(place != left_out)} for place, each in enumerate(messages)]
    for turns in ("last", "all"):
        found = imitated_tokens(tokenizer, messages, turns=turns)
        learned = learned_of(found)
        assert learned[-1] in end_tokens(tokenizer)
        text = tokenizer.decode([token for token in learned if token not in end_tokens(tokenizer)])
        assert text.removeprefix("<think>\n\n</think>\n\n").strip() == said
        row = [*found.prompt, *found.target]
        assert whole_tokens(tokenizer, messages)[: len(row) - 1] == row[:-1]


def test_the_next_turn_ends_an_answer_where_the_model_says_so():
    """As GLM's: no token of its own ends a turn, and `<|user|>` and `<|tool|>` are among the model's ends."""
    tokenizer, messages = byte_level(OPENS_NEXT, ROLES, eos=ROLES[0]), talk("What?", "First.", "And?", "Second.")
    user, tool = tokenizer.convert_tokens_to_ids(["<|user|>", "<|tool|>"])
    messages[2]["role"] = "tool"
    for known, said in (((user, tool), f"First.<|tool|>Second.{ROLES[0]}"), ((), f"First.Second.{ROLES[0]}")):
        found = imitated_tokens(tokenizer, messages, turns="all", known_ends=known)
        assert tokenizer.decode(learned_of(found)) == said
        assert [*found.prompt, *found.target][:-1] == whole_tokens(tokenizer, messages)
    messages[3]["weight"] = 0
    assert tokenizer.decode(learned_of(imitated_tokens(tokenizer, messages, turns="all", known_ends=[tool]))) == \
        "First.<|tool|>"


def test_a_conversation_of_which_nothing_is_learned_is_refused():
    with pytest.raises(InvalidInput, match="each message of the assistant has `weight: 0`"):
        imitated_tokens(build("chatml"), [*talk("What?"), {"role": "assistant", "content": "3.", "weight": 0}])


def test_all_turns_learn_calls_that_the_template_writes_instead_of_text():
    tokenizer = KINDS["inst"]()
    tokenizer.chat_template = CALLS
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    messages = [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "7"}, {"role": "assistant", "content": "It is 7."}]
    found = imitated_tokens(tokenizer, messages, turns="all")
    learned = learned_of(found)
    assert tokenizer.decode(learned).split() == ["[call]", "add</s>", "It", "is", "7.", "</s>"]


def test_answers_that_repeat_what_stands_between_them_are_learned_whole():
    tokenizer = build("letters")
    for said in ("7</s>USER: And?\nASSISTANT: 8", "7</s>"):
        found = imitated_tokens(tokenizer, talk("What?", said, "And?", said, "And?", "9"), turns="all")
        learned = learned_of(found)
        assert tokenizer.decode(learned).count(said) == 2


def test_turns_that_cannot_be_told_apart_are_refused():
    tokenizer = KINDS["chatml"]()
    tokenizer.chat_template = tokenizer.chat_template.replace("in messages", "in messages[-2:]")
    with pytest.raises(InvalidInput, match="the tokens of message 2, .* targets: last"):
        imitated_tokens(tokenizer, talk("What?", "3.", "And?", "4."), turns="all")


def test_answers_that_nothing_ends_are_refused():
    tokenizer = KINDS["no_end"]()
    tokenizer.eos_token = None
    with pytest.raises(InvalidInput, match="set `eos_token`"):
        imitated_tokens(tokenizer, talk("What?", "3."))


@kinds
def test_turn_by_turn_gives_the_tokens_of_the_whole(kind):
    tokenizer = build(kind)
    template = TurnTemplate(tokenizer, end_tokens(tokenizer))
    for asked, said, more, _ in conversations(kind):
        between, whole = template.tokens(more, ended=True), prompt_tokens(tokenizer, talk(asked, said, more))
        assert tokenizer.decode(whole).endswith(tokenizer.decode(between))
        if kind not in THINKS | MERGES:
            begun = imitated_tokens(tokenizer, talk(asked, said))
            target = begun.target if template_end(tokenizer) is not None else begun.target[:-1]
            assert begun.prompt == prompt_tokens(tokenizer, asked)
            assert [*begun.prompt, *target, *between] == whole


@kinds
def test_first_observations_are_part_of_the_question(kind):
    tokenizer = build(kind)
    template = TurnTemplate(tokenizer, end_tokens(tokenizer))
    for asked, shown, *_ in conversations(kind):
        found = template.into_prompt(torch.tensor(prompt_tokens(tokenizer, asked)), shown)
        assert found == prompt_tokens(tokenizer, f"{asked}\n{shown}")


@kinds
def test_sampled_text_is_all_but_the_end(kind):
    tokenizer = build(kind)
    said = "<think>3 + 4 is 7.</think> <tool_call>7</tool_call>"
    tokens = [*tokenizer(said, add_special_tokens=False)["input_ids"], *end_tokens(tokenizer)]
    assert sampled_text(tokenizer, tokens, end_tokens(tokenizer)) == said
