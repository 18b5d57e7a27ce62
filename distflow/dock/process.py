"""Shard server, or a standby for one, as a child process: it reads its settings from standard input and prints its
address.

The process ends by an empty line, or when its standard input closes, that is with its parent. It ignores Ctrl-C and
SIGTERM, which may reach all processes of a run at once: the step that then ends the run needs the samples.
"""

from __future__ import annotations

import contextlib
import functools
import json
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from distflow.dock.directory import ShardDirectory
from distflow.dock.errors import DockError
from distflow.dock.replication import Standby
from distflow.dock.selection import DockLayout
from distflow.dock.shard import StorageShardServer
from distflow.rpc.connection import Address
from distflow.telemetry.events import leave
from distflow.telemetry.processes import Child, python_environment, spawn, stopped

_START, _TAKE, _ANSWER = 120.0, 90.0, 10.0
"""Seconds within which it must come up, must have taken a shard's place, for which the store has a minute alone
(`ShardDirectory.take`), and must do anything else, or go on where it was stopped."""
_SERVE = "serve"  # the line by which a standby takes its shard's place


@dataclass
class ShardProcess:
    """Running shard server, or a standby for one; it ends when its standard input closes."""

    process: Child
    number: int
    serves: bool

    @functools.cached_property
    def address(self) -> Address:
        """Its address, as soon as it has one. Raises `DockError`: it has ended, or does not answer."""
        host, port = json.loads(self._line(_START))
        return host, port

    def take_over(self) -> None:
        """Have a standby become its shard, at its own address; returns when it serves. A slow one is waited for: it may
        have the only copy of the rows. Raises `DockError`: it has ended, or is stopped."""
        if self.serves:
            return
        self.address  # noqa: B018 - its first line
        with contextlib.suppress(BrokenPipeError):
            print(_SERVE, file=self.process.stdin, flush=True)
        self._line(_TAKE)
        self.serves = True

    def stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # a line, since other children of this process have the pipe too
            print(file=self.process.stdin, flush=True)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        if self.process.poll(_ANSWER) is None:
            self.process.end()
        self.process.stdout.close()

    def _line(self, seconds: float) -> str:
        """Return its next line. Raises `DockError`."""
        written, began = select.poll(), time.monotonic()
        written.register(self.process.stdout, select.POLLIN | select.POLLHUP)
        while not written.poll(1000 * min(seconds, _ANSWER)):
            if (waited := time.monotonic() - began) >= seconds or stopped(self.process.pid):
                raise DockError(f"the process of shard {self.number} of the dock (process {self.process.pid}) has not "
                                f"answered for {waited:.1f} s. It may have been stopped: then continue it")
        if line := self.process.stdout.readline():
            return line
        raise DockError(f"the process of shard {self.number} of the dock has ended (exit status "
                        f"{self.process.wait()}); its own message stands on standard error")

    def kill(self) -> None:
        self.process.signal(signal.SIGKILL)
        self.stop()


def start(token: bytes, *, host: str = "127.0.0.1", port: int = 0, directory: ShardDirectory | None = None,
          layout: DockLayout | None = None, number: int = 0, standby: bool = False) -> ShardProcess:
    """Start the server of shard `number`; the other arguments are those of `StorageShardServer`. `layout` is of a dock
    in which it replaces a process that has ended, with no rows, or is a `standby`, which is not waited for. Raises
    `DockError` if it does not come up; its own message stands on standard error."""
    settings = {"token": token.hex(), "host": host, "port": port, "layout": layout and layout.to_plain(),
                "number": number, "standby": standby, "directory": directory and directory.to_plain()}
    process = spawn([sys.executable, "-P", "-m", "distflow.dock.process"], die_with_parent=0, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    env={"OMP_NUM_THREADS": "1"} | python_environment())
    print(json.dumps(settings), file=process.stdin, flush=True)
    started = ShardProcess(process, number, serves=not standby)
    if started.serves:
        started.address  # noqa: B018 - waits for it
    return started


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    given = json.loads(sys.stdin.readline())
    directory = ShardDirectory.from_plain(**given["directory"]) if given["directory"] else None
    server = StorageShardServer(bytes.fromhex(given["token"]), given["host"], given["port"], directory)
    layout, number = DockLayout.from_plain(given["layout"]) if given["layout"] else None, given["number"]
    if layout and directory and given["standby"]:
        standby = Standby(directory, server.token, number, len(layout.addresses), layout.group_size)
        standby.start()
        print(json.dumps(server.address), flush=True)
        if sys.stdin.readline().strip() != _SERVE:
            return
        with server.state.lock:
            server.state.take_over(standby.stop(), layout, number)
    elif layout:
        with server.state.lock:
            server.state.configure(layout, number)
    print(json.dumps(server.start(number)), flush=True)
    sys.stdin.readline()
    server.close()


if __name__ == "__main__":
    main()
    leave(0)
