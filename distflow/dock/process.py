"""Shard server as a child process: it reads its settings from standard input and prints its address.

The process ends by an empty line, or when its standard input closes, that is with its parent. It ignores Ctrl-C and
SIGTERM, which may reach all processes of a run at once: the step that then ends the run needs the samples.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from distflow.dock.directory import ShardDirectory
from distflow.dock.errors import DockError
from distflow.dock.selection import DockLayout
from distflow.dock.shard import StorageShardServer
from distflow.rpc.connection import Address
from distflow.telemetry.events import leave
from distflow.telemetry.processes import Child, python_environment, spawn, stopped

_START, _ANSWER = 120.0, 10.0
"""Seconds within which it must come up, and must do anything else, or go on where it was stopped."""


@dataclass
class ShardProcess:
    """Running shard server; it ends when its standard input closes."""

    process: Child
    number: int
    address: Address

    def stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # a line, since other children of this process have the pipe too
            print(file=self.process.stdin, flush=True)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if self.process.poll(_ANSWER) is None:
            self.process.end()
        self.process.stdout.close()

    def kill(self) -> None:
        self.process.signal(signal.SIGKILL)
        self.stop()


def start(token: bytes, *, host: str = "127.0.0.1", port: int = 0, directory: ShardDirectory | None = None,
          layout: DockLayout | None = None, number: int = 0) -> ShardProcess:
    """Start the server of shard `number`; the other arguments are those of `StorageShardServer`. `layout` is of a dock
    in which it replaces a process that has ended, with no rows. Raises `DockError` if it does not come up; its own
    message stands on standard error."""
    settings = {"token": token.hex(), "host": host, "port": port, "layout": layout and layout.to_plain(),
                "number": number, "directory": directory and directory.to_plain()}
    process = spawn([sys.executable, "-P", "-m", "distflow.dock.process"], die_with_parent=0, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    env={"OMP_NUM_THREADS": "1"} | python_environment())
    print(json.dumps(settings), file=process.stdin, flush=True)
    host, port = json.loads(_first_line(process, number))
    return ShardProcess(process, number, (host, port))


def _first_line(process: Child, number: int) -> str:
    """Return the first line of a shard's process. Raises `DockError`: it has ended, or does not answer."""
    written, began = select.poll(), time.monotonic()
    written.register(process.stdout, select.POLLIN | select.POLLHUP)
    while not written.poll(1000 * min(_START, _ANSWER)):
        if (waited := time.monotonic() - began) >= _START or stopped(process.pid):
            raise DockError(f"the process of shard {number} of the dock (process {process.pid}) has not answered for "
                            f"{waited:.1f} s. It may have been stopped: then continue it")
    if line := process.stdout.readline():
        return line
    raise DockError(f"the process of shard {number} of the dock has ended (exit status {process.wait()}); its own "
                    "message stands on standard error")


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    given = json.loads(sys.stdin.readline())
    directory = ShardDirectory.from_plain(**given["directory"]) if given["directory"] else None
    server = StorageShardServer(bytes.fromhex(given["token"]), given["host"], given["port"], directory)
    if given["layout"]:
        with server.state.lock:
            server.state.configure(DockLayout.from_plain(given["layout"]), given["number"])
    print(json.dumps(server.start(given["number"])), flush=True)
    sys.stdin.readline()
    server.close()


if __name__ == "__main__":
    main()
    leave(0)
