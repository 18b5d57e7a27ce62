"""Whole runs that obey a plan for mixed hardware: the same samples and losses as with equal shares."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from harness import SEED_WITH_CLEAR_DRAWS, lines_of, metrics_of, require_equal

from distflow.cli import main
from distflow.config.load import load
from distflow.config.yaml_source import dump
from distflow.telemetry.run_folder import RunFolder, reload_run
from planners import plan
from planners.heterogeneous.layouts import CostedProblem
from planners.heterogeneous.planned_run import planned_run
from planners.heterogeneous.runnable import run_freedom, search_runnable
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
def planned(workspace, monkeypatch):
    """What a run by a plan is started with; the plan is for mode sync."""
    monkeypatch.chdir(workspace)
    monkeypatch.syspath_prepend(str(workspace))
    (workspace / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    assert main(["plan", *GRPO, "--cluster", "cluster.yaml", "--place", "--out", "placed.yaml"]) == 0
    return "--dag", "grpo.yaml", "--run-file", "placed.yaml"


def rows_of(folder: Path, node: str) -> list[int]:
    """Of each rank, in the first step."""
    steps = lines_of(folder / "times.jsonl")
    first = sorted((step["rank"], step["nodes"][node][1]) for step in steps if step["step"] == 1)
    return [rows for _, rows in first]


def test_a_planned_run_computes_what_an_equal_one_does_and_is_resumed_otherwise(launch, workspace, planned, run_once):
    """By other layouts, of which rank 0 trains and does not sample."""
    run = workspace / "runs/planned"
    launch(2, *planned, "--name", "planned", "steps=2")
    placed = {"rollout": {"rows": [0, 64]}, "reference": {"rows": [8, 56]}, "update": {"rows": [8, 56]}}
    launch(2, "--resume", "runs/planned", f"layouts={json.dumps(placed)}", "steps=4")
    ours, theirs = metrics_of(run), metrics_of(run_once(1, *GRPO))
    assert len(ours) == 4
    require_equal(ours, theirs)
    for node in ("rollout", "reference", "update"):
        quick, slow = rows_of(run, node)
        assert quick + slow == 64
        assert quick >= 2 * slow > 0, node
    lines = [line["nodes"] for line in lines_of(run / "times.jsonl") if line["rank"] == 0 and line["step"] > 2]
    assert [(nodes.get("rollout", [0, 0])[1], nodes["update"][1]) for nodes in lines] == [(0, 8)] * 2


@pytest.mark.parametrize(("grouping", "inference"), [(((0,), (1, 2)), {}), (((0, 1), (2,)), {"reference": "rollout"})])
def test_a_plan_with_groups_says_who_trains(launch, workspace, planned, grouping, inference):
    """And who reads the reference: tasks 0, 1 and 2 sample, infer and train."""
    spec = load("grpo.yaml", "tiny.yaml", ["data.batch=8", "mode=async"], "cluster.yaml")
    problem = problem_of(spec)
    limited = replace(problem, freedom=replace(run_freedom(spec, problem), groupings=(grouping,)))
    *_, last = search_runnable(spec, CostedProblem(problem), CostedProblem(limited), budget=400)
    own = planned_run(spec, problem, last.placement)
    Path("placed.yaml").write_text(dump(own.resolved()["run"]))
    launch(2, *planned, "--name", "apart")
    assert len(metrics_of(workspace / "runs/apart")) == 4
    groups = yaml.safe_load((workspace / "runs/apart/run.yaml").read_text())["groups"]
    assert groups["rollout"] == 1
    assert groups["inference"] == inference


def test_a_run_is_reopened_on_the_cluster_that_it_was_started_on(workspace, planned):
    spec = load("grpo.yaml", "tiny.yaml", None, "cluster.yaml")
    with RunFolder.created(workspace / "run", spec, plan(spec, 2), []):
        pass
    assert reload_run(workspace / "run").cluster == spec.cluster
