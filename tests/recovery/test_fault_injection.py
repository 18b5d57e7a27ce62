"""Faults to order: once in a run, on the rank and in the step that were asked for or drawn."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from distflow.config import memory_limit
from distflow.config.robust import Fault
from distflow.config.run import Run
from distflow.recovery.fault_injection import FaultInjector, Injected, UnboundedFault
from distflow.recovery.snapshots import Snapshots, StateShard


def faults(folder: Path, *asked: dict, rank: int = 0, group: str = "trainer", seed: int = 0,
           ranks: range = range(4), snapshots: Snapshots | None = None) -> FaultInjector:
    run = Run.model_construct(seed=seed, faults=[Fault(**each) for each in asked])
    return FaultInjector(run, group, rank, ranks, folder, snapshots or Snapshots())


def hits(made: FaultInjector, steps: range, *phases: str) -> list[tuple[int, str]]:
    """Where it raised."""
    found = []
    for step in steps:
        for phase in phases:
            try:
                made(phase, step)
            except Injected:
                found.append((step, phase))
    return found


def test_a_fault_happens_in_its_step_and_phase_and_once_in_a_run(tmp_path):
    asked = {"kind": "raise", "step": 3, "phase": "training", "rank": 0}
    phases = ("waiting", "training", "saving", "training")
    assert hits(faults(tmp_path, asked), range(1, 6), *phases) == [(3, "training")]
    assert hits(faults(tmp_path, asked), range(1, 6), *phases) == [], "the next worker does the step without it"


def test_one_rank_of_the_group_is_drawn_and_all_know_which(tmp_path):
    asked = [{"kind": "raise", "step": step, "phase": "training"} for step in range(1, 101)]
    found = [hits(faults(tmp_path, *asked, rank=rank, ranks=range(2, 6)), range(1, 101), "training")
             for rank in range(8)]
    steps = sorted(step for each in found for step, _ in each)
    assert steps == list(range(1, 101)), "each on one rank"
    assert [bool(each) for each in found] == [False, False, True, True, True, True, False, False]
    assert all(10 <= len(each) <= 45 for each in found[2:6])


def test_another_group_is_left_alone(tmp_path):
    asked = {"kind": "raise", "step": 1, "phase": "generating", "group": "rollout", "rank": 0}
    assert hits(faults(tmp_path, asked), range(1, 3), "generating") == []
    assert hits(faults(tmp_path, asked, group="rollout"), range(1, 3), "generating") == [(1, "generating")]


def test_without_a_phase_it_comes_at_a_moment_of_the_step(tmp_path):
    made = faults(tmp_path, {"kind": "raise", "step": 2, "rank": 0})
    made("training", 1)
    made("training", 2)  # a timer of at most the last step's length is set
    until = time.monotonic() + 20
    while made.pending is None and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(Injected, match=r"faults\[0\] of the run file was to be raised in step 2"):
        made("saving", 2)


@pytest.mark.parametrize(("kind", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_a_process_is_killed_or_stopped(tmp_path, kind, number):
    child = os.fork()
    if not child:
        try:
            faults(tmp_path, {"kind": kind, "step": 1, "phase": "training", "rank": 0})("training", 1)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, os.WUNTRACED)
    if kind == "stop":
        assert os.WIFSTOPPED(status)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def test_a_limit_of_more_than_is_free_is_none_for_a_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_limit, "_GROUPS", tmp_path)
    for file in ("memory.max", "memory/memory.limit_in_bytes"):  # of the second and the first version
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(str(memory_limit.available() // 2))
    assert not memory_limit.why_unbounded()
    (tmp_path / "memory.max").write_text(str(psutil.virtual_memory().total - 1))
    (tmp_path / "memory/memory.limit_in_bytes").write_text(str(2**62))  # where there is none
    assert memory_limit.why_unbounded()


def test_memory_is_not_taken_where_nothing_limits_it(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_limit, "_GROUPS", tmp_path / "none")
    made = faults(tmp_path, {"kind": "oom", "step": 1, "phase": "training", "rank": 0})
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (256 << 20), before[1]))
    try:
        with pytest.raises(UnboundedFault, match="as nothing limits this process, that would be all"):
            made("training", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_slow_takes_its_time_and_corrupt_changes_the_newest_copy(tmp_path):
    memory = Snapshots()
    for step in (1, 2):
        memory.begin(StateShard(0, 0, step, 0, 1), {"weight": torch.ones(3)}, {"step": step})
    made = faults(tmp_path, {"kind": "slow", "step": 2, "phase": "saving", "seconds": 0.3, "rank": 0},
                  {"kind": "corrupt", "step": 2, "phase": "saving", "rank": 0}, snapshots=memory)
    began = time.monotonic()
    made("saving", 2)
    assert time.monotonic() - began >= 0.3
    assert [shard.step for shard in memory.complete()] == [1]


def test_no_machine_is_lost_that_is_all_of_the_run(tmp_path):
    with pytest.raises(UnboundedFault, match=r"start the machines by themselves \(--store and --machines\)"):
        faults(tmp_path, {"kind": "machine", "step": 2, "phase": "training"})
