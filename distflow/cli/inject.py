"""`distflow inject`: break a worker of a run that is going on, to see what happens."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
from pathlib import Path

from distflow.errors import InvalidInput, did_you_mean
from distflow.recovery.fault_injection import fill, free
from distflow.telemetry.ettr import read
from distflow.telemetry.processes import began

HELP = "break a worker of a running job: kill it, stop it so that it hangs, or let it have no room on the disk"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}
LIMITS = {"fill": fill, "free": free}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the run's folder, as runs/grpo-1")
    parser.add_argument("kind", choices=[*SIGNALS, *LIMITS],
                        help="kill: SIGKILL. stop: it hangs, until `continue`. fill: none of its files grows beyond "
                        "64 KiB, until `free`")
    parser.add_argument("--rank", type=int, default=0, help="whose worker; default: 0")


def main(options: argparse.Namespace) -> int:
    folder = Path(options.run)
    if not (folder / "events.jsonl").is_file():
        raise InvalidInput(f"{folder} has no events.jsonl, so it is not the folder of a run")
    pid = _worker(folder, options.rank)
    if options.kind in LIMITS:
        LIMITS[options.kind](pid)
    else:
        os.kill(pid, SIGNALS[options.kind])
    print(f"{options.kind}: the worker of rank {options.rank}, process {pid}")
    return 0


def _worker(folder: Path, rank: int) -> int:
    """The process of a rank's worker.

    Raises:
        InvalidInput: it has none, or not on this machine.
    """
    events = [event for event in read(folder) if event["event"] in ("worker ready", "worker ended")]
    last = {event["rank"]: event for event in events}
    if rank not in last:
        raise InvalidInput(f"rank {rank} has had no worker. {did_you_mean(str(rank), map(str, sorted(last)), 'Ranks')}")
    if last[rank]["event"] == "worker ended":
        raise InvalidInput(f"the worker of rank {rank} has ended, and no other is ready yet")
    if last[rank]["host"] != socket.gethostname():
        raise InvalidInput(f"the worker of rank {rank} is on machine {last[rank]['host']}: run this there")
    with contextlib.suppress(OSError):
        if began(last[rank]["pid"]) == last[rank]["began"]:  # and not another process that has its number now
            return last[rank]["pid"]
    raise InvalidInput(f"the worker of rank {rank}, process {last[rank]['pid']}, does not live any more")
