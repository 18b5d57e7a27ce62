"""Rewards for what a text says and how: `math`, `format`, `length`."""

from __future__ import annotations

import functools
import re

from distflow import reward
from distflow.schema.errors import InvalidInput
from distflow.schema.registry import Regex
from workers.rewards.answers import MARK, Number, last_number, last_sentence, marked, number, reference_number

_LONG = re.compile(r"[-+]?[0-9.,]{1000,}")
"""A number of so many digits is compared as text."""


def _without_a_process(completion: str, answer: str, *, strict: bool = True) -> float | None:
    """Return what `math` gives where it has only numbers to compare; None where it must compute."""
    wanted, given = _final_answers(completion, answer)
    expected = reference_number(wanted)
    if given is None:
        found = None if strict else last_number(completion)
        return float(found is not None and expected is not None and found.answers(expected, strict))
    if given and given == wanted:
        return 1.0
    if expected is None:
        return 0.0 if _LONG.fullmatch(wanted) else None
    found = _given_number(completion, given)
    if found is not None:
        return float(found.answers(expected, strict))
    return 0.0 if strict or _LONG.fullmatch(given) else None


@reward(timeout=10.0, shortcut=_without_a_process)
def math(completion: str, answer: str, *, strict: bool = True) -> float:
    """1.0 if the completion's final answer equals the reference's, else 0.0.

    The final answer is what stands in the last `\\boxed{}` or behind the last `####` (GSM8K), whichever comes later. A
    completion without either has none, unless the reference has no `####` either: then it is the whole text, or its
    last sentence.

    Where the reference is a number, the answer must be one: see `workers.rewards.answers.number` for how it may be
    written. Numbers are compared exactly. `50%` answers 50 and 0.5, and `1/2` answers 0.5, but `48/2` does not answer
    24. Anything else (LaTeX, sets, equations) is compared by math-verify. `tests/workers/rewards/answers.jsonl` lists
    forms of answers with the verdicts of other graders.

    Args:
        strict: False also takes what is merely equal to a number that was asked for, as `13-7` for 6, and the last
            number of a completion in which no answer is marked.
    """
    verdict = _without_a_process(completion, answer, strict=strict)
    if verdict is not None:
        return verdict
    wanted, given = _final_answers(completion, answer)
    return float(_equal(wanted, given))


def _wrong_form(pattern: str | None = None, tags: list[str] | None = None) -> str:
    return "takes a `pattern` or `tags`, not both" if pattern is not None and tags is not None else ""


def _wrong_length(cap: int | None = None, margin: int = 0, target: int | None = None) -> str:
    if (cap is None) == (target is None):
        return "needs a `cap` or a `target`\nreward: {length: {cap: 1024, margin: 256}}"
    if target is not None and (target < 1 or margin):
        return f"needs a `target` of at least 1, without `margin`, not {target} and {margin}"
    return "" if cap is None or 0 <= margin <= cap else f"needs a `margin` from 0 to its cap of {cap}, not {margin}"


@reward(check=_wrong_form)
def format(completion: str, *, pattern: Regex | None = None, tags: list[str] | None = None) -> float:  # noqa: A001
    """1.0 if the completion has the form, else 0.0.

    Args:
        pattern: a regular expression for the whole completion; `.` stands for line ends too.
        tags: names of the elements that the completion consists of, each once and in this order, with nothing but
            space between them; default `[think, answer]`, unless there is a pattern.
    """
    if wrong := _wrong_form(pattern, tags):
        raise InvalidInput(f"reward `format` {wrong}")
    if pattern is not None:
        return float(re.fullmatch(pattern, completion, re.DOTALL) is not None)
    tags = ["think", "answer"] if tags is None else tags
    if any(completion.count(mark) != 1 for tag in tags for mark in (f"<{tag}>", f"</{tag}>")):
        return 0.0
    whole = r"\s*".join(f"<{re.escape(tag)}>.*</{re.escape(tag)}>" for tag in tags)
    return float(re.fullmatch(rf"\s*{whole}\s*", completion, re.DOTALL) is not None)


@reward(in_rank=True, check=_wrong_length)
def length(response: list[int], *, cap: int | None = None, margin: int = 0, target: int | None = None) -> float:
    """Between 0.0, for a good length in tokens, and -1.0.

    With `cap`, a response is good up to `cap - margin` tokens; from there it falls in a straight line to -1.0 at
    `cap` (the soft overlong punishment of DAPO, Yu et al. 2025, eq. 13). With `target`, it falls by
    |tokens - target| / target.
    """
    if wrong := _wrong_length(cap, margin, target):
        raise InvalidInput(f"reward `length` {wrong}")
    if target is not None:
        return -min(1.0, abs(len(response) - target) / target)
    over = len(response) - (cap - margin)
    return -min(1.0, max(0.0, over / margin)) if margin else -float(over > 0)


def _final_answers(completion: str, answer: str) -> tuple[str, str | None]:
    """Return the final answers of the reference and of the completion; None where the completion has none."""
    wanted, given = marked(answer), marked(completion)
    if given is None and MARK not in answer:
        given = completion.strip()
    return answer.strip() if wanted is None else wanted, given


def _given_number(completion: str, given: str) -> Number | None:
    """Read the first line behind a mark; without a mark the whole text, or else its last sentence."""
    if marked(completion) is not None:
        return number(given.split("\n")[0])
    return number(given) or number(last_sentence(given))


@functools.lru_cache(maxsize=65536)
def _equal(wanted: str, given: str) -> bool:
    from math_verify import parse, verify  # loads sympy: only answers that are no numbers pay for it

    return bool(verify(parse(f"${wanted}$"), parse(f"${given}$")))
