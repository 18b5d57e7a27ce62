"""A role for nodes that sample turn by turn."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
from reported import reported

from distflow.config.run import Generation
from workers.engines.chat import sampled_text
from workers.engines.embedded import build_model, build_tokenizer
from workers.engines.hf import HFRollout
from workers.isolation import env_service, user_code


@pytest.fixture
def close_environments():
    """`close_environments()`: those that are opened next are in processes of their own."""
    def close() -> None:
        for service in env_service._services.values():
            service.close()
        env_service._services.clear()

    return close


@pytest.fixture
def role(close_environments):
    """What a conversation needs of a role: a model that samples, by `sampler`, and its tokenizer."""
    tokenizer = build_tokenizer(["a question and an answer"])
    model = build_model(len(tokenizer), 0, layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32)
    settings = SimpleNamespace(generation=Generation(max_new_tokens=6))
    rollout = HFRollout(model, settings.generation, tokenizer.pad_token_id, [tokenizer.eos_token_id, *range(5, 60)])
    rollout.version, ends = 4, rollout.end_tokens.tolist()
    made = SimpleNamespace(
        tokenizer=tokenizer, settings=settings, rollout=rollout, sampler=rollout, model=model, step=0, stream=0,
        template_options={}, end_tokens=ends, routed_experts=lambda *_: (),
        converse=lambda prompts, ids, repeats, limit: contextlib.nullcontext((
            made.sampler.session(3, keep_cache=True), made.sampler.rows(prompts, repeats, ids, limit))),
        decode=lambda tokens: [sampled_text(tokenizer, row.tolist(), ends) for row in tokens.rows])
    yield made
    reported()
    close_environments()
    user_code._streaks.clear()
