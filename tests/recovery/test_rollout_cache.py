"""Rows that outlive the worker that sampled them."""

from __future__ import annotations

import os

import torch

from distflow.data.batch import Batch, Ragged
from distflow.recovery.rollout_cache import RolloutCache


def batch(first: int = 0) -> Batch:
    lengths = torch.tensor([3, 0, 2])
    tokens = Ragged(torch.arange(5) + first, lengths)
    return Batch(torch.tensor([4, 7, 9]), {
        "responses": tokens, "mask": tokens.with_values(torch.tensor([True, False, True, True, False])),
        "half": torch.tensor([1.5, -2.0, 0.25], dtype=torch.bfloat16), "wide": torch.arange(6.0).view(3, 2),
        "turns": Ragged(Ragged(torch.arange(4, dtype=torch.int32), torch.tensor([1, 0, 3])), torch.tensor([2, 0, 1])),
        "none": Ragged(torch.empty(0), torch.zeros(3, dtype=torch.int64))})


def require_equal(one: Batch, other: Batch) -> None:
    assert torch.equal(one.ids, other.ids)
    assert one.columns.keys() == other.columns.keys()
    for name in one.columns:
        first, second = one[name], other[name]
        while isinstance(first, Ragged):
            assert torch.equal(first.lengths, second.lengths)
            first, second = first.values, second.values
        assert first.dtype == second.dtype
        assert torch.equal(first, second)


def test_a_process_that_is_killed_leaves_its_rows():
    rows = RolloutCache()
    process = os.fork()
    if not process:
        try:
            rows.add(3, "1/rollout", batch(), b"report")
            rows.add(3, "2/rollout", batch(10), b"")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(process, 0)[1] == 0
    found = rows.rows_of_step(3)
    assert list(found) == ["1/rollout", "2/rollout"]
    require_equal(found["1/rollout"][0], batch())
    require_equal(found["2/rollout"][0], batch(10))
    assert found["1/rollout"][1] == b"report"
    assert rows.rows_of_step(2) == {}, "of another step"
    rows.clear()
    assert rows.rows_of_step(3) == {}


def test_an_entry_that_is_torn_and_those_after_it_are_left_out():
    rows = RolloutCache()
    assert rows.rows_of_step(0) == {}
    for key in "abc":
        rows.add(0, key, batch(), b"")
    memory = rows.slot.memory()
    size = (int.from_bytes(memory[:8], "little") - 8) // 3
    memory[8 + 2 * size - 5] ^= 1
    assert list(rows.rows_of_step(0)) == ["a"]
