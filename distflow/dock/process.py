"""Shard server as a child process: it reads the token from standard input and prints its address.

The process ends when its standard input closes, that is with its parent. It ignores Ctrl-C and SIGTERM, which may
reach all processes of a run at once: the step that then ends the run needs the shard's samples.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from distflow.dock.errors import DockError
from distflow.dock.selection import DockLayout
from distflow.dock.shard import StorageShardServer
from distflow.rpc.connection import Address

_ROOT = Path(__file__).resolve().parents[2]
_ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 62),
              "MALLOC_TOP_PAD_": str(64 << 20)}
"""glibc keeps the memory of removed batches for new ones: fresh pages cost as much as the bytes that arrive."""


@dataclass
class DockProcess:
    """Running shard server."""

    process: subprocess.Popen[str]
    address: Address

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def kill(self) -> None:
        self.process.kill()
        self.stop()


def start(token: bytes, *, host: str = "127.0.0.1", port: int = 0, max_rows: int = 1 << 20, max_bytes: int = 16 << 30,
          snapshot: Path | None = None, journal: Path | None = None, layout: DockLayout | None = None,
          number: int = 0) -> DockProcess:
    """Start a shard server; the arguments are those of `StorageShardServer`.

    Args:
        layout, number: of a dock in which the process replaces one that has ended, with no rows.

    Raises:
        DockError: it did not come up; its own message stands on standard error.
    """
    command = [sys.executable, "-m", "distflow.dock.process", "--host", host, "--port", str(port),
               "--max-rows", str(max_rows), "--max-bytes", str(max_bytes)]
    command += ["--snapshot", str(snapshot)] if snapshot else []
    command += ["--journal", str(journal)] if journal else []
    paths = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               env={"OMP_NUM_THREADS": "1"} | _ALLOCATOR | os.environ | {"PYTHONPATH": paths})
    assignment = None if layout is None else [layout.to_plain(), number]
    process.stdin.write(f"{token.hex()}\n{json.dumps(assignment)}\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        process.wait()
        raise DockError(f"the shard server at {host}:{port} did not come up (exit code {process.returncode})")
    host, port = json.loads(line)
    return DockProcess(process, (host, port))


def main() -> None:
    parser = argparse.ArgumentParser(description="A storage shard and its indexes; the token, in hex, on stdin.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--max-rows", type=int, default=1 << 20)
    parser.add_argument("--max-bytes", type=int, default=16 << 30)
    parser.add_argument("--snapshot", type=Path)
    parser.add_argument("--journal", type=Path)
    given = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    token = bytes.fromhex(sys.stdin.readline().strip())
    server = StorageShardServer(token, given.host, given.port, max_rows=given.max_rows, max_bytes=given.max_bytes,
                                 snapshot=given.snapshot, journal=given.journal)
    if (assignment := json.loads(sys.stdin.readline())) is not None:
        server.replace(DockLayout.from_plain(assignment[0]), assignment[1])
    print(json.dumps(server.start()), flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()
