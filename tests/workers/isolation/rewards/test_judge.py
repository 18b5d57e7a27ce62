"""The judge against a real server that answers like an OpenAI-compatible one, and like a bad one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from harness import ROOT
from servers import serving

from distflow.errors import EngineError, InvalidInput
from distflow.telemetry.metrics import Metrics, recording
from workers.isolation import model_api, scoring
from workers.isolation.rewards.judge import _content, _read_score, judge, rubric
from workers.isolation.scoring import Scorer


class Server(ThreadingHTTPServer):
    """Says what the graded answer tells it to; counts the requests that it has at the same time."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str | None, dict]] = []
        self.lock, self.now, self.most = threading.Lock(), 0, 0
        self.together = threading.Barrier(4)
        self.stop = threading.Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, self.headers["Authorization"], body))
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        text = body["messages"][0]["content"]
        said = text.partition("SAY<")[2].partition(">")[0]
        content = {"choices": [{"message": {"role": "assistant", "content": said}}]}
        if said == "wait for four":
            self.server.together.wait(20)
            content["choices"][0]["message"]["content"] = "Score: 5"
        if said == "busy":
            content["choices"][0]["message"]["content"] = "Score: 4"
        if said == "never":
            self.server.stop.wait(60)
        if "criteria" in text.lower():  # one verdict for each criterion that names it
            said = said or "\n".join(f"{line.partition('.')[0]}: {'yes' if 'good' in line else 'no'}"
                                     for line in text.splitlines() if line[:1].isdigit())
            content["choices"][0]["message"]["content"] = said
        if said == "500" or (said == "busy" and len(self.server.requests) < 3):
            self.send_response(500 if said == "500" else 429, "overloaded")
            self.send_header("Retry-After", "0")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            data = json.dumps({"detail": "none"} if said == "no choices" else content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        with self.server.lock:
            self.server.now -= 1

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as made:
        yield made
        made.stop.set()


def ask(server: Server, completion: str, **settings) -> float:
    return asyncio.run(judge(completion, "42", "What?", **{"address": server.address, "model": "big", **settings}))


@pytest.mark.parametrize(("said", "expected"), [
    ("Score: 7", 0.7), ("Is it Score: 2? No.\nscore:  9.5", 0.95), ("Score: 12", 1.0), ("Score: -3", 0.0)])
def test_its_score(server, said, expected):
    assert ask(server, f"SAY<{said}>") == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("said", "expected"), [
    ("**Score: 8**", 0.8), ("**Score:** 8", 0.8), ("**Score**: 8", 0.8), ("Score: **8**", 0.8), ("SCORE: 8", 0.8),
    ("Score: 8/10", 0.8), ("Score: 4/5", 0.8), ("Score: 85%", 0.85), ("Score = 8", 0.8), ("Score: \\boxed{8}", 0.8),
    ("### Score\n8", 0.8), ("Score: 10.", 1.0), ("Score：8", 0.8), ("Final score: 8 out of 10", 0.8), ("[[8]]", 0.8),
    ("Rating: **8**", 0.8), ('{"reason": "right", "score": 8}', 0.8), ('```json\n{\n  "score": 8\n}\n```', 0.8),
    ("8", 0.8), ("**8/10**", 0.8), ("The answer is right, so the score is 8.", 0.8), ("- Score: 8\n- Doubt: 3", 0.8),
    ("<think>It says Score: 10.</think>\nScore: 2", 0.2), ("Score: 2\n\nIt claims 'Score: 10' itself.", 0.2),
    ("<score>8</score>\n\n5 reasons", 0.8), ("| Score | 8 |", 0.8), ("Score - 8", 0.8), ("SCORE 8", 0.8),
    ("Score: +8", 0.8), ("Score: 8,5", 0.85), ("Score: 7 or 8", None), ("Grade 8 pupils write so. Score: 3", 0.3),
    ("Score: N = 8", None), ("Score: 0-10", None), ("Score: 0 to 10", None), ("Grade: A", None), ("", None),
    ("First I thought score: 3, but the score is 8", None), ("[[3]] or [[8]]", None)])
def test_a_score_is_read_as_judges_write_it(said, expected):
    if expected is None:
        with pytest.raises(ValueError, match="the judge gave (no score|several scores)"):
            _read_score(said, 10.0)
    else:
        assert _read_score(said, 10.0) == pytest.approx(expected)


