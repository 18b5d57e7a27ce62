"""Rows that are divided along their tokens give what whole rows give."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from training import named_mesh
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen3Config

from distflow.config.dag import Role
from distflow.config.run import RoleRun
from distflow.errors import EngineError
from workers.engines.context_parallel import has_windows
from workers.engines.fsdp import FSDPEngine


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
        FSDPEngine(model, RoleRun(), named_mesh(cp=2), 0, 1, Role())


def test_an_engine_with_windows_is_not_made():
    run_ranks(2, windowed)
