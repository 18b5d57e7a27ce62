"""Shipped reward functions. Nothing here loads torch."""

from __future__ import annotations

import re

_OPEN = r"(?:<(?:seed:)?think(?:ing)?>|<(?:thought|reasoning)>|\[THINK\]|<\|channel\|>analysis<\|message\|>)"
_CLOSE = r"</(?:seed:)?think(?:ing)?>|</(?:thought|reasoning)>|\[/THINK\]|<\|channel\|>final<\|message\|>"
_BEGINS, _HAS, _ENDS = re.compile(rf"\s*{_OPEN}"), re.compile(_OPEN), re.compile(rf"{_OPEN}\s*\Z")
_CLOSED = re.compile(_CLOSE)


def behind_thoughts(text: str) -> str | None:
    """Return what follows a model's thoughts; None where these open the text, or what follows others, and are cut off.
    """
    said = _CLOSED.split(text)[-1]
    return None if _BEGINS.match(said) else said


def ends_in_thoughts(prompt: str, said: str) -> bool:
    """Return whether a text that was cut off ends within thoughts, which it or the end of its prompt has opened."""
    *closed, behind = _CLOSED.split(said)
    return _HAS.search(behind) is not None or (not closed and _ENDS.search(prompt) is not None)
