"""Whole runs whose reference follows the actor."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import metrics_of

FOLLOW = ("--dag", "grpo.yaml", "--run-file", "tiny.yaml", "nodes.update.with.kl=0.5", "steps=5",
          "roles.reference.follow={every: 2, mix: 1.0}")
MODEL = "model/model.safetensors"
COMPARED = ("loss", "policy/kl_reference", "grad_norm", "response/fingerprint")


def rows(folder: Path) -> dict[int, list[float]]:
    return {step: [values[name] for name in COMPARED] for step, values in metrics_of(folder).items()}


@pytest.mark.smoke
def test_the_divergence_is_from_the_actor_of_the_step_that_it_follows(launch, workspace):
    """With mix 1 the reference is the actor itself: what they differ by is what one step has learnt."""
    launch(2, *FOLLOW, "--name", "follows")
    launch(2, *FOLLOW, "--name", "stays", "roles.reference.follow.every=9")
    follows, stays = ({step: values["policy/kl_reference"] for step, values in metrics_of(workspace / f"runs/{name}")
                       .items()} for name in ("follows", "stays"))
    assert [step for step in follows if follows[step] < 1e-9] == [1, 3, 5]
    assert [step for step in stays if stays[step] < 1e-9] == [1]
    assert follows[2] == stays[2] > 1e-6


def test_a_run_goes_on_without_follow_only_with_the_weights_that_the_reference_has(launch, workspace):
    launch(1, *FOLLOW, "--name", "follows", "steps=2", "checkpoint.every=1")
    resumed = ("--resume", "runs/follows", "steps=3")
    said = launch(1, *resumed, "roles.reference.follow=null", code=1)
    assert "has weights of role `reference`, which changed in training when it was written" in said.stdout + said.stderr
    launch(1, *resumed, "roles.reference.follow={every: 4, mix: 1.0}")
    assert metrics_of(workspace / "runs/follows")[3]["policy/kl_reference"] < 1e-9, "that of the step before"


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_worker_that_starts_again_has_the_same_reference(launch, workspace, mode):
    """Killed after the reference has moved, before any checkpoint: the snapshot has it."""
    settings = (*FOLLOW, "roles.reference.follow.mix=0.3", "checkpoint.every=0", f"mode={mode}", "staleness=0")
    launch(2, *settings, "--name", "calm")
    launch(2, *settings, "--name", "killed", "faults=[{kind: kill, step: 4, phase: training}]")
    calm, killed = (workspace / f"runs/{name}" for name in ("calm", "killed"))
    assert '"starts again"' in (killed / "events.jsonl").read_text()
    found, wanted = rows(killed), rows(calm)
    if mode == "sync":
        assert found == wanted
        assert (killed / MODEL).read_bytes() == (calm / MODEL).read_bytes()
    else:  # rows are sampled in the company that comes, which rounds otherwise
        assert [found[step] == pytest.approx(wanted[step], rel=1e-3, abs=1e-5) for step in wanted] == [True] * 5
