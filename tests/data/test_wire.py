"""A batch survives the wire, whatever it holds; bytes that are not a whole batch are refused."""

import pickle

import pytest
import torch
from columns import batches, bits, tensor
from hypothesis import given, settings

from distflow.data.batch import Batch, Ragged, encode_text
from distflow.data.wire import from_wire, to_wire
from distflow.schema.errors import ColumnError

QUIET = settings(derandomize=True, deadline=None, max_examples=80)


@QUIET
@given(batches())
def test_every_batch_comes_back_bit_for_bit(batch):
    wire = to_wire(batch)
    assert wire.dtype == torch.uint8
    assert len(wire) % 8 == 0
    back = from_wire(wire)
    assert back.ids.tolist() == batch.ids.tolist()
    assert list(back.columns) == list(batch.columns)
    for name in batch.columns:
        assert bits(back[name]) == bits(batch[name])


@pytest.mark.parametrize("rows", [31, 32, 33])
def test_a_header_may_end_in_any_byte(rows):
    """32 is a space: a header that was padded with spaces lost its last number here."""
    batch = Batch(torch.arange(rows), {"a": torch.arange(rows)})
    assert from_wire(to_wire(batch))["a"].tolist() == list(range(rows))


def test_what_arrives_is_a_view_of_the_wire():
    wire = to_wire(Batch(torch.arange(4), {"a": torch.arange(4.0), "b": encode_text(["x", "yz", "", "ü"])}))
    back = from_wire(wire)
    for part in (back.ids, back["a"], back["b"].values, back["b"].lengths):
        assert part.untyped_storage().data_ptr() == wire.untyped_storage().data_ptr()


def test_several_batches_in_one_buffer():
    """As they arrive from several ranks: each at its own offset."""
    parts = [to_wire(Batch(torch.arange(rows), {"a": tensor([rows, 3], torch.complex128, rows)})) for rows in (1, 0, 5)]
    received = torch.cat(parts).split([len(part) for part in parts])
    for rows, part in zip((1, 0, 5), received):
        assert bits(from_wire(part)["a"]) == bits(tensor([rows, 3], torch.complex128, rows))


def test_transposed_and_trained_tensors_are_sent_as_they_look():
    batch = Batch(torch.arange(3), {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.ones(3, requires_grad=True) * 2})
    back = from_wire(to_wire(batch))
    assert back["a"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert back["b"].tolist() == [2.0, 2.0, 2.0]


def sample() -> torch.Tensor:
    tokens = Ragged(torch.arange(5), torch.tensor([2, 0, 3]))
    return to_wire(Batch(torch.arange(3), {"tokens": tokens, "x": torch.ones(3)}))


def test_a_wire_that_was_cut_anywhere_is_refused():
    wire = sample()
    for length in range(len(wire)):
        with pytest.raises(ColumnError, match=r"not a batch|ends within column|came as"):
            from_wire(wire[:length])


def test_a_header_with_any_byte_changed_is_refused():
    wire = sample()
    header = 16 + int.from_bytes(wire[4:8].numpy().tobytes(), "little")
    for place in [*range(12), *range(16, header)]:
        broken = wire.clone()
        broken[place] ^= 0x10
        with pytest.raises(ColumnError, match="not a batch"):
            from_wire(broken)


@pytest.mark.parametrize(("lengths", "what"), [([2, 1, 3], "add up to 6, but it has 5 values"),
                                               ([7, -5, 3], "negative length")])
def test_lengths_that_were_changed_are_refused(lengths, what):
    wire = sample()
    header = 16 + int.from_bytes(wire[4:8].numpy().tobytes(), "little")
    start = header + -header % 8 + 3 * 8
    assert wire[start : start + 24].view(torch.int64).tolist() == [2, 0, 3]
    wire[start : start + 24].view(torch.int64)[:] = torch.tensor(lengths)
    with pytest.raises(ColumnError, match=what):
        from_wire(wire)


def test_more_bytes_than_a_batch_has_are_refused():
    with pytest.raises(ColumnError, match="came as 168 bytes"):
        from_wire(torch.cat([sample(), torch.zeros(8, dtype=torch.uint8)]))


def test_nothing_is_unpickled():
    class Trap:
        def __reduce__(self):
            return pytest.fail, ("the wire ran code",)

    raw = torch.frombuffer(bytearray(pickle.dumps(Trap())), dtype=torch.uint8)
    with pytest.raises(ColumnError, match="not a batch"):
        from_wire(raw)
