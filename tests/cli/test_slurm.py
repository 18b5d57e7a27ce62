"""`distflow run --slurm`: the script that it prints, and the mistakes that it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from harness import ROOT

from distflow.cli import main

SHIPPED = ROOT / "deploy/slurm/train.sbatch"
RUN = ("run", "grpo.yaml", "--run", "tiny.yaml")


@pytest.fixture
def printed(workspace, monkeypatch, capsys):
    monkeypatch.chdir(workspace)

    def run(*arguments: str) -> str:
        assert main([*RUN, *arguments]) == 0
        return capsys.readouterr().out

    return run


def head(script: str) -> list[str]:
    return re.findall(r"^#SBATCH --(.*)$", script, re.MULTILINE)


def body(script: str) -> list[str]:
    return [line for line in script.splitlines() if not line.startswith("#SBATCH")]


def settings(script: str) -> dict[str, str]:
    """What bash makes of the settings of the script, each argument on a line of its own."""
    lines = script.partition("# Settings;")[2].splitlines()[1:6]
    names = [line.partition("=")[0] for line in lines]
    assert names == ["python", "ranks", "output", "name", "arguments"]
    show = "\n".join(f'printf "%s\\n" {name} "${{{name}[@]}}" "end of it"' for name in names)
    done = subprocess.run(["bash", "-euc", "\n".join([*lines, show]), "bash", "further"], capture_output=True,
                          text=True, check=True, env={"SLURM_JOB_NAME": "grpo", "SLURM_JOB_ID": "7"})
    return {name: value for name, _, value in (part.strip().partition("\n") for part in
                                               done.stdout.split("end of it")[:-1])}


def test_the_options_are_those_that_are_given_and_the_shipped_ones(printed):
    script = printed("--slurm", "nodes=3", "gpus-per-node=a100:2", "time=1:00:00", "partition=gpu", "mem=0")
    assert head(script) == ["job-name=grpo", "nodes=3", "ntasks-per-node=1", "gpus-per-node=a100:2", "exclusive",
                            "time=1:00:00", "signal=B:USR1@300", "requeue", "open-mode=append", "output=%x-%j.log",
                            "partition=gpu", "mem=0"]
    assert settings(script)["ranks"] == "2"
    assert head(printed("--slurm"))[1:4:2] == ["nodes=2", "gpus-per-node=8"]


def test_an_option_that_sbatch_does_not_have_is_noted(workspace, monkeypatch, capsys):
    monkeypatch.chdir(workspace)
    assert main([*RUN, "--slurm", "node=3", "container-image=own.sqsh", "qos=high"]) == 0
    said = capsys.readouterr().err
    assert "note: sbatch itself has no option --node. Did you mean `nodes`?\n" in said
    assert "note: sbatch itself has no option --container-image." in said, "of a plugin, perhaps"
    assert "qos" not in said


def test_the_settings_are_those_of_the_run(printed):
    script = printed("--set", "output=my runs", "--set", "steps=3", "--set", "roles.actor.generation.stop=['a \"b']",
                     "--slurm", "gpus-per-node=1")
    assert settings(script) == {
        "python": sys.executable, "ranks": "1", "output": "my runs", "name": "grpo-7",
        "arguments": "\n".join(["--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--set", "output=my runs", "--set",
                                "steps=3", "--set", "roles.actor.generation.stop=['a \"b']", "further"])}
    changed = [line for line, shipped in zip(body(script), body(SHIPPED.read_text())) if line != shipped]
    assert [line.partition("=")[0] for line in changed] == ["python", "ranks", "output", "arguments"]


def test_on_cpus_no_gpu_is_asked_for(printed):
    script = printed("--slurm", "gpus-per-node=0", "--ranks", "4", "--name", "mine")
    assert not [option for option in head(script) if "gpu" in option]
    assert (settings(script)["ranks"], settings(script)["name"]) == ("2", "mine")


COME_AND_GO = ("--set", "mode=async", "--set", "groups.rollout=2", "--slurm", "machines=2:3",
               "store=etcd://head:2379/mine", "gpus-per-node=1")


def test_machines_that_come_and_go_are_tasks_of_an_array(printed):
    script = printed("--name", "mine", *COME_AND_GO)
    assert {"array=1-3", "nodes=1", "gpus-per-node=1", "requeue"} <= {*head(script)}
    assert {"machines=2:3", "store=etcd://head:2379/mine", "name=mine", "ranks=1"} <= {*script.splitlines()}


@pytest.mark.parametrize("arguments", [(), ("--set", "output=it's", "--slurm"), COME_AND_GO],
                         ids=["shipped", "printed", "machines"])
def test_it_is_bash(printed, workspace, arguments):
    script = printed(*arguments) if arguments else SHIPPED.read_text()
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(os.access(path, os.X_OK) for path in SHIPPED.parent.iterdir())


MISTAKES = {
    "no number": (["--slurm", "nodes=some"], "--slurm nodes=some: write a number, as  --slurm nodes=2"),
    "no machine": (["--slurm", "nodes=0"], "write a number"),
    "the DAG comes last": (["--slurm", "grpo"], "KEY=VALUE"),
    "dashes": (["--slurm=--nodes=2"], "without dashes"),
    "a task for each GPU": (["--slurm", "ntasks-per-node=8"], "Instead:  --slurm gpus-per-node=8"),
    "a time of no form": (["--slurm", "time=24h"], "reads HH:MM:SS, D-HH or minutes, as  --slurm time=24:00:00"),
    "no rank": (["--slurm", "gpus-per-node=0"], "--ranks 4"),
    "unequal": (["--slurm", "nodes=2", "--ranks", "3"], "3 ranks on 2 machines: each starts equally many. Write  "
                "--ranks 4"),
    "machines without a store": (["--slurm", "machines=3:4"], "Write both, and no nodes"),
    "machines that are nodes": (["--slurm", "machines=2", "store=etcd://h:1/a", "nodes=2"], "Write both, and no nodes"),
    "fewer machines than enough": (["--slurm", "machines=4:3", "store=etcd://h:1/a"], "--machines 4:3: say how many"),
    "a mistake in the run": (["--set", "mode=asynk", "--slurm"], "async"),
}


@pytest.mark.parametrize(("arguments", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_refused_before_the_queue(workspace, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(workspace)
    assert main([*RUN, *arguments]) == 2
    output = capsys.readouterr()
    assert said in output.err
    assert output.out == ""
