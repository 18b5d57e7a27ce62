"""Plain lines in a file or a pipe, a bar on a terminal."""

import os
import pty
import re
import subprocess
import sys

import pytest
from harness import ROOT

from distflow.observe.progress import StepProgress, _clock

CODE = """
from distflow.observe.progress import StepProgress
progress = StepProgress("grpo", 3, 1)
progress.step({"reward/mean": 0.25, "loss": -0.5, "tokens_per_second": 12345.6, "unknown": 1.0})
progress.say("[saved] step 2")
"""


def test_plain_lines(capsys):
    progress = StepProgress("grpo", 4, 1)
    progress.say("[bold] stays as it is")
    progress.step({"reward/mean": 0.25, "loss": -0.5, "response/length": 7.04, "tokens_per_second": 12345.6})
    progress.step({"loss": float("nan")})
    progress.close()
    said, first, second = capsys.readouterr().out.splitlines()
    assert said == "[bold] stays as it is"
    assert re.fullmatch(r"grpo  step 2/4  reward 0\.250  loss -0\.5000  length 7\.0  tok/s 12,346  left 0:00", first)
    assert re.fullmatch(r"grpo  step 3/4  loss \+?nan  left 0:00", second)


@pytest.mark.parametrize(("ending", "code"), [("progress.close()", 0), ("raise SystemExit(3)", 3)])
def test_a_bar_on_a_terminal(ending, code):
    """It gives the cursor back at the end, after a failure too."""
    terminal, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    line = [sys.executable, "-c", CODE + ending]
    process = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = _all_of(terminal)
    assert process.wait() == code, shown
    assert "2/3" in shown
    assert "reward 0.250  loss -0.5000  tok/s 12,346" in shown
    assert "[saved] step 2" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def _all_of(terminal: int) -> str:
    """What is written until the other side is closed."""
    parts = []
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # how Linux says that nobody has the terminal open any more
            part = b""
        if not part:
            os.close(terminal)
            return b"".join(parts).decode()
        parts.append(part)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (125, "2:05"), (3600, "1:00:00"),
                                               (90061, "25:01:01")])
def test_time_left_is_readable(seconds, text):
    assert _clock(seconds) == text
