"""Rows that are divided along their tokens give what whole rows give."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from training import SETTINGS, STEPS, Trained, built, joined, named_mesh, plain_training, share_of, training

from distflow.schema.run import RoleRun
from workers.engines.context_parallel import Context
from workers.engines.fsdp import FSDPEngine
from workers.engines.value import with_value_head


def divided_training(layout, model, small) -> Trained:
    return training(layout, model, small)


@pytest.mark.parametrize(("layout", "model", "small"), [
    ({"cp": 2}, {}, 0),
    ({"cp": 2}, {"architecture": "llama", "tied": False}, 64_000_000),
    ({"cp": 2, "dp": 2}, {"architecture": "qwen2"}, 0),
    ({"cp": 2, "tp": 2}, {}, 0),
], ids=str)
def test_any_layout_equals_the_plain_model(layout, model, small):
    ranks, stride = 2 * layout.get("dp", 1) * layout.get("tp", 1), 2 * layout.get("tp", 1)
    results = run_ranks(ranks, divided_training, layout, model, small)
    joined(results, stride).equals(plain_training(model))
    for rank, result in enumerate(results):
        assert result.logprobs == results[rank - rank % stride].logprobs


def valued(layout) -> list[float]:
    """Gradient norms of a value model, then values and scores."""
    mesh, model = named_mesh(**layout), with_value_head(built())
    with torch.no_grad():
        model.score.weight.copy_(torch.linspace(-0.1, 0.1, 64)[None])
    engine = FSDPEngine(model, RoleRun(**SETTINGS), mesh, 0, 10, trained=True, head="value")
    mine = share_of(mesh)

    def squared(values, scores, micro):
        return values.square().sum() / 22 + (scores - 0.5).square().sum() / 7

    norms = [engine.update(mine, squared, 1.0, step)["grad_norm"] for step in range(STEPS)]
    return [*norms, *engine.values(mine["prompts"], mine["responses"]).values.tolist(),
            *engine.scores(mine["prompts"], mine["responses"]).tolist()]


def test_a_value_head_works_with_it():
    (expected,), found = run_ranks(1, valued, {}), run_ranks(2, valued, {"cp": 2})
    assert found[0] == found[1] == pytest.approx(expected, abs=1e-5)


class Four:
    """A group of four, as far as its size counts."""

    def size(self) -> int:
        return 4


def test_all_ranks_attend_to_as_much():
    pieces = Context(Four()).pieces(16)
    assert pieces.tolist() == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert len(set((pieces + 1).sum(1).tolist())) == 1
