"""Rewards `judge` and `rubric`: grade an answer by another model, behind an OpenAI-compatible API."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from distflow.contracts.decorators import Regex, reward
from distflow.errors import InvalidInput
from distflow.telemetry.metrics import metric
from workers.isolation.model_api import ModelAPI
from workers.isolation.rewards import behind_thoughts

PROMPT = """\
Grade the answer to a question against the reference answer. Grade only what it says, not how it is written.

Question:
{question}

Reference answer:
{answer}

Answer to be graded:
{completion}

End with one line:  Score: N  where N is a whole number from 0 (wrong) to 10 (right and complete)."""
RUBRIC = """\
Say for each criterion whether the answer to a question meets it.

Question:
{question}

Answer to be graded:
{completion}

Criteria:
{criteria}

End with one line for each criterion, in their order, as  1: yes  or  1: no"""
_VERDICT = re.compile(
    r"(?:^|[,;{])\W{0,20}(?:criterion\s+)?(\d+)\W*[:：.)|=–—-]\W*?(?:(yes)\b|no\b|(?:(true|met|ja|是|✅)|"
    r"(?:false|not met|nein|否|不是|❌))(?=[^\w,;\n]*(?:$|[,;])))(?!\s*(?:(?:and|or)\s|/|\|\s*no\b))",
    re.IGNORECASE | re.MULTILINE)
"""The number of a criterion, and in one of two groups the word that says yes; neither where it says no."""
_MARKUP = re.compile(r"[*_`#>|]|\\[()\[\]]|\$")
_BOX = re.compile(r"\\boxed\s*\{([^{}]*)\}|\[\[([^\[\]]*)\]\]")
_CELL = re.compile(r"(?<!/)\b(score|rating|grade)[*_]*\s*(?:->|[>|]|[-–—](?=\s))", re.IGNORECASE)
"""Name of a score in a tag, or before the bar of a table, an arrow or a dash: read as `Score:`."""
_NUMBER = (r"([-+]?(?:\d+(?:[.,]\d+)?|\.\d+))(?:\s*(?:/|out\s+of)\s*(\d+(?:\.\d+)?)|\s*(%))?"
           r"(?![\w/%]|[.,]\d|\s*(?:[-–]|(?:to|or)\s)\s*\d)")
_SCORE = re.compile(
    r"(?P<line>^[^\w\n]*)?(?<![A-Za-z])(?:(?:(?:final|overall|total)\s+|最终|总)?(?:score|rating|grade|bewertung|punktzahl|"
    r"puntuación|puntaje|calificación|[评得]分|分数|スコア|点数|점수)[\"']?(?:\s+for\s+[^.:\d\n]{1,40}(?=\sis\b))?"
    rf"\s*(?:[(\[](?:out of )?[\d\s.–-]+[)\]]\s*)?(?:[:：=]|\bis\b:?|\n|(?=[ \t]+[\d./%]+\s*$))|"
    r"(?:give|rate\s+(?!\d)|award|deserves|overall|verdict)\b[^.\d\n]{0,30}"
    rf"(?=\d+(?:\.\d+)?\s*(?:/|out of)\s*\d+\b(?!\s+of\b)))\s*[\"'\[(]*{_NUMBER}",
    re.IGNORECASE | re.MULTILINE)
_ALONE = re.compile(rf"\W*?{_NUMBER}\W*")
_OBJECT = re.compile(r"(?:\A|```\w*\s)\s*(\[?\s*\{.*\})[\s\]]*(?:```\s*)?\Z", re.DOTALL)
_JSON = json.JSONDecoder(strict=False)
_KEY = re.compile(r"(?:(?:final|overall|total)[_ ])?(?:score|rating|grade)", re.IGNORECASE)
"""The JSON objects that a reply is, or ends with in a fence, and the key that has the score in it."""


def _wrong(prompt: str = PROMPT, score: str | None = None, cache: str | None = None, max_calls: int | None = None,
           **_: object) -> str:
    if max_calls is not None and cache is None:
        return "has `max_calls` without the file that counts them\nmax_calls: 1000, cache: judge.sqlite"
    if "{completion}" not in prompt:
        return "has a `prompt` without `{completion}`: its judge would never see the answer"
    if score is not None and re.compile(score).groups != 1:
        return f"has a `score` without its one group, which holds the number: {score!r}\nscore: 'Score: ([0-9]+)'"
    return ""


def _wrong_rubric(criteria: dict[str, str] | None = None, weights: dict[str, float] | None = None,
                  prompt: str = RUBRIC, **settings: Any) -> str:
    if unknown := [name for name in weights or () if name not in (criteria or {})]:
        return f"has a weight for `{unknown[0]}`, which is no criterion"
    if criteria is not None and not any((weights or {}).get(name, 1.0) > 0 for name in criteria):
        return "has no criterion with a weight above 0"
    if "{criteria}" not in prompt:
        return "has a `prompt` without `{criteria}`: its judge would never see them"
    return _wrong(prompt, **settings)


@reward(timeout=60.0, retries=2, concurrency=16, check=_wrong)
async def judge(completion: str, answer: str, question: str, *,
                address: Annotated[str, Field(pattern="^https?://")], model: str, prompt: str = PROMPT,
                score: Regex | None = None, highest: PositiveFloat = 10.0,
                key_variable: str | None = None, max_tokens: PositiveInt = 512, temperature: NonNegativeFloat = 0.0,
                seconds: PositiveFloat = 60.0, attempts: PositiveInt = 4, cache: str | None = None,
                max_calls: PositiveInt | None = None) -> float:
    """Return the judge's score divided by `highest`, clipped to 0.0 … 1.0.

    Args:
        address: base URL of the API, as `http://localhost:8000/v1`; `/chat/completions` is added.
        prompt: template with `{question}`, `{answer}` and `{completion}`; other braces stay.
        score: regular expression whose first group is the score; the last match counts, so that a judge may reason.
            Default: `Score: 8` as judges write it, also in Markdown or JSON, and as `Rating: 8/10` or `[[8]]`. The last
            one that begins a line counts; others count only if they agree.
        key_variable: environment variable with the API key; default: no key is sent.
        seconds: limit of one request; above 60 also set `timeout`.
        attempts: requests for an answer while the judge is busy or cannot be reached, with growing pauses.
        cache: file that keeps the answers of the judge, so that no request is made twice; ranks of a machine share it.
        max_calls: requests that `cache` may count. The run ends before there is one more.

    Raises:
        InvalidInput: `key_variable` is not set, `address` is no HTTP address, or `max_calls` are spent. Ends the run.
        OSError: the judge cannot be reached, or refuses.
        ValueError: the response holds no score.
    """
    text = _filled(prompt, {"question": question, "answer": answer, "completion": completion})
    api = ModelAPI("judge", address, key_variable, seconds, attempts, cache, max_calls)
    reply = await _answer(api, text, model, max_tokens, temperature)
    if score is None:
        return min(1.0, max(0.0, _read_score(reply, highest)))
    found = re.findall(score, behind_thoughts(reply) or "")
    if not found:
        raise ValueError(f"the judge gave no score that `{score}` finds: {reply[-200:]!r}")
    return min(1.0, max(0.0, float(found[-1]) / highest))


def _read_score(reply: str, highest: float) -> float:
    """Return the share of the highest score that a judge gives; raise ValueError if it gives none, or several."""
    said = behind_thoughts(reply) or ""
    scores = [value for found in _objects(said) for key, value in found.items() if _KEY.fullmatch(key)]
    if scores:
        said = " and ".join(["It says", *(f"score: {score}" for score in scores)])
    plain = _MARKUP.sub(" ", _CELL.sub(r"\1: ", _BOX.sub(lambda found: f" {found[1] or found[2]} ", said)))
    found = [*_SCORE.finditer(plain)]
    lines = [match for match in found if match["line"] is not None]
    values = [_share(match.groups()[1:], highest) for match in lines[-1:] or found]
    if not found and (boxes := _BOX.findall(said) or [plain.strip()]):
        alone = [match for box in boxes if (match := _ALONE.fullmatch("".join(box)))]
        values = [_share(match.groups(), highest) for match in alone]
    if not values:
        raise ValueError(f"the judge gave no score, as `Score: 8`: {said[-200:]!r}")
    if len(set(values)) > 1:
        raise ValueError(f"the judge gave several scores, and none on a line of its own: {said[-200:]!r}")
    return values[0]


def _objects(said: str) -> list[dict[str, Any]]:
    """Return the JSON objects that a judge answers; none if it answers otherwise."""
    text, at, objects = found[1] if (found := _OBJECT.search(said)) else "", 0, []
    with contextlib.suppress(ValueError, RecursionError):
        while (at := text.find("{", at)) >= 0:
            value, at = _JSON.raw_decode(text, at)
            objects.append(value)
    return objects


def _share(number: tuple[str | None, ...], highest: float) -> float:
    """Return a score's share of the highest one, or of that which stands behind it, as in `8/10`."""
    value, of, percent = number
    whole = 100.0 if percent else float(of or 0) or highest
    return float((value or "0").replace(",", ".")) / whole


