"""Words that the field's words have replaced stay away from names, file names and docstrings."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest
from harness import ROOT

EVERYWHERE = {
    "alarm", "arrivals", "attic", "beat", "berth", "board", "census", "companions", "crew", "debts", "desk",
    "door", "era", "flaw", "glance", "leavable", "lingering", "lingers", "listener", "needless", "nursery",
    "obeyed", "overtaken", "parcel", "presence", "shelf", "supplier", "tasklet", "unlikeliness", "vain",
    "watcher", "watchman", "whereabouts"}
"""Words of the first design that name nothing any more in all that has moved."""
RETIRED: dict[str, set[str]] = {
    "distflow/rpc": {
        "anew", "apart", "board", "controller", "doubtful", "foretell", "life", "neighbour", "nobody", "owes",
        "pulse", "seat", "warehouse"},
    "distflow/dock": {
        "anew", "apart", "board", "controller", "doubtful", "foretell", "life", "neighbour", "nobody", "owes",
        "pulse", "seat"},
    "distflow/data": {
        "anew", "apart", "board", "controller", "doubtful", "foretell", "life", "lives", "neighbour", "nobody",
        "pulse", "seat", "warehouse"},
    "distflow/weights": {
        "anew", "apart", "board", "controller", "doubtful", "foretell", "life", "neighbour", "nobody", "owes",
        "pulse", "seat", "warehouse"},
    "distflow/recovery": {
        "anew", "apart", "doubtful", "foretell", "neighbour", "nobody", "owes", "pulse", "seat", "warehouse"},
    "distflow/telemetry": {
        "controller", "doubtful", "foretell", "neighbour", "owes", "warehouse"},
    "distflow/config": {
        "anew", "controller", "doubtful", "foretell", "life", "lives", "nobody", "owes", "pulse", "seat",
        "warehouse"},
    "distflow/contracts": {
        "anew", "apart", "board", "controller", "doubtful", "foretell", "life", "lives", "neighbour", "nobody",
        "owes", "pulse", "seat", "warehouse"},
    "distflow/cli": {
        "anew", "apart", "controller", "doubtful", "foretell", "life", "lives", "nobody", "owes", "pulse", "seat"},
    "distflow/plan.py": {
        "anew", "board", "controller", "doubtful", "foretell", "life", "lives", "nobody", "owes", "pulse", "seat",
        "warehouse"},
    "planners": {
        "anew", "board", "foretell", "life", "lives", "neighbour", "nobody", "owes", "pulse", "seat"},
    "workers/engines": {
        "anew", "board", "controller", "doubtful", "foretell", "life", "lives", "neighbour", "owes", "pulse", "seat",
        "warehouse"},
    "workers/isolation": {
        "anew", "apart", "board", "controller", "doubtful", "foretell", "life", "neighbour", "owes", "pulse", "seat",
        "warehouse"},
    "workers/functions": {
        "anew", "board", "controller", "doubtful", "life", "lives", "neighbour", "nobody", "owes", "pulse", "seat",
        "warehouse"},
    "distflow/launch.py": {"anew", "foretell", "nobody", "owes", "pulse", "seat", "warehouse"},
    **{f"workers/{name}.py": {"anew", "controller", "doubtful", "foretell", "owes", "pulse", "seat", "warehouse"}
       for name in ("colocated", "context", "elastic", "encode", "execution", "fusion", "loop", "loopback", "probe",
                    "roles", "rollout", "rollout_channel", "sink", "sources", "train_context", "train_state",
                    "validation", "weight_sync", "worker")},
}
"""Package or module: its retired words beside those."""

MESSAGES = {
    "--board", "begun rows lost", "distflow board", "neighbour lost", "neighbour/seconds", "orphans left",
    "rows divided", "rows taken back", "rows taken over", "worker rests", "worker useful"}
"""Events and messages that others have replaced."""
READ_STILL = {"distflow/telemetry/run_reader.py": {"worker rests", "worker useful"}}
"""Those of them that a module knows, since the folders of older runs have them."""


def words_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield the words of all names and docstrings of a source, in lower case, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", token.string)
            yield from ((token.start[0], word) for word in spaced.lower().split("_") if word)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from ((node.lineno, word.lower()) for word in re.findall(r"[A-Za-z]+", node.value.value))


def found(text: str, retired: set[str]) -> list[str]:
    both = retired | {f"{word}s" for word in retired}
    return [f"line {line}: {word}" for line, word in words_of(text) if word in both]


@pytest.mark.parametrize("package", RETIRED)
def test_retired_words_stay_away(package: str) -> None:
    folder = ROOT / package
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]
    assert files
    retired = RETIRED[package] | EVERYWHERE
    assert {str(file.relative_to(ROOT)): wrong for file in files if (wrong := found(file.read_text(), retired))} == {}
    assert [file.name for file in files if set(file.stem.split("_")) & retired] == []


def test_retired_messages_stay_away() -> None:
    files = [file for top in ("distflow", "planners", "workers") for file in (ROOT / top).rglob("*.py")]
    wrong = {f"{file.relative_to(ROOT)}:{node.lineno}: {text}" for file in files
             for node in ast.walk(ast.parse(file.read_text()))
             if isinstance(node, ast.Constant) and isinstance(node.value, str)
             for text in MESSAGES if text in node.value
             and text not in READ_STILL.get(str(file.relative_to(ROOT)), ())}
    assert files
    assert wrong == set()


@pytest.mark.parametrize("text", ["seat = 1", "def a_seat(): pass", "class SeatOf: pass", '"""A Seat\'s end."""',
                                  "x.seats"])
def test_a_retired_word_is_found(text: str) -> None:
    assert found(text, {"seat"})


@pytest.mark.parametrize("text", ["seating = 1", "# a seat", "x = 'seat'", "unseated = 2"])
def test_other_words_are_not(text: str) -> None:
    assert not found(text, {"seat"})
