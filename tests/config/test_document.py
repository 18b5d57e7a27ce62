"""Mistakes are collected, and what is wrong is replaced by a guess, so that later checks can go on."""

import pytest

from distflow.config.run import Run
from distflow.config.yaml_source import check, parse
from distflow.errors import InvalidInput

GOOD = "steps: 3\ndata: {train: x.jsonl}\n"


def test_a_misspelt_key_is_taken_for_what_was_meant():
    run, mistakes = check(Run, parse("stepz: 3\ndata: {train: x.jsonl}\n", "file"))
    assert run is not None
    assert run.steps == 3
    assert [mistake.what for mistake in mistakes] == ["unknown key `stepz`"]


@pytest.mark.parametrize("text", ["steps: ten\ndata: {train: x}\n", "data: {train: x}\n", "steps: 3\n",
                                  "steps: 3\ndata: 5\n", "steps: 3\ndata: {train: 5}\n", "steps: 3\ndata: {}\n"])
def test_required_values_have_stand_ins(text):
    run, mistakes = check(Run, parse(text, "file"))
    assert run is not None
    assert len(mistakes) == 1


@pytest.mark.parametrize(("line", "says"), [
    ("seed: true", "`seed` must be a whole number, not true"), ("seed: 1.0", "`seed` must be a whole number, not 1.0"),
    ("seed: '1'", "`seed` must be a whole number, not '1'"), ("output: 1", "`output` must be text, not 1"),
    ("output: ", "`output` must be text, not empty"), ("checkpoint: []", "`checkpoint` must be a mapping, not a list"),
    ("layouts: {a: 3}", "`layouts.a` must be a mapping, not 3"),
    ("staleness: -1", "`staleness` must be at least 0, not -1"),
    *((f"roles: {{actor: {{max_grad_norm: {off}}}}}", "`roles.actor.max_grad_norm`: to scale no gradient down, take a "
       "bound that none exceeds:  max_grad_norm: 1e9") for off in ("0", ".inf", "")),  # as Trainer and Megatron say it
    ("samples: -1", "`samples`: -1 is neither a number of rows, as 4, nor `all`"),
])
def test_types_are_strict_and_named_in_plain_words(line, says):
    _, mistakes = check(Run, parse(GOOD + line + "\n", "file"))
    assert [mistake.what for mistake in mistakes] == [says]


@pytest.mark.parametrize(("text", "hint"), [
    ("learning_rate: 1e-6\n", "It is a key of `roles.NAME`. Known: steps, "),
    ("roles: {actor: {temperature: 0.6}}\n", "It is a key of `roles.NAME.generation` and of `validation`. Known: "),
    ("roles: {actor: {lr: 1e-6}}\n", "Did you mean `learning_rate`? Known: "),
    ("checkpoint: 5\n", "Its keys: every, keep, to.")])
def test_a_hint_says_where_a_key_belongs(text, hint):
    _, mistakes = check(Run, parse(GOOD + text, "file"))
    assert len(mistakes) == 1
    assert mistakes[0].hint.startswith(hint)


@pytest.mark.parametrize(("text", "shown"), [
    ("there is none", "there is none."),
    ("there is none. Name one:  --data x.jsonl", "there is none. Name one:  --data x.jsonl"),
    ("name one, as  --data x.jsonl   or leave it out", "name one, as  --data x.jsonl   or leave it out."),
    ("it is wrong:", "it is wrong:")])
def test_a_line_to_paste_ends_without_a_full_stop(text, shown):
    assert str(InvalidInput(text)) == shown
