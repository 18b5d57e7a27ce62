"""Mixtures of experts in vLLM: it computes with the experts that came, and what its routers choose is trained.

Apart from the tests of other models: vLLM makes the process groups of experts only if a process's first model has some.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from engines.rollouts import REPLAY, apart, build, mixture, trainer_of, undecided
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from distflow.data.batch import Ragged
from workers.engines.devices import NAMES
from workers.engines.routing import Routing

pytest.importorskip("vllm")


def changed(model) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.mul_(1.2)


def test_experts_come_and_those_that_it_chose_are_trained(mesh, prompts):
    """The model's own routers, which round otherwise, choose others."""
    model = undecided(mixture())
    engine, ids = build("vllm", mesh, model, **REPLAY), torch.arange(2 * len(prompts))
    for version in range(2):
        trainer = trainer_of(model, mixture(), mesh)
        samples = engine.generate(prompts, 2, ids, key=version)
        experts = Routing.of(model).column(samples.experts, prompts.lengths.repeat_interleave(2),
                                           samples.tokens.lengths)
        assert (experts.values != Routing.of(model).unknown).all()
        assert apart(trainer, prompts, samples, experts) < 1e-5 < 1e-2 < apart(trainer, prompts, samples, None)
        changed(model)
        engine.load(((name, parameter.data) for name, parameter in model.named_parameters()), version + 1)
    engine.close()


def over_two_ranks(expected: list[list[list[int]]]) -> None:
    prompts = Ragged.from_rows([torch.arange(9, 9 + length) for length in (3, 12, 40)])
    launch = {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": "2",
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.environ.update(launch)
    mesh = init_device_mesh("cpu", (1, 1, 1, 2), mesh_dim_names=NAMES)
    model = mixture()
    engine = build("vllm", mesh, model)
    for version, tokens in enumerate(expected):
        samples = engine.generate(prompts, 2, torch.arange(6), key=3)
        assert [row.tolist() for row in samples.tokens.rows] == tokens
        changed(model)
        engine.load(((name, parameter.data) for name, parameter in model.named_parameters()), version + 1)
    engine.close()
    dist.barrier()


def test_experts_over_two_ranks_draw_what_transformers_draws(mesh):
    model, expected = mixture(), []
    prompts = Ragged.from_rows([torch.arange(9, 9 + length) for length in (3, 12, 40)])
    for _ in range(2):
        samples = build("hf", mesh, model).generate(prompts, 2, torch.arange(6), key=3)
        expected.append([row.tolist() for row in samples.tokens.rows])
        changed(model)
    run_ranks(2, over_two_ranks, expected)
