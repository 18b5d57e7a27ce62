"""A contender in processes of its own, driven line by line: one JSON order in, one JSON answer out.

`Contender` is the benchmark's end; `serve` is the other, in whichever environment the contender needs (no import here
goes beyond the standard library). Memory is read from outside, for every process that the contender started: the peak
of its resident set since the round began, over what it had before there were any rows; a page that several processes
map counts in equal parts. Linux only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LIMIT = 600.0


class Contender:
    """One side of a benchmark.

    Raises:
        SystemExit: by any method: it failed, or gave no answer in ten minutes; shows its last words.
    """

    def __init__(self, name: str, command: Sequence[str | Path]):
        self.name, self.idle = name, {}
        self.family: dict[int, str] = {}
        self.log = tempfile.TemporaryFile(prefix="contender-")  # noqa: SIM115 - lives as long as the process
        fixed = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "CUDA_VISIBLE_DEVICES": "",
                 "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen([str(part) for part in command], cwd=ROOT, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self.log, text=True,
                                        env=os.environ | fixed)

    def ask(self, do: str, **given: Any) -> Any:
        """Call the method `do` of the object that is served there."""
        self.order(do, **given)
        return self.answer()

    def order(self, do: str, **given: Any) -> None:
        """Call it, and do something else until `answer`."""
        try:
            self.process.stdin.write(json.dumps({"do": do, **given}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("ended") from None

    def answer(self) -> Any:
        if not select.select([self.process.stdout], [], [], _LIMIT)[0]:
            raise self._failed(f"has given no answer in {_LIMIT:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise self._failed("ended without an answer")
        return json.loads(line)

    def measure_baseline(self) -> None:
        """Take what its processes hold now for what they hold without rows."""
        self.idle = {pid: kilobytes(pid, "VmRSS") - shared(pid) for pid in _family(self.process.pid)}

    def used(self) -> float:
        """Return the seconds of processor time that its processes have used so far."""
        stats = [_stat(pid) for pid in _family(self.process.pid)]
        return sum(int(fields[11]) + int(fields[12]) for fields in stats if fields) / os.sysconf("SC_CLK_TCK")

    def forget_peaks(self) -> None:
        for pid in self.idle:
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    def peak(self) -> int:
        """Return the bytes that its processes held at most, together, beside what they hold without rows."""
        return sum(1024 * max(0, kilobytes(pid, "VmHWM") - shared(pid) - idle) for pid, idle in self.idle.items())

    def begin_close(self) -> None:
        """No more orders: it begins to end."""
        self.family |= {pid: _started(pid) for pid in _family(self.process.pid)}
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self) -> None:
        """Wait for its end, and end whatever it started that outlives it."""
        self.begin_close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        deadline = time.monotonic() + 5
        while (left := [pid for pid, since in self.family.items() if since and _started(pid) == since]) \
                and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _failed(self, what: str) -> SystemExit:
        self.close()
        self.log.seek(0)
        tail = self.log.read()[-6000:].decode(errors="replace")
        return SystemExit(f"{tail}\n{self.name} {what}; above is what it said last")


def await_calm(contenders: Sequence[Contender], share: float = 0.5, limit: float = 20.0) -> None:
    """Wait until the contenders use less than `share` of one processor: what starts or ends behind one would disturb
    another."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        before, since = sum(contender.used() for contender in contenders), time.monotonic()
        time.sleep(0.5)
        if sum(contender.used() for contender in contenders) - before < share * (time.monotonic() - since):
            return


def serve(target: Any) -> None:
    """Answer orders from stdin by `target`'s methods until there are none; all that is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        method: Callable[..., Any] = getattr(target, order.pop("do"))
        print(json.dumps(method(**order)), file=answers, flush=True)


def _family(root: int) -> list[int]:
    """Return a process and all that descend from it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            parents[int(entry.name)] = int(fields[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _stat(pid: int) -> list[str]:
    """Return the fields after the command's name; none if the process is gone or only waits to be buried."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields


def _started(pid: int) -> str:
    """Return when it was started: a number may be given to another process later."""
    fields = _stat(pid)
    return fields[19] if fields else ""


def shared(pid: int) -> int:
    """Return the resident kilobytes that other processes account for: a page that n of them map counts 1/n each."""
    with contextlib.suppress(OSError):
        lines = dict(line.split()[:2] for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
        return int(lines["Rss:"]) - int(lines["Pss:"])
    return 0


def kilobytes(pid: int | str, name: str) -> int:
    """Return a number of /proc/PID/status; 0 if the process has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return 0
