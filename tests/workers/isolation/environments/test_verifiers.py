"""Environments of the verifiers library: of its own kinds, and one of reasoning-gym."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

pytest.importorskip("verifiers", reason="pip install verifiers")

from distflow.contracts.decorators import Turn

MODULE = '''
import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **more):
        said, right = messages[-1]["content"].strip(), state["answer"]
        if said == right:
            state["final_env_response"] = [{"role": "user", "content": "right"}]
            return state["final_env_response"]
        return [{"role": "user", "content": "too low" if int(said) < int(right) else "too high"}]


class Rewritten(Guess):
    async def get_prompt_messages(self, state):
        return [vf.UserMessage(content=f"turn {len(state['trajectory'])}")]


class Forgetful(Guess):
    async def get_prompt_messages(self, state):
        return state["prompt"] if not state["trajectory"] else [vf.UserMessage(content="what was it?")] * 3


def won(state):
    return float(state["final_env_response"] is not None)


def told(completion, answer):
    return float(answer in completion[-1]["content"])


def load_environment(kind="guess"):
    data = Dataset.from_list([{"question": f"Guess: game {n}.", "answer": str(n)} for n in range(5)])
    if kind == "tools":
        return vf.ToolEnv(dataset=data, tools=[add], rubric=vf.Rubric(funcs=[told]), max_turns=5, system_prompt="Hi.")
    if kind == "gym":
        return vf.ReasoningGymEnv(gym="basic_arithmetic", num_train_examples=8, num_eval_examples=1)
    made = {"guess": Guess, "rewritten": Rewritten, "forgetful": Forgetful}[kind]
    return made(dataset=data, rubric=vf.Rubric(funcs=[won], weights=[2.0]), max_turns=4)
'''


@pytest.fixture
def play(player, tmp_path, monkeypatch):
    """`play(kind)` returns a function that says a text for a row and an example, and returns its turn."""
    (tmp_path / "my_verifiers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def play(kind: str):
        settings = {"id": "my_verifiers", "settings": {"kind": kind}}
        say = player("verifiers:Verifiers", settings, True, True, processes=1)
        return lambda row, text, example=3: say(row, text, example=str(example))

    return play


@pytest.fixture
def examples_of(play, tmp_path):
    """`examples_of(kind)` returns the records that are written of an environment."""
    def write(kind: str) -> list[dict]:
        from workers.isolation.environments.verifiers import write_examples

        write_examples("my_verifiers", str(tmp_path / "examples.jsonl"), json.dumps({"kind": kind}))
        return [json.loads(line) for line in (tmp_path / "examples.jsonl").read_text().splitlines()]

    yield write
    sys.modules.pop("my_verifiers", None)


def test_turns_until_the_rubric_gives_the_reward(play):
    say = play("guess")
    assert [say(0, "1"), say(1, "9", 4), say(0, "9")] == [Turn("too low"), Turn("too high"), Turn("too high")]
    assert [say(0, "3"), say(1, "4", 4)] == [Turn("", True, 2.0)] * 2
    assert [say(2, "0").done for _ in range(4)] == [False, False, False, True]


def test_tools(play, examples_of):
    say = play("tools")
    assert say(0, '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>') == Turn("3")
    assert say(0, "It is 3.") == Turn("", True, 1.0)
    first, *rest = examples_of("tools")
    assert len(rest) == 4
    assert first["question"] == [{"role": "system", "content": "Hi."}, {"role": "user", "content": "Guess: game 0."}]
    assert (first["answer"], first["example"], first["tools"][0]["function"]["name"]) == ("0", 0, "add")


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="pip install reasoning-gym")
def test_one_of_reasoning_gym(play, examples_of):
    from reasoning_gym import create_dataset

    say, examples, problems = play("gym"), examples_of("gym"), create_dataset("basic_arithmetic", size=9, seed=0)
    for number in (0, 5):
        right = problems[number]["answer"]
        assert examples[number]["question"][-1]["content"] == problems[number]["question"]
        assert say(number, f"<answer>{right}</answer>", number) == Turn("", True, 1.0)
        assert say(10 + number, "<answer>nothing</answer>", number).reward < 0.5


@pytest.mark.parametrize(("kind", "example", "says"), [
    ("guess", 99, "99 is out of bounds"), ("rewritten", 1, "begins with another prompt than its examples have"),
    ("forgetful", 1, "changes earlier messages"), ("nothing", 1, "Failed to load environment 'my_verifiers'")])
def test_what_cannot_be_played_is_said(play, kind, example, says):
    assert says in play(kind)(0, "0", example).reason
