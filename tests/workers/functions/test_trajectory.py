"""What is recorded of a conversation, and what comes back of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from distflow.contracts.decorators import Turn
from workers.engines.embedded import build_tokenizer
from workers.engines.rollout import SampledRow
from workers.functions.trajectory import Trajectory


def fresh(prompt: int = 4) -> Trajectory:
    return Trajectory(SampledRow(7, torch.arange(prompt), prompt, 8), {}, saved=False)


def with_turns(count: int, began: bytes = b"") -> Trajectory:
    """A conversation of turns of three tokens, with two between them that were observed."""
    found = fresh()
    found.began = began
    for turn in range(count):
        if turn:
            observed = torch.tensor([8, 9])
            found.add_observed(observed)
            found.row.extend(observed, 8)
        found.row.end(torch.arange(3) + 10 * turn, -torch.ones(3), torch.zeros(3, dtype=torch.int32), True)
        found.add_turn()
        found.add_answer(Turn("on", done=False, reward=1.0))
    return found


@pytest.mark.parametrize(("prompt", "said", "finished", "heard"), [
    ("user<think>\n", "it may be #### 5", False, "<think>\nit may be #### 5"),
    ("user<think>\n", "#### 5", True, "#### 5"),
    ("user<think>\n", "so</think>#### 5", False, "so</think>#### 5"), ("user", "#### 5", False, "#### 5")])
def test_an_environment_sees_that_a_turn_was_cut_off_within_thoughts(prompt, said, finished, heard):
    tokenizer = build_tokenizer(["it may be so"])
    engine = SimpleNamespace(tokenizer=tokenizer, end_tokens=[tokenizer.eos_token_id])

    def tokens(text):
        return torch.tensor(tokenizer.encode(text, add_special_tokens=False))

    found = Trajectory(SampledRow(7, tokens(prompt), len(tokens(prompt)), 8), {}, saved=False)
    for _ in range(2):  # once behind the prompt, once behind what an environment has said
        found.row.end(tokens(said), torch.zeros(len(tokens(said))), torch.zeros(len(tokens(said)), dtype=torch.int32),
                      finished)
        found.add_turn()
        assert found.text(engine, len(found.pieces) - 1) == heard
        found.add_observed(tokens(prompt))
        found.row.sequence = torch.cat([found.row.sequence, *(piece.tokens for piece in found.pieces[-2:])])


def test_a_rewind_keeps_the_experts_of_what_it_keeps():
    found = with_turns(3)
    found.row.experts = torch.arange(4 + 3 + 2 + 3 + 2 + 2)[:, None, None]
    found.rewind(2)
    assert found.row.experts.flatten().tolist() == list(range(4 + 3 + 2 + 3))
    found.row.experts = None
    found.rewind(1)
    assert found.row.experts is None


def test_what_was_recorded_before_another_beginning_does_not_count():
    """As where an environment begins otherwise than for the rank before, in a record that is appended to."""
    first, second = with_turns(2, began=b"one"), with_turns(1, began=b"two")
    first.state = 2, {"heard": 2}
    recorded = first.take(whole=False).with_more(second.take(whole=False))
    assert recorded.began == b"two"
    found = fresh()
    found.restore(recorded)
    assert (found.turns, found.length, found.state) == (1, 3, None)
    assert recorded.with_more(with_turns(1).take(whole=False)).began == b""


def test_a_conversation_that_was_never_answered_has_a_reward_of_the_same_kind():
    """Its column would not fit to those of other prompts."""
    first, found = fresh(), fresh()
    first.row.end(torch.arange(3), -torch.ones(3), torch.zeros(3, dtype=torch.int32), True)
    first.add_turn()
    found.restore(first_record := first.take(whole=True))
    assert first_record.events
    assert isinstance(found.reward, float)
