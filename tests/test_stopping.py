"""How runs end before their last step: told to, killed, or by a mistake. What is left, and the last line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from functools import partial
from pathlib import Path

import pytest
from harness import ROOT, command, environment, events_of, lines_of
from ready import ReadyRun

from distflow.cli import main
from distflow.telemetry.processes import descendants

RUN = ("run", "grpo.yaml", "--run", "tiny.yaml", "--ranks", "2", "--set", "checkpoint.every=1000")
LONG = ("--set", "steps=100000")
WRONG = """
from distflow import node
from torch import Tensor

@node(writes="advantages")
def one_number(rewards: Tensor) -> Tensor:
    return rewards.mean()
"""
PLURAL = """
from distflow import reward

@reward
def plural(completions: str, answers):
    return [1.0 for _ in completions]
"""


@pytest.fixture
def python(workspace, ready):
    """Start `python LINE` in the workspace."""
    started = []

    def start(*line: str, **variables: str) -> ReadyRun:
        started.append(ready.command(*line, folder=workspace, environment=environment() | variables))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.stdout.close()


@pytest.fixture
def distflow(python):
    """Start the command in the workspace."""
    return partial(python, "-m", "distflow.cli")


def until_step(run: ReadyRun, least: int) -> None:
    """Read until a step of at least this number is shown: a long run shows each tenth one."""
    said = []
    for line in run.stdout:
        said.append(line)
        if (shown := re.search(r"step (\d+)/", line)) and int(shown[1]) >= least:
            return
    pytest.fail("".join(said))


def still_alive(processes: set[int], seconds: float = 90.0) -> set[int]:
    """The processes that have not ended in time."""
    until = time.monotonic() + seconds
    while (left := {each for each in processes if Path(f"/proc/{each}/exe").exists()}) and time.monotonic() < until:
        time.sleep(0.05)
    return left


@pytest.mark.smoke
def test_a_run_that_is_told_to_end_keeps_its_step_and_goes_on(distflow, workspace, monkeypatch, capsys):
    run, folder = distflow(*RUN, *LONG, "--name", "told"), workspace / "runs/told"
    until_step(run, 2)
    processes = {run.pid, *descendants(run.pid)}
    run.send_signal(signal.SIGTERM)
    last = run.stdout.read().splitlines()[-1]
    assert run.wait(60) == 128 + signal.SIGTERM
    assert still_alive(processes) == set()
    (checkpoint,) = (folder / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert step >= 2
    assert last == (f"runs/told was stopped after step {step}; its checkpoint of step {step} is kept. Go on:  "
                    "distflow resume runs/told")
    monkeypatch.chdir(workspace)
    assert main(["why", "runs/told"]) == 0
    assert f"It was told to end (Ctrl-C or SIGTERM), and did so after step {step}." in capsys.readouterr().out
    again = distflow("resume", "runs/told", "--set", f"steps={step + 1}", "--set", "roles.actor.learning_rate=1e-5")
    said = again.stdout.read()
    assert again.wait(60) == 0, said
    assert "--nproc-per-node 2" in said, "as many ranks as the run had"
    (changed,) = events_of(folder, "settings_changed")
    assert [changed["settings"][name][1] for name in ("roles.actor.learning_rate", "steps")] == ["1e-05", str(step + 1)]
    settings = (folder / "run.yaml").read_text()
    assert main(["resume", "runs/told", "--set", "steps=1"]) == 2
    assert f"runs/told has done {step + 1} steps, and `steps: 1` is fewer" in capsys.readouterr().err
    assert (folder / "run.yaml").read_text() == settings, "what the steps were made with"
    main(["resume", "runs/told"])
    assert f"distflow resume runs/told --set steps={2 * step + 2}" in "".join(capsys.readouterr())
    assert [line["step"] for line in lines_of(folder / "metrics.jsonl")] == list(range(1, step + 2))


@pytest.mark.run
def test_a_trainer_is_given_the_samples_of_its_last_step(distflow, workspace):
    """Ctrl-C where rollouts sample beside the trainer."""
    run = distflow(*RUN, *LONG, "--name", "told", "--set", "mode=async", "--set", "groups.rollout=1")
    until_step(run, 2)
    run.send_signal(signal.SIGINT)
    said = run.stdout.read()
    assert run.wait(60) == 128 + signal.SIGINT
    assert "runs/told was stopped after step" in said
    assert list((workspace / "runs/told/checkpoints").iterdir())


LATE = """
import os, time
from pathlib import Path
from distflow import reward

