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
    (re.compile(r"^[-+]?\d[\d_]*$"), lambda text: int(text.replace("_", ""))),
    (re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?$"), lambda text: float(text.replace("_", ""))),
    (re.compile(r"^[-+]?\.inf$"), lambda text: float(text.replace(".", ""))),
)


@dataclass
class Source:
    """A parsed file: `data`, and where each key and value of it stands."""

    file: str
    data: Any = None
    lines: list[str] = field(default_factory=list)
    keys: dict[tuple, Spot] = field(default_factory=dict)
    values: dict[tuple, Spot] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

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
                raise InvalidInput(f"--set {text}: `{'.'.join(path[:depth])}` is not a mapping")
        place[path[-1]] = value
        self.keys[path] = self.values[path] = Spot(f"--set {text}")


def parse_value(text: str) -> Any:
    """One YAML value, as written after the `=` of `--set`."""
    source = parse(text, "--set")
    return source.data


def read(path: Path, shown: str | None = None) -> Source:
    """Parse a file.

    Raises:
        InvalidInput: it cannot be read, is not YAML, or repeats a key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{shown or path}: cannot be read: {error}") from None
    source = parse(text, shown or str(path))
    if not isinstance(source.data, dict):
        raise InvalidInput(f"{source.file}: expected `key: value` lines, found {type(source.data).__name__}")
    return source


def parse(text: str, file: str) -> Source:
    source = Source(file, lines=text.splitlines())
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = _spot(source, mark.line, mark.column, 1) if mark else Spot(file)
        raise InvalidInput(Mistake(f"not valid YAML: {error.problem}", where)) from None
    source.data = _build(source, root, ()) if root else None
    if source.mistakes:
        raise InvalidInput(source.mistakes)
    return source


def _spot(source: Source, line: int, column: int, length: int) -> Spot:
    text = source.lines[line] if line < len(source.lines) else ""
    return Spot(source.file, line + 1, column + 1, length, text)


def _place(source: Source, node: yaml.Node) -> Spot:
    start, end = node.start_mark, node.end_mark
    length = end.column - start.column if end.line == start.line else len(source.lines[start.line]) - start.column
    return _spot(source, start.line, start.column, length)


def _build(source: Source, node: yaml.Node, path: tuple) -> Any:
    source.values[path] = _place(source, node)
    if isinstance(node, yaml.SequenceNode):
        return [_build(source, child, (*path, index)) for index, child in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        return _build_mapping(source, node, path)
    return node.value if node.style in ("'", '"', "|", ">") else _scalar(node.value)


def _build_mapping(source: Source, node: yaml.MappingNode, path: tuple) -> dict:
    result: dict = {}
    for key_node, value_node in node.value:
        key, spot = str(key_node.value), _place(source, key_node)
        if key in result:
            first = source.keys[(*path, key)]
            hint = f"It stands first on line {first.line}. Keep one of them."
            source.mistakes.append(Mistake(f"key `{key}` stands twice", spot, hint, (first, spot)))
            continue
        source.keys[(*path, key)] = spot
        result[key] = _build(source, value_node, (*path, key))
    return result


def _scalar(text: str) -> Any:
    for pattern, convert in _SCALARS:
        if pattern.match(text):
            return convert(text)
    return text
