"""Shard server as a child process: it reads its settings from standard input and prints its address.

The process ends when its standard input closes, that is with its parent. It ignores Ctrl-C and SIGTERM, which may
reach all processes of a run at once: the step that then ends the run needs the shard's samples.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from distflow.dock.errors import DockError
from distflow.dock.selection import DockLayout
from distflow.dock.shard import StorageShardServer
from distflow.rpc.connection import Address
from distflow.telemetry.processes import Child, spawn

_ROOT = Path(__file__).resolve().parents[2]
_ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 62),
              "MALLOC_TOP_PAD_": str(64 << 20)}
"""glibc keeps the memory of removed batches for new ones: fresh pages cost as much as the bytes that arrive."""


class DockProcess(NamedTuple):
    """Running shard server, which ends when its standard input closes."""

    process: Child
    address: Address

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def kill(self) -> None:
        self.process.signal(signal.SIGKILL)
        self.stop()


def start(token: bytes, *, host: str = "127.0.0.1", port: int = 0,
          layout: DockLayout | None = None, number: int = 0) -> DockProcess:
    """Start a shard server; the arguments are those of `StorageShardServer`. `layout` and `number` are of a dock in
    which it replaces a process that has ended, with no rows. Raises `DockError` if it does not come up; its own
    message stands on standard error."""
    settings = {"token": token.hex(), "host": host, "port": port, "layout": layout and layout.to_plain(),
                "number": number}
    paths = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = spawn([sys.executable, "-m", "distflow.dock.process"], die_with_parent=0, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    env={"OMP_NUM_THREADS": "1"} | _ALLOCATOR | os.environ | {"PYTHONPATH": paths})
    print(json.dumps(settings), file=process.stdin, flush=True)
    line = process.stdout.readline()
    if not line:
        raise DockError(f"the shard server at {host}:{port} did not come up (exit status {process.wait()})")
    host, port = json.loads(line)
    return DockProcess(process, (host, port))


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    given = json.loads(sys.stdin.readline())
    server = StorageShardServer(bytes.fromhex(given["token"]), given["host"], given["port"])
    if given["layout"]:
        with server.state.lock:
            server.state.configure(DockLayout.from_plain(given["layout"]), given["number"])
    print(json.dumps(server.start()), flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()
