"""Rows as buffers: any rows of any batches come back as they were, nested raggedness included."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.batch import Batch, Ragged
from distflow.dock.extents import Extents, read_payload
from distflow.dock.record_batch import ReadRows, RecordBatch, gather, unpack
from distflow.dock.storage import tokens_of
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
    wire = numpy.empty(sum(map(len, buffers)), numpy.uint8)
    write_parts(wire.data, buffers)
    return wire


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


def sent(batch, rows=None):
    """Return rows of a batch as their message has them."""
    schema, parts = RecordBatch(batch).pack(rows)
    return len(batch) if rows is None else len(rows), schema, joined(parts)


@QUIET
@given(st.data(), st.sampled_from(DTYPES))
def test_any_rows_of_any_batches(data, dtype):
    """Rows of several messages in any order, read from where they lie, and those of one sent again."""
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    batches = [random_batch(list(range(sum(sizes[:at]), sum(sizes[: at + 1]))), dtype, at) for at in range(len(sizes))]
    everything = Batch.concat(batches)
    chosen = numpy.array(data.draw(st.lists(st.integers(0, len(everything) - 1), unique=True, min_size=1)), numpy.int64)
    parts = []
    for batch in batches:
        there = numpy.flatnonzero(numpy.isin(chosen, batch.ids.numpy()))
        rows, schema, wire = sent(batch)
        columns = {name: Extents(each.form, *(part[:, chosen[there] - int(batch.ids[0])] for part in each[1:]))
                   for name, each in read_payload(rows, schema, wire).items()}
        parts.append(ReadRows(wire, columns, there))
    back = gather(torch.from_numpy(chosen), parts, lambda size: numpy.empty(size, numpy.uint8))
    same(back, everything.select(torch.from_numpy(chosen)))
    same(unpack(*sent(everything, chosen)), back)


def test_what_arrives_is_a_view():
    batch = random_batch([0, 1, 2], torch.int64, 0)
    rows, schema, wire = sent(batch)
    back = unpack(rows, schema, wire)
    for part in (back.ids, back["dense"], back["ragged"].values):
        assert wire.ctypes.data <= part.data_ptr() < wire.ctypes.data + len(wire)


def read_rows(batch, there):
    rows, schema, wire = sent(batch)
    return ReadRows(wire, read_payload(rows, schema, wire), numpy.array(there))


def test_rows_of_different_form_do_not_mix():
    one, two = Batch(torch.tensor([0]), {"x": torch.zeros(1)}), Batch(torch.tensor([1]), {"x": torch.zeros(1, 2)})
    with pytest.raises(ColumnError, match="column `x` do not fit together"):
        gather(torch.arange(2), [read_rows(one, [0]), read_rows(two, [1])], lambda size: numpy.empty(size, numpy.uint8))


@pytest.mark.parametrize("change", [(0, -8), (0, 1 << 40), (1, -1), (1, 1 << 40)])
def test_rows_outside_of_the_memory_that_holds_them_are_refused(change):
    part = read_rows(Batch(torch.arange(2), {"x": torch.arange(2)}), [0, 1])
    (part.columns["x"].begin, part.columns["x"].count)[change[0]][0, 1] = change[1]
    with pytest.raises(ColumnError, match="column `x`: a row of .* does not lie within both"):
        gather(torch.arange(2), [part], lambda size: numpy.empty(max(size, 0) % (1 << 20), numpy.uint8))


@pytest.mark.parametrize("schema", [
    [["x", 0, "float32", [], 4, 5]], [["x", 0, "float32", [], 4, -1]], [["x", 0, "float1", [], 8, 2]],
    [["x", 1, "int64", [], 8, 2]], [["x", 0, "float32", [], 4, 1]], [["x", 0, "float32", [], -4, 2]],
    [["x", 0, "float32", [], 8, 2]], [["x", 0, "float32", [-1], 8, 2]],
])
def test_a_header_that_does_not_fit_is_refused(schema):
    wire = numpy.array([0, 1, -3, 5], numpy.int64).view(numpy.uint8)
    with pytest.raises(ColumnError):
        unpack(2, schema, wire)


def test_tokens_are_the_longest_ragged_column_that_is_not_text():
    batch = Batch(torch.arange(2), {"text": Ragged(torch.zeros(9, dtype=torch.uint8), torch.tensor([9, 0])),
                                    "tokens": Ragged(torch.arange(5), torch.tensor([2, 3])),
                                    "short": Ragged(torch.arange(3), torch.tensor([3, 0])), "score": torch.zeros(2)})
    rows, schema, wire = sent(batch)
    assert tokens_of(read_payload(rows, schema, wire), rows).tolist() == [3, 3]


def test_rows_of_turns_of_tokens():
    """Two rows of two turns, one of one, one of none; any of them can be asked for."""
    turns = Ragged(torch.arange(9), torch.tensor([1, 2, 3, 0, 3]))
    batch = Batch(torch.arange(4), {"turns": Ragged(turns, torch.tensor([2, 2, 0, 1]))})
    rows, schema, wire = sent(batch)
    assert tokens_of(read_payload(rows, schema, wire), rows).tolist() == [3, 3, 0, 3]
    back = unpack(*sent(batch, numpy.array([3, 0])))["turns"]
    assert back.lengths.tolist() == [1, 2]
    assert back.values.lengths.tolist() == [3, 1, 2]
    assert back.values.values.tolist() == [6, 7, 8, 0, 1, 2]
