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

from mcp import ClientSession, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.types import CONNECTION_CLOSED, PaginatedRequestParams
from pydantic import PositiveInt

from distflow import Turn, environment
from workers.endpoint.messages import find_tool_calls

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


@environment(safe=True, together=64)
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
        self.expected, self.server, self.key_variable = _final(answer), server, key_variable
        self.allowed, self.list_tools, self.output = tools, list_tools, output

    async def start(self) -> str:
        if not self.list_tools:
            return ""
        _, tools = await self._connected()
        return _LISTED.format(tools="\n".join(json.dumps({"type": "function", "function": each}, ensure_ascii=False)
                                              for each in tools.values()))

    async def step(self, text: str) -> Turn:
        _, calls = find_tool_calls(text, "")
        if calls:
            return Turn("\n".join([await self._call(each.function.name, each.function.arguments) for each in calls]))
        if "<tool_call>" in text:
            return Turn('This is no call. Write  <tool_call>{"name": "NAME", "arguments": {}}</tool_call>')
        return Turn(done=True, reward=float("####" in text and _final(text) == self.expected))

    async def _call(self, name: str, arguments: str) -> str:
        session, tools = await self._connected()
        if name not in tools:
            return f"There is no function {name[:80]!r}. Functions: {', '.join(tools)}"
        try:
            done = (await session.call_tool(name, json.loads(arguments))).model_dump(by_alias=True)
        except MCPError as error:
            if error.error.code == CONNECTION_CLOSED:
                _servers.pop(self.server).task.cancel()  # the next call starts another
                raise
            return f"Error: {error}"[: self.output]
        shown = "\n".join(each["text"] if each["type"] == "text" else f"({each['type']})" for each in done["content"])
        shown = f"Error: {shown}" if done["isError"] else shown
        return shown if len(shown) <= self.output else f"{shown[: self.output]}…"

    async def _connected(self) -> tuple[ClientSession, Tools]:
        if self.server not in _servers:
            _servers[self.server] = _ToolServer(self.server, self.key_variable)
        session, tools = await asyncio.shield(_servers[self.server].ready)
        if unknown := [name for name in self.allowed or () if name not in tools]:
            raise ValueError(f"the server {self.server} has no tool {unknown[0]!r}; it has {', '.join(tools)}")
        return session, {name: tools[name] for name in self.allowed or tools}


@environment
class MCPSession(MCPTools):
    """`MCPTools` with a server of its own for each row, which may change what it works on."""

    def __init__(self, answer: str, *, server: str, tools: list[str] | None = None, list_tools: bool = True,
                 key_variable: str | None = None, output: PositiveInt = 2000):
        super().__init__(answer, server=server, tools=tools, list_tools=list_tools, key_variable=key_variable,
                         output=output)


class _ToolServer:
    """A session with a server, for all rows of this process. One task opens and closes it, as its library asks."""

    def __init__(self, server: str, key_variable: str | None):
        self.ready: asyncio.Future[tuple[ClientSession, Tools]] = asyncio.get_running_loop().create_future()
        self.server, self.task = server, asyncio.create_task(self._hold(server, key_variable))
        self.task.add_done_callback(self._ended)

    async def _hold(self, server: str, key_variable: str | None) -> None:
        async with _transport(server, key_variable) as (read, write, *_), ClientSession(read, write) as session:
            await session.initialize()
            self.ready.set_result((session, {tool["name"]: tool async for tool in _tools_of(session)}))
            await asyncio.Event().wait()

    def _ended(self, task: asyncio.Task[None]) -> None:
        _servers.pop(self.server, None)
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
    headers = {"Authorization": f"Bearer {os.environ[key_variable]}"} if key_variable else None
    async with create_mcp_http_client(headers) as client, streamable_http_client(server, http_client=client) as streams:
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


def _innermost(error: BaseException | None) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if error else "it has ended"


def _final(text: str) -> str:
    return text.rpartition("####")[2].strip()
