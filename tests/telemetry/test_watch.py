"""A run on the terminal: from its files, while it goes on, after it was stopped, and at 80 columns."""

from __future__ import annotations

import json
import os
import pty
import sys
import time
from pathlib import Path

import pytest
from harness import ROOT, environment
from rich.console import Console

from distflow.cli import main
from distflow.errors import InvalidInput
from distflow.telemetry.run_lock import RunLock
from distflow.telemetry.timeline import Timeline
from distflow.telemetry.watch import RunView, page


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "launch.json").write_text('{"search": [], "torchrun": ""}')
    (tmp_path / "run.yaml").write_text("steps: 40\n")
    write_steps(tmp_path, range(1, 11))
    mine = Timeline()
    mine.begin(role="trainer", attempt=0)
    mine.open(tmp_path / "timeline" / "rank0.jsonl", 0)
    with mine.span("weights", "publish", 10, version=7):
        mine.enter("computing node `update`", "training", 11, "update")
    mine.write()
    mine.ended.set()
    return tmp_path


def write_steps(folder: Path, steps: range) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            file.write(json.dumps({"step": step, "reward/mean": step / 100, "seconds": 2.0}) + "\n")


def text_of(view: RunView, columns: int = 80) -> str:
    console = Console(width=columns, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(page(view))
    return console.export_text()


def test_the_page_says_where_the_run_is_and_what_ranks_do(folder):
    failure = {"time": time.time(), "rank": 1, "step": 3, "event": "failure", "what": "it was ended by SIGKILL\nby you"}
    (folder / "events.jsonl").write_text(json.dumps(failure) + "\n" + json.dumps({**failure, "event": "other"}) + "\n")
    view = RunView(folder)
    view.look()
    said = text_of(view)
    assert all(len(line) <= 80 for line in said.splitlines())
    head, *rest = said.splitlines()
    assert "step 10/40" in head
    assert "is not running" in said, "nobody holds its lock"
    assert any(line.startswith("reward") and "0.1" in line and "█" in line for line in rest)
    row = next(line for line in rest if line.startswith("0 "))
    assert row.split()[:3] == ["0", "trainer", "`update`"]
    assert " v7 " in row
    assert " GiB" in row
    assert [line for line in rest if "rank 1  " in line] == [rest[-1]]
    assert rest[-1].endswith("failure: it was ended by SIGKILL")


def test_a_rank_without_an_activity_is_idle_until_the_run_ends(folder):
    """As a rollout of a resumed run, before it has its first prompt."""
    file = folder / "timeline" / "rank0.jsonl"
    file.write_text(json.dumps({**json.loads(file.read_text().splitlines()[-1]), "now": None}) + "\n")
    view = RunView(folder)
    view.look()
    assert "trainer  has ended" in text_of(view)
    lock = RunLock(folder, "job")
    lock.hold()
    said = text_of(view)
    assert "trainer  idle" in said
    assert "left 60.0 s" in said


def test_new_steps_are_read_and_a_resumed_run_is_read_again(folder):
    view = RunView(folder)
    view.look()
    write_steps(folder, range(11, 13))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "rew')  # half written
    view.look()
    assert (view.step, view.seconds_left()) == (12, 56.0)
    (folder / "metrics.jsonl").write_text("")
    write_steps(folder, range(1, 6))
    view.look()
    assert view.step == 5


def test_another_folder_is_refused(tmp_path, capsys):
    with pytest.raises(InvalidInput, match="has no launch.json"):
        RunView(tmp_path)
    assert main(["watch", str(tmp_path)]) == 2
    assert "distflow watch runs/grpo-1" in capsys.readouterr().err


def test_a_run_is_watched_on_a_terminal_until_it_ends(launch, workspace):
    """The run has ended when the terminal shows it: the page comes once, and the command with it."""
    launch(2, "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--name", "seen")
    child, terminal = pty.fork()
    if not child:
        os.chdir(workspace)
        os.execve(sys.executable, [sys.executable, "-m", "distflow", "watch", "runs/seen"],
                  {**environment(), "PYTHONPATH": str(ROOT), "COLUMNS": "80", "TERM": "xterm"})
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 1 << 16)
        except OSError:  # Linux: the other end has closed
            break
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    text = shown.decode()
    assert "step 4/4" in text
    assert "has finished" in text
    assert "1     trainer" in text
