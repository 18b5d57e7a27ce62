"""What the planner says that weights and optimizer take, and what they take on each of four ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layouts import train_context, write
from ranks import run_ranks
from torch.distributed.fsdp import FSDPModule

from benchmarks.device import held
from distflow.config.load import load
from distflow.data.batch import Batch, Ragged
from planners import plan as make_plan

SIZES = ["roles.actor.model.hidden=128", "roles.actor.model.layers=4", "roles.actor.micro_batch_tokens=10"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return str(tmp_path)


def measured(folder: str, overrides: list[str]) -> dict[str, tuple[int, int]]:
    """(planned, measured) bytes of the actor's tenants on this rank, at an update and while it samples."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = load(f"{folder}/dag.yaml", f"{folder}/run.yaml", SIZES + overrides)
    plan = make_plan(spec, dist.get_world_size())
    actor, found = train_context(spec, plan, Path(folder)).roles["actor"], {}
    trainer, rollout = actor.engine, actor.rollout
    parameters = list(trainer.shards().values())

    def look(*_):
        found["training state"] = held(trainer.resident()) + held(weight.grad for weight in parameters)

    def loss(logprobs, *_):  # of two micro-batches; at the second one, the gradients of the first are there
        groups = [each._get_fsdp_state()._fsdp_param_group for each in trainer.policy.modules()
                  if isinstance(each, FSDPModule)]
        weights = [weight for group in groups if group for weight in group.fsdp_params]
        gradients = [gradient for weight in weights
                     for gradient in (weight.unsharded_accumulated_grad, weight.unsharded_param.grad)]
        found["weights while computing"] = held(each.unsharded_param for each in weights) + held(
            each for each in gradients if each is not None)
        return -logprobs.sum()

    two = Ragged(torch.arange(5, 17), torch.tensor([6, 6]))
    batch = Batch(torch.arange(2), {"prompts": two, "responses": two})
    for _ in range(2):  # the optimizer makes its state in its first step
        handle = trainer.optimizer.register_step_pre_hook(look)
        actor.update(batch, loss)
        handle.remove()
    with actor.engine_swap.sampling():
        found["rollout weights"] = held(rollout.model.parameters())
        found["while sampling"] = found["rollout weights"] + held(trainer.resident())
    planned = {tenant.name.partition(": ")[2]: tenant.bytes for tenant in plan.memory if tenant.name[:6] == "actor:"}
    planned["while sampling"] = planned["rollout weights"] + (
        0 if spec.run.roles["actor"].swap else planned["training state"] * 3 // 4)  # gradients are not there
    return {name: (planned[name], size) for name, size in found.items()}


@pytest.mark.run
@pytest.mark.parametrize("layout", [[], ["layouts.update.tp=4"]], ids=["dp4", "tp4"])
@pytest.mark.parametrize("swap", [False, True], ids=["stays", "swaps"])
def test_the_estimate_is_within_a_tenth(folder, layout, swap):
    for rank, found in enumerate(run_ranks(4, measured, folder, [*layout, f"roles.actor.swap={str(swap).lower()}"])):
        assert set(found) == {"training state", "weights while computing", "rollout weights", "while sampling"}
        for name, (planned, size) in found.items():
            assert size == pytest.approx(planned, rel=0.1), (rank, name)
