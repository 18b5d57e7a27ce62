"""Plain lines in a file or a pipe, a bar on a terminal."""

import os
import pty
import re
import subprocess
import sys

import pytest
from harness import ROOT

from distflow.telemetry.progress import StepProgress, _clock

CODE = """
from distflow.telemetry.progress import StepProgress
progress = StepProgress("grpo", 3, 1)
progress.step({"reward/mean": 0.25, "loss": -0.5, "tokens_per_second": 12345.6, "unknown": 1.0})
progress.say("[saved] step 2")
"""


def test_plain_lines(capsys):
    progress = StepProgress("grpo", 4, 1)
    progress.say("[bold] stays as it is")
    progress.step({"reward/mean": 0.25, "loss": -0.5, "response/length": 7.04, "tokens_per_second": 12345.6})
    progress.step({"reward/mean": 1.9516e31, "loss": float("nan")})
    progress.close()
    said, first, second = capsys.readouterr().out.splitlines()
    assert said == "[bold] stays as it is"
    assert re.fullmatch(r"grpo  step 2/4  reward 0\.250  loss -0\.5000  length 7\.0  tok/s 12,346  left 0:00", first)
    assert re.fullmatch(r"grpo  step 3/4  reward 1\.95e\+31  loss \+?nan  left 0:00", second)


def test_a_long_run_has_a_line_each_tenth_step(capsys, monkeypatch):
    progress = StepProgress("grpo", 240, 200)
    for step in range(201, 241):
        if step == 227:
            monkeypatch.setattr(progress, "shown", progress.shown - 11)  # as if it had been silent for so many seconds
        progress.step({"loss": 0.5})
    shown = [int(line.split()[2].partition("/")[0]) for line in capsys.readouterr().out.splitlines()]
    assert shown == [201, 210, 220, 227, 230, 240]


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_step_count_is_whole_however_narrow_the_terminal(columns):
    code = """
from distflow.telemetry.progress import StepProgress
progress = StepProgress("reinforce_pp", 1500, 1398)
progress.step({"reward/mean": 0.25, "loss": -0.5, "response/length": 1014.6, "tokens_per_second": 12345.6})
progress.close()
"""
    shown = _shown(code, columns, 0)
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).strip().splitlines()[-1]
    assert "1399/1500" in last
    assert "reward 0.250" in last
    assert ("tok/s 12,346" in last) == (columns == 200)
    assert "…" not in last
    assert len(last.rpartition("\r")[2]) <= columns


@pytest.mark.parametrize(("ending", "code"), [("progress.close()", 0), ("raise SystemExit(3)", 3)])
def test_a_bar_on_a_terminal(ending, code):
    """It gives the cursor back at the end, after a failure too."""
    shown = _shown(CODE + ending, 100, code)
    assert "2/3" in shown
    assert "reward 0.250  loss -0.5000  tok/s 12,346" in shown
    assert "[saved] step 2" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def _shown(code: str, columns: int, expected: int) -> str:
    """What a program writes to a terminal."""
    terminal, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = _all_of(terminal)
    assert process.wait() == expected, shown
    return shown


def _all_of(terminal: int) -> str:
    """What is written until the other side is closed."""
    parts = []
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # how Linux says that no process has the terminal open any more
            part = b""
        if not part:
            os.close(terminal)
            return b"".join(parts).decode()
        parts.append(part)


def test_an_outage_does_not_count_for_the_time_left(capsys, monkeypatch):
    """One step of eight waits for ten minutes; after it the time left is what it was before."""
    clock = [0.0]
    monkeypatch.setattr("distflow.telemetry.progress.time.monotonic", lambda: clock[0])
    progress = StepProgress("grpo", 100, 0)
    clock[0] = 300.0  # what comes before the first step does not count either
    for seconds in (2.0, 2.0, 2.0, 600.0, 2.0, 2.0, 2.0, 2.0):
        clock[0] += seconds
        progress.step({"seconds": seconds})
        clock[0] += 1.0  # a validation, which does
    left = [line.rpartition("left ")[2] for line in capsys.readouterr().out.splitlines()]
    assert left[0] == "3:18"
    assert left[1:] == [_clock(3.0 * (100 - done)) for done in range(2, 9)]
