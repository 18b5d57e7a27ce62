"""A teacher behind a real server that answers like vLLM's, and like a bad one."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from reported import reported
from servers import ModelServer, serving

from distflow.config.load import load
from distflow.data.batch import Ragged
from distflow.errors import InvalidInput, RewardsFailed
from distflow.telemetry.metrics import current
from planners import plan
from workers.functions.served_teacher import _place, served_top_logprobs

WORDS = "abcdefghij"  # token 3 is `d`


class Teacher:
    """Finds the token that is one above the last most probable; a prompt with token 9 is answered badly."""

    def __init__(self):
        self.server, self.words, self.failures = ModelServer(self.answer), WORDS, 0

    def answer(self, body: dict) -> tuple[int, dict]:
        tokens = body["prompt"]
        if 9 in tokens or len(self.server.requests) <= self.failures:
            return 400 if 9 in tokens else 503, {}
        places: list[dict | None] = [None]
        for last, token in zip(tokens, tokens[1:]):
            found = {**dict(best(last, body["prompt_logprobs"])), token: chance(last, token)}
            places.append({str(each): {"logprob": logprob, "decoded_token": self.words[each]}
                           for each, logprob in found.items()})
        return 200, {"choices": [{"text": "x", "prompt_logprobs": places}]}


def chance(last: int, token: int) -> float:
    weights = [1 / (1 + (each - last - 1) % 10) for each in range(10)]
    return math.log(weights[token] / sum(weights))


def best(last: int, count: int) -> list[tuple[int, float]]:
    return sorted(((token, chance(last, token)) for token in range(10)), key=lambda pair: -pair[1])[:count]


@pytest.fixture
def teacher():
    made = Teacher()
    with serving(made.server):
        yield made


def ask(teacher: Teacher, responses: list[list[int]], **settings):
    column = Ragged.from_rows([torch.tensor(row, dtype=torch.int64) for row in responses])
    prompts = Ragged.from_rows([torch.tensor([0, 1]) for _ in responses])
    texts = [" ".join(WORDS[token] for token in row) for row in responses]
    return served_top_logprobs(prompts, column, texts, torch.arange(len(responses)), model="big",
                               **{"address": teacher.server.address, "k": 3, **settings})


def test_what_it_is_asked_and_what_is_read(teacher, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "secret")
    teacher.failures = 1
    tokens, logprobs, keep = ask(teacher, [[2, 7], [5]], key_variable="TEACHER_KEY", concurrency=1)
    path, key, body = teacher.server.requests[1]
    assert (path, key) == ("/v1/completions", "Bearer secret")
    assert body == {"model": "big", "prompt": [0, 1, 2, 7], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 3}
    assert keep.tolist() == [True, True]
    assert tokens.lengths.tolist() == [2, 1]
    expected = [best(1, 3), best(2, 3), best(1, 3)]
    assert tokens.values[:, 0].tolist() == [[token for token, _ in place] for place in expected]
    assert torch.allclose(logprobs.values[:, 0], torch.tensor([[value for _, value in place] for place in expected]))
    again = ask(teacher, [[4]], k=3)
    two, *_ = ask(teacher, [[4]], top_tokens=again[0], top_logprobs=again[1])
    assert two.values.shape == (1, 2, 3)


def test_a_token_without_probability_is_not_among_the_most_probable():
    given = {str(token): {"logprob": logprob, "decoded_token": WORDS[token]}
             for token, logprob in ((4, -9999.0), (7, -0.5), (2, -1.0))}
    assert _place(2, given, 4) == ([7, 2, 4, 0], [-0.5, -1.0, -math.inf, -math.inf], "c")


def test_a_row_without_an_answer_leaves_the_step_and_the_run_ends_if_none_has_one(teacher, monkeypatch):
    reported()
    tokens, logprobs, keep = ask(teacher, [[2, 9], [5]])
    assert keep.tolist() == [False, True]
    assert (logprobs.values[:2] == -torch.inf).all()
    assert tokens.values.shape == (3, 1, 3)
    assert reported()["distillation/failed"] == 1
    monkeypatch.setattr(current(), "step", 1)
    with pytest.raises(RewardsFailed, match="no row of 1 steps in a row has an answer.*answers 400"):
        ask(teacher, [[9], [9, 9]], patience=1)


def test_requests_are_kept_and_counted(teacher, tmp_path):
    settings = {"cache": str(tmp_path / "calls.sqlite"), "max_calls": 2}
    first = ask(teacher, [[2, 7], [5]], **settings)
    with ThreadPoolExecutor(1) as threads:  # semi_sync makes one in each step
        second = threads.submit(ask, teacher, [[2, 7], [5]], **settings).result()
    assert torch.equal(first[1].values, second[1].values)
    assert len(teacher.server.requests) == 2
    with pytest.raises(InvalidInput, match="the 2 calls that `max_calls` allows are spent"):
        ask(teacher, [[3]], **settings)


def test_another_tokenizer_is_refused(teacher):
    teacher.words = ["a", "b", "<begin>c", *WORDS[3:]]
    assert ask(teacher, [[2, 7], [5]])[2].all()  # the student leaves special tokens out
    teacher.words = [""] * 10
    with pytest.raises(InvalidInput, match="another tokenizer"):
        ask(teacher, [[2, 7]])
    teacher.words = "xyzuvwkmlo"
    with pytest.raises(InvalidInput, match="has another tokenizer than the student.*'zm' where the student wrote 'ch'"):
        ask(teacher, [[2, 7], [5]])


DAG = """
name: served
roles: {actor: {trained: true}}
nodes:
  rollout: {role: actor, type: MODEL_INFERENCE, function: generate}
  teacher: {role: reward, type: COMPUTE, function: served_top_logprobs, dependencies: [rollout],
            with: {address: "http://localhost:1/v1", model: big, key_variable: TEACHER_KEY}}
  update: {role: actor, type: MODEL_TRAIN, function: distillation_update, dependencies: [teacher]}
"""


def test_a_missing_key_and_another_temperature_are_mistakes_of_the_plan(tmp_path, monkeypatch):
    (tmp_path / "served.yaml").write_text(DAG)
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    with pytest.raises(InvalidInput, match="its key from the environment variable TEACHER_KEY, which is not set"):
        load(str(tmp_path / "served.yaml"))
    monkeypatch.setenv("TEACHER_KEY", "secret")
    plan(load(str(tmp_path / "served.yaml")), 1)
    with pytest.raises(InvalidInput, match="log-probabilities at temperature 1, but node `update`"):
        plan(load(str(tmp_path / "served.yaml"), None, ["roles.actor.generation.temperature=0.7"]), 1)