@reward(timeout=60.0, retries=2, concurrency=16, check=_wrong_rubric)
async def rubric(completion: str, question: str, rubric: str = "", *,
                 address: Annotated[str, Field(pattern="^https?://")], model: str,
                 criteria: dict[str, str] | None = None, weights: dict[str, float] | None = None, prompt: str = RUBRIC,
                 key_variable: str | None = None, max_tokens: PositiveInt = 512, temperature: NonNegativeFloat = 0.0,
                 seconds: PositiveFloat = 60.0, attempts: PositiveInt = 4, cache: str | None = None,
                 max_calls: PositiveInt | None = None) -> float:
    """Return the weights of the criteria that a judge finds met, divided by the sum of those above 0: 0.0 … 1.0.

    Args:
        rubric: the row's own criteria in place of `criteria`, as JSON: `[{"criterion": text, "weight": number}, …]`.
        criteria: texts by name; the share of answers that meet each is the metric `rubric/NAME`.
        weights: by name, default 1; below 0 for what an answer should not do.
        prompt: template with `{question}`, `{completion}` and `{criteria}`.
        others: as those of `judge`.

    Raises:
        InvalidInput: as `judge`; or neither the row nor the settings have criteria. Ends the run.
        ValueError: the judge did not answer for each criterion, or the row's `rubric` cannot be read.
    """
    named = criteria if not rubric.strip() else None
    parts = [(text, (weights or {}).get(name, 1.0)) for name, text in named.items()] if named else _own(rubric)
    listed = "\n".join(f"{number}. {text}" for number, (text, _) in enumerate(parts, 1))
    filled = _filled(prompt, {"question": question, "completion": completion, "criteria": listed})
    api = ModelAPI("judge", address, key_variable, seconds, attempts, cache, max_calls)
    reply = await _answer(api, filled, model, max_tokens, temperature)
    said = behind_thoughts(reply) or ""
    verdicts = {int(number): bool(yes or met) for number, yes, met in _VERDICT.findall(said)}
    if missing := [number for number in range(1, len(parts) + 1) if number not in verdicts]:
        raise ValueError(f"the judge gave no verdict on criterion {missing[0]} of {len(parts)}: {reply[-200:]!r}")
    for number, name in enumerate(named or (), 1):
        metric(f"rubric/{name}", verdicts[number])
    met = sum(weight for number, (_, weight) in enumerate(parts, 1) if verdicts[number])
    return min(1.0, max(0.0, met / sum(weight for _, weight in parts if weight > 0)))


