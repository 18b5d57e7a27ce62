"""A Slurm of Debian's packages (`apt install slurm-wlm munge`) with several nodes on this machine, for tests: a munged,
a slurmctld and a slurmd for each node of its own, on ports that the system chooses."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
_TIMEOUT, _POLL_INTERVAL = 120.0, 0.1
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=sched_min_interval=0
SlurmdTimeout=10
ReturnToService=2
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 Gres=gpu:1"


def missing() -> str:
    """What keeps a Slurm from being started here; empty if nothing does."""
    if absent := [name for name in PROGRAMS if not shutil.which(name)]:
        return f"no {', '.join(absent)}: apt install slurm-wlm munge"
    return "only root starts it" if os.getuid() else ""


class SlurmCluster:
    """Nodes, which count a GPU each.

    Args:
        folder: an empty one; its path must be short, for a Unix socket.
        environment: of commands and jobs.
        nodes: names.
    """

    def __init__(self, folder: Path, environment: dict[str, str], nodes: Sequence[str] = ("one", "two")):
        self.folder, self.environment = folder, {**environment, "SLURM_CONF": str(folder / "slurm.conf")}
        self.nodes, self.daemons, self.started = nodes, dict[str, subprocess.Popen](), 0
        folder.chmod(0o755)  # the socket is for all
        (folder / "key").write_bytes(secrets.token_bytes(1024))
        (folder / "key").chmod(0o600)
        host, ports = socket.gethostname(), _free_ports(1 + len(nodes))
        lines = [_NODE.format(name=name, host=host, port=port) for name, port in zip(nodes, ports[1:])]
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, host=host, ports=ports,
                                                                 nodes="\n".join(lines)))
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        for name in ("state", *nodes):
            (folder / name).mkdir()

    def wait_until_idle(self) -> None:
        """Start it, and wait until all nodes may be used."""
        files = {"socket": "munge.socket", "key-file": "key", "pid-file": "munged.pid", "log-file": "munged.log",
                 "seed-file": "munged.seed"}
        self._start("munged", "-F", "--force", *(f"--{name}={self.folder / file}" for name, file in files.items()))
        self.until((self.folder / "munge.socket").exists)
        self._start("slurmctld", "-D")
        for name in self.nodes:
            self.start(name)
        self.until(lambda: self.ask("sinfo", "-h", "-o", "%T %D") == f"idle {len(self.nodes)}")

    def start(self, node: str) -> None:
        self._start("slurmd", "-D", "-N", node, name=node)

    def kill(self, node: str) -> None:
        """Kill all processes of a node, its jobs' too, as when the power fails."""
        self.daemons[node].kill()
        self.daemons.pop(node).wait()
        own = [process for process in psutil.process_iter(["environ"])
               if (process.info["environ"] or {}).get("SLURMD_NODENAME") == node]
        above = {parent for process in own for parent in process.parents() if parent.name().startswith("slurmstepd")}
        for process in (*above, *own):  # those above first, or they would report how their jobs have ended
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _start(self, *line: str, name: str = "") -> None:
        self.started += 1
        with open(self.folder / f"{line[0]}{self.started}.out", "w") as log:
            self.daemons[name or line[0]] = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT,
                                                             env=self.environment)

    def ask(self, *line: str) -> str:
        """What a command of Slurm says, such as squeue."""
        done = subprocess.run(line, env=self.environment, capture_output=True, text=True, check=False)
        return done.stdout.strip() or done.stderr.strip()

    def submit(self, *line: str, cwd: Path) -> str:
        """Submit a script, and return the job's number."""
        done = subprocess.run(["sbatch", "--parsable", *line], env=self.environment, cwd=cwd, capture_output=True,
                              text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """As `RUNNING` or `COMPLETED`."""
        return next((word.removeprefix("JobState=") for word in self.ask("scontrol", "show", "job", job).split()
                     if word.startswith("JobState=")), "")

    def until(self, happens: Callable[[], object], log: Path | None = None) -> None:
        """Wait until it happens; else fail with what the daemons and a job have said."""
        end = time.monotonic() + _TIMEOUT
        while not happens():
            assert time.monotonic() < end, self.said(log)
            assert all(each.poll() is None for each in self.daemons.values()), self.said(log)
            time.sleep(_POLL_INTERVAL)

    def said(self, log: Path | None) -> str:
        logs = [*sorted(self.folder.glob("*.out")), *([log] if log and log.exists() else [])]
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in logs)

    def close(self) -> None:
        """End its jobs, then itself."""
        if self.nodes[-1] in self.daemons:
            self.ask("scancel", "--user=root")
            self.until(lambda: not self.ask("squeue", "-h"))
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
            daemon.wait(_TIMEOUT)


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports
