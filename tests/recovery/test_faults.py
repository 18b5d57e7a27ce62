"""Limits and cuts that a process without rights can put upon itself."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from distflow.recovery import fault_injection


def in_child(work: Callable[[], bool]) -> bool:
    """What it says, in a process of its own, whose limits are its own too."""
    child = os.fork()
    if not child:
        good = False
        try:
            good = work()
        finally:
            os._exit(0 if good else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def append(file: Path, size: int) -> int:
    """The error, or 0."""
    try:
        with file.open("ab", buffering=0) as out:
            return 0 if out.write(bytes(size)) == size else errno.EFBIG
    except OSError as error:
        return error.errno


def test_a_full_disk_takes_lines_and_no_checkpoint_until_it_is_free(tmp_path):
    def work() -> bool:
        fault_injection.limit_file_size(os.getpid())
        full = [append(tmp_path / "line", 100), append(tmp_path / "large", 2 * fault_injection.ROOM)]
        fault_injection.lift_file_size_limit(os.getpid())
        return full == [0, errno.EFBIG] and append(tmp_path / "large", 2 * fault_injection.ROOM) == 0

    assert in_child(work)


def test_memory_is_taken_until_none_is_left():
    def work() -> bool:
        with pytest.raises(MemoryError):
            fault_injection.exhaust_memory()
        return True

    assert in_child(work)


def close_sockets_but(*kept: socket.socket) -> None:
    """Those that other tests have left open, here in the child."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode) and int(name) not in [each.fileno() for each in kept]:
                os.close(int(name))


def test_connections_are_cut_but_those_to_the_store(monkeypatch):
    def pair() -> tuple[socket.socket, socket.socket, int]:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            there = socket.create_connection(listening.getsockname())
            return there, listening.accept()[0], listening.getsockname()[1]

    (board, host, port), (other, peer, _) = pair(), pair()

    def work() -> bool:
        host.close()  # the store is another process
        close_sockets_but(board, other, peer)
        monkeypatch.setenv("MASTER_PORT", str(port))
        with socket.create_server(("127.0.0.1", 0)) as listening:
            assert fault_injection.cut_connections() == 2
            assert peer.recv(1) == b""
            assert other.recv(1) == b""
            new = socket.create_connection(listening.getsockname())
            listening.accept()[0].sendall(b"x")
            return new.recv(1) == b"x" and board.send(b"y") == 1

    assert in_child(work)
    assert host.recv(1) == b"y"