def _own(text: str) -> list[tuple[str, float]]:
    """Return the criteria of a row, with their weights."""
    if not text.strip():
        raise InvalidInput("reward `rubric` has no criteria\nreward: {rubric: {criteria: {short: It has one sentence}}}"
                           "   or, for criteria of each row,  data: {columns: [rubric]}")
    found = json.loads(text)
    try:
        parts = [(str(each["criterion"]), float(each.get("weight", 1.0))) for each in found]
    except (TypeError, KeyError, AttributeError):
        parts = []
    if not any(weight > 0 for _, weight in parts):
        raise ValueError(f'a rubric must be a list as [{{"criterion": text, "weight": number}}], not {text[:100]!r}')
    return parts


async def _answer(api: ModelAPI, text: str, model: str, max_tokens: int, temperature: float) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens,
            "temperature": temperature}
    return await api.ask("chat/completions", body, "chat completion", _content)


def _content(choice: dict[str, Any]) -> str:
    """Return the text of a message, which may be a list of parts."""
    content = choice["message"]["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content if part["type"] == "text")


def _filled(prompt: str, values: dict[str, str]) -> str:
    """Fill in all values at once, so that braces in an answer stay as they are."""
    return re.sub(rf"\{{({'|'.join(values)})\}}", lambda match: values[match[1]], prompt)
