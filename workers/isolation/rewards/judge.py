"""Reward `judge`: grades an answer by another model, behind an OpenAI-compatible API."""

from __future__ import annotations

import functools
import os
import re
import ssl
from json import JSONDecodeError
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

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


def _wrong(prompt: str = PROMPT, score: str = "()", **_: object) -> str:
    if "{completion}" not in prompt:
        return "has a `prompt` without `{completion}`: its judge would never see the answer"
    if re.compile(score).groups != 1:
        return f"has a `score` without its one group, which holds the number: {score!r}\nscore: 'Score: ([0-9]+)'"
    return ""


@reward(timeout=60.0, retries=2, concurrency=16, check=_wrong)
async def judge(completion: str, answer: str, question: str, *,
                address: Annotated[str, Field(pattern="^https?://")], model: str, prompt: str = PROMPT,
                score: Regex = r"[Ss]core:\s*(-?\d+(?:\.\d+)?)", highest: PositiveFloat = 10.0,
                key_variable: str | None = None, max_tokens: PositiveInt = 512, temperature: NonNegativeFloat = 0.0,
                seconds: PositiveFloat = 60.0) -> float:
    """Return the judge's score divided by `highest`, clipped to 0.0 … 1.0.

    Args:
        address: base URL of the API, as `http://localhost:8000/v1`; `/chat/completions` is added.
        prompt: template with `{question}`, `{answer}` and `{completion}`; other braces stay.
        score: regular expression whose first group is the score; the last match counts, so that a judge may reason.
        key_variable: environment variable with the API key; default: no key is sent.
        seconds: limit of one request; above 60 also set `timeout`.

    Raises:
        InvalidInput: `key_variable` is not set, or `address` is no HTTP address. Ends the run.
        OSError: the judge cannot be reached, or refuses.
        ValueError: the response holds no score.
    """
    text = _filled(prompt, {"question": question, "answer": answer, "completion": completion})
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens,
            "temperature": temperature}
    reply = await _ask(address, body, _headers(address, key_variable), seconds)
    found = re.findall(score, reply)
    if not found:
        raise ValueError(f"the judge gave no score that `{score}` finds: {reply[-200:]!r}")
    return min(1.0, max(0.0, float(found[-1]) / highest))


def _filled(prompt: str, values: dict[str, str]) -> str:
    """Fill in all values at once, so that braces in an answer stay as they are."""
    return re.sub(r"\{(question|answer|completion)\}", lambda match: values[match[1]], prompt)


def _headers(address: str, key_variable: str | None) -> dict[str, str]:
    if not address.startswith(("http://", "https://")):
        raise InvalidInput(f"the address of the judge must begin with http:// or https://, not {address!r}")
    if key_variable is None:
        return {}
    if not os.environ.get(key_variable):
        raise InvalidInput(f"the judge's key belongs in the environment variable {key_variable}, which is not set")
    return {"Authorization": f"Bearer {os.environ[key_variable]}"}


async def _ask(address: str, body: dict, headers: dict[str, str], seconds: float) -> str:
    import httpx  # only a process that asks a judge pays for it

    try:
        async with httpx.AsyncClient(timeout=seconds, verify=_certificates(), follow_redirects=True) as client:
            reply = await client.post(f"{address.rstrip('/')}/chat/completions", json=body, headers=headers)
    except httpx.HTTPError as error:
        raise OSError(f"the judge at {address} does not answer: {type(error).__name__} {error}") from None
    if reply.is_error:
        raise OSError(f"the judge answers {reply.status_code} {reply.reason_phrase}: {reply.text[:500]}")
    try:
        content = reply.json()["choices"][0]["message"]["content"]
    except (JSONDecodeError, KeyError, IndexError, TypeError):
        content = None
    if not isinstance(content, str):
        raise ValueError(f"the judge's answer is no chat completion: {reply.text[:300]}")
    return content


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Return the authorities of TLS, which take longer to load than a short answer takes."""
    return ssl.create_default_context()
