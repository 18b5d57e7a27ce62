"""Machines that start apart, for tests and benchmarks: each is a torchrun of its own on one computer, with which the
others share nothing but the store, the network and the run's folder."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.machines import address, within
from distflow.telemetry.ettr import Event, read
from distflow.telemetry.processes import kill_tree

ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT = 240.0
_LOOK = 0.05


class RunLost(Exception):
    """It does not come to its end; with all that its machines have said."""


class Cluster:
    """A store of torch or another one, and machines by name.

    Args:
        cwd: where each of them is started; their logs go there.
        run: the folder of the run that they are for.
        arguments: of launch.py.
        store: address of the store; default: one of this cluster's own.
        hosts: network namespaces, by `machines.machines`, in which the machines are, in the order of their start; the
            store is in the last one. Default: all are on loopback.
    """

    def __init__(self, cwd: Path, run: Path, arguments: Sequence[str], store: str = "", hosts: Sequence[str] = ()):
        self.cwd, self.run, self.arguments, self.hosts = cwd, run, arguments, hosts
        self.machines: dict[str, subprocess.Popen] = {}
        self.environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.store, self.token, self.address = None, secrets.token_hex(16), store
        if not store:
            self._serve()

    def _serve(self) -> None:
        line = [sys.executable, "-m", "distflow.cli", "store", "--port", "0", "--show-token"]
        line = within(self.hosts[-1], *line, "--host", address(len(self.hosts) - 1)) if self.hosts else line
        self.store = subprocess.Popen(line, cwd=self.cwd, env=self.environment, stdout=subprocess.PIPE, text=True)
        text = "".join(self.store.stdout.readline() for _ in range(3))
        self.token, self.address = re.search(r"DISTFLOW_TOKEN=(\w+).*--store (\S+)", text, re.DOTALL).groups()

    def start(self, name: str) -> None:
        """Start a machine of one rank."""
        number = len(self.machines)
        here = {"DISTFLOW_TOKEN": self.token, "DISTFLOW_HOST": address(number) if self.hosts else "127.0.0.1",
                "GLOO_SOCKET_IFNAME": "lo"}
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1",
                str(ROOT / "distflow/launch.py"), *self.arguments, "--store", self.address]
        line = within(self.hosts[number], *line) if self.hosts else line
        with open(self.cwd / f"{name}.log", "w") as log:
            self.machines[name] = subprocess.Popen(line, cwd=self.cwd, env=self.environment | here, stdout=log,
                                                   stderr=subprocess.STDOUT)

    def kill(self, name: str) -> None:
        """Kill all processes of a machine at once, as when the power fails."""
        machine = self.machines.pop(name)
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

    def replace_lost(self) -> None:
        """Start another machine for each that is lost, until the run is done.

        Raises:
            RunLost: one has ended in another way.
        """
        while not any(machine.poll() == 0 for machine in self.machines.values()):
            for name in self.ended_machines():
                if self.machines[name].returncode != -signal.SIGKILL:
                    raise RunLost(self.logs())
                self.kill(name)
                self.start(f"{name}+")
            time.sleep(_LOOK)

    def logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(self.cwd.glob("*.log")))

    def events(self, kind: str) -> list[Event]:
        return [event for event in read(self.run) if event["event"] == kind]

    def close(self) -> None:
        for name in list(self.machines):
            self.kill(name)
        if self.store:
            self.store.kill()
            self.store.wait()
            self.store.stdout.close()
