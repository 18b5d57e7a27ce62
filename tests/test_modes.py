"""Whole runs whose ranks sample and train apart: the same DAGs, the same samples, weights that are pulled."""

from collections import Counter

import pytest
import torch
from harness import events_of, lines_of, metrics_of
from safetensors.torch import load_file

from distflow.data.dataloader import REPEATS
from distflow.telemetry.run_reader import RunReader

ASYNC = ("--run-file", "tiny.yaml", "mode=async")
GRPO = ("--dag", "grpo.yaml", *ASYNC)
GROUP = 8  # samples of a prompt


@pytest.mark.parametrize(("ranks", "on_stale"), [(1, "wait"), (2, "drop")])
def test_those_that_train_and_sample_train_while_rows_are_under_way(launch, workspace, ranks, on_stale):
    """And go on with these, though the trainer is killed meanwhile."""
    launch(ranks, *GRPO, "mode=semi_sync", "groups.rollout=0", "steps=6", f"on_stale={on_stale}", "--name", "alone",
           "roles.actor.generation={max_new_tokens: 200, stop: ['7', '3', '1']}", "roles.actor.model.layers=12",
           "samples=all", "faults=[{kind: kill, group: trainer, phase: training, step: 4}]")
    run = workspace / "runs/alone"
    steps = metrics_of(run)
    assert len(steps) == 6
    assert max(step["staleness/max"] for step in steps.values()) == 1
    prompts = Counter(row["row"] // GROUP % REPEATS for file in (run / "samples").glob("*.jsonl")
                      for row in lines_of(file))
    assert {*prompts.values()} == {GROUP}
    assert len(prompts) == 6 * 4
    assert not events_of(run, "weights_pulled")
    assert events_of(run, "failure")
    continued = sum(step.get("response/continued", 0) for step in steps.values())
    assert on_stale == "wait" or continued > 0, "a step takes what is done first"


VALIDATED = ("validation={data: {held: train.jsonl}, every: 2, reward: brevity, samples: 2, temperature: 1.0, "
             "best: true}")


def test_rollouts_validate_the_weights_that_the_trainer_would_have(launch, workspace):
    """And the trainer has no engine that samples. Of each step it is the same to the last answer; one is of the last
    step, for which the run waits; the models of the best one are kept."""
    launch(1, *GRPO, VALIDATED, "--name", "sync", "mode=sync")
    launch(2, *GRPO, VALIDATED, "staleness=0", "--name", "apart")
    answers = [(workspace / f"runs/{name}/validation.jsonl").read_text() for name in ("sync", "apart")]
    assert answers[0] == answers[1]
    assert [(each["of_step"], each["lag"]) for each in events_of(workspace / "runs/apart", "validated")] == [
        (step, 0) for step in (0, 2, 4)]
    weights = [load_file(workspace / f"runs/{name}/best/model/model.safetensors") for name in ("sync", "apart")]
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-5) for name in weights[0])
    assert not list((workspace / "runs/apart").glob("candidates/*"))


@pytest.mark.parametrize("on_stale", ["wait", "drop"])
def test_staleness_keeps_its_bound(launch, workspace, on_stale):
    """And each prompt is trained on once, also where those that are done first come first."""
    launch(3, *GRPO, "--name", "ahead", "staleness=2", "steps=8", "groups.rollout=2",
           f"on_stale={on_stale}", "samples=1000")
    steps = metrics_of(workspace / "runs/ahead")
    assert len(steps) == 8
    stale = [steps[step]["staleness/max"] for step in sorted(steps)]
    assert stale[0] == 0
    assert 1 <= max(stale) <= 2
    rows = [row["row"] for row in RunReader(workspace / "runs/ahead").rows("samples")]
    prompts = Counter(row // GROUP % REPEATS for row in rows)
    assert prompts == dict.fromkeys(range(len(rows) // GROUP), GROUP)
