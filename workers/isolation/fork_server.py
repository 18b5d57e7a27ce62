"""Fork server: a small process that has imported an environment and forks the processes that run it.

A fork takes a millisecond where a new interpreter takes hundreds, so each trajectory can have a process of its own.
The fork server is the subreaper of its children: processes that they leave behind become its own, and it kills them.
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
from workers.isolation.sandbox.memory_limit import PollSchedule, SharedMemoryUse
from workers.isolation.sandbox.processes import kill_descendants
from workers.isolation.user_code import guarded


def main() -> None:
    """Load the environment and report success, then fork and kill on request; run as `python -c … FD JOB`."""
    connection, job = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    sys.path[:] = job["path"]
    connection.set_inheritable(False)
    kernel.flag(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    kernel.flag(kernel.PR_SET_CHILD_SUBREAPER)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the rank's

    def failed(_: BaseException) -> None:
        connection.sendall(json.dumps({"failed": traceback.format_exc()}).encode() + b"\n")
        sys.exit()

    with guarded(failed, BaseException):
        from distflow.contracts.environments import load_environment
        from workers.isolation import env_worker  # noqa: F401 - imported once for all children

        kind = load_environment(job["kind"])
    connection.sendall(b"{}\n")
    gc.freeze()
    # No user code runs here any more, so there is time to clean up. A SIGTERM from the rank's death only closes the
    # connection, since an exception could be raised in the midst of the cleanup.
    signal.signal(signal.SIGTERM, lambda *_: connection.shutdown(socket.SHUT_RD))
    kernel.flag(kernel.PR_SET_PDEATHSIG, signal.SIGTERM)
    _ForkServer(connection, kind, job).serve()


class _ForkServer:
    def __init__(self, connection: socket.socket, kind: type, job: dict[str, Any]):
        self.connection, self.kind, self.job = connection, kind, job
        self.children: set[int] = set()
        self.limit = int(job["memory_gib"] * 2**30)
        self.memory: dict[int, SharedMemoryUse] = {}
        """Shared memory of each child and its descendants."""

    def serve(self) -> None:
        """Run commands: `f` with a socket forks a child and answers its id, `k` with process ids kills these.

        When the rank ends, in whatever way, all children are killed.
        """
        waiting, schedule = select.poll(), PollSchedule()
        waiting.register(self.connection, select.POLLIN)
        try:
            while True:
                while not waiting.poll(1000 * schedule.pause if self.children else None):
                    with schedule.poll():
                        large = [child for child, memory in self.memory.items() if memory.exceeded()]
                    if large:
                        self._kill(large)
                packet, files, _, _ = socket.recv_fds(self.connection, 1 << 16, 1)
                if packet == b"f":
                    self.connection.sendall(self._fork(files[0]).to_bytes(4, "little"))
                elif packet:
                    self._kill(array.array("i", packet[1:]).tolist())
                else:
                    return
        finally:
            self._kill(list(self.children))

    def _fork(self, file: int) -> int:
        child = os.fork()
        if child:
            os.close(file)
            self.children.add(child)
            self.memory[child] = SharedMemoryUse(child, self.limit)
            return child
        code = 1
        try:
            self._run_child(socket.socket(fileno=file))
            code = 0
        finally:
            os._exit(code)

    def _run_child(self, connection: socket.socket) -> None:
        from workers.isolation.env_worker import serve

        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        kernel.flag(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        self.connection.close()
        resource.setrlimit(resource.RLIMIT_DATA, (self.limit, self.limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        Path("/proc/self/oom_score_adj").write_text("1000")  # the OOM killer takes this process first
        serve(connection, self.kind, self.job["settings"])

    def _kill(self, ended: list[int]) -> None:
        """Kill these children and everything that does not descend from a living child, orphans among it."""
        self.children.difference_update(ended)
        for child in ended:
            self.memory.pop(child, None)
        kill_descendants(os.getpid(), self.children)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
