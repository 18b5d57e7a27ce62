"""YAML with every value's place kept, so that a mistake found later can point at its line.

Stricter than YAML 1.1: only true and false are booleans (not yes, on, off), `1e-6` is a number, and a key that
stands twice is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from distflow.schema.errors import InvalidInput, Mistake, Spot

_SCALARS = (
    (re.compile(r"^(~|null|)$"), lambda text: None),
    (re.compile(r"^(true|false)$"), lambda text: text == "true"),
    (re.compile(r"^[-+]?\d+(_\d+)*$"), lambda text: int(text.replace("_", ""))),
    (re.compile(r"^[-+]?(\d+(_\d+)*\.?\d*|\.\d+)([eE][-+]?\d+)?$"), lambda text: float(text.replace("_", ""))),
    (re.compile(r"^[-+]?\.inf$"), lambda text: float(text.replace(".", ""))),
)


@dataclass
class Source:
    """A parsed file: `data`, where each key and value of it stands, and what is wrong with its form."""

    file: str
    data: Any = None
    lines: list[str] = field(default_factory=list)
    keys: dict[tuple, Spot] = field(default_factory=dict)
    values: dict[tuple, Spot] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    doubtful: set[tuple] = field(default_factory=set)
    """Paths whose value is a guess, since what stands there is wrong; no mistake should be built on them."""

    def spot(self, path: tuple, key: bool = False) -> Spot:
        """Where `path` stands; the nearest enclosing key if it does not stand in the file."""
        if not key and path in self.values:
            return self.values[path]
        for end in range(len(path), 0, -1):
            if path[:end] in self.keys:
                return self.keys[path[:end]]
        return Spot(self.file)

    def override(self, path: tuple[str, ...], value: Any, text: str) -> None:
        """Set one value as `--set` does; mistakes about it then point at the command line."""
        place = self.data
        for depth, part in enumerate(path[:-1], 1):
            if place.get(part) is None:
                place[part] = {}
            place = place[part]
            if not isinstance(place, dict):
                raise InvalidInput(f"--set {text}: `{'.'.join(path[:depth])}` is not a mapping, so it has no "
                                   f"`{'.'.join(path[depth:])}`")
        place[path[-1]] = value
        for spots in (self.keys, self.values):  # what stood below it in the file is gone
            for stale in [known for known in spots if known[: len(path)] == path]:
                del spots[stale]
        self.keys[path] = self.values[path] = Spot(f"--set {text}")


def parse_value(text: str, shown: str) -> Any:
    """One YAML value, as written after the `=` of `--set`; `shown` is what messages call it.

    Raises:
        InvalidInput: it is not YAML.
    """
    try:
        source = parse(text, shown)
        mistakes = source.mistakes
    except InvalidInput as error:
        mistakes = list(error.mistakes)
    if mistakes:
        raise InvalidInput([Mistake(mistake.what, Spot(shown), mistake.hint) for mistake in mistakes])
    return source.data


def read(path: Path, shown: str | None = None) -> Source:
    """Parse a file. A key that stands twice is noted in the source's `mistakes`, and its first value taken.

    Raises:
        InvalidInput: it cannot be read, or is not YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{shown or path}: cannot be read: {error}") from None
    source = parse(text, shown or str(path))
    if not isinstance(source.data, dict):
        found = {type(None): "nothing", list: "a list"}.get(type(source.data), repr(source.data))
        raise InvalidInput(f"{source.file}: expected `key: value` lines, found {found}")
    return source


def parse(text: str, file: str) -> Source:
    """Parse a text that `file` holds.

    Raises:
        InvalidInput: it is not YAML.
    """
    source = Source(file, lines=text.splitlines())
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise InvalidInput(_syntax_mistake(source, error)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InvalidInput(Mistake(f"not valid YAML: character {error.character!r} is not allowed",
                                   Spot(file, line))) from None
    source.data = _build(source, root, (), ()) if root else None
    return source


def _syntax_mistake(source: Source, error: yaml.MarkedYAMLError) -> Mistake:
    mark, began = error.problem_mark or error.context_mark, error.context_mark
    if mark is None:
        return Mistake(f"not valid YAML: {error.problem}", Spot(source.file))
    where = _spot(source, mark.line, mark.column, 1)
    lines = (where,)
    if began and began.line != mark.line:  # a bracket that is never closed is noticed lines later
        lines = (_spot(source, began.line, began.column, 1), where)
    hint = "Indent with spaces." if "\\t" in str(error.problem) else ""
    what = f"not valid YAML: {f'{error.context}: ' if error.context else ''}{error.problem}"
    return Mistake(what, where, hint, tuple(spot for spot in lines if spot.text))


def _spot(source: Source, line: int, column: int, length: int) -> Spot:
    text = source.lines[line] if line < len(source.lines) else ""
    return Spot(source.file, line + 1, column + 1, length, text)


def _place(source: Source, node: yaml.Node) -> Spot:
    start, end = node.start_mark, node.end_mark
    line = source.lines[start.line] if start.line < len(source.lines) else ""
    length = (end.column if end.line == start.line else len(line)) - start.column
    return _spot(source, start.line, start.column, length)


def _build(source: Source, node: yaml.Node, path: tuple, above: tuple[yaml.Node, ...]) -> Any:
    source.values[path] = _place(source, node)
    if node in above:
        source.mistakes.append(Mistake("an alias (`*name`) stands inside what it stands for", source.values[path]))
        source.doubtful.add(path)
        return None
    if isinstance(node, yaml.SequenceNode):
        return [_build(source, child, (*path, index), (*above, node)) for index, child in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        return _build_mapping(source, node, path, (*above, node))
    return node.value if node.style in ("'", '"', "|", ">") else _scalar(node.value)


def _build_mapping(source: Source, node: yaml.MappingNode, path: tuple, above: tuple[yaml.Node, ...]) -> dict:
    result: dict = {}
    for key_node, value_node in node.value:
        spot = _place(source, key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            hint = "Put quotes around a name with braces or brackets:  \"{role}_logprobs\""
            source.mistakes.append(Mistake("a key must be one word, not a mapping or a list", spot, hint))
            continue
        key = key_node.value
        if key in result:
            first = source.keys[(*path, key)]
            hint = f"It stands first on line {first.line}. Keep one of them."
            source.mistakes.append(Mistake(f"key `{key}` stands twice", spot, hint, (first, spot)))
            source.doubtful.add((*path, key))
            continue
        source.keys[(*path, key)] = spot
        result[key] = _build(source, value_node, (*path, key), above)
    return result


def _scalar(text: str) -> Any:
    for pattern, convert in _SCALARS:
        if pattern.match(text):
            return convert(text)
    return text
