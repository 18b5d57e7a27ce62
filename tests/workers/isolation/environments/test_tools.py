"""Tools of MCP servers, by both transports, with real servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("mcp.server.mcpserver", reason="pip install mcp")

from distflow.contracts.decorators import Turn
from workers.isolation.environments.tools import MCPSession, MCPTools

pytestmark = pytest.mark.usefixtures("forked")  # servers that this process starts; mcp takes a second to load
SERVER = '''
import asyncio, os, sys
from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, EmbeddedResource, ResourceLink, TextContent, TextResourceContents

server, said = MCPServer("sums", log_level="CRITICAL" if len(sys.argv) < 2 else "INFO"), []

@server.tool()
def add(a: int, b: int) -> int:
    """Add two whole numbers."""
    return a + b

@server.tool()
def remember(word: str) -> str:
    said.append(word)
    return " ".join(said)

@server.tool()
def fail(how: str) -> str:
    if how == "exit":
        os._exit(1)
    if how == "long":
        return "x" * 9000
    raise ValueError(how)

@server.tool()
def show(kind: str) -> CallToolResult:
    kinds = {"summary": TextContent(type="text", text="2 items"),
             "said": TextContent(type="text", text='{"n": [1, 2]}'),
             "file": EmbeddedResource(type="resource", resource=TextResourceContents(uri="file:///a", text="x = 1")),
             "link": ResourceLink(type="resource_link", name="a", uri="file:///a")}
    return CallToolResult(content=[kinds[kind]] if kind in kinds else [], structuredContent={"n": [1, 2]})

@server.tool()
async def wait() -> str:
    await asyncio.Event().wait()

server.run("streamable-http", port=int(sys.argv[1])) if len(sys.argv) > 1 else server.run()
'''


@pytest.fixture
def server(tmp_path):
    """The command of a server."""
    (tmp_path / "sums.py").write_text(SERVER)
    return f"{sys.executable} {tmp_path / 'sums.py'}"


@contextlib.contextmanager
def running(server: str, port: str = "0") -> Iterator[str]:
    """Yield the port of a server that is running."""
    with subprocess.Popen([sys.executable, *server.split()[1:], port], stderr=subprocess.PIPE, text=True) as process:
        lines = (re.search(r"running on http://\S+:(\d+)", line) for line in process.stderr)
        try:
            yield next(found[1] for found in lines if found)
        finally:
            process.kill()


@pytest.fixture
def address(server):
    """The address of a server that is running."""
    with running(server) as port:
        yield f"http://127.0.0.1:{port}/mcp"


@pytest.fixture
def pool_of(player):
    """`pool_of(kind, server=…)` returns a function that says a text for a row, and returns its turn."""
    def make(kind: str, **settings):
        say = player(f"tools:{kind}", settings, kind == "MCPTools", True, processes=1)
        return lambda row, text: say(row, text, answer="#### 7")

    return make


def call(name: str, **arguments) -> str:
    return f"I ask.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize("transport", ["server", "address"])
def test_calls_and_their_answers(request, pool_of, transport):
    say = pool_of("MCPTools", server=request.getfixturevalue(transport), output=40)
    assert say(0, call("add", a=3, b=4)) == Turn("7")
    assert say(1, call("add", a=3, b=4) + call("add", a=-1, b=1)) == Turn("7\n0")
    assert say(0, call("add", a="x", b=4)).observation.startswith("Error: ")
    assert say(0, call("nope")) == Turn("There is no function 'nope'. Functions: add, remember, fail, show, wait")
    assert say(0, call("fail", how="long")) == Turn("x" * 40 + "…")
    assert say(0, call("fail", how="raise")).observation.startswith("Error: ")
    assert "This is no call" in say(0, "<tool_call>{add}</tool_call>").observation
    assert say(0, "#### 7") == Turn("", True, 1.0)
    assert say(1, "It is 7") == Turn("", True, 0.0)


@pytest.mark.parametrize(("kind", "shown"), [
    ("nothing", '{"n": [1, 2]}'), ("said", '{"n": [1, 2]}'), ("summary", '2 items\n{"n": [1, 2]}'),
    ("file", 'x = 1\n{"n": [1, 2]}'), ("link", 'file:///a\n{"n": [1, 2]}')])
def test_what_a_tool_answers_is_shown_whole(pool_of, server, kind, shown):
    """kimi-code#2554, copilot-cli#3258, mecatl#223: a model saw the summary without the data, or "(resource)"."""
    assert pool_of("MCPTools", server=server)(0, call("show", kind=kind)) == Turn(shown)


