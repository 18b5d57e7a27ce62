"""A shard stores rows, drops repeated ones, and removes committed ones."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.batch import Batch, Ragged
from distflow.dock import DockError
from distflow.dock import storage as module
from distflow.dock.storage import StorageShard, unpack
from distflow.errors import ColumnError
from distflow.rpc.messages import write_parts

ALL = frozenset({"reward", "update"})


def tokens(ids, scale=1):
    """Row i has i % 4 tokens, each i · scale."""
    return Batch(torch.tensor(ids, dtype=torch.int64),
                 {"tokens": Ragged.from_rows([torch.full((row % 4,), row * scale) for row in ids])})


def read(shard, ids, names=("tokens",)):
    schema, buffers = shard.read(numpy.array(ids, numpy.int64), names)
    wire = bytearray(sum(map(len, buffers)))
    write_parts(memoryview(wire), buffers)
    return unpack(len(ids), schema, torch.frombuffer(wire, dtype=torch.uint8))


def test_columns_of_several_puts_come_together():
    shard = StorageShard()
    shard.put(tokens([1, 2, 3]))
    shard.put(Batch(torch.tensor([3, 1]), {"rewards": torch.tensor([0.3, 0.1])}))
    back = read(shard, [3, 1], ("rewards", "tokens"))
    assert back["rewards"].tolist() == pytest.approx([0.3, 0.1])
    assert [row.tolist() for row in back["tokens"].rows] == [[3, 3, 3], [1]]


def test_a_version_stays_unless_it_is_given_again():
    shard = StorageShard()
    shard.put(tokens([5, 6]), numpy.array([1, 2]))
    shard.put(Batch(torch.tensor([6]), {"rewards": torch.ones(1)}), numpy.array([3]))
    shard.put(Batch(torch.tensor([5]), {"rewards": torch.ones(1)}))
    assert shard.table([5, 6]).T.tolist() == [[5, 1, 1, -1], [6, 2, 3, -1]]


def test_a_row_that_comes_again_is_dropped_and_counted():
    shard = StorageShard()
    shard.put(tokens([1, 2]))
    assert shard.put(tokens([2, 3], scale=100)).tolist() == [3]
    assert read(shard, [2])["tokens"].values.tolist() == [2, 2]
    shard.retire("update", [1], ALL)
    shard.retire("reward", [1], ALL)
    assert shard.put(tokens([1])).tolist() == []


def test_columns_of_two_attempts_do_not_mix():
    shard = StorageShard()
    shard.put(tokens([1]))
    with pytest.raises(DockError, match="must be put together"):
        shard.put(tokens([1]).with_columns({"logprobs": torch.zeros(1)}))
    with pytest.raises(DockError, match="a row twice"):
        shard.put(tokens([4, 4]))


def test_what_is_missing_is_named():
    shard = StorageShard()
    shard.put(tokens([1, 2]))
    with pytest.raises(ColumnError, match=r"rows \[1, 2\] .* have no column `rewards` yet. They have: tokens"):
        read(shard, [1, 2], ["rewards"])
    with pytest.raises(ColumnError, match=r"never seen rows \[9\]"):
        read(shard, [1, 9])
    for consumer in ALL:
        shard.retire(consumer, [1], ALL)
    with pytest.raises(ColumnError, match="have left shard 0"):
        read(shard, [1])


def test_rows_of_another_shard_are_refused():
    with pytest.raises(DockError, match="row 3 does not live in shard 0 of 2"):
        StorageShard(0, 2).put(tokens([2, 3]))


def test_a_group_comes_whole_and_of_one_producer():
    shard = StorageShard(1, 2, group_size=3)
    with pytest.raises(DockError, match="of rows 3 to 5, which are one group, only 2 came"):
        shard.put(tokens([3, 5]))
    assert shard.put(tokens([4, 3, 5, 9, 10, 11])).tolist() == [4, 3, 5, 9, 10, 11]
    assert shard.put(tokens([3, 4, 5, 15, 16, 17], scale=100)).tolist() == [15, 16, 17]
    assert read(shard, [3, 4, 5])["tokens"].values.tolist() == [3] * 3 + [5]
    shard.put(tokens([21]), turn=0)
    for consumer in ALL:
        shard.retire(consumer, [9, 10, 11, 3, 4, 5], ALL)
    assert shard.gone.ranges == [(0, 6)], "dense, though every other group lives elsewhere"
    with pytest.raises(DockError, match="row 6 does not live in shard 1 of 2"):
        shard.put(tokens([6, 7, 8]))


def test_a_saved_turn_replaces_the_one_before_and_a_finished_row_both():
    shard = StorageShard()
    shard.put(tokens([1, 2]), turn=0)
    shard.put(tokens([1], scale=10), turn=1)
    assert shard.put(tokens([1], scale=99), turn=1).tolist() == [], "another attempt at the same turn"
    ids, turns, schema, buffers = shard.saved(numpy.array([2, 1, 5]))
    wire = torch.frombuffer(bytearray(b"".join(buffers)), dtype=torch.uint8)
    assert (ids.tolist(), turns.tolist()) == ([2, 1], [0, 1])
    assert [row.tolist() for row in unpack(2, schema, wire)["tokens"].rows] == [[2, 2], [10]]
    shard.put(tokens([1]))
    assert shard.saved(numpy.array([1, 2]))[0].tolist() == [2]
    assert shard.put(tokens([1]), turn=5).tolist() == []
    assert len(shard.batches) == 2


def test_what_was_committed_has_no_saved_turn_and_gets_none():
    """Its producer may have put the turn late; the row itself stays for other consumers."""
    shard = StorageShard()
    shard.put(Batch(torch.tensor([1, 2]), {"partial": torch.ones(2)}), turn=0)
    shard.put(tokens([1, 2]))
    assert shard.saved(numpy.array([1, 2]))[0].tolist() == [1, 2], "it is not known to be what the turn becomes"
    shard.retire("rollout", [1, 2], frozenset({"rollout", "trainer"}))
    assert shard.put(Batch(torch.tensor([1]), {"partial": torch.ones(1)}), turn=1).tolist() == []
    assert shard.saved(numpy.array([1, 2]))[0].tolist() == []
    assert len(shard.batches) == 1
    assert read(shard, [1, 2])["tokens"].lengths.tolist() == [1, 2]


def test_a_column_that_others_make_meanwhile_does_not_end_a_saved_turn():
    shard = StorageShard()
    shard.put(Batch(torch.tensor([1]), {"prompt": torch.tensor([1])}))
    shard.put(tokens([1]), turn=3)
    shard.put(Batch(torch.tensor([1]), {"difficulty": torch.ones(1)}))
    assert shard.saved(numpy.array([1]))[1].tolist() == [3]
    shard.put(tokens([1]))
    assert shard.table([1]).T.tolist() == [[1, 1, 0, -1]]


def test_rows_without_columns_are_refused():
    """Nothing would ever let go of them."""
    with pytest.raises(DockError, match="without columns"):
        StorageShard().put(Batch(torch.tensor([1])))


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
            shard.put(tokens(new), turn=0)
            shard.put(tokens(new))
            shard.put(Batch(torch.tensor(new), {"x": torch.tensor(new) * 2}))
            there |= set(new)
            gone = data.draw(st.sets(st.sampled_from(sorted(there)))) if there else set()
            for consumer in ALL:
                shard.retire(consumer, gone, ALL)
            there -= gone
            if there:
                asked = data.draw(st.permutations(sorted(there)))
                back = read(shard, asked, ("x", "tokens"))
                assert back["x"].tolist() == [2 * row for row in asked]
                assert [row.tolist() for row in back["tokens"].rows] == [[row] * (row % 4) for row in asked]
        for consumer in ALL:
            shard.retire(consumer, there, ALL)
        assert (len(shard.batches), shard.nbytes, len(shard.rows)) == (0, 0, 0)
        assert shard.gone.ranges == [(0, base)]
    finally:
        module._COMPACT_FROM = before
