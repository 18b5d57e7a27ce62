"""A Slurm of Debian's packages (`apt install slurm-wlm munge`) with two nodes on this machine, for tests: a munged, a
slurmctld and two slurmd of its own, on ports that the system chooses."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
_TIMEOUT, _POLL_INTERVAL = 120.0, 0.1
_DAEMONS = 4
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
ReturnToService=2
GresTypes=gpu
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 Gres=gpu:1
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 Gres=gpu:1
PartitionName=all Nodes=one,two Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """What keeps a Slurm from being started here; empty if nothing does."""
    if absent := [name for name in PROGRAMS if not shutil.which(name)]:
        return f"no {', '.join(absent)}: apt install slurm-wlm munge"
    return "only root starts it" if os.getuid() else ""


class SlurmCluster:
    """Two nodes, `one` and `two`, which count a GPU each.

    Args:
        folder: an empty one; its path must be short, for a Unix socket.
        environment: of commands and jobs.
    """

    def __init__(self, folder: Path, environment: dict[str, str]):
        self.folder, self.environment = folder, {**environment, "SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: list[subprocess.Popen] = []
        folder.chmod(0o755)  # the socket is for all
        (folder / "key").write_bytes(secrets.token_bytes(1024))
        (folder / "key").chmod(0o600)
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, host=socket.gethostname(),
                                                                 ports=_free_ports(3)))
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        for name in ("state", "one", "two"):
            (folder / name).mkdir()

    def wait_until_idle(self) -> None:
        """Start it, and wait until both nodes may be used."""
        files = {"socket": "munge.socket", "key-file": "key", "pid-file": "munged.pid", "log-file": "munged.log",
                 "seed-file": "munged.seed"}
        self._start("munged", "-F", "--force", *(f"--{name}={self.folder / file}" for name, file in files.items()))
        self.until((self.folder / "munge.socket").exists)
        self._start("slurmctld", "-D")
        for name in ("one", "two"):
            self._start("slurmd", "-D", "-N", name)
        self.until(lambda: self.ask("sinfo", "-h", "-o", "%T %D") == "idle 2")

    def _start(self, *line: str) -> None:
        with open(self.folder / f"{line[0]}{len(self.daemons)}.out", "w") as log:
            self.daemons.append(subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, env=self.environment))

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
            assert all(each.poll() is None for each in self.daemons), self.said(log)
            time.sleep(_POLL_INTERVAL)

    def said(self, log: Path | None) -> str:
        logs = [*sorted(self.folder.glob("*.out")), *([log] if log and log.exists() else [])]
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in logs)

    def close(self) -> None:
        """End its jobs, then itself."""
        if len(self.daemons) == _DAEMONS:
            self.ask("scancel", "--user=root")
            self.until(lambda: not self.ask("squeue", "-h"))
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(_TIMEOUT)


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports
