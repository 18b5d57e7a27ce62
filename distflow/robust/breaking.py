"""Ways to break a process that no signal has; each says what it is, and what it is not."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import stat
import threading
from pathlib import Path

from distflow.robust.out_of_memory import limit
from distflow.robust.processes import end_at_once, family, parent
from distflow.schema.errors import DistflowError

ROOM = 64 << 10
"""Bytes up to which a file can grow on a disk that is `fill`ed: lines still fit, checkpoints do not."""
_SPARE, _PIECE = 64 << 20, 16 << 20


class NoLimit(DistflowError):
    """Nothing protects the rest of the machine, or of the run."""


def fill(process: int, room: int = ROOM) -> None:
    """From now on no file of a process can grow beyond `room` bytes, as on a disk that is all but full. It is no disk
    that does that but RLIMIT_FSIZE: the error is EFBIG in place of ENOSPC, and growing shared memory fails too."""
    _, most = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (room, most))


def free(process: int) -> None:
    """Files can grow again."""
    fill(process, resource.prlimit(process, resource.RLIMIT_FSIZE)[1])


def fill_for(seconds: float) -> None:
    """`fill` this process for so long."""
    fill(os.getpid())
    timer = threading.Timer(seconds, free, (os.getpid(),))
    timer.daemon = True
    timer.start()


def exhaust_memory() -> None:
    """Take memory until there is none to be had, by RLIMIT_AS. The kernel's own end of a process that takes too much
    is a SIGKILL.

    Raises:
        MemoryError: always.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _SPARE, most))
    taken = []
    while True:
        taken.append(bytearray(_PIECE))


def take_memory() -> None:
    """Take memory, really, until the kernel ends this process. Does not return.

    Raises:
        NoLimit: no control group bounds what this process can take, so that it would be the memory of all others too.
    """
    if limit() is None:
        raise NoLimit("the fault `oom` takes memory until the kernel ends the worker, which would be all that the "
                      "machine has: start the run in a control group with a limit (systemd-run -p MemoryMax=8G, or a "
                      "container with one), or take  kind: memory")
    taken = []
    while True:
        taken.append(b"\1" * _PIECE)


def lose_machine() -> None:
    """End torchrun here and all that it has started, at once, as when the power of this machine fails. Does not return.

    Its last processes are this one and its seat.
    """
    seat = os.getppid()
    end_at_once(each for each in family(parent(seat)) if each not in (seat, os.getpid()))
    os.kill(seat, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def cut() -> int:
    """Shut down all TCP connections of this process but those to the board, once; new ones can be made. Those to other
    ranks of its group are among them. Returns how many."""
    board, found = int(os.environ.get("MASTER_PORT", 0)), 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile, or is connected to nobody
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as line:
                    if line.family in (socket.AF_INET, socket.AF_INET6) and line.getpeername()[1] != board:
                        line.shutdown(socket.SHUT_RDWR)
                        found += 1
    return found
