"""Runs in an environment process: creates environments, steps them with the model's turns and sends the results.

Messages are msgpack, numbers and texts alone; neither side unpickles anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import socket
from typing import Any

import msgpack

from distflow.contracts.decorators import Turn
from workers.isolation.user_code import guarded


def serve(connection: socket.socket, kind: type, settings: dict[str, Any]) -> None:
    """Answer calls until the connection is closed.

    A call holds `row`, `columns` and `texts`, the model's turns to that row's environment, of which the last is new;
    or `end`, a row whose environment is dropped.
    """
    asyncio.run(_EnvServer(connection, kind, settings).serve())


class _EnvServer:
    def __init__(self, connection: socket.socket, kind: type, settings: dict[str, Any]):
        connection.setblocking(False)
        self.connection, self.kind, self.settings = connection, kind, settings
        self.instances: dict[int, Any] = {}
        self.tasks: set[asyncio.Task] = set()
        self.open: dict[int, dict[str, Any]] = {}
        """Newest unanswered call of each row."""
        self.messages, self.sending = msgpack.Unpacker(unicode_errors="surrogatepass"), asyncio.Lock()

    async def serve(self) -> None:
        while data := await asyncio.get_running_loop().sock_recv(self.connection, 1 << 16):
            self._receive(data)

    def _receive(self, data: bytes) -> None:
        self.messages.feed(data)
        for call in self.messages:
            if "end" in call:
                self.instances.pop(call["end"], None)
                self.open.pop(call["end"], None)
                continue
            self.open[call["row"]] = call
            task = asyncio.create_task(self._answer(call))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _answer(self, call: dict[str, Any]) -> None:
        with contextlib.suppress(BlockingIOError):  # an `end` may have arrived during another step
            self._receive(self.connection.recv(1 << 16))
        if self.open.get(call["row"]) is not call:
            return
        answer: dict[str, Any] = {}
        with guarded(lambda error: answer.update(error=_utf8(f"{type(error).__name__}: {error}"[:1000]))):
            answer.update(_as_message(await self._step(call)))
        if "error" in answer:
            self.instances.pop(call["row"], None)
        if self.open.pop(call["row"], None) is not call:
            return
        async with self.sending:
            await asyncio.get_running_loop().sock_sendall(self.connection,
                                                          msgpack.packb({"row": call["row"], **answer}))

    async def _step(self, call: dict[str, Any]) -> Any:
        """Run the newest step, and all before it where the environment has to be created again."""
        environment, texts = self.instances.get(call["row"]), call["texts"][-1:]
        if environment is None:
            environment, texts = self.kind(**call["columns"], **self.settings), call["texts"]
            self.instances[call["row"]] = environment
        for text in texts:
            turn = environment.step(text)
            if inspect.isawaitable(turn):
                turn = await turn
        return turn


def _as_message(turn: Any) -> dict[str, Any]:
    """Return the fields of a turn.

    Raises:
        TypeError: `turn` is not a valid Turn.
    """
    good = isinstance(turn, Turn) and isinstance(turn.observation, str) and isinstance(turn.reward, int | float)
    if not good or not math.isfinite(turn.reward):
        raise TypeError(f"`step` returned {turn!r:.200}; it must return Turn(observation: str, done: bool, reward: a "
                        "finite number)")
    return {"observation": _utf8(turn.observation), "done": bool(turn.done), "reward": float(turn.reward)}


def _utf8(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()
