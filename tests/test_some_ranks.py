"""Whole runs in which some ranks have no rows of a role, and no model of it: deaths, checkpoints, other groups."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import SEED_WITH_CLEAR_DRAWS, metrics_of
from test_critics import PPO
from test_lora import LORA

from distflow.recovery.checkpoint_files import complete_checkpoints

pytestmark = pytest.mark.run
GRPO = ("--dag", "grpo.yaml", "--run-file", "tiny.yaml", *SEED_WITH_CLEAR_DRAWS, "--set", "nodes.update.with.kl=0.5",
        "--set", "validation={data: {heldout: train.jsonl}, every: 2, best: true}")
SPREAD = ("--set", "layouts={rollout: {rows: [1, 1, 0]}, update: {rows: [0, 1, 1]}, reference: {rows: [0, 0, 1]}}")
"""The first rank only samples, the second does both, the third trains and has the reference."""
TURNED = ("--set", "layouts={rollout: {rows: [0, 1]}, update: {rows: [1, 0]}, reference: {rows: [0, 1]}}")
KILLS = ("--set", "faults=[{kind: kill, step: 2, phase: training, rank: 2}, {kind: kill, step: 3, phase: generating, "
         "rank: 0}, {kind: kill, step: 4, phase: saving, rank: 1}]")
COMPARED = ("loss", "grad_norm", "policy/kl_reference", "value/loss")


def same(ours: dict[int, dict], theirs: dict[int, dict], steps: int) -> None:
    assert set(ours) == set(theirs) == set(range(1, steps + 1))
    for step, values in theirs.items():
        assert ours[step]["response/fingerprint"] == values["response/fingerprint"], step
        for metric in (metric for metric in COMPARED if metric in values):
            assert ours[step][metric] == pytest.approx(values[metric], rel=1e-4, abs=1e-5), (step, metric)


def events_of(folder: Path, name: str) -> list[dict]:
    rows = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [row for row in rows if row["event"] == name]


def validations_of(folder: Path) -> dict[int, float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["validation/heldout"] for row in rows if "validation/heldout" in row}


def test_deaths_and_other_layouts_change_nothing(launch, workspace):
    """A rank without a role dies as well as one with it; then two ranks go on, each with another part."""
    alone, spread = (workspace / f"runs/{name}" for name in ("alone", "spread"))
    launch(1, *GRPO, "--set", "steps=6", "--name", "alone")
    launch(3, *GRPO, *SPREAD, *KILLS, "--name", "spread")
    restored = events_of(spread, "state_restored")
    assert {(event["of_step"], event["source"]) for event in restored} >= {(1, "own memory"), (2, "own memory")}
    assert {path.name for path in spread.glob("model/*")} == {path.name for path in alone.glob("model/*")}
    assert (spread / "best/model").is_dir()
    assert len(complete_checkpoints(spread / "checkpoints")) == 2
    launch(2, "--resume", "runs/spread", *TURNED, "--set", "faults=[]", "--set", "steps=6")
    same(metrics_of(spread), metrics_of(alone), 6)
    assert validations_of(spread) == pytest.approx(validations_of(alone), abs=1e-6)


def test_trainers_of_modes_with_groups_leave_ranks_out_too(launch, workspace):
    """The weights that rollouts pull are in as many parts as ranks train them."""
    strict = ("--set", "mode=async", "--set", "staleness=0", "--set", "groups.rollout=1")
    said = "layouts={update: {rows: [0, 1]}, old: {rows: [0, 1]}, reference: {rows: [1, 0]}}"
    launch(1, *GRPO, "--name", "alone")
    launch(3, *GRPO, *strict, "--set", said.replace("old: {rows: [0, 1]}, ", ""), "--name", "apart")
    same(metrics_of(workspace / "runs/apart"), metrics_of(workspace / "runs/alone"), 4)


def test_a_role_on_ranks_of_its_own_trains_beside_some_ranks(launch, workspace):
    alone, apart = (workspace / f"runs/{name}" for name in ("alone", "apart"))
    launch(1, *PPO, *SEED_WITH_CLEAR_DRAWS, "--name", "alone")
    some = "layouts={critic: {first: 2}, rollout: {rows: [1, 1]}, update: {rows: [0, 1]}, reference: {rows: [0, 1]}}"
    launch(3, *PPO, *SEED_WITH_CLEAR_DRAWS, "--set", some, "--name", "apart")
    same(metrics_of(apart), metrics_of(alone), 4)


def test_adapters_are_on_some_ranks_and_their_base_where_they_sample(launch, workspace):
    launch(1, *LORA, *SEED_WITH_CLEAR_DRAWS, "--name", "alone")
    launch(3, *LORA, *SEED_WITH_CLEAR_DRAWS, "--set",
           "layouts={update: {rows: [0, 1, 1]}, reference: {rows: [0, 1, 0]}}", "--name", "some")
    same(metrics_of(workspace / "runs/some"), metrics_of(workspace / "runs/alone"), 4)
