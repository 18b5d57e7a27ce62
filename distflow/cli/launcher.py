"""Starts torchrun from the command line, forwards signals, returns its exit code, and leaves no process behind.

    distflow run ─ this process ─ torchrun (workers/loopback.py) ─ one distflow/launch.py for each GPU ─ its worker

Each of them is killed by the kernel when the one before it dies, so that nothing trains on after a SIGKILL. A first
SIGTERM, SIGHUP or Ctrl-C is passed on, and ends the run after the step under way; a second one ends it at once.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from distflow.config.memory_limit import limit
from distflow.config.run import Robust
from distflow.errors import InvalidInput
from distflow.launch import ROOT
from distflow.telemetry.events import show
from distflow.telemetry.processes import Child, spawn
from distflow.telemetry.screen import terminal

_MARGIN = 10.0
"""Seconds that torchrun waits longer than the run may take to end."""
_DEBOUNCE = 1.0
"""Seconds in which a second signal counts as the first: `timeout` and terminals may send one twice."""
_RANK_GIB = 0.4
"""Host memory of a rank's supervisor and worker together, beside what ranks share, with torch and transformers loaded
and a tiny model: 0.49 GiB were measured."""
_SHOW_CURSOR = "\x1b[?25h"


def torchrun(ranks: int, arguments: list[str], quiet: bool = False, shutdown_timeout: float | None = None) -> int:
    """Print the torchrun line and run it, with a store that only this machine reaches. Return its exit code; 128 and
    the signal's number after a signal. `quiet` prints errors alone; `shutdown_timeout` is the run's."""
    check_memory(ranks)
    path = ROOT / "distflow" / "launch.py"
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    line = ["--nproc-per-node", str(ranks), str(shown), *arguments]
    if not quiet:
        show(shlex.join(["torchrun", "--standalone", *line]))
    return attend(line, quiet, Robust().shutdown_timeout if shutdown_timeout is None else shutdown_timeout)


def check_memory(ranks: int, meminfo: Path = Path("/proc/meminfo")) -> None:
    """Raise InvalidInput: so many processes with torch alone would take more memory than this machine has left or its
    control group allows, and the kernel would end some of them, and others beside them."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE) if meminfo.exists() else None
    free = int(found[1]) / 2**20 if found else math.inf
    allowed = (limit() or math.inf) / 2**30
    most = min(free, allowed)
    if ranks * _RANK_GIB > most:
        has = f"this machine has {free:,.1f} GiB left" if free <= allowed else \
            f"the limit of this control group is {allowed:,.1f} GiB"
        remedy = f"start at most  --ranks {int(most / _RANK_GIB)}" if most >= _RANK_GIB else \
            "free memory first" if free <= allowed else "raise it"
        raise InvalidInput(f"{ranks} rank{'s take' if ranks > 1 else ' takes'} {ranks * _RANK_GIB:,.1f} GiB of host "
                           f"memory or more, without models, and {has}: {remedy}")


def attend(line: list[str], quiet: bool = False, shutdown_timeout: float = 0.0) -> int:
    environment = {"OMP_NUM_THREADS": "1", **os.environ,
                   "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{shutdown_timeout + _MARGIN:.0f}"}
    program = [sys.executable, "-P", str(ROOT / "workers" / "loopback.py"), *line]
    with _Signals().forwarded() as signals:
        # In a session of its own: a terminal's Ctrl-C reaches torchrun once, by this process.
        signals.process = spawn(program, session=True, env=environment, stdout=subprocess.DEVNULL if quiet else None)
        code = signals.process.wait()
    if sys.stdout.isatty():  # a killed progress bar leaves it hidden
        print(_SHOW_CURSOR, end="", file=terminal(), flush=True)
    return _exit_code(code, signals.first)


def _exit_code(code: int, received: int) -> int:
    if received and code:  # without one, the last step had been done
        return 128 + received
    if code < 0:
        print(f"torchrun was ended by {signal.Signals(-code).name}, and the run with it", file=sys.stderr)
        return 128 - code
    return code


class _Signals:
    def __init__(self) -> None:
        self.process: Child | None = None
        self.first, self.at = 0, 0.0

    @contextlib.contextmanager
    def forwarded(self) -> Iterator[_Signals]:
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        handled = [number for number, action in before.items() if action != signal.SIG_IGN]  # nohup ignores SIGHUP
        for number in handled:
            signal.signal(number, self._forward)
        try:
            yield self
        finally:
            for number in handled:
                signal.signal(number, before[number])

    def _forward(self, number: int, _: object) -> None:
        if self.process is None:
            sys.exit(128 + number)
        if not self.first:
            self.first, self.at = number, time.monotonic()
            show("\nending after the step under way; a second Ctrl-C or SIGTERM ends it at once", sys.stderr)
            self.process.signal(signal.SIGINT)  # torchrun passes it on; by SIGTERM it ends ranks after a failure
        elif time.monotonic() - self.at > _DEBOUNCE:
            self.process.signal(signal.SIGKILL)
