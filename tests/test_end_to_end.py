"""Whole runs with real processes: what a user relies on."""

import json
import os
import subprocess
import sys

import pytest
from harness import ROOT, command, environment, lines_of, metrics_of

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


@pytest.mark.run
def test_ranks_with_different_plans_stop_with_an_explanation(workspace):
    """Two ranks, started by hand with different settings, meet at one store."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank, clip in enumerate(("0.2", "0.3")):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        line = [sys.executable, str(ROOT / "distflow/launch.py"), *GRPO, "--set", f"nodes.update.with.clip={clip}"]
        processes.append(subprocess.Popen(line, cwd=workspace, env={**environment(), **place}, text=True,
                                          stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    outputs = [process.communicate(timeout=120) for process in processes]
    for process, (_, errors) in zip(processes, outputs):
        assert process.returncode == 1, errors
        assert "the ranks do not have the same plan: rank 1 has" in errors
    assert not (workspace / "runs").exists()


GREEDY = """
from torch import Tensor
from distflow import node

@node(writes="advantages")
def in_place(rewards: Tensor) -> Tensor:
    rewards -= rewards.mean()
    return rewards
"""


@pytest.mark.run
def test_a_function_that_writes_into_its_input_is_refused(workspace):
    (workspace / "greedy.py").write_text(GREEDY)
    result = subprocess.run(command(1, *GRPO, "nodes.advantage.function=greedy:in_place"), cwd=workspace,
                            env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
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


@pytest.mark.run
def test_a_wait_in_vain_ends_and_names_the_culprit(workspace):
    (workspace / "stuck_reward.py").write_text(BLOCKING)
    changes = ("imports=[stuck_reward]", "nodes.reward.with.reward=stuck", "wait_limit=20")
    result = subprocess.run(command(2, *GRPO, *changes), cwd=workspace, env=environment(),
                            capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 1, result.stderr
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
