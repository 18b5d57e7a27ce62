"""docs/events.md lists what runs record."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from harness import ROOT

from distflow.recovery.detectors import STEP_DETECTORS

RECORDS = {"record": "", "events.record": "", "self._record": "events.record(kind", "self._warn": "record(event"}
"""How the source writes an event; methods if their module has the text, by which they pass on their first argument."""
PASSED_ON = {"kind", "event", "detector"}  # names of parameters: an event of the caller, or a detector's


def listed() -> dict[str, set[str]]:
    """By event in the first column of a table of three, the keys in its last."""
    lines = (ROOT / "docs/events.md").read_text().splitlines()
    rows = [line.split("|") for line in lines if line[:3] == "| `" and line.count("|") > 3]
    found = {row[1].strip(" `"): set(re.findall(r"`([^`]+)`", row[-2])) for row in rows}
    assert len(found) == len(rows), "an event is listed twice"
    return found


@functools.cache
def constants(path: Path) -> dict[str, str]:
    """The texts that a module names, in it or in those that it imports names from."""
    found = {}
    for item in ast.parse(path.read_text()).body:
        if isinstance(item, ast.ImportFrom):
            source = ROOT / f"{(item.module or '').replace('.', '/')}.py"
            known = constants(source) if source.exists() else {}
            found |= {name.asname or name.name: known[name.name] for name in item.names if name.name in known}
        elif isinstance(item, ast.Assign):
            for names, values in ((target, item.value) for target in item.targets):
                pairs = zip(names.elts, values.elts, strict=True) if isinstance(names, ast.Tuple) and \
                    isinstance(values, ast.Tuple) else [(names, values)]
                found |= {name.id: value.value for name, value in pairs if isinstance(name, ast.Name)
                          and isinstance(value, ast.Constant) and isinstance(value.value, str)}
    return found


def recorded() -> Iterator[tuple[str, set[str]]]:
    """Yield the events that the source records, each with its keys."""
    for path in (path for folder in ("workers", "distflow") for path in sorted((ROOT / folder).rglob("*.py"))):
        text = path.read_text()
        for call in (item for item in ast.walk(ast.parse(text)) if isinstance(item, ast.Call) and item.args):
            of, kind = ast.unparse(call.func), call.args[0]
            if of not in RECORDS or RECORDS[of] not in text:
                continue
            if isinstance(kind, ast.Constant):
                name = str(kind.value)
            elif (name := constants(path).get(ast.unparse(kind), "")) == "":
                assert ast.unparse(kind) in PASSED_ON, f"{path}:{call.lineno}: name the event by a text or a constant"
                continue
            yield name, {"what"} if of == "self._warn" else {key.arg for key in call.keywords if key.arg}


def test_each_event_of_the_source_is_listed_with_its_keys_and_no_other():
    found: dict[str, set[str]] = {}
    for name, keys in recorded():
        found[name] = found.get(name, set()) | keys
    assert len(found) > 40, "the source records by other calls than this test knows"
    assert listed() == found


def test_the_detectors_that_record_events_are_named():
    page = (ROOT / "docs/events.md").read_text()
    shipped = {name for name, each in STEP_DETECTORS.items() if each.__module__ == "distflow.recovery.detectors"}
    assert {name for name in shipped if f"`{name}`" not in page} == set()
