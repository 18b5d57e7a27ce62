"""Shard server as a child process: it reads its settings from standard input and prints its address.

The process ends by an empty line, or when its standard input closes, that is with its parent. It ignores Ctrl-C and
SIGTERM, which may reach all processes of a run at once: the step that then ends the run needs the samples.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from distflow.dock.errors import DockError
from distflow.dock.replication import Standby
from distflow.dock.selection import DockLayout
from distflow.dock.shard import StorageShardServer
from distflow.rpc.connection import Address
from distflow.telemetry.processes import Child, spawn

_ROOT = Path(__file__).resolve().parents[2]
_ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 62),
              "MALLOC_TOP_PAD_": str(64 << 20)}
"""glibc keeps the memory of removed batches for new ones: fresh pages cost as much as the bytes that arrive."""


@dataclass
class DockProcess:
    """Running shard server, or a standby for one; it ends when its standard input closes."""

    process: Child
    serves: bool

    @functools.cached_property
    def address(self) -> Address:
        """Its address, as soon as it has one. Raises `DockError`: it has ended."""
        if not (line := self.process.stdout.readline()):
            raise DockError(f"a process of the dock did not come up (exit status {self.process.wait()}); its own "
                            "message stands on standard error")
        host, port = json.loads(line)
        return host, port

    def take_over(self, layout: DockLayout, number: int) -> None:
        """Have a standby become shard `number`, at its own address; returns when it serves. Raises `DockError`."""
        if self.serves:
            return
        self.address  # noqa: B018 - its first line
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"layout": layout.to_plain(), "number": number}), file=self.process.stdin, flush=True)
        if not self.process.stdout.readline():
            raise DockError(f"the standby for shard {number} of the dock has ended (status {self.process.wait()})")
        self.serves = True

    def stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # a line, since other children of this process have the pipe too
            print(file=self.process.stdin, flush=True)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def kill(self) -> None:
        self.process.signal(signal.SIGKILL)
        self.stop()


def start(token: bytes, *, host: str = "127.0.0.1", port: int = 0,
          layout: DockLayout | None = None, number: int = 0, standby_of: Address | None = None) -> DockProcess:
    """Start a shard server; the arguments are those of `StorageShardServer`. `layout` and `number` are of a dock in
    which it replaces a process that has ended, with no rows, or is the standby of the one at `standby_of`, which is not
    waited for. Raises `DockError` if it does not come up; its own message stands on standard error."""
    settings = {"token": token.hex(), "host": host, "port": port, "layout": layout and layout.to_plain(),
                "number": number, "standby_of": standby_of}
    paths = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = spawn([sys.executable, "-m", "distflow.dock.process"], die_with_parent=0, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    env={"OMP_NUM_THREADS": "1"} | _ALLOCATOR | os.environ | {"PYTHONPATH": paths})
    print(json.dumps(settings), file=process.stdin, flush=True)
    started = DockProcess(process, serves=standby_of is None)
    if started.serves:
        started.address  # noqa: B018 - waits for it
    return started


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    given = json.loads(sys.stdin.readline())
    server = StorageShardServer(bytes.fromhex(given["token"]), given["host"], given["port"])
    layout = DockLayout.from_plain(given["layout"]) if given["layout"] else None
    if layout and given["standby_of"]:
        host, port = given["standby_of"]
        standby = Standby((host, port), server.token, given["number"], len(layout.addresses), layout.group_size)
        standby.start()
        print(json.dumps(server.address), flush=True)
        if not (line := sys.stdin.readline().strip()):
            return
        order = json.loads(line)
        with server.state.lock:
            server.state.take_over(standby.stop(), DockLayout.from_plain(order["layout"]), order["number"])
    elif layout:
        with server.state.lock:
            server.state.configure(layout, given["number"])
    print(json.dumps(server.start()), flush=True)
    sys.stdin.readline()
    server.close()


if __name__ == "__main__":
    main()
