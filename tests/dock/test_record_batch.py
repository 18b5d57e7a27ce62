"""Rows as buffers: any rows of any batches come back as they were, nested raggedness included."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.batch import Batch, Ragged
from distflow.dock.storage import RecordBatch, pack, spans_of, tokens_of, unpack
from distflow.errors import ColumnError
from distflow.rpc.messages import write_parts

QUIET = settings(max_examples=60)
DTYPES = [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex128]


def random_batch(ids, dtype, seed):
    """A dense, a ragged and a text-like column for these rows."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (len(ids),), generator=generator)
    bits = torch.randint(0, 2, (int(lengths.sum()) * 3 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    dense = torch.randint(-9, 9, (len(ids), 2), generator=generator, dtype=torch.int32)
    return Batch(torch.tensor(ids, dtype=torch.int64),
                 {"dense": dense, "ragged": Ragged(bits.view(dtype).reshape(-1, 3), lengths)})


def joined(buffers):
    """Return a payload's parts as they arrive, [bytes] uint8."""
    wire = bytearray(sum(map(len, buffers)))
    write_parts(memoryview(wire), buffers)
    return torch.frombuffer(wire, dtype=torch.uint8)


def same(ours, theirs):
    def raw(tensor):
        return tensor.contiguous().flatten().view(torch.uint8).tolist()

    assert ours.ids.tolist() == theirs.ids.tolist()
    for name, column in theirs.columns.items():
        if isinstance(column, Ragged):
            assert ours[name].lengths.tolist() == column.lengths.tolist()
            assert ours[name].values.dtype == column.values.dtype
            assert raw(ours[name].values) == raw(column.values)
        else:
            assert raw(ours[name]) == raw(column)


@QUIET
@given(st.data(), st.sampled_from(DTYPES))
def test_any_rows_of_any_batches(data, dtype):
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    record_batches, batches, base, first = [], [], 0, 0
    for seed, size in enumerate(sizes):
        batches.append(random_batch(list(range(first, first + size)), dtype, seed))
        record_batches.append(RecordBatch(batches[-1], base))
        base, first = base + size + 1, first + size
    everything = Batch.concat(batches)
    chosen = data.draw(st.lists(st.integers(0, first - 1), unique=True))
    position_of = [records.base + local for records in record_batches for local in range(len(records.batch))]
    positions = numpy.array([position_of[row] for row in chosen], numpy.int64)
    spans = spans_of(positions, [records.base for records in record_batches], record_batches)
    if not chosen:
        assert spans == []
        return
    schema, buffers = pack(numpy.array(chosen), [(name, spans) for name in everything.columns])
    same(unpack(len(chosen), schema, joined(buffers)), everything.select(torch.tensor(chosen)))


def test_consecutive_rows_are_one_span():
    record_batches = [RecordBatch(random_batch(ids, torch.int64, 0), base)
                      for ids, base in (([0, 1, 2], 0), ([3, 4], 4))]
    spans = spans_of(numpy.array([0, 1, 2, 4, 5, 1]), [0, 4], record_batches)
    assert [(records.base, starts.tolist(), stops.tolist()) for records, starts, stops in spans] == [
        (0, [0], [3]), (4, [0], [2]), (0, [1], [2])]


def test_runs_of_one_batch_are_one_span():
    records = RecordBatch(random_batch(list(range(6)), torch.int64, 0), 10)
    (_, starts, stops), = spans_of(numpy.array([10, 12, 13, 15]), [10], [records])
    assert (starts.tolist(), stops.tolist()) == ([0, 2, 5], [1, 4, 6])


def test_what_arrives_is_a_view():
    batch = random_batch([0, 1, 2], torch.int64, 0)
    schema, buffers = pack(batch.ids.numpy(), [(name, [RecordBatch(batch).all_rows()]) for name in batch.columns])
    wire = joined(buffers)
    back = unpack(3, schema, wire)
    for part in (back.ids, back["dense"], back["ragged"].values):
        assert part.untyped_storage().data_ptr() == wire.untyped_storage().data_ptr()


def test_rows_of_different_form_do_not_mix():
    one, two = Batch(torch.tensor([0]), {"x": torch.zeros(1)}), Batch(torch.tensor([1]), {"x": torch.zeros(1, 2)})
    with pytest.raises(ColumnError, match="column `x` do not fit together"):
        pack(numpy.array([0, 1]), [("x", [RecordBatch(one).all_rows(), RecordBatch(two, 2).all_rows()])])


@pytest.mark.parametrize("schema", [
    [["x", 0, "float32", [], 5]], [["x", 0, "float32", [], -1]], [["x", 0, "float1", [], 4]],
    [["x", 1, "int64", [], 2]], [["x", 0, "float32", [], 1]],
])
def test_a_header_that_does_not_fit_is_refused(schema):
    wire = torch.frombuffer(bytearray(numpy.array([0, 1, -3, 5], numpy.int64).tobytes()), dtype=torch.uint8)
    with pytest.raises(ColumnError):
        unpack(2, schema, wire)


def test_tokens_are_the_longest_ragged_column_that_is_not_text():
    batch = Batch(torch.arange(2), {"text": Ragged(torch.zeros(9, dtype=torch.uint8), torch.tensor([9, 0])),
                                    "tokens": Ragged(torch.arange(5), torch.tensor([2, 3])),
                                    "short": Ragged(torch.arange(3), torch.tensor([3, 0])), "score": torch.zeros(2)})
    assert tokens_of(batch).tolist() == [3, 3]


def test_rows_of_turns_of_tokens():
    """Two rows of two turns, one of one, one of none; any of them can be asked for."""
    turns = Ragged(torch.arange(9), torch.tensor([1, 2, 3, 0, 3]))
    batch = Batch(torch.arange(4), {"turns": Ragged(turns, torch.tensor([2, 2, 0, 1]))})
    assert tokens_of(batch).tolist() == [3, 3, 0, 3]
    records = RecordBatch(batch)
    schema, buffers = pack(numpy.array([3, 0]), [("turns", spans_of(numpy.array([3, 0]), [0], [records]))])
    back = unpack(2, schema, joined(buffers))["turns"]
    assert back.lengths.tolist() == [1, 2]
    assert back.values.lengths.tolist() == [3, 1, 2]
    assert back.values.values.tolist() == [6, 7, 8, 0, 1, 2]
