"""Prompts that one role gets about another's answers."""

from types import SimpleNamespace

import pytest
import torch
from reported import reported

from distflow.data.batch import Ragged
from workers.engines.chat import prompt_tokens
from workers.engines.embedded import build_tokenizer
from workers.functions.rollout import ask, cut_thoughts


@pytest.fixture
def role():
    yield SimpleNamespace(name="reviser", tokenizer=build_tokenizer(["a question and an answer"]),
                          template_options={})
    reported()


def test_cut_thoughts_begin_at_the_end_of_a_prompt(role):
    role.decode = lambda column: [role.tokenizer.decode(row) for row in column.rows]
    opened, plain = (Ragged.from_rows([torch.tensor(role.tokenizer.encode(text))]).rows[0]
                     for text in ("one? " * 20 + "<think>\n", "<think> one?"))
    texts = ["so", "so</think>5", "so", "so", "<think>so", "so"]
    finished = torch.tensor([False, False, True, False, False, False])
    found = cut_thoughts(role, Ragged.from_rows([opened, plain]), texts, finished)
    assert found.tolist() == [True, False, False, False, True, False]
    assert cut_thoughts(role, Ragged.from_rows([opened]), texts[:3], ~finished[1:4]).tolist() == [False, False, False]


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
