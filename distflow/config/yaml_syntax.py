"""Explains text that is not YAML: what is wrong, where, the probable cause and the corrected line.

PyYAML's own messages name tokens of its scanner ("expected <block end>, but found '<block mapping start>'"), and a
quote or a bracket that is left open is noticed lines later. So corrections of usual mistakes are tried one after the
other, until the text can be read further: that mistake is told.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml

from distflow.errors import Diagnostic, Location

_WIDTH = 110
_TRIED = 2**16  # characters of a text in which corrections are tried
_LINES = 20  # in which a mistake is looked for, from where what was being read had begun


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
        visible = self.text.replace("\t", "→")
        return f"{head}{visible}\n{under}" if self.length else head + visible


@dataclass(frozen=True)
class _Found:
    """Where PyYAML has stopped, and where what it was reading had begun."""

    problem: str
    at: tuple[int, int]
    began: tuple[int, int]
    lines: list[str]

    @property
    def near(self) -> list[int]:
        """Lines in which the mistake may be."""
        between = range(self.began[0], min(self.at[0], len(self.lines) - 1) + 1)
        return sorted({*between[:_LINES], *between[-1:]})


class _Edit(NamedTuple):
    """Correction: `lines` in place of those from `first` on. The mistake that it mends is at `line` and `column`."""

    what: str
    cause: str
    line: int
    column: int
    first: int
    lines: list[str]
    before: int | None = None  # a line above that shows why


Rule = Callable[[_Found], Iterator[_Edit]]


def _line(what: str, cause: str, pattern: str, instead: str | Callable[[re.Match[str]], str],
          at_mark: bool = False) -> Rule:
    """Return the rule of a mistake on one line, with its place in the group `here` of `pattern`. `instead`: of all that
    the pattern has. `at_mark`: its place is where the parser has stopped, or had begun."""
    def edits(found: _Found) -> Iterator[_Edit]:
        for line in found.near:
            text = found.lines[line]
            for has in re.finditer(pattern, text):
                if at_mark and (line, has.start("here")) not in (found.at, found.began):
                    continue
                other = has.expand(instead) if isinstance(instead, str) else instead(has)
                yield _Edit(what.format(here=has["here"], column=has.start() + 1), cause, line, has.start("here"), line,
                            [text[: has.start()] + other + text[has.end() :]])
    return edits


def _open_bracket(found: _Found) -> Iterator[_Edit]:
    """Close what a line leaves open, behind the lines that are indented deeper."""
    (line, column), lines = found.began, found.lines
    own = lines[line] if line < len(lines) else ""
    if own[column : column + 1] not in ("{", "["):
        return
    last = next((each for each in range(line + 1, len(lines)) if lines[each].strip()
                 and _indentation(lines[each]) <= _indentation(own)), len(lines)) - 1
    text = left = "\n".join(lines[line : last + 1]).rstrip()
    while left != (left := re.sub(r"\[[^][{}]*\]|\{[^][{}]*\}", "", left)):
        pass
    closing = "".join("]" if sign == "[" else "}" for sign in reversed(re.findall(r"[\[{]", left)))
    yield _Edit(f"`{own[column]}` is opened here and never closed", "", line, column, line,
                (text + closing).split("\n"))


def _indented(found: _Found) -> Iterator[_Edit]:
    line, lines = found.at[0], found.lines
    above = next((each for each in range(min(line, len(lines)) - 1, -1, -1) if lines[each].strip()
                  and not lines[each].lstrip().startswith("#")), None)
    if above is None or line >= len(lines):
        return
    own, other = _indentation(lines[line]), _indentation(lines[above])
    cause = f"Keys of one mapping begin in the same column. Line {above + 1} begins in column {other + 1}."
    yield _Edit(f"this line is indented {'deeper' if own > other else 'less'} than the ones that it belongs to", cause,
                line, own, line, [" " * (other + 2 * lines[above].rstrip().endswith(":")) + lines[line].strip()], above)


def _indentation(text: str) -> int:
    return len(text) - len(text.lstrip())


_OPEN_QUOTE = "the quote {here} is opened here and not closed on this line"
_QUOTE = r"""(?<=[ \[{,:(])(?P<here>["'])(?!.*(?P=here))"""
_QUOTED = r"\g<here>\g<text>\g<here>"
_COMMA = "a comma is missing before this", "In `{…}` and `[…]` commas stand between the parts."
_KEY = r"""^(?P<key>\s*(?:- )?[^:#"'{\[]+: +)"""
_RULES: tuple[Rule, ...] = (
    *(_line("a tab stands here, and YAML wants spaces", "An editor has put it there (shown as →). Indent with spaces "
            "alone.", r"^.*?(?P<here>\t).*$", lambda has, spaces=spaces: has[0].replace("\t", spaces))
      for spaces in ("  ", "")),
    _line(_OPEN_QUOTE, "", _QUOTE + r"(?P<text>[^,}\]]*?)(?=\s*(?:[,}\]]|\s#|$))", _QUOTED),
    _line(_OPEN_QUOTE, "", _QUOTE + r"(?P<text>.*?)(?=\s*(?:\s#.*)?$)", _QUOTED),
    *(_line("`[` is opened in column {column}, and closed by another sign here", "`[` is closed by `]`.",
          r"(?P<text>\[[^][{}]*)(?P<here>\})", mended)
      for mended in (r"\g<text>]\g<here>", r"\g<text>]")),
    *(_line("`{{` is opened in column {column}, and closed by another sign here", "`{` is closed by `}`.",
            r"(?P<text>\{(?:[^][{}]|\{[^][{}]*\})*)(?P<here>\])", mended)
      for mended in (r"\g<text>}\g<here>", r"\g<text>}")),
    _open_bracket,
    _line("a backslash in double quotes begins an escape, and this is none", "In single quotes a backslash stands for "
          "itself.", r'"(?P<text>[^"\\]*)(?P<here>\\)(?P<more>[^"]*)"', r"'\g<text>\\\g<more>'"),
    _line(*_COMMA, r"""(?P<text>[{\[].*?[^,{\[:\s])\s+(?P<here>[\w"'.-]+\s*:)""", r"\g<text>, \g<here>"),
    _line(*_COMMA, r"""(?P<text>[{\[].*?["'\]}])\s+(?P<here>[\w"'{\[])""", r"\g<text>, \g<here>"),
    _line("a quote stands within these quotes", "Put single quotes around a text with double ones.",
          r"""\"(?P<text>[^"']*(?P<here>")[^',]*)\"(?=\s*(?:[,}\]]|$))""", r"'\g<text>'"),
    _line("a second colon stands in this value", "A text with a colon and a space in it needs quotes.",
          _KEY + r"""(?P<text>[^"'{\[\s].*?(?P<here>:)(?:\s.*)?)$""",
          lambda has: has["key"] + '"' + has["text"].rstrip().replace('"', '\\"') + '"'),
    _indented,
    _line("a space is missing after the colon", "", r"^(?P<key>\s*[\w.-]+:)(?P<here>\S)", r"\g<key> \g<here>"),
    _line("this line has no colon", "A line says  key: value", r"^(?P<key>\s*\w[\w.-]*)(?P<here>)\s*(?P<text>.*)$",
          lambda has: f"{has['key']}: {has['text']}".rstrip()),
    _line("a list with `-` cannot begin on the line of its key", "", _KEY + r"(?P<here>-)\s+(?P<text>.*?)\s*$",
          r"\g<key>[\g<text>]"),
    _line("`{here}` closes nothing", "Take it out.", r"(?P<here>[}\]])", "", at_mark=True),
    _line("nothing stands before this comma", "Take it out.", r"(?P<here>,)", "", at_mark=True),
    _line("a value cannot begin with `{here}`", "Put quotes around it.", r"(?P<here>[@`*&%!])(?P<text>[^,\]}\s#]*)",
          r'"\g<here>\g<text>"', at_mark=True),
)
"""In this order: what is left open leads to errors of every other kind further down."""


def explain(error: yaml.MarkedYAMLError, lines: list[str], file: str) -> Diagnostic:
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return Diagnostic(f"this is not YAML: {error.problem}", Location(file))

    def at(line: int, column: int = 0, length: int = 0) -> Position:
        return Position(file, line + 1, column + 1, length, lines[line] if line < len(lines) else "")

    if isinstance(error, TooMuch):
        return Diagnostic(str(error.problem), at(mark.line, mark.column, 1))
    began = error.context_mark or mark
    found = _Found(str(error.problem), (mark.line, mark.column), (began.line, began.column), lines)
    tried = (edit for rule in _RULES for edit in rule(found)) if sum(map(len, lines)) < _TRIED else ()
    most = 20 + 2 * _TRIED // (sum(map(len, lines)) + 1)  # each is read again, as long as the text is
    edit = next((edit for edit in itertools.islice(tried, most) if _reads_on(edit, found)), None)
    if edit is None:
        line, words = min(mark.line, max(len(lines) - 1, 0)), ": ".join(filter(None, [error.context, error.problem]))
        edit = _Edit("YAML cannot read this", f"Its parser says: {words}.", line, mark.column * (line == mark.line), 0,
                     [], began.line)
    where, fixed = at(edit.line, edit.column, 1), [f"    {number} |  {text}"
                                                  for number, text in enumerate(edit.lines, edit.first + 1)]
    above = [at(line) for line in (edit.before,) if line is not None and line < edit.line]
    hint = "\n".join([*filter(None, [edit.cause]), *(["Instead:", *fixed] if fixed else [])])
    return Diagnostic(edit.what, where, hint, (*above, where))


def _reads_on(edit: _Edit, found: _Found) -> bool:
    """Return whether the text can be read beyond the lines that are corrected."""
    end = edit.first + len(edit.lines)
    try:
        yaml.compose("\n".join([*found.lines[: edit.first], *edit.lines, *found.lines[end:]]), Loader=BoundedLoader)
    except yaml.MarkedYAMLError as error:
        mark, began = error.problem_mark or error.context_mark, error.context_mark
        if began and began.line < end and re.search("flow|quoted", error.context or ""):
            return False  # the correction leaves something open
        return mark is not None and mark.line >= end and (error.problem, (mark.line, mark.column)) != (found.problem,
                                                                                                    found.at)
    except yaml.reader.ReaderError:
        return False
    return True
