"""The endpoint over real sockets: what clients get, and what bad ones cost."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading

import pytest
from harness import ROOT

from workers.endpoint import http_server, server
from workers.endpoint.dialogue import AnsweredTurn, Dialogue, DialogueLimits
from workers.endpoint.messages import (
    CalledFunction,
    ChatMessage,
    ChatRequest,
    ToolCall,
    find_tool_calls,
    read_request,
)
from workers.endpoint.server import EndpointServer, ServedRow
from workers.engines.chat import TurnTemplate
from workers.engines.embedded import build_tokenizer

USER, ASSISTANT = "<|user|>", "<|assistant|>"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
ASKED = [{"role": "user", "content": "one"}]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(["a question and an answer"])


@pytest.fixture(scope="module")
def endpoint():
    return EndpointServer()


class Scripted:
    """A row whose turns say what they are told to; `held` ones are sampled when `release` is called."""

    def __init__(self, endpoint, tokenizer, texts, limits, held):
        self.endpoint, self.tokenizer, self.texts, self.asks = endpoint, tokenizer, iter(texts), []
        self.dialogue = Dialogue("1-7", tokenizer, TurnTemplate(tokenizer, [tokenizer.eos_token_id]), limits)
        self.asked, self.held = threading.Semaphore(0), held
        self.served = ServedRow(7, self.dialogue, self.ask)
        endpoint.add(self.served)

    def ask(self, ask):
        self.asks.append(ask)
        if not self.held:
            self.release()
        self.asked.release()

    def release(self):
        text = next(self.texts)
        tokens = self.tokenizer(text.removesuffix("…"), add_special_tokens=False)["input_ids"]
        tokens += [] if text.endswith("…") else [self.tokenizer.eos_token_id]
        logprobs = [-0.5 * (index + 1) for index in range(len(tokens))]
        self.asks[-1].answer(AnsweredTurn(tokens, logprobs, 3, text[-1] != "…"))

    def post(self, path="chat/completions", token=None, headers=None, **body):
        connection = http.client.HTTPConnection("127.0.0.1", self.endpoint.port, timeout=60)
        text = json.dumps(body).encode()
        connection.request("POST", f"/v1/{path}", text, {
            "Authorization": f"Bearer {token or self.served.token}", **(headers or {})})
        reply = connection.getresponse()
        found = json.loads(reply.read())
        connection.close()
        return reply.status, found

    def chat(self, *messages, **more):
        return self.post(messages=[*messages], **more)


@pytest.fixture
def row(endpoint, tokenizer):
    rows = []

    def make(*texts, held=False, **limits):
        limits = DialogueLimits(**{"turns": 4, "tokens": 200, "new_tokens": 60, "prompt_tokens": 100, **limits})
        rows.append(Scripted(endpoint, tokenizer, texts, limits, held))
        return rows[-1]

    yield make
    for each in rows:
        endpoint.remove(each.served)


@pytest.fixture
def client(endpoint):
    openai = pytest.importorskip("openai")
    opened = []

    def make(row, **more):
        opened.append(openai.OpenAI(base_url=endpoint.address, api_key=row.served.token, **more))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_endpoint_serves_chat_completions_to_openai_client(client, row, tokenizer):
    served = row("an answer", "a question")
    chat = client(served).chat.completions
    first = chat.create(model="m", messages=ASKED, logprobs=True, extra_body={"return_token_ids": True})
    assert (first.object, first.model, first.system_fingerprint) == ("chat.completion", "m", "weights-3")
    choice = first.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "an answer", "stop")
    assert [tokenizer.decode([token]) for token in choice.token_ids] == [each.token for each in choice.logprobs.content]
    assert [each.logprob for each in choice.logprobs.content[:2]] == [-0.5, -1.0]
    assert bytes(choice.logprobs.content[0].bytes).decode() == choice.logprobs.content[0].token
    assert tokenizer.decode(first.prompt_token_ids) == f"{USER}one{ASSISTANT}"
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (
        len(first.prompt_token_ids), len(choice.token_ids))
    second = chat.create(model="m", messages=[*ASKED, choice.message, {"role": "user", "content": "two"}],
                         extra_body={"return_token_ids": True})
    assert second.prompt_token_ids[: len(first.prompt_token_ids) + len(choice.token_ids)] == [
        *first.prompt_token_ids, *choice.token_ids]
    assert tokenizer.decode(served.asks[1].addition.tokens) == f"{USER}two{ASSISTANT}"
    assert served.dialogue.tokens == [*second.prompt_token_ids, *second.choices[0].token_ids]
    assert [each.id for each in client(served).models.list()] == ["policy"]


def test_endpoint_streams_the_same_turn(client, row):
    asked = {"model": "m", "messages": ASKED, "logprobs": True, "extra_body": {"return_token_ids": True}}
    whole = client(row("an answer")).chat.completions.create(**asked)
    chunks = [*client(row("an answer")).chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True})]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(part.delta.content or "" for part in parts) == whole.choices[0].message.content
    assert [part.finish_reason for part in parts] == [None, "stop"]
    assert parts[0].logprobs.content == whole.choices[0].logprobs.content
    assert parts[0].token_ids == whole.choices[0].token_ids
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)


def test_endpoint_reads_tool_calls_from_text(client, row):
    served = row(f"I add.\n{CALL}", "3", f"{CALL}…")
    chat = client(served).chat.completions
    choice = chat.create(model="m", messages=ASKED, tools=TOOLS).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I add.", "tool_calls")
    call, = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    messages = [*ASKED, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    second = chat.create(model="m", messages=messages, tools=TOOLS).choices[0]
    assert second.message.content == "3"
    messages += [second.message, {"role": "user", "content": "again"}]
    chunks = [*chat.create(model="m", messages=messages, tools=TOOLS, stream=True)]
    assert chunks[0].choices[0].delta.tool_calls[0].function.name == "add"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert client(row(CALL)).chat.completions.create(model="m", messages=ASKED).choices[0].message.content == CALL
    for none in ("{}", '{"name": "add", "args": {"a": 1}}'):  # whose arguments would be lost
        assert find_tool_calls(f"<tool_call>{none}</tool_call>", "") == (f"<tool_call>{none}</tool_call>", [])
    for given, meant in (('"parameters": {"a": 1}', {"a": 1}), ('"arguments": "{\\"a\\": 1}"', {"a": 1}),
                         ('"arguments": null', {}), ('"arguments": ""', {}), ('"other": 1', {})):
        before, (call,) = find_tool_calls(f'So. <tool_call>{{"name": "add", {given}}}</tool_call>', "")
        assert (before, json.loads(call.function.arguments)) == ("So.", meant)
    assert find_tool_calls(f"<think>{CALL}</think> 3", "")[1] == find_tool_calls(f"<think>{CALL}", "")[1] == []
    for said in ("what does <think> mean", "<think>a</think>b", "a</think>b"):
        about = f'<tool_call>{json.dumps({"name": "search", "arguments": {"query": said}})}</tool_call>'
        assert find_tool_calls(f"<think>{about}</think> 3", "")[1] == find_tool_calls(f"<think>{about}", "")[1] == []
        _, (call,) = find_tool_calls(f"<think>by <tool_call> </think>{about}", "")
        assert json.loads(call.function.arguments) == {"query": said}
    thought, calls = find_tool_calls(f"<think>{CALL}</think> So: {CALL}", "")
    assert (thought, len(calls)) == (f"<think>{CALL}</think> So:", 1)


TYPED = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {
    "a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "array"}, "d": {}}}}}]
TAGGED = """So.
<tool_call>
<function=add>
<parameter=a>
1
</parameter>
<parameter=b>
2
 3
