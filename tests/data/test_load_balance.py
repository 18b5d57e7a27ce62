"""Measured shares: they meet where all ranks take equally long, from any start, and no share is ever empty."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.dataloader import Dataloader
from distflow.data.load_balance import WINDOW, LoadBalance, divided
from distflow.plan import Layout

TWO = Layout(2, measured=True)


def go_on(balance: LoadBalance, speeds: list[float], steps: int, fixed: float = 0.0, layout: Layout = TWO,
          noise=lambda step, rank: 1.0) -> list[list[float]]:
    """Let ranks of these speeds sample for so many steps: `fixed` seconds at speed 1 and one for each row; the seconds
    of each step and rank."""
    taken = []
    for step in range(steps):
        now = balance.current(layout)
        rows = [len(now.cut(balance.prompts, layout.share(rank))) for rank in range(len(speeds))]
        taken.append([(fixed + count) / speed * noise(step, rank)
                      for rank, (count, speed) in enumerate(zip(rows, speeds))])
        balance.record([(seconds, count) for seconds, count in zip(taken[-1], rows)])
    return taken


@pytest.mark.parametrize(("speeds", "fixed", "expected"), [
    ([1.0, 0.5], 0.0, (16, 8)), ([1.0, 0.25], 0.0, (19, 5)), ([0.25, 1.0], 0.0, (5, 19)), ([1.0, 0.5], 6.0, (18, 6))])
def test_shares_go_where_all_take_equally_long(speeds, fixed, expected):
    balance = LoadBalance(2, 24, [TWO])
    assert balance.current(TWO) == TWO, "equal until there is something measured"
    taken = go_on(balance, speeds, 1 + 5 * WINDOW, fixed)
    assert balance.current(TWO).rows == expected
    assert max(taken[-1]) <= 0.8 * max(taken[0])
    go_on(balance, [1.0, 1.0], 5 * WINDOW)
    assert balance.current(TWO).rows == (12, 12), "a rank that is quick again gets its rows back"


def test_the_first_step_of_a_worker_says_nothing():
    balance = LoadBalance(2, 24, [TWO])
    assert not balance.record([(100.0, 12), (1.0, 12)])
    go_on(balance, [1.0, 1.0], 2 * WINDOW)
    assert balance.current(TWO) == TWO


def test_one_slow_step_moves_few_rows():
    balance = LoadBalance(2, 24, [TWO])
    go_on(balance, [1.0, 1.0], 1 + WINDOW, noise=lambda step, rank: 50.0 if (step, rank) == (WINDOW, 1) else 1.0)
    assert min(balance.current(TWO).rows) >= 7
    go_on(balance, [1.0, 1.0], 3 * WINDOW)
    assert balance.current(TWO).rows in ((12, 12), (13, 11))


def test_a_share_is_as_slow_as_its_slowest_rank():
    split, alone = Layout(2, tp=2, measured=True), Layout(4, measured=True)
    balance = LoadBalance(4, 24, [split, alone])
    for _ in range(1 + 6 * WINDOW):
        balance.record([(1.0, 6), (1.0, 6), (1.0, 6), (3.0, 6)])
    assert balance.current(split).rows == (18, 6)
    assert balance.current(alone).rows == (8, 7, 7, 2)
    assert balance.current(Layout(4, rows=(1, 2, 3, 4))).rows == (1, 2, 3, 4), "others stay as they are"


def test_a_rank_that_has_sampled_nothing_keeps_its_pace():
    balance = LoadBalance(3, 24, [Layout(3, measured=True)])
    for _ in range(1 + WINDOW):
        balance.record([(1.0, 8), (0.0, 0), (1.0, 8)])
    assert balance.paces == [1.0, 1.0, 1.0]
    for _ in range(WINDOW):
        balance.record([(0.0, 0)] * 3)
    assert balance.paces == [1.0, 1.0, 1.0]


@settings(max_examples=100)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20), st.integers(0, 60))
def test_every_share_has_rows_and_none_could_take_one_from_the_last_that_is_done(paces, more):
    count = len(paces) + more
    rows = divided(count, paces)
    assert sum(rows) == count
    assert min(rows) >= 1
    last = max(range(len(paces)), key=lambda share: rows[share] / paces[share])
    done = rows[last] / paces[last]
    assert rows[last] == 1 or all((rows[share] + 1) / paces[share] >= done * (1 - 1e-9)
                                  for share in range(len(paces)) if share != last)
    assert [len(Layout(len(paces), rows=rows).cut(count, share)) for share in range(len(paces))] == [*rows]


class Numbers:
    def __len__(self) -> int:
        return 100

    def get(self, indices):
        return [{} for _ in indices]


def loaders(balance: LoadBalance) -> list[Dataloader]:
    return [Dataloader(Numbers(), lambda records: {}, 24, 0, share, TWO, balance) for share in (0, 1)]


def test_a_worker_goes_on_with_the_shares_of_the_one_before():
    """Its state is that of the dataloader, in a snapshot or in a checkpoint's JSON; in between two corrections too."""
    one, other = LoadBalance(2, 24, [TWO]), LoadBalance(2, 24, [TWO])
    go_on(one, [1.0, 0.5], 2 + 2 * WINDOW)
    ours, theirs = loaders(one), loaders(other)
    for loader in theirs:
        loader.load_state_dict(json.loads(json.dumps(ours[0].state_dict())))
    go_on(one, [1.0, 0.5], 1)
    other.warm = True
    go_on(other, [1.0, 0.5], 1)
    assert other.current(TWO).rows == one.current(TWO).rows != ()
    drawn = [[loader.next().ids for loader in each] for each in (ours, theirs)]
    assert all(map(torch.equal, *drawn))
    assert torch.cat(drawn[0]).tolist() == [*range(24)]
    assert len(drawn[0][0]) > len(drawn[0][1]) > 0


def test_on_other_ranks_it_begins_with_equal_shares():
    one, three = LoadBalance(2, 24, [TWO]), LoadBalance(3, 24, [Layout(3, measured=True)])
    go_on(one, [1.0, 0.5], 1 + WINDOW)
    three.load_state_dict(one.state_dict())
    assert three.paces == [1.0] * 3
    assert loaders(LoadBalance(2, 24))[0].state_dict() == {"position": 0}, "without measured layouts nothing is saved"
