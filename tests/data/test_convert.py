"""Batches as padded tensors and TensorDicts, and back, bit for bit."""

import pytest
import torch
from columns import batches, bits
from hypothesis import given, settings

from distflow.data.batch import Batch, Ragged, levels
from distflow.errors import ColumnError

QUIET = settings(max_examples=60)


def flat(batch: Batch) -> Batch:
    return batch.only(name for name, column in batch.columns.items() if len(levels(column)[0]) < 2)


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
    tokens = batch.to_tensordict()["tokens"]
    assert tokens.values().data_ptr() == batch["tokens"].values.data_ptr()
    assert tokens.to_padded_tensor(9).tolist() == [[0, 1, 9], [0, 1, 2]]
    with pytest.raises(ColumnError, match="`turns` is nested"):
        Batch(torch.arange(1), {"turns": Ragged.from_rows([batch["tokens"]])}).to_tensordict()
