"""Words that the field's words have replaced stay away from names, file names and docstrings."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator

import pytest
from harness import ROOT

RETIRED = {
    "alarm", "anew", "arrivals", "attic", "beat", "berth", "board", "census", "companions", "controller", "crew",
    "debts",
    "desk", "door", "doubtful", "era", "flaw", "foretell", "glance", "leavable", "lingering", "lingers", "listener",
    "needless", "nursery", "obeyed", "overtaken", "owes", "parcel", "presence", "pulse", "seat", "shelf", "supplier",
    "tasklet", "unlikeliness", "vain", "warehouse", "watcher", "watchman", "whereabouts"}
ALLOWED = {"distflow/__init__.py": {"controller"}, "distflow/dock/selection.py": {"warehouses"},
           "planners/transfers.py": {"warehouses"}, "workers/endpoint/http_server.py": {"lingering"}}
"""Words of papers, where these are spoken of, and of aiohttp."""
MESSAGES = {
    "--board", "begun rows lost", "distflow board", "neighbour lost", "neighbour/seconds", "orphans left",
    "rows divided", "rows taken back", "rows taken over", "worker rests", "worker useful"}
"""Events and messages that others have replaced."""
READ_STILL = {"distflow/telemetry/run_reader.py": {"worker rests", "worker useful"}}
"""Those of them that a module knows, since the folders of older runs have them."""


parsed = functools.cache(ast.parse)


def words_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield the words of all names and docstrings of a source, in lower case, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", token.string)
            yield from ((token.start[0], word) for word in spaced.lower().split("_") if word)
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from ((node.lineno, word.lower()) for word in re.findall(r"[A-Za-z]+", node.value.value))


def found(text: str, retired: set[str]) -> list[str]:
    both = retired | {f"{word}s" for word in retired}
    if both.isdisjoint(word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", text)):
        return []  # most files, which need not be read by the token
    return [f"line {line}: {word}" for line, word in words_of(text) if word in both]


FILES = [file for top in ("distflow", "planners", "workers") for file in sorted((ROOT / top).rglob("*.py"))]


def test_retired_words_stay_away():
    wrong = {str(file.relative_to(ROOT)): found(file.read_text(), RETIRED) for file in FILES}
    assert {name: lines for name, lines in wrong.items() if lines and not (
        {line.partition(": ")[2] for line in lines} <= ALLOWED.get(name, set()))} == {}
    assert [file.name for file in FILES if set(file.stem.split("_")) & RETIRED] == []


def test_retired_messages_stay_away():
    wrong = {f"{file.relative_to(ROOT)}:{node.lineno}: {text}" for file in FILES
             for node in ast.walk(parsed(file.read_text()))
             if isinstance(node, ast.Constant) and isinstance(node.value, str)
             for text in MESSAGES if text in node.value
             and text not in READ_STILL.get(str(file.relative_to(ROOT)), ())}
    assert wrong == set()


@pytest.mark.parametrize("text", ["class SeatOf: pass", '"""A Seat\'s end."""', "x.seats"])
def test_a_retired_word_is_found(text):
    assert found(text, {"seat"})
