"""A model that is cut within its layers computes and learns what the whole model does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import run_ranks
from training import (
    SETTINGS,
    Trained,
    built,
    engine_of,
    joined,
    loss_of,
    named_mesh,
    plain_training,
    share_of,
    trained_by,
)

from distflow.config.dag import Role
from distflow.config.run import RoleRun
from distflow.errors import EngineError
from distflow.recovery.checkpoint import Checkpoints
from workers.engines import tensor_parallel
from workers.engines.fsdp import FSDPEngine


def refusal(layout, model) -> str:
    mesh = named_mesh(**layout)
    with pytest.raises(EngineError) as caught:
        engine_of(mesh, model)
    return str(caught.value)


@pytest.mark.parametrize(("layout", "model", "says"), [
    ({"tp": 4}, {}, r"tp: 4 does not divide num_key_value_heads \(2\) of this `qwen3` model. tp may be 1, 2$"),
    ({"tp": 2}, {"architecture": "qwen3_vl"}, r"plans for glm4_moe, llama, .*PLANS\['qwen3_vl'\] = PLANS\['llama'\]"),
    ({"pp": 2}, {}, "`fsdp` cannot split a model by pp"),
], ids=str)
def test_what_cannot_be_cut_is_refused(layout, model, says):
    for message in run_ranks(next(iter(layout.values())), refusal, layout, model):
        assert re.search(says, message), message


def own_family() -> Trained:
    """A family that users add: Qwen3 under another name."""
    mesh, model = named_mesh(tp=2), built()
    model.config.model_type = "qwen3_of_ours"
    tensor_parallel.PLANS["qwen3_of_ours"] = tensor_parallel.PLANS["qwen3"]
    engine = FSDPEngine(model, RoleRun(**SETTINGS), mesh, pad_token=0, steps=10, role=Role(trained=True))
    return trained_by(engine, share_of(mesh))


def test_a_plan_can_be_added():
    joined(run_ranks(2, own_family), 2).equals(plain_training())


def saved(layout, folder, continued: bool) -> Trained:
    """One update, then a checkpoint; or, from that checkpoint, the next updates."""
    mesh = named_mesh(**layout)
    engine, mine = engine_of(mesh), share_of(mesh)
    checkpoints = Checkpoints(Path(folder), keep=1)
    if not continued:
        engine.update(mine, loss_of, 1.0, 0)
        checkpoints.save(1, {"actor": engine}, {})
    else:
        checkpoints.load({"actor": engine})
    return trained_by(engine, mine)


@pytest.mark.run
@pytest.mark.parametrize("layout", [{}, {"dp": 4}, {"dp": 1, "tp": 2}], ids=str)
def test_a_checkpoint_is_for_any_layout(tmp_path, layout):
    expected = joined(run_ranks(4, saved, {"dp": 2, "tp": 2}, tmp_path, False), 2)
    ranks = layout.get("dp", 1) * layout.get("tp", 1)
    joined(run_ranks(ranks, saved, layout, tmp_path, True), layout.get("tp", 1)).equals(expected)
