"""Rows that are divided along their tokens give what whole rows give."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from training import Trained, engine_of, joined, named_mesh, plain_training, share_of, training, valued
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen3Config

from distflow.config.run import RoleRun
from distflow.errors import EngineError
from workers.engines.context_parallel import ContextParallelCache, has_windows
from workers.engines.fsdp import FSDPEngine


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


def test_a_value_head_works_with_it():
    (expected,), found = run_ranks(1, valued, {}), run_ranks(2, valued, {"cp": 2})
    assert found[0] == found[1] == pytest.approx(expected, rel=1e-6, abs=1e-5)


class Four:
    """A group of four, as far as its size counts."""

    def size(self) -> int:
        return 4


def test_all_ranks_attend_to_as_much():
    pieces = ContextParallelCache(Four()).pieces(16)
    assert pieces.tolist() == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert len(set((pieces + 1).sum(1).tolist())) == 1


@pytest.mark.parametrize(("config", "windows"), [
    (MistralConfig(sliding_window=4), True), (MistralConfig(sliding_window=None), False), (Qwen2Config(), False),
    (Qwen2Config(use_sliding_window=True, max_window_layers=1, num_hidden_layers=2), True), (Qwen3Config(), False),
])
def test_windows_are_known_and_refused(config, windows):
    assert has_windows(config) == windows


def windowed() -> None:
    model = MistralForCausalLM(MistralConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                             num_attention_heads=2, num_key_value_heads=2, sliding_window=4))
    with pytest.raises(EngineError, match="cannot divide rows of a model with sliding windows"):
        FSDPEngine(model, RoleRun(), named_mesh(cp=2), 0, 1, trained=False)


def test_an_engine_with_windows_is_not_made():
    run_ranks(2, windowed)
