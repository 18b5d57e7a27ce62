"""A mixture of experts samples and trains like any other model."""

from __future__ import annotations

import pytest
from engines.families import build
from ranks import run_ranks
from training import (
    SETTINGS,
    Trained,
    engine_of,
    joined,
    layered,
    named_mesh,
    share_of,
    trained_by,
)

from distflow.config.dag import Role
from distflow.config.run import Model, RoleRun
from distflow.errors import EngineError
from workers.engines import attention
from workers.engines.fsdp import FSDPEngine

MIXTURE = {"architecture": "qwen3_moe", "mixture": (4, 2), "kv_heads": 4}


def family_training(layout, family, replays) -> Trained:
    mesh = named_mesh(**layout)
    model = build(family)
    model.set_attn_implementation(attention.NAME)
    generation = {"generation": {"routing_replay": replays}}
    with layered(0):
        engine = FSDPEngine(model, RoleRun(**SETTINGS, **generation), mesh, 0, 10, Role(trained=True))
    return trained_by(engine, share_of(mesh))


@pytest.mark.parametrize(("family", "replays"), [
    ("mixtral", True), ("qwen2_moe", False), ("glm4_moe", False)])
def test_experts_that_are_cut_over_ranks_compute_what_they_do_on_one(family, replays):
    (expected,) = run_ranks(1, family_training, {}, family, replays)
    joined(run_ranks(2, family_training, {"tp": 2}, family, replays), 2).equals(expected)


def test_experts_that_cannot_be_divided_are_refused():
    (said, _) = run_ranks(2, odd_experts)
    assert said == "tp: 2 does not divide num_experts (3) of this `qwen3_moe` model. tp may be 1"


def odd_experts() -> str:
    with pytest.raises(EngineError) as caught:
        engine_of(named_mesh(tp=2), {**MIXTURE, "mixture": (3, 2)})
    return str(caught.value)


@pytest.mark.parametrize(("sizes", "says"), [
    ({"architecture": "qwen3", "hidden": 100, "heads": 4}, "hidden .100. must be a multiple of 2 × heads"),
    ({"architecture": "qwen3_moe", "heads": 4, "kv_heads": 3}, "must be a multiple of kv_heads")])
def test_sizes_that_do_not_go_together_are_refused(sizes, says):
    with pytest.raises(ValueError, match=says):
        Model(**sizes)
