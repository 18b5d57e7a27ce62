"""Mixtures of experts in SGLang's server, cut over its ranks. On a CPU its ranks cannot have whole experts."""

from __future__ import annotations

import pytest
import ranks
import torch
from engines.rollouts import TRAITS, build, mixture
from engines.test_rollout_contract import changed, greedy_of, weights
from torch.distributed.device_mesh import init_device_mesh

from distflow.data.batch import Ragged
from workers.engines.devices import NAMES

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
