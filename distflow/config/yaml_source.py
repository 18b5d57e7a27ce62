"""Reads YAML into typed documents, with the location of every value and all mistakes collected; and writes it.

    read, parse    text → YamlSource: plain data, locations of keys and values, mistakes of form
    check          YamlSource → Document, with a Diagnostic for each wrong value; recovers values where it can
    dump           plain data → text that these read as the same

Stricter than YAML 1.1: only true and false are booleans (not yes, on, off), `1e-6` is a number, and duplicate keys are
refused.
"""

from __future__ import annotations

import copy
import math
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from distflow.config.extras import SecretShown
from distflow.config.removed_keys import instead_of
from distflow.config.yaml_syntax import BoundedLoader, explain
from distflow.errors import Diagnostic, InvalidInput, Location, did_you_mean, nearest

_SCALARS = (
    (re.compile(r"^(~|null|)$"), lambda text: None),
    (re.compile(r"^(true|false)$"), lambda text: text == "true"),
    (re.compile(r"^[-+]?\d+(_\d+)*$"), lambda text: int(text.replace("_", ""))),
    (re.compile(r"^[-+]?(\d+(_\d+)*\.?\d*|\.\d+)([eE][-+]?\d+)?$"), lambda text: float(text.replace("_", ""))),
    (re.compile(r"^[-+]?\.inf$"), lambda text: float(text.replace(".", ""))),
)


_LARGEST = 2**64
"""The largest whole number that tensors, files and other programs of a run take."""
_MOST_DIGITS = 1000  # more are not converted, which takes quadratic time
_MOST_BYTES = 4 * 2**20  # of a file of settings, which a person has written


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes text which would be read as another value, such as `1e5`, a text to YAML 1.1."""


for _pattern, _ in _SCALARS:
    _Dumper.add_implicit_resolver("tag:distflow,scalar", _pattern, None)


def dump(data: Any, **layout: Any) -> str:
    """Return plain data as YAML, in the order given; `layout` as of `yaml.dump`. `read` reads it as it was."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, **layout)


@dataclass
class YamlSource:
    """Parsed file: its `data`, the locations of its keys and values by path, and mistakes of form."""

    file: str
    data: Any = None
    lines: list[str] = field(default_factory=list)
    keys: dict[tuple, Location] = field(default_factory=dict)
    values: dict[tuple, Location] = field(default_factory=dict)
    mistakes: list[Diagnostic] = field(default_factory=list)
    recovered: set[tuple] = field(default_factory=set)
    """Paths whose value is a guess, since the one in the file is wrong; later checks should not report them."""

    def location(self, path: tuple, key: bool = False) -> Location:
        """Return the location of `path`, or of the nearest enclosing key."""
        if not key and path in self.values:
            return self.values[path]
        for end in range(len(path), 0, -1):
            if path[:end] in self.keys:
                return self.keys[path[:end]]
        return Location(self.file)

    def override(self, path: tuple[str, ...], value: Any, text: str) -> None:
        mapping = self.data
        for depth, part in enumerate(path[:-1], 1):
            if mapping.get(part) is None:
                mapping[part] = {}
                self.keys[path[:depth]] = self.values[path[:depth]] = Location(f"--set {text}")
            mapping = mapping[part]
            if not isinstance(mapping, dict):
                raise InvalidInput(f"--set {text}: `{'.'.join(path[:depth])}` is not a mapping, so it has no "
                                   f"`{'.'.join(path[depth:])}`")
        mapping[path[-1]] = value
        for locations in (self.keys, self.values):  # what was below it in the file is replaced
            for stale in [known for known in locations if known[: len(path)] == path]:
                del locations[stale]
        self.keys[path] = self.values[path] = Location(f"--set {text}")


def parse_value(text: str, shown: str) -> Any:
    """Return one YAML value, as written after the `=` of `--set`; `shown` names it in messages."""
    try:
        source = parse(text, shown)
        mistakes = source.mistakes
    except InvalidInput as error:
        mistakes = list(error.mistakes)
    if mistakes:
        one_line = ("Instead:\n    1 |", "Instead:")
        raise InvalidInput([Diagnostic(mistake.what, Location(shown), mistake.hint.replace(*one_line))
                            for mistake in mistakes])
    return source.data


