"""A whole run with the Megatron engine does what one rank of FSDP does, and resumes."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("megatron.core")

from harness import ROOT, metrics_of

STAGES_APART = ("roles.actor.engine=megatron",
                "layouts.update={pp: 2, order: tp-dp-pp, layers: [2, 1], rows: [3, 1]}")
LAYOUT = ("roles.actor.engine=megatron", "layouts.update.tp=2", "layouts.update.pp=2")


@pytest.fixture
def run(workspace, launch, monkeypatch):
    """Metrics of a run by step; the CPU takes the place of a GPU where the DAG imports what tests do for Megatron."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    dag = workspace / "grpo.yaml"
    dag.write_text(dag.read_text().replace("[brevity]", "[brevity, engines.megatron_on_cpu]"))

    def run(ranks: int, name: str, *given: str) -> dict:
        sets = [word for line in ("roles.actor.model={architecture: qwen3, layers: 2}", *given)
                for word in ("--set", line)]
        launch(ranks, "--dag", "grpo.yaml", "--run-file", "tiny.yaml", "--name", name, *sets)
        return metrics_of(workspace / "runs" / name)

    return run


@pytest.mark.parametrize(("layers", "layout"), [(2, LAYOUT), (3, STAGES_APART)],
                         ids=["tp and pp", "unequal stages on machines of their own"])
def test_a_run_is_that_of_one_rank(run, layers, layout):
    model = f"roles.actor.model.layers={layers}"
    expected, found = run(1, "one", model), run(4, "split", model, *layout)
    assert found.keys() == expected.keys()
    for step, line in expected.items():
        for name in ("loss", "grad_norm", "policy/entropy", "reward/mean", "response/fingerprint", "tokens"):
            assert found[step][name] == pytest.approx(line[name], rel=1e-3, abs=1e-6), (step, name)
        assert abs(found[step]["mismatch/logprob_max"]) < 1e-4


def test_a_users_loss_is_the_shipped_one(run):
    shipped = run(1, "shipped", "roles.actor.engine=megatron", "steps=2", "nodes.update.with={loss: ppo, clip: 0.2}")
    own = run(4, "own", *LAYOUT, "steps=2", "nodes.update.with={loss: 'own_losses:clipped'}")
    for step, line in shipped.items():
        for name in ("loss", "grad_norm", "reward/mean"):
            assert own[step][name] == pytest.approx(line[name], rel=1e-3, abs=1e-6), (step, name)
        assert own[step]["own/logprobs"] < -1
