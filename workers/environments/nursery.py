"""A small process that has loaded an environment and forks the processes that hold instances of it.

To fork takes a millisecond where a new interpreter takes hundreds, so that each trajectory can have a process of its
own. Whatever these leave behind falls to the nursery (it is their subreaper), which ends it with them.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import json
import os
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    """`python -c … FD JOB`: say whether the environment could be loaded, then fork and kill as told over the line."""
    line, job = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    sys.path[:] = job["path"]
    _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        from distflow.schema.environments import load_environment
        from workers.environments import instances  # noqa: F401 - loaded once for all that are forked

        kind = load_environment(job["kind"])
    except BaseException:  # noqa: BLE001 - said to the rank, which raises it
        line.sendall(json.dumps({"failed": traceback.format_exc()}).encode() + b"\n")
        return
    line.sendall(b"{}\n")
    gc.freeze()
    _Nursery(line, kind, job).serve()


class _Nursery:
    def __init__(self, line: socket.socket, kind: type, job: dict[str, Any]):
        self.line, self.kind, self.job = line, kind, job
        self.children: set[int] = set()

    def serve(self) -> None:
        """A packet is a command: `f` with a line to fork for, answered by the process id, or `k` and those to end."""
        while True:
            packet, files, _, _ = socket.recv_fds(self.line, 1 << 16, 1)
            if packet == b"f":
                self.line.sendall(self._fork(files[0]).to_bytes(4, "little"))
            elif packet:
                self._end(array.array("i", packet[1:]).tolist())
            else:
                return self._end(list(self.children))

    def _fork(self, file: int) -> int:
        child = os.fork()
        if child:
            os.close(file)
            self.children.add(child)
            return child
        code = 1
        try:
            self._become(socket.socket(fileno=file))
            code = 0
        finally:
            os._exit(code)

    def _become(self, line: socket.socket) -> None:
        from workers.environments.instances import serve

        os.setsid()
        _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _control(_PR_SET_CHILD_SUBREAPER, 0)
        self.line.close()
        limit = self.job["memory_mib"] << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        serve(line, self.kind, self.job["settings"])

    def _end(self, ended: list[int]) -> None:
        """These processes with their groups, and what has left a group: an orphan becomes the nursery's child."""
        for child in self.children.intersection(ended):
            for send in (os.killpg, os.kill):  # one that has just been forked leads no group yet
                with contextlib.suppress(ProcessLookupError):
                    send(child, signal.SIGKILL)
            os.waitpid(child, 0)
            self.children.discard(child)
        while strays := _children() - self.children:
            for stray in strays:
                os.kill(stray, signal.SIGKILL)
                os.waitpid(stray, 0)


def _children() -> set[int]:
    """Those of this process, ended ones included."""
    found = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(name))
    return found


def _control(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
