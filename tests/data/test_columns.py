"""Columns as bytes: any rows of any batches and any tensors come back as they were; what does not fit is refused."""

import msgpack
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distflow.data.batch import Batch, Ragged
from distflow.data.column_buffers import ReadRows, decode_batch, decode_tensors, gather, rows_of, tensor_entry
from distflow.data.columns import encode, lay_out, read_rows
from distflow.dock.storage import tokens_of
from distflow.errors import ColumnError
from distflow.rpc.messages import write_parts
from distflow.rpc.packing import tensor_at

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
    """Return rows of a batch, by default all, as their message has them: ids, schema and bytes."""
    rows = numpy.arange(len(batch)) if rows is None else rows
    schema, parts = encode({name: (extents.select(rows), memories) for name, (extents, memories) in
                            rows_of(batch).items()})
    return batch.ids[torch.from_numpy(rows)], msgpack.unpackb(msgpack.packb(schema)), joined(parts)


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
        ids, schema, wire = sent(batch)
        columns = {name: each.select(chosen[there] - int(batch.ids[0]))
                   for name, each in read_rows(len(ids), schema, wire).items()}
        parts.append(ReadRows(wire, columns, there))
    back = gather(torch.from_numpy(chosen), parts, lambda size: numpy.empty(size, numpy.uint8))
    same(back, everything.select(torch.from_numpy(chosen)))
    same(decode_batch(*sent(everything, chosen)), back)


def test_what_arrives_is_a_view():
    batch = random_batch([0, 1, 2], torch.int64, 0)
    ids, schema, wire = sent(batch)
    back = decode_batch(ids, schema, wire)
    for part in (back["dense"], back["ragged"].lengths, back["ragged"].values):
        assert wire.ctypes.data <= part.data_ptr() < wire.ctypes.data + len(wire)


def rows_in_memory(batch, there):
    ids, schema, wire = sent(batch)
    return ReadRows(wire, read_rows(len(ids), schema, wire), numpy.array(there))


def test_rows_of_different_form_do_not_mix():
    one, two = Batch(torch.tensor([0]), {"x": torch.zeros(1)}), Batch(torch.tensor([1]), {"x": torch.zeros(1, 2)})
    with pytest.raises(ColumnError, match="column `x` do not fit together"):
        gather(torch.arange(2), [rows_in_memory(one, [0]), rows_in_memory(two, [1])],
               lambda size: numpy.empty(size, numpy.uint8))


@pytest.mark.parametrize("change", [(0, -8), (0, 1 << 40), (1, -1), (1, 1 << 40)])
def test_rows_outside_of_the_memory_that_holds_them_are_refused(change):
    part = rows_in_memory(Batch(torch.arange(2), {"x": torch.arange(2)}), [0, 1])
    (part.columns["x"].begin, part.columns["x"].count)[change[0]][0, 1] = change[1]
    with pytest.raises(ColumnError, match="column `x`: a row of .* does not lie within both"):
        gather(torch.arange(2), [part], lambda size: numpy.empty(max(size, 0) % (1 << 20), numpy.uint8))


FLOATS, TOKENS = [0, "float32", [], 4], [1, "int64", [], 8]


@pytest.mark.parametrize(("form", "counts"), [
    (FLOATS, [5]), (FLOATS, [-1]), (FLOATS, [1]), (FLOATS, [2, 2]), (FLOATS, []), ([0, "float1", [], 4], [2]),
    ([0, "float32", [], -4], [2]), ([0, "float32", [], 8], [2]), ([0, "float32", [-1], 4], [2]),
    ([-1, "float32", [], 4], [2]), ([0, "save", [], 4], [2]), (TOKENS, [2, 2]), (TOKENS, [2, -3]),
    (TOKENS, [2, 1 << 40]), ([1, "int64", [0], 0], [2, (1 << 64) - 3]), ([2, "int64", [], 8], [2, 2, 2]),
])
def test_decoding_refuses_a_schema_that_does_not_fit(form, counts):
    wire = numpy.zeros(128, numpy.uint8)
    wire[:16].view(numpy.int64)[:] = -3, 5
    for bytes_ in (wire, wire[:64], wire[:0]):
        with pytest.raises(ColumnError):
            decode_batch(torch.arange(2), [["x", form, counts]], bytes_)


def test_reading_rows_refuses_other_lengths_than_were_announced():
    batch = Batch(torch.arange(2), {"x": Ragged(torch.arange(4), torch.tensor([1, 3]))})
    ids, schema, wire = sent(batch)
    wire[:8].view(numpy.int64)[:] = 2
    for read in (lambda: read_rows(2, schema, wire), lambda: decode_batch(ids, schema, wire)):
        with pytest.raises(ColumnError, match="4 elements, and lengths of 5"):
            read()
    with pytest.raises(ColumnError, match="2 rows, where 3 are expected"):
        read_rows(3, schema, wire)


def test_tensors_of_any_type_and_shape_come_back_as_views():
    tensors = {"a": torch.arange(5, dtype=torch.uint8), "b": torch.tensor(2.5), "c": torch.empty(0, 3),
               "d": torch.arange(32).bfloat16()}
    placed, size = lay_out(tensor_entry(name, each.dtype, each.shape) for name, each in tensors.items())
    buffer = torch.zeros(size, dtype=torch.uint8)
    for (_, (begin,)), tensor in zip(placed, tensors.values()):
        tensor_at(buffer, begin, tensor.shape, tensor.dtype).copy_(tensor)
    back = decode_tensors(msgpack.unpackb(msgpack.packb([entry for entry, _ in placed])), buffer)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
        assert back[name].untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    with pytest.raises(ColumnError, match=f"columns of {size} bytes came as {size - 64} bytes"):
        decode_tensors([entry for entry, _ in placed], buffer[64:])


def test_tokens_are_the_longest_ragged_column_that_is_not_text():
    batch = Batch(torch.arange(2), {"text": Ragged(torch.zeros(9, dtype=torch.uint8), torch.tensor([9, 0])),
                                    "tokens": Ragged(torch.arange(5), torch.tensor([2, 3])),
                                    "short": Ragged(torch.arange(3), torch.tensor([3, 0])), "score": torch.zeros(2)})
    ids, schema, wire = sent(batch)
    assert tokens_of(read_rows(len(ids), schema, wire), len(ids)).tolist() == [3, 3]


def test_rows_of_turns_of_tokens():
    """Two rows of two turns, one of one, one of none; any of them can be asked for."""
    turns = Ragged(torch.arange(9), torch.tensor([1, 2, 3, 0, 3]))
    batch = Batch(torch.arange(4), {"turns": Ragged(turns, torch.tensor([2, 2, 0, 1]))})
    ids, schema, wire = sent(batch)
    assert tokens_of(read_rows(len(ids), schema, wire), len(ids)).tolist() == [3, 3, 0, 3]
    back = decode_batch(*sent(batch, numpy.array([3, 0])))["turns"]
    assert back.lengths.tolist() == [1, 2]
    assert back.values.lengths.tolist() == [3, 1, 2]
    assert back.values.values.tolist() == [6, 7, 8, 0, 1, 2]
