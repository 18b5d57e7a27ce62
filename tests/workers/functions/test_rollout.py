"""Prompts that one role gets about another's answers."""

from types import SimpleNamespace

import pytest
from reported import reported

from workers.engines.chat import prompt_tokens
from workers.engines.embedded import build_tokenizer
from workers.functions.rollout import ask


@pytest.fixture
def role():
    yield SimpleNamespace(name="reviser", tokenizer=build_tokenizer(["a question and an answer"]),
                          template_options={})
    reported()


def test_each_row_is_asked_about_its_own_columns(role):
    columns = {"questions": ["one?", "two?"], "completions": ["{1}", "2"]}
    prompts = ask(role, template="{questions} They say {completions}, {questions} {{so}}", **columns)
    texts = ["one? They say {1}, one? {so}", "two? They say 2, two? {so}"]
    assert [row.tolist() for row in prompts.rows] == [prompt_tokens(role.tokenizer, text) for text in texts]


def test_a_long_prompt_loses_its_beginning_and_is_counted(role):
    prompts = ask(role, template="{questions}", max_prompt_tokens=4, questions=["a" * 40, ""])
    whole = prompt_tokens(role.tokenizer, "a" * 40)
    assert [row.tolist() for row in prompts.rows] == [whole[-4:], prompt_tokens(role.tokenizer, "")]
    assert reported()["reviser/prompts_cut"] == 1


def test_the_template_has_the_variables_of_the_data(role):
    role.tokenizer.chat_template += "{{ effort }}"
    role.template_options = {"effort": "low"}
    (prompt,) = ask(role, template="{questions}", questions=["one?"]).rows
    assert role.tokenizer.decode(prompt).endswith("low")
