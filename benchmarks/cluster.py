"""Machines that start apart, for tests and benchmarks: each is a torchrun of its own on one computer, with which the
others share nothing but the store, the network and the run's folder."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.runs import ROOT, environment, torchrun
from distflow.telemetry.ettr import Event, read
from distflow.telemetry.processes import kill_tree

_TIMEOUT = 240.0
_LOOK = 0.05


class RunLost(Exception):
    """It does not come to its end; with all that its machines have said."""


class Cluster:
    """Machines by name, which meet at an etcd.

    Args:
        cwd: where each of them is started; their logs go there.
        run: the folder of the run that they are for.
        arguments: of launch.py.
        store: address of the etcd, and the run's name there.
    """

    def __init__(self, cwd: Path, run: Path, arguments: Sequence[str], store: str):
        self.cwd, self.run, self.arguments = cwd, run, arguments
        self.machines: dict[str, subprocess.Popen] = {}
        self.environment = environment(PYTHONPATH=str(ROOT))
        self.token, self.address = secrets.token_hex(16), store

    def start(self, name: str) -> None:
        """Start a machine of one rank."""
        here = {"DISTFLOW_TOKEN": self.token, "DISTFLOW_HOST": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        line = torchrun(1, ROOT / "distflow/launch.py", *self.arguments, "--store", self.address)
        with open(self.cwd / f"{name}.log", "w") as log:
            self.machines[name] = subprocess.Popen(line, cwd=self.cwd, env=self.environment | here, stdout=log,
                                                   stderr=subprocess.STDOUT)

    def kill(self, name: str, after: float = 0.0) -> None:
        """Kill all processes of a machine at once, as when the power fails, unless they end by themselves before."""
        machine = self.machines.pop(name)
        with contextlib.suppress(subprocess.TimeoutExpired):
            machine.wait(after)
        if machine.poll() is None:
            kill_tree(machine.pid)
        machine.wait()

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has done a step."""
        self.wait_until(lambda: bool(self.machines_that_logged(f"step {step}/")))

    def machines_that_logged(self, text: str) -> list[str]:
        """Return the machines whose log has this text."""
        return [name for name in self.machines if text in (self.cwd / f"{name}.log").read_text()]

    def ended_machines(self) -> list[str]:
        return [name for name, machine in self.machines.items() if machine.poll() is not None]

    def wait_until(self, happens: Callable[[], object]) -> None:
        """Raises:
            RunLost: it does not.
        """
        until = time.monotonic() + _TIMEOUT
        while not happens():
            if len(self.ended_machines()) == len(self.machines) or time.monotonic() > until:
                raise RunLost(self.logs())
            time.sleep(_LOOK)

    def wait_for_exit(self) -> dict[str, int]:
        """Wait until all machines that are left have ended, and return the exit status of each.

        Raises:
            RunLost: they do not end.
        """
        try:
            return {name: machine.wait(_TIMEOUT) for name, machine in self.machines.items()}
        except subprocess.TimeoutExpired:
            raise RunLost(self.logs()) from None

    def logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(self.cwd.glob("*.log")))

    def events(self, kind: str) -> list[Event]:
        return [event for event in read(self.run) if event["event"] == kind]

    def close(self) -> None:
        for name in list(self.machines):
            self.kill(name)
