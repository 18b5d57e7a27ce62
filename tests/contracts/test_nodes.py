"""Which columns of the dataset are tokens: all that read or check them agree."""

from __future__ import annotations

import json

import pytest

from distflow.config.load import load
from distflow.contracts.nodes import token_columns
from distflow.data.checks import check_data
from distflow.errors import InvalidInput
from planners import plan
from workers.encode import encoder
from workers.engines.embedded import build_tokenizer

MINE = '''
from distflow import node, reward
from distflow.data.batch import Ragged

@node(type="COMPUTE")
def mine({reads}) -> None:
    """Read a field."""

@reward
def paid(completion: str, answer: str{pay}) -> float:
    return 1.0
'''


@pytest.fixture
def spec_of(tmp_path, monkeypatch):
    """`spec_of(name, reads, *settings, pay, hint, answer)`: GRPO with a node that `reads`, on records with a hint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def made(name, reads, *settings, pay="", hint="one", answer="two"):
        (tmp_path / f"{name}.py").write_text(MINE.format(reads=reads, pay=pay))
        record = {"question": "one?", "hint": hint, **({"answer": answer} if answer else {})}
        (tmp_path / "data.jsonl").write_text(json.dumps(record) + "\n")
        return load("grpo", None, ["data={train: data.jsonl, columns: [hint], batch: 1}", f"imports=[{name}]",
                                   "nodes.mine={role: actor, type: COMPUTE, function: mine}",
                                   "nodes.reward.with={reward: paid}", *settings])

    return made


READ = [("mine_tokens", "hint: Ragged", (), {"hint"}), ("mine_perhaps", "hint: Ragged | None = None", (), {"hint"}),
        ("mine_text", "hint: list[str]", (), set()), ("mine_both", "hint: Ragged | list[str]", (), set()),
        ("mine_renamed", "other: Ragged", ("nodes.mine.reads={other: hint}",), {"hint"}),
        ("mine_targets", "targets: Ragged | None = None", (), {"targets"}),
        ("mine_elsewhere", "hint: Ragged", ("mode=async",), {"hint"})]


@pytest.mark.parametrize(("name", "reads", "settings", "tokens"), READ, ids=[row[0] for row in READ])
def test_columns_are_tokens_for_planner_encoder_and_checks_alike(name, reads, settings, tokens, spec_of):
    spec = spec_of(name, reads, *settings)
    plan(spec, 2)
    columns = encoder(build_tokenizer(["one two"]), spec.run.data, token_columns(spec))([
        {"question": "one?", "hint": "one", "answer": "two"}])
    assert token_columns(spec) == {column for column in ("hint", "targets") if column in columns
                                   and columns[column].values.element_size() > 1} == tokens
    check_data(spec_of(name, reads, *settings, hint={"a": 1}))  # no model is given its tokens


def test_tokens_of_an_answer_are_of_one_that_is_there(spec_of):
    spec = spec_of("mine_asks", "targets: Ragged | None = None",
                   "nodes.reward.with={reward: {length: {cap: 9, margin: 2}}}", answer="")
    with pytest.raises(InvalidInput, match="no field `answer`"):
        check_data(spec)


@pytest.mark.parametrize(("name", "reads", "pay", "settings", "refused"), [
    ("paid_tokens", "hint: list[str]", ", hint: list[int]", (), "reward `paid` wants column `hint` as Ragged"),
    ("paid_beside", "hint: Ragged", ", hint", (), "reward `paid` wants column `hint` as list.str."),
    ("mine_twice", "hint: Ragged, also: list[str]", "", ("nodes.mine.reads={also: hint}",), "a field has one form"),
    ("paid_held_out", "hint: list[str]", ", hint: list[int]", (
        "validation={data: {held: data.jsonl}, reward: paid}", "nodes.reward.with={reward: math}"),
     "`validation`: reward `paid` reads column `hint` as tokens")])
def test_a_field_has_one_form_and_is_text_for_rewards(name, reads, pay, settings, refused, spec_of):
    with pytest.raises(InvalidInput, match=refused):
        plan(spec_of(name, reads, *settings, pay=pay), 1)
