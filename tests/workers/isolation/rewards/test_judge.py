"""The judge against a real server that answers like an OpenAI-compatible one, and like a bad one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from distflow.errors import EngineError, InvalidInput
from workers.isolation import scoring
from workers.isolation.rewards.judge import judge
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
        if said == "wait for four":
            self.server.together.wait(20)
            said = "Score: 5"
        if said == "never":
            self.server.stop.wait(60)
        content = {"choices": [{"message": {"role": "assistant", "content": said}}]}
        if said == "500":
            self.send_error(500, "overloaded")
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
    made = Server()
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.stop.set()
    made.shutdown()
    thread.join()
    made.server_close()


def ask(server: Server, completion: str, **settings) -> float:
    return asyncio.run(judge(completion, "42", "What?", **{"address": server.address, "model": "big", **settings}))


@pytest.mark.parametrize(("said", "expected"), [
    ("Score: 7", 0.7), ("Is it Score: 2? No.\nscore:  9.5", 0.95), ("Score: 12", 1.0), ("Score: -3", 0.0)])
def test_its_score(server, said, expected):
    assert ask(server, f"SAY<{said}>") == pytest.approx(expected, abs=1e-6)


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
        ask(server, f"SAY<{said}>")


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


def test_a_missing_key_ends_the_run_at_once(server):
    with pytest.raises(EngineError, match="NO_SUCH_KEY, which is not set"):
        Scorer({"judge": {"address": server.address, "model": "big", "key_variable": "NO_SUCH_KEY"}}).score(
            columns(["x"]), range(1))
