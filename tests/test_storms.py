"""Whole runs whose workers somebody kills at random, as long as the budget of restarts lasts: they end well."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import TINY, command, environment, events_of, lines_of, metrics_of, require_equal
from ready import ReadyRun

from distflow.telemetry.processes import descendants, parent

GRPO = ("--dag", "grpo.yaml", "--run-file", "storm.yaml")
KILLS, STEPS, LIMIT = 8, 30, 400.0
EXACT = ("reward/mean", "loss", "grad_norm", "response/fingerprint")
RUN_WITH_CLEAR_DRAWS = ("steps=8", "seed=2", "nodes.rollout.with.group_size=2",
                        "roles.actor.generation.max_new_tokens=2")
"""A run whose 128 draws are all at least 3.8e-5 from where another token would be drawn; rows that are sampled in other
company are rounded otherwise, by some 1e-7. Of the 2,048 draws of `TINY` the nearest one is 6e-8 from there."""


@pytest.fixture
def begun(workspace, ready):
    """A run that torchrun starts, while the block lasts; `said` has its output."""

    @contextlib.contextmanager
    def run(ranks: int, *arguments: str) -> Iterator[ReadyRun]:
        with (workspace / "said").open("w") as said:
            torchrun = ready.start(0, command(ranks, *arguments)[1:], workspace, environment(), *[said.fileno()] * 2)
        try:
            yield torchrun
        finally:
            torchrun.kill()

    return run


def workers(torchrun: int) -> Iterator[int]:
    """Those of the seats that a torchrun has started, each of which leads a group of processes."""
    for process in descendants(torchrun):
        with contextlib.suppress(OSError):
            if process != torchrun and parent(parent(process)) == torchrun and os.getpgid(process) == process:
                yield process


def storm(torchrun: ReadyRun, seed: int) -> int:
    """SIGKILL a random worker every 0.05 to 2.5 s, until the budget is used up; how many it was."""
    draw, killed, end = random.Random(seed), 0, time.monotonic() + LIMIT
    while killed < KILLS and torchrun.poll() is None and time.monotonic() < end:
        time.sleep(draw.uniform(0.05, 2.5))
        if found := sorted(workers(torchrun.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(found), signal.SIGKILL)
                killed += 1
    return killed


def stormy(begun: Callable[..., Any], workspace: Path, ranks: int, seed: int, *more: str,
           steps: int = STEPS) -> list[dict]:
    """The events of a run through a storm, which has ended well with each step made once."""
    (workspace / "storm.yaml").write_text(f"{TINY}robust: {{restarts: {KILLS}}}\n")
    with begun(ranks, *GRPO, "--name", "stormy", f"steps={steps}", *more) as torchrun:
        assert storm(torchrun, seed) > 1, (workspace / "said").read_text()[-4000:]
        assert torchrun.wait(LIMIT) == 0, (workspace / "said").read_text()[-4000:]
    lines = lines_of(workspace / "runs/stormy/metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, steps + 1))
    assert json.loads((workspace / "runs/stormy/summary.json").read_text())["steps"] == steps
    return events_of(workspace / "runs/stormy")


@pytest.mark.parametrize("seed", [1, 2])
def test_in_mode_sync_a_storm_changes_no_bit(workspace, begun, run_once, seed):
    events = stormy(begun, workspace, 2, seed)
    assert {event["verdict"] for event in events if event["event"] == "failure"} <= {"starts again"}
    ours, theirs = metrics_of(workspace / "runs/stormy"), metrics_of(
        run_once(2, *GRPO[:2], "--run-file", "tiny.yaml", f"steps={STEPS}"))
    for step, line in theirs.items():
        assert [ours[step][name] for name in EXACT] == [line[name] for name in EXACT], step


def wait_for(text: str, workspace: Path, torchrun: ReadyRun) -> None:
    """Wait until a run, whose output is in `said`, has printed a text."""
    until = time.monotonic() + LIMIT
    while text not in (said := (workspace / "said").read_text()):
        assert torchrun.poll() is None, said[-4000:]
        assert time.monotonic() < until, said[-4000:]
        time.sleep(0.01)


@pytest.mark.skipif(os.geteuid() > 0, reason="mounting needs root")
def test_a_worker_that_starts_again_waits_for_a_run_folder_that_is_read_only(workspace, begun):
    """Another file system, which is read-only, lies over the run folder for a while."""
    (workspace / "storm.yaml").write_text(TINY)
    run = workspace / "runs/away"
    with begun(1, *GRPO, "--name", "away", "steps=200") as torchrun:
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
    assert "is kept. Go on:  distflow resume runs/away" in (workspace / "said").read_text()


def the_dock(torchrun: int) -> int | None:
    """The process that holds the samples of a run."""
    for process in descendants(torchrun):
        with contextlib.suppress(OSError):
            if b"distflow.dock.process" in Path(f"/proc/{process}/cmdline").read_bytes():
                return process
    return None


def test_the_docks_process_may_be_killed(workspace, begun, run_once):
    """Twice. What it held is sampled again, and the trainer does each step once, on the samples of a calm run."""
    with begun(2, *GRPO[:2], "--run-file", "tiny.yaml", "--name", "stormy", *RUN_WITH_CLEAR_DRAWS, "mode=async",
               "groups.rollout=1", "staleness=0") as torchrun:
        for step in (1, 4):
            wait_for(f"step {step}/", workspace, torchrun)
            os.kill(the_dock(torchrun.pid), signal.SIGKILL)
        assert torchrun.wait(LIMIT) == 0, (workspace / "said").read_text()[-4000:]
    require_equal(metrics_of(workspace / "runs/stormy"),
                  metrics_of(run_once(1, *GRPO[:2], "--run-file", "tiny.yaml", *RUN_WITH_CLEAR_DRAWS)))
    lost = [event["what"] for event in events_of(workspace / "runs/stormy", "failure") if event["group"] == "trainer"]
    assert ["what it held is sampled again" in what for what in lost] == [True, True]


@pytest.mark.parametrize("seed", [3])
def test_in_mode_async_a_storm_ends_well(workspace, begun, seed):
    """The trainer and both rollouts are hit, each of which has a budget of its own."""
    stormy(begun, workspace, 3, seed, "mode=async", "groups.rollout=2", steps=3 * STEPS)
