"""Starting and ending real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

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


def test_a_child_that_goes_on_has_no_exit_status_until_it_is_ended():
    child = processes.spawn(lambda: time.sleep(600))
    assert child.poll(0.05) is None
    child.signal(signal.SIGTERM)  # meant for all processes of a run
    assert child.poll(0.2) is None
    assert child.end() == child.wait() == -signal.SIGKILL


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
