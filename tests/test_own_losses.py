"""A whole run with PPO's loss as a user would write it is the run with the shipped one, however it is divided."""

import os

import pytest
from harness import ROOT, metrics_of

from distflow.telemetry.run_reader import RunReader

OWN = ("nodes.update.with={loss: 'own_losses:clipped', loss_settings: {clip: 0.2}, kl: 0.001, epochs: 2}",)
SHIPPED = ("nodes.update.with={loss: ppo, clip: 0.2, kl: 0.001, epochs: 2}",)
CLIPPED = {"policy/clip_ratio", "policy/clip_ratio_low", "policy/clip_ratio_high"}
DIVIDED = ("roles.actor.micro_batch_tokens=64",)


@pytest.fixture
def run(workspace, launch, monkeypatch):
    """Metrics of two steps of a run, by step."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))

    def run(ranks, name, *given):
        launch(ranks, "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--name", name, "steps=2", *given)
        return metrics_of(workspace / "runs" / name)

    return run


@pytest.mark.smoke
def test_it_is_the_shipped_one_on_any_number_of_ranks_and_micro_batches(run):
    shipped, whole, divided = run(1, "shipped", *SHIPPED), run(1, "own", *OWN), run(2, "divided", *OWN, *DIVIDED)
    for step, line in shipped.items():
        for name in ("loss", "grad_norm", "policy/ratio", "policy/kl_reference", "response/fingerprint"):
            assert whole[step][name] == line[name], (step, name)
            assert divided[step][name] == pytest.approx(line[name], rel=1e-5, abs=1e-6), (step, name)
        assert line.keys() - whole[step].keys() == CLIPPED
        assert divided[step]["own/logprobs"] == pytest.approx(whole[step]["own/logprobs"], rel=1e-5)
        assert whole[step]["own/logprobs"] < -1  # the mean over tokens of a random model's log-probabilities


def test_a_step_that_runs_out_of_memory_names_the_smaller_micro_batch(run, workspace):
    settings = "nodes.update.with={loss: 'own_losses:demanding', loss_settings: {most: 200}}"
    with pytest.raises(AssertionError, match=r"(?s)memory.*--set roles\.actor\.micro_batch_tokens=450"):
        run(1, "full", settings, "roles.actor.micro_batch_tokens=900")
    (failure,) = (event for event in RunReader(workspace / "runs/full").rows("events") if event["event"] == "failure")
    assert "can't allocate memory" in failure["what"]
    assert "--set roles.actor.micro_batch_tokens=450" in failure["what"]
