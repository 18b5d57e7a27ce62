"""Games of Gymnasium, played in text."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("gymnasium", reason="pip install gymnasium")

import gymnasium
from gymnasium import spaces

from distflow.contracts.decorators import Turn
from workers.isolation.environments.games import Gymnasium

LAKE = {"id": "FrozenLake-v1", "settings": {"is_slippery": False}, "actions": ["left", "down", "right", "up"]}
WON = ["down", "down", "right", "right", "I go on.\n down ", "east? no: <action>Right</action> it is"]


def test_a_game_from_its_start_to_its_end():
    lake = Gymnasium("a lake", **LAKE, wrong_action=-0.25)
    assert lake.start() == "[S]FFF\nFHFH\nFFFH\nHFFG\nActions: left, down, right, up"
    assert lake.step("I jump") == Turn("'I jump' is no action.\nActions: left, down, right, up", reward=-0.25)
    assert lake.step("") == Turn("'' is no action.\nActions: left, down, right, up", reward=-0.25)
    for unspoken in ("<think>Or <action>down</action>?</think>I wait", "<think><action>down</action>"):  # verl#6424
        assert lake.step(unspoken).reward == -0.25
    *turns, last = [lake.step(text) for text in WON]
    assert turns[0] == Turn("(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG")
    assert [turn.reward for turn in turns] == [0.0] * 5
    assert not any(turn.done for turn in turns)
    assert (last.done, last.reward) == (True, 1.0)


@pytest.mark.parametrize(("id", "good", "bad", "choice"), [
    ("Blackjack-v1", "1", "2", "Actions: 0 to 1"), ("Blackjack-v1", "1", "[" * 100_000, "Actions: 0 to 1"),
    ("MountainCarContinuous-v0", "[0.5]", "[[1], 2]", "Action: Box(-1.0, 1.0, (1,), float32)"),
    ("Taxi-v4", "<action> 3 </action>", "north", "Actions: 0 to 5")])
def test_actions_without_names(id, good, bad, choice):
    game = Gymnasium("a game", id=id)
    assert game.start().endswith(choice)
    assert game.step(bad).observation == f"{bad[:80]!r} is no action.\n{choice}"
    assert "is no action" not in game.step(good).observation


def test_equal_seeds_are_equal_games():
    def deals(*rows: tuple[str, ...]) -> list[str]:
        return [Gymnasium(*row, id="Blackjack-v1").start() for row in rows]

    assert len({*deals(*(("a deal", str(seed)) for seed in range(20)))}) > 5
    assert len({*deals(*((f"deal {number}",) for number in range(20)))}) > 5
    assert len({*deals(("a deal", "3"), ("another", "3"), ("a third", "3"))}) == 1


def test_a_game_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "my_games.py").write_text('''
import gymnasium
from gymnasium import spaces


class Echo(gymnasium.Env):
    action_space, observation_space = spaces.Text(100), spaces.Dict({"n": spaces.Discrete(3), "b": spaces.Box(0, 1)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"n": 1, "b": self.observation_space["b"].low}, {}

    def step(self, action):
        return {"n": 2, "b": self.observation_space["b"].low}, len(action), False, True, {}


gymnasium.register("Echo-v0", entry_point=Echo)
''')
    monkeypatch.syspath_prepend(str(tmp_path))
    game = Gymnasium("q", id="my_games:Echo-v0")
    assert game.start() == f'{{"n": 1, "b": [0.0]}}\nAction: {game.space}'
    assert game.step("hello") == Turn('{"n": 2, "b": [0.0]}', True, 5.0)
    sys.modules.pop("my_games")


@pytest.mark.parametrize(("space", "said", "action"), [
    (spaces.Tuple([spaces.Discrete(3), spaces.Box(0, 1, (2,))]), "[1, [0.5, 0.5]]", "(1, array([0.5, 0.5]"),
    (spaces.Dict(move=spaces.Discrete(4), say=spaces.Text(9)), '{"move": 2, "say": "hi"}', "{'move': 2, 'say': 'hi'}"),
    (spaces.Sequence(spaces.Discrete(3)), "[1, 2, 1]", "(1, 2, 1)"), (spaces.MultiBinary(2), "[1, 0]", "array([1, 0]"),
    (spaces.Tuple([spaces.Discrete(3)]), "[1, 2]", None), (spaces.Dict(move=spaces.Discrete(4)), '{"to": 2}', None)])
def test_actions_of_several_parts(space, said, action):
    class Parts(gymnasium.Env):
        action_space, observation_space = space, spaces.Text(200)

        def reset(self, *, seed=None, options=None):
            return b"begun", {}

        def step(self, action):
            return repr(action), 1.0, True, False, {}

    gymnasium.register("Parts-v0", entry_point=Parts)
    game = Gymnasium("q", id="Parts-v0")
    assert game.start() == f'"b\'begun\'"\nAction: {space}'
    assert game.step(said).observation.startswith(action or f"{said!r} is no action.")
    del gymnasium.registry["Parts-v0"]


@pytest.mark.parametrize(("settings", "says"), [
    ({"id": "FrozenLke-v1"}, "NameNotFound: Environment `FrozenLke` doesn't exist"),
    ({"id": "nowhere:Lake-v1"}, "ModuleNotFoundError: No module named 'nowhere'"),
    ({"id": "FrozenLake-v1", "actions": ["up"]}, "has the actions Discrete(4), for which 1 names are given")])
def test_a_game_that_cannot_be_made_is_said(player, settings, says):
    assert says in player("games:Gymnasium", settings, safe=True)(0, "up").reason
