"""Shipped reward functions. Nothing here loads torch."""

from __future__ import annotations

import re

_OPEN = r"(?:<(?:seed:)?think(?:ing)?>|<(?:thought|reasoning)>|\[THINK\]|<\|channel\|>analysis<\|message\|>)"
_CLOSE = r"</(?:seed:)?think(?:ing)?>|</(?:thought|reasoning)>|\[/THINK\]|<\|channel\|>final<\|message\|>"
_HAS, _ENDS = re.compile(_OPEN), re.compile(rf"{_OPEN}\s*\Z")
_CLOSED, _MARKS = re.compile(_CLOSE), re.compile(rf"({_OPEN})|{_CLOSE}")


def behind_thoughts(text: str) -> str | None:
    """Return what a model says beside its thoughts; behind them, where its prompt has opened them. None where thoughts
    open the text, or what follows others, and are cut off."""
    said, end, begin = "", 0, -1
    for mark in _MARKS.finditer(text):
        if mark[1] is None:
            said, end, begin = said if begin >= 0 else "", mark.end(), -1
        elif begin < 0:
            said, begin = said + text[end : mark.start()], mark.start()
    if begin >= 0 and not text[end:begin].strip():
        return None
    return said + text[begin if begin >= 0 else end :]


def ends_in_thoughts(prompt: str, said: str) -> bool:
    """Return whether a text that was cut off ends within thoughts, which it or the end of its prompt has opened."""
    *closed, behind = _CLOSED.split(said)
    return _HAS.search(behind) is not None or (not closed and _ENDS.search(prompt) is not None)
