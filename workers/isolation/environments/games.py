"""Environments of Gymnasium, played in text."""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import load_env_creator

from distflow.contracts.decorators import Turn, environment
from workers.isolation.rewards import behind_thoughts

_ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_MARKED = re.compile(r"\x1b\[[0-9;]*?4[0-9]m(.*?)\x1b\[0m", re.DOTALL)  # a coloured background shows where one stands
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


@environment(safe=True)
class Gymnasium:
    """Plays a game of Gymnasium, or of a package that registers some: each turn is one action.

    The action is in the last `<action>…</action>` of a turn, else it is the turn's last line: a name of `actions` or a
    number where there is a choice, JSON where numbers are wanted, else the text itself. The game is that of the column
    `seed`, or without one of the question, so that equal questions are equal games.
    """

    def __init__(self, question: str, seed: str = "", *, id: str, actions: list[str] | None = None,
                 settings: dict | None = None, show: Literal["picture", "numbers"] = "picture",
                 wrong_action: float = 0.0):
        """`id` as in `gymnasium.make`, which gets `settings` too: `FrozenLake-v1`, or `my_games:Maze-v0` of a module.
        `show` its picture as text where it has one, or what it observes. `wrong_action` is the reward for a turn
        without an action that the game has; the game stays as it is then."""
        texts = "ansi" in (getattr(_class_of(id), "metadata", {}).get("render_modes") or ())
        pictured = texts and show == "picture"
        more = {"render_mode": "ansi"} if pictured else {}
        self.game = gymnasium.make(id, disable_env_checker=True, **more, **settings or {})
        self.actions, self.pictured, self.wrong_action = actions, pictured, wrong_action
        self.space, self.seed = self.game.action_space, zlib.crc32((seed or question).encode())
        if actions is not None and len(actions) != getattr(self.space, "n", None):
            raise ValueError(f"{id} has the actions {self.space}, for which {len(actions)} names are given")
        self.observed, _ = self.game.reset(seed=self.seed)

    def start(self) -> str:
        return f"{self._shown()}\n{self._choice()}"

    def step(self, text: str) -> Turn:
        try:
            action = self._action(text)
        except ValueError as error:
            return Turn(f"{error}\n{self._choice()}", reward=self.wrong_action)
        self.observed, reward, ended, cut, _ = self.game.step(action)
        return Turn(self._shown(), bool(ended or cut), float(reward))

    def _action(self, text: str) -> Any:
        spoken = behind_thoughts(text) or ""
        tagged, lines = _ACTION.findall(spoken), spoken.strip().splitlines()
        said = (tagged or lines or [""])[-1].strip()
        if self.actions is not None:
            names = [name.lower() for name in self.actions]
            if said.lower() not in names:
                raise ValueError(f"{said[:80]!r} is no action.")
            return names.index(said.lower()) + getattr(self.space, "start", 0)
        with contextlib.suppress(ValueError, TypeError, LookupError, RecursionError, OverflowError):
            action = said if isinstance(self.space, spaces.Text) else _as_action(self.space, json.loads(said))
            if type(action) is not bool and self.space.contains(action):
                return action
        raise ValueError(f"{said[:80]!r} is no action.")

    def _choice(self) -> str:
        if self.actions is not None:
            return f"Actions: {', '.join(self.actions)}"
        if isinstance(self.space, spaces.Discrete):
            return f"Actions: {self.space.start} to {self.space.start + self.space.n - 1}"
        return f"Action: {self.space}"

    def _shown(self) -> str:
        if self.pictured:
            return _COLOR.sub("", _MARKED.sub(r"[\1]", str(self.game.render()))).strip()
        return json.dumps(_plain(self.observed), default=str) if not isinstance(self.observed, str) else self.observed


def _class_of(id: str) -> Any:
    module, separator, name = id.rpartition(":")
    if separator:
        __import__(module)
    found = gymnasium.spec(name).entry_point
    return load_env_creator(found) if isinstance(found, str) else found


def _as_action(space: spaces.Space, value: Any) -> Any:
    """Return what JSON says as an action of a space."""
    match space:
        case spaces.Dict():
            return {name: _as_action(part, value[name]) for name, part in space.items()}
        case spaces.Tuple():
            return tuple(_as_action(part, each) for part, each in zip(space, value, strict=True))
        case spaces.Sequence():
            return tuple(_as_action(space.feature_space, each) for each in value)
        case spaces.Text() | spaces.Discrete():
            return value
    return np.asarray(value, space.dtype)


def _plain(value: Any) -> Any:
    """Return an observation as JSON has it."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value
