"""Whole runs that obey a plan for mixed hardware: the same samples and losses as with equal shares."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from harness import SEED_WITH_CLEAR_DRAWS, metrics_of

from distflow.cli import main
from distflow.config.load import load
from distflow.config.yaml_source import dump
from distflow.telemetry.run_folder import RunFolder, reload_run
from planners import plan
from planners.heterogeneous.layouts import CostedProblem
from planners.heterogeneous.placed_plan import written
from planners.heterogeneous.planned_run import planned_run
from planners.heterogeneous.runnable import run_groups, runnable
from planners.heterogeneous.workload import problem_of

CLUSTER = {"name": "unlike", "links": {"zone": {"gb_s": 1}, "world": {"gb_s": 1e-6, "latency_us": 1e6}},
           "devices": {name: {"tflops": {"float32": 0.1 * speed}, "memory_gib": 4, "memory_gb_s": 10 * speed}
                       for name, speed in (("whole", 3), ("third", 1))},
           "machines": {"abroad": {"device": "whole", "devices": 1, "zone": "far"},
                        "quick": {"device": "whole", "devices": 1}, "slow": {"device": "third", "devices": 1}},
           "zones": {"far": "overseas"}}
"""Of three machines the first is too far away for any plan."""
GRPO = ("--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--set", *SEED_WITH_CLEAR_DRAWS, "--set", "data.batch=8")


@pytest.fixture
def planned(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """What a run by a plan is started with; the plan is for mode sync."""
    monkeypatch.chdir(workspace)
    monkeypatch.syspath_prepend(str(workspace))
    (workspace / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    assert main(["plan", *GRPO, "--cluster", "cluster.yaml", "--place", "--out", "placed.yaml"]) == 0
    return "--dag", "grpo.yaml", "--run-file", "placed.yaml"


def rows_of(folder: Path, node: str) -> list[int]:
    """Of each rank, in the first step."""
    steps = [json.loads(line) for line in (folder / "times.jsonl").read_text().splitlines()]
    first = sorted((step["rank"], step["nodes"][node][1]) for step in steps if step["step"] == 1)
    return [rows for _, rows in first]


def test_a_planned_run_computes_what_an_equal_one_does(launch, workspace, planned):
    launch(2, *planned, "--name", "planned")
    launch(2, *GRPO, "--name", "equal")
    theirs = metrics_of(workspace / "runs/equal")
    ours = metrics_of(workspace / "runs/planned")
    assert len(ours) == 4
    for step in ours:
        assert ours[step]["response/fingerprint"] == theirs[step]["response/fingerprint"]
        assert ours[step]["loss"] == pytest.approx(theirs[step]["loss"], abs=1e-5)
        assert ours[step]["grad_norm"] == pytest.approx(theirs[step]["grad_norm"], rel=1e-3, abs=1e-5)
    assert rows_of(workspace / "runs/equal", "rollout") == [32, 32]
    for node in ("rollout", "reference", "update"):
        quick, slow = rows_of(workspace / "runs/planned", node)
        assert quick + slow == 64
        assert quick >= 2 * slow > 0, node


def test_it_is_resumed_as_it_was_placed(launch, workspace, planned):
    launch(2, *planned, "--name", "planned", "--set", "steps=2")
    launch(2, "--resume", "runs/planned", "--set", "steps=4")
    launch(2, *GRPO, "--name", "equal")
    ours, theirs = (metrics_of(workspace / f"runs/{name}") for name in ("planned", "equal"))
    assert ours[4]["loss"] == pytest.approx(theirs[4]["loss"], abs=1e-5)
    assert len(set(rows_of(workspace / "runs/planned", "update"))) == 2


def test_it_is_resumed_with_other_layouts(launch, workspace, planned):
    """By the new ones rank 0 trains and does not sample."""
    launch(2, *planned, "--name", "planned", "--set", "steps=2")
    placed = {"rollout": {"rows": [0, 64]}, "reference": {"rows": [8, 56]}, "update": {"rows": [8, 56]}}
    launch(2, "--resume", "runs/planned", "--set", f"layouts={json.dumps(placed)}", "--set", "steps=4")
    launch(2, *GRPO, "--name", "equal")
    ours, theirs = (metrics_of(workspace / f"runs/{name}") for name in ("planned", "equal"))
    assert ours[4]["loss"] == pytest.approx(theirs[4]["loss"], abs=1e-5)
    lines = [json.loads(line) for line in (workspace / "runs/planned/times.jsonl").read_text().splitlines()]
    assert {node: [line["nodes"].get(node, [0, 0])[1] for line in lines if line["rank"] == 0 and line["step"] > 2]
            for node in ("rollout", "update")} == {"rollout": [0, 0], "update": [8, 8]}
    folder = yaml.safe_load((workspace / "runs/planned/run.yaml").read_text())
    assert folder["layouts"]["rollout"]["rows"] == [0, 64]


@pytest.mark.parametrize(("grouping", "inference"), [(((0,), (1, 2)), {}), (((0, 1), (2,)), {"reference": "rollout"})])
def test_a_plan_with_groups_says_who_trains(launch, workspace, planned, monkeypatch, grouping, inference):
    """And who reads the reference: tasks 0, 1 and 2 sample, infer and train."""
    monkeypatch.setattr("planners.heterogeneous.runnable.run_groups", lambda *given: (
        each for each in run_groups(*given) if each[0] == grouping))
    spec = load("grpo.yaml", "tiny.yaml", ["data.batch=8", "mode=async"], "cluster.yaml")
    costed = CostedProblem(problem_of(spec))
    own = planned_run(spec, written(costed.problem, runnable(spec, costed)))
    Path("placed.yaml").write_text(dump(own.resolved()["run"]))
    launch(2, *planned, "--name", "apart")
    assert len(metrics_of(workspace / "runs/apart")) == 4
    groups = yaml.safe_load((workspace / "runs/apart/run.yaml").read_text())["groups"]
    assert groups["rollout"] == 1
    assert groups["inference"] == inference


def test_a_plan_that_takes_turns_says_that_it_runs_in_mode_sync(planned, capsys):
    apart = ("--set", "mode=async")
    assert main(["plan", *GRPO, *apart, "--cluster", "cluster.yaml", "--place"]) == 0
    assert "all tasks take turns: it runs in mode sync, not async" in capsys.readouterr().out


def test_a_plan_for_other_ranks_is_refused_before_anything_starts(launch, workspace, planned):
    refused = launch(1, *planned, code=1)
    assert "says the rows of 2 shares, and 1 ranks make 1" in refused.stderr
    assert not (workspace / "runs").exists()


def test_validate_and_plan_show_what_a_plan_does(planned, capsys):
    assert main(["validate", *planned]) == 0
    assert main(["plan", *planned]) == 0
    assert "dp 2, rows " in capsys.readouterr().out


def test_a_run_is_reopened_on_the_cluster_that_it_was_started_on(workspace, planned):
    spec = load("grpo.yaml", "tiny.yaml", None, "cluster.yaml")
    with RunFolder.created(workspace / "run", spec, plan(spec, 2), []):
        pass
    assert reload_run(workspace / "run").cluster == spec.cluster