def test_rows_share_a_server_or_have_their_own(pool_of, server):
    shared, own = (pool_of(kind, server=server) for kind in ("MCPTools", "MCPSession"))
    assert [shared(row, call("remember", word=str(row))).observation for row in (0, 1)] == ["0", "0 1"]
    assert [own(row, call("remember", word=str(row))).observation for row in (0, 1, 0)] == ["0", "1", "0 0"]


def test_a_server_that_ends_costs_the_row_that_asked(pool_of, server):
    say = pool_of("MCPTools", server=server)
    assert say(0, call("add", a=1, b=1)) == Turn("2")
    assert "Connection closed" in say(0, call("fail", how="exit")).reason
    assert say(1, call("add", a=1, b=2)) == Turn("3")


def test_a_session_that_the_server_has_forgotten_is_renewed(pool_of, server):
    with running(server) as port:
        say = pool_of("MCPTools", server=f"http://127.0.0.1:{port}/mcp")
        assert say(0, call("add", a=1, b=1)) == Turn("2")
    with running(server, port):
        assert say(0, call("add", a=1, b=2)) == Turn("3")


@pytest.mark.parametrize("transport", ["server", "address"])
def test_arguments_that_cannot_be_sent_cost_no_other_row(request, transport):
    async def run() -> None:
        rows = [MCPTools("7", server=request.getfixturevalue(transport)) for _ in range(2)]
        await rows[0].step(call("remember", word="a"))
        for word in ("\ud800", [json.loads("[" * 197 + "]" * 197)], json.loads("[" * 300 + "]" * 300)):
            assert (await rows[1].step(call("remember", word=word))).observation.startswith("Error: ")
        assert await rows[0].step(call("remember", word="b")) == Turn("a b")

    asyncio.run(run())


def test_rows_of_a_server_that_has_ended_share_the_next_one(server):
    async def run() -> None:
        rows = [MCPTools("7", server=server) for _ in range(2)]
        failed = await asyncio.gather(rows[0].step(call("wait")), rows[1].step(call("fail", how="exit")),
                                      return_exceptions=True)
        assert [str(error) for error in failed] == ["Connection closed"] * 2
        await rows[0].step(call("remember", word="a"))
        assert await rows[1].step(call("remember", word="b")) == Turn("a b")

    asyncio.run(run())


def test_what_stands_behind_the_question(server, player):
    shown = player("tools:MCPTools", {"server": server, "tools": ["add"]}, True, True, starts=True)(0, "", answer="7")
    listed = json.loads(shown.observation.partition("<tools>\n")[2].partition("\n</tools>")[0])
    assert listed["function"]["name"] == "add"
    assert listed["function"]["description"] == "Add two whole numbers."
    assert set(listed["function"]["parameters"]["properties"]) == {"a", "b"}
    assert '<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>' in shown.observation


@pytest.mark.parametrize(("settings", "says"), [
    ({"server": "http://127.0.0.1:9/mcp"}, "ConnectError: All connection attempts failed"),
    ({"server": "no_such_program"}, "FileNotFoundError: [Errno 2] No such file or directory: 'no_such_program'"),
    ({"server": "python -c 1"}, "Connection closed"),
    ({"server": "http://127.0.0.1:9/mcp", "key_variable": "NO_SUCH_KEY"}, "variable NO_SUCH_KEY, which is not set")])
def test_a_server_that_cannot_be_used_is_said(settings, says):
    with pytest.raises(OSError, match=re.escape(f"the MCP server {settings['server']!r} cannot be used")) as failed:
        asyncio.run(MCPSession("7", **settings).step(call("add", a=1, b=2)))
    assert says in str(failed.value)


def test_tools_that_a_server_lacks(server):
    with pytest.raises(ValueError, match="has no tool 'sub'; it has add, remember, fail, show, wait"):
        asyncio.run(MCPTools("7", server=server, tools=["add", "sub"]).step(call("add", a=1, b=2)))
