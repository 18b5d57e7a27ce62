"""Events of several ranks in one file."""

import json
import subprocess
import sys

from harness import ROOT

from distflow.telemetry.events import Events


def test_a_line_for_each_event(tmp_path):
    events = Events()
    events.record("before the run")
    events.open(tmp_path / "events.jsonl", 2)
    events.step = 5
    events.record("lost", rows=[1, 2], reason="x" * 90_000, odd="\ud800")
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert (event["step"], event["rank"], event["event"], event["rows"]) == (5, 2, "lost", [1, 2])
    assert len(event["reason"]) == 12_000
    assert event["odd"] == "\ud800"


def test_lines_of_several_processes_do_not_mix(tmp_path):
    script = ("import sys; from pathlib import Path; from distflow.telemetry.events import Events\n"
              "events = Events(); events.open(Path(sys.argv[1]), int(sys.argv[2]))\n"
              "for number in range(200): events.record('counted', number=number, filler='x' * 2000)")
    running = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "events.jsonl"), str(rank)], cwd=ROOT)
               for rank in range(3)]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    for rank in range(3):
        assert [event["number"] for event in events if event["rank"] == rank] == list(range(200))
