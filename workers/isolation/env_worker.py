"""Runs in a child process of environments (`workers.isolation.env_pool`): creates them and steps them.

    rank → child   {call, key: the row, columns, texts}: the model's turns to that row's environment, of which the last
                   is new; {forget: row}, whose environment is dropped. Where it has to be created also `state`, from
                   which it is restored, and `answers`: fingerprints of the answers to all texts but the last
    child → rank   {call, observation, done, reward} or {call, error}; with `behind` texts that follow the one that was
                   answered, and otherwise than before; with the `state` after it if the environment makes snapshots
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import xxhash

from distflow.contracts.decorators import Turn
from distflow.contracts.environments import load_environment
from workers.isolation.child import Answer, Handler, Message, packed
from workers.isolation.rewards_worker import LARGEST
from workers.isolation.user_code import guarded

_MAX_STATE = 256 << 10  # bytes of a snapshot; of a larger one nothing is kept, and steps are repeated instead


class EnvironmentHandler(Handler):

    def __init__(self, kind: str, settings: dict[str, Any], starts: bool):
        self.kind, self.settings, self.starts = load_environment(kind), settings, starts
        self.restores = all(callable(getattr(self.kind, name, None)) for name in ("snapshot", "restore"))
        self.instances: dict[int, Any] = {}

    def answer(self, call: Message, _: Callable[[Message], None]) -> Answer:
        """Run the newest step, and all before it where the environment has to be created again."""
        answer: Message = {}
        with guarded(lambda error: answer.update(self._failure(call, error))):
            environment = self._environment(call)
            for index, text in enumerate(call["texts"]):
                turn = self._turn(environment, text)
                if inspect.isawaitable(turn):
                    return self._wait(call, environment, turn, index)
                if self._ends(call, environment, turn, index, answer):
                    break
        return answer

    def forget(self, key: int) -> None:
        """Drop an environment. One with a plain method `close` is closed, as Gymnasium's are."""
        dropped = self.instances.pop(key, None)
        with guarded(lambda _: None, BaseException):
            close = getattr(dropped, "close", None)
            if callable(close) and not inspect.iscoroutinefunction(close):
                close()

    async def _wait(self, call: Message, environment: Any, turn: Awaitable[Any], index: int) -> Message:
        answer: Message = {}
        with guarded(lambda error: answer.update(self._failure(call, error))):
            while not self._ends(call, environment, await turn if inspect.isawaitable(turn) else turn, index, answer):
                index += 1
                turn = self._turn(environment, call["texts"][index])
        return answer

    def _turn(self, environment: Any, text: str) -> Any:
        return environment.start() if self.starts else environment.step(text)

    def _environment(self, call: Message) -> Any:
        environment = self.instances.get(call["key"])
        if environment is None:
            environment = self.kind(**call["columns"], **self.settings)
            if self.restores and call.get("state") is not None:
                environment.restore(call["state"])
            self.instances[call["key"]] = environment
        else:
            call["texts"] = call["texts"][-1:]
        return environment

    def _ends(self, call: Message, environment: Any, turn: Any, index: int, answer: Message) -> bool:
        """Put what answers text number `index` into `answer`. Return whether no text follows, or must follow since the
        answer was another one before."""
        found, behind = (_shown if self.starts else _checked)(turn), len(call["texts"]) - 1 - index
        if behind and call["answers"][index] == fingerprint_of(found):
            return False
        answer |= vars(found) | ({"behind": behind} if behind else {})
        state = environment.snapshot() if self.restores and not found.done else None
        if state is not None and len(packed(state)) <= _MAX_STATE:
            answer["state"] = state
        return True

    def _failure(self, call: Message, error: BaseException) -> Message:
        self.forget(call["key"])
        return {"error": _utf8(f"{type(error).__name__}: {error}"[:1000])}


def fingerprint_of(turn: Turn) -> bytes:
    return xxhash.xxh3_64_digest(packed([_utf8(turn.observation), bool(turn.done), float(turn.reward)]))


def _checked(turn: Any) -> Turn:
    """Return a turn of a user's environment with plain values; its reward may be a number of numpy or torch."""
    reward: Any = turn.reward if isinstance(turn, Turn) else None
    reward = reward.item() if hasattr(reward, "item") else reward
    if not (isinstance(reward, int | float) and abs(reward) <= LARGEST and isinstance(turn.observation, str)):
        raise TypeError(f"`step` returned {turn!r:.200}; it must return Turn(observation: str, done: bool, reward: a "
                        "finite number)")
    return Turn(_utf8(turn.observation), bool(turn.done), float(reward))


def _shown(text: Any) -> Turn:
    if not isinstance(text, str):
        raise TypeError(f"`start` returned {text!r:.200}; it must return a text")
    return Turn(_utf8(text), done=True)


def _utf8(text: str) -> str:
    return text.encode(errors="replace").decode()
