"""Validation encodes its questions once, and counts what it cuts under its own name."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from reported import reported
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from distflow import reward
from distflow.config.load import load
from distflow.config.run import Data, Generation, Validation
from distflow.contracts.decorators import REWARDS
from distflow.contracts.read import read_contract
from distflow.contracts.rewards import shipped_rewards
from distflow.data.batch import Ragged
from distflow.errors import InvalidInput
from distflow.plan import Layout
from workers import validation
from workers.engines.sampling import TokenLimits
from workers.validation import LAG, Validator, result_of


class Characters(PreTrainedTokenizerFast):
    """A tokenizer with a token for each digit and line end, which counts the questions that it encodes."""

    def __init__(self):
        vocabulary = {sign: number for number, sign in enumerate("0123456789\n?")}
        characters = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
        characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        characters.decoder = decoders.Fuse()
        super().__init__(tokenizer_object=characters)
        self.encoded = 0

    def apply_chat_template(self, *arguments, **named):
        self.encoded += 1
        return super().apply_chat_template(*arguments, **named)


class Echo:
    """A role that answers with the question, which is as many tokens as it has letters."""

    def __init__(self):
        self.tokenizer = Characters()

    def of_draw(self, draw: int) -> Echo:
        assert draw == 0
        return self

    def generate(self, prompts: Ragged, ids, repeats, max_new_tokens, temperature, images, limits):
        assert (len(prompts) * repeats, max_new_tokens) == (len(ids), None)
        assert len(set(ids.tolist())) == len(ids)
        self.asked, self.limits = (ids.tolist(), temperature), limits
        tokens = Ragged.from_rows([row for row in prompts.rows for _ in range(repeats)])
        return SimpleNamespace(tokens=tokens, finished=tokens.lengths < 3,  # longer ones are cut off
                               versions=tokens.with_values(torch.full_like(tokens.values, 7)))

    def decode(self, tokens: Ragged) -> list[str]:
        return [self.tokenizer.decode(row.tolist()).strip() for row in tokens.rows]


@pytest.fixture
def spec(tmp_path):
    questions = {"easy": ["1", "2"], "hard": ["12345", "123456", "3"]}
    for name, texts in questions.items():
        lines = [json.dumps({"question": text, "answer": text}) for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    run = SimpleNamespace(shown_samples=2, data=Data(train="", max_prompt_tokens=4),
                          validation=Validation(data={name: f"{name}.jsonl" for name in questions}))
    return SimpleNamespace(run=run, rewards=shipped_rewards(), data_path=lambda name: tmp_path / name)


def test_questions_are_encoded_once_and_cuts_have_their_own_name(spec, mesh):
    role = Echo()
    validator = Validator(spec, role, Layout(1))
    reported()  # what tests before have left
    for _ in range(2):
        result = validator.run(0)
        values = result.values
        assert [row["completions"] for row in result.answers["hard"]] == ["345", "456"]
        bounds = {name: values.pop(name) for name in [*values] if name.startswith("validation_")}
        assert list(values.items()) == [("validation/easy", 1.0), ("validation/hard", pytest.approx(1 / 3)),
                                        ("data/prompts_cut/hard", 2.0)]
        for name in ("easy", "hard"):
            assert 0 < bounds[f"validation_low/{name}"] < values[f"validation/{name}"]
            assert values[f"validation/{name}"] <= bounds[f"validation_high/{name}"] <= 1
    assert role.tokenizer.encoded == 5
    assert "data/prompts_cut" not in reported()


def test_ranks_that_split_a_model_give_the_same_answers_and_one_reports(spec, mesh, monkeypatch):
    monkeypatch.setattr(validation.dist, "get_rank", lambda: 1)
    validator = Validator(spec, Echo(), Layout(1, tp=2))
    assert [len(share.prompts) for share in validator.shares.values()] == [2, 3]
    assert validator.run(0).values == {}


@pytest.mark.parametrize(("layout", "rows"), [(Layout(1), [0, 1]), (Layout(2), [1]), (Layout(2, rows=(1, 2)), [1, 2]),
                                               (Layout(4), [])])
def test_an_answer_names_its_record_whatever_the_number_of_ranks(spec, mesh, monkeypatch, layout, rows):
    monkeypatch.setattr(validation.dist, "get_rank", lambda: layout.dp - 1)
    monkeypatch.setattr(validation, "gather", lambda part: [part])
    answers = Validator(spec, Echo(), layout).run(0).answers
    texts = {0: "12345", 1: "123456", 2: "3"}
    assert [(row["row"], row["questions"]) for row in answers["hard"]] == [(row, texts[row]) for row in rows]


def test_parts_of_a_validation_have_the_result_of_the_whole(spec, mesh):
    """And its first answers, whichever parts they are in."""
    whole = Validator(spec, Echo(), Layout(1)).run(0)
    validators = Validator.of_parts(spec, Echo())
    parts = [validators(2, part) for part in range(2)]
    assert parts[0].scorer is parts[1].scorer, "each has processes of its own"
    assert validators(2, 0) is parts[0], "whose questions are encoded"
    result = result_of(0, [part.report(part.sample()) for part in parts], spec.run.shown_samples)
    assert result.values == pytest.approx(whole.values)
    assert result.answers == whole.answers


@pytest.mark.parametrize(("asked", "lag"), [(7, 0), (5, 2)])
def test_a_result_says_how_much_newer_the_weights_were(spec, mesh, asked, lag):
    part = Validator(spec, Echo(), Layout(1), 0)
    result = result_of(0, [part.report(part.sample(), asked)], 1)
    assert result.values.get(LAG, 0) == lag


def test_a_record_that_is_left_out_counts_in_the_rows_of_the_others(spec, mesh, tmp_path):
    (tmp_path / "easy.jsonl").write_text("\n".join(json.dumps({"question": text, "answer": text})
                                                   for text in ("", "1", "2")))
    answers = Validator(spec, Echo(), Layout(1)).run(0).answers
    assert [row["row"] for row in answers["easy"]] == [1, 2]


def test_several_answers_have_a_mean_and_pass_at_k(spec, mesh):
    """The answer to the first problem is right in one of two samples."""
    role = Echo()
    settings = Validation(data={"easy": "easy.jsonl"}, samples=2, temperature=0.7)
    spec.run.validation = settings
    spec.data_path = spec.data_path
    decode, role.decode = role.decode, lambda tokens: ["7", *decode(tokens)[1:]]
    spec.run.shown_samples = sys.maxsize  # of `samples: all`
    result = Validator(spec, role, Layout(1)).run(0)
    values = result.values
    assert [row["rewards"] for row in result.answers["easy"]] == [0.0, 1.0]
    assert role.asked == ([0, 1, 2, 3], 0.7)
    assert values["validation/easy"] == pytest.approx(0.75)
    assert values["validation_pass/easy"] == 1.0
    assert values["validation_low/easy"] < 0.75 < values["validation_high/easy"]


def test_rewards_read_whether_an_answer_came_to_its_end(spec, mesh, tmp_path, request):
    @reward(in_rank=True)
    def ended_in_validation(completion, finished: bool = True):
        return 1.0 if finished is True else 0.0 if finished is False else 0.25

    request.addfinalizer(lambda: REWARDS.pop("ended_in_validation"))
    spec.run.validation = Validation(data={"hard": "hard.jsonl"}, reward="ended_in_validation")
    spec.rewards["ended_in_validation"] = read_contract("reward", ended_in_validation)
    assert Validator(spec, Echo(), Layout(1)).run(0).values["validation/hard"] == pytest.approx(1 / 3)
    lines = [json.dumps({"question": text, "answer": text, "finished": "early"}) for text in ("12345", "3")]
    (tmp_path / "hard.jsonl").write_text("\n".join(lines))
    spec.run.data = Data(train="", max_prompt_tokens=4, columns=["finished"])
    assert Validator(spec, Echo(), Layout(1)).run(0).values["validation/hard"] == 0.25, "the data's own goes before it"


def test_samples_that_cannot_differ_are_refused():
    with pytest.raises(ValueError, match="add  temperature: 1.0"):
        Validation(data={"easy": "easy.jsonl"}, samples=2)


def test_answers_may_be_drawn_from_other_tokens_than_those_of_training(spec, mesh):
    role = Echo()
    role.settings = SimpleNamespace(generation=Generation(top_k=7, top_p=0.8))
    Validator(spec, role, Layout(1)).run(0)
    assert role.limits is None
    spec.run.validation = replaced(spec.run.validation, temperature=1.0, top_p=0.95)
    Validator(spec, role, Layout(1)).run(0)
    assert role.limits == TokenLimits(top_k=7, top_p=0.95, min_p=0.0)


def replaced(settings: Validation, **more) -> Validation:
    return Validation(**{**settings.model_dump(), **more})


@pytest.mark.parametrize(("change", "says"), [
    ("top_p: 0.9", "`top_p` says nothing at temperature 0"), ("temperature: 1.0, top_p: 0", "greater than 0")])
def test_limits_that_say_nothing_are_refused_with_their_line(tmp_path, change, says):
    (tmp_path / "run.yaml").write_text("steps: 1\nroles: {actor: {model: {architecture: qwen3}}}\n"
                                       "data: {train: arithmetic/train.jsonl}\n"
                                       f"validation: {{data: {{one: arithmetic/heldout.jsonl}}, {change}}}\n")
    with pytest.raises(InvalidInput) as caught:
        load("grpo.yaml", str(tmp_path / "run.yaml"))
    assert any(mistake.where and mistake.where.line == 4 and says in str(mistake) for mistake in caught.value.mistakes)