def read(path: Path, shown: str | None = None) -> YamlSource:
    """Parse a file; duplicate keys become its `mistakes`. Raises InvalidInput if it cannot be read, or is not YAML."""
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise InvalidInput(f"{shown or path}: {size / 2**20:,.0f} MiB are no file of settings, which has at most "
                               f"{_MOST_BYTES // 2**20} MiB. Is it data or a model? Those are named in a run file:  "
                               "data: {train: FILE}")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{shown or path}: cannot be read: {error}") from None
    source = parse(text, shown or str(path))
    if not isinstance(source.data, dict):
        found = {type(None): "nothing", list: "a list"}.get(type(source.data), repr(source.data))
        raise InvalidInput(f"{source.file}: expected `key: value` lines, found {found}")
    return source


def parse(text: str, file: str) -> YamlSource:
    """Parse a text; `file` names it in messages. Raises InvalidInput if it is not YAML."""
    source = YamlSource(file, lines=text.splitlines())
    try:
        root = yaml.compose(text, Loader=BoundedLoader)
    except yaml.MarkedYAMLError as error:
        raise InvalidInput(explain(error, source.lines, file)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InvalidInput(Diagnostic(f"not valid YAML: character {error.character!r} is not allowed",
                                      Location(file, line))) from None
    source.data = _build(source, root, (), ()) if root else None
    return source


def _location(source: YamlSource, line: int, column: int, length: int) -> Location:
    text = source.lines[line] if line < len(source.lines) else ""
    return Location(source.file, line + 1, column + 1, length, text)


def _node_location(source: YamlSource, node: yaml.Node) -> Location:
    start, end = node.start_mark, node.end_mark
    line = source.lines[start.line] if start.line < len(source.lines) else ""
    length = (end.column if end.line == start.line else len(line)) - start.column
    return _location(source, start.line, start.column, length)


def _build(source: YamlSource, node: yaml.Node, path: tuple, above: tuple[yaml.Node, ...]) -> Any:
    source.values[path] = _node_location(source, node)
    if node in above:
        source.mistakes.append(Diagnostic("an alias (`*name`) stands inside what it stands for", source.values[path]))
        source.recovered.add(path)
        return None
    if isinstance(node, yaml.SequenceNode):
        return [_build(source, child, (*path, index), (*above, node)) for index, child in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        return _build_mapping(source, node, path, (*above, node))
    quoted = isinstance(node, yaml.ScalarNode) and node.style in ("'", '"', "|", ">")
    return node.value if quoted else _number_or_text(source, node.value, path)


def _build_mapping(source: YamlSource, node: yaml.MappingNode, path: tuple, above: tuple[yaml.Node, ...]) -> dict:
    result: dict = {}
    merged: list[yaml.Node] = []
    for key_node, value_node in node.value:
        location = _node_location(source, key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            hint = "Put quotes around a name with braces or brackets:  \"{role}_logprobs\""
            source.mistakes.append(Diagnostic("a key must be one word, not a mapping or a list", location, hint))
            continue
        key = key_node.value
        if key == "<<" and not key_node.style:
            merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            continue
        if key in result:
            first = source.keys[(*path, key)]
            hint = f"It stands first on line {first.line}. Keep one of them."
            source.mistakes.append(Diagnostic(f"key `{key}` stands twice", location, hint, (first, location)))
            source.recovered.add((*path, key))
            continue
        source.keys[(*path, key)] = location
        result[key] = _build(source, value_node, (*path, key), above)
    for other in merged:  # YAML 1.1's merge key: what stands here already stays
        if not isinstance(other, yaml.MappingNode) or other in above:
            hint = "It takes the keys of a mapping that stands before:  <<: *name"
            source.mistakes.append(Diagnostic("`<<` has no mapping to take keys from", _node_location(source, other),
                                              hint))
            continue
        pairs = [pair for pair in other.value
                 if not (isinstance(pair[0], yaml.ScalarNode) and pair[0].value in result)]
        rest = yaml.MappingNode(other.tag, pairs, other.start_mark, other.end_mark)
        result |= _build_mapping(source, rest, path, (*above, other))
    return result


def _number_or_text(source: YamlSource, text: str, path: tuple) -> Any:
    """Return the value of a scalar without quotes; a number too large to compute with becomes a mistake."""
    convert = next((convert for pattern, convert in _SCALARS if pattern.match(text)), None)
    if convert is None:
        return text
    value = convert(text) if len(text) <= _MOST_DIGITS else math.inf
    if isinstance(value, int) and abs(value) > _LARGEST or value in (math.inf, -math.inf) and "inf" not in text:
        hint = "A text of digits stands in quotes:  'DIGITS'"
        what = "this number is too large or too long: whole numbers go to 2^64, others to 1.8e308"
        source.mistakes.append(Diagnostic(what, source.values[path], hint))
        source.recovered.add(path)
        return None
    return value


_KINDS = {"int": "a whole number", "float": "a number", "finite": "a finite number", "bool": "true or false",
          "string": "text", "dict": "a mapping", "list": "a list", "model": "a mapping"}
_PLACEHOLDERS: dict[Any, Any] = {int: 1, float: 1.0, str: ""}
"""Placeholders of required values that are wrong or missing, while other mistakes are looked for."""
_PLACES = 3  # most places that are named for a key
_ROUNDS = 4  # rounds of repairs: wrong values, what is then missing, what is missing below that


class Document(BaseModel):
    """Base of all documents that users write: refuses unknown keys and values of another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


D = TypeVar("D", bound=Document)


def check(kind: type[D], source: YamlSource) -> tuple[D | None, list[Diagnostic]]:
    """Validate a source. Return the document (None if no guess makes it valid) and all mistakes. Wrong values are
    replaced by guesses, in `recovered`, so that later checks go on."""
    data, mistakes = copy.deepcopy(source.data), list(source.mistakes)
    for round_ in range(_ROUNDS):
        try:
            return kind.model_validate(data), mistakes
        except ValidationError as error:
            problems = error.errors()
        if round_ == 0:
            mistakes += [_mistake(kind, source, item) for item in problems
                         if item["loc"] not in source.recovered and not _is_misspelt(kind, problems, item)]
        source.recovered.update(item["loc"] for item in problems)
        for item in reversed(problems):  # from the end, so that indices of list items still to be dropped stay right
            _repair(kind, data, item)
    return None, mistakes


def _is_misspelt(kind: type[Document], problems: list[Any], item: Any) -> bool:
    return item["type"] == "missing" and any(
        other["type"] == "extra_forbidden" and other["loc"][:-1] == item["loc"][:-1]
        and nearest(other["loc"][-1], _fields_at(kind, other["loc"][:-1])) == item["loc"][-1] for other in problems)


def _repair(kind: type[Document], data: Any, item: Any) -> None:
    path = item["loc"]
    parent = _at(data, path[:-1])
    if not path or not isinstance(parent, dict | list):
        return
    if item["type"] == "missing":
        _fill(kind, parent, path)
    elif item["type"] == "literal_error":
        meant = nearest(str(item["input"]), _choices(item))
        parent[path[-1]] = meant
        if meant is None:
            del parent[path[-1]]
    elif item["type"] == "list_type" and isinstance(item["input"], str):
        parent[path[-1]] = [item["input"]]
    elif isinstance(parent, list):
        del parent[path[-1]]
    else:
        value = parent.pop(path[-1], None)
        unknown = item["type"] == "extra_forbidden" and instead_of(path) is None
        meant = nearest(path[-1], _fields_at(kind, path[:-1])) if unknown else None
        if meant:
            parent.setdefault(meant, value)


def _fill(kind: type[Document], parent: Any, path: tuple) -> None:
    expected = _kind_at(kind, path)
    if _is_document(expected):
        parent.setdefault(path[-1], {})
    elif typing.get_origin(expected) is typing.Literal:
        parent.setdefault(path[-1], typing.get_args(expected)[0])
    elif (value := _placeholder(expected)) is not None:
        parent.setdefault(path[-1], value)


def _placeholder(expected: Any) -> Any:
    """Return a value of a plain type, or a mapping with one; None for other types."""
    arguments = typing.get_args(expected)
    if typing.get_origin(expected) is dict:
        return {"": _placeholder(arguments[1])}
    return _PLACEHOLDERS.get(arguments[0] if typing.get_origin(expected) is typing.Annotated else expected)


def _at(data: Any, path: tuple) -> Any:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


_OPTIONS = {"name": "--name NAME", "dag": "DAG", "cluster": "--cluster FILE", "profile": "--profile FIRST:LAST"}
"""What is said when a run starts, and not in its file."""


def _mistake(kind: type[Document], source: YamlSource, item: Any) -> Diagnostic:
    path = tuple(item["loc"])
    name = ".".join(str(part) for part in path)
    where = source.location(path)
    if item["type"] == "extra_forbidden":
        fields = _fields_at(kind, path[:-1])
        name, colon, value = str(path[-1]).partition(":")
        if colon and name in fields:
            return Diagnostic("a space is missing after the colon", source.location(path, key=True),
                              f"Instead:  {name}: {value}")
        hint = did_you_mean(path[-1], fields)
        if instead := instead_of(path):
            hint = f"It was removed. {instead}"
        elif len(path) == 1 and path[0] in _OPTIONS and "steps" in fields:
            hint = f"It is an option of the command:  distflow run … {_OPTIONS[path[0]]}"
        elif nearest(path[-1], fields) is None and (places := _places_of(kind, path[-1])):
            hint = f"It is a key of {' and of '.join(f'`{place}`' for place in places[:_PLACES])}. {hint}"
        return Diagnostic(f"unknown key `{path[-1]}`", source.location(path, key=True), hint)
    if item["type"] == "missing":
        return Diagnostic(f"`{name}` is missing", source.location(path[:-1], key=True), f"Add `{path[-1]}:` here.")
    if item["type"] in ("value_error", "assertion_error"):
        error = item["ctx"]["error"]
        where = None if isinstance(error, SecretShown) else where
        return Diagnostic(f"`{name}`: {error}" if name else str(error), where)
    if item["type"] in ("too_short", "too_long"):
        bound = item["ctx"].get("min_length", item["ctx"].get("max_length"))
        side = "at least" if item["type"] == "too_short" else "at most"
        return Diagnostic(f"`{name}` must have {side} {bound} item{'s' * (bound != 1)}", where)
    meant = nearest(str(item["input"]), _choices(item)) if item["type"] == "literal_error" else None
    hint = f"Did you mean `{meant}`?" if meant else _default_hint(kind, path)
    if item["type"] in ("model_type", "dict_type") and (keys := _fields_at(kind, path)):
        hint = f"Its keys: {', '.join(keys)}."
    if item["type"] == "list_type" and isinstance(item["input"], str):
        hint = f"Instead:  {path[-1]}: [{item['input'].removesuffix('.py')}]"
    return Diagnostic(f"`{name}` must be {_expected(item)}, not {_shown(item['input'])}", where, hint)


def _places_of(kind: Any, key: str, path: str = "") -> list[str]:
    """Return the documents below one that have a key, as `roles.NAME`."""
    if not _is_document(kind):
        return []
    found = [path] if path and key in _fields_at(kind, ()) else []
    for name, value in kind.model_fields.items():
        inner, below = _strip_optional(value.annotation), f"{path}.{value.alias or name}".removeprefix(".")
        if typing.get_origin(inner) is dict:
            inner, below = _strip_optional(typing.get_args(inner)[1]), f"{below}.NAME"
        found += _places_of(inner, key, below)
    return found


def _default_hint(kind: type[Document], path: tuple) -> str:
    """Return a hint with the default of a setting, if that is one number or word."""
    above = _kind_at(kind, path[:-1])
    fields = above.model_fields.items() if _is_document(above) else ()
    default = next((field.default for name, field in fields if (field.alias or name) == path[-1]), None)
    return f"Its default is {_shown(default)}." if isinstance(default, bool | int | float | str) else ""


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return "empty" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _choices(item: Any) -> list[str]:
    return re.findall(r"'([^']*)'", item["ctx"]["expected"])


def _expected(item: Any) -> str:
    if item["type"] == "literal_error":
        return f"one of {item['ctx']['expected']}"
    if item["type"].startswith(("greater_than", "less_than")):
        bound = item["msg"].removeprefix("Input should be ")
        return bound.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    stem = item["type"].split("_")[0]
    return _KINDS.get(stem) or str(item["msg"]).removeprefix("Input should be ")


def _fields_at(kind: Any, path: tuple) -> list[str]:
    kind = _kind_at(kind, path)
    return [field.alias or name for name, field in kind.model_fields.items()] if _is_document(kind) else []


def _kind_at(kind: Any, path: tuple) -> Any:
    for part in path:
        kind = _inner(kind, part)
    return kind


def type_at(kind: type[Document], path: tuple[str, ...]) -> tuple[Any, bool]:
    """Return the type of a key's value, None for what is no key, and whether the value may be null."""
    above = _kind_at(kind, path[:-1])
    fields = above.model_fields.items() if _is_document(above) else ()
    annotation = next((field.annotation for name, field in fields if path[-1] in (name, field.alias)), None)
    return _kind_at(kind, path), type(None) in typing.get_args(annotation)


def _inner(kind: Any, part: Any) -> Any:
    if _is_document(kind):
        for name, field in kind.model_fields.items():
            if part == (field.alias or name):
                return _strip_optional(field.annotation)
        return None
    arguments = typing.get_args(kind)
    return _strip_optional(arguments[-1]) if arguments else None


def _strip_optional(kind: Any) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next((arg for arg in typing.get_args(kind) if arg is not type(None)), None)
    return kind


def _is_document(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Document)
