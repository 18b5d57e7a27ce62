"""Sampling by a model's own cache: each row gets what the model's own forward pass gives it alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from columns import random_rows
from engines.families import VOCABULARY, build
from training import row_logprobs
from transformers import PreTrainedModel

from distflow.config.run import Generation
from distflow.data.batch import Ragged
from distflow.errors import EngineError
from workers.engines import attention
from workers.engines.embedded import build_tokenizer
from workers.engines.hf import HFRollout
from workers.engines.plain_session import PlainSession, keeps_rows
from workers.engines.rollout import StopStrings

ENDS = [2, *range(3, VOCABULARY, 11)]


def engine(model: PreTrainedModel, plain: str = "is to be sampled so", **generation: Any) -> HFRollout:
    made = HFRollout(model, Generation(**{"max_new_tokens": 9, "batch_rows": 7, **generation}), 0, ENDS)
    made.plain = made.plain or plain
    return made


def attending(family: str) -> PreTrainedModel:
    model = build(family)
    model.set_attn_implementation(attention.NAME)
    return model


@pytest.fixture
def prompts():
    return random_rows(6, 2, 11, 6, 1, seed=5)


@pytest.mark.parametrize(("family", "kept"), [("nemotron_h", False), ("recurrent_gemma", False), ("qwen3_next", True),
                                              ("minimax", True), ("llama4_text", True), ("mamba2", True)])
def test_what_a_model_keeps_is_relied_on_if_it_continues_rows_rightly(family, kept):
    """A step of Nemotron-H leaves out a bound on its time step; RecurrentGemma's state lies in its modules."""
    assert keeps_rows(build(family)) == kept


@pytest.mark.parametrize("family", ["lfm2", "falcon_h1", "bloom", "llama4_text"])
def test_models_whose_layers_are_not_keys_and_values_alone_are_sampled_so(family):
    assert isinstance(engine(build(family), "").session(1), PlainSession)


@pytest.mark.parametrize("family", ["mistral", "deepseek_v3"])
@pytest.mark.parametrize("limits", [{}, {"temperature": 0.7, "top_k": 20}, {"top_p": 0.6, "min_p": 0.01}])
def test_slots_and_cohorts_draw_the_same(family, limits, prompts):
    slots = engine(attending(family), "", **limits)
    assert not isinstance(slots.session(1), PlainSession)
    cohorts = engine(build(family), **limits)
    own, plain = (made.generate(prompts, 3, torch.arange(15), key=4) for made in (slots, cohorts))
    assert own.tokens.values.tolist() == plain.tokens.values.tolist()
    assert torch.allclose(own.logprobs.values, plain.logprobs.values, rtol=0, atol=1e-5)
    assert torch.equal(own.finished, plain.finished)


@pytest.mark.parametrize("family", ["qwen3_5_text", "recurrent_gemma"])
def test_turns_aborts_versions_and_stop_strings(family, prompts):
    """Two rows are stopped halfway and continue, and another has a second turn: all draw what they would have drawn."""
    model, tokenizer = build(family), build_tokenizer(["one two"], vocab_size=VOCABULARY)
    made = engine(model)
    made.end_tokens = torch.tensor([-1])
    whole = made.generate(prompts.select(torch.tensor([0, 0, 2])), 1, torch.arange(3), key=4).tokens.rows
    made.stop = StopStrings(tokenizer, [tokenizer.decode(whole[2][:5])])
    session, (first, second, third) = made.session(4), made.rows(prompts.select(torch.tensor([0, 0, 2])), 1,
                                                                 torch.arange(3))
    session.add([first, second])
    session.add([third])
    made.version = 3
    assert not any(session.step() for _ in range(3))
    made.version = 4
    assert session.abort([second]) == [second]
    begun = second.tokens
    session.extend(second, begun[:0], 6)
    ended = [row for _ in range(9) for row in session.step()]
    assert ended == [third, first, second]
    assert not session.busy
    assert third.finished
    assert third.tokens.tolist() == whole[2][:5].tolist()
    assert third.versions.tolist() == [3, 3, 3, 4, 4]
    assert first.tokens.tolist() == whole[0].tolist()
    assert [*begun, *second.tokens] == whole[1].tolist()
    session.extend(third, torch.tensor([9, 8, 7]), 4)
    assert [session.step() for _ in range(4)] == [[], [], [], [third]]
    assert torch.allclose(third.logprobs, row_logprobs(model, third.sequence, third.tokens), rtol=0, atol=1e-5)


def test_what_cannot_be_recorded_or_shown_is_refused(prompts):
    with pytest.raises(EngineError, match=r"routing_replay.*Qwen3Next.*Take it out"):
        HFRollout(build("qwen3_next"), Generation(routing_replay=True), 0, ENDS)
    session = engine(build("bloom")).session(1)
    rows = session.engine.rows(prompts.slice(0, 1), 1, torch.arange(1))
    rows[0].images = Ragged.from_rows([torch.zeros(1)])
    session.add(rows)
    with pytest.raises(EngineError, match="images"):
        session.step()
