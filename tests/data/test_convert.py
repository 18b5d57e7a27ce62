"""Batches as padded tensors, TensorDicts and Arrow tables, and back, bit for bit."""

import io

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from columns import batches, bits
from hypothesis import given, settings

from distflow.data.batch import Batch, Ragged, levels
from distflow.errors import ColumnError

QUIET = settings(max_examples=60)


def no_empty_shapes(batch: Batch) -> Batch:
    """Without elements that have no bytes: of those Arrow keeps no count."""
    return batch.only(name for name, column in batch.columns.items() if 0 not in levels(column)[1].shape[1:])


def flat(batch: Batch) -> Batch:
    return batch.only(name for name, column in batch.columns.items() if len(levels(column)[0]) < 2)


def same(one: Batch, other: Batch) -> bool:
    return one.ids.tolist() == other.ids.tolist() and list(one.columns) == list(other.columns) and all(
        bits(one[name]) == bits(other[name]) for name in one.columns)


@QUIET
@given(batches())
def test_arrow_and_back(batch):
    batch = no_empty_shapes(batch)
    batch = batch.only(name for name, column in batch.columns.items() if not levels(column)[1].is_complex())
    table = batch.to_arrow()
    assert table.num_rows == len(batch)
    assert same(Batch.from_arrow(table), batch)


def test_parquet_and_back():
    rows = [Ragged.from_rows([torch.arange(2), torch.arange(3)]), Ragged.from_rows([torch.arange(1)])]
    turns = Ragged.from_rows(rows)
    batch = Batch(torch.tensor([3, 5]), {"turns": turns, "image": torch.arange(12.0).bfloat16().view(2, 2, 3)})
    file = io.BytesIO()
    pyarrow.parquet.write_table(batch.to_arrow(), file)
    assert same(Batch.from_arrow(pyarrow.parquet.read_table(file)), batch)


def test_a_slice_of_a_table():
    batch = Batch(torch.arange(4), {"tokens": Ragged.from_rows([torch.arange(row) for row in range(4)])})
    assert same(Batch.from_arrow(batch.to_arrow().slice(1, 2)), batch.slice(1, 3))


@QUIET
@given(batches())
def test_padded_and_back(batch):
    batch = flat(batch)
    back = Batch.from_padded(batch.to_padded())
    assert back.ids.tolist() == batch.ids.tolist()
    for name in batch.columns:
        assert bits(back[name]) == bits(batch[name])


@QUIET
@given(batches())
def test_tensordict_and_back(batch):
    batch = flat(batch)
    rows = batch.to_tensordict()
    assert rows.batch_size == torch.Size([len(batch)])
    back = Batch.from_tensordict(rows)
    for name in batch.columns:
        assert bits(back[name]) == bits(batch[name])


def test_a_tensordict_shares_memory():
    batch = Batch(torch.arange(2), {"tokens": Ragged.from_rows([torch.arange(2), torch.arange(3)])})
    assert batch.to_tensordict()["tokens"].values().data_ptr() == batch["tokens"].values.data_ptr()
    with pytest.raises(ColumnError, match="`turns` is nested"):
        Batch(torch.arange(1), {"turns": Ragged.from_rows([batch["tokens"]])}).to_tensordict()


@pytest.mark.parametrize(("values", "what"), [(pa.array([1, None]), "1 nulls"), (pa.array(["a", "b"]), "type string")])
def test_what_no_tensor_holds_is_refused(values, what):
    with pytest.raises(ColumnError, match=what):
        Batch.from_arrow(pa.table({"a": values}))
