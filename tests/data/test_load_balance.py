"""Measured shares: they meet where all ranks take equally long, are never worse than equal ones, and none is empty."""

from __future__ import annotations

import json
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.dataloader import Dataloader
from distflow.data.load_balance import WINDOW, LoadBalance, divide
from distflow.plan import MEASURED, Layout

TWO = Layout(2, rows=MEASURED)


def go_on(balance: LoadBalance, speeds: list[float], steps: int, fixed: float = 0.0, layout: Layout = TWO,
          noise=lambda step, rank: 1.0) -> list[list[float]]:
    """Let ranks of these speeds sample for so many steps: `fixed` seconds at speed 1 and one for each row; the seconds
    of each step and rank."""
    taken = []
    for step in range(steps):
        now = balance.rebalanced(layout)
        rows = [len(now.cut(balance.prompts, layout.share(rank))) for rank in range(len(speeds))]
        taken.append([(fixed + count) / speed * noise(step, rank)
                      for rank, (count, speed) in enumerate(zip(rows, speeds))])
        balance.record([(seconds, count) for seconds, count in zip(taken[-1], rows)])
    return taken


def noisy(seed: int, deviation: float = 0.2):
    random = Random(seed)
    return lambda step, rank: max(0.1, random.gauss(1, deviation))


def slowest(rows: list[int], speeds: list[float], fixed: float) -> float:
    return max((fixed + count) / speed for count, speed in zip(rows, speeds))


@pytest.mark.parametrize(("speeds", "fixed", "best"), [
    ([1.0, 0.5], 0.0, 16), ([1.0, 0.25], 0.0, 20), ([0.25, 1.0], 0.0, 20), ([1.0, 0.5], 6.0, 24)])
def test_shares_go_where_all_take_equally_long(speeds, fixed, best):
    balance = LoadBalance(2, 24, [TWO])
    assert balance.rebalanced(TWO) == Layout(2), "equal until there is something measured"
    taken = go_on(balance, speeds, 12 * WINDOW, fixed)
    assert max(taken[5 * WINDOW]) <= 1.15 * best
    assert max(taken[-1]) == best
    go_on(balance, [1.0, 1.0], 25 * WINDOW)
    assert balance.rebalanced(TWO).rows in ((12, 12), (13, 11), (11, 13)), "a rank that is quick again gets rows back"


@pytest.mark.parametrize("fixed", [0.0, 10.0, 240.0])
@pytest.mark.parametrize("slow", [1.0, 0.9, 0.8, 0.5, 0.25])
def test_shares_are_never_worse_than_equal_ones_whatever_part_of_the_time_depends_on_rows(slow, fixed):
    speeds = [1.0, slow]
    best = min(slowest([rows, 24 - rows], speeds, fixed) for rows in range(1, 24))
    for seed in range(4):
        balance = LoadBalance(2, 24, [TWO])
        go_on(balance, speeds, 200, fixed, noise=noisy(seed))
        rows = [len(balance.rebalanced(TWO).cut(24, share)) for share in (0, 1)]
        assert slowest(rows, speeds, fixed) <= 1.05 * slowest([12, 12], speeds, fixed), seed
        assert min(rows) >= 3, "a quarter of an equal share"
        if not fixed:
            assert slowest(rows, speeds, fixed) <= 1.1 * best, seed


@pytest.mark.parametrize("slow", [1.0, 0.9])
def test_shares_do_not_run_away_where_seconds_hardly_depend_on_rows(slow):
    for noise in (0.0, 0.2):
        balance = LoadBalance(2, 24, [TWO])
        go_on(balance, [1.0, slow], 50, 240.0, noise=noisy(1, noise))
        assert balance.rebalanced(TWO).cut(24, 1) in (range(12, 24), range(13, 24), range(11, 24)), noise


def test_of_many_alike_ranks_none_loses_rows_by_chance():
    layout = Layout(32, rows=MEASURED)
    balance = LoadBalance(32, 256, [layout])
    go_on(balance, [1.0] * 32, 100, layout=layout, noise=noisy(0))
    assert slowest([len(balance.rebalanced(layout).cut(256, share)) for share in range(32)], [1.0] * 32, 0.0) == 8


