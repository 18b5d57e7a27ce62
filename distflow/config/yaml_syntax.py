"""Explains text that is not YAML: what is wrong, where, the probable cause and the corrected line.

PyYAML's own messages name tokens of its scanner ("expected <block end>, but found '<block mapping start>'"), and a
quote or a bracket that is left open is noticed lines later. Each rule below looks at one usual mistake.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

from distflow.errors import Diagnostic, Location

_CLOSES = {"{": "}", "[": "]"}
_QUOTES = "\"'"
_WIDTH = 110


_MOST_NESTED = 64  # mappings and lists in each other; files of ours have ten
_MOST_VALUES = 200_000  # with an alias counted as all that it stands for


class TooMuch(yaml.MarkedYAMLError):
    """More than a file of settings has: a few bytes of YAML can stand for gigabytes, or be nested without end."""


class BoundedLoader(yaml.SafeLoader):
    """Loader of plain data that refuses what is nested too deeply or stands for too much."""

    def __init__(self, stream: Any):
        super().__init__(stream)
        self._nested = self._values = 0
        self._sizes: dict[int, int] = {}  # values of each composed node, by identity

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark, before = self.peek_event().start_mark, self._values
        self._nested += 1
        if self._nested > _MOST_NESTED:
            raise TooMuch(None, None, f"mappings and lists stand in each other more than {_MOST_NESTED} deep", mark)
        node = super().compose_node(parent, index)
        self._nested -= 1
        self._values += 1 if node is None else self._sizes.get(id(node), 1)
        if self._values > _MOST_VALUES:
            raise TooMuch(None, None, f"this stands for more than {_MOST_VALUES:,} values, each alias (`*name`) "
                          "counted as all that it stands for", mark)
        self._sizes.setdefault(id(node), self._values - before)
        return node


@dataclass(frozen=True)
class Position(Location):
    """Location whose column counts, and whose indentation is shown."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    def excerpt(self, width: int = _WIDTH) -> str:
        if len(self.text) > width or not self.text.strip():
            return super().excerpt(width)
        head = f"    {self.line} |  "
        under = " " * (len(head) + self.column - 1) + "^" * self.length
        return f"{head}{_visible(self.text)}\n{under}" if self.length else head + _visible(self.text)


@dataclass(frozen=True)
class _Mistake:
    what: str
    line: int  # from 0, as all that follow
    column: int
    cause: str = ""
    corrected: str = ""  # the line, or other lines from `corrected_from` on
    corrected_from: int | None = None
    before: int | None = None  # a line above that shows why


@dataclass(frozen=True)
class _Found:
    """What PyYAML says. `began`: where what it was reading had begun."""

    problem: str
    context: str
    line: int
    column: int
    began: tuple[int, int]
    lines: list[str]

    def text(self, line: int) -> str:
        return self.lines[line] if line < len(self.lines) else ""


def explain(error: yaml.MarkedYAMLError, lines: list[str], file: str) -> Diagnostic:
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return Diagnostic(f"this is not YAML: {error.problem}", Location(file))
    if isinstance(error, TooMuch):
        text = lines[mark.line] if mark.line < len(lines) else ""
        return Diagnostic(str(error.problem), Position(file, mark.line + 1, mark.column + 1, 1, text))
    began = error.context_mark or mark
    found = _Found(str(error.problem), str(error.context or ""), mark.line, mark.column, (began.line, began.column),
                   lines)
    mistake = next(filter(None, (rule(found) for rule in _RULES)), None) or _unknown(found)

    def at(line: int, column: int = 0, length: int = 0) -> Position:
        return Position(file, line + 1, column + 1, length, found.text(line))

    where = at(mistake.line, mistake.column, 1)
    shown = tuple(at(line) for line in (mistake.before,) if line is not None and line != mistake.line)
    return Diagnostic(mistake.what, where, _hint(mistake), (*shown, where))


def _hint(mistake: _Mistake) -> str:
    first = mistake.line if mistake.corrected_from is None else mistake.corrected_from
    fixed = [f"    {first + index + 1} |  {text}" for index, text in enumerate(mistake.corrected.splitlines())]
    return "\n".join([*([mistake.cause] if mistake.cause else []), *(["Instead:", *fixed] if fixed else [])])


