"""Whole runs whose ranks sample and train apart: the same DAGs, the same samples, weights that are pulled."""

from collections import Counter

import pytest
import torch
from harness import ROOT, events_of, lines_of, metrics_of
from safetensors.torch import load_file

from distflow.data.dataloader import REPEATS
from distflow.telemetry.run_reader import RunReader

ASYNC = ("--run-file", "tiny.yaml", "mode=async")
GRPO = ("--dag", "grpo.yaml", *ASYNC)
GROUP = 8  # samples of a prompt
STRICT = ("staleness=0",)


def require_equal(ours, theirs, steps=(1, 2, 3, 4)):
    """The same samples, and the same training on them."""
    assert set(ours) >= set(steps)
    for step in steps:
        assert ours[step]["response/fingerprint"] == theirs[step]["response/fingerprint"]
        assert ours[step]["reward/mean"] == pytest.approx(theirs[step]["reward/mean"], abs=1e-9)
        assert ours[step]["loss"] == pytest.approx(theirs[step]["loss"], abs=1e-5)
        assert ours[step]["grad_norm"] == pytest.approx(theirs[step]["grad_norm"], rel=1e-3, abs=1e-5)


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


@pytest.mark.parametrize("faults", [(), ("faults=[{kind: kill, group: rollout, phase: generating, step: 3}]",)])
def test_two_roles_that_sample_in_turn_learn_as_in_sync(launch, workspace, faults):
    """Both are pulled by each rollout, also by one that starts again, and by training ranks that sample meanwhile."""
    dag = (ROOT / "dags/solver_reviser.yaml").read_text() + "imports: [brevity]\n"
    (workspace / "pair.yaml").write_text(dag.replace("function: score,", "function: score, with: {reward: brevity},"))
    run = ("--dag", "pair.yaml", "--run-file", "tiny.yaml")
    launch(1, *run, "--name", "sync")
    sync = metrics_of(workspace / "runs/sync")
    for mode in ("async", "semi_sync") if not faults else ("async",):
        launch(2, *run, f"mode={mode}", *STRICT, *faults, "--name", mode)
        apart = metrics_of(workspace / f"runs/{mode}")
        for step, values in sync.items():
            assert values["grad_norm/train_solver"] > 0 < values["grad_norm/train_reviser"]
            for name in (name for name in values if name.startswith(("response/fingerprint", "reward/mean", "loss",
                                                                     "grad_norm"))):
                assert apart[step][name] == pytest.approx(values[name], rel=1e-3, abs=1e-5), (mode, step, name)
        assert bool(events_of(workspace / f"runs/{mode}", "failure")) == bool(faults)


VALIDATED = ("validation={data: {held: train.jsonl}, every: 2, reward: brevity, samples: 2, temperature: 1.0, "
             "best: true}")


def test_rollouts_validate_the_weights_that_the_trainer_would_have(launch, workspace):
    """And the trainer has no engine that samples. Of each step it is the same to the last answer; one is of the last
    step, for which the run waits; the models of the best one are kept."""
    launch(1, *GRPO, VALIDATED, "--name", "sync", "mode=sync")
    launch(2, *GRPO, VALIDATED, *STRICT, "--name", "apart")
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
