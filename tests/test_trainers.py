"""Whole runs with a critic or frozen roles on ranks of their own (`first` of `layouts`): losses of one rank, faults."""

from __future__ import annotations

import json

import pytest
from harness import ROOT, SEED_WITH_CLEAR_DRAWS, metrics_of
from test_modes import STRICT, require_equal

from distflow.telemetry.run_reader import RunReader

PPO = ("--dag", "ppo.yaml", "--run-file", "tiny.yaml", *SEED_WITH_CLEAR_DRAWS, "--set", "steps=3", "--set",
       "checkpoint.every=2")
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


def test_layouts_let_a_critic_train_on_ranks_of_its_own(ppo, workspace):
    """In mode async, one of its ranks is killed before it trains in the second step. Mode sync:
    `test_rank_invariance.py`."""
    together = ppo(1, "together", "--set", "mode=sync")
    killed = "faults=[{kind: kill, group: trainer, rank: 2, phase: training, step: 2}]"
    apart = ppo(4, "apart", "--set", "mode=async", *STRICT, "--set", "groups.rollout=1", "--set",
                "layouts={critic: {first: 1}}", "--set", killed)
    require_equal(metrics_of(workspace / "runs/apart"), metrics_of(workspace / "runs/together"), steps=(1, 2, 3))
    for step in (1, 2, 3):
        for metric in OF_CRITIC:
            assert apart[step][metric] == pytest.approx(together[step][metric], abs=1e-5, rel=1e-3), metric
    events = [json.loads(line) for line in (workspace / "runs/apart/events.jsonl").read_text().splitlines()]
    failure, = (event for event in events if event["event"] == "failure")
    assert (failure["group"], failure["verdict"]) == ("trainer", "starts again")
    assert 2 in failure["ranks"], "and whichever others have noticed first"
    assert {event["rank"] for event in events if event["event"] == "worker_started" and event["attempt"]} == {0, 1, 2}


SPLITS = {
    "semi_sync": (3, "mode=semi_sync", "groups.rollout=1", "staleness=0", "layouts={critic: {first: 1}}"),
    "replicas": (4, "layouts={critic: {first: 2}}", "roles.actor.replicas=2"),
    "tokens": (3, "layouts={critic: {first: 2}, update: {cp: 2}}"),
    "matrices": (4, "layouts={critic: {first: 2, tp: 2}, update: {tp: 2}}")}


@pytest.mark.parametrize("case", SPLITS)
def test_layouts_first_goes_with_other_modes_and_splits(ppo, workspace, case):
    heads = ("--set", "roles.actor.model.kv_heads=2")
    together = ppo(1, "together", *heads)
    ranks, *settings = SPLITS[case]
    apart = ppo(ranks, "apart", *heads, *(part for each in settings for part in ("--set", each)))
    require_equal(metrics_of(workspace / "runs/apart"), metrics_of(workspace / "runs/together"), steps=(1, 2, 3))
    for step, metric in ((step, metric) for step in together for metric in OF_CRITIC):
        assert apart[step][metric] == pytest.approx(together[step][metric], abs=1e-5, rel=1e-3), metric


LIKELY = """
import torch
from distflow import Ragged, node

@node(writes="rewards")
def likely(teacher_logprobs: Ragged) -> torch.Tensor:
    sums = torch.zeros(len(teacher_logprobs)).index_add(0, teacher_logprobs.row_of, teacher_logprobs.values)
    return sums / teacher_logprobs.lengths
"""
TEACHER = "  teacher:   {role: teacher, type: MODEL_INFERENCE, function: logprobs, dependencies: [rollout]}\n"
BESIDE = {
    "the critic": (2, "mode=sync", "layouts={critic: {first: 1}, reference: {first: 1}, teacher: {first: 1}}"),
    "the critic, async": (3, "mode=async", "groups.rollout=1", "layouts={critic: {first: 1}, teacher: {first: 1}}"),
    "each other, split": (3, "mode=sync", "layouts={reference: {first: 1, tp: 2}, teacher: {first: 1}}"),
    "each other, async": (4, "mode=async", "groups={rollout: 1, inference: {reference: 2, teacher: reference}}")}


@pytest.mark.parametrize("case", BESIDE)
def test_frozen_roles_may_be_beside_another(ppo, workspace, case):
    """On its ranks, of which one dies; the losses are those of one rank."""
    (workspace / "likely.py").write_text(LIKELY)
    dag = (workspace / "ppo.yaml").read_text().replace("[brevity]", "[likely]").replace(
        "  reference: {copy_of: actor}\n", "  reference: {copy_of: actor}\n  teacher: {copy_of: actor}\n")
    reward = next(line for line in dag.splitlines() if line.startswith("  reward: "))
    judged = '  reward:    {role: reward, type: COMPUTE, function: "likely:likely", dependencies: [teacher]}'
    (workspace / "ppo.yaml").write_text(dag.replace(reward, TEACHER + judged))
    ranks, *settings = BESIDE[case]
    where = "inference" if case == "each other, async" else "trainer"
    last = ranks - 1 - (case == "the critic, async")  # behind which a rank samples
    killed = f"faults=[{{kind: kill, group: {where}, rank: {last}, phase: inference, step: 2}}]"
    heads = ("--set", "roles.actor.model.kv_heads=2")
    together = ppo(1, "together", *heads, "--set", "mode=sync")
    apart = ppo(ranks, "apart", *heads, *STRICT, *(part for each in (*settings, killed) for part in ("--set", each)))
    assert together.keys() == apart.keys() == {1, 2, 3}
    for step, metric in ((step, metric) for step in together for metric in ("loss", "grad_norm", *OF_CRITIC)):
        assert apart[step]["response/fingerprint"] == together[step]["response/fingerprint"]
        assert apart[step][metric] == pytest.approx(together[step][metric], abs=1e-5, rel=1e-3), metric
    events = [json.loads(line) for line in (workspace / "runs/apart/events.jsonl").read_text().splitlines()]
    assert [event["verdict"] for event in events if event["event"] == "failure"] == ["starts again"]
