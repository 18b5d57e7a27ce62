"""What a task's function returns becomes columns."""

from __future__ import annotations

import pytest
import torch

from distflow.data.batch import Ragged
from distflow.schema.errors import ColumnError
from distflow.schema.plan import Layout, Task
from workers.dag_worker import _as_columns

TASK = Task("node", "actor", "COMPUTE", "module:function", {}, (), ("a", "b", "c"), Layout(1))


def test_columns_do_not_keep_the_graph_that_they_come_from():
    weight = torch.ones(3, requires_grad=True)
    inner = Ragged(weight * 2, torch.tensor([1, 2]))
    columns = _as_columns(TASK, ((weight * 3)[:2], inner, Ragged(inner, torch.tensor([2, 0]))), 2)
    assert columns["a"].tolist() == [3.0, 3.0]
    values = [columns["a"], columns["b"].values, columns["c"].values.values]
    assert not any(tensor.requires_grad for tensor in values)
    assert columns["c"].values.lengths.tolist() == [1, 2]


@pytest.mark.parametrize(("result", "says"), [
    (torch.ones(2), "returned 1 columns; it declares a, b, c"),
    ((torch.ones(2), torch.ones(3), torch.ones(2)), "returned 3 rows of column `b` for 2 rows"),
    ((torch.ones(2), 0.5, torch.ones(2)), "returned float for column `b`"),
])
def test_what_is_no_column_is_refused(result, says):
    with pytest.raises(ColumnError, match=says):
        _as_columns(TASK, result, 2)
