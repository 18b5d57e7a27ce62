"""A process of the dock as a child: started with the token on its standard input, its address on its standard output.

It ends when its standard input closes, that is with whoever started it. Ctrl-C and SIGTERM may reach all processes of
a run at once, and are not for this one: the step that then ends the run needs its samples.
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
from distflow.dock.selection import Address, DockLayout
from distflow.dock.shard import StorageShardServer

_ROOT = Path(__file__).resolve().parents[2]
_ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 62),
              "MALLOC_TOP_PAD_": str(64 << 20)}
"""glibc keeps what parcels leave for those that come: new pages cost as much as the bytes that arrive in them."""


@dataclass
class DockProcess:
    """A running process of the dock."""

    process: subprocess.Popen[str]
    address: Address

    def stop(self) -> None:
        """Close its standard input and wait until it has ended."""
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def kill(self) -> None:
        """End it at once; its rows are gone."""
        self.process.kill()
        self.stop()


def start(token: bytes, *, host: str = "127.0.0.1", port: int = 0, max_rows: int = 1 << 20, max_bytes: int = 16 << 30,
          snapshot: Path | None = None, journal: Path | None = None, layout: DockLayout | None = None,
          number: int = 0) -> DockProcess:
    """Start a process of the dock; the arguments are those of `StorageShardServer`.

    Args:
        layout, number: of a dock in which it takes the place of a process that has ended, with nothing in it.

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
    place = None if layout is None else [layout.to_plain(), number]
    process.stdin.write(f"{token.hex()}\n{json.dumps(place)}\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        process.wait()
        raise DockError(f"the dock's process at {host}:{port} did not come up (exit code {process.returncode})")
    host, port = json.loads(line)
    return DockProcess(process, (host, port))


def main() -> None:
    parser = argparse.ArgumentParser(description="A warehouse and its controllers; the token, in hex, on stdin.")
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
    service = StorageShardServer(token, given.host, given.port, max_rows=given.max_rows, max_bytes=given.max_bytes,
                                 snapshot=given.snapshot, journal=given.journal)
    if (place := json.loads(sys.stdin.readline())) is not None:
        service.replace(DockLayout.from_plain(place[0]), place[1])
    print(json.dumps(service.start()), flush=True)
    sys.stdin.read()
    service.close()


if __name__ == "__main__":
    main()
