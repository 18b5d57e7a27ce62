"""What is recorded of a conversation, and what comes back of it."""

from __future__ import annotations

import torch

from distflow.contracts.decorators import Turn
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