@reward
def late(completions):
    asked = Path(f"asked-{os.environ['RANK']}")
    if asked.exists():
        while not Path("told").exists():
            time.sleep(0.05)
        time.sleep(1.0)
    asked.touch()
    return [0.0 for _ in completions]
"""
"""Its second call lasts for a second longer than until the run is told to end."""


@pytest.mark.smoke
def test_a_run_that_is_told_to_end_in_its_last_step_has_ended_well(distflow, workspace):
    (workspace / "late_reward.py").write_text(LATE)
    run = distflow(*RUN, "--name", "whole", "--set", "steps=2", "--set", "imports=[late_reward]",
                   "--set", "nodes.reward.with.reward=late", "--set", "preflight=false")
    until_step(run, 1)
    run.send_signal(signal.SIGTERM)
    (workspace / "told").touch()
    said = run.stdout.read()
    assert run.wait(60) == 0, said
    assert "was stopped" not in said
    assert (workspace / "runs/whole/summary.json").is_file()


@pytest.mark.smoke
def test_a_signal_to_all_processes_at_once_leaves_a_checkpoint_too(python, workspace):
    """As scancel and a container's stop send it."""
    run = python(*command(2, "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--name", "told", *LONG)[1:])
    until_step(run, 2)
    processes = descendants(run.pid)
    for process in (run.pid, *processes):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    said = run.stdout.read()
    assert "runs/told was stopped after step" in said
    assert still_alive(processes) == set()
    metrics = (workspace / "runs/told/metrics.jsonl").read_text().splitlines()
    newest = max(folder.name for folder in (workspace / "runs/told/checkpoints").iterdir())
    assert newest == f"step-{json.loads(metrics[-1])['step']:08d}", said


@pytest.mark.run
def test_nothing_trains_on_when_the_command_is_killed(distflow):
    """And before that, nobody else may go on with the run."""
    run = distflow(*RUN, *LONG, "--name", "killed", "--set", "checkpoint.every=1")
    until_step(run, 4)
    second = distflow("resume", "runs/killed")
    said = second.stdout.read()
    assert second.wait(60) == 2, said
    assert "runs/killed is in use: process" in said
    assert "distflow/launch.py --dag grpo.yaml" in said
    third = distflow(*RUN, "--name", "killed")
    assert "trains it since" in third.stdout.read()
    processes = descendants(run.pid)
    assert len(processes) >= 5, "torchrun, two supervisors and two workers"
    run.kill()
    assert still_alive(processes) == set()


@pytest.mark.smoke
def test_the_reason_is_the_last_thing_on_the_screen(distflow, workspace):
    (workspace / "wrong.py").write_text(WRONG)
    run = distflow(*RUN, "--set", "nodes.advantage.function=wrong:one_number")
    said = run.stdout.read()
    assert run.wait(60) == 1
    reason = "wrong.py:5: wrong:one_number returned a single number for column `advantages`."
    assert said.count(reason) == 1
    assert "in node `advantage`" in said.splitlines()[-1]
    assert "ChildFailedError" not in said
    assert "torch/distributed" not in said


def test_a_reward_of_one_sample_or_of_all(workspace, monkeypatch, capsys):
    (workspace / "wrong.py").write_text(PLURAL)
    monkeypatch.chdir(workspace)
    assert main([*RUN, "--set", "imports=[wrong]", "--set", "nodes.reward.with.reward=plural"]) == 2
    said = capsys.readouterr().err
    assert "wrong.py:5: reward `plural` has the parameter `completions: str`" in said
    assert "completion: str  for one sample" in said


@pytest.mark.run
@pytest.mark.parametrize("told", [0, 1])
def test_one_machine_that_is_told_to_end_ends_the_run_on_all(python, workspace, told):
    """As where a pod's machine is drained. Each machine is a torchrun of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    several = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "--nproc-per-node", "1"]
    run = [str(ROOT / "distflow/launch.py"), "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--name", "told", *LONG]
    torchruns = [python("-m", "torch.distributed.run", "--node-rank", str(rank), *several, *run,
                        DISTFLOW_HOST="127.0.0.1") for rank in range(2)]
    until_step(torchruns[0], 10)
    torchruns[told].send_signal(signal.SIGTERM)
    said = torchruns[0].stdout.read()
    assert [each.wait(90) != 0 for each in torchruns] == [True, True]
    step = len((workspace / "runs/told/metrics.jsonl").read_text().splitlines())
    assert f"runs/told was stopped after step {step}; its checkpoint of step {step} is kept" in said
