"""Shipped reward functions. Nothing here loads torch."""

from __future__ import annotations

import re

LONGEST_MARK = 16  # tokens of one that opens thoughts, with line ends behind it
_OPEN = r"(?:<(?:seed:)?think(?:ing)?>|<(?:thought|reasoning)>|\[THINK\]|<\|channel\|>analysis<\|message\|>)"
_CLOSE = r"</(?:seed:)?think(?:ing)?>|</(?:thought|reasoning)>|\[/THINK\]|<\|channel\|>final<\|message\|>"
_ENDS = re.compile(rf"{_OPEN}\s*\Z")
_NAMED = r"(?:(?<!\w)[`'\"](?:{0})[`'\"]|(?<=[a-z] )(?:{0}) (?:tags?|blocks?)\b)".format(f"{_OPEN}|{_CLOSE}")
_MARKS = re.compile(rf"{_NAMED}|({_OPEN})|({_CLOSE})")
"""Marks of thoughts, each in a group, and what only names one, as in "the <think> tag"."""


def behind_thoughts(text: str) -> str | None:
    """Return what a model says beside its thoughts; behind them, where its prompt has opened them. None where thoughts
    open the text, or what follows others, and are cut off."""
    said, end, begin = "", 0, -1
    for mark in _marks(text):
        if mark[1] is None:
            said, end, begin = said if begin >= 0 else "", mark.end(), -1
        elif begin < 0:
            said, begin = said + text[end : mark.start()], mark.start()
    if begin >= 0 and not text[end:begin].strip():
        return None
    return said + text[begin if begin >= 0 else end :]


def _marks(text: str) -> list[re.Match[str]]:
    return [mark for mark in _MARKS.finditer(text) if mark.lastindex]


def opened_thoughts(prompt: str, said: str) -> str:
    """Return the mark by which the end of a prompt has opened thoughts that a text does not close; "" without one."""
    opened = _ENDS.search(prompt)
    return opened[0] if opened and not any(mark[2] for mark in _marks(said)) else ""


def ends_in_thoughts(prompt: str, said: str) -> bool:
    """Return whether a text that was cut off ends within thoughts, which it or the end of its prompt has opened."""
    marks = _marks(said)
    closed = max((at for at, mark in enumerate(marks, 1) if mark[2]), default=0)
    return len(marks) > closed or bool(opened_thoughts(prompt, said))
