"""Ending what a worker has left behind, with real processes."""

from __future__ import annotations

import os
import subprocess

from distflow.telemetry import processes


def test_an_orphan_that_nothing_ends_is_not_waited_for_without_end(monkeypatch):
    """As one that waits for a disk: here SIGKILL is not sent, since a test cannot make the kernel hold a process."""
    monkeypatch.setattr(processes, "_LEFT", 0.1)
    monkeypatch.setattr(processes, "_KILLED", 0.1)
    monkeypatch.setattr(processes, "end_at_once", lambda each: None)
    known = processes.children(os.getpid())
    with subprocess.Popen(["sh", "-c", "trap '' TERM; echo; while :; do sleep 600; done"], stdout=subprocess.PIPE,
                          start_new_session=True) as orphan:
        orphan.stdout.readline()
        try:
            assert processes.end_orphans(known) == {orphan.pid}
        finally:
            monkeypatch.undo()
            processes.end_at_once(processes.family(orphan.pid))
