"""Tools by the Model Context Protocol (MCP)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx2
from mcp import ClientSession, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, PaginatedRequestParams
from pydantic import PositiveInt
from pydantic_core import from_json, to_json

from distflow.contracts.decorators import Turn, environment
from distflow.data.problems import parsed_arguments
from workers.endpoint.messages import find_tool_calls
from workers.isolation.environments import final_answer

Tools = dict[str, dict[str, Any]]  # name, description and parameters, by name
_LISTED = """\
You may call these functions:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON:
<tool_call>
{{"name": "NAME", "arguments": {{}}}}
</tool_call>"""


@environment(safe=True, together=64, stateless=True)
class MCPTools:
    """Calls the tools of an MCP server as a turn asks by `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, the
    form of Qwen and Hermes models; a turn without a call is the last one.

    The tools must change nothing: rows share a server, and a call may be repeated. The last turn earns 1 if what
    follows its `####` is what follows the answer's, else 0.
    """

    def __init__(self, answer: str, *, server: str, tools: list[str] | None = None, list_tools: bool = True,
                 key_variable: str | None = None, output: PositiveInt = 2000):
        """`server` is a command, as `python my_tools.py`, or an address, as `http://localhost:8000/mcp`, which gets the
        environment variable `key_variable` as a bearer token. `tools` are those that may be called (default: all);
        `list_tools` puts them behind the question. Characters of its `output` that are shown."""
        self.expected, self.server, self.key_variable = answer.rpartition("####")[2].strip(), server, key_variable
        self.allowed, self.list_tools, self.output = tools, list_tools, output

    async def start(self) -> str:
        if not self.list_tools:
            return ""
        _, tools = await self._connected()
        return _LISTED.format(tools="\n".join(json.dumps({"type": "function", "function": each}, ensure_ascii=False)
                                              for each in tools.values()))

    async def step(self, text: str) -> Turn:
        _, tools = await self._connected()
        _, calls = find_tool_calls(text, "", tools.values())
        if calls:
            return Turn("\n".join([await self._call(each.function.name, each.function.arguments) for each in calls]))
        if "<tool_call>" in text.rpartition("</think>")[2]:
            return Turn('This is no call. Write  <tool_call>{"name": "NAME", "arguments": {}}</tool_call>')
        return Turn(done=True, reward=float(final_answer(text) == self.expected))

    async def _call(self, name: str, arguments: str) -> str:
        server, tools = await self._connected()
        if name not in tools:
            return f"There is no function {name[:80]!r}. Functions: {', '.join(tools)}"
        try:
            given = json.loads(arguments)
            from_json(to_json({"params": {"arguments": given}}))  # a message that fails ends the session of all rows
        except (ValueError, RecursionError) as error:
            return f"Error: {error}"[: self.output]
        try:
            done = (await server.session.call_tool(name, given)).model_dump(by_alias=True)
        except MCPError as error:
            if await server.drop_if_ended(error):
                raise
            return f"Error: {error}"[: self.output]
        shown = f"Error: {_text_of(done)}" if done["isError"] else _text_of(done)
        return shown if len(shown) <= self.output else f"{shown[: self.output]}…"

    async def _connected(self) -> tuple[_ToolServer, Tools]:
        if self.server not in _servers:
            _servers[self.server] = _ToolServer(self.server, self.key_variable)
        server = _servers[self.server]
        tools = await asyncio.shield(server.ready)
        if unknown := [name for name in self.allowed or () if name not in tools]:
            raise ValueError(f"the server {self.server} has no tool {unknown[0]!r}; it has {', '.join(tools)}")
        return server, {name: tools[name] for name in self.allowed or tools}


@environment
class MCPSession(MCPTools):
    """`MCPTools` with a server of its own for each row, which may change what it works on."""


class _ToolServer:
    """A session with a server, for all rows of this process. One task opens and closes it, as its library asks."""

    session: ClientSession

    def __init__(self, server: str, key_variable: str | None):
        self.ready: asyncio.Future[Tools] = asyncio.get_running_loop().create_future()
        self.server, self.task = server, asyncio.create_task(self._hold(server, key_variable))
        self.task.add_done_callback(self._ended)

    async def _hold(self, server: str, key_variable: str | None) -> None:
        async with _transport(server, key_variable) as (read, write, *_), ClientSession(read, write) as session:
            await session.initialize()
            self.session = session
            self.ready.set_result({tool["name"]: tool async for tool in _tools_of(session)})
            await asyncio.Event().wait()

    async def drop_if_ended(self, error: MCPError) -> bool:
        """Return whether a call failed because the session has ended; a server that has forgotten it answers any error.
        The next call starts another then."""
        if error.error.code != CONNECTION_CLOSED:
            with contextlib.suppress(MCPError):
                await self.session.send_ping()
                return False
        self._drop()
        self.task.cancel()
        return True

    def _drop(self) -> None:
        if _servers.get(self.server) is self:  # else another has taken its place
            del _servers[self.server]

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._drop()
        if not self.ready.done():
            why = "it was cancelled" if task.cancelled() else _innermost(task.exception())
            self.ready.set_exception(OSError(f"the MCP server {self.server!r} cannot be used: {why}"))


_servers: dict[str, _ToolServer] = {}


@contextlib.asynccontextmanager
async def _transport(server: str, key_variable: str | None) -> AsyncIterator[tuple[Any, ...]]:
    if not server.startswith(("http://", "https://")):
        program, *words = shlex.split(server)
        command = StdioServerParameters(command=sys.executable if program == "python" else program, args=words,
                                        env=dict(os.environ))
        async with stdio_client(command) as streams:
            yield streams
        return
    if key_variable and not os.environ.get(key_variable):
        raise OSError(f"its key belongs in the environment variable {key_variable}, which is not set")
    client = httpx2.AsyncClient(timeout=httpx2.Timeout(30.0, read=300.0))
    if key_variable:
        client.headers["Authorization"] = f"Bearer {os.environ[key_variable]}"
    async with client, streamable_http_client(server, http_client=client) as streams:
        yield streams


async def _tools_of(session: ClientSession) -> AsyncIterator[dict[str, Any]]:
    cursor = None
    while True:
        page = (await session.list_tools(params=PaginatedRequestParams(cursor=cursor))).model_dump(by_alias=True)
        for tool in page["tools"]:
            yield {"name": tool["name"], "description": tool.get("description") or "",
                   "parameters": tool["inputSchema"]}
        cursor = page.get("nextCursor")
        if cursor is None:
            return


def _text_of(result: dict[str, Any]) -> str:
    """Return what a tool answers: its texts, the texts and addresses of resources, and data that no text says."""
    texts, data = list[str](), result.get("structuredContent") or {}
    for part in result["content"]:
        resource = part.get("resource") or {}
        said = (part.get("text"), resource.get("text"), part.get("uri"), resource.get("uri"), f"({part['type']})")
        texts.append(next(each for each in said if each is not None))
    if data and (not texts or data.keys() != {"result"} and data not in map(parsed_arguments, texts)):
        texts.append(json.dumps(data, ensure_ascii=False))
    return "\n".join(texts)


def _innermost(error: BaseException | None) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if error else "it has ended"
