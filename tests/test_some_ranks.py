"""A whole run in which some ranks have no rows of a role, and no model of it: deaths, checkpoints, other layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import SEED_WITH_CLEAR_DRAWS, events_of, lines_of, metrics_of, require_equal

from distflow.recovery.checkpoint_files import complete_checkpoints

pytestmark = pytest.mark.run
GRPO = ("--dag", "grpo.yaml", "--run-file", "tiny.yaml", *SEED_WITH_CLEAR_DRAWS, "--set", "nodes.update.with.kl=0.5",
        "--set", "validation={data: {heldout: train.jsonl}, every: 2, best: true}")
SPREAD = ("--set", "layouts={rollout: {rows: [1, 1, 0]}, update: {rows: [0, 1, 1]}, reference: {rows: [0, 0, 1]}}")
"""The first rank only samples, the second does both, the third trains and has the reference."""
TURNED = ("--set", "layouts={rollout: {rows: [0, 1]}, update: {rows: [1, 0]}, reference: {rows: [0, 1]}}")
KILLS = ("--set", "faults=[{kind: kill, step: 2, phase: training, rank: 2}, {kind: kill, step: 3, phase: generating, "
         "rank: 0}, {kind: kill, step: 4, phase: saving, rank: 1}]")


def validations_of(folder: Path) -> dict[int, float]:
    return {row["step"]: row["validation/heldout"] for row in lines_of(folder / "metrics.jsonl")
            if "validation/heldout" in row}


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
    assert len(metrics_of(alone)) == 6
    require_equal(metrics_of(spread), metrics_of(alone))
    assert validations_of(spread) == pytest.approx(validations_of(alone), abs=1e-6)
