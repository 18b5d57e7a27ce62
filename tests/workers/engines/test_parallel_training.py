"""A model whose rows, tokens, layers or experts are divided learns what the whole model does, with each option."""

from __future__ import annotations

import functools
from unittest.mock import patch

import numpy
import pytest
import torch
from ranks import run_ranks
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from training import (
    STEPS,
    Trained,
    engine_of,
    joined,
    named_mesh,
    plain_training,
    share_of,
    trained_by,
    training,
    valued,
)

from workers.engines import fsdp

LARGE = 64_000_000  # parameters up to which a model is one unit of sharding
MIXTURE = {"architecture": "qwen3_moe", "mixture": (4, 2), "kv_heads": 4}
AGAIN = {"recompute": True}
QUICK = [
    ({"cp": 2}, {}, 0, {}), ({"cp": 2}, {"architecture": "llama", "tied": False}, LARGE, {}),
    ({"cp": 2, "dp": 2}, {"architecture": "qwen2"}, 0, {}), ({"cp": 2, "tp": 2}, {}, 0, {}),
    ({"dp": 2, "tp": 2}, MIXTURE, 0, AGAIN), ({"tp": 4}, MIXTURE, LARGE, {}), ({"cp": 2}, MIXTURE, 0, {})]
THOROUGH = [
    ({"tp": 2}, {"architecture": "qwen2"}, LARGE, {}),
    ({"tp": 2}, {"architecture": "llama", "vocabulary": 271}, 0, {}),
    ({"dp": 2, "tp": 2}, {"tied": False}, 0, {}), ({"tp": 4}, {"vocabulary": 272, "kv_heads": 4}, 0, {}),
    ({"dp": 2}, {}, LARGE, AGAIN), ({"tp": 2}, {}, 0, AGAIN), ({"cp": 2}, {}, 0, AGAIN),
    ({"dp": 2}, {}, 0, {"offload": True}), ({"dp": 4}, {}, 0, {"replicas": 2}),
    ({"dp": 2, "tp": 2}, {}, LARGE, {"replicas": 2, **AGAIN}), ({"cp": 2}, {}, 0, {"replicas": 2})]
plain = functools.cache(lambda *model: plain_training(dict(model)))


def divided(layout, model, small, settings) -> Trained:
    return training(layout, model, small, settings)


@pytest.mark.parametrize(("layout", "model", "small", "settings"), [
    *QUICK, *(pytest.param(*case, marks=pytest.mark.run) for case in THOROUGH)], ids=str)
def test_any_layout_equals_the_plain_model(layout, model, small, settings):
    stride = layout.get("tp", 1) * layout.get("cp", 1)
    results = run_ranks(layout.get("dp", 1) * stride, divided, layout, model, small, settings)
    joined(results, stride).equals(plain(*model.items()))
    for rank, result in enumerate(results):
        peer = results[rank - rank % stride]
        assert (result.logprobs, result.norms) == (peer.logprobs, results[0].norms)
        for name, weight in result.weights.items():
            assert numpy.array_equal(weight, peer.weights[name]), name


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_a_value_head_works_with_split_layers_and_rows(axis):
    (expected,), found = run_ranks(1, valued, {}), run_ranks(2, valued, {axis: 2})
    assert found[0] == found[1] == pytest.approx(expected, rel=1e-6, abs=1e-5)


def distilled(layout) -> list[float]:
    """Log-probabilities of the three likeliest tokens at each place, and the norm of the gradient of their sum."""
    mesh = named_mesh(**layout)
    engine, rows = engine_of(mesh, micro_batch_tokens=40), share_of(mesh)
    tokens, logprobs = engine.top_logprobs(rows["prompts"], rows["responses"], 0.7, 3)
    found = engine.update(rows.with_columns({"candidates": tokens}), lambda new, *_: (new * new).sum() / 22, 0.7, 0)
    return [*logprobs.values.flatten().tolist(), found["grad_norm"]]


def test_the_likeliest_tokens_are_found_and_learnt_from_in_any_layout():
    (expected,) = run_ranks(1, distilled, {})
    for layout in ({"cp": 2}, {"tp": 2}):
        found = run_ranks(2, distilled, layout)
        assert found[0] == found[1] == pytest.approx(expected, abs=1e-4)


class GatherCount(TorchDispatchMode):

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, arguments=(), named=None):
        self.count += operator is torch.ops.c10d._allgather_base_.default
        return operator(*arguments, **(named or {}))


def layer_by_layer(kept: int) -> tuple[Trained, int, int]:
    """Some updates, how often they gather parameters, and the units of sharding. `kept`: parameters up to which a model
    stays gathered."""
    with patch.object(fsdp, "KEPT_WHOLE", kept):
        engine = engine_of(named_mesh(dp=2), small=0)
        with GatherCount() as gathered:
            found = trained_by(engine, share_of(named_mesh(dp=2)))
    return found, gathered.count, sum(isinstance(module, FSDPModule) for module in engine.policy.modules())


@pytest.mark.parametrize(("kept", "gathers"), [(fsdp.KEPT_WHOLE, (STEPS + 1) * 3 + 2), (0, 54)])
def test_layers_equal_the_unsharded_model_and_one_that_fits_is_gathered_once_a_step(kept, gathers):
    """Each of the three units, beside two gathers for this comparison; else layers for each pass over each micro-batch,
    and the root once for both."""
    results = run_ranks(2, layer_by_layer, kept)
    joined([found for found, *_ in results], 1).equals(plain())
    assert [counts for _, *counts in results] == [[gathers, 2 + 1]] * 2
