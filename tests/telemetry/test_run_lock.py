"""Who may write to a run folder: one job at a time, and the refusal names it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys

import pytest
from harness import ROOT, environment

from distflow.errors import InvalidInput
from distflow.telemetry import run_lock
from distflow.telemetry.run_lock import NAME, RunLock, in_use

HOLD = """
import os, select, sys
from pathlib import Path
from distflow.telemetry.run_lock import RunLock
from distflow.telemetry import run_lock
run_lock._EXIT_TIMEOUT, run_lock._EVERY = 0.2, 0.0
lock = RunLock(Path(sys.argv[1]), *sys.argv[2:3])
lock.hold()
child = os.fork()
if child:
    print(child, flush=True)
    for line in sys.stdin:
        lock.hold()
        print(line, end="", flush=True)
else:
    end = select.poll()
    end.register(sys.stdin, 0)  # what it reads is the parent's
    end.poll()
"""


@pytest.fixture
def hold(tmp_path):
    """Another process that holds the lock, and has a child as a supervisor has a worker."""
    processes = []

    def start(*job: str) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path), *job], stdin=subprocess.PIPE, text=True,
                                   stdout=subprocess.PIPE, env={**environment(), "PYTHONPATH": str(ROOT)})
        processes.append(process)
        assert process.stdout.readline()
        return process

    yield start
    for each in processes:
        each.kill()
        each.communicate()


@pytest.fixture
def no_flock(monkeypatch):
    """A file system without it: there is none to mount here."""

    def flock(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


def test_a_second_job_is_refused_and_learns_by_whom(tmp_path, hold, monkeypatch):
    monkeypatch.setattr(run_lock, "_EXIT_TIMEOUT", 0.2)
    holder = hold()
    with pytest.raises(InvalidInput, match=f"(?s)is in use: process {holder.pid} on {socket.gethostname()} trains it "
                       f"since 20.*kill {holder.pid}"):
        RunLock(tmp_path).hold()
    assert in_use(tmp_path).pid == holder.pid


def test_a_holder_that_is_killed_has_it_no_more(tmp_path, hold):
    """Though its child goes on."""
    hold().kill()
    RunLock(tmp_path).hold()
    assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_what_is_released_is_free(tmp_path):
    lock = RunLock(tmp_path)
    lock.hold()
    lock.hold()
    assert in_use(tmp_path).pid == os.getpid()
    lock.release()
    assert in_use(tmp_path) is None


def test_another_process_of_the_same_job_goes_on(tmp_path, hold, monkeypatch):
    monkeypatch.setattr(run_lock, "_EXIT_TIMEOUT", 0.2)
    hold("the same")
    RunLock(tmp_path, "the same").hold()


def test_a_job_whose_ranks_start_again_keeps_its_run(tmp_path, hold, monkeypatch):
    """The lock is free for a moment, but torchrun, which it names, goes on."""
    monkeypatch.setattr(run_lock, "_EXIT_TIMEOUT", 0.2)
    written = hold()
    text = (tmp_path / NAME).read_text()
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).write_text(text)
    with pytest.raises(InvalidInput, match=f"process {written.pid}"):
        RunLock(tmp_path).hold()


def test_without_flock_the_written_name_decides(tmp_path, hold, no_flock, monkeypatch):
    monkeypatch.setattr(run_lock, "_EXIT_TIMEOUT", 0.2)
    holder = hold()
    with pytest.raises(InvalidInput, match=f"process {holder.pid}"):
        RunLock(tmp_path).hold()
    holder.kill()
    holder.wait()
    RunLock(tmp_path).hold()
    assert in_use(tmp_path).pid == os.getpid()


def test_without_flock_another_machine_must_be_asked(tmp_path, no_flock, monkeypatch):
    monkeypatch.setattr(run_lock, "_EXIT_TIMEOUT", 0.2)
    lock = RunLock(tmp_path)
    lock.hold()
    text = json.loads((tmp_path / NAME).read_text())
    (tmp_path / NAME).write_text(json.dumps({**text, "host": "elsewhere", "job": "another"}))
    with pytest.raises(InvalidInput, match=f"(?s)on elsewhere trains it .* is lost:  rm {tmp_path / NAME}"):
        RunLock(tmp_path).hold()


def test_a_passing_error_of_the_file_system_leaves_the_lock_held(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_EVERY", 0.0)
    lock = RunLock(tmp_path / "run")
    lock.path.parent.mkdir()
    lock.hold()
    lock.path.parent.rename(tmp_path / "away")
    lock.path.parent.symlink_to("run")  # to itself: an error of the system at every look
    lock.hold()
    lock.hold()
    lock.path.parent.unlink()
    (tmp_path / "away").rename(lock.path.parent)
    lock.hold()
    assert in_use(lock.path.parent).pid == os.getpid()


def test_who_takes_over_a_job_has_the_lock_when_the_former_gives_it_up(tmp_path, hold, monkeypatch):
    """As rank 0 of elastic machines, when another machine becomes the first."""
    monkeypatch.setattr(run_lock, "_EXIT_TIMEOUT", 0.2)
    monkeypatch.setattr(run_lock, "_EVERY", 0.0)
    before = RunLock(tmp_path, "the same")
    before.hold()
    after = hold("the same")
    before.release()
    assert in_use(tmp_path).pid == after.pid
    after.stdin.write("again\n")
    after.stdin.flush()
    assert after.stdout.readline() == "again\n"
    with (tmp_path / NAME).open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