def test_a_rank_that_becomes_slow_later_gives_rows_away():
    balance = LoadBalance(2, 24, [TWO])
    go_on(balance, [1.0, 0.5], 100)
    go_on(balance, [0.5, 1.0], 25 * WINDOW)
    assert balance.rebalanced(TWO).rows in ((8, 16), (9, 15), (7, 17))


def test_what_changes_of_shares_bring_shows_how_much_depends_on_rows():
    balance = LoadBalance(2, 24, [TWO])
    go_on(balance, [1.0, 0.5], 30, 10.0)
    assert balance.slope == pytest.approx(12 / 22, abs=0.1)
    assert balance.rebalanced(TWO).rows == (19, 5), "as quick as can be: 29 and 30 seconds"


def test_the_first_step_of_a_worker_says_nothing():
    balance = LoadBalance(2, 24, [TWO])
    assert not balance.record([(100.0, 12), (1.0, 12)])
    go_on(balance, [1.0, 1.0], 2 * WINDOW)
    assert balance.rebalanced(TWO) == Layout(2)


def test_one_slow_step_moves_few_rows():
    balance = LoadBalance(2, 24, [TWO])
    go_on(balance, [1.0, 1.0], 1 + WINDOW, noise=lambda step, rank: 50.0 if (step, rank) == (WINDOW, 1) else 1.0)
    assert min(len(balance.rebalanced(TWO).cut(24, share)) for share in (0, 1)) >= 7
    go_on(balance, [1.0, 1.0], 3 * WINDOW)
    assert balance.rebalanced(TWO).rows in ((), (12, 12), (13, 11))


def test_a_share_is_as_slow_as_its_slowest_rank():
    split, alone = Layout(2, tp=2, rows=MEASURED), Layout(4, rows=MEASURED)
    balance = LoadBalance(4, 24, [split, alone])
    for _ in range(1 + 6 * WINDOW):
        balance.record([(1.0, 6), (1.0, 6), (1.0, 6), (3.0, 6)])
    assert balance.rebalanced(split).rows == (18, 6)
    assert balance.rebalanced(alone).rows == (8, 7, 7, 2)
    assert balance.rebalanced(Layout(4, rows=(1, 2, 3, 4))).rows == (1, 2, 3, 4), "others stay as they are"


def test_a_rank_that_has_sampled_nothing_keeps_its_cost():
    balance = LoadBalance(3, 24, [Layout(3, rows=MEASURED)])
    for _ in range(1 + WINDOW):
        balance.record([(1.0, 8), (0.0, 0), (1.0, 8)])
    assert balance.costs == [1.0, 1.0, 1.0]
    for _ in range(WINDOW):
        balance.record([(0.0, 0)] * 3)
    assert balance.costs == [1.0, 1.0, 1.0]


@settings(max_examples=100)
@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20), st.integers(0, 60))
def test_every_share_has_rows_and_none_could_take_one_from_the_last_that_is_done(costs, more):
    count, shares = len(costs) + more, len(costs)
    rows, least, most = divide(count, costs), max(1, count // (4 * shares)), -(-4 * count // shares)
    assert sum(rows) == count
    assert least <= min(rows) <= max(rows) <= most
    last = max((share for share in range(shares) if rows[share] > least), default=None,
               key=lambda share: rows[share] * costs[share])
    assert last is None or all((rows[share] + 1) * costs[share] >= rows[last] * costs[last] * (1 - 1e-9)
                               for share in range(shares) if share != last and rows[share] < most)
    assert [len(Layout(shares, rows=rows).cut(count, share)) for share in range(shares)] == [*rows]


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
    assert other.rebalanced(TWO).rows == one.rebalanced(TWO).rows != ()
    drawn = [[loader.next().ids for loader in each] for each in (ours, theirs)]
    assert all(map(torch.equal, *drawn))
    assert torch.cat(drawn[0]).tolist() == [*range(24)]
    assert len(drawn[0][0]) > len(drawn[0][1]) > 0


def test_on_other_ranks_it_begins_with_equal_shares():
    one, three = LoadBalance(2, 24, [TWO]), LoadBalance(3, 24, [Layout(3, rows=MEASURED)])
    go_on(one, [1.0, 0.5], 1 + WINDOW)
    three.load_state_dict(one.state_dict())
    assert three.costs == [1.0] * 3
    assert loaders(LoadBalance(2, 24))[0].state_dict() == {"position": 0}, "without measured layouts nothing is saved"
