"""Environments of the verifiers library and its hub.

`python -m workers.isolation.environments.verifiers ID FILE` writes the examples of one as the data of a run.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import weakref
from typing import Any

from verifiers.legacy import Client, Environment, load_environment
from verifiers.legacy.types import Response, ResponseMessage, ToolCall

from distflow.contracts.decorators import Turn, environment
from distflow.data.problems import content_text
from workers.endpoint.messages import find_tool_calls


@environment(safe=True, together=64)
class Verifiers:
    """Continues an example of a verifiers environment, turn by turn, and earns what its rubric gives at the end.

    `example` is the number of the row in its training set, whose prompt the question must be. The library's own loop
    runs, and the turns are what its client answers. A turn calls its tools by `<tool_call>{"name": …, "arguments":
    {…}}</tool_call>`.
    """

    def __init__(self, example: str, *, id: str, settings: dict | None = None):
        """`id` as in `verifiers.load_environment`, which gets `settings` too."""
        self.library = _loaded(id, json.dumps(settings or {}, sort_keys=True))
        self.example: dict[str, Any] = self.library.get_dataset()[int(example)]
        self.turns, self.prompt = _TurnClient(), _texts(self.example["prompt"])
        self.running: asyncio.Task[Any] | None = None

    async def step(self, text: str) -> Turn:
        if self.running is None:
            work = self.library.run_rollout(self.example, self.turns, "policy", {})  # type: ignore[arg-type]
            self.running = asyncio.create_task(work)
            weakref.finalize(self, self.running.cancel)
            asked = await self._asked()
            if asked != self.prompt:
                raise ValueError("it begins with another prompt than its examples have, which the model has not seen")
        self.turns.said.put_nowait(text)
        asked = await self._asked()
        if asked is None:
            done = self.running.result()
            if done.get("error"):
                raise RuntimeError(f"{done['error']}")
            return Turn(done=True, reward=float(done["reward"]))
        known = len(self.prompt) + 1  # its last prompt, and the turn
        if asked[: known - 1] != self.prompt:
            raise ValueError("it changes earlier messages, which the model has seen as they were")
        self.prompt = asked
        return Turn("\n".join(asked[known:]))

    async def _asked(self) -> list[str] | None:
        """Return the texts of the messages after which the next turn is wanted; None if none is."""
        assert self.running
        asked = asyncio.ensure_future(self.turns.asked.get())
        await asyncio.wait({asked, self.running}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        return None


class _TurnClient(Client):
    """What the library takes for a model."""

    def __init__(self) -> None:
        super().__init__(None)
        self.asked: asyncio.Queue[list[str]] = asyncio.Queue()
        self.said: asyncio.Queue[str] = asyncio.Queue()

    async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None,
                           **more: Any) -> Response:
        self.asked.put_nowait(_texts(prompt))
        text, calls = await self.said.get(), []
        if tools:
            plain = [each if isinstance(each, dict) else each.model_dump() for each in tools]
            text, calls = find_tool_calls(text, str(len(prompt)), plain)
        called = [ToolCall(id=each.id, name=each.function.name, arguments=each.function.arguments) for each in calls]
        message = ResponseMessage(role="assistant", content=text, tool_calls=called or None, is_truncated=False,
                                  finish_reason="tool_calls" if called else "stop")
        return Response(id="turn", created=0, model=model, message=message)

    def setup_client(self, config: Any) -> None: ...
    async def to_native_tool(self, tool: Any) -> None: ...
    async def to_native_prompt(self, messages: Any) -> Any: ...
    async def get_native_response(self, *words: Any, **more: Any) -> None: ...
    async def raise_from_native_response(self, response: Any) -> None: ...
    async def from_native_response(self, response: Any) -> Any: ...
    async def close(self) -> None: ...


@functools.cache
def _loaded(id: str, settings: str) -> Environment:
    return load_environment(id, **json.loads(settings))


def _texts(messages: Any) -> list[str]:
    """Return the text of each message, which is a dict or an object of the library."""
    plain = [each if isinstance(each, dict) else each.model_dump() for each in messages]
    return [content_text(each.get("content")) for each in plain]


def write_examples(id: str, file: str, settings: str = "{}") -> None:
    """Write the training set of an environment as a run's data: question, answer, tools, and `example`, its number."""
    library = _loaded(id, settings)
    tools = [{"type": "function", "function": tool.model_dump(include={"name", "description", "parameters"})}
             for tool in library.tool_defs or ()]
    with open(file, "w", encoding="utf-8") as lines:
        for number, row in enumerate(library.get_dataset()):
            asked = [{"role": each["role"], "content": content_text(each["content"])} for each in row["prompt"]]
            line = {"question": asked, "answer": row.get("answer") or "-", "example": number, "tools": tools}
            lines.write(f"{json.dumps(line, ensure_ascii=False)}\n")


if __name__ == "__main__":
    write_examples(*sys.argv[1:])
