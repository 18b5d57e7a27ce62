"""What a child leaves behind ends with it, whatever happens at the same moment, and its end is named."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
import uuid
from pathlib import Path

import pytest

from workers.isolation.child import packed
from workers.isolation.pool import Call, CallPool, ChildProcess, ForkServerLost

HANDLER = '''
import os, signal, sys, time

class Handler:
    """Starts a process that hides, and ends as it is told."""
    def answer(self, call, send):
        begun, told = os.pipe()
        if call["hides"] and os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                send.__self__.process = os.getpid()
                send({"call": call["call"], "hidden": os.getpid()})
                os.write(told, b"1")
                time.sleep(3600)
            os._exit(0)
        if call["hides"]:
            os.wait()
            os.read(begun, 1)
        exec(call["end"])
        return {}

    def forget(self, key):
        pass
'''


class Echo(ChildProcess):
    def read(self, message: dict) -> dict:
        return message


@pytest.fixture
def pool(tmp_path, monkeypatch):
    (tmp_path / "my_handler.py").write_text(HANDLER)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = CallPool(Echo, "tests", "my_handler:Handler", {}, memory_gib=0.25)
    made.start()
    yield made
    made.close()


def ask(child: Echo, end: str, hides: bool = True) -> None:
    child.ask(Call(seconds=60.0), {"key": 0, "hides": hides, "end": end})


def next_of(pool: CallPool[Echo]) -> tuple[list[dict], str]:
    ((_, messages, wrong),) = pool.receive(time.monotonic() + 60)
    return messages, wrong


def hidden_of(pool: CallPool[Echo]) -> int:
    """A pidfd of the process that hides."""
    ((message,), wrong) = next_of(pool)
    assert wrong == ""
    return os.pidfd_open(message["hidden"])


def gone(process: int) -> bool:
    """Within 30 seconds."""
    waiting = select.poll()
    waiting.register(process)
    found = bool(waiting.poll(30_000))
    os.close(process)
    return found


@pytest.mark.parametrize(("end", "reason"), [
    ("sys.exit(3)", "ended with code 1"), ("os._exit(3)", "ended with code 3"), ("os._exit(0)", "ended with code 0"),
    ("os.kill(os.getpid(), 9)", "was killed by SIGKILL (out of memory?)"),
    ("os.kill(os.getpid(), 15)", "was killed by SIGTERM")])
def test_call_pool_ends_hidden_descendants_of_a_child(pool, end, reason):
    """Though the hidden process keeps the child's socket open, and the rank does nothing but wait."""
    child, other = pool.fork(), pool.fork()
    ask(child, end)
    messages, wrong = next_of(pool)
    while not wrong:  # which may come with the message, or after it
        more, wrong = next_of(pool)
        messages += more
    assert wrong == f"its process {reason}"
    (hidden,) = (message["hidden"] for message in messages)
    with contextlib.suppress(ProcessLookupError):  # it has gone already
        assert gone(os.pidfd_open(hidden))
    pool.end_child(child)
    ask(other, "pass", hides=False)
    assert next_of(pool) == ([{"call": 0}], "")


def test_call_pool_names_no_old_location_as_that_of_a_crash(pool):
    child = pool.fork()
    ask(child, "time.sleep(3600)", hides=False)
    until = time.monotonic() + 60
    while not pool.location(child).endswith(", in answer"):
        assert time.monotonic() < until
    os.kill(child.pid, signal.SIGTERM)
    assert next_of(pool) == ([], "its process was killed by SIGTERM")


@pytest.mark.parametrize("closed", [True, False])
def test_call_pool_ends_descendants_however_its_end_is_interrupted(pool, closed):
    ask(pool.fork(), "time.sleep(3600)")
    hidden = hidden_of(pool)
    if closed:
        pool.connection.shutdown(socket.SHUT_RDWR)
    while pool.server.poll() is None:
        pool.server.signal(signal.SIGTERM)
    assert gone(hidden)
    with pytest.raises(ForkServerLost, match="the process that starts tests has ended, with code"):
        pool.fork()


def test_call_pool_ends_descendants_of_a_call_that_kills_the_fork_server(pool):
    ask(pool.fork(), "time.sleep(1); os.kill(os.getppid(), 9); time.sleep(3600)")
    hidden = hidden_of(pool)
    with pytest.raises(ForkServerLost, match="with code -9"):
        next_of(pool)
    pool.stop()
    assert gone(hidden)


def test_fork_server_ends_without_a_word_where_the_rank_takes_no_answer(pool, capfd):
    request = packed(["exit_code", pool.fork().pid, 0.1])
    pool.connection.send(request)
    pool.connection.close()
    assert pool.server.poll(60.0) == 0
    assert capfd.readouterr().err == ""


def test_call_pool_counts_a_fork_server_that_dies_at_its_start_as_lost(pool, tmp_path):
    """So that a reward's pool tries again: memory may have run out."""
    (tmp_path / "my_handler.py").write_text("import os; os.kill(os.getpid(), 9)")
    pool.stop()
    with pytest.raises(ForkServerLost, match="tests could not be loaded: its process ended"):
        pool.fork()
    (tmp_path / "my_handler.py").write_text(HANDLER)
    assert pool.fork().pid in pool.forked


def test_call_pool_ends_a_stopped_fork_server(pool):
    ask(pool.fork(), "os.kill(os.getppid(), signal.SIGSTOP); time.sleep(3600)")
    hidden = hidden_of(pool)
    pool.stop()
    assert gone(hidden)


def test_call_pool_measures_shared_memory_while_children_come_and_go(pool):
    child = pool.fork()
    ask(child, "file = os.memfd_create('x')\nwhile True: os.write(file, bytes(1 << 20))", hides=False)
    deadline = time.monotonic() + 60
    while not (found := list(pool.receive(0.0))):
        pool.end_child(pool.fork())
        pool.kill_ended()
        assert time.monotonic() < deadline
    assert found == [(child, [], "its process was killed by SIGKILL (out of memory?)")]


LEAVES_FILES = """
import mmap
opened = open({0!r}, "wb")
with open({1!r}, "w+b") as file:
    file.write(bytes(4096))
    file.flush()
    mapped = mmap.mmap(file.fileno(), 4096)
for name in {2!r}:
    open(name, "ab").write(b"row")
kept = [open(name, "ab") for name in {2!r}]
send({{"call": call["call"]}})
time.sleep(3600)
"""


def test_call_pool_removes_shared_memory_files_of_a_killed_child_alone(pool):
    names = [f"/dev/shm/{kind}{uuid.uuid4().hex}" for kind in ("psm_",) * 5 + ("distflow-test-",)]
    opened, mapped, earlier, shared, read, named = files = [*map(Path, names)]
    try:
        earlier.write_bytes(b"of another process")
        child, other = pool.fork(), pool.fork()
        ask(child, LEAVES_FILES.format(names[0], names[1], names[2:]), hides=False)
        assert next_of(pool)[1] == ""
        ask(other, f"kept = open({names[3]!r}, 'ab'); send({{'call': call['call']}}); time.sleep(3600)", hides=False)
        assert next_of(pool)[1] == ""
        with read.open("rb"):  # by a process of another pool
            for ended, left in ((child, [earlier, shared, read, named]), (other, [earlier, read, named])):
                pool.end_child(ended)
                pool.kill_ended()
                pool.fork()  # is answered after that
                assert [path for path in files if path.exists()] == left
    finally:
        for name in names:
            Path(name).unlink(missing_ok=True)
