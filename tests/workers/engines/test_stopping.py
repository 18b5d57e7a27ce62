"""Texts that end a turn are found wherever tokens part them."""

from __future__ import annotations

import pytest
import torch

from distflow.config.run import Generation
from workers.engines.embedded import EOS, build_model, build_tokenizer
from workers.engines.hf import HFRollout
from workers.engines.rollout import SampledRow, StopStrings


@pytest.fixture
def tokenizer():
    return build_tokenizer(["The answer is 42."])


def turn(begun: list[int] = ()) -> SampledRow:
    """A row, of whose turn another engine has sampled some tokens."""
    row = SampledRow(0, torch.tensor([7, 8]), 2, 99)
    if begun:
        row.resume(torch.tensor(begun), torch.zeros(len(begun)), torch.zeros(len(begun), dtype=torch.int32), False)
    return row


@pytest.mark.parametrize("text", ["</answer>", "é.", "42", EOS])
def test_the_token_that_completes_a_text_ends_the_turn(tokenizer, text):
    stop, said = StopStrings(tokenizer, ["nothing like it", text]), "The answer is 7. " * 9 + f"And 4 2 <{text} more"
    tokens = tokenizer(said)["input_ids"]
    ended = [count for count in range(1, len(tokens) + 1) if stop.reached(turn(), tokens[:count])]
    assert text in tokenizer.decode(tokens[: ended[0]])
    assert text not in tokenizer.decode(tokens[: ended[0] - 1])
    for parted in range(1, ended[0]):
        assert stop.reached(turn(tokens[:parted]), tokens[parted : ended[0]]), parted
        assert not stop.reached(turn(tokens[:parted]), tokens[parted : ended[0] - 1])


def test_the_prompt_ends_nothing(tokenizer):
    row = SampledRow(0, torch.tensor(tokenizer("is 42.")["input_ids"]), 4, 99)
    assert not StopStrings(tokenizer, ["is 42. The"]).reached(row, tokenizer(" The")["input_ids"])


def test_a_session_whose_rows_were_all_aborted_goes_on(tokenizer):
    model = build_model(len(tokenizer), 0, layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32)
    rollout = HFRollout(model, Generation(max_new_tokens=6), tokenizer.pad_token_id, [tokenizer.eos_token_id])
    rollout.stop, session = StopStrings(tokenizer, ["no such text"]), rollout.session(3)
    session.add([SampledRow(0, torch.tensor([7, 8]), 2, 99)])
    session.step()
    assert len(session.abort()) == 1
    assert session.step() == []
