"""Whole runs whose critic trains on ranks of its own: the losses of one trainer, checkpoints of both, faults."""

from __future__ import annotations

import json

import pytest
from harness import ROOT, metrics_of
from test_modes import STRICT, require_equal

from distflow.telemetry.run_reader import RunReader

PPO = ("--dag", "ppo.yaml", "--run-file", "tiny.yaml", "--set", "steps=3", "--set", "checkpoint.every=2")
OF_CRITIC = ("value/loss", "value/grad_norm", "value/explained", "value/mean")


@pytest.fixture
def ppo(workspace, launch):
    """Start a run of PPO with a reward that tiny models get. Return its steps, with what all trainers have reported."""
    shipped = (ROOT / "dags/ppo.yaml").read_text()
    (workspace / "ppo.yaml").write_text(
        shipped.replace("function: score, ", "function: score, with: {reward: brevity}, ") + "imports: [brevity]\n")

    def run(ranks, name, *settings):
        launch(ranks, *PPO, *settings, "--name", name)
        return {step["step"]: step for step in RunReader(workspace / f"runs/{name}").timed_steps()}

    return run


def test_a_critic_may_train_apart(ppo, workspace):
    """One of its ranks is killed before it trains in the second step. Mode sync: `test_rank_invariance.py`."""
    together = ppo(1, "together", "--set", "mode=sync")
    killed = "faults=[{kind: kill, group: trainer, rank: 2, phase: training, step: 2}]"
    apart = ppo(4, "apart", "--set", "mode=async", *STRICT, "--set", "groups={rollout: 1, trainers: {critic: 2}}",
                "--set", killed)
    require_equal(metrics_of(workspace / "runs/apart"), metrics_of(workspace / "runs/together"), steps=(1, 2, 3))
    for step in (1, 2, 3):
        for metric in OF_CRITIC:
            assert apart[step][metric] == pytest.approx(together[step][metric], abs=1e-5, rel=1e-3), metric
        assert apart[step].keys() >= {"seconds/values", "waiting/node/values", "critic/waiting/node/advantage"}
    events = [json.loads(line) for line in (workspace / "runs/apart/events.jsonl").read_text().splitlines()]
    failure, = (event for event in events if event["event"] == "failure")
    assert (failure["group"], failure["ranks"], failure["verdict"]) == ("trainer critic", [2, 3], "starts again")
    assert {event["rank"] for event in events if event["event"] == "worker started" and event["attempt"]} == {2, 3}
