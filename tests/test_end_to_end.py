"""Whole runs with real processes: what a user relies on."""

import json
import os

import pytest
from harness import lines_of, metrics_of

GRPO = ("--dag", "grpo.yaml", "--run-file", "tiny.yaml")


def test_ranks_without_rows_take_part(launch, workspace):
    """One prompt on two ranks, and a rollout that only one of them runs."""
    launch(2, *GRPO, "--name", "few", "steps=2", "data.batch=1")
    launch(2, *GRPO, "--name", "one", "steps=2", "layouts.rollout.dp=1")
    for name in ("few", "one"):
        assert all(line["tokens"] > 0 for line in metrics_of(workspace / "runs" / name).values())


@pytest.mark.smoke
def test_what_a_run_leaves(launch, workspace):
    launch(2, *GRPO, "--name", "left", "steps=2", "validation.data.heldout=train.jsonl",
           "data.columns=[level]")
    folder = workspace / "runs/left"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["tokens_per_second"] > 0
    assert 0.0 <= summary["accuracy_before"] <= 1.0
    assert 0.0 <= summary["accuracy_after"] <= 1.0
    assert {"dag.yaml", "run.yaml", "plan.json", "samples.jsonl", "checkpoints", "tensorboard", "model"} <= set(
        os.listdir(folder))
    sample = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    assert {"step", "questions", "answers", "completions", "rewards"} <= set(sample)
    assert sample["level"] in ("1", "2", "3"), "as where the record comes from"
    tokens = sample["tokens"]
    assert len(tokens["texts"]) == len(tokens["sampled"]) == len(tokens["sampled - reference"]) == sample["length"]
    assert max(tokens["sampled"]) <= 0
    launch(1, "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--name", "next", "steps=1",
           "roles.actor.model=runs/left/model")


@pytest.mark.smoke
def test_bad_input_is_said_once_and_leaves_nothing(launch, workspace):
    done = launch(2, *GRPO, "--name", "bad", "nodes.update.with.clipp=0.1", code=None,
                  torchrun=True)
    assert done.returncode != 0
    assert done.stderr.count("has no setting `clipp`") == 1
    assert "Did you mean `clip`?" in done.stderr
    assert "what is wrong with it stands above" in done.stderr
    assert "exitcode  : 2" in done.stderr
    assert "launch.py\", line" not in done.stderr
    assert not (workspace / "runs").exists()


def test_ranks_with_different_plans_stop_with_an_explanation(begin_apart, workspace):
    for rank in begin_apart(*((*GRPO, f"nodes.update.with.clip={clip}") for clip in (0.2, 0.3))):
        said = rank.stdout.read()
        assert rank.wait(120) == 1, said
        assert "the ranks do not have the same plan: rank 1 has" in said
    assert not (workspace / "runs").exists()


GREEDY = """
from torch import Tensor
from distflow import node

@node(writes="advantages")
def in_place(rewards: Tensor) -> Tensor:
    rewards -= rewards.mean()
    return rewards
"""


def test_a_function_that_writes_into_its_input_is_refused(launch, workspace):
    (workspace / "greedy.py").write_text(GREEDY)
    result = launch(1, *GRPO, "nodes.advantage.function=greedy:in_place", code=1)
    assert "greedy:in_place changed its input `rewards` in place" in result.stderr
    assert "rewards = rewards.clone()" in result.stderr


BLOCKING = """
import os, threading
from distflow import reward

@reward
def stuck(completion: str, answer: str) -> float:
    if os.environ["RANK"] == "1":
        threading.Event().wait()
    return 1.0
"""


def test_a_wait_in_vain_ends_and_names_the_culprit(launch, workspace):
    (workspace / "stuck_reward.py").write_text(BLOCKING)
    result = launch(2, *GRPO, "imports=[stuck_reward]", "nodes.reward.with.reward=stuck", "wait_limit=20", code=1)
    assert "a rank did not come within the wait limit" in result.stderr
    assert "in node `reward` (function workers.functions.rewards:score), step 1, rank 0" in result.stderr
    assert "missing: rank 1 is in step 1, computing node `reward`, for" in result.stderr


def test_a_run_that_gets_no_better_ends_and_keeps_its_best(launch, workspace):
    """The reward of a random model that learns nothing does not grow; the learning rate is as good as none."""
    done = launch(2, *GRPO, "--name", "patient", "steps=9", "roles.actor.learning_rate=1e-12",
                  "validation={data: {heldout: train.jsonl}, every: 1, patience: 2, best: true, "
                           "reward: brevity}")
    assert "no better mean than" in done.stdout
    lines = lines_of(workspace / "runs/patient/metrics.jsonl")
    assert [line["step"] for line in lines if "validation/heldout" in line] == [0, 1, 2]
    assert (workspace / "runs/patient/best/model/model.safetensors").is_file()
    assert not (workspace / "runs/patient/best.partial").exists()
    again = launch(2, "--resume", "runs/patient", "validation.patience=4")
    assert "in 4 validations" in again.stdout, "a resumed run knows what was best"
    lines = lines_of(workspace / "runs/patient/metrics.jsonl")
    assert [line["step"] for line in lines if "validation/heldout" in line] == [0, 1, 2, 3, 4]
    launch(2, "--resume", "runs/patient", "validation.reward=math", "validation.patience=2")
    lines = lines_of(workspace / "runs/patient/metrics.jsonl")
    steps = [line["step"] for line in lines if "validation/heldout" in line]
    assert steps == [*range(8)], "another reward has no best mean yet"
