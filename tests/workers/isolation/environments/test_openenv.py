"""Environments behind an OpenEnv server: one of the package, where it is installed, and one that says what it says."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import subprocess
import sys
import threading

import pytest

pytest.importorskip("websockets", reason="pip install websockets")

from websockets.sync.server import serve

from distflow.contracts.decorators import Turn
from workers.isolation.env_pool import EnvFailure

SERVER = '''
import random, uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Guess(Action):
    number: int

class Hint(Observation):
    text: str = ""

class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, most=9, **more):
        self.right = random.Random(seed).randint(0, most)
        return Hint(text=f"Guess a number from 0 to {most}.")

    def step(self, action, timeout_s=None, **more):
        if action.number == 13:
            raise RuntimeError("bad luck")
        hint = "right" if action.number == self.right else "too low" if action.number < self.right else "too high"
        return Hint(text=hint, done=hint == "right", reward=float(hint == "right"))

    @property
    def state(self):
        return State(episode_id="0", step_count=0)

uvicorn.run(create_fastapi_app(Numbers, Guess, Hint, max_concurrent_envs=3), host="127.0.0.1", port=0)
'''


def answers_of(seeds: dict) -> dict:
    """What the server says, by the kind of a message."""
    def step(data):
        if not str(data.get("number")).lstrip("-").isdigit():
            return {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "Invalid message",
                                              "errors": [{"msg": "Input should be a valid integer"}]}}
        number, right = int(data["number"]), seeds["seed"] % 10
        if number == 13:
            return {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "bad luck"}}
        hint = "right" if number == right else "too low" if number < right else "too high"
        return {"type": "observation", "data": {"observation": {"text": hint}, "done": hint == "right",
                                                "reward": float(hint == "right")}}

    def reset(data):
        seeds["seed"] = data["seed"]
        shown = {"text": f"Guess a number from 0 to {data.get('most', 9)}."}
        return {"type": "observation", "data": {"observation": shown, "done": False, "reward": None}}

    return {"reset": reset, "step": step}


@pytest.fixture(params=["openenv", "messages"])
def address(request, tmp_path):
    if request.param == "messages":
        room = threading.Semaphore(3)

        def session(socket):
            if not room.acquire(blocking=False):
                socket.send(json.dumps({"type": "error", "data": {
                    "code": "CAPACITY_REACHED", "message": "Server at capacity: 3/3 sessions active."}}))
                return
            answers = answers_of({})
            for message in itertools.takewhile(lambda each: each["type"] != "close", map(json.loads, socket)):
                socket.send(json.dumps(answers[message["type"]](message["data"])))
            room.release()

        with serve(session, "127.0.0.1", 0) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
            server.shutdown()
        return
    if importlib.util.find_spec("openenv") is None:
        pytest.skip("pip install openenv-core")
    (tmp_path / "numbers_server.py").write_text(SERVER)
    with subprocess.Popen([sys.executable, str(tmp_path / "numbers_server.py")], stderr=subprocess.PIPE,
                          text=True) as process:
        yield next(found[0] for line in process.stderr if (found := re.search(r"http://127.0.0.1:\d+", line)))
        process.kill()


@pytest.fixture
def play(player):
    """`play(address, …)` returns a function that says a text for a row with a seed, and returns its turn."""
    def play(server: str, **settings):
        say = player("openenv:OpenEnv", {"server": server, **settings})
        return lambda row, text, seed="3": say(row, text, question="guess", seed=seed)

    return play


def test_a_game(address, play):
    say = play(address, action="number", show="text", wrong_action=-0.5)
    assert say(0, "-1") == Turn("too low")
    assert say(0, "I think <action> 99 </action>") == Turn("too high")
    assert say(0, "<think>5? <action>5</action></think>\n 99") == Turn("too high")  # verl#6424
    wrong = say(0, "seven")
    assert wrong.observation.startswith("This is no action: ")
    assert "valid integer" in wrong.observation
    assert wrong.reward == -0.5
    *_, last = [say(0, str(number)) for number in range(10)][: 1 + next(
        number for number in range(10) if say(1, str(number)) == Turn("right", True, 1.0))]
    assert last == Turn("right", True, 1.0), "equal seeds are equal games"


def test_actions_as_json(address, play):
    say = play(address, action=None, reset={"most": 5})
    assert say(0, 'So: <action>{"number": 99}</action>') == Turn('{"text": "too high"}')
    assert say(0, "[1]") == Turn("This is no action: it must be a JSON object")
    assert say(0, "{").observation.startswith("This is no action: Expecting")


def test_its_beginning(address, player):
    say = player("openenv:OpenEnv", {"server": address, "show": "text", "reset": {"most": 5}}, starts=True)
    assert say(0, "", question="guess") == Turn("Guess a number from 0 to 5.", True)


def test_sessions_end_with_their_rows(address, player):
    say = player("openenv:OpenEnv", {"server": address, "show": "text"}, safe=True, processes=1, starts=True)
    shown = [say(row, "", question="guess") for row in range(12)]  # the server has three sessions
    assert shown == [Turn("Guess a number from 0 to 9.", True)] * 12


def test_what_fails_costs_its_own_row(address, play):
    say = play(address, action="number", show="text")
    assert say(0, "-1") == Turn("too low")
    assert say(1, "13") == EnvFailure("OSError: the server refuses a step: EXECUTION_ERROR: bad luck")
    assert say(0, "99") == Turn("too high")
    for row in range(10, 13):
        last = say(row, "-1")
    assert "CAPACITY_REACHED: Server at capacity: 3/3 sessions" in last.reason
    assert say(0, "-1") == Turn("too low")


def test_settings_that_do_not_fit(address, play):
    assert play(address, show="hint")(0, "1").reason == "ValueError: its observation has no field 'hint'; it has text"
    assert "ConnectionRefusedError" in play("http://127.0.0.1:9")(0, "1").reason
