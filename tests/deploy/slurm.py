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
_PATIENCE, _LOOK = 60.0, 0.1
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
    absent = [name for name in PROGRAMS if not shutil.which(name)]
    return f"no {', '.join(absent)}: apt install slurm-wlm munge" if absent else "only root starts it" * bool(os.getuid())


class SlurmCluster:
    """Two nodes, `one` and `two`, which count a GPU each. `folder`: its path must be short, for a Unix socket."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.chmod(0o755)  # munge.socket is for all
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        (folder / "key").write_bytes(secrets.token_bytes(1024))
        (folder / "key").chmod(0o600)
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, host=socket.gethostname(),
                                                                 ports=_free_ports(3)))
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        for name in ("state", "one", "two"):
            (folder / name).mkdir()
        socket_file = folder / "munge.socket"
        options = {"socket": socket_file, "key-file": folder / "key", "pid-file": folder / "munged.pid",
                   "log-file": folder / "munged.log", "seed-file": folder / "munged.seed"}
        self.daemons: list[subprocess.Popen] = []
        self._start("munged", "-F", "--force", *(f"--{name}={value}" for name, value in options.items()))
        self.until(socket_file.exists)
        self._start("slurmctld", "-D")
        for name in ("one", "two"):
            self._start("slurmd", "-D", "-N", name)
        self.until(lambda: self.ask("sinfo", "-h", "-o", "%T %D") == "idle 2")

    def _start(self, *line: str) -> None:
        with open(self.folder / f"{line[0]}{len(self.daemons)}.out", "w") as log:
            self.daemons.append(subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, env=self.environment))

    def ask(self, *line: str) -> str:
        """The output of a command of Slurm, such as squeue."""
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

    def until(self, happens: Callable[[], object], seconds: float = _PATIENCE) -> None:
        end = time.monotonic() + seconds
        while not happens():
            assert all(each.poll() is None for each in self.daemons), self.said()
            assert time.monotonic() < end, self.said()
            time.sleep(_LOOK)

    def said(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.out")))

    def close(self) -> None:
        for job in self.ask("squeue", "-h", "-o", "%A").split():
            self.ask("scancel", "--signal=KILL", "--full", job)
            self.ask("scancel", job)
        self.until(lambda: not self.ask("squeue", "-h"))
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(_PATIENCE)


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports
