"""Starting and ending real processes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import ROOT

from distflow.telemetry import processes


def test_an_orphan_that_nothing_ends_is_not_waited_for_without_end(monkeypatch):
    """As one that waits for a disk: here SIGKILL is not sent, since a test cannot make the kernel hold a process."""
    monkeypatch.setattr(processes, "_TERM_TIMEOUT", 0.1)
    monkeypatch.setattr(processes, "_KILL_TIMEOUT", 0.1)
    monkeypatch.setattr(processes, "kill_tree", lambda each: None)
    known = processes.children(os.getpid())
    with subprocess.Popen(["sh", "-c", "trap '' TERM; echo; while :; do sleep 600; done"], stdout=subprocess.PIPE,
                          start_new_session=True) as orphan:
        orphan.stdout.readline()
        try:
            assert processes.end_orphans(known) == {orphan.pid}
        finally:
            monkeypatch.undo()
            processes.kill_tree(orphan.pid)


def test_a_fork_answers_by_its_exit_status_and_what_it_raises_is_shown(capfd):
    assert processes.spawn(lambda: 3).wait() == 3
    assert processes.spawn(lambda: None).wait() == 0
    assert processes.spawn(lambda: int("x")).wait() == 1
    assert "invalid literal" in capfd.readouterr().err


def test_a_child_that_goes_on_has_no_exit_status_until_it_is_ended():
    child = processes.spawn(lambda: time.sleep(600))
    assert child.poll(0.05) is None
    child.signal(signal.SIGTERM)  # meant for all processes of a run
    assert child.poll(0.2) is None
    assert child.end() == child.wait() == -signal.SIGKILL


def test_a_child_may_end_by_itself_in_its_last_seconds():
    program = processes.spawn(["sh", "-c", "trap 'exit 7' TERM; echo; while :; do sleep 0.01; done"],
                              stdout=subprocess.PIPE)
    program.stdout.readline()
    assert program.end(60) == 7


@pytest.mark.parametrize("target", [["sleep", "600"], lambda: time.sleep(600)])
def test_a_child_dies_with_its_parent(target):
    def start() -> None:
        os.write(writable, f"{processes.spawn(target).pid}\n".encode())

    readable, writable = os.pipe()
    assert processes.spawn(start).wait() == 0
    child, until = int(os.read(readable, 99)), time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and processes.alive(child, processes.began(child)):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_limits_hold_in_the_child_alone():
    def raised() -> int:
        return int(resource.getrlimit(resource.RLIMIT_CORE) == (0, 0))

    before = resource.getrlimit(resource.RLIMIT_CORE)
    assert processes.spawn(raised, limits={resource.RLIMIT_CORE: 0}).wait() == 1
    assert resource.getrlimit(resource.RLIMIT_CORE) == before


def test_a_tree_is_killed_whatever_sessions_it_has():
    def parent() -> None:
        processes.spawn(["sleep", "600"], session=True, die_with_parent=0)
        processes.spawn(lambda: time.sleep(600), die_with_parent=0)
        os.write(writable, b"\n")
        time.sleep(600)

    readable, writable = os.pipe()
    child = processes.spawn(parent, session=True)
    os.read(readable, 1)
    assert len(family := {child.pid} | processes.descendants(child.pid)) == 3
    assert processes.kill_tree(child.pid) == family
    assert child.wait() == -signal.SIGKILL


def test_those_that_are_killed_last_start_nothing_meanwhile():
    """As a supervisor that would start again what is killed, and kill the worker that kills."""
    def supervise() -> None:
        worker = processes.spawn(lambda: processes.kill_tree(os.getppid(), last=(os.getppid(), os.getpid())) and None)
        while worker.poll() is None:
            processes.spawn(lambda: time.sleep(600), die_with_parent=0)

    processes.adopt_orphans()
    known = processes.children(os.getpid())
    supervisor = processes.spawn(supervise, session=True)
    assert supervisor.poll(20) == -signal.SIGKILL
    until = time.monotonic() + 5
    while (left := processes.descendants(os.getpid(), but=known)) and time.monotonic() < until:
        time.sleep(0.01)
    processes.kill_descendants(os.getpid(), but=known)
    processes.end_orphans(known)
    assert left == set()


def test_programs_that_a_fork_executes_do_end_by_the_signals_that_it_defies():
    status = processes.spawn(lambda: -subprocess.run(["sh", "-c", "kill -TERM $$"], check=False).returncode).wait()
    assert status == signal.SIGTERM


def test_a_python_finds_this_tree_and_what_it_finds_anyway(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "mine.py").touch()
    found = subprocess.run([sys.executable, "-c", "import distflow, mine; print(distflow.__file__)"], cwd="/",
                           env=processes.python_environment(), capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).parents[1] == ROOT
