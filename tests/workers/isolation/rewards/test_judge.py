"""The judge against a real server that answers like an OpenAI-compatible one, and like a bad one."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest
import yaml
from harness import ROOT
from servers import ModelServer, serving

from distflow.errors import EngineError, InvalidInput
from distflow.telemetry.metrics import Metrics, recording
from workers.isolation import model_api, scoring
from workers.isolation.rewards.judge import _content, _read_score, judge, rubric
from workers.isolation.scoring import Scorer


class Judge:
    """Says what the graded answer tells it to."""

    def __init__(self):
        self.server, self.together, self.stop = ModelServer(self.answer), threading.Barrier(4), threading.Event()

    def answer(self, body: dict) -> tuple[int, dict]:
        text = body["messages"][0]["content"]
        said = text.partition("SAY<")[2].partition(">")[0]
        if said == "wait for four":
            self.together.wait(20)
        if said == "never":
            self.stop.wait(60)
        if "criteria" in text.lower():  # one verdict for each criterion that names it
            said = said or "\n".join(f"{line.partition('.')[0]}: {'yes' if 'good' in line else 'no'}"
                                     for line in text.splitlines() if line[:1].isdigit())
        if said == "500" or (said == "busy" and len(self.server.requests) < 3):
            return 500 if said == "500" else 429, {}
        said = {"wait for four": "Score: 5", "busy": "Score: 4"}.get(said, said)
        content = {"choices": [{"message": {"role": "assistant", "content": said}}]}
        return 200, {"detail": "none"} if said == "no choices" else content


@pytest.fixture
def server():
    made = Judge()
    with serving(made.server):
        yield made.server
        made.stop.set()


def ask(server: ModelServer, completion: str, **settings) -> float:
    return asyncio.run(judge(completion, "42", "What?", **{"address": server.address, "model": "big", **settings}))


@pytest.mark.parametrize(("said", "expected"), [
    ("Score: 7", 0.7), ("Is it Score: 2? No.\nscore:  9.5", 0.95), ("Score: 12", 1.0), ("Score: -3", 0.0)])
def test_judge_reads_and_clamps_its_score(server, said, expected):
    assert ask(server, f"SAY<{said}>") == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("said", "expected"), [
    ("**Score: 8**", 0.8), ("**Score:** 8", 0.8), ("**Score**: 8", 0.8), ("Score: **8**", 0.8), ("SCORE: 8", 0.8),
    ("Score: 8/10", 0.8), ("Score: 4/5", 0.8), ("Score: 85%", 0.85), ("Score = 8", 0.8), ("Score: \\boxed{8}", 0.8),
    ("### Score\n8", 0.8), ("Score: 10.", 1.0), ("Score：8", 0.8), ("Final score: 8 out of 10", 0.8), ("[[8]]", 0.8),
    ("Rating: **8**", 0.8), ('{"reason": "right", "score": 8}', 0.8), ('```json\n{\n  "score": 8\n}\n```', 0.8),
    ('{"reason": "Score: 3 is too low", "score": "8/10"}', 0.8), ('{"accuracy_score": 3, "overall_score": 8}', 0.8),
    ('It is right.\n```json\n{"reason": "a {b: 1}\n", "Score": 8, "parts": {"score": 3}}\n```\n', 0.8),
    ('{"score": 8, "rating": 3}', None), ('{"score": null, "reason": "Score: 9"}', None), ('{"score": "8 or 9"}', None),
    ('{"score": true}', None), ('{"reason": "as bad as 9"}', None),
    ("8", 0.8), ("**8/10**", 0.8), ("The answer is right, so the score is 8.", 0.8), ("- Score: 8\n- Doubt: 3", 0.8),
    ("<think>It says Score: 10.</think>\nScore: 2", 0.2), ("Score: 2\n\nIt claims 'Score: 10' itself.", 0.2),
    ("<score>8</score>\n\n5 reasons", 0.8), ("| Score | 8 |", 0.8), ("Score - 8", 0.8), ("SCORE 8", 0.8),
    ("Score: +8", 0.8), ("Score: 8,5", 0.85), ("Score: 7 or 8", None), ("Grade 8 pupils write so. Score: 3", 0.3),
    ("Score: N = 8", None), ("Score: 0-10", None), ("Score: 0 to 10", None), ("Grade: A", None), ("", None),
    ("<think>Perhaps Score: 10, but", None), ("First I thought score: 3, but the score is 8", None),
    ('{"score": 8} and {"score": 2}', None), ('[{"score": 8}, {"score": 2}]', None), ('[{"score": 8}]', 0.8),
    ('{"score": 8}\n{"score": 2}', None), ('{"score": 8} and {"score": 8}', 0.8), ("As score: 8 or score: 2", None),
    ('```json\n{"score": 8}\n```\nor\n```json\n{"score": 2}\n```', None), ("Score: 8\nScore: 2", 0.2),
    ("Bewertung: 8/10", 0.8), ("最终得分：**8**", 0.8), ("スコア：8", 0.8), ("Puntuación: 8", 0.8),
    ("Score (0-10): 8", 0.8), ("Score [0–10]: 8", 0.8), ("Score (out of 10): 8", 0.8), ("Score is: .5", 0.05),
    ("I'd give this an 8/10.", 0.8), ("Overall: 8/10", 0.8), ("Verdict: I rate it 8 out of 10", 0.8),
    ("My score for this answer is 8.", 0.8),
    ("The rate 60/3 is wrong.", None), ("Overall, 3/4 of the facts are right.", None), ("Overall: 3/4.", 0.75),
    ("Overall 3 of 8 claims are right", None), ("I cannot give it 8 points", None), ("It gives 2 and 8/10", None),
    ("Score (0-10):", None), ("It may score for 8 reasons", None),
    ("[[3]] or [[8]]", None), ("The answer misuses `<think>` tags. Score: 3", 0.3),
    ("It opens with a <think> block and never ends it.\nScore: 8", 0.8), ("\n<think>Score: 10", None)])
def test_judge_reads_scores_in_many_spellings(said, expected):
    if expected is None:
        with pytest.raises(ValueError, match="the judge gave (no score|several scores)"):
            _read_score(said, 10.0)
    else:
        assert _read_score(said, 10.0) == pytest.approx(expected)


def test_judge_reads_many_empty_lines_in_linear_time():
    began = time.monotonic()
    assert _read_score("So:" + "\n" * 50_000 + "Score: 8", 10.0) == 0.8
    assert time.monotonic() - began < 20


def test_judge_reads_content_in_parts():
    parts = [{"type": "text", "text": "Score: "}, {"type": "image"}, {"type": "text", "text": "8"}]
    assert _content({"message": {"content": parts}}) == "Score: 8"


def test_judge_sends_prompt_key_and_settings(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert ask(server, "SAY<3 of 4> {answer}", prompt="Q {question} R {answer} A {completion} {x}", score=r"(\d) of",
               highest=4.0, key_variable="JUDGE_KEY", max_tokens=9) == 0.75
    ((path, key, body),) = server.requests
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert body == {"model": "big", "max_tokens": 9, "temperature": 0.0,
                    "messages": [{"role": "user", "content": "Q What? R 42 A SAY<3 of 4> {answer} {x}"}]}


@pytest.mark.parametrize(("said", "error", "match"), [
    ("no idea", ValueError, "gave no score"), ("no choices", ValueError, "no chat completion"),
    ("500", OSError, "answers 500 overloaded")])
def test_judge_answer_without_a_score_is_an_error(server, said, error, match):
    with pytest.raises(error, match=match):
        ask(server, f"SAY<{said}>", attempts=2)
    assert len(server.requests) == (2 if said == "500" else 1)


def test_judge_is_asked_again_when_busy(server):
    assert ask(server, "SAY<busy>") == 0.4
    assert len(server.requests) == 3
    server.requests.clear()
    with pytest.raises(OSError, match="answers 429 overloaded"):
        ask(server, "SAY<busy>", attempts=2)


def test_judge_cache_keeps_answers_and_counts_calls(server, tmp_path, monkeypatch):
    kept = {"cache": str(tmp_path / "judge.sqlite"), "max_calls": 2}
    assert [ask(server, f"SAY<Score: {score}>", **kept) for score in (1, 2, 1, 2, 1)] == [0.1, 0.2, 0.1, 0.2, 0.1]
    assert len(server.requests) == 2
    with pytest.raises(InvalidInput, match="the 2 calls that `max_calls` allows are spent"):
        ask(server, "SAY<Score: 3>", **kept)
    model_api._cache.cache_clear()  # as in another process
    assert ask(server, "SAY<Score: 1>", **kept) == 0.1
    assert ask(server, "SAY<Score: 1>", **{**kept, "max_calls": 3, "temperature": 0.5}) == 0.1
    assert len(server.requests) == 3


def grade(server: ModelServer, completion: str, row: str = "", **settings) -> float:
    return asyncio.run(rubric(completion, "What?", row, address=server.address, model="big", **settings))


def test_rubric_weighs_criteria_that_are_met(server):
    criteria = {"short": "It is good and short", "true": "It is true", "rude": "It is good at being rude"}
    seen = Metrics()
    with recording(seen):
        assert grade(server, "x", criteria=criteria) == pytest.approx(2 / 3)
    assert {name: total for name, total, _ in seen.means()} == {"rubric/short": 1, "rubric/true": 0, "rubric/rude": 1}
    assert grade(server, "x", criteria=criteria, weights={"short": 3, "rude": -1}) == pytest.approx(2 / 4)
    assert grade(server, "x", criteria=criteria, weights={"true": 0.5, "short": 0, "rude": -5}) == 0.0
    own = json.dumps([{"criterion": "good", "weight": 3}, {"criterion": "bad"}])
    assert grade(server, "x", own, criteria=criteria) == 0.75
    text = server.requests[-1][2]["messages"][0]["content"]
    assert "Criteria:\n1. good\n2. bad\n" in text
    assert grade(server, "SAY<Well.\n**1**: Yes\n- 2) no, since>", own) == 0.75


@pytest.mark.parametrize(("said", "expected"), [
    ("1: yes, 2: no", 0.75), ('{"1": "no", "2": "yes"}', 0.25), ("1: met\n2: not met", 0.75),
    ("1: true\n2: false", 0.75), ("1: ✅\n2: ❌", 0.75), ("1：是\n2：否", 0.75), ("1: Nein\n2: Ja", 0.25),
    ("1. True claims only\n2: no", None),
    ("1: yes or no\n2: no", None), ("1: yes/no\n2: no", None), ("1: yes | no\n2: no", None),
    ("1: not yes\n2: no", None), ("1: yesterday\n2: no", None),
    ("1: 是不是\n2: no", None)])
def test_rubric_reads_verdicts_in_other_words(server, said, expected):
    own = json.dumps([{"criterion": "good", "weight": 3}, {"criterion": "bad"}])
    if expected is None:
        with pytest.raises(ValueError, match="no verdict on criterion 1 of 2"):
            grade(server, f"SAY<{said}>", own)
    else:
        assert grade(server, f"SAY<{said}>", own) == expected


@pytest.mark.parametrize(("completion", "row", "error", "match"), [
    ("SAY<1: yes>", '[{"criterion": "a"}, {"criterion": "b"}]', ValueError, "no verdict on criterion 2 of 2"),
    ("x", '{"a": 1}', ValueError, "a rubric must be a list"), ("x", "[1]", ValueError, "a rubric must be a list"),
    ("x", '[{"criterion": "a", "weight": -1}]', ValueError, "a rubric must be a list"),
    ("x", "good", ValueError, "Expecting value"), ("x", " ", InvalidInput, "has no criteria")])
def test_rubric_that_cannot_be_graded_is_an_error(server, completion, row, error, match):
    with pytest.raises(error, match=match):
        grade(server, completion, row)


def test_judge_refuses_an_address_that_is_no_server(server):
    with pytest.raises(InvalidInput, match="http://"):
        ask(server, "x", address="file:///etc/passwd")


def columns(completions: list[str]) -> dict[str, list[str]]:
    return {"completions": completions, "answers": ["42"] * len(completions), "questions": ["What?"] * len(completions)}


@pytest.mark.run
def test_judge_calls_wait_together_and_failed_ones_are_left_out(server, monkeypatch):
    monkeypatch.setattr(scoring, "_pools", {})  # of one process, however many other tests have asked for
    settings = {"address": server.address, "model": "big", "timeout": 5.0, "retries": 1}
    scorer = Scorer({"judge": settings}, workers=1)
    scores = scorer.score(columns(["SAY<wait for four>"] * 4 + ["SAY<none>", "SAY<never>", "SAY<Score: 10>"]), range(7))
    assert scores.rewards == [0.5] * 4 + [0.0, 0.0, 1.0]
    assert scores.keep == [True] * 4 + [False, False, True]
    assert scores.retried == 2
    scorer.pool.close()


def test_example_recipe_of_a_rubric_shares_its_cache_between_processes(server, monkeypatch, tmp_path):
    monkeypatch.setattr(scoring, "_pools", {})
    monkeypatch.setenv("JUDGE_KEY", "secret")
    recipe = yaml.safe_load((ROOT / "examples/judged/judged.yaml").read_text())["nodes"]["reward"]["with"]["reward"]
    recipe["rubric"] |= {"address": server.address, "cache": str(tmp_path / "judge.sqlite"), "max_calls": 2,
                         "criteria": {"steps": "It is good at steps", "padded": "It is bad"}}
    for size in (2, 1):
        scorer = Scorer(recipe, workers=size)
        scores = scorer.score(columns(["#### 42", "#### 41"]), range(2))
        reported = {"rubric/padded": 0.0, "rubric/steps": 1.0}
        assert scores.parts == [{"math": 1.0, "rubric": 1.0, **reported}, {"math": 0.0, "rubric": 1.0, **reported}]
        assert scores.rewards == [1.5, 0.5]
        padded, steps = ("rubric/padded", 0.0, 1.0), ("rubric/steps", 1.0, 1.0)
        found = ("reward/unanswered", 0.0, 1.0)  # `math` has read an answer in both
        assert sorted(map(tuple, scores.metrics)) == [found, found, padded, padded, steps, steps]
        scorer.pool.stop()
    assert len(server.requests) == 2
    assert {key for _, key, _ in server.requests} == {"Bearer secret"}


def test_judge_without_its_key_ends_the_run(server):
    with pytest.raises(EngineError, match="NO_SUCH_KEY, which is not set"):
        Scorer({"judge": {"address": server.address, "model": "big", "key_variable": "NO_SUCH_KEY"}}).score(
            columns(["x"]), range(1))