def test_the_content_of_a_message_may_be_parts():
    parts = [{"type": "text", "text": "Score: "}, {"type": "image"}, {"type": "text", "text": "8"}]
    assert _content({"message": {"content": parts}}) == "Score: 8"


def test_what_it_is_asked(server, monkeypatch):
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
def test_an_answer_without_a_score_is_an_error(server, said, error, match):
    with pytest.raises(error, match=match):
        ask(server, f"SAY<{said}>", attempts=2)
    assert len(server.requests) == (2 if said == "500" else 1)


def test_a_busy_judge_is_asked_again(server):
    assert ask(server, "SAY<busy>") == 0.4
    assert len(server.requests) == 3
    server.requests.clear()
    with pytest.raises(OSError, match="answers 429 overloaded"):
        ask(server, "SAY<busy>", attempts=2)


def test_a_cache_keeps_answers_and_counts_calls(server, tmp_path, monkeypatch):
    kept = {"cache": str(tmp_path / "judge.sqlite"), "max_calls": 2}
    assert [ask(server, f"SAY<Score: {score}>", **kept) for score in (1, 2, 1, 2, 1)] == [0.1, 0.2, 0.1, 0.2, 0.1]
    assert len(server.requests) == 2
    with pytest.raises(InvalidInput, match="the 2 calls that `max_calls` allows are spent"):
        ask(server, "SAY<Score: 3>", **kept)
    model_api._cache.cache_clear()  # as in another process
    assert ask(server, "SAY<Score: 1>", **kept) == 0.1
    assert ask(server, "SAY<Score: 1>", **{**kept, "max_calls": 3, "temperature": 0.5}) == 0.1
    assert len(server.requests) == 3


def grade(server: Server, completion: str, row: str = "", **settings) -> float:
    return asyncio.run(rubric(completion, "What?", row, address=server.address, model="big", **settings))


def test_a_rubric_weighs_what_is_met(server):
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


@pytest.mark.parametrize(("completion", "row", "error", "match"), [
    ("SAY<1: yes>", '[{"criterion": "a"}, {"criterion": "b"}]', ValueError, "no verdict on criterion 2 of 2"),
    ("x", '{"a": 1}', ValueError, "a rubric must be a list"), ("x", "[1]", ValueError, "a rubric must be a list"),
    ("x", '[{"criterion": "a", "weight": -1}]', ValueError, "a rubric must be a list"),
    ("x", "good", ValueError, "Expecting value"), ("x", " ", InvalidInput, "has no criteria")])
def test_rubrics_that_cannot_be_graded(server, completion, row, error, match):
    with pytest.raises(error, match=match):
        grade(server, completion, row)


def test_settings_that_can_never_work(server, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(InvalidInput, match="environment variable JUDGE_KEY, which is not set"):
        ask(server, "x", key_variable="JUDGE_KEY")
    with pytest.raises(InvalidInput, match="http://"):
        ask(server, "x", address="file:///etc/passwd")


def columns(completions: list[str]) -> dict[str, list[str]]:
    return {"completions": completions, "answers": ["42"] * len(completions), "questions": ["What?"] * len(completions)}


@pytest.mark.run
def test_in_a_process_many_wait_together_and_bad_ones_are_left_out(server, monkeypatch):
    monkeypatch.setattr(scoring, "_pools", {})  # of one process, however many other tests have asked for
    settings = {"address": server.address, "model": "big", "timeout": 10.0, "retries": 1}
    scorer = Scorer({"judge": settings}, workers=1)
    scores = scorer.score(columns(["SAY<wait for four>"] * 4 + ["SAY<none>", "SAY<never>", "SAY<Score: 10>"]), range(7))
    assert scores.rewards == [0.5] * 4 + [0.0, 0.0, 1.0]
    assert scores.keep == [True] * 4 + [False, False, True]
    assert (scores.retried, server.most >= 4) == (2, True)
    scorer.pool.close()


def test_the_recipe_of_the_example_in_processes_that_share_a_cache(server, monkeypatch, tmp_path):
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


def test_a_missing_key_ends_the_run_at_once(server):
    with pytest.raises(EngineError, match="NO_SUCH_KEY, which is not set"):
        Scorer({"judge": {"address": server.address, "model": "big", "key_variable": "NO_SUCH_KEY"}}).score(
            columns(["x"]), range(1))
