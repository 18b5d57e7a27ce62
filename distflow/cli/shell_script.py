"""Reads the settings in a shell script that starts training elsewhere: `a.b=value` and `--a value`.

    expanded              $NAME, ${NAME:-default}, $((1024 * 20)); quotes; comments; arrays' elements
    left as it stands     what only running the script would tell: $(command), $1, variables that are not set, and
                          expansions that are more than a name
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_DOTTED = re.compile(r"(?:\+{0,2}([a-z]\w*(?:\.\w+)+)|--([\w-]+))=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)(?::?-((?:[^{}]|\$\{[^{}]*\})*))?\}")
_ARGUMENTS = re.compile(r"\$\{?[@*]\}?|\$\{\w+\[[@*]\]\}")  # the script's own, and arrays, whose elements are read
_UNKNOWN = re.compile(r"\$\w|\$\{\w+[^.\w]|\$\(|`")  # and not ${a.b}, which is Hydra's
_REDIRECTION = re.compile(r"\d*[<>].*")
_ENDS = "\n"  # in place of a word: a command ends here
_MOST_POWER = 64


def shell_settings(text: str) -> tuple[dict[str, str | bool], dict[str, str]]:
    """Return the settings of a script by their names, and those whose values only running it would tell."""
    words = list(_Script(re.sub(r"\\\n", " ", text)).words())
    settings: dict[str, str | bool] = {}
    for word, following in zip(words, [*words[1:], ""]):
        if match := _DOTTED.fullmatch(word):
            settings[match[1] or match[2].replace("-", "_")] = match[3]
        elif match := re.fullmatch(r"--([\w-]+)", word):
            given = following and not following.startswith(("--", _ENDS)) and not _REDIRECTION.fullmatch(following)
            settings[match[1].replace("-", "_")] = following if given else True
    unknown = {name: value for name, value in settings.items() if isinstance(value, str) and _UNKNOWN.search(value)}
    return {name: value for name, value in settings.items() if name not in unknown}, unknown


@dataclass
class _Script:
    """Scanner of a script: yields its words, and keeps the variables that they set for those behind."""

    text: str
    at: int = 0
    variables: dict[str, str] = field(default_factory=dict)

    def words(self) -> Iterator[str]:
        begins, inside = True, 0  # whether the next word may set a variable; in how many parentheses
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter in " \t\n;|&()":
                begins, inside = begins or letter in "\n;|&(", inside + {"(": 1, ")": -1}.get(letter, 0)
                if letter in ";|&" or (letter == "\n" and inside < 1):  # an array goes over several lines
                    yield _ENDS
                self.at += 1
            elif letter == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                word = self._word()
                assigned = _ASSIGNED.fullmatch(word) if begins else None
                if assigned:
                    before = self.variables.get(assigned[1], "") if assigned[2] else ""
                    self.variables[assigned[1]] = before + assigned[3]
                elif word:
                    yield word
                begins = bool(assigned) or word == "export"

    def _word(self) -> str:
        parts = []
        while self.at < len(self.text) and self.text[self.at] not in " \t\n;|&()":
            letter = self.text[self.at]
            if letter == "'":
                parts.append(self._until("'"))
            elif letter == '"':
                parts.append(self._double_quoted())
            elif letter == "$":
                parts.append(self._expansion())
            else:
                escaped = letter == "\\" and self.at + 1 < len(self.text)
                parts.append(self.text[self.at + 1] if escaped else letter)
                self.at += 1 + escaped
        return "".join(parts)

    def _until(self, quote: str) -> str:
        """Return the text from behind the quote here to the next one, and step behind that."""
        end = self.text.find(quote, self.at + 1)
        end = len(self.text) if end < 0 else end
        found, self.at = self.text[self.at + 1 : end], end + 1
        return found

    def _double_quoted(self) -> str:
        parts, self.at = [], self.at + 1
        while self.at < len(self.text) and self.text[self.at] != '"':
            letter = self.text[self.at]
            if letter == "$":
                parts.append(self._expansion())
                continue
            escaped = letter == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`")
            parts.append(self.text[self.at + escaped])
            self.at += 1 + escaped
        self.at += 1
        return "".join(parts)

    def _expansion(self) -> str:
        """Return what stands for the `$…` here, and step behind it."""
        if self.text.startswith("$((", self.at) and (end := self.text.find("))", self.at)) > 0:
            written, self.at = self.text[self.at : end + 2], end + 2
            value = _computed(self._filled(re.sub(r"(?<![$\w{])([A-Za-z_]\w*)", r"$\1", written[3:-2])))
            return written if value is None else str(value)
        if self.text.startswith("$(", self.at):
            end = _closing(self.text, self.at + 1)
            written, self.at = self.text[self.at : end], end
            return written
        match = _ARGUMENTS.match(self.text, self.at) or _VARIABLE.match(self.text, self.at)
        if match is None:
            self.at += 1
            return "$"
        self.at = match.end()
        return "" if match.re is _ARGUMENTS else self._filled(match[0])

    def _filled(self, text: str) -> str:
        """Return a text with the variables that are known; a default that is not needed is left out."""
        def value(match: re.Match[str]) -> str:
            name = match[1] or match[2]
            known = self.variables.get(name) or os.environ.get(name)
            return known or (match[0] if match[3] is None else self._filled(match[3]).strip("'\""))
        return _VARIABLE.sub(value, text)


def _closing(text: str, opened: int) -> int:
    """Return where what the parenthesis at `opened` opens has ended."""
    depth = 0
    for at in range(opened, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at + 1
    return len(text)


def _computed(expression: str) -> int | None:
    """Return the value of an arithmetic expression of the shell; None if it is more than sums and products."""
    try:
        return _value_of(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _cut(one: int, other: int) -> int:
    """Divide as a shell does, towards zero."""
    whole = abs(one) // abs(other)
    return whole if (one < 0) == (other < 0) else -whole


def _rest(one: int, other: int) -> int:
    return one - other * _cut(one, other)


def _power(one: int, other: int) -> int:
    if not 0 <= other <= _MOST_POWER or abs(one) >= 2**_MOST_POWER:
        raise ValueError
    return one**other


_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: _cut, ast.Mod: _rest,
    ast.Pow: _power}


def _value_of(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value_of(node.left), _value_of(node.right))
    raise ValueError
