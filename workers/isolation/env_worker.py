"""Runs in a child process of environments (`workers.isolation.env_pool`): creates them and steps them.

    rank → child   {call, key: the row, columns, texts}: the model's turns to that row's environment, of which the last
                   is new; {forget: row}, whose environment is dropped
    child → rank   {call, observation, done, reward} or {call, error}
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable
from typing import Any

from distflow.contracts.decorators import Turn
from distflow.contracts.environments import load_environment
from workers.isolation.child import Answer, Handler, Message
from workers.isolation.user_code import guarded


class EnvironmentHandler(Handler):

    def __init__(self, kind: str, settings: dict[str, Any]):
        self.kind, self.settings = load_environment(kind), settings
        self.instances: dict[int, Any] = {}

    def answer(self, call: Message, _: Callable[[Message], None]) -> Answer:
        """Run the newest step, and all before it where the environment has to be created again."""
        answer: Message = {}
        with guarded(lambda error: answer.update(self._failure(call, error))):
            environment, texts = self.instances.get(call["key"]), call["texts"][-1:]
            if environment is None:
                environment, texts = self.kind(**call["columns"], **self.settings), call["texts"]
                self.instances[call["key"]] = environment
            for index, text in enumerate(texts):
                turn = environment.step(text)
                if inspect.isawaitable(turn):
                    return self._wait(call, environment, turn, texts[index + 1 :])
            answer |= _as_message(turn)
        return answer

    def forget(self, key: int) -> None:
        self.instances.pop(key, None)

    async def _wait(self, call: Message, environment: Any, turn: Awaitable[Any], texts: list[str]) -> Message:
        answer: Message = {}
        with guarded(lambda error: answer.update(self._failure(call, error))):
            found = await turn
            for text in texts:
                found = environment.step(text)
                found = await found if inspect.isawaitable(found) else found
            answer |= _as_message(found)
        return answer

    def _failure(self, call: Message, error: BaseException) -> Message:
        self.instances.pop(call["key"], None)
        return {"error": _utf8(f"{type(error).__name__}: {error}"[:1000])}


def _as_message(turn: Any) -> Message:
    good = isinstance(turn, Turn) and isinstance(turn.observation, str) and isinstance(turn.reward, int | float)
    if not good or not math.isfinite(turn.reward):
        raise TypeError(f"`step` returned {turn!r:.200}; it must return Turn(observation: str, done: bool, reward: a "
                        "finite number)")
    return {"observation": _utf8(turn.observation), "done": bool(turn.done), "reward": float(turn.reward)}


def _utf8(text: str) -> str:
    return text.encode(errors="replace").decode()
