"""Mixtures of experts in SGLang's server: cut over its ranks, and with what its routers choose. On a CPU its ranks
cannot have whole experts."""

from __future__ import annotations

import copy

import pytest
import ranks
import torch
from engines.rollouts import REPLAY, TRAITS, apart, build, mixture, trainer_of, undecided
from engines.test_rollout_contract import changed, greedy_of, weights
from torch.distributed.device_mesh import init_device_mesh

from distflow.data.batch import Ragged
from workers.engines.devices import NAMES
from workers.engines.routing import Routing

if not TRAITS["sglang"].installed:
    pytest.skip("no environment with SGLang is named", allow_module_level=True)


def untied():
    """SGLang's mixtures have a head of their own."""
    model = mixture()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def over_two_ranks(texts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens with the first and with other weights."""
    prompts, model = Ragged.from_rows([torch.tensor(text) for text in texts]), untied()
    engine = build("sglang", init_device_mesh("cpu", (1, 1, 1, 2), mesh_dim_names=NAMES), model)
    try:
        found = []
        for version in range(2):
            found.append(engine.generate(prompts, 1, torch.arange(len(prompts)), 3, 0.0).tokens.values.tolist())
            engine.load(weights(changed(model)), version + 1)
        return found
    finally:
        engine.close()


def test_experts_over_two_ranks_sample_what_transformers_samples(prompts, monkeypatch):
    monkeypatch.setattr(ranks, "_LIMIT", 600.0)
    told, heard = ranks.run_ranks(2, over_two_ranks, [prompt.tolist() for prompt in prompts.rows])
    assert told == heard
    model = untied()
    for tokens in told:
        assert tokens == [token for prompt in prompts.rows for token in greedy_of(model, prompt)]
        changed(model)


def test_experts_that_it_chose_are_trained(mesh, prompts):
    """The trainer's own routers, which differ by rounding, choose others."""
    model = undecided(untied())
    engine, ids = build("sglang", mesh, model, **REPLAY), torch.arange(2 * len(prompts))
    for version in range(2):
        samples = engine.generate(prompts, 2, ids, key=version)
        experts = Routing.of(model).column(samples.experts, prompts.lengths.repeat_interleave(2),
                                           samples.tokens.lengths)
        assert (experts.values != Routing.of(model).unknown).all()
        trainer = trainer_of(undecided(copy.deepcopy(model), seed=2), untied(), mesh)
        assert apart(trainer, prompts, samples, experts) < 1e-5 < 1e-2 < apart(trainer, prompts, samples, None)
        engine.load(weights(undecided(changed(model))), version + 1)
    engine.close()