def _visible(text: str) -> str:
    return text.replace("\t", "→")


def _open_at_end(text: str) -> tuple[list[int], int | None]:
    """Return the columns of the brackets that a line leaves open, and of a quote that it leaves open."""
    brackets: list[int] = []
    quote: int | None = None
    for column, sign in enumerate(text):
        before = text[column - 1] if column else " "
        if quote is not None:
            quote = None if sign == text[quote] and before != "\\" else quote
        elif sign in _QUOTES and before in " [{,:(":
            quote = column
        elif sign == "#" and before.isspace():
            break
        elif sign in _CLOSES:
            brackets.append(column)
        elif sign in _CLOSES.values() and brackets:
            brackets.pop()
    return brackets, quote


def _indentation(text: str) -> int:
    return len(text) - len(text.lstrip())


def _above(found: _Found, line: int) -> int | None:
    """Return the last line above that is neither empty nor a comment."""
    return next((each for each in range(line - 1, -1, -1) if found.lines[each].strip()
                 and not found.lines[each].lstrip().startswith("#")), None)


def _tab(found: _Found) -> _Mistake | None:
    text = found.text(found.line)
    if "\t" not in text[: max(found.column + 1, _indentation(text))]:
        return None
    spaces = re.sub(r"\t+", lambda tabs: "  " * len(tabs[0]), text)
    return _Mistake("a tab stands here, and YAML wants spaces", found.line, text.index("\t"),
                    "An editor has put it there (shown as →). Indent with spaces alone.", spaces)


def _quote(found: _Found) -> _Mistake | None:
    for line in range(min(found.began[0], found.line), min(found.line, len(found.lines) - 1) + 1):
        text = found.lines[line]
        brackets, quote = _open_at_end(text)
        if quote is None:
            continue
        inside = any(column < quote for column in brackets)
        end = re.search(r"[,}\]]" if inside else r"\s*(\s#.*)?$", text[quote + 1 :])
        at = quote + 1 + (end.start() if end else len(text) - quote - 1)
        return _Mistake(f"the quote {text[quote]} is opened here and not closed on this line", line, quote, "",
                        text[:at] + text[quote] + text[at:])
    return None


def _bracket(found: _Found) -> _Mistake | None:
    if "flow" not in found.context or "expected ','" not in found.problem:
        return None
    line, column = found.began
    opened = found.text(line)[column : column + 1]
    ended = found.line == line and found.column >= len(found.text(line).rstrip())
    if not ended and found.line == line and ("':'" in found.problem or "'{'" in found.problem or "'['" in found.problem
                               or "scalar" in found.problem):
        return _comma(found)
    if not ended and found.line == line:
        text = found.text(line)
        return _Mistake(f"`{opened}` is opened in column {column + 1}, and closed by another sign here", line,
                        found.column, f"`{opened}` is closed by `{_CLOSES[opened]}`.",
                        text[: found.column] + _CLOSES[opened] + text[found.column :])
    last = next((each for each in range(line + 1, min(found.line + 1, len(found.lines))) if found.lines[each].strip()
                 and _indentation(found.lines[each]) <= _indentation(found.text(line))), len(found.lines)) - 1
    text = "\n".join(found.lines[line : last + 1]).rstrip()
    closing = "".join(_CLOSES[text[each]] for each in reversed(_open_at_end(text)[0]))
    return _Mistake(f"`{opened}` is opened here and never closed", line, column, "",
                    text + closing if closing else "")


def _comma(found: _Found) -> _Mistake:
    text = found.text(found.line)
    word = re.search(r"\S+\s*$", text[: found.column])
    at = found.column if word is None or "':'" not in found.problem else word.start()
    return _Mistake("a comma is missing before this", found.line, at,
                    "In `{…}` and `[…]` commas stand between the parts.", f"{text[:at].rstrip()}, {text[at:]}")


