"""Whole runs whose workers somebody kills at random, as long as the budget of restarts lasts: they end well."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import TINY, command, environment, metrics_of

from distflow.telemetry.processes import descendants, parent

GRPO = ("--dag", "grpo.yaml", "--run-file", "storm.yaml")
KILLS, STEPS, LIMIT = 8, 30, 400.0
EXACT = ("reward/mean", "loss", "grad_norm", "response/fingerprint")
RUN_WITH_CLEAR_DRAWS = ("--set", "steps=8", "--set", "seed=2", "--set", "nodes.rollout.with.group_size=2", "--set",
                        "roles.actor.generation.max_new_tokens=2")
"""A run whose 128 draws are all at least 3.8e-5 from where another token would be drawn; rows that are sampled in other
company are rounded otherwise, by some 1e-7. Of the 2,048 draws of `TINY` the nearest one is 6e-8 from there."""


def workers(torchrun: int) -> Iterator[int]:
    """Those of the seats that a torchrun has started, each of which leads a group of processes."""
    for process in descendants(torchrun):
        with contextlib.suppress(OSError):
            if process != torchrun and parent(parent(process)) == torchrun and os.getpgid(process) == process:
                yield process


def storm(torchrun: subprocess.Popen, seed: int) -> int:
    """SIGKILL a random worker every 0.05 to 2.5 s, until the budget is used up; how many it was."""
    draw, killed, end = random.Random(seed), 0, time.monotonic() + LIMIT
    while killed < KILLS and torchrun.poll() is None and time.monotonic() < end:
        time.sleep(draw.uniform(0.05, 2.5))
        if found := sorted(workers(torchrun.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(found), signal.SIGKILL)
                killed += 1
    return killed


def stormy(workspace: Path, ranks: int, seed: int, *more: str, steps: int = STEPS) -> list[dict]:
    """The events of a run through a storm, which has ended well with each step made once."""
    (workspace / "storm.yaml").write_text(f"{TINY}robust: {{restarts: {KILLS}}}\n")
    line = command(ranks, *GRPO, "--name", "stormy", "--set", f"steps={steps}", *more)
    with (workspace / "said").open("w") as said:
        torchrun = subprocess.Popen(line, cwd=workspace, env=environment(), stdout=said, stderr=said)
        try:
            assert storm(torchrun, seed) > 1, (workspace / "said").read_text()[-4000:]
            assert torchrun.wait(LIMIT) == 0, (workspace / "said").read_text()[-4000:]
        finally:
            torchrun.kill()
            torchrun.wait()
    lines = [json.loads(line) for line in (workspace / "runs/stormy/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, steps + 1))
    assert json.loads((workspace / "runs/stormy/summary.json").read_text())["steps"] == steps
    return [json.loads(line) for line in (workspace / "runs/stormy/events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_in_mode_sync_a_storm_changes_no_bit(launch, workspace, seed):
    (workspace / "storm.yaml").write_text(TINY)
    launch(2, *GRPO, "--name", "calm", "--set", f"steps={STEPS}")
    events = stormy(workspace, 2, seed)
    assert {event["verdict"] for event in events if event["event"] == "failure"} <= {"starts again"}
    ours, theirs = (metrics_of(workspace / f"runs/{name}") for name in ("stormy", "calm"))
    for step, line in theirs.items():
        assert [ours[step][name] for name in EXACT] == [line[name] for name in EXACT], step


def wait_for(text: str, workspace: Path, torchrun: subprocess.Popen) -> None:
    """Wait until a run, whose output is in `said`, has printed a text."""
    until = time.monotonic() + LIMIT
    while text not in (said := (workspace / "said").read_text()):
        assert torchrun.poll() is None, said[-4000:]
        assert time.monotonic() < until, said[-4000:]
        time.sleep(0.01)


@pytest.mark.run
@pytest.mark.skipif(os.geteuid() > 0, reason="mounting needs root")
def test_a_worker_that_starts_again_waits_for_a_run_folder_that_is_read_only(workspace):
    """Another file system, which is read-only, lies over the run folder for a while."""
    (workspace / "storm.yaml").write_text(TINY)
    run, line = workspace / "runs/away", command(1, *GRPO, "--name", "away", "--set", "steps=200")
    with (workspace / "said").open("w") as said:
        torchrun = subprocess.Popen(line, cwd=workspace, env=environment(), stdout=said, stderr=said)
        try:
            wait_for("step 1/", workspace, torchrun)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", run], check=True)
            try:
                os.kill(next(workers(torchrun.pid)), signal.SIGKILL)
                wait_for("away cannot be written: Read-only file system. It is waited for", workspace, torchrun)
            finally:
                subprocess.run(["umount", "-l", run], check=True)
            wait_for("away can be written again.", workspace, torchrun)
            done = len(metrics_of(run))
            while len(metrics_of(run)) < done + 2:
                assert torchrun.poll() is None, (workspace / "said").read_text()[-4000:]
                time.sleep(0.05)
            torchrun.send_signal(signal.SIGINT)
            torchrun.wait(LIMIT)
        finally:
            torchrun.kill()
            torchrun.wait()
    assert "distflow resume runs/away" in (workspace / "said").read_text().splitlines()[-1]
    assert json.loads((run / "run.lock").read_text() or "{}") == {}


def the_dock(torchrun: int) -> int | None:
    """The process that holds the samples of a run."""
    for process in descendants(torchrun):
        with contextlib.suppress(OSError):
            if b"distflow.dock.process" in Path(f"/proc/{process}/cmdline").read_bytes():
                return process
    return None


def test_the_docks_process_may_be_killed(launch, workspace):
    """Twice. What it held is sampled again, and the trainer does each step once, on the samples of a calm run."""
    (workspace / "storm.yaml").write_text(TINY)
    launch(1, *GRPO, "--name", "calm", *RUN_WITH_CLEAR_DRAWS)
    line = command(2, *GRPO, "--name", "stormy", *RUN_WITH_CLEAR_DRAWS, "--set", "mode=async", "--set",
                   "groups.rollout=1", "--set", "staleness=0")
    with (workspace / "said").open("w") as said:
        torchrun = subprocess.Popen(line, cwd=workspace, env=environment(), stdout=said, stderr=said)
        try:
            for step in (1, 4):
                while f"step {step}/" not in (workspace / "said").read_text():
                    assert torchrun.poll() is None, (workspace / "said").read_text()[-4000:]
                    time.sleep(0.01)
                os.kill(the_dock(torchrun.pid), signal.SIGKILL)
            assert torchrun.wait(LIMIT) == 0, (workspace / "said").read_text()[-4000:]
        finally:
            torchrun.kill()
            torchrun.wait()
    ours, theirs = (metrics_of(workspace / f"runs/{name}") for name in ("stormy", "calm"))
    assert list(ours) == list(theirs)
    for step, line in theirs.items():
        assert ours[step]["response/fingerprint"] == line["response/fingerprint"], step
        assert ours[step]["loss"] == pytest.approx(line["loss"], abs=1e-5), step
    events = [json.loads(line) for line in (workspace / "runs/stormy/events.jsonl").read_text().splitlines()]
    lost = [event for event in events if event["event"] == "failure" and event["group"] == "trainer"]
    assert len(lost) == 2
    assert all("what it held is sampled again" in event["what"] for event in lost)


@pytest.mark.run
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_in_mode_async_a_storm_ends_well(workspace, seed):
    """The trainer and both rollouts are hit, each of which has a budget of its own."""
    stormy(workspace, 3, seed, "--set", "mode=async", "--set", "groups.rollout=2", steps=3 * STEPS)
