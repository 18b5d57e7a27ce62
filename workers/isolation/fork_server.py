"""A small process that has loaded an environment and forks the processes that hold instances of it.

To fork takes a millisecond where a new interpreter takes hundreds, so that each trajectory can have a process of its
own. Whatever these leave behind falls to the nursery (it is their subreaper), which ends it with them.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from workers.isolation.sandbox import kernel
from workers.isolation.sandbox.memory_limit import LookSchedule, SharedMemoryUse
from workers.isolation.sandbox.processes import kill_descendants
from workers.isolation.user_code import contained


def main() -> None:
    """`python -c … FD JOB`: say whether the environment could be loaded, then fork and kill as told over the line."""
    line, job = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    sys.path[:] = job["path"]
    line.set_inheritable(False)
    kernel.flag(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.flag(kernel.PR_SET_CHILD_SUBREAPER)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the rank's

    def told(_: BaseException) -> None:
        line.sendall(json.dumps({"failed": traceback.format_exc()}).encode() + b"\n")
        sys.exit()

    with contained(told, BaseException):
        from distflow.contracts.environments import load_environment
        from workers.isolation import env_worker  # noqa: F401 - loaded once for all that are forked

        kind = load_environment(job["kind"])
    line.sendall(b"{}\n")
    gc.freeze()
    # No code of others runs here any more: it can tidy up first. The rank's death is one more end of the line, as an
    # exception could be raised in the midst of that.
    signal.signal(signal.SIGTERM, lambda *_: line.shutdown(socket.SHUT_RD))
    kernel.flag(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    _ForkServer(line, kind, job).serve()


class _ForkServer:
    def __init__(self, line: socket.socket, kind: type, job: dict[str, Any]):
        self.line, self.kind, self.job = line, kind, job
        self.children: set[int] = set()
        self.limit = int(job["memory_gib"] * 2**30)
        self.memory: dict[int, SharedMemoryUse] = {}
        """What each of them shares with its descendants."""

    def serve(self) -> None:
        """A packet is a command: `f` with a line to fork for, answered by the process id, or `k` and those to end.

        When the rank ends, however it does, all that is here ends too.
        """
        waiting, looks = select.poll(), LookSchedule()
        waiting.register(self.line, select.POLLIN)
        try:
            while True:
                while not waiting.poll(1000 * looks.pause if self.children else None):
                    with looks.look():
                        large = [child for child, memory in self.memory.items() if memory.exceeded()]
                    if large:
                        self._end(large)
                packet, files, _, _ = socket.recv_fds(self.line, 1 << 16, 1)
                if packet == b"f":
                    self.line.sendall(self._fork(files[0]).to_bytes(4, "little"))
                elif packet:
                    self._end(array.array("i", packet[1:]).tolist())
                else:
                    return
        finally:
            self._end(list(self.children))

    def _fork(self, file: int) -> int:
        child = os.fork()
        if child:
            os.close(file)
            self.children.add(child)
            self.memory[child] = SharedMemoryUse(child, self.limit)
            return child
        code = 1
        try:
            self._become(socket.socket(fileno=file))
            code = 0
        finally:
            os._exit(code)

    def _become(self, line: socket.socket) -> None:
        from workers.isolation.env_worker import serve

        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        kernel.flag(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        self.line.close()
        resource.setrlimit(resource.RLIMIT_DATA, (self.limit, self.limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out it is this process that goes
        serve(line, self.kind, self.job["settings"])

    def _end(self, ended: list[int]) -> None:
        """These processes, and all that does not stem from another one that is held: orphans become the nursery's."""
        self.children.difference_update(ended)
        for child in ended:
            self.memory.pop(child, None)
        kill_descendants(os.getpid(), self.children)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