</parameter>
<parameter=c>
[1, "x"]
</parameter>
</function>
</tool_call>"""


@pytest.mark.parametrize(("text", "tools", "meant"), [
    (TAGGED, TYPED, {"a": 1, "b": "2\n 3", "c": [1, "x"]}),
    (TAGGED, None, {"a": "1", "b": "2\n 3", "c": '[1, "x"]'}),
    (TAGGED.replace("1\n", "one\n", 1), TYPED, {"a": "one", "b": "2\n 3", "c": [1, "x"]}),
    ("<tool_call><function=add></function></tool_call>", TYPED, {}),
    ("<tool_call><function=add><parameter=d>{}</parameter></function></tool_call>", TYPED, {"d": {}}),
    (TAGGED.replace("<parameter=b>", "<parameter=a>"), TYPED, None), (TAGGED.replace("=add", ""), TYPED, None),
    (TAGGED.replace("</parameter>", "", 1), TYPED, None), (TAGGED.replace("</function>", ""), TYPED, None),
    (TAGGED.replace("<parameter=c>", "and <parameter=c>"), TYPED, None), (f"<think>{TAGGED}", TYPED, None),
    (f"<think>{TAGGED}</think>So.", TYPED, None)])
def test_endpoint_reads_calls_in_tags_by_the_schemas_of_their_tools(text, tools, meant):
    before, calls = find_tool_calls(text, "", tools)
    assert [json.loads(call.function.arguments) for call in calls] == ([] if meant is None else [meant])
    assert before == (text if meant is None else "So." if "So." in text else "")


@pytest.mark.parametrize(("call", "status"), [
    ("<tool_call>{{ call.function | tojson }}</tool_call>", 200), ("", 200),
    ("<tool_call>\n<function={{ call.function.name }}>\n</function>\n</tool_call>", 200),
    ("[TOOL_CALLS][{{ call.function | tojson }}]", 400), ("<tool_call>{{ call.function.name }}\n</tool_call>", 400)])
def test_endpoint_refuses_tools_whose_calls_it_would_not_read(row, monkeypatch, call, status):
    served = row("an answer")
    written = "{% for call in message.tool_calls or [] %}" + call + "{% endfor %}"
    before, content, behind = served.tokenizer.chat_template.partition("{{ message['content'] }}")
    monkeypatch.setattr(served.tokenizer, "chat_template", f"{before}{content}{written}{behind}")
    assert served.chat(*ASKED, tools=TOOLS)[0] == status


@pytest.mark.parametrize(("arguments", "same"), [
    ('{"city": "Zürich", "days": [1, 2]}', True), ('{"city":"Z\\u00fcrich","days":[1,2]}', True),
    ({"city": "Zürich", "days": [1, 2]}, True), ('{"days": [1, 2], "city": "Zürich"}', True),
    ('{"city": "Zürich", "days": [2, 1]}', False), ('{"city"', False)])
def test_endpoint_compares_tool_calls_by_their_json(arguments, same):
    sent, back = (ChatMessage(role="assistant", tool_calls=[ToolCall(id="c", function=CalledFunction(
        name="find", arguments=text))]) for text in ('{"city": "Z\\u00fcrich", "days": [1, 2]}', arguments))
    assert back.says_the_same(sent) == same


def test_endpoint_replaces_half_of_a_surrogate_pair():
    body = b'{"messages": [{"role": "user", "content": "7 \\ud83d"}]}'
    assert read_request(ChatRequest, body).messages[0].text == "7 \ufffd"


def test_endpoint_serves_plain_completions_of_tokens_and_text(client, row, tokenizer):
    served = row("an answer…", "more")
    complete = client(served).completions
    prompt = tokenizer("a question")["input_ids"]
    first = complete.create(model="m", prompt=prompt, logprobs=1, extra_body={"return_token_ids": True}).choices[0]
    assert (first.text, first.finish_reason) == ("an answer", "length")
    assert first.logprobs.token_logprobs == [-0.5 * (index + 1) for index in range(len(first.token_ids))]
    assert first.logprobs.text_offset[1] == len(first.logprobs.tokens[0])
    second = complete.create(model="m", prompt=[*prompt, *first.token_ids, *prompt])
    assert (second.choices[0].text, second.object) == ("more", "text_completion")
    assert served.asks[1].addition.tokens == prompt
    text = row("b", "c")
    for prompt, answer in (("a ", "b"), ("a b d", "c")):
        chunks = [*client(text).completions.create(model="m", prompt=prompt, stream=True)]
        assert "".join(chunk.choices[0].text for chunk in chunks) == answer
    assert tokenizer.decode(text.asks[1].addition.tokens) == " d"
    assert text.post("completions", prompt="a d")[0] == 400
    assert served.post("completions", prompt=[len(tokenizer)])[0] == 400


SAID = {"role": "assistant", "content": " an answer "}


@pytest.mark.parametrize(("messages", "more", "says"), [
    ([{"role": "user", "content": "two"}, SAID, *ASKED], {}, "message 0, of role user, is another one"),
    ([*ASKED, {**SAID, "content": "another"}, *ASKED], {}, "message 1, of role assistant, is another one"),
    (ASKED, {}, "they end before the last turn"),
    ([*ASKED, SAID], {}, "the last message is the assistant's"),
    ([*ASKED, SAID, *ASKED, SAID, *ASKED], {}, "a turn of the assistant follows that was not sampled"),
    ([*ASKED, SAID, *ASKED], {"tools": TOOLS}, "other `tools`")])
def test_endpoint_refuses_messages_that_do_not_extend_the_trajectory(row, messages, more, says):
    served = row("an answer", "yes")
    assert served.chat(*ASKED)[0] == 200
    status, body = served.chat(*messages, **more)
    assert status == 400
    assert says in body["error"]["message"]
    assert served.chat(*ASKED, SAID, *ASKED)[1]["choices"][0]["message"]["content"] == "yes"


@pytest.mark.parametrize(("body", "says"), [
    ({}, "`messages`: Field required"),
    ({"messages": [{**ASKED[0], "content": [{"type": "image_url", "image_url": {}}]}]}, "Input should be 'text'"),
    ({"messages": ASKED, "n": 2}, "`n` must be 1 here, not 2"),
    ({"messages": ASKED, "response_format": {"type": "json_object"}}, "`response_format` must be"),
    ({"messages": ASKED, "guided_json": {}}, "`guided_json` must be left out here"),  # they changed nothing
    ({"messages": ASKED, "structured_outputs": {"choice": ["a"]}}, "`structured_outputs` must be left out"),
    ({"messages": ASKED, "stop_token_ids": [7]}, "`stop_token_ids` must be [] here"),
    ({"messages": ASKED, "min_tokens": 4}, "`min_tokens` must be 0"),
    ({"messages": ASKED, "chat_template": "x"}, "`chat_template` must be left out"),
    ({"messages": ASKED, "chat_template_kwargs": {"tokenize": True}}, "`tokenize` is no variable of chat templates"),
    ({"messages": ASKED, "stop": ["\n"]}, "generation: {stop: ['\\n']}"),
    ({"messages": ASKED, "max_tokens": 0}, "`max_tokens`")])
def test_endpoint_refuses_unsupported_settings_by_name(row, body, says):
    status, found = row().post(**body)
    assert status == 400
    assert says in found["error"]["message"]


def test_endpoint_limits_turns_and_tokens(row):
    assert "`max_prompt_tokens` is 100" in row().chat({"role": "user", "content": "one " * 200})[1]["error"]["message"]
    served = row("an answer", turns=1)
    assert served.chat(*ASKED, max_tokens=5, temperature=0.7)[0] == 200
    assert served.asks[0].addition.limit == 5
    assert served.chat(*ASKED, SAID, *ASKED)[1]["error"]["code"] == "context_length_exceeded"
    assert served.dialogue.cut
    served = row("an answer", tokens=50)
    served.chat(*ASKED)
    assert served.asks[0].addition.limit == 50
    assert "`max_tokens` 50" in served.chat(*ASKED, SAID, {"role": "user", "content": "1" * 60})[1]["error"]["message"]


def test_endpoint_answers_a_retry_with_the_turn_of_its_request(row):
    """Whether that was sampled meanwhile or not; anything else in that time is refused."""
    served, found = row("an answer", held=True), []
    threads = [threading.Thread(target=lambda retry=retry: found.append(
        served.chat(*ASKED, headers={"x-stainless-retry-count": retry}))) for retry in "01"]
    threads[0].start()
    served.asked.acquire()
    status, body = served.chat({"role": "user", "content": "two"})
    assert (status, body["error"]["code"]) == (400, "not_extended")
    threads[1].start()
    served.release()
    for thread in threads:
        thread.join()
    found.append(served.chat(*ASKED, headers={"x-stainless-retry-count": "2"}))
    assert [(status, body["choices"][0]["message"]["content"]) for status, body in found] == [(200, "an answer")] * 3
    assert len(served.asks) == 1
    assert served.chat(*ASKED)[0] == 400


def test_endpoint_ends_a_request_in_progress_with_its_row(row, endpoint):
    served, found = row("an answer", held=True), []

    def ask():
        try:
            found.append(served.chat(*ASKED))
        except (http.client.HTTPException, ConnectionError):
            found.append(None)

    thread = threading.Thread(target=ask)
    thread.start()
    served.asked.acquire()
    endpoint.remove(served.served)
    thread.join()
    assert found == [None]
    assert served.chat(*ASKED)[0] == 401


def raw(endpoint, text: str) -> bytes:
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=60) as connection:
        connection.sendall(text.encode("latin-1"))
        found = b""
        while data := connection.recv(1 << 16):
            found += data
    return found


def test_endpoint_does_not_read_bodies_without_a_token_or_too_large(endpoint, row):
    served, post = row("an answer"), "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    key = f"Authorization: Bearer {served.served.token}\r\n"
    assert raw(endpoint, f"{post}Content-Length: 9999999\r\n\r\n").startswith(b"HTTP/1.1 401 Unauthorized")
    assert raw(endpoint, f"{post}{key}Content-Length: {http_server.MAX_BODY + 1}\r\n\r\n").startswith(b"HTTP/1.1 413")
    assert raw(endpoint, f"{post}{key}Content-Length: {'9' * 5000}\r\n\r\n")[8:].startswith(b" 400")
    chunked = f"{post}{key}Transfer-Encoding: chunked\r\n\r\n"
    assert raw(endpoint, f"{chunked}3\r\n[1]\r\n0\r\n\r\n").count(b"must be a JSON object")
    assert raw(endpoint, f"{chunked}x\r\n[1]\r\n0\r\n\r\n")[8:].startswith(b" 400")
    assert raw(endpoint, f"{post}{key}Content-Length: 3\r\n\r\n[1]").count(b"must be a JSON object")
    assert raw(endpoint, f"{post}{key}Content-Length: 3000\r\n\r\n{'[' * 3000}").count(b"is not JSON")
    assert raw(endpoint, f"GET /v1/nothing HTTP/1.1\r\nHost: a\r\n{key}\r\n").startswith(b"HTTP/1.1 404")
    with contextlib.suppress(ConnectionError):
        assert raw(endpoint, "x" * (1 << 18))[8:].startswith(b" 400")
    assert raw(endpoint, f"{post}{key}X: {'x' * 2000}\r\nContent-Length: 3\r\n\r\n[1]").count(b"must be a JSON object")
    assert raw(endpoint, f"{post}{key}X: {'x' * 3000}\r\nContent-Length: 3\r\n\r\n[1]")[8:].startswith(b" 400")
    assert served.chat(*ASKED)[0] == 200


def test_endpoint_bounds_refused_requests_of_a_row(row):
    flooding, other = row("an answer"), row("an answer")
    for _ in range(server.MAX_REFUSED):
        assert flooding.chat(*ASKED, n=2)[0] == 400
    assert flooding.chat(*ASKED)[0] == 403
    assert "sent 64 requests that were refused; the last: `n` must be 1" in flooding.served.lost
    assert other.chat(*ASKED)[0] == 200


def test_endpoint_closes_idle_connections_for_new_ones(endpoint, row, monkeypatch):
    monkeypatch.setattr(http_server, "_MAX_CONNECTIONS", 8)
    served = row("an answer")
    opened = [socket.create_connection(("127.0.0.1", endpoint.port), timeout=60) for _ in range(40)]
    assert served.chat(*ASKED)[0] == 200
    with contextlib.suppress(ConnectionResetError):
        assert opened[0].recv(1) == b""  # the one that was idle longest is closed
    for each in opened:
        each.close()


@pytest.mark.parametrize(("texts", "reward"), [
    ([CALL.replace('"a": 1, "b": 2', '"sum": "12 + 12"'), "#### 24"], 1.0), (["1 + 1 ="] * 5, 0.0)])
def test_example_agent_answers_sums_through_the_endpoint(endpoint, row, texts, reward):
    pytest.importorskip("openai")
    served = row(*texts, tokens=400, prompt_tokens=400)
    script = ROOT / "examples/calculator_agent/calculator_agent.py"
    done = subprocess.run([sys.executable, script, "How many?", "12 + 12 = 24 #### 24"], capture_output=True, text=True,
                          check=False, env={**os.environ, "OPENAI_BASE_URL": endpoint.address,
                                            "OPENAI_API_KEY": served.served.token, "NO_PROXY": "127.0.0.1"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"reward": reward}
    assert len(served.asks) == min(len(texts), 4)


def test_endpoint_passes_template_variables_of_run_and_request(row, monkeypatch):
    """Rapid-MLX#389, LLMKube#1283: all but `enable_thinking` were ignored."""
    served = row("one", "two", "three")
    template = "{{ effort }}{{ thinking }}{{ reasoning_effort }}" \
               "{% if enable_thinking is defined %} {{ enable_thinking }}{% endif %}"
    monkeypatch.setattr(served.tokenizer, "chat_template", served.tokenizer.chat_template + template)
    served.dialogue.between = TurnTemplate(served.tokenizer, [served.tokenizer.eos_token_id], options={"effort": "low"})
    messages = [*ASKED, {"role": "assistant", "content": "one"}, {"role": "user", "content": "more"}]
    served.chat(*ASKED)
    served.chat(*messages, chat_template_kwargs={"enable_thinking": False})
    messages += [{"role": "assistant", "content": "two"}, {"role": "user", "content": "more"}]
    served.chat(*messages, chat_template_kwargs={"thinking": 1}, reasoning_effort="high", tools=[],
                stream_options={"include_usage": None})
    asked = [served.tokenizer.decode(ask.addition.tokens) for ask in served.asks]
    assert [text.rpartition(ASSISTANT)[2] for text in asked] == ["low", "low False", "low1high"]
    status, body = served.chat(*ASKED, chat_template_kwargs={"messages": []})
    assert (status, "the chat template refuses {'messages': []}" in body["error"]["message"]) == (400, True)


def test_endpoint_refuses_a_chat_after_a_plain_completion(row):
    served = row("an answer", "another")
    assert served.post("completions", prompt="one")[0] == 200
    status, body = served.chat(*ASKED)
    assert (status, body["error"]["code"]) == (400, "not_extended")


def test_endpoint_takes_deeply_nested_tool_calls_as_text(row):
    deep = '<tool_call>{"name": "add", "arguments": ' + "[" * 5000 + "}</tool_call>"
    assert find_tool_calls(deep, "x") == (deep, [])


def test_endpoint_bounds_messages(row):
    status, body = row().chat(*ASKED * 1001)
    assert status == 400
    assert "1000" in body["error"]["message"]
