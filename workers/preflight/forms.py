"""Completions that a reward's regular expression matches, made from the expression and from texts for its open places.

    completions_of   yields some; each place that may hold one of the texts, such as `.*` or `[0-9]+`, gets it in turn
    is_open          whether what was made says nothing: the expression looks around, or refers to its own groups
"""

from __future__ import annotations

import contextlib
import importlib
import re
import string
from collections.abc import Iterator, Sequence
from typing import Any

_PARSER: Any = None
_COMPILER: Any = None
with contextlib.suppress(ImportError):  # they are Python's own, and a later one may not have them
    _PARSER, _COMPILER = (importlib.import_module(f"re.{name}") for name in ("_parser", "_compiler"))
_MOST = 300  # completions that are made, and their least characters
_REPEATS = {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}
_AROUND = {"ASSERT", "ASSERT_NOT", "GROUPREF", "GROUPREF_EXISTS"}


def completions_of(pattern: str, texts: Sequence[str]) -> Iterator[str]:
    """Yield completions that a pattern matches as a whole, without repetition."""
    tree, made, fits = _PARSER.parse(pattern, re.DOTALL), set[str](), dict[int, str]()
    places = len(_written(tree, "", -1, fits)[1])
    for text in texts:
        for only in (None, *range(places)):
            completion = _written(tree, text, only, fits)[0]
            if len(made) < _MOST and completion not in made and re.fullmatch(pattern, completion, re.DOTALL):
                made.add(completion)
                yield completion


def is_open(pattern: str) -> bool:
    """Return whether a pattern has parts that `completions_of` does not understand, or is longer than these.
    Without Python's parser it understands none."""
    if _PARSER is None:
        return True
    tree = _PARSER.parse(pattern)
    return tree.getwidth()[0] > _MOST or any(kind in _AROUND for kind in _kinds(tree))


def _kinds(tree: Any) -> Iterator[str]:
    for kind, value in tree:
        yield str(kind)
        nested = [value] if isinstance(value, _PARSER.SubPattern) else value if isinstance(value, (list, tuple)) else []
        for part in (each for some in nested for each in (some if isinstance(some, list) else [some])):
            if isinstance(part, _PARSER.SubPattern):
                yield from _kinds(part)


def _written(tree: Any, text: str, only: int | None, fits: dict[int, str]) -> tuple[str, list[int]]:
    """Return a text of the form of a tree, and the places in it that may be longer. Place `only` gets `text` if it can
    hold it, or each place if it is None. `fits` keeps which character each node holds, by its id."""
    places, parts = list[int](), list[str]()

    def write(tree: Any) -> None:
        for node in tree:
            kind, value = str(node[0]), node[1]
            is_open = kind in _REPEATS or kind == "BRANCH"
            if is_open:
                places.append(len(places))
            if is_open and only in (None, places[-1]) and _holds(tree.state, node, text):
                parts.append(text)
            elif kind in _REPEATS:
                for _ in range(min(value[0], _MOST)):
                    write(value[2])
            elif kind == "BRANCH":
                write(value[1][0])
            elif kind in ("SUBPATTERN", "ATOMIC_GROUP"):
                write(value[-1] if kind == "SUBPATTERN" else value)
            elif kind not in ("AT", *_AROUND):
                if id(node) not in fits:
                    fits[id(node)] = chr(value) if kind == "LITERAL" else \
                        next((each for each in string.printable if _holds(tree.state, node, each)), "")
                parts.append(fits[id(node)])

    write(tree)
    return "".join(parts), places


def _holds(state: Any, node: Any, text: str) -> bool:
    part = _PARSER.SubPattern(state, [node])
    try:
        return _COMPILER.compile(part, re.DOTALL).fullmatch(text) is not None
    except (re.error, ValueError, IndexError):  # it refers to a group outside of it
        return False