def _colon_in_value(found: _Found) -> _Mistake | None:
    text = found.text(found.line)
    key = re.match(r"\s*(?:- )?[^:#\"'{\[]+: +(?=\S)", text[: found.column])
    if found.problem != "mapping values are not allowed here" or key is None:
        return None
    value = text[key.end() :].rstrip().replace('"', '\\"')
    return _Mistake("a second colon stands in this value", found.line, found.column,
                    "A text with a colon and a space in it needs quotes.", f'{text[: key.end()]}"{value}"')


def _indented(found: _Found) -> _Mistake | None:
    if found.problem != "mapping values are not allowed here" and "<block" not in found.problem:
        return None
    text, above = found.text(found.line), _above(found, found.line)
    if above is None or not text.strip():
        return None
    opener = found.lines[above].rstrip().endswith(":")
    right = _indentation(found.lines[above]) + 2 * opener
    if right == _indentation(text):
        return None
    deeper = "deeper" if _indentation(text) > _indentation(found.lines[above]) else "less"
    return _Mistake(f"this line is indented {deeper} than the ones that it belongs to", found.line, _indentation(text),
                    "Keys of one mapping begin in the same column. Line "
                    f"{above + 1} begins in column {_indentation(found.lines[above]) + 1}.",
                    " " * right + text.strip(), before=above)


def _colon_missing(found: _Found) -> _Mistake | None:
    line, column = found.began
    if "expected ':'" not in found.problem:
        return None
    text = found.text(line)
    if glued := re.match(r"(\s*[\w.-]+):(?=\S)", text):
        return _Mistake("a space is missing after the colon", line, glued.end(), "",
                        f"{glued[0]} {text[glued.end() :]}")
    word = re.match(r"\s*[\w.-]+", text)
    return _Mistake("this line has no colon", line, word.end() if word else column, "A line says  key: value",
                    f"{word[0]}: {text[word.end() :].strip()}".rstrip() if word else "")


def _needs_quotes(found: _Found) -> _Mistake | None:
    text = found.text(found.line)
    if "cannot start any token" not in found.problem and "alias" not in found.problem + found.context \
            and "anchor" not in found.context:
        return None
    column = found.began[1] if "alias" in found.context or "anchor" in found.context else found.column
    value = re.match(r"[^,\]}\s#]+", text[column:])
    word = value[0] if value else text[column : column + 1]
    return _Mistake(f"a value cannot begin with `{text[column : column + 1]}`", found.line, column,
                    "Put quotes around it.", f'{text[:column]}"{word}"{text[column + len(word) :]}')


def _escape(found: _Found) -> _Mistake | None:
    if "escape" not in found.problem:
        return None
    text, (line, column) = found.text(found.line), found.began
    end = text.find('"', column + 1)
    fixed = f"{text[:column]}'{text[column + 1 : end]}'{text[end + 1 :]}" if line == found.line and end > 0 else ""
    return _Mistake("a backslash in double quotes begins an escape, and this is none", found.line, found.column - 1,
                    "In single quotes a backslash stands for itself.", fixed)


def _list_beside_key(found: _Found) -> _Mistake | None:
    if "sequence entries are not allowed" not in found.problem:
        return None
    text = found.text(found.line)
    entry = text[found.column :].lstrip("- ").rstrip()
    return _Mistake("a list with `-` cannot begin on the line of its key", found.line, found.column, "",
                    f"{text[: found.column]}[{entry}]")


def _surplus(found: _Found) -> _Mistake | None:
    text = found.text(found.line)
    sign = text[found.column : found.column + 1]
    if sign not in {"}", "]", ","} or not sign:
        return None
    what = f"`{sign}` closes nothing" if sign != "," else "nothing stands before this comma"
    return _Mistake(what, found.line, found.column, "Take it out.", text[: found.column] + text[found.column + 1 :])


def _unknown(found: _Found) -> _Mistake:
    line = min(found.line, max(len(found.lines) - 1, 0))
    words = f"{found.context}: {found.problem}" if found.context else found.problem
    return _Mistake("YAML cannot read this", line, found.column if line == found.line else 0,
                    f"Its parser says: {words}.", before=found.began[0] if found.began[0] < line else None)


_RULES = (_tab, _quote, _bracket, _escape, _colon_in_value, _indented, _colon_missing, _list_beside_key, _surplus,
          _needs_quotes)
"""In this order: what is left open leads to errors of every other kind further down."""
