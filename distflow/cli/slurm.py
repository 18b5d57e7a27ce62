"""`distflow run --slurm`: the script by which sbatch would start a run, made from `deploy/slurm/train.sbatch`, or from
`machines.sbatch` beside it where machines may come and go."""

from __future__ import annotations

import argparse
import re
import shlex
import sys

from distflow.config.command_line import span_of
from distflow.config.spec import Spec
from distflow.errors import InvalidInput, nearest
from distflow.launch import ROOT
from distflow.plan import Plan

_FOLDER = next(path for path in (ROOT / "distflow/deploy/slurm", ROOT / "deploy/slurm") if path.is_dir())
"""In the package when it is installed, else in the clone."""
_HEAD = re.compile(r"(?:^#SBATCH .*\n)+", re.MULTILINE)
_LINE = re.compile(r"^#SBATCH --([a-z-]+)=?(.*)$", re.MULTILINE)
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
_OPTIONS = re.findall(r"\S+", """
    account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container
    container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot
    dependency distribution error exclude exclusive export export-file extra extra-node-info get-user-env gid
    gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gres gres-flags hint hold ignore-pbs input job-name
    kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus
    network nice no-kill no-requeue nodefile nodelist nodes open-mode output overcommit oversubscribe parsable
    partition power prefer priority profile propagate qos quiet reboot requeue reservation resv-ports segment
    signal sockets-per-node spread-job stepmgr switches test-only thread-spec threads-per-core time time-min tmp
    tres-bind uid use-min-nodes verbose wait wait-all-nodes wckey""")
"""Options of sbatch (https://slurm.schedmd.com/sbatch.html) but those on tasks. Plugins of a site may add more."""
_OPTION = re.compile(r"([a-z][a-z-]*)=(\S+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slurm", metavar="KEY=VALUE", nargs="*",
                        help="start nothing, and print the script by which sbatch would start it, with these options "
                        "of sbatch, as  --slurm nodes=2 gpus-per-node=8 time=24:00:00 partition=gpu; instead of nodes, "
                        "machines=3:4 store=etcd://HOST:2379/RUN  for machines that may come and go")


class SlurmJob:
    """Job of a run on several machines. `given`: options of sbatch as KEY=VALUE; others have the script's defaults.
    With `machines` and `store` each machine is a task of an array, so that Slurm replaces a lost one alone."""

    def __init__(self, given: list[str]):
        self.given = _options(given)
        self.meeting = {key: self.given.pop(key) for key in ("machines", "store") if key in self.given}
        if self.meeting:
            self.given = {"array": f"1-{self._most()}", **self.given}
        self.template = (_FOLDER / f"{'machines' if self.meeting else 'train'}.sbatch").read_text(encoding="utf-8")
        self.notes = [f"sbatch itself has no option --{key}. {_meant(key)}".rstrip()
                      for key in self.given if key not in _OPTIONS]
        self.sbatch = dict(_LINE.findall(self.template)) | self.given
        self.gpus = _number("gpus-per-node", self.sbatch["gpus-per-node"])
        self.machines = self._most() if self.meeting else _number("nodes", self.sbatch["nodes"])

    def _most(self) -> int:
        """Return how many machines there may be at most."""
        if len(self.meeting) < 2 or "nodes" in self.given:
            raise InvalidInput("--slurm: machines that may come and go meet at an etcd, and each is a task with one "
                               "node. Write both, and no nodes:  --slurm machines=3:4 store=etcd://HOST:2379/RUN")
        return span_of(self.meeting["machines"])[1]

    def ranks(self, asked: int | None) -> int:
        if asked is None and not self.gpus:
            raise InvalidInput("--slurm gpus-per-node=0: say how many ranks all machines together have on CPUs:  "
                               f"--ranks {2 * self.machines}")
        return self.machines * self.gpus if asked is None else asked

    def script(self, spec: Spec, plan: Plan, name: str | None, arguments: list[str]) -> str:
        """Return the script. `name`: of the run; default: one with the job's number. `arguments`: of launch.py."""
        each, left = divmod(plan.ranks, self.machines)
        if left:
            raise InvalidInput(f"{plan.ranks} ranks on {self.machines} machines: each starts equally many. Write  "
                               f"--ranks {(each + 1) * self.machines}")
        settings = {"python": shlex.quote(sys.executable), "ranks": str(each), "output": shlex.quote(spec.run.output),
                    "arguments": f'({shlex.join(arguments)} "$@")'}
        settings |= {"name": shlex.quote(name)} if name else {}
        settings |= {key: shlex.quote(value) for key, value in self.meeting.items()}
        sbatch = {**self.sbatch, "job-name": plan.name, **self.given}
        return _filled(self.template, sbatch, settings)


def _options(given: list[str]) -> dict[str, str]:
    options = {}
    for each in given:
        if not (found := _OPTION.fullmatch(each)):
            raise InvalidInput(f"--slurm {each}: write options of sbatch after the DAG, as KEY=VALUE without dashes "
                               "before them and spaces in them:  distflow run grpo --slurm nodes=2 partition=gpu")
        options[found[1]] = found[2]
    if wrong := next((key for key in options if key.startswith("ntasks")), None):
        raise InvalidInput(f"--slurm {wrong}={options[wrong]}: each machine has one task, a torchrun that starts a "
                           "rank for each GPU. Instead:  --slurm gpus-per-node=8")
    for key in ("time", "time-min"):
        if key in options and not _TIME.fullmatch(options[key]):
            raise InvalidInput(f"--slurm {key}={options[key]}: sbatch reads HH:MM:SS, D-HH or minutes, as  "
                               f"--slurm {key}=24:00:00")
    return options


def _meant(key: str) -> str:
    near = nearest(key, _OPTIONS)
    return f"Did you mean `{near}`?" if near else ""


def _number(key: str, value: str) -> int:
    """Return how many; GPUs may have a type before the number, as `a100:8`."""
    number = value.rpartition(":")[2]
    if not number.isdecimal() or (key == "nodes" and not int(number)):
        raise InvalidInput(f"--slurm {key}={value}: write a number, as  --slurm {key}=2")
    return int(number)


def _filled(template: str, sbatch: dict[str, str], settings: dict[str, str]) -> str:
    lines = [f"#SBATCH --{key}{'=' * bool(value)}{value}\n" for key, value in sbatch.items()
             if (key, value) != ("gpus-per-node", "0")]
    text = _HEAD.sub(lambda _: "".join(lines), template, count=1)
    for name, value in settings.items():
        text = re.sub(rf"^{name}=.*$", lambda _, line=f"{name}={value}": line, text, count=1, flags=re.MULTILINE)
    return text
