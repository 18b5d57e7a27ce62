"""What a child of the guard leaves behind ends with it, whatever happens at the same moment."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest
from harness import ROOT

CHILD = """
import os, sys, time
from workers.isolation.sandbox.guard import fork_from_guard
fork_from_guard(os.getppid())
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(3600)
    os._exit(0)
sys.stdin.read()
{end}
"""


@pytest.fixture
def guarded():
    processes, hidden = [], []

    def start(end: str) -> tuple[subprocess.Popen, int]:
        """A guard whose child ends so when its input is closed, and a process (a pidfd) that hides from it."""
        processes.append(subprocess.Popen([sys.executable, "-c", CHILD.format(end=end)], cwd=ROOT, text=True,
                                          stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        hidden.append(os.pidfd_open(int(processes[-1].stdout.readline())))
        return processes[-1], hidden[-1]

    yield start
    for process in processes:
        with process:
            process.kill()
    for each in hidden:
        os.close(each)


def gone(process: int) -> bool:
    """Within 30 seconds."""
    waiting = select.poll()
    waiting.register(process)
    return bool(waiting.poll(30_000))


@pytest.mark.parametrize("closed", [True, False])
def test_nothing_is_left_whatever_interrupts_the_end(guarded, closed):
    guard, hidden = guarded("")
    if closed:
        guard.stdin.close()
    while guard.poll() is None:
        guard.terminate()
    assert gone(hidden)


@pytest.mark.parametrize(("end", "code"), [("sys.exit(3)", 3), ("", 0), ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
                                           ("os.kill(os.getpid(), 15)", -signal.SIGTERM)])
def test_it_ends_as_its_child_does(guarded, end, code):
    guard, hidden = guarded(end)
    guard.stdin.close()
    assert guard.wait(30) == code
    assert gone(hidden)
