"""Whole runs with a critic on ranks of its own, next to an actor whose engines are of other libraries."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
from engines.rollouts import TRAITS
from harness import ROOT, SEED_WITH_CLEAR_DRAWS, metrics_of

SGLANG = ("roles.actor.rollout=sglang",)
"""It draws by numbers of its own: both runs sample with it."""
ENGINES = {"vllm": ("roles.actor.rollout=vllm",),
           "vllm, split": ("roles.actor.rollout=vllm", "layouts.rollout.tp=2"),
           "sglang": SGLANG,
           "megatron": ("roles.actor.engine=megatron", "layouts.update.pp=2")}
HEADS = ("roles.actor.model={architecture: qwen3, layers: 2}", "steps=3",
         "roles.critic={engine: fsdp}", "nodes.reward.with.reward=brevity",
         "imports=[brevity, engines.megatron_on_cpu]")


@pytest.mark.parametrize("case", ENGINES)
def test_layouts_first_goes_with_engines_that_make_groups_of_their_own(workspace, launch, monkeypatch, case):
    library, _, _ = case.partition(",")
    if not (TRAITS[library].installed if library in TRAITS else find_spec("megatron")):
        pytest.skip(f"{library} is not installed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))

    def steps(ranks: int, name: str, *given: str) -> dict:
        sets = [word for line in (*HEADS, *given) for word in ("--set", line)]
        launch(ranks, "--dag", "ppo.yaml", "--run-file", "tiny.yaml", *SEED_WITH_CLEAR_DRAWS, "--name", name, *sets)
        return metrics_of(workspace / "runs" / name)

    together = steps(1, "together", *(SGLANG if case == "sglang" else ()))
    apart = steps(3, "apart", "layouts={critic: {first: 2}}", *ENGINES[case])
    assert apart.keys() == together.keys() == {1, 2, 3}
    for step, line in together.items():
        assert apart[step]["response/fingerprint"] == line["response/fingerprint"]
        for name in ("loss", "grad_norm", "value/loss", "value/grad_norm"):
            assert apart[step][name] == pytest.approx(line[name], rel=1e-3, abs=1e-5), (step, name)
