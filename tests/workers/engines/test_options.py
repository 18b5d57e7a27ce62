"""What saves memory or time in training changes nothing else."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from torch.distributed.tensor import Replicate, Shard
from training import (
    Trained,
    built,
    engine_of,
    kept_for_backward,
    named_mesh,
    share_of,
    training,
)

from distflow.config.dag import Role
from distflow.config.run import Lora, RoleRun
from distflow.errors import EngineError
from workers.engines.adapters import attach
from workers.engines.fsdp import FSDPEngine


def optional_training(layout, settings, small) -> Trained:
    return training(layout, {}, small, settings)


def placements(replicas: int) -> list:
    engine = engine_of(named_mesh(dp=4), replicas=replicas)
    shard = engine.shards()["model.layers.0.mlp.up_proj.weight"]
    return [shard.placements, shard.to_local().shape]


def test_replicas_have_whole_copies_between_them():
    for found, shape in run_ranks(4, placements, 2):
        assert found == (Replicate(), Shard(0))
        assert shape == (96, 64)


def refusal(layout, settings) -> str:
    model = built()
    if "lora" in settings:
        attach(model, Lora(**settings["lora"]), 0)
    with pytest.raises(EngineError) as caught:
        FSDPEngine(model, RoleRun(**settings), named_mesh(**layout), 0, 1, Role(trained=True))
    return str(caught.value)


@pytest.mark.parametrize(("layout", "settings", "says"), [
    ({"dp": 2}, {"replicas": 3}, "replicas: 3 does not divide the 2 ranks"),
    ({"tp": 2}, {"lora": {"rank": 4}}, "tp: 2 and `lora` cannot be had together")], ids=str)
def test_options_that_do_not_fit_the_layout_are_refused(layout, settings, says):
    assert says in run_ranks(2, refusal, layout, settings)[0]


def kept(recompute: bool) -> int:
    """Bytes that the graph of one forward keeps for the backward pass, weights apart."""
    mesh = named_mesh()
    engine = engine_of(mesh, {"layers": 4}, 64_000_000, recompute=recompute)
    with kept_for_backward() as sizes:
        outputs = engine._forward(share_of(mesh), 1.0)
    outputs[0].sum().backward()
    return sum(sizes.values())


def test_recomputed_layers_keep_little():
    (without,), (with_it,) = run_ranks(1, kept, False), run_ranks(1, kept, True)
    assert with_it < without / 2
