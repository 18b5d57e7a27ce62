"""Text on screens: no terminal obeys what a model has written, and none is needed that shows more than ASCII."""

from __future__ import annotations

import io
import json
import sys

import pytest
from rich.text import Text

from distflow.cli import main
from distflow.telemetry import events, screen
from distflow.telemetry.progress import Terminal

HOSTILE = "a\x1b]0;title\x07b\x1b[2J\x1b]8;;http://x\x1b\\c\rd\x08e\x9b31mf\u202eg\u2066h\u2028i\x7fj\x00k\ud83d"
ALLOWED = "grüße 日本 \U0001f468\u200d\U0001f469 שלום\n\tx"


def obeyed(text: str) -> set[str]:
    return {letter for letter in text if letter != "\n" and letter != "\t" and screen._CONTROL.match(letter)}


def test_printable_text_has_no_control_characters():
    found = screen.printable(HOSTILE)
    assert not obeyed(found)
    assert found.startswith(r"a\x1b]0;title\x07b\x1b[2J")
    assert r"\rd\x08e\x9b31mf\u202eg\u2066h\u2028i\x7fj\x00k\ud83d" in found
    assert screen.printable(ALLOWED) == ALLOWED


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "launch.json").write_text('{"search": [], "torchrun": ""}')
    failure = {"event": "failure", "group": "trainer", "ranks": [0, 0], "attempt": 0, "failed_step": 2, "phase": "x",
               "what": HOSTILE, "verdict": "starts again", "seen_after": 0.5, "details": HOSTILE}
    lines = [{"time": 1000.0, "step": 1, "rank": 0, **failure}]
    metrics = [{"step": step, "seconds": 1.0, "reward/mean": 0.9 if step < 20 else 0.1} for step in range(1, 40)]
    samples = [{"step": step, "questions": HOSTILE, "completions": HOSTILE, "rewards": 0.1} for step in (3, 30)]
    for name, rows in (("events", lines), ("metrics", metrics), ("samples", samples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


VERBS = [["why"], ["faults"], ["watch"], ["report", "--trace"]]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[-1])
def test_verbs_print_no_control_characters(run, verb, capsys):
    main([*verb, str(run)])
    said = capsys.readouterr()
    assert not obeyed(said.out + said.err)
    assert r"a\x1b" in said.out or "--trace" in verb


def test_mistakes_and_notes_print_no_control_characters(tmp_path, capsys):
    (tmp_path / "hostile.yaml").write_text('steps: "\\e[2J"\n')
    assert main(["validate", "grpo", "--run", str(tmp_path / "hostile.yaml")]) == 2
    assert main([HOSTILE]) == 2
    events.show(HOSTILE)
    said = capsys.readouterr()
    assert not obeyed(said.out + said.err)


def test_a_page_on_a_terminal_has_only_its_own_control_characters(monkeypatch):
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Screen()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    with screen.guarded():
        Terminal().print(Text("one\x1b]0;title\x07", style="bold"))
        Terminal().print("a run that is called [/red]", highlight=False)
    assert "\x1b[1m" in stream.getvalue()
    assert "[/red]" in stream.getvalue()
    assert "\x1b]" not in stream.getvalue()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_screens_with_few_characters_end_nothing(run, monkeypatch, encoding):
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    events.show("loading …  日")
    for arguments in (*([*verb, str(run)] for verb in VERBS), ["nodes"], ["engines"], ["schema", "dag"],
                      ["validate", "grpo"], ["plan", "grpo"], ["validate", "…"]):
        assert main(arguments) in (0, 2), arguments
    for stream in streams:
        stream.flush()
    said = streams[0].buffer.getvalue().decode(encoding)
    assert said.startswith("loading …  日" if encoding == "utf-8" else r"loading ...  \u65e5")
    assert "Traceback" not in streams[1].buffer.getvalue().decode(encoding)
