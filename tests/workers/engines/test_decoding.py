"""Rows that come, go and come back: they get what they would get alone."""

from __future__ import annotations

import pytest
import torch
from columns import random_rows
from engines.families import build

from distflow.config.run import Generation
from distflow.data.batch import Ragged
from workers.engines import attention, decode_graph
from workers.engines.decode_graph import can_be_captured
from workers.engines.hf import HFRollout

ENDS = [2, *range(3, 270, 9)]


@pytest.fixture
def prompts():
    return random_rows(6, 2, 19, 4, 11, seed=5)


def engine(model, batch_rows: int = 512, captures: bool = False) -> HFRollout:
    """`captures`: with the fixed shapes of a captured step, which is computed as it is here."""
    made = HFRollout(model, Generation(max_new_tokens=9, batch_rows=batch_rows), pad_token=0, end_tokens=ENDS)
    made.captures = captures
    return made


def conversation(rollout: HFRollout, prompts: Ragged, keep_cache: bool, turns: int = 3, each: int = 4,
                 late: bool = False) -> dict:
    """Every row gets as many tokens of observation as it has turns behind it, twice, at once or only when no other row
    has work (`late`); all of it by row."""
    session = rollout.session(key=7, keep_cache=keep_cache)
    rows = rollout.rows(prompts, each, torch.arange(len(prompts) * each) + 100)
    for start in range(0, len(rows), each):
        session.add(rows[start : start + each])
    behind, said, most, answered = dict.fromkeys(rows, 0), {row: [] for row in rows}, 0, []
    while session.busy:
        for row in session.step():
            said[row].append((row.tokens.tolist(), row.logprobs.tolist(), row.finished))
            behind[row] += 1
            if behind[row] < turns:
                answered.append(row)
        while answered and not (late and session.busy):
            row = answered.pop(0)
            session.extend(row, torch.arange(2 * behind[row]) + 40 + row.id % 5, limit=5)
        most = max(most, session.turns.live + len(session.parked))
    assert not keep_cache or most <= rollout.generation.batch_rows
    for row in rows:
        row.sequence = torch.cat([row.sequence, row.tokens])
    return {"rows": rows, "said": list(said.values())}


def attention_of_sequences(query, key, value, queries, keys, count, room, *given, scale, seqused_k):
    """In place of torch's FlashAttention, which there is on GPUs alone: each sequence by itself."""
    assert given == (0.0, False, False)
    assert keys[-1] == len(key)
    assert (queries.diff() == count).all()
    found = []
    for index, (first, used) in enumerate(zip(keys.tolist(), seqused_k.tolist())):
        assert index * room <= first < first + used <= (index + 1) * room
        scores = query[queries[index] : queries[index + 1], 0] @ key[first : first + used, 0].T * scale
        found.append(scores.softmax(-1) @ value[first : first + used, 0])
    return torch.cat(found)[:, None], None


@pytest.mark.parametrize(("batch_rows", "keep_cache", "captures"), [
    (512, True, False), (7, False, False), (1, True, False), (7, True, "by mask"), (7, False, "by columns"),
    (1, True, "by columns")])
def test_a_row_samples_the_same_whatever_its_company_and_cache(model, prompts, batch_rows, keep_cache, captures,
                                                               monkeypatch):
    model.double()
    if captures == "by columns":
        model.set_attn_implementation(attention.NAME)
        monkeypatch.setattr(decode_graph, "has_flash", lambda model: True)
        monkeypatch.setattr(attention, "_flash", attention_of_sequences)
    alone = conversation(engine(model), prompts, keep_cache=False)["said"]
    company = conversation(engine(model, batch_rows, bool(captures)), prompts, keep_cache)["said"]
    for row, other in zip(alone, company, strict=True):
        assert [turn[0] for turn in row] == [turn[0] for turn in other]
        for turn, same in zip(row, other, strict=True):
            assert turn[1] == pytest.approx(same[1], abs=1e-5)
            assert turn[2] == same[2]


def test_with_one_slot_a_row_rounds_alike_however_long_its_tools_take(model, prompts):
    quick, slow = (conversation(engine(model, 1), prompts, True, late=late)["said"] for late in (False, True))
    equal = quick == slow  # pytest would be long in saying how thousands of numbers differ
    assert equal


def test_a_prompt_is_read_once_and_an_extended_row_reads_only_what_is_new(model, prompts):
    read = []
    model.register_forward_pre_hook(lambda _, args, kwargs: read.append(tuple(args[0].shape)), with_kwargs=True)
    session = (rollout := engine(model)).session(key=1, keep_cache=True)
    rows = rollout.rows(prompts.slice(2, 3), 8, torch.arange(8), max_new_tokens=1)
    session.add(rows)
    assert session.step() == rows
    session.extend(rows[3], torch.tensor([50, 51]), limit=1)
    assert session.step() == rows[3:4]
    assert read == [(1, 19), (1, 3)]  # the sampled token, which the model had not read, and the two new ones


def test_a_place_is_taken_as_soon_as_it_is_free(model, prompts):
    """One row never ends, the others after one token each: it takes as many steps as it has tokens."""
    rollout = engine(model, batch_rows=2)
    session = rollout.session(key=1)
    limits = [6, 1, 1, 1, 1, 1, 1]
    rows = rollout.rows(prompts.select(torch.zeros(7, dtype=torch.int64)), 1, torch.arange(7))
    rollout.end_tokens = torch.tensor([-1])
    for row, limit in zip(rows, limits):
        row.limit = limit
        session.add([row])
    assert [[row.id for row in session.step()] for _ in range(6)] == [[1], [2], [3], [4], [5], [0, 6]]
    assert not session.busy


def test_steps_of_dense_models_without_windows_are_captured(model):
    model.set_attn_implementation(attention.NAME)
    assert can_be_captured(model)
    for rope in ({"rope_type": "dynamic"}, {"full_attention": {"rope_type": "longrope"}}):
        model.config.rope_parameters = rope
        assert not can_be_captured(model)
    for family in ("mistral", "qwen3_moe"):
        other = build(family)
        other.config.sliding_window = 8
        other.set_attn_implementation(attention.NAME)
        assert not can_be_captured(other)


def test_a_row_that_ended_longer_than_the_window_reads_nothing_before_it(monkeypatch):
    monkeypatch.setattr(attention, "_flash", attention_of_sequences)
    query, cache = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 6, 8)
    found = attention.LastColumns(torch.tensor([3]), torch.tensor([[9], [2]])).attend(query, cache, cache, 1.0)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 0, 0]]).bool()[:, None, None]
    expected = torch.nn.functional.scaled_dot_product_attention(query, cache, cache, mask, scale=1.0, enable_gqa=True)
    assert torch.allclose(found, expected.transpose(1, 2), atol=1e-6)


def test_the_head_gets_whole_tensors(model, prompts):
    """Given a view torch multiplies row by row, and copies the vocabulary's matrix for each (bfloat16 on a CPU)."""
    whole = []
    model.get_output_embeddings().register_forward_pre_hook(
        lambda _, given: whole.append((tuple(given[0].shape), given[0].is_contiguous())))
    engine(model).generate(prompts, 1, torch.arange(5), 0)
    assert whole[0] == ((5, 1, model.config.hidden_size), True)
    assert all(contiguous for _, contiguous in whole)
