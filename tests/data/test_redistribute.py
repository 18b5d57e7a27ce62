"""Routes: which bytes go where, and whether any leave their machine."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from distflow.data.batch import Batch, Ragged
from distflow.data.redistribute import PoolNotice, Route, RowNotices, ShareReceivers, agree_on_forms, announce
from distflow.errors import ColumnError
from distflow.plan import SHARES_OUTERMOST, STAGES_OUTERMOST, Layout

SHARES, RANKS = 3, 6


def read(*batches: Batch, payloads: Sequence[bytes] = ()) -> RowNotices:
    return RowNotices([announce(batch, PoolNotice(), payload)[0]
                       for batch, payload in zip(batches, payloads or [b""] * len(batches), strict=True)])


def receivers_of(*pairs: tuple[int, int]) -> ShareReceivers:
    """`pairs`: of a share and the rank that receives it."""
    return ShareReceivers(*map(np.array, zip(*pairs)))


def route_of(made: np.random.Generator) -> Route:
    """Rows of six ranks, some of which have none, to some of three shares; rows of `text` may be empty."""
    batches, first = [], 0
    for rows in made.integers(0, 4, RANKS):
        lengths = torch.from_numpy(made.integers(0, 5, rows))
        columns = {"text": Ragged(torch.zeros(int(lengths.sum()), dtype=torch.uint8), lengths)}
        batches.append(Batch(torch.arange(first, first + rows), columns))
        first += rows
    shares = made.choice([0, 2], first) if made.random() < 0.5 else made.integers(0, SHARES, first)
    notices = read(*batches)
    return Route(notices, agree_on_forms(notices), lambda ids: (np.arange(len(ids)), shares), SHARES)


@pytest.mark.parametrize("seed", range(40))
def test_bytes_and_crossings_are_those_of_the_rows_one_by_one(seed):
    made = np.random.default_rng(seed)
    route = route_of(made)
    traffic = np.zeros((RANKS, SHARES), dtype=int)
    for holder, share, size in zip(route.holder, route.share, route.sizes):
        traffic[holder, share] += size
    assert [route.sent(rank).tolist() for rank in range(RANKS)] == traffic.tolist()
    assert [route.received(share, RANKS).tolist() for share in range(SHARES)] == traffic.T.tolist()
    machines = made.integers(0, made.integers(1, 4), RANKS)
    shares = made.integers(0, SHARES, RANKS)
    places = [*{(share, machines[rank]): (int(share), rank) for rank, share in enumerate(shares)}.values()]
    far = np.array([[traffic[rank, share] * (machines[rank] != machines[receiver]) for share, receiver in places]
                    for rank in range(RANKS)])
    most = int(made.integers(1, 6))
    assert route.rounds(machines, receivers_of(*places), most) == -(-max(far.sum(0).max(), far.sum(1).max()) // most)


def rows_of(*ids: int, lengths: Sequence[int], other: Sequence[int] = ()) -> Batch:
    """Rows of two ragged columns, `a` and `c`, whose lengths may differ, and of a dense one."""
    one, two = (torch.tensor(each, dtype=torch.int64) for each in (lengths, other or lengths))
    return Batch(torch.tensor(ids, dtype=torch.int64), {
        "a": Ragged(torch.zeros(int(one.sum())), one), "b": torch.zeros(len(ids), 2),
        "c": Ragged(torch.zeros(int(two.sum()), dtype=torch.int32), two)})


def test_notices_are_read_as_they_were_written():
    """Of ranks whose columns share their lengths, or do not, or that have no rows."""
    whole = rows_of(4, 7, 9, lengths=[2, 0, 3])
    notices = read(whole, whole.slice(0, 0), rows_of(1, 2, lengths=[5, 1], other=[6, 8]), whole.slice(0, 1),
                   payloads=[b"", b"one", b"and", b"others"])
    assert notices.rows.tolist() == [3, 0, 2, 1]
    assert notices.ids.tolist() == [4, 7, 9, 1, 2, 4]
    assert notices.counts_of("a", 0).tolist() == [2, 0, 3, 5, 1, 2]
    assert notices.counts_of("c", 0).tolist() == [2, 0, 3, 6, 8, 2]
    assert notices.counts_of("b", 0).tolist() == [1] * 6
    assert notices.payloads() == [b"", b"one", b"and", b"others"]
    assert {*agree_on_forms(notices)} == {"a", "b", "c"}


def column(values: torch.Tensor, *lengths: int) -> Ragged:
    return Ragged(values, torch.tensor(lengths))


@pytest.mark.parametrize(("columns", "refused"), [
    ([column(torch.zeros(2), 2), column(torch.zeros(3), 3)], ""),
    ([column(torch.zeros(2), 2), column(torch.zeros(0, dtype=torch.int32), 0)], ""),
    ([column(torch.zeros(2), 2), column(torch.zeros(1, dtype=torch.int32), 1)],
     "rank 0 has ragged float32 [], rank 1 has ragged int32 []"),
    ([column(torch.zeros(0), 0), torch.zeros(1)], "rank 0 has ragged float32 [], rank 1 has float32 []"),
], ids=["alike", "one without elements", "types differ", "forms differ"])
def test_ranks_must_agree_on_the_form_of_a_column(columns, refused):
    for order in (columns,) if refused else (columns, columns[::-1]):
        notices = read(*[Batch(torch.tensor([rank]), {"x": column}) for rank, column in enumerate(order)])
        if not refused:
            assert str(agree_on_forms(notices)["x"]) == "ragged float32 []"
            continue
        with pytest.raises(ColumnError, match=re.escape(refused)):
            agree_on_forms(notices)


def test_ranks_must_have_the_same_columns():
    one = rows_of(1, lengths=[1])
    with pytest.raises(ColumnError, match="rank 0 and rank 2 do not have the same columns: only one has b"):
        agree_on_forms(read(one, one.slice(0, 0), one.only(["a", "c"])))


def test_rows_that_two_ranks_have_are_refused():
    notices = read(rows_of(1, 5, lengths=[1, 1]), rows_of(5, lengths=[1]))
    with pytest.raises(ColumnError, match=r"rows \[5\] of columns a, b, c exist twice, on rank 0 and rank 1"):
        Route(notices, agree_on_forms(notices), lambda ids: (np.arange(len(ids)), np.zeros(len(ids), np.int64)), 1)


@pytest.mark.parametrize("order", [SHARES_OUTERMOST, STAGES_OUTERMOST])
def test_a_share_has_a_receiver_on_each_of_its_machines(order):
    layout = Layout(2, first=1, tp=2, pp=2, order=order)
    found = ShareReceivers.of(layout, [0, 0, 0, 3, 3, 3, 6, 6, 6, 6])
    receivers = sorted(zip(found.shares.tolist(), found.ranks.tolist()))
    assert receivers == ([(0, 1), (0, 3), (1, 5), (1, 6)] if order == SHARES_OUTERMOST else
                     [(0, 1), (0, 5), (0, 6), (1, 3), (1, 7)])
