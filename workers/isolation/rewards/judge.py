"""The reward `judge`: what another model, behind an OpenAI-compatible address, thinks of an answer."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from distflow import reward
from distflow.contracts.decorators import Regex
from distflow.errors import InvalidInput

PROMPT = """\
Grade the answer to a question against the reference answer. Grade only what it says, not how it is written.

Question:
{question}

Reference answer:
{answer}

Answer to be graded:
{completion}

End with one line:  Score: N  where N is a whole number from 0 (wrong) to 10 (right and complete)."""
_CALLS = 64
"""Requests that wait at the same time in one process; more would have to be asked for by `concurrency` in vain."""
_LONGEST = 1 << 20
"""Bytes of an answer that are read."""


def _wrong(address: str, prompt: str = PROMPT, score: str = "()", highest: float = 10.0, max_tokens: int = 512,
           seconds: float = 60.0, **_: object) -> str:
    if not address.startswith(("http://", "https://")):
        return f"needs an `address` that begins with http:// or https://, not {address!r}"
    if "{completion}" not in prompt:
        return "has a `prompt` without `{completion}`: its judge would never see the answer"
    if re.compile(score).groups != 1:
        return f"has a `score` without its one group, which holds the number: {score!r}\nscore: 'Score: ([0-9]+)'"
    return "" if min(highest, max_tokens, seconds) > 0 else "needs `highest`, `max_tokens` and `seconds` above 0"


@reward(timeout=60.0, retries=2, concurrency=16, check=_wrong)
async def judge(completion: str, answer: str, question: str, *, address: str, model: str, prompt: str = PROMPT,
                score: Regex = r"[Ss]core:\s*(-?\d+(?:\.\d+)?)", highest: float = 10.0, key_variable: str | None = None,
                max_tokens: int = 512, temperature: float = 0.0, seconds: float = 60.0) -> float:
    """The judge's score divided by `highest`, cut to 0.0 … 1.0. An answer without a score is a failed call.

    Args:
        address: of the API up to its version, as `http://localhost:8000/v1`; `/chat/completions` is added.
        prompt: with `{question}`, `{answer}` and `{completion}` where they are to stand; other braces stay.
        score: a regular expression whose first group is the score; the last match counts, so that a judge may think.
        key_variable: the environment variable that holds the key; none is sent without it.
        seconds: for one request; also set `timeout` if it is to be longer than 60.

    Raises:
        InvalidInput: the variable is not set, or the address is none of http. It ends the run.
        OSError: the judge cannot be reached, or refuses.
        ValueError: what it says holds no score.
    """
    text = _filled(prompt, {"question": question, "answer": answer, "completion": completion})
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens,
            "temperature": temperature}
    request = _request(address, body, key_variable)
    reply = await asyncio.get_running_loop().run_in_executor(_threads(), _ask, request, seconds)
    found = re.findall(score, reply)
    if not found:
        raise ValueError(f"the judge gave no score that `{score}` finds: {reply[-200:]!r}")
    return min(1.0, max(0.0, float(found[-1]) / highest))


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_CALLS)


def _filled(prompt: str, values: dict[str, str]) -> str:
    """All at once, so that braces in an answer are left alone."""
    return re.sub(r"\{(question|answer|completion)\}", lambda match: values[match[1]], prompt)


def _request(address: str, body: dict, key_variable: str | None) -> urllib.request.Request:
    if not address.startswith(("http://", "https://")):
        raise InvalidInput(f"the address of the judge must begin with http:// or https://, not {address!r}")
    headers = {"Content-Type": "application/json"}
    if key_variable is not None:
        if not os.environ.get(key_variable):
            raise InvalidInput(f"the judge's key belongs in the environment variable {key_variable}, which is not set")
        headers["Authorization"] = f"Bearer {os.environ[key_variable]}"
    return urllib.request.Request(f"{address.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers)


def _ask(request: urllib.request.Request, seconds: float) -> str:
    try:
        with urllib.request.urlopen(request, timeout=seconds) as reply:
            data = json.loads(reply.read(_LONGEST))
    except urllib.error.HTTPError as error:
        more = error.read(500).decode(errors="replace")
        raise OSError(f"the judge answers {error.code} {error.reason}: {more}") from None
    try:
        content = data["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        content = None
    if not isinstance(content, str):
        raise ValueError(f"the judge's answer is no chat completion: {json.dumps(data)[:300]}")
    return content
