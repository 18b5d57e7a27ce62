"""One process that holds environments: it makes them, hands them what the model said, and answers.

Nothing is unpickled on either side: a message is msgpack, plain numbers and texts.
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
from workers.isolation.user_code import contained


def serve(line: socket.socket, kind: type, settings: dict[str, Any]) -> None:
    """Answer calls until the line is closed. A call: `row`, `columns`, and all that the model `said` to that row's
    environment, of which the last is new; `end` is a row that is not asked again."""
    asyncio.run(_Instances(line, kind, settings).serve())


class _Instances:
    def __init__(self, line: socket.socket, kind: type, settings: dict[str, Any]):
        line.setblocking(False)
        self.line, self.kind, self.settings = line, kind, settings
        self.known: dict[int, Any] = {}
        self.tasks: set[asyncio.Task] = set()
        self.open: dict[int, dict[str, Any]] = {}
        """The newest call of each row that has no answer yet."""
        self.messages, self.speaking = msgpack.Unpacker(unicode_errors="surrogatepass"), asyncio.Lock()

    async def serve(self) -> None:
        while data := await asyncio.get_running_loop().sock_recv(self.line, 1 << 16):
            self._hear(data)

    def _hear(self, data: bytes) -> None:
        self.messages.feed(data)
        for call in self.messages:
            if "end" in call:
                self.known.pop(call["end"], None)
                self.open.pop(call["end"], None)
                continue
            self.open[call["row"]] = call
            task = asyncio.create_task(self._answer(call))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _answer(self, call: dict[str, Any]) -> None:
        with contextlib.suppress(BlockingIOError):  # while another step was at work this one may have been called off
            self._hear(self.line.recv(1 << 16))
        if self.open.get(call["row"]) is not call:
            return
        answer: dict[str, Any] = {}
        with contained(lambda error: answer.update(error=_sendable(f"{type(error).__name__}: {error}"[:1000]))):
            answer.update(_plain(await self._step(call)))
        if "error" in answer:
            self.known.pop(call["row"], None)
        if self.open.pop(call["row"], None) is not call:
            return
        async with self.speaking:
            await asyncio.get_running_loop().sock_sendall(self.line, msgpack.packb({"row": call["row"], **answer}))

    async def _step(self, call: dict[str, Any]) -> Any:
        """The last step; those before it too, where the environment has to be made again."""
        environment, said = self.known.get(call["row"]), call["said"][-1:]
        if environment is None:
            environment, said = self.kind(**call["columns"], **self.settings), call["said"]
            self.known[call["row"]] = environment
        for text in said:
            turn = environment.step(text)
            if inspect.isawaitable(turn):
                turn = await turn
        return turn


def _plain(turn: Any) -> dict[str, Any]:
    """A turn as a message.

    Raises:
        TypeError: it is none.
    """
    good = isinstance(turn, Turn) and isinstance(turn.observation, str) and isinstance(turn.reward, int | float)
    if not good or not math.isfinite(turn.reward):
        raise TypeError(f"`step` returned {turn!r:.200}; it must return Turn(observation: str, done: bool, reward: a "
                        "finite number)")
    return {"observation": _sendable(turn.observation), "done": bool(turn.done), "reward": float(turn.reward)}


def _sendable(text: str) -> str:
    """Half of a surrogate pair is no UTF-8."""
    return text.encode(errors="replace").decode()
