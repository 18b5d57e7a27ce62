"""Whole runs in which a rank is slow, and in which the loss leaps."""

import json

import pytest
from harness import TINY, events_of, metrics_of

STEPS = 14
SPIKY = '''
from pathlib import Path
import torch
from distflow import node
from workers.functions.advantages import group_advantage

@node(writes="advantages", keep_together="group")
def spiky(rewards: torch.Tensor, group: torch.Tensor, row: torch.Tensor):
    """Once, in the twelfth step, something is badly wrong."""
    found = group_advantage(rewards, group)
    mark = Path(f"leapt-{int(row.min())}")
    if len(row) and int(row.min()) // 32 == 11 and not mark.exists():
        mark.touch()
        found = found + 1e3
    return found
'''


@pytest.mark.parametrize("phase", ["generating"])
def test_a_slow_rank_is_named(launch, workspace, phase):
    faults = [{"kind": "slow", "rank": 1, "step": step, "phase": phase, "seconds": 1.0} for step in range(2, 9)]
    (workspace / "slow.yaml").write_text(f"{TINY}faults: {json.dumps(faults)}\n")
    done = launch(2, "--dag", "grpo.yaml", "--run-file", "slow.yaml", "--name", "slow", "steps=8")
    event, = events_of(workspace / "runs/slow", "straggler")
    assert (event["rank"], event["phase"], event["step"], event["steps"]) == (1, phase, 6, 5)
    assert event["factor"] >= 2
    assert f"step 6: rank 1 is slow: {phase} takes it at least" in done.stdout
    assert events_of(workspace / "runs/slow", "failure") == []


@pytest.fixture
def spiky(workspace):
    (workspace / "spiky.py").write_text(SPIKY)
    dag = (workspace / "grpo.yaml").read_text()
    (workspace / "spiky.yaml").write_text(dag.replace("function: group_advantage", "function: spiky")
                                          .replace("imports: [brevity]", "imports: [brevity, spiky]"))
    return ("--dag", "spiky.yaml", "--run-file", "tiny.yaml", f"steps={STEPS}")


def test_a_loss_that_leaps_is_told_and_the_step_may_be_done_again(launch, workspace, spiky):
    told = launch(2, *spiky, "--name", "told")
    event, *_ = events_of(workspace / "runs/told", "loss_spike")
    assert (event["step"], event["metric"]) == (12, "grad_norm")
    assert "step 12: grad_norm is" in told.stdout
    for mark in workspace.glob("leapt-*"):
        mark.unlink()
    again = launch(2, *spiky, "robust.detectors.loss_spike=restart", "--name", "again")
    failure, = events_of(workspace / "runs/again", "failure")
    assert failure["what"].startswith("step 12: grad_norm is")
    assert (failure["failed_step"], failure["verdict"]) == (12, "starts again")
    assert "the run starts again: rank" in again.stderr
    calm = launch(2, *spiky, "--name", "calm")
    assert "loss_spike" not in calm.stdout
    ours, theirs = (metrics_of(workspace / f"runs/{name}") for name in ("again", "calm"))
    assert sorted(ours) == list(range(1, STEPS + 1))
    for step, line in theirs.items():
        assert ours[step]["loss"] == line["loss"], "the step counts as it was done the second time"
    model = "model/model.safetensors"
    assert (workspace / "runs/again" / model).read_bytes() == (workspace / "runs/calm" / model).read_bytes()
