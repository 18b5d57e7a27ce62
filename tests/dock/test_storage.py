"""A shard stores rows, drops repeated ones, and removes committed ones."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.batch import Batch, Ragged
from distflow.data.column_buffers import decode_batch, rows_of
from distflow.data.columns import encode
from distflow.dock import DockError
from distflow.dock import storage as module
from distflow.dock.storage import StorageShard, pack
from distflow.errors import ColumnError
from distflow.rpc.messages import write_parts
from distflow.rpc.shared_heap import SharedHeap

ALL = frozenset({"reward", "update"})


def tokens(ids, scale=1):
    """Row i has i % 4 tokens, each i · scale."""
    return Batch(torch.tensor(ids, dtype=torch.int64),
                 {"tokens": Ragged.from_rows([torch.full((row % 4,), row * scale) for row in ids])})


def put(shard, batch, versions=None, turn=None):
    """Put a batch as its message is received."""
    schema, parts = encode(rows_of(batch))
    payload = shard.heap.take(sum(map(len, parts)))
    write_parts(payload.data, parts)
    return shard.put(batch.ids.numpy(), schema, payload, versions, turn)


def retire(shard, consumer, ids):
    shard.retire(consumer, numpy.array([*ids], numpy.int64), ALL)


def sent(shard, ids, columns):
    schema, parts = pack(columns, shard.heap.memory)
    wire = numpy.empty(sum(map(len, parts)), numpy.uint8)
    write_parts(wire.data, parts)
    return decode_batch(torch.from_numpy(ids), schema, wire)


def read(shard, ids, names=("tokens",)):
    ids = numpy.array(ids, numpy.int64)
    return sent(shard, ids, shard.read(ids, names)[0])


def saved(shard, ids):
    return shard.read_saved(numpy.array(ids))[:2]


def test_a_version_stays_unless_it_is_given_again():
    shard = StorageShard()
    put(shard, tokens([5, 6]), numpy.array([1, 2]))
    put(shard, Batch(torch.tensor([6]), {"rewards": torch.ones(1)}), numpy.array([3]))
    put(shard, Batch(torch.tensor([5]), {"rewards": torch.ones(1)}))
    assert shard.table(numpy.array([5, 6])).T.tolist() == [[5, 1, 1, -1], [6, 2, 3, -1]]


def test_a_row_that_comes_again_is_dropped_and_counted():
    shard = StorageShard()
    put(shard, tokens([1, 2]))
    assert put(shard, tokens([2, 3], scale=100)).tolist() == [3]
    assert read(shard, [2])["tokens"].values.tolist() == [2, 2]
    retire(shard, "update", [1])
    retire(shard, "reward", [1])
    assert put(shard, tokens([1])).tolist() == []


def test_a_put_that_is_not_whole_is_refused():
    shard = StorageShard()
    put(shard, tokens([1]))
    with pytest.raises(DockError, match="must be put together"):  # or columns of two attempts would mix
        put(shard, tokens([1]).with_columns({"logprobs": torch.zeros(1)}))
    with pytest.raises(DockError, match="a row twice"):
        put(shard, tokens([4, 4]))
    with pytest.raises(DockError, match="without columns"):  # nothing would ever let go of them
        put(shard, Batch(torch.tensor([2])))


def test_what_is_missing_is_named():
    shard = StorageShard()
    put(shard, tokens([1, 2]))
    with pytest.raises(ColumnError, match=r"rows \[1, 2\] .* have no column `rewards` yet. They have: tokens"):
        read(shard, [1, 2], ["rewards"])
    with pytest.raises(ColumnError, match=r"never seen rows \[9\]"):
        read(shard, [1, 9])
    for consumer in ALL:
        retire(shard, consumer, [1])
    with pytest.raises(ColumnError, match="have left shard 0"):
        read(shard, [1])


def test_a_group_comes_whole_and_of_one_producer():
    shard = StorageShard(1, 2, group_size=3)
    with pytest.raises(DockError, match="of rows 3 to 5, which are one group, only 2 came"):
        put(shard, tokens([3, 5]))
    assert put(shard, tokens([4, 3, 5, 9, 10, 11])).tolist() == [4, 3, 5, 9, 10, 11]
    assert put(shard, tokens([3, 4, 5, 15, 16, 17], scale=100)).tolist() == [15, 16, 17]
    assert read(shard, [3, 4, 5])["tokens"].values.tolist() == [3] * 3 + [5]
    put(shard, tokens([21]), turn=0)
    for consumer in ALL:
        retire(shard, consumer, [9, 10, 11, 3, 4, 5])
    assert shard.gone.ranges == [(0, 6)], "dense, though every other group lives elsewhere"
    with pytest.raises(DockError, match="row 6 does not live in shard 1 of 2"):
        put(shard, tokens([6, 7, 8]))


def test_a_saved_turn_replaces_the_one_before_and_a_finished_row_both():
    shard = StorageShard()
    put(shard, tokens([1, 2]), turn=0)
    put(shard, tokens([1], scale=10), turn=1)
    assert put(shard, tokens([1], scale=99), turn=1).tolist() == [], "another attempt at the same turn"
    ids, turns, columns, _ = shard.read_saved(numpy.array([2, 1, 5]))
    assert (ids.tolist(), turns.tolist()) == ([2, 1], [0, 1])
    assert [row.tolist() for row in sent(shard, ids, columns)["tokens"].rows] == [[2, 2], [10]]
    put(shard, tokens([1]))
    assert saved(shard, [1, 2])[0].tolist() == [2]
    assert put(shard, tokens([1]), turn=5).tolist() == []
    assert len(shard.batches) == 2


def test_what_was_committed_has_no_saved_turn_and_gets_none():
    """Its producer may have put the turn late; the row itself stays for other consumers."""
    shard = StorageShard()
    put(shard, Batch(torch.tensor([1, 2]), {"partial": torch.ones(2)}), turn=0)
    put(shard, tokens([1, 2]))
    assert saved(shard, [1, 2])[0].tolist() == [1, 2], "it is not known to be what the turn becomes"
    shard.retire("rollout", numpy.array([1, 2]), frozenset({"rollout", "trainer"}))
    assert put(shard, Batch(torch.tensor([1]), {"partial": torch.ones(1)}), turn=1).tolist() == []
    assert saved(shard, [1, 2])[0].tolist() == []
    assert len(shard.batches) == 1
    assert read(shard, [1, 2])["tokens"].lengths.tolist() == [1, 2]


def test_a_column_that_others_make_meanwhile_does_not_end_a_saved_turn():
    shard = StorageShard()
    put(shard, Batch(torch.tensor([1]), {"prompt": torch.tensor([1])}))
    put(shard, tokens([1]), turn=3)
    put(shard, Batch(torch.tensor([1]), {"difficulty": torch.ones(1)}))
    assert saved(shard, [1])[1].tolist() == [3]
    put(shard, tokens([1]))
    assert shard.table(numpy.array([1])).T.tolist() == [[1, 1, 0, -1]]


@settings(max_examples=60)
@given(st.data())
def test_whatever_leaves_the_rest_stays_whole(data):
    """Any puts and removals, with batches copied as soon as half of their rows are gone."""
    before, module._COMPACT_FROM = module._COMPACT_FROM, 0
    try:
        shard, there, base = StorageShard(), set(), 0
        for _ in range(data.draw(st.integers(1, 5))):
            new = list(range(base, base + data.draw(st.integers(1, 8))))
            base += len(new)
            put(shard, tokens(new), turn=0)
            put(shard, tokens(new))
            put(shard, Batch(torch.tensor(new), {"x": torch.tensor(new) * 2}))
            there |= set(new)
            gone = data.draw(st.sets(st.sampled_from(sorted(there)))) if there else set()
            for consumer in ALL:
                retire(shard, consumer, gone)
            there -= gone
            if there:
                asked = data.draw(st.permutations(sorted(there)))
                back = read(shard, asked, ("x", "tokens"))
                assert back["x"].tolist() == [2 * row for row in asked]
                assert [row.tolist() for row in back["tokens"].rows] == [[row] * (row % 4) for row in asked]
        for consumer in ALL:
            retire(shard, consumer, there)
        assert (len(shard.batches), shard.nbytes, len(shard.rows)) == (0, 0, 0)
        assert shard.gone.ranges == [(0, base)]
    finally:
        module._COMPACT_FROM = before


def test_a_put_is_whole_where_there_is_no_room_to_compact():
    """Rows of an earlier turn are copied once there is room."""
    row, rows = 128 << 10, torch.arange(4)
    shard = StorageShard(heap=SharedHeap(size=7 * row + (8 << 10)))

    def turn(ids, number):
        return put(shard, Batch(ids, {"tokens": torch.full((len(ids), row // 8), number)}), turn=number).tolist()

    def stored():
        ids, turns, columns, _ = shard.read_saved(rows.numpy())
        assert sent(shard, ids, columns)["tokens"][:, 0].tolist() == turns.tolist()
        return turns.tolist()

    assert turn(rows, 1) == [0, 1, 2, 3]
    assert turn(rows[:3], 2) == [0, 1, 2]
    assert stored() == [2, 2, 2, 1]
    assert shard.nbytes >= 7 * row
    for consumer in ALL:
        retire(shard, consumer, range(3))
    retire(shard, "update", [])
    assert row <= shard.nbytes <= shard.heap.taken() < row + 128
    assert stored() == [1]
